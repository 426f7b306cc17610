"""Faults and plans: values, and what is drawn from a seed."""

from __future__ import annotations

import pytest

from mainspring import ConfigError
from mainspring.testing import Faults
from mainspring.testing.simulation.faults import EVENTS, plan

DAY = 86_400.0


def drawn(faults: Faults, **changes: object):
    options = {"seed": 3, "duration": DAY, "workers": 4, **changes}
    return plan(faults, **options)  # type: ignore[arg-type]


def test_the_same_seed_gives_the_same_plan_and_another_one_another() -> None:
    assert drawn(Faults()) == drawn(Faults())
    assert drawn(Faults()) != drawn(Faults(), seed=4)


def test_the_default_rates_add_up_to_one_event_an_hour() -> None:
    assert sum(getattr(Faults(), kind) for kind in EVENTS) == pytest.approx(1.0)
    events = sum(len(drawn(Faults(), seed=seed)) for seed in range(40))
    assert 40 * 24 * 0.8 < events < 40 * 24 * 1.2


def test_a_plan_is_in_order_numbered_and_within_the_duration() -> None:
    events = drawn(Faults().times(10))
    assert [event.number for event in events] == list(range(len(events)))
    assert [event.at for event in events] == sorted(event.at for event in events)
    assert all(0 < event.at < DAY and 0 <= event.worker < 4 for event in events)
    assert {event.kind for event in events} == set(EVENTS)
    assert {event.mode for event in events if event.kind == "partition"} == {"hang", "fail", "lost"}


def test_a_shorter_run_has_the_same_plan_cut_off() -> None:
    long, short = drawn(Faults().times(5)), drawn(Faults().times(5), duration=DAY / 3)
    assert short == long[: len(short)]
    assert 0 < len(short) < len(long)


def test_leaving_a_kind_out_leaves_the_others_where_they_were() -> None:
    def instants(faults: Faults) -> list[tuple[float, int]]:
        return [(event.at, event.worker) for event in drawn(faults) if event.kind == "crash"]

    assert instants(Faults()) == instants(Faults().only(["crash", "freeze"])) == instants(Faults.just(crash=0.25))


def test_nothing_fails_in_a_peaceful_world() -> None:
    assert drawn(Faults.none()) == []
    assert str(Faults.none()) == "none"


def test_scaling_stops_at_certainty() -> None:
    scaled = Faults(crash=2, poison=0.4).times(10)
    assert scaled.crash == 20
    assert scaled.poison == 1.0


@pytest.mark.parametrize("faults", [Faults(), Faults(crash=3), Faults.none(), Faults.just(signal=1.5, poison=0.25)])
def test_the_source_makes_it_again(faults: Faults) -> None:
    assert eval(faults.source(), {"Faults": Faults}) == faults


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Faults(crash=-1), "crash must be a rate from 0"),
        (lambda: Faults(poison=1.5), "poison must be a probability"),
        (lambda: Faults(slow_call=float("nan")), "slow_call must be a probability"),
        (lambda: Faults(signal=True), "signal must be a rate"),
        (lambda: Faults().only(["crsh"]), "no faults of kind 'crsh'; there are crash, signal"),
        (lambda: Faults.just(crsh=1), "no faults of kind 'crsh'"),
    ],
)
def test_wrong_values_are_named(make, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make()
