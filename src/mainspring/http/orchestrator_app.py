"""The Starlette app of an orchestrator: probes, status, output, acts (start, stop, restart, drain) and the dashboard."""

from __future__ import annotations

import json
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import anyio.to_thread
from starlette.applications import Starlette
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

import mainspring
from mainspring.core import clock
from mainspring.core.loggers import Logger
from mainspring.errors import (
    InvalidParameterError,
    MainspringError,
    ServiceNotFoundError,
    TicketTimeoutError,
)
from mainspring.http.access import Access
from mainspring.http.children import AGENT, Children
from mainspring.http.dashboard import dashboard_page
from mainspring.http.responses import CommonHeaders, PlainJson, line_response
from mainspring.telemetry.merged_metrics import merged_page
from mainspring.telemetry.plain import plain
from mainspring.telemetry.process_usage import UsageReader
from mainspring.telemetry.service_metrics import ServiceMetrics
from mainspring.threads.ticket import Ticket

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping

    from starlette.requests import Request
    from starlette.types import Send

    from mainspring.core.dispatcher import Dispatcher
    from mainspring.events import ServiceOutput
    from mainspring.http.children import ReplicaKey
    from mainspring.http.client import Origin
    from mainspring.runtime.scope import DaemonScope
    from mainspring.services.recent_output import RecentOutput
    from mainspring.services.status import OrchestratorStatus
    from mainspring.telemetry.process_usage import ProcessUsage

_log = Logger("mainspring.service")

ACT_TIMEOUT = 10.0
"""Seconds that a request waits for what it has asked for, by default. It goes on after that."""
MAX_WAIT = 86_400.0
LINES = 100
_N = TypeVar("_N", int, float)
_JSON_LINES = "application/x-ndjson"


class ServiceSource(Protocol):
    """What the app shows and acts on: an Orchestrator, or any object with these calls. All are called on its event loop."""

    name: str
    dispatcher: Dispatcher

    def status(self) -> OrchestratorStatus:
        """Return the present status."""

    def request_shutdown(self, reason: str) -> None:
        """Ask for the end, and return at once."""

    async def start(self, service: str, replica: int | None = None) -> None:
        """Start a service or a replica, and wait until it runs."""

    async def stop(self, service: str, replica: int | None = None) -> None:
        """Stop a service or a replica, and wait until it has ended."""

    async def restart(self, service: str | None = None, replica: int | None = None) -> None:
        """Restart all services, one, or a replica, one replica after the other."""


def orchestrator_app(
    source: ServiceSource,
    scope: DaemonScope,
    *,
    output: RecentOutput,
    metrics: ServiceMetrics | None = None,
    replica_servers: Callable[[], Mapping[ReplicaKey, Origin]] = dict,
    admin_token: str | None = None,
    loopback: bool = True,
) -> Starlette:
    """Return the app that answers for ``source``.

    :param scope: what a request asks for runs as a task of this scope, so that it goes on when the client leaves.
    :param output: the lines that ``/logs`` shows.
    :param metrics: what ``/metrics`` renders. None makes them, counted from this call on.
    :param replica_servers: returns the servers of replicas that can be asked for their status and metrics now.
    :param admin_token: the bearer token that acts and ``/logs`` need; None reads ``MAINSPRING_ADMIN_TOKEN``. Without a token,
        they are refused unless ``loopback``.
    :param loopback: whether only this machine can reach the listener (a loopback address, a Unix socket).
    """
    access = Access(admin_token, loopback=loopback)
    if metrics is None:
        metrics = ServiceMetrics(source)
        metrics.subscribe(source.dispatcher)
    views = _OrchestratorViews(source, scope, output, metrics, replica_servers)
    routes = [
        Route("/health/live", views.live),
        Route("/health/ready", views.ready),
        Route("/health/startup", views.startup),
        Route("/metrics", views.metrics),
        Route("/status", views.status),
        Route("/logs", access.guarded(views.logs)),
        Route("/services/{service}/logs", access.guarded(views.logs)),
        Route("/services/{service}/start", access.guarded(views.start), methods=["POST"]),
        Route("/services/{service}/stop", access.guarded(views.stop), methods=["POST"]),
        Route("/services/{service}/restart", access.guarded(views.restart), methods=["POST"]),
        Route("/restart", access.guarded(views.restart), methods=["POST"]),
        Route("/drain", access.guarded(views.drain), methods=["POST"]),
        Route("/", views.dashboard),
    ]
    app = Starlette(routes=routes, exception_handlers={InvalidParameterError: _wrong_parameter})
    app.add_middleware(CommonHeaders)
    return app


