"""The limiters of the in-memory queue: which messages wait at them, and when these become ready."""

from __future__ import annotations

import math
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Final

from mainspring.mailbox.limiters import ALL_TASKS, Blocks, LimitChange, Limiter, LimitState, TaskLimits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mainspring.mailbox.memory.queue import QueuedMessage, Timers
    from mainspring.policies import Rate

KEY: Final = 1
TASK: Final = 2
"""Which permits a message has (:attr:`QueuedMessage.permits`): of its key, and of its task."""

SWEEP_FROM: Final = 1_024
"""Idle limiters of keys are dropped only above this number of keys."""


class LimiterQueue(Limiter):
    """A limiter with its bounds, and the messages that wait at it. ``timer`` is set while it is to open at a known instant."""

    __slots__ = ("_gone", "_lines", "_tie", "key", "most", "permit", "rate", "task", "timer", "waiting")

    def __init__(self, task: TaskLimiters, key: str | None) -> None:
        super().__init__()
        self.task = task
        self.key = key
        self.permit = TASK if key is None else KEY
        self.most, self.rate = task.bounds(key)
        self.waiting = 0
        """How many messages wait."""
        self.timer = 0
        self._lines: dict[int, list[tuple[float, int, QueuedMessage]]] = {}
        """For each priority a heap of places. A message that has left from the middle stays until it comes to the head."""
        self._gone = 0
        self._tie = 0

    def add(self, entry: QueuedMessage) -> None:
        """Let a message wait."""
        self._tie += 1
        entry.waits_at = self
        self.waiting += 1
        heappush(self._lines.setdefault(entry.priority, []), (entry.order, self._tie, entry))

    def lose_one(self) -> None:
        """Note that a waiting message has left from the middle."""
        self.waiting -= 1
        self._gone += 1
        if self._gone > SWEEP_FROM and self._gone > self.waiting:
            for line in self._lines.values():
                line[:] = [item for item in line if item[2].waits_at is self]
                heapify(line)
            self._gone = 0

    def first_of(self, priority: int) -> QueuedMessage | None:
        """Return the message of a priority that is next, or None. Drop what has left before it."""
        line = self._lines.get(priority)
        while line:
            entry = line[0][2]
            if entry.waits_at is self:
                return entry
            heappop(line)
            self._gone -= 1
        return None

    def take(self) -> QueuedMessage:
        """Take out the message that is next, where any waits."""
        while True:
            priority = max(self._lines)
            line = self._lines[priority]
            while line:
                entry = heappop(line)[2]
                if entry.waits_at is self:
                    entry.waits_at = None
                    self.waiting -= 1
                    return entry
                self._gone -= 1
            del self._lines[priority]

    @property
    def has_room(self) -> bool:
        """True if fewer are in flight than it allows."""
        return self.most is None or self.used - self.unclaimed < self.most

    def __iter__(self) -> Iterator[QueuedMessage]:
        for _, line in sorted(self._lines.items(), reverse=True):
            yield from (entry for *_, entry in sorted(line) if entry.waits_at is self)


class TaskLimiters:
    """The limits of one task, with its limiter and those of its keys."""

    __slots__ = (
        "_sweep_at",
        "concurrency",
        "has_rate",
        "keys",
        "limits",
        "limits_keys",
        "own",
        "paused",
        "task",
    )

    def __init__(self, task: str) -> None:
        self.task = task
        self.limits = TaskLimits()
        self.paused = False
        self.concurrency: int | None = None
        self.keys: dict[str, LimiterQueue] = {}
        self.own = LimiterQueue(self, None)
        self.note_change()
        self._sweep_at = SWEEP_FROM

    @property
    def is_set(self) -> bool:
        """True if it limits anything."""
        return self.paused or self.concurrency is not None or self.limits != TaskLimits()

    @property
    def most(self) -> int | None:
        """The concurrency that holds; 0 while it is paused."""
        if self.paused:
            return 0
        return self.limits.concurrency if self.concurrency is None else self.concurrency

    def note_change(self) -> None:
        """Work out what follows from the limits, for each message to find it."""
        self.limits_keys = self.limits.limits_keys
        self.has_rate = self.limits.rate is not None or self.limits.key_rate is not None
        for queue in self.queues():
            queue.most, queue.rate = self.bounds(queue.key)

    def bounds(self, key: str | None) -> tuple[int | None, Rate | None]:
        """Return the concurrency and the rate of the limiter of a key, or (None) of its own."""
        limits = self.limits
        return (self.most, limits.rate) if key is None else (limits.key_concurrency, limits.key_rate)

    def queues(self) -> list[LimiterQueue]:
        """Return its limiters, its own last."""
        return [*self.keys.values(), self.own]

    def lacks_key(self, entry: QueuedMessage) -> bool:
        """True if ``entry`` has yet to get the permit of its key, which comes first."""
        return self.limits_keys and entry.key is not None and not entry.permits & KEY

    def key_queue(self, key: str, now: float) -> LimiterQueue:
        """Return the limiter of a key, made where there is none."""
        found = self.keys.get(key)
        if found is None:
            if len(self.keys) >= self._sweep_at:
                for each in [each for each in self.keys.values() if each.is_idle(now) and not each.waiting]:
                    del self.keys[each.key or ""]
                self._sweep_at = max(SWEEP_FROM, 2 * len(self.keys))
            found = self.keys[key] = LimiterQueue(self, key)
        return found


