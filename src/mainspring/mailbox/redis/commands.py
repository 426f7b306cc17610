"""What a Redis mailbox asks of its library of functions: the arguments of each operation, and how its result is read.

First come the keys of a mailbox, and how a message is kept; then the commands that only Redis has. Then, for each kind of
command, come the function that writes it and the function that reads its result, in one table (``OPERATIONS``). What concerns
records is in ``records``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, Final

from mainspring.errors import MailboxConnectionError, SerializationError
from mainspring.mailbox import batched
from mainspring.mailbox.batched import AcknowledgeMany, Command
from mainspring.mailbox.job_commands import Find, Reschedule
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
    MessagePlace,
    RescheduleOutcome,
    UnfinishedMessage,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from mainspring.mailbox.message import Envelope
    from mainspring.mailbox.redis.client import FunctionCall

    Argument = str | int | bytes

OUTCOMES: Final = (RescheduleOutcome.UNKNOWN, RescheduleOutcome.IN_FLIGHT, RescheduleOutcome.RESCHEDULED)
_message_id, _dedup_key, _task = map(attrgetter, ("message_id", "dedup_key", "task"))
_write_json: Final = json.JSONEncoder(separators=(",", ":")).encode
_read_json: Final = json.JSONDecoder().decode
_STRING: Final = frozenset({str})
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
    "limiters",
    "waits",
    "listed",
    "dead_tasks",
)
_RECORD_KEYS: Final = ("records", "record_names", "record_ends")
MICRO: Final = 1_000_000
LONGEST_NUMBER: Final = 20
BOTH: Final = 3
PLAIN: Final = b"-"
APART: Final = b"@"
"""Stands before the head of a message whose body is kept apart, in the key ``bodies``."""
LARGE: Final = 65_536
"""Bytes above which a body is kept apart."""
MOST_DEAD: Final = 1_000
"""Dead letters that one operation moves: other callers are to be served in between."""
NO_MEMORY: Final = "the Redis server's memory is full (OOM): let workers drain it, or raise maxmemory"
AGAIN: Final[list[Any]] = []
"""The result of a command if the library has to do more that is due before it can do it: nothing, not even for a claim."""


def base_of(name: str) -> bytes:
    """Return the prefix of the keys and channels of a mailbox, which puts all of them in one slot of a cluster."""
    return b"{ms:%b}:" % encoded(name)


def keys_of(name: str) -> tuple[bytes, ...]:
    """Return the keys of a mailbox in the order of the library."""
    base = base_of(name)
    return tuple(base + key.encode() for key in _KEYS)


def record_keys_of(name: str) -> tuple[bytes, ...]:
    """Return the keys of a mailbox's records in the order of the library; they are of the calls that need them only."""
    base = base_of(name)
    return tuple(base + key.encode() for key in _RECORD_KEYS)


def bodies_of(name: str) -> bytes:
    """Return the key of the bodies that are kept apart."""
    return base_of(name) + b"bodies"


def encoded(text: str) -> bytes:
    """Encode a text of a caller's, which may have lone surrogates: such a key or id is like any other."""
    return text.encode("utf-8", "surrogatepass")


def micros(seconds: float) -> int:
    """Convert seconds to the microseconds of the library."""
    return round(seconds * MICRO)


def life_of(expires_in: float | None) -> int:
    """Return the microseconds after which something expires, as the library takes them; 0: never."""
    return 0 if expires_in is None else max(1, micros(expires_in))


# ---------------------------------------------------------------------------------------------------- how a message is kept


def head_of(envelope: Envelope) -> bytes:
    """Return what is kept before the body: ``-``, or ``+`` and reply address and headers as a line of JSON."""
    if envelope.reply_to is None and not envelope.headers:
        return PLAIN
    details: dict[str, Any] = {"h": dict(envelope.headers)} if envelope.headers else {}
    if envelope.reply_to is not None:
        details["r"] = envelope.reply_to
    return b"+%b\n" % _write_json(details).encode()


def task_of(envelope: Envelope) -> bytes:
    """Return the stored form of a message's task: weight and limiter, as ``lua/limits.lua`` says; empty without a task."""
    if envelope.task is None:
        return b""
    key = b"t" if envelope.key is None else b"k" + named(envelope.key)
    return b"%b %b%b" % (repr(float(envelope.weight)).encode(), named(envelope.task), key)


