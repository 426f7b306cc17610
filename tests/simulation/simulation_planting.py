"""Deliberately wrong variants of the store, the engine and user code, by name. The simulation must find each of them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import anyio

from mainspring import LoopGroup, MainLoop
from mainspring.testing import Faults, Simulation

if TYPE_CHECKING:
    from collections.abc import Callable

    from mainspring.testing.simulation import SimulationReport

SEEDS = 200
"""Within how many seeds each variant must be caught."""
PEACE = Faults.none()
TROUBLE = Faults().times(20)
BUSY = replace(TROUBLE.times(3), slow_call=0.02, slow_handler=0.0005, hanging_handler=0.0002, failing_handler=0.01,
               swallowing_handler=0.0002, poison=0.02)  # fmt: skip
"""Events as often as they can come, amid handlers and calls that mostly do what they should."""


@dataclass
class Variant:
    """A wrong system: what ``plant`` gives, and the rules of which one must be found broken."""

    name: str
    rules: tuple[str, ...]
    plant: Callable[[], dict[str, Any]]
    faults: Faults
    duration: float
    options: dict[str, Any] = field(default_factory=dict)

    def hunt(self, seeds: int = SEEDS) -> SimulationReport | None:
        """The first failing run, or None."""
        given = self.plant()
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
    """Mark a function as a planted fault: it returns a wrong ``build``, or options of the simulation (a wrong ``store``)."""

    def mark(plant: Callable[[], dict[str, Any]]) -> Any:
        VARIANTS[plant.__name__] = Variant(plant.__name__, rules, plant, faults, duration, options)
        return plant

    return mark


def honest(mailbox: Any, *, kind: type[MainLoop] = MainLoop, **options: Any) -> LoopGroup:
    """A group as it should be."""

    async def handle(job: int) -> int:
        await anyio.sleep(job % 40)
        return job

    return LoopGroup([kind(mailbox, handle, concurrency=2, **options)])


def quick(mailbox: Any) -> LoopGroup:
    """Handlers that end as they begin: where several messages wait, as after an outage, they are acknowledged together."""

    async def handle(job: int) -> None: ...

    return LoopGroup([MainLoop(mailbox, handle, concurrency=5)])


PARTS = 1_000_000
"""The number of the first part of a job."""


def bursts(mailbox: Any, *, kind: type[MainLoop] = MainLoop, **options: Any) -> LoopGroup:
    """Jobs that fan out into parts of milliseconds, so that they are claimed ahead; now and then one takes 90 s."""

    async def handle(job: int) -> None:
        if job < PARTS:
            await mailbox.send_many(range(PARTS + 200 * job, PARTS + 200 * (job + 1)))
        else:
            await anyio.sleep(0.001 * (1 + job % 5) if job % 331 else 90)

    return LoopGroup([kind(mailbox, handle, **options)], shutdown_timeout=20)
