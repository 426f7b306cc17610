"""Connections of users, in whose transactions messages are sent and acknowledged.

Each driver has an adapter, which executes the mailbox's statements on a connection as it is, and changes no setting of it.
SQLAlchemy's and Django's objects lead to the driver's connection beneath them. A library is looked for among the modules that
the program has imported: of all drivers only psycopg is imported here.

Errors of all drivers become those of psycopg, by their SQLSTATEs (:func:`as_psycopg`), so that they are told of in one way.
"""

from __future__ import annotations

import re
import sys
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Protocol, TypeVar

import psycopg
from psycopg import RawCursor
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from mainspring.errors import InvalidParameterError, MailboxConnectionError, TransactionEndedError
from mainspring.mailbox.postgres.commands import execute
from mainspring.mailbox.postgres.connection import as_mailbox_error, told
from mainspring.mailbox.postgres.values import Packed, elements, literal, register
from mainspring.redaction import one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractAsyncContextManager, AbstractContextManager

    from mainspring.mailbox.postgres.commands import Statement

WRONG_STORE = "MS001"
_NO_STORE = (psycopg.errors.InvalidSchemaName, psycopg.errors.UndefinedFunction)
_KINDS = (
    "a psycopg AsyncConnection, an asyncpg Connection, or an AsyncConnection or AsyncSession of SQLAlchemy on one of them"
    " (postgresql+psycopg://, postgresql+asyncpg://)"
)
_THREAD_KINDS = (
    "a psycopg or psycopg2 connection, a Connection or Session of SQLAlchemy on one of them (postgresql+psycopg://,"
    " postgresql+psycopg2://), or Django's connection to PostgreSQL"
)


class UserConnection(Protocol):
    """A connection of async code.

    ``connection`` is the driver's object. ``status`` is that of its transaction, as far as the driver knows. ``begins``: the
    first statement begins a transaction.
    """

    connection: Any

    @property
    def closed(self) -> bool: ...

    @property
    def status(self) -> TransactionStatus: ...

    @property
    def begins(self) -> bool: ...

    async def execute(self, statement: Statement) -> list[tuple[Any, ...]]:
        """Execute a statement. Return its rows. Raise the errors of the driver."""
        ...

    async def is_failed(self) -> bool:
        """True if a COMMIT of the transaction under way would roll back, as a statement in it has failed."""
        ...

    def transaction(self) -> AbstractAsyncContextManager[Any]:
        """Return the transaction of the driver: begun on entering, then committed, or rolled back after an error."""
        ...

    def abandon(self) -> None:
        """Close it at once. The server rolls back when it sees that."""
        ...


class ThreadUserConnection(Protocol):
    """A connection of code that is not async. Only the thread of that code uses it."""

    connection: Any

    @property
    def closed(self) -> bool: ...

    @property
    def status(self) -> TransactionStatus: ...

    @property
    def begins(self) -> bool: ...

    def execute(self, statement: Statement) -> list[tuple[Any, ...]]:
        """Execute a statement. Return its rows. Raise the errors of the driver."""
        ...

    def transaction(self) -> AbstractContextManager[Any]:
        """Return the transaction of the driver: begun on entering, then committed, or rolled back after an error."""
        ...


C = TypeVar("C", bound="psycopg.AsyncConnection[Any] | psycopg.Connection[Any]")


class _Psycopg(Generic[C]):
    """What both kinds of psycopg's connections tell of themselves."""

    def __init__(self, connection: C) -> None:
        self.connection = connection

    @property
    def closed(self) -> bool:
        return self.connection.closed

    @property
    def status(self) -> TransactionStatus:
        return TransactionStatus(self.connection.pgconn.transaction_status)

    @property
    def begins(self) -> bool:
        return not self.connection.autocommit


class PsycopgConnection(_Psycopg["psycopg.AsyncConnection[Any]"]):
    """A psycopg ``AsyncConnection``."""

    async def execute(self, statement: Statement) -> list[tuple[Any, ...]]:
        return await execute(self.connection, statement)

    async def is_failed(self) -> bool:
        return self.status == TransactionStatus.INERROR

    def transaction(self) -> AbstractAsyncContextManager[Any]:
        return self.connection.transaction()

    def abandon(self) -> None:
        self.connection.pgconn.finish()


