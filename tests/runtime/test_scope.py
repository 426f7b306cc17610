"""DaemonScope: names, ordered stop with deadlines, the report, and errors that come out as they are."""

# ruff: noqa: PT012 - the block is the thing under test

from __future__ import annotations

import asyncio
import contextvars
import functools
import threading
import time
from typing import TYPE_CHECKING

import anyio
import pytest

from mainspring import DaemonScope
from mainspring.errors import ConfigError, InvalidParameterError, TaskExitError
from mainspring.runtime.scope import lone_error
from mainspring.runtime.shutdown_report import Ending

if TYPE_CHECKING:
    from anyio.abc import TaskStatus

pytestmark = [pytest.mark.anyio, pytest.mark.every_loop]


async def forever() -> None:
    await anyio.sleep_forever()


class Polite:
    """Ends by itself ``seconds`` after it was asked to."""

    def __init__(self, seconds: float = 0, log: list[str] | None = None, name: str = "") -> None:
        self._asked = anyio.Event()
        self._seconds = seconds
        self._log = [] if log is None else log
        self._name = name

    def stop(self) -> None:
        self._log.append(f"stop {self._name}")
        self._asked.set()

    async def run(self) -> None:
        await self._asked.wait()
        await anyio.sleep(self._seconds)
        self._log.append(f"ended {self._name}")


async def test_leaving_the_block_stops_the_tasks_in_the_reverse_order_of_their_start():
    log: list[str] = []
    async with DaemonScope("test") as scope:
        for name in "abc":
            daemon = Polite(0.001, log, name)
            scope.start_soon(daemon.run, name=name, stop=daemon.stop)
        await anyio.wait_all_tasks_blocked()
    assert log == ["stop c", "ended c", "stop b", "ended b", "stop a", "ended a"]
    assert [(part.name, part.ending) for part in scope.reports] == [(name, Ending.FINISHED) for name in "cba"]
    assert scope.daemons[0].done


async def test_a_task_without_a_stop_is_cancelled_and_that_is_a_clean_end():
    ended = []

    async def daemon() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            ended.append(True)

    with anyio.fail_after(20):
        async with DaemonScope() as scope:
            scope.start_soon(daemon)
            await anyio.wait_all_tasks_blocked()
    assert ended == [True]
    (part,) = scope.reports
    assert part.ending is Ending.FINISHED
    assert part.name.endswith("daemon")


async def test_one_that_does_not_end_in_time_is_cancelled_and_its_line_told(virtual_clock):
    daemon = Polite(1_000)
    async with DaemonScope(timeout=10, grace=5) as scope:
        scope.start_soon(daemon.run, name="slow", stop=daemon.stop)
        await anyio.sleep(1)
    assert virtual_clock.now == 11
    (part,) = scope.reports
    assert (part.ending, part.seconds) == (Ending.CANCELLED, 10)
    assert "await anyio.sleep(self._seconds)" in part.where[0]


async def test_one_deadline_for_all_of_them(virtual_clock):
    async with DaemonScope(timeout=10, grace=5) as scope:
        for name in "abc":
            daemon = Polite(7)
            scope.start_soon(daemon.run, name=name, stop=daemon.stop)
        await anyio.sleep(1)
    assert virtual_clock.now == 11
    assert [(part.name, part.ending) for part in scope.reports] == [
        ("c", Ending.FINISHED),
        ("b", Ending.CANCELLED),
        ("a", Ending.CANCELLED),
    ]


async def test_one_that_does_not_mind_its_cancellation_is_stuck(virtual_clock):
    async def stubborn() -> None:
        with anyio.CancelScope(shield=True):
            await anyio.sleep(100)

    async with DaemonScope(timeout=10, grace=5) as scope:
        scope.start_soon(stubborn, name="stubborn")
        await anyio.sleep(1)
        (part,) = await scope.stop()
        assert virtual_clock.now == 6
        assert part.ending is Ending.STUCK
        assert "await anyio.sleep(100)" in part.where[0]
    assert virtual_clock.now == 100  # a task group cannot leave it behind


