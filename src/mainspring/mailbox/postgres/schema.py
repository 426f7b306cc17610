"""Make the tables and functions, which are kept in ``.sql`` files and versioned in the database, and maintain the tables.

All that runs on the server are calls of functions. They are made together with the tables they fit, so a process finds the
functions of the schema's version, whatever else is deployed. A connection pooler has no prepared statements to mix up.
"""

from __future__ import annotations

import re
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import anyio
import psycopg

from mainspring.core import random
from mainspring.core.package_files import read_package_file
from mainspring.errors import ConfigError, MainspringError
from mainspring.mailbox.backend import TRANSIENT, TRANSIENT_LIFE
from mainspring.mailbox.postgres.commands import Statement, call
from mainspring.mailbox.postgres.connection import ValueRefusedError, told, translated
from mainspring.mailbox.postgres.settings import SCHEMA
from mainspring.mailbox.postgres.values import Texts, array

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from psycopg import AsyncConnection

    from mainspring.mailbox.postgres.connection import ConnectionPool


_TABLES = ("0001_tables.sql", *[None] * 8, "0010_records.sql", "0011_tasks.sql", "0012_lists.sql")
"""What brings the tables from each version to the next: the first makes version 1. None: only functions are others.

A function that a version does without stays where it is: processes of an earlier Mainspring may still call it."""
_FUNCTIONS = (
    "sends.sql",
    "claims.sql",
    "settlements.sql",
    "records.sql",
    "lookup.sql",
    "limits.sql",
    "maintenance.sql",
)
SCHEMA_VERSION = len(_TABLES)


def sql_file(name: str, schema: str) -> str:
    """Return the text of a ``.sql`` file for ``schema``; the files are written for the schema ``mainspring``."""
    text = read_package_file("mainspring.mailbox.postgres", f"sql/{name}").decode()
    return re.sub(rf"\b{SCHEMA}\b", schema, text)


async def version_of(connection: AsyncConnection[Any], schema: str) -> int:
    """Return the version of the schema in that database; 0 if there is none."""
    # Not to_regclass(): what it remembers from before a lock was waited for is not looked up again.
    text = """SELECT 1 FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
        WHERE n.nspname = %s AND c.relname = 'store'"""
    if await (await connection.execute(text, (schema,))).fetchone() is None:
        return 0
    row = await (await connection.execute(f"SELECT version FROM {schema}.store".encode())).fetchone()  # noqa: S608 - a checked name
    return int(row[0]) if row is not None else 0


async def migrate(connection: AsyncConnection[Any], schema: str) -> tuple[int, int]:
    """Bring the schema to this version of Mainspring. Return its versions before and after.

    Safe while others do the same (one works, the others wait for it) and while mailboxes are in use. All or nothing.

    :param connection: in autocommit; its role must be allowed to create the schema, or own it.
    :raises ConfigError: the schema is of a newer Mainspring.
    """
    async with connection.transaction():
        # The caller's deadline ends the wait for others: a role's settings are meant for statements, and would end it sooner.
        await connection.execute("SET LOCAL lock_timeout = 0")
        await connection.execute("SET LOCAL statement_timeout = 0")
        await connection.execute("SELECT pg_advisory_xact_lock(hashtext(%s), 0)", (f"{schema} migrate",))
        before = await version_of(connection, schema)
        check_not_newer(before, schema)
        if before < SCHEMA_VERSION:
            if not await _has_schema(connection, schema):  # its owner may not IF NOT EXISTS
                await connection.execute(f"CREATE SCHEMA {schema}".encode())
            for name in filter(None, (*_TABLES[before:], *_FUNCTIONS)):
                await connection.execute(sql_file(name, schema).encode())
            text = f"""INSERT INTO {schema}.store VALUES (true, %s, %s)
                ON CONFLICT (one) DO UPDATE SET version = excluded.version"""  # noqa: S608 - a checked name
            await connection.execute(text.encode(), (SCHEMA_VERSION, random.token(96)))
    return before, SCHEMA_VERSION


async def _has_schema(connection: AsyncConnection[Any], schema: str) -> bool:
    text = "SELECT FROM pg_catalog.pg_namespace n WHERE n.nspname = %s"
    return await (await connection.execute(text, (schema,))).fetchone() is not None


