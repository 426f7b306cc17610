"""From an orchestrator to its running servers: one on a TCP port, one on a Unix socket; both serve the same app."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mainspring.http.orchestrator_app import orchestrator_app
from mainspring.http.server import HealthServer, is_loopback, listen

if TYPE_CHECKING:
    from mainspring.http.orchestrator_app import ServiceSource
    from mainspring.runtime.scope import DaemonScope


async def start(source: ServiceSource, scope: DaemonScope, host: str, port: int, **options: Any) -> str:
    """Serve ``source`` on ``host`` (``unix:/path`` for a Unix socket) as a daemon of ``scope``. Return its URL.

    :param options: of :func:`orchestrator_app`.
    :raises ConfigError: the server cannot listen on the address.
    """
    sock = await listen(host, port)
    server = HealthServer(orchestrator_app(source, scope, loopback=is_loopback(sock), **options), sock)
    url: str = await scope.start(server.serve, name=f"server on {server.url}", stop=server.stop)
    return url
