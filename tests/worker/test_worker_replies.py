"""Replies under a worker: sent while the lease is held, once, whatever the store does."""

from __future__ import annotations

from dataclasses import dataclass

import anyio
import pytest
from loop_support import DOWN

from mainspring import (
    Context,
    DeadLetterPolicy,
    InMemoryMailbox,
    MailboxConnectionError,
    MailboxFullError,
    MainLoop,
    ReplyError,
    RequestFailedError,
    RetryPolicy,
)
from mainspring.events import SettlementDelayed, SettlementRecovered
from mainspring.mailbox.sqlite.mailbox import SQLiteMailbox
from mainspring.worker.leases import SETTLE_TIMEOUT
from support import FaultyMailbox, background, fail, record, settled
from wrapped_backend import WrappedBackend, wrap

pytestmark = pytest.mark.anyio


@dataclass
class Answer:
    text: str


@pytest.mark.parametrize("serialize", [False, True])
async def test_the_result_is_the_reply_and_carries_the_requests_id(serialize):
    async def handle(job: int) -> Answer:
        return Answer(f"it was {job}")

    mailbox, replies = InMemoryMailbox(serialize=serialize), InMemoryMailbox(body=Answer, serialize=serialize)
    async with background(MainLoop(mailbox, handle)):
        request = await mailbox.send(7, reply_to=replies)
        (reply,) = await replies.receive(wait_time_seconds=5)
    assert reply.body == Answer("it was 7")
    assert reply.headers["request_id"] == request
    assert (await mailbox.counts()).settled == 1


async def test_nobody_is_answered_who_did_not_ask():
    async def handle(job: int) -> int:
        return job

    mailbox, replies = FaultyMailbox(), InMemoryMailbox()
    async with background(MainLoop(mailbox, handle)):
        await mailbox.send(1)
        await settled(mailbox)
    assert await replies.approximate_count() == 0
    assert [argument.reply for _, call, argument in mailbox.calls if call == "settle"] == [None]


async def test_reply_and_acknowledgement_are_one_step(virtual_clock):
    async def handle(job: int) -> int:
        return job

    mailbox, replies = FaultyMailbox(), InMemoryMailbox()
    mailbox.next("settle", fail(DOWN))
    async with background(MainLoop(mailbox, handle)):
        await mailbox.send(1, reply_to=replies)
        await anyio.sleep(0)
        while not mailbox.times("settle"):
            await anyio.sleep(0)
        assert await replies.approximate_count() == 0
        await anyio.sleep(10)
        assert await replies.approximate_count() == 1
        assert (await mailbox.counts()).settled == 1
    assert mailbox.settlements() == ["Ack", "Ack"]


async def test_a_failed_handler_answers_nobody(virtual_clock):
    async def handle(job: int) -> int:
        raise ValueError

    mailbox, replies = InMemoryMailbox(), InMemoryMailbox()
    async with background(MainLoop(mailbox, handle, dead_letter=DeadLetterPolicy(max_attempts=3))):
        await mailbox.send(1, reply_to=replies)
        await anyio.sleep(1_000)
        assert await replies.approximate_count() == 0
        (dead,) = await mailbox.dead_letters()
        assert dead.reply_to == replies.address


async def test_a_result_of_the_wrong_type_is_a_failed_attempt():
    async def handle(job: int) -> Answer:
        return "no answer"  # type: ignore[return-value]

    mailbox, replies = InMemoryMailbox(), InMemoryMailbox()
    policy = DeadLetterPolicy(max_attempts=2)
    async with background(MainLoop(mailbox, handle, dead_letter=policy, retry=RetryPolicy(initial_delay=0))):
        await mailbox.send(1, reply_to=replies)
        await settled(mailbox)
        (dead,) = await mailbox.dead_letters()
        assert (dead.error_type, dead.attempt) == ("SerializationError", 2)
        assert "does not fit Answer" in dead.error
    assert await replies.approximate_count() == 0


