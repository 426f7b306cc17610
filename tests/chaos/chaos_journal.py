"""Journals: what each process writes down while it works, so that it is known after any end of it."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Journal:
    """Lines of JSON in a file of one's own. Each is one write, so that a kill leaves whole lines."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._noted = self._on_disk = 0
        self._lock = anyio.Lock()

    def note(self, what: str, **facts: Any) -> None:
        """Write a line: what happened now, by the clock that all processes of the machine share."""
        line = json.dumps({"what": what, "at": time.monotonic(), **facts}, separators=(",", ":"))
        os.write(self._file, line.encode() + b"\n")
        self._noted += 1

    async def secure(self) -> None:
        """Wait until what was noted so far is on the disk; those who wait at once share one flush."""
        wanted = self._noted
        async with self._lock:
            if self._on_disk < wanted:
                noted = self._noted
                await anyio.to_thread.run_sync(os.fsync, self._file)
                self._on_disk = noted


class Reader:
    """Reads a journal that may still grow."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def lines(self) -> Iterator[dict[str, Any]]:
        """The whole lines that came since the last call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                text = file.read()
        except FileNotFoundError:
            return
        whole, newline, _ = text.rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        for line in whole.splitlines():
            yield json.loads(line)
