"""What a shutdown did: per part how long it took and how it ended, and the exit status of the process that follows from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

EXIT_CLEAN = 0
EXIT_CRASHED = 1  # what Python itself ends with when an error comes out of it
EXIT_CANCELLED = 70  # EX_SOFTWARE of sysexits.h: work had to be cancelled
EXIT_BY_SIGNAL = 128


class Ending(StrEnum):
    """How a part ended, from best to worst."""

    FINISHED = "finished"
    CANCELLED = "cancelled"
    CRASHED = "crashed"
    STUCK = "stuck"


@dataclass(frozen=True, slots=True)
class PartReport:
    """One part of a shutdown: ``seconds`` it took; where it had to be cancelled, ``where`` is the line it waited on."""

    name: str
    ending: Ending
    seconds: float
    where: tuple[str, ...] = ()

    def __str__(self) -> str:
        text = f"{self.name}: {self.ending} after {self.seconds:.2f} s"
        return text + "".join(f"\n      waiting at {line}" for line in self.where)


@dataclass(frozen=True, slots=True)
class ShutdownReport:
    """How a group's run ended: why it stopped, how long the shutdown took (``duration``, seconds), and each part.

    The parts are the loops, and those of the rest (mailboxes, the health server) that did not end by themselves.
    """

    reason: str
    duration: float
    parts: tuple[PartReport, ...] = ()
    phases: dict[str, float] = field(default_factory=dict)
    forced_by: int | None = None

    @property
    def clean(self) -> bool:
        """True if everything ended by itself."""
        return all(part.ending is Ending.FINISHED for part in self.parts) and self.forced_by is None

    @property
    def exit_status(self) -> int:
        """The exit status: 0 clean, 70 work had to be cancelled, 128 + n forced by a second signal n, 1 a loop crashed
        (then ``run`` raises)."""
        if self.forced_by is not None:
            return EXIT_BY_SIGNAL + self.forced_by
        endings = {part.ending for part in self.parts}
        if Ending.CRASHED in endings and Ending.STUCK not in endings:
            return EXIT_CRASHED
        return EXIT_CLEAN if self.clean else EXIT_CANCELLED

    def __str__(self) -> str:
        verdict = "clean" if self.clean else f"not clean, exit status {self.exit_status}"
        phases = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in self.phases.items())
        lines = [f"shutdown ({self.reason}) in {self.duration:.2f} s: {verdict}"]
        if phases:
            lines.append(f"  phases: {phases}")
        lines.extend(f"  {part}" for part in self.parts)
        return "\n".join(lines)
