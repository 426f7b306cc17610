"""The Redis mailbox where things go wrong: ids that come twice, full memory, calls that fail halfway, keys that are lost."""

from __future__ import annotations

import logging

import anyio
import pytest

from mainspring import (
    ConfigError,
    InvalidParameterError,
    MailboxConnectionError,
    MainLoop,
    ReceiptHandleExpiredError,
    SerializationError,
)
from mainspring.mailbox.message import CancelOutcome, Counts, Envelope
from mainspring.mailbox.redis import calls as redis_calls
from mainspring.mailbox.redis import mailbox as redis_mailbox
from mainspring.mailbox.redis import other_nodes as redis_other_nodes
from mainspring.mailbox.redis import topology as redis_topology
from mainspring.mailbox.redis.connection import ServerError
from mainspring.mailbox.redis.other_nodes import Beside
from mainspring.mailbox.redis.topology import Directory
from mainspring.mailbox.redis.url import parse_server
from redis_support import place, used_memory
from servers import RedisServer
from stopwatch import Stopwatch
from support import outcomes

pytestmark = pytest.mark.anyio

MIB = 1_048_576


@pytest.fixture
def here(redis_url):
    with place(redis_url) as made:
        yield made


@pytest.fixture(scope="module")
def own_server():
    with RedisServer() as own:
        yield own


@pytest.fixture
def own(own_server):
    """A place on a server that nobody else uses."""
    with place(own_server.url) as made:
        yield made
        made.call("CONFIG", "SET", "maxmemory", 0)


# ------------------------------------------------------------------------------------------------ ids that come twice


@pytest.mark.parametrize("where", ["pending", "delayed", "in flight", "returned", "dead"])
async def test_a_message_with_the_id_of_another_ends_that_and_is_whole(here, where, anyio_backend):
    """Whatever befalls the earlier one from then on is nothing to the later one; the counts add up."""
    async with here.mailbox() as mailbox:
        delay = 600.0 if where == "delayed" else 0.0
        await mailbox._put([Envelope("same", b'"old"', delay, dedup_key="old", expires_in=3_600)])
        if where in {"in flight", "returned", "dead"}:
            (held,) = await mailbox.receive()
        if where == "returned":
            await held.save_checkpoint(b"1")
            await held.nack()
        elif where == "dead":
            await held.dead_letter("no")
        assert await mailbox._put([Envelope("same", b'"new"', dedup_key="new")]) == ["same"]
        assert await mailbox.counts() == Counts(pending=1, settled=1)
        if where == "in flight":
            with pytest.raises(ReceiptHandleExpiredError):
                await held.acknowledge()
        assert await mailbox._put([Envelope("other", b'"new"', dedup_key="new")]) == ["same"], "it has lost its key"
        (message,) = await mailbox.receive(max_messages=9)
        assert (message.body, message.delivery_count, message.checkpoint) == ("new", 1, None)
        await message.dead_letter("no")
        assert [letter.body for letter in await mailbox.dead_letters()] == ["new"]
        await mailbox.purge_dead_letters()
        assert await mailbox.counts() == Counts(settled=2)
    assert here.found() == [here.key("state").encode()]


# ------------------------------------------------------------------------------------------------- batches that fail


async def test_a_call_that_fails_is_nothing_to_those_of_the_call_before(here, monkeypatch, anyio_backend):
    """Of a batch that needs several: their messages are stored, or in hand, and stay so."""
    async with here.mailbox() as mailbox:
        await mailbox.send_many(["one", "two"])
        monkeypatch.setattr(redis_calls, "MOST_ARGUMENTS", 1)
        call, made = mailbox._link.call, 0

        async def fails(keys, arguments):
            nonlocal made
            made += 1
            if made == 3:
                raise MailboxConnectionError("the connection was lost")
            return await call(keys, arguments)

        mailbox._link.call = fails
        sent, held, lost = await outcomes(
            lambda: mailbox.send("three", dedup_key="k"),
            lambda: mailbox.receive(visibility_timeout=30),
            lambda: mailbox.receive(visibility_timeout=60),
        )
        mailbox._link.call = call
        if not isinstance(held, list):
            held, lost = lost, held  # trio begins with either
        assert isinstance(sent, str)
        assert isinstance(lost, MailboxConnectionError)
        assert [message.body for message in held] == ["one"]
        (again,) = await mailbox.receive()
        assert again.body == "two"
        await held[0].acknowledge()  # it was heard of, so it was not taken back with the one whose answer was lost
        assert await mailbox.counts() == Counts(pending=1, in_flight=1, settled=1)


