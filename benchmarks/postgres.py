"""PostgreSQL: sends, drain and pickup beside PgQueuer and procrastinate, each run in a database that is made for it.

``python benchmarks/postgres.py [--quick] [URL]``. The server is the one of the URL, else of MAINSPRING_POSTGRES_URL, else the
one on this machine; the disk it is on decides about all that waits for a commit.
"""

from __future__ import annotations

import os
import sys
from urllib.parse import urlsplit

import psycopg

from brokers import Comparison, Contender
from common import missing, report
from redelivery import report_redelivery

DEFAULT = os.environ.get("MAINSPRING_POSTGRES_URL", "postgresql://postgres@127.0.0.1:5432/postgres")
URL = next((word for word in sys.argv[1:] if "://" in word), DEFAULT)
DATABASE = "mainspring_bench"

PEERS = (
    Contender("PgQueuer", "on_pgqueuer.py", "pgqueuer", ("pgqueuer", "asyncpg", "uvloop")),
    Contender("procrastinate", "on_procrastinate.py", "procrastinate", ("procrastinate", "psycopg[binary]", "uvloop")),
)


def drop() -> None:
    with psycopg.connect(URL, autocommit=True) as connection:
        connection.execute("SET client_min_messages = warning")
        connection.execute(f"DROP DATABASE IF EXISTS {DATABASE} WITH (FORCE)")


def renew() -> None:
    drop()
    with psycopg.connect(URL, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {DATABASE}")


def url(contender: Contender) -> str:
    there = urlsplit(URL)._replace(path=f"/{DATABASE}").geturl()
    return f"{there}{'&' if '?' in there else '?'}name=bench" if contender.home is None else there


def main() -> int:
    try:
        renew()
    except psycopg.Error as error:
        report(missing("PostgreSQL: no server to measure on", " ".join(str(error).split())[:120]))
        return 0
    try:
        comparison = Comparison("PostgreSQL", url, renew, list(PEERS))
        comparison.choose_concurrency()
        comparison.report_rate("drain", 2.0)
        comparison.report_rate("drain-default", 1.5)
        comparison.report_rate("send-one", 1.0)
        comparison.report_rate("send-100", 1.0)
        comparison.report_rate("send-bulk", 1.0)
        comparison.report_pickup()
        comparison.report_latency()
        comparison.report_tree(1.0)
        comparison.report_flatness(1.15)
        comparison.report_memory(1.05)
        renew()
        report_redelivery("PostgreSQL", url(comparison.ours))
    finally:
        drop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
