"""The last lines that services have written, kept for readers that come later, and passed on to readers that follow."""

from __future__ import annotations

from collections import deque
from heapq import merge
from itertools import count, islice
from operator import itemgetter
from typing import TYPE_CHECKING

from mainspring.runtime.condition import ConditionVariable

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Container

    from mainspring.events import ServiceOutput

LINES = 300
CHARACTERS = 65_536
"""Limits of what is kept of the output of a replica. With 200 chatty services that is about 25 MiB."""
UNREAD_LINES = 1000
UNREAD_CHARACTERS = 1_048_576
"""Limits of what a reader may be behind."""


class RecentOutput:
    """Keeps the last 300 lines of each replica, 65,536 characters at most. Subscribe :meth:`note` to :class:`ServiceOutput`.

    :param known: returns the names of the services that there are. When a replica writes its first line, the lines of
        services that are gone are forgotten: reloads with new names must not fill the memory. None: they are kept.
    """

    def __init__(self, known: Callable[[], Container[str]] | None = None) -> None:
        self._known = known
        self._kept: dict[tuple[str, int], _LastLines] = {}
        self._readers: set[_Reader] = set()
        self._numbers = count()
        self._closed = False

    def note(self, event: ServiceOutput) -> None:
        """Take note of a line."""
        key = event.service, event.replica
        kept = self._kept.get(key)
        if kept is None:
            self._forget_unknown()
            kept = self._kept[key] = _LastLines(LINES, CHARACTERS)
        kept.add(next(self._numbers), event)
        for reader in self._readers:
            reader.put(event)

    def _forget_unknown(self) -> None:
        if self._known is not None:
            known = self._known()
            self._kept = {key: kept for key, kept in self._kept.items() if key[0] in known}

    def close(self) -> None:
        """End the readers that follow, after what they have not read yet."""
        self._closed = True
        for reader in self._readers:
            reader.close()

    def last(self, lines: int, service: str | None = None, replica: int | None = None) -> list[ServiceOutput]:
        """Return the last lines of a replica, of a service, or of all, in the order in which they were read."""
        wanted = _wanted(service, replica)
        found = [reversed(kept.numbered) for (name, number), kept in self._kept.items() if wanted(name, number)]
        newest = islice(merge(*found, key=itemgetter(0), reverse=True), lines)
        return [event for _, event in newest][::-1]

    async def follow(
        self, lines: int, service: str | None = None, replica: int | None = None
    ) -> AsyncGenerator[tuple[int, list[ServiceOutput]]]:
        """Yield the last lines, and then what is new, until :meth:`close`: how many lines were lost before, and the lines.

        A reader that is more than 1,000 lines behind, or 1,048,576 characters, loses the oldest of them. Close the generator
        to end it.
        """
        reader = _Reader(_wanted(service, replica))
        for event in self.last(lines, service, replica):
            reader.put(event)
        if self._closed:
            reader.close()
        self._readers.add(reader)
        try:
            while True:
                await reader.wait()
                yield reader.take()
                if reader.finished:
                    return
        finally:
            self._readers.discard(reader)


class _LastLines:
    """The last lines of what is added, with their numbers: at most ``lines`` lines and ``characters`` characters."""

    __slots__ = ("_characters", "_limits", "numbered")

    def __init__(self, lines: int, characters: int) -> None:
        self.numbered: deque[tuple[int, ServiceOutput]] = deque()
        self._limits = lines, characters
        self._characters = 0

    def add(self, number: int, event: ServiceOutput) -> int:
        """Add a line. Return how many had to go."""
        self.numbered.append((number, event))
        self._characters += len(event.line)
        lines, characters = self._limits
        lost = 0
        while len(self.numbered) > lines or self._characters > characters:
            _, oldest = self.numbered.popleft()
            self._characters -= len(oldest.line)
            lost += 1
        return lost


class _Reader:
    """What one reader has not read yet."""

    def __init__(self, wanted: Callable[[str, int], bool]) -> None:
        self._wanted = wanted
        self._unread = _LastLines(UNREAD_LINES, UNREAD_CHARACTERS)
        self._lost = 0
        self._closed = False
        self._changes = ConditionVariable()

    @property
    def finished(self) -> bool:
        return self._closed and not self._unread.numbered

    def put(self, event: ServiceOutput) -> None:
        if not self._wanted(event.service, event.replica):
            return
        self._lost += self._unread.add(0, event)
        if len(self._unread.numbered) == 1:
            self._changes.notify_all()

    def close(self) -> None:
        self._closed = True
        self._changes.notify_all()

    async def wait(self) -> None:
        await self._changes.wait_for(lambda: bool(self._unread.numbered) or self._closed)

    def take(self) -> tuple[int, list[ServiceOutput]]:
        lost, unread = self._lost, self._unread
        self._lost, self._unread = 0, _LastLines(UNREAD_LINES, UNREAD_CHARACTERS)
        return lost, [event for _, event in unread.numbered]


def _wanted(service: str | None, replica: int | None) -> Callable[[str, int], bool]:
    return lambda name, number: service in (None, name) and replica in (None, number)
