"""What passes between a mailbox and its users: envelopes in, deliveries out, and the settlements that end them."""

from __future__ import annotations

from collections.abc import Mapping  # noqa: TC003 - a web framework resolves the annotations of DeadLetter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from functools import cache
from itertools import count
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeAlias

from typing_extensions import TypeVar

from mainspring.core import clock, random
from mainspring.core.process import on_fork
from mainspring.errors import MessageSettledError, ReplyNotAvailableError, copied, reason_of, text_and_type
from mainspring.mailbox.codec import Unserialized
from mainspring.mailbox.history import Failure, crashes_before, read_history, remember, silences
from mainspring.mailbox.limits import check_seconds
from mainspring.validation import MAX_DELAY, Seconds, as_seconds

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from mainspring.mailbox.mailbox import Mailbox

T = TypeVar("T", default=Any)
R = TypeVar("R", default=Any)


@dataclass(slots=True)
class Envelope:
    """A message on its way into a store. ``body`` is JSON bytes, or :class:`Unserialized` where nothing is serialised."""

    message_id: str
    body: Any
    delay: float = 0.0
    reply_to: str | None = None
    dedup_key: str | None = None
    priority: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    expires_in: float | None = None
    task: str | None = None
    """The task whose limits hold for it, and by which it can be listed."""
    key: str | None = None
    """The key within the task: its share and its limits (see :mod:`mainspring.mailbox.limiters`). Only with a task."""
    weight: float = 1.0
    """How many messages of this key come in turn for one of a key of weight 1: 0.01 to 100."""


def is_new(sent: str, stored: str) -> bool:
    """True if the id ``stored`` is that of the message that was sent, rather than of an unfinished one with its ``dedup_key``.

    ``sent`` is the id in its envelope. A store may add something to the end of the id of a message with a key.
    """
    return stored.startswith(sent)


@dataclass(slots=True)
class ClaimedMessage:
    """One claim of a message by one receiver, as a backend reports it. Times are POSIX seconds.

    ``receipt_handle`` is the fencing token: new at each delivery, and the only key to settle, extend or checkpoint it.
    """

    message_id: str
    body: Any
    receipt_handle: str
    delivery_count: int
    attempt: int
    enqueued_at: float
    first_received_at: float
    reply_to: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    checkpoint: bytes | None = None
    leased_at: float | None = None
    """The instant (anyio's clock) from which the lease surely counts: just before the claim was made."""
    history: str | None = None
    """What the last :class:`Nack` with a ``history`` left with the message, as it was given (JSON text)."""
    is_readable: bool = True
    """False if what the store holds beside the body was not written by a mailbox: the receive dead-letters the message."""

    @property
    def queue_seconds(self) -> float:
        """Seconds from the send to the first delivery."""
        return max(0.0, self.first_received_at - self.enqueued_at)


def header_of(headers: Mapping[str, str], name: str) -> str | None:
    """Return a header of Mainspring's own, or None. Without the prefix is how earlier revisions named it, for one release."""
    value = headers.get(name)
    return headers.get(_former_name(name)) if value is None else value


@cache
def _former_name(name: str) -> str:
    return name.removeprefix("mainspring-").replace("-", "_")


Delivery = ClaimedMessage
"""Its name of earlier revisions, for one release."""


@dataclass(frozen=True, slots=True)
class Result:
    """What is kept of a message that is done: the record of kind ``result`` under its id, for ``expires_in`` seconds."""

    value: bytes
    expires_in: float


@dataclass(frozen=True, slots=True)
class Ack:
    """Done. ``reply``, where there is one, leaves in the same step, to the mailbox named by ``reply.reply_to``.

    ``result``, where there is one, is written in the same step.
    """

    reply: Envelope | None = None
    result: Result | None = None


ACK = Ack()


@dataclass(frozen=True, slots=True)
class Nack:
    """Put the message back: invisible for ``delay`` seconds, then pending at the tail.

    A release is one with ``charge=False`` (it is no attempt) and ``front=True`` (before all that wait).
    """

    delay: float = 0.0
    charge: bool = True
    front: bool = False
    history: str | None = None
    """Replaces the message's history; None leaves it as it is."""


