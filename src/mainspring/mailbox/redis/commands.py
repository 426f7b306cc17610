"""What a Redis mailbox asks of its library: one class an operation, which writes its arguments and reads its result.

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
    from collections.abc import Callable, Mapping

    from mainspring.mailbox.message import Envelope, Return

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
    """What the keys and channels of a mailbox begin with: all in one slot of a cluster."""
    return b"{ms:%b}:" % name.encode("utf-8", "surrogatepass")


def keys_of(name: str) -> tuple[bytes, ...]:
    """The keys of a mailbox, in the order in which the library knows them."""
    base = base_of(name)
    return tuple(base + key.encode() for key in _KEYS)


def micro(seconds: float) -> int:
    """Seconds as the library counts them."""
    return round(seconds * MICRO)


def head_of(envelope: Envelope) -> bytes:
    """What a message is kept with before its body: ``-``, or ``+`` and what few messages have as a line of JSON."""
    if envelope.reply_to is None and not envelope.headers:
        return PLAIN
    few: dict[str, Any] = {"h": dict(envelope.headers)} if envelope.headers else {}
    if envelope.reply_to is not None:
        few["r"] = envelope.reply_to
    return b"+%b\n" % json.dumps(few, separators=(",", ":")).encode()


def read(value: bytes) -> tuple[float, bytes, str | None, Mapping[str, str]]:
    """When it was sent (POSIX), body, reply_to and headers. Raises :class:`SerializationError` for what nobody can read."""
    try:
        _, sent, _, rest = value.split(b"|", 3)
        at = int(sent) / MICRO
        if rest[:1] == PLAIN:
            return at, rest[1:], None, {}
        line, _, body = rest[1:].partition(b"\n")
        few = json.loads(line)
        reply_to, headers = few.get("r"), few.get("h", {})
        strings = all(isinstance(known, str) for known in headers.values())
        if rest[:1] != b"+" or not strings or not (reply_to is None or isinstance(reply_to, str)):
            raise ValueError
    except (ValueError, AttributeError, RecursionError):
        raise SerializationError(UNREADABLE.error) from None
    return at, body, reply_to, headers


def reason(dead: Dead) -> str:
    """Why a message is dead, as it is kept. Errors quote whatever went wrong, also what is no valid text."""
    parts = (dead.error, dead.error_type, dead.traceback)
    return json.dumps([part.encode("utf-8", "backslashreplace").decode() for part in parts])


def delivered(token: bytes, value: bytes, few: dict[bytes, bytes] | None, leased_at: float) -> tuple[Delivery, bool]:
    """A delivery, as the library tells it (``few``: what only some have); and whether its value can be read."""
    receipt = token.decode()
    tick, _, _, spot = receipt.split(".", 3)
    claimed, message_id = int(tick) / MICRO, spot[16:]
    try:
        sent, body, reply_to, headers = read(value)
    except SerializationError:
        return Delivery(message_id, value, receipt, 1, 1, 0.0, claimed), False
    delivery = Delivery(message_id, body, receipt, 1, 1, sent, claimed, reply_to, headers, None, leased_at)
    if few is not None:
        if b"b" in few:
            ended, charged, first = _numbers(few[b"b"], 3)
            delivery.delivery_count, delivery.attempt = ended + 1, charged + 1
            delivery.first_received_at = first / MICRO
        delivery.checkpoint = few.get(b"c")
        delivery.history = few[b"h"].decode("utf-8", "replace") if b"h" in few else None
    return delivery, True


def _numbers(text: bytes, count: int) -> list[int]:
    """Return ``count`` numbers, with 0 for each that is missing or was written by no mailbox."""
    parts = text.split()[:count] + [b"0"] * (count - len(text.split()))
    return [int(part) if part.isdigit() and len(part) < LONGEST_NUMBER else 0 for part in parts]


def _read_reason(why: bytes) -> Dead:
    """Why a message is dead; where nothing is kept of it, it expired."""
    if not why:
        return EXPIRED
    try:
        error, error_type, traceback = json.loads(why)
    except (ValueError, TypeError, RecursionError):
        return UNREADABLE
    return Dead(str(error), str(error_type), str(traceback))


def claimed_at(receipt: str) -> int:
    """When a claim was made: no two claims of a mailbox are equal, and later ones are greater."""
    return int(receipt.partition(".")[0])


def letter(
    message_id: bytes, value: bytes, marks: bytes, why: bytes, checkpoint: bytes | None, history: bytes | None
) -> tuple[Delivery, Dead, float]:
    """A dead letter, as the library tells it; and when it died (POSIX)."""
    try:
        sent, body, reply_to, headers = read(value)
    except SerializationError:
        sent, body, reply_to, headers = 0.0, value, None, {}
    ended, charged, first, died = _numbers(marks, 4)
    delivery = Delivery(
        message_id.decode("utf-8", "replace"),
        body,
        "",
        ended,
        charged,
        sent,
        first / MICRO,
        reply_to,
        headers,
    )
    delivery.checkpoint = checkpoint
    delivery.history = None if history is None else history.decode("utf-8", "replace")
    return delivery, _read_reason(why), died / MICRO


Argument = str | int | bytes
_THE_SERVER = "this Redis server takes (proto-max-bulk-len)"


def expired(delivery: Delivery) -> ReceiptHandleExpiredError:
    """The error of a call without a lease."""
    return ReceiptHandleExpiredError(
        f"message {delivery.message_id}: the lease of delivery {delivery.delivery_count} has run out, or it was settled"
    )


# -------------------------------------------------------------------------------------------------------------- operations


class Operation(Command):
    """One operation. ``turn`` says where in a batch it is done: what ends first, then what is new, then the claims.

    ``owed``: it is to be done whatever becomes of the call that it leaves with; to do it twice harms nothing.
    """

    __slots__ = ()
    turn = 0
    owed: ClassVar[bool] = False

    def write(self, out: list[Argument], number: Callable[[str], int]) -> None:
        """Add its arguments; ``number(name)`` gives the number of another mailbox of the batch."""
        raise NotImplementedError

    def take(self, result: Any) -> None:
        """Set ``result`` or ``error`` from what the library said."""
        self.result = result

    def check(self, longest: int) -> None:
        """Raise :class:`SerializationError` where an argument has more bytes than ``longest``, the most that the server takes.

        It would hang up: on all operations of the batch.
        """


class OfDelivery(Operation):
    """One that only the holder of a lease may do."""

    __slots__ = ("delivery",)
    turn = 2

    def __init__(self, delivery: Delivery) -> None:
        super().__init__()
        self.delivery = delivery

    def take(self, result: Any) -> None:
        if not result:
            self.error = expired(self.delivery)


class Open(Operation):
    """Make the mailbox known, so that a transient one exists; results in what stands in the way of its operations."""

    __slots__ = ()

    def write(self, out: list[Argument], number: Callable[[str], int]) -> None:
        out.append("open")

    def take(self, result: Any) -> None:
        self.result = [str(obstacle, "utf-8", "replace") for obstacle in result]


class Acknowledge(Operation):
    """The messages are done; results in those that were refused, by their number. Those of a batch are written as one."""

    __slots__ = ("deliveries",)
    turn = 1

    def __init__(self, deliveries: list[Delivery]) -> None:
        super().__init__()
        self.deliveries = deliveries
        self.result: dict[int, Exception] = {}


def acknowledge(acks: list[Acknowledge], out: list[Argument]) -> Callable[[list[int]], None]:
    """Write all of them; what takes the result, the numbers of the messages that were refused."""
    receipts = [delivery.receipt_handle for ack in acks for delivery in ack.deliveries]
    out += ("ack", len(receipts), *receipts)

    def take(refused: list[int]) -> None:
        if refused:
            places = [(ack, number) for ack in acks for number in range(len(ack.deliveries))]
            for place in refused:
                ack, number = places[place]
                ack.result[number] = expired(ack.deliveries[number])

    return take


class _Answering(OfDelivery):
    """One with which a reply leaves, where there is one, to the mailbox of the name in it."""

    __slots__ = ("reply", "value")

    def __init__(self, delivery: Delivery, reply: Envelope | None) -> None:
        super().__init__(delivery)
        self.reply = reply
        self.value = b"" if reply is None else head_of(replace(reply, reply_to=None)) + reply.body

    def check(self, longest: int) -> None:
        check_size("a reply", len(self.value), longest, _THE_SERVER)

    def _write_reply(self, out: list[Argument], number: Callable[[str], int]) -> None:
        reply = self.reply
        if reply is None:
            out.append(-1)
        else:
            out += (number(reply.reply_to or ""), -reply.priority, reply.message_id, self.value)


class Answer(_Answering):
    """The message is done, and this is its reply."""

    __slots__ = ()

    def write(self, out: list[Argument], number: Callable[[str], int]) -> None:
        out += ("answer", self.delivery.receipt_handle)
        self._write_reply(out, number)


class GiveBack(OfDelivery):
    """It is to be done again."""

    __slots__ = ("how",)

    def __init__(self, delivery: Delivery, how: Return) -> None:
        super().__init__(delivery)
        self.how = how

    def write(self, out: list[Argument], number: Callable[[str], int]) -> None:
        how = self.how
        out += (
            "back",
            self.delivery.receipt_handle,
            micro(how.delay),
            int(how.charge),
            int(how.front),
            how.history or "",
        )


class Bury(_Answering):
    """It is given up; the reply tells the requester so."""

    __slots__ = ("dead",)

    def __init__(self, delivery: Delivery, dead: Dead, reply: Envelope | None = None) -> None:
        super().__init__(delivery, reply)
        self.dead = dead

    def write(self, out: list[Argument], number: Callable[[str], int]) -> None:
        dead = self.dead
        out += ("bury", self.delivery.receipt_handle, reason(dead), dead.history or "")
        self._write_reply(out, number)


class Extend(OfDelivery):
    """Its lease shall last longer."""

    __slots__ = ("timeout",)

    def __init__(self, delivery: Delivery, timeout: float) -> None:
        super().__init__(delivery)
        self.timeout = timeout

    def write(self, out: list[Argument], number: Callable[[str], int]) -> None:
        out += ("extend", self.delivery.receipt_handle, micro(self.timeout))


class SaveCheckpoint(OfDelivery):
    """Keep this for its next delivery."""

    __slots__ = ("state",)

    def __init__(self, delivery: Delivery, state: bytes) -> None:
        super().__init__(delivery)
        self.state = state

    def check(self, longest: int) -> None:
        check_size("a checkpoint", len(self.state), longest, _THE_SERVER)

    def write(self, out: list[Argument], number: Callable[[str], int]) -> None:
        out += ("checkpoint", self.delivery.receipt_handle, self.state)


class Put(Operation):
    """Store all or none, while no more than ``capacity`` messages wait; results in the ids, or None where first more must be
    done that is due.

    Simple ones of a batch that are alike are written as one (see ``put_alike``).
    """

    __slots__ = ("capacity", "envelopes", "keyed", "messages")
    turn = 5

    def __init__(self, envelopes: list[Envelope], capacity: int | None) -> None:
        super().__init__()
        self.envelopes = envelopes
        self.capacity = capacity
        self.keyed = any(envelope.dedup_key is not None for envelope in envelopes)
        self.messages: list[str | bytes] = []  # id, value and, where one is keyed, the key of each
        messages = self.messages
        for envelope in envelopes:
            head = head_of(envelope) if envelope.headers or envelope.reply_to is not None else PLAIN
            messages += (envelope.message_id, head + envelope.body)
            if self.keyed:
                messages.append((envelope.dedup_key or "").encode("utf-8", "surrogatepass"))

    @property
    def kind(self) -> tuple[int, float, float | None] | None:
        """What a simple one shares with others like it; None where it is not simple."""
        if self.capacity is not None or len(self.envelopes) != 1 or self.keyed:
            return None
        envelope = self.envelopes[0]
        return envelope.priority, envelope.delay, envelope.expires_in

    def check(self, longest: int) -> None:
        check_size("a message", max(map(len, self.messages)), longest, _THE_SERVER)

    def write(self, out: list[Argument], number: Callable[[str], int]) -> None:
        _write_puts([self], self.capacity, out)

    def take(self, result: Any) -> None:
        if result and result[0] == b"oom":
            self.error = _no_memory()
        elif result and result[0] == b"full" and self.capacity is not None:
            self.error = full(result[1], self.capacity, result[2])
        elif result and result[0] == b"again":
            self.result = None
        elif result:
            self.result = [str(message_id, "utf-8", "replace") for message_id in result]
        else:
            self.result = [envelope.message_id for envelope in self.envelopes]


def put_alike(puts: list[Put], out: list[Argument]) -> Callable[[Any], None]:
    """Write simple ones of one kind; what takes the result."""
    _write_puts(puts, None, out)

    def take(result: Any) -> None:
        for put in puts:
            if result:
                put.error = _no_memory()
            else:
                put.result = [put.envelopes[0].message_id]

    return take


def _no_memory() -> MailboxConnectionError:
    return MailboxConnectionError("the Redis server's memory is full (OOM): let workers drain it, or raise maxmemory")


def _write_puts(puts: list[Put], capacity: int | None, out: list[Argument]) -> None:
    """Those of one put have all but body, headers and key in common (see ``Mailbox.send_many``)."""
    first = puts[0].envelopes[0]
    expires = 0 if first.expires_in is None else max(1, micro(first.expires_in))
    out += ("put", sum(len(put.envelopes) for put in puts), -first.priority, micro(first.delay), expires)
    out += (-1 if capacity is None else capacity, int(puts[0].keyed))
    for put in puts:
        out += put.messages


class Unclaim(Operation):
    """Take claims back as if they had not been made."""

    __slots__ = ("receipts",)
    owed = True

    def __init__(self, receipts: list[str]) -> None:
        super().__init__()
        self.receipts = receipts

    def write(self, out: list[Argument], number: Callable[[str], int]) -> None:
        out += ("unclaim", len(self.receipts), *self.receipts)


class Unheard(Operation):
    """Take back what ``claimant`` claimed after the instant ``known``: the connection broke before it heard of it."""

    __slots__ = ("claimant", "known")
    owed = True

    def __init__(self, claimant: str, known: int) -> None:
        super().__init__()
        self.claimant = claimant
        self.known = known

    def write(self, out: list[Argument], number: Callable[[str], int]) -> None:
        out += ("unheard", self.claimant, self.known)


class Pass(Operation):
    """This process was woken for nothing: so many others shall look."""

    __slots__ = ("count",)
    asks_only = True
    turn = 7

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def write(self, out: list[Argument], number: Callable[[str], int]) -> None:
        out += ("pass", self.count)


class Claim(Operation):
    """Lease what is there; results in deliveries. ``again``: first more must be done that is due.

    ``claimant`` marks the receipts. ``waits``: it is put on the list of waiters where nothing is there; with ``others``,
    more of its receives wait, whatever is there.
    """

    __slots__ = ("again", "claimant", "limit", "others", "unreadable", "visibility", "waits")
    first = True
    turn = 8

    def __init__(self, limit: int, visibility: float, claimant: str, waits: bool, others: bool) -> None:
        super().__init__()
        self.limit = limit
        self.visibility = visibility
        self.claimant = claimant
        self.waits = waits
        self.others = others
        self.unreadable: list[Delivery] = []
        self.again = False


def claim_alike(
    claims: list[Claim], leased_at: float, waiter: Callable[[int], str], out: list[Argument]
) -> Callable[[Any], None]:
    """Write claims of one visibility as one; what takes the result, and shares it out in the order of the calls."""
    first = claims[0]
    waiting = [claim for claim in claims if claim.waits]
    others = len(waiting) > 1 or any(claim.others for claim in waiting)
    visible = micro(first.visibility)
    out += ("claim", sum(claim.limit for claim in claims), visible, first.claimant)
    out += (waiter(visible) if waiting else "", int(others))

    def take(result: Any) -> None:
        receipts, values, extras, *again = result
        start = 0
        few: dict[int, dict[bytes, bytes]] = {}
        for at in range(0, len(extras), 3):
            few.setdefault(extras[at], {})[extras[at + 1]] = extras[at + 2]
        for claim in claims:
            claim.result, claim.again = [], bool(again)
            for number in range(start, min(start + claim.limit, len(receipts))):
                delivery, readable = delivered(receipts[number], values[number], few.get(number), leased_at)
                (claim.result if readable else claim.unreadable).append(delivery)
            start += claim.limit

    return take


class Look(Operation):
    """Let what is due be done, for the receives that wait for it. ``waiter``: says as it leaves who, if any, is to be on the
    list of waiters.
    """

    __slots__ = ("waiter",)
    asks_only = True
    turn = 9

    def __init__(self, waiter: Callable[[], str]) -> None:
        super().__init__()
        self.waiter = waiter

    def write(self, out: list[Argument], number: Callable[[str], int]) -> None:
        out += ("look", self.waiter())


class Leave(Operation):
    """Nobody waits as one of ``waiters`` any more: they go, and so does back what was sent to ``name`` after ``heard``.

    ``heard`` is when the last message was claimed that came there; ``left`` is told that of the last one that has gone back.
    ``for_good``: nobody listens there any more.
    """

    __slots__ = ("for_good", "heard", "left", "name", "waiters")
    asks_only = True
    owed = True

    def __init__(
        self, name: str, heard: int, waiters: list[str], left: Callable[[str, int], None], *, for_good: bool
    ) -> None:
        super().__init__()
        self.name = name
        self.heard = heard
        self.waiters = waiters
        self.left = left
        self.for_good = for_good

    def write(self, out: list[Argument], number: Callable[[str], int]) -> None:
        out += ("leave", self.name, self.heard, int(self.for_good), len(self.waiters), *self.waiters)

    def take(self, result: Any) -> None:
        self.left(self.name, result)


class Unlist(Operation):
    """No receive here wants to be called as one of ``waiters`` any more. What is on its way to them is heard still."""

    __slots__ = ("waiters",)
    asks_only = True
    owed = True

    def __init__(self, waiters: set[str]) -> None:
        super().__init__()
        self.waiters = waiters

    def write(self, out: list[Argument], number: Callable[[str], int]) -> None:
        out += ("unlist", len(self.waiters), *sorted(self.waiters))


def joined(owed: list[Operation]) -> list[Operation]:
    """What is owed, without what one of them says for several: where calls fail for long, each receive that ends leaves.

    Until a listener has left, no receive waits to be sent something there. So what came after the first one left goes back.
    """
    others: list[Operation] = []
    leaves: dict[str, Leave] = {}
    unlisted: set[str] = set()
    for command in owed:
        if type(command) is Unlist:
            unlisted |= command.waiters
        elif type(command) is not Leave:
            others.append(command)
        elif command.name not in leaves:
            leaves[command.name] = command
        else:
            one = leaves[command.name]
            leaves[command.name] = Leave(
                one.name,
                min(one.heard, command.heard),
                sorted({*one.waiters, *command.waiters}),
                one.left,
                for_good=one.for_good or command.for_good,
            )
    if unlisted:
        others.append(Unlist(unlisted))
    return [*others, *leaves.values()]


class Cancel(Operation):
    """End the message of that id; results in a :class:`Cancelled`."""

    __slots__ = ("message_id",)
    turn = 3

    def __init__(self, message_id: str) -> None:
        super().__init__()
        self.message_id = message_id

    def write(self, out: list[Argument], number: Callable[[str], int]) -> None:
        out += ("cancel", self.message_id.encode("utf-8", "surrogatepass"))

    def take(self, result: Any) -> None:
        found, value = result
        if not found:
            self.result = UNKNOWN
            return
        outcome = CancelOutcome.REMOVED if found == 1 else CancelOutcome.CANCELLED
        try:
            _, _, reply_to, headers = read(value)
        except SerializationError:
            reply_to, headers = None, {}
        self.result = Cancelled(outcome, reply_to, headers)


class Purge(Operation):
    """Drop all that is not dead; results in how many, or -1 where first more must be done that is due."""

    __slots__ = ()
    turn = 4

    def write(self, out: list[Argument], number: Callable[[str], int]) -> None:
        out.append("purge")


class Replay(Operation):
    """Make dead letters pending again; results in how many, or -1 where first more must be done that is due. At most ``most``
    of all where no ids are given.
    """

    __slots__ = ("capacity", "ids", "most")
    turn = 6

    def __init__(self, ids: list[str] | None, most: int, capacity: int | None) -> None:
        super().__init__()
        self.ids = ids
        self.most = most
        self.capacity = capacity

    def write(self, out: list[Argument], number: Callable[[str], int]) -> None:
        out += ("replay", -1 if self.capacity is None else self.capacity, self.most)
        _write_ids(self.ids, out)

    def take(self, result: Any) -> None:
        if isinstance(result, list):
            self.error = full(result[1], self.capacity or 0, result[2])
        else:
            self.result = result


class Discard(Operation):
    """Forget dead letters; results in how many, or -1 where first more must be done that is due. At most ``most`` of all
    where no ids are given.
    """

    __slots__ = ("ids", "most")
    turn = 6

    def __init__(self, ids: list[str] | None, most: int) -> None:
        super().__init__()
        self.ids = ids
        self.most = most

    def write(self, out: list[Argument], number: Callable[[str], int]) -> None:
        out += ("discard", self.most)
        _write_ids(self.ids, out)


def _write_ids(ids: list[str] | None, out: list[Argument]) -> None:
    if ids is None:
        out.append(-1)
    else:
        out += (len(ids), *(message_id.encode("utf-8", "surrogatepass") for message_id in ids))


class Count(Operation):
    """Results in :class:`Counts`, or None where first more must be done that is due."""

    __slots__ = ()
    turn = 10

    def write(self, out: list[Argument], number: Callable[[str], int]) -> None:
        out.append("counts")

    def take(self, result: Any) -> None:
        self.result = Counts(*result[:5], queue_age=result[5] / MICRO) if result else None


class ListDead(Operation):
    """Results in a page of dead letters, or None where first more must be done that is due."""

    __slots__ = ("after", "limit")
    turn = 10

    def __init__(self, limit: int, after: str | None) -> None:
        super().__init__()
        self.limit = limit
        self.after = after

    def write(self, out: list[Argument], number: Callable[[str], int]) -> None:
        out += ("list", self.limit, (self.after or "").encode("utf-8", "surrogatepass"))

    def take(self, result: Any) -> None:
        self.result = None if result == -1 else [letter(*row) for row in result]


class FindDead(Operation):
    """Results in the dead letters of those ids, or None where first more must be done that is due."""

    __slots__ = ("ids",)
    turn = 10

    def __init__(self, ids: list[str]) -> None:
        super().__init__()
        self.ids = ids

    def write(self, out: list[Argument], number: Callable[[str], int]) -> None:
        out.append("find")
        _write_ids(self.ids, out)

    def take(self, result: Any) -> None:
        self.result = None if result == -1 else [letter(*row) for row in result]


class Recover(Operation):
    """Mend what was lost with a deleted key, where that is due; looks for it every ``interval`` seconds, as the whole fleet.

    Results in how many messages and dead letters were found again, and in how many seconds there is more to do.
    """

    __slots__ = ("interval",)
    asks_only = True
    turn = 11

    def __init__(self, interval: float) -> None:
        super().__init__()
        self.interval = interval

    def write(self, out: list[Argument], number: Callable[[str], int]) -> None:
        out += ("recover", micro(self.interval))

    def take(self, result: Any) -> None:
        self.result = result[0], result[1] / MICRO


class Drop(Operation):
    """Forget the mailbox and everything in it."""

    __slots__ = ()
    turn = 12

    def write(self, out: list[Argument], number: Callable[[str], int]) -> None:
        out.append("drop")
