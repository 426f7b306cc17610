"""What a mailbox backend writes: the hooks under the public calls, and the capabilities it declares."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from mainspring.errors import ConfigError, InvalidParameterError
from mainspring.mailbox.message import ACK

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from mainspring.errors import MailboxConnectionError
    from mainspring.mailbox.mailbox import Mailbox
    from mainspring.mailbox.message import Cancelled, Counts, Dead, Delivery, Envelope, Message, Settlement
    from mainspring.mailbox.ownership import Owner
    from mainspring.runtime.scope import DaemonScope

TRANSIENT: Final = "~"
"""What the names of transient mailboxes begin with: those made for one mailbox object, as for the replies to its requests.

A store keeps such a mailbox for a day after somebody last had it open, so that one whose process died does not stay for
ever; and it drops a reply (:attr:`Ack.reply`, :attr:`Dead.reply`) to one that does not exist, rather than make it.
"""
TRANSIENT_LIFE: Final = 86_400.0
"""Seconds that a transient mailbox is kept after it was last opened or claimed from."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do. The contract suite skips by these only, and users can ask before they rely on one."""

    durable: bool = False
    """A sent message survives the end of the process."""
    cross_process: bool = False
    """Several processes can use one mailbox at once."""
    fencing: bool = True
    """The store itself refuses a stale receipt handle."""
    front_return: bool = True
    """``release()`` puts a message before all that wait."""
    priority: bool = True
    delay: bool = True
    expiry: bool = True
    dedup: bool = True
    checkpoints: bool = True
    transactional_reply: bool = True
    """A reply to a mailbox on the same store and the acknowledgement (or the death) are one step."""
    cancel: bool = True
    """A message can be cancelled by its id."""
    siblings: bool = True
    """It can open other mailboxes on its store: for requests, and for the work on its dead letters."""
    history: bool = True
    """The errors of a message's earlier attempts are kept with it."""
    transactions: bool = False
    """A send can join a transaction of the sender's, and a handler can have one that its acknowledgement joins."""
    ordered: bool = False
    """Calls take effect in the order in which they were made: a claim made after a settlement sees it."""
    joined_acks: bool = False
    """Acknowledgements that are made together cost little more than one: a loop joins those of messages that end together."""
    lease_ends_seen: bool = True
    """The end of a lease shows at once, whoever held it: in the counts, and as the death of what has expired meanwhile. Else
    the next receive finds it, and before that the mailbox object that held it counts it."""
    queue_age: bool = False
    """``counts()`` tells how long the oldest pending message has waited (:attr:`Counts.queue_age`)."""
    lease_granularity: float = 0.0
    """Seconds by which the store may round a lease."""
    async_backends: frozenset[str] = frozenset({"asyncio", "trio"})
    """The event loops that the backend's driver runs on."""


@dataclass(frozen=True, slots=True)
class MailboxStatistics:
    """What one mailbox object is doing at this moment. What the store holds is in :class:`Counts`."""

    waiting_receives: int = 0
    """Receives that wait for a message."""
    queued: int = 0
    """Operations that wait until a batch takes them to the store."""
    in_flight: int = 0
    """Operations that the store has been given and has not answered."""
    batches: int = 0
    """Batches given to the store since the mailbox was opened."""
    unconfirmed: int = 0
    """Operations that a lost connection left without an answer, and that are tried again."""
    reconnects: int = 0
    """Connections made anew since the mailbox was opened, after one was lost."""
    connected: bool = False
    """True if the mailbox is open and its store can be reached, as far as is known."""
    polling: bool = False
    """True if waiting receives ask the store again and again, as no notification of new messages arrives."""


