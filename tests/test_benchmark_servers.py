"""A benchmark empties the server that the environment names: not where somebody has something there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mainspring import open_mailbox
from servers import NatsServer, RedisServer

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def measure(name: str, url: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, f"MAINSPRING_{name.upper()}_URL": url}
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), "--quick"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.anyio
@pytest.mark.loops("asyncio")
@pytest.mark.parametrize(("name", "program"), [("redis", RedisServer), ("nats", NatsServer)])
async def test_a_server_with_something_in_it_is_left_alone(name, program, anyio_backend):
    with program() as there:
        async with open_mailbox(there.url, name="jobs", body=str) as jobs:
            await jobs.send("needed")
        done = measure(name, there.url)
        assert done.returncode == 1
        assert not done.stdout
        assert f"MAINSPRING_{name.upper()}_URL: 127.0.0.1:{there.port}" in done.stderr
        assert "each run would delete all of it: say --flush if it may go" in done.stderr
        async with open_mailbox(there.url, name="jobs", body=str) as jobs:
            assert (await jobs.counts()).pending == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["redis", "nats"])
def test_a_server_that_is_away_is_said_in_a_line(name):
    done = measure(name, f"{name}://127.0.0.1:1")
    assert done.returncode == 1
    assert done.stderr.startswith(f"MAINSPRING_{name.upper()}_URL: nothing answers at 127.0.0.1:1: ")
    assert done.stderr.count("\n") == 1
