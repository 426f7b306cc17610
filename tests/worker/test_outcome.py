"""What a handler's end means for its message, decided without a loop."""

from __future__ import annotations

import json
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mainspring.errors import (
    ConfigError,
    HandlerTimeoutError,
    InvalidParameterError,
    Reject,
    ReplyError,
    ReplyNotAvailableError,
    Retry,
    TaskExitError,
)
from mainspring.mailbox.history import LAST, crashes_before, read_history, remember, silences, without_oldest
from mainspring.mailbox.message import Ack, Dead, Nack
from mainspring.policies import DeadLetterPolicy, RetryPolicy
from mainspring.worker.outcome import Decision, Outcome, after_failure, as_settled, before_start

PLAIN = RetryPolicy(jitter="none")


def decide(error, *, attempt=1, deliveries=None, retry=PLAIN, **dead_letter):
    return after_failure(
        error,
        attempt=attempt,
        delivery_count=deliveries or attempt,
        retry=retry,
        dead_letter=DeadLetterPolicy(**dead_letter),
        rng=Random(0),
    )


def test_an_error_is_a_charged_return_with_backoff():
    error = ValueError("broken")
    decision = decide(error, attempt=3)
    assert decision.outcome is Outcome.RETRIED
    assert decision.settlement == Nack(delay=6.25, charge=True)
    assert decision.error is error


def test_the_last_attempt_is_the_end():
    assert [decide(ValueError(), attempt=n).outcome for n in (19, 20, 21)] == [
        Outcome.RETRIED,
        Outcome.DEAD_LETTERED,
        Outcome.DEAD_LETTERED,
    ]


def test_a_dead_letter_keeps_error_type_and_traceback():
    try:
        raise KeyError("which one")
    except KeyError as error:
        decision = decide(error, max_attempts=1)
    assert isinstance(decision.settlement, Dead)
    assert decision.settlement.error == "'which one'"
    assert decision.settlement.error_type == "KeyError"
    assert "test_outcome.py" in decision.settlement.traceback


def test_reject_is_the_end_at_once():
    decision = decide(Reject("no such user"), exclude=(Exception,))
    assert decision.outcome is Outcome.DEAD_LETTERED
    assert decision.settlement.error == "no such user"
    assert decision.settlement.error_type == "Reject"


def test_retry_says_its_own_delay_or_leaves_it_to_the_policy():
    assert decide(Retry(delay=7), attempt=3).settlement == Nack(7, True)
    assert decide(Retry(delay=0), attempt=3).settlement == Nack(0, True)
    assert decide(Retry(), attempt=3).settlement == Nack(6.25, True)


def test_a_charged_retry_runs_out_of_attempts():
    assert decide(Retry(delay=7), attempt=20).outcome is Outcome.DEAD_LETTERED


def test_an_uncharged_retry_never_does_and_backs_off_by_the_deliveries_that_were_not_charged():
    decision = decide(Retry(charge=False), attempt=20, deliveries=20)
    assert decision.settlement == Nack(1.0, False)
    assert decision.outcome is Outcome.POSTPONED
    assert decide(Retry(charge=False), attempt=20, deliveries=23).settlement == Nack(15.625, False)
    assert decide(KeyError(), attempt=3, deliveries=5, exclude=(KeyError,)).settlement == Nack(6.25, False)


def test_retry_is_an_instruction_and_no_kind_of_error():
    """``include=(Exception,)`` means errors; and an excluded one that charges would run out of attempts unrun."""
    assert decide(Retry(delay=1), include=(Exception,)).outcome is Outcome.RETRIED
    assert decide(Retry(delay=1), attempt=20, exclude=(Exception,)).outcome is Outcome.DEAD_LETTERED
    assert decide(Retry(delay=1), retry_on=(OSError,)).outcome is Outcome.RETRIED
    assert decide(ValueError(), retry_on=(OSError,)).outcome is Outcome.DEAD_LETTERED


@pytest.mark.parametrize("kind", [ConfigError, InvalidParameterError, ReplyNotAvailableError])
@pytest.mark.parametrize("policy", [{}, {"exclude": (Exception,)}])
def test_a_fault_of_configuration_is_the_end_at_once(kind, policy):
    decision = decide(kind("no transactions here"), **policy)
    assert decision.outcome is Outcome.DEAD_LETTERED
    assert (decision.settlement.error, decision.settlement.error_type) == ("no transactions here", kind.__name__)


@pytest.mark.parametrize("policy", [{}, {"include": (Exception,)}, {"max_attempts": 1}])
def test_a_reply_error_is_an_answer(policy):
    error = ReplyError("not found")
    assert decide(ExceptionGroup("tasks", [error]), **policy) == Decision(Outcome.ACKNOWLEDGED, Ack(), error)


@pytest.mark.parametrize(
    ("settlement", "outcome"),
    [
        (Ack(), "acknowledged"),
        (Nack(), "retried"),
        (Nack(5, charge=False), "postponed"),
        (Nack(charge=False, front=True), "released"),
        (Dead.of("no"), "dead_lettered"),
    ],
)
def test_what_a_handler_settles_itself_has_the_same_names(settlement, outcome):
    assert as_settled(settlement).outcome == outcome


def test_included_errors_die_at_once():
    assert decide(KeyError("x"), include=(LookupError,)).outcome is Outcome.DEAD_LETTERED


@given(st.integers(1, 1_000), st.integers(1, 10))
def test_excluded_errors_are_retried_for_ever_uncharged(uncharged, attempts):
    deliveries = uncharged + attempts - 1
    decision = decide(ConnectionError(), attempt=attempts, deliveries=deliveries, max_attempts=1, exclude=(OSError,))
    assert decision.outcome is Outcome.RETRIED
    assert decision.settlement.charge is False
    assert decision.settlement.delay == PLAIN.delay(uncharged, Random(0))


