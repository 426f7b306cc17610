"""A state machine of Hypothesis that uses a queue with limits in any way; the tests of the stores give it theirs."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from mainspring.errors import ReceiptHandleExpiredError
from mainspring.mailbox.limiters import ALL_TASKS, Blocks, LimitChange, TaskLimits
from mainspring.mailbox.memory.limits import KEY
from mainspring.mailbox.message import CancelOutcome, Dead, Envelope, Nack
from mainspring.policies import Rate

TASKS = ["t", "u"]
KEYS = [None, "a", "b"]
DEAD = Dead("broken", "Error")


class LimitsMachine(RuleBasedStateMachine):
    """Sends, claims and settles calls of two tasks with three keys, while their limits change.

    Claims keep the limits, and no message is lost.
    """

    deliveries = Bundle("deliveries")

    def __init__(self) -> None:
        super().__init__()
        self.queue: Any = self.new_queue()
        self.now = 100.0
        self.sent = 0
        self.settled = 0
        self.limits = {task: TaskLimits() for task in TASKS}
        self.paused: set[str] = set()
        self.held: dict[str, Any] = {}

    def new_queue(self) -> Any:
        """Return the queue, with the methods of :class:`MemoryQueue`."""
        raise NotImplementedError

    @initialize(blocks=st.sampled_from(list(Blocks)), key_rate=st.sampled_from([None, Rate(1, 2)]))
    def limit_keys(self, blocks: Blocks, key_rate: Rate | None) -> None:
        self.limit("t", None, None, 1, key_rate, blocks)
        for _ in range(3):
            self.send("t", "a", 1.0, 0, 0.0, None)

    def in_flight(self) -> list[Any]:
        """Return the deliveries whose leases hold."""
        self.held = {name: each for name, each in self.held.items() if each.lease_until > self.now}
        return list(self.held.values())

    @rule(seconds=st.sampled_from([0.0, 0.25, 1.0, 7.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule(
        task=st.sampled_from([None, *TASKS]),
        key=st.sampled_from(KEYS),
        weight=st.sampled_from([1.0, 3.0]),
        priority=st.sampled_from([0, 0, 1]),
        delay=st.sampled_from([0.0, 0.0, 2.0]),
        expires_in=st.sampled_from([None, None, 5.0]),
    )
    def send(
        self, task: str | None, key: str | None, weight: float, priority: int, delay: float, expires_in: float | None
    ) -> None:
        self.sent += 1
        key = None if task is None else key
        envelope = Envelope(f"m{self.sent}", b"{}", delay, None, None, priority, {}, expires_in, task, key, weight)
        self.queue.put([envelope], self.now)

    @rule(
        task=st.sampled_from(TASKS),
        concurrency=st.sampled_from([None, 1, 2]),
        rate=st.sampled_from([None, Rate(1), Rate(4, 8, burst=2)]),
        key_concurrency=st.sampled_from([None, 1, 2]),
        key_rate=st.sampled_from([None, None, Rate(1, 2)]),
        blocks=st.sampled_from(list(Blocks)),
    )
    def limit(
        self,
        task: str,
        concurrency: int | None,
        rate: Rate | None,
        key_concurrency: int | None,
        key_rate: Rate | None,
        blocks: Blocks,
    ) -> None:
        self.limits[task] = TaskLimits(concurrency, rate, key_concurrency, key_rate, blocks)
        self.queue.advance(self.now)
        self.queue.limits.change([LimitChange(task, self.limits[task])], self.now)

    @rule(task=st.sampled_from([*TASKS, ALL_TASKS]), paused=st.booleans())
    def pause(self, task: str, paused: bool) -> None:
        (self.paused.add if paused else self.paused.discard)(task)
        self.queue.advance(self.now)
        self.queue.limits.change([LimitChange(task, paused=paused)], self.now)

    @rule(target=deliveries, most=st.integers(1, 4), lease=st.sampled_from([0.5, 3.0, 30.0]))
    def claim(self, most: int, lease: float) -> object:
        before = self.in_flight()
        claimed = self.queue.claim(most, self.now, lease)
        assert not claimed or ALL_TASKS not in self.paused
        assert all(each.task not in self.paused for each in claimed)
        self.held |= {each.receipt_handle: each for each in claimed}
        for task, limits in self.limits.items():
            new = [each for each in claimed if each.task == task]
            counted = [each for each in before if each.task == task and each.permits]
            running = len(new) + len(counted)
            assert not new or limits.concurrency is None or running <= limits.concurrency
            keys = Counter(each.key for each in (*new, *counted) if each.permits & KEY)
            for key in {each.key for each in new} - {None}:
                assert limits.key_concurrency is None or keys[key] <= limits.key_concurrency
        return multiple(*claimed)

    def settle(self, delivery: Any, how: object) -> bool:
        """End a delivery. True if its lease held."""
        try:
            match how:
                case Nack():
                    self.queue.nack(delivery, self.now, how)
                case Dead():
                    self.queue.dead_letter(delivery, self.now, how)
                case _:
                    for error in self.queue.acknowledge([delivery], self.now).values():
                        raise error
                    self.settled += 1
        except ReceiptHandleExpiredError:
            assert delivery.receipt_handle not in {each.receipt_handle for each in self.in_flight()}
            return False
        self.held.pop(delivery.receipt_handle, None)
        return True

    @rule(delivery=consumes(deliveries))
    def acknowledge(self, delivery: Any) -> None:
        self.settle(delivery, None)

    @rule(delivery=consumes(deliveries), delay=st.sampled_from([0.0, 2.0]), front=st.booleans())
    def nack(self, delivery: Any, delay: float, front: bool) -> None:
        self.settle(delivery, Nack(0.0 if front else delay, charge=not front, front=front))

    @rule(delivery=consumes(deliveries), task=st.sampled_from(TASKS))
    def set_task(self, delivery: Any, task: str) -> None:
        is_held = delivery.receipt_handle in {each.receipt_handle for each in self.in_flight()}
        try:
            is_released = self.queue.set_task(delivery, self.now, task)
        except ReceiptHandleExpiredError:
            assert not is_held
            return
        if is_released:
            self.held.pop(delivery.receipt_handle)

    @rule(delivery=consumes(deliveries))
    def die(self, delivery: Any) -> None:
        self.settle(delivery, DEAD)

    @rule(number=st.integers(1, 60))
    def cancel(self, number: int) -> None:
        outcome = self.queue.cancel(f"m{number}", self.now).outcome
        self.settled += outcome is not CancelOutcome.UNKNOWN
        self.held = {name: each for name, each in self.held.items() if each.message_id != f"m{number}"}

    @rule(number=st.integers(1, 60), delay=st.sampled_from([0.0, 3.0]))
    def reschedule(self, number: int, delay: float) -> None:
        self.queue.reschedule(f"m{number}", self.now, delay)

    @rule()
    def replay(self) -> None:
        self.queue.replay(None, self.now)

    @rule()
    def purge_dead(self) -> None:
        self.settled += self.queue.purge_dead(None, self.now)

    @rule()
    def purge(self) -> None:
        self.settled += self.queue.purge(self.now)
        self.held.clear()

    @invariant()
    def nothing_is_lost(self) -> None:
        counts = self.queue.counts(self.now)
        assert counts.settled == self.settled
        assert counts.waiting + counts.dead + counts.settled == self.sent

    def teardown(self) -> None:
        """Within the limits, all that waits is claimed in the end: no permit is lost."""
        self.settled += self.queue.purge_dead(None, self.now)
        self.queue.limits.change([LimitChange(task, paused=False) for task in (*TASKS, ALL_TASKS)], self.now)
        for _ in range(200):
            self.now += 100.0
            self.queue.acknowledge(self.queue.claim(10, self.now, math.inf), self.now)
            self.queue.purge_dead(None, self.now)
        assert self.queue.waiting == 0, f"{self.queue.counts(self.now)} are left, of {self.queue.limits.states(0)}"


class AliasMachine(RuleBasedStateMachine):
    """Sends calls of an ordered task by an alias that is ordered too: those of a key run in the order of the sends."""

    deliveries = Bundle("deliveries")

    def __init__(self) -> None:
        super().__init__()
        self.queue: Any = self.new_queue()
        self.sent = 0
        self.unfinished: dict[str, list[str]] = {"a": [], "b": []}
        for task in TASKS:
            limits = TaskLimits(key_concurrency=1, blocks=Blocks.RETRY)
            self.queue.limits.change([LimitChange(task, limits)], 1.0)

    def new_queue(self) -> Any:
        """Return the queue, with the methods of :class:`MemoryQueue`."""
        raise NotImplementedError

    @rule(key=st.sampled_from([None, "a", "b"]), weight=st.sampled_from([1.0, 3.0]))
    def send(self, key: str | None, weight: float) -> None:
        self.sent += 1
        task = None if key is None else "u"
        name = f"m{self.sent}"
        self.queue.put([Envelope(name, b"{}", 0.0, None, None, 0, {}, None, task, key, weight)], 1.0)
        if key is not None:
            self.unfinished[key].append(name)

    @rule(target=deliveries, most=st.integers(1, 3))
    def claim(self, most: int) -> object:
        claimed = self.queue.claim(most, 1.0, math.inf)
        for each in claimed:
            assert each.task != "t" or each.message_id == self.unfinished[each.key][0]
        return multiple(*claimed)

    @rule(delivery=consumes(deliveries), is_released=st.booleans())
    def go_on(self, delivery: Any, is_released: bool) -> None:
        if is_released:
            self.queue.nack(delivery, 1.0, Nack(charge=False, front=True))
        elif delivery.task == "u":
            assert self.queue.set_task(delivery, 1.0, "t")
        else:
            assert not self.queue.acknowledge([delivery], 1.0)
            if delivery.task is not None:
                self.unfinished[delivery.key].remove(delivery.message_id)
