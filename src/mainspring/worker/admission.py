"""``Intake``: whether a worker takes work: it does, it has been told to pause, or it has been told to stop for good."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from mainspring.threads.entry import AnywhereEvent

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from mainspring.runtime.heartbeat import Heartbeat

BEAT_EVERY = 10.0
"""Seconds between the beats of a loop that is paused: it waits, and lives."""


class Intake:
    """Runs a worker's receiving, interrupts it for a pause, and ends it for good.

    ``open`` says whether what was claimed may begin; a worker asks at every message.
    """

    def __init__(self, heartbeat: Heartbeat) -> None:
        self.open = True
        self.stopped = False
        self._heartbeat = heartbeat
        self._paused = False
        self._scope = anyio.CancelScope()
        self._changed = anyio.Event()
        self._at_rest = AnywhereEvent("pause")

    def stop(self) -> None:
        """Receive no more, paused or not: a wait for work ends at once."""
        self.stopped = True
        self.open = False
        self._scope.cancel()
        self._changed.set()
        self._at_rest.set()

    def pause(self) -> None:
        """Receive no more until :meth:`resume`: a wait for work ends at once."""
        if not self._paused:
            self._paused = True
            self.open = False
            self._changed = anyio.Event()
            self._at_rest = AnywhereEvent("pause")
            self._scope.cancel()

    def resume(self) -> None:
        """Receive again."""
        if self._paused:
            self._paused = False
            self.open = not self.stopped
            self._changed.set()
            self._at_rest.set()

    def at_rest(self) -> AnywhereEvent | None:
        """The event of a pause that holds: no claim is out and what had not begun is given back, or the pause is over."""
        return self._at_rest if self._paused else None

    async def run(self, receive: Callable[[], Awaitable[None]], hand_back: Callable[[], Awaitable[None]]) -> None:
        """Receive until that ends by itself or is stopped; each pause begins with ``hand_back()``."""
        try:
            while not self.stopped:
                if self._paused:
                    await hand_back()
                    self._at_rest.set()
                    await self._until_changed()
                else:
                    with anyio.CancelScope() as self._scope:
                        await receive()
                    if not self._scope.cancel_called:
                        return
        finally:
            self._at_rest.set()

    async def _until_changed(self) -> None:
        changed = self._changed
        while not changed.is_set():
            self._heartbeat.beat()
            with anyio.move_on_after(BEAT_EVERY):
                await changed.wait()
