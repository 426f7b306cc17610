"""A NATS server that has lost its data, and streams that somebody deleted, under an open mailbox."""

from __future__ import annotations

import signal
from contextlib import suppress

import anyio
import anyio.to_thread
import pytest

from mainspring.errors import ReceiptHandleExpiredError
from mainspring.mailbox.dead_letters import DeadLetterView
from mainspring.mailbox.message import Counts
from mainspring.mailbox.nats.mailbox import NatsMailbox
from nats_support import GET, one, place, several, until_it_works
from servers import NatsServer

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.loops("asyncio", "uvloop"),
]


async def restart(server):
    await anyio.to_thread.run_sync(server.stop, signal.SIGKILL)
    await anyio.to_thread.run_sync(server.start)


@pytest.mark.slow
async def test_requests_go_on_with_a_server_that_has_lost_its_data(anyio_backend):
    with NatsServer() as server:
        options = {"name": "jobs", "storage": "memory", "timeout": 2.0}
        async with NatsMailbox(server.url, **options) as box, NatsMailbox(server.url, **options) as worker:

            async def work():
                while True:
                    for message in await until_it_works(lambda: worker.receive(wait_time_seconds=60)):
                        with suppress(ReceiptHandleExpiredError):  # its acknowledgement met the end of the server
                            await until_it_works(lambda message=message: message.reply(message.body + 1))

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(work)
                assert await box.request(1, timeout=10) == 2
                await restart(server)
                assert await until_it_works(lambda: box.request(2, timeout=10)) == 3
                assert await box.request(3, timeout=10) == 4
                tasks.cancel_scope.cancel()


@pytest.mark.slow
async def test_what_is_claimed_from_a_queue_that_another_has_made_anew_is_held(anyio_backend):
    """The recovery has not yet seen that the queue is another one."""
    with NatsServer() as server:
        options = {"storage": "memory", "timeout": 5.0}
        async with place(server.url) as here:
            line = await here.line()
            async with here.box(over=line, **options) as holder:
                line.refuses = True
                await restart(server)
                async with here.box(**options) as other:
                    await until_it_works(lambda: other.send("new"))
                seen = line.hold_answers(f"$JS.API.STREAM.INFO.{here.names().queue}")
                line.refuses = False
                (message,) = await until_it_works(lambda: holder.receive(wait_time_seconds=5))
                await message.acknowledge()
                seen.open()


@pytest.mark.slow
async def test_a_number_of_the_lost_queue_means_no_message_of_the_new_one(anyio_backend):
    """The holder comes back with a number that another message has by now, and nothing of it has yet seen what has become."""
    with NatsServer() as server:
        options = {"storage": "memory", "timeout": 5.0}
        async with place(server.url) as here:
            line = await here.line()
            async with here.box(over=line, **options) as holder:
                await holder.send("lost")
                held = await one(holder, lease=600)
                line.refuses = True
                await restart(server)
                async with here.box(**options) as other:
                    await until_it_works(lambda: other.send("new"))
                    looks = line.hold(f"$JS.API.STREAM.INFO.{here.names().queue}", count=2)
                    line.refuses = False
                    async with anyio.create_task_group() as tasks:

                        async def acknowledge():
                            with pytest.raises(ReceiptHandleExpiredError):
                                await until_it_works(held.acknowledge)

                        tasks.start_soon(acknowledge)
                        await looks.full()  # that of the acknowledgement, and that of the mailbox itself
                        looks.open()
                    assert await other.counts() == Counts(pending=1)


@pytest.mark.slow
@pytest.mark.parametrize("waits", [0.0, 20.0], ids=["at once", "waiting"])
async def test_deleted_streams_are_made_anew(here, waits):
    async with here.box(timeout=3.0) as box:
        names = here.names()
        await here.server.delete(*names.streams)
        await box.send("x")
        message = None
        with anyio.fail_after(20):
            while message is None:
                for message in await until_it_works(lambda: box.receive(wait_time_seconds=waits)):
                    assert message.body == "x"
        await here.server.delete(names.checkpoints)
        await message.save_checkpoint(b'"kept"')
        await here.server.delete(names.delayed)
        await message.nack(delay=0.1)
        (again,) = await until_it_works(lambda: box.receive(wait_time_seconds=10))
        await here.server.delete(names.dead)
        await again.dead_letter("no")
        assert [letter.error for letter in await box.dead_letters()] == ["no"]


