"""What is PostgreSQL's own: migrations, batches, floors, connections, addresses."""

from __future__ import annotations

import random
import sys
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from urllib.parse import urlsplit

import anyio
import psycopg
import pytest

from mainspring import InMemoryMailbox, MailboxClosedError, MailboxConnectionError, open_mailbox
from mainspring.errors import ConfigError, MailboxError, SerializationError
from mainspring.mailbox import limits
from mainspring.mailbox.backend import MailboxStatistics
from mainspring.mailbox.message import CancelOutcome, Counts
from mainspring.mailbox.postgres import schema as schemas
from mainspring.mailbox.postgres.commands import RESET_AFTER, Watermark
from mainspring.mailbox.postgres.connection import ValueRefusedError
from mainspring.mailbox.postgres.mailbox import PostgresMailbox
from mainspring.mailbox.postgres.schema import worth_a_vacuum
from mainspring.mailbox.postgres.values import Blobs, Floats, Integers, Longs, Shorts, Texts, array, register
from mainspring.mailbox.records import RecordWrite
from postgres_support import Meter, gate, receiving, until, worker_role
from support import outcomes

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    return "asyncio", {"use_uvloop": True}


# --------------------------------------------------------------------------------------------------------- migrations


async def test_many_that_open_at_once_make_one_schema(place):
    opened = []

    async def open_one(number):
        async with place.mailbox(f"box {number}", application_name=f"opener {number}") as mailbox:
            opened.append(await mailbox.send("x"))

    async with anyio.create_task_group() as tasks:
        for number in range(12):
            tasks.start_soon(open_one, number)
    assert len(set(opened)) == 12
    assert place.execute("SELECT version FROM SCHEMA.store") == [(schemas.SCHEMA_VERSION,)]


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["lock_timeout", "statement_timeout"])
async def test_the_wait_for_another_that_migrates_has_the_end_of_opening_alone(place, setting):
    async with await place.connect() as other, anyio.create_task_group() as tasks:
        await other.execute("SELECT pg_advisory_xact_lock(hashtext(%s), 0)", (f"{place.schema} migrate",))
        tasks.start_soon(place.mailbox(options=f"-c {setting}=300ms").migrate_schema)
        await anyio.sleep(1)  # a wait of the server's
        await other.rollback()
    assert place.execute("SELECT version FROM SCHEMA.store") == [(schemas.SCHEMA_VERSION,)]


async def test_without_migrate_the_schema_must_be_there(place):
    with pytest.raises(ConfigError, match="mainspring migrate URL"):
        await place.mailbox(migrate=False).__aenter__()
    assert await place.mailbox().migrate_schema(dry_run=True) == (0, schemas.SCHEMA_VERSION)
    assert await place.mailbox().migrate_schema() == (0, schemas.SCHEMA_VERSION)
    assert await place.mailbox().migrate_schema() == (schemas.SCHEMA_VERSION, schemas.SCHEMA_VERSION)
    async with place.mailbox(migrate=False) as mailbox:
        await mailbox.send("x")


async def test_a_worker_needs_few_rights(place):
    await place.mailbox().migrate_schema()
    async with worker_role(place) as url:
        async with place.mailbox("new", url=url, migrate=False) as mailbox:
            await mailbox.send("x", priority=3, dedup_key="k", delay=0.01)
            (message,) = await mailbox.receive(wait_time_seconds=10)
            await message.dead_letter("no")
            assert await mailbox.replay_dead_letters() == 1
            (message,) = await mailbox.receive()
            async with mailbox.transaction(message):
                pass
            assert (await mailbox.counts()).settled == 1
        with pytest.raises(ConfigError, match="refuses: permission denied"):
            await place.mailbox(url=url, schema=f"{place.schema}_2").migrate_schema()


async def test_an_owner_of_a_schema_needs_no_right_to_make_one(place):
    await place.mailbox().migrate_schema()
    async with worker_role(place) as url:
        schema = f"{place.schema}_3"
        place.execute(f"CREATE SCHEMA {schema} AUTHORIZATION {urlsplit(url).username}")
        async with place.mailbox(url=url, schema=schema) as mailbox:
            await mailbox.send("x")


async def test_a_mailbox_that_was_dropped_while_it_was_closed_delivers_every_priority_when_it_is_open_again(place):
    mailbox = place.mailbox()
    for _ in range(2):
        async with mailbox:
            await mailbox.send("x", priority=5)
            assert [message.body for message in await mailbox.receive()] == ["x"]
        place.execute("SELECT SCHEMA.drop_mailbox(%s)", place.number())


