"""Readiness checks that end in unusual ways, or never: readiness says so, and nothing else comes to harm."""

from __future__ import annotations

import subprocess
import sys

import anyio
import pytest

from mainspring.events import Dispatcher
from mainspring.group.checks import Checks

HANGS = """
import sys, threading
import anyio
from mainspring import InMemoryMailbox, LoopGroup, MainLoop

asked = threading.Event()

def hangs():
    asked.set()
    threading.Event().wait()

async def handle(number: int) -> None: ...

async def main():
    group = LoopGroup([MainLoop(InMemoryMailbox("jobs"), handle)], checks={"hangs": hangs})
    async with group, anyio.create_task_group() as tasks:
        tasks.start_soon(group.refresh_checks)
        while not asked.is_set():
            await anyio.sleep(0.001)
        tasks.cancel_scope.cancel()
    print(group.report.exit_status, flush=True)

anyio.run(main, backend=sys.argv[1])
"""


@pytest.mark.anyio
@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), BaseException("so")])
async def test_whatever_a_check_raises_is_its_answer(error):
    def plain():
        raise error

    async def coroutine():
        raise error

    checks = Checks(
        "group", {"plain": plain, "coroutine": coroutine}, Dispatcher(), timeout=5.0, interval=10.0, max_failures=3
    )
    with anyio.fail_after(10):
        await checks.refresh()
    assert [type(error).__name__ in answer for answer in checks.results.values()] == [True, True]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_the_end_of_the_program_waits_for_no_check(backend):
    ended = subprocess.run(
        [sys.executable, "-c", HANGS, backend], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stdout) == (0, "0\n"), ended.stderr
