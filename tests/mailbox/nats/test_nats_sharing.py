"""The mailboxes of a process share one connection to a server."""

from __future__ import annotations

import asyncio
import json
import signal
import urllib.request
from contextlib import AsyncExitStack
from functools import partial

import anyio
import anyio.to_thread
import pytest

from mainspring import ConfigError, LoopGroup, MailboxConnectionError, MainLoop
from mainspring.mailbox.message import Counts
from mainspring.mailbox.nats import shared_client
from mainspring.mailbox.nats.mailbox import NatsMailbox
from mainspring.mailbox.nats.names import Names
from nats_line import NatsLine
from nats_support import reconnected
from ports import free_port
from servers import NatsServer
from support import outcomes

pytestmark = [pytest.mark.anyio, pytest.mark.loops("asyncio", "uvloop")]


@pytest.fixture
async def line(here):
    """A line to the server on which only this test connects: ``line.links`` are the connections."""
    return await here.line()


async def links(line, count: int) -> None:
    """Wait until there are ``count`` connections."""
    with anyio.fail_after(10):
        while len(line.links) != count:
            await anyio.sleep(0.01)


async def soon(condition) -> None:
    with anyio.fail_after(10):
        while not condition():
            await anyio.sleep(0.01)


def elsewhere(work, *arguments) -> None:
    """Do ``work`` in an event loop, and so over a connection, of its own."""
    anyio.run(work, *arguments)


async def use(box) -> None:
    """Open a mailbox, and close it."""
    async with box:
        await box.counts()


# -------------------------------------------------------------------------------------------------- how many there are


@pytest.mark.slow
async def test_twenty_mailboxes_with_loops_have_one_connection(here, line):
    """Each is called by what another event loop, with a connection of its own, sends."""
    handled: set[int] = set()

    async def handle(body: int) -> None:
        handled.add(body)

    async def send_to_all() -> None:
        async with AsyncExitStack() as stack:
            for number in range(20):
                await (await stack.enter_async_context(here.box(str(number), over=line))).send(number)

    boxes = [here.box(str(number), over=line, body=int) for number in range(20)]
    async with LoopGroup([MainLoop(box, handle, name=str(n)) for n, box in enumerate(boxes)]):
        await soon(lambda: all(box.statistics().waiting_receives for box in boxes))
        assert len(line.links) == 1
        await anyio.to_thread.run_sync(elsewhere, send_to_all)
        await soon(lambda: len(handled) == 20)
        await links(line, 1)
    await links(line, 0)


async def test_what_shares_is_told_by_the_settings_of_the_connection_not_by_name(here, line):
    async with here.box("a", over=line), here.box("b", over=line, ack_wait=5, storage="memory"):
        assert len(line.links) == 1
        assert await here.box("a", over=line).exists()
        assert not await here.box("none", over=line).exists()
        assert len(line.links) == 1
        for number, options in enumerate(({"timeout": 6}, {"silence": 6})):
            async with here.box("a", over=line, **options):
                assert len(line.links) == 2, number
    await links(line, 0)
    assert await here.box("a", over=line).exists()
    await links(line, 0)


async def test_another_login_has_a_connection_of_its_own(anyio_backend):
    with NatsServer("--user", "me", "--pass", "x") as server:
        url = f"nats://me:{{}}@127.0.0.1:{server.port}"
        async with NatsMailbox(url.format("x"), name="a") as box:
            with anyio.fail_after(5), pytest.raises(ConfigError, match=r"mailbox 'b'.*check the user and the password"):
                await NatsMailbox(url.format("y"), name="b", timeout=30).__aenter__()
            await box.send("x")


# ------------------------------------------------------------------------------------------------------------- closing


