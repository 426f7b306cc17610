"""Records on PostgreSQL: writes beside open transactions, who is told of results, and when records that have ended go."""

from __future__ import annotations

import time
from contextlib import suppress

import anyio
import psycopg
import pytest

from mainspring import Context, LoopGroup, MailboxConnectionError, MailboxFullError, ReceiptHandleExpiredError, Tasks
from mainspring.mailbox.message import Ack, MessagePlace, Result
from mainspring.mailbox.records import RESULT, RecordWrite
from postgres_support import gate, until
from silent_line import Line

pytestmark = pytest.mark.anyio

DONE = Ack(result=Result(b"{}", 60))


@pytest.fixture
def anyio_backend():
    return "asyncio", {"use_uvloop": True}


@pytest.fixture
async def mailbox(place, anyio_backend):
    async with place.mailbox() as made:
        yield made


def count(place, table="records"):
    return place.execute(f"SELECT count(*) FROM SCHEMA.{table}")[0][0]


async def acknowledge(mailbox, many=1):
    """Send messages, and acknowledge each with a result, all at the same time. Return their ids."""
    ids = await mailbox.send_many(range(many))
    async with anyio.create_task_group() as tasks:
        for message in await mailbox.receive(max_messages=many):
            tasks.start_soon(message.settle, DONE)
    return ids


# -------------------------------------------------------------------------------------------------------------- writes


@pytest.mark.parametrize("commits", [True, False])
@pytest.mark.parametrize("version", [0, 1])
async def test_a_write_waits_for_a_transaction_that_writes_the_record(place, mailbox, version, commits):
    """It takes place only if that is rolled back, and so do its messages."""
    store = mailbox.backend
    before = await store.write_record(RecordWrite("test", "a", b"1")) if version else 0
    versions = []

    async def write():
        ours = RecordWrite("test", "a", b"ours", if_version=before)
        versions.append(await store.write_record(ours, [mailbox.prepare("ours")]))

    async with await place.connect() as connection:
        theirs = f"SELECT {place.schema}.write_record(%s, 'test', 'a', 'theirs', NULL, %s)"
        await connection.execute(theirs, (place.number(), before))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(write)
            await anyio.sleep(0.1)
            assert versions == []
            await (connection.commit() if commits else connection.rollback())
    (record,) = await store.find_records("test", ["a"])
    assert (record.value, versions[0] is None) == ((b"theirs", True) if commits else (b"ours", False))
    assert (await mailbox.counts()).pending == (0 if commits else 1)


@pytest.mark.slow
@pytest.mark.parametrize("capacity", [None, 9])
async def test_a_write_whose_message_has_a_blocked_key_waits_for_it_and_changes_nothing_until_then(place, capacity):
    write = RecordWrite("test", "a", b"1", if_version=0)
    async with place.mailbox(capacity=capacity, timeout=1) as mailbox, place.mailbox() as other:
        async with await place.connect() as connection:
            first = await other.send("x", dedup_key="k", connection=connection)
            with pytest.raises(MailboxConnectionError, match="has sent the same dedup_key"):
                await mailbox.backend.write_record(write, [mailbox.prepare("y", dedup_key="k"), mailbox.prepare("z")])
            assert count(place) == 0
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(mailbox.backend.write_record, write, [mailbox.prepare("y", dedup_key="k")])
                await anyio.sleep(0.1)
                await connection.commit()
        assert count(place) == 1
        assert [message.id for message in await mailbox.receive(max_messages=9)] == [first]


class OneWay(Line):
    """A line on which no answer passes while it is ``mute``."""

    mute = False

    async def pass_on(self, said, target, *, is_answer):
        if is_answer and self.mute:
            await anyio.sleep_forever()
        await target.send(said)


