"""Errors of every kind out of a handler, and handlers that run out of time: what becomes of the message."""

from __future__ import annotations

import asyncio
import threading

import anyio
import pytest
from anyio import from_thread
from loop_support import EXACT

from mainspring import DeadLetterPolicy, InMemoryMailbox, MainLoop, RetryPolicy
from support import FaultyMailbox, background, record, settled

pytestmark = pytest.mark.anyio


# ---------------------------------------------------------------------------------------------- errors of every kind


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("cannot say")


def raising(error):
    async def handle(job: int) -> None:
        raise error

    def handle_plainly(job: int) -> None:
        raise error

    return [
        pytest.param(handle, id=f"async-{type(error).__name__}"),
        pytest.param(handle_plainly, id=f"plain-{type(error).__name__}"),
    ]


ODD = [
    *raising(SystemExit(3)),
    *raising(KeyboardInterrupt()),
    *raising(GeneratorExit()),
    *raising(BaseException("base")),
    *raising(StopIteration()),
    *raising(StopAsyncIteration()),
    *raising(asyncio.CancelledError()),
    *raising(ExceptionGroup("two", [ValueError("a"), KeyError("b")])),
    *raising(BaseExceptionGroup("two", [SystemExit(1), KeyError("b")])),
    *raising(Unprintable()),
    *raising(TimeoutError("its own")),
]


@pytest.mark.parametrize("handler", ODD)
async def test_whatever_a_handler_raises_is_a_failed_attempt_and_the_loop_lives(handler):
    mailbox = InMemoryMailbox(body=int)
    calls = []

    async def then(job: int) -> None:
        calls.append(job)

    loop = MainLoop(mailbox, handler, retry=RetryPolicy(initial_delay=0), dead_letter=DeadLetterPolicy(max_attempts=2))
    events = record(loop)
    async with background(loop):
        await mailbox.send(1)
        await settled(mailbox)
        await mailbox.send(2)
        await settled(mailbox)
        dead = await mailbox.dead_letters()
        assert [(letter.body, letter.attempt) for letter in dead] == [(1, 2), (2, 2)]
        assert all(letter.error and letter.error_type for letter in dead)
        assert loop.running
    assert loop.outcomes == {"retried": 2, "dead_lettered": 2}
    assert events


async def test_exit_and_interrupt_are_explained():
    async def handle(job: int) -> None:
        raise SystemExit(3)

    mailbox = InMemoryMailbox()
    async with background(MainLoop(mailbox, handle, dead_letter=DeadLetterPolicy(max_attempts=1))):
        await mailbox.send(1)
        await settled(mailbox)
        (dead,) = await mailbox.dead_letters()
        assert dead.error_type == "TaskExitError"
        assert "SystemExit(3)" in dead.error
        assert "call shutdown()" in dead.error
        assert "raise SystemExit(3)" in dead.traceback


@pytest.mark.loops("asyncio")
async def test_a_handler_that_cancels_its_own_task_has_failed_and_the_slot_lives(anyio_backend):
    async def handle(job: int) -> None:
        task = asyncio.current_task()
        assert task is not None
        if job == 1:
            task.cancel()
            task.cancel()
        await asyncio.sleep(0)

    mailbox = InMemoryMailbox()
    loop = MainLoop(mailbox, handle, dead_letter=DeadLetterPolicy(max_attempts=1))
    async with background(loop):
        await mailbox.send_many([1, 2, 1, 2])
        await settled(mailbox)
        assert [letter.body for letter in await mailbox.dead_letters()] == [1, 1]
        assert (await mailbox.counts()).settled == 2
    assert loop.outcomes == {"dead_lettered": 2, "acknowledged": 2}


@pytest.mark.loops("asyncio")
async def test_nothing_of_a_native_cancellation_is_left_for_the_next_message(anyio_backend):
    """From Python 3.13 on an asyncio.TaskGroup takes one that is still counted for a cancellation from outside."""

    counted = []

    async def child() -> None:
        raise ValueError("the child's")

    async def handle(job: int) -> None:
        task = asyncio.current_task()
        assert task is not None
        counted.append(task.cancelling())
        if job == 1:
            task.cancel()
            await asyncio.sleep(0)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(child())
            await asyncio.sleep(10)

    mailbox = InMemoryMailbox()
    async with background(MainLoop(mailbox, handle, dead_letter=DeadLetterPolicy(max_attempts=1))):
        await mailbox.send_many([1, 2])
        await settled(mailbox)
        assert [letter.error_type for letter in await mailbox.dead_letters()] == ["TaskExitError", "ValueError"]
    assert counted == [0, 0]


@pytest.mark.loops("asyncio")
async def test_a_handler_that_awaits_a_cancelled_task_has_failed(anyio_backend):
    async def handle(job: int) -> None:
        future = asyncio.get_running_loop().create_future()
        future.cancel()
        await future

    mailbox = InMemoryMailbox()
    async with background(MainLoop(mailbox, handle, dead_letter=DeadLetterPolicy(max_attempts=1))):
        await mailbox.send(1)
        await settled(mailbox)
        (dead,) = await mailbox.dead_letters()
        assert "a spurious cancellation" in dead.error


# ----------------------------------------------------------------------------------------------------- handler_timeout


