"""One connection to a Redis server: hiredis packs and parses, anyio carries.

There is no client library in between: a client's pools and queues would cost more than the call (measured: two to four times
as long a round trip).
"""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING, Any, Final

import anyio
import hiredis
from anyio.streams.tls import TLSStream

from mainspring.errors import ConfigError, MailboxConnectionError, describe, message_of, remedy
from mainspring.mailbox.redis.direct_stream import DirectStream
from mainspring.runtime.resolver import connect_tcp

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Sequence

    from anyio.abc import ByteStream

    from mainspring.mailbox.redis.url import Host, Server

LEAST_VERSION: Final = 7
TLS_PATIENCE: Final = 1.0
"""Seconds after which a server that has not answered to TLS is asked whether it speaks plain text."""
NOTHING: Final = object()
"""What is parsed while no reply is whole."""
LONGEST: Final = 536_870_912
"""The most bytes of one argument that a server takes which was not told otherwise (``proto-max-bulk-len``)."""
PIECE: Final = 65_536
"""Bytes of one read. For more than 128 KiB the allocator asks the system each time, which costs more than a small reply."""
_FORBIDDEN: Final = ("NOAUTH", "WRONGPASS", "NOPERM", "DENIED")

LOST: Final = (OSError, anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError, hiredis.ProtocolError)
"""What reading or writing raises when the connection is gone (TimeoutError is an OSError)."""


def trouble(error: BaseException) -> str:
    """What is wrong with a connection, for people."""
    if isinstance(error, (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError)):
        return "the connection was lost"
    if isinstance(error, OSError) and isinstance(error.__cause__, OSError):  # anyio's sum of all its tries to connect
        return f"{error.__cause__}{remedy(error.__cause__)}"
    if isinstance(error, hiredis.ProtocolError):
        return f"{message_of(error)}; what answers there is no Redis server: correct the host and the port of the URL"
    return f"{describe(error)}{remedy(error)}"


class ServerError(MailboxConnectionError):
    """The server answered with an error. ``code`` is its first word."""

    def __init__(self, text: str) -> None:
        super().__init__(f"the Redis server says: {text}")
        self.code, _, self.detail = text.partition(" ")

    @property
    def is_last(self) -> bool:
        """Whether the server hangs up behind it, as it could not read what it was sent."""
        return self.code == "ERR" and self.detail.startswith("Protocol error")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (f"{self.code} {self.detail}",)


class Wire:
    """A connection that is ready for commands, to ``host``. Closed or not, :meth:`close` may be called."""

    __slots__ = ("_direct", "_stream", "cluster", "feed", "host", "longest", "parsed", "receive", "write")

    def __init__(self, direct: DirectStream, stream: ByteStream, host: Host) -> None:
        reader = hiredis.Reader(replyError=ServerError, notEnoughData=NOTHING)
        self.write: Callable[[bytes], Awaitable[None]] = stream.send
        """Writes a packed command. What the socket does not take at once leaves with the next one, or with :meth:`flush`."""
        self.receive: Callable[[int], Awaitable[bytes]] = stream.receive
        """Waits for at most :data:`PIECE` bytes, which are for ``feed``."""
        self.feed: Callable[[bytes], None] = reader.feed
        self.parsed: Callable[[], Any] = reader.gets
        """Gives the next reply that has come whole, which may be a :class:`ServerError`; or :data:`NOTHING`."""
        self._direct = direct
        self._stream = stream
        self.host = host
        self.cluster = False
        self.longest = LONGEST
        """The most bytes of one argument that the server takes."""

    @property
    def unsent(self) -> Collection[memoryview]:
        """What has been written and has not left."""
        return self._direct.unsent

    async def flush(self) -> None:
        """Wait until all that was written has left."""
        await self._direct.flush()

    async def call(self, *command: str | int | float | bytes) -> Any:
        """Write one command and read its reply; raises :class:`ServerError` where that is an error."""
        await self.write(packed(command))
        await self.flush()
        while (reply := self.parsed()) is NOTHING:
            self.feed(await self.receive(PIECE))
        if isinstance(reply, ServerError):
            raise reply
        return reply

    async def close(self) -> None:
        """Hang up, without waiting for anything."""
        await anyio.aclose_forcefully(self._stream)


def packed(command: Sequence[str | int | float | bytes]) -> bytes:
    """A command as it is written."""
    whole: Any = command if type(command) is tuple else tuple(command)  # its stub knows tuples of one only
    data: bytes = hiredis.pack_command(whole)
    return data


