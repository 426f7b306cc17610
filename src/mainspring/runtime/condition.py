"""A condition variable over plain attributes of one event loop, with a deadline that may move.

Unlike ``anyio.Condition`` it has no lock: attributes change between two awaits, so none is seen half changed.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import anyio

if TYPE_CHECKING:
    from collections.abc import Callable


class ConditionVariable:
    """Change attributes, then call :meth:`notify_all`. Tasks wait by :meth:`wait_for` until the attributes are as they need."""

    def __init__(self) -> None:
        self._notified = anyio.Event()

    def notify_all(self) -> None:
        """Let all waiting tasks look again."""
        self._notified.set()
        self._notified = anyio.Event()

    async def wait_for(self, holds: Callable[[], bool], deadline: Callable[[], float] = lambda: math.inf) -> bool:
        """Wait until ``holds()``. Return False if ``deadline()`` came first: the event loop's time, asked at each change.

        Cancelled, it leaves nothing behind.
        """
        while not holds():
            notified, left = self._notified, deadline() - anyio.current_time()
            if left <= 0:
                return False
            with anyio.move_on_after(left):
                await notified.wait()
        return True
