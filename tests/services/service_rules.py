"""The rules that every run of supervised services keeps, judged from the record of processes and the events of a run."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from typing import TYPE_CHECKING

from mainspring.core.state_machine import OrchestratorState, ServiceState
from mainspring.events import (
    Event,
    OrchestratorStateChanged,
    ServiceGivenUp,
    ServiceProcessEnded,
    ServiceProcessStarted,
    ServiceStartFailed,
    ServiceStateChanged,
)
from mainspring.services.restarts import RestartType
from mainspring.services.spec import HookMoment, ServiceSpec, ShutdownSettings, Strategy

if TYPE_CHECKING:
    from collections.abc import Iterator

    from service_simulation import Run

    from mainspring.testing import ProcessRecord

SLACK = 1e-6
HOOK_TIMEOUT = 0.5
Replica = tuple[str, int]


class Facts:
    """What a run says, sorted for the rules."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.case = run.scenario
        self.specs = {spec.name: spec for spec in run.scenario.specs}
        self.latency = 2 * run.scenario.latency + SLACK
        self.events = run.events
        shutting = [
            at
            for at, event in run.events
            if isinstance(event, OrchestratorStateChanged) and event.new is OrchestratorState.SHUTTING_DOWN
        ]
        self.stop_at = min([*shutting, math.inf if run.asked_at is None else run.asked_at])
        self.cancelled = run.asked_at is not None and run.scenario.end == "cancel"
        self.families: dict[Replica, list[list[ProcessRecord]]] = defaultdict(list)
        """The families of each replica's own program, in the order of their start."""
        members: dict[int, list[ProcessRecord]] = defaultdict(list)
        for record in run.records:
            members[record.family].append(record)
        for family in members.values():
            first = family[0]
            if first.launch.command[0].startswith("main:"):
                self.families[first.launch.service, first.launch.replica].append(family)

    def mains(self) -> Iterator[tuple[ServiceSpec, list[ProcessRecord]]]:
        """All families of services' own programs."""
        for (service, _), families in self.families.items():
            for family in families:
                yield self.specs[service], family

    def currents(self) -> Iterator[tuple[float, Event, ProcessRecord | None]]:
        """All events of replicas, each with the last process that its replica had started by then."""
        records = {record.pid: record for record in self.run.records}
        current: dict[Replica, ProcessRecord] = {}
        for at, event in self.run.events:
            if isinstance(event, ServiceProcessStarted):
                current[event.service, event.replica] = records[event.pid]
            if isinstance(event, ServiceStateChanged | ServiceProcessEnded | ServiceStartFailed):
                yield at, event, current.get((event.service, event.replica))

    def not_told_to_stop(self) -> set[int]:
        """The processes that were taken down for another reason than a stop of their service."""
        return {
            record.pid
            for _, event, record in self.currents()
            if record is not None
            and (
                isinstance(event, ServiceStartFailed)
                or (isinstance(event, ServiceStateChanged) and event.new is ServiceState.RESTARTING)
                or (isinstance(event, ServiceProcessEnded) and (not event.told or "its probe failed" in event.ending))
            )
        }


def problems_of(run: Run) -> list[str]:
    """Return what was not as it should be; nothing if all was."""
    facts = Facts(run)
    rules = (
        _never_two_of_a_replica,
        _nothing_is_left,
        _the_stop_ends,
        _nothing_starts_after_the_stop,
        _what_was_stopped_stays_down,
        _every_order_ends,
        _a_kill_comes_after_the_drain_timeout_and_then_it_comes,
        _what_is_late_at_the_stop_of_all_is_killed,
        _core_services_that_fail_end_the_whole,
        _dependencies_come_first,
        _dependents_stop_first,
        _running_is_ready,
        _restarts_are_counted,
        _restarts_are_delayed,
        _too_many_restarts_end_the_whole,
        _it_settles,
    )
    return [f"{rule.__name__.strip('_')}: {problem}" for rule in rules for problem in rule(facts)]


def _ended(family: list[ProcessRecord]) -> float:
    return max(math.inf if record.ended_at is None else record.ended_at for record in family)


def _never_two_of_a_replica(facts: Facts) -> Iterator[str]:
    for families in facts.families.values():
        for earlier, later in itertools.pairwise(families):
            if _ended(earlier) > later[0].started_at:
                yield f"{later[0]} beside {earlier[0]}, of which the last ended at {_ended(earlier):g}"


