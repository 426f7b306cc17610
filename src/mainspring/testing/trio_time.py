"""Virtual time on trio: its ``MockClock``, whose automatic jump the judge replaces."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from mainspring.core import clock
from mainspring.core.tracebacks import await_chain
from mainspring.testing.idle import IdleJudge, VirtualTime
from mainspring.testing.trio_internals import (
    descendants,
    expire_deadlines,
    interrupt,
    replace_autojump,
    require_trio,
    seeded_schedule,
    stop_real_time,
)

require_trio()

import trio.testing  # noqa: E402 - the line above tells how to install it

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator
    from contextlib import AbstractContextManager

_PROCESS_CALLS = ("trio/_subprocess.py", "anyio/_core/_subprocesses.py")


class TrioTime(VirtualTime, trio.abc.Instrument):
    """Virtual time in one run of trio."""

    def __init__(self, *, can_leave: bool) -> None:
        self.clock = trio.testing.MockClock(autojump_threshold=0)
        self.options = {"clock": self.clock}
        self.judge = IdleJudge(self, can_leave=can_leave)
        self._waiting = False
        self._statistics: Any = None  # as of the last time when all tasks were blocked
        replace_autojump(self.clock, self._idle)
        stop_real_time(self.clock)

    def seeded(self, seed: int) -> AbstractContextManager[None]:
        return seeded_schedule(seed)

    def _idle(self) -> None:
        """Ask the judge: all tasks are blocked, no I/O is ready, and the real seconds that it asked for are over."""
        waited = self._waiting or clock.is_held(
            self.clock
        )  # a hold lets trio wait for as long as the judge has patience
        self._stop_waiting()
        self._statistics = trio.lowlevel.current_statistics()
        seconds = self.judge.idle(waited=waited)
        if 0 < seconds < math.inf:
            self._waiting = True
            self.clock.autojump_threshold = seconds
            trio.lowlevel.add_instrument(self)

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        """Stop waiting: a task runs."""
        self._stop_waiting()

    def _stop_waiting(self) -> None:
        if self._waiting:
            self._waiting = False
            self.clock.autojump_threshold = 0.0
            trio.lowlevel.remove_instrument(self)

    def until_next(self) -> float:
        return float(self._statistics.seconds_to_next_deadline)

    def advance_to_next(self) -> None:
        if (jump := self.until_next()) > 0:
            self.clock.jump(jump)
        expire_deadlines(self.clock.current_time())

    def real_work(self, main: Any) -> str | None:
        if main is None or not self.may_be_woken():
            return None
        return next(filter(None, (_real_call(task.coro) for task in descendants(main))), None)

    def may_be_woken(self) -> bool:
        """True if a task waits for a socket, a pipe or a process, or a thread is out. One reader is trio's own, to be woken."""
        io = self._statistics.io_statistics
        readers, writers = getattr(io, "tasks_waiting_read", 1), getattr(io, "tasks_waiting_write", 0)
        return bool(readers > 1 or writers > 0 or trio.testing.active_thread_count())

    def current_task(self) -> trio.lowlevel.Task:
        return trio.lowlevel.current_task()

    def tasks(self, main: Any) -> Iterator[tuple[str, Coroutine[Any, Any, Any]]]:
        for task in descendants(main):
            yield task.name, task.coro

    def interrupt(self, main: Any, error: BaseException) -> None:
        for task in list(descendants(main)):
            interrupt(task, error)


def _real_call(coroutine: Any) -> str | None:
    """Return ``"a thread"`` or ``"a process"`` if the coroutine waits for a call to one, else None."""
    inner = ""
    for frame, _ in await_chain(coroutine):
        path = frame.f_code.co_filename
        if frame.f_code.co_name == "run_process" and path.endswith(_PROCESS_CALLS):
            return "a process"
        if not path.endswith("trio/_core/_traps.py"):
            inner = path
    return "a thread" if inner.endswith("trio/_threads.py") else None
