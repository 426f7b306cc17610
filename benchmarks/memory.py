"""In memory, the full path (send, lease, handler, acknowledgement) beside a bare anyio memory object stream."""

from __future__ import annotations

import math
import time

import anyio

from brokers import Comparison
from common import BODY, beside, in_turns, on_uvloop, per_second, quick, rate, report
from mainspring import InMemoryMailbox, LoopGroup, MainLoop

COUNT = 50_000 if quick() else 200_000
ROUNDS = 3 if quick() else 5


async def bare_stream() -> float:
    """One producer, one consumer, an unbounded buffer."""
    send, receive = anyio.create_memory_object_stream[str](math.inf)

    async def produce() -> None:
        async with send:
            for _ in range(COUNT):
                await send.send(BODY)

    began = time.perf_counter()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(produce)
        async for _ in receive:
            pass
    return rate(COUNT, began)


async def full_path(*, serialize: bool) -> float:
    """One producer, a group with one loop of concurrency 100, a handler that does nothing.

    The bare stream hands objects over; with ``serialize=False`` the mailbox does so too, by default they pass through JSON.
    """
    mailbox = InMemoryMailbox("bench", body=str, serialize=serialize)
    done = 0
    finished = anyio.Event()

    async def handle(job: str) -> None:
        nonlocal done
        done += 1
        if done == COUNT:
            finished.set()

    group = LoopGroup([MainLoop(mailbox, handle, concurrency=100)], guardian=False)
    async with mailbox, group:
        began = time.perf_counter()
        for _ in range(COUNT):
            await mailbox.send(BODY)
        await finished.wait()
        while (await mailbox.counts()).waiting:
            await anyio.sleep(0)
        return rate(COUNT, began)


def main() -> None:
    bare, objects, json = in_turns(
        ROUNDS,
        lambda: on_uvloop(bare_stream),
        lambda: on_uvloop(lambda: full_path(serialize=False)),
        lambda: on_uvloop(lambda: full_path(serialize=True)),
    )
    note = f"concurrency 100, uvloop, {COUNT:,} messages"
    for what, ours, goal in (("serialize=False", objects, 0.6), ("bodies through JSON", json, None)):
        report(beside(f"memory: full path, {what} / bare anyio stream", ours, bare, goal, per_second, note=note))
    Comparison("memory", lambda _: "memory://bench", lambda: None, []).report_latency()


if __name__ == "__main__":
    main()
