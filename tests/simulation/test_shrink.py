"""Shrinking and drawing of a failing run; the helper for users' tests."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from mainspring import Context, LoopGroup, MainLoop
from mainspring.testing import Faults, Simulation, simulate
from mainspring.testing.simulation import shrink
from mainspring.testing.simulation.event_log import LogEntry, around, as_svg, as_text, timeline_of
from mainspring.testing.simulation.run import subsets

if TYPE_CHECKING:
    from mainspring.testing.simulation import SimulationReport


def hasty(mailbox: Any) -> LoopGroup:
    """Acknowledges before the work."""

    async def handle(job: int, ctx: Context) -> None:
        await ctx.message.acknowledge()
        await anyio.sleep(30)

    return LoopGroup([MainLoop(mailbox, handle)])


def patient(mailbox: Any) -> LoopGroup:
    async def handle(job: int) -> None:
        await anyio.sleep(30)

    return LoopGroup([MainLoop(mailbox, handle)])


@pytest.fixture(scope="module")
def failing() -> SimulationReport:
    return Simulation(seed=4, duration=7200, workers=4, faults=Faults().times(10)).run(hasty)


@pytest.mark.slow
def test_a_failing_run_is_made_small(failing: SimulationReport) -> None:
    steps: list[SimulationReport] = []
    small = shrink(failing, lambda simulation: simulation.run(hasty), progress=steps.append)
    assert small.violation is not None
    assert failing.violation is not None
    assert small.violation.rule == failing.violation.rule
    assert len(small.plan) == 1
    assert small.simulation.workers == 1
    assert small.simulation.faults.poison == 0
    assert small.violation.at <= failing.violation.at
    assert steps[-1] is small
    again = eval(small.violation.replay, {"Simulation": Simulation, "Faults": Faults, "build": hasty})
    assert again.events == small.events


@pytest.mark.slow
def test_shrinking_stops_when_its_tries_are_used_up(failing: SimulationReport) -> None:
    runs: list[Simulation] = []

    def run(simulation: Simulation) -> SimulationReport:
        runs.append(simulation)
        return simulation.run(hasty)

    assert shrink(failing, run, tries=3).failed
    assert len(runs) == 3


def test_what_holds_is_not_shrunk() -> None:
    report = Simulation(duration=60, faults=Faults.none()).run(patient)
    assert shrink(report, lambda simulation: pytest.fail("nothing to run")) is report


def test_subsets_go_from_none_to_all_but_one() -> None:
    assert list(subsets([1, 2, 3])) == [[], [3], [1, 2], [2, 3], [1, 3], [1, 2]]
    assert list(subsets([])) == []


@pytest.mark.slow
def test_three_lines_of_a_users_test() -> None:
    simulate(patient, seeds=3, duration=1800)


@pytest.mark.slow
def test_three_lines_that_find_a_mistake() -> None:
    with pytest.raises(AssertionError) as found:
        simulate(hasty, seeds=20)
    told = str(found.value)
    assert "the work is lost" in told
    assert "to run it again:\n  Simulation(seed=" in told
    assert "\nw0 " in told


def test_chosen_seeds_without_shrinking() -> None:
    with pytest.raises(AssertionError, match="Simulation\\(seed=4, duration=7200"):
        simulate(hasty, seeds=[4], duration=7200, workers=4, shrink=False)


# ------------------------------------------------------------------------------------------------------------ drawing

LOG = [
    LogEntry(0.0, "w0.0", "starts"),
    LogEntry(10.0, "w0.0", "started", "m1"),
    LogEntry(30.0, "w0.0", "returned", "m1"),
    LogEntry(40.0, "w0.0", "started", "m2"),
    LogEntry(60.0, "w0.0", "killed"),
    LogEntry(60.0, "w0.0", "died with its worker", "m2"),
    LogEntry(70.0, "w1.0", "started", "m2"),
    LogEntry(80.0, "store", "goes down"),
    LogEntry(100.0, "ledger", "BROKEN <rule>", "m2", "it broke & stopped"),
]


def test_lanes_spans_and_marks() -> None:
    drawn = timeline_of(LOG)
    assert [lane.name for lane in drawn.lanes] == ["store", "w0", "w1"]
    assert [(s.message, s.began, s.ended, s.how) for s in drawn.lanes[1].spans] == [
        ("m1", 10.0, 30.0, "ok"),
        ("m2", 40.0, 60.0, "died"),
    ]
    assert drawn.lanes[2].spans[0].ended == 100.0
    assert drawn.broken is LOG[-1]


def test_a_timeline_for_the_terminal() -> None:
    lines = as_text(timeline_of(LOG), width=108).splitlines()
    rows = {line.split()[0]: line[7:] for line in lines[:3]}
    assert rows["w0"][11] == rows["w0"][29] == "="
    assert rows["w0"][35] == "."
    assert rows["w0"][50] == "#"  # the message that broke
    assert "X" in rows["w0"]
    assert rows["store"].strip() == "["
    assert all(len(line) <= 108 for line in lines)


def test_a_part_of_the_time() -> None:
    drawn = timeline_of(LOG, start=50, end=90)
    assert [span.message for lane in drawn.lanes for span in lane.spans] == ["m2", "m2"]
    assert (drawn.start, drawn.end) == (50, 90)


def test_a_drawing_is_well_formed(failing: SimulationReport) -> None:
    for drawn in (timeline_of(LOG), around(failing), timeline_of([])):
        root = ElementTree.fromstring(as_svg(drawn))
        assert root.tag.endswith("svg")
    titles = [
        title.text or ""
        for title in ElementTree.fromstring(as_svg(timeline_of(LOG))).iter()
        if title.tag.endswith("title")
    ]
    assert "m1: 10.000 to 30.000 s, ok" in titles
    assert any("it broke & stopped" in title for title in titles)
