"""How a worker ends otherwise: cancellations, max_iterations, a mailbox that closes, and runs in quick succession."""

from __future__ import annotations

import asyncio
import threading

import anyio
import pytest
from loop_support import quick, sleeping

from mainspring import Context, InMemoryMailbox, MainLoop, Retry
from mainspring.errors import MailboxClosedError
from mainspring.events import SettlementFailed
from support import FaultyMailbox, background, fail, hang, record, settled, work

pytestmark = pytest.mark.anyio


# ---------------------------------------------------------------------------------------------------------- cancellation


async def test_a_cancelled_run_gives_its_messages_back_uncharged():
    mailbox = InMemoryMailbox()
    loop = MainLoop(mailbox, sleeping, concurrency=3)
    await mailbox.send_many(range(5))
    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(loop.run)
            while loop.in_flight < 3:
                await anyio.sleep(0.001)
            tasks.cancel_scope.cancel()
    assert not loop.running
    assert loop.outcomes == {"released": 3}
    again = await mailbox.receive(max_messages=10)
    assert [(m.body, m.attempt) for m in again] == [(n, 1) for n in range(5)]


async def test_a_cancelled_run_may_run_again():
    mailbox = InMemoryMailbox()
    loop = MainLoop(mailbox, quick)
    with anyio.move_on_after(0.01):
        await loop.run()
    await mailbox.send(1)
    await loop.run(max_iterations=1)
    assert loop.outcomes == {"acknowledged": 1}


async def test_a_cancelled_run_waits_for_a_store_that_hangs_only_for_a_while(virtual_clock):
    mailbox = FaultyMailbox()
    mailbox.always("settle", hang)
    loop = MainLoop(mailbox, sleeping, concurrency=3)
    failed = record(loop, SettlementFailed)
    await mailbox.send_many(range(3))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(loop.run)
        await anyio.sleep(10)
        tasks.cancel_scope.cancel()
    assert virtual_clock.now == 15
    assert [event.outcome for event in failed] == ["released"] * 3
    assert loop.outcomes == {"lost": 3}


@pytest.mark.loops("asyncio")
async def test_a_native_cancellation_of_the_run_gives_its_messages_back(anyio_backend):
    mailbox = InMemoryMailbox()
    loop = MainLoop(mailbox, sleeping, concurrency=3)
    await mailbox.send_many(range(3))
    task = asyncio.ensure_future(loop.run())
    while loop.in_flight < 3:
        await asyncio.sleep(0)
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert loop.outcomes == {"released": 3}
    assert (await mailbox.counts()).pending == 3


@pytest.mark.parametrize("waits", [False, True])
async def test_an_answer_that_comes_as_it_is_given_up_costs_the_next_message_nothing(waits):
    """The slot's scope is used up then: no handler may begin in it, and nobody who waits in it may be thought to come."""

    async def just_in_time(hook):
        await hook()
        loop.runs[0].give_up_settling()

    mailbox = FaultyMailbox()
    mailbox.next("settle", just_in_time, work, just_in_time)
    loop = MainLoop(mailbox, one_turn, wait_time_seconds=600)
    await mailbox.send_many([1] if waits else [1, 2])
    async with background(loop):
        await anyio.sleep(0.01)
        await mailbox.send(3)
        await mailbox.send(4)
        await settled(mailbox, within=5)
    assert loop.outcomes == {"acknowledged": 3 if waits else 4}


async def one_turn(job: int) -> None:
    await anyio.lowlevel.checkpoint()


async def test_abort_ends_a_settlement_that_hangs(virtual_clock):
    mailbox = FaultyMailbox()
    mailbox.next("settle", hang)
    await mailbox.send(1)
    loop = MainLoop(mailbox, quick)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(loop.run)
        await anyio.sleep(1)
        assert not await loop.shutdown(timeout=2)
        assert virtual_clock.now == 8  # 2 s to finish, 5 s after the cancellation


# -------------------------------------------------------------------------------------------------------- max_iterations


async def test_max_iterations_counts_receives_and_what_they_brought_is_handled(virtual_clock):
    done = []

    async def handle(job: int) -> None:
        await anyio.sleep(1)
        done.append(job)

    mailbox = FaultyMailbox()
    await mailbox.send_many(range(10))
    loop = MainLoop(mailbox, handle, concurrency=4)
    await loop.run(max_iterations=2)
    assert len(mailbox.times("claim")) == 2
    assert 5 <= len(done) <= 8  # four at the first receive, then as many as had become free
    assert (await mailbox.counts()).in_flight == 0
    assert not loop.running


async def test_an_empty_receive_counts_too(virtual_clock):
    loop = MainLoop(FaultyMailbox(), quick, wait_time_seconds=20)
    await loop.run(max_iterations=3)
    assert virtual_clock.now == 60


async def test_none_at_all():
    mailbox = FaultyMailbox()
    await MainLoop(mailbox, quick).run(max_iterations=0)
    assert mailbox.times("claim") == []


async def test_polls_that_do_not_wait_do_not_spin(virtual_clock):
    mailbox = FaultyMailbox()
    async with background(MainLoop(mailbox, quick, wait_time_seconds=0)):
        await anyio.sleep(10)
    assert 50 <= len(mailbox.times("claim")) <= 101


