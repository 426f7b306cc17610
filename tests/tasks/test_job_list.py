"""Lists of jobs by filters, in pages, and the purge by the same filters."""

from __future__ import annotations

import json
from base64 import urlsafe_b64encode
from datetime import UTC, datetime, timedelta
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from task_support import group_of, until_done

from mainspring import CancelOutcome, DeadLetterPolicy, InMemoryMailbox, JobState, Tasks, parallel
from mainspring.errors import ConfigError, InvalidParameterError, MailboxConnectionError
from mainspring.mailbox import job_list
from mainspring.mailbox.backend import Backend, Capabilities
from mainspring.mailbox.jobs import JobProgress, keep_progress, outcome_so_far
from mainspring.mailbox.limiters import LimitChange, TaskLimits
from mainspring.mailbox.memory.listing import LOOK_AT_MOST
from mainspring.testing import run_virtual
from stores import KINDS, on
from wrapped_backend import WrappedBackend, wrap

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.anyio

LISTED = on(*KINDS)
LIMITED = on("memory", "sqlite", "redis", "postgres")
HOUR = 3_600


async def send(box: Any, body: Any, *, task: str | None = None, key: str | None = None, **options: Any) -> str:
    envelope = box.prepare(body, **options)
    envelope.task, envelope.key = task, key
    return (await box.send_prepared([envelope]))[0]


async def ids(box: Any, **filters: Any) -> list[str]:
    return [job.id async for job in box.jobs(**filters)]


async def bury(box: Any, message_id: str) -> None:
    (message,) = await box.receive(visibility_timeout=60, wait_time_seconds=5)
    assert message.id == message_id
    await message.dead_letter("no such address")


@pytest.fixture
def small_pages(monkeypatch):
    monkeypatch.setattr(job_list, "PAGE", 4)


# ------------------------------------------------------------------------------------------------------------ every store


@LISTED
async def test_jobs_are_listed_wherever_they_are(store):
    tasks = Tasks(store.url(), dead_letter=DeadLetterPolicy(max_attempts=1))
    begun = anyio.Event()

    @tasks.task(result_ttl=HOUR)
    async def email(to: str, waits: bool = False) -> str:
        if to == "no-one":
            raise ValueError("no such address")
        if waits:
            begun.set()
            await anyio.sleep_forever()
        return f"sent to {to}"

    box = tasks.mailbox
    async with tasks, group_of(tasks):
        done = await email.send("ann")
        await done.result(timeout=20)
        dead = await email.send("no-one")
        while not [job async for job in box.jobs(state="dead")]:
            await anyio.sleep(0.01)
        running = await email.send("bob", waits=True)
        with anyio.fail_after(20):
            await begun.wait()
        late = await email.options(delay=HOUR).send("di")
        dropped = await email.options(delay=HOUR).send("ed")
        await dropped.cancel()
        found = {job.id: job async for job in box.jobs()}
        states = {
            late.id: "scheduled", running.id: "running", dead.id: "dead", done.id: "done", dropped.id: "cancelled",
        }  # fmt: skip
        assert {job.id: job.state for job in found.values()} == states
        assert {found[job.id].task for job in (late, running, dead, done)} == {"email"}
        for job_id in states:
            status = await tasks.job(job_id).status()
            listed = found[job_id]
            assert (listed.state, listed.task, listed.attempts) == (status.state, status.task, status.attempts)
            assert (listed.finished_at, listed.last_error) == (status.finished_at, status.last_error)
        for state, expected in (
            ("running", [running.id]),
            (JobState.DONE, [done.id]),
            (("dead", "expired"), [dead.id]),
        ):
            assert await ids(box, state=state) == expected
        await running.cancel()


