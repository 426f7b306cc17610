"""How many events a second a session applies, in memory and with a journal, and that a million of them leave nothing behind."""

from __future__ import annotations

import gc
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import anyio

from common import Row, beside, median, on_uvloop, per_second, quick, rate, report
from mainspring import Session
from mainspring.state.session import append, replace_latest, upsert_by

ROUNDS = 3 if quick() else 9
EVENTS = 20_000 if quick() else 100_000
MANY = 200_000 if quick() else 1_000_000
TASKS = 100
JOURNALED = 2_000 if quick() else 20_000
GOAL = 100_000


@dataclass(frozen=True, slots=True)
class Moved:
    x: int
    y: int


@dataclass(frozen=True)
class Where:
    last: Annotated[Moved | None, replace_latest] = None


@dataclass(frozen=True)
class Track:
    moves: Annotated[tuple[Moved, ...], append] = ()


@dataclass(frozen=True)
class Places:
    by_x: Annotated[tuple[Moved, ...], upsert_by("x")] = ()


async def dispatch(session: Session[Where], count: int) -> None:
    for number in range(count):
        await session.dispatch(Moved(number, -number))


async def one_task(session: Session[Where], count: int) -> float:
    began = time.perf_counter()
    await dispatch(session, count)
    return rate(count, began)


async def many_tasks(session: Session[Where], count: int) -> float:
    began = time.perf_counter()
    async with anyio.create_task_group() as tasks:
        for _ in range(TASKS):
            tasks.start_soon(dispatch, session, count // TASKS)
    return rate(count, began)


async def heard(session: Session[Where], count: int) -> float:
    unsubscribe = session.dispatcher.subscribe(Moved, lambda moved: None)
    try:
        return await one_task(session, count)
    finally:
        unsubscribe()


def resident() -> float:
    """MiB of this process in memory."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


async def in_memory() -> None:
    for name, way in (
        ("one task", one_task),
        (f"{TASKS} tasks", many_tasks),
        ("one task, with a subscriber", heard),
    ):
        rates = [await way(Session(Where), EVENTS) for _ in range(ROUNDS)]
        report(
            beside(f"Session.dispatch, {name}", rates, GOAL, 1.0, per_second,
                   note=f"uvloop, replace_latest, rounds of {EVENTS:,}")
        )  # fmt: skip


async def kept() -> None:
    """Slices that keep what they are given cost a copy of it for each event."""
    for size in (100, 1_000, 20_000):
        moves = tuple(Moved(number, 0) for number in range(size))
        count = max(200, min(EVENTS, 2_000_000 // size) // 10)
        for name, state, number in (("append", Track(moves), size), ("upsert_by", Places(moves), size // 2)):
            rates = []
            for _ in range(ROUNDS):
                session: Session[Any] = Session(state)
                began = time.perf_counter()
                for _ in range(count):
                    await session.dispatch(Moved(number, 1))
                rates.append(rate(count, began))
            report(
                Row(f"Session.dispatch, {name} with {size:,} items", per_second(median(rates)), "-",
                    note=f"uvloop, median of {ROUNDS} rounds of {count:,}"
                    + (", from that size on" if name == "append" else ", of the one in the middle"))
            )  # fmt: skip


async def flat() -> None:
    session = Session(Where)
    tenth = MANY // 10
    first = await one_task(session, tenth)
    before = resident()
    rates = [await one_task(session, tenth) for _ in range(9)]
    grown = resident() - before
    assert session.seq == MANY
    report(
        Row(f"growth over {MANY:,} dispatches", f"{grown:.2f} MiB", "1 MiB", [max(grown, 0.0)], 1.0, at_most=True,
            note="resident memory from the end of the first tenth, replace_latest"),
        Row("its last tenth / its first", per_second(rates[-1]), per_second(first), [rates[-1] / first]),
    )  # fmt: skip


async def journaled() -> None:
    for kind in ("sqlite", "jsonl"):
        with tempfile.TemporaryDirectory() as directory:
            journal = f"sqlite:///{directory}/s.db" if kind == "sqlite" else f"{directory}/s.jsonl"
            async with Session.open(Where, journal=journal) as session:
                alone = await one_task(session, JOURNALED // 100)
                together = await many_tasks(session, JOURNALED)
            began = time.perf_counter()
            async with Session.open(Where, journal=journal) as session:
                opened = rate(session.seq, began)
        report(
            Row(f"{kind} journal, {TASKS} tasks / one", per_second(together), per_second(alone), [together / alone],
                note="each dispatch returns once its event is on the disk"),
            Row(f"{kind} journal, events read when it is opened", per_second(opened), "-"),
        )  # fmt: skip


def main() -> None:
    on_uvloop(in_memory)
    on_uvloop(kept)
    on_uvloop(flat)
    on_uvloop(journaled)


if __name__ == "__main__":
    main()
