"""Plain functions as handlers: in threads, in processes, in a pool that loops share."""

from __future__ import annotations

import os
import threading
import time

import anyio
import pytest

import offload_work
from mainspring import (
    Context,
    DeadLetterPolicy,
    Deadline,
    InMemoryMailbox,
    LeasePolicy,
    LoopGroup,
    MainLoop,
    OffloadPool,
    RetryPolicy,
)
from mainspring.errors import ConfigError, HandlerStalledError
from offload_support import HeldStart, ended, is_there, told
from support import background, settled

pytestmark = [pytest.mark.anyio, pytest.mark.own_time(2)]

ONCE = DeadLetterPolicy(max_attempts=1)


@pytest.fixture
def held_start(tmp_path, monkeypatch):
    return HeldStart(tmp_path, monkeypatch)


async def in_hand(path) -> int:
    """The process that has begun the job."""
    (pid,) = await told(path)
    return pid


async def test_a_handler_runs_in_processes_that_go_on_from_job_to_job():
    box = InMemoryMailbox()
    async with box, background(MainLoop(box, offload_work.shout, offload="process")) as loop:
        replies = [await box.request(word, timeout=30) for word in ("one", "two")]
        assert loop.outcomes == {"acknowledged": 2}
    (first, pid), (second, other) = (reply.split() for reply in replies)
    assert (first, second) == ("ONE", "TWO")
    assert pid == other != str(os.getpid())
    assert not is_there(int(pid)), "the pool ends with the run"


async def test_what_a_handler_raises_there_means_what_it_means_here():
    box = InMemoryMailbox()
    async with background(MainLoop(box, offload_work.reject, offload="process")):
        await box.send("thing")
        await settled(box)
        (dead,) = await box.dead_letters()
        assert (dead.error_type, dead.error) == ("Reject", "no thing")
        assert 'raise Reject(f"no {job}")' in dead.traceback


async def test_a_process_that_dies_of_its_job_is_a_failed_attempt():
    box = InMemoryMailbox()
    async with background(MainLoop(box, offload_work.die, offload="process", dead_letter=ONCE)):
        await box.send("poison")
        await settled(box)
        (dead,) = await box.dead_letters()
        assert dead.error_type == "OffloadWorkerDiedError"
        assert "the worker process of die was killed by SIGKILL" in dead.error


async def test_work_that_has_not_run_there_is_a_failed_attempt_and_retried():
    box = InMemoryMailbox()
    policies = {"retry": RetryPolicy(initial_delay=0.01), "dead_letter": DeadLetterPolicy(max_attempts=2)}
    async with background(MainLoop(box, offload_work.leads_to_async, body=int, offload="process", **policies)) as loop:
        await box.send(1)
        await settled(box)
        (dead,) = await box.dead_letters()
        assert (dead.error_type, dead.attempt) == ("TaskExitError", 2)
    assert loop.outcomes == {"retried": 1, "dead_lettered": 1}


async def test_context_variables_of_a_handler_there_are_not_seen_by_the_next():
    box = InMemoryMailbox()
    async with box, background(MainLoop(box, offload_work.exchange_tenant, offload="process")):
        assert [await box.request(name, timeout=30) for name in ("a", "b")] == ["none", "none"]


@pytest.mark.parametrize("kind", ["thread", "process"])
@pytest.mark.parametrize("fn", [offload_work.be_cancelled_in_a_loop_of_its_own, offload_work.be_cancelled_as_a_future])
async def test_a_cancellation_that_arises_in_a_handler_is_a_failed_attempt(kind, fn):
    box = InMemoryMailbox()
    async with background(MainLoop(box, fn, body=str, offload=kind, dead_letter=ONCE)) as loop:
        await box.send("job")
        await settled(box)
        (dead,) = await box.dead_letters()
        assert dead.error_type == "TaskExitError"
        assert f"{fn.__name__} raised a spurious cancellation" in dead.error
        assert loop.outcomes == {"dead_lettered": 1}


@pytest.mark.slow
async def test_at_its_timeout_the_process_is_killed_and_the_attempt_has_failed(tmp_path):
    box, path, pool = InMemoryMailbox(), tmp_path / "pid", OffloadPool("process", workers=1)
    loop = MainLoop(box, offload_work.hang, offload=pool, handler_timeout=1, dead_letter=ONCE)
    async with pool, background(loop):
        await box.send(str(path))
        pid = await in_hand(path)
        await settled(box)
        assert not is_there(pid), "the message is settled when its process is gone, and not before"
        (dead,) = await box.dead_letters()
        assert dead.error_type == "HandlerTimeoutError"


