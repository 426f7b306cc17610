"""OffloadPool: what holds for every kind, on threads."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import logging
import os
import threading
import weakref
from functools import partial

import anyio
import pytest
import trio
from anyio import from_thread

import mainspring
import offload_work
from interrupts import Interruption
from mainspring import OffloadPool, offload
from mainspring.errors import (
    ConfigError,
    InvalidParameterError,
    OffloadClosedError,
    OffloadFullError,
    OffloadTimeoutError,
    TaskExitError,
)

pytestmark = pytest.mark.anyio


class Gate:
    """Work that ends when it is told to."""

    def __init__(self):
        self.entered = threading.Event()
        self.open = threading.Event()
        self.seen = []

    def pass_through(self, value=None):
        self.entered.set()
        assert self.open.wait(30)
        self.seen.append(value)
        return value

    async def is_entered(self):
        with anyio.fail_after(60):
            while not self.entered.is_set():
                await anyio.sleep(0.001)


@pytest.fixture
def gate():
    gate = Gate()
    yield gate
    gate.open.set()


async def make_late(pool, fn, *args):
    """A call that was begun when its caller went on. One that has not begun by its timeout never is: then another try."""
    with anyio.fail_after(60):
        while not pool.late:
            with pytest.raises(OffloadTimeoutError):
                await pool.run(fn, *args, timeout=0.05)


# -------------------------------------------------------------------------------------------------------------- results


async def test_a_call_gives_its_result_and_leaves_the_event_loop_free(gate):
    async with OffloadPool(workers=1) as pool:
        results = []

        async def call():
            results.append(await pool.run(gate.pass_through, "done"))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call)
            await gate.is_entered()
            assert (pool.in_flight, pool.queued, pool.late) == (1, 0, 0)
            gate.open.set()
        assert results == ["done"]
        assert (pool.in_flight, pool.queued, pool.late) == (0, 0, 0)


async def test_an_exception_comes_as_it_is():
    error = KeyError("as it is")

    def fail():
        raise error

    async with OffloadPool() as pool:
        with pytest.raises(KeyError) as caught:
            await pool.run(fail)
        assert caught.value is error


@pytest.mark.parametrize("kind", [StopIteration, GeneratorExit])
async def test_what_generators_speak_with_becomes_an_error(kind):
    def fail():
        raise kind

    async with OffloadPool() as pool:
        with pytest.raises(RuntimeError, match=f"fail raised {kind.__name__}"):
            await pool.run(fail)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
async def test_an_exit_does_not_end_the_program(error):
    def fail():
        raise error

    async with OffloadPool() as pool:
        with pytest.raises(TaskExitError, match="fail raised"):
            await pool.run(fail)


@pytest.mark.parametrize("kind", ["thread", "process"])
@pytest.mark.parametrize("fn", [offload_work.be_cancelled_in_a_loop_of_its_own, offload_work.be_cancelled_as_a_future])
async def test_a_cancellation_of_the_work_is_not_taken_for_one_of_the_caller(kind, fn):
    async with OffloadPool(kind, workers=1) as pool:
        for call in (pool.run, pool.run_to_the_end):
            with pytest.raises(ExceptionGroup) as caught:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(call, fn)
            (error,) = caught.value.exceptions
            assert isinstance(error, TaskExitError)
            assert str(error).startswith(f"{fn.__name__} raised a spurious cancellation")
            assert type(error.__cause__).__name__ == "CancelledError"


async def test_so_it_is_with_trios():
    def fail():
        raise cancelled

    cancelled = await anyio.to_thread.run_sync(trio.run, trios_cancelled)
    async with OffloadPool() as pool:
        for call in (pool.run, pool.run_to_the_end):
            with pytest.raises(TaskExitError, match="fail raised a spurious cancellation"):
                await call(fail)


async def trios_cancelled():
    with trio.CancelScope() as scope:
        scope.cancel()
        try:
            await trio.lowlevel.checkpoint()
        except trio.Cancelled as cancelled:
            return cancelled


@pytest.mark.parametrize("own", [None, asyncio.CancelledError, concurrent.futures.CancelledError])
async def test_work_that_ends_at_its_callers_cancellation_is_cancelled_with_it(own, gate):
    def work():
        gate.pass_through()
        if own is None:
            from_thread.check_cancelled()
        raise own

    async with OffloadPool(workers=1) as pool:
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(pool.run_to_the_end, work)
                await gate.is_entered()
                scope.cancel()
                gate.open.set()
        assert scope.cancelled_caught
        assert (pool.in_flight, pool.late) == (0, 0)


async def test_a_call_may_return_an_awaitable_that_is_no_coroutine():
    class Later:
        def __await__(self):
            return anyio.sleep(0).__await__()

    async with OffloadPool() as pool:
        assert isinstance(await pool.run(Later), Later)


# --------------------------------------------------------------------------------------------------------------- bounds


async def test_no_more_run_at_once_than_there_are_workers(gate):
    at_once, most, lock = 0, 0, threading.Lock()

    def work():
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
        gate.open.wait(0.005)
        with lock:
            at_once -= 1

    async with OffloadPool(workers=3) as pool, anyio.create_task_group() as tasks:
        for _ in range(20):
            tasks.start_soon(pool.run, work)
    assert most == 3


async def test_waiting_callers_are_served_in_their_order(gate):
    order = []
    async with OffloadPool(workers=1) as pool, anyio.create_task_group() as tasks:
        tasks.start_soon(pool.run, gate.pass_through)
        await gate.is_entered()
        for number in range(5):
            tasks.start_soon(pool.run, order.append, number)
            while pool.queued <= number:
                await anyio.sleep(0)
        gate.open.set()
    assert order == list(range(5))


async def test_a_full_queue_refuses_at_once(gate):
    async with OffloadPool(workers=1, queue_limit=1, name="small") as pool, anyio.create_task_group() as tasks:
        tasks.start_soon(pool.run, gate.pass_through)
        await gate.is_entered()
        tasks.start_soon(pool.run, gate.pass_through)
        while not pool.queued:
            await anyio.sleep(0)
        with pytest.raises(
            OffloadFullError, match=r"small: 1 call\(s\) wait for one of 1 workers, and queue_limit is 1"
        ):
            await pool.run(gate.pass_through)
        gate.open.set()
        await pool.wait_idle()
        assert len(gate.seen) == 2


async def test_without_a_queue_only_workers_take_calls(gate):
    async with OffloadPool(workers=1, queue_limit=0) as pool, anyio.create_task_group() as tasks:
        tasks.start_soon(pool.run, gate.pass_through)
        await gate.is_entered()
        with pytest.raises(OffloadFullError):
            await pool.run(print)
        gate.open.set()


async def test_a_timeout_in_the_queue_means_that_it_never_runs(gate):
    ran = []
    async with OffloadPool(workers=1) as pool, anyio.create_task_group() as tasks:
        tasks.start_soon(pool.run, gate.pass_through)
        await gate.is_entered()
        with pytest.raises(OffloadTimeoutError):
            await pool.run(ran.append, 1, timeout=0.01)
        assert (pool.queued, pool.late) == (0, 0)
        gate.open.set()
        await pool.wait_idle()
        assert await pool.run(lambda: ran) == []


# -------------------------------------------------------------------------------------------------------- late and idle


async def test_at_the_timeout_the_caller_goes_on_and_the_work_is_counted_until_it_ends(gate):
    async with OffloadPool(workers=1) as pool:
        await make_late(pool, gate.pass_through)
        assert (pool.in_flight, pool.late, pool.ended_late) == (0, 1, 0)
        await pool.wait_idle()
        gate.open.set()
        await pool.wait_for_late()
        assert (pool.late, pool.ended_late) == (0, 1)


async def test_a_pool_is_idle_with_its_late_calls_only_when_those_have_ended(gate):
    async with OffloadPool(workers=2) as pool:
        await pool.wait_idle(late=True)
        await make_late(pool, gate.pass_through)
        with anyio.move_on_after(0.01) as waited:
            await pool.wait_idle(late=True)
        assert waited.cancelled_caught
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pool.run, gate.open.set)
            await pool.wait_idle(late=True)
            assert (pool.in_flight, pool.queued, pool.late, pool.ended_late) == (0, 0, 0, 1)
    await pool.wait_idle(late=True)


async def test_a_pool_is_idle_when_the_last_call_that_waited_is_cancelled(gate):
    """Late work alone does not keep it from that, and tells nothing."""
    scope, idle = anyio.CancelScope(), anyio.Event()

    async def call():
        with scope:
            await pool.run(len, "")

    async def wait_idle():
        await pool.wait_idle()
        idle.set()

    async with OffloadPool(workers=1) as pool:
        await make_late(pool, gate.pass_through)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call)
            await anyio.wait_all_tasks_blocked()
            tasks.start_soon(wait_idle)
            await anyio.wait_all_tasks_blocked()
            assert (pool.queued, idle.is_set()) == (1, False)
            scope.cancel()
            with anyio.fail_after(10):
                await idle.wait()
        assert (pool.in_flight, pool.queued, pool.late) == (0, 0, 1)
        gate.open.set()


async def test_a_cancelled_call_in_a_thread_is_late(gate):
    async with OffloadPool(workers=1) as pool:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pool.run, gate.pass_through)
            await gate.is_entered()
            tasks.cancel_scope.cancel()
        assert (pool.in_flight, pool.late) == (0, 1)
        gate.open.set()
        await pool.wait_for_late()


async def test_late_work_keeps_its_worker_busy(gate):
    """On asyncio an abandoned thread gives its limiter's token back at once: then there would be ever more threads."""
    async with OffloadPool(workers=1) as pool:
        await make_late(pool, gate.pass_through)
        for _ in range(2):
            with pytest.raises(OffloadTimeoutError, match=r"pass_through did not end within 0\.02 s") as caught:
                await pool.run(gate.pass_through, timeout=0.02)
            assert isinstance(caught.value, TimeoutError)
        assert pool.late == 1
        gate.open.set()
        assert await pool.run(len, "four") == 4
        assert len(gate.seen) == 1


