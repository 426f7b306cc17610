"""Messages that join a sender's transaction, on connections and sessions of each kind."""

from __future__ import annotations

from contextlib import suppress

import anyio
import psycopg
import pytest

pytest.importorskip("asyncpg", reason="asyncpg is not installed")
pytest.importorskip("psycopg2", reason="psycopg2 is not installed")
pytest.importorskip("django", reason="django is not installed")

import asyncpg

from mainspring import InvalidParameterError, MailboxConnectionError, Tasks
from mainspring.errors import MailboxError
from postgres_support import quiet, receiving, until
from user_connections import DRIVERS, KINDS, PLAIN_KINDS, SOME_KINDS, SQLALCHEMY, connection_of, session_of

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
        place.execute("CREATE TABLE SCHEMA.effects (what text UNIQUE)")
        yield made


def effects(place):
    return [what for (what,) in place.execute("SELECT what FROM SCHEMA.effects ORDER BY what")]


def insert(place, what="done"):
    return f"INSERT INTO {place.schema}.effects VALUES ('{what}')"


async def bodies(mailbox):
    return sorted(message.body for message in await mailbox.receive(max_messages=99))


# ------------------------------------------------------------------------------------------------------- of async code


@pytest.mark.parametrize("kind", KINDS, indirect=True)
async def test_messages_exist_if_and_when_the_transaction_commits(place, mailbox, kind):
    async with kind.connect(place.url) as given:
        async with kind.block(given):
            sent = await mailbox.send("x", connection=given)  # the first thing in it
            await kind.run(given, insert(place))
            options = {"priority": 1, "headers": {"k": 'v"\\ü'}, "reply_to": "there", "expires_in": 600}
            more = await mailbox.send_many(["y", "ü"], connection=given, **options)
            await mailbox.send("later", connection=given, delay=60)
            assert await mailbox.receive() == []
        found = await mailbox.receive(max_messages=9)
    assert [message.id for message in found] == [*more, sent]
    assert [message.body for message in found] == ["y", "ü", "x"]
    assert (dict(found[0].headers), found[0].reply_to) == ({"k": 'v"\\ü'}, "there")
    assert effects(place) == ["done"]
    assert (await mailbox.counts()).delayed == 1


async def test_an_error_rolls_back_the_messages_too(place, mailbox, kind):
    async with kind.connect(place.url) as given:
        with pytest.raises(LookupError):  # noqa: PT012
            async with kind.block(given):
                await mailbox.send("never", connection=given, dedup_key="k")
                await kind.run(given, insert(place))
                raise LookupError
        async with kind.block(given):
            first = await mailbox.send("x", connection=given, dedup_key="k", priority=2)
            assert await mailbox.send("y", connection=given, dedup_key="k") == first
    assert await bodies(mailbox) == ["x"]
    assert effects(place) == []


async def test_a_savepoint_that_is_rolled_back_takes_its_messages_along(place, mailbox, kind):
    async with kind.connect(place.url) as given, kind.block(given):
        await mailbox.send("outside", connection=given)
        with pytest.raises(LookupError):  # noqa: PT012
            async with kind.savepoint(given):
                await mailbox.send("never", connection=given)
                raise LookupError
        async with kind.savepoint(given):
            await mailbox.send("inside", connection=given)
    assert await bodies(mailbox) == ["inside", "outside"]


async def test_a_cancelled_block_sends_nothing(place, mailbox, kind):
    async with kind.connect(place.url) as given:
        with anyio.move_on_after(0.05) as scope:
            async with kind.block(given):
                await mailbox.send("never", connection=given)
                await anyio.sleep(60)
        assert scope.cancelled_caught
    assert await bodies(mailbox) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["asyncpg", "session on asyncpg"])
async def test_the_commit_wakes_receivers(place, name):
    kind = KINDS[name]
    async with place.mailbox(poll_interval=30) as mailbox, kind.connect(place.url) as given:
        await until(lambda: not mailbox.statistics().polling)
        async with receiving(mailbox) as got, kind.block(given):
            await mailbox.send("x", connection=given)
            await quiet(mailbox)
            assert got == []
    assert [message.body for message in got] == ["x"]


