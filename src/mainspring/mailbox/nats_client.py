"""The NATS driver's client, made to insist on what the URL says, and to let go of a connection that hangs."""

from __future__ import annotations

from contextlib import suppress

import anyio
from nats.aio.client import Client
from nats.errors import Error


class NoTlsError(Error):
    """The URL says ``tls://`` and the server does not offer it."""


class StrictClient(Client):
    """The driver's client.

    By itself the driver takes ``tls://`` and ``nats://`` for the same: it encrypts where the server asks for it, and else
    sends user and password as they are.
    """

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

    async def hang_up(self, seconds: float) -> None:
        """Disconnect, in whatever state this is, under a shield; by force where the other side takes nothing any more.

        What was still to be written is lost then. The driver's own ``close`` waits for it, and leaves tasks where it is cut
        short.
        """
        with anyio.CancelScope(shield=True, deadline=anyio.current_time() + seconds):
            with suppress(Exception):
                await self.close()
        for subscription in self._subs.values():
            task = subscription._wait_for_msgs_task  # noqa: SLF001 - see above
            if task is not None:
                task.cancel()
        self._subs.clear()
        writer = getattr(self._transport, "_io_writer", None)
        if writer is not None:
            writer.transport.abort()
