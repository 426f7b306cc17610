"""The queue of the in-memory mailbox: plain data and synchronous decisions. Nothing in it waits or reads a clock."""

from __future__ import annotations

import math
from bisect import insort
from collections import defaultdict, deque
from dataclasses import fields
from heapq import heapify, heappop, heappush, merge
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

from mainspring.mailbox.limiters import Blocks
from mainspring.mailbox.limits import full, lease_over
from mainspring.mailbox.memory.dead import MemoryDeadLetters
from mainspring.mailbox.memory.limits import KEY, LimiterQueue, MemoryLimits
from mainspring.mailbox.memory.listing import MemoryListing, sent_since
from mainspring.mailbox.memory.records import MemoryRecords
from mainspring.mailbox.memory.shares import LastPlaces
from mainspring.mailbox.message import (
    EXPIRED,
    UNKNOWN,
    Cancelled,
    CancelOutcome,
    ClaimedMessage,
    Counts,
    MessagePage,
    MessagePlace,
    Nack,
    RescheduleOutcome,
    UnfinishedMessage,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from mainspring.mailbox.message import Dead, Envelope, MessageQuery
    from mainspring.mailbox.records import RecordWrite


DELAYED: Final = 0
PENDING: Final = 1
IN_FLIGHT: Final = 2
GONE: Final = 3

QUEUE_SWEEP_FROM = 64

_PLACES = (MessagePlace.DELAYED, MessagePlace.PENDING, MessagePlace.IN_FLIGHT)
_VALUES = attrgetter(*(part.name for part in fields(ClaimedMessage)))

MOST_ROUNDS = 8
"""How often one claim takes others for messages that it has put back to their limiters."""


class QueuedMessage(ClaimedMessage):
    """One stay of a message in the queue: from when it begins to wait until its delivery ends.

    A claim hands out the entry itself as the delivery. A message that comes back does so as a new entry, so that the old one
    stays what its holder knew. ``attempt`` counts the attempt to come. Set later are: ``place`` as it is put,
    ``order`` as it waits, ``due`` as it is delayed, ``lease_until`` as it is leased. ``key``, ``weight``, ``permits`` and
    ``waits_at`` are set where it has a task.
    """

    priority: int
    dedup_key: str | None
    lease_until: float
    order: float
    place: int
    due: float
    task: str | None
    key: str | None
    weight: float
    permits: int
    waits_at: LimiterQueue | None

    __slots__ = (
        "dedup_key",
        "due",
        "expires_at",
        "key",
        "lease_until",
        "order",
        "permits",
        "place",
        "priority",
        "task",
        "timer",
        "waits_at",
        "weight",
    )

    def __init__(self, sent: Envelope | QueuedMessage, enqueued_at: float, expires_at: float = math.inf) -> None:
        self.message_id = sent.message_id
        self.body = sent.body
        self.receipt_handle = ""
        self.delivery_count = 0
        self.attempt = 1
        self.enqueued_at = enqueued_at
        self.first_received_at = 0.0
        self.reply_to = sent.reply_to
        self.headers = sent.headers
        self.checkpoint = None
        self.leased_at = None
        self.history = None
        self.is_readable = True
        self.priority = sent.priority
        self.dedup_key = sent.dedup_key
        self.expires_at = expires_at
        self.timer = 0
        self.task = sent.task
        if sent.task is not None:
            self.key = sent.key
            self.weight = sent.weight
            self.permits = 0
            self.waits_at = None

    def again(self, *, charge: bool) -> QueuedMessage:
        """Return its next stay, after this delivery came to nothing."""
        entry = self.moved()
        entry.attempt = self.attempt + 1 if charge else self.attempt
        entry.order = self.order
        return entry

    def moved(self) -> QueuedMessage:
        """Return its next stay, after it was taken out of where it waits: there the old one may still lie, dead."""
        entry = QueuedMessage(self, self.enqueued_at, self.expires_at)
        entry.checkpoint = self.checkpoint
        entry.delivery_count = self.delivery_count
        entry.attempt = self.attempt
        entry.first_received_at = self.first_received_at
        entry.history = self.history
        if self.task is not None:
            entry.permits = self.permits
        return entry

    def anew(self) -> QueuedMessage:
        """Return its next stay as a dead letter that is replayed: fresh counts, no history, no deadline."""
        entry = QueuedMessage(self, self.enqueued_at)
        entry.checkpoint = self.checkpoint
        if self.task is not None:
            entry.permits = self.permits
        return entry


class PriorityQueue:
    """The ready messages of one priority. Returned ones (a heap, in their old order) are before the others.

    A message that comes at the last place or behind it goes to the ``tail``, any other to a heap (``placed``): with a place for
    its key, or since it waited at a limiter. An item that leaves from the middle stays behind as a dead one, until it comes to
    the head or the dead outnumber the rest.
    """

    __slots__ = ("_tie", "front", "gone", "placed", "tail")

    def __init__(self) -> None:
        self.front: list[tuple[float, int, QueuedMessage]] = []
        self.placed: list[tuple[float, int, QueuedMessage]] = []
        self.tail: deque[QueuedMessage] = deque()
        self.gone = 0
        self._tie = 0

    def push(self, heap: list[tuple[float, int, QueuedMessage]], entry: QueuedMessage) -> None:
        """Put ``entry`` into ``front`` or ``placed``, at its place, behind others of the same place."""
        self._tie += 1
        heappush(heap, (entry.order, self._tie, entry))

    def take(self, most: int, into: list[QueuedMessage]) -> bool:
        """Move the first into ``into`` until that holds ``most``; return True if the queue is empty now."""
        front, tail, placed = self.front, self.tail, self.placed
        while len(into) < most and (tail or front or placed):
            if front:
                entry = heappop(front)[2]
            elif placed and (not tail or placed[0][0] < tail[0].order):
                entry = heappop(placed)[2]
            else:
                entry = tail.popleft()
            if entry.place == PENDING:
                into.append(entry)
            else:
                self.gone -= 1
        return not front and not tail and not placed

    def first(self) -> QueuedMessage | None:
        """Return the entry that is next in turn, and drop the dead items before it."""
        for heap in (self.front, self.placed):
            while heap and heap[0][2].place != PENDING:
                heappop(heap)
                self.gone -= 1
        tail = self.tail
        while tail and tail[0].place != PENDING:
            tail.popleft()
            self.gone -= 1
        if self.front:
            return self.front[0][2]
        if self.placed and (not tail or self.placed[0][0] < tail[0].order):
            return self.placed[0][2]
        return tail[0] if tail else None

    def lose_one(self, entry: QueuedMessage) -> None:
        """Note that ``entry`` has left from the middle."""
        entry.place = GONE
        self.gone += 1
        if self.gone > QUEUE_SWEEP_FROM and self.gone * 2 > len(self.front) + len(self.placed) + len(self.tail):
            for heap in (self.front, self.placed):
                heap[:] = [item for item in heap if item[2].place == PENDING]
                heapify(heap)
            self.tail = deque(entry for entry in self.tail if entry.place == PENDING)
            self.gone = 0

    def __iter__(self) -> Iterator[QueuedMessage]:
        rest = [(entry.order, 0, entry) for entry in self.tail]
        for _, _, entry in (*sorted(self.front), *merge(sorted(self.placed), rest)):
            if entry.place == PENDING:
                yield entry


HEAP_SWEEP_FROM = 1_024
"""Dead keys in the heap below which it is never swept."""


class Timers:
    """Instants and whose they are.

    An item holds keys, not messages: the serial number of a waiting message (``waiting`` says whose), or the receipt handles of
    one claim (``in_flight`` says whose). A key whose message has moved on is dead. It stays until its item comes to the top, or
    the dead outnumber the living. So each message pays a constant for it, and memory stays flat.
    """

    __slots__ = ("_serial", "_stale", "_sweep_at", "_weight", "heap", "in_flight", "waiting")

    def __init__(self) -> None:
        self.in_flight: dict[str, QueuedMessage] = {}
        self.waiting: dict[int, QueuedMessage | LimiterQueue] = {}
        self.heap: list[tuple[float, int, list[str] | None]] = []
        self._serial = 0
        self._weight = 0  # keys in the heap
        self._stale = 0  # dead ones among them
        self._sweep_at = HEAP_SWEEP_FROM

    def next_due(self) -> float:
        """Return the earliest instant at which something may be due, or infinity."""
        heap = self.heap
        while heap:
            when, serial, receipts = heap[0]
            if serial in self.waiting if receipts is None else any(receipt in self.in_flight for receipt in receipts):
                return when
            heappop(heap)
            dead = 1 if receipts is None else len(receipts)
            self._weight -= dead
            self._stale -= dead
        return math.inf

    def set_timer(self, entry: QueuedMessage | LimiterQueue, when: float) -> None:
        """Let something be due at ``when`` for a message that waits, or for a limiter."""
        self._serial += 1
        entry.timer = self._serial
        self.waiting[self._serial] = entry
        heappush(self.heap, (when, self._serial, None))
        self._weight += 1

    def drop_timer(self, entry: QueuedMessage | LimiterQueue) -> None:
        """Drop the timer of ``entry``."""
        del self.waiting[entry.timer]
        entry.timer = 0
        self._stale += 1
        if self._stale >= self._sweep_at:
            self._sweep()

    def set_leases(self, receipts: list[str], until: float) -> None:
        """Let the leases under ``receipts`` last until ``until``. An extended lease needs no new item."""
        self._serial += 1
        heappush(self.heap, (until, self._serial, receipts))
        self._weight += len(receipts)

    def end_leases(self, receipts: list[str]) -> None:
        """End the leases of the deliveries under ``receipts``."""
        for receipt in receipts:
            del self.in_flight[receipt]
        self._stale += len(receipts)
        if self._stale >= self._sweep_at:
            self._sweep()

    def due(self, now: float) -> Iterator[QueuedMessage | LimiterQueue]:
        """Take out, in order, the entries for which something is due at ``now``; each goes before the next comes."""
        heap = self.heap
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

    def _sweep(self) -> None:
        if self._stale * 2 >= self._weight:
            living: list[tuple[float, int, list[str] | None]] = []
            weight = 0
            for when, serial, receipts in self.heap:
                if receipts is None:
                    if serial in self.waiting:
                        living.append((when, serial, None))
                        weight += 1
                elif held := [receipt for receipt in receipts if receipt in self.in_flight]:
                    living.append((when, serial, held))
                    weight += len(held)
            heapify(living)
            self.heap[:] = living
            self._weight = weight
            self._stale = 0
        self._sweep_at = max(HEAP_SWEEP_FROM, self._weight - self._stale)

    def clear(self) -> None:
        """Forget everything."""
        self.in_flight.clear()
        self.waiting.clear()
        self.heap.clear()
        self._weight = self._stale = 0


class MemoryQueue:
    """Messages in memory, each in exactly one place: delayed, pending, in flight, settled or dead."""

    def __init__(self, capacity: int | None = None) -> None:
        self.capacity = capacity
        self.wall: Callable[[], float] = float  # 0.0 until an event loop gives it a real one
        self.pending = 0
        self.delayed = 0
        self.settled = 0
        self.dead = MemoryDeadLetters()
        self._queues: dict[int, PriorityQueue] = {0: PriorityQueue()}
        self._priorities = [0]  # negated, so that ascending order is the order of service
        self._keys: dict[str, str] = {}
        self._ids: dict[str, QueuedMessage] | None = (
            None  # made by the first cancellation: who never cancels pays nothing for it
        )
        self._listing: MemoryListing | None = None
        self.records = MemoryRecords()
        self._timers = Timers()
        self.heap = self._timers.heap
        """No instant is due before its first one (at which, maybe, nothing is any more)."""
        self._in_flight = self._timers.in_flight
        self._serial = 0
        self.limits = MemoryLimits(self._timers, self._make_ready)
        self._last_places = defaultdict[tuple[str | None, int], LastPlaces](LastPlaces)
        """Those of each task and priority."""

    # ------------------------------------------------------------------------------------------------------ coming in

    @property
    def waiting(self) -> int:
        """The number of messages that are still to be done."""
        return self.pending + self.limits.waiting + self.delayed + len(self._in_flight)

    @property
    def in_flight(self) -> int:
        """The number of messages in flight."""
        return len(self._in_flight)

    @property
    def can_claim(self) -> bool:
        """True if a claim may find a message."""
        return bool(self.pending) and (not self.limits.tasks or self.limits.room(len(self._in_flight)) > 0)

    def put(self, envelopes: list[Envelope], now: float) -> list[str]:
        """Let messages wait, all or none. Return their ids; for a ``dedup_key`` in use, that of the unfinished message."""
        if self.heap and self.heap[0][0] <= now:
            self.advance(now)
        if self.capacity is not None:
            keys = {envelope.dedup_key for envelope in envelopes if envelope.dedup_key is not None}
            without_key = sum(envelope.dedup_key is None for envelope in envelopes)
            self._check_room(without_key + len(keys - self._keys.keys()))
        ids = []
        for envelope in envelopes:
            message_id = envelope.message_id
            if envelope.dedup_key is not None:
                unfinished = self._keys.setdefault(envelope.dedup_key, message_id)
                if unfinished is not message_id:
                    ids.append(unfinished)
                    continue
            if envelope.expires_in is None and not envelope.delay:
                self._append(QueuedMessage(envelope, self.wall()), now)
            else:
                expires_at = math.inf if envelope.expires_in is None else now + envelope.expires_in
                self._place(QueuedMessage(envelope, self.wall(), expires_at), now, envelope.delay)
            ids.append(message_id)
        return ids

    def _check_room(self, more: int) -> None:
        if self.capacity is not None and more and self.waiting + more > self.capacity:
            raise full(self.waiting, self.capacity, more)

    def _place(self, entry: QueuedMessage, now: float, delay: float = 0.0, *, front: bool = False) -> None:
        """Let ``entry`` wait, unless its life has ended."""
        if entry.expires_at <= now:
            self._expire(entry, now)
        elif delay > 0:
            if self._ids is not None:
                self._know(entry)
            entry.place = DELAYED
            entry.due = now + delay
            self.delayed += 1
            self._timers.set_timer(entry, min(now + delay, entry.expires_at))
        else:
            self._append(entry, now, front)

    def _append(self, entry: QueuedMessage, now: float, front: bool = False) -> None:
        """Let ``entry``, which is due, become ready, or wait at a limiter."""
        queue = self._queues.get(entry.priority) or self._new_queue(entry.priority)
        if self._ids is not None:
            self._know(entry)
        entry.place = PENDING
        if entry.expires_at != math.inf:
            self._timers.set_timer(entry, entry.expires_at)
        if not front:
            self._serial += 1
            entry.order = self._serial if entry.task is None or entry.key is None else self._share(queue, entry)
        limited = None if entry.task is None else self.limits.tasks.get(entry.task)
        if limited is not None:
            self.limits.due_again(entry)
            self.limits.enter(limited, entry, now)
            return
        self.pending += 1
        if front:  # among those that came back, the order in which they once waited
            queue.push(queue.front, entry)
        elif not queue.tail or queue.tail[-1].order <= entry.order:
            queue.tail.append(entry)
        else:
            queue.push(queue.placed, entry)

    def _make_ready(self, entry: QueuedMessage) -> None:
        """Put an entry that has its permits where it is claimed, at its place."""
        queue = self._queues.get(entry.priority) or self._new_queue(entry.priority)
        self.pending += 1
        if not queue.tail or queue.tail[-1].order <= entry.order:
            queue.tail.append(entry)
        else:
            queue.push(queue.placed, entry)

    def _new_queue(self, priority: int) -> PriorityQueue:
        insort(self._priorities, -priority)
        queue = self._queues[priority] = PriorityQueue()
        return queue

    def _share(self, queue: PriorityQueue, entry: QueuedMessage) -> float:
        """Return the place of an entry with a key."""
        first = queue.first()
        now_at = math.inf if first is None else first.order
        if self.limits.tasks:
            now_at = min(now_at, self.limits.first_place(entry))
        return self._last_places[entry.task, entry.priority].next(entry, self._serial if now_at == math.inf else now_at)

    def put_with(self, write: RecordWrite, envelopes: list[Envelope], now: float) -> int | None:
        """Change a record and let messages wait, both or neither. Return the record's version, or None if it is another."""
        if write.if_version not in (None, self.records.version(write.kind, write.key, now)):
            return None
        self.put(envelopes, now)
        return self.records.write(write, now)

    # ------------------------------------------------------------------------------------------------------ going out

    def claim(self, most: int, now: float, visibility_timeout: float) -> list[QueuedMessage]:
        """Lease at most ``most`` pending messages, best first, until ``visibility_timeout`` seconds from ``now``."""
        if self.heap and self.heap[0][0] <= now:
            self.advance(now)
        is_limited = bool(self.limits.tasks)
        if is_limited:
            most = int(min(most, self.limits.room(len(self._in_flight))))
        if not self.pending or most <= 0:
            return []
        taken: list[QueuedMessage] = []
        for _ in range(MOST_ROUNDS):
            before = len(taken)
            for negated in self._priorities if len(self._priorities) == 1 else tuple(self._priorities):
                queue = self._queues[-negated]
                if queue.take(most, taken) and negated:
                    del self._queues[-negated]
                    self._priorities.remove(negated)
                if len(taken) == most:
                    break
            self.pending -= len(taken) - before
            if not is_limited or not self._put_back(taken, before, now):
                break
        until = now + visibility_timeout
        serial = self._serial
        wall = self.wall()
        in_flight = self._in_flight
        receipts = []
        for entry in taken:
            serial += 1
            entry.receipt_handle = receipt = str(serial)
            entry.delivery_count += 1
            if not entry.first_received_at:
                entry.first_received_at = wall
            entry.leased_at = now
            entry.lease_until = until
            entry.place = IN_FLIGHT
            if entry.timer:
                self._timers.drop_timer(entry)
            in_flight[receipt] = entry
            receipts.append(receipt)
        self._serial = serial
        self._timers.set_leases(receipts, until)
        if is_limited:
            self.limits.claimed(taken, now)
        return taken

    def _put_back(self, taken: list[QueuedMessage], start: int, now: float) -> bool:
        """Put entries from ``start`` on that may not be claimed back to their limiters. True if others may be taken instead."""
        admitted = []
        for entry in taken[start:]:
            limited = None if entry.task is None else self.limits.tasks.get(entry.task)
            if limited is None or self.limits.admit(limited, entry, now):
                admitted.append(entry)
        is_short = len(admitted) < len(taken) - start
        taken[start:] = admitted
        return is_short and bool(self.pending)

    def leased(self, delivery: ClaimedMessage, now: float) -> QueuedMessage:
        """Return the entry of a delivery whose lease is held. Raise :class:`ReceiptHandleExpiredError` for any other."""
        entry = self._in_flight.get(delivery.receipt_handle)
        if entry is None or entry.lease_until <= now:
            raise lease_over(delivery)
        return entry

    def acknowledge(self, deliveries: Iterable[ClaimedMessage], now: float) -> dict[int, Exception]:
        """Remove these messages as done. Return the errors of those whose leases are over, by their numbers."""
        in_flight = self._in_flight
        refused: dict[int, Exception] = {}
        done: list[str] = []
        for number, delivery in enumerate(deliveries):
            receipt = delivery.receipt_handle
            entry = in_flight.get(receipt)
            if entry is None or entry.lease_until <= now:
                refused[number] = lease_over(delivery)
                continue
            entry.place = GONE
            done.append(receipt)
            if entry.dedup_key is not None:
                self._free_key(entry)
            if self._ids is not None:
                self._ids.pop(entry.message_id, None)
            if entry.task is not None and entry.permits:
                self.limits.left(entry, now, was_claimed=True)
        self._timers.end_leases(done)
        self.settled += len(done)
        return refused

    def nack(self, delivery: ClaimedMessage, now: float, how: Nack) -> None:
        """Return it to those that wait."""
        entry = self.leased(delivery, now)
        self._end_lease(entry)
        self._end_permits(entry, now, keeps=KEY if how.front else self.limits.keeps(entry, Blocks.RETRY))
        again = entry.again(charge=how.charge)
        if how.history is not None:
            again.history = how.history
        self._place(again, now, how.delay, front=how.front)

    def dead_letter(self, delivery: ClaimedMessage, now: float, why: Dead) -> None:
        """Give it up: to the dead letters."""
        entry = self.leased(delivery, now)
        self._end_lease(entry)
        self._end_permits(entry, now, keeps=self.limits.keeps(entry, Blocks.DEAD))
        self._dead_letter(entry, why, self.wall())

    def _end_permits(self, entry: QueuedMessage, now: float, *, keeps: int = 0, was_claimed: bool = True) -> None:
        """End the permits of an entry. ``was_claimed``: its delivery has ended, or it kept that of its key since then."""
        if entry.task is not None and entry.permits:
            self.limits.left(entry, now, was_claimed=was_claimed, keeps=keeps)

    def extend(self, delivery: ClaimedMessage, now: float, timeout: float) -> None:
        """Let its lease last ``timeout`` seconds from ``now``; never less than before. Its item in the heap stays."""
        entry = self.leased(delivery, now)
        entry.lease_until = max(entry.lease_until, now + timeout)

    def set_task(self, delivery: ClaimedMessage, now: float, task: str) -> bool:
        """Release it as a message of another task, if that has limits; see :meth:`Backend.set_task`."""
        entry = self.leased(delivery, now)
        if entry.task in (None, task) or task not in self.limits.tasks:
            return False
        self._end_permits(entry, now)
        entry.task, self._listing = task, None
        self._last_places[task, entry.priority].add(entry)
        self.nack(delivery, now, Nack(charge=False, front=True))
        return True

    def _end_lease(self, entry: QueuedMessage) -> None:
        entry.place = GONE
        self._timers.end_leases([entry.receipt_handle])

    def _dead_letter(self, entry: QueuedMessage, why: Dead, at: float) -> None:
        entry.place = GONE
        if entry.dedup_key is not None:
            self._free_key(entry)
        if self._ids is not None:
            self._ids.pop(entry.message_id, None)
        if why.history is not None:
            entry.history = why.history
        self.dead.add(entry, why, at)

    def _expire(self, entry: QueuedMessage, now: float) -> None:
        entry.attempt -= 1  # it counted the attempt to come, which will not be made
        self._end_permits(entry, now, keeps=self.limits.keeps(entry, Blocks.DEAD))
        self._dead_letter(entry, EXPIRED, self.wall() - (now - entry.expires_at))

    def _free_key(self, entry: QueuedMessage) -> None:
        key = entry.dedup_key
        if key is not None and self._keys.get(key) == entry.message_id:
            del self._keys[key]

    # ----------------------------------------------------------------------------------------------------- time passes

    def advance(self, now: float) -> None:
        """Let everything happen that is due at ``now``: delays end, leases expire, messages die of age."""
        for entry in self._timers.due(now):
            if isinstance(entry, LimiterQueue):
                self.limits.let_in(entry, now)
            elif entry.place == IN_FLIGHT:
                entry.place = GONE
                self._end_permits(entry, now, keeps=self.limits.keeps(entry, Blocks.RETRY))
                self._place(entry.again(charge=True), now)
            elif entry.place == DELAYED:
                self.delayed -= 1
                self._place(entry, now)
            else:
                self._leave(entry)
                self.limits.withdraw(entry, now, Blocks.DEAD)
                self._expire(entry, now)

    def next_due(self) -> float:
        """Return the earliest instant at which something may be due, or infinity."""
        return self._timers.next_due()

    # ------------------------------------------------------------------------------------------------- looking after

    def counts(self, now: float) -> Counts:
        """Return where the messages are."""
        self.advance(now)
        age = self._queue_age()
        pending = self.pending + self.limits.waiting
        return Counts(self.delayed, pending, len(self._in_flight), self.settled, len(self.dead), queue_age=age)

    def _queue_age(self) -> float:
        """Return the seconds since the send of the oldest of the first in line; 0 where none is pending."""
        first = [entry for queue in self._queues.values() if (entry := queue.first()) is not None]
        return max((0.0, *(self.wall() - entry.enqueued_at for entry in first)))

    def purge(self, now: float) -> int:
        """Drop all that is delayed, pending or in flight; how many that were."""
        self.advance(now)
        dropped = self.waiting
        self._clear(now)
        self.settled += dropped
        return dropped

    def cancel(self, message_id: str, now: float) -> Cancelled:
        """End a message that is delayed, pending or in flight. The first call looks at all of them, later ones do not."""
        self.advance(now)
        entry = self._by_id().pop(message_id, None)
        if entry is None:
            return UNKNOWN
        outcome, was_claimed = CancelOutcome.REMOVED, entry.place != PENDING
        if entry.place == IN_FLIGHT:
            outcome = CancelOutcome.CANCELLED
            self._end_lease(entry)
        else:
            self._take_out(entry)
        self._end_permits(entry, now, was_claimed=was_claimed)
        self._free_key(entry)
        self.settled += 1
        return Cancelled(outcome, entry.reply_to, entry.headers)

    def find(self, message_ids: list[str], now: float) -> list[UnfinishedMessage]:
        """Return those of ``message_ids`` that are unfinished. The first call looks at all messages, later ones do not."""
        self.advance(now)
        found = map(self._by_id().get, dict.fromkeys(message_ids))
        return [self._seen(entry, now) for entry in found if entry is not None]

    def _seen(self, entry: QueuedMessage, now: float) -> UnfinishedMessage:
        message = ClaimedMessage(*_VALUES(entry))
        message.receipt_handle = ""
        if entry.place != IN_FLIGHT:
            message.attempt -= 1  # it counts the attempt to come
        due = self.wall() + entry.due - now if entry.place == DELAYED else None
        return UnfinishedMessage(message, _PLACES[entry.place], due, entry.priority, entry.key if entry.task else None)

    def reschedule(self, message_id: str, now: float, delay: float) -> RescheduleOutcome:
        """Let a message that waits become pending ``delay`` seconds from ``now``."""
        self.advance(now)
        entry = self._by_id().get(message_id)
        if entry is None:
            return RescheduleOutcome.UNKNOWN
        if entry.place == IN_FLIGHT:
            return RescheduleOutcome.IN_FLIGHT
        if delay or entry.place == DELAYED:
            was_pending = entry.place == PENDING
            self._take_out(entry)
            if was_pending:
                self.limits.withdraw(entry, now, Blocks.RETRY)
            self._place(entry.moved(), now, delay)
        return RescheduleOutcome.RESCHEDULED

    def replace_body(self, message_id: str, body: Any, now: float) -> RescheduleOutcome:
        """Let a message that waits have another body."""
        self.advance(now)
        entry = self._by_id().get(message_id)
        if entry is None:
            return RescheduleOutcome.UNKNOWN
        if entry.place == IN_FLIGHT:
            return RescheduleOutcome.IN_FLIGHT
        entry.body = body
        return RescheduleOutcome.RESCHEDULED

    def list_messages(self, query: MessageQuery, now: float) -> MessagePage:
        """Return a page of unfinished messages, in the order in which they came."""
        self.advance(now)
        if self._listing is None:
            self._listing = MemoryListing(self._by_id())
        place, since = _PLACES.index(query.place), sent_since(query)
        found, after = self._listing.page(query, lambda entry: entry.place == place and entry.enqueued_at >= since)
        return MessagePage([self._seen(entry, now) for entry in found], after)

    def _know(self, entry: QueuedMessage) -> None:
        ids = self._by_id()
        is_new = entry.message_id not in ids
        ids[entry.message_id] = entry
        if is_new and self._listing is not None:
            self._listing.add(entry)

    def _by_id(self) -> dict[str, QueuedMessage]:
        if self._ids is None:
            waiting = [*self._in_flight.values(), *self.limits.messages()]
            waiting += [entry for entry in self._timers.waiting.values() if isinstance(entry, QueuedMessage)]
            waiting += [entry for queue in self._queues.values() for entry in queue]
            self._ids = {entry.message_id: entry for entry in waiting}
        return self._ids

    def _take_out(self, entry: QueuedMessage) -> None:
        """Take a waiting message out of the line, or out of the delayed messages."""
        if entry.timer:
            self._timers.drop_timer(entry)
        if entry.place == PENDING:
            self._leave(entry)
        else:
            self.delayed -= 1
            entry.place = GONE

    def _leave(self, entry: QueuedMessage) -> None:
        """Take a pending message out of the line, or from its limiter."""
        if entry.task is not None and entry.waits_at is not None:
            self.limits.lost(entry)
            entry.place = GONE
        else:
            self.pending -= 1
            self._queues[entry.priority].lose_one(entry)

    def _clear(self, now: float) -> None:
        self._ids = self._listing = None
        self._queues = {0: PriorityQueue()}
        self._priorities = [0]
        self._keys.clear()
        self._timers.clear()
        self._last_places.clear()
        self.limits.clear(self.dead.messages(), now)
        self.pending = self.delayed = 0

    def replay(self, message_ids: list[str] | None, now: float) -> int:
        """Let dead letters wait again, with fresh counts; all or (where there is no room) none; how many that were."""
        self.advance(now)
        found = self.dead.named(message_ids)
        self._check_room(len(found))
        for dead in self.dead.take(found):
            entry = dead.anew()
            key = entry.dedup_key
            if key is not None and self._keys.setdefault(key, entry.message_id) != entry.message_id:
                entry.dedup_key = None  # another's by now, and it stays so
            self._append(entry, now)
        return len(found)

    def purge_dead(self, message_ids: list[str] | None, now: float) -> int:
        """Forget dead letters; how many that were."""
        self.advance(now)
        purged = list(self.dead.take(message_ids))
        for entry in purged:
            self._end_permits(entry, now)
        self.settled += len(purged)
        return len(purged)
