"""The mailboxes of a process share two connections to a server: one for calls, one to listen."""

from __future__ import annotations

import gc
import random
import signal
import warnings
from contextlib import AsyncExitStack, suppress
from functools import partial

import anyio
import anyio.to_thread
import hiredis
import pytest

from mainspring import ConfigError, LoopGroup, MailboxConnectionError, MainLoop, open_mailbox
from mainspring.mailbox.message import Counts
from redis_support import line_to, place, soon
from servers import RedisServer
from support import outcomes

pytestmark = pytest.mark.anyio
BOTH = ["mainspring-calls", "mainspring-listener"]


@pytest.fixture(scope="module")
def server():
    with RedisServer() as own:
        yield own


@pytest.fixture
def here(server):
    """A place on a server to which only this test connects; receives that wait there look only when they are called."""
    with place(server.url, fallback_interval=3_600) as made:
        yield made


@pytest.fixture
def swept(server):
    """The same, where they look ten times a second."""
    with place(server.url, fallback_interval=0.1) as made:
        yield made


def connections(here) -> dict[str, str]:
    """The ids of the connections that mailboxes have, and their names."""
    lines = [dict(part.partition("=")[::2] for part in line.split()) for line in clients(here)]
    return {line["id"]: line["name"] for line in lines if line["name"].startswith("mainspring")}


def clients(here) -> list[str]:
    return here.call("CLIENT", "LIST").decode().splitlines()


def names(here) -> list[str]:
    return sorted(connections(here).values())


async def all_call(mailboxes) -> list[object]:
    """Each counts its messages, all at the same time; once each of them can."""
    with anyio.fail_after(10):
        while errors := [
            one for one in await outcomes(*[box.counts for box in mailboxes]) if isinstance(one, Exception)
        ]:
            assert all(isinstance(error, MailboxConnectionError) for error in errors)
            await anyio.sleep(0.01)
    return [await box.counts() for box in mailboxes]


def elsewhere(here, work) -> None:
    """Do ``work`` in an event loop, and so over connections, of its own."""
    anyio.run(work, here)


# -------------------------------------------------------------------------------------------------- how many there are


@pytest.mark.slow
async def test_forty_mailboxes_with_loops_have_two_connections(here, anyio_backend):
    """They had eighty. Each is called by what another event loop, with connections of its own, sends."""
    handled: set[int] = set()

    async def handle(body: int) -> None:
        handled.add(body)

    async def send_to_all(here) -> None:
        async with AsyncExitStack() as stack:
            for number in range(40):
                await (await stack.enter_async_context(here.mailbox(str(number)))).send(number)
            assert names(here) == sorted(BOTH * 2)

    async with AsyncExitStack() as stack:
        for number in range(40):
            await stack.enter_async_context(MainLoop(here.mailbox(str(number), body=int), handle))
        assert names(here) == BOTH
        await anyio.to_thread.run_sync(elsewhere, here, send_to_all)
        await soon(lambda: len(handled) == 40)
        assert names(here) == BOTH
    assert names(here) == []


async def test_what_shares_is_told_by_server_login_timeout_and_silence_not_by_name(here, anyio_backend):
    here.call("ACL", "SETUSER", "other", "on", ">secret", "~*", "&*", "+@all")
    async with (
        here.mailbox("a"),
        here.mailbox("b", capacity=5),
        open_mailbox(f"{here.url}?name={here.prefix}c"),
    ):
        assert names(here) == BOTH
        assert await here.mailbox("a").exists()
        for others in ({"timeout": 1}, {"silence": 7}):
            async with here.mailbox("d", **others):
                assert names(here) == sorted(BOTH * 2)
        async with here.mailbox("a", username="other", password="secret"):
            assert names(here) == sorted(BOTH * 2)
            with pytest.raises(ConfigError, match="check the user and the password"):
                await here.mailbox("a", username="other", password="wrong").__aenter__()


