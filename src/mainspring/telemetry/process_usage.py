"""Memory and CPU time of processes with all their descendants."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import anyio.to_thread

from mainspring.core.clock import real_work

if TYPE_CHECKING:
    from collections.abc import Collection

    import psutil


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """What a process and its descendants use together.

    ``memory_bytes``: resident memory; pages that several of them share are counted for each. ``cpu_seconds``: CPU time, also
    that of descendants which have ended and were waited for by one of them. ``processes``: how many they are.
    """

    memory_bytes: int
    cpu_seconds: float
    processes: int


class UsageReader:
    """Reads what processes use. Nothing is read, and psutil is not imported, before the first :meth:`read`."""

    async def read(self, pids: Collection[int]) -> dict[int, ProcessUsage]:
        """Return the usage of each process by its id, from one walk of the process table in a worker thread.

        A process that has gone is left out. A descendant that no longer has a living parent below ``pids`` is not found.
        Cancelled, it leaves the walk to end by itself.
        """
        if not pids:
            return {}
        with real_work():
            return await anyio.to_thread.run_sync(_usage_of, frozenset(pids), abandon_on_cancel=True)


def _usage_of(pids: frozenset[int]) -> dict[int, ProcessUsage]:
    import psutil

    processes = {process.pid: process for process in psutil.process_iter(["ppid"])}
    children: dict[int, list[psutil.Process]] = {}
    for process in processes.values():
        children.setdefault(process.info["ppid"] or 0, []).append(process)
    return {pid: _of_tree(processes[pid], children) for pid in pids if pid in processes}


def _of_tree(root: psutil.Process, children: dict[int, list[psutil.Process]]) -> ProcessUsage:
    import psutil

    memory, cpu, count = 0, 0.0, 0
    left = [root]
    while left:
        process = left.pop()
        left += children.get(process.pid, ())
        try:
            with process.oneshot():
                times = process.cpu_times()
                memory += process.memory_info().rss
        except psutil.Error:  # it has gone meanwhile, or is a zombie
            continue
        cpu += times.user + times.system + times.children_user + times.children_system
        count += 1
    return ProcessUsage(memory, cpu, count)
