"""What a hostile review of the Redis mailbox broke: connections that end at bad moments, and what piles up meanwhile."""

from __future__ import annotations

import gc
import math
import tracemalloc
from contextlib import suppress
from functools import partial

import anyio
import pytest

from mainspring import MailboxConnectionError
from mainspring.mailbox import batcher as batching
from mainspring.mailbox.message import Counts
from mainspring.mailbox.redis import listener as redis_listener
from mainspring.mailbox.redis.client import Link
from mainspring.mailbox.redis.connection import ServerError
from mainspring.mailbox.redis.topology import Directory
from mainspring.mailbox.redis.url import parse_server
from redis_support import counts, place, soon
from servers import RedisServer

pytestmark = pytest.mark.anyio


@pytest.fixture
def here(redis_url):
    with place(redis_url, fallback_interval=3_600) as made:  # only what is sent to it wakes a process
        yield made


# ------------------------------------------------------------------------------------------ what is sent and not heard


async def test_what_was_sent_goes_back_though_the_next_message_found_nobody_there(here, waiting):
    """Its process is on the list again when its connection breaks, and a message comes before it has noticed."""
    async with here.mailbox() as mailbox, here.mailbox() as sender:
        listener, call, noticed = mailbox._receiving.listener, mailbox._link.call, anyio.Event()
        late: list[bytes] = []
        hear, listener._hear = listener._hear, late.append
        await waiting.start(mailbox)
        await sender.send("x")
        await soon(lambda: late)
        await waiting.start(mailbox)

        async def held_up(*arguments):
            await noticed.wait()
            return await call(*arguments)

        mailbox._link.call = held_up
        listener._hear, name = hear, listener._name
        await listener._wire.close()
        await soon(lambda: not here.call("PUBSUB", "SHARDNUMSUB", here.key(name))[1])
        await sender.send("y")
        mailbox._link.call = call
        noticed.set()
        await soon(lambda: sum(len(found) for _, found in waiting.got) == 2)
        messages = [message for _, found in waiting.got for message in found]
        assert [message.body for message in messages] == ["x", "y"]
        assert {(message.delivery_count, message.attempt) for message in messages} == {(1, 1)}


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


def elsewhere(here):
    """A mailbox that shares no connection, as in another process: it logs in with a name."""
    return here.mailbox(username="default")


class Kept:
    """A stream whose end the other side does not notice."""

    def __init__(self, stream) -> None:
        self.receive, self.send, self.extra = stream.receive, stream.send, stream.extra

    async def aclose(self) -> None:
        pass


async def test_what_is_sent_to_a_name_that_a_claim_wrote_on_the_list_as_its_connection_broke_goes_back(here, waiting):
    """The server has not noticed, and sends there; the process has not heard of that claim, nor of one before it."""
    async with here.mailbox() as mailbox, elsewhere(here) as sender:
        listener, call = mailbox._receiving.listener, mailbox._link.call
        asked, go_on, listen = anyio.Event(), anyio.Event(), mailbox._directory.listen

        async def slow(*arguments):
            mailbox._link.call = call
            result = await call(*arguments)
            asked.set()
            await go_on.wait()
            return result

        async def held_up():
            mailbox._directory.listen = listen
            await go_on.wait()
            return await listen()

        mailbox._link.call, mailbox._directory.listen = slow, held_up
        wire = listener._wire._connection.wire
        stream, wire._stream = wire._stream, Kept(wire._stream)
        waiting.group.start_soon(waiting.start, mailbox)
        await asked.wait()
        listener._scope.cancel()
        await soon(lambda: not listener.live)
        await sender.send("x")
        assert await sender.counts() == Counts(in_flight=1)
        go_on.set()
        await waiting.until(1)
        (message,) = waiting.got[0][1]
        assert (message.body, message.delivery_count, message.attempt) == ("x", 1, 1)
        await stream.aclose()


async def test_a_process_that_is_on_the_list_by_a_claim_it_has_not_heard_of_leaves_it(here, waiting):
    """The server does not notice that its connection broke, and would send there whatever comes."""
    async with here.mailbox() as mailbox, elsewhere(here) as sender:
        listener, call = mailbox._receiving.listener, mailbox._link.call
        asked, go_on = anyio.Event(), anyio.Event()

        async def slow(*arguments):
            mailbox._link.call = call
            result = await call(*arguments)
            asked.set()
            await go_on.wait()
            return result

        mailbox._link.call, name, wire = slow, listener._name, listener._wire._connection.wire
        stream, wire._stream = wire._stream, Kept(wire._stream)
        scope = anyio.CancelScope()
        waiting.group.start_soon(waiting.start, mailbox, 600, scope)
        await asked.wait()
        listener._scope.cancel()
        await soon(lambda: listener._name != name and listener.live)
        scope.cancel()
        go_on.set()
        await mailbox.counts()
        assert here.call("ZCARD", here.key("waiters")) == 0
        await sender.send("x")
        assert await sender.counts() == Counts(pending=1)
        await stream.aclose()


