"""A durable mailbox on a NATS server with JetStream, for the processes of many machines."""

from __future__ import annotations

from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Never
from urllib.parse import quote

import anyio
import nats  # noqa: F401 - a missing driver is known at once
from typing_extensions import TypeVar

from mainspring.errors import ConfigError, InvalidParameterError, MailboxConnectionError, MailboxError
from mainspring.mailbox.backend import TRANSIENT, Backend, Capabilities, MailboxStatistics, check_changes
from mainspring.mailbox.limits import CLOSE_TIMEOUT, SILENCE, check_real_time
from mainspring.mailbox.mailbox import Mailbox
from mainspring.mailbox.message import CancelOutcome
from mainspring.mailbox.nats import inspection, listing, lookup
from mainspring.mailbox.nats.claims import Claims
from mainspring.mailbox.nats.client import check_credentials
from mainspring.mailbox.nats.connection import NatsConnection
from mainspring.mailbox.nats.limits import UNLIMITED, MailboxLimits
from mainspring.mailbox.nats.names import Names, encoded
from mainspring.mailbox.nats.records import Records
from mainspring.mailbox.nats.scheduler import DelayScheduler, ExpiryScheduler, Recovery, Scheduler
from mainspring.mailbox.nats.sends import Sends
from mainspring.mailbox.nats.settings import NatsOptions, Server
from mainspring.mailbox.nats.settlements import Settlements
from mainspring.mailbox.nats.shared_client import SharedClient
from mainspring.mailbox.nats.streams import Store
from mainspring.mailbox.settings import name_at, reads_query

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Sequence

    from mainspring.mailbox.limiters import LimitChange, LimitState
    from mainspring.mailbox.message import (
        Cancelled,
        ClaimedMessage,
        Counts,
        Dead,
        Envelope,
        MessagePage,
        MessageQuery,
        RescheduleOutcome,
        Settlement,
        UnfinishedMessage,
    )
    from mainspring.mailbox.nats.client import RawMessage
    from mainspring.mailbox.records import Record, RecordWrite
    from mainspring.runtime.scope import DaemonScope

T = TypeVar("T", default=Any)
R = TypeVar("R", default=Any)


class NatsMailbox(Mailbox[T, R]):
    """A queue on a NATS server (2.9 or newer) with JetStream; any number of processes and machines share it.

    A message is pending in a work-queue stream. The ack wait of a durable consumer leases it, or, for another length, a nak
    with a delay. It gets a new number in the stream before it is delivered again. Delayed messages and dead letters are in
    streams of their own, checkpoints in a key-value bucket. It has no priorities, and what is released goes to the tail. It
    runs on asyncio only, as its driver (nats-py) does. See docs/how-to/nats.md.

    All mailboxes of a process and event loop with the same servers, login, TLS options, timeout and silence share a connection.

    :param server: the URL of the server, or of several of one cluster (hosts by comma): ``nats://user:password@host:4222``.
        The other parameters can stand in its query instead, as in ``?name=jobs``, but for ``body`` and ``reply``.
    :param name: of the mailbox.
    :param body: the type of the bodies; else the handler's annotation gives it, else anything that JSON can say.
    :param reply: the type of the replies.
    :param ack_wait: seconds of a lease that need no call of their own: the ``visibility_timeout`` that most receives have.
        It is used where the mailbox is made on the server; later it stays as it is there.
    :param timeout: seconds that one call to the server, or all of opening, may take before :class:`MailboxConnectionError`.
        Opening does not count the wait for other mailboxes that are being created.
    :param silence: seconds after which a connection on which the server answers nothing is given up for a new one.
    :param replicas: how many servers of a cluster keep each message (1, 3 or 5), where the streams are made.
    :param storage: ``"file"``, or ``"memory"``: then nothing outlives the server.
    :param credentials: the path of a credentials file (needs ``nkeys``: ``pip install 'nats-py[nkeys]'``).
    :param ca_file: the certificates to trust instead of those that the machine trusts, for ``tls://``.
    :param cert_file: the certificate to show to the server, and its ``key_file``, where it wants one.
    :param ssl_context: instead of these files.
    :raises ConfigError: a value cannot work. On opening: the streams are there and another program's.
    """

    backend: NatsBackend

    @reads_query(NatsOptions)
    def __init__(
        self,
        server: str,
        *,
        name: str = "default",
        body: Any = None,
        reply: Any = None,
        ack_wait: float = 60.0,
        timeout: float = 5.0,
        silence: float = SILENCE,
        replicas: int = 1,
        storage: str = "file",
        credentials: str | None = None,
        ca_file: str | None = None,
        cert_file: str | None = None,
        key_file: str | None = None,
        ssl_context: ssl.SSLContext | None = None,
        **unknown: Never,
    ) -> None:
        options = NatsOptions.of(
            server,
            name=name,
            ack_wait=ack_wait,
            timeout=timeout,
            silence=silence,
            replicas=replicas,
            storage=storage,
            credentials=credentials,
            ca_file=ca_file,
            cert_file=cert_file,
            key_file=key_file,
            ssl_context=ssl_context,
            **unknown,
        )
        super().__init__(NatsBackend(Server.of(server, options), options), body=body, reply=reply)

    @classmethod
    def from_url(cls, url: str, *, body: Any = None, reply: Any = None, **options: Any) -> NatsMailbox[Any, Any]:
        """Return the mailbox that a URL means; its options can stand in the query."""
        return cls(url, body=body, reply=reply, **options)


