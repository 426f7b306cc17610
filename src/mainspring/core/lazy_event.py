"""``LazyEvent``: an event that costs next to nothing until a task waits for it."""

from __future__ import annotations

import anyio


class LazyEvent:
    """An event for which hardly ever a task waits, as there are many for each loop of a group.

    That of anyio takes about a kilobyte: here the first task that waits makes it. All calls but :meth:`is_set` belong on the
    event loop of the waiting tasks.
    """

    __slots__ = ("_event", "_set")

    def __init__(self) -> None:
        self._set = False
        self._event: anyio.Event | None = None

    def set(self) -> None:
        """Wake up every waiting task."""
        self._set = True
        event, self._event = self._event, None
        if event is not None:
            event.set()

    def is_set(self) -> bool:
        """True once it is set; callable from any thread."""
        return self._set

    async def wait(self) -> None:
        """Wait until it is set."""
        if self._set:
            await anyio.lowlevel.checkpoint()
            return
        if self._event is None:
            self._event = anyio.Event()
        await self._event.wait()