async def test_mailboxes_that_close_leave_the_others_theirs(here, anyio_backend):
    """Also the first one, whose task reads for all; the last one hangs up, and leaves nothing behind."""
    got: list = []
    leave = anyio.Event()

    async def hold(box, *, task_status) -> None:
        async with box:
            await box.send("x")
            task_status.started()
            await leave.wait()

    async def receive(box) -> None:
        got.extend(await box.receive(wait_time_seconds=600))

    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        async with anyio.create_task_group() as holders:
            for number in range(39):
                await holders.start(hold, here.mailbox(str(number)))
            async with here.mailbox("last") as last, anyio.create_task_group() as group:
                group.start_soon(receive, last)
                await soon(lambda: here.call("ZCARD", here.key("waiters", "last")))
                leave.set()
                await soon(lambda: len(here.call("PUBSUB", "SHARDCHANNELS", "*")) == 2)
                assert names(here) == BOTH
                await last.send("y")
        assert got[0].body == "y"
        await soon(lambda: names(here) == [])
        gc.collect()


async def test_two_of_one_name_are_both_called(here, anyio_backend):
    """Where one of them closes, the other hears still what all are told: here of an instant at which a delay ends."""
    got: list = []

    async def receive() -> None:
        got.extend(await stays.receive(wait_time_seconds=600))

    async with here.mailbox() as stays, here.mailbox() as sender:
        async with here.mailbox() as goes:
            assert await goes.receive(wait_time_seconds=0.01) == []
        with anyio.fail_after(10):
            async with anyio.create_task_group() as group:
                group.start_soon(receive)
                await soon(lambda: stays.statistics().waiting_receives)
                await sender.send("x", delay=0.1)
        assert [message.body for message in got] == ["x"]


# ------------------------------------------------------------------------------------------ what is done once for all


def calls_of(own, command: str) -> int:
    """How often the server was sent a command."""
    for line in own.call("INFO", "commandstats").decode().splitlines():
        name, _, rest = line.partition(":")
        if name == f"cmdstat_{command}":
            return int(rest.partition("calls=")[2].partition(",")[0])
    return 0


def keys_of_calls(own) -> list[int]:
    """How many keys each of the calls of the library was given that the server has noted."""
    return [int(call[2]) for _, _, _, call, *_ in own.call("SLOWLOG", "GET", "-1") if call[0] == b"FCALL"]


async def test_mailboxes_that_wait_are_swept_together(anyio_backend):
    """All begin to wait within the tenth of an interval, and a call for each would cost the server twenty times as much."""
    notes_all = ("--slowlog-log-slower-than", "0", "--slowlog-max-len", "10000")
    with RedisServer(*notes_all) as own, place(own.url, fallback_interval=0.5) as here:
        async with AsyncExitStack() as stack:
            boxes = [await stack.enter_async_context(here.mailbox(str(number))) for number in range(20)]
            async with anyio.create_task_group() as group:
                for box in boxes:
                    group.start_soon(partial(box.receive, wait_time_seconds=600))
                await soon(lambda: all(box.statistics().waiting_receives for box in boxes))
                of_one = min(keys_of_calls(here))
                await soon(lambda: max(keys_of_calls(here)) >= len(boxes) / 2 * of_one)
                group.cancel_scope.cancel()


async def test_a_long_poll_that_follows_another_makes_no_call(here, anyio_backend):
    """The process has been on the list since the first one, and a message would have woken it."""
    async with here.mailbox() as mailbox, here.mailbox() as sender:
        assert await mailbox.receive(wait_time_seconds=0.01) == []
        before = mailbox.statistics().batches
        for _ in range(5):
            assert await mailbox.receive(wait_time_seconds=0.01) == []
        assert mailbox.statistics().batches == before
        await sender.send("x")
        (message,) = await mailbox.receive(wait_time_seconds=600)
        assert (message.body, message.delivery_count) == ("x", 1)
        await message.acknowledge()
        await sender.send("y", delay=0.05)
        assert [one.body for one in await mailbox.receive(wait_time_seconds=600)] == ["y"]


async def test_a_mailbox_opened_after_the_last_one_has_closed_is_told_at_once(here, anyio_backend):
    """However often that happens, it is not taken for a connection that breaks."""
    got: list = []

    async def receive(mailbox) -> None:
        got.extend(await mailbox.receive(wait_time_seconds=600))

    async with line_to(here) as line, here.mailbox() as sender, anyio.create_task_group() as group:
        with anyio.fail_after(4):  # else they would take up to a second each
            for number in range(16):
                async with line.mailbox() as mailbox:
                    group.start_soon(receive, mailbox)
                    await soon(here.waiters)
                    await sender.send(number)
                    await soon(lambda number=number: len(got) == number + 1)


