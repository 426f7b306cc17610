"""Replies and requests: a reply is one step with the acknowledgement, and finds the requester that waits for it."""

from __future__ import annotations

import anyio

from mainspring.errors import (
    MessageSettledError,
    ReplyError,
    ReplyNotAvailableError,
    RequestCancelledError,
    RequestFailedError,
    RequestTimeoutError,
    SerializationError,
)
from mainspring.mailbox.message import Counts
from mainspring.testing.mailbox_contract.harness import (
    AnyMailbox,
    Behaviour,
    Harness,
    behaviour,
    check,
    equal,
    from_row,
    on_mailbox,
    raises,
    texts,
)
from mainspring.worker.main_loop import MainLoop


@on_mailbox("transactional_reply", also="replies")
async def a_reply_arrives_and_acknowledges(h: Harness, box: AnyMailbox, replies: AnyMailbox) -> None:
    """reply() sends to the mailbox named by reply_to, with the request's id in its headers, and settles the request."""
    sent = await box.send({"ask": 1}, reply_to=replies.name)
    request = await h.one(box)
    equal(request.reply_to, replies.name, "reply_to")
    await request.reply({"answer": 2})
    check(request.is_settled, "the request is not settled")
    await h.counts(box, settled=1)
    await h.counts(replies, pending=1)
    reply = await h.one(replies)
    equal((reply.body, reply.headers.get("request_id")), ({"answer": 2}, sent), "body and request_id")
    equal((reply.delivery_count, reply.attempt), (1, 1), "counts of the reply")
    check(reply.id != sent, "the reply has the request's own id")


@on_mailbox("transactional_reply", also="replies")
async def reply_to_can_be_a_mailbox(h: Harness, box: AnyMailbox, replies: AnyMailbox) -> None:
    """reply_to takes a mailbox object as well as its name."""
    await (await h.delivery(box, "ask", reply_to=replies)).reply("answer")
    equal((await h.one(replies)).body, "answer", "the reply")
    await h.counts(box, settled=1)


@on_mailbox("transactional_reply", also="replies")
async def a_reply_wakes_the_requester(h: Harness, box: AnyMailbox, replies: AnyMailbox) -> None:
    """A reply to a mailbox on which a receive waits is received at once."""
    request = await h.delivery(box, "ask", reply_to=replies.name)
    with h.at_once("waking the requester"):
        async with h.waiting(replies) as received:
            await request.reply("answer")
    equal([texts(found) for found in received], [["answer"]], "what the requester got")


@on_mailbox("transactional_reply", "durable")
async def replies_to_a_mailbox_nobody_has_open_are_kept(h: Harness, box: AnyMailbox) -> None:
    """On a durable store a reply to a mailbox that is not open waits there."""
    await (await h.delivery(box, "ask", reply_to=h.named("replies"))).reply("answer")
    async with h.open("replies") as replies:
        equal((await h.one(replies)).body, "answer", "the reply")


def _unanswerable(name: str, claim: str, *addresses: str | None) -> Behaviour:
    async def run(h: Harness, box: AnyMailbox) -> None:
        for address in addresses:
            message = await h.delivery(box, reply_to=address)
            with raises(ReplyNotAvailableError, f"a reply to {address}"):
                await message.reply("answer")
            check(not message.is_settled, "the refused reply settled the message")
            await message.acknowledge()
        await h.counts(box, settled=len(addresses))

    return from_row(name, claim, run)


UNANSWERABLE = [
    _unanswerable("a_reply_nobody_asked_for_is_an_error",
                  "Without reply_to, reply() raises ReplyNotAvailableError; the message can be acknowledged.", None),
    _unanswerable("a_reply_to_nowhere_is_an_error",
                  "Where reply_to cannot be reached by its name, reply() raises ReplyNotAvailableError and settles nothing.",
                  "nowhere://at-all"),
    _unanswerable("a_reply_to_a_strange_store_is_an_error",
                  "A reply_to on a store that the program has not named is ReplyNotAvailableError: that store is not called.",
                  "redis://strange.invalid/0", "nats://strange.invalid", "postgresql://strange.invalid/db"),
]  # fmt: skip
"""Addresses that no reply can be sent to."""


@on_mailbox("transactional_reply", reply=int, also="replies")
async def a_reply_of_the_wrong_type_is_refused(h: Harness, box: AnyMailbox, replies: AnyMailbox) -> None:
    """A reply that does not fit the reply type raises SerializationError; nothing leaves, nothing is settled."""
    message = await h.delivery(box, reply_to=replies.name)
    with raises(SerializationError, "a string where the reply is an int"):
        await message.reply("seven")
    check(not message.is_settled, "the refused reply settled the message")
    await h.counts(replies)
    await message.reply(7)
    equal((await h.one(replies)).body, 7, "the reply that fits")
    await h.counts(box, settled=1)


@on_mailbox("transactional_reply", also="replies")
async def an_acknowledge_after_a_reply_does_nothing(h: Harness, box: AnyMailbox, replies: AnyMailbox) -> None:
    """A reply has acknowledged: acknowledge() then does nothing, a second reply raises MessageSettledError."""
    message = await h.delivery(box, reply_to=replies.name)
    await message.reply("answer")
    await message.acknowledge()
    with raises(MessageSettledError, "a second reply"):
        await message.reply("another answer")
    await h.counts(box, settled=1)
    await h.counts(replies, pending=1)


@on_mailbox("transactional_reply")
async def a_mailbox_can_reply_to_itself(h: Harness, box: AnyMailbox) -> None:
    """reply_to may name the mailbox of the request: the reply then queues there."""
    sent = await box.send("ask", reply_to=box.name)
    await (await h.one(box)).reply("answer")
    await h.counts(box, pending=1, settled=1)
    reply = await h.one(box)
    equal((reply.body, reply.headers.get("request_id")), ("answer", sent), "the reply")