def _nothing_is_left(facts: Facts) -> Iterator[str]:
    known = {event.pid for _, event in facts.events if isinstance(event, ServiceProcessStarted)}
    for record in facts.run.records:
        if record.ended_at is None:
            yield f"{record} is left"
        elif record.abandoned and (not facts.cancelled or record.pid in known):
            yield f"{record} ran when the spawner was left"
    if facts.run.left_at_end:
        yield f"{facts.run.left_at_end} processes ran when the run had returned"


def _the_stop_ends(facts: Facts) -> Iterator[str]:
    if facts.run.state is not OrchestratorState.TERMINATED:
        yield f"the orchestrator is {facts.run.state}"
    if facts.stop_at == math.inf:
        yield "there was no stop"
        return
    longest = max(spec.lifecycle.shutdown.force_kill_timeout for spec in facts.specs.values()) + 1.0
    cap = facts.case.shutdown.timeout
    own = (spec.lifecycle.shutdown.timeout for spec in facts.specs.values())
    bound = cap + sum(each for each in own if each > cap) + longest
    if facts.run.ended_at - facts.stop_at > bound + facts.latency:
        yield f"it took {facts.run.ended_at - facts.stop_at:g} s, and {bound:g} s were allowed"
    if facts.run.asked_at is not None and facts.case.end != "request":
        bound = longest + (_cap(facts) if facts.case.end == "shutdown" else 0.0)
        if facts.run.ended_at - facts.run.asked_at > bound + facts.latency:
            yield f"it took {facts.run.ended_at - facts.run.asked_at:g} s from {facts.case.end}, and {bound:g} s were allowed"


def _nothing_starts_after_the_stop(facts: Facts) -> Iterator[str]:
    for _, family in facts.mains():
        if family[0].started_at > facts.stop_at + facts.latency:
            yield f"{family[0]} though the stop was asked for at {facts.stop_at:g}"


def _what_was_stopped_stays_down(facts: Facts) -> Iterator[str]:
    operations = facts.run.operations
    for stop in operations:
        if stop.kind != "stop" or stop.ended_at is None or stop.error is not None:
            continue
        others = [each for each in operations if each is not stop and each.kind != "stop"]
        if any(each.began_at <= stop.ended_at and (each.ended_at or math.inf) >= stop.began_at for each in others):
            continue  # orders that cross each other
        until = min((each.began_at for each in others if each.began_at > stop.ended_at), default=math.inf)
        for spec, family in facts.mains():
            is_it = spec.name == stop.service and stop.replica in (None, family[0].launch.replica)
            if is_it and _ended(family) > stop.ended_at and family[0].started_at < until:
                yield f"{family[0]} though {stop} was done"


def _every_order_ends(facts: Facts) -> Iterator[str]:
    yield from (f"{each} has not ended" for each in facts.run.operations if each.ended_at is None)


def _whole(within: float, shutdown: ShutdownSettings) -> float:
    return max(within - shutdown.force_kill_timeout, within / 2)


def _a_kill_comes_after_the_drain_timeout_and_then_it_comes(facts: Facts) -> Iterator[str]:
    for spec, family in facts.mains():
        shutdown = spec.lifecycle.shutdown
        told = min((record.told_at for record in family if record.told_at is not None), default=math.inf)
        killed = min((record.killed_at for record in family if record.killed_at is not None), default=math.inf)
        hook = HOOK_TIMEOUT + facts.latency if HookMoment.PRE_STOP in spec.hooks else 0.0
        latest = min(shutdown.drain_timeout, _whole(shutdown.timeout, shutdown))
        earliest = min(latest, _whole(shutdown.timeout - hook, shutdown))
        is_forced = (
            killed >= (facts.run.asked_at or 0) - SLACK
            if facts.cancelled
            else killed >= facts.stop_at + _cap(facts) - SLACK
        )
        if killed < told + max(earliest, 0.0) - SLACK and not is_forced:
            yield f"{family[0]}: killed at {killed:g}, told at {told:g}, may drain for {earliest:g} s"
        if _ended(family) > told + latest + facts.latency and killed > told + latest + facts.latency:
            yield f"{family[0]}: told at {told:g}, may drain for {latest:g} s, and was killed at {killed:g}"


def _what_is_late_at_the_stop_of_all_is_killed(facts: Facts) -> Iterator[str]:
    is_own = facts.run.asked_at == facts.stop_at and facts.case.end == "shutdown"
    longest = max(spec.lifecycle.shutdown.timeout for spec in facts.specs.values())
    if facts.cancelled or (longest > facts.case.shutdown.timeout and not is_own):
        return  # a service with a longer time of its own keeps it
    due = facts.stop_at + _cap(facts) + facts.latency
    for _, family in facts.mains():
        killed = min((record.killed_at for record in family if record.killed_at is not None), default=math.inf)
        if _ended(family) > due and killed > due:
            yield f"{family[0]} was not killed by {due:g}"


