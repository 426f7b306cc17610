"""Transactions of several calls: one a message joins, one its settlement joins, and a send within a limit."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
import psycopg
from psycopg.pq import TransactionStatus

from mainspring.errors import InvalidParameterError, MailboxConnectionError, MessageSettledError, TransactionEndedError
from mainspring.mailbox.limits import full
from mainspring.mailbox.postgres_arrays import texts
from mainspring.mailbox.postgres_calls import Call, Calls, ask, make
from mainspring.mailbox.postgres_connection import explained, faulty, one_line
from mainspring.mailbox.postgres_values import stored_key

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from mainspring.mailbox import postgres_commands as do
    from mainspring.mailbox.message import Message
    from mainspring.mailbox.postgres_hub import Hub

WRONG_STORE = "MS001"


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
            f" psycopg (postgresql+psycopg://), not {given!r}"
        )
    if connection.autocommit and connection.pgconn.transaction_status == TransactionStatus.IDLE:
        raise InvalidParameterError(
            "send: the connection is in autocommit and in no transaction, so there is nothing that the message could join;"
            " send inside `async with connection.transaction():`, or without connection="
        )
    return connection


async def put_into(connection: psycopg.AsyncConnection[Any], hub: Hub, store: str, batch: Calls, put: do.Put) -> None:
    """Store the messages of ``put`` in the transaction of ``connection``; they exist, and wake receivers, if it commits."""
    try:
        await ask(connection, hub.schema, "check_store", store)
        for each in batch.build([put]):
            each.finish(await make(connection, each))
        # Whether or not somebody waits by now: by the time of the commit somebody may.
        word = f"{batch.box} {batch.gained.get(batch.box, 0)}"
        await make(connection, Call("SELECT pg_notify($1, $2)", (hub.schema, word), _nothing))
    except psycopg.Error as error:
        if error.sqlstate == WRONG_STORE:
            raise InvalidParameterError(f"send: {one_line(error)}") from None
        told = explained(error)
        raise (faulty(error) if told is error else told) from error


async def put_within(hub: Hub, batch: Calls, put: do.Put, capacity: int) -> None:
    """Look whether there is room, and store, in one transaction, in which no other sender looks."""
    envelopes = put.envelopes
    keys = sorted({stored_key(e.dedup_key) for e in envelopes if e.dedup_key is not None})
    try:
        with anyio.fail_after(hub.pool.timeout, shield=True):
            async with hub.pool.connection() as connection, connection.transaction():
                waiting = (await ask(connection, hub.schema, "room", batch.box))[0][0]
                more = len(envelopes)
                if keys:
                    known = await ask(connection, hub.schema, "known_keys", batch.box, texts(keys))
                    more = sum(e.dedup_key is None for e in envelopes) + len(keys) - len(known)
                if more and waiting + more > capacity:
                    raise full(waiting, capacity, more)
                for each in batch.build([put]):
                    each.finish(await make(connection, each))
    except TimeoutError:
        raise MailboxConnectionError(f"PostgreSQL did not answer within {hub.pool.timeout:g} s") from None
    except psycopg.Error as error:
        told = explained(error)
        raise (faulty(error) if told is error else told) from error


class Joined:
    """A handler's transaction under way: settlements of its message go through its connection."""

    __slots__ = ("connection", "settled")

    def __init__(self, connection: psycopg.AsyncConnection[Any]) -> None:
        self.connection = connection
        self.settled = False

    async def settle(self, calls: Calls, command: do.OfDelivery) -> None:
        """Settle in the transaction; raises what the command says, and where the block has ended the transaction."""
        self.check(TransactionStatus.IDLE)
        for each in calls.build([command]):
            each.finish(await make(self.connection, each))
        if command.error is not None:
            raise command.error
        self.settled = True

    def check(self, *ended: TransactionStatus) -> None:
        """Raise :class:`TransactionEndedError` in one of these states, in which no COMMIT commits what the block did.

        The driver knows them without asking the server.
        """
        if self.connection.info.transaction_status in ended:
            raise TransactionEndedError(
                "ctx.transaction(): its transaction was ended, or has failed, inside the block, so that nothing can commit"
                " together with the settlement; leave COMMIT and ROLLBACK to the block, and let errors of statements out of it"
            )


@asynccontextmanager
async def joined(
    hub: Hub, message: Message[Any, Any], under_way: dict[str, Joined]
) -> AsyncIterator[psycopg.AsyncConnection[Any]]:
    """A connection in a transaction that ends with the block, and with which the message is settled.

    See :meth:`Mailbox.transaction`.
    """
    handle = message.receipt_handle
    if message.is_settled or handle in under_way:
        raise MessageSettledError(f"message {message.id}: it is already settled, or in a transaction")
    async with hub.transactions, hub.pool.connection() as connection:
        this = under_way[handle] = Joined(connection)
        settled = False
        try:
            async with connection.transaction():
                yield connection
                if not this.settled:
                    await message.acknowledge()
                this.check(TransactionStatus.IDLE, TransactionStatus.INERROR)
            settled = True
        except psycopg.Error as error:
            if not connection.closed:  # the handler's own affair
                raise
            raise MailboxConnectionError(f"the transaction was lost: {one_line(error)}") from error
        finally:
            del under_way[handle]
            connection.row_factory = psycopg.rows.tuple_row
            if not settled:
                message._settled = None  # noqa: SLF001 - if it was, then in what was rolled back


def _nothing(rows: list[tuple[Any, ...]]) -> None:
    """What to make of rows that say nothing."""
