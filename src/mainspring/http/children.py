"""Asks the servers of replicas for their status and their metrics."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, TypeAlias

import anyio

from mainspring.core.loggers import Logger
from mainspring.errors import describe
from mainspring.http.client import get
from mainspring.telemetry.merged_metrics import ReplicaMetrics
from mainspring.telemetry.plain import plain

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mainspring.http.client import HttpAnswer, Origin

_log = Logger("mainspring.http")

ASK_WITHIN = 2.0
"""Seconds that each replica has to answer."""
ASK_ALL_WITHIN = 5.0
"""Seconds that all have together; Prometheus waits 10 s for a page by default."""
AT_ONCE = 64
LONGEST = 1 << 20
"""The most bytes that are taken of an answer."""
NOT_FOUND = 404
ASK_AGAIN = 60.0
"""Seconds after which a page that a replica does not have is asked for again: its server may be of any make."""
AGENT = "mainspring-orchestrator"
TEXT_FORMAT = "text/plain"
_REMEMBERED = 1_000


ReplicaKey: TypeAlias = tuple[str, int]
"""The name of a service, and the number of a replica."""


class Children:
    """Asks replicas. What does not answer is left out, and named once in the log. Nothing runs between two calls."""

    def __init__(self) -> None:
        self._told: set[str] = set()
        self._missing: dict[tuple[ReplicaKey, str], float] = {}
        """Until when a replica is not asked for a page that it does not have."""

    async def statuses(self, servers: Mapping[ReplicaKey, Origin]) -> dict[ReplicaKey, Any]:
        """Return the JSON objects that they answer at ``/status``."""
        found = {}
        for key, answer in (await self._ask_all(servers, "/status", "application/json")).items():
            try:
                status = plain(json.loads(answer.body))
            except (ValueError, RecursionError):
                continue
            if isinstance(status, dict):
                found[key] = status
        return found

    async def metrics(self, servers: Mapping[ReplicaKey, Origin]) -> list[ReplicaMetrics]:
        """Return the metrics that they answer at ``/metrics`` in the text format, in the order given."""
        return [
            ReplicaMetrics(*key, answer.body.decode("utf-8", "replace"))
            for key, answer in (await self._ask_all(servers, "/metrics", TEXT_FORMAT)).items()
            if answer.headers.get("content-type", "").partition(";")[0].strip() == TEXT_FORMAT
        ]

    def tell_once(self, line: str) -> None:
        """Log a line that was not logged yet."""
        if line not in self._told:
            if len(self._told) >= _REMEMBERED:
                self._told.clear()
            self._told.add(line)
            _log.warning("%s", line)

    async def _ask_all(
        self, servers: Mapping[ReplicaKey, Origin], path: str, accept: str
    ) -> dict[ReplicaKey, HttpAnswer]:
        """Return the answers with status 200 that come in time."""
        now = anyio.current_time()
        self._missing = {page: until for page, until in self._missing.items() if until > now}
        servers = {key: origin for key, origin in servers.items() if (key, path) not in self._missing}
        limiter = anyio.CapacityLimiter(AT_ONCE)
        answers: dict[ReplicaKey, HttpAnswer] = {}
        failures = dict.fromkeys(servers, f"no answer within {ASK_WITHIN:g} s")

        async def ask(key: ReplicaKey) -> None:
            async with limiter:
                with anyio.move_on_after(ASK_WITHIN):
                    try:
                        answers[key] = await get(servers[key], path, agent=AGENT, accept=accept, limit=LONGEST)
                    except Exception as error:  # a server of any make: what it does wrong must not cost the page
                        failures[key] = describe(error)

        with anyio.move_on_after(ASK_ALL_WITHIN):
            async with anyio.create_task_group() as tasks:
                for key in servers:
                    tasks.start_soon(ask, key)
        for (service, replica), why in failures.items():
            if (service, replica) not in answers:
                self.tell_once(f"replica {replica} of service {service!r} does not answer at {path}: {why}")
        for key, answer in answers.items():
            if answer.status == NOT_FOUND:
                self._missing[key, path] = now + ASK_AGAIN
        return {key: answers[key] for key in servers if key in answers and answers[key].status == 200}
