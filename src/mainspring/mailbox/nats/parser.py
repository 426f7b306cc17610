"""What a NATS server sends, taken apart at once: a message costs neither a task switch nor a coroutine."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from nats.errors import ProtocolError
from nats.protocol.parser import Parser

from mainspring.errors import describe

if TYPE_CHECKING:
    from collections.abc import Callable

_LINE = b"NATS/1.0"
_END = b"\r\n"
_KINDS = (b"MSG ", b"HMSG ", b"PING", b"PONG", b"+OK", b"INFO ", b"-ERR")
_LONGEST_LINE = 1 << 20
"""Bytes of a line that has no end yet: an INFO names all servers of a cluster."""
_LARGEST = 1 << 28
"""Bytes of a message: four times what a server can be set to take."""


class UnreadableError(ProtocolError):
    """What came is no protocol of NATS, so that nothing behind it can be read either: the connection must be made anew."""

    def __init__(self, what: str) -> None:
        super().__init__(f"what the NATS server sent cannot be read: {what}")

    def __str__(self) -> str:
        return str(self.args[0])


class Heard(NamedTuple):
    """A message as it came."""

    subject: bytes
    reply: bytes
    head: bytes
    """Its headers with the line before them, or nothing."""
    data: bytes

    @property
    def status(self) -> tuple[str, str]:
        """The status in the line before the headers, which only the server's own word has, and what it says of that."""
        code, _, told = (
            self.head.partition(_END)[0].removeprefix(_LINE).decode("utf-8", "replace").strip().partition(" ")
        )
        return code, told.strip()


class QuickParser(Parser):
    """In the place of the driver's parser; messages of subscriptions that have a ``hearer`` are what that is called with.

    A hearer may not wait; what it raises goes where the driver's other errors go, and costs the others nothing.
    """

    def __init__(self, client: Any) -> None:
        super().__init__(client)
        self.hearers: dict[bytes, Callable[[Heard], object]] = {}
        """By the number of the subscription, as it stands in the protocol."""

    def reset(self) -> None:
        """Forget what has come so far: another connection begins."""
        super().reset()
        self._whole = 0

    async def parse(self, data: bytes = b"") -> None:
        """Take apart what has come; the beginning of something is kept for the next call.

        Raises :class:`UnreadableError`, which is told as the driver's other errors are, and whereupon the driver makes the
        connection anew. After any other error it would read no more, without a word.
        """
        try:
            await self._take_apart(data)
        except OSError:
            raise
        except Exception as error:
            unreadable = error if isinstance(error, UnreadableError) else UnreadableError(describe(error))
            await self.nc._error_cb(unreadable)  # noqa: SLF001 - the driver's own way for errors
            raise unreadable from error

    async def _take_apart(self, data: bytes) -> None:
        if self.buf:
            self.buf += data
            if len(self.buf) < self._whole:
                return
            data = bytes(self.buf)
            self.buf.clear()
        self._whole = start = 0
        while (line := data.find(_END, start)) >= 0:
            words = data[start:line].split()
            kind = words[0] if words else b""
            if kind != b"MSG" and kind != b"HMSG":
                await self._obey(kind, data[start:line])
                start = line + 2
                if not self.nc.is_connected:  # that was the last word: the rest is of no connection any more
                    return
                continue
            size, head, replied = _sizes(words)
            end = line + 2 + size
            if len(data) < end + 2:
                self._whole = end + 2 - start
                break
            if not data.startswith(_END, end):
                raise UnreadableError(f"{data[start:line][:60]!r} has another size")
            start = line + 2
            heard = _made(
                (words[1], words[3] if replied else b"", data[start : start + head], data[start + head : end])
            )
            start = end + 2
            hearer = self.hearers.get(words[2])
            if hearer is None:
                await self.nc._process_msg(int(words[2]), heard.subject, heard.reply, heard.data, heard.head)  # noqa: SLF001
                continue
            try:
                hearer(heard)
            except Exception as error:
                await self.nc._error_cb(error)  # noqa: SLF001
        if not self.nc.is_connected:  # the rest never comes: what does is of a new connection
            return
        rest = data[start:]
        if rest and not self._whole and (len(rest) > _LONGEST_LINE or not _begins(rest)):
            raise UnreadableError(f"{rest[:60]!r}")
        self.buf += rest

    async def _obey(self, kind: bytes, line: bytes) -> None:
        """Do what a line wants that is no message."""
        client = self.nc
        if kind == b"PING":
            await client._process_ping()  # noqa: SLF001 - the driver's parser calls these too
        elif kind == b"PONG":
            await client._process_pong()  # noqa: SLF001
        elif kind == b"INFO":
            await client._process_info(json.loads(line[4:]))  # noqa: SLF001
        elif kind == b"-ERR":
            await client._process_err(line[4:].strip().decode("utf-8", "replace").lower())  # noqa: SLF001
        elif kind != b"+OK":
            raise UnreadableError(f"{line[:60]!r}")


_made: Callable[[tuple[bytes, bytes, bytes, bytes]], Heard] = partial(tuple.__new__, Heard)
"""A :class:`Heard`, without the Python function that a named tuple has for it."""


def _sizes(words: list[bytes]) -> tuple[int, int, bool]:
    """What the line before a message says: the bytes of all of it, of its headers, and whether it names a reply subject."""
    count = len(words)
    size = head = -1
    if words[0] == b"MSG":
        if 4 <= count <= 5 and words[-1].isdigit():
            size, head = int(words[-1]), 0
    elif 5 <= count <= 6 and words[-1].isdigit() and words[-2].isdigit():
        size, head = int(words[-1]), int(words[-2])
        count -= 1
    if 0 <= head <= size <= _LARGEST:
        return size, head, count == 5
    raise UnreadableError(f"{b' '.join(words)[:60]!r}")


def _begins(rest: bytes) -> bool:
    """Whether a line can begin so."""
    return any(rest.startswith(kind[: len(rest)]) for kind in _KINDS)
