"""What a pull from a NATS server brings, and what of it a process then holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mainspring.errors import ReceiptHandleExpiredError
from mainspring.mailbox.nats.names import nanoseconds
from mainspring.mailbox.nats.records import Record, decode

if TYPE_CHECKING:
    from mainspring.mailbox.message import Delivery
    from mainspring.mailbox.nats.parser import Heard


@dataclass(slots=True)
class Lease:
    """A message that this process holds."""

    sequence: int
    reply: str
    subject: str
    record: Record
    until: float
    """When the lease is over, on anyio's clock: not later than the server thinks."""
    received_at: float
    checkpoint: bool = False
    refused_since: float | None = None
    """When the server first had no room for what was to become of it, on anyio's clock."""
    unsure: bool = False
    """Whether a settlement was sent of which no answer has come: it may have been made."""


@dataclass(slots=True)
class Arrival:
    """A message as a pull request brought it."""

    sequence: int
    deliveries: int
    reply: str
    subject: str
    stored_at: float
    record: Record

    @classmethod
    def of(cls, message: Heard) -> Arrival:
        """Read the numbers out of the subject that an acknowledgement of it would go to."""
        parts = message.reply.split(b".")
        first = 4 if len(parts) == 9 else 6  # newer servers put the domain and the account before them
        sequence = int(parts[first + 1])
        stored_at = int(parts[first + 3]) / 1e9
        record = decode(message.data, sequence, stored_at)
        return cls(sequence, int(parts[first]), message.reply.decode(), message.subject.decode(), stored_at, record)


def expired(delivery: Delivery) -> ReceiptHandleExpiredError:
    """The error of one who holds no lease."""
    return ReceiptHandleExpiredError(
        f"message {delivery.message_id}: the lease of delivery {delivery.delivery_count} has run out, or it was settled"
    )


def nak(seconds: float) -> bytes:
    """The order to deliver a message again in so many seconds: until then it is its holder's."""
    return b'-NAK {"delay":%d}' % nanoseconds(seconds) if seconds > 0 else b"-NAK"
