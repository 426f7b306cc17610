"""What every mailbox should do, in a model so simple that it can be read: one list of records, looked at anew each time.

It is told the instants and, where the order is a matter of taste, what a real mailbox chose: it then holds that to it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from mainspring.errors import InvalidParameterError, MailboxFullError, ReceiptHandleExpiredError
from mainspring.mailbox.message import CancelOutcome, Counts

ALIVE = ("waiting", "delayed", "in flight")


class Disagreement(AssertionError):
    """A mailbox did what the model would not do."""


@dataclass
class Record:
    """One message. ``rank`` is its place among those that wait; equal ones may come out in any order, and then keep it."""

    id: str
    body: object = None
    priority: int = 0
    key: str | None = None
    expires_at: float = math.inf
    rank: tuple[int, float] = (0, math.inf)
    ready_at: float = -math.inf
    receipt: str | None = None
    lease_until: float = 0.0
    claim: int = 0
    deliveries: int = 0
    charged: int = 0
    first_received_at: float | None = None
    checkpoint: bytes | None = None
    place: str = "waiting"
    why: str = ""
    unseen: bool = False
    """Whether its lease has ended and nobody has received since, in a mailbox that does not see that before."""

    @property
    def due(self) -> float:
        """When time will do something to it."""
        if self.unseen:
            return math.inf
        if self.place == "in flight":
            return self.lease_until
        if self.place == "delayed":
            return min(self.ready_at, self.expires_at)
        return self.expires_at if self.place == "waiting" else math.inf

    @property
    def turn(self) -> tuple[int, tuple[int, float]]:
        """What orders those that wait."""
        return -self.priority, self.rank


@dataclass
class Model:
    """A mailbox with no thought for speed: time is moved on one due thing at a time.

    ``exact`` says that things due at different instants take effect in the order of these. Otherwise only those of
    different looks do: a mailbox that looks at the time when it is used may do what was due meanwhile in an order of its own.
    ``front`` and ``priority`` are what its capabilities say: without them what is released goes to the tail, and a priority
    is refused. Without ``lease_ends_seen`` a lease that has ended is seen by the next receive: what it held goes to the tail
    then, or to the dead letters if it has grown too old since it was received.
    """

    capacity: float = math.inf
    exact: bool = True
    front: bool = True
    priority: bool = True
    lease_ends_seen: bool = True
    records: list[Record] = field(default_factory=list)
    dead: list[str] = field(default_factory=list)
    settled: int = 0
    _ranks: int = 0
    _choices: int = 0
    _claims: int = 0
    _unseen: list[tuple[int, str]] = field(
        default_factory=list
    )  # dead letters not looked at yet, with what orders them

    # ----------------------------------------------------------------------------------------------------- looking at it

    def alive(self) -> list[Record]:
        """All that is still to be done."""
        return [record for record in self.records if record.place in ALIVE]

    def claimable(self) -> list[Record]:
        """Those that wait, in order."""
        return sorted((r for r in self.records if r.place == "waiting"), key=lambda r: r.turn)

    def next_due(self) -> float:
        """When time will do something next."""
        return min((record.due for record in self.alive()), default=math.inf)

    def counts(self) -> Counts:
        """Where everything is."""
        places = [record.place for record in self.records]
        in_flight, dead = places.count("in flight"), places.count("dead")
        return Counts(places.count("delayed"), places.count("waiting"), in_flight, self.settled, dead)

    def find(self, identity: str) -> Record:
        """The record of that id."""
        return next(record for record in self.records if record.id == identity)

    def holder(self, receipt: str) -> Record:
        """The record whose lease that receipt holds."""
        for record in self.records:
            if record.receipt == receipt:
                return record
        raise ReceiptHandleExpiredError(f"receipt {receipt} holds nothing")

    # ------------------------------------------------------------------------------------------------------------ moving

    def advance(self, now: float) -> None:
        """Let everything happen that is due."""
        before, tied = -math.inf, False
        while True:
            first = min(self.alive(), key=lambda r: (r.due, r.claim if r.receipt else 0), default=None)
            if first is None or first.due > now:
                return
            together = tied and (first.due == before or not self.exact)
            if (
                first.due > before
            ):  # leases that end together do so in the order in which they began, other things as they like
                before = first.due
                tied = not self.exact or any(r.due == before and r.place != "in flight" for r in self.alive())
            if first.place == "in flight":
                first.charged += 1
                if not self.lease_ends_seen:
                    first.place, first.receipt, first.unseen = "waiting", None, True
                    continue
            self._wait(first, now, new_rank=not together)

    def _wait(
        self, record: Record, now: float, delay: float = 0.0, *, front: bool = False, new_rank: bool = True
    ) -> None:
        record.receipt = None
        self._ranks += new_rank
        if record.expires_at <= now:
            self._die(record, "MessageExpiredError")
        elif delay > 0:
            record.place, record.ready_at = "delayed", now + delay
        else:
            record.place = "waiting"
            if not front:
                record.rank = (self._ranks, math.inf)

    def _die(self, record: Record, why: str) -> None:
        record.place, record.receipt, record.why = "dead", None, why
        self._unseen.append((self._ranks, record.id))

    def _settle(self, records: list[Record]) -> int:
        for record in records:
            record.place, record.receipt, record.unseen = "settled", None, False
        self.settled += len(records)
        return len(records)

    def see_dead(self, listed: list[str]) -> None:
        """The dead letters are ``listed`` in this order."""
        ranks = {identity: rank for rank, identity in self._unseen}
        new = listed[len(self.dead) :]
        if listed[: len(self.dead)] != self.dead or sorted(new) != sorted(ranks):
            raise Disagreement(f"dead letters {listed}, not {self.dead} and then {[i for _, i in self._unseen]}")
        if [ranks[identity] for identity in new] != sorted(ranks.values()):
            raise Disagreement(f"dead letters {new} in another order than they died in: {self._unseen}")
        self.dead, self._unseen = list(listed), []

    # ----------------------------------------------------------------------------------------------------- what users do

    def send(self, records: list[Record], now: float, delay: float = 0.0) -> list[str]:
        """Take in all or none; their ids, or those of unfinished ones with the same keys."""
        if not self.priority and any(record.priority for record in records):
            raise InvalidParameterError("it has no priorities")
        self.advance(now)
        twins = {r.key: r.id for r in self.alive() if r.key is not None}
        new = [record for record in records if record.key not in twins]
        if new:
            self._check_room(len(new))
        for record in new:
            self.records.append(record)
            self._wait(record, now, delay)
        return [twins.get(record.key, record.id) for record in records]

    def _check_room(self, more: int) -> None:
        if more and len(self.alive()) + more > self.capacity:
            raise MailboxFullError(f"no room for {more} more")

    def claim(self, received: list[tuple[str, str]], most: int, now: float, lease: float) -> list[Record]:
        """Hand out at most ``most``; ``received`` says which (ids and receipts), where more than one choice is right."""
        self.advance(now)
        unseen = [record for record in self.alive() if record.unseen]
        self._ranks += bool(unseen)
        for record in unseen:
            record.unseen = False
            self._wait(record, now, new_rank=False)
        waiting = self.claimable()
        if len(received) != min(most, len(waiting)):
            raise Disagreement(f"received {[i for i, _ in received]} of {[r.id for r in waiting]}, at most {most}")
        claimed = []
        for identity, receipt in received:
            right = [record for record in waiting if record.turn == waiting[0].turn]
            record = next((record for record in right if record.id == identity), None)
            if record is None:
                raise Disagreement(f"received {identity} where {' or '.join(r.id for r in right)} comes first")
            waiting.remove(record)
            if record.rank[1] == math.inf:
                self._choices += 1
                record.rank = (record.rank[0], self._choices)
            record.place, record.receipt, record.lease_until = "in flight", receipt, now + lease
            record.deliveries += 1
            self._claims += 1
            record.claim = self._claims
            record.first_received_at = now if record.first_received_at is None else record.first_received_at
            claimed.append(record)
        return claimed

    def acknowledge(self, receipt: str, now: float) -> None:
        """Done."""
        self.advance(now)
        self._settle([self.holder(receipt)])

    def give_back(
        self, receipt: str, now: float, delay: float = 0.0, *, charge: bool = True, front: bool = False
    ) -> None:
        """A nack or a release."""
        self.advance(now)
        record = self.holder(receipt)
        record.charged += charge
        self._wait(record, now, delay, front=front and self.front)

    def bury(self, receipt: str, now: float, why: str) -> None:
        """To the dead letters; the attempt that ends so counts."""
        self.advance(now)
        record = self.holder(receipt)
        record.charged += 1
        self._ranks += 1
        self._die(record, why)

    def extend(self, receipt: str, now: float, timeout: float) -> None:
        """A lease is never shortened."""
        self.advance(now)
        record = self.holder(receipt)
        record.lease_until = max(record.lease_until, now + timeout)

    def save_checkpoint(self, receipt: str, now: float, state: bytes) -> None:
        """Kept for the next delivery."""
        self.advance(now)
        self.holder(receipt).checkpoint = state

    def cancel(self, identity: str, now: float) -> CancelOutcome:
        """By id, wherever it is."""
        self.advance(now)
        found = [record for record in self.alive() if record.id == identity]
        if not found:
            return CancelOutcome.UNKNOWN
        held = found[0].place == "in flight" or found[0].unseen
        outcome = CancelOutcome.CANCELLED if held else CancelOutcome.REMOVED
        self._settle(found)
        return outcome

    def purge(self, now: float) -> int:
        """Everything that is alive goes; how many that were."""
        self.advance(now)
        return self._settle(self.alive())

    def replay(self, chosen: list[str], now: float) -> int:
        """Dead letters wait again, all or none, in the order in which they died; how many that were."""
        self.advance(now)
        found = [identity for identity in self.dead if identity in chosen]
        self._check_room(len(found))
        for identity in found:
            self.dead.remove(identity)
            record = self.find(identity)
            record.deliveries = record.charged = 0
            record.first_received_at, record.expires_at = None, math.inf
            if any(other.key == record.key for other in self.alive()):
                record.key = None  # the key is another's now
            self._wait(record, now)
        return len(found)

    def discard(self, chosen: list[str], now: float) -> int:
        """Forget dead letters; how many that were."""
        self.advance(now)
        found = [identity for identity in self.dead if identity in chosen]
        self.dead = [identity for identity in self.dead if identity not in chosen]
        return self._settle([self.find(identity) for identity in found])
