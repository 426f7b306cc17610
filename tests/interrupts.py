"""What a signal handler does, done between any two lines of a call: Python lets handlers in exactly there."""

from __future__ import annotations

import gc
import sys
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType


class Interruption:
    """Calls ``handler()`` once, as this thread comes to the ``at``-th line of ``modules`` inside the block (from 0).

    A package stands for all the modules in it. With ``thread`` it is a thread of that name that starts inside the block, and
    not this one; of several the first to come there. Its lines count once ``begin()`` is called.

    With ``then=(lines, handler)`` that handler is called once, that number of lines later.
    """

    def __init__(
        self,
        modules: tuple[ModuleType, ...],
        at: int,
        handler: Callable[[], object],
        *,
        then: tuple[int, Callable[[], object]] | None = None,
        thread: str | None = None,
    ) -> None:
        self._files = tuple((module.__file__ or "").removesuffix("__init__.py") for module in modules)
        self._points = [(at, handler)] if then is None else [(at, handler), (then[0] - 1, then[1])]
        self._passed = 0
        self._thread = thread
        self._begun = thread is None
        # Held for as long as this object: a garbage collection as Python 3.11 is about to call it runs code that is traced as
        # well. Where that is the one to let go of it, Python would call what is no more: a segmentation fault, or worse.
        self._tracer = self._trace
        self.happened = False
        """True once the first handler was called."""
        self.ended = False
        """True once all were."""

    def _trace(self, frame: Any, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(self._files):
            return None
        if self._thread is not None and threading.current_thread().name != self._thread:
            return None
        if event == "line" and self._begun and not self.ended:
            at, handler = self._points[0]
            if self._passed < at:
                self._passed += 1
            else:
                del self._points[0]
                self._passed = 0
                self.happened, self.ended = True, not self._points
                if self.ended:
                    sys.settrace(None)
                handler()
        return self._tracer

    def begin(self) -> None:
        """Count the lines from now on."""
        self._begun = True

    def __enter__(self) -> Interruption:
        # A collection would run finalizers of other tests' objects in the middle of a line, with a lock held maybe.
        self._collects = gc.isenabled()
        gc.disable()
        if self._thread is not None:
            threading.settrace(self._tracer)
        else:
            self._before = sys.gettrace()
            sys.settrace(self._tracer)
        return self

    def __exit__(self, *error: object) -> None:
        if self._thread is not None:
            threading.settrace(None)  # type: ignore[arg-type]
        else:
            sys.settrace(self._before)
        if self._collects:
            gc.enable()


def in_thread(fn: Callable[[], object], seconds: float = 30) -> None:
    """Call ``fn()`` in a thread of its own; fails where it raises, or hangs."""
    errors: list[BaseException] = []

    def call() -> None:
        try:
            fn()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "it hangs"
    if errors:
        raise errors[0]
