"""``Journal``: where a session's entries are kept; and from what users name to the journal that it means."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

import anyio
from anyio import to_thread

from mainspring.clock import real_work
from mainspring.errors import ConfigError, JournalError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from anyio import CapacityLimiter

WRITE_TIMEOUT = 30.0
"""Seconds that a journal may take for one write."""


class Journal(ABC):
    """Keeps entries (bytes without a line break) in order, for one writer at a time.

    The session calls the methods in worker threads, one at a time, so they may block; each opens with :meth:`open`, and none
    is called after :meth:`close` but ``open``.
    """

    name: str
    """What it is called in errors."""

    @abstractmethod
    def open(self) -> None:
        """Take hold of it, and make it where there is none.

        :raises JournalLockedError: another writer has it.
        :raises JournalError: it cannot be opened.
        """

    @abstractmethod
    def entries(self) -> Iterator[bytes]:
        """All entries, oldest first.

        :raises JournalDamagedError: it holds what was never written to it.
        """

    @abstractmethod
    def append(self, entries: Sequence[bytes]) -> None:
        """Add entries. Returns once all of them are durable.

        :raises JournalError: none of them is kept, as far as is known.
        """

    @abstractmethod
    def rewrite(self, entries: Sequence[bytes]) -> None:
        """Replace all entries by these, at once or not at all.

        :raises JournalError: it is as it was.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of it."""


class Appender:
    """Appends to an opened journal, each time with an end. One that is given up may still write: none comes after it."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._unusable = ""
        self.is_writing = False
        """Whether a write is under way, given up or not, so that nothing else may be asked of the journal."""

    async def append(self, entries: Sequence[bytes], limiter: CapacityLimiter) -> None:
        """:meth:`Journal.append` in a worker thread; cancelled, it leaves the thread to itself.

        :raises JournalError: as there; or it has taken longer than :data:`WRITE_TIMEOUT`, now or before.
        """
        self.check()
        self.is_writing = True
        with real_work(), anyio.move_on_after(WRITE_TIMEOUT):
            await to_thread.run_sync(self._append, entries, abandon_on_cancel=True, limiter=limiter)
            return
        self._unusable = (
            f"{self._journal.name} has not answered within {WRITE_TIMEOUT:g} s, and may still write;"
            " open the session anew"
        )
        self.check()

    def _append(self, entries: Sequence[bytes]) -> None:
        try:
            self._journal.append(entries)
        finally:
            self.is_writing = False

    def check(self) -> None:
        """Raise :class:`JournalError` once a write was given up."""
        if self._unusable:
            raise JournalError(self._unusable)


def open_journal(given: str | os.PathLike[str] | Journal) -> Journal:
    """The journal that ``given`` means, unopened: itself, ``"sqlite:///file.db"``, or the path of a ``.jsonl`` file.

    :raises ConfigError: it means none.
    """
    if isinstance(given, Journal):
        return given
    text = os.fspath(given) if isinstance(given, str | os.PathLike) else given
    if isinstance(text, str) and text.startswith("sqlite://"):
        parts = urlsplit(text)
        path = unquote(parts.path)[1:]
        if parts.netloc or not path or parts.query:
            raise ConfigError(f"{text!r}: a SQLite journal is sqlite:///relative.db or sqlite:////absolute/path.db")
        from mainspring.session.journal_sqlite import SQLiteJournal

        return SQLiteJournal(path)
    if isinstance(text, str) and "://" not in text and text.endswith(".jsonl"):
        from mainspring.session.journal_file import FileJournal

        return FileJournal(text)
    raise ConfigError(f"{given!r} is no journal: write 'sqlite:///session.db' or 'session.jsonl', or give a Journal")