@pytest.mark.parametrize("address", ["memory://nobody-has-this-one", "gopher://x/y", "memory://"])
async def test_a_reply_that_can_reach_nobody_is_the_end_of_its_message(address):
    async def handle(job: int) -> int:
        return 1

    mailbox = InMemoryMailbox()
    policy = DeadLetterPolicy(max_attempts=2)
    async with MainLoop(mailbox, handle, dead_letter=policy, retry=RetryPolicy(initial_delay=0)) as loop:
        await mailbox.send(1, reply_to=address)
        await settled(mailbox)
        (dead,) = await mailbox.dead_letters()
        assert (dead.error_type, dead.attempt) == ("ReplyNotAvailableError", 1)
        assert loop.outcomes == {"dead_lettered": 1}


async def test_a_full_mailbox_of_replies_is_waited_for(virtual_clock):
    async def handle(job: int) -> int:
        return job

    mailbox, replies = InMemoryMailbox(), InMemoryMailbox(capacity=1)
    await replies.send(0)
    with pytest.raises(MailboxFullError):
        await replies.send(0)
    async with background(MainLoop(mailbox, handle)):
        await mailbox.send(1, reply_to=replies)
        await anyio.sleep(12)
        assert (await mailbox.counts()).in_flight == 1
        (first,) = await replies.receive()
        await first.acknowledge()
        await anyio.sleep(6)
        assert (await mailbox.counts()).settled == 1
        (second,) = await replies.receive()
        assert second.body == 1


async def test_a_reply_that_waits_is_told_once_though_others_are_written_meanwhile(virtual_clock):
    async def handle(job: int) -> int:
        return job

    mailbox, replies = InMemoryMailbox(), InMemoryMailbox(capacity=1)
    await replies.send(0)
    loop = MainLoop(mailbox, handle, concurrency=2)
    events = record(loop, SettlementDelayed, SettlementRecovered)
    async with background(loop):
        await mailbox.send(1, reply_to=replies)
        for job in range(100):
            await mailbox.send(job)
            await anyio.sleep(0.1)
        assert loop.outcomes == {"acknowledged": 100}
        assert [event.first for event in events] == [True] + [False] * (len(events) - 1)
        assert len(events) > 3
        await replies.purge()
        await anyio.sleep(6)
        assert events[-1] == SettlementRecovered(loop.name, len(events) - 1)
    assert loop.outcomes == {"acknowledged": 101}


async def test_how_long_a_reply_is_tried_counts_from_the_end_of_the_handler(virtual_clock):
    ran = []

    async def handle(job: int) -> int:
        ran.append(job)
        await anyio.sleep(100)
        return job

    mailbox, replies = InMemoryMailbox(), InMemoryMailbox(capacity=1)
    await replies.send(0)
    loop = MainLoop(mailbox, handle)
    async with background(loop):
        await mailbox.send(1, reply_to=replies)
        await anyio.sleep(105)
        await replies.purge()
        await anyio.sleep(6)
        assert loop.outcomes == {"acknowledged": 1}
    assert ran == [1]


