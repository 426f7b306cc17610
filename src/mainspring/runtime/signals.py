"""Signals and the one place that is told of a shutdown: ``ShutdownCoordinator``.

A signal has one receiver in the process, which tells every listener. In an event loop it is that of anyio
(``_SharedReceiver``), outside of one a plain handler (``_PlainReceiver``). An event loop that runs inside of a plain block
receives instead, and tells both.

A coordinator is made, installed, entered and left. Installed, it is the current one, and no block has been entered. It is
entered by ``async with``, by ``with``, or by a group's run, each also within another. The process has a list of the
coordinators that are installed or entered; the first is the current one.
"""

from __future__ import annotations

import inspect
import os
import signal
import threading
import weakref
from collections import deque
from contextlib import asynccontextmanager, suppress
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Self

import anyio

from mainspring.core import process
from mainspring.core.introspection import check_runs, instead_of, is_async, name_of, ran
from mainspring.core.loggers import Logger
from mainspring.core.run_in_context import run_in
from mainspring.errors import ConfigError, InvalidParameterError
from mainspring.runtime.cancellation import SpuriousAsError
from mainspring.runtime.scope import DaemonScope
from mainspring.threads.entry import Entry
from mainspring.validation import is_whole, shown

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
    from contextlib import AbstractContextManager
    from contextvars import Context
    from types import FrameType, TracebackType

    from anyio.abc import TaskGroup, TaskStatus

_log = Logger("mainspring.signals")

DEFAULT_SIGNALS = (signal.SIGTERM, signal.SIGINT)
CALLBACK_TIMEOUT = 10.0
"""Seconds that shutdown callbacks may take once the block around them has been left."""


class EarlySignals:
    """Holds signals that arrive before an event loop receives them; the second one ends the process at once.

    The command line installs it before it imports the user's module. Without a handler, SIGTERM ends the process, or does
    nothing where it is PID 1 of a container. The receiver that opens later takes the signals that were held.
    """

    def __init__(self, signals: Iterable[int] = DEFAULT_SIGNALS) -> None:
        self.held: deque[int] = deque()
        self._previous = {signum: signal.signal(signum, self._hold) for signum in signals}
        process.set_current("early signals", self)
        process.on_fork(self, EarlySignals._forget)

    def _forget(self) -> None:
        for signum, previous in self._previous.items():
            _restore(signum, previous)

    def _hold(self, signum: int, frame: FrameType | None) -> None:
        self.held.append(signum)
        if len(self.held) > 1:
            os._exit(128 + signum)

    def take(self, signum: int) -> int:
        """Return how often ``signum`` was held; it is forgotten here."""
        count = self.held.count(signum)
        for _ in range(count):
            self.held.remove(signum)
        return count


class _SharedReceiver:
    """The process's one receiver of one signal, shared by all who listen to it.

    anyio's receivers do not nest on asyncio and leave the default handler behind. So there is one for each signal: the first
    listener opens it. The last one closes it and restores the earlier handler. Any listener's task may do the receiving; when
    it ends, another's goes on with the same receiver, so that no signal falls between two.
    """

    def __init__(self, signum: int, around: _PlainReceiver | None) -> None:
        self.signum = signum
        self.around = around
        self.loop = process.event_loop()
        self.listeners: list[Callable[[int], None]] = []
        self._turn = anyio.Lock()
        self._previous = signal.getsignal(signum)
        process.on_fork(self, _SharedReceiver._forget)
        self._context: AbstractContextManager[Any] = anyio.open_signal_receiver(signal.Signals(signum))
        self._receiver = self._context.__enter__()
        self._held = _held(signum)

    def close(self) -> None:
        self._context.__exit__(None, None, None)
        if self._previous is not None:
            signal.signal(self.signum, self._previous)
        process.off_fork(self)

    def _forget(self) -> None:
        _restore(self.signum, self._previous)

    async def receive(self) -> None:
        async with self._turn:
            while self._held:
                self._held -= 1
                self._tell()
            async for _ in self._receiver:
                self._tell()

    def _tell(self) -> None:
        around = self.around.listeners if self.around is not None else ()
        for listener in dict.fromkeys((*self.listeners, *around)):  # a coordinator may have been entered more than once
            listener(self.signum)


