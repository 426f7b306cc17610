"""No queue at all: claims and acknowledgements by the hundred in a bare loop, over the client that Mainspring uses too.

The server does the same work for it, by the same function. Two calls are out at a time, so that server and loop work at once.
"""

from __future__ import annotations

from urllib.parse import urlsplit

import anyio
import hiredis
from harness import Peer, main

from mainspring import open_mailbox
from mainspring.mailbox.redis.client import library
from mainspring.mailbox.redis.commands import keys_of

NAME = "bench"
LEASE = 60_000_000


class Bare(Peer):
    packages = ("hiredis",)
    note = "FCALL of the same function, hiredis over anyio, two calls out, uvloop"
    concurrency = (100,)

    async def open(self) -> None:
        self.mailbox = await open_mailbox(self.url, body=str).__aenter__()

    async def close(self) -> None:
        await self.mailbox.__aexit__(None, None, None)

    async def send_many(self, bodies: list[str]) -> None:
        await self.mailbox.send_many(bodies)

    async def work(self, handle, concurrency: int) -> None:
        where = urlsplit(self.url)
        stream = await anyio.connect_tcp(where.hostname, where.port)
        reader = hiredis.Reader(notEnoughData=self)
        function, keys = library()[1], keys_of(NAME)

        async def call(receipts: list[bytes]) -> None:
            acks = ("ack", len(receipts), *receipts) if receipts else ()
            claim = ("claim", concurrency, LEASE, "bare", "", 0)
            await stream.send(hiredis.pack_command(("FCALL", function, len(keys), *keys, *acks, *claim)))

        async def next_reply() -> object:
            while (reply := reader.gets()) is self:
                reader.feed(await stream.receive(262_144))
            return reply

        await stream.send(hiredis.pack_command(("SELECT", where.path.strip("/") or "0")))
        await next_reply()
        await call([])
        await call([])
        while True:
            reply = await next_reply()
            receipts, values, _ = reply[-4]
            await call(receipts)
            for value in values:
                handle(value)


if __name__ == "__main__":
    main(Bare)
