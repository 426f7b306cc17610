"""Schedules: each tick sent once, however many workers there are, whatever ends, and however long nothing ran."""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import pairwise
from random import Random

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mainspring import Context, InMemoryMailbox, LoopGroup, Middleware, Schedule, Tasks, open_mailbox
from mainspring.core.clock import own_wall_clock
from mainspring.errors import (
    ConfigError,
    InvalidParameterError,
    MailboxClosedError,
    MailboxConnectionError,
    ScheduleNotFoundError,
    SerializationError,
    UnknownTaskError,
)
from mainspring.mailbox.backend import Capabilities, Notifications
from mainspring.mailbox.records import RecordWrite
from mainspring.tasks.schedule_times import Times
from mainspring.testing import VirtualClock, run_virtual
from stores import KINDS, on
from wrapped_backend import WrappedBackend, wrap

pytestmark = pytest.mark.anyio

EVERYWHERE = on(*KINDS)
HOUR = 3_600.0
DAY = 86_400.0
EPOCH = datetime(2000, 1, 1, tzinfo=UTC)


class Program:
    """A program with one task, which notes what it was called for, and when. Several are on the queue of one name."""

    def __init__(self, name="jobs", notes=None, backend=None, middleware=()):
        mailbox = open_mailbox(f"memory://{name}")
        self.tasks = Tasks(mailbox if backend is None else wrap(mailbox, backend), middleware=middleware)
        self.notes = [] if notes is None else notes

        @self.tasks.task
        async def note(ctx: Context, what: str = "") -> None:
            self.notes.append((what, (ctx.scheduled_for - EPOCH).total_seconds(), anyio.current_time()))

        self.note = note

    @property
    def ticks(self):
        """The times of the ticks for which the task was called, in hours."""
        return [tick / HOUR for _, tick, _ in self.notes]

    async def run(self, seconds):
        """Run a worker, and end it as a cancellation does."""
        with anyio.move_on_after(seconds):
            async with self.tasks:
                await self.tasks.loop().run()


def virtually(test):
    """Run an async test in virtual time."""

    def run(*args, **keywords):
        run_virtual(partial(test, *args, **keywords))

    run.__name__ = test.__name__
    return run


class Distant(WrappedBackend):
    """A store some way off: a call on records takes a while before it takes place, and the answer as long."""

    def __init__(self, inner, *, seconds=0.05, seed=0, lost=0.0, tells=True):
        super().__init__(inner)
        self.capabilities = replace(inner.capabilities, announces_records=tells)
        self.sent = []
        self.calls = []
        if not tells:
            self.notifications = Notifications()
        self._rng = Random(seed)
        self._seconds = seconds
        self._lost = lost

    async def _call(self, name, call):
        self.calls.append(name)
        await anyio.sleep(self._seconds * self._rng.random())
        answer = await call()
        await anyio.sleep(self._seconds * self._rng.random())
        if self._rng.random() < self._lost:
            raise MailboxConnectionError("the answer is lost")
        return answer

    async def write_record(self, write, envelopes=()):
        async def write_it():
            version = await self.inner.write_record(write, envelopes)
            if version is not None:
                self.sent += [envelope.headers["mainspring-scheduled-for"] for envelope in envelopes]
            return version

        return await self._call("write", write_it)

    async def find_records(self, kind, keys):
        return await self._call("find", partial(self.inner.find_records, kind, keys))

    async def list_records(self, kind, limit, after):
        return await self._call("list", partial(self.inner.list_records, kind, limit, after))


# ------------------------------------------------------------------------------------------------------------- every store


def lacks_records(tasks):
    if not tasks.mailbox.capabilities.records:
        pytest.skip(f"{tasks.mailbox!r} keeps no records")


@pytest.mark.own_time(6)
@EVERYWHERE
async def test_a_schedule_is_made_ticks_and_is_removed(store):
    tasks, elsewhere, ticks = Tasks(store.url()), Tasks(store.url()), []
    lacks_records(tasks)

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
    lacks_records(fleet[0])

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


# -------------------------------------------------------------------------------------------------------- when it ticks


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


