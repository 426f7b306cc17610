"""Retry, restart, lease and dead-letter policies: values and pure decisions, no clock and no I/O."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from mainspring.errors import ConfigError
from mainspring.validation import MAX_DELAY, MAX_LIMIT, UNITS, Seconds, duration, is_number, is_whole, shown

if TYPE_CHECKING:
    from random import Random

Jitter = Literal["full", "equal", "none"]
_FIXED: dict[Jitter, float] = {"full": 0.0, "equal": 0.5, "none": 1.0}
"""The share of a delay that is not random."""


def _bound(attempt: int, initial: float, maximum: float, factor: float) -> float:
    try:
        return min(maximum, initial * float(factor) ** (max(attempt, 1) - 1))
    except OverflowError:
        return maximum if initial else 0.0


def backoff(attempt: int, *, initial: float, maximum: float, factor: float, jitter: Jitter, rng: Random) -> float:
    """Return the seconds to wait before try ``attempt + 1``, ``attempt`` counting from 1: exponential, capped, jittered.

    Full jitter draws evenly between zero and the exponential bound, which spreads a crowd of clients best. Equal jitter draws
    between half of it and all of it, so that no wait is next to nothing. See
    https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/
    """
    bound = _bound(attempt, initial, maximum, factor)
    return bound if jitter == "none" else rng.uniform(_FIXED[jitter] * bound, bound)


def _check_backoff(name: str, initial: float, maximum: float, factor: float, jitter: Jitter) -> None:
    if not is_number(initial, 0):
        raise ConfigError(f"{name}: initial_delay must be 0 or more seconds, not {initial!r}")
    if not is_number(maximum, initial):
        raise ConfigError(f"{name}: max_delay must be at least initial_delay ({initial} s), not {maximum!r}")
    if not is_number(factor, 1):
        raise ConfigError(f"{name}: the factor must be 1 or more, not {factor!r}")
    if not (isinstance(jitter, str) and jitter in _FIXED):
        raise ConfigError(f"{name}: jitter must be one of {', '.join(_FIXED)}, not {jitter!r}")


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How long a failed message waits before it is tried again. Delays are in seconds.

    The first wait is ``initial_delay``; each further one is ``factor`` times as long, up to ``max_delay``, which is 366 days
    at most. Of that, ``jitter`` makes all random (``"full"``), the second half (``"equal"``) or nothing (``"none"``). The
    defaults (1 s, times 2.5, to 3 hours) suit calls to other services: quick for a blip, gentle for an outage. How often a
    message is tried at all is :class:`DeadLetterPolicy`'s to say; with its default of 20 attempts, they are spread over 14 to
    28 hours.
    """

    initial_delay: float = 1.0
    max_delay: float = 10_800.0
    factor: float = 2.5
    jitter: Jitter = "equal"

    def __post_init__(self) -> None:
        _check_backoff("RetryPolicy", self.initial_delay, self.max_delay, self.factor, self.jitter)
        if self.max_delay > MAX_DELAY:
            raise ConfigError(f"RetryPolicy: max_delay must be at most {MAX_DELAY:.0f} seconds, not {self.max_delay!r}")

    def delay(self, attempt: int, rng: Random) -> float:
        """Return the seconds until the next try after charged attempt number ``attempt`` (from 1) has failed."""
        return backoff(
            attempt,
            initial=self.initial_delay,
            maximum=self.max_delay,
            factor=self.factor,
            jitter=self.jitter,
            rng=rng,
        )

    def horizon(self, attempts: int) -> tuple[float, float]:
        """Return the least and the most seconds of waiting from the first of ``attempts`` failed tries to the last.

        An outage shorter than the least costs no message that has all its attempts left. What the tries themselves take
        comes on top, and so does a wait for a free worker.
        """
        most = 0.0
        for number in range(1, attempts):
            wait, next_wait = (_bound(n, self.initial_delay, self.max_delay, self.factor) for n in (number, number + 1))
            if wait == next_wait:  # and so are all that follow
                most += wait * (attempts - number)
                break
            most += wait
        return _FIXED[self.jitter] * most, most


