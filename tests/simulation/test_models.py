"""Each mailbox backend against one small reference model, over random sequences of everything users and time can do.

``MAINSPRING_MODEL_EXAMPLES=N`` tries N sequences a backend, other ones each time; without it they are few and the same.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections import Counter
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import count, cycle
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from model_driver import (
    CAPACITY,
    REAL_SEQUENCES,
    SEQUENCES,
    SHORT_SEQUENCES,
    Driver,
    Inconclusive,
    Place,
    RealDriver,
    Step,
)

from contract.broken_mailboxes import ChargesReleases, ExtendShortens, ReleasesToTheTail
from mailbox_model import Disagreement
from mainspring import open_mailbox
from mainspring.mailbox.message import Nack
from mainspring.testing import run_virtual
from stores import store_of
from wrapped_backend import WrappedBackend, wrap

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from mainspring import Mailbox
    from mainspring.mailbox.message import ClaimedMessage, Envelope, Settlement

    Wrong = Callable[[Any], WrappedBackend]

pytestmark = pytest.mark.slow

ASKED = os.environ.get("MAINSPRING_MODEL_EXAMPLES")
_names = count()


def _settings(examples: int, *phases: Phase, shrink: bool = True) -> settings:
    return settings(
        max_examples=int(ASKED) if ASKED and not phases else examples,
        phases=phases or (Phase.explicit, Phase.generate, *[Phase.shrink] * shrink),
        derandomize=not ASKED or bool(phases),
        database=None,
        deadline=None,
        print_blob=False,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )


def run(steps: list[Step], url: str, wrong: Wrong | None, *, exact: bool) -> None:
    """Through several objects of the mailbox, each with its backend made ``wrong``."""

    def make() -> Mailbox[Any, Any]:
        mailbox = open_mailbox(url)
        return mailbox if wrong is None else wrap(mailbox, wrong)

    run_virtual(Driver(make, exact=exact).run, steps)


def run_serialized(steps: list[Step], wrong: Wrong | None = None) -> None:
    run(steps, f"memory://model-{next(_names)}?capacity={CAPACITY}&serialize=true", wrong, exact=True)


def run_objects(steps: list[Step], wrong: Wrong | None = None) -> None:
    run(steps, f"memory://model-{next(_names)}?capacity={CAPACITY}&serialize=false", wrong, exact=True)


def run_sqlite(steps: list[Step], wrong: Wrong | None = None) -> None:
    """On one file, which is left open only as far as a crash leaves it."""
    with tempfile.TemporaryDirectory(prefix="model-") as directory:
        run(steps, f"sqlite:///{directory}/jobs.db?capacity={CAPACITY}&synchronous=normal", wrong, exact=False)


BACKENDS: dict[str, Callable[[list[Step], Wrong | None], None]] = {
    "serialized": run_serialized,
    "objects": run_objects,
    "sqlite": run_sqlite,
}


@_settings(120)
@given(SEQUENCES)
def test_memory_with_bodies_as_json(steps):
    run_serialized(steps)


@_settings(120)
@given(SEQUENCES)
def test_memory_with_bodies_as_objects(steps):
    run_objects(steps)


@_settings(60)
@given(SEQUENCES)
def test_sqlite(steps):
    run_sqlite(steps)


def test_a_key_that_another_has_by_now_is_gone_for_good():
    """Random sequences rarely come this far: it dies, another takes its key, it is replayed without, dies, is replayed."""
    send = ("send", {"priority": 0, "key": "a", "delay": 0, "life": None})
    receive = ("receive", {"most": 1, "lease": 30.0, "wait": 0})
    die, replay = ("dead_letter", {"which": 0}), ("replay", {"first": 0, "count": 0})
    steps = [send, receive, die, send, receive, replay, ("acknowledge", {"which": 0}), receive, die, replay, send]
    for run_all in BACKENDS.values():
        run_all(steps, None)


SERVERS = {"redis": Place(), "postgres": Place(), "nats": Place(math.inf, forgets=True, lateness=1.0)}


@contextmanager
def on_a_server(kind: str, directory: Path, request: pytest.FixtureRequest, driver: type[Driver]) -> Iterator[Driver]:
    """A driver for a mailbox of its own."""
    place = SERVERS[kind]
    options = {"capacity": place.capacity} if place.capacity < math.inf else {}
    with store_of(kind, directory, request.getfixturevalue) as store:
        yield driver(lambda: store.box(**options), exact=False, place=place)


@pytest.mark.parametrize("kind", SERVERS)
def test_servers(kind, tmp_path, request):
    """Whatever does not depend on time that passes."""

    @_settings(7, shrink=False)
    @given(SHORT_SEQUENCES)
    def compare(steps):
        with on_a_server(kind, tmp_path, request, Driver) as driver:
            anyio.run(lambda: driver.run(steps, finish=False))

    compare()


def test_servers_in_real_time(tmp_path, request):
    """Delays, leases and lives that end: many sequences on all servers at once, as waiting costs nothing."""
    ended: Counter[str] = Counter()

    async def run(kind: str, driver: Driver, steps: list[Step]) -> None:
        try:
            await driver.run(steps, finish=False)
        except Inconclusive:
            ended["too slow to be judged"] += 1
        except Disagreement as error:
            ended[f"{kind}: {error}, after {steps}"] += 1
        else:
            ended["as they should"] += 1

    async def run_all(drivers: list[tuple[str, Driver]], book: list[list[Step]]) -> None:
        async with anyio.create_task_group() as tasks:
            for (kind, driver), steps in zip(drivers, book, strict=True):
                tasks.start_soon(run, kind, driver, steps)

    @_settings(2, shrink=False)
    @given(st.lists(REAL_SEQUENCES, min_size=9, max_size=9))
    def compare(book):
        with ExitStack() as stack:
            kinds = [kind for kind, _ in zip(cycle(SERVERS), book, strict=False)]
            drivers = [(k, stack.enter_context(on_a_server(k, tmp_path, request, RealDriver))) for k in kinds]
            anyio.run(run_all, drivers, book)
        assert set(ended) <= {"as they should", "too slow to be judged"}, "\n".join(ended)

    compare()
    assert ended["as they should"], ended


# -------------------------------------------------------------------------------------------------------- planted faults


class DoesNotChargeReturns(WrappedBackend):
    async def settle(self, delivery: ClaimedMessage, settlement: Settlement) -> None:
        if isinstance(settlement, Nack):
            settlement = replace(settlement, charge=False)
        await self.inner.settle(delivery, settlement)


class KeepsTheKey(WrappedBackend):
    """A key is not free again where its message has come to its end."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.keys: dict[str, str] = {}

    async def send(self, envelopes: list[Envelope]) -> list[str]:
        if (known := self.keys.get(envelopes[0].dedup_key or "")) is not None:
            return [known]
        ids = await self.inner.send(envelopes)
        self.keys |= {one.dedup_key: sent for one, sent in zip(envelopes, ids, strict=True) if one.dedup_key}
        return ids


