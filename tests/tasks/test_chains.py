"""Chains and parallel parts: what follows what, what each step is given, and that a crash loses and doubles nothing."""

from __future__ import annotations

from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial

import anyio
import pytest
from anyio.from_thread import start_blocking_portal
from hypothesis import given, settings
from hypothesis import strategies as st
from task_support import group_of, until_done

from mainspring import (
    Context,
    DeadLetterPolicy,
    Deadline,
    InMemoryMailbox,
    JobState,
    LoopGroup,
    Middleware,
    ReplyError,
    RequestCancelledError,
    RequestFailedError,
    RequestTimeoutError,
    RetryPolicy,
    Tasks,
    chain,
    parallel,
)
from mainspring.errors import (
    ConfigError,
    InvalidParameterError,
    JobNotFoundError,
    MailboxConnectionError,
    SerializationError,
)
from mainspring.mailbox.message import CancelOutcome, Counts
from mainspring.mailbox.records import RecordWrite
from mainspring.testing import run_virtual
from stores import KINDS, on
from support import FaultyMailbox, fail
from support import work as as_usual
from wrapped_backend import WrappedBackend, wrap

pytestmark = pytest.mark.anyio

EVERYWHERE = on(*KINDS)


@dataclass
class Page:
    url: str
    length: int


# ------------------------------------------------------------------------------------------------------------- every store


@EVERYWHERE
async def test_each_call_is_given_what_the_one_before_returned(store):
    tasks, asking = Tasks(store.url()), Tasks(store.url())

    @tasks.task
    async def fetch(url: str) -> Page:
        return Page(url, len(url))

    @tasks.task
    def measure(factor: int, page: Page) -> int:
        return factor * page.length

    @tasks.task
    async def show(number: int, *, unit: str = "m") -> str:
        return f"{number} {unit}"

    @tasks.task
    async def end() -> str:
        return "end"

    async with asking, group_of(tasks):
        job = await chain(fetch.s("a.b"), measure.s(2), show.s(unit="km")).send()
        assert await job.result(timeout=20) == "6 km"
        assert await asking.chain_job(job.id).result(timeout=20) == "6 km"
        status = await job.status()
        assert (status.state, status.stage, status.stages) == (JobState.DONE, 2, 3)
        assert await (await chain(fetch.s("a"), end.s()).send()).result(timeout=20) == "end"


@EVERYWHERE
async def test_parallel_parts_give_their_results_in_order(store):
    tasks = Tasks(store.url())

    @tasks.task
    async def square(number: int) -> int:
        await anyio.sleep(0.001 * (number % 3))
        return number * number

    @tasks.task
    async def add(numbers: list[int]) -> int:
        return sum(numbers)

    async with group_of(tasks):
        job = await parallel([square.s(number) for number in range(30)], then=add.s()).send()
        assert await job.result(timeout=20) == sum(number * number for number in range(30))
        job = await square.map(range(12), concurrency=5).send()
        assert await job.result(timeout=20) == [number * number for number in range(12)]
        mailbox = tasks.mailbox
        with anyio.fail_after(20):
            while (await mailbox.counts()).waiting:
                await anyio.sleep(0.01)
        assert (await mailbox.counts()).settled == 30 + 1 + 12
        assert await mailbox.backend.list_records("chain part", 10, None) == []
        assert await mailbox.backend.list_records("chain calls", 10, None) == []


@EVERYWHERE
async def test_no_parallel_parts_give_an_empty_list(store):
    tasks = Tasks(store.url())

    @tasks.task
    async def count(numbers: list[int]) -> int:
        return len(numbers)

    @tasks.task
    async def nothing(number: int) -> list[int]:
        return []

    empty = parallel([])
    async with group_of(tasks):
        for whole, result in (
            (parallel([], then=count.s()), 0),
            (nothing.map([]), []),
            (chain(nothing.s(1), empty, count.s()), 0),
            (chain(empty, empty, nothing.map([1], then=empty)), []),
        ):
            job = await whole.send()
            assert await job.result(timeout=20) == result
            assert (await job.status()).state is JobState.DONE
        await until_done(tasks.mailbox)
        assert await tasks.mailbox.backend.list_records("chain calls", 10, None) == []


