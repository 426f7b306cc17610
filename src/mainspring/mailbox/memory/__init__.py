"""The mailbox in memory: one process, one event loop, with the semantics of the durable ones.

:mod:`~mainspring.mailbox.memory.queue` decides, with plain data and synchronous calls.
:mod:`~mainspring.mailbox.memory.mailbox` performs: an anyio memory object stream wakes waiting receives, and a reaper
task sleeps until the earliest instant at which a delay, a lease or an expiry is due. Without a reaper, as the mailbox
works unopened, a waiting receive watches the time itself.
"""

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