class AsyncpgConnection:
    """An asyncpg ``Connection``, which may be a pool's. It does not tell a failed transaction from another."""

    begins = False

    def __init__(self, connection: Any) -> None:
        self.connection = connection

    @property
    def closed(self) -> bool:
        try:
            return bool(self.connection.is_closed())
        except driver_errors():  # its pool has it again
            return True

    @property
    def status(self) -> TransactionStatus:
        if self.closed:
            return TransactionStatus.UNKNOWN
        return TransactionStatus.INTRANS if self.connection.is_in_transaction() else TransactionStatus.IDLE

    async def execute(self, statement: Statement) -> list[tuple[Any, ...]]:
        values = [elements(value) if isinstance(value, Packed) else value for value in statement.values]
        return [tuple(row) for row in await self.connection.fetch(statement.text.decode(), *values)]

    async def is_failed(self) -> bool:
        try:
            await self.connection.fetch("SELECT 1")
        except driver_errors() as error:
            if isinstance(as_psycopg(error), psycopg.errors.InFailedSqlTransaction):
                return True
            raise
        return False

    def transaction(self) -> AbstractAsyncContextManager[Any]:
        transaction: AbstractAsyncContextManager[Any] = self.connection.transaction()
        return transaction

    def abandon(self) -> None:
        if not self.closed:  # a cancelled statement may have closed it, and its pool then has it again
            self.connection.terminate()


class SqlalchemyTransaction:
    """The transaction that is under way on SQLAlchemy's ``AsyncSession`` or ``AsyncConnection``, and the driver beneath.

    It has been ended, for the mailbox, as soon as another one is under way.
    """

    begins = True

    def __init__(self, given: Any, driver: UserConnection) -> None:
        self.connection = driver.connection
        self._driver = driver
        self._given = given
        self._begun = self._under_way()

    def _under_way(self) -> Any:
        found = self._given.get_transaction()
        return None if found is None else found.sync_transaction

    @property
    def closed(self) -> bool:
        return self._driver.closed

    @property
    def status(self) -> TransactionStatus:
        return self._driver.status if self._under_way() is self._begun else TransactionStatus.IDLE

    async def execute(self, statement: Statement) -> list[tuple[Any, ...]]:
        return await self._driver.execute(statement)

    async def is_failed(self) -> bool:
        return await self._driver.is_failed()

    def transaction(self) -> AbstractAsyncContextManager[Any]:
        return self

    async def __aenter__(self) -> None:
        """Do nothing: it is under way."""

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        try:
            if kind is None:
                await self._given.commit()
        except Exception:
            with suppress(*driver_errors()):
                await self._given.rollback()
            raise
        if kind is not None:
            await (self._given.invalidate() if self.closed else self._given.rollback())

    def abandon(self) -> None:
        self._driver.abandon()


class PsycopgThreadConnection(_Psycopg["psycopg.Connection[Any]"]):
    """A psycopg ``Connection``."""

    def execute(self, statement: Statement) -> list[tuple[Any, ...]]:
        cursor = RawCursor(self.connection, row_factory=tuple_row)
        register(cursor.adapters)
        cursor.execute(statement.text, statement.values, binary=True)
        return cursor.fetchall()

    def transaction(self) -> AbstractContextManager[Any]:
        return self.connection.transaction()


class Psycopg2Connection:
    """A psycopg2 ``connection``, to which values go as quoted literals; the functions' parameters give them their types."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection

    @property
    def closed(self) -> bool:
        return bool(self.connection.closed)

    @property
    def status(self) -> TransactionStatus:
        return TransactionStatus(self.connection.info.transaction_status)

    @property
    def begins(self) -> bool:
        return not self.connection.autocommit

    def execute(self, statement: Statement) -> list[tuple[Any, ...]]:
        text = re.sub(r"\$\d+", "%s", statement.text.decode())  # they stand there in their order
        plain_cursor = sys.modules["psycopg2.extensions"].cursor
        with self.connection.cursor(cursor_factory=plain_cursor) as cursor:
            cursor.execute(text, [literal(value) for value in statement.values])
            rows: list[tuple[Any, ...]] = cursor.fetchall()
        return rows

    def transaction(self) -> AbstractContextManager[Any]:
        return _ended(self.connection)


class SqlalchemyThreadTransaction:
    """The transaction that is under way on SQLAlchemy's ``Session`` or ``Connection``, as :class:`SqlalchemyTransaction`."""

    begins = True

    def __init__(self, given: Any, driver: ThreadUserConnection) -> None:
        self.connection = driver.connection
        self._driver = driver
        self._given = given
        self._begun = given.get_transaction()

    @property
    def closed(self) -> bool:
        return self._driver.closed

    @property
    def status(self) -> TransactionStatus:
        return self._driver.status if self._given.get_transaction() is self._begun else TransactionStatus.IDLE

    def execute(self, statement: Statement) -> list[tuple[Any, ...]]:
        return self._driver.execute(statement)

    def transaction(self) -> AbstractContextManager[Any]:
        return _ended(self._given, lambda: self._given.invalidate() if self.closed else self._given.rollback())


