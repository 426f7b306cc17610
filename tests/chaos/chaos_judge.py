"""The judgement: from what is known of a run to what was promised and not kept. A pure function.

``explain`` is its heart: a message whose handler ran again must have had a reason for it, which the histories of processes and
troubles show.
"""

from __future__ import annotations

import os
import signal
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from chaos_calls import TOLERANCE, judge_limits, judge_ticks

if TYPE_CHECKING:
    from collections.abc import Iterable

    from chaos_calls import Call, Due, Tick

    from mainspring import Rate

FORGETFUL = 130.0
"""Seconds of removals that a server may forget that writes them to its disk every two minutes."""
KILLED = -signal.SIGKILL
TERMINATED = -signal.SIGTERM
FORCED = 70
UNOPENED = os.EX_TEMPFAIL
"""The status of a worker that could not open its mailbox; whoever supervises it starts it again."""


@dataclass(slots=True)
class Run:
    """One run of a handler. Instants are of the machine's one clock; None: it did not come to that."""

    message: str
    receipt: str
    process: str
    begun: float
    leased: float | None = None
    """From when its lease surely counts."""
    effect: float | None = None
    committed: bool = False
    """Whether its effect was in a transaction of the mailbox."""
    committing: float | None = None
    """From when its transaction, and the acknowledgement in it, may have been committed."""
    ended: float | None = None
    how: str | None = None
    """``done``, ``cancelled`` or ``failed: …``, of the handler."""
    settled: float | None = None
    outcome: str | None = None
    """What the loop said became of the delivery."""
    hand: int = 0
    """How many messages the loop had in hand as it began."""
    call: Call | None = None
    """What its limits go by, if it is a call of a task with limits."""
    tick: Tick | None = None
    """The tick whose call it is."""

    @property
    def failed(self) -> bool:
        """Whether the handler raised."""
        return self.how is not None and self.how.startswith("failed")


@dataclass(slots=True)
class Life:
    """One process: a worker or a sender."""

    name: str
    started: float
    ready: float | None = None
    handlers: int = 0
    """How many handlers a worker runs at once."""
    killed: float | None = None
    terminated: float | None = None
    freezes: list[tuple[float, float]] = field(default_factory=list)
    ended: float | None = None
    status: int | None = None
    said: str = ""
    """The end of what it wrote to its standard error."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """The server was away (``server``), or connections were cut (``cut``) or stalled (``stall``)."""

    kind: str
    since: float
    until: float


@dataclass(slots=True)
class History:
    """All that is known of a run on one backend."""

    backend: str
    lease: float
    shutdown_budget: float
    forgets: bool = False
    """Whether a killed server takes its last removals and leases back."""
    two_steps: bool = False
    """Whether a message is handed back with a delay in two steps: who is killed between them leaves two copies."""
    patience: float = 10.0
    """How much longer than its budget a shutdown may take where the machine has much else to do."""
    rate: Rate | None = None
    """That of the task that has one; None: it keeps no limits."""
    must_claim_ahead: bool = False
    """Whether there was enough to do that takes no time, so that loops must have claimed ahead."""
    given_back: int = 0
    """How many deliveries were released before their handlers had begun."""
    accepted: dict[str, float] = field(default_factory=dict)
    """The ids that a send has returned, and when the sender knew."""
    rejected: set[str] = field(default_factory=set)
    """Those accepted whose handler rejects them."""
    runs: list[Run] = field(default_factory=list)
    due: dict[str, Due] = field(default_factory=dict)
    """The ticks that have to have a call, by schedule."""
    dead: set[str] = field(default_factory=set)
    effects: Counter[str] | None = None
    """How often each message's effect was committed; None where there are no transactions."""
    lives: list[Life] = field(default_factory=list)
    troubles: list[Trouble] = field(default_factory=list)
    left: int = 0
    """How many messages still waited at the end."""
    counts: str = ""
    """What the mailbox said of itself then."""
    hung: list[str] = field(default_factory=list)
    """What did not come to its end in its time."""


