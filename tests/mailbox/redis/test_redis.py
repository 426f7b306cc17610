"""What the Redis mailbox does beyond the contract: who is called, what is kept, what is removed, what is written as one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial

import anyio
import pytest

from mainspring import MailboxConnectionError, MailboxFullError, MailboxStatistics, open_mailbox
from mainspring.errors import ConfigError
from mainspring.mailbox.message import Counts
from mainspring.mailbox.redis.mailbox import RedisMailbox
from ports import free_port
from redis_support import CALLS, LISTENER, line_to, place, soon, unpushed
from scripted_redis import Sentinel
from stopwatch import Stopwatch
from support import outcomes

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
    await soon(lambda: mailbox.statistics().waiting_receives == count)


def batches(*mailboxes):
    """How many all of them have given to the server."""
    return sum(mailbox.statistics().batches for mailbox in mailboxes)


# ------------------------------------------------------------------------------------------------------- who is called


async def test_a_message_is_handed_to_one_of_those_that_wait(here, never_by_itself, anyio_backend):
    """It need not ask for it; several that come at once are asked for."""
    got: list = []
    async with here.mailbox() as one, here.mailbox() as two, here.mailbox() as three, here.mailbox() as sender:
        with anyio.fail_after(10):
            async with anyio.create_task_group() as group:
                for mailbox in (one, two, three):
                    await park(group, mailbox, got)
                before = batches(one, two, three)
                await sender.send("x")
                while not got:
                    await anyio.sleep(0.001)
                await anyio.sleep(0.05)  # time in which others would look
                assert batches(one, two, three) == before
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


async def test_a_call_that_comes_behind_a_claim_is_passed_on(here, line, never_by_itself, anyio_backend):
    """The claim's answer, with a message, is on its way already: the call was for another message, and another process."""
    got: list = []
    async with line.mailbox() as busy:
        (channel,) = here.channels()
        async with here.mailbox() as idle, here.mailbox() as sender:
            with anyio.fail_after(10):
                async with anyio.create_task_group() as group:
                    await sender.send("first")
                    line.answers.hold()
                    group.start_soon(lambda: busy.receive(wait_time_seconds=600))
                    await line.answers.arrived()
                    await park(group, idle, got)
                    waiters = here.waiters()
                    here.call("DEL", here.key("waiters"))  # so that this calls nobody
                    await sender.send("second")
                    here.call("ZADD", here.key("waiters"), 1, *waiters)
                    heard = line.news.passed
                    here.call("SPUBLISH", here.key(channel), "w1")  # as if it had been on the list
                    await soon(lambda: line.news.passed > heard)
                    await anyio.sleep(0.02)  # by then it has heard it
                    line.answers.let_go()
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


async def test_a_message_whose_call_was_lost_is_found(here, anyio_backend):
    """A process took the call and died of it: those that wait look for themselves after a while."""
    here.options["fallback_interval"] = 0.2
    got: list = []
    async with here.mailbox() as waiting, here.mailbox() as sender:
        with anyio.fail_after(10):
            async with anyio.create_task_group() as group:
                await park(group, waiting, got)
                waiters = here.waiters()
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
    """When a lease ends that it has just taken: another call would reach it ahead of the answer, and cost it a look.

    The messages are too large to be sent along: it is called, and claims them.
    """
    got: list = []
    with here.subscribed("all") as heard:
        async with here.mailbox() as waiting, here.mailbox() as sender:

            async def receive() -> None:
                got.extend(await waiting.receive(max_messages=10, wait_time_seconds=30))

            with anyio.fail_after(10):
                async with anyio.create_task_group() as group:
                    for number in range(2):
                        group.start_soon(receive)
                        await soon(lambda number=number: waiting.statistics().waiting_receives > number)
                    for body in map(unpushed, "12"):  # the second one comes behind what the first has brought about
                        await sender.send(body)
                        await soon(lambda body=body: got and got[-1].body == body)
    assert not [word for word in heard if word.startswith(b"d")]


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


@pytest.mark.slow
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


@pytest.mark.slow
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
        assert all(letter.error_type == "NotJsonError" for letter in letters)
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


async def test_a_reply_lives_as_long_as_the_transient_mailbox_it_goes_to(here, anyio_backend):
    here.prefix = f"~{here.prefix}"
    async with here.mailbox("requests") as requests, here.mailbox("replies") as replies:
        await requests.send_many(["x", "y"], reply_to=replies)
        first, second = await requests.receive(max_messages=2)
        here.call("PEXPIRE", here.key("state", "replies"), 5_000)
        await first.reply("taken")
        keys = [key for key in here.found() if b"replies" in key]
        assert len(keys) == 3, "state, record and index"
        assert all(0 < here.call("PTTL", key) <= 5_000 for key in keys)
        here.call("DEL", *keys)
        await second.reply("dropped")
        assert not [key for key in here.found() if b"replies" in key], "a reply makes it exist again"


# ------------------------------------------------------------------------------------------------------ what it tells