@pytest.mark.parametrize("goes", ["first", "last"])
async def test_a_mailbox_that_closes_leaves_the_others_the_connection(here, line, goes):
    """Its own waiting receives end, and theirs go on. What is lost afterwards is made anew."""
    got: dict[str, list] = {}

    async def receive(name, box) -> None:
        got[name] = [message.body for message in await box.receive(wait_time_seconds=600)]

    async with AsyncExitStack() as stack:
        boxes = {}
        for name in sorted(("goes", "stays"), reverse=goes == "last"):
            boxes[name] = await stack.enter_async_context(here.box(name, over=line))
        group = await stack.enter_async_context(anyio.create_task_group())
        for name, box in boxes.items():
            group.start_soon(receive, name, box)
        await soon(lambda: all(box.statistics().waiting_receives for box in boxes.values()))
        await boxes["goes"].close()
        await soon(lambda: got == {"goes": []})
        assert len(line.links) == 1
        await boxes["stays"].send("x")
        await soon(lambda: got == {"goes": [], "stays": ["x"]})
        line.cut()
        await reconnected(boxes["stays"])
        line.say(b"-ERR 'User Authentication Expired'\r\n")  # the driver would close it for good
        await reconnected(boxes["stays"], 2)
        assert await boxes["stays"].counts() == Counts(in_flight=1)
    await links(line, 0)


async def test_a_mailbox_that_closes_takes_its_subscriptions_along(anyio_backend):
    with NatsServer("-m", str(monitor := free_port())) as server:

        def subscriptions() -> int:
            with urllib.request.urlopen(f"http://127.0.0.1:{monitor}/connz") as answer:
                (connection,) = json.load(answer)["connections"]
                return connection["subscriptions"]

        async with NatsMailbox(server.url, name="stays") as stays:
            assert await stays.receive() == []
            before = await anyio.to_thread.run_sync(subscriptions)
            for _ in range(3):
                async with NatsMailbox(server.url, name="goes") as goes:
                    assert await goes.receive() == []
            assert await stays.counts() == Counts()
            assert await anyio.to_thread.run_sync(subscriptions) == before


# --------------------------------------------------------------------------------------------------- what breaks


async def test_a_connection_that_is_lost_is_made_once_for_all(here, line):
    async with AsyncExitStack() as stack:
        boxes = [await stack.enter_async_context(here.box(str(number), over=line)) for number in range(5)]
        found: list = []

        async def receive(box) -> None:
            found.extend(await outcomes(partial(box.receive, wait_time_seconds=600)))

        async with anyio.create_task_group() as group:
            for box in boxes:
                group.start_soon(receive, box)
            await soon(lambda: all(box.statistics().waiting_receives for box in boxes))
            line.cut()
        assert [type(one) for one in found] == [MailboxConnectionError] * 5
        assert all(f"-{number}'" in str(one) for number, one in enumerate(sorted(found, key=str)))
        for box in boxes:
            await reconnected(box)
            assert box.statistics().reconnects == 1
            await box.send("x")
            assert await box.counts() == Counts(pending=1)
        assert len(line.links) == 1


async def test_a_mailbox_that_opens_while_the_connection_is_lost_is_told_why_at_once(anyio_backend):
    """And again: the mailboxes that have the connection get it back when the server returns."""
    with NatsServer() as server:
        url = f"nats://127.0.0.1:{server.port}"
        async with NatsMailbox(url, name="open", timeout=30) as box:
            server.stop(signal.SIGKILL)
            await soon(lambda: not box.statistics().connected)
            for _ in range(2):
                late = [NatsMailbox(url, name=f"late-{number}", timeout=30) for number in range(3)]
                with anyio.fail_after(5):
                    found = await outcomes(*[one.__aenter__ for one in late], *[one.exists for one in late])
                assert [type(one) for one in found] == [MailboxConnectionError] * 6
                for number, one in enumerate(found):
                    assert str(one).startswith(
                        f"mailbox 'late-{number % 3}': no connection to a NATS server at {url}: "
                    )
                    assert str(one).endswith("; start the server, or correct the host and the port of the URL")
            server.start()
            async with NatsMailbox(url, name="late", timeout=30) as late_box:
                await reconnected(box)
                await late_box.send("x")
                await box.send("x")


