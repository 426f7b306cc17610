"""The connections to Redis servers: hiredis packs and parses, anyio carries, and the mailboxes of a process share them.

There is no client library in between: a client's pools and queues would cost more than the call (measured: two to four times
as long a round trip).

For each server, user and event loop there is one connection for calls, and one to listen.
A *line* makes one connection for all that ask for it. Each mailbox has a *channel* of it, with the interface of a connection
of its own: its commands are written in the order in which they come, and the server answers in that order. No task belongs
to a connection: of the tasks that wait for something to come, one reads for all, and leaves that to the next when it goes.

- A channel that is closed has its outstanding answers dropped as they come. The last channel hangs up.
- A mailbox that mistrusts a connection *retires* it: the next call of any makes a new one; answers that are out are still read.
- A connection that breaks raises in all its channels.
- A command is written as far as the socket takes it at once. The rest leaves while its caller waits for the answer, or with
  the next command: no cancellation leaves half a command behind.
"""

from __future__ import annotations

import errno
import socket
import ssl
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import anyio
import hiredis
from anyio.abc import ByteStream, SocketAttribute
from anyio.streams.tls import TLSStream

from mainspring.core import process, random
from mainspring.core.clock import loop_clock
from mainspring.errors import ConfigError, MailboxConnectionError, copied, describe, message_of, remedy
from mainspring.policies import backoff
from mainspring.runtime.resolver import connect_tcp

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence

    from anyio.abc import SocketStream

    from mainspring.mailbox.redis.url import Server
    from mainspring.mailbox.settings import Host


class DirectStream(ByteStream):
    """The connection of ``stream``, which nobody else uses any more.

    Raises :class:`anyio.BrokenResourceError` where the peer has hung up already.

    :param waits: a write waits until the socket has taken all of it; False: it returns at once, and :meth:`flush` waits.

    Unlike anyio's streams it does not yield where it need not: a write that the socket takes whole returns at once. Several
    tasks may write: each item arrives whole, in the order of the calls. Cancelled in a write, the rest of the item leaves with
    the next write or :meth:`flush`; cancelled in a read, nothing is lost.
    """

    def __init__(self, stream: SocketStream, *, waits: bool = True) -> None:
        self._stream = stream
        self._waits = waits
        try:
            known = stream.extra(SocketAttribute.raw_socket)  # noqa: S610 - not Django's
            self._socket = socket.fromfd(known.fileno(), known.family, known.type)
        except (AttributeError, OSError) as error:
            if isinstance(error, OSError) and error.errno != errno.EBADF:
                raise
            raise anyio.BrokenResourceError from error  # closed already: uvloop has no socket then, asyncio no descriptor
        self._socket.setblocking(False)
        self._rest: deque[memoryview] = deque()
        self._turn = anyio.Lock()

    @property
    def extra_attributes(self) -> Mapping[Any, Callable[[], Any]]:
        """Those of the stream that anyio made."""
        return self._stream.extra_attributes

    async def send(self, item: bytes) -> None:
        """Write all of it, behind what was written before."""
        sent = 0 if self._rest else self._write(item)
        if sent < len(item):
            self._rest.append(memoryview(item)[sent:])
            if self._waits:
                await self.flush()

    @property
    def unsent(self) -> Collection[memoryview]:
        """What has been written and the socket has not taken; always the same object."""
        return self._rest

    async def flush(self) -> None:
        """Wait until the socket has taken all that was written."""
        if not self._rest:
            return
        async with self._turn:
            while self._rest:
                await anyio.wait_writable(self._check())
                sent = self._write(self._rest[0])
                self._rest[0] = self._rest[0][sent:]
                if not self._rest[0]:
                    self._rest.popleft()

    def _write(self, data: bytes | memoryview) -> int:
        try:
            return self._socket.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as error:
            raise self._broken() from error

    def receive(self, max_bytes: int = 65_536) -> Coroutine[Any, Any, bytes]:
        """What has come, or comes next; :class:`anyio.EndOfStream` at the end."""
        return self._stream.receive(max_bytes)

    async def send_eof(self) -> None:
        """Write no more."""
        self._check().shutdown(socket.SHUT_WR)

    async def aclose(self) -> None:
        """Hang up; whoever waits in a read or a write has :class:`anyio.ClosedResourceError`."""
        if self._socket.fileno() >= 0:
            anyio.notify_closing(self._socket)
            self._socket.close()
        await self._stream.aclose()

    def _check(self) -> socket.socket:
        if self._socket.fileno() < 0:
            raise anyio.ClosedResourceError
        return self._socket

    def _broken(self) -> Exception:
        return anyio.ClosedResourceError() if self._socket.fileno() < 0 else anyio.BrokenResourceError()


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


