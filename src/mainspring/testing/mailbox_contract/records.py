"""Records, and messages that are found and moved by their ids."""

from __future__ import annotations

import anyio

from mainspring.core import clock
from mainspring.errors import ReceiptHandleExpiredError
from mainspring.mailbox.message import Ack, CancelOutcome, MessagePlace, RescheduleOutcome, Result
from mainspring.mailbox.records import MAX_RECORD, RESULT, Record, RecordWrite
from mainspring.testing.mailbox_contract.harness import AnyMailbox, Harness, check, equal, on_mailbox, raises

ODD_KEYS = ("a", "A", "a b", "ä/ö?*>.", "日本", "\U0001f600", "x" * 400, "%2e_", "'\"\\", "0")
"""Keys of all kinds of characters, and a long one."""


def _names(records: list[Record]) -> list[str]:
    return [record.key for record in records]


@on_mailbox("records")
async def a_record_is_found_as_it_was_written(h: Harness, box: AnyMailbox) -> None:
    """A record has its value and version, under its kind and key; each write gives it a new version."""
    store = box.backend
    first = await store.write_record(RecordWrite("test", "a", b'{"n":1}'))
    check(bool(first), "the write returned no version")
    equal(await store.find_records("test", ["a", "b", "a"]), [Record("test", "a", b'{"n":1}', first or 0)], "found")
    equal(await store.find_records("other", ["a"]), [], "of another kind")
    second = await store.write_record(RecordWrite("test", "a", b""))
    check(second not in (None, 0, first), "a second write has the version of the first")
    equal(await store.find_records("test", ["a"]), [Record("test", "a", b"", second or 0)], "found afterwards")
    async with h.open("elsewhere") as other:
        equal(await other.backend.find_records("test", ["a"]), [], "in another mailbox")


@on_mailbox("records")
async def a_record_is_deleted(h: Harness, box: AnyMailbox) -> None:
    """A write of None deletes a record, or does nothing if there is none; a later record has another version."""
    store = box.backend
    first = await store.write_record(RecordWrite("test", "a", b"1"))
    equal(await store.write_record(RecordWrite("test", "a", None)), 0, "the version of none")
    equal(await store.write_record(RecordWrite("test", "a", None)), 0, "the version of none, again")
    equal(await store.find_records("test", ["a"]), [], "found")
    check(await store.write_record(RecordWrite("test", "a", b"1")) != first, "the version is used twice")


@on_mailbox("records")
async def a_write_can_depend_on_the_version(h: Harness, box: AnyMailbox) -> None:
    """if_version=0 writes only where there is no record, another only where it is the one there; else nothing changes."""
    store = box.backend
    first = await store.write_record(RecordWrite("test", "a", b"1", if_version=0))
    check(bool(first), "the first write was refused")
    equal(await store.write_record(RecordWrite("test", "a", b"2", if_version=0)), None, "a write of a second first one")
    second = await store.write_record(RecordWrite("test", "a", b"2", if_version=first))
    check(bool(second), "the write on the version that is there was refused")
    for value in (b"3", None):
        equal(await store.write_record(RecordWrite("test", "a", value, if_version=first)), None, "on an old version")
    equal([found.value for found in await store.find_records("test", ["a"])], [b"2"], "found")
    equal(await store.write_record(RecordWrite("test", "a", None, if_version=second)), 0, "the deletion")
    equal(await store.write_record(RecordWrite("test", "a", b"4", if_version=second)), None, "on a version deleted")


@on_mailbox("records")
async def of_many_writes_on_one_version_one_is_made(h: Harness, box: AnyMailbox) -> None:
    """Of writes that depend on the same version and are made at the same time, exactly one takes place, with its messages."""
    store = box.backend
    versions: list[int | None] = []

    async def write(number: int) -> None:
        sent = box.prepare(number)
        versions.append(await store.write_record(RecordWrite("test", "a", b"%d" % number, if_version=0), [sent]))

    async with anyio.create_task_group() as tasks:
        for number in range(8):
            tasks.start_soon(write, number)
    equal(len([version for version in versions if version]), 1, "writes that were made")
    (record,) = await store.find_records("test", ["a"])
    message = await h.one(box)
    equal(b"%d" % message.body, record.value, "the message that was sent")
    await message.acknowledge()
    await h.counts(box, settled=1)