# ------------------------------------------------------------------------------------------------ what nobody can read


@pytest.mark.parametrize(
    "said", ["dsoon", f"d{10**400}", "w", "m*1\r\n$1\r\n1\r\n", "m*3\r\n$1\r\n1\r\n", "m:5\r\n", "m", ""]
)
async def test_what_nobody_can_read_is_no_end_of_listening(here, waiting, said):
    async with here.mailbox() as mailbox, here.mailbox() as sender:
        await waiting.start(mailbox)
        here.call("SPUBLISH", here.key("all"), said)
        await anyio.sleep(0.05)
        await soon(lambda: mailbox._receiving.listener.live)
        await sender.send("x")
        await waiting.until(1)
        assert waiting.got[0][1][0].body == "x"


# ----------------------------------------------------------------------------------------------------- other servers


async def test_a_listener_that_finds_another_server_than_the_calls_brings_them_along(here, waiting):
    """They had connected before the mailbox moved; where they are, nobody who listens here is called."""
    async with here.mailbox() as mailbox, here.mailbox() as sender:
        link, listener = mailbox._link, mailbox._receiving.listener
        link._wire.host, name = ("elsewhere", 6379), listener._name
        listener._scope.cancel()
        await soon(lambda: listener._name != name and listener.live)
        await waiting.start(mailbox)
        assert link.host == listener._host
        await sender.send("x")
        await waiting.until(1)


async def test_a_listener_whose_calls_stay_elsewhere_looks_again(here, waiting):
    """It had found the old server, and they the new one, while it connected."""
    async with here.mailbox() as mailbox:
        link, listener, listen, hosts = mailbox._link, mailbox._receiving.listener, mailbox._directory.listen, []

        async def found():
            wire = await listen()
            if not hosts:
                wire.host = ("elsewhere", 6379)
            hosts.append(wire.host)
            return wire

        mailbox._directory.listen, link._busy = found, True
        listener._scope.cancel()
        await soon(lambda: len(hosts) > 1 and listener.live)
        link._busy = False
        assert listener._host == link.host


async def test_connections_that_break_as_soon_as_they_are_made_become_rarer(here, monkeypatch, anyio_backend):
    failures: list[int] = []

    def no_pause(failed, **_):
        failures.append(failed)
        return 0.0

    monkeypatch.setattr("mainspring.mailbox.redis.connections.backoff", no_pause)
    async with here.mailbox() as mailbox:
        listener = mailbox._receiving.listener

        async def break_it():
            name = listener._name
            await soon(lambda: listener.live)
            listener._scope.cancel()
            await soon(lambda: listener._name != name and listener.live)

        for _ in range(4):
            await break_it()
        assert failures == [1, 2, 3, 4]
        monkeypatch.setattr(redis_listener, "RECONNECT_MAXIMUM", 0.0)  # one that has lasted
        await break_it()
        assert failures[-1] == 1


async def test_a_server_that_takes_no_functions_as_it_is_no_primary_is_left(here, monkeypatch, anyio_backend):
    """It was one as the connection was made."""
    link = Link(Directory(parse_server(here.url, {}), b"x"), 5)
    wire = await link.connect()
    call = type(wire).call

    async def demoted(self, *command):
        if command[0] == "FUNCTION":
            monkeypatch.setattr(type(wire), "call", call)
            raise ServerError("READONLY You can't write against a read only replica.")
        return await call(self, *command)

    monkeypatch.setattr(type(wire), "call", demoted)
    await link._load(wire)
    assert not link.connected
    await link.close()


# --------------------------------------------------------------------------------------------------- what is at an end


async def test_a_call_that_connects_as_its_mailbox_closes_ends_with_it(here, monkeypatch, anyio_backend):
    """Its patience is longer than that of the close: it would connect behind it, and nobody would hang up."""
    monkeypatch.setattr(batching, "CLOSE_TIMEOUT", 0.1)
    ends: list[object] = []
    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            async with here.mailbox(timeout=600) as mailbox:
                connect, asked, go_on = mailbox._directory.connect, anyio.Event(), anyio.Event()

                async def slow():
                    asked.set()
                    await go_on.wait()
                    return await connect()

                async def send() -> None:
                    try:
                        ends.append(await mailbox.send("x"))
                    except MailboxConnectionError as error:
                        ends.append(error)

                mailbox._directory.connect = slow
                await mailbox._link._drop()
                group.start_soon(send)
                await asked.wait()
            await soon(lambda: ends)
            go_on.set()
        assert isinstance(ends[0], MailboxConnectionError)
        assert not mailbox._link.connected