async def test_a_cancelled_call_that_has_not_begun_never_does():
    ran = []
    async with OffloadPool(workers=1) as pool:
        for _ in range(50):
            with anyio.CancelScope() as scope:
                scope.cancel()
                await pool.run(ran.append, 1)
        assert (pool.in_flight, pool.late) == (0, 0)
        await pool.run(ran.append, 2)
    assert ran == [2]


@pytest.mark.loops("asyncio")  # trio's threads outlive the event loop, and are not new here
async def test_a_call_that_was_abandoned_before_its_thread_began_is_not_performed(anyio_backend, gate):
    """The thread has it already, and comes to it too late."""
    ran = []
    async with OffloadPool(workers=1) as pool:
        with Interruption((offload,), 0, gate.pass_through, thread="AnyIO worker thread") as between:
            between.begin()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(pool.run, ran.append, 1)
                await gate.is_entered()
                tasks.cancel_scope.cancel()
            assert (pool.in_flight, pool.late) == (0, 0)
            gate.open.set()
            await pool.run(ran.append, 2)
    assert ran == [2]


async def test_the_exception_of_late_work_is_logged_and_raised_nowhere(gate, caplog):
    def fail():
        gate.pass_through()
        raise KeyError("too late")

    async with OffloadPool(workers=1) as pool:
        await make_late(pool, fail)
        with caplog.at_level(logging.WARNING, "mainspring.offload"):
            gate.open.set()
            await pool.wait_for_late()
    (record,) = caplog.records
    assert record.getMessage() == "fail raised after its caller had stopped waiting: KeyError: 'too late'"
    assert record.exc_info[0] is KeyError


