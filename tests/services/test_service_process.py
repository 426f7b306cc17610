"""One process of a replica: what makes it ready, and how it is brought to its end."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from mainspring import Dispatcher
from mainspring.events import ServiceOutput
from mainspring.runtime.condition import ConditionVariable
from mainspring.services.process import ServiceProcess
from mainspring.services.spawning import Launch
from mainspring.services.spec import ServiceSpec, TcpProbe
from mainspring.testing import ProcessRecord, SimulatedProcess, SimulatedProgram, SimulatedSpawner, run_virtual

Program = Callable[[SimulatedProcess], Awaitable[int | None]]


@asynccontextmanager
async def running(program: Program, **spec: Any) -> AsyncIterator[tuple[ServiceProcess, SimulatedSpawner]]:
    """A process of a program, watched."""
    condition = ConditionVariable()
    spawner = SimulatedSpawner({"it": program})
    process = ServiceProcess(
        ServiceSpec(name="web", command=("it",), **spec), 1, dispatcher=Dispatcher(), condition=condition
    )
    async with spawner, anyio.create_task_group() as tasks:
        await process.start(spawner, Launch("web", 1, ("it",)))
        tasks.start_soon(process.watch)
        yield process, spawner
        await process.destroy(5)
        tasks.cancel_scope.cancel()


async def quiet(process: SimulatedProcess) -> None:
    await anyio.sleep_forever()


@pytest.mark.parametrize(
    ("spec", "line", "news", "ready"),
    [
        ({"notify": True}, "", {"READY": "1"}, True),
        ({"notify": True}, "", {"READY": "0", "STATUS": "soon"}, False),
        ({"notify": True}, "ready", {}, False),
        ({"ready_line": "listening on .*"}, "[info] listening on 80", {}, True),
        ({"ready_line": "^listening"}, "[info] listening on 80", {"READY": "1"}, False),
        ({"ready_line": "up", "notify": True}, "up", {}, False),
        ({"ready_line": "up", "notify": True}, "up", {"READY": "1"}, True),
        ({"probe": TcpProbe("localhost:1")}, "up", {"READY": "1"}, False),
        ({"startup_probe": TcpProbe("localhost:1")}, "up", {"READY": "1"}, False),
    ],
)
def test_it_is_ready_when_all_that_its_service_has_says_so(
    spec: dict[str, Any], line: str, news: dict[str, str], ready: bool
) -> None:
    async def main() -> None:
        async with running(quiet, **spec) as (process, _):
            assert not process.has_said_ready
            if line:
                process.on_line("stdout", line)
            process.on_notify(news)
            assert process.has_said_ready is ready
            process.probes_passed = True
            process.on_notify({"READY": "1"})
            process.on_line("stdout", "listening on the port, up")
            assert process.has_said_ready

    run_virtual(main)


def test_lines_are_passed_on_and_statuses_are_kept() -> None:
    async def main() -> None:
        heard: list[ServiceOutput] = []
        dispatcher = Dispatcher()
        dispatcher.subscribe(ServiceOutput, heard.append)
        spec = ServiceSpec(name="web", command=("it",))
        process = ServiceProcess(spec, 3, dispatcher=dispatcher, condition=ConditionVariable())
        process.on_line("stderr", "one")
        process.on_notify({"STATUS": "busy"})
        process.on_notify({"READY": "1"})
        assert [(each.service, each.replica, each.stream, each.line) for each in heard] == [("web", 3, "stderr", "one")]
        assert process.notice == "busy"

    run_virtual(main)


def time_to_end(
    program: Program, *, before: dict[str, str] | None = None, after: float = 1, **settings: float
) -> tuple[float, list[ProcessRecord]]:
    """Bring a process down ``after`` seconds: how long that takes, and what became of all that it has started."""

    async def main() -> tuple[float, list[ProcessRecord]]:
        async with running(program) as (process, spawner):
            await anyio.sleep(after)
            process.on_notify(before or {})
            began = anyio.current_time()
            timeouts = {"drain_timeout": 20.0, "within": 100.0, "force_kill_timeout": 5.0} | settings
            empty = await process.bring_down(**timeouts)
            assert empty == (not spawner.running())
            return anyio.current_time() - began, spawner.records

    return run_virtual(main)


def test_a_process_that_drains_has_the_drain_timeout() -> None:
    took, (record,) = time_to_end(SimulatedProgram(stops_in=19))
    assert (took, record.returncode, record.killed_at) == (19, 0, None)


def test_a_process_that_does_not_end_is_killed_after_the_drain_timeout() -> None:
    took, (record,) = time_to_end(SimulatedProgram(stops_in=None))
    assert (took, record.returncode, record.told_at, record.killed_at) == (20, -9, 1, 21)


def test_the_drain_leaves_time_to_kill_within_the_whole() -> None:
    took, (record,) = time_to_end(SimulatedProgram(stops_in=None, dies_in=4), within=10)
    assert (took, record.killed_at) == (9, 6)


@pytest.mark.parametrize(("within", "killed_at"), [(5, 3.5), (8, 5), (4, 3)])
def test_a_drain_has_at_least_half_of_the_whole(within: float, killed_at: float) -> None:
    _, (record,) = time_to_end(SimulatedProgram(stops_in=None), within=within)
    assert record.killed_at == killed_at


def test_the_wait_for_a_killed_process_ends() -> None:
    took, _ = time_to_end(SimulatedProgram(stops_in=None, dies_in=60))
    assert took == 25


def test_a_process_may_ask_for_more_time_but_not_beyond_the_whole() -> None:
    more = {"EXTEND_TIMEOUT_USEC": "60000000"}
    took, _ = time_to_end(SimulatedProgram(stops_in=None), before=more)
    assert took == 60
    took, _ = time_to_end(SimulatedProgram(stops_in=None), before=more, within=30)
    assert took == 25


@pytest.mark.parametrize("more", ["", "-1", "1.5", "¹", "9" * 400, "9" * 5_000, "soon"])
def test_a_senseless_extension_changes_nothing_but_the_bound_of_the_whole_holds(more: str) -> None:
    took, _ = time_to_end(SimulatedProgram(stops_in=None), before={"EXTEND_TIMEOUT_USEC": more})
    assert took == 20


def test_what_it_leaves_behind_is_told_to_end_and_killed() -> None:
    polite = SimulatedProgram(stops_in=3)
    took, records = time_to_end(SimulatedProgram(stops_in=2, children=(polite,)))
    assert took == 5
    assert [record.returncode for record in records] == [0, 0]
    took, records = time_to_end(SimulatedProgram(stops_in=2, children=(polite, SimulatedProgram(stops_in=None))))
    assert took == 20
    assert [record.returncode for record in records] == [0, 0, -9]


def test_what_a_process_that_has_ended_leaves_behind_has_the_same_time() -> None:
    took, records = time_to_end(SimulatedProgram(lives=1, children=(SimulatedProgram(stops_in=7),)), after=10)
    assert took == 7
    assert [record.told_at for record in records] == [None, 10]


@pytest.mark.parametrize("children", [(), (SimulatedProgram(stops_in=None),)], ids=["it hangs", "its child hangs"])
def test_hurried_it_is_killed_at_once(children: tuple[SimulatedProgram, ...]) -> None:
    async def main() -> None:
        program = SimulatedProgram(stops_in=0 if children else None, children=children)
        async with running(program) as (process, spawner), anyio.create_task_group() as tasks:
            await anyio.sleep(1)

            async def hurry() -> None:
                await anyio.sleep(3)
                process.hurried = True
                process.on_notify({})  # as anything that happens would

            tasks.start_soon(hurry)
            assert await process.bring_down(drain_timeout=20, within=100, force_kill_timeout=5)
            assert anyio.current_time() == 4
            assert process.killed is (not children)
            assert not spawner.running()

    run_virtual(main)


def test_cancelled_it_can_still_be_destroyed() -> None:
    async def main() -> None:
        async with running(SimulatedProgram(stops_in=None, dies_in=2)) as (process, spawner):
            await anyio.sleep(1)
            with anyio.CancelScope() as scope:
                scope.cancel()
                await process.destroy(5)
            assert anyio.current_time() == 3
            assert spawner.records[0].signals[0].signum == signal.SIGKILL
            assert not spawner.running()

    run_virtual(main)
