"""Handlers' writes and their acknowledgement in one transaction of the handler's own connection or session."""

from __future__ import annotations

from contextlib import suppress

import anyio
import pytest
from sqlalchemy import Column, MetaData, String, Table
from sqlalchemy.orm import registry

pytest.importorskip("asyncpg", reason="asyncpg is not installed")
pytest.importorskip("psycopg2", reason="psycopg2 is not installed")

from mainspring import (
    Context,
    InMemoryMailbox,
    InvalidParameterError,
    LoopGroup,
    MailboxConnectionError,
    MainLoop,
    MessageSettledError,
    Retry,
    TransactionEndedError,
)
from mainspring.errors import ConfigError, ReceiptHandleExpiredError
from mainspring.mailbox.postgres.user_connections import AsyncpgConnection
from postgres_support import gate
from stopwatch import Stopwatch
from user_connections import DRIVERS, KINDS, SOME_KINDS, SQLALCHEMY, AsyncpgPool, session_of

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(params=SOME_KINDS)
def kind(request):
    return KINDS[request.param]


@pytest.fixture
async def mailbox(place, anyio_backend):
    async with place.mailbox() as made:
        place.execute("CREATE TABLE SCHEMA.effects (what text UNIQUE DEFERRABLE INITIALLY DEFERRED)")
        yield made


@pytest.fixture
async def message(mailbox):
    await mailbox.send("x")
    (received,) = await mailbox.receive()
    return received


def effects(place):
    return [what for (what,) in place.execute("SELECT what FROM SCHEMA.effects ORDER BY what")]


def insert(place, what="done"):
    return f"INSERT INTO {place.schema}.effects VALUES ('{what}')"


@pytest.mark.parametrize("kind", KINDS, indirect=True)
async def test_writes_and_acknowledgement_commit_together(place, mailbox, message, kind):
    async with kind.connect(place.url) as given:
        async with mailbox.transaction(message, given) as yielded:
            assert yielded is given
            await kind.run(given, insert(place))
            await mailbox.send("next", connection=given)
            assert effects(place) == []
            assert (await mailbox.counts()).in_flight == 1
        assert message.is_settled
        assert effects(place) == ["done"]
        counts = await mailbox.counts()
        assert (counts.settled, counts.pending) == (1, 1)
        with pytest.raises(MessageSettledError):
            async with mailbox.transaction(message, given):
                pytest.fail("a settled message has no transaction")
        async with kind.block(given):  # it can be used again
            await kind.run(given, insert(place, "more"))
    assert effects(place) == ["done", "more"]


async def test_an_error_rolls_all_back_and_leaves_the_message_unsettled(place, mailbox, message, kind):
    async with kind.connect(place.url) as given:
        with pytest.raises(LookupError):  # noqa: PT012
            async with mailbox.transaction(message, given):
                await kind.run(given, insert(place))
                await mailbox.send("never", connection=given)
                raise LookupError
        with pytest.raises(LookupError):  # noqa: PT012
            async with mailbox.transaction(message, given):
                await message.reply("r") if message.reply_to else await message.nack(delay=60)
                raise LookupError
        with pytest.raises(Exception, match="does not exist"):
            async with mailbox.transaction(message, given):
                await kind.run(given, "SELECT * FROM nowhere")
        assert not message.is_settled
        async with mailbox.transaction(message, given):
            await kind.run(given, insert(place, "second"))
    assert effects(place) == ["second"]
    counts = await mailbox.counts()
    assert (counts.pending, counts.delayed, counts.settled) == (0, 0, 1)


async def test_what_the_block_settles_itself_is_part_of_it(place, mailbox, message, kind):
    async with kind.connect(place.url) as given, mailbox.transaction(message, given):
        await kind.run(given, insert(place))
        await message.nack(delay=60)
    assert effects(place) == ["done"]
    assert (await mailbox.counts()).delayed == 1


