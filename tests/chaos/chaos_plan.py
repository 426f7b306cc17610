"""What a run of chaos does, decided before it begins: settings, jobs, limits, schedules and faults. Nothing here acts.

The same seed gives the same jobs and the same faults at the same points of the progress. What it meets there is up to the real
processes, so a run is repeated in kind, not to the letter.
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from mainspring import Rate

if TYPE_CHECKING:
    from typing import Any


class Kind(StrEnum):
    """What is done to whom."""

    KILL = "worker SIGKILL"
    TERM = "worker SIGTERM"
    FREEZE = "worker SIGSTOP"
    SENDER = "sender SIGKILL"
    SERVER = "server SIGKILL"
    CUT = "cut"
    STALL = "stall"


OF_PROCESSES = (Kind.KILL, Kind.TERM, Kind.FREEZE, Kind.SENDER)
OF_SERVERS = (Kind.SERVER, Kind.CUT, Kind.STALL)


class Fate(StrEnum):
    """How the handler of a message ends when nothing disturbs it."""

    DONE = "done"
    SECOND = "fails once"
    REJECTED = "rejected"


@dataclass(frozen=True, slots=True)
class Settings:
    """A run on one backend. All times are seconds."""

    messages: int
    seed: int
    each: int
    """How many faults of each kind there are."""
    lease: float = 2.0
    workers: int = 4
    concurrency: int = 16
    """Of half of the workers. The others have one handler each, so that they claim ahead while jobs are quick."""
    senders: int = 2
    takes: float = 0.02
    """How long a handler takes on average."""
    call_timeout: float = 3.0
    """What one call to the server may take."""
    shutdown_timeout: float = 4.0
    cancel_grace: float = 2.0
    quiet: float = 90.0
    """How long nothing at all may be done before that counts as a hang."""
    ahead: int = 2_000
    """How many messages may wait before the senders pause."""
    burst: int = 500
    """Of as many jobs in a row none takes time, of the next ones each does."""
    per_second: int = 16
    """How many calls of the task with a rate may begin in a second: fewer than are sent while its calls are sent."""
    must_claim_ahead: bool = True
    """Whether it counts as broken if no loop claims ahead. A run of seconds can be over before the backlog is long enough."""

    @property
    def shutdown_budget(self) -> float:
        """From SIGTERM to the end of a process, by force at the latest."""
        return self.shutdown_timeout + self.cancel_grace + 1

    @property
    def deadline(self) -> float:
        """What the whole may take: many times what it takes where nothing is wrong."""
        return 120 + self.messages / 25 + 40 * self.each

    @property
    def rate(self) -> Rate:
        """The rate of the task that has one."""
        return Rate(self.per_second, 1, burst=2)

    def handlers(self, slot: int) -> int:
        """How many handlers a worker has at once. Each event loop has workers of both kinds."""
        return 1 if slot % 4 in (1, 2) else self.concurrency

    def as_json(self) -> dict[str, Any]:
        """For the processes."""
        return asdict(self)


LARGE = 25
"""Of as many jobs one is large."""


class Limited(StrEnum):
    """The tasks. A quarter of the jobs are calls of them; the others are messages of a plain mailbox."""

    TASK = "limited"
    """At most ``CONCURRENCY`` run at once."""
    KEYS = "keyed"
    """Of each key at most ``KEY_CONCURRENCY``."""
    RATE = "rated"
    ORDER = "ordered"
    """Of each key one at once, in the order of the sends; a retry holds up its key."""


CONCURRENCY = 3
KEY_CONCURRENCY = 2
MOST_IN_FLIGHT = 6
"""How many calls of all tasks together run at once."""
IN_A_ROW = 200
"""Of as many jobs in a row all calls are of one task, so that they have to wait for its limits."""
KEYS = 2
"""How many keys the calls of a task have that each sender sends."""


@dataclass(frozen=True, slots=True)
class Job:
    """A message's body."""

    number: int
    fate: Fate
    takes: float
    data: str = ""
    """What makes a few of them large: stores may keep a large body elsewhere than a small one."""
    task: Limited | None = None
    """The task that it calls; None: it is a message of the plain mailbox."""
    key: str = ""

    @property
    def whole(self) -> bool:
        """Whether it has the data of its number."""
        return self.data == _data(self.number)

    @property
    def quick(self) -> bool:
        """Whether it is of a burst. Its effect is in no transaction: a commit takes too long for its loop to claim ahead."""
        return self.takes == 0


def job(settings: Settings, number: int) -> tuple[Job, float]:
    """The job of a number, and the delay it is sent with."""
    chance = random.Random(f"{settings.seed}/{number}")
    fate = chance.choices(list(Fate), (0.985, 0.0125, 0.0025))[0]
    # A few take longer than a lease: they live by its renewal.
    takes = 1.25 * settings.lease if chance.random() < 0.003 else chance.expovariate(1 / settings.takes)
    task = list(Limited)[number // IN_A_ROW % len(Limited)] if number % 8 in (2, 5) else None
    if number // settings.burst % 2 and task is None:
        takes = 0.0
    delay = chance.uniform(0.05, 0.5) if chance.random() < 0.02 else 0.0
    if task is Limited.ORDER:
        delay = 0.0  # a delayed call takes its place in the order when its delay is over
    # The calls of Limited.KEYS have one key of each sender: of more keys none would have to wait.
    key = "" if task is None else f"{number % settings.senders}-{0 if task is Limited.KEYS else number // 8 % KEYS}"
    return Job(number, fate, min(takes, 1.25 * settings.lease), _data(number), task, key), delay


def _data(number: int) -> str:
    return f"{number} ".ljust(100_000, "x") if number % LARGE == 0 else ""


@dataclass(frozen=True, slots=True)
class Ticking:
    """A schedule: each tick calls one task, also the ticks that are missed."""

    name: str
    period: int
    """Seconds between two ticks."""
    declared: bool
    """Whether the workers declare it, as a cron line; else it is made at run time, as an interval."""


SCHEDULES = (
    *(Ticking(f"cron {period} {number}", period, declared=True) for number, period in enumerate((1, 1, 2, 3))),
    *(Ticking(f"every {period} {number}", period, declared=False) for number, period in enumerate((1, 1, 2, 3))),
)


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: at which part of the work done (0 to 1), how long, and how many of the connections (0 to 1)."""

    at: float
    kind: Kind
    seconds: float
    share: float


def faults(settings: Settings, kinds: tuple[Kind, ...]) -> list[Fault]:
    """The faults of a run, in the order in which they come."""
    chance = random.Random(settings.seed)
    found = []
    for kind in kinds:
        for place in range(settings.each):
            at = 0.02 + 0.93 * (place + chance.random()) / settings.each
            share = chance.choice((0.3, 0.6, 1.0))
            found.append(Fault(at, kind, _seconds(kind, settings, chance), share))
    return sorted(found, key=lambda fault: fault.at)


def _seconds(kind: Kind, settings: Settings, chance: random.Random) -> float:
    if kind is Kind.FREEZE:
        return settings.lease * chance.uniform(1.2, 1.8)  # it wakes up without its leases
    if kind is Kind.STALL:
        return settings.call_timeout * chance.uniform(0.2, 1.4)  # some calls hang, some end at their timeout
    if kind is Kind.SERVER:
        return chance.uniform(0.1, 1.0)
    return 0.0
