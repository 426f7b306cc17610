"""What tests of the real spawner share: a listener that keeps what it hears, and launches of shell programs."""

from __future__ import annotations

import os
from pathlib import Path

import anyio

from mainspring.services.spawning import Launch


class Heard:
    """Keeps the lines and notifications of a process."""

    def __init__(self):
        self.lines = []
        self.news = []

    def on_line(self, stream, line):
        self.lines.append((stream, line))

    def on_notify(self, news):
        self.news.append(dict(news))

    def of(self, stream):
        return [line for each, line in self.lines if each == stream]

    async def wait_for(self, line):
        """Wait until a line was told."""
        with anyio.fail_after(10):
            while line not in [each for _, each in self.lines]:
                await anyio.sleep(0.005)


def shell(script, **arguments):
    """Return the launch of a shell program."""
    return Launch(
        "shop", 1, ("sh", "-c", script), environment=arguments.pop("environment", dict(os.environ)), **arguments
    )


def runs(pid):
    """True if there is a process of that pid, other than a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    return stat.rpartition(b")")[2].split()[0] not in (b"Z", b"X")


async def until_gone(*pids):
    """Wait until none of these processes runs."""
    with anyio.fail_after(10):
        while any(map(runs, pids)):
            await anyio.sleep(0.005)


def descriptors():
    """Return the open descriptors of this process."""
    return set(os.listdir("/proc/self/fd"))
