"""Records on NATS: how ended ones go, what a writer that dies leaves, and messages that are found and moved by their ids."""

from __future__ import annotations

import json
from types import SimpleNamespace

import anyio
import pytest

pytest.importorskip("nats", reason="the extra 'nats' is not installed")

from mainspring.errors import MailboxFullError, ReceiptHandleExpiredError, SerializationError
from mainspring.mailbox.message import Ack, Counts, MessagePlace, RescheduleOutcome, Result
from mainspring.mailbox.nats.names import Names
from mainspring.mailbox.nats.records import ABANDONED, KEY, Records
from mainspring.mailbox.nats.streams import Stored
from mainspring.mailbox.records import RESULT, Record, RecordWrite
from mainspring.testing import run_virtual
from nats_support import GET, REMOVE, cut_off, one, place, several, until_it_works

pytestmark = [pytest.mark.anyio, pytest.mark.loops("asyncio")]

HOUR = 3_600.0


@pytest.fixture
async def here(nats_url, anyio_backend):
    async with place(nats_url) as made:
        yield made


async def subjects(here, pattern=">"):
    """What the stream of the records has, without the beginning that all have."""
    names = here.names()
    state = (
        await here.server.api(f"STREAM.INFO.{names.records}", {"subjects_filter": f"{names.to_records}{pattern}"})
    )["state"]
    return sorted(subject.removeprefix(names.to_records) for subject in state.get("subjects") or ())


async def until(holds):
    """Wait until ``await holds()``."""
    with anyio.fail_after(20):
        while not await holds():
            await anyio.sleep(0.02)


# --------------------------------------------------------------------------------------------------------- what it costs


async def test_a_stream_for_records_is_made_by_the_first_of_them(here):
    async with here.box() as box:
        assert await box.backend.find_records("test", ["a"]) == await box.backend.list_records("test", 5, None) == []
        await box.send("x")
        await (await one(box)).acknowledge()
        assert here.names().records not in await here.server.streams(here.prefix)
        await box.backend.write_record(RecordWrite("test", "a", b"1"))
        assert here.names().records in await here.server.streams(here.prefix)


async def test_a_record_that_is_written_often_is_one_call_each(here):
    line = await here.line()
    async with here.box(over=line) as box:
        seen = line.watch("*", count=-1)
        for number in range(5):
            await box.backend.write_record(RecordWrite("progress", "a", b"%d" % number, HOUR))
        writes = [frame.subject for frame in seen.caught if frame.reply]
        to = here.names().to_records
        assert writes[-4:] == [f"{to}value.progress.k-a"] * 4
        assert len([write for write in writes if write.startswith(f"{to}end.")]) <= 2
        (found,) = await box.backend.find_records("progress", ["a"])
        assert found.value == b"4"


async def test_results_are_heard_only_by_who_waits_for_one(here):
    line = await here.line()

    async def hears_results():
        return here.names().to_results in line.links[0].subscriptions.values()

    async with here.box(over=line) as box, here.box() as worker:
        await worker.send("x")
        message = await one(worker)
        assert not await hears_results()
        heard: list[list[str]] = []
        stop = box.backend.notifications.results.subscribe(heard.append)
        await until(hears_results)
        await message.settle(Ack(result=Result(b"{}", HOUR)))
        with anyio.fail_after(20):
            while len(heard) < 2:
                await anyio.sleep(0.01)
            assert heard == [[], [message.id]]
            line.cut()
            while len(heard) < 3:
                await anyio.sleep(0.01)
        stop()
        assert heard[2:] == [[]], "it has missed some, perhaps"


# --------------------------------------------------------------------------------------------------- records that have ended


async def test_records_whose_time_has_come_are_removed(here):
    """A mailbox that opens looks at once. Records that do not end, or were written anew, stay."""
    async with here.box() as box:
        store = box.backend
        await store.write_record(RecordWrite("test", "kept", b"1"))
        for key in ("short", "anew", "ä b"):
            await store.write_record(RecordWrite("test", key, b"1", 0.05))
        await store.write_record(RecordWrite("test", "anew", b"2", HOUR))
        marks = await subjects(here, "mark.end.*")
        assert len(marks) == 2, "one for each of two lengths of life"
    await anyio.sleep(0.06)
    soon = min(int(mark.rpartition(".")[2]) for mark in marks)
    to = here.names().to_records
    for note in [f"mark.end.{soon}", *await subjects(here, f"end.{soon}.>")]:  # as if that instant were over
        past = note.replace(str(soon), str(soon - 1_000_000))
        await here.server.ask(f"{to}{past}")
    async with here.box() as box:

        async def gone():
            return not await subjects(here, f"mark.end.{soon - 1_000_000}")

        await until(gone)
        assert await subjects(here, "value.test.*") == ["value.test.k-anew", "value.test.k-kept"]
        assert [found.key for found in await box.backend.list_records("test", 5, None)] == ["anew", "kept"]


