"""Ports for those who listen later, or never: nobody else gets them meanwhile.

A port that the kernel gave, and that was let go of, is anybody's again: the next connection of any process may leave from it,
even one *to* it, which then is connected with itself. So these are none that the kernel gives, and each process takes them
from blocks of its own: the processes of one run share none, nor do two runs on one machine.
"""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

LOWEST = 20_000
"""Below it are most of the ports that services are known by."""
BLOCK = 32
"""How many ports a process takes for itself at once."""
ENOUGH = 100 * BLOCK
"""How many there must be for a run of several processes, or two."""
GIVEN = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""The first and the last port that Linux gives."""
ELSEWHERE = (32_768, 65_535)
"""They are among these on other systems."""


def room(first: int, last: int) -> range:
    """The ports outside the kernel's, which are those from ``first`` to ``last``; all, where it leaves too few."""
    outside = max(range(LOWEST, first), range(last + 1, 65_536), key=len)
    return outside if len(outside) >= ENOUGH else range(LOWEST, 65_536)


def kernels() -> tuple[int, int]:
    """The first and the last port that the kernel gives to those who ask for any."""
    if not GIVEN.exists():
        return ELSEWHERE
    first, last = GIVEN.read_text().split()
    return int(first), int(last)


def taken(port: int) -> socket.socket | None:
    """A socket that has the port, on all addresses; None where another one has it on any of them."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    found = socket.socket(family)
    try:
        if family == socket.AF_INET6:
            found.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        found.bind(("", port))  # and no SO_REUSEADDR: a port with connections that only just ended is passed by
    except OSError:
        found.close()
        return None
    return found


def is_free(port: int) -> bool:
    """Whether nobody has it just now."""
    found = taken(port)
    if found is not None:
        found.close()
    return found is not None


def blocks() -> Iterator[range]:
    """Blocks of ports that are this process's until it ends: it has the first port of each itself, as the sign of that."""
    ports = room(*kernels())
    starts = range(ports.start, ports.stop - BLOCK + 1, BLOCK)
    offset = os.getpid() % len(starts)  # so a run does not come upon what another one left behind a moment ago
    for start in (*starts[offset:], *starts[:offset]):
        sign = taken(start)
        if sign is not None:
            sign.detach()  # the system closes it
            yield range(start + 1, start + BLOCK)
    raise RuntimeError("no ports are left")


_blocks = blocks()
_left = range(0)
_lock = threading.Lock()


def neighbours(count: int) -> range:
    """So many ports beside each other, at most ``BLOCK - 1``, each of which is free, and given once in this process."""
    global _left
    with _lock:
        while True:
            if len(_left) < count:
                _left = next(_blocks)
            ports, _left = _left[:count], _left[count:]
            if all(map(is_free, ports)):
                return ports


def free_port() -> int:
    """A port that is free, and given once in this process."""
    return neighbours(1)[0]