async def test_statistics_tell_what_a_mailbox_does(here, line, anyio_backend):
    async with line.mailbox() as mailbox, here.mailbox() as sender:
        assert mailbox.statistics() == MailboxStatistics(connected=True)
        async with anyio.create_task_group() as group:
            group.start_soon(partial(mailbox.receive, wait_time_seconds=600))
            await soon(lambda: mailbox.statistics().waiting_receives)
            assert mailbox.statistics() == MailboxStatistics(waiting_receives=1, batches=1, connected=True)
            line.answers.hold()
            for _ in range(3):
                group.start_soon(mailbox.counts)
            await line.answers.arrived()
            await soon(lambda: mailbox.statistics().queued)
            now = mailbox.statistics()
            assert (now.queued, now.in_flight, now.batches) == (2, 1, 2)
            assert repr(mailbox) == f"<RedisMailbox {mailbox.name!r} open, 1 waiting, 2 queued, 1 in flight>"
            line.answers.let_go()
            await sender.send("x")
        now = mailbox.statistics()
        assert (now.waiting_receives, now.queued, now.in_flight) == (0, 0, 0)
        assert mailbox.statistics().batches == now.batches
    assert mailbox.statistics() == MailboxStatistics()


async def test_statistics_tell_of_a_server_that_is_away(here, line, anyio_backend):
    """It is back as soon as one of both connections is, whether or not calls are made."""
    async with line.mailbox() as mailbox:
        line.lead_to(f"redis://127.0.0.1:{free_port()}")
        line.cut()
        with pytest.raises(MailboxConnectionError):
            await mailbox.receive(wait_time_seconds=60)
        await soon(lambda: not mailbox.statistics().connected)  # the other connection may have to find out
        await soon(lambda: mailbox.statistics().polling)
        await soon(lambda: mailbox.statistics().unconfirmed)  # the receive may be on the list
        assert not mailbox.statistics().connected
        assert repr(mailbox).startswith(f"<RedisMailbox {mailbox.name!r} open, not connected")
        line.lead_to(here.url)
        await soon(lambda: mailbox.statistics().connected)
        await mailbox.counts()
        now = mailbox.statistics()
        assert (now.unconfirmed, now.reconnects, now.polling) == (0, 2, False)


@pytest.mark.slow
async def test_statistics_tell_of_a_call_that_was_not_answered(line, anyio_backend):
    async with line.mailbox(timeout=1.0) as mailbox:
        line.answers.hold()
        with pytest.raises(MailboxConnectionError, match=r"did not answer within 1 s"):
            await mailbox.counts()
        assert not mailbox.statistics().connected
        line.answers.let_go()
        with anyio.fail_after(30):
            while isinstance((await outcomes(mailbox.counts))[0], MailboxConnectionError):
                pass
        assert mailbox.statistics().connected
        assert mailbox.statistics().reconnects


# ------------------------------------------------------------------------------------------------- batches and capacity


async def test_concurrent_operations_leave_as_one_call(here, anyio_backend):
    async with here.mailbox() as mailbox:
        before = batches(mailbox)

        async def send(number):
            await mailbox.send(number, priority=number % 3, dedup_key=f"k{number % 50}" if number < 100 else None)

        async with anyio.create_task_group() as group:
            for number in range(300):
                group.start_soon(send, number)
        assert batches(mailbox) - before <= 3
        assert (await mailbox.counts()).pending == 250
        messages = await mailbox.receive(max_messages=1_000)
        before = batches(mailbox)
        async with anyio.create_task_group() as group:
            for message in messages:
                group.start_soon(message.acknowledge)
        assert batches(mailbox) - before <= 3
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


async def test_a_send_many_is_whole_and_leaves_before_what_fits_no_more(here, line, anyio_backend):
    """A call has at most 50,000 arguments, unless a single operation has more."""
    calls: list = []
    line.on_command = lambda passage, command: calls.append(command[0]) if passage.name == CALLS else None
    async with line.mailbox(timeout=60) as mailbox:
        line.answers.hold()
        calls.clear()
        async with anyio.create_task_group() as group:
            group.start_soon(mailbox.counts)
            await line.answers.arrived()
            sent = []

            async def send() -> None:
                sent.extend(
                    await outcomes(
                        lambda: mailbox.send_many(["x"] * 30_000),
                        lambda: mailbox.send("behind", dedup_key="k"),
                        lambda: mailbox.receive(max_messages=9),
                    )
                )

            group.start_soon(send)
            await soon(lambda: mailbox.statistics().queued == 3)
            line.answers.let_go()
        assert calls == [b"FCALL"] * 3
        ids, _, got = sent
        assert len(set(ids)) == 30_000
        assert len(got) == 9
        assert await mailbox.counts() == Counts(pending=29_992, in_flight=9)
        assert await mailbox.purge() == 30_001


async def test_functions_that_the_server_forgot_are_loaded_again(here, anyio_backend):
    async with here.mailbox() as mailbox:
        here.call("FUNCTION", "FLUSH")
        await mailbox.send("x")
        assert (await mailbox.counts()).pending == 1


