"""What tests of the Redis mailbox share: names of their own on a server, a line to it, and receives that wait."""

from __future__ import annotations

import secrets
import socket
import time
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit
from weakref import WeakKeyDictionary

import anyio
import hiredis

from mainspring.mailbox.redis.commands import LARGE
from mainspring.mailbox.redis.mailbox import RedisMailbox
from mainspring.mailbox.redis.settings import RedisOptions, RedisServer
from mainspring.mailbox.settings import read_url
from silent_line import Line, Passage, Valve
from stopwatch import Stopwatch

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from mainspring.mailbox.message import Counts

CALLS = "mainspring-calls"
LISTENER = "mainspring-listener"


def unpushed(letter: str = "x") -> str:
    """The longest text whose body is kept with its message, which makes that too large to be pushed.

    A receive that waits is woken for it, and claims it.
    """
    return letter * (LARGE - 2)


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
        server = RedisServer.at(read_url(self.url, RedisOptions.schemes))
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

    @contextmanager
    def connected(self, *command: Any) -> Iterator[socket.socket]:
        """A connection of its own, over which a command has been sent that is not waited for."""
        with socket.create_connection(
            RedisServer.at(read_url(self.url, RedisOptions.schemes)).hosts[0], timeout=5
        ) as wire:
            wire.sendall(hiredis.pack_command(command))  # type: ignore[arg-type]
            yield wire

    def channels(self, name: str = "jobs") -> set[str]:
        """On which the mailbox objects of that name are called, each on its own."""
        channels = self.call("PUBSUB", "SHARDCHANNELS", self.key("*", name))
        return {channel.decode().rpartition(":")[2] for channel in channels} - {"all"}

    def waiters(self, name: str = "jobs") -> list[bytes]:
        """What is on a mailbox's list of those that wait, the one that has waited longest first."""
        found: list[bytes] = self.call("ZRANGE", self.key("waiters", name), 0, -1)
        return found

    @contextmanager
    def subscribed(self, channel: str, name: str = "jobs") -> Iterator[list[bytes]]:
        """A list which at the end of the block has what was said meanwhile on a channel of a mailbox."""
        heard: list[bytes] = []
        reader, key = hiredis.Reader(), self.key(channel, name)
        with self.connected("SSUBSCRIBE", key) as wire:

            def hear_until(last: Callable[[Any], bool]) -> None:
                while True:
                    while (message := reader.gets()) is not False:
                        if last(message):
                            return
                        heard.append(message[2])
                    reader.feed(wire.recv(65_536))

            hear_until(lambda message: message[0] == b"ssubscribe")
            yield heard
            self.call("SPUBLISH", key, "the end")
            hear_until(lambda message: message[2] == b"the end")

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


class RedisLine(Line):
    """A line to the server of a place, which knows the connections by the names that mailboxes give them.

    ``calls`` holds the calls on their way to the server, ``answers`` their answers, and ``news`` what the server says on the
    connection to listen; new connections of these names are held, too. ``on_command`` is called with the connection and each
    command before it goes on.
    """

    port: int

    def __init__(self, here: Place) -> None:
        super().__init__(here.url)
        self.calls, self.answers, self.news = Valve(), Valve(), Valve()
        self.on_command: Callable[[Passage, list[bytes]], None] | None = None
        self._here = here
        self._readers: WeakKeyDictionary[Passage, hiredis.Reader] = WeakKeyDictionary()

    @property
    def url(self) -> str:
        """Where it begins."""
        return urlunsplit(urlsplit(self._here.url)._replace(netloc=f"127.0.0.1:{self.port}"))

    def mailbox(self, name: str = "jobs", /, **options: Any) -> RedisMailbox:
        """An unopened mailbox of the place, which is reached over this line."""
        return RedisMailbox(self.url, name=self._here.prefix + name, **self._here.options, **options)

    def names(self) -> list[str]:
        """Those of the connections that there are."""
        return sorted(passage.name for passage in self.passages)

    async def lose_answer(self) -> None:
        """Wait for an answer that ``answers`` holds, then end the connection for calls instead of passing it on."""
        await self.answers.arrived()
        self.cut(CALLS)
        self.answers.let_go()

    async def pass_on(self, said: bytes, target: Any, *, is_answer: bool) -> None:
        passage = self.passage_to(target)
        if not is_answer:
            self._read(said, passage)
        valve = {(CALLS, False): self.calls, (CALLS, True): self.answers, (LISTENER, True): self.news}
        if (passage.name, is_answer) in valve:
            await valve[passage.name, is_answer].passes(said)
        if not passage.is_cut:
            await super().pass_on(said, target, is_answer=is_answer)

    def _read(self, said: bytes, passage: Passage) -> None:
        reader = self._readers.setdefault(passage, hiredis.Reader())
        reader.feed(said)
        while (command := reader.gets()) is not False:
            if command[0] == b"HELLO":
                passage.name = command[-1].decode()
            if self.on_command is not None:
                self.on_command(passage, command)


@asynccontextmanager
async def line_to(here: Place) -> AsyncIterator[RedisLine]:
    """A line to the server of a place."""
    line = RedisLine(here)
    async with anyio.create_task_group() as tasks:
        line.port = await tasks.start(line.listen)
        yield line
        tasks.cancel_scope.cancel()


async def soon(holds: Callable[[], Any], seconds: float = 10) -> None:
    """Wait until ``holds()``."""
    with anyio.fail_after(seconds):
        while not holds():
            await anyio.sleep(0.002)


async def counts(mailbox: RedisMailbox, expected: Counts) -> None:
    """They are soon; what a process gives back, it gives back once it has heard of it."""
    with Stopwatch() as watch:
        while await mailbox.counts() != expected and watch.seconds < 5:
            await anyio.sleep(0.005)
    assert await mailbox.counts() == expected


class Waiting:
    """Receives that wait in mailboxes, in tasks of their own; what each got, in the order of the ends."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.got: list[Any] = []

    def begin(self, mailbox: RedisMailbox, visibility: float = 30.0, scope: anyio.CancelScope | None = None) -> None:
        """Have a receive begin."""

        async def receive() -> None:
            with scope or anyio.CancelScope():
                found = await mailbox.receive(visibility_timeout=visibility, wait_time_seconds=600, max_messages=5)
                self.got.append((mailbox, found))

        self.group.start_soon(receive)

    async def start(
        self, mailbox: RedisMailbox, visibility: float = 30.0, scope: anyio.CancelScope | None = None
    ) -> None:
        """Have a receive begin; returns once it waits, and its process is on the list of those that do."""
        waiting = mailbox.statistics().waiting_receives
        self.begin(mailbox, visibility, scope)
        while mailbox.statistics().waiting_receives == waiting:
            await anyio.sleep(0.001)

    async def until(self, count: int) -> None:
        """Wait until so many have ended."""
        while len(self.got) < count:
            await anyio.sleep(0.001)

    @property
    def messages(self) -> list[Any]:
        """What they got, in one list."""
        return [message for _, found in self.got for message in found]
