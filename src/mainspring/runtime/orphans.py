"""What process 1 of a container owes to the others: it reaps the orphans that the kernel gives to it.

A process whose parent ends becomes a child of process 1, and stays a zombie until that waits for it. The kernel does not say
which child is an orphan and which was started here, by a library or by a handler. So time tells them apart: Python waits for
what it has started, so that a child which has been a zombie for a while is an orphan.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import anyio

from mainspring.runtime.interval import Periodic

if TYPE_CHECKING:
    from collections.abc import Callable, Container

PATIENCE = 10.0
"""Seconds for which a child must have been a zombie before it counts as an orphan."""
_NOTHING: Container[int] = ()


class _Zombie(NamedTuple):
    """``started`` tells a process from a later one with its id."""

    pid: int
    started: str


class OrphanReaper:
    """Waits for zombies that are children of this process and that nothing here waits for.

    It looks twice in ``patience`` seconds, which is one system call where there is no zombie. No signal is needed: SIGCHLD
    stays as it is. A program that looks at its child's exit status later than ``patience`` seconds after its end finds none.

    :param own: gives the ids of children that are never reaped, however late their status is asked for.
    """

    def __init__(self, *, patience: float = PATIENCE, own: Callable[[], Container[int]] = lambda: _NOTHING) -> None:
        self.reaped = 0
        """How many it has reaped."""
        self._patience = patience
        self._own = own
        self._seen: dict[_Zombie, float] = {}

    async def run(self) -> None:
        """Reap until cancelled."""
        await Periodic(self._look, first=anyio.current_time() + self._patience / 2).run()

    async def _look(self, overslept: float) -> float:
        now = anyio.current_time()
        own = self._own()
        zombies = [each for each in _zombies() if each.pid not in own] if _any_zombie() else []
        self._seen = {each: self._seen.get(each, now) for each in zombies}
        for zombie, since in self._seen.items():
            if now - since >= self._patience:
                self.reaped += _reap(zombie.pid)
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
