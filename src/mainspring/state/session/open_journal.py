"""``open_journal``: from what users write to the journal that it means."""

from __future__ import annotations

import os
from urllib.parse import unquote, urlsplit

from mainspring.errors import ConfigError
from mainspring.state.session.journal import Journal


def open_journal(given: str | os.PathLike[str] | Journal) -> Journal:
    """The journal that ``given`` means, unopened: itself, ``"sqlite:///file.db"``, or the path of a ``.jsonl`` file.

    :raises ConfigError: it means none.
    """
    if isinstance(given, Journal):
        return given
    text = os.fspath(given) if isinstance(given, str | os.PathLike) else given
    if isinstance(text, str) and "\0" in unquote(text):
        raise ConfigError(f"{text!r} is no journal: a path has no NUL character")
    if isinstance(text, str) and text.startswith("sqlite://"):
        parts = urlsplit(text)
        path = unquote(parts.path)[1:]
        if parts.netloc or not path or parts.query:
            raise ConfigError(f"{text!r}: a SQLite journal is sqlite:///relative.db or sqlite:////absolute/path.db")
        from mainspring.state.session.journal_sqlite import SQLiteJournal

        return SQLiteJournal(path)
    if isinstance(text, str) and "://" not in text and text.endswith(".jsonl"):
        from mainspring.state.session.journal_file import FileJournal

        return FileJournal(text)
    raise ConfigError(f"{given!r} is no journal: write 'sqlite:///session.db' or 'session.jsonl', or give a Journal")