async def test_a_name_that_no_index_can_hold_is_not_taken_for_a_lost_connection(place):
    with pytest.raises(ConfigError, match="must be text"):
        place.mailbox("\ud800")
    async with place.mailbox() as mailbox:
        await mailbox.send("x", reply_to=random.Random(0).randbytes(5_000).hex())
        (message,) = await mailbox.receive()
        with pytest.raises(MailboxError, match="index row") as caught:
            await message.reply("y")
        assert not caught.value.retryable


async def test_a_newer_schema_is_refused(place):
    await place.mailbox().migrate_schema()
    place.execute("UPDATE SCHEMA.store SET version = 999")
    with pytest.raises(ConfigError, match="newer one; upgrade"):
        await place.mailbox().__aenter__()
    with pytest.raises(ConfigError, match="newer one; upgrade"):
        await place.mailbox().migrate_schema()
    with pytest.raises(ConfigError, match="newer one; upgrade"):
        await place.mailbox().exists()


async def test_a_migration_that_fails_leaves_nothing(place):
    """Here, something else is in the way of a function, which comes after the tables."""
    place.execute(f"CREATE SCHEMA {place.schema}")
    place.execute("CREATE FUNCTION SCHEMA.purge(box integer) RETURNS text LANGUAGE sql AS 'SELECT NULL::text'")
    with pytest.raises(ConfigError, match="cannot be made"):
        await place.mailbox().migrate_schema()
    assert place.execute("SELECT relname FROM pg_class WHERE relnamespace = %s::regnamespace", place.schema) == []
    place.execute("DROP FUNCTION SCHEMA.purge")
    assert await place.mailbox().migrate_schema() == (0, schemas.SCHEMA_VERSION)


async def test_an_upgrade_brings_the_functions_of_its_version(place):
    await place.mailbox().migrate_schema()
    place.execute("UPDATE SCHEMA.store SET version = 1")
    place.execute("DROP FUNCTION SCHEMA.sweep_from")
    place.execute("DROP FUNCTION SCHEMA.try_send_dedup")
    place.execute("DROP FUNCTION SCHEMA.queue_age")
    place.execute("DROP FUNCTION SCHEMA.poll_all")
    place.execute("DROP FUNCTION SCHEMA.mailboxes_named")
    place.execute("DROP FUNCTION SCHEMA.settle_with_results")
    place.execute("DROP TABLE SCHEMA.records")
    place.execute("ALTER TABLE SCHEMA.mailboxes DROP COLUMN results_until")
    place.execute("DROP TABLE SCHEMA.task_limits CASCADE")
    place.execute("DROP TABLE SCHEMA.key_rates, SCHEMA.freed_permits")
    place.execute("DROP INDEX SCHEMA.messages_let_in, SCHEMA.messages_delayed")
    for table in ("messages", "dead"):
        columns = ", ".join(f"DROP COLUMN {name}" for name in ("task", "task_key", "weight", "permits"))
        place.execute(f"ALTER TABLE SCHEMA.{table} {columns}")
    with pytest.raises(ConfigError, match=f"has version 1, and this Mainspring needs {schemas.SCHEMA_VERSION}"):
        await place.mailbox(migrate=False).__aenter__()
    async with place.mailbox() as mailbox:
        await mailbox.send("x", delay=0.01, dedup_key="k")
        assert [message.body for message in await mailbox.receive(wait_time_seconds=5)] == ["x"]
        assert (await mailbox.counts()).queue_age == 0
        assert await mailbox.backend.write_record(RecordWrite("test", "a", b"")) > 0
    assert place.execute("SELECT version FROM SCHEMA.store") == [(schemas.SCHEMA_VERSION,)]


async def test_dead_letters_of_an_earlier_version_are_found_by_their_task(place):
    """It kept no task with them, and had no index."""
    bodies = [{"task": "work", "args": {"n": 1}}, {"task": "work"}, {"task": "w\u00f6rk", "args": {}}, {"args": {}}]
    async with place.mailbox() as mailbox:
        ids = await mailbox.send_many(bodies)
        for message in await mailbox.receive(max_messages=9):
            await message.dead_letter("no")
    place.execute("UPDATE SCHEMA.store SET version = 11")
    place.execute("DROP INDEX SCHEMA.dead_by_task, SCHEMA.messages_delayed")
    place.execute("DROP FUNCTION SCHEMA.dead_letters_of")
    async with place.mailbox() as mailbox:
        assert [letter.message_id for letter in await mailbox.dead_letters(task="work")] == ids[:1]
        assert len(await mailbox.dead_letters()) == len(ids)
        assert await mailbox.replay_dead_letters(ids[:1]) == 1
        assert [job.id async for job in mailbox.jobs(task="work", state="pending")] == ids[:1], "it has its task again"