KIND: Final = "redis connections"
RECONNECT_INITIAL: Final = 0.02
RECONNECT_MAXIMUM: Final = 1.0
"""Seconds between tries to connect: callers wait their turn, so a server that is away is asked gently."""


class _NoChannel:
    """Stands in for a channel where no channel waits for the answer: it is dropped."""

    closed: Final = True

    def answer(self, reply: Any) -> None:
        """Drop it."""


_PING: Final = _NoChannel()
_LEAVE: Final = _NoChannel()


class Gate:
    """When to try to connect again."""

    def __init__(self) -> None:
        self._now = loop_clock()
        self._failures = 0
        self._opens = 0.0

    async def wait(self) -> None:
        """Wait for the turn to try."""
        pause = self._opens - self._now()
        if pause > 0:
            await anyio.sleep(pause)

    def failed(self) -> None:
        """A try has failed."""
        self._failures += 1
        self._opens = self._now() + backoff(
            self._failures,
            initial=RECONNECT_INITIAL,
            maximum=RECONNECT_MAXIMUM,
            factor=2.0,
            jitter="full",
            rng=random.rng(),
        )

    def succeeded(self) -> None:
        """A try has succeeded."""
        self._failures = 0
        self._opens = 0.0


class Lines:
    """Both lines to one server, for one user and event loop."""

    def __init__(self) -> None:
        self.calls = Line()
        self.listening = Line()

    @classmethod
    def shared(cls, server: Server) -> Lines:
        """Those of the running event loop to that server, as that user, with those TLS options."""
        return process.shared(KIND, (process.event_loop(), server), cls)


class Line:
    """Gives out channels of one connection, which is made when there is none."""

    def __init__(self) -> None:
        self.gate = Gate()
        self.connection: Connection | None = None
        self._turn = anyio.Lock()
        self._failures = 0
        self._failure: Exception | None = None

    async def join(self, connect: Callable[[], Awaitable[Wire]]) -> Channel:
        """A channel of the connection, made by ``connect`` if there is none; of several callers one makes it for all.

        Raises what ``connect`` raises, also in the callers that waited for that try.
        """
        failures = self._failures
        while self.connection is None:
            async with self._turn:
                if self.connection is not None:
                    break
                if self._failures != failures:
                    assert self._failure is not None
                    raise copied(self._failure)
                await self._make(connect)
        return Channel(self.connection)

    async def _make(self, connect: Callable[[], Awaitable[Wire]]) -> None:
        await self.gate.wait()
        try:
            wire = await connect()
        except Exception as error:
            self.gate.failed()
            self._failures += 1
            self._failure = error
            raise
        self.gate.succeeded()
        self._failure = None
        self.connection = Connection(self, wire)


