"""The receives of one mailbox object that wait: in a line, each on its event."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import anyio

from mainspring.errors import copied

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from mainspring.mailbox.message import Delivery


class Waiters:
    """The line. A receive that finds nothing parks in it, and what brings messages wakes a receive for each.

    ``signals`` is raised whenever there may be more to claim, also by threads; a receive takes it down before it claims, and
    hands it to :meth:`wait`. What raises it looks at ``parked`` afterwards, and a receive parks before it looks at
    ``signals``: so one of the two sees the other, and no message is missed between.
    """

    __slots__ = ("_failed", "_line", "signals")

    def __init__(self) -> None:
        self.signals = 0
        self._line: deque[anyio.Event] = deque()
        self._failed: dict[anyio.Event, Exception] = {}

    @property
    def parked(self) -> int:
        """How many wait to be woken; may be read from any thread."""
        return len(self._line)

    async def first(
        self, look: Callable[[], Awaitable[list[Delivery]]], deadline: float, *, usable: Callable[[], bool]
    ) -> list[Delivery]:
        """What ``look`` finds, now or when woken until ``deadline``; nothing once it is not ``usable`` any more.

        One that was woken and cannot look, as it is cancelled, passes its turn on.
        """
        seen = self.signals
        found = await look()
        while not found and usable():
            await self.wait(seen, deadline)
            if not usable() or (self.signals == seen and anyio.current_time() >= deadline):
                break  # nothing has come; one to whom another's turn was passed looks, and waits on
            seen = self.signals
            try:
                found = await look()
            except BaseException:
                self.forsake()
                raise
        return found

    async def wait(self, seen: int, deadline: float) -> None:
        """Wait to be woken, at most until ``deadline`` (anyio's clock); not at all where ``signals`` is not ``seen`` any more.

        Cancelled once it was woken, it passes its turn on. Raises the error of :meth:`fail_all`.
        """
        event = anyio.Event()
        try:
            with anyio.CancelScope(deadline=deadline):
                await self._park(event, seen)
        except BaseException:
            if event.is_set() and self._failed.pop(event, None) is None:
                self.forsake()
            raise
        if self._failed and (error := self._failed.pop(event, None)) is not None:
            raise error

    async def _park(self, event: anyio.Event, seen: int) -> None:
        self._line.append(event)
        try:
            if self.signals == seen:
                await event.wait()
        finally:
            if not event.is_set():
                self._line.remove(event)

    def forsake(self) -> None:
        """A receive whose turn it was cannot take it: the next one shall."""
        self.wake(1)

    def wake(self, count: int) -> None:
        """Let the ``count`` receives that have waited longest look again."""
        for _ in range(min(count, len(self._line))):
            self._line.popleft().set()

    def wake_all(self) -> None:
        """Let all look again."""
        self.wake(len(self._line))

    def fail_all(self, error: Exception) -> None:
        """Raise ``error`` in all that are parked. Receives that were woken or have a message are not: they go on."""
        while self._line:
            event = self._line.popleft()
            self._failed[event] = copied(error)
            event.set()
