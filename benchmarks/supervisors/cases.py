"""What each supervisor is put through. A case runs one of them in isolation and returns a cell for each of its lines."""

from __future__ import annotations

import re
import signal
import statistics
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from common import MIB, mebibytes, milliseconds, quick
from supervisors import tree
from supervisors.running import PATIENCE, Running, Service, running
from supervisors.systems import Circus, Honcho

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from supervisors.systems import System

MANY = 20 if quick() else 200
STOPPED = 10 if quick() else 50
IDLE = 3.0 if quick() else 20.0
KILLS = 5 if quick() else 20
WINDOW = 4.0 if quick() else 10.0
"""Seconds that a crash loop is watched."""
FLOOD_LINES = 10_000 if quick() else 500_000
"""Of 100 bytes, from each of two services."""
SETTLE = 2.0
"""Seconds after which a service counts as one that has run for a while (s6 and runit hold back a restart in the first)."""
LEFT = {"100001": "in its group", "100002": "setsid", "100003": "forked twice"}


@dataclass(frozen=True)
class Cell:
    """One figure of one system: how it reads, and its number where it has one."""

    text: str
    value: float | None = None


def seconds(value: float) -> str:
    return f"{value:.2f} s" if value < 10 else f"{value:.1f} s"


def numbered(count: int, **said: object) -> list[Service]:
    return [Service(f"s{number:03}", **said) for number in range(count)]


def many(system: System) -> dict[str, Cell]:
    """Many small services: until they run, what they cost the supervisor while they do nothing."""
    with running(system, numbered(MANY)) as run:
        run.wait_started()
        begun = run.events.seen[-1].at - run.began
        run.wait_running()
        told = time.monotonic() - run.began
        time.sleep(5.0)
        own = run.own()
        resident, shared = sum(map(tree.memory, own)), sum(map(tree.proportional, own))
        before, began = sum(map(tree.nanoseconds, own)), time.monotonic()
        time.sleep(IDLE)
        share = (sum(map(tree.nanoseconds, own)) - before) / 1e9 / (time.monotonic() - began)
        if len(run.served()) < MANY:
            raise TimeoutError(f"{len(run.served())} of {MANY} run")
    return {
        f"{MANY} services: last program begun": Cell(seconds(begun), begun),
        f"{MANY} services: said to be running": Cell(seconds(told) if system.tells else "tells nothing", told),
        f"{MANY} services: memory (RSS)": Cell(f"{mebibytes(resident)}, {len(own)} processes", resident / MIB),
        f"{MANY} services: memory (PSS)": Cell(mebibytes(shared), shared / MIB),
        f"{MANY} idle services: CPU": Cell(f"{share:.2%} of a core", share),
    }


def latency(system: System) -> dict[str, Cell]:
    """SIGKILL of a service that has run for a while, until the first statement of its replacement."""
    line = "SIGKILL to replacement"
    if isinstance(system, Honcho):
        return {line: Cell("restarts nothing")}
    if isinstance(system, Circus):
        system = Circus(check_delay=0.1)
    taken = []
    with running(system, numbered(10, endless=True)) as run:
        run.wait_running()
        time.sleep(SETTLE)
        for number in range(KILLS):
            name = run.names[number % len(run.names)]
            there = run.events.last("start", name)
            assert there is not None
            began = time.monotonic()
            tree.os.kill(there.pid, signal.SIGKILL)
            run.events.wait(lambda name=name, there=there: run.events.last("start", name) != there)
            taken.append(run.events.last("start", name).at - began)
            time.sleep(0.3)
    note = ", looks each 0.1 s (by default 5 s)" if isinstance(system, Circus) else ""
    middle = statistics.median(taken)
    return {line: Cell(f"{milliseconds(middle)}, at most {milliseconds(max(taken))}{note}", middle)}


def stop(system: System) -> dict[str, Cell]:
    """A stop of idle services, until the last process has ended, the supervisor among them."""
    with running(system, numbered(STOPPED)) as run:
        run.wait_running()
        time.sleep(SETTLE)
        taken = run.stop()
    return {f"stop of {STOPPED}": Cell(seconds(taken), taken)}


def crash(system: System) -> dict[str, Cell]:
    return {f"crash loop, {WINDOW:.0f} s, as by default": crashing(system, endless=False)}


def endless(system: System) -> dict[str, Cell]:
    return {f"crash loop, {WINDOW:.0f} s, without end or delay": crashing(system, endless=True)}


def crashing(system: System, *, endless: bool) -> Cell:
    """A service that ends at once, beside one that is well."""
    if isinstance(system, Circus) and endless:
        system = Circus(check_delay=0.1)
    with running(system, [Service("bad", "crash", endless=endless), Service("good")]) as run:
        run.wait_started(["bad"])
        before = run.processor_seconds()
        time.sleep(WINDOW)
        starts = run.events.count("start", "bad")
        if run.process.poll() is not None:
            return Cell(f"{starts} start(s), then it ends all", starts)
        share = (run.processor_seconds() - before) / WINDOW
        answers = f"answers in {milliseconds(run.answer())}" if system.answers else "no status command"
        others = {0: "the other never begun", 1: "the other untouched"}.get(
            run.events.count("start", "good"), "disturbed"
        )
        return Cell(f"{starts} starts, {share:.1%} CPU, {answers}, {others}", starts)


