"""``Backend``: what a store does for a mailbox. The contract suite says whether one holds.

:class:`~mainspring.mailbox.mailbox.Mailbox` checks, encodes, and keeps the life cycle. It calls its backend with values
that are checked and bodies that are encoded: :class:`Envelope` on the way in, :class:`ClaimedMessage` on the way out, and a
:class:`Settlement` at the end. What the backend learns by itself (a message was cancelled elsewhere, the server is silent)
it publishes in its :class:`Notifications`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, TypeVar

from mainspring.errors import ConfigError
from mainspring.mailbox.limits import check_name, no_transactions
from mainspring.mailbox.message import ACK

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractAsyncContextManager, AbstractContextManager

    from mainspring.errors import MailboxConnectionError
    from mainspring.mailbox.limiters import LimitChange, LimitState
    from mainspring.mailbox.message import (
        Cancelled,
        ClaimedMessage,
        Counts,
        Dead,
        Envelope,
        Message,
        MessagePage,
        MessageQuery,
        RescheduleOutcome,
        Settlement,
        UnfinishedMessage,
    )
    from mainspring.mailbox.records import Record, RecordWrite
    from mainspring.runtime.scope import DaemonScope

V = TypeVar("V")

TRANSIENT: Final = "~"
"""What the names of transient mailboxes begin with: those made for one mailbox object, as for the replies to its requests.

A store keeps such a mailbox for a day after it was last open, so that one whose process died does not stay for ever. It drops a
reply (:attr:`Ack.reply`, :attr:`Dead.reply`) to one that does not exist, rather than make it.
"""
TRANSIENT_LIFE: Final = 86_400.0
"""Seconds that a transient mailbox is kept after it was last opened or claimed from."""

SHARED: Final = "memory://, sqlite://, redis://, postgresql:// and nats:// mailboxes"
LIMITED: Final = "memory://, sqlite://, redis:// and postgresql:// mailboxes"


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
    """True if every mailbox object sees the end of a lease at once, also in the counts. Else the next receive finds it, and
    before that the mailbox object that held the lease counts it."""
    records: bool = False
    """It keeps records: results, progress, schedules. A write can depend on the version, and messages join it in one step."""
    announces_records: bool = False
    """Each change by ``write_record`` is published at once, in all mailbox objects (:attr:`Notifications.records`)."""
    lookup: bool = False
    """An unfinished message can be found by its id."""
    reschedule: bool = False
    """The time of a delayed or pending message can be changed by its id."""
    listing: bool = False
    """Unfinished messages can be listed in pages, by where they are, by task, by key and by date; dead letters by task."""
    edit: bool = False
    """The body of a delayed or pending message can be replaced by its id."""
    limits: bool = False
    """Tasks can have limits across the fleet (rates, concurrency, order of a key) and be paused for all workers, and keys take
    turns."""
    pause: bool = False
    """The mailbox can be paused for all its workers."""
    concurrency: bool = False
    """The messages of the mailbox that are in flight at once can be bounded across the fleet."""
    queue_age: bool = False
    """``counts()`` tells how long the oldest pending message has waited (:attr:`Counts.queue_age`)."""
    lease_granularity: float = 0.0
    """Seconds by which the store may round a lease."""
    async_backends: frozenset[str] = frozenset({"asyncio", "trio"})
    """The event loops that the backend's driver runs on."""


SHARED_STORE = Capabilities(
    durable=True,
    cross_process=True,
    ordered=True,
    joined_acks=True,
    records=True,
    lookup=True,
    reschedule=True,
    listing=True,
    edit=True,
    limits=True,
    pause=True,
    concurrency=True,
    queue_age=True,
)
"""What a durable store can do that processes share, and that finds messages by id, task, key and date."""


def check_changes(name: str, capabilities: Capabilities, changes: Sequence[LimitChange]) -> None:
    """Raise :class:`ConfigError` for a change of limits that a backend cannot make, with the backends that can."""
    from mainspring.mailbox.limiters import ALL_TASKS  # late: only what changes limits needs it

    for change in changes:
        if change.task != ALL_TASKS:
            if not capabilities.limits:
                raise ConfigError(
                    f"mailbox {name!r} keeps no limits or pauses of single tasks (Capabilities.limits); {LIMITED} do"
                )
        elif change.paused is not None and not capabilities.pause:
            raise ConfigError(f"mailbox {name!r} cannot be paused (Capabilities.pause); {SHARED} can")
        elif change.paused is None and not capabilities.concurrency:
            raise ConfigError(f"mailbox {name!r} cannot have a concurrency (Capabilities.concurrency); {SHARED} can")


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


