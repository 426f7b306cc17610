"""A durable mailbox in a PostgreSQL database, shared by the processes of many machines."""

from __future__ import annotations

import math
from contextlib import suppress
from contextvars import copy_context
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, TypeVar, overload

import anyio

from mainspring.errors import InvalidParameterError, MainspringError
from mainspring.mailbox import batched
from mainspring.mailbox.backend import SHARED_STORE, TRANSIENT, MailboxStatistics
from mainspring.mailbox.batched import AcknowledgeMany, BatchedBackend, Batcher, Command, Waiters
from mainspring.mailbox.codec import headers_of
from mainspring.mailbox.job_commands import SetTask, WriteRecord
from mainspring.mailbox.limits import (
    SILENCE,
    check_column,
    check_real_time,
    check_row,
    full,
    is_name,
    no_thread_connection,
    size_of,
)
from mainspring.mailbox.mailbox import Mailbox
from mainspring.mailbox.message import (
    ACK,
    Ack,
    Cancelled,
    CancelOutcome,
    MessagePage,
    MessagePlace,
    Nack,
    RescheduleOutcome,
)
from mainspring.mailbox.postgres import schema as schemas
from mainspring.mailbox.postgres.commands import (
    LOCK_WAIT,
    NoSuchTargetError,
    PostgresSend,
    Settle,
    SettleWithResult,
    StatementBatch,
)
from mainspring.mailbox.postgres.connection import BlockedError, ConnectionPool, ValueRefusedError
from mainspring.mailbox.postgres.dedup import DedupSends
from mainspring.mailbox.postgres.limits import changes_text, state_row
from mainspring.mailbox.postgres.listener import QUICK_POLLS, Polling
from mainspring.mailbox.postgres.listing import LOOK_AT_MOST, parts_behind, parts_of
from mainspring.mailbox.postgres.pool import SharedPool
from mainspring.mailbox.postgres.settings import (
    SCHEMA,
    PostgresOptions,
    address_of,
    conninfo_of,
    is_parameter,
    local_name,
)
from mainspring.mailbox.postgres.transactions import (
    HandlerTransactions,
    send_on,
    send_on_thread,
    send_within_capacity,
    statements_to_join,
)
from mainspring.mailbox.postgres.user_connections import is_async
from mainspring.mailbox.postgres.values import (
    Integers,
    Shorts,
    Texts,
    array,
    dead_row,
    portions,
    record_values,
    stored_name,
    unfinished_row,
)
from mainspring.mailbox.records import Record
from mainspring.mailbox.settings import reads_query
from mainspring.mailbox.sync import ThreadConnection

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from contextlib import AbstractAsyncContextManager, AbstractContextManager

    import psycopg

    from mainspring.mailbox.limiters import LimitChange, LimitState
    from mainspring.mailbox.message import (
        ClaimedMessage,
        Dead,
        Envelope,
        Message,
        MessageQuery,
        Settlement,
        UnfinishedMessage,
    )
    from mainspring.mailbox.records import RecordWrite
    from mainspring.runtime.scope import DaemonScope

