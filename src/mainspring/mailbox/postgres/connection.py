"""Connections to a PostgreSQL server: from a URL, opened and checked, used for a batch, dropped when there is trouble."""

from __future__ import annotations

import math
import os
import re
import select
import sys
from collections import deque
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from traceback import clear_frames
from typing import TYPE_CHECKING, Any

import anyio
import psycopg
from anyio import CapacityLimiter
from psycopg import capabilities, generators
from psycopg.adapt import PyFormat, Transformer
from psycopg.pq import ExecStatus, Format, TransactionStatus
from psycopg.rows import tuple_row
from psycopg.waiting import wait_async

from mainspring.core.clock import loop_clock
from mainspring.errors import ConfigError, MailboxConnectionError, MailboxError, MainspringError, remedy
from mainspring.mailbox.limits import COURTESY, SILENCE, dropped
from mainspring.mailbox.postgres.values import register
from mainspring.redaction import one_line
from mainspring.runtime.resolver import resolve

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Sequence

    from mainspring.mailbox.postgres.commands import Statement

CANCEL_TIMEOUT = 3.0
"""Seconds in which the server must answer a cancel request; a quarter of the timeout where that is less."""
WORKING = 2
"""Connections that the calls of a process use at once while none is held up, and idle ones that are kept open.

Further idle ones are closed once they were not used between two looks."""
MAX_BATCHES = 10
"""Batches of a process in flight at once, those included that are held up; further ones wait for their turn."""
BATCH_COUNTS = 1.0
"""Seconds for which a batch counts as one of :data:`WORKING`."""
CALL_COUNTS = 0.1
"""The same for what travels alone, which may wait for a lock for long."""
TRIES = 4
"""Tries of a batch that the server aborts because of another transaction (a deadlock)."""
WATCH = 0.2
"""The part of the ``silence`` between two looks at what is in flight."""
ANSWER = 0.4
"""The part of it that a server may take to answer a new connection."""
_AGAIN = (psycopg.errors.DeadlockDetected, psycopg.errors.SerializationFailure)
_CONNECTION = ("08", "25P03")
"""The beginnings of SQLSTATEs with which the connection is lost: it failed, or was idle in a transaction for too long."""
_ADVICE = {
    psycopg.errors.QueryCanceled: "; if that was the statement_timeout of its role, raise it",
    psycopg.errors.DiskFull: "; free space on the disk of the server",
}
DROPPED = "MS002"
"""The SQLSTATE with which the functions refuse to work on a mailbox that was dropped."""
_DONE = (ExecStatus.TUPLES_OK, ExecStatus.COMMAND_OK)
_ENDED = ("FATAL", "PANIC")
"""The severities with which the server ends a connection, for whatever reason."""
_MIGRATE = (
    psycopg.errors.UndefinedTable,
    psycopg.errors.UndefinedFunction,
    psycopg.errors.InvalidSchemaName,
    psycopg.errors.UndefinedColumn,
)
_LOGIN = "check the user, the password and the database of the URL"
_PARAMETERS = "correct the parameters of the URL"
_LASTING = (
    (r"bad value for|invalid .*(value|number)|could not match|unrecognized configuration parameter", _PARAMETERS),
    (r"does not support SSL|certificate|private key", "check the sslmode and the certificates that the URL names"),
    (
        r"authentication failed|no password|does not exist|no such (user|database)|pg_hba|not permitted|permission denied",
        _LOGIN,
    ),
)
"""What to do about a connection that fails for good, by the words of libpq, poolers and servers that speak English: the driver
keeps no code of a server's refusal."""
_TOO_MANY = "; raise the limits of connections, or connect through a pooler"
_CHECK_SERVER = "; check that a PostgreSQL server listens on that port"
_NO_POSTGRES = "invalid response to SSL|expected authentication request|closed the connection unexpectedly"
"""What libpq says where another kind of server answers, or hangs up."""
_QUESTION = re.compile(r";? *Is the server running [^?]*\?")
"""What libpq asks where it finds no server; the advice at the end of the error says it."""


