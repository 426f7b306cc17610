"""A durable mailbox in a PostgreSQL database, shared by the processes of many machines."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import anyio

from mainspring.errors import ConfigError, InvalidParameterError
from mainspring.mailbox.backend import TRANSIENT, Backend, Capabilities
from mainspring.mailbox.codec import headers_of
from mainspring.mailbox.limits import SILENCE, check_column, check_silence, full, is_name, size_of
from mainspring.mailbox.mailbox import Mailbox
from mainspring.mailbox.message import ACK, Ack, Cancelled, CancelOutcome, Dead, Return
from mainspring.mailbox.open import reads_query
from mainspring.mailbox.postgres import schema as schemas
from mainspring.mailbox.postgres.batches import Batchers
from mainspring.mailbox.postgres.commands import (
    Acknowledge,
    AcknowledgeMany,
    Claim,
    Count,
    Extend,
    Nack,
    NoSuchTargetError,
    OfDelivery,
    SaveCheckpoint,
    Send,
    Settle,
)
from mainspring.mailbox.postgres.connection import ConnectionPool
from mainspring.mailbox.postgres.pool import SharedPool
from mainspring.mailbox.postgres.transactions import (
    HandlerTransactions,
    driver_connection,
    is_async,
    send_on,
    send_on_thread,
    send_within_capacity,
    statements_to_join,
)
from mainspring.mailbox.postgres.url import (
    SCHEMA,
    address_of,
    check_name,
    check_parameters,
    check_schema,
    conninfo_of,
    local_name,
    options_of,
)
from mainspring.mailbox.postgres.values import Shorts, Texts, array, dead_row, portions
from mainspring.mailbox.sync import Errand
from mainspring.validation import is_number, is_whole

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    import psycopg

    from mainspring.mailbox.backend import MailboxStatistics
    from mainspring.mailbox.message import Counts, Dead, Delivery, Envelope, Message, Settlement
    from mainspring.runtime.scope import DaemonScope

T = TypeVar("T")
R = TypeVar("R")
MAX_POLL_INTERVAL = 30.0
"""Seconds: each time that a waiting receive asks, it has senders notify for a minute."""
DEAD_AT_ONCE = 1_000
"""Dead letters of one call at most, where it is to be done to all: however many there are, each call ends in time."""


class PostgresMailbox(Mailbox[T, R]):
    """A queue in a PostgreSQL database (13 or newer); many queues (names), processes and machines can share one.

    Operations of concurrent callers are joined into one round trip and one transaction. A send returns once the server has
    committed it. All times are the server's: leases, delays and expiries do not depend on the clocks of the workers. The
    tables lie in a schema of their own, which opening makes, or brings up to date, where ``migrate`` allows.

    It runs on asyncio (with uvloop too), as its driver does.

    :param url: of the database, with what libpq takes as parameters: ``postgresql://user@host:5432/db?sslmode=require``.
        The parameters below can stand there too, but for ``body`` and ``reply``. What it leaves out comes from the environment
        (``PGHOST``, ``PGPASSWORD``, …) and the password file.
    :param name: of the queue.
    :param body: the type of the bodies; else the handler's annotation gives it, else anything that JSON can say.
    :param reply: the type of the replies.
    :param capacity: how many messages may wait (delayed, pending, in flight) before a send through this object raises
        :class:`MailboxFullError`; None: as many as the disk holds.
    :param schema: the name of the schema.
    :param migrate: whether opening may make or upgrade the schema; else ``mainspring migrate`` does so.
    :param listen: whether to try to be notified. Without it, or where no notification arrives (behind a connection pooler in
        transaction mode), waiting receives ask the store at intervals.
    :param poll_interval: seconds after which a waiting receive asks the store again, up to 30; None: 1 s, or 0.1 s while no
        notification arrives. Notified receives do not wait for it.
    :param timeout: seconds that one call of the server may take, connecting included, before :class:`MailboxConnectionError`;
        of them, the last quarter (at most 3 s) is for telling the server to leave off.
    :param silence: seconds within which connections on which the server answers nothing, while it takes no new one either, are
        given up. The server's host answers for a connection, too, where libpq's ``tcp_user_timeout`` is not given.
    :raises ConfigError: a value cannot work. On opening: the schema is missing and must not be made, or is of a newer
        Mainspring; the role lacks a right.
    """

    backend: PostgresBackend

    @reads_query(options_of)
    def __init__(
        self,
        url: str,
        *,
        name: str = "default",
        body: Any = None,
        reply: Any = None,
        capacity: int | None = None,
        schema: str = SCHEMA,
        migrate: bool = True,
        listen: bool = True,
        poll_interval: float | None = None,
        timeout: float = 30.0,
        silence: float = SILENCE,
        **parameters: Any,
    ) -> None:
        check_name(name)
        if capacity is not None and not is_whole(capacity, 1):
            raise ConfigError(f"mailbox {name!r}: capacity must be a whole number from 1, or None, not {capacity!r}")
        if not (is_number(timeout, 0) and timeout):
            raise ConfigError(f"mailbox {name!r}: timeout must be above 0 seconds, not {timeout!r}")
        if poll_interval is not None and not (is_number(poll_interval, 0, MAX_POLL_INTERVAL) and poll_interval):
            raise ConfigError(
                f"mailbox {name!r}: poll_interval must be above 0 and up to {MAX_POLL_INTERVAL:g} seconds, or None, not"
                f" {poll_interval!r}"
            )
        check_parameters(url, parameters)
        options = PostgresOptions(
            conninfo_of(url, parameters, timeout, check_silence(name, silence)),
            check_schema(schema),
            capacity,
            migrate,
            listen,
            poll_interval,
            timeout,
            silence,
        )
        super().__init__(PostgresBackend(name, options), body=body, reply=reply)

    @classmethod
    def from_url(cls, url: str, *, body: Any = None, reply: Any = None, **options: Any) -> PostgresMailbox[Any, Any]:
        """The mailbox that a URL means; options that stand in it are strings, and libpq's parameters stand there too."""
        return cls(url, body=body, reply=reply, **options_of(url, options))

    @property
    def transactions(self) -> int:
        """How many transactions this process has had with the database, for all its mailboxes, since it opened the first."""
        return self.backend.transactions

    async def migrate_schema(self, dry_run: bool = False) -> tuple[int, int]:
        """Make or upgrade the schema, without opening the mailbox; its versions before and after.

        With ``dry_run`` nothing is done, and the second is the version it would have.

        :raises ConfigError: it is of a newer Mainspring, or the role lacks a right.
        :raises MailboxConnectionError: the server cannot be reached; where it broke off, nothing was changed.
        """
        return await self.backend.migrate_schema(dry_run)

    @asynccontextmanager
    async def transaction(self, message: Message[Any, Any]) -> AsyncIterator[psycopg.AsyncConnection[Any]]:
        """See :meth:`Mailbox.transaction`. At most 10 of a process at once; each has a connection of its own, READ COMMITTED.

        Change settings of the connection by ``SET LOCAL`` only: it is used again.
        """
        async with super().transaction(message) as connection:
            yield connection


