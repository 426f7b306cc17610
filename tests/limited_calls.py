"""Calls of tasks with limits, straight to a mailbox: sent, limited and ended in every way, for the tests of stores."""

from __future__ import annotations

from contextlib import suppress

import anyio

from mainspring import ReceiptHandleExpiredError
from mainspring.mailbox.limiters import Blocks, LimitChange, TaskLimits
from mainspring.mailbox.message import Counts
from mainspring.policies import Rate


async def send(mailbox, *bodies, task="t", key=None, weight=1.0, **options):
    connection = options.pop("connection", None)
    envelopes = [mailbox.prepare(body, **options) for body in bodies]
    for envelope in envelopes:
        envelope.task, envelope.key, envelope.weight = task, key, weight
    if connection is not None:
        return await mailbox.backend.send_within(connection, envelopes)
    return await mailbox.send_prepared(envelopes)


async def limit(mailbox, task="t", **limits):
    await mailbox.backend.change_limits([LimitChange(task, TaskLimits(**limits))])


def random_limits(rng):
    return TaskLimits(
        concurrency=rng.choice([None, None, 1, 3]),
        rate=rng.choice([None, None, Rate(1_000, 1, rng.choice([1, 5]))]),
        key_concurrency=rng.choice([None, 1, 2]),
        key_rate=rng.choice([None, None, Rate(500, 1, 2)]),
        blocks=rng.choice(list(Blocks)),
    )


async def end(message, rng):
    with suppress(ReceiptHandleExpiredError):  # of a lease that was short
        match rng.randrange(5):
            case 0:
                await message.nack(delay=rng.choice([0, 0.01]))
            case 1:
                await message.release()
            case 2:
                await message.dead_letter("no")
            case _:
                await message.acknowledge()


async def drain(mailbox):
    """Do all messages, also the dead letters."""
    with anyio.fail_after(30):
        while (counts := await mailbox.counts()) != Counts(settled=counts.settled):
            await mailbox.replay_dead_letters()
            for message in await mailbox.receive(max_messages=100, wait_time_seconds=0.05):
                await message.acknowledge()
