"""Supervised services in simulated trouble: crashes, slow and failing starts, failing probes and hooks, stops at any moment.

``service_rules`` says what must hold. ``python tests/services/service_simulation.py --seed N`` shows the run of a seed.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

import anyio
import pytest
from service_simulation import simulate

from mainspring.core.state_machine import ServiceState
from mainspring.errors import MainspringError
from mainspring.events import HookFailed, ProbeChanged, ServiceGivenUp, ServiceStartFailed, ServiceStateChanged
from mainspring.policies import RestartPolicy
from mainspring.services.orchestrator import Orchestrator
from mainspring.services.spec import Hook, HookMoment, Lifecycle, ServiceSpec
from mainspring.testing import SimulatedProgram, SimulatedSpawner, run_virtual

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

QUICK = 30
ALL = 1_000
PART = 100


def check(seeds: range) -> None:
    broken = [f"seed {seed}: {problem}" for seed in seeds for problem in simulate(seed).problems]
    assert not broken, "\n".join(broken[:20])


@pytest.mark.parametrize("first", range(0, QUICK, 5))
def test_no_rule_is_broken(first: int) -> None:
    check(range(first, first + 5))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, ALL, PART))
def test_no_rule_is_broken_in_many_runs(first: int) -> None:
    check(range(first, first + PART))


def test_equal_seeds_give_equal_runs() -> None:
    assert simulate(3).log == simulate(3).log != simulate(4).log


def test_the_runs_are_about_something() -> None:
    """Each kind of trouble occurs in a few runs already; without it the rules would hold of nothing."""
    happened: Counter[str] = Counter()
    for seed in (2, 3, 5, 6, 11):
        run = simulate(seed)
        happened.update(type(event).__name__ for _, event in run.events)
        happened.update(str(event.new) for _, event in run.events if isinstance(event, ServiceStateChanged))
        happened["killed"] += sum(record.killed_at is not None for record in run.records)
        happened[run.scenario.end if run.asked_at is not None else "by itself"] += 1
    wanted = [HookFailed, ProbeChanged, ServiceGivenUp, ServiceStartFailed]
    assert all(happened[each.__name__] for each in wanted), happened
    assert all(happened[each] for each in [*map(str, ServiceState), "killed"] if each != "initializing"), happened
    assert all(happened[each] for each in ("request", "shutdown", "cancel", "by itself")), happened


def test_a_stop_of_all_starts_nothing_of_which_others_are_still_draining() -> None:
    async def main() -> None:
        first = ServiceSpec(
            name="first",
            command=("first",),
            notify=True,
            hooks={HookMoment.PRE_START: (Hook(partial(anyio.sleep, 2)),)},
            lifecycle=Lifecycle(restart_policy=RestartPolicy(jitter="none")),
        )
        second = ServiceSpec(name="second", command=("second",), notify=True, depends_on=("first",))
        programs = {"first": SimulatedProgram(lives=10), "second": SimulatedProgram(stops_in=5)}
        async with anyio.create_task_group() as tasks:
            spawner = SimulatedSpawner(programs)
            orchestrator = Orchestrator([first, second], spawner=spawner)
            tasks.start_soon(partial(orchestrator.run, install_signals=False))
            await anyio.sleep(14)  # the first ended at 12, and is about to start again at 15
            orchestrator.request_shutdown()
        assert [(record.name, record.started_at) for record in spawner.records] == [("first.1", 2), ("second.1", 2)]
        assert anyio.current_time() == 19

    run_virtual(main)


def test_orders_end_when_the_run_is_cancelled_and_later_ones_are_refused() -> None:
    async def main() -> None:
        hangs = ServiceSpec(name="hangs", command=("hangs",), notify=True)
        fine = ServiceSpec(name="fine", command=("fine",), notify=True)
        programs = {"hangs": SimulatedProgram(stops_in=None), "fine": SimulatedProgram()}
        orchestrator = Orchestrator([hangs, fine], spawner=SimulatedSpawner(programs))
        refused: list[str] = []

        async def order(fn: Callable[[], Awaitable[None]]) -> None:
            try:
                await fn()
            except MainspringError as error:
                refused.append(type(error).__name__)

        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                with anyio.move_on_after(10):
                    async with anyio.create_task_group() as inner:
                        inner.start_soon(partial(orchestrator.run, install_signals=False))
                        await anyio.sleep(5)
                        tasks.start_soon(order, partial(orchestrator.stop, "hangs"))
                        tasks.start_soon(order, partial(orchestrator.stop, "fine"))
                for fn in (orchestrator.start, orchestrator.restart, orchestrator.stop):
                    tasks.start_soon(order, partial(fn, "fine"))
        assert refused == ["ControlRefusedError"] * 3

    run_virtual(main)