def _restore(signum: int, previous: Any) -> None:
    """Give a forked child the handler that the signal had before, unless that is an event loop's (or C code's)."""
    module = getattr(getattr(previous, "func", previous), "__module__", None) or ""
    if previous is None or module.partition(".")[0] in {
        "asyncio",
        "trio",
    }:  # those cancel a task of the parent at Ctrl-C
        previous = signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL
    signal.signal(signum, previous)


class _PlainReceiver:
    """The receiver of one signal where no event loop runs: its listeners are told in the signal handler."""

    around = None

    def __init__(self, signum: int) -> None:
        self.signum = signum
        self.listeners: list[Callable[[int], None]] = []
        self._previous = signal.signal(signum, self._tell)
        process.on_fork(self, _PlainReceiver._forget)

    def close(self) -> None:
        if self._previous is not None:
            signal.signal(self.signum, self._previous)
        process.off_fork(self)

    def _forget(self) -> None:
        _restore(self.signum, self._previous)

    def _tell(self, signum: int, frame: FrameType | None) -> None:
        for listener in tuple(self.listeners):
            listener(signum)


def _held(signum: int) -> int:
    early = process.current("early signals")
    return early.take(signum) if early is not None else 0


def _join(signum: int, listener: Callable[[int], None]) -> _SharedReceiver:
    receiver: _SharedReceiver | _PlainReceiver | None = process.current(f"signal {signum}")
    if isinstance(receiver, _SharedReceiver) and receiver.loop is not process.event_loop():
        raise ConfigError(
            f"{signal.Signals(signum).name} is received by another event loop of this process; use install_signals=False"
        )
    if not isinstance(receiver, _SharedReceiver):
        receiver = _SharedReceiver(signum, receiver)
        process.set_current(f"signal {signum}", receiver)
    receiver.listeners.append(listener)
    return receiver


def _join_plain(signum: int, listener: Callable[[int], None]) -> _PlainReceiver:
    receiver: _PlainReceiver | None = process.current(f"signal {signum}")
    if receiver is None:
        receiver = _PlainReceiver(signum)
        process.set_current(f"signal {signum}", receiver)
    receiver.listeners.append(listener)
    for _ in range(_held(signum)):
        listener(signum)
    return receiver


def _leave(receiver: _SharedReceiver | _PlainReceiver, listener: Callable[[int], None]) -> None:
    receiver.listeners.remove(listener)
    if not receiver.listeners:
        process.set_current(f"signal {receiver.signum}", receiver.around)
        receiver.close()


def _warn_of(callbacks: list[list[Callable[[], object]]], of_process: object) -> None:
    """Log the callbacks of a coordinator that was never entered and is dropped, or meets the end of the interpreter."""
    left = [name_of(entry[0]) for entry in callbacks if entry]
    if left and of_process is process.identity():
        _log.warning(
            "a ShutdownCoordinator was never entered, so nothing called its callbacks (%s): enter it by `with` or `async with`,"
            " or let a LoopGroup.run() that installs signals do so",
            ", ".join(left),
        )


def _checked(signals: Iterable[int]) -> tuple[int, ...]:
    """Return the signals, or raise ConfigError for what no handler can be installed for."""
    possible = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
    found: tuple[int, ...] = ()
    wrong: list[object] = [signals]
    with suppress(TypeError):
        found = tuple(signals)
        wrong = [signum for signum in found if not is_whole(signum) or signum not in possible]
    if wrong:
        raise ConfigError(
            "ShutdownCoordinator: signals must be signals that a process can handle, as (signal.SIGTERM, signal.SIGINT),"
            f" not {shown(wrong[0])}"
        )
    return found


