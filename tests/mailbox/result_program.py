"""A worker that acknowledges each message with a result, until a message tells it to stop."""

from __future__ import annotations

import sys

import anyio

from mainspring import open_mailbox
from mainspring.mailbox.message import Ack, Result


async def main(url: str) -> None:
    async with open_mailbox(url) as mailbox:
        last = False
        while not last:
            for message in await mailbox.receive(max_messages=100, wait_time_seconds=30):
                last = last or message.body == "last"
                await message.settle(Ack(result=Result(b'{"state":"done"}', 60)))


anyio.run(main, sys.argv[1])