def _core_services_that_fail_end_the_whole(facts: Facts) -> Iterator[str]:
    given_up: set[Replica] = set()
    down: set[Replica] = set()
    for at, event in facts.events:
        if isinstance(event, ServiceGivenUp):
            given_up.add((event.service, event.replica))
        elif isinstance(event, ServiceStateChanged):
            if event.new is not ServiceState.STOPPED:
                down.discard((event.service, event.replica))
                if event.new is not ServiceState.STOPPING:
                    given_up.discard((event.service, event.replica))
                continue
            down.add((event.service, event.replica))
            spec = facts.specs[event.service]
            replicas = {(spec.name, number) for number in range(1, spec.replicas + 1)}
            is_core = spec.core and spec.restart is not RestartType.TEMPORARY
            if any(
                each.kind == "reload" and each.began_at <= at <= (each.ended_at or at) for each in facts.run.operations
            ):
                continue  # it is about to be started anew
            if is_core and replicas & given_up and replicas <= down and facts.stop_at > at + SLACK:
                yield f"core service {spec.name} was given up at {at:g}, and the others ran on"


def _cap(facts: Facts) -> float:
    is_own = facts.run.asked_at is not None and facts.case.end == "shutdown"
    return min(3.0, facts.case.shutdown.timeout) if is_own else facts.case.shutdown.timeout


def _dependencies_come_first(facts: Facts) -> Iterator[str]:
    ready: set[Replica] = set()
    down: set[Replica] = set()
    started: set[Replica] = set()
    for at, event in facts.events:
        if isinstance(event, ServiceStateChanged):
            replica = event.service, event.replica
            if event.new is ServiceState.RUNNING:
                ready.add(replica)
            elif event.new is ServiceState.STOPPED:
                down.add(replica)
        elif isinstance(event, ServiceProcessStarted) and (event.service, event.replica) not in started:
            started.add((event.service, event.replica))
            for name in facts.specs[event.service].depends_on:
                for number in range(1, facts.specs[name].replicas + 1):
                    if (name, number) not in ready | down:
                        yield f"{event.service}.{event.replica} started at {at:g}, before {name}.{number} was running"


def _dependents_stop_first(facts: Facts) -> Iterator[str]:
    if facts.cancelled:
        return
    others = facts.not_told_to_stop()
    for spec, family in facts.mains():
        told = family[0].told_at
        if family[0].started_at >= facts.stop_at - facts.latency:
            continue  # nothing can depend on it yet
        if told is None or not facts.stop_at <= told < facts.stop_at + _cap(facts) or family[0].pid in others:
            continue
        for other, dependent in facts.mains():
            if spec.name in other.depends_on and dependent[0].started_at < told < _ended(dependent) - SLACK:
                yield f"{family[0]} was told at {told:g}, before its dependent {dependent[0]} had ended"


def _running_is_ready(facts: Facts) -> Iterator[str]:
    for at, event, record in facts.currents():
        if not isinstance(event, ServiceStateChanged) or event.old is not ServiceState.STARTING:
            continue
        if event.new is not ServiceState.RUNNING:
            continue
        spec = facts.specs[event.service]
        if record is None:
            yield f"{event.service}.{event.replica} is running at {at:g} without a process"
            continue
        if (spec.notify or spec.ready_line) and (record.ready_at is None or record.ready_at > at + SLACK):
            yield f"{record} was running at {at:g}, and had not said so"
        if spec.probe is not None or spec.startup_probe is not None:
            passed = facts.case.passed.get(spec.name, [])
            if not any(record.started_at - SLACK <= then <= at + SLACK for then in passed):
                yield f"{record} was running at {at:g}, and no probe had passed"
        elif not spec.tells_ready and at < record.started_at + spec.ready_after - SLACK:
            yield f"{record} was running at {at:g}, too early"


