"""``LoopThread``: an event loop in a thread of its own, and the way in from all other threads."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar, TypeVarTuple, Unpack

from mainspring.core.introspection import check_plain, gives_coroutine, instead_of, is_async, is_generator, name_of
from mainspring.errors import ConfigError, InvalidParameterError
from mainspring.threads.loop_thread_core import LoopCore, Submission
from mainspring.validation import is_number, shown

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from types import TracebackType

    from mainspring.core.state_machine import LoopThreadState
    from mainspring.threads.ticket import Ticket

T = TypeVar("T")
Args = TypeVarTuple("Args")

STOP_TIMEOUT: Final = 10.0
CANCEL_GRACE: Final = 5.0
_RUN_NOTHING: Final = inspect.CO_COROUTINE | inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR
"""The flags of functions of which a call runs nothing."""


class LoopThread:
    """An event loop that runs in a thread of its own, for programs whose other threads are not async.

    ``with LoopThread() as thread`` starts and stops it; :meth:`post` and :meth:`submit` are the ways in, from any thread. It
    lives once: idle, starting, running, stopping, stopped. An object that is dropped stops its thread, without waiting. The end
    of the interpreter stops all of them. What was accepted is done first, within the same limits as by :meth:`stop`. It belongs
    to the process that started it: in a forked child each call raises :class:`ConfigError`.

    :param name: of the thread, for errors and logs.
    :param backend: ``"asyncio"`` or ``"trio"``.
    :param backend_options: of ``anyio.run``; None: uvloop, where the backend is asyncio and uvloop is installed.
    :param stop_timeout: seconds that :meth:`stop` lets submitted functions run on before it cancels them.
    :param cancel_grace: seconds that those which were cancelled get to clean up before :meth:`stop` waits no longer.
    :raises ConfigError: a value is impossible, or the backend is not installed.
    """

    def __init__(
        self,
        *,
        name: str | None = None,
        backend: str = "asyncio",
        backend_options: Mapping[str, Any] | None = None,
        stop_timeout: float = STOP_TIMEOUT,
        cancel_grace: float = CANCEL_GRACE,
    ) -> None:
        if name is not None and not (isinstance(name, str) and name):
            raise ConfigError(f"LoopThread: name must be text, or None, not {name!r}")
        if backend not in ("asyncio", "trio"):
            raise ConfigError(f'LoopThread: backend must be "asyncio" or "trio", not {backend!r}')
        if backend == "trio" and find_spec("trio") is None:
            raise ConfigError("LoopThread: trio is not installed: pip install 'mainspring[trio]'")
        for what, seconds in (("stop_timeout", stop_timeout), ("cancel_grace", cancel_grace)):
            if not is_number(seconds, 0):
                raise ConfigError(f"LoopThread: {what} must be 0 or more seconds, not {seconds!r}")
        if not (backend_options is None or isinstance(backend_options, Mapping)):
            raise ConfigError(
                f"LoopThread: backend_options must be options by name, as {{'use_uvloop': False}}, not {shown(backend_options)}"
            )
        if backend_options is None:
            backend_options = {"use_uvloop": find_spec("uvloop") is not None} if backend == "asyncio" else {}
        # The thread holds this and not the object of the user, who can hence drop it.
        self._core = LoopCore(name or "loop thread", backend, dict(backend_options), stop_timeout, cancel_grace)
        weakref.finalize(self, self._core.drop).atexit = False

    def __repr__(self) -> str:
        return f"<LoopThread {self.name!r} {self.state}>"

    @property
    def name(self) -> str:
        """Its name."""
        return self._core.name

    @property
    def state(self) -> LoopThreadState:
        """Its state: idle, starting, running, stopping or stopped."""
        return self._core.state

    def start(self) -> None:
        """Start the thread and return once its event loop runs; while that runs already, at once.

        Not from a signal handler: a thread needs locks of the interpreter's to begin, and what the handler has interrupted may
        hold one of them.

        :raises LoopNotRunningError: it was stopped, before or meanwhile; make a new one.
        :raises BaseException: what kept the event loop from starting.
        """
        self._core.start()

    def post(self, fn: Callable[[], object]) -> bool:
        """Have the event loop call ``fn()``; whether that was accepted. From any thread at any time, signal handlers too.

        Only a running one accepts, and what it has accepted it calls, in the order of acceptance, also where a stop comes right
        behind. (One that broke calls nothing more, and an error is logged that says how many it could not call.) False: it does
        not run, and ``fn`` is never called.

        ``fn`` runs in the event loop's thread and must not block: everything there waits for it. What it raises is logged
        (logger ``mainspring``) and harms no other callback. It sees the context variables of the thread, not those of the
        caller; what it sets there, later callbacks see.

        :raises InvalidParameterError: ``fn`` is async (see :meth:`submit`), a generator, or cannot be called.
        """
        code = getattr(fn, "__code__", None)
        if code is None and not callable(fn):
            raise InvalidParameterError(f"{self._core}: post() takes a function, {instead_of(fn, 'submit')}")
        if code.co_flags & _RUN_NOTHING if code is not None else is_async(fn) or is_generator(fn):
            raise InvalidParameterError(
                f"{self._core}: post() takes a plain function, not {fn!r}; use submit() for an async one"
            )
        return self._core.post(fn)

    def submit(
        self,
        async_fn: Callable[[Unpack[Args]], Awaitable[T]],
        *args: *Args,
        stop: Callable[[], object] | None = None,
        stop_timeout: float | None = None,
    ) -> Ticket[T]:
        """Have the event loop run ``async_fn(*args)`` as a task; the ticket gets its result, or the error that it raises.

        The task sees the caller's context variables. The ticket fails with :class:`LoopNotRunningError` at once where the
        event loop does not run, and when a stop cancels the task. An error that is never read from the ticket is logged when
        the ticket is dropped (logger ``mainspring``). May be called from any thread at any time, also from signal handlers.

        :param stop: is called in the event loop when the thread is to stop, to ask the task to end by itself.
        :param stop_timeout: seconds that it then gets instead of the thread's, as a :class:`LoopGroup` needs for its phases.
        :raises InvalidParameterError: ``async_fn`` is no async function (a plain one would block the event loop; pass a
            function, not a coroutine). Or ``stop`` is no plain function, or ``stop_timeout`` is no number of seconds.
        """
        if not callable(async_fn):
            raise InvalidParameterError(
                f"{self._core}: submit() takes an async function and its arguments, {instead_of(async_fn, 'submit')}"
            )
        code = getattr(async_fn, "__code__", None)
        if not (code is not None and code.co_flags & inspect.CO_COROUTINE) and not gives_coroutine(async_fn):
            raise InvalidParameterError(
                f"{self._core}: submit() takes an async function, and {name_of(async_fn)} is plain and would block the event"
                " loop; pass the async function itself and its arguments, or use post() for a short plain one"
            )
        if stop_timeout is not None and not is_number(stop_timeout, 0):
            raise InvalidParameterError(f"{self._core}: stop_timeout must be 0 or more seconds, not {stop_timeout!r}")
        if stop is not None:
            check_plain(stop, f"{self._core}: stop", InvalidParameterError)
        submission = Submission(self._core, async_fn, args, stop, stop_timeout)
        if not self._core.post(submission):
            submission.fail(self._core.not_running())
        return submission.ticket

    @property
    def in_flight(self) -> int:
        """How many posted callbacks and submitted tasks are accepted and not finished. From any thread at any time."""
        return self._core.in_flight

    def wait_idle(self, *, timeout: float | None = None) -> bool:
        """Block this thread until nothing is in flight, at most ``timeout`` seconds (None: no limit); False where it still is.

        What is accepted meanwhile is waited for as well, and so is a task that has no end, as that of a LoopGroup which runs in
        the thread. Where the thread does not run it returns True at once, and when it ends. It may be called from any number of
        threads.

        :raises ConfigError: an event loop runs in this thread, and would stand still. Or this is a part of what is in flight,
            as a callback or a plain handler, and would wait for itself.
        :raises InvalidParameterError: ``timeout`` is not a time.
        """
        if timeout is not None and not is_number(timeout, 0):
            raise InvalidParameterError(f"{self._core}: timeout must be 0 or more seconds, or None, not {timeout!r}")
        return self._core.wait_idle(timeout)

    def stop(self, *, timeout: float | None = None) -> bool:
        """Accept nothing more, do what was accepted, and wait for the end of the thread. Return True if all ended by itself.

        Submitted functions get ``timeout`` seconds (None: ``stop_timeout``), then they are cancelled, and their tickets fail.
        ``cancel_grace`` seconds later this returns False in any case. If a callback blocks or a task swallows its cancellation,
        the line on which the thread stands is logged, and the thread goes on by itself.

        From any thread, any number of times; all calls wait for the same end, and the shortest timeout holds. After one has
        returned False all do, and where the event loop broke. It does not wait, and returns True, in the event loop's own
        thread (as in a callback) and in a worker thread that works for it (as in a plain handler). In another event loop it
        blocks that one: there, ``await anyio.to_thread.run_sync(thread.stop)``. From a signal handler too: a handler that
        interrupts, on trio, the call that wakes the event loop does not wait, since the loop can end only behind that. What
        still runs may need something that the interrupted code has to do, as the :meth:`start` of this thread; it is then
        cancelled or given up at the timeouts.

        :raises InvalidParameterError: ``timeout`` is not a time.
        """
        if timeout is not None and not is_number(timeout, 0):
            raise InvalidParameterError(f"{self._core}: timeout must be 0 or more seconds, or None, not {timeout!r}")
        return self._core.stop(timeout)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._core.is_foreign():  # a forked child that leaves the block has nothing to stop
            self.stop()
