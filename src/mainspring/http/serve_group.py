"""From a group to its running health server: the app, its metrics, its socket."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

from mainspring.events import CalibrationWarning
from mainspring.http.app import health_app
from mainspring.http.server import HealthServer, is_loopback, listen
from mainspring.telemetry.metrics import GroupMetrics

if TYPE_CHECKING:
    from anyio.abc import TaskStatus

    from mainspring.http.app import Source
    from mainspring.runtime.scope import DaemonScope


async def start(group: Source, scope: DaemonScope, host: str, port: int) -> str:
    """Serve ``group`` on ``host`` and ``port`` as a daemon of ``scope``. Return the URL at which it is reached.

    The metrics count while the server runs.

    :raises ConfigError: the server cannot listen on the address.
    """
    sock = await listen(host, port)
    if "KUBERNETES_SERVICE_HOST" in os.environ and sock.family != socket.AF_UNIX and is_loopback(sock):
        text = (
            f"the health server listens on {host}, where the kubelet's probes do not reach it: set health_host='0.0.0.0'"
            " (--health-host 0.0.0.0, or MAINSPRING_HEALTH_HOST)"
        )
        group.dispatcher.dispatch(CalibrationWarning(group.status().name, text))
    metrics = GroupMetrics(group)
    server = HealthServer(health_app(group, metrics=metrics, loopback=is_loopback(sock)), sock)

    async def serve(*, task_status: TaskStatus[str]) -> None:
        unsubscribe = metrics.subscribe(group.dispatcher)
        try:
            await server.serve(task_status=task_status)
        finally:
            unsubscribe()

    url: str = await scope.start(serve, name="health server", stop=server.stop)
    return url
