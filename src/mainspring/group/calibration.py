"""Do the timeouts of a loop and its group fit together? Pure rules: figures in, verdicts with their advice out.

``mainspring check`` prints them, and a LoopGroup warns by them when it starts. Each rule that fails names one setting and
a value for it with which that rule passes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from mainspring.errors import ConfigError
from mainspring.policies import DeadLetterPolicy, RetryPolicy
from mainspring.validation import MAX_VISIBILITY, counted

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mainspring.policies import Renewal

KILL_MARGIN = 1.0
"""Seconds that a process needs to leave, on top of its own phases, before the orchestrator kills it."""

KUBERNETES_GRACE = 30.0
"""Kubernetes' default ``terminationGracePeriodSeconds``: shorter than the default phases of a group, which take 36 s.
https://kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle/#pod-termination"""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """The timeouts that one loop runs under, in seconds; the defaults are those of MainLoop and LoopGroup.

    ``grace`` is how long the orchestrator waits between SIGTERM and SIGKILL, ``longest`` the longest processing of one
    message, ``beat_gap`` the longest that a handler goes without a beat (unknown: ``longest``, as if it never beat). None
    means unknown for these three, and switched off for a threshold. ``horizon`` is the least and the most time for which
    failures are retried: ``max_attempts`` handler runs with the waits of the retry policy between them.
    """

    loop: str = ""
    visibility_timeout: float = 60.0
    wait_time_seconds: float = 30.0
    renew: Renewal = "while-running"
    watchdog_threshold: float | None = 720.0
    watchdog_interval: float = 60.0
    block_threshold: float | None = 30.0
    drain_delay: float = 0.0
    shutdown_timeout: float = 30.0
    cancel_grace: float = 5.0
    grace: float | None = None
    longest: float | None = None
    beat_gap: float | None = None
    max_attempts: int = DeadLetterPolicy().max_attempts
    max_crashes: int = DeadLetterPolicy().max_crashes
    horizon: tuple[float, float] = RetryPolicy().horizon(DeadLetterPolicy().max_attempts)

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, (int, float)) and not 0 <= value <= math.inf:
                raise ConfigError(f"{field.name} must be 0 or more seconds, not {value!r}")

    @property
    def needed(self) -> float:
        """The seconds from SIGTERM until the process has certainly left by itself."""
        return self.drain_delay + self.shutdown_timeout + self.cancel_grace + KILL_MARGIN

    @property
    def silence(self) -> float | None:
        """The longest time without a beat that is to be expected, if it is known."""
        return self.longest if self.beat_gap is None else self.beat_gap


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule, judged: ``left`` and ``right`` are the figures on the two sides of ``formula``, in ``unit``: seconds or none.

    Where it fails, ``advice`` says in one line what would pass; ``setting`` and ``value`` say the same to a program
    (``value`` is None where no value of that setting can help).
    """

    name: str
    formula: str
    left: float
    right: float
    ok: bool
    advice: str = ""
    setting: str = ""
    value: float | None = None
    loop: str = ""
    unit: str = "s"

    def __str__(self) -> str:
        verdict = "holds" if self.ok else f"does not hold: {self.advice}"
        where = f"{self.loop}: " if self.loop else ""
        left, right = self.figures
        return f"{where}{self.formula} ({left} against {right}) {verdict}"

    @property
    def figures(self) -> tuple[str, str]:
        """The figures on both sides, for people."""
        return (seconds(self.left), seconds(self.right)) if self.unit else (f"{self.left:g}", f"{self.right:g}")


def rules(timeouts: Timeouts) -> list[Rule]:
    """Return every rule that can be judged with the figures known, those of the loop first, then those of its group."""
    found = [
        _block_below_lease(timeouts),
        _beats_within_threshold(timeouts),
        *_without_renewal(timeouts),
        _beats_within_lease(timeouts),
        _interval_below_threshold(timeouts),
        _leaves_before_the_kill(timeouts),
    ]
    return [rule for rule in found if rule is not None]


def all_rules(loops: Iterable[Timeouts]) -> list[Rule]:
    """Return the rules of several loops of one group. A rule that is the group's own is among them once."""
    return list(dict.fromkeys(rule for timeouts in loops for rule in rules(timeouts)))


def retries(timeouts: Timeouts, what: str = "message") -> str:
    """Say in one line for how long the loop retries a message that fails, and when it gives one up; ``what``: which one."""
    least, most = (span(value) for value in timeouts.horizon)
    over = f"over {least}" if least == most else f"over {least} to {most}"
    return (
        f"{timeouts.loop}: a failing {what} is tried {counted(timeouts.max_attempts, 'time')} {over}; one whose worker dies"
        f" each time is delivered {counted(min(timeouts.max_crashes, timeouts.max_attempts), 'time')}; then it is a dead letter"
    )


def unjudged(timeouts: Timeouts) -> list[str]:
    """Return what could not be judged, since a figure is unknown, one line each, with what has to hold."""
    lines = []
    if timeouts.grace is None:
        short = (
            ""
            if timeouts.needed <= KUBERNETES_GRACE
            else " (Kubernetes' default of 30 s is too short: manifests set 45)"
        )
        lines.append(
            f"the orchestrator's kill time is unknown (--grace); it must be {seconds(timeouts.needed)} or more{short}"
        )
    if timeouts.silence is None and timeouts.watchdog_threshold is not None:
        lines.append(
            "the longest processing of a message is unknown (--longest); without a beat it must stay below"
            f" watchdog_threshold, {seconds(timeouts.watchdog_threshold)}"
        )
    return lines


