"""The NATS driver's client, made to insist on what the URL says, to let go of a connection that hangs, and to be quick."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import anyio
from nats.aio.client import Client
from nats.errors import Error, MaxPayloadError

from mainspring.mailbox.nats_parser import Heard, QuickParser

if TYPE_CHECKING:
    from collections.abc import Callable

    from nats.aio.subscription import Subscription


class NoTlsError(Error):
    """The URL says ``tls://`` and the server does not offer it."""


class StrictClient(Client):
    """The driver's client.

    By itself the driver takes ``tls://`` and ``nats://`` for the same: it encrypts where the server asks for it, and else
    sends user and password as they are.

    And it has a task and a queue for each subscription, which cost more than all else that is done with most messages.
    """

    def __init__(self) -> None:
        super().__init__()
        self._ps: QuickParser = QuickParser(self)

    def _connect_command(self) -> bytes:
        """What the driver sends first, on every connection: the login. Raises :class:`NoTlsError` where all could read it."""
        server = self._current_server
        writer = getattr(self._transport, "_io_writer", None)
        encrypted = writer is not None and writer.get_extra_info("ssl_object") is not None
        if server is not None and server.uri.scheme == "tls" and not encrypted:
            if writer is not None:
                writer.transport.abort()  # the driver, when it reconnects, would forget it
            raise NoTlsError(
                f"{server.uri.hostname}:{server.uri.port} does not offer TLS, and was not told the login: set up TLS on that"
                " server, or write nats:// if everybody between here and there may read all of it"
            )
        return super()._connect_command()

    async def hear(self, subject: str, hearer: Callable[[Heard], object]) -> Subscription:
        """Subscribe: ``hearer`` is called with each message as it is read, in the order in which they come."""
        subscription = await self.subscribe(subject)
        self._ps.hearers[b"%d" % subscription._id] = hearer  # noqa: SLF001 - nothing can have come yet
        return subscription

    async def hush(self, subscription: Subscription) -> None:
        """Unsubscribe; what comes nevertheless is not heard any more."""
        self._ps.hearers.pop(b"%d" % subscription._id, None)  # noqa: SLF001
        await subscription.unsubscribe()

    async def publish(
        self, subject: str, payload: bytes = b"", reply: str = "", headers: dict[str, str] | None = None
    ) -> None:
        """The driver's, whose checks of the two subjects take longer than all the rest: they are the mailbox's own.

        All that is published in one turn of the event loop is written at once.
        """
        if headers is not None or self._flush_queue is None or not self.is_connected:
            await super().publish(subject, payload, reply, headers)
            return
        if len(payload) > self._max_payload:
            raise MaxPayloadError
        await self._send_command(b"PUB %b %b %d\r\n%b\r\n" % (subject.encode(), reply.encode(), len(payload), payload))
        if self._flush_queue.empty():
            await self._flush_pending()

    async def hang_up(self, seconds: float) -> None:
        """Disconnect, in whatever state this is, under a shield; by force where the other side takes nothing any more.

        What was still to be written is lost then. The driver's own ``close`` waits for it, and leaves tasks where it is cut
        short.
        """
        with anyio.CancelScope(shield=True, deadline=anyio.current_time() + seconds):
            with suppress(Exception):
                await self.close()
        self._subs.clear()
        writer = getattr(self._transport, "_io_writer", None)
        if writer is not None:
            writer.transport.abort()
