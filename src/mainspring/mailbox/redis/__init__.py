"""Mailboxes on a Redis or Valkey server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mainspring.mailbox.redis.mailbox import RedisMailbox as RedisMailbox

__all__ = ["RedisMailbox"]


def __getattr__(name: str) -> Any:
    """Import the mailbox at first use: what else is in this package needs no driver, and takes less time."""
    if name != "RedisMailbox":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from mainspring.mailbox.redis.mailbox import RedisMailbox

    return RedisMailbox
