"""The adapter for loops of foreign make, steered by the little that ``Runnable`` promises."""

from __future__ import annotations

import inspect
import math
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import anyio

from mainspring.core.clock import real_work
from mainspring.core.introspection import innermost, is_async, ran
from mainspring.core.loggers import Logger
from mainspring.core.tracebacks import where
from mainspring.errors import ConfigError, TaskExitError
from mainspring.runtime.cancellation import is_spurious_cancellation, native_cancels
from mainspring.runtime.heartbeat import Heartbeat
from mainspring.threads.entry import Entry
from mainspring.threads.own_thread import OwnThread
from mainspring.validation import MAX_DELAY, is_number, is_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from mainspring.errors import HandlerStalledError
    from mainspring.worker.actor import LoopActor
    from mainspring.worker.runnable import AnyRunnable


RUN_KEYWORDS = ("max_iterations", "visibility_timeout", "wait_time_seconds")


class Form:
    """How one method can be called: ``is_async``, and with which of the keywords that are offered.

    :raises ConfigError: it cannot be called so, is a generator, or needs more than it can be given.
    """

    def __init__(self, owner: object, name: str, offered: Collection[str], always: Collection[str] = ()) -> None:
        self._called = f"{owner!r}: {name}()"
        fn = getattr(owner, name)
        if isinstance(owner, type):
            raise ConfigError(f"{owner!r} is a class; give an instance of it")
        if not callable(fn):
            raise ConfigError(f"{owner!r}: {name} must be a method, plain or async, not {fn!r}")
        target = innermost(fn)
        if inspect.isasyncgenfunction(target) or inspect.isgeneratorfunction(target):
            raise ConfigError(f"{self._called} is a generator, which only yields; let it return when it is done")
        self.is_async = is_async(fn)
        self._keywords, self._any = self._parameters(fn, offered, always)

    def _parameters(self, fn: Any, offered: Collection[str], always: Collection[str]) -> tuple[frozenset[str], bool]:
        try:
            parameters = inspect.signature(fn).parameters.values()
        except (TypeError, ValueError):  # of C code that does not tell
            return frozenset(), False
        named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        for one in parameters:
            needed = one.default is inspect.Parameter.empty and one.kind not in variable
            if needed and not (one.kind in named and one.name in always):
                given = ", ".join(offered)
                raise ConfigError(
                    f"{self._called} needs {one.name!r}: give it a default; it may be called with nothing but {given}"
                )
        accepted = frozenset(one.name for one in parameters if one.kind in named and one.name in offered)
        return accepted, any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters)

    def accepted(self, keywords: dict[str, Any]) -> dict[str, Any]:
        """Return those of ``keywords`` that the method takes."""
        return {name: value for name, value in keywords.items() if self._any or name in self._keywords}


def value_of(owner: object, name: str, default: Any = None) -> Any:
    """Return an attribute, or what the plain function of that name returns; ``default`` where it is async or missing."""
    found = getattr(owner, name, default)
    if inspect.isroutine(innermost(found)):
        method: Callable[[], Any] = found
        return default if is_async(method) else method()
    return found


def check_heartbeat(owner: object) -> None:
    """Raise :class:`ConfigError` where ``heartbeat`` is neither a Heartbeat, nor None."""
    found = value_of(owner, "heartbeat")
    if found is not None and not all(callable(getattr(found, name, None)) for name in ("beat", "elapsed")):
        raise ConfigError(f"{owner!r}: heartbeat must be a Heartbeat, or None (then it is not judged), not {found!r}")


_log = Logger("mainspring")

LEAVE_AFTER = 5.0
"""Seconds for which the thread of a plain ``run`` is waited for after its cancellation, unless a shutdown aborts it earlier."""


