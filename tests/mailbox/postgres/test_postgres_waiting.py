"""How receivers on PostgreSQL hear of messages: notifications, and what there is instead behind a connection pooler."""

from __future__ import annotations

from contextlib import asynccontextmanager

import anyio
import pytest

from mainspring import Context, MainLoop
from mainspring.mailbox.postgres import batches as postgres_batches
from mainspring.mailbox.postgres import pool as postgres_pool
from postgres_support import PgBouncer, pooler, until

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    return "asyncio", {"use_uvloop": True}


@asynccontextmanager
async def receiving(mailbox):
    """Somebody receives, for long; the list of what came."""
    got = []

    async def receive():
        got.extend(await mailbox.receive(wait_time_seconds=60))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(receive)
        await until(lambda: mailbox._lanes.waiters.parked)
        yield got
        await until(lambda: got)


async def test_another_process_is_notified(place, monkeypatch):
    monkeypatch.setattr(postgres_pool, "LOOK_AGAIN", 1_000.0)
    monkeypatch.setattr(postgres_batches, "QUICK_LOOKS", (1_000.0,))
    async with place.mailbox() as receiver, place.mailbox(application_name="another hub") as sender:
        assert receiver._here is not sender._here
        await until(lambda: receiver._here.listening)
        async with receiving(receiver):
            await sender.send("x")


async def test_a_delay_that_another_process_sets_is_waited_for(place, monkeypatch):
    monkeypatch.setattr(postgres_pool, "LOOK_AGAIN", 1_000.0)
    monkeypatch.setattr(postgres_batches, "QUICK_LOOKS", (1_000.0,))
    async with place.mailbox() as receiver, place.mailbox(application_name="another hub") as sender:
        await until(lambda: receiver._here.listening)
        async with receiving(receiver):
            await sender.send("x", delay=0.2)


@pytest.mark.parametrize("how", ["nack", "release", "delayed nack", "expiry", "replay"])
async def test_what_is_given_back_wakes_another_process(place, monkeypatch, how):
    monkeypatch.setattr(postgres_pool, "LOOK_AGAIN", 1_000.0)
    monkeypatch.setattr(postgres_batches, "QUICK_LOOKS", (1_000.0,))
    async with place.mailbox() as receiver, place.mailbox(application_name="another hub") as worker:
        await until(lambda: receiver._here.listening)
        await worker.send("x")
        (held,) = await worker.receive(visibility_timeout=0.2 if how == "expiry" else 600)
        if how == "replay":
            await held.dead_letter("no")
        async with receiving(receiver):
            if how == "nack":
                await held.nack()
            elif how == "delayed nack":
                await held.nack(delay=0.1)
            elif how == "release":
                await held.release()
            elif how == "replay":
                await worker.replay_dead_letters()


async def test_one_of_two_processes_that_leaves_has_kept_nothing_from_the_other(place, monkeypatch):
    """Both are told of a message; the receive of one ends, at any point from then on."""
    monkeypatch.setattr(postgres_pool, "LOOK_AGAIN", 1_000.0)
    monkeypatch.setattr(postgres_batches, "QUICK_LOOKS", (1_000.0,))
    async with place.mailbox() as receiver, place.mailbox(application_name="another hub") as other:
        await until(lambda: receiver._here.listening and other._here.listening)
        for steps in range(0, 40, 5):
            taken: list[object] = []
            scope = anyio.CancelScope()

            async def leave(scope=scope, taken=taken) -> None:
                with scope:
                    taken += await other.receive(wait_time_seconds=60)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(leave)
                await until(lambda: other._lanes.waiters.parked)
                async with receiving(receiver) as got:
                    await other.send("x")
                    for _ in range(steps):
                        await anyio.lowlevel.checkpoint()
                    scope.cancel()
                    await until(lambda got=got, taken=taken: got or taken)
                    if not got:
                        await other.send("x")
            assert [message.attempt for message in (*got, *taken)] == [1] * (1 + len(taken))
            await other.purge()


