"""One connection to a mailbox file: opened and checked, used for transactions, mended or dropped when there is trouble."""

from __future__ import annotations

import contextlib
import copy
import errno
import os
import threading
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import apsw

from mainspring.core import clock, random
from mainspring.core.directory import open_directory
from mainspring.errors import ConfigError, MailboxConnectionError, MailboxError, MainspringError
from mainspring.mailbox.backend import TRANSIENT
from mainspring.mailbox.batched import Open
from mainspring.mailbox.sqlite import schema as sql
from mainspring.mailbox.sqlite.limits import KnownLimits
from mainspring.mailbox.sqlite.notifier import has_settled
from mainspring.mailbox.sqlite.store import inspect, perform

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from mainspring.mailbox.batched import Command
    from mainspring.mailbox.sqlite.unit_of_work import UnitOfWork

OLDEST_SQLITE = (3, 51, 3)
"""Earlier ones can corrupt a WAL file that several processes write (the WAL-reset bug)."""
CHECKPOINT_PAGES = 2_000
"""Pages (of 4 KiB) in the write-ahead log from which they are copied into the database after a commit."""
INDEX_BYTES = 32_768
"""Bytes by which the index of the write-ahead log grows."""
LOG_PAGES = 20_000
"""Pages from which a checkpoint waits for readers, so that the log can start over: it never grows much beyond."""
FILE_ID_BITS = 128
NO_FILE_ID = b"-" * (FILE_ID_BITS // 4)
"""Stands for the id of a file that is not made yet."""
DESCRIPTORS = 3
"""How many a connection has: of the file, its log and the index of that."""

_TROUBLE: dict[type[Exception], str] = {
    apsw.BusyError: "is locked by another process for longer than {timeout:g} s; try again",
    apsw.LockedError: "is locked by another user of this process; try again",
    apsw.FullError: "cannot grow: the disk is full; free some space, then it goes on",
    apsw.IOError: "cannot be read or written: {error}",
    apsw.ReadOnlyError: "cannot be written: the file, its directory or its file system is read-only",
    apsw.CantOpenError: "cannot be opened: {error}; this process needs write access to the file and its directory",
    apsw.PermissionsError: "cannot be used: {error}",
    apsw.CorruptError: "is damaged: {error}; stop its users, then recover it (`sqlite3 FILE .recover`) or restore a copy",
    apsw.NotADBError: "is no SQLite database",
    apsw.NoMemError: "cannot be used: out of memory",
    apsw.ProtocolError: "is locked by others so often that no turn came; try again",
}
"""What concerns every command of a transaction alike; anything else is one command's own fault."""
_NEVER = threading.Event()
_USABLE_AFTER = (apsw.BusyError, apsw.LockedError, apsw.FullError, apsw.ProtocolError)


@dataclass(frozen=True, slots=True)
class Seen:
    """What an inspection has found: the messages that are ready, by mailbox, and when the next lease ends (since boot), or
    delay or expiry, or when a limiter opens (POSIX).

    ``state`` is that of the file, None if it had changed too recently to tell it from the next one.
    """

    state: tuple[int, ...] | None
    ready: dict[int, int]
    until: float
    date: float

    def soonest(self, boot: float, wall: float) -> float:
        """Return when the next thing is due, since boot."""
        return min(self.until, boot + self.date - wall)


Inode = tuple[int, int]
"""The device and the number of a file on it, which another file can have once this one is deleted and closed."""


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """Tells a mailbox file from another one at its path."""

    inode: Inode | None
    file_id: str


class DatabaseFile:
    """A mailbox file and this process's one connection to it. One thread at a time uses it.

    ``synchronous`` and ``busy_timeout`` hold from the next time it is opened. ``transactions`` counts those committed.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.synchronous = "full"
        self.busy_timeout = 5.0
        self.transactions = 0
        self._connection: apsw.Connection | None = None
        self._waited_since = 0.0
        self._log_pages = 0
        self._identity: FileIdentity | None = None  # from the first opening until the last leaves
        self._log: Inode | None = None  # that of the connection
        self._tick = 0  # the last tick committed by this process
        self._rested = False
        self._seen: Seen | None = None
        self._limits = KnownLimits()

    @property
    def connected(self) -> bool:
        """True if there is a connection."""
        return self._connection is not None

    def run(self, commands: Sequence[Command], boot: Callable[[], float], wall: float) -> UnitOfWork | None:
        """Do all commands in one transaction and set their results and errors. Return None if nothing was committed."""
        try:
            connection = self._connection or self._open([command for command in commands if isinstance(command, Open)])
            try:
                work = self._commit(connection, commands, boot, wall, perform)
            except tuple(_TROUBLE):
                raise
            except Exception:  # it is found out below whose it is
                work = self._commit(connection, commands, boot, wall, _one_by_one)
            self._check_place()
            return work
        except Exception as error:  # the thread must outlive it, and the callers must hear of it
            self._after_trouble(error)
            self.fail(commands, error)
            return None

    def fail(self, commands: Sequence[Command], error: Exception) -> None:
        """Set on each command what ``error`` means."""
        told = self._explain(error)
        for command in commands:
            command.error = copy.copy(told)
            command.error.__cause__ = error

    def inspect(self, waited_on: Sequence[int]) -> Seen | None:
        """See what there is for the mailboxes ``waited_on``. Return None if that fails; the next :meth:`run` tells why."""
        try:
            connection = self._connection or self._open()
            self._check_place()
            alone = self._state() is not None and self._lock_out_writers(connection)
            try:
                self._seen = Seen(self._state() if alone else None, *inspect(connection, waited_on))
            finally:
                if alone:
                    _roll_back(connection)
        except Exception as error:  # the thread must outlive it
            self._after_trouble(error)
            return None
        return self._seen

    def _lock_out_writers(self, connection: apsw.Connection) -> bool:
        """Begin a transaction if no process is in a writing one: what it has in the log already cannot be seen yet."""
        connection.set_busy_handler(None)
        try:
            connection.execute("BEGIN IMMEDIATE")
        except apsw.Error:
            return False
        finally:
            connection.set_busy_handler(self._busy)
        return True

    def has_changed(self) -> bool:
        """True unless nothing was written since the last :meth:`inspect`, by any process. Any thread may ask."""
        seen = self._seen
        return seen is None or seen.state is None or seen.state != self._state()

    def soonest_for(self, mailboxes: Collection[int], boot: float, wall: float) -> float | None:
        """Return when more is due (since boot) if there is nothing to claim in ``mailboxes``; None if that is not known.

        Nothing is read for that: it is known where nothing was written since the last :meth:`inspect`.
        """
        seen = self._seen
        if seen is None or any(mailbox in seen.ready for mailbox in mailboxes):
            return None
        soonest = seen.soonest(boot, wall)
        return None if soonest <= boot or self.has_changed() else soonest

    @property
    def log_is_long(self) -> bool:
        """True if :meth:`checkpoint_log` has something to do."""
        return self._log_pages >= CHECKPOINT_PAGES

    def checkpoint_log(self) -> None:
        """Keep the write-ahead log short; called between transactions, once the callers have their results."""
        if self._connection is None:
            return
        mode = apsw.SQLITE_CHECKPOINT_PASSIVE if self._log_pages < LOG_PAGES else apsw.SQLITE_CHECKPOINT_RESTART
        self._log_pages = 0
        with contextlib.suppress(apsw.Error):  # it is tried again after the next commit, which tells of real trouble
            self._connection.wal_checkpoint(mode=mode)

    def close(self) -> None:
        """Disconnect; the last process to do so empties the log."""
        connection, self._connection = self._connection, None
        if connection is not None:
            _close(connection)

    def rest(self, waited_on: Sequence[int]) -> None:
        """Disconnect until the file is used again. What is in the log is left there; what there is to claim is remembered."""
        if self._connection is not None and self.inspect(waited_on) is not None:
            if self._log_stat() is not None:
                self._connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
                self._rested = True
            self.close()

    def leave(self) -> None:
        """Disconnect for good, and forget what was known of the file: the next user may find another one."""
        if self._rested and self._connection is None:
            self.inspect(())  # so that closing it empties the log
        self.close()
        self._rested = False
        self._identity = self._seen = None
        self._tick = 0

    # -------------------------------------------------------------------------------------------------- transactions

    def _commit(
        self,
        connection: apsw.Connection,
        commands: Sequence[Command],
        boot: Callable[[], float],
        wall: float,
        do: Callable[[apsw.Connection, Sequence[Command], float, float, KnownLimits], UnitOfWork],
    ) -> UnitOfWork:
        for command in commands:
            command.result = command.error = None
        durable = any(type(command) is not Open for command in commands)  # a name is: with the first message under it
        if not durable:
            connection.execute("PRAGMA synchronous = normal")
        try:
            connection.execute("BEGIN IMMEDIATE")
            work = do(connection, commands, boot(), wall, self._limits)
            connection.execute("COMMIT")
        except BaseException:
            _roll_back(connection)
            raise
        finally:
            if not durable:
                connection.execute(f"PRAGMA synchronous = {self.synchronous}")
        self.transactions += 1
        self._tick = work.tick
        return work

    def _after_trouble(self, error: Exception) -> None:
        connection = self._connection
        if connection is not None and (connection.in_transaction or not isinstance(error, _USABLE_AFTER)):
            self.close()  # the next transaction opens it anew

    def _explain(self, error: Exception) -> Exception:
        if isinstance(error, MainspringError):
            return error
        for kind, what in _TROUBLE.items():
            if isinstance(error, kind):
                told = (self._cause(kind) or what).format(error=str(error).strip(), timeout=self.busy_timeout)
                return MailboxConnectionError(f"the mailbox file {self.path} {told}")
        if isinstance(error, OSError):
            return MailboxConnectionError(f"the mailbox file {self.path} cannot be read or written: {error}")
        return MailboxError(f"the mailbox file {self.path} could not be used: {type(error).__name__}: {error}")

    def _cause(self, kind: type[Exception]) -> str | None:
        """Return what is wrong where SQLite does not tell, and the system does."""
        if kind is apsw.IOError and self._is_disk_full():
            return _TROUBLE[apsw.FullError]
        if kind is apsw.CantOpenError and _is_out_of_descriptors():
            return "cannot be opened: this process may open no more files: raise its limit (`ulimit -n`)"
        return None

    def _is_disk_full(self) -> bool:
        """Return True if nothing can be added: SQLite tells of that by an I/O error where it is the log's index that grows."""
        try:
            found = os.statvfs(os.path.dirname(self.path))
        except OSError:
            return False
        return found.f_bavail * found.f_frsize < INDEX_BYTES

    def _state(self) -> tuple[int, ...] | None:
        """Return what is another after each commit, or None if the last one is too recent for that."""
        try:
            file = os.stat(self.path)
            log = self._log_stat()
        except OSError:
            return None
        last = file if log is None else log
        state = (file.st_dev, file.st_ino, last.st_ino, last.st_size, last.st_mtime_ns)
        return state if has_settled(last.st_mtime_ns) else None

    def _log_stat(self) -> os.stat_result | None:
        """Return what the system says of the log, None if there is nothing in it."""
        try:
            log = os.stat(f"{self.path}-wal")
        except FileNotFoundError:
            return None
        return log if log.st_size else None

    def _check_place(self) -> None:
        """Open the file anew if its path or that of its log names another one by now; raises where it is not the same file.

        SQLite would work on in files that no other process can see. This is asked after each transaction: before it, a file
        could still be replaced until the commit. A log that was deleted goes to the file as its last connection closes.
        """
        identity = self._identity
        if identity is None or (_inode(self.path), _inode(f"{self.path}-wal")) != (identity.inode, self._log):
            self.close()
            self._open()

    # ------------------------------------------------------------------------------------------------------- opening

    def has_mailbox(self, name: str) -> bool:
        """True if the file is there, and a mailbox of that name in it; nothing is made, and nothing brought up to date.

        A connection of its own asks; so this can be called in any thread.
        """
        try:
            if not os.path.exists(self.path):
                return False
            with self._connected(apsw.SQLITE_OPEN_READWRITE) as connection, contextlib.closing(connection):
                return bool(self._check(connection)) and connection.execute(sql.MAILBOX, (name,)).fetchall() != []
        except Exception as error:
            raise self._explain(error) from error

    def _open(self, first: Sequence[Open] = ()) -> apsw.Connection:
        """Connect to the file. A new one is made with the mailboxes that the commands ``first`` are for."""
        check_sqlite(apsw.sqlite_lib_version())
        directory = os.path.dirname(self.path)
        if not os.path.isdir(directory):
            raise ConfigError(f"the mailbox file {self.path} has no directory: make {directory} first")
        identity = self._identity
        if identity is None and not any(os.path.exists(f"{self.path}{suffix}") for suffix in ("", "-wal", "-journal")):
            _make(self.path, first)
        inode = _inode(self.path)  # before connecting: a file put in its place from now on is seen
        if identity is not None and inode != identity.inode:
            raise self._not_there("deleted" if inode is None else "replaced by another one")
        create = 0 if identity else apsw.SQLITE_OPEN_CREATE
        with self._connected(apsw.SQLITE_OPEN_READWRITE | create) as connection:
            version = self._check(connection)
            if identity is not None:
                self._check_content(connection, version, identity)
            _execute_once(connection, sql.SETTINGS.format(self.synchronous))
            connection.set_wal_hook(self._committed)
            self._prepare(connection, version)
            ((file_id,),) = _execute_once(connection, sql.FILE_ID)
        self._limits = KnownLimits()
        self._connection = connection
        self._identity = FileIdentity(inode or _inode(self.path), str(file_id))
        self._log = _inode(f"{self.path}-wal")
        self._rested = False
        return connection

    def _check_content(self, connection: apsw.Connection, version: int, identity: FileIdentity) -> None:
        """Refuse what has the inode of the file that was opened, as one made after that was deleted can have.

        Another file knows nothing of the mailboxes that are open here. An earlier copy gives out numbers of leases once more.
        """
        if version != sql.SCHEMA_VERSION or _execute_once(connection, sql.FILE_ID) != [(identity.file_id,)]:
            raise self._not_there("replaced by another one")
        if any(tick < self._tick for (tick,) in _execute_once(connection, sql.TICK)):
            raise self._not_there("replaced by an earlier copy, or its log deleted,")

    def _not_there(self, what: str) -> MailboxError:
        return MailboxError(
            f"the mailbox file {self.path} was {what} while this process had it open; put it back if it is needed, and"
            " start its users again"
        )

    @contextlib.contextmanager
    def _connected(self, flags: int) -> Iterator[apsw.Connection]:
        """Open a connection to the file, which an error in the block closes."""
        if os.path.exists(self.path) and not os.path.isfile(self.path):  # SQLite would wait for a pipe, or call it busy
            raise ConfigError(f"{self.path} is no regular file; name another one for the mailbox")
        connection = apsw.Connection(self.path, flags)
        try:
            connection.set_busy_handler(self._busy)
            yield connection
        except apsw.NotADBError:
            _close(connection)
            raise ConfigError(f"the mailbox file {self.path} is no SQLite database; name another file") from None
        except BaseException:
            _close(connection)
            raise

    def _check(self, connection: apsw.Connection) -> int:
        """Return the schema version of the file, 0 for an empty one; refuses what is not ours, or newer than we are.

        The three questions are one transaction: in between, another process could make its tables in an empty file. An error
        closes the connection, so it does not matter whether that is still open.
        """
        version: int
        (version,), (application,), (tables,) = _execute_once(connection, sql.WHOSE)
        if application != sql.APPLICATION_ID and (version or tables):
            raise ConfigError(f"{self.path} is the database of another program; name another file for the mailbox")
        if version > sql.SCHEMA_VERSION:
            raise ConfigError(
                f"the mailbox file {self.path} was written by a newer Mainspring (schema {version}, this one knows"
                f" {sql.SCHEMA_VERSION}); upgrade mainspring here, or name another file"
            )
        return version

    def _prepare(self, connection: apsw.Connection, version: int) -> None:
        """Make the tables where there are none, or bring them up to date, and end the leases of an earlier boot."""
        boot = clock.boot_id()
        if version == sql.SCHEMA_VERSION and _execute_once(connection, sql.BOOT) == [(boot,)]:
            return
        connection.execute("BEGIN IMMEDIATE")
        try:
            version = self._check(connection)
            if not version:
                connection.execute(sql.SCHEMA)
                connection.execute(sql.START, (boot, random.token(FILE_ID_BITS)))
                version = sql.SCHEMA_VERSION
            for old in range(version, sql.SCHEMA_VERSION):
                connection.execute(sql.MIGRATIONS[old])
                connection.execute(sql.SET_VERSION.format(old + 1))
            if connection.execute(sql.BOOT).fetchall() != [(boot,)]:
                connection.execute(sql.VOID_LEASES)
                connection.execute(sql.NEW_BOOT, (boot,))
            connection.execute("COMMIT")
        except BaseException:
            _roll_back(connection)
            raise

    def _busy(self, tries: int) -> bool:
        now = clock.monotonic()
        if tries == 0:
            self._waited_since = now
        _NEVER.wait(0.0005 if tries < 20 else 0.002)
        return now - self._waited_since < self.busy_timeout

    def _committed(self, connection: apsw.Connection, database: str, pages: int) -> int:
        self._log_pages = pages
        return apsw.SQLITE_OK


def _inode(path: str) -> Inode | None:
    """Return device and inode of a file, None if there is none."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _is_out_of_descriptors() -> bool:
    """True if this process cannot open as many files as a connection needs."""
    with contextlib.ExitStack() as stack:
        try:
            for _ in range(DESCRIPTORS):
                stack.enter_context(open_directory("/"))
        except OSError as error:
            return error.errno in {errno.EMFILE, errno.ENFILE}
    return False


def _close(connection: apsw.Connection) -> None:
    with contextlib.suppress(apsw.Error):
        connection.close()


def _roll_back(connection: apsw.Connection) -> None:
    if connection.in_transaction:
        with contextlib.suppress(apsw.Error):
            connection.execute("ROLLBACK")


def _execute_once(connection: apsw.Connection, statements: str) -> list[tuple[Any, ...]]:
    """Return the rows of statements that are executed when the file is opened; the connection does not keep them."""
    return connection.execute(statements, can_cache=False).fetchall()


def _make(path: str, first: Sequence[Open]) -> None:
    """Make a mailbox file that is whole from its first moment on; until then it has no name, and ends with this process.

    What prevents that, SQLite will tell; on a file system that has no files without a name, it makes the file.
    """
    names = tuple(command.name for command in first if not command.name.startswith(TRANSIENT))
    with contextlib.suppress(OSError), open_directory(os.path.dirname(path)) as folder:
        nameless = os.open(".", os.O_WRONLY | os.O_TMPFILE | os.O_CLOEXEC, 0o644, dir_fd=folder)
        with open(nameless, "wb") as file:
            file.write(_new_file(names, clock.boot_id()).replace(NO_FILE_ID, random.token(FILE_ID_BITS).encode(), 1))
            file.flush()
            os.fsync(nameless)
            # unless another process has made one meanwhile
            os.link(f"/proc/self/fd/{nameless}", path, dst_dir_fd=folder, follow_symlinks=True)


@lru_cache(maxsize=1)
def _new_file(names: tuple[str, ...], boot_id: str) -> bytes:
    """Return what is in a mailbox file that was just made, and has mailboxes of these names, but :data:`NO_FILE_ID`.

    To have SQLite make each would take several waits for the disk.
    """
    with contextlib.closing(apsw.Connection(":memory:")) as connection:
        connection.deserialize("main", _tables())
        connection.execute(sql.START, (boot_id, NO_FILE_ID.decode()))
        perform(connection, list(map(Open, names)), 0.0, 0.0, KnownLimits())
        content = bytearray(connection.serialize("main"))
    content[18:20] = b"\2\2"  # of the header: it has a write-ahead log
    return bytes(content)


@lru_cache(maxsize=1)
def _tables() -> bytes:
    with contextlib.closing(apsw.Connection(":memory:")) as connection:
        connection.execute(sql.SCHEMA)
        return connection.serialize("main")


def check_sqlite(version: str) -> None:
    """Raise :class:`ConfigError` for a SQLite that can damage a file which several processes use."""
    if tuple(int(part) for part in version.split(".")) < OLDEST_SQLITE:
        oldest = ".".join(str(part) for part in OLDEST_SQLITE)
        raise ConfigError(
            f"apsw was built with SQLite {version}, which can damage files that several processes use; install one with"
            f" SQLite {oldest} or newer: pip install --upgrade apsw"
        )


def _one_by_one(
    connection: apsw.Connection, commands: Sequence[Command], boot: float, wall: float, known: KnownLimits
) -> UnitOfWork:
    """Do each command by itself, so that only the failing command fails.

    What one has changed the next one reads, and none of it is ``known`` before it is committed.
    """
    whole = perform(connection, (), boot, wall, known)
    for command in commands:
        connection.execute("SAVEPOINT one")
        try:
            work = perform(connection, (command,), boot, wall, KnownLimits())
        except tuple(_TROUBLE):
            raise
        except Exception as error:  # whatever it is, it is this command's
            connection.execute("ROLLBACK TO one")
            command.error = error
            if not isinstance(error, MainspringError):
                command.error = MailboxError(f"the store cannot do this: {type(error).__name__}: {error}")
                command.error.__cause__ = error
        else:
            whole.add(work)
        connection.execute("RELEASE one")
    return whole