@on_mailbox("records")
async def messages_are_sent_in_one_step_with_a_record(h: Harness, box: AnyMailbox) -> None:
    """Messages that accompany a write are sent as by send(), with delays, priorities and keys; refused, none is."""
    store = box.backend
    await box.send("first", dedup_key="k")
    envelopes = [box.prepare("same", dedup_key="k"), box.prepare("low"), box.prepare("late", delay=3_600)]
    if h.capabilities.priority:
        envelopes.append(box.prepare("high", priority=5))
    check(await store.write_record(RecordWrite("test", "a", b"1", if_version=0), envelopes) is not None, "refused")
    bodies = [message.body for message in await h.all(box)]
    equal(bodies, [*(["high"] if h.capabilities.priority else []), "first", "low"], "received")
    equal((await box.counts()).delayed, 1, "delayed")
    refused = await store.write_record(RecordWrite("test", "a", b"2", if_version=0), [box.prepare("never")])
    equal(refused, None, "the second write")
    equal((await box.counts()).pending, 0, "pending after a refused write")


@on_mailbox("records")
async def records_are_listed_in_pages(h: Harness, box: AnyMailbox) -> None:
    """list_records() gives the records of a kind in the order of their keys, a page at a time, whatever the keys."""
    store = box.backend
    for key in ODD_KEYS:
        await store.write_record(RecordWrite("test", key, key.encode()))
    await store.write_record(RecordWrite("other", "b", b"1"))
    expected = sorted(ODD_KEYS)
    equal(_names(await store.list_records("test", 100, None)), expected, "all")
    pages: list[str] = []
    while page := await store.list_records("test", 3, pages[-1] if pages else None):
        check(len(page) <= 3, "a page is too long")
        equal([record.value for record in page], [record.key.encode() for record in page], "the values")
        pages += _names(page)
    equal(pages, expected, "all pages")
    found = await store.find_records("test", list(ODD_KEYS))
    equal(sorted(_names(found)), expected, "found by their keys")


@on_mailbox("records")
async def a_record_ends_with_its_time(h: Harness, box: AnyMailbox) -> None:
    """A record with expires_in is gone from that instant on, for every call; a write begins its time anew."""
    store = box.backend
    async with h.ending(h.short):
        await store.write_record(RecordWrite("test", "short", b"1", h.short))
        await store.write_record(RecordWrite("test", "long", b"1", 3_600))
        await store.write_record(RecordWrite("test", "renewed", b"1", h.short))
        renewed = await store.write_record(RecordWrite("test", "renewed", b"2", 3_600))
        equal(len(await store.list_records("test", 10, None)), 3, "before the end")
    equal(_names(await store.list_records("test", 10, None)), ["long", "renewed"], "after the end")
    equal(await store.find_records("test", ["short"]), [], "found")
    check(
        bool(await store.write_record(RecordWrite("test", "short", b"2", if_version=0))), "it is not gone for a write"
    )
    equal(await store.write_record(RecordWrite("test", "renewed", b"3", if_version=renewed)) is None, False, "refused")


