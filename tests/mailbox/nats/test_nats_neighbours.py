"""What one mailbox of a process asks for or may not do leaves the connection to the others, and says how to mend it."""

from __future__ import annotations

import signal
import time
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import anyio
import pytest

from mainspring.errors import ConfigError, MailboxConnectionError, SerializationError
from mainspring.mailbox.message import Counts
from mainspring.mailbox.nats.mailbox import NatsMailbox
from nats_support import one, until_it_works
from servers import NatsServer
from support import outcomes

pytestmark = [pytest.mark.anyio, pytest.mark.loops("asyncio", "uvloop")]
MIB = 1 << 20
LARGE = "x" * 1_000_000
MANY = 90
"""More large messages than the server lets wait for one connection (``max_pending``, 64 MiB)."""


class Configured(NatsServer):
    """A server that is told everything by a file, which can be changed: with two sources a reload turns JetStream off."""

    def configure(self, *lines: str) -> None:
        """Write the file. A server that runs reads it at once."""
        here = [f"listen: '127.0.0.1:{self.port}'", f"jetstream {{ store_dir: '{self.directory / 'store'}' }}"]
        (self.directory / "server.conf").write_text("\n".join([*here, *lines]))
        if self._process is not None:
            self.send_signal(signal.SIGHUP)

    def command(self) -> list[str]:
        return [self.binary, "-c", str(self.directory / "server.conf")]


def user(permissions: str = "") -> str:
    """The line that lets ``me`` in."""
    return f"authorization {{ users = [{{user: me, password: x{permissions}}}] }}"


# ------------------------------------------------------------------------------------------------- how much is asked for


@pytest.fixture
async def large(anyio_backend):
    """A mailbox for large messages, on a server of its own."""
    with NatsServer() as server:
        async with NatsMailbox(server.url, name="large", storage="memory") as box:
            yield box


@asynccontextmanager
async def busy_process():
    """A process that seldom comes to read what the server has sent, as others of its tasks work."""

    async def work():
        while True:
            time.sleep(0.2)
            await anyio.sleep(0.03)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(work)
        yield
        tasks.cancel_scope.cancel()


