"""The one writer thread of a mailbox file in this process, and how it wakes receives here and in other processes."""

from __future__ import annotations

import math
import os
import threading
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING

from mainspring.core import clock, process
from mainspring.core.process import event_loop
from mainspring.errors import ConfigError, MailboxConnectionError
from mainspring.mailbox import batched
from mainspring.mailbox.batched import Command
from mainspring.mailbox.sqlite.connection import DatabaseFile
from mainspring.mailbox.sqlite.notifier import Notifier, note_of, read_note
from mainspring.mailbox.sqlite.store import look

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mainspring.mailbox.sqlite.unit_of_work import UnitOfWork


class Look(Command):
    """See, without writing, what could be claimed and when more becomes due."""

    __slots__ = ()


class SQLiteWaiters(batched.Waiters):
    """The receives of one mailbox object that wait, as the store's threads see them.

    ``signals`` is raised by those threads; ``cancelled`` is called with the ids of cancelled messages, also while no receive
    waits if ``listens`` is set. ``due_in`` is called with the seconds until the next thing is due.
    """

    __slots__ = ("announced", "cancelled", "due_in", "listens", "loop", "mailbox")

    def __init__(self, due_in: Callable[[float], None], cancelled: Callable[[list[str]], object]) -> None:
        super().__init__()
        self.mailbox = 0
        self.loop = event_loop()
        self.due_in = due_in
        self.cancelled = cancelled
        self.listens = False
        self.announced = math.inf


KIND = "sqlite file"
LOOK_AGAIN = 1.0
"""Seconds after which those who wait look at the file again, should a notification have been lost."""
SOONEST = 1e-6
"""The shortest time, in seconds, that is waited for something due: rounding must not make it nothing."""


@dataclass(eq=False, repr=False, slots=True)
class Job:
    """Commands that one mailbox hands over. ``done`` is called on its event loop when they have their results.

    ``real`` is False under a virtual clock: no other process shares its time, so none is listened for.
    """

    commands: Sequence[Command]
    boot: Callable[[], float]
    wall: float
    loop: object | None = None
    done: Callable[[], object] | None = None
    real: bool = True

    def finish(self) -> None:
        """Tell the one who waits."""
        if self.done is not None:
            process.call_soon(self.loop, self.done)


