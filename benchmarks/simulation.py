"""How much faster than real time a simulated fleet runs: 4 workers, a message a minute each, one planned fault an hour."""

from __future__ import annotations

from common import beside, quick, report
from mainspring import LoopGroup, Mailbox, MainLoop
from mainspring.testing import Faults, Simulation

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


if __name__ == "__main__":
    main()