async def test_a_task_is_sent_in_the_transaction(place, anyio_backend, kind):
    tasks = Tasks(place.mailbox())

    @tasks.task
    async def ship(order: int) -> None: ...

    async with tasks.mailbox, kind.connect(place.url) as given:
        async with kind.block(given):
            job = await ship.options(connection=given).send(7)
            await ship.options(connection=given, unique=True).send_many([(8,), {"order": 9}])
            assert (await tasks.mailbox.counts()).pending == 0
        assert job.id in [message.id for message in await tasks.mailbox.receive(max_messages=9)]
        assert (await tasks.mailbox.counts()).in_flight == 3


# -------------------------------------------------------------------------------------------------- what does not fit


async def test_a_statement_that_failed_before_is_told(place, mailbox, kind):
    async with kind.connect(place.url) as given:
        with pytest.raises(MailboxError, match="transaction is aborted"):  # noqa: PT012
            async with kind.block(given):
                with pytest.raises(Exception, match="does not exist"):
                    await kind.run(given, "SELECT * FROM nowhere")
                await mailbox.send("x", connection=given)
    assert await bodies(mailbox) == []


async def test_a_connection_to_another_store_is_refused(place, mailbox, kind):
    async with kind.connect(place.url) as given:
        with pytest.raises(InvalidParameterError, match="not to the database of the mailbox"):  # noqa: PT012
            async with kind.block(given):
                await kind.run(given, f"UPDATE {place.schema}.store SET id = 'another'")
                await mailbox.send("x", connection=given)
        with pytest.raises(InvalidParameterError, match="not to the database of the mailbox"):  # noqa: PT012
            async with kind.block(given):
                await kind.run(given, f"ALTER SCHEMA {place.schema} RENAME TO {place.schema}_away")
                await mailbox.send("x", connection=given)


async def test_a_transaction_that_may_not_write_is_refused(place, mailbox, kind):
    async with kind.connect(place.url) as given:
        with pytest.raises(InvalidParameterError, match=r"may not write .*; send in a transaction that may"):  # noqa: PT012
            async with kind.block(given):
                await kind.run(given, "SET TRANSACTION READ ONLY")
                await mailbox.send("x", connection=given)


async def test_a_key_that_another_transaction_has_sent_leaves_this_one_as_it_was(place, mailbox, kind):
    async with await place.connect() as other, kind.connect(place.url) as given:
        await mailbox.send("theirs", connection=other, dedup_key="k")
        async with kind.block(given):
            await kind.run(given, "SET LOCAL lock_timeout = 200")
            with pytest.raises(MailboxConnectionError, match=r"has sent the same dedup_key"):
                await mailbox.send("x", connection=given, dedup_key="k")
            await mailbox.send("y", connection=given)
        await other.rollback()
        assert await bodies(mailbox) == ["y"]


async def test_asyncpg_outside_of_a_transaction_is_refused(place, mailbox):
    for name in ("asyncpg", "asyncpg pool"):
        async with DRIVERS[name].connect(place.url) as given:
            with pytest.raises(
                InvalidParameterError, match=r"in no transaction.*asyncpg: in the block of connection\."
            ):
                await mailbox.send("x", connection=given)
    assert await bodies(mailbox) == []


@pytest.mark.parametrize("made", [connection_of, session_of])
@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
async def test_an_engine_in_autocommit_is_refused(place, mailbox, made, driver):
    async with made(driver).connect(place.url, isolation_level="AUTOCOMMIT") as given:
        with pytest.raises(InvalidParameterError, match="in autocommit and in no transaction"):
            await mailbox.send("x", connection=given)
    assert await bodies(mailbox) == []


async def test_sqlalchemy_begins_with_the_send(place, mailbox):
    for name, kind in SQLALCHEMY.items():
        async with kind.connect(place.url) as given:
            await mailbox.send(name, connection=given)
            await given.commit()
            await mailbox.send("never", connection=given)
    assert await bodies(mailbox) == sorted(SQLALCHEMY)


