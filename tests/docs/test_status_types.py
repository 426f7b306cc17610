"""A web framework can read the annotations of every status that an application returns from its API."""

from __future__ import annotations

import dataclasses

import pydantic
import pytest
from test_doc_reference import found_at, named_in_the_reference

import mainspring

LIVE = {
    "Backend", "BackendUnderTest", "Behaviour", "Dispatcher", "ProcessRecord", "Report", "Schedule", "Simulation",
    "SimulationReport",
}  # fmt: skip
"""Objects of a program that hold functions, tasks or exceptions: no API returns them."""


def statuses() -> dict[str, type]:
    named = [getattr(mainspring, name) for name in mainspring.__all__] + list(map(found_at, named_in_the_reference()))
    return {
        kind.__name__: kind
        for kind in named
        if isinstance(kind, type)
        and (dataclasses.is_dataclass(kind) or hasattr(kind, "_fields"))
        and not issubclass(kind, mainspring.ControlMessage)
        and kind.__name__ not in LIVE
    }


@pytest.mark.parametrize("kind", statuses().values(), ids=statuses())
def test_the_annotations_of_a_status_can_be_resolved(kind: type) -> None:
    assert pydantic.TypeAdapter(kind).json_schema()


def test_the_statuses_of_jobs_limits_and_workers_are_among_them() -> None:
    expected = {"JobStatus", "DeadLetter", "ChainStatus", "ScheduleStatus", "WorkerStatus", "LimitState", "Counts"}
    assert expected <= set(statuses())
