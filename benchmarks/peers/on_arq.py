"""arq on Redis: a Worker, as its documentation writes one."""

from __future__ import annotations

from arq import create_pool, func
from arq.connections import RedisSettings
from arq.worker import Worker
from harness import Peer, main


class Arq(Peer):
    packages = ("arq", "redis", "hiredis", "uvloop")
    note = "hiredis, uvloop, no results kept, poll_delay 0.01"
    concurrency = (10, 100)
    default = 10

    async def open(self) -> None:
        self.pool = await create_pool(RedisSettings.from_dsn(self.url))

    async def close(self) -> None:
        await self.pool.aclose()

    async def send(self, body: str) -> None:
        await self.pool.enqueue_job("job", body)

    async def work(self, handle, concurrency: int) -> None:
        async def job(ctx: dict[str, object], body: str) -> None:
            handle(body)

        functions = [func(job, name="job", keep_result=0)]
        settings = RedisSettings.from_dsn(self.url)
        worker = Worker(functions, redis_settings=settings, max_jobs=concurrency, poll_delay=0.01, log_results=False)
        await worker.async_run()

    async def work_by_default(self, handle) -> None:
        async def job(ctx: dict[str, object], body: str) -> None:
            handle(body)

        await Worker([func(job, name="job")], redis_settings=RedisSettings.from_dsn(self.url)).async_run()


if __name__ == "__main__":
    main(Arq)