@dataclass(frozen=True, slots=True)
class Dead:
    """Give up: to the dead letters, with why.

    ``history``, where it is given, replaces the message's; ``reply``, where there is one, leaves in the same step as in
    :class:`Ack`: it tells a requester that there will be no result.
    """

    error: str
    error_type: str
    traceback: str = ""
    history: str | None = None
    reply: Envelope | None = None

    @classmethod
    def of(cls, error: BaseException | str) -> Dead:
        """Describe an exception (with its traceback) or a plain reason."""
        return cls(*reason_of(error))


class Keep(Dead):
    """The settlement that leaves a dead letter where it is, for a person to look at: it is no failure."""

    __slots__ = ()


UNREADABLE = Dead("what the store holds for this message was not written by a mailbox", "NotJsonError")
EXPIRED = Dead("it was not done before its time (expires_in) ran out", "MessageExpiredError")
"""Why a message is dead that was not in flight when its ``expires_in`` was over."""

Settlement: TypeAlias = Ack | Nack | Dead
Return = Nack
"""The former name of :class:`Nack`, for one release."""


class CancelOutcome(StrEnum):
    """What a cancellation by id found."""

    REMOVED = "removed"
    """The message was delayed or pending; it will not be received."""
    CANCELLED = "cancelled"
    """It was in flight: its lease is revoked, and its handler is being cancelled."""
    UNKNOWN = "unknown"
    """No message of that id is delayed, pending or in flight: it is settled, dead, or of another mailbox."""


class Cancelled(NamedTuple):
    """What a backend's cancellation found, with what the message's sender wanted to hear (``reply_to`` and headers)."""

    outcome: CancelOutcome
    reply_to: str | None = None
    headers: Mapping[str, str] = MappingProxyType({})


UNKNOWN = Cancelled(CancelOutcome.UNKNOWN)


class MessagePlace(StrEnum):
    """Where an unfinished message is; the names are those of :class:`Counts`."""

    DELAYED = "delayed"
    PENDING = "pending"
    IN_FLIGHT = "in_flight"


@dataclass(frozen=True, slots=True)
class UnfinishedMessage:
    """A message that is delayed, pending or in flight, as the store has it.

    In ``message`` the counts include a delivery under way; ``attempt`` counts the charged attempts that were begun.
    ``receipt_handle`` is empty, and ``first_received_at`` is 0 before the first delivery.
    """

    message: ClaimedMessage
    place: MessagePlace
    due_at: float | None = None
    """When a delayed message becomes pending (POSIX seconds)."""
    priority: int = 0
    key: str | None = None
    """What :attr:`Envelope.key` was."""


@dataclass(frozen=True, slots=True)
class MessageQuery:
    """Which unfinished messages to list: those in ``place``, of ``task`` and ``key`` (None: any), sent at ``since`` or later.

    ``since`` is in POSIX seconds (None: any). ``after`` is where the last page ended (:attr:`MessagePage.after`), or None for
    the first page.
    """

    place: MessagePlace
    limit: int
    after: str | None = None
    task: str | None = None
    key: str | None = None
    since: float | None = None


class MessagePage(NamedTuple):
    """Messages of a list, and where the next page begins (a text of the store's own), or None where this is the last.

    A page may hold fewer than were asked for, or none, though others follow: the store then has looked at enough.
    """

    messages: list[UnfinishedMessage]
    after: str | None


class RescheduleOutcome(StrEnum):
    """What :meth:`Backend.reschedule` found."""

    RESCHEDULED = "rescheduled"
    IN_FLIGHT = "in_flight"
    """A worker holds the message; nothing was changed."""
    UNKNOWN = "unknown"
    """No message of that id is delayed, pending or in flight."""


