"""Renewals that fail, and leases that are lost: the handler is cancelled, and two never run one message. In virtual time."""

from __future__ import annotations

import anyio
import pytest
from loop_support import DOWN, sleeper

from mainspring import Context, InMemoryMailbox, LeasePolicy, MainLoop, ReceiptHandleExpiredError
from mainspring.events import (
    LeaseLost,
    LeaseRenewalFailed,
    LeaseRenewalRecovered,
    MessageFinished,
    MessageNotAcknowledged,
)
from support import FaultyMailbox, background, fail, hang, record, slow, work

# ------------------------------------------------------------------------------------------------- failing renewals


async def test_a_failed_renewal_is_tried_again_soon_and_the_handler_goes_on(virtual_clock):
    mailbox = FaultyMailbox()
    mailbox.next("extend", fail(DOWN), fail(DOWN), fail(OSError("reset")))
    await mailbox.send(1)
    loop = MainLoop(mailbox, sleeper(40), visibility_timeout=30)
    events = record(loop, LeaseRenewalFailed, LeaseLost)
    async with background(loop):
        await anyio.sleep(60)
    tries = mailbox.times("extend")
    assert tries[0] == 10
    assert 10 <= tries[1] <= tries[2] <= tries[3] < 20  # well inside what was left
    assert [event.trusted_for for event in events] == pytest.approx([30 - at for at in tries[:3]])
    assert events[2].error == "OSError: reset"
    assert loop.outcomes == {"acknowledged": 1}


async def test_a_store_that_is_away_for_long_is_said_once_when_it_goes_and_once_when_it_is_back(virtual_clock):
    """Three messages whose renewals all fail for a while; two outages."""
    mailbox = FaultyMailbox()
    await mailbox.send_many([1, 2, 3])
    loop = MainLoop(mailbox, sleeper(400), visibility_timeout=90, concurrency=4)
    events = record(loop, LeaseRenewalFailed, LeaseRenewalRecovered, LeaseLost)
    for _ in range(2):
        async with background(loop):
            await anyio.sleep(35)
            mailbox.next("extend", *[fail(DOWN)] * 12)
            await anyio.sleep(200)
        news = [event for event in events if not isinstance(event, LeaseRenewalFailed) or event.first]
        assert [type(event) for event in news] == [LeaseRenewalFailed, LeaseRenewalRecovered]
        assert news[1].failures >= 10
        events.clear()


async def test_one_message_whose_renewals_fail_is_said_once_among_others_that_are_renewed(virtual_clock):
    mailbox = FaultyMailbox()
    extend, theirs = mailbox.extend, []

    async def extend_all_but_the_first(delivery, timeout):
        theirs.append(delivery)
        if delivery is theirs[0]:
            raise DOWN
        return await extend(delivery, timeout)

    mailbox.extend = extend_all_but_the_first
    await mailbox.send_many([1, 2])
    loop = MainLoop(mailbox, sleeper(200), visibility_timeout=30, concurrency=3)
    events = record(loop, LeaseRenewalFailed, LeaseRenewalRecovered, LeaseLost)
    async with background(loop):
        await anyio.sleep(25)
        await mailbox.send(3)
        await anyio.sleep(60)
    news = [type(event) for event in events if not isinstance(event, LeaseRenewalFailed) or event.first]
    assert news == [LeaseRenewalFailed, LeaseLost, LeaseRenewalRecovered]
    assert len(events) > 5


async def test_whatever_a_driver_raises_does_not_end_the_loop(virtual_clock):
    mailbox = FaultyMailbox()
    mailbox.next("extend", fail(RuntimeError("a bug of the driver")))
    await mailbox.send(1)
    loop = MainLoop(mailbox, sleeper(40), visibility_timeout=30)
    async with background(loop):
        await anyio.sleep(60)
    assert loop.outcomes == {"acknowledged": 1}


async def test_trust_counts_from_when_the_renewal_began(virtual_clock):
    """A renewal asked for at 10 and answered at 19 lasts until 40 by our count: the store's may have begun at 10."""
    log = []
    mailbox = FaultyMailbox()
    mailbox.next("extend", slow(9))
    mailbox.always("extend", fail(DOWN))
    await mailbox.send(1)
    loop = MainLoop(mailbox, sleeper(1_000, log), visibility_timeout=30)
    lost = record(loop, LeaseLost)
    async with background(loop):
        await anyio.sleep(45)
        assert log == [(0, pytest.approx(40))]
        assert len(lost) == 1
    assert loop.outcomes["lost"] == 1


