"""Transactions of several calls: of handlers, of senders, and of sends within a capacity.

A handler's transaction (``Mailbox.transaction``) commits its writes together with the settlement of its message. A sender's
own transaction takes messages along (``send(connection=)``), on whatever connection the sender has. A send within a capacity
counts and stores in one transaction.
"""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING, Any

import anyio
import psycopg
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from mainspring.errors import InvalidParameterError, MailboxConnectionError, MessageSettledError
from mainspring.mailbox.limits import COURTESY, full
from mainspring.mailbox.postgres.commands import Statement, StatementBatch, call, call_text, execute
from mainspring.mailbox.postgres.connection import BlockedError, Connection, as_mailbox_error, no_answer
from mainspring.mailbox.postgres.dedup import blocked_error
from mainspring.mailbox.postgres.user_connections import (
    PsycopgConnection,
    as_psycopg,
    driver_errors,
    ended_inside,
    raise_translated,
    thread_user_connection,
    translated_errors,
    user_connection,
    user_transaction,
)
from mainspring.mailbox.postgres.values import Texts, array, stored_key
from mainspring.redaction import one_line

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from mainspring.mailbox.batched import OfDelivery
    from mainspring.mailbox.message import Message
    from mainspring.mailbox.postgres.commands import PostgresSend
    from mainspring.mailbox.postgres.pool import SharedPool
    from mainspring.mailbox.postgres.thread_transactions import ThreadTransaction
    from mainspring.mailbox.postgres.user_connections import UserConnection


REMEMBERED = 1_000
"""Transactions that were given up and are remembered."""
UNCERTAIN = "which may have taken place"


async def send_within_capacity(
    shared: SharedPool, batch: StatementBatch, send: PostgresSend, capacity: int, turn: anyio.Semaphore
) -> None:
    """Store the messages if there is room, in one transaction that keeps other senders from counting; hold ``turn`` meanwhile.

    It is one of the calls of the process that travel alone.

    The send is ``blocked`` if an open transaction has sent one of the keys. Cancelled, it ends at once, and nothing is stored
    unless the COMMIT had been sent.
    """
    try:
        with anyio.fail_after(shared.connections.timeout):
            async with turn, shared.single_calls, shared.connections.connection() as connection:
                await _send_if_it_fits(connection, batch, send, capacity, shared.schema)
    except TimeoutError:
        raise no_answer(shared.connections.timeout) from None
    except BlockedError:
        if all(envelope.dedup_key is None for envelope in send.envelopes):
            raise
        send.blocked = True


async def _send_if_it_fits(
    connection: psycopg.AsyncConnection[Any], batch: StatementBatch, send: PostgresSend, capacity: int, schema: str
) -> None:
    envelopes = send.envelopes
    keys = sorted({stored_key(e.dedup_key) for e in envelopes if e.dedup_key is not None})
    try:
        with expendable(connection):
            async with connection.transaction():
                waiting = (await call(connection, schema, "lock_capacity", batch.box))[0][0]
                more = len(envelopes)
                if keys:
                    known = await call(connection, schema, "used_dedup_keys", batch.box, array(Texts, keys))
                    more = sum(e.dedup_key is None for e in envelopes) + len(keys) - len(known)
                if more and waiting + more > capacity:
                    raise full(waiting, capacity, more)
                # The lock that keeps other senders out is not kept while a key is blocked: the call with it fails soon.
                for each in batch.build([send]):
                    each.take(await execute(connection, each))
    except psycopg.Error as error:
        raise as_mailbox_error(error) from error


