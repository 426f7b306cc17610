"""Renewal: from delivery to settlement, well inside the lease, as the policy says. In virtual time."""

from __future__ import annotations

import anyio
from loop_support import DOWN, sleeper

from mainspring import Context, InMemoryMailbox, LeasePolicy, MainLoop
from mainspring.events import LeaseLost, LeaseRenewalFailed, SettlementFailed
from support import FaultyMailbox, background, lose_answer, record, slow


async def test_a_third_of_the_lease_after_the_claim_and_then_each_third(virtual_clock):
    mailbox = FaultyMailbox()
    await mailbox.send(1)  # claimed at clock 0: a falsy instant is an instant
    loop = MainLoop(mailbox, sleeper(100), visibility_timeout=30)
    async with background(loop):
        await anyio.sleep(200)
    assert mailbox.times("extend") == [10, 20, 30, 40, 50, 60, 70, 80, 90]
    assert loop.outcomes == {"acknowledged": 1}


async def test_no_renewal_after_the_settlement_and_none_when_idle(virtual_clock):
    mailbox = FaultyMailbox()
    async with background(MainLoop(mailbox, sleeper(9), visibility_timeout=30)):
        await mailbox.send(1)
        await anyio.sleep(1_000)
    assert mailbox.times("extend") == []


async def test_the_fraction_is_the_policys(virtual_clock):
    mailbox = FaultyMailbox()
    await mailbox.send(1)
    async with background(MainLoop(mailbox, sleeper(50), visibility_timeout=30, lease=LeasePolicy(fraction=0.8))):
        await anyio.sleep(60)
    assert mailbox.times("extend") == [24, 48]


async def test_each_message_has_its_own_rhythm(virtual_clock):
    mailbox = FaultyMailbox()
    async with background(MainLoop(mailbox, sleeper(25), visibility_timeout=30, concurrency=2)):
        await mailbox.send(1)
        await anyio.sleep(4)
        await mailbox.send(2)
        await anyio.sleep(60)
    assert mailbox.times("extend") == [10, 14, 20, 24]


async def test_nobody_else_gets_the_message_meanwhile(virtual_clock):
    log = []
    mailbox = InMemoryMailbox()
    await mailbox.send(1)
    async with background(MainLoop(mailbox, sleeper(10_000, log), visibility_timeout=30)):
        await anyio.sleep(1)
        assert await mailbox.receive(wait_time_seconds=9_000) == []
        await anyio.sleep(2_000)
    assert log == [(0, 10_000)]


async def test_the_runs_own_visibility_timeout_rules(virtual_clock):
    mailbox = FaultyMailbox()
    await mailbox.send(1)
    async with background(MainLoop(mailbox, sleeper(20), visibility_timeout=300), visibility_timeout=15):
        await anyio.sleep(60)
    assert mailbox.times("extend") == [5, 10, 15]


# ------------------------------------------------------------------------------------------------------------ on-beat


async def test_on_beat_only_a_handler_that_beats_keeps_its_lease(virtual_clock):
    log = []

    async def handle(job: str, ctx: Context) -> None:
        began = anyio.current_time()
        try:
            for _ in range(20):
                await anyio.sleep(5)
                if job == "beats":
                    ctx.beat()
        finally:
            log.append((job, began, anyio.current_time()))

    mailbox = FaultyMailbox()
    await mailbox.send_many(["beats", "silent"])
    loop = MainLoop(mailbox, handle, visibility_timeout=30, concurrency=2, lease=LeasePolicy("on-beat"))
    async with background(loop, max_iterations=1):
        await anyio.sleep(200)
    assert log == [("silent", 0, 30), ("beats", 0, 100)]
    assert loop.outcomes == {"lost": 1, "acknowledged": 1}


async def test_on_beat_that_it_was_started_is_no_beat_of_the_handlers_own(virtual_clock):
    """It starts later than the lease, which counts from the claim: by itself that must renew nothing."""

    async def far(claim):
        claimed = await claim()
        await anyio.sleep(2)
        return claimed

    log = []
    mailbox = FaultyMailbox()
    mailbox.always("claim", far)
    await mailbox.send(1)
    loop = MainLoop(mailbox, sleeper(1_000, log), visibility_timeout=30, lease=LeasePolicy("on-beat"))
    async with background(loop, max_iterations=1):
        await anyio.sleep(100)
    assert mailbox.times("extend") == []
    assert log == [(2, 30)]


