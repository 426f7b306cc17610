"""Event loops of a ``LoopThread`` in which a test takes part: as they begin, as they are woken, and as they end."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import trio
import uvloop

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def nothing() -> None:
    """Do nothing."""


def taking_part(
    backend: str,
    options: Mapping[str, Any],
    *,
    at_begin: Callable[[], object] = nothing,
    at_end: Callable[[], object] = nothing,
    at_wake: Callable[[], object] = nothing,
) -> dict[str, Any]:
    """``backend_options`` of a LoopThread that call these: in its thread before the event loop runs and after it has run
    for the last time, and in any thread that wakes it (not on trio). They may block, and on asyncio raise.
    """
    if backend == "trio":

        class Instrument(trio.abc.Instrument):
            def before_run(self) -> None:
                at_begin()

            def after_run(self) -> None:
                at_end()

        return {"instruments": [Instrument()]}

    class EventLoop(uvloop.Loop if options.get("use_uvloop") else asyncio.SelectorEventLoop):  # type: ignore[misc]
        def call_soon_threadsafe(self, *call: Any, **keywords: Any) -> Any:
            at_wake()
            return super().call_soon_threadsafe(*call, **keywords)

        def close(self) -> None:
            try:
                if not self.is_closed():
                    at_end()
            finally:
                super().close()

    def made() -> Any:
        at_begin()
        return EventLoop()

    return {"use_uvloop": False, "loop_factory": made}
