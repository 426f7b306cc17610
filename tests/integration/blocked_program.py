"""A program that blocks its event loop, or does not leave, in the way its first argument says."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pdb
import re
import sys
import threading
import time
from pathlib import Path

import anyio

from mainspring.runtime.heartbeat import Heartbeat
from mainspring.runtime.scope import DaemonScope
from mainspring.watchdog.block_watch import BlockWatch
from mainspring.watchdog.watchdog import HeartbeatSubject, Watchdog

HOW, BACKEND, THRESHOLD, GUARDIAN = sys.argv[1], sys.argv[2], float(sys.argv[3]), sys.argv[4] == "guardian"


def spin() -> None:
    while True:
        pass  # guilty: python


def pause() -> None:
    time.sleep(60)  # guilty: sleep


def explode() -> None:
    re.match(r"(a+)+$", "a" * 40 + "b")  # guilty: c


def deadlock() -> None:
    library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)  # guilty: wait


def hang() -> str:
    time.sleep(60)
    return "never"


def why() -> str:
    return "because it was told to"


BLOCK = {"python": spin, "sleep": pause, "c": explode, "wait": deadlock}


async def until_spawned(watch: BlockWatch) -> None:
    while GUARDIAN and watch.guardian_pid is None:
        await anyio.sleep(0.01)
    if GUARDIAN:  # its name is the first thing that it sets once it is up
        while not Path(f"/proc/{watch.guardian_pid}/comm").read_text().startswith("ms-guardian"):
            await anyio.sleep(0.01)


async def swallow() -> None:
    while True:
        with contextlib.suppress(BaseException):
            await anyio.sleep(60)  # guilty: stuck


async def get_stuck() -> None:
    """A handler that swallows its cancellation, under a watchdog with its own way to kill."""
    async with DaemonScope() as scope:
        handler = scope.start_soon(swallow)
        subject = HeartbeatSubject(
            "indexer",
            Heartbeat(),
            lambda _error: handler.cancel(),
            message_id="m1",
            where=lambda: handler.where,
            finished=lambda: handler.done,
        )
        await Watchdog(lambda: [subject], threshold=0.2, interval=0.05, cancel_grace=0.2).run()


async def main() -> None:
    async with BlockWatch(block_threshold=THRESHOLD, guardian=GUARDIAN) as watch:
        if HOW != "wait":  # that is a program which takes the GIL at once, for good
            await until_spawned(watch)
        if HOW == "fork" and os.fork() == 0:
            time.sleep(60)  # a child that holds all that its parent held, the liveness pipe too
        if HOW == "fork-exit" and os.fork() == 0:
            try:
                watch.exit_by(0.0, status=70, explain=why)
            except RuntimeError:
                time.sleep(60)  # it neither leaves nor beats
        print(watch.guardian_pid, time.monotonic(), flush=True)
        if HOW in BLOCK:
            BLOCK[HOW]()
        elif HOW in ("turn", "fork", "fork-exit"):
            await anyio.to_thread.run_sync(sys.stdin.readline)
        elif HOW == "stuck":
            await get_stuck()
        elif HOW == "debugger":
            pdb.Pdb(stdin=sys.stdin, stdout=sys.stderr, readrc=False).set_trace()
        elif HOW.startswith("exit-"):
            watch.exit_by(0.3, status=70, explain=hang if HOW == "exit-hanging-explain" else why)
            BLOCK.get(HOW.removeprefix("exit-"), pause)()
        elif HOW == "outlast":
            watch.exit_by(1.0, status=70, explain=why)
        elif HOW == "called-off":
            watch.exit_by(0.3, status=70, explain=why)
            watch.call_off()
            await anyio.sleep(0.8)
    print("left", flush=True)


anyio.run(
    main,
    backend="trio" if BACKEND == "trio" else "asyncio",
    backend_options={"use_uvloop": True} if BACKEND == "uvloop" else {},
)
if HOW == "outlast":
    threading.Thread(target=time.sleep, args=(60,)).start()  # the interpreter waits for it before it ends