@pytest.mark.slow
async def test_a_mailbox_that_opens_when_the_server_is_back_brings_the_others_back(anyio_backend):
    """It has connected, and the next try of the listener may be a second away."""
    with RedisServer() as own, place(own.url, fallback_interval=3_600) as here:
        async with here.mailbox("waits") as waits:
            for _ in range(3):
                own.stop(signal.SIGKILL)
                await anyio.sleep(1.2)
                own.start()
                async with here.mailbox("opens"):
                    await soon(lambda: waits.statistics().connected, 0.3)


@pytest.mark.parametrize("goes", ["first", "last"])
async def test_what_serves_all_goes_on_where_a_mailbox_closes(swept, goes, anyio_backend):
    """Waits end, what is due comes, and a message that woke no process is found."""
    got: list = []

    async def hold(box, leave, *, task_status) -> None:
        async with box:
            task_status.started()
            await leave.wait()

    async with anyio.create_task_group() as group:
        leave = anyio.Event()
        if goes == "first":
            await group.start(hold, swept.mailbox("goes"), leave)
        async with swept.mailbox("stays") as stays, swept.mailbox("stays") as sender:
            if goes == "last":
                await group.start(hold, swept.mailbox("goes"), leave)

            async def receive() -> None:
                got.extend(await stays.receive(wait_time_seconds=600))

            group.start_soon(receive)
            await soon(lambda: swept.waiters("stays"))
            leave.set()
            await soon(lambda: len(swept.call("PUBSUB", "SHARDCHANNELS", "*")) == 3)
            swept.call("DEL", swept.key("waiters", "stays"))
            await sender.send("found")
            await soon(lambda: [one.body for one in got] == ["found"])
            with anyio.fail_after(5):
                assert await stays.receive(wait_time_seconds=0.05) == []
                await sender.send("due", delay=0.05)
                assert [one.body for one in await stays.receive(wait_time_seconds=600)] == ["due"]


async def test_a_sweep_that_is_out_when_its_mailbox_closes_is_made_again(here, anyio_backend):
    """It would have told of the next instant at which something is due."""
    got: list = []
    leave, left = anyio.Event(), anyio.Event()

    async def hold(box, *, task_status) -> None:
        async with box:
            task_status.started()
            await leave.wait()
        left.set()

    async def receive(box) -> None:
        got.extend(await box.receive(wait_time_seconds=600))

    async with line_to(here) as line, anyio.create_task_group() as group:
        await group.start(hold, line.mailbox("goes"))
        async with line.mailbox("stays") as stays, here.mailbox("stays") as sender:
            group.start_soon(receive, stays)
            await soon(lambda: here.waiters("stays"))
            line.answers.hold()
            first = await sender.send("cancelled", delay=0.1)
            await sender.send("due", delay=0.3)
            await sender.cancel(first)
            await line.answers.arrived()
            leave.set()
            await left.wait()
            line.answers.let_go()
            await soon(lambda: [one.body for one in got] == ["due"])


async def test_a_mailbox_that_cannot_be_swept_keeps_none_from_it(swept, anyio_backend):
    got: list = []

    async def receive(box) -> None:
        with suppress(MailboxConnectionError):
            got.extend(await box.receive(wait_time_seconds=600))

    async with swept.mailbox("a") as spoilt, swept.mailbox("b") as whole, anyio.create_task_group() as group:
        for box in (spoilt, whole):
            group.start_soon(receive, box)
            await soon(lambda box=box: box.statistics().waiting_receives)
        swept.call("DEL", swept.key("waiters", "b"))
        swept.call("SET", swept.key("leases", "a"), "another program's")
        await whole.send("x")
        await soon(lambda: len(got) == 1)
        await soon(lambda: not spoilt.statistics().waiting_receives)


