"""The list of the loops that work on a mailbox: each is in it for as long as it runs, and costs its messages nothing."""

from __future__ import annotations

import asyncio
import os
import socket
from datetime import UTC, datetime

import anyio
import pytest

import mainspring
from mainspring import DLQConsumer, InMemoryMailbox, LoopGroup, MainLoop, Tasks, WorkerState
from mainspring.core import clock
from mainspring.errors import ConfigError, MailboxClosedError
from mainspring.mailbox.backend import Capabilities
from mainspring.mailbox.records import WORKER, RecordWrite
from mainspring.mailbox.workers import PAGE, WorkerStatus
from mainspring.testing import run_virtual
from stores import KINDS, on
from support import FaultyMailbox, background, fail, hang, settled, slow
from support import work as as_usual
from worker.loop_support import DOWN, quick, sleeper, sleeping

pytestmark = pytest.mark.anyio
HERE = f"{socket.gethostname()}:{os.getpid()}"


async def states(mailbox) -> list[tuple[str, int, int]]:
    return [(str(each.state), each.in_flight, each.concurrency) for each in await mailbox.workers()]


async def test_a_loop_is_in_the_list_for_as_long_as_it_runs(virtual_clock):
    async with InMemoryMailbox() as mailbox:
        loop = MainLoop(mailbox, sleeper(100), name="reports", concurrency=3)
        assert await mailbox.workers() == []
        async with LoopGroup([loop], name="service", guardian=False):
            began = clock.utc_now()
            await anyio.sleep(0.1)
            (worker,) = await mailbox.workers()
            assert (worker.worker, worker.loop, worker.group) == (HERE, "reports", "service")
            assert (worker.state, worker.concurrency, worker.jobs) == (WorkerState.RUNNING, 3, {})
            assert worker.version == mainspring.__version__
            assert abs((worker.started_at - began).total_seconds()) < 0.1
            await anyio.sleep(19.5)
            message_id = await mailbox.send(1)
            await anyio.sleep(1)
            (later,) = await mailbox.workers()
            assert later.started_at == worker.started_at
            assert round((later.last_seen - worker.last_seen).total_seconds(), 3) == 20
            assert (later.in_flight, later.jobs) == (1, {})
            await anyio.sleep(20)
            (later,) = await mailbox.workers()
            assert (later.in_flight, later.jobs) == (1, {message_id: 1})
            await anyio.sleep(100)
            assert await states(mailbox) == [("running", 0, 3)]
        assert await mailbox.workers() == []
        assert loop.group is None


async def test_each_run_of_each_loop_counts_also_those_of_one_name(virtual_clock):
    async with InMemoryMailbox() as mailbox, background(MainLoop(mailbox, quick)), background(MainLoop(mailbox, quick)):
        await anyio.sleep(1)
        loop = MainLoop(mailbox, quick, name="other")
        for _ in range(2):
            async with background(loop):
                await anyio.sleep(1)
                found = await mailbox.workers()
                assert [(each.loop, each.group) for each in found] == [
                    ("other", None),
                    ("quick", None),
                    ("quick", None),
                ]
            assert len(await mailbox.workers()) == 2


async def test_a_pause_and_a_drain_are_seen_a_second_later(virtual_clock):
    async with InMemoryMailbox() as mailbox:
        await mailbox.send_many([1, 2])
        loop = MainLoop(mailbox, sleeper(30), concurrency=2)
        async with background(loop):
            await anyio.sleep(1)
            loop.pause()
            await anyio.sleep(1.1)
            assert await states(mailbox) == [("paused", 2, 2)]
            loop.resume()
            await anyio.sleep(1.1)
            assert await states(mailbox) == [("running", 2, 2)]
            loop.pause()
            loop.request_shutdown()
            await anyio.sleep(1.1)
            assert await states(mailbox) == [("draining", 2, 2)]
            await anyio.sleep(30)
            assert await states(mailbox) == []


