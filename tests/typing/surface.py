"""How the public surface types for those who use it. Checked by mypy --strict (see test_typing.py), never run.

Each ``type: ignore`` names an error that a user is to get; that there is one is checked by mypy too (unused ignores).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import partial
from typing import Annotated, Any, assert_type

import anyio

from mainspring import (
    Budget,
    BudgetTracker,
    CancelOutcome,
    Capabilities,
    Context,
    DaemonScope,
    DeadLetter,
    DeadLetterPolicy,
    Deadline,
    Dispatcher,
    DLQConsumer,
    Heartbeat,
    InMemoryMailbox,
    JobStatus,
    LeasePolicy,
    LoopGroup,
    LoopThread,
    Mailbox,
    MainLoop,
    Message,
    PendingReply,
    Reject,
    RestartPolicy,
    Retry,
    RetryPolicy,
    Runnable,
    Schedule,
    ScheduleStatus,
    Session,
    ShutdownCoordinator,
    ShutdownReport,
    TaskRouter,
    Tasks,
    Ticket,
    Verdict,
    open_mailbox,
)
from mainspring import Job as SentJob
from mainspring.events import DispatchResult, MessageFinished
from mainspring.state.session import append, replace_latest


@dataclass
class Job:
    number: int


@dataclass
class Result:
    text: str


# ------------------------------------------------------------------------------------------------------------- mailboxes


async def sending(mailbox: Mailbox[Job, Result], replies: Mailbox[Result, None]) -> None:
    assert_type(await mailbox.send(Job(1)), str)
    assert_type(await mailbox.send_many([Job(1), Job(2)]), list[str])
    await mailbox.send(Job(1), delay=5, reply_to=replies, dedup_key="k", priority=1, headers={"a": "b"}, expires_in=60)
    await mailbox.send(Job(1), at=datetime.now(UTC), expires_in=timedelta(hours=1))
    await mailbox.send_many([Job(1)], delay=timedelta(minutes=1))
    assert_type(await mailbox.request(Job(1), timeout=5, delay=timedelta(minutes=1)), Result)
    mailbox.sync.send(Job(1), at=datetime.now(UTC))
    Retry(timedelta(minutes=5))
    await mailbox.send(Job(1), at=60)  # type: ignore[arg-type]
    await mailbox.send("no job")  # type: ignore[arg-type]
    await mailbox.send_many(["no job"])  # type: ignore[list-item]
    await mailbox.send(Job(1), headers={"a": 1})  # type: ignore[dict-item]
    await mailbox.send(Job(1), retries=3)  # type: ignore[call-arg]
    await mailbox.send(Job(1), 5)  # type: ignore[call-arg]


async def asking(mailbox: Mailbox[Job, Result]) -> None:
    assert_type(await mailbox.request(Job(1), timeout=5, priority=1, expires_in=60), Result)
    await mailbox.request("no job", timeout=5)  # type: ignore[arg-type]
    await mailbox.request(Job(1))  # type: ignore[call-arg]
    await mailbox.request(Job(1), timeout=5, dedup_key="k")  # type: ignore[call-arg]
    pending = await mailbox.submit(Job(1))
    assert_type(pending, PendingReply[Result])
    assert_type(await pending.result(timeout=5), Result)
    await pending.result()  # type: ignore[call-arg]
    assert_type(await mailbox.cancel(pending.id), CancelOutcome)
    assert_type(await mailbox.dead_letter(pending.id), DeadLetter[Job] | None)


@dataclass(frozen=True)
class Jobs:
    done: Annotated[tuple[Job, ...], append] = ()
    latest: Annotated[Job | None, replace_latest] = None


async def keeping_state(mailbox: Mailbox[Job, Result]) -> None:
    session = Session(Jobs)
    assert_type(session, Session[Jobs])
    assert_type(session.state.done, tuple[Job, ...])
    assert_type(session.child("other", Jobs).state, Jobs)
    assert_type(await session.dispatch(Job(1)), DispatchResult)
    assert_type(await session.dispatch_nowait(Job(1)).wait(), DispatchResult)
    async with Session.open(Jobs(), journal="jobs.jsonl") as opened, opened.transaction():
        assert_type(opened.state.latest, Job | None)
    assert_type(Session().state, Mapping[str, Any])
    session.state.latest = Job(2)  # type: ignore[misc]
    Session(Jobs, journal="jobs.jsonl")  # type: ignore[call-overload]


async def limiting(mailbox: Mailbox[Job, Result]) -> None:
    await mailbox.send(Job(1), deadline=Deadline.after(5))
    await mailbox.send(Job(1), deadline=5)  # type: ignore[arg-type]
    assert_type(await mailbox.request(Job(1), timeout=5, deadline=None), Result)
    tracker = BudgetTracker(Budget(Deadline.after(5).at, max_cost=0.1))
    assert_type(tracker.add(input_tokens=3, cost=0.1).cost, Decimal)
    assert_type(tracker.budget.deadline, Deadline | None)


async def undertake(letter: DeadLetter, ctx: Context) -> Verdict | None:
    assert_type(letter.history[0].attempt, int)
    return Verdict.REPLAY if ctx.attempt == 1 else None


async def of_jobs(letter: DeadLetter[Job]) -> Verdict:
    return Verdict.KEEP if letter.body is None else Verdict.PURGE


async def of_results(letter: DeadLetter[Result]) -> None: ...


async def counting(letter: DeadLetter[Job]) -> int:
    return 1


def undertakers(mailbox: Mailbox[Job, Result]) -> None:
    DLQConsumer(mailbox, of_jobs)
    DLQConsumer(mailbox, of_results)  # type: ignore[arg-type]
    DLQConsumer(mailbox, counting)  # type: ignore[arg-type]


def undertaker(mailbox: Mailbox[Job, Result]) -> LoopGroup:
    return LoopGroup([DLQConsumer(mailbox, undertake, concurrency=2, look_every=30)])


async def receiving(mailbox: Mailbox[Job, Result]) -> None:
    messages = await mailbox.receive(max_messages=10, visibility_timeout=30, wait_time_seconds=20)
    assert_type(messages, list[Message[Job, Result]])
    for message in messages:
        assert_type(message.body, Job)
        assert_type(message.id, str)
        assert_type(message.attempt, int)
        assert_type(message.enqueued_at, datetime)
        assert_type(message.reply_to, str | None)
        assert_type(message.is_settled, bool)
        await message.reply(Result("done"))
        await message.reply(Job(1))  # type: ignore[arg-type]
        await message.nack(delay=5, charge=False)
        await message.dead_letter(ValueError("bad"))
        await message.extend_visibility(60)
        message.body = Job(2)  # type: ignore[misc]
    letters = await mailbox.dead_letters()
    assert_type(letters, list[DeadLetter[Job]])
    assert_type(letters[0].body, Job | None)
    assert_type(letters[0].dead_lettered_at, datetime)
    assert_type(letters[0].error, str)
    assert_type(await mailbox.approximate_count(), int)
    assert_type((await mailbox.counts()).in_flight, int)
    assert_type(mailbox.capabilities, Capabilities)


async def memory() -> None:
    typed: InMemoryMailbox[Job, Result] = InMemoryMailbox("jobs", capacity=10, serialize=True, body=Job, reply=Result)
    async with typed as opened:
        assert_type(opened, InMemoryMailbox[Job, Result])
        await opened.send(Result("no job"))  # type: ignore[arg-type]
    anything = open_mailbox("sqlite:///jobs.db", body=Job)
    assert_type(anything, Mailbox[Job, Any])
    both = open_mailbox("sqlite:///jobs.db", body=Job, reply=Result)
    assert_type(both, Mailbox[Job, Result])
    assert_type(await both.request(Job(1), timeout=5), Result)
    assert_type(open_mailbox("sqlite:///jobs.db", reply=Result), Mailbox[Any, Result])
    assert_type(InMemoryMailbox(body=Job, reply=Result), InMemoryMailbox[Job, Result])
    assert_type(InMemoryMailbox(body=Job), InMemoryMailbox[Job, Any])
    await both.send("no job")  # type: ignore[arg-type]
    InMemoryMailbox(capacities=5)  # type: ignore[call-overload]
    jobs: Mailbox[Job, Result] = anything
    await sending(jobs, open_mailbox("memory://replies"))
    assert_type(open_mailbox("memory://any"), Mailbox[Any, Any])
    emails = InMemoryMailbox("emails", body=str)  # an editor need not be told what a mailbox holds
    await emails.send("a")


def blocking(mailbox: Mailbox[Job, Result]) -> None:
    with mailbox.sync as jobs:
        assert_type(jobs.send(Job(1), priority=3), str)
        assert_type(jobs.request(Job(1), timeout=5), Result)
        (message,) = jobs.receive(wait_time_seconds=1)
        assert_type(message.body, Job)
        assert_type(jobs.call(message.nack, delay=5), None)
        assert_type(jobs.cancel("id"), CancelOutcome)
        jobs.send(7)  # type: ignore[arg-type]
        jobs.send(Job(1), later=3)  # type: ignore[call-arg]
        jobs.call(message.nack, later=5)  # type: ignore[call-arg]


# ----------------------------------------------------------------------------------------------------------------- loops


async def with_context(job: Job, ctx: Context) -> Result:
    assert_type(ctx.attempt, int)
    assert_type(ctx.deadline, datetime | None)
    assert_type(ctx.remaining(), float | None)
    assert_type(ctx.shutting_down, bool)
    assert_type(ctx.run_id, str)
    ctx.beat()
    await ctx.checkpoint({"done": 1})
    await ctx.progress(1, 2)
    await ctx.wait_shutting_down()
    if job.number < 0:
        raise Reject("negative")
    raise Retry(delay=5, charge=False)


async def simple(job: Job) -> None: ...


def plain(job: Job) -> Result:
    return Result(str(job.number))


class Sweeper:
    """A loop that knows nothing of event loops."""

    running = False
    heartbeat = None

    def run(self) -> None: ...

    def shutdown(self) -> None: ...


class Service:
    async def handle(self, job: Job) -> None: ...

    async def __call__(self, job: Job, ctx: Context) -> Result:
        return Result("")


async def of_another_body(result: Result) -> None: ...


async def of_another_reply(job: Job) -> Job:
    return job


def plain_of_another_body(result: Result, ctx: Context) -> None: ...


async def without_a_body() -> None: ...


async def with_a_part_more(job: Job, ctx: Context, table: str) -> None: ...


async def parts(table: str, job: Job) -> None: ...


async def loops(mailbox: Mailbox[Job, Result]) -> None:
    loop = MainLoop(
        mailbox,
        with_context,
        name="jobs",
        concurrency=4,
        visibility_timeout=60,
        wait_time_seconds=30,
        retry=RetryPolicy(initial_delay=1.0, max_delay=10_800.0, factor=2.5, jitter="equal"),
        dead_letter=DeadLetterPolicy(max_attempts=20, max_crashes=5, include=(KeyError,), exclude=(OSError,)),
        lease=LeasePolicy(renew="on-beat"),
        handler_timeout=None,
        shutdown_timeout=None,
        shutdown_priority=0,
        body=Job,
    )
    for handler in (simple, plain, Service().handle, Service(), partial(parts, "t"), lambda job: None):
        MainLoop(mailbox, handler)
    runnable: Runnable = loop
    LoopGroup([loop, Sweeper()])
    assert_type(runnable.running, bool)
    assert_type(loop.heartbeat, Heartbeat)
    assert_type(await loop.shutdown(timeout=5), bool)
    await loop.run(max_iterations=1, visibility_timeout=60, wait_time_seconds=0)
    async with loop as entered:
        assert_type(entered, MainLoop)

    def heard(event: MessageFinished) -> None:
        assert_type(event.seconds, float)

    assert_type(loop.dispatcher, Dispatcher)
    loop.dispatcher.subscribe(MessageFinished, heard)
    loop.dispatcher.subscribe(str, heard)  # type: ignore[arg-type]
    LeasePolicy(renew="always")  # type: ignore[arg-type]
    RetryPolicy(jitter="some")  # type: ignore[arg-type]
    MainLoop(mailbox, 5)  # type: ignore[arg-type]
    MainLoop(mailbox, of_another_body)  # type: ignore[arg-type]
    MainLoop(mailbox, of_another_reply)  # type: ignore[arg-type]
    MainLoop(mailbox, plain_of_another_body)  # type: ignore[arg-type]
    MainLoop(mailbox, without_a_body)  # type: ignore[arg-type]
    MainLoop(mailbox, with_a_part_more)  # type: ignore[arg-type]
    MainLoop(open_mailbox("memory://jobs", body=Job), of_another_body)  # type: ignore[arg-type]
    MainLoop(open_mailbox("memory://jobs"), of_another_body)
    MainLoop(mailbox, simple, concurency=4)  # type: ignore[call-arg]


# ----------------------------------------------------------------------------------------------------------------- groups


class Foreign:
    """The least that a loop of another make has to have."""

    def __init__(self) -> None:
        self.heartbeat = Heartbeat()
        self.running = False

    async def run(self) -> None: ...

    async def shutdown(self, *, timeout: float = 30.0) -> bool:
        return True


async def check_database() -> bool:
    return True


async def groups(loop: MainLoop) -> None:
    group = LoopGroup(
        [loop, Foreign()],
        name="service",
        shutdown_timeout=30,
        cancel_grace=5,
        drain_delay=0,
        check_timeout=2,
        check_interval=5,
        check_max_failures=1,
        max_concurrency=10,
        health_host="127.0.0.1",
        health_port=8080,
        checks={"database": check_database},
        restart=RestartPolicy(max_retries=5),
        watchdog_threshold=720,
        watchdog_interval=60,
        block_threshold=30,
        guardian=None,
        on_crash="terminate",
    )
    report = await group.run(install_signals=False, until_empty=True)
    assert_type(report, ShutdownReport)
    assert_type(report.exit_status, int)
    assert_type(report.clean, bool)
    assert_type(report.duration, float)
    assert_type(report.parts[0].name, str)
    assert_type(str(report), str)
    assert_type(await group.shutdown(timeout=30), bool)
    assert_type(group.report, ShutdownReport | None)
    await group.drain()
    async with group:
        pass
    async with group.lifespan():
        pass
    LoopGroup([5])  # type: ignore[list-item]
    LoopGroup([loop], on_crash="explode")  # type: ignore[arg-type]


def program(group: LoopGroup) -> int:
    report = anyio.run(group.run)
    assert_type(report, ShutdownReport)
    return report.exit_status


# ---------------------------------------------------------------------------------------------------------------- threads


async def in_loop_threads(group: LoopGroup, mailbox: Mailbox[Job, Result]) -> None:
    with LoopThread(backend="trio") as thread:
        assert_type(thread.post(lambda: None), bool)
        assert_type(thread.submit(mailbox.send, Job(1)), Ticket[str])
        assert_type(thread.submit(mailbox.counts).wait_sync(5).dead, int)
        assert_type(group.start_in(thread), Ticket[ShutdownReport])
        assert_type(thread.stop(timeout=3), bool)
        thread.submit(mailbox.send, 7)  # type: ignore[arg-type]
        thread.submit(mailbox.send)  # type: ignore[arg-type]


# -------------------------------------------------------------------------------------------------------------- lifecycle


async def lifecycle() -> None:
    async with DaemonScope("daemons") as scope:
        assert_type(scope, DaemonScope)
        daemon = scope.start_soon(anyio.sleep_forever, name="sleeper")
        assert_type(daemon.done, bool)

    async def late() -> None: ...

    async with ShutdownCoordinator.install() as coordinator:
        assert_type(coordinator, ShutdownCoordinator)
        coordinator.register(late)
        coordinator.register(lambda: None)
        coordinator.trigger()
        assert_type(coordinator.triggered, bool)
    assert_type(ShutdownCoordinator.get(), ShutdownCoordinator | None)


# ------------------------------------------------------------------------------------------------------------------ tasks

tasks = Tasks("sqlite:///jobs.db?name=jobs", retry=RetryPolicy(factor=3))


router = TaskRouter()
tasks.include(router)


@router.task
async def greet(to: str) -> int:
    return len(to)


@router.task(timeout=60)
async def greet_in_time(ctx: Context, to: str) -> int:
    return len(to)


async def send_of_a_router() -> None:
    greeted: SentJob[int] = await greet.send("ann")
    assert_type(await greet_in_time.send("ann"), SentJob[int])
    assert_type(await greeted.result(), int)
    await greet.send(5)  # type: ignore[arg-type]


@tasks.task
async def email(to: str, subject: str = "Hello") -> Result:
    return Result(to + subject)


@tasks.task(timeout=60, unique=True)
async def compute(ctx: Context, number: int) -> int:
    return number + ctx.attempt


@tasks.task(offload="process", expires_in=timedelta(hours=1))
def halve(number: int, *, wide: bool = False) -> float:
    return number / (2 if wide else 3)


@tasks.task(batch=100, batch_wait=0.2)
async def index(jobs: list[Job]) -> list[Result | ValueError]:
    return [Result(str(len(jobs))) for _ in jobs]


@tasks.task(batch=100)
def remove(names: list[str]) -> None: ...


@tasks.task(batch=100)
async def count(contexts: list[Context[Any]], names: list[str]) -> list[int]:
    return [context.attempt for context in contexts]


async def batches() -> None:
    assert_type(await count.send("a"), SentJob[int])
    await count.send(1)  # type: ignore[arg-type]
    assert_type(await index.options(result_ttl=60).send(Job(1)), SentJob[Result])
    await remove.send("a")
    await remove.send(["a"])  # type: ignore[arg-type]
    await index.send("a")  # type: ignore[arg-type]


async def schedules() -> None:
    tasks.cron("0 3 * * *", email, args=("ann",), tz="Europe/Berlin", misfire="all", jitter=timedelta(minutes=1))
    tasks.cron("0 3 * * *", email, misfire="sometimes")  # type: ignore[arg-type]
    assert_type(tasks.schedule(Schedule("often", compute, every=60, args={"number": 1})), Schedule)
    added = await tasks.schedules.add(Schedule("once", "email", at=datetime.now(UTC), misfire=3))
    assert_type(added, ScheduleStatus)
    assert_type(added.next_at, datetime | None)
    assert_type(await tasks.schedules.list(), list[ScheduleStatus])
    assert_type(await tasks.schedules.run_now("once"), SentJob[Any])
    tasks.sync.call(tasks.schedules.pause, "once")


async def calls() -> None:
    assert_type(await email.send("ann"), SentJob[Result])
    assert_type((await email.send("ann")).new, bool)
    assert_type(await (await email.options(result_ttl=60).send("ann")).result(timeout=5), Result)
    assert_type(await (await email.send("ann")).status(), JobStatus)
    assert_type(await email.options(delay=60, priority=5).send(to="ann", subject="Hi"), SentJob[Result])
    assert_type(await compute.send(1), SentJob[int])
    assert_type(await compute.request(1, timeout=5), int)
    assert_type(await halve.send_at(datetime.now(UTC), 1, wide=True), SentJob[float])
    assert_type(await halve.send_many([(1,), {"number": 2}]), list[SentJob[float]])
    assert_type(halve.sync.send(1), SentJob[float])
    assert_type(email.sync.request("ann", timeout=5), Result)
    assert_type(tasks.loop(concurrency=3), MainLoop)
    await email.send(7)  # type: ignore[arg-type]
    await email.send("ann", subjekt="Hi")  # type: ignore[call-arg]
    await email.send()  # type: ignore[call-arg]
    await compute.send("1")  # type: ignore[arg-type]
    halve.sync.send("1")  # type: ignore[arg-type]
    await email.options(delay="soon").send("ann")  # type: ignore[arg-type]
    tasks.task(retry=3)  # type: ignore[call-overload]


# -------------------------------------------------------------------------------------------------------------- resources


@asynccontextmanager
async def opened() -> AsyncIterator[Result]:
    yield Result("shared")


async def with_resources(job: Job, ctx: Context[Result]) -> None:
    assert_type(ctx.resources, Result)


@tasks.task
async def task_with_resources(ctx: Context[Result], number: int) -> str:
    return ctx.resources.text * number


async def sharing(mailbox: Mailbox[Job, Result]) -> None:
    LoopGroup([MainLoop(mailbox, with_resources)], lifespan=opened)
    assert_type(await task_with_resources.send(3), SentJob[str])
    await task_with_resources.send("3")  # type: ignore[arg-type]
    LoopGroup([], lifespan=opened())  # type: ignore[arg-type]
