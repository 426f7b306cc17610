"""The ledger by itself: each rule is told a story that breaks it, and one that does not."""

from __future__ import annotations

from typing import Any

import pytest

from mainspring.mailbox.message import Ack, ClaimedMessage, Counts, Dead, Envelope, Nack
from mainspring.testing.simulation.event_log import EventLog
from mainspring.testing.simulation.ledger import BACKLOG_TIME, TOLERANCE, Ledger


class Story:
    """A ledger, its clock, and short words for what happens."""

    def __init__(self) -> None:
        self.now = 0.0
        self.stopped = 0
        self.ledger = Ledger(EventLog(lambda: self.now), lambda: self.now, self._stop)
        self._receipts = 0

    def _stop(self) -> None:
        self.stopped += 1

    @property
    def broken(self) -> str | None:
        return self.ledger.broken.rule if self.ledger.broken is not None else None

    def send(self, *ids: str, delay: float = 0.0, **options: Any) -> None:
        self.ledger.accepted("client", ids, [delay] * len(ids), **options)

    def claim(self, worker: str, message_id: str = "a", *, attempt: int = 1, lease: float = 60.0) -> ClaimedMessage:
        self._receipts += 1
        delivery = ClaimedMessage(message_id, b"1", f"r{self._receipts}", 1, attempt, 0.0, 0.0)
        self.ledger.claimed(worker, [delivery], lease)
        return delivery

    def begin(self, worker: str, delivery: ClaimedMessage, **options: Any) -> None:
        self.ledger.began(worker, delivery.message_id, delivery.receipt_handle, delivery.attempt, **options)

    def end(self, delivery: ClaimedMessage, how: str = "returned", cause: str = "") -> None:
        self.ledger.ended(delivery.message_id, delivery.receipt_handle, how, cause)

    def done(self, worker: str, delivery: ClaimedMessage) -> None:
        self.begin(worker, delivery)
        self.end(delivery)
        self.ledger.settled(worker, delivery, Ack())


@pytest.fixture
def story() -> Story:
    told = Story()
    told.send("a")
    return told


def test_a_good_life(story: Story) -> None:
    first = story.claim("w0")
    story.begin("w0", first)
    story.now = 20
    story.ledger.extended("w0", first, 60)
    story.now = 70
    story.end(first, "failed")
    story.ledger.settled("w0", first, Nack(5.0))
    story.now = 75
    second = story.claim("w1", attempt=2)
    story.done("w1", second)
    story.ledger.check(Counts(settled=1))
    story.ledger.close()
    assert story.broken is None
    assert story.stopped == 0


def test_only_the_first_break_counts_and_stops(story: Story) -> None:
    story.claim("w0", "unknown")
    story.ledger.check(Counts())
    assert story.broken == "delivered"
    assert story.stopped == 1


def test_two_leases_at_once(story: Story) -> None:
    story.claim("w0", lease=60)
    story.now = 59.9
    story.claim("w1", attempt=2)
    assert story.broken == "one lease"


def test_a_lease_that_ran_out_is_a_charged_attempt(story: Story) -> None:
    story.claim("w0", lease=60)
    story.now = 60
    story.claim("w1", attempt=2)
    assert story.broken is None
    story.now = 120
    story.claim("w0", attempt=2)
    assert story.broken == "attempts"


def test_an_extension_that_is_shorter_leaves_the_lease(story: Story) -> None:
    held = story.claim("w0", lease=60)
    story.ledger.extended("w0", held, 5)
    story.now = 30
    story.claim("w1", attempt=2)
    assert story.broken == "one lease"


@pytest.mark.parametrize("end", [Ack(), Dead("x", "Reject"), Nack()])
def test_a_stale_receipt_that_takes_effect(story: Story, end: Any) -> None:
    held = story.claim("w0", lease=60)
    story.begin("w0", held)
    story.end(held)
    story.now = 60.001
    story.ledger.settled("w0", held, end)
    assert story.broken == "fencing"


def test_a_receipt_of_an_earlier_delivery(story: Story) -> None:
    old = story.claim("w0", lease=60)
    story.now = 61
    story.claim("w1", attempt=2)
    story.ledger.extended("w0", old, 60)
    assert story.broken == "fencing"
    assert "leased to w1" in story.ledger.broken.text  # type: ignore[union-attr]


def test_a_valid_receipt_that_is_refused(story: Story) -> None:
    held = story.claim("w0")
    story.now = 10
    story.ledger.refused("w0", held, "ack")
    assert story.broken == "lease kept"


