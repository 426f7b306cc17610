"""A message of the in-memory queue while it stays in one place, and the lane in which those of one priority wait."""

from __future__ import annotations

import math
from collections import deque
from heapq import heapify, heappop
from typing import TYPE_CHECKING, Any, Final

from mainspring.mailbox.message import Delivery

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

DELAYED: Final = 0
PENDING: Final = 1
IN_FLIGHT: Final = 2
GONE: Final = 3

JSON: Final = object()
"""The ``kind`` of a body that is kept as JSON bytes."""

SWEEP_FROM = 64


class Entry(Delivery):
    """One stay of a message in the queue: from when it begins to wait until its delivery ends.

    A claim hands out the entry itself as the delivery; whoever comes back does so as a new entry, so that the old one
    stays what its holder knew. ``kind`` is the type under which the body was checked, or :data:`JSON`. ``attempt`` counts
    the attempt to come.
    """

    __slots__ = ("dedup_key", "expires_at", "kind", "lease_until", "order", "place", "priority", "timer")

    def __init__(
        self,
        message_id: str,
        body: Any,
        kind: Any,
        enqueued_at: float,
        reply_to: str | None = None,
        headers: Mapping[str, str] | None = None,
        priority: int = 0,
        dedup_key: str | None = None,
        expires_at: float = math.inf,
    ) -> None:
        self.message_id = message_id
        self.body = body
        self.receipt_handle = ""
        self.delivery_count = 0
        self.attempt = 1
        self.enqueued_at = enqueued_at
        self.first_received_at = 0.0
        self.reply_to = reply_to
        self.headers = {} if headers is None else headers
        self.checkpoint = None
        self.leased_at = None
        self.history = None
        self.kind = kind
        self.priority = priority
        self.dedup_key = dedup_key
        self.expires_at = expires_at
        self.lease_until = 0.0
        self.order = 0
        self.place: int = GONE
        self.timer = 0

    def again(self, *, charge: bool) -> Entry:
        """Its next stay, after this delivery came to nothing."""
        entry = self._copy(self.expires_at)
        entry.delivery_count = self.delivery_count
        entry.attempt = self.attempt + 1 if charge else self.attempt
        entry.first_received_at = self.first_received_at
        entry.history = self.history
        entry.order = self.order
        return entry

    def anew(self) -> Entry:
        """Its next stay as a dead letter that is tried again: fresh counts, no history, no time by which it must be done."""
        return self._copy(math.inf)

    def _copy(self, expires_at: float) -> Entry:
        entry = Entry(
            self.message_id,
            self.body,
            self.kind,
            self.enqueued_at,
            self.reply_to,
            self.headers,
            self.priority,
            self.dedup_key,
            expires_at,
        )
        entry.checkpoint = self.checkpoint
        return entry


class Lane:
    """Those of one priority that wait: returned ones (a heap, in their old order) before the others.

    One that leaves from the middle stays behind as a dead item until it comes to the head or the dead outnumber the rest.
    """

    __slots__ = ("front", "gone", "tail")

    def __init__(self) -> None:
        self.front: list[tuple[int, Entry]] = []
        self.tail: deque[Entry] = deque()
        self.gone = 0

    def take(self, most: int, into: list[Entry]) -> bool:
        """Move the first into ``into`` until that holds ``most``; whether the lane is empty now."""
        room = most - len(into)
        front = self.front
        while front and room:
            room -= self._keep(heappop(front)[1], into)
        tail = self.tail
        while tail and room:
            room -= self._keep(tail.popleft(), into)
        return not front and not tail

    def _keep(self, entry: Entry, into: list[Entry]) -> int:
        if entry.place != PENDING:
            self.gone -= 1
            return 0
        into.append(entry)
        return 1

    def first(self) -> Entry | None:
        """Return the entry that is next in turn, and drop the dead items before it."""
        front, tail = self.front, self.tail
        while front and front[0][1].place != PENDING:
            heappop(front)
            self.gone -= 1
        if front:
            return front[0][1]
        while tail and tail[0].place != PENDING:
            tail.popleft()
            self.gone -= 1
        return tail[0] if tail else None

    def lose_one(self, entry: Entry) -> None:
        """``entry`` has left from the middle."""
        entry.place = GONE
        self.gone += 1
        if self.gone > SWEEP_FROM and self.gone * 2 > len(self.front) + len(self.tail):
            self.front = [item for item in self.front if item[1].place == PENDING]
            heapify(self.front)
            self.tail = deque(entry for entry in self.tail if entry.place == PENDING)
            self.gone = 0

    def __iter__(self) -> Iterator[Entry]:
        for _, entry in sorted(self.front):
            if entry.place == PENDING:
                yield entry
        for entry in self.tail:
            if entry.place == PENDING:
                yield entry
