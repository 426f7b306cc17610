"""MainLoop from outside: ``async with``, running again, several loops, the heartbeat, and real work on each event loop."""

from __future__ import annotations

import anyio
import pytest

from mainspring import Context, InMemoryMailbox, MailboxClosedError, MainLoop, Runnable, open_mailbox
from mainspring.errors import ConfigError
from mainspring.loops.base import Steerable
from mainspring.states import MailboxState
from support import FaultyMailbox, background, fail, settled

pytestmark = pytest.mark.anyio


async def quick(job: int) -> None: ...


def test_it_is_what_a_group_asks_for():
    loop = MainLoop(InMemoryMailbox(), quick)
    assert isinstance(loop, Runnable)
    assert isinstance(loop, Steerable)


async def test_it_works_through_thousands_of_messages():
    seen = []

    async def handle(job: int) -> None:
        if job % 7 == 0:
            await anyio.lowlevel.checkpoint()
        seen.append(job)

    mailbox = InMemoryMailbox(serialize=True)
    async with MainLoop(mailbox, handle, concurrency=50) as loop:
        for first in range(0, 5_000, 500):
            await mailbox.send_many(range(first, first + 500))
        await settled(mailbox, within=30)
        assert (await mailbox.counts()).settled == 5_000
    assert sorted(seen) == list(range(5_000))
    assert loop.outcomes == {"acknowledged": 5_000}


async def test_one_at_a_time_is_first_in_first_out():
    seen = []

    async def handle(job: int) -> None:
        seen.append(job)
        await anyio.lowlevel.checkpoint()

    mailbox = InMemoryMailbox()
    async with MainLoop(mailbox, handle):
        await mailbox.send_many(range(50))
        await settled(mailbox)
    assert seen == list(range(50))


# ----------------------------------------------------------------------------------------------------------- async with


async def test_the_block_opens_the_mailbox_and_closes_it_last():
    states = []

    async def handle(job: int) -> None:
        await anyio.sleep(0.02)
        states.append(mailbox.state)

    class NeedsOpening(FaultyMailbox):
        works_unopened = False

    mailbox = NeedsOpening()
    async with MainLoop(mailbox, handle) as loop:
        assert mailbox.state is MailboxState.OPEN
        await mailbox.send(1)
        while not loop.in_flight:
            await anyio.sleep(0.001)
    assert states == [MailboxState.OPEN]  # what was in hand was finished and settled before
    assert mailbox.state is MailboxState.CLOSED
    assert mailbox.settlements() == ["Ack"]
    assert not loop.running


async def test_the_block_leaves_a_mailbox_that_works_unopened_as_it_is():
    mailbox = InMemoryMailbox()
    async with MainLoop(mailbox, quick):
        await mailbox.send(1)
        await settled(mailbox)
    assert mailbox.state is MailboxState.UNOPENED
    assert (await mailbox.counts()).settled == 1


async def test_the_block_leaves_an_open_mailbox_open():
    async with InMemoryMailbox() as mailbox:
        async with MainLoop(mailbox, quick):
            await mailbox.send(1)
            await settled(mailbox)
        assert mailbox.state is MailboxState.OPEN
        assert (await mailbox.counts()).settled == 1


async def test_the_block_works_with_a_mailbox_that_must_be_opened(tmp_path):
    mailbox = open_mailbox(f"sqlite:///{tmp_path}/jobs.db")
    async with MainLoop(mailbox, quick) as loop:
        await mailbox.send(1)
        await settled(mailbox)
    assert loop.outcomes == {"acknowledged": 1}


async def test_the_block_may_be_entered_again():
    mailbox = InMemoryMailbox()
    loop = MainLoop(mailbox, quick)
    for _ in range(3):
        async with loop:
            await mailbox.send(1)
            await settled(mailbox)
    assert loop.outcomes == {"acknowledged": 3}


async def test_the_block_may_be_entered_again_after_the_loop_ended_by_itself():
    """Its handler had asked for the end; leaving the block must not stop the next run."""

    async def handle(job: int) -> None:
        loop.request_shutdown()

    mailbox = InMemoryMailbox()
    loop = MainLoop(mailbox, handle)
    for _ in range(3):
        async with loop:
            await mailbox.send(1)
            with anyio.fail_after(5):
                while loop.outcomes["acknowledged"] == 0 or loop.running:
                    await anyio.sleep(0.001)
        loop.outcomes.clear()


async def test_a_block_that_is_left_at_once():
    loop = MainLoop(InMemoryMailbox(), quick)
    with anyio.fail_after(5):
        async with loop:
            pass
        async with loop:
            pass
    assert not loop.running


