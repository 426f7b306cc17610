"""The border between supervision and the operating system: what a spawner is asked for, and what it tells.

The real spawner is ``services.spawner``. ``testing`` has a simulated one for virtual time. Both keep this promise: all that a
spawned process starts can be killed, and :meth:`SpawnedProcess.wait_empty` returns only when nothing of it is left.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from mainspring.errors import MainspringError
from mainspring.services.spec import Resources

if TYPE_CHECKING:
    from collections.abc import Mapping


class SpawnError(MainspringError):
    """A process could not be started: no such program, no permission, no memory.

    The message names the program and the cause.
    """

    fault = "environment"


USER_VARIABLES = ("HOME", "USER", "LOGNAME")
"""Environment variables that say whose process it is. A process of another user has those of that user."""


@dataclass(frozen=True, slots=True)
class Launch:
    """What a process is started with. ``service`` and ``replica`` are its tag: they name it in the tree of processes.

    ``descriptors``: open descriptors of the caller that the process gets as 3, 4, and so on. ``environment`` is whole. The
    spawner adds only ``NOTIFY_SOCKET`` where ``notify`` is True, ``LISTEN_PID`` where ``LISTEN_FDS`` is in it,
    ``MAINSPRING_INSTANCE``, by which it knows what belongs to the process, and for a ``user`` those of ``USER_VARIABLES`` that
    are missing. ``stop_timeout``: seconds from SIGTERM to SIGKILL if the supervisor dies. ``command[0]`` is looked for in
    ``PATH`` of ``environment``; with a ``/`` in it, it is a path, below ``directory`` if it is relative. ``directory``: that
    of the supervisor by default.
    """

    service: str
    replica: int
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    directory: str | None = None
    user: str | None = None
    resources: Resources = field(default_factory=Resources)
    descriptors: tuple[int, ...] = ()
    notify: bool = True
    stop_timeout: float = 20.0


class ProcessEnd(NamedTuple):
    """How a process ended: ``returncode`` is the exit status, or minus the signal.

    ``limit``: the limit that ended it, if known.
    """

    returncode: int
    limit: str | None = None

    @property
    def status(self) -> int:
        """The exit status as a shell shows it: 128 + n if signal n killed it."""
        return 128 - self.returncode if self.returncode < 0 else self.returncode

    @property
    def ending(self) -> str:
        """The end in words, as ``"exit status 1"`` or ``"killed by SIGKILL (memory limit)"``."""
        said = (
            f"exit status {self.returncode}" if self.returncode >= 0 else f"killed by {_signal_name(-self.returncode)}"
        )
        return said if self.limit is None else f"{said} ({self.limit})"


def _signal_name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:  # a real-time signal
        return f"signal {signum}"


Stream = Literal["stdout", "stderr"]


class ProcessListener(Protocol):
    """Is told what a process says. Called in the event loop, in the order in which it was said; it must not wait."""

    def on_line(self, stream: Stream, line: str) -> None:
        """Take a line of output, without its end. Bytes that are no UTF-8 are replaced. A very long line comes in parts."""

    def on_notify(self, news: Mapping[str, str]) -> None:
        """Take a notification as ``sd_notify`` sends it: ``{"READY": "1", "STATUS": "…"}``."""


class SpawnedProcess(Protocol):
    """A process that was started, and everything that it has started since."""

    @property
    def pid(self) -> int:
        """Its process id, which is the id of its session and of its process group too."""

    @property
    def memory(self) -> int | None:
        """Resident bytes of the process; None where it has ended."""

    @property
    def limited_by(self) -> Mapping[str, str]:
        """What holds each limit that was asked for: ``"cgroup"`` (the whole replica) or ``"rlimit"`` (each process)."""

    async def wait(self) -> ProcessEnd:
        """Wait until the process has ended, and all that it wrote until then was told. Callable by several, and again."""

    async def wait_empty(self) -> None:
        """Wait until nothing is left of it: neither the process, nor its group, nor what left its group."""

    def send_signal(self, signum: int) -> None:
        """Send a signal to the process. Where it has ended, send it to all that is left of it."""

    def kill(self) -> None:
        """Send SIGKILL to all that is left of it, and to what appears until nothing is left."""


class Spawner(Protocol):
    """Starts processes. An async context manager: leaving it kills all that it has started."""

    async def __aenter__(self) -> Spawner: ...

    async def __aexit__(self, *exc: object) -> bool | None: ...

    async def spawn(self, launch: Launch, listener: ProcessListener) -> SpawnedProcess:
        """Start a process in a session of its own. Return once its program runs.

        :raises SpawnError: it cannot be started. Cancelled, what was started is killed.
        """