T = TypeVar("T")
R = TypeVar("R")
X = TypeVar("X")
WITHIN_CAPACITY = 2
"""Sends within a capacity that are in flight at once, each with a connection: one stores, and the next has come to the server.
Their transactions take turns there anyway."""
RESULTS_NOTED = 30.0
"""Seconds after which the store is told again that results are wanted. It announces them for 60 seconds, or 45 at least."""
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
        of them, the last quarter (at most 3 s) is for cancelling the query.
    :param silence: seconds within which connections on which the server answers nothing, while it takes no new one either, are
        given up. The server's host answers for a connection, too, where libpq's ``tcp_user_timeout`` is not given.
    :raises ConfigError: a value cannot work. On opening: the schema is missing and must not be made, or is of a newer
        Mainspring; the role lacks a right.
    """

    backend: PostgresBackend

    @reads_query(PostgresOptions)
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
        libpq = {key: parameters.pop(key) for key in list(parameters) if is_parameter(key)}
        options = PostgresOptions.of(
            url,
            name=name,
            capacity=capacity,
            schema=schema,
            migrate=migrate,
            listen=listen,
            poll_interval=poll_interval,
            timeout=timeout,
            silence=silence,
            **parameters,
        )
        conninfo = conninfo_of(url, libpq, options.timeout, options.silence)
        super().__init__(PostgresBackend(conninfo, options), body=body, reply=reply)

    @classmethod
    def from_url(cls, url: str, *, body: Any = None, reply: Any = None, **options: Any) -> PostgresMailbox[Any, Any]:
        """Return the mailbox that a URL means; its options, and libpq's parameters, can stand in the query."""
        return cls(url, body=body, reply=reply, **options)

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

    @overload
    def transaction(
        self, message: Message[Any, Any], connection: None = None
    ) -> AbstractAsyncContextManager[psycopg.AsyncConnection[Any]]: ...

    @overload
    def transaction(self, message: Message[Any, Any], connection: X) -> AbstractAsyncContextManager[X]: ...

    def transaction(self, message: Message[Any, Any], connection: Any = None) -> AbstractAsyncContextManager[Any]:
        """See :meth:`Mailbox.transaction`. Transactions are READ COMMITTED.

        Of those without ``connection`` there are at most 10 of a process at once, each with a connection of its own. Change
        settings of that by ``SET LOCAL`` only: it is used again. ``connection`` is a psycopg ``AsyncConnection``, an asyncpg
        ``Connection``, or an ``AsyncConnection`` or ``AsyncSession`` of SQLAlchemy.
        """
        return super().transaction(message, connection)


