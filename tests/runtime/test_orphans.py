"""Process 1 of a PID namespace: orphans are reaped, and no exit status of an own child is lost."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import subprocess
import sys

import anyio
import pytest

from mainspring.runtime.orphans import OrphanReaper, is_init
from mainspring.testing import run_virtual

UNSHARE = ["unshare", "--pid", "--fork", "--mount-proc"]
ZOMBIES = """
def zombies():
    stats = [open(f"/proc/{pid}/stat").read().rpartition(")")[2].split() for pid in os.listdir("/proc") if pid.isdecimal()]
    return sum(fields[0] == "Z" for fields in stats)

ORPHANS = "for i in 1 2 3; do (exec sleep 0.1) & done; exit 5"
"""
REAPER = f"""
import os, subprocess, anyio
from mainspring.runtime.orphans import OrphanReaper, is_init
{ZOMBIES}
async def main():
    late = subprocess.Popen(["/bin/sh", "-c", "exit 7"])
    reaper = OrphanReaper(patience=0.4)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(reaper.run)
        status = (await anyio.run_process(["/bin/sh", "-c", ORPHANS], check=False)).returncode
        with anyio.fail_after(20):
            while reaper.reaped < 3:
                await anyio.sleep(0.05)
        print(is_init(), status, subprocess.run(["/bin/sh", "-c", "exit 6"]).returncode, zombies(), late.wait(), zombies())
        tasks.cancel_scope.cancel()

anyio.run(main)
"""
GROUP = f"""
import os, subprocess, anyio
from mainspring import InMemoryMailbox, LoopGroup, MainLoop
{ZOMBIES}
async def handle(body: int):
    print((await anyio.run_process(["/bin/sh", "-c", ORPHANS], check=False)).returncode)
    with anyio.fail_after(40):
        while zombies() < 3:
            await anyio.sleep(0.05)
        while zombies():
            await anyio.sleep(0.2)
    print(zombies())

async def main():
    mailbox = InMemoryMailbox(name="jobs")
    async with mailbox:
        await mailbox.send(1)
        print((await LoopGroup([MainLoop(mailbox, handle)]).run(until_empty=True)).exit_status)

anyio.run(main)
"""


def as_process_1(code: str) -> str:
    if shutil.which("unshare") is None or subprocess.run([*UNSHARE, "true"], capture_output=True).returncode:
        pytest.skip("this user cannot make a PID namespace (unshare --pid)")
    done = subprocess.run(
        [*UNSHARE, sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_process_1_reaps_orphans_and_takes_no_status_from_its_own_children() -> None:
    assert as_process_1(REAPER).split() == ["True", "5", "6", "1", "7", "0"]


@pytest.mark.slow
def test_a_group_that_is_process_1_reaps_orphans() -> None:
    assert as_process_1(GROUP).split() == ["5", "0", "0"]


def ended_fork(status: int) -> int:
    """Return the id of a child that has ended, and that no object stands for, as an orphan."""
    pid = os.posix_spawn(sys.executable, [sys.executable, "-S", "-c", f"raise SystemExit({status})"], os.environ)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    return pid


def reaped_within(seconds: float) -> int:
    """Return how many a reaper has reaped when it has run for so long."""
    reaper = OrphanReaper(patience=10)

    async def main() -> None:
        with anyio.move_on_after(seconds):
            await reaper.run()

    run_virtual(main)
    return reaper.reaped


def test_a_child_that_has_just_ended_is_left_to_its_waiter() -> None:
    """It is seen first after 5 s, so that it is no orphan before 15."""
    pid = ended_fork(9)
    assert reaped_within(14) == 0
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9


def test_an_orphan_is_reaped() -> None:
    pid = ended_fork(9)
    assert reaped_within(16) == 1
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, 0)


def test_a_child_that_an_object_stands_for_is_left_to_it_however_late_that_asks() -> None:
    child = subprocess.Popen([sys.executable, "-S", "-c", "raise SystemExit(9)"])
    process = multiprocessing.get_context("fork").Process(target=os._exit, args=(8,))
    process.start()
    for pid in (child.pid, process.pid):
        assert pid is not None
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert reaped_within(60) == 0
    process.join()
    assert (child.wait(), process.exitcode) == (9, 8)


def test_this_process_is_no_init() -> None:
    assert not is_init()
