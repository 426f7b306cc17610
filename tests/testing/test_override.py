"""``override``: groups and tasks on memory in the place of their stores, of which nothing is opened."""

from __future__ import annotations

import gc
import socket
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

import anyio
import pytest
from anyio import from_thread

from mainspring import (
    ConfigError,
    Context,
    DeadLetter,
    DeadLetterPolicy,
    DLQConsumer,
    InMemoryMailbox,
    LoopGroup,
    MailboxClosedError,
    MailboxFullError,
    MainLoop,
    MessageSettledError,
    ReceiptHandleExpiredError,
    RetryPolicy,
    Tasks,
    open_mailbox,
)
from mainspring.testing import override
from ports import free_port

pytestmark = pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])

POSTGRES = "postgresql://nobody@127.0.0.1:1/nothing"
REDIS = "redis://127.0.0.1:1/0"
NATS = "nats://127.0.0.1:1"
SQLITE = "sqlite:////nowhere/at/all.db"


def url(store: str, name: str) -> str:
    return f"{store}?name={name}"


@pytest.fixture(params=[POSTGRES, REDIS, NATS, SQLITE], ids=["postgres", "redis", "nats", "sqlite"])
def store(request: pytest.FixtureRequest) -> str:
    """The URL of a store that cannot be opened."""
    return str(request.param)


async def run(group: LoopGroup) -> None:
    await group.run(install_signals=False, until_empty=True)


async def test_the_real_group_runs_and_its_store_is_not_opened(virtual_clock: Any, store: str) -> None:
    orders = open_mailbox(url(store, "orders"), body=int)
    seen: list[Any] = []

    async def handle(number: int, ctx: Context) -> None:
        seen.append((number, ctx.attempt, ctx.resources, virtual_clock.now))
        if ctx.attempt == 1:
            raise ConnectionError("not yet")

    @asynccontextmanager
    async def lifespan() -> Any:
        yield "opened"

    loop = MainLoop(orders, handle, retry=RetryPolicy(initial_delay=30, jitter="none"))
    group = LoopGroup([loop], lifespan=lifespan)
    before = orders.backend
    with override(group):
        async with orders:
            await orders.send(7)
            await run(group)
            assert await orders.approximate_count() == 0
        assert orders.name == "orders"
    (number, attempt, resources, began), (_, again, _, later) = seen
    assert (number, attempt, again, resources, later - began) == (7, 1, 2, "opened", 30)
    assert orders.backend is before


async def test_resources_of_the_test_stand_in_for_those_of_the_group(virtual_clock: Any) -> None:
    seen: list[Any] = []
    tasks = Tasks(url(POSTGRES, "orders"))

    @tasks.task
    async def book(ctx: Context, number: int) -> None:
        seen.append(ctx.resources)

    @asynccontextmanager
    async def lifespan() -> Any:
        yield "real"

    group = LoopGroup([tasks.loop()], lifespan=lifespan)
    plain = LoopGroup([tasks.loop()])
    for given in ("fake", {"of": "the inner block"}, None):
        with override(group, plain, resources="fake"), override(group, resources=given):
            for one in (group, plain):
                async with tasks:
                    await book.send(7)
                await run(one)
    assert seen == ["fake", "fake", {"of": "the inner block"}, "fake", "fake", "fake"]
    with override(group):
        async with tasks:
            await book.send(7)
        await run(group)
    assert seen[-1] == "real"
    with pytest.raises(ConfigError, match="resources are those of a group"), override(tasks, resources="fake"):
        pass


async def test_the_port_of_the_health_server_stays_free(virtual_clock: Any) -> None:
    port = free_port()
    seen: list[Any] = []

    async def handle(number: int) -> None:
        with socket.create_server(("127.0.0.1", port)):
            seen.append((number, group.health_url))

    orders = open_mailbox(url(POSTGRES, "orders"), body=int)
    group = LoopGroup([MainLoop(orders, handle)], health_port=port)
    with override(group):
        async with orders:
            await orders.send(7)
            await run(group)
    assert seen == [(7, None)]
    assert group.settings.health_port == port


async def test_it_must_be_opened_as_there_and_what_it_kept_is_seen_after_a_run(virtual_clock: Any) -> None:
    async def fail(number: int) -> None:
        raise ValueError("broken")

    orders = open_mailbox(url(POSTGRES, "orders"))
    group = LoopGroup([MainLoop(orders, fail, dead_letter=DeadLetterPolicy(max_attempts=1))])
    with override(group):
        with pytest.raises(MailboxClosedError):
            await orders.send(7)
        async with orders:
            await orders.send(7)
        await run(group)
        async with orders:
            (letter,) = await orders.dead_letters()
            assert (letter.body, letter.error) == (7, "broken")
    with override(group):  # each block begins with empty queues
        async with orders:
            assert await orders.dead_letters() == []


