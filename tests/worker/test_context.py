"""What a handler can ask of its context, on the event loop and in its thread."""

from __future__ import annotations

import json
import threading
from datetime import timedelta

import anyio
import pytest
from anyio import from_thread
from pydantic import BaseModel, ConfigDict, Field, SecretStr, computed_field

from mainspring import Context, InMemoryMailbox, LeasePolicy, MainLoop, Retry, RetryPolicy, SerializationError
from mainspring.core import clock
from mainspring.errors import ReceiptHandleExpiredError
from support import FaultyMailbox, background, fail, settled

pytestmark = pytest.mark.anyio


async def test_who_it_runs_for():
    seen = []

    async def handle(job: int, ctx: Context) -> None:
        seen.append((ctx.request_id, ctx.run_id, ctx.attempt, ctx.message.headers["trace"]))
        if len(seen) < 3:
            raise Retry(delay=0, charge=len(seen) == 1)

    mailbox = InMemoryMailbox()
    async with background(MainLoop(mailbox, handle)):
        message_id = await mailbox.send(1, headers={"trace": "t1"})
        await settled(mailbox)
    assert [request for request, *_ in seen] == [message_id] * 3  # the same for all
    assert len({run for _, run, *_ in seen}) == 3  # new each delivery
    assert [attempt for *_, attempt, _ in seen] == [1, 2, 2]
    assert {trace for *_, trace in seen} == {"t1"}


async def test_the_deadline_is_that_of_handler_timeout(virtual_clock):
    seen = []

    async def handle(job: int, ctx: Context) -> None:
        began = clock.utc_now()
        await anyio.sleep(20)
        seen.append((ctx.remaining(), ctx.deadline - began))
        with anyio.CancelScope(shield=True):
            await anyio.sleep(50)
        seen.append(ctx.remaining())

    mailbox = InMemoryMailbox()
    async with background(MainLoop(mailbox, handle, handler_timeout=60)):
        await mailbox.send(1)
        await anyio.sleep(100)
    assert seen == [(40, timedelta(seconds=60)), 0]


async def test_a_thread_sees_the_time_of_its_event_loop(virtual_clock):
    seen = []

    def handle(job: int, ctx: Context) -> None:
        seen.append((ctx.remaining(), ctx.deadline))

    mailbox = InMemoryMailbox()
    async with background(MainLoop(mailbox, handle, handler_timeout=60)):
        await mailbox.send(1)
        await anyio.sleep(1)
    assert seen == [(60, clock.VIRTUAL_EPOCH + timedelta(seconds=60))]


OF_ANY_THREAD = ("attempt", "request_id", "run_id", "restored", "shutting_down", "deadline", "remaining")


def asked_in_a_thread(ctx: Context) -> dict[str, object]:
    """What the context says in a thread that the handler has started."""
    said = {}

    def ask() -> None:
        for name in OF_ANY_THREAD:
            value = getattr(ctx, name)
            said[name] = value() if callable(value) else value
        ctx.beat()
        said["beaten"] = True

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    return said


@pytest.mark.parametrize("plain", [True, False])
async def test_a_thread_of_the_users_own_may_ask_too(plain, anyio_backend):
    """One that anyio does not know, started by a plain handler or by an async one, whose event loop stands still meanwhile."""
    seen = []

    def handle(job: int, ctx: Context) -> None:
        seen.append(asked_in_a_thread(ctx))
        if ctx.attempt == 1:
            raise ValueError("once more")

    async def handle_async(job: int, ctx: Context) -> None:
        await ctx.checkpoint("state")
        handle(job, ctx)

    mailbox = InMemoryMailbox()
    loop = MainLoop(mailbox, handle if plain else handle_async, handler_timeout=60, retry=RetryPolicy(initial_delay=0))
    async with background(loop):
        sent = await mailbox.send(1)
        await settled(mailbox)
    first, second = seen
    assert [said["attempt"] for said in seen] == [1, 2]
    assert second["restored"] == (None if plain else "state")
    assert first["run_id"] != second["run_id"]
    for said in seen:
        assert said["beaten"]
        assert said["request_id"] == sent
        assert said["shutting_down"] is False
        assert 50 < said["remaining"] <= 60
        assert timedelta(seconds=50) < said["deadline"] - clock.utc_now() <= timedelta(seconds=60)


async def test_it_sees_the_virtual_time(virtual_clock):
    seen = []

    async def handle(job: int, ctx: Context) -> None:
        await anyio.sleep(20)
        seen.append(asked_in_a_thread(ctx))

    mailbox = InMemoryMailbox()
    async with background(MainLoop(mailbox, handle, handler_timeout=60)):
        await mailbox.send(1)
        await anyio.sleep(100)
    (said,) = seen
    assert (said["remaining"], said["deadline"]) == (40, clock.VIRTUAL_EPOCH + timedelta(seconds=60))


