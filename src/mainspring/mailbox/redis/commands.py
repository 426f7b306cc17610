"""What a Redis mailbox asks of its library of functions: the arguments of each operation, and how its result is read.

First come the keys of a mailbox, and how a message is kept; then the commands that only Redis has. Then, for each kind of
command, come the function that writes it and the function that reads its result, in one table (``OPERATIONS``).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, Final

from mainspring.errors import MailboxConnectionError, SerializationError
from mainspring.mailbox import batched
from mainspring.mailbox.batched import AcknowledgeMany, Command
from mainspring.mailbox.limits import check_size, full, lease_over
from mainspring.mailbox.message import (
    EXPIRED,
    UNKNOWN,
    UNREADABLE,
    Cancelled,
    CancelOutcome,
    ClaimedMessage,
    Counts,
    Dead,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence

    from mainspring.mailbox.message import Envelope

    Argument = str | int | bytes

_message_id, _dedup_key = attrgetter("message_id"), attrgetter("dedup_key")
_KEYS: Final = (
    "messages",
    "ready",
    "delayed",
    "leases",
    "state",
    "more",
    "dedup",
    "expiry",
    "dead",
    "dead_order",
    "dead_details",
    "waiters",
    "bodies",
)
MICRO: Final = 1_000_000
LONGEST_NUMBER: Final = 20
PLAIN: Final = b"-"
APART: Final = b"@"
"""Stands before the head of a message whose body is kept apart, in the key ``bodies``."""
LARGE: Final = 65_536
"""Bytes above which a body is kept apart."""
MOST_ARGUMENTS: Final = 50_000
"""Of one call, unless a single operation has more: the server serves no other client meanwhile."""
MOST_DEAD: Final = 1_000
"""Dead letters that one operation moves: other callers are to be served in between."""
AGAIN: Final[list[Any]] = []
"""The result of a command if the library has to do more that is due before it can do it: nothing, not even for a claim."""


def base_of(name: str) -> bytes:
    """Return the prefix of the keys and channels of a mailbox, which puts all of them in one slot of a cluster."""
    return b"{ms:%b}:" % encoded(name)


def keys_of(name: str) -> tuple[bytes, ...]:
    """Return the keys of a mailbox in the order of the library."""
    base = base_of(name)
    return tuple(base + key.encode() for key in _KEYS)


def bodies_of(name: str) -> bytes:
    """Return the key of the bodies that are kept apart."""
    return base_of(name) + b"bodies"


def encoded(text: str) -> bytes:
    """Encode a text of a caller's, which may have lone surrogates: such a key or id is like any other."""
    return text.encode("utf-8", "surrogatepass")


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


def read_message(value: bytes) -> tuple[float, bytes | None, str | None, Mapping[str, str]]:
    """Return the time of sending (POSIX), body (None: it is kept apart), reply_to and headers.

    :raises SerializationError: no mailbox wrote this.
    """
    try:
        _, sent, _, rest = value.split(b"|", 3)
        at = int(sent) / MICRO
        if rest[:1] == PLAIN:
            return at, rest[1:], None, {}
        if is_apart := rest[:1] == APART:
            rest = rest[1:]
        if rest == PLAIN:
            return at, None, None, {}
        line, _, body = rest[1:].partition(b"\n")
        details = json.loads(line)
        reply_to, headers = details.get("r"), details.get("h", {})
        strings = all(isinstance(known, str) for known in headers.values())
        if rest[:1] != b"+" or not strings or not (reply_to is None or isinstance(reply_to, str)):
            raise ValueError
    except (ValueError, AttributeError, RecursionError):
        raise SerializationError(UNREADABLE.error) from None
    return at, None if is_apart else body, reply_to, headers


def claimed_at(receipt: bytes) -> int:
    """Return when a claim was made: no two claims of a mailbox are equal, and later ones are greater."""
    return int(receipt.partition(b".")[0])


