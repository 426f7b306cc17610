"""What tests of orchestrators share: services, simulated processes, and what became of them."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio

from mainspring.events import Event, OrchestratorStateChanged
from mainspring.policies import RestartPolicy
from mainspring.services.orchestrator import Orchestrator
from mainspring.services.spec import Lifecycle, ServiceSpec, ShutdownSettings, StartupSettings
from mainspring.testing import SimulatedProgram, SimulatedSpawner

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from mainspring.services.report import OrchestratorReport


def spec(name: str, *depends_on: str, **settings: Any) -> ServiceSpec:
    """A service whose program has its name, which notifies, and which is restarted after 1 s, 2 s, 4 s."""
    settings.setdefault("notify", True)
    settings.setdefault("lifecycle", lifecycle())
    return ServiceSpec(name=name, command=(name,), depends_on=depends_on, **settings)


def lifecycle(**shutdown: float) -> Lifecycle:
    return Lifecycle(
        startup=StartupSettings(timeout=20, max_retries=2),
        shutdown=ShutdownSettings(**shutdown),
        restart_policy=RestartPolicy(max_retries=3, jitter="none"),
    )


class World:
    """An orchestrator, its simulated processes, and what it has told of."""

    def __init__(
        self, specs: Sequence[ServiceSpec], programs: Mapping[str, SimulatedProgram] | None = None, **settings: Any
    ) -> None:
        known = {each.name: SimulatedProgram() for each in specs} | dict(programs or {})
        self.spawner = SimulatedSpawner(known)
        self.orchestrator = Orchestrator(specs, spawner=self.spawner, **settings)
        self.events: list[Event] = []
        self.orchestrator.dispatcher.subscribe(Event, self.events.append)
        self.states: list[tuple[float, str]] = []
        self.orchestrator.dispatcher.subscribe(
            OrchestratorStateChanged, lambda event: self.states.append((anyio.current_time(), str(event.new)))
        )

    async def run(self, **keywords: Any) -> OrchestratorReport:
        """Run it to its end, without signals."""
        return await self.orchestrator.run(install_signals=False, **keywords)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Orchestrator]:
        """Run it while the block does."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.run)
            await anyio.sleep(0)
            yield self.orchestrator
            self.orchestrator.request_shutdown("end of the test")
        assert not self.spawner.running()
        assert not self.spawner.doubles()
        assert not any(record.abandoned for record in self.spawner.records)

    def began(self, service: str) -> list[float]:
        """When the processes of a service were started."""
        return [record.started_at for record in self.spawner.of(service)]

    def ended(self, service: str) -> list[float | None]:
        """When they ended."""
        return [record.ended_at for record in self.spawner.of(service)]

    def told(self, service: str) -> list[float | None]:
        """When they were told to stop."""
        return [record.told_at for record in self.spawner.of(service)]