async def test_a_link_that_was_closed_connects_no_more(here, anyio_backend):
    """Also one whose connection is there as it is closed."""
    link = Link(Directory(parse_server(here.url, {}), b"x"), 5)
    connect = link._directory.connect

    async def closed_just_then():
        wire = await connect()
        await link.close()
        return wire

    link._directory.connect = closed_just_then
    for _ in range(2):
        with pytest.raises(MailboxConnectionError):
            await link.call((), ())
        assert not link.connected


# ------------------------------------------------------------------------------------------------- what does not pile up


async def test_where_calls_fail_for_long_little_is_owed(here, anyio_backend):
    """Each receive that ends may have been on the list."""
    async with here.mailbox() as mailbox, here.mailbox() as other:
        call = mailbox._link.call

        async def refused(*_):
            raise MailboxConnectionError("the Redis server says: NOREPLICAS")

        mailbox._link.call = refused
        for number in range(40):
            with pytest.raises(MailboxConnectionError):
                await mailbox.receive(wait_time_seconds=1, visibility_timeout=30 + number % 3)
        assert len(mailbox._receiving.batches._owed) <= 3
        mailbox._link.call = call
        assert await mailbox.receive(wait_time_seconds=0.01) == []
        await mailbox.counts()
        assert here.call("ZCARD", here.key("waiters")) == 0
        await other.send("x")
        assert await mailbox.counts() == Counts(pending=1)


async def test_a_process_that_never_stops_waiting_has_no_more_names_than_receives(here, waiting):
    """Each receive wants another length of lease; all but one of them end, and that one is called still."""
    async with here.mailbox() as mailbox, here.mailbox() as sender:
        listener = mailbox._receiving.listener
        await waiting.start(mailbox, visibility=600)
        for number in range(30):
            assert await mailbox.receive(wait_time_seconds=0.001, visibility_timeout=30 + number) == []
        await mailbox.counts()  # behind what the last one left
        assert here.call("ZRANGE", here.key("waiters"), 0, -1) == [f"{listener._name}.600000000".encode()]
        assert len(listener._listed) == len(listener._written) == 1
        await sender.send("x")
        await waiting.until(1)
        assert waiting.got[0][1][0].body == "x"


async def test_names_that_only_might_have_been_on_the_list_are_few_too(here, monkeypatch, anyio_backend):
    """Each receive has something at once, for another length of lease; at last the connection breaks."""
    monkeypatch.setattr(redis_listener, "MOST_NAMES", 5)
    async with here.mailbox() as mailbox, here.mailbox() as sender:
        listener = mailbox._receiving.listener
        async with anyio.create_task_group() as group:
            group.start_soon(partial(mailbox.receive, wait_time_seconds=60))
            await soon(lambda: mailbox._waiters.parked)
            await sender.send("handed")
        await sender.send_many(range(29))
        most = 0
        for number in range(29):
            await mailbox.receive(wait_time_seconds=60, visibility_timeout=30 + number)
            most = max(most, len(listener._written), len(listener._unwanted))
        assert most <= 6
        assert listener._written == set()
        name = listener._name
        assert f"g{name}".encode() in here.call("HKEYS", here.key("state"))
        listener._scope.cancel()
        await soon(lambda: listener._name != name and listener.live)
        await mailbox.counts()
        assert f"g{name}".encode() not in here.call("HKEYS", here.key("state"))


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
        names = here.call("ZRANGE", here.key("waiters"), 0, -1)
        assert [name.partition(b".")[2] for name in names] == [b"600000000"]
        scope.cancel()
        await soon(lambda: mailbox._waiters.parked == 1)
        await mailbox.counts()
        await sender.send(2)
        await waiting.until(3)
        assert [found[0].body for _, found in waiting.got] == [0, 1, 2]


async def test_what_is_on_its_way_to_a_name_that_is_given_up_is_anothers(here, waiting):
    async with here.mailbox() as mailbox, here.mailbox() as sender:
        listener = mailbox._receiving.listener
        hear, late = listener._hear, []
        scope = anyio.CancelScope()
        await waiting.start(mailbox, visibility=600, scope=scope)
        await waiting.start(mailbox, visibility=700)
        listener._hear = late.append
        await sender.send("x")
        await soon(lambda: late)
        scope.cancel()
        await soon(lambda: mailbox._waiters.parked == 1)
        await mailbox.counts()
        listener._hear = hear
        hear(late[0])
        await waiting.until(1)
        (message,) = waiting.got[0][1]
        assert (message.body, message.delivery_count, message.attempt) == ("x", 1, 1)
        assert await sender.counts() == Counts(in_flight=1)


