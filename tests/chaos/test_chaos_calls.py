"""The judgement of schedules and limits finds what is planted in a history, and nothing in a history without a fault."""

from __future__ import annotations

from dataclasses import replace

import pytest
from chaos_calls import Call, Due, Tick
from chaos_judge import History, Life, Run, judge
from chaos_plan import CONCURRENCY, KEY_CONCURRENCY, MOST_IN_FLIGHT, Limited

from mainspring import Rate

LEASE = 2.0
RATE = Rate(100, 1, burst=5)


def run(message, begun, *, lasts=0.1, process="worker-1-0", **known):
    """A run that did its work and was acknowledged."""
    ended = begun + lasts
    facts = {"leased": begun - 0.01, "effect": ended, "ended": ended, "how": "done", "settled": ended + 0.01}
    return Run(message, f"{message}@{begun}", process, begun, **{**facts, "outcome": "acknowledged", **known})


def broken(*runs, lives=(), **known):
    there = {
        name: Life(name, 0.0, 0.5, terminated=100.0, ended=101.0, status=0) for name in ("worker-1-0", "worker-1-1")
    }
    there |= {life.name: life for life in lives}
    told = History("a store", LEASE, 7.0, runs=list(runs), lives=list(there.values()), **{"rate": RATE, **known})
    return [line.partition(":")[0] for line in judge(told).broken]


# ------------------------------------------------------------------------------------------------------------- schedules


def ticked(*times, name="s", **known):
    return [run(f"{name}@{at}", at, tick=Tick(name, at), **known) for at in times]


DUE = {"s": Due(10.5, 2, 16.5)}


def test_ticks_that_all_have_one_call_break_nothing():
    assert broken(*ticked(10.5, 12.5, 14.5), due=DUE) == []


def test_a_tick_that_was_sent_late_breaks_nothing():
    late = replace(ticked(12.5)[0], begun=90.0, leased=89.9, effect=90.1, ended=90.1, settled=90.2)
    assert broken(late, *ticked(10.5, 14.5), due=DUE) == []


def test_a_tick_whose_call_ran_twice_has_one_call():
    again = run("s@12.5", 20.0, tick=Tick("s", 12.5))
    killed = Life("worker-1-1", 0.0, 0.5, killed=12.55, ended=12.55, status=-9)
    first = replace(
        ticked(12.5)[0], process="worker-1-1", effect=None, ended=None, how=None, settled=None, outcome=None
    )
    assert broken(first, again, *ticked(10.5, 14.5), lives=[killed], due=DUE) == []


def test_a_tick_without_a_call_is_found():
    assert broken(*ticked(10.5, 14.5), due=DUE) == ["ticks lost"]
    assert broken(*ticked(10.5, 12.5), due=DUE) == ["ticks lost"]


def test_a_tick_whose_call_was_not_done_is_found():
    failed = ticked(12.5, effect=None, how="failed: ValueError", outcome="retried")
    assert broken(*ticked(10.5, 14.5), *failed, due=DUE) == ["ticks undone"]


def test_a_tick_with_two_calls_is_found():
    twice = run("another", 12.6, tick=Tick("s", 12.5))
    assert broken(*ticked(10.5, 12.5, 14.5), twice, due=DUE) == ["ticks doubled"]


def test_a_tick_from_before_it_was_looked_at_breaks_nothing_unless_it_has_two_calls():
    early, other = ticked(8.5), run("another", 8.6, tick=Tick("s", 8.5))
    assert broken(*early, *ticked(10.5, 12.5, 14.5), due=DUE) == []
    assert broken(*early, other, *ticked(10.5, 12.5, 14.5), due=DUE) == ["ticks doubled"]


def test_a_run_that_was_called_off_says_nothing_of_ticks_that_were_due():
    assert broken(*ticked(10.5, 12.5), due={"s": Due(10.5, 2)}) == []


@pytest.mark.parametrize("tick", [("s", 13.0), ("s", 16.5), ("t", 12.5)])
def test_a_call_of_a_tick_that_was_not_due_is_found(tick):
    other = run("other", 12.6, tick=Tick(*tick))
    assert broken(*ticked(10.5, 12.5, 14.5), other, due=DUE) == ["ticks undue"]


# ---------------------------------------------------------------------------------------------------------------- limits


def calls(task, count, *, apart=0.0, keys=1, since=10.0, **known):
    """As many calls, whose keys take turns."""
    return [
        run(f"{task} {number}", since + number * apart, call=Call(task, f"k{number % keys}", number), **known)
        for number in range(count)
    ]


LIMITS = [
    (Limited.TASK, CONCURRENCY, 1),
    (Limited.KEYS, KEY_CONCURRENCY, 1),
    (Limited.KEYS, MOST_IN_FLIGHT, MOST_IN_FLIGHT),
    (Limited.ORDER, 1, 1),
]