class MailboxHooks(ABC):
    """The part of a mailbox that differs from one backend to the next."""

    name: str

    capabilities: ClassVar[Capabilities]
    _works_unopened: ClassVar[bool] = False
    """Whether calls are taken before the mailbox is opened (after it was closed they never are)."""
    _kept_by: Owner | None = None
    """The group or loop that has opened it and closes it at its end; None where a user did, or nobody."""
    serializes: bool = True
    """Whether bodies reach the store as JSON bytes (else as the objects they are)."""

    @abstractmethod
    async def _open(self, scope: DaemonScope) -> None:
        """Connect; tasks the backend needs are started in ``scope`` and end with it."""

    @abstractmethod
    async def _close(self) -> None:
        """Flush and disconnect. Waiting receives have been told; no further hook is called until the next open."""

    async def _exists(self) -> bool:
        """See :meth:`Mailbox.exists`; called while the mailbox is not open. One whose store cannot tell says yes."""
        return True

    def _statistics(self) -> MailboxStatistics:
        """See :meth:`Mailbox.statistics`; called only while the mailbox is open."""
        return MailboxStatistics(connected=True)

    @abstractmethod
    async def _put(self, envelopes: list[Envelope]) -> list[str]:
        """Store all or none, as durably as the backend does; the ids (an earlier one's where ``dedup_key`` matched)."""

    async def _put_into(self, connection: Any, envelopes: list[Envelope]) -> list[str]:
        """:meth:`_put` in the transaction that is under way on the sender's own ``connection``."""
        raise InvalidParameterError(f"send: {type(self).__name__} takes no connection=; a postgresql:// mailbox does")

    def transaction(self, message: Message[Any, Any]) -> AbstractAsyncContextManager[Any]:
        """A transaction that ends with the block, and settles ``message``; yields the driver's connection.

        What is written through the connection and the acknowledgement are committed together, or neither is. Inside the
        block ``message.reply()``, ``nack()``, ``dead_letter()`` and so on are part of the transaction; without any of them
        leaving the block acknowledges. An error out of the block rolls all back and leaves the message unsettled; so does a
        cancellation.

        :raises ConfigError: the mailbox cannot (:attr:`Capabilities.transactions`).
        :raises ReceiptHandleExpiredError: at the end: the lease was lost meanwhile; nothing was committed.
        :raises MessageSettledError: the message is settled, or in a transaction.
        :raises TransactionEndedError: the block ran ``COMMIT`` or ``ROLLBACK`` itself; it settles nothing then. With a
            ``BEGIN`` after it that cannot be seen: leave both to the block.
        :raises MailboxConnectionError: the connection was lost. Where that was during the commit, it may have taken place.
        """
        raise ConfigError(f"{type(self).__name__} has no transactions; a postgresql:// mailbox has")

    @abstractmethod
    async def _claim(self, max_messages: int, visibility_timeout: float, wait_time_seconds: float) -> list[Delivery]:
        """Claim what is available, at most ``max_messages``; wait only while there is none; ``[]`` when closed."""

    @abstractmethod
    async def _settle(self, delivery: Delivery, settlement: Settlement) -> None:
        """End the delivery in one step; :class:`ReceiptHandleExpiredError` where its lease is not held any more."""

    async def _acknowledge_many(self, deliveries: list[Delivery]) -> dict[int, Exception]:
        """Acknowledge them; by number, why one was refused: what :meth:`_settle` raises. It raises what hits all of them.

        A backend that can do it in one step (:attr:`Capabilities.joined_acks`) overrides this.
        """
        refused: dict[int, Exception] = {}
        for number, delivery in enumerate(deliveries):
            try:
                await self._settle(delivery, ACK)
            except Exception as error:
                refused[number] = error
        return refused

    @abstractmethod
    async def _extend(self, delivery: Delivery, timeout: float) -> None:
        """Let the lease last ``timeout`` seconds from now, unless it already lasts longer."""

    @abstractmethod
    async def _save_checkpoint(self, delivery: Delivery, state: bytes) -> None:
        """Keep ``state`` with the message while its lease is held."""

    @abstractmethod
    async def _counts(self) -> Counts:
        """Return the counts, with ``queue_age`` where the store finds the first in line without reading the others."""

    @abstractmethod
    async def _purge(self) -> int:
        """Drop all that is delayed, pending and in flight; how many that were. From then on they count as settled."""

    @abstractmethod
    async def _dead_letters(self, limit: int, after: str | None) -> list[tuple[Delivery, Dead, float]]:
        """The oldest dead letters (behind the one with id ``after``) and when each died (POSIX seconds)."""

    @abstractmethod
    async def _replay(self, message_ids: list[str] | None) -> int:
        """Make dead letters pending again with fresh counts, at the tail; None means all; how many that were."""

    @abstractmethod
    async def _discard_dead(self, message_ids: list[str] | None) -> int:
        """Forget dead letters for good; None means all; how many that were. From then on they count as settled."""

    async def _find_dead(self, message_ids: list[str]) -> list[tuple[Delivery, Dead, float]]:
        """Those of ``message_ids`` that are dead letters, as :meth:`_dead_letters` gives them, in any order."""
        wanted = set(message_ids)
        found: list[tuple[Delivery, Dead, float]] = []
        after: str | None = None
        while wanted:
            page = await self._dead_letters(1_000, after)
            found += [letter for letter in page if letter[0].message_id in wanted]
            if len(page) < 1_000:
                break
            after = page[-1][0].message_id
        return found

    async def _cancel(self, message_id: str) -> Cancelled:
        """End a message that is delayed, pending or in flight, in one step; from then on it counts as settled.

        Of one in flight the lease is gone: its holder's next call raises :class:`ReceiptHandleExpiredError`. A backend that
        can tell the holder sooner calls :meth:`_announce_cancelled` of the mailbox objects in the holder's process.
        """
        raise ConfigError(f"{type(self).__name__} cannot cancel messages (Capabilities.cancel)")

    def _local_name(self, address: str) -> str | None:
        """The name on this store that an address means, or None where it is another store's URL."""
        return None if "://" in address else address

    def _sibling(self, name: str, *, body: Any = None, reply: Any = None) -> Mailbox[Any, Any]:
        """An unopened mailbox of that name on the same store, with the same settings (but no capacity)."""
        raise ConfigError(f"{type(self).__name__} cannot open mailboxes beside it (Capabilities.siblings)")

    def _dead_name(self) -> str:
        """The name of the sibling that says who works on which dead letter of this mailbox."""
        return f"{self.name}~dead"

    async def _drop(self) -> None:
        """Forget this (transient) mailbox and everything in it; called just before it is closed."""
        await self._purge()
        await self._discard_dead(None)

    def _hear_cancelled(self, wanted: bool) -> None:  # noqa: B027 - one that announces in any case, or never, ignores it
        """From now on somebody holds messages here (or nobody does): cancellations by other processes are wanted."""

    def _announce_cancelled(self, message_ids: list[str]) -> None:  # noqa: B027 - the port does it
        """Backends call this, on the mailbox's event loop, when messages that may be in hand here were cancelled."""

    def _announce_silence(self, error: MailboxConnectionError) -> None:  # noqa: B027 - the port does it
        """Backends call this, on the mailbox's event loop, when they find that the server does not answer.

        A loop that waits for no answer hears of it only so.
        """

    def _wake_all(self) -> None:  # noqa: B027 - one whose receives never wait has nothing to do here
        """Let every waiting receive return ``[]`` at once; called as the first thing of a close."""
