"""PgQueuer on PostgreSQL, with the driver and the settings that its documentation gives as the fastest; jobs are durable."""

from __future__ import annotations

import asyncio

import asyncpg
from harness import Peer, main
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgDriver, AsyncpgPoolDriver
from pgqueuer.queries import Queries

POOL = 20
BATCH = 100


class OnPgQueuer(Peer):
    packages = ("pgqueuer", "asyncpg", "uvloop")
    note = "asyncpg (for senders a pool of 20), `pgq autovac`, uvloop; up to 5 consumers in the process, batches of 100 or more"
    concurrency = (100, 500, 1_000)
    default = 10

    async def open(self) -> None:
        self.pool = await asyncpg.create_pool(self.url, min_size=POOL, max_size=POOL)
        self.queries = Queries(AsyncpgPoolDriver(self.pool))
        if not await self.queries.schema_is_installed():
            await self.queries.install()
            await self.queries.optimize_autovacuum()

    async def close(self) -> None:
        await self.pool.close()

    async def send(self, body: str) -> None:
        await self.queries.enqueue("job", body.encode())

    async def send_many(self, bodies: list[str]) -> None:
        number = len(bodies)
        await self.queries.enqueue(["job"] * number, [body.encode() for body in bodies], [0] * number)

    async def work(self, handle, concurrency: int) -> None:
        async def job(job) -> None:
            handle(job.payload.decode())

        first = AsyncpgDriver(await asyncpg.connect(self.url))
        while not await Queries(first).schema_is_installed():  # by those who send
            await asyncio.sleep(0.1)
        number = min(concurrency // BATCH, 5)
        running = []
        for _ in range(number):
            consumer = PgQueuer(AsyncpgDriver(await asyncpg.connect(self.url)))
            consumer.entrypoint("job", accepts_context=False)(job)
            running.append(consumer.run(batch_size=concurrency // number))
        await asyncio.gather(*running)

    async def work_by_default(self, handle) -> None:
        consumer = PgQueuer(AsyncpgDriver(await asyncpg.connect(self.url)))

        @consumer.entrypoint("job")
        async def job(job) -> None:
            handle(job.payload.decode())

        await consumer.run()


if __name__ == "__main__":
    main(OnPgQueuer)