@pytest.mark.parametrize("end", [fail(DOWN), hang], ids=["refused", "silent"])
async def test_a_killed_worker_is_shown_until_its_record_ends(end, virtual_clock):
    """Its last write was at second 40. It holds up nothing at its end, as if it were killed."""
    mailbox = FaultyMailbox()
    async with background(MainLoop(mailbox, sleeping)) as loop:
        await anyio.sleep(50)
        mailbox.always("write_record", end)
        loop.request_shutdown()
        while loop.running:
            await anyio.sleep(0.1)
        assert virtual_clock.now <= 51.2
        await anyio.sleep(65 - virtual_clock.now)
        (worker,) = await mailbox.workers()
        assert 24.9 < (clock.utc_now() - worker.last_seen).total_seconds() < 25.1
        await anyio.sleep(34)
        assert len(await mailbox.workers()) == 1
        await anyio.sleep(2)
        assert await mailbox.workers() == []


async def test_a_record_is_deleted_at_the_end_though_the_last_write_failed(virtual_clock):
    mailbox = FaultyMailbox()
    async with background(MainLoop(mailbox, quick)):
        await anyio.sleep(10)
        mailbox.always("write_record", fail(DOWN))
        await anyio.sleep(35)
        mailbox.always("write_record", as_usual)
        assert await states(mailbox) == [("running", 0, 1)]
    assert await states(mailbox) == []


async def test_a_write_that_fails_is_no_trouble_of_the_loop(virtual_clock, caplog):
    mailbox = FaultyMailbox()
    mailbox.always("write_record", fail(DOWN))
    loop = MainLoop(mailbox, quick)
    async with background(loop):
        await anyio.sleep(30)
        await mailbox.send(1)
        await settled(mailbox)
        assert (loop.trouble, await mailbox.workers()) == (None, [])
        mailbox.always("write_record", as_usual)
        await anyio.sleep(20)
        assert await states(mailbox) == [("running", 0, 1)]
        mailbox.next("write_record", slow(70))
        await mailbox.send(2)
        await settled(mailbox)
        await anyio.sleep(100)
        assert await states(mailbox) == [("running", 0, 1)]
    assert not caplog.records


@pytest.mark.parametrize("of_task", [False, True])
def test_a_cancellation_that_no_scope_asked_for_takes_no_loop_out_of_the_list(of_task):
    """The write that it cut off is made anew."""

    async def cut_off(write) -> None:
        task = asyncio.current_task()
        broken = task if of_task and task is not None else asyncio.get_running_loop().create_future()
        broken.cancel()
        await (anyio.sleep(1) if of_task else broken)

    async def main():
        mailbox = FaultyMailbox()
        async with background(MainLoop(mailbox, quick)):
            await anyio.sleep(10)
            mailbox.next("write_record", cut_off)
            await anyio.sleep(200)
            assert await states(mailbox) == [("running", 0, 1)]
            await mailbox.send(1)
            await settled(mailbox)
        assert await mailbox.workers() == []

    run_virtual(main, backend="asyncio")


async def test_a_short_run_tells_nothing_at_its_end_that_was_not_told_before(virtual_clock):
    """A drain that ends within a second writes nothing of its own: the record is written, and deleted."""
    mailbox = FaultyMailbox()
    writes: list[float] = []

    async def note(write) -> object:
        writes.append(anyio.current_time())
        return await write()

    mailbox.always("write_record", note)
    async with background(MainLoop(mailbox, sleeper(0.01), concurrency=5)):
        await mailbox.send_many(range(2_000))
        await settled(mailbox)
        await anyio.sleep(41 - anyio.current_time())
    assert [round(at, 3) for at in writes] == [0, 40, 41]


