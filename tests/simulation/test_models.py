"""Each mailbox backend against one small reference model, over random sequences of everything users and time can do.

``MAINSPRING_MODEL_EXAMPLES=N`` tries N sequences a backend, other ones each time; without it they are few and the same.
"""

from __future__ import annotations

import os
import tempfile
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from model_driver import CAPACITY, SEQUENCES, SHORT_SEQUENCES, Driver, Step

from mailbox_model import Disagreement
from mainspring import open_mailbox
from mainspring.mailbox import sqlite_due, sqlite_schema
from mainspring.mailbox.memory_entry import Entry
from mainspring.mailbox.memory_queue import MemoryQueue
from mainspring.mailbox.sqlite import SQLiteMailbox
from mainspring.testing import run_virtual
from redis_support import place

if TYPE_CHECKING:
    from collections.abc import Callable

ASKED = os.environ.get("MAINSPRING_MODEL_EXAMPLES")
_names = count()


def _settings(examples: int, *phases: Phase) -> settings:
    return settings(
        max_examples=int(ASKED) if ASKED and not phases else examples,
        phases=phases or (Phase.explicit, Phase.generate, Phase.shrink),
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


@_settings(10)
@given(SHORT_SEQUENCES)
def test_redis(redis_url, steps):
    with place(redis_url) as here:
        driver = Driver(lambda: here.mailbox(capacity=CAPACITY), exact=False)
        anyio.run(lambda: driver.run(steps, finish=False))


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
    end = sqlite_due._end_leases
    patch.setattr(sqlite_due, "_end_leases", lambda work, limit: end(work, 1))


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
