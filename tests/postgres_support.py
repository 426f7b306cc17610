"""What the tests of the PostgreSQL mailbox share: a schema of their own, and a connection pooler in transaction mode."""

from __future__ import annotations

import os
import shutil
import struct
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import anyio
import psycopg
import pytest

from mainspring.core import random
from mainspring.mailbox.postgres.mailbox import PostgresMailbox
from servers import Program, _without_root, find
from silent_line import Line


def new_schema():
    return f"ms_test_{random.token(48)}"


def drop_schema(url, schema):
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("SET client_min_messages = warning")
        connection.execute(f"DROP SCHEMA IF EXISTS {schema} CASCADE")


async def until(condition):
    """Wait for it."""
    with anyio.fail_after(20):
        while not condition():
            await anyio.sleep(0.01)


@asynccontextmanager
async def receiving(mailbox):
    """Receive, for long; the list of what came, which must be something in the end."""
    got = []

    async def receive():
        got.extend(await mailbox.receive(wait_time_seconds=60))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(receive)
        await until(lambda: mailbox.statistics().waiting_receives)
        yield got
        await until(lambda: got)


async def quiet(mailbox):
    """Wait until the receive that waits has asked the store as often as it does at first: now it must be told."""
    before = None
    while (now := mailbox.statistics().batches) != before:
        before = now
        await anyio.sleep(0.3)


class Place:
    """A schema in a database, for mailboxes of any name."""

    def __init__(self, url, schema):
        self.url = url
        self.schema = schema

    def mailbox(self, name="jobs", **options):
        return PostgresMailbox(options.pop("url", self.url), name=name, **{"schema": self.schema, **options})

    def execute(self, statement, *values):
        """Run one statement, apart from all mailboxes; its rows. ``SCHEMA.`` stands for the schema."""
        with psycopg.connect(self.url, autocommit=True) as connection:
            cursor = connection.execute(statement.replace("SCHEMA.", f"{self.schema}."), values)
            return cursor.fetchall() if cursor.description else []

    def number(self, name="jobs"):
        """The number of the mailbox of that name."""
        return self.execute("SELECT id FROM SCHEMA.mailboxes WHERE name = %s", name)[0][0]

    def listeners(self):
        """The server's processes of the connections that listen."""
        who = "SELECT pid FROM pg_stat_activity WHERE query = %s AND pid <> pg_backend_pid() ORDER BY pid"
        return [pid for (pid,) in self.execute(who, f"LISTEN {self.schema}")]

    def connect(self, **options):
        return psycopg.AsyncConnection.connect(self.url, **options)


@asynccontextmanager
async def worker_role(place):
    """A role with the rights that the how-to names for workers, and no others; its URL."""
    role = place.schema
    place.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'secret'")
    for right in (
        "USAGE ON SCHEMA {schema}", "EXECUTE ON ALL FUNCTIONS IN SCHEMA {schema}",
        "SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {schema}", "USAGE ON ALL SEQUENCES IN SCHEMA {schema}",
    ):  # fmt: skip
        place.execute(f"GRANT {right.format(schema=place.schema)} TO {role}")
    try:
        yield (
            urlsplit(place.url)
            ._replace(netloc=f"{role}:secret@{place.url.rpartition('@')[2].partition('/')[0]}")
            .geturl()
        )
    finally:
        place.execute(f"DROP OWNED BY {role}")
        place.execute(f"DROP ROLE {role}")


class Pooler:
    """What pgbouncer does in transaction mode: a client has a server connection from its first message to the end of that
    transaction, then the next client may get it; what a server connection says while nobody has it is dropped.

    ``statements`` are those that clients have sent. A client is told a number of its connection that no server's process has,
    or, with ``servers_numbers``, that of the process which serves its first transaction.
    """

    def __init__(self, url, servers_numbers=False):
        self.opened = 0
        self.statements = []
        self._servers_numbers = servers_numbers
        self._idle = []
        server = urlsplit(url)
        self._server = (server.hostname, server.port or 5432)

    async def serve(self, stream):
        async with stream:
            startup = await self._startup(_Frames(stream))
            if startup is None:
                return
            first, key = None, bytes(8)
            if self._servers_numbers:
                *first, key = await self._open(startup)
            await stream.send(_frame(b"R", struct.pack("!i", 0)) + _frame(b"K", key) + _SETTINGS + _frame(b"Z", b"I"))
            frames = _Frames(stream)
            try:
                while True:
                    await self._transaction(stream, frames, startup, first)
                    first = None
            except (anyio.EndOfStream, anyio.ClosedResourceError, anyio.BrokenResourceError):
                return

    async def _startup(self, frames):
        while True:
            (length,) = struct.unpack("!i", await frames.exactly(4))
            rest = await frames.exactly(length - 4)
            (code,) = struct.unpack("!i", rest[:4])
            if code in (80_877_103, 80_877_104):  # encryption is asked for
                await frames.stream.send(b"N")
            elif code == 80_877_102:  # a cancellation
                return None
            else:
                return struct.pack("!i", length) + rest

    async def _transaction(self, client, frames, startup, first):
        kind, payload = await frames.next()
        if kind == b"X":
            raise anyio.EndOfStream
        server, replies = first or (self._idle.pop(0) if self._idle else (await self._open(startup))[:2])
        waiting = 0
        async with anyio.create_task_group() as tasks:

            async def pass_on():
                nonlocal kind, payload, waiting
                while True:
                    waiting += kind in (b"Q", b"S")
                    if kind in (b"Q", b"P"):
                        self.statements.append(payload.split(b"\0")[kind == b"P"].decode())
                    await server.send(_frame(kind, payload))
                    kind, payload = await frames.next()

            tasks.start_soon(pass_on)
            while True:
                answer, rest = await replies.next()
                waiting -= answer == b"Z"
                if answer == b"Z" and rest == b"I" and waiting == 0:
                    break
                await client.send(_frame(answer, rest))
            tasks.cancel_scope.cancel()
        self._idle.append((server, replies))
        await client.send(_frame(answer, rest))

    async def _open(self, startup):
        self.opened += 1
        server = await anyio.connect_tcp(*self._server)
        await server.send(startup)
        replies = _Frames(server)
        key = b""
        while (answer := await replies.next())[0] != b"Z":
            if answer[0] == b"K":
                key = answer[1]
        return server, replies, key


