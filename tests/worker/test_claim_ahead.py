"""A loop whose handlers are quick claims what they will begin within 50 ms, and gives back what they do not."""

from __future__ import annotations

import anyio
import pytest
from loop_support import DOWN, sleeper

from mainspring import Context, InMemoryMailbox, LoopGroup, MainLoop, RetryPolicy
from mainspring.events import MessageNotAcknowledged, MessageStarted, SettlementFailed
from mainspring.mailbox.backend import Capabilities
from support import FaultyMailbox, background, fail, hang, record, settled, shielded, slow, until, work

pytestmark = pytest.mark.anyio


def ordered(mailbox: InMemoryMailbox) -> InMemoryMailbox:
    """That mailbox, which then lets a slot go on while its settlement is under way."""
    mailbox.backend.capabilities = Capabilities(ordered=True, joined_acks=True)
    return mailbox


@pytest.mark.parametrize("concurrency", [1, 3, 10])
@pytest.mark.parametrize("seconds", [0.001, 0.01, 0.04, 1.0])
async def test_what_is_in_hand_are_the_handlers_and_fifty_milliseconds_of_work(concurrency, seconds, virtual_clock):
    mailbox = FaultyMailbox()
    loop = MainLoop(mailbox, sleeper(seconds), concurrency=concurrency)
    async with background(loop):
        await mailbox.send_many(range(2_000))
        await settled(mailbox, within=10_000)
    within = min(200, concurrency * 0.05 / seconds)
    assert concurrency <= mailbox.most_leased <= max(concurrency, within + concurrency)
    if within > 2 * concurrency:
        assert mailbox.most_leased > concurrency
    assert loop.outcomes == {"acknowledged": 2_000}


@pytest.mark.parametrize("concurrency", [100, 300])
async def test_the_store_is_at_one_half_while_the_handlers_are_at_the_other(concurrency, virtual_clock):
    async def slowly(call):
        await anyio.sleep(0.005)
        return await call()

    mailbox = ordered(FaultyMailbox())
    mailbox.always("claim", slowly)
    await mailbox.send_many(range(40 * concurrency))
    began = anyio.current_time()
    async with background(MainLoop(mailbox, sleeper(0.005), concurrency=concurrency)):
        await settled(mailbox)
    assert anyio.current_time() - began < 0.3  # 0.4 if they took turns
    assert mailbox.most_leased <= 2 * concurrency
    assert max(argument[0] for _, call, argument in mailbox.calls if call == "claim") == concurrency


async def test_one_claim_is_for_half_of_what_may_be_in_hand(virtual_clock):
    """Also where all is handled at once."""

    async def slowly(call):
        await anyio.sleep(0.001)
        return await call()

    async def handle(job: int) -> None:
        if job % 2_000 > 1_000:
            await anyio.sleep(0.0001)

    mailbox = ordered(FaultyMailbox())
    mailbox.always("claim", slowly)
    await mailbox.send_many(range(5_000))
    async with background(MainLoop(mailbox, handle)):
        await settled(mailbox)
    assert max(argument[0] for _, call, argument in mailbox.calls if call == "claim") == 100
    assert mailbox.most_leased == 200


@pytest.mark.parametrize("made", [InMemoryMailbox, lambda: ordered(InMemoryMailbox())])
@pytest.mark.parametrize("concurrency", [1, 3])
async def test_no_more_handlers_run_at_once_than_there_may(made, concurrency, virtual_clock):
    running = most = 0

    async def handle(job: int) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if job % 7:
            await anyio.sleep(0.0004 * (job % 5))
        running -= 1

    mailbox = made()
    async with background(MainLoop(mailbox, handle, concurrency=concurrency)):
        await mailbox.send_many(range(1_000))
        await settled(mailbox)
    assert most == concurrency


