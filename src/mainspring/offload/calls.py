"""The calls of an offload pool from one opening to its closing: queued, running and late ones.

All of it belongs to one event loop, except :meth:`Call.execute`, which runs in a thread. A call holds a *slot* (there are as
many as workers) from its beginning to the real end of its work. So abandoned work still occupies a worker.
"""

from __future__ import annotations

import math
import threading
import weakref
from enum import IntEnum
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import anyio
from anyio import CapacityLimiter, from_thread, to_thread

from mainspring.core.clock import real_work
from mainspring.core.introspection import bearable, cancellations, name_of
from mainspring.core.loggers import Logger
from mainspring.core.process import call_soon, event_loop
from mainspring.core.tracebacks import where_thread
from mainspring.errors import OffloadClosedError, OffloadFullError, OffloadTimeoutError, describe

if TYPE_CHECKING:
    from collections.abc import Callable

_log = Logger("mainspring.offload")


class OffloadJob(Protocol):
    """One call, as the executor of a pool performs it.

    ``killable``: giving the job up kills its worker. ``is_told``: the job can notice the cancellation of its caller.
    """

    fn: Callable[..., Any]
    is_told: bool

    @property
    def killable(self) -> bool: ...

    @property
    def where(self) -> str:
        """The worker that does the job, if that is not the thread that performs it."""

    def perform(self) -> Any:
        """Do the job. Block this thread until it has ended."""

    def on_worker_start(self, starting: Callable[[bool], object]) -> None:
        """Have the performing thread call ``starting(True)`` when a worker is being started, ``starting(False)`` after it."""

    def give_up(self) -> bool:
        """Abandon the job, on the event loop. True if it has begun; otherwise it never will."""


class Progress(IntEnum):
    """How far a call is. Its thread and the event loop both move it on, under the call's lock."""

    WAITING = 0
    RUNNING = 1
    ENDED = 2
    ABANDONED = 3


class Call:
    """One call, between the task that waits for it and the thread that performs it."""

    __slots__ = ("_calls", "_lock", "_progress", "begun", "error", "gone", "job", "result", "scope", "thread_id")

    def __init__(self, calls: Calls, job: OffloadJob) -> None:
        self._calls = calls.itself  # weakly: the thread may outlive the pool and its event loop
        self._lock = threading.Lock()
        self._progress = Progress.WAITING
        self.job = job
        self.begun = False
        """True if the work itself, not only the start of a worker, was under way when the call was abandoned."""
        self.result: Any = None
        self.error: BaseException | None = None
        self.scope: anyio.CancelScope | None = None
        self.gone: anyio.Event | None = None
        self.thread_id: int | None = None

    @property
    def name(self) -> str:
        """The name of the function."""
        return name_of(self.job.fn)

    @property
    def where(self) -> str:
        """The line that its thread is at, or its worker process; empty if neither is known."""
        return self.job.where or ("" if self.thread_id is None else where_thread(self.thread_id))

    @property
    def has_ended(self) -> bool:
        """True if the work ended before it was abandoned."""
        return self._progress is Progress.ENDED

    def execute(self) -> None:
        """Perform the job in this thread, unless the call was abandoned before. :meth:`outcome` gives the result.

        Nothing is raised or returned here: anyio's frames would refer to an error that passes through them. Such a reference
        cycle keeps the objects of the work alive until a garbage collection.
        """
        with self._lock:
            if self._progress is not Progress.WAITING:
                return
            self._progress = Progress.RUNNING
        self.thread_id = threading.get_ident()
        result, error = None, None
        try:
            result = self.job.perform()
        except BaseException as raised:
            error = _bearable(raised, self.job)
        self.thread_id = None
        with self._lock:
            late = self._progress is Progress.ABANDONED
            if not late:
                self._progress, self.result, self.error = Progress.ENDED, result, error
        try:
            if late:
                self._end_late(error)
        finally:
            del result, error  # the traceback refers to this frame, too

    def outcome(self) -> Any:
        """Return the result of the ended work, or raise its error. Can be called once: neither is kept."""
        result, error, self.result, self.error = self.result, self.error, None, None
        try:
            if error is not None:
                raise error
            return result
        finally:
            del result, error

    def abandon(self) -> Progress:
        """Abandon the call, and return its progress before. A call that has not begun never begins."""
        with self._lock:
            before = self._progress
            if before is not Progress.ENDED:
                self._progress = Progress.ABANDONED
        if before is Progress.RUNNING:
            self.begun = self.job.give_up()
        return before

    def _end_late(self, error: BaseException | None) -> None:
        if not self.job.killable:  # else it was killed, which is no news
            self.log_dropped(error)
        calls = self._calls()
        if calls is not None:
            call_soon(calls.loop, self._tell_late)

    def _tell_late(self) -> None:
        calls = self._calls()
        if calls is not None:
            calls.ended_late(self)

    def log_dropped(self, error: BaseException | None) -> None:
        """Log an error that no caller will get. A cancellation that the work noticed was asked for, and is no error."""
        if isinstance(error, Exception):
            _log.warning(
                "%s raised after its caller had stopped waiting: %s", self.name, describe(error), exc_info=error
            )


