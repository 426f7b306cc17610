"""Tasks and their limits on Redis: their keys in the store, the length of a call, and several processes."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import ExitStack, contextmanager
from functools import partial

import anyio
import pytest

from limited_calls import drain, end, limit, random_limits, send
from mainspring.mailbox.batched import Unclaim
from mainspring.mailbox.limiters import ALL_TASKS, Blocks, LimitChange, TaskLimits
from mainspring.mailbox.message import Counts, MessagePlace, MessageQuery
from mainspring.policies import Rate
from redis_support import place, soon
from servers import RedisServer

pytestmark = pytest.mark.anyio

TASK_KEYS = ("more", "waits", "listed", "expiry")


@pytest.fixture
def anyio_backend():
    """What the server does is the same on every event loop."""
    return "asyncio"


@pytest.fixture
def here(redis_url):
    with place(redis_url) as made:
        yield made


def held(here, name="jobs") -> dict[str, str]:
    """The limiters that have permits out, and these."""
    flat = here.call("HGETALL", here.key("limiters", name))
    fields = dict(zip(map(bytes.decode, flat[::2]), map(bytes.decode, flat[1::2]), strict=True))
    return {name: text for name, text in fields.items() if name[0] == "l" and not text.startswith("0 ")}


@pytest.mark.parametrize("seed", range(3))
async def test_no_permit_is_left_when_all_is_done(here, seed):
    """All messages can be done after any calls on them while their limits change, and nothing is left of them."""
    rng = random.Random(seed)
    async with here.mailbox() as mailbox:
        in_flight, known = [], []
        for step in range(250):
            act = rng.randrange(12)
            if act < 4:
                options = {"delay": rng.choice([0, 0, 0.01]), "priority": rng.choice([0, 0, 1, -2])}
                if rng.random() < 0.1:
                    options["expires_in"] = 0.02
                task, key = rng.choice(["t", "u", None]), rng.choice([None, "a", "b"])
                bodies = [step] * rng.choice([1, 1, 4])
                known += await send(mailbox, *bodies, task=task, key=key if task else None, **options)
            elif act < 7:
                in_flight += await mailbox.receive(
                    max_messages=rng.choice([1, 3]), visibility_timeout=rng.choice([0.01, 60])
                )
            elif act < 9 and in_flight:
                await end(in_flight.pop(rng.randrange(len(in_flight))), rng)
            elif act == 9 and known:
                message_id = rng.choice(known)
                if rng.random() < 0.5:
                    await mailbox.cancel(message_id)
                else:
                    await mailbox.backend.reschedule(message_id, rng.choice([0, 0.01]))
            elif act == 10:
                await mailbox.replay_dead_letters()
            else:
                task = rng.choice(["t", "u"])
                await mailbox.backend.change_limits([LimitChange(task, random_limits(rng), paused=rng.random() < 0.2)])
        await mailbox.backend.change_limits([LimitChange(task, random_limits(rng), paused=False) for task in "tu"])
        for message in in_flight:
            await end(message, rng)
        await drain(mailbox)
        assert held(here) == {}
        assert [here.call("EXISTS", here.key(key)) for key in TASK_KEYS] == [0] * len(TASK_KEYS)


# ------------------------------------------------------------------------------------------------------- several processes

PROGRAM = """
import anyio, sys
from mainspring.mailbox.redis.mailbox import RedisMailbox

async def main():
    async with RedisMailbox(sys.argv[1], name=sys.argv[2]) as mailbox:
        async def work():
            while True:
                for message in await mailbox.receive(max_messages=2, visibility_timeout=0.5, wait_time_seconds=60):
                    print("began", *message.body, message.receipt_handle.partition(".")[0], flush=True)
                    await anyio.sleep(0.002)
                    print("ended", *message.body, flush=True)
                    await message.acknowledge()

        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(work)