async def prepare(
    pool: ConnectionPool, schema: str, may_migrate: bool, names: Iterable[str], deadline: float
) -> tuple[str, dict[str, int | ConfigError]]:
    """Make sure that the schema has this version and is usable. Return the store's identity and the numbers of mailboxes.

    A name that the database cannot keep has an error instead.
    """
    async with _connected(pool, schema, deadline) as connection:
        version = await version_of(connection, schema)
        check_not_newer(version, schema)
        if version < SCHEMA_VERSION:
            if not may_migrate:
                raise ConfigError(
                    f"the schema {schema!r} has version {version}, and this Mainspring needs {SCHEMA_VERSION}: run"
                    " `mainspring migrate URL` first (migrate=false)"
                )
            await migrate(connection, schema)
        await _check_settings(connection)
        store = await store_of(connection, schema)
        return store, await _numbers(connection, schema, sorted(names))


async def _numbers(connection: AsyncConnection[Any], schema: str, names: list[str]) -> dict[str, int | ConfigError]:
    """Return the number of the mailbox of each name, or the error of a name that the database cannot keep."""
    try:
        return dict(await call(connection, schema, "mailboxes_named", array(Texts, names)))
    except psycopg.DataError as error:
        if len(names) == 1:
            return {names[0]: ConfigError(f"the database cannot keep the name {names[0]!r}: {told(error)}")}
    found: dict[str, int | ConfigError] = {}
    for name in names:
        found |= await _numbers(connection, schema, [name])
    return found


async def migrate_at(pool: ConnectionPool, schema: str, dry_run: bool) -> tuple[int, int]:
    """Migrate over a connection of its own: see :func:`migrate`."""
    try:
        async with _connected(pool, schema) as connection:
            if not dry_run:
                return await migrate(connection, schema)
            version = await version_of(connection, schema)
            check_not_newer(version, schema)
            return version, SCHEMA_VERSION
    finally:
        await pool.close()


async def has_mailbox(pool: ConnectionPool, schema: str, name: str) -> bool:
    """True if the schema exists, in any version that is known, and has a mailbox of that name."""
    try:
        async with _connected(pool, schema) as connection:
            version = await version_of(connection, schema)
            check_not_newer(version, schema)
            if not version:
                return False
            text = f"SELECT FROM {schema}.mailboxes WHERE name = %s"
            return await (await connection.execute(text.encode(), (name,))).fetchone() is not None
    finally:
        await pool.close()


@asynccontextmanager
async def _connected(
    pool: ConnectionPool, schema: str, deadline: float | None = None
) -> AsyncIterator[AsyncConnection[Any]]:
    """Lend a connection for work on the schema, and translate its errors for a user.

    Work and connecting end by ``deadline`` (None: after the timeout). Nothing else cuts the work short.
    """
    if deadline is None:
        deadline = anyio.current_time() + pool.timeout
    async with pool.connection() as connection:
        try:
            with anyio.fail_after(deadline - pool.cancel_timeout - anyio.current_time(), shield=True):
                yield connection
        except TimeoutError:
            raise pool.no_answer() from None
        except psycopg.Error as error:
            known = translated(error)
            if isinstance(known, ValueRefusedError):
                known = ConfigError(f"the schema {schema!r} cannot be made: {told(error)}")
            raise known from error


async def _check_settings(connection: AsyncConnection[Any]) -> None:
    """Raise :class:`ConfigError` for a setting that a function cannot make for itself."""
    row = await (await connection.execute("SHOW default_transaction_isolation")).fetchone()
    if row is not None and row[0] != "read committed":
        raise ConfigError(
            f"default_transaction_isolation is {row[0]!r} for this role or database, and a mailbox needs 'read committed':"
            " ALTER ROLE … SET default_transaction_isolation = 'read committed'"
        )


async def store_of(connection: AsyncConnection[Any], schema: str) -> str:
    """Return the identity of the store: two connections that give the same lead to the same tables."""
    row = await (await connection.execute(f"SELECT id FROM {schema}.store".encode())).fetchone()  # noqa: S608 - a checked name
    return str(row[0]) if row is not None else ""


def check_not_newer(version: int, schema: str) -> None:
    """Raise :class:`ConfigError` if this Mainspring is too old for a schema of that version."""
    if version > SCHEMA_VERSION:
        raise ConfigError(
            f"the schema {schema!r} has version {version}, and this Mainspring knows up to {SCHEMA_VERSION}: it was migrated"
            " by a newer one; upgrade this program"
        )