async def test_a_lone_send_that_is_cancelled_holds_up_no_other(place):
    async with place.mailbox() as mailbox:
        for steps in range(0, 30, 3):
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(mailbox.send, f"cancelled {steps}")
                    for _ in range(steps):
                        await anyio.lowlevel.checkpoint()
                    scope.cancel()
            with anyio.fail_after(10):
                await mailbox.send(f"after {steps}")
        assert mailbox.statistics().in_flight == mailbox.statistics().queued == 0
        found = [message.body for message in await mailbox.receive(max_messages=100)]
    assert [body for body in found if body.startswith("after")] == [f"after {steps}" for steps in range(0, 30, 3)]
    assert len(found) == len(set(found))


async def test_serializable_by_default_is_refused(place):
    with pytest.raises(ConfigError, match="read committed"):
        await place.mailbox(options="-c default_transaction_isolation=serializable").__aenter__()


# ------------------------------------------------------------------------------------------------------------ batches


async def test_concurrent_operations_share_a_round_trip(place):
    async with place.mailbox() as mailbox:
        before = mailbox.transactions
        async with anyio.create_task_group() as tasks:
            for number in range(100):
                tasks.start_soon(mailbox.send, number)
        assert mailbox.transactions - before <= 3
        messages = await mailbox.receive(max_messages=100)
        before = mailbox.transactions
        async with anyio.create_task_group() as tasks:
            for message in messages[:50]:
                tasks.start_soon(message.acknowledge)
            for message in messages[50:]:
                tasks.start_soon(message.nack)
        assert mailbox.transactions - before <= 4
        assert (await mailbox.counts()).settled == 50


async def test_a_value_the_server_refuses_harms_no_neighbour(place):
    async with place.mailbox() as mailbox:
        place.execute("""ALTER TABLE SCHEMA.messages ADD CHECK (body <> '"refused"'::bytea)""")
        first, refused, last = await outcomes(*(partial(mailbox.send, body) for body in ("a", "refused", "b")))
        assert type(refused) is ValueRefusedError
        found = await mailbox.receive(max_messages=9)
        assert [(message.id, message.body) for message in found] == [(first, "a"), (last, "b")]


async def test_a_refusal_whose_end_comes_late_is_told_as_what_it_is(place, monkeypatch):
    """The driver has been seen to hide it then: it cannot leave its pipeline."""
    leave = psycopg.AsyncPipeline._exit

    def leave_late(pipeline, error):
        refused = sys.exc_info()[1]
        leave(pipeline, error)
        if isinstance(refused, psycopg.errors.CheckViolation) and error is None:
            hidden.append(refused)
            raise psycopg.OperationalError("cannot exit pipeline mode while busy")

    hidden = []
    monkeypatch.setattr(psycopg.AsyncPipeline, "_exit", leave_late)
    async with place.mailbox() as mailbox:
        place.execute("ALTER TABLE SCHEMA.dead ADD CHECK (error <> 'refused')")
        await mailbox.send_many("xy")
        message, neighbour = await mailbox.receive(max_messages=2)
        refused, done = await outcomes(lambda: message.dead_letter("refused"), neighbour.acknowledge)
        assert hidden
        assert (type(refused), done) == (ValueRefusedError, None)


async def test_a_message_larger_than_a_row_fails_only_its_own_send(place, monkeypatch):
    monkeypatch.setattr(limits, "LONGEST", 1_000)
    async with place.mailbox() as mailbox, place.mailbox("replies"), await place.connect() as connection:
        await mailbox.send_many(["held", "asked"], reply_to="replies")
        held, asked = await mailbox.receive(max_messages=2)
        found = await outcomes(
            lambda: mailbox.send("before"),
            lambda: mailbox.send("x" * 999),
            lambda: mailbox.send("x", headers={"h": "x" * 999}),
            lambda: mailbox.send("x" * 999, dedup_key="k"),
            lambda: mailbox.send("x" * 999, connection=connection),
            lambda: mailbox.send_many(["y", "x" * 999]),
            lambda: held.save_checkpoint(b"x" * 1_001),
            lambda: asked.reply("x" * 999),
            lambda: mailbox.send("x" * 998),
        )
        assert [number for number, one in enumerate(found) if isinstance(one, SerializationError)] == [
            1,
            2,
            3,
            4,
            5,
            6,
            7,
        ]
        assert "a message of 1,001 bytes is larger than the 1,000 that a mailbox in a SQL database takes" in str(
            found[1]
        )
        await held.save_checkpoint(b"x" * 1_000)
        await asked.reply("y")
        assert [message.body for message in await mailbox.receive(max_messages=9)] == ["before", "x" * 998]
        assert await mailbox.counts() == Counts(in_flight=3, settled=1)


