"""Metrics of one group in the Prometheus formats: counted from its events, gauged from its status at scrape time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import anyio
from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

import mainspring
from mainspring import events
from mainspring.core.state_machine import BEFORE_SHUTDOWN, GroupState, ServiceState
from mainspring.telemetry.metrics_page import COLLECT_WITHIN, Histogram, MetricsPage
from mainspring.worker.outcome import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from prometheus_client.metrics_core import Metric

    from mainspring.telemetry.status import GroupStatus, LoopStatus, MailboxStatus

FAULTS: dict[type[Any], str] = {
    events.HandlerStalled: "stalled",
    events.HandlerStuck: "stuck",
    events.LeaseLost: "lease_lost",
    events.LeaseRenewalFailed: "lease_renewal_failed",
    events.LoopCrashed: "crashed",
    events.ReceiveFailed: "receive_failed",
    events.SettlementDelayed: "settlement_delayed",
    events.SettlementFailed: "settlement_failed",
}


class StatusSource(Protocol):
    """A group, or any object that has its status."""

    def status(self) -> GroupStatus:
        """Return the present status."""


class _LoopFigures:
    """What is counted for one loop. Plain numbers: one event loop writes and reads them, so nothing is locked."""

    __slots__ = ("errors", "faults", "in_queue", "outcomes", "took")

    def __init__(self) -> None:
        self.outcomes: dict[str, int] = dict.fromkeys(
            map(str, Outcome), 0
        )  # zeros, so that a rate sees the first one too
        self.faults: dict[str, int] = dict.fromkeys(FAULTS.values(), 0)
        self.errors: dict[str, int] = {}
        self.took = Histogram()
        self.in_queue = Histogram()


class GroupMetrics:
    """The metrics of one group, and behind them those of ``registry``: the application's own.

    Counters follow the events of the dispatcher given to :meth:`subscribe`; gauges are read from ``source.status()`` while a
    scrape renders. Several groups of a process do not meet. To join a group's metrics to a page of your own, register
    ``collector`` with its registry.

    :param registry: whose metrics are rendered too: by default the registry in which ``prometheus_client`` keeps every metric
        that is not given another one. Where ``PROMETHEUS_MULTIPROC_DIR`` is set, its files are read instead. None: no others.
    :param collect_within: seconds that the application's collectors may take; see :meth:`collect_soon`.
    """

    def __init__(
        self,
        source: StatusSource,
        *,
        registry: CollectorRegistry | None = REGISTRY,
        collect_within: float = COLLECT_WITHIN,
    ) -> None:
        self.collector = _Collector(source)
        self.registry = CollectorRegistry()
        self._page = MetricsPage(self.collector, registry, collect_within=collect_within)
        self.registry.register(self._page)

    def subscribe(self, dispatcher: events.Dispatcher) -> Callable[[], None]:
        """Count the events of ``dispatcher`` from now on. Return a function that ends this."""
        collector = self.collector
        ends = [
            dispatcher.subscribe(events.MessageFinished, collector.finished),
            dispatcher.subscribe(events.GroupStateChanged, collector.moved),
            *(dispatcher.subscribe(kind, collector.fault) for kind in FAULTS),
        ]

        def unsubscribe() -> None:
            for end in ends:
                end()

        return unsubscribe

    async def collect_soon(self) -> None:
        """Collect the application's metrics for the next :meth:`render`, in a thread: a collector may wait for a server.

        Collectors that take longer than ``collect_within`` seconds are left out, with a warning, and not asked again before
        they have answered.
        """
        await self._page.collect_theirs()

    def render(self, depths: Sequence[MailboxStatus] = (), accept: str = "") -> tuple[bytes, str]:
        """Return the metrics as text and its content type, in the format that the ``Accept`` header asks for.

        ``depths`` are the mailboxes' counts, which only an async caller can get; one without counts is left out. Without
        :meth:`collect_soon` before it, the application's collectors are called here.
        """
        self.collector.depths = depths
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type


class _Collector(Collector):
    """Counts events, and makes the families of a scrape.

    It does without the client's own counters: they lock, which the path of each message would pay for, and turn into files if
    ``PROMETHEUS_MULTIPROC_DIR`` is set.
    """

    def __init__(self, source: StatusSource) -> None:
        self._source = source
        self._loops: dict[str, _LoopFigures] = {}
        self._phases: dict[GroupState, float] = {}
        self._phase: tuple[GroupState, float] | None = None
        self.depths: Sequence[MailboxStatus] = ()

    # ------------------------------------------------------------------------------------------------------- counting

    def finished(self, event: events.MessageFinished) -> None:
        figures = self._loops.get(event.loop) or self._figures(event.loop)
        outcome = event.outcome
        figures.outcomes[outcome] = figures.outcomes.get(outcome, 0) + 1
        if event.began:
            figures.took.add(event.seconds)
        if event.queue_seconds is not None:
            figures.in_queue.add(event.queue_seconds)
        if event.error_type is not None:
            figures.errors[event.error_type] = figures.errors.get(event.error_type, 0) + 1

    def fault(self, event: Any) -> None:
        self._figures(event.loop).faults[FAULTS[type(event)]] += 1

    def moved(self, event: events.GroupStateChanged) -> None:
        if event.new in BEFORE_SHUTDOWN:  # a group that runs again begins a new shutdown one day
            self._phases.clear()
            self._phase = None
            return
        if event.old not in BEFORE_SHUTDOWN:
            self._phases[event.old] = event.seconds
        self._phase = None if event.new is GroupState.STOPPED else (event.new, anyio.current_time())

    def _figures(self, loop: str) -> _LoopFigures:
        return self._loops.setdefault(loop, _LoopFigures())

    # ------------------------------------------------------------------------------------------------------- scraping

    def describe(self) -> Iterable[Metric]:
        """Return nothing: the source is asked by a scrape only."""
        return ()

    def collect(self) -> Iterable[Metric]:
        status = self._source.status()
        for loop in status.loops:
            self._figures(loop.name)
        yield InfoMetricFamily(
            "mainspring",
            "The group and the version it runs.",
            {"group": status.name, "version": mainspring.__version__},
        )
        yield from self._messages()
        yield from _loops(status.loops)
        yield from self._group(status)
        yield from _mailboxes(self.depths)

    def _messages(self) -> Iterable[Metric]:
        total = CounterMetricFamily(
            "mainspring_messages", "Deliveries that ended, by outcome.", labels=["loop", "outcome"]
        )
        duration = HistogramMetricFamily(
            "mainspring_message_duration_seconds", "How long deliveries took, start to end.", labels=["loop"]
        )
        in_queue = HistogramMetricFamily(
            "mainspring_time_in_queue_seconds", "From the send of a message to its first delivery.", labels=["loop"]
        )
        errors = CounterMetricFamily(
            "mainspring_errors", "Deliveries that ended with an error, by its type.", labels=["loop", "type"]
        )
        faults = CounterMetricFamily("mainspring_faults", "What went wrong, by kind.", labels=["loop", "kind"])
        for name, figures in self._loops.items():
            for outcome, count in figures.outcomes.items():
                total.add_metric([name, outcome], count)
            for kind, count in figures.faults.items():
                faults.add_metric([name, kind], count)
            for kind, count in figures.errors.items():
                errors.add_metric([name, kind], count)
            figures.took.fill(duration, name)
            figures.in_queue.fill(in_queue, name)
        return total, duration, in_queue, errors, faults

    def _group(self, status: GroupStatus) -> Iterable[Metric]:
        yield GaugeMetricFamily("mainspring_ready", "1 while the group is ready for work.", float(status.ready))
        lag = GaugeMetricFamily(
            "mainspring_event_loop_lag_seconds",
            "By how much the event loop was late to turn, at most, in the last minute.",
            labels=[],
        )
        if status.event_loop_lag is not None:
            lag.add_metric([], status.event_loop_lag)
        yield lag
        checks = GaugeMetricFamily("mainspring_check_passing", "1 while a readiness check passes.", labels=["check"])
        for name, error in status.checks.items():
            checks.add_metric([name], float(error is None))
        yield checks
        phases = GaugeMetricFamily(
            "mainspring_shutdown_seconds", "How long each phase of the shutdown took, or has taken.", labels=["phase"]
        )
        taken = dict(self._phases)
        if self._phase is not None:
            phase, began = self._phase
            taken[phase] = max(0.0, anyio.current_time() - began)
        for phase, seconds in taken.items():
            phases.add_metric([phase.replace(" ", "_")], seconds)
        yield phases


def _mailboxes(mailboxes: Sequence[MailboxStatus]) -> Iterable[Metric]:
    depth = GaugeMetricFamily(
        "mainspring_mailbox_depth", "Messages of a mailbox by where they are.", labels=["mailbox", "state"]
    )
    age = GaugeMetricFamily(
        "mainspring_queue_age_seconds",
        "Time since the send of the oldest pending message; 0 where none is pending.",
        labels=["mailbox"],
    )
    for mailbox in mailboxes:
        for state, count in (mailbox.counts or {}).items():
            if state != "settled":  # a total since the store was made, not a depth
                depth.add_metric([mailbox.name, state], count)
        if mailbox.queue_age is not None:
            age.add_metric([mailbox.name], mailbox.queue_age)
    return depth, age


_LOOP_GAUGES = (
    ("mainspring_in_flight", "in_flight", "Messages in hand: in handlers, claimed ahead, or being settled."),
    ("mainspring_concurrency", "concurrency", "Handlers of a loop that run at once, at most."),
    ("mainspring_heartbeat_age_seconds", "heartbeat_age", "Time since the last sign of life."),
    ("mainspring_loop_ready", "ready", "1 while a loop runs and can claim work."),
    ("mainspring_loop_uptime_seconds", "uptime", "How long a loop's present run has lasted."),
)
"""Name, field of a :class:`LoopStatus`, and help text."""


def _loops(loops: Sequence[LoopStatus]) -> Iterable[Metric]:
    for name, field, text in _LOOP_GAUGES:
        gauge = GaugeMetricFamily(name, text, labels=["loop"])
        for loop in loops:
            gauge.add_metric([loop.name], float(getattr(loop, field)))
        yield gauge
    restarts = CounterMetricFamily("mainspring_loop_restarts", "Restarts after a crash.", labels=["loop"])
    state = GaugeMetricFamily(
        "mainspring_loop_state",
        "1 for the state that a loop is in; stopping covers its drain.",
        labels=["loop", "state"],
    )
    for loop in loops:
        restarts.add_metric([loop.name], loop.restarts)
        for each in ServiceState:
            state.add_metric([loop.name, str(each)], float(each is loop.state))
    yield from (restarts, state)