anyio.run(main)
"""


class Workers:
    """Processes that work on a mailbox, and their output: the first word of each line, then the other words."""

    def __init__(self, here, count: int) -> None:
        command = [sys.executable, "-c", PROGRAM, here.url, here.prefix + "jobs"]
        self.processes = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(count)]

    def said(self) -> list[list[str]]:
        """End them. Return their lines."""
        for process in self.processes:
            process.kill()
        return [line.split() for process in self.processes for line in process.communicate()[0].decode().splitlines()]


@contextmanager
def workers(here, count: int):
    """Start these processes, and end them with the block."""
    made = Workers(here, count)
    try:
        yield made
    finally:
        for process in made.processes:
            process.kill()


async def watched(mailbox, most: int, key_most: int | None = None) -> None:
    """Look, until all is done, whether no more is in flight than may be."""
    with anyio.fail_after(60):
        while (counts := await mailbox.counts()).waiting:
            assert counts.in_flight <= most, counts
            states = await mailbox.backend.limits()
            assert all(state.running <= most for state in states), states
            await anyio.sleep(0.003)


@pytest.mark.slow
async def test_processes_keep_the_concurrency_of_a_task_and_the_order_of_its_keys(here):
    """None of them runs more than it may, all is done, and the messages of each key in the order of the sends."""
    async with here.mailbox() as mailbox:
        await limit(mailbox, concurrency=3, key_concurrency=1)
        sent = defaultdict(list)
        for number in range(150):
            key = f"k{number % 7}"
            sent[key].append(str(number))
            await send(mailbox, [key, number], key=key)
        with workers(here, 3) as made:
            await watched(mailbox, 3)
            said = made.said()
        assert held(here) == {}
    begun = sorted(((int(line[3]), line[1], line[2]) for line in said if line[0] == "began"), key=lambda line: line[0])
    done = defaultdict(list)
    for _, key, number in begun:
        done[key].append(number)
    assert done == sent


@pytest.mark.slow
async def test_workers_that_are_killed_lose_no_message_and_no_permit(here):
    async with here.mailbox() as mailbox:
        await limit(mailbox, concurrency=3, key_concurrency=1, blocks=Blocks.RETRY)
        for number in range(60):
            await send(mailbox, ["k", number], key=f"k{number % 5}")
        with ExitStack() as stack:
            made = [stack.enter_context(workers(here, 1)) for _ in range(4)]
            said = []
            for each in made[:3]:
                await soon(lambda: here.call("ZCARD", here.key("leases")))
                said += each.said()
            await watched(mailbox, 3)
            said += made[3].said()
        assert held(here) == {}
    assert {int(line[2]) for line in said if line[0] == "ended"} == set(range(60))


@pytest.mark.slow
async def test_processes_keep_a_rate(here):
    """By the server's dates of the claims, in no time more were claimed than the burst and what the rate allows."""
    interval, burst = 0.02, 3
    async with here.mailbox() as mailbox:
        await limit(mailbox, rate=Rate(50, 1, burst))
        await send(mailbox, *(["x", number] for number in range(60)))
        with workers(here, 3) as made:
            await watched(mailbox, 60)
            said = made.said()
    begun = sorted(int(line[3]) / 1e6 for line in said if line[0] == "began")
    assert len(begun) == 60
    for first in range(60):
        for last in range(first + burst, 60):
            assert begun[last] - begun[first] >= (last - first + 1 - burst) * interval - 0.001


async def test_keys_take_turns_at_the_limiter_of_their_task(here):
    """A new key is among the next, though earlier messages wait for a permit of the task."""
    async with here.mailbox() as mailbox:
        await limit(mailbox, concurrency=1)
        await send(mailbox, *(f"a{number}" for number in range(20)), key="a")
        (first,) = await mailbox.receive(max_messages=5)
        await send(mailbox, "b0", "b1", key="b")
        await first.acknowledge()
        seen = []
        for _ in range(5):
            (message,) = await mailbox.receive(max_messages=5)
            seen.append(message.body)
            await message.acknowledge()
        assert seen == ["a1", "b0", "a2", "b1", "a3"]