@pytest.mark.parametrize("wait", [20, 0.99, 0.02])
async def test_it_begins_with_its_slots_alone_and_does_so_again_after_an_idle_time(wait, virtual_clock):
    """Also if an empty receive has just ended."""
    mailbox = FaultyMailbox()
    await mailbox.send_many(range(200))
    async with background(MainLoop(mailbox, sleeper(0.001), wait_time_seconds=wait)):
        await settled(mailbox)
        asked = [(at, argument[0]) for at, call, argument in mailbox.calls if call == "claim"]
        assert {most for at, most in asked if at < 0.045} == {1}
        assert max(most for _, most in asked) > 10
        await anyio.sleep(1)
        await mailbox.send(0)
        await settled(mailbox)
        await anyio.sleep(1)
        mailbox.calls.clear()
        await mailbox.send_many(range(40))
        await settled(mailbox)
        assert {argument[0] for _, call, argument in mailbox.calls if call == "claim"} == {1}


async def test_a_loop_that_runs_out_of_messages_now_and_then_does_not_fall_behind(virtual_clock):
    waited: list[float] = []

    async def handle(sent: float) -> None:
        waited.append(anyio.current_time() - sent)

    async def slowly(call):
        await anyio.sleep(0.001)
        return await call()

    mailbox = FaultyMailbox()
    mailbox.always("claim", slowly)
    async with background(MainLoop(mailbox, handle)):
        for number in range(3_000):
            await mailbox.send(anyio.current_time())
            await anyio.sleep(0.0003 if number % 100 else 0.01)
        await settled(mailbox)
    assert len(waited) == 3_000
    assert max(waited[600:]) < 0.01


@pytest.mark.parametrize("options", [{"capacity": True}, {"max_iterations": 100}])
async def test_nothing_is_claimed_ahead_where_slots_are_shared_or_receives_counted(options, virtual_clock):
    mailbox = FaultyMailbox()
    await mailbox.send_many(range(100))
    loop = MainLoop(mailbox, sleeper(0.001))
    if "capacity" in options:
        await LoopGroup([loop], max_concurrency=5, guardian=False).run(install_signals=False, until_empty=True)
    else:
        await loop.run(**options)
    assert mailbox.most_leased == 1
    assert loop.outcomes == {"acknowledged": 100}


@pytest.mark.parametrize("made", [InMemoryMailbox, lambda: ordered(InMemoryMailbox())])
async def test_what_is_done_is_acknowledged_while_the_next_handler_waits(made, virtual_clock):
    async def handle(job: int) -> None:
        if job == 110:
            await anyio.sleep_forever()
        if job < 80:
            await anyio.sleep(0.001)

    mailbox = made()
    async with background(MainLoop(mailbox, handle)) as loop:
        await mailbox.send_many(range(111))
        await anyio.sleep(1)
        assert loop.outcomes == {"acknowledged": 110}
        assert (await mailbox.counts()).in_flight == 1


async def become_slow(job: int) -> None:
    """Handle the first eighty messages in a millisecond each, and no other ever."""
    await anyio.sleep(0.001 if job < 80 else 1_000)


async def test_a_loop_that_becomes_slow_gives_back_what_it_has_claimed_ahead(virtual_clock):
    mailbox = FaultyMailbox()
    await mailbox.send_many(range(100))
    async with background(MainLoop(mailbox, become_slow)) as loop:
        while loop.outcomes.get("acknowledged") != 80:
            await anyio.sleep(0.001)
        assert (await mailbox.counts()).in_flight > 1
        await anyio.sleep(0.11)
        assert (await mailbox.counts()).in_flight == loop.in_flight == 1
        again = await mailbox.receive(max_messages=100)
        assert [message.body for message in again] == list(range(81, 100))
        assert {message.attempt for message in again} == {1}
        assert {message.delivery_count for message in again} == {2}
        loop.shutdown_timeout = 0
        for message in again:
            await message.acknowledge()