class PostgresBackend(BatchedBackend):
    """A queue in a PostgreSQL database.

    Batchers each have one batch in flight at a time, and do not wait for each other. ``_batcher`` is for claims and all that a
    lease allows, in the order in which it comes; ``_sends`` is for messages; :class:`DedupSends` has two for those with a
    dedup key. Sends within a capacity, in turns, and what concerns dead letters and cancellations travel alone. Polls and
    notifications are the pool's, for all its mailboxes.
    """

    _pool: SharedPool
    capabilities = replace(SHARED_STORE, transactions=True, async_backends=frozenset({"asyncio"}))

    def __init__(self, conninfo: str, options: PostgresOptions) -> None:
        super().__init__(options.name, options.capacity)
        self._conninfo = conninfo
        self._name_at = lru_cache(1_000)(partial(local_name, conninfo=conninfo, schema=options.schema))
        self._options = options
        self._number = 0
        self._store = ""
        self._ranks: set[int] = {0}
        self._transactions = HandlerTransactions()

    @property
    def address(self) -> str:
        """Its URL, without a password: a worker on another store has its own login for it among its ``reply_stores``."""
        return address_of(self._conninfo, self._options.schema, self.name)

    @property
    def transactions(self) -> int:
        """See :attr:`PostgresMailbox.transactions`."""
        return 0 if self.waiters.closed else self._pool.connections.batches

    async def migrate_schema(self, dry_run: bool) -> tuple[int, int]:
        """See :meth:`PostgresMailbox.migrate_schema`."""
        options = self._options
        return await schemas.migrate_at(ConnectionPool(self._conninfo, options.timeout), options.schema, dry_run)

    def local_name(self, address: str) -> str | None:
        return self._name_at(address)

    # ----------------------------------------------------------------------------------------------------- life cycle

    async def open(self, scope: DaemonScope) -> None:
        check_real_time(self.name, "a PostgreSQL")
        options = self._options
        shared = SharedPool.shared(self._conninfo, options.schema, options.timeout, options.silence, options.listen)
        shared.acquire()
        try:
            self._store, self._number, together = await shared.prepare(self.name, options.migrate)
        except BaseException:
            await shared.release()
            raise
        self._pool = shared
        self._ranks = {0}  # it may have been dropped since it was open last
        self.watermark = shared.watermark(self._number)
        self.polling = Polling(self._number, options.poll_interval, asks_first=together)
        alarms = self.begin_timers(scope)
        self.open_line(Waiters(alarms))
        self._results_alarm = alarms.alarm(self._want_results)
        self.notifications.results.on_demand = self._results_wanted
        self._results_noted = -math.inf
        self._reconnects = shared.connections.reconnects
        self._scope = scope
        self._context = copy_context()
        self._batchers: list[Batcher[Any]] = []
        self._batcher = self._new_batcher(self._execute, self.undo)
        self._sends: Batcher[Command] | None = None
        self._dedup: DedupSends | None = None
        self._turns: anyio.Semaphore | None = None
        shared.add_mailbox(self.name, self._number, self)
        shared.task.join(scope)

    def _new_batcher(
        self,
        execute: Callable[[list[Any]], Awaitable[None]],
        undo: Callable[[Command], None] | None = None,
        resume: Callable[[], Awaitable[None]] | None = None,
    ) -> Batcher[Any]:
        """Make a batcher. Those for sends are made by the first one: many mailboxes only receive."""
        name = f"mailbox {self.name!r}"

        def start() -> None:
            run = partial(self._scope.start_soon, batcher.run, name=f"{name} batches", stop=batcher.stop)
            self._context.run(run)

        batcher = Batcher(execute, resume=resume, undo=undo, start=start, name=name)
        self._batchers.append(batcher)
        return batcher

    def sweep_in(self, seconds: float) -> None:
        self._pool.polls.poll_in(self, seconds)

    async def exists(self) -> bool:
        return await schemas.has_mailbox(
            ConnectionPool(self._conninfo, self._options.timeout), self._options.schema, self.name
        )

    async def close(self) -> None:
        shared = self._pool
        shared.connections.begin_close()
        try:
            async with anyio.create_task_group() as tasks:
                for batcher in self._batchers:
                    tasks.start_soon(batcher.close)
        finally:
            self._results_alarm.end()
            self.end_timers()
            shared.remove_mailbox(self._number, self)
            shared.task.leave(self._scope)
            await shared.release()

    def statistics(self) -> MailboxStatistics:
        shared = self._pool
        turns = self._turns
        return MailboxStatistics(
            waiting_receives=self.waiters.parked,
            queued=(turns.statistics().tasks_waiting if turns else 0)
            + sum(batcher.queued for batcher in self._batchers),
            in_flight=(WITHIN_CAPACITY - turns.value if turns else 0)
            + sum(batcher.in_flight for batcher in self._batchers),
            batches=self.polling.polls + sum(batcher.batches for batcher in self._batchers),
            reconnects=shared.connections.reconnects - self._reconnects,
            connected=shared.connections.connected,
            polling=not shared.polls.listening,
        )

    async def drop(self) -> None:
        await self._pool.value("drop_mailbox", self._number)
        self._pool.forget(self.name)

    def sibling(self, name: str) -> PostgresBackend:
        return PostgresBackend(self._conninfo, self._options.with_values(name=name, capacity=None))

    # -------------------------------------------------------------------------------------------------------- batches

    def _new_batch(self, patience: float | None = None) -> StatementBatch:
        """Return a batch to execute outside of the batchers."""
        return StatementBatch(self._pool.schema, self._number, self.watermark, self._now(), patience=patience)

    async def _execute(self, commands: list[Command]) -> None:
        """Execute commands together; if one has a value that the server does not take, each by itself."""
        try:
            await self._transact(commands)
        except ValueRefusedError:
            if len(commands) == 1:
                raise
            for command in commands:
                command.error = None
                try:
                    await self._transact([command])
                except ValueRefusedError as its_own:
                    command.error = its_own

    async def _transact(self, commands: Sequence[Command], lock_wait: float = LOCK_WAIT, apart: bool = False) -> None:
        shared = self._pool
        batch = StatementBatch(
            shared.schema, self._number, self.watermark, self._now(), lock_wait=lock_wait, apart=apart
        )
        await shared.connections.run(batch.build(commands))
        self._notify(batch)

    async def _execute_alone(self, command: Command) -> None:
        """Execute a command in no batch, as it may have to wait for a lock; raise its error."""
        batch = self._new_batch()
        await self._pool.connections.run(batch.build([command]), turn=self._pool.single_calls)
        if command.error is not None:
            raise command.error
        self._notify(batch)

    def _notify(self, batch: StatementBatch) -> None:
        """Wake receives of this process for what the batch made pending, or will be due."""
        shared = self._pool
        for number, count in batch.became_pending.items():
            if count > 0:
                shared.listener.wake(number, count)
        if batch.due_in is not None:
            shared.listener.sweep_in(self._number, batch.due_in)
        if batch.results:
            shared.listener.kept_results(self._number, batch.results)
        if batch.newly_listening:
            self.polling.quick = list(QUICK_POLLS)
            shared.polls.poll_in(self, self.polling.quick.pop(0))

    # -------------------------------------------------------------------------------------------------------- sending

    async def send(self, envelopes: list[Envelope]) -> list[str]:
        await self._ready_for(envelopes)
        if self._capacity is not None:
            return await self._dedup_sends().retry_while_blocked(envelopes, self._send_within_capacity)
        for envelope in envelopes:
            if envelope.dedup_key is not None:
                return await self._dedup_sends().send(envelopes)
        if self._sends is None:
            self._sends = self._new_batcher(self._execute, resume=self._leave_send)
        ids: list[str] = await self._sends.call(PostgresSend(envelopes))
        return ids

    async def _leave_send(self) -> None:
        """Leave a lone send whose caller was cancelled, and with it the query: it may have been stored."""

    def _dedup_sends(self) -> DedupSends:
        if self._dedup is None:
            self._dedup = DedupSends(self._transact, self._pool.connections.timeout, self._new_batcher)
        return self._dedup

    async def _send_within_capacity(self, send: PostgresSend) -> None:
        batch = self._new_batch()
        if self._turns is None:
            self._turns = anyio.Semaphore(WITHIN_CAPACITY)
        await send_within_capacity(self._pool, batch, send, self._capacity or 0, self._turns)
        self._notify(batch)

    async def _ready_for(self, envelopes: list[Envelope]) -> None:
        new = set()
        for envelope in envelopes:
            check_row("a message", envelope)
            if -envelope.priority not in self._ranks:
                new.add(-envelope.priority)
        if new:
            await self._pool.rows("add_ranks", self._number, array(Shorts, sorted(new)))
            self._ranks |= new

    async def send_within(self, connection: Any, envelopes: list[Envelope]) -> list[str]:
        await self._ready_for(envelopes)
        if self._capacity is not None:
            raise InvalidParameterError("send: connection= cannot be used with a mailbox that has a capacity")
        send = PostgresSend(envelopes)
        patience = self._pool.connections.timeout
        steps = statements_to_join(self._pool.schema, self._store, self._new_batch(patience), send)
        if isinstance(connection, ThreadConnection) and not is_async(connection.connection):
            connection.work = partial(send_on_thread, connection.connection, steps, send)
            return [envelope.message_id for envelope in envelopes]
        given = connection.connection if isinstance(connection, ThreadConnection) else connection
        await send_on(given, steps)
        return list(send.result)

    def transaction(self, message: Message[Any, Any], connection: Any) -> AbstractAsyncContextManager[Any]:
        return self._transactions.join(self._pool, self._store, message, connection)

    def thread_transaction(self, message: Message[Any, Any], connection: Any) -> AbstractContextManager[Any]:
        from mainspring.mailbox.postgres.thread_transactions import join_in_thread

        if connection is None:
            raise no_thread_connection()
        return join_in_thread(self._transactions, self._pool, self._store, message, connection)

    # ------------------------------------------------------------------------------------------------------ receiving

    async def claim(
        self, max_messages: int, visibility_timeout: float, wait_time_seconds: float
    ) -> list[ClaimedMessage]:
        if wait_time_seconds < self._pool.polls.interval(self):  # no poll would come in that time
            self.polling.must_claim()
        return await super().claim(max_messages, visibility_timeout, wait_time_seconds)

    async def claim_once(self, limit: int, visibility: float, *, waits: bool) -> list[ClaimedMessage]:
        polls, polling = self._pool.polls, self.polling
        if waits and polling.asks_first:
            polls.poll_in(self, 0.0)
            return []
        is_empty = self.waiters.signals == polling.empty_at and self._now() <= polling.empty_until
        if waits and polls.listening and is_empty:
            found: list[ClaimedMessage] = []
        else:
            found = await super().claim_once(limit, visibility, waits=waits)
        if waits and not found:  # not before: a poll that comes before the receive waits would be the last one
            polls.poll_in(self, polls.interval(self))
        return found

    # ------------------------------------------------------------------------------------------------------- settling

    async def settle(self, delivery: ClaimedMessage, settlement: Settlement) -> None:
        command: batched.OfDelivery
        target: int | None = None
        if isinstance(settlement, Nack):
            command = batched.NackCommand(delivery, settlement)
        elif isinstance(settlement, Ack) and settlement.reply is None and settlement.result is None:
            command = batched.Acknowledge(delivery)
        else:
            settlement, target = await self._with_reply_target(settlement)
            keeps_result = isinstance(settlement, Ack) and settlement.result is not None
            command = (SettleWithResult if keeps_result else Settle)(delivery, settlement, target)
        under_way = self._transactions.under_way.get(delivery.receipt_handle)
        try:
            await (self.call(command) if under_way is None else under_way.settle(self._new_batch(), command))
        except NoSuchTargetError:
            self._pool.forget_number(target)
            raise

    async def acknowledge_many(self, deliveries: list[ClaimedMessage]) -> dict[int, Exception]:
        """Acknowledge in one call; deliveries that may have to wait for a transaction go each by itself, at the same time.

        So all of it takes no longer than one call may, however many wait.
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

    async def _acknowledge_together(self, deliveries: dict[int, ClaimedMessage]) -> dict[int, Exception]:
        refused = await self._batcher.call(AcknowledgeMany(list(deliveries.values())))
        numbers = list(deliveries)
        return {numbers[place]: error for place, error in refused.items()}

    async def call(self, command: Command) -> Any:
        """Execute a command with the next batch; alone, if it may have to wait for a transaction that was given up."""
        if isinstance(command, batched.OfDelivery) and command.delivery.receipt_handle in self._transactions.uncertain:
            return await self._execute_alone(command)
        return await self._batcher.call(command)

    async def _with_reply_target(self, settlement: Ack | Dead) -> tuple[Ack | Dead, int | None]:
        """Return the settlement for the store, and the number of the mailbox that its reply goes to.

        A new mailbox is made before, in a transaction of its own: its name must not wait for other commits.
        """
        reply = settlement.reply
        if reply is None:
            return settlement, None
        check_row("a reply", reply)
        name = reply.reply_to or ""
        target = await self._pool.number(name, make=not name.startswith(TRANSIENT))
        return replace(settlement, reply=replace(reply, reply_to=None)), target

    async def extend(self, delivery: ClaimedMessage, timeout: float) -> None:
        under_way = self._transactions.under_way.get(delivery.receipt_handle)
        if under_way is not None:
            under_way.check_renewal()
            if under_way.settled:
                return  # its row is locked until that commits: no claim can take it, and a renewal would block its batch
        await self.call(batched.Extend(delivery, timeout))

    async def checkpoint(self, delivery: ClaimedMessage, state: bytes) -> None:
        check_column("a checkpoint", len(state))
        await super().checkpoint(delivery, state)

    # -------------------------------------------------------------------------------------------------- looking after

    async def purge(self) -> int:
        return int(await self._pool.value("purge", self._number))

    async def dead_letters(self, limit: int, after: str | None) -> list[tuple[ClaimedMessage, Dead, float]]:
        behind = None if after is None else known([after])[0]
        rows = await self._pool.rows("dead_letters", self._number, min(limit, 2**31 - 1), behind, None)
        return [dead_row(row) for row in rows]

    async def dead_letters_of(
        self, task: str, limit: int, after: str | None
    ) -> list[tuple[ClaimedMessage, Dead, float]]:
        of, behind = known([task])[0], None if after is None else known([after])[0]
        rows = await self._pool.rows("dead_letters_of", self._number, of, min(limit, 2**31 - 1), behind)
        return [dead_row(row) for row in rows]

    async def find_dead_letters(self, message_ids: list[str]) -> list[tuple[ClaimedMessage, Dead, float]]:
        named = array(Texts, known(message_ids))
        rows = await self._pool.rows("dead_letters", self._number, len(message_ids), None, named)
        return [dead_row(row) for row in rows]

    async def replay_dead_letters(self, message_ids: list[str] | None) -> int:
        if message_ids is None and self._capacity is None:
            return await self._do_to_all_dead(self._replay)
        return await self._replay(message_ids)  # where they have to find room, in one step

    async def _replay(self, message_ids: list[str] | None) -> int:
        named = None if message_ids is None else array(Texts, known(message_ids))
        number, waiting = (await self._pool.rows("replay", self._number, named, self._capacity))[0]
        if waiting is not None and self._capacity is not None:
            raise full(waiting, self._capacity, number)
        self._pool.listener.wake(self._number, number)
        return int(number)

    async def purge_dead_letters(self, message_ids: list[str] | None) -> int:
        return await (self._do_to_all_dead(self._purge_dead) if message_ids is None else self._purge_dead(message_ids))

    async def _purge_dead(self, message_ids: list[str]) -> int:
        return int(await self._pool.value("purge_dead", self._number, array(Texts, known(message_ids))))

    async def _do_to_all_dead(self, do: Callable[[list[str]], Awaitable[int]]) -> int:
        """Do it to all that are dead by now, the oldest first. Return their number."""
        shared, box = self._pool, self._number
        await shared.rows("sweep_all", box)  # what has expired is dead, too
        dead = f"{shared.schema}.dead WHERE mailbox <= $1"  # in order, so that no plan reads those of others
        newest = f"SELECT place FROM {dead} AND mailbox >= $1 ORDER BY mailbox DESC, place DESC LIMIT 1"  # noqa: S608 - a checked name
        last = max((place for (place,) in await shared.query(newest, box)), default=0)
        some = (
            f"SELECT place, id, octet_length(body) FROM {dead} AND (mailbox, place) > ($1, $2) AND place <= $3"  # noqa: S608
            " ORDER BY mailbox, place LIMIT $4"
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
            self._pool.listener.cancelled(self._number, [message_id])
        return Cancelled(CancelOutcome(outcome), reply_to, headers_of(headers or "{}") or {})

    async def find(self, message_ids: list[str]) -> list[UnfinishedMessage]:
        rows = await self._pool.rows("unfinished", self._number, array(Texts, known(message_ids)))
        return [unfinished_row(row) for row in rows]

    async def list_messages(self, query: MessageQuery) -> MessagePage:
        pool, box = self._pool, self._number
        key = None if query.key is None else stored_name(query.key)
        tasks = [] if query.task is None else [stored_name(query.task)]
        limited: list[str] = []
        if query.task is None and (key is not None or query.place is MessagePlace.PENDING):
            found = [name for (name,) in await pool.rows("tasks_of", box, key is None)]
            tasks, limited = ([], found) if key is None else (found, [])
        if key is not None and not tasks:
            return MessagePage([], None)
        parts, behind = parts_behind(parts_of(query.place, tasks, limited, key), query.after, key)
        rows = await pool.rows(
            "list_messages",
            box,
            array(Integers, [part.state for part in parts]),
            array(Texts, [part.task for part in parts]),
            array(Integers, [int(part.has_key) for part in parts]),
            key,
            query.since,
            min(query.limit, LOOK_AT_MOST),
            LOOK_AT_MOST,
            None if behind is None else array(Texts, behind),
        )
        *ids, (_, number, got_to) = rows
        messages = {each.message.message_id: each for each in await self.find([name for name, *_ in ids])}
        page = [messages[name] for name, *_ in ids if name in messages and messages[name].place is query.place]
        return MessagePage(page, None if number is None else parts[number - 1].after(got_to))

    async def replace_body(self, message_id: str, body: Any) -> RescheduleOutcome:
        check_column("a message", len(body))
        return RescheduleOutcome(
            await self._pool.value("replace_body", self._number, known([message_id])[0], bytes(body))
        )

    async def reschedule(self, message_id: str, delay: float) -> RescheduleOutcome:
        outcome = RescheduleOutcome(
            await self._pool.value("reschedule", self._number, known([message_id])[0], float(delay))
        )
        if outcome is RescheduleOutcome.RESCHEDULED:
            if delay:
                self._pool.listener.sweep_in(self._number, delay)
            else:
                self._pool.listener.wake(self._number, 1)
        return outcome

    # --------------------------------------------------------------------------------------------------------- limits

    async def change_limits(self, changes: list[LimitChange]) -> None:
        pending = int(await self._pool.value("change_limits", self._number, changes_text(changes)))
        self._pool.listener.wake(self._number, pending)

    async def set_task(self, delivery: ClaimedMessage, task: str) -> bool:
        return bool(await self.call(SetTask(delivery, task)))

    async def limits(self) -> list[LimitState]:
        return [state_row(row) for row in await self._pool.rows("limits", self._number)]

    # -------------------------------------------------------------------------------------------------------- records

    async def write_record(self, write: RecordWrite, envelopes: Sequence[Envelope] = ()) -> int | None:
        if not envelopes:
            alone: int | None = await self._pool.value("write_record", self._number, *record_values(write))
            return alone
        messages = list(envelopes)
        await self._ready_for(messages)
        check_column("the messages of one write", sum(map(size_of, messages)))
        version: int | None = None

        async def attempt(send: PostgresSend) -> None:
            nonlocal version
            command = WriteRecord(write, send.envelopes, self._capacity)
            send.result = []
            try:
                await self._execute_alone(command)
            except BlockedError:
                if all(envelope.dedup_key is None for envelope in messages):
                    raise
                send.blocked = True
            version = command.result

        await self._dedup_sends().retry_while_blocked(messages, attempt)
        return version

    async def find_records(self, kind: str, keys: list[str]) -> list[Record]:
        rows = await self._pool.rows("find_records", self._number, kind, array(Texts, known(keys)))
        return [Record(*row) for row in rows]

    async def list_records(self, kind: str, limit: int, after: str | None) -> list[Record]:
        rows = await self._pool.rows("list_records", self._number, kind, min(limit, 2**31 - 1), after)
        return [Record(*row) for row in rows]

    def _results_wanted(self, wanted: bool) -> None:
        if wanted and not self.waiters.closed:
            self._results_alarm.wake_by(max(self._now(), self._results_noted + RESULTS_NOTED))

    def _want_results(self, overslept: float) -> float:
        """Have results announced, while they are wanted. The store has to be told so again and again."""
        if self.waiters.closed or not self.notifications.results.is_wanted:
            return math.inf
        since, self._results_noted = self._results_noted, self._now()
        begins = self._results_noted - since > 1.5 * RESULTS_NOTED
        self._scope.start_soon(self._note_wanted, begins, name=f"mailbox {self.name} wants results")
        return self._results_noted + RESULTS_NOTED

    async def _note_wanted(self, begins: bool) -> None:
        with suppress(MainspringError):  # then the waits find the results when they look
            await self._pool.rows("want_results", self._number)
            if begins:
                self.notifications.results.publish([])


def known(message_ids: list[str]) -> list[str]:
    """Return ids as the server takes them. An id that it cannot keep is the id of no message."""
    return [message_id if is_name(message_id) else "" for message_id in message_ids]