def test_included_wins_over_excluded():
    decision = decide(ConnectionError(), include=(ConnectionError,), exclude=(OSError,))
    assert decision.outcome is Outcome.DEAD_LETTERED


@given(st.integers(1, 8))
def test_exactly_max_attempts_charged_runs(most):
    """Whatever the error, the runs that count end at ``max_attempts``."""
    attempt = runs = 1
    while decide(ValueError(), attempt=attempt, max_attempts=most).outcome is Outcome.RETRIED:
        attempt += 1
        runs += 1
        assert before_start(attempt, DeadLetterPolicy(max_attempts=most), lambda: None) is None
    assert runs == most


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        (DeadLetterPolicy(), "5 of its deliveries ended with their worker (max_crashes is 5): their leases ran out"),
        (
            DeadLetterPolicy(max_attempts=5, max_crashes=9),
            "5 attempts are used up (max_attempts is 5): the leases ran out",
        ),
    ],
)
def test_attempts_used_up_by_lost_leases_are_the_end_unrun(policy, said):
    assert before_start(5, policy, lambda: silences(None, 5)) is None
    given_up = before_start(6, policy, lambda: silences(None, 6))
    assert given_up.outcome is Outcome.DEAD_LETTERED
    assert given_up.settlement.error_type == "LeaseExpired"
    assert said in given_up.settlement.error
    assert [failure.attempt for failure in read_history(given_up.settlement.history)] == [1, 2, 3, 4, 5]


def test_failures_do_not_use_up_the_crashes():
    history = None
    for attempt in range(1, 20):
        history = remember(history, attempt, "no", "OSError", 0.0)
    assert before_start(20, DeadLetterPolicy(max_crashes=1), lambda: silences(history, 20)) is None
    dead = before_start(21, DeadLetterPolicy(max_attempts=99, max_crashes=1), lambda: silences(history, 21))
    assert dead.settlement.error_type == "LeaseExpired"


ENDS = st.lists(st.sampled_from(["crash", "failure", "uncharged"]), max_size=3 * LAST)


@given(ENDS, st.integers(0, LAST))
def test_crashes_are_counted_however_many_there_were_and_whatever_is_forgotten(ends, dropped):
    """A crash writes nothing; the store knows the number of attempts, and what the last failure left."""
    history, attempt = None, 1
    for end in ends:
        if end == "failure":
            history = remember(history, attempt, "no", "OSError", 0.0)
        attempt += end != "uncharged"
    for _ in range(dropped):  # as a store does that has no room for it
        history = None if history is None else without_oldest(history) or history
    assert crashes_before(history, attempt) == ends.count("crash")
    assert crashes_before(silences(history, attempt), attempt) == ends.count("crash")
    assert len(read_history(history)) <= LAST


@pytest.mark.parametrize(
    "text", ["", "5", "{}", '{"before": 3, "failures": []}', '{"before": [1], "failures": [3]}', "[[]]"]
)
def test_what_is_no_history_tells_of_no_failure(text):
    assert read_history(text) == ()


def test_a_history_as_it_was_written_before_is_read():
    """As a list only: what had been forgotten by then is not taken for crashes."""
    rows = [[number, "no", "OSError", 1.0] for number in range(4, 14)]
    assert crashes_before(json.dumps(rows), 14) == 0
    rows[3] = [7, "its lease ran out", "LeaseExpired", None]
    assert crashes_before(json.dumps(rows), 15) == 2
    assert [failure.attempt for failure in read_history(json.dumps(rows))] == list(range(4, 14))


def test_attempts_used_up_otherwise_say_what_the_last_one_came_to():
    history = silences(remember(None, 2, "the disk is full", "OSError", 0.0), 3)
    dead = before_start(3, DeadLetterPolicy(max_attempts=2), lambda: history).settlement
    assert (dead.error_type, dead.error) == (
        "OSError",
        "2 attempts are used up (max_attempts is 2), the last one by: the disk is full",
    )


def test_where_nothing_is_remembered_no_more_is_said_than_is_known():
    dead = before_start(3, DeadLetterPolicy(max_attempts=2), lambda: None).settlement
    assert dead.error_type == "AttemptsUsedUp"
    assert "leases ran out, or it was given back" in dead.error
    assert dead.history is None


def test_a_lone_error_of_a_group_means_what_it_is():
    """A handler with a task group of its own raises groups; a Reject inside is a Reject."""
    assert decide(ExceptionGroup("tasks", [Reject("bad")])).outcome is Outcome.DEAD_LETTERED
    nested = ExceptionGroup("tasks", [ExceptionGroup("inner", [Retry(delay=9, charge=False)])])
    assert decide(nested).settlement == Nack(9, False)
    assert decide(ExceptionGroup("tasks", [KeyError("x")]), include=(LookupError,)).outcome is Outcome.DEAD_LETTERED
    both = decide(ExceptionGroup("tasks", [Reject("bad"), ValueError()]))
    assert both.outcome is Outcome.RETRIED
    assert isinstance(both.error, ExceptionGroup)


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("cannot say")


def test_an_error_that_cannot_be_printed_still_ends_a_message():
    decision = decide(Unprintable(), max_attempts=1)
    assert decision.outcome is Outcome.DEAD_LETTERED
    assert decision.settlement.error_type == "Unprintable"
    assert "Unprintable" in decision.settlement.error


@pytest.mark.parametrize("error", [HandlerTimeoutError("slow"), TaskExitError("exit")])
def test_timeouts_and_exits_are_failures_like_any_other(error):
    assert decide(error).settlement == Nack(1.0, True)
