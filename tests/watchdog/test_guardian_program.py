"""The guardian's program: when it judges, and what it does to a silent ward."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mainspring.watchdog import guardian_main as guardian_child
from mainspring.watchdog.guardian import free_signal
from mainspring.watchdog.guardian_main import BEAT, KILL_AT, MARGIN, Guardian, Silence, look_interval, state_of

pytestmark = pytest.mark.anyio


def looks(silence, instants, beat):
    """Look at each (planned, actual) instant; what it says at each."""
    said = []
    for planned, actual in instants:
        silence.plan(planned)
        said.append(silence.look(actual, beat(actual)))
    return said


@given(st.floats(0.2, 60), st.floats(0, 1e6))
def test_a_loop_that_beats_in_time_is_never_silent_for_the_threshold(threshold, start):
    step = look_interval(threshold)
    instants = [(start + n * step, start + n * step) for n in range(1, 50)]
    said = looks(Silence(threshold, start), instants, lambda now: now - step)
    assert max(said) < threshold


@given(st.floats(0.2, 60))
def test_a_loop_that_stops_beating_is_silent_for_the_threshold_when_that_has_passed(threshold):
    step, began = look_interval(threshold), 100.0
    instants = [(began + n * step, began + n * step) for n in range(1, 50)]
    said = looks(Silence(threshold, began), instants, lambda _: began)
    assert said == pytest.approx([now - began for _, now in instants])


@given(st.floats(0.2, 60), st.lists(st.floats(0.26, 1000), min_size=1, max_size=20))
def test_looks_that_come_late_judge_nobody(threshold, lates):
    """However long the machine stood still, and however often: each time the whole threshold begins again."""
    now, instants = 100.0, []
    for late in lates:
        planned = now + look_interval(threshold)
        now = planned + late * threshold + 0.2
        instants.append((planned, now))
    said = looks(Silence(threshold, 100.0), instants, lambda _: 100.0)
    assert said == [0.0] * len(lates)


def test_nobody_is_judged_without_a_beat():
    silence = Silence(1.0, 100.0)
    assert looks(silence, [(101.0, 101.0), (102.0, 102.0)], lambda _: 0.0) == [0.0, 0.0]
    assert looks(silence, [(102.5, 102.5)], lambda _: 102.0) == [0.5]


@pytest.mark.parametrize(
    ("stat", "state"),
    [("12 (python) S 1 2", "S"), ("12 (a) T (b) t 1 2", "t"), ("12 (we) (ird ) R) T 1", "T")],
)
def test_the_state_is_read_whatever_the_program_is_called(stat, state):
    assert state_of(stat) == state


def test_the_signal_is_the_first_that_nobody_uses():
    assert free_signal(0, range(63, 34, -1)) == 63
    assert free_signal(1 << 62 | 1 << 61, range(63, 34, -1)) == 61
    assert free_signal(~0, range(63, 34, -1)) == 0


# ---- the program


class FakeWard:
    """A ward whose answers are set by the test, and which keeps what was done to it."""

    def __init__(self):
        self.standing = False
        self.immune = False
        self.done = []

    def wait(self, _seconds):
        return False

    def send(self, signum):
        self.done.append(signum)

    def kill(self, busy_signal):
        self.done.append("kill")
        return not self.immune


class FakeTime:
    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(guardian_child.time, "monotonic", lambda: self.now)


def run_guardian(guard, time, seconds, each=lambda: None):
    """Let it look for so long, each look in time; whether it ended its ward."""
    wait, end = 0.0, time.now + seconds
    while time.now + wait <= end:
        guard._silence.plan(time.now + wait)
        time.now += wait
        each()
        wait = guard._look(time.now)
        if wait < 0:
            return True
        wait = max(wait, 0.001)  # the kernel's poll counts in milliseconds
    time.now = end
    return False


@pytest.fixture
def guarded(monkeypatch):
    time, ward, board = FakeTime(monkeypatch), FakeWard(), memoryview(bytearray(16)).cast("d")
    return Guardian(board, ward, 10.0, 60, 0), time, ward, board


def test_the_guardian_dumps_then_kills_a_silent_ward(guarded):
    guard, time, ward, board = guarded
    board[BEAT] = time.now
    assert not run_guardian(guard, time, 10 + MARGIN - 0.01)
    assert not ward.done
    assert run_guardian(guard, time, 1)
    assert ward.done == [60, "kill"]


def test_the_guardian_spares_a_ward_that_beats_or_is_not_judged(guarded):
    guard, time, ward, board = guarded

    def beat():
        board[BEAT] = time.now

    assert not run_guardian(guard, time, 100, beat)
    board[BEAT] = 0.0
    assert not run_guardian(guard, time, 100)
    assert not ward.done


def test_the_guardian_spares_a_ward_that_somebody_has_stopped(guarded):
    guard, time, ward, board = guarded
    board[BEAT] = time.now
    ward.standing = True
    assert not run_guardian(guard, time, 100)
    ward.standing = False
    assert not run_guardian(guard, time, 9)
    assert run_guardian(guard, time, 3)


def test_the_guardian_kills_at_the_instant_on_the_board(guarded):
    guard, time, ward, board = guarded
    board[KILL_AT] = time.now + 5
    assert not run_guardian(guard, time, 4.9)
    assert run_guardian(guard, time, 0.2)
    assert ward.done == [60, "kill"]


def test_the_guardian_gives_a_ward_that_was_stopped_time_to_leave_by_itself(guarded):
    guard, time, ward, board = guarded
    board[KILL_AT] = time.now + 5
    ward.standing = True
    assert not run_guardian(guard, time, 60)
    ward.standing = False
    assert not run_guardian(guard, time, guardian_child.FRESH - 0.1)
    assert run_guardian(guard, time, 3)
    assert ward.done == [60, "kill"]


def test_the_guardian_that_overslept_gives_the_ward_time_to_leave_by_itself(guarded):
    guard, time, ward, board = guarded
    board[KILL_AT] = time.now + 5
    assert not run_guardian(guard, time, 1)
    time.now += 100
    assert guard._look(time.now) == pytest.approx(guardian_child.FRESH)
    assert not ward.done


def test_the_guardian_tries_again_where_the_ward_is_hard_to_kill_and_dumps_once(guarded):
    guard, time, ward, board = guarded
    ward.immune = True
    board[BEAT] = time.now
    assert not run_guardian(guard, time, 12.5)
    assert ward.done[:3] == [60, "kill", "kill"]
    assert ward.done.count(60) == 1


def test_it_imports_the_standard_library_only():
    """It is run by path with ``-I -S``, so nothing else would be found."""
    nodes = list(ast.walk(ast.parse(Path(guardian_child.__file__).read_text(encoding="utf-8"))))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)]
    assert names
    assert {name.partition(".")[0] for name in names} <= sys.stdlib_module_names