def delivery_of(token: bytes, value: bytes, details: dict[bytes, bytes] | None, leased_at: float) -> ClaimedMessage:
    """Read a delivery. ``details`` is what only some messages have. Its body is None until :class:`FetchBodies` has it."""
    receipt = token.decode()
    tick, _, _, spot = receipt.split(".", 3)
    claimed, message_id = int(tick) / MICRO, spot[16:]
    try:
        sent, body, reply_to, headers = read_message(value)
    except SerializationError:
        return ClaimedMessage(message_id, value, receipt, 1, 1, 0.0, claimed, is_readable=False)
    delivery = ClaimedMessage(message_id, body, receipt, 1, 1, sent, claimed, reply_to, headers, None, leased_at)
    if details is not None:
        if b"b" in details:
            ended, charged, first = _numbers(details[b"b"], 3)
            delivery.delivery_count, delivery.attempt = ended + 1, charged + 1
            delivery.first_received_at = first / MICRO
        delivery.checkpoint = details.get(b"c")
        delivery.history = details[b"h"].decode("utf-8", "replace") if b"h" in details else None
    return delivery


def _numbers(text: bytes, count: int) -> list[int]:
    """Return ``count`` numbers, with 0 for each that is missing or was written by no mailbox."""
    parts = text.split()[:count] + [b"0"] * (count - len(text.split()))
    return [int(part) if part.isdigit() and len(part) < LONGEST_NUMBER else 0 for part in parts]


def _read_dead(
    message_id: bytes, value: bytes, counts: bytes, reason: bytes, checkpoint: bytes | None, history: bytes | None
) -> tuple[ClaimedMessage, Dead, float]:
    """Read a dead letter; return it, why it is dead, and when it died (POSIX)."""
    try:
        sent, body, reply_to, headers = read_message(value)
    except SerializationError:
        sent, body, reply_to, headers = 0.0, value, None, {}
    ended, charged, first, died = _numbers(counts, 4)
    name = message_id.decode("utf-8", "replace")
    delivery = ClaimedMessage(
        name, value if body is None else body, "", ended, charged, sent, first / MICRO, reply_to, headers
    )
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


def stored_size(envelope: Envelope) -> int:
    """Return the bytes of the longest argument of a message: its value, or its key."""
    key = encoded(envelope.dedup_key or "")
    return max(len(head_of(envelope)) + len(envelope.body), len(key))


TAKES: Final = "this Redis server takes (proto-max-bulk-len)"


def check_command(command: Command, longest: int) -> None:
    """Raise :class:`SerializationError` if an argument has more bytes than ``longest``.

    The server would close the connection for it, and so fail the whole batch.
    """
    reply = None
    if isinstance(command, batched.Checkpoint):
        check_size("a checkpoint", len(command.state), longest, TAKES)
    elif isinstance(command, batched.Reply):
        reply = command.ack.reply
    elif isinstance(command, batched.DeadLetterCommand):
        reply = command.dead.reply
    if reply is not None:
        check_size("a reply", stored_size(replace(reply, reply_to=None)), longest, TAKES)


# --------------------------------------------------------------------------------------------- commands that only Redis has


@dataclass(eq=False, repr=False, slots=True)
class RedisOpen(batched.Open):
    """Make the mailbox known if nothing stands in the way, and mend what was lost with a deleted key if that is due.

    It is due every ``recovery`` seconds, for all processes together; None: not here. Results in what stands in the way, how
    many messages and dead letters were found again, and in how many seconds there is more to do.
    """

    recovery: float | None


@dataclass(eq=False, repr=False, slots=True)
class RedisClaim(batched.Claim):
    """Claim pending messages.

    ``claimant`` marks the receipts. A claim that waits is put on the list of waiters if nothing is pending. With ``others``,
    more receives of this mailbox wait, and it is put there in any case.
    """

    claimant: str
    others: bool


@dataclass(eq=False, repr=False, slots=True)
class UndoLostClaims(Command):
    """Undo what ``claimant`` claimed after the claim made at ``last_claim``: the connection broke before the answer came."""

    claimant: str
    last_claim: int


@dataclass(eq=False, repr=False, slots=True)
class FetchBodies(Command):
    """Fetch the bodies of claimed messages that are kept apart. A message whose body is gone is not readable."""

    deliveries: list[ClaimedMessage]


@dataclass(eq=False, repr=False, slots=True)
class WakeOthers(Command):
    """Wake ``count`` other processes, as this one was woken for messages that no receive here takes."""

    droppable: ClassVar[bool] = True
    count: int


@dataclass(eq=False, repr=False, slots=True)
class RedisSweep(batched.Sweep):
    """Let the library do what is due, for the receives that wait for it.

    ``waiter`` is called as it leaves: under which name, if any, this process is to be on the list of waiters.
    """

    waiter: Callable[[], str]


