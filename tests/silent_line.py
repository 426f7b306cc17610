"""A way to a server that can go silent, without a word to either end."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import anyio

if TYPE_CHECKING:
    from anyio.abc import TaskStatus

PORTS = {"nats": 4222, "redis": 6379, "postgresql": 5432}


class Line:
    """A way to a server. Nothing passes while it is ``silent``, on old connections and on new ones.

    ``opened`` counts the connections that were made over it.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._server = (parts.hostname or "", parts.port or PORTS[parts.scheme])
        self.silent = False
        self.opened = 0
        self._frozen = anyio.Event()
        self._scopes: set[anyio.CancelScope] = set()

    def cut(self) -> None:
        """End the connections that there are."""
        for scope in self._scopes:
            scope.cancel()

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
        self.opened += 1
        frozen = self._frozen
        async with client, await anyio.connect_tcp(*self._server) as server, anyio.create_task_group() as tasks:
            self._scopes.add(tasks.cancel_scope)
            for source, target in (client, server), (server, client):
                tasks.start_soon(self._pump, source, target, client, frozen, tasks.cancel_scope)
        self._scopes.discard(tasks.cancel_scope)

    async def pass_on(self, said: bytes, target: Any, *, is_answer: bool) -> None:
        """Send on what came from the client, or (an answer) from the server."""
        await target.send(said)

    async def _pump(self, source: Any, target: Any, client: Any, frozen: anyio.Event, scope: anyio.CancelScope) -> None:
        with suppress(anyio.EndOfStream, anyio.ClosedResourceError, anyio.BrokenResourceError):
            while True:
                said = await source.receive()
                await self._is_open(frozen)
                await self.pass_on(said, target, is_answer=target is client)
        await self._is_open(frozen)  # until then, neither end hears that the other has gone
        scope.cancel()

    async def _is_open(self, frozen: anyio.Event) -> None:
        while self.silent or frozen.is_set():
            await anyio.sleep(0.05)