async def test_a_key_that_is_too_long_for_a_subject_is_found_and_listed(here):
    keys = ["a" * 900, "日本" * 900, "b" * 5_000]
    async with here.box() as box:
        for key in keys:
            await box.backend.write_record(RecordWrite("test", key, key[:1].encode(), HOUR))
        assert [record.key for record in await box.backend.find_records("test", keys)] == keys
        assert [record.key for record in await box.backend.list_records("test", 5, None)] == sorted(keys)


# ---------------------------------------------------------------------------------------------- one step with the messages


async def test_messages_of_a_writer_that_died_are_sent_by_another_process(here):
    """The record was written, and says so. Then the connection was lost before the message was sent."""
    line = await here.line()
    async with here.box(over=line) as box:
        sent = line.hold(f"{here.names().to_queue}*")
        write = RecordWrite("test", "a", b"1", if_version=0)
        await cut_off(
            line, sent, lambda: box.backend.write_record(write, [box.prepare("x"), box.prepare("y", delay=60)])
        )
        line.refuses = True
        async with here.box() as other:
            assert (await one(other)).body == "x"
            await until(lambda: is_empty(here))
            assert [found.value for found in await other.backend.find_records("test", ["a"])] == [b"1"]
            assert await other.counts() == Counts(in_flight=1, delayed=1)
            assert await other.backend.write_record(write, [other.prepare("x")]) is None
        line.refuses = False


async def acked(box, sent):
    await (await one(box)).acknowledge()


async def acked_with_others(box, sent):
    assert await box.acknowledge_many([await one(box)]) == {}


async def dead(box, sent):
    await (await one(box)).dead_letter("no")


async def returned(box, sent):
    await (await one(box)).nack(delay=HOUR)


async def cancelled(box, sent):
    await box.cancel(sent)


async def postponed(box, sent):
    assert await box.backend.reschedule(sent, HOUR) is RescheduleOutcome.RESCHEDULED


async def came_due(box, sent):
    await (await one(box)).acknowledge()


async def moved(box, sent):
    assert await box.backend.reschedule(sent, 0) is RescheduleOutcome.RESCHEDULED
    await (await one(box)).acknowledge()


async def expired(box, sent):
    async def is_dead():
        return (await box.counts()).dead == 1

    await until(is_dead)


WAYS = [
    (acked, {}), (acked_with_others, {}), (dead, {}), (returned, {}), (cancelled, {}), (postponed, {}),
    (came_due, {"delay": 1}), (moved, {"delay": 60}), (expired, {"expires_in": 1}),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("way", "options"), WAYS, ids=[way.__name__ for way, _ in WAYS])
async def test_a_message_of_a_writer_that_died_is_not_sent_again_once_it_has_left_its_place(here, way, options):
    """Not even where the server has forgotten that it took the message."""
    line = await here.line()
    names = here.names()
    await here.make_all()
    async with here.box() as other:
        for stream in (names.queue, names.delayed):
            await here.server.limit(stream, duplicate_window=100_000_000)
        async with here.box(over=line) as box:
            sent = box.prepare("x", **options)
            removal = line.hold(f"{REMOVE}{names.records}")
            await cut_off(line, removal, lambda: box.backend.write_record(RecordWrite("test", "a", b"1"), [sent]))
            line.refuses = True
            await anyio.sleep(0.12)
            await way(other, sent.message_id)
            await other.backend.write_record(RecordWrite("test", "a", b"2"))  # it completes the open write
            assert await subjects(here, "mark.intent.*") == []
            await anyio.sleep(0.1)
            counts = await other.counts()
            assert counts.pending + counts.in_flight == 0
            assert counts.delayed == (way in (returned, postponed))
            line.refuses = False


async def test_a_message_of_a_record_costs_one_look_when_it_leaves(here):
    """And none in the process that wrote it; a message without a record never costs any."""
    line = await here.line()
    async with here.box(over=line) as box, here.box() as other:
        looks = line.watch(f"{GET}{here.names().records}", count=-1)
        for writer, expected in ((box, 0), (other, 1)):
            await writer.send("plain")
            await (await one(box)).acknowledge()
            await writer.backend.write_record(
                RecordWrite("test", repr(writer is box), b"1", if_version=0), [writer.prepare(n) for n in range(3)]
            )
            looks.caught.clear()
            await box.acknowledge_many(await several(box, 3))
            assert len(looks.caught) == expected


