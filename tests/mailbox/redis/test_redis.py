"""What the Redis mailbox does beyond the contract: who is called, what is kept, what is removed, what is written as one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from datetime import UTC, datetime

import anyio
import pytest
from anyio.abc import SocketAttribute

from mainspring import MailboxConnectionError, MailboxFullError, open_mailbox
from mainspring.errors import ConfigError
from mainspring.mailbox.message import Counts, Envelope
from mainspring.mailbox.redis.mailbox import RedisMailbox
from redis_support import place
from stopwatch import Stopwatch

pytestmark = pytest.mark.anyio


@pytest.fixture
def here(redis_url):
    with place(redis_url) as made:
        yield made


@pytest.fixture
def never_by_itself(here):
    """Waiting processes do not look again by themselves: only a call wakes them."""
    here.options["fallback_interval"] = 3_600.0


async def park(group, mailbox, got, count=1):
    """``count`` receives that wait in ``mailbox``; returns once they do, and are on the list of waiters."""

    async def wait():
        got.append((mailbox, await mailbox.receive(wait_time_seconds=600)))

    for _ in range(count):
        group.start_soon(wait)
    while mailbox._waiters.parked < count:
        await anyio.sleep(0.001)


# ------------------------------------------------------------------------------------------------------- who is called


async def test_a_message_is_handed_to_one_of_those_that_wait(here, never_by_itself, anyio_backend):
    """It need not ask for it; several that come at once are asked for."""
    got: list = []
    async with here.mailbox() as one, here.mailbox() as two, here.mailbox() as three, here.mailbox() as sender:
        with anyio.fail_after(10):
            async with anyio.create_task_group() as group:
                for mailbox in (one, two, three):
                    await park(group, mailbox, got)
                batches = sum(mailbox._batcher.batches for mailbox in (one, two, three))
                await sender.send("x")
                while not got:
                    await anyio.sleep(0.001)
                await anyio.sleep(0.05)  # time in which others would look
                assert sum(mailbox._batcher.batches for mailbox in (one, two, three)) == batches
                assert got[0][0] is one, "the one that has waited longest"
                await sender.send_many(["y", "z"])
                while len(got) < 3:
                    await anyio.sleep(0.001)
        assert sorted(messages[0].body for _, messages in got) == ["x", "y", "z"]


async def test_a_process_that_waits_no_more_passes_the_call_on(here, never_by_itself, anyio_backend):
    """It is on the list still, and first on it: its receive was cancelled."""
    got: list = []
    async with here.mailbox() as first, here.mailbox() as second, here.mailbox() as sender:
        with anyio.fail_after(10):
            async with anyio.create_task_group() as cancelled:
                await park(cancelled, first, got)
                cancelled.cancel_scope.cancel()
            async with anyio.create_task_group() as group:
                await park(group, second, got)
                await sender.send("x")
        assert [mailbox for mailbox, _ in got] == [second]


async def test_a_call_that_comes_behind_a_claim_is_passed_on(here, never_by_itself, anyio_backend):
    """The claim's answer, with a message, is on its way already: the call was for another message, and another process."""
    got: list = []
    async with here.mailbox() as busy, here.mailbox() as idle, here.mailbox() as sender:
        call, out, go_on = busy._link.call, anyio.Event(), anyio.Event()

        async def slow(*arguments):
            result = await call(*arguments)
            out.set()
            await go_on.wait()
            return result

        with anyio.fail_after(10):
            async with anyio.create_task_group() as group:
                await sender.send("first")
                busy._link.call = slow
                group.start_soon(lambda: busy.receive(wait_time_seconds=600))
                await out.wait()
                await park(group, idle, got)
                waiters = here.call("ZRANGE", here.key("waiters"), 0, -1)
                here.call("DEL", here.key("waiters"))  # so that this calls nobody
                await sender.send("second")
                here.call("ZADD", here.key("waiters"), 1, *waiters)
                busy._waiters.wake(1)  # as the server does, had it been on the list
                busy._link.call = call
                go_on.set()
        assert got[0][1][0].body == "second"


