"""One loop of a group's run: its actor, its state, its restarts, and how it ended."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio

from mainspring.core.lazy_event import LazyEvent
from mainspring.core.state_machine import ServiceState, Transition
from mainspring.errors import ConfigError, TaskExitError
from mainspring.events import LoopCrashed, LoopStateChanged, ReceiveFailed, ReceiveRecovered
from mainspring.runtime.scope import lone_error
from mainspring.runtime.shutdown_report import Ending, PartReport
from mainspring.services.life import Life
from mainspring.services.restarts import RunEnd, StartAgain
from mainspring.worker.actor import LoopActor
from mainspring.worker.adapter import LoopAdapter
from mainspring.worker.control import DrainRequest, ShutdownNotice, ShutdownRequest
from mainspring.worker.runnable import AnyRunnable, Runnable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from mainspring.core.dispatcher import Dispatcher
    from mainspring.policies import RestartPolicy


def _loop_of(given: Any) -> str:
    """Return what to write instead of something that makes loops, as a ``Tasks`` does."""
    return "; write LoopGroup([tasks.loop()])" if callable(getattr(given, "loop", None)) else ""


def actors_of(loops: Iterable[AnyRunnable]) -> list[LoopActor]:
    """Return the actors of the loops. A loop that is an actor already stays as it is."""
    if isinstance(loops, Runnable) or not isinstance(loops, Iterable):
        raise ConfigError(f"LoopGroup: its first argument is a list of loops, not {loops!r}{_loop_of(loops)}")
    actors: list[LoopActor] = []
    names: set[str] = set()
    owned: set[int] = set()  # of `actors`, which keep them
    for loop in loops:
        if not isinstance(loop, Runnable):
            raise ConfigError(
                f"LoopGroup: {loop!r} is no loop"
                f"{_loop_of(loop) or '; it needs run(), shutdown(), running and heartbeat (see Runnable)'}"
            )
        actor = loop if isinstance(loop, LoopActor) else LoopActor(loop)
        if id(_own(actor)) in owned:
            raise ConfigError(f"LoopGroup: {loop!r} stands in it twice; name it once, or make a second loop")
        owned.add(id(_own(actor)))
        unique, count = actor.name, 1
        while unique in names:
            count += 1
            unique = f"{actor.name}-{count}"
        names.add(unique)
        actor.loop.name = unique
        actors.append(actor)
    if not actors:
        raise ConfigError("LoopGroup: it needs at least one loop")
    return actors


def _own(actor: LoopActor) -> AnyRunnable:
    """Return what the user made."""
    return actor.loop.loop if isinstance(actor.loop, LoopAdapter) else actor.loop


class ManagedLoop:
    """Runs a loop, restarts it after a crash as the policy says, and keeps its state machine. It steers it by messages to its
    actor, which serves them from the first run to the end of the last."""

    def __init__(
        self,
        actor: LoopActor,
        *,
        dispatcher: Dispatcher,
        restart: RestartPolicy | None,
        changed: Callable[[], None],
    ) -> None:
        self.actor = actor
        self.loop = actor.loop
        self.name = actor.name
        self.begun = LazyEvent()
        self.ended = LazyEvent()
        self.error: Exception | None = None
        self.ended_at: float | None = None
        self._dispatcher = dispatcher
        self._changed = changed
        self.life = Life(f"loop {self.name!r}", policy=restart, on_transition=self._emit)
        self._unsubscribe = (
            dispatcher.subscribe(ReceiveFailed, partial(self._on_trouble, ServiceState.DEGRADED)),
            dispatcher.subscribe(ReceiveRecovered, partial(self._on_trouble, ServiceState.RUNNING)),
        )

    @property
    def stopping(self) -> bool:
        """True if it was told to stop: with the group, or alone."""
        return self.actor.stopped.is_set()

    async def run(self, keywords: dict[str, Any]) -> None:
        """Run the loop until it ends for good. Its last error is kept, not raised: the group decides what it means."""
        try:
            async with self.actor.serving(self._enter_stopping) as run_loop:
                await self._run_until_told(partial(run_loop, **keywords))
        finally:
            for unsubscribe in self._unsubscribe:
                unsubscribe()
            self._enter_stopping()
            self.life.to(ServiceState.STOPPED)
            self.ended_at = anyio.current_time()
            self.begun.set()
            self.ended.set()
            self._changed()

    async def _run_until_told(self, run_loop: Callable[[], Awaitable[None]]) -> None:
        self.life.to(ServiceState.STARTING)
        while not self.stopping:
            self.life.to(ServiceState.RUNNING)
            self.begun.set()
            began = anyio.current_time()
            error = await self._run_once(run_loop)
            if error is None or not await self._restart_after(error, anyio.current_time() - began):
                break

    async def _run_once(self, run_loop: Callable[[], Awaitable[None]]) -> Exception | None:
        try:
            await run_loop()
        except (Exception, BaseExceptionGroup, SystemExit, KeyboardInterrupt) as raised:
            error = lone_error(raised)
            if isinstance(error, Exception):
                return error
            if not isinstance(error, SystemExit | KeyboardInterrupt):
                raise  # a cancellation among others: the task group's to sort out
            exit_error = TaskExitError(f"loop {self.name!r} raised {error!r}; to end the program, call shutdown()")
            exit_error.__cause__ = error
            return exit_error
        return None

    async def _restart_after(self, error: Exception, ran_for: float) -> bool:
        """Wait until it is time to restart. Return False if it stays down, or if a shutdown has come meanwhile."""
        decision = None if self.stopping else self.life.after(RunEnd(failed=True, well_for=ran_for))
        if not isinstance(decision, StartAgain):
            self._dispatcher.dispatch(LoopCrashed(self.name, error, None))
            self.error = error
            return False
        self._dispatcher.dispatch(LoopCrashed(self.name, error, decision.delay))
        self.life.to(ServiceState.RESTARTING)
        with anyio.move_on_after(decision.delay):
            await self.actor.stopped.wait()
        if self.stopping:
            return False
        self.life.to(ServiceState.STARTING)
        return True

    # ------------------------------------------------------------------------------------------------------ stopping

    def announce_shutdown(self) -> None:
        """Tell its work that the end is near."""
        self.actor.tell(ShutdownNotice())

    def stop_intake(self, within: float) -> None:
        """Tell it to take no new work, and that its work is cancelled ``within`` seconds from now; once."""
        if not self.stopping:
            self.actor.tell(DrainRequest(within=within))

    def _enter_stopping(self) -> None:
        if self.life.can(ServiceState.STOPPING):
            self.life.to(ServiceState.STOPPING)

    def cancel_work(self) -> None:
        """Tell it to cancel its work; once."""
        if self.actor.cancelled_at is None:
            self.actor.tell(ShutdownRequest(timeout=0, cancel_grace=math.inf))

    def abort(self) -> None:
        """Tell it to cancel its run, settlements included, where cancelling the work was not enough."""
        self.actor.tell(ShutdownRequest(timeout=0, cancel_grace=0))

    def report(self, now: float) -> PartReport:
        """Return how it ended, or how it stands."""
        until = now if self.ended_at is None else self.ended_at
        began, cancelled_at = self.actor.stop_began, self.actor.cancelled_at
        seconds = 0.0 if began is None else max(0.0, until - began)
        if not self.ended.is_set():
            # The remembered lines first: this may be called on another thread, for which a task that spins has no line.
            return PartReport(self.name, Ending.STUCK, seconds, cancelled_at or self.actor.where())
        if isinstance(self.loop, LoopAdapter) and (left := self.loop.left_behind) is not None:
            return PartReport(self.name, Ending.STUCK, seconds, (left,))
        if self.error is not None:
            return PartReport(self.name, Ending.CRASHED, seconds)
        if cancelled_at is not None:
            return PartReport(self.name, Ending.CANCELLED, seconds, cancelled_at)
        return PartReport(self.name, Ending.FINISHED, seconds)

    # -------------------------------------------------------------------------------------------------------- states

    def _on_trouble(self, new: ServiceState, event: ReceiveFailed | ReceiveRecovered) -> None:
        if event.loop == self.name and self.life.state is not new and self.life.can(new):
            self.life.to(new)

    def _emit(self, transition: Transition[ServiceState]) -> None:
        self._dispatcher.dispatch(LoopStateChanged(self.name, transition.old, transition.new, transition.seconds))
