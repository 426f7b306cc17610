"""A way to a NATS server on which a test sees each command, can hold it up, and can lose its answer or the connection."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import anyio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

WITH_BODY = (b"PUB", b"HPUB", b"MSG", b"HMSG")
PATIENCE = 20.0
"""Seconds within which what a test waits for has to come by."""


@dataclass
class Frame:
    """One command of a client, or what the server says: a line and, of a message, its body."""

    link: Link
    line: bytes
    body: bytes = b""

    @property
    def verb(self) -> bytes:
        return self.line.partition(b" ")[0].strip()

    @property
    def words(self) -> list[str]:
        return self.line.decode("utf-8", "replace").split()

    @property
    def subject(self) -> str:
        """What a client publishes, or subscribes to, or what a message was published to; else nothing."""
        words = self.words
        return words[1] if len(words) > 1 else ""

    @property
    def reply(self) -> str:
        """Where the answer to a message goes."""
        words = self.words
        plain = {b"PUB": 3, b"HPUB": 4, b"MSG": 4, b"HMSG": 5}[self.verb]
        return words[-2 if self.verb in (b"PUB", b"MSG") else -3] if len(words) > plain else ""

    @property
    def text(self) -> str:
        """The headers and the payload."""
        return self.body.decode("utf-8", "replace")


class Link:
    """One connection that leads over a line."""

    def __init__(self, client: asyncio.StreamWriter, server: asyncio.StreamWriter) -> None:
        self._ends = (client, server)
        self.subscriptions: dict[str, str] = {}
        """The subjects that the client has subscribed to, by the numbers that it has given them."""

    def say(self, words: bytes) -> None:
        """Say something to the client, as if the server had."""
        self._ends[0].write(words)

    def pass_on(self, frame: Frame) -> None:
        """Let a frame go on to where it was going."""
        end = self._ends[frame.verb in (b"PUB", b"HPUB")]
        if not end.is_closing():
            end.write(frame.line + frame.body)

    def cut(self) -> None:
        """Hang up on both."""
        for end in self._ends:
            end.transport.abort()


class Trap:
    """Catches the first frames that are of a kind; what comes after them goes on. See :meth:`NatsLine.hold`."""

    def __init__(self, matches: Callable[[Frame], bool], count: int, skip: int = 0, *, keeps: bool = True) -> None:
        self._matches = matches
        self._wanted = count
        self._skip = skip
        self._keeps = keeps
        self._status = ""
        self.caught: list[Frame] = []
        self._changed = anyio.Event()

    def takes(self, frame: Frame) -> bool:
        """Whether it keeps a frame that comes by."""
        if self._wanted == 0 or not self._matches(frame):
            return False
        if self._skip:
            self._skip -= 1
            return False
        self._wanted -= 1
        self.caught.append(frame)
        self._changed.set()
        if self._status:
            _end(frame, self._status)
        return self._keeps

    async def full(self) -> None:
        """Wait until it has caught all that it can."""
        await self.came(len(self.caught) + self._wanted)

    async def came(self, count: int = 1) -> Frame:
        """Wait until it has caught that many; the last of them."""
        with anyio.fail_after(PATIENCE):
            while len(self.caught) < count:
                self._changed = anyio.Event()
                await self._changed.wait()
        return self.caught[count - 1]

    def open(self) -> None:
        """Let go on what was caught, and catch nothing more."""
        self._wanted = 0
        for frame in self.caught:
            frame.link.pass_on(frame)

    def answer(self, payload: bytes) -> None:
        """Answer what was caught in the server's place, and catch nothing more."""
        self._wanted = 0
        for frame in self.caught:
            frame.link.say(b"MSG %b %b %d\r\n%b\r\n" % (*_to(frame), len(payload), payload))

    def end(self, status: str) -> Trap:
        """End each pull request that is caught, as the server does, with such a status."""
        self._status = status
        return self


def _end(frame: Frame, status: str) -> None:
    head = b"NATS/1.0 %b\r\n\r\n" % status.encode()
    frame.link.say(b"HMSG %b %b %d %d\r\n%b\r\n" % (*_to(frame), len(head), len(head), head))


def _to(frame: Frame) -> tuple[bytes, bytes]:
    """Where the answer to a frame goes, and which subscription of the client hears it."""
    for number, subject in frame.link.subscriptions.items():
        if fnmatchcase(frame.reply, subject):
            return frame.reply.encode(), number.encode()
    raise LookupError(f"nobody hears {frame.reply}")


