"""What a Redis mailbox asks of its library of functions: one class an operation, which writes arguments and reads the result.

First the keys of a mailbox, and how a message is kept in them.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Final

from mainspring.errors import MailboxConnectionError, ReceiptHandleExpiredError, SerializationError
from mainspring.mailbox.batcher import Command
from mainspring.mailbox.limits import check_size, full
from mainspring.mailbox.message import EXPIRED, UNKNOWN, Cancelled, CancelOutcome, Counts, Dead, Delivery

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from mainspring.mailbox.message import Envelope, Return
    from mainspring.mailbox.redis.batches import FunctionCall

    Argument = str | int | bytes

_KEYS: Final = (
    "messages",
    "ready",
    "delayed",
    "leases",
    "state",
    "more",
    "keyed",
    "expiry",
    "dead",
    "deaths",
    "epitaph",
    "waiters",
)
MICRO: Final = 1_000_000
LONGEST_NUMBER: Final = 20
PLAIN: Final = b"-"
UNREADABLE: Final = Dead("what the store holds for this message was not written by a mailbox", "SerializationError")


def base_of(name: str) -> bytes:
    """Return the prefix of the keys and channels of a mailbox, which puts all of them in one slot of a cluster."""
    return b"{ms:%b}:" % name.encode("utf-8", "surrogatepass")


def keys_of(name: str) -> tuple[bytes, ...]:
    """Return the keys of a mailbox in the order of the library."""
    base = base_of(name)
    return tuple(base + key.encode() for key in _KEYS)


def micros(seconds: float) -> int:
    """Convert seconds to the microseconds of the library."""
    return round(seconds * MICRO)


# ---------------------------------------------------------------------------------------------------- how a message is kept


def head_of(envelope: Envelope) -> bytes:
    """Return what is kept before the body: ``-``, or ``+`` and reply address and headers as a line of JSON."""
    if envelope.reply_to is None and not envelope.headers:
        return PLAIN
    details: dict[str, Any] = {"h": dict(envelope.headers)} if envelope.headers else {}
    if envelope.reply_to is not None:
        details["r"] = envelope.reply_to
    return b"+%b\n" % json.dumps(details, separators=(",", ":")).encode()


def read_message(value: bytes) -> tuple[float, bytes, str | None, Mapping[str, str]]:
    """Return the time of sending (POSIX), body, reply_to and headers.

    :raises SerializationError: no mailbox wrote this.
    """
    try:
        _, sent, _, rest = value.split(b"|", 3)
        at = int(sent) / MICRO
        if rest[:1] == PLAIN:
            return at, rest[1:], None, {}
        line, _, body = rest[1:].partition(b"\n")
        details = json.loads(line)
        reply_to, headers = details.get("r"), details.get("h", {})
        strings = all(isinstance(known, str) for known in headers.values())
        if rest[:1] != b"+" or not strings or not (reply_to is None or isinstance(reply_to, str)):
            raise ValueError
    except (ValueError, AttributeError, RecursionError):
        raise SerializationError(UNREADABLE.error) from None
    return at, body, reply_to, headers


def claimed_at(receipt: bytes) -> int:
    """Return when a claim was made: no two claims of a mailbox are equal, and later ones are greater."""
    return int(receipt.partition(b".")[0])


def delivery_of(
    token: bytes, value: bytes, details: dict[bytes, bytes] | None, leased_at: float
) -> tuple[Delivery, bool]:
    """Read a delivery and return whether its value is readable. ``details`` is what only some messages have."""
    receipt = token.decode()
    tick, _, _, spot = receipt.split(".", 3)
    claimed, message_id = int(tick) / MICRO, spot[16:]
    try:
        sent, body, reply_to, headers = read_message(value)
    except SerializationError:
        return Delivery(message_id, value, receipt, 1, 1, 0.0, claimed), False
    delivery = Delivery(message_id, body, receipt, 1, 1, sent, claimed, reply_to, headers, None, leased_at)
    if details is not None:
        if b"b" in details:
            ended, charged, first = _numbers(details[b"b"], 3)
            delivery.delivery_count, delivery.attempt = ended + 1, charged + 1
            delivery.first_received_at = first / MICRO
        delivery.checkpoint = details.get(b"c")
        delivery.history = details[b"h"].decode("utf-8", "replace") if b"h" in details else None
    return delivery, True


def _numbers(text: bytes, count: int) -> list[int]:
    """Return ``count`` numbers, with 0 for each that is missing or was written by no mailbox."""
    parts = text.split()[:count] + [b"0"] * (count - len(text.split()))
    return [int(part) if part.isdigit() and len(part) < LONGEST_NUMBER else 0 for part in parts]


def _dead_letter(
    message_id: bytes, value: bytes, counts: bytes, reason: bytes, checkpoint: bytes | None, history: bytes | None
) -> tuple[Delivery, Dead, float]:
    """Read a dead letter; return it, why it is dead, and when it died (POSIX)."""
    try:
        sent, body, reply_to, headers = read_message(value)
    except SerializationError:
        sent, body, reply_to, headers = 0.0, value, None, {}
    ended, charged, first, died = _numbers(counts, 4)
    name = message_id.decode("utf-8", "replace")
    delivery = Delivery(name, body, "", ended, charged, sent, first / MICRO, reply_to, headers)
    delivery.checkpoint = checkpoint
    delivery.history = None if history is None else history.decode("utf-8", "replace")
    return delivery, _read_reason(reason), died / MICRO


def _write_reason(dead: Dead) -> str:
    parts = (dead.error, dead.error_type, dead.traceback)  # errors quote anything, also what is no valid text
    return json.dumps([part.encode("utf-8", "backslashreplace").decode() for part in parts])


def _read_reason(reason: bytes) -> Dead:
    if not reason:
        return EXPIRED
    try:
        error, error_type, traceback = json.loads(reason)
    except (ValueError, TypeError, RecursionError):
        return UNREADABLE
    return Dead(str(error), str(error_type), str(traceback))


# -------------------------------------------------------------------------------------------------------------- operations


class Operation(Command):
    """One operation of a batch: its name and arguments in the library.

    ``order`` is its place in a batch: what ends messages first, then sends, then claims.

    ``kind``: neighbours of one kind are written as one operation, by :meth:`write_group`; None: it is written alone.

    ``retried``: it is done with the next call if its call fails; to do it twice harms nothing.

    ``size``: bytes of its longest argument, ``noun`` what that is. A server closes the connection, and so fails the whole
    batch, for an argument that is too long.
    """

    __slots__ = ("arguments",)
    order: ClassVar[int] = 0
    retried: ClassVar[bool] = False
    noun: ClassVar[str] = ""
    size: int = 0

    def __init__(self, *arguments: Argument) -> None:
        super().__init__()
        self.arguments = arguments

    @property
    def kind(self) -> Hashable:
        return None

    def check_size(self, longest: int) -> None:
        """Raise :class:`SerializationError` if an argument has more bytes than ``longest``."""
        check_size(self.noun, self.size, longest, "this Redis server takes (proto-max-bulk-len)")

    def write_group(self, call: FunctionCall, group: Sequence[Any]) -> None:
        """Write the operations of ``group``, of which this is the first."""
        call.arguments += self.arguments

    def take_group(self, call: FunctionCall, result: Any, group: Sequence[Any]) -> None:
        """Set ``result`` or ``error`` of each operation of ``group``."""
        self.take(result)

    def take(self, result: Any) -> None:
        """Set ``result`` or ``error``."""
        self.result = result


class Open(Operation):
    """Make the mailbox known, so that a transient one exists; results in the obstacles to its operations."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__("open")

    def take(self, result: Any) -> None:
        self.result = [str(obstacle, "utf-8", "replace") for obstacle in result]


