"""Mailboxes in a SQLite file that the processes of one machine share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mainspring.mailbox.sqlite.mailbox import SQLiteMailbox as SQLiteMailbox

__all__ = ["SQLiteMailbox"]


def __getattr__(name: str) -> Any:
    """Import the mailbox at first use: what else is in this package needs no driver, and takes less time."""
    if name != "SQLiteMailbox":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from mainspring.mailbox.sqlite.mailbox import SQLiteMailbox

    return SQLiteMailbox
