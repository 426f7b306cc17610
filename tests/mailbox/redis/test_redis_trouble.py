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
from mainspring.mailbox import batched
from mainspring.mailbox.message import CancelOutcome, Counts, Envelope
from mainspring.mailbox.redis.client import FunctionCall, calls_for
from mainspring.mailbox.redis.commands import Leave, claimed_at, keys_of
from mainspring.mailbox.redis.mailbox import RedisMailbox
from redis_support import CALLS, line_to, place, soon, used_memory
from scripted_redis import Scripted, Sentinel, hello
from servers import RedisServer
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
        await mailbox.backend.send([Envelope("same", b'"old"', delay=delay, dedup_key="old", expires_in=3_600)])
        if where in {"in flight", "returned", "dead"}:
            (held,) = await mailbox.receive()
        if where == "returned":
            await held.save_checkpoint(b"1")
            await held.nack()
        elif where == "dead":
            await held.dead_letter("no")
        assert await mailbox.backend.send([Envelope("same", b'"new"', dedup_key="new")]) == ["same"]
        assert await mailbox.counts() == Counts(pending=1, settled=1)
        if where == "in flight":
            with pytest.raises(ReceiptHandleExpiredError):
                await held.acknowledge()
        assert await mailbox.send("new", dedup_key="new") == "same", "it has lost its key"
        (message,) = await mailbox.receive(max_messages=9)
        assert (message.body, message.delivery_count, message.checkpoint) == ("new", 1, None)
        await message.dead_letter("no")
        assert [letter.body for letter in await mailbox.dead_letters()] == ["new"]
        await mailbox.purge_dead_letters()
        assert await mailbox.counts() == Counts(settled=2)
    assert here.found() == [here.key("state").encode()]


# ------------------------------------------------------------------------------------------------- batches that fail


async def test_a_call_that_fails_is_nothing_to_those_of_the_call_before(line, anyio_backend):
    """A batch needs two: what the first did stays done, and messages in hand stay so; the second's answer is lost."""
    calls: list = []

    def on_command(passage, command) -> None:
        if passage.name == CALLS:
            calls.append(command[0])
            if calls == [b"FCALL", b"FCALL"]:
                line.answers.hold()

    async with line.mailbox(timeout=60) as mailbox:
        await mailbox.send_many(["settled", "held", "claimed"])
        settled, held = await mailbox.receive(max_messages=2)
        line.answers.hold()
        async with anyio.create_task_group() as group:
            group.start_soon(mailbox.counts)
            await line.answers.arrived()
            line.on_command = on_command
            found: list = []

            async def call() -> None:
                found.extend(
                    await outcomes(
                        settled.acknowledge, lambda: mailbox.send_many(["x"] * 25_000), lambda: mailbox.receive()
                    )
                )

            group.start_soon(call)
            await soon(lambda: mailbox.statistics().queued == 3)
            line.answers.let_go()
            with anyio.fail_after(30):
                await line.lose_answer()
        assert found[0] is None
        assert len(found[1]) == 25_000
        assert isinstance(found[2], MailboxConnectionError)
        (again,) = await mailbox.receive()
        assert (again.body, again.delivery_count, again.attempt) == ("claimed", 1, 1)
        await held.acknowledge()
        assert await mailbox.counts() == Counts(pending=25_000, in_flight=1, settled=2)


@pytest.mark.slow
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


@pytest.mark.parametrize("size", [1_100_000, 4_000_000, 13_000_000])
async def test_a_connection_on_which_the_server_hangs_up_is_not_used_again(size, own, anyio_backend):
    """It could not read what it was sent, and says so before, or while more is on its way."""
    async with own.mailbox() as mailbox:
        before = own.call("CONFIG", "GET", "proto-max-bulk-len")[1]
        own.call("CONFIG", "SET", "proto-max-bulk-len", 1_048_576)
        with pytest.raises(MailboxConnectionError):
            await mailbox.send("x" * size)
        own.call("CONFIG", "SET", "proto-max-bulk-len", before)
        await mailbox.send("x")
        assert (await mailbox.counts()).pending == 1
        assert mailbox.statistics().reconnects == 1


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
        assert mailbox.statistics().reconnects == 0, "the server had something to hang up on"
        await held.save_checkpoint(b"x" * MIB)
        await asked.reply("y")
        got = await mailbox.receive(max_messages=9)
        assert [len(message.body) for message in got] == [len("before"), len("behind"), MIB - 3]
        assert await mailbox.counts() == Counts(in_flight=4, settled=1)