@LISTED
async def test_the_task_and_the_key_of_a_job_are_known_to_its_end(store):
    tasks = Tasks(store.url(), dead_letter=DeadLetterPolicy(max_attempts=1))

    @tasks.task(key="to", result_ttl=HOUR)
    async def email(to: str, fails: bool = False) -> None:
        if fails:
            raise ValueError(to)

    async with tasks:
        box = tasks.mailbox
        kept = [await email.send("ann"), await email.send("ann", fails=True)]
        await email.send("bob")
        async with group_of(tasks):
            await until_done(box)
        dropped = [await email.options(key="ann", delay=HOUR).send("di") for _ in range(2)]
        assert await dropped[1].cancel() is CancelOutcome.REMOVED
        expected = {job.id for job in (*kept, *dropped)}
        assert set(await ids(box, key="ann")) == set(await ids(box, key="ann", task="email")) == expected
        states = {JobState.DONE, JobState.DEAD, JobState.SCHEDULED, JobState.CANCELLED}
        found = [job async for job in box.jobs(key="ann")]
        assert {job.state for job in found} == states
        assert {job.task for job in found} == {"email"}
        assert [(await job.status()).key for job in (*kept, *dropped)] == ["ann"] * 4
        assert await ids(box, key="ann", task="bill") == []
        assert await box.purge(key="ann", state=list(JobState)) == 4
        assert sorted([job.state async for job in box.jobs()]) == ["cancelled", "done"]


@LISTED
@pytest.mark.usefixtures("small_pages")
async def test_a_list_goes_on_behind_any_of_its_jobs(store):
    async with store.box() as box:
        for number in range(6):
            await bury(box, await send(box, number))
        for number in range(11):
            await send(box, number, delay=HOUR if number % 2 else 0)
        whole = [job async for job in box.jobs()]
        assert len({job.id for job in whole}) == 17
        for number, job in enumerate(whole):
            rest = [each.id async for each in box.jobs(after=job.position)]
            assert rest == [each.id for each in whole[number + 1 :]]
        for limit in (1, 3, 4, 5):
            paged: list[str] = []
            after = None
            while page := [job async for job in box.jobs(limit=limit, after=after)]:
                assert len(page) <= limit
                paged += [job.id for job in page]
                after = page[-1].position
            assert paged == [job.id for job in whole]


@LISTED
@pytest.mark.usefixtures("small_pages")
async def test_jobs_are_found_by_task_key_date_and_text(store):
    async with store.box() as box:
        sent = {
            (task, key): [await send(box, {"to": f"{task}-{key}-{n}"}, task=task, key=key) for n in range(3)]
            for task, key in (("email", "ann"), ("email", "bob"), ("bill", "ann"))
        }
        old = await send(box, "old")
        everything = {each for group in sent.values() for each in group} | {old}
        assert set(await ids(box, task="email")) == {*sent["email", "ann"], *sent["email", "bob"]}
        assert set(await ids(box, key="ann")) == {*sent["email", "ann"], *sent["bill", "ann"]}
        assert set(await ids(box, task="bill", key="ann", state="pending")) == set(sent["bill", "ann"])
        assert await ids(box, task="none") == []
        assert await ids(box, search="EMAIL-bob-1") == [sent["email", "bob"][1]]
        assert await ids(box, search=old.upper()) == [old]
        assert await ids(box, search="bob-1", task="bill") == []
        assert len(await ids(box, search="to", limit=2)) == 2
        assert set(await ids(box, since=60)) == everything
        assert set(await ids(box, since=datetime.now(UTC) - timedelta(hours=1))) == everything
        assert await ids(box, since=datetime.now(UTC) + timedelta(hours=1)) == []
        assert await ids(box, older_than=timedelta(minutes=1)) == []
        assert set(await ids(box, older_than=datetime.now(UTC) + timedelta(hours=1))) == everything
        (job,) = [job async for job in box.jobs(task="bill", limit=1)]
        assert (job.key, job.task) == ("ann", "bill")


@LISTED
@pytest.mark.usefixtures("small_pages")
async def test_each_job_can_be_removed_as_it_is_listed(store):
    async with store.box() as box:
        dead = []
        for number in range(9):
            dead.append(await send(box, number))
            await bury(box, dead[-1])
        waiting = [await send(box, number) for number in range(9)]
        seen = []
        async for job in box.jobs():
            seen.append(job.id)
            if job.state is JobState.PENDING:
                await box.cancel(job.id)
            elif len(seen) % 2:
                await box.purge_dead_letters([job.id])
        assert sorted(seen) == sorted(waiting + dead)
        assert len(await ids(box)) == 5


