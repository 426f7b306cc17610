"""One transaction under way: its instants, the count deltas, what has come due, and the messages it inserts."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from mainspring.errors import MailboxError
from mainspring.mailbox.backend import TRANSIENT
from mainspring.mailbox.limiters import Blocks
from mainspring.mailbox.limits import dropped, full
from mainspring.mailbox.message import EXPIRED
from mainspring.mailbox.sqlite import schema as sql
from mainspring.mailbox.sqlite.limits import Entrant, Limitable, WorkLimits

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from apsw import Connection

    from mainspring.mailbox.message import Dead, Envelope
    from mainspring.mailbox.sqlite.limits import KnownLimits


class CountDelta:
    """How many more (or fewer) messages of a mailbox are in each state.

    ``gained`` counts the messages that became ready, also if they were claimed since: each is worth a wake-up. ``waiting``
    counts the pending messages that wait at limiters, and are not ready.
    """

    __slots__ = ("dead", "delayed", "gained", "in_flight", "pending", "settled", "waiting")

    def __init__(self) -> None:
        self.delayed = self.pending = self.in_flight = self.settled = self.dead = self.waiting = self.gained = 0

    def gain(self, count: int) -> None:
        """Count messages that have become pending, and are ready."""
        self.pending += count
        self.gained += count


class UnitOfWork:
    """The state of one transaction.

    ``boot`` and ``wall`` are its instants. ``limits`` are None where the file has none. ``gained`` says by mailbox how many
    messages became ready, unless a later claim of the transaction took all there was; ``soonest`` is the earliest instant
    (since boot) at which more is due, as far as this transaction knows; ``dated`` says whether it made something due;
    ``empty`` holds the mailboxes where a claim found nothing and will wait; ``cancelled`` the messages (mailbox and id) whose
    holders must hear of it; ``results`` the ids of messages that were acknowledged with a result, by mailbox.
    """

    def __init__(self, connection: Connection, boot: float, wall: float, known: KnownLimits) -> None:
        self.connection = connection
        self.execute = connection.execute
        self.many = connection.executemany
        self.changes = connection.changes
        self.boot = boot
        self.wall = wall
        self.gained: dict[int, int] = {}
        self.empty: set[int] = set()
        self.cancelled: list[tuple[int, str]] = []
        self.results: dict[int, list[str]] = {}
        self.soonest = math.inf
        self.dated = False
        self.named: Collection[int] = ()
        """The mailboxes that the commands of the transaction are for."""
        self._deltas: dict[int, CountDelta] = {}
        self.tick: int
        self.ends: float | None
        self.due: float | None
        self.expires: float | None
        self.records_end: float | None
        self.limited: int | None
        self.opens: float | None
        self.limits: WorkLimits | None = None
        self._places: dict[tuple[int, int], float] = {}
        self._shares: dict[tuple[int, str, str, int], float | None] = {}
        head = self.rows(sql.HEAD)
        if not head:
            raise MailboxError(
                "the mailbox file is damaged: its counter is missing; restore a copy, or begin a new file"
            )
        self.tick, self.ends, self.due, self.expires, self.records_end, self.limited, self.opens = head[0]
        self._first_tick = self.tick
        self._first_records_end = self.records_end
        self._first_limited = (self.limited, self.opens)
        if self.limited is not None:
            self.limits = WorkLimits(self, known.at(self.limited, connection))

    def rows(self, statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Return all rows that ``statement`` gives."""
        return self.execute(statement, values).fetchall()

    def row(self, statement: str, values: Sequence[Any] = ()) -> tuple[Any, ...]:
        """Return the one row that ``statement`` gives."""
        return self.rows(statement, values)[0]

    def value(self, statement: str, values: Sequence[Any] = ()) -> Any:
        """Return the one value that ``statement`` gives."""
        return self.row(statement, values)[0]

    def insert(self, one: str, columns: int, values: list[Any]) -> None:
        """Insert rows, of which ``values`` has the columns, row after row. The statement ``one`` inserts one of them."""
        at_once = columns * sql.ROWS_AT_ONCE
        whole = len(values) - len(values) % at_once
        for start in range(0, whole, at_once):
            self.execute(sql.TOGETHER[one], values[start : start + at_once])
        for start in range(whole, len(values), columns):
            self.execute(one, values[start : start + columns])

    def delta(self, mailbox: int) -> CountDelta:
        """Return the changes of that mailbox's counts, to be changed further."""
        found = self._deltas.get(mailbox)
        if found is None:
            found = self._deltas[mailbox] = CountDelta()
        return found

    def counts(self, mailbox: int) -> tuple[int, ...]:
        """Return its counts as written: delayed, pending, in flight, settled, dead. Raise if the mailbox is gone."""
        found = self.rows(sql.COUNTS, (mailbox,))
        if not found:
            raise dropped("the mailbox")
        return found[0]

    def waiting(self, mailbox: int) -> int:
        """Return how many messages of the mailbox are still to be done, by now."""
        delayed, pending, in_flight, _, _ = self.counts(mailbox)
        delta = self.delta(mailbox)
        return int(delayed + pending + in_flight + delta.delayed + delta.pending + delta.in_flight)

    def mailbox(self, name: str) -> int:
        """Return the number of the mailbox of that name, which is made where there is none."""
        rows = self.rows(sql.MAILBOX, (name,))
        if rows:
            return int(rows[0][0])
        self.execute(sql.ADD_MAILBOX, (self.tick, name))
        number = int(self.value(sql.LAST_MAILBOX))
        self.tick = number  # so no number is used twice
        return number

    def mailbox_for_reply(self, name: str) -> int | None:
        """Return :meth:`mailbox`, or None if it is transient and gone, and its requester with it."""
        if name.startswith(TRANSIENT) and not self.rows(sql.MAILBOX, (name,)):
            return None
        return self.mailbox(name)

    def dead_letter(
        self,
        mailbox: int,
        seq: int,
        dead: Dead,
        delivered: int,
        received_at: float | None,
        at: float | None = None,
        permits: int | None = None,
    ) -> None:
        """Move a message that has no place any more to the dead letters; it died ``at`` (POSIX), or just now."""
        self.tick += 1
        why = (dead.error, dead.error_type, dead.traceback, self.wall if at is None else at, dead.history, permits)
        self.execute(sql.DEAD_LETTER, (self.tick, delivered, delivered, received_at, *why, seq))
        self.execute(sql.DROP_MESSAGE, (seq,))
        self.delta(mailbox).dead += 1

    def tail(self, mailbox: int, rank: int, call: Limitable | None) -> float:
        """Return the place of a message that is new in the queue: behind all others, or, with a key, in its turn."""
        self.tick += 1
        return self.tick if call is None or call.key is None else self.share(mailbox, rank, call, call.key)

    def share(self, mailbox: int, rank: int, call: Limitable, key: str) -> float:
        """Return the place in its turn of a message with a key, whose number is the present tick.

        It is behind the last message of its key, and not before the first in line.
        """
        first = self._places.get((mailbox, rank))
        if first is None:
            rows = self.rows(sql.FIRST_PLACE, (mailbox, rank))
            first = self._places[mailbox, rank] = rows[0][0] if rows else math.inf
        if self.limits is not None:
            first = min(first, self.limits.first_place(mailbox, rank, call))
        if first == math.inf:
            first = self._places[mailbox, rank] = self.tick
        share = (mailbox, key, call.task, rank)
        if share not in self._shares:
            self._shares[share] = self.value(sql.LAST_OF_KEY, share)
        last = self._shares[share]
        place = first
        if last is not None:
            place = max(first, last + (1 if call.weight is None else 1 / call.weight))
        self._shares[share] = place
        return place

    def place_among(self, mailbox: int, rank: int, task: str, key: str | None, seq: int, pos: float) -> float:
        """Return the place of a message of another task among those of ``task``: its own, but not before those of its key that
        were sent before it. At one place, messages are in the order of their sends."""
        if key is None:
            return pos
        share = (mailbox, key, task, rank)
        self._shares.pop(share, None)
        last = self.value(sql.LAST_SENT_BEFORE, (*share, seq))
        return pos if last is None else max(pos, last)

    def read_shares(self, mailbox: int, envelopes: Iterable[Envelope]) -> None:
        """Read the last places of the keys of these messages, all of a task by one statement."""
        keys: dict[tuple[str, int], dict[str, None]] = {}
        for e in envelopes:
            if e.key is not None and e.task is not None:
                keys.setdefault((e.task, -e.priority), {})[e.key] = None
        for (task, rank), names in keys.items():
            for key, last in self.rows(sql.LAST_OF_KEYS, (mailbox, task, rank, json.dumps(list(names)))):
                self._shares.setdefault((mailbox, key, task, rank), last)

    def exhausted(self, mailbox: int) -> None:
        """Note that nothing is pending there any more."""
        self.delta(mailbox).gained = 0
        self.gained.pop(mailbox, None)

    def lease_until(self, until: float) -> None:
        """Note that a lease ends at ``until`` (seconds since boot)."""
        self.soonest = min(self.soonest, until)

    def due_at(self, date: float) -> None:
        """Note that something is due at ``date`` (POSIX), new with this transaction."""
        self.dated = True
        self._see(date)

    def opens_by(self, date: float) -> None:
        """Note that a limiter opens at ``date`` (POSIX). Others that wait know of it where they know of an earlier one."""
        _, known = self._first_limited
        if known is None or date < known:
            self.dated = True
        self.opens = date if self.opens is None else min(self.opens, date)
        self._see(date)

    def flush(self) -> None:
        """Write the counter, the counts and the limiters. Raises where a mailbox of :attr:`named` is gone."""
        if self.limits is not None:
            self.limits.flush()
        for mailbox, delta in self._deltas.items():
            values = (delta.delayed, delta.pending, delta.in_flight, delta.settled, delta.dead, delta.waiting)
            if any(values):
                self.execute(sql.ADD_COUNTS, (*values, mailbox))
                if not self.changes() and mailbox in self.named:
                    raise dropped("the mailbox")
            if delta.gained:
                self.gained[mailbox] = self.gained.get(mailbox, 0) + delta.gained
        if self.limits is not None:
            self.limits.limit_wakes(self._deltas)
        self._deltas.clear()
        if self.tick != self._first_tick:
            self.execute(sql.SET_TICK, (self.tick,))
            self._first_tick = self.tick
        if self.records_end != self._first_records_end:
            self.execute(sql.SET_RECORDS_END, (self.records_end,))
            self._first_records_end = self.records_end
        if self._first_limited != (self.limited, self.opens):
            self.execute(sql.SET_LIMITED, (self.limited, self.opens))
            self._first_limited = (self.limited, self.opens)
        if self.empty:
            self.look_ahead()

    def look_ahead(self) -> None:
        """See when the next thing is due, for those who found nothing."""
        _, ends, due, expires, _, _, opens = self.row(sql.HEAD)
        if ends is not None:
            self.lease_until(ends)
        for date in (due, expires, opens):
            if date is not None:
                self._see(date)

    def _see(self, date: float) -> None:
        self.soonest = min(self.soonest, self.boot + date - self.wall)

    def add(self, other: UnitOfWork) -> None:
        """Take in what another part of the same transaction changed."""
        for mailbox, gained in other.gained.items():
            self.gained[mailbox] = self.gained.get(mailbox, 0) + gained
        self.empty |= other.empty
        self.cancelled += other.cancelled
        for mailbox, message_ids in other.results.items():
            self.results.setdefault(mailbox, []).extend(message_ids)
        self.soonest = min(self.soonest, other.soonest)
        self.dated = self.dated or other.dated
        self.tick = other.tick


