"""Limits of tasks in whole runs: processes that are killed, frozen, cut off and deployed.

The store is watched from outside: an account of its own says which message is in flight, and until when its lease lasts.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from mainspring import Context, InMemoryMailbox, LoopGroup, Mailbox, RetryPolicy, Tasks
from mainspring.mailbox.message import Ack, Dead
from mainspring.testing import Faults, Simulation
from wrapped_backend import WrappedBackend, wrap

if TYPE_CHECKING:
    from mainspring.mailbox.message import ClaimedMessage, Envelope, Settlement

TROUBLE = Faults.just(
    crash=20, signal=10, deploy=2, partition=15, store_restart=4, freeze=5, slow_call=0.05, second_signal=0.3,
    failing_handler=0.1, slow_handler=0.05,
)  # fmt: skip
DURATION = 1_800.0
CONCURRENCY = 3
MOST = 6
RATE = 10
KEYS = 5
ROUNDING = 1e-6


class Watched(WrappedBackend):
    """The store, with what broke a limit: more in flight than may be, too many claims in a time, a key out of order."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.wrong: list[str] = []
        self.most = 0
        """The most calls of the limited task that were in flight at once."""
        self._sent: dict[str, Envelope] = {}
        self._order: dict[str, list[str]] = {}
        self._leases: dict[str, tuple[str, float]] = {}
        self._rated_at = -math.inf

    async def send(self, envelopes: list[Envelope]) -> list[str]:
        ids: list[str] = await self.inner.send(envelopes)
        for envelope in envelopes:
            self._sent[envelope.message_id] = envelope
            if envelope.task == "ordered":
                self._order.setdefault(envelope.key or "", []).append(envelope.message_id)
        return ids

    async def claim(self, most: int, visibility: float, wait: float) -> list[ClaimedMessage]:
        found: list[ClaimedMessage] = await self.inner.claim(most, visibility, wait)
        now = anyio.current_time()
        for delivery in found:
            self._leases[delivery.message_id] = (delivery.receipt_handle, now + visibility)
            self._check(delivery.message_id, now)
        return found

    def _check(self, message_id: str, now: float) -> None:
        envelope = self._sent[message_id]
        held = [self._sent[each].task for each, (_, until) in self._leases.items() if until > now + ROUNDING]
        self.most = max(self.most, held.count("limited"))
        if held.count("limited") > CONCURRENCY:
            self.wrong.append(f"{now}: {held.count('limited')} calls of a task are in flight")
        if len(held) > MOST:
            self.wrong.append(f"{now}: {len(held)} messages of the mailbox are in flight")
        if envelope.task == "rated":
            if now - self._rated_at < 60 / RATE - ROUNDING:
                self.wrong.append(f"{now}: a call was claimed {now - self._rated_at} s after the last one")
            self._rated_at = now
        if envelope.task == "ordered" and self._order[envelope.key or ""][0] != message_id:
            self.wrong.append(f"{now}: {message_id} came before {self._order[envelope.key or ''][0]}")

    async def settle(self, delivery: ClaimedMessage, settlement: Settlement) -> None:
        await self.inner.settle(delivery, settlement)
        self._ended(delivery, settlement)

    def _ended(self, delivery: ClaimedMessage, settlement: Settlement) -> None:
        self._leases.pop(delivery.message_id, None)
        envelope = self._sent[delivery.message_id]
        if envelope.task == "ordered" and isinstance(settlement, Ack | Dead):
            self._order[envelope.key or ""].remove(delivery.message_id)

    async def extend(self, delivery: ClaimedMessage, timeout: float) -> None:
        await self.inner.extend(delivery, timeout)
        until = max(self._leases[delivery.message_id][1], anyio.current_time() + timeout)
        self._leases[delivery.message_id] = (delivery.receipt_handle, until)


def register(mailbox: Any) -> Tasks:
    """Return the tasks of the program: limited in each way, with runs that last."""
    retry = RetryPolicy(initial_delay=5, max_delay=60)
    tasks = Tasks(mailbox, max_concurrency=MOST, retry=retry)

    @tasks.task(concurrency=CONCURRENCY)
    async def limited(ctx: Context, number: int) -> None:
        await anyio.sleep(20)

    @tasks.task(rate=f"{RATE}/m")
    async def rated(ctx: Context, number: int) -> None: ...

    @tasks.task(key="key", ordered=True)
    async def ordered(ctx: Context, key: str, number: int) -> None:
        await anyio.sleep(3)

    return tasks


def build(mailbox: Any) -> LoopGroup:
    return LoopGroup([register(mailbox).loop(concurrency=5, visibility_timeout=30)])


async def send(mailbox: Any, number: int) -> None:
    """Send one call of one of the tasks, as a program does that is near the store."""
    async with register(Mailbox(mailbox.backend)) as tasks:
        name = ("limited", "rated", "ordered")[number % 3]
        of_key = {"key": f"k{number % KEYS}"} if name == "ordered" else {}
        await tasks.registered[name].send(number=number, **of_key)


def check(seed: int) -> dict[str, int]:
    stores: list[Watched] = []

    def store() -> InMemoryMailbox[Any, Any]:
        made = wrap(InMemoryMailbox("store", serialize=True), Watched)
        stores.append(made.backend)  # type: ignore[arg-type]
        return made

    simulation = Simulation(
        seed=seed, duration=DURATION, workers=3, per_minute=4, faults=TROUBLE, send=send, store=store
    )
    report = simulation.run(build)
    report.check()
    watched = stores[-1]
    assert watched.wrong == [], report
    assert watched.most == CONCURRENCY, report
    return report.counts


@pytest.mark.own_time(20)
def test_limits_hold_in_a_fleet_in_trouble() -> None:
    counts: Counter[str] = Counter()
    for seed in range(2):
        counts += Counter(check(seed))
    assert min(counts["crashes"], counts["retried"]) > 10


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_limits_hold_in_forty_seeds(part: int) -> None:
    for seed in range(part * 10, part * 10 + 10):
        check(seed)
