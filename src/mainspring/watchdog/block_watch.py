"""The block watch: judges whether the event loop turns at all, and ends a process that must leave."""

from __future__ import annotations

import math
import os
import queue
import sys
import threading
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, NoReturn, Self, TextIO

import anyio

from mainspring.core import clock, process
from mainspring.core.loggers import Logger
from mainspring.core.tracebacks import all_stacks, describe, in_debugger, place_of, where_thread
from mainspring.errors import ConfigError
from mainspring.runtime.hard_exit import kill_self, last_words
from mainspring.runtime.scope import DaemonScope
from mainspring.watchdog.guardian import Board, GuardianProcess, dump_signal
from mainspring.watchdog.guardian_main import Silence, look_interval

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType, TracebackType

_log = Logger("mainspring")

KILL_AFTER = 0.4
"""Seconds past its exit instant after which the guardian kills a process that has not even begun to leave."""
LEAVE_TIME = 1.0
"""Seconds that the watching thread gives itself, once it has begun to end the process."""
LAG_KEPT = 60.0
"""Seconds for which a late beat counts in :attr:`BlockWatch.lag`: a scrape a minute sees each."""
LONG = 3.0
"""Seconds without a beat that are worth a warning: three beats, and longer than what asks a probe waits for its answer."""


class BlockWatch:
    """Ends the process when its event loop does not turn for ``block_threshold`` seconds, naming the line that blocks it.

    ``async with BlockWatch(guardian=True): …`` on the event loop that is to be watched. A task beats; a thread of the operating
    system looks at the beats. That thread finds code that blocks the loop in Python, or waits outside the interpreter. It
    writes the guilty line and the stacks of all threads to ``stream`` (default: standard error as it is then). It ends the
    process by SIGKILL, a moment later than the threshold. Code that holds the interpreter's lock (a regular expression that
    explodes) stops the thread too; with ``guardian=True`` a tiny child process finds that, has faulthandler write the stacks,
    and kills. The child dies with the process, whatever ends that. Where there can be no child, a warning says so and the
    thread watches alone.

    Time in which the process could not run is not counted: suspended, stopped by SIGSTOP, in the hands of a debugger, on a
    machine that stood still. The loop then has the whole threshold again. Under a virtual clock nothing is judged.
    ``block_threshold`` is in seconds; the default is long enough for an import or a garbage collection and shorter than the
    default lease. ``math.inf`` judges nothing, and only :meth:`exit_by` remains. Raises :class:`ConfigError` where it is not
    above 0. Leaving the block ends thread and child within milliseconds, unless an exit is pending.
    """

    def __init__(self, *, block_threshold: float = 30.0, guardian: bool, stream: TextIO | None = None) -> None:
        if not block_threshold > 0:
            raise ConfigError(f"block_threshold must be above 0 seconds, not {block_threshold!r}")
        self._threshold = block_threshold
        self._guardian = guardian
        self._stream = stream
        self._watcher: _Watcher | None = None
        self._scope = DaemonScope("block watch")
        self._late: deque[tuple[float, float]] = deque()
        self._next_beat: float | None = None

    @property
    def guardian_pid(self) -> int | None:
        """The guardian's process id; None without one. It is there once the block is entered."""
        return self._watcher.guardian_pid if self._watcher is not None else None

    @property
    def lag(self) -> float | None:
        """By how many seconds the event loop was late to turn, at most, in the last minute; None under a virtual clock, and
        before the first beat.

        It is measured by the beats, each at most a second after the one before; ask on the event loop.
        """
        if self._next_beat is None:
            return None
        now = anyio.current_time()
        while self._late and self._late[0][0] < now - LAG_KEPT:
            self._late.popleft()
        return max(now - self._next_beat, 0.0, *(late for _, late in self._late))

    async def __aenter__(self) -> Self:
        if self._watcher is not None and not self._watcher.closed:
            raise RuntimeError("this BlockWatch is already in use")
        real = clock.virtual_clock() is None
        judging = real and self._threshold < math.inf
        watcher = _Watcher(self._threshold, guardian=self._guardian, stream=self._stream)
        watcher.start(judging=judging)
        self._watcher = watcher
        await self._scope.__aenter__()
        if real:
            self._scope.start_soon(self._beat, watcher, judging, name="beat of the block watch")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        watcher = self._entered()
        try:
            return await self._scope.__aexit__(kind, error, trace)
        finally:
            if watcher.close():
                with anyio.CancelScope(shield=True, deadline=anyio.current_time() + LEAVE_TIME), clock.real_work():
                    # A limiter of its own: the common one may be used up by the threads of handlers that never return.
                    await anyio.to_thread.run_sync(
                        watcher.join, LEAVE_TIME, abandon_on_cancel=True, limiter=anyio.CapacityLimiter(1)
                    )
            watcher.log_notices()

    def exit_by(self, seconds: float, *, status: int, explain: Callable[[], str]) -> None:
        """Let this process leave within ``seconds`` from now, unless :meth:`call_off` comes first.

        Then the watching thread writes ``explain()`` and the stacks of all threads to the stream, and calls
        ``os._exit(status)``. The writing has 0.4 s, so neither a full pipe nor a hanging ``explain`` can hold it up. Where it
        cannot run, the guardian kills the process about 0.5 s after. Calling again replaces ``status`` and ``explain``, and can
        bring the instant nearer but not put it off. An exit that is not called off outlasts the ``async with`` block. So it
        also covers the end of the interpreter, which waits for the threads of handlers that never return. Callable from any
        thread and from a signal handler. Raises :class:`RuntimeError` where the block is not entered.
        """
        self._entered().exit_by(seconds, status, explain)

    def call_off(self) -> None:
        """Call the exit off (idempotent)."""
        if self._watcher is not None:
            self._watcher.call_off()

    async def _beat(self, watcher: _Watcher, judging: bool) -> None:
        interval = look_interval(self._threshold)
        while True:
            if watcher.forked:
                process.end_returned_child()
            if judging:
                watcher.beat()
            watcher.log_notices()
            self._next_beat = anyio.current_time() + interval
            await anyio.sleep(interval)
            now = anyio.current_time()
            while self._late and self._late[-1][1] <= now - self._next_beat:  # what is less and older says nothing more
                self._late.pop()
            self._late.append((now, now - self._next_beat))

    def _entered(self) -> _Watcher:
        if self._watcher is None:
            raise RuntimeError("BlockWatch is not running; use `async with`")
        return self._watcher