class Connection(psycopg.AsyncConnection[Any]):
    """A connection on which a cancellation also cancels the query on the server, so that it has no effect later.

    The driver does so too, but in awaits that anyio cancels again and again. While the connection ``is_expendable``, a
    cancellation closes it instead, which takes no time.
    """

    is_expendable = False
    was_cancelled = False
    """True if the server has answered to the last cancellation."""
    cancel_timeout = CANCEL_TIMEOUT
    _transformer: Any = None

    async def execute_alone(self, statement: Statement) -> list[tuple[Any, ...]]:
        """Execute one statement. Return its rows. It does what a cursor does, which would cost more than the rest of a send."""
        if (transformer := self._transformer) is None:
            transformer = self._transformer = Transformer(self)
        values = transformer.dump_sequence(statement.values, [PyFormat.BINARY] * len(statement.values))
        self.pgconn.send_query_params(statement.text, values, transformer.types, transformer.formats, Format.BINARY)
        results = await self.wait(generators.execute(self.pgconn))
        result = results[-1]
        if result.status not in _DONE:
            raise psycopg.errors.error_from_result(result)
        try:
            transformer.set_pgresult(result)
            rows: list[tuple[Any, ...]] = transformer.load_rows(0, result.ntuples, tuple)
        finally:
            transformer.set_pgresult(None)  # which may be large
        return rows

    @classmethod
    async def _get_connection_params(cls, conninfo: str, **keywords: Any) -> dict[str, Any]:
        """Resolve the hosts here: the driver would do so in the event loop's default executor."""
        return await _with_addresses(dict(await super()._get_connection_params(conninfo, **keywords)))

    async def wait(self, gen: Any, interval: float = 0.1, *args: Any, **keywords: Any) -> Any:
        """Wait for an operation of the driver. The parameters are the driver's, whose versions differ in them."""
        interval = keywords.get("timeout") or interval  # it has nothing to look at in between
        try:
            return await wait_async(gen, self.pgconn.socket, interval, *args, **keywords)
        except anyio.get_cancelled_exc_class():
            self.was_cancelled = False
            if self.is_expendable:
                self.pgconn.finish()
            elif self.pgconn.transaction_status == TransactionStatus.ACTIVE:
                await self._cancel_query(gen)
            raise

    async def _cancel_query(self, gen: Any) -> None:
        """Cancel the query on the server. Close the connection if the server does not confirm it in time."""
        with anyio.CancelScope(shield=True, deadline=anyio.current_time() + self.cancel_timeout):
            try:
                if capabilities.has_cancel_safe():
                    await self.cancel_safe(timeout=self.cancel_timeout)
                else:  # which would be done in the event loop's default executor
                    await anyio.to_thread.run_sync(self.cancel, abandon_on_cancel=True, limiter=CapacityLimiter(1))
                await wait_async(gen, self.pgconn.socket, interval=0.1)
                self.was_cancelled = True
            except psycopg.errors.QueryCanceled:
                self.was_cancelled = True
            except (psycopg.Error, OSError):
                pass
        if not self.was_cancelled:
            self.pgconn.finish()


async def _with_addresses(parameters: dict[str, Any]) -> dict[str, Any]:
    """Return libpq's parameters with each host repeated for each of its addresses.

    Raise ``psycopg.OperationalError`` if no host has an address.
    """
    hosts, addresses, ports = (
        str(parameters.get(key) or os.environ.get(variable, ""))
        for key, variable in (("host", "PGHOST"), ("hostaddr", "PGHOSTADDR"), ("port", "PGPORT"))
    )
    names = hosts.split(",")
    numbers = ports.split(",") if "," in ports else [ports] * len(names)
    if not hosts or addresses or len(numbers) != len(names):
        return parameters
    found: list[tuple[str, str, str]] = []
    failed: OSError | None = None
    for name, port in zip(names, numbers, strict=True):
        try:
            resolved = [""] if not name or name.startswith(("/", "@")) else await resolve(name)
        except OSError as error:
            failed = error
            continue
        found += [(name, address, port) for address in resolved]
    if not found:
        raise psycopg.OperationalError(f"failed to resolve host {hosts!r}: {failed}") from failed
    if not any(address for _, address, _ in found):  # sockets in the file system
        return parameters
    keys = ("host", "hostaddr", "port") if ports else ("host", "hostaddr")
    return {**parameters, **{key: ",".join(each) for key, each in zip(keys, zip(*found, strict=True), strict=False)}}


def opens_at(most: int, counts_until: Iterable[float], now: float) -> float:
    """Return when a further call may use a connection if none ends before: ``now``, or later.

    :param counts_until: for each call under way, the instant from which on it does not count.
    """
    counting = [until for until in counts_until if until > now]
    return now if len(counting) < most else min(counting)


