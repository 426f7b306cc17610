"""``Mailbox``: the one face of a queue, whatever store it lies on.

It checks and encodes what users give, decodes what they receive, and keeps the requests and the replies. Its
:class:`~mainspring.mailbox.backend.Backend` does the work on messages.
"""

from __future__ import annotations

import math
from threading import get_ident
from typing import TYPE_CHECKING, Any, Generic, cast

import anyio
from typing_extensions import TypeVar

from mainspring.core.state_machine import MailboxState
from mainspring.errors import (
    ConfigError,
    InvalidParameterError,
    MailboxConnectionError,
    MailboxError,
    ReplyNotAvailableError,
    SerializationError,
)
from mainspring.mailbox import replies
from mainspring.mailbox.backend import Backend, Capabilities, MailboxStatistics
from mainspring.mailbox.codec import Codec, NotJsonError, type_name
from mainspring.mailbox.life_cycle import MailboxLifeCycle
from mainspring.mailbox.limits import (
    CLOSE_TIMEOUT,
    MAX_MESSAGES,
    check_id,
    check_ids,
    check_receive,
    check_seconds,
    check_send,
    delay_of,
    is_task_name,
    reply_address,
)
from mainspring.mailbox.message import (
    UNREADABLE,
    Ack,
    CancelOutcome,
    ClaimedMessage,
    Counts,
    Dead,
    DeadLetter,
    Envelope,
    Message,
    MessageIds,
    Settlement,
    acknowledge_together,
    header_of,
)
from mainspring.mailbox.requests import REPLY_ERRORS, WITHDRAWAL_TIMEOUT, PendingReply, cancelled_error
from mainspring.mailbox.sync import SyncMailbox
from mainspring.runtime.deadline import inherited, with_deadline
from mainspring.validation import MAX_LIMIT, MAX_VISIBILITY, as_seconds, is_whole, shown

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterable, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager
    from datetime import datetime

    from mainspring.mailbox.job_list import JobList, States
    from mainspring.mailbox.limiters import LimitState
    from mainspring.mailbox.requests import Requester
    from mainspring.mailbox.workers import WorkerStatus
    from mainspring.runtime.deadline import Deadline, Inherited
    from mainspring.validation import Seconds

__all__ = ["MAX_MESSAGES", "Capabilities", "Mailbox"]

T = TypeVar("T", default=Any)
R = TypeVar("R", default=Any)