async def test_it_gives_them_back_when_a_store_that_hangs_answers_again(virtual_clock):
    mailbox = FaultyMailbox()
    await mailbox.send_many(range(100))
    async with background(MainLoop(mailbox, become_slow)) as loop:
        failed = record(loop, SettlementFailed)
        while loop.outcomes.get("acknowledged") != 80:
            await anyio.sleep(0.001)
        mailbox.always("settle", slow(20))
        await anyio.sleep(10)
        assert loop.in_flight > 1
        await anyio.sleep(11)
        assert loop.in_flight == 1
        again = await mailbox.receive(max_messages=100)
        assert [message.body for message in again] == list(range(81, 100))
        assert {message.attempt for message in again} == {1}
        assert failed == []
        mailbox.always("settle", work)


@pytest.mark.parametrize(("takes", "released"), [(1, 20), (60, 0)])
async def test_the_end_of_the_loop_waits_for_a_release_that_is_under_way(takes, released, virtual_clock):
    mailbox = FaultyMailbox()
    await mailbox.send_many(range(100))
    loop = MainLoop(mailbox, become_slow)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(loop.run)
        while loop.outcomes.get("acknowledged") != 80:
            await anyio.sleep(0.001)
        mailbox.always("settle", slow(takes))
        await anyio.sleep(0.2)
        ended = anyio.current_time()
        tasks.cancel_scope.cancel()
    assert anyio.current_time() - ended <= 10
    left = await mailbox.receive(max_messages=100)
    assert len(left) == released
    assert {message.attempt for message in left} <= {1}


@pytest.mark.parametrize("concurrency", [1, 3])
async def test_a_message_whose_worker_has_died_puts_none_at_risk_that_has_not_begun(concurrency, virtual_clock):
    mailbox = InMemoryMailbox()
    await mailbox.send_many(range(20))
    await mailbox.receive(max_messages=20, visibility_timeout=0.15)  # by a worker that dies
    await mailbox.send_many(range(20, 500))
    beside: dict[bool, int] = {False: 0, True: 0}

    async def handle(job: int, ctx: Context) -> None:
        await anyio.sleep(0.001)
        crashed = ctx.attempt > 1
        beside[crashed] = max(beside[crashed], loop.in_flight)
        await anyio.sleep(0.001)

    loop = MainLoop(mailbox, handle, concurrency=concurrency)
    async with background(loop):
        await anyio.sleep(0.16)
        await mailbox.send_many(range(500, 700))
        await settled(mailbox)
    assert beside[True] <= concurrency < beside[False]
    assert loop.outcomes["acknowledged"] == 700
    assert anyio.current_time() < 0.15 + 700 * 0.002 / concurrency + 0.1  # no slot has waited meanwhile


async def test_messages_that_failed_before_are_claimed_ahead_as_any_others(virtual_clock):
    most = 0

    async def handle(job: int, ctx: Context) -> None:
        nonlocal most
        if ctx.attempt == 1:
            raise ValueError(job)
        most = max(most, loop.in_flight)
        await anyio.sleep(0.001)

    mailbox = InMemoryMailbox()
    await mailbox.send_many(range(300))
    loop = MainLoop(mailbox, handle, retry=RetryPolicy(initial_delay=1, jitter="none"))
    async with background(loop):
        await settled(mailbox)
    assert loop.outcomes == {"retried": 300, "acknowledged": 300}
    assert most > 10


async def test_while_a_message_runs_whose_worker_has_died_none_is_claimed_ahead(virtual_clock):
    mailbox = InMemoryMailbox()
    await mailbox.send("suspect")
    await mailbox.receive(visibility_timeout=0.1)  # by a worker that dies
    most: dict[bool, int] = {False: 0, True: 0}
    suspected = True

    async def handle(job: str) -> None:
        nonlocal suspected
        if job == "suspect":
            await anyio.sleep(1)
            suspected = False
        await anyio.sleep(0.001)
        most[suspected] = max(most[suspected], loop.in_flight)

    loop = MainLoop(mailbox, handle, concurrency=3)
    await anyio.sleep(0.2)
    async with background(loop):
        await mailbox.send_many(["other"] * 3_000)
        await settled(mailbox)
    assert most[True] <= 3 < most[False]
    assert loop.outcomes == {"acknowledged": 3_001}  # none was claimed only to be released


