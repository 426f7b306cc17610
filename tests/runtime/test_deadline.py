"""``Deadline``: aware instants only; into scopes, messages, their handlers, and what these send."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta, timezone
from functools import partial

import anyio
import anyio.from_thread
import anyio.to_thread
import pytest

from mainspring import (
    Budget,
    Context,
    Deadline,
    DeadlineExceededError,
    DLQConsumer,
    HandlerTimeoutError,
    InMemoryMailbox,
    InvalidParameterError,
    LoopGroup,
    MainLoop,
    RequestFailedError,
    RetryPolicy,
    open_mailbox,
)
from mainspring.core.clock import utc_now
from mainspring.events import MessageFinished
from mainspring.runtime.deadline import HEADER, deadline_of, with_deadline

pytestmark = pytest.mark.anyio

NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)


async def work(*loops):
    await LoopGroup(loops).run(install_signals=False, until_empty=True)


# ------------------------------------------------------------------------------------------------------------ instants


@pytest.mark.parametrize("at", [datetime(2030, 1, 1), "2030-01-01", 5.0, None])
def test_only_an_aware_datetime_is_one(at):
    with pytest.raises(InvalidParameterError, match="a deadline must be an aware datetime"):
        Deadline(at)


BEYOND = [
    datetime.max.replace(tzinfo=timezone(timedelta(hours=-1))),
    datetime.min.replace(tzinfo=timezone(timedelta(hours=1))),
]


@pytest.mark.parametrize("at", BEYOND)
@pytest.mark.parametrize("kind", [Deadline, Budget])
def test_an_instant_that_utc_has_no_date_for_is_none(kind, at):
    with pytest.raises(InvalidParameterError, match="a deadline must be within the years 1 to 9999 in UTC"):
        kind(at)


@pytest.mark.parametrize("seconds", [-1, math.nan, math.inf, 1e300, "5", True, None])
def test_after_takes_seconds(seconds):
    with pytest.raises(InvalidParameterError, match=r"Deadline\.after takes 0 or more seconds"):
        Deadline.after(seconds)


def test_they_compare_as_instants():
    there = datetime(2030, 1, 1, 14, tzinfo=timezone(timedelta(hours=2)))
    assert Deadline(there) == Deadline(NOON)
    assert str(Deadline(there)) == "2030-01-01T12:00:00+00:00"
    assert min(Deadline(NOON), Deadline(NOON - timedelta(seconds=1))).at < NOON


async def test_what_remains(virtual_clock):
    deadline = Deadline.after(10)
    assert deadline.at == utc_now() + timedelta(seconds=10)
    await anyio.sleep(4)
    assert deadline.remaining() == 6
    assert await anyio.to_thread.run_sync(deadline.remaining) == 6  # in a thread, of the event loop's clock
    assert not deadline.passed
    await anyio.sleep(6)
    assert deadline.passed
    await anyio.sleep(1)
    assert deadline.remaining() == 0
    assert deadline.overdue() == 1


def test_without_an_event_loop():
    assert 0 < Deadline.after(60).remaining() <= 60
    assert Deadline(datetime(2000, 1, 1, tzinfo=UTC)).passed


# -------------------------------------------------------------------------------------------------------------- scopes


async def test_a_scope_ends_then(virtual_clock):
    with pytest.raises(DeadlineExceededError, match="the deadline 2000-01-01T00:00:05"), Deadline.after(5).scope():
        await anyio.sleep(60)
    assert virtual_clock.now == 5
    with Deadline.after(5).scope() as scope:
        await anyio.sleep(1)
    assert not scope.cancel_called
    assert isinstance(DeadlineExceededError(), TimeoutError)


async def test_what_is_cancelled_otherwise_is_not_late(anyio_backend):
    with anyio.CancelScope() as outer:
        with Deadline.after(60).scope():
            outer.cancel()
            await anyio.sleep_forever()
    assert outer.cancelled_caught


async def test_of_two_scopes_the_earlier_one_holds(virtual_clock):
    early, late = Deadline.after(5), Deadline.after(50)
    assert Deadline.current() is None
    with early.scope():
        with late.scope():
            assert Deadline.current() == early
        assert Deadline.current() == early
    with late.scope(), early.scope():
        assert Deadline.current() == early
    assert Deadline.current() is None


# ------------------------------------------------------------------------------------------------------------- headers


def test_headers():
    deadline = Deadline(NOON)
    headers = with_deadline({"a": "b"}, deadline)
    assert headers == {"a": "b", HEADER: "2030-01-01T12:00:00+00:00"}
    assert deadline_of(headers) == deadline
    assert with_deadline(headers, "inherit") is headers  # forwarded as it is
    assert with_deadline(headers, None) == {"a": "b"}
    assert with_deadline(None, None) is None
    assert deadline_of({}) is None
    with pytest.raises(InvalidParameterError, match="send: deadline must be a Deadline, None or 'inherit', not 5"):
        with_deadline(None, 5)


@pytest.fixture(params=["memory", "sqlite"])
async def mailbox(request, tmp_path, virtual_clock):
    url = "memory://jobs" if request.param == "memory" else f"sqlite:///{tmp_path}/m.db?name=jobs"
    async with open_mailbox(url, body=str, reply=str) as mailbox:
        yield mailbox


async def test_a_handler_ends_at_its_messages_deadline(mailbox, virtual_clock):
    seen, cancelled_at, finished = [], [], []

    async def handle(job: str, ctx: Context) -> None:
        seen.append((ctx.deadline, ctx.remaining(), Deadline.current()))
        try:
            await anyio.sleep(60)
        finally:
            cancelled_at.append(anyio.current_time())

    deadline = Deadline.after(5)
    began = virtual_clock.now
    await mailbox.send("x", deadline=deadline)
    loop = MainLoop(mailbox, handle)
    loop.dispatcher.subscribe(MessageFinished, finished.append)
    await work(loop)
    assert seen == [(deadline.at, pytest.approx(5), deadline)]
    assert cancelled_at == [pytest.approx(began + 5)]
    (letter,) = await mailbox.dead_letters()
    assert letter.error_type == "DeadlineExceededError"
    assert str(deadline) in letter.error
    assert letter.attempt == 1  # no retry: it would come later still
    assert "in handle" in letter.traceback  # where it stood
    assert finished[0].outcome == "dead_lettered"


@pytest.mark.every_loop
async def test_on_each_event_loop(anyio_backend):
    ended = []

    async def handle(job: str) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            ended.append(job)

    async with InMemoryMailbox("jobs", body=str) as jobs:
        await jobs.send("x", deadline=Deadline.after(0.2))
        with anyio.fail_after(60):
            await work(MainLoop(jobs, handle))
        (letter,) = await jobs.dead_letters()
    assert ended in (["x"], [])  # on a machine that stood still for so long, it was not begun
    assert letter.error_type == "DeadlineExceededError"


async def test_too_late_it_is_not_begun(mailbox, virtual_clock):
    ran = []

    async def handle(job: str) -> None:
        ran.append(job)

    await mailbox.send("late", deadline=Deadline.after(5), delay=10)
    await mailbox.send("in time", deadline=Deadline.after(50), delay=10)
    await work(MainLoop(mailbox, handle))
    assert ran == ["in time"]
    (letter,) = await mailbox.dead_letters()
    assert (letter.body, letter.error_type) == ("late", "DeadlineExceededError")


async def test_a_slot_forgets_the_deadline_of_the_message_before(mailbox, virtual_clock):
    seen = []

    async def handle(job: str, ctx: Context) -> None:
        seen.append((job, ctx.deadline, Deadline.current()))
        await anyio.sleep(7)

    deadline = Deadline.after(9)
    await mailbox.send("a", deadline=deadline)
    await mailbox.send("b")
    await work(MainLoop(mailbox, handle))
    assert seen == [("a", deadline.at, deadline), ("b", None, None)]
    assert await mailbox.dead_letters() == []


async def test_the_earlier_of_timeout_and_deadline_holds(mailbox, virtual_clock):
    seen, errors = [], []

    async def handle(job: str, ctx: Context) -> None:
        seen.append(ctx.remaining())
        try:
            await anyio.sleep(60)
        except BaseException:
            errors.append(anyio.current_time())
            raise

    began = virtual_clock.now
    await mailbox.send("x", deadline=Deadline.after(35))
    await work(MainLoop(mailbox, handle, handler_timeout=10, retry=RetryPolicy(initial_delay=10, jitter="none")))
    # ten seconds, a pause of ten, ten more, a pause of twenty: then it is too late
    assert seen == [pytest.approx(10), pytest.approx(10)]
    assert errors == [pytest.approx(began + 10), pytest.approx(began + 30)]
    (letter,) = await mailbox.dead_letters()
    assert letter.error_type == "DeadlineExceededError"
    assert letter.history[0].error_type == HandlerTimeoutError.__name__


async def test_messages_sent_from_within_inherit_it_unless_told_otherwise(virtual_clock):
    async with InMemoryMailbox("jobs", body=str) as jobs, InMemoryMailbox("more", body=str) as more:
        seen = {}

        async def handle(job: str) -> None:
            await more.send("inherited")
            await more.send_many(["many"])
            await more.send("none", deadline=None)
            await more.send("own", deadline=Deadline(NOON))
            await more.send("beside", headers={"a": "b"})

        async def look(job: str, ctx: Context) -> None:
            seen[job] = ctx.deadline
            assert (job == "beside") == ("a" in ctx.message.headers)

        deadline = Deadline.after(5)
        await jobs.send("x", deadline=deadline)
        await work(MainLoop(jobs, handle))
        await work(MainLoop(more, look))
        at = deadline.at
        assert seen == {"inherited": at, "many": at, "none": None, "own": NOON, "beside": at}


async def test_it_travels_from_a_scope_through_requests_and_replies(virtual_clock):
    async with InMemoryMailbox("jobs", body=str, reply=str) as jobs:

        async def handle(job: str, ctx: Context) -> str:
            await anyio.sleep(3 if job == "quick" else 60)
            return f"until {ctx.remaining():g}"

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(MainLoop(jobs, handle).run)
            with Deadline.after(10).scope():
                assert await jobs.request("quick", timeout=30) == "until 7"
            pending = await jobs.submit("slow", deadline=Deadline.after(5))
            with pytest.raises(RequestFailedError, match="DeadlineExceededError"):
                await pending.result(timeout=30)
            assert virtual_clock.now == 8
            tasks.cancel_scope.cancel()


async def test_a_reply_to_a_mailbox_has_the_deadline_of_its_request(virtual_clock):
    async with open_mailbox("memory://jobs", body=str, reply=str) as jobs, open_mailbox("memory://out") as out:

        async def handle(job: str) -> str:
            return job

        deadline = Deadline.after(50)
        await jobs.send("x", reply_to=out, deadline=deadline)
        await work(MainLoop(jobs, handle))
        (reply,) = await out.receive()
        assert deadline_of(reply.headers) == deadline


async def test_a_plain_handler_in_its_thread_has_it_too(virtual_clock):
    async with InMemoryMailbox("jobs", body=str) as jobs, InMemoryMailbox("more", body=str) as more:
        seen = []

        def handle(job: str, ctx: Context) -> None:
            seen.append((Deadline.current(), ctx.deadline))
            anyio.from_thread.run(partial(more.send, "inherited"))

        deadline = Deadline.after(5)
        await jobs.send("x", deadline=deadline)
        await work(MainLoop(jobs, handle))
        assert seen == [(deadline, deadline.at)]
        (message,) = await more.receive()
        assert deadline_of(message.headers) == deadline


async def test_a_header_that_is_no_instant(mailbox, virtual_clock):
    ran = []

    async def handle(job: str) -> None:
        ran.append(job)

    await mailbox.send("x", headers={HEADER: "tomorrow"})
    await mailbox.send("y", headers={HEADER: "2030-01-01T12:00:00"})
    await work(MainLoop(mailbox, handle, retry=RetryPolicy(initial_delay=0)))
    letters = await mailbox.dead_letters()
    assert [letter.error_type for letter in letters] == ["SerializationError"] * 2
    assert "must be an instant with its zone in ISO 8601, not 'tomorrow'" in letters[0].error
    assert ran == []


@pytest.mark.parametrize("at", BEYOND)
async def test_a_header_beyond_the_calendar_harms_no_neighbour(mailbox, virtual_clock, at):
    ran = []

    async def handle(job: str) -> None:
        ran.append(job)

    await mailbox.send("x", headers={HEADER: at.isoformat()})
    await mailbox.send("y")
    await work(MainLoop(mailbox, handle, retry=RetryPolicy(initial_delay=0)))
    assert [letter.error_type for letter in await mailbox.dead_letters()] == ["SerializationError"]
    assert ran == ["y"]


async def test_who_looks_after_dead_letters_is_not_bound_by_their_deadlines(mailbox, virtual_clock):
    letters = []

    async def look(letter) -> None:
        await anyio.sleep(60)
        letters.append((letter.body, deadline_of(letter.headers)))

    async def handle(job: str) -> None:
        await anyio.sleep(60)

    deadline = Deadline.after(1)
    await mailbox.send("x", deadline=deadline)
    await work(MainLoop(mailbox, handle))
    await work(DLQConsumer(mailbox, look))
    assert letters == [("x", deadline)]
