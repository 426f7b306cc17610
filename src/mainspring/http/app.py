"""The Starlette app of a group: probes, status, metrics, acts (drain, pause, resume) and the dashboard."""

from __future__ import annotations

import base64
import hashlib
import hmac
import ipaddress
import json
import os
import re
from email.utils import format_datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

import mainspring
from mainspring.core import clock
from mainspring.core.state_machine import GroupState
from mainspring.errors import ControlRefusedError, LoopNotRunningError, TicketTimeoutError
from mainspring.http.depths import DepthReader
from mainspring.telemetry.metrics import GroupMetrics
from mainspring.telemetry.plain import plain

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from starlette.requests import Request
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from mainspring.core.dispatcher import Dispatcher
    from mainspring.http.depths import Countable
    from mainspring.telemetry.status import GroupStatus, MailboxStatus


_FILE = Path(__file__).with_name("dashboard.html")


def _hash(html: str, tag: str) -> str:
    found = re.search(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    assert found is not None, f"the dashboard has no <{tag}>"
    return f"'sha256-{base64.b64encode(hashlib.sha256(found[1].encode()).digest()).decode()}'"


ADMIN_TOKEN = "MAINSPRING_ADMIN_TOKEN"  # noqa: S105 - the name of a variable
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
    token = os.environ.get(ADMIN_TOKEN, "") if admin_token is None else admin_token
    if metrics is None:
        metrics = GroupMetrics(source)
        metrics.subscribe(source.dispatcher)
    views = _Views(source, metrics, token, loopback)
    routes = [
        Route("/health/live", views.live),
        Route("/health/ready", views.ready),
        Route("/health/startup", views.startup),
        Route("/metrics", views.metrics),
        Route("/status", views.status),
        Route("/drain", views.act(views.drain), methods=["POST"]),
        Route("/pause", views.act(views.pause), methods=["POST"]),
        Route("/resume", views.act(views.resume), methods=["POST"]),
        Route("/", views.dashboard),
    ]
    app = Starlette(routes=routes)
    app.add_middleware(_Headers)
    return app


class _Views:
    def __init__(self, source: Source, metrics: GroupMetrics, token: str, loopback: bool) -> None:
        self._source = source
        self._metrics = metrics
        self._token = token
        self._loopback = loopback
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
        tree["version"] = mainspring.__version__
        tree["time"] = clock.utc_now().isoformat(timespec="milliseconds")
        return _Json(tree)

    async def _ask_around(self) -> Sequence[MailboxStatus]:
        """Ask checks and mailboxes, so that what the status then says of the checks is fresh."""
        await self._source.refresh_checks()
        return await self._depths.read()

    def act(self, act: Callable[[], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """Return the endpoint of an act, which is refused if the client may not do it."""

        async def endpoint(request: Request) -> Response:
            return refusal(request, self._token, loopback=self._loopback) or await act()

        return endpoint

    async def drain(self) -> Response:
        status = self._source.status()
        if status.state in (GroupState.IDLE, GroupState.STOPPED):  # its next run would drain at once
            return _line(f"group {status.name!r} cannot drain: it is not running", 409)
        self._source.request_drain("drain requested over HTTP")
        return self._done("draining", 202)

    async def pause(self) -> Response:
        return await self._switch(self._source.pause, "pause")

    async def resume(self) -> Response:
        return await self._switch(self._source.resume, "resume")

    async def _switch(self, switch: Callable[..., Awaitable[None]], what: str) -> Response:
        try:
            await switch(f"{what} requested over HTTP", timeout=_ACT_TIMEOUT)
        except (LoopNotRunningError, ControlRefusedError) as error:
            return _line(str(error), 409)
        except TicketTimeoutError:
            return self._done(f"{what} is under way", 202)
        return self._done(f"{what}d", 200)

    def _done(self, what: str, code: int) -> Response:
        status = self._source.status()
        return _Json({"status": what, "group": status.name, "state": str(status.state)}, code)

    async def dashboard(self, _: Request) -> Response:
        """Return the page. Its policy allows its own script and style, by their hashes, and requests to its own origin."""
        html = _FILE.read_text(encoding="utf-8")
        policy = (
            f"default-src 'none'; script-src {_hash(html, 'script')}; style-src {_hash(html, 'style')}; connect-src 'self';"
            " img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        return HTMLResponse(html, headers={"content-security-policy": policy})


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
    return _Json(answer, 200 if well else 503)


class _Json(JSONResponse):
    """JSON in which an error may say what UTF-8 cannot hold, as of a file's name: that is escaped."""

    def render(self, content: Any) -> bytes:
        text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.encode("utf-8", "backslashreplace")


def _line(text: str, status: int, **headers: str) -> Response:
    return PlainTextResponse(text + "\n", status, headers=headers)


# ----------------------------------------------------------------------------------------------------------------- acts


def refusal(request: Request, token: str, *, loopback: bool) -> Response | None:
    """Return why this request may not act, as a response of one line, or None if it may."""
    given = _bearer(request)
    if given is not None and token:
        if hmac.compare_digest(given, token.encode()):
            return None  # a page of another site cannot know the token, so nothing more needs to be asked
        return _line(f"the bearer token is not that of {ADMIN_TOKEN}", 403)
    if not loopback:
        if not token:
            text = f"refused, as other hosts reach this server: set {ADMIN_TOKEN} in its environment, and send that"
            return _line(text, 403)
        return _line(f"needs the header 'Authorization: Bearer <{ADMIN_TOKEN}>'", 401, **{"www-authenticate": "Bearer"})
    if _from_a_foreign_page(request):
        return _line("refused: a browser sent this for a page of another site; use the dashboard or curl", 403)
    return None


def _bearer(request: Request) -> bytes | None:
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    return given.strip().encode("latin-1") if scheme.lower() == "bearer" else None


def _from_a_foreign_page(request: Request) -> bool:
    """True if a browser sends this on behalf of a page that is not ours.

    A listener on loopback asks for no token. Yet any web page can have the operator's browser post to 127.0.0.1 (CSRF). A site
    whose name resolves to 127.0.0.1 can even do so as "same origin" (DNS rebinding). Browsers give both away: they send Origin
    and Sec-Fetch-Site, and Host is the name in the address bar. "same-site" is refused too: another port of localhost is the
    same site but another program. Tools such as curl send none of these headers and are let through, whatever Host they were
    told.
    """
    origin = request.headers.get("origin")
    fetched_from = request.headers.get("sec-fetch-site")
    if origin is None and fetched_from is None and "referer" not in request.headers:
        return False
    host = request.headers.get("host", "")
    if fetched_from not in (None, "same-origin", "none"):
        return True
    try:
        if origin is not None and urlsplit(origin).netloc.lower() != host.lower():
            return True
        return not _names_this_machine(urlsplit(f"//{host}").hostname or "")
    except ValueError:  # urlsplit cannot read it, so it is not this machine's page
        return True


def _names_this_machine(name: str) -> bool:
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


class _Headers:
    """Adds what every answer carries. The date is here because the servers' own cost a timer that ticks for ever."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                date = format_datetime(clock.utc_now(), usegmt=True).encode("ascii")
                headers = message.setdefault("headers", [])
                headers.extend(
                    [(b"date", date), (b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff")]
                )
            await send(message)

        await self._app(scope, receive, send_with_headers if scope["type"] == "http" else send)
