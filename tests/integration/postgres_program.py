"""Run by test_postgres_processes: one worker process, whose handlers apply effects in their transactions."""

from __future__ import annotations

import os
import sys

import anyio

from mainspring import Context, LeasePolicy, LoopGroup, MainLoop
from mainspring.mailbox.postgres.mailbox import PostgresMailbox


async def work(url: str, schema: str) -> None:
    """Say which messages are begun; add one to the count of each in a transaction, which takes a while."""
    mailbox = PostgresMailbox(url, name="jobs", schema=schema, body=int)

    async def handle(job: int, ctx: Context) -> None:
        os.write(1, f"begun {job}\n".encode())  # one write: a kill leaves whole lines
        async with ctx.transaction() as connection:
            await connection.execute(f"INSERT INTO {schema}.effects VALUES (%s)", (job,))
            await anyio.sleep(0.01)

    loop = MainLoop(mailbox, handle, concurrency=8, visibility_timeout=1, lease=LeasePolicy())
    await LoopGroup([loop], guardian=False).run()


if __name__ == "__main__":
    anyio.run(work, sys.argv[1], sys.argv[2])