@pytest.mark.parametrize("made", [InMemoryMailbox, lambda: ordered(InMemoryMailbox())])
@pytest.mark.parametrize("concurrency", [1, 3])
async def test_messages_begin_in_their_order(made, concurrency, virtual_clock):
    began: list[int] = []

    async def handle(job: int) -> None:
        began.append(job)
        if job % 7:
            await anyio.sleep(0.0004 * (job % 5))

    mailbox = made()
    async with background(MainLoop(mailbox, handle, concurrency=concurrency)):
        await mailbox.send_many(range(1_000))
        await settled(mailbox)
    assert began == list(range(1_000))


async def test_the_youngest_is_released_first_for_stores_that_put_each_before_all_that_wait(virtual_clock):
    mailbox = InMemoryMailbox()
    sent = await mailbox.send_many(range(100))
    async with background(MainLoop(mailbox, become_slow)) as loop:
        ended = record(loop, MessageNotAcknowledged)
        await anyio.sleep(0.3)
        assert [event.message_id for event in ended] == sent[:80:-1]
        assert {(event.began, event.seconds) for event in ended} == {(False, 0.0)}
        loop.shutdown_timeout = 0


@pytest.mark.parametrize("then_waits", [True, False])
async def test_a_lease_that_ended_while_the_process_stood_still_lets_nothing_begin(then_waits, virtual_clock):
    mailbox = InMemoryMailbox()
    await mailbox.send_many(range(100))
    clock = virtual_clock
    began: list[tuple[int, int]] = []

    async def handle(job: int, ctx: Context) -> None:
        began.append((job, ctx.attempt))
        if began == [(each, 1) for each in range(81)]:
            clock.advance(1.5)  # longer than the lease
            if not then_waits:
                return  # so that the next message could begin before any other task looks at the leases
        await anyio.sleep(0.001)

    async with background(MainLoop(mailbox, handle, visibility_timeout=1)) as loop:
        await settled(mailbox)
    assert loop.outcomes["lost"] > 10
    assert began == [*((job, 1) for job in range(81)), *((job, 2) for job in range(80, 100))]


async def test_an_idle_worker_has_them_at_once(virtual_clock):
    mailbox = InMemoryMailbox()
    await mailbox.send_many(range(100))
    slow, idle = MainLoop(mailbox, become_slow, name="slow"), MainLoop(mailbox, become_slow, name="idle")
    async with background(slow):
        while slow.outcomes.get("acknowledged") != 80:
            await anyio.sleep(0.0005)
        began = record(idle, MessageStarted)
        async with background(idle):
            await anyio.sleep(0.15)
            assert len(began) == 1


async def test_an_urgent_message_overtakes_what_is_claimed_ahead_by_its_fifty_milliseconds_at_most(virtual_clock):
    began: dict[int, float] = {}

    async def handle(job: int) -> None:
        began[job] = anyio.current_time()
        await anyio.sleep(0.001)

    mailbox = InMemoryMailbox()
    await mailbox.send_many(range(1_000))
    async with background(MainLoop(mailbox, handle)):
        await anyio.sleep(0.3)
        await mailbox.send(5_000, priority=9)
        sent = anyio.current_time()
        await anyio.sleep(0.2)
    assert began[5_000] - sent <= 0.1


@pytest.mark.parametrize("end", ["shutdown", "pause"])
@pytest.mark.parametrize("made", [InMemoryMailbox, lambda: ordered(InMemoryMailbox())])
async def test_a_handler_that_stops_its_loop_is_the_last_that_begins(made, end, virtual_clock):
    ran: list[int] = []

    async def handle(job: int) -> None:
        ran.append(job)
        if job < 80:
            await anyio.sleep(0.001)  # and those after it do not wait
        elif job == 85:
            loop.request_shutdown() if end == "shutdown" else loop.pause()

    mailbox = made()
    await mailbox.send_many(range(200))
    loop = MainLoop(mailbox, handle)
    async with background(loop):
        await anyio.sleep(1)
        assert ran == list(range(86))
        left = await mailbox.receive(max_messages=1_000)
        assert [message.body for message in left] == list(range(86, 200))
        assert {message.attempt for message in left} == {1}


