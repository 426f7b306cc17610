"""The workers of a mailbox, as its store knows them.

Each run of a loop that claims from a mailbox keeps a record there (``worker/presence.py``). It writes what is new every
``TELL_EVERY`` seconds, and deletes the record at its end. The record of a killed process stays until it expires. So a list of
workers costs the store at most one write for each loop in that time, and messages cost nothing.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping  # noqa: TC003 - a web framework resolves the annotations of WorkerStatus
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from mainspring.errors import ConfigError
from mainspring.mailbox.records import WORKER

if TYPE_CHECKING:
    from mainspring.mailbox.backend import Backend
    from mainspring.mailbox.mailbox import Mailbox

TELL_EVERY: Final = 20.0
"""Seconds between two looks at whether a loop's record must be written."""
GONE_AFTER: Final = 60.0
"""Seconds after its last write at which a loop's record ends."""
PAGE: Final = 500
"""How many records are read at once."""


class WorkerState(StrEnum):
    """Whether a loop takes work."""

    RUNNING = "running"
    PAUSED = "paused"
    DRAINING = "draining"
    """It takes no new work, and ends with the messages in hand."""


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One loop that works on a mailbox, as it said itself when it was last seen. Dates are in UTC, by the worker's clock."""

    worker: str
    """The host and the process, as ``host:pid``."""
    loop: str
    group: str | None
    """The name of the group that runs the loop, or None."""
    state: WorkerState
    concurrency: int
    """How many handlers it runs at once, at most."""
    in_flight: int
    """How many messages it had in hand: in handlers, claimed ahead, or being settled."""
    version: str
    """The version of Mainspring that it runs."""
    started_at: datetime
    """When this run of the loop began."""
    last_seen: datetime
    """When it wrote this: a loop that is idle does so every 40 seconds."""
    jobs: Mapping[str, int] = field(default_factory=dict)
    """The ids of messages that had been in its handlers for a second or more, each with the number of that delivery: the 100
    that have been there for the longest."""

    def write(self) -> bytes:
        """Return the record's value."""
        said = {
            "worker": self.worker,
            "loop": self.loop,
            "group": self.group,
            "state": self.state,
            "concurrency": self.concurrency,
            "in_flight": self.in_flight,
            "version": self.version,
            "started_at": self.started_at.timestamp(),
            "last_seen": self.last_seen.timestamp(),
            "jobs": dict(self.jobs),
        }
        return json.dumps(said, separators=(",", ":")).encode()

    @classmethod
    def read(cls, value: bytes) -> WorkerStatus:
        """Return what a record's value says."""
        said: dict[str, Any] = json.loads(value)
        return cls(
            said["worker"],
            said["loop"],
            said["group"],
            WorkerState(said["state"]),
            said["concurrency"],
            said["in_flight"],
            said["version"],
            datetime.fromtimestamp(said["started_at"], UTC),
            datetime.fromtimestamp(said["last_seen"], UTC),
            said["jobs"],
        )


@cache
def _host() -> str:
    return socket.gethostname()


def worker_name() -> str:
    """Return the host and the id of this process, as ``host:pid``."""
    return f"{_host()}:{os.getpid()}"


async def workers_of(mailbox: Mailbox[Any, Any]) -> list[WorkerStatus]:
    """See :meth:`Mailbox.workers`."""
    mailbox.check_open()
    if not mailbox.capabilities.records:
        raise ConfigError(f"mailbox {mailbox.name!r} does not know its workers (Capabilities.records)")
    return sorted(await _all_of(mailbox.backend), key=lambda status: (status.worker, status.loop, status.started_at))


async def workers_of_jobs(backend: Backend) -> dict[tuple[str, int], str]:
    """Return the names of the workers that have said to run a message, by its id and the number of the delivery."""
    found = await _all_of(backend)
    return {(job, deliveries): status.worker for status in found for job, deliveries in status.jobs.items()}


async def _all_of(backend: Backend) -> list[WorkerStatus]:
    found: list[WorkerStatus] = []
    after: str | None = None
    while True:
        page = await backend.list_records(WORKER, PAGE, after)
        found += [WorkerStatus.read(record.value) for record in page]
        if len(page) < PAGE:
            return found
        after = page[-1].key
