"""An orchestrator in virtual time: order, states, escalation and the stop, with simulated processes."""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import anyio
import pytest

from mainspring.core.state_machine import OrchestratorState, ServiceState
from mainspring.errors import ConfigError
from mainspring.events import ServiceGivenUp
from mainspring.runtime.signals import ShutdownCoordinator
from mainspring.services.orchestrator import Orchestrator
from mainspring.services.spec import ServiceSpec, ShutdownSettings
from mainspring.testing import SimulatedProgram, SimulatedSpawner, run_virtual
from orchestrator_support import World, lifecycle, spec

Run = Callable[..., Any]


@pytest.fixture(params=["trio", "asyncio"])
def run(request: pytest.FixtureRequest) -> Run:
    """``run_virtual`` on each event loop."""
    return partial(run_virtual, backend=request.param)


def test_services_start_when_all_they_depend_on_run_and_stop_before_them(run: Run) -> None:
    async def main() -> None:
        world = World(
            [spec("web", "store", "cache"), spec("store"), spec("cache"), spec("mail", core=False)],
            {
                "store": SimulatedProgram(ready_in=5, stops_in=1),
                "cache": SimulatedProgram(ready_in=3),
                "web": SimulatedProgram(ready_in=2, stops_in=4),
                "mail": SimulatedProgram(ready_in=10),
            },
        )
        async with world.running():
            await anyio.sleep(20)
        assert (world.began("store"), world.began("cache"), world.began("web")) == ([0], [0], [5])
        assert world.told("web") == world.told("mail") == [20]
        assert world.told("store") == world.told("cache") == [24]
        assert world.states == [
            (0, "initializing"),
            (7, "ready"),
            (10, "running"),
            (20, "shutting down"),
            (25, "terminated"),
        ]
        report = world.orchestrator.report
        assert report is not None
        assert (report.exit_status, report.clean, report.duration) == (0, True, 5)
        assert str(report) == "services stopped (end of the test) in 5.00 s: clean"

    run(main)


@pytest.mark.anyio
async def test_without_a_spawner_it_starts_processes_of_this_machine() -> None:
    service = ServiceSpec(name="once", command=("sh", "-c", "exit 0"), restart="temporary")
    report = await Orchestrator([service]).run(install_signals=False)
    assert report.exit_status == 0


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {"probe": "http://x"},
            "probe must be an HttpProbe, TcpProbe, ExecProbe, GrpcProbe or a function, not 'http://x'",
        ),
        ({"startup_probe": 1}, "startup_probe must be an HttpProbe"),
        ({"hooks": [("true",)]}, "hooks must be a mapping of moments to lists of Hook"),
        ({"hooks": {"pre_start": [["true"]]}}, "hooks: pre_start must be a list of Hook"),
        ({"hooks": {"before": []}}, "hooks: the moment must be one of pre_start, "),
        ({"resources": {"memory": 1000}}, "resources must be a Resources, not"),
        ({"lifecycle": {}}, "lifecycle must be a Lifecycle"),
        ({"replace_after": 5}, "replace_after must be a Replacement"),
    ],
)
def test_a_setting_of_another_type_is_named(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=f"service 'web': {text}"):
        ServiceSpec(name="web", command=("web",), **settings)


def test_a_core_service_that_is_given_up_ends_the_whole(run: Run) -> None:
    async def main() -> None:
        world = World([spec("store"), spec("web", "store")], {"web": SimulatedProgram(lives=1, returncode=3)})
        report = await world.run()
        assert world.began("web") == [0, 2, 5, 10]
        assert report.exit_status == 1
        assert (
            report.failure
            == "service 'web' was given up: it has been restarted 3 times in a row; the last time: exit status 3"
        )
        assert "web.1: crashed" in str(report)
        assert [each.service for each in world.events if isinstance(each, ServiceGivenUp)] == ["web"]
        assert world.ended("store") == [11]

    run(main)


