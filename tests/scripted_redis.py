"""Servers that speak the Redis protocol and say what a test lets them say: a sentinel, and one that answers as it is told."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import anyio
import hiredis

from mainspring.mailbox.redis.mailbox import RedisMailbox

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

    from anyio.abc import TaskStatus

    from redis_support import Place


class Scripted:
    """A server on a port of this machine. ``answer`` is given each command; what it returns is the answer.

    That is a number, a string, a list, None, or an error; :class:`EOFError`: it hangs up.
    """

    port: int

    def __init__(self, answer: Callable[[list[bytes]], Any]) -> None:
        self.answer = answer
        self.open = 0
        """Connections that there are."""
        self.made = 0
        """Connections that have been made."""

    async def __aenter__(self) -> Self:
        self._tasks = await anyio.create_task_group().__aenter__()
        self.port = await self._tasks.start(self._listen)
        return self

    async def __aexit__(self, *error: Any) -> Any:
        self._tasks.cancel_scope.cancel()
        return await self._tasks.__aexit__(*error)

    async def _listen(self, *, task_status: TaskStatus[int]) -> None:
        async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener:
            task_status.started(listener.extra(anyio.abc.SocketAttribute.local_port))
            await listener.serve(self._serve)

    async def _serve(self, client: Any) -> None:
        reader = hiredis.Reader()
        self.open += 1
        self.made += 1
        try:
            async with client:
                with suppress(EOFError, anyio.EndOfStream, anyio.BrokenResourceError):
                    while True:
                        reader.feed(await client.receive())
                        while (command := reader.gets()) is not False:
                            await client.send(_written(self.answer(command)))
        finally:
            self.open -= 1


def hello(mode: str) -> list[Any]:
    """What a server says to HELLO that is ``standalone``, a ``sentinel`` or of a ``cluster``."""
    return ["server", "redis", "version", "7.0.0", "mode", mode]


def _written(answer: Any) -> bytes:
    if isinstance(answer, EOFError):
        raise answer
    if isinstance(answer, Exception):
        return f"-{answer}\r\n".encode()
    if answer is None:
        return b"*-1\r\n"
    if isinstance(answer, int):
        return b":%d\r\n" % answer
    if isinstance(answer, list):
        return b"*%d\r\n" % len(answer) + b"".join(map(_written, answer))
    data = str(answer).encode()
    return b"$%d\r\n%b\r\n" % (len(data), data)


class Sentinel(Scripted):
    """A sentinel that names the server at the port ``primary`` of this machine; None: it knows none."""

    def __init__(self, primary: int | None) -> None:
        super().__init__(self._says)
        self.primary = primary

    def _says(self, command: list[bytes]) -> Any:
        if command[0] == b"HELLO":
            return hello("sentinel")
        return None if self.primary is None else ["127.0.0.1", str(self.primary)]

    def mailbox(self, here: Place, name: str = "jobs", /, **options: Any) -> RedisMailbox:
        """An unopened mailbox of a place, on the server that this names."""
        db = urlsplit(here.url).path or "/0"
        url = f"redis+sentinel://127.0.0.1:{self.port}/primary{db}"
        return RedisMailbox(url, name=here.prefix + name, **here.options, **options)