AT_ONCE = 1_000
"""How many of each kind one transaction does, unless a caller counts: its callers should not wait for thousands."""


def do_what_is_due(work: UnitOfWork, exact: bool) -> None:
    """Do what is due by now: all of it where ``exact``, else at most :data:`AT_ONCE` of each kind."""
    limit = -1 if exact else AT_ONCE
    wall = work.wall
    if work.ends is not None and work.ends <= work.boot:
        _end_leases(work, limit)
    if work.due is not None and work.due <= wall:
        _end_delays(work, limit)
    if work.expires is not None and work.expires <= wall:
        expire(work, limit)
    if work.records_end is not None and work.records_end <= wall:
        _end_records(work)
    if work.opens is not None and work.opens <= wall and work.limits is not None:
        work.limits.open_due()


def enqueue(
    work: UnitOfWork,
    mailbox: int,
    seq: int,
    rank: int,
    expires_at: float | None,
    call: Limitable | None,
    *,
    pos: float | None = None,
    delay: float = 0.0,
) -> None:
    """Let a message wait: at ``pos`` of the queue, at its tail, or ``delay`` seconds first."""
    if expires_at is not None and expires_at <= work.wall:
        work.dead_letter(mailbox, seq, EXPIRED, 0, None, permits=_kept_by_dead(work, mailbox, call))
        return
    due = work.wall + delay if delay else None
    if due is None:
        pos = work.tail(mailbox, rank, call) if pos is None else pos
        line_up(work, mailbox, seq, rank, pos, call)
    else:
        pos = None
        work.execute(sql.ADD_DELAYED, (due, seq, mailbox, None if call is None else call.permits or None))
        work.delta(mailbox).delayed += 1
        work.due_at(due)
    if expires_at is not None:
        work.execute(sql.ADD_EXPIRING, (expires_at, seq, pos, due))
        work.due_at(expires_at)


