"""What a signal handler does, done between any two lines of a call: Python lets handlers in exactly there."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType


class Interruption:
    """Calls ``handler()`` once, as this thread comes to the ``at``-th line of ``modules`` inside the block (from 0).

    With ``threads=True`` it is a thread that starts inside the block, and not this one; of several the first to come there.
    ``functions`` are the names of those whose lines count; None: all.
    """

    def __init__(
        self,
        modules: tuple[ModuleType, ...],
        at: int,
        handler: Callable[[], object],
        *,
        functions: tuple[str, ...] | None = None,
        threads: bool = False,
    ) -> None:
        self._files = {module.__file__ for module in modules}
        self._left = at
        self._handler = handler
        self._functions = functions
        self._threads = threads
        # Held for as long as this object: a garbage collection as Python 3.11 is about to call it runs code that is traced as
        # well. Where that is the one to let go of it, Python would call what is no more: a segmentation fault, or worse.
        self._tracer = self._trace
        self.happened = False

    def _trace(self, frame: Any, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename not in self._files:
            return None
        if self._functions is not None and frame.f_code.co_name not in self._functions:
            return None
        if event == "line" and not self.happened:
            if self._left:
                self._left -= 1
            else:
                self.happened = True
                sys.settrace(None)
                self._handler()
        return self._tracer

    def __enter__(self) -> Interruption:
        if self._threads:
            threading.settrace(self._tracer)
        else:
            self._before = sys.gettrace()
            sys.settrace(self._tracer)
        return self

    def __exit__(self, *error: object) -> None:
        if self._threads:
            threading.settrace(None)  # type: ignore[arg-type]
        else:
            sys.settrace(self._before)


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
