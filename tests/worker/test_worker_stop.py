"""How a worker is told to end: shutdowns before, at and from inside the work; no message is lost or charged by it."""

from __future__ import annotations

import anyio
import pytest
from anyio import from_thread
from loop_support import quick, sleeping

from mainspring import Context, InMemoryMailbox, MainLoop, Retry
from mainspring.errors import MailboxConnectionError
from mainspring.events import MessageStarted, SettlementFailed
from support import FaultyMailbox, background, fail, hang, record, shielded, slow

pytestmark = pytest.mark.anyio


# ------------------------------------------------------------------------------------------------- before and at the start


async def test_a_shutdown_before_the_start_is_remembered_and_one_run_uses_it_up():
    mailbox = FaultyMailbox()
    await mailbox.send(1)
    loop = MainLoop(mailbox, quick)
    assert await loop.shutdown()
    await loop.run()
    assert mailbox.times("claim") == []
    assert (await mailbox.counts()).pending == 1
    await loop.run(max_iterations=1)
    assert (await mailbox.counts()).settled == 1


async def test_a_shutdown_in_the_same_tick_as_the_start_is_remembered():
    mailbox = FaultyMailbox()
    await mailbox.send(1)
    loop = MainLoop(mailbox, quick, wait_time_seconds=600)
    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(loop.run)
            assert await loop.shutdown()
    assert (await mailbox.counts()).pending == 1


async def test_a_shutdown_in_the_first_tick_of_the_run_hands_the_messages_back():
    mailbox = InMemoryMailbox()
    await mailbox.send_many(range(10))
    loop = MainLoop(mailbox, quick, wait_time_seconds=600, concurrency=10)
    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(loop.run)
            await anyio.lowlevel.checkpoint()
            loop.request_shutdown()
    counts = await mailbox.counts()
    assert counts.in_flight == 0
    assert counts.pending + counts.settled == 10


# ------------------------------------------------------------------------------------------------------------- at work


async def test_a_long_poll_is_interrupted_at_once(virtual_clock):
    loop = MainLoop(InMemoryMailbox(), quick, wait_time_seconds=10_000)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(loop.run)
        await anyio.sleep(5)
        assert await loop.shutdown()
        assert virtual_clock.now == 5
        assert not loop.running


async def test_the_wait_after_a_failed_receive_is_interrupted_at_once(virtual_clock):
    mailbox = FaultyMailbox()
    mailbox.always("claim", fail(MailboxConnectionError("away")))
    loop = MainLoop(mailbox, quick)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(loop.run)
        await anyio.sleep(500)
        assert await loop.shutdown()
        assert virtual_clock.now == 500


async def test_work_in_hand_may_finish(virtual_clock):
    done = []

    async def handle(job: int) -> None:
        await anyio.sleep(job)
        done.append(job)

    mailbox = InMemoryMailbox()
    loop = MainLoop(mailbox, handle, concurrency=3)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(loop.run)
        await mailbox.send_many([10, 20, 29])
        await anyio.sleep(1)
        await mailbox.send(1)  # waits behind the others
        assert await loop.shutdown(timeout=30)
    assert done == [10, 20, 29]
    assert (await mailbox.counts()).pending == 1


async def test_work_that_does_not_finish_is_cancelled_and_goes_back_uncharged_at_once(virtual_clock):
    ends = []

    async def handle(job: int) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            ends.append(anyio.current_time())

    mailbox = InMemoryMailbox()
    loop = MainLoop(mailbox, handle, concurrency=2)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(loop.run)
        await mailbox.send_many([1, 2])
        await anyio.sleep(1)
        assert not await loop.shutdown(timeout=30)
    assert ends == [31, 31]
    assert loop.outcomes == {"released": 2}
    again = await mailbox.receive(max_messages=10)
    assert [(m.body, m.attempt, m.delivery_count) for m in again] == [(1, 1, 2), (2, 1, 2)]
    assert virtual_clock.now == 31


