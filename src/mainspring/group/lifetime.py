"""``Lifetime``: one run of a group, from the first signal handler to the last daemon."""

from __future__ import annotations

import math
import os
import signal
import threading
from contextlib import AsyncExitStack, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio

from mainspring.core import clock
from mainspring.core.state_machine import BEFORE_SHUTDOWN, GROUP, GroupState, StateMachine, Transition
from mainspring.core.tracebacks import where_thread
from mainspring.errors import ControlRefusedError, LoopNotRunningError
from mainspring.events import (
    CalibrationWarning,
    GroupPaused,
    GroupResumed,
    GroupStateChanged,
    GroupStopped,
    ShutdownRequested,
)
from mainspring.group.checks import Checks
from mainspring.group.lifespan import Lifespan
from mainspring.group.managed_loop import ManagedLoop
from mainspring.group.shutdown import Shutdown
from mainspring.group.startup_objects import full_collections_rare, startup_objects_frozen
from mainspring.group.thread_leaks import ThreadLeaks
from mainspring.group.until_empty import UntilEmpty
from mainspring.mailbox.mailbox import Mailbox
from mainspring.mailbox.ownership import open_in
from mainspring.runtime.hard_exit import last_words
from mainspring.runtime.orphans import OrphanReaper, is_init
from mainspring.runtime.scope import DaemonScope
from mainspring.runtime.service_manager import service_manager
from mainspring.runtime.shutdown_report import EXIT_BY_SIGNAL, EXIT_CANCELLED, Ending, PartReport, ShutdownReport
from mainspring.runtime.signals import ShutdownCoordinator
from mainspring.threads.entry import AnywhereEvent, Entry
from mainspring.validation import counted
from mainspring.watchdog.block_watch import BlockWatch
from mainspring.watchdog.watchdog import Watchdog
from mainspring.worker.actor import ask_all
from mainspring.worker.adapter import LoopAdapter
from mainspring.worker.context import NO_RESOURCES
from mainspring.worker.control import PauseRequest, ResumeRequest
from mainspring.worker.main_loop import MainLoop
from mainspring.worker.middleware import wrappers_of
from mainspring.worker.slots import Capacity

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from mainspring.core.dispatcher import Dispatcher
    from mainspring.group.settings import GroupSettings
    from mainspring.runtime.service_manager import ServiceManager
    from mainspring.worker.actor import LoopActor
    from mainspring.worker.delivery import Wrapper


