"""Mainspring's ``Tasks``, on whatever mailbox the URL means."""

from __future__ import annotations

from harness import Peer, main

from mainspring import LoopGroup, Tasks


class OurTasks(Peer):
    packages = ("mainspring", "uvloop")
    note = "tasks.loop() in a LoopGroup, uvloop"
    concurrency = (100,)
    default = 10

    def _tasks(self, handle=None) -> Tasks:
        tasks = Tasks(self.url)

        @tasks.task
        async def work(body: str) -> None:
            handle(body)

        self.task = work
        return tasks

    async def open(self) -> None:
        self.tasks = await self._tasks().__aenter__()

    async def close(self) -> None:
        await self.tasks.__aexit__(None, None, None)

    async def send(self, body: str) -> None:
        await self.task.send(body)

    async def send_many(self, bodies: list[str]) -> None:
        await self.task.send_many([(body,) for body in bodies])

    async def work(self, handle, concurrency: int) -> None:
        await LoopGroup([self._tasks(handle).loop(concurrency=concurrency)], guardian=False).run()

    async def work_by_default(self, handle) -> None:
        await LoopGroup([self._tasks(handle).loop()]).run()


if __name__ == "__main__":
    main(OurTasks)
