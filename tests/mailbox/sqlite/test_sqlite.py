"""The SQLite mailbox beyond the contract: the file, its names and options, and what joins into one transaction."""

from __future__ import annotations

import copy
import os
import re
from collections import Counter
from contextlib import closing, contextmanager

import anyio
import apsw
import pytest

from mainspring.errors import (
    ConfigError,
    MailboxConnectionError,
    MailboxError,
    MailboxFullError,
    ReceiptHandleExpiredError,
)
from mainspring.mailbox.backend import MailboxStatistics
from mainspring.mailbox.message import Counts, Envelope
from mainspring.mailbox.open import open_mailbox
from mainspring.mailbox.sqlite import schema as sql
from mainspring.mailbox.sqlite.mailbox import SQLiteMailbox
from mainspring.worker.main_loop import MainLoop

pytestmark = [pytest.mark.anyio, pytest.mark.every_loop]


def rows(path, statement, *values):
    with closing(apsw.Connection(path)) as connection:
        return connection.execute(statement, values).fetchall()


@contextmanager
def locked(path):
    """Another user of the file is inside a transaction."""
    with closing(apsw.Connection(path)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        yield


# ------------------------------------------------------------------------------------------------------------ the file


async def test_messages_outlive_the_mailbox(path, anyio_backend):
    async with SQLiteMailbox(path, name="jobs") as first:
        await first.send({"a": 1}, priority=3, headers={"k": "v"}, reply_to="answers", delay=0)
        await first.send("later", delay=1_000)
    async with SQLiteMailbox(path, name="jobs") as second:
        assert await second.counts() == Counts(delayed=1, pending=1)
        [message] = await second.receive()
        assert (message.body, message.headers, message.reply_to) == ({"a": 1}, {"k": "v"}, "answers")
        await message.acknowledge()


async def test_one_mailbox_object_can_be_opened_again(path, anyio_backend):
    mailbox = SQLiteMailbox(path)
    for _ in range(3):
        async with mailbox:
            await mailbox.send(1)
    async with mailbox:
        assert (await mailbox.counts()).pending == 3


async def test_the_last_one_to_close_leaves_one_whole_file(path, anyio_backend):
    async with SQLiteMailbox(path, name="a") as a, SQLiteMailbox(path, name="b") as b:
        await a.send(1)
        await b.send(2)
        assert os.path.exists(path + "-wal")
    assert not os.path.exists(path + "-wal")
    assert rows(path, "PRAGMA integrity_check") == [("ok",)]


async def test_the_file_is_marked_as_ours_and_in_the_safe_mode(connections, mailbox, path):
    (connection,) = connections
    assert connection.pragma("journal_mode") == "wal"
    assert connection.pragma("synchronous") == 2
    assert connection.pragma("mmap_size") in (None, 0)
    assert rows(path, "PRAGMA application_id") == [(sql.APPLICATION_ID,)]
    assert rows(path, "PRAGMA user_version") == [(sql.SCHEMA_VERSION,)]


@pytest.mark.loops("asyncio")
async def test_the_log_is_kept_short(mailbox, path):
    """It is copied into the file from 8 MiB on."""
    for _ in range(12):
        await mailbox.send_many(["x" * 500_000] * 8)
        await mailbox.purge()
    assert os.path.getsize(path + "-wal") < 16 * 2**20


# ----------------------------------------------------------------------------------------------------- names and URLs


async def test_several_mailboxes_in_one_file_share_a_connection_and_nothing_else(connections, path, anyio_backend):
    async with SQLiteMailbox(path, name="a") as a, SQLiteMailbox(path, name="b") as b:
        assert len(connections) == 1
        await a.send("for a")
        assert await b.receive() == []
        assert [message.body for message in await a.receive()] == ["for a"]
        assert (await a.counts()).in_flight == 1
        assert (await b.counts()) == Counts()
        assert a.transactions == b.transactions > 0


async def test_its_address_opens_it(tmp_path, anyio_backend):
    folder = tmp_path / "a dir with ? and % and #"
    folder.mkdir()
    async with SQLiteMailbox(folder / "mail.db", name="jobs & more") as mailbox:
        await mailbox.send("hello")
        again = open_mailbox(mailbox.address)
        assert isinstance(again, SQLiteMailbox)
        assert (again.path, again.name) == (mailbox.path, mailbox.name)
        async with again:
            assert [message.body for message in await again.receive()] == ["hello"]


async def test_a_relative_url_starts_at_the_working_directory(tmp_path, monkeypatch, anyio_backend):
    monkeypatch.chdir(tmp_path)
    mailbox = open_mailbox("sqlite:///mail.db?name=jobs")
    assert mailbox.path == str(tmp_path / "mail.db")
    monkeypatch.chdir("/")
    async with mailbox:
        assert os.path.exists(tmp_path / "mail.db")


async def test_the_options_of_a_url_hold(connections, path, anyio_backend):
    async with open_mailbox(f"sqlite:///{path}?name=jobs&capacity=7&synchronous=normal&busy_timeout=0.15") as mailbox:
        (connection,) = connections
        assert connection.pragma("synchronous") == 1
        with pytest.raises(MailboxFullError, match="at most 7 messages"):
            await mailbox.send_many(range(8))
        with locked(path), pytest.raises(MailboxConnectionError, match=r"locked .* for longer than 0\.15 s"):
            await mailbox.send(1)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("sqlite:///x.db?colour=red", "no option 'colour'; it has name, synchronous, capacity, busy_timeout"),
        ("sqlite:///x.db?capacity=many", "capacity must be a whole number from 1, or None, not 'many'"),
        ("sqlite:///x.db?capacity=0", "capacity must be a whole number from 1"),
        ("sqlite:///x.db?synchronous=off", "synchronous must be 'full' or 'normal'"),
        ("sqlite:///x.db?busy_timeout=nan", "busy_timeout must be a number of seconds from 0, not 'nan'"),
        ("sqlite:///x.db?name=", "needs a name"),
        ("sqlite://server/x.db", "names the host 'server'"),
        ("sqlite:///", "needs the path of a file"),
        ("sqlite:///:memory:", "in memory is memory://"),
    ],
)
def test_a_bad_url_is_a_config_error_that_says_what_would_do(url, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        open_mailbox(url)


async def test_mailboxes_of_one_file_need_the_same_settings(mailbox, path):
    other = SQLiteMailbox(path, name="other", synchronous="normal")
    with pytest.raises(ConfigError, match="give all mailboxes on one file the same"):
        await other.__aenter__()
    await mailbox.send(1)  # unharmed


# ------------------------------------------------------------------------------------------------------------- replies


async def test_reply_and_acknowledgement_are_one_transaction(path, anyio_backend):
    async with SQLiteMailbox(path, name="jobs") as jobs, SQLiteMailbox(path, name="answers") as answers:
        for address in ("answers", answers.address):
            await jobs.send("question", reply_to=address)
            [message] = await jobs.receive()
            before = jobs.transactions
            await message.reply({"the": "answer"})
            assert jobs.transactions == before + 1
            [reply] = await answers.receive()
            assert reply.body == {"the": "answer"}
            assert reply.headers == {"request_id": message.id}
            assert reply.reply_to is None


async def test_no_reply_leaves_once_the_lease_is_lost(path, anyio_backend):
    async with SQLiteMailbox(path, name="jobs") as jobs, SQLiteMailbox(path, name="answers") as answers:
        await jobs.send("question", reply_to="answers")
        [message] = await jobs.receive(visibility_timeout=0)
        with pytest.raises(ReceiptHandleExpiredError):
            await message.reply("too late")
        assert await answers.counts() == Counts()


# ---------------------------------------------------------------------------------------------------- group commit


@pytest.mark.own_time(1)
@pytest.mark.loops("asyncio", "uvloop")  # trio lets tasks of one turn go on in any order
async def test_an_acknowledgement_and_the_next_claim_share_a_transaction(mailbox):
    """Each handler takes longer than what a loop claims ahead, so that each message has a claim of its own."""

    async def handle(body: int) -> None:
        await anyio.sleep(0.06)

    await mailbox.send_many(list(range(10)))
    before = mailbox.transactions
    loop = MainLoop(mailbox, handle)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(loop.run)
        while loop.outcomes["acknowledged"] < 10:
            await anyio.sleep(0.001)
        assert mailbox.transactions - before <= 13
        await loop.shutdown()


async def test_a_hundred_senders_share_transactions(mailbox):
    before = mailbox.transactions

    async def sender():
        for number in range(10):
            await mailbox.send(number)

    async with anyio.create_task_group() as tasks:
        for _ in range(100):
            tasks.start_soon(sender)
    assert mailbox.transactions - before <= 50  # for 1,000 operations
    assert (await mailbox.counts()).pending == 1_000


async def test_one_at_a_time_each_send_is_a_transaction(mailbox):
    before = mailbox.transactions
    for number in range(20):
        await mailbox.send(number)
    assert mailbox.transactions - before == 20


async def test_two_mailboxes_commit_together(path, anyio_backend):
    async with SQLiteMailbox(path, name="a") as a, SQLiteMailbox(path, name="b") as b:
        before = a.transactions

        async def sender(mailbox):
            for number in range(10):
                await mailbox.send(number)

        async with anyio.create_task_group() as tasks:
            for _ in range(50):
                tasks.start_soon(sender, a)
                tasks.start_soon(sender, b)
        assert a.transactions - before <= 50


async def test_one_failure_leaves_its_neighbours_alone(path, anyio_backend):
    """In one transaction: a send that SQLite cannot take, one that is over capacity, and good ones."""
    async with SQLiteMailbox(path, name="a") as good, SQLiteMailbox(path, name="b", capacity=1) as small:
        await small.send("full")
        outcomes = Counter()

        async def send(mailbox, **options):
            try:
                await mailbox.send("x", **options)
                outcomes["sent"] += 1
            except Exception as error:
                outcomes[type(error).__name__] += 1

        async def put_no_text():
            with pytest.raises(MailboxError, match="UnicodeEncodeError"):
                await good.backend.send([Envelope("id", b"1", dedup_key="\udc80")])  # past the checks
            outcomes["refused"] += 1

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send, good)
            tasks.start_soon(put_no_text)
            tasks.start_soon(send, small)
            tasks.start_soon(send, good)
        assert outcomes == {"sent": 2, "refused": 1, "MailboxFullError": 1}
        assert (await good.counts()).pending == 2
        assert (await small.counts()).pending == 1


