"""Replies: one step with the acknowledgement, sent only while the lease is held, and carrying the request's id."""

from __future__ import annotations

from mainspring.errors import MessageSettledError, ReplyNotAvailableError, SerializationError
from mainspring.testing.mailbox_contract.harness import Harness, behaviour, check, equal, raises


@behaviour("transactional_reply")
async def a_reply_arrives_and_acknowledges(h: Harness) -> None:
    """reply() sends to the mailbox named by reply_to, with the request's id in its headers, and settles the request."""
    async with h.open() as box, h.open("replies") as replies:
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


@behaviour("transactional_reply")
async def reply_to_can_be_a_mailbox(h: Harness) -> None:
    """reply_to takes a mailbox object as well as its name."""
    async with h.open() as box, h.open("replies") as replies:
        await box.send("ask", reply_to=replies)
        await (await h.one(box)).reply("answer")
        equal((await h.one(replies)).body, "answer", "the reply")
        await h.counts(box, settled=1)


@behaviour("transactional_reply")
async def a_reply_wakes_the_requester(h: Harness) -> None:
    """A reply to a mailbox on which somebody waits is received at once."""
    import anyio

    async with h.open() as box, h.open("replies") as replies:
        got: list[object] = []

        async def wait() -> None:
            got.append((await h.one(replies, wait=h.wait)).body)

        await box.send("ask", reply_to=replies.name)
        request = await h.one(box)
        with h.at_once("waking the requester"):
            async with anyio.create_task_group() as group:
                group.start_soon(wait)
                await h.rest()
                await request.reply("answer")
        equal(got, ["answer"], "what the requester got")


@behaviour("transactional_reply", "durable")
async def replies_to_a_mailbox_nobody_has_open_are_kept(h: Harness) -> None:
    """On a durable store a reply to a name that nobody has open waits there."""
    async with h.open() as box:
        await box.send("ask", reply_to=h.named("replies"))
        await (await h.one(box)).reply("answer")
        async with h.open("replies") as replies:
            equal((await h.one(replies)).body, "answer", "the reply")


@behaviour()
async def a_reply_nobody_asked_for_is_an_error(h: Harness) -> None:
    """Without reply_to, reply() raises ReplyNotAvailableError; the message is not settled and can be acknowledged."""
    async with h.open() as box:
        await box.send("x")
        message = await h.one(box)
        with raises(ReplyNotAvailableError, "a reply without reply_to"):
            await message.reply("answer")
        check(not message.is_settled, "the refused reply settled the message")
        await h.counts(box, in_flight=1)
        await message.acknowledge()
        await h.counts(box, settled=1)


@behaviour()
async def a_reply_to_nowhere_is_an_error(h: Harness) -> None:
    """Where reply_to cannot be reached by its name, reply() raises ReplyNotAvailableError and settles nothing."""
    async with h.open() as box:
        await box.send("x", reply_to="nowhere://at-all")
        message = await h.one(box)
        with raises(ReplyNotAvailableError, "a reply to an address that cannot be opened"):
            await message.reply("answer")
        check(not message.is_settled, "the refused reply settled the message")
        await message.acknowledge()


@behaviour()
async def a_reply_to_a_strange_store_is_an_error(h: Harness) -> None:
    """A reply_to on a store that nothing here has named is ReplyNotAvailableError at once: that store is not called."""
    async with h.open() as box:
        for url in ("redis://strange.invalid/0", "nats://strange.invalid", "postgresql://strange.invalid/db"):
            await box.send("x", reply_to=url)
            message = await h.one(box)
            with raises(ReplyNotAvailableError, f"a reply to {url}"):
                await message.reply("answer")
            await message.acknowledge()
        await h.counts(box, settled=3)


@behaviour("transactional_reply")
async def a_reply_of_the_wrong_type_is_refused(h: Harness) -> None:
    """A reply that does not fit the reply type raises SerializationError; nothing leaves, nothing is settled."""
    async with h.open(reply=int) as box, h.open("replies") as replies:
        await box.send("x", reply_to=replies.name)
        message = await h.one(box)
        with raises(SerializationError, "a string where the reply is an int"):
            await message.reply("seven")
        check(not message.is_settled, "the refused reply settled the message")
        await h.counts(replies)
        await message.reply(7)
        equal((await h.one(replies)).body, 7, "the reply that fits")
        await h.counts(box, settled=1)


@behaviour("transactional_reply")
async def an_acknowledge_after_a_reply_does_nothing(h: Harness) -> None:
    """A reply has acknowledged: acknowledge() then does nothing, a second reply raises MessageSettledError."""
    async with h.open() as box, h.open("replies") as replies:
        await box.send("x", reply_to=replies.name)
        message = await h.one(box)
        await message.reply("answer")
        await message.acknowledge()
        with raises(MessageSettledError, "a second reply"):
            await message.reply("another answer")
        await h.counts(box, settled=1)
        await h.counts(replies, pending=1)


@behaviour("transactional_reply")
async def a_mailbox_can_reply_to_itself(h: Harness) -> None:
    """reply_to may name the mailbox of the request: the reply then queues there."""
    async with h.open() as box:
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