class ShutdownCoordinator:
    """Is told of a shutdown, by a signal or by :meth:`trigger`, and calls the callbacks that are registered.

    ``async with ShutdownCoordinator.install() as coordinator`` receives the signals while the block runs. So does
    ``with ShutdownCoordinator.install() as coordinator`` in a thread without an event loop. A ``LoopGroup.run()`` that installs
    signals enters the one that is installed, or one of its own, which :meth:`get` finds.

    Callbacks, plain or async, are each called once, in the order of their registration. An async one is started, and the next
    one is called before that has ended. One that raises is logged (logger ``mainspring.signals``) and does not keep the next
    from being called; one registered after the trigger is called at once.

    Within ``async with`` they are called on its event loop. When the block is left, those that are due have 10 s to end; where
    an error or a cancellation ends it, they are cancelled. Within ``with``, plain ones are called where the trigger comes: in
    the signal handler, or in the thread that calls :meth:`trigger`. Async ones are called when the block is left: on an event
    loop of their own, within 10 s. Without a block, :meth:`trigger` calls plain ones, and async ones wait for a block.

    A coordinator that was never entered, and whose callbacks were never called, is logged as a warning: when it is dropped,
    when an embedded LoopGroup ends, or when the interpreter ends.
    """

    _CURRENT: ClassVar[str] = "shutdown coordinators"

    def __init__(
        self,
        signals: Iterable[int] = DEFAULT_SIGNALS,
        *,
        on_repeat: Callable[[int, int], object] | None = None,
    ) -> None:
        self.signals = _checked(signals)
        if on_repeat is not None and not callable(on_repeat):
            raise ConfigError(f"ShutdownCoordinator: on_repeat must be a function, or None, not {shown(on_repeat)}")
        self.reason = ""
        self._on_trigger: list[Callable[[], object]] = []
        self._on_repeat = [] if on_repeat is None else [on_repeat]
        # Each entry is a list of the one callback, so that it can be taken out once: to be called, or as it is unregistered.
        # A signal handler may run at any point and do the same, so what must happen once is guarded by a lock.
        self._callbacks: list[list[Callable[[], object]]] = []
        self._pending: deque[list[Callable[[], object]]] = deque()
        self._triggered = False
        self._once = threading.Lock()
        self._turn = threading.Lock()
        self._received = 0
        self._lock = threading.RLock()
        self._blocks: list[_Block] = []
        self._plain_blocks = 0
        self._loop: object | None = None
        self._entry: Entry | None = None
        self._plain_receivers: list[_PlainReceiver] = []
        self._warning = weakref.finalize(self, _warn_of, self._callbacks, process.identity())

    @classmethod
    def install(cls, signals: Iterable[int] = DEFAULT_SIGNALS) -> ShutdownCoordinator:
        """Return the process's current coordinator; where there is none, make one for ``signals``.

        Enter it (``async with``, or ``with`` where no event loop runs) to receive the signals, or let a LoopGroup do so.

        :raises ConfigError: the current one is for other signals than those that are asked for.
        """
        wanted = _checked(signals)
        current = cls.get()
        if current is None:
            current = cls(wanted)
            process.set_current(cls._CURRENT, (current,))
        elif wanted != DEFAULT_SIGNALS and not set(wanted) <= set(current.signals):
            names = ", ".join(signal.Signals(signum).name for signum in current.signals) or "none"
            raise ConfigError(
                f"the installed ShutdownCoordinator is for other signals ({names}); name all in its install()"
            )
        return current

    @classmethod
    def get(cls) -> ShutdownCoordinator | None:
        """Return the process's current coordinator, or None: the outermost entered one, or the installed one."""
        return next(iter(cls._all()), None)

    @classmethod
    def _all(cls) -> tuple[ShutdownCoordinator, ...]:
        found: tuple[ShutdownCoordinator, ...] = process.current(cls._CURRENT) or ()
        return found

    def _list(self) -> None:
        if self not in self._all():
            process.set_current(self._CURRENT, (*self._all(), self))

    @asynccontextmanager
    async def during_run(
        self, on_trigger: Callable[[str], object], on_repeat: Callable[[int, int], object]
    ) -> AsyncIterator[None]:
        """Enter it for a run of a group, which receives SIGTERM and SIGINT besides; ``on_trigger(reason)`` is called, in any
        thread, before the callbacks. One that was installed and not triggered stays installed, for the next run."""

        def tell() -> None:
            on_trigger(self.reason)

        was_installed = self.get() is self and not self._is_entered
        self._on_trigger.append(tell)
        self._on_repeat.append(on_repeat)
        try:
            if self._triggered:
                tell()
            if self._loop in (None, process.event_loop()):
                async with self._entered(DEFAULT_SIGNALS):
                    yield
            else:  # the signals come to this event loop, and the trigger of the other one as well
                own = type(self)(on_repeat=on_repeat)
                own.register(lambda: on_trigger(own.reason))
                async with own:
                    yield
        finally:
            self._on_trigger.remove(tell)
            self._on_repeat.remove(on_repeat)
            if was_installed and not self._triggered:
                self._list()

    @classmethod
    def warn_of_unentered(cls) -> None:
        """Log the warning now: an embedded group ends, and the server around it may end the process by the signal."""
        for one in cls._all():
            cls._warn_if_unentered(one)

    def _warn_if_unentered(self) -> None:
        """Log the warning now where it was never entered, and is not for :meth:`trigger` alone."""
        if self.signals and not (self._is_entered or self._triggered) and any(self._callbacks):
            self._warning()

    def expect_no_block(self) -> None:
        """Log no warning where it is never entered: for a program that has only imported a module."""
        self._warning.detach()

    @property
    def triggered(self) -> bool:
        """True if a shutdown was asked for."""
        return self._triggered

    def register(self, callback: Callable[[], object]) -> None:
        """Call ``callback()`` at the shutdown, or at once where it has been asked for already.

        Each call has context variables of its own: a copy of those that the block was entered with, or else of those of the
        code that triggers.

        :raises InvalidParameterError: it cannot be called, or a call would run nothing of it (a generator, a class).
        """
        if not callable(callback):
            raise InvalidParameterError(
                f"register takes a function without parameters, {instead_of(callback, 'register')}"
            )
        check_runs(callback, "the shutdown callback", error=InvalidParameterError)
        entry = [callback]
        with self._lock:
            self._callbacks.append(entry)
            if not self._triggered:
                return
            self._pending.append(entry)
        self._deliver()

    def unregister(self, callback: Callable[[], object]) -> None:
        """Do not call it; one that is not registered is ignored."""
        with self._lock:
            for entry in self._callbacks:
                if callback in entry:
                    entry.clear()
                    self._callbacks.remove([])
                    return

    def trigger(self, reason: str = "trigger()") -> None:
        """Ask for the shutdown, from any thread; only the first call has an effect."""
        if not self._once.acquire(blocking=False):
            return
        with self._lock:
            self.reason = reason
            self._triggered = True
            self._pending.extend(self._callbacks)
        for tell in tuple(self._on_trigger):
            tell()
        self._deliver()

    def _deliver(self) -> None:
        """Have what is pending called: on the event loop of the block, or here, where there is none."""
        entry = self._entry
        if entry is None:
            self._call_plain()
        else:
            entry.call(self._call_plain)

    def _call_plain(self) -> None:
        """Call the plain callbacks that are due, and leave the others to the task of the block."""
        while (callback := self._take(plain=True)) is not None:
            try:
                context = self._blocks[0].context.copy() if self._blocks else copy_context()
                outcome = _call(callback, context)
                if inspect.isawaitable(outcome):  # a plain function around an async one
                    self._pending.appendleft([partial(_given, outcome, context)])
            finally:
                self._turn.release()
        if any(self._pending):
            self._rouse()

    def _take(self, *, plain: bool = False) -> Callable[[], object] | None:
        """Return the next callback, and take the turn to call it. None if there is none, or another caller has the turn."""
        while self._pending and self._turn.acquire(blocking=False):
            with suppress(IndexError):  # another caller took it meanwhile, or it was unregistered
                while not self._pending[0]:
                    self._pending.popleft()
                for entry in tuple(self._pending):
                    if entry and not (plain and is_async(entry[0])):
                        return entry.pop()
                    if entry and not (self._plain_blocks and self._entry is None):
                        break  # they keep their order, but where no event loop will come before the end
                self._turn.release()
                return None
            self._turn.release()
        return None

    def _rouse(self) -> None:
        for block in tuple(self._blocks):
            block.wake.set()

    def _on_signal(self, signum: int) -> None:
        self._received += 1
        if self._received == 1 and not self._triggered:
            self.trigger(signal.Signals(signum).name)
        else:
            for tell in tuple(self._on_repeat):
                tell(signum, self._received)

    @property
    def _is_entered(self) -> bool:
        return bool(self._blocks or self._plain_blocks)

    def _unlist(self) -> None:
        if not self._is_entered:
            process.set_current(self._CURRENT, tuple(one for one in self._all() if one is not self) or None)

    # ------------------------------------------------------------------------------------------- without an event loop

    def __enter__(self) -> Self:
        """Receive the signals by plain handlers, in the main thread, where no event loop runs.

        :raises ConfigError: an event loop runs here, or it has signals and this is not the main thread.
        """
        if process.in_event_loop():
            raise ConfigError("ShutdownCoordinator: an event loop runs here; use `async with` instead of `with`")
        self._check_thread(self.signals)
        self._plain_blocks += 1
        self.expect_no_block()
        self._list()
        if self._plain_blocks == 1:
            self._plain_receivers = [_join_plain(signum, self._on_signal) for signum in self.signals]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._plain_blocks == 1 and error is None and any(self._pending):
                anyio.run(self._finish)
        finally:
            self._plain_blocks -= 1
            if not self._plain_blocks:
                receivers, self._plain_receivers = self._plain_receivers, []
                for receiver in receivers:
                    _leave(receiver, self._on_signal)
            self._unlist()

    async def _finish(self) -> None:
        """Call what is due and async."""
        block = _Block()
        block.leave()
        with anyio.move_on_after(CALLBACK_TIMEOUT):
            await self._run_callbacks(block)

    # ---------------------------------------------------------------------------------------------- on an event loop

    async def __aenter__(self) -> Self:
        await self._enter(self.signals)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        task = anyio.get_current_task().id
        return await self._exit(next(block for block in reversed(self._blocks) if block.task == task), error)

    @asynccontextmanager
    async def _entered(self, signals: Iterable[int]) -> AsyncIterator[None]:
        """Enter as by ``async with``, and receive these signals besides."""
        block = await self._enter(tuple(dict.fromkeys((*self.signals, *signals))))
        try:
            yield
        except BaseException as error:
            await self._exit(block, error)
            raise
        await self._exit(block, None)

    async def _enter(self, signals: tuple[int, ...]) -> _Block:
        self._check_thread(signals)
        if self._loop not in (None, process.event_loop()):
            raise ConfigError(
                "ShutdownCoordinator: it is entered on another event loop; make one of its own for this one"
            )
        if signals and process.current("early signals") is not None:
            # uvloop queues the numbers of all signals from its start on, also of those that were held. Let it take them from
            # the queue before we listen, or each would count twice, as a first and a second one.
            for _ in range(3):
                await anyio.lowlevel.cancel_shielded_checkpoint()
        block = _Block()
        await block.scope.__aenter__()
        self._loop = process.event_loop()
        self._entry = self._entry or Entry("ShutdownCoordinator")
        self._blocks.append(block)
        try:
            for signum in signals:
                block.receivers.append(_join(signum, self._on_signal))
                block.scope.start_soon(block.receivers[-1].receive, name=f"receiver of {signal.Signals(signum).name}")
            block.scope.start_soon(self._run_callbacks, block, name="shutdown callbacks", stop=block.leave)
        except BaseException as error:
            self._release(block)
            await block.scope.__aexit__(type(error), error, error.__traceback__)
            raise
        self.expect_no_block()
        self._list()
        return block

    def _check_thread(self, signals: tuple[int, ...]) -> None:
        if signals and not process.in_main_thread():
            raise ConfigError(
                "signals reach the main thread only; run there, or without signals (install_signals=False)"
            )

    async def _exit(self, block: _Block, error: BaseException | None) -> bool | None:
        try:
            return await block.scope.__aexit__(
                type(error) if error is not None else None, error, error.__traceback__ if error is not None else None
            )
        finally:
            self._release(block)
            self._unlist()

    def _release(self, block: _Block) -> None:
        for receiver in block.receivers:
            _leave(receiver, self._on_signal)
        self._blocks.remove(block)
        if not self._blocks:
            self._loop = self._entry = None
            self._call_plain()  # what a trigger has made due at the last moment

    async def _run_callbacks(self, block: _Block) -> None:
        async with anyio.create_task_group() as tasks:
            while True:
                block.wake = anyio.Event()
                await self._call_due(block, tasks)
                if block.leaving:
                    return
                await block.wake.wait()

    async def _call_due(self, block: _Block, tasks: TaskGroup) -> None:
        while (callback := self._take()) is not None:
            try:
                context = block.context.copy()
                outcome = _call(callback, context)
                if inspect.isawaitable(outcome):
                    await tasks.start(_await_outcome, callback, outcome, context, block)
            finally:
                self._turn.release()


