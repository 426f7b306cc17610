"""Dedup keys on PostgreSQL: who waits for an open transaction that has sent one, and who does not."""

from __future__ import annotations

import anyio
import pytest

from mainspring import MailboxConnectionError
from mainspring.errors import MailboxError
from mainspring.mailbox.message import Envelope
from mainspring.mailbox.postgres_values import stored_key
from postgres_support import Place, drop_schema, new_schema

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    return "asyncio", {"use_uvloop": True}


@pytest.fixture
def place(postgres_url):
    made = Place(postgres_url, new_schema())
    yield made
    drop_schema(postgres_url, made.schema)


async def test_a_key_that_a_transaction_holds_up_holds_up_nobody_else(place):
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


@pytest.mark.parametrize("capacity", [None, 100])
async def test_a_key_that_is_held_up_delays_and_fails_only_its_own_sends(place, capacity):
    async with (
        place.mailbox(timeout=1, capacity=capacity) as mailbox,
        place.mailbox() as other,
        await place.connect() as connection,
    ):
        first = await other.send("x", dedup_key="k", connection=connection)
        took, failed = {}, []

        async def send(key, count):
            began = anyio.current_time()
            try:
                for _ in range(count):
                    await mailbox.send("y", dedup_key=key)
            except MailboxConnectionError as error:
                failed.append(str(error))
            took[key] = anyio.current_time() - began

        async with anyio.create_task_group() as tasks:
            for key in ("a", "k", "b", "k"):
                tasks.start_soon(send, key, 1)
            await anyio.sleep(0.1)
            tasks.start_soon(send, "c", 10)
        assert len(failed) == 2
        assert "same dedup_key ('k') has not ended within 1 s; nothing was sent" in failed[0]
        assert max(took.pop(key) for key in "abc") < 0.7
        assert 0.9 < took.pop("k") < 2
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
        assert mailbox._here.pool.opened < 10


async def test_keys_that_hold_each_other_up_are_sent(place):
    """As each process has sent one of them, and not committed, when it comes to the other."""
    async with place.mailbox() as one, place.mailbox(application_name="another hub") as two:

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


async def test_a_put_of_several_keys_is_stored_whole_or_not_at_all(place):
    async with place.mailbox(timeout=0.5) as mailbox, await place.connect() as connection:
        await mailbox.send("x", dedup_key="k", connection=connection)
        pair = [Envelope("one", b"1", dedup_key="j"), Envelope("two", b"2", dedup_key="k")]
        with pytest.raises(MailboxConnectionError, match="'j', 'k'"):
            await mailbox._put(pair)
        await connection.rollback()
        assert (await mailbox.counts()).pending == 0
        assert await mailbox._put(pair) == ["one", "two"]


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