@pytest.mark.parametrize("trouble", ["refuses", "hangs"])
async def test_a_reply_that_its_store_does_not_take_is_a_failed_attempt_in_the_end(virtual_clock, trouble):
    ran = []

    async def handle(job: int) -> int:
        ran.append(anyio.current_time())
        return job

    class Elsewhere(WrappedBackend):
        def local_name(self, address):
            return None

    class Down(WrappedBackend):
        def local_name(self, address):
            return "down" if address == "down://down" else None

        def sibling(self, name):
            return Down(self.inner.sibling(name))

        async def open(self, scope):
            if trouble == "hangs":
                await anyio.sleep_forever()
            raise MailboxConnectionError("the store of the replies is down")

    mailbox = wrap(InMemoryMailbox(), Elsewhere)
    mailbox.reply_stores = (wrap(InMemoryMailbox("store"), Down),)
    policy = DeadLetterPolicy(max_attempts=2)
    loop = MainLoop(mailbox, handle, visibility_timeout=5, dead_letter=policy, retry=RetryPolicy(initial_delay=0))
    async with loop:
        await mailbox.send(1, reply_to="down://down")
        await anyio.sleep(0.5)  # before a renewal shows that it does
        assert loop.in_flight == 1
        assert loop.trouble is None  # its own store does answer
        await anyio.sleep(2 * SETTLE_TIMEOUT)
        (dead,) = await mailbox.dead_letters()
        assert (dead.error_type, dead.attempt) == ("MailboxConnectionError", 2)
        assert ("is down" if trouble == "refuses" else "has not taken the reply") in dead.error
        assert [failure.error_type for failure in dead.history] == ["MailboxConnectionError"] * 2
        assert loop.outcomes == {"retried": 1, "dead_lettered": 1}
        assert len(ran) == 2


async def test_a_handler_may_reply_by_itself():
    async def handle(job: int, ctx: Context) -> int:
        await ctx.message.reply(job * 2)
        return job

    mailbox, replies = InMemoryMailbox(), InMemoryMailbox()
    async with background(MainLoop(mailbox, handle)):
        await mailbox.send(4, reply_to=replies)
        (reply,) = await replies.receive(wait_time_seconds=5)
        await settled(mailbox)
        assert reply.body == 8
        assert (await replies.counts()).pending == 0


# ------------------------------------------------------------------------------------- a handler that acknowledges itself


@pytest.mark.parametrize("serialize", [False, True])
@pytest.mark.parametrize("by_request", [False, True])
async def test_what_a_handler_returns_after_it_has_acknowledged_is_sent(virtual_clock, serialize, by_request):
    async def handle(job: int, ctx: Context) -> Answer:
        await ctx.message.acknowledge()
        await anyio.sleep(100)
        return Answer(f"it was {job}")

    mailbox = InMemoryMailbox(serialize=serialize, body=int, reply=Answer)
    replies = InMemoryMailbox(body=Answer, serialize=serialize)
    async with mailbox, background(MainLoop(mailbox, handle)):
        if by_request:
            assert await mailbox.request(7, timeout=200) == Answer("it was 7")
        else:
            request = await mailbox.send(7, reply_to=replies)
            (reply,) = await replies.receive(wait_time_seconds=200)
            assert (reply.body, reply.headers["request_id"]) == (Answer("it was 7"), request)
        assert (await mailbox.counts()).settled == 1


async def test_a_result_of_none_is_one_too(virtual_clock):
    async def handle(job: int, ctx: Context) -> None:
        await ctx.message.acknowledge()

    async with InMemoryMailbox(body=int) as mailbox, background(MainLoop(mailbox, handle)):
        assert await mailbox.request(7, timeout=5) is None


@pytest.mark.parametrize("end", ["reply", "nack", "dead_letter"])
async def test_what_a_handler_returns_is_no_reply_where_it_has_said_otherwise(virtual_clock, end):
    async def handle(job: int, ctx: Context) -> int:
        if ctx.attempt == 1:
            await getattr(ctx.message, end)(*{"reply": [1], "nack": [], "dead_letter": ["no"]}[end])
        return 2

    async with InMemoryMailbox(body=int) as mailbox, background(MainLoop(mailbox, handle)):
        if end == "dead_letter":
            with pytest.raises(RequestFailedError, match="no"):
                await mailbox.request(7, timeout=50)
        else:
            assert await mailbox.request(7, timeout=50) == (1 if end == "reply" else 2)
        await anyio.sleep(50)
        assert mailbox.forgotten_replies == 0


