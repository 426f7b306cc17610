"""``mainspring up`` as a process: services of a file started, restarted, reloaded, stopped, and never orphaned."""

from __future__ import annotations

import json
import os
import re
import signal
from textwrap import dedent
from typing import TYPE_CHECKING

import pytest
from cli_helpers import alive, only_line, run, started, wait_until, wait_until_gone

if TYPE_CHECKING:
    from pathlib import Path

TWO = """
lifecycle:
  restart_policy: {initial_delay: 0, jitter: none}
services:
  web:
    command: [sh, -c, 'echo "web pid $$ of $MAINSPRING_SERVICE $MAINSPRING_REPLICA in $MAINSPRING_ENV" >&2; exec sleep 600']
    ready_line: web pid
    depends_on: [store]
    replicas: 2
  store:
    command: [sh, -c, 'echo "store pid $$" >&2; exec sleep 600']
    ready_line: store pid
"""


def write(directory: Path, text: str = TWO) -> None:
    (directory / "services.yaml").write_text(dedent(text), encoding="utf-8")


def test_validate_says_what_the_file_holds(tmp_path: Path) -> None:
    write(tmp_path)
    ended = run("up", "services.yaml", "--validate", cwd=tmp_path)
    assert ended.returncode == 0
    assert ended.stdout == "services.yaml: 2 services: web (2 replicas), store\n"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("services:\n  web:\n    comand: [x]\n", "services.yaml:3: "),
        ("services: {a: {command: [x], depends_on: [b]}, b: {command: [x], depends_on: [a]}}", "services.yaml:1: "),
    ],
)
def test_a_file_with_faults_is_refused(tmp_path: Path, text: str, line: str) -> None:
    write(tmp_path, text)
    for arguments in (["--validate"], []):
        ended = run("up", "services.yaml", *arguments, cwd=tmp_path)
        assert ended.returncode == 2
        assert line in ended.stderr
        assert "Traceback" not in ended.stderr


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    ended = run("up", "none.yaml", cwd=tmp_path)
    assert ended.returncode == 2
    assert "none.yaml: cannot be read: No such file" in only_line(ended.stderr)


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["asyncio", "uvloop", "trio"])
def test_services_start_in_order_and_a_signal_stops_them(tmp_path: Path, loop: str) -> None:
    write(tmp_path)
    with started("up", "services.yaml", "--loop", loop, cwd=tmp_path) as command:
        command.expect("services: running")
        command.send(signal.SIGTERM)
        assert command.wait() == 0
        said = command.text
        assert said.index("store.1 | store pid") < said.index("web.1 | web pid")
        assert re.search(r"web\.2 \| web pid \d+ of web 2 in production", said)
        assert "services stopped (SIGTERM)" in command.text
        for pid in re.findall(r"pid (\d+)", said):
            assert not alive(int(pid))


@pytest.mark.slow
def test_a_killed_process_is_replaced(tmp_path: Path) -> None:
    write(tmp_path)
    with started("up", "services.yaml", cwd=tmp_path) as command:
        command.expect("services: running")
        first = int(re.search(r"store\.1 \| store pid (\d+)", command.text).group(1))
        os.kill(first, signal.SIGKILL)
        command.expect("killed by SIGKILL")
        wait_until(lambda: len(re.findall(r"store\.1 \| store pid \d+", command.text)) == 2)
        command.send(signal.SIGTERM)
        assert command.wait() == 0


@pytest.mark.slow
def test_nothing_is_left_when_the_supervisor_is_killed(tmp_path: Path) -> None:
    write(tmp_path, TWO.replace("exec sleep 600", "setsid sleep 601 & exec sleep 600"))
    with started("up", "services.yaml", cwd=tmp_path) as command:
        command.expect("services: running")
        pids = [int(pid) for pid in re.findall(r"pid (\d+)", command.text)]
        command.send(signal.SIGKILL)
        for pid in pids:
            wait_until_gone(pid)


@pytest.mark.slow
def test_a_reload_restarts_what_has_changed_and_a_bad_file_changes_nothing(tmp_path: Path) -> None:
    write(tmp_path)
    with started("up", "services.yaml", cwd=tmp_path) as command:
        command.expect("services: running")
        before = command.text
        write(tmp_path, TWO.replace("replicas: 2", "replicas: two"))
        command.send(signal.SIGHUP)
        command.expect(r"reload failed: services\.yaml:\d+: ")
        write(tmp_path, TWO.replace("web pid $$", "web pid $$ anew"))
        command.send(signal.SIGHUP)
        command.expect("services.yaml was read again: 2 services")
        command.expect("services.yaml is in force")
        new = command.text[len(before) :]
        assert len(re.findall(r"web\.\d \| web pid \d+ anew", new)) == 2
        assert "store pid" not in new
        command.send(signal.SIGTERM)
        assert command.wait() == 0


@pytest.mark.slow
def test_a_core_service_that_cannot_be_kept_running_ends_the_whole(tmp_path: Path) -> None:
    write(
        tmp_path,
        """
        lifecycle: {startup: {max_retries: 2}, restart_policy: {initial_delay: 0, jitter: none}}
        services:
          fails: {command: [sh, -c, "echo no >&2; exit 3"]}
          works: {command: [sleep, "600"]}
        """,
    )
    with started("up", "services.yaml", cwd=tmp_path) as command:
        assert command.wait() == 1
        assert "exit status 3 before it was ready" in command.text
        assert "service 'fails' was given up" in command.text


@pytest.mark.slow
def test_json_lines(tmp_path: Path) -> None:
    write(tmp_path, "services: {one: {command: [sh, -c, 'echo \"ERROR: half\"; exit 0'], restart: temporary}}")
    with started("up", "services.yaml", "--log-json", cwd=tmp_path) as command:
        assert command.wait() == 0
        (line,) = [json.loads(each) for each in command.process.stdout or ()]
        assert (line["service"], line["replica"], line["message"], line["level"]) == ("one", 1, "ERROR: half", "ERROR")
        for each in command.lines[:-1]:
            json.loads(each)
