"""What every script of this directory runs on: the verbs, measured alike for all of them.

``python NAME.py VERB URL COUNT [CONCURRENCY [BEHIND]]`` prints one line of JSON. The verbs:

about      versions, notes, the verbs it has and the concurrencies worth trying; URL and COUNT do not matter
send-one   sends, one awaited after the other
send-100   the sends of 100 concurrent senders
send-bulk  sends by 1,000 in the documented bulk way
drain      COUNT pending messages through one worker process, with BEHIND more pending behind them: from the first to the last
           handler run
drain-default  as drain, by a worker as it is where nothing is said: its own default concurrency and intervals
pickup     COUNT sends to an idle worker in another process, one about every 20 ms: from the send to the handler
memory     as drain; the resident memory of the worker after a tenth of the messages and after all

Standard library only: each peer runs in an interpreter of its own.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import itertools
import json
import os
import random
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

BODY = "x" * 100
SENDERS = 100
BULK = 1_000
APART = (0.015, 0.025)
"""Seconds between two sends to an idle worker: not always the same, so as not to fall into step with anything."""


class Peer:
    """One system, on asyncio: sends, and works in this process. What a script overrides says how its documentation does it."""

    packages: tuple[str, ...] = ()
    """Whose versions are told."""
    note = ""
    """What is set, because the documentation gives it as the fastest."""
    concurrency: tuple[int, ...] = (100,)
    """Those worth trying; a worker gets the best of them."""
    default: int | None = 1
    """What a worker has where nothing is said; None where its default is several processes."""
    uvloop = True
    send_many = None
    """``async def send_many(self, bodies)``, where there is a documented bulk way."""

    def __init__(self, url: str) -> None:
        self.url = url

    async def open(self) -> None:
        """Get ready to send."""

    async def close(self) -> None:
        """Send no more."""

    async def send(self, body: str) -> None:
        raise NotImplementedError

    async def work(self, handle, concurrency: int) -> None:
        """Run a worker for ever; its handler calls ``handle(body)``, which returns at once."""
        raise NotImplementedError

    async def work_by_default(self, handle) -> None:
        """Run a worker of which nothing is set."""
        await self.work(handle, self.default)


class Blocking:
    """A system without async: ``send``, ``send_many`` and ``work`` as plain functions, its senders in threads."""

    packages: tuple[str, ...] = ()
    note = ""
    concurrency: tuple[int, ...] = (8,)
    default: int | None = 1
    send_many = None

    def __init__(self, url: str) -> None:
        self.url = url

    def open(self) -> None:
        """Get ready to send."""

    def send(self, body: str) -> None:
        raise NotImplementedError

    def work(self, handle, concurrency: int) -> None:
        raise NotImplementedError

    def work_by_default(self, handle) -> None:
        self.work(handle, self.default)


# ---------------------------------------------------------------------------------------------------------- the sending side


class AsyncSide:
    """How the verbs send with a :class:`Peer`."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer

    async def one(self, count: int) -> float:
        send = self.peer.send
        await send(BODY)
        began = time.perf_counter()
        for _ in range(count):
            await send(BODY)
        return count / (time.perf_counter() - began)

    async def hundred(self, count: int) -> float:
        async def sender() -> None:
            for _ in range(count // SENDERS):
                await self.peer.send(BODY)

        await self.peer.send(BODY)
        began = time.perf_counter()
        await asyncio.gather(*[sender() for _ in range(SENDERS)])
        return count // SENDERS * SENDERS / (time.perf_counter() - began)

    async def bulk(self, count: int) -> float:
        bodies = [BODY] * BULK
        await self.peer.send(BODY)
        began = time.perf_counter()
        for _ in range(count // BULK):
            await self.peer.send_many(bodies)
        return count // BULK * BULK / (time.perf_counter() - began)

    async def fill(self, count: int) -> None:
        if self.peer.send_many is not None:
            for start in range(0, count, BULK):
                await self.peer.send_many([BODY] * min(BULK, count - start))
            return
        left = itertools.count()

        async def sender() -> None:
            while next(left) < count:
                await self.peer.send(BODY)

        await asyncio.gather(*[sender() for _ in range(SENDERS)])

    async def spaced(self, count: int, ready: threading.Event) -> None:
        while not ready.is_set():
            await self.peer.send("warm")
            await asyncio.sleep(0.1)
        await asyncio.sleep(0.5)
        rng = random.Random(1)
        for _ in range(count):
            await self.peer.send(stamped())
            await asyncio.sleep(rng.uniform(*APART))

    def run(self, what: str, *args):
        async def whole():
            await self.peer.open()
            result = await getattr(self, what)(*args)
            await self.peer.close()
            return result

        return on_loop(self.peer, whole())


class BlockingSide:
    """How the verbs send with a :class:`Blocking`."""

    def __init__(self, peer: Blocking) -> None:
        self.peer = peer

    def one(self, count: int) -> float:
        send = self.peer.send
        send(BODY)
        began = time.perf_counter()
        for _ in range(count):
            send(BODY)
        return count / (time.perf_counter() - began)

    def hundred(self, count: int) -> float:
        def sender(_: int) -> None:
            for _ in range(count // SENDERS):
                self.peer.send(BODY)

        self.peer.send(BODY)
        with ThreadPoolExecutor(SENDERS) as threads:
            began = time.perf_counter()
            list(threads.map(sender, range(SENDERS)))
            return count // SENDERS * SENDERS / (time.perf_counter() - began)

    def bulk(self, count: int) -> float:
        bodies = [BODY] * BULK
        self.peer.send(BODY)
        began = time.perf_counter()
        for _ in range(count // BULK):
            self.peer.send_many(bodies)
        return count // BULK * BULK / (time.perf_counter() - began)

    def fill(self, count: int) -> None:
        for _ in range(count):
            self.peer.send(BODY)

    def spaced(self, count: int, ready: threading.Event) -> None:
        while not ready.is_set():
            self.peer.send("warm")
            time.sleep(0.1)
        time.sleep(0.5)
        rng = random.Random(1)
        for _ in range(count):
            self.peer.send(stamped())
            time.sleep(rng.uniform(*APART))

    def run(self, what: str, *args):
        self.peer.open()
        return getattr(self, what)(*args)


def stamped() -> str:
    """A body that says when it was sent: the clock is the machine's, the same in all processes."""
    return f"{time.perf_counter():.9f}".ljust(len(BODY), "x")


def on_loop(peer: Peer, coroutine):
    if peer.uvloop:
        import uvloop

        return uvloop.run(coroutine)
    return asyncio.run(coroutine)


# ---------------------------------------------------------------------------------------------------------- the working side


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def tell(**values) -> None:
    """Hand the result over, and leave at once: nothing of the peer's own farewell is measured."""
    print(json.dumps(values), flush=True)
    os._exit(0)


def drained(count: int):
    """A handler that measures how long ``count`` of its runs take."""
    number = itertools.count(1)
    first = 0.0

    def handle(body: str) -> None:
        nonlocal first
        seen = next(number)
        if seen == 1:
            first = time.perf_counter()
        elif seen == count:
            tell(rate=(count - 1) / (time.perf_counter() - first))

    return handle


def picked_up(count: int):
    """A handler that measures how long its messages have been on their way."""
    took: list[float] = []
    ready = False

    def handle(body: str) -> None:
        nonlocal ready
        now = time.perf_counter()
        if body.startswith("warm"):
            if not ready:
                ready = True
                print("ready", flush=True)
            return
        took.append(now - float(body.rstrip("x")))
        if len(took) == count:
            took.sort()
            tell(p50=took[count // 2], p99=took[count * 99 // 100])

    return handle


def remembered(count: int):
    """A handler that looks at the memory of its process after a tenth of the messages, and after all."""
    number = itertools.count(1)
    early = 0

    def handle(body: str) -> None:
        nonlocal early
        seen = next(number)
        if seen == count // 10:
            early = resident()
        elif seen == count:
            tell(early=early, late=resident())

    return handle


HANDLERS = {"drain": drained, "drain-default": drained, "pickup": picked_up, "memory": remembered}


def work(peer, verb: str, count: int, concurrency: int) -> None:
    handle = HANDLERS[verb](count)
    working = peer.work_by_default(handle) if verb == "drain-default" else peer.work(handle, concurrency)
    if not isinstance(peer, Blocking):
        on_loop(peer, working)


def beside_a_worker(side, verb: str, url: str, count: int, concurrency: int, behind: int) -> str:
    """Have a worker process do it; the line of its result."""
    if verb != "pickup":
        side.run("fill", count + behind)
    command = [sys.executable, sys.argv[0], f"work-{verb}", url, str(count), str(concurrency)]
    worker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    ready = threading.Event()
    result: list[str] = []

    def listen() -> None:
        for line in worker.stdout:
            if line.startswith("{"):
                result.append(line)
            ready.set()
        ready.set()

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    try:
        if verb == "pickup":
            side.run("spaced", count, ready)
        worker.wait()
        listener.join()
    finally:
        worker.kill()
        worker.wait()
    return result[0] if result else ""


def verbs_of(kind: type) -> list[str]:
    bulk = ["send-bulk"] if kind.send_many is not None else []
    default = ["drain-default"] if kind.default is not None else []
    return ["send-one", "send-100", *bulk, "drain", *default, "pickup", "memory"]


def main(kind: type) -> None:
    """The script of the peer ``kind``."""
    verb, url, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
    concurrency = int(sys.argv[4]) if len(sys.argv) > 4 else kind.concurrency[0]
    behind = int(sys.argv[5]) if len(sys.argv) > 5 else 0
    if verb == "about":
        versions = {package: importlib.metadata.version(package) for package in kind.packages}
        result = {
            "versions": versions,
            "note": kind.note,
            "concurrency": kind.concurrency,
            "default": kind.default,
            "verbs": verbs_of(kind),
        }
        print(json.dumps(result))
        return
    peer = kind(url)
    if verb.startswith("work-"):
        work(peer, verb.removeprefix("work-"), count, concurrency)
        return
    side = BlockingSide(peer) if isinstance(peer, Blocking) else AsyncSide(peer)
    if verb.startswith("send-"):
        what = {"send-one": "one", "send-100": "hundred", "send-bulk": "bulk"}[verb]
        print(json.dumps({"rate": side.run(what, count)}))
    else:
        print(beside_a_worker(side, verb, url, count, concurrency, behind), end="")
