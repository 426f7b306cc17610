"""``World``: everything that one run consists of: the store, the fleet, its clients, and the trouble that befalls them."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

import trio

from mainspring.core.tracebacks import where
from mainspring.mailbox.memory.mailbox import InMemoryMailbox
from mainspring.testing.simulation.event_log import Journal
from mainspring.testing.simulation.ledger import Ledger
from mainspring.testing.simulation.process import Process, inside
from mainspring.testing.simulation.store import Link, LinkedMailbox, Store
from mainspring.testing.simulation.workload import Workload
from mainspring.testing.trio_internals import TaskHold, descendants

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mainspring.group.group import LoopGroup
    from mainspring.mailbox.mailbox import Mailbox
    from mainspring.testing.simulation.faults import Faults, PlannedFault
    from mainspring.testing.simulation.run import Simulation
    from mainspring.testing.simulation.workload import Probe

CHECK_INTERVAL = 600.0
"""Virtual seconds between two comparisons of the ledger with the store's own numbers."""
STOPPING = 86_400.0
"""Virtual seconds within which the last shutdown surely ends; each process's own budget is far below it."""
SETTLING = 4 * 3600.0
"""Virtual seconds after the last fault within which what is left is given time to finish."""
RETRYING = 600.0
"""Virtual seconds after the last fault: a message whose next try comes later is left waiting for it."""