@pytest.mark.parametrize("store", [POSTGRES, REDIS, SQLITE])
async def test_settings_that_memory_can_keep_hold(virtual_clock: Any, store: str) -> None:
    orders = open_mailbox(url(store, "orders"), body=int, capacity=2)
    with override(orders):
        async with orders:
            await orders.send_many([1, 2])
            with pytest.raises(MailboxFullError):
                await orders.send(3)


async def test_tasks_are_sent_run_and_asked_for_results(virtual_clock: Any, store: str) -> None:
    tasks = Tasks(url(store, "calls"))

    @tasks.task
    async def double(number: int) -> int:
        await anyio.sleep(10)
        return 2 * number

    with override(tasks):
        async with tasks, LoopGroup([tasks.loop()]):
            assert await double.request(21) == 42
            assert virtual_clock.now >= 10
            first, second = [await double.options(unique=True).send(1) for _ in range(2)]
            assert (first.new, second.new) == (True, False)


async def test_threads_that_are_not_async_use_it_too(anyio_backend: Any) -> None:
    tasks = Tasks(url(POSTGRES, "calls"))

    @tasks.task
    async def double(number: int) -> int:
        return 2 * number

    def plain() -> int:
        with override(tasks), tasks.sync:
            double.sync.send(21)
            return tasks.sync.approximate_count()

    assert await anyio.to_thread.run_sync(plain) == 1


async def test_mailboxes_of_one_store_see_each_other_by_name_and_by_url(virtual_clock: Any) -> None:
    orders, again = (open_mailbox(url(REDIS, "orders"), body=int) for _ in range(2))
    receipts = open_mailbox(url(REDIS, "receipts"))
    elsewhere = open_mailbox(url("redis://127.0.0.1:2/0", "orders"), body=int)

    async def handle(number: int) -> int:
        return number + 1

    group = LoopGroup([MainLoop(orders, handle)])
    with override(group, again, receipts, elsewhere):
        async with again, receipts, elsewhere:
            await again.send(1, reply_to="receipts")
            await again.send(2, reply_to=url(REDIS, "receipts"))
            await elsewhere.send(3)
            await run(group)
            replies = await receipts.receive(max_messages=10)
            assert [reply.body for reply in replies] == [2, 3]
            assert await elsewhere.approximate_count() == 1


async def test_replies_to_other_stores_stay_in_memory_too(virtual_clock: Any) -> None:
    receipts = open_mailbox(url(REDIS, "receipts"))
    orders = open_mailbox(url(POSTGRES, "orders"), body=int, reply_stores=[receipts])

    async def handle(number: int) -> int:
        return number + 1

    group = LoopGroup([MainLoop(orders, handle)])
    with override(group):
        async with orders, receipts:
            await orders.send(1, reply_to=url(REDIS, "receipts"))
            await run(group)
            (reply,) = await receipts.receive()
            assert reply.body == 2


async def test_a_loop_of_dead_letters_has_those_in_memory(virtual_clock: Any) -> None:
    orders = open_mailbox(url(POSTGRES, "orders"), body=int)
    buried: list[Any] = []

    async def fail(number: int) -> None:
        raise ValueError("broken")

    async def bury(letter: DeadLetter[int]) -> None:
        buried.append(letter.body)

    consumer = DLQConsumer(orders, bury)
    group = LoopGroup([MainLoop(orders, fail, dead_letter=DeadLetterPolicy(max_attempts=1)), consumer])
    before = consumer.mailbox.backend
    with override(group):
        async with orders:
            await orders.send(7)
            async with group:
                await anyio.sleep(100)
            assert buried == [7]
            assert await orders.dead_letters() == []
    assert consumer.mailbox.backend is before


# --------------------------------------------------------------------------------------------------------- transactions


class FakeConnection:
    """What a test gives in the place of the driver's connection."""

    def __init__(self) -> None:
        self.executed: list[str] = []

    async def execute(self, statement: str) -> None:
        self.executed.append(statement)


