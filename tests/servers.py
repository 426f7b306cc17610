"""The servers that tests talk to: those the environment names, else those of this machine, else their own, else none.

One context manager for each kind of server yields its URL. Without a server the test is skipped by name; where servers are
required (:func:`required`) it fails instead.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, NoReturn
from urllib.parse import urlsplit

import psutil
import pytest

from ports import free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

PATIENCE = 30.0
"""Seconds within which a server that was started answers."""
GLANCE = 5.0
"""Seconds within which a server of this machine answers, if it is one for tests."""
SYSTEM = ("/usr/local/sbin", "/usr/sbin")
"""Where servers are too, off the path of those who are not root."""


def required(environment: Mapping[str, str]) -> bool:
    """Whether a missing server fails the test: where MAINSPRING_REQUIRE_SERVERS says so, else where CI is true."""
    said = environment.get("MAINSPRING_REQUIRE_SERVERS") or environment.get("CI", "")
    return said.strip().lower() not in {"", "0", "false", "no", "off"}


def missing(what: str, variable: str, package: str) -> NoReturn:
    """There is no such server: skip, or fail where that must not be."""
    reason = (
        f"no {what} server can be started here: apt install {package}, or name one in {variable} for the tests that need"
        " none of their own"
    )
    if required(os.environ):
        pytest.fail(f"{reason}; MAINSPRING_REQUIRE_SERVERS=0 skips them")
    pytest.skip(reason)


def find(binary: str) -> str | None:
    """Where that program is."""
    return shutil.which(binary, path=os.pathsep.join((os.environ.get("PATH", os.defpath), *SYSTEM)))


def answers(port: int, host: str = "127.0.0.1") -> bool:
    """Whether something listens there."""
    try:
        with socket.create_connection((host, port), timeout=1):
            return True
    except OSError:
        return False


def first_words(port: int, said: bytes = b"") -> bytes:
    """What a server of this machine says first, to ``said``; nothing where there is none."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=GLANCE) as wire:
        wire.sendall(said)
        heard = b""
        while b"\n" not in heard and (more := wire.recv(4_096)):
            heard += more
        return heard
    return b""


@contextmanager
def server(variable: str, local: str, works: Callable[[], bool], own: Callable[[], Program]) -> Iterator[str]:
    """The URL in the environment's ``variable``, else ``local`` if that ``works``, else that of a server of one's ``own``."""
    given = os.environ.get(variable)
    if given or works():
        yield given or local
        return
    with of_this_run(variable, own) as url:
        yield url


@contextmanager
def of_this_run(kind: str, own: Callable[[], Program]) -> Iterator[str]:
    """The URL of a server that the processes of one run of pytest-xdist share.

    The first one starts it, and stops it once no other one uses it. A file holds the URL. Each user shares a lock on another
    one, which the kernel drops with a process that is gone.
    """
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if run is None:
        with own() as started:
            yield started.url
        return
    path = Path(tempfile.gettempdir(), f"mainspring-{kind.lower()}-{run}")
    with path.open("a+") as place, Path(f"{path}-users").open("a+") as users:
        fcntl.flock(place, fcntl.LOCK_EX)
        place.seek(0)
        url = place.read()
        started = None if url else own()
        if started is not None:
            started.__enter__()
            url = started.url
            place.write(url)
            place.flush()
        fcntl.flock(users, fcntl.LOCK_SH)
        fcntl.flock(place, fcntl.LOCK_UN)
        try:
            yield url
        finally:
            fcntl.flock(users, fcntl.LOCK_UN)
            if started is not None:
                while not _stop_if_unused(started, place, users):
                    time.sleep(0.02)


def _stop_if_unused(started: Program, place: IO[str], users: IO[str]) -> bool:
    fcntl.flock(place, fcntl.LOCK_EX)  # no other process begins to use it meanwhile
    try:
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    else:
        started.__exit__()
        place.truncate(0)  # for a process that has it open already, and starts a server of its own
        for file in (place, users):
            Path(file.name).unlink(missing_ok=True)
        return True
    finally:
        fcntl.flock(users, fcntl.LOCK_UN)
        fcntl.flock(place, fcntl.LOCK_UN)


