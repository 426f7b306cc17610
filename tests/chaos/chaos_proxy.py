"""A TCP proxy on the loopback, through which workers and senders reach their server, and which can cut and stall."""

from __future__ import annotations

import socket
import struct
from contextlib import suppress
from typing import TYPE_CHECKING

import anyio
from anyio.abc import SocketAttribute

if TYPE_CHECKING:
    import random

    from anyio.abc import SocketStream, TaskStatus

_RESET = struct.pack("ii", 1, 0)
_GONE = (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError, OSError)


class _Link:
    """One connection and its counterpart to the server."""

    def __init__(self, client: SocketStream, server: SocketStream) -> None:
        self.ends = (client, server)
        self.gates: set[anyio.Event] = set()
        self.scope = anyio.CancelScope()

    async def carry(self) -> None:
        """Pass bytes on in both directions until one end is gone."""
        client, server = self.ends
        with self.scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._pump, client, server)
                tasks.start_soon(self._pump, server, client)

    async def _pump(self, source: SocketStream, sink: SocketStream) -> None:
        with suppress(*_GONE):
            while True:
                data = await source.receive()
                while self.gates:
                    await next(iter(self.gates)).wait()
                await sink.send(data)
        self.scope.cancel()


class Proxy:
    """Listens on a port of its own and passes on to ``target``, a port of this machine."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._links: set[_Link] = set()
        self._gates: set[anyio.Event] = set()
        self.port = 0

    async def serve(self, *, task_status: TaskStatus[None]) -> None:
        """Run until cancelled."""
        async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener:
            self.port = listener.extra(SocketAttribute.local_port)
            task_status.started()
            await listener.serve(self._connected)

    async def _connected(self, client: SocketStream) -> None:
        try:
            server = await anyio.connect_tcp("127.0.0.1", self._target)
        except OSError:
            await _reset(client)
            return
        link = _Link(client, server)
        link.gates |= self._gates
        self._links.add(link)
        try:
            await link.carry()
        finally:
            self._links.discard(link)
            with anyio.CancelScope(shield=True, deadline=anyio.current_time() + 1):
                for end in link.ends:
                    await (_reset(end) if link.scope.cancel_called and link.gates else _close(end))

    def __len__(self) -> int:
        """How many connections there are."""
        return len(self._links)

    def _some(self, share: float, chance: random.Random) -> list[_Link]:
        return [link for link in self._links if chance.random() < share]

    async def cut(self, share: float, chance: random.Random) -> int:
        """Cut a share of the connections, half of them by a reset; how many that were."""
        links = self._some(share, chance)
        for link in links:
            if chance.random() < 0.5:
                for end in link.ends:
                    _linger_not(end)
            link.scope.cancel()
        return len(links)

    async def stall(self, share: float, seconds: float, chance: random.Random) -> int:
        """Hold back all bytes of a share of the connections, and where that is all of them of new ones too; how many."""
        gate = anyio.Event()
        links = self._some(share, chance)
        for link in links:
            link.gates.add(gate)
        if share >= 1:
            self._gates.add(gate)
        try:
            await anyio.sleep(seconds)
        finally:
            self._gates.discard(gate)
            for link in self._links:
                link.gates.discard(gate)
            gate.set()
        return len(links)


def _linger_not(stream: SocketStream) -> None:
    with suppress(*_GONE, anyio.TypedAttributeLookupError):
        stream.extra(SocketAttribute.raw_socket).setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)


async def _close(stream: SocketStream) -> None:
    with suppress(*_GONE):
        await stream.aclose()


async def _reset(stream: SocketStream) -> None:
    _linger_not(stream)
    await _close(stream)