class Mailbox(MailboxLifeCycle, Generic[T, R]):
    """A queue of messages with leases: at-least-once, fenced, first in first out among equal priorities.

    A new mailbox is unopened; ``async with mailbox`` opens it, and a LoopGroup opens what is not open. A closed mailbox can
    be opened again. All its calls belong to the event loop it was opened on; :attr:`sync` has those for other threads.

    :param backend: what does the work, on whatever store. The mailboxes of Mainspring's own stores make theirs.
    :param body: the type of the bodies; else the handler's annotation gives it, else anything that JSON can say.
    :param reply: the type of the replies.
    :param serialize: False hands bodies to the backend as the objects they are, after a check of their type.
    """

    verifies: bool = True
    """True if a sent body (or reply) is read back and compared, for types that JSON may change. Set it to False before the
    first send to save that time; what is received may then differ."""

    def __init__(self, backend: Backend, *, body: Any = None, reply: Any = None, serialize: bool = True) -> None:
        super().__init__(backend)
        self.serializes = serialize
        """True if bodies reach the backend as JSON bytes (else as the objects they are)."""
        self.reply_stores: tuple[Mailbox[Any, Any], ...] = ()
        """Mailboxes of the other stores that replies may go to; see ``open_mailbox(reply_stores=)``."""
        self.forgotten_replies = 0
        """How many replies came for which no request waited (any more): they were acknowledged and dropped."""
        self._body_type = body
        self._reply_type = reply
        self._codec: Codec | None = None
        self._reply_codec: Codec | None = None
        self._ids = MessageIds()

    def __repr__(self) -> str:
        shown = f"{type(self).__name__} {self.name!r} {self._state.state}"
        if self._state.state is MailboxState.OPEN:
            now = self.backend.statistics()
            shown += "" if now.connected else ", not connected"
            counts = {"waiting": now.waiting_receives, "queued": now.queued, "in flight": now.in_flight}
            shown += "".join(f", {count} {what}" for what, count in counts.items() if count)
        return f"<{shown}>"

    @property
    def address(self) -> str:
        """The address by which senders name this mailbox in ``reply_to``: its URL if it has one, else its name."""
        return self.backend.address

    @property
    def sync(self) -> SyncMailbox[T, R]:
        """Its calls for other threads, which block: ``mailbox.sync.send(body)``."""
        made: SyncMailbox[T, R] | None = self.__dict__.get("_sync")
        if made is None:  # in one step, as two threads may ask at once
            made = self.__dict__.setdefault("_sync", SyncMailbox(self))
        return made

    def sibling(self, name: str, *, body: Any = None, reply: Any = None) -> Mailbox[Any, Any]:
        """Return an unopened mailbox of that name on the same store, with the same settings (but no capacity).

        :raises ConfigError: the backend cannot open one (:attr:`Capabilities.siblings`).
        """
        return Mailbox(self.backend.sibling(name), body=body, reply=reply, serialize=self.serializes)

    # --------------------------------------------------------------------------------------------- bodies and replies

    @property
    def codec(self) -> Codec:
        """The codec of this mailbox's bodies; made at first use, when the type is known."""
        if self._codec is None:
            given = self._body_type
            self._codec = given if isinstance(given, Codec) else Codec(given, verifies=self.verifies)
        return self._codec

    @property
    def reply_codec(self) -> Codec:
        """The codec of the replies; made at first use."""
        if self._reply_codec is None:
            self._reply_codec = Codec(self._reply_type, verifies=self.verifies)
        return self._reply_codec

    @property
    def reply_type(self) -> Any:
        """The type of the replies, or None while it is unknown."""
        return self._reply_type

    @property
    def is_bound(self) -> bool:
        """True if the type of its bodies is known."""
        return self._body_type is not None

    def bind(self, *, body: Any = None, reply: Any = None) -> None:
        """Say the type of bodies (or replies) where the constructor was not told; a loop does so from its handler.

        In the place of a type it takes a :class:`~mainspring.mailbox.codec.Codec` that does it all.
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

    def new_id(self) -> str:
        """Return a new message id: a random prefix of this mailbox object and a count, so that ids sort in order of sending."""
        return self._ids.next()

    def _encode(self, codec: Codec, body: Any) -> Any:
        """Return ``body``, checked, in the form in which the backend keeps it."""
        return codec.encode(body) if self.serializes else codec.unserialized(body)

    def body_of(self, delivery: ClaimedMessage) -> Any:
        """Return the decoded body of a delivery. Raise :class:`SerializationError` if it does not fit the type."""
        return (self._codec or self.codec).decode(delivery.body)

    # -------------------------------------------------------------------------------------------------------- sending

    async def send(
        self,
        body: T,
        *,
        delay: Seconds = 0,
        at: datetime | None = None,
        reply_to: str | Mailbox[Any, Any] | None = None,
        dedup_key: str | None = None,
        priority: int = 0,
        headers: Mapping[str, str] | None = None,
        expires_in: Seconds | None = None,
        deadline: Deadline | Inherited | None = "inherit",
        connection: Any = None,
    ) -> str:
        """Put one message into the mailbox and return its id, once it is as durable as the backend makes it.

        :param delay: seconds, or a timedelta (0 to 366 days), during which it cannot be received.
        :param at: instead of ``delay``, the instant from which it can be received: a datetime with a time zone. A past one is
            now.
        :param reply_to: where the result is wanted: the name of a mailbox on the same store, a mailbox URL, or a mailbox.
        :param dedup_key: while a message with this key is unfinished, a second send returns the first one's id.
        :param priority: higher is received sooner (-32 767 to 32 767).
        :param headers: strings that travel with it.
        :param expires_in: seconds, or a timedelta, after which it goes to the dead letters, unless a worker holds it.
        :param deadline: the instant by which it must be done: its handler is cancelled then, and the message is dead. Where
            nothing is said, that of the code that sends it (a handler's message, a ``deadline.scope()``); None: without one.
        :param connection: of a mailbox with ``Capabilities.transactions``: the sender's own connection to the same database,
            whose transaction the message joins: it exists, and wakes receivers, if and when that commits.
        :raises InvalidParameterError: a value is outside its limits, or a string that UTF-8 cannot hold.
        :raises ConfigError: there is a ``connection``, and the mailbox has no transactions.
        :raises MailboxClosedError: the mailbox is not open.
        :raises MailboxFullError: it holds as many messages as it may.
        :raises SerializationError: the body does not fit the mailbox's type, would not be received as it is, or is larger than
            the store takes. It names the type and the field.
        :raises MailboxConnectionError: the store cannot be reached; trying again is safe with a ``dedup_key``.

        Cancelled before the message was handed over, it has sent nothing; afterwards it may have been sent.
        """
        if deadline != "inherit" or inherited() is not None:
            headers = with_deadline(headers, deadline)
        if (
            delay == 0
            and priority == 0
            and reply_to is None
            and dedup_key is None
            and not headers
            and expires_in is None
            and at is None
        ):  # nothing to check but the body
            if self._thread != get_ident():
                self.check_open()
            codec = self._codec or self.codec
            payload = codec.encode(body) if self.serializes else codec.unserialized(body)
            envelope = Envelope(self._ids.next(), payload)
        else:
            envelope = self._envelope(body, delay, at, reply_to, dedup_key, priority, headers, expires_in)
        if connection is not None:
            return (await self.backend.send_within(connection, [envelope]))[0]
        return (await self.backend.send([envelope]))[0]

    async def send_many(
        self,
        bodies: Iterable[T],
        *,
        delay: Seconds = 0,
        at: datetime | None = None,
        reply_to: str | Mailbox[Any, Any] | None = None,
        priority: int = 0,
        headers: Mapping[str, str] | None = None,
        expires_in: Seconds | None = None,
        deadline: Deadline | Inherited | None = "inherit",
        connection: Any = None,
    ) -> list[str]:
        """Put all of ``bodies`` into the mailbox, in order, or none if one does not fit. Return their ids.

        The parameters are those of :meth:`send` and hold for each message: ``delay`` and ``expires_in`` are seconds. It raises
        what :meth:`send` raises, and then none was sent, as far as is known. Cancelled before they were given to the store, it
        has sent none; afterwards all or none may have been sent.
        """
        self.check_open()
        headers = with_deadline(headers, deadline)
        delay, expires_in = delay_of(delay, at), as_seconds(expires_in)
        check_send(delay, None, priority, headers, expires_in)
        address = reply_address(reply_to)
        delay, given = float(delay), dict(headers or {})
        codec = self._codec or self.codec
        encode = codec.encode if self.serializes else codec.unserialized
        payloads = [encode(body) for body in bodies]
        if not payloads:
            return []
        envelopes = [
            Envelope(message_id, payload, delay, address, None, priority, given, expires_in)
            for message_id, payload in zip(self._ids.take(len(payloads)), payloads, strict=True)
        ]
        if connection is not None:
            return await self.backend.send_within(connection, envelopes)
        return await self.backend.send(envelopes)

    def prepare(
        self,
        body: T,
        *,
        delay: Seconds = 0,
        at: datetime | None = None,
        reply_to: str | Mailbox[Any, Any] | None = None,
        dedup_key: str | None = None,
        priority: int = 0,
        headers: Mapping[str, str] | None = None,
        expires_in: Seconds | None = None,
        deadline: Deadline | Inherited | None = "inherit",
    ) -> Envelope:
        """Return the message that :meth:`send` would send, for :meth:`send_prepared`; its id is known before it is sent.

        The parameters are those of :meth:`send`, and so are the errors of what does not fit.
        """
        headers = with_deadline(headers, deadline)
        return self._envelope(body, delay, at, reply_to, dedup_key, priority, headers, expires_in)

    def send_prepared(self, envelopes: list[Envelope], *, connection: Any = None) -> Awaitable[list[str]]:
        """Send messages from :meth:`prepare`, in order, all or none. Return the ids under which they are stored.

        An id may be that of an unfinished message with the same ``dedup_key``: see :func:`~mainspring.mailbox.message.is_new`.
        ``connection``, errors and cancellation are as for :meth:`send`.
        """
        if self._thread != get_ident():
            self.check_open()
        if connection is not None:
            return self.backend.send_within(connection, envelopes)
        return self.backend.send(envelopes)

    def _envelope(
        self,
        body: Any,
        delay: Seconds,
        at: datetime | None,
        reply_to: str | Mailbox[Any, Any] | None,
        dedup_key: str | None,
        priority: int,
        headers: Mapping[str, str] | None,
        expires_in: Seconds | None,
    ) -> Envelope:
        self.check_open()
        wait, expiry = delay_of(delay, at), as_seconds(expires_in)
        check_send(wait, dedup_key, priority, headers, expiry)
        address, given = reply_address(reply_to), dict(headers) if headers else {}
        payload = self._encode(self._codec or self.codec, body)
        return Envelope(self._ids.next(), payload, float(wait), address, dedup_key, priority, given, expiry)

    # ----------------------------------------------------------------------------------------------------- requesting

    async def request(
        self,
        body: T,
        *,
        timeout: float,
        delay: Seconds = 0,
        at: datetime | None = None,
        priority: int = 0,
        headers: Mapping[str, str] | None = None,
        expires_in: Seconds | None = None,
        deadline: Deadline | Inherited | None = "inherit",
    ) -> R:
        """Send ``body`` and return the reply to it: what the handler returns, in whatever process it runs.

        The reply comes into a mailbox of this object's own, beside this one, made at the first request and dropped on close.
        After ``timeout`` seconds the wait is over, whatever happens. Then, and where the call is cancelled, the request is
        cancelled as by :meth:`cancel` (tried for 5 s, in the background); a reply that comes nevertheless is dropped. The other
        parameters are those of :meth:`send`; there is no ``dedup_key``, as a reply goes to one requester.

        :raises RequestTimeoutError: there is no reply yet; trying again may do the work twice.
        :raises RequestFailedError: the request was dead-lettered, for the reason that it names: at once, not at the timeout.
        :raises RequestCancelledError: it was cancelled.
        :raises SerializationError: the body does not fit the mailbox's type, or the reply the type of the replies.
        :raises ReplyNotAvailableError: the mailbox is not open with ``async with``, nor under a running loop.

        And what :meth:`send` raises.
        """
        envelope = self.prepare(
            body, delay=delay, at=at, priority=priority, headers=headers, expires_in=expires_in, deadline=deadline
        )
        return await self.request_prepared(envelope, timeout=timeout)

    async def request_prepared(self, envelope: Envelope, *, timeout: float) -> R:
        """Send a message from :meth:`prepare` as a request, and return the reply to it; see :meth:`request`."""
        check_seconds("request: timeout", timeout, math.inf)
        return cast("R", await self._requester(envelope).request(envelope, timeout))

    async def submit(
        self,
        body: T,
        *,
        delay: Seconds = 0,
        at: datetime | None = None,
        priority: int = 0,
        headers: Mapping[str, str] | None = None,
        expires_in: Seconds | None = None,
        deadline: Deadline | Inherited | None = "inherit",
    ) -> PendingReply[R]:
        """Send a request now, and await its reply later: ``await (await mailbox.submit(body)).result(timeout=…)``.

        ``delay`` and ``expires_in`` are seconds, as for :meth:`send`. It raises what :meth:`send` raises, and
        :class:`ReplyNotAvailableError` as :meth:`request` does. Cancelled, the request may have been sent; its reply is
        dropped.
        """
        envelope = self.prepare(
            body, delay=delay, at=at, priority=priority, headers=headers, expires_in=expires_in, deadline=deadline
        )
        return await self._requester(envelope).submit(envelope)

    def _requester(self, envelope: Envelope) -> Requester:
        """Return what sends a request, which is marked as one."""
        if not self.reply_routers:
            raise ReplyNotAvailableError(
                f"no reply can come to mailbox {self.name!r} yet: open it with `async with`, or run a loop on it"
            )
        envelope.headers = {**envelope.headers, REPLY_ERRORS: "1"}
        return self.reply_routers[0].requester(self)

    async def cancel(self, message_id: str) -> CancelOutcome:
        """End a message before it is done.

        Delayed or pending it is removed. In flight, its lease is revoked and its handler is cancelled. In this process that is
        at once, in another as soon as the backend can tell it, and at the latest at its next renewal. A message that was ended
        so counts as settled, is not tried again, and its requester gets :class:`RequestCancelledError`. Another one (settled,
        dead, of another mailbox) is ``CancelOutcome.UNKNOWN`` and left as it is.

        It goes on where its caller is cancelled meanwhile, which may be the message's own handler.

        :raises MailboxConnectionError: also where the store has not answered within 10 s; it may have taken place then.
        """
        self.check_open()
        check_id("cancel: message_id", message_id)
        with anyio.move_on_after(CLOSE_TIMEOUT, shield=True) as waiting:
            outcome, reply_to, headers = await self.backend.cancel(message_id)
        if waiting.cancelled_caught:
            raise MailboxConnectionError(
                f"cancel: no answer came within {CLOSE_TIMEOUT:g} s; it may have taken place; call it again"
            )
        if outcome is CancelOutcome.UNKNOWN:
            return outcome
        from mainspring.mailbox import jobs

        await jobs.keep_cancelled(self.backend, message_id, headers)
        waited_for = any(router.end_request(message_id, cancelled_error(message_id)) for router in self.reply_routers)
        if not waited_for and reply_to is not None and header_of(headers, REPLY_ERRORS) is not None:
            with anyio.move_on_after(WITHDRAWAL_TIMEOUT, shield=True):
                await replies.tell_cancelled(self, message_id, reply_to)
        return outcome

    # ------------------------------------------------------------------------------------------------------ receiving

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
        if self._thread != get_ident():
            self.check_open()
        check_receive(max_messages, visibility_timeout, wait_time_seconds)
        deadline = anyio.current_time() + wait_time_seconds if wait_time_seconds else 0.0
        while True:
            wait = max(0.0, deadline - anyio.current_time()) if wait_time_seconds else 0.0
            deliveries = await self.backend.claim(max_messages, visibility_timeout, wait)
            if not deliveries:
                return []
            decode = (self._codec or self.codec).decode
            messages: list[Message[T, R]] = []
            undecodable: list[tuple[ClaimedMessage, Dead]] = []
            for delivery in deliveries:
                if not delivery.is_readable:
                    undecodable.append((delivery, UNREADABLE))
                    continue
                try:
                    messages.append(Message(self, delivery, decode(delivery.body)))
                except NotJsonError as error:
                    undecodable.append((delivery, Dead.of(error)))
                except SerializationError:
                    messages.append(Message(self, delivery, None, is_decoded=False))
            dead_lettered = await self._dead_letter_all(undecodable) if undecodable else 0
            if messages or not dead_lettered:
                return messages

    async def _dead_letter_all(self, undecodable: list[tuple[ClaimedMessage, Dead]]) -> int:
        """Dead-letter them; how many that were. One that cannot be just now comes again when its lease ends."""
        done = 0
        with anyio.CancelScope(shield=True, deadline=anyio.current_time() + CLOSE_TIMEOUT):
            for delivery, dead in undecodable:
                try:
                    await replies.settle_dead(self, delivery, dead)
                except MailboxError:
                    continue
                done += 1
        return done

    # ------------------------------------------------------------------------------------------------------- settling

    def settle(self, delivery: ClaimedMessage, settlement: Settlement) -> Awaitable[None]:
        """End a delivery (see :class:`Message`)."""
        if self._thread != get_ident():
            self.check_open()
        if type(settlement) is Ack and settlement.reply is not None:
            return replies.settle(self, delivery, settlement, settlement.reply)
        if type(settlement) is Dead:
            return replies.settle_dead(self, delivery, settlement)
        return self.backend.settle(delivery, settlement)

    async def acknowledge_many(self, messages: Sequence[Message[T, R]]) -> dict[int, Exception]:
        """Acknowledge messages of this mailbox together: in one step, where the backend can do that.

        Returns those that were refused, by their number, with what :meth:`Message.acknowledge` would have raised; all others
        are done. A message that is named twice is acknowledged once, and the second is refused with
        :class:`MessageSettledError`, or as the first was. Raises what hits them all; then none is settled, as far as is known.
        A call that is cancelled may or may not have taken effect.

        :raises MessageSettledError: one of them is settled already; nothing was done.
        :raises MailboxClosedError: the mailbox is not open; nothing was done.
        :raises MailboxConnectionError: the store cannot be reached.
        """
        self.check_open()
        return await acknowledge_together(messages, self.backend.acknowledge_many)

    async def extend(self, delivery: ClaimedMessage, timeout: float) -> None:
        """Extend a delivery's lease (see :meth:`Message.extend_visibility`)."""
        self.check_open()
        check_seconds("extend_visibility: timeout", timeout, MAX_VISIBILITY)
        await self.backend.extend(delivery, float(timeout))

    async def save_checkpoint(self, delivery: ClaimedMessage, state: bytes) -> None:
        """Keep a delivery's checkpoint (see :meth:`Message.save_checkpoint`)."""
        self.check_open()
        if not isinstance(state, bytes):
            raise InvalidParameterError(f"save_checkpoint: the state must be bytes, not {state!r:.100}")
        await self.backend.checkpoint(delivery, state)

    def reply_to(self, message: Message[Any, Any], body: Any) -> Envelope:
        """Return the reply to ``message``, checked and encoded, for :class:`Ack`."""
        return replies.reply_to(self, message.delivery, self._encode(self.reply_codec, body))

    def transaction(self, message: Message[Any, Any], connection: Any = None) -> AbstractAsyncContextManager[Any]:
        """Run a transaction that ends with the block, and settles ``message``. Yield its connection.

        The writes through the connection and the acknowledgement are committed together, or neither is. Inside the block
        ``message.reply()``, ``nack()``, ``dead_letter()`` and so on are part of the transaction; without any of them leaving
        the block acknowledges. An error out of the block rolls all back and leaves the message unsettled; so does a
        cancellation.

        :param connection: the caller's own connection or session to the same database, which is yielded again. The block begins
            a transaction on it, unless a session has begun one by itself, and commits it or rolls it back, as a whole. None: a
            connection of the mailbox's own; the driver's.
        :raises InvalidParameterError: the connection does not fit: another database, another kind, a transaction that the block
            cannot end.
        :raises ConfigError: the mailbox cannot (:attr:`Capabilities.transactions`).
        :raises ReceiptHandleExpiredError: at the end: the lease was lost meanwhile; nothing was committed.
        :raises MessageSettledError: the message is settled, or in a transaction.
        :raises TransactionEndedError: the block ran ``COMMIT`` or ``ROLLBACK`` itself; it settles nothing then. With a
            ``BEGIN`` after it that cannot be seen: leave both to the block.
        :raises MailboxConnectionError: the connection was lost. Where that was during the commit, it may have taken place.
        """
        self.check_open()
        return self.backend.transaction(message, connection)

    # -------------------------------------------------------------------------------------------------- looking after

    async def counts(self) -> Counts:
        """Return how many messages are where, and how long the oldest pending one has waited.

        The parts add up to all messages that were ever accepted. :attr:`Counts.queue_age` is in seconds, and None where the
        backend does not tell. The cost does not grow with the number of messages. A cancelled call leaves nothing behind.

        :raises MailboxClosedError: the mailbox is not open.
        :raises MailboxConnectionError: the store does not answer.
        """
        self.check_open()
        return await self.backend.counts()

    def statistics(self) -> MailboxStatistics:
        """Return what this mailbox object is doing: receives that wait, operations that are queued or in flight, batches.

        No call to the store is made. An unopened or closed mailbox has zeros.
        """
        return self.backend.statistics() if self._usable else MailboxStatistics()

    async def workers(self) -> list[WorkerStatus]:
        """Return the loops of all processes that work on this mailbox, in the order of their names.
        Each tells the store every 20 seconds how it is. A worker that was killed is in the list for up to a minute more, with
        its :attr:`~WorkerStatus.last_seen`. :raises ConfigError: the store keeps no records (``Capabilities.records``).
        """
        from mainspring.mailbox.workers import workers_of

        return await workers_of(self)

    async def approximate_count(self) -> int:
        """Return how many messages are still to be done: delayed, pending and in flight."""
        return (await self.counts()).waiting

    def jobs(
        self,
        *,
        state: States | None = None,
        task: str | None = None,
        key: str | None = None,
        since: datetime | Seconds | None = None,
        older_than: datetime | Seconds | None = None,
        search: str | None = None,
        limit: int | None = None,
        after: str | None = None,
    ) -> JobList:
        """Yield the status of jobs that fit all filters: ``async for job in mailbox.jobs(state="pending", task="email")``.

        First come unfinished jobs (scheduled, pending, running), then the dead ones, the ends that are kept (``result_ttl=``),
        and chains. The order among jobs of a state is the store's own. A job that changes its state meanwhile may come twice,
        or not at all; the others come once. The store is asked for pages of up to 500 jobs, as they are needed.

        :param state: a :class:`JobState`, its text, or several; None: all.
        :param task: the name of a task. With ``task`` or ``key``, unfinished jobs are found by an index of the store.
        :param since: a datetime with a time zone, or the seconds (or a timedelta) before now: jobs sent since then.
        :param older_than: the same: jobs sent before then. A job of which only the end is known counts by that.
        :param search: a text, in either case, that the id, the task, the key, the last error or the JSON of the body has. Each
            job that fits the other filters is read for it. Of a job that is done, the body is not kept.
        :param limit: how many at most; None: all.
        :param after: go on behind a job, in this or another process: its :attr:`JobStatus.position`.
        :raises InvalidParameterError: a value is outside its limits. It is raised by the call itself.
        :raises ConfigError: the mailbox cannot list unfinished messages (:attr:`Capabilities.listing`), and ``state`` does not
            leave them out.
        :raises MailboxConnectionError: the store cannot be reached; the iteration can go on.
        """
        from mainspring.mailbox.job_list import JobFilter, JobList

        return JobList(self, JobFilter.of("jobs", state, task, key, since, older_than, search), limit, after)

    async def replace_body(self, message_id: str, body: T) -> None:
        """Replace the body of a delayed or pending message. Its counts, its place and all else stay.

        A mailbox without :attr:`Capabilities.front_return` puts a pending message behind all waiting messages.

        :raises JobRunningError: a worker runs it now.
        :raises JobNotFoundError: no such message is delayed or pending.
        :raises SerializationError: the body does not fit, as for :meth:`send`; nothing was changed.
        :raises ConfigError: the mailbox cannot (:attr:`Capabilities.edit`).

        Cancelled, it may have taken place.
        """
        from mainspring.mailbox import jobs

        self.check_open()
        check_id("replace_body: message_id", message_id)
        jobs.check_changed(message_id, await self.backend.replace_body(message_id, self._encode(self.codec, body)))

    async def purge(
        self,
        *,
        state: States | None = None,
        task: str | None = None,
        key: str | None = None,
        since: datetime | Seconds | None = None,
        older_than: datetime | Seconds | None = None,
        search: str | None = None,
    ) -> int:
        """Drop messages that are delayed, pending or in flight: all, or the messages that fit the filters. Return how many.

        The filters are those of :meth:`jobs`. Without ``state``, unfinished jobs are meant, and dead letters stay; with one,
        dead letters and kept ends of such states are deleted as well. Without any filter, all is dropped in one step, and the
        holders' later calls raise :class:`ReceiptHandleExpiredError`. With one, jobs are ended page by page, each as by
        :meth:`cancel`: handlers are cancelled, requesters are told, and the end is kept where it was asked for.

        Cancelled, or failed with :class:`MailboxConnectionError`, it has dropped some; another call drops the rest.
        """
        from mainspring.mailbox import job_list

        self.check_open()
        filters = (task, key, since, older_than, search)
        if state is None and all(given is None for given in filters):
            return await self.backend.purge()
        which = job_list.JobFilter.of("purge", job_list.UNFINISHED if state is None else state, *filters)
        return await job_list.purge(self, which)

    # --------------------------------------------------------------------------------------------- the whole fleet

    async def pause(self, task: str | None = None) -> None:
        """Let no worker of any process claim messages (with ``task``: messages of that task) until :meth:`resume`.

        Messages are sent and wait as before, and count as pending; those in flight go on. It holds for the store, so also
        for workers that start later. Cancelled, it may have taken place.

        :raises InvalidParameterError: ``task`` can be the name of no task.
        :raises ConfigError: the mailbox cannot (:attr:`Capabilities.pause`; with ``task`` :attr:`Capabilities.limits`).
        """
        await self._change_limits("pause", task, paused=True)

    async def resume(self, task: str | None = None) -> None:
        """End a :meth:`pause` of the mailbox, or of ``task``. Waiting messages are claimed at once. Same parameters."""
        await self._change_limits("resume", task, paused=False)

    async def set_concurrency(self, most: int | None, task: str | None = None) -> None:
        """Let at most ``most`` messages of the mailbox, or of ``task``, be in flight at once in the whole fleet.

        It overrides the concurrency that the code declares, also after a restart. None ends the override. If more are in
        flight, they go on, and no more are claimed until there is room.

        :raises InvalidParameterError: ``most`` is below 1 (to let none begin, :meth:`pause`) or above a billion, or ``task``
            can be the name of no task.
        :raises ConfigError: the mailbox cannot (:attr:`Capabilities.concurrency`; with ``task`` :attr:`Capabilities.limits`).
        """
        if most is not None and not (is_whole(most, 1) and most <= MAX_LIMIT):
            raise InvalidParameterError(
                f"set_concurrency: give a whole number from 1 to {MAX_LIMIT:,}, or None for the declared one, not"
                f" {shown(most):.100}; pause() lets none begin"
            )
        await self._change_limits("set_concurrency", task, concurrency=most or 0)

    async def _change_limits(self, call: str, task: str | None, **changes: Any) -> None:
        """Change the limits of a task, or (None) those of the whole mailbox."""
        from mainspring.mailbox.limiters import ALL_TASKS, LimitChange

        self.check_open()
        if task is not None and not is_task_name(task):
            raise InvalidParameterError(f"{call}: task must be the name of a task, or None for all, not {task!r:.100}")
        await self.backend.change_limits([LimitChange(ALL_TASKS if task is None else task, **changes)])

    async def limits(self) -> list[LimitState]:
        """Return the limits, the pauses and the changed concurrency of tasks, in the order of their names.

        The task ``""`` is the whole mailbox. Tasks without any limit are left out.
        """
        self.check_open()
        return await self.backend.limits()

    async def dead_letters(
        self, *, limit: int = 1_000, after: str | None = None, task: str | None = None
    ) -> list[DeadLetter[T]]:
        """Return the dead letters, oldest first: at most ``limit``, behind the one whose id is ``after``.

        :param task: only those of a task, by the name that it was sent with. The store has an index by task (NATS has none,
            and reads all).
        :raises ConfigError: a task is given, and the mailbox cannot list by task (:attr:`Capabilities.listing`).
        """
        self.check_open()
        if not is_whole(limit, 1):
            raise InvalidParameterError(f"dead_letters: limit must be at least 1, not {limit!r}")
        if after is not None:
            check_id("dead_letters: after", after)
        if task is None:
            letters = await self.backend.dead_letters(limit, after)
        elif is_task_name(task):
            letters = await self.backend.dead_letters_of(task, limit, after)
        else:
            raise InvalidParameterError(f"dead_letters: task must be the name of a task, or None, not {task!r:.100}")
        return [self.as_dead_letter(*found) for found in letters]

    async def dead_letter(self, message_id: str) -> DeadLetter[T] | None:
        """Return the dead letter of that id, or None if there is none (any more)."""
        self.check_open()
        check_id("dead_letter: message_id", message_id)
        for found in await self.backend.find_dead_letters([message_id]):
            return self.as_dead_letter(*found)
        return None

    def as_dead_letter(self, delivery: ClaimedMessage, dead: Dead, at: float) -> DeadLetter[T]:
        """Return what users see of a dead letter that the backend has found."""
        try:
            body = self.body_of(delivery)
        except SerializationError:
            body = None
        return DeadLetter.of(self.name, delivery, body, dead, at)

    async def replay_dead_letters(self, message_ids: Iterable[str] | None = None) -> int:
        """Send dead letters (None: all) to the tail of the queue again, with fresh counts; how many that were.

        Raises :class:`MailboxFullError`, and sends none, where there is no room for all of them. A dead letter has its
        ``dedup_key`` again, unless another unfinished message has it by now; its history begins anew. Of all, a store on a
        server sends some at a time: where it raises then, some may have been sent, and another call sends the rest.
        """
        self.check_open()
        return await self.backend.replay_dead_letters(check_ids("dead letters: a message id", message_ids))

    async def purge_dead_letters(self, message_ids: Iterable[str] | None = None) -> int:
        """Forget dead letters (None: all) for good; how many that were."""
        self.check_open()
        return await self.backend.purge_dead_letters(check_ids("dead letters: a message id", message_ids))