async def test_a_handler_that_ends_well_in_spite_of_its_cancellation_is_done(virtual_clock):
    async def handle(job: int) -> None:
        try:
            await anyio.sleep_forever()
        except anyio.get_cancelled_exc_class():
            if job == 2:
                raise ValueError("cut off") from None

    mailbox = InMemoryMailbox()
    loop = MainLoop(mailbox, handle, concurrency=2)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(loop.run)
        await mailbox.send_many([1, 2])
        await anyio.sleep(1)
        assert not await loop.shutdown(timeout=1)
    assert loop.outcomes == {"acknowledged": 1, "released": 1}  # an error because of the shutdown is not charged


async def test_a_retry_at_the_shutdown_is_the_handlers_choice(virtual_clock):
    async def handle(job: int, ctx: Context) -> None:
        await ctx.wait_shutting_down()

        raise Retry(delay=60, charge=False)

    mailbox = InMemoryMailbox()
    loop = MainLoop(mailbox, handle)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(loop.run)
        await mailbox.send(1)
        await anyio.sleep(1)
        assert await loop.shutdown(timeout=1)
        assert virtual_clock.now == 1
    assert (await mailbox.counts()).delayed == 1


@pytest.mark.parametrize("first", ["asks", "fails and asks"])
async def test_all_messages_of_a_claimed_batch_are_handed_back(virtual_clock, first):
    """The first handler of the batch asks for the shutdown: none of the others may begin, all go back, in their order."""
    begun = []

    async def handle(job: int) -> None:
        begun.append(job)
        loop.request_shutdown()
        if first == "fails and asks":
            raise ValueError

    mailbox = FaultyMailbox()
    loop = MainLoop(mailbox, handle, concurrency=10)
    await mailbox.send_many(range(10))
    await loop.run()
    assert len(begun) == 1
    assert mailbox.most_leased == 10
    assert (await mailbox.counts()).in_flight == 0
    again = await mailbox.receive(max_messages=10)
    assert [m.body for m in again] == list(range(1, 10))
    assert {(m.attempt, m.delivery_count) for m in again} == {(1, 2)}


async def test_what_was_claimed_during_the_shutdown_is_handed_back_unrun(virtual_clock):
    """The claim was under way when the shutdown came: shielded, it brings messages that nobody may begin."""
    mailbox = FaultyMailbox()
    mailbox.always("claim", shielded(slow(2)))
    loop = MainLoop(mailbox, sleeping, concurrency=5)
    started = record(loop, MessageStarted)
    await mailbox.send_many(range(5))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(loop.run)
        await anyio.sleep(1)
        assert await loop.shutdown(timeout=30)
    assert started == []
    assert mailbox.most_leased == 5
    assert mailbox.settlements() == ["Nack"] * 5
    assert loop.outcomes == {"released": 5}


async def test_a_store_that_hangs_when_messages_are_handed_back_delays_the_end_only_for_a_while(virtual_clock):
    mailbox = FaultyMailbox()
    mailbox.always("claim", shielded(slow(2)))
    mailbox.always("settle", hang)
    loop = MainLoop(mailbox, sleeping, concurrency=5)
    failed = record(loop, SettlementFailed)
    await mailbox.send_many(range(5))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(loop.run)
        await anyio.sleep(1)
        assert await loop.shutdown(timeout=30)
    assert virtual_clock.now == 7  # five seconds for all of them together
    assert len(failed) == 5
    assert loop.in_flight == 0
    assert loop.outcomes == {"lost": 5}


# ------------------------------------------------------------------------------------------------- from inside a handler


async def test_a_shutdown_from_inside_a_handler_only_asks():
    order = []

    async def handle(job: int) -> None:
        assert await loop.shutdown()
        order.append("asked")
        await anyio.sleep(0.01)
        order.append("finished")

    mailbox = InMemoryMailbox()
    await mailbox.send_many([1, 2])
    loop = MainLoop(mailbox, handle)
    with anyio.fail_after(10):
        await loop.run()
    assert order == ["asked", "finished"]
    assert (await mailbox.counts()).pending == 1


