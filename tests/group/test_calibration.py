"""The calibration rules: which fail, and that what they advise passes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mainspring.errors import ConfigError
from mainspring.group.calibration import Timeouts, all_rules, rules, seconds, unjudged


def failing(timeouts: Timeouts) -> dict[str, str]:
    return {rule.formula: rule.advice for rule in rules(timeouts) if not rule.ok}


def test_the_defaults_fit_together() -> None:
    assert failing(Timeouts()) == {}


def test_the_defaults_do_not_fit_into_kubernetes_thirty_seconds_and_do_into_45() -> None:
    (advice,) = failing(Timeouts(grace=30)).values()
    assert "36 s or more" in advice
    assert "shutdown_timeout=24" in advice
    assert failing(Timeouts(grace=45)) == {}
    assert failing(Timeouts(grace=36)) == {}
    assert failing(Timeouts(grace=35.9)) != {}


def test_an_unknown_kill_time_is_said_and_not_judged() -> None:
    assert any("36 s" in line and "30 s is too short" in line for line in unjudged(Timeouts()))
    assert not any("too short" in line for line in unjudged(Timeouts(shutdown_timeout=10)))
    assert unjudged(Timeouts(grace=60, longest=5)) == []


@pytest.mark.parametrize(
    ("timeouts", "formula"),
    [
        (Timeouts(block_threshold=60), "block_threshold < visibility_timeout"),
        (Timeouts(longest=720), "watchdog_threshold > longest time without a beat"),
        (Timeouts(watchdog_interval=240), "watchdog_interval < watchdog_threshold / 3"),
        (
            Timeouts(renew="never", longest=60, visibility_timeout=780),
            "visibility_timeout > watchdog_threshold + longest processing",
        ),
        (
            Timeouts(renew="never", longest=690, visibility_timeout=2000, beat_gap=1),
            "watchdog_threshold > wait_time_seconds + longest processing",
        ),
        (
            Timeouts(renew="on-beat", longest=500, beat_gap=60, visibility_timeout=60),
            "visibility_timeout > longest time without a beat",
        ),
    ],
)
def test_each_rule_fails_on_its_boundary_and_holds_once_advised(timeouts: Timeouts, formula: str) -> None:
    broken = [rule for rule in rules(timeouts) if not rule.ok]
    assert [rule.formula for rule in broken] == [formula]
    (rule,) = broken
    assert rule.value is not None
    assert f"{rule.setting}=" in rule.advice
    assert failing(replace(timeouts, **{rule.setting: rule.value})) == {}


def test_renewal_off_without_the_longest_processing_is_judged_by_the_threshold_alone() -> None:
    assert any("taken as 0" in formula for formula in failing(Timeouts(renew="never")))
    assert failing(Timeouts(renew="never", visibility_timeout=721)) == {}


def test_a_handler_that_beats_may_take_longer_than_the_threshold() -> None:
    assert failing(Timeouts(longest=36_000, beat_gap=10)) == {}
    assert failing(Timeouts(longest=36_000)) != {}


def test_no_lease_can_be_long_enough_so_the_advice_is_to_renew() -> None:
    rule = next(r for r in rules(Timeouts(renew="never", longest=40_000)) if r.setting == "visibility_timeout")
    assert rule.value is None
    assert "LeasePolicy()" in rule.advice


def test_a_threshold_that_is_off_is_not_judged() -> None:
    assert rules(Timeouts(watchdog_threshold=None, block_threshold=None, longest=10_000)) == []


def test_the_rules_of_the_group_stand_there_once() -> None:
    formulas = [rule.formula for rule in all_rules([Timeouts("a", grace=10), Timeouts("b", grace=10)])]
    assert formulas.count("block_threshold < visibility_timeout") == 2
    assert formulas.count("drain_delay + shutdown_timeout + cancel_grace + 1 <= grace") == 1
    assert formulas.count("watchdog_interval < watchdog_threshold / 3") == 1


@pytest.mark.parametrize("value", [-1, math.nan])
def test_a_timeout_that_is_none_is_refused(value: float) -> None:
    with pytest.raises(ConfigError, match="watchdog_interval must be 0 or more seconds"):
        Timeouts(watchdog_interval=value)


def test_a_rule_reads_as_one_line() -> None:
    rule = next(rule for rule in rules(Timeouts("emails", visibility_timeout=10)) if not rule.ok)
    assert str(rule) == (
        "emails: block_threshold < visibility_timeout (30 s against 10 s) does not hold: set LoopGroup(block_threshold=5)"
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (45, "45 s"),
        (0.25, "0.25 s"),
        (720, "12 min"),
        (43_200, "720 min"),
        (12_345, "12345 s"),
        (math.inf, "unlimited"),
    ],
)
def test_seconds_for_people(value: float, text: str) -> None:
    assert seconds(value) == text


spans = st.floats(min_value=0, max_value=20_000)
timeouts = st.builds(
    Timeouts,
    visibility_timeout=st.floats(min_value=0.01, max_value=43_200),
    wait_time_seconds=spans,
    renew=st.sampled_from(["while-running", "on-beat", "never"]),
    watchdog_threshold=st.none() | st.floats(min_value=0.01, max_value=20_000),
    watchdog_interval=spans,
    block_threshold=st.none() | spans,
    drain_delay=spans,
    shutdown_timeout=spans,
    cancel_grace=spans,
    grace=st.none() | spans,
    longest=st.none() | spans,
    beat_gap=st.none() | spans,
)


@given(timeouts)
def test_each_advised_value_makes_its_rule_hold(timeouts: Timeouts) -> None:
    for rule in rules(timeouts):
        if rule.ok or rule.value is None:
            continue
        changed = rules(replace(timeouts, **{rule.setting: rule.value}))
        assert next(other for other in changed if other.name == rule.name).ok, rule


@given(timeouts)
def test_following_the_advice_ends_with_all_rules_holding(timeouts: Timeouts) -> None:
    for _ in range(20):
        broken = [rule for rule in rules(timeouts) if not rule.ok]
        if not broken:
            return
        rule = broken[0]
        if rule.value is None:  # no lease is that long: what the advice says instead
            timeouts = replace(timeouts, renew="while-running")
        else:
            timeouts = replace(timeouts, **{rule.setting: rule.value})
    pytest.fail(f"still broken: {broken}")