class _OperationRequest(NamedTuple):
    """What the path and the query of a request say."""

    service: str | None
    replica: int | None
    wait: float
    lines: int
    follow: bool

    @staticmethod
    def of(request: Request) -> _OperationRequest:
        """Read them.

        :raises InvalidParameterError: a value cannot be used.
        """
        query = request.query_params
        return _OperationRequest(
            service=request.path_params.get("service"),
            replica=_number(query, "replica", int, 0, 100_000) if "replica" in query else None,
            wait=_number(query, "wait", float, ACT_TIMEOUT, MAX_WAIT),
            lines=_number(query, "lines", int, LINES, 1_000_000),
            follow=query.get("follow", "0") not in ("0", "false", ""),
        )


def _number(query: Any, name: str, kind: type[_N], default: _N, most: _N) -> _N:
    said = query.get(name)
    if said is None:
        return default
    try:
        number = kind(said)
    except ValueError:
        number = kind(-1)
    if not 0 <= number <= most:
        what = "whole number" if kind is int else "number"
        raise InvalidParameterError(f"{name} must be a {what} from 0 to {most:.0f}, not {said!r:.100}")
    return number


async def _wrong_parameter(_: Request, error: Exception) -> Response:
    return line_response(str(error), 400)


class _OrchestratorViews:
    def __init__(
        self,
        source: ServiceSource,
        scope: DaemonScope,
        output: RecentOutput,
        metrics: ServiceMetrics,
        replica_servers: Callable[[], Mapping[ReplicaKey, Origin]],
    ) -> None:
        self._source = source
        self._scope = scope
        self._output = output
        self._metrics = metrics
        self._replica_servers = replica_servers
        self._usage = UsageReader()
        self._children = Children()

    # ------------------------------------------------------------------------------------------------------- probes

    async def live(self, _: Request) -> Response:
        return _probe(self._source.status(), ())

    async def ready(self, _: Request) -> Response:
        status = self._source.status()
        return _probe(status, status.unready_reasons)

    async def startup(self, _: Request) -> Response:
        status = self._source.status()
        return _probe(status, () if status.started else ("not all core services have started",))

    # ------------------------------------------------------------------------------------------------------- showing

    async def metrics(self, request: Request) -> Response:
        theirs = await self._children.metrics(self._servers(request))
        ours = await self._metrics.collect(await self._read_usage())
        accept = request.headers.get("accept", "")
        with clock.real_work():
            page = await anyio.to_thread.run_sync(merged_page, ours, theirs, accept, abandon_on_cancel=True)
        for line in page.left_out:
            self._children.tell_once(line)
        return Response(page.text, headers={"content-type": page.content_type})

    async def status(self, request: Request) -> Response:
        children = await self._children.statuses(self._servers(request))
        usage = await self._read_usage()
        status = self._source.status()
        tree = plain(status)
        for service in tree["services"]:
            for replica in service["replicas"]:
                replica["usage"] = plain(usage.get(replica["pid"]))
                replica["child"] = children.get((service["name"], replica["number"]))
        tree["kind"] = "orchestrator"
        tree["ready"] = not status.unready_reasons
        tree["reasons"] = list(status.unready_reasons)
        tree["version"] = mainspring.__version__
        tree["time"] = clock.utc_now().isoformat(timespec="milliseconds")
        return PlainJson(tree)

    def _servers(self, request: Request) -> Mapping[ReplicaKey, Origin]:
        """Return the servers to ask. An orchestrator that asks is answered without: it may be this one, or ask in a circle."""
        return {} if request.headers.get("user-agent") == AGENT else self._replica_servers()

    async def _read_usage(self) -> dict[int, ProcessUsage]:
        services = self._source.status().services
        return await self._usage.read(
            [replica.pid for service in services for replica in service.replicas if replica.pid is not None]
        )

    async def logs(self, request: Request) -> Response:
        said = _OperationRequest.of(request)
        replicas = {each.name: [one.number for one in each.replicas] for each in self._source.status().services}
        if said.service is not None and said.service not in replicas:
            return line_response(f"{said.service!r} is no service of {self._source.name!r}", 404)
        if said.service is not None and said.replica is not None and said.replica not in replicas[said.service]:
            return line_response(f"service {said.service!r} has no replica {said.replica}", 404)
        where = said.lines, said.service, said.replica
        if said.follow and request.method == "GET":  # HEAD: a stream without a body would have no reader
            return _LineStream(self._output.follow(*where))
        return Response("".join(map(_as_line, self._output.last(*where))), media_type=_JSON_LINES)

    async def dashboard(self, _: Request) -> Response:
        return dashboard_page()

    # ------------------------------------------------------------------------------------------------------- acting

    async def start(self, request: Request) -> Response:
        said = _OperationRequest.of(request)
        return await self._perform("start", "started", partial(self._source.start, said.service or ""), said)

    async def stop(self, request: Request) -> Response:
        said = _OperationRequest.of(request)
        return await self._perform("stop", "stopped", partial(self._source.stop, said.service or ""), said)

    async def restart(self, request: Request) -> Response:
        said = _OperationRequest.of(request)
        return await self._perform("restart", "restarted", partial(self._source.restart, said.service), said)

    async def drain(self, _: Request) -> Response:
        self._source.request_shutdown("drain requested over HTTP")
        return PlainJson({"status": "draining", **self._standing()}, 202)

    async def _perform(
        self, act: str, done: str, perform: Callable[[int | None], Awaitable[None]], said: _OperationRequest
    ) -> Response:
        """Have an act performed, and answer when it is done or ``said.wait`` has passed."""
        what = f"{act} of {'all services' if said.service is None else f'service {said.service!r}'}"
        ticket: Ticket[None] = Ticket(what)
        self._scope.start_soon(self._run, what, perform, said.replica, ticket, name=what)
        try:
            await ticket.wait(timeout=said.wait)
        except TicketTimeoutError:
            return PlainJson({"status": f"{act} is under way", **self._standing()}, 202)
        except ServiceNotFoundError as error:
            return line_response(str(error), 404)
        except MainspringError as error:
            return line_response(str(error), 409)
        return PlainJson({"status": done, **self._standing()})

    async def _run(
        self, what: str, perform: Callable[[int | None], Awaitable[None]], replica: int | None, ticket: Ticket[None]
    ) -> None:
        _log.info("%s was requested", what)
        with ticket.writer() as answer:
            try:
                await perform(replica)
            except MainspringError as error:
                _log.warning("%s failed: %s", what, error)
                answer.fail(error)
            else:
                answer.complete(None)

    def _standing(self) -> dict[str, Any]:
        status = self._source.status()
        return {"orchestrator": status.name, "state": str(status.state)}


