"""A loop that is paused takes no new work, keeps what it has, and takes up again."""

from __future__ import annotations

import anyio
import pytest

from mainspring import InMemoryMailbox, LoopGroup, MailboxConnectionError, MainLoop
from support import FaultyMailbox, background, fail, hang, settled, shielded, slow
from support import work as as_usual

pytestmark = pytest.mark.anyio


class Work:
    """A handler that waits to be let go, and who is inside of it."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.done: list[int] = []
        self.go = anyio.Event()

    async def __call__(self, job: int) -> None:
        self.begun.append(job)
        await self.go.wait()
        self.done.append(job)


async def test_a_paused_loop_takes_nothing_and_a_resumed_one_goes_on():
    mailbox = InMemoryMailbox()
    work = Work()
    work.go.set()
    loop = MainLoop(mailbox, work, body=int, concurrency=2)
    with anyio.fail_after(10):
        async with background(loop):
            await mailbox.send(1)
            await settled(mailbox)
            loop.pause()
            await loop.wait_paused()
            await mailbox.send_many([2, 3, 4])
            for _ in range(20):
                await anyio.lowlevel.checkpoint()
            assert (await mailbox.counts()).pending == 3
            assert loop.paused
            loop.resume()
            await settled(mailbox)
    assert work.done == [1, 2, 3, 4]
    assert not loop.paused


async def test_a_running_handler_goes_on_and_its_lease_is_kept(virtual_clock):
    mailbox = FaultyMailbox()
    work = Work()
    loop = MainLoop(mailbox, work, body=int, visibility_timeout=30)
    async with background(loop):
        await mailbox.send(1)
        await anyio.sleep(1)
        loop.pause()
        await loop.wait_paused()
        await mailbox.send(2)
        await anyio.sleep(300)  # ten leases
        assert loop.heartbeat.elapsed() <= 10
        assert (await mailbox.counts()).in_flight == 1
        work.go.set()
        await anyio.sleep(1)
        assert work.done == [1]
        assert (await mailbox.counts()).pending == 1
        loop.resume()
        await settled(mailbox)
    assert (work.begun, work.done) == ([1, 2], [1, 2])


async def test_what_was_claimed_and_not_begun_is_given_back_at_once_and_uncharged(virtual_clock):
    """A claim that is under way when the pause comes cannot be taken back: its messages are."""
    mailbox = FaultyMailbox()
    work = Work()
    work.go.set()
    mailbox.next("claim", shielded(slow(5)))
    await mailbox.send_many(range(3))
    loop = MainLoop(mailbox, work, body=int, concurrency=3)
    async with background(loop):
        await anyio.sleep(1)
        loop.pause()
        await loop.wait_paused()
        assert virtual_clock.now == 5
        counts = await mailbox.counts()
        assert (counts.pending, counts.in_flight) == (3, 0)
        assert work.begun == []
        [first] = await mailbox.receive()
        assert (first.body, first.attempt) == (0, 1)
        await first.release()
        loop.resume()
        await settled(mailbox)
    assert sorted(work.done) == [0, 1, 2]


async def test_a_pause_that_is_over_before_it_came_to_anything_loses_nothing(virtual_clock):
    mailbox = FaultyMailbox()
    work = Work()
    work.go.set()
    mailbox.next("claim", shielded(slow(5)))
    mailbox.always("claim", shielded(as_usual))
    await mailbox.send_many(range(3))
    loop = MainLoop(mailbox, work, body=int, concurrency=3, wait_time_seconds=1000)
    async with background(loop):
        await anyio.sleep(1)
        loop.pause()
        loop.resume()
        await loop.wait_paused()
        await anyio.sleep(10)
        assert (await mailbox.counts()).settled == 3
        for _ in range(5):
            loop.pause()
            loop.resume()
            loop.pause()
            await loop.wait_paused()
            loop.resume()
        await mailbox.send(4)
        await settled(mailbox)


async def test_a_pause_that_is_over_between_a_claim_and_its_return_leaves_nobody_waiting():
    """What was claimed while it was paused is handed back, or begun: in whatever turn the resumption comes."""
    mailbox = FaultyMailbox()
    work = Work()
    work.go.set()
    loop = MainLoop(mailbox, work, body=int, concurrency=3, wait_time_seconds=1000)

    async def claim_and_resume(claim):
        claimed = await claim()
        loop.pause()
        for turns in range(4):
            tasks.start_soon(resume_after, turns)
        return claimed

    async def resume_after(turns):
        for _ in range(turns):
            await anyio.lowlevel.checkpoint()
        loop.resume()

    async with anyio.create_task_group() as tasks, background(loop):
        await anyio.wait_all_tasks_blocked()
        mailbox.always("claim", claim_and_resume)
        for job in range(0, 60, 3):
            await mailbox.send_many([job, job + 1, job + 2])
            await settled(mailbox)
    assert sorted(work.done) == list(range(60))


async def test_a_store_that_does_not_answer_does_not_hold_up_the_pause_for_ever(virtual_clock):
    mailbox = FaultyMailbox()
    mailbox.always("settle", hang)
    mailbox.next("claim", shielded(slow(1)))
    await mailbox.send_many(range(2))
    loop = MainLoop(mailbox, Work(), body=int, concurrency=2)
    async with background(loop):
        await anyio.sleep(0.5)
        loop.pause()
        await loop.wait_paused()
        assert virtual_clock.now <= 7
        assert loop.in_flight == 0


async def test_paused_before_the_run_it_begins_paused_and_can_be_shut_down(virtual_clock):
    mailbox = InMemoryMailbox()
    await mailbox.send(1)
    loop = MainLoop(mailbox, Work(), body=int)
    loop.pause()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(loop.run)
        await anyio.sleep(100)
        assert (await mailbox.counts()).pending == 1
        assert await loop.shutdown()
        assert virtual_clock.now == 100
    assert loop.paused  # it holds for the runs to come


async def test_a_pause_ends_the_wait_after_a_failed_receive(virtual_clock):
    mailbox = FaultyMailbox()
    mailbox.always("claim", fail(MailboxConnectionError("away")))
    loop = MainLoop(mailbox, Work(), body=int)
    async with background(loop):
        await anyio.sleep(500)
        loop.pause()
        await loop.wait_paused()
        assert virtual_clock.now == 500
        tries = len(mailbox.times("claim"))
        await anyio.sleep(500)
        assert len(mailbox.times("claim")) == tries


async def test_counted_receives_are_counted_through_a_pause(virtual_clock):
    mailbox = FaultyMailbox()
    work = Work()
    work.go.set()
    loop = MainLoop(mailbox, work, body=int, wait_time_seconds=10)
    async with anyio.create_task_group() as tasks:

        async def run():
            await loop.run(max_iterations=3)

        tasks.start_soon(run)
        await anyio.sleep(15)  # in the second one
        loop.pause()
        await anyio.sleep(100)
        loop.resume()
    assert len(mailbox.times("claim")) == 3
    assert virtual_clock.now == 125


async def test_a_paused_loop_leaves_the_slots_of_its_group_to_others(virtual_clock):
    boxes = [InMemoryMailbox(str(n)) for n in range(2)]
    work = Work()
    work.go.set()
    loops = [MainLoop(box, work, body=int, name=box.name) for box in boxes]
    async with LoopGroup(loops, max_concurrency=1):
        await anyio.sleep(1)
        loops[0].pause()
        await loops[0].wait_paused()
        now = virtual_clock.now
        await boxes[1].send(1)
        await settled(boxes[1])
        assert virtual_clock.now == pytest.approx(now, abs=0.1)


@pytest.mark.parametrize("then", [["pause"], ["pause", "resume"], ["resume"], ["pause", "resume", "pause", "resume"]])
@pytest.mark.parametrize("paused", [False, True])
async def test_after_a_stop_a_pause_or_a_resume_begins_nothing(virtual_clock, paused, then):
    """A claim that is under way at the stop comes back after it: what it brings is given back all the same."""
    mailbox = FaultyMailbox()
    work = Work()
    await mailbox.send_many(range(4))
    loop = MainLoop(mailbox, work, body=int, concurrency=3, wait_time_seconds=1000)
    with anyio.fail_after(100):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(loop.run)
            await anyio.sleep(1)
            assert len(work.begun) == 3
            await mailbox.send_many([7, 8])
            mailbox.always("claim", shielded(slow(5)))
            work.go.set()  # three are done, and the next claim is on its way
            await anyio.sleep(1)
            work.go = anyio.Event()
            if paused:
                loop.pause()
            loop.request_shutdown()
            await anyio.sleep(1)
            for ask in then:
                getattr(loop, ask)()
                await anyio.sleep(0.1)
            await loop.wait_paused()
    assert sorted(work.done) == [0, 1, 2]
    assert (await mailbox.counts()).pending == 3
    assert virtual_clock.now <= 10
