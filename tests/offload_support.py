"""What tests of work in processes share: who is there, what it has said, and ways for processes to misbehave."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest


async def ended(pid: int) -> None:
    """Wait until there is no such process any more (or nothing but its exit status)."""
    with anyio.fail_after(60):
        while is_there(pid):
            await anyio.sleep(0.005)


def is_there(pid: int) -> bool:
    """True if there is such a process, and it has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # also if it ends between the opening and the reading
        return False


def workers() -> Iterator[int]:
    """The worker processes that this process has."""
    for task in Path("/proc/self/task").iterdir():
        try:
            pids = (task / "children").read_text().split()
        except (FileNotFoundError, ProcessLookupError):  # the thread has ended meanwhile
            continue
        for pid in pids:
            with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
                if b"offload/worker_main.py" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    yield int(pid)


async def told(path: Path) -> list[int]:
    """The numbers that a job has written into a file."""
    with anyio.fail_after(60):
        while not (path.exists() and (words := path.read_text().split())):
            await anyio.sleep(0.005)
    return [int(word) for word in words]


def start_workers_by(monkeypatch: pytest.MonkeyPatch, program: Path, text: str) -> None:
    """Have a script take the place of Python where a worker is started. ``PYTHON`` in it stands for the real one."""
    program.write_text(text.replace("PYTHON", sys.executable))
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))


class HeldStart:
    """Worker processes that write their numbers into ``path``, and go on with their start when they are let."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self._gate = folder / "starting", folder / "gate"
        os.mkfifo(self._gate)
        start_workers_by(
            monkeypatch,
            folder / "held_python",
            f"#!PYTHON -IS\n"
            f"import os, signal, sys\n"
            f"signal.alarm(120)\n"  # it outlives no test that was killed
            f"open({str(self.path)!r}, 'a').write(f'{{os.getpid()}} ')\n"
            f"open({str(self._gate)!r}).read()\n"
            f"signal.alarm(0)\n"
            f"os.execv('PYTHON', ['PYTHON', *sys.argv[1:]])\n",
        )

    async def begun(self) -> int:
        """Wait until one is starting: its number."""
        (pid,) = await told(self.path)
        return pid

    def let_go(self) -> None:
        """Let it start."""
        self._gate.write_text("")  # waits for the reader


@contextmanager
def unkillable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No signal of this process reaches another, as if the kernel held that one in a call."""
    with monkeypatch.context() as patch:
        for module, call in ((os, "kill"), (os, "killpg"), (signal, "pidfd_send_signal")):
            patch.setattr(module, call, lambda *_: None)
        yield
