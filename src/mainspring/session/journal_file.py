"""A journal in a file of JSON lines: an entry a line, appended and synced to the disk."""

from __future__ import annotations

import contextlib
import fcntl
import os
from typing import TYPE_CHECKING

from mainspring.errors import ConfigError, JournalDamagedError, JournalError, JournalLockedError
from mainspring.session.journal import Journal

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class FileJournal(Journal):
    """A ``.jsonl`` file. Appending writes the lines at once and waits for the disk (``fdatasync``).

    A line without its end is what a killed process had not finished writing, and so nobody was told of: opening cuts it off.
    The lock on the file goes with the process.

    :param path: made where there is none; its directory must exist.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.path.abspath(os.fspath(path))
        self.name = f"the journal {self.path}"
        self._file = -1
        self._size = 0
        self._broken = ""

    def open(self) -> None:
        """See :meth:`Journal.open`."""
        directory = os.path.dirname(self.path)
        if not os.path.isdir(directory):
            raise ConfigError(f"{self.name} has no directory: make {directory} first")
        try:
            self._file = self._locked(os.O_RDWR | os.O_CREAT)
            self._broken = ""
            self._size = self._cut()
            os.fsync(self._file)
            _sync_directory(directory)
        except OSError as error:
            self.close()
            raise JournalError(f"{self.name} cannot be opened: {error.strerror or error}") from error
        except BaseException:
            self.close()
            raise

    def _locked(self, flags: int) -> int:
        """The file, locked: that which has the name once the lock is held."""
        while True:
            file = os.open(self.path, flags | os.O_CLOEXEC, 0o666)
            try:
                _lock(file, self.name)
                with contextlib.suppress(FileNotFoundError):
                    if os.path.samestat(os.stat(self.path), os.fstat(file)):
                        return file
            except BaseException:
                os.close(file)
                raise
            os.close(file)  # it was rewritten meanwhile

    def _cut(self) -> int:
        """Cut off an unfinished line; the size of what remains."""
        end = size = os.fstat(self._file).st_size
        while end > 0:
            start = max(0, end - 65_536)
            found = os.pread(self._file, end - start, start).rfind(b"\n")
            if found >= 0:
                end = start + found + 1
                break
            end = start
        if end < size:
            os.ftruncate(self._file, end)
        return end

    def entries(self) -> Iterator[bytes]:
        """See :meth:`Journal.entries`."""
        with open(self.path, "rb") as lines:
            try:
                for number, line in enumerate(lines, 1):
                    if not line.endswith(b"\n"):  # opening has cut such a one off
                        raise JournalDamagedError(f"{self.name}: line {number} has no end; who else writes to it?")
                    yield line[:-1]
            except OSError as error:
                raise JournalError(f"{self.name} cannot be read: {error.strerror or error}") from error

    def append(self, entries: Sequence[bytes]) -> None:
        """See :meth:`Journal.append`."""
        if self._broken:
            raise JournalError(f"{self.name}: {self._broken}; open the session anew")
        data = b"".join([part for entry in entries for part in (entry, b"\n")])
        try:
            _write(self._file, data, self._size)
        except OSError as error:
            self._take_back()
            raise JournalError(f"{self.name} cannot be written: {error.strerror or error}") from error
        try:
            os.fdatasync(self._file)
        except OSError as error:  # what of it is on the disk cannot be known any more, nor by trying again
            self._broken = f"the disk did not confirm what was written ({error.strerror or error})"
            raise JournalError(f"{self.name}: {self._broken}; open the session anew") from error
        self._size += len(data)

    def _take_back(self) -> None:
        """Remove what a failed write has left."""
        try:
            os.ftruncate(self._file, self._size)
            os.fdatasync(self._file)
        except OSError as error:
            self._broken = f"a failed write could not be taken back ({error.strerror or error})"

    def rewrite(self, entries: Sequence[bytes]) -> None:
        """See :meth:`Journal.rewrite`: a new file takes the name of the old one once it is on the disk."""
        data = b"".join([part for entry in entries for part in (entry, b"\n")])
        new_path = f"{self.path}.new"
        file = -1
        try:
            file = os.open(new_path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
            _lock(file, self.name)  # before it has the name, so that nobody can come between
            os.fchmod(file, os.fstat(self._file).st_mode & 0o777)
            _write(file, data, 0)
            os.fsync(file)
            os.replace(new_path, self.path)
            _sync_directory(os.path.dirname(self.path))
        except OSError as error:
            if file >= 0:
                os.close(file)
            raise JournalError(f"{self.name} cannot be rewritten: {error.strerror or error}") from error
        os.close(self._file)
        self._file, self._size, self._broken = file, len(data), ""

    def close(self) -> None:
        """See :meth:`Journal.close`."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)


def _lock(file: int, name: str) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise JournalLockedError(f"{name} is open in another session; it has one writer at a time") from None


def _write(file: int, data: bytes, at: int) -> None:
    left = memoryview(data)
    while left:
        written = os.pwrite(file, left, at)
        left, at = left[written:], at + written


def _sync_directory(path: str) -> None:
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
