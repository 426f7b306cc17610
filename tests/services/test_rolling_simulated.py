"""The rolling restart under load in virtual time: simulated replicas that work on one mailbox in memory."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from rolling_support import Completed, Rollout

from mainspring import LoopGroup, MainLoop, open_mailbox
from mainspring.services.spec import Replacement, ServiceSpec
from mainspring.testing import SimulatedProcess, run_virtual
from orchestrator_support import World, spec

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from mainspring import Mailbox
    from mainspring.services.orchestrator import Orchestrator


class Works:
    """A program that works on a mailbox until it is told to stop, and says when it has handled its number of messages."""

    def __init__(self, mailbox: Mailbox[str]) -> None:
        self.mailbox = mailbox
        self.completed: list[Completed] = []

    async def __call__(self, process: SimulatedProcess) -> int:
        process.handle(signal.SIGTERM)
        most = int(process.launch.environment.get("MAINSPRING_MAX_MESSAGES", "0"))
        handled = 0

        async def handle(job: str) -> None:
            nonlocal handled
            await anyio.sleep(0.2)
            self.completed.append((process.launch.replica, job))
            handled += 1
            if handled == most:
                process.notify(X_MAINSPRING_USED_UP="1")

        await anyio.sleep(1)
        async with LoopGroup([MainLoop(self.mailbox, handle, concurrency=2)], guardian=False):
            process.notify(READY="1")
            await process.next_signal()
        return 0


def under_load(service: ServiceSpec, replacing: Callable[[Orchestrator], Awaitable[object]]) -> Rollout:
    async def main() -> Rollout:
        async with open_mailbox("memory://jobs", body=str) as mailbox:
            program = Works(mailbox)
            world = World([service], {"worker": program})  # type: ignore[dict-item]
            rollout = Rollout("worker", lambda: program.completed)
            sent: list[str] = []

            async def send() -> None:
                while True:
                    sent.append(f"job-{len(sent)}")
                    await mailbox.send(sent[-1])
                    await anyio.sleep(0.05)

            async with world.running() as orchestrator, anyio.create_task_group() as tasks:
                tasks.start_soon(send)
                with rollout.following(orchestrator.dispatcher):
                    await anyio.sleep(5)
                    await replacing(orchestrator)
                tasks.cancel_scope.cancel()
                with anyio.CancelScope(shield=True):
                    await anyio.sleep(60)
            assert sorted(job for _, job in program.completed) == sorted(sent)
            assert (await mailbox.counts()).dead == 0
            return rollout

    return run_virtual(main)


@pytest.mark.parametrize(
    "replacing",
    [
        lambda orchestrator: orchestrator.restart("worker"),
        lambda orchestrator: orchestrator.reload([spec("worker", replicas=3, environment={"A": "1"})]),
    ],
    ids=["restart", "reload"],
)
def test_replicas_are_replaced_one_after_the_other_and_work_never_rests(replacing: Any) -> None:
    under_load(spec("worker", replicas=3), replacing).check(3)


@pytest.mark.parametrize("worn", [Replacement(age=10), Replacement(messages=50)], ids=["age", "messages"])
def test_worn_processes_are_replaced_one_at_a_time_and_work_never_rests(worn: Replacement) -> None:
    rollout = under_load(replace(spec("worker", replicas=3), replace_after=worn), lambda _: anyio.sleep(11))
    assert {outage.replica for outage in rollout.outages} == {1, 2, 3}
    assert rollout.most_away == 1
    rollout.check_throughput()
