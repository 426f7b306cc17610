"""Commands as processes: started, listened to, signalled, and never left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from warm_commands import LONGEST, warm_commands

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

PATIENCE = 60.0
"""Seconds after which something that should have happened counts as not happening; far above what it takes."""

warm = True
"""Whether commands are forked from a process that has imported the package."""
MAINSPRING = [sys.executable, "-m", "mainspring"]


def run(*arguments: str, cwd: Path, stdin: str | None = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """One command from start to end; in the quick run one that need not be imported, if it gets nothing special."""
    if not environment and stdin is not None and len(stdin) < LONGEST and warm:
        return warm_commands().run(arguments, cwd=cwd, stdin=stdin, timeout=PATIENCE)
    return subprocess.run(
        [*MAINSPRING, *arguments],
        cwd=cwd,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env={**os.environ, **environment},
        check=False,
    )


class Command:
    """A command that runs in the background; what it writes to standard error can be waited for."""

    def __init__(self, *arguments: str, cwd: Path, **environment: str) -> None:
        self._mark = f"CLI_TEST={os.urandom(8).hex()}"
        name, _, value = self._mark.partition("=")
        self.process = subprocess.Popen(
            [*MAINSPRING, *arguments],
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, **environment, name: value},
        )
        self.lines: list[str] = []
        self._next = 0
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._news:
                self.lines.append(line.rstrip("\n"))
                self._news.notify_all()
        with self._news:
            self.lines.append("<end>")
            self._news.notify_all()

    @property
    def text(self) -> str:
        """Everything it wrote to standard error so far."""
        return "\n".join(self.lines)

    def expect(self, pattern: str) -> re.Match[str]:
        """Wait for a line, after those expected before, that the pattern is found in."""
        deadline = time.monotonic() + PATIENCE
        with self._news:
            while True:
                for index in range(self._next, len(self.lines)):
                    if found := re.search(pattern, self.lines[index]):
                        self._next = index + 1
                        return found
                left = deadline - time.monotonic()
                if left <= 0 or self.lines[-1:] == ["<end>"]:
                    raise AssertionError(f"no line matches {pattern!r} in:\n{self.text}")
                self._news.wait(left)

    def send(self, signum: int) -> None:
        """Send it a signal."""
        self.process.send_signal(signum)

    def wait(self) -> int:
        """Its exit status; all it wrote has been read then."""
        status = self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        return status

    def close(self) -> None:
        """Leave nothing behind: where the test has failed, not even what the command has left behind."""
        self.process.kill()
        for pid in processes_with(self._mark):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()


@contextmanager
def started(*arguments: str, cwd: Path, **environment: str) -> Iterator[Command]:
    """A command in the background for the length of a block."""
    command = Command(*arguments, cwd=cwd, **environment)
    try:
        yield command
    finally:
        command.close()


def wait_until(holds: Callable[[], bool], otherwise: str = "it did not happen") -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.02)


def wait_until_gone(pid: int) -> None:
    """Wait until there is no such process, or only what is left of it until its parent looks."""
    wait_until(lambda: not alive(pid), f"process {pid} is still there")


def alive(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in {"Z", "X"}
    except (FileNotFoundError, ProcessLookupError):
        return False


def processes_with(variable: str) -> list[int]:
    """The living processes that have this text in their environment."""
    found = []
    for entry in os.listdir("/proc"):
        with suppress(OSError):
            if entry.isdigit():
                with open(f"/proc/{entry}/environ", "rb") as environ:
                    if variable.encode() in environ.read() and alive(int(entry)):
                        found.append(int(entry))
    return found


def only_line(text: str) -> str:
    """The one line of a text that has to be one line."""
    lines = text.splitlines()
    assert len(lines) == 1, text
    return lines[0]
