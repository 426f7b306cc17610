"""Threads that a run leaves behind: Python waits for them at the end of a program, for ever where they never return."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

from mainspring.core import clock
from mainspring.core.tracebacks import all_stacks, where_thread
from mainspring.runtime.hard_exit import last_words
from mainspring.runtime.shutdown_report import Ending, PartReport

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mainspring.runtime.shutdown_report import ShutdownReport


class ThreadLeaks:
    """Ends the process although threads of a run do not end.

    Made when a run begins: threads that are alive by then are not the run's. ``limit`` is an instant of the system's monotonic
    clock. Nothing happens while the main thread goes on with something else, since only the end of the program waits for them.
    """

    def __init__(self) -> None:
        self._before = {thread.ident for thread in threading.enumerate()}

    def threads(self) -> list[threading.Thread]:
        """Return the run's threads that would hold up the end of the program, those included that a pool is about to end."""
        return [
            thread
            for thread in threading.enumerate()
            if not thread.daemon and thread is not threading.main_thread() and thread.ident not in self._before
        ]

    def leave_by(self, limit: float, status: int, report: ShutdownReport) -> None:
        """Leave with ``status`` if threads are still at work once the main thread has ended and ``limit`` is past."""
        args = (self.threads(), limit, status, report)
        threading.Thread(target=_leave, args=args, name="mainspring-thread-leaks", daemon=True).start()


def _leave(threads: Iterable[threading.Thread], limit: float, status: int, report: ShutdownReport) -> None:
    began = clock.monotonic()
    for thread in threads:
        thread.join(max(0.0, limit - clock.monotonic()))
    if not any(thread.is_alive() for thread in threads):
        return
    threading.main_thread().join()
    left = [thread for thread in threads if thread.is_alive()]
    if left:
        stacks = all_stacks(without=(threading.get_ident(),))
        waited = clock.monotonic() - began
        stuck = [
            PartReport(
                f"thread {one.name!r}", Ending.STUCK, waited, tuple(filter(None, (where_thread(one.ident or 0),)))
            )
            for one in left
        ]
        told = replace(report, parts=(*report.parts, *stuck))
        last_words(
            lambda: (
                f"mainspring: {len(left)} thread(s) that handlers had left behind did not end; leaving with status {status}\n"
                f"{told}\nThe stacks of its threads:\n{stacks}"
            )
        )
        os._exit(status)
