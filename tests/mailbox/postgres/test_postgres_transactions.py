"""Messages that join a sender's transaction, and handlers whose writes commit together with their acknowledgement."""

from __future__ import annotations

from contextlib import suppress

import anyio
import psycopg
import pytest
from anyio import from_thread
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from mainspring import (
    Context,
    DeadLetterPolicy,
    InMemoryMailbox,
    InvalidParameterError,
    LoopGroup,
    MailboxConnectionError,
    MainLoop,
    MessageSettledError,
    RequestFailedError,
    Retry,
    RetryPolicy,
    TransactionEndedError,
)
from mainspring.errors import ConfigError, ReceiptHandleExpiredError
from postgres_support import gate, quiet, receiving, until
from stopwatch import Stopwatch

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    return "asyncio", {"use_uvloop": True}


@pytest.fixture
async def mailbox(place, anyio_backend):
    async with place.mailbox() as made:
        place.execute("CREATE TABLE SCHEMA.effects (what text)")
        yield made


def effects(place):
    return [what for (what,) in place.execute("SELECT what FROM SCHEMA.effects ORDER BY what")]


def insert(place):
    return f"INSERT INTO {place.schema}.effects VALUES (%s)"


# ------------------------------------------------------------------------------------------------------------ sending


async def test_a_message_exists_if_and_when_the_senders_transaction_commits(place, mailbox):
    async with await place.connect() as connection:
        await connection.execute(insert(place), ("order",))
        sent = await mailbox.send("x", connection=connection)
        more = await mailbox.send_many(["y", "z"], connection=connection, priority=1, headers={"k": "v"})
        assert await mailbox.receive() == []
        await connection.commit()
        found = await mailbox.receive(max_messages=9)
        assert [message.id for message in found] == [*more, sent]
        assert dict(found[0].headers) == {"k": "v"}
        await connection.execute(insert(place), ("another",))
        await mailbox.send("x", connection=connection, delay=60, dedup_key="k", expires_in=600, reply_to="there")
        await connection.rollback()
    assert effects(place) == ["order"]
    counts = await mailbox.counts()
    assert (counts.delayed, counts.pending, counts.in_flight) == (0, 0, 3)


@pytest.mark.slow
async def test_the_commit_wakes_receivers(place):
    async with place.mailbox(poll_interval=30) as mailbox, await place.connect() as connection:
        await until(lambda: not mailbox.statistics().polling)
        await mailbox.send("x", connection=connection)  # before a receive waits
        async with receiving(mailbox) as got:
            await quiet(mailbox)
            assert got == []
            await connection.commit()
    assert [message.body for message in got] == ["x"]


async def test_with_sqlalchemy(place, mailbox):
    engine = create_async_engine(place.url.replace("postgresql://", "postgresql+psycopg://"))
    statement = text(f"INSERT INTO {place.schema}.effects VALUES (:what)")
    async with engine.begin() as connection:
        await connection.execute(statement, {"what": "1"})
        await mailbox.send("1", connection=connection)
    with pytest.raises(LookupError):  # noqa: PT012
        async with engine.begin() as connection:
            await mailbox.send("2", connection=connection)
            raise LookupError
    async with engine.connect() as connection:
        await mailbox.send("3", connection=connection)  # the first thing on it
        await connection.commit()
    async with AsyncSession(engine) as session:
        await mailbox.send("4", connection=session)
        await session.execute(statement, {"what": "4"})
        await session.commit()
    async with AsyncSession(engine) as session:
        await mailbox.send("5", connection=session)
    await engine.dispose()
    assert [message.body for message in await mailbox.receive(max_messages=9)] == ["1", "3", "4"]
    assert effects(place) == ["1", "4"]