async def test_senders_of_one_batch_hear_only_of_their_own_messages(own, anyio_backend):
    """Together they are more than one call takes: the second has no memory left, and the first ones are stored."""
    async with own.mailbox(timeout=60) as mailbox:
        own.call("CONFIG", "SET", "maxmemory", used_memory(own) + 10_000_000)
        many = ["x" * 200] * 26_000
        found = await outcomes(lambda: mailbox.send_many(many), lambda: mailbox.send_many(many))
        own.call("CONFIG", "SET", "maxmemory", 0)
        stored = sum(len(ids) for ids in found if isinstance(ids, list))
        assert (await mailbox.counts()).pending == stored == 26_000
        assert sum(isinstance(error, MailboxConnectionError) for error in found) == 1
        await mailbox.purge()


async def test_on_a_full_server_only_what_adds_is_refused_whatever_it_leaves_with(own, anyio_backend):
    async with own.mailbox() as mailbox:
        first = await mailbox.send("first", dedup_key="first")
        await mailbox.send_many(["second", "third"])
        own.call("CONFIG", "SET", "maxmemory", 1)
        found = await outcomes(
            lambda: mailbox.send("more"),
            lambda: mailbox.receive(visibility_timeout=600),
            lambda: mailbox.send("more", dedup_key="more"),
            lambda: mailbox.send("the first", dedup_key="first"),
            lambda: mailbox.send_many(["more", "more"], delay=5),
        )
        assert [type(one) for one in found] == [
            MailboxConnectionError,
            list,
            MailboxConnectionError,
            str,
            MailboxConnectionError,
        ]
        assert "OOM" in str(found[0])
        assert found[3] == first
        (message,) = found[1]
        assert message.body == "first"
        assert await mailbox.counts() == Counts(pending=2, in_flight=1)
        await message.dead_letter("no")
        assert await mailbox.replay_dead_letters() == 1
        own.call("CONFIG", "SET", "maxmemory", 0)
        await mailbox.send("fourth", dedup_key="more")
        got = await mailbox.receive(max_messages=9)
        assert [message.body for message in got] == ["second", "third", "first", "fourth"]


async def test_another_error_of_the_first_write_is_the_calls(here, anyio_backend):
    async with here.mailbox() as mailbox:
        here.call("SET", here.key("messages"), "spoilt")
        with pytest.raises(MailboxConnectionError, match="WRONGTYPE"):
            await mailbox.send("x")
        with pytest.raises(MailboxConnectionError, match="WRONGTYPE"):
            await mailbox.send_many(["x", "y"])
        here.call("DEL", here.key("messages"))
        await mailbox.send("x")
        assert (await mailbox.counts()).pending == 1


async def test_an_id_that_is_no_text_is_unknown_and_harms_no_neighbour(here, anyio_backend):
    async with here.mailbox() as mailbox:
        found = await outcomes(lambda: mailbox.send("x"), lambda: mailbox.cancel("\0"))
        assert isinstance(found[0], str)
        assert found[1] is CancelOutcome.UNKNOWN


async def test_a_connection_on_which_the_server_hangs_up_is_not_used_again(own, anyio_backend):
    """It could not read what it was sent, and says so before."""
    async with own.mailbox() as mailbox:
        before = own.call("CONFIG", "GET", "proto-max-bulk-len")[1]
        own.call("CONFIG", "SET", "proto-max-bulk-len", 1_048_576)
        with pytest.raises(MailboxConnectionError):
            await mailbox.send("x" * 1_100_000)
        assert not mailbox._link.connected
        own.call("CONFIG", "SET", "proto-max-bulk-len", before)
        await mailbox.send("x")
        assert (await mailbox.counts()).pending == 1


