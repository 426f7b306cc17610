"""``Ledger``: an independent account of every message, by which a run is judged. It is synchronous and does no I/O.

The store and the processes report what took effect. The ledger applies the rules of mailbox semantics to these reports and
knows nothing of how the store or the engine decide. The first report that contradicts its account is the violation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from mainspring.mailbox.message import Ack, Dead, Nack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from mainspring.mailbox.message import ClaimedMessage, Counts, Settlement
    from mainspring.testing.simulation.event_log import EventLog

TOLERANCE = 6.0
"""Seconds for which a handler may continue after its lease has ended: the time of its clean-up, and a margin."""
BACKLOG_TIME = 30.0
"""Seconds for which a worker that the store answers may keep a message that it has not begun: what slow calls explain."""
ROUNDING = 1e-6
"""Rounding error of sums of instants, in seconds. Within it the store may decide either way."""


class MessageState(StrEnum):
    """The state of a message. A lease that has run out is still ``LEASED`` until the next claim."""

    QUEUED = "queued"
    LEASED = "leased"
    SETTLED = "settled"
    DEAD = "dead"


@dataclass(slots=True)
class HandlerRun:
    """One call of a handler."""

    worker: str
    label: str
    began: float
    loop: str = ""
    stubborn: bool = False
    excused_at: float = 0.0
    ended: str = ""
    cause: str = ""


@dataclass(slots=True)
class Account:
    """The account of one message."""

    label: str
    state: MessageState = MessageState.QUEUED
    ready_at: float = 0.0
    charged: int = 0
    crashes: int = 0
    deliveries: int = 0
    receipt: str = ""
    holder: str = ""
    claimed_at: float = 0.0
    lease_until: float = 0.0
    undecodable: bool = False
    finished: bool = False
    early: HandlerRun | None = None
    replies: int = 0
    seen_replies: int = 0
    runs: dict[str, HandlerRun] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Violation:
    """A broken invariant: which one, at which virtual second, for which message, and the last events of that message."""

    rule: str
    text: str
    at: float
    message: str
    history: tuple[str, ...] = ()
    replay: str = ""

    def __str__(self) -> str:
        about = f" (message {self.message})" if self.message else ""
        lines = [f"broken: {self.rule}{about} at virtual second {self.at:.3f}", f"  {self.text}"]
        if self.history:
            lines += ["the last events:", *(f"  {line}" for line in self.history)]
        lines += ["to run it again:", f"  {self.replay}"]
        return "\n".join(lines)


class Ledger:
    """Keeps the account of every message, and stops the run at the first contradiction.

    :param log: the event log to append to.
    :param clock: returns the virtual time.
    :param stop: called once, when an invariant is broken.

    ``max_attempts`` and ``max_crashes`` are the limits of the dead-letter policy, set before the run.
    """

    def __init__(self, log: EventLog, clock: Callable[[], float], stop: Callable[[], object]) -> None:
        self.max_attempts = 20
        self.max_crashes = 5
        self.broken: Violation | None = None
        self.accounts: dict[str, Account] = {}
        self.last_progress = 0.0
        self._log = log
        self._now = clock
        self._stop = stop
        self._active: dict[tuple[str, str], HandlerRun] = {}
        self._frozen: set[str] = set()
        self._reachable_since: dict[str, float] = {}
        self._overlaps: dict[tuple[str, str], tuple[Account, HandlerRun, float]] = {}

    def label(self, message_id: str) -> str:
        """Return the short name of a message."""
        account = self.accounts.get(message_id)
        return account.label if account is not None else message_id[-6:]

    def fail(self, rule: str, text: str, message: str = "") -> None:
        """Record a broken invariant and stop the run. Only the first one counts."""
        if self.broken is None and self._log.closed_at is None:
            self.broken = Violation(rule, text, self._now(), message)
            self._log.add("ledger", f"BROKEN {rule}", message, text)
            self._stop()

    # ----------------------------------------------------------------------------------------------- told by the store

    def accepted(self, lane: str, ids: Iterable[str], delays: Iterable[float], *, undecodable: bool = False) -> None:
        """Record that the store accepted messages."""
        now = self._now()
        for message_id, delay in zip(ids, delays, strict=True):
            known = self.accounts.get(message_id)
            if known is not None:  # a dedup_key has matched
                if known.state in (MessageState.SETTLED, MessageState.DEAD):
                    self.fail("accepted", "a send was answered with the id of a finished message", known.label)
                self._log.add(lane, "sent again", known.label)
                continue
            label = f"m{len(self.accounts) + 1}"
            self.accounts[message_id] = Account(label, ready_at=now + delay, undecodable=undecodable)
            self._log.add(lane, "sent", label)

    def claimed(self, worker: str, deliveries: Iterable[ClaimedMessage], lease: float) -> None:
        """Record that the store leased messages to ``worker`` for ``lease`` seconds from now."""
        now = self._now()
        for delivery in deliveries:
            account = self.accounts.get(delivery.message_id)
            if account is None:
                self.fail("delivered", f"{worker} was given a message that was never sent", delivery.message_id[-6:])
                continue
            self._check_claim(account, worker, delivery, now)
            account.deliveries += 1
            account.state, account.holder, account.receipt = MessageState.LEASED, worker, delivery.receipt_handle
            account.claimed_at, account.lease_until = now, now + lease
            self.last_progress = now
            self._log.add(worker, "claimed", account.label, f"attempt {delivery.attempt}")

    def _check_claim(self, account: Account, worker: str, delivery: ClaimedMessage, now: float) -> None:
        label = account.label
        if account.state in (MessageState.SETTLED, MessageState.DEAD):
            self.fail("settled once", f"{worker} was given a message that is {account.state} already", label)
        elif account.state is MessageState.LEASED:
            if now < account.lease_until - ROUNDING:
                left = account.lease_until - now
                self.fail(
                    "one lease", f"{worker} was given it while {account.holder} holds it for {left:.3f} s more", label
                )
            account.charged += 1  # that lease ran out
            account.crashes += 1
            self._log.add("store", "lease ran out", label, account.holder)
        elif now < account.ready_at - ROUNDING:
            self.fail("delay", f"{worker} was given it {account.ready_at - now:.3f} s before its delay was over", label)
        if delivery.attempt != account.charged + 1:
            told = f"this is charged attempt {account.charged + 1}, the store says {delivery.attempt}"
            self.fail("attempts", told, label)
        for receipt, run in account.runs.items():
            if not run.ended and run.worker != worker and not run.stubborn:
                self._overlaps[delivery.message_id, receipt] = (account, run, max(now, run.excused_at))

    def unheard(self, deliveries: Iterable[ClaimedMessage]) -> None:
        """Record that the worker does not learn of a claim: it cannot give back what it does not know of."""
        for delivery in deliveries:
            account = self.accounts[delivery.message_id]
            if account.receipt == delivery.receipt_handle:  # else another worker has claimed it since
                account.claimed_at = -math.inf

    def extended(self, worker: str, delivery: ClaimedMessage, timeout: float) -> None:
        """Record that the store extended a lease."""
        account = self._holding(worker, delivery, "extend")
        if account is not None:
            account.lease_until = max(account.lease_until, self._now() + timeout)
            self._log.add(worker, "renewed", account.label)

    def refused(self, worker: str, delivery: ClaimedMessage, what: str) -> None:
        """Record that the store refused a receipt handle."""
        account = self.accounts[delivery.message_id]
        if self._holds(account, delivery, -ROUNDING):
            self.fail("lease kept", f"{worker}: {what} was refused although it holds the lease", account.label)
        self._log.add(worker, f"{what} refused", account.label)

    def settled(self, worker: str, delivery: ClaimedMessage, settlement: Settlement) -> None:
        """Record that the store settled a delivery."""
        what = type(settlement).__name__.lower()
        account = self._holding(worker, delivery, what)
        if account is None:
            return
        now = self._now()
        self.last_progress = now
        run = account.runs.get(delivery.receipt_handle)
        if isinstance(settlement, Ack):
            self._acknowledged(account, run, worker)
            account.state = MessageState.SETTLED
            account.replies += settlement.reply is not None
        elif isinstance(settlement, Dead):
            account.state = MessageState.DEAD
            self._log.add(worker, "dead-lettered", account.label, settlement.error_type)
        else:
            self._returned(account, run, worker, settlement, now)
        account.holder = account.receipt = ""

    def _acknowledged(self, account: Account, run: HandlerRun | None, worker: str) -> None:
        self._log.add(worker, "acked", account.label)
        if run is None:
            self.fail("work done", f"{worker} acknowledged it, and no handler ever saw it", account.label)
        elif not run.ended:
            account.early = run  # fine, if the handler comes to its end
        elif run.ended != "returned" and not account.finished:
            self.fail("work done", f"{worker} acknowledged it although its handler {run.ended}", account.label)

    def _returned(self, account: Account, run: HandlerRun | None, worker: str, how: Nack, now: float) -> None:
        account.state, account.ready_at = MessageState.QUEUED, now + how.delay
        self._log.add(worker, "retried" if how.charge else "released", account.label, f"in {how.delay:.3f} s")
        account.charged += how.charge
        if run is None and not account.undecodable:
            if how.charge:
                self.fail("attempts", f"{worker} charged an attempt although no handler ran", account.label)
            if not how.front:
                self.fail("order", f"{worker} returned it to the tail although no handler ran", account.label)
            self._check_backlog(account, worker, now)
        elif how.charge and run is not None and run.cause == "shutdown" and run.ended == "cancelled":
            self.fail("attempts", f"{worker} charged an attempt that its shutdown cancelled", account.label)

    def _check_backlog(self, account: Account, worker: str, now: float) -> None:
        """Fail if ``worker`` has kept a message from the others that it did not begin."""
        waited = now - max(account.claimed_at, self._reachable_since.get(worker, 0.0))
        if waited > BACKLOG_TIME:
            told = f"{worker} has kept it for {waited:.1f} s without beginning its handler"
            self.fail("fairness", told, account.label)

    def purged(self) -> None:
        """Record that the store purged all unfinished messages."""
        for account in self.accounts.values():
            if account.state in (MessageState.QUEUED, MessageState.LEASED):
                account.state = MessageState.SETTLED

    def replayed(self, message_ids: Iterable[str]) -> None:
        """Record a replay of dead letters."""
        for message_id in message_ids:
            account = self.accounts[message_id]
            account.state, account.charged, account.crashes = MessageState.QUEUED, 0, 0
            account.ready_at = self._now()

    def discarded(self, message_ids: Iterable[str]) -> None:
        """Record a purge of dead letters."""
        for message_id in message_ids:
            self.accounts[message_id].state = MessageState.SETTLED

    def _holds(self, account: Account, delivery: ClaimedMessage, margin: float) -> bool:
        return (
            account.state is MessageState.LEASED
            and account.receipt == delivery.receipt_handle
            and self._now() < account.lease_until + margin
        )

    def _holding(self, worker: str, delivery: ClaimedMessage, what: str) -> Account | None:
        account = self.accounts[delivery.message_id]
        if self._holds(account, delivery, ROUNDING):
            return account
        if account.receipt == delivery.receipt_handle and account.state is MessageState.LEASED:
            why = f"its lease ended {self._now() - account.lease_until:.3f} s ago"
        else:
            why = f"the message is {account.state}" + (f" to {account.holder}" if account.holder else "")
        self.fail("fencing", f"{what} of {worker} took effect though its receipt is stale: {why}", account.label)
        return None

    # ------------------------------------------------------------------------------------------- told by the workers

    def began(
        self,
        worker: str,
        message_id: str,
        receipt: str,
        attempt: int,
        *,
        loop: str = "",
        concurrency: float = math.inf,
        stubborn: bool = False,
    ) -> HandlerRun:
        """Record the start of a handler of ``loop``. ``stubborn``: it ignores its cancellation."""
        account = self.accounts[message_id]
        now = self._now()
        run = account.runs[receipt] = self._active[message_id, receipt] = HandlerRun(
            worker, account.label, now, loop, stubborn
        )
        self._log.add(worker, "started", account.label, f"attempt {attempt}")
        if attempt > self.max_attempts:
            self.fail("attempts", f"{worker} runs attempt {attempt} of at most {self.max_attempts}", account.label)
        if account.crashes >= self.max_crashes:
            self.fail("attempts", f"{worker} runs it although {account.crashes} of its leases ran out", account.label)
        running = sum(other.worker == worker and other.loop == loop for other in self._active.values())
        if running > concurrency:
            told = f"{worker} runs {running} handlers of loop {loop!r}, whose concurrency is {concurrency}"
            self.fail("concurrency", told, account.label)
        if account.receipt != receipt or now > account.lease_until + ROUNDING:
            self.fail("one lease", f"{worker} starts its handler without a valid lease", account.label)
        self._check_backlog(account, worker, now)
        return run

    def ended(self, message_id: str, receipt: str, how: str, cause: str = "") -> None:
        """Record the end of a handler: it returned, failed, was cancelled (for ``cause``), or died with its worker."""
        account = self.accounts[message_id]
        run = account.runs.get(receipt)
        if run is None or run.ended:
            return
        run.ended, run.cause = how, cause
        del self._active[message_id, receipt]
        account.finished |= how == "returned"
        self._log.add(run.worker, how, account.label, cause)
        self._check_overlap((message_id, receipt))
        if account.early is run and how != "returned" and not account.finished:
            told = f"{run.worker} had acknowledged it before its handler {how}: the work is lost"
            self.fail("work done", told, account.label)

    def unanswered(self, delivery: ClaimedMessage) -> None:
        """Record that the settling worker got no answer. A handler that then ends has not acknowledged too early."""
        account = self.accounts.get(delivery.message_id)
        if account is not None and account.early is account.runs.get(delivery.receipt_handle):
            account.early = None

    def died(self, worker: str) -> None:
        """Record that ``worker`` died, and its handlers with it."""
        for (message_id, receipt), run in list(self._active.items()):
            if run.worker == worker:
                self.ended(message_id, receipt, "died with its worker")

    def left(self, worker: str) -> None:
        """Record that ``worker`` ended in order, and with a store that answers."""
        now, since = self._now(), self._reachable_since.get(worker, 0.0)
        for account in self.accounts.values():
            held = account.state is MessageState.LEASED and account.holder == worker and now < account.lease_until
            if held and account.receipt not in account.runs and account.claimed_at >= since:
                told = f"{worker} has ended and keeps a lease on it, though no handler has begun"
                self.fail("fairness", told, account.label)

    def froze(self, worker: str) -> None:
        """Record that ``worker`` froze. Its lateness is excused until it thaws."""
        self._frozen.add(worker)

    def thawed(self, worker: str) -> None:
        """Record that ``worker`` continues. Its lateness counts from now on."""
        until = self._now()
        self._frozen.discard(worker)
        self.reachable(worker)
        for key, run in self._active.items():
            if run.worker == worker:
                run.excused_at = until
                if key in self._overlaps:
                    self._overlaps[key] = (self._overlaps[key][0], run, until)

    def reachable(self, worker: str) -> None:
        """Record that ``worker`` reaches the store again. What it kept until now is excused."""
        self._reachable_since[worker] = self._now()

    def _check_overlap(self, key: tuple[str, str], *, final: bool = True) -> None:
        found = self._overlaps.get(key)
        if found is None:
            return
        account, run, since = found
        if final:
            del self._overlaps[key]
        if self._now() - since > TOLERANCE and run.worker not in self._frozen:
            late = self._now() - since
            told = f"{run.worker} went on with it for {late:.1f} s after {account.holder or 'another'} had got it"
            self.fail("one worker", told, account.label)

    def reply_seen(self, request_id: str | None) -> None:
        """Record that a requester received a reply."""
        account = self.accounts.get(request_id or "")
        if account is None:
            self.fail("replies", f"a reply to {request_id!r}, which was no request")
            return
        account.seen_replies += 1
        self._log.add("client", "got the reply to", account.label)
        if account.seen_replies > account.replies:
            self.fail("replies", f"reply {account.seen_replies} to it; {account.replies} had been given", account.label)

    # ----------------------------------------------------------------------------------------------------- the balance

    def check(self, counts: Counts) -> None:
        """Compare the store's counts with the accounts."""
        for key in list(self._overlaps):
            self._check_overlap(key, final=False)
        tally = dict.fromkeys(MessageState, 0)
        for account in self.accounts.values():
            tally[account.state] += 1
        waiting = tally[MessageState.QUEUED] + tally[MessageState.LEASED]
        mine = (waiting, tally[MessageState.SETTLED], tally[MessageState.DEAD])
        theirs = (counts.waiting, counts.settled, counts.dead)
        if mine != theirs:
            self.fail(
                "nothing lost",
                f"{len(self.accounts)} accepted: waiting, settled, dead are {mine}, the store says {theirs}",
            )

    def close(self) -> None:
        """Check at the end of the run that nothing is outstanding."""
        for account in self.accounts.values():
            if account.state is MessageState.SETTLED and account.early is not None and not account.finished:
                self.fail("work done", "it was acknowledged, and no handler has come to its end", account.label)
            if account.replies != account.seen_replies:
                told = f"{account.replies} replies were given, the requester saw {account.seen_replies}"
                self.fail("replies", told, account.label)

    def waiting(self, until: float = math.inf) -> list[Account]:
        """Return the unfinished messages, except those whose next attempt is due after ``until``."""
        return [
            account
            for account in self.accounts.values()
            if account.state is MessageState.LEASED
            or (account.state is MessageState.QUEUED and account.ready_at <= until)
        ]
