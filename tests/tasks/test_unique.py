"""Calls of which one is enough: unique while unfinished, while pending, for a time; and the latest within a window."""

from __future__ import annotations

from datetime import timedelta

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from task_support import group_of, until_done

from mainspring import DeadLetterPolicy, InMemoryMailbox, RetryPolicy, Tasks
from mainspring.errors import ConfigError, InvalidParameterError
from mainspring.mailbox.message import Counts
from mainspring.mailbox.records import RecordWrite
from mainspring.testing import VirtualClock, run_virtual
from stores import KINDS, on

pytestmark = pytest.mark.anyio

EVERYWHERE = on(*KINDS)


# ------------------------------------------------------------------------------------------------------------- every store


@EVERYWHERE
async def test_an_update_is_queued_once_while_the_earlier_one_runs(store):
    tasks = Tasks(store.url())
    begun, end, runs = anyio.Event(), anyio.Event(), []

    @tasks.task(unique="pending", key="document")
    async def index(document: str, version: int) -> None:
        runs.append((document, version))
        begun.set()
        await end.wait()

    async with tasks:
        first = await index.send("a", 1)
        assert (await index.send("a", 2)) == first
        assert (await index.send("b", 1)).new
        async with group_of(tasks, concurrency=1):
            with anyio.fail_after(20):
                await begun.wait()
            update = await index.send("a", 3)
            assert update.new
            assert update != first
            again = await index.send("a", 4)
            assert (again, again.new) == (update, False)
            end.set()
            await until_done(tasks.mailbox)
    assert runs == [("a", 1), ("b", 1), ("a", 3)]


@EVERYWHERE
async def test_of_senders_that_race_one_sends(store):
    tasks = Tasks(store.url())

    @tasks.task(unique=timedelta(hours=1))
    async def greet(name: str) -> None: ...

    jobs = []

    async def send():
        jobs.append(await greet.send("ann"))

    async with tasks, anyio.create_task_group() as senders:
        for _ in range(10):
            senders.start_soon(send)
    assert len({job.id for job in jobs}) == 1
    assert [job.new for job in jobs].count(True) == 1


@EVERYWHERE
async def test_the_latest_call_within_a_window_is_run(store):
    tasks = Tasks(store.url())
    runs = []

    @tasks.task(debounce=0.3, key="document")
    async def index(document: str, version: int) -> None:
        runs.append((document, version))

    async with group_of(tasks):
        jobs = [await index.send("a", version) for version in range(5)]
        await index.send("b", 1)
        assert [job.new for job in jobs] == [True, False, False, False, False]
        assert len({job.id for job in jobs}) == 1
        await until_done(tasks.mailbox)
        assert sorted(runs) == [("a", 4), ("b", 1)]
        assert (await index.send("a", 5)).new
        await until_done(tasks.mailbox)
        assert runs[-1] == ("a", 5)
        assert await tasks.mailbox.backend.list_records("debounce", 10, None) == []


# ------------------------------------------------------------------------------------------------------------- in memory


def test_a_call_is_unique_for_a_time_whatever_becomes_of_it():
    async def main():
        tasks = Tasks(InMemoryMailbox())

        @tasks.task(unique=60)
        async def greet(name: str) -> None: ...

        async with group_of(tasks):
            first = await greet.send("ann")
            await until_done(tasks.mailbox)
            await anyio.sleep(50)
            assert (await greet.send("ann")) == first
            assert (await greet.options(unique=False).send("ann")).new
            await anyio.sleep(10)
            assert (await greet.send("ann")).new

    run_virtual(main)


async def test_keys_are_those_of_the_task_or_of_the_call(anyio_backend):
    tasks = Tasks(InMemoryMailbox())

    @tasks.task(unique=True, key=lambda name, age: f"{name[0]}{age}")
    async def greet(name: str, age: int) -> None: ...

    @tasks.task(unique="pending", key="number")
    async def count(number: int, why: str = "") -> None: ...

    async with tasks:
        assert (await greet.send("ann", 1)).new
        assert not (await greet.send("amy", 1)).new
        assert (await greet.send("bob", 1)).new
        assert not (await greet.options(key="a1").send("cy", 3)).new
        assert (await count.send(1)).new
        assert not (await count.send(1, "again")).new
        jobs = await count.send_many([(1,), (2,), (2, "again")])
        assert [job.new for job in jobs] == [False, True, False]


