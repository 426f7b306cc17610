"""The judgement of schedules and limits: which ticks have no call or several, and where a limit was exceeded. Pure functions.

Of a run it is only known when its handler began and ended. So a message counts as in flight from the begin of its handler to
the handler's end, or the commit of its transaction, and not beyond the lease with which it was claimed. It is in flight for
longer, so what is found here was so in the store as well. The call of a worker that was killed counts until its lease ends.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import islice, pairwise, takewhile
from typing import TYPE_CHECKING, NamedTuple

from chaos_plan import CONCURRENCY, KEY_CONCURRENCY, MOST_IN_FLIGHT, Limited

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from chaos_judge import Life, Run

    from mainspring import Rate

TOLERANCE = 0.1
"""Seconds by which the clocks and granularities of leases may differ."""
WINDOW = 5.0
"""The longest time, in seconds, in which the claims of a rate are counted."""


class Call(NamedTuple):
    """What of a call its limits go by."""

    task: str
    key: str
    number: int
    """Of two calls of one key, the one with the lower number was sent before the other one."""


class Tick(NamedTuple):
    """A schedule, and the time of one of its ticks."""

    schedule: str
    at: float


@dataclass
class Due:
    """The ticks of one schedule that have to have a call: from the first one to the one before ``end``.

    It may have ticked before the first: a declared one, before it was looked at. Such a tick has at most one call.
    """

    first: float
    period: int
    end: float | None = None
    """The next tick when the schedule was paused. None: it was not, as the run was called off; nothing is said of its ticks."""

    def judges(self, at: float) -> bool:
        """Whether a call at that time must be of one of these ticks."""
        return self.end is not None and at > self.first - self.period / 2

    def after(self, ticks: int) -> float:
        """When the next tick is due after that number of them, within half a second."""
        return self.first + ticks * self.period - 0.5

    @property
    def ticks(self) -> Iterator[float]:
        """The times of the ticks."""
        for number in range(round(((self.end or self.first) - self.first) / self.period)):
            yield self.first + number * self.period


@dataclass
class Most:
    """The most calls that were in flight at once, by limit."""

    at_once: dict[str, int] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)


def judge_ticks(due: Mapping[str, Due], runs: Iterable[Run]) -> Iterator[str]:
    """What is wrong with the ticks: each that was due has one call, whose handler has run, and no other time has any."""
    calls: defaultdict[tuple[str, int], set[str]] = defaultdict(set)
    done: set[tuple[str, int]] = set()
    for run in runs:
        if run.tick is not None:
            calls[_named(*run.tick)].add(run.message)
            if run.effect is not None:
                done.add(_named(*run.tick))
    wanted = {_named(name, tick) for name, each in due.items() for tick in each.ticks}
    if lost := wanted - calls.keys():
        yield f"ticks lost: {len(lost)} ticks have no call: {_some(lost)}"
    if undone := wanted & calls.keys() - done:
        yield f"ticks undone: {len(undone)} ticks have a call that was never done: {_some(undone)}"
    if doubled := {tick for tick, messages in calls.items() if len(messages) > 1}:
        yield f"ticks doubled: {len(doubled)} ticks have several calls: {_some(doubled)}"
    others = {(name, at) for name, at in calls.keys() - wanted if name not in due or due[name].judges(at / 1_000)}
    if others:
        yield f"ticks undue: {len(others)} calls are of no tick that was due: {_some(others)}"


def _named(schedule: str, tick: float) -> tuple[str, int]:
    return schedule, round(tick * 1_000)  # an interval's ticks need not be whole seconds


def judge_limits(runs: Sequence[Run], lives: Mapping[str, Life], lease: float, rate: Rate) -> Most:
    """How many calls were in flight at once, and where that were too many, too early or out of order."""
    found = Most()
    by_key: defaultdict[tuple[str, str], list[Run]] = defaultdict(list)
    for run in runs:
        if run.call is not None:
            by_key[run.call.task, run.call.key].append(run)
    calls = [run for run in runs if run.call is not None or run.tick is not None]
    groups = [("the mailbox", MOST_IN_FLIGHT, calls), ("a task", CONCURRENCY, _of(Limited.TASK, calls))]
    groups += [("a key", KEY_CONCURRENCY, each) for (task, _), each in by_key.items() if task == Limited.KEYS]
    ordered = [each for (task, _), each in by_key.items() if task == Limited.ORDER]
    groups += [("an ordered key", 1, each) for each in ordered]
    for what, most, group in groups:
        intervals = [held for run in group if (held := held_during(run, lives[run.process], lease)) is not None]
        at_once, when = most_at_once(intervals)
        found.at_once[what] = max(at_once, found.at_once.get(what, 0))
        if at_once > most:
            found.broken.append(f"limit: {at_once} calls of {what} were in flight at {when:.3f}, at most {most} may be")
    for each in ordered:
        found.broken += out_of_order(each, lease)
    found.broken += too_often(_of(Limited.RATE, calls), rate)
    return found


def _of(task: Limited, runs: Iterable[Run]) -> list[Run]:
    return [run for run in runs if run.call is not None and run.call.task == task]


def held_during(run: Run, life: Life, lease: float) -> tuple[float, float] | None:
    """From when until when a run surely held its message; None: that is not known of any time."""
    ends = [end for end in (run.committing, run.ended) if end is not None]
    if run.leased is None or not (ends or life.killed is not None):
        return None
    until = min([run.leased + lease - TOLERANCE, *ends])
    return (run.begun, until) if run.begun < until else None


def most_at_once(intervals: Iterable[tuple[float, float]]) -> tuple[int, float]:
    """How many intervals overlap at most, and where they begin to."""
    changes = sorted(change for since, until in intervals for change in ((since, 1), (until, -1)))
    now = most = 0
    when = 0.0
    for instant, change in changes:  # of one instant, ends come first
        now += change
        if now > most:
            most, when = now, instant
    return most, when


def out_of_order(runs: Iterable[Run], lease: float) -> Iterator[str]:
    """Where a call of a key began though a later one had begun already. A run that began without its lease is left out."""
    leased = [run for run in runs if run.leased is not None and run.begun < run.leased + lease - TOLERANCE]
    for before, run in pairwise(sorted(leased, key=lambda run: run.begun)):
        assert before.call is not None
        assert run.call is not None
        if run.call.number < before.call.number:
            yield f"order: call {run.call.number} of key {run.call.key} began after call {before.call.number} ({before}; {run})"


def too_often(runs: Iterable[Run], rate: Rate) -> Iterator[str]:
    """Where more calls were claimed in a time than the rate lets begin. A claim was between ``leased`` and ``begun``."""
    known = sorted((run.leased, run.begun) for run in runs if run.leased is not None)
    worst, said = 0.0, ""
    for place, (since, _) in enumerate(known):
        later = takewhile(lambda claim, since=since: claim[0] - since < WINDOW, islice(known, place, None))
        until = sorted(begun for _, begun in later if begun - since < WINDOW)
        for count, end in enumerate(until, 1):
            over = count - rate.burst - (end - since + TOLERANCE) / rate.interval
            if over > worst:
                worst, said = over, f"rate: {count} calls were claimed in {end - since:.3f} s as of {since:.3f}"
    if said:
        yield said


def _some(ticks: Iterable[tuple[str, int]]) -> str:
    return ", ".join(f"{name!r} at {at / 1_000:.3f}" for name, at in sorted(ticks)[:5])
