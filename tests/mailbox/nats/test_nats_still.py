"""NATS servers that stand still, or say what nobody understands: every wait has an end, and the connection is made anew."""

from __future__ import annotations

import asyncio
import json
import signal
from contextlib import asynccontextmanager, suppress

import anyio
import anyio.to_thread
import pytest

from mainspring.errors import ConfigError, MailboxConnectionError, MailboxError
from mainspring.mailbox.nats.connection import Wire
from mainspring.mailbox.nats.mailbox import NatsMailbox
from nats_support import ON_ASYNCIO, place, several
from servers import NatsServer
from stopwatch import Stopwatch

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.parametrize("anyio_backend", ON_ASYNCIO, ids=("asyncio", "uvloop")),
]
INFO = {"server_id": "x", "version": "2.9.10", "headers": True, "max_payload": 1 << 20}
LARGE = "x" * 500_000


# --------------------------------------------------------------------------------------------------- standing still


CALLS = {
    "send": lambda box, held: box.send("x"),
    "a large send": lambda box, held: box.send(LARGE),
    "large sends": lambda box, held: box.send_many([LARGE] * 20),
    "receive": lambda box, held: box.receive(),
    "a waiting receive": lambda box, held: box.receive(wait_time_seconds=2),
    "counts": lambda box, held: box.counts(),
    "renew": lambda box, held: held[0].renew(60),
    "acknowledge": lambda box, held: held[1].acknowledge(),
    "nack": lambda box, held: held[2].nack(delay=1),
    "dead letter": lambda box, held: held[3].dead_letter("no"),
    "checkpoint": lambda box, held: held[4].save_checkpoint(b"1"),
    "joint acknowledgements": lambda box, held: box.acknowledge_many(held[5:]),
    "cancel": lambda box, held: box.cancel("x"),
    "purge": lambda box, held: box.purge(),
    "dead letters": lambda box, held: box.dead_letters(),
}


async def test_while_a_server_stands_still_every_call_ends_and_then_it_goes_on(anyio_backend):
    """Also those that find the way to the server full of what others have sent."""
    with NatsServer() as server:
        async with NatsMailbox(server.url, name="jobs", timeout=1.0) as box:
            await box.send_many(range(8))
            held = await several(box, 8, lease=600)
            server.send_signal(signal.SIGSTOP)
            ended = []

            async def make(name, call):
                with suppress(MailboxConnectionError):
                    await call(box, held)
                ended.append(name)

            with anyio.move_on_after(15):
                async with anyio.create_task_group() as tasks:
                    for _ in range(20):
                        tasks.start_soon(make, "a large send", CALLS["a large send"])
                    await anyio.sleep(0.2)
                    for name, call in CALLS.items():
                        tasks.start_soon(make, name, call)
            assert sorted(set(ended)) == sorted(CALLS)
            assert len(ended) == 20 + len(CALLS)
            server.send_signal(signal.SIGCONT)
            with anyio.fail_after(20):
                while True:
                    with suppress(MailboxConnectionError):
                        await box.send("last")
                        break
            counts = await box.counts()
            assert counts.pending + counts.in_flight + counts.delayed + counts.settled + counts.dead >= 9


async def test_one_that_stands_still_with_much_on_its_way_is_given_up_for_another(anyio_backend, monkeypatch):
    monkeypatch.setattr("nats.aio.client.shuffle", lambda pool: None)
    with NatsServer() as first, NatsServer() as second:
        url = f"{first.url},{second.url.removeprefix('nats://')}"
        async with NatsMailbox(url, name="jobs", timeout=1.0, silence=1.0) as box:
            first.send_signal(signal.SIGSTOP)
            with anyio.fail_after(20):
                async with anyio.create_task_group() as tasks:

                    async def fill():
                        with suppress(MailboxError):
                            await box.send(LARGE)

                    for _ in range(40):
                        tasks.start_soon(fill)
                while True:
                    with suppress(MailboxConnectionError):
                        await box.send("x")
                        break
                    await anyio.sleep(0.05)
            async with NatsMailbox(second.url, name="jobs") as there:
                assert (await several(there, 1))[0].body in ("x", LARGE)