class PurgesWhatWaits(WrappedBackend):
    """Those who hold a message when all is purged can settle it once more."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.held: set[str] = set()
        self.purged: set[str] = set()

    async def claim(self, *limits: Any) -> list[ClaimedMessage]:
        claimed = await self.inner.claim(*limits)
        self.held |= {delivery.receipt_handle for delivery in claimed}
        return claimed

    async def purge(self) -> int:
        self.purged, self.held = self.held, set()
        return await self.inner.purge()

    async def settle(self, delivery: ClaimedMessage, settlement: Settlement) -> None:
        if delivery.receipt_handle in self.purged:
            self.purged.remove(delivery.receipt_handle)
        else:
            await self.inner.settle(delivery, settlement)
            self.held.discard(delivery.receipt_handle)


class EndsOneLease(WrappedBackend):
    """Of several leases that have ended, only the first is seen to."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.returned: set[str] = set()

    async def settle(self, delivery: ClaimedMessage, settlement: Settlement) -> None:
        await self.inner.settle(delivery, settlement)
        self.returned.add(delivery.message_id)

    async def claim(self, *limits: Any) -> list[ClaimedMessage]:
        claimed = await self.inner.claim(*limits)
        ended = [one for one in claimed if one.delivery_count > 1 and one.message_id not in self.returned][1:]
        for delivery in ended:
            await self.inner.settle(delivery, Nack(charge=False, front=True))
        self.returned -= {delivery.message_id for delivery in claimed}
        return [delivery for delivery in claimed if delivery not in ended]


FAULTS: dict[str, list[type[WrappedBackend]]] = {
    "serialized": [ExtendShortens, ChargesReleases, ReleasesToTheTail],
    "objects": [KeepsTheKey, PurgesWhatWaits, ExtendShortens],
    "sqlite": [ExtendShortens, DoesNotChargeReturns, EndsOneLease],
}
PLANTED = [pytest.param(on, fault, id=f"{on}-{fault.__name__}") for on, faults in FAULTS.items() for fault in faults]


@pytest.mark.parametrize(("backend", "fault"), PLANTED)
def test_planted_fault(backend, fault):
    """A broken backend is caught."""

    @_settings(150, Phase.generate)
    @given(SEQUENCES)
    def compare(steps):
        BACKENDS[backend](steps, fault)

    with pytest.raises(Disagreement):
        compare()


def test_a_planted_fault_is_shrunk_to_a_few_steps():
    tried: list[list[Step]] = []

    @_settings(40, Phase.generate, Phase.shrink)
    @given(SEQUENCES)
    def compare(steps):
        tried.append(steps)
        run_objects(steps, ChargesReleases)

    with pytest.raises(Disagreement):
        compare()
    names = [name for name, _ in tried[-1]]
    assert len(names) <= 5, names
    assert names[0].startswith("send")