class Topic(Generic[V]):
    """Calls its subscribers with each value that is published. Of one event loop.

    ``on_demand``, if set, is called with True at each subscription, and with False when no subscriber is left.
    """

    __slots__ = ("_subscribers", "on_demand")

    def __init__(self) -> None:
        self._subscribers: list[Callable[[V], object]] = []
        self.on_demand: Callable[[bool], object] | None = None

    def subscribe(self, subscriber: Callable[[V], object]) -> Callable[[], None]:
        """Call ``subscriber`` with each value, until the function that this returns is called."""
        self._subscribers.append(subscriber)
        if self.on_demand is not None:
            self.on_demand(True)
        return partial(self._unsubscribe, subscriber)

    def _unsubscribe(self, subscriber: Callable[[V], object]) -> None:
        self._subscribers.remove(subscriber)
        if self.on_demand is not None and not self._subscribers:
            self.on_demand(False)

    def publish(self, value: V) -> None:
        """Call all subscribers with ``value``."""
        for subscriber in tuple(self._subscribers):
            subscriber(value)

    @property
    def is_wanted(self) -> bool:
        """True if there is a subscriber. Any thread may ask."""
        return bool(self._subscribers)


class Notifications:
    """What a mailbox and its backend tell the holders of messages, on the mailbox's event loop."""

    __slots__ = ("cancelled", "dead", "records", "results", "silence")

    def __init__(self) -> None:
        self.cancelled: Topic[list[str]] = Topic()
        """The ids of cancelled messages, some maybe held by others. A backend publishes them as soon as it can tell."""
        self.silence: Topic[MailboxConnectionError] = Topic()
        """Why the server is found not to answer. A loop whose slots are all busy learns it only here."""
        self.dead: Topic[str] = Topic()
        """The id of a message that this mailbox object has dead-lettered."""
        self.records: Topic[tuple[str, str]] = Topic()
        """The kind and the key of a record that was changed, where :attr:`Capabilities.announces_records` says so."""
        self.results: Topic[list[str]] = Topic()
        """The ids of messages that were acknowledged with a result, by any process. A backend publishes them as soon as it
        can tell; one can be missed. No ids: a backend that begins to hear of results has missed those until now."""