async def test_names_that_are_given_up_while_calls_fail_are_given_up_later(here, waiting):
    async with here.mailbox() as mailbox:
        call = mailbox._link.call

        async def refused(*_):
            raise MailboxConnectionError("the Redis server says: NOREPLICAS")

        await waiting.start(mailbox, visibility=600)
        scopes = [anyio.CancelScope() for _ in range(3)]
        for number, scope in enumerate(scopes):
            await waiting.start(mailbox, visibility=30 + number, scope=scope)
        mailbox._link.call = refused
        for left, scope in enumerate(scopes, 1):
            scope.cancel()
            await soon(lambda left=left: mailbox._waiters.parked == 4 - left)
            with pytest.raises(MailboxConnectionError):
                await mailbox.counts()
        assert len(mailbox._receiving.batches._owed) == 1
        mailbox._link.call = call
        await mailbox.counts()
        assert here.call("ZCARD", here.key("waiters")) == 1


async def test_what_was_sent_is_not_kept(here, anyio_backend):
    """Neither what has been taken, nor what has not."""

    async def send_much(mailbox) -> None:
        with suppress(MailboxConnectionError):
            await mailbox.send_many(["x" * 1_000_000 for _ in range(10)])

    async with here.mailbox() as mailbox:
        await mailbox.send("x")
        tracemalloc.start()
        try:
            for broken in (False, True):
                if broken:
                    await mailbox._link._wire._connection.wire.close()
                await send_much(mailbox)
                await anyio.sleep(0)  # the event loop keeps what it told a task last
                gc.collect()
                assert tracemalloc.get_traced_memory()[0] < 5_000_000
        finally:
            tracemalloc.stop()
        assert await mailbox.counts() == Counts(pending=11)


async def test_what_is_owed_waits_for_no_call_of_anybodys(here, monkeypatch, anyio_backend):
    """The answer to a claim is lost, and its process asks for nothing more."""
    here.options["fallback_interval"] = 0.05
    async with here.mailbox() as mailbox, here.mailbox() as other:
        await other.send("x")
        read, wire = type(mailbox._link._wire).read, mailbox._link._wire

        async def cut(self):
            result = await read(self)
            if self is wire:
                raise anyio.EndOfStream
            return result

        monkeypatch.setattr(type(wire), "read", cut)
        with pytest.raises(MailboxConnectionError):
            await mailbox.receive(visibility_timeout=600)
        await counts(other, Counts(pending=1))
        await soon(lambda: mailbox._receiving.sweeper.due == math.inf)  # and nobody looks for ever
        (message,) = await other.receive()
        assert (message.delivery_count, message.attempt) == (1, 1)


@pytest.mark.parametrize(("what", "copies"), [("body", 4), ("checkpoint", 2)])
async def test_one_that_is_too_large_to_be_handed_over_is_not_copied_for_it(anyio_backend, what, copies):
    """The server would stand still meanwhile, and need the memory. A body it copies to store it, and to read it."""
    size = 8_000_000
    with RedisServer() as own, place(own.url) as here:
        async with here.mailbox() as mailbox, here.mailbox() as sender, anyio.create_task_group() as group:
            if what == "checkpoint":
                await sender.send("x")
                (message,) = await sender.receive()
                await message.save_checkpoint(b"x" * size)
            group.start_soon(partial(mailbox.receive, wait_time_seconds=600))
            await soon(lambda: mailbox._waiters.parked)
            mailbox._link.call = partial(anyio.sleep_forever)
            await (sender.send("x" * size) if what == "body" else message.nack())
            lines = here.call("INFO", "memory").decode().splitlines()
            memory = dict(line.split(":", 1) for line in lines if ":" in line)
            assert int(memory["used_memory_vm_functions"]) < copies * size
            group.cancel_scope.cancel()


async def test_more_are_handed_over_with_one_call_than_a_command_takes_arguments(here, anyio_backend):
    """Each is for a receive of a process, or of a length of lease, of its own."""
    count, got = 4_100, []
    async with here.mailbox() as mailbox, here.mailbox() as sender:

        async def receive(number: int) -> None:
            got.extend(await mailbox.receive(wait_time_seconds=60, visibility_timeout=30 + number / 1_000))

        async with anyio.create_task_group() as group:
            for number in range(count):
                group.start_soon(receive, number)
            await soon(lambda: mailbox._waiters.parked == count, 60)
            assert here.call("ZCARD", here.key("waiters")) == count
            for number in range(count):
                group.start_soon(partial(sender.send, number, priority=number % 2))
        assert sorted(message.body for message in got) == list(range(count))
        assert await sender.counts() == Counts(in_flight=count)
