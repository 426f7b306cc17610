"""The instants at which a schedule ticks, as POSIX seconds: a cron line in a time zone, an interval, or one time.

Cron lines are read by ``cronsim``, by the rules of Debian's cron. A line that names its minutes and hours (neither field begins
with ``*``) means times of the day. A time that a change of the clocks skips is the first instant after the gap, and a time that
comes twice is the first of the two. Any other line means all instants whose local time fits: none of them is skipped or moved,
and those of a repeated hour come twice.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from datetime import UTC, datetime, tzinfo
from functools import lru_cache
from itertools import islice, takewhile
from typing import TYPE_CHECKING

from mainspring.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

SEARCH_FROM = 60.0
"""Seconds before now in which the latest ticks are first looked for; each further look goes back four times as far."""


@dataclass(frozen=True, slots=True)
class Times:
    """One of a cron line (with its time zone), seconds between ticks, or the one instant."""

    cron: str | None = None
    every: float | None = None
    at: float | None = None
    tz: str = "UTC"

    def __str__(self) -> str:
        if self.cron is not None:
            return f"{self.cron} ({self.tz})"
        if self.every is not None:
            return f"every {self.every:g} s"
        return f"at {datetime.fromtimestamp(self.at or 0.0, UTC):%Y-%m-%d %H:%M:%S} UTC"

    def first(self, now: float) -> float | None:
        """Return the first tick of a schedule that is made now: a one-off time even if it has passed."""
        return self.at if self.at is not None else self.after(now, now)

    def after(self, instant: float, tick: float) -> float | None:
        """Return the first tick after ``instant``, or None if there is none. ``tick`` is one of them, or the beginning."""
        if self.cron is not None:
            return next(_cron_ticks(self.cron, self.tz, instant), None)
        if self.every is not None:
            return tick + (math.floor((instant - tick) / self.every) + 1) * self.every
        return None

    def earliest(self, first: float, until: float, most: int) -> list[float]:
        """Return the first ``most`` ticks up to the instant ``until``, from the tick ``first`` on."""
        return list(islice(takewhile(lambda tick: tick <= until, self._from(first)), most))

    def latest(self, first: float, until: float, most: int) -> list[float]:
        """Return the last ``most`` ticks up to the instant ``until``, none before the tick ``first``."""
        if self.every is not None:
            count = math.floor((until - first) / self.every) + 1
            return [first + number * self.every for number in range(max(0, count - most), count)]
        if self.cron is None:
            return [first]
        back = SEARCH_FROM
        while True:
            begin = until - back
            ticks = self._from(first) if begin <= first else _cron_ticks(self.cron, self.tz, begin)
            found = deque(takewhile(lambda tick: tick <= until, ticks), maxlen=most)
            if len(found) == most or begin <= first:
                return list(found)
            back *= 4

    def _from(self, first: float) -> Iterator[float]:
        tick: float | None = first
        while tick is not None:
            yield tick
            tick = self.after(tick, tick)


def check_cron(line: object, tz: object, now: float) -> None:
    """Raise :class:`ConfigError` for a cron line that cannot be read or never fires, or a time zone that does not exist."""
    from cronsim import CronSim, CronSimError

    if not isinstance(tz, str):
        raise ConfigError(f"schedule: tz must be the name of a time zone, such as 'Europe/Berlin', not {tz!r}")
    zone = zone_of(tz)
    if not isinstance(line, str):
        raise ConfigError(f"schedule: cron must be a string such as '0 3 * * *', not {line!r}")
    try:
        CronSim(line, datetime.fromtimestamp(now, zone))
    except CronSimError as error:
        problem = str(error)
        if problem == "Bad day-of-month" and _is_readable(line):
            raise _never(line) from None
        raise ConfigError(
            f"schedule: the cron line {line!r} cannot be read ({problem[:1].lower()}{problem[1:]}); it has the fields minute,"
            " hour, day of month, month and weekday, as in '30 3 * * MON-FRI'"
        ) from None
    if next(_cron_ticks(line, tz, now), None) is None:
        raise _never(line)


def _is_readable(line: str) -> bool:
    """True if each field by itself can be read: then no month of the line has such a day."""
    from cronsim import CronSim, CronSimError

    fields = line.split()
    fields[-2] = "*"
    try:
        CronSim(" ".join(fields), datetime.fromtimestamp(0, UTC))
    except CronSimError:
        return False
    return True


def _never(line: str) -> ConfigError:
    return ConfigError(f"schedule: the cron line {line!r} never fires: no date fits it in the next 50 years")


@lru_cache(maxsize=256)
def zone_of(tz: str) -> tzinfo:
    """Return the time zone of that name. Raise :class:`ConfigError` if there is none."""
    if tz == "UTC":
        return UTC
    from zoneinfo import ZoneInfo

    try:
        return ZoneInfo(tz)
    except (KeyError, ValueError, OSError):
        raise ConfigError(f"schedule: there is no time zone {tz!r:.100}{_similar(tz)}") from None


def _similar(tz: str) -> str:
    from difflib import get_close_matches
    from zoneinfo import available_timezones

    close = get_close_matches(tz[:100], available_timezones(), 1)
    return f"; did you mean {close[0]!r}?" if close else "; give a name such as 'Europe/Berlin', or 'UTC'"


def _cron_ticks(line: str, tz: str, after: float) -> Iterator[float]:
    """Yield the ticks of a cron line after an instant, each once and in order."""
    zone = zone_of(tz)
    if zone is UTC or _names_times(line):
        return _times_of_the_day(line, zone, after)
    return _instants_that_fit(line, zone, math.floor(after))


def _names_times(line: str) -> bool:
    """True if a line means times of the day: it has no seconds, and begins neither the minute nor the hour with ``*``."""
    fields = line.split()
    return len(fields) == 5 and not fields[0].startswith("*") and not fields[1].startswith("*")


def _times_of_the_day(line: str, zone: tzinfo, after: float) -> Iterator[float]:
    from cronsim import CronSim

    last = after
    for found in CronSim(line, datetime.fromtimestamp(math.floor(after), zone)):
        tick = found.timestamp()
        if tick > last:  # times that a gap moved are the same instant, and those of a repeated hour lie behind
            last = tick
            yield tick


def _instants_that_fit(line: str, zone: tzinfo, after: int) -> Iterator[float]:
    """Yield all instants whose local time fits. While the offset from UTC stays, that is a line without a zone.

    With a zone, cronsim goes on by whole hours, and so leaves some out where the clocks change by half an hour.
    """
    from cronsim import CronSim

    last, offset = after, _offset(zone, after)
    while True:
        for found in CronSim(line, datetime.fromtimestamp(last + offset, UTC).replace(tzinfo=None)):
            tick = int(found.replace(tzinfo=UTC).timestamp()) - offset
            change = _change_of_offset(zone, offset, last, tick)
            if change is not None:
                last, offset = change - 1, _offset(zone, change)
                break
            last = tick
            yield float(tick)
        else:
            return


def _offset(zone: tzinfo, instant: int) -> int:
    """Return the seconds by which local time is ahead of UTC."""
    offset = datetime.fromtimestamp(instant, zone).utcoffset()
    assert offset is not None
    return int(offset.total_seconds())


def _change_of_offset(zone: tzinfo, offset: int, after: int, until: int) -> int | None:
    """Return the first instant after ``after`` and up to ``until`` at which the offset is another one, or None."""
    while after < until:
        end = min(after + 86_400, until)
        if _offset(zone, end) != offset:
            between = range(after + 1, end)
            return after + 1 + bisect_left(between, True, key=lambda instant: _offset(zone, instant) != offset)
        after = end
    return None
