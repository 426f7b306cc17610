"""``make soak`` in short, and that it would notice."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPTS = Path(__file__).parents[1] / "scripts"
PROGRAM = """
import sys
import soak
from trio._core import _thread_cache
_thread_cache.IDLE_TIMEOUT = 0.5  # seconds instead of ten, at the end of a soak, that its idle threads wait for another job
{prank}
if __name__ == '__main__':
    sys.exit(soak.main())
"""


def soak(tmp_path: Path, prank: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    program = tmp_path / "pranked.py"
    program.write_text(PROGRAM.format(prank=prank))
    settings = {"RUNS": "3", "CONCURRENCY": "4", "DEADLINE_MS": "50", "TIMEOUT_PER_RUN": "60", **environment}
    return subprocess.run(
        [sys.executable, str(program)],
        env={**os.environ, "PYTHONPATH": str(SCRIPTS), **settings},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_nothing_is_left_behind(tmp_path):
    done = soak(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 runs in turn on asyncio, uvloop, trio" in done.stdout
    assert "60 timed out as they had to" in done.stdout
    assert "left behind: 0 tasks, 0 threads, 0 descriptors, 0 processes, 0 memory" in done.stdout


def test_calls_of_both_kinds_are_made_whatever_the_settings(tmp_path):
    done = soak(tmp_path, RUNS="1", CONCURRENCY="1", DEADLINE_MS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"[1-9]\d* timed out as they had to", done.stdout)
    assert re.search(r"[1-9]\d* succeeded", done.stdout)


@pytest.mark.parametrize(
    ("prank", "left"),
    [
        ("leaked.append(open('/dev/null'))", "3 descriptors"),
        ("leaked.append(bytearray(3_000_000))", "memory (MiB)"),
        ("leaked.append(1); threading.Thread(target=soak.rest, args=(60,), daemon=True).start()", "3 threads"),
    ],
)
def test_a_leak_is_noticed(tmp_path, prank, left):
    code = f"""
import threading
soak.SETTLE_WITHIN = 1.0
leaked = []
def run(number, settings, seen):
    if seen is not None and number not in seen_warm:
        seen_warm.add(number)
        return 0
    {prank}
    return 0
seen_warm = set()
soak.run = run
"""
    done = soak(tmp_path, code)
    assert done.returncode == 1, done.stdout + done.stderr
    assert left in done.stdout


def test_a_hang_ends_it_with_all_stacks(tmp_path):
    hang = """
import threading
import anyio
async def warm():
    async with soak.OffloadPool():
        pass
anyio.run(warm)  # what is imported for that takes more than a second on a busy machine
soak.mostly_succeeds = soak.must_time_out = None
async def use_pools(settings, seen):
    await soak.OffloadPool().__aenter__()
    threading.Event().wait()
soak.use_pools = use_pools
"""
    done = soak(tmp_path, hang, TIMEOUT_PER_RUN="1")
    assert done.returncode == 1
    assert "Timeout (0:00:01)!" in done.stderr
    assert "in use_pools" in done.stderr


def test_a_call_that_does_what_it_must_not_is_noticed(tmp_path):
    done = soak(tmp_path, "soak.rest = lambda seconds, until=None: None", RUNS="1")
    assert done.returncode == 1
    assert "a call that never ends has ended, within its deadline of 0.05 s" in done.stdout + done.stderr


def test_calls_that_mostly_do_not_succeed_are_noticed(tmp_path):
    done = soak(tmp_path, "soak.QUICK_WITHIN = 0", RUNS="1")
    assert done.returncode == 1
    assert "soak: of the calls that mostly succeed 0 did, and 20 did not within 0 s" in done.stdout


def test_settings_that_are_none(tmp_path):
    done = soak(tmp_path, RUNS="many")
    assert done.returncode == 1
    assert done.stderr == "soak: RUNS must be a whole number from 1, not 'many'\n"
