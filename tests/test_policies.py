"""Retry, dead-letter, lease and restart policies: decisions as properties, and what their constructors refuse."""

from __future__ import annotations

import math
from datetime import timedelta
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mainspring.errors import ConfigError
from mainspring.policies import DeadLetterPolicy, LeasePolicy, Rate, RestartPolicy, RetryPolicy, backoff

seconds = st.floats(0, 1e6, allow_nan=False)
attempts = st.integers(1, 100_000)
factors = st.floats(1, 1e12, allow_nan=False)


def bound(attempt, initial, maximum, factor):
    return backoff(attempt, initial=initial, maximum=maximum, factor=factor, jitter="none", rng=Random(0))


@given(attempts, seconds, seconds, factors, st.integers())
def test_full_jitter_draws_between_zero_and_the_bound(attempt, initial, more, factor, seed):
    maximum = initial + more
    drawn = backoff(attempt, initial=initial, maximum=maximum, factor=factor, jitter="full", rng=Random(seed))
    assert 0 <= drawn <= bound(attempt, initial, maximum, factor) <= maximum


@given(attempts, seconds, seconds, factors)
def test_the_bound_never_falls_and_starts_at_initial(attempt, initial, more, factor):
    maximum = initial + more
    assert bound(1, initial, maximum, factor) == initial
    assert bound(attempt, initial, maximum, factor) <= bound(attempt + 1, initial, maximum, factor)


@given(st.floats(0.001, 10), st.floats(10, 1e6), st.floats(1.001, 1e300))
def test_every_factor_above_one_reaches_the_maximum(initial, maximum, factor):
    assert bound(100_000, initial, maximum, factor) == maximum


def test_a_delay_of_nothing_stays_nothing():
    assert bound(100_000, 0.0, 5.0, 2.0) == 0.0


def test_the_default_grows_from_one_second_to_three_hours():
    policy = RetryPolicy(jitter="none")
    assert [policy.delay(n, Random(0)) for n in (1, 2, 3, 4, 11, 12, 99)] == [
        1,
        2.5,
        6.25,
        15.625,
        pytest.approx(9_536.74, abs=0.01),
        10_800,
        10_800,
    ]


@pytest.mark.parametrize(("jitter", "least"), [("full", 0), ("equal", 8)])
def test_jitter_spreads(jitter, least):
    policy = RetryPolicy(factor=2.0, jitter=jitter)
    drawn = [policy.delay(5, Random(seed)) for seed in range(200)]
    assert least <= min(drawn) < least + 1 < 15 < max(drawn) <= 16


@given(attempts, seconds, seconds, factors, st.integers())
def test_equal_jitter_draws_between_half_the_bound_and_all_of_it(attempt, initial, more, factor, seed):
    maximum = initial + more
    drawn = backoff(attempt, initial=initial, maximum=maximum, factor=factor, jitter="equal", rng=Random(seed))
    highest = bound(attempt, initial, maximum, factor)
    assert highest / 2 <= drawn <= highest


def test_the_default_retries_go_on_for_about_a_day():
    least, most = RetryPolicy().horizon(DeadLetterPolicy().max_attempts)
    assert (least / 3_600, most / 3_600) == (pytest.approx(14.21, abs=0.01), pytest.approx(28.41, abs=0.01))


@pytest.mark.parametrize("jitter", ["full", "equal", "none"])
@pytest.mark.parametrize("tries", [1, 2, 8, 40])
def test_the_horizon_bounds_the_waits_between_so_many_tries(jitter, tries):
    policy = RetryPolicy(initial_delay=2, max_delay=100, factor=3, jitter=jitter)
    least, most = policy.horizon(tries)
    for seed in range(20):
        rng = Random(seed)
        assert least <= sum(policy.delay(number, rng) for number in range(1, tries)) <= most
    exact = sum(RetryPolicy(2, 100, 3, "none").delay(number, Random(0)) for number in range(1, tries))
    assert (least, most) == ({"full": 0, "equal": exact / 2, "none": exact}[jitter], exact)


