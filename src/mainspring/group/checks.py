"""Readiness checks: a user's functions, asked by the rules that hold for the probes of services."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import anyio

from mainspring.events import CheckChanged
from mainspring.runtime.interval import Periodic
from mainspring.services.callables import Prober, verdict_of
from mainspring.services.health import Health, HealthVerdict, Tolerance

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from mainspring.core.dispatcher import Dispatcher

FRESH = 1.0
"""Seconds for which a failure is not asked again, however often readiness is."""


class Checks:
    """Asks each check every ``interval`` seconds, and remembers what its answers mean.

    A check passes if it returns anything but False. It fails if it returns False, raises, takes longer than ``timeout``
    seconds, or returns work that has not run, as a generator. A plain function is called in a thread of its own, and not again
    before it has returned; the end of the program does not wait for it. One that has passed has failed after ``max_failures``
    failures in a row. Before it has passed for the first time, it has failed.
    """

    def __init__(
        self,
        group: str,
        checks: Mapping[str, Callable[[], object]],
        dispatcher: Dispatcher,
        *,
        timeout: float,
        interval: float,
        max_failures: int,
    ) -> None:
        self._group = group
        self._dispatcher = dispatcher
        self._timeout = timeout
        self._interval = interval
        self._checks = [_Check(name, fn, Tolerance(max_failures)) for name, fn in checks.items()]

    @property
    def results(self) -> dict[str, str | None]:
        """For each check None where it passes, else why not."""
        return {check.name: check.health.error for check in self._checks}

    @property
    def failed(self) -> dict[str, str]:
        """Of the checks that keep the group from being ready: why."""
        return {check.name: check.health.error or "" for check in self._checks if check.failed}

    async def run(self) -> None:
        """Ask each of them every ``interval`` seconds, until cancelled."""
        async with anyio.create_task_group() as tasks:
            for check in self._checks:
                tasks.start_soon(self._run, check)

    async def refresh(self) -> None:
        """Ask again the checks that keep the group from being ready, where their answers are older than a second."""
        async with anyio.create_task_group() as tasks:
            for check in self._checks:
                if check.failed:
                    tasks.start_soon(self._ask, check, min(FRESH, self._interval))

    async def _run(self, check: _Check) -> None:
        async def step(_: float) -> float:
            await self._ask(check, self._interval)
            return check.asked + self._interval

        await Periodic(step, first=-math.inf).run_on(self._interval)

    async def _ask(self, check: _Check, fresh: float) -> None:
        """Ask a check, unless its last answer is less than ``fresh`` seconds old."""
        async with check.lock:
            if anyio.current_time() < check.asked + fresh:  # exactly what its next turn is reckoned by
                return
            error = await verdict_of(check.prober, timeout=self._timeout)
            check.asked = anyio.current_time()
            before = check.health.error, check.failed
            check.health.note(error)
            if before != (check.health.error, check.failed):
                self._dispatcher.dispatch(CheckChanged(self._group, check.name, error, check.failed))


class _Check:
    """One check. ``asked``: when it gave its last answer."""

    def __init__(self, name: str, fn: Callable[[], object], tolerance: Tolerance) -> None:
        self.name = name
        self.prober = Prober(fn, "check")
        self.health = Health(tolerance, verdict=HealthVerdict.FAILED, error="not asked yet")
        self.asked = -math.inf
        self.lock = anyio.Lock()

    @property
    def failed(self) -> bool:
        """True if it keeps the group from being ready."""
        return self.health.verdict is HealthVerdict.FAILED
