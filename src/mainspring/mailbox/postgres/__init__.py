"""Mailboxes in a PostgreSQL database."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mainspring.mailbox.postgres.mailbox import PostgresMailbox as PostgresMailbox

__all__ = ["PostgresMailbox"]


def __getattr__(name: str) -> Any:
    """Import the mailbox at first use: what else is in this package needs no driver, and takes less time."""
    if name != "PostgresMailbox":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from mainspring.mailbox.postgres.mailbox import PostgresMailbox

    return PostgresMailbox
