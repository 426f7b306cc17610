"""A store that misbehaves under a worker: receives and settlements that fail, hang or lose their answers."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import anyio
import pytest
from loop_support import DOWN, sleeper, sleeping

from mainspring import Context, DeadLetterPolicy, InMemoryMailbox, LeasePolicy, MainLoop
from mainspring.errors import MailboxError, describe
from mainspring.events import (
    MessageFinished,
    MessageNotAcknowledged,
    ReceiveFailed,
    ReceiveRecovered,
    SettlementDelayed,
    SettlementFailed,
    SettlementRecovered,
)
from mainspring.mailbox.backend import Capabilities
from mainspring.mailbox.memory.mailbox import MemoryBackend
from support import FaultyMailbox, background, fail, hang, lose_answer, record, settled, slow, until, work

pytestmark = pytest.mark.anyio


async def quick(job: int) -> None: ...


# ------------------------------------------------------------------------------------------------------ what is leased


async def test_a_free_slot_takes_the_next_message_without_waiting_for_the_others(virtual_clock):
    ends = []

    async def handle(job: float) -> None:
        await anyio.sleep(job)
        ends.append((job, anyio.current_time()))

    mailbox = InMemoryMailbox()
    async with background(MainLoop(mailbox, handle, concurrency=2)):
        await mailbox.send_many([100, 1, 1, 1])
        await anyio.sleep(200)
    assert ends == [(1, 1), (1, 2), (1, 3), (100, 100)]


async def test_nothing_is_leased_while_a_settlement_keeps_the_only_slot(virtual_clock):
    mailbox = FaultyMailbox()
    mailbox.next("settle", hang)
    async with background(MainLoop(mailbox, quick, wait_time_seconds=600)):
        await mailbox.send(1)
        await anyio.sleep(5)
        await mailbox.send(2)
        await anyio.sleep(5)
        counts = await mailbox.counts()
        assert (counts.in_flight, counts.pending) == (1, 1)


async def test_what_an_ordered_store_claims_behind_a_settlement_is_run_though_that_hangs(virtual_clock):
    """There a claim need not wait for the settlement before it; but nothing may be leased that nobody runs."""
    running, starts = 0, []

    async def handle(job: int) -> None:
        nonlocal running
        running += 1
        starts.append((job, anyio.current_time()))
        assert running == 1
        await anyio.sleep(1)
        running -= 1

    class Ordered(FaultyMailbox):
        capabilities = Capabilities(ordered=True)

    mailbox = Ordered()
    mailbox.next("settle", hang, hang)
    async with background(MainLoop(mailbox, handle, wait_time_seconds=600)):
        await mailbox.send_many(range(4))
        await anyio.sleep(20)
        assert starts == [(0, 0), (1, 1)]  # two hang, and no third is claimed
        assert mailbox.most_leased == 2
        await anyio.sleep(60)
        assert [job for job, _ in starts] == [0, 1, 2, 3]


# ------------------------------------------------------------------------------------------------------------ receives


async def test_a_lost_connection_backs_off_and_the_loop_lives(virtual_clock):
    mailbox = FaultyMailbox()
    mailbox.next("claim", *[fail(DOWN)] * 6, *[fail(OSError("reset"))] * 2)
    loop = MainLoop(mailbox, quick, wait_time_seconds=600)
    events = record(loop, ReceiveFailed, ReceiveRecovered)
    async with background(loop):
        await anyio.sleep(0)
        await mailbox.send(1)
        await settled(mailbox, within=100)
        await anyio.sleep(1)
        assert loop.trouble is None
    failed = events[:8]
    pauses = [event.retry_in for event in failed]
    assert all(0 <= pause <= 0.1 * 2**n for n, pause in enumerate(pauses))
    assert max(pauses) > 0.3
    assert failed[0].error == "MailboxConnectionError: the store is away"
    assert failed[7].error == "OSError: reset"
    tries = mailbox.times("claim")
    assert [later - earlier for earlier, later in pairwise(tries[:9])] == pytest.approx(pauses)
    assert events[8] == ReceiveRecovered(loop.name, 8)
    assert [event.first for event in failed] == [True] + [False] * 7
    assert loop.outcomes == {"acknowledged": 1}


async def test_that_an_idle_store_answers_again_is_known_at_once(virtual_clock):
    mailbox = FaultyMailbox()
    mailbox.next("claim", fail(DOWN))
    loop = MainLoop(mailbox, quick, wait_time_seconds=600)
    events = record(loop, ReceiveFailed, ReceiveRecovered)
    async with background(loop):
        await anyio.sleep(1)
        assert events[1:] == [ReceiveRecovered(loop.name, 1)]
        assert loop.trouble is None
        assert [wait for _, call, (_, wait) in mailbox.calls if call == "claim"] == [600, 0, 600]


async def test_a_busy_loop_tells_of_a_silent_server_and_of_its_return(virtual_clock):
    """It has nothing to ask until the next renewal, a minute later: the mailbox knows, and says so."""
    asked = []

    async def silent(counts):
        asked.append(anyio.current_time())
        if len(asked) < 3:
            raise DOWN
        return await counts()

    mailbox = FaultyMailbox()
    mailbox.always("counts", silent)
    loop = MainLoop(mailbox, sleeping, concurrency=1, visibility_timeout=3_600)
    events = record(loop, ReceiveFailed, ReceiveRecovered)
    async with background(loop):
        await mailbox.send(1)
        await anyio.sleep(5)
        for _ in range(2):  # of each call that is not answered
            mailbox.fall_silent(DOWN)
        assert events == [ReceiveFailed(loop.name, describe(DOWN), 10.0, first=True)]
        assert loop.trouble == describe(DOWN)
        await anyio.sleep(40)
        assert asked == [15, 25, 35]
        assert events[1:] == [ReceiveRecovered(loop.name, 1)]
        assert loop.trouble is None
        mailbox.fall_silent(DOWN)
        assert events[2:] == [ReceiveFailed(loop.name, describe(DOWN), 10.0, first=True)]
        loop.cancel_work()


async def test_an_idle_loop_tells_of_a_silent_server_once(virtual_clock):
    """It is told by the mailbox and by its own receive that fails: one of them is a warning."""
    mailbox = FaultyMailbox()

    async def fall_silent(hook):
        await anyio.sleep(5)
        mailbox.fall_silent(DOWN)
        raise DOWN

    mailbox.next("claim", fall_silent, fail(DOWN))
    loop = MainLoop(mailbox, quick, wait_time_seconds=600)
    events = record(loop, ReceiveFailed, ReceiveRecovered)
    async with background(loop):
        await anyio.sleep(20)
    assert [event.first for event in events[:-1]] == [True, False, False]
    assert events[-1] == ReceiveRecovered(loop.name, 3)


class Away(FaultyMailbox):
    """Its claims fail between two instants. Asked without end, in which virtual time would stand still, it ends the loop."""

    capabilities = Capabilities(ordered=True)  # so that a loop has two receivers

    def __init__(self, since: float, until: float) -> None:
        super().__init__()

        async def act(hook):
            assert len(self.times("claim")) < 50
            if since <= anyio.current_time() < until:
                raise DOWN
            return await hook()

        self.always("claim", act)


async def test_a_pause_amid_an_outage_does_not_hide_that_it_is_over(virtual_clock):
    """Who receives after the pause has not seen the failures, and tells all the same; then it waits for work again."""
    mailbox = Away(0, 10)
    loop = MainLoop(mailbox, quick, wait_time_seconds=600)
    events = record(loop, ReceiveFailed, ReceiveRecovered)
    async with background(loop):
        await anyio.sleep(9)
        loop.pause()
        await anyio.sleep(2)
        assert loop.trouble is not None
        loop.resume()
        await anyio.sleep(1)
        assert events[-1] == ReceiveRecovered(loop.name, len(events) - 1)
        assert loop.trouble is None
        assert [wait for _, call, (_, wait) in mailbox.calls if call == "claim"][-2:] == [0, 600]


async def test_in_a_pause_that_began_amid_an_outage_the_store_is_asked_whether_it_is_back(virtual_clock):
    """No receive tells of it then: the loop would count as one without its store until it is resumed."""
    mailbox = Away(0, 30)
    mailbox.always("counts", until(30, fail(DOWN)))
    loop = MainLoop(mailbox, quick, wait_time_seconds=600)
    events = record(loop, ReceiveFailed, ReceiveRecovered)
    async with background(loop):
        await anyio.sleep(9)
        failures = len(events)
        loop.pause()
        await anyio.sleep(20)
        assert loop.trouble == "MailboxConnectionError: the store is away"
        await anyio.sleep(12)
        assert loop.trouble is None
        assert events[failures:] == [ReceiveRecovered(loop.name, failures)]


async def test_of_two_receivers_either_shows_that_the_store_answers_again(virtual_clock):
    """The other one may pause yet: a store without work would be asked for some all the while, without end."""
    mailbox = Away(100, 108)
    loop = MainLoop(mailbox, sleeper(100), concurrency=2, wait_time_seconds=600)
    events = record(loop, ReceiveFailed, ReceiveRecovered)
    async with background(loop):
        await mailbox.send(1)
        await anyio.sleep(8)
        await mailbox.send(2)  # as it ends, the second receiver has a place, while the first one pauses
        await anyio.sleep(100.01)
        assert events[-1] == ReceiveRecovered(loop.name, len(events) - 1)
        assert loop.trouble is None
        await anyio.sleep(60)
        assert type(events[-1]) is ReceiveRecovered


async def test_the_pause_is_bounded_and_the_trouble_is_told(virtual_clock):
    mailbox = FaultyMailbox()
    mailbox.always("claim", fail(DOWN))
    loop = MainLoop(mailbox, quick)
    failed = record(loop, ReceiveFailed)
    async with background(loop):
        await anyio.sleep(3_600)
        assert loop.trouble == "MailboxConnectionError: the store is away"
        assert loop.heartbeat.elapsed() <= 30  # a lost server is no stall
    assert 20 < max(event.retry_in for event in failed) <= 30


async def test_each_trouble_begins_with_a_short_pause(virtual_clock):
    mailbox = FaultyMailbox()
    for _ in range(10):
        mailbox.next("claim", fail(DOWN), fail(DOWN), fail(DOWN), work)
    loop = MainLoop(mailbox, quick, wait_time_seconds=1)
    events = record(loop, ReceiveFailed)
    async with background(loop):
        await anyio.sleep(60)
    assert len(events) == 30
    assert [event.first for event in events] == [True, False, False] * 10
    assert all(event.retry_in <= 0.1 * 2 ** (number % 3) for number, event in enumerate(events))


async def test_running_handlers_are_not_harmed_by_a_lost_connection(virtual_clock):
    async def handle(job: int) -> None:
        await anyio.sleep(100)

    mailbox = FaultyMailbox()
    loop = MainLoop(mailbox, handle, concurrency=2)
    async with background(loop):
        await mailbox.send(1)
        await anyio.sleep(1)
        mailbox.always("claim", fail(DOWN))
        await anyio.sleep(200)
    assert loop.outcomes == {"acknowledged": 1}


# --------------------------------------------------------------------------------------------------------- settlements


async def test_a_settlement_is_tried_again_while_the_lease_is_trusted(virtual_clock):
    mailbox = FaultyMailbox()
    mailbox.next("settle", fail(DOWN), fail(OSError("reset")), fail(DOWN))
    loop = MainLoop(mailbox, quick)
    failed = record(loop, SettlementFailed)
    async with background(loop):
        await mailbox.send(1)
        await anyio.sleep(10)
        assert (await mailbox.counts()).settled == 1
    assert mailbox.settlements() == ["Ack"] * 4
    assert failed == []
    assert loop.outcomes == {"acknowledged": 1}


@pytest.mark.parametrize("joined", [True, False], ids=["joined", "each by itself"])
async def test_a_full_loop_hears_by_its_settlements_that_the_store_is_away(virtual_clock, joined):
    """No place is free, so it does not receive. It is said once when it begins, and once when it is over."""

    class Store(FaultyMailbox):
        capabilities = replace(MemoryBackend.capabilities, joined_acks=joined)

    mailbox = Store()
    await mailbox.send_many(range(4))
    loop = MainLoop(mailbox, sleeper(1), concurrency=2)
    events = record(loop, SettlementDelayed, SettlementRecovered, SettlementFailed)
    async with background(loop):
        await anyio.sleep(0.5)
        assert loop.trouble is None
        mailbox.always("settle", fail(DOWN))
        await anyio.sleep(10)
        assert loop.trouble == "MailboxConnectionError: the store is away"
        assert [event.first for event in events] == [True] + [False] * (len(events) - 1)
        delays = len(events)
        assert delays > 5
        mailbox.always("settle", work)
        await anyio.sleep(6)
        assert loop.trouble is None
        assert loop.outcomes["acknowledged"] >= 2
    assert [event for event in events if type(event) is not SettlementDelayed] == [
        SettlementRecovered(loop.name, delays)
    ]


async def test_a_full_loop_hears_by_its_renewals_that_the_store_is_away(virtual_clock):
    mailbox = FaultyMailbox()
    await mailbox.send_many(range(2))
    loop = MainLoop(mailbox, sleeper(100), concurrency=2, visibility_timeout=30)
    async with background(loop):
        await anyio.sleep(5)
        mailbox.always("extend", fail(DOWN))
        await anyio.sleep(6)
        assert loop.trouble == "MailboxConnectionError: the store is away"
        mailbox.always("extend", work)
        await anyio.sleep(6)
        assert loop.trouble is None
        mailbox.always("extend", fail(ValueError("a fault of its own, which says nothing of the store")))
        await anyio.sleep(10)
        assert loop.trouble is None


async def test_an_acknowledgement_shows_that_the_store_is_back_though_only_a_renewal_had_failed(virtual_clock):
    """The loop waits for work meanwhile, which may take long."""
    mailbox = FaultyMailbox()
    mailbox.next("extend", fail(DOWN))
    loop = MainLoop(mailbox, sleeper(10.1), concurrency=2, visibility_timeout=30, wait_time_seconds=600)
    async with background(loop):
        await mailbox.send(1)
        with anyio.fail_after(10.05):
            while loop.trouble is None:
                await anyio.sleep(0.01)
        mailbox.always("extend", fail(DOWN))
        await anyio.sleep(1)
        assert loop.outcomes == {"acknowledged": 1}
        assert loop.trouble is None


@pytest.mark.parametrize("answer", [DOWN, MailboxError("the server is starting")], ids=["none", "not yet"])
@pytest.mark.parametrize("afterwards", ["the handler goes on", "pause"])
async def test_where_nothing_else_asks_the_store_it_is_asked_whether_it_is_back(virtual_clock, afterwards, answer):
    """The last try of a lease that is lost was no answer; the loop may have nothing to ask for hours after it."""

    async def handle(job: int) -> None:
        with anyio.CancelScope(shield=afterwards == "the handler goes on"):
            await anyio.sleep(3_600)

    mailbox = FaultyMailbox()
    loop = MainLoop(mailbox, handle, visibility_timeout=30)
    async with background(loop):
        await mailbox.send(1)
        await anyio.sleep(1)
        mailbox.always("counts", until(100, fail(answer)))
        mailbox.always("extend", fail(DOWN))
        await anyio.sleep(28)
        if afterwards == "pause":
            loop.pause()
        for _ in range(70):
            await anyio.sleep(1)
            assert loop.trouble == "MailboxConnectionError: the store is away"
        await anyio.sleep(12)
        assert loop.trouble is None


async def test_that_renewals_go_well_does_not_hide_that_nothing_can_be_received(virtual_clock):
    mailbox = FaultyMailbox()
    loop = MainLoop(mailbox, sleeper(100), concurrency=3, visibility_timeout=5)
    async with background(loop):
        await mailbox.send(1)
        await anyio.sleep(1)
        mailbox.always("claim", fail(DOWN))
        await mailbox.send(2)  # which ends the claim that was out
        await anyio.sleep(1)
        for _ in range(30):
            await anyio.sleep(1)
            assert loop.trouble == "MailboxConnectionError: the store is away"
    assert len(mailbox.times("extend")) > 10


async def test_with_the_trust_the_tries_end_and_the_message_comes_again(virtual_clock):
    mailbox = FaultyMailbox()
    mailbox.always("settle", fail(DOWN))
    mailbox.always("extend", fail(DOWN))
    loop = MainLoop(mailbox, quick, visibility_timeout=20)
    events = record(loop, SettlementFailed, MessageFinished)
    async with background(loop, max_iterations=1):
        await mailbox.send(1)
        await anyio.sleep(19)
        assert loop.in_flight == 1
        await anyio.sleep(2)
        assert not loop.running
    assert [type(event) for event in events] == [SettlementFailed, MessageNotAcknowledged]
    assert (events[0].outcome, events[0].error) == ("acknowledged", "MailboxConnectionError: the store is away")
    assert events[1].outcome == "lost"
    (again,) = await InMemoryMailbox.receive(mailbox)
    assert again.delivery_count == 2


async def test_that_settlements_work_again_is_told_by_others_where_the_one_that_failed_is_lost(virtual_clock):
    async def handle(job: int, ctx: Context) -> None:
        if ctx.message.delivery_count > 1:
            await anyio.sleep(5)  # its settlement is the first since the store is back, and needs no second try

    mailbox = FaultyMailbox()
    mailbox.always("settle", fail(DOWN))
    await mailbox.send(1)
    loop = MainLoop(mailbox, handle, visibility_timeout=10, lease=LeasePolicy("never"))
    events = record(loop, SettlementDelayed, SettlementRecovered)
    async with background(loop):
        for _ in range(2):
            await anyio.sleep(11)  # past the end of the lease, with which the tries end
            mailbox.always("settle", work)
            await settled(mailbox, within=100)
            assert events.pop() == SettlementRecovered(loop.name, len(events))
            events.clear()
            mailbox.always("settle", fail(DOWN))
            await mailbox.send(2)
    assert loop.outcomes["lost"] >= 2


async def test_an_answer_that_was_lost_is_no_second_settlement(virtual_clock):
    """The store had written it: the next try finds the lease gone. That the message is done must not harm."""
    mailbox = FaultyMailbox()
    mailbox.next("settle", lose_answer(DOWN))
    loop = MainLoop(mailbox, quick)
    async with background(loop):
        await mailbox.send(1)
        await anyio.sleep(100)
        counts = await mailbox.counts()
        assert (counts.settled, counts.waiting) == (1, 0)
        await mailbox.send(2)
        await anyio.sleep(1)
        assert (await mailbox.counts()).settled == 2


@pytest.mark.parametrize("policy", ["while-running", "on-beat", "never"])
@pytest.mark.parametrize("extends", ["well", "too hangs"])
async def test_a_settlement_that_hangs_gives_its_slot_back(virtual_clock, policy, extends):
    mailbox = FaultyMailbox()
    mailbox.next("settle", hang)
    if extends == "too hangs":
        mailbox.always("extend", hang)
    loop = MainLoop(mailbox, quick, visibility_timeout=600, lease=LeasePolicy(policy))
    failed = record(loop, SettlementFailed)
    async with background(loop):
        await mailbox.send(1)
        await anyio.sleep(29)
        assert loop.in_flight == 1
        await anyio.sleep(32)  # 30 s, and at most as much again until somebody looks
        assert loop.in_flight == 0
        assert [(event.outcome, event.error) for event in failed] == [
            ("acknowledged", "the mailbox did not answer in time, or the loop or its task was cancelled")
        ]
        assert loop.outcomes == {"lost": 1}
        mailbox.always("extend", slow(0))
        await mailbox.send(2)
        await anyio.sleep(1)
        assert (await mailbox.counts()).settled == 1


@pytest.mark.parametrize("visibility", [1, 2, 5])
async def test_a_settlement_that_hangs_past_its_lease_gives_its_slot_back(virtual_clock, visibility):
    mailbox = FaultyMailbox()
    mailbox.always("settle", hang)
    mailbox.always("extend", hang)
    loop = MainLoop(mailbox, quick, visibility_timeout=visibility)
    async with background(loop, max_iterations=1):
        await mailbox.send(1)
        await anyio.sleep(65)
        assert not loop.running


async def test_the_late_settlement_of_a_timed_out_handler_is_tried_again_too(virtual_clock):
    async def handle(job: int) -> None:
        await anyio.sleep_forever()

    mailbox = FaultyMailbox()
    mailbox.next("settle", *[fail(DOWN)] * 3)
    loop = MainLoop(mailbox, handle, handler_timeout=10, dead_letter=DeadLetterPolicy(max_attempts=1))
    async with background(loop):
        await mailbox.send(1)
        await anyio.sleep(20)
        assert (await mailbox.counts()).dead == 1
    assert loop.outcomes == {"dead_lettered": 1}


async def test_a_failed_dead_letter_write_leaves_the_message_in_the_queue(virtual_clock):
    async def handle(job: int) -> None:
        raise ValueError("bad")

    mailbox = FaultyMailbox()
    mailbox.next("settle", fail(RuntimeError("disk")))
    loop = MainLoop(mailbox, handle, visibility_timeout=10, dead_letter=DeadLetterPolicy(max_attempts=1))
    failed = record(loop, SettlementFailed)
    async with background(loop):
        await mailbox.send(1)
        await anyio.sleep(1)
        assert (await mailbox.counts()).in_flight == 1
        assert [(event.outcome, event.error) for event in failed] == [("dead_lettered", "RuntimeError: disk")]
        await anyio.sleep(20)
        (dead,) = await mailbox.dead_letters()
        assert dead.body == 1