async def test_what_is_no_transaction_is_refused(place, mailbox):
    async with await place.connect(autocommit=True) as connection:
        with pytest.raises(InvalidParameterError, match="in autocommit and in no transaction"):
            await mailbox.send("x", connection=connection)
        async with connection.transaction():
            await mailbox.send("y", connection=connection)
    with pytest.raises(InvalidParameterError, match="must be a psycopg AsyncConnection"):
        await mailbox.send("x", connection=object())
    assert [message.body for message in await mailbox.receive(max_messages=9)] == ["y"]


async def test_a_connection_to_another_store_is_refused(place, mailbox, postgres_url):
    async with await place.connect() as connection:
        await connection.execute(f"UPDATE {place.schema}.store SET id = 'another'")
        with pytest.raises(InvalidParameterError, match="not to the database of the mailbox"):
            await mailbox.send("x", connection=connection)
        await connection.rollback()
        await connection.execute(f"ALTER SCHEMA {place.schema} RENAME TO {place.schema}_away")
        with pytest.raises(InvalidParameterError, match="not to the database of the mailbox"):
            await mailbox.send("x", connection=connection)


async def test_a_connection_with_settings_of_its_own_will_do(place, mailbox):
    async with await place.connect(row_factory=psycopg.rows.dict_row) as connection, connection.transaction():
        assert await mailbox.send("x", connection=connection, dedup_key="k") == await mailbox.send(
            "y", connection=connection, dedup_key="k"
        )


async def test_other_mailboxes_refuse_a_connection(place):
    async with InMemoryMailbox("jobs") as other:
        with pytest.raises(ConfigError, match="has no transactions"):
            await other.send("x", connection=object())
        await other.send("x")
        (message,) = await other.receive()
        with pytest.raises(ConfigError, match="no transactions"):
            async with other.transaction(message):
                pass


# ----------------------------------------------------------------------------------------------------------- handling


async def test_writes_and_acknowledgement_commit_together(place, mailbox):
    await mailbox.send("x")
    (message,) = await mailbox.receive()
    async with mailbox.transaction(message) as connection:
        await connection.execute(insert(place), ("done",))
        assert effects(place) == []
        assert (await mailbox.counts()).in_flight == 1
    assert message.is_settled
    assert effects(place) == ["done"]
    assert (await mailbox.counts()).settled == 1
    with pytest.raises(MessageSettledError):
        async with mailbox.transaction(message):
            pytest.fail("a settled message has no transaction")


async def test_an_error_rolls_back_and_leaves_the_message_unsettled(place, mailbox):
    await mailbox.send("x")
    (message,) = await mailbox.receive()
    with pytest.raises(LookupError):  # noqa: PT012
        async with mailbox.transaction(message) as connection:
            await connection.execute(insert(place), ("done",))
            raise LookupError
    assert not message.is_settled
    with pytest.raises(psycopg.errors.UndefinedTable):
        async with mailbox.transaction(message) as connection:
            await connection.execute("INSERT INTO nowhere VALUES (1)")
    await message.nack()
    assert effects(place) == []
    assert (await mailbox.counts()).pending == 1


@pytest.mark.parametrize(("word", "left"), [("ROLLBACK", []), ("COMMIT", ["done"])])
@pytest.mark.parametrize("by_hand", [False, True])
async def test_a_block_that_ends_its_transaction_itself_settles_nothing(place, mailbox, word, left, by_hand):
    await mailbox.send("x")
    (message,) = await mailbox.receive()
    with pytest.raises(TransactionEndedError, match="leave COMMIT and ROLLBACK to the block"):  # noqa: PT012
        async with mailbox.transaction(message) as connection:
            await connection.execute(insert(place), ("done",))
            await connection.execute(word)
            if by_hand:
                await message.acknowledge()
    assert not message.is_settled
    assert effects(place) == left
    await message.nack()
    assert (await mailbox.counts()).pending == 1