class Send(Operation):
    """Store all messages or none, if there is room for them; results in the ids.

    The result is None if the library has to do more that is due before it can tell.
    """

    __slots__ = ("capacity", "envelopes", "ids", "keyed", "size")
    order = 5
    noun = "a message"

    def __init__(self, envelopes: list[Envelope], capacity: int | None) -> None:
        super().__init__()
        self.envelopes = envelopes
        self.capacity = capacity
        self.keyed = False
        for envelope in envelopes:
            if envelope.dedup_key is not None:
                self.keyed = True
                break
        parts: list[Argument] = []  # id, value and, if one message has a key, the key of each
        self.ids: list[str] = []
        self.size = 0
        for envelope in envelopes:
            head = head_of(envelope) if envelope.headers or envelope.reply_to is not None else PLAIN
            value = head + envelope.body
            self.size = max(self.size, len(value))
            self.ids.append(envelope.message_id)
            parts += (envelope.message_id, value)
            if self.keyed:
                key = (envelope.dedup_key or "").encode("utf-8", "surrogatepass")
                self.size = max(self.size, len(key))
                parts.append(key)
        self.arguments = tuple(parts)

    @property
    def kind(self) -> Hashable:
        if self.capacity is not None or len(self.envelopes) != 1 or self.keyed:
            return None
        envelope = self.envelopes[0]
        return envelope.priority, envelope.delay, envelope.expires_in

    def write_group(self, call: FunctionCall, group: Sequence[Send]) -> None:
        first = self.envelopes[0]  # the messages of one send have all but body, headers and key in common
        expires = 0 if first.expires_in is None else max(1, micros(first.expires_in))
        count = len(self.envelopes) if len(group) == 1 else len(group)
        call.arguments += ("put", count, -first.priority, micros(first.delay), expires)
        call.arguments += (-1 if self.capacity is None else self.capacity, int(self.keyed))
        for send in group:
            call.arguments += send.arguments

    def take_group(self, call: FunctionCall, result: Any, group: Sequence[Send]) -> None:
        problem = result[0] if result else None
        if problem == b"full" and self.capacity is not None:
            self.error = full(result[1], self.capacity, result[2])
        elif problem == b"again":
            self.result = None
        elif result and problem != b"oom":
            self.result = [str(message_id, "utf-8", "replace") for message_id in result]
        else:
            for send in group:
                send.result = send.ids
                if problem is not None:
                    send.error = MailboxConnectionError(
                        "the Redis server's memory is full (OOM): let workers drain it, or raise maxmemory"
                    )


