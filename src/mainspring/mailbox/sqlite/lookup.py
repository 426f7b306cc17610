"""What is done to a message by its id: it is found, cancelled or rescheduled, wherever it is."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from mainspring.mailbox.codec import headers_of
from mainspring.mailbox.message import (
    UNKNOWN,
    Cancelled,
    CancelOutcome,
    ClaimedMessage,
    MessagePlace,
    RescheduleOutcome,
    UnfinishedMessage,
)
from mainspring.mailbox.sqlite import schema as sql
from mainspring.mailbox.sqlite.unit_of_work import UnitOfWork, enqueue

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mainspring.mailbox.batched import Cancel
    from mainspring.mailbox.job_commands import Find, Reschedule


def find(work: UnitOfWork, commands: list[Find]) -> None:
    """Find messages by their ids."""
    for command in commands:
        rows = work.rows(sql.FIND, (json.dumps(command.ids), command.mailbox))
        command.result = [_seen(work, command.mailbox, *row) for row in rows]


def _seen(work: UnitOfWork, mailbox: int, seq: int, rank: int, *row: Any) -> UnfinishedMessage:
    name, body, deliveries, attempts, sent, first, reply_to, headers, checkpoint, history = row
    place, found = _place_of(work, mailbox, rank, seq)
    if place is MessagePlace.IN_FLIGHT:
        _, claimed_at = found
        deliveries, attempts, first = deliveries + 1, attempts + 1, first or claimed_at
    known = {} if headers is None else headers_of(headers) or {}
    message = ClaimedMessage(
        name, body, "", deliveries, attempts, sent, first or 0.0, reply_to, known, checkpoint, None, history
    )
    return UnfinishedMessage(message, place, found[0] if place is MessagePlace.DELAYED else None, -rank)


def _place_of(work: UnitOfWork, mailbox: int, rank: int, seq: int) -> tuple[MessagePlace, Sequence[Any]]:
    """Return where an unfinished message is, with its lease and when that began, or the date on which it is due.

    Only a message that is in flight, or has come back, is looked for among the leases. They are few beside the messages that
    wait, and those made before the message was sent are left out.
    """
    for due in work.rows(sql.DUE_OF, (seq,)):
        return MessagePlace.DELAYED, due
    if work.rows(sql.AT_OWN_PLACE, (mailbox, rank, seq, seq)):
        return MessagePlace.PENDING, ()
    for lease in work.rows(sql.LEASE_OF, (seq, seq)):
        return MessagePlace.IN_FLIGHT, lease
    return MessagePlace.PENDING, ()


def cancel(work: UnitOfWork, commands: list[Cancel]) -> None:
    """End messages wherever they are; who has one in hand will be told."""
    for command in commands:
        command.result = UNKNOWN
        for row in work.rows(sql.BY_ID, (command.message_id, command.mailbox)):
            command.result = _end(work, command, *row)
            break


def _end(
    work: UnitOfWork,
    command: Cancel,
    seq: int,
    rank: int,
    reply_to: str | None,
    headers: str | None,
    expires: float | None,
) -> Cancelled:
    mailbox = command.mailbox
    outcome = CancelOutcome.REMOVED
    place, found = _place_of(work, mailbox, rank, seq)
    if place is MessagePlace.IN_FLIGHT:
        outcome = CancelOutcome.CANCELLED
        work.execute(sql.DROP_LEASE, (found[0],))
        work.delta(mailbox).in_flight -= 1
        work.cancelled.append((mailbox, command.message_id))
    else:
        _take_out(work, mailbox, rank, seq, expires, *found)
    work.execute(sql.DROP_MESSAGE, (seq,))
    work.delta(mailbox).settled += 1
    return Cancelled(outcome, reply_to, {} if headers is None else headers_of(headers) or {})


def reschedule(work: UnitOfWork, commands: list[Reschedule]) -> None:
    """Let messages that wait become pending at another time. A pending message keeps its place if that is now."""
    for command in commands:
        command.result = RescheduleOutcome.UNKNOWN
        for row in work.rows(sql.BY_ID, (command.message_id, command.mailbox)):
            command.result = _move(work, command, *row)
            break


def _move(
    work: UnitOfWork, command: Reschedule, seq: int, rank: int, reply_to: str | None, headers: str | None, expires: Any
) -> RescheduleOutcome:
    mailbox = command.mailbox
    place, found = _place_of(work, mailbox, rank, seq)
    if place is MessagePlace.IN_FLIGHT:
        return RescheduleOutcome.IN_FLIGHT
    if command.delay or place is MessagePlace.DELAYED:
        _take_out(work, mailbox, rank, seq, expires, *found)
        work.tick += 1
        enqueue(work, mailbox, seq, rank, work.tick, command.delay, expires)
    return RescheduleOutcome.RESCHEDULED


def _take_out(
    work: UnitOfWork, mailbox: int, rank: int, seq: int, expires: float | None, due: float | None = None
) -> None:
    """Remove a message from where it waits: among the delayed ones if it has a ``due``, else among the pending ones."""
    delta = work.delta(mailbox)
    if expires is not None:
        work.execute(sql.NOT_EXPIRING, (expires, seq))
    if due is not None:
        work.execute(sql.FORGET_DELAYED, (due, seq))
        delta.delayed -= 1
    else:
        _leave_ready(work, mailbox, rank, seq)
        delta.pending -= 1


def _leave_ready(work: UnitOfWork, mailbox: int, rank: int, seq: int) -> None:
    """Remove it from the pending ones. It is at the place of its own number, or, having come back once, behind that."""
    for statement in (sql.FORGET_READY, sql.FORGET_READY_FROM):
        place = (mailbox, rank, seq) if statement == sql.FORGET_READY else (mailbox, rank, seq, seq)
        work.execute(statement, place)
        if work.changes():
            return
