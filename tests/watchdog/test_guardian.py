"""The block watch inside a process: its parts, and that it leaves nothing behind."""

from __future__ import annotations

import errno
import faulthandler
import io
import logging
import math
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import anyio
import pytest
import trio.testing

from mainspring.core import process
from mainspring.errors import ConfigError
from mainspring.runtime import hard_exit as last_resort
from mainspring.watchdog import (
    block_watch as guardian,
)
from mainspring.watchdog import (
    guardian as guardian_process,
)
from mainspring.watchdog import (
    guardian_main as guardian_child,
)
from mainspring.watchdog.block_watch import BlockWatch
from mainspring.watchdog.guardian import DumpSignal, GuardianProcess
from mainspring.watchdog.guardian_main import look_interval

pytestmark = pytest.mark.anyio


# ---- the watch


# The block watch itself
async def until(condition):
    with anyio.fail_after(60):
        while not condition():
            await anyio.sleep(0.01)


def gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "mainspring-block-watch"]


def files():
    return sorted(os.listdir("/proc/self/fd"))


@pytest.fixture
def quick_looks(monkeypatch):
    """The thread looks often, but judges late: no slow machine may kill the tests."""
    monkeypatch.setattr(guardian, "look_interval", lambda _: 0.02)


async def test_it_starts_and_leaves_nothing_behind():
    await anyio.to_thread.run_sync(int)  # what the event loop keeps open for threads is open now
    before = files()
    for _ in range(2):  # it can be used again
        async with BlockWatch(guardian=True) as watch:
            pid = watch.guardian_pid
            assert pid is not None  # before anything that could take the GIL
            assert len(threads()) == 1
        assert gone(pid)  # reaped, not only dead
        assert not threads()
    assert files() == before
    assert process.current("dump signal") is None
    process.claim("dump signal", "a test")  # it was given back
    process.disclaim("dump signal")


async def test_leaving_before_the_guardian_has_come_up_leaves_nothing_either():
    async with BlockWatch(guardian=True):
        pass
    assert not threads()


@pytest.mark.parametrize("wrong", [0, -1, math.nan])
def test_a_threshold_that_cannot_work_is_refused(wrong):
    with pytest.raises(ConfigError, match="block_threshold"):
        BlockWatch(block_threshold=wrong, guardian=False)


async def test_an_infinite_threshold_judges_nothing():
    async with BlockWatch(block_threshold=math.inf, guardian=True) as watch:
        await until(lambda: watch.guardian_pid)
        assert watch._watcher._board.beat == 0


async def test_entered_twice_is_an_error():
    async with BlockWatch(guardian=False) as watch:
        with pytest.raises(RuntimeError, match="already"):
            async with watch:
                pass


async def test_an_error_inside_comes_out_as_it_is():
    with pytest.raises(ValueError, match=r"^mine$"):
        async with BlockWatch(guardian=False):
            raise ValueError("mine")
    assert not threads()


async def test_cancelled_it_leaves_in_order():
    with anyio.move_on_after(0.05) as scope:
        async with BlockWatch(guardian=True):
            await anyio.sleep_forever()
    assert scope.cancelled_caught
    assert not threads()


def test_in_virtual_time_nobody_is_judged_and_nothing_ticks():
    async def main():
        async with BlockWatch(block_threshold=0.2, guardian=True) as watch:
            await anyio.sleep(100_000)
            assert watch._watcher._board.beat == 0

    clock = trio.testing.MockClock(autojump_threshold=0)
    anyio.run(main, backend="trio", backend_options={"clock": clock})
    assert not threads()


async def test_a_guardian_that_dies_is_replaced_but_not_for_ever(caplog, quick_looks):
    caplog.set_level(logging.WARNING, "mainspring")
    async with BlockWatch(guardian=True) as watch:
        seen = set()
        for _ in range(GuardianProcess.RESTARTS + 1):
            await until(lambda: watch.guardian_pid not in seen | {None})
            seen.add(watch.guardian_pid)
            os.kill(watch.guardian_pid, signal.SIGKILL)
        await until(lambda: "alone" in caplog.text)
        assert watch.guardian_pid is None
    assert caplog.text.count("starting another") == GuardianProcess.RESTARTS
    assert caplog.text.count("a thread alone watches") == 1


@pytest.mark.parametrize("executable", ["", "/usr/bin/uwsgi", "/nowhere/python"])
async def test_where_no_guardian_can_be_spawned_one_line_says_so(caplog, quick_looks, monkeypatch, executable):
    caplog.set_level(logging.WARNING, "mainspring")
    monkeypatch.setattr(sys, "executable", executable)
    async with BlockWatch(guardian=True) as watch:
        await until(lambda: caplog.records)
        assert watch.guardian_pid is None
    (record,) = caplog.records
    assert "no guardian process" in record.message
    assert "\n" not in record.message


async def test_a_frozen_program_is_not_started_again_as_its_own_guardian(caplog, quick_looks, monkeypatch):
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    async with BlockWatch(guardian=True):
        await until(lambda: "no guardian process" in caplog.text)