async def test_the_limit_is_that_of_the_server_of_now(own, narrow, anyio_backend):
    async with line_to(own) as line, line.mailbox() as mailbox:
        own.call("CONFIG", "SET", "proto-max-bulk-len", 2 * MIB)
        with pytest.raises(SerializationError):
            await mailbox.send("x" * MIB)
        line.cut(CALLS)
        with pytest.raises(MailboxConnectionError):
            await mailbox.receive()
        assert await mailbox.receive() == []
        await mailbox.send("x" * MIB)


async def test_who_may_not_ask_for_the_limit_goes_by_the_usual_one(narrow, anyio_backend):
    """Where it is lower, the server hangs up."""
    narrow.call("ACL", "SETUSER", "plain", "on", ">secret", "~{ms:*", "&{ms:*", "+@all", "-@dangerous", "+info")
    async with narrow.mailbox(username="plain", password="secret") as mailbox:
        with pytest.raises(MailboxConnectionError):
            await mailbox.send("x" * MIB)
        await mailbox.send("x" * (MIB - 3))


async def test_whether_there_is_a_mailbox_is_not_known_from_a_server_that_is_silent_or_refuses(own, anyio_backend):
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    async with listener:
        url = f"redis://127.0.0.1:{listener.extra(anyio.abc.SocketAttribute.local_port)}"
        with anyio.fail_after(5), pytest.raises(MailboxConnectionError, match=r"did not answer within 0\.1 s"):
            await RedisMailbox(url, timeout=0.1).exists()
    with pytest.raises(ConfigError, match="check the user and the password"):
        await own.mailbox(username="nobody", password="wrong").exists()
    assert not await own.mailbox().exists()


@pytest.mark.slow
@pytest.mark.parametrize("last", [b"INFO", b"FCALL", b"SSUBSCRIBE"])
async def test_an_opening_has_one_timeout_wherever_the_server_falls_silent(here, line, last, anyio_backend):
    """It makes several calls over two connections, and raises what a call raises."""

    def on_command(passage, command) -> None:
        line.silent = line.silent or command[0] == last

    line.on_command = on_command
    with (
        anyio.fail_after(0.9),
        pytest.raises(MailboxConnectionError, match=r"^the Redis server at \S+ did not answer within 0\.5 s$"),
    ):
        await line.mailbox(timeout=0.5).__aenter__()
    line.silent = False
    await soon(lambda: line.names() == [])


@pytest.mark.slow
@pytest.mark.loops("asyncio")
async def test_more_than_one_call_may_take_is_the_callers_mistake(here, anyio_backend):
    async with here.mailbox() as mailbox:
        with pytest.raises(InvalidParameterError, match="at most 250,000 messages at once, not 250,001"):
            await mailbox.send_many([0] * 250_001)
        assert await mailbox.counts() == Counts()


async def test_no_two_claims_are_at_one_time_though_the_servers_clock_is_set_back(here, anyio_backend):
    """A later claim has a later time: by that the library knows which claims a client has not heard of."""
    async with here.mailbox() as mailbox:
        await mailbox.send_many([1, 2, 3])
        last = 2**52  # microseconds: in the year 2112
        here.call("HSET", here.key("state"), "tick", last)
        for _ in range(3):
            (message,) = await mailbox.receive()
            claimed = claimed_at(message.receipt_handle.encode())
            assert claimed > last
            last = claimed


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