@dataclass(frozen=True, slots=True)
class DeadLetter(Generic[T]):
    """A message that was given up, and why.

    ``body`` is the decoded body, or None where it could not be decoded; ``raw`` is what the store held (JSON bytes, or
    the object of a mailbox that does not serialise). ``request_id`` equals the id of the message it was.
    """

    message_id: str
    body: T | None
    raw: Any
    mailbox: str
    delivery_count: int
    attempt: int
    error: str
    error_type: str
    traceback: str
    enqueued_at: datetime
    first_received_at: datetime | None
    dead_lettered_at: datetime
    request_id: str
    reply_to: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    history: tuple[Failure, ...] = ()
    """Its latest failures, oldest first, with the one that was the last; at most 10."""

    @classmethod
    def of(cls, mailbox: str, delivery: ClaimedMessage, body: T | None, dead: Dead, at: float) -> DeadLetter[T]:
        """Describe the message of ``delivery``, which died at ``at`` (POSIX seconds)."""
        received = delivery.first_received_at
        return cls(
            message_id=delivery.message_id,
            body=body,
            raw=delivery.body.body if type(delivery.body) is Unserialized else delivery.body,
            mailbox=mailbox,
            delivery_count=delivery.delivery_count,
            attempt=delivery.attempt,
            error=dead.error,
            error_type=dead.error_type,
            traceback=dead.traceback,
            enqueued_at=datetime.fromtimestamp(delivery.enqueued_at, UTC),
            first_received_at=datetime.fromtimestamp(received, UTC) if received else None,
            dead_lettered_at=datetime.fromtimestamp(at, UTC),
            request_id=delivery.message_id,
            reply_to=delivery.reply_to,
            headers=delivery.headers,
            history=read_history(delivery.history),
        )


@dataclass(frozen=True, slots=True)
class Counts:
    """Where the messages of a mailbox are. Each message is in exactly one part.

    ``settled`` counts, since the store was made, those acknowledged and those purged; the others are present numbers.
    """

    delayed: int = 0
    pending: int = 0
    in_flight: int = 0
    settled: int = 0
    dead: int = 0
    queue_age: float | None = field(default=None, compare=False, kw_only=True)
    """Seconds since the send of the oldest pending message: 0.0 where none is pending, None where the backend does not tell.

    Of the messages that are first in line, one for each priority, it is the one that was sent first. The time runs from the
    first send: a message that was delayed, nacked or replayed keeps it. Two counts are equal whatever their ages.
    """

    @property
    def waiting(self) -> int:
        """The number of messages that are still to be done: delayed, pending and in flight."""
        return self.delayed + self.pending + self.in_flight


