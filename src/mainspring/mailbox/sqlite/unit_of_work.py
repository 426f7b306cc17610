"""One transaction under way: its instants, the count deltas, what has come due, and the messages it inserts."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from mainspring.errors import MailboxError
from mainspring.mailbox.backend import TRANSIENT
from mainspring.mailbox.limits import dropped, full
from mainspring.mailbox.message import EXPIRED
from mainspring.mailbox.sqlite import schema as sql

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from apsw import Connection

    from mainspring.mailbox.message import Dead, Envelope


class CountDelta:
    """How many more (or fewer) messages of a mailbox are in each state.

    ``gained`` counts the messages that became pending, whatever was claimed meanwhile: each is worth a wake-up.
    """

    __slots__ = ("dead", "delayed", "gained", "in_flight", "pending", "settled")

    def __init__(self) -> None:
        self.delayed = self.pending = self.in_flight = self.settled = self.dead = self.gained = 0

    def gain(self, count: int) -> None:
        """Count messages that have become pending."""
        self.pending += count
        self.gained += count


class UnitOfWork:
    """The state of one transaction.

    ``boot`` and ``wall`` are its instants. ``gained`` says by mailbox how many messages became pending, unless a later claim
    of the transaction took all there was; ``soonest`` is the earliest instant (since boot) at which more is due, as far as
    this transaction knows; ``dated`` says whether it made something due; ``empty`` holds the mailboxes where a claim found
    nothing and will wait; ``cancelled`` the messages (mailbox and id) whose holders must hear of it; ``results`` the ids of
    messages that were acknowledged with a result, by mailbox.
    """

    def __init__(self, connection: Connection, boot: float, wall: float) -> None:
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
        head = self.rows(sql.HEAD)
        if not head:
            raise MailboxError(
                "the mailbox file is damaged: its counter is missing; restore a copy, or begin a new file"
            )
        self.tick, self.ends, self.due, self.expires, self.records_end = head[0]
        self._first_tick = self.tick
        self._first_records_end = self.records_end

    def rows(self, statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Return all rows that ``statement`` gives."""
        return self.execute(statement, values).fetchall()

    def row(self, statement: str, values: Sequence[Any] = ()) -> tuple[Any, ...]:
        """Return the one row that ``statement`` gives."""
        return self.rows(statement, values)[0]

    def value(self, statement: str, values: Sequence[Any] = ()) -> Any:
        """Return the one value that ``statement`` gives."""
        return self.row(statement, values)[0]

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
        self, mailbox: int, seq: int, dead: Dead, delivered: int, received_at: float | None, at: float | None = None
    ) -> None:
        """Move a message that has no place any more to the dead letters; it died ``at`` (POSIX), or just now."""
        self.tick += 1
        why = (dead.error, dead.error_type, dead.traceback)
        dead_at = self.wall if at is None else at
        self.execute(sql.DEAD_LETTER, (self.tick, delivered, delivered, received_at, *why, dead_at, dead.history, seq))
        self.execute(sql.DROP_MESSAGE, (seq,))
        self.delta(mailbox).dead += 1

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

    def flush(self) -> None:
        """Write the counter and the counts. Raises where a mailbox of :attr:`named` is gone."""
        for mailbox, delta in self._deltas.items():
            values = (delta.delayed, delta.pending, delta.in_flight, delta.settled, delta.dead)
            if any(values):
                self.execute(sql.ADD_COUNTS, (*values, mailbox))
                if not self.changes() and mailbox in self.named:
                    raise dropped("the mailbox")
            if delta.gained:
                self.gained[mailbox] = self.gained.get(mailbox, 0) + delta.gained
        self._deltas.clear()
        if self.tick != self._first_tick:
            self.execute(sql.SET_TICK, (self.tick,))
            self._first_tick = self.tick
        if self.records_end != self._first_records_end:
            self.execute(sql.SET_RECORDS_END, (self.records_end,))
            self._first_records_end = self.records_end
        if self.empty:
            self.look_ahead()

    def look_ahead(self) -> None:
        """See when the next thing is due, for those who found nothing."""
        _, ends, due, expires, _ = self.row(sql.HEAD)
        if ends is not None:
            self.lease_until(ends)
        for date in (due, expires):
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


def enqueue(
    work: UnitOfWork, mailbox: int, seq: int, rank: int, pos: int, delay: float, expires_at: float | None
) -> None:
    """Let a message wait: at ``pos`` of the queue, or ``delay`` seconds first."""
    delta = work.delta(mailbox)
    if expires_at is not None and expires_at <= work.wall:
        work.dead_letter(mailbox, seq, EXPIRED, 0, None)
        return
    due = work.wall + delay if delay else None
    if due is None:
        work.execute(sql.ADD_READY, (mailbox, rank, pos, seq))
        delta.gain(1)
    else:
        work.execute(sql.ADD_DELAYED, (due, seq, mailbox))
        delta.delayed += 1
        work.due_at(due)
    if expires_at is not None:
        work.execute(sql.ADD_EXPIRING, (expires_at, seq, pos if due is None else None, due))
        work.due_at(expires_at)


def _end_leases(work: UnitOfWork, limit: int) -> None:
    """Charge an attempt and put the message at the tail: its holder may have died of it."""
    ended = work.rows(sql.ENDED_LEASES, (work.boot, limit))
    if not ended:  # what is due is of no message: left there, it would be due for ever
        work.execute(sql.LEASES_OF_NONE, (work.boot,))
    for lease, mailbox, seq, claimed_at, rank, expires_at in ended:
        work.execute(sql.DROP_LEASE, (lease,))
        work.execute(sql.CAME_BACK, (1, claimed_at, seq))
        work.delta(mailbox).in_flight -= 1
        work.tick += 1
        enqueue(work, mailbox, seq, rank, work.tick, 0.0, expires_at)


