"""What a PostgreSQL mailbox asks of its store: one class an operation. They say what; the calls know how."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mainspring.mailbox.batcher import Command

if TYPE_CHECKING:
    from mainspring.mailbox.message import Delivery, Envelope, Return, Settlement


class Put(Command):
    """Store all or none; results in the ids. ``held_up``: none is, as an open transaction has sent one of their keys."""

    __slots__ = ("envelopes", "held_up")

    def __init__(self, envelopes: list[Envelope]) -> None:
        super().__init__()
        self.envelopes = envelopes
        self.held_up = False


class Claim(Command):
    """Lease what is there; results in deliveries. ``waits`` says that an empty result will be waited on."""

    __slots__ = ("limit", "visibility", "waits")
    first = True

    def __init__(self, limit: int, visibility: float, waits: bool) -> None:
        super().__init__()
        self.limit = limit
        self.visibility = visibility
        self.waits = waits


class Unclaim(Command):
    """Take claims back as if they had not been made."""

    __slots__ = ("deliveries",)

    def __init__(self, deliveries: list[Delivery]) -> None:
        super().__init__()
        self.deliveries = deliveries


class Look(Command):
    """Do what is due and see what could be claimed, for those who wait; results in (pending, seconds until more is due)."""

    __slots__ = ()
    asks_only = True


class Count(Command):
    """Results in the :class:`Counts` of the mailbox; in the order of the claims, so that one taken back is not seen."""

    __slots__ = ()


class OfDelivery(Command):
    """An operation that only the holder of the lease may do; ``lease`` is its number."""

    __slots__ = ("delivery", "lease")

    def __init__(self, delivery: Delivery, lease: int) -> None:
        super().__init__()
        self.delivery = delivery
        self.lease = lease


class Acknowledge(OfDelivery):
    """The message is done."""

    __slots__ = ()


class AcknowledgeMany(Command):
    """The messages are done; results in the errors of those whose leases are not held, by their places from 0."""

    __slots__ = ("deliveries",)

    def __init__(self, deliveries: list[Delivery]) -> None:
        super().__init__()
        self.deliveries = deliveries


class Finish(OfDelivery):
    """The message is done, with a reply, or dead. ``target`` is the number of the mailbox of its reply."""

    __slots__ = ("settlement", "target")

    def __init__(self, delivery: Delivery, lease: int, settlement: Settlement, target: int | None) -> None:
        super().__init__(delivery, lease)
        self.settlement = settlement
        self.target = target


class GiveBack(OfDelivery):
    """The message returns to the queue."""

    __slots__ = ("how",)

    def __init__(self, delivery: Delivery, lease: int, how: Return) -> None:
        super().__init__(delivery, lease)
        self.how = how


class Extend(OfDelivery):
    """The lease lasts at least ``timeout`` seconds from now."""

    __slots__ = ("timeout",)

    def __init__(self, delivery: Delivery, lease: int, timeout: float) -> None:
        super().__init__(delivery, lease)
        self.timeout = timeout


class SaveCheckpoint(OfDelivery):
    """Keep ``state`` with the message."""

    __slots__ = ("state",)

    def __init__(self, delivery: Delivery, lease: int, state: bytes) -> None:
        super().__init__(delivery, lease)
        self.state = state
