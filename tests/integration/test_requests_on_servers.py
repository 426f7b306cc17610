"""Requests to a MainLoop that works through another mailbox object: what comes back on each server."""

from __future__ import annotations

from dataclasses import dataclass

import anyio
import pytest

from mainspring import CancelOutcome, MainLoop, Reject
from mainspring.errors import RequestCancelledError, RequestFailedError, RequestTimeoutError
from stores import SERVERS, on

pytestmark = [pytest.mark.anyio, on(*SERVERS)]


@dataclass
class Sum:
    total: int


async def test_each_request_gets_its_own_reply_in_its_type(store):
    async def add(job: list[int]) -> Sum:
        return Sum(sum(job))

    replies = {}

    async def ask(number):
        replies[number] = await mailbox.request([number, number], timeout=10)

    async with store.box(body=list[int], reply=Sum) as mailbox, store.box() as other:
        pending = await mailbox.submit([4, 5])
        with pytest.raises(RequestTimeoutError):
            await pending.result(timeout=0)
        async with MainLoop(other, add, concurrency=8):
            assert await pending.result(timeout=10) == Sum(9)
            async with anyio.create_task_group() as tasks:
                for number in range(20):
                    tasks.start_soon(ask, number)
        assert replies == {number: Sum(2 * number) for number in range(20)}
        assert mailbox.forgotten_replies == 0
        counts = await other.counts()
        assert (counts.waiting, counts.settled, counts.dead) == (0, 21, 0)


async def test_a_request_that_dies_or_is_cancelled_fails_its_requester_at_once(store):
    begun = anyio.Event()

    async def handle(job: str) -> int:
        if job == "bad":
            raise Reject("it never works")
        begun.set()
        await anyio.sleep(3_600)

    async with store.box(body=str) as mailbox, store.box() as other, MainLoop(other, handle, visibility_timeout=3_600):
        with anyio.fail_after(10):
            with pytest.raises(RequestFailedError, match="Reject: it never works"):
                await mailbox.request("bad", timeout=3_600)
            pending = await mailbox.submit("long")
            await begun.wait()
            assert await other.cancel(pending.id) is CancelOutcome.CANCELLED
            with pytest.raises(RequestCancelledError):
                await pending.result(timeout=3_600)
        (letter,) = await mailbox.dead_letters()
        assert letter.body == "bad"


async def test_the_news_of_a_cancellation_makes_no_mailbox_for_a_requester_that_has_gone(store):
    """Each such mailbox would stay for a day; on NATS it is six streams."""
    async with store.box() as other:
        async with store.box() as mailbox:
            pending = await mailbox.submit("x")
            (request,) = await other.receive()
            await request.release()
            replies = other.sibling(request.reply_to)
            assert await replies.exists()
        assert not await replies.exists()
        assert await other.cancel(pending.id) is CancelOutcome.REMOVED
        assert not await replies.exists()