# ------------------------------------------------------------------------------------------------------------- in memory


def test_no_more_parts_are_under_way_than_the_concurrency():
    async def main():
        tasks = Tasks(InMemoryMailbox())
        now, most = 0, 0

        @tasks.task
        async def work(number: int) -> int:
            nonlocal now, most
            now += 1
            most = max(most, now)
            await anyio.sleep(1 + number % 3)
            now -= 1
            return number

        async with group_of(tasks, concurrency=50):
            job = await work.map(range(250), concurrency=7).send()
            await anyio.sleep(1.5)
            status = await job.status()
            assert (status.state, status.parts) == (JobState.RUNNING, 250)
            assert 0 < status.parts_done < 14
            assert (await tasks.mailbox.counts()).waiting <= 7
            assert await job.result() == list(range(250))
        assert most == 7

    run_virtual(main)


def test_chains_can_be_put_together():
    async def main():
        tasks = Tasks(InMemoryMailbox())

        @tasks.task
        async def split(text: str) -> list[str]:
            return text.split()

        @tasks.task
        async def count(word: str, words: list[str]) -> int:
            return words.count(word)

        @tasks.task
        async def add(numbers: list[int]) -> int:
            return sum(numbers)

        async with group_of(tasks):
            whole = chain(split.s("a b a c"), parallel([count.s("a"), count.s("b")]), add.s())
            assert await (await whole.send()).result() == 3
            assert await (await whole.send()).result() == 3

    run_virtual(main)


def test_a_part_that_comes_again_after_it_was_recorded_is_not_run_again():
    """As after a worker that died before it had acknowledged."""

    async def main():
        tasks = Tasks(InMemoryMailbox())
        ran = []

        @tasks.task
        async def work(number: int) -> int:
            ran.append(number)
            return number + 1

        async with group_of(tasks):
            job = await chain(work.s(1), work.s()).send()
            assert await job.result() == 3
            await tasks.mailbox.send(work.s(1), headers={"mainspring-chain": f"{job.id}/0/0"})
            await tasks.mailbox.send(work.s(2), headers={"mainspring-chain": f"{job.id}/1/0"})
            await anyio.sleep(1)
            assert (await tasks.mailbox.counts()).settled == 4
        assert ran == [1, 2]

    run_virtual(main)


class SlowRecords(WrappedBackend):
    """A backend whose writes of chains take a second. The first ``fail`` of them with more parts done fail."""

    def __init__(self, inner, fail=0):
        super().__init__(inner)
        self.written = 0
        self.fail = fail

    async def write_record(self, write, envelopes=()):
        if write.kind == "chain" and write.if_version:
            self.written += 1
            await anyio.sleep(1)
            if self.written <= self.fail:
                raise MailboxConnectionError("gone")
        return await self.inner.write_record(write, envelopes)


@pytest.mark.parametrize("fail", [0, 1, 3])
def test_parts_that_end_while_the_store_writes_are_recorded_together(fail):
    async def main():
        tasks = Tasks(wrap(InMemoryMailbox(), partial(SlowRecords, fail=fail)), retry=RetryPolicy(jitter="none"))
        ran = []

        @tasks.task
        async def work(number: int) -> int:
            ran.append(number)
            await anyio.sleep(1 + number % 3 / 10)
            return number

        async with group_of(tasks, concurrency=50):
            job = await work.map(range(50)).send()
            assert await job.result(timeout=60) == list(range(50))
        assert tasks.mailbox.backend.written <= 4 + fail
        assert sorted(ran) == list(range(50))

    run_virtual(main)


