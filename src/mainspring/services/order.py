"""The order of services by what they depend on, and who goes down with whom: decisions only."""

from __future__ import annotations

from difflib import get_close_matches
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING

from mainspring.core.state_machine import OrchestratorState
from mainspring.errors import ConfigError
from mainspring.services.spec import Strategy

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from mainspring.services.spec import ServiceSpec


class Order:
    """The start order of some services. A service comes after all that it depends on; else they keep the order given.

    :raises ConfigError: a name stands twice, a service depends on an unknown one or on itself, or there is a cycle.
    """

    def __init__(self, specs: Sequence[ServiceSpec]) -> None:
        self._depends_on = _checked(specs)
        self.levels = _levels(self._depends_on)
        """Services that may start together, first the services that depend on nothing."""
        self.names = tuple(name for level in self.levels for name in level)
        """All names in the order of the start."""
        dependents: dict[str, list[str]] = {name: [] for name in self.names}
        for name in self.names:
            for other in self._depends_on[name]:
                dependents[other].append(name)
        self._dependents = {name: tuple(others) for name, others in dependents.items()}

    def depends_on(self, name: str) -> tuple[str, ...]:
        """Return what the service itself names as what it depends on."""
        return self._depends_on[name]

    def dependents(self, name: str) -> tuple[str, ...]:
        """Return the services that name this one as what they depend on."""
        return self._dependents[name]

    def with_all_below(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the services and all that they depend on, directly or not, in the order of the start."""
        return self._reached(names, self._depends_on)

    def with_all_above(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the services and all that depend on them, directly or not, in the order of the start."""
        return self._reached(names, self._dependents)

    def may_stop(self, up: AbstractSet[str]) -> list[str]:
        """Return those of the services that are up on which no other of them depends, directly or not.

        The last started comes first.
        """
        needed: set[str] = set()
        for name in reversed(self.names):
            if any(other in up or other in needed for other in self._dependents[name]):
                needed.add(name)
        return [name for name in reversed(self.names) if name in up and name not in needed]

    def restarted_with(self, name: str, strategy: Strategy) -> tuple[str, ...]:
        """Return the other services that go down and come up again with this one, in the order of the start."""
        if strategy is Strategy.ONE_FOR_ONE:
            return ()
        if strategy is Strategy.ONE_FOR_ALL:
            return tuple(other for other in self.names if other != name)
        return self.names[self.names.index(name) + 1 :]

    def stop_limits(self, timeouts: Mapping[str, float], cap: float) -> dict[str, float]:
        """Return in how many seconds from the begin of a shutdown each service must have ended, to be killed then.

        It is the ``cap`` for all together. A service whose own timeout is longer has that instead, and what it depends on
        has the cap, or its own longer timeout, from then on.
        """
        limits: dict[str, float] = {}
        for name in reversed(self.names):
            own = max(cap, timeouts[name])
            longest = max((limits[other] for other in self._dependents[name]), default=0.0)
            limits[name] = longest + own if longest > cap else own
        return limits

    def _reached(self, names: Iterable[str], edges: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
        found: set[str] = set()
        ahead = list(names)
        while ahead:
            name = ahead.pop()
            if name not in found:
                found.add(name)
                ahead.extend(edges[name])
        return tuple(name for name in self.names if name in found)


def _checked(specs: Sequence[ServiceSpec]) -> dict[str, tuple[str, ...]]:
    known: dict[str, tuple[str, ...]] = {}
    for spec in specs:
        if spec.name in known:
            raise ConfigError(f"service {spec.name!r} stands there twice; give each service a name of its own")
        known[spec.name] = tuple(dict.fromkeys(spec.depends_on))
    for name, needed in known.items():
        for other in needed:
            if other == name:
                raise ConfigError(f"service {name!r} depends on itself")
            if other not in known:
                near = get_close_matches(other, known, 1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ConfigError(f"service {name!r} depends on {other!r}, which is no service here{hint}")
    return known


def _levels(depends_on: Mapping[str, tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
    place = {name: index for index, name in enumerate(depends_on)}
    sorter = TopologicalSorter(depends_on)
    try:
        sorter.prepare()
    except CycleError as error:
        cycle = " -> ".join(reversed(error.args[1]))
        raise ConfigError(f"services depend on each other in a cycle: {cycle}") from None
    levels = []
    while sorter.is_active():
        ready = sorter.get_ready()
        levels.append(tuple(sorted(ready, key=place.__getitem__)))
        sorter.done(*ready)
    return tuple(levels)


def next_state(
    present: OrchestratorState, *, core_started: bool, all_started: bool, all_well: bool
) -> OrchestratorState:
    """Return the next state of an orchestrator that is not shutting down; ``present`` where nothing changes.

    ``core_started``: every core service has become ready once, ``all_started``: so has every service, or it has ended.
    ``all_well``: no replica has failed and is not running again.
    """
    if present is OrchestratorState.INITIALIZING:
        return OrchestratorState.READY if core_started else present
    if not all_well:
        return OrchestratorState.DEGRADED
    return OrchestratorState.RUNNING if all_started else present