CALLS = {
    "counts": (lambda box: box.counts(), Counts()),
    "cancel": (lambda box: box.cancel("x"), "unknown"),
    "purge": (lambda box: box.purge(), 0),
    "dead letters": (lambda box: box.dead_letters(), []),
    "replay": (lambda box: box.replay_dead_letters(), 0),
    "purge dead letters": (lambda box: box.purge_dead_letters(), 0),
}


@pytest.mark.parametrize("call", CALLS)
async def test_each_call_finds_deleted_streams_again(here, call):
    does, result = CALLS[call]
    async with here.box() as box:
        await here.server.delete(*here.names().streams)
        assert await does(box) == result


async def test_what_is_deleted_while_the_rest_is_made_anew_is_made_anew_too(here):
    """The call that makes it anew has seen it."""
    line, names = await here.line(), here.names()
    await here.make_all()
    async with here.box(over=line) as box, anyio.create_task_group() as tasks:
        seen = line.hold_answers(f"$JS.API.STREAM.INFO.{names.dead}")
        await here.server.delete(names.queue)
        tasks.start_soon(box.send, "x")
        await seen.full()
        await here.server.delete(names.dead)

        async def look():
            assert await box.dead_letters() == []

        asks = line.watch(GET + names.dead)
        tasks.start_soon(look)
        await asks.full()
        await anyio.sleep(0.1)
        seen.open()


async def test_a_batch_into_deleted_streams_is_stored(here):
    async with here.box() as box:
        await here.server.delete(*here.names().streams)
        await box.send_many(range(50))
        assert await box.counts() == Counts(pending=50)


@pytest.mark.slow
async def test_a_waiting_receiver_has_what_comes_after_a_deletion(here):
    got = []
    async with here.box(timeout=3.0) as box, here.box() as sender:

        async def wait():
            while not got:
                got.extend(await until_it_works(lambda: box.receive(wait_time_seconds=60)))

        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(wait)
                await anyio.sleep(0.1)
                await here.server.delete(*here.names().streams)
                await sender.send("x")
        assert [message.body for message in got] == ["x"]


# --------------------------------------------------------------------------------------- dead letters in two hands


async def bury(box, count):
    await box.send_many(range(count))
    for message in await several(box, count):
        await message.dead_letter("no")


async def receive_all(view, count):
    got = []
    with anyio.fail_after(20):
        while len(got) < count:
            got += await view.receive(max_messages=count, wait_time_seconds=5)
    return got


@pytest.mark.slow
async def test_two_views_do_not_have_one_dead_letter(here):
    async with here.box() as box, here.box() as other:
        await bury(box, 3)
        async with DeadLetterView(box, look_every=0.1) as first:
            held = await receive_all(first, 3)
            async with DeadLetterView(other, look_every=0.1) as second:
                assert await second.receive(max_messages=3, wait_time_seconds=0.5) == []
                for message in held:
                    await message.acknowledge()
        assert await box.counts() == Counts(settled=3)


@pytest.mark.slow
async def test_a_parked_dead_letter_stays_so_when_its_consumer_is_new(here):
    async with here.box() as box:
        await bury(box, 2)
        async with DeadLetterView(box, look_every=0.1) as first:
            for message in await receive_all(first, 2):
                await message.dead_letter("keep")
        async with DeadLetterView(box, look_every=0.1) as second:
            assert await second.receive(max_messages=2, wait_time_seconds=0.5) == []
            assert await second.counts() == Counts(dead=2)
        assert (await box.counts()).dead == 2
