"""Acknowledgements that leave together, where a mailbox says that this costs little more than one."""

from __future__ import annotations

import asyncio
import gc
import time
from dataclasses import replace
from typing import Any

import anyio
import pytest
from loop_support import DOWN, quick

from mainspring import MainLoop
from mainspring.events import MessageFinished, MessageNotAcknowledged, SettlementFailed
from mainspring.mailbox.memory.mailbox import MemoryBackend
from support import FaultyMailbox, background, fail, hang, lose_answer, record, settled, slow, work

pytestmark = pytest.mark.anyio


class Joining(FaultyMailbox):
    def __init__(self) -> None:
        super().__init__(joins=True)


class Ordered(Joining):
    capabilities = replace(MemoryBackend.capabilities, ordered=True)


@pytest.fixture(params=[Joining, Ordered])
def mailbox(request):
    return request.param()


async def test_handlers_that_end_as_they_begin_are_acknowledged_together(mailbox, virtual_clock):
    loop = MainLoop(mailbox, quick, concurrency=50)
    events = record(loop, MessageFinished)
    await mailbox.send_many(range(200))
    async with background(loop):
        await settled(mailbox)
    assert loop.outcomes == {"acknowledged": 200}
    assert [event.outcome for event in events] == ["acknowledged"] * 200
    assert sorted(job for jobs in mailbox.joined for job in jobs) == list(range(200))
    assert len(mailbox.joined) <= 8
    assert mailbox.most_leased <= 50
    assert mailbox.settlements() == []


async def test_one_alone_is_acknowledged_by_itself(mailbox, virtual_clock):
    async with background(MainLoop(mailbox, quick, concurrency=1, wait_time_seconds=600)):
        for job in range(3):
            await mailbox.send(job)
            await settled(mailbox)
    assert mailbox.settlements() == ["Ack"] * 3
    assert mailbox.joined == []


async def test_an_acknowledgement_waits_for_no_other_handler(mailbox, virtual_clock):
    async def handle(job: float) -> None:
        await anyio.sleep(job)

    loop = MainLoop(mailbox, handle, concurrency=4)
    await mailbox.send_many([0, 0, 1_000, 1_000])
    began = anyio.current_time()
    async with background(loop):
        while (await mailbox.counts()).in_flight != 2:
            await anyio.sleep(0)
        assert anyio.current_time() == began
        assert (await mailbox.counts()).settled == 2
        loop.cancel_work()


async def test_a_handler_that_keeps_the_event_loop_long_is_acknowledged_before_the_next_one(mailbox):
    seen = []

    async def handle(job: int) -> None:
        seen.append((await mailbox.counts()).settled)
        time.sleep(0.005)

    await mailbox.send_many(range(4))
    async with background(MainLoop(mailbox, handle, concurrency=4)):
        await settled(mailbox)
    assert seen == [0, 1, 2, 3]


async def test_a_handler_that_settles_by_itself_or_answers_is_not_joined(mailbox, virtual_clock):
    async def handle(job: int, ctx) -> int:
        if job == 1:
            await ctx.message.nack(delay=3_600)
        return job

    replies = FaultyMailbox("replies")
    loop = MainLoop(mailbox, handle, concurrency=4)
    await mailbox.send_many([0, 1, 2])
    await mailbox.send(3, reply_to=replies.address)
    async with background(loop):
        await anyio.sleep(1)
    assert sorted(job for jobs in mailbox.joined for job in jobs) == [0, 2]
    assert loop.outcomes == {"acknowledged": 3, "retried": 1}


async def test_one_that_is_refused_is_lost_and_the_others_are_done(mailbox, virtual_clock):
    async def handle(job: int) -> None:
        if job == 1:
            await mailbox.purge()

    loop = MainLoop(mailbox, handle, concurrency=3)
    trouble = record(loop, MessageNotAcknowledged, SettlementFailed)
    await mailbox.send_many(range(2))
    async with background(loop):
        await settled(mailbox)
        await mailbox.send(2)
        await settled(mailbox)
    assert loop.outcomes == {"lost": 2, "acknowledged": 1}
    assert [(type(event), event.outcome) for event in trouble] == [(MessageNotAcknowledged, "lost")] * 2