async def test_a_process_that_closed_is_not_called(here, never_by_itself, anyio_backend):
    got: list = []
    async with here.mailbox() as second, here.mailbox() as sender:
        with anyio.fail_after(10):
            async with anyio.create_task_group() as group:
                first = here.mailbox()
                async with first:
                    await park(group, first, got)
                assert got == [(first, [])]
                await park(group, second, got)
                assert here.call("ZCARD", here.key("waiters")) == 1
                await sender.send("x")
        assert got[1][0] is second


async def test_a_process_that_died_is_passed_over(here, never_by_itself, anyio_backend):
    got: list = []
    here.call("ZADD", here.key("waiters"), 1, "nobody", 2, "nobody-either")
    async with here.mailbox() as living, here.mailbox() as sender:
        with anyio.fail_after(10):
            async with anyio.create_task_group() as group:
                await park(group, living, got)
                await sender.send("x")
        assert here.call("ZCARD", here.key("waiters")) == 0


async def test_a_message_whose_call_was_lost_is_found(here, monkeypatch, anyio_backend):
    """A process took the call and died of it: those that wait look for themselves after a while."""
    here.options["fallback_interval"] = 0.2
    got: list = []
    async with here.mailbox() as waiting, here.mailbox() as sender:
        with anyio.fail_after(10):
            async with anyio.create_task_group() as group:
                await park(group, waiting, got)
                waiters = here.call("ZRANGE", here.key("waiters"), 0, -1)
                here.call("DEL", here.key("waiters"))  # the call goes nowhere
                await sender.send("x")
                here.call("ZADD", here.key("waiters"), 1, *waiters)
        assert got[0][1][0].body == "x"


async def test_an_earlier_due_time_reaches_those_that_wait(here, never_by_itself, anyio_backend):
    """They sleep until the end of a lease that is far away; a delay that ends sooner is told them."""
    got: list = []
    async with here.mailbox() as waiting, here.mailbox() as sender:
        await sender.send("held")
        (held,) = await sender.receive(visibility_timeout=600)
        with anyio.fail_after(10):
            async with anyio.create_task_group() as group:
                await park(group, waiting, got)
                began = anyio.current_time()
                with Stopwatch() as watch:
                    await sender.send("later", delay=0.3)
                    while not got:
                        await anyio.sleep(0.01)
        assert anyio.current_time() - began >= 0.29
        assert watch.seconds < 2
        assert got[0][1][0].body == "later"
        await held.acknowledge()


async def test_a_process_is_not_called_for_what_its_own_claim_tells_it(here, never_by_itself, anyio_backend):
    """When a lease ends that it has just taken: another call would reach it ahead of the answer, and cost it a look."""
    got: list = []
    told: list[float] = []
    async with here.mailbox() as waiting, here.mailbox() as sender:

        async def receive() -> None:
            got.extend(await waiting.receive(max_messages=10, wait_time_seconds=30))

        waiting._receiving.listener._told = waiting._receiving.listener._told._replace(due=told.append)
        with anyio.fail_after(10):
            async with anyio.create_task_group() as group:
                for number in range(2):
                    group.start_soon(receive)
                    while waiting._waiters.parked <= number:
                        await anyio.sleep(0.01)
                for body in ("one", "two"):  # the second call comes behind whatever the first has brought about
                    await sender.send(body)
                    while not got or got[-1].body != body:
                        await anyio.sleep(0.01)
        assert not told


PROGRAM = """
import anyio, sys
from mainspring.mailbox.redis.mailbox import RedisMailbox
async def main():
    async with RedisMailbox(sys.argv[1], name=sys.argv[2]) as mailbox:
        (message,) = await mailbox.receive(visibility_timeout=1, wait_time_seconds=60)
        print("got", flush=True)
        await anyio.sleep(60)
anyio.run(main)
"""


async def test_a_killed_process_gives_its_message_back_in_time(here, never_by_itself, anyio_backend):
    """Not before its lease has run out, and within a second after, to a process that only waits."""
    async with here.mailbox() as mailbox:
        await mailbox.send("x")
        command = [sys.executable, "-c", PROGRAM, here.url, mailbox.name]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert await anyio.to_thread.run_sync(process.stdout.readline) == b"got\n"
            os.kill(process.pid, signal.SIGKILL)
        with Stopwatch() as watch:
            (message,) = await mailbox.receive(wait_time_seconds=30)
        assert watch.seconds <= 2.0
        assert (datetime.now(UTC) - message.first_received_at).total_seconds() >= 1.0
        assert (message.delivery_count, message.attempt) == (2, 2)