def test_of_two_loops_that_record_at_once_each_sees_what_the_other_wrote():
    async def main():
        tasks = Tasks(wrap(InMemoryMailbox(), SlowRecords))

        @tasks.task
        async def work(number: int) -> int:
            await anyio.sleep(1)
            return number

        loops = [tasks.loop(name=name, concurrency=5) for name in ("one", "two")]
        async with LoopGroup(loops, guardian=False):
            job = await work.map(range(10)).send()
            assert await job.result(timeout=60) == list(range(10))

    run_virtual(main)


def test_a_part_whose_worker_is_cancelled_as_it_records_leaves_the_others_to_themselves():
    async def main():
        tasks = Tasks(wrap(InMemoryMailbox(), SlowRecords))
        ran = []

        @tasks.task
        async def work(number: int) -> int:
            ran.append(number)
            await anyio.sleep(1)
            return number

        async with tasks:
            job = await work.map(range(9)).send()
            async with LoopGroup([tasks.loop(concurrency=9)], guardian=False, shutdown_timeout=0):
                await anyio.sleep(1.5)
            async with group_of(tasks, concurrency=9):
                assert await job.result(timeout=60) == list(range(9))
        assert sorted(ran) == list(range(9))

    run_virtual(main)


def test_a_recorded_part_whose_result_is_kept_too_is_done_when_it_comes_again():
    async def main():
        tasks = Tasks(InMemoryMailbox())

        @tasks.task(result_ttl=60)
        async def work(number: int) -> int:
            return number + 1

        async with group_of(tasks):
            job = await chain(work.s(1), work.s()).send()
            assert await job.result() == 3
            backend = tasks.mailbox.backend
            await backend.write_record(
                RecordWrite("chain calls", f"{job.id}/0/0000000", b"[]")
            )  # the worker died before
            await tasks.mailbox.send(
                work.s(1), headers={"mainspring-chain": f"{job.id}/0/0", "mainspring-result-ttl": "60"}
            )
            await anyio.sleep(1)
            assert await tasks.mailbox.counts() == Counts(settled=3)
            assert await backend.list_records("chain calls", 10, None) == []

    run_virtual(main)


def test_a_step_is_not_run_again_while_there_is_no_room_for_the_next_one():
    async def main():
        tasks = Tasks(InMemoryMailbox(capacity=4), retry=RetryPolicy(jitter="none"))
        ran = []

        @tasks.task
        async def work(number: int) -> int:
            ran.append(number)
            return number + 1

        @tasks.task
        async def block() -> None:
            await anyio.sleep(60)

        async with group_of(tasks):
            await block.send_many([()] * 3)
            job = await chain(work.s(1), parallel([work.s(number) for number in (5, 6)])).send()
            await anyio.sleep(30)
            assert ran == [1]
            assert (await job.status()).parts_done == 0
            assert await job.result(timeout=100) == [6, 7]
            await anyio.sleep(1)
            assert await tasks.mailbox.backend.list_records("chain part", 10, None) == []
        assert ran == [1, 5, 6]

    run_virtual(main)


def test_many_calls_that_are_large_together_are_kept_in_smaller_pages():
    async def main():
        tasks = Tasks(InMemoryMailbox())

        @tasks.task
        async def count(text: str, letter: str) -> int:
            return text.count(letter)

        @tasks.task
        async def give(letter: str) -> str:
            return letter

        async with group_of(tasks):
            calls = [count.s("a" * (9_000 + number)) for number in range(250)]
            job = await chain(give.s("a"), parallel(calls)).send()
            assert await job.result() == [9_000 + number for number in range(250)]
            await anyio.sleep(1)
            assert await tasks.mailbox.backend.list_records("chain calls", 10, None) == []

    run_virtual(main)