class World:
    """One run. ``main`` is its whole course; what it found stands in ``ledger`` and ``journal`` afterwards."""

    def __init__(self, simulation: Simulation, build: Callable[[Any], LoopGroup], probe: Probe) -> None:
        self.seed = simulation.seed
        self.name = "jobs"
        self.faults: Faults = simulation.faults
        self.build = build
        self.probe = probe
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
        self.journal = Journal(trio.current_time)
        self.ledger = Ledger(self.journal, trio.current_time, self.stop)
        self.ledger.max_attempts, self.ledger.max_crashes = probe.max_attempts, probe.max_crashes
        self.hold = TaskHold(_is_halted)
        self.store: Store
        self._root = trio.lowlevel.current_root_task()
        self._nursery: trio.Nursery

    def stop(self) -> None:
        """End the run at once: something is broken."""
        self._ended.set()

    def fail_build(self, error: Exception) -> None:
        """The user's function does not give a group."""
        self.broken_build = self.broken_build or error
        self.stop()

    async def main(self, planned: Sequence[PlannedFault]) -> None:
        """The run: work and trouble, then time to finish, then a shutdown of everything."""
        make = self._simulation.store or (lambda: InMemoryMailbox("store", serialize=True))
        async with trio.open_nursery() as self._nursery, make() as mailbox:
            self.store = Store(mailbox, self.probe.codec, self.ledger, self._nursery)
            try:
                async with trio.open_nursery() as course:
                    course.start_soon(self._watch_the_end, course.cancel_scope)
                    await self._course(planned, mailbox)
                    course.cancel_scope.cancel()
            finally:
                await self._tear_down()

    async def _watch_the_end(self, scope: trio.CancelScope) -> None:
        await self._ended.wait()
        scope.cancel()

    async def _course(self, planned: Sequence[PlannedFault], mailbox: Mailbox[Any, Any]) -> None:
        for worker in range(self._simulation.workers):
            self._nursery.start_soon(self._keep_up, worker, name=f"keeper of worker {worker}")
        link = Link(self.store, "client", Random(f"{self.seed} client"), self.journal)  # noqa: S311
        async with (
            LinkedMailbox(self.name, link, body=self.probe.body_type) as client,
            trio.open_nursery() as nursery,
        ):
            workload = Workload(self, client, self._simulation)
            nursery.start_soon(workload.receive_replies)
            nursery.start_soon(self._check_now_and_then)
            with trio.CancelScope(deadline=self._simulation.duration):
                async with trio.open_nursery() as trouble:
                    trouble.start_soon(workload.send)
                    for fault in planned:
                        await trio.sleep_until(fault.at)
                        trouble.start_soon(self._befall, fault)
                    await trio.sleep_forever()
            self.journal.add("world", "no more work, no more trouble")
            await self._settle()
            self._stopping = True
            with trio.move_on_after(STOPPING) as late:
                async with trio.open_nursery() as stopping:
                    for process in filter(None, self.current):
                        stopping.start_soon(process.stop)
            if late.cancelled_caught:
                told = f"the fleet has not come to its end within {STOPPING:g} s.\n{self.who_waits()}"
                self.ledger.fail("progress", told)
            await trio.sleep(1.0)
            await self.store.check()
            self.ledger.close(all_replies=True)
            nursery.cancel_scope.cancel()

    async def _settle(self) -> None:
        """Let the fleet finish what is there; of what fails again and again, only the next tries."""
        now = trio.current_time()
        while self.ledger.waiting(until=now + RETRYING) and trio.current_time() < now + SETTLING:
            await trio.sleep(5.0)
            self._check_progress()

    async def _check_now_and_then(self) -> None:
        while True:
            await trio.sleep(CHECK_INTERVAL)
            await self.store.check()
            self._check_progress()

    def _check_progress(self) -> None:
        """Work that waits for longer than anything can take is stuck."""
        now = trio.current_time()
        patience = self.probe.patience
        if now - self.ledger.last_progress < patience:
            return
        ready = [account for account in self.ledger.waiting() if account.ready_at < now - patience]
        if ready:
            told = f"{len(ready)} messages wait, and nothing has happened for {patience:.0f} s.\n{self.who_waits()}"
            self.ledger.fail("progress", told, ready[0].label)

    def who_waits(self) -> str:
        """What each process, and each of its tasks, waits for."""
        lines = []
        for process in filter(None, self.current):
            state = "gone" if process.gone else "frozen" if process.halted else process.where()
            lines.append(f"  {process.lane}: {state}")
            if process.task is not None and not process.ended.is_set():
                lines += [f"    {task.name}: {where(task.coro)}" for task in descendants(process.task)]
        return "\n".join(lines)

    # ------------------------------------------------------------------------------------------------------- the fleet

    async def _keep_up(self, worker: int) -> None:
        """Run one life of the worker after the other, as an orchestrator does."""
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

    def look_for_leftovers(self, process: Process) -> None:
        """Does a task of a process that has ended still exist?"""
        if self.over:
            return
        assert self._root is not None
        for task in descendants(self._root):
            if task is not process.task and task.context.get(inside) is process:
                told = f"a task of {process.lane} has outlived it: {task.name} at {where(task.coro)}"
                self.ledger.fail("no task left", told)

    def handler_fault(self, message_id: str, delivery: int) -> tuple[str, float]:
        """What befalls this handler run (mostly nothing), and to which extent, from 0 to 1: the same in each replay."""
        if not self._handler_faults:
            return "", 0.0
        rng = Random(f"{self.seed} {self.ledger.label(message_id)} {delivery}")  # noqa: S311
        drawn = rng.random()
        for name, chance in self._handler_faults:
            if drawn < chance:
                return name, rng.random()
            drawn -= chance
        return "", 0.0

    # ------------------------------------------------------------------------------------------------------ the trouble

    async def _befall(self, fault: PlannedFault) -> None:
        """Let a planned fault happen; whatever it holds up goes on when the run's trouble ends."""
        process = self.current[fault.worker]
        if fault.kind == "store_restart":
            await self._restart_store(fault.seconds)
        elif fault.kind == "deploy":
            await self._deploy(fault.seconds)
        elif process is None or process.ended.is_set() or process.halted:
            self.journal.add("world", f"{fault.kind} missed", detail=f"worker {fault.worker} is not up")
        elif fault.kind == "crash":
            process.restart_in = fault.seconds
            process.crash()
        elif fault.kind == "signal":
            process.restart_in = fault.seconds
            rng = Random(f"{self.seed} second signal {fault.number}")  # noqa: S311
            again = rng.random() < self.faults.second_signal
            with trio.CancelScope(shield=True):
                await process.stop(second_after=rng.random() * 10 if again else None)
        elif fault.kind == "partition" and process.link.is_cut:
            self.journal.add("world", "partition missed", detail=f"worker {fault.worker} is cut off already")
        elif fault.kind == "partition":
            await self._partition(process, fault)
        elif fault.kind == "freeze":
            await self._freeze(process, fault.seconds)
        else:
            process.wall.seconds += fault.seconds
            self.journal.add(process.lane, "wall clock jumps", detail=f"{fault.seconds:+.0f} s")

    async def _restart_store(self, seconds: float) -> None:
        if self.store.down:
            return
        self.journal.add("store", "goes down")
        self.store.stop()
        for process in filter(None, self.current):
            process.link.reset()
        try:
            await trio.sleep(seconds)
        finally:
            self.store.start()
            self.journal.add("store", "is back")

    async def _deploy(self, seconds: float) -> None:
        self.journal.add("world", "deploy")
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
        self.journal.add(process.lane, "partition", detail=f"calls {fault.mode}")
        process.link.cut(fault.mode)
        try:
            await trio.sleep(fault.seconds)
        finally:
            process.link.heal()
            self.journal.add(process.lane, "partition over")

    async def _freeze(self, process: Process, seconds: float) -> None:
        process.freeze()
        began = trio.current_time()
        try:
            await trio.sleep(seconds)
        finally:
            process.thaw(trio.current_time() - began)

    # --------------------------------------------------------------------------------------------------------- the end

    async def _tear_down(self) -> None:
        """Nothing is judged any more: let go of everything, cancelled, with links that never answer."""
        self.over = True
        self.journal.close()
        self._stopping = True
        for process in self.processes:
            process.link.die()
            process.halted = False
            process.scope.cancel()
        self.hold.let_go()
        self._nursery.cancel_scope.cancel()


def _is_halted(task: trio.lowlevel.Task) -> bool:
    process: Process | None = task.context.get(inside)
    return process is not None and process.halted
