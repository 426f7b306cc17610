"""A worker that holds what it gets: ``python holder.py URL SECONDS`` prints a line of JSON when a handler begins.

All instants are those of the machine's monotonic clock, so that the lines of two processes can be compared.
"""

from __future__ import annotations

import json
import sys
import time

import anyio

from mainspring import Context, LoopGroup, MainLoop, open_mailbox


async def hold(job: str, ctx: Context) -> None:
    now = time.monotonic()
    message = ctx.message
    line = {"id": message.id, "delivery": message.delivery_count, "leased": message.leased_at or now, "began": now}
    print(json.dumps(line), flush=True)
    await anyio.sleep_forever()


async def main() -> None:
    url, seconds = sys.argv[1], float(sys.argv[2])
    async with open_mailbox(url, body=str) as mailbox:
        loop = MainLoop(mailbox, hold, concurrency=100, visibility_timeout=seconds)
        async with LoopGroup([loop], guardian=False):
            print("ready", flush=True)
            await anyio.sleep_forever()


anyio.run(main)
