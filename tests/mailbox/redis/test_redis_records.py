"""Records in Redis: what they cost the messages beside them, how ended ones go, and what a fault leaves."""

from __future__ import annotations

import json

import anyio
import pytest

from mainspring import MailboxConnectionError, MailboxFullError
from mainspring.mailbox.message import Ack, Counts, MessagePlace, RescheduleOutcome, Result
from mainspring.mailbox.records import MAX_RECORD, RESULT, Record, RecordWrite
from mainspring.mailbox.redis.commands import LARGE, keys_of, record_keys_of
from redis_support import LISTENER, place, soon
from servers import RedisServer
from support import outcomes

pytestmark = pytest.mark.anyio

HOUR = 3_600.0
INDEXES = ("record_names", "record_ends")


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
    """A place on a server of its own."""
    with place(server.url) as made:
        yield made
        made.call("CONFIG", "SET", "maxmemory", 0)


def sizes(here):
    """How many entries the keys of the records have: values, names, ends."""
    return (
        here.call("HLEN", here.key("records")),
        here.call("ZCARD", here.key("record_names")),
        here.call("ZCARD", here.key("record_ends")),
    )


def named(records):
    return [record.key for record in records]


async def received(mailbox, **options):
    """Receive the one message."""
    (message,) = await mailbox.receive(**options)
    return message


# --------------------------------------------------------------------------------------------------------- what it costs


async def test_a_call_for_messages_alone_brings_no_keys_of_records(here, line, anyio_backend):
    keys: list[int] = []

    def note(passage, command):
        if command[0] == b"FCALL":
            keys.append(int(command[2]))

    async with line.mailbox() as mailbox:
        line.on_command = note
        await mailbox.send("x")
        await (await received(mailbox)).acknowledge()
        assert set(keys) == {len(keys_of("jobs"))}
        await mailbox.backend.write_record(RecordWrite("test", "a", b"1"))
        assert keys[-1] == keys[0] + len(record_keys_of("jobs"))


async def test_only_a_result_is_announced(here, anyio_backend):
    async with here.mailbox() as mailbox:
        await mailbox.send_many(["plain", "kept"])
        plain, kept = await mailbox.receive(max_messages=2)
        with here.subscribed("results") as heard, here.subscribed("all") as by_all:
            await plain.acknowledge()
            await kept.settle(Ack(result=Result(b"{}", HOUR)))
            await mailbox.backend.write_record(RecordWrite("test", "a", b"1"))
    assert heard == [b"r" + kept.id.encode()]
    assert by_all == []


async def test_results_are_sent_to_processes_alone_that_have_waited_for_one(here, line, anyio_backend):
    """Also after their connection was lost."""
    channel, heard = here.key("results").encode(), []
    told: list[list[str]] = []

    def listeners():
        return here.call("PUBSUB", "SHARDNUMSUB", channel)[1]

    async with line.mailbox() as waiting, here.mailbox() as worker:
        await worker.send_many([1, 2])
        assert listeners() == 0
        waiting.backend.notifications.results.subscribe(told.append)
        await soon(lambda: told == [[]])
        for number in range(2):
            stop = waiting.backend.notifications.results.subscribe(heard.extend)
            await soon(lambda: listeners() == 1)
            message = await received(worker)
            await message.settle(Ack(result=Result(b"{}", HOUR)))
            await soon(lambda: heard == [message.id])  # noqa: B023 - it has ended before the next one
            stop()
            heard.clear()
            if not number:
                line.cut(LISTENER)
                await soon(lambda: told == [[], [message.id], []])  # noqa: B023 - as above


# --------------------------------------------------------------------------------------------------- records that have ended


async def test_each_write_removes_a_few_that_have_ended(here, anyio_backend):
    async with here.mailbox() as mailbox:
        await mailbox.backend.write_record(RecordWrite("test", "0", b"1"))
        async with anyio.create_task_group() as group:  # in a call or two, before any has ended
            for number in range(1, 25):
                group.start_soon(mailbox.backend.write_record, RecordWrite("test", str(number), b"1", 0.2))
        assert sizes(here) == (25, 25, 24)
        await anyio.sleep(0.25)
        left = []
        for _ in range(4):
            await mailbox.backend.write_record(RecordWrite("test", "0", b"2"))
            left.append(sizes(here))
    assert left == [(15, 15, 14), (5, 5, 4), (1, 1, 0), (1, 1, 0)]