class MemoryLimits:
    """The limits of one queue. ``make_ready`` puts a message that has its permits where it is claimed."""

    def __init__(self, timers: Timers, make_ready: Callable[[QueuedMessage], None]) -> None:
        self._timers = timers
        self._make_ready = make_ready
        self.tasks: dict[str, TaskLimiters] = {}
        self.waiting = 0
        """Messages that wait at a limiter."""
        self._has_rates = False

    @property
    def is_paused(self) -> bool:
        """True if the whole mailbox is paused."""
        return ALL_TASKS in self.tasks and self.tasks[ALL_TASKS].paused

    def room(self, in_flight: int) -> float:
        """Return how many more messages may be in flight by the limits of the whole mailbox."""
        whole = self.tasks.get(ALL_TASKS)
        most = None if whole is None else whole.most
        return math.inf if most is None else most - in_flight

    def change(self, changes: list[LimitChange], now: float) -> None:
        """Change limits, and let become ready what may."""
        for change in changes:
            task = self.tasks.get(change.task) or TaskLimiters(change.task)
            self.tasks[change.task] = task
            if change.declared is not None:
                task.limits = change.declared
            if change.paused is not None:
                task.paused = change.paused
            if change.concurrency is not None:
                task.concurrency = change.concurrency or None
            task.note_change()
            for queue in task.queues():
                if queue.timer:
                    self._timers.drop_timer(queue)
                self.let_in(queue, now)
            if not task.is_set and not task.own.used and not task.keys:
                del self.tasks[change.task]
        self._has_rates = any(task.has_rate for task in self.tasks.values())

    def states(self, in_flight: int) -> list[LimitState]:
        """Return the limits of each task."""
        return [
            LimitState(
                task.task,
                task.limits,
                task.paused,
                task.concurrency,
                in_flight if task.task == ALL_TASKS else task.own.used,
                sum(queue.waiting for queue in task.queues()),
            )
            for _, task in sorted(self.tasks.items())
            if task.is_set
        ]

    def messages(self) -> Iterator[QueuedMessage]:
        """Yield the messages that wait at limiters."""
        for task in self.tasks.values():
            for queue in (task.own, *task.keys.values()):
                yield from queue

    # ------------------------------------------------------------------------------------------------------- messages

    def first_place(self, entry: QueuedMessage) -> float:
        """Return the place of the first message that waits at the limiter of the entry's task, or infinity."""
        task = self.tasks.get(entry.task or "")
        first = None if task is None else task.own.first_of(entry.priority)
        return math.inf if first is None else first.order

    def enter(self, task: TaskLimiters, entry: QueuedMessage, now: float) -> None:
        """Let a message that is due get its permits: it becomes ready, or waits at a limiter."""
        if task.lacks_key(entry) and not self._gets(entry, task.key_queue(entry.key or "", now), now):
            return
        if entry.permits & TASK or self._gets(entry, task.own, now):
            self._make_ready(entry)

    def _gets(self, entry: QueuedMessage, queue: LimiterQueue, now: float) -> bool:
        """True if a message gets the permit of a limiter at once. Else it waits there."""
        if queue.waiting or queue.opens_at(queue.most, queue.rate, now) > now:
            queue.add(entry)
            self.waiting += 1
            self.let_in(queue, now)
            return False
        queue.give()
        entry.permits |= queue.permit
        return True

    def admit(self, task: TaskLimiters, entry: QueuedMessage, now: float) -> bool:
        """True if ``entry``, which is ready, is claimed. Else it waits at its limiter.

        It may lack a permit, as the limits are newer than it, or as many may be in flight as the limits now allow.
        """
        own, of_key = task.own, task.keys.get(entry.key or "") if entry.permits & KEY else None
        has_key = not task.lacks_key(entry) if of_key is None else of_key.has_room
        if has_key and entry.permits & TASK and own.has_room:
            own.claimed(own.rate, now)
            if of_key is not None:
                of_key.claimed(of_key.rate, now)
            return True
        self.left(entry, now, was_claimed=False, keeps=KEY if has_key else 0)
        self.enter(task, entry, now)
        return False

    def claimed(self, entries: list[QueuedMessage], now: float) -> None:
        """Let in messages behind the claimed ones: the rate may be open for the next message."""
        if not self._has_rates:
            return
        for entry in entries:
            task = None if entry.task is None else self.tasks.get(entry.task)
            if task is not None and task.has_rate:
                for queue in self._held(task, entry, entry.permits):
                    if queue.rate is not None:
                        self.let_in(queue, now)

    def left(self, entry: QueuedMessage, now: float, *, was_claimed: bool, keeps: int = 0) -> None:
        """End the permits of a message except ``keeps``, and give them to the messages behind it."""
        task = None if entry.task is None else self.tasks.get(entry.task)
        if task is None:
            return
        ended = self._held(task, entry, entry.permits & ~keeps)
        entry.permits &= keeps
        for queue in ended:
            queue.end(was_claimed=was_claimed)
            if queue.waiting:
                self.let_in(queue, now)

    def due_again(self, entry: QueuedMessage) -> None:
        """Note that a message which kept a permit is to be claimed again."""
        self._count_unclaimed(entry, 1)

    def withdraw(self, entry: QueuedMessage, now: float, least: Blocks) -> None:
        """End the permits of a pending message that is put off (RETRY) or has expired (DEAD).

        If it was delivered before, it keeps that of its key where such a message does.
        """
        was_delivered = entry.delivery_count > 0
        self.left(entry, now, was_claimed=False, keeps=self.keeps(entry, least) if was_delivered else 0)
        self._count_unclaimed(entry, -1)

    def _count_unclaimed(self, entry: QueuedMessage, change: int) -> None:
        task = None if entry.task is None else self.tasks.get(entry.task)
        if task is not None:
            for queue in self._held(task, entry, entry.permits):
                queue.unclaimed += change

    def lost(self, entry: QueuedMessage) -> None:
        """Note that a message that waited at a limiter is gone from there."""
        queue = entry.waits_at
        if queue is not None:
            entry.waits_at = None
            queue.lose_one()
            self.waiting -= 1

    def keeps(self, entry: QueuedMessage, least: Blocks) -> int:
        """Return the permit that a retried (RETRY) or dead (DEAD) message keeps."""
        task = None if entry.task is None else self.tasks.get(entry.task)
        blocks = Blocks.RUNNING if task is None else task.limits.blocks
        return KEY if blocks is Blocks.DEAD or blocks is least else 0

    def clear(self, dead: Iterator[QueuedMessage], now: float) -> None:
        """Forget all messages but dead ones, which may have permits. What is spent of a rate stays spent."""
        self.waiting = 0
        for task in self.tasks.values():
            queues, task.own, task.keys = task.queues(), LimiterQueue(task, None), {}
            for queue in queues:
                if queue.spent_until > now:
                    anew = task.own if queue.key is None else task.key_queue(queue.key, now)
                    anew.spent_until = queue.spent_until
        for entry in dead:
            task_of = None if entry.task is None or not entry.permits else self.tasks.get(entry.task)
            if task_of is not None and entry.key is not None:
                task_of.key_queue(entry.key, now).used += 1

    def _held(self, task: TaskLimiters, entry: QueuedMessage, permits: int) -> tuple[LimiterQueue, ...]:
        """Return the limiters of these permits of ``entry``."""
        of_key = task.keys.get(entry.key or "") if permits & KEY else None
        if of_key is None:
            return (task.own,) if permits & TASK else ()
        return (of_key, task.own) if permits & TASK else (of_key,)

    def let_in(self, queue: LimiterQueue, now: float) -> None:
        """Give permits while the limiter is open, and set a timer for when it will be."""
        task = queue.task
        while queue.waiting:
            opens_at = queue.opens_at(queue.most, queue.rate, now)
            if opens_at > now:
                if opens_at != math.inf and not queue.timer:
                    self._timers.set_timer(queue, opens_at)
                return
            entry = queue.take()
            self.waiting -= 1
            # It may not hold the permit of its task while it waits for that of its key.
            if queue is not task.own or not task.lacks_key(entry):
                queue.give()
                entry.permits |= queue.permit
            self.enter(task, entry, now)
