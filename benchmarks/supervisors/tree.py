"""The processes below this one, as the kernel tells them: who is there, what they take, and how they are all ended.

A benchmark makes itself the subreaper of all that it starts, so a process that loses its parent is still found below it.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

PROGRAMS = Path(__file__).parent / "programs"
"""Where the services' own programs are: what runs one of them is a service."""
HELPERS = ("sleep", "setsid", "seq")
"""What these programs run."""
_PR_SET_CHILD_SUBREAPER = 36
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Process:
    """A process as it was when it was looked at."""

    pid: int
    parent: int
    zombie: bool
    seconds: float
    """Processor seconds of it and of its children that have been waited for."""

    @property
    def command(self) -> list[str]:
        """Its arguments; empty where it is gone or a zombie."""
        with suppress(OSError):
            return Path(f"/proc/{self.pid}/cmdline").read_text(errors="replace").split("\0")[:-1]
        return []

    @property
    def is_service(self) -> bool:
        """True if it runs a program of a service, or is a child of one."""
        words = self.command
        return bool(words) and (words[0] in HELPERS or any(word.startswith(f"{PROGRAMS}/") for word in words))


def adopt() -> None:
    """Make this process the parent of all below it that lose theirs."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def read(pid: int) -> Process | None:
    with suppress(OSError, ValueError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return Process(pid, int(fields[1]), fields[0] in "ZX", sum(map(int, fields[11:15])) / _TICKS)
    return None


def below(root: int | None = None) -> list[Process]:
    """All processes below ``root`` (this process), zombies too."""
    found = [read(int(name)) for name in os.listdir("/proc") if name.isdigit()]
    children: dict[int, list[Process]] = {}
    for process in found:
        if process is not None:
            children.setdefault(process.parent, []).append(process)
    below: list[Process] = []
    todo = [os.getpid() if root is None else root]
    while todo:
        direct = children.get(todo.pop(), [])
        below += direct
        todo += [process.pid for process in direct]
    return below


def alive() -> list[Process]:
    """All processes below this one that run."""
    return [process for process in below() if not process.zombie]


def reap(known: Iterable[int]) -> None:
    """Wait for the zombies among this process's children, but for those that ``known`` names."""
    for process in below():
        if process.zombie and process.parent == os.getpid() and process.pid not in known:
            with suppress(ChildProcessError):
                os.waitpid(process.pid, os.WNOHANG)


def end_all() -> None:
    """Kill all processes below this one, again and again until none is left."""
    deadline = time.monotonic() + 30
    while there := alive():
        if time.monotonic() > deadline:
            raise SystemExit(f"processes that do not end: {[process.command for process in there]}")
        for process in there:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        time.sleep(0.01)


class Ends:
    """The ends of processes, noticed without looking for them."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._poll = select.poll()
        self._open: set[int] = set()
        for pid in pids:
            with suppress(ProcessLookupError):
                fd = os.pidfd_open(pid)
                self._open.add(fd)
                self._poll.register(fd, select.POLLIN)

    def wait(self, timeout: float) -> bool:
        """Return True when all have ended; False after ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        while self._open:
            ended = self._poll.poll(max(deadline - time.monotonic(), 0) * 1000)
            for fd, _ in ended:
                self._forget(fd)
            if not ended and time.monotonic() >= deadline:
                return False
        return True

    def close(self) -> None:
        for fd in list(self._open):
            self._forget(fd)

    def _forget(self, fd: int) -> None:
        self._poll.unregister(fd)
        self._open.discard(fd)
        os.close(fd)


def nanoseconds(pid: int) -> int:
    """Processor time of all threads of a process so far."""
    total = 0
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            total += int((task / "schedstat").read_text().split()[0])
    return total


def memory(pid: int, field: str = "VmRSS") -> int:
    """Bytes of a process: ``VmRSS`` (resident) or ``VmHWM`` (the most it ever was)."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    return 0


def proportional(pid: int) -> int:
    """Bytes of a process, with the pages that it shares counted in parts (PSS)."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0
