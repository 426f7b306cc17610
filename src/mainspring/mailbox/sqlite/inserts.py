"""New messages on their way into the tables of a SQLite mailbox."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from mainspring.mailbox.sqlite import schema as sql

if TYPE_CHECKING:
    from mainspring.mailbox.message import Envelope
    from mainspring.mailbox.sqlite.unit_of_work import Work


class Inserts:
    """New messages of one transaction, written together. ``_values`` holds their columns, row after row."""

    def __init__(self, work: Work) -> None:
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
        tally = work.tally(mailbox)
        tally.gain(seq - work.tick)
        work.tick = seq
        return ids

    def how_many_new(self, mailbox: int, envelopes: list[Envelope]) -> int:
        """How many of them are no repetition of an unfinished message, or of one another."""
        keys = {e.dedup_key for e in envelopes if e.dedup_key is not None}
        unkeyed = sum(e.dedup_key is None for e in envelopes)
        return unkeyed + sum(self._known(mailbox, key) is None for key in keys)

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
            tally = work.tally(mailbox)
            tally.delayed += 1
            tally.gain(-1)  # it is counted as pending with its neighbours
            work.due_at(due)
        elif self._ready is not None:
            self._ready.append((mailbox, -envelope.priority, seq, seq))
        if envelope.expires_in is None:
            return None
        expires_at = work.wall + envelope.expires_in
        self._expiring.append((expires_at, seq, None if envelope.delay else seq, due))
        work.due_at(expires_at)
        return expires_at
