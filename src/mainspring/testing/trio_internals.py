"""The parts of trio that are not public and that virtual time needs, all in this file.

Trio runs the tasks that are ready in a random order. For the sake of hypothesis it has a switch that sorts them by age
and shuffles them with a generator of its own; here that generator is seeded. And its ``MockClock`` calls ``_autojump``
when every task is blocked: the one point at which one can judge whether anything can still happen.
A trio without these parts is noticed by ``tests/testing/test_trio_internals.py``, and by users as a warning.
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
    """Raise :class:`ConfigError` where trio is not installed."""
    try:
        import_module("trio.testing")
    except ImportError as error:
        raise ConfigError("virtual time needs trio: pip install 'mainspring[test]'") from error


@contextmanager
def seeded_schedule(seed: int) -> Iterator[None]:
    """Let trio's schedule in this process follow from ``seed``, and put everything back afterwards.

    There is one generator per process, so two such blocks at once are a :class:`ConfigError`.
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
    """Trio's run loop, where it has the switch and the generator."""
    try:
        from trio._core import _run
    except ImportError:
        return None
    generator = getattr(_run, _GENERATOR, None)
    can = hasattr(_run, _SWITCH) and hasattr(generator, "seed") and hasattr(generator, "getstate")
    return _run if can else None


def replace_autojump(clock: MockClock, on_idle: Callable[[], None]) -> bool:
    """Have ``on_idle()`` called where ``clock`` would jump; False where this trio has no such point."""
    if not callable(getattr(clock, "_autojump", None)):
        return False
    clock._autojump = on_idle  # type: ignore[method-assign]  # noqa: SLF001 - see the module
    return True


def interrupt(task: trio.lowlevel.Task, error: BaseException) -> None:
    """Raise ``error`` in a blocked task, shielded or not, where the call it is blocked in can be interrupted at all."""
    if getattr(task, "_abort_func", None) is None:
        return

    def raise_it() -> Any:
        raise error

    raising: RaiseCancelT = raise_it
    task._attempt_abort(raising)  # noqa: SLF001 - see the module


def descendants(task: trio.lowlevel.Task) -> Iterator[trio.lowlevel.Task]:
    """``task`` and all the tasks below it, in the order in which they were started."""
    yield task
    for nursery in task.child_nurseries:
        for child in sorted(nursery.child_tasks, key=lambda child: int(getattr(child, "_counter", 0))):
            yield from descendants(child)


class _Runnable(deque[Any]):
    """Trio's queue of tasks that can run, which keeps aside those that somebody holds."""

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
    """Keeps chosen tasks of the running trio loop from running, as SIGSTOP does with a process, or SIGKILL.

    A held task that would run (its event came, its deadline passed, it was cancelled) does so when it is let go: everything
    around it goes on meanwhile, time included. ``held(task)`` is asked each time a task becomes runnable; call :meth:`let_go`
    after its answer may have changed to no. One that is running its step at that moment finishes it.
    """

    def __init__(self, held: Callable[[trio.lowlevel.Task], bool]) -> None:
        self._runner = _runner()
        self._queue = _Runnable(held)

    def start(self) -> None:
        """From now on tasks are held (idempotent)."""
        if self._runner.runq is not self._queue:
            self._queue.extend(task for task in self._runner.runq if not self._queue.held(task))
            self._queue.aside.extend(task for task in self._runner.runq if self._queue.held(task))
            self._runner.runq = self._queue

    def let_go(self) -> None:
        """Let those run that are not held any more."""
        aside, self._queue.aside = self._queue.aside, []
        for task in aside:
            self._queue.append(task)


def can_hold_tasks() -> bool:
    """Whether this trio has the queue that :class:`TaskHold` stands in for; to be asked inside of a trio run."""
    runner = _runner()
    return isinstance(getattr(runner, "runq", None), deque) and callable(getattr(runner, "reschedule", None))


def _runner() -> Any:
    from trio._core._run import GLOBAL_RUN_CONTEXT

    return GLOBAL_RUN_CONTEXT.runner