async def test_stop_may_be_called_early_and_skips_what_has_ended():
    async def short() -> None: ...

    async with DaemonScope() as scope:
        scope.start_soon(short, name="short")
        scope.start_soon(forever, name="long")
        await anyio.wait_all_tasks_blocked()
        assert [part.name for part in await scope.stop()] == ["long"]
        assert await scope.stop() == []
        scope.start_soon(forever, name="another")
        await anyio.wait_all_tasks_blocked()
    assert [part.name for part in scope.reports] == ["long", "another"]


async def test_a_stop_that_returns_work_which_nothing_runs_is_logged(virtual_clock, caplog):
    async def close() -> None:
        raise AssertionError

    async with DaemonScope("test", timeout=5) as scope:
        scope.start_soon(forever, name="server", stop=lambda: close())
    assert [str(part.ending) for part in scope.reports] == ["cancelled"]
    assert "stop= of server returned a coroutine, which nothing runs" in caplog.text


async def test_a_crash_while_stopping_comes_out():
    asked = anyio.Event()

    async def crashes() -> None:
        await asked.wait()
        raise LookupError("while stopping")

    scope = DaemonScope()
    with pytest.raises(LookupError, match="while stopping"):
        async with scope:
            scope.start_soon(crashes, name="crashes", stop=asked.set)
            await anyio.wait_all_tasks_blocked()
    assert all(daemon.done for daemon in scope.daemons)


# -------------------------------------------------------------------------------------------------------------- errors


async def test_a_lone_error_of_a_task_comes_out_by_itself_and_cancels_the_others():
    ended = []

    async def other() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            ended.append(True)

    async def fails() -> None:
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        async with DaemonScope() as scope:
            scope.start_soon(other)
            await anyio.wait_all_tasks_blocked()
            scope.start_soon(fails)
            await anyio.sleep_forever()
    assert ended == [True]


async def test_the_blocks_own_error_comes_out_as_it_is():
    error = LookupError("mine")
    with pytest.raises(LookupError) as caught:
        async with DaemonScope() as scope:
            scope.start_soon(forever)
            raise error
    assert caught.value is error


@pytest.mark.parametrize("where", ["the block", "a task"])
async def test_an_error_while_the_block_is_cancelled_comes_out_as_it_is(where):
    """On trio it came in a group, which ``except LookupError`` does not catch: a nursery lists its cancelled tasks too."""
    error = LookupError("mine")

    async def fails_on_cancel() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            raise error

    with pytest.raises(LookupError) as caught, anyio.CancelScope() as outer:
        async with DaemonScope() as scope:
            scope.start_soon(forever)
            if where == "a task":
                scope.start_soon(fails_on_cancel)
            await anyio.wait_all_tasks_blocked()
            outer.cancel()
            await (fails_on_cancel() if where == "the block" else anyio.sleep_forever())
    assert caught.value is error


async def test_several_errors_come_out_as_a_group():
    async def fails_on_cancel() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            raise KeyError("second")

    async def fails() -> None:
        raise LookupError("first")

    with pytest.raises(ExceptionGroup) as caught:
        async with DaemonScope() as scope:
            scope.start_soon(fails_on_cancel)
            await anyio.wait_all_tasks_blocked()
            scope.start_soon(fails)
            await anyio.sleep_forever()
    assert {type(error) for error in caught.value.exceptions} == {LookupError, KeyError}


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
async def test_a_task_that_exits_does_not_end_the_process(error):
    async def leaves() -> None:
        raise error

    with pytest.raises(
        TaskExitError, match=f"worker raised {type(error).__name__}.*call its group's shutdown"
    ) as caught:
        async with DaemonScope() as scope:
            scope.start_soon(leaves, name="worker")
            await anyio.sleep_forever()
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("how", ["its task", "what it waits for"])
async def test_a_task_that_is_cancelled_natively_is_an_error(how, anyio_backend_name):
    """A task group would end without a word, and the other tasks with it."""
    if anyio_backend_name == "trio":
        return  # it has no cancellation but that of scopes

    async def one() -> None:
        future = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon((asyncio.current_task() if how == "its task" else future).cancel)
        await future

    with pytest.raises(TaskExitError, match="one was cancelled by itself"):
        async with DaemonScope() as scope:
            scope.start_soon(forever)
            scope.start_soon(one, name="one")
            await anyio.sleep_forever()