@pytest.mark.slow
async def test_a_connection_that_was_cut_while_idle_is_made_anew(line, anyio_backend):
    """A call that went out on it would be an error; it is tried first, once it has idled for as long as ``silence``."""
    async with line.mailbox(silence=0.2, timeout=60) as mailbox:
        line.news.hold()  # the listener finds the server silent, as at load, and asks it over this connection, but only once
        answered = -1
        while line.answers.passed > answered:
            answered = line.answers.passed
            await anyio.sleep(0.4)
        line.cut(CALLS)
        await mailbox.send("x")
        assert (await mailbox.counts()).pending == 1


async def test_a_claim_whose_answer_was_lost_goes_back(here, line, anyio_backend):
    """The connection breaks behind it: with the next call its messages are back, uncharged, and those in hand stay so."""
    async with line.mailbox() as mailbox, here.mailbox() as other:
        await mailbox.send_many(["mine", "others", "lost"])
        (mine,) = await mailbox.receive()
        (others,) = await other.receive()
        line.answers.hold()
        async with anyio.create_task_group() as group:
            group.start_soon(line.lose_answer)
            with pytest.raises(MailboxConnectionError):
                await mailbox.receive(visibility_timeout=600)
        assert mailbox.statistics().unconfirmed == 1
        (message,) = await mailbox.receive()
        assert (message.body, message.delivery_count, message.attempt) == ("lost", 1, 1)
        for held in (mine, others, message):
            await held.acknowledge()
        assert await mailbox.counts() == Counts(settled=3)


async def test_the_listener_follows_the_calls_to_another_server(here, never_by_itself, anyio_backend):
    """A primary that was demoted, and cut nobody off, calls nobody; so it subscribes where the calls go."""
    got: list = []
    async with (
        line_to(here) as old,
        line_to(here) as new,
        Sentinel(old.port) as sentinel,
        sentinel.mailbox(here) as mailbox,
    ):
        assert old.names() == [CALLS, LISTENER]
        sentinel.primary = new.port
        old.cut(CALLS)
        with suppress(MailboxConnectionError):
            await mailbox.counts()
        await mailbox.counts()
        await soon(lambda: new.names() == [CALLS, LISTENER] and mailbox.statistics().connected)
        await soon(lambda: old.names() == [])
        with anyio.fail_after(10):
            async with anyio.create_task_group() as group:
                await park(group, mailbox, got)
                await mailbox.send("x")
        assert (old.opened, new.opened) == (2, 2)
        assert got[0][1][0].body == "x"


@pytest.mark.parametrize("end", ["its answer comes", "it is cancelled"])
async def test_a_message_that_comes_for_a_claim_whose_answer_is_on_its_way_waits_for_it(here, line, end, anyio_backend):
    """If it went back, it would be sent to that claim again at once, and so on: that lasted for seconds."""
    got: list = []

    async def receive(mailbox) -> None:
        got.extend(await mailbox.receive(wait_time_seconds=600))

    async with line.mailbox() as mailbox, here.mailbox() as other:
        async with anyio.create_task_group() as group:
            line.answers.hold()
            group.start_soon(receive, mailbox)
            await line.answers.arrived()
            before = mailbox.statistics()
            await other.send("x")
            await anyio.sleep(0.05)
            assert mailbox.statistics() == before, "it goes back"
            if end == "it is cancelled":
                group.cancel_scope.cancel()
            line.answers.let_go()
        if end == "it is cancelled":
            got.extend(await other.receive(wait_time_seconds=5))
        assert [(message.body, message.attempt) for message in got] == [("x", 1)]


async def test_a_claim_whose_receiver_was_cancelled_goes_back(line, anyio_backend):
    """As if it had not been made: not charged, not counted, at its old place."""
    async with line.mailbox() as mailbox:
        await mailbox.send_many(["first", "second"])
        line.answers.hold()
        async with anyio.create_task_group() as group:
            group.start_soon(mailbox.receive)
            await line.answers.arrived()
            group.cancel_scope.cancel()
        line.answers.let_go()
        (message,) = await mailbox.receive()
        assert (message.body, message.delivery_count, message.attempt) == ("first", 1, 1)


# ---------------------------------------------------------------------------------------------------------- addresses


async def test_replies_know_their_own_server(here, anyio_backend):
    async with here.mailbox("requests") as requests, here.mailbox("replies") as replies:
        await requests.send("x", reply_to=replies)
        (message,) = await requests.receive()
        assert message.reply_to == replies.address
        before = batches(requests)
        await message.reply("y")
        assert batches(requests) == before + 1, "reply and acknowledgement were not one step"
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


async def test_sends_that_leave_together_keep_what_is_their_own(here, anyio_backend):
    async with here.mailbox() as mailbox:
        ids = await outcomes(
            *[
                lambda n=n: mailbox.send(n, headers={"n": str(n)}, dedup_key=f"k{n % 2}" if n < 4 else None)
                for n in range(6)
            ]
        )
        assert (ids[0], ids[1]) == (ids[2], ids[3])
        assert len(set(ids)) == 4
        got = await mailbox.receive(max_messages=9)
        assert [message.headers for message in got] == [{"n": str(message.body)} for message in got]
        assert {message.id for message in got} == set(ids)