async def test_an_argument_that_is_the_default_makes_no_other_call(anyio_backend):
    tasks = Tasks(InMemoryMailbox())

    @tasks.task(unique=True)
    async def greet(name: str, word: str = "hello", times: int = 1) -> None: ...

    async with tasks:
        assert (await greet.send("ann")).new
        assert not (await greet.send("ann", word="hello", times=1)).new
        assert not (await greet.send("ann", "hello")).new
        assert (await greet.send("ann", "bye")).new
        with pytest.raises(ValueError, match="times"):
            await greet.send("ann", times=True)


def test_a_call_waits_no_longer_than_the_most():
    async def main():
        clock = VirtualClock()
        tasks = Tasks(InMemoryMailbox())
        runs = []

        @tasks.task(debounce=(10, 25), key="document")
        async def index(document: str, version: int) -> None:
            runs.append((clock.now, version))

        async with group_of(tasks):
            for version in range(12):  # at 0 s, 4 s and so on, until 44 s
                await index.send("a", version)
                await anyio.sleep(4)
            await until_done(tasks.mailbox, 60)
        assert [(round(at), version) for at, version in runs] == [(25, 6), (53, 11)]

    run_virtual(main)


def test_an_update_while_the_function_runs_is_run_afterwards():
    async def main():
        tasks = Tasks(InMemoryMailbox())
        runs = []

        @tasks.task(debounce=1, key="document")
        async def index(document: str, version: int) -> None:
            runs.append(version)
            await anyio.sleep(10)

        async with group_of(tasks):
            job = await index.send("a", 1)
            await anyio.sleep(5)
            update = await index.send("a", 2)
            assert (update, update.new) == (job, False)
            await until_done(tasks.mailbox, 60)
        assert runs == [1, 2]
        assert await tasks.mailbox.counts() == Counts(settled=1)

    run_virtual(main)


def test_a_call_that_has_run_is_done_when_it_comes_again():
    """As after a worker that died when it had deleted the record, and before it had acknowledged."""

    async def main():
        tasks = Tasks(InMemoryMailbox())
        runs = []

        @tasks.task(debounce=1, result_ttl=60)
        async def index(version: int) -> int:
            runs.append(version)
            return version

        async with tasks:
            await index.send(1)
            (record,) = await tasks.mailbox.backend.list_records("debounce", 10, None)
            await tasks.mailbox.backend.write_record(RecordWrite(record.kind, record.key, None))
            async with group_of(tasks):
                await until_done(tasks.mailbox)
            assert runs == []
            assert await tasks.mailbox.counts() == Counts(settled=1)

    run_virtual(main)


def test_updates_while_the_function_runs_wait_from_the_first_of_them_on():
    async def main():
        tasks, clock = Tasks(InMemoryMailbox()), VirtualClock()
        runs = []

        @tasks.task(debounce=(5, 20), key="document")
        async def index(document: str, version: int) -> None:
            runs.append((clock.now, version))
            await anyio.sleep(15)

        async with group_of(tasks):
            for version in range(70):
                await index.send("a", version)
                await anyio.sleep(1)
            await until_done(tasks.mailbox, 60)
        assert [(round(at), version) for at, version in runs] == [(20, 20), (40, 40), (60, 60), (75, 69)]

    run_virtual(main)


def test_a_debounced_call_is_run_however_long_no_worker_comes():
    async def main():
        tasks = Tasks(InMemoryMailbox())
        runs = []

        @tasks.task(debounce=1, key="document")
        async def index(document: str, version: int) -> None:
            runs.append(version)

        async with tasks:
            await index.send("a", 1)
            await index.send("a", 2)
            await anyio.sleep(90 * 86_400)
            async with group_of(tasks):
                await until_done(tasks.mailbox)
        assert runs == [2]

    run_virtual(main)


def test_a_failed_run_is_tried_again_with_the_latest_call():
    async def main():
        tasks = Tasks(
            InMemoryMailbox(),
            retry=RetryPolicy(initial_delay=60, jitter="none"),
            dead_letter=DeadLetterPolicy(max_attempts=2),
        )
        runs = []

        @tasks.task(debounce=1, key="document")
        async def index(document: str, version: int) -> None:
            runs.append(version)
            raise ValueError("ill")

        async with group_of(tasks):
            await index.send("a", 1)
            await anyio.sleep(5)
            await index.send("a", 2)
            await until_done(tasks.mailbox, 200)
            assert runs == [1, 2]
            assert (await index.send("a", 3)).new  # the message of the other is dead
            await until_done(tasks.mailbox, 200)
        assert runs == [1, 2, 3, 3]

    run_virtual(main)


