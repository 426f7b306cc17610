"""What the pages of metrics have in common: our families, then those of the application, then those of the process."""

from __future__ import annotations

import os
from bisect import bisect_left
from itertools import accumulate
from typing import TYPE_CHECKING

import anyio
from prometheus_client import REGISTRY, CollectorRegistry, ProcessCollector
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from mainspring.core.clock import real_work
from mainspring.core.loggers import Logger
from mainspring.threads.own_thread import OwnThread

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from prometheus_client.core import HistogramMetricFamily
    from prometheus_client.metrics_core import Metric

_log = Logger("mainspring.http")

COLLECT_WITHIN = 5.0
"""Seconds that the application's collectors may take; Prometheus waits 10 s for a page by default."""

# From a millisecond (a webhook that is up) to six hours (a long agent run): about three steps a decade.
BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
    60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 7200.0, 21600.0,
)  # fmt: skip
_BOUNDS = (*map(floatToGoString, BUCKETS), "+Inf")


class Histogram:
    """Seconds by bucket."""

    __slots__ = ("_buckets", "_sum")

    def __init__(self) -> None:
        self._buckets = [0] * len(_BOUNDS)
        self._sum = 0.0

    def add(self, seconds: float) -> None:
        self._buckets[bisect_left(BUCKETS, seconds)] += 1
        self._sum += seconds

    def fill(self, family: HistogramMetricFamily, label: str) -> None:
        totals = accumulate(self._buckets, initial=0)
        next(totals)
        family.add_metric(
            [label], [(bound, float(total)) for bound, total in zip(_BOUNDS, totals, strict=True)], self._sum
        )


class MetricsPage(Collector):
    """Our metrics, then those of the application, then those of the process; of one name only the first.

    ``registry``: the application's metrics; None: no others. ``collect_within``: seconds that these may take.
    """

    def __init__(
        self, ours: Collector, registry: CollectorRegistry | None, *, collect_within: float = COLLECT_WITHIN
    ) -> None:
        self._ours = ours
        self._registry = registry
        self._collect_within = collect_within
        self._process = ProcessCollector(registry=None)
        self._thread: OwnThread[Sequence[Metric]] | None = None
        self._collected: Sequence[Metric] | None = None

    def describe(self) -> Iterable[Metric]:
        """Return nothing: what there is, only a scrape collects."""
        return ()

    def collect(self) -> Iterable[Metric]:
        seen: set[str] = set()
        collected, self._collected = self._collected, None
        theirs = self._theirs() if collected is None else collected
        for family in (*self._ours.collect(), *theirs, *self._process.collect()):
            if family.name not in seen:
                seen.add(family.name)
                yield family

    async def collect_theirs(self) -> None:
        """Call :meth:`_theirs` in a thread, unless an earlier call still runs, and keep what it gives in time."""
        if self._registry is None:
            return
        if self._thread is None or self._thread.done:
            self._thread = OwnThread(self._theirs, "metrics of the application")
        collected: Sequence[Metric] | None = None
        with anyio.move_on_after(self._collect_within), real_work():
            collected = await self._thread.wait()
        if collected is None:
            text = (
                "the application's own metrics are left out of /metrics: a collector has not answered within %g s: %s"
            )
            _log.warning(text, self._collect_within, self._thread.where)
        self._collected = collected or ()

    def _theirs(self) -> Sequence[Metric]:
        try:
            if self._registry is REGISTRY and os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
                return list(MultiProcessCollector(None).collect())  # type: ignore[no-untyped-call]
            return [] if self._registry is None else list(self._registry.collect())
        except Exception:  # a collector of the application must not cost the scrape the group's metrics
            _log.exception("the application's own metrics are left out of /metrics: a collector raised")
            return []
