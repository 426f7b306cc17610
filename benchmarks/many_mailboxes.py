"""Many mailboxes in one process: what 1,000 waiting loops cost, each on a mailbox of its own.

``python benchmarks/many_mailboxes.py [KIND …] [COUNT] [--quick] [--flush]``. The kinds are memory, sqlite (a file each),
sqlite-one-file, redis, postgres and nats; all of them where none is named. The servers are those of the other benchmarks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

sys.path.append(sys.path.pop(0))  # beside this file is one with the name of a driver, which must be found first

import anyio

from common import MIB, Row, benchmark, chosen, median, missing, on_uvloop, quick, report, words
from idle import cpu_seconds, resident
from local_server import server, with_name
from mainspring import LoopGroup, MainLoop, open_mailbox

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mainspring import Mailbox

COUNT = 1_000
SETTLE = 2.0
"""Seconds after the start that count for nothing."""
SECONDS = 5.0 if quick() else 35.0
"""Long enough for each loop to begin a new long poll of 30 s."""
PATIENCE = 120.0
"""Seconds that a start may take, or an end."""
BUSY = 40
BUSY_SENDS = 50
"""How many of the mailboxes are busy at the end, and how many messages are sent to each of these."""
NAME = "many-{n}"
"""The name of mailbox number n."""

# --------------------------------------------------------------------------------------------- in the measured process


async def measure(url: str, count: int) -> dict[str, Any]:
    """Start that many loops on new mailboxes, end them, and start them again; ``{n}`` in the URL is the number of each."""

    async def handle(job: str) -> None:
        """Nothing comes."""

    mailboxes = [open_mailbox(url.replace("{n}", str(n))) for n in range(count)]
    loops = [MainLoop(mailbox, handle, name=f"loop-{n}") for n, mailbox in enumerate(mailboxes)]
    group = LoopGroup(loops, guardian=True)

    async def waiting_since(began: float) -> float:
        """Wait until each loop waits. Return the seconds since ``began``."""
        while not all(mailbox.statistics().waiting_receives for mailbox in mailboxes):
            await anyio.sleep(0.01)
        return time.perf_counter() - began

    with anyio.fail_after(4 * PATIENCE + SETTLE + SECONDS):
        began = time.perf_counter()
        async with group:
            new = await waiting_since(began)
        began = time.perf_counter()
        async with group:
            existing = await waiting_since(began)
            await anyio.sleep(SETTLE)
            used, since = cpu_seconds(), time.perf_counter()
            await anyio.sleep(SECONDS)
            result = {
                "new": new,
                "existing": existing,
                "idle": (cpu_seconds() - used) / (time.perf_counter() - since),
                "memory": resident(os.getpid()),
                "threads": len(os.listdir("/proc/self/task")),
                "descriptors": len(os.listdir("/proc/self/fd")),
                "connections": connections(urlsplit(url).port),
                "busy": await busy_connections(mailboxes[:BUSY], urlsplit(url).port),
            }
            ended = time.perf_counter()
        result["end"] = time.perf_counter() - ended
    return result


async def busy_connections(mailboxes: list[Mailbox[Any, Any]], port: int | None) -> int:
    """Return the connections of this process while it sends to these mailboxes and handles: the median of some looks."""
    found: list[int] = []

    async def look() -> None:
        while True:
            await anyio.sleep(0.02)
            found.append(connections(port))

    async def send(mailbox: Mailbox[Any, Any]) -> None:
        for number in range(BUSY_SENDS):
            await mailbox.send(str(number))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(look)
        async with anyio.create_task_group() as senders:
            for mailbox in mailboxes:
                senders.start_soon(send, mailbox)
        tasks.cancel_scope.cancel()
    return int(median(found)) if found else 0


def connections(port: int | None) -> int:
    """How many TCP connections this process has to that port: each is a descriptor of the server."""
    mine = {os.readlink(fd) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()}
    there = [
        line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/self/net/{table}").read_text().splitlines()
    ]
    return sum(
        int(fields[2].rpartition(":")[2], 16) == port and f"socket:[{fields[9]}]" in mine
        for fields in there
        if fields[0] != "sl"
    )


# ------------------------------------------------------------------------------------------------------ the servers


@contextmanager
def memory() -> Iterator[str]:
    yield f"memory://{NAME}"


@contextmanager
def sqlite() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        yield f"sqlite:///{folder}/{{n}}.db"


@contextmanager
def sqlite_one_file() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        yield with_name(f"sqlite:///{folder}/all.db", NAME)


@contextmanager
def redis() -> Iterator[str | None]:
    with server(benchmark("redis").REDIS) as url:
        yield url and with_name(url, NAME)


@contextmanager
def nats() -> Iterator[str | None]:
    with server(benchmark("nats").NATS) as url:
        yield url and with_name(url, NAME)


@contextmanager
def postgres() -> Iterator[str]:
    there = benchmark("postgres")
    there.renew()
    try:
        yield with_name(urlsplit(there.URL)._replace(path=f"/{there.DATABASE}").geturl(), NAME)
    finally:
        there.drop()


KINDS: dict[str, Callable[[], Any]] = {
    "memory": memory,
    "sqlite": sqlite,
    "sqlite-one-file": sqlite_one_file,
    "redis": redis,
    "postgres": postgres,
    "nats": nats,
}

# ---------------------------------------------------------------------------------------------------------- the figures


def report_kind(kind: str, count: int) -> None:
    with KINDS[kind]() as url:
        if url is None:
            return
        command = [sys.executable, __file__, "--measure", url, str(count), *(["--quick"] if quick() else [])]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    title = f"{count:,} mailboxes: {kind}"
    if done.returncode:
        report(missing(title, (done.stderr.strip().splitlines() or ["no result"])[-1][:200]))
        return
    found = json.loads(done.stdout)
    how = f"threads {found['threads']}, end {found['end']:.2f} s"
    report(
        Row(f"{title}: start, new ones / 3 s", f"{found['new']:.2f} s", "3 s", [found["new"] / 3], 1.0, at_most=True,
            note="until each loop waits"),
        Row(f"{title}: start, existing ones / 3 s", f"{found['existing']:.2f} s", "3 s", [found["existing"] / 3], 1.0,
            at_most=True, note=f"until each loop waits; {how}"),
        Row(f"{title}: idle / 2 % of a core", f"{found['idle']:.2%}", "2 %", [found["idle"] / 0.02], 1.0, at_most=True,
            note=f"uvloop, {SECONDS:.0f} s, with watchdog and guardian"),
        Row(f"{title}: resident memory / 150 MiB", f"{found['memory'] / MIB:.0f} MiB", "150 MiB",
            [found["memory"] / MIB / 150], 1.0, at_most=True, note="VmRSS without the guardian"),
        Row(f"{title}: descriptors of the process", str(found["descriptors"]), "-"),
    )  # fmt: skip
    if urlsplit(url).port is not None:
        report(
            Row(f"{title}: connections to the server / 100", str(found["connections"]), "100", [found["connections"] / 100],
                1.0, at_most=True),
            Row(f"{BUSY} busy mailboxes: {kind}: connections to the server / 3", str(found["busy"]), "3", [found["busy"] / 3],
                1.0, at_most=True, note=f"{BUSY_SENDS} sends to each, one by one, and their handlers")
        )  # fmt: skip


def main() -> None:
    if "--measure" in sys.argv:
        url, count = sys.argv[2:4]
        print(json.dumps(on_uvloop(measure, url, int(count))))
        return
    count = next((int(word) for word in words() if word.isdigit()), COUNT)
    for kind in chosen([word for word in words() if not word.isdigit()], KINDS):
        report_kind(kind, count)


if __name__ == "__main__":
    main()