@pytest.mark.parametrize("trouble", [fail(DOWN), fail(OSError("reset")), lose_answer(DOWN), fail(ValueError("?"))])
async def test_what_a_failed_call_had_is_settled_one_by_one(mailbox, trouble, virtual_clock):
    mailbox.next("join", trouble)
    loop = MainLoop(mailbox, quick, concurrency=10)
    await mailbox.send_many(range(10))
    async with background(loop):
        await settled(mailbox)
        await anyio.sleep(1)
        assert loop.in_flight == 0
    assert sum(loop.outcomes.values()) == 10
    assert (await mailbox.counts()).settled == 10


async def test_a_call_that_always_fails_is_told_once_until_it_works(mailbox, caplog, virtual_clock):
    loop = MainLoop(mailbox, quick, concurrency=10)
    async with background(loop):
        for trouble in (fail(ValueError("no such command")), work, fail(DOWN)):
            mailbox.always("join", trouble)
            for _ in range(3):
                await mailbox.send_many(range(10))
                await settled(mailbox)
    assert loop.outcomes == {"acknowledged": 90}
    told = [record.getMessage() for record in caplog.records if "together" in record.getMessage()]
    assert len(told) == 2
    assert "no such command" in told[0]
    assert "in act: raise error" in told[0]
    assert "the store is away" in told[1]


async def test_those_of_a_failed_call_are_tried_again_beside_each_other(mailbox, virtual_clock):
    mailbox.next("join", fail(DOWN))
    mailbox.always("settle", slow(5))
    await mailbox.send_many(range(5))
    began = anyio.current_time()
    async with background(MainLoop(mailbox, quick, concurrency=5)):
        await settled(mailbox, within=100)
        assert anyio.current_time() - began < 6


async def test_a_call_that_hangs_is_given_up_and_its_messages_come_again(mailbox, virtual_clock):
    mailbox.next("join", hang)
    loop = MainLoop(mailbox, quick, concurrency=5, wait_time_seconds=600)
    events = record(loop, SettlementFailed, MessageNotAcknowledged)
    await mailbox.send_many(range(5))
    began = anyio.current_time()
    async with background(loop):
        await settled(mailbox, within=1_000)
        assert anyio.current_time() - began < 100
        assert loop.outcomes == {"lost": 5, "acknowledged": 5}
        assert [type(event) for event in events] == [SettlementFailed] * 5 + [MessageNotAcknowledged] * 5
        await mailbox.send(5)  # the slots live
        await settled(mailbox)


async def test_a_renewal_goes_on_while_the_call_is_slow(mailbox, virtual_clock):
    mailbox.next("join", slow(25))
    loop = MainLoop(mailbox, quick, concurrency=2, visibility_timeout=10)
    await mailbox.send_many(range(2))
    async with background(loop):
        await settled(mailbox, within=100)
    assert loop.outcomes == {"acknowledged": 2}


async def test_what_is_done_is_acknowledged_though_the_loop_is_cancelled(mailbox, virtual_clock):
    with anyio.CancelScope() as scope:

        async def handle(job: int) -> None:
            if job == 1:
                scope.cancel()
                await anyio.sleep_forever()

        loop = MainLoop(mailbox, handle, concurrency=2)
        await mailbox.send_many(range(2))
        await loop.run()
    assert loop.outcomes == {"acknowledged": 1, "released": 1}
    counts = await mailbox.counts()
    assert (counts.settled, counts.pending, counts.in_flight) == (1, 1, 0)


