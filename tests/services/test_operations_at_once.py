"""Two operators at once: a reload, a restart, a start and a stop of one service overlap."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import anyio
import pytest

from mainspring.errors import MainspringError
from mainspring.testing import SimulatedProgram, run_virtual
from orchestrator_support import World, spec

Run = Callable[..., Any]
SLOW = SimulatedProgram(ready_in=1, stops_in=5)


@pytest.fixture(params=["trio", "asyncio"])
def run(request: pytest.FixtureRequest) -> Run:
    """``run_virtual`` on each event loop."""
    return partial(run_virtual, backend=request.param)


async def perform(said: list[str], operation: Awaitable[None]) -> None:
    """Await an operation, and note what it said: ``done``, or its error."""
    try:
        await operation
    except MainspringError as error:
        said.append(str(error))
    else:
        said.append("done")


def running(world: World) -> list[str]:
    return sorted(f"{record.launch.service}.{record.launch.replica}" for record in world.spawner.running())


@pytest.mark.parametrize("at", [0.0, 2.0, 5.0, 5.5, 9.0, 11.0, 16.5])
def test_a_stop_wins_over_a_rolling_reload_and_a_restart_that_waits_for_it(run: Run, at: float) -> None:
    async def main() -> None:
        world = World([spec("web", replicas=3), spec("keep")], {"web": SLOW})
        said: list[str] = []
        async with world.running() as orchestrator:
            await anyio.sleep(10)
            changed = [spec("web", replicas=3, environment={"A": "1"}), spec("keep")]
            with anyio.fail_after(60):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(perform, said, orchestrator.reload(changed))
                    await anyio.sleep(0.1)
                    tasks.start_soon(perform, said, orchestrator.restart("web"))
                    await anyio.sleep(at)
                    await orchestrator.stop("web")
                    assert running(world) == ["keep.1"]
            await anyio.sleep(50)
            assert running(world) == ["keep.1"]
            assert all("it was told to stop" in line for line in said)
            assert len(said) == 2

    run(main)


@pytest.mark.parametrize("at", [0.5, 1.5, 2.5, 3.5, 4.5])
def test_nothing_is_started_by_a_reload_once_a_stop_was_asked_for(run: Run, at: float) -> None:
    async def main() -> None:
        world = World([spec("web"), spec("keep")], {"web": SLOW})
        said: list[str] = []
        async with world.running() as orchestrator:
            await anyio.sleep(10)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(perform, said, orchestrator.reload([spec("web", ready_after=2.0), spec("keep")]))
                await anyio.sleep(at)
                await orchestrator.stop("web")
            await anyio.sleep(50)
            assert world.began("web") == [0]
            assert said == ["service 'web' does not run: it was told to stop"]

    run(main)


def test_a_stop_wins_over_a_start_that_begins_while_it_stops(run: Run) -> None:
    async def main() -> None:
        world = World([spec("web", replicas=2), spec("keep")], {"web": SLOW})
        said: list[str] = []
        async with world.running() as orchestrator:
            await anyio.sleep(10)
            await orchestrator.stop("web", 1)
            with anyio.fail_after(60):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(perform, said, orchestrator.stop("web"))
                    await anyio.sleep(2)
                    tasks.start_soon(perform, said, orchestrator.start("web"))
            assert running(world) == ["keep.1"]
            assert sorted(said) == ["done", "service 'web.1' does not run: it was told to stop"]

    run(main)


def test_a_restart_does_not_bring_back_a_replica_that_a_reload_has_taken_away(run: Run) -> None:
    async def main() -> None:
        world = World([spec("web", replicas=3)], {"web": SLOW})
        said: list[str] = []
        async with world.running() as orchestrator:
            await anyio.sleep(10)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(perform, said, orchestrator.reload([spec("web", replicas=1)]))
                await anyio.sleep(0.1)
                tasks.start_soon(perform, said, orchestrator.restart("web", 3))
            assert said == ["done", "service 'web' has replicas 1 to 1, and none 3"]
            assert running(world) == ["web.1"]

    run(main)


def test_a_start_that_waits_for_replicas_which_a_reload_takes_away_ends_with_an_error(run: Run) -> None:
    async def main() -> None:
        world = World([spec("web", replicas=3)], {"web": SimulatedProgram(ready_in=5)})
        said: list[str] = []
        async with world.running() as orchestrator:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(perform, said, orchestrator.start("web"))
                await anyio.sleep(1)
                tasks.start_soon(perform, said, orchestrator.reload([spec("web", replicas=1)]))
            assert sorted(said) == ["done", "service 'web.2' does not run: it was told to stop"]

    run(main)


def test_a_restart_of_all_passes_over_services_that_a_reload_takes_away(run: Run) -> None:
    async def main() -> None:
        world = World([spec("a"), spec("b", "a")], {"a": SLOW})
        said: list[str] = []
        async with world.running() as orchestrator:
            await anyio.sleep(10)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(perform, said, orchestrator.restart())
                await anyio.sleep(1)
                tasks.start_soon(perform, said, orchestrator.reload([spec("a")]))
            assert said == ["done", "done"]
            assert running(world) == ["a.1"]

    run(main)


def test_a_reload_that_waits_for_a_restart_stops_nothing_out_of_turn_in_a_shutdown(run: Run) -> None:
    async def main() -> None:
        world = World([spec("store"), spec("web", "store")], {"web": SLOW, "store": SimulatedProgram(ready_in=10)})
        said: list[str] = []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(world.run)
            await anyio.sleep(20)
            tasks.start_soon(perform, said, world.orchestrator.restart("store"))
            await anyio.sleep(1)
            changed = [spec("store", environment={"A": "1"}), spec("web", "store")]
            tasks.start_soon(perform, said, world.orchestrator.reload(changed))
            await anyio.sleep(1)
            world.orchestrator.request_shutdown("enough")
        assert (world.told("web"), world.ended("web"), world.told("store")[-1]) == ([22], [27], 27)
        assert len(said) == 2

    run(main)


def test_a_restart_of_what_has_ended_starts_what_it_depends_on(run: Run) -> None:
    async def main() -> None:
        world = World([spec("store"), spec("web", "store")])
        async with world.running() as orchestrator:
            await anyio.sleep(1)
            await orchestrator.stop("store")
            await orchestrator.restart("web")
            assert running(world) == ["store.1", "web.1"]

    run(main)