def test_the_horizon_of_very_many_tries_is_known_at_once():
    assert RetryPolicy(5, 5, 1, "none").horizon(10**12) == (5.0 * (10**12 - 1),) * 2


def test_the_same_generator_gives_the_same_delays():
    draws = [[RetryPolicy().delay(n, rng) for n in range(1, 9)] for rng in (Random(7), Random(7))]
    assert draws[0] == draws[1]


BAD = [float("nan"), math.inf, -1, "1", None, True]


@pytest.mark.parametrize("policy", [RetryPolicy, RestartPolicy])
@pytest.mark.parametrize("field", ["initial_delay", "max_delay"])
@pytest.mark.parametrize("value", BAD)
def test_delays_must_be_seconds(policy, field, value):
    with pytest.raises(ConfigError, match=field):
        policy(**{field: value})


@pytest.mark.parametrize("value", [*BAD, 0.99])
def test_factors_must_be_one_or_more(value):
    with pytest.raises(ConfigError, match="factor"):
        RetryPolicy(factor=value)
    with pytest.raises(ConfigError, match="factor"):
        RestartPolicy(backoff_factor=value)


def test_the_longest_delay_must_not_be_shorter_than_the_first():
    with pytest.raises(ConfigError, match=r"max_delay must be at least initial_delay \(10"):
        RetryPolicy(initial_delay=10, max_delay=9)


def test_no_message_waits_for_longer_than_a_store_can_say():
    assert RetryPolicy(max_delay=366 * 86_400).max_delay == 31_622_400
    with pytest.raises(ConfigError, match=r"RetryPolicy: max_delay must be at most 31622400 seconds, not 31622401"):
        RetryPolicy(max_delay=366 * 86_400 + 1)


@pytest.mark.parametrize("value", ["some", None, 3, []])
def test_jitter_is_full_equal_or_none(value):
    with pytest.raises(ConfigError, match="jitter must be one of full, equal, none"):
        RetryPolicy(jitter=value)


def test_policies_are_values():
    assert RetryPolicy() == RetryPolicy(1.0, 10_800.0, 2.5, "equal")
    with pytest.raises(AttributeError):
        RetryPolicy().initial_delay = 5


# ------------------------------------------------------------------------------------------------------- dead letters


def test_a_message_dies_at_the_last_allowed_attempt():
    policy = DeadLetterPolicy(max_attempts=3)
    assert [policy.is_dead(n, ValueError()) for n in (1, 2, 3, 4)] == [False, False, True, True]


def test_included_types_and_their_subclasses_die_at_once():
    policy = DeadLetterPolicy(include=(LookupError,))
    assert policy.is_dead(1, KeyError())
    assert not policy.is_dead(1, ValueError())


def test_excluded_types_and_their_subclasses_never_die():
    policy = DeadLetterPolicy(max_attempts=1, exclude=(OSError,))
    assert not policy.is_dead(99, ConnectionError())
    assert policy.is_dead(1, ValueError())


def test_include_wins_over_exclude():
    policy = DeadLetterPolicy(include=(ConnectionError,), exclude=(OSError,))
    assert policy.is_dead(1, ConnectionResetError())
    assert not policy.is_dead(9, OSError())


def test_where_it_is_said_what_is_retried_any_other_error_is_the_end():
    policy = DeadLetterPolicy(max_attempts=3, include=(ConnectionResetError,), exclude=KeyError, retry_on=[OSError])
    assert not policy.is_dead(2, ConnectionError())
    assert policy.is_dead(3, ConnectionError())
    assert policy.is_dead(1, ValueError())
    assert policy.is_dead(1, ConnectionResetError())
    assert not policy.is_dead(9, KeyError())
    assert DeadLetterPolicy(retry_on=()).is_dead(1, OSError())


