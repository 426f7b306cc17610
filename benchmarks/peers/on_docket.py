"""docket (pydocket) on Redis: a Worker, as its documentation writes one."""

from __future__ import annotations

from datetime import timedelta

from docket import Docket, Worker
from harness import Peer, main


async def job(body: str) -> None:
    job.handle(body)


class OnDocket(Peer):
    packages = ("pydocket", "redis", "hiredis", "uvloop")
    note = "hiredis, uvloop, nothing kept of what is done, minimum_check_interval 5 ms"
    concurrency = (10, 50)
    default = 10

    def _docket(self) -> Docket:
        return Docket(name="bench", url=self.url, execution_ttl=timedelta(0))

    async def open(self) -> None:
        self.docket = await self._docket().__aenter__()
        self.docket.register(job)

    async def close(self) -> None:
        await self.docket.__aexit__(None, None, None)

    async def send(self, body: str) -> None:
        await self.docket.add(job)(body)

    async def send_many(self, bodies: list[str]) -> None:
        await self.docket.add_many([self.docket.call(job)(body) for body in bodies])

    async def work(self, handle, concurrency: int) -> None:
        job.handle = handle
        async with self._docket() as docket:
            docket.register(job)
            async with Worker(
                docket, concurrency=concurrency, minimum_check_interval=timedelta(milliseconds=5)
            ) as worker:
                await worker.run_forever()

    async def work_by_default(self, handle) -> None:
        job.handle = handle
        async with Docket(name="bench", url=self.url) as docket:
            docket.register(job)
            async with Worker(docket) as worker:
                await worker.run_forever()


if __name__ == "__main__":
    main(OnDocket)