async def test_an_error_in_the_block_cancels_the_work_and_comes_out_as_it_is():
    async def handle(job: int) -> None:
        await anyio.sleep_forever()

    async with InMemoryMailbox() as mailbox:
        loop = MainLoop(mailbox, handle)
        with pytest.raises(LookupError, match="mine"):  # noqa: PT012
            async with loop:
                await mailbox.send(1)
                while not loop.in_flight:
                    await anyio.sleep(0.001)
                raise LookupError("mine")
        assert loop.outcomes == {"released": 1}
        assert (await mailbox.counts()).pending == 1


async def test_a_cancelled_block_cancels_the_work():
    async def handle(job: int) -> None:
        await anyio.sleep_forever()

    async with InMemoryMailbox() as mailbox:
        loop = MainLoop(mailbox, handle)
        with anyio.CancelScope() as scope:
            async with loop:
                await mailbox.send(1)
                while not loop.in_flight:
                    await anyio.sleep(0.001)
                scope.cancel()
                await anyio.sleep_forever()
        assert scope.cancelled_caught
        assert loop.outcomes == {"released": 1}


async def test_a_block_whose_shutdown_is_cancelled_still_ends_in_order():
    """Cancelled while it waits for the work in hand: the work is cancelled too, and nothing is left behind."""

    async def handle(job: int) -> None:
        await anyio.sleep_forever()

    async with InMemoryMailbox() as mailbox:
        loop = MainLoop(mailbox, handle)
        with anyio.fail_after(5), anyio.CancelScope() as scope:
            async with loop:
                await mailbox.send(1)
                while not loop.in_flight:
                    await anyio.sleep(0.001)
                scope.deadline = anyio.current_time() + 0.05
        assert scope.cancelled_caught
        assert not loop.running
        assert loop.outcomes == {"released": 1}
        async with loop:  # and it can be used again
            assert loop.mailbox is mailbox


async def test_a_crash_comes_out_of_the_block():
    mailbox = FaultyMailbox()
    mailbox.next("claim", fail(ZeroDivisionError("driver")))
    with pytest.raises(ZeroDivisionError, match="driver"), anyio.fail_after(5):
        async with MainLoop(mailbox, quick):
            await anyio.sleep_forever()


async def test_the_blocks_shutdown_timeout_is_the_loops(virtual_clock):
    async def handle(job: int) -> None:
        await anyio.sleep_forever()

    mailbox = InMemoryMailbox()
    async with MainLoop(mailbox, handle, shutdown_timeout=3):
        await mailbox.send(1)
        await anyio.sleep(1)
    assert virtual_clock.now == 4


# ------------------------------------------------------------------------------------------------------- run and shutdown


async def test_it_may_run_again_after_each_kind_of_end():
    mailbox = InMemoryMailbox()
    loop = MainLoop(mailbox, quick)
    for _ in range(2):
        async with background(loop):  # ends by a shutdown
            await mailbox.send(1)
            await settled(mailbox)
        await mailbox.send(1)
        await loop.run(max_iterations=1)  # by itself
    assert loop.outcomes == {"acknowledged": 4}


async def test_it_runs_once_at_a_time():
    loop = MainLoop(InMemoryMailbox(), quick, name="jobs")
    async with background(loop):
        await anyio.wait_all_tasks_blocked()
        assert loop.running
        with pytest.raises(ConfigError, match="loop 'jobs' is already running"):
            await loop.run()
        assert loop.running
    assert not loop.running


async def test_every_caller_of_shutdown_waits_for_the_end(virtual_clock):
    async def handle(job: int) -> None:
        await anyio.sleep(10)

    mailbox = InMemoryMailbox()
    loop = MainLoop(mailbox, handle)
    results = []

    async def stop() -> None:
        results.append((await loop.shutdown(), loop.running))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(loop.run)
        await mailbox.send(1)
        await anyio.sleep(1)
        tasks.start_soon(stop)
        tasks.start_soon(stop)
    assert results == [(True, False)] * 2


async def test_a_longer_shutdown_does_not_hold_up_a_shorter_one(virtual_clock):
    async def handle(job: int) -> None:
        await anyio.sleep(1_000)

    mailbox = InMemoryMailbox()
    loop = MainLoop(mailbox, handle)
    results = {}

    async def stop(timeout: float) -> None:
        results[timeout] = await loop.shutdown(timeout=timeout)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(loop.run)
        await mailbox.send(1)
        await anyio.sleep(1)
        tasks.start_soon(stop, 500)
        tasks.start_soon(stop, 5)
    assert virtual_clock.now == 6
    assert results[5] is False


async def test_a_shutdown_that_is_cancelled_has_still_asked(virtual_clock):
    async def handle(job: int) -> None:
        await anyio.sleep(10)

    mailbox = InMemoryMailbox()
    loop = MainLoop(mailbox, handle)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(loop.run)
        await mailbox.send(1)
        await anyio.sleep(1)
        with anyio.move_on_after(2):
            await loop.shutdown()
        assert loop.running
    assert virtual_clock.now == 10
    assert loop.outcomes == {"acknowledged": 1}


