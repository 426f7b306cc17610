"""The one interval loop: reaper, lease renewal, watchdog and health checks sleep and wake in here."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import anyio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

OVERSLEPT = 5.0
"""Seconds behind the asked-for instant from which a wake-up counts as overslept (suspend, SIGSTOP, a blocked loop)."""


class Periodic:
    """Calls ``step(overslept)`` at the instants it asks for: each call returns when the next is due.

    Instants are on anyio's clock; ``math.inf`` means not before somebody calls :meth:`wake_by`. ``overslept`` is how many
    seconds the call comes late: whoever judges others by the time that passed must not hold that against them. There is no
    ticking: between two calls nothing runs. What ``step`` raises ends :meth:`run`.
    """

    def __init__(self, step: Callable[[float], Awaitable[float]], *, first: float = math.inf) -> None:
        self._step = step
        self._due = first
        self._sleep: anyio.CancelScope | None = None

    @property
    def due(self) -> float:
        """When the next call is due."""
        return self._due

    def wake_by(self, when: float) -> None:
        """Let the next call happen at ``when``, where that is sooner than planned."""
        if when < self._due:
            self._due = when
            if self._sleep is not None:
                self._sleep.deadline = when

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            await self._until_due()
            late = anyio.current_time() - self._due
            self._due = math.inf  # so that a wake_by during the step counts
            self._due = min(self._due, await self._step(max(0.0, late)))

    async def _until_due(self) -> None:
        if self._due <= anyio.current_time():
            await anyio.lowlevel.checkpoint()
            return
        self._sleep = anyio.CancelScope(deadline=self._due)
        with self._sleep:
            try:
                await anyio.sleep_forever()
            finally:
                self._sleep = None
