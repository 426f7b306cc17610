"""Schedules in whole runs: processes that are killed, frozen, cut off and deployed, and wall clocks that jump."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from mainspring import Context, InMemoryMailbox, LoopGroup, Schedule, Tasks
from mainspring.core.clock import VIRTUAL_EPOCH
from mainspring.testing import Faults, Simulation
from wrapped_backend import WrappedBackend, wrap

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mainspring.mailbox.message import Envelope
    from mainspring.mailbox.records import RecordWrite

TROUBLE = Faults.just(
    crash=20, signal=10, deploy=2, partition=15, store_restart=4, freeze=5, slow_call=0.05, second_signal=0.3
)
EVERY = 60
DURATION = 3_600.0


class Sent(WrappedBackend):
    """The store, with the ticks that were sent, by schedule."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.ticks: list[tuple[str, str]] = []

    async def write_record(self, write: RecordWrite, envelopes: Sequence[Envelope] = ()) -> int | None:
        version = await self.inner.write_record(write, envelopes)
        if version is not None:
            self.ticks += [
                (envelope.headers["mainspring-schedule"], envelope.headers["mainspring-scheduled-for"])
                for envelope in envelopes
            ]
        return version


def build(mailbox: Any) -> LoopGroup:
    """A program with schedules of both kinds, whose ticks may all be sent late."""
    tasks = Tasks(mailbox)

    @tasks.task
    async def note(ctx: Context) -> None:
        await anyio.sleep(5)

    tasks.schedule(Schedule("every minute", note, every=EVERY, misfire="all"))
    tasks.cron("*/5 * * * *", note, name="cron", misfire="all")
    return LoopGroup([tasks.loop(concurrency=5)])


async def no_more(mailbox: Any, number: int) -> None:
    """Send nothing: the schedules do."""


def run(seed: int, faults: Faults) -> tuple[Counter[tuple[str, str]], str]:
    stores: list[Sent] = []

    def store() -> InMemoryMailbox[Any, Any]:
        made = wrap(InMemoryMailbox("store", serialize=True), Sent)
        stores.append(made.backend)  # type: ignore[arg-type]
        return made

    report = Simulation(seed=seed, duration=DURATION, workers=3, faults=faults, send=no_more, store=store).run(build)
    report.check()
    return Counter(stores[-1].ticks), str(report)


def check(seed: int, faults: Faults) -> None:
    ticks, report = run(seed, faults)
    assert max(ticks.values()) == 1, report
    for name, first, apart in (("every minute", None, EVERY), ("cron", 300, 300)):
        times = sorted(
            (VIRTUAL_EPOCH.fromisoformat(at) - VIRTUAL_EPOCH).total_seconds() for who, at in ticks if who == name
        )
        assert first in (None, times[0])
        assert {round(after - before, 3) for before, after in pairwise(times)} == {apart}, report
        assert times[-1] >= DURATION - 2 * apart, report


@pytest.mark.own_time(10)
def test_each_tick_is_sent_once_by_a_fleet_in_trouble() -> None:
    for seed in range(2):
        check(seed, TROUBLE)


@pytest.mark.own_time(10)
def test_a_wall_clock_that_jumps_sends_early_and_none_twice() -> None:
    ticks, report = run(3, Faults.just(clock_jump=10, crash=5))
    assert max(ticks.values()) == 1, report
    assert len(ticks) >= DURATION / EVERY, report


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_each_tick_is_sent_once_in_forty_seeds(part: int) -> None:
    for seed in range(part * 10, part * 10 + 10):
        check(seed, TROUBLE)
