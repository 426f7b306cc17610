"""Runs code in a context (``contextvars``) of its own, a coroutine too, and slows one that swallows its cancellation.

An event loop fixes the context of a task when the task begins, so that a coroutine sees the variables of its task. Here each
of a coroutine's steps is called through ``Context.run`` instead: it has a context of its own, and costs no task.

The steps are also where a cancellation passes that a scope delivers. anyio delivers it again at each ``await``, so that code
which catches it and waits on would keep a core busy. After ``PROMPT`` deliveries each next one waits, up to ``PAUSE_MAXIMUM``.
"""

from __future__ import annotations

import math
import sys
import types
from typing import TYPE_CHECKING, Any, TypeVar

import anyio

from mainspring.core import random
from mainspring.policies import backoff

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Generator
    from contextvars import Context

T = TypeVar("T")

PROMPT = 20
"""How many cancellations are delivered at once: clean-up of many layers, each of which awaits, meets one a layer."""

PAUSE_INITIAL = 0.001
PAUSE_MAXIMUM = 1.0
"""Seconds before the deliveries after those, doubled at each."""


async def run_in(context: Context, fn: Callable[[], Awaitable[T]], asked: Callable[[], bool] = bool) -> T:
    """Call ``fn()`` and await what it returns, both in ``context``.

    :param asked: says whether a scope around this call has been cancelled: then what swallows that is slowed.
    :raises BaseException: what the call raises; ``TypeError`` where it returns no awaitable.
    """
    coroutine = as_coroutine(context.run(fn))
    try:
        yielded = context.run(coroutine.send, None)
    except StopIteration as ended:
        value: T = ended.value
        return value
    steps = resumed(coroutine, context, yielded, asked)
    del yielded  # see `resumed`
    return await steps


def as_coroutine(awaitable: Awaitable[T]) -> Coroutine[Any, Any, T]:
    """Return the coroutine itself, or one that awaits the awaitable."""
    return awaitable if type(awaitable) is types.CoroutineType else _awaiting(awaitable)


async def _awaiting(awaitable: Awaitable[T]) -> T:
    return await awaitable


@types.coroutine
def resumed(
    coroutine: Coroutine[Any, Any, T], context: Context, yielded: Any, asked: Callable[[], bool]
) -> Generator[Any, Any, T]:
    """Go on with a coroutine whose first step in ``context`` gave ``yielded``. ``asked`` is that of :func:`run_in`.

    An error's traceback refers to this frame. So the frame keeps neither errors nor futures, which hold errors: no reference
    cycle is left that keeps the locals of failed code alive until a garbage collection.
    """
    host = _trio_task()
    own = None if host is None else host.context
    patience: Patience | None = None
    while True:
        if patience is not None:
            patience.waits()
        thrown = True
        try:
            value, yielded = (yield yielded), None
            thrown = False
        except BaseException as error:
            value, yielded = error, None
        if type(value) is not GeneratorExit and asked():
            patience = patience or Patience()
            if seconds := patience.goes_on(cancelled=_is_cancellation(value, thrown)):
                try:
                    yield from _pause(seconds)
                except BaseException as error:  # asyncio cancels the task itself, or the coroutine is closed
                    value, thrown = error, True
        step = coroutine.throw if thrown else coroutine.send
        try:
            # On trio a worker thread can run code in the task that waits for it. That code has the thread's context, which
            # is a copy of this one, and trio then gives the task that context.
            yielded = context.run(step, value) if host is None or host.context is own else step(value)
        except StopIteration as ended:
            result: T = ended.value
            return result
        finally:
            value = None


def driven(awaitable: Any) -> Any | None:
    """Return the coroutine that a :func:`resumed` drives, which Python does not tell, or None for anything else."""
    frame = awaitable.gi_frame if isinstance(awaitable, types.GeneratorType) else None
    return frame.f_locals.get("coroutine") if frame is not None and frame.f_code is resumed.__code__ else None


class Patience:
    """Counts how often cancelled code has waited where each wait is cancelled at once, and says how long the next one takes.

    Waits under a shield do not count, however they end. A second of them forgives ``1 / PAUSE_INITIAL`` others: clean-up that
    takes its time is no spinning.
    """

    def __init__(self) -> None:
        self._in_vain = 0.0
        self._shielded = True
        self._since = anyio.current_time()

    def waits(self) -> None:
        """Note that the code begins to wait."""
        self._shielded = anyio.current_effective_deadline() > -math.inf
        self._since = anyio.current_time()

    def goes_on(self, *, cancelled: bool) -> float:
        """Return the seconds to pause before the code gets to know that its wait is over, by a cancellation or not."""
        if self._shielded:
            self._in_vain = max(0.0, self._in_vain - (anyio.current_time() - self._since) / PAUSE_INITIAL)
            return 0.0
        self._in_vain += cancelled
        number = int(self._in_vain) - PROMPT
        if number <= 0 or not cancelled:
            return 0.0
        rng = random.rng()
        return backoff(number, initial=PAUSE_INITIAL, maximum=PAUSE_MAXIMUM, factor=2.0, jitter="none", rng=rng)


async def _pause(seconds: float) -> None:
    with anyio.CancelScope(shield=True):
        await anyio.sleep(seconds)


def _is_cancellation(value: Any, thrown: bool) -> bool:
    """True if the event loop delivers a cancellation so: asyncio throws it, trio sends it as an outcome."""
    return isinstance(value if thrown else getattr(value, "error", None), anyio.get_cancelled_exc_class())


def _trio_task() -> Any:
    # Asked for without anyio, which takes as long for it as all of the rest does. None: not imported, or just being imported.
    trio = getattr(sys.modules.get("trio"), "lowlevel", None)
    return trio.current_task() if trio is not None and trio.in_trio_task() else None
