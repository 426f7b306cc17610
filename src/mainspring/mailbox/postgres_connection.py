"""Connections to a PostgreSQL server: from a URL, opened and checked, used for a batch, dropped when there is trouble."""

from __future__ import annotations

import contextlib
import select
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
import psycopg
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from mainspring.errors import ConfigError, MailboxConnectionError, MailboxError, MainspringError
from mainspring.mailbox.postgres_arrays import register

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from mainspring.mailbox.postgres_calls import Call

CONNECT_TIMEOUT = 10.0
KEPT = 4
"""How many connections without work are kept open."""
TRIES = 4
"""How often a batch is tried that the server broke off because of another transaction (a deadlock)."""
_AGAIN = (psycopg.errors.DeadlockDetected, psycopg.errors.SerializationFailure)
_AWAY = (psycopg.OperationalError, psycopg.InterfaceError, psycopg.errors.ReadOnlySqlTransaction)
_MIGRATE = (
    psycopg.errors.UndefinedTable,
    psycopg.errors.UndefinedFunction,
    psycopg.errors.InvalidSchemaName,
    psycopg.errors.UndefinedColumn,
)


class Pool:
    """The connections of one process to one database, on one event loop. It has no tasks: whoever needs one opens it."""

    def __init__(self, conninfo: str, timeout: float) -> None:
        self.conninfo = conninfo
        self.timeout = timeout
        self.opened = 0
        self.batches = 0
        self._idle: list[psycopg.AsyncConnection[Any]] = []

    async def connect(self) -> psycopg.AsyncConnection[Any]:
        """A new connection, in autocommit. Raises :class:`MailboxConnectionError`."""
        try:
            with anyio.fail_after(CONNECT_TIMEOUT):
                # Nothing is prepared: behind a connection pooler the next transaction may meet another server process.
                connection = await psycopg.AsyncConnection.connect(
                    self.conninfo, autocommit=True, prepare_threshold=None
                )
        except TimeoutError:
            raise MailboxConnectionError(f"PostgreSQL did not answer within {CONNECT_TIMEOUT:g} s") from None
        except (psycopg.Error, OSError) as error:
            raise MailboxConnectionError(f"PostgreSQL cannot be reached: {one_line(error)}") from error
        register(connection.adapters)
        self.opened += 1
        return connection

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[psycopg.AsyncConnection[Any]]:
        """One for the block. An error out of the block drops it, and with a lost one all that idle: they are lost too."""
        connection = self._take() or await self.connect()
        try:
            yield connection
        except BaseException as error:
            await self.drop(connection)
            if isinstance(error, MailboxConnectionError):
                await self.close()
            raise
        if connection.closed or connection.pgconn.transaction_status != TransactionStatus.IDLE:
            await self.drop(connection)
        else:
            self._keep(connection)

    async def run(self, calls: Sequence[Call]) -> None:
        """Make the calls in one transaction and one round trip, and hand each its rows.

        Raises :class:`MailboxConnectionError` where the server cannot be reached or does not answer in time (then the calls
        may have taken effect), :class:`ConfigError` where it lacks the schema or a right, and ``psycopg.Error`` for what is
        the fault of a value. What it raises otherwise than by a lost connection has had no effect.
        """
        for again in range(TRIES):
            try:
                with anyio.fail_after(self.timeout):
                    async with self.connection() as connection:
                        try:
                            results = await send(connection, calls)
                        except psycopg.Error as error:
                            raise explained(error) from error
                break
            except TimeoutError:
                await self.close()
                raise MailboxConnectionError(f"PostgreSQL did not answer within {self.timeout:g} s") from None
            except _ConflictError as error:
                if again == TRIES - 1:
                    raise MailboxConnectionError(f"PostgreSQL gave up a transaction: {error}") from error
        self.batches += 1
        for call, rows in zip(calls, results, strict=True):
            call.finish(rows)

    async def run_alone(self, calls: Sequence[Call], timeout: float | None = None) -> None:
        """:meth:`run` for a caller who may be cancelled: then the server is told to leave off, and has done nothing."""
        async with self.connection() as connection:
            results: list[list[tuple[Any, ...]]] = []
            trouble: list[Exception] = []
            async with anyio.create_task_group() as tasks:
                patience = self.timeout if timeout is None else timeout
                tasks.start_soon(self._attempt, connection, calls, patience, results, trouble, tasks.cancel_scope)
                try:
                    await anyio.sleep_forever()
                finally:
                    if not (results or trouble):
                        with anyio.CancelScope(shield=True, deadline=anyio.current_time() + 5.0):
                            await self._leave_off(connection)
            if trouble:
                raise trouble[0]
        self.batches += 1
        for call, rows in zip(calls, results, strict=True):
            call.finish(rows)

    async def _attempt(
        self,
        connection: psycopg.AsyncConnection[Any],
        calls: Sequence[Call],
        patience: float,
        results: list[list[tuple[Any, ...]]],
        trouble: list[Exception],
        scope: anyio.CancelScope,
    ) -> None:
        """Out of reach of a cancellation: the driver would be cancelled again and again while it cleans up."""
        try:
            with anyio.fail_after(patience, shield=True):
                results += await send(connection, calls)
        except TimeoutError:
            trouble.append(MailboxConnectionError(f"PostgreSQL did not answer within {patience:g} s"))
        except psycopg.Error as error:
            told = explained(error)
            told.__cause__ = None if told is error else error
            trouble.append(told)
        scope.cancel()

    async def _leave_off(self, connection: psycopg.AsyncConnection[Any]) -> None:
        with contextlib.suppress(psycopg.Error, OSError):  # it is lost; nothing is done there any more
            await connection.cancel_safe(timeout=2.0)

    async def drop(self, connection: psycopg.AsyncConnection[Any]) -> None:
        """Close it, having told the server to leave off what it does for it."""
        with anyio.CancelScope(shield=True, deadline=anyio.current_time() + 5.0):
            if not connection.closed and connection.pgconn.transaction_status == TransactionStatus.ACTIVE:
                await self._leave_off(connection)
            await connection.close()

    async def close(self) -> None:
        """Close what idles."""
        idle, self._idle = self._idle, []
        for connection in idle:
            await self.drop(connection)

    def _take(self) -> psycopg.AsyncConnection[Any] | None:
        """One that idles and is alive: a server that ended has said so, which shows as something to read."""
        while self._idle:
            connection = self._idle.pop()
            if connection.closed:
                continue
            poll = select.poll()
            poll.register(connection.pgconn.socket, select.POLLIN)
            if not poll.poll(0):
                return connection
            connection.pgconn.finish()
        return None

    def _keep(self, connection: psycopg.AsyncConnection[Any]) -> None:
        if len(self._idle) < KEPT:
            self._idle.append(connection)
        else:
            connection.pgconn.finish()