class Connection:
    """One connection to a server, read by one of its channels for all."""

    def __init__(self, line: Line, wire: Wire) -> None:
        self.line = line
        self.wire = wire
        self.unsent = wire.unsent
        self.channels: set[Channel] = set()
        self.routes: dict[bytes, list[Channel]] = {}
        """Who hears what is published on a channel of the server's."""
        self.turns: deque[Channel | _NoChannel] = deque()
        """Whose the outstanding answers are, in their order."""
        self.reader: Channel | None = None
        self.waiting: dict[anyio.Event, None] = {}
        """The channels that wait while another one reads."""
        self.lost = False
        self.asked_at: float | None = None
        self._now = loop_clock()
        self.heard_at = self._now()

    @property
    def retired(self) -> bool:
        """True if new channels get another connection."""
        return self.line.connection is not self

    async def write(self, turn: Channel | _NoChannel, command: Sequence[str | int | float | bytes]) -> None:
        """Write one command, whose answer is for ``turn``, as far as the socket takes it."""
        data = packed(command)
        self.turns.append(turn)
        try:
            await self.wire.write(data)
        except LOST:
            await self.hang_up()
            raise

    async def read(self, channel: Channel, items: deque[Any]) -> None:
        """Read for all until there are ``items`` for ``channel``, or it is closed."""
        receive, feed, parsed = self.wire.receive, self.wire.feed, self.wire.parsed
        self.reader = channel
        try:
            while not (items or channel.closed):
                feed(await receive(PIECE))
                self.heard_at, self.asked_at = self._now(), None
                while (reply := parsed()) is not NOTHING:
                    if self.routes and type(reply) is list and self._is_published(reply):
                        continue
                    if not self.turns:
                        raise anyio.BrokenResourceError  # the last words of a server that hangs up
                    self.turns.popleft().answer(reply)
        except LOST:
            await self.hang_up()
            raise
        finally:
            self.reader = None
        if self.line.connection is not self:
            await self.tidy()

    def _is_published(self, reply: list[Any]) -> bool:
        """Give out what came for those who have subscribed; False if it is an answer."""
        unasked = reply[:1] == [b"sunsubscribe"] and not (self.turns and self.turns[0] is _LEAVE)
        if not unasked and reply[:1] != [b"smessage"]:
            return False
        for channel in self.routes.get(reply[1], ()):
            channel.publish(reply)
        return True

    def pass_on(self) -> None:
        """Let the next one read that waits."""
        if self.reader is None:
            next(iter(self.waiting)).set()

    def retire(self, *, pause: bool) -> None:
        """Give out no more channels; with ``pause`` the next try to connect waits a little."""
        if not self.retired:
            self.line.connection = None
            if pause:
                self.line.gate.failed()

    async def tidy(self) -> None:
        """Hang up where nothing more is to come: no channel is left, or none of a retired connection waits for anything."""
        if self.lost or (self.channels and not self.retired):
            return
        if self.channels and (self.routes or any(not turn.closed for turn in self.turns)):
            return
        await self.hang_up()

    async def hang_up(self) -> None:
        """Close it for all."""
        self.lost = True
        if not self.retired:
            self.line.connection = None
        for event in self.waiting:
            event.set()
        with anyio.CancelScope(shield=True, deadline=anyio.current_time() + 1):
            await self.wire.close()


