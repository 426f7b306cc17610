"""Mailboxes in a PostgreSQL database.

Where things are. A message is one row of the table ``messages`` from its send to its end, and the functions of the schema
(``sql/``, made by :mod:`schema`) do everything to it. A call of :class:`PostgresBackend` becomes a command. A batcher takes
what is queued as one batch: :mod:`commands` turns it into statements, each a call of one function, and their rows into
results. A :class:`ConnectionPool` executes the statements in one transaction and one round trip. All mailboxes of a process
on one database share a :class:`SharedPool`: the connections, one of which listens (:class:`PostgresListener`) and two of which
work unless calls are held up (:class:`ConnectionLimiter`), and the polls
(:class:`Polls`). So a mailbox of its own has one task, and more only once it sends.

States. A message is pending (state 0), delayed (1) or in flight (2); settled ones have no row, dead letters are in ``dead``.
A pending message of a task may have to wait at a limiter first (3, 4), and is let in later (5): ``sql/limits.sql`` says how.
A lease is the number in the row and its end; a receipt handle is the id and that number. A lease is held while both match
and the end is in the future. A record is a row of ``records``, beside all that; its version is a number of the sequence that
gives messages their places.

Invariants.

- All instants are the server's. No worker's clock decides anything.
- Each change of a message and the change of the counts (``tallies``) are one transaction.
- A batcher has one batch in flight. So a claim that was made after a settlement is executed after it.
- A batch waits for no lock for long: other transactions can only hold a row of a handler's transaction, or a dedup key.
  Those calls travel apart (:class:`HandlerTransactions`, :class:`DedupSends`).
- Notifications only make receives quicker. Polls are made for waiting receives, so that a lost one costs seconds, and no
  message.
- A result is in the transaction of its acknowledgement. It is announced only while a process has noted that it waits for one
  (``results_until``), as a notification makes commits wait for one another. What came before that note it may have missed.
- A receive that waits long enough for a poll asks nothing itself while its mailbox is known to be empty: by a poll of the last
  two intervals, with no notification since. Nor does it before the first poll, if other mailboxes opened together with its own.
- A watermark only saves reads. Each second a claim does without it.

Cancelled, a caller leaves at once. Its batch goes on; a claim of its own is undone by the first command of the next batch
(``batched.Batcher.call``, ``BatchedBackend.undo``). A call that travels alone, as a lone send does, is cancelled on the server,
and where that takes too long, its connection is closed.

On a lost connection everything in the batch raises :class:`MailboxConnectionError`, and may have taken effect. All idle
connections are closed, since they are lost as well; the next batch makes a new one. A statement that the server refuses or
gives up has had no effect, and its connection is used again.
"""

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
