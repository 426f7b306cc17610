"""A mailbox file as the mailboxes of this process share it: their jobs, and who is woken when it has changed."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from mainspring.core import clock, process
from mainspring.core.process import event_loop
from mainspring.errors import ConfigError, MailboxConnectionError
from mainspring.mailbox import batched
from mainspring.mailbox.batched import Claim, Command
from mainspring.mailbox.sqlite.connection import DatabaseFile
from mainspring.mailbox.sqlite.notifier import Notifier, note_of, notes_of_results
from mainspring.mailbox.sqlite.threads import INSPECT_EVERY, FileThreads, logger

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mainspring.mailbox.backend import Notifications
    from mainspring.mailbox.sqlite.threads import FileWatcher, Writers
    from mainspring.mailbox.sqlite.unit_of_work import UnitOfWork
    from mainspring.runtime.interval import Alarms


class Inspect(Command):
    """See, without writing, what could be claimed and when more becomes due."""

    __slots__ = ()


class Listen(Command):
    """Listen for notifications of other processes, or no longer where none is wanted any more."""

    __slots__ = ("wanted",)

    def __init__(self, wanted: bool) -> None:
        super().__init__()
        self.wanted = wanted


class Rest(Command):
    """Disconnect until the file is used again."""

    __slots__ = ()


class SQLiteWaiters(batched.Waiters):
    """The receives of one mailbox object that wait, as the store's threads see them.

    ``signals`` is raised by those threads. ``notifications`` are published on the event loop. ``due_in`` is called with the
    seconds until the next thing is due.
    """

    __slots__ = ("announced", "due_in", "loop", "mailbox", "notifications")

    def __init__(self, alarms: Alarms, due_in: Callable[[float], None], notifications: Notifications) -> None:
        super().__init__(alarms)
        self.mailbox = 0
        self.loop = event_loop()
        self.due_in = due_in
        self.notifications = notifications
        self.announced = math.inf

    @property
    def listens(self) -> bool:
        """True if notifications of other processes are wanted, also while no receive waits. Any thread may ask."""
        return self.notifications.cancelled.is_wanted or self.notifications.results.is_wanted


KIND = "sqlite file"
SOONEST = 1e-6
"""The shortest time, in seconds, that is waited for something due: rounding must not make it nothing."""


@dataclass(eq=False, repr=False, slots=True)
class CommandBatch:
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
        """Call ``done`` on its event loop."""
        if self.done is not None:
            process.call_soon(self.loop, self.done)


def _joined(jobs: Sequence[CommandBatch]) -> CommandBatch:
    """Return the commands of all jobs as one."""
    commands = [command for job in jobs for command in job.commands]
    return CommandBatch(commands, jobs[0].boot, max(job.wall for job in jobs), real=jobs[0].real)


def _finish(jobs: list[CommandBatch]) -> None:
    for job in jobs:
        job.finish()


class SharedFile:
    """A mailbox file as the mailboxes of this process share it."""

    def __init__(self, path: str) -> None:
        self.file = DatabaseFile(path)
        self._threads = FileThreads.shared()
        self._notifier = Notifier(path)
        self._inbox: list[CommandBatch] = []
        self._own: list[Command] = []  # commands of the file itself, which no caller waits for
        self._queued = False  # or served
        self._lock = threading.Lock()
        self._waiters: dict[int, list[SQLiteWaiters]] = {}
        self._users = 0
        self._watcher: FileWatcher | None = None
        self._listens_as: str | None = None
        self._wanted = 0.0
        self._being_inspected = False
        self._process = process.identity()

    @classmethod
    def shared(cls, path: str) -> SharedFile:
        """Return the process's one for ``path`` (absolute).

        Raises :class:`ConfigError` where the process was forked from one that has the file open: SQLite would take the
        parent's locks for its own.
        """
        before = process.inherited(KIND, path)
        if isinstance(before, SharedFile) and before.in_use:
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
            if self._watcher is None:
                try:
                    self._watcher = self._threads.acquire()
                except RuntimeError as error:  # no more threads to be had
                    raise MailboxConnectionError(f"the mailbox file {file.path} cannot be opened: {error}") from None
            self._users += 1

    def release(self, job: CommandBatch) -> None:
        """Use it no longer; ``job`` (without commands) is done when the last user's connection is closed."""
        with self._lock:  # both at once: between the two the thread could leave the file, and the job stay undone
            self._users -= 1
            self._put(job)

    def submit(self, job: CommandBatch) -> None:
        """Hand commands over; their results are there when ``job.done`` is called."""
        self.check_process()
        with self._lock:
            self._put(job)

    def rest(self) -> None:
        """Have it disconnected, in a turn of its own: its disk may hang, and holds up no other file.

        That turn is the next one, so that of many files that are opened no more than needed are open at a time.
        """
        self._submit_own(Rest(), first=True)

    def _submit_own(self, command: Command, first: bool = False) -> None:
        self.check_process()
        with self._lock:
            self._own.append(command)
            self._take_turn(first)

    def _put(self, job: CommandBatch) -> None:
        self._inbox.append(job)
        self._take_turn()

    def _take_turn(self, first: bool = False) -> None:
        if not self._queued and self._has_jobs and self._watcher is not None:
            self._queued = True
            self._watcher.writers.serve(self, first)

    @property
    def _has_jobs(self) -> bool:
        return bool(self._inbox or self._own)

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

    def listen(self) -> None:
        """Listen for notifications of other processes from now on, as long as they are wanted."""
        self._submit_own(Listen(True))

    @property
    def in_use(self) -> bool:
        """True if it is in use, and so may be open."""
        return self._watcher is not None

    def check_process(self) -> None:
        """Raise :class:`ConfigError` in a process that was forked from the one it belongs to."""
        if not self._process.here:
            raise ConfigError(
                f"the mailbox file {self.file.path} was opened before this process was forked, and a SQLite file must not"
                " be used across a fork; start workers with subprocess or the spawn method and open the mailbox in them"
            )

    # ----------------------------------------------------------------------------------- in the thread that serves it

    def serve(self, writers: Writers) -> None:
        """Do all jobs that wait, and jobs that come meanwhile unless other files have waited longer."""
        while True:
            with self._lock:
                jobs, self._inbox = self._inbox, []
                own, self._own = self._own, []
            committed = self.file.transactions
            try:
                work = None
                if jobs:
                    work = self._transact(jobs[0] if len(jobs) == 1 else _joined(jobs))
                    self._note_connection()
                if work is not None:
                    self._notify(work)
                if own:
                    self._do_own(own, is_at_rest=work is None)
                if (self._users or not self._left()) and self.file.log_is_long:
                    _finish(jobs)
                    jobs = []
                    self.file.checkpoint_log()
            except Exception as error:  # the thread must outlive it, and the callers must be told
                logger.exception("the mailbox file %s could not be served", self.file.path)
                if self.file.transactions == committed:
                    self.file.fail([command for job in jobs for command in job.commands], error)
            with self._lock:
                goes_on = self._has_jobs and not writers.queueing()
                if not goes_on:
                    writers.served()
                    self._queued = False
                    self._take_turn()
            _finish(jobs)  # at the end: earlier, this thread and the event loop would take turns at the GIL
            if not goes_on:
                return

    def _transact(self, job: CommandBatch) -> UnitOfWork | None:
        if not job.commands or self._has_nothing_for(job):
            return None
        work = self.file.run(job.commands, job.boot, job.wall)
        if work is not None and self._waiters:
            self._tell(work, job.real)
        return work

    def _do_own(self, commands: list[Command], is_at_rest: bool) -> None:
        """Do commands of the file itself; ``is_at_rest`` if no transaction came just before."""
        kinds = {type(command) for command in commands}
        for command in commands:
            if type(command) is Listen:
                self._listen(command.wanted)
        if Inspect in kinds:
            self._mend_listening()
            self._inspect()
        if Rest in kinds and is_at_rest:  # else it was used again before its turn to rest
            self.file.rest(self._waited_on())
        self._note_connection()

    def _note_connection(self) -> None:
        if self.file.connected:
            self._threads.connections.used(self)
        else:
            self._threads.connections.left(self)

    def _has_nothing_for(self, job: CommandBatch) -> bool:
        """Answer claims that can find nothing, without opening the file. Return False if there may be something to do."""
        if any(type(command) is not Claim for command in job.commands):
            return False
        boot = job.boot()
        mailboxes = {command.mailbox for command in job.commands}
        soonest = self.file.soonest_for(mailboxes, boot, job.wall)
        if soonest is None:
            return False
        for command in job.commands:
            command.result = []
        with self._lock:
            self._tell_of_nothing(mailboxes, soonest, boot)
        if job.real:
            self._listen(True)
        return True

    def _left(self) -> bool:
        """Leave the file, unless it is in use or was used meanwhile. Return True if it was left."""
        self._listen_no_longer()
        self.file.leave()
        with self._lock:
            if self._users or self._has_jobs:  # a user that came and went leaves jobs, and waits for them
                return False
            self._watcher = None
            self._threads.connections.left(self)
            self._threads.release()
            return True

    # --------------------------------------------------------------------------------------- who is woken when

    def _tell(self, work: UnitOfWork, real: bool) -> None:
        """Wake, after a commit, the receives of this process that may have something to claim."""
        with self._lock:
            for mailbox, count in work.gained.items():
                self._wake(mailbox, count)
            self._tell_of_ended(work.cancelled, work.results)
            self._tell_of_nothing(work.empty, work.soonest, work.boot)
        if work.empty and real:
            self._listen(True)

    def _notify(self, work: UnitOfWork) -> None:
        """Tell the other processes of what was committed."""
        own = self._listens_as or ""
        if work.gained or work.dated:
            self._notifier.notify(own)
        for mailbox, message_id in work.cancelled:
            self._notifier.notify(own, note_of(mailbox, message_id))
        for mailbox, message_ids in work.results.items():
            for note in notes_of_results(mailbox, message_ids):
                self._notifier.notify(own, note)

    def _tell_of_nothing(self, empty: set[int], soonest: float, boot: float) -> None:
        """Say when the next thing is due, also to the receives that have found their mailboxes ``empty``."""
        if soonest < math.inf:
            self._announce(soonest, boot, empty)

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

    def _tell_of_ended(self, cancelled: list[tuple[int, str]], results: dict[int, list[str]]) -> None:
        for mailbox, message_id in cancelled:
            for waiters in self._waiters.get(mailbox, ()):
                process.call_soon(waiters.loop, partial(waiters.notifications.cancelled.publish, [message_id]))
        for mailbox, message_ids in results.items():
            for waiters in self._waiters.get(mailbox, ()):
                if waiters.notifications.results.is_wanted:
                    process.call_soon(waiters.loop, partial(waiters.notifications.results.publish, message_ids))

    def _announce(self, soonest: float, boot: float, empty: set[int]) -> None:
        """Say when the next thing is due to the receives that wait, or are about to, and were not told yet."""
        for mailbox, group in self._waiters.items():
            for waiters in group:
                if (waiters.parked or mailbox in empty) and (soonest < waiters.announced or waiters.announced <= boot):
                    waiters.announced = soonest
                    process.call_soon(waiters.loop, partial(waiters.due_in, max(soonest - boot, SOONEST)))

    def _waited_on(self) -> list[int]:
        with self._lock:
            return list(self._waiters)

    def _inspect(self) -> None:
        seen = self.file.inspect(self._waited_on())
        if seen is None:
            with self._lock:
                self._wake_all()  # the receives find out what is wrong
            return
        boot = clock.boot_time()
        soonest = seen.soonest(boot, clock.utc_now().timestamp())
        with self._lock:
            for mailbox, count in seen.ready.items():
                self._wake(mailbox, count)
            if soonest < math.inf:
                self._announce(soonest, boot, set())

    # ---------------------------------------------------------------------------------------- for other processes

    def _listen(self, wanted: bool) -> None:
        """Listen, or no longer if it is not wanted again. What was sent meanwhile the receives find: they claim once more."""
        if wanted and self._listens_as is None and self._watcher is not None:
            self._wanted = clock.monotonic()
            self._listens_as = self._watcher.add(self, self._notifier.directory)
        elif not wanted and not self._listener_wanted():
            self._listen_no_longer()  # a receive that parks just now claims again, and has the file listen again
        else:
            return
        with self._lock:
            self._wake_all()

    def _listen_no_longer(self) -> None:
        if self._watcher is not None and self._listens_as is not None:
            self._listens_as = None
            self._watcher.remove(self)

    def _mend_listening(self) -> None:
        """Listen under a new name if that in the directory was deleted, as by a cleaner of temporary files."""
        if self._listens_as and not self._notifier.has(self._listens_as):
            self._listen_no_longer()
            self._listen(True)

    def _listener_wanted(self) -> bool:
        with self._lock:
            return any(waiters.parked or waiters.listens for waiters in self._everybody())

    # ------------------------------------------------------------------------------------------ called by the watcher

    def wants_inspection(self, now: float) -> bool:
        """True if receives wait, and no inspection is held up.

        Listening ends where it was wanted by none for :data:`INSPECT_EVERY` seconds.
        """
        if self._listener_wanted():
            self._wanted = now
        elif now - self._wanted >= INSPECT_EVERY and not self._queued:
            self._submit_own(Listen(False))
        return self._has_parked() and not self._being_inspected

    def inspect(self, anew: bool) -> None:
        """Have the file inspected if it has changed, or in any case where ``anew``; called by a writer thread."""
        self._being_inspected = True
        try:
            if anew or self.file.has_changed():
                self._submit_own(Inspect())
        finally:
            self._being_inspected = False

    def on_news(self) -> None:
        """Have the file inspected: another process says that there is something new."""
        with self._lock:
            for waiters in self._everybody():
                waiters.signals += 1
        if self._has_parked():
            self._submit_own(Inspect())

    def on_ended(self, cancelled: list[tuple[int, str]], results: dict[int, list[str]]) -> None:
        """Tell of messages that were cancelled, or acknowledged with a result, in another process."""
        with self._lock:
            self._tell_of_ended(cancelled, results)

    def _has_parked(self) -> bool:
        with self._lock:
            return any(waiters.parked for waiters in self._everybody())
