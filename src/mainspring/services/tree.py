"""All services of an orchestrator with their replicas: each started when its turn has come, and brought down in order."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import anyio

from mainspring.events import RestartsExceeded, ServiceGivenUp
from mainspring.runtime.condition import ConditionVariable
from mainspring.services.listening import ListeningSockets
from mainspring.services.managed_service import ManagedReplica, ManagedService
from mainspring.services.order import Order
from mainspring.services.replica import Replica
from mainspring.services.spec import Strategy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from mainspring.core.dispatcher import Dispatcher
    from mainspring.runtime.scope import DaemonScope
    from mainspring.services.listening import SocketPlaces
    from mainspring.services.restarts import Intensity
    from mainspring.services.spawning import Spawner
    from mainspring.services.spec import ServiceSpec


class ServiceTree:
    """Starts replicas as tasks of a scope, and restarts them together as the strategy says.

    ``changed`` is called after each change of a replica. ``escalate`` is called with the reason when the whole cannot go on.
    ``changes`` is notified with each change.
    """

    def __init__(
        self,
        specs: Sequence[ServiceSpec],
        *,
        strategy: Strategy,
        intensity: Intensity | None,
        environment: Mapping[str, str],
        dispatcher: Dispatcher,
        changed: Callable[[], object],
        escalate: Callable[[str], object],
    ) -> None:
        self.order = Order(specs)
        self.services = {spec.name: ManagedService(spec) for spec in specs}
        self.sockets = ListeningSockets()
        self.changes = ConditionVariable()
        self.opened = False
        """True once the services have been started."""
        self.closing = False
        """True once nothing is to be started any more."""
        self.statuses: list[int] = []
        """The exit statuses of the replicas that have ended by themselves."""
        self._strategy = strategy
        self._intensity = intensity
        self._environment = environment
        self._dispatcher = dispatcher
        self._on_change = changed
        self._escalate = escalate
        self._spawner: Spawner
        self._scope: DaemonScope
        self._places: SocketPlaces
        self._worn: deque[tuple[ManagedReplica, int, str]] = deque()
        """The replicas whose process is to be replaced by a fresh one: which of their processes, and why."""
        self._batch: dict[ManagedReplica, bool] = {}
        """The replicas that go down to start again together, and whether each was told so."""

    @property
    def specs(self) -> list[ServiceSpec]:
        """The specifications of all services."""
        return [service.spec for service in self.services.values()]

    def replicas(self) -> Iterable[ManagedReplica]:
        """Return all replicas, those of services that start first before the others."""
        for name in self.order.names:
            yield from self.services[name].replicas.values()

    @property
    def up(self) -> set[str]:
        """The names of the services of which a process may run."""
        return {name for name, service in self.services.items() if service.up}

    # ------------------------------------------------------------------------------------------------------- starting

    def open(self, spawner: Spawner, scope: DaemonScope, places: SocketPlaces) -> None:
        """Open the listening sockets, and start all services. ``places``: where their processes may open sockets.

        :raises ConfigError: a socket cannot be opened. Nothing is started then.
        """
        self._spawner, self._scope, self._places = spawner, scope, places
        self.sockets.open(self.specs)
        self.opened = True
        for name in self.order.names:
            self.start(self.services[name])

    def close(self) -> None:
        """Start nothing any more, and end the waits for it."""
        self.closing = True
        self.changes.notify_all()

    def start(self, service: ManagedService) -> None:
        """Start the replicas of a service that are not up. A stopped replica is made anew."""
        for number in range(1, service.spec.replicas + 1):
            if number not in service.replicas or service.replicas[number].ended:
                self.start_replica(service, number)

    def start_replica(self, service: ManagedService, number: int) -> ManagedReplica:
        """Start a replica of a service by its present specification, in place of the one of that number, which has ended."""
        managed = ManagedReplica(service.spec, number)
        managed.replica = Replica(
            service.spec,
            number,
            spawner=self._spawner,
            dispatcher=self._dispatcher,
            environment=self._environment,
            socket=self._places.path_of(service.spec, number),
            listening=[held.fileno() for held in self.sockets.of(service.spec)],
            before_start=lambda _: self._await_turn(service, managed),
            on_restart=lambda _: self._on_restart(service, managed),
            on_worn=lambda replica, why: self._replace_worn(managed, replica.starts, why),
            changed=lambda _: self._on_replica_change(service, managed),
        )
        service.replicas[number] = managed
        self._scope.start_soon(self._run, service, managed, name=f"service {managed.name}")
        return managed

    async def _run(self, service: ManagedService, managed: ManagedReplica) -> None:
        try:
            managed.ending = await managed.replica.run()
        finally:  # if it was cancelled, too: an order may wait for its end
            managed.may_run, managed.ended_at = False, anyio.current_time()
            self._batch.pop(managed, None)
            self._notify(service)
        if not managed.stop_asked:
            self.statuses.append(managed.ending.status)
        if service.escalates:
            self._escalate(f"service {service.spec.name!r} was given up: {service.why_failed}")

    async def _await_turn(self, service: ManagedService, managed: ManagedReplica) -> None:
        """Wait until nothing of its batch is up any more, and all that it depends on is running.

        At its first start it is given up if that will not come to run. Later it makes do without.
        """
        managed.may_run = False
        self._notify(service)
        while not self.closing:
            await self.changes.wait_for(lambda: managed not in self._batch)
            if self.closing:
                break
            waits_for = None
            for name in self.order.depends_on(service.spec.name):
                needed = self.services[name]
                if needed.serves_dependents is False and not managed.times_ready:
                    await self._give_up(service, managed, f"it depends on {name!r}, which has failed or was stopped")
                if needed.serves_dependents is None:
                    waits_for = needed
                    break
            if waits_for is None and managed not in self._batch:
                managed.may_run = True
                return
            if waits_for is not None:
                await waits_for.changes.wait_for(lambda needed=waits_for: needed.serves_dependents is not None)  # type: ignore[misc]
        await anyio.sleep_forever()  # it is about to be told to stop

    async def _give_up(self, service: ManagedService, managed: ManagedReplica, why: str) -> None:
        managed.hopeless = why
        self._dispatcher.dispatch(ServiceGivenUp(service.spec.name, managed.number, why, service.spec.core))
        managed.replica.request_stop()
        await anyio.sleep_forever()  # the stop interrupts it

    # ----------------------------------------------------------------------------------------------- restarting together

    def _on_restart(self, service: ManagedService, managed: ManagedReplica) -> None:
        managed.ailing = True
        managed.may_run = False
        self._notify(service)
        if self.closing:
            return
        if self._intensity is not None and self._intensity.exceeded_by(anyio.current_time()):
            most, period = self._intensity.most, self._intensity.period
            self._dispatcher.dispatch(RestartsExceeded(service.spec.name, managed.number, most, period))
            self._escalate(f"more than {most} restarts in {period:g} s; the last one was of {managed.name!r}")
            return
        names = self.order.restarted_with(service.spec.name, self._strategy)
        if self._strategy is Strategy.ONE_FOR_ALL:
            names += (service.spec.name,)
        others = [
            other
            for name in names
            for other in self.services[name].replicas.values()
            if other.may_run and not other.stop_asked and other not in self._batch
        ]
        if others and not self._batch:
            self._scope.start_soon(self._restart_batch, managed.name, name="restart of a batch")
        if others or self._batch:
            self._batch.update(dict.fromkeys(others, False))
            self._batch[managed] = True  # it is down, and waits for the others

    async def _restart_batch(self, cause: str) -> None:
        """Bring the replicas of the batch down in reverse order. They start again by themselves when it is dissolved."""
        while not self.closing:
            up = {managed for managed in self._batch if managed.may_run and not managed.ended}
            if not up:
                break
            names = {managed.spec.name for managed in up}
            for name in self.order.may_stop(names):
                for managed in up:
                    if managed.spec.name == name and not self._batch[managed]:
                        self._batch[managed] = True
                        managed.replica.request_restart(f"{cause} has ended")
            before = len(up), len(self._batch)
            await self.changes.wait_for(lambda before=before: self.closing or self._standing() != before)  # type: ignore[misc]
        self._batch.clear()
        self.changes.notify_all()

    def _standing(self) -> tuple[int, int]:
        return sum(managed.may_run and not managed.ended for managed in self._batch), len(self._batch)

    # --------------------------------------------------------------------------------------------- replacing worn processes

    def _replace_worn(self, managed: ManagedReplica, start: int, why: str) -> None:
        self._worn.append((managed, start, why))
        if len(self._worn) == 1:
            self._scope.start_soon(self._replace_in_turn, name="replacement of worn processes")

    async def _replace_in_turn(self) -> None:
        """Replace one worn process after the other: the rest work meanwhile."""
        while self._worn and not self.closing:
            managed, start, why = self._worn[0]
            if not managed.ended and managed.replica.starts == start:
                ready = managed.times_ready
                managed.replica.request_restart(why)
                await self.changes.wait_for(
                    lambda managed=managed, ready=ready: self.closing or managed.ended or managed.times_ready > ready  # type: ignore[misc]
                )
            self._worn.popleft()

    # ------------------------------------------------------------------------------------------------------- stopping

    def stop_next(self, names: Iterable[str]) -> None:
        """Tell the services among ``names`` to stop on which no other of them depends that is still up."""
        self.stop_replicas(self._to_be_told(set(names)))

    def _to_be_told(self, names: set[str]) -> list[ManagedReplica]:
        return [
            managed
            for name in self.order.may_stop(self.up & names)
            for managed in self.services[name].replicas.values()
            if not managed.ended and not managed.stop_asked
        ]

    def stop_waiting(self) -> None:
        """Tell the replicas to stop that have no process: so none is started any more. Nothing has to stop first."""
        self.stop_replicas([managed for managed in self.replicas() if managed.replica.pid is None])

    def stop_replicas(self, replicas: Iterable[ManagedReplica]) -> None:
        """Tell replicas to stop, in any order."""
        for managed in replicas:
            if not managed.ended and not managed.stop_asked:
                managed.stop_asked_at = anyio.current_time()
                managed.replica.request_stop()

    def hurry(self) -> None:
        """Tell all replicas to stop soon, in no order."""
        self.stop_replicas(self.replicas())
        for managed in self.replicas():
            if not managed.ended:
                managed.replica.hurry()

    async def bring_down(self, names: Iterable[str]) -> None:
        """Stop these services in the reverse order of their start, with what is started of them meanwhile.

        Cancelled, it stops no further ones.
        """
        names = set(names)
        for name in names:
            self.services[name].times_stopped += 1
        while self.up & names:
            self.stop_next(names)
            await self.changes.wait_for(lambda: not self.up & names or bool(self._to_be_told(names)))

    # -------------------------------------------------------------------------------------------------------- standing

    def _on_replica_change(self, service: ManagedService, managed: ManagedReplica) -> None:
        managed.note_change()
        self._notify(service)

    def _notify(self, service: ManagedService) -> None:
        service.changes.notify_all()
        self.changes.notify_all()
        self._on_change()

    @property
    def core_started(self) -> bool:
        """True if each core service has become ready."""
        return all(service.started for service in self.services.values() if service.spec.core and not service.kept_down)

    @property
    def all_started(self) -> bool:
        """True if each service has become ready, or stays down."""
        return all(service.started or service.failed for service in self.services.values() if not service.kept_down)

    @property
    def all_well(self) -> bool:
        """True if no replica has failed and is not running again."""
        return all(managed.well for managed in self.replicas())

    @property
    def finished(self) -> bool:
        """True if all replicas have ended, and none because it was told to."""
        return not self.up and not any(managed.stop_asked for managed in self.replicas())
