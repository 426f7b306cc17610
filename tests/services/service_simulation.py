"""Runs an orchestrator of simulated services through the trouble of a seed, and judges the run.

``python tests/services/service_simulation.py --seeds 1000`` runs many; ``--seed 7`` shows one of them.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field, replace
from random import Random
from typing import TYPE_CHECKING

import anyio
from service_rules import problems_of
from service_scenarios import Scenario, scenario

from mainspring import Dispatcher
from mainspring.errors import MainspringError
from mainspring.events import Event, ServiceOutput
from mainspring.runtime.scope import lone_error
from mainspring.services.orchestrator import Orchestrator
from mainspring.testing import ProcessRecord, SimulatedSpawner, run_virtual

if TYPE_CHECKING:
    from mainspring.core.state_machine import OrchestratorState


OPERATION_TIMEOUT = 300.0
"""Seconds in which each order of an operator must have ended: longer than any number of tries and delays."""


@dataclass
class Operation:
    """An order of the operator. ``ended_at``: None if it has never ended."""

    kind: str
    service: str
    replica: int | None
    began_at: float
    ended_at: float | None = None
    error: str | None = None


@dataclass
class Run:
    """What happened. ``asked_at``: when the scenario asked for the end; None: it ended by itself."""

    scenario: Scenario
    events: list[tuple[float, Event]] = field(default_factory=list)
    records: list[ProcessRecord] = field(default_factory=list)
    asked_at: float | None = None
    ended_at: float = 0.0
    left_at_end: int = 0
    standing: dict[str, str] = field(default_factory=dict)
    """The states of all replicas when calm has lasted, by name and number."""
    state: OrchestratorState | None = None
    failure: str | None = None
    operations: list[Operation] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def log(self) -> list[str]:
        """All that happened, one line each; equal seeds give equal logs."""
        told = [(at, str(event)) for at, event in self.events]
        return [f"{at:9.3f} {line}" for at, line in told] + [str(record) for record in self.records]


def simulate(seed: int) -> Run:
    """Run the case of a seed."""
    run = Run(scenario(seed))
    try:
        run_virtual(_main, run, seed=seed)
    except BaseException as error:
        raise lone_error(error) from None
    run.problems = problems_of(run)
    return run


async def _main(run: Run) -> None:
    case = run.scenario
    dispatcher = Dispatcher()
    dispatcher.subscribe(Event, lambda event: run.events.append((anyio.current_time(), event)))
    spawner = SimulatedSpawner(case.programs(), seed=case.seed, latency=case.pause)
    run.records = spawner.records
    orchestrator = Orchestrator(
        case.specs,
        strategy=case.strategy,
        max_restarts=case.max_restarts,
        period=case.period,
        shutdown=case.shutdown,
        spawner=spawner,
        dispatcher=dispatcher,
    )
    ended = anyio.Event()

    async def run_it(scope: anyio.CancelScope) -> None:
        with scope:
            await orchestrator.run(install_signals=False)
        run.ended_at = anyio.current_time()
        run.left_at_end = len(spawner.running())
        run.state = orchestrator.state
        run.failure = None if orchestrator.report is None else orchestrator.report.failure
        ended.set()

    with anyio.fail_after(1_000):
        async with anyio.create_task_group() as tasks:
            scope = anyio.CancelScope()
            tasks.start_soon(run_it, scope)
            if case.is_operated:
                tasks.start_soon(_operate, run, orchestrator, ended)
            with anyio.move_on_after(case.end_at):
                await ended.wait()
            if not ended.is_set():
                await _end(run, orchestrator, scope)
            await ended.wait()
            await anyio.sleep(5)  # nothing may happen any more


async def _operate(run: Run, orchestrator: Orchestrator, ended: anyio.Event) -> None:
    """Give orders at random until calm begins, several at the same time now and then."""
    case, rng = run.scenario, Random(f"operator {run.scenario.seed}")
    until = min(case.calm_at, case.end_at)
    async with anyio.create_task_group() as tasks:
        while anyio.current_time() < until and not ended.is_set():
            await anyio.sleep(rng.expovariate(1 / 5))
            spec = rng.choice(case.specs)
            replica = rng.choice([None, None, rng.randint(1, spec.replicas)])
            kind = rng.choice(["restart", "restart", "stop", "start", "start", "reload"])
            operation = Operation(kind, spec.name, None if kind == "reload" else replica, anyio.current_time())
            run.operations.append(operation)
            tasks.start_soon(_give, run, orchestrator, operation)


async def _give(run: Run, orchestrator: Orchestrator, operation: Operation) -> None:
    with anyio.move_on_after(OPERATION_TIMEOUT) as scope:
        try:
            if operation.kind == "reload":
                await orchestrator.reload(
                    [
                        replace(spec, environment={"CHANGED": str(operation.began_at)})
                        if spec.name == operation.service
                        else spec
                        for spec in run.scenario.specs
                    ]
                )
            else:
                await getattr(orchestrator, operation.kind)(operation.service, operation.replica)
        except MainspringError as error:
            operation.error = str(error)
    if not scope.cancelled_caught:
        operation.ended_at = anyio.current_time()


async def _end(run: Run, orchestrator: Orchestrator, scope: anyio.CancelScope) -> None:
    for service in orchestrator.status().services:
        for replica in service.replicas:
            run.standing[f"{service.name}.{replica.number}"] = str(replica.state)
    run.asked_at = anyio.current_time()
    if run.scenario.end == "request":
        orchestrator.request_shutdown("the end")
    elif run.scenario.end == "cancel":
        scope.cancel()
    else:
        await orchestrator.shutdown(3.0)


def main() -> int:
    """Run the seeds that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many, from 0 or --first")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, help="run and show this one")
    arguments = parser.parse_args()
    if arguments.seed is not None:
        run = simulate(arguments.seed)
        shown = [
            line for line, (_, event) in zip(run.log, run.events, strict=False) if not isinstance(event, ServiceOutput)
        ]
        sys.stdout.write("\n".join([*shown, *map(str, run.records), *map(str, run.operations), *run.problems]) + "\n")
        return bool(run.problems)
    failed = processes = 0
    for seed in range(arguments.first, arguments.first + arguments.seeds):
        run = simulate(seed)
        processes += len(run.records)
        failed += bool(run.problems)
        sys.stdout.writelines(f"seed {seed}: {problem}\n" for problem in run.problems)
    sys.stdout.write(f"{arguments.seeds} runs, {processes} processes, {failed} runs with a rule broken\n")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
