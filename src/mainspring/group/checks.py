"""Readiness checks: a user's functions, called with a deadline when readiness is asked for."""

from __future__ import annotations

import inspect
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING

import anyio

from mainspring.core.clock import real_work
from mainspring.core.introspection import is_async, name_of, ran
from mainspring.core.run_in_context import run_in
from mainspring.errors import describe
from mainspring.events import CheckChanged
from mainspring.runtime.cancellation import SpuriousAsError
from mainspring.threads.own_thread import OwnThread

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from mainspring.core.dispatcher import Dispatcher

FRESH = 1.0
"""Seconds for which an answer is good: many probes at once ask the database once."""


class _StillOutError(Exception):
    """The check's thread has not returned from an earlier call."""


class Checks:
    """Runs the checks, all at once, and remembers their answers: None where one passes, else why not.

    A check passes if it returns anything but False. It fails if it returns False, raises, takes longer than ``timeout``
    seconds, or returns work that has not run, as a generator. A plain function is called in a thread of its own, and not again
    before it has returned; the end of the program does not wait for it.
    """

    def __init__(
        self, group: str, checks: Mapping[str, Callable[[], object]], dispatcher: Dispatcher, timeout: float
    ) -> None:
        self._group = group
        self._checks = dict(checks)
        self._dispatcher = dispatcher
        self._timeout = timeout
        self._asked: float | None = None
        self._lock: anyio.Lock | None = None
        self._out: set[str] = set()  # plain checks whose threads have not returned
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
        late = f"no answer within {self._timeout:g} s"
        error: str | None = late
        with anyio.move_on_after(self._timeout) as scope:
            try:
                called = partial(self._call, name, check)
                async with SpuriousAsError("it was cancelled by itself"):
                    answer = await run_in(copy_context(), called, lambda: scope.cancel_called)
                error = "it returned False" if answer is False else None
            except _StillOutError:
                error = late
            except anyio.get_cancelled_exc_class():
                raise
            except BaseException as raised:  # it fails, and ends nothing else
                error = describe(raised)
        if self.results[name] != error:
            self.results[name] = error
            self._dispatcher.dispatch(CheckChanged(self._group, name, error))

    async def _call(self, name: str, check: Callable[[], object]) -> object:
        if is_async(check):
            answer = check()
        elif name in self._out:
            raise _StillOutError
        else:
            answer = await self._in_thread(name, check)
        return ran(await answer if inspect.isawaitable(answer) else answer, f"the check {name_of(check)}")

    async def _in_thread(self, name: str, check: Callable[[], object]) -> object:
        def ask() -> object:
            try:
                return check()
            finally:
                self._out.discard(name)

        self._out.add(name)
        with real_work():
            return await OwnThread(ask, f"check {name}").wait()