async def test_what_waited_on_a_lost_connection_is_not_waited_for_on_the_next(anyio_backend):
    with NatsServer() as server:
        async with NatsMailbox(server.url, name="jobs", timeout=2.0) as box:
            async with anyio.create_task_group() as tasks:
                for _ in range(10):
                    tasks.start_soon(box.receive)
            assert len(box._wire.idle) >= 10
            await anyio.to_thread.run_sync(server.stop, signal.SIGKILL)
            with anyio.fail_after(20):
                while box._wire.idle:
                    await anyio.sleep(0.01)
            client = box._wire.driver
            assert len(client._subs) <= 6
            assert len(client._ps.hearers) == len(client._subs)
            await anyio.to_thread.run_sync(server.start)


async def test_one_who_tries_again_and_again_lets_others_run_those_who_reconnect_too(anyio_backend):
    with NatsServer() as server:
        async with NatsMailbox(server.url, name="jobs", timeout=2.0) as box:
            await box.send_many(range(8))
            held = await several(box, 8, lease=600)
            await anyio.to_thread.run_sync(server.stop, signal.SIGKILL)
            with anyio.fail_after(20):
                while box._wire.driver.is_connected:
                    await anyio.sleep(0.01)
            turns = 0

            async def turn():
                nonlocal turns
                while True:
                    turns += 1
                    await anyio.sleep(0)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(turn)
                for name, call in CALLS.items():
                    before = turns
                    for _ in range(20):
                        try:
                            refused = await call(box, held)
                        except MailboxConnectionError:
                            continue
                        assert name == "joint acknowledgements"
                        assert len(refused) == 3
                    assert turns - before >= 19, name
                tasks.cancel_scope.cancel()
            await anyio.to_thread.run_sync(server.start)


# -------------------------------------------------------------------------------------- what nobody understands


class Actor:
    """Plays a server: what it says to the first, the second, ... who connects, and then to whoever asks ``x``."""

    def __init__(self, *logins, says=b""):
        self.logins = list(logins)
        self.says = says
        self.connected = 0
        self.url = ""

    async def serve(self, reader, writer):
        self.connected += 1
        with suppress(OSError, asyncio.IncompleteReadError):
            first, login, hangs_up = self.logins.pop(0) if self.logins else GOOD
            writer.write(first)
            while line := await reader.readline():
                if line == b"PING\r\n":
                    writer.write(login)
                    login = b"PONG\r\n"
                    if hangs_up:
                        break
                elif line.startswith(b"PUB x"):
                    writer.write(self.says)
                elif line.startswith(b"PUB echo"):
                    _, _, reply, _ = line.split()
                    writer.write(b"MSG %b 1 2\r\nhi\r\n" % reply)
        writer.close()


HELLO = b"INFO %b\r\n" % json.dumps(INFO).encode()
GOOD = (HELLO, b"PONG\r\n", False)


@asynccontextmanager
async def playing(actor):
    server = await asyncio.start_server(actor.serve, "127.0.0.1", 0)
    actor.url = f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    wire = Wire([actor.url], {}, 20.0, "mailbox 'jobs'")
    try:
        await wire.open()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wire.keep)
            yield wire
            tasks.cancel_scope.cancel()
    finally:
        with anyio.CancelScope(shield=True):
            await wire.close()
            server.close()


async def until_it_answers(wire):
    with anyio.fail_after(20):
        while True:
            with suppress(MailboxError):
                return await wire.ask("echo")
            await anyio.sleep(0.02)


