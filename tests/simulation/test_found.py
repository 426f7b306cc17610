"""What simulations have found in the engine, each as small as it can be told."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import anyio
import pytest
import trio

from mainspring import LoopGroup, MainLoop
from mainspring.events import MessageFinished
from mainspring.testing import VirtualClock, run_virtual
from mainspring.testing.simulation.guards import Guards
from mainspring.testing.trio_internals import TaskHold, can_hold_tasks
from mainspring.worker.leases import SETTLE_TIMEOUT
from support import FaultyMailbox, hang

worker: ContextVar[bool] = ContextVar("worker")


def awkward_instant() -> float:
    """One for which adding the settle timeout and subtracting it again gives less than the timeout."""
    instant = 256.1
    while (instant + SETTLE_TIMEOUT) - instant >= SETTLE_TIMEOUT:
        instant += 0.1
    return instant


def test_a_hanging_settlement_is_given_up_at_an_instant_that_rounds_awkwardly() -> None:
    """The lease keeper looked again and again at the very instant it had waited for, and the clock never moved on."""
    instant = awkward_instant()

    async def main() -> float:
        mailbox = FaultyMailbox()
        mailbox.always("settle", hang)

        async def handle(job: int) -> None:
            await anyio.sleep_until(instant)

        virtual = VirtualClock()
        with anyio.CancelScope() as scope:
            guards = Guards(scope.cancel, lambda: virtual.now, patience=2)
            with guards():
                async with LoopGroup([MainLoop(mailbox, handle)], block_threshold=None) as group:
                    await mailbox.send(1)
                    await anyio.sleep_until(instant + 1)
                    while group.loops[0].in_flight:
                        await anyio.sleep(0.5)
                    return virtual.now
        raise AssertionError(f"time does not pass: {guards.error}")

    ended = run_virtual(main)
    assert instant + SETTLE_TIMEOUT <= ended <= instant + SETTLE_TIMEOUT + 1


@pytest.mark.parametrize("seed", range(8))
def test_a_worker_that_stood_still_begins_nothing_whose_lease_is_over(seed: int) -> None:
    """SIGSTOP between the claim and the handler: on waking, the handler began beside the next worker's."""

    async def main() -> tuple[list[int], list[str]]:
        mailbox = FaultyMailbox(body=int)
        begun: list[int] = []
        outcomes: list[str] = []
        frozen = False

        async def handle(job: int) -> None:
            begun.append(job)

        loop = MainLoop(mailbox, handle, visibility_timeout=10)
        loop.dispatcher.subscribe(MessageFinished, lambda event: outcomes.append(event.outcome))

        async def claim(hook: Any) -> Any:
            nonlocal frozen
            claimed = await hook()
            frozen = bool(claimed) and not outcomes
            return claimed

        mailbox.always("claim", claim)
        assert can_hold_tasks()
        hold = TaskHold(lambda task: frozen and task.context.get(worker, False))

        async def work() -> None:
            worker.set(True)
            await loop.run()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(work)
            await anyio.sleep(1)
            hold.start()
            await mailbox.send(1)
            await anyio.sleep(20)
            frozen = False
            hold.let_go()
            await anyio.sleep(1)
            first = (begun.copy(), outcomes.copy())
            loop.request_shutdown()
            return first

    begun, outcomes = run_virtual(main, seed=seed)
    assert begun == [1], "once, on the lease of the second delivery"
    assert outcomes == ["lost", "acknowledged"]


def test_held_tasks_stand_still_while_time_passes() -> None:
    async def main() -> list[tuple[str, float]]:
        log: list[tuple[str, float]] = []
        halted = True

        async def tick(name: str) -> None:
            for _ in range(3):
                await anyio.sleep(1)
                log.append((name, anyio.current_time()))

        hold = TaskHold(lambda task: halted and task.name == "frozen")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(tick, "frozen", name="frozen")
            nursery.start_soon(tick, "free", name="free")
            hold.start()
            await anyio.sleep(10)
            halted = False
            hold.let_go()
        return log

    assert run_virtual(main) == [
        ("free", 1.0),
        ("free", 2.0),
        ("free", 3.0),
        ("frozen", 11.0),
        ("frozen", 12.0),
        ("frozen", 13.0),
    ]
