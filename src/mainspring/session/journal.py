"""``Journal``: where a session's entries are kept; and from what users name to the journal that it means."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from mainspring.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


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
