"""What a handler does, and what becomes of its message: in virtual time, end to end through a memory mailbox."""

from __future__ import annotations

import anyio
import pytest
from loop_support import EXACT

from mainspring import (
    Context,
    DeadLetterPolicy,
    Deadline,
    InMemoryMailbox,
    LeasePolicy,
    MainLoop,
    Reject,
    Retry,
    RetryPolicy,
    open_mailbox,
)
from mainspring.events import MessageFinished, MessageNotAcknowledged, MessageStarted
from support import FaultyMailbox, background, record, settled, slow

pytestmark = pytest.mark.anyio


# ----------------------------------------------------------------------------------------------- success and failure


async def test_success_is_acknowledged():
    async def handle(job: int) -> None: ...

    mailbox = FaultyMailbox()
    async with MainLoop(mailbox, handle):
        await mailbox.send(1)
        await settled(mailbox)
        assert (await mailbox.counts()).settled == 1
    assert mailbox.settlements() == ["Ack"]


async def test_each_delivery_starts_and_finishes_with_an_event():
    async def handle(job: int) -> None: ...

    mailbox = InMemoryMailbox()
    loop = MainLoop(mailbox, handle, name="jobs")
    events = record(loop, MessageStarted, MessageFinished)
    async with background(loop):
        message_id = await mailbox.send(1)
        await settled(mailbox)
        await anyio.wait_all_tasks_blocked()
    started, finished = events
    assert (started.loop, started.message_id, started.attempt, started.delivery_count) == ("jobs", message_id, 1, 1)
    assert (finished.message_id, finished.run_id) == (message_id, started.run_id)
    assert (finished.outcome, finished.error) == ("acknowledged", None)
    assert loop.outcomes == {"acknowledged": 1}


async def test_failures_back_off_and_end_after_exactly_so_many_runs(virtual_clock):
    starts = []

    async def handle(job: int, ctx: Context) -> None:
        starts.append((virtual_clock.now, ctx.attempt))
        raise ValueError("no luck")

    mailbox = InMemoryMailbox()
    loop = MainLoop(mailbox, handle, retry=EXACT, dead_letter=DeadLetterPolicy(max_attempts=5))
    async with background(loop):
        await mailbox.send(1)
        await anyio.sleep(1_000)
        assert starts == [(0, 1), (1, 2), (3, 3), (7, 4), (15, 5)]
        (dead,) = await mailbox.dead_letters()
        assert (dead.error, dead.error_type, dead.attempt, dead.delivery_count) == ("no luck", "ValueError", 5, 5)
        assert "raise ValueError" in dead.traceback
        assert loop.outcomes == {"retried": 4, "dead_lettered": 1}


async def test_backoff_is_drawn_at_random_from_half_of_it_on(virtual_clock):
    starts = []

    async def handle(job: int) -> None:
        starts.append(virtual_clock.now)
        raise ValueError

    mailbox = InMemoryMailbox()
    async with background(MainLoop(mailbox, handle, concurrency=200, dead_letter=DeadLetterPolicy(max_attempts=2))):
        await mailbox.send_many([1] * 200)
        await anyio.sleep(10)
    again = starts[200:]
    assert len(again) == 200
    assert 0.5 <= min(again) < 0.55
    assert 0.95 < max(again) <= 1


async def test_success_after_failures():
    tries = []

    async def handle(job: int) -> None:
        tries.append(job)
        if len(tries) < 3:
            raise OSError

    mailbox = InMemoryMailbox()
    async with background(MainLoop(mailbox, handle, retry=RetryPolicy(initial_delay=0))):
        await mailbox.send(1)
        await settled(mailbox)
        assert (await mailbox.counts()).settled == 1
    assert len(tries) == 3


async def test_retry_chooses_its_delay_and_counts(virtual_clock):
    starts = []

    async def handle(job: int, ctx: Context) -> None:
        starts.append((virtual_clock.now, ctx.attempt))
        raise Retry(delay=100)

    mailbox = InMemoryMailbox()
    async with background(MainLoop(mailbox, handle, dead_letter=DeadLetterPolicy(max_attempts=3))):
        await mailbox.send(1)
        await anyio.sleep(1_000)
        assert starts == [(0, 1), (100, 2), (200, 3)]
        (dead,) = await mailbox.dead_letters()
        assert dead.error_type == "Retry"


