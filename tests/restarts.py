"""What every mailbox on a server promises of that server's restart."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import pytest

from mainspring import LoopGroup, MailboxConnectionError, MainLoop
from mainspring.mailbox.message import Counts
from servers import PATIENCE

if TYPE_CHECKING:
    from mainspring import Mailbox
    from servers import Program


async def goes_on_after_a_restart(server: Program, mailbox: Mailbox[int, None], how: int) -> None:
    """What was sent before is done after it, a handler at work goes on, and its acknowledgement is written."""
    done: list[int] = []
    at_work, go_on = anyio.Event(), anyio.Event()

    async def handle(job: int) -> None:
        if job == 0:
            at_work.set()
            await go_on.wait()
        done.append(job)

    async with LoopGroup([MainLoop(mailbox, handle, concurrency=2)], guardian=False):
        await mailbox.send_many([0, 1])
        await at_work.wait()
        server.stop(how)
        with pytest.raises(MailboxConnectionError):
            await mailbox.send(99)
        server.start()
        with anyio.fail_after(PATIENCE):
            while True:
                try:
                    await mailbox.send(2, dedup_key="2")
                    break
                except MailboxConnectionError:
                    await anyio.sleep(0.05)
            go_on.set()
            while sorted(done) != [0, 1, 2] or (await mailbox.counts()).waiting:
                await anyio.sleep(0.02)
        assert await mailbox.counts() == Counts(settled=3)
