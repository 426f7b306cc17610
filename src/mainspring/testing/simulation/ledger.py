"""``Ledger``: the books that a run is judged by. Plain synchronous bookkeeping: it is told what took effect, and when.

It knows nothing of how the store or the engine come to their decisions. It keeps a second account of every message from
what it is told, by the rules of the mailbox's semantics, and the first entry that contradicts it is the violation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from mainspring.mailbox.message import Ack, Dead, Return

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from mainspring.mailbox.message import Counts, Delivery, Settlement
    from mainspring.testing.simulation.event_log import Journal

TOLERANCE = 6.0
"""Seconds for which a handler may go on after its lease is over: what its clean-up may take, and a moment."""
ROUNDING = 1e-6
"""Seconds within which sums of instants may differ; at that very instant the store may say either."""


class Place(StrEnum):
    """Where a message is, as far as the ledger can tell; whether a lease has run out it looks at when it matters."""

    QUEUED = "queued"
    LEASED = "leased"
    SETTLED = "settled"
    DEAD = "dead"


@dataclass(slots=True)
class Work:
    """One handler run, as the world around it sees it."""

    worker: str
    label: str
    began: float
    stubborn: bool = False
    excused_at: float = 0.0
    ended: str = ""
    cause: str = ""


@dataclass(slots=True)
class Account:
    """What the ledger knows of one message."""

    label: str
    place: Place = Place.QUEUED
    ready_at: float = 0.0
    charged: int = 0
    crashes: int = 0
    deliveries: int = 0
    receipt: str = ""
    holder: str = ""
    lease_until: float = 0.0
    undecodable: bool = False
    finished: bool = False
    early: Work | None = None
    replies: int = 0
    seen_replies: int = 0
    works: dict[str, Work] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Broken:
    """An invariant that did not hold."""

    rule: str
    text: str
    at: float
    message: str = ""


class Ledger:
    """Keeps the account of every message, and stops the run at the first that does not add up.

    :param journal: where what happens is noted.
    :param stop: called once, when an invariant is broken.
    :param max_attempts: the policy's limit on charged attempts.
    :param max_crashes: its limit on those whose leases ran out.
    """

    def __init__(self, journal: Journal, clock: Callable[[], float], stop: Callable[[], object]) -> None:
        self.max_attempts = 20
        self.max_crashes = 5
        self.broken: Broken | None = None
        self.accounts: dict[str, Account] = {}
        self.last_progress = 0.0
        self._journal = journal
        self._now = clock
        self._stop = stop
        self._active: dict[tuple[str, str], Work] = {}
        self._frozen: set[str] = set()
        self._overlaps: dict[tuple[str, str], tuple[Account, Work, float]] = {}

    def label(self, message_id: str) -> str:
        """The short name of a message."""
        account = self.accounts.get(message_id)
        return account.label if account is not None else message_id[-6:]

    def fail(self, rule: str, text: str, message: str = "") -> None:
        """An invariant is broken; only the first counts."""
        if self.broken is None and self._journal.closed_at is None:
            self.broken = Broken(rule, text, self._now(), message)
            self._journal.add("ledger", f"BROKEN {rule}", message, text)
            self._stop()

    # ----------------------------------------------------------------------------------------------- told by the store

    def accepted(self, lane: str, ids: Iterable[str], delays: Iterable[float], *, undecodable: bool = False) -> None:
        """The store has taken messages in."""
        now = self._now()
        for message_id, delay in zip(ids, delays, strict=True):
            known = self.accounts.get(message_id)
            if known is not None:  # a dedup_key has matched
                if known.place in (Place.SETTLED, Place.DEAD):
                    self.fail("accepted", "a send was answered with the id of a finished message", known.label)
                self._journal.add(lane, "sent again", known.label)
                continue
            label = f"m{len(self.accounts) + 1}"
            self.accounts[message_id] = Account(label, ready_at=now + delay, undecodable=undecodable)
            self._journal.add(lane, "sent", label)

    def claimed(self, worker: str, deliveries: Iterable[Delivery], lease: float) -> None:
        """The store has leased messages to ``worker`` for ``lease`` seconds from now."""
        now = self._now()
        for delivery in deliveries:
            account = self.accounts.get(delivery.message_id)
            if account is None:
                self.fail("delivered", f"{worker} was given a message that nobody sent", delivery.message_id[-6:])
                continue
            self._check_claim(account, worker, delivery, now)
            account.deliveries += 1
            account.place, account.holder, account.receipt = Place.LEASED, worker, delivery.receipt_handle
            account.lease_until = now + lease
            self.last_progress = now
            self._journal.add(worker, "claimed", account.label, f"attempt {delivery.attempt}")

    def _check_claim(self, account: Account, worker: str, delivery: Delivery, now: float) -> None:
        label = account.label
        if account.place in (Place.SETTLED, Place.DEAD):
            self.fail("settled once", f"{worker} was given a message that is {account.place} already", label)
        elif account.place is Place.LEASED:
            if now < account.lease_until - ROUNDING:
                left = account.lease_until - now
                self.fail(
                    "one lease", f"{worker} was given it while {account.holder} holds it for {left:.3f} s more", label
                )
            account.charged += 1  # that lease ran out
            account.crashes += 1
            self._journal.add("store", "lease ran out", label, account.holder)
        elif now < account.ready_at - ROUNDING:
            self.fail("delay", f"{worker} was given it {account.ready_at - now:.3f} s before its delay was over", label)
        if delivery.attempt != account.charged + 1:
            told = f"this is charged attempt {account.charged + 1}, the store says {delivery.attempt}"
            self.fail("attempts", told, label)
        for receipt, work in account.works.items():
            if not work.ended and work.worker != worker and not work.stubborn:
                self._overlaps[delivery.message_id, receipt] = (account, work, max(now, work.excused_at))

    def extended(self, worker: str, delivery: Delivery, timeout: float) -> None:
        """The store has extended a lease."""
        account = self._holding(worker, delivery, "extend")
        if account is not None:
            account.lease_until = max(account.lease_until, self._now() + timeout)
            self._journal.add(worker, "renewed", account.label)

    def refused(self, worker: str, delivery: Delivery, what: str) -> None:
        """The store has refused a receipt."""
        account = self.accounts[delivery.message_id]
        if self._holds(account, delivery, -ROUNDING):
            self.fail("lease kept", f"{worker}: {what} was refused although it holds the lease", account.label)
        self._journal.add(worker, f"{what} refused", account.label)

    def settled(self, worker: str, delivery: Delivery, settlement: Settlement) -> None:
        """The store has settled a delivery."""
        what = type(settlement).__name__.lower()
        account = self._holding(worker, delivery, what)
        if account is None:
            return
        now = self._now()
        self.last_progress = now
        work = account.works.get(delivery.receipt_handle)
        if isinstance(settlement, Ack):
            self._acknowledged(account, work, worker)
            account.place = Place.SETTLED
            account.replies += settlement.reply is not None
        elif isinstance(settlement, Dead):
            account.place = Place.DEAD
            self._journal.add(worker, "dead-lettered", account.label, settlement.error_type)
        else:
            self._returned(account, work, worker, settlement, now)
        account.holder = account.receipt = ""

    def _acknowledged(self, account: Account, work: Work | None, worker: str) -> None:
        self._journal.add(worker, "acked", account.label)
        if work is None:
            self.fail("work done", f"{worker} acknowledged it, and no handler ever saw it", account.label)
        elif not work.ended:
            account.early = work  # fine, if the handler comes to its end
        elif work.ended != "returned" and not account.finished:
            self.fail("work done", f"{worker} acknowledged it although its handler {work.ended}", account.label)

    def _returned(self, account: Account, work: Work | None, worker: str, how: Return, now: float) -> None:
        account.place, account.ready_at = Place.QUEUED, now + how.delay
        self._journal.add(worker, "retried" if how.charge else "released", account.label, f"in {how.delay:.3f} s")
        if not how.charge:
            return
        account.charged += 1
        if work is None and not account.undecodable:
            self.fail("attempts", f"{worker} charged an attempt although no handler ran", account.label)
        elif work is not None and work.cause == "shutdown" and work.ended == "cancelled":
            self.fail("attempts", f"{worker} charged an attempt that its shutdown cancelled", account.label)

    def purged(self) -> None:
        """The store has dropped all that waits."""
        for account in self.accounts.values():
            if account.place in (Place.QUEUED, Place.LEASED):
                account.place = Place.SETTLED

    def replayed(self, before: set[str], after: set[str]) -> None:
        """Dead letters (their ids before and after) have been sent again."""
        for message_id in before - after:
            account = self.accounts[message_id]
            account.place, account.charged, account.crashes = Place.QUEUED, 0, 0
            account.ready_at = self._now()

    def discarded(self, before: set[str], after: set[str]) -> None:
        """Dead letters (their ids before and after) have been forgotten."""
        for message_id in before - after:
            self.accounts[message_id].place = Place.SETTLED

    def _holds(self, account: Account, delivery: Delivery, margin: float) -> bool:
        return (
            account.place is Place.LEASED
            and account.receipt == delivery.receipt_handle
            and self._now() < account.lease_until + margin
        )

    def _holding(self, worker: str, delivery: Delivery, what: str) -> Account | None:
        account = self.accounts[delivery.message_id]
        if self._holds(account, delivery, ROUNDING):
            return account
        if account.receipt == delivery.receipt_handle and account.place is Place.LEASED:
            why = f"its lease ended {self._now() - account.lease_until:.3f} s ago"
        else:
            why = f"the message is {account.place}" + (f" to {account.holder}" if account.holder else "")
        self.fail("fencing", f"{what} of {worker} took effect though its receipt is stale: {why}", account.label)
        return None

    # ------------------------------------------------------------------------------------------- told by the workers

    def began(self, worker: str, message_id: str, receipt: str, attempt: int, *, stubborn: bool) -> Work:
        """A handler is about to run. ``stubborn``: it is one that ignores its cancellation."""
        account = self.accounts[message_id]
        now = self._now()
        work = account.works[receipt] = self._active[message_id, receipt] = Work(worker, account.label, now, stubborn)
        self._journal.add(worker, "started", account.label, f"attempt {attempt}")
        if attempt > self.max_attempts:
            self.fail("attempts", f"{worker} runs attempt {attempt} of at most {self.max_attempts}", account.label)
        if account.crashes >= self.max_crashes:
            self.fail("attempts", f"{worker} runs it although {account.crashes} of its leases ran out", account.label)
        if account.receipt != receipt or now > account.lease_until + ROUNDING:
            self.fail("one lease", f"{worker} starts its handler without a valid lease", account.label)
        return work

    def ended(self, message_id: str, receipt: str, how: str, cause: str = "") -> None:
        """A handler has ended: it returned, failed, or was cancelled (for ``cause``), or died with its worker."""
        account = self.accounts[message_id]
        work = account.works.get(receipt)
        if work is None or work.ended:
            return
        work.ended, work.cause = how, cause
        del self._active[message_id, receipt]
        account.finished |= how == "returned"
        self._journal.add(work.worker, how, account.label, cause)
        self._check_overlap((message_id, receipt))
        if account.early is work and how != "returned" and not account.finished:
            told = f"{work.worker} had acknowledged it before its handler {how}: the work is lost"
            self.fail("work done", told, account.label)

    def unanswered(self, delivery: Delivery) -> None:
        """Who settled a delivery does not know that it took effect: a handler that ends there has not left its work."""
        account = self.accounts.get(delivery.message_id)
        if account is not None and account.early is account.works.get(delivery.receipt_handle):
            account.early = None

    def died(self, worker: str) -> None:
        """``worker`` is gone, and with it what it was handling."""
        for (message_id, receipt), work in list(self._active.items()):
            if work.worker == worker:
                self.ended(message_id, receipt, "died with its worker")

    def froze(self, worker: str) -> None:
        """``worker`` stands still: it cannot know what happens meanwhile."""
        self._frozen.add(worker)

    def thawed(self, worker: str) -> None:
        """``worker`` goes on: what it is late with is counted from now on."""
        until = self._now()
        self._frozen.discard(worker)
        for key, work in self._active.items():
            if work.worker == worker:
                work.excused_at = until
                if key in self._overlaps:
                    self._overlaps[key] = (self._overlaps[key][0], work, until)

    def _check_overlap(self, key: tuple[str, str], *, final: bool = True) -> None:
        found = self._overlaps.get(key)
        if found is None:
            return
        account, work, since = found
        if final:
            del self._overlaps[key]
        if self._now() - since > TOLERANCE and work.worker not in self._frozen:
            late = self._now() - since
            told = f"{work.worker} went on with it for {late:.1f} s after {account.holder or 'another'} had got it"
            self.fail("one worker", told, account.label)

    def reply_seen(self, request_id: str | None) -> bool:
        """A requester has received a reply; whether it is the first to its request."""
        account = self.accounts.get(request_id or "")
        if account is None:
            self.fail("replies", f"a reply to {request_id!r}, which nobody asked")
            return False
        account.seen_replies += 1
        self._journal.add("client", "got the reply to", account.label)
        if account.seen_replies > account.replies:
            self.fail("replies", f"reply {account.seen_replies} to it; {account.replies} had been given", account.label)
        return account.seen_replies == 1

    # ----------------------------------------------------------------------------------------------------- the balance

    def check(self, counts: Counts) -> None:
        """Do the store's numbers add up to what it accepted?"""
        for key in list(self._overlaps):
            self._check_overlap(key, final=False)
        tally = dict.fromkeys(Place, 0)
        for account in self.accounts.values():
            tally[account.place] += 1
        waiting = tally[Place.QUEUED] + tally[Place.LEASED]
        mine = (waiting, tally[Place.SETTLED], tally[Place.DEAD])
        theirs = (counts.waiting, counts.settled, counts.dead)
        if mine != theirs:
            self.fail(
                "nothing lost",
                f"{len(self.accounts)} accepted: waiting, settled, dead are {mine}, the store says {theirs}",
            )

    def close(self, *, all_replies: bool) -> None:
        """The end of the run: what should have come by now has come."""
        for account in self.accounts.values():
            if account.place is Place.SETTLED and account.early is not None and not account.finished:
                self.fail("work done", "it was acknowledged, and no handler has come to its end", account.label)
            if all_replies and account.replies != account.seen_replies:
                told = f"{account.replies} replies were given, the requester saw {account.seen_replies}"
                self.fail("replies", told, account.label)

    def waiting(self, until: float = math.inf) -> list[Account]:
        """Return the messages that are not finished, without those whose next try is to come after ``until``."""
        return [
            account
            for account in self.accounts.values()
            if account.place is Place.LEASED or (account.place is Place.QUEUED and account.ready_at <= until)
        ]
