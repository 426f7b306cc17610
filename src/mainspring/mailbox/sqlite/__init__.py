"""Mailboxes in a SQLite file that the processes of one machine share.

Each process has one writer thread a file (:mod:`~mainspring.mailbox.sqlite.writer`), whatever number of mailboxes it
has open on it. Commands of all callers that are waiting are done in one transaction
(:mod:`~mainspring.mailbox.sqlite.store` on a ``UnitOfWork``). After its COMMIT the thread wakes the receives of this
process, and notifies other processes through sockets beside the file. A notification can be lost: so
receives that wait look at the file once a second.

Cancelled, a caller leaves at once, and the writer thread does its job to the end. The batcher waits for that, and undoes a
claim that no caller has received.

Leases end by the clock since boot, and with the boot: a changed date does not touch them. Delays and expiries are
dates.
"""

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
