"""``Member``: one loop of a group's run: its state, its restarts, and how it ended."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import anyio

from mainspring import entropy
from mainspring.errors import TaskExitError
from mainspring.events import Dispatcher, LoopCrashed, LoopStateChanged, ReceiveFailed, ReceiveRecovered
from mainspring.report import Ending, PartReport
from mainspring.scope import lone_error
from mainspring.states import SERVICE, ServiceState, StateMachine, Transition

if TYPE_CHECKING:
    from collections.abc import Callable

    from mainspring.loops.base import Steerable
    from mainspring.policies import RestartPolicy


class Member:
    """Runs a loop, restarts it after a crash as the policy says, and keeps its state machine."""

    def __init__(
        self,
        loop: Steerable,
        *,
        dispatcher: Dispatcher,
        restart: RestartPolicy | None,
        changed: Callable[[], None],
    ) -> None:
        self.loop = loop
        self.name = loop.name
        self.begun = anyio.Event()
        self.ended = anyio.Event()
        self.error: Exception | None = None
        self.restarts = 0
        self.stop_began: float | None = None
        self.ended_at: float | None = None
        self.cancelled_at: tuple[str, ...] | None = None
        self._dispatcher = dispatcher
        self._restart = restart
        self._changed = changed
        self._pause: anyio.CancelScope | None = None
        self._at_work = False
        self._machine: StateMachine[ServiceState] = StateMachine(
            SERVICE,
            ServiceState.INITIALIZING,
            name=f"loop {self.name!r}",
            now=anyio.current_time(),
            on_transition=self._emit,
        )
        self._unsubscribe = (
            dispatcher.subscribe(ReceiveFailed, partial(self._on_trouble, ServiceState.DEGRADED)),
            dispatcher.subscribe(ReceiveRecovered, partial(self._on_trouble, ServiceState.RUNNING)),
        )

    @property
    def state(self) -> ServiceState:
        """Where it is."""
        return self._machine.state

    @property
    def stopping(self) -> bool:
        """Whether it was told to stop."""
        return self.stop_began is not None

    async def run(self, keywords: dict[str, Any]) -> None:
        """Run the loop until it ends for good. Its last error is kept, not raised: the group decides what it means."""
        try:
            self._to(ServiceState.STARTING)
            while not self.stopping:
                self._to(ServiceState.RUNNING)
                self.begun.set()
                began = anyio.current_time()
                error = await self._run_once(keywords)
                if error is None:
                    break
                if not await self._restart_after(error, anyio.current_time() - began):
                    break
        finally:
            for unsubscribe in self._unsubscribe:
                unsubscribe()
            self._to(ServiceState.STOPPING)
            self._to(ServiceState.STOPPED)
            self.ended_at = anyio.current_time()
            self.begun.set()
            self.ended.set()
            self._changed()

    async def _run_once(self, keywords: dict[str, Any]) -> Exception | None:
        self._at_work = True
        try:
            await self.loop.run(**keywords)
        except (Exception, BaseExceptionGroup, SystemExit, KeyboardInterrupt) as raised:
            error = lone_error(raised)
            if isinstance(error, Exception):
                return error
            if not isinstance(error, SystemExit | KeyboardInterrupt):
                raise  # a cancellation among others: the task group's to sort out
            exit_error = TaskExitError(f"loop {self.name!r} raised {error!r}; to end the program, call shutdown()")
            exit_error.__cause__ = error
            return exit_error
        finally:
            self._at_work = False
        return None

    async def _restart_after(self, error: Exception, ran_for: float) -> bool:
        """Wait until it is time to restart; whether to do so. Not restarted because of a shutdown, it is no crash any more."""
        delay: float | None = None
        if self._restart is not None and not self.stopping:
            self.restarts, delay = self._restart.next_restart(self.restarts, ran_for, entropy.rng())
        self._dispatcher.dispatch(LoopCrashed(self.name, error, delay))
        if delay is None:
            self.error = error
            return False
        self._to(ServiceState.RESTARTING)
        with anyio.CancelScope() as self._pause:
            await anyio.sleep(delay)
        self._pause = None
        if self.stopping:
            return False
        self._to(ServiceState.STARTING)
        return True

    # ------------------------------------------------------------------------------------------------------ stopping

    def stop_intake(self, now: float) -> None:
        """Tell it to take no new work."""
        if self.stop_began is None:
            self.stop_began = now
            if self._pause is not None:
                self._pause.cancel()
            if self._at_work:  # else the loop would remember it, and its next run would end before it began
                self.loop.stop_intake()

    def cancel_work(self) -> None:
        """Cancel its work, remembering the lines that it stood on; once."""
        if not self.ended.is_set() and self.cancelled_at is None:
            self.cancelled_at = self.where()
            self.loop.cancel_work()

    def abort(self) -> None:
        """Cancel its run, settlements included, where cancelling the work was not enough; remembers the lines again."""
        if not self.ended.is_set():
            self.cancelled_at = tuple(dict.fromkeys((*(self.cancelled_at or ()), *self.where())))
            self.loop.abort()

    def where(self) -> tuple[str, ...]:
        """The lines its work waits on."""
        return tuple(sorted({line for run in self.loop.runs if (line := run.where())}))

    def report(self, now: float) -> PartReport:
        """How it ended, or how it stands."""
        until = now if self.ended_at is None else self.ended_at
        seconds = 0.0 if self.stop_began is None else max(0.0, until - self.stop_began)
        if not self.ended.is_set():
            # The remembered lines first: this may be called on another thread, for which a task that spins has no line.
            return PartReport(self.name, Ending.STUCK, seconds, self.cancelled_at or self.where())
        if self.error is not None:
            return PartReport(self.name, Ending.CRASHED, seconds)
        if self.cancelled_at is not None:
            return PartReport(self.name, Ending.CANCELLED, seconds, self.cancelled_at)
        return PartReport(self.name, Ending.FINISHED, seconds)

    # -------------------------------------------------------------------------------------------------------- states

    def _on_trouble(self, new: ServiceState, event: ReceiveFailed | ReceiveRecovered) -> None:
        if event.loop == self.name and self._machine.state is not new and self._machine.can(new):
            self._to(new)

    def _to(self, new: ServiceState) -> None:
        self._machine.to(new, anyio.current_time())

    def _emit(self, transition: Transition[ServiceState]) -> None:
        self._dispatcher.dispatch(LoopStateChanged(self.name, transition.old, transition.new, transition.seconds))
