"""What follows when a supervised loop or process has ended, or has not become ready: decisions only.

One set of rules for all that is supervised. The counts are values that the caller keeps: failures to start and failures in
running are counted apart, and a restart is done only when the thing has become ready.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Container
    from random import Random

    from mainspring.policies import RestartPolicy


class RestartType(StrEnum):
    """After which ends a service is started again (the terms are Erlang's)."""

    PERMANENT = "permanent"
    """After each."""
    TRANSIENT = "transient"
    """After a failure: an exit status other than 0, a signal, a failed probe."""
    TEMPORARY = "temporary"
    """After none."""


class RunEnd(NamedTuple):
    """How a run ended.

    ``failed``: by an error, a status other than 0, a signal, or because it had to be killed. ``ready``: it had become
    ready. ``well_for``: seconds since then. ``status``: the exit status of a process as a shell shows it. ``finished``: its
    own work is over, by its own word.
    """

    failed: bool
    ready: bool = True
    well_for: float = 0.0
    status: int | None = None
    finished: bool = False


class RestartCounts(NamedTuple):
    """``restarts``: those in a row, after runs that were ready. ``start_failures``: starts in a row that have failed."""

    restarts: int = 0
    start_failures: int = 0


class StartAgain(NamedTuple):
    """Start it again in ``delay`` seconds, and count from then on with ``counts``."""

    delay: float
    counts: RestartCounts


class StayDown(NamedTuple):
    """Its work is done, or its end means that it is not to be restarted. ``failed``: it ended by a failure."""

    failed: bool = False


class Escalate(NamedTuple):
    """It cannot be kept running: what the caller does then is called escalation."""

    why: str


RestartDecision: TypeAlias = StartAgain | StayDown | Escalate


def after_end(
    ended: RunEnd,
    counts: RestartCounts,
    *,
    policy: RestartPolicy,
    rng: Random,
    restart: RestartType = RestartType.PERMANENT,
    start_tries: int | None = None,
    never_after: Container[int] = (),
) -> RestartDecision:
    """Decide what happens to a run that has ended and was not told to.

    ``start_tries``: failed starts in a row after which it is given up, whatever number of restarts the policy has; its delays
    hold for both. None: starts count as restarts do. ``never_after``: exit statuses that mean "do not restart".
    """
    if ended.status is not None and ended.status in never_after:
        return StayDown(failed=ended.failed)
    if ended.finished and not ended.failed:
        return StayDown()
    if restart is RestartType.TEMPORARY or (restart is RestartType.TRANSIENT and not ended.failed):
        return StayDown(failed=ended.failed)
    if not ended.ready and start_tries is not None:
        failures = counts.start_failures + 1
        if failures >= start_tries:
            return Escalate(f"it did not become ready in {start_tries} tries")
        return StartAgain(policy.delay(failures, rng), counts._replace(start_failures=failures))
    restarts, delay = policy.next_restart(counts.restarts, ended.well_for, rng)
    if delay is None:
        return Escalate(f"it has been restarted {restarts} times in a row")
    return StartAgain(delay, RestartCounts(restarts))


class Intensity:
    """RestartCounts restarts in a period: more than ``most`` within ``period`` seconds escalate. Pure: it is told the time."""

    def __init__(self, most: int, period: float) -> None:
        self.most = most
        self.period = period
        self._recent: list[float] = []

    def exceeded_by(self, now: float) -> bool:
        """Count a restart at ``now``. Return True if it is one too many."""
        self._recent = [at for at in self._recent if now - at < self.period]
        self._recent.append(now)
        return len(self._recent) > self.most
