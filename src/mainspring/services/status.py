"""The present status of an orchestrator, as one frozen value: what ``/status``, ``top`` and the dashboard show."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

import anyio

from mainspring.core.clock import utc_now
from mainspring.core.state_machine import OrchestratorState, ServiceState
from mainspring.services.managed_service import WORKING

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from mainspring.core.state_machine import StateMachine
    from mainspring.services.managed_service import ManagedReplica, ManagedService


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """One replica. ``since``: when its state began (UTC). ``uptime``: seconds since its process became ready, else 0.

    ``restarts``: how often it was started again since it was last told to start. ``error``: what its probe, its last start or
    its end says. ``notice``: what its process last said of itself by ``STATUS=``.
    """

    number: int
    state: ServiceState
    since: datetime
    state_seconds: float
    pid: int | None
    uptime: float
    restarts: int
    error: str | None
    notice: str


@dataclass(frozen=True, slots=True)
class ServiceStatus:
    """One service. ``state`` is that of its replicas together. ``stopped``: it was told to stop by name.

    ``error``: why it was given up, or what the first replica says that has an error; None where all is well.
    """

    name: str
    state: ServiceState
    core: bool
    stopped: bool
    failed: bool
    depends_on: tuple[str, ...]
    error: str | None
    replicas: tuple[ReplicaStatus, ...]

    @property
    def restarts(self) -> int:
        """The restarts of its replicas together."""
        return sum(replica.restarts for replica in self.replicas)

    @property
    def ready(self) -> bool:
        """True if one of its replicas works, or it has done its work."""
        works = any(replica.state in WORKING for replica in self.replicas)
        return works or (self.state is ServiceState.STOPPED and not (self.failed or self.stopped))


@dataclass(frozen=True, slots=True)
class OrchestratorStatus:
    """An orchestrator and its services, in the order given. ``reason``: why it shuts down, and ``failure``: what could not be
    kept running; None where there is none."""

    name: str
    state: OrchestratorState
    since: datetime
    state_seconds: float
    reason: str | None
    failure: str | None
    services: tuple[ServiceStatus, ...]

    @property
    def started(self) -> bool:
        """True if all core services have started."""
        return self.state in _STARTED

    @property
    def unready_reasons(self) -> tuple[str, ...]:
        """Why it is not ready: it starts, it stops, or a core service has no replica that works. None: it is ready."""
        if self.reason is not None:
            return (f"it shuts down: {self.reason}",)
        if self.state not in _STARTED:
            return (f"it is {self.state}",)
        return tuple(
            f"no replica of service {service.name!r} works" + (f": {service.error}" if service.error else "")
            for service in self.services
            if service.core and not service.ready
        )


_STARTED = (OrchestratorState.READY, OrchestratorState.RUNNING, OrchestratorState.DEGRADED)


def status_of(
    name: str,
    machine: StateMachine[OrchestratorState],
    services: Mapping[str, ManagedService],
    *,
    reason: str | None,
    failure: str | None,
) -> OrchestratorStatus:
    """Return the present status."""
    now, date = anyio.current_time(), utc_now()
    seconds = now - machine.since if machine.since else 0.0
    return OrchestratorStatus(
        name=name,
        state=machine.state,
        since=date - timedelta(seconds=seconds),
        state_seconds=seconds,
        reason=reason,
        failure=failure,
        services=tuple(_service(service, now, date) for service in services.values()),
    )


def _service(service: ManagedService, now: float, date: datetime) -> ServiceStatus:
    each = [service.replicas[number] for number in sorted(service.replicas)]
    replicas = tuple(_replica(managed, now, date) for managed in each)
    error = service.why_failed or next((replica.error for replica in replicas if replica.error is not None), None)
    return ServiceStatus(
        name=service.spec.name,
        state=state_together([replica.state for replica in replicas]),
        core=service.spec.core,
        stopped=service.stopped,
        failed=service.failed,
        depends_on=service.spec.depends_on,
        error=error or None,
        replicas=replicas,
    )


def _replica(managed: ManagedReplica, now: float, date: datetime) -> ReplicaStatus:
    replica, life = managed.replica, managed.replica.life
    error = replica.error
    if managed.failed:
        error = managed.hopeless or (managed.ending.reason if managed.ending is not None else error)
    return ReplicaStatus(
        number=managed.number,
        state=life.state,
        since=date - timedelta(seconds=now - life.since),
        state_seconds=now - life.since,
        pid=replica.pid,
        uptime=life.uptime(now),
        restarts=life.total_restarts,
        error=error,
        notice=replica.notice,
    )


def state_together(states: Collection[ServiceState]) -> ServiceState:
    """Return the state of a service whose replicas are in these states.

    If some work and some do not, it is Starting while the others start for the first time, and else Degraded. If none works, it
    is in the state that leads furthest. Without replicas it is Initializing.
    """
    kinds = set(states)
    if not kinds:
        return ServiceState.INITIALIZING
    if len(kinds) == 1:
        return kinds.pop()
    if kinds.intersection(WORKING):
        others = kinds - {ServiceState.RUNNING}
        starting = others <= {ServiceState.INITIALIZING, ServiceState.STARTING}
        return ServiceState.STARTING if starting else ServiceState.DEGRADED
    return next(state for state in _FURTHEST_FIRST if state in kinds)


_FURTHEST_FIRST = (
    ServiceState.STARTING,
    ServiceState.RESTARTING,
    ServiceState.INITIALIZING,
    ServiceState.STOPPING,
    ServiceState.STOPPED,
)