@LISTED
@pytest.mark.usefixtures("small_pages")
async def test_a_list_goes_on_behind_a_dead_letter_that_is_gone(store):
    async with store.box() as box:
        dead = []
        for number in range(7):
            dead.append(await send(box, number))
            await bury(box, dead[-1])
            await anyio.sleep(0.005)
        page = [job async for job in box.jobs(state="dead", limit=6)]
        await box.purge_dead_letters([dead[5]])
        assert await ids(box, after=page[-1].position) == dead[6:]


@LISTED
@pytest.mark.usefixtures("small_pages")
async def test_what_fits_the_filters_is_dropped(store):
    async with store.box() as box:
        kept = [await send(box, {"n": n}, task="bill") for n in range(5)]
        for number in range(11):
            await send(box, {"n": number}, task="email", key=f"k{number % 2}", delay=HOUR if number % 3 == 0 else 0)
        (held,) = await box.receive(visibility_timeout=60)
        assert await box.purge(task="email", key="k1") == 5
        assert await box.purge(task="email", state="scheduled") == 2
        assert await box.purge(search='"n":4', task="email") == 1
        assert await box.purge(task="email") == 3
        assert await box.purge(older_than=HOUR) == 0
        assert (await box.counts()).waiting == len(kept)
        await held.dead_letter("no such address")
        assert await box.purge(task="none") == 0
        assert (await box.counts()).dead == 1
        assert await box.purge(state="dead", search="address") == 1
        assert (await box.counts()).dead == 0
        assert await box.purge() == 4


@LISTED
async def test_a_dropped_job_that_runs_is_cancelled_and_kept_ends_are_deleted(store):
    tasks = Tasks(store.url())
    begun, ended = anyio.Event(), anyio.Event()

    @tasks.task(result_ttl=HOUR)
    async def work(waits: bool) -> None:
        if waits:
            begun.set()
            try:
                await anyio.sleep_forever()
            finally:
                ended.set()

    async with tasks, group_of(tasks):
        await (await work.send(waits=False)).result(timeout=20)
        await work.send(waits=True)
        with anyio.fail_after(20):
            await begun.wait()
            assert await tasks.mailbox.purge(state="running") == 1
            await ended.wait()
        assert sorted([job.state async for job in tasks.mailbox.jobs()]) == ["cancelled", "done"]
        assert await tasks.mailbox.purge(state="done", search="no such text") == 0
        assert await tasks.mailbox.purge(state=["done", "cancelled"]) == 2
        assert await ids(tasks.mailbox) == []


@LISTED
async def test_a_chain_and_its_parts_are_jobs(store):
    tasks = Tasks(store.url())
    begun = anyio.Event()

    @tasks.task
    async def work(number: int) -> int:
        begun.set()
        await anyio.sleep_forever()
        return number

    async with tasks, group_of(tasks):
        job = await parallel([work.s(n) for n in range(3)], concurrency=2).send()
        with anyio.fail_after(20):
            await begun.wait()
        found = [each async for each in tasks.mailbox.jobs()]
        assert {each.chain for each in found} == {job.id}
        (whole,) = (each for each in found if each.id == each.chain)
        assert (whole.state, whole.task, len(found)) == (JobState.RUNNING, None, 3)
        assert abs((datetime.now(UTC) - whole.enqueued_at).total_seconds()) < 30
        assert (await tasks.job(job.id).status()).state is JobState.RUNNING
        assert await job.cancel()
        assert await tasks.mailbox.purge(state="cancelled") == 0
        (whole,) = [each async for each in tasks.mailbox.jobs()]
        assert whole.state is JobState.CANCELLED
        assert whole.finished_at >= whole.enqueued_at


@LIMITED
async def test_what_waits_at_a_limit_is_listed_as_pending(store):
    async with store.box() as box:
        await box.backend.change_limits([LimitChange("email", TaskLimits(concurrency=1))])
        sent = [await send(box, n, task="email") for n in range(4)]
        found = [job async for job in box.jobs()]
        assert sorted(job.id for job in found) == sorted(sent)
        assert {job.state for job in found} == {JobState.PENDING}
        assert (await box.counts()).pending == 4
        assert {(await outcome_so_far(box, job_id)).status.state for job_id in sent} == {JobState.PENDING}