async def test_without_a_timeout_there_is_no_deadline():
    seen = []

    async def handle(job: int, ctx: Context) -> None:
        seen.append((ctx.remaining(), ctx.deadline))

    mailbox = InMemoryMailbox()
    async with background(MainLoop(mailbox, handle)):
        await mailbox.send(1)
        await settled(mailbox)
    assert seen == [(None, None)]


async def test_the_handler_is_told_of_the_shutdown(virtual_clock):
    seen = []

    async def handle(job: int, ctx: Context) -> None:
        seen.append((virtual_clock.now, ctx.shutting_down))
        await ctx.wait_shutting_down()
        seen.append((virtual_clock.now, ctx.shutting_down))

    mailbox = InMemoryMailbox()
    loop = MainLoop(mailbox, handle)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(loop.run)
        await mailbox.send(1)
        await anyio.sleep(10)
        assert await loop.shutdown()
    assert seen == [(0, False), (10, True)]


async def test_a_handler_that_begins_in_another_run_is_not_shutting_down():
    seen = []

    async def handle(job: int, ctx: Context) -> None:
        seen.append(ctx.shutting_down)

    mailbox = InMemoryMailbox()
    loop = MainLoop(mailbox, handle)
    for _ in range(2):
        async with background(loop):
            await mailbox.send(1)
            await settled(mailbox)
    assert seen == [False, False]


async def test_beats_are_the_messages_own(virtual_clock):
    ages = []

    async def handle(job: int, ctx: Context) -> None:
        await anyio.sleep(10)
        if job == 1:
            ctx.beat()
        elif job == 2:
            await ctx.progress(3, 7)
        elif job == 3:
            await ctx.checkpoint({"at": 3})
        await anyio.sleep(5)

    mailbox = InMemoryMailbox()
    loop = MainLoop(mailbox, handle, concurrency=4)
    async with background(loop):
        await mailbox.send_many([1, 2, 3, 4])
        await anyio.sleep(12)
        ages = {run.message.body: run.beat_age() for run in loop.runs}
        assert loop.heartbeat.elapsed() == 2  # they are the loop's, too
        progress = {run.message.body: run.progress_made for run in loop.runs}
    assert ages == {1: 2, 2: 2, 3: 2, 4: 12}
    assert progress == {1: None, 2: (3, 7), 3: None, 4: None}


async def test_progress_is_a_point_where_cancellation_comes():
    begun = anyio.Event()

    async def handle(job: int, ctx: Context) -> None:
        begun.set()
        while True:
            await ctx.progress(1)

    mailbox = InMemoryMailbox()
    loop = MainLoop(mailbox, handle)
    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(loop.run)
            await mailbox.send(1)
            await begun.wait()
            assert not await loop.shutdown(timeout=0)


# --------------------------------------------------------------------------------------------------------- checkpoints


class State(BaseModel):
    done: int


@pytest.mark.parametrize("state", [{"done": 3}, [1, None, "x"], 5, "text", State(done=3)], ids=repr)
async def test_the_next_delivery_finds_the_last_checkpoint(state):
    restored = []

    async def handle(job: int, ctx: Context) -> None:
        restored.append(ctx.restored)
        if ctx.attempt < 3:
            await ctx.checkpoint("an earlier one")
            await ctx.checkpoint(state)
            restored.append(ctx.restored)
            raise ValueError

    mailbox = InMemoryMailbox()
    async with background(MainLoop(mailbox, handle, retry=RetryPolicy(initial_delay=0))):
        await mailbox.send(1)
        await settled(mailbox)
    plain = state.model_dump() if isinstance(state, State) else state
    assert restored == [None, plain, plain, plain, plain]


async def test_a_checkpoint_outlives_the_worker(virtual_clock):
    restored = []

    async def handle(job: int, ctx: Context) -> None:
        restored.append(ctx.restored)
        await ctx.checkpoint([*(ctx.restored or []), ctx.message.delivery_count])
        await anyio.sleep_forever()

    mailbox = InMemoryMailbox()
    await mailbox.send(1)
    for _ in range(3):
        loop = MainLoop(mailbox, handle)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(loop.run)
            await anyio.sleep(5)
            await loop.shutdown(timeout=0)
    assert restored == [None, [1], [1, 2]]


