"""Bursts of messages, then quiet: somebody waits all the time, so all of them come soon, each once, and none is charged."""

from __future__ import annotations

import random
from contextlib import AsyncExitStack
from functools import partial

import anyio
import pytest

from mainspring.mailbox.message import Counts
from redis_support import LISTENER, line_to, place, unpushed

pytestmark = pytest.mark.anyio

BURSTS = 25


@pytest.fixture
def here(redis_url):
    with place(redis_url, fallback_interval=3_600) as made:  # a call that is missed is not made good
        yield made


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("breaks", [False, True])
async def test_whoever_waits_is_called(here, anyio_backend, seed, breaks):
    """By several processes, whose receives overlap, are cancelled, and want leases of all lengths."""
    rng = random.Random(f"{seed} {breaks}")
    got: list[str] = []
    quiet, free = anyio.Event(), 0

    async def receiver(mailbox) -> None:
        nonlocal free
        free += 1
        while True:
            with anyio.move_on_after(rng.choice([0.003, 0.02, *[3_600] * 6])):
                found = await mailbox.receive(
                    max_messages=rng.choice([1, 4]),
                    visibility_timeout=rng.choice([600, 610, rng.uniform(600, 700)]),
                    wait_time_seconds=rng.choice([0.01, *[3_600] * 3]),
                )
                with anyio.CancelScope(shield=True):
                    for message in found:
                        assert message.attempt == 1
                        if rng.random() < 0.1:
                            await message.release()
                        else:
                            await message.acknowledge()
                            got.append(message.body)
            if free > 1 and rng.random() < 0.6:  # it is busy for long: who waits is not to be helped by it
                free -= 1
                await quiet.wait()
                free += 1

    async def send(mailbox, body: str) -> None:
        await anyio.sleep(rng.choice([0, 0, 0.002]))
        delay = rng.choice([0, 0, 0, 0.01])
        key = rng.choice([None, body[:8]])
        await mailbox.send(body, delay=delay, dedup_key=key, priority=rng.choice([0, 0, 1]))

    async with AsyncExitStack() as stack:
        lines = [await stack.enter_async_context(line_to(here)) for _ in range(rng.choice([1, 2, 3]))]
        mailboxes = [await stack.enter_async_context(line.mailbox()) for line in lines]
        group = await stack.enter_async_context(anyio.create_task_group())
        for mailbox in mailboxes:
            for _ in range(rng.choice([1, 3, 5])):
                group.start_soon(receiver, mailbox)
        sent: list[str] = []
        for burst in range(BURSTS):
            bodies = [
                f"{burst}.{number}.".ljust(rng.choice([0] * 18 + [len(unpushed()), 70_000]), "x")
                for number in range(rng.choice([1, 2, 2, 20]))
            ]
            with anyio.move_on_after(1):  # until all that are free wait for long
                while sum(mailbox.statistics().waiting_receives for mailbox in mailboxes) < free or rng.random() < 0.7:
                    await anyio.sleep(0.005)
            async with anyio.create_task_group() as senders:
                for body in bodies:
                    senders.start_soon(partial(send, rng.choice(mailboxes), body))
                if breaks and rng.random() < 0.2:
                    rng.choice(lines).cut(LISTENER)
            sent += bodies
            with anyio.move_on_after(60):
                while len(got) < len(sent):
                    await anyio.sleep(0.002)
            assert sorted(got) == sorted(sent)
            quiet.set()
            quiet = anyio.Event()
        assert await mailboxes[0].counts() == Counts(settled=len(sent))
        group.cancel_scope.cancel()
