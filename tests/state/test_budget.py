"""``Budget`` and ``BudgetTracker``: exact sums over retries and restarts, and errors that say which limit and by how much."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import threading
import warnings
from dataclasses import FrozenInstanceError, replace
from datetime import UTC, datetime
from decimal import Decimal, localcontext

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mainspring import (
    Budget,
    BudgetExceededError,
    BudgetTracker,
    Context,
    DeadLetterPolicy,
    Deadline,
    InMemoryMailbox,
    InvalidParameterError,
    LoopGroup,
    MainLoop,
    UnknownVersionError,
)
from mainspring.state.budget import Usage


def test_a_budget_is_a_value():
    budget = Budget(max_total_tokens=5, max_cost=0.1)
    assert budget == Budget(None, 5, None, None, Decimal("0.1"))
    assert hash(budget) == hash(Budget(max_total_tokens=5, max_cost=Decimal("0.1")))
    with pytest.raises(FrozenInstanceError):
        budget.max_cost = None
    assert replace(budget, max_total_tokens=6).max_total_tokens == 6
    assert "max_cost=Decimal('0.1')" in repr(budget)
    at = datetime(2030, 1, 1, tzinfo=UTC)
    assert Budget(deadline=at).deadline == Deadline(at)


@pytest.mark.parametrize("name", ["max_total_tokens", "max_input_tokens", "max_output_tokens"])
@pytest.mark.parametrize("value", [-1, 1.5, "3", True, math.inf])
def test_token_limits_are_whole_numbers(name, value):
    with pytest.raises(InvalidParameterError, match=f"Budget: {name} must be a whole number from 0, or None"):
        Budget(**{name: value})


@pytest.mark.parametrize("value", [-1, math.nan, math.inf, "3", True, Decimal("-0.1"), Decimal("NaN"), Decimal("sNaN")])
def test_a_cost_is_a_number(value):
    with pytest.raises(InvalidParameterError, match="Budget: max_cost must be a number from 0"):
        Budget(max_cost=value)
    with pytest.raises(InvalidParameterError, match="add: cost must be a number from 0"):
        BudgetTracker(Budget()).add(cost=value)


def test_a_naive_deadline_is_refused():
    with pytest.raises(InvalidParameterError, match="a deadline must be an aware datetime"):
        Budget(deadline=datetime(2030, 1, 1))
    with pytest.raises(InvalidParameterError, match="deadline must be a Deadline or an aware datetime, not 5"):
        Budget(deadline=5)


@pytest.mark.parametrize(
    ("budget", "usage", "limit", "over", "text"),
    [
        (Budget(max_input_tokens=9), {"input_tokens": 10}, "max_input_tokens", 1, "allows 9, and 10 were used, 1 more"),
        (
            Budget(max_output_tokens=0),
            {"output_tokens": 5},
            "max_output_tokens",
            5,
            "allows 0, and 5 were used, 5 more",
        ),
        (Budget(max_total_tokens=7), {"input_tokens": 5, "output_tokens": 4}, "max_total_tokens", 2, "and 9 were used"),
        (Budget(max_total_tokens=7), {"total_tokens": 5_000}, "max_total_tokens", 4993, "5,000 were used, 4,993 more"),
        (
            Budget(max_cost=0.3),
            {"cost": 0.31},
            "max_cost",
            Decimal("0.01"),
            "allows 0.3, and 0.31 were used, 0.01 more",
        ),
    ],
)
def test_it_says_which_limit_and_by_how_much(budget, usage, limit, over, text):
    tracker = BudgetTracker(budget)
    with pytest.raises(BudgetExceededError, match=text) as caught:
        tracker.add(**usage)
    assert (caught.value.limit, caught.value.over) == (limit, over)
    assert caught.value.used - caught.value.allowed == over
    with pytest.raises(BudgetExceededError):  # it was used, and is counted
        tracker.check()
    assert tracker.remaining()[limit] == 0


def test_what_is_at_its_limit_is_within_it():
    tracker = BudgetTracker(Budget(max_total_tokens=10, max_cost=1))
    tracker.add(input_tokens=4, output_tokens=6, cost=1)
    tracker.check()
    assert tracker.remaining() == {"max_total_tokens": 0, "max_cost": 0}


@pytest.mark.anyio
async def test_its_deadline(virtual_clock):
    tracker = BudgetTracker(Budget(deadline=Deadline.after(10), max_cost=5))
    await anyio.sleep(4)
    tracker.check()
    assert tracker.remaining() == {"deadline": 6, "max_cost": 5}
    await anyio.sleep(8.5)
    with pytest.raises(BudgetExceededError, match=r"its deadline .* passed 2\.500 s ago") as caught:
        tracker.check()
    assert (caught.value.limit, caught.value.over) == ("deadline", 2.5)
    with pytest.raises(BudgetExceededError, match="its deadline"):
        tracker.add(input_tokens=1)


def test_ten_tenths_are_one():
    tracker = BudgetTracker(Budget(max_cost=1))
    for _ in range(10):
        tracker.add(cost=0.1)
    assert tracker.used.cost == 1
    with pytest.raises(BudgetExceededError, match=r"1E-18 more|0\.000000000000000001 more"):
        tracker.add(cost=Decimal("1e-18"))


def test_the_callers_decimal_context_does_not_round_it():
    tracker = BudgetTracker(Budget())
    with localcontext() as context:
        context.prec = 2
        tracker.add(cost=Decimal("123.456"))
        tracker.add(cost=Decimal("0.001"))
    assert tracker.used.cost == Decimal("123.457")


@pytest.mark.parametrize(
    "usage",
    [
        {"input_tokens": -1},
        {"output_tokens": 1.0},
        {"total_tokens": "3"},
        {"input_tokens": True},
        {"input_tokens": None},
        {"input_tokens": "5"},
        {"output_tokens": []},
    ],
)
def test_bad_figures_count_nothing(usage):
    tracker = BudgetTracker(Budget())
    with pytest.raises(InvalidParameterError, match=r"add: .*must be a whole number from 0"):
        tracker.add(**usage)
    assert tracker.used == Usage()


@given(
    st.lists(
        st.tuples(
            st.integers(0, 10**6),
            st.integers(0, 10**6),
            st.decimals(0, 1000, places=6) | st.integers(0, 1000),
            st.booleans(),
        )
    )
)
def test_sums_are_those_of_all_calls_however_often_it_was_restored(calls):
    tracker = BudgetTracker(Budget())
    for given_tokens, output, cost, restart in calls:
        tracker.add(input_tokens=given_tokens, output_tokens=output, cost=cost)
        if restart:
            tracker = BudgetTracker(Budget(), json.loads(json.dumps(tracker.state)))
    assert tracker.used.input_tokens == sum(call[0] for call in calls)
    assert tracker.used.total_tokens == sum(call[0] + call[1] for call in calls)
    assert tracker.used.cost == sum((Decimal(call[2]) for call in calls), Decimal(0))


def test_many_threads_lose_nothing():
    tracker = BudgetTracker(Budget())

    def spend():
        for _ in range(2_000):
            tracker.add(input_tokens=1, cost=0.1)

    threads = [threading.Thread(target=spend) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tracker.used == Usage(8_000, 0, 8_000, Decimal(800))


@pytest.mark.slow
def test_a_child_that_is_forked_while_a_thread_adds_can_add():
    tracker, ended = BudgetTracker(Budget()), threading.Event()

    def spend():
        while not ended.is_set():
            tracker.add(input_tokens=1)

    threads = [threading.Thread(target=spend) for _ in range(3)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads
            for _ in range(30):
                child = os.fork()
                if not child:
                    signal.alarm(10)  # it would hang
                    before = tracker.used.input_tokens
                    os._exit(tracker.add(input_tokens=5).input_tokens != before + 5)
                assert os.waitpid(child, 0)[1] == 0
    finally:
        ended.set()
        sys.setswitchinterval(interval)
        for thread in threads:
            thread.join()


GOOD = {"version": 1, "input_tokens": 1, "output_tokens": 2, "total_tokens": 3, "cost": "0.5"}


@pytest.mark.parametrize(
    "state",
    [{}, [], "x", 3, {**GOOD, "version": 0}, {**GOOD, "cost": "x"}, {**GOOD, "cost": "-1"}, {**GOOD, "cost": "NaN"}]
    + [{**GOOD, "input_tokens": value} for value in (-1, None, "1", True)]
    + [{key: value for key, value in GOOD.items() if key != left} for left in GOOD],
)
def test_what_is_no_state(state):
    with pytest.raises(InvalidParameterError, match="this is no state of a tracker"):
        BudgetTracker(Budget(), state)


def test_a_state_of_a_newer_version():
    assert BudgetTracker(Budget(), GOOD).used == Usage(1, 2, 3, Decimal("0.5"))
    with pytest.raises(UnknownVersionError, match="the state is of version 2, and this release knows 1"):
        BudgetTracker(Budget(), {**GOOD, "version": 2})
    with pytest.raises(InvalidParameterError, match="a Budget is needed, not None"):
        BudgetTracker(None)


@pytest.mark.anyio
async def test_it_counts_on_over_the_attempts_of_a_message(virtual_clock):
    seen = []

    async def handle(job: str, ctx: Context) -> None:
        tracker = BudgetTracker(Budget(max_total_tokens=25), (ctx.restored or {}).get("budget"))
        try:
            tracker.add(input_tokens=10)
        finally:
            seen.append(tracker.used.total_tokens)
            await ctx.checkpoint({"budget": tracker.state})
        raise ConnectionError

    async with InMemoryMailbox("jobs", body=str) as jobs:
        await jobs.send("x")
        await LoopGroup([MainLoop(jobs, handle, dead_letter=DeadLetterPolicy(max_attempts=5))]).run(
            install_signals=False, until_empty=True
        )
        (letter,) = await jobs.dead_letters()
    assert seen == [10, 20, 30, 40, 50]
    assert letter.error_type == "BudgetExceededError"
    assert [failure.error_type for failure in letter.history[:2]] == ["ConnectionError", "ConnectionError"]
