"""Readiness checks: a user's functions, asked when somebody wants to know, with a deadline."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

import anyio

from mainspring.events import CheckChanged, Dispatcher

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

CHECK_TIMEOUT = 5.0
"""Seconds that a check may take before it counts as failed."""
FRESH = 1.0
"""Seconds for which an answer is good: many probes at once ask the database once."""


class Checks:
    """Runs the checks, all at once, and remembers their answers: None where one passes, else why not.

    A check passes by returning anything but False; it fails by returning False, by raising, or by taking too long.
    """

    def __init__(self, group: str, checks: Mapping[str, Callable[[], object]], dispatcher: Dispatcher) -> None:
        self._group = group
        self._checks = dict(checks)
        self._dispatcher = dispatcher
        self._asked: float | None = None
        self._lock: anyio.Lock | None = None
        self.results: dict[str, str | None] = dict.fromkeys(self._checks, "not asked yet")

    async def refresh(self) -> None:
        """Ask every check whose answer is not fresh."""
        if not self._checks:
            return
        if self._lock is None:
            self._lock = anyio.Lock()
        async with self._lock:
            if self._asked is not None and anyio.current_time() - self._asked < FRESH:
                return
            async with anyio.create_task_group() as tasks:
                for name, check in self._checks.items():
                    tasks.start_soon(self._ask, name, check)
            self._asked = anyio.current_time()

    async def _ask(self, name: str, check: Callable[[], object]) -> None:
        error: str | None = f"no answer within {CHECK_TIMEOUT:g} s"
        with anyio.move_on_after(CHECK_TIMEOUT):
            try:
                answer = check()
                if inspect.isawaitable(answer):
                    answer = await answer
                error = "it returned False" if answer is False else None
            except Exception as raised:
                error = f"{type(raised).__name__}: {raised}"
        if self.results[name] != error:
            self.results[name] = error
            self._dispatcher.dispatch(CheckChanged(self._group, name, error))