# -------------------------------------------------------------------------------------------------------------- settlements


def expired(delivery: Delivery) -> ReceiptHandleExpiredError:
    """Return the error of a call without a lease."""
    return ReceiptHandleExpiredError(
        f"message {delivery.message_id}: the lease of delivery {delivery.delivery_count} has run out, or it was settled"
    )


class Acknowledge(Operation):
    """End messages as done; results in the errors of those that were refused, by their number."""

    __slots__ = ("deliveries",)
    order = 1
    kind = "ack"

    def __init__(self, deliveries: list[Delivery]) -> None:
        super().__init__()
        self.deliveries = deliveries
        self.result: dict[int, Exception] = {}

    def write_group(self, call: FunctionCall, group: Sequence[Acknowledge]) -> None:
        receipts = [delivery.receipt_handle for ack in group for delivery in ack.deliveries]
        call.arguments += ("ack", len(receipts), *receipts)

    def take_group(self, call: FunctionCall, result: list[int], group: Sequence[Acknowledge]) -> None:
        if result:
            places = [(ack, number) for ack in group for number in range(len(ack.deliveries))]
            for place in result:
                ack, number = places[place]
                ack.result[number] = expired(ack.deliveries[number])


class OfDelivery(Operation):
    """An operation that only the holder of a lease may do."""

    __slots__ = ("delivery",)
    order = 2

    def __init__(self, delivery: Delivery, *arguments: Argument) -> None:
        super().__init__(*arguments)
        self.delivery = delivery

    def take(self, result: Any) -> None:
        if not result:
            self.error = expired(self.delivery)