async def test_a_write_whose_answer_is_lost_fails_and_can_be_tried_again(place):
    """It has taken place here. With ``if_version`` the second try is refused, and the record tells whose it is."""
    async with gate(place.url, OneWay) as (url, way), place.mailbox(url=url, listen=False) as mailbox:
        write = RecordWrite("test", "a", b"ours", if_version=0)
        failed = []

        async def attempt():
            try:
                await mailbox.backend.write_record(write)
            except MailboxConnectionError as error:
                failed.append(error)

        async with anyio.create_task_group() as tasks:
            way.mute = True
            tasks.start_soon(attempt)
            await until(lambda: count(place) == 1)
            way.mute = False
            way.cut()
        assert len(failed) == 1
        assert await mailbox.backend.write_record(write) is None
        assert [record.value for record in await mailbox.backend.find_records("test", ["a"])] == [b"ours"]


async def test_a_record_whose_messages_do_not_fit_is_not_written(place):
    async with place.mailbox(capacity=1) as mailbox:
        write = RecordWrite("test", "a", b"")
        with pytest.raises(MailboxFullError, match="holds 0 of at most 1 message and has no room for 2 more"):
            await mailbox.backend.write_record(write, [mailbox.prepare(1), mailbox.prepare(2)])
        assert count(place) == count(place, "messages") == 0
        assert await mailbox.backend.write_record(write, [mailbox.prepare(1)])
        assert count(place) == count(place, "messages") == 1


async def test_a_deletion_can_depend_on_there_being_none(mailbox):
    store = mailbox.backend
    assert await store.write_record(RecordWrite("test", "a", None, if_version=0)) == 0
    await store.write_record(RecordWrite("test", "a", b""))
    assert await store.write_record(RecordWrite("test", "a", None, if_version=0)) is None


# ---------------------------------------------------------------------------------------------------------------- ends


async def test_ended_records_are_not_seen(place, mailbox):
    store = mailbox.backend
    versions = {key: await store.write_record(RecordWrite("test", key, b"", 3_600)) for key in "abc"}
    place.execute("UPDATE SCHEMA.records SET expires_at = now() - interval '1 second' WHERE key < 'c'")
    assert [record.key for record in await store.list_records("test", 9, None)] == ["c"]
    assert [record.key for record in await store.find_records("test", ["a", "c"])] == ["c"]
    for value in (b"", None):
        assert await store.write_record(RecordWrite("test", "a", value, if_version=versions["a"])) is None
    assert await store.write_record(RecordWrite("test", "a", b"", 60, if_version=0)) is not None


async def test_ended_records_go_a_portion_at_a_time_and_none_waits_for_another_process(place):
    await place.mailbox().migrate_schema()
    place.execute(
        "INSERT INTO SCHEMA.records SELECT 1, n, now() - n * interval '1 second', 'test', 'r' || n, ''"
        " FROM generate_series(-1, 4) AS n WHERE n <> 0"
    )
    async with await place.connect() as connection:
        await connection.execute(f"SELECT FROM {place.schema}.records WHERE key = 'r4' FOR UPDATE")
        assert place.execute("SELECT SCHEMA.end_records(2)") == [(2,)]
        assert place.execute("SELECT key FROM SCHEMA.records ORDER BY 1") == [("r-1",), ("r1",), ("r4",)]
    assert place.execute("SELECT SCHEMA.end_records(9)") == [(2,)]


@pytest.mark.slow
async def test_ended_records_go_while_messages_pass(place, mailbox):
    await mailbox.backend.write_record(RecordWrite("test", "a", b"", 0.001))
    await mailbox.backend.write_record(RecordWrite("test", "b", b"", 3_600))
    await mailbox.send("x")
    await until(lambda: count(place) == 1)


async def test_a_mailbox_that_is_dropped_leaves_no_records(place, mailbox):
    async with place.mailbox("dropped") as dropped:
        await acknowledge(dropped, 2)
        await mailbox.backend.write_record(RecordWrite("test", "a", b"1"))
        assert count(place) == 3
        place.execute("SELECT SCHEMA.drop_mailbox(%s)", place.number("dropped"))
    assert count(place) == 1


# ------------------------------------------------------------------------------------------------------------- results