def parsed(said: bytes) -> Any:
    """What a reply of these bytes says."""
    reader = hiredis.Reader()
    reader.feed(said)
    return reader.gets()


async def connect(server: Server, host: Host, *, sentinel: bool = False, name: str = "mainspring") -> Wire:
    """A connection to ``host`` as the user of ``server``, on its database, with that name in ``CLIENT LIST``.

    Raises what :data:`LOST` names, and :class:`ServerError`; :class:`ConfigError` where the server is too old.
    """
    tcp = await connect_tcp(*host)
    stream: ByteStream = tcp
    try:
        stream = direct = DirectStream(tcp, waits=False)
        if server.tls is not None:
            stream = await _encrypted(direct, host, server.tls)
        wire = Wire(direct, stream, host)
        await _greet(wire, server, sentinel, name)
    except BaseException:
        with anyio.CancelScope(shield=True, deadline=anyio.current_time() + 1):
            await anyio.aclose_forcefully(stream)
        raise
    return wire


async def _encrypted(stream: ByteStream, host: Host, context: ssl.SSLContext) -> ByteStream:
    """The stream with TLS. A server without it waits for the end of a line, and says nothing: so it is asked in plain text."""
    found: list[ByteStream] = []
    failed: list[Exception] = []
    plain = False

    async def ask() -> None:
        nonlocal plain
        await anyio.sleep(TLS_PATIENCE)
        plain = await _speaks_plainly(host)
        if plain:
            tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        try:
            found.append(await TLSStream.wrap(stream, hostname=host[0], ssl_context=context, standard_compatible=False))
        except LOST as error:
            failed.append(error)
        tasks.cancel_scope.cancel()
    if found:
        return found[0]
    where = f"the server at {host[0]}:{host[1]}"
    if plain or (failed and "WRONG_VERSION" in str(failed[0])):
        raise ConfigError(
            f"{where} does not speak TLS: set it up there, or write redis:// if everybody may read all of it"
        )
    if isinstance(failed[0], ssl.SSLCertVerificationError):
        raise ConfigError(f"{where} has a certificate that is not trusted ({failed[0].verify_message}); check ca_file")
    raise failed[0]


async def _speaks_plainly(host: Host) -> bool:
    try:
        async with await connect_tcp(*host) as stream:
            await stream.send(b"PING\r\n")
            return (await stream.receive(1))[:1] in (b"+", b"-")
    except LOST:
        return False


async def _greet(wire: Wire, server: Server, sentinel: bool, name: str) -> None:
    password = server.sentinel_password if sentinel else server.password
    login: list[str] = []
    if password is not None:
        login = ["AUTH", "default" if sentinel or server.username is None else server.username, password]
    try:
        answer = await wire.call("HELLO", 2, *login, "SETNAME", name)
    except ServerError as error:
        if error.code == "ERR" and "unknown command" in error.detail.lower():
            raise ConfigError(f"{_place(wire)} is older than Redis {LEAST_VERSION}") from None
        raise
    said = dict(zip(answer[::2], answer[1::2], strict=False))
    version = said.get(b"version", b"").decode("ascii", "replace")
    if not version.partition(".")[0].isdigit() or int(version.partition(".")[0]) < LEAST_VERSION:
        raise ConfigError(
            f"{_place(wire)} is version {version or 'unknown'}; a mailbox needs Redis {LEAST_VERSION}, or Valkey"
        )
    wire.cluster = said.get(b"mode") == b"cluster"
    if server.db and wire.cluster:
        raise ConfigError(f"{_place(wire)} belongs to a cluster, which has the database 0 only")
    is_sentinel = said.get(b"mode") == b"sentinel"
    if sentinel and not is_sentinel:
        raise ConfigError(f"{_place(wire)} is no sentinel; its scheme is redis://")
    if is_sentinel and not sentinel:
        raise ConfigError(f"{_place(wire)} is a sentinel; write redis+sentinel://host:port/service/0")
    if server.db and not sentinel:
        try:
            await wire.call("SELECT", server.db)
        except ServerError as error:
            if error.code != "ERR":
                raise
            raise ConfigError(f"{_place(wire)} has no database {server.db} ({error.detail}); correct the URL") from None


def _place(wire: Wire) -> str:
    return f"the server at {wire.host[0]}:{wire.host[1]}"


def refused(error: ServerError) -> bool:
    """Whether the server refuses this user: no later try would fare better."""
    return error.code in _FORBIDDEN
