"""The present status of a group: what ``/status``, the probes and the dashboard show, as one frozen value."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import anyio

from mainspring.core.state_machine import GroupState, ServiceState
from mainspring.telemetry.status import GroupStatus, LoopStatus

if TYPE_CHECKING:
    from mainspring.group.lifetime import Lifetime
    from mainspring.group.managed_loop import ManagedLoop


def status_at_rest(name: str, crash: BaseException | None) -> GroupStatus:
    """Return the status of a group that does not run."""
    why = "not running" if crash is None else f"not running: it crashed with {type(crash).__name__}: {crash}"
    return GroupStatus(
        name, GroupState.IDLE, started=False, ready=False, live=crash is None, reasons=(why,), uptime=0.0,
        pid=os.getpid(),
    )  # fmt: skip


def status_of(lifetime: Lifetime) -> GroupStatus:
    """Return the status of a group that runs."""
    now = anyio.current_time()
    threshold = lifetime.settings.watchdog_threshold
    loops = tuple(_loop(managed, threshold, now) for managed in lifetime.managed_loops)
    reasons = [f"loop {loop.name!r}: {loop.reason}" for loop in loops if loop.reason is not None]
    reasons += [f"check {name!r}: {error}" for name, error in lifetime.checks.failed.items()]
    if lifetime.shutdown.requested.is_set():
        reasons.insert(0, f"shutting down: {lifetime.shutdown.reason}")
    elif not lifetime.started:
        reasons.insert(0, "starting")
    living = [loop for loop in loops if loop.state is not ServiceState.STOPPED]
    return GroupStatus(
        name=lifetime.name,
        state=lifetime.machine.state,
        started=lifetime.started,
        ready=not reasons,
        live=lifetime.crash is None,
        reasons=tuple(reasons),
        uptime=now - lifetime.began,
        pid=os.getpid(),
        loops=loops,
        checks=dict(lifetime.checks.results),
        state_seconds=now - lifetime.machine.since,
        shutdown_reason=lifetime.shutdown.reason or None,
        phases=dict(lifetime.phases),
        watchdog_threshold=threshold,
        paused=bool(living) and all(loop.paused for loop in living),
        event_loop_lag=lifetime.event_loop_lag,
    )


def _loop(managed: ManagedLoop, threshold: float | None, now: float) -> LoopStatus:
    loop, health = managed.loop, managed.actor.health()
    oldest = health.oldest_beat_age
    overdue = max((claim.beat_age() for claim in loop.claims if not claim.done), default=0.0)
    reason = health.reason
    if managed.life.state is not ServiceState.RUNNING:
        reason = loop.trouble or str(managed.life.state)
    elif reason is None and threshold is not None and oldest > threshold / 2:
        reason = f"no sign of life for {oldest:.0f} s (stalled at {threshold:g} s)"
    elif reason is None and threshold is not None and overdue > threshold / 2:
        reason = f"its mailbox has not answered a receive, overdue by {overdue:.0f} s (cancelled at {threshold:g} s)"
    return LoopStatus(
        name=managed.name,
        state=managed.life.state,
        ready=reason is None,
        reason=reason,
        heartbeat_age=health.heartbeat_age,
        in_flight=health.in_flight,
        concurrency=getattr(loop, "concurrency", 1),
        mailbox=getattr(getattr(loop, "mailbox", None), "name", None),
        restarts=managed.life.counts.restarts,
        oldest_beat_age=oldest,
        outcomes=dict(getattr(loop, "outcomes", {})),
        progress={run.message_id: made for run in loop.runs if (made := getattr(run, "progress_made", None))},
        paused=health.paused,
        state_seconds=now - managed.life.since,
        uptime=managed.life.uptime(now),
    )
