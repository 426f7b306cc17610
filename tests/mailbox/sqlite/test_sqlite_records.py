"""Records in a mailbox file: what they cost messages, when ended records go, and what shares a transaction."""

from __future__ import annotations

from contextlib import closing

import anyio
import apsw
import pytest

from mainspring import MainLoop, Tasks
from mainspring.errors import MailboxConnectionError, MailboxError, MailboxFullError
from mainspring.mailbox.message import Ack, Envelope, Result
from mainspring.mailbox.records import RESULT, RecordWrite
from mainspring.mailbox.sqlite.mailbox import SQLiteMailbox
from mainspring.mailbox.sqlite.notifier import NOTE_SIZE, ReceivedNotifications, notes_of_results

pytestmark = pytest.mark.anyio


def rows(path, statement):
    with closing(apsw.Connection(path)) as connection:
        return connection.execute(statement).fetchall()


def count(path, table="records"):
    return rows(path, f"SELECT count(*) FROM {table}")[0][0]


async def write_at_once(store, writes):
    async with anyio.create_task_group() as tasks:
        for write in writes:
            tasks.start_soon(store.write_record, write)


async def acknowledge(mailbox, *bodies, expires_in=60.0):
    """Send messages and acknowledge each with a result."""
    ids = await mailbox.send_many(bodies)
    for message in await mailbox.receive(max_messages=len(bodies)):
        await message.settle(Ack(result=Result(b"{}", expires_in)))
    return ids


async def test_messages_without_records_read_none_of_their_pages(connections, mailbox):
    statements = []
    (connection,) = connections
    connection.exec_trace = lambda cursor, statement, values: statements.append(statement) or True
    await mailbox.send("a")
    for end in ("nack", "acknowledge"):
        (message,) = await mailbox.receive()
        await getattr(message, end)()
    assert len(statements) > 10
    assert not [statement for statement in statements if "records" in statement.replace("records_end", "")]


async def test_ended_records_go_as_messages_pass(path, virtual_clock):
    """The first thousand goes with the next transaction, of any purpose. The rest is not seen."""
    async with SQLiteMailbox(path) as mailbox:
        store = mailbox.backend
        await write_at_once(store, [RecordWrite("test", f"{number:04}", b"", 10) for number in range(1_001)])
        await store.write_record(RecordWrite("test", "x", b"", 20))
        await store.write_record(RecordWrite("test", "y", b""))
        virtual_clock.advance(10)
        assert [record.key for record in await store.list_records("test", 9, None)] == ["x", "y"]
        assert count(path) == 3
        assert [record.key for record in await store.find_records("test", ["1000", "x"])] == ["x"]
        assert count(path) == 2
        await mailbox.send("a")
        virtual_clock.advance(10)
        await mailbox.send("b")
        assert count(path) == 1


async def test_of_a_thousand_that_ended_together_the_rest_is_not_seen(path, virtual_clock):
    async with SQLiteMailbox(path) as mailbox:
        store = mailbox.backend
        ends = [10 + number / 10_000 for number in range(2_003)]
        await write_at_once(store, [RecordWrite("test", f"{n:04}", b"", end) for n, end in enumerate(ends)])
        ((last,),) = rows(path, "SELECT version FROM records WHERE key = '2002'")
        virtual_clock.advance(20)
        assert await store.find_records("test", ["2000", "2002"]) == []
        assert count(path) == 1_003
        assert await store.write_record(RecordWrite("test", "2002", b"", 60, if_version=last)) is None
        assert await store.write_record(RecordWrite("test", "2002", b"", 60, if_version=0)) is not None


@pytest.mark.own_time(1)
async def test_a_result_the_acknowledgement_and_the_next_claim_share_a_transaction(mailbox):
    tasks = Tasks(mailbox)

    @tasks.task(result_ttl=60)
    async def work(number: int) -> int:
        await anyio.sleep(0.06)  # longer than what a loop claims ahead, so that each message has a claim of its own
        return number

    await work.send_many([(number,) for number in range(10)])
    before = mailbox.transactions
    loop: MainLoop = tasks.loop(concurrency=1)
    async with anyio.create_task_group() as group:
        group.start_soon(loop.run)
        while loop.outcomes["acknowledged"] < 10:
            await anyio.sleep(0.001)
        assert mailbox.transactions - before < 20  # two a message otherwise; some are looks at the schedules
        await loop.shutdown()
    assert len(await mailbox.backend.list_records(RESULT, 20, None)) == 10


