"""A group in name only: it says what a test tells it to say."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import anyio

from mainspring.core.state_machine import GroupState, ServiceState
from mainspring.events import Dispatcher
from mainspring.mailbox.message import Counts
from mainspring.telemetry.status import GroupStatus, LoopStatus


@dataclass
class FakeMailbox:
    name: str
    answer: Counts | Exception | float = field(default_factory=Counts)
    """The counts, an error to raise, or seconds to take."""
    asked: int = 0

    async def counts(self) -> Counts:
        self.asked += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        if isinstance(self.answer, float):
            await anyio.sleep(self.answer)
            return Counts()
        return self.answer


def loop_status(name: str = "indexer", **changes: Any) -> LoopStatus:
    values: dict[str, Any] = {
        "name": name,
        "state": ServiceState.RUNNING,
        "ready": True,
        "reason": None,
        "heartbeat_age": 0.25,
        "in_flight": 3,
        "concurrency": 8,
        "mailbox": "jobs",
        "outcomes": {"acknowledged": 5},
    }
    return LoopStatus(**values | changes)


def group_status(**changes: Any) -> GroupStatus:
    values: dict[str, Any] = {
        "name": "shop",
        "state": GroupState.RUNNING,
        "started": True,
        "ready": True,
        "live": True,
        "reasons": (),
        "uptime": 12.3456,
        "pid": 4711,
        "loops": (loop_status(),),
    }
    return GroupStatus(**values | changes)


class FakeGroup:
    def __init__(self, *boxes: FakeMailbox, **changes: Any) -> None:
        self.boxes = boxes
        self.dispatcher = Dispatcher()
        self.changes = changes
        self.drains: list[str] = []
        self.switches: list[str] = []
        self.refuses: Exception | None = None
        """What a pause or a resume raises."""
        self.on_refresh: dict[str, Any] = {}
        """What the status says once the checks were asked again."""

    def status(self) -> GroupStatus:
        return group_status(**self.changes)

    def request_drain(self, reason: str) -> None:
        self.drains.append(reason)

    async def pause(self, reason: str, *, timeout: float) -> None:
        await self._switch(reason, timeout)

    resume = pause

    async def _switch(self, reason: str, timeout: float) -> None:
        assert timeout > 0
        self.switches.append(reason)
        if self.refuses is not None:
            raise self.refuses
        await anyio.lowlevel.checkpoint()

    def mailboxes(self) -> tuple[FakeMailbox, ...]:
        return self.boxes

    async def refresh_checks(self) -> None:
        await anyio.lowlevel.checkpoint()
        self.changes |= self.on_refresh
