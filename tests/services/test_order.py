"""The order of services: who starts after whom, who stops first, and who is restarted with whom."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mainspring.core.state_machine import ORCHESTRATOR, OrchestratorState
from mainspring.errors import ConfigError
from mainspring.services.order import Order, next_state
from mainspring.services.spec import ServiceSpec, Strategy


def spec(name: str, *depends_on: str) -> ServiceSpec:
    return ServiceSpec(name=name, command=("true",), depends_on=depends_on)


@st.composite
def acyclic(draw: st.DrawFn) -> list[ServiceSpec]:
    """Services that depend on others, in an order that has nothing to do with that."""
    count = draw(st.integers(1, 12))
    specs = []
    for index in range(count):
        below = draw(st.sets(st.integers(0, index - 1), max_size=4)) if index else set()
        specs.append(spec(f"s{index}", *(f"s{other}" for other in sorted(below))))
    return draw(st.permutations(specs))


@settings(max_examples=50)
@given(acyclic(), st.data())
def test_a_service_comes_after_all_that_it_depends_on_and_stops_before_them(
    specs: list[ServiceSpec], data: st.DataObject
) -> None:
    order = Order(specs)
    assert sorted(order.names) == sorted(each.name for each in specs)
    place = {name: index for index, name in enumerate(order.names)}
    for each in specs:
        assert all(place[other] < place[each.name] for other in each.depends_on)
    for level in order.levels:
        assert not any(other in level for name in level for other in order.depends_on(name))

    up = set(order.names)
    while up:
        up -= data.draw(st.sets(st.sampled_from(order.names)))  # these have ended by themselves
        now = order.may_stop(up)
        assert now or not up, "something may always stop next"
        assert all(up.intersection(order.with_all_above([name])) == {name} for name in now)
        assert len(set(now)) == len(now)
        up -= set(now)


@settings(max_examples=50)
@given(acyclic(), st.data())
def test_an_edge_back_is_a_cycle_that_is_named(specs: list[ServiceSpec], data: st.DataObject) -> None:
    order = Order(specs)
    first = data.draw(st.sampled_from(order.names))
    last = data.draw(st.sampled_from(order.with_all_above([first])))
    if first == last:
        return
    changed = [spec(each.name, *each.depends_on, *([last] if each.name == first else [])) for each in specs]
    with pytest.raises(ConfigError, match="in a cycle") as caught:
        Order(changed)
    cycle = str(caught.value).rpartition(": ")[2].split(" -> ")
    needs = {each.name: each.depends_on for each in changed}
    assert cycle[0] == cycle[-1]
    assert all(after in needs[name] for name, after in itertools.pairwise(cycle))


@given(acyclic(), st.floats(1, 100), st.data())
def test_a_service_is_not_killed_before_what_depends_on_it(
    specs: list[ServiceSpec], cap: float, data: st.DataObject
) -> None:
    order = Order(specs)
    timeouts = {name: data.draw(st.floats(0, 200)) for name in order.names}
    limits = order.stop_limits(timeouts, cap)
    for name, limit in limits.items():
        assert limit >= max(cap, timeouts[name])
        assert all(limits[other] <= limit for other in order.dependents(name))
    if all(timeout <= cap for timeout in timeouts.values()):
        assert set(limits.values()) == {cap}


def test_what_a_slow_service_depends_on_has_its_time_after_it() -> None:
    order = Order([spec("store"), spec("web", "store"), spec("other")])
    assert order.stop_limits({"store": 30, "web": 120, "other": 30}, 30) == {"store": 150, "web": 120, "other": 30}


def test_services_that_depend_on_nothing_keep_the_order_given() -> None:
    order = Order([spec("c"), spec("a"), spec("web", "a", "c"), spec("b")])
    assert order.levels == (("c", "a", "b"), ("web",))
    assert order.with_all_below(["web"]) == ("c", "a", "web")
    assert order.with_all_above(["a"]) == ("a", "web")


@pytest.mark.parametrize(
    ("strategy", "others"),
    [("one_for_one", ()), ("one_for_all", ("a", "c")), ("rest_for_one", ("c",))],
)
def test_strategies(strategy: str, others: tuple[str, ...]) -> None:
    assert Order([spec("a"), spec("b"), spec("c")]).restarted_with("b", Strategy(strategy)) == others


@pytest.mark.parametrize(
    ("specs", "said"),
    [
        ([spec("a"), spec("a")], "'a' stands there twice"),
        ([spec("a", "a")], "'a' depends on itself"),
        ([spec("store"), spec("web", "stor")], "'stor', which is no service here; did you mean 'store'"),
        ([spec("a", "b"), spec("b", "c"), spec("c", "a")], "cycle: "),
    ],
)
def test_what_cannot_be_ordered_is_named(specs: list[ServiceSpec], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Order(specs)


def test_a_long_chain_is_ordered() -> None:
    specs = [spec("s0"), *(spec(f"s{n}", f"s{n - 1}") for n in range(1, 3000))]
    assert Order(specs[::-1]).names[-1] == "s2999"


@given(st.sampled_from(OrchestratorState), st.booleans(), st.booleans(), st.booleans())
def test_the_next_state_is_one_that_the_table_allows(
    present: OrchestratorState, core_started: bool, all_started: bool, all_well: bool
) -> None:
    if present not in {"initializing", "ready", "running", "degraded"}:
        return
    new = next_state(present, core_started=core_started, all_started=all_started, all_well=all_well)
    assert new is present or new in ORCHESTRATOR[present]
