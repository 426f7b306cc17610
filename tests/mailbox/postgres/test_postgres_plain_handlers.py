"""Plain handlers' writes and their acknowledgement in one transaction of the thread's own connection or session."""

from __future__ import annotations

import threading
from contextlib import suppress
from functools import partial

import anyio
import psycopg
import pytest
from anyio import from_thread, to_thread
from sqlalchemy import Column, MetaData, String, Table, create_engine
from sqlalchemy.orm import Session, registry

pytest.importorskip("psycopg2", reason="psycopg2 is not installed")
pytest.importorskip("asyncpg", reason="asyncpg is not installed")
pytest.importorskip("django", reason="Django is not installed")

from mainspring import (
    Context,
    InMemoryMailbox,
    InvalidParameterError,
    LoopGroup,
    MailboxConnectionError,
    MainLoop,
    MessageSettledError,
    Retry,
    Tasks,
    TransactionEndedError,
)
from mainspring.errors import ConfigError, ReceiptHandleExpiredError
from user_connections import PLAIN_KINDS, sqlalchemy_url

pytestmark = pytest.mark.anyio

SOME_KINDS = ["psycopg", "psycopg2", "connection on psycopg", "session on psycopg2", "django"]
"""Kinds in which the code differs."""


@pytest.fixture
def anyio_backend():
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(params=SOME_KINDS)
def kind(request):
    return PLAIN_KINDS[request.param]


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


def block(message, given):
    return message.mailbox.backend.thread_transaction(message, given)


def in_thread(test):
    """Run a test that is given fixtures in a worker thread, with a connection of its kind."""

    def run(place, kind, *args):
        with kind.connect(place.url) as given:
            test(place, kind, given, *args)

    return partial(to_thread.run_sync, run)


@pytest.mark.own_time(2)  # the first one with Django also imports it
@pytest.mark.parametrize("kind", PLAIN_KINDS, indirect=True)
async def test_writes_and_acknowledgement_commit_together(place, mailbox, message, kind):
    @in_thread
    def test(place, kind, given):
        users = set()
        with block(message, given) as yielded:
            assert yielded is given
            kind.run(given, insert(place))
            mailbox.sync.send("next", connection=given)
            users.add(threading.get_ident())
            assert effects(place) == []
            assert from_thread.run(mailbox.counts).in_flight == 1
        assert effects(place) == ["done"]
        with pytest.raises(MessageSettledError), block(message, given):
            pytest.fail("a settled message has no transaction")
        with kind.block(given):  # it can be used again
            kind.run(given, insert(place, "more"))

    await test(place, kind)
    assert message.is_settled
    counts = await mailbox.counts()
    assert (counts.settled, counts.pending) == (1, 1)
    assert effects(place) == ["done", "more"]


async def test_an_error_rolls_all_back_and_leaves_the_message_unsettled(place, mailbox, message, kind):
    @in_thread
    def test(place, kind, given):
        with pytest.raises(LookupError), block(message, given):  # noqa: PT012
            kind.run(given, insert(place))
            mailbox.sync.send("never", connection=given)
            raise LookupError
        with pytest.raises(LookupError), block(message, given):  # noqa: PT012
            from_thread.run(partial(message.nack, delay=60))
            raise LookupError
        with pytest.raises(Exception, match="does not exist"), block(message, given):
            kind.run(given, "SELECT * FROM nowhere")
        assert not message.is_settled
        with block(message, given):
            kind.run(given, insert(place, "second"))

    await test(place, kind)
    assert effects(place) == ["second"]
    counts = await mailbox.counts()
    assert (counts.pending, counts.delayed, counts.settled) == (0, 0, 1)


async def test_what_the_block_settles_itself_is_part_of_it(place, mailbox, message, kind):
    @in_thread
    def test(place, kind, given):
        with block(message, given):
            kind.run(given, insert(place))
            from_thread.run(partial(message.nack, delay=60))
            assert from_thread.run(mailbox.counts).in_flight == 1

    await test(place, kind)
    assert effects(place) == ["done"]
    assert (await mailbox.counts()).delayed == 1


async def test_a_lost_lease_rolls_back(place, mailbox, kind):
    await mailbox.send("x")
    (late,) = await mailbox.receive(visibility_timeout=0.1)

    @in_thread
    def test(place, kind, given):
        with pytest.raises(ReceiptHandleExpiredError), block(late, given):  # noqa: PT012
            kind.run(given, insert(place))
            from_thread.run(anyio.sleep, 0.2)
        assert not late.is_settled
        (again,) = from_thread.run(mailbox.receive)
        with block(again, given):
            kind.run(given, insert(place, "again"))

    await test(place, kind)
    assert effects(place) == ["again"]
    assert (await mailbox.counts()).settled == 1