async def test_an_error_after_the_acknowledgement_is_logged_and_told_to_the_requester(virtual_clock, caplog):
    async def handle(job: int, ctx: Context) -> int:
        await ctx.message.acknowledge()
        raise ValueError("too late")

    async with InMemoryMailbox(body=int) as mailbox, background(MainLoop(mailbox, handle)):
        with pytest.raises(RequestFailedError, match="ValueError: too late"):
            await mailbox.request(7, timeout=50)
        assert (await mailbox.counts()).settled == 1
    (line,) = [record.getMessage() for record in caplog.records if "by itself" in record.getMessage()]
    assert line.startswith("handle: the handler settled message ")
    assert "ValueError: too late (" in line


async def test_a_result_of_the_wrong_type_after_the_acknowledgement_is_told_to_the_requester(virtual_clock):
    async def handle(job: int, ctx: Context) -> Answer:
        await ctx.message.acknowledge()
        return "no answer"  # type: ignore[return-value]

    async with InMemoryMailbox(body=int) as mailbox, background(MainLoop(mailbox, handle)):
        with pytest.raises(RequestFailedError, match="does not fit Answer") as told:
            await mailbox.request(7, timeout=50)
        assert told.value.error_type == "SerializationError"


async def test_a_requester_hears_of_a_handler_that_is_cancelled_after_the_acknowledgement(virtual_clock):
    async def handle(job: int, ctx: Context) -> int:
        await ctx.message.acknowledge()
        await anyio.sleep_forever()
        return 1

    async with InMemoryMailbox(body=int) as mailbox:
        async with MainLoop(mailbox, handle) as loop:
            pending = await mailbox.submit(7)
            await anyio.sleep(1)
            await loop.shutdown(timeout=1)
        with pytest.raises(RequestFailedError, match="before it had a result"):
            await pending.result(timeout=5)


@pytest.mark.parametrize("trouble", ["refuses", "hangs"])
async def test_a_result_that_cannot_be_sent_after_the_acknowledgement_is_logged(virtual_clock, caplog, trouble):
    async def handle(job: int, ctx: Context) -> int:
        await ctx.message.acknowledge()
        return 1

    class Deaf(WrappedBackend):
        async def send_reply(self, reply):
            if trouble == "refuses":
                raise MailboxConnectionError("it does not answer")
            await anyio.sleep_forever()

        def sibling(self, name):
            return Deaf(self.inner.sibling(name))

    mailbox = wrap(InMemoryMailbox(), Deaf)
    async with MainLoop(mailbox, handle) as loop:
        message_id = await mailbox.send(1, reply_to="anywhere")
        await anyio.sleep(10)
        assert loop.outcomes == {"acknowledged": 1}
    (line,) = [record.getMessage() for record in caplog.records if "was not sent" in record.getMessage()]
    assert line.startswith(f"handle: what the handler returned for message {message_id}, ")


@pytest.mark.parametrize("serialize", [False, True])
@pytest.mark.parametrize("acknowledged", [False, True])
async def test_a_reply_error_reaches_another_store_where_errors_are_wanted(tmp_path, serialize, acknowledged, caplog):
    async def handle(job: int, ctx: Context) -> int:
        if acknowledged:
            await ctx.message.acknowledge()
        raise ReplyError("not found")

    async with (
        SQLiteMailbox(str(tmp_path / "replies.db")) as replies,
        InMemoryMailbox("asked", serialize=serialize) as mailbox,
        background(MainLoop(mailbox, handle)),
    ):
        wanted = await mailbox.send(1, reply_to=replies, headers={"mainspring-reply-errors": "1"})
        former = await mailbox.send(1, reply_to=replies, headers={"reply_errors": "1"})  # as earlier revisions sent it
        await mailbox.send(2, reply_to=replies)
        await settled(mailbox)
        assert await mailbox.dead_letters() == []
        got = await replies.receive(max_messages=10, wait_time_seconds=10)
        got += await replies.receive(max_messages=10)
        for request, reply in zip((wanted, former), got, strict=True):
            assert reply.headers == {"request_id": request, "error": "not found", "error_type": "ReplyError"}
    assert "failed" not in caplog.text