async def is_empty(here):
    """No intent is left."""
    return not await subjects(here, "mark.intent.*")


async def test_a_write_that_follows_completes_the_one_before(here):
    line = await here.line()
    async with here.box() as other, here.box(over=line) as box:
        sent = line.hold(f"{here.names().to_queue}*")
        await cut_off(
            line,
            sent,
            lambda: box.backend.write_record(RecordWrite("test", "a", b"1"), [box.prepare("x", dedup_key="k")]),
        )
        line.refuses = True
        assert await other.backend.write_record(RecordWrite("test", "a", None)) == 0
        assert await subjects(here, "mark.intent.*") == []
        assert (await one(other)).body == "x"
        line.refuses = False


async def test_messages_of_a_writer_that_died_before_the_record_are_not_sent(here):
    line = await here.line()
    async with here.box(over=line) as box:
        written = line.hold(f"{here.names().to_records}value.*")
        await cut_off(
            line, written, lambda: box.backend.write_record(RecordWrite("test", "a", b"1"), [box.prepare("x")])
        )
        line.refuses = True
        async with here.box() as other:
            assert await other.receive(wait_time_seconds=0.3) == []
            assert await other.backend.write_record(RecordWrite("test", "a", b"2", if_version=0), [other.prepare("y")])
            assert (await one(other)).body == "y"
            assert await other.counts() == Counts(in_flight=1)
        line.refuses = False


async def test_messages_leave_with_the_deletion_of_a_record(here):
    line = await here.line()
    async with here.box() as other, here.box(over=line) as box:
        version = await box.backend.write_record(RecordWrite("test", "a", b"1"))
        write = RecordWrite("test", "a", None, if_version=version)
        assert await box.backend.write_record(write, [box.prepare("x")]) == 0
        assert await subjects(here) == []
        assert (await one(other)).body == "x"
        await box.backend.write_record(RecordWrite("test", "a", b"2"))
        sent = line.hold(f"{here.names().to_queue}*")
        deletion = RecordWrite("test", "a", None)
        await cut_off(line, sent, lambda: box.backend.write_record(deletion, [box.prepare("y")]))
        line.refuses = True
        assert await other.backend.find_records("test", ["a"]) == []
        async with here.box() as third:
            assert (await one(third)).body == "y"
            await until(lambda: is_empty(here))
        line.refuses = False


async def test_where_there_is_no_room_for_the_messages_the_record_is_as_it_was(here):
    async with here.box() as box:
        await box.send_many(["a", "b"])
        await box.backend.write_record(RecordWrite("test", "a", b"1", HOUR))
        await here.server.limit(here.names().queue, max_msgs=3)
        messages = [box.prepare(body) for body in ("c", "d", "e")]
        for key in ("a", "b"):
            with pytest.raises(MailboxFullError):
                await box.backend.write_record(RecordWrite("test", key, b"2"), messages)
        assert [(found.key, found.value) for found in await box.backend.list_records("test", 5, None)] == [("a", b"1")]
        assert await box.counts() == Counts(pending=2)
        assert await subjects(here, "mark.intent.*") == []
        assert await box.backend.write_record(RecordWrite("test", "a", b"2"), messages[:1])
        assert await box.counts() == Counts(pending=3)


async def test_more_messages_than_one_payload_takes_are_refused(here):
    async with here.box() as box:
        with pytest.raises(SerializationError, match="the messages of a record"):
            await box.backend.write_record(
                RecordWrite("test", "a", b"1"), [box.prepare("x" * 600_000) for _ in range(2)]
            )
        assert await box.backend.find_records("test", ["a"]) == []


def test_an_intent_that_is_in_no_record_is_dropped_after_a_while():
    """Its writer may be about to write the record; it has had time enough then."""
    names = Names.of("jobs")
    intent = Stored(7, b"[]\n", 0.0, f"{names.to_records}mark.intent.one", {KEY: json.dumps(["test", "a"])})
    removed = []

    class Server:
        def __init__(self):
            self.names, self.made, self.connection = names, {names.records}, SimpleNamespace(timeout=5.0)

        async def subjects(self, stream, pattern):
            return [] if removed else [intent.subject]

        async def last(self, stream, subject):
            return intent if subject == intent.subject and not removed else None

        async def remove(self, stream, sequence):
            removed.append(sequence)

    async def main():
        records = Records(Server(), None)
        for seconds in (0.0, ABANDONED - 1, 2.0):
            assert removed == []
            await anyio.sleep(seconds)
            await records.tend()
        assert removed == [intent.sequence]
        await records.tend()

    run_virtual(main)


