"""``ForeignLoop``: a loop of foreign make, steered by the little that ``Runnable`` promises."""

from __future__ import annotations

import inspect
import math
from typing import TYPE_CHECKING, Any

import anyio

from mainspring.callables import is_async
from mainspring.stacks import where
from mainspring.values import MAX_DELAY

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mainspring.errors import HandlerStalledError
    from mainspring.heartbeat import Heartbeat
    from mainspring.loops.base import Runnable


class ForeignLoop:
    """Adapts a ``Runnable`` to what an actor steers by: intake stops by its ``shutdown``, work is cancelled with its run, and
    it is paused by plain methods ``pause`` and ``resume``, where it has them.

    For the watchdog it is one piece: its heartbeat counts, and a stall ends its run with the error, as a crash.
    """

    def __init__(self, loop: Runnable) -> None:
        self.loop = loop
        self.name = str(getattr(loop, "name", None) or type(loop).__name__)
        self.pausable: bool = all(_is_plain(getattr(loop, name, None)) for name in ("pause", "resume"))
        self.paused = False
        self.shutdown_timeout: float | None = _option(loop, "shutdown_timeout", None)
        self.shutdown_priority: int = _option(loop, "shutdown_priority", 0)
        self.claims: Sequence[Any] = ()
        self.on_stop: Callable[[], object] | None = None
        self._scope: anyio.CancelScope | None = None
        self._stop = anyio.Event()
        self._subject: _ForeignRun | None = None

    def __repr__(self) -> str:
        return f"<ForeignLoop {self.name!r}>"

    async def run(self, **keywords: Any) -> None:
        """Run the loop with those of ``keywords`` that it accepts; its ``shutdown`` is called from here when it is time."""
        accepted = _accepted(self.loop.run, keywords)
        self._stop = anyio.Event()
        self._scope = anyio.CancelScope()
        self._subject = subject = _ForeignRun(self.name, self.loop, self._scope)
        self.loop.heartbeat.beat()  # from here on: how long ago an earlier run gave its last sign of life says nothing
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._shut_down_when_told)
                with self._scope:
                    subject.coroutine = self.loop.run(**accepted)
                    await subject.coroutine
                tasks.cancel_scope.cancel()
        finally:
            self._scope = self._subject = None
            subject.done = True
            subject.coroutine = None
        if subject.error is not None:
            raise subject.error

    async def _shut_down_when_told(self) -> None:
        await self._stop.wait()
        # How long it may take is the group's to say, which cancels this task in its own time.
        await self.loop.shutdown(timeout=MAX_DELAY)

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
        if self.on_stop is not None:
            self.on_stop()

    def pause(self) -> None:
        """Call its ``pause``."""
        self._switch("pause")
        self.paused = True

    def resume(self) -> None:
        """Call its ``resume``."""
        self._switch("resume")
        self.paused = False

    async def wait_paused(self) -> None:
        """It is paused when its ``pause`` has returned."""

    def _switch(self, name: str) -> None:
        getattr(self.loop, name)()

    def cancel_work(self) -> None:
        """Cancel its run."""
        if self._scope is not None:
            self._scope.cancel()

    abort = cancel_work

    @property
    def runs(self) -> Sequence[_ForeignRun]:
        """Its run, as the one subject that beats."""
        return (self._subject,) if self._subject is not None else ()

    @property
    def in_flight(self) -> int:
        """What it says, where it says so."""
        return int(_option(self.loop, "in_flight", 0))

    @property
    def trouble(self) -> str | None:
        """What it says, where it says so."""
        trouble: str | None = _option(self.loop, "trouble", None)
        return trouble


class _ForeignRun:
    """One run of a foreign loop, as a subject of the watchdog: a run that follows a stall is another subject."""

    message_id: str | None = None

    def __init__(self, name: str, loop: Runnable, scope: anyio.CancelScope) -> None:
        self.name = name
        self.done = False
        self.error: HandlerStalledError | None = None
        self.coroutine: Any = None
        self._loop = loop
        self._scope = scope

    def beat_age(self) -> float:
        """Seconds since the loop's heartbeat."""
        return self._loop.heartbeat.elapsed()

    def where(self) -> str:
        """The line that its ``run`` waits on; tasks of its own making are not known."""
        return where(self.coroutine)

    def stall(self, error: HandlerStalledError) -> None:
        """End the run with ``error``."""
        self.error = error
        self._scope.cancel()


def _option(loop: object, name: str, default: Any) -> Any:
    value = getattr(loop, name, default)
    return default if callable(value) or (isinstance(value, float) and math.isnan(value)) else value


def _is_plain(fn: object) -> bool:
    return callable(fn) and not is_async(fn)


def _accepted(fn: Any, keywords: dict[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(fn).parameters.values()
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return keywords
    names = {p.name for p in parameters}
    return {name: value for name, value in keywords.items() if name in names}