async def test_polls_that_do_not_wait_go_on_at_once_while_there_is_work(virtual_clock):
    mailbox = FaultyMailbox()
    await mailbox.send_many(range(100))
    loop = MainLoop(mailbox, quick, wait_time_seconds=0)
    await loop.run(max_iterations=100)
    assert loop.outcomes == {"acknowledged": 100}
    assert virtual_clock.now == 0


# -------------------------------------------------------------------------------------------------- a mailbox that closes


async def test_a_mailbox_closed_under_a_loop_is_its_error_after_the_work_in_hand(virtual_clock):
    ends = []

    async def handle(job: int) -> None:
        await anyio.sleep(10)
        ends.append(anyio.current_time())

    mailbox = InMemoryMailbox("orders")
    loop = MainLoop(mailbox, handle, concurrency=2)
    failed = record(loop, SettlementFailed)

    async def run() -> None:
        with pytest.raises(MailboxClosedError, match="'orders' is closed"):
            await loop.run()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        await mailbox.send(1)
        await anyio.sleep(1)
        await mailbox.close()
    assert ends == [10]
    assert not loop.running
    assert [event.outcome for event in failed] == ["acknowledged"]


async def test_a_mailbox_that_was_never_opened_is_the_runs_error(tmp_path):
    from mainspring import open_mailbox

    loop = MainLoop(open_mailbox(f"sqlite:///{tmp_path}/x.db"), quick)
    with pytest.raises(MailboxClosedError, match="use it inside `async with` or under a running LoopGroup"):
        await loop.run()
    assert not loop.running


async def test_an_unexpected_error_of_the_mailbox_surfaces_after_the_work_in_hand(virtual_clock):
    done = []

    async def handle(job: int) -> None:
        await anyio.sleep(10)
        done.append(job)

    mailbox = FaultyMailbox()
    await mailbox.send(1)
    loop = MainLoop(mailbox, handle, concurrency=2)
    mailbox.next("claim", lambda hook: hook(), fail(ZeroDivisionError("a bug of the driver")))
    with pytest.raises(ZeroDivisionError, match="a bug of the driver"):
        await loop.run()
    assert done == [1]
    assert loop.outcomes == {"acknowledged": 1}


# ------------------------------------------------------------------------------------------------------------ start / stop


async def test_start_and_stop_stress():
    """Shutdowns at every tick of a busy run; afterwards nothing is leased, and nothing was lost or charged."""
    mailbox = InMemoryMailbox()
    seen = []

    async def handle(job: int, ctx: Context) -> None:
        assert ctx.attempt == 1
        await anyio.lowlevel.checkpoint()
        seen.append(job)

    loop = MainLoop(mailbox, handle, concurrency=5)
    total = 0
    for ticks in range(60):
        await mailbox.send_many(range(total, total + 7))
        total += 7
        with anyio.fail_after(10):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(loop.run)
                for _ in range(ticks):
                    await anyio.lowlevel.checkpoint()
                if ticks % 3:
                    await loop.shutdown(timeout=1)
                else:
                    tasks.cancel_scope.cancel()
        assert (await mailbox.counts()).in_flight == 0
        assert not loop.running
    async with background(loop):
        await settled(mailbox)
    assert set(seen) == set(range(total))


async def test_a_thread_is_waited_for():
    entered, release = threading.Event(), threading.Event()

    def handle(job: int) -> None:
        entered.set()
        assert release.wait(10)

    mailbox = InMemoryMailbox()
    await mailbox.send(1)
    loop = MainLoop(mailbox, handle)
    stopped = []

    async def stop() -> None:
        stopped.append(await loop.shutdown(timeout=0.01))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(loop.run)
        while not entered.is_set():
            await anyio.sleep(0.001)
        tasks.start_soon(stop)
        await anyio.sleep(0.05)
        assert loop.running
        release.set()
    assert stopped == [False]
    assert loop.outcomes == {"acknowledged": 1}


async def test_a_handler_that_makes_way_at_a_shutdown_puts_its_message_to_the_front(virtual_clock):
    box = InMemoryMailbox()

    async def handle(job: str, ctx: Context) -> None:
        await ctx.wait_shutting_down()
        raise Retry(delay=0, charge=False)

    loop = MainLoop(box, handle)
    await box.send_many(["first", "second"])
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(loop.run)
        await anyio.sleep(1)
        assert await loop.shutdown()
    assert loop.outcomes == {"released": 1}
    (message,) = await box.receive()
    assert (message.body, message.attempt, message.delivery_count) == ("first", 1, 2)


async def test_a_handler_that_retries_uncharged_while_the_loop_goes_on_goes_to_the_tail(virtual_clock):
    box, handled = InMemoryMailbox(), []

    async def handle(job: str) -> None:
        handled.append(job)
        if handled == ["first"]:
            raise Retry(delay=0, charge=False)

    await box.send_many(["first", "second"])
    await MainLoop(box, handle, wait_time_seconds=0).run(max_iterations=3)
    assert handled == ["first", "second", "first"]
