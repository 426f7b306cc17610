"""What ends messages of a SQLite mailbox from outside: a cancellation by id, and the end of a transient mailbox."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mainspring.mailbox.codec import headers_of
from mainspring.mailbox.message import UNKNOWN, Cancelled, CancelOutcome
from mainspring.mailbox.sqlite import commands as do
from mainspring.mailbox.sqlite import schema as sql

if TYPE_CHECKING:
    from mainspring.mailbox.sqlite.unit_of_work import Work


def cancel(work: Work, commands: list[do.Cancel]) -> None:
    """End messages wherever they are; who has one in hand will be told."""
    for command in commands:
        command.result = UNKNOWN
        for row in work.rows(sql.BY_ID, (command.message_id, command.mailbox)):
            command.result = _end(work, command, *row)
            break


def _end(
    work: Work,
    command: do.Cancel,
    seq: int,
    rank: int,
    reply_to: str | None,
    headers: str | None,
    expires: float | None,
) -> Cancelled:
    mailbox = command.mailbox
    outcome = CancelOutcome.REMOVED
    tally = work.tally(mailbox)
    leases = work.rows(sql.LEASE_OF, (mailbox, seq))
    if leases:
        outcome = CancelOutcome.CANCELLED
        work.execute(sql.DROP_LEASE, leases[0])
        tally.in_flight -= 1
        work.cancelled.append((mailbox, command.message_id))
    else:
        if expires is not None:
            work.execute(sql.NOT_EXPIRING, (expires, seq))
        work.execute(sql.FORGET_DELAYED_SEQ, (seq,))
        if work.changes():
            tally.delayed -= 1
        else:
            _leave_ready(work, mailbox, rank, seq)
            tally.pending -= 1
    work.execute(sql.DROP_MESSAGE, (seq,))
    tally.settled += 1
    return Cancelled(outcome, reply_to, {} if headers is None else headers_of(headers) or {})


def _leave_ready(work: Work, mailbox: int, rank: int, seq: int) -> None:
    """Its place has its own number, unless it came back once: then it is behind that."""
    for statement in (sql.FORGET_READY, sql.FORGET_READY_FROM):
        place = (mailbox, rank, seq) if statement == sql.FORGET_READY else (mailbox, rank, seq, seq)
        work.execute(statement, place)
        if work.changes():
            return


def drop(work: Work, commands: list[do.Drop]) -> None:
    """Forget mailboxes."""
    for command in commands:
        forget_mailbox(work, command.mailbox)


def forget_mailbox(work: Work, mailbox: int) -> None:
    """Drop a mailbox and everything in it, its counts too."""
    for statement in (*sql.PURGE, sql.DROP_DEAD, sql.DROP_MAILBOX):
        work.execute(statement, (mailbox,))
