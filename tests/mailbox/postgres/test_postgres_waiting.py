"""How receivers on PostgreSQL hear of messages: notifications, and what there is instead behind a connection pooler."""

from __future__ import annotations

import gc
import time
from contextlib import asynccontextmanager
from itertools import pairwise
from string import ascii_lowercase

import anyio
import pytest

from mainspring import Context, MainLoop
from postgres_support import PgBouncer, pooler, quiet, receiving, until

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    return "asyncio", {"use_uvloop": True}


@asynccontextmanager
async def two_processes(place):
    """A mailbox in each of two processes, as far as the server can see. They do not ask the store while a test waits."""
    async with place.mailbox(poll_interval=30) as one, place.mailbox(poll_interval=30, application_name="two") as two:
        await until(lambda: not (one.statistics().polling or two.statistics().polling))
        assert len(place.listeners()) == 2
        yield one, two


@pytest.mark.slow
async def test_another_process_is_notified(place):
    async with two_processes(place) as (receiver, sender), receiving(receiver):
        await quiet(receiver)
        await sender.send("x")


@pytest.mark.slow
async def test_a_delay_that_another_process_sets_is_waited_for(place):
    async with two_processes(place) as (receiver, sender), receiving(receiver):
        await quiet(receiver)
        await sender.send("x", delay=0.2)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["nack", "release", "delayed nack", "expiry", "replay"])
async def test_what_returns_to_the_queue_wakes_another_process(place, how):
    async with two_processes(place) as (receiver, worker):
        await worker.send("x")
        (held,) = await worker.receive(visibility_timeout=1 if how == "expiry" else 600)
        if how == "replay":
            await held.dead_letter("no")
        async with receiving(receiver):
            await quiet(receiver)
            if how == "nack":
                await held.nack()
            elif how == "delayed nack":
                await held.nack(delay=0.1)
            elif how == "release":
                await held.release()
            elif how == "replay":
                await worker.replay_dead_letters()


@pytest.mark.slow
async def test_one_of_two_processes_that_leaves_has_kept_nothing_from_the_other(place):
    """Both are told of a message; the receive of one ends, at any point from then on."""
    async with two_processes(place) as (receiver, other):
        for steps in range(0, 40, 5):
            taken: list[object] = []
            scope = anyio.CancelScope()

            async def leave(scope=scope, taken=taken) -> None:
                with scope:
                    taken += await other.receive(wait_time_seconds=60)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(leave)
                await until(lambda: other.statistics().waiting_receives)
                async with receiving(receiver) as got:
                    if not steps:
                        await quiet(receiver)
                        await quiet(other)
                    await other.send("x")
                    for _ in range(steps):
                        await anyio.lowlevel.checkpoint()
                    scope.cancel()
                    await until(lambda got=got, taken=taken: got or taken)
                    if not got:
                        await other.send("x")
            assert [message.attempt for message in (*got, *taken)] == [1] * (1 + len(taken))
            await other.purge()


async def test_without_a_waiting_receive_senders_do_not_notify(place):
    async with place.mailbox(listen=False) as mailbox, await place.connect(autocommit=True) as listener:
        await listener.execute(f"LISTEN {place.schema}")
        await mailbox.send("x")
        assert [note async for note in listener.notifies(timeout=0.1)] == []


async def test_the_next_mailbox_listens_on_when_the_first_closes(place):
    leave = anyio.Event()

    async def be_first(*, task_status):
        async with place.mailbox("first") as first:
            await until(lambda: not first.statistics().polling)
            task_status.started()
            await leave.wait()

    async with anyio.create_task_group() as tasks:
        await tasks.start(be_first)
        async with place.mailbox("second") as second:
            assert not second.statistics().polling
            before = place.listeners()
            assert len(before) == 1
            leave.set()
            await until(lambda: place.listeners() not in ([], before))
            await until(lambda: not second.statistics().polling)


@pytest.mark.slow
async def test_a_mailbox_that_has_been_closed_leaves_nothing_in_its_process(place):
    """Each requester has one of its own for the replies, and comes and goes.

    In one round or another the pool makes, or first uses, a connection that it keeps; what mailboxes left would be in each.
    """

    async def come_and_go(turn):
        for letter in ascii_lowercase:
            async with place.mailbox(f"{turn}{letter}") as goes:
                await goes.send("x")
                await goes.receive()
        gc.collect()
        return len(gc.get_objects())

    async with place.mailbox("stays"):
        sizes = [await come_and_go(turn) for turn in range(4)]
        assert min(after - before for before, after in pairwise(sizes)) < 10


async def test_a_lost_listening_connection_comes_back(place):
    async with place.mailbox() as mailbox:
        await until(lambda: not mailbox.statistics().polling)
        (before,) = place.listeners()
        place.execute("SELECT pg_terminate_backend(%s)", before)
        await until(lambda: place.listeners() not in ([], [before]))
        await until(lambda: not mailbox.statistics().polling)
        assert mailbox.statistics().reconnects == 1
        async with receiving(mailbox):
            place.execute("SELECT SCHEMA.send(%s, ARRAY['by hand'], ARRAY['1'::bytea])", place.number())


