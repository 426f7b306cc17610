"""What the guarded process shares with its guardian: the board, the dump signal, and the child process itself."""

from __future__ import annotations

import faulthandler
import mmap
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, TextIO

from mainspring.core import process
from mainspring.errors import ConfigError
from mainspring.watchdog import guardian_main

if TYPE_CHECKING:
    from collections.abc import Callable

STOP_WITHIN = 1.0
"""Seconds to wait for a killed guardian; it takes about one millisecond."""


class Board:
    """The page of memory that both sides look at. Words are stored whole, so neither side needs a lock."""

    def __init__(self) -> None:
        self.descriptor = _nameless_file()
        os.ftruncate(self.descriptor, guardian_main.BOARD_SIZE)
        self._map = mmap.mmap(self.descriptor, guardian_main.BOARD_SIZE)
        self._words = memoryview(self._map).cast("d")

    @property
    def beat(self) -> float:
        """The last beat's instant (monotonic clock); 0 while no loop is to be judged."""
        return self._words[guardian_main.BEAT]

    @beat.setter
    def beat(self, instant: float) -> None:
        self._words[guardian_main.BEAT] = instant

    @property
    def kill_at(self) -> float:
        """The instant from which the guardian kills; 0 for never."""
        return self._words[guardian_main.KILL_AT]

    @kill_at.setter
    def kill_at(self, instant: float) -> None:
        self._words[guardian_main.KILL_AT] = instant

    def forget(self) -> None:
        """Leave the page to the process that this one was forked from, and write to a private one from now on."""
        self.close()
        self._map = mmap.mmap(-1, guardian_main.BOARD_SIZE)
        self._words = memoryview(self._map).cast("d")

    def close(self) -> None:
        """Give the memory back (idempotent)."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            self._words.release()
            self._map.close()
            os.close(descriptor)


class DumpSignal:
    """The signal at which this process writes its threads' stacks to standard error, in C, though a thread holds the GIL.

    ``busy`` is another one, which the first process of a container has: at that it only uses up processor time. Each is the
    highest real-time signal that is not handled, ignored or blocked in this process, the very last one excepted: programs
    that use these signals count from the lowest. All block watches of a process share them.
    """

    def __init__(self) -> None:
        self.number = 0
        self.busy = 0
        self._null: TextIO | None = None
        self._users = 0
        self._lock = threading.Lock()

    def acquire(self, stream: TextIO) -> int:
        """Register it, for one more user; its number, or 0 where there can be none (no file, no signal to be had)."""
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._register(stream)
            return self.number

    def release(self) -> None:
        """Count one user less. The last one gives the signal back."""
        with self._lock:
            self._users -= 1
            if self._users == 0 and self.number:
                self.forget()
                process.disclaim(_DUMP_SIGNAL)

    def forget(self) -> None:
        """Unregister it, also in a forked child, which is not watched (idempotent)."""
        for number in filter(None, (self.number, self.busy)):
            faulthandler.unregister(number)
        self.number = self.busy = 0
        if self._null is not None:
            self._null.close()
            self._null = None

    def _register(self, stream: TextIO) -> None:
        in_use, candidates = _signals_in_use(), range(signal.SIGRTMAX - 1, signal.SIGRTMIN, -1)
        number = free_signal(in_use, candidates)
        try:
            process.claim(_DUMP_SIGNAL, "the block watch")
        except ConfigError:
            return
        try:
            faulthandler.register(number, file=stream, all_threads=True, chain=False)
        except (OSError, ValueError, RuntimeError, AttributeError):  # no file below the stream, or no such signal
            process.disclaim(_DUMP_SIGNAL)
            return
        self.number = number
        if os.getpid() == 1 and (busy := free_signal(in_use | 1 << (number - 1), candidates)):
            self._null = open(os.devnull, "w", encoding="ascii")  # noqa: SIM115 - as long as the signal is registered
            faulthandler.register(busy, file=self._null, all_threads=True, chain=False)
            self.busy = busy


_DUMP_SIGNAL = "dump signal"


def dump_signal() -> DumpSignal:
    """Return the process's one."""
    return process.shared("guardian", _DUMP_SIGNAL, DumpSignal)


def free_signal(in_use: int, candidates: range) -> int:
    """Return the first candidate whose bit in the mask ``in_use`` (signal 1 is bit 0) is not set; 0 for none."""
    return next((number for number in candidates if not in_use >> (number - 1) & 1), 0)