async def test_a_mailbox_that_closes_while_the_server_is_away_leaves_the_others_theirs(anyio_backend):
    """What it still owed is nothing to them."""
    with RedisServer() as own, place(own.url, fallback_interval=0.05) as here:
        got: list = []

        async def receive(box) -> None:
            while not got:
                with suppress(MailboxConnectionError):
                    got.extend(await box.receive(wait_time_seconds=600))

        async with here.mailbox("stays", timeout=0.5) as stays:
            async with here.mailbox("goes", timeout=0.5) as goes:
                assert await goes.receive(wait_time_seconds=0.01) == []
                own.stop(signal.SIGKILL)
                with suppress(MailboxConnectionError):
                    await goes.receive(wait_time_seconds=0.01, visibility_timeout=30)
                await soon(lambda: goes.statistics().unconfirmed)
            async with anyio.create_task_group() as group:
                group.start_soon(receive, stays)
                await anyio.sleep(0.2)
                own.start()
                await soon(lambda: stays.statistics().connected)
                async with here.mailbox("stays") as sender:
                    await sender.send("x")
        assert [one.body for one in got] == ["x"]


@pytest.mark.slow
async def test_a_login_that_is_refused_for_a_while_ends_nothing(swept, anyio_backend):
    for rule in ("on", ">secret", "~*", "&*", "+@all"):
        swept.call("ACL", "SETUSER", "passing", rule)
    got: list = []

    async def receive(box) -> None:
        while not got:
            with suppress(MailboxConnectionError):
                got.extend(await box.receive(wait_time_seconds=600))

    async with swept.mailbox(username="passing", password="secret") as mailbox, anyio.create_task_group() as group:
        group.start_soon(receive, mailbox)
        await soon(lambda: mailbox.statistics().waiting_receives)
        swept.call("ACL", "SETUSER", "passing", "off")
        with suppress(hiredis.ReplyError):
            swept.call("CLIENT", "KILL", "USER", "passing")
        await anyio.sleep(0.5)
        swept.call("ACL", "SETUSER", "passing", "on")
        await soon(lambda: mailbox.statistics().connected)
        async with swept.mailbox() as sender:
            await sender.send("x")
            await soon(lambda: got)


async def test_the_functions_are_loaded_once(anyio_backend):
    async def ignored(body: str) -> None:
        """Nothing comes."""

    with RedisServer() as own, place(own.url) as here:
        async with LoopGroup([MainLoop(here.mailbox(str(number)), ignored, name=str(number)) for number in range(40)]):
            assert calls_of(here, "function|load") == 1


# --------------------------------------------------------------------------------------------- errors, and what breaks


@pytest.mark.slow
async def test_an_error_of_one_is_nothing_to_its_neighbours(here, anyio_backend):
    async with AsyncExitStack() as stack:
        boxes = [await stack.enter_async_context(here.mailbox(str(number))) for number in range(5)]
        ids = set(connections(here))
        here.call("SET", here.key("messages", "2"), "another program's")
        for _ in range(3):
            found = await outcomes(*[partial(box.send, "x") for box in boxes])
            assert [isinstance(one, MailboxConnectionError) for one in found] == [False, False, True, False, False]
            assert "WRONGTYPE" in str(found[2])
        here.call("SPUBLISH", here.key("all", "1"), "nobody can read this")
        here.call("SPUBLISH", here.key("all", "1"), "m*1\r\n")
        await soon(lambda: boxes[1].statistics().reconnects and boxes[1].statistics().connected)
        assert [len(await box.receive(max_messages=9)) for box in boxes if box is not boxes[2]] == [3] * 4
        assert set(connections(here)) == ids


@pytest.mark.slow
async def test_a_connection_that_is_lost_is_made_once_for_all(here, anyio_backend):
    async with AsyncExitStack() as stack:
        boxes = [await stack.enter_async_context(here.mailbox(str(number))) for number in range(40)]
        before = connections(here)
        made = int(here.call("INFO", "stats").split(b"total_connections_received:")[1].split()[0])
        for killed in before:
            here.call("CLIENT", "KILL", "ID", killed)
        calls = len(before)
        counts = await all_call(boxes)
        await soon(lambda: all(box.statistics().connected and box.statistics().reconnects == 2 for box in boxes))
        assert counts == [Counts()] * 40
        now = int(here.call("INFO", "stats").split(b"total_connections_received:")[1].split()[0])
        assert now - made - calls - 1 == 2, "connections that were made, but for those of this test itself"
        assert names(here) == BOTH
        assert not set(connections(here)) & set(before)
        got: list = []

        async def receive(box) -> None:
            got.extend(await box.receive(wait_time_seconds=600))

        async with anyio.create_task_group() as group:
            for number, box in enumerate(boxes):
                group.start_soon(receive, box)
                await soon(lambda number=number: here.call("ZCARD", here.key("waiters", str(number))))
                await box.send(number)
        assert sorted(message.body for message in got) == list(range(40))


