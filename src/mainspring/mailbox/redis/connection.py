"""The connections to Redis servers: hiredis packs and parses, anyio carries, and the mailboxes of a process share them.

There is no client library in between: a client's pools and queues would cost more than the call (measured: two to four times
as long a round trip).

For each server, user and event loop there is one connection for calls and one to listen. A *connector* makes one connection
for all mailboxes. Each mailbox has a *channel* of it: its commands are written in the order in which they come, and the server
answers in that order. No task belongs to a connection: of the tasks that wait for something to come, one reads for all, and
the next one takes over when it leaves.

- A closed channel drops its outstanding replies as they come. The last channel closes the connection.
- A mailbox that does not trust a connection *retires* it: new channels get a new one, outstanding replies are still read.
- A lost connection raises in all its channels.
- A command is written as far as the socket takes it at once. The rest leaves while its caller waits for the reply, or with
  the next command: no cancellation leaves half a command behind.
"""

from __future__ import annotations

import asyncio
import errno
import math
import socket
import ssl
from collections import deque
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import anyio
import hiredis
from anyio.abc import ByteStream, SocketAttribute
from anyio.streams.tls import TLSStream

from mainspring.core import process
from mainspring.core.clock import loop_clock
from mainspring.errors import ConfigError, MailboxConnectionError, copied, describe, message_of, remedy
from mainspring.runtime.resolver import connect_tcp
from mainspring.runtime.retry import Retries

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping

    from anyio.abc import SocketStream

    from mainspring.mailbox.redis.settings import RedisServer
    from mainspring.mailbox.settings import Host

    Argument = str | int | float | bytes


PIECE: Final = 65_536
"""Bytes of one read. For more than 128 KiB the allocator asks the system each time, which costs more than a small reply."""


