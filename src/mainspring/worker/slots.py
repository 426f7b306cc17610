"""``Places``: for how many messages a worker has room, and who waits for some."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from mainspring.mailbox.mailbox import MAX_MESSAGES

if TYPE_CHECKING:
    from collections.abc import Collection

    from mainspring.worker.capacity import Capacity
    from mainspring.worker.delivery import Run


class Places:
    """The messages in hand, each in its place, oldest first.

    Where a mailbox keeps the order of its calls (``ordered``), the place of a message is free as soon as its settlement has
    been asked for: a claim made from then on comes after it, so that the two never hold a lease at once.
    """

    def __init__(self, concurrency: int, *, ordered: bool, capacity: Capacity | None) -> None:
        self.runs: dict[Run, None] = {}
        self.ordered = ordered and capacity is None
        self.leaving = 0
        """How many of them are free in that way."""
        self.claiming = 0
        """How many a claim has that is out."""
        self._most = concurrency
        self._capacity = capacity
        self._freed = anyio.Event()
        self._full = False

    def take(self, runs: Collection[Run]) -> None:
        """These have come."""
        self.runs.update(dict.fromkeys(runs))

    @property
    def free(self) -> int:
        """How many neither a message nor a claim has; at most as many as one claim may ask for."""
        return min(self._most - len(self.runs) + min(self.leaving, self._most) - self.claiming, MAX_MESSAGES)

    async def until_free(self) -> None:
        """Wait for a free place, and a moment longer while more become free at every turn: one claim for all of them."""
        if not self._full:
            self._freed = anyio.Event()
            self._full = True
        await self._freed.wait()
        seen = 0
        while seen < (seen := self.free):
            await anyio.lowlevel.checkpoint()

    def leave(self, count: int) -> None:
        """The settlements of so many are asked for next, before anything else is awaited."""
        if self.ordered:
            self.leaving += count
            self._tell()

    def left(self, runs: Collection[Run]) -> None:
        """These, which were leaving, are settled, or given up."""
        for run in runs:
            del self.runs[run]
        if self.ordered:
            self.leaving -= len(runs)
        if self._capacity is not None:
            self._capacity.give_back(len(runs))
        self._tell()

    def _tell(self) -> None:
        """Whoever waits for a place looks again."""
        if self._full:
            self._full = False
            self._freed.set()