async def test_a_slow_handler_is_cancelled_as_a_failed_attempt(virtual_clock):
    ends = []

    async def handle(job: int) -> None:
        try:
            await anyio.sleep(1_000)
        finally:
            ends.append(virtual_clock.now)

    mailbox = InMemoryMailbox()
    loop = MainLoop(mailbox, handle, handler_timeout=10, retry=EXACT, dead_letter=DeadLetterPolicy(max_attempts=2))
    async with background(loop):
        await mailbox.send(1)
        await anyio.sleep(100)
        assert ends == [10, 21]
        (dead,) = await mailbox.dead_letters()
        assert dead.error_type == "HandlerTimeoutError"
        assert "longer than its handler_timeout of 10 s" in dead.error
        assert "await anyio.sleep(1_000)" in dead.traceback  # where it was


async def test_each_message_has_its_whole_timeout(virtual_clock):
    async def handle(job: int) -> None:
        await anyio.sleep(9)

    mailbox = InMemoryMailbox()
    loop = MainLoop(mailbox, handle, handler_timeout=10)
    async with background(loop):
        await mailbox.send_many([1, 2, 3])
        await anyio.sleep(100)
    assert loop.outcomes == {"acknowledged": 3}


async def test_the_timeout_ends_with_the_handler(virtual_clock):
    """The slot's scope lives on: a deadline left in it would strike while the slot waits for the next message."""

    async def handle(job: int) -> None: ...

    mailbox = InMemoryMailbox()
    loop = MainLoop(mailbox, handle, handler_timeout=10)
    async with background(loop):
        await mailbox.send(1)
        await anyio.sleep(50)
        await mailbox.send(2)
        await anyio.sleep(5)
    assert loop.outcomes == {"acknowledged": 2}


async def test_a_handler_that_swallows_its_timeout_and_returns_has_succeeded(virtual_clock):
    async def handle(job: int) -> None:
        try:
            await anyio.sleep(1_000)
        except anyio.get_cancelled_exc_class():
            pass

    mailbox = InMemoryMailbox()
    loop = MainLoop(mailbox, handle, handler_timeout=10)
    async with background(loop):
        await mailbox.send_many([1, 2])
        await anyio.sleep(100)
    assert loop.outcomes == {"acknowledged": 2}


async def test_an_own_error_during_the_cancellation_counts_as_the_timeout(virtual_clock):
    async def handle(job: int) -> None:
        try:
            await anyio.sleep(1_000)
        finally:
            raise ValueError("clean-up broke")

    mailbox = InMemoryMailbox()
    async with background(MainLoop(mailbox, handle, handler_timeout=10, dead_letter=DeadLetterPolicy(max_attempts=1))):
        await mailbox.send(1)
        await anyio.sleep(100)
        (dead,) = await mailbox.dead_letters()
        assert dead.error_type == "HandlerTimeoutError"
        assert "clean-up broke" in dead.traceback


async def test_a_timeout_of_the_handlers_own_is_its_own_error(virtual_clock):
    async def handle(job: int) -> None:
        with anyio.fail_after(5):
            await anyio.sleep(1_000)

    mailbox = InMemoryMailbox()
    async with background(MainLoop(mailbox, handle, handler_timeout=10, dead_letter=DeadLetterPolicy(max_attempts=1))):
        await mailbox.send(1)
        await anyio.sleep(100)
        (dead,) = await mailbox.dead_letters()
        assert dead.error_type == "TimeoutError"


@pytest.mark.slow
async def test_a_thread_that_outlives_its_timeout_keeps_its_lease_and_its_result_counts():
    """A thread cannot be cancelled; the worker waits for it, and nobody else gets the message meanwhile."""
    release = threading.Event()
    starts = []

    def handle(job: int) -> None:
        starts.append(job)
        assert release.wait(60)

    mailbox = FaultyMailbox()
    loop = MainLoop(mailbox, handle, handler_timeout=0.05, visibility_timeout=4, concurrency=2)
    async with background(loop):
        await mailbox.send(1)
        with anyio.fail_after(60):
            while len(mailbox.times("extend")) < 4:  # past one whole lease
                await anyio.sleep(0.01)
        release.set()
        await settled(mailbox)
    assert starts == [1]
    assert loop.outcomes == {"acknowledged": 1}


async def test_a_thread_that_looks_for_cancellation_ends_by_its_timeout():
    def handle(job: int) -> None:
        while True:
            from_thread.check_cancelled()

    mailbox = InMemoryMailbox()
    loop = MainLoop(mailbox, handle, handler_timeout=0.02, dead_letter=DeadLetterPolicy(max_attempts=1))
    async with background(loop):
        await mailbox.send(1)
        await settled(mailbox)
        (dead,) = await mailbox.dead_letters()
        assert dead.error_type == "HandlerTimeoutError"


async def test_what_goes_wrong_before_the_handler_is_its_messages_failure(virtual_clock):
    """As with a backend that raises what none should."""

    class Unreadable(dict):
        def __bool__(self) -> bool:
            raise OverflowError("out of the calendar")

    ran = []

    async def handle(job: int) -> None:
        ran.append(job)

    async def unreadable(claim):
        deliveries = await claim()
        for delivery in deliveries:
            delivery.headers = Unreadable()
        return deliveries

    mailbox = FaultyMailbox()
    mailbox.next("claim", unreadable, unreadable)
    policy = DeadLetterPolicy(max_attempts=2)
    loop = MainLoop(mailbox, handle, dead_letter=policy, retry=RetryPolicy(initial_delay=0), wait_time_seconds=600)
    await mailbox.send(1)
    async with background(loop):
        await settled(mailbox)
        await mailbox.send(2)
        await settled(mailbox)
    (dead,) = await mailbox.dead_letters()
    assert (dead.error_type, dead.attempt, dead.error) == ("OverflowError", 2, "out of the calendar")
    assert ran == [2]
