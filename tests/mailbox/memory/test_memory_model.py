"""The in-memory queue, without mailbox and event loop, against the model that all mailboxes are compared with."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from mailbox_model import Model, Record
from mainspring.errors import MailboxFullError, ReceiptHandleExpiredError
from mainspring.mailbox.memory.queue import MemoryQueue
from mainspring.mailbox.message import ClaimedMessage, Dead, Envelope, Nack

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.slow

CAPACITY = 12


class QueueMachine(RuleBasedStateMachine):
    """Drives both and compares. Instants are distinct, so that the order of things due is never a matter of taste."""

    deliveries = Bundle("deliveries")

    def __init__(self) -> None:
        super().__init__()
        self.queue = MemoryQueue(CAPACITY)
        self.model = Model(CAPACITY)
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
        envelope = Envelope(identity, "body", delay, None, key, priority, {}, expires_in)
        record = Record(identity, None, priority, key, now + expires_in)
        try:
            expected = self.model.send([record], now, delay)
        except MailboxFullError:
            with pytest.raises(MailboxFullError):
                self.queue.put([envelope], now)
        else:
            assert self.queue.put([envelope], now) == expected

    @rule(target=deliveries, most=st.integers(1, 4), lease=st.sampled_from([0.0, 2.5, 7.75, 30.375]))
    def receive(self, most: int, lease: float) -> object:
        now = self.tick()
        claimed = self.queue.claim(most, now, lease)
        expected = self.model.claim([(c.message_id, c.receipt_handle) for c in claimed], most, now, lease)
        for got, record in zip(claimed, expected, strict=True):
            assert (got.delivery_count, got.attempt) == (record.deliveries, record.charged + 1)
        self.model.advance(now)  # a lease of no time at all is over already
        return multiple(*claimed)

    def both(self, theirs: Callable[[], object], ours: Callable[[], object]) -> None:
        """Both do it, or both refuse it, as the lease is over."""
        try:
            ours()
        except ReceiptHandleExpiredError:
            with pytest.raises(ReceiptHandleExpiredError):
                theirs()
        else:
            theirs()

    @rule(delivery=consumes(deliveries))
    def acknowledge(self, delivery: ClaimedMessage) -> None:
        now = self.tick()
        receipt = delivery.receipt_handle

        def theirs() -> None:
            for error in self.queue.acknowledge([delivery], now).values():
                raise error

        self.both(theirs, lambda: self.model.acknowledge(receipt, now))

    @rule(delivery=deliveries, how=st.sampled_from([Nack(), Nack(2.5), Nack(charge=False), Nack(0, False, True)]))
    def give_back(self, delivery: ClaimedMessage, how: Nack) -> None:
        now = self.tick()

        def ours() -> None:
            self.model.give_back(delivery.receipt_handle, now, how.delay, charge=how.charge, front=how.front)

        self.both(lambda: self.queue.nack(delivery, now, how), ours)

    @rule(delivery=deliveries)
    def bury(self, delivery: ClaimedMessage) -> None:
        now = self.tick()
        dead, receipt = Dead("no", "Reject"), delivery.receipt_handle
        self.both(lambda: self.queue.dead_letter(delivery, now, dead), lambda: self.model.bury(receipt, now, "Reject"))

    @rule(delivery=deliveries, timeout=st.sampled_from([0.0, 3.5, 40.125]))
    def extend(self, delivery: ClaimedMessage, timeout: float) -> None:
        now = self.tick()
        receipt = delivery.receipt_handle
        self.both(lambda: self.queue.extend(delivery, now, timeout), lambda: self.model.extend(receipt, now, timeout))

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
        assert self.queue.purge(now) == self.model.purge(now)

    @rule(which=st.integers(0, 3))
    def replay(self, which: int) -> None:
        now = self.tick()
        chosen = self.dead_at(now)[which : which + 2]
        try:
            expected = self.model.replay(chosen, now)
        except MailboxFullError:
            with pytest.raises(MailboxFullError):
                self.queue.replay(chosen, now)
        else:
            assert self.queue.replay(chosen, now) == expected

    @rule(count=st.integers(1, 2))
    def discard(self, count: int) -> None:
        now = self.tick()
        chosen = self.dead_at(now)[:count]
        assert self.queue.purge_dead(chosen, now) == self.model.discard(chosen, now)

    def dead_at(self, now: float) -> list[str]:
        """What has died until now, in order: both choose by that."""
        self.queue.advance(now)
        self.model.see_dead([letter[0].message_id for letter in self.queue.dead.page(1_000, None)])
        return list(self.model.dead)

    @invariant()
    def counts_add_up(self) -> None:
        counts = self.queue.counts(self.now)
        assert counts == self.model.counts()
        assert counts.waiting + counts.settled + counts.dead == len(self.model.records)
        self.dead_at(self.now)

    @invariant()
    def it_knows_what_is_due_next(self) -> None:
        # An extended lease may be looked at too early, never too late; and nothing is due where nothing can be.
        due = self.model.next_due()
        assert self.queue.next_due() <= due
        if due == math.inf:
            assert self.queue.next_due() == math.inf


TestQueue = QueueMachine.TestCase
TestQueue.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True)