async def test_a_lost_lease_rolls_back(place, mailbox, kind):
    await mailbox.send("x")
    (message,) = await mailbox.receive(visibility_timeout=0.1)
    async with kind.connect(place.url) as given:
        with pytest.raises(ReceiptHandleExpiredError):  # noqa: PT012
            async with mailbox.transaction(message, given):
                await kind.run(given, insert(place))
                await anyio.sleep(0.2)
        (again,) = await mailbox.receive()
        async with mailbox.transaction(again, given):
            await kind.run(given, insert(place, "again"))
    assert effects(place) == ["again"]
    assert (await mailbox.counts()).settled == 1


async def test_a_savepoint_in_the_block_may_be_rolled_back(place, mailbox, message, kind):
    async with kind.connect(place.url) as given, mailbox.transaction(message, given):
        await kind.run(given, insert(place, "kept"))
        with pytest.raises(LookupError):  # noqa: PT012
            async with kind.savepoint(given):
                await kind.run(given, insert(place, "not kept"))
                raise LookupError
    assert effects(place) == ["kept"]
    assert (await mailbox.counts()).settled == 1


async def test_a_cancelled_block_is_rolled_back_and_its_connection_works_on(place, mailbox, message, kind):
    async with kind.connect(place.url) as given:
        with anyio.move_on_after(0.1) as scope:
            async with mailbox.transaction(message, given):
                await kind.run(given, insert(place))
                await message.acknowledge()
                await anyio.sleep(60)
        assert scope.cancelled_caught
        assert not message.is_settled
        async with mailbox.transaction(message, given):
            await kind.run(given, insert(place, "later"))
    assert effects(place) == ["later"]


@pytest.mark.slow
async def test_a_block_cancelled_in_a_statement_leaves_nothing_that_could_commit(place, mailbox, message, kind):
    async with kind.connect(place.url) as given:
        with anyio.move_on_after(0.2) as scope, Stopwatch() as watch:
            async with mailbox.transaction(message, given):
                await kind.run(given, insert(place))
                await message.acknowledge()
                await kind.run(given, "SELECT pg_sleep(2)")  # psycopg lets it run to its end
        assert scope.cancelled_caught
        assert watch.seconds < 5
        await message.acknowledge()
    assert effects(place) == []


@pytest.mark.parametrize("word", ["ROLLBACK", "COMMIT"])
async def test_a_block_that_ends_its_transaction_itself_settles_nothing(place, mailbox, message, kind, word):
    async with kind.connect(place.url) as given:
        with suppress(Exception), pytest.raises(TransactionEndedError, match="leave COMMIT and ROLLBACK"):  # noqa: PT012
            async with mailbox.transaction(message, given):
                await kind.run(given, insert(place))
                await kind.run(given, word)
    assert not message.is_settled
    await message.nack()
    assert (await mailbox.counts()).pending == 1


@pytest.mark.parametrize("word", ["commit", "rollback"])
@pytest.mark.parametrize("name", ["connection on asyncpg", "session on psycopg", "scoped session"])
async def test_a_session_that_began_another_transaction_settles_nothing(place, mailbox, message, name, word):
    kind = SQLALCHEMY[name]
    async with kind.connect(place.url) as given:
        with pytest.raises(TransactionEndedError, match="leave COMMIT and ROLLBACK"):  # noqa: PT012
            async with mailbox.transaction(message, given):
                await getattr(given, word)()
                await kind.run(given, insert(place))
        await given.commit()
    assert not message.is_settled
    await message.acknowledge()
    assert effects(place) == []


async def test_a_failed_statement_that_the_block_hides_is_told(place, mailbox, message, kind):
    async with kind.connect(place.url) as given:
        for by_hand in (False, True):
            with pytest.raises(TransactionEndedError, match="let errors of statements out of it"):  # noqa: PT012
                async with mailbox.transaction(message, given):
                    if by_hand:
                        await message.acknowledge()
                    with pytest.raises(Exception, match="division by zero"):
                        await kind.run(given, "SELECT 1 / 0")
            assert not message.is_settled
    await message.acknowledge()


