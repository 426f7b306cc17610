"""The part of a mailbox that sends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic

from typing_extensions import TypeVar

from mainspring.mailbox.dead_letters import DeadLetterCalls
from mainspring.mailbox.limits import check_send, delay_of, reply_address
from mainspring.mailbox.message import Envelope
from mainspring.runtime.deadline import with_deadline
from mainspring.validation import as_seconds

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from datetime import datetime

    from mainspring.mailbox.mailbox import Mailbox
    from mainspring.runtime.deadline import Deadline, Inherited
    from mainspring.validation import Seconds

T = TypeVar("T", default=Any)


class SendCalls(DeadLetterCalls[T], Generic[T]):
    """Checks, encodes and hands over what is sent."""

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
        :raises MailboxClosedError: the mailbox is not open.
        :raises MailboxFullError: it holds as many messages as it may.
        :raises SerializationError: the body does not fit the mailbox's type, would not be received as it is, or is larger than
            the store takes. It names the type and the field.
        :raises MailboxConnectionError: the store cannot be reached; trying again is safe with a ``dedup_key``.

        Cancelled before the message was handed over, it has sent nothing; afterwards it may have been sent.
        """
        headers = with_deadline(headers, deadline)
        envelope = self._envelope(body, delay, reply_to, dedup_key, priority, headers, expires_in, at)
        put = self._put([envelope]) if connection is None else self._put_into(connection, [envelope])
        return (await put)[0]

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
        """Put all of ``bodies`` into the mailbox, in order, or (where one does not fit) none; their ids.

        The parameters are those of :meth:`send` and hold for each message.
        """
        self._check_open()
        headers = with_deadline(headers, deadline)
        delay, expires_in = delay_of(delay, at), as_seconds(expires_in)
        check_send(delay, None, priority, headers, expires_in)
        address = reply_address(reply_to)
        delay, given = float(delay), dict(headers or {})
        encode = (self._codec or self.codec).encode if self.serializes else self._as_it_is
        payloads = [encode(body) for body in bodies]
        if not payloads:
            return []
        envelopes = [
            Envelope(message_id, payload, delay, address, None, priority, given, expires_in)
            for message_id, payload in zip(self._new_ids(len(payloads)), payloads, strict=True)
        ]
        return await (self._put(envelopes) if connection is None else self._put_into(connection, envelopes))

    def _as_it_is(self, body: Any) -> Any:
        return self._payload(self.codec, body)

    def _envelope(
        self,
        body: Any,
        delay: Seconds,
        reply_to: str | Mailbox[Any, Any] | None,
        dedup_key: str | None,
        priority: int,
        headers: Mapping[str, str] | None,
        expires_in: Seconds | None,
        at: datetime | None = None,
    ) -> Envelope:
        self._check_open()
        wait: float = 0.0
        expiry: float | None = None
        if (
            delay != 0
            or priority != 0
            or reply_to is not None
            or dedup_key is not None
            or headers
            or expires_in is not None
            or at is not None
        ):
            wait, expiry = delay_of(delay, at), as_seconds(expires_in)
            check_send(wait, dedup_key, priority, headers, expiry)
        payload = self._payload(self._codec or self.codec, body)
        address = reply_address(reply_to)
        given = dict(headers) if headers else {}
        return Envelope(self.new_id(), payload, float(wait), address, dedup_key, priority, given, expiry)
