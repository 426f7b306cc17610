"""From an orchestrator to its running servers: one on a TCP port, one on a Unix socket; both serve the same app."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mainspring.http.orchestrator_app import orchestrator_app
from mainspring.http.server import HealthServer, is_loopback, listen

if TYPE_CHECKING:
    from mainspring.http.orchestrator_app import ServiceSource
    from mainspring.runtime.scope import DaemonScope
    from mainspring.services.recent_output import RecentOutput


async def start(source: ServiceSource, scope: DaemonScope, output: RecentOutput, host: str, port: int) -> str:
    """Serve ``source`` on ``host`` (``unix:/path`` for a Unix socket) as a daemon of ``scope``. Return its URL.

    :raises ConfigError: the server cannot listen on the address.
    """
    sock = await listen(host, port)
    server = HealthServer(orchestrator_app(source, scope, output=output, loopback=is_loopback(sock)), sock)
    url: str = await scope.start(server.serve, name=f"server on {server.url}", stop=server.stop)
    return url