@pytest.mark.slow
async def test_a_batch_that_is_too_large_for_one_call_goes_in_several_of_one_transaction(place):
    """On a message of 1 GiB the server hangs up, and hundreds of callers may have sent what travels together."""
    bodies = [digit * 2_600_000 for digit in "012"]
    async with (
        gate(place.url, Meter) as (url, way),
        place.mailbox(url=f"{url}?sslmode=disable&gssencmode=disable") as mailbox,
        place.mailbox("replies") as replies,
    ):
        await mailbox.send_many(["first", *bodies], reply_to="replies")
        first, *messages = await mailbox.receive(max_messages=9)
        assert [message.body for message in messages] == bodies
        await first.reply("")  # from now on, replies need not ask for the mailbox
        await outcomes(*(partial(message.save_checkpoint, message.body.encode()) for message in messages))
        await outcomes(*(message.nack for message in messages))
        messages = await mailbox.receive(max_messages=9)
        assert sorted(message.checkpoint.decode() for message in messages) == bodies
        await outcomes(*(partial(message.reply, message.body) for message in messages))
        assert sorted([message.body for message in await replies.receive(max_messages=9)]) == ["", *bodies]
        await outcomes(*(partial(mailbox.send, body) for body in bodies))
        await outcomes(*(partial(mailbox.send, body, dedup_key=body[0]) for body in bodies))
        messages = await mailbox.receive(max_messages=9)
        assert sorted(message.body for message in messages) == sorted(2 * bodies)
        assert 5_000_000 < way.largest < 6_000_000
        place.execute("ALTER TABLE SCHEMA.messages ADD CHECK (length(body) > 9) NOT VALID")
        with pytest.raises(MailboxError):
            await mailbox.send_many([*bodies, "x"])
        assert (await mailbox.counts()).pending == 0, "all or none"


async def test_an_acknowledgement_reads_the_row_of_its_message_and_not_all_that_are_in_flight(place):
    ours = "SELECT count(*) FROM pg_stat_activity WHERE application_name = %s"
    reads = "SELECT sum(idx_tup_read) FROM pg_stat_all_indexes WHERE schemaname = %s AND relname = 'messages'"
    async with place.mailbox(application_name=place.schema) as mailbox:
        await mailbox.send_many(range(1_000))
        messages = await mailbox.receive(max_messages=1_000)
        for message in messages[:100]:
            await message.acknowledge()
    await until(
        lambda: place.execute(ours, place.schema) == [(0,)]
    )  # its connections tell what they read when they end
    assert 1_000 < place.execute(reads, place.schema)[0][0] < 10_000


async def test_a_stale_acknowledgement_beside_the_valid_one_is_refused(place):
    async with place.mailbox() as mailbox:
        await mailbox.send("x")
        (stale,) = await mailbox.receive(visibility_timeout=0)
        (valid,) = await mailbox.receive()
        outcomes = []

        async def acknowledge(message):
            try:
                await message.acknowledge()
                outcomes.append((message, None))
            except MailboxError as error:
                outcomes.append((message, type(error).__name__))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(acknowledge, stale)
            tasks.start_soon(acknowledge, valid)
        assert dict(outcomes) == {stale: "ReceiptHandleExpiredError", valid: None}


async def test_acknowledgements_of_several_callers_are_one_call_and_each_learns_which_of_its_own_were_refused(place):
    async with place.mailbox() as mailbox:
        await mailbox.send_many(range(6))
        stale = await mailbox.receive(max_messages=3, visibility_timeout=0)
        await mailbox.receive(max_messages=3, visibility_timeout=0)  # the later ones come after what is received again
        again = await mailbox.receive(max_messages=6)
        calls = [[stale[0], *again[:2]], again[2:4], [again[4], stale[1], again[5]]]
        refused = {}

        async def acknowledge(number):
            refused[number] = await mailbox.acknowledge_many(calls[number])

        before = mailbox.transactions
        async with anyio.create_task_group() as tasks:
            for number in range(len(calls)):
                tasks.start_soon(acknowledge, number)
        assert mailbox.transactions - before <= 2
        assert {number: list(some) for number, some in refused.items()} == {0: [0], 1: [], 2: [1]}
        assert stale[1].id in str(refused[2][1])
        assert (await mailbox.counts()).settled == 6


