"""Schedules: from a tick to its handler's start on an idle fleet, and what 10,000 schedules cost a worker that waits.

``python benchmarks/schedules.py [STORE …] [--quick] [--flush]``, on each store. The servers are those of the other benchmarks.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

sys.path.append(sys.path.pop(0))  # beside this file is one with the name of a driver, which must be found first

import anyio

from common import benchmark, beside, chosen, on_uvloop, quick, report, words
from idle import children, seconds_of
from mainspring import Context, LoopGroup, Schedule, Tasks
from mainspring.tasks.schedule_calls import definition_of
from mainspring.tasks.schedule_records import ScheduleRecords
from mainspring.tasks.schedules import changed
from mainspring.tasks.ticker import LIST_EVERY

if TYPE_CHECKING:
    from collections.abc import Callable

    from common import Row

STORES = {"memory": "memory", "sqlite": "SQLite", "redis": "Redis", "postgres": "PostgreSQL", "nats": "NATS"}
WORKERS = 3
TICKS = 60 if quick() else 200
SCHEDULES = 1_000 if quick() else 10_000
SECONDS = 5.0 if quick() else 35.0
"""Long enough to say once more that its declarations are in use."""
GOAL = 0.05
"""Seconds from the time of a tick to the start of its handler, of the slowest in a hundred."""
SHARE = 0.01
"""The part of a core that 10,000 schedules may take."""


def fleet_of(url: str, late: list[float]) -> list[Tasks]:
    """Workers with one task, which notes by how much each call is late."""

    async def note(ctx: Context) -> None:
        assert ctx.scheduled_for is not None
        late.append(time.time() - ctx.scheduled_for.timestamp())

    fleet = [Tasks(url) for _ in range(WORKERS)]
    for tasks in fleet:
        tasks.task(note)
    return fleet


async def lateness(url: str) -> list[float]:
    """The seconds from a tick to its handler's start, in order: 20 ticks a second, each at a time of its own."""
    late: list[float] = []
    fleet = fleet_of(url, late)
    async with LoopGroup([tasks.loop(name=f"loop {n}") for n, tasks in enumerate(fleet)], guardian=False):
        for number in range(20):
            await fleet[0].schedules.add(Schedule(f"s{number}", "note", every=1))
            await anyio.sleep(0.05)
        await anyio.sleep(2)
        late.clear()
        while len(late) < TICKS:
            await anyio.sleep(0.1)
        measured = sorted(late)
        for number in range(20):
            await fleet[0].schedules.remove(f"s{number}")
    return measured


class Used(NamedTuple):
    """Shares of one core."""

    process: float
    server: float


def seconds_used(servers: Callable[[], list[int]]) -> Used:
    """Processor seconds of this process and of the server so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return Used(usage.ru_utime + usage.ru_stime, sum(map(seconds_of, servers())))


async def share(url: str, servers: Callable[[], list[int]]) -> Used:
    """The shares of a worker with many schedules of which none is due, with its part of a list of all of them."""
    (tasks, *_) = fleet_of(url, [])
    records = ScheduleRecords(tasks)
    async with tasks:
        state = changed(None, definition_of(Schedule("s", "note", cron="0 0 1 1 *"), tasks), time.time())
        for start in range(0, SCHEDULES, 500):
            async with anyio.create_task_group() as group:
                for number in range(start, start + 500):
                    group.start_soon(records.write, f"s{number:05}", state, 0)
        before = seconds_used(servers)
        await records.list_all()
        listed = [after - since for since, after in zip(before, seconds_used(servers), strict=True)]
        async with LoopGroup([tasks.loop()], guardian=False):
            await anyio.sleep(3)
            before, began = seconds_used(servers), time.perf_counter()
            await anyio.sleep(SECONDS)
            passed = time.perf_counter() - began
            waited = [(after - since) / passed for since, after in zip(before, seconds_used(servers), strict=True)]
    return Used(*(wait + once / LIST_EVERY for wait, once in zip(waited, listed, strict=True)))


def measure(kind: str, url: str) -> list[Row]:
    """The rows of one store. ``{n}`` in the URL is the name of a mailbox."""
    servers = benchmark("postgres").servers if kind == "postgres" else partial(list, children(os.getpid()))
    late = on_uvloop(lateness, url.replace("{n}", "late"))
    used = on_uvloop(share, url.replace("{n}", "many"), servers)
    rows = [
        beside(
            f"schedules, {STORES[kind]}: a tick to its handler's start, {which} of {TICKS}", [late[int(len(late) * part)]],
            GOAL, 1.0, lambda seconds: f"{seconds * 1e3:.1f} ms", at_most=True, note=f"{WORKERS} workers in one process, idle",
        )
        for which, part in (("p50", 0.5), ("p99", 0.99))
    ]  # fmt: skip
    at_server = f"; of the server: {used.server:.2%}" if used.server else ""
    return [
        *rows,
        beside(
            f"schedules, {STORES[kind]}: {SCHEDULES:,} of them, none due", [used.process], SHARE, 1.0,
            lambda part: f"{part:.2%} of a core", at_most=True,
            note=f"processor time of the process by the time that passed{at_server}",
        ),
    ]  # fmt: skip


def main() -> None:
    servers = benchmark("many_mailboxes").KINDS
    for kind in chosen(words(), STORES):
        with servers[kind]() as url:
            if url is not None:
                report(*measure(kind, url))


if __name__ == "__main__":
    main()
