"""The NATS driver's client, made to insist on what the URL says, to let go of a connection that hangs, and to be quick."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import anyio
from nats.aio.client import Client
from nats.aio.transport import TcpTransport
from nats.errors import Error, MaxPayloadError, ProtocolError
from nats.protocol.parser import PERMISSIONS_ERR, STALE_CONNECTION

from mainspring.errors import describe
from mainspring.mailbox.nats.parser import Heard, QuickParser
from mainspring.runtime.resolver import resolve

if TYPE_CHECKING:
    from collections.abc import Callable
    from urllib.parse import ParseResult

    from nats.aio.client import Srv
    from nats.aio.subscription import Subscription


class NoTlsError(Error):
    """The URL says ``tls://`` and the server does not offer it."""


class LoginError(Error):
    """No login can be made of the credentials."""


class _Transport(TcpTransport):
    """The driver's, but that it finds the server's addresses without the event loop's default executor."""

    def __bool__(self) -> bool:
        """The driver would take an unconnected one for none, and make its own."""
        return True

    async def connect(self, uri: ParseResult, buffer_size: int, connect_timeout: int) -> None:
        with anyio.fail_after(connect_timeout):
            addresses = await resolve(uri.hostname or "")
            for address in addresses:
                share = anyio.CancelScope(deadline=anyio.current_time() + connect_timeout / len(addresses))
                with share:
                    try:
                        await super().connect(_at(uri, address), buffer_size, connect_timeout)
                    except OSError:
                        if address == addresses[-1]:
                            raise
                    else:
                        return
        raise TimeoutError


def _at(uri: ParseResult, address: str) -> ParseResult:
    host = f"[{address}]" if ":" in address else address
    return uri._replace(netloc=f"{host}:{uri.port}")


class StrictClient(Client):
    """The driver's client.

    By itself the driver takes ``tls://`` and ``nats://`` for the same: it encrypts where the server asks for it, and else
    sends user and password as they are.

    And it has a task and a queue for each subscription, which cost more than all else that is done with most messages.

    And where a server stands still, it waits without an end: to write, and to close a connection that is given up, before it
    makes a new one.
    """

    def __init__(self) -> None:
        super().__init__()
        self._ps: QuickParser = QuickParser(self)

    def _connect_command(self) -> bytes:
        """What the driver sends first, on every connection: the login.

        Raises :class:`NoTlsError` where all could read it, :class:`LoginError` where there is none.
        """
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
        try:
            return super()._connect_command()
        except Exception as error:  # whatever the driver and nkeys make of a file that is none of credentials
            raise LoginError(
                f"no login can be made of the credentials, which must be the file of a user: {describe(error)}"
            ) from error

    async def hear(self, subject: str, hearer: Callable[[Heard], object]) -> Subscription:
        """Subscribe: ``hearer`` is called with each message as it is read, in the order in which they come."""
        subscription = await self.subscribe(subject)
        self._ps.hearers[b"%d" % subscription._id] = hearer  # noqa: SLF001 - nothing can have come yet
        return subscription

    async def hush(self, subscription: Subscription) -> None:
        """Unsubscribe; what comes nevertheless is not heard any more."""
        self.forget(subscription)
        await subscription.unsubscribe()

    def forget(self, subscription: Subscription) -> None:
        """Hear no more of it, and do not subscribe to it on the next connection."""
        self._ps.hearers.pop(b"%d" % subscription._id, None)  # noqa: SLF001
        self._subs.pop(subscription._id, None)  # noqa: SLF001

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
        self._abort()

    # ------------------------------------------------------------------------ the driver's own steps, each with an end

    async def _flush_pending(self, force_flush: bool = False) -> Any:
        """Have written what is pending; the driver's waits for room to say so, and (``force_flush``) for the end of that.

        ``force_flush``, where too much is pending already: raises ``TimeoutError`` where the server does not take it in time.
        """
        flusher, queue = self._flusher_task, self._flush_queue
        if queue is None or not self.is_connected or flusher is None or flusher.done():
            return await super()._flush_pending(force_flush)
        if force_flush:
            written = flusher.get_loop().create_future()
            queue.put_nowait(written)
            with anyio.fail_after(self._flush_timeout):
                await written
        elif queue.empty():  # else the next look at it takes this along
            queue.put_nowait(flusher.get_loop().create_future())
        return None

    async def _process_err(self, err_msg: str) -> None:
        """What the server refuses; it hangs up then, but for what this user may not do."""
        if STALE_CONNECTION not in err_msg and PERMISSIONS_ERR not in err_msg:  # those the driver tells by itself
            await self._error_cb(Error(f"the server said {err_msg or 'an error without words'}"))
            self._let_go()
        await super()._process_err(err_msg)

    async def _process_op_err(self, e: Exception) -> None:
        """The connection is lost."""
        if not (self.is_closed or self.is_reconnecting):
            if not isinstance(e, ProtocolError):  # what cannot be read the parser has told, in more words
                await self._error_cb(e)
            self._let_go()
        await super()._process_op_err(e)

    async def _connect_to_server(self, s: Srv) -> None:
        for task in (self._reading_task, self._ping_interval_task, self._flusher_task):
            if task is not None:
                task.cancel()  # of a try that failed late: it would go on with the new connection, beside its own
        self._let_go()
        if self._transport is None:
            self._transport = _Transport()  # type: ignore[no-untyped-call]
        await super()._connect_to_server(s)

    async def _process_connect_init(self) -> None:
        """The login. Whatever is wrong with it, the driver tries again: other errors than these would end its trying."""
        try:
            await super()._process_connect_init()
        except (OSError, Error, TimeoutError):
            raise
        except Exception as error:
            raise Error(f"what the NATS server said first cannot be read: {describe(error)}") from error
        if not self.is_connected:
            raise Error("the NATS server did not answer the login")

    def _let_go(self) -> None:
        """Let go of the connection at once, and of what was still to be written: whose that is is told that it is lost."""
        self._pending.clear()
        self._pending_data_size = 0
        self._abort()

    def _abort(self) -> None:
        writer = getattr(self._transport, "_io_writer", None)
        if writer is not None:
            writer.transport.abort()
