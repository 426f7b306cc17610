"""The watchdog: cancels what gives no sign of life any more, and ends the process where even that does not help."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar

import anyio

from mainspring.core.introspection import check_plain, unrun
from mainspring.core.loggers import Logger
from mainspring.errors import ConfigError, HandlerStalledError
from mainspring.events import HandlerStalled, HandlerStuck
from mainspring.runtime.hard_exit import kill_with_words
from mainspring.runtime.interval import Periodic

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping

    from mainspring.core.dispatcher import Dispatcher
    from mainspring.runtime.heartbeat import Heartbeat

_log = Logger("mainspring")

K = TypeVar("K", bound="Hashable")

ROUNDING = 1e-6
"""Seconds by which sums of instants may be off: without it a look could come a hair too soon, over and over."""


class Subject(Protocol):
    """One thing that must beat: a message in flight, a receive that is out, or a loop of foreign make.

    It is the same object at every look; one that goes on after a stall is another.
    """

    @property
    def name(self) -> str:
        """The loop's name."""

    @property
    def message_id(self) -> str | None:
        """The message's id; None where the subject is a loop, or what that asks of its store."""

    @property
    def done(self) -> bool:
        """True if it has ended."""

    def beat_age(self) -> float:
        """Return the seconds since its last beat."""

    def where(self) -> str:
        """Return the line it stands on."""

    def stall(self, error: HandlerStalledError) -> None:
        """Cancel it; it counts as a charged attempt."""


class HeartbeatSubject:
    """A :class:`Heartbeat` as a subject, for a watchdog of one's own. ``cancel`` is called once with the error when it stalls.

    ``where`` says on which line it stands; ``finished`` whether it has ended (by default it never does: then ``cancel``
    must see to it that it is not listed any more, or the process is killed ``cancel_grace`` later).

    :raises ConfigError: one of them is no plain function.
    """

    def __init__(
        self,
        name: str,
        heartbeat: Heartbeat,
        cancel: Callable[[HandlerStalledError], object],
        *,
        message_id: str | None = None,
        where: Callable[[], str] = str,
        finished: Callable[[], bool] = bool,
    ) -> None:
        for what, fn in (("cancel", cancel), ("where", where), ("finished", finished)):
            check_plain(fn, f"HeartbeatSubject: {what}")
        self.name = name
        self.message_id = message_id
        self._heartbeat = heartbeat
        self._cancel = cancel
        self._where = where
        self._finished = finished

    @property
    def done(self) -> bool:
        return self._finished()

    def beat_age(self) -> float:
        return self._heartbeat.elapsed()

    def where(self) -> str:
        return self._where()

    def stall(self, error: HandlerStalledError) -> None:
        what = unrun(self._cancel(error))
        if what is not None:
            _log.error("cancel= of %s returned %s, which nothing runs", self.name, what)


@dataclass(frozen=True, slots=True)
class Limits:
    """What the watchdog judges by, in seconds."""

    threshold: float = 720.0
    interval: float = 60.0
    cancel_grace: float = 5.0

    def __post_init__(self) -> None:
        for what in ("threshold", "interval"):
            if not 0 < getattr(self, what) < math.inf:
                raise ConfigError(f"watchdog: {what} must be above 0 seconds, not {getattr(self, what)!r}")
        if not 0 <= self.cancel_grace < math.inf:
            raise ConfigError(f"watchdog: cancel_grace must be 0 or more seconds, not {self.cancel_grace!r}")


class Judgement(NamedTuple, Generic[K]):
    """One look's result: whom to cancel, who did not end although cancelled, and when to look again."""

    cancel: tuple[K, ...]
    stuck: tuple[K, ...]
    next_look: float


def judge(now: float, ages: Mapping[K, float], stalled: Mapping[K, float], limits: Limits) -> Judgement[K]:
    """Decide what to cancel and what is stuck. ``ages``: seconds since each last beat; ``stalled``: when each was cancelled.

    Only subjects in ``ages`` are judged. A cancelled one is judged by whether it is still there, no longer by its beats. The
    next look is after ``interval`` at the latest, and sooner if a subject can be due before.
    """
    cancel: list[K] = []
    stuck: list[K] = []
    next_look = now + limits.interval
    for key, age in ages.items():
        since = stalled.get(key)
        if since is not None:
            end_by = since + limits.cancel_grace
            if now >= end_by:
                stuck.append(key)
            else:
                next_look = min(next_look, end_by)
        elif age >= limits.threshold - ROUNDING:
            cancel.append(key)
            next_look = min(next_look, now + limits.cancel_grace)
        else:
            next_look = min(next_look, now + limits.threshold - age)
    return Judgement(tuple(cancel), tuple(stuck), next_look)