async def test_what_a_constraint_says_at_the_commit_is_the_handlers_own_affair(place, mailbox, message, kind):
    place.execute(insert(place))
    async with kind.connect(place.url) as given:
        with pytest.raises(Exception, match="duplicate key") as caught:
            async with mailbox.transaction(message, given):
                await kind.run(given, insert(place))
        assert not type(caught.value).__module__.startswith("mainspring")
        assert not message.is_settled
        async with mailbox.transaction(message, given):
            pass


async def test_the_handlers_own_error_stays_where_the_connection_is_lost_too(place, mailbox, message, kind):
    async with kind.connect(place.url) as given:
        with pytest.raises(LookupError):  # noqa: PT012
            async with mailbox.transaction(message, given):
                with suppress(Exception):
                    await kind.run(given, "SELECT pg_terminate_backend(pg_backend_pid())")
                raise LookupError
    await message.acknowledge()


async def test_a_lost_connection_is_named(place, mailbox, message, kind):
    async with kind.connect(place.url) as given:
        with pytest.raises(MailboxConnectionError, match="lost"):
            async with mailbox.transaction(message, given):
                await kind.run(given, "SELECT pg_terminate_backend(pg_backend_pid())")
    await message.acknowledge()


# ------------------------------------------------------------------------------------------ who begins, and who commits


async def test_what_a_session_has_begun_is_continued_and_committed(place, mailbox, message):
    async with session_of("asyncpg").connect(place.url) as session:
        await SQLALCHEMY["session on asyncpg"].run(session, insert(place, "before"))
        async with mailbox.transaction(message, session):
            await SQLALCHEMY["session on asyncpg"].run(session, insert(place, "within"))
        assert not session.in_transaction()
    assert effects(place) == ["before", "within"]


async def test_objects_of_a_session_are_written(place, mailbox, message):
    class Effect:
        def __init__(self, what):
            self.what = what

    table = Table("effects", MetaData(), Column("what", String, primary_key=True), schema=place.schema)
    registry().map_imperatively(Effect, table)
    async with session_of("asyncpg").connect(place.url) as session, mailbox.transaction(message, session):
        session.add(Effect(what="an object"))
    assert effects(place) == ["an object"]


@pytest.mark.parametrize("name", DRIVERS)
async def test_a_drivers_connection_in_a_transaction_is_refused(place, mailbox, message, name):
    kind = KINDS[name]
    async with kind.connect(place.url) as given, kind.block(given):
        await kind.run(given, insert(place))
        with pytest.raises(InvalidParameterError, match=r"is under way.*end the other before"):
            async with mailbox.transaction(message, given):
                pytest.fail("it cannot be committed")
    assert effects(place) == ["done"]
    await message.acknowledge()


@pytest.mark.parametrize("name", ["connection on asyncpg", "session on psycopg", "scoped session"])
async def test_a_savepoint_is_refused(place, mailbox, message, name):
    kind = KINDS[name]
    async with kind.connect(place.url) as given, kind.block(given), kind.savepoint(given):
        with pytest.raises(InvalidParameterError, match=r"enter it outside of begin_nested"):
            async with mailbox.transaction(message, given):
                pytest.fail("it is not the whole")
    await message.acknowledge()


async def test_one_session_is_in_the_transaction_of_one_message(place, mailbox):
    await mailbox.send_many("xy")
    one, two = await mailbox.receive(max_messages=2)
    async with session_of("psycopg").connect(place.url) as session, mailbox.transaction(one, session):
        with pytest.raises(InvalidParameterError, match="transaction of another message"):
            async with mailbox.transaction(two, session):
                pytest.fail("it would commit the other")
    assert (one.is_settled, two.is_settled) == (True, False)


@pytest.mark.parametrize("name", ["session on psycopg", "session on asyncpg"])
async def test_another_isolation_level_is_refused(place, mailbox, message, name):
    async with session_of(name.split()[-1]).connect(place.url, isolation_level="REPEATABLE READ") as session:
        with pytest.raises(InvalidParameterError, match=r"is repeatable read.*use READ COMMITTED"):
            async with mailbox.transaction(message, session):
                pytest.fail("a renewal would end it")
        assert not session.in_transaction()
    await message.acknowledge()


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
async def test_an_engine_in_autocommit_is_refused(place, mailbox, message, driver):
    async with session_of(driver).connect(place.url, isolation_level="AUTOCOMMIT") as session:
        with pytest.raises(InvalidParameterError, match=r"the engine is in AUTOCOMMIT; use one"):
            async with mailbox.transaction(message, session):
                pytest.fail("each statement commits by itself")
    await message.acknowledge()


