"""One transaction under way: its instants, the counter, and how the counts of the mailboxes change in it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from mainspring.errors import MailboxError
from mainspring.mailbox.backend import TRANSIENT
from mainspring.mailbox.limits import dropped
from mainspring.mailbox.sqlite import schema as sql

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from apsw import Connection

    from mainspring.mailbox.message import Dead


class Tally:
    """How many more (or fewer) messages of a mailbox are in each state.

    ``gained`` counts those that became pending, whatever was claimed meanwhile: each is worth a wake-up of its own.
    """

    __slots__ = ("dead", "delayed", "gained", "in_flight", "pending", "settled")

    def __init__(self) -> None:
        self.delayed = self.pending = self.in_flight = self.settled = self.dead = self.gained = 0

    def gain(self, count: int) -> None:
        """So many are pending now that were not."""
        self.pending += count
        self.gained += count


class Work:
    """The state of one transaction.

    ``boot`` and ``wall`` are its instants. ``gained`` says by mailbox how many messages became pending, unless a later claim
    of the transaction took all there was; ``soonest`` is the earliest instant (since boot) at which more is due, as far as
    this transaction knows; ``dated`` says whether it made something due; ``empty`` holds the mailboxes where a claim found
    nothing and will wait; ``cancelled`` the messages (mailbox and id) that somebody has in hand and must hear of it.
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
        self.soonest = math.inf
        self.dated = False
        self.named: Collection[int] = ()
        """The mailboxes that the commands of the transaction are for."""
        self._tallies: dict[int, Tally] = {}
        self.ends: float | None
        self.due: float | None
        self.expires: float | None
        head = self.rows(sql.HEAD)
        if not head:
            raise MailboxError(
                "the mailbox file is damaged: its table `store` is empty; restore a copy, or begin a new file"
            )
        self.tick, self.ends, self.due, self.expires = head[0]
        self._first_tick = self.tick

    def rows(self, statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """All rows that ``statement`` gives."""
        return self.execute(statement, values).fetchall()

    def row(self, statement: str, values: Sequence[Any] = ()) -> tuple[Any, ...]:
        """The one row that ``statement`` gives."""
        return self.rows(statement, values)[0]

    def value(self, statement: str, values: Sequence[Any] = ()) -> Any:
        """The one value that ``statement`` gives."""
        return self.row(statement, values)[0]

    def tally(self, mailbox: int) -> Tally:
        """The changes of that mailbox's counts, to be changed further."""
        found = self._tallies.get(mailbox)
        if found is None:
            found = self._tallies[mailbox] = Tally()
        return found

    def counts(self, mailbox: int) -> tuple[int, ...]:
        """Its messages as they were written: delayed, pending, in flight, settled, dead. Raises where the mailbox is gone."""
        found = self.rows(sql.COUNTS, (mailbox,))
        if not found:
            raise dropped("the mailbox")
        return found[0]

    def waiting(self, mailbox: int) -> int:
        """How many messages of the mailbox are still to be done, by now."""
        delayed, pending, in_flight, _, _ = self.counts(mailbox)
        tally = self.tally(mailbox)
        return int(delayed + pending + in_flight + tally.delayed + tally.pending + tally.in_flight)

    def mailbox(self, name: str) -> int:
        """The number of the mailbox of that name, which is made where there is none."""
        rows = self.rows(sql.MAILBOX, (name,))
        if rows:
            return int(rows[0][0])
        self.execute(sql.ADD_MAILBOX, (self.tick, name))
        number = int(self.value(sql.LAST_MAILBOX))
        self.tick = number  # so no number is used twice
        return number

    def mailbox_for_reply(self, name: str) -> int | None:
        """:meth:`mailbox`; None for a transient one that is gone, and its requester with it."""
        if name.startswith(TRANSIENT) and not self.rows(sql.MAILBOX, (name,)):
            return None
        return self.mailbox(name)

    def bury(
        self, mailbox: int, seq: int, dead: Dead, delivered: int, received_at: float | None, at: float | None = None
    ) -> None:
        """Move a message that has no place any more to the dead letters; it died ``at`` (POSIX), or just now."""
        self.tick += 1
        why = (dead.error, dead.error_type, dead.traceback)
        dead_at = self.wall if at is None else at
        self.execute(sql.BURY, (self.tick, delivered, delivered, received_at, *why, dead_at, dead.history, seq))
        self.execute(sql.DROP_MESSAGE, (seq,))
        self.tally(mailbox).dead += 1

    def exhausted(self, mailbox: int) -> None:
        """Nothing is pending there any more."""
        self.tally(mailbox).gained = 0
        self.gained.pop(mailbox, None)

    def lease_until(self, until: float) -> None:
        """A lease ends at ``until`` (since boot)."""
        self.soonest = min(self.soonest, until)

    def due_at(self, date: float) -> None:
        """Something is due at ``date`` (POSIX), new with this transaction."""
        self.dated = True
        self._see(date)

    def flush(self) -> None:
        """Write the counter and the counts. Raises where a mailbox of :attr:`named` is gone."""
        for mailbox, tally in self._tallies.items():
            values = (tally.delayed, tally.pending, tally.in_flight, tally.settled, tally.dead)
            if any(values):
                self.execute(sql.ADD_COUNTS, (*values, mailbox))
                if not self.changes() and mailbox in self.named:
                    raise dropped("the mailbox")
            if tally.gained:
                self.gained[mailbox] = self.gained.get(mailbox, 0) + tally.gained
        self._tallies.clear()
        if self.tick != self._first_tick:
            self.execute(sql.SET_TICK, (self.tick,))
            self._first_tick = self.tick
        if self.empty:
            self.look_ahead()

    def look_ahead(self) -> None:
        """See when the next thing is due, for those who found nothing."""
        _, ends, due, expires = self.row(sql.HEAD)
        if ends is not None:
            self.lease_until(ends)
        for date in (due, expires):
            if date is not None:
                self._see(date)

    def _see(self, date: float) -> None:
        self.soonest = min(self.soonest, self.boot + date - self.wall)

    def add(self, other: Work) -> None:
        """Take in what another part of the same transaction changed."""
        for mailbox, gained in other.gained.items():
            self.gained[mailbox] = self.gained.get(mailbox, 0) + gained
        self.empty |= other.empty
        self.cancelled += other.cancelled
        self.soonest = min(self.soonest, other.soonest)
        self.dated = self.dated or other.dated
