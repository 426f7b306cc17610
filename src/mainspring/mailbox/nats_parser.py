"""What a NATS server sends, taken apart at once: a message costs neither a task switch nor a coroutine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from nats.errors import ProtocolError
from nats.protocol.parser import Parser

if TYPE_CHECKING:
    from collections.abc import Callable

_LINE = b"NATS/1.0"
_END = b"\r\n"


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
    """The driver's parser, but for the messages of subscriptions that have a ``hearer``: those it is called with.

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
        """Take apart what has come; the beginning of something is kept for the next call."""
        if self.buf:
            self.buf += data
            if len(self.buf) < self._whole:
                return
            data = bytes(self.buf)
            self.buf.clear()
        self._whole = start = 0
        while (line := data.find(_END, start)) >= 0:
            words = data[start:line].split()
            if not words or words[0] not in (b"MSG", b"HMSG"):
                start, control = line + 2, data[start : line + 2]
                await super().parse(control)
                if not self.nc.is_connected:  # that was the last word: the rest is of no connection any more
                    return
                continue
            try:
                size = int(words[-1])
                head = int(words[-2]) if words[0] == b"HMSG" else 0
                number = words[2]
            except (ValueError, IndexError):
                raise ProtocolError("nats: malformed MSG") from None
            end = line + 2 + size
            if len(data) < end + 2:
                self._whole = end + 2 - start
                break
            start = line + 2
            heard = Heard(
                words[1],
                words[3] if len(words) == (6 if head else 5) else b"",
                data[start : start + head],
                data[start + head : end],
            )
            start = end + 2
            hearer = self.hearers.get(number)
            if hearer is None:
                await self.nc._process_msg(int(number), heard.subject, heard.reply, heard.data, heard.head)  # noqa: SLF001
                continue
            try:
                hearer(heard)
            except Exception as error:
                await self.nc._error_cb(error)  # noqa: SLF001 - the driver's own way for errors
        if self.nc.is_connected:  # else the rest never comes: what does is of a new connection
            self.buf += data[start:]