@pytest.mark.parametrize(
    ("says", "why"),
    [
        (b"SAY " + b"x" * 5_000 + b"\r\n", "cannot be read"),
        (b"\0\1\2", "cannot be read"),
        (b"INFO {\r\n", "cannot be read"),
        (b"INFO []\r\n", "cannot be read"),
        (b"MSG a x 1\r\ny\r\n", "cannot be read"),
        (b"-ERR\r\n", "an error without words"),
        (b"-ERR 'Maximum Connections Exceeded'\r\n", "maximum connections exceeded"),
        (b"-ERR 'User Authentication Expired'\r\n", "user authentication expired"),
        (b"-ERR 'Stale Connection'\r\n", "stale connection"),
    ],
)
async def test_the_call_that_is_out_is_told_why_and_the_connection_made_anew(says, why, anyio_backend):
    actor = Actor(says=says)
    async with playing(actor) as wire:
        with Stopwatch() as watch, pytest.raises(MailboxConnectionError, match=f"(?i)lost: .*{why}"):
            await wire.ask("x")
        assert watch.seconds < 1.5
        assert (await until_it_answers(wire)).data == b"hi"
        assert actor.connected == 2


@pytest.mark.parametrize(
    "login",
    [
        (HELLO, b"-ERR\r\n", True),
        (HELLO, b"", True),
        (HELLO, b"+OK\r\n", False),
        (b"INFO []\r\n", b"", False),
        (b"INFO " + b"x" * 200_000, b"", False),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", b"", True),
        (b"\xff" * 100_000, b"", False),
    ],
    ids=range(7),
)
async def test_a_login_that_goes_wrong_when_it_comes_back_is_tried_again(login, anyio_backend):
    actor = Actor(GOOD, login, login, says=b"SAY what\r\n")
    async with playing(actor) as wire:
        with pytest.raises(MailboxConnectionError):
            await wire.ask("x")
        assert (await until_it_answers(wire)).data == b"hi"
        assert actor.connected >= 4


async def test_who_may_not_hear_the_answers_is_told_so_whenever_the_server_says_it(anyio_backend):
    """The driver's ping can overtake the subscription, so that the connection seems to be made."""
    actor = Actor()
    async with playing(actor) as wire:
        actor.says = b"-ERR 'Permissions Violation for Subscription to \"%b*\"'\r\n" % wire._inbox.encode()
        for subject in ("x", "y"):
            with Stopwatch() as watch, pytest.raises(ConfigError, match=r"lets this user not use '.+\*'; grant"):
                await wire.ask(subject)
            assert watch.seconds < 1
        wire.client._abort()
        assert (await until_it_answers(wire)).data == b"hi"


async def test_who_waits_for_no_pong_any_more_does_not_end_the_reading(anyio_backend):
    async with playing(Actor()) as wire:
        given_up = asyncio.get_running_loop().create_future()
        given_up.cancel()
        await wire.client._send_ping(given_up)
        assert (await wire.ask("echo")).data == b"hi"
        await wire.client.flush()
        assert (await wire.ask("echo")).data == b"hi"


class Slow:
    """Stands before a server whose every word takes that many seconds to arrive."""

    def __init__(self, url, seconds):
        self._host, _, self._port = url.removeprefix("nats://").rpartition(":")
        self._seconds = seconds

    async def serve(self, reader, writer):
        there, upstream = await asyncio.open_connection(self._host, int(self._port))
        ways = ((reader, upstream, 0), (there, writer, self._seconds))
        await asyncio.gather(*(self._pump(*way) for way in ways), return_exceptions=True)

    async def _pump(self, reader, writer, seconds):
        try:
            while more := await reader.read(65_536):
                await anyio.sleep(seconds)
                writer.write(more)
                await writer.drain()
        finally:
            writer.close()


async def test_opening_has_one_end_and_not_one_for_each_of_its_calls(nats_url, anyio_backend):
    async with place(nats_url) as here:
        server = await asyncio.start_server(Slow(nats_url, 0.2).serve, "127.0.0.1", 0)
        here.url = f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"

        async def opened():
            async with here.box(timeout=0.75):
                pass

        for act in (opened, here.box(timeout=0.75).exists):
            with pytest.raises(MailboxConnectionError, match=r"no answer within 0\.75 s"):
                await act()
        server.close()
        here.url = nats_url