class Arrivals:
    """What arrives on a socket, on the event loops of asyncio. They watch it all the time, and not anew for each read."""

    def __init__(self, source: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket = source.dup()  # at an error, uvloop closes the watch of a descriptor to its reader and its writer
        self._pieces: deque[bytes] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._end: type[Exception] | None = None
        self._cause: OSError | None = None
        self._loop.add_reader(self._socket, self._read)

    async def receive(self) -> bytes:
        """Return the next piece; raise what says why there is none."""
        while not self._pieces:
            if self._end is not None:
                raise self._end from self._cause
            self._waiter = self._loop.create_future()
            await self._waiter
        return self._pieces.popleft()

    def _read(self) -> None:
        try:
            piece = self._socket.recv(PIECE)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self.end(anyio.BrokenResourceError, error)
            return
        if not piece:
            self.end(anyio.EndOfStream)
            return
        self._pieces.append(piece)
        self._wake()

    def end(self, reason: type[Exception], cause: OSError | None = None) -> None:
        """Watch the socket no more, and raise ``reason`` in a task that waits."""
        if self._end is None:
            self._end, self._cause = reason, cause
            self._loop.remove_reader(self._socket)
            self._socket.close()
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class DirectStream(ByteStream):
    """A TCP stream that writes at once, and takes over the connection of ``stream``.

    anyio's own stream gives the event loop a turn before each write, which a call of a few hundred bytes need not wait for.
    This one writes to the same connection under a second descriptor. It reads as anyio does until it is told to :meth:`watch`.

    A write never waits: what the socket does not take at once leaves with the next write or in :meth:`flush`. Several tasks may
    write: each item arrives whole, in the order of the calls. Cancelled in a read, nothing is lost.

    :raises anyio.BrokenResourceError: the peer has closed the connection already.
    """

    def __init__(self, stream: SocketStream) -> None:
        self.source = stream
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
        self._arrivals: Arrivals | None = None

    def watch(self) -> None:
        """Let asyncio's event loop watch the socket from now on (not trio's). What has come must have been received."""
        if process.async_library() == "asyncio":
            self._arrivals = Arrivals(self._socket)

    @property
    def extra_attributes(self) -> Mapping[Any, Callable[[], Any]]:
        """Those of the stream that anyio made."""
        return self.source.extra_attributes

    async def send(self, item: bytes | memoryview) -> None:
        """Write ``item`` behind what was written before, as far as the socket takes it."""
        sent = 0
        if self._rest:
            self._check()
        else:
            try:
                sent = self._socket.send(item)
            except (BlockingIOError, InterruptedError):
                pass
            except OSError as error:
                raise (
                    anyio.BrokenResourceError if self._socket.fileno() >= 0 else anyio.ClosedResourceError
                ) from error
        if sent < len(item):
            self._rest.append(memoryview(item)[sent:])

    @property
    def unsent(self) -> Collection[memoryview]:
        """Return what was written and the socket has not taken; always the same object."""
        return self._rest

    async def flush(self) -> None:
        """Wait until the socket has taken all that was written."""
        if not self._rest:
            return
        async with self._turn:
            while self._rest:
                await anyio.wait_writable(self._check())
                left = list(self._rest)
                self._rest.clear()
                for item in left:  # no other task writes in between: send() does not wait
                    await self.send(item)

    def receive(self, max_bytes: int = PIECE) -> Coroutine[Any, Any, bytes]:
        """Return what has come, or comes next; raise :class:`anyio.EndOfStream` at the end."""
        return self.source.receive(max_bytes) if self._arrivals is None else self._arrivals.receive()

    async def send_eof(self) -> None:
        """Write no more."""
        self._check().shutdown(socket.SHUT_WR)

    async def aclose(self) -> None:
        """Close the connection; tasks that read or flush raise :class:`anyio.ClosedResourceError`."""
        if self._socket.fileno() >= 0:
            if self._arrivals is not None:
                self._arrivals.end(anyio.ClosedResourceError)
            anyio.notify_closing(self._socket)
            self._socket.close()
        await self.source.aclose()

    def _check(self) -> socket.socket:
        if self._socket.fileno() < 0:
            raise anyio.ClosedResourceError
        return self._socket


LEAST_VERSION: Final = 7
NOTHING: Final = object()
"""The result of parsing while no reply is complete."""
LONGEST: Final = 536_870_912
"""The most bytes of one argument that a server takes which was not told otherwise (``proto-max-bulk-len``)."""
_FORBIDDEN: Final = ("NOAUTH", "WRONGPASS", "NOPERM", "DENIED")

LOST: Final = (OSError, anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError, hiredis.ProtocolError)
"""What reading or writing raises when the connection is gone (TimeoutError is an OSError)."""


def explain(error: BaseException) -> str:
    """Describe what is wrong with a connection, for an error text."""
    if isinstance(error, (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError)):
        return str(error) or "the connection was lost"
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
        """True if the server closes the connection behind it, as it could not read what it was sent."""
        return self.code == "ERR" and self.detail.startswith("Protocol error")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (f"{self.code} {self.detail}",)


class RedisConnection:
    """A connection to ``host`` that is ready for commands. Closed or not, :meth:`close` may be called."""

    __slots__ = ("_stream", "cluster", "feed", "flush", "host", "longest", "next_reply", "receive", "unsent", "write")

    def __init__(self, direct: DirectStream, stream: ByteStream, host: Host) -> None:
        reader = hiredis.Reader(replyError=ServerError, notEnoughData=NOTHING)
        self.write: Callable[[bytes], Awaitable[None]] = stream.send
        """Writes a packed command, as far as the socket takes it."""
        self.unsent = direct.unsent
        """What was written and has not left."""
        self.flush: Callable[[], Awaitable[None]] = direct.flush
        """Waits until all that was written has left."""
        self.receive: Callable[[int], Awaitable[bytes]] = stream.receive
        """Waits for at most :data:`PIECE` bytes, which are for ``feed``."""
        self.feed: Callable[[bytes], None] = reader.feed
        self.next_reply: Callable[[], Any] = reader.gets
        """Returns the next complete reply, which may be a :class:`ServerError`; or :data:`NOTHING`."""
        self._stream = stream
        self.host = host
        self.cluster = False
        self.longest = LONGEST
        """The most bytes of one argument that the server takes."""

    async def call(self, *command: Argument) -> Any:
        """Write one command and read its reply. Raise :class:`ServerError` if that is an error."""
        await self.write(pack(command))
        await self.flush()
        while (reply := self.next_reply()) is NOTHING:
            self.feed(await self.receive(PIECE))
        if isinstance(reply, ServerError):
            raise reply
        return reply

    async def close(self) -> None:
        """Close it without waiting for anything, also if the caller is cancelled."""
        with anyio.CancelScope(shield=True, deadline=anyio.current_time() + 1):
            await anyio.aclose_forcefully(self._stream)


pack: Final[Callable[[tuple[Argument, ...]], bytes]] = hiredis.pack_command  # type: ignore[assignment]  # its stub knows tuples of one only
"""Returns a command as it is written."""


async def connect(
    server: RedisServer, host: Host, *, sentinel: bool = False, name: str = "mainspring"
) -> RedisConnection:
    """Connect to ``host`` as the user of ``server``, on its database, with that name in ``CLIENT LIST``.

    Raises what :data:`LOST` names, and :class:`ServerError`; :class:`ConfigError` where the server is too old.
    """
    tcp = await connect_tcp(*host)
    stream: ByteStream = tcp
    try:
        stream = direct = DirectStream(tcp)
        if server.tls is not None:
            stream = await _encrypted(direct, host, server.tls)
        connection = RedisConnection(direct, stream, host)
        await _greet(connection, server, sentinel, name)
        direct.watch()
    except BaseException as error:
        with anyio.CancelScope(shield=True, deadline=anyio.current_time() + 1):
            await anyio.aclose_forcefully(stream)
        if isinstance(error, (anyio.EndOfStream, anyio.BrokenResourceError)):
            with_tls, other = (
                (" with TLS", "") if server.tls is not None else ("", "; for one with TLS write rediss://")
            )
            raise anyio.EndOfStream(
                f"it hung up when greeted; check that a Redis server{with_tls} listens on that port{other}"
            ) from error
        raise
    return connection


async def _encrypted(stream: ByteStream, host: Host, context: ssl.SSLContext) -> ByteStream:
    try:
        return await TLSStream.wrap(stream, hostname=host[0], ssl_context=context, standard_compatible=False)
    except ssl.SSLCertVerificationError as error:
        problem = f"has a certificate that is not trusted ({error.verify_message}); check ca_file"
    except ssl.SSLError as error:
        if "WRONG_VERSION" not in str(error):
            raise
        problem = "does not speak TLS: set it up there, or write redis:// if everybody may read all of it"
    raise ConfigError(f"the server at {host[0]}:{host[1]} {problem}")


async def _greet(connection: RedisConnection, server: RedisServer, sentinel: bool, name: str) -> None:
    password = server.sentinel_password if sentinel else server.password
    login: list[str] = []
    if password is not None:
        login = ["AUTH", "default" if sentinel or server.username is None else server.username, password]
    try:
        answer = await connection.call("HELLO", 2, *login, "SETNAME", name)
    except ServerError as error:
        if error.code == "ERR" and "unknown command" in error.detail.lower():
            raise ConfigError(f"{_place(connection)} is older than Redis {LEAST_VERSION}") from None
        raise
    said = dict(zip(answer[::2], answer[1::2], strict=False))
    version = said.get(b"version", b"").decode("ascii", "replace")
    if not version.partition(".")[0].isdigit() or int(version.partition(".")[0]) < LEAST_VERSION:
        raise ConfigError(
            f"{_place(connection)} is version {version or 'unknown'}; a mailbox needs Redis {LEAST_VERSION}, or Valkey"
        )
    connection.cluster = said.get(b"mode") == b"cluster"
    if server.db and connection.cluster:
        raise ConfigError(
            f"{_place(connection)} belongs to a cluster, which has the database 0 only: leave the number out of the URL"
        )
    is_sentinel = said.get(b"mode") == b"sentinel"
    if sentinel and not is_sentinel:
        raise ConfigError(f"{_place(connection)} is no sentinel; its scheme is redis://")
    if is_sentinel and not sentinel:
        raise ConfigError(f"{_place(connection)} is a sentinel; write redis+sentinel://host:port/service/0")
    if server.db and not sentinel:
        try:
            await connection.call("SELECT", server.db)
        except ServerError as error:
            if error.code != "ERR":
                raise
            raise ConfigError(
                f"{_place(connection)} has no database {server.db} ({error.detail}); correct the URL"
            ) from None


def _place(connection: RedisConnection) -> str:
    return f"the server at {connection.host[0]}:{connection.host[1]}"


def is_refusal(error: ServerError) -> bool:
    """True if the server refuses this user: no later try would fare better."""
    return error.code in _FORBIDDEN


KIND: Final = "redis connections"
RECONNECT_INITIAL: Final = 0.02
RECONNECT_MAXIMUM: Final = 1.0
"""Seconds between tries to connect: callers wait their turn, so a server that is away is asked gently."""


class Connectors:
    """Both connectors to one server, for one user and event loop."""

    def __init__(self) -> None:
        self.calls = Connector()
        self.listening = Connector()

    @classmethod
    def shared(cls, server: RedisServer) -> Connectors:
        """Return those of the running event loop to that server, as that user, with those TLS options."""
        return process.shared(KIND, (process.event_loop(), server), cls)


class Connector:
    """Gives out channels of one connection, which is made if there is none."""

    def __init__(self) -> None:
        self.connection: SharedConnection | None = None
        self._now = loop_clock()
        self._retries = Retries(initial=RECONNECT_INITIAL, maximum=RECONNECT_MAXIMUM)
        self._next_try = -math.inf
        self._turn = anyio.Lock()
        self._failures = 0
        self._failure: Exception | None = None

    async def open_channel(self, connect: Callable[[], Awaitable[RedisConnection]]) -> Channel:
        """Return a channel of the connection; one of several callers calls ``connect`` for all, if there is none.

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

    async def _make(self, connect: Callable[[], Awaitable[RedisConnection]]) -> None:
        await anyio.sleep_until(self._next_try)
        try:
            connection = await connect()
        except Exception as error:
            self.delay_next_try()
            self._failures += 1
            self._failure = error
            raise
        self._retries.succeeded()
        self._failure = None
        self.connection = SharedConnection(self, connection)

    def delay_next_try(self) -> None:
        """Let the next try to connect wait, longer after each failure."""
        self._next_try = self._now() + self._retries.failed()


class SharedConnection:
    """One connection to a server, read by one of its channels for all."""

    def __init__(self, connector: Connector, connection: RedisConnection) -> None:
        self.connector = connector
        self.connection = connection
        self.unsent = connection.unsent
        self.channels: set[Channel] = set()
        self.subscriber: Channel | None = None
        """Gets what is published where this connection has subscribed."""
        self.turns: deque[Channel | str] = deque()
        """Whose the outstanding replies are, in their order: a channel's, or dropped ones to the command of that name."""
        self.reader: Channel | None = None
        self.waiting: dict[anyio.Event, None] = {}
        """The channels that wait while another one reads."""
        self.lost = False
        self.pinged_at: float | None = None
        """When the server was sent a PING, if it has sent nothing since."""
        self.asking = anyio.Lock()
        """Held by a mailbox that asks something, or loads the functions, for all that wait for it meanwhile."""
        self.loaded_at = -math.inf
        self.memory: dict[str, str] = {}
        """What the server said of its memory, at ``memory_at``."""
        self.memory_at = -math.inf
        self._now = loop_clock()
        self.last_read_at = self._now()

    @property
    def retired(self) -> bool:
        """True if new channels get another connection."""
        return self.connector.connection is not self

    async def write(self, turn: Channel | str, packed: bytes) -> None:
        """Write one packed command, whose reply is for ``turn``, as far as the socket takes it."""
        if self.lost:
            raise anyio.ClosedResourceError
        self.turns.append(turn)
        try:
            await self.connection.write(packed)
        except LOST:
            await self.disconnect()
            raise

    async def read(self, channel: Channel, items: deque[Any]) -> None:
        """Read for all until there are ``items`` for ``channel``, or it is closed."""
        receive, feed, next_reply = self.connection.receive, self.connection.feed, self.connection.next_reply
        self.reader = channel
        try:
            while not (items or channel.closed):
                feed(await receive(PIECE))
                self.last_read_at, self.pinged_at = self._now(), None
                while (reply := next_reply()) is not NOTHING:
                    self._give_out(reply)
        except LOST:
            await self.disconnect()
            raise
        finally:
            self.reader = None
        if self.connector.connection is not self:
            await self.close_if_unused()

    def _give_out(self, reply: Any) -> None:
        """Give a message to the subscriber, a reply to the channel whose turn it is."""
        turns, subscriber = self.turns, self.subscriber
        if subscriber is not None and type(reply) is list and reply:
            kind = reply[0]
            if kind == b"smessage" or (kind == b"sunsubscribe" and not (turns and turns[0] == "SUNSUBSCRIBE")):
                subscriber.messages.append(reply)
                if subscriber.waiting is not None:
                    subscriber.waiting.set()
                return
        if not turns:
            raise anyio.BrokenResourceError  # the last words of a server that closes the connection
        turn = turns.popleft()
        if isinstance(turn, Channel) and not turn.closed:
            turn.replies.append(reply)
            if turn.waiting is not None:
                turn.waiting.set()

    def retire(self, *, pause: bool) -> None:
        """Give out no more channels; with ``pause`` the next try to connect waits a little."""
        if not self.retired:
            self.connector.connection = None
            if pause:
                self.connector.delay_next_try()

    async def close_if_unused(self) -> None:
        """Close it if nothing more is to come: it has no channel, or is retired and none of its channels waits for anything."""
        if self.lost or (self.channels and not self.retired):
            return
        awaited = any(isinstance(turn, Channel) and not turn.closed for turn in self.turns)
        if not self.channels or not (self.subscriber or awaited):
            await self.disconnect()

    async def disconnect(self) -> None:
        """Close it for all."""
        self.lost = True
        if not self.retired:
            self.connector.connection = None
        for event in self.waiting:
            event.set()
        await self.connection.close()


class Channel:
    """One mailbox's part of a connection: replies to its own commands, and messages published where it subscribes."""

    __slots__ = ("_alone", "_scope", "closed", "host", "longest", "messages", "replies", "send", "shared", "waiting")

    def __init__(self, shared: SharedConnection) -> None:
        self.shared = shared
        self.host = shared.connection.host
        self.longest = shared.connection.longest
        self.closed = False
        self.send: Callable[[bytes], Awaitable[None]] = partial(shared.write, self)
        """Writes one packed command, without a wait; :meth:`next` waits until all of it has left."""
        self.replies: deque[Any] = deque()
        """To the commands of this channel; some may be a :class:`ServerError`."""
        self.messages: deque[Any] = deque()
        """Published where the connection has subscribed, if this channel is its subscriber."""
        self.waiting: anyio.Event | None = None
        """Set when there is something for a task that waits while another channel reads."""
        self._scope: anyio.CancelScope | None = None
        self._alone = False  # it reads without a scope: closing it disconnects, which ends the read
        shared.channels.add(self)

    @property
    def current(self) -> bool:
        """True if new calls may begin on this connection."""
        return not (self.closed or self.shared.retired)

    def is_fresh(self, instant: float) -> bool:
        """True if new calls may begin on this connection, and it has worked since ``instant``."""
        shared = self.shared
        return shared.last_read_at >= instant and shared.connector.connection is shared and not self.closed

    async def call(self, *command: Argument) -> Any:
        """Write one command and read its reply."""
        await self.send(pack(command))
        return await self.next(self.replies)

    async def ping(self, now: float) -> None:
        """Ask the server whether it is there, unless it was asked already: ``last_read_at`` tells."""
        if self.shared.pinged_at is None:
            self.shared.pinged_at = now
            await self.shared.write("PING", pack(("PING",)))

    async def next(self, items: deque[Any]) -> Any:
        """Wait for the next of ``replies`` or ``messages``; raise a reply that is a :class:`ServerError`."""
        shared = self.shared
        try:
            if shared.unsent:
                await self._until_closed(shared.connection.flush)
            while not items:
                if self.closed or shared.lost:
                    raise anyio.ClosedResourceError
                if shared.reader is not None:
                    await self._wait()
                elif len(shared.channels) > 1:
                    await self._until_closed(shared.read, self, items)
                else:
                    self._alone = True
                    await shared.read(self, items)
        finally:
            self._alone = False
            if shared.waiting and shared.reader is None:
                next(iter(shared.waiting)).set()
        item = items.popleft()
        if isinstance(item, ServerError):
            raise item
        return item

    async def _wait(self) -> None:
        """Wait for an item, or for the turn to read."""
        event = self.waiting = anyio.Event()
        self.shared.waiting[event] = None
        try:
            await event.wait()
        finally:
            del self.shared.waiting[event]
            self.waiting = None

    async def _until_closed(self, act: Callable[..., Awaitable[None]], *arguments: Any) -> None:
        """Await ``act`` until another task closes this channel."""
        with anyio.CancelScope() as scope:
            self._scope = scope
            try:
                await act(*arguments)
            finally:
                self._scope = None

    async def close(self) -> None:
        """Drop what is still to come; a task that waits for it raises :class:`anyio.ClosedResourceError`."""
        if self.closed:
            return
        self.closed = True
        shared = self.shared
        shared.channels.discard(self)
        if self.waiting is not None:
            self.waiting.set()
        if self._scope is not None:
            self._scope.cancel()
        with anyio.CancelScope(shield=True, deadline=anyio.current_time() + 1), suppress(*LOST):
            if self._alone:
                await shared.disconnect()
            await shared.close_if_unused()
