"""How long services may take to stop, at most: arithmetic for ``mainspring check`` and for the orchestrator's own limit.

Replicas of a service stop together. A service stops once all that depend on it have stopped.
"""

from __future__ import annotations

from graphlib import TopologicalSorter
from typing import TYPE_CHECKING, NamedTuple

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


class LongestStop(NamedTuple):
    """The services whose stops, one after the other, take longest: the first stops first."""

    services: tuple[str, ...]
    seconds: float


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


def longest_stop(specs: Sequence[ServiceSpec]) -> LongestStop:
    """Return the chain of dependent services that takes longest to stop. Dependencies must be without a cycle."""
    by_name = {spec.name: spec for spec in specs}
    chains: dict[str, LongestStop] = {}
    for name in TopologicalSorter({spec.name: spec.depends_on for spec in specs}).static_order():
        spec = by_name[name]
        below = max(
            (chains[other] for other in spec.depends_on), key=lambda chain: chain.seconds, default=LongestStop((), 0.0)
        )
        chains[name] = LongestStop((name, *below.services), stop_phases(spec).seconds + below.seconds)
    return max(chains.values(), key=lambda chain: chain.seconds, default=LongestStop((), 0.0))
