"""``Process``: one simulated process of a worker: its group, its connection, its clocks, and the ways in which it ends."""

from __future__ import annotations

import math
from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import trio

from mainspring import events
from mainspring.core import clock, random
from mainspring.mailbox.mailbox import Mailbox
from mainspring.testing.simulation.faults import generator
from mainspring.testing.simulation.store import SimulatedBackend
from mainspring.worker.main_loop import MainLoop

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from mainspring.group.group import LoopGroup
    from mainspring.mailbox.message import Message
    from mainspring.testing.simulation.world import World

SLOW_HANDLER = 300.0
"""Longest delay of a slow handler, in seconds."""
SWALLOWED = 20.0
"""Longest time for which a handler ignores its cancellation, in seconds."""

inside: ContextVar[Process | None] = ContextVar("mainspring_simulated_process", default=None)
"""The process that the current task belongs to. A task is held while its process is frozen or dead."""


class InjectedError(Exception):
    """Raised in a handler that was drawn to fail."""


class _Killed(BaseException):
    """Raised where the watchdog would send SIGKILL to its own process, so that no later code runs."""


class Process:
    """One process of the fleet. ``halted``: its tasks are held; ``gone``: it is dead."""

    def __init__(self, world: World, worker: int, life: int) -> None:
        self.world = world
        self.worker = worker
        self.lane = f"w{worker}.{life}"
        self.halted = False
        self.gone = False
        self.frozen = 0.0
        self.restart_in = 1.0
        self.started = trio.Event()
        self.ended = trio.Event()
        self.thawed = trio.Event()
        self.replaced = trio.Event()
        self.scope = trio.CancelScope()
        self.task: trio.lowlevel.Task | None = None
        self.wall = clock.WallSkew()
        self.stubborn_until = -math.inf
        rng = generator(world.seed, self.lane)
        self.connection = SimulatedBackend(world.name, world.store, self.lane, rng, world.faults.slow_call)
        self.mailbox = Mailbox(self.connection)
        self.group: LoopGroup | None = None
        self._randomness = rng.getrandbits(64)

    def __repr__(self) -> str:
        return f"<Process {self.lane}{' gone' if self.gone else ' halted' if self.halted else ''}>"

    async def run(self) -> None:
        """Build the group and run it to its end."""
        inside.set(self)
        self.task = trio.lowlevel.current_task()
        random.seed(self._randomness)
        world = self.world
        with clock.own_wall_clock() as self.wall, self.scope:
            try:
                await self._run_group()
            except _Killed:
                pass
            except BaseExceptionGroup as errors:
                rest = errors.split(_Killed)[1]
                if rest is not None:
                    raise rest from None
        if not self.gone:
            world.check_task_leaks(self)
            self.connection.die()
        self.ended.set()

    async def _run_group(self) -> None:
        world = self.world
        try:
            self.group = group = world.build(self.mailbox)
            self._prepare(group)
            world.log.add(self.lane, "starts")
            report = await group.run(install_signals=False)
            world.log.add(self.lane, "ended", detail=f"exit status {report.exit_status}")
            if not self.connection.is_slow:
                world.ledger.left(self.lane)
        except Exception as error:
            if self.group is None:
                world.fail_build(error)
            elif not world.over:
                world.log.add(self.lane, "crashed", detail=repr(error))
                world.ledger.fail("no crash", f"the group of {self.lane} crashed: {error!r}")

    # ------------------------------------------------------------------------------------------------------- its end

    def crash(self, why: str = "killed") -> None:
        """Die, as by SIGKILL: none of its tasks runs again, and its connection never answers."""
        if self.gone or self.ended.is_set():
            return
        self.gone = self.halted = True
        self.world.log.add(self.lane, why)
        self.world.hold.start()
        self.connection.die()
        self.world.ledger.died(self.lane)
        self.ended.set()
        self.thawed.set()

    def freeze(self) -> None:
        """Hold all tasks of the process."""
        self.halted = True
        self.thawed = trio.Event()
        self.world.log.add(self.lane, "frozen")
        self.world.ledger.froze(self.lane)
        self.world.hold.start()

    def thaw(self, seconds: float) -> None:
        """Continue after a freeze of ``seconds``, which does not count as lateness."""
        self.frozen += seconds
        self.thawed.set()
        if self.gone:
            return
        self.halted = False
        self.world.log.add(self.lane, "goes on")
        self.world.ledger.thawed(self.lane)
        self.world.hold.let_go()

    async def stop(self, *, second_after: float | None = None) -> None:
        """Send SIGTERM, and a second one after ``second_after`` seconds. A process that misses its deadline is killed."""
        if self.halted and not self.gone:
            await self.thawed.wait()
        if self.ended.is_set() or self.group is None:
            return
        settings = self.group.settings
        began, frozen = trio.current_time(), self.frozen
        self.world.log.add(self.lane, "SIGTERM")
        self.group.request_shutdown("SIGTERM")
        budget = settings.drain_delay + settings.shutdown_timeout + settings.hard_limit
        if second_after is not None:
            with trio.move_on_after(second_after):
                await self.ended.wait()
            if not self.ended.is_set() and not self.halted:
                self.world.log.add(self.lane, "second SIGTERM")
                self.group.force_shutdown()
                budget = min(budget, second_after + settings.hard_limit)
        with trio.move_on_at(began + budget):
            await self.ended.wait()
        if self.ended.is_set():
            return
        # A process may miss its deadline if it was frozen, its handler ignores cancellation, or its store does not answer.
        stubborn = self.stubborn_until > trio.current_time() - SWALLOWED
        if not (stubborn or self.frozen > frozen or self.halted or self.connection.is_slow):
            told = f"{self.lane} has not ended {budget:g} s after SIGTERM; {self.where()}"
            self.world.ledger.fail("shutdown in time", told)
        self.crash("leaves by force")

    def where(self) -> str:
        """Describe what the handlers of the process wait for."""
        if self.group is None:
            return "it has no group yet"
        status = self.group.status()
        lines = [f"{run.message_id[-6:]} at {run.where()}" for loop in self.group.loops for run in loop.runs]
        return f"group {status.state}, {'; '.join(lines) or 'nothing in hand'}"

    # ------------------------------------------------------------------------------------------------ its own group

    def _prepare(self, group: LoopGroup) -> None:
        """Subscribe to the events of the group, and wrap its handlers.

        A simulated process has no health server and no guardian, and a crashed group must not signal the real process.
        """
        group.settings = replace(
            group.settings, on_crash="report", guardian=False, block_threshold=None, health_port=None, kill=self._kill
        )
        for loop in group.loops:
            if isinstance(loop, MainLoop) and loop.mailbox is self.mailbox:
                loop.wrap(self._around(loop))
        log, lane, label = self.world.log, self.lane, self.world.ledger.label

        def changed(event: events.GroupStateChanged) -> None:
            log.add(lane, f"group {event.new}")
            if event.new == "running":
                self.started.set()

        told: dict[type[Any], Callable[[Any], None]] = {
            events.GroupStateChanged: changed,
            events.HandlerStalled: lambda e: log.add(lane, "stalled", label(e.message_id)),
            events.LeaseLost: lambda e: log.add(lane, "lost its lease", label(e.message_id)),
            events.LeaseRenewalFailed: lambda e: log.add(lane, "renewal failed", label(e.message_id), e.error),
            events.SettlementFailed: lambda e: log.add(lane, "settlement failed", label(e.message_id), e.error),
            events.ReceiveRecovered: lambda e: log.add(lane, "receives again"),
        }
        for kind, subscriber in told.items():
            group.dispatcher.subscribe(kind, subscriber)

    def _kill(self, words: str) -> None:
        self.crash("killed by its watchdog")
        raise _Killed

    def _around(self, loop: MainLoop) -> Callable[[Message[Any, Any], Callable[[], Awaitable[Any]]], Awaitable[Any]]:
        """Return the wrapper of a loop's handlers: it reports to the ledger and injects faults."""
        ledger = self.world.ledger

        async def watched(message: Message[Any, Any], call: Callable[[], Awaitable[Any]]) -> Any:
            message_id, receipt = message.id, message.receipt_handle
            if message_id not in ledger.accounts:
                return await call()
            fault, size = self.world.handler_fault(message_id, message.delivery_count)
            ledger.began(
                self.lane,
                message_id,
                receipt,
                message.attempt,
                loop=loop.name,
                concurrency=loop.concurrency,
                stubborn=fault == "swallowing_handler",
            )
            how = "failed"
            try:
                if fault:
                    await self._go_wrong(fault, size, ledger.label(message_id))
                result = await call()
                how = "returned"
                return result
            except Exception:
                raise
            except BaseException:
                how = "cancelled"
                raise
            finally:
                run = next((run for run in loop.runs if run.message is message), None)
                ledger.ended(message_id, receipt, how, run.cause or "" if run is not None else "")

        return watched

    async def _go_wrong(self, fault: str, size: float, label: str) -> None:
        self.world.log.add(self.lane, fault.replace("_", " "), label)
        if fault == "failing_handler":
            raise InjectedError("drawn to fail")
        if fault == "hanging_handler":
            await trio.sleep_forever()
        if fault == "slow_handler":
            await trio.sleep(size * SLOW_HANDLER)
            return
        try:
            await trio.sleep(size * SLOW_HANDLER)
        except trio.Cancelled:
            self.world.log.add(self.lane, "ignores its cancellation", label)
            self.stubborn_until = trio.current_time() + size * SWALLOWED
            with trio.CancelScope(shield=True):
                await trio.sleep(size * SWALLOWED)
