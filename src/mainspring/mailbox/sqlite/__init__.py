"""Mailboxes in a SQLite file that the processes of one machine share.

What the mailboxes of a process have open on one file is shared (:mod:`~mainspring.mailbox.sqlite.shared_file`). Few threads
serve all files of a process (:mod:`~mainspring.mailbox.sqlite.threads`), each file by one at a time. Commands of all callers
that wait on a file are done in one transaction (:mod:`~mainspring.mailbox.sqlite.store` on a ``UnitOfWork``). After its COMMIT
the thread wakes the receives of this process, and notifies other processes through sockets beside the file. A notification
can be lost: so each second a file on which receives wait is looked at, and looked into if it has changed.

Of many files, the ones used last have a connection. Another one rests: it is opened when there is something to do, and
a claim is answered without that while nothing was written since it was last looked into.

Cancelled, a caller leaves at once, and the writer thread does its job to the end. The batcher waits for that, and undoes a
claim that no caller has received.

Records are rows beside the messages, and results are written in the transaction of their acknowledgements. Other processes are
told of them as of cancelled messages.

Limits, the permits that are out and the messages that wait for permits are rows. They change in the transaction of the call
that changes them (:mod:`~mainspring.mailbox.sqlite.limits`). Receives also wake at the instant at which a rate opens.

Leases end by the clock since boot, and with the boot: a changed date does not touch them. Delays, expiries and what rates have
spent are dates.
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
