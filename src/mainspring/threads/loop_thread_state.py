"""The states of a ``LoopThread``, and how its threads wait for one: without a lock, so that a signal handler can do the same.

A handler runs in the midst of whatever the main thread does, a start or a stop of the same object among it. Were a lock held
there, the thread that the handler waits for would wait for that lock.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Final

from mainspring.core.state_machine import LOOP_THREAD, LoopThreadState

IDLE, STARTING, RUNNING = LoopThreadState.IDLE, LoopThreadState.STARTING, LoopThreadState.RUNNING
STOPPING, STOPPED = LoopThreadState.STOPPING, LoopThreadState.STOPPED

JOIN_WITHIN: Final = 1.0
"""Seconds that are waited for a thread whose work is over to be gone: it has a few instructions left."""


class Life:
    """The state, which any thread moves on. The first thread to leave a state decides where to, in one atomic step."""

    def __init__(self) -> None:
        self.left: Final[dict[LoopThreadState, LoopThreadState]] = {}
        """Where each state that has been left went to. To be read; :meth:`leave` writes it."""

    @property
    def state(self) -> LoopThreadState:
        """The present one."""
        state = IDLE
        while state in self.left:
            state = self.left[state]
        return state

    @property
    def was_started(self) -> bool:
        """Whether it has had, or will have, a thread."""
        return self.left.get(IDLE) is STARTING

    def leave(self, old: LoopThreadState, new: LoopThreadState) -> None:
        """Go from ``old`` to ``new``, unless ``old`` was left before."""
        assert new in LOOP_THREAD[old]
        self.left.setdefault(old, new)

    def end(self) -> None:
        """Go on to the last state, from wherever it is."""
        self.leave(STARTING, STOPPED)
        if self.left[STARTING] is RUNNING:
            self.leave(RUNNING, STOPPING)
        if STOPPING in self.left.values():
            self.leave(STOPPING, STOPPED)

    def ask_to_stop(self) -> None:
        """Go on to where it takes nothing more, unless it is there, or beyond that."""
        self.leave(IDLE, STOPPED)
        if self.was_started:
            self.leave(STARTING, STOPPING)
            if self.left[STARTING] is RUNNING:
                self.leave(RUNNING, STOPPING)


class Gate:
    """What threads wait for, and one opens: a :class:`threading.Event` whose waiters hold nothing that is needed to open it."""

    def __init__(self) -> None:
        self._shut = threading.Lock()
        self._shut.acquire()
        self.is_open = False

    def open(self) -> None:
        """Let all through, now and later; idempotent."""
        self.is_open = True
        self._let_through()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until it is open, at most ``seconds``. True if it is."""
        # Each lets the next one through. One that comes in between those two steps finds it open.
        if not self.is_open and self._shut.acquire(
            timeout=-1 if seconds is None else min(seconds, threading.TIMEOUT_MAX)
        ):
            self._let_through()
        return self.is_open

    def _let_through(self) -> None:
        with suppress(RuntimeError):  # two have opened it at once
            self._shut.release()
