"""Random trouble at every await of a loop: a store that is slow, fails and hangs, cancellations, give-ups, pauses, ends.

Whatever comes, every message is settled in the end, each delivery that began has exactly one end that is told, none is blamed
for another's, no slot sleeps while there is work, and a trouble is told once when it begins, and when it ends. In virtual time.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from random import Random
from typing import Any

import anyio
import pytest

from mainspring import DeadLetterPolicy, InMemoryMailbox, MailboxConnectionError, MainLoop, RetryPolicy
from mainspring.events import (
    LeaseRenewalFailed,
    LeaseRenewalRecovered,
    MessageFinished,
    MessageStarted,
    ReceiveFailed,
    ReceiveRecovered,
    SettlementDelayed,
    SettlementRecovered,
)
from mainspring.mailbox.backend import Capabilities
from mainspring.mailbox.message import ACK
from mainspring.worker.delivery import Phase

LONGEST_RUN = 300.0
TROUBLE = {
    ReceiveFailed: ReceiveRecovered,
    SettlementDelayed: SettlementRecovered,
    LeaseRenewalFailed: LeaseRenewalRecovered,
}
FEW = RetryPolicy(initial_delay=0.1, max_delay=0.2)


class Troubled(InMemoryMailbox[int, Any]):
    """Before and after each thing it does, anything may happen."""

    def __init__(self, rng: Random) -> None:
        super().__init__()
        self.backend.capabilities = Capabilities(joined_acks=rng.random() < 0.8, ordered=rng.random() < 0.5)
        self.rng = rng
        self.loop: Any = None
        self.back_at = 0.0

    async def gap(self) -> None:
        rng = self.rng
        for _ in range(rng.randrange(4)):
            await anyio.lowlevel.checkpoint()
        drawn = rng.random()
        if drawn < 0.01:
            self.back_at = anyio.current_time() + rng.random() * 20
        if drawn < 0.05 or anyio.current_time() < self.back_at:
            raise MailboxConnectionError("the store is away")
        if drawn < 0.1:
            await anyio.sleep(rng.random() * 0.01)
        elif drawn < 0.12:
            await anyio.sleep(rng.random() * 40)

    async def answer(self) -> None:
        if self.rng.random() < 0.8:
            await self.gap()
        if self.rng.random() < 0.3:  # the answer is there just as it is given up
            for run in self.loop.runs:
                run.give_up_settling()

    async def settle(self, delivery: Any, settlement: Any) -> None:
        await self.gap()
        await super().settle(delivery, settlement)
        await self.answer()

    async def _acknowledge_many(self, deliveries: list[Any]) -> dict[int, Exception]:
        await self.gap()
        refused: dict[int, Exception] = {}
        for number, delivery in enumerate(deliveries):
            try:
                if self.rng.random() < 0.05:
                    raise MailboxConnectionError("not this one")
                await super().settle(delivery, ACK)
            except Exception as error:
                refused[number] = error
        await self.answer()
        return refused

    async def receive(self, **asked: Any) -> list[Any]:
        await self.gap()
        return await super().receive(**asked)

    async def extend(self, delivery: Any, timeout: float) -> None:
        await self.gap()
        await super().extend(delivery, timeout)


class Trial:
    """One loop on one such mailbox, run again and again until all its messages are settled."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = Random(seed)
        self.mailbox = Troubled(rng)
        self.loop = self.mailbox.loop = MainLoop(
            self.mailbox,
            self.handle,
            concurrency=rng.randrange(1, 6),
            visibility_timeout=rng.choice([1, 5, 60]),
            retry=FEW,
            dead_letter=DeadLetterPolicy(max_attempts=1_000, max_crashes=1_000),
            wait_time_seconds=rng.choice([0, 600]),
        )
        self.messages = rng.randrange(1, 40)
        self.began: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        self.errors: set[str] = set()
        self.failures: Counter[type] = Counter()
        self.mistold: list[Any] = []
        self.loop.dispatcher.subscribe(MessageStarted, lambda event: self.began.update([event.run_id]))
        self.loop.dispatcher.subscribe(MessageFinished, self.end)
        for failed, recovered in TROUBLE.items():
            self.loop.dispatcher.subscribe(failed, self.fail)
            self.loop.dispatcher.subscribe(recovered, partial(self.recover, failed))

    def fail(self, event: Any) -> None:
        if event.first is not (self.failures[type(event)] == 0):
            self.mistold.append(event)
        self.failures[type(event)] += 1

    def recover(self, failed: type, event: Any) -> None:
        if self.failures.pop(failed, 0) != event.failures:
            self.mistold.append(event)

    def end(self, event: MessageFinished) -> None:
        self.ended[event.run_id] += 1
        if event.error:
            self.errors.add(event.error)

    async def handle(self, job: int) -> None:
        rng = self.rng
        for _ in range(rng.randrange(3)):
            await anyio.lowlevel.checkpoint()
        drawn = rng.random()
        if drawn < 0.1:
            await anyio.sleep(rng.random() * 5)
        elif drawn < 0.12:
            self.loop.pause()
        elif drawn < 0.17:
            raise ValueError("it failed")
        elif drawn < 0.2:
            for run in self.loop.runs:
                run.stall(ValueError("it stalled"))

    async def run(self) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.send)
            tasks.start_soon(self.watch)
            end = anyio.current_time() + 5_000
            while (counts := await self.mailbox.counts()).settled < self.messages:
                assert anyio.current_time() < end, counts
                await self.run_for_a_while()
                assert self.loop.in_flight == 0
            tasks.cancel_scope.cancel()

    async def run_for_a_while(self) -> None:
        self.failures.clear()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.stop, tasks.cancel_scope)
            with anyio.move_on_after(LONGEST_RUN):
                await self.loop.run()
            tasks.cancel_scope.cancel()

    async def stop(self, scope: anyio.CancelScope) -> None:
        rng = self.rng
        drawn = rng.random()
        if drawn < 0.3:
            for _ in range(rng.randrange(60)):
                await anyio.lowlevel.checkpoint()
            scope.cancel()
        elif drawn < 0.8:
            await anyio.sleep(rng.random() * 5)
            if drawn < 0.6:
                scope.cancel()
            else:
                self.loop.request_shutdown()

    async def send(self) -> None:
        for job in range(self.messages):
            await self.mailbox.send(job)
            if self.rng.random() < 0.5:
                await anyio.sleep(self.rng.choice([0, 0.01, 1]))

    async def watch(self) -> None:
        """Ends a pause after a moment; fails where messages wait though a slot is free, second after second."""
        seconds = 0
        while True:
            await anyio.sleep(1)
            if self.loop.paused:
                self.loop.resume()
            begun = len(self.began.keys() - self.ended.keys())
            # The others are handled, settled or released; a release may take long here.
            wait = sum(run.phase < Phase.HANDLING for run in self.loop.runs)
            seconds = seconds + 1 if wait and begun < self.loop.concurrency else 0
            assert seconds < 10, (self.loop, begun)


@pytest.mark.anyio
@pytest.mark.parametrize("seed", range(40))
async def test_nothing_is_lost_told_twice_or_left_waiting(seed, virtual_clock):
    trial = Trial(seed)
    await trial.run()
    assert {handle: ends for handle, ends in trial.ended.items() if ends != 1} == {}
    assert len(trial.began) >= trial.messages
    assert trial.began.keys() <= trial.ended.keys()
    assert trial.mistold == []
    assert trial.errors <= {"ValueError: it failed", "ValueError: it stalled"}