def _block_below_lease(t: Timeouts) -> Rule | None:
    if t.block_threshold is None:
        return None
    value = _below(t.visibility_timeout)
    return Rule(
        "a blocked event loop is found before its leases run out",
        "block_threshold < visibility_timeout",
        t.block_threshold,
        t.visibility_timeout,
        t.block_threshold < t.visibility_timeout,
        f"set LoopGroup(block_threshold={value:g})" if value is not None else "set visibility_timeout above 0",
        "block_threshold",
        value,
        t.loop,
    )


def _beats_within_threshold(t: Timeouts) -> Rule | None:
    if t.watchdog_threshold is None or t.silence is None:
        return None
    value = _above(t.silence)
    return Rule(
        "a working handler is not taken for a stalled one",
        "watchdog_threshold > longest time without a beat",
        t.watchdog_threshold,
        t.silence,
        t.watchdog_threshold > t.silence,
        f"set LoopGroup(watchdog_threshold={value:.0f}), or call ctx.beat() more often",
        "watchdog_threshold",
        value,
        t.loop,
    )


def _without_renewal(t: Timeouts) -> list[Rule]:
    """Require of a lease that is not renewed that it outlasts the handler and the time in which a stall is found."""
    if t.renew != "never":
        return []
    longest = t.longest or 0.0
    unknown = "" if t.longest is not None else " (unknown, taken as 0)"
    threshold = t.watchdog_threshold or 0.0
    lease = _above(threshold + longest)
    possible = lease <= MAX_VISIBILITY
    judged = [
        Rule(
            "a message is not handed to a second worker while the first still runs",
            f"visibility_timeout > watchdog_threshold + longest processing{unknown}",
            t.visibility_timeout,
            threshold + longest,
            t.visibility_timeout > threshold + longest,
            f"set visibility_timeout={lease:.0f}, or renew the leases: lease=LeasePolicy()"
            if possible
            else f"renew the leases, lease=LeasePolicy(): no lease lasts longer than {seconds(MAX_VISIBILITY)}",
            "visibility_timeout",
            lease if possible else None,
            t.loop,
        )
    ]
    if t.watchdog_threshold is not None:
        value = _above(t.wait_time_seconds + longest)
        judged.append(
            Rule(
                "a loop that waits for work and then works is not taken for a stalled one",
                f"watchdog_threshold > wait_time_seconds + longest processing{unknown}",
                t.watchdog_threshold,
                t.wait_time_seconds + longest,
                t.watchdog_threshold > t.wait_time_seconds + longest,
                f"set LoopGroup(watchdog_threshold={value:.0f})",
                "watchdog_threshold",
                value,
                t.loop,
            )
        )
    return judged


def _beats_within_lease(t: Timeouts) -> Rule | None:
    if t.renew != "on-beat" or t.silence is None:
        return None
    value = _above(t.silence)
    possible = value <= MAX_VISIBILITY
    return Rule(
        "a handler that beats keeps its lease",
        "visibility_timeout > longest time without a beat",
        t.visibility_timeout,
        t.silence,
        t.visibility_timeout > t.silence,
        f"set visibility_timeout={value:.0f}, or call ctx.beat() more often"
        if possible
        else f"call ctx.beat() more often: no lease lasts longer than {seconds(MAX_VISIBILITY)}",
        "visibility_timeout",
        value if possible else None,
        t.loop,
    )


def _interval_below_threshold(t: Timeouts) -> Rule | None:
    if t.watchdog_threshold is None:
        return None
    right = t.watchdog_threshold / 3
    value = _below(right)
    return Rule(
        "the watchdog looks several times before the threshold",
        "watchdog_interval < watchdog_threshold / 3",
        t.watchdog_interval,
        right,
        t.watchdog_interval < right,
        f"set LoopGroup(watchdog_interval={value:g})"
        if value is not None
        else "set LoopGroup(watchdog_threshold=…) above 0",
        "watchdog_interval",
        value,
    )


def _leaves_before_the_kill(t: Timeouts) -> Rule | None:
    if t.grace is None:
        return None
    shutdown = _rounded_down(t.grace - t.drain_delay - t.cancel_grace - KILL_MARGIN)
    other = f", or LoopGroup(shutdown_timeout={shutdown:g})" if shutdown > 0 else ""
    value = float(math.ceil(t.needed)) if math.isfinite(t.needed) else math.inf
    return Rule(
        "the shutdown ends before the orchestrator kills the process",
        "drain_delay + shutdown_timeout + cancel_grace + 1 <= grace",
        t.needed,
        t.grace,
        t.needed <= t.grace,
        f"set the orchestrator's kill time (terminationGracePeriodSeconds) to {value:.0f} s or more{other}",
        "grace",
        value,
    )


def _above(value: float) -> float:
    """Return a round number of seconds clearly above ``value``: half as much again, and at least one more."""
    return float(math.ceil(max(value * 1.5, value + 1))) if math.isfinite(value) else math.inf


def _below(value: float) -> float | None:
    """Return a number of seconds clearly below ``value``, round if it can be; None if there is none."""
    if value <= 0:
        return None
    if not math.isfinite(value):
        return KILL_MARGIN
    half = value / 2
    return float(math.floor(half)) if half >= 1 else half


def _rounded_down(value: float) -> float:
    return math.floor(value * 10) / 10 if math.isfinite(value) else 0.0


def seconds(value: float) -> str:
    """Return the seconds for people: ``45 s``, ``0.25 s``, ``12 min``, ``unlimited``."""
    if not math.isfinite(value):
        return "unlimited"
    if value >= 600 and value % 60 == 0:
        return f"{value / 60:g} min"
    return f"{value:.4g} s" if value < 10_000 else f"{value:.0f} s"


def span(value: float) -> str:
    """Return a long time for people, in hours if it has some: ``14.2 h``."""
    if value < 600:
        return seconds(value)
    return f"{value / 3600:.1f} h" if value >= 3600 else f"{value / 60:.1f} min"