async def test_a_claim_whose_answer_is_lost_gives_its_permits_back(here):
    """It counts for nothing, also for a rate: the message can be claimed at once."""
    async with here.mailbox() as mailbox:
        await limit(mailbox, concurrency=1, rate=Rate(1, 3_600))
        await send(mailbox, "x", "y")
        claimed = await mailbox.backend.claim(2, 600, 0)
        await mailbox.backend.call(Unclaim(claimed))
        assert [message.body for message in await mailbox.receive(max_messages=2)] == ["x"]
        _, _, spent = held(here)["l1:tt"].split()
        assert int(spent) / 1e6 - time.time() < 3_601


# ------------------------------------------------------------------------------------------------------------ short calls


def commands_of(here) -> dict[str, int]:
    """How often each command was called since the statistics were reset."""
    lines = here.call("INFO", "commandstats").decode().splitlines()
    found = {
        line.split(":")[0].removeprefix("cmdstat_"): int(line.split("calls=")[1].split(",")[0]) for line in lines[1:]
    }
    return {name: count for name, count in found.items() if not name.startswith(("info", "config", "select", "scan"))}


@pytest.fixture
def server():
    with RedisServer() as own:
        yield own


async def test_a_message_without_a_task_is_what_it_was(server):
    """It costs the commands that it did, and no key is made for it."""
    with place(server.url) as own:
        async with own.mailbox() as mailbox:
            await mailbox.send("first")
            await (await mailbox.receive())[0].acknowledge()
            own.call("CONFIG", "RESETSTAT")
            await mailbox.send("x")
            await mailbox.send_many(["y", "z"])
            messages = await mailbox.receive(max_messages=3)
            assert {key.decode().rpartition(":")[2] for key in own.found()} == {"messages", "leases", "state"}
            await mailbox.acknowledge_many(messages)
            assert commands_of(own) == {
                "fcall": 4,
                "time": 4,
                "hset": 2 + 1,  # two sends, and when the last claim was made
                "hincrby": 2 + 1,  # places, and how many are settled
                "zadd": 2 + 1,
                "zpopmin": 2,
                "hmget": 1 + 1,  # of the claim: when the last one was made, and the messages
                "zrange": 1 + 3,
                "zremrangebyrank": 1,
                "hlen": 1 + 2,
                "zcard": 1 + 1,
                "zmscore": 1,
                "hdel": 1,
                "zrem": 1,
            }


async def test_a_pause_of_many_messages_is_done_in_short_calls(here):
    """A claim moves at most a thousand messages of a paused task out of the way, and the next goes on."""
    async with here.mailbox() as mailbox:
        await send(mailbox, *range(3_500))
        await mailbox.send("other")
        await mailbox.backend.change_limits([LimitChange("t", paused=True)])
        calls = mailbox.statistics().batches
        assert [message.body for message in await mailbox.receive(max_messages=10)] == ["other"]
        assert mailbox.statistics().batches - calls == 4
        assert await mailbox.counts() == Counts(pending=3_500, in_flight=1)
        await mailbox.backend.change_limits([LimitChange("t", paused=False)])
        assert here.call("ZCARD", here.key("ready")) <= 1_000
        await soon_ready(mailbox, here, 3_500)
        messages = [message for _ in range(4) for message in await mailbox.receive(max_messages=1_000)]
        assert [message.body for message in messages] == list(range(3_500))


async def soon_ready(mailbox, here, count):
    """Wait until that number of messages is ready: the calls of a mailbox go on with what others began."""
    with anyio.fail_after(10):
        while here.call("ZCARD", here.key("ready")) < count:
            await mailbox.counts()


async def test_a_limit_of_many_keys_is_changed_in_short_calls(here):
    """A call lets in at most a thousand messages; the rest is due at once, for any mailbox that waits."""
    async with here.mailbox() as mailbox, here.mailbox() as other:
        await limit(mailbox, key_concurrency=1)
        for number in range(1_500):
            await send(mailbox, 1, 2, key=f"k{number}")
        assert here.call("ZCARD", here.key("waits")) == 1_500
        await limit(other, key_concurrency=2)
        assert here.call("ZCARD", here.key("waits")) >= 500
        assert await mailbox.counts() == Counts(pending=3_000)
        await soon_ready(mailbox, here, 3_000)


