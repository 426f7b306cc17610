"""Claims one message, says when its lease surely counts from, and holds it: python nats_program.py URL NAME LEASE."""

from __future__ import annotations

import sys
import time

import anyio

from mainspring.mailbox.nats.mailbox import NatsMailbox


async def main(url: str, name: str, lease: float) -> None:
    async with NatsMailbox(url, name=name) as box:
        (message,) = await box.receive(visibility_timeout=lease, wait_time_seconds=30)
        assert message.leased_at is not None
        print(time.time() - (anyio.current_time() - message.leased_at), flush=True)
        await anyio.sleep_forever()


anyio.run(main, sys.argv[1], sys.argv[2], float(sys.argv[3]))