async def test_acknowledging_one_delivery_twice_at_once_succeeds_once(mailbox):
    await mailbox.send_many([1, 2])
    [one, two] = await mailbox.receive(max_messages=2)
    outcomes = Counter()

    async def acknowledge(message):
        try:
            await copy.copy(message).acknowledge()  # as if each was the first
            outcomes["done"] += 1
        except ReceiptHandleExpiredError:
            outcomes["refused"] += 1

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(acknowledge, one)
        tasks.start_soon(acknowledge, one)
        tasks.start_soon(acknowledge, two)
    assert outcomes == {"done": 2, "refused": 1}
    assert await mailbox.counts() == Counts(settled=2)


async def test_capacity_counts_what_is_in_flight_and_not_what_repeats(path, anyio_backend):
    async with SQLiteMailbox(path, capacity=2) as mailbox:
        first = await mailbox.send(1, dedup_key="a")
        await mailbox.receive()
        await mailbox.send(2)
        with pytest.raises(MailboxFullError, match="holds 2 of at most 2 messages"):
            await mailbox.send(3)
        assert await mailbox.send(1, dedup_key="a") == first


async def test_dead_letters_that_do_not_fit_are_not_replayed(path, anyio_backend):
    async with SQLiteMailbox(path, capacity=2) as mailbox:
        dead = await mailbox.send_many([1, 2])
        for message in await mailbox.receive(max_messages=2):
            await message.dead_letter("no")
        await mailbox.send(3)
        with pytest.raises(MailboxFullError, match="holds 1 of at most 2 messages and has no room for 2 more"):
            await mailbox.replay_dead_letters()
        assert await mailbox.replay_dead_letters([dead[1], "no such id"]) == 1
        assert await mailbox.counts() == Counts(pending=2, dead=1)


