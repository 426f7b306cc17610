"""Schedules: each tick sent once, however many workers there are, whatever ends, and however long nothing ran."""

from __future__ import annotations

from datetime import datetime, timedelta
from functools import partial
from itertools import pairwise

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_support import DAY, EPOCH, HOUR, Distant, Program, virtually

from mainspring import Context, InMemoryMailbox, LoopGroup, Schedule, Tasks
from mainspring.core.clock import own_wall_clock
from mainspring.errors import (
    ConfigError,
    ScheduleNotFoundError,
)
from mainspring.tasks.schedule_times import Times
from mainspring.testing import VirtualClock, run_virtual
from stores import KINDS, on

pytestmark = pytest.mark.anyio

EVERYWHERE = on(*KINDS)


# ------------------------------------------------------------------------------------------------------------- every store


@pytest.mark.own_time(6)
@EVERYWHERE
async def test_a_schedule_is_made_ticks_and_is_removed(store):
    tasks, elsewhere, ticks = Tasks(store.url()), Tasks(store.url()), []

    @tasks.task
    async def note(ctx: Context, what: str) -> None:
        ticks.append((what, ctx.scheduled_for))

    async with elsewhere, LoopGroup([tasks.loop()], guardian=False):
        await tasks.schedules.add(Schedule("often", note, every=1, args=("a",)))
        with anyio.fail_after(20):
            while len(ticks) < 2:
                await anyio.sleep(0.02)
        assert (await elsewhere.schedules.pause("often")).paused
        (seen,) = await elsewhere.schedules.list()
        assert (seen.name, seen.task, seen.args, seen.every, seen.paused) == ("often", "note", {"what": "a"}, 1.0, True)
        await elsewhere.schedules.run_now("often")
        with anyio.fail_after(20):
            while len(ticks) < 3:
                await anyio.sleep(0.02)
        await elsewhere.schedules.remove("often")
        assert await tasks.schedules.list() == []
        with pytest.raises(ScheduleNotFoundError, match="no schedule 'often'"):
            await tasks.schedules.pause("often")
    times = [tick for _, tick in ticks[:2]]
    assert (times[1] - times[0]).total_seconds() == pytest.approx(1, abs=0.001)
    assert {what for what, _ in ticks} == {"a"}


@pytest.mark.own_time(6)
@EVERYWHERE
async def test_of_several_workers_one_sends_a_tick(store):
    fleet, ticks = [Tasks(store.url()) for _ in range(3)], []

    async def note(ctx: Context) -> None:
        ticks.append((ctx.message.headers["mainspring-schedule"], ctx.scheduled_for))

    for tasks in fleet:
        task = tasks.task(note)
        for number in range(3):
            tasks.schedule(Schedule(f"s{number}", task, every=1))
    async with LoopGroup([tasks.loop(name=f"loop {n}") for n, tasks in enumerate(fleet)], guardian=False):
        with anyio.fail_after(20):
            while len(ticks) < 9:
                await anyio.sleep(0.02)
    assert len(set(ticks)) == len(ticks)
    assert {name for name, _ in ticks} == {"s0", "s1", "s2"}


@pytest.mark.own_time(2)
@virtually
async def test_one_worker_of_a_fleet_writes_the_ticks_of_a_schedule_until_it_ends():
    notes, scopes, stores = [], [], []

    async def live(number):
        program = Program(notes=notes, backend=partial(Distant, seconds=0.005, seed=number))
        stores.append(program.tasks.mailbox.backend)
        scopes.append(anyio.CancelScope())
        with scopes[-1]:
            await program.run(HOUR)

    async def writes_in(seconds):
        for store in stores:
            store.calls.clear()
        await anyio.sleep(seconds)
        return [store.calls.count("write") for store in stores]

    async with InMemoryMailbox.from_url("memory://jobs"), anyio.create_task_group() as group:
        for number in range(3):
            group.start_soon(live, number)
        maker = Program()
        async with maker.tasks:
            await maker.tasks.schedules.add(Schedule("often", maker.note, every=10))
        await anyio.sleep(55)
        written = await writes_in(100)
        assert sorted(written) == [0, 0, 10]
        scopes[written.index(10)].cancel()
        await anyio.sleep(20)
        assert sorted(await writes_in(100)) == [0, 0, 10]
        group.cancel_scope.cancel()
    assert [tick for _, tick, _ in notes] == [10.0 * number for number in range(1, 28)]
    assert max(began - tick for _, tick, began in notes) < 0.1


# -------------------------------------------------------------------------------------------------------- when it ticks


