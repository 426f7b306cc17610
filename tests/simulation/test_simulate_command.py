"""``mainspring simulate``: what it prints, writes and exits with."""

from __future__ import annotations

import json
import re
import shlex
from importlib import import_module
from inspect import signature
from pathlib import Path

import pytest

from mainspring.cli.app import call
from mainspring.cli.progress import progress
from mainspring.cli.simulate import SimulateOptions, simulate_target
from mainspring.testing import Faults, Simulation, simulate
from mainspring.testing.simulation.run import HOURLY

SOURCE = """
from dataclasses import dataclass
import anyio
from mainspring import Context, LoopGroup, MainLoop

@dataclass
class Order:
    number: int

async def hasty(order: Order, ctx: Context) -> None:
    await ctx.message.acknowledge()
    await anyio.sleep(20)

async def patient(order: Order) -> None:
    await anyio.sleep(20)

def build_hasty(mailbox):
    return LoopGroup([MainLoop(mailbox, hasty)])

def build_patient(mailbox):
    return LoopGroup([MainLoop(mailbox, patient)])

async def build_async(mailbox): ...

def build_without(): ...

group = None
"""
SHORT = ("--duration", "30m", "--times", "20", "--workers", "2")


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    name = f"simulated_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(SOURCE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.fixture
def module(tmp_path: Path) -> str:
    return f"simulated_{tmp_path.name}".replace("-", "_")


@pytest.mark.slow
def test_what_holds(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["simulate", f"{module}:build_patient", "--seeds", "3", *SHORT]) == 0
    told = capsys.readouterr().out
    assert "3 seeds, each 30m of 2 workers with 1 message a minute, 20 times the default faults:\n" in told


@pytest.mark.slow
def test_the_defaults_are_those_of_a_test(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["simulate", f"{module}:build_patient", "--seed", "3", "--workers", "1", "--json"]) == 0
    run = json.loads(capsys.readouterr().out)["run"]
    again = Simulation(
        seed=3, workers=1, duration=signature(simulate).parameters["duration"].default, faults=Faults().times(HOURLY)
    )
    report = again.run(import_module(module).build_patient)
    assert (run["plan"], run["counts"]) == ([str(fault) for fault in report.plan], report.counts)


def test_the_default_rates_are_those_that_a_replay_command_leaves_out(
    module: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mainspring.testing.simulation.run.HOURLY", 3.0)
    plans = []
    for times in ([], ["--times", "3"]):
        call(["simulate", f"{module}:build_patient", "--seed", "1", "--workers", "1", "--no-shrink", "--json", *times])
        plans.append(json.loads(capsys.readouterr().out)["run"]["plan"])
    assert plans[0] == plans[1] != []


@pytest.mark.slow
def test_where_there_is_no_terminal_lines_tell_how_far_it_is(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = SimulateOptions(seeds=3, duration=1800, workers=2, progress_every=0.1)
    assert simulate_target(f"{module}:build_patient", options) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines
    assert all(re.fullmatch(r"simulating 3 seeds: \d+% in \d+ s(, about \d+ s to go)?", line) for line in lines), lines
    shares = [int(re.findall(r"(\d+)%", line)[0]) for line in lines]
    assert shares == sorted(shares)
    assert max(shares) <= 100


def test_lines_of_progress_come_at_most_so_often(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("working", 4, every=3600) as show:
        for done in range(4):
            show(done)
    assert capsys.readouterr().err == ""
    with progress("looking", None, every=0) as show:
        show(2)
    assert capsys.readouterr().err == "looking: 2 runs in 0 s\n"


@pytest.mark.slow
def test_several_processes_find_the_same(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    printed = []
    for jobs in ("1", "2"):
        assert call(["simulate", f"{module}:build_patient", "--seeds", "4", "--jobs", jobs, "--json", *SHORT]) == 0
        figures = json.loads(capsys.readouterr().out)
        printed.append((figures["runs"], figures["counts"], figures["virtual_seconds"]))
    assert printed[0] == printed[1]


@pytest.mark.slow
def test_what_breaks_is_told_and_its_command_tells_the_same(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["simulate", f"{module}:build_hasty", *SHORT, "--svg", "x.svg", "--log", "x.log"]) == 1
    told = capsys.readouterr().out
    assert "the work is lost" in told
    assert "\nw0 " in told
    command = told.partition("to run it again:\n")[2].splitlines()[0]
    assert "--rate" not in command  # the rates are the default ones
    assert call([*shlex.split(command)[1:], "--no-shrink", "--log", "y.log", "--json"]) == 1
    figures = json.loads(capsys.readouterr().out)
    assert figures["run"]["violation"]["rule"] == "work done"
    assert Path("x.log").read_text(encoding="utf-8") == Path("y.log").read_text(encoding="utf-8")
    assert Path("x.svg").read_text(encoding="utf-8").startswith("<svg")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["build_patient", "--faults", "crsh"], "no faults of kind 'crsh'; there are crash"),
        (["build_patient", "--duration", "3x"], "'3x' is no duration"),
        (["build_patient", "--duration", "0"], "duration must be above 0"),
        (["build_patient", "--rate", "crash"], "--rate 'crash': write KIND=NUMBER"),
        (["build_patient", "--rate", "crsh=1"], "no faults of kind 'crsh'"),
        (["build_patient", "--keep", "a"], "--keep 'a': write the numbers"),
        (["build_patient", "--body", "{"], "--body is no JSON"),
        (["build_patient", "--body", '"text"'], "no body for Order"),
        (["build_patient", "--seed", "1", "--log", "no/such/file"], "no/such/file cannot be written"),
        (["build_async"], "name a plain function"),
        (["build_without"], "it must be build"),
        (["group"], "name a plain function"),
        (["nothing"], "has no 'nothing'"),
    ],
)
def test_wrong_use_is_one_line(
    module: str, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    target, *options = arguments
    options = [*SHORT, *options] if "--duration" not in options else options
    assert call(["simulate", f"{module}:{target}", *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


@pytest.mark.slow
def test_the_group_of_make_simulate(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "scripts")
    assert call(["simulate", "simulated_group:build", "--seed", "1", "--duration", "2m", "--times", "60"]) == 0
    told = capsys.readouterr().out
    assert re.search(r"[1-9]\d* acked", told), told
    assert re.search(r"[1-9]\d* planned faults", told), told
