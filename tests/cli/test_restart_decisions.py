"""What a supervisor decides when a worker ends."""

from __future__ import annotations

import signal
from random import Random

import pytest

from mainspring.cli.restart_decisions import (
    AwaitChange,
    Ended,
    GiveUp,
    NoRestart,
    Restart,
    after_exit,
    how,
    status_of_returncode,
    worst,
)
from mainspring.policies import RestartPolicy

POLICY = RestartPolicy(max_retries=2, initial_delay=1, backoff_factor=2, reset_interval=100, jitter="none")


def decide(
    ended: Ended, *, stopping: bool = False, reload: bool = False, told: bool = False, restarts: int = 0
) -> object:
    return after_exit(
        ended, stopping=stopping, reload=reload, told=told, restarts=restarts, policy=POLICY, rng=Random(0)
    )


def test_a_crash_is_restarted_with_the_backoff_of_the_policy_until_it_gives_up() -> None:
    assert decide(Ended(1, 5)) == Restart(1.0, 1)
    assert decide(Ended(1, 5), restarts=1) == Restart(2.0, 2)
    assert decide(Ended(1, 5), restarts=2) == GiveUp()


def test_a_long_run_clears_the_count() -> None:
    assert decide(Ended(137, 100), restarts=2) == Restart(1.0, 1)


def test_work_that_is_over_is_left() -> None:
    assert decide(Ended(0, 5, finished=True)) == NoRestart()


def test_stopped_by_somebody_else_it_is_replaced_at_once_and_uncounted() -> None:
    assert decide(Ended(0, 5), restarts=1) == Restart(0.0, 1)


def test_a_wrong_command_line_does_not_mend_itself() -> None:
    assert decide(Ended(2, 0.1)) == GiveUp()


@pytest.mark.parametrize("status", [0, 1, 2, 70, 137])
def test_on_the_way_out_nothing_is_started(status: int) -> None:
    assert decide(Ended(status, 5), stopping=True) == NoRestart()
    assert decide(Ended(status, 5), stopping=True, reload=True, told=True) == NoRestart()


def test_reload() -> None:
    assert decide(Ended(0, 5), reload=True, told=True) == Restart(0.0, 0)
    assert decide(Ended(70, 5), reload=True, told=True, restarts=2) == Restart(0.0, 0)
    assert decide(Ended(2, 5), reload=True) == AwaitChange()
    assert decide(Ended(1, 5), reload=True) == AwaitChange()
    assert decide(Ended(0, 5, finished=True), reload=True) == AwaitChange()


def test_exit_statuses() -> None:
    assert status_of_returncode(3) == 3
    assert status_of_returncode(-signal.SIGKILL) == 137
    assert worst([]) == 0
    assert worst([0, 70, 1]) == 70


def test_endings_in_words() -> None:
    assert how(0) == "exit status 0"
    assert how(-signal.SIGKILL) == "killed by SIGKILL"
    assert how(-63) == "killed by signal 63"
