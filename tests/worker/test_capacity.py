"""One bound on the messages in hand across loops: never exceeded, never leaking, and nobody starves."""

from __future__ import annotations

from functools import partial

import anyio
import pytest
from loop_support import DOWN

from mainspring import InMemoryMailbox, MainLoop
from mainspring.events import ReceiveFailed, ReceiveRecovered
from mainspring.worker.slots import TURN, Capacity
from support import FaultyMailbox, fail, record, settled, work

pytestmark = pytest.mark.anyio


class Load:
    """Counts how many handlers run at once, over all loops."""

    def __init__(self):
        self.now = self.most = 0
        self.done = []

    def handler(self, seconds):
        async def handle(job: int) -> None:
            self.now += 1
            self.most = max(self.most, self.now)
            await anyio.sleep(seconds)
            self.now -= 1
            self.done.append(job)

        return handle


def share(capacity, *loops):
    for loop in loops:
        loop._capacity = capacity


def places(capacity):
    return capacity._places - capacity._taken


async def run_all(loops, tasks):
    for loop in loops:
        tasks.start_soon(loop.run)


async def stop_all(loops):
    async with anyio.create_task_group() as tasks:
        for loop in loops:
            tasks.start_soon(partial(loop.shutdown, timeout=5))


async def test_the_bound_holds_across_loops(virtual_clock):
    load, capacity = Load(), Capacity(4)
    boxes = [FaultyMailbox() for _ in range(3)]
    loops = [MainLoop(box, load.handler(1), name=f"loop {n}", concurrency=10) for n, box in enumerate(boxes)]
    share(capacity, *loops)
    for box in boxes:
        await box.send_many(range(20))
    async with anyio.create_task_group() as tasks:
        await run_all(loops, tasks)
        await anyio.sleep(100)
        await stop_all(loops)
    assert load.most == 4
    assert len(load.done) == 60
    assert places(capacity) == 4


async def test_an_idle_loop_gives_its_place_to_one_that_waits(virtual_clock):
    load, capacity = Load(), Capacity(5)
    busy_box, idle_box = FaultyMailbox(), FaultyMailbox()
    busy = MainLoop(busy_box, load.handler(1), name="busy", concurrency=10)
    idle = MainLoop(idle_box, load.handler(1), name="idle", concurrency=10, wait_time_seconds=1_000)
    share(capacity, busy, idle)
    await busy_box.send_many(range(40))
    async with anyio.create_task_group() as tasks:
        await run_all([idle], tasks)
        await anyio.sleep(1)
        await run_all([busy], tasks)
        await anyio.sleep(11)
        assert load.most == 5
        assert len(load.done) == 40
        await stop_all([busy, idle])
    assert places(capacity) == 5


async def test_more_loops_than_places_take_turns_and_none_starves(virtual_clock):
    load, capacity = Load(), Capacity(1)
    boxes = [InMemoryMailbox() for _ in range(4)]
    loops = [MainLoop(box, load.handler(0.1), name=f"loop {n}", wait_time_seconds=1_000) for n, box in enumerate(boxes)]
    share(capacity, *loops)
    async with anyio.create_task_group() as tasks:
        await run_all(loops, tasks)
        await anyio.sleep(10)
        for number, box in enumerate(boxes):
            began = virtual_clock.now
            await box.send(number)
            await settled(box, within=2 * len(boxes) * TURN)
            assert virtual_clock.now - began <= len(boxes) * TURN + 0.2
        await stop_all(loops)
    assert sorted(load.done) == [0, 1, 2, 3]
    assert load.most == 1
    assert places(capacity) == 1


async def test_a_busy_loop_does_not_starve_its_neighbour(virtual_clock):
    load, capacity = Load(), Capacity(1)
    busy_box, other_box = InMemoryMailbox(), InMemoryMailbox()
    loops = [MainLoop(busy_box, load.handler(0.1), name="busy"), MainLoop(other_box, load.handler(0.1), name="other")]
    share(capacity, *loops)
    await busy_box.send_many(range(1_000))
    await other_box.send_many(range(5_000, 5_010))
    async with anyio.create_task_group() as tasks:
        await run_all(loops, tasks)
        await anyio.sleep(20)
        await stop_all(loops)
    assert len([job for job in load.done if job >= 5_000]) == 10


