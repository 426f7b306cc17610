"""How the run of an orchestrator ended: why, how long the stop took, and how each replica ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mainspring.runtime.shutdown_report import EXIT_BY_SIGNAL, EXIT_CANCELLED, EXIT_CRASHED, Ending, PartReport

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Sequence

    from mainspring.services.managed_service import ManagedReplica


@dataclass(frozen=True, slots=True)
class OrchestratorReport:
    """How the run of an orchestrator ended. ``duration``: the seconds that the stop of all services took.

    ``failure``: what could not be kept running, if that ended the whole. ``worst_status``: the highest exit status of the
    replicas that had ended by themselves, if all had. ``forced_by``: the second signal, if one came.
    """

    reason: str
    duration: float
    parts: tuple[PartReport, ...] = ()
    failure: str | None = None
    worst_status: int = 0
    forced_by: int | None = None

    @property
    def clean(self) -> bool:
        """True if nothing has failed, and no process had to be killed."""
        return self.exit_status == 0

    @property
    def exit_status(self) -> int:
        """The exit status: 0 clean, 1 a core service was given up, 70 a process had to be killed at the stop or ended with a
        status other than 0 and 143, 128 + n forced by a second signal n. If all services had ended by themselves it is the
        highest status of theirs."""
        if self.forced_by is not None:
            return EXIT_BY_SIGNAL + self.forced_by
        if self.failure is not None:
            return EXIT_CRASHED
        if any(part.ending in (Ending.CANCELLED, Ending.STUCK) for part in self.parts):
            return EXIT_CANCELLED
        return self.worst_status

    def __str__(self) -> str:
        verdict = "clean" if self.clean else f"exit status {self.exit_status}"
        lines = [f"services stopped ({self.reason}) in {self.duration:.2f} s: {verdict}"]
        lines.extend(f"  {part}" for part in self.parts if part.ending is not Ending.FINISHED)
        return "\n".join(lines)


def report_of(
    replicas: Iterable[ManagedReplica],
    *,
    reason: str,
    failure: str | None,
    duration: float,
    killed: Container[ManagedReplica],
    statuses: Sequence[int],
    forced_by: int | None,
) -> OrchestratorReport:
    """Return the report of a run that has ended. ``killed``: the replicas that the orchestrator had to kill."""
    parts = tuple(PartReport(managed.name, _ending(managed, killed), managed.stop_seconds) for managed in replicas)
    return OrchestratorReport(reason, duration, parts, failure, max(statuses, default=0), forced_by)


def _ending(managed: ManagedReplica, killed: Container[ManagedReplica]) -> Ending:
    if managed.ending is None:
        return Ending.STUCK
    if managed.failed:
        return Ending.CRASHED
    return Ending.CANCELLED if managed in killed or managed.ending.failed else Ending.FINISHED
