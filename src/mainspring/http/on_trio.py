"""anycorn's protocols (hypercorn on anyio) on a running trio event loop, without its server.

``anycorn.run.worker_serve`` accepts as many connections as come, and ends when the process has no descriptor left for one. So
only what it does for a connection is used: accepting and ending are done here.
"""

from __future__ import annotations

import logging
import socket
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, cast

import anyio
from anyio.abc import SocketStream

from mainspring.errors import ConfigError
from mainspring.http.connections import Connections, accept_all, log, quiet_storms
from mainspring.runtime.scope import lone_error

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from starlette.types import ASGIApp


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
    try:
        from anycorn.config import Config
        from anycorn.tcp_server import tcp_server_handler
        from anycorn.typing import ConnectionState, LifespanState
        from anycorn.utils import wrap_app
        from anycorn.worker_context import WorkerContext
    except ImportError:
        raise ConfigError(
            "on trio, the health server needs anycorn: pip install 'mainspring[trio]', or leave health_port out"
        ) from None
    config = Config()
    config.errorlog = errors = _quiet_logger()
    config.include_date_header = config.include_server_header = False
    config.keep_alive_timeout = head_timeout
    context = WorkerContext(None)

    async def answer(stream: SocketStream, accepted: socket.socket) -> None:
        async with _scope_of(accepted) as scope:
            entry = connections.open(scope.cancel)
            async with stream:
                if entry is None:
                    return
                wrapped = wrap_app(cast("Any", entry.counted(app)), config.wsgi_max_body_size, "asgi")
                state = ConnectionState(LifespanState({}))
                try:
                    await tcp_server_handler(wrapped, config, context, state)(stream)
                finally:
                    entry.closed()

    try:
        with quiet_storms(log, errors):
            async with config.log, anyio.create_task_group() as requests:

                async def connected(accepted: socket.socket) -> None:
                    requests.start_soon(answer, await SocketStream.from_socket(accepted), accepted)

                async with anyio.create_task_group() as accepting:
                    accepting.start_soon(accept_all, sock, connected, connections)
                    started()
                    await stopping.wait()
                    accepting.cancel_scope.cancel()
                sock.close()
                requests.cancel_scope.deadline = anyio.current_time() + grace
                await context.terminated.set()
    except BaseExceptionGroup as group:
        lone = lone_error(group)
        raise lone from lone.__cause__


@asynccontextmanager
async def _scope_of(accepted: socket.socket) -> AsyncIterator[anyio.CancelScope]:
    """Hold a scope for a connection. Cancelled, it also ends what anycorn shields: a send to a client that does not read."""

    async def shut_down() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            with suppress(OSError):  # it is closed
                accepted.shutdown(socket.SHUT_RDWR)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(shut_down)
        try:
            yield tasks.cancel_scope
        finally:
            tasks.cancel_scope.cancel()


def _quiet_logger() -> logging.Logger:
    """Silence anycorn's greeting at INFO, whose advice about CTRL + C is wrong here."""
    logger = logging.getLogger("mainspring.http.anycorn")
    logger.setLevel(logging.WARNING)
    return logger