async def test_late_work_can_notice_and_ends_without_a_word(gate, caplog):
    def look():
        gate.pass_through()
        while True:
            from_thread.check_cancelled()

    async with OffloadPool(workers=1) as pool:
        await make_late(pool, look)
        gate.open.set()
        with anyio.fail_after(30):
            await pool.wait_for_late()
    assert not caplog.records


async def test_waiting_for_idle_with_nothing_to_wait_for():
    pool = OffloadPool()
    await pool.wait_idle()
    await pool.wait_for_late()
    async with pool:
        await pool.wait_idle()
        await pool.wait_for_late()


async def test_no_reference_is_left_of_a_call():
    class Thing:
        pass

    async with OffloadPool(workers=1) as pool:
        given, made = Thing(), []

        def work(thing):
            result = Thing()
            made.append(weakref.ref(result))
            return result

        seen = weakref.ref(given)
        result = await pool.run(work, given)
        del result, given
        with pytest.raises(ZeroDivisionError):
            await pool.run(lambda: 1 / 0)
        await pool.run(len, "")  # a thread of trio forgets its last job when it has another
        gc.collect()
        assert (seen(), made[0]()) == (None, None)


def test_nothing_dangles_when_the_event_loop_is_gone(anyio_backend, gate):
    """Work that outlives ``anyio.run`` keeps what it was given, and nothing else; when it ends, not even that."""

    class Thing:
        pass

    refs = {}

    def work(thing):
        result = Thing()
        refs["result"] = weakref.ref(result)
        gate.pass_through()
        return result

    async def main():
        pool = OffloadPool(workers=1, shutdown_timeout=0)
        refs["pool"] = weakref.ref(pool)
        thing = Thing()
        refs["argument"] = weakref.ref(thing)
        async with pool:
            await make_late(pool, work, thing)

    anyio.run(main, backend=anyio_backend[0], backend_options=anyio_backend[1])
    gc.collect()
    assert refs["pool"]() is None
    assert refs["argument"]() is not None
    gate.open.set()
    for _ in range(3000):
        gc.collect()
        if refs["argument"]() is None and refs["result"]() is None:
            break
        threading.Event().wait(0.01)
    assert (refs["argument"](), refs["result"]()) == (None, None)


