"""procrastinate on PostgreSQL: its async connector with a pool, and a worker that deletes what it has done."""

from __future__ import annotations

import asyncio

import procrastinate
from harness import Peer, main

POOL = 20


class OnProcrastinate(Peer):
    packages = ("procrastinate", "psycopg", "uvloop")
    note = "psycopg with its C extension, a pool, `delete_jobs=successful`, uvloop"
    concurrency = (10, 100)

    def app(self) -> procrastinate.App:
        return procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=self.url, min_size=4, max_size=POOL))

    async def open(self) -> None:
        app = self.app()

        @app.task(name="job")
        async def job(body: str) -> None:
            """Sent here, done elsewhere."""

        self.job = job
        self.opened = await app.open_async().__aenter__()
        if not await app.check_connection_async():
            await app.schema_manager.apply_schema_async()

    async def close(self) -> None:
        await self.opened.close_async()

    async def send(self, body: str) -> None:
        await self.job.defer_async(body=body)

    async def send_many(self, bodies: list[str]) -> None:
        await self.job.batch_defer_async(*[{"body": body} for body in bodies])

    async def work(self, handle, concurrency: int) -> None:
        app = self.app()

        @app.task(name="job")
        async def job(body: str) -> None:
            handle(body)

        async with app.open_async():
            while not await app.check_connection_async():  # those who send make the schema
                await asyncio.sleep(0.1)
            await app.run_worker_async(concurrency=concurrency, delete_jobs="successful")

    async def work_by_default(self, handle) -> None:
        app = self.app()

        @app.task(name="job")
        async def job(body: str) -> None:
            handle(body)

        async with app.open_async():
            await app.run_worker_async()


if __name__ == "__main__":
    main(OnProcrastinate)
