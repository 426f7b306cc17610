"""What is the same for backends that batch: their operations as commands, and how a claim waits, is undone, and ends.

A call of the mailbox becomes a :class:`~mainspring.mailbox.batcher.Command`, and waits until a batch has taken it to the
store and back. A command is data: the store's own code says how it is done there, for all commands of one kind at once.

A claim that finds nothing waits in a line (:class:`~mainspring.mailbox.waiting.Waiters`) and claims again when it is woken.
If the caller of a claim is cancelled while it is out, or the mailbox is closed meanwhile, the claim has leased messages that no
caller will see: they are put back, as the first thing of the next batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import anyio

from mainspring.mailbox.backend import Backend
from mainspring.mailbox.batcher import Command

if TYPE_CHECKING:
    from mainspring.mailbox import message
    from mainspring.mailbox.batcher import Batcher
    from mainspring.mailbox.message import Cancelled, Counts, Dead, Delivery, Envelope
    from mainspring.mailbox.waiting import Waiters


@dataclass(eq=False, repr=False, slots=True)
class Open(Command):
    """Make the mailbox ``name`` known; results in its number."""

    name: str


@dataclass(eq=False, repr=False, slots=True)
class Send(Command):
    """Store all or none, while no more than ``capacity`` messages wait; results in the ids."""

    envelopes: list[Envelope]
    capacity: int | None = None


@dataclass(eq=False, repr=False, slots=True)
class Claim(Command):
    """Lease what is there; results in deliveries. ``waits`` says that an empty result will be waited on."""

    first: ClassVar[bool] = True
    limit: int
    visibility: float
    waits: bool


@dataclass(eq=False, repr=False, slots=True)
class Unclaim(Command):
    """Put back what was claimed, as if it had not been."""

    deliveries: list[Delivery]


@dataclass(eq=False, repr=False, slots=True)
class OfDelivery(Command):
    """An operation that only the holder of the lease may do."""

    delivery: Delivery


@dataclass(eq=False, repr=False, slots=True)
class Acknowledge(OfDelivery):
    """The message is done."""


@dataclass(eq=False, repr=False, slots=True)
class AcknowledgeMany(Command):
    """The messages are done; results in the errors of those whose leases are not held, by their number."""

    deliveries: list[Delivery]


@dataclass(eq=False, repr=False, slots=True)
class Reply(OfDelivery):
    """The message is done, and its reply goes to another mailbox of the store."""

    ack: message.Ack


@dataclass(eq=False, repr=False, slots=True)
class Nack(OfDelivery):
    """The message returns to the queue."""

    how: message.Nack


@dataclass(eq=False, repr=False, slots=True)
class DeadLetter(OfDelivery):
    """The message goes to the dead letters."""

    dead: Dead


@dataclass(eq=False, repr=False, slots=True)
class Extend(OfDelivery):
    """The lease lasts at least ``timeout`` seconds from now."""

    timeout: float


@dataclass(eq=False, repr=False, slots=True)
class Checkpoint(OfDelivery):
    """Keep ``state`` with the message."""

    state: bytes


@dataclass(eq=False, repr=False, slots=True)
class Cancel(Command):
    """End a message by its id; results in :class:`Cancelled`."""

    message_id: str


@dataclass(eq=False, repr=False, slots=True)
class Sweep(Command):
    """Do what is due, for those who wait."""

    asks_only: ClassVar[bool] = True


@dataclass(eq=False, repr=False, slots=True)
class Count(Command):
    """Results in the :class:`Counts` of the mailbox; in the order of the claims, so that one put back is not seen."""


@dataclass(eq=False, repr=False, slots=True)
class Purge(Command):
    """Drop all that is delayed, pending and in flight; results in how many that were."""


@dataclass(eq=False, repr=False, slots=True)
class ListDead(Command):
    """Results in a page of the dead letters."""

    limit: int
    after: str | None


@dataclass(eq=False, repr=False, slots=True)
class FindDead(Command):
    """Results in those of the ids that are dead letters."""

    ids: list[str]


@dataclass(eq=False, repr=False, slots=True)
class ReplayDead(Command):
    """Put dead letters (None: all) back into the queue, all or none as in :class:`Send`; results in how many that were."""

    ids: list[str] | None
    capacity: int | None


@dataclass(eq=False, repr=False, slots=True)
class PurgeDead(Command):
    """Forget dead letters (None: all) for good; results in how many that were."""

    ids: list[str] | None


@dataclass(eq=False, repr=False, slots=True)
class Drop(Command):
    """Forget the mailbox and everything in it."""


class CommandBackend(Backend):
    """A backend whose operations are commands for a batcher, which its ``open`` makes."""

    _batcher: Batcher[Any]

    def __init__(self, name: str, capacity: int | None) -> None:
        super().__init__(name)
        self._capacity = capacity

    async def _call(self, command: Command) -> Any:
        """Have a command done with the next batch. Return its result, or raise its error."""
        return await self._batcher.call(command)

    async def extend(self, delivery: Delivery, timeout: float) -> None:
        await self._call(Extend(delivery, timeout))

    async def checkpoint(self, delivery: Delivery, state: bytes) -> None:
        await self._call(Checkpoint(delivery, state))

    async def cancel(self, message_id: str) -> Cancelled:
        cancelled: Cancelled = await self._call(Cancel(message_id))
        return cancelled

    async def counts(self) -> Counts:
        counts: Counts = await self._call(Count())
        return counts

    async def purge(self) -> int:
        return int(await self._call(Purge()))

    async def dead_letters(self, limit: int, after: str | None) -> list[tuple[Delivery, Dead, float]]:
        page: list[tuple[Delivery, Dead, float]] = await self._call(ListDead(limit, after))
        return page

    async def find_dead_letters(self, message_ids: list[str]) -> list[tuple[Delivery, Dead, float]]:
        found: list[tuple[Delivery, Dead, float]] = await self._call(FindDead(message_ids))
        return found

    async def replay_dead_letters(self, message_ids: list[str] | None) -> int:
        return int(await self._call(ReplayDead(message_ids, self._capacity)))

    async def purge_dead_letters(self, message_ids: list[str] | None) -> int:
        return int(await self._call(PurgeDead(message_ids)))

    async def drop(self) -> None:
        await self._call(Drop())


class BatchedBackend(CommandBackend):
    """A command backend whose claims wait in a line, which its ``open`` makes, and are woken by the process itself."""

    _waiters: Waiters

    def __init__(self, name: str, capacity: int | None) -> None:
        super().__init__(name, capacity)
        self._is_closing = True

    def stop_claims(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            self._waiters.wake_all()

    async def claim(self, max_messages: int, visibility_timeout: float, wait_time_seconds: float) -> list[Delivery]:
        if not wait_time_seconds:
            return await self._claim_once(max_messages, visibility_timeout, waits=False)
        claim = partial(self._claim_once, max_messages, visibility_timeout, waits=True)
        return await self._waiters.first(
            claim, anyio.current_time() + wait_time_seconds, usable=lambda: not self._is_closing
        )

    async def _claim_once(self, limit: int, visibility: float, *, waits: bool) -> list[Delivery]:
        command = Claim(limit, visibility, waits)
        found: list[Delivery] = await self._call(command)
        if found and self._is_closing:  # closed meanwhile
            self._undo(command)
            return []
        return found

    def _undo(self, command: Command) -> None:
        """A claim whose caller is gone is put back, before anything else is done."""
        if type(command) is Claim and command.result:
            unclaim = Unclaim(command.result)
            unclaim.mailbox = command.mailbox
            self._batcher.post(unclaim)
