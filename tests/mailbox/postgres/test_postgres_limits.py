"""Tasks and their limits on PostgreSQL: that several processes keep them, that no lock holds up others, and what lists cost."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import defaultdict
from contextlib import contextmanager

import anyio
import pytest

from limited_calls import drain, end, limit, random_limits, send
from mainspring.mailbox.limiters import ALL_TASKS, Blocks, LimitChange, TaskLimits
from mainspring.mailbox.message import Counts, MessagePlace, MessageQuery
from mainspring.policies import Rate
from postgres_support import until

pytestmark = pytest.mark.anyio

LIMITERS = ("3", "4", "5")


@pytest.fixture
def anyio_backend():
    return "asyncio", {"use_uvloop": True}


async def bodies(mailbox, most=100):
    return [message.body for message in await mailbox.receive(max_messages=most, visibility_timeout=600)]


def left(place):
    """How many messages wait at limiters or have permits, and how many permits wait to be given."""
    waiting = "SELECT count(*) FROM SCHEMA.messages WHERE state > 2 OR permits > 0"
    return place.execute(waiting)[0][0], place.execute("SELECT count(*) FROM SCHEMA.freed_permits")[0][0]


# ------------------------------------------------------------------------------------------------------------- idle


@pytest.mark.slow
@pytest.mark.parametrize(
    "limits", [{"concurrency": 1}, {"key_concurrency": 1}, {"rate": Rate(1)}], ids=["concurrency", "keys", "rate"]
)
async def test_a_receive_that_waits_in_a_mailbox_with_limits_asks_at_intervals(place, limits):
    async with place.mailbox() as mailbox:
        await limit(mailbox, **limits)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(bodies_within, mailbox, 30)
            await until(lambda: mailbox.statistics().waiting_receives)
            await anyio.sleep(0.2)
            before = mailbox.backend.polling.polls
            await anyio.sleep(1)
            assert mailbox.backend.polling.polls - before <= 8
            tasks.cancel_scope.cancel()


async def bodies_within(mailbox, seconds):
    await mailbox.receive(visibility_timeout=600, wait_time_seconds=seconds)


# -------------------------------------------------------------------------------------------------------- one process


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
async def test_nothing_is_left_at_a_limiter(place, seed):
    """All messages can be done after any calls on them while their limits change."""
    rng = random.Random(seed)
    async with place.mailbox() as mailbox:
        in_flight, known = [], []
        for step in range(250):
            act = rng.randrange(12)
            if act < 4:
                options = {"delay": rng.choice([0, 0, 0.01]), "priority": rng.choice([0, 0, 1, -2])}
                if rng.random() < 0.1:
                    options["expires_in"] = 0.02
                task, key = rng.choice(["t", "u", None]), rng.choice([None, "a", "b"])
                many = [step] * rng.choice([1, 1, 4])
                known += await send(mailbox, *many, task=task, key=key, **options)
            elif act < 7:
                lease = rng.choice([0.01, 60])
                in_flight += await mailbox.receive(max_messages=rng.choice([1, 3]), visibility_timeout=lease)
            elif act < 9 and in_flight:
                await end(in_flight.pop(rng.randrange(len(in_flight))), rng)
            elif act == 9 and known:
                if rng.random() < 0.5:
                    await mailbox.cancel(rng.choice(known))
                else:
                    await mailbox.backend.reschedule(rng.choice(known), rng.choice([0, 0.01]))
            elif act == 10:
                await mailbox.replay_dead_letters()
            else:
                change = LimitChange(rng.choice(["t", "u"]), random_limits(rng), paused=rng.random() < 0.2)
                await mailbox.backend.change_limits([change])
        await mailbox.backend.change_limits([LimitChange(task, random_limits(rng), paused=False) for task in "tu"])
        for message in in_flight:
            await end(message, rng)
        await drain(mailbox)
        await mailbox.receive()
        assert left(place) == (0, 0)


async def test_sends_and_settlements_of_open_transactions_hold_up_nothing(place):
    """They take no lock that a claim or a change of limits waits for; a permit is free when its transaction commits."""
    async with place.mailbox() as mailbox, await place.connect() as connection:
        await limit(mailbox, concurrency=1, key_concurrency=1, rate=Rate(1_000, 1, 10))
        await send(mailbox, "a", "b", key="k")
        (first,) = await mailbox.receive(visibility_timeout=600)
        with anyio.fail_after(5):
            async with mailbox.transaction(first), connection.transaction():
                await send(mailbox, "c", key="k", connection=connection)
                await first.acknowledge()
                assert await bodies(mailbox) == []
                await mailbox.backend.change_limits([LimitChange("t", concurrency=2)])
                await send(mailbox, "other", task="u")
                assert await bodies(mailbox) == ["other"]
        (second,) = await mailbox.receive(visibility_timeout=600)
        assert second.body == "b"
        await second.acknowledge()
        assert await bodies(mailbox) == ["c"]


async def test_a_send_that_commits_late_keeps_the_order_of_its_key(place):
    """It came first, and floors that claims have passed meanwhile do not let a later one of its key go before it."""
    async with place.mailbox() as mailbox, await place.connect() as connection:
        await limit(mailbox, key_concurrency=1)
        await send(mailbox, "before")
        async with connection.transaction():
            await send(mailbox, 1, key="k", connection=connection)
            await send(mailbox, "after", task="u")
            assert await bodies(mailbox) == ["before", "after"]
        await send(mailbox, 2, 3, key="k", weight=0.1)
        seen = []
        while messages := await mailbox.receive(max_messages=1, visibility_timeout=600, wait_time_seconds=2):
            seen += [message.body for message in messages]
            await messages[0].acknowledge()
            if seen[-1] == 3:
                break
        assert seen == [1, 2, 3]


@pytest.mark.slow
async def test_a_claim_puts_a_bounded_number_of_messages_to_their_limiters(place):
    """A claim that finds nothing goes on where it ended; a waiting one does so at once."""
    async with place.mailbox() as mailbox:
        await mailbox.backend.change_limits([LimitChange("t", paused=True)])
        await send(mailbox, *range(3_500))
        await mailbox.send("other")
        assert await bodies(mailbox, 10) == []
        waiting = "SELECT count(*) FROM SCHEMA.messages WHERE state = 4"
        assert 1_000 <= place.execute(waiting)[0][0] < 1_100
        with anyio.fail_after(5):
            (other,) = await mailbox.receive(wait_time_seconds=60)
        assert other.body == "other"
        await mailbox.backend.change_limits([LimitChange("t", paused=False)])
        got = []
        while len(got) < 3_500:
            got += await bodies(mailbox, 1_000)
        assert got == list(range(3_500))


@pytest.mark.parametrize("most", [1, 5])
@pytest.mark.parametrize("how", ["together", "one_by_one", "with_a_dedup_key"])
async def test_a_key_has_its_turn_among_messages_that_wait_for_their_task(place, most, how):
    """A new key is among the next, however many a claim asks for, and though messages with a later place are let in first."""
    async with place.mailbox() as mailbox:
        await limit(mailbox, concurrency=1)
        await send(mailbox, *(f"a{number}" for number in range(20)), key="a")
        (first,) = await mailbox.receive(max_messages=5, visibility_timeout=600)
        assert await bodies(mailbox) == []  # the others are at the limiter
        for group in [("b0", "b1")] if how == "together" else [("b0",), ("b1",)]:
            options = {"dedup_key": group[0]} if how == "with_a_dedup_key" else {}
            await send(mailbox, *group, key="b", **options)
        await first.acknowledge()
        seen = []
        for _ in range(5):
            (message,) = await mailbox.receive(max_messages=most, visibility_timeout=600)
            seen.append(message.body)
            await message.acknowledge()
        assert seen == ["a1", "b0", "a2", "b1", "a3"]


async def test_a_key_has_its_turn_among_messages_that_were_let_in(place):
    """A limit that is gone lets all of a key in at once; a new key is among the next, and no key's order is changed."""
    async with place.mailbox() as mailbox:
        await mailbox.backend.change_limits([LimitChange("t", paused=True)])
        await send(mailbox, *(f"a{number}" for number in range(20)), key="a")
        assert await bodies(mailbox) == []
        await mailbox.backend.change_limits([LimitChange("t", TaskLimits(concurrency=100), paused=False)])
        await send(mailbox, "b0", key="b")
        await send(mailbox, "a20", key="a")
        await send(mailbox, "other", dedup_key="one", key="c")
        seen = [body for _ in range(23) for body in await bodies(mailbox, 1)]
        assert set(seen[:3]) == {"a0", "b0", "other"}
        assert [body for body in seen if body[0] == "a"] == [f"a{number}" for number in range(21)]