@pytest.mark.slow
async def test_results_are_announced_only_while_a_process_waits_for_some(place, mailbox):
    """A notification makes commits wait for one another, so that one for each result would slow down all."""

    def told():
        notices = [notice.payload for notice in connection.notifies(timeout=0.3)]
        return [payload for payload in notices if "results" in payload]

    with psycopg.connect(place.url, autocommit=True) as connection:
        connection.execute(f"LISTEN {place.schema}")
        await acknowledge(mailbox)
        assert told() == []
        heard = []
        unsubscribe = mailbox.backend.notifications.results.subscribe(heard.extend)
        wanted = "SELECT 1 FROM SCHEMA.mailboxes WHERE results_until > now() + interval '30 seconds'"
        await until(lambda: place.execute(wanted))
        ids = await acknowledge(mailbox, 250)
        await until(lambda: len(heard) == 250)
        assert sorted(heard) == sorted(ids)  # each once, though its notification comes back
        payloads = [payload.split() for payload in told()]
        assert all(payload[:2] == [str(place.number()), "results"] for payload in payloads)
        assert sorted(name for payload in payloads for name in payload[2:]) == sorted(ids)
        assert max(map(len, payloads)) <= 102
        unsubscribe()


async def test_who_begins_to_hear_of_results_is_told_that_some_may_have_been_missed(place):
    """Once: as long as it is known that results are wanted, none is missed by one more wait for some."""
    async with place.mailbox() as mailbox:
        await until(lambda: not mailbox.statistics().polling)
        heard = []
        for _ in range(2):
            unsubscribe = mailbox.backend.notifications.results.subscribe(heard.append)
            await until(lambda: heard)
            unsubscribe()
        await anyio.sleep(0.1)
        assert heard == [[]]


async def test_a_connection_that_listens_again_tells_that_results_may_have_been_missed(place):
    async with gate(place.url) as (url, way), place.mailbox(url=url) as mailbox:
        await until(lambda: not mailbox.statistics().polling)
        heard = []
        mailbox.backend.notifications.results.subscribe(heard.append)
        await until(lambda: heard)
        way.cut()
        await until(lambda: len(heard) == 2)
        assert heard == [[], []]


@pytest.mark.slow
async def test_a_result_the_acknowledgement_and_the_next_claim_share_a_call(mailbox):
    tasks = Tasks(mailbox)

    @tasks.task(result_ttl=60)
    async def work(number: int) -> int:
        await anyio.sleep(0.06)  # longer than what a loop claims ahead, so that each message has a claim of its own
        return number

    await work.send_many([(number,) for number in range(10)])
    before = mailbox.statistics().batches
    async with tasks.loop(concurrency=1) as loop:
        await until(lambda: loop.outcomes["acknowledged"] == 10)
    assert mailbox.statistics().batches - before <= 13
    assert len(await mailbox.backend.list_records(RESULT, 20, None)) == 10


async def test_the_result_of_a_handler_with_a_transaction_is_kept(place):
    tasks = Tasks(place.mailbox())
    place.execute("CREATE SCHEMA IF NOT EXISTS " + place.schema)
    place.execute("CREATE TABLE SCHEMA.effects (what integer)")

    @tasks.task(result_ttl=60)
    async def work(ctx: Context, number: int) -> int:
        async with ctx.transaction() as connection:
            await connection.execute(f"INSERT INTO {place.schema}.effects VALUES (%s)", (number,))
        return number + 1

    async with LoopGroup([tasks.loop()], guardian=False):
        job = await work.send(number=1)
        assert await job.result(timeout=20) == 2
    assert place.execute("SELECT what FROM SCHEMA.effects") == [(1,)]


async def test_a_refused_acknowledgement_leaves_no_result(mailbox):
    """Though another one of its batch is made."""
    ids = await mailbox.send_many(["held", "lost"])
    held, lost = await mailbox.receive(max_messages=2)
    await mailbox.cancel(lost.id)
    refused = []

    async def settle(message):
        try:
            await message.settle(DONE)
        except ReceiptHandleExpiredError:
            refused.append(message.id)

    async with anyio.create_task_group() as tasks:
        for message in (held, lost):
            tasks.start_soon(settle, message)
    assert refused == [lost.id]
    assert [record.key for record in await mailbox.backend.find_records(RESULT, ids)] == [held.id]


