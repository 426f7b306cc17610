"""SAQ on Redis: a Worker, as its documentation writes one."""

from __future__ import annotations

from harness import Peer, main
from saq import Queue, Worker


class Saq(Peer):
    packages = ("saq", "redis", "hiredis", "uvloop")
    note = "hiredis, uvloop"
    concurrency = (10, 100)
    default = 10

    async def open(self) -> None:
        self.queue = Queue.from_url(self.url)
        await self.queue.connect()

    async def close(self) -> None:
        await self.queue.disconnect()

    async def send(self, body: str) -> None:
        await self.queue.enqueue("job", body=body)

    async def work(self, handle, concurrency: int) -> None:
        async def job(ctx: dict[str, object], *, body: str) -> None:
            handle(body)

        await self.open()
        await Worker(self.queue, functions=[("job", job)], concurrency=concurrency).start()


if __name__ == "__main__":
    main(Saq)
