"""Virtual time on asyncio: an event loop whose clock is virtual, and whose selector asks the judge before it would block.

Callbacks of ``call_soon`` run first in, first out, as asyncio promises. Programs rely on it, so a seed does not change it. The
order of timers that are due at the same instant is open in asyncio, and follows from the seed.

asyncio does not tell what a blocked task waits for. Real work is found so:

- a call of ``loop.run_in_executor`` (``asyncio.to_thread``, name resolution) whose future is not done;
- a task that waits in ``anyio.to_thread.run_sync``, in ``anyio.run_process``, or in the methods of ``asyncio.subprocess``;
- a task that awaits a future in a file whose code another thread is executing: a library with its own thread, as aiosqlite;
- an open connection whose other end is not on this event loop, and a pipe that something else can write to.

A thread that waits for a coroutine on this event loop does not hold the clock, since the coroutine may sleep
(``anyio.from_thread``, ``asyncio.run_coroutine_threadsafe``).
"""

from __future__ import annotations

import asyncio
import math
import os
import selectors
import socket
import stat
import struct
import sys
import threading
from contextlib import nullcontext
from itertools import count
from random import Random
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet

from mainspring.core import clock
from mainspring.core.tracebacks import await_chain, stack_of
from mainspring.testing.asyncio_internals import next_timer, run_timers_exactly, shuffle_next
from mainspring.testing.idle import IdleJudge, VirtualTime

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop, Future, Task
    from collections.abc import Callable, Coroutine, Iterator
    from contextlib import AbstractContextManager
    from contextvars import Context
    from types import FrameType

T = TypeVar("T")

_ANYIO = "anyio/_backends/_asyncio.py"
_PROCESS_CALLS = ("anyio/_core/_subprocesses.py", "asyncio/subprocess.py", "asyncio/base_subprocess.py")
_THREAD_CALL = "run_sync_in_worker_thread"
_EVENT_LOOP_PACKAGES = ("anyio", "asyncio", "mainspring")
LOOK_AGAIN, LOOK_AGAIN_MAX = 0.001, 0.05
"""Real seconds after which threads are looked at again, at first and at most: one may begin, or wait for the event loop."""
ANYIO_LOOKS_EVERY = 0.1
"""Seconds between two looks of ``anyio.wait_all_tasks_blocked`` on asyncio."""
_BEGINNING = "a thread that begins"
_CREDENTIALS = struct.Struct("3i")


def running_clock() -> LoopClock | None:
    """Return the virtual clock of the running asyncio loop, or None if it has none, or none runs in this thread."""
    loop = asyncio._get_running_loop()  # noqa: SLF001 - in its __all__, for want of a name without an underscore
    return loop.clock if isinstance(loop, VirtualLoop) else None


class LoopClock:
    """The clock of a :class:`VirtualLoop`, with the methods of trio's ``MockClock``."""

    def __init__(self) -> None:
        self.autojump_threshold = 0.0  # which `clock.hold` keeps; the judge goes by the hold itself
        self.loop: VirtualLoop | None = None
        self._now = 0.0

    def current_time(self) -> float:
        return self._now

    def jump(self, seconds: float) -> None:
        """Move the clock forward."""
        self.move_to(self._now + seconds)

    def move_to(self, now: float) -> None:
        """Move the clock to an instant."""
        self._now = now
        if self.loop is not None:
            run_timers_exactly(self.loop, now)

    async def wait_all_tasks_blocked(self) -> None:
        """Wait until every other task is blocked."""
        assert self.loop is not None
        await self.loop.settled()


