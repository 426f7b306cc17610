"""The concurrency of a loop that runs can be changed: more handlers begin at once, and fewer as they end."""

from __future__ import annotations

import threading
import time
from functools import partial

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mainspring import (
    ConcurrencyRequest,
    InMemoryMailbox,
    LoopActor,
    LoopGroup,
    MainLoop,
    OffloadPool,
    Tasks,
)
from mainspring.errors import ConfigError, ControlRefusedError, LoopNotRunningError, OffloadClosedError
from mainspring.mailbox.backend import Capabilities
from mainspring.telemetry.metrics import GroupMetrics
from mainspring.testing import run_virtual
from support import FaultyMailbox, background, settled, shielded, slow
from worker.loop_support import quick, sleeper

BACKENDS = ("trio", "asyncio")


def virtually(test):
    """Run an async test in virtual time, on each of its event loops."""

    @pytest.mark.parametrize("backend", BACKENDS)
    def run(backend, mainspring_seed):
        run_virtual(test, seed=mainspring_seed, backend=backend)

    run.__name__ = test.__name__
    run.__doc__ = test.__doc__
    return run


class Running:
    """A handler that takes ``seconds``, and what runs of it."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.running: list[int] = []
        self.begun: list[tuple[float, int]] = []

    async def __call__(self, job: int) -> None:
        self.running.append(job)
        self.begun.append((round(anyio.current_time(), 3), job))
        try:
            await anyio.sleep(self.seconds)
        finally:
            self.running.remove(job)


def slots_of(name: str) -> int:
    return sum(f"{name} slot" in (task.name or "") for task in anyio.get_running_tasks())


@virtually
async def test_more_begin_at_once():
    mailbox, work = InMemoryMailbox(), Running(100)
    await mailbox.send_many(range(10))
    began = anyio.current_time()
    async with background(MainLoop(mailbox, work, body=int, concurrency=2)) as loop:
        await anyio.sleep(5)
        assert work.running == [0, 1]
        loop.set_concurrency(6)
        await anyio.sleep(1)
        assert (work.running, loop.concurrency) == ([0, 1, 2, 3, 4, 5], 6)
        assert {at for at, job in work.begun if job >= 2} == {round(began + 5, 3)}
        loop.set_concurrency(6)
        await anyio.sleep(1)
        assert loop.in_flight == 6


@virtually
async def test_with_fewer_those_that_run_go_on_and_none_begins_before_they_are_fewer():
    mailbox, work = InMemoryMailbox(), Running(10)
    await mailbox.send_many(range(8))
    async with background(MainLoop(mailbox, work, body=int, concurrency=4)) as loop:
        await anyio.sleep(1)
        loop.set_concurrency(1)
        await anyio.sleep(8)
        assert work.running == [0, 1, 2, 3]
        await anyio.sleep(2)
        assert work.running == [4]
        await anyio.sleep(10)
        assert work.running == [5]
        assert slots_of(loop.name) == 1
        loop.set_concurrency(3)
        await anyio.sleep(1)
        assert work.running == [5, 6, 7]
        await settled(mailbox, within=100)
    assert loop.outcomes == {"acknowledged": 8}


@virtually
async def test_slots_that_are_too_many_end_though_no_message_comes():
    mailbox = InMemoryMailbox()
    await mailbox.send_many(range(20))
    async with background(MainLoop(mailbox, sleeper(1), concurrency=20)) as loop:
        await settled(mailbox)
        assert slots_of(loop.name) == 20
        loop.set_concurrency(3)
        await anyio.sleep(1)
        assert slots_of(loop.name) == 3
        await mailbox.send_many(range(20))
        await settled(mailbox)
        assert slots_of(loop.name) == 3


@virtually
async def test_what_was_claimed_ahead_goes_back_uncharged_and_in_order():
    mailbox, work = InMemoryMailbox(), Running(0.002)
    await mailbox.send_many(range(2_000))
    async with background(MainLoop(mailbox, work, body=int, concurrency=4)) as loop:
        await anyio.sleep(0.5)
        assert loop.in_flight > 50
        work.seconds = 60
        await anyio.sleep(0.003)
        assert loop.in_flight > 50
        loop.set_concurrency(2)
        await anyio.sleep(0)
        await anyio.sleep(0.001)
        assert loop.in_flight == len(work.running) == 4
        [first] = await mailbox.receive()
        assert (first.body, first.attempt) == (max(work.running) + 1, 1)
        await first.release()


@pytest.mark.parametrize("joins", [False, True])
def test_a_claim_that_was_out_as_it_was_lowered_keeps_what_can_begin(joins):
    async def main():
        mailbox, work = FaultyMailbox(joins=joins), Running(100)
        if joins:
            mailbox.backend.capabilities = Capabilities(ordered=True, joined_acks=True)
        mailbox.next("claim", shielded(slow(5)))
        await mailbox.send_many(range(10))
        async with background(MainLoop(mailbox, work, body=int, concurrency=10)) as loop:
            await anyio.sleep(1)
            loop.set_concurrency(3)
            await anyio.sleep(4.01)
            assert sorted(work.running) == [0, 1, 2]
            counts = await mailbox.counts()
            assert (counts.in_flight, counts.pending) == (3, 7)
            [first] = await mailbox.receive()
            assert (first.body, first.attempt) == (3, 1)
            await first.release()

    run_virtual(main)


@virtually
async def test_during_a_pause_and_a_drain_nothing_begins():
    mailbox, work = InMemoryMailbox(), Running(10)
    await mailbox.send_many(range(8))
    async with background(MainLoop(mailbox, work, body=int, concurrency=2)) as loop:
        await anyio.sleep(1)
        loop.pause()
        loop.set_concurrency(4)
        await anyio.sleep(1)
        assert work.running == [0, 1]
        loop.resume()
        await anyio.sleep(1)
        assert work.running == [0, 1, 2, 3]
        loop.request_shutdown()
        loop.set_concurrency(1)
        await anyio.sleep(1)
        assert work.running == [0, 1, 2, 3]
        loop.set_concurrency(8)
        while loop.running:
            await anyio.sleep(1)
    assert loop.outcomes == {"acknowledged": 4}
    assert (await mailbox.counts()).pending == 4


@virtually
async def test_it_holds_for_later_runs_and_may_be_set_before_the_first():
    mailbox, work = InMemoryMailbox(), Running(10)
    loop = MainLoop(mailbox, work, body=int)
    loop.set_concurrency(3)
    for _ in range(2):
        await mailbox.send_many(range(6))
        async with background(loop):
            await anyio.sleep(1)
            assert len(work.running) == loop.concurrency == 3
            await settled(mailbox, within=100)


@virtually
async def test_the_capacity_of_a_group_bounds_it():
    mailbox, work = InMemoryMailbox(), Running(10)
    await mailbox.send_many(range(8))
    loop = MainLoop(mailbox, work, body=int)
    async with LoopGroup([loop], max_concurrency=3, guardian=False) as group:
        await anyio.sleep(1)
        for concurrency, running in ((8, 3), (2, 3)):
            loop.set_concurrency(concurrency)
            await anyio.sleep(1)
            assert len(work.running) == running
        await anyio.sleep(8)
        assert len(work.running) == 2
        assert group.status().loops[0].concurrency == 2


@virtually
async def test_it_is_seen_in_the_status_the_metrics_and_the_list_of_workers():
    async with InMemoryMailbox() as mailbox:
        loop = MainLoop(mailbox, quick, name="jobs")
        async with LoopGroup([loop], guardian=False) as group:
            await anyio.sleep(1)
            await group.actors[0].ask(ConcurrencyRequest(concurrency=7))
            assert group.status().loops[0].concurrency == 7
            assert b'mainspring_concurrency{loop="jobs"} 7.0' in GroupMetrics(group).render(())[0]
            await anyio.sleep(1.1)
            assert [each.concurrency for each in await mailbox.workers()] == [7]


@virtually
async def test_a_request_that_cannot_be_served_says_why():
    class Other:
        running = False
        heartbeat = None

        async def run(self) -> None:
            await anyio.sleep_forever()

        async def shutdown(self) -> None: ...

    mailbox = InMemoryMailbox()
    group = LoopGroup([MainLoop(mailbox, quick, name="jobs"), LoopActor(Other())], guardian=False)
    async with group:
        await anyio.sleep(1)
        jobs, other = group.actors
        with pytest.raises(ConfigError, match="loop 'jobs': concurrency must be a whole number from 1, not 0"):
            await jobs.ask(ConcurrencyRequest(concurrency=0))
        with pytest.raises(ControlRefusedError, match="is no MainLoop, and has no concurrency"):
            await other.ask(ConcurrencyRequest(concurrency=2))
        assert jobs.loop.concurrency == 1
        await group.shutdown(timeout=0)
    with pytest.raises(LoopNotRunningError):
        await jobs.ask(ConcurrencyRequest(concurrency=2))


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "2", None, True])
def test_a_wrong_number_is_refused_and_changes_nothing(wrong):
    loop = MainLoop(InMemoryMailbox(), quick, name="jobs", concurrency=2)
    with pytest.raises(ConfigError, match="loop 'jobs': concurrency must be a whole number from 1, not "):
        loop.set_concurrency(wrong)
    assert loop.concurrency == 2


@pytest.mark.anyio
@pytest.mark.every_loop
async def test_any_thread_may_set_it():
    mailbox, work = InMemoryMailbox(), Running(60)
    await mailbox.send_many(range(8))
    async with background(MainLoop(mailbox, work, body=int)) as loop:
        thread = threading.Thread(target=loop.set_concurrency, args=(5,))
        thread.start()
        with anyio.fail_after(10):
            while len(work.running) < 5:
                await anyio.sleep(0.01)
        thread.join()
        loop.cancel_work()
        loop.request_shutdown()


@pytest.mark.anyio
@pytest.mark.every_loop
@pytest.mark.parametrize("before", [False, True], ids=["in the run", "before it"])
@pytest.mark.parametrize("by", ["loop", "tasks"])
async def test_the_threads_of_plain_functions_follow(by, before):
    """All five are inside at once, or the barrier breaks; lowered to one, none is inside with another."""
    barrier, inside, most = threading.Barrier(5, timeout=10), [0], [0]
    lock = threading.Lock()

    def meet(job: int) -> None:
        if job < 5:
            barrier.wait()
            return
        with lock:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
        time.sleep(0.005)
        with lock:
            inside[0] -= 1

    mailbox = InMemoryMailbox()
    if by == "tasks":
        tasks = Tasks(mailbox)
        send = tasks.task(meet).send
        loop = tasks.loop(concurrency=1)
    else:
        send = mailbox.send
        loop = MainLoop(mailbox, meet)
    if before:
        loop.set_concurrency(5)
    async with background(loop):
        if not before:
            loop.set_concurrency(5)
        for job in range(5):
            await send(job)
        await settled(mailbox)
        loop.set_concurrency(1)
        for job in range(5, 12):
            await send(job)
        await settled(mailbox)
    assert most == [1]
    assert loop.outcomes["acknowledged"] == 12


@pytest.mark.anyio
async def test_a_pool_that_was_given_stays_as_it_is():
    async with OffloadPool("thread", workers=3) as pool:
        loop = MainLoop(InMemoryMailbox(), lambda job: None, body=int, name="jobs", offload=pool)
        async with background(loop):
            await anyio.sleep(0)
            loop.set_concurrency(7)
            assert pool.workers == 3


@pytest.mark.anyio
@pytest.mark.every_loop
async def test_the_workers_of_a_pool_can_be_changed():
    running, go, lock = [0], threading.Event(), threading.Lock()

    def work() -> None:
        with lock:
            running[0] += 1
        go.wait(10)

    async with OffloadPool("thread", workers=1) as pool, anyio.create_task_group() as calls:
        for _ in range(4):
            calls.start_soon(pool.run, work)
        with anyio.fail_after(10):
            for workers in (1, 3):
                pool.set_workers(workers)
                while running[0] < workers:
                    await anyio.sleep(0.005)
        assert (pool.workers, pool.in_flight, pool.queued) == (3, 3, 1)
        with pytest.raises(ConfigError, match="workers must be a whole number from 1, not 0"):
            pool.set_workers(0)

        def elsewhere() -> None:
            with pytest.raises(OffloadClosedError, match="another event loop"):
                pool.set_workers(4)

        await anyio.to_thread.run_sync(elsewhere)
        assert pool.workers == 3
        go.set()
    pool.set_workers(2)
    async with pool:
        assert await pool.run(int, "7") == 7


@virtually
async def test_batches_follow():
    """A batch is begun when every slot waits for it: five as it was, then two, without a wait for more."""
    sizes: list[tuple[float, int]] = []
    tasks = Tasks(InMemoryMailbox())

    @tasks.task(batch=100, batch_wait=50)
    async def store(items: list[int]) -> None:
        sizes.append((round(anyio.current_time() - began), len(items)))

    began = anyio.current_time()
    async with tasks, background(tasks.loop(concurrency=5)) as loop:
        await store.send_many([(number,) for number in range(5)])
        await anyio.sleep(1)
        await store.send_many([(number,) for number in range(3)])
        await anyio.sleep(1)
        loop.set_concurrency(2)  # three wait
        await anyio.sleep(1)
        await store.send_many([(number,) for number in range(4)])
        await settled(tasks.mailbox, within=100)
    assert sizes == [(0, 5), (2, 3), (3, 2), (3, 2)]


ACTS = st.one_of(
    st.tuples(st.just("concurrency"), st.integers(1, 12)),
    st.tuples(st.just("send"), st.integers(1, 30)),
    st.tuples(st.just("sleep"), st.sampled_from([0.0, 0.001, 0.03, 0.2, 3.0])),
    st.tuples(st.just("seconds"), st.sampled_from([0.0, 0.001, 0.02, 1.0])),
    st.tuples(st.just("pause"), st.booleans()),
)


@given(st.lists(ACTS, max_size=25), st.sampled_from(BACKENDS), st.booleans(), st.booleans(), st.integers(0, 1_000))
def test_whatever_is_set_no_more_begin_and_none_is_lost_or_charged(acts, backend, is_ordered, is_shared, seed):
    run_virtual(partial(_act, acts, is_ordered, is_shared), seed=seed, backend=backend)


async def _act(acts, is_ordered, is_shared):
    mailbox = FaultyMailbox(joins=is_ordered)
    if is_ordered:
        mailbox.backend.capabilities = Capabilities(ordered=True, joined_acks=True)
    sent, done, running, seconds, too_many = 0, [], 0, 0.001, []

    async def handle(job: int, ctx) -> None:
        nonlocal running
        running += 1
        if running > loop.concurrency or ctx.attempt != 1:
            too_many.append((job, running, loop.concurrency, ctx.attempt))
        try:
            await anyio.sleep(seconds)
        finally:
            running -= 1
        done.append(job)

    loop = MainLoop(mailbox, handle, body=int, concurrency=3)
    group = LoopGroup([loop], max_concurrency=8 if is_shared else None, guardian=False)
    async with group:
        for what, value in acts:
            if what == "concurrency":
                loop.set_concurrency(value)
            elif what == "send":
                await mailbox.send_many(range(sent, sent + value))
                sent += value
            elif what == "sleep":
                await anyio.sleep(value)
            elif what == "seconds":
                seconds = value
            else:
                (loop.pause if value else loop.resume)()
        loop.resume()
        with anyio.fail_after(500):
            while await mailbox.approximate_count():
                await anyio.sleep(0.1)
        assert slots_of(loop.name) <= loop.concurrency + 2
    assert (sorted(done), too_many) == (list(range(sent)), [])
