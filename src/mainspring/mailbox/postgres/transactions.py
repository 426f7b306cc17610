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
from psycopg import RawCursor
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from mainspring.errors import InvalidParameterError, MailboxConnectionError, MessageSettledError, TransactionEndedError
from mainspring.mailbox.limits import full
from mainspring.mailbox.postgres.commands import Statement, StatementBatch, call, call_text, execute
from mainspring.mailbox.postgres.connection import BlockedError, Connection, as_mailbox_error, no_answer
from mainspring.mailbox.postgres.dedup import blocked_error
from mainspring.mailbox.postgres.values import Texts, array, register, stored_key
from mainspring.redaction import one_line

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from mainspring.mailbox.batched import OfDelivery
    from mainspring.mailbox.message import Message
    from mainspring.mailbox.postgres.commands import PostgresSend
    from mainspring.mailbox.postgres.pool import SharedPool


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
        self.under_way: dict[str, HandlerTransaction] = {}
        self.uncertain: dict[str, None] = {}

    def concern(self, handle: str) -> bool:
        """True if that delivery is in a transaction, or may be in a transaction that was given up."""
        return handle in self.under_way or handle in self.uncertain

    def mark_uncertain(self, handle: str) -> None:
        """Add the handle to ``uncertain``."""
        self.uncertain[handle] = None
        while len(self.uncertain) > REMEMBERED:
            del self.uncertain[next(iter(self.uncertain))]

    @asynccontextmanager
    async def join(self, shared: SharedPool, message: Message[Any, Any]) -> AsyncIterator[psycopg.AsyncConnection[Any]]:
        """Lend a connection in a transaction that ends with the block, and with which the message is settled.

        See :meth:`Mailbox.transaction`.
        """
        handle = message.receipt_handle
        if message.is_settled or handle in self.under_way:
            raise MessageSettledError(
                f"message {message.id}: it is already settled, or in a transaction; open one for each message"
            )
        async with shared.transactions, AsyncExitStack() as stack:
            try:
                with anyio.fail_after(shared.connections.timeout):
                    connection = await stack.enter_async_context(shared.connections.connection())
            except TimeoutError:
                raise no_answer(shared.connections.timeout) from None
            this = self.under_way[handle] = HandlerTransaction(connection, shared.connections.timeout)
            ended = False
            try:
                async with _transaction(connection, shared.connections.timeout):
                    yield connection
                    if not this.sent:
                        await message.acknowledge()
                    this.check(TransactionStatus.IDLE, TransactionStatus.INERROR)
                    ended = True
            except BaseException as error:
                ended = False
                if this.sent and connection.closed:
                    self.mark_uncertain(handle)
                if not (isinstance(error, psycopg.Error) and connection.closed):  # the handler's own affair
                    raise
                raise MailboxConnectionError(f"the transaction was lost: {one_line(error)}") from error
            finally:
                del self.under_way[handle]
                connection.row_factory = psycopg.rows.tuple_row
                if not ended:
                    message.settlement = None  # if it was settled, then in what was rolled back


class HandlerTransaction:
    """A handler's transaction under way: settlements of its message go through its connection.

    ``sent``: a settlement was sent. ``settled``: it was answered, so that the message's row is locked.
    """

    __slots__ = ("_timeout", "connection", "sent", "settled")

    def __init__(self, connection: psycopg.AsyncConnection[Any], timeout: float) -> None:
        self.connection = connection
        self.sent = False
        self.settled = False
        self._timeout = timeout

    async def settle(self, calls: StatementBatch, command: OfDelivery) -> None:
        """Settle in the transaction. Raise the error of the command, or if the block has ended the transaction."""
        self.check(TransactionStatus.IDLE, TransactionStatus.INERROR)
        self.sent = True
        try:
            with step(self.connection, self._timeout, "to the settlement in the transaction, which is given up"):
                for each in calls.build([command]):
                    each.take(await execute(self.connection, each))
        except psycopg.Error as error:
            if self.connection.closed:  # `join` raises what that means
                raise
            raise as_mailbox_error(error) from error
        if command.error is not None:
            self.sent = False
            raise command.error
        self.settled = True

    def check_renewal(self) -> None:
        """Raise :class:`MailboxConnectionError` while it is not known whether the lease is still needed.

        A renewal would wait for the row, and so would its whole batch.
        """
        if self.sent and not self.settled:
            raise MailboxConnectionError("the settlement in its transaction has not been answered yet")

    def check(self, *ended: TransactionStatus) -> None:
        """Raise :class:`TransactionEndedError` in one of these states, in which a COMMIT would not commit what the block did.

        The driver knows them without asking the server.
        """
        if self.connection.info.transaction_status in ended:
            raise TransactionEndedError(
                "ctx.transaction(): its transaction was ended, or has failed, inside the block, so that nothing can commit"
                " together with the settlement; leave COMMIT and ROLLBACK to the block, and let errors of statements out of it"
            )


@asynccontextmanager
async def _transaction(connection: psycopg.AsyncConnection[Any], timeout: float) -> AsyncIterator[None]:
    """Run the driver's transaction with a time limit on BEGIN, COMMIT and ROLLBACK, and none on the block."""
    transaction = connection.transaction()
    try:
        with step(connection, timeout, "to BEGIN"):
            await transaction.__aenter__()
    except psycopg.Error as error:
        raise as_mailbox_error(error) from error
    try:
        yield
    except Exception as error:
        with suppress(MailboxConnectionError), step(connection, timeout, "to ROLLBACK"):  # lost, it is rolled back too
            if await transaction.__aexit__(type(error), error, error.__traceback__):
                return
        raise
    try:
        with step(connection, timeout, f"to COMMIT, {UNCERTAIN}"):
            await transaction.__aexit__(None, None, None)
    except psycopg.Error as error:
        if not connection.closed:
            refused = as_mailbox_error(error)
            if isinstance(refused, MailboxConnectionError):
                raise refused from error
            raise  # a constraint that is looked at only now: the handler's own affair
        raise MailboxConnectionError(
            f"the transaction was lost in its COMMIT, {UNCERTAIN}: {one_line(error)}"
        ) from error


