"""What an operator does to waiting work: other arguments, another body, pauses and another concurrency for the whole fleet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import anyio
import pytest
from task_support import group_of, until_done

from mainspring import Context, InMemoryMailbox, JobState, Tasks, open_mailbox
from mainspring.errors import (
    InvalidParameterError,
    JobNotFoundError,
    JobRunningError,
    SerializationError,
    UnknownTaskError,
)
from stores import KINDS, on

pytestmark = pytest.mark.anyio

EDITED = on(*KINDS)
LIMITED = on("memory", "sqlite", "redis", "postgres")
HOUR = 3_600


@dataclass
class Order:
    number: int


def emails(store: Any) -> tuple[Tasks, Any, list[tuple[str, str]]]:
    tasks = Tasks(store.url())
    sent: list[tuple[str, str]] = []

    @tasks.task
    async def email(to: str, subject: str = "Hello") -> None:
        sent.append((to, subject))

    return tasks, email, sent


# ----------------------------------------------------------------------------------------------------------------- edits


@EDITED
async def test_arguments_of_a_call_that_waits_are_replaced(store):
    tasks, email, sent = emails(store)
    async with tasks:
        job = await email.send("ann", subject="First")
        late = await email.options(delay=HOUR).send("bob")
        await job.edit(to="cy")
        await tasks.job(late.id).edit(subject="Late")
        assert (await late.status()).state is JobState.SCHEDULED
        await late.run_now()
        async with group_of(tasks):
            await until_done(tasks.mailbox)
        assert sorted(sent) == [("bob", "Late"), ("cy", "First")]


@EDITED
async def test_an_edit_that_does_not_fit_changes_nothing(store):
    tasks, email, sent = emails(store)
    other = Tasks(store.url())
    async with tasks, other:
        job = await email.send("ann")
        with pytest.raises(InvalidParameterError, match="adress"):
            await job.edit(adress="bob")
        with pytest.raises(SerializationError, match="subject"):
            await job.edit(subject=3)
        with pytest.raises(UnknownTaskError, match="email"):
            await other.job(job.id).edit(to="bob")
        with pytest.raises(JobNotFoundError, match="no-such"):
            await tasks.job("no-such").edit(to="bob")
        (held,) = await tasks.mailbox.receive(visibility_timeout=60)
        with pytest.raises(JobRunningError, match=job.id):
            await job.edit(to="bob")
        await held.release()
        async with group_of(tasks):
            await until_done(tasks.mailbox)
        with pytest.raises(JobNotFoundError, match=job.id):
            await job.edit(to="bob")
        assert sent == [("ann", "Hello")]


@EDITED
async def test_a_body_is_replaced_and_checked_as_in_a_send(store):
    async with store.box(body=Order) as box:
        first = await box.send(Order(1))
        await box.send(Order(2))
        await box.replace_body(first, Order(10))
        with pytest.raises(SerializationError, match="number"):
            await box.replace_body(first, Order("eleven"))
        with pytest.raises(InvalidParameterError, match="message_id"):
            await box.replace_body(7, Order(11))
        messages = await box.receive(max_messages=2, visibility_timeout=60)
        messages.sort(key=lambda message: message.id)
        assert [message.body for message in messages] == [Order(10), Order(2)]
        with pytest.raises(JobRunningError):
            await box.replace_body(first, Order(12))
        await messages[0].acknowledge()
        with pytest.raises(JobNotFoundError):
            await box.replace_body(first, Order(12))


def test_threads_edit_and_replace():
    tasks = Tasks(InMemoryMailbox("jobs"))

    @tasks.task
    def email(to: str) -> None: ...

    with tasks.sync as box:
        job = email.sync.send("ann")
        job.sync.edit(to="bob")
        (found,) = box.jobs(search="bob")
        assert found.id == job.id
        box.pause()
        assert [state.paused for state in box.limits()] == [True]


# ----------------------------------------------------------------------------------------------------------------- pauses


@LIMITED
async def test_nothing_begins_during_a_pause_and_all_does_after_it(store):
    tasks, email, sent = emails(store)

    @tasks.task
    async def bill(number: int) -> None:
        sent.append(("bill", str(number)))

    async with tasks:
        await tasks.pause(email)
        await tasks.pause("bill")
        async with group_of(tasks) as group:
            await email.send("ann")
            job = await bill.send(1)
            await tasks.resume("bill")
            with anyio.fail_after(20):
                while not sent:
                    await anyio.sleep(0.005)
            assert sent == [("bill", "1")]
            await tasks.pause()
            late = await bill.send(2)
            await anyio.sleep(0.05)
            counts = await tasks.mailbox.counts()
            assert (counts.pending, counts.in_flight) == (2, 0)
            assert (await late.status()).state is JobState.PENDING
            assert group.report is None
            await tasks.resume()
            with anyio.fail_after(20):
                while len(sent) < 2:
                    await anyio.sleep(0.005)
            assert sent[1:] == [("bill", "2")]
            (state,) = await tasks.limits()
            assert (state.task, state.paused) == ("email", True)
            await tasks.resume(email)
            await until_done(tasks.mailbox)
        assert job.id != late.id
        assert sent[2:] == [("ann", "Hello")]
        assert await tasks.limits() == []


@LIMITED
async def test_a_pause_lets_a_group_stay_ready(store):
    tasks, _, _ = emails(store)
    group = group_of(tasks, wait_time_seconds=0.05)
    async with tasks, group:
        await tasks.pause()
        await anyio.sleep(0.2)
        assert group.status().ready


@LIMITED
async def test_the_concurrency_is_changed_at_run_time_and_as_declared_again(store):
    tasks = Tasks(store.url())
    running, most = 0, []
    go = anyio.Event()

    @tasks.task(concurrency=5)
    async def work(ctx: Context, number: int) -> None:
        nonlocal running
        running += 1
        most.append(running)
        await go.wait()
        await anyio.sleep(0.005)
        running -= 1

    async with tasks:
        box = tasks.mailbox
        await tasks.set_concurrency(2, work)
        await work.send_many([(number,) for number in range(8)])
        async with group_of(tasks):
            with anyio.fail_after(20):
                while len(most) < 2:
                    await anyio.sleep(0.005)
                await anyio.sleep(0.05)
                assert running == 2
                (state,) = await tasks.limits()
                assert (state.task, state.most, state.concurrency, state.limits.concurrency) == ("work", 2, 2, 5)
                assert (state.running, state.waiting) == (2, 6)
                await tasks.set_concurrency(None, work)
                while running < 5:
                    await anyio.sleep(0.005)
            go.set()
            await until_done(box)
        assert max(most) == 5
        (state,) = await tasks.limits()
        assert (state.most, state.concurrency) == (5, None)


@LIMITED
async def test_a_whole_mailbox_has_a_concurrency(store):
    async with store.box() as box:
        for number in range(4):
            await box.send(number)
        await box.set_concurrency(3)
        assert len(await box.receive(max_messages=10, visibility_timeout=60)) == 3
        (state,) = await box.limits()
        assert (state.task, state.running, state.most) == ("", 3, 3)
        await box.set_concurrency(None)
        assert len(await box.receive(max_messages=10, visibility_timeout=60)) == 1


@pytest.mark.parametrize("call", ["pause", "resume"])
@pytest.mark.parametrize("task", ["", 3, "\ud800", "a\0b", "two words", "a" * 201])
async def test_a_task_is_named_by_what_can_be_its_name(call, task):
    box = InMemoryMailbox("jobs")
    with pytest.raises(InvalidParameterError, match=f"{call}: task"):
        await getattr(box, call)(task)
    assert await box.limits() == []


@pytest.mark.parametrize("most", [0, -1, 2.5, True, "3", 1_000_000_001])
async def test_a_concurrency_is_a_number_from_one(most):
    box = open_mailbox("memory://jobs")
    async with box:
        with pytest.raises(InvalidParameterError, match="set_concurrency"):
            await box.set_concurrency(most)