async def test_a_handle_of_another_kind_is_refused_among_those_acknowledged_together(place):
    async with place.mailbox() as mailbox, InMemoryMailbox("elsewhere") as elsewhere:
        await mailbox.send_many("xyz")
        await elsewhere.send("x")
        messages = await mailbox.receive(max_messages=2)
        (foreign,) = await elsewhere.receive()
        assert list(await mailbox.acknowledge_many([messages[0], foreign, messages[1]])) == [1]
        counts = await mailbox.counts()
        assert (counts.settled, counts.pending) == (2, 1)


@pytest.mark.slow
async def test_every_call_has_an_end(place):
    # The first makes the schema, in its own time.
    async with place.mailbox(), place.mailbox(timeout=2) as mailbox, await place.connect() as connection:
        await mailbox.send("x", dedup_key="k", connection=connection)
        with pytest.raises(MailboxConnectionError, match="within 2 s"):
            await mailbox.send("y", dedup_key="k")
        await connection.rollback()
        await mailbox.send("z", dedup_key="k")
        assert [message.body for message in await mailbox.receive(max_messages=9)] == ["z"]


async def test_a_cancelled_purge_is_cancelled_on_the_server(place):
    async with place.mailbox() as mailbox, await place.connect() as connection:
        await mailbox.send("x")
        await connection.execute(f"SELECT * FROM {place.schema}.messages FOR UPDATE")
        with anyio.move_on_after(0.2):
            await mailbox.purge()
        await connection.rollback()
        assert (await mailbox.counts()).pending == 1


# ------------------------------------------------------------------------------------------------- watermark and maintenance


def test_a_claim_starts_at_the_floors():
    view = Watermark()
    assert view.start(100.0) == ([], [], None)
    view.claimed(0, 7)
    view.claimed(-1, 3)
    view.claimed(0, 5)
    view.swept(50.0, 999)
    assert view.start(100.1) == ([0, -1], [7, 3], 50.0 - RESET_AFTER)
    view.returned(0, 2)
    view.returned(-1, 9)
    assert view.start(100.2)[:2] == ([0, -1], [2, 3])
    assert view.start(100.0 + RESET_AFTER) == ([], [], None)
    assert view.start(100.1 + RESET_AFTER) == ([], [], 50.0 - RESET_AFTER)
    view.swept(49.0, 1_000)
    assert view.start(100.2 + RESET_AFTER) == ([], [], 49.0)


async def test_what_comes_behind_the_floors_is_found(place):
    async with place.mailbox() as mailbox, await place.connect() as connection:
        late = await mailbox.send("late", connection=connection)
        await mailbox.send_many(["a", "b", "c"])
        found = [message.body for message in await mailbox.receive(max_messages=2)]
        await connection.commit()
        found += [message.body for message in await mailbox.receive(max_messages=9)]
        assert sorted(found) == ["a", "b", "c", "late"]
        assert late


async def test_what_was_overdue_before_a_worker_looked_comes_at_once(place):
    async with place.mailbox() as mailbox:
        await mailbox.send_many(range(1_500), delay=60)
        await mailbox.send_many(range(1_500, 3_500), delay=70)
        place.execute("UPDATE SCHEMA.messages SET due = due - interval '2 minutes' - random() * interval '1 second'")
        found = await mailbox.receive(max_messages=1_000)
        for _ in range(3):
            found += await mailbox.receive(max_messages=1_000)
        assert sorted(message.body for message in found) == list(range(3_500))


async def test_many_priorities_are_served_in_order(place):
    numbers = random.Random(1).sample(range(-500, 500), 60)
    async with place.mailbox() as mailbox:
        for number in numbers:
            await mailbox.send(number, priority=number)
        first = [message.body for message in await mailbox.receive(max_messages=25)]
        assert first + [message.body for message in await mailbox.receive(max_messages=60)] == sorted(numbers)[::-1]


def test_when_a_vacuum_is_worth_it():
    assert not worth_a_vacuum(9_999, 0)
    assert worth_a_vacuum(10_000, 0)
    assert not worth_a_vacuum(100_000, 1_000_000)
    assert worth_a_vacuum(110_000, 1_000_000)


async def busy_until(mailbox, condition):
    """Send until the condition holds: mailboxes that are idle leave the tables alone."""
    with anyio.fail_after(20):
        while not condition():
            await mailbox.send("work")
            await anyio.sleep(0.1)