@dataclass(frozen=True, slots=True)
class DeadLetterPolicy:
    """When a message is given up: after ``max_attempts`` charged handler runs, or by the kind of error.

    ``max_crashes`` bounds, among these attempts, the deliveries that ended with their worker: the lease ran out, as of a
    process that was killed or lost the store. A message that has used them up is not handled again: it may be what kills.
    ``include``: exception types (subclasses count) that dead-letter at once. ``exclude``: types that are retried for ever.
    Where an error matches both, ``include`` wins: it is the narrower promise to an operator. ``retry_on``: the types that are
    tried again at all, so that any other error is dead at once; None: all types. An attempt that was cut short counts by its
    error as well (:class:`HandlerTimeoutError`, :class:`HandlerStalledError`). None of them touches a fault of
    configuration: a :class:`ConfigError`, :class:`InvalidParameterError` or :class:`ReplyNotAvailableError` out of what the
    handler calls, or of its reply, is dead at once; so is a :class:`ResultTooLargeError`. A body that does not fit the
    handler's type is no error of the handler's: it is tried ``max_attempts`` times, as another worker may understand it.
    ``keep``: how long a loop keeps the dead letters of its mailbox: seconds, a timedelta, or a text like ``"30d"``. It purges
    the older ones about once an hour. None: for ever.
    """

    max_attempts: int = 20
    max_crashes: int = 5
    include: tuple[type[BaseException], ...] = ()
    exclude: tuple[type[BaseException], ...] = ()
    keep: Seconds | str | None = None
    retry_on: tuple[type[BaseException], ...] | None = None

    def __post_init__(self) -> None:
        if self.keep is not None and not self.kept_for:
            raise ConfigError(
                f'DeadLetterPolicy: keep must be above 0 seconds, a timedelta, or a text like "30d", not {self.keep!r}'
            )
        for name in ("max_attempts", "max_crashes"):
            most = getattr(self, name)
            if not is_whole(most, 1):
                raise ConfigError(f"DeadLetterPolicy: {name} must be a whole number from 1, not {most!r}")
        for name in ("include", "exclude", *(() if self.retry_on is None else ("retry_on",))):
            kinds = getattr(self, name)
            kinds = tuple(kinds) if isinstance(kinds, Iterable) and not isinstance(kinds, type) else (kinds,)
            if not all(isinstance(kind, type) and issubclass(kind, BaseException) for kind in kinds):
                raise ConfigError(f"DeadLetterPolicy: {name} takes exception types, not {kinds!r}")
            object.__setattr__(self, name, kinds)

    @property
    def kept_for(self) -> float | None:
        """For how many seconds dead letters are kept; None: for ever."""
        return None if self.keep is None else duration(self.keep)

    def is_dead(self, attempt: int, error: BaseException) -> bool:
        """True if ``error`` in charged attempt number ``attempt`` (from 1) is the end of the message."""
        if isinstance(error, self.include):
            return True
        if isinstance(error, self.exclude):
            return False
        if self.retry_on is not None and not isinstance(error, self.retry_on):
            return True
        return attempt >= self.max_attempts


Renewal = Literal["while-running", "on-beat", "never"]
_RENEWALS: tuple[Renewal, ...] = ("while-running", "on-beat", "never")