@dataclass(eq=False, repr=False, slots=True)
class Leave(Command):
    """Remove ``waiters`` from the list, and undo the claims that were sent to listener ``name`` after ``last_claim``.

    ``last_claim`` is when the last message was claimed that came there; ``left`` is called with that of the last undone one.
    ``for_good``: nothing listens there any more. ``count``: how many of them were joined to it, itself included.
    """

    droppable: ClassVar[bool] = True
    name: str
    last_claim: int
    waiters: list[str]
    left: Callable[[Leave, int], None]
    for_good: bool
    count: int = 1


@dataclass(eq=False, repr=False, slots=True)
class RemoveWaiters(Command):
    """Remove ``waiters`` from the list: no receive here waits under these names. What is on its way to them still arrives."""

    droppable: ClassVar[bool] = True
    waiters: set[str]


def joined(retried: list[Command]) -> list[Command]:
    """Join commands that are to be retried: while calls fail, each receive that ends adds a :class:`Leave`.

    Until a listener has left, no receive waits to be sent something there. So what came after the first one left is undone.
    """
    others: list[Command] = []
    leaves: dict[str, Leave] = {}
    removed: set[str] = set()
    for command in retried:
        if isinstance(command, RemoveWaiters):
            removed |= command.waiters
        elif not isinstance(command, Leave):
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
                one.for_good or command.for_good,
                one.count + command.count,
            )
    if removed:
        others.append(RemoveWaiters(removed))
    return [*others, *leaves.values()]


# -------------------------------------------------------------------------------- commands that are written as one operation


def _write_sends(call: FunctionCall, sends: Sequence[batched.Send]) -> None:
    envelopes = sends[0].envelopes if len(sends) == 1 else [send.envelopes[0] for send in sends]
    first, most = envelopes[0], sends[0].capacity  # the others differ from the first in body, headers and key only
    expires = 0 if first.expires_in is None else max(1, micros(first.expires_in))
    has_keys = any(map(_dedup_key, envelopes))
    # The mailbox of a requester may be gone: a body would stay there for ever. A second try is for a body that was not there.
    keeps_apart = not (call.name.startswith("~") or sends[0].result is AGAIN)
    is_one = (
        len(envelopes) == 1 and not (has_keys or first.delay or expires or len(first.body) > LARGE) and most is None
    )
    if is_one:
        call.arguments += ("send_one", -first.priority)
    else:
        call.arguments += ("send", len(envelopes), -first.priority, micros(first.delay), expires)
        call.arguments += (-1 if most is None else most, int(has_keys))
    large: list[str] = []
    for envelope in envelopes:
        head = head_of(envelope) if envelope.headers or envelope.reply_to is not None else PLAIN
        if keeps_apart and len(envelope.body) > LARGE:
            large.append(envelope.message_id)
            call.bodies += (envelope.message_id.encode(), envelope.body)
            call.arguments += (envelope.message_id, APART + head)
        else:
            call.arguments += (envelope.message_id, head + envelope.body)
        if has_keys:
            call.arguments.append(encoded(envelope.dedup_key or ""))
    if not is_one:
        call.arguments += (len(large), *large)


def _take_sends(call: FunctionCall, sends: Sequence[batched.Send], result: Any) -> None:
    problem = result[0] if result else None
    first = sends[0]
    if problem == b"full" and first.capacity is not None:
        first.error = full(result[1], first.capacity, result[2])
    elif problem == b"again":
        for send in sends:
            send.result = AGAIN
    elif result and problem != b"oom":
        first.result = [str(message_id, "utf-8", "replace") for message_id in result]
    elif problem is not None:
        for send in sends:
            send.error = MailboxConnectionError(
                "the Redis server's memory is full (OOM): let workers drain it, or raise maxmemory"
            )
    else:
        for send in sends:
            send.result = list(map(_message_id, send.envelopes))


def _write_acks(call: FunctionCall, acks: Sequence[AcknowledgeMany]) -> None:
    arguments: list[Argument] = []
    for ack in acks:
        for delivery in ack.deliveries:
            arguments.append(delivery.receipt_handle.encode("utf-8", "surrogatepass"))
    call.arguments += ("ack", len(arguments), *arguments)


