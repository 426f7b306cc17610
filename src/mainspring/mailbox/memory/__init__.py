"""The mailbox in memory: one process, one event loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mainspring.mailbox.memory.mailbox import InMemoryMailbox as InMemoryMailbox

__all__ = ["InMemoryMailbox"]


def __getattr__(name: str) -> Any:
    """Import the mailbox at first use: what else is in this package needs no driver, and takes less time."""
    if name != "InMemoryMailbox":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from mainspring.mailbox.memory.mailbox import InMemoryMailbox

    return InMemoryMailbox
