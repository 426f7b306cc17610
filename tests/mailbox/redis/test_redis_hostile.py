"""What a hostile review of the Redis mailbox broke: connections that end at bad moments, and what piles up meanwhile."""

from __future__ import annotations

import gc
import tracemalloc
from contextlib import contextmanager, suppress
from functools import partial

import anyio
import pytest

from mainspring import MailboxConnectionError
from mainspring.core import random
from mainspring.mailbox.message import Counts
from redis_support import CALLS, LISTENER, counts, line_to, place, soon
from scripted_redis import Sentinel
from servers import RedisServer
from stopwatch import Stopwatch
from support import outcomes

pytestmark = pytest.mark.anyio


@pytest.fixture
def here(redis_url):
    with place(redis_url, fallback_interval=3_600) as made:  # only what is sent to it wakes a process
        yield made


@pytest.fixture(scope="module")
def own_server():
    with RedisServer("--appendonly", "no") as own:
        yield own


@pytest.fixture
def own(own_server):
    """A place on a server that only this test uses."""
    with place(own_server.url, fallback_interval=3_600) as made:
        yield made


@contextmanager
def busy(here):
    """Have the server run a script that does not end by itself."""
    here.call("CONFIG", "SET", "busy-reply-threshold", 1)
    with here.connected("EVAL", "while true do end", 0):
        try:
            yield
        finally:
            here.call("SCRIPT", "KILL")


async def cut_short(call):
    """Make a call that is cancelled at once."""
    with anyio.CancelScope() as scope:
        scope.cancel()
        await call()


@contextmanager
def refusing(here):
    """Have the server refuse calls, as one does that has lost its replicas."""
    here.call("CONFIG", "SET", "min-replicas-to-write", 1)
    try:
        yield
    finally:
        here.call("CONFIG", "SET", "min-replicas-to-write", 0)


# ------------------------------------------------------------------------------------------ what is sent and not heard


async def test_what_was_sent_goes_back_though_the_next_message_found_nobody_there(here, line, waiting):
    """Its process is on the list again when its connection breaks, and a message comes before it has noticed."""
    async with line.mailbox() as mailbox:
        (channel,) = here.channels()
        async with here.mailbox() as sender:
            await waiting.start(mailbox)
            line.news.hold()
            await sender.send("x")
            await line.news.arrived()
            await waiting.start(mailbox)
            line.calls.hold()
            line.cut(LISTENER)
            await soon(lambda: channel not in here.channels())
            await sender.send("y")
            line.calls.let_go()
            line.news.let_go()
            await soon(lambda: len(waiting.messages) == 2)
            assert sorted(message.body for message in waiting.messages) == ["x", "y"]
            assert {(message.delivery_count, message.attempt) for message in waiting.messages} == {(1, 1)}


async def test_what_was_sent_to_processes_that_died_long_ago_is_forgotten(here, anyio_backend):
    """No lease lasts longer than twelve hours, so there is nothing any more that could go back."""
    async with here.mailbox() as mailbox:
        now = int(here.call("TIME")[0]) * 1_000_000
        old, new = now - 43_201 * 1_000_000, now - 43_100 * 1_000_000
        here.call("HSET", here.key("state"), "gOld", old, "gNew", new)
        async with here.mailbox():
            assert here.call("HMGET", here.key("state"), "gOld", "gNew") == [None, str(new).encode()]
        await mailbox.send("x")
        assert await mailbox.counts() == Counts(pending=1)


async def test_what_is_sent_to_a_name_that_a_claim_wrote_on_the_list_as_its_connection_broke_goes_back(
    here, line, waiting
):
    """The server has not noticed, and sends there; the process has not heard of that claim, nor of one before it."""
    async with line.mailbox() as mailbox, here.mailbox() as sender:
        line.answers.hold()
        waiting.begin(mailbox)
        await line.answers.arrived()
        line.news.hold()  # so that it cannot listen again
        line.cut(LISTENER, unnoticed=True)
        await soon(lambda: not mailbox.statistics().connected)
        await sender.send("x")
        assert await sender.counts() == Counts(in_flight=1)
        line.answers.let_go()
        line.news.let_go()
        await waiting.until(1)
        (message,) = waiting.messages
        assert (message.body, message.delivery_count, message.attempt) == ("x", 1, 1)