async def send_large(box, **options) -> None:
    for _ in range(MANY // 10):
        await box.send_many([LARGE] * 10, **options)


async def take_all(box, wait=5) -> list:
    found: list = []
    with anyio.fail_after(60):
        while len(found) < MANY:
            found += await box.receive(max_messages=1_000, wait_time_seconds=wait)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("wait", [0, 5])
async def test_large_messages_come_in_portions_that_the_connection_bears(large, wait):
    await send_large(large)
    async with busy_process():
        found = await take_all(large, wait)
    assert {message.delivery_count for message in found} == {1}
    assert large.statistics().reconnects == 0


@pytest.mark.slow
async def test_large_delayed_messages_come_in_portions(large):
    await send_large(large, delay=3)
    await anyio.sleep(1)
    async with busy_process():
        found = await take_all(large)
    assert {message.delivery_count for message in found} == {1}
    assert large.statistics().reconnects == 0


@pytest.mark.slow
async def test_large_messages_that_expire_come_in_portions(large):
    await send_large(large, expires_in=4)
    async with busy_process():
        with anyio.fail_after(60):
            while (await large.counts()).dead < MANY:
                await anyio.sleep(0.5)
    assert large.statistics().reconnects == 0


@pytest.mark.slow
async def test_large_dead_letters_come_in_portions(large):
    await send_large(large)
    found = await take_all(large)
    for message in found:
        await message.dead_letter("no")
    async with busy_process():
        assert await large.replay_dead_letters([message.id for message in found]) == MANY
    assert large.statistics().reconnects == 0


@pytest.mark.slow
async def test_a_stored_message_that_the_server_would_not_take_any_more_is_received(anyio_backend):
    """Its operator has lowered ``max_payload`` since."""
    server = Configured()
    server.configure(f"max_payload: {40 * MIB}")
    with server:
        body = "x" * (36 * MIB)
        async with NatsMailbox(server.url, name="large", storage="memory", timeout=20) as box:
            await box.send(body)
            server.configure(f"max_payload: {MIB}")
            await anyio.sleep(0.5)
            assert (await one(box)).body == body


async def test_a_reply_that_only_with_its_headers_is_too_large_is_refused_before_it_is_sent(here):
    """The server would hang up, again and again."""
    async with here.box("asked") as asked, here.box("answers") as answers:

        async def ask(size):
            await asked.send("x", reply_to=answers)
            message = await one(asked)
            (error,) = await outcomes(partial(message.reply, "x" * size))
            await (answers.purge() if error is None else message.acknowledge())
            return error

        errors = [await ask(size) for size in range(MIB - 300, MIB, 4)]
        assert {type(error) for error in errors} == {type(None), SerializationError}
        assert asked.statistics().reconnects == 0


# ------------------------------------------------------------------------------------------------- what is not allowed


async def test_a_limit_of_subscriptions_is_told_to_those_it_refuses(anyio_backend):
    server = Configured()
    server.configure("max_subscriptions: 20")
    with server:
        async with AsyncExitStack() as stack:
            boxes = []

            async def open_all():
                while True:
                    box = await stack.enter_async_context(NatsMailbox(server.url, name=str(len(boxes))))
                    assert await box.receive() == []
                    boxes.append(box)

            with pytest.raises(MailboxConnectionError, match=r"mailbox '\d+': .*raise max_subscriptions"):
                await open_all()
            assert boxes
            for box in boxes:
                await box.send("x")
                assert (await one(box)).body == "x"
                assert box.statistics().reconnects == 0


async def test_rights_that_are_taken_and_given_back_count_at_once(anyio_backend):
    """Where answers may not be received, the server drops the subscription, and does not make it again by itself."""
    server = Configured()
    server.configure(user())
    with server:
        url = f"nats://me:x@127.0.0.1:{server.port}"
        async with NatsMailbox(url, name="a") as first, NatsMailbox(url, name="b") as second:
            assert await first.receive() == []
            server.configure(user(", permissions: {subscribe: {deny: '_INBOX.>'}}"))
            with anyio.fail_after(10):
                while "let this user use" not in str(*await outcomes(first.counts)):
                    await anyio.sleep(0.05)
            for _ in range(2):
                found = await outcomes(first.counts, second.counts, first.receive)
                assert [type(one).__mro__[1] for one in found] == [ConfigError] * 3
            server.configure(user())
            with anyio.fail_after(10):
                while await outcomes(first.counts) != [Counts()]:
                    await anyio.sleep(0.05)
            for box in (first, second):
                await box.send("x")
                assert (await one(box, wait=1)).delivery_count == 1
                assert box.statistics().reconnects == 0


async def test_a_subject_that_is_denied_is_named_as_the_server_knows_it(anyio_backend):
    """Its letters count: what differs in them alone is another subject, and another mailbox."""
    server = Configured()
    server.configure(user(", permissions: {publish: {deny: 'mainspring.Jobs.>'}}"))
    with server:
        url = f"nats://me:x@127.0.0.1:{server.port}"
        async with NatsMailbox(url, name="Jobs") as denied, NatsMailbox(url, name="jobs") as allowed:
            with pytest.raises(ConfigError, match=r"mailbox 'Jobs'.*use 'mainspring\.Jobs\.queue\."):
                await denied.send("x")
            await allowed.send("x")


@pytest.mark.slow
async def test_a_receive_whose_consumer_is_deleted_says_which_mailbox_has_to_try_again(here):
    async with here.box("Jobs") as box:

        async def delete():
            with anyio.fail_after(10):
                while not (await here.server.consumer(here.names("Jobs").queue))[
                    "num_waiting"
                ]:  # it has asked the server
                    await anyio.sleep(0.01)
            await here.server.delete(here.names("Jobs").queue)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(delete)
            with pytest.raises(MailboxConnectionError, match=r"mailbox 'test-.*-Jobs'.*try again"):
                await box.receive(wait_time_seconds=20)
        await until_it_works(lambda: box.send("x"))
        assert (await one(box)).body == "x"


# --------------------------------------------------------------------------------------------------- coming and going


@pytest.mark.slow
async def test_a_mailbox_that_opens_as_the_last_one_closes_has_a_connection_and_ends_it(here):
    """It has just made anew the connection which that one had lost."""
    line = await here.line()
    async with here.box("opens", over=line) as box:  # its streams are there from now on
        assert await box.counts() == Counts()

    async def stand_still(reader, writer):
        await reader.read()

    for _ in range(3):
        async with here.box("closes", over=line) as closes:
            line.actors = [stand_still]  # for the driver, which connects first
            line.cut()
            made = line.made
            with anyio.fail_after(10):
                while line.made == made:
                    await anyio.sleep(0.001)

            async def work(box):
                async with box:
                    await box.send("x")

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(work, here.box("opens", over=line))
                with anyio.fail_after(10):
                    while not closes.statistics().connected:
                        await anyio.sleep(0)
                await closes.close()
        with anyio.fail_after(10):
            while line.links:
                await anyio.sleep(0.01)