async def test_an_uncharged_retry_goes_on_for_ever(virtual_clock):
    starts = []

    async def handle(job: int, ctx: Context) -> None:
        starts.append((ctx.message.delivery_count, ctx.attempt))
        raise Retry(delay=10, charge=False)

    mailbox = InMemoryMailbox()
    async with background(MainLoop(mailbox, handle, dead_letter=DeadLetterPolicy(max_attempts=1))):
        await mailbox.send(1)
        await anyio.sleep(95)
        assert starts == [(n, 1) for n in range(1, 11)]
        assert (await mailbox.counts()).delayed == 1


async def test_reject_is_dead_at_once():
    async def handle(job: int) -> None:
        raise Reject("unknown customer")

    mailbox = InMemoryMailbox()
    async with background(MainLoop(mailbox, handle)):
        await mailbox.send(1)
        await settled(mailbox)
        (dead,) = await mailbox.dead_letters()
        assert (dead.error, dead.error_type, dead.body) == ("unknown customer", "Reject", 1)


async def test_a_fault_of_configuration_is_dead_at_once_with_its_text():
    """Raised out of what the handler calls: another attempt would meet it again."""

    async def no_transactions(job: str, ctx: Context) -> None:
        async with ctx.transaction():
            pass

    async def no_requester(job: str, ctx: Context) -> None:
        await ctx.message.reply("done")

    async def bad_delay(job: str, ctx: Context) -> None:
        raise Retry(delay=-5)

    async def bad_url(job: str, ctx: Context) -> None:
        open_mailbox("carrier-pigeon://jobs")

    for handler, kind, text in (
        (no_transactions, "ConfigError", "no transactions"),
        (no_requester, "ReplyNotAvailableError", "its sender set no reply_to"),
        (bad_delay, "InvalidParameterError", "delay must be 0 to"),
        (bad_url, "ConfigError", "carrier-pigeon"),
    ):
        mailbox = InMemoryMailbox()
        async with background(MainLoop(mailbox, handler)):
            await mailbox.send("x")
            await settled(mailbox)
            (dead,) = await mailbox.dead_letters()
        assert (dead.error_type, dead.attempt) == (kind, 1)
        assert text in dead.error


async def test_a_postponement_is_an_outcome_of_its_own_and_no_retry(virtual_clock):
    async def handle(job: str, ctx: Context) -> None:
        if ctx.message.delivery_count > 1:
            return
        if job == "nack":
            await ctx.message.nack(delay=5, charge=False)
        else:
            raise Retry(delay=5, charge=False)

    mailbox = InMemoryMailbox()
    loop = MainLoop(mailbox, handle)
    events = record(loop, MessageNotAcknowledged)
    async with background(loop):
        await mailbox.send_many(["nack", "raise"])
        await anyio.sleep(10)
    assert loop.outcomes == {"postponed": 2, "acknowledged": 2}
    assert [(event.outcome, event.retry_in, event.charged) for event in events] == [("postponed", 5, False)] * 2


async def test_included_and_excluded_errors(virtual_clock):
    errors = {"included": KeyError("k"), "excluded": ConnectionError("down"), "other": ValueError("v")}
    runs = dict.fromkeys(errors, 0)

    async def handle(job: str) -> None:
        runs[job] += 1
        raise errors[job]

    policy = DeadLetterPolicy(max_attempts=2, include=(LookupError,), exclude=(OSError,))
    mailbox = InMemoryMailbox()
    async with background(MainLoop(mailbox, handle, dead_letter=policy, retry=EXACT, concurrency=3)):
        await mailbox.send_many(list(errors))
        await anyio.sleep(3_600)
        dead = {letter.body: letter.attempt for letter in await mailbox.dead_letters()}
        assert dead == {"included": 1, "other": 2}
        assert (runs["included"], runs["other"]) == (1, 2)
        assert runs["excluded"] > 15  # doubling to five minutes for an hour
        assert await mailbox.approximate_count() == 1


async def test_a_reject_inside_a_task_group_of_the_handler_is_a_reject():
    async def child() -> None:
        raise Reject("bad part")

    async def handle(job: int) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(child)
            await anyio.sleep_forever()

    mailbox = InMemoryMailbox()
    async with background(MainLoop(mailbox, handle)):
        await mailbox.send(1)
        await settled(mailbox)
        assert [letter.error for letter in await mailbox.dead_letters()] == ["bad part"]


