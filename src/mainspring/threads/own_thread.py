"""``OwnThread``: a plain function in a daemon thread of its own, which an event loop waits for, and may leave behind.

Not a worker thread of anyio's: those are few, and the interpreter waits for them at its end, for ever where one never returns.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Generic, TypeVar, cast

import anyio

from mainspring.core.introspection import bearable
from mainspring.core.process import call_soon, carried_context, event_loop
from mainspring.core.tracebacks import where_thread

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class OwnThread(Generic[T]):
    """Calls ``fn()`` in a new thread, in a copy of the context in which this object is made."""

    def __init__(self, fn: Callable[[], T], name: str) -> None:
        self.name = name
        self._fn = fn
        self._loop = event_loop()
        self._context = carried_context(None)
        self.ended = anyio.Event()
        """Set, on the event loop, once ``fn`` has ended."""
        self._value: T | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._call, name=name, daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """True once ``fn`` has ended; callable from any thread."""
        return self.ended.is_set() or not self._thread.is_alive()

    @property
    def where(self) -> str:
        """The line that it executes; an empty string once it has ended."""
        return "" if self.done or self._thread.ident is None else where_thread(self._thread.ident)

    async def wait(self) -> T:
        """Wait for the end of ``fn``: its result or its error, once. Cancelled, it leaves the thread at work.

        :raises TaskExitError: ``fn`` raised ``SystemExit``, ``KeyboardInterrupt`` or a cancellation.
        """
        await self.ended.wait()
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
            return cast("T", self._value)
        finally:
            del error  # its traceback refers to this frame

    async def wait_ended(self, seconds: float) -> bool:
        """Wait at most ``seconds`` for its end, also in a scope that is cancelled; True where it has ended."""
        with anyio.move_on_after(seconds, shield=True):
            await self.ended.wait()
        return self.done

    def _call(self) -> None:
        try:
            self._value = self._context.run(self._fn)
        except BaseException as error:
            self._error = bearable(error, self.name)
        finally:
            call_soon(self._loop, self.ended.set)