class Nack(OfDelivery):
    """Return a message to be delivered again: a nack, or a release if it is not charged."""

    __slots__ = ()

    def __init__(self, delivery: Delivery, how: Return) -> None:
        charge, front = int(how.charge), int(how.front)
        super().__init__(delivery, "back", delivery.receipt_handle, micros(how.delay), charge, front, how.history or "")


class Extend(OfDelivery):
    """Let the lease last longer."""

    __slots__ = ()

    def __init__(self, delivery: Delivery, timeout: float) -> None:
        super().__init__(delivery, "extend", delivery.receipt_handle, micros(timeout))


class SaveCheckpoint(OfDelivery):
    """Keep ``state`` for the next delivery."""

    __slots__ = ("size",)
    noun = "a checkpoint"

    def __init__(self, delivery: Delivery, state: bytes) -> None:
        super().__init__(delivery, "checkpoint", delivery.receipt_handle, state)
        self.size = len(state)


class _WithReply(OfDelivery):
    """A settlement with which a reply leaves, if there is one, to the mailbox that is named in it."""

    __slots__ = ("reply", "size", "value")
    noun = "a reply"

    def __init__(self, delivery: Delivery, reply: Envelope | None, *arguments: Argument) -> None:
        super().__init__(delivery, *arguments)
        self.reply = reply
        self.value = b"" if reply is None else head_of(replace(reply, reply_to=None)) + reply.body
        self.size = len(self.value)

    def write_group(self, call: FunctionCall, group: Sequence[Operation]) -> None:
        call.arguments += self.arguments
        reply = self.reply
        if reply is None:
            call.arguments.append(-1)
        else:
            call.arguments += (call.number(reply.reply_to or ""), -reply.priority, reply.message_id, self.value)


class ReplyAndAck(_WithReply):
    """End a message as done, with a reply."""

    __slots__ = ()

    def __init__(self, delivery: Delivery, reply: Envelope) -> None:
        super().__init__(delivery, reply, "answer", delivery.receipt_handle)


class MoveToDeadLetters(_WithReply):
    """Dead-letter a message; the reply tells the requester so."""

    __slots__ = ()

    def __init__(self, delivery: Delivery, dead: Dead, reply: Envelope | None = None) -> None:
        reason = _write_reason(dead)
        super().__init__(delivery, reply, "bury", delivery.receipt_handle, reason, dead.history or "")


# ------------------------------------------------------------------------------------------------------ claims and waiting


class Claim(Operation):
    """Claim pending messages; results in deliveries. ``again``: the library has to do more that is due first.

    ``claimant`` marks the receipts. ``waits``: it is put on the list of waiters if nothing is pending; with ``others``, more
    receives of this mailbox wait, and it is put there in any case.
    """

    __slots__ = ("again", "claimant", "limit", "others", "unreadable", "visibility", "waits")
    first = True
    order = 8

    def __init__(self, limit: int, visibility: float, claimant: str, waits: bool, others: bool) -> None:
        super().__init__()
        self.limit = limit
        self.visibility = visibility
        self.claimant = claimant
        self.waits = waits
        self.others = others
        self.unreadable: list[Delivery] = []
        self.again = False

    @property
    def kind(self) -> Hashable:
        return self.visibility

    def write_group(self, call: FunctionCall, group: Sequence[Claim]) -> None:
        limit, waiting, others = 0, 0, False
        for claim in group:
            limit += claim.limit
            if claim.waits:
                waiting += 1
                others = others or claim.others or waiting > 1
        visible = micros(self.visibility)
        waiter = call.waiter(visible) if waiting else ""
        call.arguments += ("claim", limit, visible, self.claimant, waiter, int(others))

    def take_group(self, call: FunctionCall, result: Any, group: Sequence[Claim]) -> None:
        """Share the messages out in the order of the claims."""
        receipts, values, extras, *again = result
        details: dict[int, dict[bytes, bytes]] = {}
        for at in range(0, len(extras), 3):
            details.setdefault(extras[at], {})[extras[at + 1]] = extras[at + 2]
        if receipts:
            call.last_claim = max(call.last_claim, claimed_at(receipts[-1]))
        start = 0
        for claim in group:
            claim.result, claim.again = [], bool(again)
            for number in range(start, min(start + claim.limit, len(receipts))):
                delivery, readable = delivery_of(receipts[number], values[number], details.get(number), call.leased_at)
                (claim.result if readable else claim.unreadable).append(delivery)
            start += claim.limit