@pytest.mark.parametrize("name", [*DRIVERS, "connection on psycopg", "connection on asyncpg"])
async def test_a_closed_connection_is_named(place, mailbox, name):
    kind = KINDS[name]
    async with kind.connect(place.url) as given:
        await kind.close(given)
        with pytest.raises((MailboxConnectionError, InvalidParameterError), match=r"(?i)closed|released"):
            await mailbox.send("x", connection=given)


async def test_a_connection_that_the_server_ends_is_a_lost_one(place, mailbox, kind):
    async with kind.connect(place.url) as given:
        told = []
        with suppress(Exception):  # what the library says at the end of the block
            async with kind.block(given):
                with pytest.raises(Exception, match=r"terminat|closed"):
                    await kind.run(given, "SELECT pg_terminate_backend(pg_backend_pid())")
                with pytest.raises(MailboxConnectionError) as caught:
                    await mailbox.send("x", connection=given)
                told.append(caught.value)
        assert told


async def test_other_kinds_are_refused_by_name(place, mailbox):
    with psycopg.connect(place.url) as plain:
        for other in (object(), plain, "postgresql://"):
            with pytest.raises(
                InvalidParameterError, match=r"send: connection must be a psycopg AsyncConnection, an asyncpg"
            ):
                await mailbox.send("x", connection=other)


async def test_a_session_without_a_database_is_refused(mailbox):
    from sqlalchemy.ext.asyncio import AsyncSession

    async with AsyncSession() as session:
        with pytest.raises(InvalidParameterError, match=r"send: SQLAlchemy gives no connection: .*bind"):
            await mailbox.send("x", connection=session)


async def test_a_server_that_is_away_is_told_as_that(mailbox):
    for driver in ("psycopg", "asyncpg"):
        async with session_of(driver).connect("postgresql://postgres@127.0.0.1:1/postgres") as session:
            with pytest.raises(MailboxConnectionError, match=r"(?i)connect"):
                await mailbox.send("x", connection=session)


async def test_a_statement_that_takes_longer_than_the_connection_allows_is_told(place, mailbox):
    connection = await asyncpg.connect(place.url, command_timeout=0.1)
    async with await place.connect() as other:
        await other.execute(f"LOCK TABLE {place.schema}.messages")
        with pytest.raises(MailboxConnectionError, match="TimeoutError"):
            async with connection.transaction():
                await mailbox.send("x", connection=connection)
        await other.rollback()
    await connection.close()


# ------------------------------------------------------------------------------------------------------ of plain threads


@pytest.fixture(params=PLAIN_KINDS)
def plain_kind(request):
    return PLAIN_KINDS[request.param]


@pytest.fixture
def plain_mailbox(place):
    with place.mailbox().sync as opened:
        place.execute("CREATE TABLE SCHEMA.effects (what text)")
        yield opened


def received(mailbox):
    return [message.body for message in mailbox.receive(max_messages=99)]


def test_a_threads_messages_exist_if_and_when_its_transaction_commits(place, plain_mailbox, plain_kind):
    mailbox, kind = plain_mailbox, plain_kind
    with kind.connect(place.url) as given:
        with kind.block(given):
            sent = mailbox.send("x", connection=given)
            kind.run(given, insert(place))
            options = {"priority": 1, "headers": {"k": 'v"\\ü'}, "reply_to": 'th"e\\re ü', "expires_in": 600.5}
            more = mailbox.send_many(["y", "ü"], connection=given, **options)
            assert received(mailbox) == []
        found = mailbox.receive(max_messages=9)
        assert [message.id for message in found] == [*more, sent]
        assert [message.body for message in found] == ["y", "ü", "x"]
        assert (dict(found[0].headers), found[0].reply_to) == ({"k": 'v"\\ü'}, 'th"e\\re ü')
        with pytest.raises(LookupError), kind.block(given):  # noqa: PT012
            mailbox.send("never", connection=given, dedup_key="k'", delay=60)
            raise LookupError
        with kind.block(given):
            first = mailbox.send("a", connection=given, dedup_key="k'", priority=3)
            assert mailbox.send("b", connection=given, dedup_key="k'") == first
            with pytest.raises(LookupError), kind.savepoint(given):  # noqa: PT012
                mailbox.send("never", connection=given)
                raise LookupError
    assert received(mailbox) == ["a"]
    assert effects(place) == ["done"]


