"""The stores that chaos tries: their servers, with the settings that the guarantees need, and what each does otherwise."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from chaos_plan import OF_PROCESSES, OF_SERVERS, Kind

from servers import NatsServer, PostgresServer, RedisServer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from servers import Program

_ASYNCIO = ("asyncio", {})
_UVLOOP = ("asyncio", {"use_uvloop": True})
_TRIO = ("trio", {})
TABLE = "chaos_effects"


@dataclass(frozen=True, slots=True)
class Backend:
    """One kind of store.

    ``options`` are the mailbox's, by lease and call timeout. ``forgets``: its server answers before it has written removals
    and leases down, so that its kill takes the last of them back. ``two_steps``: a message is handed back with a delay in two
    steps, and who is killed between them leaves two copies. ``transactional``: effects are in its transactions. ``limits``: it
    keeps the limits of tasks.
    """

    name: str
    scheme: str
    loops: tuple[tuple[str, dict[str, Any]], ...]
    server: Callable[[], Program] | None = None
    path: str = ""
    options: Callable[[float, float], dict[str, Any]] = lambda lease, timeout: {"timeout": timeout}
    forgets: bool = False
    two_steps: bool = False
    transactional: bool = False
    limits: bool = True

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The faults that there are."""
        return OF_PROCESSES if self.server is None else OF_PROCESSES + OF_SERVERS

    @property
    def table(self) -> str | None:
        """The table of the effects."""
        return TABLE if self.transactional else None

    def url(self, directory: Path, port: int | None, name: str) -> str:
        """Of a mailbox, on a port of this machine or in a directory."""
        if port is None:
            return f"{self.scheme}:///{directory}/mail.db?name={name}"
        return f"{self.scheme}://{self.path.format(port=port)}?name={name}"


def _postgres() -> PostgresServer:
    """One that does not flush each of its thousand files by itself when it recovers, where its version knows how."""
    server = PostgresServer("recovery_init_sync_method=syncfs")
    version = subprocess.run([server.binary, "--version"], capture_output=True, text=True, check=True).stdout
    if int(re.findall(r"\d+", version)[0]) < 14:
        server._settings = ()
    return server


def _nats() -> NatsServer:
    """One that syncs always, where its version can."""
    return NatsServer.synced() or NatsServer()


def _nats_options(lease: float, timeout: float) -> dict[str, Any]:
    return {"timeout": timeout, "ack_wait": lease}


BACKENDS = {
    backend.name: backend
    for backend in (
        Backend("sqlite", "sqlite", (_ASYNCIO, _UVLOOP, _TRIO), options=lambda lease, timeout: {}),
        Backend("redis", "redis", (_ASYNCIO, _UVLOOP, _TRIO), RedisServer, "127.0.0.1:{port}/0"),
        Backend(
            "postgres",
            "postgresql",
            (_ASYNCIO, _UVLOOP),
            _postgres,
            "postgres@127.0.0.1:{port}/postgres",
            transactional=True,
        ),
        Backend(
            "nats",
            "nats",
            (_ASYNCIO, _UVLOOP),
            _nats,
            "127.0.0.1:{port}",
            _nats_options,
            forgets=True,
            two_steps=True,
            limits=False,
        ),
    )
}


def make_table(url: str) -> None:
    """Make the table of the effects. It takes the same effect twice: that is what is looked for."""
    _execute(url, f"CREATE TABLE {TABLE} (message text, run text)")


def effects(url: str) -> Counter[str]:
    """How often each message's effect is there."""
    return Counter(dict(_execute(url, f"SELECT message, count(*) FROM {TABLE} GROUP BY message")))


def _execute(url: str, statement: str) -> list[tuple[Any, ...]]:
    import psycopg

    with psycopg.connect(url.partition("?")[0], autocommit=True) as connection:
        cursor = connection.execute(statement)
        return cursor.fetchall() if cursor.description else []