@pytest.mark.parametrize("trouble", [{"join": hang}, {"join": fail(DOWN), "settle": hang}])
async def test_a_cancelled_loop_cuts_off_what_it_waits_for(mailbox, trouble, virtual_clock):
    """The call for all of them, or those for each that a failed call had."""
    for hook, what in trouble.items():
        mailbox.always(hook, what)
    loop = MainLoop(mailbox, quick, concurrency=3)
    await mailbox.send_many(range(3))
    with anyio.move_on_after(5):
        await loop.run()
    assert loop.outcomes == {"lost": 3}
    assert loop.in_flight == 0


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")  # which is the point
@pytest.mark.loops("asyncio")
async def test_a_settlement_whose_task_is_cancelled_before_it_begins_gives_its_slot_back(anyio_backend):
    """As by code that cancels all tasks of the event loop; each of these has no message any more to begin with."""

    async def refuse(_: Any) -> dict[int, Exception]:
        before = asyncio.all_tasks()

        def cancel_new_tasks() -> None:
            for task in asyncio.all_tasks() - before:
                task.cancel()

        asyncio.get_running_loop().call_soon(cancel_new_tasks)
        return dict.fromkeys(range(len(mailbox.joined[-1])), DOWN)

    mailbox = Joining()
    mailbox.next("join", refuse)
    loop = MainLoop(mailbox, quick, concurrency=3)
    sent = 0
    async with background(loop):
        with anyio.fail_after(10):
            while not mailbox.joined:  # on a machine that is busy each may be acknowledged by itself
                await mailbox.send_many(range(3))
                sent += 3
                while sum(loop.outcomes.values()) < sent:
                    await anyio.sleep(0.001)
        assert loop.outcomes["lost"] >= 1
        assert loop.outcomes["lost"] + loop.outcomes["acknowledged"] == sent
        assert loop.in_flight == 0
    gc.collect()  # here, and not in a later test


@pytest.mark.parametrize("how", ["shutdown", "pause"])
async def test_the_end_and_a_pause_leave_nothing_unacknowledged(mailbox, how, virtual_clock):
    async def handle(job: int) -> None:
        if job == 5:
            loop.pause() if how == "pause" else loop.request_shutdown()

    loop = MainLoop(mailbox, handle, concurrency=20)
    await mailbox.send_many(range(20))
    async with background(loop):
        await anyio.sleep(1)
        counts = await mailbox.counts()
        assert (counts.settled, counts.in_flight, counts.settled + counts.pending) == (6, 0, 20)
    assert loop.outcomes["acknowledged"] == 6


class Refusing(Joining):
    """Refuses each joint acknowledgement, and hands out what it has ``at_hand`` without giving others a turn."""

    def __init__(self) -> None:
        super().__init__()
        self.at_hand: list[Any] = []
        self.always("join", self.refuse)

    async def refuse(self, hook: Any) -> dict[int, Exception]:
        await anyio.lowlevel.checkpoint()
        return dict.fromkeys(range(len(self.joined[-1])), DOWN)

    async def receive(self, *, max_messages: int = 1, **options: Any) -> list[Any]:
        messages, self.at_hand = self.at_hand[:max_messages], self.at_hand[max_messages:]
        return messages or await super().receive(max_messages=max_messages, **options)


@pytest.mark.loops("asyncio")  # where tasks that are woken go on in a known order
@pytest.mark.parametrize("turns", range(5))
async def test_what_is_done_does_not_wait_for_the_neighbour(turns, anyio_backend):
    """It ends just as the only slot that could acknowledge it is about to look: that has left its message, and is not idle."""
    for _ in range(5):  # a machine that is busy may let the turn of the first one end
        await end_beside_a_neighbour(turns)


async def end_beside_a_neighbour(turns: int) -> None:
    """Let one end so many turns after the other's acknowledgement was refused, and was then made by itself."""
    settled_one = anyio.Event()

    async def handle(job: str) -> None:
        if job == "second":
            await settled_one.wait()
            for _ in range(turns):
                await anyio.lowlevel.checkpoint()
        elif job == "long":
            await anyio.sleep_forever()

    mailbox = Refusing()
    loop = MainLoop(mailbox, handle, concurrency=2)
    loop.dispatcher.subscribe(MessageFinished, lambda _: settled_one.set())
    async with mailbox, anyio.create_task_group() as group:
        await mailbox.send_many(["first", "second", "long"])
        mailbox.at_hand = await mailbox.receive(max_messages=3)
        group.start_soon(loop.run)
        with anyio.fail_after(20):
            while (await mailbox.counts()).settled < 2:
                await anyio.sleep(0.001)
        group.cancel_scope.cancel()