def test_without_an_optional_service_the_whole_is_degraded(run: Run) -> None:
    async def main() -> None:
        world = World(
            [spec("store"), spec("mail", core=False), spec("queue", "mail", core=False)],
            {"mail": SimulatedProgram(ready_in=None)},
        )
        async with world.running() as orchestrator:
            await anyio.sleep(100)
            assert orchestrator.state is OrchestratorState.DEGRADED
            status = {service.name: service for service in orchestrator.status().services}
            assert status["mail"].failed
            assert status["mail"].error == "it did not become ready in 2 tries; the last time: not ready within 20 s"
            assert status["queue"].error == "it depends on 'mail', which has failed or was stopped"
            assert not world.began("queue")
        assert world.states[:3] == [(0, "initializing"), (0, "ready"), (20, "degraded")]
        assert world.orchestrator.report is not None
        assert world.orchestrator.report.exit_status == 0

    run(main)


def test_a_core_service_that_depends_on_one_that_was_given_up_ends_the_whole(run: Run) -> None:
    async def main() -> None:
        world = World(
            [spec("mail", core=False), spec("web", "mail")], {"mail": SimulatedProgram(ready_in=None, stops_in=None)}
        )
        report = await world.run()
        assert report.failure == "service 'web' was given up: it depends on 'mail', which has failed or was stopped"

    run(main)


def test_it_ends_by_itself_with_the_worst_status(run: Run) -> None:
    async def main() -> None:
        world = World(
            [
                spec("migrate", restart="transient"),
                spec("load", "migrate", restart="temporary"),
                spec("check", restart="temporary", replicas=2),
            ],
            {
                "migrate": SimulatedProgram(lives=5),
                "load": SimulatedProgram(lives=5, returncode=4),
                "check": SimulatedProgram(lives=1),
            },
        )
        report = await world.run()
        assert report.exit_status == 4
        assert report.reason == "all services have ended"
        assert anyio.current_time() == 5
        assert world.states[-1] == (5, "terminated")

    run(main)


def test_what_has_done_its_work_lets_its_dependents_start(run: Run) -> None:
    async def main() -> None:
        world = World(
            [spec("migrate", restart="transient", notify=False, ready_after=60), spec("web", "migrate")],
            {"migrate": SimulatedProgram(lives=5)},
        )
        async with world.running() as orchestrator:
            await anyio.sleep(10)
            assert world.began("web") == [5]
            assert orchestrator.state is OrchestratorState.RUNNING

    run(main)


def test_a_restart_degrades_the_whole_until_it_runs_again(run: Run) -> None:
    async def main() -> None:
        world = World([spec("web")], {"web": SimulatedProgram(lives=10, ready_in=2, returncode=1)})
        async with world.running():
            await anyio.sleep(20)
        assert world.states[:5] == [
            (0, "initializing"),
            (2, "ready"),
            (2, "running"),
            (12, "degraded"),
            (15, "running"),
        ]

    run(main)


def test_the_stop_of_all_is_capped_and_what_is_left_is_killed(run: Run) -> None:
    async def main() -> None:
        slow = SimulatedProgram(stops_in=100)
        world = World(
            [spec("store"), spec("web", "store")],
            {"store": slow, "web": slow},
            shutdown=ShutdownSettings(timeout=8),
        )
        async with world.running():
            await anyio.sleep(10)
        assert world.ended("web") == world.ended("store") == [18]
        report = world.orchestrator.report
        assert report is not None
        assert report.exit_status == 70
        assert "web.1: cancelled after 8.00 s" in str(report)

    run(main)


def test_a_service_with_a_longer_timeout_of_its_own_has_it(run: Run) -> None:
    async def main() -> None:
        world = World(
            [spec("store"), spec("web", "store", lifecycle=lifecycle(timeout=120, drain_timeout=100))],
            {"store": SimulatedProgram(stops_in=10), "web": SimulatedProgram(stops_in=90)},
        )
        async with world.running():
            await anyio.sleep(10)
        assert (world.ended("web"), world.ended("store")) == ([100], [110])
        assert world.orchestrator.report is not None
        assert world.orchestrator.report.clean

    run(main)