async def test_a_login_that_is_refused_from_now_on_is_told_to_all(anyio_backend):
    """Those that are open get the connection back when it is accepted again."""
    with NatsServer("--user", "me", "--pass", "x") as server:
        url = f"nats://me:x@127.0.0.1:{server.port}"
        async with AsyncExitStack() as stack:
            goes = await stack.enter_async_context(NatsMailbox(url, name="goes"))
            stays = await stack.enter_async_context(NatsMailbox(url, name="stays"))
            options, server.options = server.options, ("--user", "me", "--pass", "y")
            server.stop()
            server.start()
            with anyio.fail_after(10):
                while "authorization violation" not in str(*await outcomes(stays.counts)).lower():
                    await anyio.sleep(0.05)
            for opens in (NatsMailbox(url, name="late").__aenter__, NatsMailbox(url, name="late").exists):
                with (
                    anyio.fail_after(5),
                    pytest.raises(ConfigError, match=r"'late'.*check the user and the password"),
                ):
                    await opens()
            await goes.close()
            server.options = options
            server.stop()
            server.start()
            await reconnected(stays)
            await stays.send("x")


# ------------------------------------------------------------------------------------------------------------- opening


async def test_a_mailbox_that_is_there_is_opened_with_one_question(here, line):
    """It asks for all that it has before it knows of any."""
    async with here.box(over=line):
        pass
    answers = line.hold_answers("$JS.API.STREAM.INFO.*", count=-1)
    asked = line.watch("$JS.API.CONSUMER.INFO.*")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(use, here.box(over=line))
        await asked.full()
        answers.open()


async def test_openers_that_are_cancelled_leave_nothing_half_open(here, line):
    """The server does not answer. The first of them connects for all; it goes, and the last one needs no second timeout."""
    before = asyncio.all_tasks()
    line.silent = True
    async with anyio.create_task_group() as group:
        scopes = [anyio.CancelScope() for _ in range(3)]
        opened: list = []

        async def opens(number: int, scope) -> None:
            with scope:
                async with here.box(str(number), over=line, timeout=30) as box:
                    opened.append(number)
                    await box.send("x")

        for number, scope in enumerate(scopes):
            group.start_soon(opens, number, scope)
            await anyio.sleep(0.05)
        for scope in scopes[:2]:
            scope.cancel()
            await anyio.sleep(0.05)
        line.silent = False
        await soon(lambda: opened)
    assert opened == [2]
    await links(line, 0)
    with anyio.move_on_after(5):
        while asyncio.all_tasks() - before:
            await anyio.sleep(0.01)
    assert asyncio.all_tasks() - before == set()


@pytest.mark.slow
async def test_openers_wait_for_a_silent_server_no_longer_than_their_timeout(here, line):
    line.silent = True
    boxes = [here.box(str(number), over=line, timeout=1) for number in range(3)]
    began = anyio.current_time()
    found = await outcomes(*[box.__aenter__ for box in boxes])
    assert anyio.current_time() - began < 2.5
    assert [type(one) for one in found] == [MailboxConnectionError] * 3
    line.silent = False
    async with boxes[0] as box:
        await box.send("x")


@pytest.mark.slow
async def test_an_opener_has_its_whole_timeout_once_it_is_its_turn_to_create(here, line):
    """The server answers no creation of the first four, two of which are out at a time."""

    async def send_to(box) -> None:
        async with box:
            await box.send("x")

    count = 2 * shared_client.MAX_CREATIONS
    line.hold_answers("$JS.API.STREAM.CREATE.*", count=count)
    boxes = [here.box(str(number), over=line, timeout=1) for number in range(count + 1)]
    found = await outcomes(*[partial(send_to, box) for box in boxes])
    assert [type(one) for one in found] == [MailboxConnectionError] * count + [type(None)]


@pytest.mark.slow
async def test_what_one_mailbox_may_not_do_is_no_reason_why_another_gets_no_answer(tmp_path, anyio_backend):
    denied = Names.of("a").to_queue
    config = tmp_path / "server.conf"
    config.write_text(
        f"authorization {{ users = [{{user: me, password: x, permissions: {{publish: {{deny: '{denied}>'}}}}}}] }}\n"
    )
    with NatsServer("-c", str(config)) as server:
        line = NatsLine(server.url)
        await line.open()
        url = line.url.replace("//", "//me:x@")
        async with NatsMailbox(url, name="a", timeout=1) as box:
            with pytest.raises(ConfigError, match="does not let this user use"):
                await box.send("x")
            line.silent = True
            told = r"'b'.*: no answer within 1 s; check that a NATS server listens there$"
            with pytest.raises(MailboxConnectionError, match=told):
                await NatsMailbox(url, name="b", timeout=1).__aenter__()
            line.silent = False
        await line.close()