# -------------------------------------------------------------------------------------------------------------- closing


async def test_closing_waits_for_what_was_accepted(gate):
    async with anyio.create_task_group() as tasks:
        async with OffloadPool(workers=1) as pool:
            tasks.start_soon(pool.run, gate.pass_through, "first")
            await gate.is_entered()
            tasks.start_soon(pool.run, gate.pass_through, "queued")
            while not pool.queued:
                await anyio.sleep(0)
            tasks.start_soon(open_later, gate, pool)
        assert gate.seen == ["first", "queued"]


async def open_later(gate, pool):
    while pool.is_open:
        await anyio.sleep(0.001)
    with pytest.raises(OffloadClosedError, match="thread pool is being closed; it takes no calls"):
        await pool.run(print)
    with pytest.raises(OffloadClosedError, match="is being closed"):
        await pool.__aenter__()
    gate.open.set()


async def test_closing_waits_for_late_work(gate, caplog):
    async with anyio.create_task_group() as tasks, OffloadPool(workers=1) as pool:
        await make_late(pool, gate.pass_through)
        tasks.start_soon(open_later, gate, pool)
    assert (pool.late, pool.ended_late) == (0, 1)
    assert not caplog.records


async def test_closing_cuts_at_its_limit_and_names_the_threads(gate, caplog):
    errors = []

    async def call(pool):
        try:
            await pool.run(gate.pass_through)
        except OffloadClosedError as error:
            errors.append(str(error))

    async with (
        anyio.create_task_group() as tasks,
        OffloadPool(workers=1, name="cut one", shutdown_timeout=0.05) as pool,
    ):
        tasks.start_soon(call, pool)
        await gate.is_entered()
        tasks.start_soon(call, pool)
        while not pool.queued:
            await anyio.sleep(0)
    assert errors == ["cut one was closed before Gate.pass_through had ended; its effects are unknown"] * 2
    (record,) = caplog.records
    assert "cut one was closed, and 1 call(s) in it have not ended: " in record.getMessage()
    assert "pass_through" in record.getMessage()
    assert "test_offload.py" in record.getMessage(), "the line it is at"
    assert pool.late == 1
    gate.open.set()
    with anyio.fail_after(30):
        await pool.wait_for_late()
    assert gate.seen == [None], "what was queued has not begun"


async def test_closing_names_what_is_run_to_the_end_and_refuses_what_waits_to_be(gate, caplog):
    errors, results = [], []

    async def call(pool):
        try:
            results.append(await pool.run_to_the_end(gate.pass_through, "done"))
        except OffloadClosedError as error:
            errors.append(str(error))

    async with anyio.create_task_group() as tasks:
        async with OffloadPool(workers=1, name="cut one", shutdown_timeout=0.05, cancel_grace=0.05) as pool:
            tasks.start_soon(call, pool)
            await gate.is_entered()
            tasks.start_soon(call, pool)
            while not pool.queued:
                await anyio.sleep(0)
        (record,) = caplog.records
        assert "cut one was closed, and 1 call(s) in it have not ended: Gate.pass_through (" in record.getMessage()
        assert errors == ["cut one was closed before Gate.pass_through had begun, and it never will"]
        gate.open.set()
    assert (results, gate.seen) == (["done"], ["done"])


