"""A service, as a script and as a target, whose handlers start child processes.

MAINSPRING_FORK_HOW says in which ways, one after the other.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import anyio

from mainspring import LoopGroup, MainLoop, open_mailbox


def square(number: int) -> int:
    return number * number


def pool(method: str) -> None:
    with multiprocessing.get_context(method).Pool(2) as workers:  # its end sends SIGTERM to its workers
        assert workers.map(square, range(20)) == [n * n for n in range(20)]


def executor(method: str) -> None:
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context(method)) as workers:
        assert list(workers.map(square, range(4))) == [0, 1, 4, 9]


def terminate(method: str) -> None:
    for _ in range(5):
        child = multiprocessing.get_context(method).Process(target=time.sleep, args=(600,))
        child.start()
        child.terminate()  # at once: it may not have come to any of its code
        child.join()
        assert child.exitcode == -signal.SIGTERM, child.exitcode


def fork() -> None:
    for signum in (signal.SIGTERM, signal.SIGINT):
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.write(write, b"begun")
                for _ in range(60_000):
                    time.sleep(0.01)
                    signal.pthread_sigmask(
                        signal.SIG_BLOCK, ()
                    )  # looks for signals: 3.13.0 misses them after a thread's fork
            except KeyboardInterrupt:
                os._exit(2)
            os._exit(1)
        os.read(read, 5)
        os.close(read)
        os.close(write)
        os.kill(child, signum)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status == (2 if signum == signal.SIGINT else -signum), status


def come_back() -> None:
    child = os.fork()
    if child:
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status == 1, status


def program() -> None:
    for options in ({}, {"preexec_fn": partial(os.umask, 0o22)}, {"start_new_session": True}):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], **options)
        child.terminate()
        assert child.wait() == -signal.SIGTERM, child.returncode


HOW = {
    "pool-fork": partial(pool, "fork"),
    "pool-spawn": partial(pool, "spawn"),
    "executor-fork": partial(executor, "fork"),
    "executor-spawn": partial(executor, "spawn"),
    "executor-forkserver": partial(executor, "forkserver"),
    "terminate-fork": partial(terminate, "fork"),
    "fork": fork,
    "program": program,
    "return": come_back,
}
WAYS = [HOW[how] for how in os.environ["MAINSPRING_FORK_HOW"].split(",")]


def act() -> None:
    for way in WAYS:
        way()


async def handle_async(number: int) -> None:
    act()
    Path(f"done-{number}").touch()


def handle_plain(number: int) -> None:
    act()
    Path(f"done-{number}").touch()


kind = os.environ["MAINSPRING_FORK_HANDLER"]
handler = handle_async if kind == "async" else handle_plain
jobs = open_mailbox("sqlite:///jobs.db?name=jobs", body=int)
group = LoopGroup([MainLoop(jobs, handler, offload="process" if kind == "process" else None)])


async def main(count: int) -> None:
    async with jobs:
        for number in range(count):
            await jobs.send(number)
    report = await group.run(until_empty=True)
    print(report.reason)
    sys.exit(report.exit_status)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have had it ignored
    backend, count = sys.argv[1:]
    anyio.run(
        main,
        int(count),
        backend="trio" if backend == "trio" else "asyncio",
        backend_options={"use_uvloop": True} if backend == "uvloop" else {},
    )
