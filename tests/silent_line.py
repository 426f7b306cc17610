"""A way to a server on which a test can stop, hold and end what passes, without a word to either end."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import anyio

if TYPE_CHECKING:
    from anyio.abc import TaskStatus

PORTS = {"nats": 4222, "redis": 6379, "postgresql": 5432}


class Valve:
    """Holds what passes one way. ``passed`` counts the bytes that have gone on."""

    def __init__(self) -> None:
        self.passed = 0
        self._open = anyio.Event()
        self._open.set()
        self._arrived = anyio.Event()

    def hold(self) -> None:
        """Keep what comes from now on."""
        if self._open.is_set():
            self._open = anyio.Event()

    def let_go(self) -> None:
        """Let it pass again, what was held first."""
        self._open.set()
        self._arrived = anyio.Event()

    async def arrived(self) -> None:
        """Wait until something is held; it may be before :meth:`hold`."""
        await self._arrived.wait()

    async def passes(self, said: bytes) -> None:
        """Wait until what was said may go on."""
        while not self._open.is_set():
            self._arrived.set()
            await self._open.wait()
        self.passed += len(said)


class Passage:
    """One connection that was made over a line."""

    def __init__(self, client: Any, server: Any, frozen: anyio.Event) -> None:
        self.client = client
        self.server = server
        self.frozen = frozen
        self.name = ""
        self.scope = anyio.CancelScope()
        self.is_cut = False
        self.unnoticed = False

    def cut(self, *, unnoticed: bool = False) -> None:
        """Hang up, and drop what is held. ``unnoticed``: the server hears of it only when the line ends."""
        self.is_cut, self.unnoticed = True, unnoticed
        self.scope.cancel()


class Line:
    """A way to a server. Nothing passes while it is ``silent``, on old connections and on new ones.

    ``opened`` counts the connections that were made over it; ``passages`` are those that there are, the oldest first.
    """

    def __init__(self, url: str) -> None:
        self.silent = False
        self.opened = 0
        self.passages: list[Passage] = []
        self._frozen = anyio.Event()
        self.lead_to(url)

    def lead_to(self, url: str) -> None:
        """Let new connections go to the server of ``url``."""
        parts = urlsplit(url)
        self._server = (parts.hostname or "", parts.port or PORTS[parts.scheme])

    def cut(self, name: str | None = None, *, unnoticed: bool = False) -> None:
        """End the connections that there are, or those of that name (see :meth:`Passage.cut`)."""
        for passage in list(self.passages):
            if name in {None, passage.name}:
                passage.cut(unnoticed=unnoticed)

    def freeze(self) -> None:
        """Let nothing pass any more on the connections that there are; new ones work."""
        self._frozen.set()
        self._frozen = anyio.Event()

    async def listen(self, *, task_status: TaskStatus[int]) -> None:
        """Pass on what comes to a port of this machine, which is reported, until cancelled."""
        async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener:
            task_status.started(listener.extra(anyio.abc.SocketAttribute.local_port))
            await listener.serve(self.serve)

    async def serve(self, client: Any) -> None:
        """Pass on what comes from a client, and what the server answers, until one of them hangs up."""
        self.opened += 1
        frozen = self._frozen
        async with client:
            with suppress(OSError):  # no server is there
                async with await anyio.connect_tcp(*self._server) as server:
                    await self._join(Passage(client, server, frozen))

    async def pass_on(self, said: bytes, target: Any, *, is_answer: bool) -> None:
        """Send on what came from the client, or (an answer) from the server."""
        await target.send(said)

    def passage_to(self, target: Any) -> Passage:
        """The connection that ends there."""
        return next(passage for passage in self.passages if target in {passage.client, passage.server})

    async def _join(self, passage: Passage) -> None:
        client, server = passage.client, passage.server
        self.passages.append(passage)
        try:
            with passage.scope:
                async with anyio.create_task_group() as tasks:
                    for source, target in (client, server), (server, client):
                        tasks.start_soon(self._pump, source, target, passage)
        finally:
            self.passages.remove(passage)
        if passage.unnoticed:
            await client.aclose()
            await anyio.sleep_forever()

    async def _pump(self, source: Any, target: Any, passage: Passage) -> None:
        with suppress(anyio.EndOfStream, anyio.ClosedResourceError, anyio.BrokenResourceError):
            while True:
                said = await source.receive()
                await self._is_open(passage)
                await self.pass_on(said, target, is_answer=target is passage.client)
        await self._is_open(passage)  # until then, neither end hears that the other has gone
        passage.scope.cancel()

    async def _is_open(self, passage: Passage) -> None:
        while self.silent or passage.frozen.is_set():
            await anyio.sleep(0.05)