def line_up(work: UnitOfWork, mailbox: int, seq: int, rank: int, pos: float, call: Limitable | None) -> None:
    """Let a message be ready at ``pos``, or wait at its limiter."""
    if call is not None:
        work.execute(sql.SET_PLACE, (pos, seq))
    limits = work.limits
    state = None if limits is None else limits.of_task(mailbox, call)
    delta = work.delta(mailbox)
    if limits is None or state is None or call is None:
        work.execute(sql.ADD_READY, (mailbox, rank, pos, seq, None))
        delta.gain(1)
    else:
        delta.pending += 1
        limits.due_again(mailbox, call)
        limits.enter([Entrant(mailbox, rank, pos, seq, call, state)])


def leave_line(
    work: UnitOfWork,
    mailbox: int,
    seq: int,
    rank: int,
    pos: float,
    task: str | None,
    key: str | None,
    least: Blocks | None = None,
) -> int | None:
    """Take a pending message from its place in the queue, or from its limiter. Return None if it is at neither.

    Its permits end. If it is put off (``least`` is RETRY) or has expired (DEAD), and was delivered before, it keeps that of its
    key where such a message does. Return what it has then.
    """
    work.delta(mailbox).pending -= 1
    place = (mailbox, rank, pos, seq)
    kept = 0
    if work.limits is not None and task is not None:
        keeps = 0 if least is None else work.limits.keeps(mailbox, Limitable(task, key), least)
        if keeps and not work.value(sql.DELIVERIES, (seq,)):
            keeps = 0
        kept_from_limiter = work.limits.leave(*place, task, key, keeps)
        if kept_from_limiter is not None:
            return kept_from_limiter
        for (permits,) in work.rows(sql.READY_AT, place):
            kept = work.limits.withdraw(mailbox, Limitable(task, key, None, permits or 0), keeps)
    work.execute(sql.FORGET_READY, place)
    return kept if work.changes() else None


