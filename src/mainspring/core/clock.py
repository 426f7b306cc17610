"""The only module that reads a clock other than anyio's.

Durations and deadlines come from ``anyio.current_time()``. What lives here is what outlasts one event loop: the date
(``utc_now``), and the seconds since the machine booted (``boot_time``), by which processes on one machine agree on a
lease. Under a virtual clock (trio's ``MockClock``, or that of ``mainspring.testing``'s event loop for asyncio) all of them
follow the virtual time, so that a test sees one time only.
"""

from __future__ import annotations

import math
import sys
import time
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from anyio.lowlevel import current_token

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

VIRTUAL_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)
"""The date at the virtual clock's zero."""


_VIRTUAL_LOOP = "mainspring.testing.asyncio_time"
"""The module of asyncio's event loop in virtual time: while it is not imported, there is none."""


def virtual_clock() -> Any | None:
    """Return the clock that drives the current run if time is virtual, else None.

    On trio it is the ``trio.testing.MockClock``. On asyncio it has the same ``current_time()`` and ``jump(seconds)``.
    """
    if (virtual := sys.modules.get(_VIRTUAL_LOOP)) is not None:
        clock = virtual.running_clock()
        if clock is not None:
            return clock
    mock = getattr(sys.modules.get("trio.testing"), "MockClock", None)
    if mock is None:  # trio.testing is not imported, so no MockClock exists
        return None
    import trio

    try:
        clock = trio.lowlevel.current_clock()
    except RuntimeError:
        return None
    return clock if isinstance(clock, mock) else None


def utc_now() -> datetime:
    """Return the wall clock as an aware UTC datetime; it can jump, so it stamps and never measures."""
    clock = virtual_clock()
    if clock is None:
        return datetime.now(UTC)
    return virtual_date(clock)


def virtual_date(clock: Any) -> datetime:
    """Return the date by that virtual clock, as an aware UTC datetime."""
    return VIRTUAL_EPOCH + timedelta(seconds=clock.current_time() + _wall_ahead())


def utc_clock() -> Callable[[], datetime]:
    """Return a :func:`utc_now` of the running event loop, for any thread."""
    clock = virtual_clock()
    if clock is None:
        return utc_now
    return lambda: virtual_date(clock)


monotonic: Callable[[], float] = time.monotonic
"""Seconds of the operating system's monotonic clock: callable from any thread, unaware of virtual time."""


def boot_time() -> float:
    """Return the seconds since this machine booted, suspended time included (CLOCK_BOOTTIME): equal in all its processes."""
    clock = virtual_clock()
    if clock is None:
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return float(clock.current_time())


def boot_clock() -> Callable[[], float]:
    """Return a :func:`boot_time` that may be called from another thread, for the loop (and the run) it was made on."""
    clock = virtual_clock()
    if clock is None:
        return _real_boot_time
    return lambda: float(clock.current_time())


def _real_boot_time() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def boot_id() -> str:
    """Return the kernel's random identity of this boot; a lease with another one belongs to a machine that has restarted."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def wall_clock() -> Callable[[], float]:
    """Return a cheap reader of the wall clock in POSIX seconds, for the loop (and the run) it was made on."""
    clock = virtual_clock()
    if clock is None:
        return time.time
    epoch = VIRTUAL_EPOCH.timestamp()
    return lambda: epoch + float(clock.current_time()) + _wall_ahead()


@dataclass(slots=True)
class WallSkew:
    """How many seconds a wall clock is ahead of the virtual time (behind it, where negative)."""

    seconds: float = 0.0


_skew: ContextVar[WallSkew | None] = ContextVar("mainspring_wall_skew", default=None)


@contextmanager
def own_wall_clock() -> Iterator[WallSkew]:
    """Give this block and the tasks started in it a wall clock of their own, which can jump, under a virtual clock.

    It begins as that of the code around it. Setting ``seconds`` of what it yields moves that clock only; durations and
    deadlines do not follow a wall clock.
    """
    skew = WallSkew(_wall_ahead())
    token = _skew.set(skew)
    try:
        yield skew
    finally:
        _skew.reset(token)


def _wall_ahead() -> float:
    skew = _skew.get()
    return 0.0 if skew is None else skew.seconds


def loop_clock() -> Callable[[], float]:
    """Return ``anyio.current_time`` of the running event loop, without looking the backend up on each call.

    For paths where half a microsecond a message counts, and for bare callbacks of the event loop, in which anyio cannot
    tell what it runs on. Call the result only on the loop it was made on.
    """
    loop = current_token().native_token
    if hasattr(loop, "time"):
        now: Callable[[], float] = loop.time
        return now
    import trio

    return trio.current_time


def thread_clock() -> Callable[[], float]:
    """Return ``anyio.current_time`` of the running event loop as a function that any thread may call without waiting."""
    loop = current_token().native_token
    if hasattr(loop, "time"):
        import asyncio

        now: Callable[[], float] = loop.time
        # uvloop's own is what the monotonic clock said as its turn began.
        return now if isinstance(loop, asyncio.BaseEventLoop) else monotonic
    import trio

    clock = trio.lowlevel.current_clock()
    return clock.current_time


def real_work() -> AbstractContextManager[None]:
    """Hold a virtual clock while something real (a thread, a process) is out, so that time does not jump past it.

    A virtual clock moves on when every task is blocked, and a task that waits for a thread is. Outside a virtual run this does
    nothing. Holds nest, and those of several tasks may overlap: the clock goes on when the last one ends.
    """
    clock = virtual_clock()
    return _NOTHING if clock is None else hold(clock)


_NOTHING = nullcontext()


def work_holder() -> Callable[[], AbstractContextManager[None]]:
    """Return a :func:`real_work` for this loop and run, which does not look for a virtual clock on each call."""
    clock = virtual_clock()
    return nullcontext if clock is None else partial(hold, clock)


def is_held(clock: Any) -> bool:
    """True if a block of :func:`hold` is open on that virtual clock."""
    return bool(vars(clock).get("_mainspring_holds"))


@contextmanager
def hold(clock: Any) -> Iterator[None]:
    """Keep that virtual clock from moving by itself inside the block."""
    state = vars(clock)  # kept on the clock itself: one clock, one count
    holds: int = state.get("_mainspring_holds", 0)
    state["_mainspring_holds"] = holds + 1
    if not holds:
        state["_mainspring_threshold"] = clock.autojump_threshold
        judge = state.get("_mainspring_idle")  # of a run that mainspring.testing started: notices what never comes back
        clock.autojump_threshold = math.inf if judge is None else judge.patience
    try:
        yield
    finally:
        state["_mainspring_holds"] -= 1
        if not state["_mainspring_holds"]:
            clock.autojump_threshold = state.pop("_mainspring_threshold")


def real_sleep() -> Callable[[float], None]:
    """Return ``time.sleep``."""
    return time.sleep


@contextmanager
def real_sleep_replaced(replacement: Callable[..., None]) -> Iterator[None]:
    """Have ``time.sleep`` call ``replacement`` inside the block, so that code which would let real time pass is found."""
    before = time.sleep
    time.sleep = replacement
    try:
        yield
    finally:
        time.sleep = before


def local_time(when: datetime) -> datetime:
    """Return ``when`` in the zone of this machine, for people to read."""
    return when.astimezone()