class DjangoTransaction:
    """The outermost ``atomic()`` on Django's connection, and the driver beneath."""

    begins = True

    def __init__(self, given: Any, driver: ThreadUserConnection) -> None:
        self.connection = driver.connection
        self._driver = driver
        self._given = given

    @property
    def closed(self) -> bool:
        return self._driver.closed

    @property
    def status(self) -> TransactionStatus:
        return TransactionStatus.INERROR if self._given.needs_rollback else self._driver.status

    def execute(self, statement: Statement) -> list[tuple[Any, ...]]:
        return self._driver.execute(statement)

    def transaction(self) -> AbstractContextManager[Any]:
        atomic: AbstractContextManager[Any] = import_module("django.db.transaction").atomic(using=self._given.alias)
        return atomic


@contextmanager
def _ended(given: Any, roll_back: Callable[[], object] | None = None) -> Iterator[None]:
    """Commit what the block did on ``given``; roll it back after an error, also of the commit."""
    try:
        yield
    except BaseException:
        (roll_back or given.rollback)()
        raise
    try:
        given.commit()
    except Exception:
        with suppress(*driver_errors()):
            given.rollback()
        raise


# ------------------------------------------------------------------------------------------------------- which kind


def _classes(module: str, *names: str) -> tuple[type[Any], ...]:
    """Return classes of a module; none if the program has not imported it."""
    found = sys.modules.get(module)
    return tuple(getattr(found, name) for name in names if hasattr(found, name))


def _is_asyncpg(given: Any) -> bool:
    return isinstance(given, _classes("asyncpg", "Connection") + _classes("asyncpg.pool", "PoolConnectionProxy"))


def _is_async_sqlalchemy(given: Any) -> bool:
    names = ("AsyncConnection", "AsyncSession", "async_scoped_session")
    return isinstance(given, _classes("sqlalchemy.ext.asyncio", *names))


def is_async(given: Any) -> bool:
    """True if ``given`` is a connection, or a session, of async code."""
    return isinstance(given, psycopg.AsyncConnection) or _is_asyncpg(given) or _is_async_sqlalchemy(given)


async def user_connection(given: Any, what: str = "send") -> UserConnection:
    """Return the connection behind ``given``, on which a transaction is under way or begins with the first statement.

    Raise :class:`InvalidParameterError` if there is none, or if each statement on it commits by itself;
    :class:`MailboxConnectionError` if it is closed. ``what`` begins their text.
    """
    driver, sqlalchemy = given, None
    if _is_async_sqlalchemy(given):
        sqlalchemy = await _sqlalchemy_connection(given)
        driver = (await sqlalchemy.get_raw_connection()).driver_connection
    user = _user_connection(driver, given, what)
    if sqlalchemy is not None and not user.begins and user.status == TransactionStatus.IDLE:
        await sqlalchemy.exec_driver_sql("SELECT 1")  # with its first statement SQLAlchemy begins on asyncpg
    _check_transaction(user, what)
    return user


async def user_transaction(given: Any) -> UserConnection:
    """Return the connection behind ``given`` for a transaction that the mailbox ends.

    On SQLAlchemy's objects, a transaction that is under way is continued. On a driver's connection there must be none.
    """
    what = "transaction"
    if _is_async_sqlalchemy(given):
        if isinstance(given, _classes("sqlalchemy.ext.asyncio", "async_scoped_session")):
            given = given()
        _check_nesting(given)
        return SqlalchemyTransaction(given, await user_connection(given, what))
    user = _user_connection(given, given, what)
    _check_none_under_way(user)
    return user