async def test_what_does_not_fit_is_refused(place, mailbox, message, kind):
    with pytest.raises(
        InvalidParameterError,
        match=r"transaction: connection must be a psycopg AsyncConnection, an asyncpg.*not async are for `with` in a plain",
    ):
        async with mailbox.transaction(message, object()):
            pass
    place.execute("UPDATE SCHEMA.store SET id = 'another'")
    async with kind.connect(place.url) as given:
        with pytest.raises(InvalidParameterError, match="not to the database of the mailbox"):
            async with mailbox.transaction(message, given):
                pytest.fail("its message is elsewhere")
    await message.acknowledge()


async def test_a_closed_connection_is_named(place, mailbox, message):
    async with AsyncpgPool.connect(place.url) as given:
        await given.close()
        with pytest.raises(MailboxConnectionError, match="closed"):
            async with mailbox.transaction(message, given):
                pass
    await message.acknowledge()


async def test_a_mailbox_without_transactions_refuses_a_session():
    async with InMemoryMailbox("jobs") as other:
        await other.send("x")
        (message,) = await other.receive()
        with pytest.raises(ConfigError, match="no transactions"):
            async with other.transaction(message, object()):
                pass


# --------------------------------------------------------------------------------------------------------------- loops


async def test_a_renewal_meanwhile_blocks_nothing(place, mailbox, message, kind):
    async with kind.connect(place.url) as given, mailbox.transaction(message, given):
        await message.extend_visibility(90)
        await kind.run(given, insert(place))
        await message.acknowledge()
    assert effects(place) == ["done"]
    assert (await mailbox.counts()).settled == 1


@pytest.mark.parametrize("name", ["asyncpg pool", "session on asyncpg", "session on psycopg"])
async def test_in_a_loop_effects_happen_once_however_often_it_is_tried(place, mailbox, name):
    kind = KINDS[name]
    tried = []

    async def handle(job: int, ctx: Context) -> None:
        tried.append(job)
        async with kind.connect(place.url) as given, ctx.transaction(given):
            await kind.run(given, insert(place, str(job)))
            if ctx.attempt == 1 and job % 2 == 0:
                raise Retry(0)

    await mailbox.send_many(range(4))
    group = LoopGroup([MainLoop(mailbox, handle, concurrency=2)], guardian=False)
    await group.run(install_signals=False, until_empty=True)
    assert effects(place) == ["0", "1", "2", "3"]
    assert len(tried) == 6


@pytest.mark.slow
async def test_what_the_mailbox_does_in_it_has_an_end(place, mailbox, message, kind):
    async with gate(place.url) as (url, way), place.mailbox(timeout=1) as impatient:
        with suppress(Exception):  # what the library says of a connection that was closed under it
            async with kind.connect(url) as given:
                with Stopwatch() as watch, pytest.raises(MailboxConnectionError, match="did not answer within 1 s"):  # noqa: PT012
                    async with impatient.transaction(message, given):
                        await kind.run(given, insert(place))
                        way.freeze()
        assert watch.seconds < 8
        assert not message.is_settled
    assert effects(place) == []


@pytest.mark.loops("asyncio")
async def test_a_connection_that_its_pool_has_again_is_left_alone(place):
    """asyncpg gives it back where a cancelled statement has closed it: there is nothing left that could commit."""
    import asyncpg

    async with asyncpg.create_pool(place.url, min_size=1, max_size=1) as pool:
        lent = await pool.acquire()
        connection = AsyncpgConnection(lent)
        await pool.release(lent)
        connection.abandon()
        assert connection.closed
        assert await pool.fetchval("SELECT 1") == 1