# ------------------------------------------------------------------------------------------------------- at run time


async def added(*, tells, die=False):
    """How long a schedule that another process adds takes to tick, beside one that is there, or (``die``) not told."""
    worker = Program(backend=partial(Distant, seconds=0, tells=tells))
    other = Program(backend=partial(Distant, seconds=0, tells=tells))
    async with other.tasks, anyio.create_task_group() as group:
        group.start_soon(worker.run, 1_000)
        await anyio.sleep(100.5)
        if die:
            told = other.tasks.mailbox.backend.write_record

            async def die_before_telling(write, envelopes=()):
                if write.kind == "schedules":
                    raise MailboxConnectionError("killed")
                return await told(write, envelopes)

            other.tasks.mailbox.backend.write_record = die_before_telling
        at = VirtualClock().utc_now() + timedelta(seconds=0.25)
        try:
            await other.tasks.schedules.add(Schedule("soon", other.note, at=at))
        except MailboxConnectionError:
            assert die
    ((_, tick, ran),) = worker.notes + other.notes
    return ran - tick


def test_a_schedule_of_another_process_is_seen_soon():
    assert run_virtual(partial(added, tells=True)) < 0.01
    assert 0.01 < run_virtual(partial(added, tells=False)) <= 5


def test_a_schedule_whose_author_died_before_it_told_the_workers_is_seen_later():
    assert 5 < run_virtual(partial(added, tells=False, die=True)) <= 300


@virtually
async def test_a_worker_looks_once_a_second_where_the_store_tells_nothing_and_is_idle_else():
    calls = {}
    for tells in (True, False):
        program = Program(f"jobs {tells}", backend=partial(Distant, seconds=0, tells=tells))
        async with program.tasks:
            await program.tasks.schedules.add(Schedule("s", program.note, cron="0 0 1 1 *"))
        await program.run(10)
        program.tasks.mailbox.backend.calls.clear()
        await program.run(600)
        calls[tells] = len(program.tasks.mailbox.backend.calls)
    assert 590 <= calls[False] <= 620
    assert calls[True] <= 30


@virtually
async def test_more_changes_than_the_list_of_changes_keeps_are_seen():
    worker = Program(backend=partial(Distant, seconds=0, tells=False))
    other = Program(backend=partial(Distant, seconds=0, tells=False))
    async with other.tasks, anyio.create_task_group() as group:
        group.start_soon(worker.run, 60)
        await anyio.sleep(10)
        at = VirtualClock().utc_now() + timedelta(seconds=20)
        for number in range(450):
            await other.tasks.schedules.add(Schedule(f"s{number}", other.note, at=at, args=(str(number),)))
    assert sorted(int(what) for what, _, _ in worker.notes) == list(range(450))


@virtually
async def test_many_may_add_schedules_at_the_same_time():
    programs = [Program(backend=partial(Distant, seed=number, tells=False)) for number in range(60)]

    async def add(number, program):
        async with program.tasks:
            await program.tasks.schedules.add(Schedule(f"s{number}", program.note, every=60))

    async with anyio.create_task_group() as group, InMemoryMailbox.from_url("memory://jobs"):
        for number, program in enumerate(programs):
            group.start_soon(add, number, program)
        await anyio.sleep(30)
        worker = Program()
        await worker.run(90)
    assert len(worker.notes) == 60


@virtually
async def test_add_changes_a_schedule_of_that_name_and_keeps_its_time_and_pause():
    program = Program()
    async with program.tasks:
        schedules = program.tasks.schedules
        first = await schedules.add(Schedule("s", program.note, every=60))
        await schedules.pause("s")
        await anyio.sleep(30)
        second = await schedules.add(
            Schedule("s", program.note.options(priority=3), every=60, args=("b",), misfire="all")
        )
        assert (second.next_at, second.paused, second.args, second.misfire) == (
            first.next_at,
            True,
            {"what": "b"},
            "all",
        )
        third = await schedules.add(Schedule("s", "note", every=90))
        assert (third.next_at - EPOCH).total_seconds() == 120
        assert not first.declared
        assert [each.name for each in await schedules.list()] == ["s"]


