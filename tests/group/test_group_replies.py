"""A group's memory mailbox that nobody opened replies to other stores, and is its user's again afterwards."""

from __future__ import annotations

import anyio
import pytest

from mainspring import InMemoryMailbox, LoopGroup, MainLoop, ReplyNotAvailableError, open_mailbox

pytestmark = pytest.mark.anyio


async def test_an_unopened_memory_mailbox_replies_to_another_store(tmp_path):
    jobs = InMemoryMailbox("jobs")
    url = f"sqlite:///{tmp_path}/replies.db?name=replies"

    async def double(job: int) -> int:
        return 2 * job

    async with open_mailbox(url, body=int) as replies:
        async with LoopGroup([MainLoop(jobs, double)]):
            sent = await jobs.send(21, reply_to=url)
            with anyio.fail_after(10):
                (reply,) = await replies.receive(wait_time_seconds=10)
        assert reply.body == 42
        assert reply.headers["request_id"] == sent
        await reply.acknowledge()
    assert (await jobs.counts()).settled == 1
    await jobs.send(21, reply_to=url)
    (message,) = await jobs.receive()
    with pytest.raises(ReplyNotAvailableError, match="open the mailbox with `async with`"):
        await message.reply(42)