def test_calls_of_a_chain_expire_and_have_a_deadline():
    async def main():
        tasks = Tasks(InMemoryMailbox())
        late = []

        @tasks.task(expires_in=30)
        async def short(number: int) -> int:
            return number

        @tasks.task
        async def slow(ctx: Context, number: int) -> int:
            late.append(ctx.remaining())
            await anyio.sleep(20)
            return number

        async with tasks:
            job = await chain(short.s(1), slow.s()).send()
            await anyio.sleep(40)
            with pytest.raises(RequestFailedError, match="stage 0 is dead"):
                await job.result(timeout=100)
            async with group_of(tasks):
                due = slow.options(deadline=Deadline.after(30))
                job = await chain(due.s(1), due.s()).send()
                with pytest.raises(RequestFailedError, match="stage 1 is dead: DeadlineExceededError"):
                    await job.result(timeout=100)
        assert [round(seconds) for seconds in late] == [30, 10]

    run_virtual(main)


def test_a_header_of_the_users_own_is_none_of_a_chain():
    async def main():
        tasks = Tasks(InMemoryMailbox())

        @tasks.task(result_ttl=60)
        async def work(number: int) -> int:
            return number

        async with group_of(tasks):
            job = await work.options(headers={"chain": "bitcoin"}).send(1)
            assert await job.result(timeout=60) == 1

    run_virtual(main)


def test_a_reply_error_gives_a_part_up():
    async def main():
        tasks = Tasks(InMemoryMailbox())

        @tasks.task
        async def find(name: str) -> str:
            raise ReplyError(f"no {name}")

        async with group_of(tasks):
            job = await chain(find.s("ann"), find.s()).send()
            with pytest.raises(RequestFailedError, match="stage 0 is dead: Reject: no ann"):
                await job.result(timeout=60)

    run_virtual(main)


@pytest.mark.parametrize("how", ["cancelled", "purged"])
def test_a_chain_whose_part_is_gone_is_not_waited_for(how):
    async def main():
        tasks = Tasks(InMemoryMailbox())

        @tasks.task
        async def work(number: int) -> int:
            return number

        async with tasks:
            job = await work.map(range(3), then=work.s(5)).send()
            part = f"{job.id}-0-1"
            _ = await tasks.job(part).cancel() if how == "cancelled" else await tasks.mailbox.purge()
            status = await job.status()
            assert (status.state, status.stage, status.parts_done) == (JobState.CANCELLED, 0, 0)
            with pytest.raises(RequestCancelledError, match=rf"of stage 0, {job.id}-0-\d.* cancelled or purged"):
                await job.result(timeout=60)
            assert await job.cancel()
            assert await tasks.mailbox.counts() == Counts(settled=3)
            assert await tasks.mailbox.backend.list_records("chain calls", 10, None) == []

    run_virtual(main)


def test_a_chain_whose_step_dies_waits_for_its_replay():
    async def main():
        tasks = Tasks(InMemoryMailbox(), dead_letter=DeadLetterPolicy(max_attempts=1))
        healthy = False

        @tasks.task
        async def first() -> int:
            return 1

        @tasks.task
        async def second(number: int) -> int:
            if not healthy:
                raise ValueError("ill")
            return number + 1

        async with group_of(tasks):
            job = await chain(first.s(), second.s()).send()
            with pytest.raises(RequestFailedError, match="stage 1 is dead: ValueError: ill"):
                await job.result()
            status = await job.status()
            assert (status.state, status.stage, status.last_error) == (JobState.DEAD, 1, "ill")
            (part,) = status.under_way
            assert (part.state, part.task, part.arguments) == (JobState.DEAD, second.name, {"number": 1})
            by_id = tasks.job(job.id)
            seen = await by_id.status()
            assert (seen.state, seen.last_error, seen.last_error_type) == (JobState.DEAD, "ill", "ValueError")
            with pytest.raises(RequestFailedError, match="stage 1 is dead: ValueError: ill"):
                await by_id.result()
            healthy = True
            assert await tasks.mailbox.replay_dead_letters() == 1
            assert await by_id.result(timeout=60) == 2
            assert (await by_id.status()).state is JobState.DONE
            assert [each async for each in by_id.progress()] == []
            with pytest.raises(JobNotFoundError):
                await tasks.job("chain-unknown").status()

    run_virtual(main)