class UndoClaims(Operation):
    """Undo claims as if they had not been made."""

    __slots__ = ()
    retried = True

    def __init__(self, receipts: list[str]) -> None:
        super().__init__("unclaim", len(receipts), *receipts)


class UndoLostClaims(Operation):
    """Undo what ``claimant`` claimed after the claim made at ``last_claim``: the connection broke before the answer came."""

    __slots__ = ()
    retried = True

    def __init__(self, claimant: str, last_claim: int) -> None:
        super().__init__("unheard", claimant, last_claim)


class WakeOthers(Operation):
    """Wake ``count`` other processes, as this one was woken for messages that no receive here takes."""

    __slots__ = ()
    asks_only = True
    order = 7

    def __init__(self, count: int) -> None:
        super().__init__("pass", count)


class Sweep(Operation):
    """Let the library do what is due, for the receives that wait for it.

    ``waiter`` is called as it leaves: under which name, if any, this process is to be on the list of waiters.
    """

    __slots__ = ("waiter",)
    asks_only = True
    order = 9

    def __init__(self, waiter: Callable[[], str]) -> None:
        super().__init__()
        self.waiter = waiter

    def write_group(self, call: FunctionCall, group: Sequence[Operation]) -> None:
        call.arguments += ("look", self.waiter())


class Leave(Operation):
    """Remove ``waiters`` from the list, and undo the claims that were sent to listener ``name`` after ``last_claim``.

    ``last_claim`` is when the last message was claimed that came there; ``left`` is told that of the last one that is undone.
    ``for_good``: nothing listens there any more.
    """

    __slots__ = ("for_good", "last_claim", "left", "name", "waiters")
    asks_only = True
    retried = True

    def __init__(
        self, name: str, last_claim: int, waiters: list[str], left: Callable[[str, int], None], *, for_good: bool
    ) -> None:
        super().__init__("leave", name, last_claim, int(for_good), len(waiters), *waiters)
        self.name = name
        self.last_claim = last_claim
        self.waiters = waiters
        self.left = left
        self.for_good = for_good

    def take(self, result: Any) -> None:
        self.left(self.name, result)


class RemoveWaiters(Operation):
    """Remove ``waiters`` from the list: no receive here waits under these names. What is on its way to them still arrives."""

    __slots__ = ("waiters",)
    asks_only = True
    retried = True

    def __init__(self, waiters: set[str]) -> None:
        super().__init__("unlist", len(waiters), *sorted(waiters))
        self.waiters = waiters


def joined(retried: list[Operation]) -> list[Operation]:
    """Join operations that are to be retried: while calls fail, each receive that ends adds a :class:`Leave`.

    Until a listener has left, no receive waits to be sent something there. So what came after the first one left is undone.
    """
    others: list[Operation] = []
    leaves: dict[str, Leave] = {}
    removed: set[str] = set()
    for command in retried:
        if type(command) is RemoveWaiters:
            removed |= command.waiters
        elif type(command) is not Leave:
            others.append(command)
        elif command.name not in leaves:
            leaves[command.name] = command
        else:
            one = leaves[command.name]
            leaves[command.name] = Leave(
                one.name,
                min(one.last_claim, command.last_claim),
                sorted({*one.waiters, *command.waiters}),
                one.left,
                for_good=one.for_good or command.for_good,
            )
    if removed:
        others.append(RemoveWaiters(removed))
    return [*others, *leaves.values()]


