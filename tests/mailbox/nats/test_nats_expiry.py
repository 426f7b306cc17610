"""A message on NATS expires, whatever moved it as its time came."""

from __future__ import annotations

from contextlib import suppress

import anyio
import pytest

from mainspring.errors import ReceiptHandleExpiredError
from mainspring.mailbox.message import Counts
from nats_support import one

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.loops("asyncio", "uvloop"),
]
LIFE = 0.4
PATIENCE = 10.0
"""Seconds within which an expired message is dead."""


async def dies(box):
    """Wait until the only message is a dead letter."""
    counts = await box.counts()
    with anyio.move_on_after(PATIENCE):
        while counts != Counts(dead=1):
            await anyio.sleep(0.05)
            counts = await box.counts()
    assert counts == Counts(dead=1)


@pytest.mark.slow
async def test_a_message_that_a_cancelled_receive_puts_back_past_its_expiry_dies(here):
    """The receive had it when the scheduler came, so that it was in flight then."""
    line, names = await here.line(), here.names()
    async with here.box(over=line) as box, here.box() as other:
        came = line.hold_all(lambda frame: frame.verb == b"MSG" and frame.subject.startswith(names.to_queue), count=1)
        put_back = line.hold(f"{names.to_queue}*")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(one, box)
            await other.send("x", expires_in=LIFE)
            await came.full()
            tasks.cancel_scope.cancel()
            came.open()
            with anyio.CancelScope(shield=True):
                await put_back.full()
                await anyio.sleep(LIFE + 0.3)
                put_back.open()
        await dies(other)


@pytest.mark.parametrize("delay", [0, 0.3])
@pytest.mark.slow
async def test_a_message_that_is_nacked_as_it_expires_dies(here, delay):
    line, names = await here.line(), here.names()
    async with here.box(over=line) as box, here.box() as other:
        await other.send("x", expires_in=LIFE)
        held = await one(box)
        nack = line.hold(f"{names.to_delayed if delay else names.to_queue}*")

        async def give_back():
            with suppress(ReceiptHandleExpiredError):
                await held.nack(delay=delay)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(give_back)
            await nack.full()
            await anyio.sleep(LIFE + 0.3)
            nack.open()
        await dies(other)


@pytest.mark.slow
async def test_a_message_in_flight_outlives_its_expiry(here):
    """The scheduler looks for it again and again, and leaves it to its worker."""
    async with here.box() as box:
        await box.send("x", expires_in=LIFE)
        held = await one(box)
        await anyio.sleep(2 * LIFE)
        assert await box.counts() == Counts(in_flight=1)
        await held.acknowledge()
        assert await box.counts() == Counts(settled=1)
        with anyio.fail_after(PATIENCE):  # its note goes, too
            while (await here.server.state(here.names().expiries))["messages"]:
                await anyio.sleep(0.05)
