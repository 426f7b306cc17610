"""What the mailboxes of one process on one database share, on one event loop: connections, notifications, maintenance.

Notifications come on a connection of their own. One mailbox's task holds it for all; when that mailbox closes, the next
takes over. Behind a connection pooler in transaction mode notifications do not arrive. A probe finds that out, and then
waiting receives poll more often.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import anyio
import psycopg

from mainspring.core import process, random
from mainspring.errors import MailboxConnectionError, MailboxError
from mainspring.mailbox.postgres.commands import Statement, call_text
from mainspring.mailbox.postgres.connection import ConnectionPool
from mainspring.mailbox.postgres.schema import Maintenance
from mainspring.redaction import one_line
from mainspring.runtime.retry import Retries

if TYPE_CHECKING:
    from mainspring.mailbox.backend import Notifications
    from mainspring.mailbox.batched import Waiters

RESET_AFTER = 1.0
"""Seconds after which a claim starts from the very front again. A message that a long transaction or another process puts
behind the floors waits at most this long."""
SWEEP = 1_000
"""Messages that are due and that the server moves in one claim, at most."""


class Watermark:
    """The floors of one mailbox: for each rank the place before which this process has claimed everything.

    A message can come to lie behind a floor: another process released it, or the transaction that sent it took longer than
    those after it. Claims that find too little look there anyway, and every :data:`RESET_AFTER` seconds one does so first.
    """

    __slots__ = ("_floors", "_full_at", "_swept_at")

    def __init__(self) -> None:
        self._floors: dict[int, int] = {}
        self._swept_at: float | None = None
        self._full_at = float("-inf")

    def start(self, now: float) -> tuple[list[int], list[int], float | None]:
        """Return, for a claim at ``now`` (anyio's clock), ranks, their floors, and the server's instant before
        which nothing is due."""
        if now - self._full_at >= RESET_AFTER:
            self._full_at = now
            self._floors.clear()
            return [], [], None
        return list(self._floors), list(self._floors.values()), self._swept_at

    def swept(self, at: float, moved: int) -> None:
        """Note that all due by ``at`` (the server's clock) has been done, except what was committed late.

        Where as many were ``moved`` as one sweep may, the next one goes on just there: it shall not read again what this one
        has moved.
        """
        self._swept_at = at if moved >= SWEEP else at - RESET_AFTER

    def claimed(self, rank: int, pos: int) -> None:
        """Note that a claim got to that place."""
        if pos > self._floors.get(rank, 0):
            self._floors[rank] = pos

    def returned(self, rank: int, pos: int) -> None:
        """Note that a message is at that place again."""
        if pos < self._floors.get(rank, 0):
            self._floors[rank] = pos


KIND = "postgres shared pool"
PROBE_TIMEOUT = 2.0
"""Seconds in which a notification to oneself must arrive."""
PROBE_AGAIN = 60.0
"""Seconds until it is tried again whether notifications arrive."""
PROCESSES_ASKED = 3
"""Tries to catch a pooler at giving one server process to two connections."""
QUIET = 0.25
"""The part of the ``silence`` without a notification after which the listening connection is asked whether it is alive."""
ANSWER = 0.25
"""The part of it that the answer may take."""
REMEMBERED = 1_000
"""Ids of cancelled messages that are remembered, so that each is announced once."""
MAX_SINGLE_CALLS = 10
"""Calls of a process that travel alone, such as a cancellation by id, in flight at once; each has a connection."""
MAX_TRANSACTIONS = 10
"""Handlers of a process in a transaction of their own at once; each has a connection."""


class OpenMailbox(Protocol):
    """What a shared pool has of each of its open mailboxes."""

    notifications: Notifications
    waiters: Waiters

    def sweep_in(self, seconds: float) -> None:
        """Let waiting receives ask the store in ``seconds``, when something may be due."""

    def fail_claims(self, error: MailboxConnectionError) -> None:
        """Fail the receives that wait, as the server does not answer. They need not find out by a call of their own."""


class SharedPool:
    """See the module. Get one by :meth:`shared`; use it between :meth:`acquire` and :meth:`release`."""

    def __init__(self, conninfo: str, schema: str, timeout: float, silence: float, listens: bool) -> None:
        self.schema = schema
        self.connections = ConnectionPool(conninfo, timeout, silence, self._fell_silent)
        self.listening = False
        self.transactions = anyio.Semaphore(MAX_TRANSACTIONS)
        self._single_calls = anyio.Semaphore(MAX_SINGLE_CALLS)
        self._listens = listens
        self._users = 0
        self._mailboxes: dict[int, list[OpenMailbox]] = {}
        self._watermarks: dict[int, Watermark] = {}
        self._announced: dict[str, None] = {}
        self._numbers: dict[str, int] = {}
        self._host = anyio.Lock()
        self._maintenance = Maintenance(self.connections, schema)
        self._loop = process.event_loop()  # kept alive, so that no other event loop has the same identity

    @classmethod
    def shared(cls, conninfo: str, schema: str, timeout: float, silence: float, listens: bool) -> SharedPool:
        """Return the pool of the running event loop for that database, schema and settings."""
        key = f"{id(process.event_loop())} {conninfo} {schema} {timeout} {silence} {listens}"
        return process.shared(KIND, key, lambda: cls(conninfo, schema, timeout, silence, listens))

    def acquire(self) -> None:
        """Use it; to be undone by :meth:`release`."""
        self._users += 1
        self.connections.keep_open()

    async def release(self) -> None:
        """Use it no longer; the last one closes the connections."""
        self._users -= 1
        if not self._users:
            await self.connections.close()

    def watermark(self, number: int) -> Watermark:
        """Return what this process knows of that mailbox's queue."""
        return self._watermarks.setdefault(number, Watermark())

    async def number(self, name: str, *, make: bool = True) -> int | None:
        """Return the number of the mailbox of that name. If there is none, make it; return None with ``make=False``."""
        known = self._numbers.get(name)
        if known is not None:
            return known
        if make:
            found = int(await self.value("mailbox", name))
            self._numbers[name] = found
            return found
        rows = await self.query(f"SELECT id FROM {self.schema}.mailboxes WHERE name = $1", name)  # noqa: S608 - a checked name
        return rows[0][0] if rows else None  # not remembered, as another process may drop it

    def forget(self, name: str) -> None:
        """Forget the number of the mailbox of that name: it was dropped."""
        self._numbers.pop(name, None)

    def forget_number(self, number: int | None) -> None:
        """Forget the name of a mailbox that was dropped, by its number."""
        self._numbers = {name: known for name, known in self._numbers.items() if known != number}

    async def rows(self, function: str, *values: Any) -> list[tuple[Any, ...]]:
        """Call a function of the schema, in no batch. Return its rows."""
        try:
            return await self._execute(call_text(self.schema, function, len(values)), values)
        except psycopg.Error as error:
            raise MailboxError(f"PostgreSQL refused {function}: {one_line(error)}") from error

    async def query(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        """Execute a statement in no batch. Return its rows."""
        return await self._execute(statement.encode(), values)

    async def _execute(self, text: bytes, values: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        rows: list[tuple[Any, ...]] = []
        await self.connections.run([Statement(text, values, rows.extend)], turn=self._single_calls)
        return rows

    async def value(self, function: str, *values: Any) -> Any:
        """Call a function of the schema, in no batch. Return its one value."""
        return (await self.rows(function, *values))[0][0]

    # --------------------------------------------------------------------------------------------------------- waiting

    def add_mailbox(self, name: str, number: int, mailbox: OpenMailbox) -> None:
        """Notify it, from now on, of what is done to the mailbox with that name and number."""
        self._numbers[name] = number
        self._mailboxes.setdefault(number, []).append(mailbox)

    def remove_mailbox(self, number: int, mailbox: OpenMailbox) -> None:
        """Notify it no more."""
        mailboxes = self._mailboxes[number]
        mailboxes.remove(mailbox)
        if not mailboxes:  # transient mailboxes come and go, each with a number of its own
            del self._mailboxes[number]
            self._watermarks.pop(number, None)

    def wake(self, number: int, count: int) -> None:
        """Wake waiting receives, as ``count`` messages became pending in that mailbox."""
        for mailbox in self._mailboxes.get(number, ()):
            mailbox.waiters.signal(count)

    def sweep_in(self, number: int, seconds: float) -> None:
        """Let the receives of that mailbox ask the store in ``seconds``, when something will be due."""
        for mailbox in self._mailboxes.get(number, ()):
            mailbox.sweep_in(seconds)

    def announce(self, number: int, message_ids: list[str]) -> None:
        """Announce that messages of that mailbox were cancelled."""
        new = [message_id for message_id in message_ids if message_id not in self._announced]
        if not new:
            return  # a notification of this process's own cancellation comes back here, before or after its result
        self._announced.update(dict.fromkeys(new))
        while len(self._announced) > REMEMBERED:
            del self._announced[next(iter(self._announced))]
        for mailbox in self._mailboxes.get(number, ()):
            mailbox.notifications.cancelled.publish(new)

    # ------------------------------------------------------------------------------------------------------- listening

    async def host(self) -> None:
        """Listen, and maintain the tables, for all mailboxes of the pool, once no other task does; until cancelled."""
        async with self._host:
            try:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._maintenance.run)
                    tasks.start_soon(self.connections.watch)
                    if self._listens:
                        tasks.start_soon(self._keep_listening)
            finally:
                self.listening = False

    async def _keep_listening(self) -> None:
        retries = Retries(initial=0.1, maximum=10.0)
        while True:
            try:
                await self._listen()
                retries.succeeded()
                pause = PROBE_AGAIN
            except (MailboxError, psycopg.Error, OSError, TimeoutError) as error:
                if self.listening:
                    retries.succeeded()
                    await self.connections.lose()
                    if isinstance(error, TimeoutError):
                        await self.connections.is_answering()
                pause = retries.failed()
            self.listening = False
            self._poll_all()
            await anyio.sleep(pause)

    async def _listen(self) -> None:
        """Pass notifications on until the connection is lost, which raises. Return if they do not arrive."""
        connection = await self.connections.connect()
        connection.is_expendable = True  # closing the last mailbox does not wait for a server that stands still
        try:
            with anyio.fail_after(self.connections.timeout):
                if await self._is_shared(connection):
                    return
                await connection.execute(f"LISTEN {self.schema}".encode())
            if not await self._arrives(connection):
                with anyio.fail_after(self.connections.cancel_timeout, shield=True):
                    await connection.execute(f"UNLISTEN {self.schema}".encode())
                return
            self.listening = True
            self._poll_all()  # for what came before
            while True:
                async for notification in connection.notifies(timeout=QUIET * self.connections.silence):
                    self._notified(notification.payload)
                with anyio.fail_after(min(self.connections.timeout, ANSWER * self.connections.silence)):
                    await connection.execute(b"SELECT 1")
        finally:
            await self.connections.drop(connection)

    async def _is_shared(self, connection: psycopg.AsyncConnection[Any]) -> bool:
        """True if a pooler lends the server process of this connection to others between transactions.

        This is asked before LISTEN, which would stay with that process and send notifications to other clients. It leaves
        nothing behind. If it cannot tell, the probe will.
        """
        mine = {await _process_of(connection)}
        if connection.pgconn.backend_pid in mine:
            return False  # no pooler: those give numbers of their own
        for _ in range(PROCESSES_ASKED):
            async with self.connections.connection() as other:
                if await _process_of(other) in mine:
                    return True
            mine |= {
                await _process_of(connection),
                await _process_of(connection),
            }  # twice, for poolers that give them in turn
            if len(mine) > 1:
                return True
        return False

    async def _arrives(self, connection: psycopg.AsyncConnection[Any]) -> bool:
        """True if a notification that is sent over another connection arrives on this one."""
        word = f"0 probe {random.token()}"
        await self.connections.run([Statement(b"SELECT pg_notify($1, $2)", (self.schema, word))])
        async for notification in connection.notifies(timeout=PROBE_TIMEOUT):
            if notification.payload == word:
                return True
            self._notified(notification.payload)
        return False

    def _notified(self, payload: str) -> None:
        number, _, rest = payload.partition(" ")
        if not number.isdigit():
            return
        kind, _, message_id = rest.partition(" ")
        if kind == "cancelled":
            self.announce(int(number), [message_id])
        elif kind.isdigit():
            if kind == "0":  # a message was sent with a delay
                self.sweep_in(int(number), 0.0)
            else:
                self.wake(int(number), int(kind))

    def _fell_silent(self, error: MailboxConnectionError) -> None:
        for mailboxes in self._mailboxes.values():
            for mailbox in mailboxes:
                mailbox.fail_claims(error)

    def _poll_all(self) -> None:
        for number in self._mailboxes:
            self.sweep_in(number, 0.0)


async def _process_of(connection: psycopg.AsyncConnection[Any]) -> int:
    """Return the id of the server process that has just served the connection."""
    row = await (await connection.execute("SELECT pg_backend_pid()")).fetchone()
    assert row is not None
    return int(row[0])
