"""What the judgement is told, from the lines of a worker's journal."""

from __future__ import annotations

import pytest
from chaos_history import Progress, given_back, runs_of
from chaos_journal import Journal, Reader
from chaos_judge import Life


def begun(at, run, receipt="r", message="a"):
    return {
        "what": "begun",
        "at": at,
        "run": run,
        "id": message,
        "receipt": receipt,
        "delivery": 1,
        "leased": at - 0.1,
        "hand": 3,
    }


def test_a_run_is_put_together():
    lines = [
        begun(1.0, 1),
        {"what": "committing", "at": 1.5, "run": 1},
        {"what": "effect", "at": 2.0, "run": 1, "committed": True},
        {"what": "ended", "at": 3.0, "run": 1, "how": "done"},
        {"what": "outcome", "at": 4.0, "id": "a", "receipt": "r", "outcome": "acknowledged"},
    ]
    (run,) = runs_of("worker", lines)
    assert (run.message, run.receipt, run.process) == ("a", "r", "worker")
    assert (run.leased, run.begun, run.committing, run.effect) == (0.9, 1.0, 1.5, 2.0)
    assert (run.ended, run.settled) == (3.0, 4.0)
    assert (run.how, run.outcome, run.hand, run.committed) == ("done", "acknowledged", 3, True)
    (cut_short,) = runs_of("worker", lines[:3])
    assert (cut_short.ended, cut_short.how, cut_short.settled, cut_short.outcome) == (None, None, None, None)


def test_a_run_says_what_it_was_a_call_of():
    call = {**begun(1.0, 1), "task": "ordered", "key": "k", "number": 7}
    tick = {**begun(2.0, 2), "schedule": "s", "tick": 1_000.5}
    first, second = runs_of("worker", [call, tick, {"what": "ticked", "at": 2.5, "run": 2}])
    assert (first.call, first.tick) == (("ordered", "k", 7), None)
    assert (second.call, second.tick, second.effect) == (None, ("s", 1_000.5), 2.5)


def test_two_runs_with_one_receipt_are_two():
    lines = [
        begun(1.0, 1),
        begun(2.0, 2),
        {"what": "ended", "at": 3.0, "run": 2, "how": "done"},
        {"what": "outcome", "at": 4.0, "id": "a", "receipt": "r", "outcome": "acknowledged"},
        {"what": "ended", "at": 5.0, "run": 1, "how": "done"},
        {"what": "outcome", "at": 6.0, "id": "a", "receipt": "r", "outcome": "lost"},
    ]
    first, second = runs_of("worker", lines)
    assert (first.outcome, second.outcome) == ("lost", "acknowledged")


def test_deliveries_of_two_mailboxes_with_one_receipt_are_told_apart():
    lines = [
        begun(1.0, 1, receipt="8", message="a"),
        begun(2.0, 2, receipt="8", message="b"),
        {"what": "ended", "at": 3.0, "run": 2, "how": "failed"},
        {"what": "ended", "at": 4.0, "run": 1, "how": "done"},
        {"what": "outcome", "at": 5.0, "id": "b", "receipt": "8", "outcome": "retried"},
        {"what": "outcome", "at": 6.0, "id": "a", "receipt": "8", "outcome": "acknowledged"},
    ]
    first, second = runs_of("worker", lines)
    assert (first.outcome, second.outcome) == ("acknowledged", "retried")


def test_the_outcome_of_what_was_never_begun_is_nobodys():
    assert runs_of("worker", [{"what": "outcome", "at": 1.0, "id": "a", "receipt": "r", "outcome": "released"}]) == []


def test_what_was_given_back_is_counted_if_it_was_never_begun(tmp_path):
    for name in ("worker-1-0", "worker-1-1", "sender-0"):
        journal = Journal(tmp_path / f"{name}.jsonl")
        journal.note("begun", run=1, id="a", receipt="r", delivery=1, leased=None, hand=2)
        for receipt, outcome in (("r", "released"), ("s", "released"), ("t", "lost")):
            journal.note("outcome", id="a", receipt=receipt, outcome=outcome)
        journal.note("outcome", id="b", receipt="r", outcome="released")  # of the other mailbox of this worker
    assert given_back(tmp_path) == 4


@pytest.mark.anyio
async def test_a_journal_is_followed_while_it_grows(tmp_path, anyio_backend):
    progress, life = Progress(tmp_path), Life("worker", 0.0)
    progress.follow("worker", life)
    assert progress.look() == 0  # it is not there yet
    journal = Journal(tmp_path / "worker.jsonl")
    journal.note("ready")
    journal.note("effect", run=1)
    await journal.secure()
    assert progress.look() == 1
    assert life.ready is not None
    journal.note("ticked", run=3)  # it comes by itself
    journal.note("effect", run=2)
    with (tmp_path / "worker.jsonl").open("ab") as file:
        file.write(b'{"what":"eff')  # a line that is not whole yet
    assert progress.look() == 2
    with (tmp_path / "worker.jsonl").open("ab") as file:
        file.write(b'ect","at":1,"run":3}\n')
    assert progress.look() == 3
    assert [line["what"] for line in Reader(tmp_path / "worker.jsonl").lines()] == [
        "ready",
        "effect",
        "ticked",
        *["effect"] * 2,
    ]
