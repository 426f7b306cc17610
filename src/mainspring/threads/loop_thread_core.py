"""What runs in the thread of a ``LoopThread``: its states, its queue of callbacks, the submitted tasks, and the end of both."""

from __future__ import annotations

import atexit
import inspect
import os
import sys
import threading
from collections import deque
from contextlib import suppress
from contextvars import ContextVar, copy_context
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import anyio
import anyio.lowlevel

from mainspring.core import clock
from mainspring.core.introspection import innermost, unrun
from mainspring.core.loggers import Logger
from mainspring.core.process import call_soon, carried_context, event_loop, in_event_loop
from mainspring.core.state_machine import LoopThreadState
from mainspring.core.tracebacks import beneath, where, where_thread
from mainspring.errors import (
    ConfigError,
    InvalidParameterError,
    LoopNotRunningError,
    MainspringError,
    TaskExitError,
    TicketAbandonedError,
)
from mainspring.threads.ticket import Ticket

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from anyio.abc import TaskGroup


JOIN_WITHIN: Final = 1.0
"""Seconds that are waited for a thread whose work is over to be gone: it has a few instructions left."""


class Gate:
    """What threads wait for, and one opens: a :class:`threading.Event` whose waiters hold nothing that is needed to open it."""

    def __init__(self) -> None:
        self._shut = threading.Lock()
        self._shut.acquire()
        self.is_open = False

    def open(self) -> None:
        """Let all through, now and later; idempotent."""
        self.is_open = True
        self._let_through()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until it is open, at most ``seconds``. True if it is."""
        # Each lets the next one through. One that comes in between those two steps finds it open.
        if not self.is_open and self._shut.acquire(
            timeout=-1 if seconds is None else min(seconds, threading.TIMEOUT_MAX)
        ):
            self._let_through()
        return self.is_open

    def _let_through(self) -> None:
        with suppress(RuntimeError):  # two have opened it at once
            self._shut.release()


T = TypeVar("T")


class Submission(Generic[T]):
    """One submitted function: called in the event loop, it starts the task that completes its ticket."""

    def __init__(
        self,
        core: LoopCore,
        fn: Callable[..., Awaitable[T]],
        args: tuple[Any, ...],
        stop: Callable[[], object] | None,
        stop_timeout: float | None,
    ) -> None:
        self.name: str = getattr(innermost(fn), "__qualname__", None) or repr(fn)
        self.ticket: Ticket[T] = Ticket(self.name)
        self.stop_timeout = core.stop_timeout if stop_timeout is None else stop_timeout
        self._core = core
        self._fn = fn
        self._args = args
        self._stop = stop
        self.context = carried_context(core.backend)
        self._scope: anyio.CancelScope | None = None
        self._awaitable: Awaitable[T] | None = None

    @property
    def where(self) -> str:
        """The line it waits on."""
        return where(self._awaitable)

    def __call__(self) -> None:
        self._scope = anyio.CancelScope()
        self._core.begin(self)

    def end_within(self, timeout: float | None) -> None:
        """Ask it to end by itself, and cancel it after ``timeout`` seconds; None: after its own ``stop_timeout``."""
        assert self._scope is not None
        if self._stop is not None:
            stop, self._stop = self._stop, None
            self._core.call(stop)
        deadline = anyio.current_time() + (self.stop_timeout if timeout is None else timeout)
        self._scope.deadline = min(self._scope.deadline, deadline)

    async def run(self) -> None:
        """Run it, and answer the ticket."""
        assert self._scope is not None
        try:
            with self._scope:
                value = await self._begun()
        except Exception as error:
            self.fail(error)
        except BaseException as error:
            # Goes no further: it would end an event loop that others share, and a CancelledError of its own would cancel them.
            self.fail(self._of_an_exit(error))
        else:
            if self._scope.cancelled_caught:
                # The caller of stop() knows it, so that an unread ticket need not be logged.
                self.ticket.offer_error(LoopNotRunningError(f"{self._core} has stopped and cancelled {self.name}"))
            else:
                self.ticket.offer(value)  # code that holds the ticket may have answered it
        finally:
            if self._scope.cancel_called:  # whatever it has made of that
                self._core.clean = False
            self._awaitable = None
            self._core.has_ended(self)

    def _of_an_exit(self, error: BaseException) -> MainspringError:
        if _is_cancellation(error):
            return TicketAbandonedError(f"{self.name} was cancelled in {self._core} ({type(error).__name__})")
        what = TaskExitError(f"{self.name} raised {error!r} in {self._core}; to end that, call its stop()")
        what.__cause__ = error
        return what

    def _begun(self) -> Awaitable[T]:
        self._awaitable = self._fn(*self._args)
        if not inspect.isawaitable(self._awaitable):
            raise InvalidParameterError(f"submit() takes an async function, and {self.name} is none; post() takes such")
        return self._awaitable

    def fail(self, error: BaseException) -> None:
        """Let the ticket have an error, where it has no answer yet."""
        for raised in filter(None, (error, error.__cause__)):  # the frames here refer to the ticket: no cycle is made
            raised.__traceback__ = beneath(raised.__traceback__, __name__)
        self.ticket.offer_error(error, work=f"{self.name}, submitted to {self._core},")


def _is_cancellation(error: BaseException) -> bool:
    try:
        return isinstance(error, anyio.get_cancelled_exc_class())
    except anyio.NoEventLoopError:  # the event loop is gone, and the coroutine is closed with it
        return True


_log = Logger("mainspring")

_within: ContextVar[LoopCore] = ContextVar("mainspring_loop_thread")
"""Whose work this code is: a callback or a task of its event loop, or what one of them has given to a worker thread."""

TURN: Final = 0.005
"""Seconds for which callbacks are called before the event loop looks at its other work: as long as Python lets a thread run."""


class LoopCore:
    """What the thread of a LoopThread knows: the queue, the event loop, and when both come to their end."""

    def __init__(
        self, name: str, backend: str, options: dict[str, Any], stop_timeout: float, cancel_grace: float
    ) -> None:
        self.name = name
        self.backend = backend
        self.options = options
        self.stop_timeout = stop_timeout
        self.cancel_grace = cancel_grace
        # Each is set once, in one step that nothing can come between. So no move needs a lock.
        self._started = False
        self._loop_runs = False
        self._stopping = False
        self._ended = False
        self._pid: int | None = None
        self._thread: threading.Thread | None = None
        self._starter = threading.Lock()  # taken by the first thread to start it, and never given back
        self._ready = Gate()
        self._over = Gate()
        self._error: BaseException | None = None
        # Each entry is a list of the one function, so that it can be taken out of it once: to be called, or to be refused.
        self._queue: deque[list[Callable[[], object]]] = deque()
        self._awake = False
        self._calling = False
        self._idle_waiters: list[Gate] = []
        self._loop: object = None
        self._stop_told: anyio.Event | None = None
        self._timeouts: list[float] = []
        self._longest = stop_timeout
        self.tasks: TaskGroup | None = None
        self.running: set[Submission[Any]] = set()
        self.clean = True
        """True while all has ended by itself so far. Once False, it stays so."""

    def __str__(self) -> str:
        return f"loop thread {self.name!r}"

    # ---------------------------------------------------------------------------------------------- from any thread

    @property
    def state(self) -> LoopThreadState:
        """Its state."""
        if self._ended:
            return LoopThreadState.STOPPED
        if self._stopping:
            return LoopThreadState.STOPPING if self._started else LoopThreadState.STOPPED
        if self._loop_runs:
            return LoopThreadState.RUNNING
        return LoopThreadState.STARTING if self._started else LoopThreadState.IDLE

    def is_foreign(self) -> bool:
        """True if another process, from which this one was forked, has started it."""
        return self._pid is not None and self._pid != os.getpid()

    def _check_process(self) -> None:
        if self.is_foreign():  # asked before any lock is taken: the parent may have held it when it forked
            raise ConfigError(
                f"{self} runs in process {self._pid}, from which this one was forked; make a new LoopThread after the fork"
            )

    def _claim(self) -> None:
        self._check_process()
        self._pid = os.getpid()

    def not_running(self) -> LoopNotRunningError:
        """Return the error of what it cannot take (any more)."""
        state = self.state
        advice = "start() it first" if state is LoopThreadState.IDLE else "make a new LoopThread"
        return LoopNotRunningError(f"{self} is {state}; {advice}")

    def start(self) -> None:
        self._claim()
        if self._starter.acquire(blocking=False):
            self._launch()
        self._ready.wait()
        if self._error is not None:
            raise self._error
        if self.state is not LoopThreadState.RUNNING:
            raise self.not_running()

    def _launch(self) -> None:
        self._started = True
        if self._stopping:  # it was stopped before; a stop from here on waits for the end
            self._end(None)
            return
        # A daemon, since Python waits for all others before it calls what `atexit` holds, and would wait for ever.
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        atexit.register(self._at_exit)
        try:
            self._thread.start()
        except BaseException as error:
            self._end(error)
            raise

    def _call_soon(self, fn: Callable[[], object]) -> None:
        """Call from outside of the event loop. It is a function of its own: :meth:`_interrupts_a_call` looks for its frame."""
        call_soon(self._loop, fn)

    def _interrupts_a_call(self) -> bool:
        """True if this is a signal handler in the midst of a call into trio, of which the loop needs a lock in order to end.

        Asked of the stack: a mark that each call sets and takes back would stay where a KeyboardInterrupt comes in between.
        """
        frame = sys._getframe() if self.backend == "trio" else None  # noqa: SLF001 - documented, for want of another way
        while frame is not None:
            if frame.f_code is LoopCore._call_soon.__code__ and frame.f_locals["self"] is self:
                return True
            frame = frame.f_back
        return False

    def post(self, fn: Callable[[], object]) -> bool:
        if not self._loop_runs or self._stopping:
            self._check_process()
            return False
        if self._pid != os.getpid():
            self._check_process()
        entry = [fn]
        self._queue.append(entry)
        # No lock, so that a signal handler or a garbage collection can come in at any point, and do the same. What is in
        # the queue before the flip is called. Where the flip came first, it is taken back, if it is still there to be taken.
        if self._stopping and _taken(entry) is not None:
            return False
        if not self._awake:
            try:
                self._awake = True
                self._call_soon(self._turn)
            except BaseException:  # a KeyboardInterrupt in between: others believe by now that it is awake
                self._call_soon(self._turn)
                raise
        return True

    @property
    def in_flight(self) -> int:
        # Read in the order in which work moves on, so that none is missed; one that moves just now may count twice.
        return 0 if self._over.is_open else len(self._queue) + self._calling + len(self.running)

    def wait_idle(self, timeout: float | None) -> bool:
        self._check_process()
        if self._is_within():
            raise ConfigError(f"{self}: wait_idle() would wait for what calls it; call it from another thread")
        if in_event_loop():
            raise ConfigError(
                f"{self}: wait_idle() would block the event loop of this thread; use `await"
                " anyio.to_thread.run_sync(thread.wait_idle)`"
            )
        if self._loop is None:  # nothing was accepted yet
            return True
        gate = Gate()
        self._idle_waiters.append(gate)
        try:
            if self._over.is_open:  # asked after the registration: the end cannot be missed in between
                return True
            self._call_soon(self._tell_if_idle)
            return gate.wait(timeout)
        finally:
            self._idle_waiters.remove(gate)

    def stop(self, timeout: float | None) -> bool:
        self._claim()
        self._ask_to_stop(timeout)
        if not self._started or self._is_within() or self._interrupts_a_call():
            return True
        began = clock.monotonic()
        while not self._over.is_open and (left := began + self._stop_within(timeout) - clock.monotonic()) > 0:
            self._over.wait(left)
        if not self._over.is_open:
            self.clean = False
            _log.error("%s has not ended within %g s: %s", self, self._stop_within(timeout), self._what_holds_it())
            return False
        if self._thread is not None and self._thread.ident is not None:  # else it could not be started
            self._thread.join(JOIN_WITHIN)
        return self.clean

    def _is_within(self) -> bool:
        """True if this is a part of what has to end first."""
        return self._thread is threading.current_thread() or _within.get(None) is self

    def _stop_within(self, timeout: float | None) -> float:
        return (self._longest if timeout is None else timeout) + self.cancel_grace

    def _what_holds_it(self) -> str:
        tasks = [f"task {submission.name} at {submission.where}" for submission in tuple(self.running)]
        thread = self._thread
        at = where_thread(thread.ident) if thread is not None and thread.ident is not None else ""
        return "; ".join([f"it stands at {at}", *tasks])

    def _ask_to_stop(self, timeout: float | None = None) -> None:
        if timeout is not None:
            self._timeouts.append(timeout)
        self._stopping = True
        if self._loop is not None:
            self._call_soon(self._told_to_stop)

    @property
    def _timeout(self) -> float | None:
        """The shortest that a stop has named."""
        return min(self._timeouts, default=None)

    def drop(self) -> None:
        """Stop, as the user's object is gone. The garbage collector calls this, wherever it runs: it must not wait."""
        if not self.is_foreign():
            self._ask_to_stop()

    def _at_exit(self) -> None:
        if not self.is_foreign():
            self.stop(None)

    # ----------------------------------------------------------------------------------------------- in the own thread

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            anyio.run(self._main, backend=self.backend, backend_options=self.options)
        except BaseException as failed:
            error = failed
        self._end(error)

    async def _main(self) -> None:
        self._stop_told = anyio.Event()
        _within.set(self)
        self._context = copy_context()
        async with anyio.create_task_group() as self.tasks:
            self._loop = event_loop()
            self._loop_runs = True
            if self._stopping:
                self._stop_told.set()
            self._ready.open()
            await self._stop_told.wait()
            while self._queue:
                self._turn()
                await anyio.lowlevel.checkpoint()

    def _end(self, error: BaseException | None) -> None:
        """Release all waiters, after the event loop has ended or could not start."""
        atexit.unregister(self._at_exit)
        began = self._loop is not None
        self._stopping = True  # first: what is posted from here on is refused
        self._ended = True
        if began and error is not None:
            self.clean = False
            _log.critical("the event loop of %s broke", self, exc_info=error)
        elif error is not None:
            self._error = error
        self._ready.open()
        for submission in tuple(self.running):
            submission.fail(self.not_running())
        if error is not None:
            self._give_up()
        # Else all that came in before the flip was called. What is left came after it, and its posters take it back.
        self._over.open()
        for gate in tuple(self._idle_waiters):
            gate.open()

    def _give_up(self) -> None:
        """Tell of what is in the queue of an event loop that broke."""
        lost = 0
        while self._queue:
            entry = self._queue.popleft()
            entry.append(_refused)  # first, so that a poster that has yet to look for its function finds one of the two
            fn = _taken(entry)
            if isinstance(fn, Submission):
                fn.fail(self.not_running())
            else:
                lost += fn is not _refused
        if lost:
            _log.error("%s could not call %d callbacks that were in its queue", self, lost)

    # asyncio calls what comes from other threads with their context variables, which is why these two change the context.

    def _turn(self) -> None:
        self._context.run(self._call_queued)

    def _call_queued(self) -> None:
        if not self._queue:
            self._awake = False
            if not self._queue:  # asked again: a thread that posted meanwhile may have seen it awake
                return
            self._awake = True
        end = clock.monotonic() + TURN
        self._calling = True
        while self._queue and clock.monotonic() < end:
            fn = _taken(self._queue.popleft())
            if fn is not None:
                self.call(fn)
        self._calling = False
        if self._idle_waiters:
            self._tell_if_idle()
        # In every case: callbacks rarely come alone, and one look too many costs less than waking the loop for each.
        call_soon(self._loop, self._turn)

    def _tell_if_idle(self) -> None:
        if not self._queue and not self._calling and not self.running:
            for gate in tuple(self._idle_waiters):
                gate.open()

    def has_ended(self, submission: Submission[Any]) -> None:
        """Note that its task is over, and its ticket answered."""
        self.running.discard(submission)
        if self._idle_waiters:
            self._tell_if_idle()

    def call(self, fn: Callable[[], object]) -> None:
        """Call a function that was posted. Its failure is logged, and does not reach the event loop."""
        try:
            result = fn()
        except BaseException:  # a SystemExit too: it must not end an event loop that others share
            _log.exception("%s: a posted callback raised: %r", self, fn)
            return
        if result is not None and (what := unrun(result)) is not None:
            _log.error("%s: a posted callback returned %s, which nothing runs; use submit() for it: %r", self, what, fn)

    def _told_to_stop(self) -> None:
        self._context.run(self._end_all)

    def _end_all(self) -> None:
        assert self._stop_told is not None
        self._stop_told.set()
        for submission in tuple(self.running):
            submission.end_within(self._timeout)

    def begin(self, submission: Submission[Any]) -> None:
        """Start its task."""
        assert self.tasks is not None
        assert self._stop_told is not None
        self.running.add(submission)
        self._longest = max(self._longest, submission.stop_timeout)
        submission.context.run(_within.set, self)
        submission.context.run(partial(self.tasks.start_soon, submission.run, name=submission.name))
        if self._stop_told.is_set():
            submission.end_within(self._timeout)


def _taken(entry: list[Callable[[], object]]) -> Callable[[], object] | None:
    """Take the function out of an entry. Return None if another caller has taken it."""
    try:
        return entry.pop(0)
    except IndexError:
        return None


def _refused() -> None:
    """Stand in an entry in the place of a function that will not be called."""
