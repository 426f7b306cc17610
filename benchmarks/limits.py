"""Limits of tasks: what a queue with keys, with an order, a rate or a concurrency drains, beside the same queue without.

Then what a message costs where each has a key of its own, beside messages of one key; and the first page of a list of a million
jobs, and of the few dead letters of a task among a million. Each on every store that keeps limits.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio

import postgres
import redis
from common import beside, chosen, in_turns, microseconds, milliseconds, missing, on_uvloop, quick, report, words
from local_server import server, with_name
from mainspring import LoopGroup, Rate, Tasks

if TYPE_CHECKING:
    from collections.abc import Callable

COUNT = 5_000 if quick() else 20_000
ROUNDS = 3 if quick() else 5
MANY_KEYS = 10_000 if quick() else 100_000
JOBS = 20_000 if quick() else 1_000_000
TOGETHER = 1_000
"""How many are sent by one call."""
PAGES = 20
RARE = 10
"""How many of the dead letters are of the task that is listed."""
SLOTS = 100
"""The concurrency of the loop that drains."""
STORES = ("memory", "sqlite", "redis", "postgresql")
FIRST_PAGE = {"redis": 0.05}
"""Seconds that the first page of a million jobs may take; 0.02 elsewhere."""


@dataclass(frozen=True)
class Limited:
    """A queue that is measured: the options of its task, and how many keys its calls have in turn."""

    title: str
    options: dict[str, Any] = field(default_factory=dict)
    keys: int = 1


UNKEYED = Limited("without limits")
QUEUES = (
    Limited("keys in turn", {"key": "key"}, 100),
    Limited("ordered keys", {"key": "key", "ordered": True}, 1_000),
    Limited("a rate that is not reached", {"rate": Rate(1_000_000, 1, burst=100_000)}),
    Limited("a concurrency", {"concurrency": SLOTS}),
)


async def drained(url: str, queue: Limited, count: int, *, with_sends: bool) -> float:
    """Return the seconds a message of a drain by one loop; ``with_sends``: from the first send on."""
    tasks, finished, left = Tasks(url), anyio.Event(), count

    @tasks.task(**queue.options)
    async def work(key: str) -> None:
        nonlocal left
        left -= 1
        if not left:
            finished.set()

    async with tasks:
        began = time.perf_counter()
        for start in range(0, count, TOGETHER):
            numbers = range(start, min(start + TOGETHER, count))
            await work.send_many([(f"key {number % queue.keys}",) for number in numbers])
        began = began if with_sends else time.perf_counter()
        async with LoopGroup([tasks.loop(concurrency=SLOTS)], guardian=False):
            await finished.wait()
            while (await tasks.mailbox.counts()).waiting:
                await anyio.sleep(0.001)
            return (time.perf_counter() - began) / count


async def first_pages(url: str) -> list[float]:
    """Return the seconds that the first page of each of some lists takes, with many jobs in the mailbox."""
    tasks, times = Tasks(url), []

    @tasks.task(key="key")
    async def work(key: str) -> None: ...

    async with tasks:
        for start in range(0, JOBS, TOGETHER):
            await work.send_many([(f"key {number % 100}",) for number in range(start, start + TOGETHER)])
        for number in range(PAGES + 1):
            began = time.perf_counter()
            found = [job async for job in tasks.mailbox.jobs(state="pending", task="work", limit=50)]
            times.append(time.perf_counter() - began)
            assert len(found) == 50, number
        await tasks.mailbox.purge()
    return times[1:]


async def dead_pages(url: str) -> list[float]:
    """Return the seconds that the dead letters of a task take which has few among many. All have died of their expiry."""
    tasks, times = Tasks(url), []

    @tasks.task
    async def work() -> None: ...

    @tasks.task
    async def rare() -> None: ...

    async with tasks:
        for start in range(0, JOBS, TOGETHER):
            await work.options(expires_in=0.001).send_many([()] * TOGETHER)
            if start % (JOBS // RARE) == 0:
                await rare.options(expires_in=0.001).send()
        while (await tasks.mailbox.counts()).waiting:
            pass
        for number in range(PAGES + 1):
            began = time.perf_counter()
            found = [job async for job in tasks.mailbox.jobs(state=("dead", "expired"), task="rare", limit=50)]
            times.append(time.perf_counter() - began)
            assert len(found) == RARE, number
        await tasks.mailbox.purge_dead_letters()
    return times[1:]


def measure(store: str, url: Callable[[str], str]) -> None:
    """Report the rows of one store. ``url`` gives that of a mailbox by its name."""
    runs = [
        partial(on_uvloop, partial(drained, url(f"q{number}"), queue, COUNT, with_sends=False))
        for number, queue in enumerate((UNKEYED, *QUEUES))
    ]
    plain, *others = in_turns(ROUNDS, *runs)
    for queue, costs in zip(QUEUES, others, strict=True):
        rates, plain_rates = [1 / cost for cost in costs], [1 / cost for cost in plain]
        note = f"{COUNT:,} calls, concurrency {SLOTS}, uvloop"
        report(
            beside(
                f"limits, {store}: a drain of {queue.title} / without limits",
                rates, plain_rates, 0.5, lambda rate: f"{rate:,.0f}/s", note=note,
            )
        )  # fmt: skip
    each, one = (
        partial(on_uvloop, partial(drained, url(name), Limited(name, {"key": "key"}, keys), MANY_KEYS, with_sends=True))
        for name, keys in (("each", MANY_KEYS), ("one", 1))
    )
    ours, other = in_turns(1 if quick() else 3, each, one)
    name = f"limits, {store}: {MANY_KEYS:,} keys with a call each / one key, sends and drain"
    report(beside(name, ours, other, 1.2, microseconds, at_most=True, note="seconds a call"))
    pages = on_uvloop(first_pages, url("jobs"))
    goal = FIRST_PAGE.get(store, 0.02)
    name = f"limits, {store}: the first page of {JOBS:,} jobs / {milliseconds(goal)}"
    report(beside(name, pages, goal, 1.0, milliseconds, at_most=True, note="50 pending jobs of a task"))
    pages = on_uvloop(dead_pages, url("dead"))
    name = f"limits, {store}: the dead letters of a task among {JOBS:,} / {milliseconds(goal)}"
    report(beside(name, pages, goal, 1.0, milliseconds, at_most=True, note=f"{RARE} of them are of the task"))


def main() -> None:
    stores = chosen(words(), STORES)
    if "memory" in stores:
        measure("memory", lambda name: f"memory://{name}")
    if "sqlite" in stores:
        with tempfile.TemporaryDirectory() as folder:
            measure("sqlite", lambda name: f"sqlite:///{Path(folder, name)}.db?name={name}")
    if "redis" in stores:
        with server(redis.REDIS) as there:
            if there is not None:
                measure("redis", partial(with_name, there))
    if "postgresql" in stores:
        try:
            postgres.renew()
        except postgres.psycopg.OperationalError as error:
            report(missing("limits, postgresql", str(error).partition("\n")[0]))
            return
        try:
            measure("postgresql", postgres.mailbox_url)
        finally:
            postgres.drop()


if __name__ == "__main__":
    main()
