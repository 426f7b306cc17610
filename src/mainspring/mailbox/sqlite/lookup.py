"""Find, cancel, reschedule or change a message by its id, in any place."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

from mainspring.mailbox.codec import headers_of
from mainspring.mailbox.limiters import Blocks
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
from mainspring.mailbox.sqlite.limits import Limitable
from mainspring.mailbox.sqlite.unit_of_work import UnitOfWork, enqueue, leave_line

if TYPE_CHECKING:
    from mainspring.mailbox.batched import Cancel
    from mainspring.mailbox.job_commands import Find, ReplaceBody, Reschedule


class Spot(NamedTuple):
    """Where an unfinished message is: due ``at``, or claimed ``at``; its ``lease``, and its permits."""

    place: MessagePlace
    at: float | None = None
    lease: int = 0
    permits: int | None = None


def find(work: UnitOfWork, commands: list[Find]) -> None:
    """Find messages by their ids."""
    for command in commands:
        rows = work.rows(sql.FIND, (json.dumps(command.ids), command.mailbox))
        command.result = [unfinished(row, spot_of(work, command.mailbox, *row[:5])) for row in rows]


def unfinished(row: tuple[Any, ...], spot: Spot) -> UnfinishedMessage:
    """Return the message of a row of ``messages`` and its spot."""
    _, rank, _, _, key, name, body, deliveries, attempts, sent, first, reply_to, headers, checkpoint, history = row
    if spot.place is MessagePlace.IN_FLIGHT:
        deliveries, attempts, first = deliveries + 1, attempts + 1, first or spot.at
    known = {} if headers is None else headers_of(headers) or {}
    message = ClaimedMessage(
        name, body, "", deliveries, attempts, sent, first or 0.0, reply_to, known, checkpoint, None, history
    )
    due = spot.at if spot.place is MessagePlace.DELAYED else None
    return UnfinishedMessage(message, spot.place, due, -rank, key)


def spot_of(
    work: UnitOfWork, mailbox: int, seq: int, rank: int, place: float | None, task: str | None, key: str | None
) -> Spot:
    """Return where an unfinished message is.

    Only a message that is in flight, or has come back and has no task, is looked for among the leases. They are few beside the
    messages that wait, and those made before the message was sent are left out.
    """
    for due, permits in work.rows(sql.DUE_OF, (mailbox, seq)):
        return Spot(MessagePlace.DELAYED, due, permits=permits)
    pos = seq if place is None else place
    for (permits,) in work.rows(sql.READY_AT, (mailbox, rank, pos, seq)):
        return Spot(MessagePlace.PENDING, permits=permits)
    if task is not None and work.limits is not None:
        waits = work.limits.waits_at(mailbox, rank, pos, seq, task, key)
        if waits is not None:
            return Spot(MessagePlace.PENDING, permits=waits[1])
    for lease, claimed_at, permits in work.rows(sql.LEASE_OF, (mailbox, seq, seq)):
        return Spot(MessagePlace.IN_FLIGHT, claimed_at, lease, permits)
    return Spot(MessagePlace.PENDING)


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
    expires: float | None,
    reply_to: str | None,
    headers: str | None,
    weight: float | None,
    *row: Any,
) -> Cancelled:
    mailbox = command.mailbox
    seq, _, _, task, key = row
    spot = spot_of(work, mailbox, *row)
    outcome = CancelOutcome.REMOVED
    if work.limits is not None and spot.place is not MessagePlace.PENDING:
        work.limits.left(mailbox, Limitable.of(task, key, weight, spot.permits), was_claimed=True)
    if spot.place is MessagePlace.IN_FLIGHT:
        outcome = CancelOutcome.CANCELLED
        work.execute(sql.DROP_LEASE, (spot.lease, mailbox))
        work.delta(mailbox).in_flight -= 1
        work.cancelled.append((mailbox, command.message_id))
    else:
        _take_out(work, mailbox, spot, expires, *row)
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
    work: UnitOfWork,
    command: Reschedule,
    expires: float | None,
    reply_to: str | None,
    headers: str | None,
    weight: float | None,
    *row: Any,
) -> RescheduleOutcome:
    mailbox = command.mailbox
    seq, rank, _, task, key = row
    spot = spot_of(work, mailbox, *row)
    if spot.place is MessagePlace.IN_FLIGHT:
        return RescheduleOutcome.IN_FLIGHT
    if command.delay or spot.place is MessagePlace.DELAYED:
        call = Limitable.of(task, key, weight, spot.permits)
        kept = _take_out(work, mailbox, spot, expires, *row, least=Blocks.RETRY)
        if call is not None and spot.place is MessagePlace.PENDING:
            call = call._replace(permits=kept)
        enqueue(work, mailbox, seq, rank, expires, call, delay=command.delay)
    return RescheduleOutcome.RESCHEDULED


def replace_body(work: UnitOfWork, commands: list[ReplaceBody]) -> None:
    """Let messages that wait have another body."""
    for command in commands:
        command.result = RescheduleOutcome.UNKNOWN
        for _, _, _, _, *row in work.rows(sql.BY_ID, (command.message_id, command.mailbox)):
            command.result = RescheduleOutcome.IN_FLIGHT
            if spot_of(work, command.mailbox, *row).place is not MessagePlace.IN_FLIGHT:
                work.execute(sql.REPLACE_BODY, (command.body, row[0]))
                command.result = RescheduleOutcome.RESCHEDULED
            break


def _take_out(
    work: UnitOfWork,
    mailbox: int,
    spot: Spot,
    expires: float | None,
    seq: int,
    rank: int,
    place: float | None,
    task: str | None,
    key: str | None,
    *,
    least: Blocks | None = None,
) -> int:
    """Remove a message from where it waits, among the delayed or the pending ones. Return the permits that a pending one keeps;
    see :func:`leave_line`."""
    if expires is not None:
        work.execute(sql.NOT_EXPIRING, (expires, seq))
    if spot.place is MessagePlace.DELAYED and spot.at is not None:
        work.execute(sql.FORGET_DELAYED, (spot.at, seq))
        work.delta(mailbox).delayed -= 1
        return 0
    pos = seq if place is None else place
    kept = leave_line(work, mailbox, seq, rank, pos, task, key, least)
    if kept is None:  # without a task, it is behind that once it came back
        work.execute(sql.FORGET_READY_FROM, (mailbox, rank, seq, seq))
    return kept or 0
