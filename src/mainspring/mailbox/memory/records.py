"""The records of an in-memory mailbox. Nothing in it waits or reads a clock."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from mainspring.mailbox.records import Record

if TYPE_CHECKING:
    from mainspring.mailbox.records import RecordWrite


class MemoryRecords:
    """Records by kind and key. An ended record is dropped at the next call."""

    def __init__(self) -> None:
        self._by_key: dict[tuple[str, str], Record] = {}
        self._keys: dict[str, list[str]] = {}  # of each kind, in order
        self._ends: list[tuple[float, int, str, str]] = []  # a heap; an end counts while its version is there
        self._version = 0

    def version(self, kind: str, key: str, now: float) -> int:
        """Return the version of a record, or 0 if there is none."""
        self._drop_ended(now)
        found = self._by_key.get((kind, key))
        return 0 if found is None else found.version

    def write(self, write: RecordWrite, now: float) -> int:
        """Change a record. Return its version, or 0 for a deletion."""
        self._drop_ended(now)
        if write.value is None:
            self._drop(write.kind, write.key)
            return 0
        self._version += 1
        if (write.kind, write.key) not in self._by_key:
            insort(self._keys.setdefault(write.kind, []), write.key)
        self._by_key[write.kind, write.key] = Record(write.kind, write.key, write.value, self._version)
        if write.expires_in is not None:
            heappush(self._ends, (now + write.expires_in, self._version, write.kind, write.key))
        return self._version

    def find(self, kind: str, keys: list[str], now: float) -> list[Record]:
        """Return the records under ``keys``."""
        self._drop_ended(now)
        found = (self._by_key.get((kind, key)) for key in dict.fromkeys(keys))
        return [record for record in found if record is not None]

    def list(self, kind: str, limit: int, after: str | None, now: float) -> list[Record]:
        """Return up to ``limit`` records of a kind behind ``after``, in the order of their keys."""
        self._drop_ended(now)
        keys = self._keys.get(kind, [])
        first = 0 if after is None else bisect_right(keys, after)
        return [self._by_key[kind, key] for key in keys[first : first + limit]]

    def _drop_ended(self, now: float) -> None:
        while self._ends and self._ends[0][0] <= now:
            _, version, kind, key = heappop(self._ends)
            found = self._by_key.get((kind, key))
            if found is not None and found.version == version:
                self._drop(kind, key)

    def _drop(self, kind: str, key: str) -> None:
        if self._by_key.pop((kind, key), None) is not None:
            keys = self._keys[kind]
            del keys[bisect_left(keys, key)]
