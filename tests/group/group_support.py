"""What the tests of groups share."""

from __future__ import annotations

from contextlib import asynccontextmanager

import anyio

from mainspring import Heartbeat, LoopGroup, MainLoop
from mainspring.events import GroupStateChanged
from support import FaultyMailbox


def box(name="jobs"):
    return FaultyMailbox(name, joins=True, body=dict)


class Foreign:
    """The least that a Runnable can be."""

    def __init__(self, **options):
        self.running = False
        self.heartbeat = Heartbeat()
        self.told = None
        self.keywords = None
        vars(self).update(options)

    async def run(self, *, wait_time_seconds=None):
        self.keywords = wait_time_seconds
        self.running = True
        self.stop = anyio.Event()
        try:
            await self.work()
        finally:
            self.running = False

    async def work(self):
        await self.stop.wait()

    async def shutdown(self, *, timeout=30.0):
        self.told = anyio.current_time()
        self.stop.set()
        return True


@asynccontextmanager
async def running(group, **keywords):
    """Run ``group`` in the background as its owner would, without signals; the block's end waits for the run's end."""
    done = {}

    async def run(*, task_status):
        group.dispatcher.subscribe(GroupStateChanged, lambda e: e.new == "running" and task_status.started())
        try:
            await group.run(install_signals=False, **keywords)
        except Exception as error:
            done["error"] = error

    async with anyio.create_task_group() as tasks:
        await tasks.start(run)
        yield done
    if "error" in done:
        raise done["error"]


def states(group):
    """The states that the group goes through, as ``(state, seconds the one before lasted, when)``; filled as it goes."""
    seen = []
    group.dispatcher.subscribe(
        GroupStateChanged, lambda e: seen.append((str(e.new), round(e.seconds, 6), round(anyio.current_time(), 6)))
    )
    return seen


def one_loop_group(handler, *, loop=None, **options):
    """A group of one loop on a mailbox of its own; both."""
    mailbox = box()
    return LoopGroup([MainLoop(mailbox, handler, body=dict, **(loop or {}))], **options), mailbox


async def settled(mailbox):
    return (await mailbox.counts()).settled