def stubborn(system: System) -> dict[str, Cell]:
    """A service that ignores SIGTERM, with two seconds to end."""
    with running(system, [Service("stubborn", "stubborn", patience=2), Service("good", patience=2)]) as run:
        run.wait_running()
        time.sleep(SETTLE)
        try:
            taken = run.stop(20.0)
        except TimeoutError:
            left = [process.command[2:4] for process in run.served()]
            cell = Cell(f"after 20 s left: {left or 'only the supervisor'}")
        else:
            cell = Cell(f"SIGKILL, gone after {seconds(taken)}", taken)
    return {"ignores SIGTERM (2 s allowed)": cell}


def family(system: System) -> dict[str, Cell]:
    """A service with grandchildren and processes that have left its session, two seconds after the stop."""
    with running(system, [Service("family", "family", patience=2)]) as run:
        run.wait_running()
        time.sleep(SETTLE)
        ended = ""
        try:
            run.stop(10.0, own=True)
        except TimeoutError:
            ended = ", and it has not ended after 10 s"
        time.sleep(2.0)
        left = [LEFT[process.command[1]] for process in run.served() if process.command[0] == "sleep"]
    return {"grandchildren after a stop": Cell((f"left: {', '.join(sorted(left))}" if left else "none left") + ended)}


def killed(system: System) -> dict[str, Cell]:
    """SIGKILL of the supervisor, and what runs five seconds later."""
    with running(system, [Service("family", "family", patience=2), Service("one"), Service("two")]) as run:
        run.wait_running()
        time.sleep(SETTLE)
        run.process.kill()
        time.sleep(5.0)
        left = tree.alive()
        services = sum(process.is_service for process in left)
        own = [process for process in left if not process.is_service]
        kinds = Counter(process.command[0].rpartition("/")[2] for process in own if process.command)
    own_text = "".join(f", {count} {name}" for name, count in kinds.items())
    text = f"{services} of 6 processes left{own_text}" if left else "nothing left"
    return {"supervisor killed, after 5 s": Cell(text)}


def order(system: System) -> dict[str, Cell]:
    """Three services, each needs the next ready; each takes a second to be ready and half of one to end."""
    services = [
        Service("aa", "ordered", after="bb"),
        Service("bb", "ordered", after="cc"),
        Service("cc", "ordered"),
    ]
    with running(system, services) as run:
        run.events.wait(lambda: run.events.count("ready") >= 3)
        time.sleep(SETTLE)
        run.stop(20.0)
        time.sleep(0.2)
        told = {(event.service, event.what): event.at for event in reversed(run.events.seen)}
    ready = all(told[after, "ready"] < told[one, "start"] for one, after in (("aa", "bb"), ("bb", "cc")))
    ended = all(
        ("cc", "end") in told and told[one, "end"] < told[after, "term"] for one, after in (("aa", "bb"), ("bb", "cc"))
    )
    begun = "each when the other is ready" if ready else "waits for none to be ready"
    return {"start order": Cell(begun), "stop order": Cell("reverse, one after the other" if ended else "not kept")}


def flood(system: System) -> dict[str, Cell]:
    """Two services that write 50 MB each as fast as they can, and end right after the last line."""
    services = [Service(name, "flood", (str(FLOOD_LINES),), again=False, logged=True) for name in ("a", "b")]
    with running(system, services) as run:
        run.wait_started()
        began = grown = time.monotonic()
        most, answers, size = 0, "no status command", -1
        while time.monotonic() - grown < SETTLE:
            if time.monotonic() - began > 4 * PATIENCE:
                raise TimeoutError(f"not within {4 * PATIENCE:.0f} s")
            most = max(most, sum(tree.memory(pid, "VmHWM") for pid in run.own()))
            time.sleep(0.1)
            if system.answers and answers == "no status command":
                answers = f"answered in {milliseconds(run.answer())}"
            before, size = size, sum(path.stat().st_size for path in files(run) if path.exists())
            if size != before or (run.events.count("end") < 2 and run.process.poll() is None):
                grown = time.monotonic()
        taken = grown - began
        lost, damaged = checked(files(run))
        cut = run.events.count("end") < 2
    whole = "all lines whole" if not lost and not damaged else f"{lost} lines lost, {damaged} damaged"
    whole += ", ended with the first of the two" if cut else ""
    total = 2 * FLOOD_LINES * 100 / 1e6
    return {
        f"flood of {total:.0f} MB": Cell(f"{whole}, {total / taken:.0f} MB/s"),
        f"flood of {total:.0f} MB: memory, status": Cell(f"at most {mebibytes(most)}, {answers}", most / MIB),
    }


def files(run: Running) -> list[Path]:
    """The files with the output of all services, each once."""
    return list(dict.fromkeys(path for name in run.names for path in run.system.output(run.home, name)))


_LINE = re.compile(rb"flood-([ab]) (\d{8}) x{78} end")


def checked(paths: list[Path]) -> tuple[int, int]:
    """How many lines of the flood are missing, and how many are not whole, not alone in their line, or there again."""
    damaged = 0
    seen: set[tuple[bytes, int]] = set()
    for path in paths:
        if not path.exists():
            continue
        with path.open("rb") as lines:
            for line in lines:
                if b"xxxx" not in line and b"flood-" not in line:
                    continue
                found = _LINE.search(line)
                if found is None or line.count(b"flood-") != 1 or (found[1], int(found[2])) in seen:
                    damaged += 1
                else:
                    seen.add((found[1], int(found[2])))
    return 2 * FLOOD_LINES - len(seen), damaged


CASES: dict[str, Callable[[System], dict[str, Cell]]] = {
    "many": many,
    "latency": latency,
    "stop": stop,
    "crash": crash,
    "endless": endless,
    "stubborn": stubborn,
    "family": family,
    "killed": killed,
    "order": order,
    "flood": flood,
}