@dataclass(slots=True)
class Verdict:
    """What became of the promises."""

    broken: list[str] = field(default_factory=list)
    lost: int = 0
    twice: int | None = None
    """How many effects were committed more than once; None where there are no transactions."""
    again: Counter[str] = field(default_factory=Counter)
    """Runs of a handler that an earlier run of the same message had gone before, by reason."""
    ahead: int = 0
    """Runs that began while their loop had more than twice as many messages in hand as it has handlers."""
    most_ahead: int = 0
    """The most messages that a loop had in hand then."""
    doubled: int = 0
    """Those of them before which the effect was already there."""
    at_once: dict[str, int] = field(default_factory=dict)
    """The most calls that were in flight at once, by limit."""
    gap: float = 0.0
    """The longest time in which no effect was done."""


def judge(history: History) -> Verdict:
    """What was promised and not kept."""
    verdict = Verdict()
    _nothing_lost(history, verdict)
    _effects_once(history, verdict)
    _runs_explained(history, verdict)
    _claimed_ahead(history, verdict)
    verdict.broken += judge_ticks(history.due, history.runs)
    if history.rate is not None:
        lives = {life.name: life for life in history.lives}
        most = judge_limits(history.runs, lives, history.lease, history.rate)
        verdict.at_once = most.at_once
        verdict.broken += most.broken
    for life in history.lives:
        verdict.broken += _ended_well(life, history)
    verdict.broken += [f"hung: {what}" for what in history.hung]
    instants = sorted(run.effect for run in history.runs if run.effect is not None)
    verdict.gap = max((b - a for a, b in pairwise(instants)), default=0.0)
    return verdict


def _nothing_lost(history: History, verdict: Verdict) -> None:
    done = {run.message for run in history.runs if run.effect is not None and not run.committed}
    done |= set(history.effects or ())
    lost = set(history.accepted) - done - history.dead
    verdict.lost = len(lost)
    if lost:
        verdict.broken.append(f"lost: {len(lost)} accepted messages were neither done nor dead: {_some(lost)}")
    if history.left:
        verdict.broken.append(f"left: {history.left} messages still waited at the end: {history.counts}")
    if spared := history.rejected & done:
        verdict.broken.append(f"rejected messages have effects: {_some(spared)}")
    if undead := history.rejected - history.dead - lost:
        verdict.broken.append(f"rejected messages are not in the dead letters: {_some(undead)}")
    if died := history.dead - history.rejected & set(history.accepted):
        verdict.broken.append(f"{len(died)} messages are dead that nobody rejected: {_some(died)}")


def _effects_once(history: History, verdict: Verdict) -> None:
    if history.effects is None:
        return
    twice = {message for message, count in history.effects.items() if count > 1}
    verdict.twice = len(twice)
    if twice:
        verdict.broken.append(f"twice: {len(twice)} effects were committed more than once: {_some(twice)}")
    said = {run.message for run in history.runs if run.effect is not None and run.committed}
    if gone := said - set(history.effects):
        verdict.broken.append(f"{len(gone)} effects were committed and are not there: {_some(gone)}")


def _runs_explained(history: History, verdict: Verdict) -> None:
    lives = {life.name: life for life in history.lives}
    by_message: defaultdict[str, list[Run]] = defaultdict(list)
    for run in sorted(history.runs, key=lambda run: run.begun):
        by_message[run.message].append(run)
    for runs in by_message.values():
        for place, (before, run) in enumerate(pairwise(runs), 1):
            why, fine = explain(before, run, lives[before.process], history)
            if not fine and (excused := excuse(runs[:place], run, history)) is not None:
                why, fine = excused, True
            verdict.again[why] += 1
            verdict.doubled += before.effect is not None and not before.committed
            if not fine:
                verdict.broken.append(f"message {run.message} ran again: {why} ({before}; {run})")


