"""What may be called from a signal handler: it works wherever the handler comes in, in the midst of the same call among it."""

from __future__ import annotations

import os
import signal
import threading
from functools import partial

import anyio
import pytest

from interrupts import Interruption
from mainspring import Heartbeat, LoopThread, ShutdownCoordinator, runtime, threads
from stopwatch import Stopwatch

pytestmark = pytest.mark.every_loop

PATIENCE = 60


def test_a_post_and_a_submit_wherever_they_interrupt_each_other(anyio_backend):
    backend, options = anyio_backend
    called, tickets, posted = [], [], 0

    async def task() -> None:
        called.append("task")

    def handler() -> None:
        assert thread.post(lambda: called.append("post"))
        tickets.append(thread.submit(task))

    with LoopThread(backend=backend, backend_options=options) as thread:
        for line in range(1000):
            with Interruption((threads,), line, handler) as between:
                handler()
            posted += 1 + between.happened
            if not between.happened:
                break
        for ticket in tickets:
            ticket.wait_sync(PATIENCE)
    assert line > 10
    assert len(tickets) == posted
    assert sorted(called) == sorted(["post", "task"] * posted)


@pytest.mark.anyio
async def test_a_trigger_a_registration_and_its_withdrawal_wherever_they_interrupt_each_other(anyio_backend):
    """The handler comes in before each line of the coordinator's, and does all three."""
    for line in range(1000):
        called = []
        withdrawn = [partial(called.append, text) for text in ("withdrawn", "withdrawn in the handler")]

        def handler(called=called, withdrawn=withdrawn) -> None:
            coordinator.register(withdrawn[1])
            coordinator.unregister(withdrawn[1])
            coordinator.register(lambda: called.append("registered in the handler"))
            coordinator.trigger("in the handler")

        async with ShutdownCoordinator(()) as coordinator:
            with Interruption((runtime,), line, handler) as between:
                coordinator.register(withdrawn[0])
                coordinator.unregister(withdrawn[0])
                coordinator.register(partial(called.append, "registered"))
                coordinator.trigger()
            with anyio.fail_after(PATIENCE):
                while len([one for one in called if one.startswith("registered")]) < 1 + between.happened:
                    await anyio.sleep(0.001)
        assert coordinator.triggered
        assert called.count("registered") == 1
        assert called.count("registered in the handler") == between.happened
        if not between.happened:
            assert not any(one.startswith("withdrawn") for one in called)
            return


@pytest.mark.anyio
async def test_a_trigger_wakes_the_event_loop_that_the_handler_interrupts(anyio_backend):
    """Which sleeps, with nothing else that would wake it soon."""
    told = anyio.Event()
    async with ShutdownCoordinator(()) as coordinator:
        coordinator.register(told.set)
        before = signal.signal(signal.SIGUSR1, lambda *_: coordinator.trigger())
        kill = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR1))
        kill.start()
        try:
            with Stopwatch() as watch, anyio.move_on_after(20):
                await told.wait()
        finally:
            signal.signal(signal.SIGUSR1, before)
            kill.join()
    assert watch.seconds < 3


def test_a_beat_wherever_it_interrupts_another():
    beat, seen = Heartbeat(), []
    beat.add_callback(lambda: seen.append("beat"))
    for line in range(1000):
        with Interruption((runtime,), line, lambda: (beat.beat(), beat.elapsed())) as between:
            beat.beat()
            assert 0 <= beat.elapsed() < PATIENCE
        if not between.happened:
            break
    assert len(seen) == 2 * line + 1
