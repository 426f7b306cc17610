"""What the tests of loops share: handlers that do nothing, or take their time, and the trouble of a store."""

from __future__ import annotations

import anyio

from mainspring import MailboxConnectionError, RetryPolicy

EXACT = RetryPolicy(initial_delay=1, max_delay=300, factor=2, jitter="none")
DOWN = MailboxConnectionError("the store is away")


async def quick(job: int) -> None: ...


async def sleeping(job: int) -> None:
    await anyio.sleep_forever()


def sleeper(seconds, log=None):
    """A handler that sleeps, and notes when it began and when it ended."""

    async def handle(job: int) -> None:
        began = anyio.current_time()
        try:
            await anyio.sleep(seconds)
        finally:
            if log is not None:
                log.append((began, anyio.current_time()))

    return handle