@dataclass(eq=False, slots=True)
class _PlaceInLine:
    """A call in line. ``counts_until`` is set when it may begin."""

    counts_for: float
    begins: anyio.Event = field(default_factory=anyio.Event)
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    counts_until: float | None = None


class ConnectionLimiter:
    """How many connections the calls of a process use at once: few, unless calls are held up.

    A call counts for the first seconds that it takes, as many as it says. A further call begins while fewer than ``most``
    count. A call that takes longer waits for something: for a lock that another transaction holds, or for a slow server. It
    goes on, but counts no more, so that it holds up no other call. So ``most`` connections do while all calls are quick, and
    each call that is held up has one more. Bounds on those are the callers' affair.

    Calls begin in the order in which they came. There is no task: the first call in line waits until one ends, or counts no
    more. Cancelled, a call has not begun, and the next one has its turn.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._now = loop_clock()
        self._counts_until: list[float] = []
        self._line: deque[_PlaceInLine] = deque()

    @asynccontextmanager
    async def turn(self, counts_for: float) -> AsyncIterator[float]:
        """Wait until a call may begin, and run it as the block. Yield the instant from which on it does not count."""
        if not self._line and len(self._counts_until) < self._most:
            counts_until = self._now() + counts_for
            self._counts_until.append(counts_until)
        else:
            counts_until = await self._wait(_PlaceInLine(counts_for))
        try:
            yield counts_until
        finally:
            self._counts_until.remove(counts_until)
            if self._line:
                self._begin_next()

    def counting(self, now: float) -> int:
        """Return how many calls under way count at that instant."""
        return sum(until > now for until in self._counts_until)

    async def _wait(self, place: _PlaceInLine) -> float:
        self._line.append(place)
        try:
            while place.counts_until is None:
                with anyio.CancelScope() as place.scope:
                    self._begin_next()
                    await place.begins.wait()
        except BaseException:
            if place.counts_until is None:
                self._line.remove(place)
            else:
                self._counts_until.remove(place.counts_until)
            self._begin_next()
            raise
        return place.counts_until

    def _begin_next(self) -> None:
        """Let calls begin that may. The first of the others looks again when a call counts no more."""
        now = self._now()
        while self._line:
            opens = opens_at(self._most, self._counts_until, now)
            if opens > now:
                self._line[0].scope.deadline = opens
                return
            place = self._line.popleft()
            place.counts_until = now + place.counts_for
            self._counts_until.append(place.counts_until)
            place.begins.set()


@dataclass(eq=False, slots=True)
class _InFlight:
    """A batch in flight, or waiting for a connection: since when, and what ends the wait for it."""

    scope: anyio.CancelScope
    since: float
    connection: Any = None
    lost: bool = False

    def give_up(self) -> None:
        self.lost = True
        if self.connection is not None:
            self.connection.is_expendable = True  # a server that is gone cannot be asked to cancel
        self.scope.cancel()


class ConnectionPool:
    """The connections of one process to one database, on one event loop. It has no tasks: a caller that needs one opens it.

    :param silence: see :meth:`watch`.
    :param on_silence: called with the error when the server is found not to answer.
    """

    def __init__(
        self,
        conninfo: str,
        timeout: float,
        silence: float = SILENCE,
        on_silence: Callable[[MailboxConnectionError], object] = lambda error: None,
    ) -> None:
        self.conninfo = conninfo
        self.timeout = timeout
        self.silence = silence
        self._on_silence = on_silence
        self._in_flight: set[_InFlight] = set()
        self.cancel_timeout = min(CANCEL_TIMEOUT, timeout / 4)
        self._turns = anyio.Semaphore(MAX_BATCHES, fast_acquire=True)
        self._limiter = ConnectionLimiter(WORKING)
        self.batches = 0
        self.changes = 0
        """Batches that may have changed something."""
        self.connected = False
        self.reconnects = 0
        self._lost = False  # a connection, which has not been made anew yet
        self._keeps = False
        self._was_connected = False
        self._now = loop_clock()
        self._idle: list[Connection] = []
        self._unused = 0  # how many of them were idle all the time since they were last looked at

    async def connect(self) -> Connection:
        """Open a connection, in autocommit.

        Raise :class:`MailboxConnectionError`, or :class:`ConfigError` for a refusal that would not pass, such as a wrong
        password. Once a connection was made, every refusal may pass: it may be a mistake of the server's operator.
        """
        try:
            with anyio.fail_after(self.timeout):
                # Nothing is prepared: behind a connection pooler the next transaction may meet another server process.
                connection = await Connection.connect(self.conninfo, autocommit=True, prepare_threshold=None)
        except TimeoutError:
            self.connected = False
            raise self.no_answer() from None
        except (psycopg.Error, OSError) as error:
            self.connected = False
            remedy = None if self._was_connected else _remedy(str(error))
            if remedy is not None:
                raise ConfigError(f"PostgreSQL refuses the connection: {one_line(error)}; {remedy}") from error
            raise _unreached(error) from error
        except BaseException as error:
            clear_frames(error.__traceback__)  # else what was half open stays so while the error is referenced
            raise
        connection.cancel_timeout = self.cancel_timeout
        register(connection.adapters, is_utf8=True)
        self.reconnects += self._lost
        self._lost = False
        self.connected = self._was_connected = True
        return connection

    def no_answer(self) -> MailboxConnectionError:
        """Return the error of an opening or a call that the server has not answered within the timeout."""
        return no_answer(self.timeout, "" if self._was_connected else _CHECK_SERVER)

    @asynccontextmanager
    async def connection(
        self, counts_for: float = CALL_COUNTS, begins_by: float = math.inf
    ) -> AsyncIterator[Connection]:
        """Lend an idle connection, or a new one, to the block, when it is its turn. Raise the errors of :meth:`connect`.

        An error that says nothing of the connection leaves it as it was, and any other one closes it. A lost connection closes
        all idle ones, which are lost as well.

        :param counts_for: seconds for which it is one of :data:`WORKING`, see :class:`ConnectionLimiter`.
        :param begins_by: raise :class:`GivenUpError` if its turn does not come before that instant.
        """
        async with self._limiter.turn(counts_for) as counts_until:
            if self._now() >= begins_by:
                raise GivenUpError("PostgreSQL: no connection was free in time")
            connection = await self._idle_or_new()
            try:
                yield connection
            except BaseException as error:
                is_lost = type(error) is MailboxConnectionError
                if is_lost or not isinstance(error, MainspringError):
                    await self.drop(connection)
                if is_lost:
                    await self.lose()
                raise
            finally:
                was_held_up = counts_for and counts_until <= self._now()
                is_whole = not connection.closed and connection.pgconn.transaction_status == TransactionStatus.IDLE
                if self._keeps and is_whole and not (was_held_up and self._is_spare()):
                    self._idle.append(connection)
                else:
                    await self.drop(connection)

    def _is_spare(self) -> bool:
        """True if calls have what they need without the connection of a call that was held up."""
        return len(self._idle) + self._limiter.counting(self._now()) >= WORKING

    async def _idle_or_new(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            self._unused = min(self._unused, len(self._idle))
            if connection.closed:
                continue
            poll = select.poll()
            poll.register(connection.pgconn.socket, select.POLLIN)
            if not poll.poll(0):
                return connection
            self._lost = True  # a connection that the server has ended has something to read
            connection.pgconn.finish()
        return await self.connect()

    async def run(
        self,
        statements: Sequence[Statement],
        timeout: float | None = None,
        turn: anyio.Semaphore | None = None,
        *,
        changes: bool = True,
    ) -> None:
        """Execute the statements in one transaction and one round trip, and give each its rows.

        Raise :class:`MailboxConnectionError` if the server cannot be reached or does not answer in time; then the statements
        may have taken effect. After any other error they have had none: :class:`GivenUpError` for a limit of the server's, as
        its statement_timeout, :class:`BlockedError` for its lock_timeout, :class:`ConfigError` for a missing schema or right,
        :class:`ValueRefusedError` for a value that the server does not take.
        Cancelled, or out of time, it cancels the query on the server.

        :param turn: held meanwhile, by what travels alone; None: it is a batch, and has one of :data:`MAX_BATCHES` turns. The
            wait for a turn is included in ``timeout``.
        :param changes: whether the statements may change something.
        """
        patience = self.timeout if timeout is None else timeout
        counts_for = BATCH_COUNTS if turn is None else CALL_COUNTS
        began = self._now()
        deadline = began + patience
        last = deadline - self.cancel_timeout  # a later query could not be cancelled in time
        for again in range(TRIES):
            scope = anyio.CancelScope(deadline=deadline)
            out = _InFlight(scope, began if not again else self._now())
            self._in_flight.add(out)
            try:
                with scope:
                    async with turn or self._turns, self.connection(counts_for, last) as connection:
                        scope.deadline = last
                        out.connection = connection
                        results = await execute(connection, statements)
            except _ConflictError as error:
                if again == TRIES - 1:
                    raise MailboxConnectionError(f"PostgreSQL gave up a transaction: {error}") from error
                continue
            finally:
                self._in_flight.discard(out)
            if scope.cancelled_caught:
                # The idle connections are lost if the server has not even answered to a cancellation on this one.
                if out.connection is None:
                    self.connected = False
                elif not out.connection.was_cancelled:
                    await self.lose()
                raise _silent() if out.lost else no_answer(patience)
            break
        self.batches += 1
        self.changes += changes
        self.connected = True
        for statement, rows in zip(statements, results, strict=True):
            if statement.finish is not None:
                statement.finish(rows)

    async def watch(self) -> None:
        """Give up batches in flight within ``silence`` seconds of the server's last answer, until cancelled.

        A batch may wait for long, for example for a lock. So once one has waited for a while, a new connection is tried: the
        server is gone if it does not answer there either. A dead connection to a living server is found by the kernel
        (``tcp_user_timeout``). The looks also close connections that are idle for long.
        """
        while True:
            await anyio.sleep(WATCH * self.silence)
            await self._close_unused()
            until = anyio.current_time() - WATCH * self.silence
            if any(out.since <= until for out in self._in_flight) and not await self.is_answering():
                for out in self._in_flight:
                    if out.since <= until:
                        out.give_up()

    async def is_answering(self) -> bool:
        """Return whether the server answers; if not, call ``on_silence``.

        It does not if a new connection is neither made nor refused within a part of the ``silence``.
        """
        answers = False
        with anyio.move_on_after(ANSWER * self.silence):
            try:
                await self.drop(await self.connect())
                answers = True
            except (MailboxConnectionError, ConfigError) as error:
                answers = not isinstance(error.__cause__, psycopg.errors.ConnectionTimeout)
        if not answers:
            self.connected = False
            self._on_silence(_silent())
        return answers

    async def drop(self, connection: Connection) -> None:
        """Close it, without waiting."""
        with anyio.CancelScope(shield=True):
            await connection.close()

    async def close(self) -> None:
        """Close idle connections now, and others when they are put back, until :meth:`keep_open`."""
        self._keeps = self._was_connected = self._lost = self.connected = False
        await self._drop_idle()

    def begin_close(self) -> None:
        """Give cancel requests at most :data:`COURTESY` seconds from now on, for what is in flight: a mailbox closes."""
        for out in self._in_flight:
            if out.connection is not None:
                out.connection.cancel_timeout = min(out.connection.cancel_timeout, COURTESY)

    def keep_open(self) -> None:
        """Keep connections that are put back, for the next call."""
        self._keeps = True

    async def lose(self) -> None:
        """Note that a connection was lost, and close the idle ones, which are lost as well."""
        self._lost, self.connected = True, False
        await self._drop_idle()

    async def _close_unused(self) -> None:
        too_many = min(self._unused, len(self._idle) - WORKING)
        for connection in self._idle[: max(0, too_many)]:  # those in front were idle for longest
            self._idle.remove(connection)
            await self.drop(connection)
        self._unused = len(self._idle)

    async def _drop_idle(self) -> None:
        idle, self._idle = self._idle, []
        for connection in idle:
            await self.drop(connection)


def no_answer(seconds: float, what: str = "") -> MailboxConnectionError:
    """Return the error of a call, or of ``what`` in it, that the server has not answered in time."""
    return MailboxConnectionError(f"PostgreSQL did not answer within {seconds:g} s{what}")


def _silent() -> MailboxConnectionError:
    return MailboxConnectionError(
        "PostgreSQL does not answer, and takes no new connection: the connection to it was given up"
    )


class ValueRefusedError(MailboxError):
    """The server does not take a value; nothing was done."""


class GivenUpError(MailboxConnectionError):
    """The server gave a statement up, and goes on with the connection; nothing was done."""


class _ConflictError(GivenUpError):
    """Another transaction was in the way."""


class BlockedError(GivenUpError):
    """Another transaction was in the way for longer than the lock_timeout."""


def _remedy(text: str) -> str | None:
    """Return the advice for an error that would not pass, by its text; None if a later try may succeed."""
    return next((remedy for pattern, remedy in _LASTING if re.search(pattern, text)), None)


def _unreached(error: Exception) -> MailboxConnectionError:
    """Return the error of a connection that could not be made: what failed, and what to do about it."""
    failed: BaseException = error.__cause__ if isinstance(error.__cause__, OSError) else error
    said = _QUESTION.sub(";", one_line(error)).rstrip(";.")
    if re.search("Connection refused|No such file", said):  # of libpq there is only the text
        failed = ConnectionRefusedError()
    advice = _TOO_MANY if re.search("too many|connection slots", said) else remedy(failed)
    if re.search(_NO_POSTGRES, said):
        advice = _CHECK_SERVER
    return MailboxConnectionError(f"PostgreSQL cannot be reached: {said}{advice}")


async def execute(connection: Connection, statements: Sequence[Statement]) -> list[list[tuple[Any, ...]]]:
    """Execute statements in one transaction. Return the rows of each; raise errors as :func:`translated` gives them."""
    try:
        if len(statements) != 1:
            return await _execute_in_pipeline(connection, statements)
        return [await connection.execute_alone(statements[0])]
    except psycopg.Error as error:
        raise translated(error) from error


async def _execute_in_pipeline(
    connection: psycopg.AsyncConnection[Any], statements: Sequence[Statement]
) -> list[list[tuple[Any, ...]]]:
    cursors = []
    handled = sys.exc_info()[1]
    try:
        async with connection.pipeline():
            for statement in statements:
                cursor = psycopg.AsyncRawCursor(connection, row_factory=tuple_row)
                await cursor.execute(statement.text, statement.values, binary=True)
                cursors.append(cursor)
    except psycopg.OperationalError as error:
        refusal = error.__context__ if error.__context__ is not handled else None
        if error.sqlstate is None and isinstance(refusal, psycopg.Error) and refusal.sqlstate is not None:
            # The server's error came before the rest of its answer, and the driver could not leave the pipeline: that says
            # nothing about the statements, and the error all.
            connection.pgconn.finish()
            raise refusal from None
        raise
    rows = []
    for cursor in cursors:
        rows.append(await cursor.fetchall())
    return rows


def translated(error: psycopg.Error) -> MainspringError:
    """Return what an error of the driver is to the user of a mailbox."""
    what = told(error)
    if error.sqlstate == DROPPED:
        return dropped("the mailbox")
    if _is_lost(error):
        return MailboxConnectionError(f"PostgreSQL: {what}")
    if isinstance(error, psycopg.errors.ReadOnlySqlTransaction):
        # It counts as a lost connection: a new one may lead to the server that may write.
        return MailboxConnectionError(f"PostgreSQL: {what}; let the URL lead to a server and a role that may write")
    if isinstance(error, psycopg.errors.LockNotAvailable):
        return BlockedError(f"PostgreSQL: {what}; end the transaction that holds the lock")
    if isinstance(error, _AGAIN):
        return _ConflictError(what)
    if isinstance(error, _MIGRATE):
        return ConfigError(
            f"the database lacks what this Mainspring needs ({what}); run `mainspring migrate URL`, or open with migrate=true"
        )
    if isinstance(error, psycopg.errors.InsufficientPrivilege):
        return ConfigError(f"the database refuses: {what}; grant its role the right")
    # Of these one is an OperationalError for the driver, though a value is too large for something, and will stay so.
    if isinstance(error, psycopg.OperationalError) and not isinstance(error, psycopg.errors.ProgramLimitExceeded):
        advice = next((advice for kind, advice in _ADVICE.items() if isinstance(error, kind)), "")
        return GivenUpError(f"PostgreSQL: {what}{advice}")
    return ValueRefusedError(f"PostgreSQL refused the operation: {what}")


def _is_lost(error: psycopg.Error) -> bool:
    if error.sqlstate is None:  # of the driver
        return isinstance(error, (psycopg.OperationalError, psycopg.InterfaceError))
    return error.sqlstate.startswith(_CONNECTION) or error.diag.severity_nonlocalized in _ENDED


def told(error: psycopg.Error) -> str:
    """Return what the server says, without the places in its functions."""
    said = error.diag
    return one_line("\n".join(filter(None, (said.message_primary, said.message_detail, said.message_hint))) or error)


def as_mailbox_error(error: psycopg.Error) -> MainspringError:
    """Return the same for a call that is not retried here."""
    known = translated(error)
    return (
        MailboxConnectionError(f"PostgreSQL gave up the transaction: {known}")
        if type(known) is _ConflictError
        else known
    )