@virtually
async def test_run_now_sends_one_call_and_leaves_the_ticks():
    program = Program()
    program.tasks.schedule(
        Schedule("hourly", program.note.options(result_ttl=60), every=HOUR, args=("now",), jitter=600)
    )
    async with anyio.create_task_group() as group:
        group.start_soon(program.run, HOUR - 1)
        await anyio.sleep(10)
        job = await program.tasks.schedules.run_now("hourly")
        assert await job.result(timeout=5) is None
        stranger = Tasks("memory://jobs")
        async with stranger:
            await stranger.schedules.run_now("hourly")
    assert [(what, tick, at) for what, tick, at in program.notes] == [("now", 10.0, 10.0)] * 2


@virtually
async def test_a_unique_call_is_not_sent_while_the_one_before_it_is_unfinished():
    program, begun = Program(), []

    @program.tasks.task(unique=True, priority=2)
    async def long(ctx: Context) -> None:
        begun.append(ctx.scheduled_for.timestamp() - EPOCH.timestamp())
        await anyio.sleep(100)

    program.tasks.schedule(Schedule("often", long, every=60))
    await program.run(400)
    assert begun == [60.0, 180.0, 300.0]


@virtually
async def test_a_middleware_sees_each_call_and_one_that_fails_ends_no_worker():
    class Tenant(Middleware):
        fails = False

        @asynccontextmanager
        async def sending(self, calls):
            for call in calls:
                if self.fails:
                    raise ValueError("no tenant")
                call.arguments["what"] = f"{call.headers['mainspring-schedule']} of a tenant"
            yield

    tenant = Tenant()
    program = Program(middleware=[tenant])
    program.tasks.schedule(Schedule("often", program.note, every=HOUR))
    async with anyio.create_task_group() as group:
        group.start_soon(program.run, 2.5 * HOUR)
        await anyio.sleep(1.5 * HOUR)
        tenant.fails = True
        await anyio.sleep(0.5 * HOUR + 150)
        tenant.fails = False
    assert [(what, tick / HOUR) for what, tick, _ in program.notes] == [
        ("often of a tenant", 1),
        ("often of a tenant", 2),
    ]
    assert 2 * HOUR + 150 <= program.notes[1][2] <= 2 * HOUR + 240


@virtually
async def test_a_schedule_that_does_not_fit_the_task_here_is_left_to_other_workers():
    old, notes = Program(), []
    async with old.tasks:
        await old.tasks.schedules.add(Schedule("often", old.note, every=60, args=("a",)))
        await old.tasks.schedules.add(Schedule("other", old.note, every=90))
    tasks = Tasks("memory://jobs")

    @tasks.task
    async def note(ctx: Context, what: int = 0) -> None:
        notes.append(what)

    async with anyio.create_task_group() as group:
        group.start_soon(Program(notes=old.notes).run, 250)
        with anyio.move_on_after(250):
            async with tasks:
                await tasks.loop().run()
    assert len({tick for what, tick, _ in old.notes if what == "a"}) >= 2
    assert len(notes) + len(old.notes) >= 4


@virtually
async def test_a_schedule_whose_task_is_unknown_here_is_left_to_other_workers():
    program = Program()
    async with program.tasks:
        await program.tasks.schedules.add(Schedule("often", program.note, every=60))
        stranger = Tasks("memory://jobs")
        with anyio.move_on_after(200):
            await stranger.loop().run()
        assert await program.tasks.mailbox.approximate_count() == 0
    await program.run(10)
    assert [tick for _, tick, _ in program.notes] == [180.0]


# ------------------------------------------------------------------------------------------------------ what cannot be


