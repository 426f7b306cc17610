"""Writes lines of many sources to standard output and standard error, whole and in order, without holding up an event loop.

A thread does the writing. A reader that is too slow, or a disk that is full, costs lines and never time: what cannot be kept is
counted, and the count is written once there is room.
"""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from contextlib import suppress
from typing import NamedTuple

from mainspring.validation import counted

KEPT_BYTES = 16 << 20
"""Bytes that may wait to be written. Lines of our own log may wait beyond, up to twice that."""
_BATCH = 1 << 16


class _QueuedLine(NamedTuple):
    descriptor: int
    data: bytes


class LineWriter:
    """A queue of lines and the thread that writes them. It is closed by :meth:`close`."""

    def __init__(self, *, kept_bytes: int = KEPT_BYTES) -> None:
        self.dropped = 0
        """How many lines were not written, as there was no room, or as writing failed."""
        self._kept_bytes = kept_bytes
        self._waiting: deque[_QueuedLine] = deque()
        self._bytes = 0
        self._untold = 0
        self._news = threading.Condition()
        self._closing = False
        self._gone: set[int] = set()
        self._thread = threading.Thread(target=self._write_all, name="mainspring output", daemon=True)
        self._thread.start()

    def put(self, descriptor: int, line: str, *, own: bool = False) -> None:
        """Queue a line, without its end. Callable from any thread; it never waits. ``own``: it is a line of our own log."""
        data = line.encode("utf-8", "backslashreplace") + b"\n"
        with self._news:
            if self._bytes + len(data) > self._kept_bytes * (2 if own else 1):
                self._drop(1)
                return
            self._bytes += len(data)
            self._waiting.append(_QueuedLine(descriptor, data))
            if len(self._waiting) == 1:
                self._news.notify_all()

    def stream(self, descriptor: int) -> OwnLines:
        """Return a stream for a log handler."""
        return OwnLines(self, descriptor)

    def close(self, timeout: float = 5.0) -> bool:
        """Write what waits, for at most ``timeout`` seconds. Return False if something was not written."""
        with self._news:
            self._closing = True
            self._news.notify_all()
        self._thread.join(timeout)
        return not self._thread.is_alive() and not self.dropped

    def _drop(self, lines: int) -> None:
        self.dropped += lines
        self._untold += lines

    def _write_all(self) -> None:
        while True:
            with self._news:
                while not self._waiting and not self._closing:
                    self._news.wait()
                batch = self._take()
                untold, self._untold = self._untold, 0
            if untold:
                remark = f"mainspring: {counted(untold, 'line')} of output could not be written\n".encode()
                if not self._write(2, remark):
                    with self._news:
                        self._untold += untold
            if not batch:
                return
            self._write_batch(batch)

    def _take(self) -> list[_QueuedLine]:
        """Take the lines at the front that go to one place."""
        batch: list[_QueuedLine] = []
        size = 0
        while self._waiting and size < _BATCH and (not batch or self._waiting[0].descriptor == batch[0].descriptor):
            batch.append(self._waiting.popleft())
            size += len(batch[-1].data)
        return batch

    def _write_batch(self, batch: list[_QueuedLine]) -> None:
        data = b"".join(each.data for each in batch)
        written = self._write(batch[0].descriptor, data)
        with self._news:
            self._bytes -= len(data)
            if not written:
                self._drop(len(batch))

    def _write(self, descriptor: int, data: bytes) -> bool:
        if descriptor in self._gone:
            return False
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(descriptor, view) :]
            except BlockingIOError:
                with suppress(OSError, ValueError):
                    select.select((), (descriptor,), (), 1.0)
            except BrokenPipeError:  # the reader has gone, which is its right
                self._gone.add(descriptor)
                return False
            except OSError:  # a full disk, which may have room again
                return False
        return True


class OwnLines:
    """A stream that takes the lines of our own log."""

    def __init__(self, writer: LineWriter, descriptor: int) -> None:
        self._writer = writer
        self._descriptor = descriptor

    def write(self, text: str) -> int:
        """Queue a record, which ends with the end of its line."""
        self._writer.put(self._descriptor, text.removesuffix("\n"), own=True)
        return len(text)

    def flush(self) -> None:
        """Do nothing: the thread writes as soon as it can."""