@pytest.mark.slow
async def test_dead_rows_are_removed_and_tallies_folded(place):
    async with place.mailbox() as mailbox:
        for _ in range(6):
            await mailbox.send_many(range(1_000))
            assert await mailbox.acknowledge_many(await mailbox.receive(max_messages=1_000)) == {}
        for _ in range(250):
            await mailbox.send("x")
        vacuums = "SELECT vacuum_count FROM pg_stat_all_tables WHERE schemaname = %s AND relname = 'messages'"
        await busy_until(mailbox, lambda: place.execute(vacuums, place.schema)[0][0])
        await busy_until(mailbox, lambda: place.execute("SELECT count(*) FROM SCHEMA.tallies")[0][0] < 200)
        counts = await mailbox.counts()
        assert counts.settled == 6_000
        assert counts.pending >= 250


@pytest.mark.slow
async def test_transient_mailboxes_that_were_not_opened_for_a_day_are_dropped(place):
    async with place.mailbox("~old") as old, place.mailbox("~new") as new, place.mailbox("kept") as kept:
        for mailbox in (old, new, kept):
            await mailbox.send("x")
    place.execute("UPDATE SCHEMA.mailboxes SET opened_at = now() - interval '2 days' WHERE name <> '~new'")
    names = "SELECT name FROM SCHEMA.mailboxes ORDER BY name"
    async with place.mailbox("later") as later:
        await busy_until(later, lambda: ("~old",) not in place.execute(names))
        assert place.execute(names) == [("kept",), ("later",), ("~new",)]
        await later.purge()
    assert place.execute("SELECT count(*) FROM SCHEMA.messages") == [(2,)]


@pytest.mark.slow
async def test_a_reply_whose_mailbox_is_dropped_meanwhile_is_dropped_too(place):
    async with (
        place.mailbox() as mailbox,
        place.mailbox("~box") as box,
        place.mailbox("kept") as kept,
        await place.connect(autocommit=True) as owner,
    ):
        await kept.send("x")
        await mailbox.send("question", reply_to=box.address)
        (message,) = await mailbox.receive()
        async with mailbox.transaction(message):
            await message.reply("answer")
            with anyio.fail_after(5):
                await owner.execute(f"SELECT {place.schema}.drop_mailbox(%s)", (place.number("~box"),))
        left = """SELECT 1 FROM SCHEMA.{0} t WHERE NOT EXISTS (SELECT FROM SCHEMA.mailboxes b WHERE b.id = t.mailbox)"""
        assert place.execute(left.format("messages"))
        async with place.mailbox("later", application_name="another pool") as later:
            for table in ("messages", "tallies"):
                await busy_until(later, lambda table=table: not place.execute(left.format(table)))
        counts = [await each.counts() for each in (mailbox, kept)]
        assert [(each.pending, each.in_flight, each.settled) for each in counts] == [(0, 0, 1), (1, 0, 0)]


@pytest.mark.parametrize("by", ["itself", "transaction", "transient"])
async def test_a_reply_to_a_mailbox_that_was_dropped_elsewhere_is_not_lost(place, by):
    """A worker knows the number of a mailbox that it has replied to; another process may drop that, and make it anew."""
    name = "~answers" if by == "transient" else "answers"

    async def reply(message):
        if by == "transaction":
            async with mailbox.transaction(message):
                await message.reply("answer")
        else:
            await message.reply("answer")

    async with place.mailbox() as mailbox:
        async with place.mailbox(name):
            await mailbox.send("1", reply_to=name)
            (message,) = await mailbox.receive()
            await reply(message)
        place.execute("SELECT SCHEMA.drop_mailbox(id) FROM SCHEMA.mailboxes WHERE name = %s", name)
        if by != "transient":
            async with place.mailbox(name, timeout=29.0):
                pass
        await mailbox.send("2", reply_to=name)
        (message,) = await mailbox.receive()
        with pytest.raises(MailboxConnectionError, match="was dropped just now"):
            await reply(message)
        assert not message.is_settled
        await reply(message)
        assert (await mailbox.counts()).settled == 2
        if by == "transient":
            assert not await place.mailbox(name).exists()
            return
        async with place.mailbox(name, timeout=29.0) as answers:
            assert [message.body for message in await answers.receive(max_messages=9)] == ["answer"]