@pytest.mark.slow
async def test_a_receive_waits_while_nothing_may_be_claimed(here):
    """It makes no calls without end, with any limits on the messages that are there."""
    async with here.mailbox() as mailbox:
        for limits in (LimitChange(ALL_TASKS, paused=True), LimitChange("t", paused=True)):
            await mailbox.backend.change_limits([limits])
            await send(mailbox, "x")
            calls = mailbox.statistics().batches
            assert await mailbox.receive(wait_time_seconds=0.3) == []
            assert mailbox.statistics().batches - calls <= 3


async def test_a_message_is_not_pushed_by_a_mailbox_that_is_paused(here, waiting):
    """A receive that waits gets it when the mailbox goes on, also where as many are in flight as may be."""
    async with here.mailbox() as mailbox, here.mailbox(fallback_interval=3_600) as other:
        await mailbox.backend.change_limits([LimitChange(ALL_TASKS, TaskLimits(concurrency=1), paused=True)])
        receive = partial(other.receive, wait_time_seconds=60)
        waiting.group.start_soon(waits_for, receive, got := [])
        await soon(lambda: here.waiters())
        await mailbox.send("x")
        await mailbox.send("y")
        assert await mailbox.counts() == Counts(pending=2)
        await mailbox.backend.change_limits([LimitChange(ALL_TASKS, paused=False)])
        while not got:
            await anyio.sleep(0.002)
        waiting.group.start_soon(waits_for, receive, got)
        await soon(lambda: here.waiters())
        assert await mailbox.counts() == Counts(pending=1, in_flight=1)
        await got[0].acknowledge()
        while len(got) < 2:
            await anyio.sleep(0.002)
        assert [message.body for message in got] == ["x", "y"]


async def waits_for(receive, got):
    got += await receive()


async def test_a_rate_goes_on_while_a_receive_waits(here):
    """Each claim, also a pushed claim, sets the instant of the next."""
    async with here.mailbox(fallback_interval=3_600) as mailbox:
        await limit(mailbox, rate=Rate(1, 0.02))
        await send(mailbox, *range(4))
        with anyio.fail_after(5):
            for number in range(4):
                (message,) = await mailbox.receive(wait_time_seconds=60)
                assert message.body == number


async def test_limits_that_are_as_they_were_write_nothing(here):
    async with here.mailbox() as mailbox:
        limits = TaskLimits(2, Rate(5, 60, 2), 1, Rate(7, 11), Blocks.DEAD)
        await mailbox.backend.change_limits([LimitChange("t", limits, paused=True, concurrency=4)])
        before = here.call("DUMP", here.key("state"))
        await mailbox.backend.change_limits([LimitChange("t", limits), LimitChange("u", TaskLimits())])
        assert here.call("DUMP", here.key("state")) == before


@pytest.mark.slow
async def test_keys_that_have_nothing_to_do_leave_nothing_behind(here):
    """Of the places and limiters of keys that are done, no more is kept than of some thousand."""
    async with here.mailbox() as mailbox:
        await limit(mailbox, key_concurrency=1)
        for start in range(0, 12_000, 500):
            for number in range(start, start + 500, 50):
                await mailbox.send_prepared([prepared(mailbox, key=f"k{key}") for key in range(number, number + 50)])
            await mailbox.acknowledge_many(await mailbox.receive(max_messages=500))
        assert here.call("HLEN", here.key("limiters")) < 4_000


def prepared(mailbox, body="x", *, task="t", key=None):
    envelope = mailbox.prepare(body)
    envelope.task, envelope.key = task, key
    return envelope


# --------------------------------------------------------------------------------------------------------------- lists


