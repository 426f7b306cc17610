"""``simulate``: many seeds, and of the first that fails a small case: three lines of a user's test."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mainspring.testing.simulation.faults import Faults
from mainspring.testing.simulation.run import Simulation
from mainspring.testing.simulation.shrink import shrink as shrink_report
from mainspring.testing.simulation.timeline import around, as_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from mainspring.group.group import LoopGroup
    from mainspring.mailbox.mailbox import Mailbox

HOURLY = 20.0
"""Events an hour in a short run: what befalls a fleet in a day, in one virtual hour."""


def simulate(
    build: Callable[[Mailbox[Any, Any]], LoopGroup],
    *,
    seeds: int | Iterable[int] = 20,
    duration: float = 3600.0,
    faults: Faults | None = None,
    shrink: bool = True,
    **options: Any,
) -> None:
    """Run ``build``'s group under many seeds; raise an :class:`AssertionError` for the first that breaks an invariant.

    All of a test::

        def test_loses_nothing():
            simulate(build, seeds=50)

    The error tells the invariant, the events that led to it, the replay, and draws the timeline, of a smaller run where
    ``shrink`` finds one. ``seeds`` is how many (from 0), or which. ``faults`` are by default ``Faults().times(20)``: a day's
    trouble in each virtual hour. The other options are those of :class:`Simulation`.
    """
    chosen = Faults().times(HOURLY) if faults is None else faults
    for seed in range(seeds) if isinstance(seeds, int) else seeds:
        report = Simulation(seed=seed, duration=duration, faults=chosen, **options).run(build)
        if not report.failed:
            continue
        small = shrink_report(report, lambda simulation: simulation.run(build)) if shrink else report
        raise AssertionError(f"{small}\n{as_text(around(small))}")
