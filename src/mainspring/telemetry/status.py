"""What a running group says of itself: one frozen value for probes, ``/status``, the dashboard and the CLI."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mainspring.core.state_machine import GroupState, ServiceState


@dataclass(frozen=True, slots=True)
class LoopStatus:
    """One loop. Ages are in seconds; ``reason`` says in one line why it is not ready, where it is not."""

    name: str
    state: ServiceState
    ready: bool
    reason: str | None
    heartbeat_age: float
    in_flight: int = 0
    """How many messages are in hand: in handlers, claimed ahead, or being settled."""
    concurrency: int = 0
    """How many handlers run at once, at most."""
    mailbox: str | None = None
    restarts: int = 0
    oldest_beat_age: float = 0.0
    """Age of the oldest beat among the messages in flight."""
    outcomes: Mapping[str, int] = field(default_factory=dict)
    """How many deliveries ended in which way since the start."""
    progress: Mapping[str, tuple[float, float | None]] = field(default_factory=dict)
    """How far messages in flight are, where their handlers say so: done and total, by the message's id."""
    paused: bool = False
    """True if it has been told to take no new work until it is resumed."""
    state_seconds: float = 0.0
    """How long the present state has lasted."""
    uptime: float = 0.0
    """How long its present run has lasted, from its start or its last restart; 0 while it does not run."""


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
    state_seconds: float = 0.0
    """How long the present state has lasted."""
    shutdown_reason: str | None = None
    """Why a shutdown was requested (a signal's name, "drain" …); None before one is."""
    phases: Mapping[str, float] = field(default_factory=dict)
    """Seconds that each ended phase of the shutdown took, by the phase's name (a ``GroupState``)."""
    watchdog_threshold: float | None = None
    """Seconds without a beat after which a message counts as stalled; ages are judged against it."""
    paused: bool = False
    """True if all of its loops that have not ended are paused."""
    event_loop_lag: float | None = None
    """By how many seconds the event loop was late to turn, at most, in the last minute; None where no block watch runs."""


@dataclass(frozen=True, slots=True)
class MailboxStatus:
    """Where a mailbox's messages are, by part (delayed, pending, in_flight, settled, dead).

    ``counts`` is None where the mailbox did not answer in time; ``error`` then says why.
    """

    name: str
    counts: Mapping[str, int] | None
    error: str | None = None
    queue_age: float | None = None
    """Seconds since the send of its oldest pending message (see ``Counts.queue_age``); None where it is not known."""
