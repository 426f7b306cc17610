"""PgQueuer's sends on one connection, as its documentation's own example has it, and not on a pool of 20."""

from __future__ import annotations

import asyncpg
from harness import main
from on_pgqueuer import OnPgQueuer
from pgqueuer.db import AsyncpgDriver
from pgqueuer.queries import Queries


class OnPgQueuerOne(OnPgQueuer):
    note = "asyncpg, one connection, `pgq autovac`, uvloop"

    async def open(self) -> None:
        self.connection = await asyncpg.connect(self.url)
        self.queries = Queries(AsyncpgDriver(self.connection))
        if not await self.queries.schema_is_installed():
            await self.queries.install()
            await self.queries.optimize_autovacuum()

    async def close(self) -> None:
        await self.connection.close()


if __name__ == "__main__":
    main(OnPgQueuerOne)