async def test_a_message_that_waits_for_its_task_has_the_permit_of_its_key(place):
    """No later one of the key has it, also while another transaction works on the first."""
    async with place.mailbox() as mailbox, await place.connect() as connection:
        await limit(mailbox, concurrency=1, key_concurrency=1)
        await send(mailbox, "other", key="other")
        (other,) = await mailbox.receive(visibility_timeout=600)
        for number in range(3):
            await send(mailbox, number, key="k")
        assert await bodies(mailbox, 1) == []
        async with connection.transaction(force_rollback=True):
            await connection.execute(
                f"SELECT FROM {place.schema}.messages WHERE body = '0' FOR UPDATE"  # as a cancellation would
            )
            await other.acknowledge()
            assert await bodies(mailbox, 1) == []
        for number in range(3):
            (message,) = await mailbox.receive(max_messages=1, visibility_timeout=600, wait_time_seconds=5)
            assert message.body == number
            await message.acknowledge()


@pytest.mark.slow
async def test_a_receive_waits_while_nothing_may_be_claimed(place):
    """It makes no calls without end, with any limits on the messages that are there."""
    async with place.mailbox() as mailbox:
        changes = (
            LimitChange(ALL_TASKS, paused=True),
            LimitChange("t", paused=True),
            LimitChange("t", TaskLimits(concurrency=1)),
        )
        for change in changes:
            await mailbox.backend.change_limits([change])
            await send(mailbox, "x")
            calls = mailbox.statistics().batches
            assert await mailbox.receive(wait_time_seconds=0.8) == []
            assert mailbox.statistics().batches - calls <= 8


