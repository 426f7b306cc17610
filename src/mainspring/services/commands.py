"""Runs a command to its end, for probes and hooks."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import anyio

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from mainspring.services.spawning import Launch, ProcessEnd, Spawner, Stream

MAX_OUTPUT = 4096
"""Bytes of a command's output that are kept: the last ones."""
EMPTY_WITHIN = 5.0
"""Seconds that killed processes get to disappear."""


class CommandResult(NamedTuple):
    """How a command ended: ``end`` is None where its time was up, and it was killed.

    ``output``: the last lines that it wrote, at most 4 KiB, standard output and standard error as they came.
    """

    end: ProcessEnd | None
    output: str = ""

    @property
    def error(self) -> str | None:
        """None where the exit status is 0, else how it ended, with its last line of output."""
        if self.end is None:
            return "its time was up, and it was killed"
        if self.end.returncode == 0:
            return None
        last = self.output.rstrip().rpartition("\n")[2].strip()
        return f"{self.end.ending}: {last}" if last else self.end.ending


class _Tail:
    """Keeps the last lines of a command's output."""

    def __init__(self, on_line: Callable[[Stream, str], object] | None) -> None:
        self._on_line = on_line
        self._lines: deque[bytes] = deque()
        self._size = 0

    def on_line(self, stream: Stream, line: str) -> None:
        if self._on_line is not None:
            self._on_line(stream, line)
        said = line.encode(errors="replace") + b"\n"
        self._lines.append(said)
        self._size += len(said)
        while self._size - len(self._lines[0]) >= MAX_OUTPUT:
            self._size -= len(self._lines.popleft())

    def on_notify(self, news: Mapping[str, str]) -> None:
        """A command has nothing to notify of."""

    def text(self) -> str:
        return b"".join(self._lines)[-MAX_OUTPUT:].decode(errors="ignore")


async def run_command(
    spawner: Spawner, launch: Launch, *, timeout: float, on_line: Callable[[Stream, str], object] | None = None
) -> CommandResult:
    """Start a command, and wait at most ``timeout`` seconds for its end. ``on_line`` is called with each line of its output.

    Nothing of it is left afterwards: what it has started in the background is killed with it. So it is on cancellation.

    :raises SpawnError: it cannot be started.
    """
    tail = _Tail(on_line)
    end: ProcessEnd | None = None
    with anyio.move_on_after(timeout):
        process = await spawner.spawn(launch, tail)
        try:
            end = await process.wait()
        finally:
            process.kill()
            with anyio.move_on_after(EMPTY_WITHIN, shield=True):
                await process.wait_empty()
    return CommandResult(end, tail.text())