@LISTED
async def test_progress_is_listed(store):
    tasks = Tasks(store.url())

    @tasks.task
    async def work(ctx: Any) -> None: ...

    async with tasks:
        box = tasks.mailbox
        await work.send(ctx=1)
        (message,) = await box.receive()
        await keep_progress(box.backend, message.id, 3, 10)
        (job,) = [job async for job in box.jobs(state="running")]
        assert job.progress == JobProgress(3, 10)
        assert job.worker


# ---------------------------------------------------------------------------------------------------------------- memory


async def test_a_body_that_is_not_serialized_is_searched():
    async with InMemoryMailbox("jobs", serialize=False) as box:
        await box.send({"to": "ann"})
        found = await box.send({"to": "bob"})
        assert await ids(box, search="'bob'") == [found]


class Listing(WrappedBackend):
    """Notes how much each page asks for, and fails where it is told."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.asked: list[int] = []
        self.fails: Iterator[bool] = repeat(False)

    async def list_messages(self, query: Any) -> Any:
        self.asked.append(query.limit)
        if next(self.fails):
            raise MailboxConnectionError("no answer")
        return await self.inner.list_messages(query)


async def test_no_more_is_read_than_is_asked_for():
    async with wrap(InMemoryMailbox("jobs"), Listing) as box:
        for number in range(30):
            await box.send(number)
        asked = box.backend.asked
        assert len(await ids(box, state="pending", limit=7)) == 7
        assert asked == [7]
        listing = box.jobs(state="pending")
        await anext(listing)
        assert asked == [7, job_list.PAGE]


class ByTask(WrappedBackend):
    """Notes how many dead letters are read."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.read = 0

    async def dead_letters(self, limit: int, after: str | None) -> Any:
        raise AssertionError("all dead letters are read")

    async def dead_letters_of(self, task: str, limit: int, after: str | None) -> Any:
        page = await self.inner.dead_letters_of(task, limit, after)
        self.read += len(page)
        return page


@pytest.mark.usefixtures("small_pages")
async def test_a_list_of_dead_letters_of_a_task_reads_no_others():
    async with wrap(InMemoryMailbox("jobs"), ByTask) as box:
        sent = [await send(box, number, task="rare" if number % 4 else "email") for number in range(20)]
        for message_id in sent:
            await bury(box, message_id)
        rare = [message_id for number, message_id in enumerate(sent) if number % 4]
        assert await ids(box, state="dead", task="rare") == rare
        assert box.backend.read == len(rare)
        assert await box.purge(state="dead", task="rare") == len(rare)


class FailsToCancel(WrappedBackend):
    """Has an error of its own."""

    async def cancel(self, message_id: str) -> Any:
        raise RuntimeError("an error of the backend")


async def test_an_error_of_a_backend_comes_out_of_a_purge_as_it_is():
    async with wrap(InMemoryMailbox("jobs"), FailsToCancel) as box:
        for number in range(3):
            await send(box, number, task="email")
        with pytest.raises(RuntimeError, match="an error of the backend"):
            await box.purge(task="email")


