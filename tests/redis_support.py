"""What tests of the Redis mailbox share: names of their own on a server, and the removal of what they made."""

from __future__ import annotations

import secrets
import socket
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import hiredis

from mainspring.mailbox.redis.mailbox import RedisMailbox
from mainspring.mailbox.redis.url import parse_server

if TYPE_CHECKING:
    from collections.abc import Iterator


class Place:
    """A corner of a Redis server: mailboxes whose names nobody else uses."""

    def __init__(self, url: str, **options: Any) -> None:
        self.url = url
        self.options = options
        self.select = True
        """Whether the server has databases (a sentinel has none)."""
        self.prefix = f"test-{secrets.token_hex(6)}-"

    def mailbox(self, name: str = "jobs", /, *, body: Any = None, reply: Any = None, **options: Any) -> RedisMailbox:
        """An unopened mailbox."""
        return RedisMailbox(self.url, name=self.prefix + name, body=body, reply=reply, **self.options, **options)

    def key(self, which: str, name: str = "jobs") -> str:
        """A key of a mailbox."""
        return f"{{ms:{self.prefix}{name}}}:{which}"

    def call(self, *command: Any) -> Any:
        """A command to the server, past all mailboxes."""
        server = parse_server(self.url, dict(self.options))
        with socket.create_connection(server.hosts[0], timeout=5) as wire:
            reader = hiredis.Reader()
            result: Any = None
            for some in (("SELECT", server.db), command) if self.select else (command,):
                while True:
                    wire.sendall(hiredis.pack_command(some))  # type: ignore[arg-type]
                    while (result := reader.gets()) is False:
                        reader.feed(wire.recv(65_536))
                    if not str(result).startswith("LOADING"):  # a server that has just been started again
                        break
                    time.sleep(0.01)
            if isinstance(result, hiredis.ReplyError):
                raise result
            return result

    def found(self, prefix: str = "") -> list[bytes]:
        """All keys of the mailboxes of this place, or of those whose names begin otherwise."""
        keys: list[bytes] = []
        cursor = b"0"
        while True:
            cursor, some = self.call("SCAN", cursor, "MATCH", f"{{ms:{prefix or self.prefix}*", "COUNT", 10_000)
            keys += some
            if cursor == b"0":
                return keys

    def clean(self, prefix: str = "") -> None:
        """Remove what was made."""
        for key in self.found(prefix):
            self.call("UNLINK", key)


@contextmanager
def place(url: str, **options: Any) -> Iterator[Place]:
    made = Place(url, **options)
    yield made
    made.clean()


def used_memory(here: Place) -> int:
    """Bytes that the server counts against its ``maxmemory``."""
    here.call("MEMORY", "PURGE")
    lines = here.call("INFO", "memory").decode().splitlines()
    return next(int(line.partition(":")[2]) for line in lines if line.startswith("used_memory:"))