async def test_a_savepoint_in_the_block_may_be_rolled_back(place, mailbox, message, kind):
    @in_thread
    def test(place, kind, given):
        with block(message, given):
            kind.run(given, insert(place, "kept"))
            with pytest.raises(LookupError), kind.savepoint(given):  # noqa: PT012
                kind.run(given, insert(place, "not kept"))
                raise LookupError

    await test(place, kind)
    assert effects(place) == ["kept"]
    assert (await mailbox.counts()).settled == 1


@pytest.mark.parametrize("word", ["ROLLBACK", "COMMIT"])
async def test_a_block_that_ends_its_transaction_itself_settles_nothing(place, mailbox, message, kind, word):
    @in_thread
    def test(place, kind, given):
        told = pytest.raises(TransactionEndedError, match="leave COMMIT and ROLLBACK")
        with suppress(Exception), told, block(message, given):
            kind.run(given, insert(place))
            kind.run(given, word)

    await test(place, kind)
    assert not message.is_settled
    await message.nack()
    assert (await mailbox.counts()).pending == 1


@pytest.mark.parametrize("kind", ["connection on psycopg", "session on psycopg2", "scoped session"], indirect=True)
async def test_a_session_that_began_another_transaction_settles_nothing(place, mailbox, message, kind):
    @in_thread
    def test(place, kind, given):
        with pytest.raises(TransactionEndedError, match="leave COMMIT and ROLLBACK"), block(message, given):  # noqa: PT012
            given.commit()
            kind.run(given, insert(place))
        given.commit()

    await test(place, kind)
    await message.acknowledge()
    assert effects(place) == []


async def test_a_failed_statement_that_the_block_hides_is_told(place, mailbox, message, kind):
    @in_thread
    def test(place, kind, given):
        told = pytest.raises(TransactionEndedError, match="let errors of statements out of it")
        with told, block(message, given), pytest.raises(Exception, match="division by zero"):
            kind.run(given, "SELECT 1 / 0")

    await test(place, kind)
    await message.acknowledge()


async def test_what_django_is_told_to_roll_back_settles_nothing(place, mailbox, message):
    @in_thread
    def test(place, kind, given):
        with pytest.raises(TransactionEndedError), block(message, given):  # noqa: PT012
            kind.run(given, insert(place))
            given.set_rollback(True)

    await test(place, PLAIN_KINDS["django"])
    await message.acknowledge()
    assert effects(place) == []


async def test_what_a_constraint_says_at_the_commit_is_the_handlers_own_affair(place, mailbox, message, kind):
    place.execute(insert(place))

    @in_thread
    def test(place, kind, given):
        with pytest.raises(Exception, match="duplicate key") as caught, block(message, given):
            kind.run(given, insert(place))
        assert not type(caught.value).__module__.startswith("mainspring")
        assert not message.is_settled
        with block(message, given):
            pass

    await test(place, kind)
    assert message.is_settled


async def test_a_lost_connection_is_named(place, mailbox, message, kind):
    @in_thread
    def test(place, kind, given):
        with suppress(Exception), pytest.raises(MailboxConnectionError, match="lost"), block(message, given):
            kind.run(given, "SELECT pg_terminate_backend(pg_backend_pid())")

    await test(place, kind)
    await message.acknowledge()


# ------------------------------------------------------------------------------------------ who begins, and who commits


async def test_what_a_session_has_begun_is_continued_and_committed(place, mailbox, message):
    class Effect:
        def __init__(self, what):
            self.what = what

    table = Table("effects", MetaData(), Column("what", String, primary_key=True), schema=place.schema)
    registry().map_imperatively(Effect, table)

    @in_thread
    def test(place, kind, given):
        kind.run(given, insert(place, "before"))
        with block(message, given):
            given.add(Effect("within"))
        assert not given.in_transaction()

    await test(place, PLAIN_KINDS["session on psycopg"])
    assert effects(place) == ["before", "within"]


@pytest.mark.parametrize("kind", ["psycopg", "psycopg2", "django"], indirect=True)
async def test_a_connection_in_a_transaction_is_refused(place, mailbox, message, kind):
    @in_thread
    def test(place, kind, given):
        with kind.block(given):
            kind.run(given, insert(place))
            with (
                pytest.raises(InvalidParameterError, match=r"is under way.*end the other before"),
                block(message, given),
            ):
                pytest.fail("it cannot be committed")

    await test(place, kind)
    assert effects(place) == ["done"]
    await message.acknowledge()


