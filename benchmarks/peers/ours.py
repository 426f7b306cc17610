"""Mainspring, on whatever mailbox the URL means."""

from __future__ import annotations

from harness import Peer, main

from mainspring import LoopGroup, MainLoop, open_mailbox


class Ours(Peer):
    packages = ("mainspring", "uvloop")
    note = "MainLoop in a LoopGroup, uvloop"
    concurrency = (100, 300, 1_000)

    async def open(self) -> None:
        self.mailbox = await open_mailbox(self.url, body=str).__aenter__()

    async def close(self) -> None:
        await self.mailbox.__aexit__(None, None, None)

    async def send(self, body: str) -> None:
        await self.mailbox.send(body)

    async def send_many(self, bodies: list[str]) -> None:
        await self.mailbox.send_many(bodies)

    async def work(self, handle, concurrency: int) -> None:
        await self._work(handle, guardian=False, concurrency=concurrency)

    async def work_by_default(self, handle) -> None:
        await self._work(handle, guardian=True)

    async def _work(self, handle, *, guardian: bool, **options: int) -> None:
        async def handler(job: str) -> None:
            handle(job)

        mailbox = open_mailbox(self.url, body=str)
        await LoopGroup([MainLoop(mailbox, handler, **options)], guardian=guardian).run()


if __name__ == "__main__":
    main(Ours)
