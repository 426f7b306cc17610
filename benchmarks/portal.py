"""Callbacks from four threads into an event loop in a thread: ``LoopThread.post`` beside what asyncio has for that."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from common import Row, beside, in_turns, per_second, quick, rate, report
from mainspring import LoopThread

if TYPE_CHECKING:
    from collections.abc import Callable

THREADS = 4
EACH = 5_000 if quick() else 10_000
ROUNDS = 3 if quick() else 5
MANY = 100_000 if quick() else 1_000_000


def no_op() -> None:
    pass


async def async_no_op() -> None:
    pass


async def tell(done: threading.Event) -> None:
    done.set()


def from_threads(each: Callable[[], object], last: Callable[[threading.Event], object]) -> float:
    """Calls a second: ``each()`` by every thread, so many times, until the ``last`` of every thread has been executed."""

    def run(done: threading.Event) -> None:
        gate.wait()
        for _ in range(EACH):
            each()
        last(done)

    gc.collect()
    gate = threading.Barrier(THREADS + 1)
    ends = [threading.Event() for _ in range(THREADS)]
    threads = [threading.Thread(target=run, args=(done,)) for done in ends]
    for thread in threads:
        thread.start()
    gate.wait()
    began = time.perf_counter()
    for done in ends:
        done.wait()
    figure = rate(THREADS * EACH, began)
    for thread in threads:
        thread.join()
    return figure


def resident() -> float:
    """The memory of this process in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def growth(thread: LoopThread) -> tuple[float, int]:
    """What so many posts leave behind, in MiB and in objects' blocks; posted in parts, as fast as the loop keeps up."""

    def part(count: int) -> None:
        done = threading.Event()
        for _ in range(count):
            thread.post(no_op)
        thread.post(done.set)
        done.wait()

    part(20_000)
    gc.collect()
    before, blocks = resident(), sys.getallocatedblocks()
    for _ in range(MANY // 10_000):
        part(10_000)
    gc.collect()
    return resident() - before, sys.getallocatedblocks() - blocks


def rows(thread: LoopThread, loop: asyncio.AbstractEventLoop, name: str) -> list[Row]:
    def run_coroutine() -> object:
        return asyncio.run_coroutine_threadsafe(async_no_op(), loop)

    def last_coroutine(done: threading.Event) -> None:
        # Known to be done: before that, the next round would begin with what this one has left to the loop.
        asyncio.run_coroutine_threadsafe(async_no_op(), loop).add_done_callback(lambda _: done.set())

    def call_soon() -> object:
        return loop.call_soon_threadsafe(no_op)

    coroutines, posts, calls, submits = in_turns(
        ROUNDS,
        lambda: from_threads(run_coroutine, last_coroutine),
        lambda: from_threads(lambda: thread.post(no_op), lambda done: thread.post(done.set)),
        lambda: from_threads(call_soon, lambda done: loop.call_soon_threadsafe(done.set)),
        lambda: from_threads(lambda: thread.submit(async_no_op), lambda done: thread.submit(tell, done)),
    )
    note = f"{name}, {THREADS} threads with {EACH:,} calls each"
    return [
        beside("post() / asyncio.run_coroutine_threadsafe", posts, coroutines, 5, per_second, note=note),
        beside("post() / loop.call_soon_threadsafe", posts, calls, None, per_second, note=note),
        beside("submit() / asyncio.run_coroutine_threadsafe", submits, coroutines, None, per_second, note=note),
    ]


async def running_loop() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()


def main() -> None:
    for uvloop, name in ((False, "asyncio"), (True, "uvloop")):
        with LoopThread(backend_options={"use_uvloop": uvloop}) as thread:
            report(*rows(thread, thread.submit(running_loop).wait_sync(), name))
            mebibytes, blocks = growth(thread)
            report(
                Row(
                    f"memory that {MANY:,} posts leave behind",
                    f"{mebibytes:.2f} MiB, {blocks:,} blocks",
                    "1 MiB",
                    [mebibytes],
                    1,
                    at_most=True,
                    note=name,
                )
            )


if __name__ == "__main__":
    main()
