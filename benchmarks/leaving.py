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

from common import HERE, Row, median, paired_ratio, peer, quick, report, version

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
        healthy = [ours(folder, health=True) for _ in range(ROUNDS)]
        report(
            Row("SIGTERM to exit, idle, with health server / 150 ms", f"{median(healthy) * 1e3:.0f} ms", "150 ms",
                median(healthy) / 0.15, 1.0, at_most=True, note=f"median of {ROUNDS}, slowest {max(healthy) * 1e3:.0f} ms")
        )  # fmt: skip
        python = peer("arq", "arq")
        if python is None or not redis_answers():
            plain = [ours(folder, health=False) for _ in range(ROUNDS)]
            report(
                Row(
                    "SIGTERM to exit, idle / arq", f"{median(plain) * 1e3:.0f} ms", "arq or Redis is missing", None, 1.0
                )
            )
            return
        plain, theirs = [], []
        for _ in range(ROUNDS):
            command = [str(python.with_name("arq")), "arq_worker.WorkerSettings"]
            theirs.append(leave(command, {"BENCH_REDIS": REDIS}, "redis_version"))
            plain.append(ours(folder, health=False))
        report(
            Row("SIGTERM to exit, idle / arq", f"{median(plain) * 1e3:.0f} ms", f"{median(theirs) * 1e3:.0f} ms",
                paired_ratio(plain, theirs), 1.0, at_most=True, note=f"arq {version(python, 'arq')}, median of {ROUNDS}")
        )  # fmt: skip


if __name__ == "__main__":
    main()