@pytest.fixture
def narrow(own):
    """A place on a server that takes no argument above the least that a server can be told, 1 MiB."""
    before = own.call("CONFIG", "GET", "proto-max-bulk-len")[1]
    own.call("CONFIG", "SET", "proto-max-bulk-len", MIB)
    yield own
    own.call("CONFIG", "SET", "proto-max-bulk-len", before)


async def test_what_is_larger_than_the_server_takes_is_its_senders_mistake_alone(narrow, anyio_backend):
    async with narrow.mailbox() as mailbox, narrow.mailbox("replies"):
        await mailbox.send_many(["held", "asked"], reply_to=f"{narrow.prefix}replies")
        held, asked = await mailbox.receive(max_messages=2)
        wire = mailbox._link._wire
        found = await outcomes(
            lambda: mailbox.send("before"),
            lambda: mailbox.send("x" * (MIB - 2)),
            lambda: mailbox.send("x", headers={"h": "x" * MIB}),
            lambda: mailbox.send("x", dedup_key="x" * (MIB + 1)),
            lambda: mailbox.send_many(["y", "x" * MIB]),
            lambda: held.save_checkpoint(b"x" * (MIB + 1)),
            lambda: asked.reply("x" * MIB),
            lambda: mailbox.send("x" * (MIB - 3), priority=-1),
            lambda: mailbox.send("behind"),
        )
        refused = [number for number, one in enumerate(found) if isinstance(one, Exception)]
        assert refused == [1, 2, 3, 4, 5, 6]
        for number in refused:
            assert isinstance(found[number], SerializationError)
            assert "bytes is larger than the 1,048,576 that this Redis server takes (proto-max-bulk-len)" in str(
                found[number]
            )
        assert mailbox._link._wire is wire, "the server had nothing to hang up on"
        await held.save_checkpoint(b"x" * MIB)
        await asked.reply("y")
        got = await mailbox.receive(max_messages=9)
        assert [len(message.body) for message in got] == [len("before"), len("behind"), MIB - 3]
        assert await mailbox.counts() == Counts(in_flight=4, settled=1)


async def test_the_limit_is_that_of_the_server_of_now(own, narrow, anyio_backend):
    async with own.mailbox() as mailbox:
        own.call("CONFIG", "SET", "proto-max-bulk-len", 2 * MIB)
        with pytest.raises(SerializationError):
            await mailbox.send("x" * MIB)
        await mailbox._link._drop()
        assert await mailbox.receive() == []
        await mailbox.send("x" * MIB)


async def test_who_may_not_ask_for_the_limit_goes_by_the_usual_one(own, anyio_backend):
    own.call("ACL", "SETUSER", "plain", "on", ">secret", "~{ms:*", "&{ms:*", "+@all", "-@dangerous", "+info")
    async with own.mailbox(username="plain", password="secret") as mailbox:
        assert mailbox._directory.longest == 512 * MIB
        await mailbox.send("x" * MIB)


async def test_whether_there_is_a_mailbox_is_not_known_from_a_server_that_is_silent_or_refuses(own, anyio_backend):
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    async with listener:
        url = f"redis://127.0.0.1:{listener.extra(anyio.abc.SocketAttribute.local_port)}"
        with anyio.fail_after(5), pytest.raises(MailboxConnectionError, match=r"did not answer within 0\.1 s"):
            await redis_mailbox.RedisMailbox(url, timeout=0.1).exists()
    with pytest.raises(ConfigError, match="check the user and the password"):
        await own.mailbox(username="nobody", password="wrong").exists()
    assert not await own.mailbox().exists()


async def test_more_than_one_call_may_take_is_the_callers_mistake(here, monkeypatch, anyio_backend):
    monkeypatch.setattr(redis_mailbox, "MOST_AT_ONCE", 3)
    async with here.mailbox() as mailbox:
        await mailbox.send_many(range(3))
        with pytest.raises(InvalidParameterError, match="at most 3 messages at once, not 4"):
            await mailbox.send_many(range(4))
        assert (await mailbox.counts()).pending == 3


