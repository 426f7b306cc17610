"""What every script of this directory runs on: the verbs, measured alike for all of them.

``python NAME.py VERB URL COUNT [CONCURRENCY] [--behind N] [--rate R] [--size BYTES]`` prints one line of JSON. The verbs:

about      versions, notes, the verbs it has and the concurrencies worth trying; URL and COUNT do not matter
send-one   sends, one awaited after the other
send-100   the sends of 100 concurrent senders
send-bulk  sends by 1,000 in the documented bulk way
drain      COUNT pending messages through one worker process, with BEHIND more pending behind them: from the first to the last
           handler run
drain-default  as drain, by a worker as it is where nothing is said: its own default concurrency, intervals and prefetch, and
           what it keeps of results. Only its log lines of each message are off
through    COUNT sends to a running worker in another process, 100 of them out at once: from the first handler run to the last,
           which is what both sides and the server do at once
latency    COUNT sends to a running worker in another process, R of them a second at random instants (a Poisson process): from
           the instant that a send is due, whether or not the sender is late, to its handler. Before them a tenth as many that
           do not count
memory     as drain; the resident memory of the worker after a tenth of the messages and after all
tree       as drain-default; then the memory of the idle worker process and of all its children: resident, proportional (PSS:
           a page that processes share counts in parts) and unique (USS: only pages that nothing else has). COUNT is handled
           before

A worker on ``memory://`` is in the process and on the event loop of its senders.

Standard library only: each peer runs in an interpreter of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
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
"""Of each message, unless ``--size`` is given."""
SENDERS = 100
"""Sends that are out at once at most, also at a given rate. Where the peer has no async they are threads."""
BULK = 1_000
TOGETHER = 0.0001
"""Seconds within which sends leave together, so that a sender of tens of thousands a second is not busy with timers. Their
lateness counts."""
WARM = "warm"
"""How a body begins that makes the worker ready, and is not measured."""
IDLE = 2.0
"""Seconds that a worker is left alone before its memory is read."""
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

    async def warm(self, ready: threading.Event) -> None:
        while not ready.is_set():
            await self.peer.send(WARM)
            await asyncio.sleep(0.1)
        await asyncio.sleep(0.5)
        gc.freeze()  # the sender's own collections are of this script's making, and no contender's

    async def at_rate(self, count: int, ready: threading.Event, rate: float) -> None:
        await self.warm(ready)
        timer, free, woke = Timer(), asyncio.Semaphore(SENDERS), 0.0
        async with asyncio.TaskGroup() as tasks:
            for due, body in arrivals(count, rate):
                if due > time.perf_counter():
                    await timer.until(max(due, woke + TOGETHER))
                    woke = time.perf_counter()
                await free.acquire()
                tasks.create_task(self.peer.send(body)).add_done_callback(lambda _: free.release())

    async def spaced(self, count: int, ready: threading.Event) -> None:
        await self.warm(ready)
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

    def warm(self, ready: threading.Event) -> None:
        while not ready.is_set():
            self.peer.send(WARM)
            time.sleep(0.1)
        time.sleep(0.5)
        gc.freeze()

    def at_rate(self, count: int, ready: threading.Event, rate: float) -> None:
        self.warm(ready)
        left, one_at_a_time = arrivals(count, rate), threading.Lock()

        def sender(_: int) -> None:
            while True:
                with one_at_a_time:
                    due, body = next(left, (0.0, ""))
                if not body:
                    return
                time.sleep(max(0.0, due - time.perf_counter()))
                self.peer.send(body)

        with ThreadPoolExecutor(SENDERS) as threads:
            list(threads.map(sender, range(SENDERS)))

    def spaced(self, count: int, ready: threading.Event) -> None:
        self.warm(ready)
        rng = random.Random(1)
        for _ in range(count):
            self.peer.send(stamped())
            time.sleep(rng.uniform(*APART))

    def run(self, what: str, *args):
        self.peer.open()
        return getattr(self, what)(*args)


def stamped(when: float | None = None) -> str:
    """A body that says when it was sent, or was to be: the clock is the machine's, the same in all processes."""
    return f"{time.perf_counter() if when is None else when:.9f}".ljust(len(BODY), "x")