def test_a_settled_message_comes_again(story: Story) -> None:
    story.done("w0", story.claim("w0"))
    story.claim("w1")
    assert story.broken == "settled once"


def test_a_delay_is_kept(story: Story) -> None:
    story.send("b", delay=10)
    story.now = 9
    story.claim("w0", "b")
    assert story.broken == "delay"


def test_acknowledged_without_a_handler(story: Story) -> None:
    story.ledger.settled("w0", story.claim("w0"), Ack())
    assert story.broken == "work done"


def test_acknowledged_though_the_handler_failed(story: Story) -> None:
    held = story.claim("w0")
    story.begin("w0", held)
    story.end(held, "failed")
    story.ledger.settled("w0", held, Ack())
    assert story.broken == "work done"


def test_an_early_acknowledgement_is_fine_until_the_worker_dies(story: Story) -> None:
    story.send("b")
    fine, lost = story.claim("w0"), story.claim("w1", "b")
    for worker, delivery in (("w0", fine), ("w1", lost)):
        story.begin(worker, delivery)
        story.ledger.settled(worker, delivery, Ack())
    story.end(fine)
    assert story.broken is None
    story.ledger.died("w1")
    assert story.broken == "work done"
    assert "died with its worker" in story.ledger.broken.text  # type: ignore[union-attr]


def test_a_charge_without_a_run(story: Story) -> None:
    story.ledger.settled("w0", story.claim("w0"), Nack(charge=True))
    assert story.broken == "attempts"


def test_what_nobody_understands_is_charged_without_a_run() -> None:
    story = Story()
    story.send("a", undecodable=True)
    story.ledger.settled("w0", story.claim("w0"), Nack(charge=True))
    assert story.broken is None


def test_a_shutdown_does_not_charge(story: Story) -> None:
    held = story.claim("w0")
    story.begin("w0", held)
    story.end(held, "cancelled", "shutdown")
    story.ledger.settled("w0", held, Nack(charge=True))
    assert story.broken == "attempts"


def test_too_many_attempts(story: Story) -> None:
    story.ledger.max_attempts = 1
    held = story.claim("w0", lease=1)
    story.begin("w0", held)
    story.end(held, "failed")
    story.now = 1
    story.begin("w1", story.claim("w1", attempt=2))
    assert story.broken == "attempts"


def test_too_many_crashes(story: Story) -> None:
    story.ledger.max_crashes = 1
    story.claim("w0", lease=1)
    story.now = 1
    story.begin("w1", story.claim("w1", attempt=2))
    assert story.broken == "attempts"


def test_a_handler_that_begins_late(story: Story) -> None:
    held = story.claim("w0", lease=60)
    story.now = 61
    story.begin("w0", held)
    assert story.broken == "one lease"


def overlapping(story: Story, **options: Any) -> ClaimedMessage:
    held = story.claim("w0", lease=60)
    story.begin("w0", held, **options)
    story.now = 60
    story.begin("w1", story.claim("w1", attempt=2))
    return held


def test_two_workers_on_one_message(story: Story) -> None:
    held = overlapping(story)
    story.now += TOLERANCE + 1
    story.end(held)
    assert story.broken == "one worker"


def test_time_to_clean_up(story: Story) -> None:
    held = overlapping(story)
    story.now += TOLERANCE - 1
    story.end(held, "cancelled", "lease lost")
    assert story.broken is None


def test_an_overlap_is_found_while_it_lasts(story: Story) -> None:
    overlapping(story)
    story.now += TOLERANCE + 1
    story.ledger.check(Counts(in_flight=1))
    assert story.broken == "one worker"


def test_a_frozen_worker_cannot_know(story: Story) -> None:
    held = story.claim("w0", lease=60)
    story.begin("w0", held)
    story.ledger.froze("w0")
    story.now = 60
    story.begin("w1", story.claim("w1", attempt=2))
    story.now = 100
    story.ledger.check(Counts(in_flight=1))
    story.ledger.thawed("w0")
    story.now += TOLERANCE - 1
    story.ledger.check(Counts(in_flight=1))
    assert story.broken is None
    story.now += 2
    story.end(held)
    assert story.broken == "one worker"


def test_a_stubborn_handler_is_not_the_engines_fault(story: Story) -> None:
    held = overlapping(story, stubborn=True)
    story.now += 100
    story.end(held)
    assert story.broken is None