async def test_a_renewal_that_hangs_is_given_up_in_time_for_another_try(virtual_clock):
    mailbox = FaultyMailbox()
    mailbox.next("extend", hang)
    await mailbox.send(1)
    loop = MainLoop(mailbox, sleeper(100), visibility_timeout=30)
    async with background(loop):
        await anyio.sleep(200)
    assert mailbox.times("extend")[0] == 10
    assert 20 <= mailbox.times("extend")[1] < 30
    assert loop.outcomes == {"acknowledged": 1}


async def test_a_slow_renewal_holds_up_no_other(virtual_clock):
    mailbox = FaultyMailbox()
    mailbox.next("extend", slow(9), slow(9))
    await mailbox.send_many([1, 2, 3])
    async with background(MainLoop(mailbox, sleeper(15), visibility_timeout=30, concurrency=3)):
        await anyio.sleep(60)
    assert mailbox.times("extend") == [10, 10, 10]


async def test_a_renewal_never_shortens_a_lease(virtual_clock):
    """The handler asked for ten minutes; the engine's renewals of 30 s come and go."""
    expired = []

    async def handle(job: int, ctx: Context) -> None:
        await ctx.message.extend_visibility(600)
        await anyio.sleep(35)
        mailbox.always("extend", fail(DOWN))
        await anyio.sleep(1_000)

    mailbox = FaultyMailbox()
    await mailbox.send(1)
    async with background(MainLoop(mailbox, handle, visibility_timeout=30)):
        await anyio.sleep(100)
        expired += await mailbox.receive()  # nobody gets it before the ten minutes are over
        await anyio.sleep(495)
        expired += await mailbox.receive()
        assert expired == []
        mailbox.always("extend", fail(DOWN))
        await anyio.sleep(10)


async def test_a_beat_never_shortens_a_lease(virtual_clock):
    """Neither the beat itself nor the renewals that it brings about, of 30 s each, cut the ten minutes short."""
    expired = []

    async def handle(job: int, ctx: Context) -> None:
        await ctx.message.extend_visibility(600)
        for _ in range(4):
            await anyio.sleep(10)
            ctx.beat()
        mailbox.always("extend", fail(DOWN))
        await anyio.sleep(1_000)

    mailbox = FaultyMailbox()
    await mailbox.send(1)
    loop = MainLoop(mailbox, handle, visibility_timeout=30, lease=LeasePolicy("on-beat"))
    async with background(loop, max_iterations=1):
        for _ in range(5):
            await anyio.sleep(118)
            expired += await mailbox.receive()  # nobody gets it before the ten minutes are over
        assert expired == []
        assert len(mailbox.times("extend")) > 3
        await anyio.sleep(15)
        assert [message.id for message in await mailbox.receive()] != []


# ----------------------------------------------------------------------------------------------------- lost leases


async def test_a_handler_whose_lease_is_surely_lost_is_cancelled_and_nothing_is_written(virtual_clock):
    log = []
    mailbox = FaultyMailbox()
    mailbox.always("extend", fail(DOWN))
    await mailbox.send(1, reply_to=FaultyMailbox())
    loop = MainLoop(mailbox, sleeper(1_000, log), visibility_timeout=30)
    events = record(loop, LeaseLost, MessageFinished, MessageNotAcknowledged)
    async with background(loop):
        await anyio.sleep(29.9)
        assert log == []
        await anyio.sleep(0.2)
        assert log == [(0, 30)]
        assert mailbox.settlements() == []
        assert [type(event) for event in events[:2]] == [LeaseLost, MessageNotAcknowledged]
        assert events[1].outcome == "lost"


@pytest.mark.parametrize(("late", "begins"), [(29.5, True), (30, False), (30.5, False)])
async def test_a_handler_does_not_begin_once_its_lease_is_over(virtual_clock, late, begins):
    """Not at the very instant either: then the message may be another worker's."""
    begun = []

    async def answer_late(hook):
        claimed = await hook()
        await anyio.sleep(late)
        return claimed

    async def handle(job: int) -> None:
        begun.append(anyio.current_time())

    mailbox = FaultyMailbox()
    mailbox.next("claim", answer_late)
    await mailbox.send(1)
    loop = MainLoop(mailbox, handle, visibility_timeout=30)
    async with background(loop, max_iterations=1):
        await anyio.sleep(60)
    assert begun == [late] * begins
    assert loop.outcomes == ({"acknowledged": 1} if begins else {"lost": 1})


