"""What an operator does to services that run: start, stop, restart one replica after the other, and change the set."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

import anyio

from mainspring.errors import ControlRefusedError, ServiceNotFoundError, ServiceNotRunningError
from mainspring.services.managed_service import ManagedReplica, ManagedService
from mainspring.services.order import Order

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mainspring.services.spec import ServiceSpec
    from mainspring.services.tree import ServiceTree


class Operations:
    """The operations of one tree. Two restarts of one service do not overlap, nor do two changes of the set.

    A stop wins: a restart that waits for a replica which is told to stop meanwhile ends with an error.
    """

    def __init__(self, name: str, tree: ServiceTree) -> None:
        self._name = name
        self._tree = tree
        self._changing = anyio.Lock()
        self._restarting: defaultdict[str, anyio.Lock] = defaultdict(anyio.Lock)

    async def start(self, name: str, number: int | None) -> None:
        """See :meth:`Orchestrator.start`."""
        service = self._service(name, number)
        self._start_below(name)
        numbers = self._numbers(service, number)
        for each in numbers:
            self._start_if_down(service, each)
        for managed in [service.replicas[each] for each in numbers]:  # a reload may take some away
            await self._until_ready(managed, 1)

    async def stop(self, name: str, number: int | None) -> None:
        """See :meth:`Orchestrator.stop`."""
        service = self._service(name, number)
        if number is None:
            await self._tree.bring_down(self._tree.order.with_all_above([name]))
        else:
            await self._stop_replica(service.replicas[number])

    async def restart(self, name: str | None, number: int | None) -> None:
        """See :meth:`Orchestrator.restart`."""
        if name is None:
            self.check_running()
            for every in self._tree.order.names:
                known = self._tree.services.get(every)
                if known is not None and not known.stopped:
                    await self.restart(every, None)
            return
        service = self._service(name, number)
        stops = service.times_stopped
        async with self._restarting[name]:
            self._service(name, number)  # a reload may have taken it away
            for each in self._numbers(service, number):
                self.check_running()
                self._check_not_stopped(service, stops)
                if not self._start_if_down(service, each):
                    managed = service.replicas[each]
                    times = managed.times_ready + 1
                    managed.replica.request_restart("a restart was asked for")
                    await self._until_ready(managed, times)
                else:
                    await self._until_ready(service.replicas[each], 1)

    async def change(self, specs: Sequence[ServiceSpec]) -> None:
        """See :meth:`Orchestrator.reload`."""
        tree = self._tree
        order = Order(specs)
        async with self._changing:
            self.check_running()
            tree.sockets.open([*specs, *(spec for spec in tree.specs if spec.name not in order.names)])
            wanted = {spec.name: spec for spec in specs}
            await tree.bring_down(set(tree.services) - set(wanted))
            self.check_running()
            services = {name: tree.services.get(name) or ManagedService(spec) for name, spec in wanted.items()}
            fresh = [name for name in order.names if name not in tree.services]
            tree.order, tree.services = order, services
            for name in fresh:
                tree.start(services[name])
            for name in order.names:
                if name not in fresh:
                    await self._follow_spec(services[name], wanted[name])
            tree.sockets.keep_only(specs)
            tree.changes.notify_all()

    async def _follow_spec(self, service: ManagedService, spec: ServiceSpec) -> None:
        """Have a service run by a changed specification, one replica after the other."""
        async with self._restarting[spec.name]:
            service.changing = True
            try:
                await self._replace_replicas(service, spec)
            finally:
                service.changing = False

    async def _replace_replicas(self, service: ManagedService, spec: ServiceSpec) -> None:
        stays_down, stops = service.stopped, service.times_stopped
        service.spec = spec
        for number in [number for number in sorted(service.replicas) if number > spec.replicas]:
            self.check_running()
            await self._stop_replica(service.replicas[number])
            del service.replicas[number]
        for number in range(1, spec.replicas + 1):
            managed = service.replicas.get(number)
            if stays_down or (managed is not None and not managed.failed and not _differ(managed.spec, spec)):
                continue
            self.check_running()  # the shutdown stops it in its turn
            if managed is not None:
                await self._stop_replica(managed)
            self.check_running()
            self._check_not_stopped(service, stops)
            await self._until_ready(self._tree.start_replica(service, number), 1)

    # -------------------------------------------------------------------------------------------------------- one replica

    def _start_below(self, name: str) -> None:
        """Start what a service depends on."""
        for below in self._tree.order.with_all_below([name]):
            if below != name:
                self._tree.start(self._tree.services[below])

    def _start_if_down(self, service: ManagedService, number: int) -> bool:
        if number in service.replicas and not service.replicas[number].ended:
            return False
        self.check_running()
        self._start_below(service.spec.name)
        self._tree.start_replica(service, number)
        return True

    async def _stop_replica(self, managed: ManagedReplica) -> None:
        self._tree.stop_replicas([managed])
        await self._tree.changes.wait_for(lambda: managed.ended)

    async def _until_ready(self, managed: ManagedReplica, times: int) -> None:
        """Wait until a replica has become ready so often.

        :raises ServiceNotRunningError: it stays down, or is told to stop.
        """
        await self._tree.changes.wait_for(
            lambda: managed.times_ready >= times or managed.ended or managed.stop_asked or self._tree.closing
        )
        if managed.times_ready >= times:
            return
        if managed.failed:
            why = managed.hopeless or (managed.ending.reason if managed.ending is not None else "")
        else:
            why = "it was told to stop" if managed.stop_asked or self._tree.closing else "its work is done"
        raise ServiceNotRunningError(f"service {managed.name!r} does not run: {why}")

    def _check_not_stopped(self, service: ManagedService, stops: int) -> None:
        """Check that nothing of a service is to be started against a stop.

        :raises ServiceNotRunningError: it was stopped since it had been so ``stops`` times.
        """
        if service.times_stopped != stops:
            raise ServiceNotRunningError(f"service {service.spec.name!r} does not run: it was told to stop")

    def _numbers(self, service: ManagedService, number: int | None) -> list[int]:
        return list(range(1, service.spec.replicas + 1)) if number is None else [number]

    def _service(self, name: str, number: int | None) -> ManagedService:
        self.check_running()
        service = self._tree.services.get(name)
        if service is None:
            known = ", ".join(self._tree.services)
            raise ServiceNotFoundError(f"{name!r} is no service of {self._name!r}; there are: {known}")
        if number is not None and number not in service.replicas:
            raise ServiceNotFoundError(
                f"service {name!r} has replicas 1 to {service.spec.replicas}, and none {number!r}"
            )
        return service

    def check_running(self) -> None:
        """Check that orders are taken.

        :raises ControlRefusedError: none are, before the start and at the shutdown.
        """
        if self._tree.closing or not self._tree.opened:
            why = "it is shutting down" if self._tree.closing else "it is not running"
            raise ControlRefusedError(f"orchestrator {self._name!r} takes no orders: {why}")


def _differ(old: ServiceSpec, new: ServiceSpec) -> bool:
    """True if a process of the one must be replaced by one of the other."""
    return replace(old, replicas=new.replicas, depends_on=new.depends_on) != new
