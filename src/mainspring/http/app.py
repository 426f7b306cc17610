"""The Starlette app of a group: probes, status, metrics, acts (drain, pause, resume) and the dashboard."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

import mainspring
from mainspring.core import clock
from mainspring.core.state_machine import GroupState
from mainspring.errors import ControlRefusedError, LoopNotRunningError, TicketTimeoutError
from mainspring.http.access import Access
from mainspring.http.dashboard import dashboard_page
from mainspring.http.depths import DepthReader
from mainspring.http.responses import CommonHeaders, PlainJson, line_response
from mainspring.telemetry.metrics import GroupMetrics
from mainspring.telemetry.plain import plain

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from starlette.requests import Request

    from mainspring.core.dispatcher import Dispatcher
    from mainspring.http.depths import Countable
    from mainspring.telemetry.status import GroupStatus, MailboxStatus

_MAX_REASON = 500
_ACT_TIMEOUT = 10.0
"""Seconds that an act may take before the answer says that it is under way: a pause waits for claims that are out."""


class Source(Protocol):
    """What the app shows and acts on: a LoopGroup, or any object with these calls. All are called on its event loop."""

    dispatcher: Dispatcher
    """The events that the metrics count."""

    def status(self) -> GroupStatus:
        """Return the present status."""

    def request_drain(self, reason: str) -> None:
        """Ask for a drain: no new work, finish, end. Returns at once; asking again changes nothing."""

    async def pause(self, reason: str, *, timeout: float) -> None:
        """Take no new work, and wait until that holds; see :meth:`LoopGroup.pause` for what it raises."""

    async def resume(self, reason: str, *, timeout: float) -> None:
        """Take new work again."""

    def mailboxes(self) -> Sequence[Countable]:
        """Return the mailboxes whose depth is of interest."""

    async def refresh_checks(self) -> None:
        """Ask again the checks that keep the group from being ready; each has a deadline of its own."""


def health_app(
    source: Source,
    *,
    metrics: GroupMetrics | None = None,
    admin_token: str | None = None,
    loopback: bool = True,
) -> Starlette:
    """Return the app that answers for ``source``: stand-alone on a listener of its own, or mounted in another app.

    :param metrics: what ``/metrics`` renders. None makes them: the group's, counted from this call on, and behind them those of
        the application in the default registry of ``prometheus_client``.
    :param admin_token: the bearer token that acts (``POST /drain``, ``/pause``, ``/resume``) need; None reads
        ``MAINSPRING_ADMIN_TOKEN``. Without a token, acts are refused unless ``loopback``.
    :param loopback: whether only this machine can reach the listener (a loopback address, a Unix socket); acts then need no
        token. Say False when you mount the app in one that others can reach.

    Probes, status and metrics are open to every client that can connect. They name loops, mailboxes and the errors of checks.
    """
    access = Access(admin_token, loopback=loopback)
    if metrics is None:
        metrics = GroupMetrics(source)
        metrics.subscribe(source.dispatcher)
    views = _Views(source, metrics)
    routes = [
        Route("/health/live", views.live),
        Route("/health/ready", views.ready),
        Route("/health/startup", views.startup),
        Route("/metrics", views.metrics),
        Route("/status", views.status),
        Route("/drain", access.guarded(views.drain), methods=["POST"]),
        Route("/pause", access.guarded(views.pause), methods=["POST"]),
        Route("/resume", access.guarded(views.resume), methods=["POST"]),
        Route("/", views.dashboard),
    ]
    app = Starlette(routes=routes)
    app.add_middleware(CommonHeaders)
    return app


class _Views:
    def __init__(self, source: Source, metrics: GroupMetrics) -> None:
        self._source = source
        self._metrics = metrics
        self._depths = DepthReader(source.mailboxes)

    async def live(self, _: Request) -> Response:
        status = self._source.status()
        return _probe(status, status.live)

    async def ready(self, _: Request) -> Response:
        await self._source.refresh_checks()
        status = self._source.status()
        return _probe(status, status.ready, checks=plain(status.checks))

    async def startup(self, _: Request) -> Response:
        status = self._source.status()
        return _probe(status, status.started)

    async def metrics(self, request: Request) -> Response:
        depths = await self._ask_around()
        await self._metrics.collect_soon()
        text, content_type = self._metrics.render(depths, request.headers.get("accept", ""))
        return Response(text, headers={"content-type": content_type})

    async def status(self, _: Request) -> Response:
        depths = await self._ask_around()
        tree = plain(self._source.status())
        tree["mailboxes"] = plain(depths)
        tree["kind"] = "group"
        tree["version"] = mainspring.__version__
        tree["time"] = clock.utc_now().isoformat(timespec="milliseconds")
        return PlainJson(tree)

    async def _ask_around(self) -> Sequence[MailboxStatus]:
        """Ask checks and mailboxes, so that what the status then says of the checks is fresh."""
        await self._source.refresh_checks()
        return await self._depths.read()

    async def drain(self, _: Request) -> Response:
        status = self._source.status()
        if status.state in (GroupState.IDLE, GroupState.STOPPED):  # its next run would drain at once
            return line_response(f"group {status.name!r} cannot drain: it is not running", 409)
        self._source.request_drain("drain requested over HTTP")
        return self._done("draining", 202)

    async def pause(self, _: Request) -> Response:
        return await self._switch(self._source.pause, "pause")

    async def resume(self, _: Request) -> Response:
        return await self._switch(self._source.resume, "resume")

    async def _switch(self, switch: Callable[..., Awaitable[None]], what: str) -> Response:
        try:
            await switch(f"{what} requested over HTTP", timeout=_ACT_TIMEOUT)
        except (LoopNotRunningError, ControlRefusedError) as error:
            return line_response(str(error), 409)
        except TicketTimeoutError:
            return self._done(f"{what} is under way", 202)
        return self._done(f"{what}d", 200)

    def _done(self, what: str, code: int) -> Response:
        status = self._source.status()
        return PlainJson({"status": what, "group": status.name, "state": str(status.state)}, code)

    async def dashboard(self, _: Request) -> Response:
        return dashboard_page()


def _probe(status: GroupStatus, well: bool, **more: Any) -> Response:
    answer = {
        "status": "ok" if well else "unavailable",
        "group": status.name,
        "state": str(status.state),
        "reasons": [] if well else [reason[:_MAX_REASON] for reason in status.reasons],
        "loops": [
            {
                "name": loop.name,
                "state": str(loop.state),
                "ready": loop.ready,
                "heartbeat_age": plain(loop.heartbeat_age),
                "reason": loop.reason,
            }
            for loop in status.loops
        ],
        **more,
    }
    return PlainJson(answer, 200 if well else 503)
