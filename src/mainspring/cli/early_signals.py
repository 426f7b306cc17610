"""Signals between the start of the process and the moment its group takes them over.

Until a process installs a handler, SIGTERM kills it, or, where it is the first of a container, is ignored. ``mainspring
run`` therefore has its own in place before it imports the user's module, and does not wait for an import that is slow.
"""

from __future__ import annotations

import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mainspring.core import process
from mainspring.runtime.signals import EarlySignals

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType


class Interrupted(BaseException):
    """A signal that ends an import or another step before the start; no ``Exception``, which imported code might swallow."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)


class CommandSignals(EarlySignals):
    """Holds early signals for the receiver of the group, and can let one end an import. A second ends the process."""

    def __init__(self) -> None:
        self._raising = False
        super().__init__()

    @classmethod
    def install(cls) -> CommandSignals:
        """Return the process's one, its handlers in place (main thread only)."""
        early = process.current("early signals")
        return early if isinstance(early, cls) else cls()

    def _hold(self, signum: int, frame: FrameType | None) -> None:
        super()._hold(signum, frame)
        if self._raising:
            raise Interrupted(signum)

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """Let a signal end this block by :class:`Interrupted`: an import can take longer than there is time to wait."""
        self._check()
        self._raising = True
        try:
            yield
        finally:
            self._raising = False
        self._check()  # code in the block may have swallowed it

    def _check(self) -> None:
        if self.held:
            raise Interrupted(self.held[0])