@pytest.mark.parametrize("end", ["shutdown", "pause", "cancel"])
async def test_what_has_not_begun_goes_back_uncharged_when_intake_stops(end, virtual_clock):
    mailbox = InMemoryMailbox()
    await mailbox.send_many(range(200))
    loop = MainLoop(mailbox, sleeper(0.001), retry=RetryPolicy(jitter="none"))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(loop.run)
        while loop.in_flight < 10:
            await anyio.sleep(0.0007)
        if end == "shutdown":
            loop.request_shutdown()
        elif end == "pause":
            loop.pause()
        else:
            tasks.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                await anyio.sleep(0.01)
        await anyio.sleep(0.01)
        assert loop.in_flight == 0
        tasks.cancel_scope.cancel()
    left = await mailbox.receive(max_messages=1_000)
    done = loop.outcomes["acknowledged"]
    assert [message.body for message in left] == list(range(done, 200))
    assert {message.attempt for message in left} == {1}


async def test_where_each_handler_stands_still_the_others_get_the_time_again(virtual_clock):
    mailbox = FaultyMailbox()
    await mailbox.send_many(range(100))
    clock = virtual_clock

    async def handle(job: int) -> None:
        if job == 80:
            clock.advance(0.5)  # it does not let any other task run
        else:
            await anyio.sleep(0.001)

    async with background(MainLoop(mailbox, handle)) as loop:
        await settled(mailbox)
    assert loop.outcomes == {"acknowledged": 100}
    assert set(mailbox.settlements()) == {"Ack"}


def away(mailbox: FaultyMailbox, action, *, back_at: float) -> None:
    """Have every call do ``action`` until that instant."""
    for call in ("claim", "settle", "join", "extend"):
        mailbox.always(call, until(back_at, action))


def down():
    return fail(DOWN)


def silent():
    """The store answers after second 20.3 what it was asked before, in the order in which it was asked."""
    turn = anyio.Lock()

    async def answer(call) -> None:
        async with turn:
            await anyio.sleep(max(0.0, 20.3 - anyio.current_time()))
        return await call()

    return answer


@pytest.mark.parametrize("end", ["", "shutdown", "pause"])
@pytest.mark.parametrize("is_ordered", [False, True])
@pytest.mark.parametrize("outage", [down, silent])
async def test_an_outage_charges_nothing_of_what_has_not_begun(end, is_ordered, outage, virtual_clock):
    ran: list[tuple[int, int]] = []

    async def handle(job: int, ctx: Context) -> None:
        ran.append((job, ctx.attempt))
        await anyio.sleep(0.002)

    mailbox = ordered(FaultyMailbox(joins=True)) if is_ordered else FaultyMailbox()
    await mailbox.send_many(range(400))
    async with background(MainLoop(mailbox, handle)) as loop:
        await anyio.sleep(0.3)
        assert loop.in_flight > 10
        away(mailbox, outage(), back_at=20.3)
        await anyio.sleep(0.2)
        if end == "shutdown":
            loop.request_shutdown()
        elif end == "pause":
            loop.pause()
        await anyio.sleep(60)
        assert loop.in_flight == 0
    left = await mailbox.receive(max_messages=1_000)
    assert {attempt for _, attempt in ran} | {message.attempt for message in left} == {1}
    jobs = [job for job, _ in ran] + [message.body for message in left]
    if is_ordered and outage is down:  # releases that failed are tried again each at its own time
        jobs.sort()
    assert jobs == list(range(400))
    assert bool(left) is bool(end)


async def test_after_failed_receives_it_begins_with_its_slots_alone(virtual_clock):
    mailbox = FaultyMailbox()
    await mailbox.send_many(range(400))
    async with background(MainLoop(mailbox, sleeper(0.001))):
        await anyio.sleep(0.3)
        mailbox.always("claim", until(20.3, fail(DOWN)))
        await settled(mailbox, within=100)
    back = next(argument for at, call, argument in mailbox.calls if call == "claim" and at >= 20.3)
    assert back[0] == 1


