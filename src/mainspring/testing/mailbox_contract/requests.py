"""Requests: replies that find the one who waits, and news for those to whom none will come."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio

from mainspring.errors import (
    ReplyError,
    RequestCancelledError,
    RequestFailedError,
    RequestTimeoutError,
    SerializationError,
)
from mainspring.mailbox.message import Counts
from mainspring.testing.mailbox_contract.harness import Harness, TooLateError, behaviour, check, equal, raises
from mainspring.worker.main_loop import MainLoop

if TYPE_CHECKING:
    from mainspring.mailbox.mailbox import Mailbox


async def _answer(h: Harness, box: Mailbox[Any, Any], count: int = 1) -> None:
    """Be the worker: reply to that many requests with twice their bodies."""
    for _ in range(count):
        request = await h.one(box, wait=h.wait)
        await request.reply(2 * request.body)


@behaviour("siblings")
async def a_request_returns_its_reply(h: Harness) -> None:
    """request() returns what was replied, at once when it was, and leaves nothing behind."""
    async with h.open() as box:
        async with anyio.create_task_group() as group:
            group.start_soon(_answer, h, box)
            with h.at_once("the reply"):
                equal(await box.request(21, timeout=h.wait), 42, "reply")
        await h.counts(box, settled=1)  # only now: the reply can be there before the acknowledgement is


@behaviour("siblings")
async def replies_find_their_requests(h: Harness) -> None:
    """Of many requests at once each gets its own reply, whatever the order of the replies."""
    async with h.open() as box:
        pending = [await box.submit(number) for number in range(20)]
        requests = await h.all(box)
        equal(len(requests), 20, "requests received")
        for request in reversed(requests):
            await request.reply(2 * request.body)
        for number, waiter in enumerate(pending):
            equal(await waiter.result(timeout=h.wait), 2 * number, "reply")
        equal(box.forgotten_replies, 0, "forgotten replies")


@behaviour("siblings")
async def a_reply_has_the_type_of_the_replies(h: Harness) -> None:
    """A reply is decoded as the mailbox's reply type; one that does not fit is an error of the requester's call."""
    async with h.open(reply=dict[str, int]) as box, h.open() as worker:
        pending = await box.submit("one")
        await (await h.one(worker)).reply({"n": 1})
        equal(await pending.result(timeout=h.wait), {"n": 1}, "reply")
        if h.serializes:
            pending = await box.submit("two")
            await (await h.one(worker)).reply("two")
            with raises(SerializationError, "a reply of another type"):
                await pending.result(timeout=h.wait)


@behaviour("siblings")
async def a_request_that_dies_tells_its_requester(h: Harness) -> None:
    """Where a request is dead-lettered its requester gets RequestFailedError with the reason, at once."""
    async with h.open() as box:
        pending = await box.submit("x")
        request = await h.one(box)
        with h.at_once("the news"):
            await request.dead_letter(LookupError("nowhere to be found"))
            with raises(RequestFailedError, "the result of a dead request") as caught:
                await pending.result(timeout=h.wait)
        (error,) = caught
        assert isinstance(error, RequestFailedError)
        equal((error.error_type, error.error), ("LookupError", "nowhere to be found"), "the reason")
        await h.counts(box, dead=1)


@behaviour("siblings", "cancel")
async def a_request_nobody_waits_for_is_withdrawn(h: Harness) -> None:
    """At its timeout a request() raises RequestTimeoutError, and the request leaves the queue."""
    timeout = h.ample(2.0)  # the sending counts too, and a slow store must have done it by then
    async with h.open() as box:
        with h.takes(timeout, "the request"), raises(RequestTimeoutError, "a request that nobody answers"):
            await box.request("x", timeout=timeout)

        async def withdrawn() -> bool:
            return not (await box.counts()).waiting

        await h.until(withdrawn, "the request was withdrawn")
        if not h.virtual and await box.counts() == Counts():
            raise TooLateError(f"what was to be sent within {timeout:g} s was not sent at all")
        await h.counts(box, settled=1)


@behaviour("siblings", "cancel")
async def a_cancelled_request_tells_its_requester(h: Harness) -> None:
    """Whoever cancels a request, through whatever mailbox object: its requester gets RequestCancelledError."""
    async with h.open() as box:
        for in_flight in (False, True):
            pending = await box.submit("x")
            if in_flight:
                await h.one(box)
            await box.cancel(pending.id)
            with raises(RequestCancelledError, "the result of a cancelled request"):
                await pending.result(timeout=h.wait)
        await h.counts(box, settled=2)


@behaviour("siblings")
async def a_reply_to_a_requester_that_is_gone_is_dropped(h: Harness) -> None:
    """A request whose mailbox object was closed can be replied to and acknowledged; nothing is left of the reply."""
    async with h.open() as worker:
        async with h.open() as box:
            await box.submit("x")
            if box._works_unopened:  # closed is closed for good there: the worker must have an object of its own  # noqa: SLF001 - this package's own
                check(box is not worker, "the factory gives one object twice")
            request = await h.one(worker)
        await request.reply("nobody waits")
        check(request.is_settled, "the request is not settled")
        await h.counts(worker, settled=1)


@behaviour("siblings")
async def a_second_reply_is_dropped(h: Harness) -> None:
    """A reply that comes again, or that nobody waits for, is dropped and counted."""
    async with h.open() as box:
        pending = await box.submit("x")
        request = await h.one(box)
        address = request.reply_to or ""
        async with box._sibling(address) as replies:  # noqa: SLF001 - as another worker's reply would come
            for answer in ("first", "second"):
                await replies.send(answer, headers={"request_id": request.id})
            check(await pending.result(timeout=h.wait) in ("first", "second"), "another reply")

            async def forgotten() -> bool:
                return box.forgotten_replies > 0

            await h.until(forgotten, "the second reply was counted")
        equal(box.forgotten_replies, 1, "forgotten replies")


@behaviour("siblings")
async def a_handler_can_answer_with_an_error(h: Harness) -> None:
    """ReplyError reaches the requester at once, with its text; the message is acknowledged, whether one asked or not."""

    async def refuse(body: str) -> str:
        raise ReplyError(f"there is no {body}")

    async with h.open(body=str, reply=str) as box, h.open("replies") as replies:
        loop = MainLoop(box, refuse)
        async with loop:
            pending = await box.submit("GONE")
            with raises(RequestFailedError, "the result of a refused request") as caught:
                await pending.result(timeout=h.wait)
            failed = caught[0]
            told = isinstance(failed, RequestFailedError) and (failed.error_type, failed.error)
            equal(told, ("ReplyError", "there is no GONE"), "what the requester is told")
            check("there is no GONE" in str(failed), f"it was {failed!r}")
            await box.send("a")
            await box.send("b", reply_to=replies)

            async def all_settled() -> bool:
                return (await box.counts()).settled == 3

            await h.until(all_settled, "messages whose handler raised ReplyError were acknowledged")
        await h.counts(box, settled=3)
        await h.counts(replies)
        equal(dict(loop.outcomes), {"acknowledged": 3}, "outcomes")
