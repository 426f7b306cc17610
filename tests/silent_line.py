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
    """A way to a server on which nothing passes while it is ``silent``, on old connections and on new ones."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._server = (parts.hostname or "", parts.port or PORTS[parts.scheme])
        self.silent = False
        self._scopes: set[anyio.CancelScope] = set()

    def cut(self) -> None:
        """End the connections that there are."""
        for scope in self._scopes:
            scope.cancel()

    async def listen(self, *, task_status: TaskStatus[int]) -> None:
        """Pass on what comes to a port of this machine, which is reported, until cancelled."""
        async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener:
            task_status.started(listener.extra(anyio.abc.SocketAttribute.local_port))
            await listener.serve(self.serve)

    async def serve(self, client: Any) -> None:
        async with client, await anyio.connect_tcp(*self._server) as server, anyio.create_task_group() as tasks:
            self._scopes.add(tasks.cancel_scope)
            tasks.start_soon(self._pump, client, server)
            await self._pump(server, client)
            tasks.cancel_scope.cancel()
            self._scopes.discard(tasks.cancel_scope)

    async def _pump(self, source: Any, target: Any) -> None:
        with suppress(anyio.EndOfStream, anyio.ClosedResourceError, anyio.BrokenResourceError):
            while True:
                said = await source.receive()
                while self.silent:
                    await anyio.sleep(0.05)
                await target.send(said)
