"""``mainspring top`` on a terminal of its own, with real keys, beside a supervisor that runs; and its screen as such."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from cli_helpers import MAINSPRING, PATIENCE, Command, only_line, run
from rich.console import Console

from mainspring.cli.top_view import TopView

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SERVICES = """
lifecycle: {restart_policy: {initial_delay: 0, jitter: none}}
services:
  web:
    command: [sh, -c, 'echo "web pid $$ on"; exec sleep 600']
    ready_line: "on$"
    replicas: 2
  store: {command: [sh, -c, 'echo a store; exec sleep 600'], ready_after: 0}
"""
UP, DOWN = "\x1b[A", "\x1b[B"


class Terminal:
    """``mainspring top`` in a terminal of 100 columns and 20 lines."""

    def __init__(self, cwd: Path, *arguments: str) -> None:
        self.ours, self.theirs = pty.openpty()
        fcntl.ioctl(self.theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 20, 100, 0, 0))
        self.before = termios.tcgetattr(self.theirs)
        environment = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES", "NO_COLOR")}
        self.process = subprocess.Popen(
            [*MAINSPRING, "top", "--interval", "0.2", *arguments],
            cwd=cwd,
            stdin=self.theirs,
            stdout=self.theirs,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**environment, "TERM": "xterm"},
        )
        self.raw = ""

    def read(self, timeout: float) -> None:
        """Take what has come within this time."""
        if select.select([self.ours], [], [], timeout)[0]:
            self.raw += os.read(self.ours, 65_536).decode("utf-8", "replace")

    def expect(self, pattern: str) -> re.Match[str]:
        """Wait until what comes from now on matches."""
        self.raw = ""
        deadline = time.monotonic() + PATIENCE
        while True:
            self.read(0.1)
            plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.raw)
            if found := re.search(pattern, plain):
                return found
            assert time.monotonic() < deadline, f"no {pattern!r} in {plain[-3000:]}"

    def press(self, keys: str) -> None:
        """Send keys."""
        os.write(self.ours, keys.encode())

    def ended(self) -> int:
        """Wait for the end. Return the exit status, after a look at what state the terminal is left in."""
        deadline = time.monotonic() + PATIENCE
        while self.process.poll() is None:
            self.read(0.05)
            assert time.monotonic() < deadline
        self.read(0.05)
        assert termios.tcgetattr(self.theirs) == self.before
        assert self.raw.rindex("\x1b[?1049l") > self.raw.rfind("\x1b[?1049h")
        assert "\x1b[?25h" in self.raw
        return self.process.returncode


@contextmanager
def top(cwd: Path, *arguments: str) -> Iterator[Terminal]:
    """A terminal for the length of a block."""
    terminal = Terminal(cwd, *arguments)
    try:
        yield terminal
    finally:
        terminal.process.kill()
        terminal.process.wait()
        os.close(terminal.ours)
        os.close(terminal.theirs)


def replica(place: Path, name: str) -> dict[str, Any]:
    """What the status says of a replica."""
    found: dict[str, Any] = json.loads(run("status", name, "--json", cwd=place).stdout)
    return found


@pytest.mark.slow
def test_keys_select_and_act(place: Path, up: Command) -> None:
    first, second = (replica(place, f"web.{number}") for number in (1, 2))
    with top(place) as terminal:
        terminal.expect(r"SERVICE +STATE +PID")
        terminal.expect(rf"web\.2 +running +{second['pid']}")
        terminal.press(DOWN + "jjjk" + UP + DOWN)
        terminal.press("r")
        terminal.expect(r"web\.2: restarted")
        assert replica(place, "web.2")["pid"] not in (None, second["pid"])
        assert replica(place, "web.1")["pid"] == first["pid"]
        terminal.press("x")
        terminal.expect(r"stop web\.2\? y stops it")
        terminal.press("n")
        terminal.press("xy")
        terminal.expect(r"web\.2: stopped")
        assert replica(place, "web.2")["state"] == "stopped"
        terminal.press("s")
        terminal.expect(r"web\.2: started")
        terminal.press("l")
        terminal.expect(rf"OUTPUT OF web\.2\s+web\.2 \| web pid {second['pid']} on")
        terminal.press("l")
        terminal.expect(r"SERVICE +STATE +PID")
        terminal.press("q")
        assert terminal.ended() == 0
    assert up.process.poll() is None


@pytest.mark.slow
@pytest.mark.parametrize(("signum", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 0)])
def test_the_terminal_is_restored_after_a_signal(place: Path, up: Command, signum: int, status: int) -> None:
    with top(place) as terminal:
        terminal.expect(r"SERVICE +STATE")
        terminal.process.send_signal(signum)
        assert terminal.ended() == status
    assert up.process.poll() is None


@pytest.mark.slow
def test_a_supervisor_that_has_ended_is_named_and_q_still_leaves(place: Path, up: Command) -> None:
    with top(place) as terminal:
        terminal.expect(r"SERVICE +STATE")
        assert run("drain", "--wait", "60s", cwd=place).returncode == 0
        terminal.expect("is it running")
        terminal.press("q")
        assert terminal.ended() == 0
    assert up.wait() == 0


def test_without_a_terminal_a_line_names_the_other_verb(place: Path) -> None:
    ended = run("top", cwd=place)
    assert ended.returncode == 2
    assert only_line(ended.stderr) == "mainspring: top needs a terminal; use `mainspring status`"


# ---------------------------------------------------------------------------------------------------------- the screen


def status_of(count: int, *, second: int = 0, cpu: float = 0.0) -> dict[str, Any]:
    """The status of an orchestrator with this number of services, of a replica each."""
    usage = {"memory_bytes": 3 << 20, "cpu_seconds": cpu, "processes": 1}
    one = {"number": 1, "state": "running", "pid": 7, "uptime": 90.0, "restarts": 0, "error": None, "notice": ""}
    rest = {"state": "running", "core": True, "stopped": False, "failed": False, "depends_on": [], "error": None}
    return {
        "kind": "orchestrator", "name": "app", "state": "running", "state_seconds": 90.0, "ready": True, "reasons": [],
        "time": f"2026-01-01T00:00:{second:02}.000+00:00",
        "services": [{"name": f"s{number}", **rest, "replicas": [{**one, "usage": usage}]} for number in range(count)],
    }  # fmt: skip


def shown(view: TopView, height: int = 20) -> list[str]:
    """The lines of the screen."""
    console = Console(width=100, height=height, force_terminal=False)
    with console.capture() as capture:
        console.print(view.screen(height))
    return capture.get().splitlines()


def test_the_share_of_a_core_is_reckoned_between_two_statuses() -> None:
    view = TopView("unix:/x", status_of(1, cpu=10.0))
    view.update(status_of(1, second=2, cpu=11.0))
    (row,) = (line for line in shown(view) if line.startswith("s0"))
    assert row.split() == ["s0", "running", "7", "1m", "30s", "0", "50%", "3.0", "MiB"]


def test_more_rows_than_lines_scroll_with_the_selection() -> None:
    view = TopView("unix:/x", status_of(200))
    for steps in (0, 150, 500, -1000):
        view.move(steps)
        lines = shown(view)
        assert len(lines) == 20
        assert view.selected is not None
        assert any(line.startswith(f"{view.selected.name} ") for line in lines)
        assert "q quit" in lines[-1]
    assert view.selected is not None
    assert view.selected.name == "s0"
