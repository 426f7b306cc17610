"""Which connections the health server keeps, the same on asyncio and trio: a limit, and which connection gives way at it.

A connection is *waiting* until a whole request head has come, and between requests. It is *answering* while the app works on a
request. The server holds at most ``limit`` connections. At the limit, a new connection closes the one that has waited
longest: a probe sends its request at once, so it is not the one that gives way. Where all are answering, a new connection is
closed. The last place for requests is kept for probes (``/health/``): other requests are refused with 503 before they take
it. So idle, half-sent and slow requests, in any number, neither use up the process's descriptors nor keep a probe out.
"""

from __future__ import annotations

import errno
import logging
import resource
from contextlib import contextmanager
from typing import TYPE_CHECKING

import anyio
from starlette.responses import PlainTextResponse

from mainspring.core.clock import monotonic
from mainspring.core.loggers import Logger

if TYPE_CHECKING:
    import socket
    from collections.abc import Awaitable, Callable, Iterator

    from starlette.types import ASGIApp, Receive, Scope, Send

_MOST_CONNECTIONS = 100
_REPEAT = 60.0
"""Seconds for which the same log message is not repeated."""
_ACCEPT_PAUSE = 0.1
"""Seconds between tries to accept while the process has no descriptor left."""
_CONNECTED_WITHIN = 1.0
"""Seconds that an accepted connection gets to become one of the server's; it takes a turn of the event loop."""
_NO_DESCRIPTOR = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_GONE_ALREADY = {errno.EAGAIN, errno.ECONNABORTED, errno.EPROTO}

_log = Logger("mainspring.http")
log = _log.logger


def default_limit() -> int:
    """Return how many connections a server keeps by default: 100, and at most a quarter of the process's descriptors."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST_CONNECTIONS if soft == resource.RLIM_INFINITY else max(2, min(_MOST_CONNECTIONS, soft // 4))


class Connections:
    """The open connections of one server. All calls are made on its event loop."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: dict[HttpConnection, None] = {}  # the longest waiting first
        self._answering: set[HttpConnection] = set()

    def __len__(self) -> int:
        return len(self._waiting) + len(self._answering)

    def open(self, close: Callable[[], object]) -> HttpConnection | None:
        """Return the new connection's entry, or None if all places are taken by requests under way: close it then.

        :param close: closes the connection at once; called when it has to give way.
        """
        if len(self) >= self._limit:
            log.warning(
                "the health server is at its limit of %d connections: it closes those that ask nothing", self._limit
            )
            if not self.give_way():
                return None
        connection = HttpConnection(self, close)
        self._waiting[connection] = None
        return connection

    def give_way(self) -> bool:
        """Close the connection that has waited longest; False if none is waiting."""
        for connection in self._waiting:
            del self._waiting[connection]
            connection.close()
            return True
        return False

    def begin(self, connection: HttpConnection, path: str) -> bool:
        """Count the connection as answering. False if the one place left is kept for probes."""
        if len(self._answering) >= self._limit - 1 and not path.startswith("/health/"):
            return False
        self._waiting.pop(connection, None)
        self._answering.add(connection)
        return True

    def end(self, connection: HttpConnection) -> None:
        """Count the connection as waiting again, unless it is closed."""
        if connection in self._answering:
            self._answering.discard(connection)
            self._waiting[connection] = None

    def forget(self, connection: HttpConnection) -> None:
        """Drop a connection that is closed."""
        self._waiting.pop(connection, None)
        self._answering.discard(connection)


class HttpConnection:
    """One connection's entry among those of its server."""

    __slots__ = ("_connections", "close")

    def __init__(self, connections: Connections, close: Callable[[], object]) -> None:
        self._connections = connections
        self.close = close

    def closed(self) -> None:
        """Say that the connection is closed. May be called again."""
        self._connections.forget(self)

    def counted(self, app: ASGIApp) -> ASGIApp:
        """Return ``app`` for this connection: a request counts as answering from its start to its end."""

        async def call(scope: Scope, receive: Receive, send: Send) -> None:
            if not self._connections.begin(self, scope.get("path", "")):
                _log.warning("the health server refuses requests: as many as it can answer are under way")
                await PlainTextResponse("too many requests are under way\n", 503)(scope, receive, send)
                return
            try:
                await app(scope, receive, send)
            finally:
                self._connections.end(self)

        return call


async def accept_all(
    listener: socket.socket, connected: Callable[[socket.socket], Awaitable[object]], connections: Connections
) -> None:
    """Hand every connection that ``listener`` accepts to ``connected``, for ever.

    Goes on while the process has no descriptor left: it closes a connection that waits, and tries again.
    """
    while True:
        await anyio.wait_readable(listener)
        try:
            accepted, _ = listener.accept()
        except OSError as error:
            if error.errno in _NO_DESCRIPTOR:
                _log.warning("the health server cannot accept connections: %s", error)
                connections.give_way()
                await anyio.sleep(_ACCEPT_PAUSE)
            elif error.errno not in _GONE_ALREADY:
                raise
        else:
            accepted.setblocking(False)
            # Cancelled in the middle, uvloop would forget to say that the connection is lost.
            with anyio.CancelScope(shield=True, deadline=anyio.current_time() + _CONNECTED_WITHIN):
                await connected(accepted)


class _OncePerMinute(logging.Filter):
    def __init__(self) -> None:
        super().__init__()
        self._passed: dict[object, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        now = monotonic()
        last = self._passed.get(record.msg)
        if last is not None and now - last < _REPEAT:
            return False
        self._passed[record.msg] = now
        return True


@contextmanager
def quiet_storms(*loggers: logging.Logger) -> Iterator[None]:
    """Let each message of ``loggers`` pass once a minute: a storm of bad requests is one line, not one line each."""
    once = _OncePerMinute()
    for logger in loggers:
        logger.addFilter(once)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(once)
