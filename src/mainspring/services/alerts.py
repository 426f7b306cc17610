"""Alerts: what an operator must hear of at once is told to webhooks, commands and functions.

The decision is ``Alerts._note``: which event is an alert, and whether it was told already. Each target has a queue and a task,
so that a target which hangs keeps no other waiting, and no service.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime  # noqa: TC003 - users resolve the annotations
from enum import StrEnum
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias
from urllib.parse import urlsplit

import anyio

from mainspring.core import random
from mainspring.core.introspection import is_async, name_of
from mainspring.errors import ConfigError
from mainspring.events import AlertFailed, AlertSent, RestartsExceeded, ServiceGivenUp
from mainspring.redaction import one_line
from mainspring.runtime.condition import ConditionVariable
from mainspring.runtime.retry import Retries
from mainspring.runtime.scope import DaemonScope
from mainspring.runtime.service_manager import without_manager
from mainspring.services.callables import answer_of, late
from mainspring.services.commands import run_command
from mainspring.services.spawning import Launch, SpawnError
from mainspring.services.spec import texts
from mainspring.validation import is_number

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from mainspring.core.dispatcher import Dispatcher
    from mainspring.services.spawning import Spawner

REPEAT_AFTER = 3_600.0
"""Seconds after which the same alert is sent again."""
SENT_WITHIN = 10.0
"""Seconds that an orchestrator waits at its end for alerts that are not sent yet."""
FUNCTION_TIMEOUT = 10.0
"""Seconds that a function may take for one alert."""
TRIES = 6
WAITING = 100
"""Alerts that wait for one target, at most: the oldest gives way."""
_PASSING = frozenset({408, 425, 429})
_HEADER_NAME = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_HEADER_VALUE = r"(?:[!-~](?:[ \t!-~]*[!-~])?)?"
_posting: ContextVar[bool] = ContextVar("posting", default=False)


class AlertKind(StrEnum):
    """What an alert is about."""

    SERVICE_GIVEN_UP = "service given up"
    TOO_MANY_RESTARTS = "too many restarts"


@dataclass(frozen=True, slots=True)
class Alert:
    """What an operator must hear of.

    ``id`` is the same with each try, so that a receiver can drop what it has already. ``service`` and ``replica``: what was
    given up, or restarted last. ``core``: True if all services end with it. ``host``: the name of the machine. ``at``: UTC.
    """

    id: str
    kind: AlertKind
    orchestrator: str
    service: str
    replica: int
    reason: str
    core: bool
    host: str
    at: datetime

    def as_dict(self) -> dict[str, Any]:
        """Return what a webhook sends as JSON: the fields, ``at`` in ISO 8601."""
        return {
            "id": self.id,
            "kind": str(self.kind),
            "orchestrator": self.orchestrator,
            "service": self.service,
            "replica": self.replica,
            "reason": self.reason,
            "core": self.core,
            "host": self.host,
            "at": self.at.isoformat(timespec="milliseconds"),
        }


@dataclass(frozen=True, slots=True)
class Webhook:
    """A POST of the alert as JSON (:meth:`Alert.as_dict`), its id also in the header ``X-Mainspring-Alert``.

    An answer with status 2xx is success. Other answers, and none within ``timeout`` seconds, are tried again, but not a status
    4xx other than 408, 425 and 429. It needs the extra ``alerts``. Logs, errors and events show
    only the host of the URL, and no header.

    :raises ConfigError: the URL is none of http or https, a header cannot be sent, or the extra is missing.
    """

    url: str = field(repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    timeout: float = 10.0

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except (ValueError, AttributeError, TypeError):
            usable = False
        if not usable:
            raise ConfigError("Webhook: url must be http://host/path or https://host/path")
        if not isinstance(self.headers, Mapping) or not all(
            isinstance(each, str) for pair in self.headers.items() for each in pair
        ):
            raise ConfigError("Webhook: headers must be a mapping of texts to texts")
        for name, value in self.headers.items():
            if not re.fullmatch(_HEADER_NAME, name):
                raise ConfigError("Webhook: the name of a header must be letters, digits and hyphens")
            if not re.fullmatch(_HEADER_VALUE, value):
                raise ConfigError(
                    f"Webhook: header {name} must be printable ASCII without spaces or line breaks at its ends"
                )
        _check_timeout("Webhook", self.timeout)
        if find_spec("httpx") is None:
            raise ConfigError("a webhook needs an extra: pip install 'mainspring[alerts]'")


@dataclass(frozen=True, slots=True)
class AlertCommand:
    """A command, ended after ``timeout`` seconds. Exit status 0 is success; others are tried again.

    It finds the alert in its environment: ``MAINSPRING_ALERT`` holds all of it as JSON, and ``MAINSPRING_ALERT_KIND``,
    ``_SERVICE``, ``_REPLICA``, ``_REASON``, ``_ORCHESTRATOR`` and ``_ID`` one field each. ``{service}``, ``{replica}``,
    ``{kind}`` and ``{reason}`` in its arguments are replaced.

    :raises ConfigError: it names no program.
    """

    command: tuple[str, ...]
    timeout: float = 10.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "command", texts("AlertCommand", "command", self.command))
        if not self.command or not self.command[0]:
            raise ConfigError("AlertCommand: command must name a program")
        _check_timeout("AlertCommand", self.timeout)


AlertTarget: TypeAlias = Webhook | AlertCommand | Callable[[Alert], Awaitable[object]]
"""Where alerts go. An async function that raises, or has not returned after 10 s, is called again."""


def _check_timeout(owner: str, timeout: object) -> None:
    if not (is_number(timeout, 0) and timeout):
        raise ConfigError(f"{owner}: timeout must be above 0 seconds, not {timeout!r}")


class Alerts:
    """Tells the targets of what an orchestrator's events say.

    A service that is given up is an alert, and so are too many restarts of all together. The same kind of alert of the same
    service for the same reason is not sent again within an hour, also of another replica.

    :raises ConfigError: a target is none of the three kinds.
    """

    def __init__(self, targets: Sequence[AlertTarget], *, orchestrator: str, dispatcher: Dispatcher) -> None:
        self._orchestrator = orchestrator
        self._dispatcher = dispatcher
        self._told: dict[tuple[AlertKind, str, str], float] = {}
        self._queues = [_AlertQueue(target, dispatcher) for target in targets]

    @asynccontextmanager
    async def sending(self, spawner: Spawner) -> AsyncIterator[None]:
        """Send alerts for the block. At its end, alerts not sent yet have ``SENT_WITHIN`` seconds.

        Where the block is left by an error, they have none. Each that is not sent is an :class:`AlertFailed`.
        """
        if not self._queues:
            yield
            return
        ends = [
            self._dispatcher.subscribe(ServiceGivenUp, self._on_given_up),
            self._dispatcher.subscribe(RestartsExceeded, self._on_restarts),
        ]
        try:
            async with DaemonScope("alerts", timeout=SENT_WITHIN) as scope:
                for queue in self._queues:
                    scope.start_soon(queue.send_all, spawner, name=f"alerts to {queue.name}", stop=queue.close)
                yield
        finally:
            for end in ends:
                end()

    def _on_given_up(self, event: ServiceGivenUp) -> None:
        self._note(AlertKind.SERVICE_GIVEN_UP, event.service, event.replica, event.reason, core=event.core, at=event.at)

    def _on_restarts(self, event: RestartsExceeded) -> None:
        reason = f"more than {event.most} restarts in {event.period:g} s"
        self._note(AlertKind.TOO_MANY_RESTARTS, event.service, event.replica, reason, core=True, at=event.at)

    def _note(self, kind: AlertKind, service: str, replica: int, reason: str, *, core: bool, at: datetime) -> None:
        now = anyio.current_time()
        self._told = {key: told for key, told in self._told.items() if now < told + REPEAT_AFTER}
        if (kind, service, reason) in self._told:
            return
        self._told[kind, service, reason] = now
        alert = Alert(
            random.token(128), kind, self._orchestrator, service, replica, reason, core, socket.gethostname(), at
        )
        for queue in self._queues:
            queue.put(alert)


class _Delivered(NamedTuple):
    """``error``: why an alert is not sent; None: it is. ``final``: another try would fare no better."""

    error: str | None
    final: bool = False


class _AlertQueue:
    """The alerts that wait for one target, and the task that sends them, one after the other."""

    def __init__(self, target: AlertTarget, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._waiting: deque[Alert] = deque()
        self._changes = ConditionVariable()
        self._closed = False
        self._send: Callable[[Spawner, Alert], Awaitable[_Delivered]]
        if isinstance(target, Webhook):
            self.name = f"webhook {urlsplit(target.url).hostname}"
            self._send = lambda _, alert: _post(target, alert)
        elif isinstance(target, AlertCommand):
            self.name = f"command {target.command[0]}"
            self._send = lambda spawner, alert: _run(spawner, target, alert)
        elif is_async(target):
            self.name = f"function {name_of(target)}"
            self._send = lambda _, alert: _call(target, alert)
        else:
            raise ConfigError(
                f"Orchestrator: alerts takes Webhook, AlertCommand and async functions of (alert), not {target!r:.200}"
            )

    def put(self, alert: Alert) -> None:
        """Have an alert sent."""
        self._waiting.append(alert)
        if len(self._waiting) > WAITING:
            # The first one is on its way.
            self._fail(self._waiting[1], f"{WAITING} alerts wait")
            del self._waiting[1]
        self._changes.notify_all()

    def close(self) -> None:
        """Have the task end when all is sent."""
        self._closed = True
        self._changes.notify_all()

    async def send_all(self, spawner: Spawner) -> None:
        """Send what waits, until :meth:`close`. Cancelled, it gives up what is not sent."""
        try:
            while True:
                await self._changes.wait_for(lambda: bool(self._waiting) or self._closed)
                if not self._waiting:
                    return
                await self._send_first(spawner)
                self._waiting.popleft()
        finally:
            for alert in self._waiting:
                self._fail(alert, "it was not sent before the end")

    async def _send_first(self, spawner: Spawner) -> None:
        alert = self._waiting[0]
        retries = Retries(initial=1.0, maximum=30.0)
        while True:
            error, final = await self._send(spawner, alert)
            if error is None:
                self._dispatcher.dispatch(AlertSent(self.name, alert.kind, alert.service, alert.replica, alert.id))
                return
            if final or retries.failures + 1 >= TRIES:
                self._fail(alert, error)
                return
            await retries.pause()

    def _fail(self, alert: Alert, error: str) -> None:
        self._dispatcher.dispatch(
            AlertFailed(self.name, alert.kind, alert.service, alert.replica, alert.id, one_line(error))
        )


async def _call(fn: Callable[[Alert], Awaitable[object]], alert: Alert) -> _Delivered:
    return _Delivered((await answer_of(lambda: fn(alert), timeout=FUNCTION_TIMEOUT, late=late(FUNCTION_TIMEOUT))).error)


async def _run(spawner: Spawner, target: AlertCommand, alert: Alert) -> _Delivered:
    fields = alert.as_dict()
    environment = {
        **without_manager(os.environ),
        "MAINSPRING_ALERT": json.dumps(fields),
        **{
            f"MAINSPRING_ALERT_{name.upper()}": str(fields[name])
            for name in ("kind", "service", "replica", "reason", "orchestrator", "id")
        },
    }
    command = target.command
    for name in ("service", "replica", "kind", "reason"):
        command = tuple(each.replace(f"{{{name}}}", str(fields[name])) for each in command)
    launch = Launch(alert.service, alert.replica, command, environment, notify=False)
    try:
        return _Delivered((await run_command(spawner, launch, timeout=target.timeout)).error)
    except SpawnError as error:
        return _Delivered(str(error))


async def _post(target: Webhook, alert: Alert) -> _Delivered:
    import httpx  # late: only a webhook needs it

    headers = {"X-Mainspring-Alert": alert.id, **target.headers}

    # httpx logs the URL of each request.
    logging.getLogger("httpx").addFilter(_is_not_posting)

    async def post() -> int:
        _posting.set(True)
        async with httpx.AsyncClient(timeout=None) as client:  # noqa: S113 - the whole has one
            answer = await client.post(target.url, json=alert.as_dict(), headers=headers)
        return answer.status_code

    status, error = await answer_of(post, timeout=target.timeout, late=late(target.timeout))
    if error is not None:
        return _Delivered(error.replace(target.url, "the URL"))
    assert isinstance(status, int)
    if 200 <= status < 300:
        return _Delivered(None)
    return _Delivered(f"it answered with status {status}", final=400 <= status < 500 and status not in _PASSING)


def _is_not_posting(_: logging.LogRecord) -> bool:
    return not _posting.get()
