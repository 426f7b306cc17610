"""Which source files a running program is made of, and whether one of them has changed."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread

from mainspring.cli.user_errors import foreign_directories

if TYPE_CHECKING:
    from collections.abc import Iterable

INTERVAL = 0.5
"""Seconds between two looks."""

FileTimes = dict[str, tuple[int, int]]


def loaded_directories() -> list[str]:
    """Return the directories of the modules this process has imported, without those of other people's code."""
    foreign = foreign_directories()
    files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    own = {os.path.dirname(os.path.abspath(file)) for file in files if file and not file.startswith(foreign)}
    return sorted(directory for directory in own if not f"{directory}/".startswith(foreign))


def snapshot(directories: Iterable[str]) -> FileTimes:
    """Return when each Python file right in these directories was last written, and its size."""
    found: FileTimes = {}
    for path in [path for directory in directories for path in _python_files(directory)]:
        with suppress(OSError):  # a link to nothing, as editors make beside an unsaved file
            status = os.stat(path)
            found[path] = (status.st_mtime_ns, status.st_size)
    return found


def _python_files(directory: str) -> list[str]:
    try:
        return [os.path.join(directory, name) for name in os.listdir(directory) if name.endswith(".py")]
    except OSError:  # gone, or going while we look
        return []


def changed(before: FileTimes, after: FileTimes) -> str | None:
    """Return the first file that is new, gone or different."""
    return min((path for path, _ in before.items() ^ after.items()), default=None)


class SourceWatch:
    """Looks at the files of some directories twice a second. Directories can be added at any time."""

    def __init__(self, directories: Iterable[str]) -> None:
        self._directories = set(directories)
        self._before = snapshot(self._directories)

    def add(self, directories: Iterable[str]) -> None:
        """Watch these too, as they are now."""
        new = set(directories) - self._directories
        self._directories |= new
        self._before |= snapshot(new)

    async def next_change(self) -> str:
        """Wait for a change. Return the file that changed."""
        while True:
            await anyio.sleep(INTERVAL)
            directories = frozenset(self._directories)
            after = await anyio.to_thread.run_sync(snapshot, directories, limiter=anyio.CapacityLimiter(1))
            known = {path: seen for path, seen in self._before.items() if os.path.dirname(path) in directories}
            path = changed(known, after)
            if path is not None:
                added = {path: seen for path, seen in self._before.items() if path not in known}
                self._before = {**added, **after}
                return path