def named(name: str) -> bytes:
    """Return the name of a task or of a key, so that what comes behind it is no part of it."""
    text = encoded(name)
    return b"%d:%b" % (len(text), text)


def read_key(about: bytes | None) -> str | None:
    """Return the key of a message from the stored form of its task, if it has a key."""
    if about is None:
        return None
    size, _, rest = about.split(b" ", 5)[5].partition(b":")
    key = rest[int(size) :]
    return key.partition(b":")[2].decode("utf-8", "surrogatepass") if key[:1] == b"k" else None


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
        details = _read_json(line.decode())
        reply_to, headers = details.get("r"), details.get("h", {})
        strings = _STRING.issuperset(map(type, headers.values()))
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


def read_unfinished(
    name: bytes, value: bytes, place: bytes, rank: bytes, when: int, *known: bytes | None
) -> UnfinishedMessage:
    """Read a message that was found. ``when``: the delayed one is due, the one in flight was claimed (0: not known).

    ``known``: its counts, checkpoint, history and task, if it has them.
    """
    message_id = name.decode("utf-8", "surrogatepass")
    counts, checkpoint, history, about = known
    at = MessagePlace(place.decode())
    is_held = at is MessagePlace.IN_FLIGHT
    ended, charged, first = _numbers(counts or b"", 3)
    try:
        sent, body, reply_to, headers = read_message(value)
    except SerializationError:
        sent, body, reply_to, headers = 0.0, value, None, {}
    message = ClaimedMessage(
        message_id, body, "", ended + is_held, charged + is_held, sent, first / MICRO, reply_to, headers
    )
    if is_held and not first:
        message.first_received_at = when / MICRO
    message.checkpoint = checkpoint
    message.history = None if history is None else history.decode("utf-8", "replace")
    due = when / MICRO if at is MessagePlace.DELAYED else None
    return UnfinishedMessage(message, at, due, -int(rank), read_key(about))


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


def more_of(envelope: Envelope, parts: int) -> tuple[bytes, ...]:
    """Return the arguments for what a message has beside its id and its value: 1 a dedup key, 2 a task, 3 both."""
    key = encoded(envelope.dedup_key or "")
    return (key, task_of(envelope)) if parts == BOTH else (key if parts == 1 else task_of(envelope),)


def _write_sends(call: FunctionCall, sends: Sequence[batched.Send]) -> None:
    envelopes = sends[0].envelopes if len(sends) == 1 else [send.envelopes[0] for send in sends]
    first, most = envelopes[0], sends[0].capacity  # the others differ from the first in body, headers and key only
    expires = 0 if first.expires_in is None else life_of(first.expires_in)
    parts = any(map(_dedup_key, envelopes)) + 2 * any(map(_task, envelopes))
    # The mailbox of a requester may be gone: a body would stay there for ever. A second try is for a body that was not there.
    keeps_apart = not (call.name.startswith("~") or sends[0].result is AGAIN)
    is_one = len(envelopes) == 1 and not (parts or first.delay or expires or len(first.body) > LARGE) and most is None
    if is_one:
        call.arguments += ("send_one", -first.priority)
    else:
        call.arguments += ("send", len(envelopes), -first.priority, micros(first.delay), expires)
        call.arguments += (-1 if most is None else most, parts)
    large: list[str] = []
    for envelope in envelopes:
        head = head_of(envelope) if envelope.headers or envelope.reply_to is not None else PLAIN
        if keeps_apart and len(envelope.body) > LARGE:
            large.append(envelope.message_id)
            call.bodies += (envelope.message_id.encode(), envelope.body)
            call.arguments += (envelope.message_id, APART + head)
        else:
            call.arguments += (envelope.message_id, head + envelope.body)
        if parts:
            call.arguments += more_of(envelope, parts)
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
            send.error = MailboxConnectionError(NO_MEMORY)
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


def reply_part(call: FunctionCall, reply: Envelope | None) -> tuple[Argument, ...]:
    """Return the reply that leaves with a settlement: its mailbox, rank, id and value."""
    if reply is None:
        return (-1,)
    value = head_of(replace(reply, reply_to=None)) + reply.body
    return call.mailbox(reply.reply_to or ""), -reply.priority, reply.message_id, value


