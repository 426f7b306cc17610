"""Dedup keys on PostgreSQL: who waits for an open transaction that has sent one, and who does not."""

from __future__ import annotations

import anyio
import psycopg
import pytest

from mainspring import MailboxConnectionError
from mainspring.errors import MailboxError
from mainspring.mailbox.postgres.values import stored_key
from postgres_support import gate
from stopwatch import Stopwatch

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    return "asyncio", {"use_uvloop": True}


async def test_a_key_that_a_transaction_has_sent_blocks_no_other(place):
    async with place.mailbox() as mailbox, await place.connect() as connection:
        first = await mailbox.send("x", dedup_key="k", connection=connection)
        ids = []

        async def send_again():
            ids.append(await mailbox.send("y", dedup_key="k"))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send_again)
            with anyio.fail_after(10):
                await mailbox.send("z")
                (message,) = await mailbox.receive()
                await message.acknowledge()
            assert (message.body, ids) == ("z", [])
            await connection.commit()
        assert ids == [first]


@pytest.mark.slow
@pytest.mark.parametrize("capacity", [None, 100])
async def test_a_key_that_is_blocked_delays_and_fails_only_its_own_sends(place, capacity):
    async with (
        gate(place.url) as (url, way),
        place.mailbox(url=url, timeout=2, capacity=capacity) as mailbox,
        place.mailbox() as other,
        await place.connect() as connection,
    ):
        first = await other.send("x", dedup_key="k", connection=connection)
        took, failed = {}, []

        async def send(key, count):
            began = watch.seconds
            try:
                for _ in range(count):
                    await mailbox.send("y", dedup_key=key)
            except MailboxConnectionError as error:
                failed.append(str(error))
            took[key] = watch.seconds - began

        began = anyio.current_time()
        with Stopwatch() as watch:
            async with anyio.create_task_group() as tasks:
                for key in ("a", "k", "b", "k"):
                    tasks.start_soon(send, key, 1)
                await anyio.sleep(0.1)
                tasks.start_soon(send, "c", 10)
        assert len(failed) == 2
        assert "same dedup_key ('k') has not ended within 2 s; nothing was sent" in failed[0]
        assert anyio.current_time() - began > 1.9
        assert max(took.pop(key) for key in "abc") < 1.5
        assert took.pop("k") < 4
        ids = []

        async def send_again():
            ids.append(await mailbox.send("z", dedup_key="k"))

        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(send_again)
            await anyio.sleep(0.05)
            await connection.commit()
        assert ids == [first] * 3
        assert (await mailbox.counts()).pending == 4
        assert way.opened < 10


async def test_keys_that_block_each_other_are_sent(place):
    """As each process has sent one of them, and not committed, when it comes to the other."""
    async with place.mailbox() as one, place.mailbox(application_name="another pool") as two:

        async def send(mailbox, keys):
            async with anyio.create_task_group() as tasks:
                for key in keys:
                    tasks.start_soon(lambda key: mailbox.send(key, dedup_key=key), key)

        for turn in range(10):
            keys = [f"{turn} {number}" for number in range(20)]
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(send, one, keys)
                tasks.start_soon(send, two, keys[::-1])
        assert (await one.counts()).pending == 200


@pytest.mark.parametrize("capacity", [None, 9])
async def test_a_commit_that_waits_for_others_is_no_key_that_is_blocked(place, capacity):
    """As it does for those who commit notifications at the same time."""
    async with place.mailbox(capacity=capacity) as mailbox, await place.connect() as connection:
        place.execute(
            """CREATE FUNCTION SCHEMA.wait() RETURNS trigger LANGUAGE plpgsql AS
            'BEGIN PERFORM pg_advisory_xact_lock(hashtext(TG_TABLE_SCHEMA), 4277); RETURN NULL; END'"""
        )
        place.execute(
            """CREATE CONSTRAINT TRIGGER waits AFTER INSERT ON SCHEMA.messages DEFERRABLE INITIALLY DEFERRED
            FOR EACH ROW EXECUTE FUNCTION SCHEMA.wait()"""
        )
        await connection.execute("SELECT pg_advisory_xact_lock(hashtext(%s), 4277)", (place.schema,))
        ids = []

        async def send():
            ids.append(await mailbox.send("x", dedup_key="k"))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send)
            with anyio.fail_after(5):
                waiting = "SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND objid = 4277 AND NOT granted"
                while not place.execute(waiting):
                    await anyio.sleep(0.01)
            await anyio.sleep(0.1)
            assert place.execute(waiting)
            await connection.commit()
        assert len(ids) == 1