@pytest.mark.parametrize("parts", [1, 3])
def test_the_last_error_of_a_part_that_is_tried_again_is_that_of_its_chain(parts):
    async def main():
        tasks = Tasks(InMemoryMailbox(), retry=RetryPolicy(initial_delay=600, jitter="none"))

        @tasks.task
        async def first(number: int) -> int:
            if number == parts - 1:
                raise ValueError("ill")
            return number

        async with group_of(tasks):
            job = await first.map(range(parts)).send()
            await anyio.sleep(60)
            status = await job.status()
            assert (status.state, status.last_error, status.last_error_type) == (JobState.RUNNING, "ill", "ValueError")
            (part,) = status.under_way
            assert (part.state, part.attempts, part.last_error) == (JobState.SCHEDULED, 1, "ill")
            assert (await tasks.job(job.id).status()).last_error == "ill"

    run_virtual(main)


def test_a_thread_that_is_not_async_sends_a_chain(tmp_path):
    tasks = Tasks(f"sqlite:///{tmp_path / 'jobs.db'}?name=jobs")

    @tasks.task
    async def work(number: int) -> int:
        await anyio.sleep(number / 100)
        return number + 1

    async def worker(*, task_status):
        async with group_of(tasks):
            task_status.started()
            await anyio.sleep_forever()

    with start_blocking_portal() as portal:
        running, _ = portal.start_task(worker)
        assert chain(work.s(1), work.s()).send_sync().sync.result(timeout=20) == 3
        long = chain(work.s(10_000), work.s()).send_sync()
        assert long.sync.status().state is JobState.RUNNING
        assert long.sync.cancel()
        running.cancel()


def test_middleware_is_entered_for_the_send_of_a_chain():
    class Tenant(Middleware):
        @asynccontextmanager
        async def sending(self, calls):
            sent.append([call.task.name for call in calls])
            for call in calls:
                call.headers["tenant"] = "acme"
            yield

    sent, seen = [], []

    async def main():
        tasks = Tasks(InMemoryMailbox(), middleware=[Tenant()])

        @tasks.task
        async def first(ctx: Context, number: int) -> int:
            seen.append(ctx.message.headers["tenant"])
            return number

        @tasks.task
        async def add(ctx: Context, numbers: list[int]) -> int:
            seen.append(ctx.message.headers["tenant"])
            return sum(numbers)

        async with group_of(tasks):
            assert await (await first.map([1, 2], then=add.s()).send()).result() == 3

    run_virtual(main)
    assert sent == [["first", "first"], ["add"]]
    assert seen == ["acme"] * 3


@pytest.mark.parametrize("by_id", [False, True], ids=["chain", "job"])
def test_a_chain_is_cancelled_as_a_whole(by_id):
    async def main():
        tasks = Tasks(InMemoryMailbox())
        ran, cancelled = [], []

        @tasks.task
        async def work(number: int) -> None:
            try:
                await anyio.sleep(100)
            except BaseException:
                cancelled.append(number)
                raise
            ran.append(number)

        @tasks.task
        async def then(results: list[None]) -> None:
            ran.append("then")

        async with group_of(tasks, concurrency=2):
            job = await work.map(range(9), concurrency=4, then=then.s()).send()
            await anyio.sleep(1)
            handle = tasks.job(job.id) if by_id else job
            assert await handle.cancel() == (CancelOutcome.CANCELLED if by_id else True)
            assert await handle.cancel() == (CancelOutcome.UNKNOWN if by_id else False)
            with pytest.raises(RequestCancelledError, match="was cancelled"):
                await job.result()
            await anyio.sleep(500)
        assert sorted(cancelled) == [0, 1]
        assert ran == []
        assert await tasks.mailbox.counts() == Counts(settled=4)

    run_virtual(main)