async def test_on_beat_a_handler_that_stops_beating_loses_it_one_lease_after_its_last_renewal(virtual_clock):
    log = []

    async def handle(job: int, ctx: Context) -> None:
        await anyio.sleep(8)
        await ctx.progress(1, 2)
        try:
            await anyio.sleep(1_000)
        finally:
            log.append(anyio.current_time())

    mailbox = FaultyMailbox()
    await mailbox.send(1)
    async with background(
        MainLoop(mailbox, handle, visibility_timeout=30, lease=LeasePolicy("on-beat")), max_iterations=1
    ):
        await anyio.sleep(100)
    assert mailbox.times("extend") == [10]
    assert log == [40]


async def test_on_beat_a_late_beat_is_noticed_before_the_lease_ends(virtual_clock):
    async def handle(job: int, ctx: Context) -> None:
        await anyio.sleep(25)
        ctx.beat()
        await anyio.sleep(25)

    mailbox = FaultyMailbox()
    await mailbox.send(1)
    loop = MainLoop(mailbox, handle, visibility_timeout=30, lease=LeasePolicy("on-beat"))
    async with background(loop):
        await anyio.sleep(100)
    assert len(mailbox.times("extend")) == 1
    assert 25 <= mailbox.times("extend")[0] <= 27.5
    assert loop.outcomes == {"acknowledged": 1}


async def test_on_beat_the_settlement_needs_no_beats(virtual_clock):
    """The handler has ended; what takes long now is the store."""

    async def handle(job: int) -> None:
        await anyio.sleep(9)

    mailbox = FaultyMailbox()
    mailbox.next("settle", slow(28))
    await mailbox.send(1)
    loop = MainLoop(mailbox, handle, visibility_timeout=30, lease=LeasePolicy("on-beat"))
    async with background(loop):
        await anyio.sleep(100)
    assert mailbox.times("extend")[0] == 10
    assert loop.outcomes == {"acknowledged": 1}


# -------------------------------------------------------------------------------------------------------------- never


async def test_never_means_one_visibility_timeout(virtual_clock):
    log = []
    mailbox = FaultyMailbox()
    await mailbox.send(1)
    loop = MainLoop(mailbox, sleeper(1_000, log), visibility_timeout=30, lease=LeasePolicy("never"))
    async with background(loop, max_iterations=1):
        await anyio.sleep(100)
    assert mailbox.times("extend") == []
    assert log == [(0, 30)]
    assert loop.outcomes == {"lost": 1}


# ------------------------------------------------------------------------------------------- drain, settlement, the end


async def test_renewal_goes_on_through_the_drain(virtual_clock):
    mailbox = FaultyMailbox()
    await mailbox.send(1)
    loop = MainLoop(mailbox, sleeper(100), visibility_timeout=30)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(loop.run)
        await anyio.sleep(5)
        assert await loop.shutdown(timeout=1_000)
        assert virtual_clock.now == 100
    assert mailbox.times("extend") == [10, 20, 30, 40, 50, 60, 70, 80, 90]
    assert loop.outcomes == {"acknowledged": 1}


async def test_renewal_goes_on_while_a_cancelled_handler_cleans_up(virtual_clock):
    async def handle(job: int) -> None:
        try:
            await anyio.sleep(1_000)
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(4)

    mailbox = FaultyMailbox()
    await mailbox.send(1)
    loop = MainLoop(mailbox, handle, visibility_timeout=1.5)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(loop.run)
        await anyio.sleep(1)
        assert not await loop.shutdown(timeout=1)
    assert max(mailbox.times("extend")) > 5
    assert loop.outcomes == {"released": 1}
    (again,) = await mailbox.receive()
    assert (again.attempt, again.delivery_count) == (1, 2)


async def test_renewal_goes_on_while_the_settlement_is_under_way(virtual_clock):
    mailbox = FaultyMailbox()
    mailbox.next("settle", slow(25))
    await mailbox.send(1)
    loop = MainLoop(mailbox, sleeper(8), visibility_timeout=12)
    events = record(loop, LeaseRenewalFailed, LeaseLost, SettlementFailed)
    async with background(loop):
        await anyio.sleep(100)
        assert (await mailbox.counts()).settled == 1
    assert mailbox.times("extend") == [4, 8, 12, 16, 20, 24, 28, 32]
    assert events == []
    assert loop.outcomes == {"acknowledged": 1}


async def test_a_renewal_whose_answer_was_lost_is_simply_made_again(virtual_clock):
    mailbox = FaultyMailbox()
    mailbox.next("extend", lose_answer(DOWN))
    await mailbox.send(1)
    loop = MainLoop(mailbox, sleeper(50), visibility_timeout=30)
    async with background(loop):
        await anyio.sleep(100)
    assert loop.outcomes == {"acknowledged": 1}