@pytest.mark.own_time(2)
@virtually
async def test_a_declared_schedule_ticks_at_its_times():
    program = Program()
    program.tasks.cron("0 3 * * *", program.note, args=("night",), tz="Europe/Berlin")
    program.tasks.schedule(Schedule("often", program.note, every=timedelta(hours=10), args={"what": "often"}))
    program.tasks.schedule(Schedule("once", program.note, at=EPOCH + timedelta(hours=5, seconds=0.5)))
    await program.run(DAY + 3 * HOUR)
    assert program.notes == [
        ("night", 2 * HOUR, 2 * HOUR),
        ("", 5 * HOUR + 0.5, pytest.approx(5 * HOUR + 0.5, abs=0.002)),
        ("often", 10 * HOUR, 10 * HOUR),
        ("often", 20 * HOUR, 20 * HOUR),
        ("night", 26 * HOUR, 26 * HOUR),
    ]


@virtually
async def test_a_restart_neither_loses_a_tick_nor_sends_it_again():
    program = Program()
    program.tasks.schedule(Schedule("often", program.note, every=HOUR))
    program.tasks.schedule(Schedule("once", program.note, at=EPOCH + timedelta(hours=2, minutes=30)))
    for seconds in (2 * HOUR - 1, 30, 1.5 * HOUR, 0.5 * HOUR):
        await program.run(seconds)
    assert program.ticks == [1, 2, 2.5, 3, 4]


async def outage(misfire, down):
    """A worker for an hour and a half, none for ``down`` seconds, and one for another hour."""
    program = Program()
    program.tasks.schedule(Schedule("hourly", program.note, every=HOUR, misfire=misfire))
    await program.run(1.5 * HOUR)
    await anyio.sleep(down)
    await program.run(HOUR / 4)
    return program.ticks


