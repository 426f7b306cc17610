"""The SQLite mailbox beyond the contract: receives that are cancelled, leases across boots, and much that ends at once."""

from __future__ import annotations

import anyio
import pytest

from mainspring.core import clock
from mainspring.errors import ReceiptHandleExpiredError
from mainspring.mailbox.message import Ack, Counts
from mainspring.mailbox.sqlite.mailbox import SQLiteMailbox

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


async def test_leases_of_an_earlier_boot_are_over(path, monkeypatch, anyio_backend):
    async with SQLiteMailbox(path) as mailbox:
        await mailbox.send("job")
        [message] = await mailbox.receive(visibility_timeout=40_000)
    monkeypatch.setattr(clock, "boot_id", lambda: "another boot")
    async with SQLiteMailbox(path) as mailbox:
        [again] = await mailbox.receive()
        assert (again.id, again.delivery_count, again.attempt) == (message.id, 2, 2)


async def test_within_a_boot_a_lease_outlives_the_connection(path, anyio_backend):
    async with SQLiteMailbox(path) as mailbox:
        await mailbox.send("job")
        [message] = await mailbox.receive(visibility_timeout=40_000)
    async with SQLiteMailbox(path) as mailbox:
        assert await mailbox.receive() == []
        await mailbox.settle(message._delivery, Ack())
        assert await mailbox.counts() == Counts(settled=1)


async def test_more_leases_may_end_at_once_than_one_transaction_takes_back(path, monkeypatch, anyio_backend):
    monkeypatch.setattr("mainspring.mailbox.sqlite.scheduler.AT_ONCE", 10)
    async with SQLiteMailbox(path) as mailbox:
        ids = await mailbox.send_many(range(35))
        await mailbox.receive(max_messages=35, visibility_timeout=0)
        found = []
        while len(found) < 35:
            found += await mailbox.receive(max_messages=35, wait_time_seconds=5)
        assert [message.id for message in found] == ids
        assert await mailbox.counts() == Counts(in_flight=35)


async def test_an_ended_lease_is_refused_before_it_is_taken_back(path, monkeypatch, virtual_clock):
    monkeypatch.setattr("mainspring.mailbox.sqlite.scheduler.AT_ONCE", 1)
    async with SQLiteMailbox(path) as mailbox:
        await mailbox.send_many(range(8))
        held = await mailbox.receive(max_messages=8, visibility_timeout=5)
        await anyio.sleep(5)
        for end in (held[7].acknowledge, held[6].nack, held[5].save_checkpoint, held[4].extend_visibility):
            with pytest.raises(ReceiptHandleExpiredError):
                await end(*{"save_checkpoint": [b"1"], "extend_visibility": [9]}.get(end.__name__, []))
        assert await mailbox.counts() == Counts(pending=8)


async def test_what_has_expired_is_not_delivered_even_when_much_expires_at_once(path, monkeypatch, virtual_clock):
    monkeypatch.setattr("mainspring.mailbox.sqlite.scheduler.AT_ONCE", 10)
    async with SQLiteMailbox(path) as mailbox:
        await mailbox.send_many(range(35), expires_in=5)
        last = await mailbox.send("keeps")
        await anyio.sleep(5)
        assert [message.id for message in await mailbox.receive(max_messages=100)] == [last]
        assert await mailbox.counts() == Counts(in_flight=1, dead=35)
