"""One bound on the messages in hand across loops: never exceeded, never leaking, and nobody starves."""

from __future__ import annotations

import anyio
import pytest
from loop_support import DOWN

from mainspring import InMemoryMailbox, LoopGroup, MainLoop
from mainspring.events import MessageFinished, ReceiveFailed, ReceiveRecovered
from support import FaultyMailbox, fail, record, settled, work

pytestmark = pytest.mark.anyio

TURN = 1.0
"""Seconds after which a loop that waits for work gives its place to another."""


class Load:
    """Counts how many handlers run at once, over all loops."""

    def __init__(self):
        self.now = self.most = 0
        self.done = []

    def handler(self, seconds):
        async def handle(job: int) -> None:
            self.now += 1
            self.most = max(self.most, self.now)
            try:
                await anyio.sleep(seconds)
            finally:
                self.now -= 1
            self.done.append(job)

        return handle

    async def most_at_once(self, *boxes):
        """How many more messages are handled at once: as many as there are places, where none was lost."""
        self.most = 0
        for box in boxes:
            await box.send_many(range(20))
        for box in boxes:
            await settled(box, within=200)
        return self.most


async def test_the_bound_holds_across_loops(virtual_clock):
    load = Load()
    boxes = [FaultyMailbox() for _ in range(3)]
    loops = [MainLoop(box, load.handler(1), name=f"loop {n}", concurrency=10) for n, box in enumerate(boxes)]
    for box in boxes:
        await box.send_many(range(20))
    async with LoopGroup(loops, max_concurrency=4):
        await anyio.sleep(100)
        assert load.most == 4
        assert len(load.done) == 60
        assert await load.most_at_once(*boxes) == 4


async def test_an_idle_loop_gives_its_place_to_one_that_waits(virtual_clock):
    load = Load()
    busy_box, idle_box = FaultyMailbox(), FaultyMailbox()
    busy = MainLoop(busy_box, load.handler(1), name="busy", concurrency=10)
    idle = MainLoop(idle_box, load.handler(1), name="idle", concurrency=10, wait_time_seconds=1_000)
    async with LoopGroup([idle, busy], max_concurrency=5):
        await anyio.sleep(1)
        await busy_box.send_many(range(40))
        await anyio.sleep(11)
        assert load.most == 5
        assert len(load.done) == 40
        assert await load.most_at_once(idle_box, busy_box) == 5


async def test_more_loops_than_slots_take_turns_and_none_starves(virtual_clock):
    load = Load()
    boxes = [InMemoryMailbox() for _ in range(4)]
    loops = [MainLoop(box, load.handler(0.1), name=f"loop {n}", wait_time_seconds=1_000) for n, box in enumerate(boxes)]
    async with LoopGroup(loops, max_concurrency=1):
        await anyio.sleep(10)
        for number, box in enumerate(boxes):
            began = virtual_clock.now
            await box.send(number)
            await settled(box, within=2 * len(boxes) * TURN)
            assert virtual_clock.now - began <= len(boxes) * TURN + 0.2
    assert sorted(load.done) == [0, 1, 2, 3]
    assert load.most == 1


async def test_a_busy_loop_does_not_starve_its_neighbour(virtual_clock):
    load = Load()
    busy_box, other_box = InMemoryMailbox(), InMemoryMailbox()
    loops = [MainLoop(busy_box, load.handler(0.1), name="busy"), MainLoop(other_box, load.handler(0.1), name="other")]
    await busy_box.send_many(range(1_000))
    await other_box.send_many(range(5_000, 5_010))
    async with LoopGroup(loops, max_concurrency=1):
        await anyio.sleep(20)
    assert len([job for job in load.done if job >= 5_000]) == 10


async def test_a_failed_receive_frees_its_slots(virtual_clock):
    load = Load()
    box = FaultyMailbox()
    box.next("claim", *[fail(OSError("away"))] * 5)
    async with LoopGroup([MainLoop(box, load.handler(1), concurrency=3)], max_concurrency=3):
        await box.send_many(range(3))
        await anyio.sleep(60)
        assert (load.most, len(load.done)) == (3, 3)