# ------------------------------------------------------------------------------------------------------ what is kept


async def test_a_finished_message_leaves_nothing_behind(here, anyio_backend):
    """Whatever it had: key, headers, expiry, checkpoint, history, returns, delay."""
    async with here.mailbox() as mailbox:
        await mailbox.send("x", dedup_key="k", headers={"a": "b"}, expires_in=600, reply_to="elsewhere", delay=0.05)
        for ending in ("nack", "release"):
            (message,) = await mailbox.receive(wait_time_seconds=5)
            await message.save_checkpoint(b"1")
            await getattr(message, ending)()
        (message,) = await mailbox.receive()
        await message.dead_letter("no")
        await mailbox.replay_dead_letters()
        (message,) = await mailbox.receive()
        await message.acknowledge()
        await mailbox.send("y", dedup_key="k2")
        (message,) = await mailbox.receive()
        await message.dead_letter("no")
        await mailbox.purge_dead_letters()
        cancelled = await mailbox.send("z", expires_in=600, dedup_key="k3")
        await mailbox.cancel(cancelled)
        assert await mailbox.counts() == Counts(settled=3)
    assert here.found() == [here.key("state").encode()]


async def test_more_than_one_call_can_bring_back_is_brought_back(here, anyio_backend):
    """Thousands of leases end at once: counts are exact all the same, and all are delivered again."""
    async with here.mailbox() as mailbox:
        await mailbox.send_many(range(2_500))
        for _ in range(3):
            await mailbox.receive(max_messages=1_000, visibility_timeout=0.2)
        await mailbox.send_many(range(1_500), delay=0.2)
        await mailbox.send_many(range(1_500), expires_in=0.2)
        await anyio.sleep(0.25)
        assert await mailbox.counts() == Counts(pending=4_000, dead=1_500)
        assert len(await mailbox.dead_letters(limit=2_000)) == 1_500
        assert await mailbox.replay_dead_letters() == 1_500
        seen = 0
        while messages := await mailbox.receive(max_messages=1_000):
            seen += len(messages)
        assert seen == 5_500


async def test_values_that_no_mailbox_wrote_are_dead_letters(here, anyio_backend):
    """They harm neither their neighbours nor the receive that meets them."""
    bad = [b"", b"rubbish", b"1|2|0|+no json\nbody", b"1|2|0|?what", b"1|2|0|+[1]\nx", b'1|2|0|+{"h":{"a":1}}\nx']
    async with here.mailbox() as mailbox:
        ids = await mailbox.send_many([f"good {n}" for n in range(len(bad) + 1)])
        for message_id, value in zip(ids, bad, strict=False):
            here.call("HSET", here.key("messages"), message_id, value)
        got = [message for _ in range(2) for message in await mailbox.receive(max_messages=10)]
        assert [message.body for message in got] == [f"good {len(bad)}"]
        letters = await mailbox.dead_letters()
        assert {letter.message_id for letter in letters} == set(ids[:-1])
        assert all(letter.error_type == "SerializationError" for letter in letters)
        await mailbox.purge_dead_letters()
        (message_id,) = await mailbox.send_many(["glimpsed"])
        here.call("HSET", here.key("messages"), message_id, "rubbish")
        assert await mailbox.receive(visibility_timeout=0) == []  # nobody holds it long enough to bury it


async def test_a_message_that_was_deleted_by_hand_is_passed_over(here, anyio_backend):
    async with here.mailbox() as mailbox:
        first, _ = await mailbox.send_many(["deleted", "kept"])
        here.call("HDEL", here.key("messages"), first)
        (message,) = await mailbox.receive(max_messages=10)
        assert message.body == "kept"
        await message.acknowledge()
        assert await mailbox.counts() == Counts(settled=1)