async def test_a_server_that_is_away_is_asked_by_one_for_all(anyio_backend):
    with RedisServer() as own, place(own.url) as here:
        async with AsyncExitStack() as stack:
            boxes = [await stack.enter_async_context(here.mailbox(str(number))) for number in range(10)]
            own.stop(signal.SIGKILL)
            found = await outcomes(*[box.counts for box in boxes])
            assert all(isinstance(one, MailboxConnectionError) for one in found)
            own.start()
            assert await all_call(boxes) == [Counts()] * 10
            await soon(lambda: all(box.statistics().connected for box in boxes))
            assert names(here) == BOTH


@pytest.mark.slow
async def test_the_timeout_of_one_ends_no_call_of_its_neighbours(anyio_backend):
    """Mailboxes of another timeout have connections of their own."""
    with RedisServer() as own, place(own.url) as here:
        async with here.mailbox("hasty", timeout=0.2) as hasty, here.mailbox("patient", timeout=30) as patient:
            own.send_signal(signal.SIGSTOP)
            found: list = []

            async def send() -> None:
                found.append(await patient.send("x"))

            async with anyio.create_task_group() as group:
                group.start_soon(send)
                for _ in range(2):
                    with pytest.raises(MailboxConnectionError, match=r"did not answer within 0\.2 s"):
                        await hasty.send("x")
                assert not found
                own.send_signal(signal.SIGCONT)
            assert await patient.counts() == Counts(pending=1)
            await hasty.send("y")
            assert len(await patient.receive()) == 1
            await soon(lambda: names(here) == sorted(BOTH * 2))


# ------------------------------------------------------------------------------------------------- whose an answer is


async def test_cancelled_callers_take_no_answer_of_others(here, anyio_backend):
    """Each mailbox has another number of messages; callers are cancelled at any instant of their calls."""
    rng = random.Random(7)
    async with AsyncExitStack() as stack:
        boxes = [await stack.enter_async_context(here.mailbox(str(number))) for number in range(6)]
        for number, box in enumerate(boxes):
            await box.send_many(range(number + 1))
        wrong: list = []
        done = 0

        async def ask(number: int) -> None:
            nonlocal done
            for _ in range(60):
                with anyio.move_on_after(rng.choice([0, 0, 0.0002, 0.0005, 0.001, 1])):
                    counts = await boxes[number].counts()
                    if counts != Counts(pending=number + 1):
                        wrong.append((number, counts))
                    done += 1

        with anyio.fail_after(20):
            async with anyio.create_task_group() as group:
                for number in range(6):
                    group.start_soon(ask, number)
        assert wrong == []
        assert done
        assert names(here) == BOTH


@pytest.mark.slow
async def test_large_messages_and_their_cancelled_senders_disturb_nobody(here, anyio_backend):
    """A body that the socket takes in many pieces: the sender goes between two of them."""
    body = "x" * 6_000_000
    async with here.mailbox("large") as large, here.mailbox("small") as small:
        async with anyio.create_task_group() as group:
            for number in range(6):
                scope = anyio.CancelScope()

                async def send(scope=scope) -> None:
                    with scope:
                        await large.send(body)

                group.start_soon(send)
                for _ in range(number):
                    await anyio.lowlevel.checkpoint()
                scope.cancel()
                await small.send(number)
        got = await small.receive(max_messages=9)
        assert [message.body for message in got] == list(range(6))
        found = await outcomes(partial(large.receive, max_messages=9), *[partial(small.send, "y")] * 5)
        assert not [one for one in found if isinstance(one, Exception)]
        assert all(message.body == body for message in found[0])
        assert (await small.counts()).pending == 5
        assert names(here) == BOTH