async def test_a_claim_that_was_undone_is_no_delivery_of_a_message_that_expires(place):
    """It has the permit of its key still, and gives it up: nothing of it was begun."""
    async with place.mailbox() as mailbox:
        await limit(mailbox, key_concurrency=1, blocks=Blocks.DEAD)
        ids = await send(mailbox, "expires", key="k", expires_in=600)
        await send(mailbox, "next", key="k")
        assert await bodies(mailbox) == ["expires"]
        place.execute(
            "SELECT SCHEMA.unclaim(%s, %s, (SELECT array_agg(lease) FROM SCHEMA.messages WHERE state = 2))",
            place.number(),
            ids,
        )
        assert place.execute("SELECT body FROM SCHEMA.messages WHERE permits = 1") == [(b'"expires"',)]
        place.execute("UPDATE SCHEMA.messages SET expires_at = now() WHERE body = %s", b'"expires"')
        assert await bodies(mailbox) == ["next"]
        assert (await mailbox.counts()).dead == 1


async def test_limits_that_are_as_they_were_write_nothing(place):
    async with place.mailbox() as mailbox:
        limits = TaskLimits(2, Rate(5, 60, 2), 1, Rate(7, 11), Blocks.DEAD)
        await mailbox.backend.change_limits([LimitChange("t", limits, paused=True, concurrency=4)])
        rows = "SELECT xmin::text, task FROM SCHEMA.task_limits"
        before = place.execute(rows)
        await mailbox.backend.change_limits([LimitChange("t", limits), LimitChange("u", TaskLimits())])
        assert place.execute(rows) == before
        await mailbox.backend.change_limits([LimitChange("t", TaskLimits(), paused=False, concurrency=0)])
        assert place.execute(rows) == []


async def test_the_limits_are_read_for_all_messages_of_a_call_at_once(place):
    """Messages of a claim, and messages that go back: at once, to wait for their next attempt, or as they end."""
    reads = "SELECT seq_scan + idx_scan FROM pg_stat_all_tables WHERE schemaname = %s AND relname = 'task_limits'"
    ours = "SELECT count(*) FROM pg_stat_activity WHERE application_name = %s"

    async def all_reads() -> int:
        await until(
            lambda: place.execute(ours, place.schema) == [(0,)]
        )  # connections tell what they read when they end
        return place.execute(reads, place.schema)[0][0]

    async with place.mailbox(application_name=place.schema) as mailbox:
        await limit(mailbox, key_concurrency=1, blocks=Blocks.RETRY)
        for number in range(100):
            await send(mailbox, number, key=f"{number}")
    before = await all_reads()
    async with place.mailbox(application_name=place.schema) as mailbox:
        for how in ("release", "nack", "dead_letter"):
            messages = await mailbox.receive(max_messages=100, visibility_timeout=600)
            assert len(messages) == 100
            async with anyio.create_task_group() as tasks:
                for message in messages:
                    tasks.start_soon(getattr(message, how), *(["failed"] if how == "dead_letter" else []))
    assert 3 < await all_reads() - before < 190


async def test_a_message_without_a_task_is_in_no_index_of_tasks(place):
    indexes = ("messages_by_task", "messages_at_task", "messages_let_in", "messages_permits", "dead_permits")
    sizes = [f"SELECT pg_relation_size('SCHEMA.{index}')" for index in indexes]
    async with place.mailbox() as mailbox:
        before = [place.execute(size) for size in sizes]
        await mailbox.send_many(range(500))
        for message in await mailbox.receive(max_messages=500):
            await (message.acknowledge() if message.body else message.dead_letter("no"))
        assert [place.execute(size) for size in sizes] == before
        await send(mailbox, "x")
        assert place.execute(sizes[0]) > before[0]


async def test_a_key_that_no_index_holds_is_kept_as_its_digest(place):
    async with place.mailbox() as mailbox:
        await limit(mailbox, key_concurrency=1)
        for key in ("k" * 1_000_000, "zero \0", "other"):
            await send(mailbox, 1, 2, key=key)
        assert await bodies(mailbox) == [1, 1, 1]
        page = await mailbox.backend.list_messages(MessageQuery(MessagePlace.PENDING, 10, task="t", key="zero \0"))
        assert len(page.messages) == 1