async def test_a_handler_whose_own_settlement_hangs_is_cancelled_when_its_lease_is_surely_lost(virtual_clock):
    log = []

    async def handle(job: int, ctx: Context) -> None:
        try:
            await anyio.sleep(5)
            await ctx.message.acknowledge()
        finally:
            log.append(anyio.current_time())

    mailbox = FaultyMailbox()
    mailbox.always("settle", hang)
    mailbox.next("extend", work)
    mailbox.always("extend", fail(DOWN))
    await mailbox.send(1)
    loop = MainLoop(mailbox, handle, visibility_timeout=30)
    async with background(loop, max_iterations=1):
        await anyio.sleep(100)
    assert log == [40]  # the lease was still renewed at 10
    assert loop.outcomes == {"lost": 1}


async def test_a_renewal_that_its_own_settlement_forestalls_is_no_lost_lease(virtual_clock):
    log = []

    async def answer_late(hook):
        await hook()
        await anyio.sleep(1)

    async def handle(job: int, ctx: Context) -> None:
        await anyio.sleep(9.5)
        await ctx.message.acknowledge()
        log.append(anyio.current_time())
        await anyio.sleep(50)
        log.append(anyio.current_time())

    mailbox = FaultyMailbox()
    mailbox.next("settle", answer_late)
    await mailbox.send(1)
    async with background(MainLoop(mailbox, handle, visibility_timeout=30)) as loop:
        await anyio.sleep(100)
    assert log == [10.5, 60.5]
    assert loop.outcomes == {"acknowledged": 1}


async def test_a_renewal_that_the_store_refuses_cancels_the_handler_at_once(virtual_clock):
    log = []
    mailbox = FaultyMailbox()
    await mailbox.send(1)
    loop = MainLoop(mailbox, sleeper(1_000, log), visibility_timeout=30)
    async with background(loop):
        await anyio.sleep(1)
        await mailbox.purge()  # its lease is void: the store says so at the first renewal
        await anyio.sleep(20)
    assert log == [(0, 10)]
    assert loop.outcomes == {"lost": 1}
    assert mailbox.settlements() == []


@pytest.mark.parametrize("ending", ["return", "raise", "own reply", "own nack"])
async def test_no_reply_leaves_and_nothing_is_settled_after_the_lease_is_lost(virtual_clock, ending):
    """A handler that does not mind its cancellation and comes to an end anyhow; its message is another worker's now."""
    refused = []

    async def handle(job: int, ctx: Context) -> int:
        try:
            await anyio.sleep(1_000)
        except anyio.get_cancelled_exc_class():
            with anyio.CancelScope(shield=True):
                await anyio.sleep(5)
                try:
                    if ending == "own reply":
                        await ctx.message.reply(7)
                    elif ending == "own nack":
                        await ctx.message.nack()
                except ReceiptHandleExpiredError as error:
                    refused.append(error)
            if ending == "raise":
                raise ValueError("after all") from None
        return 7

    mailbox, replies = FaultyMailbox(), InMemoryMailbox()
    mailbox.next("extend", *[fail(DOWN)] * 200)
    await mailbox.send(1, reply_to=replies)
    loop = MainLoop(mailbox, handle, visibility_timeout=30)
    async with background(loop, max_iterations=1):
        await anyio.sleep(100)
    assert loop.outcomes == {"lost": 1}
    assert len(refused) == ending.startswith("own")
    assert len(mailbox.settlements()) == len(refused)  # the engine did not even try
    assert await replies.approximate_count() == 0
    counts = await mailbox.counts()
    assert (counts.pending, counts.settled, counts.dead) == (1, 0, 0)
    (again,) = await mailbox.receive()
    assert (again.delivery_count, again.attempt) == (2, 2)  # a lost lease is charged


async def test_two_workers_never_run_one_message_at_once(virtual_clock):
    running, overlaps = set(), []

    def handler(name):
        async def handle(job: int) -> None:
            if job in running:
                overlaps.append((name, job))
            running.add(job)
            try:
                await anyio.sleep(200)
            finally:
                running.discard(job)

        return handle

    async with anyio.create_task_group() as tasks:
        cut_off, well = FaultyMailbox.named("shared-leases"), FaultyMailbox.named("shared-leases")
        cut_off.always("extend", fail(DOWN))
        await well.send_many(range(20))
        loops = [
            MainLoop(box, handler(name), name=name, concurrency=5, visibility_timeout=30)
            for name, box in (("cut off", cut_off), ("well", well))
        ]
        for loop in loops:
            tasks.start_soon(loop.run)
        await anyio.sleep(2_000)
        for loop in loops:
            await loop.shutdown()
    assert overlaps == []
    assert loops[0].outcomes["lost"] > 0
    assert loops[1].outcomes["acknowledged"] > 0