class HandlerTransactions:
    """The handlers' transactions of one mailbox object that are under way, by receipt handle.

    ``uncertain`` holds the handles of transactions that were given up with a settlement in them. The server may still hold the
    message's row for one, so a new settlement or renewal may have to wait for it, and travels alone.
    """

    def __init__(self) -> None:
        self.under_way: dict[str, HandlerTransaction | ThreadTransaction] = {}
        self.uncertain: dict[str, None] = {}

    def concern(self, handle: str) -> bool:
        """True if that delivery is in a transaction, or may be in a transaction that was given up."""
        return handle in self.under_way or handle in self.uncertain

    def mark_uncertain(self, handle: str) -> None:
        """Add the handle to ``uncertain``."""
        self.uncertain[handle] = None
        while len(self.uncertain) > REMEMBERED:
            del self.uncertain[next(iter(self.uncertain))]

    def check_message(self, message: Message[Any, Any]) -> None:
        """Raise :class:`MessageSettledError` if the message is settled, or in a transaction."""
        if message.is_settled or message.receipt_handle in self.under_way:
            raise MessageSettledError(
                f"message {message.id}: it is already settled, or in a transaction; open one for each message"
            )

    def add(self, message: Message[Any, Any], given: Any, this: HandlerTransaction | ThreadTransaction) -> None:
        """Note a transaction on ``given``, a connection or session of the handler's; None: on a connection of the pool.

        :raises InvalidParameterError: the transaction of another message is on it.
        """
        driver = this.connection.connection
        if given is not None and any(one.connection.connection is driver for one in self.under_way.values()):
            raise InvalidParameterError(
                f"transaction: {given!r:.200} is in the transaction of another message; use one for each message"
            )
        self.under_way[message.receipt_handle] = this

    @asynccontextmanager
    async def join(self, shared: SharedPool, store: str, message: Message[Any, Any], given: Any) -> AsyncIterator[Any]:
        """Run a transaction that ends with the block, and with which the message is settled.

        It is one of ``given``, a connection or session of the handler's, which is yielded again; of a connection of the pool
        if that is None. See :meth:`Mailbox.transaction`.
        """
        handle, timeout = message.receipt_handle, shared.connections.timeout
        self.check_message(message)
        lent = _lent(shared) if given is None else _of_user(given, timeout)
        async with lent as connection:
            this = HandlerTransaction(connection, timeout)
            self.add(message, given, this)
            ended = False
            try:
                async with _transaction(connection, timeout):
                    if given is not None:
                        await this.check_user(shared.schema, store)
                    yield connection.connection if given is None else given
                    if this.sent:
                        await this.check_end()
                    else:
                        await message.acknowledge()
                    ended = True
            except BaseException as error:
                ended = False
                if this.sent and connection.closed:
                    self.mark_uncertain(handle)
                if not (isinstance(error, driver_errors()) and connection.closed):  # the handler's own affair
                    raise
                raise MailboxConnectionError(f"the transaction was lost: {one_line(error)}") from error
            finally:
                del self.under_way[handle]
                if not ended:
                    message.settlement = None  # if it was settled, then in what was rolled back
                    if connection.status not in (TransactionStatus.IDLE, TransactionStatus.UNKNOWN):
                        connection.abandon()  # it could still commit


@asynccontextmanager
async def _lent(shared: SharedPool) -> AsyncIterator[PsycopgConnection]:
    """Lend a connection of the pool, when it is its turn. It holds up no other call, however long the handler takes."""
    async with shared.transactions, AsyncExitStack() as stack:
        try:
            with anyio.fail_after(shared.connections.timeout):
                connection = await stack.enter_async_context(shared.connections.connection(0))
        except TimeoutError:
            raise no_answer(shared.connections.timeout) from None
        try:
            yield PsycopgConnection(connection)
        finally:
            connection.row_factory = tuple_row


@asynccontextmanager
async def _of_user(given: Any, timeout: float) -> AsyncIterator[UserConnection]:
    """Yield the connection behind ``given``, with the errors that concern it."""
    with translated_errors("transaction"):
        try:
            with anyio.fail_after(timeout):
                connection = await user_transaction(given)
        except TimeoutError:
            raise no_answer(timeout) from None
    yield connection


class LevelCheck:
    """The query on a user's connection: whether it is to the store, and at which isolation level."""

    def __init__(self, schema: str, store: str) -> None:
        self._levels: list[tuple[Any, ...]] = []
        text = f"SELECT current_setting('transaction_isolation') FROM {schema}.check_store($1)"  # noqa: S608 - a checked name
        self.statement = Statement(text.encode(), (store,), self._levels.extend)

    def judge(self) -> None:
        """Raise :class:`InvalidParameterError` at a level other than READ COMMITTED."""
        level = self._levels[0][0]
        if level != "read committed":
            raise InvalidParameterError(
                f"transaction: the isolation level of the connection is {level}, at which a renewal of the lease would end the"
                " transaction; use READ COMMITTED"
            )


class HandlerTransaction:
    """A handler's transaction under way: settlements of its message go through its connection.

    ``sent``: a settlement was sent. ``settled``: it was answered, so that the message's row is locked.
    """

    __slots__ = ("_timeout", "connection", "sent", "settled")

    def __init__(self, connection: UserConnection, timeout: float) -> None:
        self.connection = connection
        self.sent = False
        self.settled = False
        self._timeout = timeout

    async def settle(self, calls: StatementBatch, command: OfDelivery) -> None:
        """Settle in the transaction. Raise the error of the command, or if the block has ended the transaction."""
        self._check_status()
        self.sent = True
        await self._execute(calls.build([command]), "to the settlement in the transaction, which is given up")
        if command.error is not None:
            self.sent = False
            raise command.error
        self.settled = True

    async def check_user(self, schema: str, store: str) -> None:
        """Raise :class:`InvalidParameterError` unless the message can be settled on the connection, which is the user's own.

        A renewal changes the message's row meanwhile. At a higher isolation level no settlement could follow.
        """
        check = LevelCheck(schema, store)
        await self._execute([check.statement], "in the transaction")
        check.judge()

    async def _execute(self, statements: list[Statement], what: str) -> None:
        try:
            with step(self.connection, self._timeout, what):
                for each in statements:
                    each.take(await self.connection.execute(each))
        except driver_errors() as error:
            if self.connection.closed:  # `join` raises what that means
                raise
            if isinstance(self.connection.connection, Connection):
                raise as_mailbox_error(as_psycopg(error)) from error
            raise_translated(error, "transaction")

    def check_renewal(self) -> None:
        """Raise :class:`MailboxConnectionError` while it is not known whether the lease is still needed.

        A renewal would wait for the row, and so would its whole batch.
        """
        if self.sent and not self.settled:
            raise MailboxConnectionError("the settlement in its transaction has not been answered yet")

    async def check_end(self) -> None:
        """Raise :class:`TransactionEndedError` if a COMMIT would not commit what the block did."""
        self._check_status()
        with step(self.connection, self._timeout, "in the transaction"):
            if await self.connection.is_failed():
                raise ended_inside()

    def _check_status(self) -> None:
        if self.connection.status in (TransactionStatus.IDLE, TransactionStatus.INERROR):
            raise ended_inside()