def _end_leases(work: UnitOfWork, limit: int) -> None:
    """Charge an attempt and put the message at the tail: its holder may have died of it."""
    ended = work.rows(sql.ENDED_LEASES, (work.boot, limit))
    if not ended:  # what is due is of no message: left there, it would be due for ever
        work.execute(sql.LEASES_OF_NONE, (work.boot,))
    for lease, mailbox, seq, claimed_at, rank, expires_at, *of in ended:
        work.execute(sql.DROP_LEASE, (lease, mailbox))
        work.execute(sql.CAME_BACK, (1, claimed_at, seq))
        work.delta(mailbox).in_flight -= 1
        call = Limitable.of(*of)
        if work.limits is not None:
            keeps = work.limits.keeps(mailbox, call, Blocks.RETRY)
            call = work.limits.left(mailbox, call, was_claimed=True, keeps=keeps)
        enqueue(work, mailbox, seq, rank, expires_at, call)


def _end_delays(work: UnitOfWork, limit: int) -> None:
    over = work.rows(sql.DUE, (work.wall, limit))
    if not over:
        work.execute(sql.DELAYS_OF_NONE, (work.wall,))
    for due, seq, mailbox, rank, expires_at, *of in over:
        work.execute(sql.FORGET_DELAYED, (due, seq))
        work.delta(mailbox).delayed -= 1
        if expires_at is not None:
            work.execute(sql.NOT_EXPIRING, (expires_at, seq))
        enqueue(work, mailbox, seq, rank, expires_at, Limitable.of(*of))


