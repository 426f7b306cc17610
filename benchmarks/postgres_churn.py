"""PostgreSQL under churn: a million messages pass through one mailbox; dead rows, table size and speed over the run.

``python benchmarks/postgres_churn.py [--quick] [--autovacuum-only] [URL]``. The server's own autovacuum may be on or off:
the mailboxes look after their tables themselves, unless ``--autovacuum-only`` tells them not to, for comparison.
"""

from __future__ import annotations

import os
import statistics
import sys
import time

import anyio
import psycopg

from common import BODY, Row, given_url, missing, on_uvloop, quick, report
from mainspring import LoopGroup, MainLoop
from mainspring.mailbox.postgres import schema as postgres_schema
from mainspring.mailbox.postgres.mailbox import PostgresMailbox

DEFAULT = os.environ.get("MAINSPRING_POSTGRES_URL", "postgresql://postgres@127.0.0.1:5432/postgres")
URL = given_url() or DEFAULT
SCHEMA = "mainspring_churn"
MESSAGES = 100_000 if quick() else 1_000_000
SLICES = 20
BACKLOG = 2_000
"""How many messages are kept waiting, so that the queue is neither empty nor growing."""


def drop() -> None:
    with psycopg.connect(URL, autocommit=True) as connection:
        connection.execute("SET client_min_messages = warning")
        connection.execute(f"DROP SCHEMA IF EXISTS {SCHEMA} CASCADE")


def dead_rows_size_and_vacuums() -> tuple[int, int, int]:
    """Dead rows of the messages and VACUUMs, as the server's statistics have them; bytes of the table with its indexes."""
    with psycopg.connect(URL, autocommit=True) as connection:
        found = connection.execute(
            """SELECT n_dead_tup, pg_total_relation_size(relid), vacuum_count FROM pg_stat_all_tables
            WHERE schemaname = %s AND relname = 'messages'""",
            (SCHEMA,),
        ).fetchone()
    assert found is not None
    return found


async def churn() -> list[tuple[float, float, int, int]]:
    """For each slice: messages a second, the median milliseconds of a claim, dead rows, bytes."""
    slices = []
    vacuums = 0
    mailbox = PostgresMailbox(URL, name="churn", schema=SCHEMA, body=str)
    done = 0
    more = anyio.Event()
    claims: list[float] = []
    claim = mailbox.backend.claim

    async def timed_claim(most: int, visibility: float, wait: float) -> list:
        began = time.perf_counter()
        found = await claim(most, visibility, wait)
        if found:
            claims.append(time.perf_counter() - began)
        return found

    mailbox.backend.claim = timed_claim

    async def handle(job: str) -> None:
        nonlocal done, more
        done += 1
        if done % 500 == 0:
            more.set()
            more = anyio.Event()

    async with mailbox, LoopGroup([MainLoop(mailbox, handle, concurrency=100)], guardian=False):
        sent = 0
        for number in range(1, SLICES + 1):
            began, before = time.perf_counter(), done
            while done < MESSAGES * number // SLICES:
                changed = more
                while sent < MESSAGES and sent - done < BACKLOG:
                    await mailbox.send_many([BODY] * 500)
                    sent += 500
                with anyio.move_on_after(0.05 if done < MESSAGES * number // SLICES else 0):
                    await changed.wait()
            speed = (done - before) / (time.perf_counter() - began)
            dead, size, vacuums = await anyio.to_thread.run_sync(dead_rows_size_and_vacuums)
            slices.append((speed, statistics.median(claims) * 1_000, dead, size))
            claims.clear()
            print(
                f"{done:>9,} done  {speed:>8,.0f}/s  claim {slices[-1][1]:.2f} ms  {dead:>8,} dead rows"
                f"  {size / 2**20:>6.1f} MiB",
                file=sys.stderr,
            )
    print(f"{vacuums} VACUUMs", file=sys.stderr)
    return slices


def main() -> None:
    if "--autovacuum-only" in sys.argv:
        postgres_schema.FEWEST_DEAD = 10**12
    try:
        drop()
    except psycopg.Error as error:
        report(missing("PostgreSQL churn: no server to measure on", " ".join(str(error).split())[:120]))
        return
    try:
        slices = on_uvloop(churn)
    finally:
        drop()
    early = statistics.median(slice_[1] for slice_ in slices[1:5])
    late = statistics.median(slice_[1] for slice_ in slices[-4:])
    most_dead = max(slice_[2] for slice_ in slices)
    size = max(slice_[3] for slice_ in slices)
    speed = statistics.median(slice_[0] for slice_ in slices)
    report(
        Row(
            f"PostgreSQL: claim at the end of {MESSAGES:,} messages / near the beginning", f"{late:.2f} ms",
            f"{early:.2f} ms", [late / early], 1.15, at_most=True, note=f"{speed:,.0f}/s sent, claimed and acknowledged"
        ),
        Row(
            f"PostgreSQL: dead rows at most, of {2 * MESSAGES:,} that died", f"{most_dead:,}", "-",
            [most_dead / (2 * MESSAGES)], note=f"the table was never larger than {size / 2**20:.0f} MiB"
        ),
    )  # fmt: skip


if __name__ == "__main__":
    main()
