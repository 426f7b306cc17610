"""``Lifespan``: what the handlers of a group share, open while its loops run."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import anyio

from mainspring.runtime.wrong_loop import explained

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager


class Lifespan:
    """Keeps a context manager open in one task, as what it opens may have cancel scopes, until told to stop.

    While it opens, a cancellation ends the opening. Once it is open, a cancellation of everything around does not reach it
    before it is told to stop: handlers that are cancelled can still use it as they clean up. Then it has ``grace`` seconds.
    A cancellation that comes only while it closes ends the closing.
    """

    def __init__(self, make: Callable[[], AbstractAsyncContextManager[Any]], grace: float) -> None:
        self._make = make
        self._grace = grace
        self._opened = anyio.Event()
        self._told = anyio.Event()
        self._scope = anyio.CancelScope()
        self._resources: Any = None

    async def wait_opened(self) -> Any:
        """Wait until it is open. Return what it yields."""
        await self._opened.wait()
        return self._resources

    def stop(self) -> None:
        """Have it close. If it is still opening, that is cancelled."""
        self._told.set()
        if not self._opened.is_set():
            self._scope.cancel()

    async def run(self) -> None:
        """Open it, wait until told to stop, and close it. What it raises is raised."""
        try:
            await self._run()
        except Exception as error:
            if (told := explained(error, "the lifespan")) is not error:
                raise told
            raise

    async def _run(self) -> None:
        with self._scope:
            async with self._make() as self._resources:
                self._scope.shield = True  # until told to stop, which leaving its DaemonScope does in every case
                self._opened.set()
                await self._told.wait()
                self._scope.shield = False
                if anyio.current_effective_deadline() == -math.inf:  # the group is cancelled, and it is still to close
                    self._scope.shield = True
                    self._scope.deadline = anyio.current_time() + self._grace