def test_what_does_not_fit_a_thread_is_refused(place, plain_mailbox, plain_kind):
    mailbox, kind = plain_mailbox, plain_kind
    with kind.connect(place.url) as given:
        with pytest.raises(InvalidParameterError, match="may not write"), kind.block(given):  # noqa: PT012
            kind.run(given, "SET TRANSACTION READ ONLY")
            mailbox.send("x", connection=given)
        with (  # noqa: PT012
            pytest.raises(InvalidParameterError, match="not to the database of the mailbox") as caught,
            kind.block(given),
        ):
            kind.run(given, f"ALTER FUNCTION {place.schema}.check_store RENAME TO away")
            mailbox.send("x", connection=given)
        assert "LINE" not in str(caught.value)
        with pytest.raises(InvalidParameterError, match="not to the database of the mailbox"), kind.block(given):  # noqa: PT012
            kind.run(given, f"UPDATE {place.schema}.store SET id = 'another'")
            mailbox.send("x", connection=given)
    assert received(mailbox) == []


def test_a_thread_in_autocommit_is_refused(place, plain_mailbox):
    import psycopg2
    from sqlalchemy import create_engine

    refused = pytest.raises(InvalidParameterError, match=r"in no transaction.*Django: of transaction\.atomic")
    with PLAIN_KINDS["django"].connect(place.url) as connection, refused:
        plain_mailbox.send("x", connection=connection)
    engine = create_engine(place.url.replace("postgresql", "postgresql+psycopg2"), isolation_level="AUTOCOMMIT")
    with engine.connect() as connection, pytest.raises(InvalidParameterError, match="in no transaction"):
        plain_mailbox.send("x", connection=connection)
    engine.dispose()
    connection = psycopg2.connect(place.url)
    connection.close()
    with pytest.raises(MailboxConnectionError, match=r"is closed.*begin anew on another"):
        plain_mailbox.send("x", connection=connection)


def test_psycopg2_may_be_in_another_encoding(place, plain_mailbox):
    with PLAIN_KINDS["psycopg2"].connect(place.url) as connection:
        connection.set_client_encoding("LATIN1")
        plain_mailbox.send("€", connection=connection, reply_to="ü")
        with pytest.raises(InvalidParameterError, match=r"client_encoding of the connection; set that to UTF8"):
            plain_mailbox.send("x", connection=connection, reply_to="€")
        connection.commit()
    (message,) = plain_mailbox.receive()
    assert (message.body, message.reply_to) == ("€", "ü")


def test_a_task_is_sent_in_the_threads_transaction(place, plain_kind):
    tasks = Tasks(place.mailbox())

    @tasks.task
    def ship(order: int) -> None: ...

    with tasks.sync, plain_kind.connect(place.url) as given:
        with plain_kind.block(given):
            ship.options(connection=given).sync.send(7)
            ship.options(connection=given).sync.send_many([(8,), {"order": 9}])
            assert tasks.mailbox.sync.counts().pending == 0
        assert tasks.mailbox.sync.counts().pending == 3


def test_djangos_on_commit_sends_after_the_commit(place, plain_mailbox):
    from django.db import transaction

    with PLAIN_KINDS["django"].connect(place.url) as connection:
        with transaction.atomic():
            PLAIN_KINDS["django"].run(connection, insert(place))
            transaction.on_commit(lambda: plain_mailbox.send("x"))
            assert received(plain_mailbox) == []
        assert received(plain_mailbox) == ["x"]
        with pytest.raises(LookupError), transaction.atomic():  # noqa: PT012
            transaction.on_commit(lambda: plain_mailbox.send("never"))
            raise LookupError
    assert received(plain_mailbox) == []
