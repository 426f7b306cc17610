"""Each mailbox backend against one small reference model, over random sequences of everything users and time can do.

``MAINSPRING_MODEL_EXAMPLES=N`` tries N sequences a backend, other ones each time; without it they are few and the same.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections import Counter
from contextlib import ExitStack, contextmanager
from itertools import count, cycle
from pathlib import Path
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

from mailbox_model import Disagreement
from mainspring import open_mailbox
from mainspring.mailbox.memory.entry import Entry
from mainspring.mailbox.memory.queue import MemoryQueue
from mainspring.mailbox.sqlite import scheduler as sqlite_scheduler
from mainspring.mailbox.sqlite import schema as sqlite_schema
from mainspring.mailbox.sqlite.mailbox import SQLiteMailbox
from mainspring.testing import run_virtual
from stores import store_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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


def run_in_memory(steps: list[Step], *, serialize: bool) -> None:
    """Through several objects of one name."""
    url = f"memory://model-{next(_names)}?capacity={CAPACITY}&serialize={str(serialize).lower()}"
    run_virtual(Driver(lambda: open_mailbox(url), exact=True).run, steps)


def run_serialized(steps: list[Step]) -> None:
    run_in_memory(steps, serialize=True)


def run_objects(steps: list[Step]) -> None:
    run_in_memory(steps, serialize=False)


def run_sqlite(steps: list[Step]) -> None:
    """Through several objects on one file, which is left open only as far as a crash leaves it."""
    with tempfile.TemporaryDirectory(prefix="model-") as directory:
        file = Path(directory) / "jobs.db"
        make = lambda: SQLiteMailbox(file, capacity=CAPACITY, synchronous="normal")  # noqa: E731
        run_virtual(Driver(make, exact=False).run, steps)


BACKENDS: dict[str, Callable[[list[Step]], None]] = {
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
    for run in BACKENDS.values():
        run(steps)


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


def _shorten_leases(patch: pytest.MonkeyPatch) -> None:
    def extend(queue: MemoryQueue, delivery: Any, now: float, timeout: float) -> None:
        entry = queue.leased(delivery, now)
        queue._agenda.end_lease(entry.receipt_handle)
        entry.lease_until = now + timeout
        queue._in_flight[entry.receipt_handle] = entry
        queue._agenda.set_leases([entry.receipt_handle], now + timeout)

    patch.setattr(MemoryQueue, "extend", extend)


def _charge_releases(patch: pytest.MonkeyPatch) -> None:
    again = Entry.again
    patch.setattr(Entry, "again", lambda entry, charge: again(entry, charge=True))


def _return_to_the_tail(patch: pytest.MonkeyPatch) -> None:
    append = MemoryQueue._append
    patch.setattr(MemoryQueue, "_append", lambda queue, entry, front=False: append(queue, entry))


def _keep_the_key(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MemoryQueue, "_free_key", lambda queue, entry: None)


def _purge_what_is_in_flight_later(patch: pytest.MonkeyPatch) -> None:
    def purge(queue: MemoryQueue, now: float) -> int:
        queue.advance(now)
        dropped, flying = queue.waiting, dict(queue._in_flight)
        queue._clear()
        queue._in_flight.update(flying)
        queue.settled += dropped
        return dropped

    patch.setattr(MemoryQueue, "purge", purge)


def _sql(name: str, old: str, new: str) -> Callable[[pytest.MonkeyPatch], None]:
    """A statement with a mistake in it."""
    right = getattr(sqlite_schema, name)
    assert right.count(old) == 1, f"{name} is no longer as this fault was planted"
    return lambda patch: patch.setattr(sqlite_schema, name, right.replace(old, new))


def _end_one_lease(patch: pytest.MonkeyPatch) -> None:
    """Of several leases that have ended, only the first is seen to."""
    end = sqlite_scheduler._end_leases
    patch.setattr(sqlite_scheduler, "_end_leases", lambda work, limit: end(work, 1))


FAULTS = {
    "serialized": {
        "lease shortened": _shorten_leases,
        "release charged": _charge_releases,
        "release to the tail": _return_to_the_tail,
    },
    "objects": {
        "key kept after the end": _keep_the_key,
        "purge leaves leases": _purge_what_is_in_flight_later,
        "lease shortened": _shorten_leases,
    },
    "sqlite": {
        "lease shortened": _sql("EXTEND", "max(until, ?)", "?"),
        "returns not charged": _sql("CAME_BACK", "attempts + ?", "attempts + 0 * ?"),
        "one ended lease at a time": _end_one_lease,
    },
}
PLANTED = [pytest.param(backend, fault, id=f"{backend}-{fault}") for backend in FAULTS for fault in FAULTS[backend]]


@pytest.mark.parametrize(("backend", "fault"), PLANTED)
def test_planted_fault(backend, fault, monkeypatch):
    """A broken backend is caught."""
    FAULTS[backend][fault](monkeypatch)

    @_settings(150, Phase.generate)
    @given(SEQUENCES)
    def compare(steps):
        BACKENDS[backend](steps)

    with pytest.raises(Disagreement):
        compare()


def test_a_planted_fault_is_shrunk_to_a_few_steps(monkeypatch):
    _charge_releases(monkeypatch)
    tried: list[list[Step]] = []

    @_settings(40, Phase.generate, Phase.shrink)
    @given(SEQUENCES)
    def compare(steps):
        tried.append(steps)
        run_objects(steps)

    with pytest.raises(Disagreement):
        compare()
    names = [name for name, _ in tried[-1]]
    assert len(names) <= 5, names
    assert names[0].startswith("send")
