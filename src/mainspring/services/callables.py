"""A user's functions, called with a deadline: whatever they do is an answer in words.

Probes, hooks and the readiness checks of groups call theirs here.
"""

from __future__ import annotations

import inspect
from contextvars import copy_context
from typing import TYPE_CHECKING, NamedTuple

import anyio

from mainspring.core.clock import real_work
from mainspring.core.introspection import is_async, name_of, ran
from mainspring.core.run_in_context import run_in
from mainspring.errors import describe
from mainspring.runtime.cancellation import SpuriousAsError
from mainspring.threads.own_thread import OwnThread

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


class Answer(NamedTuple):
    """What a call gave: ``value``, or ``error``, why there is none."""

    value: object = None
    error: str | None = None


class NotReturnedError(Exception):
    """A plain function has not returned from an earlier call."""


def late(timeout: float) -> str:
    """Return in words that nothing has answered in time."""
    return f"no answer within {timeout:g} s"


async def answer_of(fn: Callable[[], Awaitable[object]], *, timeout: float, late: str) -> Answer:
    """Call an async function without arguments, in a context of its own, for at most ``timeout`` seconds.

    ``late`` is the error where it has not returned then, or is out since an earlier call. Whatever it raises is its answer,
    and so is work that it returns and that has not run, as a generator. It raises only a cancellation from outside. One that
    swallows its own cancellation is waited for, and slowed.
    """
    answer = Answer(error=late)
    with anyio.move_on_after(timeout) as scope:
        try:
            async with SpuriousAsError("it was cancelled by itself"):
                value = await run_in(copy_context(), fn, lambda: scope.cancel_called)
                answer = Answer(ran(value, name_of(fn)))
        except NotReturnedError:
            pass
        except anyio.get_cancelled_exc_class():
            raise
        except BaseException as raised:  # it fails, and ends nothing else
            answer = Answer(error=describe(raised))
    return answer


async def verdict_of(fn: Callable[[], Awaitable[object]], *, timeout: float) -> str | None:
    """Return None where the function passes: it returns anything but False, in time. Else return why not."""
    value, error = await answer_of(fn, timeout=timeout, late=late(timeout))
    return "it returned False" if error is None and value is False else error


class Prober:
    """A probe or check as an async function. A plain one is called in a thread of its own, which no end of a program waits for.

    It is not called again before that thread has returned: until then each call raises :class:`NotReturnedError`.
    """

    def __init__(self, fn: Callable[[], object], what: str) -> None:
        self._fn = fn
        self._what = what
        self._plain = not is_async(fn)
        self._out = False

    async def __call__(self) -> object:
        """Call it, and await what it returns where that can be awaited."""
        answer = await self._in_thread() if self._plain else self._fn()
        return ran(await answer if inspect.isawaitable(answer) else answer, f"the {self._what} {name_of(self._fn)}")

    async def _in_thread(self) -> object:
        if self._out:
            raise NotReturnedError
        self._out = True
        with real_work():
            return await OwnThread(self._call, f"{self._what} {name_of(self._fn)}").wait()

    def _call(self) -> object:
        try:
            return self._fn()
        finally:
            self._out = False
