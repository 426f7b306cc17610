"""``run_virtual`` and ``VirtualClock``: hours of timeouts, leases and backoff in milliseconds, reproducibly."""

from __future__ import annotations

import math
from contextlib import contextmanager
from inspect import iscoroutine
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple, Unpack

import anyio

from mainspring.core import clock, random
from mainspring.core.process import async_library
from mainspring.errors import ConfigError, InvalidParameterError
from mainspring.testing.idle import DeadlockError, IdleJudge

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator, Iterator
    from contextlib import AbstractContextManager
    from datetime import datetime

    from mainspring.testing.asyncio_time import AsyncioTime
    from mainspring.testing.trio_time import TrioTime

__all__ = ["DeadlockError", "VirtualClock", "run_virtual"]

T = TypeVar("T")
Args = TypeVarTuple("Args")


def run_virtual(
    async_fn: Callable[[Unpack[Args]], Awaitable[T]], *args: *Args, seed: int = 0, backend: str = "trio"
) -> T:
    """Run ``async_fn(*args)`` in virtual time and return its value.

    Time starts at 0 and jumps to the next deadline whenever every task is blocked, so that sleeping costs nothing. It
    stands still while a task waits for a thread (``anyio.to_thread.run_sync``), a process (``anyio.run_process``) or
    anything inside :func:`mainspring.core.clock.real_work`. On asyncio it stands still, too, for ``loop.run_in_executor``, for
    libraries with a thread of their own (aiosqlite), and while a connection to another process or thread is open.

    The order in which tasks run, and every draw of Mainspring's own randomness, follow from ``seed``: equal seeds give equal
    runs, in any process. On trio a seed orders all tasks that can run. asyncio promises to run callbacks in the order in which
    they were scheduled: there a seed orders only timers that are due at the same instant. The timing of real threads and I/O is
    not reproducible.

    A run in which nothing can happen any more ends with :class:`DeadlockError`, which names the line each task waits on. A
    task that ticks for ever is no deadlock: put ``anyio.fail_after`` (which costs virtual seconds only) around such a test.

    :param backend: ``"trio"``, or ``"asyncio"`` for code that uses asyncio itself.
    :raises ConfigError: ``async_fn`` is a coroutine, not a function. Or the backend cannot be used: uvloop keeps real time, and
        trio may not be installed. Or the caller is inside a running event loop, or another virtual run on trio is under way in
        this process.
    """
    try:
        library = async_library()
    except RuntimeError:
        pass
    else:
        raise ConfigError(
            f"run_virtual starts an event loop and cannot be called inside one ({library} is running): await the function"
            " itself, or make the test a plain `def`; in an async test, ask for the fixture virtual_clock instead"
        )
    if iscoroutine(async_fn):
        async_fn.close()
        raise ConfigError(
            "run_virtual takes the async function, not a call of it: run_virtual(main, 1), not run_virtual(main(1))"
        )
    run = VirtualRun(seed, backend, can_leave=True)

    async def main() -> T:
        random.seed(seed)
        value: T = await run.judge.watch(async_fn, *args)
        return value

    with run.seeded():
        try:
            return anyio.run(main, backend=backend, backend_options=run.options)
        except BaseException as error:
            if run.judge.error is None or error is run.judge.error:
                raise
            raise run.judge.error from None  # trio wraps what comes out of its clock


class VirtualRun:
    """The parts of one virtual run: the clock, the judge, and the options for anyio.

    :raises ConfigError: ``backend`` has no virtual time, or is not installed.
    """

    def __init__(self, seed: int, backend: str = "trio", *, can_leave: bool = False) -> None:
        self.seed = seed
        self._time = _time_of(backend, can_leave=can_leave)
        self.judge: IdleJudge = self._time.judge
        self.clock = VirtualClock(self._time.clock)
        self.options: dict[str, Any] = self._time.options

    def seeded(self) -> AbstractContextManager[None]:
        """Seed the order of the tasks inside the block."""
        return self._time.seeded(self.seed)

    async def watch(self, async_fn: Callable[..., Awaitable[Any]], *args: Any, **keywords: Any) -> Any:
        """Run a test function on the clock of this run."""
        if clock.virtual_clock() is not self._time.clock:
            raise ConfigError(
                "the test does not run on its virtual clock: an async fixture of a wider scope keeps another event loop"
                " open; give that fixture the scope of a function"
            )
        return await self.judge.watch(async_fn, *args, **keywords)


