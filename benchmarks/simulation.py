"""How much faster than real time simulated fleets run, and how long the default run of ``mainspring simulate`` takes.

Three workloads: a day of 4 workers whose handlers do nothing, with a planned fault an hour; the group of ``make simulate`` in
the default run of the command, 20 seeds of an hour with 20 times the faults; and five minutes of it with 60 times the faults.
"""

from __future__ import annotations

import sys

from common import HERE, beside, quick, report
from mainspring import LoopGroup, Mailbox, MainLoop
from mainspring.testing import Faults, Simulation

sys.path.append(str(HERE.parent / "scripts"))
import simulated_group

HOURS = 6 if quick() else 24
SEEDS = 2 if quick() else 5


async def handle(job: int) -> int:
    """Nothing to do."""
    return job


def build(mailbox: Mailbox) -> LoopGroup:
    return LoopGroup([MainLoop(mailbox, handle)])


def times(speed: float) -> str:
    return f"{speed:,.0f} x"


def main() -> None:
    speeds, faults = [], 0
    for seed in range(SEEDS):
        run = Simulation(seed=seed, duration=HOURS * 3600.0, workers=4, faults=Faults()).run(build)
        run.check()
        speeds.append(run.speed)
        faults += len(run.plan)
    report(
        beside(f"simulation: {HOURS} h of 4 workers / 20,000 times real time", speeds, 20_000, 1.0, times,
               note=f"one process, a seed a round, {faults / SEEDS / HOURS:.1f} planned faults an hour, default chances")
    )  # fmt: skip
    took, _ = of_group(20, 3_600.0, 20.0)
    note = "one process, 20 seeds of an hour of the group of make simulate, 20 times the default faults"
    report(
        beside("simulation: the default run of the command / 20 s", [took], 20.0, 1.0, seconds, at_most=True, note=note)
    )
    took, times_real = of_group(20 if quick() else 100, 300.0, 60.0)
    note = "one process, five minutes of the group of make simulate, 60 times the default faults"
    report(beside("simulation: the busy fleet / 10,000 times real time", [times_real], 10_000, 1.0, times, note=note))


def of_group(seeds: int, duration: float, factor: float) -> tuple[float, float]:
    """Return the seconds that so many runs of the group of ``make simulate`` take, and how many times real time that is."""
    runs = [
        Simulation(seed=seed, duration=duration, faults=Faults().times(factor)).run(simulated_group.build)
        for seed in range(seeds)
    ]
    for run in runs:
        run.check()
    took = sum(run.real_seconds for run in runs)
    return took, sum(run.virtual_seconds for run in runs) / took


def seconds(value: float) -> str:
    return f"{value:.1f} s"


if __name__ == "__main__":
    main()