async def test_a_release_that_hangs_is_given_up_and_the_message_comes_again(virtual_clock):
    mailbox = FaultyMailbox()
    await mailbox.send_many(range(100))
    async with background(MainLoop(mailbox, become_slow)) as loop:
        while loop.in_flight < 10 or loop.outcomes["acknowledged"] < 80:
            await anyio.sleep(0.001)
        mailbox.always("settle", hang)
        await anyio.sleep(35)
        assert loop.in_flight == 1
        mailbox.always("settle", work)
        await anyio.sleep(60)
        assert loop.outcomes["lost"] == 100 - 81
        loop.shutdown_timeout = 0


async def test_waiting_in_the_backlog_takes_no_time_of_the_handler(virtual_clock):
    async def handle(job: int) -> None:
        await anyio.sleep(0.001 if job < 80 else 0.06)

    mailbox = InMemoryMailbox()
    await mailbox.send_many(range(100))
    async with background(MainLoop(mailbox, handle, handler_timeout=0.07)) as loop:
        await settled(mailbox, within=100)
    assert set(loop.outcomes) == {"acknowledged", "released"}
    assert loop.outcomes["acknowledged"] == 100


@pytest.mark.parametrize(
    ("end", "takes"),
    [
        pytest.param("cancelled", 0.03, id="cancelled, in the backlog"),
        pytest.param("cancelled", 0.2, id="cancelled, then released"),
        pytest.param("expired", 0.2, id="expired, as it is released"),
    ],
)
async def test_a_message_that_ends_while_it_is_claimed_ahead_does_not_begin(end, takes, virtual_clock):
    ran: list[int] = []

    async def handle(job: int) -> None:
        ran.append(job)
        await anyio.sleep(0.001 if job < 80 else takes)

    mailbox = InMemoryMailbox()
    await mailbox.send_many(range(81))
    ends = await mailbox.send(81, expires_in=0.15 if end == "expired" else None)
    await mailbox.send_many(range(82, 90))
    async with background(MainLoop(mailbox, handle)) as loop:
        while 80 not in ran:
            await anyio.sleep(0.001)
        assert loop.in_flight > 3
        if end == "cancelled":
            assert await mailbox.cancel(ends)
        await settled(mailbox, within=100)
    assert 81 not in ran
    assert sorted(ran) == [*range(81), *range(82, 90)]


async def test_handlers_that_block_the_event_loop_keep_what_has_not_begun_for_a_second_at_most(virtual_clock):
    mailbox = InMemoryMailbox()
    await mailbox.send_many(range(100))
    clock = virtual_clock

    async def handle(job: int) -> None:
        if job < 80:
            await anyio.sleep(0.001)
        else:
            clock.advance(0.3)  # no other task runs meanwhile
            await anyio.lowlevel.checkpoint()

    async with background(MainLoop(mailbox, handle)) as loop:
        released = record(loop, MessageNotAcknowledged)
        await settled(mailbox)
    assert len(released) > 10
    assert {event.began for event in released} == {False}


async def test_what_has_not_begun_goes_back_also_after_a_pause_that_was_over_before_a_claim(virtual_clock):
    mailbox = FaultyMailbox()
    await mailbox.send_many(range(98))
    async with background(MainLoop(mailbox, become_slow)) as loop:
        while loop.outcomes.get("acknowledged", 0) < 70:
            await anyio.sleep(0.001)
        mailbox.always("claim", shielded(slow(3)))
        while loop.outcomes["acknowledged"] < 80:
            await anyio.sleep(0.001)
        assert loop.in_flight > 10
        loop.pause()
        await anyio.sleep(1)
        loop.resume()
        await anyio.sleep(5)
        assert loop.in_flight == 1
        loop.shutdown_timeout = 0
