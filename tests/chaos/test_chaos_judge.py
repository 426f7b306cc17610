"""The judgement of a chaotic run finds what is planted in its history, and nothing in a history without a fault."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from chaos_judge import UNOPENED, History, Life, Run, Trouble, judge

LEASE = 2.0


def done(message, begun, *, receipt="", process="worker-1-0", **known):
    """A run that did its work and was acknowledged."""
    facts = {
        "leased": begun - 0.01,
        "effect": begun + 0.1,
        "ended": begun + 0.11,
        "how": "done",
        "settled": begun + 0.12,
        "outcome": "acknowledged",
    }
    return Run(message, receipt or f"{message}@{begun}", process, begun, **{**facts, **known})


def cut_short(message, begun, **known):
    """One that did not come to its end."""
    return done(
        message, begun, **{"effect": None, "ended": None, "how": None, "settled": None, "outcome": None, **known}
    )


def life(name="worker-1-0", **known):
    facts = {"started": 0.0, "ready": 0.5, "terminated": 100.0, "ended": 101.0, "status": 0}
    return Life(name, **{**facts, **known})


def history(*runs, lives=(), **known):
    """Of these runs: all accepted, two workers, and nothing else that happened."""
    there = {each.name: each for each in (life(), life("worker-1-1"), *lives)}
    accepted = {run.message: run.begun for run in runs}
    return History("a store", LEASE, 7.0, accepted=accepted, runs=list(runs), lives=list(there.values()), **known)


def killed(at=10.0):
    return life(killed=at, terminated=None, ended=at, status=-9)


def broken(told):
    return [line.partition(":")[0] for line in judge(told).broken]


def test_a_run_without_a_fault_breaks_nothing():
    verdict = judge(history(done("a", 1.0), done("b", 3.5)))
    assert verdict.broken == []
    assert (verdict.lost, verdict.twice, verdict.again.total(), verdict.doubled) == (0, None, 0, 0)
    assert verdict.gap == pytest.approx(2.5)


# ------------------------------------------------------------------------------------------------------------- nothing lost


def test_an_accepted_message_that_is_nowhere_is_lost():
    told = history(done("a", 1.0))
    told.accepted["b"] = 1.0
    verdict = judge(told)
    assert verdict.lost == 1
    assert verdict.broken == ["lost: 1 accepted messages were neither done nor dead: b"]


def test_a_message_that_was_begun_and_not_done_is_lost():
    told = history(cut_short("a", 1.0), lives=[killed(1.05)])
    assert judge(told).lost == 1


def test_a_rejected_message_belongs_to_the_dead_letters():
    rejection = cut_short("a", 1.0, ended=1.0, how="failed: Reject", settled=1.1, outcome="dead_lettered")
    told = history(rejection, rejected={"a"}, dead={"a"})
    assert judge(told).broken == []
    told.dead.clear()
    assert judge(told).lost == 1
    told.dead = {"a"}
    told.rejected.clear()
    assert judge(told).broken == ["1 messages are dead that nobody rejected: a"]


def test_what_still_waits_at_the_end_is_told():
    assert broken(history(done("a", 1.0), left=1)) == ["left"]


# ------------------------------------------------------------------------------------------------------------- effects once


def test_an_effect_that_was_committed_twice_is_found():
    told = history(done("a", 1.0, committed=True), done("b", 1.0, committed=True), effects=Counter(a=2, b=1))
    verdict = judge(told)
    assert verdict.twice == 1
    assert broken(told) == ["twice"]


def test_an_effect_whose_commit_was_told_and_that_is_not_there_is_found():
    told = history(done("a", 1.0, committed=True), effects=Counter())
    assert judge(told).lost == 1
    assert "1 effects were committed and are not there" in broken(told)


def test_an_effect_without_a_transaction_needs_no_row():
    verdict = judge(history(done("a", 1.0), done("b", 1.0, committed=True), effects=Counter(b=1)))
    assert (verdict.broken, verdict.lost, verdict.twice) == ([], 0, 0)


def test_an_effect_that_was_committed_unheard_counts():
    """The connection broke at the commit: the handler failed, and the message is gone."""
    lost = cut_short("a", 1.0, ended=1.1, how="failed: MailboxConnectionError", settled=1.2, outcome="lost")
    assert judge(history(lost, effects=Counter(a=1))).broken == []


# --------------------------------------------------------------------------------------------------- runs that came again


def test_a_duplicate_without_a_reason_is_found():
    first = done("a", 1.0, settled=None, outcome=None)
    told = history(first, done("a", 10.0))
    verdict = judge(told)
    assert verdict.again == Counter({"unexplained": 1})
    assert verdict.doubled == 1
    assert broken(told) == ["message a ran again"]


def test_a_killed_worker_explains_it_once_its_lease_has_ended():
    first = done("a", 1.0, settled=None, outcome=None)
    told = history(first, done("a", 3.0, process="worker-1-1"), lives=[killed(1.15)])
    verdict = judge(told)
    assert verdict.broken == []
    assert verdict.again == Counter({"its worker was killed": 1})
    assert verdict.doubled == 1


def test_nobody_else_may_hold_it_before_that():
    first = done("a", 1.0, settled=None, outcome=None)
    told = history(first, done("a", 2.0, process="worker-1-1"), lives=[killed(1.15)])
    assert judge(told).again == Counter({"two held it at once": 1})
    assert len(judge(told).broken) == 1


def test_what_a_killed_worker_was_handing_back_may_come_at_once():
    first = cut_short("a", 1.0, ended=1.1, how="failed: ValueError")
    assert judge(history(first, done("a", 1.2), lives=[killed(1.15)])).broken == []
    assert judge(history(first, done("a", 1.2))).again == Counter({"two held it at once": 1})


@pytest.mark.parametrize(
    ("trouble", "why"),
    [
        (Trouble("server", 1.5, 2.0), "the server was away"),
        (Trouble("cut", 1.5, 1.5), "its worker was cut off"),
        (Trouble("stall", 0.5, 1.2), "its worker was cut off"),
    ],
)
def test_a_trouble_explains_a_lost_lease(trouble, why):
    first = done("a", 1.0, settled=4.0, outcome="lost")
    verdict = judge(history(first, done("a", 3.0, process="worker-1-1"), troubles=[trouble]))
    assert verdict.again == Counter({why: 1})
    assert verdict.broken == []


def test_a_trouble_at_another_time_does_not():
    first = done("a", 1.0, settled=1.2, outcome="lost")
    told = history(first, done("a", 3.0), troubles=[Trouble("cut", 1.5, 1.5)])
    assert judge(told).again == Counter({"unexplained": 1})


def test_a_frozen_worker_explains_a_lost_lease():
    first = done("a", 1.0, settled=5.0, outcome="lost")
    frozen = life(freezes=[(1.05, 4.5)])
    verdict = judge(history(first, done("a", 3.0, process="worker-1-1"), lives=[frozen]))
    assert verdict.again == Counter({"its worker was frozen": 1})
    assert verdict.broken == []


def test_a_slow_worker_explains_it_where_its_lease_had_ended_before_it_settled():
    first = done("a", 1.0, settled=4.0, outcome="lost")
    verdict = judge(history(first, done("a", 3.0, process="worker-1-1")))
    assert verdict.again == Counter({"its lease had ended before its settlement": 1})
    assert verdict.broken == []


@pytest.mark.parametrize("outcome", ["acknowledged", "dead_lettered"])
def test_what_was_settled_does_not_come_again(outcome):
    told = history(done("a", 1.0, outcome=outcome), done("a", 10.0))
    assert judge(told).again == Counter({f"it was {outcome}": 1})
    assert broken(told) == ["message a ran again"]


def test_a_server_that_forgets_explains_it_where_it_was_killed_in_time():
    runs = done("a", 1.0), done("a", 10.0)
    kill = Trouble("server", 2.0, 3.0)
    assert judge(history(*runs, troubles=[kill])).broken
    forgetful = history(*runs, troubles=[kill], forgets=True)
    assert judge(forgetful).again == Counter({"the server forgot": 1})
    assert judge(forgetful).broken == []
    for elsewhere in (
        replace(kill, since=11.0, until=12.0),
        replace(kill, kind="cut"),
        replace(kill, since=0.1, until=0.2),
    ):
        assert judge(history(*runs, troubles=[elsewhere], forgets=True)).broken
    much_later = history(done("a", 1.0), done("a", 300.0), troubles=[Trouble("server", 200.0, 201.0)], forgets=True)
    assert judge(much_later).broken


def test_a_server_can_also_forget_that_a_message_was_moved_before_its_first_run():
    told = history(done("a", 1.0), done("a", 10.0), troubles=[Trouble("server", 0.3, 0.5)], forgets=True)
    assert judge(told).broken
    told.accepted["a"] = 0.2
    assert judge(told).broken == []


def test_where_handing_back_takes_two_steps_a_copy_can_be_left():
    left = cut_short("a", 1.0, ended=1.1, how="failed: ValueError")
    runs = left, done("a", 3.2, process="worker-1-1"), done("a", 4.0, process="worker-1-1")
    assert len(judge(history(*runs, lives=[killed(1.15)])).broken) == 1
    verdict = judge(history(*runs, lives=[killed(1.15)], two_steps=True))
    assert verdict.broken == []
    assert verdict.again == Counter({"its worker was killed": 1, "a copy was left as it was handed back": 1})


def test_what_failed_or_was_handed_back_comes_again():
    failed = cut_short("a", 1.0, ended=1.1, how="failed: ValueError", settled=1.2, outcome="retried")
    released = cut_short("b", 1.0, ended=1.1, how="cancelled", settled=1.2, outcome="released")
    verdict = judge(history(failed, released, done("a", 1.3), done("b", 1.3)))
    assert verdict.again == Counter({"its handler failed": 1, "released at a shutdown": 1})
    assert verdict.broken == []


def test_what_was_done_is_not_handed_back():
    told = history(done("a", 1.0, outcome="released"), done("a", 1.3))
    assert broken(told) == ["message a ran again"]


# ------------------------------------------------------------------------------------------------------------- every end


def test_a_shutdown_past_its_budget_is_found():
    assert judge(history(lives=[life(ended=116.9)])).broken == []
    assert broken(history(lives=[life(ended=117.1)])) == [
        "worker-1-0 took 17.1 s to end after SIGTERM; its budget is 7 s"
    ]


def test_a_process_that_does_not_end_is_found():
    assert broken(history(lives=[life(ended=None, status=None)])) == ["worker-1-0 has not ended"]


@pytest.mark.parametrize("status", [1, -9, -11])
def test_a_process_that_ends_by_itself_is_found(status):
    (line,) = judge(history(lives=[life(terminated=None, ended=50.0, status=status)])).broken
    assert line.startswith(f"worker-1-0 ended with status {status}, for which there was no reason")


def test_a_worker_may_end_that_cannot_open_its_mailbox_while_the_server_is_away():
    unopened = life(terminated=None, ready=None, ended=5.0, status=UNOPENED)
    away = Trouble("server", 4.0, 6.0)
    assert judge(history(lives=[unopened], troubles=[away])).broken == []
    assert len(judge(history(lives=[unopened])).broken) == 1
    assert len(judge(history(lives=[replace(unopened, status=1)], troubles=[away])).broken) == 1


def test_a_worker_that_does_not_handle_signals_yet_ends_by_one():
    early = life(ready=None, status=-15)
    assert judge(history(lives=[early])).broken == []
    assert len(judge(history(lives=[replace(early, ready=1.0)])).broken) == 1
    assert len(judge(history(lives=[replace(early, terminated=None)])).broken) == 1


def test_what_hangs_is_found():
    assert judge(history(hung=["nothing was done for 90 s"])).broken == ["hung: nothing was done for 90 s"]


# ----------------------------------------------------------------------------------------------------------- claimed ahead


def test_runs_that_began_with_more_than_twice_the_handlers_in_hand_are_counted():
    told = history(done("a", 1.0, hand=3), done("b", 1.1, hand=2), done("c", 1.2, hand=9), must_claim_ahead=True)
    told.lives = [life(handlers=1), life("worker-1-1")]
    verdict = judge(told)
    assert (verdict.broken, verdict.ahead, verdict.most_ahead) == ([], 2, 9)


def test_a_run_in_which_no_loop_claimed_ahead_has_not_tried_it():
    told = history(done("a", 1.0, hand=32), lives=[life(handlers=16)], must_claim_ahead=True)
    assert broken(told) == ["no loop claimed ahead"]
    told.must_claim_ahead = False
    assert broken(told) == []