# ------------------------------------------------------------------------------------- attempts without a handler's run


async def test_attempts_that_lost_leases_used_up_end_the_message_unrun(virtual_clock):
    runs = []

    async def handle(job: int) -> None:
        runs.append(job)

    mailbox = InMemoryMailbox()
    await mailbox.send(1)
    for _ in range(5):  # five workers that die with the message in their hands
        assert len(await mailbox.receive(visibility_timeout=10)) == 1
        await anyio.sleep(10)
    async with background(MainLoop(mailbox, handle)):
        await anyio.sleep(1)
        (dead,) = await mailbox.dead_letters()
        assert dead.error_type == "LeaseExpired"
        assert "5 of its deliveries ended with their worker (max_crashes is 5): their leases ran out" in dead.error
    assert runs == []


@pytest.mark.slow
async def test_an_outage_of_hours_costs_no_message(virtual_clock):
    """With the default policies, messages that fail while a server is away are done once it is back."""
    back, done = 12 * 3_600.0, []

    async def handle(job: int, ctx: Context) -> None:
        if virtual_clock.now < back:
            raise ConnectionError("the server is away")
        done.append((job, ctx.attempt))

    mailbox = InMemoryMailbox()
    async with background(MainLoop(mailbox, handle)):
        await mailbox.send_many([1, 2, 3])
        await anyio.sleep(back + 3 * 3_600)
        assert (await mailbox.counts()).settled == 3
    assert len(done) == 3
    assert all(attempt <= 20 for _, attempt in done)


@pytest.mark.slow
async def test_what_always_fails_is_dead_within_the_horizon(virtual_clock):
    runs = []

    async def handle(job: int) -> None:
        runs.append(virtual_clock.now)
        raise ValueError("never")

    mailbox = InMemoryMailbox()
    async with background(MainLoop(mailbox, handle)):
        await mailbox.send(1)
        await anyio.sleep(30 * 3_600)
        (dead,) = await mailbox.dead_letters()
    least, most = RetryPolicy().horizon(20)
    assert (dead.attempt, len(runs)) == (20, 20)
    assert least <= runs[-1] - runs[0] <= most


async def test_what_kills_its_workers_is_dead_after_five_whatever_else_failed(virtual_clock):
    mailbox, runs = InMemoryMailbox(), []

    async def handle(job: int) -> None:
        runs.append(job)
        raise OSError("no")

    await mailbox.send(1)
    for crashed in range(1, 6):
        async with background(MainLoop(mailbox, handle, retry=RetryPolicy(initial_delay=60, factor=1))):
            await anyio.sleep(1)
        assert len(runs) == crashed
        (message,) = await mailbox.receive(visibility_timeout=10, wait_time_seconds=60)  # a worker that will die
        assert (message.attempt, message.crashes) == (2 * crashed, crashed - 1)
        await anyio.sleep(10)
    async with background(MainLoop(mailbox, handle)):
        await anyio.sleep(1)
        (dead,) = await mailbox.dead_letters()
    assert (dead.error_type, dead.attempt, len(runs)) == ("LeaseExpired", 11, 5)


async def test_attempts_that_were_given_back_end_the_message_unrun_and_are_told_as_that(virtual_clock):
    async def handle(job: int) -> None:
        raise AssertionError

    mailbox = InMemoryMailbox()
    await mailbox.send(1)
    for _ in range(4):
        (message,) = await mailbox.receive()
        await message.nack()
    (message,) = await mailbox.receive()
    await message.nack(error="no more ideas")
    async with background(MainLoop(mailbox, handle, dead_letter=DeadLetterPolicy(max_attempts=5))):
        await anyio.sleep(1)
        (dead,) = await mailbox.dead_letters()
    assert (dead.error_type, dead.error) == (
        "Reject",
        "5 attempts are used up (max_attempts is 5), the last one by: no more ideas",
    )
    told = [(failure.attempt, failure.error_type) for failure in dead.history]
    assert told == [(1, "Nack"), (2, "Nack"), (3, "Nack"), (4, "Nack"), (5, "Reject")]


