"""What a virtual run does when every task is blocked: advance time, wait for real work, or report a deadlock.

The judge decides, the same way for each event loop. A :class:`VirtualTime` is what it needs to know of one, and does what was
decided: ``trio_time`` and ``asyncio_time``. Real work is a call that only something outside the event loop can end, such as a
thread. While any is out, or the clock is held, time stands still, and the event loop blocks in the kernel; it does not spin.
"""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import anyio

from mainspring.core import clock
from mainspring.core.introspection import name_of
from mainspring.core.tracebacks import where
from mainspring.errors import MainspringError
from mainspring.runtime.wrong_loop import explained

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator
    from contextlib import AbstractContextManager

PATIENCE = 60.0
"""Real seconds without progress of a thread, a process or a socket after which a virtual run counts as stuck."""
GRACE = 1.0
"""Real seconds to wait if no real work is known: a thread that the event loop does not know of may still call in."""


class DeadlockError(MainspringError):
    """Every task of a virtual run is blocked, no deadline is pending, and no real work has ended: it would hang for ever.

    The message names each task and the line on which it waits.
    """

    fault = "caller"


class VirtualTime(ABC):
    """Virtual time on one kind of event loop, for one run: its clock, and what the judge asks of it."""

    clock: Any
    """The virtual clock: ``current_time()``, ``jump(seconds)``, and what :func:`mainspring.core.clock.hold` keeps on it."""
    options: dict[str, Any]
    """What ``anyio.run(backend_options=)`` takes to run on it."""

    @abstractmethod
    def seeded(self, seed: int) -> AbstractContextManager[None]:
        """Have the order of the tasks follow from ``seed`` inside the block, as far as the event loop leaves it open."""

    @abstractmethod
    def until_next(self) -> float:
        """Return the seconds to the next deadline; infinity if none is pending."""

    @abstractmethod
    def advance_to_next(self) -> None:
        """Move the clock to the next deadline, and let what is due run."""

    @abstractmethod
    def real_work(self, main: Any) -> str | None:
        """Return what real work a task waits for, as the subject of a sentence, or None."""

    @abstractmethod
    def may_be_woken(self) -> bool:
        """True if a socket, a pipe or a thread that the event loop knows of could make a task run."""

    @abstractmethod
    def current_task(self) -> Any:
        """Return the running task."""

    @abstractmethod
    def tasks(self, main: Any) -> Iterator[tuple[str, Coroutine[Any, Any, Any]]]:
        """Yield the name and the coroutine of each task of a run, in order of their starts."""

    @abstractmethod
    def interrupt(self, main: Any, error: BaseException) -> None:
        """Raise an error in each blocked task of a run, shielded or not: ``error``, or a cancellation."""


class IdleJudge:
    """Decides what an event loop in virtual time does when all its tasks are blocked and no I/O is ready."""

    def __init__(self, time: VirtualTime, *, can_leave: bool) -> None:
        self.patience = PATIENCE
        self.error: DeadlockError | None = None
        self._time = time
        self._can_leave = can_leave
        self._scope: anyio.CancelScope | None = None
        self._main: Any = None
        self._verdicts = 0
        vars(time.clock)["_mainspring_idle"] = self

    async def watch(self, async_fn: Any, *args: Any, **keywords: Any) -> Any:
        """Run ``async_fn`` under the judge. Raise :class:`DeadlockError` if it gets stuck."""
        self._main, self._scope, self.error, self._verdicts = self._time.current_task(), anyio.CancelScope(), None, 0
        try:
            with self._scope:
                return await async_fn(*args, **keywords)
        except BaseException as error:
            if self.error is not None and error is not self.error:
                raise self.error from error
            if (told := explained(error, name_of(async_fn))) is not error:
                raise told
            raise
        finally:
            self._main = self._scope = None
        if self.error is not None:
            raise self.error
        return None

    def idle(self, *, waited: bool) -> float:
        """Decide what to do now that every task is blocked, and do it. Return the real seconds to wait for I/O; 0: go on.

        ``waited`` is True if such a wait has ended without progress. It returns infinity if no run is watched.
        """
        out = self._time.real_work(self._main)
        held = clock.is_held(self._time.clock)
        if not held and out is None and self._time.until_next() < math.inf:
            self._time.advance_to_next()
            return 0
        if waited:
            self._judge(out)
            return 0
        if self._main is None:
            return math.inf if self.error is None else self.patience
        patient = held or out is not None or self._time.may_be_woken()
        return self.patience if patient and not self._verdicts else min(GRACE, self.patience)

    def _judge(self, out: str | None) -> None:
        if self._main is None or self._scope is None:
            if self.error is not None and self._can_leave:
                raise self.error
            return
        if self.error is None:
            self.error = DeadlockError(self._describe(out))
        self._verdicts += 1
        if self._verdicts == 1:
            self._scope.cancel()
        elif self._verdicts == 2:  # a shield without a deadline stopped the cancellation
            self._time.interrupt(self._main, self.error)
        elif self._can_leave:  # a thread does not return: abandon the event loop
            raise self.error
        elif self._verdicts == 3:
            print(f"mainspring: {self.error}", file=sys.stderr, flush=True)  # noqa: T201 - there is no other way out

    def _describe(self, out: str | None) -> str:
        if clock.is_held(self._time.clock):
            why = f"the clock was held, and no real work ended for {self.patience:g} real seconds"
        elif out is not None:
            why = f"{out} did not end within {self.patience:g} real seconds"
        else:
            why = "every task is blocked and no deadline is pending, so nothing can happen any more"
        now = self._time.clock.current_time()
        lines = [f"  {name}: {where(coroutine) or 'not started'}" for name, coroutine in self._time.tasks(self._main)]
        return "\n".join([f"stuck at virtual second {now:g}: {why}. The tasks wait here:", *lines])