def test_one_type_may_stand_alone_and_a_list_is_taken():
    assert DeadLetterPolicy(include=ValueError).include == (ValueError,)
    assert DeadLetterPolicy(exclude=[ValueError, OSError]).exclude == (ValueError, OSError)


@pytest.mark.parametrize("field", ["max_attempts", "max_crashes"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "5", None, True])
def test_how_often_must_be_a_count(field, value):
    with pytest.raises(ConfigError, match=f"{field} must be a whole number from 1"):
        DeadLetterPolicy(**{field: value})


@pytest.mark.parametrize("field", ["include", "exclude", "retry_on"])
@pytest.mark.parametrize("value", ["ValueError", (ValueError, "x"), (int,), 5, (None,)])
def test_kinds_of_errors_are_exception_types(field, value):
    with pytest.raises(ConfigError, match=f"{field} takes exception types"):
        DeadLetterPolicy(**{field: value})


# ------------------------------------------------------------------------------------------------------------- leases


@pytest.mark.parametrize("value", [0, -0.1, 0.81, 1, math.nan, "x", None])
def test_a_renewal_comes_well_inside_the_lease(value):
    with pytest.raises(ConfigError, match="fraction"):
        LeasePolicy(fraction=value)


def test_the_ways_of_renewing_are_named():
    with pytest.raises(ConfigError, match="renew must be one of while-running, on-beat, never, not 'always'"):
        LeasePolicy(renew="always")


# ------------------------------------------------------------------------------------------------------------ restarts


def test_restarts_in_a_row_back_off_and_end():
    policy = RestartPolicy(max_retries=3, jitter="none")
    restarts, delays = 0, []
    for _ in range(4):
        restarts, delay = policy.next_restart(restarts, 1.0, Random(0))
        delays.append(delay)
    assert delays == [1, 2, 4, None]
    assert restarts == 3


def test_a_run_that_lasted_clears_the_count():
    policy = RestartPolicy(max_retries=3, jitter="none", reset_interval=300)
    assert policy.next_restart(3, 299.9, Random(0)) == (3, None)
    assert policy.next_restart(3, 300, Random(0)) == (1, 1)


def test_no_restarts_at_all():
    assert RestartPolicy(max_retries=0).next_restart(0, 1e9, Random(0)) == (0, None)


@pytest.mark.parametrize("value", [-1, 1.5, "x", None, True])
def test_max_retries_must_be_a_count(value):
    with pytest.raises(ConfigError, match="max_retries"):
        RestartPolicy(max_retries=value)


@pytest.mark.parametrize("value", BAD)
def test_the_reset_interval_must_be_seconds(value):
    with pytest.raises(ConfigError, match="reset_interval"):
        RestartPolicy(reset_interval=value)


@pytest.mark.parametrize(
    ("rate", "burst"),
    [("1/d", 1), ("100/m", 1), ("199/s", 1), ("200/s", 2), ("1000/s", 10), ("1000000/s", 10_000), ("5/0.001s", 5)],
)
def test_a_rate_of_which_nothing_is_said_has_a_burst_of_ten_milliseconds(rate: str, burst: int) -> None:
    assert Rate.of(rate).burst == burst


def test_a_rate_is_as_its_text_says() -> None:
    assert Rate.of("100/m") == Rate(100, 60) == Rate(100, timedelta(minutes=1), burst=1)
    assert Rate.of("5/10s").interval == 2.0


@pytest.mark.parametrize("wrong", ["0/s", "5", "5/", "/s", "1/0s", "-1/s", "1.5/s", "nan/s", "1/x", "", None, 5, True])
def test_what_is_no_rate_is_refused(wrong: object) -> None:
    with pytest.raises(ConfigError, match=r"^(a rate is a text|Rate: )"):
        Rate.of(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong",
    [{"limit": 0}, {"limit": True}, {"limit": 1, "per": 0}, {"limit": 1, "burst": 2}, {"limit": 5, "burst": -1}],
)
def test_numbers_that_are_no_rate_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"^Rate: "):
        Rate(**wrong)
