"""Schedules that are made and changed at run time, what goes wrong with one, and what cannot be."""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from functools import partial

import anyio
import pytest
from schedule_support import EPOCH, HOUR, Distant, Program, virtually

from mainspring import Context, InMemoryMailbox, LoopGroup, Middleware, Schedule, Tasks
from mainspring.errors import (
    ConfigError,
    InvalidParameterError,
    MailboxClosedError,
    MailboxConnectionError,
    ScheduleNotFoundError,
    SerializationError,
    UnknownTaskError,
)
from mainspring.mailbox.backend import Capabilities
from mainspring.mailbox.records import RecordWrite
from mainspring.testing import VirtualClock, run_virtual
from wrapped_backend import WrappedBackend, wrap

pytestmark = pytest.mark.anyio


async def added(*, tells, die=False):
    """How long a schedule that another process adds takes to tick, beside another schedule, or (``die``) not told."""
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
        stranger.task(name="another")(a_task)
        with anyio.move_on_after(200):
            await stranger.loop().run()
        assert await program.tasks.mailbox.approximate_count() == 0
    await program.run(10)
    assert [tick for _, tick, _ in program.notes] == [180.0]


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


def test_what_a_worker_does_not_tick_it_says_once(caplog):
    async def run():
        program = Program()
        async with program.tasks:
            for number in range(20):
                await program.tasks.schedules.add(Schedule(f"s{number}", program.note, every=60))
            stranger = Tasks("memory://jobs")
            stranger.task(name="another")(a_task)
            with anyio.move_on_after(200):
                await stranger.loop().run()

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
