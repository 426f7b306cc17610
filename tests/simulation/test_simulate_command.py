"""``mainspring simulate``: what it prints, writes and exits with."""

from __future__ import annotations

import json
import re
import shlex
import signal
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
import signal
from dataclasses import dataclass
import anyio
from pydantic import BaseModel
from mainspring import Context, LoopGroup, MainLoop

@dataclass
class Order:
    number: int

class Invoice(BaseModel):
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

async def bill(invoice: Invoice) -> None:
    print("billed", invoice)

def build_billing(mailbox):
    return LoopGroup([MainLoop(mailbox, bill)])

async def talk(order: Order, ctx: Context) -> None:
    print("working on", order)
    await hasty(order, ctx)

def build_talking(mailbox):
    return LoopGroup([MainLoop(mailbox, talk)])

worked = 0

async def press_ctrl_c(order: Order) -> None:
    global worked
    worked += 1
    if worked == 100:
        signal.raise_signal(signal.SIGINT)

def build_interrupted(mailbox):
    return LoopGroup([MainLoop(mailbox, press_ctrl_c)])

async def hasty_at_first(order: Order, ctx: Context) -> None:
    global worked
    worked += 1
    if worked < 50:
        await hasty(order, ctx)

def build_changing(mailbox):
    return LoopGroup([MainLoop(mailbox, hasty_at_first)])

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
    assert re.search(r" dead-lettered, .* \d+ waiting\n", told)
    assert told.splitlines()[-1] == "3 seeds: no promise broken"


@pytest.mark.parametrize("target", ["build_patient", "build_billing"])
def test_a_body_is_read_as_a_mailbox_reads_it(module: str, target: str, capsys: pytest.CaptureFixture[str]) -> None:
    body = ("--body", '{"number": 7}')
    assert call(["simulate", f"{module}:{target}", "--seed", "1", "--duration", "5m", "--workers", "1", *body]) == 0
    assert re.search(r"[1-9]\d* acked", capsys.readouterr().out)


def test_messages_that_still_wait_at_the_end_are_counted(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    rates = ("--faults", "none", "--rate", "failing_handler=1")
    call(["simulate", f"{module}:build_patient", "--seed", "1", "--duration", "5m", "--workers", "1", *rates, "--json"])
    counts = json.loads(capsys.readouterr().out)["run"]["counts"]
    assert counts["acked"] == 0
    assert counts["waiting"] == counts["sent"] > 0


def test_what_handlers_print_is_shown_of_the_told_run_only(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = ("--duration", "5m", "--workers", "1", "--faults", "none")
    assert call(["simulate", f"{module}:build_billing", "--seeds", "2", *run]) == 0
    assert "billed" not in capsys.readouterr().out
    assert call(["simulate", f"{module}:build_billing", "--seed", "1", *run]) == 0
    told = capsys.readouterr().out
    assert told.startswith("printed in this run:\nbilled number=")
    assert call(["simulate", f"{module}:build_billing", "--seed", "1", *run, "--json"]) == 0
    run = json.loads(capsys.readouterr().out)["run"]
    assert run["printed"].count("billed") == run["counts"]["acked"]


def test_a_ctrl_c_ends_the_command_and_is_told(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = ("--duration", "30m", "--workers", "2", "--faults", "none")
    assert call(["simulate", f"{module}:build_interrupted", "--seeds", "50", *run]) == 130
    printed = capsys.readouterr()
    assert re.fullmatch(r"mainspring: interrupted after [1-9] of 50 seeds\n", printed.err)
    assert printed.out == ""
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.slow
def test_what_the_smallest_failing_run_printed_is_shown(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["simulate", f"{module}:build_talking", *SHORT]) == 1
    told = capsys.readouterr().out
    printed = told.partition("printed in this run:\n")[2].partition("\nseed ")[0].splitlines()
    assert 1 <= len(printed) < 10
    assert all(line.startswith("working on Order(number=") for line in printed)


@pytest.mark.slow
def test_a_failure_that_does_not_come_again_is_no_success(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["simulate", f"{module}:build_changing", *SHORT]) == 1
    assert re.search(r"seed \d+ broke a promise, but not when it was run again", capsys.readouterr().err)


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
    assert re.fullmatch(r"(\d+) seeds?: seed \d+ broke a promise", told.splitlines()[-1])
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
        (["build_async"], "is an async function; a simulation runs many groups, so name a plain function"),
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
