"""A fleet that is stopped while the clocks change, in both directions and in several zones: what it sends when it is back.

Times are local, with their offset; the ticks are written down by hand.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from zoneinfo import ZoneInfo

import anyio
import pytest
from schedule_support import EPOCH, Program

from mainspring import InMemoryMailbox
from mainspring.testing import VirtualClock, run_virtual

BERLIN, NEW_YORK, LORD_HOWE = "Europe/Berlin", "America/New_York", "Australia/Lord_Howe"


async def stopped_fleet(line, zone, stops, hours, misfire):
    """A worker that ends at a local time, and another one some hours later. Return the local times of the second's ticks."""
    ends = datetime.fromisoformat(stops).replace(tzinfo=ZoneInfo(zone))
    clock, notes = VirtualClock(), []
    clock.advance((ends - timedelta(minutes=5) - EPOCH).total_seconds())

    async def live(seconds):
        program = Program(notes=notes)
        program.tasks.cron(line, program.note, tz=zone, misfire=misfire)
        await program.run(seconds)

    async with InMemoryMailbox.from_url("memory://jobs"):  # the queue outlives its workers
        await live(300)
        notes.clear()
        await anyio.sleep(hours * 3_600)
        await live(60)
    found = [(EPOCH + timedelta(seconds=tick)).astimezone(ZoneInfo(zone)) for _, tick, _ in notes]
    return [f"{tick:%H:%M} {tick.utcoffset() / timedelta(hours=1):+g}" for tick in found]


CASES = [
    # the hour from 02:00 to 03:00 is skipped
    (BERLIN, "2000-03-26T01:45", "30 2 * * *", ["03:00 +2"]),
    (BERLIN, "2000-03-26T01:45", "30 * * * *", ["03:30 +2", "04:30 +2", "05:30 +2"]),
    (BERLIN, "2000-03-26T01:45", "0,15,30 2 * * *", ["03:00 +2"]),
    (NEW_YORK, "2000-04-02T01:45", "30 2 * * *", ["03:00 -4"]),
    (NEW_YORK, "2000-04-02T01:45", "30 * * * *", ["03:30 -4", "04:30 -4", "05:30 -4"]),
    # from 02:00 to 03:00 in Berlin, and from 01:00 to 02:00 in New York, comes twice
    (BERLIN, "2000-10-29T01:45", "30 2 * * *", ["02:30 +2"]),
    (BERLIN, "2000-10-29T01:45", "30 * * * *", ["02:30 +2", "02:30 +1", "03:30 +1"]),
    (NEW_YORK, "2000-10-29T00:45", "30 1 * * *", ["01:30 -4"]),
    (NEW_YORK, "2000-10-29T00:45", "*/30 1 * * *", ["01:00 -4", "01:30 -4", "01:00 -5", "01:30 -5"]),
    # the half hour from 02:00 to 02:30 is skipped; from 01:30 to 02:00 comes twice
    (LORD_HOWE, "2000-08-27T01:45", "15 2 * * *", ["02:30 +11"]),
    (LORD_HOWE, "2000-08-27T01:45", "15 * * * *", ["03:15 +11", "04:15 +11", "05:15 +11"]),
    (LORD_HOWE, "2000-03-26T01:15", "45 1 * * *", ["01:45 +11"]),
    (LORD_HOWE, "2000-03-26T01:15", "45 * * * *", ["01:45 +11", "01:45 +10.5", "02:45 +10.5", "03:45 +10.5"]),
]


@pytest.mark.parametrize(("zone", "stops", "line", "ticks"), CASES)
def test_what_a_stopped_fleet_sends_of_a_day_on_which_the_clocks_change(zone, stops, line, ticks):
    fleet = [line, zone, stops, 3.5]
    assert run_virtual(stopped_fleet, *fleet, "all") == ticks
    assert run_virtual(stopped_fleet, *fleet, "once") == ticks[-1:]
    assert run_virtual(stopped_fleet, *fleet, 2) == ticks[-2:]
    assert run_virtual(stopped_fleet, *fleet, "skip") == []
