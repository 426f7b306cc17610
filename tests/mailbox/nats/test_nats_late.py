"""What comes late on NATS: a receiver that stood still while it waited does not take what another one has by now, and one
whose server thinks that there is something is told in time that there is nothing."""

from __future__ import annotations

import anyio
import pytest

from mainspring.errors import MailboxConnectionError, ReceiptHandleExpiredError
from mainspring.mailbox.message import Counts
from nats_support import PULL, one, several
from stopwatch import Stopwatch

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.loops("asyncio", "uvloop"),
]
LEASE = 1.0
GLANCE = '*"expires":20000000}*'
"""What a pull request of 20 ms says, with which a receive begins that may not wait."""


@pytest.mark.slow
async def test_what_came_while_its_receiver_stood_still_is_the_next_ones(here):
    line, got = await here.line(), []
    async with here.box(over=line, ack_wait=LEASE) as late, here.box() as other:

        async def wait():
            got.extend(await late.receive(visibility_timeout=LEASE, wait_time_seconds=2))

        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                pull = line.watch(f"{PULL}{here.names().queue}.*")
                tasks.start_soon(wait)
                await pull.full()
                line.silent = True
                await other.send("x")  # which comes to the one who waits
                message = await one(other, wait=30)
                line.silent = False
        assert got == []
        await message.acknowledge()
        assert await other.counts() == Counts(settled=1)


async def test_a_receive_without_a_wait_ends_although_the_server_counts_what_was_purged(here):
    """The server parks a request for what it has miscounted. Then only the end of the request ends it."""
    async with here.box() as box, here.box() as other:
        for _ in range(5):
            await other.send_many(range(6))
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(other.purge)
                with Stopwatch() as watch:
                    await box.receive(max_messages=3, visibility_timeout=0)
                assert watch.seconds < 2
            with Stopwatch() as watch:
                await box.receive(max_messages=3)
            assert watch.seconds < 2
            await other.purge()


@pytest.mark.slow
async def test_a_cancelled_receive_ends_although_the_server_counts_what_was_purged(here):
    async with here.box() as box, here.box() as other:
        for _ in range(5):
            await other.send_many(range(6))
            await other.purge()
            with Stopwatch() as watch, anyio.move_on_after(0.05):
                await box.receive(wait_time_seconds=30)
            assert watch.seconds < 3
        await other.send("x")
        (message,) = await box.receive(wait_time_seconds=5)
        assert (message.delivery_count, message.body) == (1, "x")


async def test_one_receive_too_many_is_told_so_and_does_not_end_the_others(here):
    line, got = await here.line(), []
    pulls = line.watch(f"{PULL}{here.names().queue}.*", "*expires*", count=-1)
    async with here.box(over=line) as box:
        await here.server.change_consumer(here.names().queue, max_waiting=1)

        async def wait():
            got.extend(await box.receive(wait_time_seconds=20))

        with anyio.fail_after(10):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(wait)
                await anyio.wait_all_tasks_blocked()
                with pytest.raises(MailboxConnectionError, match="max_waiting"):
                    await box.receive(wait_time_seconds=5)
                assert box.statistics().waiting_receives == 1
                await box.send("x")
        assert [message.body for message in got] == ["x"]
        assert len(pulls.caught) == 2


async def test_a_receive_that_may_not_wait_has_all_there_is_from_a_server_that_is_slow(here):
    """Its pull ends before the server has come to it: the server says that there is more, and is given longer."""
    line = await here.line()
    line.hold(f"{PULL}{here.names().queue}.*", GLANCE, count=-1).end("408 Request Timeout")
    async with here.box(over=line) as box:
        assert await box.receive(max_messages=10) == []
        await box.send_many(range(300))
        messages = await box.receive(max_messages=1_000)
        assert sorted(message.body for message in messages) == list(range(300))
        async with anyio.create_task_group() as group:
            for message in messages:
                group.start_soon(message.acknowledge)
        assert await box.counts() == Counts(settled=300)


