"""What one transaction does to the tables. Synchronous, and only ever run by the writer thread of the file."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from mainspring.errors import MailboxFullError
from mainspring.mailbox import batched
from mainspring.mailbox.backend import TRANSIENT, TRANSIENT_LIFE
from mainspring.mailbox.codec import headers_of
from mainspring.mailbox.job_commands import (
    ChangeLimits,
    Find,
    FindRecords,
    ListLimits,
    ListMessages,
    ListRecords,
    ReplaceBody,
    Reschedule,
    SetTask,
    WriteRecord,
)
from mainspring.mailbox.limiters import Blocks
from mainspring.mailbox.limits import full, lease_over
from mainspring.mailbox.message import ClaimedMessage, Counts, Dead, Nack
from mainspring.mailbox.sqlite import schema as sql
from mainspring.mailbox.sqlite.limits import KEY, Limitable, change_limits, list_limits
from mainspring.mailbox.sqlite.listing import list_messages
from mainspring.mailbox.sqlite.lookup import cancel, find, replace_body, reschedule
from mainspring.mailbox.sqlite.records import (
    find_records,
    keep_result,
    list_records,
    write_records,
)
from mainspring.mailbox.sqlite.unit_of_work import Inserts, UnitOfWork, do_what_is_due, enqueue, expire_pending

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from apsw import Connection

    from mainspring.mailbox.batched import Command
    from mainspring.mailbox.message import Envelope, Result
    from mainspring.mailbox.sqlite.limits import KnownLimits, WorkLimits


MOST_DIGITS = 18
"""Digits of a number that SQLite surely has room for."""


def is_lease(receipt_handle: str) -> bool:
    """True if a SQLite mailbox can have given it out."""
    return receipt_handle.isascii() and receipt_handle.isdigit() and len(receipt_handle) <= MOST_DIGITS


def drop(work: UnitOfWork, commands: list[batched.Drop]) -> None:
    """Forget mailboxes."""
    for command in commands:
        forget_mailbox(work, command.mailbox)


def forget_mailbox(work: UnitOfWork, mailbox: int) -> None:
    """Drop a mailbox and everything in it, its counts too."""
    if work.limits is not None:
        work.limits.drop(mailbox)
    for statement in (*sql.PURGE, sql.DROP_DEAD, sql.DROP_RECORDS, sql.DROP_MAILBOX):
        work.execute(statement, (mailbox,))


def list_dead(work: UnitOfWork, commands: list[batched.ListDead]) -> None:
    """List a page of dead letters, oldest first."""
    for command in commands:
        of = () if command.task is None else (command.task,)
        values = (command.mailbox, *of, command.mailbox, command.after, command.limit)
        command.result = [_dead_row(row) for row in work.rows(sql.DEAD_PAGE_OF if of else sql.DEAD_PAGE, values)]


def find_dead(work: UnitOfWork, commands: list[batched.FindDead]) -> None:
    """Find the dead letters of these ids."""
    for command in commands:
        values = (command.mailbox, json.dumps(command.ids))
        command.result = [_dead_row(row) for row in work.rows(sql.DEAD_BY_ID, values)]


def _dead_row(row: tuple[Any, ...]) -> tuple[ClaimedMessage, Dead, float]:
    name, body, deliveries, attempts, enqueued_at, first, reply_to, headers, checkpoint, history, *why, dead_at = row
    known = {} if headers is None else headers_of(headers) or {}
    first = first or 0.0
    delivery = ClaimedMessage(
        name, body, "", deliveries, attempts, enqueued_at, first, reply_to, known, checkpoint, None, history
    )
    return delivery, Dead(*why), dead_at


def replay_dead(work: UnitOfWork, commands: list[batched.ReplayDead]) -> None:
    """Put dead letters back into the queue, with fresh counts."""
    for command in commands:
        first = work.tick
        which = (command.mailbox,) if command.ids is None else (command.mailbox, json.dumps(command.ids))
        if command.capacity is not None:
            waiting = work.waiting(command.mailbox)
            more = work.value(sql.COUNT_ALL_DEAD if command.ids is None else sql.COUNT_SOME_DEAD, which)
            if more and waiting + more > command.capacity:
                command.error = full(waiting, command.capacity, more)
                continue
        work.execute(sql.REVIVE_ALL if command.ids is None else sql.REVIVE_SOME, (first, *which))
        replayed = work.changes()
        work.tick += replayed
        work.execute(sql.REVIVED_OF_NO_TASK, (first + 1, work.tick))
        delta = work.delta(command.mailbox)
        delta.gain(work.changes())
        for seq, rank, *of in work.rows(
            sql.ALL_DEAD_CALLS if command.ids is None else sql.SOME_DEAD_CALLS, (first, *which)
        ):
            enqueue(work, command.mailbox, seq, rank, None, Limitable.of(*of))
        _drop_dead(work, command)
        delta.dead -= replayed
        command.result = replayed


def purge_dead(work: UnitOfWork, commands: list[batched.PurgeDead]) -> None:
    """Delete dead letters for good."""
    for command in commands:
        if work.limits is not None:
            which = (command.mailbox,) if command.ids is None else (command.mailbox, json.dumps(command.ids))
            statement = sql.PERMITS_OF_ALL_DEAD if command.ids is None else sql.PERMITS_OF_SOME_DEAD
            for task, key, permits in work.rows(statement, which):
                work.limits.left(command.mailbox, Limitable.of(task, key, None, permits), was_claimed=True)
        command.result = dropped = _drop_dead(work, command)
        delta = work.delta(command.mailbox)
        delta.dead -= dropped
        delta.settled += dropped


def _drop_dead(work: UnitOfWork, command: batched.ReplayDead | batched.PurgeDead) -> int:
    if command.ids is None:
        work.execute(sql.DROP_ALL_DEAD, (command.mailbox,))
    else:
        work.execute(sql.DROP_SOME_DEAD, (command.mailbox, json.dumps(command.ids)))
    return work.changes()


ALL = 1_000_000
"""More receives than wait for one mailbox."""


def perform(
    connection: Connection, commands: Sequence[Command], boot: float, wall: float, known: KnownLimits
) -> UnitOfWork:
    """Do all ``commands`` inside the transaction that is open; what changed, for those who wait.

    Equal commands are done together, and in an order that serves all best: what gives back, what ends, what is new, then
    the claims. The callers of one transaction do not know of each other, so any order is right.
    """
    work = UnitOfWork(connection, boot, wall, known)
    work.named = {command.mailbox for command in commands}
    kinds: dict[type, list[Any]] = {}
    for command in commands:
        kinds.setdefault(type(command), []).append(command)
    do_what_is_due(work, exact=not _EXACT.isdisjoint(kinds))
    for kind in sorted(kinds, key=_ORDER.__getitem__):
        _HANDLERS[kind](work, kinds[kind])
    work.flush()
    return work


def inspect(connection: Connection, waited_on: Sequence[int] = ()) -> tuple[dict[int, int], float, float]:
    """Return the ready messages by mailbox, the earliest lease end (since boot) and the earliest due date (POSIX).

    A dropped mailbox among ``waited_on`` counts as one with messages, so that its receivers wake and are told. All are
    looked up by one statement: this runs every second, with an id for each mailbox that is open.
    """
    head: list[tuple[Any, ...]] = connection.execute(sql.HEAD).fetchall()
    _, until, due, expires, _, _, opens = head[0]
    rows: list[tuple[Any, ...]] = connection.execute(sql.READY_IN).fetchall()
    ready = dict(rows)
    gone: list[tuple[Any, ...]] = connection.execute(sql.DROPPED, (json.dumps(waited_on),)).fetchall()
    ready |= dict.fromkeys((box for (box,) in gone), ALL)
    dates = [date for date in (due, expires, opens) if date is not None]
    return ready, math.inf if until is None else until, min(dates, default=math.inf)


# ------------------------------------------------------------------------------------------------------------- sending


def _open(work: UnitOfWork, commands: list[batched.Open]) -> None:
    for command in commands:
        command.result = number = work.mailbox(command.name)
        if command.name.startswith(TRANSIENT):
            work.execute(sql.USED, (work.wall, number))
    for (unused,) in work.rows(sql.UNUSED, (work.wall - TRANSIENT_LIFE,)):
        forget_mailbox(work, unused)


def _send(work: UnitOfWork, commands: list[batched.Send]) -> None:
    batch = Inserts(work)
    for command in commands:
        try:
            command.result = batch.add_within(command.mailbox, command.envelopes, command.capacity)
        except MailboxFullError as error:
            command.error = error
    batch.write()


# ----------------------------------------------------------------------------------------------------------- receiving


def _claim(work: UnitOfWork, commands: list[batched.Claim]) -> None:
    if work.limits is not None:
        work.limits.give()
    alike: dict[tuple[int, float], list[batched.Claim]] = {}
    for command in commands:
        alike.setdefault((command.mailbox, command.visibility), []).append(command)
    for (mailbox, visibility), claims in alike.items():
        limit = sum(claim.limit for claim in claims)
        deliveries = _lease(work, mailbox, limit, visibility)
        is_cut_short = work.limits is not None and work.limits.is_spent
        if len(deliveries) < limit and not is_cut_short:
            work.exhausted(mailbox)
        start = 0
        for claim in claims:
            claim.result = deliveries[start : start + claim.limit]
            start += claim.limit
            claim.more = is_cut_short and not claim.result
            if claim.waits and not claim.result:
                work.empty.add(mailbox)


def _lease(work: UnitOfWork, mailbox: int, limit: int, visibility: float) -> list[ClaimedMessage]:
    """Lease what comes first."""
    wall = work.wall
    limits = work.limits if work.limits is not None and work.limits.of_mailbox(mailbox) else None
    are_first = True
    if limits is None:
        rows = _first_ready(work, mailbox, limit)
    else:
        rows, are_first = _first_admitted(work, limits, mailbox, limit)
    if not rows:
        work.counts(mailbox)  # which tells the receivers of one that is gone
        return []
    until = work.boot + visibility
    lease = work.tick
    found = len(rows)
    if are_first:
        work.execute(sql.LEASE_FIRST, (lease, until, wall, mailbox, found))
        work.execute(sql.TAKE_UP_TO, (mailbox, *rows[-1][:3]))
    else:
        work.many(sql.FORGET_READY, [(mailbox, *row[:3]) for row in rows])
    if not are_first or work.changes() != found:  # or places were of no message, and have leases that belong to others
        work.execute(sql.DROP_LEASES_FROM, (lease, mailbox))
        places = [
            (lease + at, mailbox, row[2], row[1], until, wall, None if limits is None else row[-2])
            for at, row in enumerate(rows, 1)
        ]
        work.many(sql.ADD_LEASE, places)
    work.tick += found
    work.lease_until(until)
    delta = work.delta(mailbox)
    delta.pending -= found
    delta.in_flight += found
    deliveries = []
    expiring = []
    for _, _, seq, name, body, sent, reply_to, headers, ended, charged, first, *kept, expires_at in rows:
        lease += 1
        if expires_at is not None:
            expiring.append((expires_at, seq))
        known = {} if headers is None else headers_of(headers)
        since = wall if first is None else first
        delivery = ClaimedMessage(
            name, body, str(lease), ended + 1, charged + 1, sent, since, reply_to, known or {}, kept[0], None, kept[1]
        )
        delivery.is_readable = known is not None
        deliveries.append(delivery)
    if expiring:
        work.many(sql.NOT_EXPIRING, expiring)
    return deliveries


def _first_ready(work: UnitOfWork, mailbox: int, limit: int, statement: str = sql.FIRST_READY) -> list[tuple[Any, ...]]:
    """Return the first messages in line, once expired messages are out of it."""
    rows = work.rows(statement, (mailbox, limit))
    while expired := [row for row in rows if row[-1] is not None and row[-1] <= work.wall]:  # more than were swept
        for row in expired:
            rank, pos, seq, expires_at = *row[:3], row[-1]
            of = row[-4:-2] if statement == sql.FIRST_LIMITED else ()
            expire_pending(work, mailbox, rank, pos, seq, expires_at, *of)
        rows = work.rows(statement, (mailbox, limit))
    return rows


def _first_admitted(
    work: UnitOfWork, limits: WorkLimits, mailbox: int, limit: int
) -> tuple[list[tuple[Any, ...]], bool]:
    """Return the first messages that may be claimed, and whether they are the first in line.

    Earlier messages that may not be claimed go back to their limiters. One of them may have its permits at once, and is then in
    line before messages that were admitted meanwhile.
    """
    limit = limits.room(mailbox, limit)
    admitted: dict[int, tuple[Any, ...]] = {}
    are_first = False
    while len(admitted) < limit and not are_first:
        rows = _first_ready(work, mailbox, limit, sql.FIRST_LIMITED)
        calls = [Limitable.of(row[-4], row[-3], None, row[-2]) for row in rows]
        limits.read_to_admit(mailbox, calls)
        are_first = True
        for row, call in zip(rows, calls, strict=True):
            rank, pos, seq, *_ = row
            is_admitted = seq in admitted or (len(admitted) < limit and limits.admit(mailbox, rank, pos, seq, call))
            if is_admitted:
                admitted[seq] = row
            are_first = are_first and bool(is_admitted)
            if is_admitted is None:
                return sorted(admitted.values(), key=_place), False
    return sorted(admitted.values(), key=_place), are_first


def _place(row: tuple[Any, ...]) -> tuple[Any, ...]:
    return row[:3]


def _unclaim(work: UnitOfWork, commands: list[batched.Unclaim]) -> None:
    for command in commands:
        given = _json_list([delivery.receipt_handle for delivery in command.deliveries])
        if work.limits is not None:
            for task, key, permits in work.rows(sql.PERMITS_HELD, (given, command.mailbox)):
                work.limits.due_again(command.mailbox, Limitable(task, key, None, permits))
        work.execute(sql.UNLEASE_EXPIRING, (given, command.mailbox))
        work.execute(sql.UNLEASE, (given, command.mailbox))
        back = work.changes()
        work.execute(sql.DROP_LEASES, (given, command.mailbox))
        delta = work.delta(command.mailbox)
        delta.in_flight -= back
        delta.gain(back)


# ------------------------------------------------------------------------------------------------------------ settling


@dataclass(eq=False, repr=False, slots=True)
class JoiningAcknowledge(batched.AcknowledgeMany):
    """An acknowledgement that waits a moment for a claim, to share one transaction with it. One message may keep a result."""

    joins: ClassVar[bool] = True
    keeps: Result | None = None


def _acknowledge(work: UnitOfWork, commands: list[JoiningAcknowledge]) -> None:
    mailboxes: dict[int, list[tuple[JoiningAcknowledge, int]]] = {}
    for command in commands:
        command.result = {}
        mailboxes.setdefault(command.mailbox, []).extend((command, n) for n in range(len(command.deliveries)))
    for mailbox, acks in mailboxes.items():
        leases = [command.deliveries[n].receipt_handle for command, n in acks]
        given = _json_list([lease for lease in leases if is_lease(lease)])
        ended = work.rows(sql.END_LEASES, (given, mailbox, work.boot))
        if len(ended) < len(acks):
            _tell_whose_lease_is_over({str(lease) for lease, _, _ in ended}, acks)
        dropped = f"[{','.join([str(seq) for _, seq, _ in ended])}]"
        if work.limits is None:
            work.execute(sql.DROP_MESSAGES, (dropped,))
        else:
            permits = {seq: permits for _, seq, permits in ended if permits}
            calls = work.rows(sql.DROP_CALLS, (dropped,))
            work.limits.done(
                mailbox, [Limitable(task, key, None, permits[seq]) for seq, task, key in calls if seq in permits]
            )
        delta = work.delta(mailbox)
        delta.in_flight -= len(ended)
        delta.settled += len(ended)
    for command in commands:
        if command.keeps is not None and not command.result:
            keep_result(work, command.mailbox, command.deliveries[0].message_id, command.keeps)


def _tell_whose_lease_is_over(ended: set[str], acks: list[tuple[JoiningAcknowledge, int]]) -> None:
    """Give acknowledgements their error, except the first of each lease that has ``ended`` with it."""
    for command, number in acks:
        delivery = command.deliveries[number]
        if delivery.receipt_handle in ended:
            ended.discard(delivery.receipt_handle)
        else:
            command.result[number] = lease_over(delivery)


def _acknowledge_and_reply(work: UnitOfWork, commands: list[batched.Reply]) -> None:
    for command in commands:
        held = _take(work, command.mailbox, command.delivery, command)
        if held is None:
            continue
        _end_permits(work, command.mailbox, held)
        work.execute(sql.DROP_MESSAGE, (held[0],))
        work.delta(command.mailbox).settled += 1
        if command.ack.reply is not None:
            _reply(work, command.ack.reply)
        if command.ack.result is not None:
            keep_result(work, command.mailbox, command.delivery.message_id, command.ack.result)


def _reply(work: UnitOfWork, reply: Envelope) -> None:
    """Put a reply where it belongs; one whose requester is gone is dropped."""
    mailbox = work.mailbox_for_reply(reply.reply_to or "")
    if mailbox is not None:
        batch = Inserts(work)
        batch.add(mailbox, [replace(reply, reply_to=None)])
        batch.write()


def _nack(work: UnitOfWork, commands: list[batched.NackCommand]) -> None:
    for command in commands:
        held = _take(work, command.mailbox, command.delivery, command)
        if held is None:
            continue
        seq, pos, claimed_at, rank, expires_at, *_ = held
        how = command.how
        work.execute(sql.CAME_BACK, (int(how.charge), claimed_at, seq))
        if how.history is not None:
            work.execute(sql.KEEP_HISTORY, (how.history, seq))
        call = _end_permits(work, command.mailbox, held, KEY if how.front else Blocks.RETRY)
        pos = pos if how.front else None
        enqueue(work, command.mailbox, seq, rank, expires_at, call, pos=pos, delay=how.delay)


def _dead_letter(work: UnitOfWork, commands: list[batched.DeadLetterCommand]) -> None:
    for command in commands:
        held = _take(work, command.mailbox, command.delivery, command)
        if held is not None:
            call = _end_permits(work, command.mailbox, held, Blocks.DEAD)
            permits = None if call is None else call.permits
            work.dead_letter(command.mailbox, held[0], command.dead, 1, held[2], permits=permits)
            if command.dead.reply is not None:
                _reply(work, command.dead.reply)


def _take(work: UnitOfWork, mailbox: int, delivery: ClaimedMessage, command: Command) -> tuple[Any, ...] | None:
    """End a lease that is held, else give ``command`` its error."""
    lease = delivery.receipt_handle
    for row in work.rows(sql.HELD, (int(lease), mailbox, work.boot)):
        work.execute(sql.DROP_LEASE, (int(lease), mailbox))
        work.delta(mailbox).in_flight -= 1
        return row
    command.error = lease_over(delivery)
    return None


def _end_permits(work: UnitOfWork, mailbox: int, held: tuple[Any, ...], keeps: Blocks | int = 0) -> Limitable | None:
    """End the permits of a delivery that is over, except the permit that it ``keeps``, also by :attr:`TaskLimits.blocks`."""
    call = Limitable.of(*held[-4:])
    if work.limits is None:
        return call
    keeps = work.limits.keeps(mailbox, call, keeps) if isinstance(keeps, Blocks) else keeps
    return work.limits.left(mailbox, call, was_claimed=True, keeps=keeps)


def _set_task(work: UnitOfWork, commands: list[SetTask]) -> None:
    for command in commands:
        lease, task, limits = int(command.delivery.receipt_handle), command.task, work.limits
        rows = work.rows(sql.HELD, (lease, command.mailbox, work.boot))
        if not rows:
            command.error = lease_over(command.delivery)
            continue
        seq, pos, _, rank, *_ = rows[0]
        call = Limitable.of(*rows[0][-4:])
        command.result = False
        if limits is not None and call is not None and call.task != task and task in limits.of_mailbox(command.mailbox):
            limits.left(command.mailbox, call, was_claimed=True)
            pos = work.place_among(command.mailbox, rank, task, call.key, seq, pos)
            work.execute(sql.SET_TASK, (task, seq))
            work.execute(sql.RELEASE_AT, (pos, lease, command.mailbox))
            release = batched.NackCommand(command.delivery, Nack(charge=False, front=True))
            release.mailbox = command.mailbox
            _nack(work, [release])
            command.result = True


def _extend(work: UnitOfWork, commands: list[batched.Extend]) -> None:
    for command in commands:
        until = work.boot + command.timeout
        lease = int(command.delivery.receipt_handle)
        work.execute(sql.EXTEND, (until, lease, command.mailbox, work.boot))
        if not work.changes():
            command.error = lease_over(command.delivery)


def _save_checkpoint(work: UnitOfWork, commands: list[batched.Checkpoint]) -> None:
    for command in commands:
        lease = int(command.delivery.receipt_handle)
        work.execute(sql.CHECKPOINT, (command.state, lease, command.mailbox, work.boot))
        if not work.changes():
            command.error = lease_over(command.delivery)


def _json_list(leases: list[str]) -> str:
    return f"[{','.join(leases)}]"


# ------------------------------------------------------------------------------------------------------- looking after


def _count(work: UnitOfWork, commands: list[batched.Count]) -> None:
    work.flush()
    for command in commands:
        sent = work.value(sql.FIRST_SENT, (command.mailbox,) * 3)
        age = 0.0 if sent is None else max(0.0, work.wall - sent)
        command.result = Counts(*work.counts(command.mailbox), queue_age=age)


def _sweep(work: UnitOfWork, commands: list[batched.Sweep]) -> None:
    work.empty.update(command.mailbox for command in commands)  # so that the next due instant is told


def _purge(work: UnitOfWork, commands: list[batched.Purge]) -> None:
    for command in commands:
        work.flush()
        if work.limits is not None:
            work.limits.purge(command.mailbox)
        delayed, pending, in_flight, _, _ = work.counts(command.mailbox)
        for statement in sql.PURGE:
            work.execute(statement, (command.mailbox,))
        delta = work.delta(command.mailbox)
        delta.delayed -= delayed
        delta.pending -= pending
        delta.in_flight -= in_flight
        command.result = delayed + pending + in_flight
        delta.settled += command.result


_HANDLERS: dict[type, Callable[[UnitOfWork, Any], None]] = {
    batched.Open: _open,
    ChangeLimits: change_limits,
    batched.Unclaim: _unclaim,
    SetTask: _set_task,
    JoiningAcknowledge: _acknowledge,
    batched.Reply: _acknowledge_and_reply,
    batched.NackCommand: _nack,
    batched.DeadLetterCommand: _dead_letter,
    batched.Extend: _extend,
    batched.Checkpoint: _save_checkpoint,
    batched.Cancel: cancel,
    Reschedule: reschedule,
    ReplaceBody: replace_body,
    batched.Purge: _purge,
    batched.Send: _send,
    WriteRecord: write_records,
    batched.ReplayDead: replay_dead,
    batched.PurgeDead: purge_dead,
    batched.Claim: _claim,
    batched.Sweep: _sweep,
    batched.Count: _count,
    batched.Drop: drop,
    Find: find,
    ListMessages: list_messages,
    ListLimits: list_limits,
    batched.FindDead: find_dead,
    batched.ListDead: list_dead,
    FindRecords: find_records,
    ListRecords: list_records,
}
_ORDER = {kind: place for place, kind in enumerate(_HANDLERS)}
_EXACT = frozenset(
    {batched.Count, batched.Purge, batched.ListDead, batched.FindDead, batched.Cancel, Find, Reschedule, ReplaceBody}
)
"""Commands whose result says what is where: before them, all that is due is done."""