class Message(Generic[T, R]):
    """One delivery of a message: its body, its counts, and the calls that end it.

    Exactly one of :meth:`acknowledge`, :meth:`nack`, :meth:`release`, :meth:`dead_letter` and :meth:`reply` ends a delivery;
    a second one raises :class:`MessageSettledError` (only an ``acknowledge`` after a ``reply``, which has acknowledged
    already, does nothing). Once the lease has run out, each of them, and :meth:`extend_visibility`, raises
    :class:`ReceiptHandleExpiredError` and has no effect. A call that fails with :class:`MailboxConnectionError` leaves the
    delivery unsettled and may be tried again. A call that is cancelled may or may not have taken effect.
    """

    __slots__ = ("_body", "_is_decoded", "_replied", "delivery", "is_settling", "mailbox", "settlement")

    def __init__(
        self,
        mailbox: Mailbox[T, R],
        delivery: ClaimedMessage,
        body: Any,
        *,
        is_decoded: bool = True,
    ) -> None:
        self.mailbox = mailbox
        """The mailbox that it was received from."""
        self.delivery = delivery
        """The backend's record of it."""
        self._body = body
        self._is_decoded = is_decoded
        self.settlement: Settlement | None = None
        """How this delivery was ended through this object, or None."""
        self.is_settling = False
        """True until the store has answered the settlement in :attr:`settlement`."""
        self._replied = False

    def __repr__(self) -> str:
        d = self.delivery
        state = " settled" if self.is_settled else ""
        return (
            f"<Message {d.message_id} of {self.mailbox.name!r} delivery {d.delivery_count} attempt {d.attempt}{state}>"
        )

    @property
    def id(self) -> str:
        """The id that ``send`` returned; the same for all deliveries."""
        return self.delivery.message_id

    @property
    def body(self) -> T:
        """The decoded body. Raises :class:`SerializationError` where the stored JSON does not fit the mailbox's type.

        That is a failed attempt like any other: during a rolling deploy another worker may understand the message.
        """
        if not self._is_decoded:  # the error is made anew: a stored error would keep the whole receive alive
            return self.mailbox.body_of(self.delivery)  # type: ignore[no-any-return]
        return self._body  # type: ignore[no-any-return]

    @property
    def receipt_handle(self) -> str:
        """The fencing token of this delivery."""
        return self.delivery.receipt_handle

    @property
    def delivery_count(self) -> int:
        """The number of this delivery, from 1; every delivery counts."""
        return self.delivery.delivery_count

    @property
    def attempt(self) -> int:
        """The number of this charged attempt, from 1; releases and uncharged returns do not count."""
        return self.delivery.attempt

    @property
    def crashes(self) -> int:
        """How many earlier deliveries ended with their worker: their leases ran out without a settlement.

        Each counts as an attempt. It is 0 where the store keeps no history.
        """
        delivery = self.delivery
        if delivery.attempt == 1 or not self.mailbox.capabilities.history:
            return 0
        return crashes_before(delivery.history, delivery.attempt)

    @property
    def enqueued_at(self) -> datetime:
        """The date at which it was sent (UTC)."""
        return datetime.fromtimestamp(self.delivery.enqueued_at, UTC)

    @property
    def first_received_at(self) -> datetime:
        """The date of its first delivery to any worker (UTC)."""
        return datetime.fromtimestamp(self.delivery.first_received_at, UTC)

    @property
    def reply_to(self) -> str | None:
        """The mailbox that wants the result: a name on the same store, or a mailbox URL."""
        return self.delivery.reply_to

    @property
    def headers(self) -> Mapping[str, str]:
        """The sender's headers."""
        return self.delivery.headers

    @property
    def leased_at(self) -> float | None:
        """The instant (anyio's clock) from which the lease surely counts, or None where the backend does not say."""
        return self.delivery.leased_at

    @property
    def is_settled(self) -> bool:
        """True if this delivery was ended through this object."""
        return self.settlement is not None

    @property
    def checkpoint(self) -> bytes | None:
        """The JSON last written by :meth:`save_checkpoint` in any earlier delivery, or None."""
        return self.delivery.checkpoint

    @property
    def history(self) -> tuple[Failure, ...]:
        """The errors of its earlier charged attempts, oldest first; at most the last 10."""
        return read_history(history_until(self.mailbox, self.delivery))

    async def acknowledge(self) -> None:
        """Settle the message as done; it leaves the mailbox."""
        if self._replied:
            return
        await self.settle(ACK)

    async def nack(self, *, delay: Seconds = 0, charge: bool = True, error: BaseException | str | None = None) -> None:
        """Give it back to be tried again after ``delay`` seconds, or that timedelta (0 to 366 days), at the tail.

        ``charge=False`` does not count the attempt. ``error`` says what went wrong, for the message's history, which else
        says that nothing was said.
        """
        delay = as_seconds(delay)
        check_seconds("nack: delay", delay, MAX_DELAY)
        failure = _GIVEN_BACK if error is None else text_and_type(error)
        history = history_with(self.mailbox, self.delivery, *failure) if charge else None
        await self.settle(Nack(float(delay), charge, history=history))

    async def release(self) -> None:
        """Hand it back as if it had not been delivered: to the front of the queue, and not charged."""
        await self.settle(_RELEASE)

    async def dead_letter(self, error: BaseException | str) -> None:
        """Give it up: it moves to the mailbox's dead letters with ``error`` and, of an exception, its traceback."""
        await self.settle(Dead.of(error))

    async def reply(self, body: R) -> None:
        """Send the result to ``reply_to`` and acknowledge the message, in one step where both are on one store.

        The reply's ``headers["request_id"]`` is this message's id. Raises :class:`ReplyNotAvailableError` where the sender
        asked for none, and :class:`SerializationError` for a body that is not of the mailbox's reply type; both leave the
        message unsettled.
        """
        if self.delivery.reply_to is None:
            raise ReplyNotAvailableError(f"message {self.id}: its sender set no reply_to; acknowledge it instead")
        await self.settle(Ack(self.mailbox.reply_to(self, body)))
        self._replied = True

    async def extend_visibility(self, timeout: float) -> None:
        """Let the lease last at least ``timeout`` seconds (0 to 43 200) from now; it is never shortened."""
        if self.settlement is not None:
            raise self._settled_error()
        await self.mailbox.extend(self.delivery, timeout)

    async def renew(self, timeout: float) -> None:
        """Let the lease last ``timeout`` seconds from now, also while a settlement is under way; never shorten it.

        It is :meth:`extend_visibility` for the code that settles. Cancelled, it may have extended the lease.

        :raises ReceiptHandleExpiredError: the lease is over, or the message is settled on the store.
        :raises MailboxConnectionError: the store cannot be reached; the lease ends when it would have.
        """
        await self.mailbox.extend(self.delivery, timeout)

    async def save_checkpoint(self, state: bytes) -> None:
        """Keep ``state`` (JSON) with the message, for its next delivery; replaces the one before."""
        if self.settlement is not None:
            raise self._settled_error()
        await self.mailbox.save_checkpoint(self.delivery, state)
        self.delivery.checkpoint = state

    async def settle(self, settlement: Settlement) -> None:
        """End this delivery as ``settlement`` says: the step the named calls above come down to."""
        if self.settlement is not None:
            raise self._settled_error()
        self.settlement, self.is_settling = settlement, True
        try:
            await self.mailbox.settle(self.delivery, settlement)
        except Exception:
            self.settlement = None
            raise
        finally:
            self.is_settling = False

    def _settled_error(self) -> MessageSettledError:
        return MessageSettledError(f"message {self.id}: this delivery is already settled; settle it once")