async def test_a_failed_receive_gives_its_places_back(virtual_clock):
    load, capacity = Load(), Capacity(3)
    box = FaultyMailbox()
    box.next("claim", *[fail(OSError("away"))] * 5)
    loop = MainLoop(box, load.handler(1), concurrency=3)
    share(capacity, loop)
    await box.send_many(range(3))
    async with anyio.create_task_group() as tasks:
        await run_all([loop], tasks)
        await anyio.sleep(60)
        await stop_all([loop])
    assert (load.most, len(load.done)) == (3, 3)
    assert places(capacity) == 3


async def test_places_come_back_from_cancelled_runs():
    capacity = Capacity(2)
    boxes = [InMemoryMailbox() for _ in range(3)]
    loops = [MainLoop(box, Load().handler(1_000), name=str(n), concurrency=2) for n, box in enumerate(boxes)]
    share(capacity, *loops)
    for box in boxes:
        await box.send_many([1, 2, 3])
    async with anyio.create_task_group() as tasks:
        await run_all(loops, tasks)
        while places(capacity):
            await anyio.sleep(0.001)
        tasks.cancel_scope.cancel()
    assert places(capacity) == 2


async def test_messages_that_are_acknowledged_together_give_a_place_back_each(virtual_clock):
    capacity, load = Capacity(4), []

    async def handle(job: int) -> None:
        load.append(job)

    mailbox = InMemoryMailbox()
    loop = MainLoop(mailbox, handle, concurrency=4)
    share(capacity, loop)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(loop.run)
        await mailbox.send_many(range(100))
        await settled(mailbox)
        await loop.shutdown()
    assert sorted(load) == list(range(100))
    assert places(capacity) == 4


async def test_a_loop_that_is_stopped_just_when_it_is_let_look_passes_it_on():
    """It had been woken for the free place and will not take it: the next in the line must hear of it."""
    capacity, got = Capacity(1), []

    async def poll(most, wait):
        await anyio.lowlevel.checkpoint()
        return ["message"]

    async def take(name, scope):
        with scope:
            await capacity.receive(1, 0, poll, lambda messages: got.append(name))

    scopes = {name: anyio.CancelScope() for name in "abc"}
    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(take, "a", scopes["a"])
            await anyio.wait_all_tasks_blocked()
            for name in "bc":
                tasks.start_soon(take, name, scopes[name])
                await anyio.wait_all_tasks_blocked()
            capacity.give_back(1)  # wakes b
            scopes["b"].cancel()
    assert got == ["a", "c"]


async def test_a_loop_for_which_there_is_no_place_hears_that_its_store_answers_again(virtual_clock):
    """The handlers of the others may have all places for hours; until then readiness would say that the store is away."""
    load, capacity = Load(), Capacity(1)
    boxes = [FaultyMailbox() for _ in range(2)]
    busy, idle = loops = [MainLoop(box, load.handler(7_200), name=f"loop {n}") for n, box in enumerate(boxes)]
    share(capacity, *loops)
    boxes[1].always("claim", fail(DOWN))
    events = record(idle, ReceiveFailed, ReceiveRecovered)
    async with anyio.create_task_group() as tasks:
        await run_all(loops, tasks)
        await anyio.sleep(5)
        await boxes[0].send(1)
        await anyio.sleep(60)
        assert busy.in_flight == 1
        assert idle.trouble is None
        assert isinstance(events[-1], ReceiveRecovered)
        told = len(events)
        await boxes[1].send(2)
        await anyio.sleep(3_600)
        assert (idle.in_flight, len(events)) == (0, told)
        boxes[1].always("claim", work)
        await anyio.sleep(7_200)
        assert idle.in_flight == 1
        await stop_all(loops)
    assert places(capacity) == 1