async def test_a_failing_fork_leaves_the_thread(caplog, quick_looks, monkeypatch):
    def fail(*_args, **_options):
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", fail)
    async with BlockWatch(guardian=True):
        await until(lambda: "temporarily unavailable" in caplog.text)
        assert len(threads()) == 1


async def test_exits_can_be_brought_nearer_and_changed_but_not_put_off():
    async with BlockWatch(guardian=True) as watch:
        watcher = watch._watcher
        watch.exit_by(50, status=70, explain=lambda: "first")
        first = watcher._exit
        watch.exit_by(90, status=143, explain=lambda: "second")
        second = watcher._exit
        assert (second.at, second.status, second.explain()) == (first.at, 143, "second")
        watch.exit_by(20, status=144, explain=lambda: "third")
        assert watcher._exit.at < first.at
        assert watcher._board.kill_at == watcher._exit.at + guardian.KILL_AFTER
        watch.call_off()
        assert watcher._exit is None
        assert watcher._board.kill_at == 0
        watch.call_off()


async def test_an_exit_needs_a_watch_that_is_running():
    watch = BlockWatch(guardian=False)
    with pytest.raises(RuntimeError, match="not running"):
        watch.exit_by(1, status=1, explain=str)
    watch.call_off()
    async with watch:
        pass
    with pytest.raises(RuntimeError, match="ended"):
        watch.exit_by(1, status=1, explain=str)
    watch.call_off()


async def test_an_exit_called_off_after_the_block_ends_the_thread():
    async with BlockWatch(guardian=True) as watch:
        await until(lambda: watch.guardian_pid)
        pid = watch.guardian_pid
        watch.exit_by(60, status=70, explain=str)
    assert threads()
    assert not gone(pid)
    watch.call_off()
    await until(lambda: not threads())
    assert gone(pid)


# ---- its parts


# What it is made of
def test_all_users_share_one_dump_signal_and_the_last_gives_it_back(tmp_path):
    with (tmp_path / "stacks").open("w") as stream:
        shared = DumpSignal()
        number = shared.acquire(stream)
        assert number > signal.SIGRTMIN
        assert shared.acquire(stream) == number
        shared.release()
        signal.raise_signal(number)
        shared.release()
        assert not faulthandler.unregister(number)
    assert "test_all_users_share" in (tmp_path / "stacks").read_text()


def test_a_signal_that_somebody_handles_is_left_to_them(tmp_path):
    taken = signal.SIGRTMAX - 1
    before = signal.signal(taken, lambda *_: None)
    try:
        with (tmp_path / "stacks").open("w") as stream:
            shared = DumpSignal()
            number = shared.acquire(stream)
            assert 0 < number < taken
            shared.release()
    finally:
        signal.signal(taken, before)


def test_a_dump_signal_that_is_claimed_or_a_stream_without_a_file_means_none(tmp_path):
    shared = DumpSignal()
    assert shared.acquire(io.StringIO()) == 0
    shared.release()
    process.claim("dump signal", "a test")
    try:
        with (tmp_path / "stacks").open("w") as stream:
            assert shared.acquire(stream) == 0
            shared.release()
        with pytest.raises(ConfigError):
            process.claim("dump signal", "another")  # the other's claim stands
    finally:
        process.disclaim("dump signal")


def test_the_board_works_without_memfd(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    board = guardian_process.Board()
    board.beat, board.kill_at = 1.5, 2.5
    with open(os.dup(board.descriptor), "rb") as same:
        assert memoryview(same.read()).cast("d").tolist() == [1.5, 2.5]
    board.close()
    board.close()


def test_the_child_needs_nothing_but_the_standard_library():
    path = guardian_child.__file__
    script = f"import sys; exec(compile(open({path!r}).read(), 'child', 'exec'), {{'__name__': 'child'}}); print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-I", "-S", "-c", script], capture_output=True, text=True, check=True)
    assert not {"mainspring", "anyio", "typing", "subprocess"} & set(modules.stdout.split())


def test_last_words_go_to_streams_without_a_file_and_say_what_failed():
    out = io.StringIO()
    last_resort.last_words(lambda: "farewell", out, within=20)
    last_resort.last_words(lambda: 1 / 0, out, within=20)
    assert "farewell" in out.getvalue()
    assert "ZeroDivisionError" in out.getvalue()


def test_last_words_that_hang_are_left_behind():
    release = threading.Event()
    last_resort.last_words(lambda: str(release.wait(30)), io.StringIO(), within=0.05)
    release.set()


def test_the_first_process_of_a_container_ends_by_a_status(monkeypatch):
    done = []
    monkeypatch.setattr(os, "kill", lambda *call: done.append(call))  # as the kernel does there: nothing
    monkeypatch.setattr(os, "_exit", done.append)
    last_resort.kill_self()
    assert done == [(os.getpid(), signal.SIGKILL), 137]


def test_every_wait_of_the_child_is_bounded():
    assert look_interval(30) == 1.0
    assert look_interval(0.5) == 0.05
    assert look_interval(math.inf) == 1.0
    assert Path(guardian_child.__file__).read_text().count("poll(") == 2  # the one wait, and its making
