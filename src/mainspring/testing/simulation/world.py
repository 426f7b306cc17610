"""``World``: one run: the store, the fleet, its clients, and the faults."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import trio

from mainspring.core.tracebacks import where
from mainspring.mailbox.mailbox import Mailbox
from mainspring.mailbox.memory.mailbox import InMemoryMailbox
from mainspring.testing.simulation.event_log import EventLog
from mainspring.testing.simulation.faults import generator
from mainspring.testing.simulation.ledger import Ledger
from mainspring.testing.simulation.process import Process, inside
from mainspring.testing.simulation.store import SimulatedBackend, SimulatedStore
from mainspring.testing.simulation.workload import Workload
from mainspring.testing.trio_internals import TaskHold, descendants

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mainspring.group.group import LoopGroup
    from mainspring.testing.simulation.faults import Faults, PlannedFault
    from mainspring.testing.simulation.run import Simulation
    from mainspring.testing.simulation.workload import GroupUnderTest

CHECK_INTERVAL = 600.0
"""Virtual seconds between two comparisons of the ledger with the store's counts."""
STOPPING = 86_400.0
"""Virtual seconds allowed for the final shutdown. The budget of each process is far below it."""
SETTLING = 4 * 3600.0
"""Virtual seconds after the last fault in which the fleet may finish the remaining messages."""
RETRYING = 600.0
"""Messages whose next attempt is due later than this many virtual seconds after the last fault are not waited for."""


