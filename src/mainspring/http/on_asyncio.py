"""uvicorn's HTTP protocol on a running asyncio event loop, without its server.

``uvicorn.Server`` takes the process's signals, wakes ten times a second, sleeps 0.1 s in its shutdown before it looks at a
connection, and accepts as many connections as come. So only its protocol class is used: accepting and ending are done here.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from mainspring.http.connections import Connections, accept_all, log, quiet_storms

if TYPE_CHECKING:
    import logging
    import socket
    from collections.abc import Callable

    from starlette.types import ASGIApp

    from mainspring.http.connections import HttpConnection

_CUT_OFF = 1.0
"""Seconds that cancelled requests get to unwind."""


class _Config(Config):
    def configure_logging(self) -> None:
        """Leave the loggers of uvicorn alone: they may be those of the web app that a group is embedded in."""


class _Protocol(H11Protocol):
    """A connection that counts among its server's, and that is closed where a request's head is late.

    uvicorn's own time limit runs between requests only, and any byte ends it.
    """

    def __init__(self, admission: Connections, head_timeout: float, **keywords: Any) -> None:
        super().__init__(**keywords)
        self.access_log = False  # else probes would appear in an embedding app's access log
        self.logger = log
        self._admission = admission
        self._head_timeout = head_timeout
        self._entry: HttpConnection | None = None
        self._late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._entry = self._admission.open(transport.abort)
        if self._entry is None:
            transport.abort()
            return
        self.app = self._entry.counted(self.app)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_waiting()
        if self._entry is not None:
            self._entry.closed()

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before:  # a request has begun
            self._stop_waiting()

    def on_response_complete(self) -> None:
        before = self.cycle
        self._await_head()
        super().on_response_complete()  # may begin the next request, where its head has come already
        if self.cycle is not before:
            self._stop_waiting()

    def _await_head(self) -> None:
        self._stop_waiting()
        self._late = self.loop.call_later(self._head_timeout, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


class _OpenSet(set[Any]):
    """The connections or requests that are open; says when the last one is gone."""

    on_empty: Callable[[], object] | None = None

    def discard(self, element: Any) -> None:
        super().discard(element)
        if not self and self.on_empty is not None:
            self.on_empty()


async def serve(
    app: ASGIApp,
    sock: socket.socket,
    stopping: anyio.Event,
    *,
    grace: float,
    head_timeout: float,
    connections: Connections,
    started: Callable[[], object],
) -> None:
    """Serve ``app`` until ``stopping``, then at most ``grace`` seconds more for what is under way."""
    config = _Config(
        app,
        http=_Protocol,
        ws="none",
        lifespan="off",
        interface="asgi3",
        proxy_headers=False,
        server_header=False,
        date_header=False,
    )
    config.load()
    state = ServerState()
    state.connections = open_connections = _OpenSet()
    state.tasks = requests = _OpenSet()
    protocol = partial(_Protocol, connections, head_timeout, config=config, server_state=state, app_state={})
    loop = asyncio.get_running_loop()

    async def connected(accepted: socket.socket) -> None:
        await loop.connect_accepted_socket(protocol, accepted)

    log.addFilter(_no_cancellations)
    try:
        with quiet_storms(log):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(accept_all, sock, connected, connections)
                started()
                await stopping.wait()
                tasks.cancel_scope.cancel()
            sock.close()
            for connection in list(open_connections):
                connection.shutdown()
            with anyio.move_on_after(grace):
                await _all_gone(open_connections, requests)
    finally:
        sock.close()
        for request in list(requests):
            request.cancel()
        for connection in list(open_connections):
            connection.transport.abort()
        with anyio.CancelScope(shield=True, deadline=anyio.current_time() + _CUT_OFF):
            await _all_gone(open_connections, requests)
        log.removeFilter(_no_cancellations)


async def _all_gone(*groups: _OpenSet) -> None:
    while any(groups):
        emptied = anyio.Event()
        for group in groups:
            group.on_empty = emptied.set
        await emptied.wait()


def _no_cancellations(record: logging.LogRecord) -> bool:
    """Drop the error that uvicorn reports for a request that was cut off at the end: it is none of the app."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))
