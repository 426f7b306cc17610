"""What the NATS mailbox does beyond the contract: fencing by the server, what a crash leaves half-done, other programs."""

from __future__ import annotations

import anyio
import pytest

from mainspring.core import clock
from mainspring.errors import (
    InvalidParameterError,
    MailboxConnectionError,
    ReceiptHandleExpiredError,
    ReplyNotAvailableError,
    SerializationError,
)
from mainspring.mailbox.message import Counts, Envelope
from mainspring.mailbox.nats.errors import ApiError
from mainspring.mailbox.nats.mailbox import NatsMailbox
from mainspring.mailbox.nats.records import RESERVED, Record, token_of
from mainspring.mailbox.nats.streams import Add
from nats_support import ON_ASYNCIO, several
from ports import free_port

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.parametrize("anyio_backend", ON_ASYNCIO, ids=("asyncio", "uvloop")),
]


async def one(box, lease=60.0, wait=0.0):
    (message,) = await box.receive(visibility_timeout=lease, wait_time_seconds=wait)
    return message


def trust_for_ever(box):
    """Let a holder believe in its leases whatever its clock says: as one does whose process stood still."""
    for lease in box._claims._leases.values():
        lease.until += 1_000


CALLS = {
    "acknowledge": lambda message: message.acknowledge(),
    "nack": lambda message: message.nack(),
    "delayed nack": lambda message: message.nack(delay=0.05),
    "release": lambda message: message.release(),
    "dead_letter": lambda message: message.dead_letter("no"),
    "extend": lambda message: message.extend_visibility(600),
    "checkpoint": lambda message: message.save_checkpoint(b'"stolen"'),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
async def test_the_server_refuses_a_holder_that_believes_in_its_lease(here, call):
    """No clock of ours is asked: the message has another number by then."""
    async with here.box() as stale, here.box() as other:
        await stale.send("x")
        old = await one(stale, lease=0.2)
        new = await one(other, wait=5.0)
        trust_for_ever(stale)
        with pytest.raises(ReceiptHandleExpiredError):
            await call(old)
        await anyio.sleep(0.15)
        assert await other.counts() == Counts(in_flight=1)
        assert await other.dead_letters() == []
        await new.release()
        assert (await one(other)).checkpoint is None


async def test_a_settlement_whose_answer_was_lost_can_be_tried_again(here):
    async with here.box() as box:
        await box.send_many(["ack", "nack"])
        ack, nack = await box.receive(max_messages=2)
        store = box._store
        remove, add = store.remove, store.add

        async def lose(*args):
            await (remove if len(args) == 2 else add)(*args)
            raise MailboxConnectionError("the answer was lost")

        store.remove = store.add = lose
        for message in (ack, nack):
            with pytest.raises(MailboxConnectionError):
                await (message.acknowledge() if message is ack else message.nack())
        del store.remove, store.add
        await ack.acknowledge()
        await nack.nack()
        counts = await box.counts()
        assert (counts.pending, counts.in_flight) == (1, 0)
        assert (await one(box)).attempt == 2


async def test_of_acknowledgements_made_together_the_server_refuses_the_stale_one(here):
    async with here.box() as stale, here.box() as other:
        await stale.send("x")
        old = await one(stale, lease=0.2)
        new = await one(other, wait=5.0)
        await stale.send_many(["y", "z"])
        y, z = await several(stale, 2)
        await y.save_checkpoint(b"1")
        trust_for_ever(stale)
        refused = await stale.acknowledge_many([y, old, z])
        assert {number: type(error) for number, error in refused.items()} == {1: ReceiptHandleExpiredError}
        names = stale._names
        assert await stale._store.last(names.checkpoints, names.to_checkpoints + token_of(y.id)) is None
        await anyio.sleep(0.15)
        assert await other.counts() == Counts(in_flight=1, settled=2)
        await new.acknowledge()


async def test_an_acknowledged_message_leaves_no_checkpoint(here):
    async with here.box() as box:
        names = box._names
        for end in (lambda message: message.acknowledge(), lambda message: box.acknowledge_many([message])):
            await box.send("x")
            message = await one(box)
            await message.save_checkpoint(b"1")
            await end(message)
            assert await box._store.last(names.checkpoints, names.to_checkpoints + token_of(message.id)) is None


async def test_acknowledgements_made_together_whose_answers_were_lost_can_be_tried_again(here):
    async with here.box() as box:
        await box.send_many(range(3))
        messages = await several(box, 3)
        store = box._store
        remove_all = store.remove_all

        async def lose(stream, sequences):
            return [
                True,
                *[MailboxConnectionError("the answer was lost") for _ in await remove_all(stream, sequences)][1:],
            ]

        store.remove_all = lose
        refused = await box.acknowledge_many(messages)
        assert {number: type(error) for number, error in refused.items()} == dict.fromkeys(
            (1, 2), MailboxConnectionError
        )
        del store.remove_all
        await messages[1].acknowledge()
        assert await box.acknowledge_many(messages[2:]) == {}
        assert await box.counts() == Counts(settled=3)


async def test_a_checkpoint_that_cannot_be_dropped_hinders_no_acknowledgement(here):
    """Whatever the server says; and those of a joint acknowledgement do not wait for one another."""
    async with here.box() as box:
        await box.send_many(range(3))
        messages = await several(box, 3)
        for message in messages:
            await message.save_checkpoint(b"1")
        out, most = 0, 0

        async def refuse(stream, subject):
            nonlocal out, most
            out += 1
            most = max(most, out)
            await anyio.sleep(0.01)
            out -= 1
            raise ApiError(10_008, "temporarily unavailable")

        box._store.purge = refuse
        assert await box.acknowledge_many(messages) == {}
        assert most == 3
        assert await box.counts() == Counts(settled=3)


async def test_a_reply_leaves_while_the_lease_is_held_and_once(here):
    async with here.box() as box, here.box("replies") as replies:
        await box.send("ask", reply_to=replies.name)
        request = await one(box)
        store = box._store
        remove = store.remove

        async def refuse(stream, sequence):
            raise MailboxConnectionError("cut off between the reply and the acknowledgement")

        store.remove = refuse
        with pytest.raises(MailboxConnectionError):
            await request.reply("answer")
        store.remove = remove
        await request.reply("answer")
        assert await replies.counts() == Counts(pending=1)
        reply = await one(replies)
        assert (reply.body, reply.headers["request_id"]) == ("answer", request.id)
        assert await box.counts() == Counts(settled=1)


async def test_a_stale_holder_sends_no_reply(here):
    async with here.box() as stale, here.box() as other, here.box("replies") as replies:
        await stale.send("ask", reply_to=replies.name)
        old = await one(stale, lease=0.2)
        await one(other, wait=5.0)
        trust_for_ever(stale)
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
        await box._sends.put([Envelope("by-hand", b'"ask"', reply_to=reply_to)])
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
        await box._store.add(Add(box._names.to_queue + "anything", b"7"))
        message = await one(box)
        assert (message.body, message.id) == (7, "nats-1")
        await message.nack()
        again = await one(box)
        assert (again.id, again.attempt) == ("nats-1", 2)


async def test_a_delay_that_a_crash_left_in_both_places_is_one_message(here):
    """A holder died after it had added the delayed copy and before it had removed the message."""
    async with here.box() as box:
        sent = await box.send("x")
        held = await one(box, lease=0.3)
        due = clock.utc_now().timestamp()
        record = Record(sent, b'"x"', 1.0, deliveries=1, charged=1, first_received_at=1.0, due=due)
        await box._store.add(Add(box._names.to_delayed + record.token, record.encode()))
        await box._store.moved()
        again = await one(box, wait=5.0)
        assert (again.id, again.delivery_count) == (held.id, 2)
        with anyio.fail_after(20):
            while await box.counts() != Counts(in_flight=1):
                await anyio.sleep(0.05)
        await again.acknowledge()
        assert await box.receive(wait_time_seconds=0.6) == []


async def test_a_delayed_message_replaces_the_older_one_that_nobody_removed(here):
    """A server that was killed has the message again that the delayed one has come from, and knows it as done."""
    async with here.box() as box:
        sent = await box.send("x")
        await one(box, lease=600)
        record = Record(sent, b'"x"', 1.0, deliveries=1, charged=1, first_received_at=1.0, due=1.0)
        await box._store.add(Add(box._names.to_delayed + record.token, record.encode()))
        await box._store.moved()
        again = await one(box, wait=10.0)
        assert (again.id, again.attempt) == (sent, 2)
        await again.acknowledge()
        with anyio.fail_after(20):
            while await box.counts() != Counts(settled=1):
                await anyio.sleep(0.05)


async def test_a_consumer_that_is_ahead_of_its_stream_is_made_anew(here):
    """As after a power cut that took more of the stream than of the consumer: what is sent next is not passed over."""
    async with here.box() as box:
        await box.send_many(range(5))
        for message in await box.receive(max_messages=5):
            await message.acknowledge()
        wire, names = box._store.wire, box._names
        await wire.api(f"STREAM.DELETE.{names.queue}")
        await box._store.ensure(names)
        await box.send("first of the new")
        states = box._tidier._states

        async def ahead(stream):
            consumer, state = await states(stream)
            if stream == names.queue:
                consumer["delivered"]["stream_seq"] = 5
            return consumer, state

        before = (await states(names.queue))[0]["created"]
        box._tidier._states = ahead
        await box._tidier.look()
        assert (await states(names.queue))[0]["created"] > before
        assert (await one(box, wait=5.0)).body == "first of the new"


async def test_a_message_that_is_due_before_it_has_left_the_queue_is_not_lost(here):
    """Between the two steps of a nack with a delay the delayed copy falls due: the queue's old one does not stand for it."""
    async with here.box() as box:
        await box.send("x")
        held = await one(box)
        remove = box._store.remove

        async def late(stream, sequence):
            if stream == box._names.queue:
                await anyio.sleep(0.4)
            return await remove(stream, sequence)

        box._store.remove = late
        await held.nack(delay=0.01)
        del box._store.remove
        again = await one(box, wait=10.0)
        assert (again.body, again.attempt) == ("x", 2)
        assert await box.counts() == Counts(in_flight=1)


async def test_a_death_that_a_crash_left_in_both_places_is_one_dead_letter(here):
    async with here.box() as box:
        sent = await box.send("x")
        await one(box, lease=0.2)
        record = Record(sent, b'"x"', 1.0)
        await box._store.add(Add(f"{box._names.to_dead}i-{sent}", record.encode()))
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
    async with here.box() as box:
        await box.send("now", dedup_key="k")
        late = Record.of(Envelope("late", b'"late"', delay=0.01, dedup_key="k"), 1.0)
        await box._store.add(Add(box._names.to_delayed + late.token, late.encode()))
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
    async with here.box() as box:
        headers = {"h": "x" * 100_000}
        with pytest.raises(SerializationError, match="max_payload"):
            await box.send("x" * (box._wire.max_payload - RESERVED - 100_000), headers=headers)
        await box.send("x" * (box._wire.max_payload - RESERVED - 100_000 - 200), headers=headers)
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
        add_all = box._store.add_all

        async def half(adds):
            done = await add_all(adds[: len(adds) // 2])
            return [*done, *[MailboxConnectionError("cut off")] * (len(adds) - len(done))]

        box._store.add_all = half
        with pytest.raises(MailboxConnectionError, match="cut off"):
            await box.send_many(range(10))
        box._store.add_all = add_all
        assert (await box.counts()).waiting == 0


async def test_the_ack_wait_of_the_server_counts(here):
    async with here.box(ack_wait=30) as first, here.box(ack_wait=5) as second:
        assert (first._store.ack_wait, second._store.ack_wait) == (30.0, 30.0)


async def test_no_server_is_a_connection_error_in_time(anyio_backend):
    with anyio.fail_after(5), pytest.raises(MailboxConnectionError, match="no connection to a NATS server"):
        async with NatsMailbox(f"nats://127.0.0.1:{free_port()}", timeout=0.5):
            pass


async def test_a_connection_that_the_driver_gives_up_is_made_anew(here):
    """As where the server sends a client away with an error: the driver does not come back from that by itself."""
    async with here.box() as box:
        await box.send("before")
        held = await one(box)
        heard = []
        box._announce_cancelled = heard.append
        await box._wire.client.close()
        with anyio.fail_after(20):
            while True:
                try:
                    await box.send("after")
                    break
                except MailboxConnectionError:
                    await anyio.sleep(0.05)
        await held.acknowledge()
        message = await one(box, wait=5.0)
        assert message.body == "after"
        assert await box.cancel(message.id) == "cancelled"
        with anyio.fail_after(20):
            while not heard:
                await anyio.sleep(0.01)
        assert heard[0] == [message.id]


async def test_a_transient_mailbox_is_gone_when_it_is_dropped(here):
    async with here.box() as box:
        async with box._sibling(f"~{here.prefix}") as transient:
            await transient._drop()
        await box.send("ask", reply_to=f"~{here.prefix}")
        await (await one(box)).reply("to nobody")
        assert await box.counts() == Counts(settled=1)
        listed = await box._store.wire.api("STREAM.NAMES", {"subject": "mainspring._7e*.queue.*"})
        assert not [stream for stream in listed.get("streams") or [] if here.prefix in stream]