async def test_a_transaction_yields_the_stand_in_and_settles_at_its_end(virtual_clock: Any) -> None:
    orders, audit = (open_mailbox(url(POSTGRES, name), body=int) for name in ("orders", "audit"))
    fake = FakeConnection()

    async def handle(number: int, ctx: Context) -> None:
        async with ctx.transaction() as connection:
            await connection.execute("INSERT")
            await audit.send(number, connection=connection)
            with pytest.raises(MessageSettledError, match="in a transaction"):
                async with ctx.transaction():
                    pass
            assert (await orders.counts()).in_flight == 1
            assert await audit.approximate_count() == 0
            if ctx.attempt == 1:
                raise ConnectionError("after the send")
        assert (await orders.counts()).in_flight == 0
        assert await audit.approximate_count() == 1

    group = LoopGroup([MainLoop(orders, handle, retry=RetryPolicy(1))])
    with override(group, audit, connection=fake):
        async with orders, audit:
            await orders.send(7, connection=object())
            await run(group)
            assert fake.executed == ["INSERT", "INSERT"]
            (message,) = await audit.receive(max_messages=10)
            assert message.body == 7
            assert await orders.dead_letters() == []


class FakeSession(FakeConnection):
    async def commit(self) -> None:
        self.executed.append("commit")

    async def rollback(self) -> None:
        self.executed.append("rollback")


class FakeDriver(FakeConnection):
    @asynccontextmanager
    async def transaction(self) -> Any:
        try:
            yield
        except BaseException:
            self.executed.append("rollback")
            raise
        self.executed.append("commit")


@pytest.mark.parametrize(
    ("kind", "ends"),
    [(FakeSession, ["rollback", "commit"]), (FakeDriver, ["rollback", "commit"]), (FakeConnection, [])],
)
async def test_a_session_of_the_handlers_own_is_yielded_and_ended(
    virtual_clock: Any, kind: type[FakeConnection], ends: list[str]
) -> None:
    orders, audit = (open_mailbox(url(POSTGRES, name), body=int) for name in ("orders", "audit"))
    session = kind()

    async def handle(number: int, ctx: Context) -> None:
        async with ctx.transaction(session) as given:
            assert given is session
            await audit.send(number, connection=session)
            if ctx.attempt == 1:
                raise ConnectionError("after the send")

    group = LoopGroup([MainLoop(orders, handle, retry=RetryPolicy(1))])
    with override(group, audit):
        async with orders, audit:
            await orders.send(7)
            await run(group)
            assert session.executed == ends
            assert await audit.approximate_count() == 1
            assert (await orders.counts()).settled == 1


class PlainFakeSession:
    def __init__(self) -> None:
        self.executed: list[str] = []

    def commit(self) -> None:
        self.executed.append("commit")

    def rollback(self) -> None:
        self.executed.append("rollback")


class PlainFakeDriver(PlainFakeSession):
    @contextmanager
    def transaction(self) -> Any:
        try:
            yield
        except BaseException:
            self.rollback()
            raise
        self.commit()


@pytest.mark.parametrize("kind", [PlainFakeSession, PlainFakeDriver])
async def test_a_plain_handlers_session_is_ended_too(virtual_clock: Any, kind: type[PlainFakeSession]) -> None:
    orders, audit = (open_mailbox(url(POSTGRES, name), body=int) for name in ("orders", "audit"))
    session = kind()

    def handle(number: int, ctx: Context) -> None:
        if number == 8:
            with ctx.transaction():
                pytest.fail("it has no connection, as on the store")
        with ctx.transaction(session) as given:
            assert given is session
            audit.sync.send(number, connection=session)
            with pytest.raises(MessageSettledError, match="in a transaction"), ctx.transaction(session):
                pass
            assert audit.sync.approximate_count() == 0
            if ctx.attempt == 1:
                raise ConnectionError("after the send")
            from_thread.run(ctx.message.dead_letter, "as the block says")

    group = LoopGroup([MainLoop(orders, handle, retry=RetryPolicy(1))])
    with override(group, audit):
        async with orders, audit:
            await orders.send_many([7, 8])
            await run(group)
            assert session.executed == ["rollback", "commit"]
            assert await audit.approximate_count() == 1
            errors = {dead.error.partition(";")[0] for dead in await orders.dead_letters()}
            assert errors == {"as the block says", "ctx.transaction() lends an async connection"}


