"""Schedules: what is called, when, and what a look at one decides. Nothing here waits or asks the store.

The state of a schedule is one record: its definition, and ``next_at``, the first tick that was not decided yet. A worker sends
a tick by one conditional write, which moves ``next_at`` on and joins the tick's messages. So each tick is decided by one
worker, whichever crashes, and none twice.

A schedule is made at run time, or declared in code. The record of a declared one names the definitions of the worker that
stated it last (``stated_by``) and when that worker started. Where two versions of a program run beside each other, the
definition of the worker that started last holds, and the workers of both tick it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from mainspring.core import clock
from mainspring.errors import ConfigError, SerializationError
from mainspring.mailbox.limits import is_text
from mainspring.mailbox.records import as_stored
from mainspring.tasks.schedule_times import Times, check_cron
from mainspring.tasks.task import Task
from mainspring.validation import MAX_DELAY, as_seconds, is_number, is_whole

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from mainspring.validation import Seconds

Misfire: TypeAlias = Literal["skip", "once", "all"] | int
"""What becomes of missed ticks; see :class:`Schedule`."""

MISSED_AFTER = 60.0
"""Seconds after which a tick that was not sent is missed. It is missed sooner if the next tick is due as well."""
BATCH = 100
"""The most messages that one write of a schedule sends, and the most that ``misfire`` may be."""
BATCH_SIZE = 262_144
"""The most bytes that they are together, unless it is one message. Each store takes that in one write."""
MESSAGE_HEADERS = 512
"""Bytes of a message beside its arguments, more or less."""
SHORTEST = 1.0
"""The least seconds between the ticks of an interval."""
LONGEST_NAME = 200


@dataclass(frozen=True, slots=True)
class Schedule:
    """Calls a task again and again, or once: by a cron line, at an interval, or at one time.

    Give it to :meth:`Tasks.schedule` to declare it in code, or to ``tasks.schedules.add`` to make it at run time. However many
    workers there are, each tick is sent once. A tick is sent when it is due, or as soon as a worker is there. It is *missed* if
    that is more than 60 seconds late, or if the next tick is due as well.

    :param name: how it is found; one per mailbox.
    :param task: the task, perhaps with ``task.options(priority=…, unique=True, result_ttl=…)``; or the name of one.
    :param cron: a line of the fields minute, hour, day of month, month and weekday, as Debian's cron reads it, in the zone
        ``tz``. A sixth field in front is for seconds.
    :param every: seconds, or a timedelta (1 second to 366 days), between two ticks; the first is one interval from now.
    :param at: the one time, a datetime with a time zone.
    :param args: the arguments of each call: a tuple of positional ones, or a mapping of named ones.
    :param tz: the time zone of the cron line, by its IANA name.
    :param misfire: what is sent of ticks that are missed. ``"once"``: one call for all of them, at the time of the last.
        ``"skip"``: nothing. ``"all"``: each, in batches of 100. A number (1 to 100): at most this many of the last.
    :param jitter: seconds, or a timedelta, by at most which a call is delayed. The delay is the same in whichever worker, as it
        is drawn from the name and the time of the tick.
    :raises ConfigError: a value cannot be, or the cron line never fires.
    """

    name: str
    task: Task[..., Any] | str
    cron: str | None = field(default=None, kw_only=True)
    every: Seconds | None = field(default=None, kw_only=True)
    at: datetime | None = field(default=None, kw_only=True)
    args: tuple[Any, ...] | Mapping[str, Any] = field(default=(), kw_only=True)
    tz: str = field(default="UTC", kw_only=True)
    misfire: Misfire = field(default="once", kw_only=True)
    jitter: Seconds = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        name = self.name
        if not (isinstance(name, str) and 0 < len(name) <= LONGEST_NAME and is_text(name) and name.isprintable()):
            raise ConfigError(f"schedule: its name must be 1 to {LONGEST_NAME} printable characters, not {name!r:.100}")
        owner = f"schedule {name!r}"
        if not isinstance(self.task, Task | str):
            raise ConfigError(f"{owner}: give a task, as @tasks.task makes it, or the name of one, not {self.task!r}")
        given = [what for what in ("cron", "every", "at") if getattr(self, what) is not None]
        if len(given) != 1:
            raise ConfigError(
                f"{owner}: give one of cron, every and at{', not ' + ' and '.join(given) if given else ''}"
            )
        _check_times(self, owner)
        if not (self.misfire in ("skip", "once", "all") or (is_whole(self.misfire, 1) and self.misfire <= BATCH)):
            raise ConfigError(
                f"{owner}: misfire must be 'skip', 'once', 'all' or a number from 1 to {BATCH}, not {self.misfire!r}"
            )
        if not isinstance(self.args, tuple | Mapping):
            raise ConfigError(
                f'{owner}: args must be a tuple, as in ("ann",), or a mapping by name, not {self.args!r:.100}'
            )
        if not is_number(as_seconds(self.jitter), 0, MAX_DELAY):
            raise ConfigError(f"{owner}: jitter must be 0 to {MAX_DELAY:.0f} seconds, not {self.jitter!r}")

    @property
    def times(self) -> Times:
        """When it ticks."""
        return Times(
            self.cron,
            None if self.every is None else float(as_seconds(self.every)),
            None if self.at is None else self.at.timestamp(),
            self.tz,
        )


def _check_times(schedule: Schedule, owner: str) -> None:
    if schedule.cron is not None:
        try:
            check_cron(schedule.cron, schedule.tz, clock.utc_now().timestamp())
        except ConfigError as error:
            raise ConfigError(str(error).replace("schedule", owner, 1)) from None
    elif schedule.tz != "UTC":
        raise ConfigError(f"{owner}: tz is the time zone of a cron line; leave it out")
    elif schedule.every is not None:
        if not is_number(as_seconds(schedule.every), SHORTEST, MAX_DELAY):
            raise ConfigError(f"{owner}: every must be {SHORTEST:g} to {MAX_DELAY:.0f} seconds, not {schedule.every!r}")
    elif not isinstance(schedule.at, datetime) or schedule.at.utcoffset() is None:
        raise ConfigError(
            f"{owner}: at must be a datetime with a time zone, as datetime(2030, 1, 1, tzinfo=UTC) is, not {schedule.at!r}"
        )


@dataclass(frozen=True, slots=True)
class ScheduleStatus:
    """A schedule as the store has it; see :class:`Schedule` for what is not explained here. Dates are in UTC."""

    name: str
    task: str
    """The name of its task."""
    args: Mapping[str, Any]
    """The arguments by name, as JSON data."""
    cron: str | None
    every: float | None
    at: datetime | None
    tz: str
    misfire: Misfire
    jitter: float
    next_at: datetime | None
    """The first tick that was not sent yet, or None if there is none: a one-off time that is over."""
    paused: bool
    declared: bool
    """True if it is declared in code, False if it was made at run time."""


# ---------------------------------------------------------------------------------------------------------- what is kept


@dataclass(frozen=True, slots=True)
class Definition:
    """What is sent and when, as data that JSON holds."""

    task: str
    args: dict[str, Any]
    times: Times
    misfire: Misfire
    jitter: float
    priority: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    expires_in: float | None = None
    dedup_key: str | None = None
    key: str | None = None
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class ScheduleState:
    """What the record of a schedule says."""

    definition: Definition
    next_at: float | None
    paused: bool = False
    stated_by: str | None = None
    """Of a declared schedule: the digest of all definitions of the worker that stated it; None: it was made at run time."""
    stated_at: float = 0.0
    """When that worker started."""

    def write(self) -> bytes:
        """Return it as JSON."""
        return json.dumps({**asdict(self), "definition": as_stored(self.definition)}, separators=(",", ":")).encode()


def read_state(raw: bytes) -> ScheduleState:
    """Return the state that a record holds.

    :raises SerializationError: it is of a version of this package that writes it otherwise.
    """
    try:
        said = json.loads(raw)
        definition = said.pop("definition")
        return ScheduleState(Definition(**{**definition, "times": Times(**definition["times"])}), **said)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise SerializationError(f"a schedule cannot be read, which another version has written: {error!r}") from None


def digest_of(definitions: Mapping[str, Definition]) -> str:
    """Return the name of this set of declared definitions."""
    written = json.dumps({name: as_stored(each) for name, each in definitions.items()}, sort_keys=True)
    return hashlib.sha256(written.encode()).hexdigest()[:32]


# --------------------------------------------------------------------------------------------------------- what is decided


class Ticks(NamedTuple):
    """What a look at a schedule that is due decides: the ticks to send now, and what is the next one."""

    times: Sequence[float]
    next_at: float | None
    missed: bool = False
    """True if not each tick that was due is sent, or one is late."""


def due_ticks(state: ScheduleState, now: float) -> Ticks:
    """Decide what is sent of a schedule whose ``next_at`` has come."""
    first, times, policy = state.next_at, state.definition.times, state.definition.misfire
    assert first is not None
    assert first <= now
    most = _batch_of(state.definition)
    if policy == "all":
        send = times.earliest(first, now, most)
        return Ticks(send, times.after(send[-1], send[-1]), now - first > MISSED_AFTER)
    send = times.latest(first, now, policy if isinstance(policy, int) else 1)[:most]
    missed = send[0] > first or now - send[-1] > MISSED_AFTER
    next_at = times.after(send[-1], send[-1])
    if policy == "skip" and now - send[-1] > MISSED_AFTER:
        send = []
    return Ticks(send, next_at, missed)


def _batch_of(definition: Definition) -> int:
    """Return how many calls of a definition fit into one write."""
    if definition.misfire in ("once", "skip", 1):
        return 1
    size = MESSAGE_HEADERS + len(json.dumps(definition.args))
    return max(1, min(BATCH, BATCH_SIZE // size))


def after_ticks(state: ScheduleState, ticks: Ticks) -> ScheduleState | None:
    """Return the state once these ticks are sent. None: it is over, and its record is deleted.

    The record of a declared one stays, as it says that there is nothing left to send.
    """
    if ticks.next_at is None and state.stated_by is None:
        return None
    return replace(state, next_at=ticks.next_at)


def is_ticked_here(state: ScheduleState, *, declared: bool, registered: Container[str]) -> bool:
    """True if a worker ticks a schedule: it has the task, and declares the schedule unless that was made at run time."""
    if state.paused or state.next_at is None or state.definition.task not in registered:
        return False
    return declared or state.stated_by is None


class DeclaringWorker(NamedTuple):
    """Who states its definitions: the digest of all of them, and when the worker started."""

    by: str
    started: float


def restated(
    state: ScheduleState | None, definition: Definition, who: DeclaringWorker, now: float, *, gone: bool = False
) -> ScheduleState | None:
    """Return the state of a schedule once a worker has stated its definition, or None if it stays as it is.

    A worker that started later than the one whose definition is there replaces it, and so does any if that one is ``gone``.
    A pause goes on. The next tick stays if the times are the same.
    """
    if state is None:
        return ScheduleState(definition, definition.times.first(now), stated_by=who.by, stated_at=who.started)
    if state.stated_by is not None:
        if state.definition == definition:
            return None
        if state.stated_at >= who.started and not gone:
            return None
    return replace(changed(state, definition, now), stated_by=who.by, stated_at=who.started)


def changed(state: ScheduleState | None, definition: Definition, now: float) -> ScheduleState:
    """Return the state of a schedule with another definition. The next tick stays if the times are the same."""
    if state is None:
        return ScheduleState(definition, definition.times.first(now))
    same = state.definition.times == definition.times
    return replace(state, definition=definition, next_at=state.next_at if same else definition.times.first(now))


def resumed(state: ScheduleState, now: float) -> ScheduleState:
    """Return the state of a paused schedule that goes on: the ticks of the pause are not sent."""
    next_at = state.next_at
    if state.paused and next_at is not None and next_at <= now:
        next_at = state.definition.times.after(now, next_at)
    return replace(state, paused=False, next_at=next_at)


def delay_of_tick(name: str, tick: float, jitter: float) -> float:
    """Return by how many seconds the call of a tick is delayed: the same for the same tick, in whichever worker."""
    if not jitter:
        return 0.0
    drawn = hashlib.sha256(f"{name}@{tick}".encode()).digest()[:8]
    return int.from_bytes(drawn) / 2**64 * jitter


def date_of(seconds: float | None) -> datetime | None:
    """Return POSIX seconds as a datetime in UTC."""
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)
