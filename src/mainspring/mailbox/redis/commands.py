"""What a Redis mailbox asks of its library: one class an operation, which knows its arguments and reads its result."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from mainspring.errors import MailboxConnectionError, ReceiptHandleExpiredError
from mainspring.mailbox.batcher import Command
from mainspring.mailbox.limits import check_size, full
from mainspring.mailbox.redis.records import PLAIN, head_of, micro, reason

if TYPE_CHECKING:
    from collections.abc import Callable

    from mainspring.mailbox.message import Dead, Delivery, Envelope, Return

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