class Program:
    """A server of a test's own: a process on a free port, with its files in a directory of its own."""

    def __init__(self, what: str, binary: str | None, *, variable: str, package: str) -> None:
        self.binary = binary or missing(what, variable, package)
        self.what = what
        self.directory = Path(tempfile.mkdtemp(prefix=f"mainspring-{what.lower()}-"))
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where it is."""
        raise NotImplementedError

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
        super().__init__(
            "Redis",
            find("redis-server") or find("valkey-server"),
            variable="MAINSPRING_REDIS_URL",
            package="redis-server",
        )
        self.options = options

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def command(self) -> list[str]:
        durable = ["--appendonly", "yes", "--appendfsync", "always", "--save", ""]
        return [self.binary, "--port", str(self.port), "--bind", "127.0.0.1", *durable, *self.options]


def _redis_works() -> bool:
    return first_words(6379, b"PING\r\n").startswith(b"+PONG")  # one that wants a password is not for tests


@contextmanager
def redis() -> Iterator[str]:
    """The URL of a Redis server."""
    with server("MAINSPRING_REDIS_URL", "redis://127.0.0.1:6379/0", _redis_works, RedisServer) as url:
        yield url


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    with redis() as url:
        yield url


# ----------------------------------------------------------------------------------------------------------- PostgreSQL


class PostgresServer(Program):
    """A PostgreSQL server of a test's own. It refuses to run as root, so then another user runs it."""

    def __init__(self, *settings: str) -> None:
        super().__init__(
            "PostgreSQL",
            find("postgres") or _newest_postgres(),
            variable="MAINSPRING_POSTGRES_URL",
            package="postgresql",
        )
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
            initdb = str(Path(self.binary).resolve().with_name("initdb"))
            make = [*_without_root(), initdb, "-D", str(self._data), "-U", "postgres", "-A", "trust", "-N"]
            made = subprocess.run(make, cwd=self.directory, capture_output=True, text=True, check=False)
            if made.returncode:
                raise RuntimeError(f"initdb failed: {made.stderr[-2_000:]}")
        super().start()
        pg_isready = str(Path(self.binary).resolve().with_name("pg_isready"))
        ready = [pg_isready, "-q", "-h", "127.0.0.1", "-p", str(self.port)]
        until = time.monotonic() + PATIENCE
        while subprocess.run(ready, check=False).returncode:  # it listens before it has recovered
            if time.monotonic() > until:
                raise RuntimeError("PostgreSQL did not become ready")
            time.sleep(0.02)

    def stop(self, number: int = signal.SIGINT) -> None:
        if number == signal.SIGKILL and self._process is not None:
            _kill_family(self._process.pid)
        super().stop(number)  # by default a shutdown that does not wait for those who are connected


def _kill_family(pid: int) -> None:
    """Kill a server and its processes: one that is at work would answer for a while, and be in the way of the next server."""
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)  # from now on it makes no more
    family = psutil.Process(pid).children()
    os.kill(pid, signal.SIGKILL)  # first: it must not clean up after the others
    for member in family:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    until = time.monotonic() + PATIENCE
    while any(map(runs, family)):
        if time.monotonic() > until:
            raise RuntimeError("what was killed still runs")
        time.sleep(0.005)


def runs(process: psutil.Process) -> bool:
    """Whether it is there, and not only to be waited for."""
    with suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


def _newest_postgres() -> str | None:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=lambda path: int(path.parts[-3]))
    return str(found[-1]) if found else None


def _without_root() -> list[str]:
    return ["setpriv", "--reuid=nobody", "--clear-groups", "--"] if os.geteuid() == 0 else []


_LOCAL_POSTGRES = "postgresql://postgres@127.0.0.1:5432/test"


def _postgres_works() -> bool:
    if not answers(5432):
        return False
    import psycopg

    with suppress(psycopg.Error), psycopg.connect(_LOCAL_POSTGRES, connect_timeout=int(GLANCE)):
        return True
    return False  # a package's own cluster wants a password, and has no database for tests


@contextmanager
def postgres() -> Iterator[str]:
    """The URL of a PostgreSQL server's database."""
    with server("MAINSPRING_POSTGRES_URL", _LOCAL_POSTGRES, _postgres_works, PostgresServer) as url:
        yield url


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    with postgres() as url:
        yield url


# ----------------------------------------------------------------------------------------------------------------- NATS


class NatsServer(Program):
    """A NATS server with JetStream of a test's own."""

    @classmethod
    def synced(cls) -> NatsServer | None:
        """One that has each write on the disk before it acknowledges it; None where its version cannot (2.9)."""
        server = cls()
        config = server.directory / "server.conf"
        config.write_text("jetstream { sync_interval: always }\n")
        server.options = ("-c", str(config))
        check = [server.binary, "-t", *server.options]
        if subprocess.run(check, capture_output=True, check=False).returncode == 0:
            return server
        shutil.rmtree(server.directory)
        return None

    def __init__(self, *options: str) -> None:
        super().__init__("NATS", find("nats-server"), variable="MAINSPRING_NATS_URL", package="nats-server")
        self.options = options

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        where = ["-a", "127.0.0.1", "-p", str(self.port), "-sd", str(self.directory / "store")]
        return [self.binary, "-js", *where, *self.options]


def _nats_works() -> bool:
    kind, _, said = first_words(4222).partition(b" ")
    if kind != b"INFO":
        return False
    about = json.loads(said)
    return bool(about.get("jetstream")) and not about.get("auth_required")


@contextmanager
def nats() -> Iterator[str]:
    """The URL of a NATS server."""
    with server("MAINSPRING_NATS_URL", "nats://127.0.0.1:4222", _nats_works, NatsServer) as url:
        _make_lasting_stream(url)
        yield url


def _make_lasting_stream(url: str) -> None:
    """Make a stream that no test deletes.

    With its last stream a server also deletes their directory. A stream that another test makes at that instant has no place.
    """
    parts = urlsplit(url)
    body = json.dumps({"name": "tests", "subjects": ["tests.none"], "storage": "file"}).encode()
    with suppress(OSError), socket.create_connection((parts.hostname or "127.0.0.1", parts.port or 4222), 5) as client:
        head = f"PUB $JS.API.STREAM.CREATE.tests tests.made {len(body)}\r\n".encode()
        client.sendall(b"CONNECT {}\r\nSUB tests.made 1\r\n" + head + body + b"\r\n")
        heard = b""
        while b"MSG tests.made" not in heard and (received := client.recv(4096)):
            heard += received


@pytest.fixture(scope="session")
def nats_url() -> Iterator[str]:
    with nats() as url:
        yield url