def failed_commit(error: BaseException, *, is_closed: bool) -> MailboxConnectionError | None:
    """Return what a COMMIT raises that failed by the store or by the connection, which ``is_closed`` or not.

    None: it failed by a constraint that is looked at only at the COMMIT, which is the handler's own affair.
    """
    if is_closed:
        return MailboxConnectionError(f"the transaction was lost in its COMMIT, {UNCERTAIN}: {one_line(error)}")
    refused = as_mailbox_error(as_psycopg(error))
    return refused if isinstance(refused, MailboxConnectionError) else None


@asynccontextmanager
async def _transaction(connection: UserConnection, timeout: float) -> AsyncIterator[None]:
    """Run the driver's transaction with a time limit on BEGIN, COMMIT and ROLLBACK, and none on the block."""
    transaction = connection.transaction()
    try:
        with step(connection, timeout, "to BEGIN"):
            await transaction.__aenter__()
    except driver_errors() as error:
        raise as_mailbox_error(as_psycopg(error)) from error
    try:
        yield
    except Exception as error:
        # Lost, it is rolled back, too.
        with suppress(*driver_errors(), MailboxConnectionError), step(connection, timeout, "to ROLLBACK"):
            if await transaction.__aexit__(type(error), error, error.__traceback__):
                return
        raise
    except BaseException as error:
        if not isinstance(connection.connection, Connection):  # which is closed at once
            await _roll_back_cancelled(connection, transaction, error)
        raise
    try:
        with step(connection, timeout, f"to COMMIT, {UNCERTAIN}"):
            await transaction.__aexit__(None, None, None)
    except driver_errors() as error:
        failure = failed_commit(error, is_closed=connection.closed)
        if failure is None:
            raise
        raise failure from error


async def _roll_back_cancelled(connection: UserConnection, transaction: Any, error: BaseException) -> None:
    """Roll back on a connection that the user goes on with, although its block was cancelled; close it if that takes long."""
    done = False
    with anyio.move_on_after(COURTESY, shield=True), suppress(*driver_errors()):
        await transaction.__aexit__(type(error), error, error.__traceback__)
        done = True
    if not done:
        connection.abandon()


@contextmanager
def step(connection: UserConnection, timeout: float, what: str) -> Iterator[None]:
    """Limit the time of what the mailbox itself does in a transaction. Out of time or cancelled, close the connection at once.

    So a worker that has lost its lease meanwhile does not wait for a server that is gone. What is not committed is rolled back
    when the server sees that the connection is closed.
    """
    try:
        with anyio.fail_after(timeout), expendable(connection.connection):
            yield
    except TimeoutError:
        connection.abandon()
        raise no_answer(timeout, f" {what}") from None
    except anyio.get_cancelled_exc_class():
        connection.abandon()
        raise


@contextmanager
def expendable(connection: Any) -> Iterator[None]:
    """Let a cancellation in the block close the connection at once; the server rolls back when it sees that."""
    if isinstance(connection, Connection):
        connection.is_expendable = True
    try:
        yield
    finally:
        if isinstance(connection, Connection):
            connection.is_expendable = False


def statements_to_join(schema: str, store: str, batch: StatementBatch, send: PostgresSend) -> Iterator[Statement]:
    """Yield the statements that store the messages of ``send`` in a sender's transaction. Execute each before the next.

    The messages exist, and wake receivers, if that commits. Raise :class:`MailboxConnectionError` if another open transaction
    has sent the key and does not end in time: the sender's transaction is then as it was, and can go on.
    """
    yield Statement(call_text(schema, "check_store", 1), (store,))
    for each in batch.build([send]):
        yield each
        if send.blocked:
            raise blocked_error(send.envelopes, f"within {batch.patience:g} s, or by the connection's own lock_timeout")
    # Also if no receive waits by now: one may by the time of the commit.
    word = f"{batch.box} {batch.became_pending.get(batch.box, 0)}"
    yield Statement(b"SELECT pg_notify($1, $2)", (schema, word))


async def send_on(given: Any, steps: Iterator[Statement]) -> None:
    """Execute the statements in the transaction of the sender's connection."""
    with translated_errors("send"):
        connection = await user_connection(given)
        for each in steps:
            each.take(await connection.execute(each))


def send_on_thread(given: Any, steps: Iterator[Statement], send: PostgresSend) -> list[str]:
    """Execute the statements in the transaction of the calling thread's connection. Return the ids."""
    with translated_errors("send"):
        connection = thread_user_connection(given)
        for each in steps:
            each.take(connection.execute(each))
    return list(send.result)
