"""The output of processes, line by line: a bounded amount at a time, so that a flood holds up neither memory nor others."""

from __future__ import annotations

import fcntl
import os
import select
import struct
import termios
from typing import TYPE_CHECKING

import anyio
from anyio.lowlevel import checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable

LONGEST_LINE = 65_536
"""Bytes of a line, at most: a longer one comes in parts."""
LINES_A_STEP = 100
BYTES_A_READ = 65_536


class Readiness:
    """Serves many descriptors in one task: each that can be read has a step, then the next one.

    A step returns True if it has more to do at once. Other tasks run between any two steps.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._steps: dict[int, Callable[[], bool]] = {}

    def add(self, descriptor: int, step: Callable[[], bool]) -> None:
        """Call ``step`` whenever ``descriptor`` can be read, or has ended."""
        self._steps[descriptor] = step
        self._epoll.register(descriptor, select.EPOLLIN)

    def want_write(self, descriptor: int, wanted: bool) -> None:
        """Call its step also when it can be written, or no longer."""
        self._epoll.modify(descriptor, select.EPOLLIN | (select.EPOLLOUT if wanted else 0))

    def remove(self, descriptor: int) -> None:
        """Forget a descriptor that is about to be closed."""
        if self._steps.pop(descriptor, None) is not None:
            self._epoll.unregister(descriptor)

    def close(self) -> None:
        """Give the kernel's part back."""
        self._epoll.close()

    async def run(self) -> None:
        """Serve until it is cancelled."""
        busy: dict[int, None] = {}
        while True:
            if not busy:
                await anyio.wait_readable(self._epoll.fileno())
            busy.update((descriptor, None) for descriptor, _ in self._epoll.poll(0))
            for descriptor in list(busy):
                step = self._steps.get(descriptor)
                if step is None or not step():
                    del busy[descriptor]
                await checkpoint()


class OutputLines:
    """One stream of a process: tells each line when it is whole.

    ``settled`` is called when all was told that was written before :meth:`settle`, also the beginning of a line.
    """

    def __init__(self, descriptor: int, tell: Callable[[str], object]) -> None:
        self.descriptor = descriptor
        self._tell = tell
        self._buffer = bytearray()
        self._searched = 0
        self._owed: int | None = None
        self._settled: list[Callable[[], object]] = []
        self._at_end = False

    def settle(self, settled: Callable[[], object]) -> None:
        """Begin to tell all that the stream holds now. Call ``settled`` after that; at once if nothing is left."""
        self._settled.append(settled)
        self._owed = 0 if self._at_end else waiting_bytes(self.descriptor)
        self._tell_end_of_settled()

    def step(self) -> bool:
        """Read once, tell some lines. Return True if lines are left in the buffer, or bytes that are to be settled."""
        more = self._tell_lines()
        if not more and not self._at_end and self._owed != 0:
            self._read()
            more = self._tell_lines()
        if not more:
            if self._at_end:
                self._tell_rest()
            self._tell_end_of_settled()
        return more or bool(self._owed)

    @property
    def at_end(self) -> bool:
        """True if no process can write to it any more, and all was told."""
        return self._at_end and not self._buffer

    def _read(self) -> None:
        try:
            data = os.read(self.descriptor, min(BYTES_A_READ, self._owed or BYTES_A_READ))
        except BlockingIOError:
            self._owed = None if self._owed is None else 0
            return
        self._buffer += data
        self._at_end = not data
        if self._owed is not None:
            self._owed = max(self._owed - len(data), 0) if data else 0

    def _tell_lines(self) -> bool:
        """Tell up to ``LINES_A_STEP`` whole lines. True if another one is there."""
        buffer, begin, told = self._buffer, 0, 0
        while True:
            end = buffer.find(b"\n", max(begin, self._searched), begin + LONGEST_LINE + 1)
            after = end + 1
            if end < 0:
                if len(buffer) - begin <= LONGEST_LINE:
                    break
                end = after = begin + whole_characters(buffer[begin : begin + LONGEST_LINE])
            if told == LINES_A_STEP:
                break
            self._tell(as_text(buffer[begin:end]))
            begin, told = after, told + 1
        del buffer[:begin]
        self._searched = 0 if end >= 0 else len(buffer)
        return end >= 0

    def _tell_rest(self) -> None:
        if self._buffer:
            rest = as_text(self._buffer)
            self._buffer.clear()
            self._searched = 0
            self._tell(rest)

    def _tell_end_of_settled(self) -> None:
        if self._owed == 0 and b"\n" not in self._buffer:
            self._owed = None
            self._tell_rest()
            settled, self._settled = self._settled, []
            for each in settled:
                each()


def as_text(line: bytes | bytearray) -> str:
    """Return a line as text, without a carriage return at its end."""
    return line.decode("utf-8", "replace").removesuffix("\r")


def whole_characters(data: bytes | bytearray) -> int:
    """Return the length of ``data`` without a UTF-8 character that goes on after its end."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 != 0x80:  # the first byte of a character
            size = 1 if byte < 0x80 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(data) - back if size > back and back < len(data) else len(data)
    return len(data)


def waiting_bytes(descriptor: int) -> int:
    """Return the number of bytes that can be read from a pipe."""
    size: int = struct.unpack("i", fcntl.ioctl(descriptor, termios.FIONREAD, b"\0\0\0\0"))[0]
    return size