# --------------------------------------------------------------------------------------- cost does not grow with size


def test_no_statement_of_the_daily_work_scans_a_table(tmp_path):
    connection = apsw.Connection(str(tmp_path / "plan.db"))
    connection.execute(sql.SCHEMA)
    whole = {"SCHEMA", "START", "BOOT", "NEW_BOOT", "VOID_LEASES", "READY_IN", "HEAD", "SET_TICK"}
    whole |= {"LEASE_OF", "LAST_MAILBOX", "ADD_MAILBOX", "UNUSED"}  # what is in flight, and the mailboxes, are few
    whole |= {"ALL_LIMITS", "ANY_LIMITS"}  # as are the limited tasks
    checked = 0
    for name, statement in vars(sql).items():
        if name.startswith("_") or name in whole or not (isinstance(statement, str) and name.isupper()):
            continue
        if not statement.startswith(("SELECT", "INSERT", "UPDATE", "DELETE", "WITH")):
            continue
        values = [None] * statement.count("?")
        plan = [row[3] for row in connection.execute("EXPLAIN QUERY PLAN " + statement, values)]
        few = ("json_each", "ranks")  # what was given, and the priorities in use
        steps = [step for step in plan if step.startswith("SCAN") and not any(table in step for table in few)]
        # what is put into order first is a handful: the rows a statement was given or limited to
        assert all(re.fullmatch(r"SCAN (\(subquery-\d+\)|\d+-ROW VALUES CLAUSE)", step) for step in steps), (
            name,
            plan,
        )
        assert "REVIVE" in name or not any("TEMP B-TREE FOR ORDER BY" in step for step in plan), (name, plan)
        checked += 1
    assert checked > 30