_RELEASE = Nack(charge=False, front=True)
_GIVEN_BACK = ("given back by nack(), without an error", "Nack")


def history_with(mailbox: Mailbox[Any, Any], delivery: ClaimedMessage, error: str, error_type: str) -> str | None:
    """Return the history of a message with that failure as that of this attempt; None where the store keeps none."""
    if not mailbox.capabilities.history:
        return None
    now = clock.utc_now().timestamp()
    return remember(delivery.history, delivery.attempt, error, error_type, now)


def history_until(mailbox: Mailbox[Any, Any], delivery: ClaimedMessage) -> str | None:
    """Return the history of a message with those attempts before this one of which no failure was told."""
    return silences(delivery.history, delivery.attempt) if mailbox.capabilities.history else None


async def acknowledge_together(
    messages: Sequence[Message[Any, Any]],
    acknowledge: Callable[[list[ClaimedMessage]], Awaitable[dict[int, Exception]]],
) -> dict[int, Exception]:
    """Have ``acknowledge`` end the deliveries of ``messages``; see :meth:`Mailbox.acknowledge_many`."""
    for message in messages:
        if message.settlement is not None:
            raise message._settled_error()  # noqa: SLF001 - one module
    once = list(dict.fromkeys(messages))
    for message in once:
        message.settlement, message.is_settling = ACK, True
    try:
        refused = await acknowledge([message.delivery for message in once]) if once else {}
    except Exception:
        for message in once:
            message.settlement = None
        raise
    finally:
        for message in once:
            message.is_settling = False
    for number in refused:
        once[number].settlement = None
    return refused if len(once) == len(messages) else _with_repeats(messages, once, refused)


def _with_repeats(
    messages: Sequence[Message[Any, Any]], once: list[Message[Any, Any]], refused: dict[int, Exception]
) -> dict[int, Exception]:
    """Return what was refused ``once`` each, by the numbers of ``messages``, of which some are there again."""
    first = {message: number for number, message in reversed(list(enumerate(messages)))}
    errors = {once[number]: error for number, error in refused.items()}
    found: dict[int, Exception] = {}
    for number, message in enumerate(messages):
        if message in errors:
            found[number] = copied(errors[message])
        elif first[message] != number and message.settlement is not None:
            found[number] = message._settled_error()  # noqa: SLF001 - one module
    return found


class MessageIds:
    """The ids of new messages: a random prefix of one mailbox object and a count, so that they sort in order of sending.

    A forked child has a prefix of its own: else its next id were that of its parent's next one, and its brothers'.
    """

    __slots__ = ("__weakref__", "next")

    next: Callable[[], str]
    """Return a new id."""

    def __init__(self) -> None:
        self._forget()
        on_fork(self, MessageIds._forget)

    def _forget(self) -> None:
        self.next = self._first

    def _first(self) -> str:
        self.next = map(f"{random.token(64)}%08x".__mod__, count(1)).__next__
        return self.next()

    def take(self, many: int) -> list[str]:
        """Return ``many`` new ids, in order."""
        return [self.next() for _ in range(many)]