async def test_a_transient_mailbox_lives_for_a_day(here, anyio_backend):
    here.prefix = f"~{here.prefix}"
    async with here.mailbox() as mailbox:
        await mailbox.send("x")
        left = [here.call("PTTL", key) for key in here.found()]
        assert left
        assert all(86_000_000 < some <= 86_400_000 for some in left)
        here.call("PEXPIRE", here.key("state"), 5_000)
        await mailbox.send("y")
        assert all(here.call("PTTL", key) <= 5_000 for key in here.found()), "a send makes it live longer"
        await mailbox.receive()
        assert all(here.call("PTTL", key) > 86_000_000 for key in here.found()), "a claim does not"


async def test_what_is_sent_to_a_transient_mailbox_that_is_gone_is_dropped(here, anyio_backend):
    here.prefix = f"~{here.prefix}"
    async with here.mailbox() as mailbox:
        here.clean()
        await mailbox.send("x")
        assert here.found() == []


# ------------------------------------------------------------------------------------------------- batches and capacity


async def test_concurrent_operations_leave_as_one_call(here, anyio_backend):
    async with here.mailbox() as mailbox:
        before = mailbox._batcher.batches

        async def send(number):
            await mailbox.send(number, priority=number % 3, dedup_key=f"k{number % 50}" if number < 100 else None)

        async with anyio.create_task_group() as group:
            for number in range(300):
                group.start_soon(send, number)
        assert mailbox._batcher.batches - before <= 3
        assert (await mailbox.counts()).pending == 250
        messages = await mailbox.receive(max_messages=1_000)
        before = mailbox._batcher.batches
        async with anyio.create_task_group() as group:
            for message in messages:
                group.start_soon(message.acknowledge)
        assert mailbox._batcher.batches - before <= 3
        assert await mailbox.counts() == Counts(settled=250)


async def test_one_full_mailbox_error_is_its_callers_alone(here, anyio_backend):
    async with here.mailbox(capacity=3) as bounded, here.mailbox() as free:
        results: list[str] = []

        async def send(count):
            try:
                await bounded.send_many(range(count))
            except MailboxFullError:
                results.append(f"{count} refused")
            else:
                results.append(f"{count} taken")

        async with anyio.create_task_group() as group:
            for count in (2, 2, 1):
                group.start_soon(send, count)
        assert sorted(results) == ["1 taken", "2 refused", "2 taken"]
        await free.send("more")
        assert (await bounded.counts()).pending == 4


async def test_more_than_fits_one_call_leaves_in_several(here, monkeypatch, anyio_backend):
    from mainspring.mailbox.redis import calls as redis_calls

    monkeypatch.setattr(redis_calls, "MOST_ARGUMENTS", 20)
    async with here.mailbox() as mailbox:
        async with anyio.create_task_group() as group:
            for number in range(40):
                group.start_soon(lambda n: mailbox.send(n, dedup_key=str(n)), number)
        messages = await mailbox.receive(max_messages=1_000)
        assert sorted(message.body for message in messages) == list(range(40))
        async with anyio.create_task_group() as group:
            for message in messages:
                group.start_soon(message.nack)
        assert (await mailbox.counts()).pending == 40


async def test_a_big_send_many_is_whole(here, anyio_backend):
    async with here.mailbox() as mailbox:
        ids = await mailbox.send_many(["x"] * 30_000)
        assert len(set(ids)) == 30_000
        assert (await mailbox.counts()).pending == 30_000
        assert await mailbox.purge() == 30_000


async def test_functions_that_the_server_forgot_are_loaded_again(here, anyio_backend):
    async with here.mailbox() as mailbox:
        here.call("FUNCTION", "FLUSH")
        await mailbox.send("x")
        assert (await mailbox.counts()).pending == 1


async def test_a_connection_that_was_cut_while_idle_is_made_anew(here, monkeypatch, anyio_backend):
    """A call that went out on it would be an error; it is tried first, once it has idled for a while."""
    monkeypatch.setattr("mainspring.mailbox.redis.client.IDLE", 0.0)
    async with here.mailbox() as mailbox:
        host, port = mailbox._link._wire._connection.wire._stream.extra(SocketAttribute.local_address)[:2]
        here.call("CLIENT", "KILL", "ADDR", f"{host}:{port}")
        await mailbox.send("x")
        assert (await mailbox.counts()).pending == 1