async def test_a_task_that_is_cancelled_natively_too_is_none(anyio_backend_name):
    if anyio_backend_name == "trio":
        return
    tasks: list[asyncio.Task[object] | None] = []

    async def task() -> None:
        tasks.append(asyncio.current_task())
        await anyio.sleep_forever()

    async with DaemonScope() as scope:
        daemon = scope.start_soon(task)
        await anyio.wait_all_tasks_blocked()
        daemon.cancel()
        tasks[0].cancel()
        await anyio.wait_all_tasks_blocked()
        assert daemon.done

    async def run() -> None:
        async with DaemonScope() as scope:
            scope.start_soon(task)
            await anyio.sleep_forever()

    tasks[:] = [asyncio.ensure_future(run())]
    await anyio.wait_all_tasks_blocked()
    for one in tasks:  # as an event loop that ends does
        one.cancel()
    with pytest.raises(asyncio.CancelledError):
        await tasks[0]


async def test_a_task_that_was_cancelled_just_before_a_shield_is_none_either():
    with anyio.CancelScope() as outer, anyio.CancelScope() as inner:
        async with DaemonScope() as scope:
            daemon = scope.start_soon(forever)
            await anyio.wait_all_tasks_blocked()
            outer.cancel()
            inner.shield = True
            await daemon.wait()
    assert isinstance(daemon.error, anyio.get_cancelled_exc_class())


async def test_a_cancelled_scope_cancels_every_task():
    ended = []

    async def task() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            ended.append(True)

    with anyio.move_on_after(0.01) as outer:
        async with DaemonScope() as scope:
            for _ in range(3):
                scope.start_soon(task)
            await anyio.sleep_forever()
    assert outer.cancelled_caught
    assert len(ended) == 3
    async with DaemonScope() as scope:
        scope.start_soon(forever)
        scope.cancel()


async def test_a_stop_that_is_cut_short_by_a_cancellation_leaves_nothing_behind():
    daemon = Polite(1_000)
    with anyio.fail_after(20), anyio.CancelScope() as outer:
        async with DaemonScope(timeout=1_000) as scope:
            scope.start_soon(daemon.run, stop=daemon.stop)
            await anyio.wait_all_tasks_blocked()
            outer.deadline = anyio.current_time() + 0.01
    assert outer.cancelled_caught
    assert all(daemon.done for daemon in scope.daemons)


# --------------------------------------------------------------------------------------------------------------- start


async def test_start_waits_until_the_task_is_ready_and_gives_its_value():
    async def service(port: int, *, task_status: TaskStatus[str]) -> None:
        await anyio.sleep(0.001)
        task_status.started(f"ready on {port}")
        await anyio.sleep_forever()

    async with DaemonScope() as scope:
        assert await scope.start(service, 80, name="service") == "ready on 80"
        assert [daemon.name for daemon in scope.daemons] == ["service"]


async def test_a_start_that_fails_raises_there():
    async def service(*, task_status: TaskStatus[None]) -> None:
        raise OSError("the port is taken")

    async with DaemonScope() as scope:
        with pytest.raises(OSError, match="the port is taken"):
            await scope.start(service)
        scope.start_soon(forever)


