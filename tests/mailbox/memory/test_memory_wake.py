"""Many who wait at one in-memory mailbox: nobody sleeps while there is something to do, and nothing is lost."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import anyio
import pytest

from mainspring.mailbox.memory.mailbox import InMemoryMailbox

pytestmark = pytest.mark.anyio

MESSAGES = 600


@pytest.mark.parametrize("entered", [False, True], ids=["unentered", "entered"])
@pytest.mark.parametrize("most", [1, 7])
async def test_producers_consumers_and_cancellations_in_any_order_lose_nothing(entered: bool, most: int) -> None:
    mailbox: InMemoryMailbox[int, Any] = InMemoryMailbox("jobs", body=int)
    done: Counter[int] = Counter()
    rng = random.Random(most)

    async def produce(numbers: range) -> None:
        for number in numbers:
            await mailbox.send(number, delay=rng.choice([0, 0, 0, 0.01]))
            if rng.random() < 0.3:
                await anyio.sleep(rng.choice([0, 0, 0.001]))

    async def consume() -> None:
        while True:
            with anyio.CancelScope() as scope:
                scope.deadline = anyio.current_time() + rng.choice([0, 0.001, 0.005, 5])
                for message in await mailbox.receive(max_messages=most, wait_time_seconds=rng.choice([0.002, 20])):
                    with anyio.CancelScope(shield=True):
                        await settle(message)

    async def settle(message: Any) -> None:
        luck = rng.random()
        if luck < 0.1:
            await message.release()
        elif luck < 0.2:
            await message.nack(delay=rng.choice([0, 0.003]))
        else:
            done[message.body] += 1
            await message.acknowledge()

    async def run() -> None:
        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:
                for _ in range(8):
                    tasks.start_soon(consume)
                async with anyio.create_task_group() as producers:
                    for part in range(4):
                        producers.start_soon(produce, range(part, MESSAGES, 4))
                while (await mailbox.counts()).settled < MESSAGES:
                    await anyio.sleep(0.002)
                tasks.cancel_scope.cancel()

    if entered:
        async with mailbox:
            await run()
    else:
        await run()
    assert done == Counter(range(MESSAGES))


async def test_two_on_their_way_to_waiting_are_both_served() -> None:
    """A wake that comes between a look at the queue and the wait is not lost, nor is the second of two."""
    mailbox: InMemoryMailbox[int, Any] = InMemoryMailbox("jobs", body=int)
    got = []

    async def wait() -> None:
        got.extend(m.body for m in await mailbox.receive(wait_time_seconds=20))

    for turns in range(6):
        with anyio.fail_after(10):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(wait)
                tasks.start_soon(wait)
                for _ in range(turns):
                    await anyio.lowlevel.checkpoint()
                await mailbox.send_many([1, 2])
    assert sorted(got) == [1] * 6 + [2] * 6


@pytest.mark.parametrize("turns", range(5))
async def test_a_native_cancellation_of_who_was_woken_loses_neither_message_nor_wake(
    turns: int, anyio_backend_name: str
) -> None:
    if anyio_backend_name != "asyncio":
        return  # trio has no cancellation but that of scopes
    mailbox: InMemoryMailbox[int, Any] = InMemoryMailbox("jobs", body=int)

    async def wait() -> list[Any]:
        return [m.body for m in await mailbox.receive(wait_time_seconds=20)]

    first = asyncio.ensure_future(wait())
    second = asyncio.ensure_future(wait())
    await anyio.wait_all_tasks_blocked()
    await mailbox.send(1)
    for _ in range(turns):
        await asyncio.sleep(0)
    cancelled = first.cancel()
    if not cancelled:  # it had its message already
        assert await first == [1]
        await mailbox.send(2)
    with anyio.fail_after(10):
        assert await second == ([1] if cancelled else [2])
    if cancelled:
        with pytest.raises(asyncio.CancelledError):
            await first


@pytest.mark.slow
async def test_one_who_waits_for_ever_is_woken_by_a_close_at_any_moment() -> None:
    for turns in range(6):
        mailbox: InMemoryMailbox[int, Any] = InMemoryMailbox("jobs", body=int)
        got = []

        async def wait(mailbox: Any = mailbox, got: list[Any] = got) -> None:
            got.append(await mailbox.receive(wait_time_seconds=float("inf")))

        with anyio.fail_after(10):
            async with anyio.create_task_group() as tasks:
                for _ in range(3):
                    tasks.start_soon(wait)
                await anyio.wait_all_tasks_blocked()
                if turns:
                    await mailbox.send(1)  # one leaves, and comes back to wait
                for _ in range(turns):
                    await anyio.lowlevel.checkpoint()
                await mailbox.close()
        assert sum(map(len, got)) <= 1
        assert len(got) == 3
