"""What the mailboxes of one process on one database share, on one event loop: connections, opening, notifications, polls and
maintenance.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio

from mainspring.core import process
from mainspring.errors import ConfigError, MainspringError, copied
from mainspring.mailbox.postgres import schema as schemas
from mainspring.mailbox.postgres.commands import Statement, Watermark, call_text
from mainspring.mailbox.postgres.connection import ConnectionPool
from mainspring.mailbox.postgres.listener import Polls, PostgresListener
from mainspring.mailbox.postgres.schema import Maintenance
from mainspring.runtime.shared_task import SharedTask

if TYPE_CHECKING:
    from mainspring.errors import MailboxConnectionError
    from mainspring.mailbox.postgres.listener import OpenMailbox

KIND = "postgres shared pool"
MAX_SINGLE_CALLS = 10
"""Calls of a process that travel alone, such as a cancellation by id, in flight at once, those included that are held up."""
MAX_TRANSACTIONS = 10
"""Handlers of a process in a transaction of their own at once; each has a connection."""


class _JointOpening:
    """Mailboxes that are opened together, and what came of it: the store's identity and their numbers, or an error."""

    __slots__ = ("error", "is_over", "names", "opened")

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.opened: tuple[str, dict[str, int | ConfigError]] | None = None
        self.error: MainspringError | None = None
        self.is_over = False


class SharedPool:
    """See the module. Get one by :meth:`shared`; use it between :meth:`acquire` and :meth:`release`.

    ``task`` listens, polls and maintains the tables for all mailboxes of the pool: each joins it with its scope.
    """

    def __init__(self, conninfo: str, schema: str, timeout: float, silence: float, listens: bool) -> None:
        self.schema = schema
        self.connections = ConnectionPool(conninfo, timeout, silence, self._fell_silent)
        self.transactions = anyio.Semaphore(MAX_TRANSACTIONS)
        self.single_calls = anyio.Semaphore(MAX_SINGLE_CALLS, fast_acquire=True)
        self.polls = Polls(self.connections, schema)
        self.listener = PostgresListener(self.connections, schema, self.polls)
        self._openings: dict[bool, _JointOpening] = {}
        self._opening: anyio.Event | None = None  # set when the opening that is under way ends
        self._users = 0
        self._watermarks: dict[int, Watermark] = {}
        self._numbers: dict[str, int] = {}
        self.task = SharedTask(
            "mailboxes of a PostgreSQL database",
            self.polls.run,
            Maintenance(self.connections, schema).run,
            self.connections.watch,
            *([self.listener.run] if listens else []),
        )
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
        return await self._execute(call_text(self.schema, function, len(values)), values)

    async def query(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        """Execute a statement in no batch. Return its rows."""
        return await self._execute(statement.encode(), values)

    async def _execute(self, text: bytes, values: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        rows: list[tuple[Any, ...]] = []
        await self.connections.run([Statement(text, values, rows.extend)], turn=self.single_calls)
        return rows

    async def value(self, function: str, *values: Any) -> Any:
        """Call a function of the schema, in no batch. Return its one value."""
        return (await self.rows(function, *values))[0][0]

    # --------------------------------------------------------------------------------------------------------- opening

    async def prepare(self, name: str, may_migrate: bool) -> tuple[str, int, bool]:
        """Make sure that the schema is usable. Return the store's identity, the number of the mailbox of that name, and whether
        others open together with it.

        Of the callers that come while another one does so, the first does it for all of them. If it is cancelled or runs out
        of time, the next one does.
        """
        connections = self.connections
        together = self._openings.setdefault(may_migrate, _JointOpening())
        together.names.add(name)
        deadline = anyio.current_time() + connections.timeout
        try:
            with anyio.fail_after(connections.timeout):
                while not together.is_over:
                    if self._opening is not None:
                        await self._opening.wait()
                    else:
                        await self._open_together(together, may_migrate, deadline)
        except TimeoutError:
            raise connections.no_answer() from None
        if together.error is not None:
            raise copied(together.error)
        assert together.opened is not None
        store, numbers = together.opened
        number = numbers[name]
        if isinstance(number, ConfigError):
            raise copied(number)
        return store, number, len(numbers) > 1

    async def _open_together(self, together: _JointOpening, may_migrate: bool, deadline: float) -> None:
        if self._openings.get(may_migrate) is together:
            del self._openings[may_migrate]
        ended = self._opening = anyio.Event()
        try:
            together.opened = await schemas.prepare(
                self.connections, self.schema, may_migrate, together.names, deadline
            )
        except MainspringError as error:
            if anyio.current_time() >= deadline - self.connections.cancel_timeout:
                raise  # out of time
            together.error = error
        finally:
            together.is_over = together.opened is not None or together.error is not None
            self._opening = None
            ended.set()  # for all that wait at once: each may have little time left

    # --------------------------------------------------------------------------------------------------------- waiting

    def add_mailbox(self, name: str, number: int, mailbox: OpenMailbox) -> None:
        """Poll for it, and notify it of what is done to the mailbox with that name and number, from now on."""
        self._numbers[name] = number
        self.polls.add(mailbox)
        self.listener.add(number, mailbox)

    def remove_mailbox(self, number: int, mailbox: OpenMailbox) -> None:
        """Do so no more."""
        self.polls.remove(mailbox)
        if self.listener.remove(number, mailbox):
            self._watermarks.pop(number, None)

    def _fell_silent(self, error: MailboxConnectionError) -> None:
        self.listener.fail_claims(error)