async def test_a_cancelled_close_does_not_wait(gate):
    async with anyio.create_task_group() as tasks:
        with anyio.fail_after(30), anyio.CancelScope() as scope:
            async with OffloadPool(workers=1, shutdown_timeout=1000) as pool:
                tasks.start_soon(expect_closed, pool, gate)
                await gate.is_entered()
                scope.cancel()
        assert not pool.is_open


async def expect_closed(pool, gate):
    with pytest.raises(OffloadClosedError):
        await pool.run(gate.pass_through)


async def test_a_pool_may_be_entered_several_times_and_opened_again():
    pool = OffloadPool(workers=1)
    for _ in range(2):
        async with pool:
            async with pool:
                assert pool.is_open
            assert await pool.run(len, "two") == 3
        assert not pool.is_open
        with pytest.raises(OffloadClosedError):
            await pool.run(len, "two")


async def test_it_is_to_be_opened_first():
    with pytest.raises(OffloadClosedError, match="thread pool is not open; use it inside `async with pool`"):
        await OffloadPool().run(print)


async def test_another_event_loop_must_have_a_pool_of_its_own():
    async with OffloadPool() as pool:
        caught = []

        async def elsewhere():
            with pytest.raises(OffloadClosedError, match="another event loop"):
                await pool.run(print)
            for wait in (pool.wait_idle, pool.wait_for_late):
                with pytest.raises(OffloadClosedError, match="another event loop"):
                    await wait()
            with pytest.raises(OffloadClosedError, match="another event loop"):
                await pool.__aenter__()
            caught.append(True)

        await anyio.to_thread.run_sync(anyio.run, elsewhere)
    assert caught == [True]


async def test_a_forked_child_must_have_a_pool_of_its_own():
    async with OffloadPool() as pool:
        child = os.fork()
        if not child:
            status = 1
            try:
                coroutine = pool.run(print)
                coroutine.send(None)
            except OffloadClosedError as error:
                status = 0 if "the process this one was forked from" in str(error) else 2
            finally:
                os._exit(status)
        _, status = await anyio.to_thread.run_sync(os.waitpid, child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


# --------------------------------------------------------------------------------------------------------- virtual time


async def test_work_holds_the_virtual_clock(virtual_clock, gate):
    async with OffloadPool(workers=1) as pool, anyio.create_task_group() as tasks:
        tasks.start_soon(open_after_a_while, gate)
        assert await pool.run(gate.pass_through, "real", timeout=5) == "real"
        assert virtual_clock.now == 0


async def test_who_waits_for_the_worker_of_late_work_holds_the_virtual_clock(virtual_clock, gate):
    """It is real work that it waits for: its timeout must not strike because nothing else is to be done."""
    async with OffloadPool(workers=1) as pool:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(time_out, pool, gate)
            while not gate.entered.is_set():
                await anyio.lowlevel.checkpoint()
            virtual_clock.advance(5)
        async with anyio.create_task_group() as tasks:
            threading.Timer(0.05, gate.open.set).start()
            assert await pool.run(len, "abc", timeout=60) == 3
        assert virtual_clock.now == 5


async def open_after_a_while(gate):
    await anyio.to_thread.run_sync(gate.open.wait, 0.05)
    gate.open.set()


def test_work_holds_a_mock_clock_that_nobody_watches(gate):
    trio_testing = pytest.importorskip("trio.testing", reason="the extra 'trio' is not installed")
    clock = trio_testing.MockClock(autojump_threshold=0)

    async def main():
        async with OffloadPool(workers=1) as pool, anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.sleep, 0)
            threading.Timer(0.05, gate.open.set).start()
            assert await pool.run(gate.pass_through, "real", timeout=5) == "real"
            assert clock.current_time() == 0

    anyio.run(main, backend="trio", backend_options={"clock": clock})