def test_a_chain_that_cannot_be_cancelled_in_full_is_cancelled_by_another_call():
    """Its parts are forgotten together, and all of them meet the same error: it is raised once."""

    async def main():
        mailbox = FaultyMailbox()
        tasks = Tasks(mailbox)

        @tasks.task
        async def work(number: int) -> None: ...

        async with tasks:
            job = await work.map(range(9)).send()
            mailbox.next("write_record", as_usual, *[fail(MailboxConnectionError("no answer"))] * 3)
            with pytest.raises(MailboxConnectionError, match="no answer"):
                await job.cancel()
            await job.cancel()
            assert (await job.status()).state is JobState.CANCELLED
            assert await mailbox.counts() == Counts(settled=9)

    run_virtual(main)


def test_a_chain_that_is_done_is_forgotten_after_its_time():
    async def main():
        tasks = Tasks(InMemoryMailbox())

        @tasks.task
        async def work() -> int:
            await anyio.sleep(10)
            return 1

        async with group_of(tasks):
            job = await chain(work.s()).send(result_ttl=60)
            with pytest.raises(RequestTimeoutError, match="within 5 s"):
                await job.result(timeout=5)
            assert await job.result() == 1
            assert not await job.cancel()
            await anyio.sleep(60)
            with pytest.raises(JobNotFoundError, match=job.id):
                await job.status()
            assert job == tasks.chain_job(job.id)
            assert {job, tasks.chain_job(str(job))} == {job}

    run_virtual(main)


@pytest.mark.own_time(3)
@settings(max_examples=40)
@given(
    st.integers(0, 10_000), st.integers(1, 9), st.integers(1, 4), st.lists(st.floats(0.1, 5), min_size=1, max_size=5)
)
def test_whatever_is_interrupted_no_result_is_lost_and_no_recorded_part_runs_again(seed, parts, concurrency, lives):
    """Workers are cancelled in the midst of everything, as by a shutdown with no time, and parts fail."""

    async def main():
        tasks = Tasks(InMemoryMailbox(), retry=RetryPolicy(initial_delay=0.3, jitter="none"))
        begun, ended, merged = Counter(), Counter(), []

        @tasks.task
        async def first() -> int:
            await anyio.sleep(0.5)
            return parts

        @tasks.task
        async def work(number: int, total: int) -> int:
            begun[number] += 1
            await anyio.sleep(0.4)
            if (number + begun[number] + seed) % 3 == 0:
                raise ValueError("ill")
            ended[number] += 1
            return number * total

        @tasks.task
        async def merge(numbers: list[int]) -> int:
            await anyio.sleep(0.2)
            merged.append(numbers)
            return sum(numbers)

        async with tasks:
            calls = [work.s(number) for number in range(parts)]
            job = await chain(first.s(), parallel(calls, then=merge.s(), concurrency=concurrency)).send()
            for life in lives:
                async with LoopGroup([tasks.loop(concurrency=3)], guardian=False, shutdown_timeout=0):
                    await anyio.sleep(life)
            async with group_of(tasks, concurrency=3):
                assert await job.result(timeout=200) == sum(number * parts for number in range(parts))
            assert all(numbers == [number * parts for number in range(parts)] for numbers in merged)
            assert set(ended) == set(range(parts))
            # In memory a call takes no time: a part that has ended is recorded.
            assert max(ended.values()) == 1
            assert len(merged) == 1
            assert (await tasks.mailbox.counts()).waiting == 0

    run_virtual(main, seed=seed)


# ------------------------------------------------------------------------------------------------------------ bad input


