"""Metrics of several servers as one page, in both formats, read as Prometheus reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from prometheus_client import CollectorRegistry, Counter, Enum, Gauge, Histogram, Info, Summary, generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from mainspring.telemetry.merged_metrics import MetricsText, ReplicaMetrics, merged, merged_page

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

OPENMETRICS = "application/openmetrics-text;version=1.0.0"


def registry_of_an_app() -> CollectorRegistry:
    """One metric of each kind."""
    registry = CollectorRegistry()
    jobs = Counter("jobs", "Jobs.", ["kind"], registry=registry)
    jobs.labels("a").inc(2)
    jobs.labels("b").inc(3)
    Gauge("depth", "Depth.", registry=registry).set(4)
    took = Histogram("took_seconds", "Took.", ["kind"], buckets=(0.1, 1), registry=registry)
    took.labels("a").observe(0.5)
    took.labels("b").observe(5)
    Summary("size", "Size.", registry=registry).observe(7)
    Info("build", "Build.", registry=registry).info({"version": "1"})
    Enum("mood", "Mood.", states=["good", "bad"], registry=registry)
    return registry


def page_of_an_app() -> str:
    return generate_latest(registry_of_an_app()).decode()


def replica(text: str, number: int = 1) -> ReplicaMetrics:
    return ReplicaMetrics("web", number, text)


def read(page: MetricsText) -> list[Metric]:
    parse = parse_openmetrics if page.content_type.startswith("application/openmetrics") else (
        text_string_to_metric_families
    )  # fmt: skip
    families = list(parse(page.text.decode()))
    names = [family.name for family in families]
    assert len(set(names)) == len(names)
    samples = [(sample.name, *sorted(sample.labels.items())) for family in families for sample in family.samples]
    assert len(set(samples)) == len(samples)
    return families


@pytest.mark.parametrize("accept", [OPENMETRICS, "text/plain;version=0.0.4", ""])
def test_families_of_one_name_are_one_with_the_labels_of_each_replica(accept: str) -> None:
    theirs = [replica(page_of_an_app(), number) for number in (1, 2)]
    page = merged_page(registry_of_an_app().collect(), theirs, accept)
    assert page.left_out == []
    assert page.content_type.startswith(accept.partition(";")[0])
    found = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in read(page)
        for sample in family.samples
    }
    for number in ("1", "2"):
        of = ("replica", number), ("service", "web")
        assert found["depth", *of] == 4
        assert found["jobs_total", ("kind", "b"), *of] == 3
        assert found["took_seconds_bucket", ("kind", "b"), ("le", "1.0"), *of] == 0
        assert found["took_seconds_bucket", ("kind", "b"), ("le", "+Inf"), *of] == 1
        assert found["took_seconds_sum", ("kind", "a"), *of] == 0.5
        assert found["size_count", *of] == 1
        assert found["build_info", *of, ("version", "1")] == 1
        assert found["jobs_created", ("kind", "a"), *of] > 0
    assert found["depth",] == 4


def test_the_first_help_text_stays_and_what_only_replicas_have_is_there() -> None:
    ours = CollectorRegistry()
    Gauge("depth", "Ours.", registry=ours).set(1)
    theirs = "# HELP depth Theirs.\n# TYPE depth gauge\ndepth 2\n# HELP other Other.\n# TYPE other untyped\nother 3\n"
    families = {family.name: family for family in read(merged_page(ours.collect(), [replica(theirs)], ""))}
    assert (families["depth"].documentation, len(families["depth"].samples)) == ("Ours.", 2)
    assert families["other"].samples[0].labels == {"service": "web", "replica": "1"}


def test_labels_that_are_taken_are_exported() -> None:
    theirs = 'depth{service="db",exported_service="x",replica="9"} 2\n'
    (sample,) = merged([], [replica(theirs)]).families[0].samples
    assert (sample.labels["service"], sample.labels["replica"], sample.labels["exported_replica"]) == ("web", "1", "9")
    assert {sample.labels["exported_service"], sample.labels["exported_exported_service"]} == {"db", "x"}


@pytest.mark.parametrize(
    "theirs",
    [
        "# TYPE depth_total counter\ndepth_total 5\n",
        "# TYPE depth_sum gauge\ndepth_sum 5\n",
        "# TYPE depth histogram\n",
    ],
)
def test_a_metric_of_another_type_is_left_out_and_named(theirs: str) -> None:
    ours = CollectorRegistry()
    Summary("depth", "Ours.", registry=ours)
    page = merged_page(ours.collect(), [replica(theirs + "# TYPE well gauge\nwell 1\n")], OPENMETRICS)
    assert [family.name for family in read(page)] == ["depth", "well"]
    assert len(page.left_out) == 1
    assert "of web.1 is left out of /metrics: a metric of another type has its name" in page.left_out[0]


@pytest.mark.parametrize(
    "text", ["<html>no metrics</html>\n", "depth{ 1\n", '# TYPE x histogram\nx_bucket{le="much"} 1\n', "depth a\n"]
)
def test_text_that_is_none_is_left_out_and_named(text: str) -> None:
    families, left_out = merged([], [replica(text), replica("depth 1\n", 2)])
    assert [family.name for family in families] == ["depth"]
    assert left_out[0].startswith("the metrics of web.1 are left out of /metrics: ValueError")


def test_bounds_are_written_as_openmetrics_has_them() -> None:
    theirs = '# TYPE took histogram\ntook_bucket{le="1"} 1\ntook_bucket{le="+Inf"} 2\ntook_sum 3\ntook_count 2\n'
    (family,) = read(merged_page([], [replica(theirs)], OPENMETRICS))
    assert [sample.labels.get("le") for sample in family.samples] == ["1.0", "+Inf", None, None]