def _reply(call: FunctionCall, command: batched.Reply) -> tuple[Argument, ...]:
    return "reply", encoded(command.delivery.receipt_handle), *reply_part(call, command.ack.reply)


def _dead_letter(call: FunctionCall, command: batched.DeadLetterCommand) -> tuple[Argument, ...]:
    dead = command.dead
    settled = ("dead_letter", encoded(command.delivery.receipt_handle), _write_reason(dead), dead.history or "")
    return *settled, *reply_part(call, dead.reply)


def _ids(message_ids: list[str] | None) -> tuple[Argument, ...]:
    if message_ids is None:
        return (-1,)
    return (len(message_ids), *(encoded(message_id) for message_id in message_ids))


def _leave(call: FunctionCall, command: Leave) -> tuple[Argument, ...]:
    return "leave", command.name, command.last_claim, int(command.for_good), len(command.waiters), *command.waiters


def _take_number(command: Command, result: Any) -> None:
    command.result = AGAIN if result == -1 else result


def take_settled(command: batched.OfDelivery, result: Any) -> None:
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


def _take_found(command: Find, result: Any) -> None:
    command.result = AGAIN if result == -1 else [read_unfinished(*row) for row in result]


def _take_rescheduled(command: Reschedule, result: Any) -> None:
    command.result = AGAIN if result == -1 else OUTCOMES[result]


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


def single(
    order: int,
    arguments: Callable[[FunctionCall, Any], Iterable[Argument]],
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
    Leave: single(0, _leave, _take_left, retried=True),
    RemoveWaiters: single(0, lambda _, c: ("remove_waiters", len(c.waiters), *sorted(c.waiters)), retried=True),
    UndoLostClaims: single(0, lambda _, c: ("undo_lost_claims", c.claimant, c.last_claim), retried=True),
    batched.Unclaim: single(
        0, lambda _, c: ("unclaim", len(c.deliveries), *(d.receipt_handle for d in c.deliveries)), retried=True
    ),
    RedisOpen: single(0, lambda call, c: ("open", recovery_of(c.recovery), call.records(call.name)), _take_open),
    AcknowledgeMany: Operation(1, _write_acks, _take_acks),
    batched.Reply: single(2, _reply, take_settled),
    batched.DeadLetterCommand: single(2, _dead_letter, take_settled),
    batched.NackCommand: single(2, _nack, take_settled),
    batched.Extend: single(
        2, lambda _, c: ("extend", encoded(c.delivery.receipt_handle), micros(c.timeout)), take_settled
    ),
    batched.Checkpoint: single(
        2, lambda _, c: ("checkpoint", encoded(c.delivery.receipt_handle), c.state), take_settled
    ),
    batched.Cancel: single(3, lambda _, c: ("cancel", encoded(c.message_id)), _take_cancelled),
    Reschedule: single(3, lambda _, c: ("reschedule", encoded(c.message_id), micros(c.delay)), _take_rescheduled),
    batched.Purge: single(4, lambda *_: ("purge",)),
    batched.Send: Operation(5, _write_sends, _take_sends),
    batched.ReplayDead: single(
        6,
        lambda _, c: ("replay_dead", -1 if c.capacity is None else c.capacity, MOST_DEAD, *_ids(c.ids)),
        _take_replayed,
    ),
    batched.PurgeDead: single(6, lambda _, c: ("purge_dead", MOST_DEAD, *_ids(c.ids))),
    WakeOthers: single(7, lambda _, c: ("wake_others", c.count)),
    RedisClaim: Operation(8, _write_claims, _take_claims),
    RedisSweep: single(9, lambda _, c: ("sweep", c.waiter())),
    batched.Count: single(10, lambda *_: ("count",), _take_counts),
    batched.ListDead: single(
        10,
        lambda _, c: ("list_dead", c.limit, encoded(c.after or ""), b"" if c.task is None else named(c.task)),
        _take_dead,
    ),
    batched.FindDead: single(10, lambda _, c: ("find_dead", *_ids(c.ids)), _take_dead),
    Find: single(10, lambda _, c: ("find", *_ids(c.ids)), _take_found),
    batched.Drop: single(12, lambda call, _: ("drop", call.records(call.name))),
    FetchBodies: single(13, lambda *_: ()),  # a call of its own: BodiesCall
}
