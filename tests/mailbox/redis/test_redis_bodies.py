"""Large bodies do not pass through the library: each message comes with its body or not at all, and no body stays behind."""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager
from functools import partial

import anyio
import pytest

from mainspring import MailboxConnectionError, MailboxFullError
from mainspring.mailbox.message import Counts
from mainspring.mailbox.redis.commands import LARGE
from redis_support import CALLS, place, soon, used_memory
from servers import RedisServer
from support import outcomes

pytestmark = pytest.mark.anyio

SIZES = pytest.mark.parametrize("length", [LARGE - 2, LARGE - 1], ids=["small", "large"])
"""Of texts: the longest whose JSON is kept with its message, and the shortest whose JSON is kept apart."""


@pytest.fixture
def here(redis_url):
    with place(redis_url) as made:
        yield made


@pytest.fixture(scope="module")
def server():
    with RedisServer() as own:
        yield own


@pytest.fixture
def alone(server):
    with place(server.url) as made:
        yield made


def text(what, length=LARGE):
    """A text of that length, which begins with what is said."""
    return f"{what} ".ljust(length, "x")


def apart(here, name="jobs"):
    """How many bodies are kept apart."""
    return here.call("HLEN", here.key("bodies", name))


async def received(mailbox, count, **options):
    """Receive as many messages."""
    found = await mailbox.receive(max_messages=count, **options)
    assert len(found) == count
    return found


@asynccontextmanager
async def stopped_at(line, name):
    """A line that stops passing calls on where a command of that name was sent, until it is let go.

    Yields an event that is set then.
    """
    reached = anyio.Event()

    def look(passage, command):
        if command[0] == name and not reached.is_set():
            line.calls.hold()
            reached.set()

    line.on_command = look
    yield reached
    line.on_command = None
    line.calls.let_go()


# ------------------------------------------------------------------------------------------------ what becomes of a message


@SIZES
async def test_a_message_has_its_body_however_it_comes_and_goes(here, waiting, length):
    large = int(length == LARGE - 1)
    async with here.mailbox() as mailbox, here.mailbox() as sender:
        await sender.send(text("claimed", length), headers={"a": "b"}, reply_to="elsewhere")
        assert apart(here) == large
        (message,) = await mailbox.receive()
        assert (message.body, message.headers, message.reply_to) == (text("claimed", length), {"a": "b"}, "elsewhere")
        await message.nack()
        (message,) = await mailbox.receive()
        assert message.body == text("claimed", length)
        await message.acknowledge()
        assert apart(here) == 0
        await waiting.start(mailbox)
        await sender.send(text("sent to a receive that waits", length))
        await waiting.until(1)
        (message,) = waiting.messages
        assert message.body == text("sent to a receive that waits", length)
        await message.release()
        assert await mailbox.purge() == 1
        assert apart(here) == 0
        late = await sender.send(text("delayed", length), delay=600)
        many = [text("one of many", length), "small", text("another", length)]
        await sender.send_many(many)
        assert apart(here) == 3 * large
        assert [message.body for message in await received(mailbox, 3)] == many
        await mailbox.cancel(late)
        assert apart(here) == 2 * large
        await mailbox.purge()
        assert here.found() == [here.key("state").encode()]


@SIZES
async def test_a_dead_letter_has_its_body(here, length):
    async with here.mailbox() as mailbox:
        await mailbox.send(text("dies", length))
        await mailbox.send(text("expires", length), expires_in=0.001)
        await anyio.sleep(0.002)
        (message,) = await mailbox.receive()
        await message.dead_letter("no")
        assert apart(here) == 0
        assert {letter.body for letter in await mailbox.dead_letters()} == {
            text("dies", length),
            text("expires", length),
        }
        await mailbox.replay_dead_letters()
        assert {message.body for message in await received(mailbox, 2)} == {
            text("dies", length),
            text("expires", length),
        }


@SIZES
async def test_a_reply_has_its_body(here, length):
    async with here.mailbox() as mailbox, here.mailbox("replies") as replies:
        request = mailbox.request("question", timeout=10)
        async with anyio.create_task_group() as group:

            async def answer() -> None:
                (message,) = await mailbox.receive(wait_time_seconds=10)
                await message.reply(text("answer", length))

            group.start_soon(answer)
            assert await request == text("answer", length)
        await mailbox.send("question", reply_to=replies.name)
        (message,) = await mailbox.receive()
        await message.reply(text("answer", length))
        (message,) = await replies.receive()
        assert message.body == text("answer", length)


