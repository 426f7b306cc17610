"""Schedules in whole runs: processes that are killed, frozen, cut off and deployed, and wall clocks that jump."""

from __future__ import annotations

from collections import Counter
from datetime import datetime, timedelta
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

import anyio
import pytest

from mainspring import Context, InMemoryMailbox, LoopGroup, Schedule, Tasks
from mainspring.core.clock import VIRTUAL_EPOCH, own_wall_clock
from mainspring.tasks.schedule_times import Times
from mainspring.testing import Faults, Simulation
from wrapped_backend import WrappedBackend, wrap

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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


def run(
    seed: int, faults: Faults, build: Callable[[Any], LoopGroup] = build, begins: datetime = VIRTUAL_EPOCH
) -> tuple[Counter[tuple[str, str]], str]:
    stores: list[Sent] = []

    def store() -> InMemoryMailbox[Any, Any]:
        made = wrap(InMemoryMailbox("store", serialize=True), Sent)
        stores.append(made.backend)  # type: ignore[arg-type]
        return made

    simulation = Simulation(seed=seed, duration=DURATION, workers=3, faults=faults, send=no_more, store=store)
    with own_wall_clock() as wall:
        wall.seconds = (begins - VIRTUAL_EPOCH).total_seconds()
        report = simulation.run(build)
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


LINES = ("*/5 * * * *", "*/20 1,2,3 * * *", "10,50 1-3 * * *")
CHANGES = [
    ("Europe/Berlin", "2000-03-26T01:00+00:00"),  # 02:00 is 03:00
    ("Europe/Berlin", "2000-10-29T01:00+00:00"),  # 03:00 is 02:00
    ("America/New_York", "2000-04-02T07:00+00:00"),
    ("America/New_York", "2000-10-29T06:00+00:00"),
    ("Australia/Lord_Howe", "2000-08-26T15:30+00:00"),  # 02:00 is 02:30
    ("Australia/Lord_Howe", "2000-03-25T15:00+00:00"),  # 02:00 is 01:30
]


def build_in(zone: str, mailbox: Any) -> LoopGroup:
    """A program whose schedules follow the clocks of a zone."""
    tasks = Tasks(mailbox)

    @tasks.task
    async def note(ctx: Context) -> None:
        await anyio.sleep(5)

    for line in LINES:
        tasks.cron(line, note, name=line, tz=zone, misfire="all")
    return LoopGroup([tasks.loop(concurrency=5)])


@pytest.mark.own_time(20)
@pytest.mark.parametrize(("zone", "change"), CHANGES)
def test_each_tick_is_sent_once_by_a_fleet_in_trouble_while_the_clocks_change(zone: str, change: str) -> None:
    changes = datetime.fromisoformat(change)
    begins, ends = changes - timedelta(minutes=15), changes - timedelta(minutes=15) + timedelta(seconds=DURATION)
    assert begins.astimezone(ZoneInfo(zone)).utcoffset() != ends.astimezone(ZoneInfo(zone)).utcoffset()
    sent, report = run(1, TROUBLE, partial(build_in, zone), begins)
    for line in LINES:
        found = sorted(datetime.fromisoformat(at).timestamp() for name, at in sent.elements() if name == line)
        due = Times(line, tz=zone).earliest(found[0], ends.timestamp() - 120, 1_000)
        assert found[: len(due)] == due, report
        assert found[0] < changes.timestamp() + 3_600


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_each_tick_is_sent_once_in_forty_seeds(part: int) -> None:
    for seed in range(part * 10, part * 10 + 10):
        check(seed, TROUBLE)
