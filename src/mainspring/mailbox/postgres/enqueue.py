"""Messages that join the transaction of their sender, on the sender's own connection, async or not."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import RawCursor
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from mainspring.errors import InvalidParameterError
from mainspring.mailbox.postgres.arrays import register
from mainspring.mailbox.postgres.calls import Call, Calls, call, make
from mainspring.mailbox.postgres.connection import told
from mainspring.mailbox.postgres.dedup import not_ended
from mainspring.redaction import one_line

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mainspring.mailbox.postgres import commands as do

WRONG_STORE = "MS001"
_NO_STORE = (psycopg.errors.InvalidSchemaName, psycopg.errors.UndefinedFunction)


def is_async(given: Any) -> bool:
    """Whether what a user gives is a connection, or a session, of async code."""
    return isinstance(given, psycopg.AsyncConnection) or hasattr(given, "sync_session") or hasattr(given, "sync_engine")


async def driver_connection(given: Any) -> psycopg.AsyncConnection[Any]:
    """The psycopg connection behind what a user gives: itself, or SQLAlchemy's connection or session, in a transaction.

    Raises :class:`InvalidParameterError` for what is none, and for one on which every statement commits by itself.
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
    """The same for a connection, or a session, that is not async."""
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


def steps_into(schema: str, store: str, batch: Calls, put: do.Put) -> Iterator[Call]:
    """The calls that store the messages of ``put`` in somebody's transaction; each is made, and finished, before the next.

    The messages exist, and wake receivers, if that commits. Raises :class:`MailboxConnectionError` where another open
    transaction has sent its key, and does not end in time: the transaction is then as it was, and can go on.
    """
    yield call(schema, "check_store", (store,), _nothing)
    for each in batch.build([put]):
        yield each
        if put.held_up:
            raise not_ended(put.envelopes, f"within {batch.patience:g} s, or by the connection's own lock_timeout")
    # Whether or not somebody waits by now: by the time of the commit somebody may.
    word = f"{batch.box} {batch.gained.get(batch.box, 0)}"
    yield Call("SELECT pg_notify($1, $2)", (schema, word), _nothing)


async def put_into(connection: psycopg.AsyncConnection[Any], steps: Iterator[Call]) -> None:
    """Make the calls in the transaction of ``connection``."""
    with _told():
        for each in steps:
            each.finish(await make(connection, each))


def put_by_thread(given: Any, steps: Iterator[Call], put: do.Put) -> list[str]:
    """Make the calls in the transaction of the calling thread's connection; the ids."""
    connection = thread_connection(given)
    with _told():
        for each in steps:
            cursor = RawCursor(connection, row_factory=tuple_row)
            register(cursor.adapters)
            cursor.execute(each.statement.encode(), each.values, binary=True)
            each.finish(cursor.fetchall())
    return list(put.result)


@contextmanager
def _told() -> Iterator[None]:
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
        raise told(error) from error


def _check_transaction(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> None:
    if connection.autocommit and connection.pgconn.transaction_status == TransactionStatus.IDLE:
        raise InvalidParameterError(
            "send: the connection is in autocommit and in no transaction, so there is nothing that the message could join;"
            " send inside of a transaction (psycopg: in the block of connection.transaction()), or without connection="
        )


def _nothing(rows: list[tuple[Any, ...]]) -> None:
    """What to make of rows that say nothing."""