class Channel:
    """What one mailbox has of a connection: answers to its own commands, and what is published where it subscribes."""

    __slots__ = ("_alone", "_connection", "_event", "_scope", "closed", "host", "longest", "messages", "replies")

    def __init__(self, connection: Connection) -> None:
        self.host = connection.wire.host
        self.longest = connection.wire.longest
        self.closed = False
        self.replies: deque[Any] = deque()
        self.messages: deque[Any] = deque()
        self._connection = connection
        self._event: anyio.Event | None = None
        self._scope: anyio.CancelScope | None = None
        self._alone = False  # whether it reads without a scope: closing it hangs up, which ends the read
        connection.channels.add(self)

    @property
    def current(self) -> bool:
        """True if new calls may begin on this connection."""
        return not (self.closed or self._connection.retired)

    def heard_since(self, instant: float) -> bool:
        """True if new calls may begin on this connection, and it has worked since ``instant``."""
        connection = self._connection
        return connection.heard_at >= instant and connection.line.connection is connection and not self.closed

    @property
    def heard_at(self) -> float:
        """When the server last sent anything over the connection."""
        return self._connection.heard_at

    @property
    def asked_at(self) -> float | None:
        """When the server was asked whether it is there, if it has sent nothing since."""
        return self._connection.asked_at

    def send(self, command: Sequence[str | int | float | bytes]) -> Awaitable[None]:
        """Write one command, without a wait; :meth:`read` waits until all of it has left."""
        connection = self._connection
        if self.closed or connection.lost:
            raise anyio.ClosedResourceError
        return connection.write(self, command)

    def read(self) -> Awaitable[Any]:
        """Wait for the next reply to a command of this channel; raises :class:`ServerError` where it is an error."""
        return self._next(self.replies)

    def hear(self) -> Awaitable[Any]:
        """Wait for the next message that was published on a channel that :meth:`subscribe` has named."""
        return self._next(self.messages)

    async def call(self, *command: str | int | float | bytes) -> Any:
        """Write one command and read its reply."""
        await self.send(command)
        return await self.read()

    async def subscribe(self, name: bytes) -> None:
        """Hear what is published on that channel of the server's."""
        self._connection.routes.setdefault(name, []).append(self)
        await self.call("SSUBSCRIBE", name)

    async def ask(self, now: float) -> None:
        """Ask whether the server is there, unless it was asked already: ``heard_at`` tells that it is."""
        if self._connection.asked_at is None:
            self._connection.asked_at = now
            await self._connection.write(_PING, ("PING",))

    async def _next(self, items: deque[Any]) -> Any:
        connection = self._connection
        try:
            if connection.unsent:
                await self._until_closed(connection.wire.flush)
            while not items:
                if self.closed or connection.lost:
                    raise anyio.ClosedResourceError
                if connection.reader is not None:
                    await self._wait()
                elif len(connection.channels) > 1:
                    await self._until_closed(connection.read, self, items)
                else:
                    self._alone = True
                    await connection.read(self, items)
        finally:
            self._alone = False
            if connection.waiting:
                connection.pass_on()
        item = items.popleft()
        if isinstance(item, ServerError):
            raise item
        return item

    async def _wait(self) -> None:
        """Wait for an item, or for the turn to read."""
        event = self._event = anyio.Event()
        self._connection.waiting[event] = None
        try:
            await event.wait()
        finally:
            del self._connection.waiting[event]
            self._event = None

    async def _until_closed(self, act: Callable[..., Awaitable[None]], *arguments: Any) -> None:
        """Do it until another task closes this channel."""
        with anyio.CancelScope() as scope:
            self._scope = scope
            try:
                await act(*arguments)
            finally:
                self._scope = None

    def answer(self, reply: Any) -> None:
        """Take the reply to a command of this channel; drop it if the channel is closed."""
        if not self.closed:
            self.replies.append(reply)
            if self._event is not None:
                self._event.set()

    def publish(self, message: Any) -> None:
        """Take a message that was published where this channel subscribes."""
        self.messages.append(message)
        if self._event is not None:
            self._event.set()

    def retire(self, *, pause: bool = False) -> None:
        """Trust the connection no more: all new channels are of another one (see :meth:`Connection.retire`)."""
        self._connection.retire(pause=pause)

    async def close(self) -> None:
        """Drop what is still to come; a task that waits for it has :class:`anyio.ClosedResourceError`."""
        if self.closed:
            return
        self.closed = True
        connection = self._connection
        connection.channels.discard(self)
        if self._event is not None:
            self._event.set()
        left = self._leave_routes()
        if self._scope is not None:
            self._scope.cancel()
        elif self._alone:
            await connection.hang_up()
        await connection.tidy()
        if left and not connection.lost:
            with suppress(*LOST):
                for name in left:
                    await self._unsubscribe(name)

    def _leave_routes(self) -> list[bytes]:
        """Hear nothing more; the channels of the server's that no mailbox here hears any more."""
        routes, left = self._connection.routes, []
        for name in [name for name, heard_by in routes.items() if self in heard_by]:
            routes[name].remove(self)
            if not routes[name]:
                del routes[name]
                left.append(name)
        return left

    async def _unsubscribe(self, name: bytes) -> None:
        if name not in self._connection.routes and not self._connection.lost:
            await self._connection.write(_LEAVE, ("SUNSUBSCRIBE", name))
