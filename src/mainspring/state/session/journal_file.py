"""A journal in a file of JSON lines: an entry a line, appended and synced to the disk."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from typing import TYPE_CHECKING, NoReturn

from mainspring.core.directory import open_directory
from mainspring.core.loggers import Logger
from mainspring.errors import ConfigError, JournalDamagedError, JournalError
from mainspring.state.session.journal import Journal, check_directory, free_name, is_at, locked
from mainspring.state.session.records import REMEDY, SEAL_LENGTH, is_journal, is_sealed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


_log = Logger("mainspring")


class FileJournal(Journal):
    """A ``.jsonl`` file, for a session's entries. Appending writes the lines at once and waits for the disk (``fdatasync``).

    A line without its end is what a killed process had not finished writing. No caller was told that it was kept, so opening
    cuts it off and logs that. One that holds a whole entry, as where its last byte was changed, gets its end back, which is
    logged too.
    The lock on the file goes with the process, and with those that were forked from it.

    :param path: made where there is none; its directory must exist. Where it is a symbolic link, the file that it leads to
        at the opening is the journal.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.path.abspath(os.fspath(path))
        self.name = f"the journal {self.path}"
        self._real_path = self.path
        self._file = -1
        self._pid = 0
        self._size = 0
        self._broken = ""

    def open(self) -> None:
        """See :meth:`Journal.open`."""
        if self._file >= 0 and os.getpid() == self._pid:
            raise locked(self.name)
        self.close()  # what a forked child has of its parent's
        self._real_path, self._pid = os.path.realpath(self.path), os.getpid()
        directory = check_directory(self.name, self._real_path)
        try:
            self._file = self._locked(os.O_RDWR | os.O_CREAT)
            self._broken = ""
            self._size = self._mend()
            os.fsync(self._file)
            with open_directory(directory) as opened:
                os.fsync(opened)
        except OSError as error:
            self.close()
            raise JournalError(f"{self.name} cannot be opened: {error.strerror or error}") from error
        except BaseException:
            self.close()
            raise

    def _locked(self, flags: int) -> int:
        """Return the file, locked: that which has the name once the lock is held."""
        while True:
            file = os.open(self._real_path, flags | os.O_CLOEXEC, 0o666)
            try:
                _lock(file, self.name)
                if is_at(self._real_path, os.fstat(file)):
                    return file
            except BaseException:
                os.close(file)
                raise
            os.close(file)  # it was rewritten meanwhile

    def _mend(self) -> int:
        """Cut off an unfinished line, or give it its end if only that is missing. Return the size of what there is then.

        :raises ConfigError: the file is no journal, and stays as it is.
        """
        end = size = os.fstat(self._file).st_size
        while end > 0:
            start = max(0, end - 65_536)
            found = os.pread(self._file, end - start, start).rfind(b"\n")
            if found >= 0:
                end = start + found + 1
                break
            end = start
        last = os.pread(self._file, SEAL_LENGTH, end - 1 - SEAL_LENGTH) if end > SEAL_LENGTH else b""
        if size and not is_journal(os.pread(self._file, 64, 0), last):
            raise ConfigError(f"{self.path} is the file of another program; name another file for the journal")
        return end if end == size else self._mend_tail(end, size)

    def _mend_tail(self, begin: int, size: int) -> int:
        tail = os.pread(self._file, size - begin, begin)
        whole = next((length for length in (len(tail), len(tail) - 1) if is_sealed(tail[:length])), None)
        if whole is None:
            os.ftruncate(self._file, begin)
            _log.warning(
                "%s: cut off an entry that was not written to its end (%d bytes at %d), as by a crash: its dispatch had not"
                " returned, unless the file was changed",
                self.name, len(tail), begin,
            )  # fmt: skip
            return begin
        _write(self._file, b"\n", begin + whole)
        _log.warning("%s: its last line had no end, but a whole entry, which is kept", self.name)
        return begin + whole + 1

    def entries(self) -> Iterator[bytes]:
        """See :meth:`Journal.entries`."""
        with open(self._real_path, "rb") as lines:
            try:
                for number, line in enumerate(lines, 1):
                    if not line.endswith(b"\n"):  # opening has cut such a one off
                        raise JournalDamagedError(f"{self.name}: line {number} has no end; {REMEDY}")
                    yield line[:-1]
            except OSError as error:
                raise JournalError(f"{self.name} cannot be read: {error.strerror or error}") from error

    def append(self, entries: Sequence[bytes]) -> None:
        """See :meth:`Journal.append`."""
        if self._broken:
            self._break(self._broken)
        data = _lines(entries)
        try:
            _write(self._file, data, self._size)
        except OSError as error:
            self._take_back()
            raise JournalError(f"{self.name} cannot be written: {error.strerror or error}") from error
        try:
            os.fdatasync(self._file)
        except OSError as error:  # what of it is on the disk cannot be known any more, nor by trying again
            self._break(f"the disk did not confirm what was written ({error.strerror or error})", error)
        self._check_there()
        self._size += len(data)

    def _break(self, why: str, cause: BaseException | None = None) -> NoReturn:
        """Refuse all writing from now on."""
        self._broken = why
        raise JournalError(f"{self.name}: {why}; open the session anew") from cause

    def _check_there(self) -> None:
        if not is_at(self._real_path, os.fstat(self._file)):
            self._break("its file was removed or renamed")

    def _take_back(self) -> None:
        """Remove what a failed write has left."""
        try:
            os.ftruncate(self._file, self._size)
            os.fdatasync(self._file)
        except OSError as error:
            self._broken = f"a failed write could not be taken back ({error.strerror or error})"

    def rewrite(self, entries: Sequence[bytes]) -> None:
        """See :meth:`Journal.rewrite`: a new file takes the name of the old one once it is on the disk."""
        data = _lines(entries)
        new_path = f"{self._real_path}.new"
        try:
            # Whatever needs a descriptor comes first: after the step that counts, there shall be little left that can fail.
            with open_directory(os.path.dirname(self._real_path)) as directory:
                self._check_there()
                file = self._written(new_path, data)
                try:
                    os.replace(new_path, self._real_path)
                except BaseException:
                    _release(file)
                    _remove(new_path)
                    raise
                old, self._file, self._size, self._broken = self._file, file, len(data), ""
                _release(old)
                self._confirm(directory)
        except OSError as error:
            raise JournalError(f"{self.name} cannot be rewritten: {error.strerror or error}") from error

    def cut(self, entries: Sequence[bytes]) -> str:
        """See :meth:`Journal.cut`: the file as it was gets another name."""
        aside = free_name(self._real_path)
        try:
            try:
                os.link(self._real_path, aside)
            except OSError:  # a file system without links
                shutil.copyfile(self._real_path, aside)
        except OSError as error:
            raise JournalError(f"{self.name} cannot be put aside as {aside}: {error.strerror or error}") from error
        self.rewrite(entries)
        return aside

    def _confirm(self, directory: int) -> None:
        """Wait until the disk has the new name: without that, a crash could bring back the old file without what comes now."""
        try:
            os.fsync(directory)
        except OSError as error:
            self._break(f"the disk did not confirm that it was rewritten ({error.strerror or error})", error)

    def _written(self, path: str, data: bytes) -> int:
        """Write a new file to the disk and lock it before it gets its name, so that no other process opens it first."""
        _remove(path)  # what a killed process has left
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            _lock(file, self.name)
            os.fchmod(file, os.fstat(self._file).st_mode & 0o777)
            _write(file, data, 0)
            os.fsync(file)
        except BaseException:
            _release(file)
            _remove(path)
            raise
        return file

    def close(self) -> None:
        """See :meth:`Journal.close`."""
        file, self._file = self._file, -1
        if file < 0:
            return
        if os.getpid() == self._pid:
            _release(file)
        else:  # forked: the lock is the parent's, which goes on
            os.close(file)


def _release(file: int) -> None:
    """Close it, and unlock it first: a process that was forked meanwhile has it open too, and would keep the lock."""
    with contextlib.suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_UN)
    with contextlib.suppress(OSError):  # what was to be on the disk is there
        os.close(file)


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


def _lock(file: int, name: str) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise locked(name) from None


def _lines(entries: Sequence[bytes]) -> bytes:
    return b"".join([part for entry in entries for part in (entry, b"\n")])


def _write(file: int, data: bytes, at: int) -> None:
    left = memoryview(data)
    while left:
        written = os.pwrite(file, left, at)
        left, at = left[written:], at + written
