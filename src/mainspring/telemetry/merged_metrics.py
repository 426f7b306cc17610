"""Our metrics and those of replicas as one page: one family of a name, and on theirs the labels ``service`` and ``replica``."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from prometheus_client.samples import Sample

_SUFFIXES = {
    "counter": ("_total", "_created"),
    "histogram": ("_bucket", "_sum", "_count", "_created"),
    "summary": ("", "_sum", "_count", "_created"),
    "gaugehistogram": ("_bucket", "_gsum", "_gcount"),
}
"""What the names of samples end with, by the type of their family. All other types have samples of the family's name."""
_SIMPLE = {"info": ("_info", "gauge"), "stateset": ("", "gauge")}
"""As what the text format shows a type that it does not have."""
_OWN_LABELS = {"histogram": "le", "summary": "quantile"}


class ReplicaMetrics(NamedTuple):
    """What a replica says on its ``/metrics``: the plain text format (0.0.4)."""

    service: str
    replica: int
    text: str


class MergedMetrics(NamedTuple):
    """The families of a page, and what is left out of it, as lines for the log."""

    families: list[Metric]
    left_out: list[str]


class MetricsText(NamedTuple):
    """A page of metrics as it is sent, and what is left out of it, as lines for the log."""

    text: bytes
    content_type: str
    left_out: list[str]


def merged(ours: Iterable[Metric], theirs: Sequence[ReplicaMetrics]) -> MergedMetrics:
    """Merge our metrics with those of replicas. They take long where these have many: call it in a thread.

    A family of a replica is added to the one of its name. It is left out if the samples of another type have that name.
    The help text is that of the first. Labels of theirs that are named ``service`` or ``replica`` become
    ``exported_service`` and ``exported_replica``, as with Prometheus.
    """
    families: dict[str, Metric] = {}
    owners: dict[str, str] = {}
    left_out: list[str] = []
    for family in map(_simple, ours):
        families[family.name] = family
        owners.update(dict.fromkeys(_names(family), family.name))
    for replica in theirs:
        name = f"{replica.service}.{replica.replica}"
        try:
            found = _families_of(replica)
        except (ValueError, IndexError, KeyError) as error:  # the parser's ways to say that it is no such text
            left_out.append(f"the metrics of {name} are left out of /metrics: {type(error).__name__}: {error}")
            continue
        for family in found:
            present = families.get(family.name)
            holders = {owners.get(each, family.name) for each in _names(family)}
            if holders != {family.name} or (present is not None and present.type != family.type):
                left_out.append(
                    f"the {family.type} {family.name} of {name} is left out of /metrics: a metric of another type has its name"
                )
                continue
            if present is None:
                present = families[family.name] = Metric(family.name, family.documentation, family.type)
                owners.update(dict.fromkeys(_names(family), family.name))
            present.samples += family.samples
    return MergedMetrics(list(families.values()), left_out)


def merged_page(ours: Iterable[Metric], theirs: Sequence[ReplicaMetrics], accept: str) -> MetricsText:
    """Return merged metrics as text, in the format that the ``Accept`` header asks for."""
    families, left_out = merged(ours, theirs)
    encode, content_type = choose_encoder(accept)
    return MetricsText(encode(_Collected(families)), content_type, left_out)


class _Collected(Collector):
    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _names(family: Metric) -> set[str]:
    """Return all names that a page may use only for this family."""
    return {family.name, *(family.name + suffix for suffix in _SUFFIXES.get(family.type, ()))}


def _simple(family: Metric) -> Metric:
    """Return a family of ours, as a page in the text format shows it."""
    suffix, kind = _SIMPLE.get(family.type, ("", family.type))
    copy = Metric(family.name + suffix, family.documentation, kind, family.unit)
    copy.samples = list(family.samples)
    return copy


def _families_of(replica: ReplicaMetrics) -> list[Metric]:
    """Read a page in the text format. When a counter or a histogram was created is a gauge of its own there: join them."""
    families: dict[str, Metric] = {}
    for family in text_string_to_metric_families(replica.text):
        present = families.setdefault(family.name, family)
        if present is not family and present.type == family.type:
            present.samples += family.samples
    for name in [name for name in families if name.endswith("_created")]:
        of = families.get(name.removesuffix("_created"))
        if of is not None and "_created" in _SUFFIXES.get(of.type, ()):
            of.samples += families.pop(name).samples
    for family in families.values():
        family.samples = _labelled(family, replica)
    return list(families.values())


def _labelled(family: Metric, replica: ReplicaMetrics) -> list[Sample]:
    """Return the samples of a family with the labels of a replica, those of one histogram side by side."""
    own = _OWN_LABELS.get(family.type, "")
    groups: dict[frozenset[tuple[str, str]], list[Sample]] = {}
    for sample in family.samples:
        group = frozenset(item for item in sample.labels.items() if item[0] != own)
        labels = {"service": replica.service, "replica": str(replica.replica), **_exported(sample.labels)}
        if own in labels:
            labels[own] = floatToGoString(labels[own])  # type: ignore[no-untyped-call]
        groups.setdefault(group, []).append(sample._replace(labels=labels))
    return [sample for samples in groups.values() for sample in samples]


def _exported(labels: Mapping[str, str]) -> dict[str, str]:
    renamed: dict[str, str] = {}
    for label, value in labels.items():
        name = label
        while name in ("service", "replica") or name in renamed:
            name = f"exported_{name}"
        renamed[name] = value
    return renamed
