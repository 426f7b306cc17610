"""From SIGTERM to the exit of an idle service: with the health server, and without it beside arq."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.parse import urlsplit

from common import HERE, Row, beside, in_turns, median, milliseconds, peer, quick, report, version

ROUNDS = 5 if quick() else 15
REDIS = os.environ.get("MAINSPRING_REDIS_URL", "redis://127.0.0.1:6379")
SETTLE = 0.7
"""Seconds a service is left alone after it said that it is up, so that an idle one is measured."""


def leave(command: list[str], environment: dict[str, str], up: str) -> float:
    """Start it, wait until it says ``up``, leave it alone for a while, and time SIGTERM to exit."""
    process = subprocess.Popen(
        command, cwd=HERE / "services", env={**os.environ, **environment}, stderr=subprocess.STDOUT, stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        said.append(line)
        if up in line:
            break
    else:
        raise RuntimeError(f"{command} did not come up:\n" + "".join(said))
    time.sleep(SETTLE)
    began = time.perf_counter()
    process.send_signal(signal.SIGTERM)
    process.stdout.read()
    process.wait()
    return time.perf_counter() - began


def ours(folder: Path, *, health: bool) -> float:
    environment = {"BENCH_DB": str(folder / "jobs.db"), "BENCH_HEALTH_PORT": "0" if health else ""}
    command = [str(Path(sys.executable).with_name("mainspring")), "run", "ours:group"]
    return leave(command, environment, "mainspring: running")


def redis_answers() -> bool:
    parts = urlsplit(REDIS)
    try:
        socket.create_connection((parts.hostname or "127.0.0.1", parts.port or 6379), timeout=1).close()
    except OSError:
        return False
    return True


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        python = peer("arq", "arq") if redis_answers() else None
        runs = [lambda: ours(folder, health=True), lambda: ours(folder, health=False)]
        if python is not None:
            command = [str(python.with_name("arq")), "arq_worker.WorkerSettings"]
            runs.append(lambda: leave(command, {"BENCH_REDIS": REDIS}, "redis_version"))
        healthy, plain, *theirs = in_turns(ROUNDS, *runs)
        report(
            beside("SIGTERM to exit, idle, with health server / 150 ms", healthy, 0.15, 1.0, milliseconds, at_most=True,
                   note=f"slowest {milliseconds(max(healthy))}")
        )  # fmt: skip
        if python is None:
            report(Row("SIGTERM to exit, idle / arq", milliseconds(median(plain)), "arq or Redis is missing"))
            return
        note = f"arq {version(python, 'arq')}"
        report(beside("SIGTERM to exit, idle / arq", plain, theirs[0], 1.0, milliseconds, at_most=True, note=note))


if __name__ == "__main__":
    main()
