"""What a SQLite mailbox asks of its store: one class an operation. They say what; the store knows how."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mainspring.mailbox.batcher import Command

if TYPE_CHECKING:
    from mainspring.mailbox.message import Ack, Dead, Delivery, Envelope, Return


class StoreCommand(Command):
    """An operation on the mailbox with that number in the store."""

    __slots__ = ("mailbox",)

    def __init__(self, mailbox: int) -> None:
        super().__init__()
        self.mailbox = mailbox


class Open(StoreCommand):
    """Make the mailbox ``name`` known; results in its number."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        super().__init__(0)
        self.name = name


class Put(StoreCommand):
    """Store all or none, while no more than ``capacity`` messages wait; results in the ids."""

    __slots__ = ("capacity", "envelopes")

    def __init__(self, mailbox: int, envelopes: list[Envelope], capacity: int | None) -> None:
        super().__init__(mailbox)
        self.envelopes = envelopes
        self.capacity = capacity


class Claim(StoreCommand):
    """Lease what is there; results in deliveries. ``waits`` says that an empty result will be waited on."""

    __slots__ = ("limit", "visibility", "waits")
    first = True

    def __init__(self, mailbox: int, limit: int, visibility: float, waits: bool) -> None:
        super().__init__(mailbox)
        self.limit = limit
        self.visibility = visibility
        self.waits = waits


class Unclaim(StoreCommand):
    """Take claims back as if they had not been made."""

    __slots__ = ("leases",)

    def __init__(self, mailbox: int, leases: list[str]) -> None:
        super().__init__(mailbox)
        self.leases = leases


class _OfDelivery(StoreCommand):
    """An operation that only the holder of the lease may do."""

    __slots__ = ("delivery",)

    def __init__(self, mailbox: int, delivery: Delivery) -> None:
        super().__init__(mailbox)
        self.delivery = delivery


class Acknowledge(_OfDelivery):
    """The message is done."""

    __slots__ = ()


class Answer(_OfDelivery):
    """The message is done, and its reply goes to another mailbox of the store."""

    __slots__ = ("ack",)

    def __init__(self, mailbox: int, delivery: Delivery, ack: Ack) -> None:
        super().__init__(mailbox, delivery)
        self.ack = ack


class GiveBack(_OfDelivery):
    """The message returns to the queue."""

    __slots__ = ("how",)

    def __init__(self, mailbox: int, delivery: Delivery, how: Return) -> None:
        super().__init__(mailbox, delivery)
        self.how = how


class Bury(_OfDelivery):
    """The message goes to the dead letters."""

    __slots__ = ("dead",)

    def __init__(self, mailbox: int, delivery: Delivery, dead: Dead) -> None:
        super().__init__(mailbox, delivery)
        self.dead = dead


class Extend(_OfDelivery):
    """The lease lasts at least ``timeout`` seconds from now."""

    __slots__ = ("timeout",)

    def __init__(self, mailbox: int, delivery: Delivery, timeout: float) -> None:
        super().__init__(mailbox, delivery)
        self.timeout = timeout


class SaveCheckpoint(_OfDelivery):
    """Keep ``state`` with the message."""

    __slots__ = ("state",)

    def __init__(self, mailbox: int, delivery: Delivery, state: bytes) -> None:
        super().__init__(mailbox, delivery)
        self.state = state


class Cancel(StoreCommand):
    """End a message by its id; results in :class:`Cancelled`."""

    __slots__ = ("message_id",)

    def __init__(self, mailbox: int, message_id: str) -> None:
        super().__init__(mailbox)
        self.message_id = message_id


class Drop(StoreCommand):
    """Forget the mailbox and everything in it; results in nothing."""

    __slots__ = ()


class CountAll(StoreCommand):
    """Results in the :class:`Counts` of the mailbox."""

    __slots__ = ()


class Sweep(StoreCommand):
    """Do what is due, for those who wait; results in nothing."""

    __slots__ = ()


class Look(StoreCommand):
    """See, without writing, what could be claimed and when more becomes due."""

    __slots__ = ()


class PurgeAll(StoreCommand):
    """Drop all that is delayed, pending and in flight; results in how many that were."""

    __slots__ = ()


class ListDead(StoreCommand):
    """Results in a page of the dead letters."""

    __slots__ = ("after", "limit")

    def __init__(self, mailbox: int, limit: int, after: str | None) -> None:
        super().__init__(mailbox)
        self.limit = limit
        self.after = after


class FindDead(StoreCommand):
    """Results in those of the ids that are dead letters."""

    __slots__ = ("ids",)

    def __init__(self, mailbox: int, ids: list[str]) -> None:
        super().__init__(mailbox)
        self.ids = ids


class Revive(StoreCommand):
    """Put dead letters (None: all) back into the queue, all or none as in :class:`Put`; results in how many that were."""

    __slots__ = ("capacity", "ids")

    def __init__(self, mailbox: int, ids: list[str] | None, capacity: int | None) -> None:
        super().__init__(mailbox)
        self.ids = ids
        self.capacity = capacity


class Forget(StoreCommand):
    """Drop dead letters (None: all) for good; results in how many that were."""

    __slots__ = ("ids",)

    def __init__(self, mailbox: int, ids: list[str] | None) -> None:
        super().__init__(mailbox)
        self.ids = ids