async def test_a_scope_must_be_open():
    scope = DaemonScope("jobs")
    with pytest.raises(RuntimeError, match="DaemonScope 'jobs' is not open; use `async with`"):
        scope.start_soon(forever)
    async with scope:
        pass
    with pytest.raises(RuntimeError, match="not open"):
        scope.start_soon(forever)
    scope.cancel()  # nothing to cancel


async def test_an_open_scope_is_not_opened_again():
    async with DaemonScope("jobs") as scope:
        daemon = scope.start_soon(forever)
        with pytest.raises(RuntimeError, match="DaemonScope 'jobs' is open already"):
            async with scope:
                pass
        assert scope.daemons == (daemon,)
    assert daemon.done


async def test_a_coroutine_is_no_task():
    async with DaemonScope("tasks") as scope:
        with pytest.raises(InvalidParameterError, match=r"not a coroutine: write start_soon\(sleep, …\) instead of"):
            scope.start_soon(anyio.sleep(1))
        with pytest.raises(InvalidParameterError, match="an async function and its arguments, not 3"):
            await scope.start(3)


async def test_it_may_be_opened_again():
    scope = DaemonScope()
    for _ in range(2):
        async with scope:
            scope.start_soon(forever, name="task")
            await anyio.wait_all_tasks_blocked()
            assert repr(scope) == "<DaemonScope 'scope' running ['task']>"
    assert len(scope.reports) == 2


async def test_a_daemon_tells_where_it_waits():
    async with DaemonScope() as scope:
        daemon = scope.start_soon(forever, name="task")
        await anyio.wait_all_tasks_blocked()
        assert "await anyio.sleep_forever()" in daemon.where
        assert repr(daemon) == "<Daemon 'task' running>"
        daemon.cancel()
        await daemon.wait()
        assert repr(daemon) == "<Daemon 'task' done>"
        assert daemon.where == ""


async def test_ended_tasks_do_not_pile_up():
    async def short() -> None: ...

    async with DaemonScope() as scope:
        for _ in range(100):
            await scope.start_soon(short).wait()
        assert len(scope.daemons) <= 1


def test_the_lone_error_inside_nested_groups():
    error = ValueError()
    assert lone_error(ExceptionGroup("a", [ExceptionGroup("b", [error])])) is error
    assert lone_error(error) is error
    two = ExceptionGroup("a", [error, error])
    assert lone_error(two) is two
    assert lone_error(BaseExceptionGroup("outer", [two])) is two


# --------------------------------------------------------------------------------------------------------------- threads

REQUEST: contextvars.ContextVar[str] = contextvars.ContextVar("request", default="none")


async def test_a_thread_has_a_copy_of_the_context_and_ends_when_it_is_asked_to():
    stop, seen = threading.Event(), []

    def work(number: int) -> None:
        seen.append((number, REQUEST.get(), threading.current_thread().name))
        REQUEST.set("changed")
        stop.wait(20)

    REQUEST.set("mine")
    with anyio.fail_after(20):
        async with DaemonScope("test") as scope:
            scope.start_thread(work, 7, name="worker", stop=stop.set)
            while not seen:
                await anyio.sleep(0.001)
    assert seen == [(7, "mine", "worker")]
    assert REQUEST.get() == "mine"
    assert [(part.name, part.ending) for part in scope.reports] == [("worker", Ending.FINISHED)]


async def test_a_thread_that_does_not_end_is_left_behind_at_the_deadline_and_told_with_its_line(caplog):
    end = threading.Event()

    def deaf() -> None:
        end.wait(20)

    try:
        with anyio.fail_after(10):
            async with DaemonScope("test", timeout=0.03, grace=15) as scope:  # which it does not get on top
                scope.start_thread(deaf, name="deaf", stop=lambda: None)
                await anyio.sleep(0.01)
    finally:
        end.set()
    (part,) = scope.reports
    assert part.ending is Ending.STUCK
    assert "in deaf: end.wait(20)" in part.where[0]
    assert "the thread 'deaf' did not end" in caplog.text