@contextmanager
def step(connection: psycopg.AsyncConnection[Any], timeout: float, what: str) -> Iterator[None]:
    """Limit the time of what the mailbox itself does in a transaction. Out of time or cancelled, close the connection at once.

    So a worker that has lost its lease meanwhile does not wait for a server that is gone. What is not committed is rolled back
    when the server sees that the connection is closed.
    """
    try:
        with anyio.fail_after(timeout), expendable(connection):
            yield
    except TimeoutError:
        raise no_answer(timeout, f" {what}") from None


@contextmanager
def expendable(connection: psycopg.AsyncConnection[Any]) -> Iterator[None]:
    """Let a cancellation in the block close the connection at once; the server rolls back when it sees that."""
    if isinstance(connection, Connection):
        connection.is_expendable = True
    try:
        yield
    finally:
        if isinstance(connection, Connection):
            connection.is_expendable = False


WRONG_STORE = "MS001"
_NO_STORE = (psycopg.errors.InvalidSchemaName, psycopg.errors.UndefinedFunction)


def is_async(given: Any) -> bool:
    """True if ``given`` is a connection, or a session, of async code."""
    return isinstance(given, psycopg.AsyncConnection) or hasattr(given, "sync_session") or hasattr(given, "sync_engine")


async def driver_connection(given: Any) -> psycopg.AsyncConnection[Any]:
    """Return the psycopg connection behind ``given``, which may be SQLAlchemy's connection or session, in a transaction.

    Raise :class:`InvalidParameterError` if there is none, or if every statement on it commits by itself.
    """
    connection = given
    if hasattr(connection, "sync_session"):  # SQLAlchemy's AsyncSession, which begins a transaction with this
        connection = await connection.connection()
    if hasattr(connection, "get_raw_connection"):  # SQLAlchemy's AsyncConnection
        if not connection.in_transaction():
            await connection.begin()
        connection = (await connection.get_raw_connection()).driver_connection
    if not isinstance(connection, psycopg.AsyncConnection):
        raise InvalidParameterError(
            "send: connection must be a psycopg AsyncConnection, or an AsyncConnection or AsyncSession of SQLAlchemy on"
            f" psycopg (postgresql+psycopg://), not {given!r}; those that are not async are for mailbox.sync.send()"
        )
    _check_transaction(connection)
    return connection


def thread_connection(given: Any) -> psycopg.Connection[Any]:
    """Return the same for a connection, or a session, that is not async."""
    connection = given
    if callable(getattr(connection, "connection", None)):  # SQLAlchemy's Session, which begins a transaction with this
        connection = connection.connection()
    if hasattr(connection, "in_transaction") and hasattr(connection, "connection"):  # SQLAlchemy's Connection
        if not connection.in_transaction():
            connection.begin()
        connection = connection.connection.driver_connection
    if not isinstance(connection, psycopg.Connection):
        raise InvalidParameterError(
            "sync.send: connection must be a psycopg Connection, or a Connection or Session of SQLAlchemy on psycopg"
            f" (postgresql+psycopg://), not {given!r}"
        )
    _check_transaction(connection)
    return connection


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


async def send_on(connection: psycopg.AsyncConnection[Any], steps: Iterator[Statement]) -> None:
    """Execute the statements in the transaction of ``connection``."""
    with _translated_errors():
        for each in steps:
            each.take(await execute(connection, each))


def send_on_thread(given: Any, steps: Iterator[Statement], send: PostgresSend) -> list[str]:
    """Execute the statements in the transaction of the calling thread's connection. Return the ids."""
    connection = thread_connection(given)
    with _translated_errors():
        for each in steps:
            cursor = RawCursor(connection, row_factory=tuple_row)
            register(cursor.adapters)
            cursor.execute(each.text, each.values, binary=True)
            each.take(cursor.fetchall())
    return list(send.result)


@contextmanager
def _translated_errors() -> Iterator[None]:
    try:
        yield
    except UnicodeEncodeError as error:
        raise InvalidParameterError(
            f"send: {error.object!r} cannot be said in the client_encoding of the connection; set that to UTF8"
        ) from None
    except psycopg.Error as error:
        if error.sqlstate == WRONG_STORE:
            raise InvalidParameterError(f"send: {one_line(error)}") from None
        if isinstance(error, _NO_STORE):  # the mailbox's own database has it: it was opened there
            raise InvalidParameterError(
                f"send: the connection is not to the database of the mailbox ({one_line(error)})"
            ) from None
        if isinstance(error, psycopg.errors.ReadOnlySqlTransaction):
            raise InvalidParameterError(
                f"send: the transaction of the connection may not write ({one_line(error)}); send in one that may"
            ) from None
        raise as_mailbox_error(error) from error


def _check_transaction(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> None:
    if connection.autocommit and connection.pgconn.transaction_status == TransactionStatus.IDLE:
        raise InvalidParameterError(
            "send: the connection is in autocommit and in no transaction, so there is nothing that the message could join;"
            " send inside of a transaction (psycopg: in the block of connection.transaction()), or without connection="
        )