class Writer:
    """A mailbox file as the mailboxes of this process share it. Its threads live while it is in use."""

    def __init__(self, path: str) -> None:
        self.file = DatabaseFile(path)
        self._notifier = Notifier(path)
        self._inbox: SimpleQueue[Job] = SimpleQueue()
        self._lock = threading.Lock()
        self._waiters: dict[int, list[SQLiteWaiters]] = {}
        self._users = 0
        self._running = False
        self._watcher: threading.Thread | None = None
        self._owner = os.getpid()

    @classmethod
    def shared(cls, path: str) -> Writer:
        """Return the process's writer for ``path`` (absolute).

        Raises :class:`ConfigError` where the process was forked from one that has the file open: SQLite would take the
        parent's locks for its own.
        """
        before = process.inherited(KIND, path)
        if isinstance(before, Writer) and before.in_use:
            before.check_process()
        return process.shared(KIND, path, lambda: cls(path))

    # ---------------------------------------------------------------------------------------- called on event loops

    def acquire(self, synchronous: str, busy_timeout: float) -> None:
        """Use it; to be undone by :meth:`release`. Raises :class:`ConfigError` where others use it with other settings."""
        self.check_process()
        file = self.file
        with self._lock:
            if self._users and (file.synchronous, file.busy_timeout) != (synchronous, busy_timeout):
                raise ConfigError(
                    f"the mailbox file {file.path} is open in this process with synchronous={file.synchronous} and"
                    f" busy_timeout={file.busy_timeout:g}; give all mailboxes on one file the same"
                )
            file.synchronous, file.busy_timeout = synchronous, busy_timeout
            if not self._running:
                try:
                    threading.Thread(target=self._write, name="mainspring sqlite writer", daemon=True).start()
                except RuntimeError as error:  # no more threads to be had
                    raise MailboxConnectionError(f"the mailbox file {file.path} cannot be opened: {error}") from None
                self._running = True
            self._users += 1

    def release(self, job: Job) -> None:
        """Use it no longer; ``job`` (without commands) is done when the last user's connection is closed."""
        with self._lock:  # both at once: the thread must not end between the two, with no thread left to do the job
            self._users -= 1
            self._inbox.put(job)

    def submit(self, job: Job) -> None:
        """Hand commands over; their results are there when ``job.done`` is called."""
        self.check_process()
        self._inbox.put(job)

    def add_waiters(self, waiters: SQLiteWaiters) -> None:
        """Tell them from now on when there may be something to claim."""
        with self._lock:
            self._waiters.setdefault(waiters.mailbox, []).append(waiters)

    def remove_waiters(self, waiters: SQLiteWaiters) -> None:
        """Tell them nothing more."""
        with self._lock:
            group = self._waiters.get(waiters.mailbox, [])
            if waiters in group:
                group.remove(waiters)
            if not group:
                self._waiters.pop(waiters.mailbox, None)

    def listen(self, waiters: SQLiteWaiters, wanted: bool) -> None:
        """Set whether ``waiters`` hear of cancelled messages at once also while none of their receives waits."""
        with self._lock:
            waiters.listens = wanted
            if wanted and self._watcher is None:
                self._watch_from_now_on()

    @property
    def in_use(self) -> bool:
        """True if its thread runs, and so may have the file open."""
        return self._running

    def check_process(self) -> None:
        """Raise :class:`ConfigError` in a process that was forked from the one it belongs to."""
        if os.getpid() != self._owner:
            raise ConfigError(
                f"the mailbox file {self.file.path} was opened before this process was forked, and a SQLite file must not"
                " be used across a fork; start workers with subprocess or the spawn method and open the mailbox in them"
            )

    # ------------------------------------------------------------------------------------------ in the writer thread

    def _write(self) -> None:
        inbox = self._inbox
        while True:
            jobs = [inbox.get()]
            while not inbox.empty():
                jobs.append(inbox.get())
            self._transact(jobs)
            if not self._users and self._ended():
                for job in jobs:
                    job.finish()
                return
            for job in jobs:
                job.finish()
            self.file.checkpoint_log()

    def _transact(self, jobs: list[Job]) -> None:
        commands = jobs[0].commands if len(jobs) == 1 else [command for job in jobs for command in job.commands]
        looks = [command for command in commands if type(command) is Look]
        if looks:
            commands = [command for command in commands if type(command) is not Look]
        work = None
        if commands:
            work = self.file.run(commands, jobs[0].boot, max(job.wall for job in jobs))
        if work is not None:
            self._tell(work, jobs[0].real)
        if looks:
            self._look()

    def _ended(self) -> bool:
        """Close the file, unless it is in use or was used meanwhile. Return True if the thread is done."""
        with self._lock:
            watcher = self._watcher
            self._notifier.interrupt()
        if watcher is not None:
            watcher.join()  # before the directory is let go of: it removes its socket there
        self.file.leave()
        with self._lock:
            if self._users or not self._inbox.empty():  # a user that came and went leaves jobs, and waits for them
                return False
            self._notifier.close()
            self._running = False
            return True

    # --------------------------------------------------------------------------------------- who is woken when

    def _tell(self, work: UnitOfWork, real: bool) -> None:
        """Wake, after a commit, the receives that may have something to claim, here and in other processes."""
        if work.gained or work.dated:
            self._notifier.notify()
        for mailbox, message_id in work.cancelled:
            self._notifier.notify(note_of(mailbox, message_id))
        if not self._waiters:
            return
        with self._lock:
            for mailbox, count in work.gained.items():
                self._wake(mailbox, count)
            self._tell_of_cancelled(work.cancelled)
            if work.soonest < math.inf:
                self._announce(work.soonest, work.boot, work.empty)
            if work.empty and self._watcher is None and real:
                self._watch_from_now_on()

    def _wake(self, mailbox: int, count: int) -> None:
        for waiters in self._waiters.get(mailbox, ()):
            waiters.signals += 1
            if waiters.parked:
                process.call_soon(waiters.loop, partial(waiters.wake, count))

    def _wake_all(self) -> None:
        for waiters in self._everybody():
            waiters.signals += 1
            if waiters.parked:
                process.call_soon(waiters.loop, waiters.wake_all)

    def _everybody(self) -> list[SQLiteWaiters]:
        return [waiters for group in self._waiters.values() for waiters in group]

    def _tell_of_cancelled(self, cancelled: list[tuple[int, str]]) -> None:
        for mailbox, message_id in cancelled:
            for waiters in self._waiters.get(mailbox, ()):
                process.call_soon(waiters.loop, partial(waiters.cancelled, [message_id]))

    def _announce(self, soonest: float, boot: float, empty: set[int]) -> None:
        """Say when the next thing is due to those who wait, or are about to, and do not know yet."""
        for mailbox, group in self._waiters.items():
            for waiters in group:
                if (waiters.parked or mailbox in empty) and (soonest < waiters.announced or waiters.announced <= boot):
                    waiters.announced = soonest
                    process.call_soon(waiters.loop, partial(waiters.due_in, max(soonest - boot, SOONEST)))

    def _look(self) -> None:
        with self._lock:
            waited_on = list(self._waiters)
        seen = self.file.read(partial(look, waited_on=waited_on))
        if seen is None:
            with self._lock:
                self._wake_all()  # those who wait shall hear what is wrong
            return
        pending, until, date = seen
        boot = clock.boot_time()
        soonest = min(until, boot + date - clock.utc_now().timestamp())
        with self._lock:
            for mailbox, count in pending.items():
                self._wake(mailbox, count)
            if soonest < math.inf:
                self._announce(soonest, boot, set())

    # ---------------------------------------------------------------------------------------- for other processes

    def _watch_from_now_on(self) -> None:
        """Listen. What was sent before is found by the receives themselves: they look once more.

        Where no thread is to be had for that, this one looks at the file, and again each second, when it tries anew.
        """
        self._notifier.listen()
        watcher = threading.Thread(target=self._watch, name="mainspring sqlite notifier", daemon=True)
        try:
            watcher.start()
        except RuntimeError:
            self._notifier.take_down()
            self._inbox.put(Job((Look(),), clock.boot_time, 0.0))
            for waiters in self._everybody():
                process.call_soon(waiters.loop, partial(waiters.due_in, LOOK_AGAIN))
            return
        self._watcher = watcher
        self._wake_all()

    def _watch(self) -> None:
        wanted = clock.monotonic()
        while True:
            notified = self._notifier.wait(LOOK_AGAIN)
            now = clock.monotonic()
            with self._lock:
                if notified:
                    for waiters in self._everybody():
                        waiters.signals += 1
                parked = any(waiters.parked for waiters in self._everybody())
                if parked or any(waiters.listens for waiters in self._everybody()):
                    wanted = now
                if now - wanted >= LOOK_AGAIN or self._notifier.interrupted:
                    self._watcher = None
                    self._notifier.take_down()
                    self._wake_all()  # a receive that parks just now claims again, and has the notifier listen again
                    return
                self._tell_of_cancelled([told for note in notified if (told := read_note(note)) is not None])
            if parked:
                self._inbox.put(Job((Look(),), clock.boot_time, 0.0))
