"""``OffloadPool``: blocking and computing work in threads, processes or interpreters, bounded, and never left dangling."""

from __future__ import annotations

import math
import os
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE, CO_GENERATOR
from threading import get_ident
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, TypeVar, TypeVarTuple, Unpack

import anyio
from anyio import CapacityLimiter, to_thread

from mainspring.core.clock import real_work
from mainspring.core.introspection import check_runs, instead_of, is_async, is_generator, name_of, ran
from mainspring.core.loggers import Logger
from mainspring.core.process import event_loop, identity
from mainspring.errors import ConfigError, InvalidParameterError, OffloadClosedError, TaskExitError
from mainspring.offload.calls import Calls
from mainspring.validation import is_number, is_whole

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from mainspring.offload.calls import OffloadJob

Kind = Literal["thread", "process", "interpreter"]
KINDS = ("thread", "process", "interpreter")
MOST_THREADS = 32
"""The default number of threads is bounded by this, as the standard library's pool of threads is."""

T = TypeVar("T")
Args = TypeVarTuple("Args")

_RUNS_NOTHING = CO_COROUTINE | CO_GENERATOR | CO_ASYNC_GENERATOR

_log = Logger("mainspring.offload")


class OffloadPool:
    """Runs plain functions beside the event loop: in threads, in processes, or in interpreters (Python 3.14 and newer).

    ``async with OffloadPool("process", workers=2) as pool`` opens it, and ``await pool.run(fn, *args)`` uses it. It may be
    entered several times (a :class:`MainLoop` does so for as long as it runs); the last one to leave closes it, and then it can
    be opened again. Closing takes no new calls, and waits at most ``shutdown_timeout`` seconds for accepted and late ones. Then
    it cuts: callers get :class:`OffloadClosedError`, and processes are killed. A warning (logger ``mainspring.offload``) names
    what still runs ``cancel_grace`` seconds later (threads at once). Where closing is cancelled, it cuts at once.

    :param kind: ``"thread"`` for calls that wait (blocking drivers, files): cheap, and arguments need not be pickled.
        ``"process"`` for computing, and for code that may have to be killed or may crash. ``"interpreter"`` for computing
        in pure Python without processes.
    :param workers: how many calls run at once; by default the number of processors that this process may use, for threads
        four more (at most 32).
    :param queue_limit: how many calls may wait for a worker; the next one fails with :class:`OffloadFullError` at once.
        None: no limit, as waiting callers are held up by it. 0: none waits.
    :param name: for errors and logs.
    :param shutdown_timeout: seconds that closing waits before it cuts.
    :param cancel_grace: seconds that killed processes, and work that is cut, get to end before nothing waits for them longer.
    :param start_timeout: seconds that a worker process gets to start, as importing your ``__main__`` may be slow.
    :raises ConfigError: a value is impossible, or this Python has no interpreters.
    """

    def __init__(
        self,
        kind: Kind = "thread",
        *,
        workers: int | None = None,
        queue_limit: int | None = None,
        name: str | None = None,
        shutdown_timeout: float = 30.0,
        cancel_grace: float = 5.0,
        start_timeout: float = 60.0,
    ) -> None:
        _check(kind, workers, queue_limit, shutdown_timeout=shutdown_timeout, cancel_grace=cancel_grace)
        if not (is_number(start_timeout, 0) and start_timeout):
            raise ConfigError(f"OffloadPool: start_timeout must be above 0 seconds and finite, not {start_timeout!r}")
        self.kind = kind
        self.workers = _default_workers(kind) if workers is None else workers
        self.queue_limit = queue_limit
        self.name = name or f"{kind} pool"
        self.shutdown_timeout = float(shutdown_timeout)
        self.cancel_grace = float(cancel_grace)
        self.start_timeout = float(start_timeout)
        self._new_executor()  # raises now if this Python cannot run the kind
        self._executor: Executor | None = None
        self._calls: Calls | None = None
        self._entered = 0
        self._closing = False
        self._process: object = None
        self._thread = 0

    def __repr__(self) -> str:
        state = "open" if self.is_open else "closed"
        return (
            f"<OffloadPool {self.name!r} {state} workers={self.workers} in_flight={self.in_flight} queued={self.queued}"
            f" late={self.late}>"
        )

    # ------------------------------------------------------------------------------------------------------ life cycle

    @property
    def is_open(self) -> bool:
        """True if the pool takes calls."""
        return self._entered > 0 and not self._closing

    async def __aenter__(self) -> Self:
        if self._closing:
            raise OffloadClosedError(f"{self.name} is being closed; open it again when that is done")
        if self._entered:
            self._check_owner()
        else:
            self._executor = self._new_executor()
            self._calls = Calls(self.name, self.workers, self.queue_limit, self.cancel_grace)
            # An event loop is the one thing in its thread, so these two tell one from any other.
            self._process, self._thread = identity(), get_ident()
        self._entered += 1
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._entered > 1:
            self._entered -= 1
            return
        assert self._calls is not None
        assert self._executor is not None
        self._closing = True
        try:
            await self._finish(self._calls, self._executor)
        finally:
            try:
                await self._cut(self._calls, self._executor)
            finally:
                self._entered, self._closing, self._executor, self._thread = 0, False, None, 0

    async def _finish(self, calls: Calls, executor: Executor) -> None:
        with anyio.move_on_after(self.shutdown_timeout):
            await calls.wait_idle()
            if not executor.kills:  # else late are only those being killed, and abandoned starts of workers
                await calls.wait_for_late()

    async def _cut(self, calls: Calls, executor: Executor) -> None:
        calls.cut()
        with anyio.CancelScope(shield=True, deadline=anyio.current_time() + self.cancel_grace), real_work():
            await to_thread.run_sync(executor.close, abandon_on_cancel=True, limiter=CapacityLimiter(1))
            await calls.wait_idle()  # the callers are told
            if executor.kills:
                await calls.wait_for_late()
        if unended := calls.unended:
            at = ", ".join(sorted(f"{call.name} ({call.where or 'about to end'})" for call in unended))
            _log.warning("%s was closed, and %d call(s) in it have not ended: %s", self.name, len(unended), at)

    # --------------------------------------------------------------------------------------------------------- calling

    async def run(self, fn: Callable[[Unpack[Args]], T], *args: *Args, timeout: float | None = None) -> T:
        """Call ``fn(*args)`` in a worker and return what it returns, or raise what it raises.

        ``timeout`` is in seconds, from this call on; waiting for a worker counts. At the timeout, and when cancelled, the
        caller goes on at once. Work that had not begun never does. A process is killed, and replaced. Work in a thread or an
        interpreter cannot be stopped (in a thread ``anyio.from_thread.check_cancelled()`` raises from then on): it is *late*.
        It keeps its worker busy until it ends; its result is then dropped, and an exception of it logged as a warning.

        For processes and interpreters the function, its arguments, its result and its exceptions are pickled.

        :raises OffloadTimeoutError: it did not end within ``timeout``.
        :raises OffloadFullError: ``queue_limit`` calls are waiting for a worker.
        :raises OffloadClosedError: the pool is not open here, or was closed before the call had ended.
        :raises OffloadPickleError: something of it cannot be pickled.
        :raises OffloadWorkerDiedError: the process died of it, two died as they received it, or one answered nothing that can
            be understood.
        :raises TaskExitError: it raised an exit, or a cancellation that is not the caller's, such as one of an event loop of
            its own. Or it returned a coroutine or a generator, so that its work has not run.
        :raises InvalidParameterError: ``timeout`` is negative or not a number; or ``fn`` is async, a generator, or no function.
        """
        executor = self._ready()
        if timeout is not None and not is_number(timeout, 0, math.inf):
            raise InvalidParameterError(f"{self.name}: timeout must be 0 or more seconds, or None, not {timeout!r}")
        self._check_plain(fn)
        assert self._calls is not None
        result: T = await self._calls.run(executor.job(fn, args), timeout)
        kind = type(result)
        if kind is CoroutineType or kind is GeneratorType or kind is AsyncGeneratorType:
            ran(result, f"{self.name}: {name_of(fn)}", TaskExitError)
        return result

    async def run_to_the_end(
        self, fn: Callable[[Unpack[Args]], T], *args: *Args, waiting: Callable[[bool], object] | None = None
    ) -> T:
        """Call ``fn(*args)`` in a worker, and do not return before that has ended, not even when cancelled.

        For callers that must not go on while the work does: :class:`MainLoop` calls its plain handlers so.

        Cancelled, it kills a process and waits until that is gone, at most ``cancel_grace`` seconds. Then a warning names the
        process, which keeps its slot until it ends. Work whose process is still starting has not begun, never will, and is not
        waited for. For a thread or an interpreter it waits until the work ends, and then what came of it counts.
        ``queue_limit`` does not apply. If the pool is closed, a call that waits for a worker raises
        :class:`OffloadClosedError`. The warning names what runs in a thread or an interpreter, and that is still waited for.
        Otherwise it raises what :meth:`run` does. A coroutine that ``fn`` returns is returned.

        :param waiting: is called with True if the call has to wait for a worker, to be free or to have started, and with
            False when that is over.
        """
        executor = self._ready()
        self._check_plain(fn)
        assert self._calls is not None
        result: T = await self._calls.run_to_the_end(executor.job(fn, args), waiting)
        return result

    def set_workers(self, workers: int) -> None:
        """Let that many calls run at once from now on. With fewer, calls that run go on, and the next ones wait.

        Processes that are too many by then stay idle until the pool is closed.

        :raises ConfigError: it is no whole number from 1.
        :raises OffloadClosedError: the pool is open on another event loop.
        """
        _check_workers(workers)
        if self._entered:
            self._check_owner()
            assert self._calls is not None
            self._calls.resize(workers)
        self.workers = workers

    def _check_plain(self, fn: Any) -> None:
        code = getattr(fn, "__code__", None)  # of most functions, and quicker to look at than the rest
        if code is not None and not code.co_flags & _RUNS_NOTHING:
            return
        if not callable(fn):
            raise InvalidParameterError(
                f"{self.name}: run() takes a function and its arguments, {instead_of(fn, 'run')}"
            )
        if is_async(fn):
            raise InvalidParameterError(
                f"{self.name} calls plain functions, and {fn!r} is async: pass a plain `def`, or await it where you are"
            )
        if is_generator(fn):
            check_runs(fn, f"{self.name}:", error=InvalidParameterError)

    def _ready(self) -> Executor:
        """Return the executor. Raise if the pool takes no calls, or takes none from this thread or process."""
        if self._thread != get_ident() or self._process is not identity() or self._closing:
            self._check_owner()
            raise OffloadClosedError(f"{self.name} is being closed; it takes no calls")
        assert self._executor is not None
        return self._executor

    def _check_owner(self) -> None:
        if not self._entered:
            raise OffloadClosedError(f"{self.name} is not open; use it inside `async with pool`")
        forked = self._process is not identity()
        if forked or self._thread != get_ident():
            other = "the process this one was forked from" if forked else "another event loop"
            raise OffloadClosedError(f"{self.name} was opened in {other}; make and open a pool of its own here")

    # --------------------------------------------------------------------------------------------------------- watching

    @property
    def in_flight(self) -> int:
        """Number of calls that run and whose callers wait; queued and late calls do not count."""
        return 0 if self._calls is None else self._calls.in_flight

    @property
    def queued(self) -> int:
        """Number of calls that wait for a worker."""
        return 0 if self._calls is None else self._calls.queued

    @property
    def late(self) -> int:
        """Number of calls that still run although their callers have gone on. They keep their workers busy."""
        return 0 if self._calls is None else len(self._calls.late)

    @property
    def ended_late(self) -> int:
        """Number of calls that have ended late since the pool was opened."""
        return 0 if self._calls is None else self._calls.ended_late_count

    async def wait_idle(self, *, late: bool = False) -> None:
        """Wait until no call is queued or in flight, with ``late`` also until no late call runs any more.

        A call that never ends is waited for: put a limit of your own around it.

        :raises OffloadClosedError: the pool was opened on another event loop, or in another process.
        """
        calls = self._calls_here()
        if calls is None:
            return
        await calls.wait_idle()
        while late and calls.late:
            await calls.wait_for_late()
            await calls.wait_idle()

    async def wait_for_late(self) -> None:
        """Wait until no late call runs any more. A call that never ends is waited for: put a limit of your own around it.

        :raises OffloadClosedError: as for :meth:`wait_idle`.
        """
        if (calls := self._calls_here()) is not None:
            await calls.wait_for_late()

    def _new_executor(self) -> Executor:
        if self.kind == "process":
            from mainspring.offload.processes import Processes

            return Processes(cancel_grace=self.cancel_grace, start_timeout=self.start_timeout)
        if self.kind == "interpreter":
            from mainspring.offload.interpreters import Interpreters

            return Interpreters()
        return Threads()

    def _calls_here(self) -> Calls | None:
        """Return the calls of the present opening, or of the last one."""
        if self._calls is not None and self._calls.loop is not event_loop():
            raise OffloadClosedError(f"{self.name} was opened in another event loop; wait for it there")
        return self._calls


