"""The servers that tests talk to: those the environment names, else those of this machine, else their own, else none.

One context manager for each kind of server yields its URL. Without a server the test is skipped by name; where CI=true and
MAINSPRING_REQUIRE_SERVERS=1 it fails instead.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

PATIENCE = 10.0
"""Seconds within which a server that was started answers."""


def missing(what: str) -> None:
    """There is no such server: skip, or fail where that must not be."""
    reason = f"there is no {what} server, and none can be started"
    if os.environ.get("CI") == "true" and os.environ.get("MAINSPRING_REQUIRE_SERVERS") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


def answers(port: int, host: str = "127.0.0.1") -> bool:
    """Whether something listens there."""
    try:
        with socket.create_connection((host, port), timeout=1):
            return True
    except OSError:
        return False


def free_port() -> int:
    """A port that nobody listens on just now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class Program:
    """A server of a test's own: a process on a free port, with its files in a directory of its own."""

    def __init__(self, binary: str, what: str) -> None:
        found = shutil.which(binary)
        if found is None:
            missing(what)
        self.binary = found or binary
        self.what = what
        self.directory = Path(tempfile.mkdtemp(prefix=f"mainspring-{what.lower()}-"))
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    def command(self) -> list[str]:
        """What starts it."""
        raise NotImplementedError

    def start(self) -> None:
        """Start it, and wait until it listens."""
        with (self.directory / "output").open("ab") as output:
            self._process = subprocess.Popen(self.command(), stdout=output, stderr=output, cwd=self.directory)
        until = time.monotonic() + PATIENCE
        while not answers(self.port):
            if self._process.poll() is not None or time.monotonic() > until:
                said = (self.directory / "output").read_text(errors="replace")[-2_000:]
                raise RuntimeError(f"{self.what} did not start: {said}")
            time.sleep(0.02)

    def send_signal(self, number: int) -> None:
        """Send it a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Have it end; idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(signal.SIGCONT)
        process.send_signal(number)
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(PATIENCE)

    def __enter__(self) -> Program:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        shutil.rmtree(self.directory, ignore_errors=True)


# ---------------------------------------------------------------------------------------------------------------- Redis


class RedisServer(Program):
    """A Redis (or Valkey) server of a test's own: by default it keeps everything, at once, as the guarantees need."""

    def __init__(self, *options: str) -> None:
        super().__init__("valkey-server" if shutil.which("redis-server") is None else "redis-server", "Redis")
        self._options = options

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def command(self) -> list[str]:
        durable = ["--appendonly", "yes", "--appendfsync", "always", "--save", ""]
        return [self.binary, "--port", str(self.port), "--bind", "127.0.0.1", *durable, *self._options]


@contextmanager
def redis() -> Iterator[str]:
    """The URL of a Redis server."""
    given = os.environ.get("MAINSPRING_REDIS_URL")
    if given or answers(6379):
        yield given or "redis://127.0.0.1:6379/0"
        return
    with RedisServer() as own:
        assert isinstance(own, RedisServer)
        yield own.url


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    with redis() as url:
        yield url


# ----------------------------------------------------------------------------------------------------------- PostgreSQL


class PostgresServer(Program):
    """A PostgreSQL server of a test's own. It refuses to run as root, so then another user runs it."""

    def __init__(self, *settings: str) -> None:
        super().__init__("postgres" if shutil.which("postgres") else _newest_postgres(), "PostgreSQL")
        self._settings = settings
        self._data = self.directory / "data"

    @property
    def url(self) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/postgres"

    def command(self) -> list[str]:
        settings = ["unix_socket_directories=", "listen_addresses=127.0.0.1", *self._settings]
        options = [part for setting in settings for part in ("-c", setting)]
        return [*_without_root(), self.binary, "-D", str(self._data), "-p", str(self.port), *options]

    def start(self) -> None:
        if not self._data.exists():
            if os.geteuid() == 0:
                shutil.chown(self.directory, "nobody")
            initdb = str(Path(self.binary).with_name("initdb"))
            make = [*_without_root(), initdb, "-D", str(self._data), "-U", "postgres", "-A", "trust", "-N"]
            made = subprocess.run(make, cwd=self.directory, capture_output=True, text=True, check=False)
            if made.returncode:
                raise RuntimeError(f"initdb failed: {made.stderr[-2_000:]}")
        super().start()
        ready = [
            str(Path(self.binary).resolve().with_name("pg_isready")),
            "-q",
            "-h",
            "127.0.0.1",
            "-p",
            str(self.port),
        ]
        until = time.monotonic() + PATIENCE
        while subprocess.run(ready, check=False).returncode:  # it listens before it has recovered
            if time.monotonic() > until:
                raise RuntimeError("PostgreSQL did not become ready")
            time.sleep(0.02)

    def stop(self, number: int = signal.SIGINT) -> None:
        super().stop(number)  # by default a shutdown that does not wait for those who are connected


def _newest_postgres() -> str:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=lambda path: int(path.parts[-3]))
    return str(found[-1]) if found else "postgres"


def _without_root() -> list[str]:
    return ["setpriv", "--reuid=nobody", "--clear-groups", "--"] if os.geteuid() == 0 else []


@contextmanager
def postgres() -> Iterator[str]:
    """The URL of a PostgreSQL server's database."""
    given = os.environ.get("MAINSPRING_POSTGRES_URL")
    if given or answers(5432):
        yield given or "postgresql://postgres@127.0.0.1:5432/test"
        return
    with PostgresServer() as own:
        assert isinstance(own, PostgresServer)
        yield own.url


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    with postgres() as url:
        yield url


# ----------------------------------------------------------------------------------------------------------------- NATS


class NatsServer(Program):
    """A NATS server with JetStream of a test's own."""

    def __init__(self, *options: str) -> None:
        super().__init__("nats-server", "NATS")
        self._options = options

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        where = ["-a", "127.0.0.1", "-p", str(self.port), "-sd", str(self.directory / "store")]
        return [self.binary, "-js", *where, *self._options]


@contextmanager
def nats() -> Iterator[str]:
    """The URL of a NATS server."""
    given = os.environ.get("MAINSPRING_NATS_URL")
    if given or answers(4222):
        yield given or "nats://127.0.0.1:4222"
        return
    with NatsServer() as own:
        assert isinstance(own, NatsServer)
        yield own.url


@pytest.fixture(scope="session")
def nats_url() -> Iterator[str]:
    with nats() as url:
        yield url
