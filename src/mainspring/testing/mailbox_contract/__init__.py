"""The contract of a mailbox, as behaviours that any backend can be run against, your own included.

Everywhere, without pytest::

    report = await mailbox_contract.run(lambda name, *, body=None, reply=None: MyMailbox(name, body=body, reply=reply))
    print(report)
    assert report.ok

With pytest, one test for each behaviour::

    @mailbox_contract.parametrize
    async def test_contract(behaviour, virtual_clock):
        await behaviour(MyMailbox)

The factory is called with a name and the types of bodies and replies, and returns an unopened mailbox; mailboxes that it
makes with other names stand on the same store. :class:`Backend` says more about it. In virtual time (``run_virtual``, the
fixture ``virtual_clock``) waiting costs nothing and instants are checked exactly; in real time the same behaviours run with
short leases. What a backend cannot do, by its ``Capabilities``, is skipped, and nothing else is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from mainspring.testing.mailbox_contract import (
    bodies,
    counting,
    dead_letters,
    leases,
    life_cycle,
    receiving,
    requests,
    sending,
    settling,
)
from mainspring.testing.mailbox_contract.harness import (
    Backend,
    Behaviour,
    ContractError,
    Factory,
    Harness,
    Report,
    as_backend,
    behaviours_of,
    run_all,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["Backend", "Behaviour", "ContractError", "Harness", "Report", "behaviours", "parametrize", "run"]

F = TypeVar("F", bound="Callable[..., object]")

_MODULES = (life_cycle, sending, receiving, leases, settling, dead_letters, requests, bodies, counting)


def behaviours() -> list[Behaviour]:
    """All behaviours of the contract. Each has a ``name``, the ``claim`` it checks, and the capabilities it ``needs``."""
    return [found for module in _MODULES for found in behaviours_of(module)]


async def run(
    backend: Backend | Factory,
    *,
    only: Iterable[str] | None = None,
    exclude: Iterable[str] = (),
    concurrency: int = 1,
) -> Report:
    """Run the behaviours against a backend on the running event loop, and report.

    :param only: the names of those to run (a name that does not exist is a ``ConfigError``).
    :param exclude: names of those to leave out; the report counts them as skipped without a reason, and is not ``ok``.
    :param concurrency: how many run at once, each with mailboxes of its own names. More than one saves time on a real
        clock, where waiting is most of what they do.

    Cancelled, it leaves the mailboxes of the behaviours under way closed but not emptied.
    """
    return await run_all(as_backend(backend), behaviours(), only=only, exclude=exclude, concurrency=concurrency)


def parametrize(test: F) -> F:
    """Decorate a pytest test so that it runs once for each behaviour, as its argument ``behaviour``.

    ``await behaviour(backend_or_factory)`` in the test checks it; a missing capability skips the test.
    """
    import pytest

    cases = [pytest.param(behaviour, id=behaviour.name) for behaviour in behaviours()]
    decorated: F = pytest.mark.parametrize("behaviour", cases)(test)
    return decorated
