"""Schedules: from a tick to its handler's start on an idle fleet, and what 10,000 schedules cost a worker that waits."""

from __future__ import annotations

import resource
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

from common import beside, on_uvloop, quick, report
from mainspring import Context, LoopGroup, Schedule, Tasks
from mainspring.tasks.schedule_calls import definition_of
from mainspring.tasks.schedule_records import ScheduleRecords
from mainspring.tasks.schedules import changed
from mainspring.tasks.ticker import LIST_EVERY

if TYPE_CHECKING:
    from common import Row

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


async def lateness(url: str) -> float:
    """The 99th percentile of the seconds from a tick to its handler's start: 20 ticks a second, each at a time of its own."""
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
    return measured[int(len(measured) * 0.99)]


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


async def share(url: str) -> float:
    """The share of one core of a worker with many schedules of which none is due, with its part of a list of all of them."""
    (tasks, *_) = fleet_of(url, [])
    records = ScheduleRecords(tasks)
    async with tasks:
        state = changed(None, definition_of(Schedule("s", "note", cron="0 0 1 1 *"), tasks), time.time())
        for start in range(0, SCHEDULES, 500):
            async with anyio.create_task_group() as group:
                for number in range(start, start + 500):
                    group.start_soon(records.write, f"s{number:05}", state, 0)
        before = cpu_seconds()
        await records.list_all()
        listed = cpu_seconds() - before
        async with LoopGroup([tasks.loop()], guardian=False):
            await anyio.sleep(3)
            before, began = cpu_seconds(), time.perf_counter()
            await anyio.sleep(SECONDS)
            return (cpu_seconds() - before) / (time.perf_counter() - began) + listed / LIST_EVERY


def measure(store: str, url: str) -> list[Row]:
    late = on_uvloop(lateness, f"{url}late")
    used = on_uvloop(share, f"{url}many")
    return [
        beside(
            f"schedules, {store}: a tick to its handler's start, p99 of {TICKS}", [late], GOAL, 1.0,
            lambda seconds: f"{seconds * 1e3:.1f} ms", at_most=True, note=f"{WORKERS} workers in one process, idle",
        ),
        beside(
            f"schedules, {store}: {SCHEDULES:,} of them, none due", [used], SHARE, 1.0,
            lambda part: f"{part:.2%} of a core", at_most=True, note="processor time of the process by the time that passed",
        ),
    ]  # fmt: skip


def main() -> None:
    report(*measure("memory", "memory://"))
    with tempfile.TemporaryDirectory() as directory:
        report(*measure("SQLite", f"sqlite:///{Path(directory) / 'jobs.db'}?name="))


if __name__ == "__main__":
    main()
