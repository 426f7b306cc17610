"""FastStream on a Redis list: a message is popped before it is handled, and so lost with the worker."""

from __future__ import annotations

import asyncio

from faststream.redis import RedisBroker
from harness import Peer, main


class FastStreamRedis(Peer):
    packages = ("faststream", "redis", "hiredis", "uvloop")
    note = "list (popped, at most once), hiredis, uvloop, no log of each message"
    concurrency = (1, 10, 100)

    async def open(self) -> None:
        self.broker = RedisBroker(self.url, logger=None)
        await self.broker.connect()

    async def close(self) -> None:
        await self.broker.stop()

    async def send(self, body: str) -> None:
        await self.broker.publish(body, list="bench")

    async def send_many(self, bodies: list[str]) -> None:
        await self.broker.publish_batch(*bodies, list="bench")

    async def work(self, handle, concurrency: int) -> None:
        broker = RedisBroker(self.url, logger=None)
        workers = {"max_workers": concurrency} if concurrency > 1 else {}

        @broker.subscriber(list="bench", **workers)
        async def job(body: str) -> None:
            handle(body)

        await broker.start()
        await asyncio.Event().wait()


if __name__ == "__main__":
    main(FastStreamRedis)