class Lifetime:
    """Everything that exists once a run; a group that runs again gets a new one.

    Start order, and the reverse of the stop order: signals, block watch and guardian, health server, mailboxes, watchdog,
    loops. ``owner`` means that this run owns its process: it receives the signals, keeps what exists once all has started out
    of garbage collections, and leaves by force when it must.
    """

    def __init__(
        self,
        name: str,
        actors: Sequence[LoopActor],
        settings: GroupSettings,
        dispatcher: Dispatcher,
        *,
        owner: bool,
        keywords: dict[str, Any],
        until_empty: bool,
        warnings: Iterable[str],
        serve: Callable[[DaemonScope], Any] | None,
    ) -> None:
        self.name = name
        self.settings = settings
        self.started = False
        self.began = anyio.current_time()
        self.checks = Checks(
            name,
            settings.checks,
            dispatcher,
            timeout=settings.check_timeout,
            interval=settings.check_interval,
            max_failures=settings.check_max_failures,
        )
        self.crash: Exception | None = None
        self.report: ShutdownReport | None = None
        self.entry = Entry(f"group {name!r}")
        self.ended = AnywhereEvent(f"end of group {name}")
        self.phases: dict[str, float] = {}
        self.machine: StateMachine[GroupState] = StateMachine(
            GROUP, GroupState.IDLE, name=f"group {name!r}", now=self.began, on_transition=self._emit
        )
        self._owner = owner
        self._keywords = keywords
        self._until_empty = until_empty
        self._warnings = warnings
        self._dispatcher = dispatcher
        self._serve = serve
        self._thread_leaks = ThreadLeaks()
        self._exit_at = math.inf
        self._starting = anyio.CancelScope()
        self._watch: BlockWatch | None = None
        self._watchdog: Watchdog | None = None
        self._manager = service_manager() if owner else None
        self._scopes: list[DaemonScope] = []
        self._loops = [actor.loop for actor in actors]
        self.managed_loops = [
            ManagedLoop(actor, dispatcher=dispatcher, restart=settings.restart, changed=self._managed_loop_changed)
            for actor in actors
        ]
        self.shutdown = Shutdown(
            self.managed_loops,
            drain_delay=settings.drain_delay,
            cancel_grace=settings.cancel_grace,
            enter=self._enter,
            deadline_set=self._arm_exit,
        )

    # ------------------------------------------------------------------------------------------------------- the run

    async def run(self, ready: Callable[[], object]) -> None:
        """Run from start to end. ``ready`` is called once everything has started."""
        try:
            async with AsyncExitStack() as stack:
                if self._owner:
                    coordinator = ShutdownCoordinator.get() or ShutdownCoordinator()
                    await stack.enter_async_context(coordinator.during_run(self._on_trigger, self._on_signal_again))
                self._enter(GroupState.STARTING)
                await self._watch_for_blocks(stack)
                health = await stack.enter_async_context(DaemonScope(f"{self.name} health", timeout=5.0))
                self._scopes.append(health)
                if self._manager is not None:
                    health.start_soon(self._manager.run, self._alive, name="signs of life")
                if self._owner and is_init():
                    health.start_soon(OrphanReaper().run, name="orphans")
                if self._serve is not None:
                    await self._serve(health)
                await self._run_loops(ready)
            self._enter(GroupState.STOPPED)
            self._conclude()
        finally:
            if self._watch is not None:
                self._watch.call_off()
            if self._owner and self.report is not None and self._thread_leaks.threads():
                self._thread_leaks.leave_by(self._exit_at, EXIT_CANCELLED, self.report)
            if not self._owner:
                ShutdownCoordinator.warn_of_unentered()
            self.ended.set()

    async def _watch_for_blocks(self, stack: AsyncExitStack) -> None:
        guardian = self._owner if self.settings.guardian is None else self.settings.guardian
        threshold = self.settings.block_threshold
        if threshold is None and not self._owner:
            return
        self._watch = BlockWatch(
            block_threshold=math.inf if threshold is None else threshold, guardian=guardian and threshold is not None
        )
        await stack.enter_async_context(self._watch)

    async def _run_loops(self, ready: Callable[[], object]) -> None:
        grace = self.settings.cancel_grace
        async with DaemonScope(f"{self.name} mailboxes", timeout=grace) as mailboxes:
            async with DaemonScope(f"{self.name} lifespan", timeout=grace) as shared:
                try:
                    await self._run_loops_on(mailboxes, shared, ready)
                finally:
                    self._share(None, NO_RESOURCES, ())
            for daemon in reversed(mailboxes.daemons):
                daemon.ask()  # all at once: each may have to wait for a server that does not answer

    async def _run_loops_on(self, mailboxes: DaemonScope, shared: DaemonScope, ready: Callable[[], object]) -> None:
        async with DaemonScope(self.name, timeout=self.settings.cancel_grace) as scope:
            self._scopes += (scope, shared, mailboxes)
            with self._starting, full_collections_rare():
                if self.shutdown.requested.is_set():
                    self._starting.cancel()
                await open_in(mailboxes, self.mailboxes(), f"group {self.name!r}")
                resources: Any = NO_RESOURCES
                if self.settings.lifespan is not None:
                    lifespan = Lifespan(self.settings.lifespan, self.settings.cancel_grace)
                    shared.start_soon(lifespan.run, name="lifespan", stop=lifespan.stop)
                    resources = await lifespan.wait_opened()
                self._share(self.name, resources, wrappers_of(self.settings.middleware))
                if not self.shutdown.requested.is_set():  # opening may have met no point at which it could be cancelled
                    self._start(scope)
                    for managed in self.managed_loops:
                        await managed.begun.wait()
                    self._enter(GroupState.RUNNING)
                    ready()
            with startup_objects_frozen() if self._owner else nullcontext():
                await self.shutdown.requested.wait()
            if self.started:
                await self.shutdown.run()
                await self._after_the_loops()
            self._enter(GroupState.STOP_DAEMONS)
            self._arm_exit(anyio.current_time() + self.settings.shutdown_timeout)

    def _share(self, group: str | None, resources: Any, wrappers: Sequence[Wrapper]) -> None:
        """Set what the loops have of their group, for their next run."""
        for loop in self._loops:
            if isinstance(loop, MainLoop):
                loop.group, loop.resources, loop.outer_wrappers = group, resources, wrappers

    def _start(self, scope: DaemonScope) -> None:
        for text in self._warnings:
            self._dispatcher.dispatch(CalibrationWarning(self.name, text))
        if self.settings.watchdog_threshold is not None:
            self._watchdog = Watchdog(
                self._subjects,
                threshold=self.settings.watchdog_threshold,
                interval=self.settings.watchdog_interval,
                cancel_grace=self.settings.cancel_grace,
                dispatcher=self._dispatcher,
                kill=self.settings.kill,
            )
            scope.start_soon(self._watchdog.run, name="watchdog")
        if self.settings.checks:
            scope.start_soon(self.checks.run, name="checks")
        capacity = Capacity(self.settings.max_concurrency) if self.settings.max_concurrency is not None else None
        for managed in self.managed_loops:
            run: Callable[..., Any] = managed.run
            if capacity is not None and isinstance(managed.loop, MainLoop):
                run = partial(_run_within, capacity, managed, managed.loop)
            scope.start_soon(run, self._keywords, name=f"loop {managed.name}")
        if self._until_empty:
            found_empty = partial(self.request, "all mailboxes are empty", delay=False)
            until_empty = UntilEmpty(self._loops, self.mailboxes(), self._dispatcher, found_empty)
            scope.start_soon(until_empty.run, name="until empty")
        self.started = True

    async def _after_the_loops(self) -> None:
        """Take down what the report needs. Wait for what is stuck, which only an embedded group does."""
        self._note_report()
        stuck = [managed for managed in self.managed_loops if not managed.ended.is_set()]
        if not stuck:
            return
        assert self.report is not None
        self._dispatcher.dispatch(GroupStopped(self.name, self.report.exit_status, str(self.report)))
        for managed in stuck:
            # The one wait without an end: a process that owns itself is ended from outside of this loop meanwhile.
            await managed.ended.wait()

    # ------------------------------------------------------------------------------------------------------ requests

    def request(self, reason: str, timeout: float | None = None, *, delay: bool = True) -> None:
        """Ask for the shutdown. ``timeout``: seconds for the work in hand; None means the group's own."""
        first = not self.shutdown.requested.is_set()
        self.shutdown.request(reason, self.settings.shutdown_timeout if timeout is None else timeout, delay=delay)
        if first:
            self._dispatcher.dispatch(ShutdownRequested(self.name, reason))
            if self._manager is not None:
                delay_seconds = self.settings.drain_delay if delay else 0.0
                limit = self.settings.shutdown_timeout if timeout is None else timeout
                self._manager.stopping(delay_seconds + limit + self.settings.hard_limit, f"stopping: {reason}")
            if not self.started:  # something that is being opened may not let itself be cancelled
                self._starting.cancel()
                self._arm_exit(anyio.current_time() + self.settings.shutdown_timeout)

    def force(self, signum: int) -> None:
        """Skip to the cancelling, as a second signal does."""
        if not self.shutdown.requested.is_set():
            self.request(signal.Signals(signum).name)
        if self.shutdown.forced_by is None:
            self.shutdown.force(signum)

    def _on_trigger(self, reason: str) -> None:
        self.entry.call(partial(self.request, reason))

    def _on_signal_again(self, signum: int, count: int) -> None:
        if count == 1:  # the shutdown was asked for by other means before: this puts the usual limit on it
            self.request(signal.Signals(signum).name)
        elif self.shutdown.forced_by is None:
            self.force(signum)
        else:
            self.shutdown.forced_by = signum
            now = anyio.current_time()
            last_words(lambda: f"mainspring: leaving at once: {self._last_report(now)}")
            os._exit(EXIT_BY_SIGNAL + signum)

    async def pause(self, reason: str, timeout: float | None) -> None:
        """Have every loop that runs take no new work; see :meth:`LoopGroup.pause`."""
        await self._ask(await self.entry.ask(partial(self._begin_pause, reason)), PauseRequest, timeout)

    def _begin_pause(self, reason: str) -> list[ManagedLoop]:
        running = self._steered("pause")
        stubborn = [repr(managed.name) for managed in running if not managed.loop.pausable]
        if stubborn:
            raise ControlRefusedError(
                f"group {self.name!r} cannot be paused: {', '.join(stubborn)} has no plain methods pause() and resume()"
            )
        self._dispatcher.dispatch(GroupPaused(self.name, reason))
        return running

    async def resume(self, reason: str, timeout: float | None) -> None:
        """Have every loop that is paused take new work again; see :meth:`LoopGroup.resume`."""
        await self._ask(await self.entry.ask(partial(self._begin_resume, reason)), ResumeRequest, timeout)

    def _begin_resume(self, reason: str) -> list[ManagedLoop]:
        paused = [managed for managed in self._steered("resume") if managed.loop.paused]
        if paused:
            self._dispatcher.dispatch(GroupResumed(self.name, reason))
        return paused

    def _steered(self, what: str) -> list[ManagedLoop]:
        why = "it is shutting down" if self.shutdown.requested.is_set() else None if self.started else "it is starting"
        if why is not None:
            raise LoopNotRunningError(f"group {self.name!r} cannot {what}: {why}")
        return [managed for managed in self.managed_loops if managed.begun.is_set() and not managed.ended.is_set()]

    async def _ask(self, managed_loops: Sequence[ManagedLoop], make: Callable[[], Any], timeout: float | None) -> None:
        for answer in await ask_all([managed.actor for managed in managed_loops], make, timeout):
            if isinstance(answer, Exception) and not isinstance(answer, LoopNotRunningError):  # it has ended meanwhile
                raise answer

    def _arm_exit(self, deadline: float) -> None:
        """Have a process that owns itself leave by force some time after the finish deadline, whatever its handlers do."""
        if self._owner and self._watch is not None:
            forced = self.shutdown.forced_by
            status = EXIT_CANCELLED if forced is None else EXIT_BY_SIGNAL + forced
            now, read_at = anyio.current_time(), clock.monotonic()
            left = max(0.0, deadline - now) + self.settings.hard_limit
            self._exit_at = min(self._exit_at, read_at + left)
            if self._manager is not None:
                self._manager.extend(left)
            self._watch.exit_by(
                left,
                status=status,
                # Called on another thread, where the event loop's clock cannot be read.
                explain=lambda: self._last_report(now + clock.monotonic() - read_at),
            )

    # -------------------------------------------------------------------------------------------------------- ending

    def _managed_loop_changed(self) -> None:
        self.shutdown.changed()
        if self.shutdown.requested.is_set():
            return
        crashed = next((m for m in self.managed_loops if m.error is not None), None)
        if crashed is not None:
            self.crash = crashed.error
            self.request(f"loop {crashed.name!r} crashed", delay=False)
            # Without a handler, SIGTERM would end the process at once. Then only the error that the block raises ends it.
            handled = signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
            if not self._owner and self.settings.on_crash == "terminate" and handled:
                os.kill(os.getpid(), signal.SIGTERM)
        elif all(managed.ended.is_set() for managed in self.managed_loops):
            self.request("all loops ended", delay=False)

    def _note_report(self) -> None:
        for managed in self.managed_loops:
            if self.crash is None and managed.error is not None:
                self.crash = managed.error
        stopped = self.machine.state is GroupState.STOPPED
        self.report = self._make_report(self.machine.since if stopped else anyio.current_time())

    def _make_report(self, now: float, *, by_force: bool = False) -> ShutdownReport:
        """Return how the run ended, or stands. ``by_force``: the process leaves now, and what has not ended is stuck."""
        phases = dict(self.phases)
        if self.machine.state not in BEFORE_SHUTDOWN and self.machine.state is not GroupState.STOPPED:
            phases[str(self.machine.state)] = now - self.machine.since  # the one that is not over
        loops = tuple(managed.report(now) for managed in self.managed_loops) if self.started else ()
        daemons = [part for scope in self._scopes for part in scope.reports if part.ending is not Ending.FINISHED]
        if by_force and all(part.ending is not Ending.STUCK for part in loops):
            left = [daemon for scope in self._scopes for daemon in scope.daemons if not daemon.done]
            known = {part.name for part in daemons}
            daemons += [
                PartReport(daemon.name, Ending.STUCK, now - self.machine.since, tuple(filter(None, (daemon.where,))))
                for daemon in left
                if daemon.name not in known
            ]
            if not left and not daemons:
                line = where_thread(threading.main_thread().ident or 0)
                daemons.append(PartReport("the main thread", Ending.STUCK, now - self.machine.since, (line,)))
        return ShutdownReport(
            reason=self.shutdown.reason or "never started",
            duration=max(0.0, now - self.shutdown.began) if self.shutdown.reason else 0.0,
            parts=(*loops, *daemons),
            phases=phases,
            forced_by=self.shutdown.forced_by,
        )

    def _last_report(self, now: float) -> str:
        """Return the report of a process that leaves by force, with what becomes of the messages in hand."""
        lines = [str(self._make_report(now, by_force=True))]
        for durable, fate in (
            (True, "each comes again when its lease ends"),
            (False, "lost with this process's memory"),
        ):
            in_hand = sum(
                loop.in_flight
                for loop in self._loops
                if isinstance(loop, MainLoop) and loop.mailbox.capabilities.durable is durable
            )
            if in_hand:
                lines.append(f"  in hand: {counted(in_hand, 'message')}; {fate}")
        return "\n".join(lines)

    def _conclude(self) -> None:
        was_stuck = self.report is not None and any(part.ending is Ending.STUCK for part in self.report.parts)
        self._note_report()
        assert self.report is not None
        if not was_stuck:
            self._dispatcher.dispatch(GroupStopped(self.name, self.report.exit_status, str(self.report)))

    # -------------------------------------------------------------------------------------------------------- status

    def mailboxes(self) -> list[Mailbox[Any, Any]]:
        """Return the loops' mailboxes, each once."""
        found = [getattr(loop, "mailbox", None) for loop in self._loops]
        return list(dict.fromkeys(mailbox for mailbox in found if isinstance(mailbox, Mailbox)))

    @property
    def event_loop_lag(self) -> float | None:
        """See :attr:`BlockWatch.lag`."""
        return None if self._watch is None else self._watch.lag

    def _subjects(self) -> Iterable[Any]:
        for managed in self.managed_loops:
            if managed.stopping and isinstance(managed.loop, LoopAdapter):
                continue  # told to stop, it has no reason to beat; its end is the shutdown's to see to
            if not managed.ended.is_set():
                yield from managed.loop.runs
                yield from managed.loop.claims

    def _enter(self, state: GroupState) -> None:
        if self.machine.state is not state:
            self.machine.to(state, anyio.current_time())

    def _emit(self, transition: Transition[GroupState]) -> None:
        if transition.old not in BEFORE_SHUTDOWN:
            self.phases[str(transition.old)] = transition.seconds
        in_flight, timeout = 0, None
        if transition.new in (GroupState.FINISH, GroupState.CANCEL):
            in_flight = sum(managed.loop.in_flight for managed in self.managed_loops)
            cancels = transition.new is GroupState.CANCEL
            timeout = self.settings.cancel_grace if cancels else self.shutdown.remaining
        self._dispatcher.dispatch(
            GroupStateChanged(self.name, transition.old, transition.new, transition.seconds, in_flight, timeout)
        )
        if self._manager is not None:
            self._tell_manager(self._manager, transition.new, in_flight)

    def _tell_manager(self, manager: ServiceManager, state: GroupState, in_flight: int) -> None:
        if state is GroupState.RUNNING:
            manager.ready(f"running {counted(len(self.managed_loops), 'loop')}")
        elif state not in BEFORE_SHUTDOWN:
            waits = f", {counted(in_flight, 'message')} in hand" if in_flight else ""
            manager.tell(STATUS=f"stopping: {self.shutdown.reason}: {state}{waits}")

    def _alive(self) -> bool:
        """Return True while the group is live as ``/health/live`` has it, and its watchdog waits for no stalled message."""
        return self.crash is None and not (self._watchdog is not None and self._watchdog.stalled)


async def _run_within(capacity: Capacity, managed: ManagedLoop, loop: MainLoop, keywords: dict[str, Any]) -> None:
    """Run a loop within the slots of its group, for as long as it belongs to that: its next run may be on its own."""
    loop.capacity = capacity
    try:
        await managed.run(keywords)
    finally:
        loop.capacity = None
