"""Which replicas are restarted with one that has ended, in which order, and how many restarts are too many."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import anyio
import pytest

from mainspring.testing import SimulatedProcess, SimulatedProgram, run_virtual
from orchestrator_support import World, spec

Run = Callable[..., Any]


@pytest.fixture(params=["trio", "asyncio"])
def run(request: pytest.FixtureRequest) -> Run:
    """``run_virtual`` on each event loop."""
    return partial(run_virtual, backend=request.param)


def fails_once(at: float, **settings: Any) -> Callable[[SimulatedProcess], Any]:
    """A program that fails when it has been ready for ``at`` seconds, and goes on for ever the next time."""
    lives = [at]

    async def program(process: SimulatedProcess) -> int:
        limits = {"lives": lives.pop(), "returncode": 1} if lives else {}
        return await SimulatedProgram(**settings, **limits)(process)

    return program


def test_one_for_one_restarts_it_alone(run: Run) -> None:
    async def main() -> None:
        world = World([spec("a"), spec("b", "a", replicas=2), spec("c", "b")], {"a": fails_once(10)})
        async with world.running():
            await anyio.sleep(60)
        assert (world.began("a"), world.began("b"), world.began("c")) == ([0, 11], [0, 0], [0])

    run(main)


def test_one_for_all_stops_the_others_in_reverse_and_starts_all_in_order(run: Run) -> None:
    async def main() -> None:
        takes_time = SimulatedProgram(ready_in=2, stops_in=3)
        world = World(
            [spec("a"), spec("b", "a"), spec("c", "b"), spec("other")],
            {"a": takes_time, "b": fails_once(10, ready_in=2), "c": takes_time, "other": takes_time},
            strategy="one_for_all",
        )
        async with world.running():
            await anyio.sleep(60)
        assert world.ended("b")[0] == 14
        assert world.told("c")[0] == world.told("other")[0] == 14
        assert world.told("a")[0] == 17, "c depends on it, by way of b, which is down"
        assert (world.began("a"), world.began("b"), world.began("c")) == ([0, 20], [2, 22], [4, 24])
        assert world.began("other") == [0, 20]

    run(main)


def test_one_for_all_takes_the_other_replicas_of_its_service_along(run: Run) -> None:
    async def main() -> None:
        world = World([spec("a", replicas=2)], {"a": fails_once(10)}, strategy="one_for_all")
        async with world.running():
            await anyio.sleep(60)
        assert sorted(world.began("a")) == [0, 0, 10, 11]

    run(main)


def test_rest_for_one_restarts_what_was_started_after_it(run: Run) -> None:
    async def main() -> None:
        world = World(
            [spec("a"), spec("b", "a"), spec("c", "b")], {"b": fails_once(10, ready_in=1)}, strategy="rest_for_one"
        )
        async with world.running():
            await anyio.sleep(60)
        assert (world.began("a"), world.began("b"), world.began("c")) == ([0], [0, 12], [1, 13])

    run(main)


def test_a_second_end_during_a_restart_of_all_joins_it(run: Run) -> None:
    async def main() -> None:
        slow = SimulatedProgram(stops_in=5)
        world = World(
            [spec("a"), spec("b"), spec("c", "b")],
            {"a": fails_once(10), "b": fails_once(12, stops_in=9), "c": slow},
            strategy="one_for_all",
        )
        async with world.running():
            await anyio.sleep(60)
        assert world.ended("b")[0] == 12, "it failed by itself while c was still stopping"
        assert (world.began("a"), world.began("b"), world.began("c")) == ([0, 15], [0, 15], [0, 15])

    run(main)


def test_a_shutdown_wins_over_a_restart_of_all(run: Run) -> None:
    async def main() -> None:
        world = World(
            [spec("a"), spec("b", "a")],
            {"a": fails_once(10), "b": SimulatedProgram(stops_in=5)},
            strategy="one_for_all",
        )
        async with world.running():
            await anyio.sleep(12)
        assert anyio.current_time() == 15
        assert len(world.spawner.records) == 2

    run(main)


@pytest.mark.parametrize("strategy", ["one_for_one", "one_for_all", "rest_for_one"])
def test_too_many_restarts_in_a_period_end_the_whole(run: Run, strategy: str) -> None:
    async def main() -> None:
        crashes = SimulatedProgram(lives=400, returncode=1)
        world = World([spec("a"), spec("b")], {"a": crashes}, strategy=strategy, max_restarts=2, period=1000)
        report = await world.run()
        assert report.exit_status == 1
        assert report.failure == "more than 2 restarts in 1000 s; the last one was of 'a.1'"
        assert len(world.began("a")) == 3

    run(main)


def test_restarts_that_are_spread_out_are_not_too_many(run: Run) -> None:
    async def main() -> None:
        crashes = SimulatedProgram(lives=400, returncode=1)
        world = World([spec("a")], {"a": crashes}, max_restarts=2, period=700)
        async with world.running():
            await anyio.sleep(10_000)
        assert len(world.began("a")) > 20

    run(main)