async def test_what_cannot_be_a_chain_is_refused_before_anything_is_sent(anyio_backend):
    tasks, others = Tasks(InMemoryMailbox()), Tasks(InMemoryMailbox())

    @tasks.task
    async def work(number: int, name: str, more: str = "") -> int:
        return number

    @tasks.task
    async def one(number: int) -> str:
        return "x" * number

    @tasks.task(unique=True)
    async def unique(number: int) -> None: ...

    @tasks.task(debounce=1)
    async def late(number: int) -> None: ...

    @others.task
    async def other() -> None: ...

    with pytest.raises(ConfigError, match="at least one call"):
        chain()
    with pytest.raises(ConfigError, match="several Tasks"):
        chain(work.s(1, "a"), other.s())
    with pytest.raises(ConfigError, match=r"always sent; write unique\.options\(unique=False\)"):
        chain(unique.s(1))
    with pytest.raises(ConfigError, match="takes no debounce or at"):
        chain(late.s(1))
    with pytest.raises(ConfigError, match="takes no debounce or at"):
        chain(one.options(at=datetime.now(UTC)).s(1))
    with pytest.raises(ConfigError, match="takes no connection= or dedup_key="):
        chain(one.options(dedup_key="a").s(1))
    with pytest.raises(InvalidParameterError, match="missing a required argument"):
        chain(one.s(1), work.s())
    with pytest.raises(InvalidParameterError, match="unexpected keyword argument 'nam'"):
        chain(work.s(1, nam="a"))
    with pytest.raises(InvalidParameterError, match="too many positional"):
        one.s(1, 2)
    for wrong in (one, 5, None):
        with pytest.raises(InvalidParameterError, match=r"chain takes calls, as task\.s\(1\)"):
            chain(wrong)
        with pytest.raises(InvalidParameterError, match=r"parallel takes calls, as task\.s\(1\)"):
            parallel([wrong])
        with pytest.raises(InvalidParameterError, match=r"parallel takes calls, as \[task"):
            parallel(wrong)
    with pytest.raises(InvalidParameterError, match="concurrency must be a whole number from 1"):
        one.map([1], concurrency=0)
    async with tasks:
        with pytest.raises(InvalidParameterError, match="number is missing, and no result before gives it"):
            await chain(one.s(), one.s()).send()
        for wrong in (chain(one.s("a")), chain(one.s(1), work.s(name=5))):
            with pytest.raises(SerializationError):
                await wrong.send()
        with pytest.raises(SerializationError, match="262,144"):
            await chain(work.s(1, "x" * 300_000)).send()
        with pytest.raises(InvalidParameterError, match="result_ttl"):
            await chain(one.s(1)).send(result_ttl=-1)
        with pytest.raises(InvalidParameterError, match="delay must be 0 to"):
            await chain(one.options(delay=-1).s(1)).send()
        with pytest.raises(ConfigError, match=r"no calls, so no Tasks to send to; write task\.map"):
            await chain(parallel([])).send()
        with pytest.raises(JobNotFoundError, match="no-such"):
            await tasks.chain_job("no-such").result()
        assert (await tasks.mailbox.counts()).waiting == 0
        assert await tasks.mailbox.backend.list_records("chain", 10, None) == []


def test_a_result_that_is_too_large_is_the_end():
    async def main():
        tasks = Tasks(InMemoryMailbox())

        @tasks.task
        async def one(number: int) -> str:
            return "x" * number

        async with group_of(tasks):
            for whole in (chain(one.s(300_000)), one.map([200_000, 200_000])):
                with pytest.raises(RequestFailedError, match=r"ResultTooLargeError: .*262,144"):
                    await (await whole.send()).result(timeout=2)

    run_virtual(main)


def test_a_delay_counts_from_the_end_of_the_call_before():
    async def main():
        tasks = Tasks(InMemoryMailbox())

        @tasks.task(unique=True)
        async def now(before: float) -> float:
            await anyio.sleep(1)
            return anyio.current_time()

        async with group_of(tasks):
            begin = anyio.current_time()
            step = now.options(unique=False, delay=60)
            job = await chain(step.s(0), step.s(), parallel([step.s(), now.options(unique=False).s()])).send()
            assert [round(at - begin) for at in await job.result()] == [183, 123]

    run_virtual(main)