class _Block:
    """One ``async with`` of a coordinator: its tasks, the signals that it receives, and what wakes up its callbacks' task."""

    def __init__(self) -> None:
        self.task = anyio.get_current_task().id
        self.context = copy_context()
        self.scope = DaemonScope("shutdown coordinator", timeout=CALLBACK_TIMEOUT)
        self.receivers: list[_SharedReceiver] = []
        self.wake = anyio.Event()
        self.leaving = False

    def leave(self) -> None:
        """Wait for no callback any more that is not due yet."""
        self.leaving = True
        self.wake.set()


_RAISED = (Exception, SystemExit)
"""What a callback may raise without harm to the next one: a shutdown is under way, so `sys.exit` asks for nothing new."""


def _call(callback: Callable[[], object], context: Context) -> object:
    """Call it in ``context``. Return what it gives to be awaited, or None."""
    try:
        outcome = context.run(callback)
        return outcome if inspect.isawaitable(outcome) else ran(outcome, _named(callback))
    except _RAISED:
        _log.exception("the shutdown callback %r raised", callback)
        return None


async def _given(outcome: Awaitable[object], context: Context) -> object:
    return await run_in(context, lambda: outcome)


async def _await_outcome(
    callback: Callable[[], object],
    outcome: Awaitable[object],
    context: Context,
    block: _Block,
    *,
    task_status: TaskStatus[None],
) -> None:
    task_status.started()  # the next callback's turn comes where this one first waits
    try:
        async with SpuriousAsError("it was cancelled by itself"):
            ran(await run_in(context, lambda: outcome, lambda: block.leaving), _named(callback))
    except _RAISED:
        _log.exception("the shutdown callback %r raised", callback)


def _named(callback: Callable[[], object]) -> str:
    return f"the shutdown callback {name_of(callback)}"
