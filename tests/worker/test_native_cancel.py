"""asyncio's own cancellation, of a task of the loop or of what it waits for: no cancel scope asked for it, and nothing may end
by it without a word. (Trio has none.)"""

from __future__ import annotations

import asyncio
import gc
import inspect
from dataclasses import replace
from random import Random
from typing import Any

import anyio
import pytest
from loop_support import EXACT, quick

from mainspring import DeadLetterPolicy, MainLoop, TaskExitError
from mainspring.events import (
    LeaseLost,
    LeaseRenewalFailed,
    MessageFinished,
    MessageNotAcknowledged,
    ReceiveFailed,
    SettlementFailed,
)
from mainspring.mailbox.memory.mailbox import MemoryBackend
from support import FaultyMailbox, background, hang, record, settled, slow, work

pytestmark = pytest.mark.anyio

LOOPS = [("asyncio", {"use_uvloop": False}), ("asyncio", {"use_uvloop": True})]


@pytest.fixture(params=LOOPS, ids=["asyncio", "uvloop"])
def anyio_backend(request):
    return request.param


class Waiting(FaultyMailbox):
    """Its settlements give others a turn, as those of a server do."""

    def __init__(self) -> None:
        super().__init__(joins=True)

    async def through(self, call: str, argument: Any, hook: Any) -> Any:
        if call in ("settle", "join"):
            await anyio.lowlevel.checkpoint()
        return await super().through(call, argument, hook)


class Single(Waiting):
    capabilities = replace(MemoryBackend.capabilities, joined_acks=False)


@pytest.fixture(params=[Waiting, Single])
def mailbox(request):
    return request.param()


def tasks_of(part: str) -> list[asyncio.Task[Any]]:
    return [task for task in asyncio.all_tasks() if part in task.get_name()]


async def own_cancel(hook: Any) -> Any:
    """The driver waits for a future that it has cancelled, as when its connection broke."""
    future = asyncio.get_running_loop().create_future()
    future.cancel()
    await future


@pytest.mark.parametrize("times", [1, 3])
async def test_a_slot_that_is_cancelled_while_it_waits_for_work_goes_on(mailbox, times):
    slots: set[asyncio.Task[Any]] = set()

    async def handle(job: int) -> None:
        slots.add(asyncio.current_task())
        await asyncio.sleep(0)

    loop = MainLoop(mailbox, handle, concurrency=2)
    async with background(loop):
        for _ in range(3):
            await mailbox.send_many(range(4))
            await settled(mailbox)
            for slot in slots:
                for _ in range(times):
                    slot.cancel()
            await asyncio.sleep(0.01)
            assert len(slots) >= 2
            assert not any(slot.cancelling() for slot in slots)
    assert loop.outcomes == {"acknowledged": 12}


async def test_a_handler_that_ends_with_a_cancellation_of_its_task_is_done_and_so_are_its_neighbours(mailbox):
    async def handle(job: int) -> None:
        if job % 5 == 2:
            asyncio.current_task().cancel()

    loop = MainLoop(mailbox, handle, concurrency=10)
    trouble = record(loop, SettlementFailed, MessageNotAcknowledged)
    await mailbox.send_many(range(30))
    async with background(loop):
        await settled(mailbox)
    assert loop.outcomes == {"acknowledged": 30}
    assert trouble == []


@pytest.mark.parametrize("swallow", [False, True])
async def test_a_cancellation_that_a_handler_swallows_ends_nothing(mailbox, swallow):
    async def handle(job: int) -> None:
        asyncio.current_task().cancel()
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            if not swallow:
                raise ValueError(job) from None

    loop = MainLoop(mailbox, handle, concurrency=2, dead_letter=DeadLetterPolicy(max_attempts=1))
    await mailbox.send_many(range(10))
    async with background(loop):
        await settled(mailbox)
    assert loop.outcomes == {"acknowledged" if swallow else "dead_lettered": 10}


