"""What a running group says of itself: one frozen picture for probes, ``/status``, the dashboard and the CLI."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mainspring.states import GroupState, ServiceState


@dataclass(frozen=True, slots=True)
class LoopStatus:
    """One loop. Ages are in seconds; ``reason`` says in one line why it is not ready, where it is not."""

    name: str
    state: ServiceState
    ready: bool
    reason: str | None
    heartbeat_age: float
    in_flight: int = 0
    concurrency: int = 0
    mailbox: str | None = None
    restarts: int = 0
    oldest_beat_age: float = 0.0
    """Age of the oldest beat among the messages in flight."""
    outcomes: Mapping[str, int] = field(default_factory=dict)
    """How many deliveries ended in which way since the start."""


@dataclass(frozen=True, slots=True)
class GroupStatus:
    """A group and its loops. ``checks`` holds each readiness check's error, None where it passes."""

    name: str
    state: GroupState
    started: bool
    ready: bool
    live: bool
    reasons: tuple[str, ...]
    uptime: float
    pid: int
    loops: tuple[LoopStatus, ...] = ()
    checks: Mapping[str, str | None] = field(default_factory=dict)