async def test_slots_come_back_from_cancelled_runs():
    load = Load()
    boxes = [InMemoryMailbox() for _ in range(3)]
    loops = [MainLoop(box, load.handler(1_000), name=str(n), concurrency=2) for n, box in enumerate(boxes)]
    for box in boxes[:2]:
        await box.send_many([1, 2, 3])
    with anyio.fail_after(10):
        async with LoopGroup(loops, max_concurrency=2) as group:
            while load.now < 2:
                await anyio.sleep(0.001)
            await boxes[2].send_many([1, 2, 3])
            for loop in loops[:2]:
                await loop.shutdown(timeout=0)
            while loops[2].in_flight < 2:
                await anyio.sleep(0.001)
            await group.shutdown(timeout=0)


async def test_messages_that_are_acknowledged_together_give_a_place_back_each(virtual_clock):
    done, load = [], Load()

    async def handle(job: int) -> None:
        done.append(job)

    quick, other = InMemoryMailbox(), InMemoryMailbox()
    loops = [MainLoop(quick, handle, concurrency=4), MainLoop(other, load.handler(1), name="other", concurrency=10)]
    async with LoopGroup(loops, max_concurrency=4):
        await quick.send_many(range(100))
        await settled(quick)
        assert sorted(done) == list(range(100))
        assert await load.most_at_once(other) == 4


@pytest.mark.parametrize("first", ["the stop", "the place"])
@pytest.mark.parametrize("stopped", [1, 2], ids=["the second", "the third"])  # one of which is woken
async def test_a_loop_that_is_stopped_just_when_it_is_let_look_passes_it_on(stopped, first):
    """It had been woken for the free place and will not take it: the next in the line must hear of it."""
    go_on = anyio.Event()

    async def handle(job: int) -> None:
        if job == 1:
            await go_on.wait()
            if first == "the stop":
                loops[stopped].stop_intake()

    boxes = [InMemoryMailbox() for _ in range(3)]
    loops = [MainLoop(box, handle, name=str(number)) for number, box in enumerate(boxes)]
    if first == "the place":
        loops[0].dispatcher.subscribe(MessageFinished, lambda _: loops[stopped].stop_intake())
    for loop in loops[1:]:
        loop.pause()
    with anyio.fail_after(30):
        async with LoopGroup(loops, max_concurrency=1):
            await boxes[0].send(1)
            while not loops[0].in_flight:
                await anyio.sleep(0.001)
            for loop in loops[1:]:
                loop.resume()
            await anyio.wait_all_tasks_blocked()
            await boxes[3 - stopped].send(2)
            go_on.set()
            await settled(boxes[3 - stopped])


async def test_a_loop_for_which_there_is_no_place_hears_that_its_store_answers_again(virtual_clock):
    """The handlers of the others may have all places for hours; until then readiness would say that the store is away."""
    load = Load()
    boxes = [FaultyMailbox() for _ in range(2)]
    busy, idle = loops = [MainLoop(box, load.handler(900), name=f"loop {n}") for n, box in enumerate(boxes)]
    boxes[1].always("claim", fail(DOWN))
    events = record(idle, ReceiveFailed, ReceiveRecovered)
    async with LoopGroup(loops, max_concurrency=1, watchdog_threshold=10_000):
        await anyio.sleep(5)
        await boxes[0].send(1)
        await anyio.sleep(60)
        assert busy.in_flight == 1
        assert idle.trouble is None
        assert isinstance(events[-1], ReceiveRecovered)
        told = len(events)
        await boxes[1].send(2)
        await anyio.sleep(600)
        assert (idle.in_flight, len(events)) == (0, told)
        boxes[1].always("claim", work)
        await anyio.sleep(900)
        assert idle.in_flight == 1
