"""PostgreSQL: sends, drain and pickup beside PgQueuer and procrastinate, each run in a database that is made for it.

``python benchmarks/postgres.py [--quick] [URL]``. The server is the one of the URL, else of MAINSPRING_POSTGRES_URL, else the
one on this machine; the disk it is on decides about all that waits for a commit.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg

from brokers import Comparison, Contender, kill_session
from common import HERE, beside, given_url, in_turns, missing, quick, report
from idle import children
from local_server import with_name
from redelivery import report_redelivery

DEFAULT = os.environ.get("MAINSPRING_POSTGRES_URL", "postgresql://postgres@127.0.0.1:5432/postgres")
URL = given_url() or DEFAULT
DATABASE = "mainspring_bench"

PEERS = (
    Contender("PgQueuer", "on_pgqueuer.py", "pgqueuer", ("pgqueuer", "asyncpg", "uvloop")),
    Contender("procrastinate", "on_procrastinate.py", "procrastinate", ("procrastinate", "psycopg[binary]", "uvloop")),
)
ONE_CONNECTION = Contender(
    "PgQueuer on one connection", "on_pgqueuer_one.py", "pgqueuer", ("pgqueuer", "asyncpg", "uvloop")
)
WARM_UP = 5.0
"""Seconds of an idle worker that count for nothing."""
IDLE = 5.0 if quick() else 30.0
"""Seconds over which it is measured."""


def drop() -> None:
    with psycopg.connect(URL, autocommit=True) as connection:
        connection.execute("SET client_min_messages = warning")
        connection.execute(f"DROP DATABASE IF EXISTS {DATABASE} WITH (FORCE)")


def renew() -> None:
    drop()
    with psycopg.connect(URL, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {DATABASE}")


def mailbox_url(name: str = "bench") -> str:
    """The URL of a mailbox in the database."""
    return with_name(database_url(), name)


def database_url() -> str:
    return urlsplit(URL)._replace(path=f"/{DATABASE}").geturl()


def url(contender: Contender) -> str:
    return mailbox_url() if contender.home is None else database_url()


def report_idle(comparison: Comparison) -> None:
    """The row of the processor time of an idle worker, and of what it has the server do, beside PgQueuer's."""
    ours, theirs = comparison.ours, next((one for one in comparison.peers if one.name == "PgQueuer"), None)
    if theirs is None or urlsplit(URL).hostname not in (None, "127.0.0.1", "::1", "localhost"):
        return
    mine, others = in_turns(1 if quick() else 3, partial(idle, comparison, ours), partial(idle, comparison, theirs))
    report(beside(f"PostgreSQL: processor time of an idle worker, the server's included / {theirs.title}", mine, others,
                  1.0, lambda share: f"{share:.2%} of a core", at_most=True,
                  note=f"nothing set, {IDLE:.0f} s after the last message"))  # fmt: skip


def idle(comparison: Comparison, contender: Contender) -> float:
    """The share of one core that a worker at its defaults and its server take while no message comes."""
    comparison.run(contender, "send-one", 1)  # which makes the tables
    script = str(HERE / "peers" / contender.script)
    command = [str(contender.python), script, "work-drain-default", url(contender), "1000000"]
    worker = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        time.sleep(WARM_UP)
        used, since = processor_seconds(worker.pid), time.perf_counter()
        time.sleep(IDLE)
        return (processor_seconds(worker.pid) - used) / (time.perf_counter() - since)
    finally:
        kill_session(worker)


def processor_seconds(pid: int) -> float:
    """Processor seconds so far of a worker, its children, and the server's processes for the database."""
    tasks = [task for process in (pid, *children(pid), *servers()) for task in Path(f"/proc/{process}/task").iterdir()]
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def servers() -> list[int]:
    """The server's processes for the database."""
    with psycopg.connect(URL, autocommit=True) as connection:
        text = "SELECT pid FROM pg_stat_activity WHERE datname = %s"
        return [pid for (pid,) in connection.execute(text, (DATABASE,))]


def beside_peers(title: str = "PostgreSQL", **options: Any) -> Comparison | None:
    """Return the comparison, or None, having said so, where there is no server."""
    try:
        renew()
    except psycopg.Error as error:
        report(missing(f"{title}: no server to measure on", " ".join(str(error).split())[:120]))
        return None
    return Comparison(title, url, renew, list(PEERS), **options)


def main() -> int:
    comparison = beside_peers()
    if comparison is None:
        return 0
    try:
        comparison.choose_concurrency()
        comparison.report_rate("drain", 2.0)
        comparison.report_rate("drain-default", 1.5)
        comparison.report_rate("send-one", 1.0)
        Comparison("PostgreSQL", url, renew, [ONE_CONNECTION]).report_rate("send-one", 1.0)
        comparison.report_rate("send-100", 1.0)
        comparison.report_rate("send-bulk", 1.0)
        comparison.report_pickup()
        comparison.report_latency()
        report_idle(comparison)
        comparison.report_tree()
        comparison.report_flatness(1.15)
        comparison.report_memory(1.05)
        renew()
        report_redelivery("PostgreSQL", url(comparison.ours))
    finally:
        drop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