@dataclass(frozen=True, slots=True)
class PostgresOptions:
    """The options of a :class:`PostgresMailbox`, checked; ``conninfo`` is libpq's."""

    conninfo: str
    schema: str
    capacity: int | None
    migrate: bool
    listen: bool
    poll_interval: float | None
    timeout: float
    silence: float


class PostgresBackend(Backend):
    """A queue in a PostgreSQL database."""

    capabilities = Capabilities(
        durable=True,
        cross_process=True,
        transactions=True,
        ordered=True,
        joined_acks=True,
        queue_age=True,
        async_backends=frozenset({"asyncio"}),
    )

    def __init__(self, name: str, options: PostgresOptions) -> None:
        super().__init__(name)
        self._options = options
        self._shared: SharedPool | None = None
        self._number = 0
        self._store = ""
        self._ranks: set[int] = {0}
        self._transactions = HandlerTransactions()
        self._is_closing = False

    @property
    def address(self) -> str:
        """Its URL, without a password: a worker on another store has its own login for it among its ``reply_stores``."""
        return address_of(self._options.conninfo, self._options.schema, self.name)

    @property
    def transactions(self) -> int:
        """See :attr:`PostgresMailbox.transactions`."""
        return 0 if self._shared is None else self._shared.connections.batches

    async def migrate_schema(self, dry_run: bool) -> tuple[int, int]:
        """See :meth:`PostgresMailbox.migrate_schema`."""
        options = self._options
        return await schemas.migrate_at(ConnectionPool(options.conninfo, options.timeout), options.schema, dry_run)

    def local_name(self, address: str) -> str | None:
        return local_name(address, self._options.conninfo, self._options.schema)

    # ----------------------------------------------------------------------------------------------------- life cycle

    async def open(self, scope: DaemonScope) -> None:
        options = self._options
        self._is_closing = False
        shared = SharedPool.shared(
            self._options.conninfo, self._options.schema, options.timeout, options.silence, bool(options.listen)
        )
        shared.acquire()
        try:
            self._store, self._number = await schemas.prepare(
                shared.connections, self._options.schema, self._options.migrate, self.name
            )
            shared.remember(self.name, self._number)
        except BaseException:
            await shared.release()
            raise
        self._shared = shared
        self._ranks = {0}  # it may have been dropped since it was open last
        name = f"mailbox {self.name!r}"
        self._batchers = Batchers(
            shared,
            self._number,
            name,
            options.poll_interval,
            self.notifications.cancelled.publish,
            self.notifications.silence.publish,
        )
        self._batchers.start(scope)

    async def exists(self) -> bool:
        return await schemas.has_mailbox(
            ConnectionPool(self._options.conninfo, self._options.timeout), self._options.schema, self.name
        )

    async def close(self) -> None:
        try:
            await self._batchers.close()
        finally:
            shared, self._shared = self._shared, None
            if shared is not None:
                await shared.release()

    def statistics(self) -> MailboxStatistics:
        return self._batchers.statistics()

    def stop_claims(self) -> None:
        self._is_closing = True
        if self._shared is not None:
            self._batchers.waiters.wake_all()

    async def drop(self) -> None:
        await self._pool.value("drop_mailbox", self._number)
        self._pool.forget(self.name)

    def sibling(self, name: str) -> PostgresBackend:
        return PostgresBackend(name, replace(self._options, capacity=None))

    @property
    def _pool(self) -> SharedPool:
        assert self._shared is not None
        return self._shared

    # -------------------------------------------------------------------------------------------------------- sending

    async def send(self, envelopes: list[Envelope]) -> list[str]:
        await self._ready_for(envelopes)
        if self._options.capacity is not None:
            attempt = partial(self._send_within_capacity, self._options.capacity)
            return await self._batchers.dedup.retry_while_blocked(envelopes, attempt)
        for envelope in envelopes:
            if envelope.dedup_key is not None:
                return await self._batchers.dedup.send(envelopes)
        ids: list[str] = await self._batchers.sends.call(Send(envelopes))
        return ids

    async def _send_within_capacity(self, capacity: int, send: Send) -> None:
        batch = self._batchers.new_batch()
        await send_within_capacity(self._pool, batch, send, capacity, self._batchers.within)
        self._batchers.notify(batch)

    async def _ready_for(self, envelopes: list[Envelope]) -> None:
        new = set()
        for envelope in envelopes:
            check_column("a message", size_of(envelope))
            if -envelope.priority not in self._ranks:
                new.add(-envelope.priority)
        if new:
            await self._pool.rows("add_ranks", self._number, array(Shorts, sorted(new)))
            self._ranks |= new

    async def send_within(self, connection: Any, envelopes: list[Envelope]) -> list[str]:
        await self._ready_for(envelopes)
        if self._options.capacity is not None:
            raise InvalidParameterError("send: connection= cannot be used with a mailbox that has a capacity")
        send = Send(envelopes)
        patience = self._pool.connections.timeout
        steps = statements_to_join(self._pool.schema, self._store, self._batchers.new_batch(patience), send)
        if isinstance(connection, Errand) and not is_async(connection.connection):
            connection.work = partial(send_on_thread, connection.connection, steps, send)
            return [envelope.message_id for envelope in envelopes]
        given = connection.connection if isinstance(connection, Errand) else connection
        await send_on(await driver_connection(given), steps)
        return list(send.result)

    @asynccontextmanager
    async def transaction(self, message: Message[Any, Any]) -> AsyncIterator[psycopg.AsyncConnection[Any]]:
        async with self._transactions.join(self._pool, message) as connection:
            yield connection

    # ------------------------------------------------------------------------------------------------------ receiving

    async def claim(self, max_messages: int, visibility_timeout: float, wait_time_seconds: float) -> list[Delivery]:
        if not wait_time_seconds:
            return await self._claim_once(max_messages, visibility_timeout, waits=False)
        look = partial(self._claim_once, max_messages, visibility_timeout, waits=True)
        deadline = self._batchers.now() + wait_time_seconds
        return await self._batchers.waiters.first(look, deadline, usable=lambda: not self._is_closing)

    async def _claim_once(self, limit: int, visibility: float, *, waits: bool) -> list[Delivery]:
        command = Claim(limit, visibility, waits)
        found: list[Delivery] = await self._batchers.claims.call(command)
        if found and self._is_closing:  # closed meanwhile
            self._batchers.undo(command)
            return []
        if waits and not found:
            self._batchers.due_in(self._batchers.poll_interval)
        return found

    # ------------------------------------------------------------------------------------------------------- settling

    async def settle(self, delivery: Delivery, settlement: Settlement) -> None:
        command: OfDelivery
        target: int | None = None
        if isinstance(settlement, Return):
            command = Nack(delivery, settlement)
        elif isinstance(settlement, Ack) and settlement.reply is None:
            command = Acknowledge(delivery)
        else:
            settlement, target = await self._with_reply_target(settlement)
            command = Settle(delivery, settlement, target)
        under_way = self._transactions.under_way.get(delivery.receipt_handle)
        try:
            await (self._do(command) if under_way is None else under_way.settle(self._batchers.new_batch(), command))
        except NoSuchTargetError:
            self._pool.forget_number(target)
            raise

    async def acknowledge_many(self, deliveries: list[Delivery]) -> dict[int, Exception]:
        """In one call; beside it, each by itself, those that have to do with a transaction and so may have to wait.

        So all of it has the end that one call has, however many wait.
        """
        apart = {n for n, one in enumerate(deliveries) if self._transactions.concern(one.receipt_handle)}
        if not apart:
            return await self._acknowledge_together(dict(enumerate(deliveries)))
        refused: dict[int, Exception] = {}

        async def settle(number: int) -> None:
            try:
                await self.settle(deliveries[number], ACK)
            except Exception as error:
                refused[number] = error

        async with anyio.create_task_group() as tasks:
            for number in apart:
                tasks.start_soon(settle, number)
            together = {n: one for n, one in enumerate(deliveries) if n not in apart}
            if together:
                try:
                    refused |= await self._acknowledge_together(together)
                except Exception as error:
                    refused |= dict.fromkeys(together, error)
        return refused

    async def _acknowledge_together(self, deliveries: dict[int, Delivery]) -> dict[int, Exception]:
        refused = await self._batchers.claims.call(AcknowledgeMany(list(deliveries.values())))
        numbers = list(deliveries)
        return {numbers[place]: error for place, error in refused.items()}

    async def _do(self, command: OfDelivery) -> None:
        """With whatever else is to be done; where it may have to wait for a transaction that was given up, by itself."""
        if command.delivery.receipt_handle in self._transactions.uncertain:
            await self._batchers.alone(command)
        else:
            await self._batchers.claims.call(command)

    async def _with_reply_target(self, settlement: Ack | Dead) -> tuple[Ack | Dead, int | None]:
        """The number of the mailbox that the reply goes to, made before (a name that is new must not wait for commits)."""
        reply = settlement.reply
        if reply is None:
            return settlement, None
        check_column("a reply", size_of(reply))
        name = reply.reply_to or ""
        target = await self._pool.number(name, make=not name.startswith(TRANSIENT))
        return replace(settlement, reply=replace(reply, reply_to=None)), target

    async def extend(self, delivery: Delivery, timeout: float) -> None:
        under_way = self._transactions.under_way.get(delivery.receipt_handle)
        if under_way is not None:
            under_way.check_renewal()
            if under_way.settled:
                return  # its row is locked until that commits: nobody can take it, and a renewal would wait, with all others
        await self._do(Extend(delivery, timeout))

    async def checkpoint(self, delivery: Delivery, state: bytes) -> None:
        check_column("a checkpoint", len(state))
        await self._do(SaveCheckpoint(delivery, state))

    # -------------------------------------------------------------------------------------------------- looking after

    async def counts(self) -> Counts:
        counts: Counts = await self._batchers.claims.call(Count())
        return counts

    async def purge(self) -> int:
        return int(await self._pool.value("purge", self._number))

    async def dead_letters(self, limit: int, after: str | None) -> list[tuple[Delivery, Dead, float]]:
        behind = None if after is None else known([after])[0]
        rows = await self._pool.rows("dead_letters", self._number, min(limit, 2**31 - 1), behind, None)
        return [dead_row(row) for row in rows]

    async def find_dead_letters(self, message_ids: list[str]) -> list[tuple[Delivery, Dead, float]]:
        named = array(Texts, known(message_ids))
        rows = await self._pool.rows("dead_letters", self._number, len(message_ids), None, named)
        return [dead_row(row) for row in rows]

    async def replay_dead_letters(self, message_ids: list[str] | None) -> int:
        if message_ids is None and self._options.capacity is None:
            return await self._do_to_all_dead(self._replay)
        return await self._replay(message_ids)  # where they have to find room, in one step

    async def _replay(self, message_ids: list[str] | None) -> int:
        named = None if message_ids is None else array(Texts, known(message_ids))
        capacity = self._options.capacity
        number, waiting = (await self._pool.rows("replay", self._number, named, capacity))[0]
        if waiting is not None and capacity is not None:
            raise full(waiting, capacity, number)
        self._pool.wake(self._number, number)
        return int(number)

    async def purge_dead_letters(self, message_ids: list[str] | None) -> int:
        return await (self._do_to_all_dead(self._purge_dead) if message_ids is None else self._purge_dead(message_ids))

    async def _purge_dead(self, message_ids: list[str]) -> int:
        return int(await self._pool.value("purge_dead", self._number, array(Texts, known(message_ids))))

    async def _do_to_all_dead(self, do: Callable[[list[str]], Awaitable[int]]) -> int:
        """Do it to all that are dead by now, the oldest first. Return to how many it was done."""
        shared, box = self._pool, self._number
        await shared.rows("sweep_all", box)  # what has expired is dead, too
        dead = f"{shared.schema}.dead WHERE mailbox = $1"
        ((last,),) = await shared.query(f"SELECT coalesce(max(place), 0) FROM {dead}", box)  # noqa: S608 - a checked name
        some = (
            f"SELECT place, id, octet_length(body) FROM {dead} AND place > $2 AND place <= $3 ORDER BY place LIMIT $4"  # noqa: S608
        )
        through = done = 0
        while rows := await shared.query(some, box, through, last, DEAD_AT_ONCE):
            for letters in portions(rows, lambda row: int(row[2])):
                done += await do([name for _, name, _ in letters])
            through = rows[-1][0]
        return done

    async def cancel(self, message_id: str) -> Cancelled:
        outcome, reply_to, headers = (await self._pool.rows("cancel", self._number, known([message_id])[0]))[0]
        if outcome == CancelOutcome.CANCELLED:
            self._pool.announce(self._number, [message_id])
        return Cancelled(CancelOutcome(outcome), reply_to, headers_of(headers or "{}") or {})


def known(message_ids: list[str]) -> list[str]:
    """Ids as the server takes them: what it cannot keep is the id of nothing."""
    return [message_id if is_name(message_id) else "" for message_id in message_ids]
