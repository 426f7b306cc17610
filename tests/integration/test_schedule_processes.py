"""Schedules of several processes on one file: killed at any instant, all of them for a while, none loses or repeats a tick."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import pytest
from schedule_program import SCHEDULES

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("schedule_program.py")


@pytest.mark.own_time(60)
def test_no_tick_is_lost_or_sent_twice_by_workers_that_are_killed(tmp_path):
    notes = tmp_path / "notes"
    command = [sys.executable, str(PROGRAM), str(tmp_path / "jobs.db"), str(notes)]
    rng, fleet = random.Random(7), [subprocess.Popen(command) for _ in range(3)]
    try:
        time.sleep(3)
        until = time.monotonic() + 12
        while time.monotonic() < until:
            time.sleep(rng.uniform(0.05, 0.6))
            killed = fleet.pop(rng.randrange(len(fleet)))
            killed.kill()
            killed.wait()
            fleet.append(subprocess.Popen(command))
        for process in fleet:  # the whole fleet is gone for a while
            process.kill()
            process.wait()
        time.sleep(3)
        fleet = [subprocess.Popen(command)]
        time.sleep(6)
        assert fleet[0].poll() is None
    finally:
        for process in fleet:
            process.kill()
            process.wait()
    messages = defaultdict(set)
    for line in notes.read_text().splitlines():
        name, tick, message_id = line.split()
        messages[name, float(tick)].add(message_id)
    assert {pair: ids for pair, ids in messages.items() if len(ids) > 1} == {}
    for number in range(SCHEDULES):
        ticks = sorted(tick for name, tick in messages if name == f"s{number}")
        assert len(ticks) >= 20
        assert [round(after - before, 3) for before, after in pairwise(ticks)] == [1.0] * (len(ticks) - 1)