async def test_an_idle_loop_writes_half_as_often_and_tells_what_is_new_within_20_seconds(virtual_clock):
    mailbox = FaultyMailbox()
    writes: list[float] = []

    async def note(write) -> object:
        writes.append(round(anyio.current_time()))
        return await write()

    mailbox.always("write_record", note)
    async with background(MainLoop(mailbox, sleeper(30))):
        await anyio.sleep(90)
        assert writes == [0, 40, 80]
        await mailbox.send(1)
        await anyio.sleep(11)
        assert await states(mailbox) == [("running", 1, 1)]
        await anyio.sleep(20)
        assert await states(mailbox) == [("running", 0, 1)]
        assert writes == [0, 40, 80, 100, 120]


async def test_a_loop_stays_in_the_list_where_one_write_fails(virtual_clock):
    mailbox = FaultyMailbox()
    async with background(MainLoop(mailbox, quick)):
        await anyio.sleep(30)
        mailbox.next("write_record", fail(DOWN))
        for _ in range(60):
            await anyio.sleep(1)
            assert await states(mailbox) == [("running", 0, 1)]


async def test_a_mailbox_that_keeps_no_records_has_no_list(virtual_clock):
    mailbox = InMemoryMailbox()
    mailbox.backend.capabilities = Capabilities()
    async with background(MainLoop(mailbox, quick)):
        await mailbox.send(1)
        await settled(mailbox)
        with pytest.raises(ConfigError, match=r"does not know its workers \(Capabilities.records\)"):
            await mailbox.workers()


async def test_a_closed_mailbox_has_no_list():
    mailbox = InMemoryMailbox()
    await mailbox.close()
    with pytest.raises(MailboxClosedError):
        await mailbox.workers()


async def test_loops_of_its_dead_letters_are_in_the_list_of_a_mailbox(virtual_clock):
    async with InMemoryMailbox() as mailbox:
        consumer = DLQConsumer(mailbox, quick, name="graveyard")
        async with LoopGroup([MainLoop(mailbox, quick), consumer], guardian=False):
            await anyio.sleep(1)
            assert [each.loop for each in await mailbox.workers()] == ["graveyard", "quick"]
        assert await mailbox.workers() == []


async def test_more_workers_than_a_page_are_all_in_the_list(virtual_clock):
    async with InMemoryMailbox() as mailbox:
        now = datetime(2026, 1, 1, tzinfo=UTC)
        for number in range(PAGE + 1):
            status = WorkerStatus(f"host:{number:04}", "loop", None, WorkerState.PAUSED, 1, 0, "1", now, now)
            await mailbox.backend.write_record(RecordWrite(WORKER, f"{PAGE - number}", status.write()))
        assert [each.worker for each in await mailbox.workers()] == [f"host:{number:04}" for number in range(PAGE + 1)]


async def test_the_worker_of_a_running_job_is_told_for_the_delivery_that_it_runs(virtual_clock):
    tasks = Tasks("memory://jobs of a worker")

    @tasks.task
    async def report() -> None:
        await anyio.sleep(100)

    async with tasks:
        job = await report.send()
        async with background(tasks.loop()) as loop:
            await anyio.sleep(10)
            assert (await job.status()).worker is None
            await anyio.sleep(15)
            assert (await job.status()).worker == HERE
            (worker,) = await tasks.workers()
            assert worker.jobs == {job.id: 1}
            loop.cancel_work()  # it goes back, and the loop begins it anew
            await anyio.sleep(0.5)
            status = await job.status()
            assert (status.state, status.deliveries, status.worker) == ("running", 2, None)


@on(*KINDS)
async def test_each_store_keeps_the_list(kind, store):
    async with store.box() as mailbox, store.box() as elsewhere:
        async with background(MainLoop(mailbox, quick, name="näme '1'", concurrency=2)):
            await settled_list(elsewhere, 1)
            (worker,) = await elsewhere.workers()
            assert (worker.worker, worker.loop, worker.concurrency) == (HERE, "näme '1'", 2)
        assert await elsewhere.workers() == []


async def settled_list(mailbox, count: int) -> None:
    with anyio.fail_after(10):
        while len(await mailbox.workers()) != count:
            await anyio.sleep(0.01)
