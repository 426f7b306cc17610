"""What comes late on NATS: a receiver that stood still while it waited does not take what another one has by now, and one
whose server thinks that there is something is told in time that there is nothing."""

from __future__ import annotations

import anyio
import pytest

from mainspring.errors import MailboxConnectionError, ReceiptHandleExpiredError
from mainspring.mailbox.message import Counts
from mainspring.mailbox.nats import claims as nats_claims
from mainspring.mailbox.nats.names import CONSUMER
from nats_support import ON_ASYNCIO, place, several
from stopwatch import Stopwatch

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.parametrize("anyio_backend", ON_ASYNCIO, ids=("asyncio", "uvloop")),
]
LEASE = 1.0


async def killed(box):
    """Its connection is gone, and it does not come back, as when its process is killed."""
    client = box._wire.driver
    client.options["allow_reconnect"], client._closed_cb = False, None
    client._transport._io_writer.transport.abort()
    await anyio.sleep(0.1)


async def test_what_came_while_its_receiver_stood_still_is_the_next_ones(nats_url, anyio_backend, monkeypatch):
    taken = anyio.Event()
    async with place(nats_url) as here, here.box(ack_wait=LEASE) as late, here.box() as other:
        pull = late._claims._pull

        async def stand_still(limit, wait):
            messages = await pull(limit, wait)
            if messages:
                await taken.wait()
            return messages

        monkeypatch.setattr(late._claims, "_pull", stand_still)
        got = []

        async def wait():
            got.extend(await late.receive(visibility_timeout=LEASE, wait_time_seconds=2))

        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(wait)
                await anyio.wait_all_tasks_blocked()
                await other.send("x")
                await anyio.sleep(LEASE / 2)  # it has come to the one who waited first
                (message,) = await other.receive(visibility_timeout=60, wait_time_seconds=30)
                taken.set()
        assert got == []
        await message.acknowledge()
        assert await other.counts() == Counts(settled=1)


async def test_a_receive_without_a_wait_ends_although_the_server_counts_what_was_purged(nats_url, anyio_backend):
    """The server parks a request for what it has miscounted. Then only the end of the request ends it."""
    async with place(nats_url) as here, here.box() as box, here.box() as other:
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


async def test_a_cancelled_receive_ends_although_the_server_counts_what_was_purged(nats_url, anyio_backend):
    async with place(nats_url) as here, here.box() as box, here.box() as other:
        for _ in range(5):
            await other.send_many(range(6))
            await other.purge()
            with Stopwatch() as watch, anyio.move_on_after(0.05):
                await box.receive(wait_time_seconds=30)
            assert watch.seconds < 3
        await other.send("x")
        (message,) = await box.receive(wait_time_seconds=5)
        assert (message.delivery_count, message.body) == (1, "x")


async def test_one_receive_too_many_is_told_so_and_does_not_end_the_others(nats_url, anyio_backend):
    async with place(nats_url) as here, here.box() as box:
        names, wire = box._store.names, box._store.wire
        config = dict(dict(names.consumers(60.0))[names.queue], max_waiting=1)
        await wire.api(f"CONSUMER.DELETE.{names.queue}.{CONSUMER}")
        request = {"stream_name": names.queue, "config": config}
        await wire.api(f"CONSUMER.DURABLE.CREATE.{names.queue}.{CONSUMER}", request)
        got = []

        async def wait():
            got.extend(await box.receive(wait_time_seconds=20))

        with anyio.fail_after(10):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(wait)
                await anyio.wait_all_tasks_blocked()
                with pytest.raises(MailboxConnectionError, match="max_waiting"):
                    await box.receive(wait_time_seconds=5)
                await box.send("x")
        assert [message.body for message in got] == ["x"]


async def test_a_receive_that_may_not_wait_has_all_there_is_from_a_server_that_is_slow(nats_url, monkeypatch):
    """Its pull ends before the server has come to it: the server says that there is more, and is given longer."""
    monkeypatch.setattr(nats_claims, "GLANCE", 0.000_01)
    async with place(nats_url) as here, here.box() as box:
        assert await box.receive(max_messages=10) == []
        await box.send_many(range(300))
        messages = await box.receive(max_messages=1_000)
        assert sorted(message.body for message in messages) == list(range(300))
        async with anyio.create_task_group() as group:
            for message in messages:
                group.start_soon(message.acknowledge)
        assert await box.counts() == Counts(settled=300)


async def test_a_receive_that_may_not_wait_has_what_came_back_from_a_server_that_is_slow(nats_url, monkeypatch):
    """What was delivered before the server does not count among those that wait."""
    monkeypatch.setattr(nats_claims, "GLANCE", 0.000_01)
    async with place(nats_url) as here, here.box() as box:
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


async def test_what_comes_back_does_not_come_to_the_pull_of_one_who_is_gone(nats_url):
    """2.9 would lose it until the ack wait has passed, and give another worker what is held."""
    async with place(nats_url) as here, here.box() as box:
        await box.send_many(["lost", "held"])
        async with here.box() as dying:
            (lost,) = await several(dying, 1, lease=3)
            assert lost.body == "lost"
            (held,) = await several(box, 1)

            async def wait():
                with pytest.raises(MailboxConnectionError):
                    await dying.receive(visibility_timeout=3, wait_time_seconds=60)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(wait)
                await anyio.sleep(0.3)
                await killed(dying)
            await anyio.sleep(3.5)
            (again,) = await box.receive(max_messages=10, wait_time_seconds=1)
            assert (again.body, again.attempt) == ("lost", 2)
            await held.acknowledge()


@pytest.mark.parametrize("cancelled", [False, True], ids=["to a receive", "to one that was cancelled"])
async def test_what_is_held_here_and_comes_as_if_for_the_first_time_is_not_handed_out(nats_url, cancelled):
    """As 2.9 does with what it delivered last, where something comes back that nobody waits for any more."""
    async with place(nats_url) as here, here.box() as box:
        await box.send_many(["late", "held"])
        (late,) = await several(box, 1, lease=0.3)
        (held,) = await several(box, 1, lease=2)
        await anyio.sleep(0.6)
        await box._wire.publish(box._claims._next, b'{"batch":1}', "nobody.listens")
        await anyio.sleep(0.1)
        delivered = await box._store.delivered()
        assert delivered in (1, 2)  # 2 where the server has no such fault
        if cancelled:
            await box._claims._take_back(await box._wire.puller())
        assert [message.body for message in await box.receive(wait_time_seconds=0.5)] in ([], ["late"])
        await held.extend_visibility(2)
        await anyio.sleep(1)
        assert await box.receive() == []
        await held.acknowledge()
        with pytest.raises(ReceiptHandleExpiredError):
            await late.acknowledge()


async def test_what_comes_twice_in_one_pull_is_one_delivery(nats_url):
    """Back, as its lease has ended, and by that fault of 2.9 as if for the first time, too."""
    async with place(nats_url) as here, here.box() as dead, here.box() as box:
        await dead.send_many(range(3))
        assert len(await several(dead, 3, lease=0.3)) == 3
        await anyio.sleep(1)
        await box._wire.publish(box._claims._next, b'{"batch":1}', "nobody.listens")
        await anyio.sleep(0.1)
        found = await box.receive(max_messages=10, wait_time_seconds=1)
        assert [(message.body, message.attempt) for message in found] in ([(1, 2), (2, 2)], [(0, 2), (1, 2), (2, 2)])
        for message in found:
            await message.acknowledge()
