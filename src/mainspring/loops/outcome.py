"""What becomes of a delivery once its handler has ended: decided here, done by the worker."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from mainspring.errors import Reject, Retry
from mainspring.mailbox.message import Ack, Dead, Return, Settlement
from mainspring.scope import lone_error

if TYPE_CHECKING:
    from random import Random

    from mainspring.policies import DeadLetterPolicy, RetryPolicy


class Cause(StrEnum):
    """Why the engine cancelled a handler."""

    TIMEOUT = "timeout"
    STALLED = "stalled"
    LEASE_LOST = "lease lost"
    SHUTDOWN = "shutdown"
    CANCELLED = "cancelled"
    """Somebody cancelled the message by its id."""


class Outcome(StrEnum):
    """How a delivery ended, as counted and shown."""

    ACKNOWLEDGED = "acknowledged"
    RETRIED = "retried"
    RELEASED = "released"
    DEAD_LETTERED = "dead_lettered"
    LOST = "lost"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Decision:
    """The settlement to write (None: nothing may be written any more) and what to call it."""

    outcome: Outcome
    settlement: Settlement | None
    error: BaseException | None = None


DONE = Decision(Outcome.ACKNOWLEDGED, Ack())
RELEASED = Decision(Outcome.RELEASED, Return(charge=False, front=True))
LOST = Decision(Outcome.LOST, None)
CANCELLED = Decision(Outcome.CANCELLED, None)


def after_failure(
    error: BaseException,
    *,
    attempt: int,
    delivery_count: int,
    retry: RetryPolicy,
    dead_letter: DeadLetterPolicy,
    rng: Random,
) -> Decision:
    """What a handler's error means for its message.

    ``Reject`` is the end. ``Retry`` says its own delay and whether it counts; it is an instruction, so that the kinds of
    errors which the dead-letter policy names do not touch it. Any other error counts, waits by the retry policy, and is the
    end when the dead-letter policy says so; one that the policy excludes never counts, so that its attempts cannot run out.
    A group of one error, as a handler's own task group raises it, means that error.
    """
    error = lone_error(error)
    if isinstance(error, Reject):
        return Decision(Outcome.DEAD_LETTERED, Dead.of(error), error)
    if isinstance(error, Retry):
        charge = error.charge
        dead = charge and attempt >= dead_letter.max_attempts
    else:
        charge = not _excluded(error, dead_letter)
        dead = charge and dead_letter.is_dead(attempt, error)
    if dead:
        return Decision(Outcome.DEAD_LETTERED, Dead.of(error), error)
    if isinstance(error, Retry) and error.delay is not None:
        delay = error.delay
    else:
        delay = retry.delay(attempt if charge else delivery_count, rng)
    return Decision(Outcome.RETRIED, Return(delay, charge), error)


def as_settled(settlement: Settlement) -> Decision:
    """What to call a delivery that its handler has settled by itself, however it ended afterwards."""
    if isinstance(settlement, Ack):
        return DONE
    if isinstance(settlement, Dead):
        return Decision(Outcome.DEAD_LETTERED, settlement)
    return Decision(Outcome.RELEASED if settlement.front else Outcome.RETRIED, settlement)


def before_start(attempt: int, dead_letter: DeadLetterPolicy) -> Decision | None:
    """Whether a message is given up unrun: its attempts are used up by leases that ran out, as of workers that died.

    Failures and stalls end a message when they happen; so more attempts than allowed can only come from lost leases.
    """
    if attempt <= dead_letter.max_attempts:
        return None
    used = attempt - 1
    dead = Dead(
        f"the leases of {used} attempts ran out: their workers died or lost the store (max_attempts is"
        f" {dead_letter.max_attempts})",
        "LeaseExpired",
    )
    return Decision(Outcome.DEAD_LETTERED, dead)


def _excluded(error: BaseException, policy: DeadLetterPolicy) -> bool:
    return isinstance(error, policy.exclude) and not isinstance(error, policy.include)