async def test_a_record_whose_messages_do_not_fit_is_not_written(path, anyio_backend):
    async with SQLiteMailbox(path, capacity=1) as mailbox:
        write = RecordWrite("test", "a", b"")
        with pytest.raises(MailboxFullError, match="holds 0 of at most 1 message and has no room for 2 more"):
            await mailbox.backend.write_record(write, [mailbox.prepare(1), mailbox.prepare(2)])
        assert count(path) == count(path, "messages") == 0
        assert await mailbox.backend.write_record(write, [mailbox.prepare(1)])
        assert count(path) == count(path, "messages") == 1


async def test_a_write_to_a_locked_file_fails_and_changes_nothing(path, anyio_backend):
    async with SQLiteMailbox(path, busy_timeout=0.05) as mailbox:
        write = RecordWrite("test", "a", b"", if_version=0)
        with closing(apsw.Connection(path)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(MailboxConnectionError, match="is locked by another process"):
                await mailbox.backend.write_record(write, [mailbox.prepare(1)])
        assert count(path) == count(path, "messages") == 0
        assert await mailbox.backend.write_record(write, [mailbox.prepare(1)])


async def test_a_failure_leaves_the_results_of_its_neighbours(path, anyio_backend):
    """And they are announced, though each operation of that transaction is done by itself then."""
    async with SQLiteMailbox(path, name="a") as mailbox:
        ids = await mailbox.send_many([1, 2])
        heard: list[str] = []
        mailbox.backend.notifications.results.subscribe(heard.extend)
        failed = []

        async def fail():
            try:
                await mailbox.backend.send([Envelope("x", "no bytes")])
            except MailboxError as error:
                failed.append(error)

        async with anyio.create_task_group() as group:
            for message in await mailbox.receive(max_messages=2):
                group.start_soon(message.settle, Ack(result=Result(b"{}", 60)))
            group.start_soon(fail)
        assert len(failed) == 1
        assert {record.key for record in await mailbox.backend.find_records(RESULT, ids)} == set(ids)
        with anyio.fail_after(5):
            while len(heard) < 2:
                await anyio.sleep(0.001)
        assert sorted(heard) == ids


async def test_an_acknowledgement_with_a_reply_keeps_its_result(path, anyio_backend):
    async with SQLiteMailbox(path, name="jobs") as jobs, SQLiteMailbox(path, name="answers") as answers:
        sent = await jobs.send("ask", reply_to="answers")
        (message,) = await jobs.receive()
        await message.settle(Ack(jobs.reply_to(message, "answer"), Result(b"{}", 60)))
        assert [reply.body for reply in await answers.receive()] == ["answer"]
        assert [record.key for record in await jobs.backend.list_records(RESULT, 9, None)] == [sent]
        assert await answers.backend.list_records(RESULT, 9, None) == []


async def test_a_mailbox_that_is_dropped_leaves_no_records(path, anyio_backend):
    async with SQLiteMailbox(path, name="kept") as kept:
        await kept.backend.write_record(RecordWrite("test", "a", b"1"))
        async with SQLiteMailbox(path, name="dropped") as dropped:
            await acknowledge(dropped, "a", "b")
            assert count(path) == 3
            await dropped.backend.drop()
        assert count(path) == 1


def test_ids_of_results_share_notifications():
    ids = [f"message-{number:012}" for number in range(100)] + ["long" * 200, "last"]
    notes = list(notes_of_results(7, ids))
    assert len(notes) == 7
    assert all(len(note) <= NOTE_SIZE for note in notes if b"long" not in note)
    received = ReceivedNotifications()
    for note in notes:
        received.add(note)
    assert (received.results, received.unknown) == ({7: ids}, False)