def expire(work: UnitOfWork, limit: int) -> None:
    """Move to the dead letters what waited too long, the earliest first."""
    expired = work.rows(sql.EXPIRED, (work.wall, limit))
    if not expired:
        work.execute(sql.EXPIRIES_OF_NONE, (work.wall,))
    for expires_at, seq, pos, due, mailbox, rank, task, key, permits in expired:
        if due is None:
            expire_pending(work, mailbox, rank, pos, seq, expires_at, task, key)
        else:
            work.execute(sql.NOT_EXPIRING, (expires_at, seq))
            work.execute(sql.FORGET_DELAYED, (due, seq))
            work.delta(mailbox).delayed -= 1
            kept = _kept_by_dead(work, mailbox, Limitable.of(task, key, None, permits))
            work.dead_letter(mailbox, seq, EXPIRED, 0, None, expires_at, kept)


def _kept_by_dead(work: UnitOfWork, mailbox: int, call: Limitable | None) -> int | None:
    """End the permits of a message that expired before its next attempt. Return the permits that it keeps as a dead letter."""
    if call is None or work.limits is None:
        return None
    keeps = work.limits.keeps(mailbox, call, Blocks.DEAD)
    kept = work.limits.left(mailbox, call, was_claimed=True, keeps=keeps)
    return None if kept is None else kept.permits


def expire_pending(
    work: UnitOfWork,
    mailbox: int,
    rank: int,
    pos: float,
    seq: int,
    expires_at: float,
    task: str | None = None,
    key: str | None = None,
) -> None:
    """Move a message that has expired at its place in the queue, or at a limiter, to the dead letters."""
    work.execute(sql.NOT_EXPIRING, (expires_at, seq))
    kept = leave_line(work, mailbox, seq, rank, pos, task, key, Blocks.DEAD)
    work.dead_letter(mailbox, seq, EXPIRED, 0, None, expires_at, kept)


def _end_records(work: UnitOfWork) -> None:
    """Delete records that have ended, and note when the next one does. None that is left counts: reads leave it out."""
    work.execute(sql.END_RECORDS, (work.wall, AT_ONCE))
    work.records_end = work.value(sql.FIRST_END)