@pytest.mark.slow
async def test_a_role_that_may_not_notify_polls(place):
    place.execute(f"CREATE SCHEMA {place.schema}")
    place.execute(
        """CREATE FUNCTION SCHEMA.pg_notify(text, text) RETURNS void LANGUAGE plpgsql
        AS $$ BEGIN RAISE 'permission denied' USING ERRCODE = '42501'; END $$"""
    )
    url = f"{place.url}?options=-csearch_path%3D{place.schema},pg_catalog"
    async with place.mailbox(url=url) as mailbox, receiving(mailbox):
        await anyio.sleep(0.5)  # the listener has tried it more than once
        assert mailbox.statistics().polling
        place.execute("SELECT SCHEMA.send(%s, ARRAY['by hand'], ARRAY['1'::bytea])", place.number())


@pytest.mark.parametrize("payload", ["hello", "² 1", "1 ²", f"{'1' * 5_000} 1", "1"])
async def test_a_notification_of_another_make_is_left_alone(place, payload):
    async with place.mailbox() as mailbox, receiving(mailbox):
        await until(lambda: not mailbox.statistics().polling)
        (before,) = place.listeners()
        place.execute("SELECT pg_notify(%s, %s)", place.schema, payload)
        place.execute("SELECT SCHEMA.send(%s, ARRAY['by hand'], ARRAY['1'::bytea])", place.number())
        await until(lambda: not mailbox.statistics().waiting_receives)
        assert place.listeners() == [before]


@pytest.mark.slow
@pytest.mark.parametrize("servers_numbers", [False, True])
async def test_behind_a_pooler_in_transaction_mode(place, servers_numbers):
    """One that numbers its connections itself is found out without LISTEN, which would stay with the server's process."""
    async with (
        pooler(place.url, servers_numbers=servers_numbers) as (url, before),
        place.mailbox(url=url) as mailbox,
    ):
        async with anyio.create_task_group() as tasks:
            for number in range(40):
                tasks.start_soon(lambda n: mailbox.send(n, dedup_key=str(n % 20)), number)
        seen = []
        while messages := await mailbox.receive(max_messages=7):
            async with anyio.create_task_group() as tasks:
                for message in messages:
                    seen.append(message.body)
                    tasks.start_soon(message.acknowledge)
        assert len(seen) == 20
        assert before.opened >= 1
        last = f"UNLISTEN {place.schema}" if servers_numbers else "SELECT pg_backend_pid()"
        await until(lambda: last in before.statements)
        async with place.mailbox() as direct, receiving(mailbox) as got:
            asked = mailbox.statistics().batches
            await until(lambda: mailbox.statistics().batches > asked + 6)  # it goes on asking
            await direct.send("x")
        await got[0].acknowledge()
        assert mailbox.statistics().polling
        assert (await mailbox.counts()).settled == 21
    assert servers_numbers == any("LISTEN" in statement for statement in before.statements)


@pytest.mark.slow
async def test_behind_pgbouncer(place):
    with PgBouncer(place.url) as before:
        async with place.mailbox(url=before.url) as mailbox, place.mailbox() as direct:
            place.execute("CREATE TABLE SCHEMA.effects (what text)")
            async with anyio.create_task_group() as tasks:
                for number in range(40):
                    tasks.start_soon(lambda n: mailbox.send(n, dedup_key=str(n % 20), priority=n % 3), number)
            await mailbox.send_many(range(100, 120))

            async def handle(job: int, ctx: Context) -> int:
                async with ctx.transaction() as connection:
                    await connection.execute(f"INSERT INTO {place.schema}.effects VALUES (%s)", (str(job),))
                    if job == 1_000:
                        await ctx.message.reply(job + 1)
                return job

            loop = MainLoop(mailbox, handle, concurrency=15)
            async with loop:
                await until(lambda: loop.outcomes.get("acknowledged") == 40)
                assert await mailbox.request(1_000, timeout=10) == 1_001
            assert place.execute("SELECT count(*), count(DISTINCT what) FROM SCHEMA.effects") == [(41, 41)]
            async with receiving(mailbox) as got:
                asked = mailbox.statistics().batches
                await until(lambda: mailbox.statistics().batches > asked + 6)  # it goes on asking
                await direct.send(1)
            await got[0].acknowledge()
            async with await place.connect() as connection:
                await mailbox.send(1, dedup_key="k", connection=connection)
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(lambda: mailbox.send(2, dedup_key="k"))
                    await anyio.sleep(0.05)
                    await connection.commit()
            assert mailbox.statistics().polling
            counts = await mailbox.counts()
            assert (counts.settled, counts.pending) == (42, 1)
            place.execute("SELECT pg_notify(%s, '0 nothing')", place.schema)
            await mailbox.send(3)
        assert "closing because" in before.log
        assert "when not linked" not in before.log  # no notification comes to a connection without LISTEN
        assert "WARNING" not in before.log


@pytest.mark.slow
async def test_a_poll_that_is_due_just_as_a_claim_comes_back_empty_is_not_the_last_one(place):
    async with place.mailbox(listen=False, poll_interval=0.1) as mailbox, anyio.create_task_group() as tasks:
        assert not await mailbox.receive(wait_time_seconds=0.5)
        received = []

        async def receive() -> None:
            received.extend(await mailbox.receive(wait_time_seconds=2))

        tasks.start_soon(receive)
        while not mailbox.statistics().in_flight:
            await anyio.lowlevel.checkpoint()
        time.sleep(0.2)  # the event loop finds the claim's answer and the time of the next poll at once
        while not mailbox.statistics().waiting_receives:
            await anyio.lowlevel.checkpoint()
        place.execute("SELECT SCHEMA.send(%s, ARRAY['by hand'], ARRAY['1'::bytea])", place.number())
    assert [message.id for message in received] == ["by hand"]