def _take_acks(call: FunctionCall, acks: Sequence[AcknowledgeMany], result: list[int]) -> None:
    for ack in acks:
        ack.result = {}
    if result:
        places = [(ack, number) for ack in acks for number in range(len(ack.deliveries))]
        for place in result:
            ack, number = places[place]
            ack.result[number] = lease_over(ack.deliveries[number])


def _write_claims(call: FunctionCall, claims: Sequence[RedisClaim]) -> None:
    limit, waiting, others = 0, 0, False
    for claim in claims:
        limit += claim.limit
        if claim.waits:
            waiting += 1
            others = others or claim.others or waiting > 1
    visible = micros(claims[0].visibility)
    waiter = call.waiter(visible) if waiting else ""
    call.arguments += ("claim", limit, visible, claims[0].claimant, waiter, int(others))


def _take_claims(call: FunctionCall, claims: Sequence[RedisClaim], result: Any) -> None:
    """Share the messages out in the order of the claims."""
    receipts, values, extras, *again = result
    details: dict[int, dict[bytes, bytes]] = {}
    for at in range(0, len(extras), 3):
        details.setdefault(extras[at], {})[extras[at + 1]] = extras[at + 2]
    if receipts:
        call.last_claim = max(call.last_claim, claimed_at(receipts[-1]))
    start = 0
    for claim in claims:
        claim.result = AGAIN if again else []
        for number in range(start, min(start + claim.limit, len(receipts))):
            claim.result.append(delivery_of(receipts[number], values[number], details.get(number), call.leased_at))
        start += claim.limit


# ----------------------------------------------------------------------------------------- commands that are written alone


def _nack(call: FunctionCall, command: batched.NackCommand) -> tuple[Argument, ...]:
    how = command.how
    receipt = encoded(command.delivery.receipt_handle)
    return "nack", receipt, micros(how.delay), int(how.charge), int(how.front), how.history or ""


def _reply_part(call: FunctionCall, reply: Envelope | None) -> tuple[Argument, ...]:
    """Return the reply that leaves with a settlement: its mailbox, rank, id and value."""
    if reply is None:
        return (-1,)
    value = head_of(replace(reply, reply_to=None)) + reply.body
    return call.number(reply.reply_to or ""), -reply.priority, reply.message_id, value


def _reply(call: FunctionCall, command: batched.Reply) -> tuple[Argument, ...]:
    return "reply", encoded(command.delivery.receipt_handle), *_reply_part(call, command.ack.reply)


def _dead_letter(call: FunctionCall, command: batched.DeadLetterCommand) -> tuple[Argument, ...]:
    dead = command.dead
    settled = ("dead_letter", encoded(command.delivery.receipt_handle), _write_reason(dead), dead.history or "")
    return *settled, *_reply_part(call, dead.reply)


def _ids(message_ids: list[str] | None) -> tuple[Argument, ...]:
    if message_ids is None:
        return (-1,)
    return (len(message_ids), *(encoded(message_id) for message_id in message_ids))


def _leave(call: FunctionCall, command: Leave) -> tuple[Argument, ...]:
    return "leave", command.name, command.last_claim, int(command.for_good), len(command.waiters), *command.waiters


def _take_number(command: Command, result: Any) -> None:
    command.result = AGAIN if result == -1 else result


def _take_settled(command: batched.OfDelivery, result: Any) -> None:
    if not result:
        command.error = lease_over(command.delivery)


def _take_open(command: RedisOpen, result: Any) -> None:
    obstacles, found, again = result
    command.result = [str(obstacle, "utf-8", "replace") for obstacle in obstacles], found, again / MICRO


def _take_cancelled(command: batched.Cancel, result: Any) -> None:
    found, value = result
    if not found:
        command.result = UNKNOWN
        return
    outcome = CancelOutcome.REMOVED if found == 1 else CancelOutcome.CANCELLED
    try:
        _, _, reply_to, headers = read_message(value)
    except SerializationError:
        reply_to, headers = None, {}
    command.result = Cancelled(outcome, reply_to, headers)


def _take_counts(command: batched.Count, result: Any) -> None:
    command.result = Counts(*result[:5], queue_age=result[5] / MICRO) if result else AGAIN


def _take_dead(command: Command, result: Any) -> None:
    command.result = AGAIN if result == -1 else [_read_dead(*row) for row in result]


