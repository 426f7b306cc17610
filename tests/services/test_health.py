"""What the answers of a probe mean: failures and successes in a row."""

from __future__ import annotations

from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mainspring.services.health import Health, HealthVerdict
from mainspring.services.spec import HealthCheckSettings

WELL, UNWELL, FAILED = HealthVerdict


def verdicts(answers, *, first=WELL, **settings):
    health = Health(HealthCheckSettings(**settings), verdict=first)
    return [health.note(None if answer == "." else "down") for answer in answers]


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ("...", [WELL, WELL, WELL]),
        ("x.", [UNWELL, WELL]),
        ("xx.xx.", [UNWELL, UNWELL, WELL, UNWELL, UNWELL, WELL]),
        ("xxxx.", [UNWELL, UNWELL, FAILED, FAILED, WELL]),
    ],
)
def test_one_failure_is_unwell_and_three_in_a_row_are_failed(answers, expected):
    assert verdicts(answers) == expected


def test_with_one_allowed_failure_it_fails_at_once():
    assert verdicts("x.", max_failures=1) == [FAILED, WELL]


def test_it_recovers_by_successes_in_a_row():
    assert verdicts("x.x..", successes=2) == [UNWELL, UNWELL, UNWELL, UNWELL, WELL]
    assert verdicts("xxx.x..", successes=2) == [UNWELL, UNWELL, FAILED, FAILED, FAILED, FAILED, WELL]


def test_before_the_first_success_no_failure_is_forgiven_if_so_begun():
    assert verdicts("x.x", first=FAILED) == [FAILED, WELL, UNWELL]


def test_its_error_is_that_of_the_last_failure_until_it_is_well():
    health = Health(HealthCheckSettings(successes=2), verdict=FAILED, error="not asked yet")
    said = [health.error]
    for answer in ("refused", "late", None, None):
        health.note(answer)
        said.append(health.error)
    assert said == ["not asked yet", "refused", "late", "late", None]


def in_a_row(answers):
    """How many of the last answers are equal."""
    return len(list(takewhile(lambda answer: answer == answers[-1], reversed(answers))))


def model(answers, *, max_failures, successes, first):
    """The verdict by all answers: the last run of failures or successes that was long enough decides."""
    runs = [in_a_row(answers[:end]) for end in range(1, len(answers) + 1)]
    well = [end for end, run in enumerate(runs) if answers[end] is None and run >= successes]
    failed = [end for end, run in enumerate(runs) if answers[end] is not None and run >= max_failures]
    well_at, failed_at = max(well, default=-1), max(failed, default=-1)
    if failed_at > well_at or (first is FAILED and not well):
        return FAILED
    return UNWELL if any(answers[well_at + 1 :]) else WELL


@given(
    st.lists(st.sampled_from([None, "down"]), max_size=12),
    st.integers(1, 5),
    st.integers(1, 4),
    st.sampled_from([WELL, FAILED]),
)
def test_it_is_as_the_model_says(answers, max_failures, successes, first):
    health = Health(HealthCheckSettings(max_failures=max_failures, successes=successes), verdict=first)
    for end, answer in enumerate(answers, 1):
        verdict = health.note(answer)
        expected = model(answers[:end], max_failures=max_failures, successes=successes, first=first)
        assert verdict == health.verdict == expected
        assert health.failures == (0 if answer is None else in_a_row(answers[:end]))
        if verdict is WELL:
            assert health.error is None