async def test_what_comes_for_the_old_name_after_the_connection_was_made_again_is_not_taken_back(here, line, waiting):
    """It is on the list still by that name: the server has not heard that the process is to leave it."""
    async with line.mailbox() as mailbox, here.mailbox() as sender:
        await waiting.start(mailbox)
        line.calls.hold()
        line.cut(LISTENER)
        await soon(lambda: mailbox.statistics().reconnects and mailbox.statistics().connected)
        await sender.send("x")
        await anyio.sleep(0.02)  # by then it would have come
        waiting.begin(mailbox)
        await anyio.sleep(0.02)
        line.calls.let_go()
        await waiting.until(1)
        await mailbox.counts()
        assert [message.body for message in waiting.messages] == ["x"]
        assert await sender.counts() == Counts(in_flight=1)


async def test_a_process_that_is_on_the_list_by_a_claim_it_has_not_heard_of_leaves_it(here, line, waiting):
    """The server does not notice that its connection broke, and would send there whatever comes."""
    async with line.mailbox() as mailbox, here.mailbox() as sender:
        line.answers.hold()
        scope = anyio.CancelScope()
        waiting.begin(mailbox, 600, scope)
        await line.answers.arrived()
        line.cut(LISTENER, unnoticed=True)
        await soon(lambda: mailbox.statistics().reconnects and mailbox.statistics().connected)
        scope.cancel()
        line.answers.let_go()
        await mailbox.counts()
        assert here.waiters() == []
        await sender.send("x")
        assert await sender.counts() == Counts(pending=1)


# ------------------------------------------------------------------------------------------------ what nobody can read


@pytest.mark.slow
@pytest.mark.parametrize(
    "said", ["dsoon", f"d{10**400}", "w", "m*1\r\n$1\r\n1\r\n", "m*3\r\n$1\r\n1\r\n", "m:5\r\n", "m", ""]
)
async def test_what_nobody_can_read_is_no_end_of_listening(here, waiting, said):
    async with here.mailbox() as mailbox, here.mailbox() as sender:
        await waiting.start(mailbox)
        here.call("SPUBLISH", here.key("all"), said)
        await anyio.sleep(0.05)
        await soon(lambda: mailbox.statistics().connected)
        await sender.send("x")
        await waiting.until(1)
        assert waiting.got[0][1][0].body == "x"


# ----------------------------------------------------------------------------------------------------- other servers


async def test_a_listener_that_finds_another_server_than_the_calls_brings_them_along(here, waiting):
    """They had connected before the mailbox moved; where they are, nobody who listens here is called."""
    async with (
        line_to(here) as old,
        line_to(here) as new,
        Sentinel(old.port) as sentinel,
        sentinel.mailbox(here) as mailbox,
        here.mailbox() as sender,
    ):
        old.news.hold()
        old.cut(LISTENER)
        await old.news.arrived()  # it connects to the old server once more
        await mailbox.counts()  # and so do they
        sentinel.primary = new.port
        old.cut(LISTENER)
        await soon(lambda: LISTENER in new.names() and mailbox.statistics().connected)
        await soon(lambda: old.names() == [])
        await waiting.start(mailbox)
        assert new.names() == [CALLS, LISTENER]
        await sender.send("x")
        await waiting.until(1)


async def test_a_listener_whose_calls_stay_elsewhere_looks_again(here, anyio_backend):
    """It had found the old server, and they the new one, while it connected."""
    async with (
        line_to(here) as old,
        line_to(here) as new,
        Sentinel(old.port) as sentinel,
        sentinel.mailbox(here) as mailbox,
        anyio.create_task_group() as group,
    ):
        old.news.hold()
        old.cut(LISTENER)
        await old.news.arrived()
        sentinel.primary = new.port
        await mailbox.counts()
        new.answers.hold()
        group.start_soon(mailbox.counts)  # so they cannot leave
        await new.answers.arrived()
        old.news.let_go()
        await soon(lambda: (old.names(), new.names()) == ([], [CALLS, LISTENER]))
        new.answers.let_go()
        await soon(lambda: mailbox.statistics().connected)


async def test_a_mailbox_that_opens_as_the_listener_leaves_its_server_does_not_count_as_one_that_hears(here, waiting):
    """The answer to its subscription comes from the server that was left: it fails to open, or hears."""

    async def receive() -> None:
        while not waiting.got:
            with suppress(MailboxConnectionError):
                async with sentinel.mailbox(here, "other") as other:
                    waiting.got.append((other, await other.receive(wait_time_seconds=600)))

    async with (
        line_to(here) as old,
        line_to(here) as new,
        Sentinel(old.port) as sentinel,
        sentinel.mailbox(here) as mailbox,
        here.mailbox("other") as sender,
    ):
        old.news.hold()
        waiting.group.start_soon(receive)
        await old.news.arrived()
        sentinel.primary = new.port
        old.cut(CALLS)
        for _ in range(2):
            await outcomes(mailbox.counts)
        await soon(lambda: LISTENER in new.names())
        old.news.let_go()
        await soon(lambda: here.waiters("other"))
        await sender.send("x")
        await waiting.until(1)


