"""The private parts of asyncio that virtual time needs. No other module uses private parts of asyncio.

An event loop keeps its timers in a heap, ``_scheduled``, and runs timers that are due within ``_clock_resolution`` seconds.
Without the heap, the clock may miss an instant by a rounding. With asyncio's own resolution, a timer may run a nanosecond
early, and none runs any more once the clock is beyond half a year. ``tests/testing/test_asyncio_internals.py`` fails if asyncio
lacks these parts.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop, TimerHandle
    from random import Random


def next_timer(loop: AbstractEventLoop) -> float | None:
    """Return the instant of the loop's earliest timer; infinity if it has none, None if this asyncio does not tell.

    The loop has just dropped the cancelled timers from the head of its heap.
    """
    timers = _timers(loop)
    if timers is None:
        return None
    return timers[0].when() if timers else math.inf


def shuffle_next(loop: AbstractEventLoop, random: Random) -> None:
    """Put the timers that are due first, at one and the same instant, in a random order."""
    timers = _timers(loop)
    if not timers:
        return
    when, first, todo = timers[0].when(), [], [0]
    while todo:  # in a heap, what equals the first hangs together from the root on
        place = todo.pop()
        if place < len(timers) and timers[place].when() == when:
            first.append(place)
            todo += (2 * place + 1, 2 * place + 2)
    if len(first) > 1:
        first.sort()
        order = [timers[place] for place in first]
        random.shuffle(order)
        for place, timer in zip(first, order, strict=True):
            timers[place] = timer


def run_timers_exactly(loop: Any, now: float) -> None:
    """Have the loop run timers up to and including the instant ``now``, and none after it."""
    if hasattr(loop, "_clock_resolution"):
        loop._clock_resolution = math.ulp(now)  # noqa: SLF001 - see the module


def _timers(loop: AbstractEventLoop) -> list[TimerHandle] | None:
    timers: list[TimerHandle] | None = getattr(loop, "_scheduled", None)
    return timers