@pytest.mark.slow
async def test_a_receive_that_may_not_wait_has_what_came_back_from_a_server_that_is_slow(here):
    """What was delivered before the server does not count among those that wait."""
    line = await here.line()
    line.hold(f"{PULL}{here.names().queue}.*", GLANCE, count=-1).end("408 Request Timeout")
    async with here.box(over=line) as box:
        await box.send_many(range(5))
        assert len(await several(box, 3, lease=0.3)) == 3
        kept = await several(box, 2)
        await anyio.sleep(1.3)
        again = await box.receive(max_messages=10)
        assert [(message.body, message.attempt) for message in again] == [(0, 2), (1, 2), (2, 2)]
        await box.send("new")
        assert [message.body for message in await box.receive(max_messages=10)] == ["new"]
        for message in kept + again:
            await message.acknowledge()


@pytest.mark.slow
async def test_what_comes_back_does_not_come_to_the_pull_of_one_who_is_gone(here):
    """2.9 would lose it until the ack wait has passed, and give another worker what is held."""
    line = await here.line()
    async with here.box() as box:
        await box.send_many(["lost", "held"])
        async with here.box(over=line) as dying:
            (lost,) = await several(dying, 1, lease=3)
            assert lost.body == "lost"
            (held,) = await several(box, 1)

            async def wait():
                with pytest.raises(MailboxConnectionError):
                    await dying.receive(visibility_timeout=3, wait_time_seconds=60)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(wait)
                await anyio.sleep(0.3)
                line.refuses = True
                line.cut()
            await anyio.sleep(3.5)
            (again,) = await box.receive(max_messages=10, wait_time_seconds=1)
            assert (again.body, again.attempt) == ("lost", 2)
            await held.acknowledge()


async def pull_for_nobody(here):
    """Ask for a message that goes nowhere, as one does who is gone by then."""
    await here.server.connection.publish(f"{PULL}{here.names().queue}.mainspring", b'{"batch":1}', "nobody.listens")
    await here.server.connection.flush()
    await anyio.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize("cancelled", [False, True], ids=["to a receive", "to one that was cancelled"])
async def test_what_is_held_here_and_comes_as_if_for_the_first_time_is_not_handed_out(here, cancelled):
    """As 2.9 does with what it delivered last, where something comes back that nobody waits for any more."""
    line, queue = await here.line(), here.names().queue
    async with here.box(over=line) as box:
        await box.send_many(["late", "held"])
        late = await one(box, lease=0.3)
        held = await one(box, lease=2)
        await anyio.sleep(0.6)
        await pull_for_nobody(here)
        delivered = (await here.server.consumer(queue))["delivered"]["stream_seq"]
        assert delivered in (1, 2)  # 2 where the server has no such fault
        if cancelled:
            pull = line.hold(f"{PULL}{queue}.*")
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(lambda: box.receive(wait_time_seconds=30))
                await pull.full()
                tasks.cancel_scope.cancel()
        assert [message.body for message in await box.receive(wait_time_seconds=0.5)] in ([], ["late"])
        await held.extend_visibility(2)
        await anyio.sleep(1)
        assert await box.receive() == []
        await held.acknowledge()
        with pytest.raises(ReceiptHandleExpiredError):
            await late.acknowledge()


@pytest.mark.slow
async def test_what_comes_twice_in_one_pull_is_one_delivery(here):
    """Back, as its lease has ended, and by that fault of 2.9 as if for the first time, too."""
    async with here.box() as dead, here.box() as box:
        await dead.send_many(range(3))
        assert len(await several(dead, 3, lease=0.3)) == 3
        await anyio.sleep(1)
        await pull_for_nobody(here)
        found = await box.receive(max_messages=10, wait_time_seconds=1)
        assert [(message.body, message.attempt) for message in found] in ([(1, 2), (2, 2)], [(0, 2), (1, 2), (2, 2)])
        for message in found:
            await message.acknowledge()
