"""Start, stop, rolling restart and reload of services that run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import anyio
import pytest

from mainspring.core.state_machine import OrchestratorState, ServiceState
from mainspring.errors import ConfigError, ControlRefusedError, ServiceNotFoundError, ServiceNotRunningError
from mainspring.testing import SimulatedProgram, run_virtual
from orchestrator_support import World, spec

Run = Callable[..., Any]


@pytest.fixture(params=["trio", "asyncio"])
def run(request: pytest.FixtureRequest) -> Run:
    """``run_virtual`` on each event loop."""
    return partial(run_virtual, backend=request.param)


def test_stop_takes_down_what_depends_on_it_first_and_start_brings_up_what_it_depends_on(run: Run) -> None:
    async def main() -> None:
        world = World(
            [spec("store"), spec("web", "store"), spec("other")],
            {"web": SimulatedProgram(stops_in=3, ready_in=1), "store": SimulatedProgram(ready_in=2, stops_in=1)},
        )
        async with world.running() as orchestrator:
            await anyio.sleep(10)
            await orchestrator.stop("store")
            assert anyio.current_time() == 14
            assert (world.ended("web"), world.ended("store"), world.ended("other")) == ([13], [14], [None])
            status = {service.name: service for service in orchestrator.status().services}
            assert (status["web"].state, status["web"].stopped) == (ServiceState.STOPPED, True)
            assert orchestrator.state is OrchestratorState.RUNNING, "a stop that was asked for is no failure"
            await anyio.sleep(100)
            assert len(world.began("store")) == 1
            await orchestrator.start("web")
            assert (world.began("store"), world.began("web")) == ([0, 114], [2, 116])
            assert anyio.current_time() == 117
            await orchestrator.start("web")
            assert len(world.began("web")) == 2
            await orchestrator.stop("web", 1)
            assert len(world.spawner.running("web")) == 0

    run(main)


def test_all_services_stopped_by_name_leave_it_running(run: Run) -> None:
    async def main() -> None:
        world = World([spec("a"), spec("b", "a")])
        async with world.running() as orchestrator:
            await orchestrator.stop("a")
            await anyio.sleep(1000)
            assert not world.spawner.running()
            assert orchestrator.state is OrchestratorState.RUNNING
            await orchestrator.start("b")
            assert len(world.spawner.running()) == 2

    run(main)


def test_start_after_giving_up_tries_again(run: Run) -> None:
    async def main() -> None:
        world = World([spec("a"), spec("mail", core=False)], {"mail": SimulatedProgram(ready_in=None)})
        async with world.running() as orchestrator:
            await anyio.sleep(100)
            with pytest.raises(
                ServiceNotRunningError, match=r"'mail.1' does not run: it did not become ready in 2 tries"
            ):
                await orchestrator.start("mail")
            world.spawner.programs["mail"] = SimulatedProgram()
            await orchestrator.start("mail")
            await anyio.sleep(0)
            assert orchestrator.state is OrchestratorState.RUNNING

    run(main)


def test_a_rolling_restart_takes_one_replica_after_the_other(run: Run) -> None:
    async def main() -> None:
        world = World(
            [spec("web", replicas=3), spec("front", "web")], {"web": SimulatedProgram(ready_in=2, stops_in=1)}
        )
        async with world.running() as orchestrator:
            await anyio.sleep(10)
            await orchestrator.restart("web")
            assert world.began("web") == [0, 0, 0, 11, 14, 17]
            assert sorted(world.told("web")[:3]) == [10, 13, 16]
            assert anyio.current_time() == 19
            assert len(world.began("front")) == 1
            assert [state for _, state in world.states] == ["initializing", "ready", "running"]
            assert all(replica.restarts == 0 for replica in orchestrator.status().services[0].replicas)
            await orchestrator.restart("web", 2)
            assert world.began("web")[6:] == [20]

    run(main)


def test_a_replica_that_does_not_come_back_stops_the_rolling_restart(run: Run) -> None:
    async def main() -> None:
        world = World([spec("web", replicas=3)])
        async with world.running() as orchestrator:
            await anyio.sleep(10)
            world.spawner.programs["web"] = SimulatedProgram(ready_in=None)
            with pytest.raises(ServiceNotRunningError, match=r"'web.1' does not run: it did not become ready"):
                await orchestrator.restart("web")
            assert len(world.spawner.running("web")) == 2
            assert orchestrator.state is OrchestratorState.DEGRADED

    run(main)


def test_a_stop_wins_over_a_rolling_restart(run: Run) -> None:
    async def main() -> None:
        world = World([spec("web", replicas=2)], {"web": SimulatedProgram(ready_in=5)})
        async with world.running() as orchestrator:
            await anyio.sleep(10)

            async def restart() -> None:
                with pytest.raises(ServiceNotRunningError, match="it was told to stop"):
                    await orchestrator.restart("web")

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(restart)
                await anyio.sleep(2)
                await orchestrator.stop("web")
            await anyio.sleep(100)
            assert not world.spawner.running()

    run(main)


def test_reload_restarts_what_has_changed(run: Run) -> None:
    async def main() -> None:
        store, web, old = spec("store"), spec("web", "store", replicas=2), spec("old", "web")
        world = World([store, web, old], {"web": SimulatedProgram(ready_in=1), "new": SimulatedProgram(ready_in=4)})
        async with world.running() as orchestrator:
            await anyio.sleep(10)
            changed = replace(web, environment={"MODE": "new"}, replicas=3, depends_on=("new",))
            await orchestrator.reload([changed, replace(store, replicas=2), spec("new")])
            assert world.ended("old") == [10]
            assert sorted(world.began("store")) == [0, 10]
            assert world.began("new") == [10]
            assert world.told("web")[0] == 10
            assert world.began("web")[2:] == [14, 15, 16]
            assert [record.launch.environment.get("MODE") for record in world.spawner.running("web")] == ["new"] * 3
            assert [service.name for service in orchestrator.status().services] == ["web", "store", "new"]
            await orchestrator.reload([replace(changed, replicas=1), spec("new")])
            assert [record.launch.replica for record in world.spawner.running("web")] == [1]
            assert not world.spawner.running("store")
            assert len(world.began("web")) == 5

    run(main)


def test_reload_of_the_same_restarts_nothing(run: Run) -> None:
    async def main() -> None:
        specs = [spec("store"), spec("web", "store", replicas=2)]
        world = World(specs)
        async with world.running() as orchestrator:
            await anyio.sleep(10)
            await orchestrator.reload([spec("store"), spec("web", "store", replicas=2)])
            assert len(world.spawner.records) == 3

    run(main)


@pytest.mark.parametrize(
    ("specs", "said"),
    [
        ([spec("a", "b"), spec("b", "a")], "cycle"),
        ([], "at least one"),
        ([spec("web", "gone")], "no service here"),
        ([spec("web", listen=("localhost",))], "host:port"),
    ],
)
def test_a_bad_new_set_changes_nothing(run: Run, specs: Any, said: str) -> None:
    async def main() -> None:
        world = World([spec("web"), spec("old")])
        async with world.running() as orchestrator:
            await anyio.sleep(10)
            before = orchestrator.status()
            with pytest.raises(ConfigError, match=said):
                await orchestrator.reload(specs)
            assert orchestrator.status() == before
            assert len(world.spawner.running()) == 2

    run(main)


def test_reload_starts_what_had_been_given_up_and_leaves_down_what_was_stopped(run: Run) -> None:
    async def main() -> None:
        bad = spec("bad", core=False, restart="temporary")
        world = World([spec("web"), bad], {"bad": SimulatedProgram(lives=1, returncode=1)})
        async with world.running() as orchestrator:
            await anyio.sleep(10)
            await orchestrator.stop("web")
            world.spawner.programs["bad"] = SimulatedProgram()
            await orchestrator.reload([spec("web", environment={"A": "1"}), replace(bad, ready_after=2.0)])
            assert len(world.spawner.running("bad")) == 1
            assert not world.spawner.running("web")
            await orchestrator.start("web")
            assert world.spawner.running("web")[0].launch.environment["A"] == "1"

    run(main)


def test_a_reload_that_meets_a_replica_that_does_not_run_leaves_the_next_ones(run: Run) -> None:
    async def main() -> None:
        world = World([spec("web", replicas=2), spec("later", "web")])
        async with world.running() as orchestrator:
            await anyio.sleep(10)
            world.spawner.programs["web"] = SimulatedProgram(ready_in=None)
            changed = [spec("web", replicas=2, environment={"A": "1"}), spec("later", "web", environment={"A": "1"})]
            with pytest.raises(ServiceNotRunningError, match=r"web\.1"):
                await orchestrator.reload(changed)
            assert [len(world.began(name)) for name in ("web", "later")] == [4, 1]
            world.spawner.programs["web"] = SimulatedProgram()
            await orchestrator.reload(changed)
            running = world.spawner.running()
            assert [record.launch.environment["A"] for record in running] == ["1"] * 3

    run(main)


def test_names_that_are_not_there_and_times_that_are_not_right_are_refused(run: Run) -> None:
    async def main() -> None:
        world = World([spec("web"), spec("store")], {"web": SimulatedProgram(stops_in=5)})
        with pytest.raises(ControlRefusedError, match="not running"):
            await world.orchestrator.stop("web")
        async with world.running() as orchestrator:
            with pytest.raises(
                ServiceNotFoundError, match="'wbe' is no service of 'mainspring'; there are: web, store"
            ):
                await orchestrator.restart("wbe")
            with pytest.raises(ServiceNotFoundError, match="replicas 1 to 1, and none 2"):
                await orchestrator.start("web", 2)
            await anyio.sleep(1)
            orchestrator.request_shutdown()
            for refused in (orchestrator.start("web"), orchestrator.reload([spec("web")])):
                with pytest.raises(ControlRefusedError, match="it is shutting down"):
                    await refused

    run(main)