@pytest.mark.parametrize(("task", "most", "keys"), LIMITS)
def test_one_call_more_at_once_than_the_limit_is_found(task, most, keys):
    assert broken(*calls(task, most, keys=keys)) == []
    assert broken(*calls(task, most + 1, keys=keys + (keys > 1))) == ["limit"]
    assert broken(*calls(task, most + 1, keys=keys), rate=None) == []


def test_ticks_count_for_the_limit_of_the_mailbox():
    due = {"s": Due(10.0, 1, 11.0)}
    keyed = calls(Limited.KEYS, MOST_IN_FLIGHT, keys=MOST_IN_FLIGHT)
    assert broken(*keyed, *ticked(10.0), due=due) == ["limit"]
    assert broken(*keyed[1:], *ticked(10.0), due=due) == []


def test_a_call_counts_until_its_handler_ends():
    assert broken(*calls(Limited.ORDER, 9, apart=0.1, lasts=0.1)) == []
    assert broken(*calls(Limited.ORDER, 2, apart=0.1, lasts=0.11)) == ["limit"]


def test_a_call_in_a_transaction_counts_until_that_may_be_committed():
    first, second = calls(Limited.ORDER, 2, apart=0.1, lasts=0.11)
    assert broken(replace(first, committing=10.1), second) == []
    assert broken(replace(first, committing=10.101), second) == ["limit"]
    cut_short = {"effect": None, "ended": None, "how": None, "settled": None, "outcome": None, "process": "worker-1-1"}
    killed = Life("worker-1-1", 0.0, 0.5, killed=10.2, ended=10.2, status=-9)
    assert broken(replace(first, committing=10.1, **cut_short), second, lives=[killed]) == []


def test_a_call_of_a_killed_worker_counts_until_its_lease_ends():
    first, second = calls(Limited.ORDER, 2, apart=1.5)
    first = replace(first, process="worker-1-1", effect=None, ended=None, how=None, settled=None, outcome=None)
    again = run(first.message, 12.1, call=first.call)
    killed = Life("worker-1-1", 0.0, 0.5, killed=10.05, ended=10.05, status=-9)
    assert "limit" in broken(first, second, again, lives=[killed])
    later = replace(second, begun=12.5, leased=12.4, effect=12.6, ended=12.6, settled=12.7)
    assert broken(first, later, again, lives=[killed]) == []


def test_a_worker_that_was_frozen_holds_nothing_once_its_lease_has_ended():
    frozen = Life("worker-1-1", 0.0, 0.5, terminated=100.0, ended=101.0, status=0, freezes=[(10.05, 14.0)])
    first = run("a", 10.0, process="worker-1-1", lasts=5.0, outcome="lost", call=Call(Limited.ORDER, "k", 1))
    again = run("a", 12.5, call=first.call)
    assert broken(first, again, run("b", 13.0, call=Call(Limited.ORDER, "k", 2)), lives=[frozen]) == []


def test_a_key_out_of_order_is_found():
    one, two, three = calls(Limited.ORDER, 3, apart=1.0)
    assert broken(one, two, three) == []
    assert broken(replace(two, call=three.call), one, replace(three, call=two.call)) == ["order"]
    assert broken(one, replace(two, call=three.call, process="worker-1-1"), replace(three, call=two.call)) == ["order"]


def test_a_retry_that_a_later_call_has_passed_is_found():
    one, two = calls(Limited.ORDER, 2, apart=1.0)
    failed = replace(one, effect=None, how="failed: ValueError", outcome="retried")
    again = run(one.message, 12.0, call=one.call)
    assert broken(failed, two, again) == ["order"]
    assert broken(failed, replace(again, begun=10.5, leased=10.4, ended=10.6, effect=10.6, settled=10.7), two) == []


def test_keys_of_other_tasks_have_no_order():
    one, two = calls(Limited.KEYS, 2, apart=1.0)
    assert broken(replace(one, call=two.call), replace(two, call=one.call)) == []


def test_a_rate_that_is_kept_breaks_nothing():
    assert broken(*calls(Limited.RATE, 400, apart=RATE.interval, lasts=0.001)) == []
    burst = calls(Limited.RATE, RATE.burst, lasts=0.001)
    assert broken(*burst) == []


def test_claims_that_are_more_than_the_rate_lets_begin_are_found():
    assert broken(*calls(Limited.RATE, 400, apart=RATE.interval * 0.8, lasts=0.001)) == ["rate"]
    assert broken(*calls(Limited.RATE, RATE.burst + 12, apart=1e-4, lasts=1e-5)) == ["rate"]


def test_claims_whose_answer_was_late_may_begin_together():
    late = [replace(each, begun=14.0, ended=14.001, leased=each.begun) for each in calls(Limited.RATE, 8, apart=0.2)]
    assert broken(*late) == []