def thread_user_connection(given: Any, what: str = "sync.send") -> ThreadUserConnection:
    """Return the same as :func:`user_connection` for a connection, or a session, that is not async."""
    user = _thread_user_connection(_thread_driver(given), given, what)
    _check_transaction(user, what)
    return user


def thread_user_transaction(given: Any) -> ThreadUserConnection:
    """Return the same as :func:`user_transaction` for a connection, or a session, that is not async."""
    what = "transaction"
    if isinstance(given, _classes("sqlalchemy.orm", "scoped_session")):
        given = given()
    if isinstance(given, _classes("sqlalchemy.orm", "Session") + _classes("sqlalchemy", "Connection")):
        _check_nesting(given)
        return SqlalchemyThreadTransaction(given, thread_user_connection(given, what))
    user = _thread_user_connection(_thread_driver(given), given, what)
    _check_none_under_way(user)
    if _is_django(given):
        return DjangoTransaction(given, user)
    if isinstance(user, Psycopg2Connection) and not user.begins:
        raise InvalidParameterError(f"{what}: the connection is in autocommit; set its autocommit to False")
    return user


def _check_nesting(session: Any) -> None:
    if session.in_nested_transaction():
        raise InvalidParameterError(
            f"transaction: {session!r:.200} is in a savepoint, and the block commits the whole; enter it outside of"
            " begin_nested()"
        )


def _check_none_under_way(user: UserConnection | ThreadUserConnection) -> None:
    _check_open(user, "transaction")
    if user.status != TransactionStatus.IDLE:
        raise InvalidParameterError(
            "transaction: a transaction is under way on the connection, and the block begins and commits one of its own; end"
            " the other before, or write what belongs to it into the block"
        )


def _user_connection(driver: Any, given: Any, what: str) -> UserConnection:
    if isinstance(driver, psycopg.AsyncConnection):
        return PsycopgConnection(driver)
    if _is_asyncpg(driver):
        return AsyncpgConnection(driver)
    plain = "mailbox.sync.send()" if what == "send" else "`with` in a plain `def` handler"
    advice = f"; connections that are not async are for {plain}"
    raise InvalidParameterError(f"{what}: connection must be {_KINDS}, not {given!r:.200}{advice}")


def _thread_user_connection(driver: Any, given: Any, what: str) -> ThreadUserConnection:
    if isinstance(driver, psycopg.Connection):
        return PsycopgThreadConnection(driver)
    if isinstance(driver, _classes("psycopg2.extensions", "connection")):
        return Psycopg2Connection(driver)
    raise InvalidParameterError(f"{what}: connection must be {_THREAD_KINDS}, not {given!r:.200}")


async def _sqlalchemy_connection(given: Any) -> Any:
    """Return the ``AsyncConnection`` of a session, or the given one, in a transaction."""
    if not isinstance(given, _classes("sqlalchemy.ext.asyncio", "AsyncConnection")):
        return await given.connection()  # which begins one
    if not given.in_transaction():
        await given.begin()
    return given


def _thread_driver(given: Any) -> Any:
    """Return the driver's connection behind SQLAlchemy's and Django's objects; another object as it is."""
    if isinstance(given, _classes("sqlalchemy.orm", "Session", "scoped_session")):
        given = given.connection()  # which begins a transaction
    if isinstance(given, _classes("sqlalchemy", "Connection")):
        if not given.in_transaction():
            given.begin()
        return given.connection.driver_connection
    if _is_django(given):
        given.ensure_connection()
        return given.connection
    return given


def _is_django(given: Any) -> bool:
    proxy = _classes("django.utils.connection", "ConnectionProxy")
    return isinstance(given, proxy + _classes("django.db.backends.base.base", "BaseDatabaseWrapper"))


def _check_open(user: UserConnection | ThreadUserConnection, what: str) -> None:
    if user.closed:
        raise MailboxConnectionError(
            f"{what}: the connection is closed, and what was not committed on it is rolled back; begin anew on another"
        )


