"""A worker whose one handler runs until it is cancelled; it ends when it was."""

from __future__ import annotations

import sys

import anyio

from mainspring import MainLoop, open_mailbox


async def handle(job: str) -> None:
    print("begun", job, flush=True)
    await anyio.sleep(3_600)


async def main(url: str) -> None:
    async with open_mailbox(url) as mailbox:
        loop = MainLoop(mailbox, handle, visibility_timeout=3_600)
        async with loop:
            while not loop.outcomes:
                await anyio.sleep(0.01)
            print(*loop.outcomes, flush=True)


anyio.run(main, sys.argv[1])
