"""Spurious cancellations: asyncio has cancelled a task, or a future that it awaits, and no cancel scope has.

Trio knows none. A scope's cancellation must always go on its way. A spurious one must not: a task group would take the task for
one that it cancelled itself. So each task that calls foreign code asks which of the two it has caught, in one of two ways:
:func:`is_spurious_cancellation` where the answer matters, :class:`SpuriousAsError` where it is an error like any other.
"""

from __future__ import annotations

import math
from contextlib import suppress
from typing import TYPE_CHECKING

import anyio

from mainspring.core.process import async_library
from mainspring.errors import TaskExitError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType


async def is_spurious_cancellation() -> bool:
    """True if no cancel scope asked for the cancellation that was just caught; asyncio's count of it is then set back.

    On asyncio a task can be cancelled natively, and a cancelled future ends every task that awaits it in the same way. A task
    group takes such a task for its own doing: it cancels the others and raises nothing. An event loop that ends cancels all its
    tasks natively at once. The task that owns the scopes is then cancelled as well, and passes it on.
    """
    if async_library() == "trio":
        return False  # there only scopes cancel; the scope that did may be shielded against by now
    if anyio.current_effective_deadline() > -math.inf:
        with suppress(
            anyio.get_cancelled_exc_class()
        ):  # a pending cancellation cannot be taken back before Python 3.13
            await anyio.lowlevel.checkpoint()
    return anyio.current_effective_deadline() > -math.inf and _forget_native_cancels()


class SpuriousAsError:
    """A block, entered with ``async with``, out of which a spurious cancellation comes as a :class:`TaskExitError`."""

    __slots__ = ("_text",)

    def __init__(self, text: str = "a spurious cancellation") -> None:
        self._text = text

    async def __aenter__(self) -> None:
        pass

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, Exception) or not isinstance(error, anyio.get_cancelled_exc_class()):
            return
        if await is_spurious_cancellation():
            raise TaskExitError(self._text) from error


def is_of_a_scope(error: BaseException) -> bool:
    """True if anyio has cancelled this task on asyncio; the error of a task that it cancelled elsewhere says the same."""
    return bool(native_cancels()()) and str(error).startswith("Cancelled via cancel scope ")


def _forget_native_cancels() -> bool:
    """Set this task's count of native cancellations back, unless a task around it is being cancelled, too.

    Where it has none, it got a future's. A task around it has some too while a scope inside that, as a receive's, is cancelled.
    """
    import asyncio

    task = asyncio.current_task()
    assert task is not None
    if not task.cancelling():
        return True
    tasks = {id(one): one for one in asyncio.all_tasks()}
    parents = {info.id: info.parent_id for info in anyio.get_running_tasks()}
    owner = parents[id(task)]
    while owner in tasks:
        if tasks[owner].cancelling():
            return False
        owner = parents[owner]
    while task.cancelling():
        task.uncancel()
    return True


def native_cancels() -> Callable[[], int]:
    """Return a function that says how many native cancellations of this task are counted; on trio, which has none, 0."""
    if async_library() == "trio":
        return int
    import asyncio

    task = asyncio.current_task()
    assert task is not None
    return task.cancelling
