"""When cron lines tick, compared with a search through all minutes and all times of the day, over changes of the clocks."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import pairwise
from zoneinfo import ZoneInfo

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mainspring.errors import ConfigError
from mainspring.tasks.schedule_times import Times, check_cron

ZONES = ("UTC", "Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Asia/Kolkata", "America/Santiago")
DAY = 86_400.0
BEGIN = datetime(2026, 1, 1, tzinfo=UTC).timestamp()


def local(tick, zone):
    return datetime.fromtimestamp(tick, ZoneInfo(zone)).strftime("%m-%d %H:%M %z")


def ticks_of(times, begin, end):
    found, tick = [], times.after(begin, begin)
    while tick is not None and tick <= end:
        found.append(tick)
        tick = times.after(tick, tick)
    return found


def instants_that_fit(minutes, hours, zone, begin, end):
    """All whole minutes whose local time fits."""
    first = int(begin // 60 + 1) * 60
    for instant in range(first, int(end) + 1, 60):
        at = datetime.fromtimestamp(instant, ZoneInfo(zone))
        if at.minute in minutes and at.hour in hours:
            yield float(instant)


def times_of_the_day(minutes, hours, zone, begin, end):
    """Each time of each day: the first of two, and the first instant behind a gap."""
    found = set()
    day = datetime.fromtimestamp(begin - 2 * DAY, UTC).date()
    while day <= datetime.fromtimestamp(end + 2 * DAY, UTC).date():
        for hour in hours:
            for minute in minutes:
                wall = datetime(day.year, day.month, day.day, hour, minute, tzinfo=ZoneInfo(zone))
                while wall.astimezone(UTC).astimezone(wall.tzinfo).replace(tzinfo=None) != wall.replace(tzinfo=None):
                    wall += timedelta(minutes=1)
                found.add(wall.timestamp())
        day += timedelta(days=1)
    return sorted(tick for tick in found if begin < tick <= end)


FIELD = st.sampled_from(("*", "*/7", "0", "30", "15,45"))
HOUR = st.sampled_from(("*", "*/2", "0", "1", "2", "3", "1,2,3", "23"))


def values(field, most):
    if field.startswith("*"):
        return range(0, most, int(field[2:] or 1))
    return [int(value) for value in field.split(",")]


@pytest.mark.own_time(4)
@settings(max_examples=100, deadline=None)
@given(minute=FIELD, hour=HOUR, zone=st.sampled_from(ZONES), day=st.integers(0, 365), seconds=st.integers(0, 86_399))
@example(minute="30", hour="2", zone="Europe/Berlin", day=86, seconds=0)
@example(minute="30", hour="2", zone="Europe/Berlin", day=296, seconds=0)
@example(minute="15,45", hour="2", zone="Europe/Berlin", day=297, seconds=5_400)
@example(minute="15,45", hour="1", zone="Australia/Lord_Howe", day=93, seconds=55_000)
@example(minute="*/7", hour="2", zone="Australia/Lord_Howe", day=275, seconds=0)
@example(minute="*", hour="*/2", zone="Australia/Lord_Howe", day=91, seconds=0)
@example(minute="0", hour="*/2", zone="Australia/Lord_Howe", day=274, seconds=0)
@example(minute="30", hour="0", zone="America/Santiago", day=247, seconds=0)
@example(minute="0", hour="*", zone="America/New_York", day=304, seconds=0)
def test_a_cron_line_ticks_at_each_of_its_times_once(minute, hour, zone, day, seconds):
    begin = BEGIN + day * DAY + seconds
    end = begin + 3 * DAY
    fixed = not minute.startswith("*") and not hour.startswith("*")
    expected = (times_of_the_day if fixed else instants_that_fit)(
        values(minute, 60), values(hour, 24), zone, begin, end
    )
    times = Times(cron=f"{minute} {hour} * * *", tz=zone)
    assert ticks_of(times, begin, end) == list(expected)


@pytest.mark.own_time(4)
@settings(max_examples=60, deadline=None)
@given(
    line=st.sampled_from(("30 2 * * *", "*/20 * * * *", "0 9 * * MON", "15,45 1,2 * * *", "0 3 1 * *")),
    zone=st.sampled_from(ZONES),
    day=st.integers(0, 365),
    hours=st.floats(0, 2_000),
    most=st.integers(1, 12),
)
def test_the_latest_and_the_earliest_ticks_are_those_of_all(line, zone, day, hours, most):
    times = Times(cron=line, tz=zone)
    first = times.first(BEGIN + day * DAY)
    until = first + hours * 3_600
    every = [first, *ticks_of(times, first, until)]
    assert times.latest(first, until, most) == every[-most:]
    assert times.earliest(first, until, most) == every[:most]
    assert all(before < after for before, after in pairwise(every))


@pytest.mark.parametrize(
    ("line", "zone", "ticks"),
    [
        ("30 2 * * *", "Europe/Berlin", ["03-28 02:30 +0100", "03-29 03:00 +0200", "03-30 02:30 +0200"]),
        ("30 2 * * *", "America/New_York", ["03-28 02:30 -0400", "03-29 02:30 -0400", "03-30 02:30 -0400"]),
        ("30 * 29 3 *", "Europe/Berlin", ["03-29 00:30 +0100", "03-29 01:30 +0100", "03-29 03:30 +0200"]),
        ("15,45 2 29 3 *", "Europe/Berlin", ["03-29 03:00 +0200", "03-29 02:15 +0200", "03-29 02:45 +0200"]),
    ],
)
def test_a_time_that_is_skipped_is_the_first_instant_after_the_gap(line, zone, ticks):
    begin = datetime(2026, 3, 28, tzinfo=ZoneInfo(zone)).timestamp()
    times = Times(cron=line, tz=zone)
    found = []
    for _ in ticks:
        begin = times.after(begin, begin)
        found.append(local(begin, zone))
    assert found == ticks


@pytest.mark.parametrize(
    ("line", "ticks"),
    [
        ("30 2 * * *", ["10-25 02:30 +0200", "10-26 02:30 +0100"]),
        ("30 * * * *", ["10-25 00:30 +0200", "10-25 01:30 +0200", "10-25 02:30 +0200", "10-25 02:30 +0100"]),
        ("*/30 2 * * *", ["10-25 02:00 +0200", "10-25 02:30 +0200", "10-25 02:00 +0100", "10-25 02:30 +0100"]),
    ],
)
def test_a_time_that_comes_twice_is_the_first_and_an_hourly_line_ticks_in_both(line, ticks):
    begin = datetime(2026, 10, 25, tzinfo=ZoneInfo("Europe/Berlin")).timestamp()
    found = ticks_of(Times(cron=line, tz="Europe/Berlin"), begin, begin + 3 * DAY)
    assert [local(tick, "Europe/Berlin") for tick in found[: len(ticks)]] == ticks


def test_the_ticks_of_an_interval_stay_on_its_grid():
    times = Times(every=90.0)
    assert times.first(1_000.0) == 1_090.0
    assert times.earliest(1_090.0, 1_300.0, 10) == [1_090.0, 1_180.0, 1_270.0]
    assert times.latest(1_090.0, 1_300.0, 2) == [1_180.0, 1_270.0]
    assert times.latest(1_090.0, 1_270.0, 1) == [1_270.0]
    assert times.after(1_270.0, 1_090.0) == 1_360.0


def test_a_one_off_time_is_the_first_even_if_it_is_past_and_has_none_after():
    times = Times(at=50.0)
    assert times.first(1_000.0) == 50.0
    assert times.earliest(50.0, 1_000.0, 5) == times.latest(50.0, 1_000.0, 5) == [50.0]
    assert times.after(50.0, 50.0) is None


@pytest.mark.parametrize(
    ("line", "zone", "says"),
    [
        (
            "61 * * * *",
            "UTC",
            "cron line '61 [*] .*cannot be read .bad minute.*minute, hour, day of month, month and week",
        ),
        ("* * * *", "UTC", "wrong number of fields"),
        ("@daily", "UTC", "wrong number of fields"),
        ("0 0 32 * *", "UTC", "bad day-of-month"),
        ("0 0 30 2 *", "UTC", "never fires"),
        ("0 0 31 4,6 *", "UTC", "never fires"),
        ("* * */20 * 1L", "UTC", "never fires"),
        (None, "UTC", "must be a string"),
        ("0 3 * * *", "Europe/Berln", "no time zone 'Europe/Berln'; did you mean 'Europe/Berlin'"),
        ("0 3 * * *", "", "no time zone ''"),
        ("0 3 * * *", "../etc/passwd", "no time zone"),
        ("0 3 * * *", ["UTC"], "must be the name of a time zone"),
    ],
)
def test_a_line_or_a_zone_that_cannot_be_is_refused_in_one_line(line, zone, says):
    with pytest.raises(ConfigError, match=says) as raised:
        check_cron(line, zone, BEGIN)
    assert "\n" not in str(raised.value)