@behaviour()
async def a_reply_reaches_another_store(h: Harness) -> None:
    """A reply_to that is another store's URL gets the reply, and then the request is settled."""
    from mainspring.mailbox.open import open_mailbox

    url = f"memory://{h.named('elsewhere')}"
    async with open_mailbox(url) as elsewhere, h.open() as box:
        sent = await box.send("ask", reply_to=url)
        await (await h.one(box)).reply("answer")
        reply = await h.one(elsewhere)
        equal((reply.body, reply.headers.get("request_id")), ("answer", sent), "the reply")
        await h.counts(box, settled=1)


async def _answer(h: Harness, box: AnyMailbox, count: int = 1) -> None:
    """Reply to ``count`` requests with twice their bodies, as a worker."""
    for _ in range(count):
        request = await h.one(box, wait=h.wait)
        await request.reply(2 * request.body)


@on_mailbox("siblings")
async def a_request_returns_its_reply(h: Harness, box: AnyMailbox) -> None:
    """request() returns what was replied, at once when it was, and leaves nothing behind."""
    async with anyio.create_task_group() as group:
        group.start_soon(_answer, h, box)
        with h.at_once("the reply"):
            equal(await box.request(21, timeout=h.wait), 42, "reply")
    await h.counts(box, settled=1)  # only now: the reply can be there before the acknowledgement is


@on_mailbox("siblings")
async def replies_find_their_requests(h: Harness, box: AnyMailbox) -> None:
    """Of many requests at once each gets its own reply, whatever the order of the replies."""
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


def _reason(error: BaseException) -> tuple[str, str]:
    assert isinstance(error, RequestFailedError)
    return error.error_type, error.error


@on_mailbox("siblings")
async def a_request_that_dies_tells_its_requester(h: Harness, box: AnyMailbox) -> None:
    """Where a request is dead-lettered its requester gets RequestFailedError with the reason, at once."""
    pending = await box.submit("x")
    request = await h.one(box)
    with h.at_once("the news"):
        await request.dead_letter(LookupError("nowhere to be found"))
        with raises(RequestFailedError, "the result of a dead request") as caught:
            await pending.result(timeout=h.wait)
    equal(_reason(caught[0]), ("LookupError", "nowhere to be found"), "the reason")
    await h.counts(box, dead=1)


@on_mailbox("siblings", "cancel")
async def a_request_nobody_waits_for_is_withdrawn(h: Harness, box: AnyMailbox) -> None:
    """At its timeout a request() raises RequestTimeoutError, and the request leaves the queue."""
    timeout = h.ample(2.0)  # the sending counts too, and a slow store must have done it by then
    with h.takes(timeout, "the request"), raises(RequestTimeoutError, "a request without an answer"):
        await box.request("x", timeout=timeout)

    async def withdrawn() -> bool:
        return not (await box.counts()).waiting

    await h.until(withdrawn, "the request was withdrawn")
    if not h.virtual and await box.counts() == Counts():
        h.late = f"what was to be sent within {timeout:g} s was not sent at all"
    await h.counts(box, settled=1)


@on_mailbox("siblings", "cancel")
async def a_cancelled_request_tells_its_requester(h: Harness, box: AnyMailbox) -> None:
    """When a request is cancelled, through any mailbox object, its requester gets RequestCancelledError."""
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
            if box.backend.works_unopened:  # closed is closed for good there: the worker must have an object of its own
                check(box is not worker, "the factory gives one object twice")
            request = await h.one(worker)
        await request.reply("too late")
        check(request.is_settled, "the request is not settled")
        await h.counts(worker, settled=1)


@on_mailbox("siblings")
async def a_second_reply_is_dropped(h: Harness, box: AnyMailbox) -> None:
    """A second reply, or one without a waiting requester, is dropped and counted."""
    pending = await box.submit("x")
    request = await h.one(box)
    address = request.reply_to or ""
    async with box.sibling(address) as replies:  # as another worker's reply would come
        for answer in ("first", "second"):
            await replies.send(answer, headers={"request_id": request.id})
        check(await pending.result(timeout=h.wait) in ("first", "second"), "another reply")

        async def forgotten() -> bool:
            return box.forgotten_replies > 0

        await h.until(forgotten, "the second reply was counted")
    equal(box.forgotten_replies, 1, "forgotten replies")


@on_mailbox("siblings", body=str, reply=str, also="replies")
async def a_handler_can_answer_with_an_error(h: Harness, box: AnyMailbox, replies: AnyMailbox) -> None:
    """ReplyError reaches the requester at once, with its text; the message is acknowledged, with or without a requester."""

    async def refuse(body: str) -> str:
        raise ReplyError(f"there is no {body}")

    loop = MainLoop(box, refuse)
    async with loop:
        pending = await box.submit("GONE")
        with raises(RequestFailedError, "the result of a refused request") as caught:
            await pending.result(timeout=h.wait)
        equal(_reason(caught[0]), ("ReplyError", "there is no GONE"), "what the requester is told")
        check("there is no GONE" in str(caught[0]), f"it was {caught[0]!r}")
        await box.send("a")
        await box.send("b", reply_to=replies)

        async def all_settled() -> bool:
            return (await box.counts()).settled == 3

        await h.until(all_settled, "messages whose handler raised ReplyError were acknowledged")
    await h.counts(box, settled=3)
    await h.counts(replies)
    equal(dict(loop.outcomes), {"acknowledged": 3}, "outcomes")