class Progress(BaseModel):
    model_config = ConfigDict(extra="forbid")
    page: int = Field(alias="Page")
    token: SecretStr

    @computed_field
    @property
    def next_page(self) -> int:
        return self.page + 1


async def test_a_model_is_restored_by_its_class(virtual_clock):
    restored, state = [], Progress(Page=3, token="geheim")

    async def handle(job: int, ctx: Context) -> None:
        if ctx.restored is None:
            await ctx.checkpoint(state)
            raise Retry(0)
        restored.append(Progress.model_validate(ctx.restored))

    mailbox = InMemoryMailbox()
    async with background(MainLoop(mailbox, handle)):
        await mailbox.send(1)
        await settled(mailbox)
    assert restored == [state]


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (object(), "a checkpoint of type object cannot be written as JSON: Unable to serialize"),
        (
            json.loads("[" * 201 + "1" + "]" * 201),
            "a checkpoint of type list cannot be written as JSON: it is nested more",
        ),
        (
            {"n": 10**4_300},
            "a checkpoint of type dict cannot be written as JSON: it has a number of more than 4,300 digits",
        ),
        (
            (1, 2),
            "a checkpoint of type tuple would not come back as it is: it is a tuple and would come back as a list",
        ),
    ],
    ids=["no JSON", "too deep", "too long", "a tuple"],
)
async def test_what_could_not_be_restored_as_it_is_is_refused_and_the_earlier_checkpoint_stands(state, said):
    seen = []

    async def handle(job: int, ctx: Context) -> None:
        await ctx.checkpoint({"done": 1})
        try:
            await ctx.checkpoint(state)
        except SerializationError as error:
            seen.append((str(error), ctx.restored))

    mailbox = InMemoryMailbox()
    async with background(MainLoop(mailbox, handle)):
        await mailbox.send(1)
        await settled(mailbox)
    ((text, restored),) = seen
    assert text.startswith(said)
    assert restored == {"done": 1}


async def test_a_checkpoint_after_the_lease_is_lost_is_refused(virtual_clock):
    refused = []

    async def handle(job: int, ctx: Context) -> None:
        try:
            await anyio.sleep(1_000)
        except anyio.get_cancelled_exc_class():
            with anyio.CancelScope(shield=True):
                try:
                    await ctx.checkpoint("too late")
                except ReceiptHandleExpiredError as error:
                    refused.append(error)
            raise

    mailbox = FaultyMailbox()
    mailbox.always("extend", fail(OSError("away")))
    await mailbox.send(1)
    loop = MainLoop(mailbox, handle, visibility_timeout=30, lease=LeasePolicy("never"))
    async with background(loop, max_iterations=1):
        await anyio.sleep(31)
    assert len(refused) == 1
    (again,) = await InMemoryMailbox.receive(mailbox)
    assert again.checkpoint is None


# ------------------------------------------------------------------------------------------------------------ in a thread


async def test_a_plain_handler_may_use_all_of_it():
    seen = []

    def handle(job: int, ctx: Context) -> None:
        seen.append((ctx.attempt, ctx.request_id == ctx.message.id, bool(ctx.run_id), ctx.shutting_down))
        ctx.beat()
        left = ctx.remaining()
        assert left is not None
        assert 0 < left <= 60
        deadline = ctx.deadline
        assert deadline is not None
        assert timedelta(0) < deadline - clock.utc_now() <= timedelta(seconds=60)
        from_thread.run(ctx.checkpoint, {"done": 1})
        from_thread.run(ctx.progress, 1, 2)
        assert ctx.restored == {"done": 1}

    mailbox = InMemoryMailbox()
    loop = MainLoop(mailbox, handle, handler_timeout=60)
    async with background(loop):
        await mailbox.send(1)
        await settled(mailbox)
    assert len(seen) == 1
    assert loop.outcomes == {"acknowledged": 1}


async def test_a_beat_from_the_thread_counts_from_when_it_is_looked_at():
    beaten, leave, aged = threading.Event(), threading.Event(), threading.Event()

    def handle(job: int, ctx: Context) -> None:
        assert aged.wait(10)
        ctx.beat()
        beaten.set()
        assert leave.wait(10)

    mailbox = InMemoryMailbox()
    loop = MainLoop(mailbox, handle)
    async with background(loop):
        await mailbox.send(1)
        with anyio.fail_after(60):
            while not loop.runs or loop.runs[0].beat_age() < 0.1:
                await anyio.sleep(0.01)
            aged.set()
            while not beaten.is_set():
                await anyio.sleep(0.001)
            assert loop.runs[0].beat_age() < 0.1
        leave.set()
        await settled(mailbox)