class _Selector(selectors.DefaultSelector):
    """A selector that asks what to do where it would block."""

    def __init__(self) -> None:
        super().__init__()
        self.on_idle: Callable[[float | None], list[Any]] | None = None

    def select(self, timeout: float | None = None) -> list[Any]:
        if self.on_idle is None or (timeout is not None and timeout <= 0):
            return super().select(timeout)
        return super().select(0) or self.on_idle(timeout)

    def block(self, seconds: float) -> list[Any]:
        """Wait for I/O, for that many real seconds at most."""
        return super().select(None if seconds == math.inf else seconds)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop of asyncio in virtual time. It keeps an account of the threads that it has sent out and that call in."""

    def __init__(self, clock: LoopClock, on_idle: Callable[[float | None], list[Any]]) -> None:
        self.clock = clock
        self.started: WeakKeyDictionary[Task[Any], int] = WeakKeyDictionary()
        """The tasks, and the numbers of their starts."""
        self.roots: WeakSet[Task[Any]] = WeakSet()
        """Tasks that were made while the loop did not run: what runs it."""
        self.executor_calls: set[Future[Any]] = set()
        self.called_in: WeakKeyDictionary[Task[Any], int] = WeakKeyDictionary()
        """Tasks that other threads have started, and the identifiers of these threads."""
        self._numbers = count()
        self._caller: int | None = None
        self._settled: list[Future[None]] = []
        self.selector = _Selector()
        super().__init__(self.selector)
        self.own_descriptors = {key.fd for key in self.selector.get_map().values()}
        """File descriptors by which the loop is woken."""
        self.selector.on_idle = on_idle
        clock.loop = self
        clock.move_to(clock.current_time())

    def time(self) -> float:
        return self.clock.current_time()

    def create_task(self, coro: Any, **keywords: Any) -> Task[Any]:
        task: Task[Any] = super().create_task(coro, **keywords)
        self.started[task] = next(self._numbers)
        if not self.is_running():
            self.roots.add(task)
        if self._caller is not None:
            self.called_in[task] = self._caller
        return task

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Any:
        """As usual, but the sleep between two looks of ``anyio.wait_all_tasks_blocked`` ends once all tasks are blocked."""
        if delay == ANYIO_LOOKS_EVERY:
            code = sys._getframe(2).f_code  # noqa: SLF001 - the only way to see who sleeps
            if code.co_name == "wait_all_tasks_blocked" and code.co_filename.endswith(_ANYIO):
                future = self._until_settled()
                future.add_done_callback(lambda done: None if done.cancelled() else callback(*args), context=context)
                return future  # which can be cancelled, as a handle can
        return super().call_later(delay, callback, *args, context=context)

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> Future[T]:  # type: ignore[override]
        future = super().run_in_executor(executor, func, *args)
        self.executor_calls.add(future)
        future.add_done_callback(self.executor_calls.discard)
        return future

    async def shutdown_default_executor(self, *args: Any) -> None:
        with clock.hold(self.clock):
            await super().shutdown_default_executor(*args)

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        return super().call_soon_threadsafe(self._call_in, threading.get_ident(), callback, *args, context=context)

    def _call_in(self, thread: int, callback: Callable[..., object], *args: Any) -> None:
        self._caller = thread
        try:
            callback(*args)
        finally:
            self._caller = None

    async def settled(self) -> None:
        """Wait until all other tasks are blocked, and no timer is due."""
        await self._until_settled()

    def _until_settled(self) -> Future[None]:
        future = self.create_future()
        self._settled.append(future)
        return future

    def settle(self) -> bool:
        """Wake the tasks that wait for all others to be blocked. Return False if there are none."""
        waiting = [future for future in self._settled if not future.done()]
        self._settled.clear()
        for future in waiting:
            future.set_result(None)
        return bool(waiting)


class AsyncioTime(VirtualTime):
    """Virtual time in one event loop of asyncio, which ``options`` has anyio make."""

    def __init__(self, *, can_leave: bool) -> None:
        self.clock: LoopClock = LoopClock()
        self.options = {"loop_factory": self._make_loop}
        self.judge = IdleJudge(self, can_leave=can_leave)
        self._random = Random(0)  # noqa: S311 - reproducibility is the point
        self._timeout: float | None = None
        self._events: list[Any] = []

    def _make_loop(self) -> AbstractEventLoop:
        return VirtualLoop(self.clock, self._idle)

    @property
    def _loop(self) -> VirtualLoop:
        assert self.clock.loop is not None
        return self.clock.loop

    def seeded(self, seed: int) -> AbstractContextManager[None]:
        self._random.seed(seed)
        return nullcontext()

    def _idle(self, timeout: float | None) -> list[Any]:
        """Ask the judge: all tasks are blocked and no I/O is ready. ``timeout`` is how long asyncio would wait."""
        self._timeout, self._events = timeout, []
        if self._loop.settle():
            return []
        waited, look_again = 0.0, LOOK_AGAIN
        while seconds := self.judge.idle(waited=False):
            left = seconds - waited
            if events := self._loop.selector.block(min(look_again, left)):
                return events
            if look_again >= left:
                self.judge.idle(waited=True)
                break
            waited, look_again = waited + look_again, min(2 * look_again, LOOK_AGAIN_MAX)
        return self._events

    def until_next(self) -> float:
        when = next_timer(self._loop)
        if when is None:  # as asyncio says it, rounded
            return math.inf if self._timeout is None else self._timeout
        return when - self.clock.current_time()

    def advance_to_next(self) -> None:
        self._events = self._loop.selector.block(0)
        if self._events:  # of a thread that has ended its work, and itself, since the last look at the selector
            return
        when = next_timer(self._loop)
        self.clock.move_to(self.clock.current_time() + self.until_next() if when is None else when)
        shuffle_next(self._loop, self._random)

    def real_work(self, main: Any) -> str | None:
        loop = self._loop
        others = {thread.ident or 0 for thread in threading.enumerate()} - {threading.get_ident()}
        if not others and not self.may_be_woken():  # neither a thread nor a child process is there to end anything
            return None
        callers = [thread for task, thread in [*loop.called_in.items()] if not task.done() and _waits(thread)]
        calls = len(loop.executor_calls) - len(callers)
        executing: set[str] | None = None
        for task in loop.started:
            if task.done():
                continue
            frame = None
            for frame, _ in await_chain(task.get_coro()):
                if frame.f_code.co_filename.endswith(_PROCESS_CALLS):
                    return "a process"
            if frame is None or not others:
                continue
            if frame.f_code.co_name == _THREAD_CALL and frame.f_code.co_filename.endswith(_ANYIO):
                calls += 1
            elif not _is_event_loops(frame):
                executing = _files_executed_by(others.difference(callers)) if executing is None else executing
                if executing & {frame.f_code.co_filename, _BEGINNING}:
                    return "a thread"
        return "a thread" if calls > 0 else _outside(loop)

    def may_be_woken(self) -> bool:
        return self._loop.selector.get_map().keys() != self._loop.own_descriptors

    def current_task(self) -> Task[Any] | None:
        return asyncio.current_task()

    def tasks(self, main: Any) -> Iterator[tuple[str, Coroutine[Any, Any, Any]]]:
        for task in self._of(main):
            coroutine: Any = task.get_coro()
            yield task.get_name(), coroutine

    def interrupt(self, main: Any, error: BaseException) -> None:
        for task in self._of(main):
            task.cancel(str(error))

    def _of(self, main: Any) -> list[Task[Any]]:
        """Return the tasks that are not done, in order of their starts, without the tasks that run the loop."""
        started = self._loop.started
        tasks = [task for task in started if not task.done() and (task is main or task not in self._loop.roots)]
        return sorted(tasks, key=started.__getitem__)


def _waits(thread: int) -> bool | None:
    """True if a thread waits for the result of a task that it has started; None if it has ended."""
    stack = stack_of(thread)
    if not stack:
        return None
    return any(
        frame.f_code.co_name == "result" and frame.f_code.co_filename.endswith("concurrent/futures/_base.py")
        for frame, _ in stack
    )


def _is_event_loops(frame: FrameType) -> bool:
    """True if the code is of an event loop, or of this package, which holds the clock for the threads that it has."""
    return str(frame.f_globals.get("__name__")).partition(".")[0] in _EVENT_LOOP_PACKAGES


def _files_executed_by(threads: set[int]) -> set[str]:
    """Return the files of the code that the threads execute, and :data:`_BEGINNING` if one is about to begin with its own."""
    files: set[str] = set()
    for thread in threads:
        codes = [frame.f_code for frame, _ in stack_of(thread)]
        own = {code.co_filename for code in codes} - {threading.__file__}
        begins = not own and all(code.co_name != "wait" for code in codes)  # a threading.Timer waits
        files |= {_BEGINNING} if begins else own
    return files


# --------------------------------------------------------------------------------------------------- sockets and pipes


def _outside(loop: VirtualLoop) -> str | None:
    """Return what is open to other processes and threads and could bring the event loop something, or None."""
    found = [key.fd for key in loop.selector.get_map().values() if key.fd not in loop.own_descriptors]
    if not found:
        return None
    peers: list[Any] = []
    here: set[Any] = set()
    for descriptor in found:
        try:
            mode = os.fstat(descriptor).st_mode
        except OSError:
            continue
        if stat.S_ISFIFO(mode) and not _is_written_here(descriptor):
            return "a pipe"
        if stat.S_ISSOCK(mode):
            with socket.socket(fileno=os.dup(descriptor)) as sock:
                here.add(_name(sock.getsockname))
                peers.append(_peer(sock))
    for peer in peers:
        if peer is not None and peer not in here:
            return f"a connection to {peer}"
    return None


def _peer(sock: socket.socket) -> Any:
    """Return the address of the other end, or None if there is none, or it is a socket of this process."""
    if sock.family == socket.AF_UNIX:
        raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        process, _, _ = _CREDENTIALS.unpack(raw)
        return None if process in (0, os.getpid()) else f"process {process}"
    return _name(sock.getpeername)


def _name(ask: Callable[[], Any]) -> Any:
    try:
        name = ask()
    except OSError:  # not connected, or not any more
        return None
    return name[:2] if isinstance(name, tuple) else name


def _is_written_here(descriptor: int) -> bool:
    """True if this process has the other end of the pipe too."""
    pipe = os.readlink(f"/proc/self/fd/{descriptor}")
    for name in os.listdir("/proc/self/fd"):
        try:
            if int(name) != descriptor and os.readlink(f"/proc/self/fd/{name}") == pipe:
                return True
        except OSError:  # the descriptor of the listing itself
            continue
    return False