# ------------------------------------------------------------------------------------------------------------- processes

PROGRAM = """
import anyio, sys
from contextlib import suppress
from mainspring.errors import ReceiptHandleExpiredError
from mainspring.mailbox.postgres.mailbox import PostgresMailbox

async def main():
    lease = float(sys.argv[3])
    async with PostgresMailbox(sys.argv[1], name="jobs", schema=sys.argv[2]) as mailbox:
        async def work():
            while True:
                for message in await mailbox.receive(max_messages=2, visibility_timeout=lease, wait_time_seconds=60):
                    print("began", *message.body, message.first_received_at.timestamp(), flush=True)
                    await anyio.sleep(0.002)
                    with suppress(ReceiptHandleExpiredError):  # where the machine is slow
                        await message.acknowledge()

        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(work)

anyio.run(main)
"""


@contextmanager
def workers(place, count, lease=600):
    """Processes that work on the messages of the mailbox."""
    command = [sys.executable, "-c", PROGRAM, place.url, place.schema, str(lease)]
    made = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(count)]
    try:
        yield made
    finally:
        for process in made:
            process.kill()
            process.wait()
            process.stdout.close()


def said(processes):
    """End them. Return the words of their lines."""
    for process in processes:
        process.kill()
    return [line.split() for process in processes for line in process.stdout.read().decode().splitlines()]


def begun_in_order(lines):
    """The messages of each key, by the server's dates of their first claims."""
    begun = defaultdict(dict)
    for _, key, body, _ in sorted(lines, key=lambda line: float(line[3])):
        begun[key][body] = None  # once, though its lease may have ended where the machine is slow
    return {key: list(messages) for key, messages in begun.items()}


async def watched(place, mailbox, most):
    """Look, until all is done, whether no more is in flight than may be."""
    held = "SELECT count(*) FROM SCHEMA.messages WHERE state = 2"
    with anyio.fail_after(60):
        while (await mailbox.counts()).waiting:
            assert place.execute(held)[0][0] <= most
            assert all(state.running <= most for state in await mailbox.backend.limits())
            await anyio.sleep(0.003)


@pytest.mark.slow
async def test_processes_keep_the_concurrency_of_a_task_and_the_order_of_its_keys(place):
    """None of them runs more than it may, all is done, and the messages of each key in the order of the sends."""
    async with place.mailbox() as mailbox:
        await limit(mailbox, concurrency=3, key_concurrency=1)
        sent = defaultdict(list)
        for number in range(150):
            key = f"k{number % 7}"
            sent[key].append(str(number))
            await send(mailbox, [key, number], key=key)
        with workers(place, 4) as made:
            await watched(place, mailbox, 3)
            lines = said(made)
        await mailbox.receive()
        assert left(place) == (0, 0)
    assert begun_in_order(lines) == sent


@pytest.mark.slow
async def test_workers_that_are_killed_lose_no_message_and_no_permit(place):
    """All is done, and begun in the order of its key: a message whose worker is killed blocks its key until it is done."""
    async with place.mailbox() as mailbox:
        await limit(mailbox, concurrency=3, key_concurrency=1, blocks=Blocks.RETRY)
        sent = defaultdict(list)
        for number in range(60):
            sent[f"k{number % 5}"].append(str(number))
            await send(mailbox, [f"k{number % 5}", number], key=f"k{number % 5}")
        lines = []
        for _ in range(3):
            with workers(place, 1, lease=2) as made:
                await until(lambda: place.execute("SELECT count(*) FROM SCHEMA.messages WHERE state = 2")[0][0])
                lines += said(made)
        with workers(place, 2, lease=2) as made:
            await watched(place, mailbox, 3)
            lines += said(made)
        await mailbox.receive()
        assert left(place) == (0, 0)
        assert await mailbox.counts() == Counts(settled=60)
    assert begun_in_order(lines) == sent


@pytest.mark.slow
async def test_processes_keep_a_rate(place):
    """By the server's dates of the claims, in no time more were claimed than the burst and what the rate allows."""
    interval, burst = 0.02, 3
    async with place.mailbox() as mailbox:
        await limit(mailbox, rate=Rate(50, 1, burst))
        await send(mailbox, *(["x", number] for number in range(60)))
        with workers(place, 3) as made:
            await watched(place, mailbox, 60)
            lines = said(made)
    begun = sorted(float(line[3]) for line in lines)
    assert len(begun) == 60
    for first in range(60):
        for last in range(first + burst, 60):
            assert begun[last] - begun[first] >= (last - first + 1 - burst) * interval - 0.001
