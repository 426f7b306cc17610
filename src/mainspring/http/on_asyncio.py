"""uvicorn's protocols on a running asyncio event loop, without its main loop.

``uvicorn.Server.serve`` takes the process's signals, wakes ten times a second, and sleeps 0.1 s in its shutdown before it
looks at a connection. So only its start is used: requests come in through its protocol class, and the end is done here.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import anyio
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import Server

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from starlette.types import ASGIApp

_CUT_OFF = 1.0
"""Seconds that cancelled requests get to unwind."""

_log = logging.getLogger("mainspring.http")


class _Config(Config):
    def configure_logging(self) -> None:
        """Leave the loggers of uvicorn alone: they may be those of the web app that a group is embedded in."""


class _Protocol(H11Protocol):
    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self.access_log = False  # else probes would appear in an embedding app's access log
        self.logger = _log


class _Open(set[Any]):
    """The connections or requests that are open; says when the last one is gone."""

    on_empty: Callable[[], object] | None = None

    def discard(self, element: Any) -> None:
        super().discard(element)
        if not self and self.on_empty is not None:
            self.on_empty()


async def serve(
    app: ASGIApp, sock: socket.socket, stopping: anyio.Event, grace: float, started: Callable[[], object]
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
    server = Server(config)
    connections, requests = _Open(), _Open()
    server.server_state.connections = connections
    server.server_state.tasks = requests
    server.lifespan = config.lifespan_class(config)
    _log.addFilter(_no_cancellations)
    try:
        await server.startup(sockets=[sock])
        started()
        await stopping.wait()
        _stop_listening(server)
        for connection in list(connections):
            connection.shutdown()
        with anyio.move_on_after(grace):
            await _all_gone(connections, requests)
    finally:
        _stop_listening(server)
        for request in list(requests):
            request.cancel()
        for connection in list(connections):
            connection.transport.abort()
        with anyio.CancelScope(shield=True, deadline=anyio.current_time() + _CUT_OFF):
            await _all_gone(connections, requests)


def _stop_listening(server: Server) -> None:
    for listener in getattr(server, "servers", ()):  # absent where the start itself failed
        listener.close()


async def _all_gone(*groups: _Open) -> None:
    while any(groups):
        emptied = anyio.Event()
        for group in groups:
            group.on_empty = emptied.set
        await emptied.wait()


def _no_cancellations(record: logging.LogRecord) -> bool:
    """uvicorn reports a request that was cut off at the end as an error of the app; it is none."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))
