"""Counts the way of one message through the package: which of its files and functions are entered from ``send`` to ``ack``.

``python scripts/message_way.py [--list] [--check] [BACKEND ...]``. A loop with one slot waits for a message. One is sent,
handled and acknowledged, and the loop waits for the next: each function of the package that is entered between counts once,
on any thread, and so does each file. Python 3.11 has a function for each comprehension, later versions have not. The first
messages warm the caches and are not counted. Timers that fire add functions, so the shortest of many ways is reported.

The servers are those of the tests: MAINSPRING_REDIS_URL, MAINSPRING_POSTGRES_URL and MAINSPRING_NATS_URL name them, else
a server of this machine, else one that is started. A backend without a server is skipped. ``--list`` names the functions in
the order of their first entry. ``--check`` fails where a goal is missed.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
import threading
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import pytest

import mainspring

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

import servers
from postgres_support import drop_schema, new_schema
from stores import KINDS, store_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

PACKAGE = f"{Path(mainspring.__file__).parent}{os.sep}"
WARM_UP = 5
RUNS = 25
LOOK_AGAIN = 0.002
"""Seconds between two looks at whether the loop waits for the next message."""
PATIENCE = 30.0
"""Seconds within which it does."""


@dataclass(frozen=True)
class Goal:
    """At most this number of files, and at most 0.6 of the functions of before. Both are counted on the event loop's thread."""

    files: int
    functions_before: int

    @property
    def functions(self) -> int:
        return int(0.6 * self.functions_before)


GOALS = {
    "memory": Goal(14, 83),
    "sqlite": Goal(17, 103),
    "redis": Goal(19, 154),
    "postgres": Goal(19, 154),
}


@dataclass(frozen=True)
class Function:
    """A function of the package: its file below the package, its line and its name."""

    file: str
    line: int
    name: str


@dataclass
class Way:
    """The functions that were entered, in the order of their first entry, and the threads that entered each."""

    entered: dict[Function, set[int]] = field(default_factory=dict)

    def functions(self, thread: int | None = None) -> int:
        """Count the functions that ``thread`` entered; without it, the functions that any thread entered."""
        return len(self._on(thread))

    def files(self, thread: int | None = None) -> int:
        """Count their files."""
        return len({function.file for function in self._on(thread)})

    def _on(self, thread: int | None) -> list[Function]:
        return [function for function, threads in self.entered.items() if thread is None or thread in threads]


class Recorder:
    """Notes each entry of a function of the package on the threads that are watched."""

    def __init__(self) -> None:
        self.way = Way()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        """Take an event of the profiler: a function begins, or continues behind an ``await``."""
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            function = Function(code.co_filename.removeprefix(PACKAGE), code.co_firstlineno, code.co_qualname)
            self.way.entered.setdefault(function, set()).add(threading.get_ident())

    @contextmanager
    def watching_new_threads(self) -> Iterator[None]:
        """Watch each thread that is started meanwhile."""
        threading.setprofile(self)
        try:
            yield
        finally:
            threading.setprofile(None)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch this thread."""
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)


async def ways(url: str, recorder: Recorder, runs: int) -> list[Way]:
    """Send messages through the mailbox at ``url``, one after the other; return the ways of the last ``runs``."""

    async def handle(body: int) -> None:
        pass

    async def settle(acknowledged: int) -> None:
        """Wait until as many messages are acknowledged and the loop waits for the next."""
        with anyio.fail_after(PATIENCE):
            while loop.outcomes["acknowledged"] < acknowledged or not mailbox.statistics().waiting_receives:
                with recorder.watching():
                    await anyio.sleep(LOOK_AGAIN)

    found = []
    async with mainspring.open_mailbox(url, body=int) as mailbox, anyio.create_task_group() as tasks:
        loop = mainspring.MainLoop(mailbox, handle)
        tasks.start_soon(loop.run)
        await settle(0)
        for number in range(1, WARM_UP + runs + 1):
            recorder.way = Way()
            with recorder.watching():
                await mailbox.send(number)
            await settle(number)
            found.append(recorder.way)
        await loop.shutdown()
    return found[WARM_UP:]


@contextmanager
def mailbox_url(backend: str) -> Iterator[str]:
    """Make an empty mailbox and remove it afterwards. Raise ``pytest.skip.Exception`` if there is no server."""
    with ExitStack() as stack:
        given = {}
        if backend in ("redis", "postgres", "nats"):
            given[f"{backend}_url"] = stack.enter_context(getattr(servers, backend)())
        if backend == "postgres":
            given["store_schema"] = new_schema()
            stack.callback(drop_schema, given["postgres_url"], given["store_schema"])
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        yield stack.enter_context(store_of(backend, directory, given.__getitem__)).url()


def measured(backend: str, runs: int = RUNS) -> Way:
    """Return the shortest of the measured ways through this backend."""
    recorder = Recorder()
    with mailbox_url(backend) as url, recorder.watching_new_threads():
        return min(anyio.run(ways, url, recorder, runs), key=Way.functions)


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def report(backend: str, way: Way) -> bool:
    """Print the figures of a backend beside its goals; True if it reaches them."""
    loop = threading.get_ident()
    files, functions, goal = way.files(loop), way.functions(loop), GOALS.get(backend)
    line = f"{backend:<9} {files:>3} files"
    line += f" (goal {goal.files:>2})" if goal else " " * 10
    line += f"  {functions:>3} functions"
    line += f" (goal {goal.functions:>2})" if goal else " " * 10
    if way.functions() != functions:
        line += f"  with other threads {way.files()} files, {way.functions()} functions"
    say(line)
    return goal is None or (files <= goal.files and functions <= goal.functions)


def main() -> int:
    """Measure the backends that were asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("backends", nargs="*", metavar="BACKEND", help=f"one of {', '.join(KINDS)}; all by default")
    parser.add_argument("--list", action="store_true", help="name the functions, in the order of their first entry")
    parser.add_argument("--check", action="store_true", help="fail where a goal is missed")
    options = parser.parse_args()
    if not set(options.backends) <= set(KINDS):
        parser.error(f"there are the backends {', '.join(KINDS)}")
    os.environ["MAINSPRING_REQUIRE_SERVERS"] = "0"
    logging.disable()
    reached = True
    for backend in options.backends or KINDS:
        try:
            way = measured(backend)
        except pytest.skip.Exception as skipped:
            say(f"{backend:<9} skipped: {skipped}")
            continue
        reached &= report(backend, way)
        if options.list:
            for function, threads in way.entered.items():
                elsewhere = "" if threading.get_ident() in threads else "  (another thread)"
                say(f"    {function.file}:{function.line} {function.name}{elsewhere}")
    return 1 if options.check and not reached else 0


if __name__ == "__main__":
    sys.exit(main())