def _claimed_ahead(history: History, verdict: Verdict) -> None:
    handlers = {life.name: life.handlers for life in history.lives}
    ahead = [run.hand for run in history.runs if run.hand > 2 * handlers[run.process] > 0]
    verdict.ahead, verdict.most_ahead = len(ahead), max(ahead, default=0)
    if history.must_claim_ahead and not ahead:
        verdict.broken.append("no loop claimed ahead: what becomes of such messages was not tried")


def explain(before: Run, run: Run, life: Life, history: History) -> tuple[str, bool]:
    """Why a message's handler ran again, and whether that may be."""
    if before.outcome in ("acknowledged", "dead_lettered"):
        return f"it was {before.outcome}", False
    if before.outcome in ("released", "retried"):
        if before.how == "done":
            return f"its handler was done and it was {before.outcome}", False
        return ("its handler failed" if before.outcome == "retried" else "released at a shutdown"), True
    until = before.settled if before.settled is not None else run.begun
    why = _disturbance(before, until, life, history)
    # A handler that failed hands its message back: that may have worked, though nobody was told so.
    handed_back = before.how is not None and before.how != "done" and why is not None
    if before.leased is not None and run.begun < before.leased + history.lease - TOLERANCE and not handed_back:
        return "two held it at once", False
    if why is None and before.settled is not None and before.leased is not None:
        why = "its lease had ended before its settlement" if before.settled > before.leased + history.lease else None
    return (why, True) if why is not None else ("unexplained", False)


def _disturbance(before: Run, until: float, life: Life, history: History) -> str | None:
    """What kept a run from being settled between its claim and ``until``."""
    since = before.begun if before.leased is None else before.leased
    if before.outcome is None and life.killed is not None:
        return "its worker was killed"
    if before.outcome is None and life.terminated is not None and life.status == FORCED:
        return "its worker left by force at the end of its time"
    if any(_overlap(since, until, *freeze) for freeze in life.freezes):
        return "its worker was frozen"
    for trouble in history.troubles:
        if _overlap(since, until, trouble.since, trouble.until):
            return {"server": "the server was away"}.get(trouble.kind, "its worker was cut off")
    return None


def excuse(earlier: list[Run], run: Run, history: History) -> str | None:
    """Why a message may come again, whatever became of its earlier runs: what its kind of store does not promise."""
    if history.forgets:
        known = [history.accepted.get(run.message), *(at for each in earlier for at in (each.begun, each.settled))]
        instants = [at for at in known if at is not None]
        for kill in history.troubles:
            before = [at for at in instants if at <= kill.until]
            recent = before and kill.since - max(before) < FORGETFUL
            if kill.kind == "server" and recent and kill.since <= run.begun:
                return "the server forgot"
    if history.two_steps and any(each.failed and each.outcome in (None, "lost") for each in earlier):
        return "a copy was left as it was handed back"
    return None


def _ended_well(life: Life, history: History) -> Iterable[str]:
    if life.ended is None:
        yield f"{life.name} has not ended"
        return
    frozen = sum(
        until - since for since, until in life.freezes if life.terminated is not None and until > life.terminated
    )
    if life.terminated is not None and life.killed is None:
        took = life.ended - life.terminated - frozen
        if took > history.shutdown_budget + history.patience:
            yield f"{life.name} took {took:.1f} s to end after SIGTERM; its budget is {history.shutdown_budget:g} s"
    expected = {KILLED} if life.killed is not None else set()
    if life.terminated is not None or life.name.startswith("sender"):
        expected.add(0)
    if life.terminated is not None:
        expected.add(FORCED)
        if life.ready is None:
            expected.add(TERMINATED)  # it had not come to the handling of signals
    if any(_overlap(life.started, life.ended, trouble.since, trouble.until) for trouble in history.troubles):
        expected.add(UNOPENED)
    if life.status in expected:
        return
    yield f"{life.name} ended with status {life.status}, for which there was no reason: {life.said[-1_500:]}"


def _overlap(since: float, until: float, other_since: float, other_until: float) -> bool:
    return since <= other_until and other_since <= until


def _some(ids: Iterable[str]) -> str:
    return ", ".join(sorted(ids)[:5])
