"""The private parts of trio that virtual time needs. No other module uses private parts of trio.

Trio runs ready tasks in a random order. For hypothesis it has a switch that sorts them by age and then shuffles them with its
own generator; here that generator is seeded. Its ``MockClock`` calls ``_autojump`` when every task is blocked: only there can
a deadlock be detected. ``tests/testing/test_trio_internals.py`` fails, and users get a warning, if trio lacks these parts.
"""

from __future__ import annotations

import warnings
from collections import deque
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

from mainspring.core import process
from mainspring.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import trio
    from trio.lowlevel import RaiseCancelT
    from trio.testing import MockClock

_SWITCH, _GENERATOR = "_ALLOW_DETERMINISTIC_SCHEDULING", "_r"


def require_trio() -> None:
    """Raise :class:`ConfigError` if trio is not installed."""
    try:
        import_module("trio.testing")
    except ImportError as error:
        raise ConfigError("virtual time needs trio: pip install 'mainspring[test]'") from error


@contextmanager
def seeded_schedule(seed: int) -> Iterator[None]:
    """Seed trio's schedule in this process, and restore its state afterwards.

    Trio has one generator per process, so two such blocks at once are a :class:`ConfigError`.
    """
    run = _run_module()
    if run is None:
        warnings.warn(
            "this version of trio cannot be seeded: virtual time works, but the order of tasks is random",
            RuntimeWarning,
            stacklevel=4,
        )
        yield
        return
    process.claim("trio schedule", f"a virtual run with seed {seed}")
    generator, switch = getattr(run, _GENERATOR), getattr(run, _SWITCH)
    before = generator.getstate()
    try:
        setattr(run, _SWITCH, True)
        generator.seed(seed)
        yield
    finally:
        generator.setstate(before)
        setattr(run, _SWITCH, switch)
        process.disclaim("trio schedule")


def _run_module() -> Any | None:
    """Return the module of trio's run loop if it has the switch and the generator."""
    try:
        from trio._core import _run
    except ImportError:
        return None
    generator = getattr(_run, _GENERATOR, None)
    can = hasattr(_run, _SWITCH) and hasattr(generator, "seed") and hasattr(generator, "getstate")
    return _run if can else None


def replace_autojump(clock: MockClock, on_idle: Callable[[], None]) -> bool:
    """Have ``on_idle()`` called when ``clock`` would jump. Return False if this trio has no such hook."""
    if not callable(getattr(clock, "_autojump", None)):
        return False
    clock._autojump = on_idle  # type: ignore[method-assign]  # noqa: SLF001 - see the module
    return True


def stop_real_time(clock: MockClock) -> None:
    """Have ``clock`` tell its virtual time without reading the real one, which it would multiply by its rate of 0."""
    if hasattr(clock, "_virtual_base"):
        clock.current_time = lambda: clock._virtual_base  # type: ignore[method-assign]  # noqa: SLF001 - see the module


def expire_deadlines(now: float) -> bool:
    """Cancel the scopes whose deadlines have come, without a further round of trio's loop. Return False if this trio cannot.

    Trio itself does so at its next round, which has nothing else to do.
    """
    expire = getattr(getattr(_runner(), "deadlines", None), "expire", None)
    if not callable(expire):
        return False
    expire(now)
    return True


def interrupt(task: trio.lowlevel.Task, error: BaseException) -> None:
    """Raise ``error`` in a blocked task, shielded or not, if the call it is blocked in can be interrupted."""
    if getattr(task, "_abort_func", None) is None:
        return

    def raise_it() -> Any:
        raise error

    raising: RaiseCancelT = raise_it
    task._attempt_abort(raising)  # noqa: SLF001 - see the module


def descendants(task: trio.lowlevel.Task) -> Iterator[trio.lowlevel.Task]:
    """Yield ``task`` and all tasks below it, in start order."""
    yield task
    for nursery in task.child_nurseries:
        for child in sorted(nursery.child_tasks, key=lambda child: int(getattr(child, "_counter", 0))):
            yield from descendants(child)


class _RunQueue(deque[Any]):
    """Trio's queue of runnable tasks, which sets held tasks aside."""

    def __init__(self, held: Callable[[Any], bool]) -> None:
        super().__init__()
        self.held = held
        self.aside: list[Any] = []

    def append(self, task: Any) -> None:
        if self.held(task):
            self.aside.append(task)
        else:
            super().append(task)


class TaskHold:
    """Keeps chosen tasks of the running trio loop from running, as SIGSTOP or SIGKILL does with a process.

    A held task that becomes runnable (an event is set, a deadline passes, it is cancelled) runs when it is let go. Other
    tasks and time continue. ``held(task)`` is called each time a task becomes runnable; call :meth:`let_go` after its answer
    may have become false. A task that is running finishes its step.
    """

    def __init__(self, held: Callable[[trio.lowlevel.Task], bool]) -> None:
        self._runner = _runner()
        self._queue = _RunQueue(held)

    def start(self) -> None:
        """Start to hold tasks (idempotent)."""
        if self._runner.runq is not self._queue:
            self._queue.extend(task for task in self._runner.runq if not self._queue.held(task))
            self._queue.aside.extend(task for task in self._runner.runq if self._queue.held(task))
            self._runner.runq = self._queue

    def let_go(self) -> None:
        """Make the tasks runnable that are no longer held."""
        aside, self._queue.aside = self._queue.aside, []
        for task in aside:
            self._queue.append(task)


def can_hold_tasks() -> bool:
    """True if this trio has the queue that :class:`TaskHold` replaces. Call it inside a trio run."""
    runner = _runner()
    return isinstance(getattr(runner, "runq", None), deque) and callable(getattr(runner, "reschedule", None))


def _runner() -> Any:
    from trio._core._run import GLOBAL_RUN_CONTEXT

    return GLOBAL_RUN_CONTEXT.runner