def _take_replayed(command: batched.ReplayDead, result: Any) -> None:
    if isinstance(result, list):
        command.error = full(result[1], command.capacity or 0, result[2])
    else:
        _take_number(command, result)


def recovery_of(interval: float | None) -> int:
    """Return the microseconds between two recoveries, as the library takes them; None: it is to mend nothing."""
    return -1 if interval is None else micros(interval)


def _take_left(command: Leave, result: Any) -> None:
    command.left(command, result)


# ------------------------------------------------------------------------------------------------------------- the table


@dataclass(frozen=True, slots=True)
class Operation:
    """How commands of one kind are done by the library.

    ``order`` is their place in a batch: what ends messages first, then sends, then claims.

    ``retried``: they are done with the next call if theirs fails; to do them twice harms nothing.
    """

    order: int
    write: Callable[[FunctionCall, Any], None]
    """Writes a group of alike commands."""
    take: Callable[[FunctionCall, Any, Any], None]
    """Sets ``result`` or ``error`` of each command of a group."""
    retried: bool = False


def _single(
    order: int,
    arguments: Callable[[FunctionCall, Any], tuple[Argument, ...]],
    take: Callable[[Any, Any], None] = _take_number,
    *,
    retried: bool = False,
) -> Operation:
    """Make the operation of commands that are written alone."""

    def write(call: FunctionCall, group: Sequence[Command]) -> None:
        call.arguments += arguments(call, group[0])

    def take_one(call: FunctionCall, group: Sequence[Command], result: Any) -> None:
        take(group[0], result)

    return Operation(order, write, take_one, retried)


OPERATIONS: Final[dict[type[Command], Operation]] = {
    Leave: _single(0, _leave, _take_left, retried=True),
    RemoveWaiters: _single(0, lambda _, c: ("remove_waiters", len(c.waiters), *sorted(c.waiters)), retried=True),
    UndoLostClaims: _single(0, lambda _, c: ("undo_lost_claims", c.claimant, c.last_claim), retried=True),
    batched.Unclaim: _single(
        0, lambda _, c: ("unclaim", len(c.deliveries), *(d.receipt_handle for d in c.deliveries)), retried=True
    ),
    RedisOpen: _single(0, lambda _, c: ("open", recovery_of(c.recovery)), _take_open),
    AcknowledgeMany: Operation(1, _write_acks, _take_acks),
    batched.Reply: _single(2, _reply, _take_settled),
    batched.DeadLetterCommand: _single(2, _dead_letter, _take_settled),
    batched.NackCommand: _single(2, _nack, _take_settled),
    batched.Extend: _single(
        2, lambda _, c: ("extend", encoded(c.delivery.receipt_handle), micros(c.timeout)), _take_settled
    ),
    batched.Checkpoint: _single(
        2, lambda _, c: ("checkpoint", encoded(c.delivery.receipt_handle), c.state), _take_settled
    ),
    batched.Cancel: _single(3, lambda _, c: ("cancel", encoded(c.message_id)), _take_cancelled),
    batched.Purge: _single(4, lambda *_: ("purge",)),
    batched.Send: Operation(5, _write_sends, _take_sends),
    batched.ReplayDead: _single(
        6,
        lambda _, c: ("replay_dead", -1 if c.capacity is None else c.capacity, MOST_DEAD, *_ids(c.ids)),
        _take_replayed,
    ),
    batched.PurgeDead: _single(6, lambda _, c: ("purge_dead", MOST_DEAD, *_ids(c.ids))),
    WakeOthers: _single(7, lambda _, c: ("wake_others", c.count)),
    RedisClaim: Operation(8, _write_claims, _take_claims),
    RedisSweep: _single(9, lambda _, c: ("sweep", c.waiter())),
    batched.Count: _single(10, lambda *_: ("count",), _take_counts),
    batched.ListDead: _single(10, lambda _, c: ("list_dead", c.limit, encoded(c.after or "")), _take_dead),
    batched.FindDead: _single(10, lambda _, c: ("find_dead", *_ids(c.ids)), _take_dead),
    batched.Drop: _single(12, lambda *_: ("drop",)),
    FetchBodies: _single(13, lambda *_: ()),  # a call of its own: BodiesCall
}


# ------------------------------------------------------------------------------------------------------------------ calls