# --------------------------------------------------------------------------------------------------------------- results


async def test_a_result_of_a_message_that_was_cancelled_just_then_is_not_kept(here):
    line = await here.line()
    async with here.box(over=line) as box, here.box() as other:
        sent = await box.send("x")
        message = await one(box)
        written = line.hold(f"{here.names().to_records}value.*")

        async def cancel():
            await written.full()
            await other.cancel(sent)
            written.open()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(cancel)
            with pytest.raises(ReceiptHandleExpiredError):
                await message.settle(Ack(result=Result(b"{}", HOUR)))
        assert await other.backend.find_records(RESULT, [sent]) == []
        with pytest.raises(ReceiptHandleExpiredError):
            await message.settle(Ack(result=Result(b"{}", HOUR)))


async def test_a_result_whose_acknowledgement_was_not_answered_is_kept_once(here):
    line = await here.line()
    async with here.box(over=line) as box:
        await box.send("x")
        message = await one(box)
        removal = line.hold_answers(f"$JS.API.STREAM.MSG.DELETE.{here.names().queue}")
        await cut_off(line, removal, lambda: message.settle(Ack(result=Result(b"{}", HOUR))))
        await until_it_works(lambda: message.settle(Ack(result=Result(b"{}", HOUR))))
        assert [found.key for found in await box.backend.find_records(RESULT, [message.id])] == [message.id]
        assert await box.counts() == Counts(settled=1)


# ------------------------------------------------------------------------------------------------------ found and moved


async def test_a_message_is_found_wherever_it_is(here):
    async with here.box() as box, here.box() as other:
        held, over = await box.send("held"), await box.send("over", dedup_key="k")
        message = await one(box)
        await one(box, lease=0.2)
        seen = {each.message.message_id: each for each in await box.backend.find([held, over])}
        assert {each.place for each in seen.values()} == {MessagePlace.IN_FLIGHT}
        assert seen[held].message.first_received_at == pytest.approx(message.first_received_at.timestamp(), abs=0.001)
        (elsewhere,) = await other.backend.find([held])
        assert (elsewhere.place, elsewhere.message.delivery_count) == (MessagePlace.IN_FLIGHT, 1)
        await anyio.sleep(0.3)
        (found,) = await box.backend.find([over])
        assert found.place is MessagePlace.PENDING


async def test_a_message_that_is_moved_often_waits_once(here):
    async with here.box() as box:
        sent = await box.send("x", dedup_key="k")
        for delay in (HOUR, 2 * HOUR, HOUR, 0, 0, HOUR, 0):
            assert await box.backend.reschedule(sent, delay) is RescheduleOutcome.RESCHEDULED
            assert await box.counts() == (Counts(delayed=1) if delay else Counts(pending=1))
        assert await box.send("y", dedup_key="k") == sent
        message = await one(box)
        assert (message.body, message.delivery_count) == ("x", 1)
        await message.acknowledge()
        assert await box.counts() == Counts(settled=1)


async def test_a_message_that_is_claimed_and_done_as_it_is_rescheduled_is_done_once(here):
    line = await here.line()
    async with here.box(over=line) as box, here.box() as worker:
        sent = await box.send("x")
        removal = line.hold(f"$JS.API.STREAM.MSG.DELETE.{here.names().queue}")

        async def work():
            await removal.full()
            await (await one(worker)).acknowledge()
            removal.open()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(work)
            assert await box.backend.reschedule(sent, HOUR) is RescheduleOutcome.UNKNOWN
        assert await box.counts() == Counts(settled=1)


async def test_a_message_that_is_cancelled_as_it_is_rescheduled_does_not_come_back(here):
    line = await here.line()
    async with here.box(over=line) as box, here.box() as other:
        sent = await box.send("x", delay=HOUR)
        moved = line.hold(f"{here.names().to_queue}*")

        async def cancel():
            await moved.full()
            await other.cancel(sent)
            moved.open()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(cancel)
            assert await box.backend.reschedule(sent, 0) is RescheduleOutcome.UNKNOWN
        assert await box.counts() == Counts(settled=1)


async def test_a_lost_connection_is_an_error_of_the_write(here):
    line = await here.line()
    async with here.box(over=line) as box:
        await box.backend.write_record(RecordWrite("test", "b", b"1"))
        written = line.hold_answers(f"{here.names().to_records}value.*")
        write = RecordWrite("test", "a", b"1", if_version=0)
        await cut_off(line, written, lambda: box.backend.write_record(write))
        assert await until_it_works(lambda: box.backend.write_record(write)) is None
        (found,) = await box.backend.find_records("test", ["a"])
        assert found == Record("test", "a", b"1", found.version)
