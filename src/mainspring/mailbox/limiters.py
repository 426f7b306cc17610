"""Limits on what may run at once in the whole fleet, and the decisions of the limiters that keep them.

A message that names a task (:attr:`Envelope.task`) has up to two limiters: the limiter of its key, if the task has limits for
each key, and the limiter of the task. It needs a permit of each, in this order, before it is *ready*. Only a ready message is
claimed. Until then it *waits at* a limiter, and counts as pending. So a wait for a limit costs no delivery, no attempt and no
poll.

- A permit is given while fewer than ``concurrency`` are out, and, with a rate, while the rate has room (see
  :class:`Limiter`). Of the messages that wait, the first by priority, then by place, gets it.
- A permit ends when the message is settled, or stops being ready in another way. With :attr:`Blocks.RETRY` a message that
  waits for its next attempt keeps the permit of its key. With :attr:`Blocks.DEAD` a dead letter keeps it as well. A released
  message always keeps the permit of its key, as it has its old place again.
- A message never holds the permit of its task while it waits for the permit of its key. Otherwise a change of limits could let
  two messages wait for each other. A message may reach the limiter of its task without a permit of its key that is needed by
  now. Then the limiter of the task lets it wait at the limiter of the key.
- A limiter that is paused gives no permit. Where limits became narrower, ready messages may have more permits than are allowed
  now. So a claim takes a ready message only if fewer are in flight (permits that are out and claimed) than its limits allow.
  Otherwise it takes the permit back and lets the message wait at its limiter. The same holds for a ready message that lacks a
  permit, as the limits are newer than its send. A message in flight always goes on. Limits do not count a message that was
  claimed before its task had limits.
- A message that keeps the permit of its key for a retry counts as unclaimed again once it is due. It keeps the permit when it
  is rescheduled, before it is due and afterwards, and loses it when it is cancelled.
- A message that expires is a dead letter. With :attr:`Blocks.DEAD` it keeps the permit of its key if it was delivered before:
  its work may be half done. A message that was never delivered keeps none, as nothing of it was begun.
- A purge ends all permits but those of dead letters. What is spent of a rate stays spent: it protects what the messages call.

Fair shares need no permit. The place of a message with a key goes by the places of its key, not by the time of the send. It is
one step behind the last message of its key, or at the place of the first message in line if that is later. The first message
in line is the first ready message, or the first message at the limiter of the same task, whichever is earlier. A step is
``1 / weight``. So keys take turns, and a key with many messages delays another key by one message (start-time fair queueing).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from mainspring.policies import Rate  # noqa: TC001 - a web framework resolves the annotations of LimitState

ALL_TASKS: Final = ""
"""The task in a :class:`LimitChange` that means the whole mailbox: it can be paused, and have a concurrency."""


class Blocks(StrEnum):
    """Which message keeps the permit of its key, so that later messages of the key wait."""

    RUNNING = "running"
    RETRY = "retry"
    """Also a message that waits for its next attempt."""
    DEAD = "dead"
    """Also a dead letter, until it is replayed and done, or purged."""


@dataclass(frozen=True, slots=True)
class TaskLimits:
    """What the messages of one task may do at once in the whole fleet. None is no limit."""

    concurrency: int | None = None
    """How many are ready or in flight."""
    rate: Rate | None = None
    """How many are claimed in a time."""
    key_concurrency: int | None = None
    key_rate: Rate | None = None
    blocks: Blocks = Blocks.RUNNING

    @property
    def limits_keys(self) -> bool:
        """True if each key has a limiter."""
        return self.key_concurrency is not None or self.key_rate is not None


@dataclass(frozen=True, slots=True)
class LimitChange:
    """A change of the limits of one task, or (:data:`ALL_TASKS`) of the whole mailbox. None leaves a part as it is."""

    task: str
    declared: TaskLimits | None = None
    """What the code says. For the whole mailbox, only its concurrency counts."""
    paused: bool | None = None
    concurrency: int | None = None
    """The concurrency that overrides the declared one of the task; 0 ends the override."""


@dataclass(frozen=True, slots=True)
class LimitState:
    """The limits of one task as the store has them."""

    task: str
    limits: TaskLimits
    """The limits that were declared last."""
    paused: bool = False
    concurrency: int | None = None
    """The concurrency that overrides the declared one, or None."""
    running: int = 0
    """Permits of the task that are out: messages that are ready or in flight. Of the whole mailbox, those in flight."""
    waiting: int = 0
    """Messages that wait at a limiter of the task. A message that was pending before the limit is counted once a claim has
    found it."""

    @property
    def most(self) -> int | None:
        """The concurrency that holds."""
        return self.limits.concurrency if self.concurrency is None else self.concurrency


@dataclass(slots=True)
class Limiter:
    """The permits of one limiter: pure decisions, with instants (seconds) from the caller's clock.

    A rate is a generic cell rate algorithm: each claim spends an interval (``per / limit``), up to ``burst`` intervals may be
    spent ahead. A permit that is out and unclaimed counts as if it were spent, so that every message that is ready may be
    claimed at once, however long it has been ready.
    """

    used: int = 0
    """Permits that are out."""
    unclaimed: int = 0
    """Those among them whose messages have not been claimed since they got it."""
    spent_until: float = -math.inf
    """The instant up to which the rate is spent."""

    def opens_at(self, most: int | None, rate: Rate | None, now: float) -> float:
        """Return when it may give the next permit: ``now`` or before, later, or infinity: when one ends or is claimed."""
        if most is not None and self.used >= most:
            return math.inf
        if rate is None:
            return now
        if self.unclaimed >= rate.burst:
            return math.inf
        return max(self.spent_until, now) + (self.unclaimed - rate.burst + 1) * rate.interval

    def give(self) -> None:
        """Give a permit."""
        self.used += 1
        self.unclaimed += 1

    def claimed(self, rate: Rate | None, now: float) -> None:
        """Note that a message with a permit was claimed."""
        self.unclaimed -= 1
        if rate is not None:
            self.spent_until = max(self.spent_until, now) + rate.interval

    def end(self, *, was_claimed: bool) -> None:
        """Take a permit back."""
        self.used -= 1
        if not was_claimed:
            self.unclaimed -= 1

    def is_idle(self, now: float) -> bool:
        """True if it has nothing to remember: a new one would decide the same."""
        return not self.used and self.spent_until <= now
