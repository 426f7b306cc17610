"""The receives of one mailbox object that wait: in a line, each on its event."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import anyio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from mainspring.mailbox.message import Delivery


class Waiters:
    """The line. A receive that finds nothing parks in it, and whoever has something to claim wakes as many as it is for.

    ``signals`` is raised whenever there may be more to claim, also by threads; a receive takes it down before it claims, and
    hands it to :meth:`wait`. Whoever raises it looks at ``parked`` afterwards, and a receive parks before it looks at
    ``signals``: so one of the two sees the other, and no message is missed between.
    """

    __slots__ = ("_line", "signals")

    def __init__(self) -> None:
        self.signals = 0
        self._line: deque[anyio.Event] = deque()

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

        Cancelled once it was woken, it passes its turn on.
        """
        event = anyio.Event()
        try:
            with anyio.CancelScope(deadline=deadline):
                await self._park(event, seen)
        except BaseException:
            if event.is_set():
                self.forsake()
            raise

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
        self._let(1)

    def wake(self, count: int) -> None:
        """Let the ``count`` receives that have waited longest look again."""
        self._let(count)

    def wake_all(self) -> None:
        """Let all look again."""
        self._let(len(self._line))

    def _let(self, count: int) -> None:
        for _ in range(min(count, len(self._line))):
            self._line.popleft().set()