async def test_a_claim_whose_answer_was_lost_goes_back(here, anyio_backend):
    """The connection breaks behind it: with the next call its messages are back, uncharged, and those in hand stay so."""
    async with here.mailbox() as mailbox, here.mailbox() as other:
        await mailbox.send_many(["mine", "others", "lost"])
        (mine,) = await mailbox.receive()
        (others,) = await other.receive()
        wire = mailbox._link._wire
        read = type(wire).read

        class Cut(type(wire)):
            async def read(self):
                await read(self)
                raise anyio.EndOfStream

        mailbox._link._wire = Cut(wire._connection)
        await wire.close()
        with pytest.raises(MailboxConnectionError):
            await mailbox.receive(visibility_timeout=600)
        (message,) = await mailbox.receive()
        assert (message.body, message.delivery_count, message.attempt) == ("lost", 1, 1)
        for held in (mine, others, message):
            await held.acknowledge()
        assert await mailbox.counts() == Counts(settled=3)


async def test_the_listener_follows_the_calls_to_another_server(here, never_by_itself, anyio_backend):
    """A primary that was demoted, and cut nobody off, calls nobody; so it subscribes where the calls go."""
    got: list = []
    async with here.mailbox() as mailbox:
        listen = mailbox._directory.listen
        connections = 0

        async def counted():
            nonlocal connections
            connections += 1
            return await listen()

        mailbox._directory.listen = counted
        mailbox._link.on_connect(("elsewhere", 6379))
        with anyio.fail_after(60):
            while not (connections and mailbox._receiving.listener.live):
                await anyio.sleep(0.005)
            async with anyio.create_task_group() as group:
                await park(group, mailbox, got)
                await mailbox.send("x")
        assert connections == 1
        assert got[0][1][0].body == "x"


async def test_a_claim_whose_receiver_was_cancelled_goes_back(here, anyio_backend):
    """As if it had not been made: not charged, not counted, at its old place."""
    async with here.mailbox() as mailbox:
        await mailbox.send_many(["first", "second"])
        call = mailbox._link.call
        out, go_on = anyio.Event(), anyio.Event()

        async def slow(*arguments):
            result = await call(*arguments)
            out.set()
            await go_on.wait()
            return result

        mailbox._link.call = slow
        async with anyio.create_task_group() as group:
            group.start_soon(mailbox.receive)
            await out.wait()
            group.cancel_scope.cancel()
        mailbox._link.call = call
        go_on.set()
        (message,) = await mailbox.receive()
        assert (message.body, message.delivery_count, message.attempt) == ("first", 1, 1)


# ---------------------------------------------------------------------------------------------------------- addresses


async def test_replies_know_their_own_server(here, anyio_backend):
    async with here.mailbox("requests") as requests, here.mailbox("replies") as replies:
        await requests.send("x", reply_to=replies)
        (message,) = await requests.receive()
        assert message.reply_to == replies.address
        before = requests._batcher.batches
        await message.reply("y")
        assert requests._batcher.batches == before + 1, "reply and acknowledgement were not one step"
        (reply,) = await replies.receive()
        assert (reply.body, reply.headers["request_id"]) == ("y", message.id)


async def test_an_option_that_does_not_exist_is_named(redis_url, anyio_backend):
    with pytest.raises(ConfigError, match="no option 'colour'"):
        open_mailbox(redis_url, colour="red")
    with pytest.raises(ConfigError, match="capacity"):
        open_mailbox(f"{redis_url}?capacity=many")
    with pytest.raises(ConfigError, match="timeout"):
        RedisMailbox(redis_url, timeout=0)


async def test_a_missing_driver_is_a_config_error(redis_url, monkeypatch, anyio_backend):
    monkeypatch.setitem(sys.modules, "hiredis", None)
    with pytest.raises(ConfigError, match=r"mainspring\[redis\]"):
        open_mailbox(f"{redis_url}?name=jobs")


async def test_envelopes_of_one_put_keep_what_is_their_own(here, anyio_backend):
    async with here.mailbox() as mailbox:
        made = [Envelope(mailbox.new_id(), b"1", headers={"n": str(n)}, dedup_key=f"k{n % 2}") for n in range(4)]
        ids = await mailbox._put(made)
        assert ids == [made[0].message_id, made[1].message_id, made[0].message_id, made[1].message_id]
        assert [message.headers for message in await mailbox.receive(max_messages=9)] == [{"n": "0"}, {"n": "1"}]
