"""Functions that take several calls at once: how batches are gathered, and that each call ends by itself."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator  # noqa: TC003 - the annotations of tasks are resolved
from contextlib import asynccontextmanager

import anyio
import pytest
from task_support import group_of, until_done

from mainspring import (
    CancelOutcome,
    Context,
    DeadLetterPolicy,
    Depends,
    InMemoryMailbox,
    JobState,
    LoopGroup,
    Provided,
    RequestFailedError,
    RetryPolicy,
    Tasks,
)
from mainspring.errors import ConfigError
from mainspring.mailbox.message import Counts
from mainspring.testing import VirtualClock, run_virtual
from stores import KINDS, on

pytestmark = pytest.mark.anyio

AT_ONCE = RetryPolicy(initial_delay=0, jitter="none")
ONCE = DeadLetterPolicy(max_attempts=1)


@pytest.mark.own_time(2)
@on(*KINDS)
async def test_calls_are_handled_together_and_each_settles_by_itself(store):
    tasks = Tasks(store.url(), retry=AT_ONCE, dead_letter=DeadLetterPolicy(max_attempts=2))
    batches = []

    @tasks.task(batch=10)
    async def index(numbers: list[int]) -> list[int | ValueError]:
        batches.append(numbers)
        return [ValueError(f"{number} is odd") if number % 2 else number * 10 for number in numbers]

    async with tasks:
        await index.send_many([(number,) for number in range(19)])
        async with group_of(tasks, concurrency=20):
            assert await index.request(100, timeout=20) == 1_000
            await until_done(tasks.mailbox)
        dead = {letter.body.arguments["numbers"]: letter.error for letter in await tasks.mailbox.dead_letters()}
        assert dead == {number: f"{number} is odd" for number in range(1, 19, 2)}
        assert (await tasks.mailbox.counts()).settled == 11
    assert max(map(len, batches)) > 1
    assert max(map(len, batches)) <= 10
    assert sorted(number for batch in batches for number in batch if number % 2 == 0) == [*range(0, 19, 2), 100]


def test_a_batch_is_closed_when_it_is_full_when_its_time_is_over_or_when_all_slots_wait():
    async def main():
        clock = VirtualClock()
        tasks = Tasks(InMemoryMailbox())
        batches = []

        @tasks.task(batch=4, batch_wait=2.0)
        async def index(numbers: list[int]) -> None:
            batches.append((clock.now, numbers))

        @tasks.task(batch=100, batch_wait=2.0)
        async def count(numbers: list[int]) -> None:
            batches.append((clock.now, numbers))

        async with group_of(tasks, concurrency=6):
            await index.send_many([(number,) for number in range(4)])
            await anyio.sleep(1)
            await index.send(4)
            await anyio.sleep(1)
            await index.send(5)
            await anyio.sleep(8)
            await count.send_many([(number,) for number in range(6)])
            await until_done(tasks.mailbox)
        assert batches == [(0, [0, 1, 2, 3]), (3, [4, 5]), (10, [0, 1, 2, 3, 4, 5])]

    run_virtual(main)


def test_what_the_function_raises_holds_for_all_of_its_calls():
    async def main():
        tasks = Tasks(InMemoryMailbox(), retry=AT_ONCE, dead_letter=ONCE)

        @tasks.task(batch=3)
        async def index(numbers: list[int]) -> None:
            raise LookupError("no index")

        async with group_of(tasks):
            await index.send_many([(number,) for number in range(3)])
            await until_done(tasks.mailbox)
            letters = await tasks.mailbox.dead_letters()
        assert [(letter.error, letter.error_type) for letter in letters] == [("no index", "LookupError")] * 3

    run_virtual(main)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_a_function_that_exits_fails_its_calls_and_not_the_loop(error):
    async def main():
        tasks = Tasks(InMemoryMailbox(), retry=AT_ONCE, dead_letter=ONCE)

        @tasks.task(batch=2)
        async def index(numbers: list[int]) -> None:
            if numbers == [0, 1]:
                raise error

        async with group_of(tasks):
            await index.send_many([(number,) for number in range(4)])
            await until_done(tasks.mailbox)
            letters = await tasks.mailbox.dead_letters()
            assert (await tasks.mailbox.counts()).settled == 2
        assert [letter.error_type for letter in letters] == ["TaskExitError"] * 2
        assert repr(error) in letters[0].error

    run_virtual(main)


def test_a_shutdown_waits_for_no_further_calls():
    async def main():
        tasks, batches, clock = Tasks(InMemoryMailbox()), [], VirtualClock()

        @tasks.task(batch=9, batch_wait=20)
        async def index(numbers: list[int]) -> None:
            batches.append((clock.now, numbers))

        async with group_of(tasks):
            await index.send_many([(1,), (2,)])
            await anyio.sleep(3)
        assert batches == [(3, [1, 2])]
        assert clock.now == 3

    run_virtual(main)


@pytest.mark.parametrize("returned", [[1], [1, 2, 3, 4], "abc", 5, {1: 2}])
def test_a_result_that_is_not_one_for_each_call_is_a_failure_of_all(returned):
    async def main():
        tasks = Tasks(InMemoryMailbox(), dead_letter=ONCE)

        @tasks.task(batch=3)
        async def index(numbers: list[int]):
            return returned

        async with group_of(tasks):
            await index.send_many([(number,) for number in range(3)])
            await until_done(tasks.mailbox)
            letters = await tasks.mailbox.dead_letters()
        assert len(letters) == 3
        assert all("a result or an exception for each call" in letter.error for letter in letters)

    run_virtual(main)


def test_a_class_of_exceptions_is_no_result():
    async def main():
        tasks = Tasks(InMemoryMailbox(), dead_letter=ONCE)

        @tasks.task(batch=2)
        async def index(numbers: list[int]):
            return [None, ValueError]

        async with group_of(tasks):
            await index.send_many([(1,), (2,)])
            await until_done(tasks.mailbox)
            letters = await tasks.mailbox.dead_letters()
        assert [letter.error for letter in letters] == [
            "task index returned the class ValueError for a call; return an instance of it"
        ] * 2

    run_virtual(main)


def test_a_call_that_is_cancelled_leaves_the_others_to_the_function():
    async def main():
        tasks = Tasks(InMemoryMailbox())
        begun, end, batches = anyio.Event(), anyio.Event(), []

        @tasks.task(batch=3, batch_wait=5)
        async def index(numbers: list[int]) -> None:
            batches.append(numbers)
            begun.set()
            await end.wait()

        async with group_of(tasks):
            first, second = await index.send_many([(1,), (2,)])
            await anyio.sleep(1)
            assert await first.cancel() is CancelOutcome.CANCELLED
            third = await index.send(3)
            await begun.wait()
            assert await second.cancel() is CancelOutcome.CANCELLED
            await anyio.sleep(1)
            assert (await third.status()).state is JobState.RUNNING
            end.set()
            await until_done(tasks.mailbox)
        assert batches == [[2, 3]]
        assert await tasks.mailbox.counts() == Counts(settled=3)

    run_virtual(main)


@pytest.mark.parametrize("how", ["timeout", "shutdown"])
def test_the_function_is_cancelled_with_the_last_of_its_calls(how):
    async def main():
        tasks = Tasks(InMemoryMailbox(), dead_letter=ONCE)
        begun, cleaned_up = anyio.Event(), []

        @tasks.task(batch=2, timeout=6 if how == "timeout" else None)
        async def index(numbers: list[int]) -> None:
            begun.set()
            try:
                await anyio.sleep_forever()
            finally:
                with anyio.CancelScope(shield=True):
                    await anyio.sleep(1)
                cleaned_up.append(numbers)

        async with tasks:
            async with group_of(tasks, shutdown_timeout=5):
                await index.send_many([(1,), (2,)])
                await begun.wait()
                if how == "timeout":
                    await until_done(tasks.mailbox)
            assert cleaned_up == [[1, 2]]
            expected = Counts(dead=2) if how == "timeout" else Counts(pending=2)
            assert await tasks.mailbox.counts() == expected

    run_virtual(main)


async def test_a_plain_function_runs_in_a_thread_with_its_dependencies(anyio_backend):
    tasks = Tasks(InMemoryMailbox())
    seen = []

    @asynccontextmanager
    async def session() -> AsyncIterator[str]:
        yield "open"
        seen.append("closed")

    @tasks.task(batch=2)
    def index(numbers: list[int], state: str = Depends(session)) -> list[str]:
        seen.append((numbers, state, threading.current_thread() is not threading.main_thread()))
        return [str(number) for number in numbers]

    async with group_of(tasks):
        first, second = await index.options(result_ttl=60).send_many([(1,), (2,)])
        assert await first.result(timeout=20) == "1"
        assert await second.result(timeout=20) == "2"
    assert seen == [([1, 2], "open", True), "closed"]
    assert Provided is not None


async def test_a_result_of_a_call_fits_what_the_function_says_of_each(anyio_backend):
    tasks = Tasks(InMemoryMailbox(), dead_letter=ONCE)

    @tasks.task(batch=2, batch_wait=0)
    async def index(numbers: list[int]) -> list[int | ValueError] | None:
        return ["one"]  # type: ignore[list-item]

    async with group_of(tasks):
        with pytest.raises(RequestFailedError, match="SerializationError"):
            await index.request(1, timeout=20)


@pytest.mark.parametrize("offload", [None, "thread"])
def test_a_function_is_given_the_context_of_each_call_and_beats_for_all(offload):
    async def main():
        tasks = Tasks(InMemoryMailbox())
        seen = []

        def look(contexts, names):
            seen.append([(ctx.message.id, name) for ctx, name in zip(contexts, names, strict=True)])
            for ctx in contexts:
                ctx.beat()

        async def index(contexts: list[Context], names: list[str]) -> None:
            for _ in range(4):
                await anyio.sleep(50)
                look(contexts, names)

        def plain(contexts: list[Context[str]], names: list[str]) -> None:
            look(contexts, names)

        task = tasks.task(batch=2, offload=offload, name="index")(plain if offload else index)
        async with LoopGroup([tasks.loop()], guardian=False, watchdog_threshold=80, watchdog_interval=5):
            jobs = await task.send_many([("ann",), ("bob",)])
            await until_done(tasks.mailbox, 1000)
            assert seen == [[(job.id, name) for job, name in zip(jobs, ("ann", "bob"), strict=True)]] * len(seen)
            assert seen

    run_virtual(main)


def test_a_function_that_cannot_take_calls_together_is_refused():
    tasks = Tasks(InMemoryMailbox())

    async def one(number: int) -> None: ...
    async def two(numbers: list[int], more: str) -> None: ...
    async def bare(numbers: list) -> None: ...
    async def given(numbers: list[int] = []) -> None: ...  # noqa: B006 - that is what is refused
    async def with_context(ctx: Context, numbers: list[int]) -> None: ...
    async def contexts_alone(contexts: list[Context]) -> None: ...

    for fn in (one, two, bare, given, with_context, contexts_alone):
        with pytest.raises(ConfigError, match="the function takes one list"):
            tasks.task(batch=5)(fn)
    for options in ({"batch": 0}, {"batch": 1.5}, {"batch": 5, "batch_wait": -1}, {"batch": 5, "batch_wait": "1"}):
        with pytest.raises(ConfigError, match="batch"):
            tasks.task(**options)(one)