def _end_delays(work: UnitOfWork, limit: int) -> None:
    over = work.rows(sql.DUE, (work.wall, limit))
    if not over:
        work.execute(sql.DELAYS_OF_NONE, (work.wall,))
    for due, seq, mailbox, rank, expires_at in over:
        work.execute(sql.FORGET_DELAYED, (due, seq))
        work.delta(mailbox).delayed -= 1
        if expires_at is not None:
            work.execute(sql.NOT_EXPIRING, (expires_at, seq))
        work.tick += 1
        enqueue(work, mailbox, seq, rank, work.tick, 0.0, expires_at)


def expire(work: UnitOfWork, limit: int) -> None:
    """Move to the dead letters what waited too long, the earliest first."""
    expired = work.rows(sql.EXPIRED, (work.wall, limit))
    if not expired:
        work.execute(sql.EXPIRIES_OF_NONE, (work.wall,))
    for expires_at, seq, pos, due, mailbox, rank in expired:
        if due is None:
            expire_ready(work, mailbox, rank, pos, seq, expires_at)
        else:
            work.execute(sql.NOT_EXPIRING, (expires_at, seq))
            work.execute(sql.FORGET_DELAYED, (due, seq))
            work.delta(mailbox).delayed -= 1
            work.dead_letter(mailbox, seq, EXPIRED, 0, None, expires_at)


def expire_ready(work: UnitOfWork, mailbox: int, rank: int, pos: int, seq: int, expires_at: float) -> None:
    """Move a message that has expired at its place in the queue to the dead letters."""
    work.execute(sql.NOT_EXPIRING, (expires_at, seq))
    work.execute(sql.FORGET_READY, (mailbox, rank, pos))
    work.delta(mailbox).pending -= 1
    work.dead_letter(mailbox, seq, EXPIRED, 0, None, expires_at)


def _end_records(work: UnitOfWork) -> None:
    """Delete records that have ended, and note when the next one does. None that is left counts: reads leave it out."""
    work.execute(sql.END_RECORDS, (work.wall, AT_ONCE))
    work.records_end = work.value(sql.FIRST_END)


class Inserts:
    """New messages of one transaction, written together. ``_values`` holds their columns, row after row."""

    def __init__(self, work: UnitOfWork) -> None:
        self._work = work
        self._first = work.tick + 1
        self._values: list[Any] = []
        self._keys: dict[tuple[int, str], str] = {}
        self._ready: list[tuple[int, int, int, int]] | None = None
        self._delayed: list[tuple[float, int, int]] = []
        self._expiring: list[tuple[float, int, int | None, float | None]] = []

    def add(self, mailbox: int, envelopes: list[Envelope]) -> list[str]:
        """Take messages, to be written by :meth:`write`; their ids, or those of unfinished ones with the same keys."""
        work = self._work
        wall = work.wall
        values = self._values
        ids = []
        seq = work.tick
        for e in envelopes:
            key = e.dedup_key
            if key is not None:
                known = self._known(mailbox, key)
                if known is not None:
                    ids.append(known)
                    continue
                self._keys[mailbox, key] = e.message_id
            seq += 1
            expires_at = None
            if e.delay or e.expires_in is not None or self._ready is not None:
                expires_at = self._place(mailbox, seq, e)
            headers = json.dumps(e.headers) if e.headers else None
            values += (seq, mailbox, -e.priority, e.message_id, e.body, wall, e.reply_to, headers, key, expires_at)
            ids.append(e.message_id)
        delta = work.delta(mailbox)
        delta.gain(seq - work.tick)
        work.tick = seq
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
        values = self._values
        if not values:
            return
        work = self._work
        several = sql.COLUMNS * sql.ROWS_AT_ONCE
        whole = len(values) - len(values) % several
        for start in range(0, whole, several):
            work.execute(sql.ADD_MESSAGES, values[start : start + several])
        for start in range(whole, len(values), sql.COLUMNS):
            work.execute(sql.ADD_MESSAGE, values[start : start + sql.COLUMNS])
        if self._ready is None:
            work.execute(sql.READY_RANGE, (self._first, values[-sql.COLUMNS]))
        else:
            work.many(sql.ADD_READY, self._ready)
        if self._delayed:
            work.many(sql.ADD_DELAYED, self._delayed)
        if self._expiring:
            work.many(sql.ADD_EXPIRING, self._expiring)

    def _known(self, mailbox: int, key: str) -> str | None:
        found = self._keys.get((mailbox, key))
        if found is None:
            for (found,) in self._work.rows(sql.SAME_KEY, (mailbox, key)):
                return str(found)
        return found

    def _place(self, mailbox: int, seq: int, envelope: Envelope) -> float | None:
        """Note where a message begins to wait, once they are not all simply ready; its expiry."""
        work = self._work
        due = None
        if envelope.delay:
            if self._ready is None:  # up to here all rows were ready ones
                rows = range(0, len(self._values), sql.COLUMNS)
                self._ready = [(*self._values[at + 1 : at + 3], self._values[at], self._values[at]) for at in rows]
            due = work.wall + envelope.delay
            self._delayed.append((due, seq, mailbox))
            delta = work.delta(mailbox)
            delta.delayed += 1
            delta.gain(-1)  # it is counted as pending with its neighbours
            work.due_at(due)
        elif self._ready is not None:
            self._ready.append((mailbox, -envelope.priority, seq, seq))
        if envelope.expires_in is None:
            return None
        expires_at = work.wall + envelope.expires_in
        self._expiring.append((expires_at, seq, None if envelope.delay else seq, due))
        work.due_at(expires_at)
        return expires_at