async def test_a_shutdown_from_a_handlers_thread_only_asks():
    def handle(job: int) -> None:
        assert from_thread.run(loop.shutdown)

    mailbox = InMemoryMailbox()
    await mailbox.send(1)
    loop = MainLoop(mailbox, handle)
    with anyio.fail_after(10):
        await loop.run()
    assert loop.outcomes == {"acknowledged": 1}


async def test_a_shutdown_from_a_task_of_the_handler_only_asks():
    async def handle(job: int) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(loop.shutdown)

    mailbox = InMemoryMailbox()
    await mailbox.send(1)
    loop = MainLoop(mailbox, handle)
    with anyio.fail_after(10):
        await loop.run()
    assert loop.outcomes == {"acknowledged": 1}


async def test_a_handler_of_another_loop_does_wait(virtual_clock):
    async def handle(job: int) -> None:
        assert await other.shutdown()
        assert not other.running

    async def slow_handle(job: int) -> None:
        await anyio.sleep(10)

    others, mailbox = InMemoryMailbox(), InMemoryMailbox()
    other = MainLoop(others, slow_handle)
    async with background(other), background(MainLoop(mailbox, handle)) as loop:
        await others.send(1)
        await anyio.sleep(1)
        await mailbox.send(1)
        await anyio.sleep(20)
        assert loop.outcomes == {"acknowledged": 1}


# ------------------------------------------------------------------------------------------- cancellation that is swallowed


class Stubborn:
    """A handler that swallows its cancellation and waits on, for a while; and how often it was cancelled by then."""

    def __init__(self, way_on) -> None:
        self.caught = 0
        self.begun = anyio.Event()
        self.ended = False
        self._way_on = way_on

    async def __call__(self, job: int) -> None:
        give_up = float("inf")
        self.begun.set()
        while anyio.current_time() < give_up and self.caught < 5_000:
            try:
                await self._way_on()
            except anyio.get_cancelled_exc_class():
                self.caught += 1
                give_up = min(give_up, anyio.current_time() + 0.1)
        self.ended = True


async def in_a_scope_of_its_own() -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(anyio.lowlevel.checkpoint)
        with anyio.CancelScope():
            await anyio.sleep_forever()


async def for_a_lock() -> None:
    await anyio.Lock().acquire()  # looks for a cancellation by itself
    await anyio.sleep_forever()


@pytest.mark.parametrize(
    ("by", "way_on"),
    [
        ("its timeout", anyio.sleep_forever),
        ("its timeout", in_a_scope_of_its_own),
        ("its timeout", for_a_lock),
        ("a shutdown", anyio.sleep_forever),
        ("the end of the loop's scope", anyio.sleep_forever),
    ],
)
async def test_a_handler_that_swallows_its_cancellation_is_cancelled_again_ever_more_slowly(by, way_on):
    """anyio cancels each `await` of cancelled code at once, so that this would keep a core busy."""
    handler = Stubborn(way_on)
    loop = MainLoop(InMemoryMailbox(body=int), handler, handler_timeout=0.01 if by == "its timeout" else None)
    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(loop.run)
            await loop.mailbox.send(1)
            await handler.begun.wait()
            if by == "a shutdown":
                await loop.shutdown(timeout=0)
            elif by == "its timeout":
                while not handler.ended:
                    await anyio.sleep(0.01)
            tasks.cancel_scope.cancel()
    assert handler.ended
    assert 1 < handler.caught < 60  # twenty at once, then one after 1, 2, 4 … ms


async def test_clean_up_that_waits_under_a_shield_is_not_slowed(virtual_clock):
    steps = []

    async def handle(job: int) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            for _ in range(100):
                with anyio.move_on_after(0.001, shield=True):  # each ends by a cancellation of its own
                    await anyio.sleep(0.0005)
                    await anyio.sleep_forever()
            steps.append(anyio.current_time())

    mailbox = InMemoryMailbox(body=int)
    loop = MainLoop(mailbox, handle)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(loop.run)
        await mailbox.send(1)
        await anyio.sleep(1)
        assert not await loop.shutdown(timeout=0)
    assert steps == [pytest.approx(1.1)]