def arrivals(count: int, rate: float):
    """When each send is due, and its body: ``rate`` a second at random instants, after a tenth as many to warm up.

    Where the rate is infinite all are due at once.
    """
    rng = random.Random(1)
    due = time.perf_counter() + 0.05
    for number in range(-(count // 10), count):
        due += rng.expovariate(1.0) / rate
        yield due, WARM if number < 0 else stamped(due)


class Timer:
    """Waits to the microsecond, by a timer of Linux: those of event loops wait for whole milliseconds."""

    def __init__(self) -> None:
        self.libc = ctypes.CDLL(None, use_errno=True)
        self.descriptor = self.libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK)
        self.rung: asyncio.Future[None] | None = None
        asyncio.get_running_loop().add_reader(self.descriptor, self._ring)

    def _ring(self) -> None:
        os.read(self.descriptor, 8)
        self.rung.set_result(None)

    async def until(self, due: float) -> None:
        self.rung = asyncio.get_running_loop().create_future()
        seconds = int(due)
        setting = (ctypes.c_long * 4)(0, 0, seconds, int((due - seconds) * 1e9))
        self.libc.timerfd_settime(self.descriptor, 1, setting, None)  # 1: at that instant, which may be over
        await self.rung


def on_loop(peer: Peer, coroutine):
    if peer.uvloop:
        import uvloop

        return uvloop.run(coroutine)
    return asyncio.run(coroutine)


# ---------------------------------------------------------------------------------------------------------- the working side


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def tree(pid: int) -> list[int]:
    """The process, and all that it and its children have started."""
    found = [pid]
    for task in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{task}/children") as file:
            for child in file.read().split():
                found += tree(int(child))
    return found


def memory_of(pids: list[int]) -> dict[str, int]:
    """Bytes that these processes have together, counted in three ways."""
    sums = {"rss": 0, "pss": 0, "uss": 0}
    ways = {"Rss": "rss", "Pss": "pss", "Private_Clean": "uss", "Private_Dirty": "uss"}
    for pid in pids:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            for line in file:
                way = ways.get(line.split(":")[0])
                if way is not None:
                    sums[way] += int(line.split()[1]) * 1024
    return sums


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


def after_warm(handle):
    """A handler that says that it is ready, and hands over the instants that bodies carry."""
    ready = False

    def first(body: str) -> None:
        nonlocal ready
        now = time.perf_counter()
        if not body.startswith(WARM):
            handle(now, float(body.rstrip("x")))
        elif not ready:
            ready = True
            print("ready", flush=True)

    return first


def picked_up(count: int):
    """A handler that measures how long its messages have been on their way."""
    took: list[float] = []

    def handle(now: float, sent: float) -> None:
        took.append(now - sent)
        if len(took) == count:
            took.sort()
            tell(p50=took[count // 2], p99=took[count * 99 // 100], p999=took[count * 999 // 1000])

    return after_warm(handle)


def carried(count: int):
    """As :func:`drained`, of the messages after the warm-up."""
    handle = drained(count)
    return after_warm(lambda now, sent: handle(""))


def ready_after(count: int):
    """A handler that says when it has been run ``count`` times."""
    number = itertools.count(1)

    def handle(body: str) -> None:
        if next(number) == count:
            print("ready", flush=True)

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


HANDLERS = {
    "drain": drained,
    "drain-default": drained,
    "through": carried,
    "latency": picked_up,
    "pickup": picked_up,
    "memory": remembered,
    "tree": ready_after,
}
AT_DEFAULTS = ("drain-default", "tree")
TO_A_RUNNING_WORKER = {"pickup": "spaced", "through": "at_rate", "latency": "at_rate"}
"""The verbs whose messages are sent while the worker runs, and what sends them."""


def work(peer, verb: str, count: int, concurrency: int) -> None:
    handle = HANDLERS[verb](count)
    working = peer.work_by_default(handle) if verb in AT_DEFAULTS else peer.work(handle, concurrency)
    if not isinstance(peer, Blocking):
        on_loop(peer, working)


def paced(arguments: argparse.Namespace) -> list[float]:
    """The rate, for the verbs that have one."""
    return {"latency": [arguments.rate], "through": [float("inf")]}.get(arguments.verb, [])


def beside_a_worker(side, arguments: argparse.Namespace) -> str:
    """Have a worker process do it; the line of its result."""
    verb, count = arguments.verb, arguments.count
    if verb not in TO_A_RUNNING_WORKER:
        side.run("fill", count + arguments.behind)
    command = [sys.executable, sys.argv[0], f"work-{verb}", arguments.url, str(count), str(arguments.concurrency)]
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
        if verb == "tree":
            ready.wait()
            time.sleep(IDLE)
            return json.dumps(memory_of(tree(worker.pid)))
        if verb in TO_A_RUNNING_WORKER:
            side.run(TO_A_RUNNING_WORKER[verb], count, ready, *paced(arguments))
        worker.wait()
        listener.join()
    finally:
        worker.kill()
        worker.wait()
    return result[0] if result else ""


def beside_ourselves(side: AsyncSide, arguments: argparse.Namespace) -> None:
    """Have a worker on this event loop do it, which prints the result and ends the process."""
    verb, count = arguments.verb, arguments.count
    handle = HANDLERS[verb](count)
    ready = threading.Event()
    ready.set()

    async def whole() -> None:
        await side.peer.open()
        working = asyncio.create_task(side.peer.work(handle, arguments.concurrency))
        await getattr(side, TO_A_RUNNING_WORKER[verb])(count, ready, *paced(arguments))
        await working

    on_loop(side.peer, whole())


def verbs_of(kind: type) -> list[str]:
    bulk = ["send-bulk"] if kind.send_many is not None else []
    default = ["drain-default"] if kind.default is not None else []
    sends = ["send-one", "send-100", *bulk]
    return [*sends, "drain", *default, "through", "latency", "pickup", "memory", *(["tree"] if default else [])]


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("verb")
    parser.add_argument("url")
    parser.add_argument("count", type=int)
    parser.add_argument("concurrency", type=int, nargs="?")
    parser.add_argument("--behind", type=int, default=0)
    parser.add_argument("--rate", type=float, default=0.0)
    parser.add_argument("--size", type=int, default=len(BODY))
    return parser.parse_args()


def main(kind: type) -> None:
    """The script of the peer ``kind``."""
    global BODY
    arguments = parsed()
    verb, count = arguments.verb, arguments.count
    arguments.concurrency = arguments.concurrency or kind.concurrency[0]
    BODY = "x" * arguments.size
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
    peer = kind(arguments.url)
    if verb.startswith("work-"):
        work(peer, verb.removeprefix("work-"), count, arguments.concurrency)
        return
    side = BlockingSide(peer) if isinstance(peer, Blocking) else AsyncSide(peer)
    if verb.startswith("send-"):
        what = {"send-one": "one", "send-100": "hundred", "send-bulk": "bulk"}[verb]
        print(json.dumps({"rate": side.run(what, count)}))
    elif arguments.url.startswith("memory:"):
        beside_ourselves(side, arguments)
    else:
        print(beside_a_worker(side, arguments), end="")