async def test_what_is_no_text_is_the_id_of_no_message(place):
    async with place.mailbox() as mailbox:
        await mailbox.send("x")
        (message,) = await mailbox.receive()
        await message.dead_letter("no")
        assert [letter.body for letter in await mailbox.dead_letters(after="\0")] == ["x"]
        assert await mailbox.cancel("\0") is CancelOutcome.UNKNOWN


# ----------------------------------------------------------------------------------------------------- connections


async def test_the_mailboxes_of_a_process_share_connections(place):
    async with gate(place.url) as (url, way), AsyncExitStack() as stack:
        for name in "abcdef":
            mailbox = await stack.enter_async_context(place.mailbox(name, url=url))
            await mailbox.send("x")
            (message,) = await mailbox.receive()
            await message.acknowledge()
        assert way.opened <= 3


@pytest.mark.parametrize(("what", "most"), [("send", 4), ("cancel", 20)])
async def test_however_many_calls_wait_few_connections_are_opened(place, what, most):
    """A server has a hundred for all of its clients: one connection a call would lock out all others, and its own workers."""
    async with gate(place.url) as (url, way), place.mailbox(url=url, capacity=1_000, listen=False) as mailbox:
        first = await mailbox.send("x")
        calls = {"send": partial(mailbox.send, "x"), "cancel": partial(mailbox.cancel, first)}
        async with anyio.create_task_group() as tasks:
            for _ in range(40):
                tasks.start_soon(calls[what])
        assert (await mailbox.counts()).pending == {"send": 41, "cancel": 0}[what]
        assert way.opened <= most


@pytest.mark.slow
async def test_a_call_that_waits_for_its_turn_ends_in_the_time_of_one(place):
    async with place.mailbox(timeout=2.0, capacity=9, listen=False) as mailbox:
        async with await place.connect() as blocker, blocker.transaction():
            await blocker.execute(f"LOCK TABLE {place.schema}.tallies, {place.schema}.messages")
            calls = [*[partial(mailbox.send, "x") for _ in range(40)], *[mailbox.purge for _ in range(200)]]
            with anyio.fail_after(20):  # of 20 turns of 2 s
                results = await outcomes(*calls)
        assert all(isinstance(result, MailboxConnectionError) for result in results)
        assert await mailbox.send("y")


async def test_connections_that_the_server_ended_are_not_used(place):
    async with place.mailbox(listen=False) as mailbox:
        await mailbox.send("x")
        ours = "SELECT pid FROM pg_stat_activity WHERE query LIKE %s AND pid <> pg_backend_pid()"
        pids = [pid for (pid,) in place.execute(ours, f"%{place.schema}%")]
        assert pids
        for pid in pids:
            place.execute("SELECT pg_terminate_backend(%s)", pid)
        left = "SELECT count(*) FROM pg_stat_activity WHERE pid = ANY(%s)"
        await until(lambda: place.execute(left, pids) == [(0,)])  # they have been told to end, not ended
        await mailbox.send("y")
        assert (await mailbox.counts()).pending == 2


@pytest.mark.parametrize(
    ("host", "told"),
    [
        ("127.0.0.1:1", "Connection refused; start the server, or correct the host and the port of the URL"),
        (
            "127.0.0.1:1,127.0.0.1:2",
            "Connection refused; start the server, or correct the host and the port of the URL",
        ),
        (
            "%2Fno%2Fsuch%2Fdirectory",
            "No such file or directory; start the server, or correct the host and the port of the URL",
        ),
        ("no-such-host.invalid", "; correct the host of the URL, or mend the name service"),
    ],
)
async def test_no_server(place, host, told):
    with pytest.raises(MailboxConnectionError, match=r"cannot be reached: [^?]+$") as caught:
        await place.mailbox(url=f"postgresql://nobody@{host}/nothing").__aenter__()
    assert str(caught.value).endswith(told)


async def test_a_closed_mailbox_closes_its_connections(place):
    async with place.mailbox(application_name=place.schema) as mailbox:
        await mailbox.send("x")
    with pytest.raises(MailboxClosedError):
        await mailbox.send("x")
    count = "SELECT count(*) FROM pg_stat_activity WHERE application_name = %s"
    await until(lambda: place.execute(count, place.schema) == [(0,)])


# -------------------------------------------------------------------------------------------------------- statistics


