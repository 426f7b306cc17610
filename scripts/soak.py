"""Drives offload pools and loop threads hard, again and again, and fails where a run hangs or anything is left behind.

    RUNS=20 CONCURRENCY=8 DEADLINE_MS=100 TIMEOUT_PER_RUN=30 python scripts/soak.py

In each run calls that must time out and calls that mostly succeed meet in a pool of threads and in one of processes, and a
``LoopThread`` is stopped by several threads while others post to it. Exit status: 0 where all is well, 1 where something was
left, a call or a callback did what it must not, or a run hung: then all stacks are printed.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import resource
import sys
import threading
from collections import Counter
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import anyio

from mainspring import LoopThread, OffloadPool
from mainspring.core.state_machine import LoopThreadState
from mainspring.errors import OffloadTimeoutError
from mainspring.runtime.scope import first_error

BACKENDS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("asyncio", "asyncio", {"use_uvloop": False}),
    ("uvloop", "asyncio", {"use_uvloop": True}),
    ("trio", "trio", {}),
)
CALLS_EACH = 5
"""Calls that each of the concurrent tasks makes of a pool in one run."""
NEVER = 86_400.0
"""Seconds that a call takes which must time out: where it does not, the run hangs, which is noticed."""
QUICK_WITHIN = 20.0
"""Seconds that a quick call has, which may have to wait for several processes to be replaced."""
SETTLE_WITHIN = 20.0
"""Seconds that idle threads get to end: those of trio wait ten for another job."""
MEMORY_NOISE = 2.0
"""MiB by which a process may grow without a leak: allocators settle."""


class Wrong(Exception):  # noqa: N818 - a verdict
    """Something did what it must not."""


@dataclass(frozen=True)
class Settings:
    """What the environment says."""

    runs: int
    concurrency: int
    deadline: float
    timeout_per_run: float

    @classmethod
    def of_environment(cls) -> Settings:
        """Read them; raises SystemExit, with a line that says what is wrong."""
        found = {}
        for name, default in (("RUNS", 20), ("CONCURRENCY", 8), ("DEADLINE_MS", 100), ("TIMEOUT_PER_RUN", 30)):
            text = os.environ.get(name) or str(default)
            if not text.isdecimal() or not int(text):
                raise SystemExit(f"soak: {name} must be a whole number from 1, not {text!r}")
            found[name] = int(text)
        return cls(found["RUNS"], found["CONCURRENCY"], found["DEADLINE_MS"] / 1000, found["TIMEOUT_PER_RUN"])


@dataclass(frozen=True)
class Footprint:
    """What the process holds just now."""

    threads: int
    descriptors: int
    processes: int
    memory: float

    @classmethod
    def now(cls) -> Footprint:
        """Count it."""
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return cls(
            threads=threading.active_count(),
            descriptors=len(os.listdir("/proc/self/fd")),
            processes=sum(len((task / "children").read_text().split()) for task in Path("/proc/self/task").iterdir()),
            memory=pages * resource.getpagesize() / 2**20,
        )

    def beyond(self, before: Footprint) -> dict[str, float]:
        """What there is more of than before, by name; memory within the noise is none."""
        more = {field.name: getattr(self, field.name) - getattr(before, field.name) for field in fields(self)}
        more["memory"] = round(more["memory"], 1) if more["memory"] > MEMORY_NOISE else 0
        return {name: max(0, count) for name, count in more.items()}


def rest(seconds: float, until: threading.Event | None = None) -> None:
    """Block this thread, or this process."""
    (until or threading.Event()).wait(seconds)


# --------------------------------------------------------------------------------------------------------------- pools


async def must_time_out(pool: OffloadPool, deadline: float, seen: Counter[str]) -> None:
    """A call that does not end before it has timed out: a process is killed for that, and a thread told, a little later."""
    told = threading.Event()
    until = (told,) if pool.kind == "thread" else ()
    try:
        await pool.run(rest, NEVER, *until, timeout=deadline)
    except OffloadTimeoutError:
        seen["timed out as they had to"] += 1
        await anyio.sleep(min(deadline, 0.05))  # as late work
    else:
        raise Wrong(f"{pool.name}: a call that never ends has ended, within its deadline of {deadline:g} s or after it")
    finally:
        told.set()


async def mostly_succeeds(pool: OffloadPool, number: int, seen: Counter[str]) -> None:
    """A call that is quick, where it gets a worker in time."""
    try:
        if await pool.run(divmod, number, 2, timeout=QUICK_WITHIN) != divmod(number, 2):
            raise Wrong(f"{pool.name}: a call got what was not its own")
    except OffloadTimeoutError:
        seen["too slow to succeed"] += 1
    else:
        seen["succeeded"] += 1


async def calls(pool: OffloadPool, who: int, deadline: float, seen: Counter[str]) -> None:
    """Calls of both kinds in turn, which of them first depends on whose they are."""
    for number in range(who, who + CALLS_EACH):
        if number % 2:
            await must_time_out(pool, deadline, seen)
        else:
            await mostly_succeeds(pool, number, seen)


async def use_pool(pool: OffloadPool, settings: Settings, seen: Counter[str]) -> None:
    """Calls of both kinds at once."""
    async with pool:
        async with anyio.create_task_group() as tasks:
            for who in range(settings.concurrency):
                tasks.start_soon(calls, pool, who, settings.deadline, seen)
        await pool.wait_idle()
        await pool.wait_for_late()
        if pool.in_flight or pool.late or pool.queued:
            raise Wrong(f"{pool!r} has nothing to do, and says it has")


async def use_pools(settings: Settings, seen: Counter[str]) -> int:
    """A pool of each kind; how many tasks were left behind."""
    before = len(anyio.get_running_tasks())
    for kind, workers in (("thread", settings.concurrency), ("process", 2)):
        await use_pool(OffloadPool(kind, workers=workers), settings, seen)  # type: ignore[arg-type]
    return len(anyio.get_running_tasks()) - before


# --------------------------------------------------------------------------------------------------------- loop threads


class Race:
    """Threads that post to a loop thread until they are refused, while others stop it."""

    def __init__(self, backend: str, options: dict[str, Any]) -> None:
        self.thread = LoopThread(backend=backend, backend_options=options)
        self.accepted: Counter[int] = Counter()
        self.executed: Counter[int] = Counter()

    def post(self, who: int) -> None:
        """Post until it says no, slower than the event loop can follow: a race needs no backlog."""
        while self.thread.post(lambda: self.executed.update([who])):
            self.accepted[who] += 1
            rest(0.0002)

    def run(self, concurrency: int) -> int:
        """The whole race; how many callbacks were accepted."""
        self.thread.start()
        posters = [threading.Thread(target=self.post, args=(who,)) for who in range(concurrency)]
        for poster in posters:
            poster.start()
        rest(0.01)
        stoppers = [threading.Thread(target=self.thread.stop) for _ in range(2)]
        for stopper in stoppers:
            stopper.start()
        for thread in (*posters, *stoppers):
            thread.join()
        if self.thread.state is not LoopThreadState.STOPPED:
            raise Wrong(f"{self.thread!r} was stopped, and says otherwise")
        if self.executed != self.accepted:
            raise Wrong(f"{self.thread!r} accepted {self.accepted.total()} callbacks, and did {self.executed.total()}")
        return self.accepted.total()


# ------------------------------------------------------------------------------------------------------------ the whole


def run(number: int, settings: Settings, seen: Counter[str]) -> int:
    """One run, on the backend whose turn it is; how many tasks were left behind."""
    _, backend, options = BACKENDS[number % len(BACKENDS)]
    faulthandler.dump_traceback_later(settings.timeout_per_run, exit=True)
    try:
        tasks = anyio.run(use_pools, settings, seen, backend=backend, backend_options=options)
        if seen["succeeded"] <= seen["too slow to succeed"]:
            raise Wrong(
                f"of the calls that mostly succeed {seen['succeeded']} did, and {seen['too slow to succeed']} did not within"
                f" {QUICK_WITHIN:g} s"
            )
        seen["posted to loop threads as they were stopped"] += Race(backend, options).run(settings.concurrency)
        return tasks
    finally:
        faulthandler.cancel_dump_traceback_later()


def left(before: Footprint) -> dict[str, float]:
    """What is left when idle threads have had their time to end."""
    for _ in range(int(SETTLE_WITHIN * 10)):
        more = Footprint.now().beyond(before)
        if not any(more.values()):
            break
        rest(0.1)
    return more


def soak(settings: Settings, seen: Counter[str]) -> dict[str, float]:
    """All the runs; what they left behind.

    :raises Wrong: something did what it must not.
    """
    for number in range(len(BACKENDS)):  # imports, thread-local data and allocators come to what they will be
        run(number, settings, Counter())
    before = replace(Footprint.now(), threads=1)  # the others only wait for another job, and are about to end
    tasks = sum(run(number, settings, seen) for number in range(settings.runs))
    return {"tasks": tasks, **left(before)}


def main() -> int:
    """Soak, and say how it went."""
    settings, seen = Settings.of_environment(), Counter[str]()
    try:
        more = soak(settings, seen)
    except* Wrong as errors:
        sys.stdout.write(f"soak: {first_error(errors)}\n")
        status = 1
    else:
        names = ", ".join(name for name, _, _ in BACKENDS)
        sys.stdout.write(f"soak: {settings.runs} runs in turn on {names}\n")
        sys.stdout.writelines(f"  {count:>9,} {what}\n" for what, count in sorted(seen.items()))
        sys.stdout.write("left behind: " + ", ".join(f"{count:g} {name}" for name, count in more.items()) + " (MiB)\n")
        status = 1 if any(more.values()) else 0
    return status


if __name__ == "__main__":
    sys.exit(main())
