"""A journal in a SQLite file: an entry a row, appended in one transaction."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

import apsw

from mainspring.core import process
from mainspring.errors import ConfigError, JournalDamagedError, JournalError
from mainspring.mailbox.sqlite.connection import check_sqlite
from mainspring.state.session.journal import Journal, check_directory, free_name, is_at, locked
from mainspring.state.session.records import REMEDY

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

KIND = "sqlite journal"
APPLICATION_ID = 0x4D53_504A  # "MSPJ"
SCHEMA_VERSION = 1
SCHEMA = "CREATE TABLE entries (place INTEGER PRIMARY KEY, entry BLOB NOT NULL) STRICT"
ROWS_AT_ONCE = 1_000


class SQLiteJournal(Journal):
    """A SQLite file of its own (a mailbox needs another one). Appending commits with ``synchronous=FULL``.

    The file is locked for others while it is open; the lock goes with the process. One that was forked meanwhile cannot open
    that file at all: SQLite takes the parent's locks for its own there.

    :param path: made where there is none; its directory must exist.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.path.abspath(os.fspath(path))
        self.name = f"the journal {self.path}"
        self._connection: apsw.Connection | None = None
        self._kept: _Kept | None = None
        self._pid = 0
        self._real_path = self.path
        self._stat: os.stat_result | None = None

    def open(self) -> None:
        """See :meth:`Journal.open`."""
        check_sqlite(apsw.sqlite_lib_version())
        check_directory(self.name, self.path)
        kept = self._claim()
        try:
            self._connection = connection = apsw.Connection(self.path)
            kept.connections.append(connection)
            # Also at the end of a forked child, which would take the parent's log for one that it may remove.
            connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
            # Before the first read: then the log needs no shared memory, and a second opening is refused.
            connection.execute("PRAGMA locking_mode = EXCLUSIVE").fetchall()
            connection.execute("PRAGMA mmap_size = 0").fetchall()
            self._check(connection)
            connection.execute("PRAGMA journal_mode = WAL").fetchall()
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("BEGIN IMMEDIATE")
            if not self._check(connection):
                _make(connection)
            connection.execute("COMMIT")
            self._real_path = os.path.realpath(self.path)
            self._stat = os.stat(self._real_path)
        except apsw.NotADBError:
            self.close()
            raise ConfigError(f"{self.name} is no SQLite database; name another file") from None
        except apsw.Error as error:
            self.close()
            raise self._explained(error) from error
        except OSError as error:
            self.close()
            raise JournalError(f"{self.name} cannot be opened: {error.strerror or error}") from error
        except BaseException:
            self.close()
            raise

    def _claim(self) -> _Kept:
        """Note for forked children that this process has the file open."""
        path = os.path.realpath(self.path)
        before = process.inherited(KIND, path)
        if isinstance(before, _Kept) and before.connections:
            raise ConfigError(
                f"{self.name} was open when this process was forked from the one that has it; SQLite cannot open it again here:"
                " open it in a process that was started by subprocess or the spawn method"
            )
        if self._connection is not None:
            raise locked(self.name)
        self._kept, self._pid = process.shared(KIND, path, _Kept), os.getpid()
        return self._kept

    def _check(self, connection: apsw.Connection) -> int:
        """Return the schema version of the file, 0 for an empty one. Refuse another program's file, and a newer version."""
        version: int = connection.pragma("user_version")
        ours = connection.pragma("application_id") == APPLICATION_ID
        if not ours and (version or connection.execute("SELECT count(*) FROM sqlite_schema").fetchall() != [(0,)]):
            raise ConfigError(f"{self.path} is the database of another program; name another file for the journal")
        if version > SCHEMA_VERSION:
            raise ConfigError(
                f"{self.name} was written by a newer Mainspring (schema {version}, this one knows {SCHEMA_VERSION}); upgrade"
                " mainspring here, or name another file"
            )
        return version

    def entries(self) -> Iterator[bytes]:
        """See :meth:`Journal.entries`."""
        place = 0
        while True:
            found: list[Any] = []
            failed: apsw.Error | None = None
            try:
                found.extend(
                    self._opened().execute(
                        "SELECT place, entry FROM entries WHERE place > ? ORDER BY place LIMIT ?", (place, ROWS_AT_ONCE)
                    )
                )
            except apsw.Error as error:  # after the rows that could be read
                failed = error
            for place, entry in found:  # noqa: B007 - the last one is where the next rows begin
                yield entry
            if failed is not None:
                raise self._explained(failed) from failed
            if not found:
                return

    def append(self, entries: Sequence[bytes]) -> None:
        """See :meth:`Journal.append`."""
        self._transact(entries, "")

    def rewrite(self, entries: Sequence[bytes]) -> None:
        """See :meth:`Journal.rewrite`."""
        self._transact(entries, "DELETE FROM entries")

    def cut(self, entries: Sequence[bytes]) -> str:
        """See :meth:`Journal.cut`: the file is copied as it is, page by page, and then replaced by one with these entries."""
        aside = free_name(self._real_path)
        try:
            self._check_there()
            with contextlib.closing(apsw.Connection(aside)) as copy:
                _copy(self._opened(), copy)
            with contextlib.closing(apsw.Connection(":memory:")) as new:
                new.execute(f"PRAGMA page_size = {self._opened().pragma('page_size')}")
                _make(new)
                new.executemany("INSERT INTO entries (entry) VALUES (?)", ((entry,) for entry in entries))
                _copy(new, self._opened())
        except apsw.Error as error:
            raise JournalError(f"{self.name} cannot be cut, and is also in {aside}: {error}") from error
        return aside

    def _transact(self, entries: Sequence[bytes], before: str) -> None:
        connection = self._opened()
        try:
            connection.execute("BEGIN IMMEDIATE")
            if before:
                connection.execute(before)
            connection.executemany("INSERT INTO entries (entry) VALUES (?)", ((entry,) for entry in entries))
            self._check_there()
            connection.execute("COMMIT")
        except (apsw.Error, JournalError) as error:
            if connection.in_transaction:
                with contextlib.suppress(apsw.Error):
                    connection.execute("ROLLBACK")
            if isinstance(error, JournalError):
                raise
            raise self._explained(error) from error

    def _check_there(self) -> None:
        if self._stat is None or not is_at(self._real_path, self._stat):
            raise JournalError(f"{self.name}: its file was removed or renamed; open the session anew")

    def _opened(self) -> apsw.Connection:
        if self._connection is None:
            raise JournalError(f"{self.name} is not open")
        return self._connection

    def _explained(self, error: apsw.Error) -> JournalError:
        if isinstance(error, apsw.BusyError | apsw.LockedError):
            return locked(self.name)
        if isinstance(error, apsw.CorruptError):
            return JournalDamagedError(f"{self.name} is damaged: {error}; {REMEDY}")
        return JournalError(f"{self.name} cannot be used: {error}")

    def close(self) -> None:
        """See :meth:`Journal.close`."""
        connection, self._connection = self._connection, None
        kept, self._kept = self._kept, None
        if connection is None or kept is None or os.getpid() != self._pid:
            return  # forked: what the parent uses is left alone
        with contextlib.suppress(apsw.Error):
            connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 0)
            connection.close()
        kept.connections.remove(connection)


def _make(connection: apsw.Connection) -> None:
    """Make a new journal in an empty database."""
    connection.execute(SCHEMA)
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def _copy(source: apsw.Connection, target: apsw.Connection) -> None:
    """Replace a database by another one, at once or not at all. It copies pages and reads nothing in them."""
    with target.backup("main", source, "main") as backup:
        while not backup.done:
            backup.step(-1)


class _Kept:
    """The open connections to one file. A forked child keeps them, unused: closing one there would spoil the parent's."""

    def __init__(self) -> None:
        self.connections: list[apsw.Connection] = []