async def test_four_lost_leases_leave_one_run(virtual_clock):
    runs = []

    async def handle(job: int, ctx: Context) -> None:
        runs.append((ctx.attempt, ctx.message.delivery_count))

    mailbox = InMemoryMailbox()
    await mailbox.send(1)
    for _ in range(4):
        await mailbox.receive(visibility_timeout=10)
        await anyio.sleep(10)
    async with background(MainLoop(mailbox, handle)):
        await anyio.sleep(1)
    assert runs == [(5, 5)]


@pytest.mark.parametrize("kinds", [{}, {"include": ValueError}, {"exclude": ValueError}])
async def test_json_of_the_wrong_shape_is_a_charged_retry(virtual_clock, kinds):
    """Whatever the policy says of the handler's errors: a SerializationError is a ValueError."""
    runs = []

    async def handle(job: int) -> None:
        runs.append(job)

    name = "memory://wrong-shape"
    old = open_mailbox(name, body=str, serialize=True)
    new = open_mailbox(name, serialize=True)
    await old.send("three")
    loop = MainLoop(new, handle, retry=EXACT, dead_letter=DeadLetterPolicy(max_attempts=3, **kinds), handler_timeout=60)
    async with background(loop):
        await anyio.sleep(2.5)
        assert await new.dead_letters() == []
        await anyio.sleep(1)
        (dead,) = await new.dead_letters()
        assert (dead.error_type, dead.attempt, dead.raw) == ("SerializationError", 3, b'"three"')
    assert runs == []


# --------------------------------------------------------------------------------------- handlers that settle themselves


@pytest.mark.parametrize("limit", ["handler_timeout", "deadline"])
async def test_the_time_of_a_handler_ends_with_it(virtual_clock, limit):
    """It does not cut off the settlement, nor the next message in the same slot."""
    ended = []

    async def handle(job: int) -> None:
        await anyio.sleep(job)
        ended.append(job)

    mailbox = FaultyMailbox()
    mailbox.next("settle", slow(5))
    loop = MainLoop(mailbox, handle, handler_timeout=10 if limit == "handler_timeout" else None)
    async with background(loop):
        await mailbox.send(8, deadline=None if limit == "handler_timeout" else Deadline.after(10))
        await mailbox.send(9)
        await settled(mailbox, within=100)
        assert virtual_clock.now == pytest.approx(22, abs=0.1)
        await mailbox.send(7)
        await settled(mailbox, within=100)
    assert ended == [8, 9, 7]
    assert loop.outcomes == {"acknowledged": 3}
    assert mailbox.settlements() == ["Ack"] * 3


async def test_what_a_handler_settles_itself_is_not_overruled(virtual_clock):
    async def handle(job: str, ctx: Context) -> None:
        await getattr(ctx.message, job)(*(["of its own"] if job == "dead_letter" else []))

    mailbox = FaultyMailbox()
    loop = MainLoop(mailbox, handle, concurrency=5)
    async with background(loop):
        await mailbox.send_many(["acknowledge", "dead_letter"])
        await anyio.sleep(1)
        counts = await mailbox.counts()
        assert (counts.settled, counts.dead, counts.waiting) == (1, 1, 0)
    assert sorted(mailbox.settlements()) == ["Ack", "Dead"]


async def test_an_error_after_an_own_settlement_does_not_bring_the_message_back(virtual_clock):
    async def handle(job: int, ctx: Context) -> None:
        await ctx.message.acknowledge()
        raise ValueError("too late")

    mailbox = FaultyMailbox()
    async with background(MainLoop(mailbox, handle)):
        await mailbox.send(1)
        await anyio.sleep(1_000)
        assert (await mailbox.counts()).settled == 1
    assert mailbox.settlements() == ["Ack"]


@pytest.mark.parametrize("renew", ["while-running", "never"])
async def test_a_handler_that_acknowledges_first_may_take_its_time(virtual_clock, renew):
    """At most once, where somebody wants that: there is no lease any more that could be lost."""
    ends = []

    async def handle(job: int, ctx: Context) -> None:
        await ctx.message.acknowledge()
        await anyio.sleep(500)
        ends.append(virtual_clock.now)

    mailbox = FaultyMailbox()
    loop = MainLoop(mailbox, handle, visibility_timeout=30, lease=LeasePolicy(renew=renew))
    events = record(loop)
    async with background(loop):
        await mailbox.send(1)
        await anyio.sleep(600)
    assert ends == [500]
    assert mailbox.times("extend") == []
    assert [type(event).__name__ for event in events] == ["MessageStarted", "MessageFinished"]
