"""Requests to a group and its loops from another thread, a signal handler, and a second event loop."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import contextmanager
from itertools import count

import anyio
import pytest
from group_support import Foreign

from interrupts import Interruption
from mainspring import (
    ConfigError,
    ControlRefusedError,
    InMemoryMailbox,
    LoopGroup,
    LoopNotRunningError,
    LoopThread,
    MainLoop,
    threads,
    worker,
)
from mainspring.core.process import in_signal_handler


class Work:
    """A handler that notes what it is given, and stays in the job 0 until it is cancelled."""

    def __init__(self):
        self.begun = []

    async def __call__(self, job: int) -> None:
        self.begun.append(job)
        if job == 0:
            await anyio.sleep_forever()


def until(condition):
    for _ in range(20_000):
        if condition():
            return
        time.sleep(0.0005)
    raise AssertionError("it does not come")


@pytest.fixture
def thread(anyio_backend):
    backend, options = anyio_backend
    with LoopThread(backend=backend, backend_options=options, stop_timeout=1, cancel_grace=1) as thread:
        yield thread


@contextmanager
def group_in(thread, **options):
    """A group that runs in ``thread``, its mailbox and handler, and the ticket of its report."""
    mailbox, work = InMemoryMailbox(), Work()
    group = LoopGroup([MainLoop(mailbox, work, body=int, concurrency=2)], guardian=False, **options)
    report = group.start_in(thread)
    try:
        yield group, mailbox, work, report
    finally:
        report.wait_sync(20)


# ------------------------------------------------------------------------------------------------------ plain requests


@pytest.mark.parametrize(
    ("ask", "status"), [("request_shutdown", 0), ("request_drain", 0), ("force_shutdown", 128 + signal.SIGTERM)]
)
def test_a_plain_request_from_a_thread_ends_a_group_at_once(thread, ask, status):
    with group_in(thread) as (group, _, _, report):
        getattr(group, ask)()
    assert (report.wait_sync(0).exit_status, report.wait_sync(0).clean) == (status, status == 0)
    assert report.wait_sync(0).duration < 5


def test_a_forced_shutdown_from_a_thread_cancels_what_is_in_hand(thread):
    with group_in(thread) as (group, mailbox, work, report):
        mailbox.sync.send(0)
        until(lambda: work.begun)
        group.force_shutdown()
    assert [part.ending for part in report.wait_sync(0).parts] == ["cancelled"]


def test_one_that_comes_before_the_start_is_remembered(thread):
    mailbox = InMemoryMailbox()
    group = LoopGroup([MainLoop(mailbox, Work(), body=int)], guardian=False)
    group.request_shutdown("in advance")
    assert group.start_in(thread).wait_sync(20).reason == "in advance"
    with pytest.raises(ConfigError, match="signum must be a signal"):
        group.force_shutdown(1000)


def test_a_loop_of_a_group_is_paused_and_resumed_from_a_thread(thread):
    with group_in(thread) as (group, mailbox, work, _):
        [loop] = group.loops
        loop.pause()
        assert loop.paused
        mailbox.sync.send(1)
        anyio.run(loop.wait_paused)
        assert work.begun == []
        loop.resume()
        until(lambda: work.begun == [1])
        group.request_shutdown()


def test_of_pauses_and_resumes_from_many_threads_the_last_one_counts(thread):
    def switch():
        for _ in range(200):
            loop.pause()
            loop.resume()

    with group_in(thread) as (group, mailbox, work, _):
        [loop] = group.loops
        threads = [threading.Thread(target=switch) for _ in range(3)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        loop.resume()
        mailbox.sync.send(1)
        until(lambda: work.begun == [1])
        group.request_shutdown()


@pytest.mark.parametrize("end", ["request_shutdown", "stop_intake"])
def test_a_loop_by_itself_hears_of_its_end_from_a_thread(thread, end):
    async def run():
        async with mailbox:
            await loop.run()

    mailbox = InMemoryMailbox()
    loop = MainLoop(mailbox, Work(), body=int)
    ticket = thread.submit(run)
    until(lambda: loop.running)
    getattr(loop, end)()
    ticket.wait_sync(20)


def test_work_is_cancelled_and_a_run_aborted_from_a_thread(thread):
    with group_in(thread) as (group, mailbox, work, report):
        [loop] = group.loops
        loop.announce_shutdown()
        mailbox.sync.send(0)
        until(lambda: work.begun)
        loop.stop_intake()
        loop.cancel_work()
    assert report.wait_sync(0).reason == "all loops ended"
    with group_in(thread) as (group, mailbox, work, report):
        mailbox.sync.send(0)
        until(lambda: work.begun)
        group.loops[0].abort()


# ----------------------------------------------------------------------------------------- awaited on a second event loop


@pytest.mark.parametrize("second", ["asyncio", "trio"])
def test_a_second_event_loop_pauses_resumes_and_ends_a_group(thread, second):
    async def steer():
        with anyio.fail_after(20):
            await group.pause()
            assert group.loops[0].paused
            paused.append((await group.check_health())[0].paused)
            await group.resume()
            assert not group.loops[0].paused
            return await group.shutdown()

    paused = []
    with group_in(thread) as (group, *_):
        assert anyio.run(steer, backend=second) is True
    assert paused == [True]


def test_a_second_event_loop_drains_a_group_and_hears_how_it_went(thread):
    with group_in(thread) as (group, *_):
        assert anyio.run(group.drain) is True

    async def hurry():
        with anyio.fail_after(20):
            return await group.shutdown(timeout=0)

    with group_in(thread) as (group, mailbox, work, _):
        mailbox.sync.send(0)
        until(lambda: work.begun)
        assert anyio.run(hurry) is False


def test_a_second_event_loop_that_waits_no_longer_leaves_the_group_as_it_is(thread):
    async def impatient():
        with anyio.move_on_after(0.02):
            await group.drain()

    with group_in(thread) as (group, mailbox, work, report):
        mailbox.sync.send(0)
        until(lambda: work.begun)
        anyio.run(impatient)
        assert not report.is_ready
        group.force_shutdown()


def test_a_second_event_loop_ends_a_loop_and_its_work_in_time(thread):
    async def run():
        async with mailbox:
            await loop.run()

    async def end():
        with anyio.fail_after(20):
            loop.pause()
            await loop.wait_paused()
            return await loop.shutdown(timeout=0)

    mailbox, work = InMemoryMailbox(), Work()
    loop = MainLoop(mailbox, work, body=int)
    ticket = thread.submit(run)
    until(lambda: loop.running)
    mailbox.sync.send(0)
    until(lambda: work.begun)
    assert anyio.run(end) is False
    ticket.wait_sync(20)


def test_what_cannot_be_done_is_refused_there_before_anything_has_changed(thread):
    foreign = Foreign(name="foreign")
    group = LoopGroup([MainLoop(InMemoryMailbox(), Work(), body=int), foreign], guardian=False)

    with pytest.raises(LoopNotRunningError, match="not running"):
        anyio.run(group.pause)
    report = group.start_in(thread)
    with pytest.raises(ControlRefusedError, match="'foreign' has no plain methods"):
        anyio.run(group.pause)
    assert not group.loops[0].paused
    with pytest.raises(ConfigError, match="another thread"):
        anyio.run(group.refresh_checks)
    assert anyio.run(group.shutdown) is True
    report.wait_sync(20)
    with pytest.raises(LoopNotRunningError):
        anyio.run(group.resume)


# ------------------------------------------------------------------------------------------------------ signal handlers


@contextmanager
def handling(fn):
    """SIGUSR1 has ``fn()`` called while the block runs."""
    before = signal.signal(signal.SIGUSR1, lambda *_: fn())
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_signal_handler_ends_a_group_of_the_main_thread_that_sleeps(anyio_backend):
    async def run():
        with anyio.fail_after(20):
            return await group.run(install_signals=False)

    def kill():
        until(lambda: group.running and group.loops[0].running)
        os.kill(os.getpid(), signal.SIGUSR1)

    group = LoopGroup([MainLoop(InMemoryMailbox(), Work(), body=int)], guardian=False)
    backend, options = anyio_backend
    killer = threading.Thread(target=kill)
    with handling(lambda: group.request_shutdown("SIGUSR1")):
        killer.start()
        report = anyio.run(run, backend=backend, backend_options=options)
    killer.join()
    assert (report.reason, report.exit_status) == ("SIGUSR1", 0)


def test_a_signal_handler_that_interrupts_a_task_acts_behind_it(anyio_backend):
    """What the task is in the midst of comes to its end first."""

    async def main():
        mailbox = InMemoryMailbox()
        loop = MainLoop(mailbox, Work(), body=int)
        async with loop:
            with handling(lambda: (inside.append(in_signal_handler()), loop.request_shutdown())):
                signal.raise_signal(signal.SIGUSR1)
            inside.append(in_signal_handler())
            with anyio.fail_after(20):
                while loop.running:
                    await anyio.sleep(0)

    inside = []
    backend, options = anyio_backend
    anyio.run(main, backend=backend, backend_options=options)
    assert inside == [True, False]


def test_a_signal_handler_may_ask_wherever_it_interrupts_the_same_request(anyio_backend):
    async def main():
        for line in count():
            loop = MainLoop(InMemoryMailbox(), Work(), body=int)
            loops.append(loop)
            async with loop:
                with Interruption((worker, threads), line, raise_signal) as one:
                    loop.pause()
                    loop.resume()
                    loop.request_shutdown()
                with anyio.fail_after(20):
                    await loop.wait_paused()
                    while loop.running:
                        await anyio.sleep(0)
            if not one.happened:
                break
        return line

    def raise_signal():
        signal.raise_signal(signal.SIGUSR1)

    def handler():
        for ask in (loops[-1].resume, loops[-1].pause, loops[-1].request_shutdown):
            ask()

    loops = []
    backend, options = anyio_backend
    with handling(handler):
        assert anyio.run(main, backend=backend, backend_options=options) > 10