def test_shutdown_with_a_timeout_says_whether_it_was_clean(run: Run) -> None:
    async def main() -> None:
        world = World([spec("web")], {"web": SimulatedProgram(stops_in=5)})
        async with world.running() as orchestrator:
            await anyio.sleep(1)
            assert not await orchestrator.shutdown(timeout=2)
            assert anyio.current_time() == 3

    run(main)


def test_a_shutdown_before_the_run_starts_nothing(run: Run) -> None:
    async def main() -> None:
        world = World([spec("web")])
        assert await world.orchestrator.shutdown()
        report = await world.run()
        assert (report.reason, report.exit_status) == ("shutdown()", 0)
        assert not world.spawner.records
        assert [state for _, state in world.states] == ["shutting down", "terminated"]
        with pytest.raises(ConfigError, match="runs once"):
            await world.run()

    run(main)


def test_a_stop_wins_over_a_start_and_over_a_pending_restart(run: Run) -> None:
    async def main() -> None:
        world = World(
            [spec("store"), spec("web", "store"), spec("crash")],
            {"store": SimulatedProgram(ready_in=15), "crash": SimulatedProgram(lives=1.5, returncode=1)},
        )
        async with world.running():
            await anyio.sleep(2)
        assert anyio.current_time() == 2
        assert not world.began("web")
        assert len(world.began("crash")) == 1

    run(main)


def test_a_cancelled_run_kills_all(run: Run) -> None:
    async def main() -> None:
        world = World([spec("web", replicas=3), spec("store")], {"web": SimulatedProgram(stops_in=None)})
        with anyio.move_on_after(10):
            await world.run()
        assert anyio.current_time() == 10
        assert not world.spawner.running()
        assert world.orchestrator.state is OrchestratorState.TERMINATED

    run(main)


def test_signals_stop_it_and_the_second_one_leaves_little_time(run: Run) -> None:
    async def main() -> None:
        world = World([spec("store"), spec("web", "store")], {"web": SimulatedProgram(stops_in=10)})
        reports = []

        async def run_it() -> None:
            reports.append(await world.orchestrator.run())

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run_it)
            await anyio.sleep(5)
            signal.raise_signal(signal.SIGTERM)
            await anyio.sleep(3)
            assert world.told("web") == [5]
            assert ShutdownCoordinator.get() is not None
            signal.raise_signal(signal.SIGINT)
        assert reports[0].reason == "SIGTERM"
        assert reports[0].exit_status == 128 + signal.SIGINT
        assert world.told("web") == [5]
        assert world.ended("web") == [8 + ShutdownSettings().force_kill_timeout]
        assert not world.spawner.running()

    run(main)


def test_status_is_a_tree_of_values(run: Run) -> None:
    async def main() -> None:
        world = World(
            [spec("store"), spec("web", "store", replicas=2)], {"web": SimulatedProgram(lives=6, returncode=1)}
        )
        async with world.running() as orchestrator:
            await anyio.sleep(9)
            status = orchestrator.status()
            assert (status.name, status.state, status.state_seconds) == ("mainspring", "running", 2)
            store, web = status.services
            assert (web.name, web.state, web.core, web.depends_on) == ("web", ServiceState.RUNNING, True, ("store",))
            assert (web.restarts, len(web.replicas)) == (2, 2)
            (replica,) = store.replicas
            assert replica.pid == world.spawner.of("store")[0].pid
            assert (replica.number, replica.uptime, replica.restarts, replica.error) == (1, 9, 0, None)

    run(main)


@pytest.mark.parametrize(
    ("specs", "settings", "said"),
    [
        ([], {}, "at least one"),
        ([spec("a"), spec("a")], {}, "twice"),
        ([spec("a", "b"), spec("b", "a")], {}, "a -> b -> a|b -> a -> b"),
        ([spec("a")], {"strategy": "all"}, "one_for_one, one_for_all, rest_for_one"),
        ([spec("a")], {"max_restarts": -1}, "max_restarts"),
        ([spec("a")], {"period": 0}, "period"),
        (["a"], {}, "list of ServiceSpec"),
    ],
)
def test_what_cannot_work_is_a_config_error(specs: Any, settings: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Orchestrator(specs, spawner=SimulatedSpawner({}), **settings)