async def test_what_does_not_fit_is_refused(place, mailbox, message):
    async_connection = await psycopg.AsyncConnection.connect(place.url)

    @in_thread
    def test(place, kind, session):
        with (
            session.begin_nested(),
            pytest.raises(InvalidParameterError, match=r"enter it outside of begin_nested"),
            block(message, session),
        ):
            pytest.fail("it is not the whole")
        session.rollback()
        with pytest.raises(InvalidParameterError, match="transaction: connection must be a psycopg or psycopg2"):
            block(message, object()).__enter__()
        with pytest.raises(InvalidParameterError, match="connection must be a psycopg or psycopg2"):
            block(message, async_connection).__enter__()
        with pytest.raises(ConfigError, match=r"gives its own: with ctx\.transaction\(session\)"):
            block(message, None).__enter__()
        with PLAIN_KINDS["psycopg2"].connect(place.url) as given:
            given.autocommit = True
            with pytest.raises(InvalidParameterError, match="set its autocommit to False"):
                block(message, given).__enter__()
        for level, why in (("REPEATABLE READ", "use READ COMMITTED"), ("AUTOCOMMIT", "is in AUTOCOMMIT; use one")):
            engine = create_engine(sqlalchemy_url(place.url, "psycopg"), isolation_level=level)
            with Session(engine) as other, pytest.raises(InvalidParameterError, match=why):
                block(message, other).__enter__()
            engine.dispose()
        (second,) = from_thread.run(mailbox.receive)
        with block(message, session), pytest.raises(InvalidParameterError, match="transaction of another message"):
            block(second, session).__enter__()
        with PLAIN_KINDS["psycopg"].connect(place.url) as given:
            given.close()
            with pytest.raises(MailboxConnectionError, match="closed"):
                block(second, given).__enter__()
        place.execute("UPDATE SCHEMA.store SET id = 'another'")
        with pytest.raises(InvalidParameterError, match="not to the database of the mailbox"):
            block(second, session).__enter__()

    await mailbox.send("second")
    async with async_connection:
        await test(place, PLAIN_KINDS["session on psycopg"])
    assert message.is_settled


# --------------------------------------------------------------------------------------------------------------- loops


async def test_in_a_loop_effects_happen_once_however_often_it_is_tried(place, mailbox, kind):
    tried = []
    await in_thread(lambda *_: None)(place, kind)  # Django is set up here, not by two threads at once

    def handle(job: int, ctx: Context) -> None:
        tried.append(job)
        with kind.connect(place.url) as given, ctx.transaction(given):
            kind.run(given, insert(place, str(job)))
            if ctx.attempt == 1 and job % 2 == 0:
                raise Retry(0)

    await mailbox.send_many(range(4))
    group = LoopGroup([MainLoop(mailbox, handle, concurrency=2)], guardian=False)
    await group.run(install_signals=False, until_empty=True)
    assert effects(place) == ["0", "1", "2", "3"]
    assert len(tried) == 6


@pytest.mark.parametrize("what", ["reply", "acknowledge"])
async def test_a_handler_that_is_cancelled_still_commits_and_its_result_with_it(place, mailbox, what):
    tasks = Tasks(place.mailbox("other"))
    begun, go = threading.Event(), threading.Event()

    @tasks.task(timeout=0.1)
    def work(ctx: Context, what: str) -> str:
        with psycopg.connect(place.url) as given, ctx.transaction(given):
            given.execute(insert(place, what))
            begun.set()
            assert go.wait(10)
            if what == "reply":
                from_thread.run(ctx.message.reply, what)
        return what

    async with LoopGroup([tasks.loop()], guardian=False), anyio.create_task_group() as requests:

        async def request():
            assert await work.request(what, timeout=20) == what

        requests.start_soon(request)
        assert await to_thread.run_sync(begun.wait, 10)
        await anyio.sleep(0.2)
        go.set()
    assert effects(place) == [what]


async def test_misuse_is_one_line_and_the_message_dead_at_once(place, mailbox):
    def plain(job: str, ctx: Context) -> None:
        with ctx.transaction():
            pytest.fail("it has no connection")

    async def in_the_loop(job: str, ctx: Context) -> None:
        with psycopg.connect(place.url) as given, ctx.transaction(given):
            pytest.fail("it would block the event loop")

    def without(job: str, ctx: Context) -> None:
        with ctx.transaction(object()):
            pytest.fail("there are none")

    async with InMemoryMailbox("jobs", body=str) as memory:
        for box, handle, why in (
            (mailbox, plain, "gives its own: with ctx.transaction(session)"),
            (mailbox, in_the_loop, "for plain `def` handlers; write `async with` here"),
            (memory, without, "'jobs' has no transactions (Capabilities.transactions); a postgresql:// mailbox has"),
        ):
            await box.send("x")
            await LoopGroup([MainLoop(box, handle)], guardian=False).run(install_signals=False, until_empty=True)
            (dead,) = await box.dead_letters()
            assert dead.error_type == "ConfigError"
            assert "\n" not in dead.error
            assert why in dead.error
            await box.purge_dead_letters()
