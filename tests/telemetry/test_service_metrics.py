"""Metrics of an orchestrator, from its events and its status, in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from prometheus_client import CollectorRegistry

from mainspring.core.state_machine import OrchestratorState, ServiceState
from mainspring.services.spec import HealthCheckSettings, Lifecycle, StartupSettings
from mainspring.telemetry.process_usage import ProcessUsage
from mainspring.telemetry.service_metrics import ServiceMetrics
from mainspring.testing import SimulatedProgram, run_virtual
from orchestrator_support import World, spec

if TYPE_CHECKING:
    from mainspring import Alert

Run = Callable[..., Any]
Samples = dict[str, dict[tuple[str, ...], float]]


@pytest.fixture(params=["trio", "asyncio"])
def run(request: pytest.FixtureRequest) -> Run:
    """``run_virtual`` on each event loop."""
    return partial(run_virtual, backend=request.param)


def metrics_of(world: World) -> ServiceMetrics:
    metrics = ServiceMetrics(world.orchestrator, registry=CollectorRegistry())
    metrics.subscribe(world.orchestrator.dispatcher)
    return metrics


async def samples(metrics: ServiceMetrics, usage: dict[int, ProcessUsage] | None = None) -> Samples:
    """The values by name of sample and values of labels."""
    found: Samples = {}
    for family in await metrics.collect(usage or {}):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
    return found


def test_counters_begin_at_zero_for_each_service_and_states_are_told(run: Run) -> None:
    async def main() -> None:
        world = World([spec("store", replicas=2), spec("web", "store")], {"store": SimulatedProgram(ready_in=3)})
        metrics = metrics_of(world)
        async with world.running():
            await anyio.sleep(1)
            found = await samples(metrics)
            assert found["mainspring_service_restarts_total"] == {("store",): 0, ("web",): 0}
            assert found["mainspring_service_failed_starts_total"] == {("store",): 0, ("web",): 0}
            assert found["mainspring_service_probes_total"]["web", "failed"] == 0
            assert found["mainspring_service_start_seconds_count"] == {("store",): 0, ("web",): 0}
            assert found["mainspring_ready"] == {(): 0}
            await anyio.sleep(9)
            found = await samples(metrics)
            assert found["mainspring_ready"] == {(): 1}
            states = {key: value for key, value in found["mainspring_service_state"].items() if value}
            assert states == {(*key, "running"): 1 for key in (("store", "1"), ("store", "2"), ("web", "1"))}
            assert len(found["mainspring_service_state"]) == 3 * len(ServiceState)
            moves = {key: value for key, value in found["mainspring_service_transitions_total"].items() if value}
            assert moves == {
                ("store", "starting"): 2, ("store", "running"): 2, ("web", "starting"): 1, ("web", "running"): 1,
            }  # fmt: skip
            assert found["mainspring_orchestrator_state"] == {
                (str(state),): float(state is OrchestratorState.RUNNING) for state in OrchestratorState
            }
            assert found["mainspring_service_uptime_seconds"]["store", "2"] == 7
            assert found["mainspring_service_start_seconds_sum"]["store",] == 6
            assert found["mainspring_service_start_seconds_bucket"]["store", "2.5"] == 0
            assert found["mainspring_service_start_seconds_bucket"]["store", "5.0"] == 2
            assert found["mainspring_service_start_seconds_count"] == {("store",): 2, ("web",): 1}

    run(main)


def test_restarts_and_failed_starts_are_counted_and_what_an_operator_asks_for_is_not(run: Run) -> None:
    async def take(alert: Alert) -> None: ...

    async def refuse(alert: Alert) -> None:
        raise ConnectionError

    async def main() -> None:
        world = World(
            [spec("web"), spec("bad", core=False), spec("falls", core=False)],
            {
                "bad": SimulatedProgram(ready_in=None, lives=0.1, returncode=3),
                "falls": SimulatedProgram(lives=1, returncode=3),
            },
            alerts=[take, refuse],
        )
        metrics = metrics_of(world)
        async with world.running() as orchestrator:
            await anyio.sleep(300)
            await orchestrator.restart("web")
            await orchestrator.stop("web")
            await orchestrator.start("web")
            found = await samples(metrics)
            assert found["mainspring_service_restarts_total"] == {("web",): 0, ("bad",): 1, ("falls",): 3}
            assert found["mainspring_service_failed_starts_total"] == {("web",): 0, ("bad",): 2, ("falls",): 0}
            assert found["mainspring_service_faults_total"]["bad", "given_up"] == 1
            assert found["mainspring_alerts_total"] == {("sent",): 2, ("failed",): 2}
            assert found["mainspring_service_faults_total"]["web", "given_up"] == 0

    run(main)


def test_each_answer_of_a_probe_is_counted(run: Run) -> None:
    async def main() -> None:
        answers = iter([False, True, True, False])

        async def probe() -> bool:
            return next(answers, True)

        life = Lifecycle(
            startup=StartupSettings(health_check_interval=5), health_check=HealthCheckSettings(interval=10)
        )
        world = World([spec("web", notify=False, probe=probe, lifecycle=life)])
        metrics = metrics_of(world)
        async with world.running():
            await anyio.sleep(46)
            found = await samples(metrics)
            assert found["mainspring_service_probes_total"] == {("web", "passed"): 4, ("web", "failed"): 2}

    run(main)


def test_what_processes_use_is_told_by_replica_where_it_is_known(run: Run) -> None:
    async def main() -> None:
        world = World([spec("web", replicas=2)])
        metrics = metrics_of(world)
        async with world.running() as orchestrator:
            await anyio.sleep(1)
            pid = orchestrator.status().services[0].replicas[1].pid
            assert pid is not None
            found = await samples(metrics, {pid: ProcessUsage(2**20, 1.5, 3)})
            assert found["mainspring_service_memory_bytes"] == {("web", "2"): 2**20}
            assert found["mainspring_service_cpu_seconds_total"] == {("web", "2"): 1.5}
            assert found["mainspring_service_processes"] == {("web", "2"): 3}

    run(main)


def test_a_service_that_a_reload_removed_is_left_out(run: Run) -> None:
    async def main() -> None:
        world = World([spec("web"), spec("old")])
        metrics = metrics_of(world)
        async with world.running() as orchestrator:
            await anyio.sleep(1)
            assert ("old",) in (await samples(metrics))["mainspring_service_restarts_total"]
            await orchestrator.reload([spec("web")])
            found = await samples(metrics)
            ours = {name: keys for name, keys in found.items() if name.startswith("mainspring_service")}
            assert not any("old" in key for keys in ours.values() for key in keys)

    run(main)
