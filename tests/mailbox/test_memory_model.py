"""The in-memory queue against a model so simple that it can be read: one list of records, looked at anew each time."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from mainspring.errors import MailboxFullError, ReceiptHandleExpiredError
from mainspring.mailbox.memory_entry import Entry
from mainspring.mailbox.memory_queue import MemoryQueue
from mainspring.mailbox.message import Dead, Delivery, Return

CAPACITY = 12


@dataclass
class Record:
    """One message as the model sees it. ``rank`` is its place among those that wait."""

    id: str
    priority: int
    key: str | None
    expires_at: float
    rank: int = 0
    ready_at: float = -math.inf
    receipt: str | None = None
    lease_until: float = 0.0
    deliveries: int = 0
    charged: int = 0
    place: str = "waiting"


@dataclass
class Model:
    """What the queue should do, with no thought for speed: time is moved on one due thing at a time."""

    records: list[Record] = field(default_factory=list)
    dead: list[str] = field(default_factory=list)
    ranks: int = 0
    settled: int = 0

    def alive(self) -> list[Record]:
        return [r for r in self.records if r.place in ("waiting", "delayed", "in flight")]

    def wait(self, record: Record, now: float, delay: float = 0.0, *, front: bool = False) -> None:
        record.receipt = None
        if record.expires_at <= now:
            self.die(record)
        elif delay > 0:
            record.place, record.ready_at = "delayed", now + delay
        else:
            record.place = "waiting"
            if not front:
                self.ranks += 1
                record.rank = self.ranks

    def die(self, record: Record) -> None:
        record.place, record.receipt = "dead", None
        self.dead.append(record.id)

    def due(self, record: Record) -> float:
        if record.place == "in flight":
            return record.lease_until
        if record.place == "delayed":
            return min(record.ready_at, record.expires_at)
        return record.expires_at if record.place == "waiting" else math.inf

    def advance(self, now: float) -> None:
        while True:
            first = min(self.alive(), key=lambda r: (self.due(r), int(r.receipt or 0)), default=None)
            if first is None or self.due(first) > now:
                return
            if first.place == "in flight":
                first.charged += 1
            self.wait(first, now)

    def claimable(self) -> list[Record]:
        return sorted((r for r in self.records if r.place == "waiting"), key=lambda r: (-r.priority, r.rank))


class QueueMachine(RuleBasedStateMachine):
    """Drives both and compares. Instants are distinct, so that the order of things due is never a matter of taste."""

    deliveries = Bundle("deliveries")

    def __init__(self) -> None:
        super().__init__()
        self.queue = MemoryQueue(CAPACITY)
        self.model = Model()
        self.now = 100.0
        self.sent = 0

    def tick(self, seconds: float = 0.0) -> float:
        """Time moves on by a whole number and a fraction that never comes again."""
        self.sent += 1
        self.now = math.floor(self.now + seconds) + 1 + self.sent / 1e6
        self.model.advance(self.now)
        return self.now

    @rule(
        priority=st.sampled_from([0, 0, 0, 5, -1]),
        delay=st.sampled_from([0.0, 0.0, 3.25, 10.5]),
        key=st.sampled_from([None, None, "a", "b"]),
        expires_in=st.sampled_from([math.inf, math.inf, 4.125, 20.0625]),
    )
    def send(self, priority: int, delay: float, key: str | None, expires_in: float) -> None:
        now = self.tick()
        identity = f"m{self.sent}"
        entry = Entry(identity, "body", str, 0.0, None, {}, priority, key, now + expires_in)
        twin = next((r for r in self.model.alive() if key is not None and r.key == key), None)
        if twin is None and len(self.model.alive()) >= CAPACITY:
            with pytest.raises(MailboxFullError):
                self.queue.put(entry, now, delay)
            return
        assert self.queue.put(entry, now, delay) == (twin.id if twin else identity)
        if twin is None:
            record = Record(identity, priority, key, now + expires_in)
            self.model.records.append(record)
            self.model.wait(record, now, delay)

    @rule(target=deliveries, most=st.integers(1, 4), lease=st.sampled_from([0.0, 2.5, 7.75, 30.375]))
    def receive(self, most: int, lease: float) -> object:
        now = self.tick()
        claimed = self.queue.claim(most, now, lease)
        expected = self.model.claimable()[:most]
        assert [c.message_id for c in claimed] == [r.id for r in expected]
        for got, record in zip(claimed, expected, strict=True):
            record.place, record.lease_until, record.receipt = "in flight", now + lease, got.receipt_handle
            record.deliveries += 1
            assert (got.delivery_count, got.attempt) == (record.deliveries, record.charged + 1)
        self.model.advance(now)  # a lease of no time at all is over already
        return multiple(*claimed)

    def holder(self, delivery: Delivery) -> Record | None:
        """The record of a delivery whose lease is held."""
        return next((r for r in self.model.records if r.receipt == delivery.receipt_handle), None)

    @rule(delivery=consumes(deliveries))
    def acknowledge(self, delivery: Delivery) -> None:
        now = self.tick()
        record = self.holder(delivery)
        if record is None:
            with pytest.raises(ReceiptHandleExpiredError):
                self.queue.acknowledge(delivery, now)
            return
        self.queue.acknowledge(delivery, now)
        record.place, record.receipt = "settled", None
        self.model.settled += 1

    @rule(
        delivery=deliveries, how=st.sampled_from([Return(), Return(2.5), Return(charge=False), Return(0, False, True)])
    )
    def give_back(self, delivery: Delivery, how: Return) -> None:
        now = self.tick()
        record = self.holder(delivery)
        if record is None:
            with pytest.raises(ReceiptHandleExpiredError):
                self.queue.give_back(delivery, now, how)
            return
        self.queue.give_back(delivery, now, how)
        record.charged += how.charge
        self.model.wait(record, now, how.delay, front=how.front)

    @rule(delivery=deliveries)
    def bury(self, delivery: Delivery) -> None:
        now = self.tick()
        record = self.holder(delivery)
        if record is None:
            with pytest.raises(ReceiptHandleExpiredError):
                self.queue.bury(delivery, now, Dead("no", "Reject"))
            return
        self.queue.bury(delivery, now, Dead("no", "Reject"))
        self.model.die(record)

    @rule(delivery=deliveries, timeout=st.sampled_from([0.0, 3.5, 40.125]))
    def extend(self, delivery: Delivery, timeout: float) -> None:
        now = self.tick()
        record = self.holder(delivery)
        if record is None:
            with pytest.raises(ReceiptHandleExpiredError):
                self.queue.extend(delivery, now, timeout)
            return
        self.queue.extend(delivery, now, timeout)
        record.lease_until = max(record.lease_until, now + timeout)

    @rule(seconds=st.sampled_from([1.0, 5.0, 60.0]))
    def time_passes(self, seconds: float) -> None:
        self.tick(seconds)

    @rule()
    def look_at_the_clock(self) -> None:
        """What a reaper does; nothing may hang on whether it ran."""
        self.queue.advance(self.now)

    @rule()
    def purge(self) -> None:
        now = self.tick()
        alive = self.model.alive()
        assert self.queue.purge(now) == len(alive)
        for record in alive:
            record.place, record.receipt = "settled", None
        self.model.settled += len(alive)

    @rule(which=st.integers(0, 3))
    def replay(self, which: int) -> None:
        now = self.tick()
        self.queue.advance(now)  # the model decides by what has died until now
        chosen = self.model.dead[which : which + 2]
        if len(self.model.alive()) + len(chosen) > CAPACITY:
            with pytest.raises(MailboxFullError):
                self.queue.replay(chosen, now)
            return
        assert self.queue.replay(chosen, now) == len(chosen)
        for identity in chosen:
            self.model.dead.remove(identity)
            record = next(r for r in self.model.records if r.id == identity)
            record.deliveries = record.charged = 0
            record.expires_at = math.inf
            if any(other.key == record.key for other in self.model.alive()):
                record.key = None  # the key is another's now
            self.model.wait(record, now)

    @rule(count=st.integers(1, 2))
    def discard(self, count: int) -> None:
        self.queue.advance(self.tick())
        chosen = self.model.dead[:count]
        assert self.queue.discard_dead(chosen) == len(chosen)
        for record in self.model.records:
            if record.id in chosen:
                record.place = "settled"
        del self.model.dead[:count]
        self.model.settled += len(chosen)

    @rule(delta=st.sampled_from([-50.0, 1000.0]))
    def another_event_loop(self, delta: float) -> None:
        now = self.tick()
        self.queue.advance(now)
        self.queue.rebase(delta, now + delta)
        self.now += delta
        flying = sorted((r for r in self.model.alive() if r.place == "in flight"), key=lambda r: int(r.receipt or 0))
        for record in self.model.alive():
            record.expires_at += delta
            record.ready_at += delta
        for record in flying:
            record.charged += 1
            self.model.wait(record, self.now)

    @invariant()
    def counts_add_up(self) -> None:
        counts = self.queue.counts(self.now)
        places = [record.place for record in self.model.records]
        assert counts.pending == places.count("waiting")
        assert counts.delayed == places.count("delayed")
        assert counts.in_flight == places.count("in flight")
        assert counts.settled == self.model.settled == places.count("settled")
        assert counts.dead == len(self.model.dead)
        assert counts.waiting + counts.settled + counts.dead == len(self.model.records)
        assert [letter[0].message_id for letter in self.queue.dead_letters(1_000, None)] == self.model.dead

    @invariant()
    def it_knows_what_is_due_next(self) -> None:
        # An extended lease may be looked at too early, never too late; and nothing is due where nothing can be.
        due = min((self.model.due(record) for record in self.model.alive()), default=math.inf)
        assert self.queue.next_due() <= due
        if due == math.inf:
            assert self.queue.next_due() == math.inf


TestQueue = QueueMachine.TestCase
TestQueue.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True)