class LoopAdapter:
    """Adapts a ``Runnable`` to what an actor steers by. Intake stops by its ``shutdown``, and work is cancelled with its run.
    Plain methods ``pause`` and ``resume`` pause it, if it has them.

    A plain ``run`` has a thread of its own, in which it cannot be cancelled. If it does not end it is left behind, and cannot
    be run again before it has. A plain ``shutdown`` is called where ``run`` runs: on the event loop, or in a thread.

    For the watchdog it is one piece: its heartbeat counts, and a stall ends its run with the error, as a crash.

    :raises ConfigError: one of its members has a form in which it cannot be used.
    """

    def __init__(self, loop: AnyRunnable) -> None:
        self._run_form = Form(loop, "run", RUN_KEYWORDS)
        self._shutdown_form = Form(loop, "shutdown", ("timeout",), always=("timeout",))
        check_heartbeat(loop)
        self.loop = loop
        self.name = str(_option(loop, "name", None) or type(loop).__name__)
        self.pausable: bool = all(_is_plain(getattr(loop, name, None)) for name in ("pause", "resume"))
        self.paused = False
        self.shutdown_timeout: float | None = _option(loop, "shutdown_timeout", None)
        self.shutdown_priority: int = _option(loop, "shutdown_priority", 0)
        if self.shutdown_timeout is not None and not is_number(self.shutdown_timeout, 0):
            raise ConfigError(
                f"{loop!r}: shutdown_timeout must be 0 or more seconds, or None, not {self.shutdown_timeout!r}"
            )
        if not is_whole(self.shutdown_priority):
            raise ConfigError(f"{loop!r}: shutdown_priority must be a whole number, not {self.shutdown_priority!r}")
        self.claims: Sequence[Any] = ()
        self.actor: LoopActor | None = None
        self._scope: anyio.CancelScope | None = None
        self._entry: Entry | None = None
        self._stop = anyio.Event()
        self._subject: _AdapterRun | None = None
        self._thread: OwnThread[Any] | None = None
        self._waits: anyio.CancelScope | None = None

    def __repr__(self) -> str:
        return f"<LoopAdapter {self.name!r}>"

    @property
    def left_behind(self) -> str | None:
        """The line on which the thread of a run stands that has ended without it, or None."""
        thread = self._thread
        return thread.where if thread is not None and self._scope is None and not thread.done else None

    async def run(self, **keywords: Any) -> None:
        """Run the loop with those of ``keywords`` that it accepts; its ``shutdown`` is called from here when it is time.

        :raises ConfigError: an earlier run was left behind in its thread, and still goes on.
        """
        if self.left_behind is not None:
            raise ConfigError(f"loop {self.name!r}: its earlier run was left behind and is still at {self.left_behind}")
        self._stop = anyio.Event()
        self._entry = Entry(f"loop {self.name!r}")
        self._scope = anyio.CancelScope()
        self._subject = subject = _AdapterRun(self, self._scope)
        self.heartbeat.beat()  # from here on: how long ago an earlier run gave its last sign of life says nothing
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._shut_down_when_told)
                with self._scope:
                    await self._run_once(subject, partial(self.loop.run, **self._run_form.accepted(keywords)))
                tasks.cancel_scope.cancel()
        finally:
            self._scope = self._entry = self._subject = None
            subject.done = True
            subject.coroutine = None
        if subject.error is not None:
            raise subject.error

    async def _run_once(self, subject: _AdapterRun, run: Callable[[], Any]) -> None:
        result = run() if self._run_form.is_async else await self._run_in_thread(subject, run)
        if inspect.isawaitable(result):
            subject.coroutine = result
            result = await self._awaited(result, "run")
        ran(result, f"run() of loop {self.name!r}")

    async def _run_in_thread(self, subject: _AdapterRun, run: Callable[[], Any]) -> Any:
        self._thread = subject.thread = thread = OwnThread(run, self.name)
        try:
            return await thread.wait()
        except anyio.get_cancelled_exc_class():
            end = anyio.current_time() + LEAVE_AFTER
            with real_work(), anyio.CancelScope(shield=True, deadline=end) as self._waits:
                await thread.ended.wait()
            self._waits = None
            if not thread.done:
                _log.error("the thread of loop %r did not end, and is left behind at %s", self.name, thread.where)
            raise

    async def _shut_down_when_told(self) -> None:
        await self._stop.wait()
        timeout = math.inf if self.actor is None else self.actor.stop_within
        if self._run_form.is_async:
            await self.shutdown(timeout=timeout)
        else:
            with real_work():  # until the run ends, and cancels this
                await self.shutdown(timeout=timeout)
                await anyio.sleep_forever()

    async def shutdown(self, *, timeout: float = 30.0) -> bool:
        """Call the loop's own, with ``timeout`` where it takes that; True where that returns None."""
        keywords = self._shutdown_form.accepted(
            {"timeout": min(timeout, MAX_DELAY)}
        )  # no infinity, which few calls take
        shutdown = partial(self.loop.shutdown, **keywords)
        if self._shutdown_form.is_async or self._run_form.is_async:
            result = shutdown()
        else:
            result = await OwnThread(shutdown, f"shutdown of {self.name}").wait()
        if inspect.isawaitable(result):
            result = await self._awaited(result, "shutdown")
        ran(result, f"shutdown() of loop {self.name!r}")
        return result is None or bool(result)

    async def _awaited(self, awaitable: Any, name: str) -> Any:
        """Await what a member of the loop has returned.

        A future that was cancelled raises a spurious cancellation here, which a task group would take for its own.
        """
        try:
            return await awaitable
        except anyio.get_cancelled_exc_class() as error:
            if native_cancels()() or not await is_spurious_cancellation():
                raise
            raise TaskExitError(f"{name}() of loop {self.name!r} was cancelled by itself") from error

    @property
    def running(self) -> bool:
        """The loop's own, or, where that is async, whether a run is under way here."""
        return bool(value_of(self.loop, "running", self._scope is not None))

    @property
    def heartbeat(self) -> Heartbeat:
        """The loop's own heartbeat. If it has none, a heartbeat that never ages."""
        return value_of(self.loop, "heartbeat") or _UNJUDGED

    def announce_shutdown(self) -> None:
        """Do nothing: a foreign loop learns of a shutdown when it is told to stop."""

    def stop_intake(self) -> None:
        """Have its ``shutdown`` called."""
        self._call(self._stop.set)

    def pause(self) -> None:
        """Call its ``pause``."""
        self._call(partial(self._switch, "pause", True))

    def resume(self) -> None:
        """Call its ``resume``."""
        self._call(partial(self._switch, "resume", False))

    async def wait_paused(self) -> None:
        """Return at once: the loop is paused when its ``pause`` has returned."""

    def _switch(self, name: str, paused: bool) -> None:
        ran(getattr(self.loop, name)(), f"{name}() of loop {self.name!r}")
        self.paused = paused

    def cancel_work(self) -> None:
        """Cancel its run."""
        scope = self._scope
        if scope is not None:
            self._call(scope.cancel)

    def abort(self) -> None:
        """Cancel its run, and leave its thread behind."""
        self.cancel_work()
        self._call(self._leave_behind)

    def _leave_behind(self) -> None:
        if self._waits is not None:
            self._waits.cancel()

    def _call(self, fn: Callable[[], object]) -> None:
        """Call ``fn()`` on the event loop of the run that is under way, else here."""
        entry = self._entry
        if entry is None:
            fn()
        else:
            entry.call(fn)

    @property
    def runs(self) -> Sequence[_AdapterRun]:
        """Its run, as the one subject that beats."""
        return (self._subject,) if self._subject is not None else ()

    @property
    def in_flight(self) -> int:
        """What the loop says of itself, if it does."""
        return int(_option(self.loop, "in_flight", 0))

    @property
    def trouble(self) -> str | None:
        """What the loop says of itself, if it does."""
        trouble: str | None = _option(self.loop, "trouble", None)
        return trouble