@pytest.mark.parametrize("word", ["ROLLBACK", "SELECT 1 / 0"])
async def test_what_undoes_a_settlement_in_the_block_is_told(place, mailbox, word):
    await mailbox.send("x")
    (message,) = await mailbox.receive()
    with pytest.raises(TransactionEndedError):  # noqa: PT012
        async with mailbox.transaction(message) as connection:
            await message.acknowledge()
            with suppress(psycopg.Error):
                await connection.execute(word)
    assert not message.is_settled
    await message.nack()
    assert (await mailbox.counts()).pending == 1


@pytest.mark.parametrize("end", [None, "acknowledge", "nack"])
async def test_an_error_of_a_statement_that_the_block_swallows_is_told(place, mailbox, end):
    await mailbox.send("x")
    (message,) = await mailbox.receive()
    with pytest.raises(TransactionEndedError, match="let errors of statements out of it"):  # noqa: PT012
        async with mailbox.transaction(message) as connection:
            await connection.execute(insert(place), ("done",))
            with suppress(psycopg.Error):
                await connection.execute("SELECT 1 / 0")
            if end is not None:
                await getattr(message, end)()
    assert not message.is_settled
    assert effects(place) == []
    await message.nack()
    assert (await mailbox.counts()).pending == 1


async def test_a_plain_handler_has_its_transaction_run(place, mailbox):
    def handle(job: int, ctx: Context) -> int:
        async def write():
            async with ctx.transaction() as connection:
                await connection.execute(insert(place), (str(job),))

        from_thread.run(write)
        return job + 1

    async with MainLoop(mailbox, handle):
        assert await mailbox.request(1, timeout=20) == 2
    assert effects(place) == ["1"]


async def test_a_plain_handler_that_enters_a_transaction_itself_is_told_what_to_write(place, mailbox):
    def handle(job: int, ctx: Context) -> None:
        with ctx.transaction():
            pass

    async with MainLoop(mailbox, handle, dead_letter=DeadLetterPolicy(max_attempts=1)):
        with pytest.raises(RequestFailedError, match=r"gives its own: with ctx\.transaction\(session\)") as told:
            await mailbox.request(1, timeout=20)
    assert told.value.error_type == "ConfigError"


@pytest.mark.parametrize("by_hand", [False, True])
async def test_what_a_handler_returns_after_its_transaction_is_the_result(place, mailbox, by_hand):
    async def handle(job: int, ctx: Context) -> int:
        async with ctx.transaction() as connection:
            await connection.execute(insert(place), (str(job),))
            if by_hand:
                await ctx.message.reply(job + 10)
        return job + 1

    async with MainLoop(mailbox, handle):
        assert await mailbox.request(1, timeout=20) == (11 if by_hand else 2)
        pending = await mailbox.submit(2)
        assert await pending.result(timeout=20) == (12 if by_hand else 3)
        await anyio.sleep(0.1)
    assert effects(place) == ["1", "2"]
    assert mailbox.forgotten_replies == 0


async def test_in_a_loop_a_transaction_that_was_ended_is_a_failed_attempt(place, mailbox):
    async def handle(job: int, ctx: Context) -> None:
        async with ctx.transaction() as connection:
            await connection.execute(insert(place), (str(ctx.attempt),))
            if ctx.attempt == 1:
                await connection.execute("ROLLBACK")

    loop = MainLoop(mailbox, handle, retry=RetryPolicy(initial_delay=0.01))
    await mailbox.send(1)
    await LoopGroup([loop], guardian=False).run(install_signals=False, until_empty=True)
    assert effects(place) == ["2"]
    assert (await mailbox.counts()).settled == 1


async def test_a_lost_lease_rolls_back(place, mailbox):
    await mailbox.send("x")
    (message,) = await mailbox.receive(visibility_timeout=0.2)
    with pytest.raises(ReceiptHandleExpiredError):  # noqa: PT012
        async with mailbox.transaction(message) as connection:
            await connection.execute(insert(place), ("first",))
            (again,) = await mailbox.receive(wait_time_seconds=5)
            async with mailbox.transaction(again) as other:
                await other.execute(insert(place), ("second",))
    assert effects(place) == ["second"]