class Executor(Protocol):
    """Performs the jobs of a pool, from one opening to its closing. ``kills``: an abandoned job is killed."""

    kills: bool

    def job(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> OffloadJob:
        """Return the job that calls ``fn(*args)``."""

    def close(self) -> None:
        """End the workers. Block, for a bounded time."""


class Threads:
    """Performs jobs in the threads of anyio, which belong to the event loop."""

    kills = False

    def job(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> ThreadJob:
        """Return a job for a thread."""
        return ThreadJob(fn, args)

    def close(self) -> None:
        """Do nothing: idle threads end by themselves."""


class ThreadJob:
    """One call in a thread."""

    __slots__ = ("_args", "fn")
    killable = False
    is_told = True
    where = ""

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.fn = fn
        self._args = args

    def perform(self) -> Any:
        """Call the function."""
        return self.fn(*self._args)

    def on_worker_start(self, starting: Callable[[bool], object]) -> None:
        """Do nothing: a thread is available at once."""

    def give_up(self) -> bool:
        """Do nothing: a thread cannot be stopped from outside."""
        return True


def _default_workers(kind: str) -> int:
    processors = len(os.sched_getaffinity(0))
    return min(MOST_THREADS, processors + 4) if kind == "thread" else processors


def _check_workers(workers: object) -> None:
    if not is_whole(workers, 1):
        raise ConfigError(f"OffloadPool: workers must be a whole number from 1, not {workers!r}")


def _check(kind: object, workers: object, queue_limit: object, **times: object) -> None:
    if kind not in KINDS:
        raise ConfigError(f"OffloadPool: kind must be one of {', '.join(map(repr, KINDS))}, not {kind!r}")
    if workers is not None:
        _check_workers(workers)
    if queue_limit is not None and not is_whole(queue_limit, 0):
        raise ConfigError(f"OffloadPool: queue_limit must be a whole number from 0, or None, not {queue_limit!r}")
    for name, seconds in times.items():
        if not is_number(seconds, 0):
            raise ConfigError(f"OffloadPool: {name} must be 0 or more seconds and finite, not {seconds!r}")