class Calls:
    """Slots for ``workers`` calls at once, and a queue of at most ``queue_limit`` others before them."""

    def __init__(self, name: str, workers: int, queue_limit: int | None, cancel_grace: float) -> None:
        self.loop = event_loop()
        self.itself = weakref.ref(self)
        self.queued = 0
        self.late: dict[Call, None] = {}
        self.ended_late_count = 0
        self._name = name
        self._queue_limit = queue_limit
        self._cancel_grace = cancel_grace
        self._slots = CapacityLimiter(workers)
        self._threads = CapacityLimiter(math.inf)  # the slots are the bound
        self._scoped: dict[Call, None] = {}
        self._kept: dict[Call, None] = {}
        self._running = 0
        self._scope = type(anyio.CancelScope())  # asking anyio which kind it is takes as long as all of the rest of one
        self._is_cut = False
        self._news: anyio.Event | None = None

    def resize(self, workers: int) -> None:
        """Let that many calls run at once from now on. Running calls go on, also if they are more."""
        self._slots.total_tokens = workers

    @property
    def in_flight(self) -> int:
        """Number of calls being performed whose callers still wait."""
        return self._running

    @property
    def unended(self) -> list[Call]:
        """The calls that :meth:`cut` does not end: late ones, and calls that are run to the end."""
        return [*{**self.late, **self._kept}]

    # --------------------------------------------------------------------------------------------------------- calling

    async def run(self, job: OffloadJob, timeout: float | None) -> Any:
        """Perform a job; abandon it when cancelled, at the timeout, or when the pool closes."""
        call = Call(self, job)
        deadline = math.inf if timeout is None else anyio.current_time() + timeout
        with self._scope(deadline=deadline) as call.scope:
            self._scoped[call] = None
            try:
                if not self._take_slot(call):
                    await self._queue(call, self._queue_limit)
                return await self._execute(call, abandon=True)
            except anyio.get_cancelled_exc_class():
                call.log_dropped(call.error)  # it had ended, and its caller was not told yet
                call.error = None
                raise
            finally:
                del self._scoped[call]
        if self._is_cut:
            raise OffloadClosedError(f"{self._name} was closed before {call.name} had ended; its effects are unknown")
        raise OffloadTimeoutError(f"{call.name} did not end within {timeout:g} s")

    async def run_to_the_end(self, job: OffloadJob, waiting: Callable[[bool], object] | None) -> Any:
        """Perform a job. When cancelled, kill it if possible; return or raise only when it has really ended.

        The result of a job that ended in spite of a cancellation counts. A job whose worker is still starting has not begun,
        and is not waited for. A killed process is waited for up to ``cancel_grace`` seconds. The queue's limit does not apply,
        as the caller has its own. ``waiting`` is called when the wait for a worker begins and ends.
        """
        call = Call(self, job)
        if not self._take_slot(call):
            await self._queue_until_cut(call, waiting)
        self._kept[call] = None
        if waiting is not None:
            job.on_worker_start(partial(self._on_worker_start, call, waiting))
        try:
            return await self._execute(call, abandon=job.killable)
        except anyio.get_cancelled_exc_class():
            if not job.killable:
                raise
            if call.begun:
                await self._wait_until_gone(call)
            if not call.has_ended:
                raise
        finally:
            del self._kept[call]
            if waiting is not None:
                job.on_worker_start(bool)  # nothing: the job and its call would refer to each other
        return call.outcome()

    def _on_worker_start(self, call: Call, waiting: Callable[[bool], object], starts: bool) -> None:
        """Report, from the call's thread, that a worker is being started or has started. The caller may have gone on."""
        call_soon(self.loop, lambda: waiting(starts) if call in self._kept else None)

    async def _queue_until_cut(self, call: Call, waiting: Callable[[bool], object] | None) -> None:
        if waiting is not None:
            waiting(True)
        with self._scope() as call.scope:
            self._scoped[call] = None
            try:
                await self._queue(call, None)
            finally:
                del self._scoped[call]
        if call.scope.cancelled_caught:
            raise OffloadClosedError(f"{self._name} was closed before {call.name} had begun, and it never will")
        call.scope = None
        if waiting is not None:
            waiting(False)

    async def _wait_until_gone(self, call: Call) -> None:
        if call not in self.late:
            return
        call.gone = anyio.Event()
        with anyio.CancelScope(shield=True, deadline=anyio.current_time() + self._cancel_grace), real_work():
            await call.gone.wait()
        if call in self.late:
            at = call.where or "about to end"
            grace = self._cancel_grace
            _log.warning("%s was killed, and has not ended %g s later (%s); it is not waited for", call.name, grace, at)

    def _take_slot(self, call: Call) -> bool:
        """Take a free slot, if there is one."""
        try:
            self._slots.acquire_on_behalf_of_nowait(call)
        except anyio.WouldBlock:
            return False
        return True

    async def _queue(self, call: Call, limit: int | None) -> None:
        if limit is not None and self.queued >= limit:
            raise OffloadFullError(
                f"{self._name}: {self.queued} call(s) wait for one of {self._slots.total_tokens} workers, and queue_limit is"
                f" {limit}; try again later, or raise it"
            )
        self.queued += 1
        try:
            with real_work():  # of others, which may be late by now: only then is it this one's turn
                await self._slots.acquire_on_behalf_of(call)
        finally:
            self.queued -= 1
            self._tell()

    async def _execute(self, call: Call, *, abandon: bool) -> Any:
        self._running += 1
        try:
            with real_work():
                await to_thread.run_sync(call.execute, abandon_on_cancel=abandon, limiter=self._threads)
        except BaseException:  # a cancellation, or there is no thread to be had
            if call.abandon() is Progress.RUNNING:
                self.late[call] = None  # it keeps its slot
            else:
                self._slots.release_on_behalf_of(call)
            raise
        else:
            self._slots.release_on_behalf_of(call)
        finally:
            self._running -= 1
            if self._news is not None:
                self._tell()
        return call.outcome()

    def ended_late(self, call: Call) -> None:
        """Record the end of an abandoned call's work."""
        del self.late[call]
        self.ended_late_count += 1
        self._slots.release_on_behalf_of(call)
        if call.gone is not None:
            call.gone.set()
        self._tell()

    # --------------------------------------------------------------------------------------------------------- waiting

    async def wait_idle(self) -> None:
        """Wait until no call is queued or being performed for a caller."""
        while self._running or self.queued:
            await self._next_news()
        await anyio.lowlevel.checkpoint()

    async def wait_for_late(self) -> None:
        """Wait until the late calls have ended."""
        while self.late:
            with real_work():
                await self._next_news()
        await anyio.lowlevel.checkpoint()

    async def _next_news(self) -> None:
        if self._news is None:
            self._news = anyio.Event()
        await self._news.wait()

    def _tell(self) -> None:
        if self._news is not None:
            self._news.set()
            self._news = None

    def cut(self) -> None:
        """Abandon the queued and running calls. Their callers get :class:`OffloadClosedError`."""
        self._is_cut = True
        for call in self._scoped:
            if call.scope is not None:
                call.scope.cancel()


def _bearable(error: BaseException, job: OffloadJob) -> BaseException:
    """Return the caller's own cancellation if the work noticed it, else a :func:`bearable` error."""
    changed = bearable(error, name_of(job.fn))
    if job.is_told and isinstance(error, cancellations()):
        # The one that was asked for stands in no variable here, as its frames lead back to this one.
        return _cancellation_of_caller() or changed
    return changed


def _cancellation_of_caller() -> BaseException | None:
    """Return the cancellation of the task that waits for this thread, if it is being cancelled."""
    try:
        from_thread.check_cancelled()
    except BaseException as asked_for:
        return asked_for
    return None