async def test_messages_with_their_bodies_inside_are_read(here):
    """As they were stored before, and as replayed ones are."""
    async with here.mailbox() as mailbox:
        one = await mailbox.send("x")
        value = here.call("HGET", here.key("messages"), one)
        here.call("HSET", here.key("messages"), one, value.replace(b'"x"', b'"%b"' % (b"y" * 2 * LARGE)))
        (message,) = await mailbox.receive()
        assert message.body == "y" * 2 * LARGE
        await message.acknowledge()
        assert await mailbox.counts() == Counts(settled=1)


# ------------------------------------------------------------------------------------------------------------ refused sends


async def test_a_send_that_is_refused_leaves_no_body(here):
    async with here.mailbox(capacity=2) as mailbox:
        first = await mailbox.send(text("first"), dedup_key="k")
        assert await mailbox.send(text("second"), dedup_key="k") == first
        with pytest.raises(MailboxFullError):
            await mailbox.send_many([text("third"), text("fourth")])
        assert apart(here) == 1
        (message,) = await mailbox.receive()
        assert message.body == text("first")
        await message.acknowledge()
        assert apart(here) == 0


async def test_a_send_that_is_made_again_keeps_the_body_of_the_first(here):
    """With its own id and key, as a reply whose answer was lost."""
    async with here.mailbox() as mailbox:
        await mailbox.send(text("x"), dedup_key="k")
        (message,) = await mailbox.receive()
        (stored,) = here.call("HKEYS", here.key("bodies"))
        envelope = message.delivery
        from mainspring.mailbox.message import Envelope

        again = Envelope(envelope.message_id, envelope.body, dedup_key="k")
        assert await mailbox.backend.send([again]) == [stored.decode()]
        await message.nack()
        (message,) = await mailbox.receive()
        assert message.body == text("x")
        here.call("DEL", here.key("dedup"))  # then it takes the place of the first
        assert await mailbox.backend.send([again]) == [stored.decode()]
        (message,) = await mailbox.receive()
        assert message.body == text("x")
        await message.acknowledge()
        assert apart(here) == 0


async def test_with_full_memory_a_send_leaves_no_body(alone):
    async with alone.mailbox() as mailbox:
        await mailbox.send(text("kept"))
        alone.call("CONFIG", "SET", "maxmemory", used_memory(alone) + 3 * LARGE)
        try:
            sent = await outcomes(*[partial(mailbox.send, text(number)) for number in range(20)])
            refused = [error for error in sent if isinstance(error, MailboxConnectionError)]
            assert refused
            assert all("OOM" in str(error) for error in refused)
            assert apart(alone) == 1 + 20 - len(refused)
            (message,) = await mailbox.receive()
            assert message.body == text("kept")
            await message.acknowledge()
        finally:
            alone.call("CONFIG", "SET", "maxmemory", 0)


@pytest.mark.parametrize("what", ["the command", "the type of the key"])
async def test_a_body_that_cannot_be_stored_is_its_senders_error(alone, what):
    alone.call("ACL", "SETUSER", "plain", "reset", "on", ">secret", "~{ms:*", "&{ms:*", "+@all")
    async with alone.mailbox(username="plain", password="secret") as mailbox:
        if what == "the command":
            alone.call("ACL", "SETUSER", "plain", "-hset")
        else:
            alone.call("SET", alone.key("bodies"), "another program's")
        with pytest.raises(MailboxConnectionError, match=r"can't run this command|WRONGTYPE"):
            await mailbox.send(text("x"))
        alone.call("ACL", "SETUSER", "plain", "+hset")
        alone.call("DEL", alone.key("bodies"))
        assert await mailbox.counts() == Counts()
        await mailbox.send(text("y"))
        (message,) = await mailbox.receive()
        assert message.body == text("y")


# --------------------------------------------------------------------------------------- between a body and its message


async def test_a_body_that_is_deleted_before_its_message_is_stored_is_sent_again(here, line):
    """By a purge or a recovery in another process."""
    async with line.mailbox() as mailbox:
        async with stopped_at(line, b"FCALL") as reached, anyio.create_task_group() as group:
            # The line has passed on what came before: with the call, or before it.
            here.call("HSET", here.key("bodies"), "orphan", "x")
            group.start_soon(mailbox.send, text("x"))
            await reached.wait()
            here.call("UNLINK", here.key("bodies"))
            line.calls.let_go()
        (message,) = await mailbox.receive()
        assert message.body == text("x")


async def test_the_library_is_loaded_behind_a_body(alone):
    async with alone.mailbox() as mailbox:
        alone.call("FUNCTION", "FLUSH")
        await mailbox.send(text("x"))
        (message,) = await mailbox.receive()
        assert message.body == text("x")


