"""How long something lasts, on a machine that may have no time for the tests."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from typing import Self

TICK: Final = 0.01


class Stopwatch:
    """Counts the seconds of a block in which this process gets on: hardly those in which it is stopped, or waits for its turn.

    So a claim that something ends in time is one about what it waits for, and fails on no machine that is merely busy. By a
    thread of its own, so that an event loop which is blocked counts in full.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._count, name="stopwatch", daemon=True)

    def _count(self) -> None:
        before = time.monotonic()
        while not self._over.wait(TICK):
            now = time.monotonic()
            self.seconds += min(now - before, 2 * TICK)
            before = now

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