class PgBouncer(Program):
    """A pgbouncer of a test's own, in transaction mode, before the server of ``url``. It refuses to run as root."""

    def __init__(self, url):
        binary = find("pgbouncer")
        if binary is None:
            pytest.skip("no pgbouncer here: apt install pgbouncer")
        super().__init__("pgbouncer", binary, variable="", package="pgbouncer")
        self._server = url

    @property
    def url(self):
        return moved(self._server, self.port)

    @property
    def log(self):
        """What it has written so far."""
        return (self.directory / "output").read_text()

    def command(self):
        server = urlsplit(self._server)
        to = {
            "host": server.hostname,
            "port": server.port or 5432,
            "user": server.username,
            "password": server.password,
        }
        settings = {
            "listen_addr": "127.0.0.1",
            "listen_port": self.port,
            "unix_socket_dir": "",
            "auth_type": "any",
            "pool_mode": "transaction",
            "default_pool_size": 4,
        }
        lines = [
            "[databases]",
            "* = " + " ".join(f"{key}={value}" for key, value in to.items() if value),
            "[pgbouncer]",
        ]
        config = self.directory / "pgbouncer.ini"
        config.write_text("\n".join([*lines, *(f"{key} = {value}" for key, value in settings.items()), ""]))
        if os.geteuid() == 0:
            shutil.chown(self.directory, "nobody")
        return [*_without_root(), self.binary, str(config)]


class Meter(Line):
    """A line that knows the size of the ``largest`` message that a client has sent. It is for unencrypted connections."""

    def __init__(self, url):
        super().__init__(url)
        self.largest = 0
        self._begun = {}

    async def pass_on(self, said, target, *, is_answer):
        if not is_answer:
            self._begun[target] = self._after_messages(self._begun.get(target, (b" ", 0)), said)
        await target.send(said)

    def _after_messages(self, begun, said):
        """The beginning of a message, and how many of its bytes are still to come, after more was said."""
        head, left = begun
        while len(said) > left:
            said, left = said[left:], 0
            taken = 5 - len(head)
            head, said = head + said[:taken], said[taken:]
            if len(head) < 5:
                return head, 0
            size = struct.unpack("!i", head[1:])[0]
            self.largest = max(self.largest, size)
            head, left = b"", size - 4
        return head, left - len(said)


class _Frames:
    """The messages of a stream, one by one; a cancelled read loses nothing."""

    def __init__(self, stream):
        self.stream = stream
        self._buffer = b""

    async def exactly(self, count):
        while len(self._buffer) < count:
            self._buffer += await self.stream.receive()
        taken, self._buffer = self._buffer[:count], self._buffer[count:]
        return taken

    async def next(self):
        while len(self._buffer) < 5 or len(self._buffer) < 1 + struct.unpack("!i", self._buffer[1:5])[0]:
            self._buffer += await self.stream.receive()
        (length,) = struct.unpack("!i", self._buffer[1:5])
        frame, self._buffer = self._buffer[: 1 + length], self._buffer[1 + length :]
        return frame[:1], frame[5:]


def _frame(kind, payload):
    return kind + struct.pack("!i", len(payload) + 4) + payload


_SETTINGS = b"".join(
    _frame(b"S", f"{key}\0{value}\0".encode())
    for key, value in (("server_version", "15.0"), ("client_encoding", "UTF8"), ("standard_conforming_strings", "on"))
)


@asynccontextmanager
async def pooler(url, **options):
    """The URL of a pooler before the server of ``url``, and the pooler."""
    here = Pooler(url, **options)
    async with _before(url, here) as its_url:
        yield its_url, here
    for server, _ in here._idle:
        await server.aclose()


@asynccontextmanager
async def gate(url, kind=Line):
    """A URL that leads to the server of ``url`` over a line, and the line."""
    here = kind(url)
    async with _before(url, here) as its_url:
        yield its_url, here


@asynccontextmanager
async def _before(url, here):
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, here.serve)
        yield moved(url, listener.extra(anyio.abc.SocketAttribute.local_port))
        tasks.cancel_scope.cancel()


def moved(url, port):
    """The URL of what stands before a server, on a port of this machine."""
    parts = urlsplit(url)
    user, _, _ = parts.netloc.rpartition("@")
    return parts._replace(netloc=f"{user}@127.0.0.1:{port}").geturl()