async def test_a_body_whose_call_was_lost_is_deleted(here):
    async with here.mailbox(recovery_interval=0.05) as mailbox:
        await mailbox.send(text("x"))
        here.call("HSET", here.key("bodies"), "lost", "x" * LARGE, "lost as well", "x" * LARGE)
        await soon(lambda: apart(here) == 1)
        (message,) = await mailbox.receive()
        assert message.body == text("x")


async def test_a_send_whose_answer_is_lost_has_been_made_whole_or_not_at_all(here, line):
    async with line.mailbox(recovery_interval=0.05) as mailbox:
        line.answers.hold()
        async with anyio.create_task_group() as group:

            async def send() -> None:
                with pytest.raises(MailboxConnectionError):
                    await mailbox.send(text("x"))

            group.start_soon(send)
            await line.lose_answer()
        found = await mailbox.receive()
        assert [message.body for message in found] == [text("x")] * (await mailbox.counts()).in_flight
        for message in found:
            await message.acknowledge()
        await soon(lambda: apart(here) == 0)


# -------------------------------------------------------------------------------------- between a claim and its bodies


async def test_a_message_whose_body_was_deleted_by_hand_is_dropped(here, caplog):
    caplog.set_level(logging.WARNING, "mainspring.mailbox")
    async with here.mailbox() as mailbox:
        lost = await mailbox.send(text("lost"), headers={"a": "b"})
        await mailbox.send("small")
        await mailbox.send(text("dies"), expires_in=600)
        here.call("HDEL", here.key("bodies"), lost)
        (small, dies) = await mailbox.receive(max_messages=10)
        assert (small.body, dies.body) == ("small", text("dies"))
        here.call("UNLINK", here.key("bodies"))
        await dies.dead_letter("no")
        await small.acknowledge()
        assert await mailbox.receive() == []
        assert await mailbox.dead_letters() == []
        assert await mailbox.counts() == Counts(settled=1)
    assert caplog.text.count("1 index entries without a message were dropped") == 2


async def test_a_message_that_is_cancelled_before_its_body_is_fetched_does_not_come(here, line):
    async with line.mailbox() as mailbox, here.mailbox() as other:
        gone, stays = await other.send(text("gone")), await other.send(text("stays"))
        found: list[object] = []
        async with stopped_at(line, b"HMGET") as reached, anyio.create_task_group() as group:

            async def receive() -> None:
                found.extend(await mailbox.receive(max_messages=2))

            group.start_soon(receive)
            await reached.wait()
            await other.cancel(gone)
            line.calls.let_go()
        assert [message.id for message in found] == [stays]
        assert await other.dead_letters() == []


@pytest.mark.parametrize("how", ["cancelled", "closed", "the connection is lost"])
@pytest.mark.parametrize("comes", ["claimed", "pushed"])
async def test_a_receive_that_ends_before_its_bodies_come_has_claimed_nothing(here, line, how, comes):
    async with line.mailbox() as mailbox, here.mailbox() as other:
        if comes == "claimed":
            await other.send(text("x"))
        ended: list[object] = []
        async with stopped_at(line, b"HMGET") as reached, anyio.create_task_group() as group:
            scope = anyio.CancelScope()

            async def receive() -> None:
                with scope:
                    ended.extend(await outcomes(partial(mailbox.receive, wait_time_seconds=600)))

            group.start_soon(receive)
            if comes == "pushed":
                await soon(lambda: here.waiters())
                await other.send(text("x"))
            await reached.wait()
            if how == "cancelled":
                scope.cancel()
                await anyio.sleep(0.02)
                line.calls.let_go()
            elif how == "closed":
                group.start_soon(mailbox.close)
                await anyio.sleep(0.02)
                line.calls.let_go()
            else:
                line.cut(CALLS)
                line.calls.let_go()
        if how != "cancelled":
            (end,) = ended
            assert end == [] if how == "closed" else isinstance(end, MailboxConnectionError)
        (message,) = await other.receive(wait_time_seconds=10)
        assert (message.body, message.attempt) == (text("x"), 1)
        await message.acknowledge()
        assert apart(here) == 0


async def test_receives_that_fetch_at_the_same_time_get_their_own(here, waiting):
    async with here.mailbox() as mailbox, here.mailbox() as sender:
        for _ in range(5):
            await waiting.start(mailbox)
        async with anyio.create_task_group() as group:
            for number in range(5):
                group.start_soon(sender.send, text(number))
        await soon(lambda: len(waiting.messages) == 5)  # one receive may get several
        assert {message.body for message in waiting.messages} == {text(number) for number in range(5)}
