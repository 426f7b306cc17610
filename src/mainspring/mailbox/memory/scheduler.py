"""What is due when in an in-memory queue: one heap for delays, for the ends of messages' lives, and for leases."""

from __future__ import annotations

import math
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mainspring.mailbox.memory.entry import Entry

SWEEP_FROM = 1_024
"""Dead keys in the heap below which it is never swept."""


class Agenda:
    """Instants and whose they are.

    An item holds keys, not messages: the serial number of one that waits (``waiting`` says whose), or the receipt handles
    of one claim (``in_flight`` says whose). A key whose message has moved on is dead; it stays until its item comes to the
    top or the dead outnumber the living, so that each message pays a constant for it and memory stays flat.
    """

    __slots__ = ("_heap", "_serial", "_stale", "_sweep_at", "_weight", "in_flight", "waiting")

    def __init__(self) -> None:
        self.in_flight: dict[str, Entry] = {}
        self.waiting: dict[int, Entry] = {}
        self._heap: list[tuple[float, int, list[str] | None]] = []
        self._serial = 0
        self._weight = 0  # keys in the heap
        self._stale = 0  # dead ones among them
        self._sweep_at = SWEEP_FROM

    @property
    def earliest(self) -> float:
        """No instant is due before this one (at which, maybe, nothing is any more)."""
        return self._heap[0][0] if self._heap else math.inf

    def next_due(self) -> float:
        """The earliest instant at which something may be due, or infinity."""
        heap = self._heap
        while heap:
            when, serial, receipts = heap[0]
            if serial in self.waiting if receipts is None else any(receipt in self.in_flight for receipt in receipts):
                return when
            heappop(heap)
            dead = 1 if receipts is None else len(receipts)
            self._weight -= dead
            self._stale -= dead
        return math.inf

    def set_timer(self, entry: Entry, when: float) -> None:
        """``entry``, which waits, has something due at ``when``."""
        self._serial += 1
        entry.timer = self._serial
        self.waiting[self._serial] = entry
        heappush(self._heap, (when, self._serial, None))
        self._weight += 1

    def drop_timer(self, entry: Entry) -> None:
        """``entry`` waits no more."""
        del self.waiting[entry.timer]
        entry.timer = 0
        self._die()

    def set_leases(self, receipts: list[str], until: float) -> None:
        """The leases under ``receipts`` last until ``until``; one that is extended needs no new item."""
        self._serial += 1
        heappush(self._heap, (until, self._serial, receipts))
        self._weight += len(receipts)

    def end_lease(self, receipt: str) -> None:
        """The delivery under ``receipt`` has ended."""
        del self.in_flight[receipt]
        self._die()

    def due(self, now: float) -> Iterator[Entry]:
        """Take out, in order, the entries for which something is due at ``now``; each goes before the next comes."""
        heap = self._heap
        while heap and heap[0][0] <= now:
            _, serial, receipts = heappop(heap)
            if receipts is None:
                self._weight -= 1
                entry = self.waiting.pop(serial, None)
                if entry is None:
                    self._stale -= 1
                else:
                    entry.timer = 0
                    yield entry
                continue
            self._weight -= len(receipts)
            for receipt in receipts:
                entry = self.in_flight.get(receipt)
                if entry is None:
                    self._stale -= 1
                elif entry.lease_until > now:  # it was extended
                    self.set_leases([receipt], entry.lease_until)
                else:
                    del self.in_flight[receipt]
                    yield entry

    def _die(self) -> None:
        self._stale += 1
        if self._stale >= self._sweep_at:
            self._sweep()

    def _sweep(self) -> None:
        if self._stale * 2 >= self._weight:
            living: list[tuple[float, int, list[str] | None]] = []
            weight = 0
            for when, serial, receipts in self._heap:
                if receipts is None:
                    if serial in self.waiting:
                        living.append((when, serial, None))
                        weight += 1
                elif held := [receipt for receipt in receipts if receipt in self.in_flight]:
                    living.append((when, serial, held))
                    weight += len(held)
            heapify(living)
            self._heap[:] = living
            self._weight = weight
            self._stale = 0
        self._sweep_at = max(SWEEP_FROM, self._weight - self._stale)

    def shift(self, delta: float) -> list[Entry]:
        """Put all instants ``delta`` seconds later and end all leases; the entries whose leases those were."""
        lost = list(self.in_flight.values())
        self.in_flight.clear()
        for entry in (*self.waiting.values(), *lost):
            entry.expires_at += delta
        self._heap[:] = [(when + delta, serial, None) for when, serial, _ in self._heap if serial in self.waiting]
        heapify(self._heap)
        self._weight, self._stale = len(self._heap), 0
        return lost

    def timers(self) -> list[tuple[float, Entry]]:
        """Those that wait and have something due, soonest first."""
        return [(when, self.waiting[serial]) for when, serial, _ in sorted(self._heap) if serial in self.waiting]

    def clear(self) -> None:
        """Forget everything."""
        self.in_flight.clear()
        self.waiting.clear()
        self._heap.clear()
        self._weight = self._stale = 0