def _time_of(backend: str, *, can_leave: bool) -> AsyncioTime | TrioTime:
    if backend == "asyncio":
        from mainspring.testing.asyncio_time import AsyncioTime

        return AsyncioTime(can_leave=can_leave)
    if backend == "trio":
        from mainspring.testing.trio_time import TrioTime

        return TrioTime(can_leave=can_leave)
    why = "uvloop keeps real time; " if backend == "uvloop" else ""
    raise ConfigError(f'virtual time: {why}backend must be "trio" or "asyncio", not {backend!r}')


class VirtualClock:
    """The clock of a virtual run, for its test: ``VirtualClock()`` inside the run, or the fixture ``virtual_clock``."""

    def __init__(self, virtual: Any = None) -> None:
        found = virtual if virtual is not None else clock.virtual_clock()
        if found is None:
            raise ConfigError("there is no virtual clock here: use it inside run_virtual, or the fixture virtual_clock")
        self._clock: Any = found

    def __repr__(self) -> str:
        return f"<VirtualClock {self.now:g} s>"

    @property
    def now(self) -> float:
        """Virtual seconds since the run began, as ``anyio.current_time()`` returns."""
        return float(self._clock.current_time())

    def utc_now(self) -> datetime:
        """Return the virtual date, in UTC: 2000-01-01 when the run began, and :attr:`now` seconds later.

        Mailboxes use this date: ``send(at=...)`` takes ``clock.utc_now() + timedelta(hours=1)``, not one from
        ``datetime.now(UTC)``.
        """
        return clock.virtual_date(self._clock)

    def advance(self, seconds: float) -> Settled:
        """Advance the clock by ``seconds`` at once, as if the process had been suspended for that time.

        Timers that became due meanwhile run late, all at the new time. ``await clock.advance(5)`` also lets them run: it
        returns when every other task is blocked again. For time that passes, with each timer at its own instant, use
        ``await anyio.sleep(5)``.

        :raises InvalidParameterError: ``seconds`` is negative, infinite or not a number.
        """
        if not 0 <= seconds < math.inf:
            raise InvalidParameterError(f"advance: seconds must be 0 or more, and finite, not {seconds!r}")
        self._clock.jump(seconds)
        return Settled(self._clock)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Keep the clock from moving by itself inside the block (``with clock.hold():``); :meth:`advance` still moves it.

        For real work that the run cannot see, such as a process of your own. Holds nest, and may overlap from several
        tasks; the clock continues when the last one ends.
        """
        with clock.hold(self._clock):
            yield

    @property
    def patience(self) -> float:
        """Real seconds without progress of real work after which the run counts as stuck; 60 by default, can be set."""
        judge: IdleJudge | None = vars(self._clock).get("_mainspring_idle")
        return judge.patience if judge is not None else math.inf

    @patience.setter
    def patience(self, seconds: float) -> None:
        judge: IdleJudge | None = vars(self._clock).get("_mainspring_idle")
        if judge is None:
            raise ConfigError("this clock was not made by run_virtual or the fixture virtual_clock; it has no patience")
        if not 0 < seconds < math.inf:
            raise InvalidParameterError(f"patience must be above 0 and finite, not {seconds!r}")
        judge.patience = float(seconds)


class Settled:
    """Awaited, it returns once every other task is blocked; not awaited, it does nothing."""

    def __init__(self, virtual: Any) -> None:
        self._clock = virtual

    def __await__(self) -> Generator[Any, None, None]:
        own = getattr(self._clock, "wait_all_tasks_blocked", None)
        if own is None:
            import trio.testing

            own = trio.testing.wait_all_tasks_blocked
        yield from own().__await__()
