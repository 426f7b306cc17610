"""A server of a benchmark's own: on a free port, with a directory that goes when it has ended."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextmanager
def local_server(program: str, arguments: Callable[[str, str], list[str]]) -> Iterator[int | None]:
    """The port of the ``program`` that runs with ``arguments(port, directory)``; None where it is not installed."""
    binary = shutil.which(program)
    if binary is None:
        yield None
        return
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    with tempfile.TemporaryDirectory() as home:
        command = [binary, *arguments(str(port), home)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            _wait_for(program, port)
            yield port
        finally:
            process.terminate()
            process.wait()


def _wait_for(program: str, port: int) -> None:
    for _ in range(100):
        with suppress(OSError):
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        time.sleep(0.05)
    raise SystemExit(f"{program} does not start")
