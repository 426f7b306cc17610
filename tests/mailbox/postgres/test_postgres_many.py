"""Many PostgreSQL mailboxes in one process: what they share, and that each has its own all the same."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack

import anyio
import pytest
from test_postgres_waiting import two_processes

from mainspring import LoopGroup, MailboxConnectionError, MailboxError, MailboxFullError, MainLoop, MainspringError
from mainspring.mailbox.postgres.commands import Statement
from mainspring.mailbox.postgres.connection import WORKING, ConnectionPool
from postgres_support import receiving, until

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    return "asyncio", {"use_uvloop": True}


def damage(place, *names):
    """Let the server refuse to move the messages of these mailboxes."""
    numbers = ", ".join(str(place.number(name)) for name in names)
    place.execute("CREATE FUNCTION SCHEMA.fail() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'damaged'; END $$")
    place.execute(
        f"""CREATE TRIGGER fault BEFORE UPDATE ON SCHEMA.messages FOR EACH ROW
        WHEN (new.mailbox IN ({numbers})) EXECUTE FUNCTION SCHEMA.fail()"""
    )


async def counted(place, name, counts):
    """Add to ``counts``, again and again, how many connections of that application there are."""
    # Not the server's processes that help with a query: they have the name of its connection.
    who = "application_name = %s AND backend_type = 'client backend'"
    async with await place.connect(autocommit=True) as connection:
        while True:
            answer = await connection.execute(f"SELECT count(*) FROM pg_stat_activity WHERE {who}", (name,))
            counts.extend(number for (number,) in await answer.fetchall())
            await anyio.sleep(0.01)


def are_few(counts):
    """True if one listened and the others worked, but for moments in which a machine under load held a call up."""
    return sum(number > WORKING + 1 for number in counts) <= len(counts) / 10


@pytest.mark.slow
async def test_many_that_wait_share_three_connections_and_each_gets_its_message(place):
    """While they start, while they wait, and when a message comes to each."""
    got, counts = [], []

    async def handle(job: int) -> None:
        got.append(job)

    mailboxes = [place.mailbox(f"jobs-{n}", application_name="many-that-wait") for n in range(60)]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(counted, place, "many-that-wait", counts)
        async with (
            place.mailbox(application_name="sender") as sender,
            LoopGroup([MainLoop(mailbox, handle, name=mailbox.name) for mailbox in mailboxes]),
        ):
            await until(lambda: all(mailbox.statistics().waiting_receives for mailbox in mailboxes))
            for n, mailbox in enumerate(mailboxes):
                place.execute(
                    "SELECT SCHEMA.send(%s, ARRAY[%s], ARRAY[%s::bytea])", place.number(mailbox.name), f"{n}", f"{n}"
                )
            await until(lambda: len(got) == len(mailboxes))
            await until(lambda: counts[-1] == WORKING + 1)
            assert sorted(got) == list(range(len(mailboxes)))
            assert sender.statistics().waiting_receives == 0
        tasks.cancel_scope.cancel()
    assert are_few(counts)


@pytest.mark.slow
async def test_forty_busy_mailboxes_share_three_connections(place):
    """Loops that handle and senders that send, in all of them at the same time."""
    done, counts = [], []

    async def handle(job: int) -> None:
        done.append(job)

    mailboxes = [place.mailbox(f"jobs-{n}", application_name="forty-busy") for n in range(40)]

    async def send(mailbox) -> None:
        for number in range(10):
            await mailbox.send(number)

    async with LoopGroup([MainLoop(mailbox, handle, name=mailbox.name, concurrency=10) for mailbox in mailboxes]):
        await until(lambda: all(mailbox.statistics().waiting_receives for mailbox in mailboxes))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(counted, place, "forty-busy", counts)
            async with anyio.create_task_group() as senders:
                for mailbox in mailboxes:
                    senders.start_soon(send, mailbox)
            await until(lambda: len(done) == 40 * 10)
            tasks.cancel_scope.cancel()
    assert len(counts) > 10
    assert are_few(counts)


@pytest.mark.slow
async def test_calls_that_wait_for_a_lock_hold_up_no_other(place):
    """More of them than there are connections for quick calls. Each has an end: here that of the lock."""
    outcomes = []
    held, other = place.mailbox("held"), place.mailbox("other")
    async with held, other, await place.connect() as blocker, anyio.create_task_group() as tasks:
        ids = await held.send_many(list(range(5)))
        await blocker.execute(f"SELECT FROM {place.schema}.messages WHERE id = ANY (%s) FOR UPDATE", (ids,))

        async def cancel(message_id) -> None:
            outcomes.append(await held.cancel(message_id))

        for message_id in ids:
            tasks.start_soon(cancel, message_id)
        waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE %s"
        await until(lambda: place.execute(waiting, f"%{place.schema}.cancel%")[0][0] == len(ids))
        with anyio.fail_after(5):
            for number in range(20):
                await other.send(number)
                await held.send(number)
            assert len(await other.receive(max_messages=20)) == 20
            assert (await held.counts()).pending == 25
        assert not outcomes
        await blocker.rollback()
    assert len(outcomes) == len(ids)


@pytest.mark.slow
async def test_a_wait_for_a_lock_ends_by_the_timeout_and_so_does_one_for_a_turn(place):
    """No batch goes on while the tables are locked. Batches with a connection and batches in line have the same end."""
    mailboxes = [place.mailbox(f"jobs-{n}", timeout=2) for n in range(20)]
    async with AsyncExitStack() as stack:
        for mailbox in mailboxes:
            await stack.enter_async_context(mailbox)
        errors = []

        async def send(mailbox) -> None:
            with pytest.raises(MailboxConnectionError, match=r"within 2 s$|no connection was free in time") as caught:
                await mailbox.send("x")
            errors.append(caught.value)

        async with await place.connect() as blocker:
            await blocker.execute(f"LOCK TABLE {place.schema}.messages")
            began = anyio.current_time()
            async with anyio.create_task_group() as tasks:
                for mailbox in mailboxes:
                    tasks.start_soon(send, mailbox)
            assert anyio.current_time() - began < 10
            await blocker.rollback()
        assert len(errors) == len(mailboxes)
        for mailbox in mailboxes:
            await mailbox.send("y")
            assert (await mailbox.counts()).pending == 1


@pytest.mark.slow
async def test_those_that_open_together_are_asked_about_together(place):
    """Neither their opening nor their first receives take a transaction each, and what is there already is received."""
    mailboxes, got = [place.mailbox(f"{n}") for n in range(60)], []
    async with place.mailbox("0") as sender:
        await sender.send("before")

    async def open_and_receive(mailbox) -> None:
        async with mailbox:
            got.extend(await mailbox.receive(wait_time_seconds=60))

    async with place.mailbox(), anyio.create_task_group() as tasks:
        for mailbox in mailboxes:
            tasks.start_soon(open_and_receive, mailbox)
        await until(lambda: got and all(mailbox.statistics().waiting_receives for mailbox in mailboxes[1:]))
        assert [message.body for message in got] == ["before"]
        assert mailboxes[1].transactions < len(mailboxes)
        tasks.cancel_scope.cancel()


async def test_those_that_open_together_have_opened_at_the_same_time(place):
    """They do not go on one after the other: on a busy event loop the last one would have no time left."""
    turns, opened = 0, []

    async def count_turns() -> None:
        nonlocal turns
        while True:
            await anyio.lowlevel.checkpoint()
            turns += 1

    async def open_one(number) -> None:
        async with place.mailbox(f"{number}", listen=False):
            opened.append(turns)
            await until(lambda: len(opened) == 50)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(count_turns)
        async with anyio.create_task_group() as openings:
            for number in range(50):
                openings.start_soon(open_one, number)
        tasks.cancel_scope.cancel()
    assert opened[-1] - opened[1] < 20  # the first one may have opened alone


LEFT = "SELECT count(*) FROM pg_stat_activity WHERE pid = ANY (%s)"


async def test_connections_of_calls_that_were_held_up_are_closed_when_these_end(place):
    pool = ConnectionPool(place.url, timeout=20)
    pool.keep_open()
    processes = []
    async with anyio.create_task_group() as calls:
        for _ in range(5):
            statement = Statement(b"SELECT pg_backend_pid(), pg_sleep(0.5)", (), processes.extend)
            calls.start_soon(pool.run, [statement], None, anyio.Semaphore(1))
    numbers = [number for number, _ in processes]
    assert len(set(numbers)) == 5
    await until(lambda: place.execute(LEFT, numbers)[0][0] == WORKING)
    await pool.run([statement])
    assert processes[-1][0] in numbers
    await pool.close()


@pytest.mark.slow
async def test_connections_of_many_transactions_at_once_are_closed_when_they_are_not_used_any_more(place):
    """Those of handlers, which need as many of them again soon."""
    pool = ConnectionPool(place.url, timeout=20, silence=1)
    pool.keep_open()
    async with anyio.create_task_group() as tasks:
        async with AsyncExitStack() as stack:
            lent = [await stack.enter_async_context(pool.connection(0)) for _ in range(5)]
            numbers = [connection.info.backend_pid for connection in lent]
        assert place.execute(LEFT, numbers) == [(5,)]
        tasks.start_soon(pool.watch)
        await until(lambda: place.execute(LEFT, numbers)[0][0] == WORKING)
        tasks.cancel_scope.cancel()
    await pool.close()


@pytest.mark.slow
async def test_an_error_of_one_mailbox_costs_the_others_no_connection(place):
    """The server has refused a statement, and goes on with the connection."""
    made = "SELECT pid FROM pg_stat_activity WHERE application_name = 'two-that-call' ORDER BY pid"
    one, other = (place.mailbox(name, application_name="two-that-call", listen=False, capacity=2) for name in "ab")
    async with one, other:
        await one.send_many([1, 2])
        connections = place.execute(made)
        place.execute(
            "CREATE FUNCTION SCHEMA.fail() RETURNS trigger LANGUAGE plpgsql AS"
            " $$ BEGIN RAISE '%%', new.body USING ERRCODE = convert_from(new.body, 'UTF8'); END $$"
        )
        place.execute(
            "CREATE TRIGGER fault BEFORE INSERT ON SCHEMA.messages FOR EACH ROW EXECUTE FUNCTION SCHEMA.fail()"
        )
        with pytest.raises(MailboxFullError):
            await one.send(3)
        for code in (23514, 42501, 57014, 53100, 55000):  # a check, a right, a cancellation, no space, not now
            with pytest.raises(MainspringError):
                await other.send(code)
        assert place.execute(made) == connections
        assert one.statistics().reconnects == other.statistics().reconnects == 0


async def test_a_call_that_waits_for_its_turn_in_vain_costs_no_connection(place):
    """Where very many mailboxes are busy, new connections would only make it worse."""
    pool = ConnectionPool(place.url, timeout=20)
    pool.keep_open()
    processes = []
    process = Statement(b"SELECT pg_backend_pid()", (), processes.extend)
    await pool.run([process])
    with pytest.raises(MailboxConnectionError, match=r"did not answer within 0\.1 s"):
        await pool.run([process], 0.1, anyio.Semaphore(0))
    await pool.run([process])
    assert processes == processes[:1] * 2
    await pool.close()


@pytest.mark.slow
async def test_a_call_that_takes_too_long_costs_the_others_no_connection(place):
    """The server has answered to its cancellation."""
    pool = ConnectionPool(place.url, timeout=20)
    pool.keep_open()
    processes = []
    process = Statement(b"SELECT pg_backend_pid()", (), processes.extend)
    async with pool.connection():
        await pool.run([process])
    with pytest.raises(MailboxConnectionError, match="did not answer within 6 s"):
        await pool.run([Statement(b"SELECT pg_sleep(60)", ())], 6)
    assert pool.connected
    await pool.run([process])
    assert processes == processes[:1] * 2
    await pool.close()


@pytest.mark.slow
async def test_one_poll_asks_for_all_that_wait(place):
    three = a, b, c = [place.mailbox(name) for name in "abc"]
    async with a, b, c, receiving(a), receiving(b), receiving(c):
        await anyio.sleep(2.5)  # until the tables have been looked after
        before, asked = a.transactions, [mailbox.statistics().batches for mailbox in three]
        await until(lambda: a.transactions >= before + 3)
        assert [mailbox.statistics().batches for mailbox in three] == [one + 3 for one in asked]
        for mailbox in three:
            await mailbox.send("x")


@pytest.mark.slow
async def test_an_acknowledgement_and_the_next_claim_share_a_call(place):
    """Each handler takes longer than what a loop claims ahead, so that each message has a claim of its own."""

    async def handle(body: int) -> None:
        await anyio.sleep(0.06)

    async with place.mailbox() as mailbox:
        await mailbox.send_many(list(range(10)))
        before = mailbox.statistics().batches
        async with MainLoop(mailbox, handle) as loop:
            await until(lambda: loop.outcomes["acknowledged"] == 10)
        assert mailbox.statistics().batches - before <= 13


@pytest.mark.slow
async def test_a_receive_asks_nothing_while_the_mailbox_is_known_to_be_empty(place):
    async with two_processes(place) as (receiver, sender):
        with anyio.move_on_after(1):
            await receiver.receive(wait_time_seconds=60)
        asked = receiver.statistics().batches
        for _ in range(5):
            with anyio.move_on_after(0.02):
                await receiver.receive(wait_time_seconds=60)
        assert receiver.statistics().batches == asked
        await sender.send("while no receive waits")
        began = time.monotonic()
        (message,) = await receiver.receive(wait_time_seconds=60)
        assert message.body == "while no receive waits"
        assert time.monotonic() - began < 5
        assert await receiver.receive(wait_time_seconds=0.01) == []  # too short for a poll: it asks itself
        assert receiver.statistics().batches > asked + 1


@pytest.mark.slow
async def test_a_delay_is_waited_for_by_the_mailbox_that_stays(place):
    leave = anyio.Event()

    async def be_first(*, task_status):
        async with place.mailbox("first"):
            task_status.started()
            await leave.wait()

    async with anyio.create_task_group() as tasks:
        await tasks.start(be_first)
        async with place.mailbox("second", poll_interval=30) as second, receiving(second) as got:
            await second.send("x", delay=0.5)
            leave.set()
            with anyio.fail_after(5):
                await until(lambda: got)


@pytest.mark.slow
async def test_a_mailbox_that_is_dropped_fails_its_receive_and_no_other(place):
    async with place.mailbox("dropped") as dropped, place.mailbox("stays") as stays, receiving(stays):
        async with anyio.create_task_group() as tasks:

            async def receive() -> None:
                with pytest.raises(MailboxError, match="dropped"):
                    await dropped.receive(wait_time_seconds=60)

            tasks.start_soon(receive)
            await until(lambda: dropped.statistics().waiting_receives)
            place.execute("SELECT SCHEMA.drop_mailbox(%s)", place.number("dropped"))
        await stays.send("x")


@pytest.mark.slow
async def test_a_poll_that_the_server_refuses_ends_no_mailbox(place):
    """Its tables may be in the middle of a migration, or damaged: the receives find out by calls of their own."""
    async with place.mailbox("a") as a, place.mailbox("b") as b, receiving(a), receiving(b):
        place.execute(
            """CREATE OR REPLACE FUNCTION SCHEMA.poll_all(boxes integer[], sinces float8[]) RETURNS TABLE (
                box integer, pending integer, due_in float8, newly_listening boolean, moved integer, polled_at float8
            ) LANGUAGE plpgsql AS $$ BEGIN RAISE 'cache lookup failed' USING ERRCODE = 'XX000'; END $$"""
        )
        asked = b.statistics().batches
        await until(lambda: b.statistics().batches > asked + 2)
        await a.send("x")
        await b.send("x")


@pytest.mark.slow
async def test_a_poll_that_fails_for_one_mailbox_does_not_fail_for_the_others(place):
    """They are polled for in the same statement, and need no calls of their own."""

    async def receive_in_vain(mailbox):
        with pytest.raises(MailboxError, match="damaged"):
            await mailbox.receive(wait_time_seconds=60)

    mailboxes = [place.mailbox(f"{n}") for n in range(33)]
    broken, others = mailboxes[:3], mailboxes[3:]
    async with AsyncExitStack() as stack:
        for mailbox in mailboxes:
            await stack.enter_async_context(mailbox)
        got = [await stack.enter_async_context(receiving(mailbox)) for mailbox in others]
        await anyio.sleep(2.5)  # until the tables have been looked after
        damage(place, *(mailbox.name for mailbox in broken))
        before = mailboxes[0].transactions
        async with anyio.create_task_group() as tasks:
            for number, mailbox in enumerate(broken, 1):
                await mailbox.send("x", delay=0.3 * number)  # one of these is when most others are polled for
                tasks.start_soon(receive_in_vain, mailbox)
        await anyio.sleep(0.5)
        assert mailboxes[0].transactions < before + len(others)
        for mailbox in others:
            await mailbox.send("x")
        await until(lambda: all(got))


@pytest.mark.slow
async def test_a_mailbox_whose_poll_fails_is_left_out_of_the_next_ones(place):
    """Its receives raise, so none waits there until the store can do its work again."""
    failed = 0
    broken, *others = [place.mailbox(name) for name in "abcd"]

    async def receive() -> None:
        nonlocal failed
        while True:
            try:
                await broken.receive(wait_time_seconds=60)
            except MailboxError:
                failed += 1
                await anyio.sleep(0.1)

    async with (
        broken, others[0], others[1], others[2],
        receiving(others[0]), receiving(others[1]), receiving(others[2]), anyio.create_task_group() as tasks,
    ):  # fmt: skip
        tasks.start_soon(receive)
        damage(place, "a")
        await broken.send("x", delay=0.1)
        await until(lambda: failed)
        await anyio.sleep(2.5)  # until the tables have been looked after
        before, asked, failed = broken.transactions, [mailbox.statistics().batches for mailbox in others], 0
        await until(lambda: broken.transactions >= before + 3)
        assert failed
        assert [mailbox.statistics().batches for mailbox in others] == [one + 3 for one in asked]
        for mailbox in others:
            await mailbox.send("x")
        tasks.cancel_scope.cancel()
