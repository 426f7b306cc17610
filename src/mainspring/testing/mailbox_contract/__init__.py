"""The contract of a mailbox, as behaviours that any backend can be run against.

Without pytest::

    report = await mailbox_contract.run(lambda name, *, body=None, reply=None: MyMailbox(name, body=body, reply=reply))
    print(report)
    assert report.ok

With pytest, one test for each behaviour::

    @mailbox_contract.parametrize
    async def test_contract(behaviour, virtual_clock):
        await behaviour(MyMailbox)

The factory is called with a name and the types of bodies and replies, and returns an unopened mailbox. Mailboxes with
different names share one store. :class:`BackendUnderTest` has further options.

A :class:`Behaviour` is a name, a claim, the capabilities it needs, and a check. Each run of a check has a new
:class:`Harness`, whose mailboxes have names of their own, so that behaviours can run concurrently on one store. A behaviour
is skipped only if the ``Capabilities`` of the backend lack what it needs.

In virtual time (``run_virtual``, the fixture ``virtual_clock``) waiting costs nothing and instants are checked exactly. In
real time leases are short. A check that must come before the end of a lease can then be too late on a busy machine; such a
behaviour is repeated with longer times, and fails only if it fails in time.

``harness`` has all of that. The other modules hold the behaviours, by what a mailbox does: singly, as decorated functions,
or in lists that are made from a table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar
from unittest import SkipTest

import anyio

from mainspring.core.process import async_library
from mainspring.errors import ConfigError
from mainspring.testing.mailbox_contract import (
    bodies,
    counting,
    dead_letters,
    leases,
    life_cycle,
    limits,
    listing,
    receiving,
    records,
    requests,
    sending,
    settling,
)
from mainspring.testing.mailbox_contract.harness import (
    BackendUnderTest,
    Behaviour,
    ContractError,
    Factory,
    Harness,
    Report,
    as_backend,
    behaviours_of,
    raises,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = [
    "Backend",
    "BackendUnderTest",
    "Behaviour",
    "ContractError",
    "Harness",
    "Report",
    "behaviours",
    "parametrize",
    "run",
]

Backend = BackendUnderTest
"""The former name of :class:`BackendUnderTest`, for one release."""

F = TypeVar("F", bound="Callable[..., object]")

_MODULES = (
    life_cycle,
    sending,
    receiving,
    leases,
    settling,
    dead_letters,
    requests,
    bodies,
    counting,
    records,
    listing,
    limits,
)


def behaviours() -> list[Behaviour]:
    """Return all behaviours. Each has a ``name``, the ``claim`` it checks, and the capabilities it ``needs``."""
    return [found for module in _MODULES for found in behaviours_of(module)]


async def run(
    backend: BackendUnderTest | Factory,
    *,
    only: Iterable[str] | None = None,
    exclude: Iterable[str] = (),
    concurrency: int = 1,
) -> Report:
    """Run the behaviours against a backend on the running event loop, and return the report.

    :param only: names of the behaviours to run; by default all.
    :param exclude: names of behaviours to leave out. The report is then not ``ok``, unless they would be skipped.
    :param concurrency: how many behaviours run at once. More than one saves time in real time, as most of them wait.
    :raises ConfigError: a name does not exist, or ``concurrency`` is below 1.

    A cancelled run closes the mailboxes of the running behaviours, and leaves their messages in the store.
    """
    under_test = as_backend(backend)
    wanted = None if only is None else set(only)
    left_out = set(exclude)
    found = behaviours()
    known = {behaviour.name for behaviour in found}
    unknown = ((wanted or set()) | left_out) - known
    if unknown:
        raise ConfigError(f"the contract has no behaviour named {', '.join(sorted(unknown))}")
    if concurrency < 1:
        raise ConfigError(f"concurrency must be at least 1, not {concurrency}")
    harness = Harness(under_test)
    lacking = frozenset(need for behaviour in found for need in behaviour.needs if not harness.can(need))
    report = Report(harness.name, claims={behaviour.name: behaviour.claim for behaviour in found}, lacking=lacking)
    if async_library() not in harness.capabilities.async_backends:
        await _check_refusal(harness, report)
    limiter = anyio.CapacityLimiter(concurrency)
    async with anyio.create_task_group() as group:
        for behaviour in found:
            if wanted is not None and behaviour.name not in wanted:
                continue
            if behaviour.name in left_out:
                report.skipped[behaviour.name] = "left out by the caller"
                if behaviour.missing(harness) is None:
                    report.undeclared.append(behaviour.name)
                continue
            await limiter.acquire_on_behalf_of(behaviour)
            group.start_soon(_run_one, behaviour, under_test, report, limiter, name=behaviour.name)
    return report


def parametrize(test: F) -> F:
    """Decorate a pytest test so that it runs once for each behaviour, as its argument ``behaviour``.

    ``await behaviour(backend_or_factory)`` in the test checks it; a missing capability skips the test.
    """
    import pytest

    cases = [pytest.param(behaviour, id=behaviour.name) for behaviour in behaviours()]
    decorated: F = pytest.mark.parametrize("behaviour", cases)(test)
    return decorated


async def _run_one(
    behaviour: Behaviour, backend: BackendUnderTest, report: Report, limiter: anyio.CapacityLimiter
) -> None:
    try:
        await behaviour(backend)
    except SkipTest as reason:
        report.skipped[behaviour.name] = str(reason)
    except Exception as error:
        report.failed[behaviour.name] = error
    else:
        report.passed.append(behaviour.name)
    finally:
        limiter.release_on_behalf_of(behaviour)


async def _check_refusal(harness: Harness, report: Report) -> None:
    """Check that opening fails on an event loop that the backend does not support."""
    name = "opening_on_an_unsupported_event_loop_is_a_config_error"
    try:
        with raises(ConfigError, f"opening it on {async_library()}"):
            async with harness.open():
                pass
    except ContractError as error:
        report.failed[name] = error
    else:
        report.passed.append(name)
