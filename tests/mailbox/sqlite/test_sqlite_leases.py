"""The SQLite mailbox beyond the contract: receives that are cancelled, leases across boots, and much that ends at once."""

from __future__ import annotations

from contextlib import closing
from functools import partial

import anyio
import apsw
import pytest

from mainspring.errors import ReceiptHandleExpiredError
from mainspring.mailbox.message import Counts
from mainspring.mailbox.sqlite.mailbox import SQLiteMailbox
from support import outcomes

pytestmark = pytest.mark.anyio


# ------------------------------------------------------------------------------------------------- cancelled receives


async def test_a_receive_cancelled_while_its_claim_is_out_has_claimed_nothing(mailbox):
    """Whenever the cancellation comes, the next receive finds all messages, undelivered and in order."""
    for turns in range(8):
        ids = await mailbox.send_many(range(5))
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(lambda: mailbox.receive(max_messages=5))
                for _ in range(turns):
                    await anyio.lowlevel.checkpoint()
                scope.cancel()
        if turns < 3 or (await mailbox.counts()).in_flight == 0:
            found = await mailbox.receive(max_messages=10)
            assert [message.id for message in found] == ids
            assert {message.delivery_count for message in found} == {1}
        await mailbox.purge()


async def test_many_cancelled_receives_leave_nothing_leased(mailbox):
    await mailbox.send_many(range(50))
    received = []

    async def receive(scope):
        with scope:
            received.extend(await mailbox.receive(max_messages=3, wait_time_seconds=5))

    for _ in range(20):
        scopes = [anyio.CancelScope() for _ in range(10)]
        async with anyio.create_task_group() as tasks:
            for scope in scopes:
                tasks.start_soon(receive, scope)
            await anyio.lowlevel.checkpoint()
            for scope in scopes:
                scope.cancel()
    counts = await mailbox.counts()
    assert counts.in_flight == len(received)
    assert counts.pending == 50 - len(received)


# ------------------------------------------------------------------------------------------------------------- leases


async def test_leases_of_an_earlier_boot_are_over(path, anyio_backend):
    async with SQLiteMailbox(path) as mailbox:
        await mailbox.send("job")
        [message] = await mailbox.receive(visibility_timeout=40_000)
    with closing(apsw.Connection(path)) as connection:
        connection.execute("UPDATE store SET boot_id = 'an earlier boot'")
    async with SQLiteMailbox(path) as mailbox:
        [again] = await mailbox.receive()
        assert (again.id, again.delivery_count, again.attempt) == (message.id, 2, 2)


async def test_within_a_boot_a_lease_outlives_the_connection(path, anyio_backend):
    mailbox = SQLiteMailbox(path)
    async with mailbox:
        await mailbox.send("job")
        [message] = await mailbox.receive(visibility_timeout=40_000)
    async with mailbox:
        assert await mailbox.receive() == []
        await message.acknowledge()
        assert await mailbox.counts() == Counts(settled=1)


MANY = 2_500
"""Of what is due at once one transaction does a thousand, unless it has to count."""


async def test_more_leases_may_end_at_once_than_one_transaction_takes_back(path, virtual_clock):
    async with SQLiteMailbox(path) as mailbox:
        ids = await mailbox.send_many(range(MANY))
        await lease(mailbox, 5)
        await anyio.sleep(5)
        found = []
        while len(found) < MANY:
            found += await mailbox.receive(max_messages=1_000, wait_time_seconds=5)
        assert [message.id for message in found] == ids
        assert await mailbox.counts() == Counts(in_flight=MANY)


async def test_an_ended_lease_is_refused_before_it_is_taken_back(path, virtual_clock):
    async with SQLiteMailbox(path) as mailbox:
        await mailbox.send_many(range(MANY))
        *_, a, b, c, d = await lease(mailbox, 5)
        await anyio.sleep(5)
        ends = (a.acknowledge, b.nack, partial(c.save_checkpoint, b"1"), partial(d.extend_visibility, 9))
        assert [type(error) for error in await outcomes(*ends)] == [ReceiptHandleExpiredError] * 4
        assert await mailbox.counts() == Counts(pending=MANY)


async def lease(mailbox, seconds):
    """Receive all there is."""
    return [
        message for _ in range(3) for message in await mailbox.receive(max_messages=1_000, visibility_timeout=seconds)
    ]


async def test_what_has_expired_is_not_delivered_even_when_much_expires_at_once(path, virtual_clock):
    async with SQLiteMailbox(path) as mailbox:
        await mailbox.send_many(range(MANY), expires_in=5)
        last = await mailbox.send("keeps")
        await anyio.sleep(5)
        assert [message.id for message in await mailbox.receive(max_messages=100)] == [last]
        assert await mailbox.counts() == Counts(in_flight=1, dead=MANY)
