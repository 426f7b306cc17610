"""The mailbox port: what every backend is to its users, and the few hooks that a backend writes.

The public calls check their parameters, encode and decode, and keep the life cycle; a backend implements the ``_hooks``
on :class:`Envelope`, :class:`Delivery` and :class:`Settlement` and need not repeat any of it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar

import anyio

from mainspring import entropy
from mainspring.errors import (
    ConfigError,
    InvalidParameterError,
    MailboxClosedError,
    ReplyNotAvailableError,
    SerializationError,
)
from mainspring.mailbox.codec import Codec, NotJsonError, type_name
from mainspring.mailbox.message import (
    MAX_DELAY,
    Ack,
    Counts,
    Dead,
    DeadLetter,
    Delivery,
    Envelope,
    Message,
    Settlement,
)
from mainspring.process import async_library
from mainspring.scope import DaemonScope
from mainspring.states import MAILBOX, MailboxState, StateMachine

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from types import TracebackType

    from mainspring.mailbox.replies import ReplyRouter

T = TypeVar("T")
R = TypeVar("R")

MAX_MESSAGES = 1_000
MAX_VISIBILITY = 43_200.0
MAX_PRIORITY = 32_767
_ACK = Ack()


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
    """A reply to a mailbox on the same store and the acknowledgement are one step."""
    lease_granularity: float = 0.0
    """Seconds by which the store may round a lease."""
    async_backends: frozenset[str] = frozenset({"asyncio", "trio"})
    """The event loops that the backend's driver runs on."""


