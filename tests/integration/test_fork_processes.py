"""Handlers that start child processes: the service goes on, the children end, and nothing is left behind.

MAINSPRING_FORK_RUNS says how often each way is tried on each event loop by each kind of handler; else there is a share of
them. To try another interpreter, run it with that.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("fork_program.py")
RUNS = int(os.environ.get("MAINSPRING_FORK_RUNS", "0"))
PATIENCE = 60 + 10 * RUNS
LOOPS = ("asyncio", "uvloop", "trio")
HANDLERS = ("async", "plain", "process")
WAYS = (
    "pool-fork",
    "pool-spawn",
    "executor-fork",
    "executor-spawn",
    "executor-forkserver",
    "terminate-fork",
    "fork",
    "program",
)
ALL = tuple(itertools.product(WAYS, LOOPS, HANDLERS))
FORKS = "pool-fork,terminate-fork,fork,program"
SOME = (
    (FORKS, "asyncio", "plain"),
    (FORKS, "uvloop", "async"),
    (FORKS, "trio", "async"),
    (FORKS, "asyncio", "process"),
)


def left(mark):
    """Living processes with this text in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark.encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def none_left(mark):
    """A resource tracker ends once it sees the end of those that it serves."""
    give_up = time.monotonic() + PATIENCE
    while left(mark):
        if time.monotonic() > give_up:
            return False
        time.sleep(0.02)
    return True


def environment(how, handler):
    mark = f"MAINSPRING_FORK_MARK={os.urandom(8).hex()}"
    name, _, value = mark.partition("=")
    variables = {
        **os.environ,
        name: value,
        "MAINSPRING_FORK_HOW": how,
        "MAINSPRING_FORK_HANDLER": handler,
        "PYTHONWARNINGS": "ignore::DeprecationWarning",  # from 3.12 on, of a fork beside threads
    }
    return mark, variables


def run(tmp_path, how, loop, handler, count=1):
    mark, variables = environment(how, handler)
    done = subprocess.run(
        [sys.executable, PROGRAM, loop, str(count)],
        cwd=tmp_path,
        env=variables,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "all mailboxes are empty\n", "")
    assert len(list(tmp_path.glob("done-*"))) == count
    assert none_left(mark)


@pytest.mark.slow
@pytest.mark.parametrize(("how", "loop", "handler"), SOME)
def test_a_handler_may_start_processes_and_end_them(tmp_path, how, loop, handler):
    run(tmp_path, how, loop, handler)


@pytest.mark.skipif(not RUNS, reason="MAINSPRING_FORK_RUNS says how often")
@pytest.mark.parametrize(("how", "loop", "handler"), ALL)
def test_so_it_is_in_every_way(tmp_path, how, loop, handler):
    run(tmp_path, how, loop, handler, RUNS)


@pytest.mark.slow
@pytest.mark.parametrize(("how", "loop", "handler"), ALL if RUNS else [("terminate-fork", "asyncio", "plain")])
def test_so_it_is_under_a_supervisor(tmp_path, how, loop, handler):
    count = RUNS or 2
    mark, variables = environment(how, handler)
    url = f"sqlite:///{tmp_path}/jobs.db?name=jobs"
    mainspring = [sys.executable, "-m", "mainspring"]
    bodies = map(str, range(count))
    subprocess.run([*mainspring, "send", url, *bodies], check=True, capture_output=True, timeout=PATIENCE)
    variables["PYTHONPATH"] = str(PROGRAM.parent)
    command = [*mainspring, "run", "fork_program:group", "--processes", "2", "--loop", loop]
    with subprocess.Popen(command, cwd=tmp_path, env=variables, stderr=subprocess.PIPE, text=True) as process:
        give_up = time.monotonic() + PATIENCE
        while len(list(tmp_path.glob("done-*"))) < count and process.poll() is None and time.monotonic() < give_up:
            time.sleep(0.02)
        early = process.poll()
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=PATIENCE)
    assert (early, process.returncode) == (None, 0), err
    assert len(list(tmp_path.glob("done-*"))) == count, err
    assert "starting another one" not in err
    assert none_left(mark)


@pytest.mark.slow
@pytest.mark.parametrize(("loop", "handler"), [("asyncio", "async"), ("trio", "plain")])
def test_a_forked_child_that_comes_back_from_the_handler_is_ended(tmp_path, loop, handler):
    mark, variables = environment("return", handler)
    done = subprocess.run(
        [sys.executable, PROGRAM, loop, "1"],
        cwd=tmp_path,
        env=variables,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "all mailboxes are empty\n")
    assert done.stderr.splitlines() == [
        "mainspring: a handler forked, and its child came back from it; the child is ended"
    ]
    assert none_left(mark)
