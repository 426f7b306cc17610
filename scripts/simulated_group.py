"""The group that ``make simulate`` runs with many seeds.

It uses concurrent handlers, checkpoints, heartbeats, retries, replies, short leases and a shutdown in phases.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio

from mainspring import Context, LeasePolicy, LoopGroup, MainLoop, Reject, Retry

if TYPE_CHECKING:
    from mainspring import Mailbox


async def convert(job: int, ctx: Context) -> int:
    """Do some steps of work with a checkpoint after each. Some jobs need a second attempt; some can never succeed."""
    done: int = ctx.restored or 0
    steps = job % 8 if job % 3 else 0
    for step in range(done, steps):
        await anyio.sleep(2.5)
        await ctx.checkpoint(step + 1)
    if job % 11 == 0 and ctx.attempt == 1:
        raise Retry(delay=15)
    if job % 97 == 0:
        raise Reject("there is nothing to convert")
    return job * 2


def build(mailbox: Mailbox[Any, Any]) -> LoopGroup:
    """Build two loops on one mailbox: one renews its leases by itself, the other on heartbeats of its handlers."""
    loops = [
        MainLoop(mailbox, convert, name="steady", concurrency=4, visibility_timeout=30),
        MainLoop(
            mailbox, convert, name="beating", concurrency=2, visibility_timeout=40, lease=LeasePolicy("on-beat"),
            shutdown_priority=1,
        ),
    ]  # fmt: skip
    return LoopGroup(loops, shutdown_timeout=20, drain_delay=2, watchdog_threshold=120, watchdog_interval=20)


PARTS = 1_000_000
"""The number of the first part: what is below is the number of a whole job."""


def build_bursts(mailbox: Mailbox[Any, Any]) -> LoopGroup:
    """Build two loops whose jobs fan out into hundreds of parts that take milliseconds, so that they are claimed ahead."""

    async def handle(job: int) -> None:
        if job < PARTS:
            await mailbox.send_many(range(PARTS + 200 * job, PARTS + 200 * (job + 1)))
        elif job % 331 == 0:
            await anyio.sleep(90)
        else:
            await anyio.sleep(0.001 * (1 + job % 5))

    loops = [
        MainLoop(mailbox, handle, name="one at a time", visibility_timeout=30),
        MainLoop(mailbox, handle, name="some at once", concurrency=3, visibility_timeout=20, shutdown_priority=1),
    ]
    return LoopGroup(loops, shutdown_timeout=20, drain_delay=2, watchdog_threshold=120, watchdog_interval=20)
