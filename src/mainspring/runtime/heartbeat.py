"""Signs of life: the watchdog judges work that has not beaten for long."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mainspring.core import clock
from mainspring.core.introspection import check_runs, is_async, unrun
from mainspring.core.loggers import Logger
from mainspring.errors import InvalidParameterError

if TYPE_CHECKING:
    from collections.abc import Callable

_log = Logger("mainspring")


class Heartbeat:
    """When something last gave a sign of life. A new one counts as just beaten.

    It follows the system's monotonic clock. So :meth:`beat` and :meth:`elapsed` may be called from any thread and on any
    event loop. Under a virtual clock it follows that. Threads cannot read it: a beat from a thread counts there from the first
    look at it.
    """

    __slots__ = ("_callbacks", "_stamp")

    def __init__(self) -> None:
        self._callbacks: tuple[Callable[[], object], ...] = ()
        self._stamp = _now()

    def beat(self) -> None:
        """Give a sign of life, and call the callbacks in the order in which they were added (in this thread).

        A callback that raises is logged (logger ``mainspring``) and harms neither the next nor the one who beats.
        """
        running = clock.virtual_clock()
        self._stamp = clock.monotonic(), None if running is None else float(running.current_time())
        for callback in self._callbacks:
            try:
                if (what := unrun(callback())) is not None:
                    _log.error("the heartbeat callback %r returned %s, which nothing runs", callback, what)
            except KeyboardInterrupt:
                raise
            except BaseException:  # a plain function cannot be cancelled: what it raises so is of something else
                _log.exception("the heartbeat callback %r raised", callback)

    def elapsed(self) -> float:
        """Return the seconds since the last beat."""
        real, virtual = self._stamp
        running = clock.virtual_clock()
        if running is None:
            return max(0.0, clock.monotonic() - real)
        now = float(running.current_time())
        if virtual is None:
            self._stamp = (real, now)
            return 0.0
        return max(0.0, now - virtual)

    def add_callback(self, callback: Callable[[], object]) -> None:
        """Call ``callback()`` at each beat from now on.

        :raises InvalidParameterError: it is async, or cannot be called, or a call would run nothing of it.
        """
        if not callable(callback) or is_async(callback):
            what = "async" if callable(callback) else "no function"
            raise InvalidParameterError(f"a heartbeat callback is a plain function, and {callback!r} is {what}")
        check_runs(callback, "the heartbeat callback", error=InvalidParameterError)
        self._callbacks = (*self._callbacks, callback)

    def remove_callback(self, callback: Callable[[], object]) -> None:
        """Stop calling it; one that was never added is ignored."""
        self._callbacks = tuple(other for other in self._callbacks if other != callback)


def _now() -> tuple[float, float | None]:
    """Return the monotonic clock, or the virtual one if that rules: one object, so that another thread never sees half."""
    running = clock.virtual_clock()
    return clock.monotonic(), None if running is None else float(running.current_time())