async def test_what_the_block_settles_counts_at_its_end(virtual_clock: Any) -> None:
    orders = open_mailbox(url(POSTGRES, "orders"), body=int)
    with override(orders, connection="stand-in"):
        async with orders:
            await orders.send_many([1, 2, 3])
            nacked, rolled_back, late = await orders.receive(max_messages=3, visibility_timeout=60)
            async with orders.transaction(nacked) as connection:
                assert connection == "stand-in"
                await nacked.nack(delay=5)
                assert (await orders.counts()).in_flight == 3
            assert (await orders.counts()).delayed == 1
            with suppress(LookupError):
                async with orders.transaction(rolled_back):
                    await rolled_back.dead_letter("broken")
                    raise LookupError
            assert not rolled_back.is_settled
            await rolled_back.acknowledge()
            with pytest.raises(ReceiptHandleExpiredError):
                async with orders.transaction(late):
                    await anyio.sleep(61)
            assert await orders.dead_letters() == []


async def test_joined_acknowledgements_leave_a_transaction_alone(virtual_clock: Any) -> None:
    orders = open_mailbox(url(POSTGRES, "orders"), body=int)
    with override(orders, connection="stand-in"):
        async with orders:
            await orders.send_many([1, 2])
            first, second = await orders.receive(max_messages=2)
            async with orders.transaction(first):
                assert await orders.acknowledge_many([first, second]) == {}
                assert (await orders.counts()).in_flight == 1
            assert (await orders.counts()).in_flight == 0


async def test_a_transaction_without_a_stand_in_says_what_to_give(virtual_clock: Any) -> None:
    orders, jobs = open_mailbox(url(POSTGRES, "orders"), body=int), open_mailbox(url(REDIS, "jobs"), body=int)
    with override(orders, jobs):
        async with orders, jobs:
            await orders.send(1)
            await jobs.send(1)
            for mailbox, remedy in ((orders, r"override\(…, connection=…\)"), (jobs, "has no transactions")):
                (message,) = await mailbox.receive()
                with pytest.raises(ConfigError, match=remedy):
                    async with mailbox.transaction(message):
                        pass


# ------------------------------------------------------------------------------------------------------------- misuse


async def test_an_open_mailbox_is_refused_at_both_ends(virtual_clock: Any, tmp_path: Any) -> None:
    orders = open_mailbox(url(f"sqlite:///{tmp_path}/orders.db", "orders"), body=int)
    before = orders.backend
    async with orders:
        with pytest.raises(ConfigError, match="mailbox 'orders' is open; enter override"), override(orders):
            pass
        await orders.send(1)
    inside = override(orders)
    inside.__enter__()
    async with orders:
        with pytest.raises(ConfigError, match="mailbox 'orders' is open; end its group"):
            inside.__exit__(None, None, None)
        await orders.send(2)
    assert orders.backend is not before
    orders.backend = before
    async with orders:
        assert await orders.approximate_count() == 1


async def test_an_error_in_the_block_restores_all(virtual_clock: Any) -> None:
    orders = open_mailbox(url(POSTGRES, "orders"))
    before = orders.backend
    with pytest.raises(LookupError), override(orders):
        raise LookupError
    assert orders.backend is before


async def test_mailboxes_in_memory_stay_and_other_things_are_refused(virtual_clock: Any) -> None:
    jobs = InMemoryMailbox("jobs")
    before = jobs.backend
    with override(jobs):
        assert jobs.backend is before
    with (
        pytest.raises(ConfigError, match="override takes groups, tasks, loops and mailboxes, not 'jobs'"),
        override("jobs"),
    ):  # type: ignore[arg-type]
        pass


async def test_blocks_nest(virtual_clock: Any) -> None:
    orders = open_mailbox(url(POSTGRES, "orders"), body=int)
    with override(orders):
        async with orders:
            await orders.send(1)
        with override(orders):
            async with orders:
                assert await orders.approximate_count() == 0
        async with orders:
            assert await orders.approximate_count() == 1


async def test_a_request_in_an_inner_block_is_answered(virtual_clock: Any) -> None:
    tasks = Tasks(url(POSTGRES, "orders"))

    @tasks.task
    async def total(n: int) -> int:
        return n + 1

    with override(tasks), override(tasks):
        async with tasks, LoopGroup([tasks.loop()]):
            assert await total.request(1, timeout=5) == 2


async def test_what_is_of_the_real_store_only_is_named(virtual_clock: Any) -> None:
    orders = open_mailbox(url(POSTGRES, "orders"))
    with override(orders), pytest.raises(AttributeError, match="in memory inside the block of override"):
        _ = orders.transactions  # type: ignore[attr-defined]
    gc.collect()
