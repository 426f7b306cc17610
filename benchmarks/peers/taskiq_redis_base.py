"""taskiq on Redis, on the broker that a subclass names."""

from __future__ import annotations

from harness import Peer
from taskiq.api import run_receiver_task


class Taskiq(Peer):
    packages = ("taskiq", "taskiq-redis", "redis", "hiredis", "uvloop")
    concurrency = (100, 1_000)
    default = 100

    def broker(self, concurrency: int):
        raise NotImplementedError

    def _task(self, handle, concurrency: int):
        broker = self.broker(concurrency)

        @broker.task(task_name="job")
        async def job(body: str) -> None:
            handle(body)

        return broker, job

    async def open(self) -> None:
        self.sending, self.job = self._task(None, 100)
        await self.sending.startup()

    async def close(self) -> None:
        await self.sending.shutdown()

    async def send(self, body: str) -> None:
        await self.job.kiq(body)

    async def work(self, handle, concurrency: int) -> None:
        broker, _ = self._task(handle, concurrency)
        await run_receiver_task(
            broker, run_startup=True, validate_params=False, max_async_tasks=concurrency, max_prefetch=concurrency
        )

    async def work_by_default(self, handle) -> None:
        broker, _ = self._task(handle, self.default)
        await run_receiver_task(broker, run_startup=True, max_async_tasks=self.default)