async def test_a_receive_that_waits_makes_a_transient_mailbox_exist_again(here, waiting):
    here.prefix = f"~{here.prefix}"
    here.options["fallback_interval"] = 0.1
    async with here.mailbox() as mailbox, here.mailbox() as sender:
        await waiting.start(mailbox)
        here.clean()
        await soon(lambda: here.call("EXISTS", here.key("state")))
        await sender.send("kept")
        await waiting.until(1)
        assert [message.body for message in waiting.messages] == ["kept"]


async def test_requests_work_again_after_the_server_lost_everything(own, anyio_backend):
    """The mailbox for the replies too, which is not opened again."""
    own.options["fallback_interval"] = 0.1

    async def double(body: int) -> int:
        return 2 * body

    async with own.mailbox(body=int, reply=int) as mailbox, MainLoop(own.mailbox(body=int), double):
        assert await mailbox.request(1, timeout=10) == 2
        assert own.found("~")
        own.clean("~")
        own.clean()
        await soon(lambda: own.found("~"), 60)
        assert await mailbox.request(2, timeout=10) == 4
    assert own.found("~") == []


async def test_a_process_whose_place_among_the_waiters_was_lost_is_on_the_list_again(here, anyio_backend):
    here.options["fallback_interval"] = 0.1
    async with here.mailbox() as waiting, here.mailbox() as sender:
        got: list = []

        async def receive() -> None:
            got.extend(await waiting.receive(wait_time_seconds=600))

        with anyio.fail_after(10):
            async with anyio.create_task_group() as group:
                group.start_soon(receive)
                await soon(here.waiters)
                here.call("DEL", here.key("waiters"))
                await soon(here.waiters)
                await sender.send("x")
        assert got[0].body == "x"


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


async def test_a_server_that_has_not_told_its_settings_is_asked_again(caplog, anyio_backend):
    """The connection was lost while they were asked for, and is made again."""
    caplog.set_level(logging.WARNING)

    def lose(passage, command) -> None:
        if command == [b"INFO", b"persistence"]:
            passage.cut()

    with RedisServer("--appendonly", "no") as forgetful, place(forgetful.url) as there:
        async with line_to(there) as line:
            line.on_command = lose
            async with line.mailbox() as mailbox:
                assert lines(caplog) == []
                await mailbox.send("x")
                assert len(await mailbox.receive()) == 1
                with anyio.fail_after(10):  # the settings may be asked for after the messages
                    while not mailbox.statistics().reconnects:
                        await anyio.sleep(0.01)
            line.on_command = None
            async with line.mailbox("one"), line.mailbox("two"):
                (said,) = lines(caplog)
                assert "set appendonly yes" in said


@pytest.mark.parametrize("answer", [RuntimeError("NOPERM no"), EOFError(), ["slave"]])
@pytest.mark.slow
async def test_a_server_that_is_no_primary_or_does_not_say_so_is_hung_up_on(here, answer, anyio_backend):
    asked: list[int] = []

    def node(command: list[bytes]) -> object:
        if command[0] == b"HELLO":
            return hello("standalone")
        asked.append(server.open)
        return answer

    async with Scripted(node) as server, Sentinel(server.port) as sentinel:
        with pytest.raises((ConfigError, MailboxConnectionError)):
            async with sentinel.mailbox(here, timeout=0.3):
                pass
        assert max(asked) <= 2, "they pile up"
        await soon(lambda: server.open == sentinel.open == 0)


def test_what_failed_before_and_is_done_with_a_call_in_which_another_fails_has_its_result():
    left: list = []
    leave = Leave("name", 0, [], lambda command, last: left.append(last), for_good=False)
    leave.error = MailboxConnectionError("the call before was lost")
    count = batched.Count()
    (call,) = calls_for("jobs", keys_of("jobs"), [leave, count])
    assert isinstance(call, FunctionCall)
    call.take([7, 0, -1, 0, 0, 1, b"ERR no"])
    assert left == [7]
    assert "ERR no" in str(count.error)
