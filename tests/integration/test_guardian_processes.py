"""The block watch and its guardian, for real: processes that block, stop, die."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("blocked_program.py")
THRESHOLD = 0.6
LIMIT = 60.0  # no claim about speed: what hangs must not hang the suite
EVERY_LOOP = pytest.mark.parametrize("backend", ["asyncio", "uvloop", "trio"])


@contextmanager
def program(how, backend="asyncio", *, guardian=True, threshold=THRESHOLD, prefix=(), **options):
    process = subprocess.Popen(
        [*prefix, sys.executable, PROGRAM, how, backend, str(threshold), "guardian" if guardian else "alone"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,  # so that no line stays behind in a buffer that communicate() does not look into
        **options,
    )
    try:
        pid, began = process.stdout.readline().decode().split()
        process.guardian = None if pid == "None" else int(pid)
        process.began = float(began)
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=LIMIT)


def end_of(process):
    out, err = process.communicate(timeout=LIMIT)
    return process.returncode, out.decode(), err.decode(), time.monotonic() - process.began


def guilty_line(how):
    lines = PROGRAM.read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith(f"# guilty: {how}"))


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_until(condition):
    give_up = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < give_up, "it did not happen"
        time.sleep(0.01)


@EVERY_LOOP
@pytest.mark.parametrize("how", ["python", "sleep"])
def test_a_loop_blocked_where_threads_can_run_is_named_with_its_source_and_killed(how, backend):
    with program(how, backend) as process:
        status, _, err, seconds = end_of(process)
    assert status == -signal.SIGKILL
    line = guilty_line(how)
    named = re.search(rf"has not turned for .*{PROGRAM.name}:(\d+) in \w+: \S", err)
    assert int(named.group(1)) in ((line - 1, line) if how == "python" else (line,))  # a loop of two lines
    assert "MainThread" in err
    assert "mainspring-block-watch" not in err  # its own threads tell a reader nothing
    assert seconds > THRESHOLD * 0.8


@EVERY_LOOP
def test_a_loop_blocked_in_c_with_the_gil_held_is_dumped_and_killed_by_the_guardian(backend):
    with program("c", backend) as process:
        status, _, err, seconds = end_of(process)
    assert status == -signal.SIGKILL
    assert f'{PROGRAM.name}", line {guilty_line("c")} in explode' in err
    assert THRESHOLD * 0.8 < seconds < THRESHOLD + 5  # without a guardian it would take the match's centuries


def test_without_a_guardian_the_thread_kills_as_well():
    with program("sleep", guardian=False) as process:
        assert process.guardian is None
        status, _, err, _ = end_of(process)
    assert status == -signal.SIGKILL
    assert f"{PROGRAM.name}:{guilty_line('sleep')} in pause: time.sleep(60)" in err


@EVERY_LOOP
def test_a_handler_that_swallows_its_cancellation_is_named_and_ends_the_process(backend):
    with program("stuck", backend, threshold=30) as process:
        status, _, err, _ = end_of(process)
    assert status == -signal.SIGKILL
    assert "message m1 of 'indexer' was cancelled because it gave no sign of life, and did not end within 0.2 s" in err
    assert f"{PROGRAM.name}:{guilty_line('stuck')} in swallow: await anyio.sleep(60)" in err
    assert "MainThread" in err


@EVERY_LOOP
def test_a_stopped_process_is_not_killed_for_the_time_it_stood_still(backend):
    with program("turn", backend) as process:
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(THRESHOLD * 3)  # the stop's length is the claim
        assert process.poll() is None
        os.kill(process.pid, signal.SIGCONT)
        time.sleep(THRESHOLD * 2)
        process.stdin.write(b"\n")
        status, out, err, _ = end_of(process)
    assert (status, out, err) == (0, "left\n", "")


def test_a_machine_that_stood_still_is_not_held_against_the_process():
    with program("turn") as process:
        for pid in (process.pid, process.guardian):
            os.kill(pid, signal.SIGSTOP)
        time.sleep(THRESHOLD * 3)
        os.kill(process.guardian, signal.SIGCONT)  # the guardian wakes first
        time.sleep(0.05)
        os.kill(process.pid, signal.SIGCONT)
        time.sleep(THRESHOLD * 2)
        process.stdin.write(b"\n")
        assert end_of(process)[:2] == (0, "left\n")


@EVERY_LOOP
def test_a_loop_that_turns_lives_and_one_in_a_debugger_as_long_as_somebody_looks(backend):
    with program("debugger", backend) as process:
        time.sleep(THRESHOLD * 4)  # somebody thinks
        process.stdin.write(b"continue\n")
        assert end_of(process)[:2] == (0, "left\n")


@pytest.mark.parametrize("how", ["exit-sleep", "exit-python", "exit-hanging-explain"])
@pytest.mark.parametrize("guardian", [True, False])
def test_a_process_that_must_leave_does_with_its_status(how, guardian):
    with program(how, guardian=guardian, threshold=30) as process:
        status, _, err, _ = end_of(process)
    assert status == 70
    if how != "exit-hanging-explain":
        assert "\nmainspring: leaving by force: because it was told to\n" in err
        assert "MainThread" in err


def test_a_process_that_must_leave_but_holds_the_gil_is_killed_by_the_guardian():
    with program("exit-c", threshold=30) as process:
        status, _, err, seconds = end_of(process)
    assert status == -signal.SIGKILL
    assert f"line {guilty_line('c')} in explode" in err
    assert seconds < 10


@EVERY_LOOP
def test_an_exit_outlasts_the_block_and_covers_the_end_of_the_interpreter(backend):
    with program("outlast", backend) as process:
        status, out, err, _ = end_of(process)
    assert (status, out) == (70, "left\n")
    assert "because it was told to" in err


def test_an_exit_that_was_called_off_does_not_come():
    with program("called-off") as process:
        assert end_of(process)[:3] == (0, "left\n", "")


def test_an_explanation_nobody_reads_does_not_hold_the_process_up():
    """Standard error is a pipe that is full: the last words block, the exit does not."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    try:
        while True:
            os.write(write, b"x" * 4096)
    except BlockingIOError:
        os.set_blocking(write, True)
    process = subprocess.Popen(
        [sys.executable, PROGRAM, "exit-sleep", "asyncio", "30", "guardian"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=write,
    )
    try:
        assert process.wait(LIMIT) == 70
    finally:
        process.kill()
        os.close(read)
        os.close(write)


@pytest.mark.parametrize("how", ["turn", "fork"])
def test_the_guardian_dies_with_its_process_however_that_ends(how):
    with program(how, start_new_session=True) as process:
        process.kill()
        process.wait(LIMIT)
        wait_until(lambda: not alive(process.guardian))
        if how == "fork":
            os.killpg(process.pid, signal.SIGKILL)  # the fork that held the pipe open


def test_a_forked_child_is_neither_judged_nor_does_it_end_its_parent():
    with program("fork-exit", start_new_session=True) as process:
        time.sleep(THRESHOLD * 2)  # the child does not beat, and has asked for the end of its process
        process.stdin.write(b"\n")
        assert process.stdout.readline() == b"left\n"
        assert process.wait(LIMIT) == 0
        os.killpg(process.pid, signal.SIGKILL)  # the child


def test_the_guardian_outlives_signals_to_the_family_and_holds_none_of_its_files():
    with program("turn", threshold=30, start_new_session=True) as process:
        status = Path(f"/proc/{process.guardian}/status").read_text()
        ignored = int(re.search(r"SigIgn:\s+(\w+)", status).group(1), 16)
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            assert ignored >> (signum - 1) & 1
            os.kill(process.guardian, signum)
        files = {os.readlink(f"/proc/{process.guardian}/fd/{n}") for n in os.listdir(f"/proc/{process.guardian}/fd")}
        kinds = {re.sub(r"[:(\[].*", "", name).strip() for name in files}
        assert kinds == {"/dev/null", "/memfd", "pipe", "anon_inode"}
        assert sum(name.startswith("pipe") for name in files) == 1
        assert os.getpgid(process.guardian) != os.getpgid(process.pid)
        command = Path(f"/proc/{process.guardian}/cmdline").read_text().split("\0")
        assert any(part.endswith("mainspring/watchdog/guardian_main.py") for part in command)
        assert Path(f"/proc/{process.guardian}/comm").read_text() == "ms-guardian\n"
        assert alive(process.guardian)
        process.send_signal(signal.SIGKILL)
        process.wait(LIMIT)
        wait_until(lambda: not alive(process.guardian))


def test_the_guardian_is_small():
    with program("turn", threshold=30) as process:
        status = Path(f"/proc/{process.guardian}/status").read_text()
    resident = int(re.search(r"VmRSS:\s+(\d+) kB", status).group(1))
    assert resident < 12 * 1024


def test_the_first_process_of_a_container_is_ended_too():
    """It is immune to SIGKILL from inside, but not to its limit of processor seconds, also where it uses none by itself."""
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "-p", "-f", "true"], capture_output=True).returncode:
        pytest.skip("this machine lets no process make a pid namespace")
    prefix = (unshare, "--pid", "--fork", "--mount-proc", "--kill-child")
    with program("sleep", prefix=prefix) as process:
        status, _, err, _ = end_of(process)
    assert status == 137
    assert f":{guilty_line('sleep')} in pause" in err
    for how, function in (("c", "explode"), ("wait", "deadlock")):
        with program(how, prefix=prefix) as process:
            status, _, err, _ = end_of(process)
        assert status != 0  # unshare's own, which differs by version where its child ended by a signal
        assert f"line {guilty_line(how)} in {function}" in err