@on_mailbox("records")
async def a_record_may_be_large(h: Harness, box: AnyMailbox) -> None:
    """The largest value that the mailbox allows is kept whole, with any bytes."""
    value = bytes(range(256)) * (MAX_RECORD // 256)
    await box.backend.write_record(RecordWrite("test", "a", value))
    equal((await box.backend.find_records("test", ["a"]))[0].value == value, True, "the value is whole")


@on_mailbox("records")
async def a_purge_leaves_the_records(h: Harness, box: AnyMailbox) -> None:
    """purge() drops messages and no records, and records do not count as messages."""
    await box.backend.write_record(RecordWrite("test", "a", b"1"), [box.prepare("x")])
    await h.counts(box, pending=1)
    equal(await box.purge(), 1, "purged")
    equal(_names(await box.backend.list_records("test", 10, None)), ["a"], "records")


@on_mailbox("records", "durable")
async def records_outlive_the_mailbox_object(h: Harness, box: AnyMailbox) -> None:
    """A record is there for a mailbox object that is opened later."""
    await box.backend.write_record(RecordWrite("test", "a", b"1"))
    await box.close()
    async with h.open() as again:
        equal(_names(await again.backend.find_records("test", ["a"])), ["a"], "records")


@on_mailbox("records")
async def a_result_is_kept_with_the_acknowledgement(h: Harness, box: AnyMailbox) -> None:
    """An acknowledgement with a result leaves a record under the message's id, for its time; a refused one leaves none."""
    await box.send_many(["a", "b"])
    lost = await h.lapsed(box)
    result = Result(b'{"state":"done"}', h.short)
    with raises(ReceiptHandleExpiredError, "an acknowledgement after the lease"):
        await box.backend.settle(lost.delivery, Ack(result=result))
    equal(await box.backend.find_records(RESULT, [lost.id]), [], "the result of the refused acknowledgement")
    message = next(message for message in await h.all(box, due=2) if message.id != lost.id)
    async with h.ending(h.short):
        await box.backend.settle(message.delivery, Ack(result=result))
        equal([found.value for found in await box.backend.find_records(RESULT, [message.id])], [result.value], "kept")
    equal(await box.backend.find_records(RESULT, [message.id]), [], "kept after its time")


@on_mailbox("records")
async def results_are_announced(h: Harness, box: AnyMailbox) -> None:
    """A mailbox object that listens for results hears of results that another object of the mailbox leaves."""
    heard: list[str] = []
    async with h.open() as listener:
        stop = listener.backend.notifications.results.subscribe(heard.extend)
        await h.rest()
        message_id = await box.send("a")
        message = await h.one(box)
        await box.backend.settle(message.delivery, Ack(result=Result(b"{}", 3_600)))
        await h.until(lambda: _holds(message_id in heard), "the announcement of a result")
        stop()


async def _holds(condition: bool) -> bool:
    await anyio.lowlevel.checkpoint()
    return condition


@on_mailbox("lookup")
async def an_unfinished_message_is_found_by_its_id(h: Harness, box: AnyMailbox) -> None:
    """find() tells where a message is, its counts, and what was sent; settled, dead and foreign ones it leaves out."""
    now = clock.utc_now().timestamp()
    pending = await box.send({"n": 1}, headers={"a": "b"})
    delayed = await box.send("late", delay=3_600)
    found = {one.message.message_id: one for one in await box.backend.find([pending, delayed, "no-such", pending])}
    equal(set(found), {pending, delayed}, "found")
    equal((found[pending].place, found[pending].due_at), (MessagePlace.PENDING, None), "the pending one")
    equal(found[delayed].place, MessagePlace.DELAYED, "the delayed one")
    check(abs((found[delayed].due_at or 0) - now - 3_600) < 60, "the delayed one is due at another time")
    sent = found[pending].message
    equal((sent.delivery_count, sent.attempt, dict(sent.headers)), (0, 0, {"a": "b"}), "the counts and headers")
    check(abs(sent.enqueued_at - now) < 60, "it was sent at another time")
    message = await h.one(box)
    (held,) = await box.backend.find([pending])
    equal((held.place, held.message.delivery_count, held.message.attempt), (MessagePlace.IN_FLIGHT, 1, 1), "held")
    await message.nack(error="no")
    (again,) = await box.backend.find([pending])
    equal((again.place, again.message.delivery_count, again.message.attempt), (MessagePlace.PENDING, 1, 1), "again")
    if h.capabilities.history:
        check("no" in (again.message.history or ""), "its history is not told")
    await (await h.one(box)).acknowledge()
    equal(await box.backend.find([pending]), [], "found after its acknowledgement")
    if h.capabilities.cancel:
        equal(await box.cancel(delayed), CancelOutcome.REMOVED, "the cancellation")
        equal(await box.backend.find([delayed]), [], "found after its cancellation")
    dead = await box.send("dead")
    await (await h.one(box)).dead_letter("no")
    equal(await box.backend.find([dead]), [], "found after its death")


@on_mailbox("records", "announces_records")
async def a_change_of_a_record_is_announced(h: Harness, box: AnyMailbox) -> None:
    """A write and a deletion are published in each mailbox object; a write that was refused is not."""
    async with h.open() as other:
        heard: list[tuple[str, str]] = []
        stop = other.backend.notifications.records.subscribe(heard.append)
        await box.backend.write_record(RecordWrite("test", "a", b"1"))
        await box.backend.write_record(RecordWrite("test", "a", b"2", if_version=0))
        await other.backend.write_record(RecordWrite("test", "b", None))
        stop()
        equal(heard, [("test", "a"), ("test", "b")], "heard")


@on_mailbox("reschedule")
async def a_message_that_waits_is_rescheduled(h: Harness, box: AnyMailbox) -> None:
    """reschedule() moves a delayed message, also to now, and a pending one to later; the counts follow."""
    late, soon = await box.send("late", delay=3_600), await box.send("soon")
    equal(await box.backend.reschedule(soon, 3_600), RescheduleOutcome.RESCHEDULED, "a pending one")
    await h.counts(box, delayed=2)
    await h.none(box, "both are delayed")
    equal(await box.backend.reschedule(late, 0), RescheduleOutcome.RESCHEDULED, "a delayed one")
    await h.counts(box, delayed=1, pending=1)
    message = await h.one(box)
    equal((message.id, message.body, message.delivery_count, message.attempt), (late, "late", 1, 1), "received")
    await message.acknowledge()
    equal(await box.backend.reschedule(soon, h.short), RescheduleOutcome.RESCHEDULED, "a delayed one, to sooner")
    await h.pass_time(h.short)
    message = await h.one(box, wait=h.patience or 1.0)
    equal(message.id, soon, "received when it was due")
    await message.acknowledge()
    await h.counts(box, settled=2)


@on_mailbox("reschedule")
async def a_message_rescheduled_to_now_wakes_a_receive(h: Harness, box: AnyMailbox) -> None:
    """A receive that waits gets a delayed message as soon as that is rescheduled to now."""
    late = await box.send("late", delay=3_600)
    async with h.waiting(box) as received:
        await box.backend.reschedule(late, 0)
    equal([message.id for messages in received for message in messages], [late], "received")


@on_mailbox("reschedule")
async def a_message_rescheduled_to_now_while_pending_keeps_its_place(h: Harness, box: AnyMailbox) -> None:
    """reschedule() with 0 leaves a pending message where it is."""
    first, _ = await box.send_many(["a", "b"])
    equal(await box.backend.reschedule(first, 0), RescheduleOutcome.RESCHEDULED, "the outcome")
    equal([message.body for message in await h.all(box)], ["a", "b"], "received")


@on_mailbox("reschedule")
async def a_message_in_flight_is_not_rescheduled(h: Harness, box: AnyMailbox) -> None:
    """reschedule() leaves a message in flight, a settled one and an unknown one as they are, and says so."""
    held = await box.send("held")
    message = await h.one(box)
    equal(await box.backend.reschedule(held, 0), RescheduleOutcome.IN_FLIGHT, "in flight")
    await message.acknowledge()
    equal(await box.backend.reschedule(held, 5), RescheduleOutcome.UNKNOWN, "settled")
    equal(await box.backend.reschedule("no-such", 0), RescheduleOutcome.UNKNOWN, "unknown")
    await h.counts(box, settled=1)


@on_mailbox("reschedule", "dedup")
async def a_rescheduled_message_keeps_its_key_and_counts(h: Harness, box: AnyMailbox) -> None:
    """A rescheduled message keeps its dedup key, its deliveries, its attempts and its priority."""
    sent = await box.send("a", dedup_key="k", priority=3 if h.capabilities.priority else 0)
    await (await h.one(box)).nack(delay=3_600)
    await box.backend.reschedule(sent, 0)
    equal(await box.send("b", dedup_key="k"), sent, "a send with its key")
    message = await h.one(box)
    equal((message.id, message.delivery_count, message.attempt), (sent, 2, 2), "received")
    await message.acknowledge()


@on_mailbox("reschedule", "expiry")
async def a_rescheduled_message_expires_as_sent(h: Harness, box: AnyMailbox) -> None:
    """expires_in goes on from the send: a message that is rescheduled beyond it goes to the dead letters."""
    async with h.ending(h.short):
        sent = await box.send("a", expires_in=h.short)
        equal(await box.backend.reschedule(sent, 3_600), RescheduleOutcome.RESCHEDULED, "the outcome")
    await h.due_counts(box, dead=1)