async def test_the_runs_own_wait_rules(virtual_clock):
    mailbox = FaultyMailbox()
    await MainLoop(mailbox, quick, wait_time_seconds=20).run(max_iterations=1, wait_time_seconds=7)
    assert virtual_clock.now == 7
    assert mailbox.calls[0][2] == (1, 7.0)


async def test_several_loops_share_one_mailbox():
    seen = []

    def handler(name):
        async def handle(job: int) -> None:
            seen.append((name, job))
            await anyio.lowlevel.checkpoint()

        return handle

    async with (
        InMemoryMailbox() as mailbox,
        MainLoop(mailbox, handler("a"), name="a"),
        MainLoop(mailbox, handler("b"), name="b"),
    ):
        await mailbox.send_many(range(200))
        await settled(mailbox)
    assert sorted(job for _, job in seen) == list(range(200))
    assert {name for name, _ in seen} == {"a", "b"}


# ------------------------------------------------------------------------------------------------------------- signs of life


async def test_the_heartbeat_beats_at_receives_and_at_both_ends_of_each_message(virtual_clock):
    beats = []

    async def handle(job: int) -> None:
        await anyio.sleep(5)

    mailbox = InMemoryMailbox()
    loop = MainLoop(mailbox, handle, wait_time_seconds=20)
    loop.heartbeat.add_callback(lambda: beats.append(virtual_clock.now))
    async with background(loop):
        await anyio.sleep(47)
        await mailbox.send(1)
        await anyio.sleep(6)
        assert set(beats) == {0, 20, 40, 47, 52}
        assert loop.heartbeat.elapsed() == 1


async def test_status_from_outside(virtual_clock):
    async def handle(job: int) -> None:
        await anyio.sleep(10)

    mailbox = InMemoryMailbox("orders")
    loop = MainLoop(mailbox, handle, concurrency=3)
    assert repr(loop) == "<MainLoop 'handle' on 'orders' idle in_flight=0>"
    assert (loop.runs, loop.in_flight, loop.trouble) == ((), 0, None)
    async with background(loop):
        ids = await mailbox.send_many([1, 2])
        await anyio.sleep(4)
        assert repr(loop) == "<MainLoop 'handle' on 'orders' running in_flight=2>"
        assert [run.message_id for run in loop.runs] == ids
        assert [run.beat_age() for run in loop.runs] == [4, 4]
        assert all("await anyio.sleep(10)" in run.where() for run in loop.runs)
        assert [run.done for run in loop.runs] == [False, False]


async def test_a_handler_sees_its_own_context_only():
    """Contexts and slots are reused; what belongs to one message must not reach the next."""
    seen = []

    async def handle(job: int, ctx: Context) -> None:
        before = (ctx.request_id, ctx.restored)
        await anyio.lowlevel.checkpoint()
        assert (ctx.request_id, ctx.restored) == before
        seen.append((job, ctx.request_id))
        await ctx.checkpoint(job)

    mailbox = InMemoryMailbox()
    async with MainLoop(mailbox, handle, concurrency=4):
        ids = await mailbox.send_many(range(40))
        await settled(mailbox)
    assert dict(seen) == dict(enumerate(ids))


async def test_a_loop_on_a_closed_mailbox_says_so():
    mailbox = InMemoryMailbox("orders")
    await mailbox.close()
    with pytest.raises(MailboxClosedError, match="'orders' is closed"):
        await MainLoop(mailbox, quick).run()


# ---------------------------------------------------------------------------------------------------------------- wrappers


@pytest.mark.parametrize("in_thread", [False, True])
async def test_wrappers_stand_around_each_handler_call_the_last_one_outermost(in_thread):
    order = []

    async def handle(job: int) -> int:
        order.append(f"handle {job}")
        return job * 2

    def handle_plainly(job: int) -> int:
        order.append(f"handle {job}")
        return job * 2

    mailbox, replies = InMemoryMailbox(), InMemoryMailbox()
    loop = MainLoop(mailbox, handle_plainly if in_thread else handle)
    for name in ("inner", "outer"):

        @loop.wrap
        async def wrapper(message, call, name=name):
            order.append(f"{name} {message.body}")
            result = await call()
            order.append(f"{name} got {result}")
            return result

    async with background(loop):
        await mailbox.send(3, reply_to=replies)
        await settled(mailbox)
    assert order == ["outer 3", "inner 3", "handle 3", "inner got 6", "outer got 6"]
    (reply,) = await replies.receive()
    assert reply.body == 6


async def test_what_a_wrapper_raises_counts_as_the_handlers_own(virtual_clock):
    from mainspring import Reject

    mailbox = InMemoryMailbox()
    loop = MainLoop(mailbox, quick)

    @loop.wrap
    async def refuse(message, call):
        raise Reject("not today")

    async with background(loop):
        await mailbox.send(1)
        await settled(mailbox)
        assert [letter.error for letter in await mailbox.dead_letters()] == ["not today"]
