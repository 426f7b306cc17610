"""What a virtual run does when every task is blocked: advance time, wait for real work, or report a deadlock."""

from __future__ import annotations

import math
import sys
from types import CoroutineType, GeneratorType
from typing import TYPE_CHECKING, Any

import trio

from mainspring.core.tracebacks import where
from mainspring.errors import MainspringError
from mainspring.testing.trio_internals import (
    descendants,
    expire_deadlines,
    interrupt,
    replace_autojump,
    stop_real_time,
)

if TYPE_CHECKING:
    from trio.testing import MockClock

PATIENCE = 60.0
"""Real seconds without progress of a thread, a process or a socket after which a virtual run counts as stuck."""
GRACE = 1.0
"""Real seconds to wait if no real work is known: a thread that trio does not know of may still call in."""


class DeadlockError(MainspringError):
    """Every task of a virtual run is blocked, no deadline is pending, and no real work has ended: it would hang for ever.

    The message names each task and the line on which it waits.
    """

    fault = "caller"


class IdleJudge(trio.abc.Instrument):
    """Replaces the automatic jump of ``MockClock``.

    The clock stands still while a task waits for ``to_thread.run_sync`` or ``run_process``, or holds it
    (:func:`mainspring.core.clock.real_work`). Waiting for real things blocks the event loop in the kernel; it does not spin.
    """

    def __init__(self, clock: MockClock, *, can_leave: bool) -> None:
        self.patience = PATIENCE
        self.error: DeadlockError | None = None
        self._clock = clock
        self._can_leave = can_leave
        self._scope: trio.CancelScope | None = None
        self._main: trio.lowlevel.Task | None = None
        self._waiting = False
        self._verdicts = 0
        vars(clock)["_mainspring_idle"] = self
        replace_autojump(clock, self._idle)
        stop_real_time(clock)

    async def watch(self, async_fn: Any, *args: Any, **keywords: Any) -> Any:
        """Run ``async_fn`` under the judge. Raise :class:`DeadlockError` if it gets stuck."""
        self._main, self._scope, self.error, self._verdicts = trio.lowlevel.current_task(), trio.CancelScope(), None, 0
        try:
            with self._scope:
                return await async_fn(*args, **keywords)
        except BaseException as error:
            if self.error is None or error is self.error:
                raise
            raise self.error from error
        finally:
            self._main = self._scope = None
        if self.error is not None:
            raise self.error
        return None

    def _idle(self) -> None:
        """Advance time, wait or judge: all tasks are blocked and no I/O is ready."""
        statistics = trio.lowlevel.current_statistics()
        jump = statistics.seconds_to_next_deadline
        out = self._real_work(statistics)
        if self._held() or self._waiting:  # the wait has ended without progress
            self._judge(out)
        elif jump < math.inf and out is None:
            if jump > 0:
                self._clock.jump(jump)
            expire_deadlines(self._clock.current_time())
        elif self._main is not None:
            patient = out is not None or _waits_for_io(statistics) or trio.testing.active_thread_count()
            self._wait(self.patience if patient and not self._verdicts else min(GRACE, self.patience))

    def _held(self) -> bool:
        return bool(vars(self._clock).get("_mainspring_holds"))

    def _wait(self, seconds: float) -> None:
        """Let the event loop block for that many real seconds, or until any task runs."""
        self._waiting = True
        self._clock.autojump_threshold = seconds
        trio.lowlevel.add_instrument(self)

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        """Stop waiting: a task runs."""
        self._stop_waiting()

    def _stop_waiting(self) -> None:
        if self._waiting:
            self._waiting = False
            self._clock.autojump_threshold = 0.0
            trio.lowlevel.remove_instrument(self)

    def _judge(self, out: str | None) -> None:
        self._stop_waiting()
        if self._main is None or self._scope is None:
            return
        if self.error is None:
            self.error = DeadlockError(self._describe(out))
        self._verdicts += 1
        if self._verdicts == 1:
            self._scope.cancel()
        elif self._verdicts == 2:  # a shield without a deadline stopped the cancellation
            for task in list(descendants(self._main)):
                interrupt(task, self.error)
        elif self._can_leave:  # a thread does not return: abandon the event loop
            raise self.error
        elif self._verdicts == 3:
            print(f"mainspring: {self.error}", file=sys.stderr, flush=True)  # noqa: T201 - there is no other way out

    def _describe(self, out: str | None) -> str:
        now = self._clock.current_time()
        if self._held():
            why = f"the clock was held, and no real work ended for {self.patience:g} real seconds"
        elif out is not None:
            why = f"{out} did not end within {self.patience:g} real seconds"
        else:
            why = "every task is blocked and no deadline is pending, so nothing can happen any more"
        assert self._main is not None
        lines = [f"  {task.name}: {where(task.coro) or 'not started'}" for task in descendants(self._main)]
        return "\n".join([f"stuck at virtual second {now:g}: {why}. The tasks wait here:", *lines])

    def _real_work(self, statistics: Any) -> str | None:
        """Return the kind of real call that a task waits for, or None."""
        if self._main is None or not (_waits_for_io(statistics) or trio.testing.active_thread_count()):
            return None
        return next(filter(None, (_real_call(task.coro) for task in descendants(self._main))), None)


def _waits_for_io(statistics: Any) -> bool:
    """True if a task waits for a socket, a pipe or a process. One reader is trio's own, for its wake-ups."""
    io = statistics.io_statistics
    readers, writers = getattr(io, "tasks_waiting_read", 1), getattr(io, "tasks_waiting_write", 0)
    return bool(readers > 1 or writers > 0)


def _real_call(coroutine: Any) -> str | None:
    """Return ``"a thread"`` or ``"a process"`` if the coroutine waits for a call to one, else None."""
    inner = ""
    while True:
        if isinstance(coroutine, CoroutineType):
            frame, coroutine = coroutine.cr_frame, coroutine.cr_await
        elif isinstance(coroutine, GeneratorType):
            frame, coroutine = coroutine.gi_frame, coroutine.gi_yieldfrom
        else:
            break
        if frame is None:
            break
        path = frame.f_code.co_filename
        if frame.f_code.co_name == "run_process" and path.endswith(
            ("trio/_subprocess.py", "anyio/_core/_subprocesses.py")
        ):
            return "a process"
        if not path.endswith("trio/_core/_traps.py"):
            inner = path
    return "a thread" if inner.endswith("trio/_threads.py") else None
