"""The threads of this process that serve its mailbox files: a few writers, and one watcher.

Files that have jobs queue for the writer threads. A thread serves one file at a time, and a file is served by one thread at
a time. There is one thread, and as files queue up to :data:`WRITERS`: their waits for the disk then overlap. A thread can be
held up, by another process that has the file locked or by a disk that hangs. If files queue and no turn has ended for
:data:`HELD_UP` seconds, there is one thread more, then two more, four, and so on, until they have nothing to do. So a file
waits for no other one.

The watcher listens for the notifications of other processes, and once a second has the files inspected on which receives
wait: a notification can be lost. Whether a file has changed, the time of its log tells. The watcher also starts a writer thread
where the others are held up; so it uses no disk itself.

All of them end with the last user of a file. A process that has none has no threads.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections import deque
from itertools import islice
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from mainspring.core import clock, process
from mainspring.core.loggers import Logger
from mainspring.mailbox.sqlite.notifier import NotificationListener

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mainspring.mailbox.sqlite.shared_file import SharedFile

logger = Logger("mainspring.mailbox.sqlite")

WRITERS = 2
"""How many writer threads there are at most while none is held up."""
HELD_UP = 0.05
"""Seconds for which files queue without a turn that ends, until there are more threads."""
KEPT = 64
"""How many connections a process keeps. Each takes some 160 KiB and three descriptors, and half a millisecond to open."""
IDLE = 5.0
"""Seconds after which a writer thread that has nothing to do ends, unless it is the last one."""
INSPECT_EVERY = 1.0
"""Seconds after which a file on which receives wait is inspected, should a notification have been lost."""
CLOCK_JUMP = 0.5
"""Seconds by which the clocks have to move against each other for the date to count as changed."""


class Writers:
    """The writer threads. ``crowded`` is called when files begin to queue though there are :data:`WRITERS` threads."""

    def __init__(self, crowded: Callable[[], None]) -> None:
        self._crowded = crowded
        self._line: deque[SharedFile | Inspection | None] = deque()
        self._queue: SimpleQueue[None] = SimpleQueue()  # as many as are in the line
        self._lock = threading.Lock()
        self._threads = 0
        self._files = 0  # that are queued or served
        self._turns = 0  # that have ended
        self._seen = (0, 0.0)
        self._more = 1  # threads to be started next
        self._ended = False

    def start(self) -> None:
        """Start the first thread. Raises :class:`RuntimeError` if there is none to be had."""
        with self._lock:
            self._start_one()

    def end(self) -> None:
        """Let the threads end, and start no more; there are no more files."""
        with self._lock:
            self._ended = True
            for _ in range(self._threads):
                self._line.append(None)
                self._queue.put(None)

    def serve(self, file: SharedFile | Inspection, first: bool = False) -> None:
        """Let a file, or an inspection of files, have a turn: the next one if ``first``."""
        with self._lock:
            self._files += 1
            crowded = False
            if self._files > self._threads and not self._ended:
                if self._threads < WRITERS:
                    with contextlib.suppress(RuntimeError):  # the threads that run have to do
                        self._start_one()
                else:
                    crowded = self._files == self._threads + 1
        if first:
            self._line.appendleft(file)
        else:
            self._line.append(file)
        self._queue.put(None)
        if crowded:
            self._crowded()

    def served(self) -> None:
        """Note that the file of this thread has nothing to do any more."""
        with self._lock:
            self._files -= 1

    def queueing(self) -> bool:
        """True if another file waits for a turn."""
        return not self._queue.empty()

    def help(self, now: float) -> bool:
        """Start threads if files queue and no turn has ended for :data:`HELD_UP` seconds. Return True if files queue."""
        with self._lock:
            if self._queue.empty() or self._ended:
                return False
            turns, since = self._seen
            if turns != self._turns:
                self._seen = (self._turns, now)
                self._more = 1
            elif now - since >= HELD_UP:
                self._seen = (turns, now)
                with contextlib.suppress(RuntimeError):
                    for _ in range(min(self._more, self._queue.qsize())):
                        self._start_one()
                self._more *= 2
            return True

    def _start_one(self) -> None:
        threading.Thread(target=self._write, name="mainspring sqlite writer", daemon=True).start()
        self._threads += 1

    def _write(self) -> None:
        while True:
            try:
                self._queue.get(timeout=None if self._threads == 1 else IDLE)
            except Empty:
                with self._lock:
                    if self._threads == 1 or self._files >= self._threads:
                        continue
                    self._threads -= 1
                return
            file = self._line.popleft()
            if file is None:
                return
            file.serve(self)
            self._turns += 1


class Inspection:
    """A turn in which each of ``files`` is inspected if it has changed, or in any case where ``anew``.

    A file whose disk hangs holds it up, and is left out of the next one: so it holds up the others no longer than that.
    """

    def __init__(self, files: Sequence[SharedFile], anew: bool) -> None:
        self._files = files
        self._anew = anew

    def serve(self, writers: Writers) -> None:
        """Do so."""
        for file in self._files:
            file.inspect(self._anew)
        writers.served()


class FileWatcher:
    """The thread that watches, and the files that it watches."""

    def __init__(self) -> None:
        self.writers = Writers(self._interrupt)
        self._listener = NotificationListener()
        self._lock = threading.Lock()
        self._files: dict[SharedFile, str] = {}
        self._ended = False

    def start(self) -> None:
        """Start this thread and the first writer thread. Raises :class:`RuntimeError` if there are none to be had."""
        try:
            self.writers.start()
            threading.Thread(target=self._watch, name="mainspring sqlite watcher", daemon=True).start()
        except RuntimeError:
            self.writers.end()
            self._listener.close()
            raise

    def end(self) -> None:
        """Let all the threads end."""
        self.writers.end()
        self._ended = True
        self._interrupt()

    def add(self, file: SharedFile, directory: str) -> str:
        """Watch a file, and listen beside it. Return the name there, "" if that cannot be."""
        name = self._listener.add(directory)
        with self._lock:
            self._files[file] = name
            first = len(self._files) == 1
        if first:
            self._interrupt()
        return name

    def remove(self, file: SharedFile) -> None:
        """Watch a file no more (idempotent)."""
        with self._lock:
            name = self._files.pop(file, "")
        self._listener.remove(name)

    def _interrupt(self) -> None:
        self._listener.interrupt()

    def _watch(self) -> None:
        inspect_at = math.inf
        queueing = False
        ahead = _date_ahead()
        while not self._ended:
            wanted = min(inspect_at - clock.monotonic(), HELD_UP if queueing else math.inf)
            received = self._listener.wait(None if wanted == math.inf else max(0.0, wanted))
            now = clock.monotonic()
            queueing = self.writers.help(now)
            with self._lock:
                files = dict(self._files)
            if received.unknown or now >= inspect_at:
                ahead, before = _date_ahead(), ahead
                waited_on = [file for file in files if file.wants_inspection(now)]
                if waited_on:
                    self.writers.serve(Inspection(waited_on, abs(ahead - before) > CLOCK_JUMP))
            if now >= inspect_at:
                inspect_at = math.inf
            if files:
                inspect_at = min(inspect_at, now + INSPECT_EVERY)
            for file, name in files.items() if received.names or received.cancelled or received.results else ():
                if name in received.names:
                    file.on_news()
                file.on_ended(received.cancelled, received.results)
        self._listener.close()


class OpenFiles:
    """The files of this process that are connected. Above :data:`KEPT`, those rest that were not used for longest."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: dict[SharedFile, None] = {}

    def used(self, file: SharedFile) -> None:
        """Note that a connected file was used just now."""
        with self._lock:
            self._files.pop(file, None)
            self._files[file] = None
            spare = list(islice(self._files, max(0, len(self._files) - KEPT)))
            for other in spare:
                del self._files[other]
        for other in spare:
            other.rest()

    def left(self, file: SharedFile) -> None:
        """Note that a file is not connected any more."""
        with self._lock:
            self._files.pop(file, None)


class FileThreads:
    """The threads of this process, how many files use them, and the connections of these files."""

    def __init__(self) -> None:
        self.connections = OpenFiles()
        self._lock = threading.Lock()
        self._users = 0
        self._watcher: FileWatcher | None = None

    @classmethod
    def shared(cls) -> FileThreads:
        """Return those of this process."""
        return process.shared("sqlite threads", "", cls)

    def acquire(self) -> FileWatcher:
        """Use them, until :meth:`release`. Raises :class:`RuntimeError` if there are none to be had."""
        with self._lock:
            if self._watcher is None:
                watcher = FileWatcher()
                watcher.start()
                self._watcher = watcher
            self._users += 1
            return self._watcher

    def release(self) -> None:
        """Use them no longer."""
        with self._lock:
            self._users -= 1
            if not self._users and self._watcher is not None:
                self._watcher.end()
                self._watcher = None


def _date_ahead() -> float:
    """Return by how much the date is ahead of the clock since boot; a date that is set changes it."""
    return clock.utc_now().timestamp() - clock.boot_time()
