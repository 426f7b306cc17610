"""What comes late on NATS: a receiver that stood still while it waited does not take what another one has by now."""

from __future__ import annotations

import anyio
import pytest

from mainspring.mailbox.message import Counts
from nats_support import ON_ASYNCIO, place

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.parametrize("anyio_backend", ON_ASYNCIO, ids=("asyncio", "uvloop")),
]
LEASE = 1.0


async def test_what_came_while_its_receiver_stood_still_is_the_next_ones(nats_url, anyio_backend, monkeypatch):
    taken = anyio.Event()
    async with place(nats_url) as here, here.box(ack_wait=LEASE) as late, here.box() as other:
        pull = late._claims._pull

        async def stand_still(limit, wait):
            messages = await pull(limit, wait)
            if messages:
                await taken.wait()
            return messages

        monkeypatch.setattr(late._claims, "_pull", stand_still)
        got = []

        async def wait():
            got.extend(await late.receive(visibility_timeout=LEASE, wait_time_seconds=2))

        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(wait)
                await anyio.wait_all_tasks_blocked()
                await other.send("x")
                await anyio.sleep(LEASE / 2)  # it has come to the one who waited first
                (message,) = await other.receive(visibility_timeout=60, wait_time_seconds=30)
                taken.set()
        assert got == []
        await message.acknowledge()
        assert await other.counts() == Counts(settled=1)