@pytest.mark.own_time(2)  # a lease ends
@pytest.mark.parametrize("messages", [1, 4])
@pytest.mark.slow
async def test_a_settlement_that_is_cut_off_is_told_and_the_loop_goes_on(mailbox, messages):
    """It may have been written or not: the message comes again when its lease ends."""
    slots: set[asyncio.Task[Any]] = set()

    async def handle(job: int) -> None:
        slots.add(asyncio.current_task())

    mailbox.always("join", hang)
    mailbox.always("settle", hang)
    loop = MainLoop(mailbox, handle, concurrency=4, visibility_timeout=1)
    failed = record(loop, SettlementFailed)
    await mailbox.send_many(range(messages))
    async with background(loop):
        while sum(argument if call == "join" else call == "settle" for _, call, argument in mailbox.calls) < messages:
            await asyncio.sleep(0)
        for call in ("join", "settle"):
            mailbox.always(call, work)
        for slot in slots:
            slot.cancel()
        await settled(mailbox)
        assert loop.running
        await mailbox.send(5)
        await settled(mailbox)
    assert len(failed) == loop.outcomes["lost"] == messages
    assert loop.outcomes["acknowledged"] == messages + 1


async def test_a_late_settlement_that_is_cut_off_ends_nothing_either(mailbox):
    """That of a handler that was cancelled, which is made outside of the scope that has cancelled it."""
    slots: list[asyncio.Task[Any]] = []

    async def handle(job: int) -> None:
        slots.append(asyncio.current_task())
        if len(slots) == 1:
            await asyncio.sleep(10)

    mailbox.next("settle", slow(60))
    loop = MainLoop(mailbox, handle)
    async with background(loop):
        await mailbox.send(1)
        while not slots:
            await asyncio.sleep(0)
        loop.runs[0].stall(ValueError("no sign of life"))
        while not mailbox.times("settle"):
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        slots[0].cancel()
        await mailbox.send(2)
        async with asyncio.timeout(5):
            while not loop.outcomes["acknowledged"]:
                await asyncio.sleep(0.001)
        assert loop.running
    assert loop.outcomes == {"lost": 1, "acknowledged": 1}


@pytest.mark.parametrize("first", ["scope", "task"])
async def test_a_cancellation_by_the_engine_and_a_native_one_at_once_are_the_engines(first):
    """anyio lets such a one out of its scope."""
    tasks: list[asyncio.Task[Any]] = []

    async def handle(job: int) -> None:
        tasks.append(asyncio.current_task())
        if job == 1:
            await asyncio.sleep(10)

    mailbox = Waiting()
    loop = MainLoop(mailbox, handle)
    async with background(loop):
        await mailbox.send(1)
        while not tasks:
            await asyncio.sleep(0)
        (run,) = loop.runs
        if first == "task":
            tasks[0].cancel()
        run.stall(ValueError("no sign of life"))
        tasks[0].cancel()
        while not loop.outcomes:
            await asyncio.sleep(0)
        await mailbox.send(2)
        while loop.outcomes["acknowledged"] < 1:
            await asyncio.sleep(0.001)
        assert loop.running
    assert loop.outcomes == {"retried": 1, "acknowledged": 1}


async def test_a_receive_that_cancels_itself_has_failed_and_is_tried_again(mailbox):
    mailbox.next("claim", own_cancel, own_cancel)
    loop = MainLoop(mailbox, quick)
    failed = record(loop, ReceiveFailed)
    await mailbox.send(1)
    async with background(loop):
        await settled(mailbox)
    assert len(failed) == 2
    assert "a spurious cancellation" in failed[0].error


async def test_a_receiver_that_is_cancelled_receives_again(mailbox):
    loop = MainLoop(mailbox, quick)
    async with background(loop):
        for job in range(3):
            await anyio.sleep(0.01)
            for task in tasks_of("receiver"):
                task.cancel()
            await mailbox.send(job)
            await settled(mailbox)
    assert loop.outcomes == {"acknowledged": 3}


async def test_a_handler_that_ends_with_a_cancellation_while_a_receive_is_being_cancelled_has_failed():
    """The task around its own is then being cancelled too, as it seems."""
    mailbox = FaultyMailbox()
    begun, leaving, ended = anyio.Event(), anyio.Event(), anyio.Event()

    async def lingering(hook: Any) -> Any:
        try:
            await hook()
        finally:
            leaving.set()
            with anyio.CancelScope(shield=True):
                await ended.wait()

    async def handle(job: int) -> None:
        mailbox.always("claim", lingering)
        begun.set()
        await leaving.wait()
        await own_cancel(None)

    loop = MainLoop(mailbox, handle, concurrency=2)
    loop.dispatcher.subscribe(MessageFinished, lambda _: ended.set())
    await mailbox.send(1)
    async with background(loop):
        await begun.wait()
        await anyio.wait_all_tasks_blocked()
    assert loop.outcomes == {"retried": 1}