async def test_a_stalled_process_is_killed(tmp_path):
    box, path = InMemoryMailbox(), tmp_path / "pid"
    async with background(MainLoop(box, offload_work.hang, offload="process", dead_letter=ONCE)) as loop:
        await box.send(str(path))
        pid = await in_hand(path)
        (run,) = loop.runs
        run.stall(HandlerStalledError("no beat"))
        await settled(box)
        assert not is_there(pid)
        (dead,) = await box.dead_letters()
        assert dead.error_type == "HandlerStalledError"


async def test_a_lost_lease_kills_and_settles_nothing(tmp_path):
    box, path = InMemoryMailbox(), tmp_path / "pid"
    async with background(MainLoop(box, offload_work.hang_the_first_time, offload="process")) as loop:
        message = await box.send(str(path))
        pid = await in_hand(path)
        await box.cancel(message)
        await ended(pid)
        with anyio.fail_after(60):
            while not loop.outcomes:
                await anyio.sleep(0.005)
        assert loop.outcomes == {"cancelled": 1}


async def test_a_shutdown_kills_and_gives_the_message_back_uncharged(tmp_path):
    box, path = InMemoryMailbox(), tmp_path / "pid"
    loop = MainLoop(box, offload_work.hang_the_first_time, offload="process")
    await box.send(str(path))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(loop.run)
        pid = await in_hand(path)
        assert not await loop.shutdown(timeout=0.01)
        assert not is_there(pid)
    assert loop.outcomes == {"released": 1}
    async with background(loop):  # runs again, with processes of its own
        await settled(box)
        assert loop.outcomes == {"released": 1, "acknowledged": 1}


async def test_a_cancelled_run_kills_and_gives_the_message_back(tmp_path):
    box, path = InMemoryMailbox(), tmp_path / "pid"
    await box.send(str(path))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(MainLoop(box, offload_work.hang, offload="process").run)
        pid = await in_hand(path)
        tasks.cancel_scope.cancel()
    assert not is_there(pid)
    (message,) = await box.receive()
    assert (message.attempt, message.delivery_count) == (1, 2)


async def test_a_shutdown_does_not_wait_for_a_process_that_is_still_starting(held_start, caplog):
    box = InMemoryMailbox()
    loop = MainLoop(box, offload_work.shout, offload="process")
    await box.send("word")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(loop.run)
        pid = await held_start.begun()
        assert not await loop.shutdown(timeout=0.01)
        assert not is_there(pid)
    assert "not waited for" not in caplog.text, "nothing was waited for in vain"
    assert loop.outcomes == {"released": 1}
    (message,) = await box.receive()
    assert (message.attempt, message.delivery_count) == (1, 2)


async def waits(run):
    """Wait until the event loop has heard that a worker is being started."""
    with anyio.fail_after(60):
        while not run.waits:
            await anyio.sleep(0.005)


async def test_who_stalls_while_its_process_is_still_starting_goes_back_uncharged(held_start):
    box, pool = InMemoryMailbox(), OffloadPool("process", workers=1)
    loop = MainLoop(box, offload_work.shout, offload=pool, dead_letter=ONCE)
    async with box, pool, background(loop):
        reply = await box.submit("word")
        pid = await held_start.begun()
        (run,) = loop.runs
        await waits(run)
        run.stall(HandlerStalledError("no beat"))
        with anyio.fail_after(60):
            while loop.outcomes != {"released": 1}:
                await anyio.sleep(0.005)
        held_start.let_go()
        assert await reply.result(timeout=30) == f"WORD {pid}", "the process is for the next one"
        assert await box.dead_letters() == []


@pytest.mark.slow
@pytest.mark.loops("asyncio", "trio")
async def test_the_start_of_a_process_does_not_use_up_the_timeout_of_its_handler(held_start):
    box = InMemoryMailbox()
    loop = MainLoop(box, offload_work.shout, offload="process", handler_timeout=2, dead_letter=ONCE)
    async with box, background(loop):
        reply = await box.submit("word")
        pid = await held_start.begun()
        (run,) = loop.runs
        await waits(run)
        await anyio.sleep(2.1)
        held_start.let_go()
        assert await reply.result(timeout=30) == f"WORD {pid}"
        assert not run.waits
        assert loop.outcomes == {"acknowledged": 1}


