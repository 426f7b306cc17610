"""Jobs: where a call is, how far it is, what it returned, and moving it, all by its id."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import anyio
import pytest
from anyio.from_thread import start_blocking_portal
from task_support import group_of

from mainspring import (
    CancelOutcome,
    Context,
    DeadLetterPolicy,
    InMemoryMailbox,
    JobProgress,
    JobState,
    ReplyError,
    RequestCancelledError,
    RequestFailedError,
    RequestTimeoutError,
    RetryPolicy,
    Tasks,
    chain,
    open_mailbox,
)
from mainspring.errors import InvalidParameterError, JobNotFoundError, JobRunningError, MailboxConnectionError
from mainspring.mailbox.jobs import result_of
from mainspring.mailbox.records import RESULT, RecordWrite
from mainspring.testing import VirtualClock, run_virtual
from stores import KINDS, on
from wrapped_backend import WrappedBackend, wrap

pytestmark = pytest.mark.anyio

EVERYWHERE = on(*KINDS)
HOUR = 3_600


@dataclass
class Receipt:
    to: str
    length: int


async def refused(tasks, job_id):
    """The job of that id is not known."""
    with pytest.raises(JobNotFoundError, match=job_id):
        await tasks.job(job_id).status()


# ------------------------------------------------------------------------------------------------------------- every store


@EVERYWHERE
async def test_a_result_is_kept_and_read_by_its_id_in_another_place(store):
    url = store.url()
    tasks, asking = Tasks(url), Tasks(url)

    @tasks.task(result_ttl=HOUR)
    async def measure(to: str) -> Receipt:
        return Receipt(to, len(to))

    async with asking, group_of(tasks):
        job = await measure.send("ann")
        assert await job.result(timeout=20) == Receipt("ann", 3)
        assert await asking.job(job.id).result(timeout=20) == {"to": "ann", "length": 3}
        status = await asking.job(job.id).status()
    assert (status.state, status.task, status.attempts, status.deliveries) == (JobState.DONE, "measure", 1, 1)
    assert status.worker
    assert abs((status.finished_at - status.enqueued_at).total_seconds()) < 20


@pytest.mark.own_time(2)
@EVERYWHERE
async def test_a_job_is_seen_wherever_it_is(store):
    tasks = Tasks(store.url(), dead_letter=DeadLetterPolicy(max_attempts=1))
    begun, end = anyio.Event(), anyio.Event()

    @tasks.task
    async def work(fails: bool) -> None:
        begun.set()
        await end.wait()
        if fails:
            raise ValueError("no such address")

    async with tasks:
        late, first = (
            await work.send_at(datetime.now(UTC) + timedelta(hours=1), fails=False),
            await work.send(fails=True),
        )
        status = await late.status()
        assert (status.state, status.task, status.attempts) == (JobState.SCHEDULED, "work", 0)
        assert abs((status.due_at - datetime.now(UTC)).total_seconds() - HOUR) < 30
        assert (await first.status()).state is JobState.PENDING
        async with group_of(tasks):
            with anyio.fail_after(20):
                await begun.wait()
            assert (await first.status()).state is JobState.RUNNING
            end.set()
            with pytest.raises(RequestFailedError, match="ValueError: no such address"):
                await first.result(timeout=20)
            status = await first.status()
            assert (status.state, status.last_error, status.attempts) == (JobState.DEAD, "no such address", 1)
            done = await work.send(fails=False)
            with pytest.raises(JobNotFoundError, match="result_ttl"):
                await done.result(timeout=20)
            assert await late.cancel() is CancelOutcome.REMOVED
            await refused(tasks, late.id)


@EVERYWHERE
async def test_the_arguments_of_a_call_are_seen_until_it_is_done(store):
    tasks = Tasks(store.url(), dead_letter=DeadLetterPolicy(max_attempts=1))

    @tasks.task(result_ttl=HOUR)
    async def work(receipt: Receipt, secret: str = "none") -> None:
        if receipt.length < 0:
            raise ValueError(secret)

    async with tasks:
        jobs = [await work.send(Receipt("ann", length), secret="s3") for length in (1, -1)]
        sent = [{"receipt": {"to": "ann", "length": length}, "secret": "s3"} for length in (1, -1)]
        waiting = [await job.status() for job in jobs]
        assert [status.arguments for status in waiting] == sent
        assert "s3" not in repr(waiting)
        async with group_of(tasks):
            await jobs[0].result(timeout=10)
            with pytest.raises(RequestFailedError):
                await jobs[1].result(timeout=10)
        assert [(await job.status()).arguments for job in jobs] == [None, sent[1]]


async def test_a_message_that_calls_no_task_has_no_arguments(anyio_backend):
    mailbox = InMemoryMailbox()
    tasks = Tasks(mailbox.address)
    job = tasks.job(await mailbox.send({"task": "work", "args": 5}))
    assert ((await job.status()).task, (await job.status()).arguments) == ("work", None)
    job = tasks.job(await mailbox.send([1]))
    assert ((await job.status()).task, (await job.status()).arguments) == (None, None)


@EVERYWHERE
async def test_the_end_of_a_call_that_was_cancelled_or_answered_with_an_error_is_kept(store):
    tasks = Tasks(store.url())
    begun = anyio.Event()

    @tasks.task(result_ttl=HOUR)
    async def work(answers: bool) -> None:
        if answers:
            raise ReplyError("not found")
        begun.set()
        await anyio.sleep_forever()

    async with group_of(tasks):
        held = await work.send(answers=False)
        with anyio.fail_after(20):
            await begun.wait()
        await held.cancel()
        with pytest.raises(RequestCancelledError, match="was cancelled"):
            await held.result(timeout=20)
        assert (await held.status()).state is JobState.CANCELLED
        answered = await work.send(answers=True)
        with pytest.raises(RequestFailedError, match="not found"):
            await answered.result(timeout=20)
        assert (await answered.status()).state is JobState.FAILED


@EVERYWHERE
async def test_a_job_is_rescheduled_and_run_now(store):
    tasks = Tasks(store.url(), dead_letter=DeadLetterPolicy(max_attempts=1))
    healthy = False

    @tasks.task(result_ttl=HOUR)
    async def work() -> str:
        if not healthy:
            raise ValueError("ill")
        return "well"

    async with tasks:
        job = await work.send()
        await job.reschedule(timedelta(hours=1))
        assert (await job.status()).state is JobState.SCHEDULED
        await job.reschedule(datetime.now(UTC) + timedelta(hours=2))
        assert ((await job.status()).due_at - datetime.now(UTC)).total_seconds() > 1.5 * HOUR
        async with group_of(tasks):
            await job.run_now()
            with pytest.raises(RequestFailedError, match="ill"):
                await job.result(timeout=20)
            healthy = True
            await job.run_now()
            assert await job.result(timeout=20) == "well"
        with pytest.raises(JobNotFoundError):
            await job.run_now()


# ------------------------------------------------------------------------------------------------------------- in memory


@pytest.mark.parametrize("announced", [True, False])
def test_a_wait_looks_at_once_when_results_may_have_been_missed(announced):
    """And after a second in any case."""

    async def main():
        tasks = Tasks(InMemoryMailbox())

        @tasks.task(result_ttl=HOUR)
        async def work() -> int:
            return 1

        job = await work.send()
        (message,) = await tasks.mailbox.receive()
        backend = tasks.mailbox.backend

        async def end_unheard():
            await anyio.sleep(0.1)
            kept = result_of(message.delivery, "work", b"1")
            await message.acknowledge()
            await backend.write_record(RecordWrite(RESULT, job.id, kept.value, kept.expires_in))
            if announced:
                backend.notifications.results.publish([])

        began = anyio.current_time()
        async with anyio.create_task_group() as group:
            group.start_soon(end_unheard)
            assert await job.result() == 1
        assert anyio.current_time() - began == pytest.approx(0.1 if announced else 1.0)

    run_virtual(main)


async def test_a_job_that_a_worker_runs_is_not_rescheduled(anyio_backend):
    tasks = Tasks(InMemoryMailbox())
    begun = anyio.Event()

    @tasks.task
    async def work() -> None:
        begun.set()
        await anyio.sleep_forever()

    async with group_of(tasks, shutdown_timeout=0):
        job = await work.send()
        await begun.wait()
        with pytest.raises(JobRunningError, match="a worker runs it"):
            await job.run_now()


async def test_a_result_that_does_not_fit_is_a_failed_attempt_and_too_large_a_one_the_end(anyio_backend):
    tasks = Tasks(InMemoryMailbox())

    @tasks.task(result_ttl=HOUR)
    async def work(length: int) -> str:
        return "x" * length if length else 0  # type: ignore[return-value]

    async with group_of(tasks):
        with pytest.raises(RequestFailedError, match=r"ResultTooLargeError: the result is 300,\d+ bytes .* 262,144"):
            await (await work.send(300_000)).result(timeout=20)
        again = await work.send(0)
        with anyio.fail_after(20):
            while (await again.status()).last_error_type is None:
                await anyio.sleep(0.01)
        assert (await again.status()).state is JobState.SCHEDULED


async def test_the_header_that_earlier_revisions_sent_keeps_a_result(anyio_backend):
    tasks = Tasks(InMemoryMailbox())

    @tasks.task
    async def work(number: int) -> int:
        return number

    async with group_of(tasks):
        job = tasks.job(await tasks.mailbox.send(work.s(5), headers={"result_ttl": "60"}))
        assert await job.result(timeout=20) == 5


class Away(WrappedBackend):
    """A store that cannot be reached for a while."""

    until = 0.0

    async def find(self, message_ids):
        if anyio.current_time() < self.until:
            raise MailboxConnectionError("it restarts")
        return await self.inner.find(message_ids)

    async def find_records(self, kind, keys):
        if anyio.current_time() < self.until:
            raise MailboxConnectionError("it restarts")
        return await self.inner.find_records(kind, keys)


@pytest.mark.parametrize("in_chain", [False, True])
def test_a_wait_rides_over_a_store_that_restarts(in_chain):
    async def main():
        asking, tasks = Tasks(wrap(open_mailbox("memory://jobs"), Away)), Tasks("memory://jobs")

        @tasks.task(result_ttl=HOUR)
        async def work() -> int:
            await anyio.sleep(20)
            return 5

        async with asking, group_of(tasks):
            job = await (chain(work.s()).send() if in_chain else work.send())
            asked = asking.chain_job(job.id) if in_chain else asking.job(job.id)
            asking.mailbox.backend.until = anyio.current_time() + 60
            with pytest.raises(RequestTimeoutError):
                await asked.result(timeout=30)
            assert await asked.result() == 5
            assert anyio.current_time() < asking.mailbox.backend.until + 10

    run_virtual(main)


def test_a_thread_that_is_not_async_follows_its_job(tmp_path):
    tasks = Tasks(f"sqlite:///{tmp_path / 'jobs.db'}?name=jobs")
    release = threading.Event()

    @tasks.task(result_ttl=HOUR)
    def work(number: int) -> int:
        release.wait(20)
        return number + 1

    async def worker(*, task_status):
        async with group_of(tasks):
            task_status.started()
            await anyio.sleep_forever()

    with start_blocking_portal() as portal:
        running, _ = portal.start_task(worker)
        job, late = work.sync.send(1), work.options(delay=HOUR).sync.send(5)
        with pytest.raises(RequestTimeoutError):
            job.sync.result(timeout=0.1)
        assert late.sync.status().state is JobState.SCHEDULED
        release.set()
        assert job.sync.result(timeout=20) == 2
        late.sync.reschedule(2 * HOUR)
        late.sync.run_now()
        assert late.sync.result(timeout=20) == 6
        assert work.options(delay=HOUR).sync.send(7).sync.cancel() is CancelOutcome.REMOVED
        running.cancel()


async def test_impossible_values_are_refused(anyio_backend):
    tasks = Tasks(InMemoryMailbox())

    @tasks.task
    async def work() -> None: ...

    with pytest.raises(InvalidParameterError, match="result_ttl"):
        work.options(result_ttl=-1)
    async with tasks:
        job = await work.send()
        for when in (-1, float("nan"), timedelta(days=400), datetime(2026, 1, 1)):
            with pytest.raises(InvalidParameterError):
                await job.reschedule(when)
        with pytest.raises(InvalidParameterError, match="timeout"):
            await job.result(timeout=-1)


def test_a_result_ends_with_its_time():
    async def main():
        clock = VirtualClock()
        tasks = Tasks(InMemoryMailbox())

        @tasks.task
        async def work() -> int:
            return 1

        async with group_of(tasks):
            kept, short = (
                await work.options(result_ttl=timedelta(hours=2)).send(),
                await work.options(result_ttl=60).send(),
            )
            assert await kept.result() + await short.result() == 2
            await anyio.sleep(60)
            await refused(tasks, short.id)
            assert (await kept.status()).finished_at < clock.utc_now()
            await anyio.sleep(2 * HOUR)
            await refused(tasks, kept.id)

    run_virtual(main)


def test_a_wait_for_a_result_ends_with_its_timeout_or_the_job():
    async def main():
        clock = VirtualClock()
        tasks = Tasks(InMemoryMailbox())

        @tasks.task(result_ttl=HOUR)
        async def work() -> int:
            await anyio.sleep(100)
            return 1

        async with group_of(tasks):
            job = await work.send()
            with pytest.raises(RequestTimeoutError, match="within 60 s"):
                await job.result(timeout=60)
            assert clock.now == pytest.approx(60)
            assert await job.result() == 1
            assert clock.now == pytest.approx(100)

    run_virtual(main)


def test_progress_is_seen_by_the_id_and_as_a_stream():
    async def main():
        tasks = Tasks(InMemoryMailbox())

        @tasks.task(result_ttl=HOUR)
        async def work(ctx: Context, seconds: int) -> None:
            for done in range(seconds):
                await anyio.sleep(0.25)
                await ctx.progress(done, seconds)

        async with group_of(tasks):
            job = await work.send(40)
            seen = [each async for each in job.progress()]
            assert 6 <= len(seen) <= 12
            assert seen == sorted(seen)
            assert {each.total for each in seen} == {40}
            ended = await job.status()
            assert (ended.state, ended.progress) == (JobState.DONE, seen[-1])
            assert ended.worker
            await anyio.sleep(HOUR - 10)
            assert (await job.status()).progress is not None
            quick = await work.send(2)
            await quick.result()
            assert await tasks.mailbox.backend.find_records("progress", [quick.id]) == []
            other = await work.send(40)
            await anyio.sleep(5)
            status = await other.status()
            assert status.state is JobState.RUNNING
            assert isinstance(status.progress, JobProgress)
            assert status.worker

    run_virtual(main)


def test_the_last_error_and_the_next_attempt_of_a_job_are_seen():
    async def main():
        tasks = Tasks(InMemoryMailbox(), retry=RetryPolicy(initial_delay=300, jitter="none"))

        @tasks.task
        async def work() -> None:
            raise ValueError("ill")

        async with group_of(tasks):
            job = await work.send()
            await anyio.sleep(1)
            status = await job.status()
            assert (status.state, status.attempts, status.last_error) == (JobState.SCHEDULED, 1, "ill")
            assert 290 < (status.due_at - VirtualClock().utc_now()).total_seconds() <= 300

    run_virtual(main)


def test_a_call_that_expired_says_so():
    async def main():
        tasks = Tasks(InMemoryMailbox())

        @tasks.task(expires_in=60)
        async def work() -> None: ...

        async with tasks:
            job = await work.send()
            with pytest.raises(RequestFailedError, match="expired"):
                await job.result()
            assert (await job.status()).state is JobState.EXPIRED

    run_virtual(main)


def test_an_id_that_is_no_text_is_refused():
    tasks = Tasks(InMemoryMailbox())
    for wrong in (5, None, "\ud800"):
        with pytest.raises(InvalidParameterError, match="job_id must be"):
            tasks.job(wrong)
        with pytest.raises(InvalidParameterError, match="chain_id must be"):
            tasks.chain_job(wrong)
