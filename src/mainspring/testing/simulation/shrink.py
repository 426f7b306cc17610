"""``shrink``: from a failing run to a small one that breaks the same rule: shorter, with fewer faults and fewer workers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from mainspring.testing.simulation.faults import CHANCES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mainspring.testing.simulation.run import Simulation, SimulationReport

TRIES = 150
"""How many runs a shrinking may take; each is no longer than the one it began with."""
MARGIN = 1.0
"""Virtual seconds that a shortened run goes on after the instant at which the rule was broken."""


def shrink(
    report: SimulationReport,
    run: Callable[[Simulation], SimulationReport],
    *,
    tries: int = TRIES,
    progress: Callable[[SimulationReport], object] = lambda report: None,
) -> SimulationReport:
    """The smallest failing run found with at most ``tries`` runs; ``report`` itself where it is none that failed.

    ``run`` runs a simulation, as in ``lambda simulation: simulation.run(build)``. ``progress`` is told each smaller run.
    Nothing is random in it: the same report gives the same small run.
    """
    if report.violation is None:
        return report
    rule = report.violation.rule
    best = report
    tried = {_key(report.simulation)}
    found = True
    while found:
        found = False
        for candidate in candidates(best):
            if _key(candidate) in tried:
                continue
            if tries <= 0:
                return best
            tries -= 1
            tried.add(_key(candidate))
            smaller = run(candidate)
            if smaller.violation is not None and smaller.violation.rule == rule:
                best, found = smaller, True
                progress(best)
                break
    return best


def candidates(report: SimulationReport) -> Iterator[Simulation]:
    """Smaller simulations to try, the boldest first. A pure function of the report."""
    simulation = report.simulation
    assert report.violation is not None
    at = report.violation.at + MARGIN
    if at < simulation.duration * 0.99:
        yield simulation.but(duration=round(at, 3))
    kept = [fault.number for fault in report.plan]
    yield from (simulation.but(keep=tuple(numbers)) for numbers in subsets(kept))
    present = [name for name in CHANCES if getattr(simulation.faults, name)]
    if len(present) > 1:
        yield simulation.but(faults=replace(simulation.faults, **dict.fromkeys(present, 0.0)))
    for name in present:
        yield simulation.but(faults=replace(simulation.faults, **{name: 0.0}))
    for workers in range(1, simulation.workers):
        # The workers share what the same number of clients send, so that the messages come as they did.
        rate = simulation.per_minute * simulation.workers / workers
        yield simulation.but(workers=workers, per_minute=rate)
        yield simulation.but(workers=workers)
    if simulation.duration > 60:
        yield simulation.but(duration=round(simulation.duration * 0.6, 3))


def subsets(numbers: list[int]) -> Iterator[list[int]]:
    """Without all of them, without each half, each quarter …, down to without each one."""
    size = len(numbers)
    while size >= 1:
        for start in range(0, len(numbers), size):
            yield numbers[:start] + numbers[start + size :]
        size = 0 if size == 1 else (size + 1) // 2


def _key(simulation: Simulation) -> tuple[object, ...]:
    return simulation.duration, simulation.workers, simulation.per_minute, simulation.faults, simulation.keep