@dataclass(slots=True)
class Pardons:
    """The time in which no subject could beat, as the watchdog itself came late. It does not count as silence.

    ``noise`` is the lateness, in seconds, that is too small to be kept.
    """

    noise: float
    _late: list[tuple[float, float]] = field(default_factory=list)

    def add(self, now: float, seconds: float) -> None:
        """Note that the look at ``now`` came ``seconds`` late."""
        if seconds > self.noise:
            self._late.append((now, seconds))

    def since(self, then: float) -> float:
        """Return how much of the time since ``then`` is pardoned."""
        return sum(min(seconds, when - then) for when, seconds in self._late if when > then)

    def forget_before(self, then: float) -> None:
        """Drop what was before ``then``: no subject's silence goes further back."""
        if self._late:
            self._late[:] = [(when, seconds) for when, seconds in self._late if when > then]


class Watchdog:
    """Cancels what has not beaten for ``threshold`` seconds; kills the process where it has not ended ``cancel_grace`` later.

    ``subjects`` lists, at each look, whatever must beat just then: what waits for work or has lost its server is left out of
    the list. The defaults suit handlers that call models or services: 720 s without a beat is longer than such a call may take,
    and a look every 60 s costs nothing. A stall becomes known within ``threshold + interval`` seconds, mostly at the threshold,
    since the next look follows from the oldest beat. A process with a stuck handler is gone within ``threshold + interval +
    cancel_grace + 1``. The time by which a look comes late (the process was stopped, the machine suspended, the loop blocked)
    is not counted.

    ``kill`` is called with one line that says which handler is stuck and where. By default it writes that and the stacks of all
    threads to standard error, then sends SIGKILL to its own process. A handler that does not end keeps its message, its lease
    and its slot for ever, while another process could do the work. Raises :class:`ConfigError` for limits that are not positive
    numbers, and for a ``kill`` that is not plain. It judges what shares its event loop; whether that loop turns at all is the
    block watch's to say.
    """

    def __init__(
        self,
        subjects: Callable[[], Iterable[Subject]],
        *,
        threshold: float = 720.0,
        interval: float = 60.0,
        cancel_grace: float = 5.0,
        dispatcher: Dispatcher | None = None,
        kill: Callable[[str], None] = kill_with_words,
    ) -> None:
        check_plain(kill, "watchdog: kill")
        self._subjects = subjects
        self._limits = Limits(threshold, interval, cancel_grace)
        self._dispatcher = dispatcher
        self._kill = kill
        self._stalled: dict[int, tuple[Subject, float]] = {}  # keeps the subject, so that its id is not another's
        self._reported: set[int] = set()
        self._looked = 0.0
        self._pardons = Pardons(noise=min(threshold, interval) / 100)

    @property
    def stalled(self) -> bool:
        """True while a subject that was cancelled as stalled has not ended."""
        return any(not subject.done for subject, _ in self._stalled.values())

    async def run(self) -> None:
        """Watch until cancelled. Cancellation leaves nothing behind; what was cancelled before stays so."""
        self._stalled.clear()
        self._reported.clear()
        self._looked = anyio.current_time()
        await Periodic(self._look, first=self._looked + self._limits.interval).run()

    async def _look(self, overslept: float) -> float:
        now = anyio.current_time()
        # Past an interval it is no delay but a standstill, which may have begun at any time since the last look.
        self._pardons.add(now, overslept if overslept <= self._limits.interval else now - self._looked)
        self._looked = now
        living = {id(subject): subject for subject in self._subjects() if not subject.done}
        raw = {key: subject.beat_age() for key, subject in living.items()}
        self._stalled = {key: entry for key, entry in self._stalled.items() if key in living}
        self._reported &= living.keys()
        ages = {key: age - self._pardons.since(now - age) for key, age in raw.items() if key not in self._reported}
        stalled = {key: since + self._pardons.since(since) for key, (_, since) in self._stalled.items()}
        judgement = judge(now, ages, stalled, self._limits)
        for key in judgement.cancel:
            self._cancel(living[key], ages[key], now)
        for key in judgement.stuck:
            self._reported.add(key)  # a `kill` that returns is told once
            self._end(living[key], raw[key])
        self._pardons.forget_before(now - max(raw.values(), default=0.0))
        return judgement.next_look

    def _cancel(self, subject: Subject, age: float, now: float) -> None:
        self._stalled[id(subject)] = (subject, now)
        line = subject.where()
        at = f" at {line}" if line else ""
        subject.stall(
            HandlerStalledError(
                f"{_title(subject)} gave no sign of life for {age:.0f} s "
                f"(watchdog threshold {self._limits.threshold:g} s) and was cancelled{at}",
                where=line,
            )
        )
        if self._dispatcher is not None:
            self._dispatcher.dispatch(HandlerStalled(subject.name, subject.message_id or "", age, line))

    def _end(self, subject: Subject, age: float) -> None:
        line = subject.where()
        if self._dispatcher is not None:
            self._dispatcher.dispatch(HandlerStuck(subject.name, subject.message_id or "", age, line))
        self._kill(
            f"mainspring: {_title(subject)} was cancelled because it gave no sign of life, and did not end within "
            f"{self._limits.cancel_grace:g} s: {line or 'its line is not known'}\nThe process is killed."
        )


def _title(subject: Subject) -> str:
    return (
        f"loop {subject.name!r}" if subject.message_id is None else f"message {subject.message_id} of {subject.name!r}"
    )