async def test_other_settlements_are_part_of_the_transaction(place, mailbox):
    async with place.mailbox("replies") as replies:
        await mailbox.send_many(["reply", "nack", "dead"], reply_to="replies")
        reply, nack, dead = await mailbox.receive(max_messages=3)
        with pytest.raises(LookupError):  # noqa: PT012
            async with mailbox.transaction(reply):
                await reply.reply("never")
                raise LookupError
        assert not reply.is_settled
        assert await replies.receive() == []
        async with mailbox.transaction(reply) as connection:
            await connection.execute(insert(place), ("reply",))
            await reply.reply("result")
            assert await replies.receive() == []
        async with mailbox.transaction(nack):
            await nack.nack(delay=60)
        async with mailbox.transaction(dead):
            await dead.dead_letter("no")
        (answer,) = await replies.receive()
        assert (answer.body, answer.headers["request_id"]) == ("result", reply.id)
        counts = await mailbox.counts()
        assert (counts.settled, counts.delayed, counts.dead) == (1, 1, 1)


async def test_a_settlement_early_in_the_block_blocks_no_other(place, mailbox):
    async with place.mailbox("replies") as replies:
        await mailbox.send("x", reply_to="replies")
        (message,) = await mailbox.receive(visibility_timeout=0.2)
        with anyio.fail_after(10):
            async with mailbox.transaction(message) as connection:
                await message.reply("result")
                await message.renew(60)
                await mailbox.send("y")
                assert [other.body for other in await mailbox.receive(max_messages=9)] == ["y"]
                await anyio.sleep(0.3)  # beyond the lease
                assert await mailbox.receive() == []
                await connection.execute(insert(place), ("done",))
            assert [reply.body for reply in await replies.receive()] == ["result"]
    assert effects(place) == ["done"]


async def test_a_cancelled_block_does_nothing(place, mailbox):
    await mailbox.send("x")
    (message,) = await mailbox.receive()
    with anyio.move_on_after(0.1):
        async with mailbox.transaction(message) as connection:
            await connection.execute(insert(place), ("done",))
            await connection.execute("SELECT pg_sleep(60)")
    assert not message.is_settled
    await message.acknowledge()
    assert effects(place) == []


@pytest.mark.slow
async def test_one_cancelled_in_its_acknowledgement_has_not_acknowledged(place, mailbox):
    """So that its worker gives the message back, and does not take it for done."""
    await mailbox.send("x")
    (message,) = await mailbox.receive()
    async with await place.connect() as other:
        await other.execute(f"LOCK TABLE {place.schema}.messages")
        with anyio.move_on_after(0.5) as scope:
            async with mailbox.transaction(message):
                pass
        assert scope.cancelled_caught
        await other.rollback()
    assert not message.is_settled
    await message.acknowledge()


async def test_more_transactions_than_connections_take_turns(place, mailbox):
    await mailbox.send_many(range(25))
    messages = await mailbox.receive(max_messages=25)

    async def work(message):
        async with mailbox.transaction(message) as connection:
            await connection.execute(insert(place), (f"{message.body:02}",))

    async with anyio.create_task_group() as tasks:
        for message in messages:
            tasks.start_soon(work, message)
    assert effects(place) == [f"{number:02}" for number in range(25)]
    assert (await mailbox.counts()).settled == 25


@pytest.mark.slow
async def test_in_a_loop_effects_happen_once_however_often_it_is_tried(place, mailbox):
    tried = []

    async def handle(job: int, ctx: Context) -> None:
        tried.append(job)
        async with ctx.transaction() as connection:
            await connection.execute(insert(place), (str(job),))
            if ctx.attempt == 1 and job % 3 == 0:
                raise Retry(0)
            if ctx.attempt == 1 and job % 3 == 1:
                await connection.close()

    group = LoopGroup([MainLoop(mailbox, handle, concurrency=5)], guardian=False)
    await mailbox.send_many(range(9))
    await group.run(install_signals=False, until_empty=True)
    assert effects(place) == [str(number) for number in range(9)]
    assert len(tried) == 15
    assert (await mailbox.counts()).settled == 9


