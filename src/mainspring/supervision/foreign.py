"""A loop of foreign make, steered by the little that ``Runnable`` promises."""

from __future__ import annotations

import inspect
import math
from typing import TYPE_CHECKING, Any

import anyio

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mainspring.errors import HandlerStalledError
    from mainspring.heartbeat import Heartbeat
    from mainspring.loops.base import Runnable


class ForeignLoop:
    """Adapts a ``Runnable`` to what a group steers by: intake stops by its ``shutdown``, work is cancelled with its run.

    As a subject of the watchdog it is one piece: its heartbeat counts, and a stall ends its run with the error, as a crash.
    """

    message_id: str | None = None

    def __init__(self, loop: Runnable, name: str) -> None:
        self.loop = loop
        self.name = name
        self.shutdown_timeout: float | None = _option(loop, "shutdown_timeout", None)
        self.shutdown_priority: int = _option(loop, "shutdown_priority", 0)
        self._scope: anyio.CancelScope | None = None
        self._stop = anyio.Event()
        self._stalled: HandlerStalledError | None = None

    def __repr__(self) -> str:
        return f"<ForeignLoop {self.name!r}>"

    async def run(self, **keywords: Any) -> None:
        """Run the loop with those of ``keywords`` that it accepts; its ``shutdown`` is called from here when it is time."""
        self._stop = anyio.Event()
        self._stalled = None
        accepted = _accepted(self.loop.run, keywords)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._shut_down_when_told)
            with anyio.CancelScope() as self._scope:
                await self.loop.run(**accepted)
            tasks.cancel_scope.cancel()
        if self._stalled is not None:
            raise self._stalled

    async def _shut_down_when_told(self) -> None:
        await self._stop.wait()
        # How long it may take is the group's to say, which cancels this task in its own time.
        await self.loop.shutdown(timeout=_LONG)

    async def shutdown(self, *, timeout: float = 30.0) -> bool:
        """The loop's own."""
        return await self.loop.shutdown(timeout=timeout)

    @property
    def running(self) -> bool:
        """The loop's own."""
        return self.loop.running

    @property
    def heartbeat(self) -> Heartbeat:
        """The loop's own."""
        return self.loop.heartbeat

    def announce_shutdown(self) -> None:
        """A foreign loop hears of a shutdown when it is told to stop."""

    def stop_intake(self) -> None:
        """Have its ``shutdown`` called."""
        self._stop.set()

    def cancel_work(self) -> None:
        """Cancel its run."""
        if self._scope is not None:
            self._scope.cancel()

    abort = cancel_work

    @property
    def runs(self) -> Sequence[Any]:
        """Itself, as the one subject that beats."""
        return (self,) if self.running else ()

    @property
    def in_flight(self) -> int:
        """What it says, where it says so."""
        return int(_option(self.loop, "in_flight", 0))

    @property
    def trouble(self) -> str | None:
        """What it says, where it says so."""
        trouble: str | None = _option(self.loop, "trouble", None)
        return trouble

    # ------------------------------------------------------------------------------------- a subject of the watchdog

    @property
    def done(self) -> bool:
        """Whether its run has ended."""
        return not self.running

    def beat_age(self) -> float:
        """Seconds since its heartbeat."""
        return self.loop.heartbeat.elapsed()

    def where(self) -> str:
        """A foreign loop's tasks are not known."""
        return ""

    def stall(self, error: HandlerStalledError) -> None:
        """End its run with ``error``."""
        self._stalled = error
        self.cancel_work()


_LONG = 366 * 86_400.0


def _option(loop: object, name: str, default: Any) -> Any:
    value = getattr(loop, name, default)
    return default if callable(value) or (isinstance(value, float) and math.isnan(value)) else value


def _accepted(fn: Any, keywords: dict[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(fn).parameters.values()
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return keywords
    names = {p.name for p in parameters}
    return {name: value for name, value in keywords.items() if name in names}