class _Counts:
    """Counts the restarts of a replica by what the documentation says, from its events alone."""

    def __init__(self, spec: ServiceSpec) -> None:
        self.spec = spec
        self.restarts = 0
        self.failures = 0
        self.ran_from = math.nan
        self.ran_until = math.nan

    def on_state(self, at: float, event: ServiceStateChanged) -> None:
        if event.old is ServiceState.STARTING and event.new is ServiceState.RUNNING:
            self.ran_from = at
            self.failures = 0
        elif event.old in (ServiceState.RUNNING, ServiceState.DEGRADED) and event.new not in (
            ServiceState.RUNNING,
            ServiceState.DEGRADED,
        ):
            self.ran_until = at
        if event.new is ServiceState.STOPPED:
            self.restarts = self.failures = 0

    def after_run(self, event: ServiceProcessEnded) -> int | None:
        """The number of this restart; None if it stays down."""
        failed = event.status != 0 or "its probe failed" in event.ending
        if self.spec.restart is RestartType.TEMPORARY or (self.spec.restart is RestartType.TRANSIENT and not failed):
            return None
        policy = self.spec.lifecycle.restart_policy
        if self.ran_until - self.ran_from >= policy.reset_interval:
            self.restarts = 0
        if self.restarts >= policy.max_retries:
            return None
        self.restarts += 1
        return self.restarts

    def after_start(self) -> int | None:
        self.failures += 1
        is_over = self.failures >= self.spec.lifecycle.startup.max_retries
        return None if is_over or self.spec.restart is RestartType.TEMPORARY else self.failures

    def delay(self, number: int) -> float:
        policy = self.spec.lifecycle.restart_policy
        return min(policy.initial_delay * policy.backoff_factor ** (number - 1), policy.max_delay)


def _restarts_are_counted(facts: Facts) -> Iterator[str]:
    counts: dict[Replica, _Counts] = {}
    for at, event in facts.events:
        if not isinstance(event, ServiceStateChanged | ServiceProcessEnded | ServiceStartFailed):
            continue
        name = f"{event.service}.{event.replica} at {at:g}"
        spec = facts.specs[event.service]
        count = counts.setdefault((event.service, event.replica), _Counts(spec))
        if isinstance(event, ServiceStateChanged):
            count.on_state(at, event)
            continue
        if isinstance(event, ServiceProcessEnded):
            if event.told:
                continue
            number = count.after_run(event)
        else:
            number = count.after_start()
            if spec.restart is RestartType.TRANSIENT and event.error.startswith("exit status 0 "):
                number = None
        if number is not None and event.restarts != number:
            yield f"{name} says restart {event.restarts}, and it is {number}"
        if (number is None) != (event.restart_in is None):
            yield f"{name} is started again in {event.restart_in}, and by the policy it is restart {number}"
        elif number is not None and event.restart_in is not None:
            jitter = spec.lifecycle.restart_policy.jitter == "full"
            wanted = count.delay(number)
            if event.restart_in > wanted + SLACK or (not jitter and event.restart_in < wanted - SLACK):
                yield f"{name} is started again in {event.restart_in:g} s, and by the policy in {wanted:g} s"


def _restarts_are_delayed(facts: Facts) -> Iterator[str]:
    if facts.case.strategy is not Strategy.ONE_FOR_ONE or facts.run.operations:
        return  # a restart with others, or one that was asked for, comes at once
    due: dict[Replica, float] = {}
    for at, event in facts.events:
        if isinstance(event, ServiceProcessEnded | ServiceStartFailed) and event.restart_in is not None:
            due[event.service, event.replica] = at + event.restart_in
        elif isinstance(event, ServiceProcessStarted):
            expected = due.pop((event.service, event.replica), 0.0)
            if at < expected - SLACK:
                yield f"{event.service}.{event.replica} was started at {at:g}, and was due at {expected:g}"


def _too_many_restarts_end_the_whole(facts: Facts) -> Iterator[str]:
    most = facts.case.max_restarts
    if most is None:
        return
    recent: list[float] = []
    for at, event in facts.events:
        if isinstance(event, ServiceProcessEnded | ServiceStartFailed):
            if (
                event.restart_in is None
                or (isinstance(event, ServiceProcessEnded) and event.told)
                or at > facts.stop_at
            ):
                continue
            recent = [earlier for earlier in recent if at - earlier < facts.case.period] + [at]
            if len(recent) > most and facts.stop_at > at + SLACK:
                yield f"{len(recent)} restarts in {facts.case.period:g} s at {at:g} have not ended the whole"
                return
    by_intensity = "restarts in" in (facts.run.failure or "")
    if by_intensity and len([at for at in recent if facts.stop_at - at < facts.case.period]) <= most:
        yield f"{len(recent)} restarts have ended the whole, and {most} are allowed"


def _it_settles(facts: Facts) -> Iterator[str]:
    if facts.case.calm_at == math.inf or not facts.run.standing:
        return
    for name, state in facts.run.standing.items():
        if state not in (ServiceState.RUNNING, ServiceState.STOPPED):
            yield f"{name} is {state} after calm since {facts.case.calm_at:g}"