# -------------------------------------------------------------------------------------- inspection, purges and dead letters


def _encoded(message_ids: list[str] | None) -> tuple[Argument, ...]:
    if message_ids is None:
        return (-1,)
    return (len(message_ids), *(message_id.encode("utf-8", "surrogatepass") for message_id in message_ids))


class Cancel(Operation):
    """Cancel the message with that id; results in a :class:`Cancelled`."""

    __slots__ = ()
    order = 3

    def __init__(self, message_id: str) -> None:
        super().__init__("cancel", message_id.encode("utf-8", "surrogatepass"))

    def take(self, result: Any) -> None:
        found, value = result
        if not found:
            self.result = UNKNOWN
            return
        outcome = CancelOutcome.REMOVED if found == 1 else CancelOutcome.CANCELLED
        try:
            _, _, reply_to, headers = read_message(value)
        except SerializationError:
            reply_to, headers = None, {}
        self.result = Cancelled(outcome, reply_to, headers)


class Purge(Operation):
    """Drop all messages that are not dead; results in their number, or -1 if more that is due must be done first."""

    __slots__ = ()
    order = 4

    def __init__(self) -> None:
        super().__init__("purge")


class Replay(Operation):
    """Make dead letters pending again; results in their number, or -1 if more that is due must be done first.

    Without ids it takes the ``most`` oldest.
    """

    __slots__ = ("capacity",)
    order = 6

    def __init__(self, message_ids: list[str] | None, most: int, capacity: int | None) -> None:
        super().__init__("replay", -1 if capacity is None else capacity, most, *_encoded(message_ids))
        self.capacity = capacity

    def take(self, result: Any) -> None:
        if isinstance(result, list):
            self.error = full(result[1], self.capacity or 0, result[2])
        else:
            self.result = result


class PurgeDead(Operation):
    """Drop dead letters; results in their number, or -1 if more that is due must be done first.

    Without ids it takes the ``most`` oldest.
    """

    __slots__ = ()
    order = 6

    def __init__(self, message_ids: list[str] | None, most: int) -> None:
        super().__init__("discard", most, *_encoded(message_ids))


class Count(Operation):
    """Results in :class:`Counts`, or None if more that is due must be done first."""

    __slots__ = ()
    order = 10

    def __init__(self) -> None:
        super().__init__("counts")

    def take(self, result: Any) -> None:
        self.result = Counts(*result[:5], queue_age=result[5] / MICRO) if result else None


class ReadDead(Operation):
    """Results in dead letters, or None if more that is due must be done first."""

    __slots__ = ()
    order = 10

    def take(self, result: Any) -> None:
        self.result = None if result == -1 else [_dead_letter(*row) for row in result]


class ListDead(ReadDead):
    """Read a page of dead letters, behind the one with id ``after``."""

    __slots__ = ()

    def __init__(self, limit: int, after: str | None) -> None:
        super().__init__("list", limit, (after or "").encode("utf-8", "surrogatepass"))


class FindDead(ReadDead):
    """Read the dead letters with these ids."""

    __slots__ = ()

    def __init__(self, message_ids: list[str]) -> None:
        super().__init__("find", *_encoded(message_ids))


class Recover(Operation):
    """Mend what was lost with a deleted key, if that is due; it is every ``interval`` seconds, for all processes together.

    Results in how many messages and dead letters were found again, and in how many seconds there is more to do.
    """

    __slots__ = ()
    asks_only = True
    order = 11

    def __init__(self, interval: float) -> None:
        super().__init__("recover", micros(interval))

    def take(self, result: Any) -> None:
        self.result = result[0], result[1] / MICRO


class Drop(Operation):
    """Drop the mailbox and everything in it."""

    __slots__ = ()
    order = 12

    def __init__(self) -> None:
        super().__init__("drop")
