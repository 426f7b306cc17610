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
from mainspring.testing.trio_internals import require_trio, seeded_schedule

require_trio()

import trio.testing  # noqa: E402 - the line above tells how to install it

from mainspring.testing.idle import DeadlockError, IdleJudge  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator, Iterator
    from datetime import datetime

    from trio.testing import MockClock

__all__ = ["DeadlockError", "VirtualClock", "run_virtual"]

T = TypeVar("T")
Args = TypeVarTuple("Args")


def run_virtual(async_fn: Callable[[Unpack[Args]], Awaitable[T]], *args: *Args, seed: int = 0) -> T:
    """Run ``async_fn(*args)`` on trio in virtual time and return its value.

    Time starts at 0 and jumps to the next deadline whenever every task is blocked, so that sleeping costs nothing. It
    stands still while a task waits for a thread (``anyio.to_thread.run_sync``), a process (``anyio.run_process``) or
    anything inside :func:`mainspring.core.clock.real_work`. The order in which tasks run, and every draw of Mainspring's own
    randomness, follow from ``seed``: equal seeds give equal runs, in any process. The timing of real threads and I/O is not
    reproducible.

    A run in which nothing can happen any more ends with :class:`DeadlockError`, which names the line each task waits on. A
    task that ticks for ever is no deadlock: put ``anyio.fail_after`` (which costs virtual seconds only) around such a test.

    :raises ConfigError: ``async_fn`` is a coroutine, not a function. Or trio is not installed, the caller is inside a running
        event loop, or another virtual run is under way in this process.
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
    run = VirtualRun(seed, can_leave=True)

    async def main() -> T:
        random.seed(seed)
        value: T = await run.judge.watch(async_fn, *args)
        return value

    with seeded_schedule(seed):
        try:
            return anyio.run(main, backend="trio", backend_options=run.options)
        except trio.TrioInternalError:
            if run.judge.error is not None:
                raise run.judge.error from None
            raise


class VirtualRun:
    """The parts of one virtual run: the clock, the judge, and the options for anyio."""

    def __init__(self, seed: int, *, can_leave: bool = False) -> None:
        self.seed = seed
        self.mock = trio.testing.MockClock(autojump_threshold=0)
        self.judge = IdleJudge(self.mock, can_leave=can_leave)
        self.clock = VirtualClock(self.mock)
        self.options: dict[str, Any] = {"clock": self.mock}

    async def watch(self, async_fn: Callable[..., Awaitable[Any]], *args: Any, **keywords: Any) -> Any:
        """Run a test function on the clock of this run."""
        if clock.virtual_clock() is not self.mock:
            raise ConfigError(
                "the test does not run on its virtual clock: an async fixture of a wider scope keeps another event loop"
                " open; give that fixture the scope of a function"
            )
        return await self.judge.watch(async_fn, *args, **keywords)


class VirtualClock:
    """The clock of a virtual run, for its test: ``VirtualClock()`` inside the run, or the fixture ``virtual_clock``."""

    def __init__(self, mock: MockClock | None = None) -> None:
        found = mock if mock is not None else clock.virtual_clock()
        if found is None:
            raise ConfigError("there is no virtual clock here: use it inside run_virtual, or the fixture virtual_clock")
        self._mock: MockClock = found

    def __repr__(self) -> str:
        return f"<VirtualClock {self.now:g} s>"

    @property
    def now(self) -> float:
        """Virtual seconds since the run began, as ``anyio.current_time()`` returns."""
        return self._mock.current_time()

    def utc_now(self) -> datetime:
        """Return the virtual date, in UTC: 2000-01-01 when the run began, and :attr:`now` seconds later.

        Mailboxes use this date: ``send(at=...)`` takes ``clock.utc_now() + timedelta(hours=1)``, not one from
        ``datetime.now(UTC)``.
        """
        return clock.virtual_date(self._mock)

    def advance(self, seconds: float) -> Settled:
        """Advance the clock by ``seconds`` at once, as if the process had been suspended for that time.

        Timers that became due meanwhile run late, all at the new time. ``await clock.advance(5)`` also lets them run: it
        returns when every other task is blocked again. For time that passes, with each timer at its own instant, use
        ``await anyio.sleep(5)``.

        :raises InvalidParameterError: ``seconds`` is negative, infinite or not a number.
        """
        if not 0 <= seconds < math.inf:
            raise InvalidParameterError(f"advance: seconds must be 0 or more, and finite, not {seconds!r}")
        self._mock.jump(seconds)
        return Settled()

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Keep the clock from moving by itself inside the block (``with clock.hold():``); :meth:`advance` still moves it.

        For real work that the run cannot see, such as a process of your own. Holds nest, and may overlap from several
        tasks; the clock continues when the last one ends.
        """
        with clock.hold(self._mock):
            yield

    @property
    def patience(self) -> float:
        """Real seconds without progress of real work after which the run counts as stuck; 60 by default, can be set."""
        judge: IdleJudge | None = vars(self._mock).get("_mainspring_idle")
        return judge.patience if judge is not None else math.inf

    @patience.setter
    def patience(self, seconds: float) -> None:
        judge: IdleJudge | None = vars(self._mock).get("_mainspring_idle")
        if judge is None:
            raise ConfigError("this clock was not made by run_virtual or the fixture virtual_clock; it has no patience")
        if not 0 < seconds < math.inf:
            raise InvalidParameterError(f"patience must be above 0 and finite, not {seconds!r}")
        judge.patience = float(seconds)


class Settled:
    """Awaited, it returns once every other task is blocked; not awaited, it does nothing."""

    def __await__(self) -> Generator[Any, None, None]:
        return trio.testing.wait_all_tasks_blocked().__await__()
