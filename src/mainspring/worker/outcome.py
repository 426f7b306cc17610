"""What becomes of a delivery once its handler has ended: decided here, done by the worker."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from mainspring.errors import (
    ConfigError,
    InvalidParameterError,
    Reject,
    ReplyError,
    ReplyNotAvailableError,
    ResultTooLargeError,
    Retry,
)
from mainspring.mailbox.history import LEASE_EXPIRED, crashes_before, read_history
from mainspring.mailbox.message import Ack, Dead, Keep, Nack, Settlement
from mainspring.runtime.scope import lone_error

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from mainspring.errors import DeadlineExceededError
    from mainspring.policies import DeadLetterPolicy, RetryPolicy


class Cause(StrEnum):
    """Why the engine cancelled a handler."""

    TIMEOUT = "timeout"
    STALLED = "stalled"
    LEASE_LOST = "lease lost"
    SHUTDOWN = "shutdown"
    CANCELLED = "cancelled"
    """The message was cancelled by its id."""


class Outcome(StrEnum):
    """How a delivery ended, as counted and shown."""

    ACKNOWLEDGED = "acknowledged"
    RETRIED = "retried"
    POSTPONED = "postponed"
    """Released to come again later, without a charge and without a failure."""
    RELEASED = "released"
    DEAD_LETTERED = "dead_lettered"
    KEPT = "kept"
    LOST = "lost"
    CANCELLED = "cancelled"


class Decision(NamedTuple):
    """The settlement to write (None: nothing may be written any more) and what to call it."""

    outcome: Outcome
    settlement: Settlement | None
    error: BaseException | None = None


_HOPELESS = (ConfigError, InvalidParameterError, ReplyNotAvailableError, ResultTooLargeError)
"""A setting, a call or an address is wrong, or a result too large: running the handler again does not mend it."""

DONE = Decision(Outcome.ACKNOWLEDGED, Ack())
RELEASED = Decision(Outcome.RELEASED, Nack(charge=False, front=True))
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
    """Decide what a handler's error means for its message.

    ``Reject``, a fault of configuration and a result that is too large are the end under any policy: running the handler again
    does not mend them. ``ReplyError`` is an answer: the message is done, and the caller adds the reply. ``Retry`` says its own
    delay and whether it counts. It is an instruction, so the error types of the dead-letter policy do not apply to it. Any
    other error counts, waits by the retry policy, and is the end when the dead-letter policy says so. An error that the policy
    excludes never counts, so its attempts cannot run out. An uncharged error waits by the number of uncharged deliveries,
    with the present delivery. A group of one error, as a handler's own task group raises it, means that error.
    """
    error = lone_error(error)
    if isinstance(error, (Reject, *_HOPELESS)):
        return Decision(Outcome.DEAD_LETTERED, Dead.of(error), error)
    if isinstance(error, ReplyError):
        return Decision(Outcome.ACKNOWLEDGED, Ack(), error)
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
        delay = retry.delay(attempt if charge else delivery_count - attempt + 1, rng)
    postponed = isinstance(error, Retry) and not charge
    return Decision(Outcome.POSTPONED if postponed else Outcome.RETRIED, Nack(delay, charge), error)


def after_deadline(error: DeadlineExceededError) -> Decision:
    """Return the end of a message whose deadline has passed: any other attempt would be later still."""
    return Decision(Outcome.DEAD_LETTERED, Dead.of(error), error)


def as_settled(settlement: Settlement) -> Decision:
    """Return the outcome of a delivery that its handler has settled by itself, however it ended afterwards."""
    if isinstance(settlement, Ack):
        return DONE
    if isinstance(settlement, Dead):
        return Decision(Outcome.KEPT if isinstance(settlement, Keep) else Outcome.DEAD_LETTERED, settlement)
    if settlement.front:
        return Decision(Outcome.RELEASED, settlement)
    return Decision(Outcome.RETRIED if settlement.charge else Outcome.POSTPONED, settlement)


def is_unanswered(settlement: Settlement | None) -> bool:
    """True if a handler has acknowledged by itself, without a reply: what it returns can still be one."""
    return type(settlement) is Ack and settlement.reply is None


def before_start(
    attempt: int, dead_letter: DeadLetterPolicy, history_until: Callable[[], str | None]
) -> Decision | None:
    """Decide whether a message is given up unrun: its attempts are used up before this one, or too many of its workers died.

    A failure ends a message when it happens. So these were leases that ran out, as of workers that died, or it was given back
    by ``nack()``, or it failed where more attempts are allowed. ``history_until`` gives the history up to this attempt, or
    None where the store keeps none: then it is not known how many of the attempts ended with their worker.
    """
    most = dead_letter.max_attempts
    if attempt <= dead_letter.max_crashes and attempt <= most:
        return None
    history = history_until()
    crashes = 0 if history is None else crashes_before(history, attempt)
    if crashes >= dead_letter.max_crashes:
        text = (
            f"{crashes} of its deliveries ended with their worker (max_crashes is {dead_letter.max_crashes}): their leases ran"
            " out, as of workers that died or lost the store"
        )
        return Decision(Outcome.DEAD_LETTERED, Dead(text, LEASE_EXPIRED, history=history))
    if attempt <= most:
        return None
    failures = read_history(history)
    used = f"{'1 attempt is' if attempt == 2 else f'{attempt - 1} attempts are'} used up (max_attempts is {most})"
    if not failures:
        dead = Dead(f"{used}: leases ran out, or it was given back by nack()", "AttemptsUsedUp", history=history)
    elif all(failure.error_type == LEASE_EXPIRED for failure in failures):
        reason = "the leases ran out, as of workers that died or lost the store"
        dead = Dead(f"{used}: {reason}", LEASE_EXPIRED, history=history)
    else:
        last = failures[-1]
        dead = Dead(f"{used}, the last one by: {last.error}", last.error_type, history=history)
    return Decision(Outcome.DEAD_LETTERED, dead)


def _excluded(error: BaseException, policy: DeadLetterPolicy) -> bool:
    return isinstance(error, policy.exclude) and not isinstance(error, policy.include)