def _signals_in_use() -> int:
    """Return what the kernel knows of this process: unlike ``signal.getsignal`` it has the handlers set from C as well."""
    in_use = 0
    try:
        with open("/proc/self/status", encoding="utf-8", errors="replace") as file:
            status = file.read()
    except OSError:
        return sum(1 << (n - 1) for n in signal.valid_signals() if signal.getsignal(n) is not signal.SIG_DFL)
    for line in status.splitlines():
        if line.startswith(("SigBlk:", "SigIgn:", "SigCgt:")):
            in_use |= int(line.split()[1], 16)
    return in_use


class GuardianProcess:
    """The child: spawned, poked, replaced where it dies (``RESTARTS`` times), stopped.

    Once it is started, it is one thread's own, but for ``poke``.

    ``notice`` is called with one line of text for the operator.
    """

    RESTARTS = 3

    def __init__(self, board: Board, threshold: float, signals: DumpSignal, notice: Callable[[str], None]) -> None:
        self._board = board
        self._threshold = threshold
        self._signals = (signals.number, signals.busy)
        self._notice = notice
        self._child: subprocess.Popen[bytes] | None = None
        self._restarts_left = self.RESTARTS
        self._read, self._write = os.pipe()  # its end tells the child of ours
        os.set_blocking(self._write, False)
        self._lock = threading.RLock()  # so that no poke goes to a number that has become another file

    @property
    def pid(self) -> int | None:
        """The child's process id, where there is one."""
        return self._child.pid if self._child is not None else None

    def start(self) -> None:
        """Spawn the child. Where that cannot be, one line says so, and there is none."""
        try:
            self._child = self._spawn()
        except (OSError, ValueError) as error:
            self._notice(f"no guardian process ({error}); a thread watches the event loop, which C code can hold up")

    def look(self) -> None:
        """Replace a child that has died."""
        if self._child is None or self._child.poll() is None:
            return
        status, self._child = self._child.returncode, None
        if not self._restarts_left:
            self._notice(f"the guardian process died again (status {status}); a thread alone watches the event loop")
            return
        self._restarts_left -= 1
        self._notice(f"the guardian process died (status {status}); starting another")
        self.start()

    def poke(self) -> None:
        """Have the child look at the board now (from any thread)."""
        with self._lock:
            if self._write >= 0:
                with suppress(BlockingIOError):  # it has been poked enough
                    os.write(self._write, b".")

    def forget(self) -> None:
        """Let go of the pipe in a forked child, whose death must not be taken for its parent's life."""
        self._child = None
        self._close_pipe()

    def _close_pipe(self) -> None:
        write, self._write = self._write, -1  # first: a child forked in between would close what has the number next
        if write >= 0:
            os.close(write)
            os.close(self._read)

    def stop(self) -> None:
        """End the child and reap it. It keeps nothing, so SIGKILL is the quickest way; the pipe's end would do as well."""
        with self._lock:
            self._close_pipe()
        if self._child is None:
            return
        self._child.kill()
        with suppress(subprocess.TimeoutExpired):  # it sits in the kernel; Python reaps it at a later spawn
            self._child.wait(STOP_WITHIN)

    def _spawn(self) -> subprocess.Popen[bytes]:
        arguments = (self._board.descriptor, self._read, os.getpid(), self._threshold, *self._signals)
        return subprocess.Popen(
            [_interpreter(), "-I", "-S", _child_file(), *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(self._board.descriptor, self._read),
            cwd="/",
            start_new_session=True,  # a terminal's Ctrl-C and Ctrl-Z are meant for the ward
        )


def _interpreter() -> str:
    """Return the Python to run the child with. Raise for a frozen program, whose ``sys.executable`` is the program itself."""
    executable = sys.executable or ""
    if getattr(sys, "frozen", False) or "py" not in os.path.basename(executable).lower():
        raise ValueError(f"{executable or 'this program'} is no Python interpreter")
    return executable


def _child_file() -> str:
    path = guardian_main.__file__
    if not os.path.isfile(path):
        raise ValueError(f"{path} is no file")
    return path


def _nameless_file() -> int:
    if hasattr(os, "memfd_create"):
        try:
            return os.memfd_create("mainspring-board")
        except OSError:
            pass
    from tempfile import TemporaryFile

    with TemporaryFile() as file:
        return os.dup(file.fileno())
