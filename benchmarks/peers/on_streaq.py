"""streaQ on Redis: tasks of a Worker, as its documentation writes them."""

from __future__ import annotations

from harness import Peer, main
from streaq import Worker


class Streaq(Peer):
    packages = ("streaq", "coredis", "hiredis", "uvloop")
    note = "hiredis, uvloop, silent, no results kept"
    concurrency = (16, 100)
    default = 16

    def _worker(self, handle, concurrency: int = 16, **options):
        worker = Worker(redis_url=self.url, concurrency=concurrency, handle_signals=False)

        @worker.task(silent=True, name="job", **options)
        async def job(body: str) -> None:
            handle(body)

        return worker, job

    async def open(self) -> None:
        self.worker, self.job = self._worker(None, ttl=0)
        await self.worker.__aenter__()

    async def close(self) -> None:
        await self.worker.__aexit__(None, None, None)

    async def send(self, body: str) -> None:
        await self.job.enqueue(body)

    async def send_many(self, bodies: list[str]) -> None:
        await self.worker.enqueue_many([self.job.enqueue(body) for body in bodies])

    async def work(self, handle, concurrency: int) -> None:
        worker, _ = self._worker(handle, concurrency, ttl=0)
        await worker.run_async()

    async def work_by_default(self, handle) -> None:
        worker, _ = self._worker(handle)
        await worker.run_async()


if __name__ == "__main__":
    main(Streaq)
