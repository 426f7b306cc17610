"""One supervisor at work in a directory of its own: what its services tell, what it takes, how it is stopped."""

from __future__ import annotations

import os
import queue
import shutil
import subprocess
import tempfile
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from supervisors import tree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from supervisors.systems import System

PATIENCE = 60.0
"""Seconds that anything may take before its figure is given up."""


@dataclass(frozen=True)
class Service:
    """A service as each system's configuration says it."""

    name: str
    program: str = "small"
    arguments: tuple[str, ...] = ()
    again: bool = True
    """Started again after each end; else it runs once."""
    endless: bool = False
    """Started again without end and without delay, as far as that can be said."""
    after: str | None = None
    """The service that must be ready before this one starts."""
    patience: int = 10
    """Seconds from SIGTERM to SIGKILL."""
    logged: bool = False
    """Its output matters."""

    def command(self, home: Path) -> list[str]:
        return ["/bin/sh", str(tree.PROGRAMS / f"{self.program}.sh"), self.name, str(home), *self.arguments]


@dataclass(frozen=True)
class Event:
    """What a service has said of itself, and when that was read here."""

    at: float
    service: str
    what: str
    pid: int


class Events:
    """What the services say through a FIFO, in order. Reaps what this process has inherited between the lines."""

    def __init__(self, home: Path) -> None:
        self.seen: list[Event] = []
        self.children: set[int] = set()
        """Children that are waited for elsewhere."""
        for name in ("events", "never"):
            os.mkfifo(home / name)
        self._fd = os.open(home / "events", os.O_RDWR | os.O_NONBLOCK)
        self._never = os.open(home / "never", os.O_RDWR)
        self._arrived: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def count(self, what: str, service: str | None = None) -> int:
        return sum(event.what == what and service in (None, event.service) for event in self.seen)

    def last(self, what: str, service: str) -> Event | None:
        return next((event for event in reversed(self.seen) if (event.what, event.service) == (what, service)), None)

    def wait(self, enough: Callable[[], bool], timeout: float = PATIENCE) -> None:
        """Wait for events until ``enough``. Raises TimeoutError."""
        deadline = time.monotonic() + timeout
        while not enough():
            try:
                self._arrived.get(timeout=max(deadline - time.monotonic(), 0))
            except queue.Empty:
                raise TimeoutError(f"not within {timeout:.0f} s") from None

    def close(self) -> None:
        self._closed = True
        self._thread.join()
        os.close(self._fd)
        os.close(self._never)

    def _read(self) -> None:
        waiting = tree.select.poll()
        waiting.register(self._fd, tree.select.POLLIN)
        rest, reaped = b"", 0.0
        while not self._closed:
            if waiting.poll(100):
                at = time.monotonic()
                *lines, rest = (rest + os.read(self._fd, 65536)).split(b"\n")
                for line in lines:
                    service, what, pid = line.decode().split()
                    self.seen.append(Event(at, service, what, int(pid)))
                self._arrived.put(None)
            if time.monotonic() - reaped > 0.2:
                tree.reap(self.children)
                reaped = time.monotonic()


class Running:
    """A supervisor that has been started with its services."""

    def __init__(self, system: System, home: Path, services: list[Service]) -> None:
        self.system, self.home, self.services = system, home, services
        self.events = Events(home)
        self.names = [service.name for service in services]
        self.began = time.monotonic()
        with (home / "out").open("wb") as out:
            self.process = subprocess.Popen(
                system.command(home), cwd=home, env=system.environment(home), stdin=subprocess.DEVNULL, stdout=out,
                stderr=out, start_new_session=True,
            )  # fmt: skip
        self.events.children.add(self.process.pid)

    def wait_started(self, names: list[str] | None = None, timeout: float = PATIENCE) -> None:
        """Wait until a program of each of these services (all) has begun."""
        wanted = set(self.names if names is None else names)
        self.events.wait(
            lambda: wanted <= {event.service for event in self.events.seen if event.what == "start"}, timeout
        )

    def wait_running(self, timeout: float = PATIENCE) -> None:
        """Wait until the system itself says that all services run, or if it cannot say, until all programs have begun."""
        self.wait_started(timeout=timeout)
        deadline = self.began + timeout
        while self.system.tells and not self.system.all_running(self.home, self.names):
            if time.monotonic() > deadline:
                raise TimeoutError(f"not within {timeout:.0f} s")
            time.sleep(0.05)

    def own(self) -> list[int]:
        """The processes of the supervisor itself."""
        there = [process for process in tree.below(self.process.pid) if not process.zombie]
        root = tree.read(self.process.pid)
        return [process.pid for process in [*([root] if root else []), *there] if not process.is_service]

    def served(self) -> list[tree.Process]:
        """The processes of its services, wherever they are now."""
        return [process for process in tree.alive() if process.is_service]

    def answer(self) -> float:
        """Seconds that the system's status command takes. Raises TimeoutError."""
        began = time.monotonic()
        try:
            self.system.status(self.home, self.names)
        except subprocess.TimeoutExpired:
            raise TimeoutError("no answer") from None
        return time.monotonic() - began

    def stop(self, timeout: float = PATIENCE, *, own: bool = False) -> float:
        """Stop all in the documented way. Return the seconds until the last process has ended.

        ``own``: the last of the supervisor's own. Raises TimeoutError.
        """
        ends = tree.Ends(self.own() if own else [process.pid for process in tree.alive()])
        began = time.monotonic()
        try:
            self.system.stop(self.process, self.home, self.services)
            if not ends.wait(timeout - (time.monotonic() - began)):
                raise TimeoutError(f"not within {timeout:.0f} s")
            return time.monotonic() - began
        finally:
            ends.close()

    def processor_seconds(self) -> float:
        """What the supervisor and all below it have used so far."""
        root = tree.read(self.process.pid)
        return sum(process.seconds for process in [*([root] if root else []), *tree.below(self.process.pid)])


@contextmanager
def running(system: System, services: list[Service]) -> Iterator[Running]:
    """A supervisor in a directory and session of its own. In the end each process below this one is killed."""
    home = Path(tempfile.mkdtemp(prefix="bench-"))
    run = None
    try:
        (home / "logs").mkdir()
        system.write(home, services)
        run = Running(system, home, services)
        yield run
    finally:
        tree.end_all()
        if run is not None:
            run.process.wait()
            run.events.close()
        tree.reap(())
        shutil.rmtree(home, ignore_errors=True)
