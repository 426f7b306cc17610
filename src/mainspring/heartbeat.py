"""Signs of life: who beats is alive, who has not beaten for long is judged by the watchdog."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from mainspring import clock

if TYPE_CHECKING:
    from collections.abc import Callable


class Heartbeat:
    """When something last gave a sign of life. A new one counts as just beaten.

    On an event loop it follows anyio's clock (so virtual time reaches it); a beat from a thread without one is stamped with
    the system's monotonic clock. :meth:`beat` may be called from any thread.
    """

    __slots__ = ("_callbacks", "_loop_time", "_monotonic")

    def __init__(self) -> None:
        self._callbacks: tuple[Callable[[], object], ...] = ()
        self._loop_time: float | None = None
        self._monotonic = 0.0
        self._stamp()

    def beat(self) -> None:
        """Give a sign of life, and call the callbacks in the order in which they were added (in this thread).

        What a callback raises comes out of ``beat`` after the others were called.
        """
        self._stamp()
        failed: BaseException | None = None
        for callback in self._callbacks:
            try:
                callback()
            except Exception as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def elapsed(self) -> float:
        """Seconds since the last beat."""
        if self._loop_time is not None:
            try:
                return max(0.0, anyio.current_time() - self._loop_time)
            except RuntimeError:  # asked from a thread without an event loop
                pass
        return max(0.0, clock.monotonic() - self._monotonic)

    def add_callback(self, callback: Callable[[], object]) -> None:
        """Call ``callback()`` at each beat from now on."""
        self._callbacks = (*self._callbacks, callback)

    def remove_callback(self, callback: Callable[[], object]) -> None:
        """Stop calling it; one that was never added is ignored."""
        self._callbacks = tuple(other for other in self._callbacks if other != callback)

    def _stamp(self) -> None:
        self._monotonic = clock.monotonic()
        try:
            self._loop_time = anyio.current_time()
        except RuntimeError:  # no event loop in this thread
            self._loop_time = None
