"""Signals and the one place that is told of a shutdown: ``ShutdownCoordinator`` over ``anyio.open_signal_receiver``."""

from __future__ import annotations

import inspect
import logging
import os
import signal
import threading
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar, Self

import anyio

from mainspring import process
from mainspring.callables import is_async
from mainspring.errors import ConfigError
from mainspring.scope import DaemonScope

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import AbstractContextManager
    from types import FrameType, TracebackType

_log = logging.getLogger("mainspring.signals")

DEFAULT_SIGNALS = (signal.SIGTERM, signal.SIGINT)
CALLBACK_TIMEOUT = 10.0
"""Seconds that shutdown callbacks may take once the block around them has been left."""


class EarlySignals:
    """Holds signals that arrive before an event loop receives them; the second one ends the process at once.

    The command line installs it before it imports the user's module: Python acts on SIGTERM by dying, and as PID 1 of a
    container not at all, until somebody installs a handler. The receiver that opens later takes what was held.
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
        """How often ``signum`` was held; it is forgotten here."""
        count = self.held.count(signum)
        for _ in range(count):
            self.held.remove(signum)
        return count


class _Hub:
    """The process's one receiver of one signal, shared by all who listen to it.

    anyio's receivers do not nest on asyncio and leave the default handler behind, so there is one a signal, opened by the
    first listener and closed, with the earlier handler restored, by the last. Any listener's task may do the receiving; when
    it ends, another's goes on with the same receiver, so that no signal falls between two.
    """

    def __init__(self, signum: int) -> None:
        self.signum = signum
        self.loop = process.event_loop()
        self.listeners: list[Callable[[int], None]] = []
        self._turn = anyio.Lock()
        self._previous = signal.getsignal(signum)
        process.on_fork(self, _Hub._forget)
        self._context: AbstractContextManager[Any] = anyio.open_signal_receiver(signal.Signals(signum))
        self._receiver = self._context.__enter__()
        early = process.current("early signals")
        self._held = early.take(signum) if early is not None else 0

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
        for listener in tuple(self.listeners):
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


def _join(signum: int, listener: Callable[[int], None]) -> _Hub:
    hub: _Hub | None = process.current(f"signal {signum}")
    if hub is not None and hub.loop is not process.event_loop():
        raise ConfigError(
            f"{signal.Signals(signum).name} is received by another event loop of this process; use install_signals=False"
        )
    if hub is None:
        hub = _Hub(signum)
        process.set_current(f"signal {signum}", hub)
    hub.listeners.append(listener)
    return hub


def _leave(hub: _Hub, listener: Callable[[int], None]) -> None:
    hub.listeners.remove(listener)
    if not hub.listeners:
        process.set_current(f"signal {hub.signum}", None)
        hub.close()


class ShutdownCoordinator:
    """Is told of a shutdown, by a signal or by :meth:`trigger`, and calls whoever registered.

    ``async with ShutdownCoordinator.install() as coordinator`` receives the signals while the block runs; a LoopGroup's
    ``run()`` has one of its own, which :meth:`get` finds.

    Callbacks, plain or async, are called once, in the order of their registration, one after the other; one that raises is
    logged (logger ``mainspring.signals``) and does not keep the next from being called; one registered after the trigger is
    called at once. While the block runs they are called on its event loop, and those that are due when it is left still
    have 10 s to be called and to end; where an error or a cancellation ends it, they are cancelled. Outside of one, plain
    callbacks are called by ``trigger()`` in its thread, and async ones when a block is entered.
    """

    _CURRENT: ClassVar[str] = "shutdown coordinator"

    def __init__(
        self,
        signals: Iterable[int] = DEFAULT_SIGNALS,
        *,
        on_repeat: Callable[[int, int], object] | None = None,
    ) -> None:
        self.signals = tuple(signals)
        self.reason = ""
        self._on_repeat = on_repeat
        # Each entry is a list of the one callback, so that it can be taken out once: to be called, or as it is unregistered.
        # A signal handler may come in at any point and do the same, so whoever is to be the only one takes a lock at once.
        self._callbacks: list[list[Callable[[], object]]] = []
        self._pending: deque[list[Callable[[], object]]] = deque()
        self._triggered = False
        self._once = threading.Lock()
        self._turn = threading.Lock()
        self._leaving = False
        self._received = 0
        self._lock = threading.RLock()
        self._loop: Any = None
        self._wake: anyio.Event | None = None
        self._scope: DaemonScope | None = None
        self._hubs: list[_Hub] = []

    @classmethod
    def install(cls, signals: Iterable[int] = DEFAULT_SIGNALS) -> Self:
        """Make a coordinator for these signals the process's current one; enter it (``async with``) to receive them."""
        coordinator = cls(signals)
        process.set_current(cls._CURRENT, coordinator)
        return coordinator

    @classmethod
    def get(cls) -> ShutdownCoordinator | None:
        """The process's current coordinator, or None."""
        found: ShutdownCoordinator | None = process.current(cls._CURRENT)
        return found

    @property
    def triggered(self) -> bool:
        """Whether a shutdown was asked for."""
        return self._triggered

    def register(self, callback: Callable[[], object]) -> None:
        """Call ``callback()`` at the shutdown, or at once where it has been asked for already."""
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
        self._deliver()

    def _deliver(self) -> None:
        """Call what is pending: plain callbacks here, if this is the right place, and the others in the own task."""
        if self._loop is None or self._loop is _running_loop():
            while (callback := self._take(plain=True)) is not None:
                try:
                    _call(callback)
                finally:
                    self._turn.release()
        loop = self._loop
        if loop is not None and (self._pending or process.in_main_thread()):
            # Also where all was called: a signal handler may have interrupted the sleep of the event loop, which is to see
            # what came of it.
            process.call_soon(loop, self._rouse)

    def _take(self, *, plain: bool = False) -> Callable[[], object] | None:
        """The next callback, with the turn to call it; None also while somebody else has that, who goes on with the rest."""
        while self._pending and self._turn.acquire(blocking=False):
            with suppress(IndexError):  # somebody else has called it meanwhile, or it was unregistered
                entry = self._pending[0]
                if not (plain and entry and is_async(entry[0])):
                    return self._pending.popleft().pop()
                self._turn.release()
                return None
            self._turn.release()
        return None

    def _leave(self) -> None:
        """The block is being left: no callback is waited for any more that is not due yet."""
        self._leaving = True
        self._rouse()

    def _rouse(self) -> None:
        if self._wake is not None:
            self._wake.set()

    def _on_signal(self, signum: int) -> None:
        self._received += 1
        if self._received == 1 and not self._triggered:
            self.trigger(signal.Signals(signum).name)
        elif self._on_repeat is not None:
            self._on_repeat(signum, self._received)

    async def __aenter__(self) -> Self:
        if self.signals and not process.in_main_thread():
            raise ConfigError(
                "signals reach the main thread only; run there, or without signals (install_signals=False)"
            )
        self._loop = process.event_loop()
        if self.signals and process.current("early signals") is not None:
            # uvloop queues the numbers of all signals from its start on, also of those that were held: let it come past
            # them while nobody listens, or they would count twice, as a first and a second one.
            for _ in range(3):
                await anyio.lowlevel.cancel_shielded_checkpoint()
        self._leaving = False
        self._scope = DaemonScope("shutdown coordinator", timeout=CALLBACK_TIMEOUT)
        await self._scope.__aenter__()
        try:
            for signum in self.signals:
                hub = _join(signum, self._on_signal)
                self._hubs.append(hub)
                self._scope.start_soon(hub.receive, name=f"receiver of {signal.Signals(signum).name}")
            self._scope.start_soon(self._run_callbacks, name="shutdown callbacks", stop=self._leave)
        except BaseException as error:
            self._release()
            await self._scope.__aexit__(type(error), error, error.__traceback__)
            raise
        if ShutdownCoordinator.get() is None:
            process.set_current(self._CURRENT, self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        scope, self._scope = self._scope, None
        assert scope is not None
        try:
            return await scope.__aexit__(kind, error, trace)
        finally:
            self._release()

    def _release(self) -> None:
        hubs, self._hubs = self._hubs, []
        for hub in hubs:
            _leave(hub, self._on_signal)
        self._loop = None
        if ShutdownCoordinator.get() is self:
            process.set_current(self._CURRENT, None)

    async def _run_callbacks(self) -> None:
        while True:
            self._wake = anyio.Event()
            while (callback := self._take()) is not None:
                try:
                    outcome = _call(callback)
                    if inspect.isawaitable(outcome):
                        await outcome
                except _RAISED:
                    _log.exception("the shutdown callback %r raised", callback)
                finally:
                    self._turn.release()
            if self._leaving:
                return
            await self._wake.wait()


_RAISED = (Exception, SystemExit)
"""What a callback may raise without harm to the next one: a shutdown is under way, so `sys.exit` asks for nothing new."""


def _call(callback: Callable[[], object]) -> object:
    try:
        return callback()
    except _RAISED:
        _log.exception("the shutdown callback %r raised", callback)
        return None


def _running_loop() -> object | None:
    try:
        return process.event_loop()
    except RuntimeError:
        return None
