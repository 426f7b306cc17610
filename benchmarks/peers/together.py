"""Several worker processes that drain one queue together, of the peer that a script of this directory has.

``python together.py SCRIPT URL COUNT CONCURRENCY PROCESSES`` prints one line of JSON: the messages a second of all processes
together, their processor seconds a message, and how the messages were divided. The clock starts once each process has got its
first message: how long they take to start does not count.

Standard library only, as ``harness`` is: it runs in the interpreter of the peer.
"""

from __future__ import annotations

import importlib
import json
import mmap
import os
import subprocess
import sys
import tempfile
import time

from harness import AsyncSide, Blocking, BlockingSide, Peer, on_loop

PATIENCE = 120.0
"""Seconds that the processes may take to start, and to drain the queue."""
LAG = 10.0
"""Seconds that a process waits for the first message of the others: with few messages, one of them may get none."""


class Board:
    """Memory that the processes share: how many messages each has handled, and whether it has got its first one."""

    def __init__(self, path: str, processes: int) -> None:
        with open(path, "r+b") as file:
            file.truncate(16 * processes)
            self._map = mmap.mmap(file.fileno(), 16 * processes)
        words = memoryview(self._map).cast("q")
        self.handled, self.ready = words[:processes], words[processes:]


def peer_of(script: str, url: str) -> Peer | Blocking:
    module = importlib.import_module(script)
    kinds = [kind for kind in vars(module).values() if isinstance(kind, type) and kind.__module__ == script]
    return next(kind for kind in kinds if issubclass(kind, (Peer, Blocking)))(url)


def work(peer: Peer | Blocking, board: Board, number: int, concurrency: int) -> None:
    """Be one of the processes."""
    count = 0

    def handle(body: str) -> None:
        nonlocal count
        if not count:
            board.ready[number] = 1
            until = time.monotonic() + LAG
            while not all(board.ready) and time.monotonic() < until:
                time.sleep(0.001)
        count += 1
        board.handled[number] = count

    working = peer.work(handle, concurrency)
    if isinstance(peer, Peer):
        on_loop(peer, working)


def processor_seconds(pid: int) -> float:
    """Of all threads of a process, to the nanosecond."""
    total = 0
    for task in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{task}/schedstat") as file:
            total += int(file.read().split()[0])
    return total / 1e9


def drain(script: str, url: str, count: int, concurrency: int, processes: int) -> dict[str, object]:
    peer = peer_of(script, url)
    side = BlockingSide(peer) if isinstance(peer, Blocking) else AsyncSide(peer)
    side.run("fill", count)
    with tempfile.NamedTemporaryFile() as file:
        board = Board(file.name, processes)
        command = [sys.executable, __file__, "--work", script, url, file.name, str(concurrency), str(processes)]
        workers = [
            subprocess.Popen([*command, str(number)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            for number in range(processes)
        ]
        try:
            deadline = time.monotonic() + PATIENCE
            wait(lambda: all(board.ready), min(deadline, time.monotonic() + PATIENCE))
            before = [processor_seconds(worker.pid) for worker in workers]
            began, had = time.perf_counter(), sum(board.handled)
            wait(lambda: sum(board.handled) >= count, deadline)
            took = time.perf_counter() - began
            used = [processor_seconds(worker.pid) - seconds for worker, seconds in zip(workers, before, strict=True)]
            done = sum(board.handled) - had
            return {"rate": done / took, "processor": sum(used) / done, "shares": list(board.handled)}
        finally:
            for worker in workers:
                worker.kill()
            for worker in workers:
                worker.wait()


def wait(reached, deadline: float) -> None:
    while not reached():
        if time.monotonic() > deadline:
            raise SystemExit(f"not within {PATIENCE:g} s")
        time.sleep(0.002)


def main() -> None:
    if sys.argv[1] == "--work":
        script, url, path, concurrency, processes, number = sys.argv[2:]
        work(peer_of(script, url), Board(path, int(processes)), int(number), int(concurrency))
        return
    script, url, *numbers = sys.argv[1:]
    print(json.dumps(drain(script, url, *map(int, numbers))))


if __name__ == "__main__":
    main()
