"""``mainspring check FILE``: the phases of a stop, in the order of dependencies, against the kill time."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from cli_helpers import only_line, run

from mainspring.services.config import parse_config
from mainspring.services.stop_times import StopChain, StopPhases, stop_chains, stop_phases

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.own_time(2)

FILE = """
lifecycle: {shutdown: {timeout: 60, drain_timeout: 10, force_kill_timeout: 5}, hooks: {timeout: 3}}
services:
  store: {command: x, lifecycle: {shutdown: {timeout: 300, drain_timeout: 200}}}
  worker:
    command: x
    depends_on: [store]
    hooks: {pre_stop: [a, {command: b, timeout: 1}], post_stop: c}
    probe: {tcp: "h:1"}
  other: {command: x}
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "up.yaml").write_text(FILE)
    return tmp_path


def test_the_times_of_a_stop() -> None:
    config = parse_config(FILE.encode(), name="up.yaml", environment={})
    store, worker, other = config.services
    assert stop_phases(worker) == StopPhases("worker", 4, 10, 5, 3, 60)
    assert (stop_phases(worker).seconds, stop_phases(store).seconds) == (22, 205)
    chains = stop_chains(config.services, 60)
    assert StopChain(("worker", "store"), 227, 300) in chains
    assert StopChain(("other",), 15, 60) in chains
    assert len(chains) == 3
    capped = stop_chains([worker, store, other], 10)
    assert StopChain(("worker",), 22, 60) in capped


def test_hooks_that_are_switched_off_take_no_time() -> None:
    text = "lifecycle: {hooks: {enabled: false}}\nservices: {a: {command: x, hooks: {pre_stop: [y]}}}"
    (spec,) = parse_config(text.encode(), name="up.yaml", environment={}).services
    assert stop_phases(spec).pre_stop == 0


def test_a_chain_is_cut_at_the_limit_of_the_whole() -> None:
    text = "services: {a: {command: x}, b: {command: x, depends_on: [a]}}"
    config = parse_config(text.encode(), name="up.yaml", environment={})
    worst = max(stop_chains(config.services, 30), key=lambda chain: chain.seconds)
    assert worst == StopChain(("b", "a"), 50, 30)
    assert worst.within == 30


def test_what_is_unknown_is_said(directory: Path) -> None:
    ended = run("check", "up.yaml", cwd=directory)
    assert ended.returncode == 0, ended.stderr
    assert "all services stop within 227 s: worker then store\n" in ended.stdout
    assert "not judged: the orchestrator's kill time is unknown (--grace); it must be 228 s or more\n" in ended.stdout
    assert "fails" not in ended.stdout


def test_the_kill_time_is_compared_with_the_longest_chain(directory: Path) -> None:
    ended = run("check", "up.yaml", "--grace", "3m", cwd=directory)
    assert ended.returncode == 1
    assert (
        "fails: all services have stopped before the orchestrator kills the supervisor (228 s against 180 s): set"
        in (ended.stdout)
    )
    assert run("check", "up.yaml", "--grace", "228", cwd=directory).returncode == 0


def test_each_rule_that_fails_says_what_would_pass(tmp_path: Path) -> None:
    (tmp_path / "up.yaml").write_text(
        "services:\n"
        "  a: {command: x, hooks: {pre_stop: y}, probe: {tcp: 'h:1'}, lifecycle: {startup: {timeout: 2}}}\n"
        "  b: {command: x, depends_on: [a]}\n"
    )
    ended = run("check", "up.yaml", "--json", cwd=tmp_path)
    assert ended.returncode == 1
    said = json.loads(ended.stdout)
    broken = {(rule["loop"], rule["setting"]): rule["value"] for rule in said["rules"] if not rule["ok"]}
    assert broken == {
        ("a", "shutdown.timeout"): 35,
        ("a", "startup.timeout"): 10,
        ("", "lifecycle.shutdown.timeout"): 55,
    }
    (tmp_path / "up.yaml").write_text(
        "lifecycle: {shutdown: {timeout: 60}, startup: {timeout: 10}}\n"
        "services:\n"
        "  a: {command: x, hooks: {pre_stop: y}, probe: {tcp: 'h:1'}}\n"
        "  b: {command: x, depends_on: [a]}\n"
    )
    assert run("check", "up.yaml", cwd=tmp_path).returncode == 0
    assert said["longest_stop"]["services"] == ["b", "a"]
    assert [each["seconds"] for each in said["timeouts"]] == [30, 25]


def test_wrong_use_is_one_line(directory: Path) -> None:
    ended = run("check", "up.yaml", "--longest", "5", cwd=directory)
    assert ended.returncode == 2
    assert "--longest and --beat-gap are for a group" in only_line(ended.stderr)
    ended = run("check", "none.yaml", cwd=directory)
    assert (ended.returncode, ended.stderr) == (2, "mainspring: none.yaml: cannot be read: No such file or directory\n")


def test_each_fault_of_a_file_is_a_line(tmp_path: Path) -> None:
    (tmp_path / "up.yaml").write_text("services:\n  a: {comand: x}\n")
    ended = run("check", "up.yaml", cwd=tmp_path)
    assert ended.returncode == 2
    first, second = ended.stderr.splitlines()
    assert first == "mainspring: up.yaml:2: services.a: the key command is missing; allowed: a mapping that has it"
    assert second.startswith(
        "mainspring: up.yaml:2: services.a.comand: unknown key, did you mean command?; allowed: command,"
    )