@pytest.mark.parametrize("capacity", [None, 9])
async def test_statistics_tell_what_waits_and_what_is_in_flight(place, capacity):
    async with place.mailbox(capacity=capacity, listen=False) as mailbox, await place.connect() as blocker:
        await mailbox.send("x")
        assert repr(mailbox) == "<PostgresMailbox 'jobs' open>"
        before = mailbox.statistics()
        assert before == MailboxStatistics(connected=True, polling=True, batches=before.batches)
        await blocker.execute(f"LOCK TABLE {place.schema}.tallies, {place.schema}.messages")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(mailbox.send, "y")
            await until(lambda: mailbox.statistics().in_flight)
            for _ in range(2):
                tasks.start_soon(mailbox.send, "z")
            out = 1 if capacity is None else 2  # those within a capacity travel one by one, two at once
            await until(lambda: mailbox.statistics().queued == 3 - out)
            assert mailbox.statistics().in_flight == out
            assert repr(mailbox) == f"<PostgresMailbox 'jobs' open, {3 - out} queued, {out} in flight>"
            await blocker.rollback()
        after = mailbox.statistics()
        assert after == replace(before, batches=before.batches + (2 if capacity is None else 0))
        await mailbox.purge()
        async with receiving(mailbox):
            assert "1 waiting" in repr(mailbox)
            await mailbox.send("x")
    assert mailbox.statistics() == MailboxStatistics()


@pytest.mark.slow
async def test_statistics_tell_whether_the_server_can_be_reached(place):
    async with gate(place.url) as (url, way), place.mailbox(url=url, listen=False) as mailbox:
        await mailbox.send("x")
        for number in (1, 2):
            way.lead_to("postgresql://127.0.0.1:1")
            way.cut()
            with pytest.raises(MailboxConnectionError):
                await mailbox.send("y")
            assert not mailbox.statistics().connected
            assert repr(mailbox) == "<PostgresMailbox 'jobs' open, not connected>"
            way.lead_to(place.url)
            await mailbox.send("z")
            assert mailbox.statistics().connected
            assert mailbox.statistics().reconnects == number


# --------------------------------------------------------------------------------------------------------- addresses


def test_urls():
    mailbox = open_mailbox("postgresql://ann:secret@db.example:6000/app?name=jobs&sslmode=require&timeout=5&listen=no")
    assert isinstance(mailbox, PostgresMailbox)
    assert mailbox.address == "postgresql://ann@db.example:6000/app?name=jobs&sslmode=require"
    assert "secret" not in repr(mailbox)
    assert open_mailbox("postgres://h/d?schema=mine").address.endswith("/d?name=default&schema=mine")


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("postgresql://h/d?nonsense=1", "no option 'nonsense'"),
        ("postgresql://ann:secret@h/d?listen=perhaps", "listen must be true or false"),
        ("postgresql://ann:secret@h/d?timeout=soon", "timeout must be a number"),
        ("postgresql://h/d?timeout=0", "timeout must be a number of seconds from 0.001, not '0'"),
        ("postgresql://h/d?poll_interval=often", "poll_interval must be a number"),
        (
            "postgresql://h/d?poll_interval=0",
            "poll_interval must be a number of seconds from 0.001 to 30, or None, not '0'",
        ),
        ("postgresql://h/d?poll_interval=31", "poll_interval must be a number of seconds from 0.001 to 30"),
        ("postgresql://h/d?capacity=0", "capacity"),
        ("postgresql://h/d?schema=No;Thing", "schema must be a name"),
        ("postgresql://h/d?name=a%00b", "NUL"),
        ("postgresql://h/d?name=" + 1_001 * "n", "up to 1000 bytes"),
    ],
)
def test_bad_urls_are_config_errors(url, says):
    with pytest.raises(ConfigError, match=says) as caught:
        open_mailbox(url)
    assert "secret" not in str(caught.value)


# ------------------------------------------------------------------------------------------------------------- values


async def test_arrays_arrive_unchanged(place):
    async with await place.connect() as connection:
        register(connection.adapters)
        for sent, kind, expected in (
            (array(Texts, ["a", None, "ü", ""]), "text[]", ["a", None, "ü", ""]),
            (array(Blobs, [b"\0\xff", None]), "bytea[]", [b"\0\xff", None]),
            (array(Shorts, [-32_767, 32_767]), "smallint[]", [-32_767, 32_767]),
            (array(Integers, [1, None]), "integer[]", [1, None]),
            (array(Longs, [2**40]), "bigint[]", [2**40]),
            (array(Floats, [0.5, None, 1e300]), "double precision[]", [0.5, None, 1e300]),
            (array(Texts, []), "text[]", []),
            (array(Floats, []), "double precision[]", []),
        ):
            cursor = psycopg.AsyncRawCursor(connection)
            row = await (await cursor.execute("SELECT $1, pg_typeof($1)::text", (sent,), binary=True)).fetchone()
            assert row == (expected, kind)
