"""NATS servers that stand still, or say what nobody understands: every wait has an end, and the connection is made anew."""

from __future__ import annotations

import json
import signal
from contextlib import suppress

import anyio
import anyio.to_thread
import pytest

from mainspring.errors import ConfigError, MailboxConnectionError, MailboxError
from mainspring.mailbox.message import Counts
from mainspring.mailbox.nats.mailbox import NatsMailbox
from nats_line import NatsLine
from nats_support import reconnected, several, until_it_works
from servers import NatsServer
from stopwatch import Stopwatch

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.loops("asyncio", "uvloop"),
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


@pytest.mark.slow
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


@pytest.mark.slow
async def test_one_that_stands_still_with_much_on_its_way_is_given_up_for_another(anyio_backend):
    with NatsServer() as one, NatsServer() as another:
        servers = {NatsLine(server.url): server for server in (one, another)}
        for line in servers:
            await line.open()
        url = ",".join(line.url.removeprefix("nats://") for line in servers)
        async with NatsMailbox(f"nats://{url}", name="jobs", timeout=1.0, silence=1.0) as box:
            (used,) = [line for line in servers if line.links]
            first, second = servers.pop(used), *servers.values()
            first.send_signal(signal.SIGSTOP)
            with anyio.fail_after(20):
                async with anyio.create_task_group() as tasks:

                    async def fill():
                        with suppress(MailboxError):
                            await box.send(LARGE)

                    for _ in range(40):
                        tasks.start_soon(fill)
                await until_it_works(lambda: box.send("x"))
            async with NatsMailbox(second.url, name="jobs") as there:
                assert (await several(there, 1))[0].body in ("x", LARGE)
        for line in (used, *servers):
            await line.close()


@pytest.mark.slow
async def test_what_waited_on_a_lost_connection_is_not_waited_for_on_the_next(here):
    line = await here.line()
    async with here.box(over=line) as box:
        async with anyio.create_task_group() as tasks:
            for _ in range(10):
                tasks.start_soon(box.receive)
        assert len(line.links[0].subscriptions) >= 12
        line.cut()
        await reconnected(box)
        await box.counts()
        assert 2 <= len(line.links[0].subscriptions) <= 6


@pytest.mark.slow
async def test_one_who_tries_again_and_again_lets_others_run_those_who_reconnect_too(anyio_backend):
    with NatsServer() as server:
        async with NatsMailbox(server.url, name="jobs", timeout=2.0) as box:
            await box.send_many(range(8))
            held = await several(box, 8, lease=600)
            await anyio.to_thread.run_sync(server.stop, signal.SIGKILL)
            with anyio.fail_after(20):
                while box.statistics().connected:
                    await anyio.sleep(0.01)
            assert repr(box).startswith("<NatsMailbox 'jobs' open, not connected")
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


@pytest.mark.slow
async def test_a_server_whose_answers_are_behind_large_messages_is_not_silent(here):
    line = await here.line()
    async with here.box(over=line, silence=0.5) as box:
        line.hold_all(lambda frame: frame.verb == b"PONG")
        for _ in range(20):
            await box.counts()
            await anyio.sleep(0.1)
        assert box.statistics().reconnects == 0


# -------------------------------------------------------------------------------------- what nobody understands


HELLO = b"INFO %b\r\n" % json.dumps(INFO).encode()


def acting(first, login, hangs_up):
    """Stands in for a server: what it says at first, and to the ping with which a login ends."""

    async def act(reader, writer):
        said = login
        writer.write(first)
        while line := await reader.readline():
            if line == b"PING\r\n":
                writer.write(said)
                said = b"PONG\r\n"
                if hangs_up:
                    break

    return act


async def say_to(line, send, says):
    """Say something to the one who sends just then."""
    await send.full()
    line.say(says)


@pytest.mark.slow
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
async def test_the_call_that_is_out_is_told_why_and_the_connection_made_anew(says, why, here):
    line = await here.line()
    send = line.hold(here.names().to_queue + "*")
    async with here.box(over=line, timeout=20) as box, anyio.create_task_group() as tasks:
        tasks.start_soon(say_to, line, send, says)
        with Stopwatch() as watch, pytest.raises(MailboxConnectionError, match=f"(?i)lost: .*{why}"):
            await box.send("x")
        assert watch.seconds < 1.5
        assert await until_it_works(box.counts) == Counts()
        await reconnected(box)
        assert line.made == 2


@pytest.mark.slow
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
async def test_a_login_that_goes_wrong_when_it_comes_back_is_tried_again(login, here):
    line = await here.line()
    async with here.box(over=line, timeout=20) as box:
        line.actors = [acting(*login), acting(*login)]
        line.say(b"SAY what\r\n")
        await reconnected(box)
        assert await until_it_works(box.counts) == Counts()
        assert line.made >= 4


@pytest.mark.slow
async def test_who_may_not_hear_the_answers_is_told_so_whenever_the_server_says_it(here):
    """The driver's ping can overtake the subscription, so that the connection seems to be made. The next call tries again."""
    line = await here.line()
    send = line.hold(here.names().to_queue + "*")
    async with here.box(over=line, timeout=20) as box, anyio.create_task_group() as tasks:
        (inbox,) = [subject for subject in line.links[0].subscriptions.values() if subject.endswith(".*")]
        says = b"-ERR 'Permissions Violation for Subscription to \"%b\"'\r\n" % inbox.encode()
        tasks.start_soon(say_to, line, send, says)
        with Stopwatch() as watch, pytest.raises(ConfigError, match=r"does not let this user use '.+\*'; grant"):
            await box.send("x")
        assert watch.seconds < 1
        assert await box.counts() == Counts()
        line.cut()
        await reconnected(box)
        assert await until_it_works(box.counts) == Counts()


@pytest.mark.slow
async def test_opening_has_one_end_and_not_one_for_each_of_its_calls(here):
    line = await here.line()
    line.lag = 0.2

    async def opened():
        async with here.box(over=line, timeout=0.75):
            pass

    for act in (opened, here.box(over=line, timeout=0.75).exists):
        with pytest.raises(MailboxConnectionError, match=r"no answer within 0\.75 s"):
            await act()