class _AdapterRun:
    """One run of a foreign loop, as a subject of the watchdog: a run that follows a stall is another subject."""

    message_id: str | None = None

    def __init__(self, loop: LoopAdapter, scope: anyio.CancelScope) -> None:
        self.name = loop.name
        self.done = False
        self.error: HandlerStalledError | None = None
        self.coroutine: Any = None
        self.thread: OwnThread[Any] | None = None
        self._loop = loop
        self._scope = scope

    def beat_age(self) -> float:
        """Return the seconds since the loop's heartbeat."""
        return self._loop.heartbeat.elapsed()

    def where(self) -> str:
        """Return the line that its ``run`` waits on, or executes in its thread; tasks of its own making are not known."""
        return where(self.coroutine) if self.thread is None or self.thread.done else self.thread.where

    def stall(self, error: HandlerStalledError) -> None:
        """End the run with ``error``."""
        self.error = error
        del error  # on trio the traceback of the cancellation, which becomes its cause, refers to this frame
        self._scope.cancel()


class _Unjudged(Heartbeat):
    """The heartbeat of a loop that has none: it is not judged."""

    __slots__ = ()

    def elapsed(self) -> float:
        return 0.0


_UNJUDGED: Final = _Unjudged()


def _option(loop: object, name: str, default: Any) -> Any:
    value = value_of(loop, name, default)
    return default if callable(value) or (isinstance(value, float) and math.isnan(value)) else value


def _is_plain(fn: object) -> bool:
    return callable(fn) and not is_async(fn)
