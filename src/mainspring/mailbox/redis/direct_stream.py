"""A TCP stream that writes at once.

anyio's own stream gives the event loop a turn before each write, which a call of a few hundred bytes need not wait for. This
one writes to the connection that anyio made under a second descriptor, and reads as anyio does.
"""

from __future__ import annotations

import errno
import socket
from collections import deque
from typing import TYPE_CHECKING, Any

import anyio
from anyio.abc import ByteStream, SocketAttribute

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Coroutine, Mapping

    from anyio.abc import SocketStream


class DirectStream(ByteStream):
    """The connection of ``stream``, which nobody else uses any more.

    Raises :class:`anyio.BrokenResourceError` where the peer has hung up already.

    :param waits: a write waits until the socket has taken all of it; False: it returns at once, and :meth:`flush` waits.

    Unlike anyio's streams it does not yield where it need not: a write that the socket takes whole returns at once. Several
    tasks may write: each item arrives whole, in the order of the calls. Cancelled in a write, the rest of the item leaves with
    the next write or :meth:`flush`; cancelled in a read, nothing is lost.
    """

    def __init__(self, stream: SocketStream, *, waits: bool = True) -> None:
        self._stream = stream
        self._waits = waits
        try:
            known = stream.extra(SocketAttribute.raw_socket)  # noqa: S610 - not Django's
            self._socket = socket.fromfd(known.fileno(), known.family, known.type)
        except (AttributeError, OSError) as error:
            if isinstance(error, OSError) and error.errno != errno.EBADF:
                raise
            raise anyio.BrokenResourceError from error  # closed already: uvloop has no socket then, asyncio no descriptor
        self._socket.setblocking(False)
        self._rest: deque[memoryview] = deque()
        self._turn = anyio.Lock()

    @property
    def extra_attributes(self) -> Mapping[Any, Callable[[], Any]]:
        """Those of the stream that anyio made."""
        return self._stream.extra_attributes

    async def send(self, item: bytes) -> None:
        """Write all of it, behind what was written before."""
        sent = 0 if self._rest else self._write(item)
        if sent < len(item):
            self._rest.append(memoryview(item)[sent:])
            if self._waits:
                await self.flush()

    @property
    def unsent(self) -> Collection[memoryview]:
        """What has been written and the socket has not taken; always the same object."""
        return self._rest

    async def flush(self) -> None:
        """Wait until the socket has taken all that was written."""
        if not self._rest:
            return
        async with self._turn:
            while self._rest:
                await anyio.wait_writable(self._check())
                sent = self._write(self._rest[0])
                self._rest[0] = self._rest[0][sent:]
                if not self._rest[0]:
                    self._rest.popleft()

    def _write(self, data: bytes | memoryview) -> int:
        try:
            return self._socket.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as error:
            raise self._broken() from error

    def receive(self, max_bytes: int = 65_536) -> Coroutine[Any, Any, bytes]:
        """What has come, or comes next; :class:`anyio.EndOfStream` at the end."""
        return self._stream.receive(max_bytes)

    async def send_eof(self) -> None:
        """Write no more."""
        self._check().shutdown(socket.SHUT_WR)

    async def aclose(self) -> None:
        """Hang up; whoever waits in a read or a write has :class:`anyio.ClosedResourceError`."""
        if self._socket.fileno() >= 0:
            anyio.notify_closing(self._socket)
            self._socket.close()
        await self._stream.aclose()

    def _check(self) -> socket.socket:
        if self._socket.fileno() < 0:
            raise anyio.ClosedResourceError
        return self._socket

    def _broken(self) -> Exception:
        return anyio.ClosedResourceError() if self._socket.fileno() < 0 else anyio.BrokenResourceError()
