"""``DaemonScope``: the anyio task group that owns long-running tasks, with names, ordered stop and a report."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import anyio

from mainspring.core.clock import real_work
from mainspring.core.introspection import gives_coroutine, instead_of, is_async, is_generator, ran, unrun
from mainspring.core.lazy_event import LazyEvent
from mainspring.core.loggers import Logger
from mainspring.core.process import async_library
from mainspring.core.tracebacks import where
from mainspring.errors import ConfigError, InvalidParameterError, TaskExitError
from mainspring.runtime.cancellation import is_of_a_scope, is_spurious_cancellation
from mainspring.runtime.shutdown_report import Ending, PartReport
from mainspring.threads.own_thread import OwnThread
from mainspring.validation import is_number, shown

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from types import TracebackType

    from anyio.abc import TaskGroup, TaskStatus


_log = Logger("mainspring")


class Daemon:
    """One task of a scope. ``stop`` (where given) asks it politely to end; else stopping it means cancelling it."""

    def __init__(self, name: str, stop: Callable[[], object] | None, scope: DaemonScope) -> None:
        self.name = name
        self._owner = scope
        self._stop = stop
        self._scope = anyio.CancelScope()
        self._done = LazyEvent()
        self._coroutine: Any = None
        self.error: BaseException | None = None

    def __repr__(self) -> str:
        return f"<Daemon {self.name!r} {'done' if self.done else 'running'}>"

    @property
    def done(self) -> bool:
        """True if its task has ended."""
        return self._done.is_set()

    @property
    def where(self) -> str:
        """The line it waits on."""
        return where(self._coroutine)

    def cancel(self) -> None:
        """Cancel its task."""
        self._scope.cancel()

    async def wait(self) -> None:
        """Wait until its task has ended."""
        await self._done.wait()

    async def _run(self, fn: Callable[..., Awaitable[Any]], args: tuple[Any, ...], **keywords: Any) -> None:
        self._coroutine = _current_coroutine()
        try:
            with self._scope:
                await fn(*args, **keywords)
        except (SystemExit, KeyboardInterrupt) as error:
            self.error = TaskExitError(f"{self.name} raised {error!r}; to end the program, call its group's shutdown()")
            raise self.error from error
        except anyio.get_cancelled_exc_class() as error:
            self.error = error
            if is_of_a_scope(error) and not self._scope.cancel_called:
                raise  # also where that scope has been shielded against since
            if not await is_spurious_cancellation():
                raise
            if not self._scope.cancel_called:  # else it was to end anyway
                self.error = TaskExitError(f"{self.name} was cancelled by itself, and not by the scope that it runs in")
                raise self.error from error
        except BaseException as error:
            self.error = error
            raise
        finally:
            self._coroutine = None
            self._done.set()
            self._owner._some_ended = True  # noqa: SLF001 - one module

    def ask(self) -> None:
        """Ask it politely to end, where it can be asked and still runs."""
        if not self.done and self._stop is not None:
            what = unrun(self._stop())
            if what is not None:
                _log.error(
                    "stop= of %s returned %s, which nothing runs; it is cancelled at the deadline", self.name, what
                )

    async def stop(self, deadline: float, grace: float) -> PartReport:
        """Ask it to stop, wait until ``deadline`` (anyio's clock), then cancel it and wait ``grace`` seconds more."""
        began = anyio.current_time()
        at: tuple[str, ...] = ()
        ending = Ending.FINISHED
        if not self.done and self._stop is not None:
            self.ask()
            with anyio.move_on_after(max(0.0, deadline - began)):
                await self.wait()
        if not self.done:
            if self._stop is not None:
                ending, at = Ending.CANCELLED, tuple(filter(None, (self.where,)))
            self.cancel()
            with anyio.move_on_after(grace):
                await self.wait()
        if not self.done:
            ending, at = Ending.STUCK, tuple(filter(None, (self.where,)))
        elif self.error is not None and isinstance(self.error, Exception):
            ending = Ending.CRASHED
        return PartReport(self.name, ending, anyio.current_time() - began, at)


class ThreadDaemon(Daemon):
    """One thread of a scope, and the task that waits for it. It cannot be cancelled: one that goes on is left behind."""

    def __init__(
        self, name: str, stop: Callable[[], object] | None, scope: DaemonScope, fn: Callable[[], object]
    ) -> None:
        super().__init__(name, stop, scope)
        self._fn = fn
        self._grace = scope.grace
        self._thread: OwnThread[object] | None = None

    @property
    def where(self) -> str:
        """The line it executes."""
        return "" if self._thread is None else self._thread.where

    async def run(self) -> None:
        """Run it, and wait for its end; cancelled, for ``grace`` seconds."""
        self._thread = OwnThread(self._fn, self.name)
        try:
            ran(await self._thread.wait(), self.name)
        except anyio.get_cancelled_exc_class():
            if not await self._thread.wait_ended(self._grace):
                _log.error("the thread %r did not end, and is left behind at %s", self.name, self.where)
            raise

    async def stop(self, deadline: float, grace: float) -> PartReport:
        """Ask it to stop and wait until ``deadline``, then leave it behind."""
        began = anyio.current_time()
        self.ask()
        with real_work(), anyio.move_on_after(max(0.0, deadline - began)):
            await self.wait()
        if self.done:
            ending = Ending.CRASHED if isinstance(self.error, Exception) else Ending.FINISHED
            return PartReport(self.name, ending, anyio.current_time() - began)
        report = PartReport(self.name, Ending.STUCK, anyio.current_time() - began, tuple(filter(None, (self.where,))))
        self._grace = 0.0  # it has had its time
        self.cancel()
        await self.wait()
        return report


class DaemonScope:
    """A task group for tasks that run as long as the program does.

    ``async with DaemonScope("name") as scope`` opens it. Leaving the block stops the tasks in the reverse order of their start.
    Each is asked to stop by its ``stop`` callable, and all have ``timeout`` seconds for it. Else it is cancelled, with
    ``grace`` seconds to clean up. A task that raises cancels the others, as in any task group; a lone error comes out by
    itself, not wrapped in a group. Where the block is left by an error, or the scope is cancelled from outside, the tasks are
    asked to stop and cancelled at the same time.

    :raises ConfigError: ``timeout`` or ``grace`` is no number of seconds from 0 (``math.inf``: no end).
    """

    def __init__(self, name: str = "scope", *, timeout: float = 10.0, grace: float = 5.0) -> None:
        for what, seconds in (("timeout", timeout), ("grace", grace)):
            if not is_number(seconds, 0) and seconds != math.inf:
                raise ConfigError(f"DaemonScope: {what} must be a number of seconds from 0, not {shown(seconds)}")
        self.name = name
        self.timeout = timeout
        self.grace = grace
        self.reports: list[PartReport] = []
        self._daemons: list[Daemon] = []
        self._some_ended = False
        self._group: TaskGroup | None = None

    def __repr__(self) -> str:
        running = [daemon.name for daemon in self._daemons if not daemon.done]
        return f"<DaemonScope {self.name!r} running {running}>"

    @property
    def daemons(self) -> tuple[Daemon, ...]:
        """Its tasks, in the order of their start. A task that has ended is forgotten when the next one starts."""
        return tuple(self._daemons)

    async def __aenter__(self) -> Self:
        if self._group is not None:
            raise RuntimeError(f"DaemonScope {self.name!r} is open already; make another one")
        self._daemons.clear()
        self._group = anyio.create_task_group()
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        group = self._entered()
        try:
            if error is None:
                try:
                    await self.stop(timeout=self.timeout)
                except BaseException as stopping:
                    kind, error, trace = type(stopping), stopping, stopping.__traceback__
            if error is not None:
                self._ask_all()
            return await group.__aexit__(kind, error, trace)
        except BaseExceptionGroup as errors:
            lone = lone_error(_without_cancellations(errors))
            if lone is error:
                return False  # the block's own error goes on as it is
            if lone is errors:
                raise
            raise lone from lone.__cause__
        finally:
            self._group = None

    def start_soon(
        self,
        fn: Callable[..., Awaitable[Any]],
        *args: Any,
        name: str | None = None,
        stop: Callable[[], object] | None = None,
    ) -> Daemon:
        """Start ``fn(*args)`` as a task of this scope. ``stop``, a plain function, is called to ask it to end by itself.

        :raises InvalidParameterError: ``fn`` is no async function: a plain one, which would block the event loop, runs by
            :meth:`start_thread`, and of a coroutine the function is passed.
        """
        daemon = Daemon(self._check(fn, name, stop, "start_soon"), stop, self)
        self._add(daemon)
        self._entered().start_soon(daemon._run, fn, args, name=daemon.name)  # noqa: SLF001 - one module
        return daemon

    def start_thread(
        self,
        fn: Callable[..., object],
        *args: Any,
        name: str | None = None,
        stop: Callable[[], object] | None = None,
    ) -> Daemon:
        """Start ``fn(*args)``, a plain function, in a thread of its own, with a copy of this context.

        ``stop`` is called on the event loop to ask it to end. A thread cannot be cancelled: stopping the scope waits for it
        until the deadline, reports the line that it executes (``reports``), and leaves it behind. Where the scope is cancelled,
        or left by an error, it has ``grace`` seconds. It is a daemon thread, which does not hold up the end of the program.
        What it raises counts as raised by a task of the scope.

        :raises InvalidParameterError: ``fn`` is async or a generator, or cannot be called.
        """
        daemon = ThreadDaemon(self._check(fn, name, stop, "start_thread"), stop, self, partial(fn, *args))
        self._add(daemon)
        self._entered().start_soon(daemon._run, daemon.run, (), name=daemon.name)  # noqa: SLF001 - one module
        return daemon

    async def start(
        self,
        fn: Callable[..., Awaitable[Any]],
        *args: Any,
        name: str | None = None,
        stop: Callable[[], object] | None = None,
    ) -> Any:
        """Start ``fn(*args, task_status=…)`` and wait until it calls ``task_status.started(value)``; that value.

        :raises InvalidParameterError: as :meth:`start_soon` has it.
        """
        daemon = Daemon(self._check(fn, name, stop, "start"), stop, self)
        self._add(daemon)

        async def run(*, task_status: TaskStatus[Any]) -> None:
            await daemon._run(fn, args, task_status=task_status)  # noqa: SLF001 - one module

        return await self._entered().start(run, name=daemon.name)

    async def stop(self, *, timeout: float | None = None) -> list[PartReport]:
        """Stop the tasks in the reverse order of their start. Return how each ended (also kept in ``reports``).

        All together have ``timeout`` seconds (by default the scope's) to end when asked. A task that is late is cancelled, and
        has ``grace`` seconds to clean up. Cancelled itself, it leaves the tasks that it has not asked yet as they are: leaving
        the block stops them.
        """
        seconds = self.timeout if timeout is None else timeout
        deadline = anyio.current_time() + seconds
        reports = []
        for daemon in reversed(self._daemons):
            if not daemon.done:
                reports.append(await daemon.stop(deadline, self.grace))
        self.reports.extend(reports)
        return reports

    def cancel(self) -> None:
        """Cancel every task of the scope at once."""
        if self._group is not None:
            self._group.cancel_scope.cancel()

    def _ask_all(self) -> None:
        """Ask what still runs to stop, in the reverse order of its start, as the group is about to cancel it."""
        for daemon in reversed(self._daemons):
            daemon.ask()

    def _check(self, fn: Callable[..., object], name: str | None, stop: Callable[[], object] | None, how: str) -> str:
        """Return the name of the task. Raise if it cannot be started by the method ``how``."""
        self._entered()
        label = name or getattr(fn, "__qualname__", None) or repr(fn)
        in_thread = how == "start_thread"
        problem: str | None = None
        if not callable(fn):
            what = "a plain function" if in_thread else "an async function"
            problem = f"a task is {what} and its arguments, {instead_of(fn, how)}"
        elif in_thread and is_async(fn):
            problem = f"{label} is async; use start_soon() for it"
        elif in_thread and is_generator(fn):
            problem = f"{label} is a generator, which would never run; return the result instead of yielding"
        elif not in_thread and not gives_coroutine(fn):
            problem = (
                f"{label} is no async function, and would block the event loop; use start_thread() for it, or pass the async"
                " function itself"
            )
        elif stop is not None and (not callable(stop) or is_async(stop) or is_generator(stop)):
            problem = f"stop= of {label} is a plain function without parameters, not {stop!r}"
        if problem is not None:
            raise InvalidParameterError(f"DaemonScope {self.name!r}: {problem}")
        return label

    def _add(self, daemon: Daemon) -> None:
        if self._some_ended:
            self._some_ended = False
            self._daemons[:] = [old for old in self._daemons if not old.done]
        self._daemons.append(daemon)

    def _entered(self) -> TaskGroup:
        if self._group is None:
            raise RuntimeError(f"DaemonScope {self.name!r} is not open; use `async with`")
        return self._group


def _without_cancellations(errors: BaseExceptionGroup[BaseException]) -> BaseExceptionGroup[BaseException]:
    """Return the errors beside the cancellations: a trio nursery that is cancelled raises both."""
    cancellations, others = errors.split(anyio.get_cancelled_exc_class())
    return errors if cancellations is None or others is None else others


def lone_error(error: BaseException) -> BaseException:
    """Return the one error inside nested groups of one, or ``error`` itself if there are several."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def first_error(error: BaseException) -> BaseException:
    """Return the first error inside nested groups, for tasks that all fail for the same reason."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _current_coroutine() -> Any:
    if async_library() == "trio":
        import trio

        return trio.lowlevel.current_task().coro
    import asyncio

    task = asyncio.current_task()
    return task.get_coro() if task is not None else None