class Mailbox(ABC, Generic[T, R]):
    """A queue of messages with leases: at-least-once, fenced, first in first out among equal priorities.

    A new mailbox is unopened; ``async with mailbox`` opens it, and a LoopGroup opens what is not open. A closed mailbox can
    be opened again. All its calls belong to the event loop it was opened on.
    """

    capabilities: ClassVar[Capabilities]

    def __init__(self, name: str, *, body: Any = None, reply: Any = None) -> None:
        if not name or not isinstance(name, str):
            raise ConfigError(f"a mailbox needs a name of at least one character, not {name!r}")
        self.name = name
        self._body_type = body
        self._reply_type = reply
        self._codec: Codec | None = None
        self._reply_codec: Codec | None = None
        self._state: StateMachine[MailboxState] = StateMachine(MAILBOX, MailboxState.UNOPENED, name=f"mailbox {name!r}")
        self._scope: DaemonScope | None = None
        self._replies: ReplyRouter | None = None
        self._id_prefix = ""
        self._id_count = 0

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} {self._state.state}>"

    # ------------------------------------------------------------------------------------------------- for backends

    @abstractmethod
    async def _open(self, scope: DaemonScope) -> None:
        """Connect; tasks the backend needs are started in ``scope`` and end with it."""

    @abstractmethod
    async def _close(self) -> None:
        """Flush and disconnect. Waiting receives have been told; no further hook is called until the next open."""

    @abstractmethod
    async def _put(self, envelopes: list[Envelope]) -> list[str]:
        """Store all or none, as durably as the backend does; the ids (an earlier one's where ``dedup_key`` matched)."""

    @abstractmethod
    async def _claim(self, max_messages: int, visibility_timeout: float, wait_time_seconds: float) -> list[Delivery]:
        """Claim what is available, at most ``max_messages``; wait only while there is none; ``[]`` when closed."""

    @abstractmethod
    async def _settle(self, delivery: Delivery, settlement: Settlement) -> None:
        """End the delivery in one step; :class:`ReceiptHandleExpiredError` where its lease is not held any more."""

    @abstractmethod
    async def _extend(self, delivery: Delivery, timeout: float) -> None:
        """Let the lease last ``timeout`` seconds from now, unless it already lasts longer."""

    @abstractmethod
    async def _save_checkpoint(self, delivery: Delivery, state: bytes) -> None:
        """Keep ``state`` with the message while its lease is held."""

    @abstractmethod
    async def _counts(self) -> Counts:
        """Where the messages are."""

    @abstractmethod
    async def _purge(self) -> int:
        """Drop all that is delayed, pending and in flight; how many that were."""

    @abstractmethod
    async def _dead_letters(self, limit: int, after: str | None) -> list[tuple[Delivery, Dead, float]]:
        """The oldest dead letters (behind the one with id ``after``) and when each died (POSIX seconds)."""

    @abstractmethod
    async def _replay(self, message_ids: list[str] | None) -> int:
        """Make dead letters pending again with fresh counts, at the tail; None means all; how many that were."""

    @abstractmethod
    async def _discard_dead(self, message_ids: list[str] | None) -> int:
        """Forget dead letters for good; None means all; how many that were."""

    def _wake_all(self) -> None:
        """Let every waiting receive return ``[]`` at once; called as the first thing of a close."""

    serializes: bool = True
    """Whether bodies reach the store as JSON bytes (else as the objects they are)."""

    # --------------------------------------------------------------------------------------------------- life cycle

    @property
    def state(self) -> MailboxState:
        """Unopened, open or closed."""
        return self._state.state

    async def __aenter__(self) -> Self:
        self._check_async_backend()
        if self._state.state is MailboxState.OPEN:
            raise ConfigError(f"mailbox {self.name!r} is already open; open it in one place and pass it on")
        scope = DaemonScope(f"mailbox {self.name}")
        await scope.__aenter__()
        try:
            await self._open(scope)
            from mainspring.mailbox.replies import ReplyRouter

            self._replies = ReplyRouter(scope)
        except BaseException as error:
            await scope.__aexit__(type(error), error, error.__traceback__)
            raise
        self._scope = scope
        self._state.to(MailboxState.OPEN, 0.0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        with anyio.CancelScope(shield=True, deadline=anyio.current_time() + CLOSE_TIMEOUT):
            await self.close()
        scope, self._scope = self._scope, None
        return await scope.__aexit__(kind, error, trace) if scope is not None else None

    async def close(self) -> None:
        """Wake the waiting receives (they return ``[]``), finish what is under way, disconnect. Idempotent.

        Messages in flight stay leased until their leases end. Later calls raise :class:`MailboxClosedError`.
        """
        if self._state.state is MailboxState.CLOSED:
            return
        opened = self._state.state is MailboxState.OPEN
        self._state.to(MailboxState.CLOSED, 0.0)
        self._wake_all()
        if opened:
            await self._close()
        if self._scope is not None:
            self._scope.cancel()

    # ------------------------------------------------------------------------------------------------------- sending

    async def send(
        self,
        body: T,
        *,
        delay: float = 0,
        reply_to: str | Mailbox[Any, Any] | None = None,
        dedup_key: str | None = None,
        priority: int = 0,
        headers: Mapping[str, str] | None = None,
        expires_in: float | None = None,
    ) -> str:
        """Put one message into the mailbox and return its id, once it is as durable as the backend makes it.

        :param delay: seconds (0 to 366 days) during which nobody receives it.
        :param reply_to: where the result is wanted: the name of a mailbox on the same store, a mailbox URL, or a mailbox.
        :param dedup_key: while a message with this key is unfinished, a second send returns the first one's id.
        :param priority: higher is received sooner (-32 767 to 32 767).
        :param headers: strings that travel with it.
        :param expires_in: seconds after which, if nobody is working on it, it goes to the dead letters.
        :raises MailboxClosedError: the mailbox is not open.
        :raises MailboxFullError: it holds as many messages as it may.
        :raises SerializationError: the body does not fit the mailbox's type.
        :raises MailboxConnectionError: the store cannot be reached; trying again is safe with a ``dedup_key``.

        Cancelled before the message was handed over, it has sent nothing; afterwards it may have been sent.
        """
        envelope = self._envelope(body, delay, reply_to, dedup_key, priority, headers, expires_in)
        return (await self._put([envelope]))[0]

    async def send_many(
        self,
        bodies: Iterable[T],
        *,
        delay: float = 0,
        reply_to: str | Mailbox[Any, Any] | None = None,
        priority: int = 0,
        headers: Mapping[str, str] | None = None,
        expires_in: float | None = None,
    ) -> list[str]:
        """Put all of ``bodies`` into the mailbox, in order, or (where one does not fit) none; their ids.

        The parameters are those of :meth:`send` and hold for each message.
        """
        envelopes = [self._envelope(body, delay, reply_to, None, priority, headers, expires_in) for body in bodies]
        return await self._put(envelopes) if envelopes else []

    def _envelope(
        self,
        body: Any,
        delay: float,
        reply_to: str | Mailbox[Any, Any] | None,
        dedup_key: str | None,
        priority: int,
        headers: Mapping[str, str] | None,
        expires_in: float | None,
    ) -> Envelope:
        self._check_open()
        if delay or priority or reply_to is not None or dedup_key is not None or headers or expires_in is not None:
            _check_send(delay, dedup_key, priority, headers, expires_in)
        codec = self.codec
        payload: Any = body
        if self.serializes:
            payload = codec.encode(body)
        else:
            codec.check(body)
        address = reply_to.address if isinstance(reply_to, Mailbox) else reply_to
        return Envelope(
            self.new_id(), payload, float(delay), address, dedup_key, priority, dict(headers or ()), expires_in
        )

    def new_id(self) -> str:
        """A new message id: a random prefix of this mailbox object and a count, so that ids sort in order of sending."""
        if not self._id_prefix:
            self._id_prefix = entropy.token(96)
        self._id_count += 1
        return f"{self._id_prefix}{self._id_count:08x}"

    # ----------------------------------------------------------------------------------------------------- receiving

    async def receive(
        self, *, max_messages: int = 1, visibility_timeout: float = 60, wait_time_seconds: float = 0
    ) -> list[Message[T, R]]:
        """Lease up to ``max_messages`` messages (1 to 1,000) for ``visibility_timeout`` seconds (0 to 43,200).

        Returns what is available as soon as there is one, and never waits to fill the batch. While there is none it waits
        ``wait_time_seconds``, woken at once by a send, an expired lease, the end of a delay, or a close (then ``[]``).

        Bytes that are no JSON do not come out: they go to the dead letters, and their neighbours are returned. A cancelled
        receive has claimed nothing.

        :raises InvalidParameterError: a value is outside its limits.
        :raises MailboxClosedError: the mailbox was closed before the call.
        :raises MailboxConnectionError: the store cannot be reached; nothing was claimed, as far as is known.
        """
        self._check_open()
        check_receive(max_messages, visibility_timeout, wait_time_seconds)
        deadline = anyio.current_time() + wait_time_seconds
        while True:
            wait = max(0.0, deadline - anyio.current_time()) if wait_time_seconds else 0.0
            deliveries = await self._claim(max_messages, visibility_timeout, wait)
            messages = [message for d in deliveries if (message := await self._decode(d)) is not None]
            if messages or not deliveries:
                return messages

    async def _decode(self, delivery: Delivery) -> Message[T, R] | None:
        if not self.serializes:
            return Message(self, delivery, delivery.body)
        try:
            return Message(self, delivery, self.codec.decode(delivery.body))
        except NotJsonError as error:
            with anyio.CancelScope(shield=True, deadline=anyio.current_time() + CLOSE_TIMEOUT):
                await self._settle(delivery, Dead.of(error))
            return None
        except SerializationError as error:
            return Message(self, delivery, None, error)

    # ------------------------------------------------------------------------- what Message and the engine call

    async def settle(self, delivery: Delivery, settlement: Settlement) -> None:
        """End a delivery (see :class:`Message`)."""
        self._check_open()
        if type(settlement) is Ack and settlement.reply is not None:
            await self._settle_with_reply(delivery, settlement.reply)
        else:
            await self._settle(delivery, settlement)

    async def _settle_with_reply(self, delivery: Delivery, reply: Envelope) -> None:
        """One step where the reply goes to this store, else send it while the lease is held, then acknowledge."""
        address = reply.reply_to or ""
        local = self._local_name(address)
        if local is not None:
            await self._settle(delivery, Ack(replace(reply, reply_to=local)))
            return
        if self._replies is None:
            raise ReplyNotAvailableError(
                f"the reply cannot be sent to {address!r}, another store than that of mailbox {self.name!r}: open the"
                " mailbox with `async with`, so that it can keep the connection"
            )
        await self._extend(delivery, 0.0)  # shortens nothing, and is refused where the lease is lost
        await self._replies.send(address, replace(reply, reply_to=None, dedup_key=f"reply:{delivery.message_id}"))
        await self._settle(delivery, _ACK)

    async def send_encoded(self, envelope: Envelope) -> str:
        """Put an envelope whose body is encoded already: a reply of another store's mailbox."""
        self._check_open()
        return (await self._put([self._admit(envelope)]))[0]

    def _admit(self, envelope: Envelope) -> Envelope:
        """Bring a foreign envelope's body into this store's form."""
        if self.serializes == isinstance(envelope.body, bytes):
            return envelope
        body = (
            self.codec.decode(envelope.body) if isinstance(envelope.body, bytes) else self.codec.encode(envelope.body)
        )
        return replace(envelope, body=body)

    def _local_name(self, address: str) -> str | None:
        """The name on this store that an address means, or None where it is another store's URL."""
        return None if "://" in address else address

    async def extend(self, delivery: Delivery, timeout: float) -> None:
        """Extend a delivery's lease (see :meth:`Message.extend_visibility`)."""
        self._check_open()
        if not 0 <= timeout <= MAX_VISIBILITY:
            raise InvalidParameterError(f"extend_visibility: timeout must be 0 to 43200 seconds, not {timeout!r}")
        await self._extend(delivery, float(timeout))

    async def save_checkpoint(self, delivery: Delivery, state: bytes) -> None:
        """Keep a delivery's checkpoint (see :meth:`Message.save_checkpoint`)."""
        self._check_open()
        await self._save_checkpoint(delivery, state)

    def reply_envelope(self, delivery: Delivery, body: Any) -> Envelope:
        """The reply to ``delivery``, checked and encoded: to its ``reply_to``, with the request's id in its headers."""
        if self._reply_codec is None:
            self._reply_codec = Codec(self._reply_type)
        payload = body
        if self.serializes:
            payload = self._reply_codec.encode(body)
        else:
            self._reply_codec.check(body)
        return Envelope(self.new_id(), payload, reply_to=delivery.reply_to, headers={"request_id": delivery.message_id})

    # -------------------------------------------------------------------------------------------------- looking after

    async def counts(self) -> Counts:
        """Where the messages are; the parts add up to all that were ever accepted."""
        self._check_open()
        return await self._counts()

    async def approximate_count(self) -> int:
        """How many messages are still to be done: delayed, pending and in flight."""
        return (await self.counts()).waiting

    async def purge(self) -> int:
        """Drop all messages that are delayed, pending or in flight, and return how many that were.

        Their holders' later calls raise :class:`ReceiptHandleExpiredError`. Dead letters stay.
        """
        self._check_open()
        return await self._purge()

    async def dead_letters(self, *, limit: int = 1_000, after: str | None = None) -> list[DeadLetter]:
        """The dead letters, oldest first: at most ``limit``, behind the one whose id is ``after``."""
        self._check_open()
        if limit < 1:
            raise InvalidParameterError(f"dead_letters: limit must be at least 1, not {limit!r}")
        return [self._dead_letter(*found) for found in await self._dead_letters(limit, after)]

    async def replay_dead_letters(self, message_ids: Iterable[str] | None = None) -> int:
        """Send dead letters (None: all) to the tail of the queue again, with fresh counts; how many that were."""
        self._check_open()
        return await self._replay(None if message_ids is None else list(message_ids))

    async def purge_dead_letters(self, message_ids: Iterable[str] | None = None) -> int:
        """Forget dead letters (None: all) for good; how many that were."""
        self._check_open()
        return await self._discard_dead(None if message_ids is None else list(message_ids))

    def _dead_letter(self, delivery: Delivery, dead: Dead, at: float) -> DeadLetter:
        body = delivery.body
        if self.serializes:
            try:
                body = self.codec.decode(delivery.body)
            except SerializationError:
                body = None
        received = delivery.first_received_at
        return DeadLetter(
            message_id=delivery.message_id,
            body=body,
            raw=delivery.body,
            mailbox=self.name,
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
        )

    # --------------------------------------------------------------------------------------------------------- types

    @property
    def address(self) -> str:
        """How a sender names this mailbox in ``reply_to``: its URL where it has one, else its name."""
        return self.name

    @property
    def codec(self) -> Codec:
        """Encodes and decodes this mailbox's bodies; made at first use, when the type is known."""
        if self._codec is None:
            self._codec = Codec(self._body_type)
        return self._codec

    def bind(self, *, body: Any = None, reply: Any = None) -> None:
        """Say the type of bodies (or replies) where the constructor was not told; a loop does so from its handler.

        Raises :class:`ConfigError` where it was told another one.
        """
        self._body_type = self._bound("body", self._body_type, body)
        self._reply_type = self._bound("reply", self._reply_type, reply)
        self._codec = self._reply_codec = None

    def _bound(self, what: str, old: Any, new: Any) -> Any:
        if old is not None and new is not None and old != new:
            raise ConfigError(
                f"mailbox {self.name!r} holds {what} type {type_name(old)}, but its handler takes {type_name(new)};"
                " make the two the same"
            )
        return new if old is None else old

    def _check_open(self) -> None:
        if self._state.state is not MailboxState.OPEN:
            raise MailboxClosedError(
                f"mailbox {self.name!r} is {self._state.state}; use it inside `async with` or under a running LoopGroup"
            )

    def _check_async_backend(self) -> None:
        library = async_library()
        if library not in self.capabilities.async_backends:
            supported = " or ".join(sorted(self.capabilities.async_backends))
            raise ConfigError(
                f"mailbox {self.name!r}: {type(self).__name__} runs on {supported} only, not on {library}"
            )


CLOSE_TIMEOUT = 10.0
"""Seconds that a close, or a settlement that must not be cut short, may take before it is given up."""


def check_receive(max_messages: int, visibility_timeout: float, wait_time_seconds: float) -> None:
    """Raise :class:`InvalidParameterError` for a value outside the limits of :meth:`Mailbox.receive`."""
    if not (isinstance(max_messages, int) and 1 <= max_messages <= MAX_MESSAGES):
        raise InvalidParameterError(f"receive: max_messages must be 1 to {MAX_MESSAGES}, not {max_messages!r}")
    if not 0 <= visibility_timeout <= MAX_VISIBILITY:
        raise InvalidParameterError(
            f"receive: visibility_timeout must be 0 to 43200 seconds, not {visibility_timeout!r}"
        )
    if not 0 <= wait_time_seconds <= math.inf:
        raise InvalidParameterError(f"receive: wait_time_seconds must be 0 or more, not {wait_time_seconds!r}")


def _check_send(
    delay: float, dedup_key: str | None, priority: int, headers: Mapping[str, str] | None, expires_in: float | None
) -> None:
    if not 0 <= delay <= MAX_DELAY:
        raise InvalidParameterError(f"send: delay must be 0 to {MAX_DELAY:.0f} seconds (366 days), not {delay!r}")
    if not (isinstance(priority, int) and abs(priority) <= MAX_PRIORITY):
        raise InvalidParameterError(f"send: priority must be a whole number within ±{MAX_PRIORITY}, not {priority!r}")
    if dedup_key is not None and not (isinstance(dedup_key, str) and dedup_key):
        raise InvalidParameterError(f"send: dedup_key must be a string of at least one character, not {dedup_key!r}")
    if expires_in is not None and not 0 < expires_in <= MAX_DELAY:
        raise InvalidParameterError(
            f"send: expires_in must be above 0 and at most {MAX_DELAY:.0f} s, not {expires_in!r}"
        )
    for key, value in (headers or {}).items():
        if not (isinstance(key, str) and isinstance(value, str)):
            raise InvalidParameterError(f"send: headers are strings by string, not {key!r}: {value!r}")
