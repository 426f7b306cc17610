"""Fair shares in the in-memory queue: where the next message of each key has its place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from mainspring.mailbox.memory.queue import QueuedMessage

SWEEP_FROM: Final = 1_024
"""Keys whose turn has passed are dropped only above this number of keys."""


class LastPlaces:
    """The last place of each key of one task and priority."""

    __slots__ = ("_by_key", "_sweep_at")

    def __init__(self) -> None:
        self._by_key: dict[str, float] = {}
        self._sweep_at = SWEEP_FROM

    def next(self, entry: QueuedMessage, now_at: float) -> float:
        """Return the place of an entry: behind the last one of its key, and not before ``now_at``, the first in line."""
        places, key = self._by_key, entry.key or ""
        last = places.get(key)
        if last is None:
            if len(places) >= self._sweep_at:
                self._by_key = places = {key: last for key, last in places.items() if last > now_at}
                self._sweep_at = max(SWEEP_FROM, 2 * len(places))
            place = now_at
        else:
            place = max(now_at, last + 1 / entry.weight)
        places[key] = place
        return place

    def add(self, entry: QueuedMessage) -> None:
        """Let later entries of its key, if it has one, come behind an entry that has a place of another task."""
        if entry.key is not None:
            self._by_key[entry.key] = max(entry.order, self._by_key.get(entry.key, entry.order))