# ----------------------------------------------------------------------------------------- a server that does not answer


@pytest.mark.slow
@pytest.mark.parametrize(
    ("standstill", "says"),
    [
        ("before", "to BEGIN"),
        ("in the block", "to the settlement"),
        ("settled", "to COMMIT, which may have taken place"),
        ("failed", None),
    ],
)
async def test_what_the_mailbox_does_in_a_transaction_has_an_end(place, mailbox, standstill, says):
    async with gate(place.url) as (url, way), place.mailbox(url=url, timeout=3, listen=False) as through:
        await mailbox.send("x")
        (message,) = await through.receive()
        if standstill == "before":
            way.freeze()
        with (  # noqa: PT012
            Stopwatch() as watch,
            pytest.raises(LookupError if says is None else MailboxConnectionError, match=says),
        ):
            async with through.transaction(message) as connection:
                if standstill == "settled":
                    await message.acknowledge()
                way.freeze()
                if says is None:
                    raise LookupError
        assert watch.seconds < 9
        assert standstill == "before" or connection.closed
        assert not message.is_settled


@pytest.mark.parametrize("limit", ["statement_timeout", "lock_timeout"])
@pytest.mark.parametrize("by_hand", [False, True])
async def test_a_settlement_that_the_server_breaks_off_is_named(place, mailbox, limit, by_hand):
    """It is the mailbox's own statement: its error is none of the driver's, and says that another try can help."""
    await mailbox.send("x")
    (message,) = await mailbox.receive()
    async with await place.connect() as other:
        await other.execute(f"SELECT FROM {place.schema}.messages FOR UPDATE")
        with pytest.raises(MailboxConnectionError, match=f"due to {limit.replace('_', ' ')}"):  # noqa: PT012
            async with mailbox.transaction(message) as connection:
                await connection.execute(f"SET LOCAL {limit} = 50")
                if by_hand:
                    await message.nack()
        await other.rollback()
    assert not message.is_settled
    await message.acknowledge()


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("deadlock_detected", MailboxConnectionError),
        ("query_canceled", MailboxConnectionError),
        ("unique_violation", psycopg.errors.UniqueViolation),
    ],
)
async def test_a_commit_that_the_server_breaks_off_is_named_and_what_a_constraint_says_stays(
    place, mailbox, code, kind
):
    place.execute(
        "CREATE FUNCTION SCHEMA.late() RETURNS trigger LANGUAGE plpgsql AS"
        f" $$ BEGIN RAISE EXCEPTION 'late' USING ERRCODE = '{code}'; END $$"
    )
    place.execute(
        "CREATE CONSTRAINT TRIGGER late AFTER INSERT ON SCHEMA.effects DEFERRABLE INITIALLY DEFERRED FOR EACH ROW"
        " EXECUTE FUNCTION SCHEMA.late()"
    )
    await mailbox.send("x")
    (message,) = await mailbox.receive()
    with pytest.raises(kind, match="late"):
        async with mailbox.transaction(message) as connection:
            await connection.execute(insert(place), ("x",))
    await message.acknowledge()
    assert effects(place) == []


async def test_a_connection_that_the_server_ends_is_a_lost_one_for_whatever_reason(place, mailbox):
    """Also where the code of that is none of the driver's operational errors."""
    async with place.mailbox(capacity=5) as bounded:
        place.execute(
            "CREATE FUNCTION SCHEMA.ended() RETURNS trigger LANGUAGE plpgsql AS"
            " $$ BEGIN RAISE EXCEPTION 'ended' USING ERRCODE = '25P03'; END $$"
        )
        place.execute(
            "CREATE TRIGGER ended BEFORE INSERT ON SCHEMA.messages FOR EACH ROW EXECUTE FUNCTION SCHEMA.ended()"
        )
        for sender in (mailbox, bounded):
            with pytest.raises(MailboxConnectionError, match="ended"):
                await sender.send("x")