@dataclass(eq=False, slots=True)
class FunctionCall:
    """One call of the library for the mailbox ``name``."""

    name: str
    keys: tuple[bytes, ...]
    leased_at: float = 0.0
    """The instant (anyio's clock) just before the call."""
    waiter: Callable[[int], str] = lambda _: ""
    """Returns the name on the list of waiters for a receive that wants leases of that many microseconds."""
    arguments: list[Argument] = field(default_factory=list)
    failed: list[Command] = field(default_factory=list)
    """The commands that failed on the server."""
    last_claim: int = 0
    """When the last of its claims was made."""
    groups: list[Sequence[Command]] = field(default_factory=list)
    """Its operations: each is one command, or several of one kind, and has one result."""
    others: dict[str, int] = field(default_factory=dict)
    """The numbers of other mailboxes of the call."""
    bodies: list[bytes] = field(default_factory=list)
    """Ids and bodies that are stored just before the call, with a command of their own."""

    def number(self, name: str) -> int:
        """Return the number of another mailbox of the call; 0 is this one."""
        if name == self.name:
            return 0
        if name not in self.others:
            self.others[name] = len(self.others) + 1
            self.keys += keys_of(name)
        return self.others[name]

    def take(self, results: list[Any]) -> tuple[int, int, int]:
        """Give the results out. Return the microseconds until more is due (-1: unknown), the server's time, and the number of
        index entries without a record that were dropped.

        An operation that failed on the server fails alone.
        """
        due, now, dropped, *failures = results[len(self.groups) :]
        for at in range(0, len(failures), 2):
            text = failures[at + 1].decode("utf-8", "replace")
            for command in self.groups[failures[at]]:
                command.error = MailboxConnectionError(f"the Redis server says: {text}")
                self.failed.append(command)
        failed = failures[::2]
        for number, (group, result) in enumerate(zip(self.groups, results, strict=False)):
            if number not in failed:
                OPERATIONS[type(group[0])].take(self, group, result)
            for command in group:
                command.done = True
        return due, now, dropped


@dataclass(eq=False, slots=True)
class BodiesCall:
    """The command that fetches bodies of the mailbox ``name``. It is no call of the library, which would copy them."""

    name: str
    fetches: Sequence[Any]

    @property
    def deliveries(self) -> list[ClaimedMessage]:
        """Return the messages whose bodies it fetches."""
        return [delivery for fetch in self.fetches for delivery in fetch.deliveries]

    def take(self, bodies: list[bytes | None]) -> None:
        """Give the bodies out."""
        for delivery, body in zip(self.deliveries, bodies, strict=True):
            delivery.body, delivery.is_readable = body or b"", body is not None
        for fetch in self.fetches:
            fetch.done = True


def calls_for(
    name: str,
    keys: tuple[bytes, ...],
    commands: list[Command],
    leased_at: float = 0.0,
    waiter: Callable[[int], str] = lambda _: "",
) -> Iterator[FunctionCall | BodiesCall]:
    """Yield the calls that do ``commands``, in the order of the operations; as a rule it is one call.

    The callers of one batch do not know of each other, so any order is right. Neighbours of one kind are written as one.
    """
    call = FunctionCall(name, keys, leased_at, waiter)
    groups: Iterable[list[Command]] = [commands]
    if len(commands) > 1:
        groups = (list(alike) for _, alike in groupby(sorted(commands, key=_order), key=_kind))
    for group in groups:
        if isinstance(group[0], FetchBodies):  # the last of the groups
            if call.groups:
                yield call
            yield BodiesCall(name, group)
            return
        if len(call.arguments) >= MOST_ARGUMENTS:
            yield call
            call = FunctionCall(name, keys, leased_at, waiter)
        OPERATIONS[type(group[0])].write(call, group)
        call.groups.append(group)
    yield call


def _order(command: Command) -> int:
    return OPERATIONS[type(command)].order


def _kind(command: Command) -> Hashable:
    """Return a value that is the same for commands that are written as one operation."""
    if isinstance(command, AcknowledgeMany):
        return AcknowledgeMany
    if isinstance(command, FetchBodies):
        return FetchBodies
    if isinstance(command, RedisClaim):
        return RedisClaim, command.visibility
    if isinstance(command, batched.Send) and len(command.envelopes) == 1 and command.capacity is None:
        envelope = command.envelopes[0]
        if envelope.dedup_key is None and command.result is not AGAIN:
            return batched.Send, envelope.priority, envelope.delay, envelope.expires_in
    return command