@pytest.mark.slow
@pytest.mark.loops("asyncio")
async def test_connections_that_break_as_soon_as_they_are_made_become_rarer(line, anyio_backend):
    """Until one has lasted for a second: the next one is made at once again."""

    async def break_it() -> float:
        made, began = mailbox.statistics().reconnects, anyio.current_time()
        line.cut(LISTENER)
        await soon(lambda: mailbox.statistics().reconnects > made)
        return anyio.current_time() - began

    with random.seeded(4):  # the pauses are random: these add up to more than a second, and the last one would be long
        async with line.mailbox() as mailbox:
            assert sum([await break_it() for _ in range(8)]) > 1
            await anyio.sleep(1)
            with Stopwatch() as watch:
                await break_it()
            assert watch.seconds < 0.4


async def test_a_server_that_takes_no_functions_as_it_is_no_primary_is_left(own, anyio_backend):
    """It was one as the connection was made."""
    loads = 0

    def on_command(passage, command) -> None:
        nonlocal loads
        if command[:2] == [b"FUNCTION", b"LOAD"]:
            loads += 1
            own.call("REPLICAOF", *(("127.0.0.1", 1) if loads == 1 else ("NO", "ONE")))

    async with line_to(own) as line, line.mailbox() as mailbox:
        own.call("FUNCTION", "FLUSH")
        line.on_command = on_command
        await mailbox.send("x")
        assert loads == 2
        assert mailbox.statistics().reconnects == 1
        assert await mailbox.counts() == Counts(pending=1)


# --------------------------------------------------------------------------------------------------- what is at an end


async def test_a_call_that_connects_as_its_mailbox_closes_ends_with_it(line, anyio_backend):
    """Its patience is longer than that of the close: it would connect behind it, and nobody would hang up."""
    ends: list[object] = []
    with anyio.fail_after(5):
        async with line.mailbox(timeout=600) as mailbox, anyio.create_task_group() as group:

            async def send() -> None:
                ends.extend(await outcomes(lambda: mailbox.send("x")))

            line.cut(CALLS)
            await outcomes(mailbox.counts)
            line.calls.hold()
            group.start_soon(send)
            await line.calls.arrived()
            with anyio.move_on_after(0.1):
                await mailbox.close()
            await soon(lambda: ends)
            line.calls.let_go()
    assert isinstance(ends[0], MailboxConnectionError)
    await soon(lambda: line.names() == [])


async def test_a_mailbox_that_closes_as_a_connection_has_been_made_leaves_it(line, anyio_backend):
    """Its close is cut short, in any turn of the event loop around the last answer that it connects with."""

    def on_command(passage, command) -> None:
        if command[0] == b"CONFIG" and passage.name == CALLS:
            line.answers.hold()

    for steps in range(6):
        async with anyio.create_task_group() as group, line.mailbox() as mailbox:
            line.cut(CALLS)
            await outcomes(mailbox.counts)
            line.on_command = on_command
            group.start_soon(outcomes, mailbox.counts)
            await line.answers.arrived()
            line.answers.let_go()
            line.on_command = None
            for _ in range(steps):
                await anyio.lowlevel.checkpoint()
            await cut_short(mailbox.close)
        await soon(lambda: line.names() == [])


async def test_a_call_that_is_to_be_tried_again_as_its_mailbox_closes_connects_no_more(own, anyio_backend):
    """The server had no time for it: a script runs there."""
    async with line_to(own) as line, anyio.create_task_group() as group:
        async with line.mailbox() as mailbox:
            with busy(own):
                answered = line.answers.passed
                group.start_soon(outcomes, mailbox.counts)
                await soon(lambda: line.answers.passed > answered)
                await cut_short(mailbox.close)
                await anyio.sleep(0.05)  # by then it would have been
        assert line.opened == 2
        await soon(lambda: line.names() == [])


# ------------------------------------------------------------------------------------------------- what does not pile up