async def test_a_cancelled_send_within_a_capacity_ends_at_once(place):
    async with gate(place.url) as (url, way), place.mailbox(url=url, listen=False, capacity=2, timeout=5) as through:
        await through.send("x")
        way.freeze()
        with Stopwatch() as watch, anyio.move_on_after(0.2) as scope:
            await through.send("never")
        assert scope.cancelled_caught
        assert watch.seconds < 1
        await through.send("y")
        assert [message.body for message in await through.receive(max_messages=9)] == ["x", "y"]


async def test_a_cancelled_send_within_a_capacity_leaves_nothing_behind(place):
    async with place.mailbox(capacity=1, timeout=5) as mailbox, await place.connect() as connection:
        await connection.execute(f"SELECT {place.schema}.lock_capacity({place.number()})")
        with Stopwatch() as watch, anyio.move_on_after(0.2) as scope:
            await mailbox.send("never")
        assert scope.cancelled_caught
        assert watch.seconds < 1
        await connection.rollback()
        await mailbox.send("x")
        assert [message.body for message in await mailbox.receive(max_messages=9)] == ["x"]


@pytest.mark.slow
async def test_what_the_handler_does_in_a_transaction_may_last(place):
    async with place.mailbox(), place.mailbox(timeout=2) as mailbox:  # the first makes the schema, in its own time
        await mailbox.send("x")
        (message,) = await mailbox.receive()
        async with mailbox.transaction(message) as connection:
            await connection.execute("SELECT pg_sleep(3)")
        assert (await mailbox.counts()).settled == 1


@pytest.mark.slow
async def test_a_transaction_that_was_given_up_blocks_no_other(place, mailbox):
    async with gate(place.url) as (url, way), place.mailbox(url=url, timeout=2, listen=False) as through:
        await mailbox.send_many(["x", "y"])
        message, other = await through.receive(max_messages=2)
        with pytest.raises(MailboxConnectionError, match="COMMIT"):  # noqa: PT012
            async with through.transaction(message):
                await message.acknowledge()
                way.freeze()
        ends = []

        async def end(name, settle):
            with suppress(MailboxConnectionError):
                await settle()
                ends.append((name, watch.seconds < 1.5))

        with Stopwatch() as watch:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(end, "its row is still locked", message.nack)
                tasks.start_soon(end, "other", other.acknowledge)
        assert ends == [("other", True)]


async def test_acknowledged_with_others_a_message_in_a_transaction_ends_with_that(place, mailbox):
    await mailbox.send_many("xy")
    inside, other = await mailbox.receive(max_messages=2)
    with pytest.raises(RuntimeError):  # noqa: PT012
        async with mailbox.transaction(inside) as connection:
            await connection.execute(insert(place), ("x",))
            assert await mailbox.acknowledge_many([inside, other]) == {}
            raise RuntimeError("rolls back")
    counts = await mailbox.counts()
    assert (counts.settled, counts.in_flight) == (1, 1)
    assert effects(place) == []


@pytest.mark.slow
async def test_acknowledged_with_others_one_whose_transaction_was_given_up_blocks_none(place, mailbox):
    async with gate(place.url) as (url, way), place.mailbox(url=url, timeout=2, listen=False) as through:
        await mailbox.send_many("xyz")
        message, *others = await through.receive(max_messages=3)
        with pytest.raises(MailboxConnectionError, match="COMMIT"):  # noqa: PT012
            async with through.transaction(message):
                await message.acknowledge()
                way.freeze()
        refused = await through.acknowledge_many([others[0], message, others[1]])
        assert list(refused) == [1]
        assert isinstance(refused[1], MailboxConnectionError)
        assert (await mailbox.counts()).settled == 2