async def test_a_page_looks_at_some_messages_alone(here):
    """A list from a late date on, or of another place, comes in pages that may be empty."""
    async with here.mailbox() as mailbox:
        await send(mailbox, *range(2_500))
        (late,) = await send(mailbox, "late", delay=600)
        query = MessageQuery(MessagePlace.DELAYED, 10, task="t")
        page = await mailbox.backend.list_messages(query)
        assert ([each.message.message_id for each in page.messages], page.after) == ([late], None), (
            "it is alone in its place"
        )
        await send(mailbox, *range(2_500), task="u", delay=300)
        query = MessageQuery(MessagePlace.DELAYED, 10, task="t")
        pages = 0
        while True:
            page = await mailbox.backend.list_messages(query)
            pages += 1
            if page.after is None:
                break
            assert page.messages == []
            query = MessageQuery(MessagePlace.DELAYED, 10, page.after, task="t")
        assert [each.message.message_id for each in page.messages] == [late]
        assert pages == 3


async def test_pages_go_on_behind_a_message_that_is_gone(here):
    """First ready messages, then messages at limiters. Messages of one score are in the order of their places."""
    async with here.mailbox() as mailbox:
        await limit(mailbox, concurrency=2)
        ids = await send(mailbox, *range(5))
        ids += [await mailbox.send("plain", priority=priority) for priority in (0, 3, 0)]
        query, seen = MessageQuery(MessagePlace.PENDING, 1), []
        while True:
            page = await mailbox.backend.list_messages(query)
            for each in page.messages:
                seen.append(each.message.message_id)
                if len(seen) % 2:
                    await mailbox.cancel(each.message.message_id)
            if page.after is None:
                break
            query = MessageQuery(MessagePlace.PENDING, 1, page.after)
        assert sorted(seen) == sorted(ids)


async def test_large_bodies_are_listed_a_few_at_a_time_and_replaced(here):
    """A page is at most a few megabytes; a body that is kept apart is there, and can be replaced."""
    async with here.mailbox() as mailbox:
        ids = [(await send(mailbox, letter * 100_000, headers={"h": letter}))[0] for letter in "abc"]
        page = await mailbox.backend.list_messages(MessageQuery(MessagePlace.PENDING, 10))
        assert [len(each.message.body) for each in page.messages] == [100_002] * 3
        await send(mailbox, *("x" * 60_000 for _ in range(100)))
        page = await mailbox.backend.list_messages(MessageQuery(MessagePlace.PENDING, 100, task="t"))
        assert page.after is not None
        assert len(page.messages) < 30
        await mailbox.backend.replace_body(ids[0], b'"new"')
        await mailbox.backend.replace_body(ids[1], b'"' + b"y" * 100_000 + b'"')
        messages = await mailbox.receive(max_messages=3)
        assert [message.body for message in messages] == ["new", "y" * 100_000, "c" * 100_000]
        assert [message.headers for message in messages] == [{"h": letter} for letter in "abc"]
        assert here.call("HLEN", here.key("bodies")) == 1


# ------------------------------------------------------------------------------------------------------------- recovery


@pytest.mark.parametrize("key", ["limiters", "waits", "listed", "ready", "leases", "more"])
async def test_what_waits_is_done_in_spite_of_a_key_that_is_gone(here, key):
    """No message is lost with a key of the limits, and none stays at a limiter whose permits no message has."""
    async with here.mailbox(recovery_interval=0.05) as mailbox:
        await limit(mailbox, concurrency=2, key_concurrency=1)
        await send(mailbox, *range(4), key="a")
        await send(mailbox, *range(4, 8), key="b")
        held_before = await mailbox.receive(max_messages=1)
        here.call("DEL", here.key(key))
        got = []
        with anyio.fail_after(10):
            while len(got) < 7:
                for message in await mailbox.receive(max_messages=10, wait_time_seconds=0.1):
                    got.append(message.body)
                    await message.acknowledge()
                if key != "leases":
                    while held_before and len(got) > 1:
                        await held_before.pop().acknowledge()
        assert len(set(got)) == len(got)
        await drain(mailbox)
        await send(mailbox, "again", key="a")
        assert [message.body for message in await mailbox.receive(wait_time_seconds=5)] == ["again"]
