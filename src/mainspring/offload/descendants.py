"""The processes that descend from one, and their end: also of those in sessions of their own, which no process group has.

They are found by their parents' ids in ``/proc``. A process whose parent has ended belongs to the init process instead, and
is found no more: so all are stopped before the first is killed.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress

from mainspring.core.clock import monotonic

STOP_WITHIN = 1.0
"""Seconds that finding and stopping may take; it takes milliseconds."""


def descendants(root: int) -> dict[int, int]:
    """The process ids of the children of ``root``, of their children, and so on, each with that of its parent.

    None are found while this process can open no more files.
    """
    children: dict[int, list[int]] = {}
    try:
        entries = os.listdir("/proc")
    except OSError:
        return {}
    for entry in entries:
        if entry.isdigit():
            children.setdefault(_parent(int(entry)), []).append(int(entry))
    found: dict[int, int] = {}
    reached = [root]
    while reached:
        parent = reached.pop()
        new = [child for child in children.get(parent, ()) if child not in found]
        found.update(dict.fromkeys(new, parent))
        reached += new
    return found


def hold(family: dict[int, int]) -> list[int]:
    """File descriptors of these processes: a signal by one reaches no other process that has got the number meanwhile."""
    held = []
    for pid, parent in family.items():
        with suppress(OSError):
            descriptor = os.pidfd_open(pid)
            if _parent(pid) == parent:
                held.append(descriptor)
            else:  # it has ended, or its parent has, and the next look finds it
                os.close(descriptor)
    return held


def kill_held(held: list[int]) -> None:
    """Kill the processes of these descriptors, and close them."""
    for descriptor in held:
        _send(descriptor, signal.SIGKILL)
        os.close(descriptor)


def kill_family(root: int) -> None:
    """Kill the process ``root``, which must be a child of this one that has not been waited for, and its descendants.

    Returns once the signals are sent; it does not wait for their ends.
    """
    held: list[int] = []
    known: dict[int, int] = {}
    with suppress(ProcessLookupError):
        os.kill(root, signal.SIGSTOP)
    quiet, until = 0, monotonic() + STOP_WITHIN
    # What is forked while it looks is found the next time; twice, since a process that ends meanwhile takes one look.
    while quiet < 2 and monotonic() < until:
        new = dict(descendants(root).items() - known.items())
        known |= new
        stopped = hold(new)
        for descriptor in stopped:
            _send(descriptor, signal.SIGSTOP)
        held += stopped
        quiet = 0 if new else quiet + 1
    kill_held(held)
    with suppress(ProcessLookupError):
        os.kill(root, signal.SIGKILL)


def _parent(pid: int) -> int:
    """Its parent's process id; 0 where it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return int(stat.read().rpartition(b")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return 0


def _send(descriptor: int, signum: int) -> None:
    with suppress(OSError):
        signal.pidfd_send_signal(descriptor, signum)