EVERY = 1.0
STALE_EVERY = 3_600.0
FEWEST_DEAD = 10_000
DEAD_SHARE = 0.1
RECORDS_EVERY = 5.0
"""Seconds between two looks for records that have ended, unless more had than one look deletes."""
RECORDS_AT_ONCE = 10_000
FOLD_FROM = 200
"""Rows of a mailbox's tallies that are folded into one."""
VACUUM_TIMEOUT = 600.0
PAUSE = 10
"""A VACUUM is followed by this many times its own length without one, at least."""
UNYIELDING = 60.0
"""Seconds until the next try, at most, after a VACUUM that could not remove rows which an old transaction may still see."""


def worth_a_vacuum(dead: int, live: int) -> bool:
    """True if dead rows slow claims down by more than their removal costs, which grows with the live rows."""
    return dead >= FEWEST_DEAD + DEAD_SHARE * live


class Maintenance:
    """Keep the tables of one schema small: VACUUM, fold the tallies, delete records that have ended, drop transient mailboxes
    that are out of use.

    A queue makes more dead rows than any other table, and autovacuum runs once a minute, if it is on at all. So the processes
    of the mailboxes look every second themselves. A VACUUM blocks no other work, and is left out where another process runs
    one. Nothing depends on the success of all this: what fails is tried again.
    """

    def __init__(self, pool: ConnectionPool, schema: str) -> None:
        self._pool = pool
        self._schema = schema
        self._changes = 0
        self._turn = anyio.Semaphore(1)
        self._not_before = 0.0
        self._stale_at = 0.0
        self._records_at = 0.0
        self._in_vain = 0

    async def run(self) -> None:
        """Maintain until cancelled. Do nothing while the mailboxes of this process are idle."""
        while True:
            await anyio.sleep(EVERY)
            if self._pool.changes == self._changes:
                continue
            with suppress(MainspringError):  # the mailboxes' own calls will raise it
                await self._step()
            self._changes = self._pool.changes

    async def _step(self) -> None:
        now = anyio.current_time()
        for (box,) in await self._rows(
            f"SELECT mailbox FROM {self._schema}.tallies GROUP BY mailbox HAVING count(*) >= $1",  # noqa: S608
            FOLD_FROM,
        ):
            await self._rows(f"SELECT {self._schema}.fold_tallies($1)", box)
        if now >= self._stale_at:
            self._stale_at = now + STALE_EVERY
            await self._rows(f"SELECT {self._schema}.drop_stale($1, $2)", TRANSIENT, TRANSIENT_LIFE)
        if now >= self._records_at:
            ((ended,),) = await self._rows(f"SELECT {self._schema}.end_records($1)", RECORDS_AT_ONCE)
            self._records_at = now + (RECORDS_EVERY if ended < RECORDS_AT_ONCE else 0.0)
        if now < self._not_before:
            return
        tables = await self._dead_rows()
        if worth_a_vacuum(*tables.get("messages", (0, 0))):
            await self._vacuum(("messages", "tallies"))
        elif worth_a_vacuum(*tables.get("tallies", (0, 0))):
            await self._vacuum(("tallies",))
        for name in ("records", "key_rates", "freed_permits"):
            if worth_a_vacuum(*tables.get(name, (0, 0))):
                await self._vacuum((name,))

    async def _vacuum(self, tables: Iterable[str]) -> None:
        began = anyio.current_time()
        for table in tables:
            await self._rows(f"VACUUM (SKIP_LOCKED, INDEX_CLEANUP ON, TRUNCATE OFF) {self._schema}.{table}")
        ended = anyio.current_time()
        self._not_before = ended + PAUSE * (ended - began)
        left = await self._dead_rows()
        self._in_vain = self._in_vain + 1 if worth_a_vacuum(*left.get("messages", (0, 0))) else 0
        if self._in_vain:
            self._not_before = max(self._not_before, ended + min(2.0**self._in_vain, UNYIELDING))

    async def _dead_rows(self) -> dict[str, tuple[int, int]]:
        rows = await self._rows(
            "SELECT relname::text, n_dead_tup, n_live_tup FROM pg_stat_all_tables WHERE schemaname = $1", self._schema
        )
        return {name: (dead, live) for name, dead, live in rows}

    async def _rows(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        rows: list[tuple[Any, ...]] = []
        patient = self._pool.timeout if not statement.startswith("VACUUM") else VACUUM_TIMEOUT
        await self._pool.run([Statement(statement.encode(), values, rows.extend)], patient, self._turn)
        return rows
