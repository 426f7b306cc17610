"""MainLoop from outside: run and shutdown, running again, and its signs of life."""

from __future__ import annotations

import anyio
import pytest
from loop_support import quick

from mainspring import Context, InMemoryMailbox, MailboxClosedError, MainLoop
from mainspring.errors import ConfigError
from support import FaultyMailbox, background, settled

pytestmark = pytest.mark.anyio


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