async def give_up(place, mailbox, message):
    """Lose the connection of a transaction that has settled the message: the server may hold its row for that."""
    with pytest.raises(MailboxConnectionError, match="lost"):  # noqa: PT012
        async with mailbox.transaction(message) as connection:
            await message.acknowledge()
            place.execute("SELECT pg_terminate_backend(%s)", connection.info.backend_pid)


@pytest.mark.slow
async def test_acknowledged_with_others_many_that_must_wait_wait_together(place):
    """One that hangs holds up neither those that have nothing to do with it, nor the others that hang."""
    timeout = 2.0
    async with place.mailbox(timeout=timeout) as mailbox, await place.connect() as other:
        await mailbox.send_many(range(8))
        messages = await mailbox.receive(max_messages=8)
        held, free = messages[:6], messages[6:]
        for message in held[3:]:
            await give_up(place, mailbox, message)
        statement = f"SELECT FROM {place.schema}.messages WHERE id = ANY (%s) FOR UPDATE"
        await other.execute(statement, ([message.id for message in held],))
        with suppress(MailboxConnectionError):
            async with (
                mailbox.transaction(held[0]),
                mailbox.transaction(held[1]),
                mailbox.transaction(held[2]),
                anyio.create_task_group() as tasks,
            ):
                done = []

                async def look():
                    while (await mailbox.counts()).settled < len(free):
                        await anyio.sleep(0.01)
                    done.append("free")

                tasks.start_soon(look)
                refused = await mailbox.acknowledge_many([held[0], free[0], *held[1:], free[1]])
                done.append("held")
        assert done == ["free", "held"]
        assert sorted(refused) == [0, 2, 3, 4, 5, 6]
        assert all(isinstance(error, MailboxConnectionError) for error in refused.values())
        await other.rollback()
        assert await mailbox.acknowledge_many(held) == {}


@pytest.mark.slow
async def test_a_joint_acknowledgement_in_which_some_wait_ends_in_the_time_of_one(place):
    timeout = 1.0
    async with place.mailbox(), place.mailbox(timeout=timeout) as mailbox, await place.connect() as other:
        await mailbox.send_many(range(6))
        messages = await mailbox.receive(max_messages=6)
        for message in messages:
            await give_up(place, mailbox, message)
        await other.execute(f"LOCK TABLE {place.schema}.messages")
        with Stopwatch() as watch:
            assert len(await mailbox.acknowledge_many(messages)) == 6
        assert watch.seconds < 3 * timeout
        await other.rollback()


@pytest.mark.slow
@pytest.mark.parametrize("early", [False, True])
async def test_a_handler_whose_acknowledgement_hangs_is_cancelled_when_its_lease_is_lost(place, mailbox, early):
    log = []

    def handler(name):
        async def handle(job: str, ctx: Context) -> None:
            log.append(f"{name} begins")
            try:
                async with ctx.transaction():
                    if ctx.attempt == 1:
                        way.freeze()
                    if early:
                        await ctx.message.acknowledge()
            finally:
                log.append(f"{name} ends")

        return handle

    async with gate(place.url) as (url, way), place.mailbox(url=url, listen=False) as through:
        await mailbox.send("x")
        one = MainLoop(through, handler("one"), visibility_timeout=1, name="one")
        two = MainLoop(mailbox, handler("two"), visibility_timeout=1, name="two")
        with anyio.fail_after(10):
            async with one:
                while not log:
                    await anyio.sleep(0.01)
                async with two:
                    while not (await mailbox.counts()).settled:
                        await anyio.sleep(0.01)
    assert log[:2] == ["one begins", "one ends"]
    assert log[2:] in (["one begins", "one ends"], ["two begins", "two ends"])
    assert one.outcomes["lost"] == 1