@pytest.mark.parametrize(
    ("misfire", "late", "in_time"),
    [
        ("skip", [1], [1, 7]),
        ("once", [1, 6], [1, 7]),
        ("all", [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6, 7]),
        (3, [1, 4, 5, 6], [1, 5, 6, 7]),
        (100, [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_what_is_sent_of_missed_ticks(misfire, late, in_time):
    """The last one is late by more than a minute, or by half of one, after the outage."""
    assert run_virtual(outage, misfire, 4.75 * HOUR) == late
    assert run_virtual(outage, misfire, 5.5 * HOUR + 30) == in_time


@virtually
async def test_a_tick_may_be_a_minute_late_and_is_missed_then():
    for late, ticks in ((59, [1]), (61, [])):
        program = Program(f"late by {late}")
        program.tasks.schedule(
            Schedule("once", program.note, at=VirtualClock().utc_now() + timedelta(hours=1), misfire="skip")
        )
        before = VirtualClock().now
        await program.run(HOUR - 1)
        await anyio.sleep(1 + late)
        await program.run(10)
        assert [(tick - before) / HOUR for _, tick, _ in program.notes] == ticks


@virtually
async def test_a_batch_is_small_where_the_arguments_are_large():
    sizes = []

    class Counting(Distant):
        async def write_record(self, write, envelopes=()):
            sizes.append(sum(len(envelope.body) for envelope in envelopes))
            return await super().write_record(write, envelopes)

    for misfire in ("all", 50):
        program = Program(f"jobs {misfire}", backend=Counting)
        program.tasks.schedule(Schedule("s", program.note, every=60, misfire=misfire, args=("x" * 30_000,)))
        await program.run(90)
        await anyio.sleep(3_000)
        await program.run(60)
        assert len(program.notes) == 52
    assert 200_000 < max(sizes) < 262_144


@virtually
async def test_a_long_outage_is_caught_up_in_batches():
    sizes = []

    class Counting(Distant):
        async def write_record(self, write, envelopes=()):
            sizes.append(len(envelopes))
            return await super().write_record(write, envelopes)

    program = Program(backend=Counting)
    program.tasks.schedule(Schedule("minutely", program.note, every=60, misfire="all"))
    await program.run(90)
    await anyio.sleep(DAY)
    await program.run(120)
    assert max(sizes) == 100
    ticks = sorted(tick for _, tick, _ in program.notes)
    assert len(ticks) == 1443
    assert all(after - before == pytest.approx(60) for before, after in pairwise(ticks))


@pytest.mark.own_time(5)
@virtually
async def test_a_thousand_schedules_that_are_due_at_once_are_sent_once_each():
    notes = []
    fleet = [Program(notes=notes, backend=partial(Distant, seed=number)) for number in range(3)]
    async with fleet[0].tasks:
        for number in range(1_000):
            await fleet[0].tasks.schedules.add(
                Schedule(f"s{number:04}", fleet[0].note, cron="0 12 * * *", args=(f"s{number:04}",))
            )
    began = VirtualClock().now
    VirtualClock().advance(1.5 * DAY)  # without a worker
    async with anyio.create_task_group() as group:
        for program in fleet:
            group.start_soon(program.run, 60)
    assert sorted(what for what, _, _ in notes) == [f"s{number:04}" for number in range(1_000)]
    assert {tick for _, tick, _ in notes} == {DAY + DAY / 2}
    assert max(at for _, _, at in notes) < began + 1.5 * DAY + 20


def delays_of(name):
    """By how much the calls of a schedule of that name are late, as 20 ticks have it."""

    async def run():
        program = Program()
        program.tasks.schedule(Schedule(name, program.note, every=HOUR, jitter=timedelta(minutes=10)))
        await program.run(20.5 * HOUR)
        return [at - tick for _, tick, at in program.notes]

    return run_virtual(run)


@pytest.mark.own_time(3)
def test_a_jitter_delays_each_call_by_what_its_name_and_tick_say():
    delays = delays_of("one")
    assert len(delays) == 20
    assert 0 <= min(delays) < 300 < max(delays) <= 600
    assert delays_of("one") == delays
    assert delays_of("two") != delays


# ------------------------------------------------------------------------------------------- many workers, that also end


LINES = ("*/20 * * * *", "30 2 * * *", "15,45 1,2,3 * * *", "0 * * * *", "7 */3 * * *")
ZONES = ("Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Asia/Kolkata")
CHANGES = ("2000-03-26", "2000-10-29", "2000-04-02", "2000-10-29", "2000-08-27", "2000-06-15")
"""Days on which the clocks of these zones change, and one on which none does."""


async def crashing_fleet(line, zone, day, lives, seed):
    """Run workers that end at any await, with a store whose answers are late or lost. Return what was sent and what was due."""
    clock, sent, notes = VirtualClock(), [], []
    begin = (datetime.fromisoformat(f"{day}T00:00+00:00") - EPOCH).total_seconds() - 20 * HOUR
    clock.advance(begin)
    keeper = InMemoryMailbox.from_url("memory://jobs")  # so that the queue outlives its workers

    async def live(number, after, seconds):
        await anyio.sleep(after)
        lost = 0.2 if number else 0.0
        program = Program(notes=notes, backend=partial(Distant, seconds=2.0, seed=seed + number, lost=lost))
        program.tasks.mailbox.backend.sent = sent
        program.tasks.cron(line, program.note, tz=zone, misfire="all")
        await program.run(seconds)

    async with keeper, anyio.create_task_group() as group:
        group.start_soon(live, 0, 0.0, 40.0)  # the first, which states the schedule
        for number, (after, seconds) in enumerate(lives, 1):
            group.start_soon(live, number, 60.0 + after, seconds)
        group.start_soon(live, 99, 50 * HOUR, 900.0)
    end = clock.now - 120
    times, due = Times(cron=line, tz=zone), []
    tick = times.after(EPOCH.timestamp() + begin + 40, 0)
    while tick <= EPOCH.timestamp() + end:
        due.append(tick)
        tick = times.after(tick, tick)
    return [datetime.fromisoformat(each).timestamp() for each in sent], due, notes


@pytest.mark.own_time(20)
@settings(max_examples=12, deadline=None)
@given(
    line=st.sampled_from(LINES),
    zone=st.sampled_from(ZONES),
    day=st.sampled_from(CHANGES),
    lives=st.lists(st.tuples(st.floats(0, 49 * HOUR), st.floats(1, 12 * HOUR)), max_size=6),
    seed=st.integers(0, 1_000),
)
def test_each_tick_is_sent_once_whichever_worker_ends_and_whenever(line, zone, day, lives, seed):
    sent, due, notes = run_virtual(crashing_fleet, line, zone, day, lives, seed)
    assert [tick for tick in sent if due[0] <= tick <= due[-1]] == due  # once each, and in order
    assert {tick for _, tick, _ in notes} >= {tick - EPOCH.timestamp() for tick in due}


# ------------------------------------------------------------------------------------------------- declared in the code


def version(notes, what, every, name="jobs"):
    """A version of a program, which declares one schedule."""
    program = Program(name, notes)
    program.tasks.schedule(Schedule("often", program.note, every=every, args=(what,)))
    return program


@virtually
async def test_of_two_versions_the_one_whose_worker_started_last_ticks():
    notes = []
    async with anyio.create_task_group() as group, InMemoryMailbox.from_url("memory://jobs"):
        group.start_soon(version(notes, "old", 60).run, 600)
        await anyio.sleep(130)
        group.start_soon(version(notes, "new", 60).run, 1_000)
        await anyio.sleep(5)
        group.start_soon(version(notes, "new", 60).run, 1_000)
        await anyio.sleep(300)
    assert [tick for _, tick, _ in notes] == [60.0 * number for number in range(1, 19)]
    assert [what for what, _, _ in notes] == ["old"] * 2 + ["new"] * 16


@virtually
async def test_an_old_version_that_starts_anew_has_it_until_its_workers_are_gone():
    notes = []
    async with anyio.create_task_group() as group, InMemoryMailbox.from_url("memory://jobs"):
        group.start_soon(version(notes, "new", 60).run, 3_000)
        await anyio.sleep(90)
        group.start_soon(version(notes, "old", 3_600).run, 300)
        await anyio.sleep(1_000)
        ticks = list(notes)
    assert {what for what, _, _ in ticks} == {"new"}
    gap = max(after[2] - before[2] for before, after in pairwise(ticks))
    assert 300 <= gap <= 300 + 120 + 60


@virtually
async def test_a_changed_time_counts_from_the_change_and_the_same_time_goes_on():
    notes = []
    async with InMemoryMailbox.from_url("memory://jobs"):
        await version(notes, "a", HOUR).run(1.5 * HOUR)
        await version(notes, "b", HOUR).run(HOUR)
        await version(notes, "c", 2 * HOUR).run(2.25 * HOUR)
    assert [(what, tick / HOUR) for what, tick, _ in notes] == [("a", 1), ("b", 2), ("c", 4.5)]


@virtually
async def test_a_schedule_that_the_code_does_not_declare_any_more_ends_and_can_be_removed():
    notes = []
    async with InMemoryMailbox.from_url("memory://jobs"):
        await version(notes, "old", 60).run(90)
        program = Program(notes=notes)
        async with program.tasks:
            with pytest.raises(
                ConfigError, match="declared in the code of running workers; delete it there, or pause it"
            ):
                await program.tasks.schedules.remove("often")
        await program.run(300)
        async with program.tasks:
            (left,) = await program.tasks.schedules.list()
            assert left.declared
            await program.tasks.schedules.remove("often")
            assert await program.tasks.schedules.list() == []
    assert len(notes) == 1


@virtually
async def test_a_pause_of_a_declared_schedule_outlasts_a_deploy():
    notes = []
    async with InMemoryMailbox.from_url("memory://jobs"):
        first = version(notes, "a", 60)
        async with anyio.create_task_group() as group:
            group.start_soon(first.run, 200)
            await anyio.sleep(90)
            await first.tasks.schedules.pause("often")
        second = version(notes, "b", 60)
        async with anyio.create_task_group() as group:
            group.start_soon(second.run, 200)
            await anyio.sleep(130)
            resumed = await second.tasks.schedules.resume("often")
            assert (resumed.next_at - EPOCH).total_seconds() == 360
    assert [(what, tick) for what, tick, _ in notes] == [("a", 60.0), ("b", 360.0)]


@virtually
async def test_a_loop_that_takes_no_more_work_sends_no_more_ticks():
    program = Program()

    @program.tasks.task
    async def long() -> None:
        await anyio.sleep(1_000)

    program.tasks.schedule(Schedule("often", program.note, every=60))
    async with program.tasks, anyio.create_task_group() as group:
        loop = program.tasks.loop()
        group.start_soon(loop.run)
        await long.send()
        await anyio.sleep(90)
        loop.request_shutdown()
        await anyio.sleep(300)
        assert loop.in_flight == 1
        assert await program.tasks.mailbox.approximate_count() == 1  # the long one
    assert program.ticks == [1 / 60]


@virtually
async def test_workers_of_both_versions_tick_the_definition_that_holds():
    notes = []
    async with anyio.create_task_group() as group, InMemoryMailbox.from_url("memory://jobs"):
        old = version(notes, "old", 60)
        group.start_soon(old.run, 400)
        await anyio.sleep(95)
        group.start_soon(version(notes, "new", 60).run, 10)
        await anyio.sleep(90)
        (seen,) = await old.tasks.schedules.list()
        assert seen.args == {"what": "new"}
        await anyio.sleep(190)
        (seen,) = await old.tasks.schedules.list()
        assert seen.args == {"what": "old"}
    assert [tick for _, tick, _ in notes] == [60.0, 120.0, 180.0, 240.0, 300.0, 360.0]
    assert [what for what, _, _ in notes][:3] == ["old", "new", "new"]


@pytest.mark.parametrize("tells", [True, False])
def test_a_tick_is_sent_soon_after_the_wall_clock_has_jumped_over_it(tells):
    async def run():
        with own_wall_clock() as wall:
            program = Program(backend=partial(Distant, seconds=0, tells=tells))
            program.tasks.schedule(Schedule("daily", program.note, every=DAY))
            async with anyio.create_task_group() as group:
                group.start_soon(program.run, 1_000)
                await anyio.sleep(100)
                wall.seconds = DAY
        return program.notes

    ((_, tick, at),) = run_virtual(run)
    assert tick == DAY
    assert 100 <= at <= (131 if tells else 101.5)
