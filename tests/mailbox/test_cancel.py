"""Cancelling a message by its id: wherever it is, and whoever has it."""

from __future__ import annotations

import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from mainspring import LeasePolicy, LoopGroup, MainLoop, ReceiptHandleExpiredError
from mainspring.events import MessageNotAcknowledged
from mainspring.mailbox.backend import Notifications
from mainspring.mailbox.memory.mailbox import InMemoryMailbox
from mainspring.mailbox.message import CancelOutcome
from mainspring.testing import run_virtual
from stores import KINDS, SERVERS, on
from wrapped_backend import WrappedBackend, wrap

pytestmark = pytest.mark.anyio
PROGRAM = Path(__file__).with_name("cancel_program.py")


HERE = on("memory", "sqlite")
EVERYWHERE = on(*KINDS)


@asynccontextmanager
async def opened(store):
    """Two mailbox objects on one queue: that of the worker, and that of the one who cancels."""
    async with store.box() as one, store.box() as two:
        yield one, two


class Work:
    """A handler that runs until it is cancelled, and says what became of it."""

    def __init__(self):
        self.begun = anyio.Event()
        self.ended = ""

    async def __call__(self, job: str) -> None:
        self.begun.set()
        try:
            await anyio.sleep(3_600)
        except anyio.get_cancelled_exc_class():
            self.ended = f"{job} cancelled"
            raise
        self.ended = f"{job} done"


async def until(condition, *, seconds=10):
    with anyio.fail_after(seconds):
        while not condition():
            await anyio.sleep(0.001)


@EVERYWHERE
async def test_the_handler_of_a_cancelled_message_is_cancelled_at_once_and_nothing_is_settled(store):
    work = Work()
    told = []
    async with opened(store) as (mailbox, other):
        loop = MainLoop(mailbox, work, body=str, visibility_timeout=3_600)
        loop.dispatcher.subscribe(MessageNotAcknowledged, told.append)
        message_id = await mailbox.send("job")
        async with loop:
            await work.begun.wait()
            assert await other.cancel(message_id) is CancelOutcome.CANCELLED
            await until(lambda: work.ended and loop.in_flight == 0)
            assert work.ended == "job cancelled"
            assert dict(loop.outcomes) == {"cancelled": 1}
            counts = await other.counts()
            assert (counts.waiting, counts.settled, counts.dead) == (0, 1, 0)
            assert [event.outcome for event in told] == ["cancelled"]
            assert await other.cancel(message_id) is CancelOutcome.UNKNOWN
            message_id = await mailbox.send("next")  # its slot goes on
            await until(lambda: loop.in_flight == 1)
            await mailbox.cancel(message_id)


@HERE
async def test_a_message_in_the_hands_of_a_worker_that_has_not_begun_it_is_never_begun(store):
    work = Work()
    begun = []

    async def handle(job: str) -> None:
        begun.append(job)
        await work(job)

    async with opened(store) as (mailbox, other):
        first, second = await mailbox.send("first"), await mailbox.send("second")
        received = await mailbox.receive(max_messages=2)
        for message in received:
            await message.release()
        async with MainLoop(mailbox, handle, concurrency=1, visibility_timeout=3_600):
            await work.begun.wait()
            assert await other.cancel(second) is CancelOutcome.REMOVED
            assert await other.cancel(first) is CancelOutcome.CANCELLED
            await until(lambda: work.ended)
        assert begun == ["first"]


@HERE
@pytest.mark.parametrize("place", ["pending", "returned", "delayed", "expiring", "delayed and expiring", "prioritised"])
async def test_one_that_waits_is_removed_whatever_way_it_waits(store, place):
    options = {
        "delayed": {"delay": 60},
        "expiring": {"expires_in": 60},
        "delayed and expiring": {"delay": 30, "expires_in": 60},
        "prioritised": {"priority": 7},
    }
    async with opened(store) as (mailbox, other):
        await mailbox.send("before")
        message_id = await mailbox.send("job", dedup_key="key", **options.get(place, {}))
        await mailbox.send("after")
        if place == "returned":
            messages = await mailbox.receive(max_messages=3)
            for message in messages:
                await message.nack()
        assert await other.cancel(message_id) is CancelOutcome.REMOVED
        assert await other.cancel(message_id) is CancelOutcome.UNKNOWN
        counts = await mailbox.counts()
        assert (counts.delayed, counts.pending, counts.settled) == (0, 2, 1)
        for end in ("nack", "acknowledge"):  # each of the two is really leased
            received = await mailbox.receive(max_messages=5)
            assert [message.body for message in received] == ["before", "after"]
            for message in received:
                await getattr(message, end)()
        counts = await mailbox.counts()
        assert (counts.waiting, counts.settled) == (0, 3)
        assert await mailbox.send("job", dedup_key="key") != message_id, "the key is free again"