async def test_where_calls_fail_for_long_little_is_owed(own, anyio_backend):
    """Each receive that ends may have been on the list."""
    async with own.mailbox() as mailbox, own.mailbox() as other:
        with refusing(own):
            for number in range(40):
                with pytest.raises(MailboxConnectionError, match="NOREPLICAS"):
                    await mailbox.receive(wait_time_seconds=1, visibility_timeout=30 + number % 3)
            assert mailbox.statistics().unconfirmed <= 3
        assert await mailbox.receive(wait_time_seconds=0.01) == []
        await soon(lambda: own.waiters() == [])
        assert mailbox.statistics().unconfirmed == 0
        await other.send("x")
        assert await mailbox.counts() == Counts(pending=1)


class Names:
    """How many names, by which a process is called on a channel, stand in each command that passes over a line."""

    def __init__(self, line, channel) -> None:
        self.written: list[int] = []
        self._begin = f"{channel}.".encode()
        line.on_command = self._count

    def _count(self, passage, command) -> None:
        self.written.append(sum(part.startswith(self._begin) for part in command))


async def test_a_process_that_never_stops_waiting_has_no_more_names_than_receives(here, line, waiting):
    """Each receive wants another length of lease; all but one of them end, and that one is called still."""
    async with line.mailbox() as mailbox:
        (channel,) = here.channels()
        names = Names(line, channel)
        async with here.mailbox() as sender:
            await waiting.start(mailbox, visibility=600)
            for number in range(30):
                assert await mailbox.receive(wait_time_seconds=0.001, visibility_timeout=30 + number) == []
            await soon(lambda: here.waiters() == [f"{channel}.600000000".encode()])
            await sender.send("x")
            await waiting.until(1)
            assert waiting.messages[0].body == "x"
        names.written.clear()
    assert max(names.written) == 1, "names that it took back as it closed"


async def test_names_that_only_might_have_been_on_the_list_are_few_too(here, line, anyio_backend):
    """Each receive has something at once, for another length of lease; at last the connection breaks."""
    count = 250
    async with line.mailbox() as mailbox:
        (channel,) = here.channels()
        async with here.mailbox() as sender:
            async with anyio.create_task_group() as group:
                group.start_soon(partial(mailbox.receive, wait_time_seconds=60))
                await soon(lambda: mailbox.statistics().waiting_receives)
                await sender.send("handed")
            await sender.send_many(range(count))
            names = Names(line, channel)
            for number in range(count):
                await mailbox.receive(wait_time_seconds=60, visibility_timeout=30 + number)
            assert f"g{channel}".encode() in here.call("HKEYS", here.key("state"))
            line.cut(LISTENER)
            await soon(lambda: mailbox.statistics().reconnects and mailbox.statistics().connected)
            await mailbox.counts()
            assert f"g{channel}".encode() not in here.call("HKEYS", here.key("state"))
            given_up = [number for number in names.written if number > 1]
            assert max(given_up) < 110
            assert sum(given_up) >= count


async def test_one_that_ends_leaves_another_on_the_list_for_those_that_wait_still(here, waiting):
    """Only its name is there, as it has waited longest; the one of the others was called by."""
    async with here.mailbox() as mailbox, here.mailbox() as sender:
        scope = anyio.CancelScope()
        await waiting.start(mailbox, visibility=600)
        await waiting.start(mailbox, visibility=600, scope=scope)
        for _ in range(2):
            await waiting.start(mailbox, visibility=700)
        for number in range(2):
            await sender.send(number)
            await waiting.until(number + 1)
            await mailbox.counts()
        assert [name.partition(b".")[2] for name in here.waiters()] == [b"600000000"]
        scope.cancel()
        await soon(lambda: mailbox.statistics().waiting_receives == 1)
        await mailbox.counts()
        await sender.send(2)
        await waiting.until(3)
        assert [found[0].body for _, found in waiting.got] == [0, 1, 2]


async def test_what_is_on_its_way_to_a_name_that_is_given_up_is_anothers(here, line, waiting):
    async with line.mailbox() as mailbox, here.mailbox() as sender:
        scope = anyio.CancelScope()
        await waiting.start(mailbox, visibility=600, scope=scope)
        await waiting.start(mailbox, visibility=700)
        line.news.hold()
        await sender.send("x")
        await line.news.arrived()
        scope.cancel()
        await soon(lambda: mailbox.statistics().waiting_receives == 1)
        await mailbox.counts()
        line.news.let_go()
        await waiting.until(1)
        (message,) = waiting.messages
        assert (message.body, message.delivery_count, message.attempt) == ("x", 1, 1)
        assert await sender.counts() == Counts(in_flight=1)