def test_a_call_whose_job_was_cancelled_is_sent_anew():
    async def main():
        tasks = Tasks(InMemoryMailbox())
        runs = []

        @tasks.task(debounce=1, key="document")
        async def index(document: str, version: int) -> None:
            runs.append(version)

        async with group_of(tasks):
            await (await index.send("a", 1)).cancel()
            assert (await index.send("a", 2)).new
            await until_done(tasks.mailbox)
        assert runs == [2]

    run_virtual(main)


@pytest.mark.own_time(3)
@given(st.lists(st.tuples(st.floats(0, 4), st.sampled_from("ab")), min_size=1, max_size=25), st.integers(0, 99))
def test_the_last_call_of_each_key_is_run_last_and_none_is_lost(sends, seed):
    async def main():
        tasks = Tasks(InMemoryMailbox(), retry=RetryPolicy(initial_delay=0.5, jitter="none"))
        runs, failures = [], iter(range(1_000))

        @tasks.task(debounce=(1, 3), key="document")
        async def index(document: str, version: int) -> None:
            await anyio.sleep(0.7)
            if next(failures) % 4 == 3:
                raise ValueError("ill")
            runs.append((document, version))

        async with group_of(tasks, concurrency=3):
            for version, (pause, document) in enumerate(sends):
                await index.send(document, version)
                await anyio.sleep(pause)
            await until_done(tasks.mailbox, 100)
        for document in {document for _, document in sends}:
            versions = [version for name, version in runs if name == document]
            assert versions == sorted(set(versions))
            assert versions[-1] == max(version for version, (_, name) in enumerate(sends) if name == document)

    run_virtual(main, seed=seed)


# ------------------------------------------------------------------------------------------------------------ bad input


async def test_a_default_is_part_of_the_key(anyio_backend):
    tasks = Tasks(InMemoryMailbox())

    @tasks.task(unique="pending", key="kind")
    async def named(kind: str = "all") -> None: ...

    @tasks.task(unique=True, key=lambda number, kind: f"{number}-{kind}")
    async def computed(number: int, kind: str = "all") -> None: ...

    async with tasks:
        assert await named.send() == await named.send("all")
        assert await computed.send(1) == await computed.send(1, "all")
        with pytest.raises(InvalidParameterError, match="missing a required argument: 'number'"):
            await computed.send()


def test_impossible_values_are_refused():
    tasks = Tasks(InMemoryMailbox())

    async def work(document: str) -> None: ...

    for unique in (0, -1, "often", float("nan"), timedelta(0), None, 1e9):
        with pytest.raises(InvalidParameterError, match="unique must be"):
            tasks.task(unique=unique)(work)
    for debounce in (0, -1, "1", (5, 1), (1, 2, 3), float("inf"), True):
        with pytest.raises(ConfigError, match="debounce"):
            tasks.task(debounce=debounce)(work)
    for key in ("paper", 5, ""):
        with pytest.raises(ConfigError, match="key must be the name of a parameter"):
            tasks.task(unique=True, key=key)(work)
    with pytest.raises(ConfigError, match="debounce takes no unique"):
        tasks.task(debounce=1, unique=True)(work)
    task = tasks.task(debounce=1)(work)
    with pytest.raises(ConfigError, match="debounce takes no"):
        task.options(delay=5)
    with pytest.raises(ConfigError, match="takes no connection"):
        task.options(dedup_key="x")
    with pytest.raises(ConfigError, match="waits up to 10 s, and would expire after 10 s"):
        tasks.task(debounce=1, expires_in=10, name="expiring")(work)
    with pytest.raises(ConfigError, match="would expire after 5 s"):
        task.options(expires_in=5)
    assert task.options(expires_in=11).sending.expires_in == 11


async def test_a_key_that_cannot_be_is_refused_and_nothing_is_sent(anyio_backend):
    tasks = Tasks(InMemoryMailbox())

    @tasks.task(unique="pending", key="document")
    async def index(document: str) -> None: ...

    @tasks.task(debounce=1)
    async def large(text: str) -> None: ...

    async with tasks:
        for document in ("", "x" * 513):
            with pytest.raises(InvalidParameterError, match="a key must be a text of 1 to 512 characters"):
                await index.send(document)
        with pytest.raises(InvalidParameterError, match="without NUL characters"):
            await index.send("a\0b")
        with pytest.raises(ValueError, match="262,144"):
            await large.send("x" * 300_000)
        with pytest.raises(ConfigError, match="takes no unique, debounce"):
            await large.request("x")
        assert (await tasks.mailbox.counts()).waiting == 0
