"""A service as an orchestrator keeps it: its replicas, and what is known of them beyond what they know themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from mainspring.core.state_machine import ServiceState
from mainspring.runtime.condition import ConditionVariable
from mainspring.services.restarts import RestartType

if TYPE_CHECKING:
    from mainspring.services.replica import Replica, ReplicaEnding
    from mainspring.services.spec import ServiceSpec

WORKING = (ServiceState.RUNNING, ServiceState.DEGRADED)


class ManagedReplica:
    """A replica from its start until it stays down. Started again after that, it is another one."""

    def __init__(self, spec: ServiceSpec, number: int) -> None:
        self.spec = spec
        self.number = number
        self.replica: Replica
        """Set by the tree that makes it."""
        self.ending: ReplicaEnding | None = None
        self.times_ready = 0
        """How often it has become ready."""
        self.may_run = False
        """True from when its turn to start has come until its process has ended."""
        self.ailing = False
        """True if a run of it has ended unexpectedly, and it is not running again."""
        self.stop_asked_at: float | None = None
        """When it was told to stop; None before."""
        self.ended_at: float | None = None
        self.hopeless: str | None = None
        """Why it was given up before its first start; None where it was not."""
        self._last = ServiceState.INITIALIZING

    @property
    def name(self) -> str:
        """Its name in texts: that of the service with its number, as ``worker.1``."""
        return self.replica.name

    @property
    def state(self) -> ServiceState:
        """Its present state."""
        return self.replica.life.state

    @property
    def ended(self) -> bool:
        """True if it stays down, or was cancelled; it has no ending then."""
        return self.ended_at is not None

    @property
    def stop_asked(self) -> bool:
        """True if it was told to stop."""
        return self.stop_asked_at is not None

    @property
    def stop_seconds(self) -> float:
        """How long its stop has taken; 0 if it was not told to."""
        if self.stop_asked_at is None:
            return 0.0
        return (anyio.current_time() if self.ended_at is None else self.ended_at) - self.stop_asked_at

    @property
    def failed(self) -> bool:
        """True if it stays down and was not told to, and has not done its work."""
        return self.hopeless is not None or (self.ending is not None and self.ending.failed and not self.stop_asked)

    @property
    def well(self) -> bool:
        """True if it works, starts for the first time or as it was told to, was told to stop, or has done its work."""
        return not (self.failed or self.ailing or self.state is ServiceState.DEGRADED)

    def note_change(self) -> None:
        """Take note of its present state."""
        if self.state is ServiceState.RUNNING and self._last is not ServiceState.RUNNING:
            self.ailing = False
            if self._last is not ServiceState.DEGRADED:
                self.times_ready += 1
        self._last = self.state


class ManagedService:
    """The replicas of one service. ``changes`` is notified when one of them changes."""

    def __init__(self, spec: ServiceSpec) -> None:
        self.spec = spec
        self.replicas: dict[int, ManagedReplica] = {}
        self.changes = ConditionVariable()
        self.changing = False
        """True while its replicas are replaced by those of another specification: none may be up meanwhile."""
        self.times_stopped = 0
        """How often it was stopped as a whole: what was about to start its replicas does not, if it was meanwhile."""

    @property
    def stopped(self) -> bool:
        """True if all its replicas were told to stop."""
        return bool(self.replicas) and all(managed.stop_asked for managed in self.replicas.values())

    @property
    def kept_down(self) -> bool:
        """True if it was told to stop, and not only for other replicas to take their place."""
        return self.stopped and not self.changing

    @property
    def up(self) -> bool:
        """True if a process of it may run."""
        return any(not managed.ended for managed in self.replicas.values())

    @property
    def started(self) -> bool:
        """True if each of its replicas has become ready once, or stays down; False of a failed service."""
        each = self.replicas.values()
        return bool(each) and not self.failed and all(managed.times_ready or managed.ended for managed in each)

    @property
    def failed(self) -> bool:
        """True if all its replicas stay down, and one of them has failed."""
        each = self.replicas.values()
        return not self.up and any(managed.failed for managed in each)

    @property
    def escalates(self) -> bool:
        """True if it has failed, and the others cannot do without it."""
        return self.failed and not self.changing and self.spec.core and self.spec.restart is not RestartType.TEMPORARY

    @property
    def why_failed(self) -> str:
        """What the first of its failed replicas says of its end."""
        for managed in self.replicas.values():
            if managed.failed:
                return managed.hopeless or (managed.ending.reason if managed.ending is not None else "")
        return ""

    @property
    def serves_dependents(self) -> bool | None:
        """True if what depends on it may start; False if it will not come to that by itself; None: wait."""
        if self.failed or (self.stopped and not self.up):
            return False
        each = self.replicas.values()
        return (bool(each) and all(managed.ended or managed.state is ServiceState.RUNNING for managed in each)) or None