@HERE
async def test_what_is_settled_or_dead_or_of_another_mailbox_is_unknown_and_stays(store):
    async with opened(store) as (mailbox, _):
        done, dead = await mailbox.send("done"), await mailbox.send("dead")
        messages = await mailbox.receive(max_messages=2)
        await messages[0].acknowledge()
        await messages[1].dead_letter("why")
        async with store.box("-another") as elsewhere:
            foreign = await elsewhere.send("not here")
            for message_id in (done, dead, foreign, "no id at all"):
                assert await mailbox.cancel(message_id) is CancelOutcome.UNKNOWN
            assert (await mailbox.counts()).dead == 1
            assert (await elsewhere.counts()).pending == 1


@on("memory", "sqlite", everywhere=False)
async def test_cancelling_among_many_leaves_the_others_in_order(store):
    async with opened(store) as (mailbox, other):
        ids = [await mailbox.send(number) for number in range(300)]
        for number in range(0, 300, 3):
            assert await other.cancel(ids[number]) is CancelOutcome.REMOVED
        left = []
        while messages := await mailbox.receive(max_messages=50):
            left += [message.body for message in messages]
            for message in messages:
                await message.acknowledge()
        assert left == [number for number in range(300) if number % 3]
        assert (await mailbox.counts()).settled == 300


@HERE
async def test_the_holder_can_do_nothing_any_more(store):
    async with opened(store) as (mailbox, other):
        message_id = await mailbox.send("job")
        (message,) = await mailbox.receive()
        assert await other.cancel(message_id) is CancelOutcome.CANCELLED
        with pytest.raises(ReceiptHandleExpiredError):
            await message.extend_visibility(60)
        with pytest.raises(ReceiptHandleExpiredError):
            await message.save_checkpoint(b"1")
        with pytest.raises(ReceiptHandleExpiredError):
            await message.nack()
        assert (await mailbox.counts()).waiting == 0


async def next_line(program):
    """What it says next, within 10 s."""
    with anyio.fail_after(10):
        return await anyio.to_thread.run_sync(program.stdout.readline, abandon_on_cancel=True)


@pytest.mark.slow
@on("sqlite", *SERVERS, everywhere=False)
async def test_another_process_hears_of_it_promptly(store):
    """The worker holds a lease of an hour: without the bell it would hear of it at the renewal, in 20 minutes."""
    worker = subprocess.Popen([sys.executable, str(PROGRAM), store.url()], stdout=subprocess.PIPE, text=True)
    try:
        async with store.box() as mailbox:
            message_id = await mailbox.send("job")
            assert await next_line(worker) == "begun job\n"
            # All slots are taken: no receive waits, and yet the bell is to stay. In a file it hangs a second longer than one.
            await anyio.sleep(1.5 if store.kind == "sqlite" else 0.1)
            assert await mailbox.cancel(message_id) is CancelOutcome.CANCELLED
            assert await next_line(worker) == "cancelled\n"
    finally:
        worker.kill()
        worker.wait()
        worker.stdout.close()


def test_without_a_channel_the_handler_ends_at_the_next_renewal():
    class Deaf(WrappedBackend):
        notifications = Notifications()  # separate from the backend's

    async def main():
        work = Work()
        mailbox = wrap(InMemoryMailbox(), Deaf)
        loop = MainLoop(mailbox, work, body=str, visibility_timeout=60, lease=LeasePolicy(fraction=1 / 3))
        message_id = await mailbox.send("job")
        async with mailbox, loop:
            await work.begun.wait()
            began = anyio.current_time()
            assert await mailbox.cancel(message_id) is CancelOutcome.CANCELLED
            while not work.ended:
                await anyio.sleep(0.1)
            assert anyio.current_time() - began <= 20.1
        assert dict(loop.outcomes) == {"lost": 1}

    run_virtual(main)


def test_a_group_goes_on_after_its_message_was_cancelled():
    async def main():
        done = []

        async def handle(job: int) -> None:
            if job == 0:
                await anyio.sleep(3_600)
            done.append(job)

        mailbox = InMemoryMailbox(body=int)
        group = LoopGroup([MainLoop(mailbox, handle, concurrency=2)])
        ids = await mailbox.send_many(range(5))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: group.run(install_signals=False, until_empty=True))
            await anyio.sleep(1)
            await mailbox.cancel(ids[0])
        assert sorted(done) == [1, 2, 3, 4]

    run_virtual(main)