def _probe(status: OrchestratorStatus, reasons: tuple[str, ...]) -> Response:
    answer = {
        "status": "unavailable" if reasons else "ok",
        "orchestrator": status.name,
        "state": str(status.state),
        "reasons": list(reasons),
        "services": [
            {"name": each.name, "state": str(each.state), "ready": each.ready, "error": each.error}
            for each in status.services
        ],
    }
    return PlainJson(answer, 503 if reasons else 200)


class _LineStream(StreamingResponse):
    """Lines of JSON as they come. What they come from is closed when the client has gone."""

    def __init__(self, batches: AsyncGenerator[tuple[int, list[ServiceOutput]]]) -> None:
        self._batches = batches
        super().__init__(self._lines(), media_type=_JSON_LINES)

    async def stream_response(self, send: Send) -> None:
        async with aclosing(self._batches):
            await super().stream_response(send)

    async def _lines(self) -> AsyncIterator[str]:
        async for lost, events in self._batches:
            before = json.dumps({"lost": lost}) + "\n" if lost else ""
            yield before + "".join(map(_as_line, events))


def _as_line(event: ServiceOutput) -> str:
    said = {
        "time": event.at.isoformat(timespec="milliseconds"),
        "service": event.service,
        "replica": event.replica,
        "stream": event.stream,
        "line": event.line,
    }
    return json.dumps(said) + "\n"