@pytest.mark.parametrize("sender", ["alone", "with a capacity", "in a transaction"])
@pytest.mark.parametrize("state", ["pending", "delayed", "its lease has ended"])
async def test_a_message_that_has_expired_holds_its_key_no_longer(place, state, sender):
    async with place.mailbox(capacity=2 if sender == "with a capacity" else None) as mailbox:
        first = await mailbox.send("old", dedup_key="k", expires_in=600, delay=60 if state == "delayed" else 0)
        await mailbox.send("beside", expires_in=600)
        if state == "its lease has ended":
            await mailbox.receive()
        place.execute("UPDATE SCHEMA.messages SET expires_at = now()")
        if state == "its lease has ended":
            assert await mailbox.send("held", dedup_key="k") == first
            place.execute("UPDATE SCHEMA.messages SET due = now() WHERE state = 2")
        async with await place.connect() as connection:
            into = {"connection": connection} if sender == "in a transaction" else {}
            second = await mailbox.send("new", dedup_key="k", **into)
            assert await mailbox.send("newer", dedup_key="k", **into) == second != first
            await connection.commit()
        (dead, other) = sorted(await mailbox.dead_letters(), key=lambda letter: letter.message_id != first)
        assert (dead.message_id, dead.error_type, dead.attempt) == (first, "MessageExpiredError", int("lease" in state))
        assert other.body == "beside"
        counts = await mailbox.counts()
        assert (counts.delayed, counts.pending, counts.in_flight, counts.dead) == (0, 1, 0, 2)
        assert [message.body for message in await mailbox.receive(max_messages=9)] == ["new"]


async def test_a_replay_takes_its_key_back_from_one_that_has_expired(place):
    async with place.mailbox() as mailbox:
        first = await mailbox.send("x", dedup_key="k")
        (message,) = await mailbox.receive()
        await message.dead_letter("no")
        await mailbox.send("y", dedup_key="k", expires_in=600)
        place.execute("UPDATE SCHEMA.messages SET expires_at = now()")
        await mailbox.replay_dead_letters([first])
        assert await mailbox.send("z", dedup_key="k") == first


@pytest.mark.slow
@pytest.mark.parametrize(("timeout", "own"), [(3, "0"), (30, "300ms"), (3, "20s")])
@pytest.mark.parametrize("threads", [False, True])
async def test_a_key_that_is_blocked_fails_in_time_in_a_transaction_too_which_goes_on(place, timeout, own, threads):
    def by_thread():
        with psycopg.connect(place.url) as connection, place.mailbox(timeout=timeout).sync as own_mailbox:
            connection.execute(f"SET lock_timeout = '{own}'")
            own_mailbox.send("before", connection=connection)
            with pytest.raises(MailboxConnectionError, match=says):
                own_mailbox.send("y", dedup_key="k", connection=connection)
            own_mailbox.send("after", dedup_key="j", connection=connection)
            return connection.execute("SHOW lock_timeout").fetchone()[0]

    says = rf"same dedup_key \('k'\) has not ended within {timeout:g} s, or .*lock_timeout; nothing was sent"
    # The first makes the schema, in its own time.
    async with place.mailbox(), place.mailbox(timeout=timeout) as mailbox, await place.connect() as holder:
        await mailbox.send("x", dedup_key="k", connection=holder)
        with Stopwatch() as watch:
            if threads:
                assert await anyio.to_thread.run_sync(by_thread, abandon_on_cancel=True) == own
            else:
                async with await place.connect() as connection:
                    await connection.execute(f"SET lock_timeout = '{own}'")
                    await mailbox.send("before", connection=connection)
                    with pytest.raises(MailboxConnectionError, match=says):
                        await mailbox.send("y", dedup_key="k", connection=connection)
                    await mailbox.send("after", dedup_key="j", connection=connection)
                    assert (await (await connection.execute("SHOW lock_timeout")).fetchone())[0] == own
        assert watch.seconds < 10
        await holder.rollback()
        assert [message.body for message in await mailbox.receive(max_messages=9)] == ["before", "after"]


@pytest.mark.slow
async def test_keys_that_deadlock_in_the_senders_own_transactions_are_told_as_what_may_be_tried_again(place):
    async with place.mailbox() as mailbox, await place.connect() as one, await place.connect() as two:
        await mailbox.send(1, dedup_key="a", connection=one)
        await mailbox.send(2, dedup_key="b", connection=two)
        failed = []

        async def send(connection, key):
            try:
                await mailbox.send(3, dedup_key=key, connection=connection)
                await connection.commit()
            except MailboxError as error:
                failed.append(error)
                await connection.rollback()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send, one, "b")
            tasks.start_soon(send, two, "a")
        assert [type(error) for error in failed] == [MailboxConnectionError]
        assert (await mailbox.counts()).pending == 2


async def test_a_replay_beside_a_send_of_its_key_goes_without_it(place):
    async with place.mailbox() as mailbox, await place.connect() as connection:
        await mailbox.send("x", dedup_key="k")
        (message,) = await mailbox.receive()
        await message.dead_letter("no")
        await mailbox.send("y", dedup_key="k", connection=connection)
        replayed = []

        async def replay():
            replayed.append(await mailbox.replay_dead_letters())

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(replay)
            await anyio.sleep(0.2)
            await connection.commit()
        assert replayed == [1]
        assert sorted(message.body for message in await mailbox.receive(max_messages=9)) == ["x", "y"]
        assert (await mailbox.counts()).dead == 0


def test_keys_that_an_index_cannot_hold_are_digests():
    assert stored_key("order 7") == "order 7"
    for key in ("x" * 5_000, "a\0b", "\ud800"):
        assert stored_key(key).startswith("sha256:")
