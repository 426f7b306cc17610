"""What a signal handler does, done between any two lines of a call: Python lets handlers in exactly there."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType


class Interruption:
    """Calls ``handler()`` once, as this thread comes to the ``at``-th line of ``modules`` inside the block (from 0)."""

    def __init__(self, modules: tuple[ModuleType, ...], at: int, handler: Callable[[], object]) -> None:
        self._files = {module.__file__ for module in modules}
        self._left = at
        self._handler = handler
        # Held for as long as this object: a garbage collection as Python 3.11 is about to call it runs code that is traced as
        # well. Where that is the one to let go of it, Python would call what is no more: a segmentation fault, or worse.
        self._tracer = self._trace
        self.happened = False

    def _trace(self, frame: Any, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename not in self._files:
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
        self._before = sys.gettrace()
        sys.settrace(self._tracer)
        return self

    def __exit__(self, *error: object) -> None:
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
