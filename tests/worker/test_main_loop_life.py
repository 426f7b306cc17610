"""MainLoop from outside: ``async with``, wrappers, and real work on each event loop."""

from __future__ import annotations

import anyio
import pytest
from loop_support import quick

from mainspring import ConfigError, InMemoryMailbox, MainLoop, Runnable, open_mailbox
from mainspring.core.state_machine import MailboxState
from mainspring.worker.runnable import Steerable
from support import FaultyMailbox, background, fail, settled
from wrapped_backend import WrappedBackend, wrap

pytestmark = pytest.mark.anyio


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
    begun = anyio.Event()

    async def handle(job: int) -> None:
        begun.set()
        await anyio.sleep(0.02)
        states.append(mailbox.state)

    class NeedsOpening(WrappedBackend):
        works_unopened = False

    mailbox = wrap(FaultyMailbox(), NeedsOpening)
    async with MainLoop(mailbox, handle) as loop:
        assert mailbox.state is MailboxState.OPEN
        await mailbox.send(1)
        await begun.wait()  # what nobody has begun is given back
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


async def test_a_block_inside_of_another_is_refused_and_the_loop_goes_on():
    mailbox = InMemoryMailbox()
    loop = MainLoop(mailbox, quick)
    with anyio.fail_after(10):
        async with loop:
            with pytest.raises(ConfigError, match="is already running"):
                async with loop:
                    pass
            await mailbox.send(1)
            await settled(mailbox)
        assert not loop.running
        async with loop:
            pass


async def test_the_block_may_be_entered_again_after_the_loop_ended_by_itself():
    """Its handler had asked for the end; leaving the block must not stop the next run."""

    async def handle(job: int) -> None:
        loop.request_shutdown()

    mailbox = InMemoryMailbox()
    loop = MainLoop(mailbox, handle)
    for _ in range(3):
        async with loop:
            await mailbox.send(1)
            with anyio.fail_after(60):
                while loop.outcomes["acknowledged"] == 0 or loop.running:
                    await anyio.sleep(0.001)
        loop.outcomes.clear()


async def test_a_block_that_is_left_at_once():
    loop = MainLoop(InMemoryMailbox(), quick)
    with anyio.fail_after(10):
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

    begun = anyio.Event()

    async def handle(job: int) -> None:
        begun.set()
        await anyio.sleep_forever()

    async with InMemoryMailbox() as mailbox:
        loop = MainLoop(mailbox, handle)
        with anyio.fail_after(10), anyio.CancelScope() as scope:
            async with loop:
                await mailbox.send(1)
                await begun.wait()
                scope.deadline = anyio.current_time() + 0.05
        assert scope.cancelled_caught
        assert not loop.running
        assert loop.outcomes == {"released": 1}
        async with loop:  # and it can be used again
            assert loop.mailbox is mailbox


async def test_what_the_shutdown_of_a_block_raises_comes_out_of_it():
    """Whatever it is, a cancellation too: it is not swallowed where nothing else is left to raise."""

    class Failing(MainLoop):
        async def shutdown(self, *, timeout: float = 30.0) -> bool:
            self.request_shutdown()
            while self.running:
                await anyio.sleep(0.001)
            raise LookupError("shutdown")

    async with InMemoryMailbox() as mailbox:
        loop = Failing(mailbox, quick)
        with pytest.raises(LookupError, match="shutdown"), anyio.fail_after(10):
            async with loop:
                pass


async def test_a_crash_comes_out_of_the_block():
    mailbox = FaultyMailbox()
    mailbox.next("claim", fail(ZeroDivisionError("driver")))
    with pytest.raises(ZeroDivisionError, match="driver"), anyio.fail_after(10):
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