# --------------------------------------------------------------------------------------------------- keys that are lost


async def test_a_claim_makes_a_transient_mailbox_exist_again(here, anyio_backend):
    here.prefix = f"~{here.prefix}"
    async with here.mailbox() as mailbox, here.mailbox() as other:
        here.clean()
        await other.send("dropped")
        assert await mailbox.receive() == []
        assert 86_000_000 < here.call("PTTL", here.key("state")) <= 86_400_000
        await other.send("kept")
        assert [message.body for message in await mailbox.receive()] == ["kept"]


async def test_requests_work_again_after_the_server_lost_everything(here, monkeypatch, anyio_backend):
    """The mailbox for the replies too, which nobody opens again."""
    here.options["fallback_interval"] = 0.1

    async def double(body: int) -> int:
        return 2 * body

    async with here.mailbox(body=int, reply=int) as mailbox, MainLoop(here.mailbox(body=int), double):
        assert await mailbox.request(1, timeout=10) == 2
        box = f"{mailbox._routers[0]._requester._box.name}"
        here.clean(box)
        here.clean()
        with anyio.fail_after(60):
            while not here.found(box):
                await anyio.sleep(0.01)
        assert await mailbox.request(2, timeout=10) == 4
    assert here.found(box) == []


async def test_a_process_whose_place_among_the_waiters_was_lost_is_on_the_list_again(here, monkeypatch, anyio_backend):
    here.options["fallback_interval"] = 0.1
    async with here.mailbox() as waiting, here.mailbox() as sender:
        got: list = []

        async def receive() -> None:
            got.extend(await waiting.receive(wait_time_seconds=600))

        with anyio.fail_after(10):
            async with anyio.create_task_group() as group:
                group.start_soon(receive)
                while not here.call("ZCARD", here.key("waiters")):
                    await anyio.sleep(0.01)
                here.call("DEL", here.key("waiters"))
                while not here.call("ZCARD", here.key("waiters")):
                    await anyio.sleep(0.01)
                await sender.send("x")
        assert got[0].body == "x"


# ------------------------------------------------------------------------------------------- replies in a cluster


class Nodes:
    """Stands for the connections to other nodes: those to mailboxes named ``dead…`` do not answer."""

    def __init__(self, monkeypatch) -> None:
        self.answer: list = [[b"id"], [-1, 0, 0]]
        self.sent: list[bytes] = []
        self.open: list = []
        nodes = self

        class Link:
            def __init__(self, directory, timeout) -> None:
                nodes.open.append(self)
                self.timeout = timeout

            async def call(self, keys, arguments):
                if b"dead" in keys[0]:
                    await anyio.sleep(self.timeout)
                    raise MailboxConnectionError("it did not answer")
                assert self in nodes.open, "it was closed meanwhile"
                await anyio.lowlevel.checkpoint()
                nodes.sent.append(keys[0])
                return nodes.answer

            async def close(self) -> None:
                nodes.open.remove(self)

        monkeypatch.setattr(redis_other_nodes, "Link", Link)

    def beside(self, timeout: float) -> Beside:
        return Beside(Directory(parse_server("redis+cluster://127.0.0.1:1", {}), b"jobs"), timeout)


def reply(name: str) -> Envelope:
    return Envelope("r", b"1", reply_to=name)


async def test_a_node_that_does_not_answer_holds_up_no_reply_to_another(monkeypatch, anyio_backend):
    nodes = Nodes(monkeypatch)
    beside = nodes.beside(0.2)
    with Stopwatch() as watch:
        found = await outcomes(
            *[lambda: beside.send(reply("dead"), "m")] * 5,
            lambda: beside.send(reply("dead too"), "m"),
            *[lambda: beside.send(reply("living"), "m")] * 2,
        )
    assert watch.seconds < 1.0, "they waited for one another"
    assert all(isinstance(error, MailboxConnectionError) for error in found[:6])
    assert found[6:] == [None, None]
    assert len(nodes.sent) == 2
    await beside.close()
    assert nodes.open == []