async def test_the_statistics_tell_what_is_on_its_way_to_the_file(path, anyio_backend):
    """What comes while a batch is out waits for the next one."""
    async with SQLiteMailbox(path, name="jobs", busy_timeout=60) as mailbox:
        before = mailbox.statistics()
        assert before == MailboxStatistics(batches=before.batches, connected=True)
        async with anyio.create_task_group() as tasks:
            with locked(path):
                for together in 1, 2:
                    for number in range(together):
                        tasks.start_soon(mailbox.send, number)
                    await anyio.wait_all_tasks_blocked()
                now = mailbox.statistics()
                assert (now.in_flight, now.queued, now.batches) == (1, 2, before.batches + 1)
                assert repr(mailbox) == "<SQLiteMailbox 'jobs' open, 2 queued, 1 in flight>"
        assert mailbox.statistics() == MailboxStatistics(batches=before.batches + 2, connected=True)


async def test_the_counts_are_those_of_the_tables(mailbox, path):
    await mailbox.send_many(range(20))
    await mailbox.send("later", delay=100)
    await mailbox.send("soon gone", expires_in=0.001)
    for number, message in enumerate(await mailbox.receive(max_messages=8)):
        if number < 2:
            await message.acknowledge()
        elif number < 4:
            await message.nack(delay=50)
        elif number < 5:
            await message.release()
        elif number < 7:
            await message.dead_letter("no")
    await anyio.sleep(0.002)
    counts = await mailbox.counts()
    actual = {
        table: rows(path, f"SELECT count(*) FROM {table}")[0][0] for table in ("delayed", "ready", "leases", "dead")
    }
    assert actual == {
        "delayed": counts.delayed,
        "ready": counts.pending,
        "leases": counts.in_flight,
        "dead": counts.dead,
    }
    assert sum((counts.waiting, counts.settled, counts.dead)) == 22
