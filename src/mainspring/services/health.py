"""What the answers of a probe mean: decisions only. Replicas of services and the readiness checks of groups share it."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from mainspring.services.spec import HealthCheckSettings


class HealthVerdict(StrEnum):
    """What follows from the answers so far."""

    WELL = "well"
    """It is well."""
    UNWELL = "unwell"
    """It has failed, or has failed and not yet passed often enough: a service is Degraded."""
    FAILED = "failed"
    """It has failed too often in a row: a service is restarted, a group is not ready."""


class Tolerance(NamedTuple):
    """What :class:`Health` reads of ``HealthCheckSettings``, for a caller that has no use for the rest."""

    max_failures: int = 3
    successes: int = 1


class Health:
    """Counts the answers of one probe. Failed, it remains so until it has passed often enough in a row.

    :param verdict: what holds before the first answer, and ``error`` why. With ``FAILED`` its first failures are not forgiven.
    """

    def __init__(
        self,
        settings: HealthCheckSettings | Tolerance,
        *,
        verdict: HealthVerdict = HealthVerdict.WELL,
        error: str | None = None,
    ) -> None:
        self.verdict = verdict
        self.error = error
        """What the last failure said; None while it is well."""
        self.failures = 0
        """Failures in a row."""
        self._settings = settings
        self._successes = 0

    def note(self, error: str | None) -> HealthVerdict:
        """Count an answer: None where the probe passed, else why not. Return what follows."""
        if error is None:
            self.failures = 0
            self._successes += 1
            if self._successes >= self._settings.successes:
                self.verdict = HealthVerdict.WELL
                self.error = None
            return self.verdict
        self._successes = 0
        self.failures += 1
        self.error = error
        if self.failures >= self._settings.max_failures:
            self.verdict = HealthVerdict.FAILED
        elif self.verdict is HealthVerdict.WELL:
            self.verdict = HealthVerdict.UNWELL
        return self.verdict