class NatsBackend(Backend):
    """A queue in the streams of a NATS server."""

    capabilities = Capabilities(
        durable=True,
        cross_process=True,
        front_return=False,
        priority=False,
        transactional_reply=False,
        joined_acks=True,
        records=True,
        lookup=True,
        reschedule=True,
        listing=True,
        edit=True,
        pause=True,
        concurrency=True,
        queue_age=True,
        lease_ends_seen=False,
        lease_granularity=0.05,
        async_backends=frozenset({"asyncio"}),
    )

    def __init__(self, server: Server, options: NatsOptions) -> None:
        super().__init__(options.name)
        self._names = Names.of(options.name)
        self._server = server
        self._options = options
        self._schedulers: list[Scheduler] = []
        self._connection: NatsConnection | None = None

    @property
    def address(self) -> str:
        """The URL without a login, by which a worker on another store finds this mailbox among its ``reply_stores``."""
        return f"{self._server.address}?name={quote(self.name, safe='')}"

    def local_name(self, address: str) -> str | None:
        return name_at(address, NatsOptions, self._server.is_at)

    def sibling(self, name: str) -> NatsBackend:
        return NatsBackend(self._server, self._options.with_values(name=name))

    # ---------------------------------------------------------------------------------------------------- life cycle

    async def exists(self) -> bool:
        async with self._connected() as connection:
            found = await inspection.has_streams(connection, self._names)
        await connection.close()
        return found

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[NatsConnection]:
        """Connect to the server for the block. Connecting and the block together may last the timeout.

        The connection stays open, unless the block raises. A wait for other mailboxes' creations does not count.
        """
        options = self._options
        if options.credentials:
            check_credentials(options.credentials)
        shared = SharedClient.shared(self._server, options.credentials or None, options.timeout, options.silence)
        connection = NatsConnection(shared, f"mailbox {self.name!r}")
        until = anyio.current_time() + connection.timeout
        await connection.open()
        try:
            with anyio.fail_after(until - anyio.current_time()) as connection.opening:
                yield connection
        except BaseException as error:
            with anyio.CancelScope(shield=True):  # it has a deadline
                await connection.close()
            raise connection.failure(error) if isinstance(error, TimeoutError) else error

    async def open(self, scope: DaemonScope) -> None:
        check_real_time(self.name, "a NATS")
        options = self._options
        async with self._connected() as connection:
            store = Store(
                connection, self._names, replicas=options.replicas, storage=options.storage, ack_wait=options.ack_wait
            )
            store.ack_wait = await store.ensure(self._names)
            await connection.listen(store.names.to_cancelled, self._on_cancelled)
            await connection.listen(store.names.to_made, lambda message: store.note(message.data.decode()))
            sends = Sends(store)
            records = Records(store, sends)
            limits = MailboxLimits(store, records)
            claims = Claims(store, limits)
            await connection.listen(store.names.to_changes, lambda message: claims.note_change(message.data))
            await connection.listen(store.names.to_limits, limits.hear)
            if store.names.records in store.made:
                await limits.read()
        connection.on_loss = claims.wake
        connection.on_silence = self.notifications.silence.publish
        self._connection = connection
        self._store = store
        self._sends = sends
        self._claims = claims
        self._limits = limits
        store.replaced = claims.forget_leases
        self._records = records
        store.finish_writes = records.finish
        self._settlements = Settlements(store, claims, records)
        recovery = Recovery(store, claims, records, limits)
        connection.reconnected = partial(self._reconnected, recovery)
        scope.start_soon(recovery.run, name=f"mailbox {self.name} recovery")
        self._schedulers = []
        store.found = partial(self._start_scheduler, scope)
        for stream in store.made:
            self._start_scheduler(scope, stream)
        self._hears_results = False
        self.notifications.results.on_demand = partial(self._results_wanted, scope)
        if self.notifications.results.is_wanted:
            self._results_wanted(scope, True)
        if self.name.startswith(TRANSIENT):
            scope.start_soon(self._sweep, name=f"mailbox {self.name} abandoned ones")

    def _start_scheduler(self, scope: DaemonScope, stream: str) -> None:
        """Start the scheduler of a stream that is there now, where it has one."""
        if self._claims.stopped or stream not in (self._names.delayed, self._names.expiries):
            return
        is_delayed = stream == self._names.delayed
        scheduler = DelayScheduler(self._store) if is_delayed else ExpiryScheduler(self._store)
        self._schedulers.append(scheduler)
        what = "delayed messages" if is_delayed else "expiries"
        scope.start_soon(scheduler.run, name=f"mailbox {self.name} {what}", stop=scheduler.stop)

    def statistics(self) -> MailboxStatistics:
        connection = self._store.connection
        return MailboxStatistics(
            waiting_receives=self._claims.waiting,
            in_flight=connection.in_flight,
            unconfirmed=self._claims.unconfirmed,
            reconnects=connection.reconnects,
            connected=connection.is_connected,
        )

    async def _sweep(self) -> None:
        with suppress(MailboxError):  # the next process that opens a transient mailbox does it
            await inspection.sweep_transient(self._store)

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is None:
            return
        try:
            with anyio.move_on_after(CLOSE_TIMEOUT / 2):
                async with self._store.lock.reading():  # no message is half-way
                    pass
        finally:
            await connection.close()

    def stop_claims(self) -> None:
        if self._connection is None:
            return
        self._claims.stop()
        for scheduler in self._schedulers:
            scheduler.stop()
        self._connection.end_pulls()

    async def drop(self) -> None:
        await self._store.destroy(self._names)

    # ----------------------------------------------------------------------------------------------------- messages

    async def send(self, envelopes: list[Envelope]) -> list[str]:
        for envelope in envelopes:
            if envelope.reply_to is not None:
                self._check_reply_name(envelope.reply_to)
        return await self._sends.send(envelopes)

    def _check_reply_name(self, address: str) -> None:
        name = self.local_name(address)
        try:
            if name is not None:
                encoded(name)
        except ConfigError as error:
            raise InvalidParameterError(f"send: reply_to: {error}") from None

    async def claim(
        self, max_messages: int, visibility_timeout: float, wait_time_seconds: float
    ) -> list[ClaimedMessage]:
        return await self._claims.claim(max_messages, visibility_timeout, wait_time_seconds)

    async def settle(self, delivery: ClaimedMessage, settlement: Settlement) -> None:
        await self._settlements.settle(delivery, settlement)

    async def acknowledge_many(self, deliveries: list[ClaimedMessage]) -> dict[int, Exception]:
        return await self._settlements.acknowledge(deliveries)

    async def extend(self, delivery: ClaimedMessage, timeout: float) -> None:
        await self._claims.extend(delivery, timeout)

    async def checkpoint(self, delivery: ClaimedMessage, state: bytes) -> None:
        await self._settlements.checkpoint(delivery, state)

    async def counts(self) -> Counts:
        return await inspection.counts(self._store, self._claims)

    async def purge(self) -> int:
        return await inspection.purge(self._store)

    async def dead_letters(self, limit: int, after: str | None) -> list[tuple[ClaimedMessage, Dead, float]]:
        return await inspection.dead_letters(self._store, limit, after)

    async def dead_letters_of(
        self, task: str, limit: int, after: str | None
    ) -> list[tuple[ClaimedMessage, Dead, float]]:
        return await inspection.dead_letters(self._store, limit, after, task)

    async def find_dead_letters(self, message_ids: list[str]) -> list[tuple[ClaimedMessage, Dead, float]]:
        return await inspection.find_dead_letters(self._store, message_ids)

    async def replay_dead_letters(self, message_ids: list[str] | None) -> int:
        return await inspection.replay_dead_letters(self._store, message_ids)

    async def purge_dead_letters(self, message_ids: list[str] | None) -> int:
        return await inspection.purge_dead_letters(self._store, message_ids)

    async def cancel(self, message_id: str) -> Cancelled:
        found = await lookup.cancel(self._store, message_id)
        if found.outcome is CancelOutcome.CANCELLED:
            with suppress(MailboxConnectionError):  # its holder learns of it at the next renewal
                await self._store.connection.publish(self._names.to_cancelled, message_id.encode())
        return found

    async def find(self, message_ids: list[str]) -> list[UnfinishedMessage]:
        return await lookup.find(self._store, self._claims, message_ids)

    async def reschedule(self, message_id: str, delay: float) -> RescheduleOutcome:
        return await lookup.reschedule(self._store, message_id, delay)

    async def replace_body(self, message_id: str, body: Any) -> RescheduleOutcome:
        return await lookup.replace_body(self._store, message_id, body)

    async def list_messages(self, query: MessageQuery) -> MessagePage:
        return await listing.list_messages(self._store, self._claims, query)

    # --------------------------------------------------------------------------------------------------------- limits

    async def change_limits(self, changes: list[LimitChange]) -> None:
        check_changes(self.name, self.capabilities, changes)
        await self._limits.change(changes)

    async def limits(self) -> list[LimitState]:
        state = await self._limits.read()
        if state == UNLIMITED:
            return []
        return [replace(state, running=(await self.counts()).in_flight)]

    # -------------------------------------------------------------------------------------------------------- records

    async def write_record(self, write: RecordWrite, envelopes: Sequence[Envelope] = ()) -> int | None:
        return await self._records.write(write, envelopes)

    async def find_records(self, kind: str, keys: list[str]) -> list[Record]:
        return await self._records.find(kind, keys)

    async def list_records(self, kind: str, limit: int, after: str | None) -> list[Record]:
        return await self._records.list(kind, limit, after)

    # ---------------------------------------------------------------------------------------------------- what is heard

    def _on_cancelled(self, message: RawMessage) -> None:
        self.notifications.cancelled.publish([message.data.decode("utf-8", "replace")])

    def _results_wanted(self, scope: DaemonScope, wanted: bool) -> None:
        """Hear of results from the first time that they are wanted until the mailbox is closed."""
        if wanted and not self._hears_results and self._connection is not None:
            self._hears_results = True
            scope.start_soon(self._listen_for_results, self._connection, name=f"mailbox {self.name} wants results")

    async def _listen_for_results(self, connection: NatsConnection) -> None:
        try:
            await connection.listen(self._names.to_results, self._on_result)
        except Exception:  # a wait for a result looks by itself
            self._hears_results = False
        else:
            self.notifications.results.publish([])

    def _reconnected(self, recovery: Recovery) -> None:
        recovery.after_reconnect()
        if self._hears_results:
            self.notifications.results.publish([])

    def _on_result(self, message: RawMessage) -> None:
        self.notifications.results.publish([message.data.decode("utf-8", "replace")])