@pytest.mark.slow
async def test_a_renewal_that_cancels_itself_has_failed_and_is_tried_again():
    async def handle(job: int) -> None:
        while len(mailbox.times("extend")) < 2:
            await anyio.sleep(0.05)

    mailbox = FaultyMailbox()
    mailbox.next("extend", own_cancel)
    loop = MainLoop(mailbox, handle, visibility_timeout=6)
    failed, lost = record(loop, LeaseRenewalFailed), record(loop, LeaseLost)
    await mailbox.send(1)
    async with background(loop):
        await settled(mailbox)
    assert [type(event) for event in failed] == [LeaseRenewalFailed]
    assert lost == []
    assert loop.outcomes == {"acknowledged": 1}


async def test_a_loop_whose_event_loop_ends_gives_its_messages_back_uncharged():
    """Then every task of it is cancelled natively, at once."""

    async def handle(job: int) -> None:
        await asyncio.sleep(60)

    mailbox = Waiting()
    loop = MainLoop(mailbox, handle, concurrency=3)
    await mailbox.send_many(range(3))
    running = asyncio.ensure_future(loop.run())
    while loop.in_flight < 3:
        await asyncio.sleep(0)
    await asyncio.sleep(0.01)
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        if running in (task, *loop_owners(task)):
            task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert loop.outcomes == {"released": 3}
    again = await mailbox.receive(max_messages=3)
    assert [message.attempt for message in again] == [1, 1, 1]


def loop_owners(task: asyncio.Task[Any]) -> list[asyncio.Task[Any]]:
    """The tasks around one that anyio started."""
    infos = {info.id: info for info in anyio.get_running_tasks()}
    by_id = {id(one): one for one in asyncio.all_tasks()}
    owners, parent = [], infos[id(task)].parent_id if id(task) in infos else None
    while parent in by_id:
        owners.append(by_id[parent])
        parent = infos[parent].parent_id if parent in infos else None
    return owners


def has_begun(task: asyncio.Task[Any]) -> bool:
    return inspect.getcoroutinestate(task.get_coro()) != inspect.CORO_CREATED


@pytest.mark.filterwarnings("ignore:coroutine:RuntimeWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("part", ["slot 1", "receiver", "leases"])
async def test_one_that_is_cancelled_before_it_began_ends_the_loop_with_an_error(part, mailbox):
    await mailbox.send(1)
    running = asyncio.ensure_future(MainLoop(mailbox, quick).run())
    async with asyncio.timeout(5):
        while not (found := tasks_of(part)):
            await asyncio.sleep(0)
    assert not any(has_begun(task) for task in found)
    found[0].cancel()
    with pytest.raises(TaskExitError, match="by itself"):
        await running
    del found
    gc.collect()  # asyncio has never run its coroutine, and this test shall hear of that


@pytest.mark.own_time(1)
@pytest.mark.parametrize("seed", range(30))
async def test_whatever_task_of_a_loop_is_cancelled_it_goes_on_or_says_why_it_ends(seed, mailbox):
    rng = Random(seed)

    async def handle(job: int) -> None:
        if job % 3:
            await asyncio.sleep(0.002 * (job % 3))

    loop = MainLoop(mailbox, handle, concurrency=3, visibility_timeout=1, retry=EXACT)
    ended = "by no error"

    async def run() -> None:
        nonlocal ended
        try:
            await loop.run()
        except TaskExitError as error:
            ended = str(error)

    running = asyncio.ensure_future(run())
    for job in range(60):
        await mailbox.send(job)
        for _ in range(rng.randrange(4)):
            await asyncio.sleep(0)
        own = [task for task in asyncio.all_tasks() if running in loop_owners(task) and has_begun(task)]
        if own and rng.random() < 0.3:
            rng.choice(sorted(own, key=lambda task: task.get_name())).cancel()
        if running.done():
            break
    await asyncio.sleep(0.05)
    if running.done():
        assert "by itself" in ended
        return
    async with asyncio.timeout(20):
        while await mailbox.approximate_count():
            await asyncio.sleep(0.01)
    assert await loop.shutdown(timeout=5)
    await running
    assert loop.in_flight == 0
