"""What the NATS mailbox does beyond the contract: fencing by the server, what a crash leaves half-done, other programs."""

from __future__ import annotations

import shutil
import signal

import anyio
import anyio.to_thread
import pytest

from mainspring import MainLoop
from mainspring.core import clock
from mainspring.errors import (
    InvalidParameterError,
    MailboxConnectionError,
    MailboxFullError,
    ReceiptHandleExpiredError,
    ReplyNotAvailableError,
    SerializationError,
)
from mainspring.mailbox.message import Counts, Envelope
from mainspring.mailbox.nats.mailbox import NatsMailbox
from mainspring.mailbox.nats.messages import StoredMessage
from mainspring.mailbox.nats.names import Names
from nats_support import ACK, REMOVE, cut_off, one, reconnected, several, until_it_works
from ports import free_port
from servers import NatsServer

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.loops("asyncio", "uvloop"),
]


async def in_two_hands(here, sender, other):
    """Two deliveries of one message: the server has taken it back, and the first one's holder trusts in its lease."""
    await sender.send("x", reply_to=f"{here.prefix}-replies")
    old = await one(sender, lease=600)
    await here.server.deliver_again(here.names().queue, 1)
    return old, await one(other)


CALLS = {
    "acknowledge": lambda message: message.acknowledge(),
    "nack": lambda message: message.nack(),
    "delayed nack": lambda message: message.nack(delay=60),
    "release": lambda message: message.release(),
    "dead_letter": lambda message: message.dead_letter("no"),
    "extend": lambda message: message.extend_visibility(600),
    "checkpoint": lambda message: message.save_checkpoint(b'"stolen"'),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
async def test_the_server_refuses_a_holder_that_believes_in_its_lease(here, call):
    """No clock of ours is asked: the message has another number by then."""
    async with here.box() as stale, here.box() as other:
        old, new = await in_two_hands(here, stale, other)
        with pytest.raises(ReceiptHandleExpiredError):
            await call(old)
        assert await other.counts() == Counts(in_flight=1)
        assert await other.dead_letters() == []
        await new.release()
        assert (await one(other)).checkpoint is None


@pytest.mark.slow
async def test_a_settlement_whose_answer_was_lost_can_be_tried_again(here):
    names, line = here.names(), await here.line()
    async with here.box(over=line) as box:
        await box.send_many(["ack", "nack"])
        ack, nack = await box.receive(max_messages=2)
        for call, step in ((ack.acknowledge, REMOVE + names.queue), (nack.nack, names.to_queue + "*")):
            await cut_off(line, line.hold_answers(step), call)
            assert box.statistics().unconfirmed == 1
            await until_it_works(call)
            assert box.statistics().unconfirmed == 0
        counts = await box.counts()
        assert (counts.pending, counts.in_flight) == (1, 0)
        assert (await one(box)).attempt == 2


async def test_of_acknowledgements_made_together_the_server_refuses_the_stale_one(here):
    async with here.box() as stale, here.box() as other:
        old, new = await in_two_hands(here, stale, other)
        await stale.send_many(["y", "z"])
        y, z = await several(stale, 2)
        await y.save_checkpoint(b"1")
        refused = await stale.acknowledge_many([y, old, z])
        assert {number: type(error) for number, error in refused.items()} == {1: ReceiptHandleExpiredError}
        assert (await here.server.state(here.names().checkpoints))["messages"] == 0
        assert await other.counts() == Counts(in_flight=1, settled=2)
        await new.acknowledge()


async def test_an_acknowledged_message_leaves_no_checkpoint(here):
    async with here.box() as box:
        for end in (lambda message: message.acknowledge(), lambda message: box.acknowledge_many([message])):
            await box.send("x")
            message = await one(box)
            await message.save_checkpoint(b"1")
            assert (await here.server.state(here.names().checkpoints))["messages"] == 1
            await end(message)
            assert (await here.server.state(here.names().checkpoints))["messages"] == 0


async def test_acknowledgements_made_together_whose_answers_were_lost_can_be_tried_again(here):
    line = await here.line()
    async with here.box(over=line) as box:
        await box.send_many(range(3))
        messages = await several(box, 3)
        refused = {}

        async def acknowledge():
            refused.update(await box.acknowledge_many(messages))
            raise refused[1]

        await cut_off(line, line.hold_answers(REMOVE + here.names().queue, count=2, skip=1), acknowledge)
        assert {number: type(error) for number, error in refused.items()} == dict.fromkeys(
            (1, 2), MailboxConnectionError
        )
        assert box.statistics().unconfirmed == 2
        await until_it_works(messages[1].acknowledge)
        assert await box.acknowledge_many(messages[2:]) == {}
        assert await box.counts() == Counts(settled=3)


async def test_a_checkpoint_that_cannot_be_dropped_hinders_no_acknowledgement(here):
    """Whatever the server says; and those of a joint acknowledgement do not wait for one another."""
    line = await here.line()
    async with here.box(over=line, timeout=30) as box:
        await box.send_many(range(3))
        messages = await several(box, 3)
        for message in messages:
            await message.save_checkpoint(b"1")
        purges = line.hold(f"$JS.API.STREAM.PURGE.{here.names().checkpoints}", count=3)

        async def refuse():
            await purges.full()
            purges.answer(b'{"error":{"code":503,"err_code":10008,"description":"temporarily unavailable"}}')

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(refuse)
            assert await box.acknowledge_many(messages) == {}
        assert await box.counts() == Counts(settled=3)


@pytest.mark.slow
async def test_a_reply_leaves_while_the_lease_is_held_and_once(here):
    """The connection is cut between the reply and the acknowledgement."""
    line = await here.line()
    async with here.box(over=line) as box, here.box("replies") as replies:
        await box.send("ask", reply_to=replies.name)
        request = await one(box)
        await cut_off(line, line.hold(REMOVE + here.names().queue), lambda: request.reply("answer"))
        await until_it_works(lambda: request.reply("answer"))
        assert await replies.counts() == Counts(pending=1)
        reply = await one(replies)
        assert (reply.body, reply.headers["request_id"]) == ("answer", request.id)
        assert await box.counts() == Counts(settled=1)


async def test_a_stale_holder_sends_no_reply(here):
    async with here.box() as stale, here.box() as other, here.box("replies") as replies:
        old, _ = await in_two_hands(here, stale, other)
        with pytest.raises(ReceiptHandleExpiredError):
            await old.reply("too late")
        assert await replies.counts() == Counts()


async def test_a_reply_makes_the_mailbox_that_nobody_has_opened(here):
    replies = here.box("replies")
    async with here.box() as box:
        await box.send("ask", reply_to=replies.name)
        await (await one(box)).reply("by name")
        await box.send("ask", reply_to=replies)
        await (await one(box)).reply("by address")
    async with replies:
        assert [message.body for message in await replies.receive(max_messages=5)] == ["by name", "by address"]


@pytest.mark.parametrize("reply_to", ["a" * 300, "nats://{host}?name=" + "a" * 300])
async def test_an_impossible_reply_name_is_refused(here, reply_to):
    """At the send; and one that another program left there is no reply, and leaves the message unsettled."""
    async with here.box() as box:
        reply_to = reply_to.format(host=box.address.partition("//")[2].partition("?")[0])
        with pytest.raises(InvalidParameterError, match="send: reply_to: mailbox 'aaa"):
            await box.send("ask", reply_to=reply_to)
        by_hand = StoredMessage("by-hand", b'"ask"', 1.0, reply_to=reply_to)
        await here.server.ask(here.names().to_queue + by_hand.token, by_hand.encode())
        message = await one(box)
        with pytest.raises(ReplyNotAvailableError, match="longer than 180 letters"):
            await message.reply("answer")
        assert not message.is_settled
        await message.acknowledge()
        assert await box.counts() == Counts(settled=1)


async def test_a_request_over_two_objects(here):
    async with here.box() as box, here.box() as worker, anyio.create_task_group() as group:

        async def answer():
            message = await one(worker, wait=10.0)
            await message.reply(message.body * 2)

        group.start_soon(answer)
        assert await box.request(21, timeout=10) == 42


async def test_other_programs_can_send_plain_bodies(here):
    async with here.box(body=int) as box:
        await here.server.ask(here.names().to_queue + "anything", b"7")
        message = await one(box)
        assert (message.body, message.id) == (7, "nats-1")
        await message.nack()
        again = await one(box)
        assert (again.id, again.attempt) == ("nats-1", 2)


@pytest.mark.slow
async def test_a_delay_that_a_crash_left_in_both_places_is_one_message(here):
    """A holder died after it had added the delayed copy and before it had removed the message."""
    await here.make_all()
    async with here.box() as box:
        sent = await box.send("x")
        held = await one(box, lease=0.3)
        due = clock.utc_now().timestamp()
        record = StoredMessage(sent, b'"x"', 1.0, deliveries=1, charged=1, first_received_at=1.0, due=due)
        await here.server.ask(here.names().to_delayed + record.token, record.encode())
        await here.server.ask(here.names().to_moves)
        again = await one(box, wait=5.0)
        assert (again.id, again.delivery_count) == (held.id, 2)
        with anyio.fail_after(20):
            while await box.counts() != Counts(in_flight=1):
                await anyio.sleep(0.05)
        await again.acknowledge()
        assert await box.receive(wait_time_seconds=0.6) == []


async def test_a_delayed_message_replaces_the_older_one_that_nobody_removed(here):
    """A server that was killed has the message again that the delayed one has come from, and knows it as done."""
    await here.make_all()
    async with here.box() as box:
        sent = await box.send("x")
        await one(box, lease=600)
        record = StoredMessage(sent, b'"x"', 1.0, deliveries=1, charged=1, first_received_at=1.0, due=1.0)
        await here.server.ask(here.names().to_delayed + record.token, record.encode())
        await here.server.ask(here.names().to_moves)
        again = await one(box, wait=10.0)
        assert (again.id, again.attempt) == (sent, 2)
        await again.acknowledge()
        with anyio.fail_after(20):
            while await box.counts() != Counts(settled=1):
                await anyio.sleep(0.05)


@pytest.mark.slow
async def test_a_consumer_that_is_ahead_of_its_stream_is_made_anew(anyio_backend):
    """As after a power cut that took more of the stream than of the consumer: what is sent next is not passed over."""
    with NatsServer() as server:
        stored = server.directory / "store/jetstream/$G/streams" / Names.of("jobs").queue / "msgs"
        async with NatsMailbox(server.url, name="jobs"):
            pass
        await anyio.to_thread.run_sync(server.stop)
        shutil.copytree(stored, server.directory / "before")
        await anyio.to_thread.run_sync(server.start)
        async with NatsMailbox(server.url, name="jobs") as box:
            await box.send_many(range(5))
            for message in await several(box, 5):
                await message.acknowledge()
            await anyio.to_thread.run_sync(server.stop, signal.SIGKILL)
            shutil.rmtree(stored)
            shutil.copytree(server.directory / "before", stored)
            await anyio.to_thread.run_sync(server.start)
            await until_it_works(lambda: box.send("first of the new"))
            assert (await until_it_works(lambda: one(box))).body == "first of the new"


async def test_a_message_that_is_due_before_it_has_left_the_queue_is_not_lost(here):
    """Between the two steps of a nack with a delay the delayed copy falls due: the queue's old one does not stand for it."""
    names, line = here.names(), await here.line()
    async with here.box(over=line) as box, anyio.create_task_group() as tasks:
        await box.send("x")
        held = await one(box)
        removal = line.hold(REMOVE + names.queue)
        put_off = line.watch(f"{ACK}{names.delayed}.*")
        tasks.start_soon(lambda: held.nack(delay=0.01))
        await removal.came()
        await put_off.came()
        removal.open()
        again = await one(box)
        assert (again.body, again.attempt) == ("x", 2)
        assert await box.counts() == Counts(in_flight=1)


async def test_a_death_that_a_crash_left_in_both_places_is_one_dead_letter(here):
    await here.make_all()
    async with here.box() as box:
        sent = await box.send("x")
        await one(box, lease=0.2)
        record = StoredMessage(sent, b'"x"', 1.0)
        await here.server.ask(f"{here.names().to_dead}{record.token}", record.encode())
        await (await one(box, wait=5.0)).dead_letter("again")
        assert [letter.error for letter in await box.dead_letters()] == ["again"]
        assert await box.counts() == Counts(dead=1)


async def test_two_dead_letters_may_have_had_one_dedup_key(here):
    async with here.box() as box:
        first = await box.send("a", dedup_key="k")
        await (await one(box)).dead_letter("no")
        second = await box.send("b", dedup_key="k")
        await (await one(box)).dead_letter("no")
        assert [letter.message_id for letter in await box.dead_letters()] == [first, second]
        assert await box.replay_dead_letters() == 2
        assert [message.body for message in await box.receive(max_messages=5)] == ["a", "b"]


async def test_a_due_message_whose_key_another_has_by_now_is_not_lost(here):
    await here.make_all()
    async with here.box() as box:
        await box.send("now", dedup_key="k")
        late = StoredMessage.of(Envelope("late", b'"late"', delay=0.01, dedup_key="k"), 1.0)
        await here.server.ask(here.names().to_delayed + late.token, late.encode())
        with anyio.fail_after(20):
            while (await box.counts()).pending != 2:
                await anyio.sleep(0.02)
        assert sorted(message.body for message in await box.receive(max_messages=5)) == ["late", "now"]


async def test_a_cancelled_keyed_message_is_found_by_its_id(here):
    async with here.box() as box:
        sent = await box.send("x", dedup_key="k", delay=60)
        assert await box.cancel(sent) == "removed"
        assert await box.send("y", dedup_key="k") != sent


async def test_priorities_and_large_bodies_are_refused(here):
    async with here.box() as box:
        with pytest.raises(InvalidParameterError, match="no priorities"):
            await box.send("x", priority=1)
        with pytest.raises(SerializationError, match="max_payload"):
            await box.send("x" * 1_048_576)
        assert await box.counts() == Counts()


@pytest.mark.parametrize("char", ["e", "日", "\U0001f600"])
async def test_the_largest_message_can_be_given_back_and_given_up(here, char):
    """Whatever its attempts leave with it: there is no room for all that is said in letters that JSON writes as numbers."""
    most = here.server.connection.max_payload - 16_384
    async with here.box() as box:
        headers = {"h": "x" * 100_000}
        with pytest.raises(SerializationError, match="max_payload"):
            await box.send("x" * (most - 100_000), headers=headers)
        await box.send("x" * (most - 100_000 - 200), headers=headers)
        for _ in range(12):
            await (await one(box)).nack(error=ValueError(char * 600))
        last = await one(box)
        assert last.history[-1].attempt == 12
        await last.dead_letter(ValueError(char * 600))
        (letter,) = await box.dead_letters()
        assert letter.history[-1].attempt == 13
        assert letter.error.startswith(char * 500)


async def test_send_many_takes_back_what_it_could_not_complete(here):
    async with here.box() as box:
        await here.server.limit(here.names().queue, max_msgs=5)
        with pytest.raises(MailboxFullError):
            await box.send_many(range(10))
        assert (await here.server.state(here.names().queue))["last_seq"] == 5
        assert await box.counts() == Counts()


async def test_the_ack_wait_of_the_server_counts(here):
    """A lease of that length takes no call of its own, and one of another length does."""
    naks = await here.server.connection.subscribe(f"{ACK}{here.names().queue}.>")
    async with here.box(ack_wait=30), here.box(ack_wait=5) as second:
        await second.send_many("xy")
        await one(second, lease=30)
        await one(second, lease=5)
        assert (await naks.next_msg(10)).data == b'-NAK {"delay":5000000000}'


async def test_no_server_is_a_connection_error_in_time(anyio_backend):
    with anyio.fail_after(5), pytest.raises(MailboxConnectionError, match="no connection to a NATS server"):
        async with NatsMailbox(f"nats://127.0.0.1:{free_port()}", timeout=0.5):
            pass


@pytest.mark.slow
async def test_a_connection_that_the_driver_gives_up_is_made_anew(here):
    """As where the server sends a client away with an error: the driver does not come back from that by itself."""
    line, started, ended = await here.line(), anyio.Event(), anyio.Event()

    async def handle(body: str) -> None:
        started.set()
        try:
            await anyio.sleep_forever()
        finally:
            ended.set()

    async with here.box(over=line) as box, here.box() as other:
        await box.send("before")
        held = await one(box)
        line.say(b"-ERR 'Maximum Connections Exceeded'\r\n")
        await reconnected(box)
        assert (line.made, box.statistics().connected) == (2, True)
        await held.acknowledge()
        loop = MainLoop(box, handle)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(loop.run)
            sent = await other.send("after")
            with anyio.fail_after(10):  # sooner than a renewal of its lease
                await started.wait()
                assert await other.cancel(sent) == "cancelled"
                await ended.wait()
            await loop.shutdown()


async def test_the_mailbox_of_the_replies_is_gone_when_its_owner_is(here):
    """And a reply that comes late does not make it anew."""
    async with here.box() as worker:
        async with here.box() as asker:
            await asker.submit("ask")
            request = await one(worker)
            names = Names.of(request.reply_to)
            assert names.queue in await here.server.streams()
        await request.reply("to nobody")
        assert await worker.counts() == Counts(settled=1)
        assert not set(names.streams) & set(await here.server.streams())
