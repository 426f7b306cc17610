"""How long services may take to stop, at most: arithmetic for ``mainspring check`` and for the orchestrator's own limit.

Replicas of a service stop together. A service stops once all that depend on it have stopped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from mainspring.services.order import Order
from mainspring.services.spec import HookMoment

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mainspring.services.spec import ServiceSpec


class StopPhases(NamedTuple):
    """The longest times of the phases in which a service stops, and the ``timeout`` that caps them together, in seconds."""

    service: str
    pre_stop: float
    drain: float
    force_kill: float
    post_stop: float
    timeout: float

    @property
    def phases(self) -> float:
        """The phases together, without the cap."""
        return self.pre_stop + self.drain + self.force_kill + self.post_stop

    @property
    def seconds(self) -> float:
        """The longest time that the service takes to stop."""
        return min(self.phases, self.timeout)


class StopChain(NamedTuple):
    """Services that stop one after the other, the first to stop first, and how long that takes if each uses all its time.

    ``limit``: seconds from the begin of the shutdown after which the orchestrator kills the last of them.
    """

    services: tuple[str, ...]
    seconds: float
    limit: float

    @property
    def within(self) -> float:
        """The seconds after which the last of them has certainly stopped or been killed."""
        return min(self.seconds, self.limit)


def stop_phases(spec: ServiceSpec) -> StopPhases:
    """Return the times in which a service stops."""
    shutdown = spec.lifecycle.shutdown
    return StopPhases(
        spec.name,
        _hooks(spec, HookMoment.PRE_STOP),
        shutdown.drain_timeout,
        shutdown.force_kill_timeout,
        _hooks(spec, HookMoment.POST_STOP),
        shutdown.timeout,
    )


def _hooks(spec: ServiceSpec, moment: HookMoment) -> float:
    settings = spec.lifecycle.hooks
    hooks = spec.hooks.get(moment, ()) if settings.enabled else ()
    return sum(settings.timeout if hook.timeout is None else hook.timeout for hook in hooks)


def stop_chains(specs: Sequence[ServiceSpec], timeout: float) -> list[StopChain]:
    """Return for each service the chain that takes longest to stop until it has stopped itself.

    ``timeout``: that of the whole, as the orchestrator has it.

    :raises ConfigError: the services depend on unknown ones or on each other.
    """
    order = Order(specs)
    own = {spec.name: stop_phases(spec) for spec in specs}
    limits = order.stop_limits({name: phases.timeout for name, phases in own.items()}, timeout)
    chains: dict[str, StopChain] = {}
    for name in reversed(order.names):
        before = max((chains[other] for other in order.dependents(name)), key=lambda chain: chain.seconds, default=None)
        earlier, begins = ((), 0.0) if before is None else (before.services, before.seconds)
        chains[name] = StopChain((*earlier, name), begins + own[name].seconds, limits[name])
    return list(chains.values())