@dataclass(frozen=True, slots=True)
class LeasePolicy:
    """How the lease of a message is kept while its handler runs.

    ``"while-running"`` renews until settlement; ``"on-beat"`` renews only where the handler has given a beat since the
    last renewal, so that a stuck handler loses its message to another worker; ``"never"`` leaves one visibility timeout.
    A renewal is due when ``fraction`` of the lease has passed: a third leaves room for two failed tries.
    """

    renew: Renewal = "while-running"
    fraction: float = 1 / 3

    def __post_init__(self) -> None:
        if self.renew not in _RENEWALS:
            raise ConfigError(f"LeasePolicy: renew must be one of {', '.join(_RENEWALS)}, not {self.renew!r}")
        if not (is_number(self.fraction, 0, 0.8) and self.fraction):
            raise ConfigError(f"LeasePolicy: fraction must be above 0 and at most 0.8, not {self.fraction!r}")


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Whether and when a crashed loop or service is started again. Delays are in seconds.

    After ``max_retries`` restarts in a row it stays down. A run that lasted ``reset_interval`` clears the count: it was
    well, and its end is a new trouble.
    """

    max_retries: int = 5
    initial_delay: float = 1.0
    max_delay: float = 60.0
    backoff_factor: float = 2.0
    reset_interval: float = 300.0
    jitter: Jitter = "full"

    def __post_init__(self) -> None:
        _check_backoff("RestartPolicy", self.initial_delay, self.max_delay, self.backoff_factor, self.jitter)
        if not is_whole(self.max_retries, 0):
            raise ConfigError(f"RestartPolicy: max_retries must be a whole number from 0, not {self.max_retries!r}")
        if not is_number(self.reset_interval, 0):
            raise ConfigError(f"RestartPolicy: reset_interval must be 0 or more seconds, not {self.reset_interval!r}")

    def next_restart(self, restarts: int, ran_for: float, rng: Random) -> tuple[int, float | None]:
        """Return the new count of restarts in a row after a crash, and the seconds to wait, or None if it stays down.

        ``restarts`` is the count so far, ``ran_for`` how many seconds the run that crashed had lasted.
        """
        if ran_for >= self.reset_interval:
            restarts = 0
        if restarts >= self.max_retries:
            return restarts, None
        return restarts + 1, self.delay(restarts + 1, rng)

    def delay(self, number: int, rng: Random) -> float:
        """Return the seconds to wait before the restart of that number in a row, from 1."""
        return backoff(
            number,
            initial=self.initial_delay,
            maximum=self.max_delay,
            factor=self.backoff_factor,
            jitter=self.jitter,
            rng=rng,
        )


BURST_SECONDS = 0.01
"""Seconds of a rate that may begin at once, where nothing is said."""


@dataclass(frozen=True, slots=True)
class Rate:
    """How many messages may begin in a time: ``limit`` in ``per`` seconds, evenly spread, up to ``burst`` at once.

    In no time do more than ``burst`` plus what the rate allows begin. ``Rate(100, 60)`` begins one each 0.6 s, and
    ``Rate.of("100/m")`` is the same. The default burst (0) is what the rate allows in 10 ms, but at least 1: the
    attribute then holds that number. So several messages of a high rate are claimed at once.

    :raises ConfigError: a number is not above 0, the limit is above a billion, or the burst is above the limit.
    """

    limit: int
    per: Seconds = 1.0
    burst: int = 0

    def __post_init__(self) -> None:
        per = duration(self.per)
        if not is_whole(self.limit, 1) or self.limit > MAX_LIMIT:
            raise ConfigError(
                f"Rate: limit must be a whole number from 1 to {MAX_LIMIT:,}, not {shown(self.limit):.100}; pause what"
                " shall not run"
            )
        if per is None or not 0 < per <= MAX_DELAY:
            raise ConfigError(f"Rate: per must be above 0 seconds (at most 366 days), not {shown(self.per):.100}")
        if not is_whole(self.burst, 0) or self.burst > self.limit:
            raise ConfigError(
                f"Rate: burst must be a whole number from 1 to the limit ({self.limit}), or 0 for 10 ms of the rate, not"
                f" {shown(self.burst):.100}"
            )
        object.__setattr__(self, "per", per)
        object.__setattr__(self, "burst", self.burst or max(1, int(min(self.limit, BURST_SECONDS * self.limit / per))))

    @property
    def interval(self) -> float:
        """Seconds from one begin to the next, on average."""
        return float(self.per) / self.limit  # type: ignore[arg-type]

    @classmethod
    def of(cls, rate: Rate | str) -> Rate:
        """Return what a text says: a number, ``/``, and ``s``, ``m``, ``h``, ``d`` or a duration, as in ``100/m`` or ``5/10s``.

        :raises ConfigError: it says no rate, or one of 0.
        """
        if isinstance(rate, Rate):
            return rate
        if isinstance(rate, str):
            limit, found, per = rate.partition("/")
            per = f"1{per}" if per in UNITS else per
            if found and re.fullmatch("[0-9]{1,20}", limit.strip()) and duration(per):
                return cls(int(limit), duration(per) or 0.0)
        raise ConfigError(
            f'a rate is a text as "100/m", "5/s" or "1/10s", or Rate(limit, per, burst), not {shown(rate):.100}'
        )