async def test_only_connections_that_nobody_uses_are_given_up(monkeypatch, anyio_backend):
    monkeypatch.setattr(redis_other_nodes, "MOST", 2)
    nodes = Nodes(monkeypatch)
    beside = nodes.beside(60)
    async with anyio.create_task_group() as group:
        for name in ("dead 1", "dead 2", "dead 3"):
            group.start_soon(beside.send, reply(name), "m")
        await anyio.wait_all_tasks_blocked()
        with anyio.fail_after(10):
            for name in "abcd":
                await beside.send(reply(name), "m")
        assert len(nodes.open) == 4, "the three in use, and the last one"
        group.cancel_scope.cancel()
    await beside.send(reply("e"), "m")
    assert len(nodes.open) == 2
    assert len(nodes.sent) == 5


async def test_a_reply_for_which_another_node_has_no_memory_is_not_sent(monkeypatch, anyio_backend):
    nodes = Nodes(monkeypatch)
    nodes.answer = [[b"oom", b"OOM command not allowed"], [-1, 0, 0]]
    with pytest.raises(MailboxConnectionError, match="OOM"):
        await nodes.beside(5).send(reply("full"), "m")


async def test_a_reply_that_is_larger_than_a_node_takes_is_not_sent(monkeypatch, anyio_backend):
    monkeypatch.setattr(redis_topology, "LONGEST", 5)
    nodes = Nodes(monkeypatch)
    with pytest.raises(SerializationError, match="larger than the 5 that this Redis server takes"):
        await nodes.beside(5).send(Envelope("r", b"12345", reply_to="living"), "m")
    assert nodes.sent == nodes.open == []


# ----------------------------------------------------------------------------------------------------- its settings


def lines(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "mainspring.mailbox"]


async def test_a_server_that_may_evict_replies_is_warned_of(caplog, anyio_backend):
    caplog.set_level(logging.WARNING)
    limits = ("--maxmemory-policy", "volatile-ttl", "--maxmemory", "1gb")
    with RedisServer(*limits) as evicting, place(evicting.url) as there:
        async with there.mailbox(allow_eviction=True):
            pass
    (line,) = lines(caplog)
    assert "may evict the replies to requests" in line
    assert "maxmemory-policy volatile-ttl" in line


async def test_a_server_that_has_not_told_its_settings_is_asked_again(caplog, monkeypatch, anyio_backend):
    caplog.set_level(logging.WARNING)
    info = redis_topology._info

    async def lost(wire, section):
        if section == "persistence":
            raise anyio.EndOfStream
        return await info(wire, section)

    with RedisServer("--appendonly", "no") as forgetful, place(forgetful.url) as there:
        monkeypatch.setattr(redis_topology, "_info", lost)
        async with there.mailbox():
            assert lines(caplog) == []
        monkeypatch.setattr(redis_topology, "_info", info)
        async with there.mailbox("one"), there.mailbox("two"):
            (line,) = lines(caplog)
            assert "set appendonly yes" in line


@pytest.mark.parametrize("answer", [ServerError("NOPERM no"), anyio.EndOfStream(), [b"slave"]])
async def test_a_server_that_is_no_primary_or_does_not_say_so_is_hung_up_on(monkeypatch, answer, anyio_backend):
    closed = []

    class Wire:
        def __init__(self, host) -> None:
            self.host = host

        async def call(self, *command):
            if command[0] == "SENTINEL":
                return [b"127.0.0.1", b"2"]
            if isinstance(answer, Exception):
                raise answer
            return answer

        async def close(self) -> None:
            closed.append(self.host[1])

    async def connect(server, host, *, sentinel=False, name=""):
        return Wire(host)

    monkeypatch.setattr(redis_topology, "connect", connect)
    directory = Directory(parse_server("redis+sentinel://127.0.0.1:1/jobs", {}), b"{ms:jobs}:")
    with pytest.raises((ServerError, anyio.EndOfStream)):
        await directory.connect()
    assert closed == [1, 2]