class Backend(ABC):
    """One mailbox on one store. Its :class:`Mailbox` opens and closes it, maybe several times, and alone uses it.

    Calls come on one event loop, only while it is open (but see ``works_unopened``). Durations are seconds, of the event loop's
    clock or the store's own. Dates are POSIX seconds, from :func:`mainspring.core.clock.wall_clock`.

    No call waits without end. Each async method raises :class:`MailboxConnectionError` if the store cannot be reached or does
    not answer; what it was to do may have taken place. Further errors are named below.

    A call may be cancelled where it awaits. A cancelled :meth:`claim` leaves nothing leased. Any other operation has
    not taken place if the store was not given it yet; else it may have.
    """

    capabilities: Capabilities = Capabilities()
    works_unopened: ClassVar[bool] = False
    """True if calls are taken before it is opened (after it was closed they never are)."""

    def __init__(self, name: str) -> None:
        check_name(name)
        self.name = name
        self.notifications = Notifications()

    # --------------------------------------------------------------------------------------------------- life cycle

    @abstractmethod
    async def open(self, scope: DaemonScope) -> None:
        """Connect. Start the tasks that it needs in ``scope``, which ends them.

        If it raises or is cancelled, it leaves nothing open. It may be called again after :meth:`close`.

        :raises ConfigError: the settings cannot work: the login is refused, or the store is of a newer version.
        :raises MailboxConnectionError: the store cannot be reached.
        """

    @abstractmethod
    async def close(self) -> None:
        """Finish what is under way, and disconnect. :meth:`stop_claims` has been called before.

        It has 10 seconds, and raises nothing for a store that is gone. Cancelled, it disconnects without finishing. Messages in
        flight stay leased until their leases end.
        """

    @abstractmethod
    def stop_claims(self) -> None:
        """Let each waiting claim return ``[]`` at once, and later ones too, until it is opened again.

        A close begins with it. It does not wait and raises nothing.
        """

    async def exists(self) -> bool:
        """Return True if the store has the mailbox, which is not open, or cannot tell. Make nothing.

        :raises ConfigError: what the store has is no mailbox, or of a newer version; the login is refused.
        """
        return True

    async def drop(self) -> None:
        """Delete this (transient) mailbox and everything in it. It is called just before :meth:`close`.

        Such a mailbox has no records.
        """
        await self.purge()
        await self.purge_dead_letters(None)

    # ------------------------------------------------------------------------------------------------------- messages

    @abstractmethod
    async def send(self, envelopes: list[Envelope]) -> list[str]:
        """Store all or none, as durably as the store can. Return their ids, in order.

        Where an unfinished message has the same ``dedup_key``, nothing is stored, and the id is that message's. ``delay`` and
        ``expires_in`` are seconds from now. Cancelled after they were given to the store, all or none may have been stored.

        :raises MailboxFullError: there is no room for all of them; none was stored.
        :raises SerializationError: one is larger than the store takes.
        """

    async def send_reply(self, envelope: Envelope) -> str:
        """Store a reply that comes from another store, as :meth:`send` does. Return its id.

        :raises ReplyNotAvailableError: no mailbox of this name is open, and the backend keeps no messages without one.
        """
        return (await self.send([envelope]))[0]

    async def send_within(self, connection: Any, envelopes: list[Envelope]) -> list[str]:
        """Send in the transaction that is under way on the sender's own ``connection``. Return the ids.

        The messages exist if and when that commits. An error leaves the transaction as the driver does.

        :raises ConfigError: the backend cannot (:attr:`Capabilities.transactions`).
        :raises InvalidParameterError: the connection does not fit.
        """
        raise no_transactions(self.name)

    @abstractmethod
    async def claim(
        self, max_messages: int, visibility_timeout: float, wait_time_seconds: float
    ) -> list[ClaimedMessage]:
        """Claim up to ``max_messages`` that are pending, and lease each for ``visibility_timeout`` seconds.

        Return as soon as there is one. Wait only while there is none, at most ``wait_time_seconds`` (0: do not wait), then
        return ``[]``. A message that is sent, or whose delay or lease ends, wakes it at once.

        Cancelled, it leaves nothing leased: what it had claimed it returns in spite of the cancellation, or puts back as if it
        had not been delivered.
        """

    @abstractmethod
    async def settle(self, delivery: ClaimedMessage, settlement: Settlement) -> None:
        """End the delivery as ``settlement`` says, in one step with the reply that it may carry.

        Cancelled after it was given to the store, it may have taken place. Otherwise the message comes again when its lease
        ends.

        :raises ReceiptHandleExpiredError: the lease is not held any more; nothing was changed. It holds from the instant of its
            end, whether or not a sweep has found it.
        :raises ReplyNotAvailableError: the reply cannot be stored; nothing was changed.
        """

    async def acknowledge_many(self, deliveries: list[ClaimedMessage]) -> dict[int, Exception]:
        """Acknowledge these. Return what :meth:`settle` would have raised for each that was refused, by its number in the list.

        A backend that can do it in one step (:attr:`Capabilities.joined_acks`) overrides this, and raises what concerns all of
        them. Cancelled, some may have been acknowledged, and the leases of the others end by themselves.
        """
        refused: dict[int, Exception] = {}
        for number, delivery in enumerate(deliveries):
            try:
                await self.settle(delivery, ACK)
            except Exception as error:
                refused[number] = error
        return refused

    @abstractmethod
    async def extend(self, delivery: ClaimedMessage, timeout: float) -> None:
        """Let the lease last ``timeout`` seconds from now, unless it already lasts longer. A cancelled call may have done so.

        :raises ReceiptHandleExpiredError: the lease is not held any more.
        """

    @abstractmethod
    async def checkpoint(self, delivery: ClaimedMessage, state: bytes) -> None:
        """Keep ``state`` with the message, in place of an earlier one. The next delivery has it. A cancelled call may keep it.

        :raises ReceiptHandleExpiredError: the lease is not held any more; the earlier state stays.
        :raises SerializationError: it is larger than the store takes.
        """

    async def cancel(self, message_id: str) -> Cancelled:
        """End a message that is delayed, pending or in flight, in one step. From then on it counts as settled.

        Return what it was, or that there is none. Of one in flight the lease is gone: its holder's next call raises
        :class:`ReceiptHandleExpiredError`. A backend that can tell the holder sooner publishes ``notifications.cancelled`` in
        the holder's process. The mailbox shields this call for 10 seconds.

        :raises ConfigError: the backend cannot (:attr:`Capabilities.cancel`).
        """
        raise ConfigError(f"mailbox {self.name!r} cannot cancel messages (Capabilities.cancel)")

    async def find(self, message_ids: list[str]) -> list[UnfinishedMessage]:
        """Return those of ``message_ids`` that are delayed, pending or in flight, in any order.

        :raises ConfigError: the backend cannot (:attr:`Capabilities.lookup`).
        """
        raise ConfigError(f"mailbox {self.name!r} cannot find a message by its id (Capabilities.lookup)")

    async def reschedule(self, message_id: str, delay: float) -> RescheduleOutcome:
        """Let a delayed or pending message become pending ``delay`` seconds from now, in one step.

        With 0, a delayed one is pending at once, at the tail, and a pending one keeps its place. ``expires_in`` goes on from
        the send. A message in flight is left as it is.

        :raises ConfigError: the backend cannot (:attr:`Capabilities.reschedule`).
        """
        raise ConfigError(f"mailbox {self.name!r} cannot reschedule messages (Capabilities.reschedule)")

    async def replace_body(self, message_id: str, body: Any) -> RescheduleOutcome:
        """Let a delayed or pending message have another body (as in :class:`Envelope`), in one step. Nothing else changes.

        But without :attr:`Capabilities.front_return` a pending message goes to the tail. A message in flight is left as it is.
        ``RESCHEDULED`` says that it was done.

        :raises ConfigError: the backend cannot (:attr:`Capabilities.edit`).
        :raises SerializationError: it is larger than the store takes; nothing was changed.
        """
        raise ConfigError(f"mailbox {self.name!r} cannot change a message (Capabilities.edit); {SHARED} can")

    async def list_messages(self, query: MessageQuery) -> MessagePage:
        """Return a page of the unfinished messages that ``query`` asks for, in an order of the store's own.

        One call looks at a bounded number of messages, however many the mailbox holds. With a task or a key it looks only
        at messages of that. A message that changes its place between two pages may come twice or not at all. The other
        messages come once. An ``after`` that the store does not understand is the beginning.

        :raises ConfigError: the backend cannot (:attr:`Capabilities.listing`).
        """
        raise ConfigError(f"mailbox {self.name!r} cannot list its messages (Capabilities.listing); {SHARED} can")

    # --------------------------------------------------------------------------------------------------------- limits

    async def change_limits(self, changes: list[LimitChange]) -> None:
        """Change limits in one step; they hold for the whole fleet from then on, also for messages that wait already.

        Wider limits let messages become ready, and wake waiting claims. :mod:`mainspring.mailbox.limiters` says what limits
        mean. A change that leaves the limits as they were costs no write.

        :raises ConfigError: the backend cannot; see :func:`check_changes`.
        """
        check_changes(self.name, self.capabilities, changes)

    async def set_task(self, delivery: ClaimedMessage, task: str) -> bool:
        """Release a message in flight as one of ``task``, if that has limits and the message is of another; True if it did so.

        In one step its permits and its lease end, without a charge, and it waits for the permits of ``task`` in its old place,
        but behind the messages of its key there that were sent before it. So messages of one key keep their order.

        :raises ReceiptHandleExpiredError: the lease is not held any more.
        :raises ConfigError: the backend cannot (:attr:`Capabilities.limits`).
        """
        raise ConfigError(f"mailbox {self.name!r} keeps no limits (Capabilities.limits); {LIMITED} do")

    async def limits(self) -> list[LimitState]:
        """Return the tasks that have limits, are paused or have a changed concurrency, in the order of their names.

        A backend that keeps no limits returns none.
        """
        return []

    # -------------------------------------------------------------------------------------------------------- records

    async def write_record(self, write: RecordWrite, envelopes: Sequence[Envelope] = ()) -> int | None:
        """Change a record and send ``envelopes``, as :meth:`send` does, in one step.

        Return the record's new version (0 for a deletion), or None if another version is there than ``write.if_version``:
        then nothing was changed or sent. A record counts as gone from the instant of its end, whether or not a sweep has
        found it. Purging the messages leaves the records. Cancelled after it was given to the store, it may have taken place.

        :raises ConfigError: the backend keeps none (:attr:`Capabilities.records`).
        :raises MailboxFullError: there is no room for the messages; nothing was changed.
        """
        raise ConfigError(f"mailbox {self.name!r} keeps no records (Capabilities.records)")

    async def find_records(self, kind: str, keys: list[str]) -> list[Record]:
        """Return the records of a kind under ``keys``, in any order; keys without a record are left out.

        :raises ConfigError: the backend keeps none (:attr:`Capabilities.records`).
        """
        raise ConfigError(f"mailbox {self.name!r} keeps no records (Capabilities.records)")

    async def list_records(self, kind: str, limit: int, after: str | None) -> list[Record]:
        """Return up to ``limit`` records of a kind in the order of their keys (by code point), those behind ``after``.

        :raises ConfigError: the backend keeps none (:attr:`Capabilities.records`).
        """
        raise ConfigError(f"mailbox {self.name!r} keeps no records (Capabilities.records)")

    # --------------------------------------------------------------------------------------------------- transactions

    def transaction(self, message: Message[Any, Any], connection: Any) -> AbstractAsyncContextManager[Any]:
        """See :meth:`Mailbox.transaction`. A cancelled block is rolled back, and its message stays leased.

        :raises ConfigError: the backend has none (:attr:`Capabilities.transactions`).
        """
        raise no_transactions(self.name)

    def thread_transaction(self, message: Message[Any, Any], connection: Any) -> AbstractContextManager[Any]:
        """Return the same for a plain handler, which enters and leaves it in its own thread, on a connection of that thread.

        What the block settles is settled at its end.

        :raises ConfigError: the backend has none (:attr:`Capabilities.transactions`), or ``connection`` is None.
        """
        raise no_transactions(self.name)

    # -------------------------------------------------------------------------------------------------- looking after

    @abstractmethod
    async def counts(self) -> Counts:
        """Return the counts, with ``queue_age`` (seconds) if the store finds the first in line without reading the others."""

    def statistics(self) -> MailboxStatistics:
        """See :meth:`Mailbox.statistics`. It asks nothing of the store."""
        return MailboxStatistics(connected=True)

    @abstractmethod
    async def purge(self) -> int:
        """Delete all messages that are delayed, pending or in flight. Return how many. From then on they count as settled.

        Settling one of those in flight then raises :class:`ReceiptHandleExpiredError`.
        """

    @abstractmethod
    async def dead_letters(self, limit: int, after: str | None) -> list[tuple[ClaimedMessage, Dead, float]]:
        """Return up to ``limit`` dead letters, the oldest first, each with its date of death (POSIX seconds).

        With ``after``, begin behind the dead letter of that id; without such a one, at the oldest.
        """

    async def dead_letters_of(
        self, task: str, limit: int, after: str | None
    ) -> list[tuple[ClaimedMessage, Dead, float]]:
        """Return the dead letters of a task, as :meth:`dead_letters` does. It looks only at those of the task.

        The task is that of the send (:attr:`Envelope.task`). ``after`` may name a dead letter of another task.

        :raises ConfigError: the backend cannot (:attr:`Capabilities.listing`).
        """
        raise ConfigError(f"mailbox {self.name!r} cannot list by task (Capabilities.listing); {SHARED} can")

    @abstractmethod
    async def replay_dead_letters(self, message_ids: list[str] | None) -> int:
        """Make these dead letters pending again, or all (None): at the tail, with fresh counts. Return how many.

        Ids of which there is no dead letter are skipped. A store that replays some at a time may have replayed some when it
        raises or is cancelled; another call replays the rest.

        :raises MailboxFullError: there is no room for all of them; none was replayed.
        """

    @abstractmethod
    async def purge_dead_letters(self, message_ids: list[str] | None) -> int:
        """Delete these dead letters for good, or all (None). Return how many. From then on they count as settled."""

    async def find_dead_letters(self, message_ids: list[str]) -> list[tuple[ClaimedMessage, Dead, float]]:
        """Return those of ``message_ids`` that are dead letters, as :meth:`dead_letters` does, in any order."""
        wanted = set(message_ids)
        found: list[tuple[ClaimedMessage, Dead, float]] = []
        after: str | None = None
        while wanted:
            page = await self.dead_letters(1_000, after)
            found += [letter for letter in page if letter[0].message_id in wanted]
            if len(page) < 1_000:
                break
            after = page[-1][0].message_id
        return found

    @property
    def capacity(self) -> int | None:
        """How many messages may wait or be in flight before a send is refused; None: as many as the store holds."""
        return None

    # ---------------------------------------------------------------------------------------------- others on its store

    @property
    def address(self) -> str:
        """The address by which senders name this mailbox in ``reply_to``: its URL if it has one, else its name."""
        return self.name

    def local_name(self, address: str) -> str | None:
        """Return the name on this store that an address means, or None if it is another store's URL."""
        return None if "://" in address else address

    def sibling(self, name: str) -> Backend:
        """Return the backend, unopened, of another mailbox on the same store, with the same settings (but no capacity).

        :raises ConfigError: the backend cannot (:attr:`Capabilities.siblings`).
        """
        raise ConfigError(f"mailbox {self.name!r} cannot open mailboxes beside it (Capabilities.siblings)")

    @property
    def tickets_name(self) -> str:
        """The name of the sibling that says who works on which dead letter of this mailbox."""
        return f"{self.name}~dead"
