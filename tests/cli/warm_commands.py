"""Commands in forks of a process that has imported the package: an import takes most of a command's time.

The test's process starts this file as a program, once. It gets requests on its standard input, a socket: arguments, working
directory, and the three standard streams of a command. It forks, the child runs the command as ``python -m mainspring`` does,
and its exit status is sent back. What happens before and while the package is imported is not tested in this way.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import pkgutil
import socket
import subprocess
import sys
import tempfile
from contextlib import redirect_stderr
from functools import cache
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

LONGEST = 64_000
"""Bytes of a request; and of what a command is given to read, so that it fits into a pipe."""
MODULES = (
    "mainspring.group",
    "mainspring.mailbox.memory.mailbox",
    "mainspring.mailbox.sqlite.mailbox",
    "anyio._backends._asyncio",
    "anyio._backends._trio",
)

REFUSED = (["send", "memory://jobs", "1"], ["check", "no_such_module:group"])
"""Commands without effect: what they import as they run is imported, too."""


class WarmCommands:
    """A process to fork commands from."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen([sys.executable, __file__], stdin=theirs, start_new_session=True)

    def run(
        self, arguments: Sequence[str], *, cwd: Path, stdin: str, timeout: float
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end, as :func:`subprocess.run` does."""
        read, write = os.pipe()
        os.write(write, stdin.encode())
        os.close(write)
        with open(read, "rb") as given, tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            request = json.dumps([[*arguments], str(cwd), dict(os.environ)]).encode()
            assert len(request) <= LONGEST
            socket.send_fds(self._socket, [request], [stream.fileno() for stream in (given, out, err)])
            self._socket.settimeout(timeout)
            status = int(self._socket.recv(LONGEST))
            for stream in (out, err):
                stream.seek(0)
            return subprocess.CompletedProcess([*arguments], status, out.read(), err.read())

    def close(self) -> None:
        """End it."""
        self._socket.close()
        self._process.wait()


@cache
def warm_commands() -> WarmCommands:
    """Return the process of this process's tests."""
    commands = WarmCommands()
    atexit.register(commands.close)
    return commands


def serve() -> None:
    """Answer requests until the socket is closed. Return in the child of each, too."""
    for package in ("mainspring.cli", "mainspring.worker"):
        for module in pkgutil.iter_modules(importlib.import_module(package).__path__, f"{package}."):
            importlib.import_module(module.name)
    for name in MODULES:
        importlib.import_module(name)
    call = importlib.import_module("mainspring.cli.app").call
    with redirect_stderr(StringIO()):
        for command in REFUSED:
            assert call(command) == 2
    gc.freeze()
    asked = socket.socket(fileno=0)
    while True:
        request, streams, _, _ = socket.recv_fds(asked, LONGEST, 3)
        if not request:
            os._exit(0)
        child = os.fork()
        if not child:
            asked.detach()  # its descriptor becomes the standard input
            become(json.loads(request), streams)
            return
        for descriptor in streams:
            os.close(descriptor)
        asked.send(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])).encode())


def become(request: tuple[list[str], str, dict[str, str]], streams: Sequence[int]) -> None:
    """Make this process that of a command."""
    arguments, directory, environment = request
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    for number, (descriptor, mode) in enumerate(zip(streams, "rww", strict=True)):
        os.dup2(descriptor, number)
        os.close(descriptor)
        setattr(sys, ("stdin", "stdout", "stderr")[number], open(number, mode, closefd=False))  # noqa: SIM115
    sys.path[0] = directory
    sys.argv = [str(Path(importlib.import_module("mainspring").__file__ or "").with_name("__main__.py")), *arguments]


if __name__ == "__main__":
    serve()
    from mainspring.cli import main

    sys.exit(main())
