"""What keeps the tables small: VACUUM when enough rows are dead, one row of tallies a mailbox, no forgotten transient ones.

A queue makes more dead rows than any other table, and autovacuum looks once a minute, where it is on at all. So the
mailboxes' processes look every second themselves. VACUUM blocks nobody; where another process is at it, it is left out.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import anyio
import psycopg

from mainspring.errors import MainspringError
from mainspring.mailbox.backend import TRANSIENT, TRANSIENT_LIFE
from mainspring.mailbox.postgres.calls import Call

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mainspring.mailbox.postgres.connection import Pool

EVERY = 1.0
STALE_EVERY = 3_600.0
FEWEST_DEAD = 10_000
DEAD_SHARE = 0.1
FOLD_FROM = 200
"""Rows of tallies from which they are made one."""
VACUUM_TIMEOUT = 600.0
PAUSE = 10
"""A VACUUM is followed by at least so many times its own length without one."""
UNYIELDING = 60.0
"""The most seconds until another try, where VACUUM could not remove what is dead, as an old transaction may still see it."""


def worth_a_vacuum(dead: int, live: int) -> bool:
    """Whether so many dead rows slow claims down by more than removing them costs, which grows with what is alive."""
    return dead >= FEWEST_DEAD + DEAD_SHARE * live


class Upkeep:
    """Looks after one schema. Nothing depends on its success: what fails is tried again."""

    def __init__(self, pool: Pool, schema: str) -> None:
        self._pool = pool
        self._schema = schema
        self._batches = 0
        self._not_before = 0.0
        self._stale_at = 0.0
        self._in_vain = 0
        self.vacuums = 0

    async def run(self) -> None:
        """Until cancelled. Does nothing while the mailboxes of this process are idle."""
        while True:
            await anyio.sleep(EVERY)
            if self._pool.batches == self._batches:
                continue
            with suppress(
                MainspringError, psycopg.Error, OSError, TimeoutError
            ):  # whoever has work to do will hear of it
                await self._step()
            self._batches = self._pool.batches

    async def _step(self) -> None:
        now = anyio.current_time()
        for (box,) in await self._rows(
            f"SELECT mailbox FROM {self._schema}.tallies GROUP BY mailbox HAVING count(*) >= $1",  # noqa: S608
            FOLD_FROM,
        ):
            await self._rows(f"SELECT {self._schema}.fold($1)", box)
        if now >= self._stale_at:
            self._stale_at = now + STALE_EVERY
            await self._rows(f"SELECT {self._schema}.drop_stale($1, $2)", TRANSIENT, TRANSIENT_LIFE)
        if now < self._not_before:
            return
        tables = await self._dead_rows()
        if worth_a_vacuum(*tables.get("messages", (0, 0))):
            await self._vacuum(("messages", "tallies"))
        elif worth_a_vacuum(*tables.get("tallies", (0, 0))):
            await self._vacuum(("tallies",))

    async def _vacuum(self, tables: Iterable[str]) -> None:
        began = anyio.current_time()
        for table in tables:
            await self._rows(f"VACUUM (SKIP_LOCKED, INDEX_CLEANUP ON, TRUNCATE OFF) {self._schema}.{table}")
        self.vacuums += 1
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
        await self._pool.run([Call(statement, values, rows.extend)], patient)
        return rows
