"""A call in an OffloadPool's thread beside ``anyio.to_thread.run_sync``, one in its processes, and what they leave behind."""

from __future__ import annotations

import gc
import resource
import time
from pathlib import Path

import anyio
from anyio import to_thread

from common import Row, beside, machine, median, microseconds, on_uvloop, quick, report
from mainspring import OffloadPool

ROUNDS = 40 if quick() else 200
CALLS = 250
"""Short rounds in turn: what else the machine does meets both alike."""
MANY = 20_000 if quick() else 1_000_000
WARM = MANY // 20
AT_ONCE = 4
"""Tasks that call at the same time, in the long run."""
GROWTH = 1.0
"""MiB that the process may grow by over the long run: allocators settle."""


def work() -> None:
    """A call that does nothing: what is measured is the way there and back."""


async def calls(call: object, count: int) -> float:
    """Seconds a call."""
    began = time.perf_counter()
    for _ in range(count):
        await call(work)  # type: ignore[operator]
    return (time.perf_counter() - began) / count


async def beside_anyio() -> tuple[list[float], list[float], list[float]]:
    """Rounds of both, in turn, in one run, each being the first every other time; and of calls with a timeout."""
    ours, theirs, timed = [], [], []
    async with OffloadPool(workers=4) as pool:

        async def with_timeout(fn: object) -> None:
            await pool.run(fn, timeout=60)  # type: ignore[arg-type]

        for call in (pool.run, to_thread.run_sync):
            await calls(call, 200)
        for number in range(ROUNDS):
            order = [(pool.run, ours), (to_thread.run_sync, theirs)]
            for call, figures in order if number % 2 else reversed(order):
                figures.append(await calls(call, CALLS))
            timed.append(await calls(with_timeout, CALLS // 5))
    return ours, theirs, timed


async def in_processes() -> list[float]:
    async with OffloadPool("process", workers=1) as pool:
        await calls(pool.run, 50)
        return [await calls(pool.run, CALLS // 5) for _ in range(ROUNDS // 4)]


def resident() -> float:
    """MiB of memory that the process has now."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


async def many() -> tuple[float, int]:
    """MiB grown by, and how many more descriptors there are, over many calls."""

    async def some(pool: OffloadPool, count: int) -> None:
        for _ in range(count):
            await pool.run(work)

    async def all_of(pool: OffloadPool, count: int) -> None:
        async with anyio.create_task_group() as tasks:
            for _ in range(AT_ONCE):
                tasks.start_soon(some, pool, count // AT_ONCE)

    async with OffloadPool(workers=2) as pool:
        await all_of(pool, WARM)
        before, descriptors = resident(), len(list(Path("/proc/self/fd").iterdir()))
        await all_of(pool, MANY)
        return resident() - before, len(list(Path("/proc/self/fd").iterdir())) - descriptors


def main() -> None:
    for name, run in (("asyncio", anyio.run), ("uvloop", on_uvloop)):
        ours, theirs, timed = run(beside_anyio)
        report(
            beside(f"a call in a thread, {name} / anyio.to_thread", ours, theirs, 1.2, microseconds, at_most=True,
                   note=f"rounds of {CALLS:,} calls; with a timeout {microseconds(median(timed))}"),
        )  # fmt: skip
    report(Row("a call in a process, asyncio", microseconds(median(anyio.run(in_processes))), "-"))
    grown, descriptors = on_uvloop(many)  # the quickest, as there are so many
    report(
        Row(f"memory grown by over {MANY:,} calls, MiB / {GROWTH:g}", f"{grown:.2f} MiB", f"{GROWTH:g} MiB",
            [grown / GROWTH], 1.0, at_most=True, note=f"{descriptors} more descriptors; after {WARM:,} calls to warm up"),
    )  # fmt: skip


if __name__ == "__main__":
    print(machine())
    main()