def test_replies(story: Story) -> None:
    held = story.claim("w0")
    story.begin("w0", held)
    story.end(held)
    story.ledger.settled("w0", held, Ack(Envelope("r", b"1")))
    story.ledger.reply_seen("a")
    story.ledger.close()
    assert story.broken is None
    story.ledger.reply_seen("a")
    assert story.broken == "replies"


def test_a_reply_that_nobody_asked_for(story: Story) -> None:
    story.ledger.reply_seen(None)
    assert story.broken == "replies"


def test_a_reply_that_is_missing(story: Story) -> None:
    held = story.claim("w0")
    story.begin("w0", held)
    story.end(held)
    story.ledger.settled("w0", held, Ack(Envelope("r", b"1")))
    story.ledger.close()
    assert story.broken == "replies"


@pytest.mark.parametrize("counts", [Counts(), Counts(pending=2), Counts(settled=1), Counts(dead=1)])
def test_numbers_that_do_not_add_up(story: Story, counts: Counts) -> None:
    story.ledger.check(counts)
    assert story.broken == "nothing lost"


def test_a_dedup_key_may_answer_only_for_the_unfinished(story: Story) -> None:
    story.send("a")
    assert story.broken is None
    story.done("w0", story.claim("w0"))
    story.send("a")
    assert story.broken == "accepted"


def test_looking_after(story: Story) -> None:
    """Purges, replays and discarded dead letters are part of the account."""
    story.send("b")
    held = story.claim("w0")
    story.ledger.settled("w0", held, Dead("x", "Reject"))
    story.ledger.check(Counts(pending=1, dead=1))
    story.ledger.replayed({"a"})
    story.ledger.check(Counts(pending=2))
    story.ledger.purged()
    story.ledger.check(Counts(settled=2))
    story.send("c")
    story.ledger.settled("w0", story.claim("w0", "c"), Dead("x", "Reject"))
    story.ledger.discarded({"c"})
    story.ledger.check(Counts(settled=3))
    assert story.broken is None


@pytest.mark.parametrize(("loop", "broken"), [("one", "concurrency"), ("another", None)])
def test_no_more_handlers_than_its_concurrency(story: Story, loop: str, broken: str | None) -> None:
    story.send("a", "b", "c")
    story.done("w0", story.claim("w0", "a"))
    story.begin("w0", story.claim("w0", "b"), loop="one", concurrency=1)
    story.begin("w0", story.claim("w0", "c"), loop=loop, concurrency=1)
    assert story.broken == broken


@pytest.mark.parametrize(("front", "broken"), [(True, None), (False, "order")])
def test_what_was_not_begun_goes_to_the_front(story: Story, front: bool, broken: str | None) -> None:
    story.send("a")
    story.ledger.settled("w0", story.claim("w0"), Nack(charge=False, front=front))
    assert story.broken == broken


@pytest.mark.parametrize("how", ["begun", "released"])
@pytest.mark.parametrize(("reachable_at", "broken"), [(None, "fairness"), (10.0, None)])
def test_no_message_waits_in_a_backlog(story: Story, how: str, reachable_at: float | None, broken: str | None) -> None:
    story.send("a")
    delivery = story.claim("w0")
    if reachable_at is not None:
        story.now = reachable_at
        story.ledger.reachable("w0")
    story.now = BACKLOG_TIME + 1
    if how == "begun":
        story.begin("w0", delivery)
    else:
        story.ledger.settled("w0", delivery, Nack(charge=False, front=True))
    assert story.broken == broken


@pytest.mark.parametrize(("what", "broken"), [("", "fairness"), ("begun", None), ("unheard", None)])
def test_a_worker_that_ends_keeps_nothing_that_it_has_not_begun(story: Story, what: str, broken: str | None) -> None:
    story.send("a")
    delivery = story.claim("w0")
    if what == "begun":
        story.begin("w0", delivery)
    elif what == "unheard":
        story.ledger.unheard([delivery])
    story.ledger.left("w0")
    assert story.broken == broken


def test_a_claim_that_was_not_heard_says_nothing_of_a_later_one(story: Story) -> None:
    """A frozen worker finds out late, when another one has the message."""
    lost = story.claim("w0", lease=10.0)
    story.now = 1_000.0
    found = story.claim("w1", attempt=2)
    story.ledger.unheard([lost])
    story.now += 1.0
    story.begin("w1", found)
    assert story.broken is None
