"""The connections that the mailboxes of a process share: for each server, user and event loop one for calls, one to listen.

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

from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import anyio

from mainspring.core import process, random
from mainspring.core.clock import loop_clock
from mainspring.errors import copied
from mainspring.mailbox.redis.connection import LOST, NOTHING, PIECE, ServerError, packed
from mainspring.policies import backoff

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from mainspring.mailbox.redis.connection import Wire
    from mainspring.mailbox.redis.url import Server

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
