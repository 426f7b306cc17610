"""What real processes use."""

from __future__ import annotations

import subprocess
import sys

import anyio
import pytest

from mainspring.telemetry.process_usage import UsageReader

pytestmark = [pytest.mark.anyio, pytest.mark.every_loop]

BUSY = "import time\nwhile time.process_time() < 0.15: pass\nprint(flush=True)\ninput()"
PARENT = (
    "import subprocess, sys\n"
    "subprocess.run([sys.executable, '-Sc', sys.argv[1]], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\n"
    "subprocess.run([sys.executable, '-Sc', sys.argv[1]])"
)


@pytest.mark.own_time(1.0)
async def test_a_process_is_read_with_its_descendants_and_what_ended_of_them() -> None:
    arguments = [sys.executable, "-Sc", PARENT, BUSY]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        await anyio.to_thread.run_sync(process.stdout.readline)
        await anyio.to_thread.run_sync(process.stdout.readline)
        usage = await UsageReader().read([process.pid, 2**22 + 1])
        process.stdin.close()
    assert list(usage) == [process.pid]
    used = usage[process.pid]
    assert used.processes == 2
    assert used.cpu_seconds >= 0.28, "that of the child that has ended counts"
    assert used.memory_bytes > 2 * 2**20


async def test_processes_that_have_gone_are_left_out() -> None:
    with subprocess.Popen([sys.executable, "-Sc", ""]) as process:
        pass
    assert await UsageReader().read([process.pid]) == {}
    assert await UsageReader().read([]) == {}
