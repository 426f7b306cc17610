"""A task's call, from its send to its end, beside a message of like content on a bare ``MainLoop``: in memory and on SQLite.

And a worker of ``Tasks`` at its defaults beside the peers at theirs, on SQLite, Redis and PostgreSQL.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio

import postgres
import redis
import sqlite
from brokers import Comparison, Contender
from common import BODY, beside, in_turns, microseconds, on_uvloop, quick, report
from local_server import server
from mainspring import LoopGroup, MainLoop, Tasks, open_mailbox

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

COUNT = 20_000 if quick() else 100_000
ROUNDS = 3 if quick() else 7
TOGETHER = 1_000
"""How many are sent by one call."""


@dataclass
class Body:
    text: str


async def full_path(loop: MainLoop, send: Callable[[], Awaitable[Any]], finished: anyio.Event) -> float:
    """Seconds a message from the first send to the last end, in a group with one loop of concurrency 100."""
    async with LoopGroup([loop], guardian=False):
        began = time.perf_counter()
        for _ in range(COUNT // TOGETHER):
            await send()
        await finished.wait()
        while (await loop.mailbox.counts()).waiting:
            await anyio.sleep(0)
        return (time.perf_counter() - began) / COUNT


class Countdown:
    """Notices the last message."""

    def __init__(self) -> None:
        self.left = COUNT
        self.finished = anyio.Event()

    def one(self) -> None:
        self.left -= 1
        if not self.left:
            self.finished.set()


async def as_tasks(url: str) -> float:
    tasks, countdown = Tasks(url), Countdown()

    @tasks.task
    async def work(text: str) -> None:
        countdown.one()

    calls = [(BODY,)] * TOGETHER
    async with tasks:
        return await full_path(tasks.loop(concurrency=100), lambda: work.send_many(calls), countdown.finished)


async def bare(url: str) -> float:
    mailbox, countdown = open_mailbox(url, body=Body), Countdown()

    async def handle(body: Body) -> None:
        countdown.one()

    bodies = [Body(BODY)] * TOGETHER
    async with mailbox:
        loop = MainLoop(mailbox, handle, concurrency=100)
        return await full_path(loop, lambda: mailbox.send_many(bodies), countdown.finished)


def compare(store: str, url: Callable[[str], str]) -> None:
    ours, other = in_turns(
        ROUNDS, lambda: on_uvloop(lambda: as_tasks(url("tasks"))), lambda: on_uvloop(lambda: bare(url("bare")))
    )
    note = f"sent by {TOGETHER:,}, concurrency 100, uvloop, {COUNT:,} messages; the body a dataclass of one text"
    report(
        beside(
            f"tasks: {store}: a call / a message on a bare loop",
            ours,
            other,
            1.25,
            microseconds,
            at_most=True,
            note=note,
        )
    )


def drain_at_defaults(comparison: Comparison) -> None:
    comparison.report_rate("drain-default", 2.0)


def main() -> None:
    ours = {"ours": Contender("Mainspring", "ours_tasks.py")}
    with tempfile.TemporaryDirectory() as folder:
        drain_at_defaults(sqlite.beside_huey(Path(folder), "SQLite, Tasks", **ours))
    with server(redis.REDIS) as there:
        if there is not None:
            drain_at_defaults(redis.beside_peers(there, "Redis, Tasks", **ours))
    if (comparison := postgres.beside_peers("PostgreSQL, Tasks", **ours)) is not None:
        try:
            drain_at_defaults(comparison)
        finally:
            postgres.drop()
    compare("memory", lambda name: f"memory://{name}")
    with tempfile.TemporaryDirectory() as folder:
        compare("SQLite", lambda name: f"sqlite:///{Path(folder, name)}.db?name={name}")


if __name__ == "__main__":
    main()
