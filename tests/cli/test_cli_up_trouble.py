"""``mainspring up`` with services of every bad kind beside a good one: each is named, and the supervisor answers."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from textwrap import dedent
from typing import TYPE_CHECKING, Any

import pytest
from cli_helpers import MAINSPRING, PATIENCE, alive, run, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.slow

TROUBLE = """
lifecycle:
  startup: {timeout: 1s, max_retries: 2, health_check_interval: 0.1s}
  shutdown: {timeout: 3s, drain_timeout: 0.5s, force_kill_timeout: 1s}
  health_check: {timeout: 0.2s}
  hooks: {timeout: 0.2s}
  restart_policy: {initial_delay: 0, jitter: none, max_retries: 2}
services:
  well: {command: [sh, -c, 'echo $$ > well.pid; exec sleep 600']}
  missing: {core: false, command: [no-such-program-here]}
  ends: {core: false, command: [sh, -c, 'exit 3']}
  daemon: {core: false, command: [sh, -c, 'setsid sleep 600 & echo $! > daemon.pid; exit 0']}
  stubborn: {core: false, command: [sh, -c, 'trap "" TERM; echo $$ > stubborn.pid; while :; do sleep 600; done']}
  floods: {core: false, command: [yes, a line of a flood]}
  half: {core: false, command: [sh, -c, 'printf half; exec sleep 600']}
  binary: {core: false, command: [sh, -c, 'head -c 300000 /dev/urandom; exec sleep 600']}
  port: {core: false, command: [PYTHON, -c, 'import socket; socket.create_server(("127.0.0.1", PORT))']}
  probe: {core: false, command: [sleep, '600'], probe: {exec: [sleep, '600']}}
  hook: {core: false, command: [sleep, '600'], hooks: {pre_start: [{command: [sleep, '600'], abort: true}]}}
  disk: {core: false, command: [sh, -c, 'echo of no use > /dev/full']}
"""
NAMED = {
    "missing": "no-such-program-here",
    "ends": "exit status 3 before it was ready",
    "daemon": "exit status 0 before it was ready",
    "port": "exit status 1 before it was ready",
    "probe": "not ready within 1 s: .*0.2 s",
    "hook": "its hook pre_start failed",
    "disk": r"exit status \d before it was ready",
}
"""What is said of each that is given up."""
RUN_ON = ("well", "stubborn", "floods", "half", "binary")


@contextmanager
def supervised(directory: Path, text: str, output: str) -> Iterator[subprocess.Popen[bytes]]:
    (directory / "services.yaml").write_text(dedent(text), encoding="utf-8")
    with open(output, "wb") as stream:
        process = subprocess.Popen(
            [*MAINSPRING, "up", "services.yaml", "--control", str(directory / "control.sock")],
            cwd=directory,
            stdout=stream,
            stderr=stream,
        )
    try:
        yield process
        process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE)
    finally:
        process.kill()
        process.wait(PATIENCE)


def replicas(directory: Path) -> dict[str, Any]:
    """What the supervisor says of the first replica of each service; nothing before it listens."""
    ended = run("status", "--url", f"unix:{directory}/control.sock", "--json", cwd=directory)
    if not ended.stdout.startswith("{"):
        return {}
    return {service["name"]: service["replicas"][0] for service in json.loads(ended.stdout)["services"]}


@pytest.mark.parametrize("output", ["said", "/dev/full"])
def test_each_is_named_and_the_supervisor_answers(tmp_path: Path, output: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        text = TROUBLE.replace("PYTHON", sys.executable).replace("PORT", str(taken.getsockname()[1]))
        with supervised(tmp_path, text, str(tmp_path / output)) as process:

            def settled() -> bool:
                found = replicas(tmp_path)
                return bool(found) and all(
                    found[name]["state"] == ("running" if name in RUN_ON else "stopped") for name in found
                )

            wait_until(settled, "the services have not settled")
            found = replicas(tmp_path)
            assert sorted(found) == sorted([*NAMED, *RUN_ON])
            for name, error in NAMED.items():
                assert re.search(error, str(found[name])), found[name]
            assert process.poll() is None
    pids = [int((tmp_path / f"{name}.pid").read_text()) for name in ("well", "daemon", "stubborn")]
    assert not any(map(alive, pids))