async def test_the_timeout_of_a_handler_goes_on_when_its_process_has_started(held_start, tmp_path):
    box, path = InMemoryMailbox(), tmp_path / "pid"
    loop = MainLoop(box, offload_work.hang, offload="process", handler_timeout=0.5, dead_letter=ONCE)
    async with box, background(loop):
        await box.send(str(path))
        await held_start.begun()
        (run,) = loop.runs
        await waits(run)
        held_start.let_go()
        await settled(box)
        (dead,) = await box.dead_letters()
        assert dead.error_type == "HandlerTimeoutError"


async def test_loops_share_a_pool_which_closes_with_the_last_of_them():
    boxes = [InMemoryMailbox(), InMemoryMailbox()]
    pool = OffloadPool("process", workers=1)
    loops = [MainLoop(box, offload_work.shout, name=f"loop {n}", offload=pool) for n, box in enumerate(boxes)]
    async with LoopGroup(loops):
        first, second = [(await box.request("a", timeout=30)).split()[1] for box in boxes]
        assert first == second
        await loops[0].shutdown()
        assert pool.is_open
        assert (await boxes[1].request("a", timeout=30)).split()[1] == first
    assert not pool.is_open


async def test_a_pool_of_the_users_stays_open_and_its_queue_limit_is_not_for_handlers():
    box, at_work, most, lock = InMemoryMailbox(), 0, 0, threading.Lock()
    ran = threading.Event()

    def work(job: int) -> None:
        nonlocal at_work, most
        with lock:
            at_work += 1
            most = max(most, at_work)
        ran.wait(0.02)
        with lock:
            at_work -= 1

    async with OffloadPool(workers=1, queue_limit=0) as pool:
        async with background(MainLoop(box, work, concurrency=4, offload=pool)) as loop:
            await box.send_many(list(range(8)))
            await settled(box)
            assert loop.outcomes == {"acknowledged": 8}
        assert pool.is_open
        assert most == 1


async def test_a_handler_cancelled_while_it_waits_for_a_worker_never_begins():
    box, began, release = InMemoryMailbox(), [], threading.Event()

    def work(job: int) -> None:
        began.append(job)
        assert release.wait(30)

    async with OffloadPool(workers=1) as pool:
        loop = MainLoop(box, work, concurrency=2, offload=pool)
        await box.send_many([1, 2])
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(loop.run)
            with anyio.fail_after(60):
                while not pool.queued:
                    await anyio.sleep(0.001)
            tasks.start_soon(lambda: loop.shutdown(timeout=0.01))
            with anyio.fail_after(60):
                while loop.outcomes != {"released": 1}:
                    await anyio.sleep(0.001)
            release.set()
    assert loop.outcomes == {"released": 1, "acknowledged": 1}
    assert len(began) == 1


async def test_who_waits_for_a_worker_does_not_use_up_its_timeout():
    """More handlers than workers, and a timeout that the queue takes longer than."""
    box, ran = InMemoryMailbox(), []

    def work(job: int) -> None:
        ran.append(job)
        time.sleep(0.06)

    async with OffloadPool(workers=1) as pool:
        loop = MainLoop(box, work, concurrency=6, offload=pool, handler_timeout=0.2, dead_letter=ONCE)
        async with background(loop):
            await box.send_many(range(6))
            await settled(box)
    assert (sorted(ran), await box.dead_letters()) == ([*range(6)], [])
    assert loop.outcomes == {"acknowledged": 6}


async def over(box: InMemoryMailbox) -> None:
    """Wait in virtual time until nothing is to be done."""
    with anyio.fail_after(100_000):
        while await box.approximate_count():
            await anyio.sleep(0.05 if anyio.current_time() < 110 else 10)


class BusyPool(OffloadPool):
    """A pool whose worker is free after so many seconds, in virtual time."""

    def __init__(self, *seconds: float) -> None:
        super().__init__(workers=1)
        self.seconds = list(seconds)

    async def run_to_the_end(self, fn, *args, waiting=None):
        waiting(True)
        await anyio.sleep(self.seconds.pop(0))
        waiting(False)
        await anyio.sleep(2)
        return await super().run_to_the_end(fn, *args)


