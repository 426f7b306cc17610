"""anycorn (hypercorn on anyio) on a running trio event loop."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, cast

from mainspring.errors import ConfigError
from mainspring.scope import lone_error

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    import anyio
    from starlette.types import ASGIApp, Receive, Scope, Send


class _Started:
    """anycorn's ``task_status``: it reports addresses of its own making, which nobody here asked for."""

    def __init__(self, started: Callable[[], object]) -> None:
        self._started = started

    def started(self, _: Any = None) -> None:
        self._started()


async def serve(
    app: ASGIApp, sock: socket.socket, stopping: anyio.Event, grace: float, started: Callable[[], object]
) -> None:
    """Serve ``app`` until ``stopping``, then at most ``grace`` seconds more for what is under way."""
    try:
        from anycorn.config import Config, Sockets
        from anycorn.run import worker_serve
        from anycorn.utils import wrap_app
    except ImportError:
        raise ConfigError(
            "on trio, the health server needs anycorn: pip install 'mainspring[trio]', or leave health_port out"
        ) from None
    config = Config()
    config.errorlog = _quiet_logger()
    config.include_date_header = False
    config.include_server_header = False
    config.graceful_timeout = grace
    try:
        await worker_serve(
            wrap_app(cast("Any", _without_lifespan(app)), config.wsgi_max_body_size, "asgi"),
            config,
            sockets=Sockets([], [sock], []),
            shutdown_trigger=stopping.wait,
            task_status=_Started(started),
        )
    except BaseExceptionGroup as errors:
        lone = lone_error(errors)
        if lone is errors:
            raise
        raise lone from lone.__cause__


def _without_lifespan(app: ASGIApp) -> ASGIApp:
    """anycorn always runs the lifespan protocol, and Starlette turns its cancellation into a failed shutdown."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await app(scope, receive, send)
            return
        for moment in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{moment}.complete"})

    return call


def _quiet_logger() -> logging.Logger:
    """anycorn announces itself at INFO, with advice about CTRL + C that is wrong here."""
    logger = logging.getLogger("mainspring.http.anycorn")
    logger.setLevel(logging.WARNING)
    return logger
