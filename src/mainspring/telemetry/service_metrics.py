"""Metrics of an orchestrator in the Prometheus formats: counted from its events, gauged from its status at scrape time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

import mainspring
from mainspring import events
from mainspring.core.state_machine import OrchestratorState, ServiceState
from mainspring.telemetry.metrics_page import Histogram, MetricsPage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from prometheus_client.metrics_core import Metric

    from mainspring.core.dispatcher import Dispatcher
    from mainspring.services.status import OrchestratorStatus, ReplicaStatus
    from mainspring.telemetry.process_usage import ProcessUsage

PROBE_OUTCOMES = ("passed", "failed")
ALERT_OUTCOMES = {events.AlertSent: "sent", events.AlertFailed: "failed"}
SERVICE_FAULTS = {events.ServiceGivenUp: "given_up", events.HookFailed: "hook_failed"}


class ServiceStatusSource(Protocol):
    """An orchestrator, or any object that has its status."""

    def status(self) -> OrchestratorStatus:
        """Return the present status."""


class _ServiceFigures:
    """What is counted for one service."""

    __slots__ = ("failed_starts", "faults", "probes", "restarts", "start_seconds", "transitions")

    def __init__(self) -> None:
        self.transitions: dict[ServiceState, int] = dict.fromkeys(ServiceState, 0)
        self.restarts = 0
        self.failed_starts = 0
        self.start_seconds = Histogram()
        self.probes = dict.fromkeys(PROBE_OUTCOMES, 0)  # zeros, so that a rate sees the first one too
        self.faults = dict.fromkeys(SERVICE_FAULTS.values(), 0)


class ServiceMetrics:
    """The metrics of one orchestrator, and behind them those of ``registry``, as for :class:`GroupMetrics`.

    Counters follow the events of the dispatcher given to :meth:`subscribe`; gauges are read from ``source.status()`` by
    :meth:`collect`. They begin at zero for each service. A service that the orchestrator no longer has is left out.
    """

    def __init__(self, source: ServiceStatusSource, *, registry: CollectorRegistry | None = REGISTRY) -> None:
        self._collector = _ServiceCollector(source)
        self._page = MetricsPage(self._collector, registry)

    def subscribe(self, dispatcher: Dispatcher) -> Callable[[], None]:
        """Count the events of ``dispatcher`` from now on. Return a function that ends this."""
        collector = self._collector
        ends = [
            dispatcher.subscribe(events.ServiceStateChanged, collector.moved),
            dispatcher.subscribe(events.ServiceProcessEnded, collector.ended),
            dispatcher.subscribe(events.ServiceStartFailed, collector.start_failed),
            dispatcher.subscribe(events.ProbeAnswered, collector.probe_answered),
            *(dispatcher.subscribe(kind, collector.fault) for kind in SERVICE_FAULTS),
            *(dispatcher.subscribe(kind, collector.alert) for kind in ALERT_OUTCOMES),
        ]

        def unsubscribe() -> None:
            for end in ends:
                end()

        return unsubscribe

    async def collect(self, usage: Mapping[int, ProcessUsage]) -> list[Metric]:
        """Return the families of metrics. ``usage``: what processes use, by the process id of a replica."""
        await self._page.collect_theirs()
        self._collector.usage = usage
        return list(self._page.collect())


class _ServiceCollector(Collector):
    def __init__(self, source: ServiceStatusSource) -> None:
        self._source = source
        self._services: dict[str, _ServiceFigures] = {}
        self._alerts = dict.fromkeys(ALERT_OUTCOMES.values(), 0)
        self.usage: Mapping[int, ProcessUsage] = {}

    # ------------------------------------------------------------------------------------------------------- counting

    def moved(self, event: events.ServiceStateChanged) -> None:
        self._figures(event.service).transitions[event.new] += 1
        if event.old is ServiceState.STARTING and event.new is ServiceState.RUNNING:
            self._figures(event.service).start_seconds.add(event.seconds)

    def ended(self, event: events.ServiceProcessEnded) -> None:
        if event.restart_in is not None and not event.told:
            self._figures(event.service).restarts += 1

    def start_failed(self, event: events.ServiceStartFailed) -> None:
        figures = self._figures(event.service)
        figures.failed_starts += 1
        figures.restarts += event.restart_in is not None

    def probe_answered(self, event: events.ProbeAnswered) -> None:
        self._figures(event.service).probes["passed" if event.error is None else "failed"] += 1

    def fault(self, event: events.ServiceGivenUp | events.HookFailed) -> None:
        self._figures(event.service).faults[SERVICE_FAULTS[type(event)]] += 1

    def alert(self, event: events.AlertSent | events.AlertFailed) -> None:
        self._alerts[ALERT_OUTCOMES[type(event)]] += 1

    def _figures(self, service: str) -> _ServiceFigures:
        return self._services.setdefault(service, _ServiceFigures())

    # ------------------------------------------------------------------------------------------------------- scraping

    def collect(self) -> Iterable[Metric]:
        status = self._source.status()
        self._services = {service.name: self._figures(service.name) for service in status.services}
        about = GaugeMetricFamily(
            "mainspring_info", "The orchestrator and the version it runs.", labels=["orchestrator", "version"]
        )
        about.add_metric([status.name, mainspring.__version__], 1.0)
        yield about
        yield GaugeMetricFamily(
            "mainspring_ready", "1 while the orchestrator is ready.", float(not status.unready_reasons)
        )
        state = GaugeMetricFamily(
            "mainspring_orchestrator_state", "1 for the state that the orchestrator is in.", labels=["state"]
        )
        for each in OrchestratorState:
            state.add_metric([str(each)], float(each is status.state))
        yield state
        alerts = CounterMetricFamily("mainspring_alerts", "Alerts to each target, by outcome.", labels=["outcome"])
        for outcome, count in self._alerts.items():
            alerts.add_metric([outcome], count)
        yield alerts
        yield from self._counters()
        replicas = [(service.name, replica) for service in status.services for replica in service.replicas]
        yield from _replicas(replicas)
        yield from self._usage(replicas)

    def _counters(self) -> Iterable[Metric]:
        restarts = CounterMetricFamily(
            "mainspring_service_restarts", "Restarts after a failed start or an unexpected end.", labels=["service"]
        )
        failed = CounterMetricFamily("mainspring_service_failed_starts", "Starts that failed.", labels=["service"])
        took = HistogramMetricFamily(
            "mainspring_service_start_seconds", "From the start of a process until it was ready.", labels=["service"]
        )
        probes = CounterMetricFamily(
            "mainspring_service_probes", "Answers of probes, by outcome.", labels=["service", "outcome"]
        )
        faults = CounterMetricFamily("mainspring_service_faults", "What went wrong.", labels=["service", "kind"])
        moves = CounterMetricFamily(
            "mainspring_service_transitions",
            "Changes of state of its replicas, by the new state.",
            labels=["service", "state"],
        )
        for name, figures in self._services.items():
            for new, times in figures.transitions.items():
                moves.add_metric([name, str(new)], times)
            restarts.add_metric([name], figures.restarts)
            failed.add_metric([name], figures.failed_starts)
            figures.start_seconds.fill(took, name)
            for outcome, count in figures.probes.items():
                probes.add_metric([name, outcome], count)
            for kind, count in figures.faults.items():
                faults.add_metric([name, kind], count)
        return moves, restarts, failed, took, probes, faults

    def _usage(self, replicas: Sequence[tuple[str, ReplicaStatus]]) -> Iterable[Metric]:
        labels = ["service", "replica"]
        memory = GaugeMetricFamily(
            "mainspring_service_memory_bytes", "Resident memory of a process and its descendants.", labels=labels
        )
        cpu = CounterMetricFamily(
            "mainspring_service_cpu_seconds", "CPU time of a process and its descendants.", labels=labels
        )
        count = GaugeMetricFamily("mainspring_service_processes", "A process and its descendants.", labels=labels)
        for service, replica in replicas:
            used = None if replica.pid is None else self.usage.get(replica.pid)
            if used is not None:
                values = [service, str(replica.number)]
                memory.add_metric(values, used.memory_bytes)
                cpu.add_metric(values, used.cpu_seconds)
                count.add_metric(values, used.processes)
        return memory, cpu, count


def _replicas(replicas: Sequence[tuple[str, ReplicaStatus]]) -> Iterable[Metric]:
    uptime = GaugeMetricFamily(
        "mainspring_service_uptime_seconds",
        "Time since the process of a replica became ready; 0 while it is not.",
        labels=["service", "replica"],
    )
    state = GaugeMetricFamily(
        "mainspring_service_state", "1 for the state that a replica is in.", labels=["service", "replica", "state"]
    )
    for service, replica in replicas:
        values = [service, str(replica.number)]
        uptime.add_metric(values, replica.uptime)
        for each in ServiceState:
            state.add_metric([*values, str(each)], float(each is replica.state))
    return uptime, state