async def test_a_list_of_a_task_does_not_look_through_another_place_first():
    async with wrap(InMemoryMailbox("jobs"), Listing) as box:
        waiting, most = [box.prepare(number) for number in range(LOOK_AT_MOST)], LOOK_AT_MOST + 5
        for envelope in waiting:
            envelope.task = "email"
        sent = await box.send_prepared(waiting)
        sent += [await send(box, number, task="email", delay=HOUR) for number in range(LOOK_AT_MOST, most)]
        assert await ids(box, task="email", limit=5) == sent[:5]
        assert len(box.backend.asked) == 2
        whole = [job async for job in box.jobs(task="email")]
        assert sorted(job.id for job in whole) == sent
        for number in (most // 2, *range(LOOK_AT_MOST - 2, most)):
            rest = [each.id async for each in box.jobs(task="email", after=whole[number].position)]
            assert sorted(rest) == sorted(each.id for each in whole[number + 1 :])


@pytest.mark.usefixtures("small_pages")
async def test_a_step_that_failed_can_be_made_again():
    async with wrap(InMemoryMailbox("jobs"), Listing) as box:
        sent = [await box.send(number) for number in range(10)]
        box.backend.fails = chain([True, False, True, False, True, True], repeat(False))
        listing, found, failed = box.jobs(state="pending"), [], 0
        while len(found) < len(sent) or failed < 4:
            try:
                found.append((await anext(listing)).id)
            except MailboxConnectionError:
                failed += 1
        assert found == sent
        with pytest.raises(StopAsyncIteration):
            await anext(listing)


@pytest.mark.usefixtures("small_pages")
def test_dead_letters_of_one_instant_can_be_purged_as_they_are_listed():
    async def main() -> list[str]:
        async with InMemoryMailbox("jobs") as box:
            for number in range(9):
                await bury(box, await send(box, number))
            seen = []
            async for job in box.jobs(state="dead"):
                seen.append(job.id)
                if len(seen) % 2 == 0:
                    await box.purge_dead_letters([job.id])
            return seen

    assert len(run_virtual(main)) == 9


class CannotCancel(WrappedBackend):
    async def cancel(self, message_id: str) -> Any:
        raise MailboxConnectionError("no answer")


async def test_an_error_of_a_purge_is_raised_as_it_is():
    async with wrap(InMemoryMailbox("jobs"), CannotCancel) as box:
        for number in range(3):
            await box.send(number)
        with pytest.raises(MailboxConnectionError, match="no answer"):
            await box.purge(state="pending")


def _position(cursors, job_id=None):
    """The text of a position that no list has handed out."""
    return urlsafe_b64encode(json.dumps([cursors, job_id]).encode()).decode()


@pytest.mark.parametrize(
    ("filters", "says"),
    [
        ({"state": "waiting"}, "one or several of scheduled, pending"),
        ({"state": []}, "one or several of"),
        ({"state": 3}, "one or several of"),
        ({"task": ""}, "task must be a text"),
        ({"key": 7}, "key must be a text"),
        ({"search": "\ud800"}, "UTF-8"),
        ({"since": datetime(2026, 1, 1)}, "time zone"),
        ({"since": -1}, "since must be 0 to"),
        ({"since": "24h"}, "since must be"),
        ({"since": 5, "older_than": 60}, "no time is between"),
        ({"limit": 0}, "limit must be a whole number from 1"),
        ({"after": "behind that"}, "position of a job"),
        ({"after": "W10"}, "position of a job"),
        ({"after": 3}, "position of a job"),
        ({"after": _position([["dead", "yesterday id"]])}, "position of a job"),
        ({"after": _position([["result", "a\0b"]])}, "position of a job"),
        ({"after": _position([["chain", None]], "\ud800")}, "position of a job"),
        ({"after": "W" * 10_000}, "position of a job"),
    ],
)
async def test_bad_filters_are_refused_by_the_call(filters, says):
    box = InMemoryMailbox("jobs")
    with pytest.raises(InvalidParameterError, match=says):
        box.jobs(**filters)
    if not filters.keys() & {"limit", "after"}:
        with pytest.raises(InvalidParameterError, match=says):
            await box.purge(**filters)


class Limited(WrappedBackend):
    """A backend without lists, edits and limits."""

    capabilities = Capabilities()
    list_messages, replace_body = Backend.list_messages, Backend.replace_body
    change_limits, limits = Backend.change_limits, Backend.limits


async def test_a_backend_that_cannot_says_which_can():
    async with wrap(InMemoryMailbox("jobs"), Limited) as box:
        assert await ids(box, state="dead") == []
        for call in (ids(box), box.replace_body("x", 1), box.pause(), box.set_concurrency(3)):
            with pytest.raises(ConfigError, match=r"sqlite://.*mailboxes"):
                await call
        assert await box.limits() == []


def test_jobs_are_listed_by_threads():
    box: InMemoryMailbox = InMemoryMailbox("jobs")
    with box.sync:
        sent = [box.sync.send(number) for number in range(5)]
        assert [job.id for job in box.sync.jobs(state="pending")] == sent
        assert [job.id for job in box.sync.jobs(limit=2)] == sent[:2]
        with pytest.raises(InvalidParameterError, match="state"):
            box.sync.jobs(state="waiting")
        assert box.sync.purge(search="3") >= 1