class _ConflictError(MailboxError):
    """Another transaction was in the way; nothing was done."""


async def send(connection: psycopg.AsyncConnection[Any], calls: Sequence[Call]) -> list[list[tuple[Any, ...]]]:
    """Make the calls on a connection; the rows of each."""
    if len(calls) == 1:
        cursor = psycopg.AsyncRawCursor(connection, row_factory=tuple_row)
        await cursor.execute(calls[0].statement.encode(), calls[0].values, binary=True)
        return [await cursor.fetchall() if cursor.description is not None else []]
    cursors = []
    async with connection.pipeline():
        for call in calls:
            cursor = psycopg.AsyncRawCursor(connection, row_factory=tuple_row)
            await cursor.execute(call.statement.encode(), call.values, binary=True)
            cursors.append(cursor)
    return [await cursor.fetchall() for cursor in cursors]


def explained(error: psycopg.Error) -> Exception:
    """What an error of the driver is to the user of a mailbox; itself, where it is the fault of a value."""
    if isinstance(error, _AGAIN):
        return _ConflictError(one_line(error))
    if isinstance(error, _MIGRATE):
        return ConfigError(
            f"the database lacks what this Mainspring needs ({one_line(error)}); run `mainspring migrate URL`, or open with"
            " migrate=true"
        )
    if isinstance(error, psycopg.errors.InsufficientPrivilege):
        return ConfigError(f"the database refuses: {one_line(error)}; grant its role the right")
    if isinstance(error, _AWAY):
        return MailboxConnectionError(f"PostgreSQL: {one_line(error)}")
    return error


def faulty(error: psycopg.Error) -> MainspringError:
    """The error of a command whose values the server does not take."""
    return MailboxError(f"PostgreSQL refused the operation: {one_line(error)}")


def one_line(error: BaseException) -> str:
    """What the server or the driver said, as one line."""
    return " ".join(str(error).split()) or type(error).__name__
