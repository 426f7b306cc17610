"""Deliberately wrong variants of the store, the engine and user code, by name. The simulation must find each of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import anyio

from mainspring import LoopGroup, MainLoop
from mainspring.testing import Faults, Simulation

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    from mainspring.testing.simulation import SimulationReport

SEEDS = 200
"""Within how many seeds each variant must be caught."""
PEACE = Faults.none()
TROUBLE = Faults().times(20)


@dataclass
class Variant:
    """A wrong system: what ``plant`` patches or gives, and the rules of which one must be found broken."""

    name: str
    rules: tuple[str, ...]
    plant: Callable[[pytest.MonkeyPatch], dict[str, Any] | None]
    faults: Faults
    duration: float
    options: dict[str, Any] = field(default_factory=dict)

    def hunt(self, patch: pytest.MonkeyPatch, seeds: int = SEEDS) -> SimulationReport | None:
        """The first failing run, or None."""
        given = self.plant(patch) or {}
        build = given.pop("build", honest)
        for seed in range(seeds):
            simulation = Simulation(seed=seed, duration=self.duration, faults=self.faults, **self.options, **given)
            report = simulation.run(build)
            if report.failed:
                return report
        return None


VARIANTS: dict[str, Variant] = {}


def planted_fault(
    *rules: str, faults: Faults = TROUBLE, duration: float = 1800.0, **options: Any
) -> Callable[..., Any]:
    """Mark a function as a planted fault: given ``monkeypatch`` it makes the system wrong; it may return options of the
    simulation (``store=``) or the wrong ``build``."""

    def mark(plant: Callable[[pytest.MonkeyPatch], dict[str, Any] | None]) -> Any:
        VARIANTS[plant.__name__] = Variant(plant.__name__, rules, plant, faults, duration, options)
        return plant

    return mark


def honest(mailbox: Any, **options: Any) -> LoopGroup:
    """A group as it should be."""

    async def handle(job: int) -> int:
        await anyio.sleep(job % 40)
        return job

    return LoopGroup([MainLoop(mailbox, handle, concurrency=2, **options)])


def quick(mailbox: Any) -> LoopGroup:
    """Handlers that end as they begin: where several messages wait, as after an outage, they are acknowledged together."""

    async def handle(job: int) -> None: ...

    return LoopGroup([MainLoop(mailbox, handle, concurrency=5)])