async def test_a_thread_that_raises_cancels_the_others_and_its_error_comes_out():
    error = LookupError("in the thread")

    def broken() -> None:
        raise error

    with pytest.raises(LookupError) as caught:
        async with DaemonScope("test") as scope:
            scope.start_soon(forever)
            scope.start_thread(broken)
            await anyio.sleep_forever()
    assert caught.value is error


async def test_a_thread_that_raises_a_cancellation_is_an_error():
    def cancelled() -> None:
        raise asyncio.CancelledError

    with pytest.raises(TaskExitError, match="one raised a spurious cancellation"):
        async with DaemonScope("test") as scope:
            scope.start_thread(cancelled, name="one")
            await anyio.sleep_forever()


async def test_an_error_of_the_block_asks_a_thread_to_stop_and_gives_it_the_grace():
    stop, ended = threading.Event(), []

    def work() -> None:
        ended.append(stop.wait(5))

    with pytest.raises(LookupError):
        async with DaemonScope("test", grace=20) as scope:
            scope.start_thread(work, stop=stop.set)
            scope.start_soon(forever, stop=lambda: ended.append("a task was asked too"))
            await anyio.sleep(0.01)
            raise LookupError
    assert ended == ["a task was asked too", True]


async def test_a_thread_in_virtual_time_is_waited_for(virtual_clock):
    stop = threading.Event()

    def work() -> None:
        stop.wait(20)
        time.sleep(0.02)

    async with DaemonScope("test", timeout=5) as scope:
        scope.start_thread(work, name="worker", stop=stop.set)
        await anyio.sleep(60)
    assert scope.reports[0].ending is Ending.FINISHED
    assert virtual_clock.now == 60


async def test_what_a_thread_would_not_run_is_refused_or_an_error():
    def steps():
        yield 1

    async with DaemonScope("test") as scope:
        with pytest.raises(InvalidParameterError, match="steps is a generator, which would never run"):
            scope.start_thread(steps)
        with pytest.raises(InvalidParameterError, match=r"stop= of .*work is a plain function"):
            scope.start_soon(forever, name="work", stop=steps)
    for result in (forever, steps):
        with pytest.raises(InvalidParameterError, match=r"lazy returned a .*, so its work has not run to its end"):
            async with DaemonScope("test") as scope:
                scope.start_thread(lambda result=result: result(), name="lazy")
                await anyio.sleep(5)


async def test_what_cannot_be_a_task_or_a_thread_is_refused_by_name():
    @functools.wraps(forever)
    def wrapped() -> object:
        return forever()

    async with DaemonScope("test") as scope:
        scope.start_soon(wrapped)
        scope.start_soon(functools.partial(anyio.sleep, 1000))
        with pytest.raises(InvalidParameterError, match=r"sleep is no async function.*use start_thread\(\) for it"):
            scope.start_soon(functools.partial(time.sleep, 1000), name="sleep")
        with pytest.raises(InvalidParameterError, match="is no async function"):
            await scope.start(time.sleep, 1000)
        with pytest.raises(InvalidParameterError, match=r"forever is async; use start_soon\(\)"):
            scope.start_thread(forever)
        with pytest.raises(InvalidParameterError, match=r"not a coroutine: write start_thread\(forever, …\)"):
            scope.start_thread(forever())
        with pytest.raises(InvalidParameterError, match=r"stop= of .*forever is a plain function"):
            scope.start_soon(forever, stop=forever)
        assert len(scope.daemons) == 2


@pytest.mark.parametrize("name", ["timeout", "grace"])
@pytest.mark.parametrize("seconds", [None, "5", -1, float("nan"), True, pytest.param(10**5_000, id="digits")])
def test_times_that_are_none_are_refused_by_name(name, seconds):
    with pytest.raises(ConfigError, match=f"DaemonScope: {name} must be a number of seconds from 0, not "):
        DaemonScope(**{name: seconds})
    DaemonScope(**{name: float("inf")})