def a_task():
    tasks = Tasks("memory://jobs")

    @tasks.task
    async def email(to: str, subject: str = "") -> None: ...

    return tasks, email


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "give one of cron, every and at$"),
        ({"cron": "0 3 * * *", "every": 5}, "give one of cron, every and at, not cron and every"),
        ({"cron": "0 0 30 2 *"}, "schedule 's': the cron line '0 0 30 2 [*]' never fires"),
        ({"cron": "nope"}, "schedule 's': the cron line 'nope' cannot be read"),
        ({"cron": "0 3 * * *", "tz": "Mars/Base"}, "there is no time zone 'Mars/Base'"),
        ({"every": 0.5}, "every must be 1 to 31622400 seconds, not 0.5"),
        ({"every": "5m"}, "every must be 1 to"),
        ({"every": 60, "tz": "Europe/Berlin"}, "tz is the time zone of a cron line"),
        ({"at": datetime(2030, 1, 1)}, "at must be a datetime with a time zone"),
        ({"every": 60, "misfire": "sometimes"}, "misfire must be 'skip', 'once', 'all' or a number from 1 to 100"),
        ({"every": 60, "misfire": True}, "misfire must be"),
        ({"every": 60, "misfire": 101}, "misfire must be"),
        ({"every": 60, "jitter": -1}, "jitter must be 0 to"),
        ({"every": 60, "args": "ann"}, "args must be a tuple"),
        ({"every": 60, "name": ""}, "its name must be 1 to 200 printable characters"),
        ({"every": 60, "name": "a\nb"}, "its name must be"),
        ({"every": 60, "task": 5}, "give a task"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused_in_one_line(given, says):
    _, email = a_task()
    with pytest.raises(ConfigError, match=says) as raised:
        Schedule(**{"name": "s", "task": email, **given})
    assert "\n" not in str(raised.value)


def test_a_declaration_that_cannot_be_is_refused():
    tasks, email = a_task()
    other, _ = a_task()
    with pytest.raises(InvalidParameterError, match="missing a required argument: 'to'"):
        tasks.cron("0 3 * * *", email)
    with pytest.raises(SerializationError, match="to"):
        tasks.cron("0 3 * * *", email, args=(5,))
    with pytest.raises(ConfigError, match="is no task of"):
        other.cron("0 3 * * *", email, args=("ann",))
    with pytest.raises(ConfigError, match="cannot have the option delay"):
        tasks.cron("0 3 * * *", email.options(delay=5), args=("ann",))
    with pytest.raises(UnknownTaskError, match="no task 'mail' is registered here"):
        tasks.schedule(Schedule("s", "mail", every=60))
    with pytest.raises(ConfigError, match=r"give a Schedule\(…\), not 'email'"):
        tasks.schedule("email")
    with pytest.raises(SerializationError, match=r"schedule 'email' is 300,.*at most 262,144"):
        tasks.cron("0 3 * * *", email, args=("x" * 300_000,))
    tasks.cron("0 3 * * *", email, args=("ann",))
    with pytest.raises(ConfigError, match="'email' is declared already on 'jobs'; give one of the two another name="):
        tasks.cron("0 4 * * *", email, args=("ann",))
    tasks.cron("0 4 * * *", email, args=("ann",), name="email at four")


@virtually
async def test_a_call_about_a_schedule_that_cannot_be_is_refused():
    program = Program()
    program.tasks.schedule(Schedule("declared", program.note, every=60))
    schedules = program.tasks.schedules
    async with program.tasks:
        for call in (schedules.pause, schedules.resume, schedules.remove, schedules.run_now):
            with pytest.raises(ScheduleNotFoundError, match="there is no schedule 'nope' in this mailbox"):
                await call("nope")
        with pytest.raises(ConfigError, match="'declared' is declared in code; change it there"):
            await schedules.add(Schedule("declared", program.note, every=60))
        with pytest.raises(ConfigError, match="at is past"):
            await schedules.add(Schedule("s", program.note, at=EPOCH - timedelta(seconds=1)))
        with pytest.raises(ConfigError, match=r"takes a Schedule\(…\)"):
            await schedules.add("s")
        async with anyio.create_task_group() as group:
            group.start_soon(program.tasks.loop().run)
            await anyio.sleep(1)
            with pytest.raises(ConfigError, match="a loop of 'jobs' runs already; declare it before"):
                program.tasks.schedule(Schedule("late", program.note, every=60))
            with pytest.raises(ConfigError, match="is declared in the code"):
                await schedules.remove("declared")
            group.cancel_scope.cancel()


async def test_a_mailbox_without_records_is_refused():
    class Plain(WrappedBackend):
        capabilities = Capabilities()

    tasks = Tasks(wrap(InMemoryMailbox("jobs"), Plain))

    @tasks.task
    async def email() -> None: ...

    with pytest.raises(ConfigError, match=r"keeps records \(Capabilities.records\)"):
        tasks.cron("0 3 * * *", email)
    async with tasks:
        for call in (
            tasks.schedules.list(),
            tasks.schedules.add(Schedule("s", email, every=5)),
            tasks.schedules.pause("s"),
        ):
            with pytest.raises(ConfigError, match=r"Capabilities.records"):
                await call
        async with LoopGroup([tasks.loop()], guardian=False):
            await email.send()


def test_a_record_of_another_version_is_left_alone_and_said(caplog):
    async def run():
        program = Program()
        async with program.tasks:
            await program.tasks.mailbox.backend.write_record(RecordWrite("schedule", "strange", b'{"v":2}'))
            await program.tasks.schedules.add(Schedule("s", program.note, every=60))
            assert [each.name for each in await program.tasks.schedules.list()] == ["s"]
        await program.run(90)
        return program.notes

    with caplog.at_level(logging.ERROR, "mainspring.tasks"):
        assert len(run_virtual(run)) == 1
    assert "schedule 'strange' is left alone" in caplog.text


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


@pytest.mark.parametrize("kind", ["sqlite", "memory"])
async def test_a_call_about_schedules_on_a_mailbox_that_is_not_open_is_refused(kind, tmp_path):
    tasks = Tasks(f"sqlite:///{tmp_path / 'jobs.db'}?name=jobs" if kind == "sqlite" else "memory://closed")

    @tasks.task
    async def email() -> None: ...

    if kind == "memory":  # which can be used until it is closed
        async with tasks:
            pass
    schedules, schedule = tasks.schedules, Schedule("s", email, every=5)
    for call in (schedules.list(), schedules.add(schedule), schedules.run_now("s"), schedules.remove("s")):
        with pytest.raises(MailboxClosedError, match="use it inside `async with`"):
            await call
    with pytest.raises(MailboxClosedError, match="use it inside `async with`"):
        await tasks.job("j").status()


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


def test_what_a_worker_does_not_tick_it_says_once(caplog):
    async def run():
        program = Program()
        async with program.tasks:
            for number in range(20):
                await program.tasks.schedules.add(Schedule(f"s{number}", program.note, every=60))
            with anyio.move_on_after(200):
                await Tasks("memory://jobs").loop().run()

    with caplog.at_level(logging.WARNING, "mainspring.tasks"):
        run_virtual(run)
    assert [record.message for record in caplog.records] == [
        "the schedules of task 'note' tick in other workers: it is not registered here"
    ]


@virtually
async def test_a_change_that_comes_while_another_is_read_is_seen():
    class Slow(WrappedBackend):
        async def find_records(self, kind, keys):
            found = await self.inner.find_records(kind, keys)
            await anyio.sleep(0.5)
            return found

    worker, other = Program(backend=Slow), Program()
    async with other.tasks, anyio.create_task_group() as group:
        group.start_soon(worker.run, 100)
        await anyio.sleep(5)
        for seconds in (50, 10):
            at = VirtualClock().utc_now() + timedelta(seconds=seconds)
            await other.tasks.schedules.add(Schedule("s", other.note, at=at))
            await anyio.sleep(0.25)
    ((_, tick, at),) = worker.notes
    assert at - tick < 2


async def test_schedules_can_be_used_where_calls_are_recorded():
    tasks = Tasks("sqlite:///no-such-directory/jobs.db?name=jobs")

    @tasks.task
    async def email(to: str) -> None: ...

    _ = tasks.schedules
    with tasks.testing() as sent:
        await tasks.schedules.add(Schedule("s", email, every=60, args=("ann",)))
        assert [each.name for each in await tasks.schedules.list()] == ["s"]
        await tasks.schedules.run_now("s")
    assert [(call.task, call.arguments) for call in sent] == [(email, {"to": "ann"})]
