"""A group that works on tasks, and the end of what it has to do."""

from __future__ import annotations

import anyio

from mainspring import LoopGroup


def group_of(tasks, **options):
    return LoopGroup([tasks.loop(**options)], guardian=False)


async def until_done(mailbox, seconds=20, every=None):
    """Wait until no message is left, in real or virtual time. By default look often enough, not more often in a longer wait."""
    with anyio.fail_after(seconds):
        while (await mailbox.counts()).waiting:
            await anyio.sleep(every or seconds / 4_000)
