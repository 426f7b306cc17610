"""Guards: code under simulation that opens sockets, starts threads, sleeps in real time or blocks is found and named."""

from __future__ import annotations

import ctypes
import logging
import signal
import socket
import subprocess
import sysconfig
import threading
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import anyio
import trio

from mainspring.core import clock, process
from mainspring.core.tracebacks import describe, stack_of, where_thread
from mainspring.errors import MainspringError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

_STDLIB = sysconfig.get_path("stdlib") + "/"
_MACHINERY = frozenset({"mainspring", "trio", "anyio", "outcome"})
LOOK = 0.25
"""Real seconds between two checks for progress."""


class RealWorldError(MainspringError):
    """The code under simulation used the real world (a socket, a thread, real time), or blocked.

    The message names the line. Such code makes runs unrepeatable: give the group a fake instead.
    """

    fault = "caller"


class Guards:
    """Guards one run. ``error`` is the first violation, or a Ctrl-C; ``stop`` is then called on the event loop's thread."""

    def __init__(self, stop: Callable[[], object], sign_of_life: Callable[[], object], patience: float) -> None:
        self.error: RealWorldError | KeyboardInterrupt | None = None
        self._stop = stop
        self._sign_of_life = sign_of_life
        self._patience = patience
        self._thread_id = threading.get_ident()
        self._loop = process.event_loop()
        self._in_main_thread = process.in_main_thread()
        self._over = threading.Event()
        self._told = threading.Event()
        self._stack = ExitStack()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Install the guards inside the block."""
        with self._stack as stack:
            stack.callback(self._over.set)
            watcher = threading.Thread(target=self._watch, name="mainspring-simulation-watch", daemon=True)
            watcher.start()
            for owner, name, what in (
                (socket.socket, "__init__", "opened a socket"),
                (subprocess.Popen, "__init__", "started a process"),
                (threading.Thread, "start", "started a thread"),
                (anyio.to_thread, "run_sync", "started a thread"),  # may reuse an idle thread, so that none is started
                (trio.to_thread, "run_sync", "started a thread"),
            ):
                stack.enter_context(patch.object(owner, name, self._forbidden(what, getattr(owner, name))))
            stack.enter_context(clock.real_sleep_replaced(self._forbidden("slept in real time", clock.real_sleep())))
            stack.enter_context(_quiet())
            if self._in_main_thread:
                before = signal.signal(signal.SIGALRM, _leave)
                stack.callback(signal.signal, signal.SIGALRM, before)
                before = signal.getsignal(signal.SIGINT)
                if callable(before):  # else it is ignored, as in a background job
                    signal.signal(signal.SIGINT, self._end)
                    stack.callback(signal.signal, signal.SIGINT, before)
            yield

    def _end(self, signum: int, frame: FrameType | None) -> None:
        """End the run at a Ctrl-C. Raised at once, ``KeyboardInterrupt`` would be a crash of the code that it came in."""
        if self.error is not None:
            raise KeyboardInterrupt
        self.error = KeyboardInterrupt()
        process.call_soon(self._loop, self._tell)

    def _tell(self) -> None:
        self._told.set()
        self._stop()

    def close(self) -> None:
        """Remove the guards, if the run was left without the end of the block (idempotent)."""
        self._stack.close()

    def _forbidden(self, what: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def refuse(*args: Any, **keywords: Any) -> Any:
            if threading.get_ident() != self._thread_id:
                return real(*args, **keywords)
            raise self._found(f"{what} at {_line_of(self._thread_id)}")

        return refuse

    def _found(self, what: str) -> RealWorldError:
        error = RealWorldError(
            f"the simulated code {what}: a simulation could not repeat it; build the group"
            " with fakes instead (a plain `def` handler runs in a thread: make it `async def`)"
        )
        if self.error is None:
            self.error = error
            self._stop()
        return error

    def _watch(self) -> None:
        """Check on a thread of its own that virtual time or the log makes progress."""
        before: object = None
        still = 0.0
        while not self._over.wait(LOOK):
            now = self._sign_of_life()
            still = still + LOOK if now == before else 0.0
            before = now
            if still >= self._patience:
                still = 0.0
                self._interrupt()

    def _interrupt(self) -> None:
        line = _line_of(self._thread_id)
        self.error = self.error or RealWorldError(
            f"the simulated code has blocked the event loop for {self._patience:g} real seconds at {line}: await"
            " something there, in virtual time"
        )
        if not self._told.is_set():  # a loop that still runs ends the run itself
            process.call_soon(self._loop, self._tell)
            if self._told.wait(LOOK):
                return
        if self._in_main_thread:
            signal.pthread_kill(self._thread_id, signal.SIGALRM)  # also ends a blocking system call
        else:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread_id), ctypes.py_object(_Blocked))


class _Blocked(BaseException):
    """Raised in the blocked thread to unblock it."""


def _line_of(thread_id: int) -> str:
    """Describe where that thread is, in the innermost frame outside the standard library, Mainspring, trio and anyio."""
    for frame, line in stack_of(thread_id):
        path, name = frame.f_code.co_filename, frame.f_globals.get("__name__", "")
        if not path.startswith((_STDLIB, "<")) and name.partition(".")[0] not in _MACHINERY:
            return describe(frame, line)
    return where_thread(thread_id)


def _leave(signum: int, frame: FrameType | None) -> None:
    raise _Blocked


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence Mainspring's logger: warnings are part of the plan, and the event log has them."""
    logger = logging.getLogger("mainspring")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(before)