_new_lock = threading.RLock


class _Exit(NamedTuple):
    at: float
    status: int
    explain: Callable[[], str]


class _Watcher:
    """The thread that looks, and the owner of what it shares with the guardian. It ends when closed and no exit is pending."""

    def __init__(self, threshold: float, *, guardian: bool, stream: TextIO | None) -> None:
        self.closed = False
        self.forked = False
        self._threshold = threshold
        self._interval = look_interval(threshold)
        self._stream = stream
        self._loop_thread = threading.get_ident()
        self._notices: deque[str] = deque()
        self._lock = _new_lock()
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()  # its put may be called from a signal handler
        self._exit: _Exit | None = None
        self._ended = False
        self._board = Board()
        self._silence = Silence(threshold, clock.monotonic())
        self._longest = 0.0
        self._stood: tuple[FrameType, int] | None = None
        self._dump = dump_signal() if guardian else None
        self._guardian: GuardianProcess | None = None
        self._thread = threading.Thread(target=self._run, name="mainspring-block-watch", daemon=True)

    @property
    def guardian_pid(self) -> int | None:
        return self._guardian.pid if self._guardian is not None else None

    def start(self, *, judging: bool) -> None:
        if judging:
            self.beat()
        if self._dump is not None:
            self._dump.acquire(sys.stderr if self._stream is None else self._stream)
            self._guardian = GuardianProcess(self._board, self._threshold, self._dump, self._notices.append)
            self._guardian.start()  # not in the thread, which waits for the GIL where the first handler takes it
        process.on_fork(self, _Watcher._forget)
        try:
            self._thread.start()
        except RuntimeError:
            self._end()
            raise

    def _forget(self) -> None:
        """Leave everything that is shared with the guardian alone, in a forked child, which has no watching thread."""
        self._lock = _new_lock()
        self.forked = self.closed = self._ended = True
        self._board.forget()
        if self._dump is not None:
            self._dump.forget()
        if self._guardian is not None:
            self._guardian.forget()

    def beat(self) -> None:
        self._board.beat = clock.monotonic()

    def log_notices(self) -> None:
        """Log the notices in the event loop: the thread must not wait for a lock that a blocked loop may hold."""
        while self._notices:
            _log.warning("%s", self._notices.popleft())

    def exit_by(self, seconds: float, status: int, explain: Callable[[], str]) -> None:
        at = clock.monotonic() + max(0.0, seconds)
        with self._lock:
            if self._ended:
                raise RuntimeError("this BlockWatch has ended")
            if self._exit is not None:
                at = min(at, self._exit.at)
            self._exit = _Exit(at, status, explain)
            self._board.kill_at = at + KILL_AFTER
        self._wake_up()

    def call_off(self) -> None:
        with self._lock:
            if self._exit is None or self._ended:
                return
            self._exit = None
            self._board.kill_at = 0.0
        self._wake_up()

    def close(self) -> bool:
        """Judge no more; whether the thread ends now (else an exit is pending, and it stays for that)."""
        with self._lock:
            self.closed = True
            if not self._ended:
                self._board.beat = 0.0
            ending = self._exit is None
        self._wake_up()
        return ending

    def join(self, timeout: float) -> None:
        self._thread.join(timeout)

    def _wake_up(self) -> None:
        self._wake.put(None)
        if self._guardian is not None:
            self._guardian.poke()

    def _run(self) -> None:
        try:
            wait = 0.0
            while wait >= 0.0:
                self._silence.plan(clock.monotonic() + wait)
                with suppress(queue.Empty):
                    self._wake.get(timeout=wait)
                wait = self._look(clock.monotonic())
        finally:
            self._end()

    def _look(self, now: float) -> float:
        """Judge; seconds until the next look, below 0 for none."""
        with self._lock:
            leaving = self._exit
            if leaving is None and self.closed:
                self._ended = True
                return -1.0
        if leaving is not None and now >= leaving.at:
            self._leave(leaving)
        if self._guardian is not None:
            self._guardian.look()
        silence = self._silence.look(now, self._board.beat)
        if silence > 2 * self._interval and in_debugger(self._loop_thread):
            silence = self._pardon(now)
            self._stood = None
        self._note(silence)
        if silence >= self._threshold:
            self._kill(silence)
        wait = min(self._interval, self._threshold - silence)
        return wait if leaving is None else max(0.0, min(wait, leaving.at - now))

    def _note(self, silence: float) -> None:
        """Have it logged, when it is over, that the loop stood still, and where; one that stays so is killed, and says more."""
        if silence >= LONG:
            self._longest = silence
            if self._stood is None:
                self._stood = place_of(self._loop_thread)
        elif self._stood is not None:
            self._notices.append(
                f"the event loop did not turn for {self._longest:.0f} s or more; it stood at {describe(*self._stood)};"
                " leave what blocks to a plain `def` handler or to an OffloadPool"
            )
            self._stood = None

    def _pardon(self, now: float) -> float:
        """Beat in the loop's place, for the guardian's eyes too."""
        with self._lock:
            if not self.closed:
                self._board.beat = now
        return 0.0

    def _kill(self, silence: float) -> NoReturn:
        self._take_over()
        last_words(
            lambda: (
                f"mainspring: the event loop has not turned for {silence:.1f} s (block_threshold {self._threshold:g} s): "
                f"{where_thread(self._loop_thread)}\nThe process is killed. {self._stacks()}"
            ),
            self._stream,
        )
        kill_self()

    def _leave(self, leaving: _Exit) -> NoReturn:
        self._take_over()
        last_words(lambda: f"mainspring: leaving by force: {leaving.explain()}\n{self._stacks()}", self._stream)
        os._exit(leaving.status)

    def _take_over(self) -> None:
        """Let the guardian only step in if this thread does not come to its end, from here on."""
        with self._lock:
            self._board.kill_at = clock.monotonic() + LEAVE_TIME
            self._board.beat = 0.0

    def _end(self) -> None:
        process.off_fork(self)
        with self._lock:
            self._ended = True
        if self._guardian is not None:
            self._guardian.stop()
        if self._dump is not None:
            self._dump.release()
        self._board.close()

    def _stacks(self) -> str:
        return f"The stacks of its threads:\n{all_stacks(without=(self._thread.ident, threading.get_ident()))}"