async def test_they_go_from_a_mailbox_that_writes_no_more(here, anyio_backend):
    """A mailbox object that is open sweeps them now and then, whether or not a receive waits."""
    async with here.mailbox(recovery_interval=0.05) as mailbox:
        for number in range(25):
            await mailbox.backend.write_record(RecordWrite("test", str(number), b"1", 0.2))
        await mailbox.backend.write_record(RecordWrite("test", "kept", b"1", HOUR))
        await soon(lambda: sizes(here) == (1, 1, 1))


async def test_a_record_that_is_written_anew_for_good_does_not_end(here, anyio_backend):
    async with here.mailbox() as mailbox:
        store = mailbox.backend
        await store.write_record(RecordWrite("test", "a", b"1", 0.05))
        await store.write_record(RecordWrite("test", "a", b"2"))
        await anyio.sleep(0.06)
        await store.write_record(RecordWrite("test", "b", b"1"))
        assert named(await store.list_records("test", 10, None)) == ["a", "b"]
        assert await store.write_record(RecordWrite("test", "a", None)) == 0
    assert sizes(here) == (1, 1, 0)


# ------------------------------------------------------------------------------------------------------------- answers


async def test_many_large_records_come_in_several_answers(here, line, anyio_backend):
    """The server does not make one answer of many megabytes, and none is left out."""
    calls: list[bytes] = []

    def note(passage, command):
        if command[0] == b"FCALL":
            calls.append(command[3 + int(command[2])])  # behind the keys

    keys = [f"{number:02}" for number in range(20)]
    async with line.mailbox() as mailbox:
        for key in keys:
            await mailbox.backend.write_record(RecordWrite("test", key, key.encode() * (MAX_RECORD // 2)))
        line.on_command = note
        listed = await mailbox.backend.list_records("test", 30, "01")
        assert named(listed) == keys[2:]
        assert [record.value[:2].decode() for record in listed] == keys[2:]
        assert calls == [b"list_records"] * 5
        found = await mailbox.backend.find_records("test", ["none", *keys, "none"])
        assert named(found) == keys
        assert calls[5:] == [b"find_records"] * 5


async def test_a_list_is_continued_where_its_last_record_was_deleted(here, anyio_backend):
    async with here.mailbox() as mailbox:
        for key in "abcd":
            await mailbox.backend.write_record(RecordWrite("test", key, b"1"))
        here.call("HDEL", here.key("records"), b"test\0b")
        assert named(await mailbox.backend.list_records("test", 2, None)) == ["a", "c"]


# ---------------------------------------------------------------------------------------------- one step with the messages


async def test_a_full_mailbox_takes_neither_the_messages_nor_the_record(here, anyio_backend):
    """Messages whose key has an unfinished one, or one before them, need no room."""
    async with here.mailbox(capacity=2) as mailbox:
        store = mailbox.backend
        await mailbox.send("first", dedup_key="k")
        same, late = mailbox.prepare("same", dedup_key="k"), mailbox.prepare("late", delay=5, dedup_key="l")
        again = mailbox.prepare("late, at once", dedup_key="l")
        with pytest.raises(MailboxFullError, match="1 of at most 2 messages and has no room for 2 more"):
            await store.write_record(RecordWrite("test", "a", b"1"), [same, late, mailbox.prepare("more")])
        assert await store.find_records("test", ["a"]) == []
        assert await store.write_record(RecordWrite("test", "a", b"1"), [same, late, again])
        assert await mailbox.counts() == Counts(pending=1, delayed=1)


async def test_a_large_message_comes_with_a_record(here, anyio_backend):
    body = "x" * (2 * LARGE)
    async with here.mailbox() as mailbox:
        await mailbox.backend.write_record(RecordWrite("test", "a", b"1"), [mailbox.prepare(body)])
        assert (await received(mailbox)).body == body


async def test_a_message_that_comes_with_a_record_is_sent_to_a_receive_that_waits(here, waiting, anyio_backend):
    async with here.mailbox() as mailbox, here.mailbox() as sender:
        await waiting.start(mailbox)
        await sender.backend.write_record(RecordWrite("test", "a", b"1"), [sender.prepare("x")])
        await waiting.until(1)
        assert [message.body for message in waiting.messages] == ["x"]


async def test_a_result_leaves_with_the_reply(here, anyio_backend):
    async with here.mailbox() as mailbox, here.mailbox("replies") as replies:
        await mailbox.send("x", reply_to=replies.name)
        message = await received(mailbox)
        reply = mailbox.reply_to(message, "y")
        await message.settle(Ack(reply, Result(b"{}", HOUR)))
        assert (await received(replies)).body == "y"
        assert named(await mailbox.backend.find_records(RESULT, [message.id])) == [message.id]
        assert await mailbox.counts() == Counts(settled=1)


async def test_a_write_whose_answer_was_lost_is_safe_to_repeat_with_its_version(here, line, anyio_backend):
    """It has taken place, with its message; repeated, it finds that."""
    async with line.mailbox() as mailbox:
        write = RecordWrite("test", "a", b"1", if_version=0)
        line.answers.hold()
        async with anyio.create_task_group() as group:
            group.start_soon(line.lose_answer)
            with pytest.raises(MailboxConnectionError):
                await mailbox.backend.write_record(write, [mailbox.prepare("x")])
        assert mailbox.statistics().unconfirmed == 0
        assert await mailbox.backend.write_record(write, [mailbox.prepare("x")]) is None
        assert await mailbox.counts() == Counts(pending=1)


@pytest.mark.loops("asyncio", "uvloop")  # trio starts tasks in any order
async def test_writes_claims_and_sends_of_one_batch_are_each_done(here, anyio_backend):
    async with here.mailbox() as mailbox:
        store = mailbox.backend
        found = await outcomes(
            lambda: store.write_record(RecordWrite("test", "a", b"1"), [mailbox.prepare("x", priority=1)]),
            lambda: mailbox.send("y"),
            lambda: store.write_record(RecordWrite("test", "b", b"1")),
            lambda: store.list_records("test", 10, None),
            lambda: mailbox.receive(max_messages=3),
        )
        first, _, second, listed, messages = found
        assert listed == [Record("test", "a", b"1", first), Record("test", "b", b"1", second)]
        assert [message.body for message in messages] == ["x", "y"]


# --------------------------------------------------------------------------------------------------------------- trouble


async def test_on_a_full_server_results_are_kept_and_records_deleted(alone, anyio_backend):
    """Only what is new is refused."""
    async with alone.mailbox() as mailbox:
        store = mailbox.backend
        await store.write_record(RecordWrite("test", "a", b"1"))
        await mailbox.send("x")
        message = await received(mailbox)
        alone.call("CONFIG", "SET", "maxmemory", 1)
        for write, sent in (
            (RecordWrite("test", "a", b"2"), []),
            (RecordWrite("test", "a", None), [mailbox.prepare("y")]),
        ):
            with pytest.raises(MailboxConnectionError, match="OOM"):
                await store.write_record(write, sent)
        assert [record.value for record in await store.find_records("test", ["a"])] == [b"1"]
        assert await store.write_record(RecordWrite("test", "a", None)) == 0
        await message.settle(Ack(result=Result(b"{}", HOUR)))
        assert len(await store.find_records(RESULT, [message.id])) == 1
        assert await mailbox.counts() == Counts(settled=1)


async def test_a_write_that_the_server_refuses_sends_nothing(here, anyio_backend):
    async with here.mailbox() as mailbox:
        here.call("SET", here.key("records"), "another program's")
        with pytest.raises(MailboxConnectionError, match="records, which is a string"):
            await mailbox.backend.write_record(RecordWrite("test", "a", b"1"), [mailbox.prepare("x")])
        await mailbox.send("y")
        message = await received(mailbox)
        with pytest.raises(MailboxConnectionError, match="WRONGTYPE"):
            await message.settle(Ack(result=Result(b"{}", HOUR)))
        assert await mailbox.counts() == Counts(in_flight=1)
        await message.acknowledge()


async def test_a_version_is_not_used_again_after_the_counters_are_gone(here, anyio_backend):
    async with here.mailbox() as mailbox:
        store = mailbox.backend
        version = await store.write_record(RecordWrite("test", "a", b"1"))
        await store.write_record(RecordWrite("test", "a", None))
        here.call("DEL", here.key("state"))
        assert await store.write_record(RecordWrite("test", "a", b"2")) > version


@pytest.mark.parametrize("key", ["records", *INDEXES])
async def test_records_whose_index_is_gone_are_found_again(here, key, anyio_backend):
    """The order of the keys at once, their ends in the daily round; entries without a record go."""
    async with here.mailbox() as mailbox:
        await mailbox.backend.write_record(RecordWrite("test", "a", b"1", HOUR))
        await mailbox.backend.write_record(RecordWrite("test", "b", b"1"))
    here.call("DEL", here.key(key))
    if key == "record_ends":
        here.call("HDEL", here.key("state"), "recovered")
        here.call("HSET", here.key("state"), "recovered", 1)
    here.call("HDEL", here.key("state"), "recovery")
    expected = (0, 0, 0) if key == "records" else (2, 2, 1)
    async with here.mailbox(recovery_interval=0.05) as mailbox:
        await soon(lambda: sizes(here) == expected)
        assert named(await mailbox.backend.list_records("test", 10, None)) == ["a", "b"][: expected[0]]


async def test_what_no_mailbox_wrote_is_no_record(here, anyio_backend):
    async with here.mailbox() as mailbox:
        here.call("HSET", here.key("records"), b"test\0a", "1")
        here.call("ZADD", here.key("record_names"), 0, b"test\0a")
        store = mailbox.backend
        assert await store.find_records("test", ["a"]) == await store.list_records("test", 5, None) == []
        version = await store.write_record(RecordWrite("test", "a", b"1", if_version=0))
        assert await store.list_records("test", 5, None) == [Record("test", "a", b"1", version)]


# ------------------------------------------------------------------------------------------------------ found and moved


async def test_a_message_with_a_large_body_is_found_whole(here, anyio_backend):
    body = "x" * (2 * LARGE)
    async with here.mailbox() as mailbox:
        large, small = await mailbox.send(body), await mailbox.send("y", priority=-3)
        found = {one.message.message_id: one for one in await mailbox.backend.find([large, small])}
        assert json.loads(found[large].message.body) == body
        assert (json.loads(found[small].message.body), found[small].priority) == ("y", -3)


async def test_when_a_message_in_flight_was_claimed_is_found(here, anyio_backend):
    async with here.mailbox() as mailbox:
        await mailbox.send_many(["a", "b"])
        first, second = await mailbox.receive(max_messages=2)
        await first.nack()
        again = await received(mailbox)
        found = {one.message.message_id: one.message for one in await mailbox.backend.find([first.id, second.id])}
        for message in (again, second):
            seen = found[message.id]
            assert (seen.first_received_at, seen.delivery_count) == (
                message.first_received_at.timestamp(),
                message.delivery_count,
            )


async def test_a_message_whose_lease_or_life_is_over_is_found_where_it_is_now(here, anyio_backend):
    async with here.mailbox() as mailbox:
        held = await mailbox.send("held")
        await received(mailbox, visibility_timeout=0.05)
        ends = await mailbox.send("ends", expires_in=0.05)
        await anyio.sleep(0.06)
        (found,) = await mailbox.backend.find([held, ends])
        assert (found.message.message_id, found.place) == (held, MessagePlace.PENDING)
        assert (found.message.delivery_count, found.message.attempt) == (1, 1)


async def test_a_message_that_is_moved_often_waits_once(here, anyio_backend):
    async with here.mailbox() as mailbox:
        sent = await mailbox.send("x", priority=2)
        for delay in (HOUR, 2 * HOUR, HOUR, 0, 0, HOUR, 0):
            assert await mailbox.backend.reschedule(sent, delay) is RescheduleOutcome.RESCHEDULED
            counts = await mailbox.counts()
            assert (counts.pending, counts.delayed) == ((0, 1) if delay else (1, 0))
        message = await received(mailbox)
        assert (message.body, message.delivery_count) == ("x", 1)
        await message.acknowledge()
        assert await mailbox.counts() == Counts(settled=1)
