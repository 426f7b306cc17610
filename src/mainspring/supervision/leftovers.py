"""Threads that a run leaves behind: Python waits for them at the end of a program, for ever where they never return."""

from __future__ import annotations

import os
import sys
import threading
from typing import TYPE_CHECKING

from mainspring import clock
from mainspring.last_resort import last_words
from mainspring.stacks import all_stacks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import FrameType

_WAITING = frozenset({"anyio", "asyncio", "concurrent", "queue", "threading"})
"""Modules that a pool's idle thread stands in, and nothing else."""
LOOK = 0.1
"""Seconds between looks whether they have ended after all."""


class Leftovers:
    """Sees to it that the process ends although threads of a run do not.

    Made when a run begins: threads that live by then are not the run's. ``limit`` is an instant of the system's monotonic
    clock. Nothing happens while the main thread goes on with something else, since only the end of the program waits.
    """

    def __init__(self) -> None:
        self._before = {thread.ident for thread in threading.enumerate()}

    def threads(self) -> list[threading.Thread]:
        """The run's threads that would hold up the end of the program: no daemons, and not idle in a pool."""
        frames = sys._current_frames()  # noqa: SLF001 - the only way to see another thread's stack
        return [
            thread
            for thread in threading.enumerate()
            if not thread.daemon
            and thread is not threading.main_thread()
            and thread.ident not in self._before
            and thread.ident in frames
            and not _is_idle(frames[thread.ident])
        ]

    def leave_by(self, limit: float, status: int, explain: Callable[[], str]) -> None:
        """Once the main thread has ended and ``limit`` is past, leave with ``status`` if threads are still at work."""
        args = (self.threads(), limit, status, explain)
        threading.Thread(target=_leave, args=args, name="mainspring-leftovers", daemon=True).start()


def _is_idle(frame: FrameType | None) -> bool:
    while frame is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in _WAITING:
            return False
        frame = frame.f_back
    return True


def _leave(threads: Iterable[threading.Thread], limit: float, status: int, explain: Callable[[], str]) -> None:
    threading.main_thread().join()
    for thread in threads:
        while thread.is_alive() and clock.monotonic() < limit:
            thread.join(LOOK)
    left = [thread for thread in threads if thread.is_alive()]
    if left:
        stacks = all_stacks(without=(threading.get_ident(),))
        last_words(
            lambda: (
                f"mainspring: {len(left)} thread(s) that handlers had left behind did not end; leaving with status {status}\n"
                f"{explain()}\nThe stacks of its threads:\n{stacks}"
            )
        )
        os._exit(status)