async def test_late_work_does_not_hold_the_virtual_clock_until_it_is_waited_for(virtual_clock, gate):
    async with OffloadPool(workers=1) as pool:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(time_out, pool, gate)
            while not gate.entered.is_set():
                await anyio.lowlevel.checkpoint()
            virtual_clock.advance(5)
        await anyio.sleep(100)
        assert virtual_clock.now == 105
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(open_after_a_while, gate)
            await pool.wait_for_late()
        assert virtual_clock.now == 105


async def time_out(pool, gate):
    with pytest.raises(OffloadTimeoutError):
        await pool.run(gate.pass_through, timeout=5)


# ------------------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"kind": "fibre"}, "kind must be one of 'thread', 'process', 'interpreter', not 'fibre'"),
        ({"workers": 0}, "workers must be a whole number from 1, not 0"),
        ({"workers": True}, "workers must be a whole number"),
        ({"queue_limit": -1}, "queue_limit must be a whole number from 0, or None, not -1"),
        ({"shutdown_timeout": float("inf")}, "shutdown_timeout must be 0 or more seconds and finite, not inf"),
        ({"shutdown_timeout": -1}, "shutdown_timeout must be 0 or more"),
        ({"cancel_grace": -1}, "cancel_grace must be 0 or more"),
        ({"start_timeout": 0}, "start_timeout must be above 0 seconds and finite, not 0"),
    ],
)
def test_impossible_settings_are_refused(options, complaint):
    with pytest.raises(ConfigError, match=complaint):
        OffloadPool(**options)


@pytest.mark.parametrize("timeout", [-1, float("nan"), "5"])
async def test_an_impossible_timeout_is_refused(timeout):
    async with OffloadPool() as pool:
        with pytest.raises(InvalidParameterError, match="timeout must be 0 or more seconds"):
            await pool.run(print, timeout=timeout)


@pytest.mark.parametrize("kind", ["thread", "process"])
async def test_an_async_function_is_refused(kind):
    refused = r"calls plain functions, and .* is async: pass a plain `def`, or await it where you are"
    async with OffloadPool(kind) as pool:
        for run in (pool.run, pool.run_to_the_end):
            for fn in (offload_work.asynchronous, partial(offload_work.asynchronous, 1)):
                with pytest.raises(InvalidParameterError, match=refused):
                    await run(fn)
            with pytest.raises(
                InvalidParameterError,
                match=r"not a coroutine: write run\(asynchronous, …\) instead of run\(asynchronous\(…\)\)",
            ):
                await run(offload_work.asynchronous())
            with pytest.raises(InvalidParameterError, match=r"run\(\) takes a function and its arguments, not 5"):
                await run(5)


async def test_a_plain_function_that_returns_a_coroutine_is_none(capfd):
    async with OffloadPool() as pool:
        with pytest.raises(TaskExitError, match="leads_to_async returned a coroutine, so its work has not run"):
            await pool.run(offload_work.leads_to_async)
    async with OffloadPool("process", workers=1) as pool:
        with pytest.raises(TaskExitError, match="leads_to_async returned a coroutine, so its work has not run"):
            await pool.run(offload_work.leads_to_async)
    assert "never awaited" not in capfd.readouterr().err


@pytest.mark.parametrize("kind", ["thread", "process"])
async def test_a_generator_does_no_work_there_and_is_refused(kind):
    async with OffloadPool(kind, workers=1) as pool:
        for run in (pool.run, pool.run_to_the_end):
            for fn in (offload_work.generates, partial(offload_work.generates, 1), offload_work.generates_async):
                with pytest.raises(
                    InvalidParameterError, match=r"pool: generates.* is a generator, which would never run"
                ):
                    await run(fn)
        with pytest.raises(TaskExitError, match="leads_to_a_generator returned a generator, so its work has not"):
            await pool.run(offload_work.leads_to_a_generator)


def test_what_it_shows_of_itself():
    assert repr(OffloadPool(workers=2)) == "<OffloadPool 'thread pool' closed workers=2 in_flight=0 queued=0 late=0>"
    assert OffloadPool().workers == min(32, len(os.sched_getaffinity(0)) + 4)
    assert OffloadPool("process").workers == len(os.sched_getaffinity(0))
    assert mainspring.OffloadPool is OffloadPool
