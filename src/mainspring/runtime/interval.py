"""The one interval loop: reaper, lease renewal, watchdog and health checks sleep and wake in here."""

from __future__ import annotations

import math
from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, Any

import anyio

from mainspring.core.clock import loop_clock
from mainspring.runtime.cancellation import is_spurious_cancellation

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from anyio.abc import TaskGroup


class Periodic:
    """Calls ``step(overslept)`` at the instants it asks for: each call returns when the next is due.

    Instants are on anyio's clock. ``math.inf`` means not before :meth:`wake_by` is called, a past instant means now.
    ``overslept`` is how many seconds the call comes late. A step that judges how long something took must allow for it. There
    is no ticking: between two calls nothing runs. An error of ``step`` ends :meth:`run`. So does a cancellation; if it comes
    during a step, the instant that this step would have asked for is dropped.
    """

    def __init__(self, step: Callable[[float], Awaitable[float]], *, first: float = math.inf) -> None:
        self._step = step
        self.due = first
        """Instant at which the next call is due; ``math.inf`` while a call is under way and :meth:`wake_by` was not called.
        It is there to be read: a path on which each message counts asks it before it calls :meth:`wake_by`."""
        self._sleep: anyio.CancelScope | None = None
        self._now: Callable[[], float] = anyio.current_time

    def wake_by(self, when: float) -> None:
        """Let the next call happen at ``when``, where that is sooner than planned. Call it on the event loop only."""
        if when < self.due:
            self.due = when
            if self._sleep is not None:
                self.due = max(when, self._now())  # it could not have come sooner, so it is not late
                self._sleep.deadline = self.due

    async def run(self) -> None:
        """Run until cancelled."""
        self._now = loop_clock()
        while True:
            await self._until_due()
            late = self._now() - self.due
            self.due = math.inf  # so that a wake_by during the step counts
            asked = await self._step(max(0.0, late))
            self.due = min(self.due, asked)

    async def run_on(self, pause: float) -> None:
        """Run until a cancel scope ends it. After a spurious cancellation the next call is due within ``pause`` seconds."""
        while True:
            try:
                await self.run()
            except anyio.get_cancelled_exc_class():
                if not await is_spurious_cancellation():
                    raise
            self.wake_by(self._now() + pause)

    async def _until_due(self) -> None:
        now = self._now()
        if self.due <= now:
            self.due = now  # asked for in the past: as above
            await anyio.lowlevel.checkpoint()
            return
        self._sleep = anyio.CancelScope(deadline=self.due)
        with self._sleep:
            try:
                await anyio.Event().wait()  # on trio, sleep_forever() would be a scope of its own
            finally:
                self._sleep = None


class Alarm:
    """One of the :class:`Alarms`: calls ``step(overslept)``, which is a plain function, at the instants it asks for."""

    __slots__ = ("_alarms", "due", "step")

    def __init__(self, alarms: Alarms, step: Callable[[float], float]) -> None:
        self._alarms = alarms
        self.step = step
        self.due = math.inf
        """Instant at which the next call is due."""

    def wake_by(self, when: float) -> None:
        """Let the next call happen at ``when``, where that is sooner than planned. Call it on the event loop only."""
        if when < self.due:
            self.due = when
            self._alarms.set(self, when)

    def end(self) -> None:
        """Ring no more, and let go of what it calls."""
        self.step = _never


def _never(overslept: float) -> float:
    return math.inf


class Alarms:
    """Many alarms on one :class:`Periodic`: a task for each would cost more than what it does. Their owner runs :meth:`run`."""

    def __init__(self) -> None:
        self._timer = Periodic(self._ring)
        self._tasks: TaskGroup | None = None
        self._heap: list[tuple[float, int, Alarm]] = []
        self._numbers = count()

    def alarm(self, step: Callable[[float], float]) -> Alarm:
        """Return a new alarm. ``step(overslept)`` returns when to be called again, as that of a :class:`Periodic`."""
        return Alarm(self, step)

    async def run(self) -> None:
        """Ring until cancelled. It returns where a task that an alarm has started is cancelled by itself."""
        async with anyio.create_task_group() as self._tasks:
            await self._timer.run()

    def start_soon(self, function: Callable[..., Coroutine[Any, Any, object]], *arguments: object) -> None:
        """Start a task from the step of an alarm; it is cancelled with :meth:`run`."""
        assert self._tasks is not None  # or no alarm would ring
        self._tasks.start_soon(function, *arguments)

    def set(self, alarm: Alarm, when: float) -> None:
        """Let an alarm ring at ``when``, if it is still due then."""
        heappush(self._heap, (when, next(self._numbers), alarm))
        if when < self._timer.due:
            self._timer.wake_by(when)

    async def _ring(self, overslept: float) -> float:
        now = anyio.current_time()
        while self._heap and self._heap[0][0] <= now:
            when, _, alarm = heappop(self._heap)
            if alarm.due == when:  # else it was put forward, and has rung
                alarm.due = math.inf
                alarm.wake_by(alarm.step(now - when))
        return self._heap[0][0] if self._heap else math.inf