def asks(subject: str, said: str = "*") -> Callable[[Frame], bool]:
    """Whether a client publishes to such a subject, and such headers and payload; with ``*`` as in names of files."""
    return lambda frame: (
        frame.verb in (b"PUB", b"HPUB") and fnmatchcase(frame.subject, subject) and fnmatchcase(frame.text, said)
    )


class NatsLine:
    """Passes on what clients and a server say to each other, in whole frames. ``url`` is where it listens."""

    def __init__(self, server: str) -> None:
        parts = urlsplit(server)
        self._server = (parts.hostname or "", parts.port or 4222)
        self._traps: list[Trap] = []
        self._speaks = asyncio.Event()
        self._speaks.set()
        self.url = ""
        self.links: list[Link] = []
        """The connections that there are, the oldest first."""
        self.made = 0
        """How many have been made."""
        self.refuses = False
        """Whether it hangs up on who connects."""
        self.lag = 0.0
        """Seconds that whatever the server says takes to arrive."""
        self.actors: list[Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]] = []
        """What stands in for the server: each for one of the next connections."""

    async def open(self) -> None:
        self._listener = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"nats://127.0.0.1:{self._listener.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        """Listen no more, and end the connections."""
        self._listener.close()
        self.refuses = True
        self.cut()

    # -------------------------------------------------------------------------------------------- what a test may do

    @property
    def silent(self) -> bool:
        """Whether nothing passes, in either direction: what was caught, too, stays where it is."""
        return not self._speaks.is_set()

    @silent.setter
    def silent(self, value: bool) -> None:
        (self._speaks.clear if value else self._speaks.set)()

    def cut(self) -> None:
        """End the connections that there are."""
        for link in list(self.links):
            link.cut()

    def say(self, words: bytes) -> None:
        """Say something to every client, as if the server had."""
        for link in list(self.links):
            link.say(words)

    def hold(self, subject: str, said: str = "*", *, count: int = 1, skip: int = 0) -> Trap:
        """Hold up the next ``count`` messages that a client publishes to such a subject (see :func:`asks`)."""
        return self.hold_all(asks(subject, said), count=count, skip=skip)

    def hold_all(self, matches: Callable[[Frame], bool], *, count: int = -1, skip: int = 0) -> Trap:
        """Hold up ``count`` frames, of either direction, that match, or all of them. The first ``skip`` go on."""
        trap = Trap(matches, count, skip)
        self._traps.append(trap)
        return trap

    def watch(self, subject: str, said: str = "*", *, count: int = 1) -> Trap:
        """Let such messages go on, and see them go by."""
        trap = Trap(asks(subject, said), count, keeps=False)
        self._traps.append(trap)
        return trap

    def hold_answers(self, subject: str, said: str = "*", *, count: int = 1, skip: int = 0) -> Trap:
        """The same for the answers to such messages."""
        asked = asks(subject, said)
        inboxes: set[str] = set()

        def matches(frame: Frame) -> bool:
            if asked(frame):
                inboxes.add(frame.reply)
            return frame.verb in (b"MSG", b"HMSG") and frame.subject in inboxes

        return self.hold_all(matches, count=count, skip=skip)

    # -------------------------------------------------------------------------------------------------- what it does

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.made += 1
        if self.refuses:
            writer.close()
            return
        if self.actors:
            with suppress(OSError, ValueError):
                await self.actors.pop(0)(reader, writer)
            writer.close()
            return
        with suppress(OSError):
            from_server, to_server = await asyncio.open_connection(*self._server)
            link = Link(writer, to_server)
            self.links.append(link)
            try:
                await asyncio.gather(
                    self._pump(link, reader, to_server), self._pump(link, from_server, writer, back=True)
                )
            finally:
                self.links.remove(link)
                link.cut()
        writer.close()

    async def _pump(
        self, link: Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, back: bool = False
    ) -> None:
        with suppress(OSError, asyncio.IncompleteReadError, RuntimeError):  # uvloop raises that where it is closed here
            while True:
                frame = Frame(link, await reader.readuntil(b"\n"))
                if frame.verb in WITH_BODY:
                    frame.body = await reader.readexactly(int(frame.words[-1]) + 2)
                await self._speaks.wait()
                if back and self.lag:
                    await anyio.sleep(self.lag)
                if frame.verb == b"SUB":
                    link.subscriptions[frame.words[-1]] = frame.subject
                elif frame.verb == b"UNSUB":
                    link.subscriptions.pop(frame.words[1], None)
                kept = [trap.takes(frame) for trap in self._traps]
                if not any(kept):
                    writer.write(frame.line + frame.body)
                    await writer.drain()
        link.cut()
