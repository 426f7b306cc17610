"""Mailboxes on a NATS server with JetStream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mainspring.mailbox.nats.mailbox import NatsMailbox as NatsMailbox

__all__ = ["NatsMailbox"]


def __getattr__(name: str) -> Any:
    """Import the mailbox at first use: what else is in this package needs no driver, and takes less time."""
    if name != "NatsMailbox":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from mainspring.mailbox.nats.mailbox import NatsMailbox

    return NatsMailbox