async def test_a_result_with_a_reply_is_kept(place, mailbox):
    async with place.mailbox("answers") as answers:
        sent = await mailbox.send("ask", reply_to="answers")
        (message,) = await mailbox.receive()
        await message.settle(Ack(mailbox.reply_to(message, "answer"), Result(b"{}", 60)))
        assert [reply.body for reply in await answers.receive()] == ["answer"]
        assert [record.key for record in await mailbox.backend.list_records(RESULT, 9, None)] == [sent]


async def test_a_result_inside_of_a_transaction_exists_if_that_commits(place, mailbox):
    (sent,) = [await mailbox.send("x")]
    (message,) = await mailbox.receive()
    with suppress(ZeroDivisionError):
        async with mailbox.transaction(message):
            await message.settle(DONE)
            raise ZeroDivisionError
    assert await mailbox.backend.find_records(RESULT, [sent]) == []
    async with mailbox.transaction(message):
        await message.settle(DONE)
        assert await mailbox.backend.find_records(RESULT, [sent]) == []
    assert len(await mailbox.backend.find_records(RESULT, [sent])) == 1


# ---------------------------------------------------------------------------------------------------------------- by id


async def test_a_message_whose_time_has_come_is_found_so_before_any_sweep(place, mailbox):
    ids = await mailbox.send_many(["held", "late", "old"])
    (held,) = await mailbox.receive(visibility_timeout=600)
    place.execute("UPDATE SCHEMA.messages SET due = now() - interval '1 second' WHERE id = %s", held.id)
    place.execute("UPDATE SCHEMA.messages SET state = 1, due = now() - interval '1 second' WHERE id = %s", ids[1])
    place.execute("UPDATE SCHEMA.messages SET expires_at = now() - interval '1 second' WHERE id = %s", ids[2])
    found = {one.message.message_id: one for one in await mailbox.backend.find(ids)}
    assert {name: one.place for name, one in found.items()} == dict.fromkeys(ids[:2], MessagePlace.PENDING)
    assert (found[held.id].message.attempt, found[held.id].due_at) == (1, None)
    assert found[ids[1]].due_at is None


async def test_a_pending_message_that_is_rescheduled_to_now_keeps_its_place(mailbox):
    first, _ = await mailbox.send_many(["a", "b"])
    assert await mailbox.backend.reschedule(first, 0) == "rescheduled"
    assert [message.body for message in await mailbox.receive(max_messages=2)] == ["a", "b"]


async def test_a_message_that_a_handlers_transaction_has_locked_is_found_and_not_rescheduled(place, mailbox):
    """The calls do not wait for it."""
    sent = await mailbox.send("x")
    (message,) = await mailbox.receive()
    async with mailbox.transaction(message):
        await message.acknowledge()
        began = time.monotonic()
        ((one,), moved) = (await mailbox.backend.find([sent]), await mailbox.backend.reschedule(sent, 5))
        assert time.monotonic() - began < 5
        assert (one.place, moved) == ("in_flight", "in_flight")


@pytest.mark.slow
async def test_no_call_by_a_key_reads_a_whole_table(place, mailbox):
    """The number of rows that it reads does not grow with the records that are there."""
    store = mailbox.backend
    ids = await mailbox.send_many(range(500))
    place.execute(
        "INSERT INTO SCHEMA.records SELECT %s, g, NULL, 'test', g::text, '' FROM generate_series(1, 500) g",
        place.number(),
    )
    read = (
        "SELECT sum(seq_tup_read) FROM pg_stat_all_tables WHERE schemaname = %s AND relname IN ('records', 'messages')"
    )
    with psycopg.connect(place.url, autocommit=True) as connection:

        def rows():
            time.sleep(1.1)  # the server's statistics come late
            connection.execute("SELECT pg_stat_clear_snapshot()")
            return connection.execute(read, (place.schema,)).fetchone()[0]

        before = rows()
        await store.find(ids[:2])
        await store.reschedule(ids[0], 60)
        await store.find_records("test", ["1", "2"])
        await store.list_records("test", 5, "3")
        await store.write_record(RecordWrite("test", "9", b"", 60, if_version=0))
        place.execute("SELECT SCHEMA.end_records(9)")
        assert rows() == before
