"""The connection to a NATS server that the mailboxes of one process and event loop share.

They share it if servers, login, TLS, timeout and silence are the same. A mailbox that opens connects if there is no
connection, or if it is lost: so it learns at once of servers that refuse. The last mailbox that closes disconnects. Meanwhile
the driver's own tasks keep the connection, and restore it for all.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import anyio
from nats.errors import StaleConnectionError

from mainspring.core import process
from mainspring.errors import describe
from mainspring.mailbox.limits import CLOSE_TIMEOUT, COURTESY
from mainspring.mailbox.nats.client import RefusedError, StrictClient, denied_subject, refuses_subscription
from mainspring.mailbox.nats.messages import RESERVED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nats.aio.subscription import Subscription

    from mainspring.mailbox.nats.connection import NatsConnection
    from mainspring.mailbox.nats.settings import Server

KIND: Final = "nats clients"
RECONNECT_WAIT: Final = 0.2
"""Seconds between two tries to reach a server again."""
PING_SHARE: Final = 0.3
"""The share of the allowed silence between two pings. Two may be unanswered; at the third the connection is given up."""
MAX_CREATIONS: Final = 2
"""Streams and consumers that are being created at once. The server does these one after another, each takes milliseconds, and
no other call of the connection is answered meanwhile."""
ROOM: Final = 32 * 2**20
"""Bytes of messages that may be on their way to the mailboxes of a connection. A server that has 64 MiB (``max_pending``) for
a process that does not read them hangs up, on all mailboxes. What they had been sent would come again when its leases end."""


class SharedClient:
    """See the module. Get one by :meth:`shared`, :meth:`join` it, and :meth:`leave` it in the end."""

    def __init__(self, server: Server, credentials: str | None, timeout: float, silence: float) -> None:
        self.servers = server.urls
        self.timeout = timeout
        self.client: StrictClient | None = None
        """The driver's client, connected or about to be again; None while no mailbox is open."""
        self.last_error = ""
        """What is wrong with the connection. What one mailbox may not do is not."""
        self._options: dict[str, Any] = server.options
        if credentials is not None:
            self._options["user_credentials"] = credentials
        self.creations = anyio.Semaphore(MAX_CREATIONS)
        self.pulls = 0
        """Pull requests under way, of all members."""
        self._silence = silence
        self._max_payload = 0
        self._turn = anyio.Lock()
        self._refused: RefusedError | None = None
        self._members: set[NatsConnection] = set()

    @classmethod
    def shared(cls, server: Server, credentials: str | None, timeout: float, silence: float) -> SharedClient:
        """Return the connection of the running event loop for these servers and settings."""
        key = (process.event_loop(), server, credentials, timeout, silence)
        return process.shared(KIND, key, partial(cls, server, credentials, timeout, silence))

    @property
    def is_connected(self) -> bool:
        """True if the server can be reached, as far as is known."""
        return self.client is not None and self.client.is_connected

    @property
    def max_payload(self) -> int:
        """Bytes of the largest payload that the server takes, as of the latest connection."""
        if self.client is not None and self.client.is_connected:
            self._max_payload = self.client.max_payload
        return self._max_payload

    @property
    def portion(self) -> int:
        """Bytes that one pull may bring: its share of :data:`ROOM`, or a message of the largest size."""
        return max(ROOM // max(1, self.pulls), self.max_payload + RESERVED)

    # ------------------------------------------------------------------------------------------------------- members

    async def join(self, member: NatsConnection) -> StrictClient:
        """Add a member, and return the client. One of several callers connects for all; each waits at most the timeout.

        :raises RefusedError: every server refuses.
        :raises TimeoutError: no server answers.
        """
        refused = self._refused
        with anyio.fail_after(self.timeout):
            async with self._turn:
                while not self.is_connected:  # the last member may leave, or the connection be lost, in the meantime
                    if self._refused is not None and self._refused is not refused:
                        raise RefusedError(self._refused.refusals)
                    await self._connect()
                self._members.add(member)
        assert self.client is not None
        return self.client

    async def leave(self, member: NatsConnection, subscriptions: Sequence[Subscription]) -> None:
        """Remove a member and its subscriptions. The last member disconnects."""
        self._members.discard(member)
        client = self.client
        if client is None:
            return
        if not self._members:
            self.client = None  # a connected one may have something to write
            await client.hang_up(CLOSE_TIMEOUT / 2 if client.is_connected else COURTESY)
            return
        with anyio.move_on_after(COURTESY, shield=True):
            for subscription in subscriptions:
                with suppress(Exception):  # the connection is lost
                    await client.unlisten(subscription)

    # ---------------------------------------------------------------------------------------------------- connecting

    async def _connect(self) -> None:
        """Connect, and subscribe anew for the members. Raise :class:`RefusedError` as soon as every server has refused."""
        client = StrictClient()
        refusals: list[Exception] = []

        async def on_error(error: Exception) -> None:
            if self.client is not client:
                refusals.append(error)
                if len(refusals) >= len(self.servers):
                    connecting.cancel()
            self._note_error(error)

        try:
            with anyio.CancelScope() as connecting:
                await self._connect_client(client, on_error)
            if connecting.cancel_called:
                self._refused = RefusedError(refusals)
                raise self._refused
            listening = {member: await member.listen_on(client) for member in list(self._members)}
        except BaseException:
            await client.hang_up(CLOSE_TIMEOUT / 2 if client.is_connected else COURTESY)
            raise
        if self.is_connected:  # the driver has restored the lost one meanwhile
            await client.hang_up(CLOSE_TIMEOUT / 2)
            return
        lost, self.client = self.client, client
        self._refused, self._max_payload = None, client.max_payload
        for member, subscriptions in listening.items():
            member.move_to(subscriptions)
        self._came_back()
        if lost is not None:
            await lost.hang_up(COURTESY)

    async def _connect_client(self, client: StrictClient, on_error: Any) -> None:
        await client.connect(
            self.servers,
            name="mainspring",
            error_cb=on_error,
            disconnected_cb=partial(self._on_disconnect, client),
            reconnected_cb=partial(self._on_reconnected, client),
            reconnect_time_wait=RECONNECT_WAIT,  # type: ignore[arg-type]
            max_reconnect_attempts=-1,
            connect_timeout=self.timeout / len(self.servers),  # type: ignore[arg-type]
            flush_timeout=self.timeout,
            flusher_queue_size=0,
            ping_interval=PING_SHARE * self._silence,  # type: ignore[arg-type]
            max_outstanding_pings=2,
            **self._options,
        )

    def _note_error(self, error: Exception) -> None:
        subject, too_many = denied_subject(error), refuses_subscription(error)
        if subject is None and not too_many:
            self.last_error = "it does not answer" if isinstance(error, TimeoutError) else describe(error)
        for member in list(self._members):
            if subject is not None:
                member.deny(subject)
            if too_many:
                member.refuse_subscription()
            if isinstance(error, StaleConnectionError):
                member.fell_silent()

    def _came_back(self) -> None:
        self.last_error = ""
        for member in list(self._members):
            member.came_back()

    # The driver calls these.

    async def _on_disconnect(self, client: StrictClient) -> None:
        if client is self.client:
            for member in list(self._members):
                member.lose()

    async def _on_reconnected(self, client: StrictClient) -> None:
        if client is self.client:
            self._came_back()
