"""The server of a benchmark: the one that the environment names, else one of its own, which goes with its files.

Each run begins on an empty server. On one that is named there may be what somebody needs: so a benchmark that finds anything
there ends, unless ``--flush`` says that it may go.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from common import HERE, Row, report

sys.path.append(str(HERE.parent / "tests"))

from ports import free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@dataclass(frozen=True)
class Kind:
    """How a kind of server is found, started and emptied."""

    title: str
    variable: str
    """The variable of the environment that names one, as for the tests."""
    scheme: str
    program: str
    arguments: Callable[[str, str], list[str]]
    """Those of the program: from its port and a directory of its own."""
    holds: Callable[[str], str]
    """What the server at a URL holds, in words; "" where it is empty."""
    empty: Callable[[str], None]
    """Remove all of that."""


@contextmanager
def server(kind: Kind) -> Iterator[str | None]:
    """The URL of an empty server, which is emptied again in the end; None (and a row that says why) where there is none."""
    given = os.environ.get(kind.variable)
    with _own(kind) if not given else _named(kind, given) as url:
        yield url


@contextmanager
def _named(kind: Kind, url: str) -> Iterator[str]:
    if urlsplit(url).scheme != kind.scheme:
        raise SystemExit(f"{kind.variable}: the benchmarks need a URL that begins with {kind.scheme}://")
    where = url.rpartition("@")[2].removeprefix(f"{kind.scheme}://")
    try:
        there = kind.holds(url)
    except OSError as error:
        raise SystemExit(f"{kind.variable}: nothing answers at {where}: {error}") from error
    if there and "--flush" not in sys.argv:
        raise SystemExit(
            f"{kind.variable}: {where} has {there}, and each run would delete all of it: say --flush if it may go, or"
            f" leave the variable unset, then {kind.program} is started for the benchmark"
        )
    report(Row(f"{kind.title}: on the server {where}, with the settings it has", "-", "-"))
    try:
        yield url
    finally:
        kind.empty(url)


@contextmanager
def _own(kind: Kind) -> Iterator[str | None]:
    binary = shutil.which(kind.program)
    if binary is None:
        missing = f"{kind.title}: no {kind.program} here (apt install {kind.program}), and no {kind.variable}"
        report(Row(missing, "-", "-"))
        yield None
        return
    port = free_port()
    with tempfile.TemporaryDirectory() as home:
        command = [binary, *kind.arguments(str(port), home)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            _wait_for(kind.program, port)
            yield f"{kind.scheme}://127.0.0.1:{port}"
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


def with_name(url: str, name: str = "bench") -> str:
    """The URL of the mailbox that is measured."""
    return f"{url}{'&' if '?' in url else '?'}name={name}"