async def test_names_that_are_given_up_while_calls_fail_are_given_up_later(own, waiting):
    async with own.mailbox() as mailbox:
        await waiting.start(mailbox, visibility=600)
        scopes = [anyio.CancelScope() for _ in range(3)]
        for number, scope in enumerate(scopes):
            await waiting.start(mailbox, visibility=30 + number, scope=scope)
        with refusing(own):
            for left, scope in enumerate(scopes, 1):
                scope.cancel()
                await soon(lambda left=left: mailbox.statistics().waiting_receives == 4 - left)
                with pytest.raises(MailboxConnectionError):
                    await mailbox.counts()
            assert mailbox.statistics().unconfirmed == 1
        await mailbox.counts()
        assert len(own.waiters()) == 1


async def test_what_was_sent_is_not_kept(line, anyio_backend):
    """Neither what has been taken, nor what has not."""

    async def send_much(mailbox) -> None:
        with suppress(MailboxConnectionError):
            await mailbox.send_many(["x" * 1_000_000 for _ in range(10)])

    async with line.mailbox() as mailbox:
        await mailbox.send("x")
        tracemalloc.start()
        try:
            for broken in (False, True):
                if broken:
                    line.cut(CALLS)
                await send_much(mailbox)
                await anyio.sleep(0.01)  # the event loop keeps what it told a task last, and the line what it read last
                gc.collect()
                assert tracemalloc.get_traced_memory()[0] < 5_000_000
        finally:
            tracemalloc.stop()
        assert await mailbox.counts() == Counts(pending=11)


async def test_what_is_owed_waits_for_no_call_of_anybodys(here, anyio_backend):
    """The answer to a claim is lost, and its process asks for nothing more."""
    here.options["fallback_interval"] = 0.05
    async with line_to(here) as line, line.mailbox() as mailbox, here.mailbox() as other:
        await other.send("x")
        line.answers.hold()
        async with anyio.create_task_group() as group:
            group.start_soon(line.lose_answer)
            with pytest.raises(MailboxConnectionError):
                await mailbox.receive(visibility_timeout=600)
        await counts(other, Counts(pending=1))
        batches = mailbox.statistics().batches
        await anyio.sleep(0.2)
        assert mailbox.statistics().batches <= batches + 1, "it looks for ever"
        (message,) = await other.receive()
        assert (message.delivery_count, message.attempt) == (1, 1)


@pytest.mark.parametrize(("what", "copies"), [("body", 4), ("checkpoint", 2)])
async def test_one_that_is_too_large_to_be_handed_over_is_not_copied_for_it(anyio_backend, what, copies):
    """The server would stand still meanwhile, and need the memory. A body it copies to store it, and to read it."""
    size = 8_000_000
    with RedisServer() as server, place(server.url) as here:
        async with (
            line_to(here) as line,
            line.mailbox() as mailbox,
            here.mailbox() as sender,
            anyio.create_task_group() as group,
        ):
            if what == "checkpoint":
                await sender.send("x")
                (message,) = await sender.receive()
                await message.save_checkpoint(b"x" * size)
            group.start_soon(partial(mailbox.receive, wait_time_seconds=600))
            await soon(lambda: mailbox.statistics().waiting_receives)
            line.calls.hold()  # else it would ask for it, which needs memory, too
            await (sender.send("x" * size) if what == "body" else message.nack())
            lines = here.call("INFO", "memory").decode().splitlines()
            memory = dict(line.split(":", 1) for line in lines if ":" in line)
            assert int(memory["used_memory_vm_functions"]) < copies * size
            group.cancel_scope.cancel()
            line.calls.let_go()


@pytest.mark.slow
async def test_more_are_handed_over_with_one_call_than_a_command_takes_arguments(here, anyio_backend):
    """Each is for a receive of a process, or of a length of lease, of its own."""
    count, got = 4_100, []
    async with here.mailbox() as mailbox, here.mailbox() as sender:

        async def receive(number: int) -> None:
            got.extend(await mailbox.receive(wait_time_seconds=60, visibility_timeout=30 + number / 1_000))

        async with anyio.create_task_group() as group:
            for number in range(count):
                group.start_soon(receive, number)
            await soon(lambda: mailbox.statistics().waiting_receives == count, 60)
            assert len(here.waiters()) == count
            for number in range(count):
                group.start_soon(partial(sender.send, number, priority=number % 2))
        assert sorted(message.body for message in got) == list(range(count))
        assert await sender.counts() == Counts(in_flight=count)