@pytest.mark.parametrize(
    ("timeout", "outcome"), [(3, "acknowledged"), (1, "dead_lettered")], ids=["enough for the work", "too short for it"]
)
async def test_the_timeout_goes_on_when_there_is_a_worker(timeout, outcome, virtual_clock):
    box = InMemoryMailbox()
    loop = MainLoop(box, lambda job: None, body=int, offload=BusyPool(100), handler_timeout=timeout, dead_letter=ONCE)
    async with background(loop):
        await box.send(1)
        await over(box)
    assert loop.outcomes == {outcome: 1}
    assert virtual_clock.now == pytest.approx(100 + min(timeout, 2), abs=0.1)


async def test_the_deadline_of_a_message_passes_in_the_queue_too(virtual_clock):
    box = InMemoryMailbox()
    loop = MainLoop(box, lambda job: None, body=int, offload=BusyPool(100), handler_timeout=30)
    async with background(loop):
        await box.send(1, deadline=Deadline.after(50))
        await over(box)
    (dead,) = await box.dead_letters()
    assert dead.error_type == "DeadlineExceededError"
    assert virtual_clock.now == pytest.approx(50, abs=0.1)


async def test_who_waits_too_long_for_a_worker_goes_back_uncharged(virtual_clock):
    """A worker that never comes is no failure of the message; another process may have one."""
    box, attempts = InMemoryMailbox(), []

    def work(job: int, ctx: Context) -> None:
        attempts.append((ctx.attempt, ctx.message.delivery_count))

    lease = LeasePolicy(renew="on-beat")
    loop = MainLoop(box, work, offload=BusyPool(10_000, 10_000, 200), handler_timeout=5, dead_letter=ONCE, lease=lease)
    async with LoopGroup([loop], watchdog_threshold=300):
        await box.send(1)
        await over(box)
    assert loop.outcomes == {"released": 2, "acknowledged": 1}
    assert attempts == [(1, 3)]


async def test_a_thread_that_was_given_up_keeps_its_worker_of_the_loop():
    """A handler in a thread is never late: the loop waits for it."""
    box, release = InMemoryMailbox(), threading.Event()

    def work(job: int) -> None:
        assert release.wait(30)

    async with (
        OffloadPool(workers=2) as pool,
        background(MainLoop(box, work, handler_timeout=0.02, offload=pool)) as loop,
    ):
        await box.send(1)
        await anyio.sleep(0.2)
        assert (pool.in_flight, pool.late, loop.in_flight) == (1, 0, 1)
        release.set()
        await settled(box)
        assert loop.outcomes == {"acknowledged": 1}


# ------------------------------------------------------------------------------------------------------------ bad input


async def asynchronous(job: str) -> None: ...
def with_context(job: str, ctx: Context) -> None: ...
def alone(job: str) -> None: ...


@pytest.mark.parametrize(
    ("handler", "offload", "complaint"),
    [
        (asynchronous, "thread", "handler asynchronous is async and runs on the event loop; leave out offload="),
        (asynchronous, "process", "is async and runs on the event loop"),
        (
            with_context,
            "process",
            r"handler with_context takes ctx, which cannot be had in another process: take \(job\)",
        ),
        (alone, "fibre", "handler alone: offload must be 'thread', 'process' or an OffloadPool, not 'fibre'"),
        (alone, 3, "not 3"),
    ],
)
def test_what_cannot_be_is_refused_when_the_loop_is_made(handler, offload, complaint):
    with pytest.raises(ConfigError, match=complaint):
        MainLoop(InMemoryMailbox(), handler, offload=offload)


def test_a_handler_that_cannot_be_pickled_is_refused_when_the_loop_is_made():
    def local(job: str) -> None: ...

    with pytest.raises(ConfigError, match="handler local cannot be offloaded to a process"):
        MainLoop(InMemoryMailbox(), local, offload="process")
    with pytest.raises(ConfigError, match="takes ctx, which cannot be had in another process"):
        MainLoop(InMemoryMailbox(), with_context, offload=OffloadPool("process"))
    MainLoop(InMemoryMailbox(), local, offload="thread")
    MainLoop(InMemoryMailbox(), with_context, offload=OffloadPool())