async def test_nobody_waiting_costs_senders_no_notification(place):
    async with place.mailbox(listen=False) as mailbox, await place.connect(autocommit=True) as listener:
        await listener.execute(f"LISTEN {place.schema}")
        await mailbox.send("x")
        assert [note async for note in listener.notifies(timeout=0.1)] == []


async def test_the_next_mailbox_listens_on_when_the_first_closes(place):
    async with place.mailbox("second") as second:
        async with place.mailbox("first") as first:
            assert first._here is second._here
            await until(lambda: second._here.listening)
        await until(lambda: second._here.listening)


async def test_a_mailbox_that_has_been_closed_leaves_nothing_in_its_process(place):
    """Each requester has one of its own for the replies, and comes and goes."""
    async with place.mailbox("stays") as stays:
        async with place.mailbox("goes") as goes, place.mailbox("goes"):
            assert set(stays._here._waiters) == {stays._number, goes._number}
        assert set(stays._here._waiters) == set(stays._here._views) == {stays._number}


async def test_a_lost_listening_connection_comes_back(place):
    async with place.mailbox() as mailbox:
        await until(lambda: mailbox._here.listening)
        who = "pid FROM pg_stat_activity WHERE query = %s AND pid <> pg_backend_pid()"
        before = place.execute(f"SELECT {who}", f"LISTEN {place.schema}")
        assert place.execute(f"SELECT pg_terminate_backend(pid), {who}", f"LISTEN {place.schema}")
        await until(lambda: place.execute(f"SELECT {who}", f"LISTEN {place.schema}") not in ([], before))
        await until(lambda: mailbox._here.listening)
        async with receiving(mailbox):
            place.execute("SELECT SCHEMA.put(%s, ARRAY['by hand'], ARRAY['1'::bytea])", mailbox._number)


@pytest.mark.parametrize("told_by", ["_is_shared", "_arrives"])
async def test_behind_a_pooler_in_transaction_mode(place, monkeypatch, told_by):
    monkeypatch.setattr(postgres_pool, "PROBE_TIMEOUT", 0.3)
    monkeypatch.setattr(postgres_batches, "QUICK_LOOKS", (1_000.0,))
    probed = []
    question = getattr(postgres_pool.Hub, told_by)

    async def probe(self, connection):
        probed.append(await question(self, connection))
        return probed[-1]

    async def cannot_tell(self, connection):
        return False

    monkeypatch.setattr(postgres_pool.Hub, "_is_shared", cannot_tell)
    monkeypatch.setattr(postgres_pool.Hub, told_by, probe)
    async with pooler(place.url) as (url, before), place.mailbox(url=url) as mailbox:
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
        await until(lambda: probed == [told_by == "_is_shared"])
        async with place.mailbox() as direct, receiving(mailbox) as got:
            await direct.send("x")  # it looks ten times a second
        await got[0].acknowledge()
        assert not mailbox._here.listening
        assert (await mailbox.counts()).settled == 21


async def test_behind_pgbouncer(place, monkeypatch):
    monkeypatch.setattr(postgres_batches, "QUICK_LOOKS", (1_000.0,))
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
                await direct.send(1)  # it looks ten times a second
            await got[0].acknowledge()
            async with await place.connect() as connection:
                await mailbox.send(1, dedup_key="k", connection=connection)
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(lambda: mailbox.send(2, dedup_key="k"))
                    await anyio.sleep(0.05)
                    await connection.commit()
            assert not mailbox._here.listening
            counts = await mailbox.counts()
            assert (counts.settled, counts.pending) == (42, 1)
            place.execute("SELECT pg_notify(%s, '0 nothing')", place.schema)
            await mailbox.send(3)
        assert "closing because" in before.log
        assert "when not linked" not in before.log  # no notification comes to a connection that nobody listens on
        assert "WARNING" not in before.log