class World:
    """One run. ``main`` runs it; its result is in ``ledger`` and ``log``."""

    def __init__(self, simulation: Simulation, build: Callable[[Any], LoopGroup], under_test: GroupUnderTest) -> None:
        self.seed = simulation.seed
        self.name = "jobs"
        self.faults: Faults = simulation.faults
        self.build = build
        self.under_test = under_test
        self.over = False
        self.broken_build: Exception | None = None
        self._simulation = simulation
        self._handler_faults = [
            (name, getattr(self.faults, name))
            for name in ("slow_handler", "hanging_handler", "failing_handler", "swallowing_handler")
            if getattr(self.faults, name)
        ]
        self.processes: list[Process] = []
        self.current: list[Process | None] = [None] * simulation.workers
        self._stopping = False
        self._ended = trio.Event()
        self.log = EventLog(trio.current_time)
        self.ledger = Ledger(self.log, trio.current_time, self.stop)
        self.ledger.max_attempts, self.ledger.max_crashes = under_test.max_attempts, under_test.max_crashes
        self.hold = TaskHold(_is_halted)
        self.store: SimulatedStore
        self._root = trio.lowlevel.current_root_task()
        self._nursery: trio.Nursery

    def stop(self) -> None:
        """End the run at once."""
        self._ended.set()

    def fail_build(self, error: Exception) -> None:
        """Record that the user's build function failed, and end the run."""
        self.broken_build = self.broken_build or error
        self.stop()

    async def main(self, planned: Sequence[PlannedFault]) -> None:
        """Run work and faults, then let the fleet finish, then shut everything down."""
        make = self._simulation.store or (lambda: InMemoryMailbox("store", serialize=True))
        async with trio.open_nursery() as self._nursery, make() as mailbox:
            self.store = SimulatedStore(mailbox.backend, self.under_test.codec, self.ledger, self.log, self._nursery)
            try:
                async with trio.open_nursery() as course:
                    course.start_soon(self._watch_the_end, course.cancel_scope)
                    await self._run(planned)
                    course.cancel_scope.cancel()
            finally:
                await self._tear_down()

    async def _watch_the_end(self, scope: trio.CancelScope) -> None:
        await self._ended.wait()
        scope.cancel()

    async def _run(self, planned: Sequence[PlannedFault]) -> None:
        for worker in range(self._simulation.workers):
            self._nursery.start_soon(self._supervise, worker, name=f"supervisor of worker {worker}")
        backend = SimulatedBackend(self.name, self.store, "client", generator(self.seed, "client"))
        async with (
            Mailbox(backend, body=self.under_test.codec) as client,
            trio.open_nursery() as nursery,
        ):
            workload = Workload(self, client, self._simulation)
            nursery.start_soon(workload.receive_replies)
            nursery.start_soon(self._check_regularly)
            with trio.CancelScope(deadline=self._simulation.duration):
                await self._work(workload, planned)
            self.log.add("world", "no more work, no more trouble")
            await self._drain()
            await self._shut_down()
            await trio.sleep(1.0)
            await self.store.check()
            self.ledger.close()
            nursery.cancel_scope.cancel()

    async def _work(self, workload: Workload, planned: Sequence[PlannedFault]) -> None:
        """Send messages and inject faults until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(workload.send)
            for fault in planned:
                await trio.sleep_until(fault.at)
                nursery.start_soon(self._inject, fault)
            await trio.sleep_forever()

    async def _shut_down(self) -> None:
        self._stopping = True
        with trio.move_on_after(STOPPING) as late:
            async with trio.open_nursery() as nursery:
                for process in filter(None, self.current):
                    nursery.start_soon(process.stop)
        if late.cancelled_caught:
            told = f"the fleet has not come to its end within {STOPPING:g} s.\n{self.describe_waits()}"
            self.ledger.fail("progress", told)

    async def _drain(self) -> None:
        """Wait until the fleet has finished the messages that are due within ``RETRYING`` seconds."""
        now = trio.current_time()
        while self.ledger.waiting(until=now + RETRYING) and trio.current_time() < now + SETTLING:
            await trio.sleep(5.0)
            self._check_progress()

    async def _check_regularly(self) -> None:
        while True:
            await trio.sleep(CHECK_INTERVAL)
            await self.store.check()
            self._check_progress()

    def _check_progress(self) -> None:
        """Fail if messages have waited for longer than the settings of the group explain."""
        now = trio.current_time()
        patience = self.under_test.patience
        if now - self.ledger.last_progress < patience:
            return
        ready = [account for account in self.ledger.waiting() if account.ready_at < now - patience]
        if ready:
            told = (
                f"{len(ready)} messages wait, and nothing has happened for {patience:.0f} s.\n{self.describe_waits()}"
            )
            self.ledger.fail("progress", told, ready[0].label)

    def describe_waits(self) -> str:
        """Describe what each process, and each of its tasks, waits for."""
        lines = []
        for process in filter(None, self.current):
            state = "gone" if process.gone else "frozen" if process.halted else process.where()
            lines.append(f"  {process.lane}: {state}")
            if process.task is not None and not process.ended.is_set():
                lines += [f"    {task.name}: {where(task.coro)}" for task in descendants(process.task)]
        return "\n".join(lines)

    # ------------------------------------------------------------------------------------------------------- the fleet

    async def _supervise(self, worker: int) -> None:
        """Start a new process each time the worker's process ends, as an orchestrator does."""
        life = 0
        while not self._stopping:
            before, process = self.current[worker], Process(self, worker, life)
            self.current[worker] = process
            self.processes.append(process)
            if before is not None:
                before.replaced.set()
            self._nursery.start_soon(process.run, name=process.lane)
            await process.ended.wait()
            await trio.sleep(process.restart_in)
            life += 1

    def check_task_leaks(self, process: Process) -> None:
        """Fail if a task of an ended process still exists."""
        if self.over:
            return
        assert self._root is not None
        for task in descendants(self._root):
            if task is not process.task and task.context.get(inside) is process:
                told = f"a task of {process.lane} has outlived it: {task.name} at {where(task.coro)}"
                self.ledger.fail("no task left", told)

    def handler_fault(self, message_id: str, delivery: int) -> tuple[str, float]:
        """Draw the fault of a handler run, if any, and its extent from 0 to 1. A replay draws the same."""
        if not self._handler_faults:
            return "", 0.0
        rng = generator(self.seed, f"{self.ledger.label(message_id)} {delivery}")
        drawn = rng.random()
        for name, chance in self._handler_faults:
            if drawn < chance:
                return name, rng.random()
            drawn -= chance
        return "", 0.0

    # ------------------------------------------------------------------------------------------------------ the faults

    async def _inject(self, fault: PlannedFault) -> None:
        """Make a planned fault happen. Cancelled, it ends the partition, outage or freeze."""
        process = self.current[fault.worker]
        if fault.kind == "store_restart":
            await self._restart_store(fault.seconds)
        elif fault.kind == "deploy":
            await self._deploy(fault.seconds)
        elif process is None or process.ended.is_set() or process.halted:
            self.log.add("world", f"{fault.kind} missed", detail=f"worker {fault.worker} is not up")
        elif fault.kind == "crash":
            process.restart_in = fault.seconds
            process.crash()
        elif fault.kind == "signal":
            process.restart_in = fault.seconds
            rng = generator(self.seed, f"second signal {fault.number}")
            again = rng.random() < self.faults.second_signal
            with trio.CancelScope(shield=True):
                await process.stop(second_after=rng.random() * 10 if again else None)
        elif fault.kind == "partition" and process.connection.is_cut:
            self.log.add("world", "partition missed", detail=f"worker {fault.worker} is cut off already")
        elif fault.kind == "partition":
            await self._partition(process, fault)
        elif fault.kind == "freeze":
            await self._freeze(process, fault.seconds)
        else:
            process.wall.seconds += fault.seconds
            self.log.add(process.lane, "wall clock jumps", detail=f"{fault.seconds:+.0f} s")

    async def _restart_store(self, seconds: float) -> None:
        if self.store.down:
            return
        self.log.add("store", "goes down")
        self.store.down = True
        for process in filter(None, self.current):
            process.connection.reset()
        try:
            await trio.sleep(seconds)
        finally:
            self.store.down = False
            for process in filter(None, self.current):
                self.ledger.reachable(process.lane)
            self.log.add("store", "is back")

    async def _deploy(self, seconds: float) -> None:
        self.log.add("world", "deploy")
        for worker in range(len(self.current)):
            process = self.current[worker]
            if process is None or process.ended.is_set():
                continue
            process.restart_in = min(seconds, 5.0)
            with trio.CancelScope(shield=True):
                await process.stop()
            await process.replaced.wait()
            following = self.current[worker]
            with trio.move_on_after(60):
                if following is not None:
                    await following.started.wait()

    async def _partition(self, process: Process, fault: PlannedFault) -> None:
        self.log.add(process.lane, "partition", detail=f"calls {fault.mode}")
        process.connection.cut(fault.mode)
        try:
            await trio.sleep(fault.seconds)
        finally:
            process.connection.heal()
            self.log.add(process.lane, "partition over")

    async def _freeze(self, process: Process, seconds: float) -> None:
        process.freeze()
        began = trio.current_time()
        try:
            await trio.sleep(seconds)
        finally:
            process.thaw(trio.current_time() - began)

    # --------------------------------------------------------------------------------------------------------- the end

    async def _tear_down(self) -> None:
        """Cancel all processes, with connections that never answer. Nothing is judged any more."""
        self.over = True
        self.log.close()
        self._stopping = True
        for process in self.processes:
            process.connection.die()
            process.halted = False
            process.scope.cancel()
        self.hold.let_go()
        self._nursery.cancel_scope.cancel()


def _is_halted(task: trio.lowlevel.Task) -> bool:
    process: Process | None = task.context.get(inside)
    return process is not None and process.halted
