"""What process 1 of a container owes to the others: it reaps the orphans that the kernel gives to it.

A process whose parent ends becomes a child of process 1, and stays a zombie until that waits for it. The kernel does not say
which child is an orphan and which was started here, by a library or by a handler. Two things tell them apart. A child is no
orphan while an object stands for it that has not got its status: of ``subprocess``, on which the event loops build, or of
``multiprocessing``. A child that was forked without such an object is soon waited for.

SIGCHLD would say sooner that a child has ended, but not whose it is. A zombie costs no more than an entry in a table.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import anyio

from mainspring.runtime.interval import Periodic

PATIENCE = 10.0
"""Seconds for which a child must have been a zombie before it counts as an orphan."""


class _Zombie(NamedTuple):
    """``started`` tells a process from a later one with its id."""

    pid: int
    started: str


class OrphanReaper:
    """Waits for zombies that are children of this process and that nothing here waits for.

    It looks twice in ``patience`` seconds, which is one system call where there is no zombie. No signal is needed: SIGCHLD
    stays as it is. Code that forks by itself (``os.fork``, ``os.posix_spawn``) and waits for its child later than ``patience``
    seconds after its end finds none.
    """

    def __init__(self, *, patience: float = PATIENCE) -> None:
        self.reaped = 0
        """How many it has reaped."""
        self._patience = patience
        self._seen: dict[_Zombie, float] = {}

    async def run(self) -> None:
        """Reap until cancelled."""
        await Periodic(self._look, first=anyio.current_time() + self._patience / 2).run()

    async def _look(self, overslept: float) -> float:
        now = anyio.current_time()
        zombies = _zombies() if _any_zombie() else []
        self._seen = {each: self._seen.get(each, now) for each in zombies}
        old = {zombie.pid for zombie, since in self._seen.items() if now - since >= self._patience}
        for pid in old - _waited_for() if old else ():
            self.reaped += _reap(pid)
        return now + self._patience / 2


def is_init() -> bool:
    """Return True if this is process 1, of a container or of another PID namespace."""
    return os.getpid() == 1


def _any_zombie() -> bool:
    """Return True if a child has ended and was not waited for. It stays so."""
    try:
        return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return False


def _waited_for() -> set[int | None]:
    """Return the ids of the children that an object stands for which has not got their status."""
    forked: Any = sys.modules.get("multiprocessing.popen_fork")
    kinds = (subprocess.Popen,) if forked is None else (subprocess.Popen, forked.Popen)
    objects: list[Any] = [each for each in gc.get_objects() if issubclass(type(each), kinds)]
    return {
        getattr(each, "pid", None) for each in objects if getattr(each, "returncode", 0) is None
    }  # it may be half made


def _reap(pid: int) -> bool:
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG) is not None
    except ChildProcessError:  # its own waiter was quicker
        return False


def _zombies() -> list[_Zombie]:
    """Return the children of this process that have ended."""
    mine, found = str(os.getpid()), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):  # it is gone meanwhile
                # Behind the name of the program, which may hold anything: state, parent, …, the 20th is the start time.
                fields = (entry / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()
                if fields[0] == "Z" and fields[1] == mine:
                    found.append(_Zombie(int(entry.name), fields[19]))
    return found