def _check_transaction(user: UserConnection | ThreadUserConnection, what: str) -> None:
    _check_open(user, what)
    if user.begins or user.status != TransactionStatus.IDLE:
        return
    if what == "transaction":
        raise InvalidParameterError(
            f"{what}: the engine is in AUTOCOMMIT; use one whose isolation_level is READ COMMITTED"
        )
    raise InvalidParameterError(
        f"{what}: the connection is in autocommit and in no transaction, so there is nothing that the message could join;"
        " send inside of a transaction (psycopg and asyncpg: in the block of connection.transaction(); Django: of"
        " transaction.atomic()), or without connection="
    )


# ----------------------------------------------------------------------------------------------------------- errors


def driver_errors() -> tuple[type[BaseException], ...]:
    """Return the errors of what the program has imported of the drivers, SQLAlchemy and Django."""
    return (
        psycopg.Error,
        *_classes("asyncpg", "PostgresError", "InterfaceError"),
        *_classes("psycopg2", "Error"),
        *_classes("sqlalchemy.exc", "DBAPIError"),
        *_classes("django.db.utils", "Error"),
    )


def _failed_connects() -> tuple[type[BaseException], ...]:
    """Return the errors of asyncpg and SQLAlchemy for a connection that is lost, or not to be had in time."""
    return (OSError, *_classes("sqlalchemy.exc", "TimeoutError", "PendingRollbackError"))


def as_psycopg(error: BaseException) -> psycopg.Error:
    """Return an error of a driver, or of SQLAlchemy or Django around it, as that of psycopg with the same SQLSTATE."""
    if isinstance(error, psycopg.Error):
        return error
    within: BaseException | None = getattr(error, "orig", None) or error.__cause__
    if within is not None and (isinstance(within, driver_errors()) or _code(within)):
        return as_psycopg(within)
    # Of psycopg2 the whole text would quote the statement, with the values in it.
    text = one_line(getattr(getattr(error, "diag", None), "message_primary", None) or error)
    code = _code(error)
    if code is None:
        return psycopg.DataError(text) if isinstance(error, ValueError) else psycopg.OperationalError(text)
    try:
        return psycopg.errors.lookup(code)(text)
    except KeyError:
        made = psycopg.DatabaseError(text)
        made.sqlstate = code
        return made


def _code(error: BaseException) -> str | None:
    """Return the SQLSTATE of an error, which asyncpg and SQLAlchemy call so, and psycopg2 pgcode."""
    return getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)


@contextmanager
def translated_errors(what: str) -> Iterator[None]:
    """Let the errors of drivers out of the block as those of a mailbox; ``what`` begins their text."""
    try:
        yield
    except UnicodeEncodeError as error:
        raise InvalidParameterError(
            f"{what}: {error.object!r} cannot be said in the client_encoding of the connection; set that to UTF8"
        ) from None
    except _failed_connects() as error:
        raise MailboxConnectionError(f"{what}: PostgreSQL: {type(error).__name__}: {one_line(error)}") from error
    except driver_errors() as error:
        raise_translated(error, what)
    except _classes("sqlalchemy.exc", "SQLAlchemyError") as error:
        raise InvalidParameterError(f"{what}: SQLAlchemy gives no connection: {one_line(error)}") from error


def raise_translated(error: BaseException, what: str) -> NoReturn:
    """Raise what an error of a driver is to the user of a mailbox, on a connection of the user's."""
    plain = as_psycopg(error)
    if plain.sqlstate == WRONG_STORE:
        raise InvalidParameterError(f"{what}: {one_line(plain)}") from None
    if isinstance(plain, _NO_STORE):  # the mailbox's own database has it: it was opened there
        raise InvalidParameterError(
            f"{what}: the connection is not to the database of the mailbox ({told(plain)})"
        ) from None
    if isinstance(plain, psycopg.errors.ReadOnlySqlTransaction):
        raise InvalidParameterError(
            f"{what}: the transaction of the connection may not write ({told(plain)}); send in a transaction that may"
        ) from None
    if what == "transaction" and isinstance(plain, psycopg.errors.InFailedSqlTransaction):
        raise ended_inside() from error
    raise as_mailbox_error(plain) from error


def ended_inside() -> TransactionEndedError:
    """Return the error of a transaction of which a COMMIT would not commit what the block did."""
    return TransactionEndedError(
        "ctx.transaction(): its transaction was ended, or has failed, inside the block, so that nothing can commit"
        " together with the settlement; leave COMMIT and ROLLBACK to the block, and let errors of statements out of it"
    )
