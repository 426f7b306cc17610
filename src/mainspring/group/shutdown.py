"""The phases of a group's shutdown, each with its end: drain delay, stop intake, finish, cancel."""

from __future__ import annotations

import math
from itertools import groupby
from typing import TYPE_CHECKING

import anyio

from mainspring.core.state_machine import GroupState

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mainspring.group.managed_loop import ManagedLoop

ABORT_GRACE = 0.5
"""Seconds that a cancelled run, settlements that hang included, gets to come out before it counts as stuck."""
IN_ORDER = 0.2
"""The share of the cancel grace that loops of higher priority may wait, in all, for those below to end."""


class Shutdown:
    """Takes a group's loops down. It is asked once, may be asked again to hurry, and runs when the group calls :meth:`run`.

    One deadline caps the whole: ``timeout`` seconds from the moment the first loop stops its intake. A loop's own
    ``shutdown_timeout`` counts from when its own intake stops, within that; a drain, which has no deadline, does not heed
    it. Loops of higher priority stop their intake when those below them have ended, or when their fair share of the time
    has passed, and are cancelled after those below.
    """

    def __init__(
        self,
        managed_loops: Sequence[ManagedLoop],
        *,
        drain_delay: float,
        cancel_grace: float,
        enter: Callable[[GroupState], None],
        deadline_set: Callable[[float], None],
    ) -> None:
        self.forced_by: int | None = None
        self.requested = anyio.Event()
        self.reason = ""
        self.began = 0.0
        self._managed_loops = managed_loops
        self._drain_delay = drain_delay
        self._cancel_grace = cancel_grace
        self._enter = enter
        self._deadline_set = deadline_set
        self._timeout = math.inf
        self._deadline = math.inf
        self._limited_at = 0.0
        self._finishing = False
        self._skip_delay = False
        self._change = anyio.Event()

    def request(self, reason: str, timeout: float, *, delay: bool = True) -> None:
        """Begin. If it has begun, let the rest take ``timeout`` seconds at most, and never longer than before."""
        if not self.requested.is_set():
            self.reason = reason
            self.began = anyio.current_time()
            self._timeout = timeout
            self._skip_delay = not delay
            self.requested.set()
            return
        self._timeout = min(self._timeout, timeout)
        if self._finishing:
            self._set_deadline(min(self._deadline, anyio.current_time() + timeout))
        self.changed()

    def force(self, signum: int) -> None:
        """Skip to the cancelling, as a second signal asks."""
        self.forced_by = signum
        self._skip_delay = True
        self._set_deadline(anyio.current_time())
        self.changed()

    @property
    def remaining(self) -> float | None:
        """Seconds that are left for the work in hand; None without a limit."""
        return None if self._deadline == math.inf else max(0.0, self._deadline - anyio.current_time())

    def changed(self) -> None:
        """Let the waiting phase look again, after a loop has ended or a setting has changed."""
        self._change.set()

    async def run(self) -> None:
        """Run the phases. Returns when every loop has ended, or is stuck beyond what cancelling can do."""
        if self._drain_delay > 0 and not self._skip_delay:
            self._enter(GroupState.DRAIN_DELAY)
            end = anyio.current_time() + self._drain_delay
            await self._wait(lambda: self._skip_delay or self._all_ended(), lambda: end)
        self._finishing = True
        self._set_deadline(min(self._deadline, anyio.current_time() + self._timeout))
        await self._stop_intake()
        if not self._all_ended():
            self._enter(GroupState.FINISH)
            await self._wait(self._all_ended, lambda: math.inf)
        await self._cancel()

    async def _stop_intake(self) -> None:
        self._enter(GroupState.STOP_INTAKE)
        for managed in self._managed_loops:
            managed.announce_shutdown()
        levels = self._levels()
        for index, level in enumerate(levels):
            now = anyio.current_time()
            for managed in level:
                managed.stop_intake(self._left(managed))
            left = len(levels) - index
            if left > 1:
                await self._wait(lambda level=level: _ended(level), lambda now=now, left=left: self._share(now, left))  # type: ignore[misc]

    def _share(self, began: float, levels_left: int) -> float:
        """Return until when loops of higher priority wait for a level that stopped its intake at ``began``."""
        return began + (self._deadline - began) / levels_left

    def _levels(self) -> list[list[ManagedLoop]]:
        """Return the loops by priority, the lowest first."""
        return [list(level) for _, level in groupby(sorted(self._managed_loops, key=_priority), key=_priority)]

    async def _cancel(self) -> None:
        if self._all_ended():
            return
        self._enter(GroupState.CANCEL)
        levels = self._levels()
        with anyio.move_on_after(self._cancel_grace):
            for level in levels:
                for managed in level:
                    managed.stop_intake(self._left(managed))
                    managed.cancel_work()
                if level is not levels[-1]:
                    with anyio.move_on_after(self._cancel_grace * IN_ORDER / (len(levels) - 1)):
                        await _until_ended(level)
            await _until_ended(self._managed_loops)
        for managed in self._managed_loops:
            managed.abort()
        with anyio.move_on_after(ABORT_GRACE):
            await _until_ended(self._managed_loops)

    async def _wait(self, over: Callable[[], bool], until: Callable[[], float]) -> None:
        """Wait for ``over()``, at most until ``until()`` and the deadline; cancels loops whose own time is up meanwhile."""
        while not over():
            self._change = anyio.Event()
            now = anyio.current_time()
            end = min(until(), self._deadline)
            if now >= end:
                return
            for managed in self._managed_loops:
                own = self._own_deadline(managed)
                if own <= now:
                    managed.cancel_work()
                elif not managed.ended.is_set():
                    end = min(end, own)
            with anyio.move_on_after(end - now):
                await self._change.wait()

    def _left(self, managed: ManagedLoop) -> float:
        """Return the seconds that a managed loop has from now on before its work is cancelled."""
        now = anyio.current_time()
        own = managed.loop.shutdown_timeout
        limit = self._deadline if own is None or self._deadline == math.inf else min(self._deadline, now + own)
        return max(0.0, limit - now)

    def _own_deadline(self, managed: ManagedLoop) -> float:
        own = managed.loop.shutdown_timeout
        began = managed.actor.stop_began
        if own is None or began is None or self._deadline == math.inf:
            return math.inf
        return max(began, self._limited_at) + own

    def _set_deadline(self, deadline: float) -> None:
        if self._deadline == math.inf:
            self._limited_at = anyio.current_time()
        self._deadline = deadline
        if deadline < math.inf:
            self._deadline_set(deadline)

    def _all_ended(self) -> bool:
        return _ended(self._managed_loops)


def _ended(managed_loops: Sequence[ManagedLoop]) -> bool:
    return all(managed.ended.is_set() for managed in managed_loops)


async def _until_ended(managed_loops: Sequence[ManagedLoop]) -> None:
    for managed in managed_loops:
        await managed.ended.wait()


def _priority(managed: ManagedLoop) -> int:
    return managed.loop.shutdown_priority
