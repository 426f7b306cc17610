"""``mainspring simulate`` as a process group: what a Ctrl-C at a terminal ends."""

from __future__ import annotations

import os
import re
import signal
from typing import TYPE_CHECKING

import pytest
from cli_helpers import processes_with, started, wait_until

if TYPE_CHECKING:
    from pathlib import Path

APP = """
import anyio
from mainspring import LoopGroup, MainLoop

async def handle(job: int) -> None:
    await anyio.sleep(5)

def build(mailbox):
    return LoopGroup([MainLoop(mailbox, handle)])
"""


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [1, 2])
def test_a_ctrl_c_ends_all_and_is_told_in_one_line(tmp_path: Path, jobs: int) -> None:
    (tmp_path / "app.py").write_text(APP, encoding="utf-8")
    run = ("simulate", "app:build", "--seeds", "100000", "--duration", "1m", "--jobs", str(jobs))
    mark = f"SIMULATE_DIR={tmp_path}"
    with started(*run, cwd=tmp_path, SIMULATE_DIR=str(tmp_path)) as command:
        command.expect(r"simulating 100000 seeds: ")
        wait_until(lambda: len(processes_with(mark)) >= jobs, "no process was started")
        os.killpg(command.process.pid, signal.SIGINT)
        assert command.wait() == 130
        assert re.fullmatch(r"mainspring: interrupted after \d+ of 100000 seeds", command.lines[-2])
        assert all(line.startswith("simulating ") for line in command.lines[:-2]), command.text
        assert processes_with(mark) == []