class Inserts:
    """New messages of one transaction, written together.

    ``_values`` holds the columns of those without a task, row after row, and ``_calls`` those of the others. While all of them
    are simply ready, ``_ready`` is None. What limits hold back is in ``_limited``.
    """

    def __init__(self, work: UnitOfWork) -> None:
        self._work = work
        self._first = work.tick + 1
        self._values: list[Any] = []
        self._calls: list[Any] = []
        self._keys: dict[tuple[int, str], str] = {}
        self._ready: list[tuple[int, int, float, int, None]] | None = None
        self._delayed: list[tuple[float, int, int, None]] = []
        self._expiring: list[tuple[float, int, float | None, float | None]] = []
        self._limited: list[Entrant] = []

    def add(self, mailbox: int, envelopes: list[Envelope]) -> list[str]:
        """Take messages, to be written by :meth:`write`; their ids, or those of unfinished ones with the same keys."""
        work = self._work
        wall = work.wall
        values = self._values
        ids = []
        first = work.tick
        if len(envelopes) > 1:
            work.read_shares(mailbox, envelopes)
        for e in envelopes:
            key = e.dedup_key
            if key is not None:
                known = self._known(mailbox, key)
                if known is not None:
                    ids.append(known)
                    continue
                self._keys[mailbox, key] = e.message_id
            work.tick = seq = work.tick + 1
            expires_at = place = None
            if e.task is not None:
                place = self._place_call(mailbox, seq, e, e.task)
            if e.delay or e.expires_in is not None or self._ready is not None:
                expires_at = self._place(mailbox, seq, e, place)
            headers = json.dumps(e.headers) if e.headers else None
            row = (seq, mailbox, -e.priority, e.message_id, e.body, wall, e.reply_to, headers, key, expires_at)
            if e.task is None:
                values += row
            else:
                self._calls += (*row, e.task, e.key, None if e.weight == 1 else e.weight, place)
            ids.append(e.message_id)
        work.delta(mailbox).gain(work.tick - first)
        return ids

    def add_within(self, mailbox: int, envelopes: list[Envelope], capacity: int | None) -> list[str]:
        """Take messages if there is room for all of them.

        :raises MailboxFullError: there is none; nothing was taken.
        """
        if capacity is not None:
            waiting = self._work.waiting(mailbox)
            more = self._how_many_new(mailbox, envelopes)
            if more and waiting + more > capacity:
                raise full(waiting, capacity, more)
        return self.add(mailbox, envelopes)

    def _how_many_new(self, mailbox: int, envelopes: list[Envelope]) -> int:
        """Return how many of them are no repetition of an unfinished message, or of one another."""
        keys = {e.dedup_key for e in envelopes if e.dedup_key is not None}
        without_key = sum(e.dedup_key is None for e in envelopes)
        return without_key + sum(self._known(mailbox, key) is None for key in keys)

    def write(self) -> None:
        """Write what was taken."""
        work = self._work
        if not self._values and not self._calls:
            return
        if self._values:
            work.insert(sql.ADD_MESSAGE, sql.COLUMNS, self._values)
        if self._calls:
            work.insert(sql.ADD_CALL, sql.CALL_COLUMNS, self._calls)
        if self._ready is None:
            last = self._last()
            if last == self._first and self._values:  # a lone message, of which nothing need be read
                _, mailbox, rank, *_ = self._values
                work.execute(sql.ADD_READY, (mailbox, rank, last, last, None))
            else:
                work.execute(sql.READY_RANGE, (self._first, last))
        else:
            work.many(sql.ADD_READY, self._ready)
        if self._delayed:
            work.many(sql.ADD_DELAYED, self._delayed)
        if self._expiring:
            work.many(sql.ADD_EXPIRING, self._expiring)
        if work.limits is not None:
            for mailbox in {entrant.mailbox for entrant in self._limited}:
                work.limits.read(mailbox, (entrant.call for entrant in self._limited if entrant.mailbox == mailbox))
            work.limits.enter(self._limited)

    def _last(self) -> int:
        """Return the number of the last message."""
        last = self._values[-sql.COLUMNS] if self._values else 0
        return int(max(last, self._calls[-sql.CALL_COLUMNS] if self._calls else 0))

    def _known(self, mailbox: int, key: str) -> str | None:
        found = self._keys.get((mailbox, key))
        if found is None:
            for (found,) in self._work.rows(sql.SAME_KEY, (mailbox, key)):
                return str(found)
        return found

    def _place_call(self, mailbox: int, seq: int, envelope: Envelope, task: str) -> float | None:
        """Return the place of a message with a task, unless that is its number, and let its limits hold it back."""
        work = self._work
        key = envelope.key
        if envelope.delay:
            return None if key is None else 0
        call = Limitable(task, key, envelope.weight)
        place = None if key is None else work.share(mailbox, -envelope.priority, call, key)
        limits = work.limits
        state = None if limits is None else limits.of_task(mailbox, call)
        if state is not None:
            self._list_ready()
            pos = seq if place is None else place
            self._limited.append(Entrant(mailbox, -envelope.priority, pos, seq, call, state))
            work.delta(mailbox).gained -= 1  # it is counted as ready with its neighbours
        return place

    def _list_ready(self) -> list[tuple[int, int, float, int, None]]:
        """Return the messages that are ready, of which a list is kept once they are not all of them."""
        if self._ready is None:
            self._ready = []
            for values, columns in ((self._values, sql.COLUMNS), (self._calls, sql.CALL_COLUMNS)):
                for at in range(0, len(values), columns):
                    seq, mailbox, rank = values[at : at + 3]
                    place = None if columns == sql.COLUMNS else values[at + columns - 1]
                    self._ready.append((mailbox, rank, seq if place is None else place, seq, None))
        return self._ready

    def _place(self, mailbox: int, seq: int, envelope: Envelope, place: float | None) -> float | None:
        """Note where a message begins to wait, once they are not all simply ready; its expiry."""
        work = self._work
        due = None
        pos = seq if place is None else place
        if envelope.delay:
            self._list_ready()
            due = work.wall + envelope.delay
            self._delayed.append((due, seq, mailbox, None))
            delta = work.delta(mailbox)
            delta.delayed += 1
            delta.gain(-1)  # it is counted as pending with its neighbours
            work.due_at(due)
        elif self._ready is not None and not (self._limited and self._limited[-1].seq == seq):
            self._ready.append((mailbox, -envelope.priority, pos, seq, None))
        if envelope.expires_in is None:
            return None
        expires_at = work.wall + envelope.expires_in
        self._expiring.append((expires_at, seq, None if due is not None else pos, due))
        work.due_at(expires_at)
        return expires_at
