"""How a Redis mailbox calls its library of functions: a batch of commands is one call, and one call is out at a time.

All mailboxes share a connection (see ``connection``). In a cluster replies travel alone: no step takes in two mailboxes, as
they are on two nodes.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

import anyio

from mainspring.core import random
from mainspring.core.clock import loop_clock
from mainspring.core.loggers import Logger
from mainspring.core.package_files import read_package_file
from mainspring.errors import ConfigError, MailboxConnectionError
from mainspring.mailbox.batched import AcknowledgeMany, Send
from mainspring.mailbox.limits import SILENCE, check_size
from mainspring.mailbox.redis.commands import (
    AGAIN,
    MICRO,
    OPERATIONS,
    TAKES,
    FetchBodies,
    RedisClaim,
    UndoLostClaims,
    base_of,
    bodies_of,
    joined,
    keys_of,
    record_keys_of,
    stored_size,
)
from mainspring.mailbox.redis.connection import LOST, RECONNECT_INITIAL, ServerError, explain, is_refusal, pack
from mainspring.mailbox.redis.records import RECORD_OPERATIONS
from mainspring.mailbox.redis.tasks import TASK_OPERATIONS
from mainspring.mailbox.redis.topology import FOR_CALLS, Topology

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator, Sequence

    from mainspring.mailbox.batched import Command
    from mainspring.mailbox.message import ClaimedMessage, Envelope
    from mainspring.mailbox.redis.commands import Argument
    from mainspring.mailbox.redis.connection import Channel
    from mainspring.mailbox.redis.settings import RedisServer
    from mainspring.mailbox.settings import Host
    from mainspring.runtime.interval import Alarms

_OPERATIONS: Final = OPERATIONS | RECORD_OPERATIONS | TASK_OPERATIONS
MOST_ARGUMENTS: Final = 50_000
"""Of one call, unless a single operation has more: the server serves no other client meanwhile."""
TRIES: Final = 4
LARGE: Final = 16_384
"""Bytes of an argument that is copied once only on its way out."""
MOST_TARGETS: Final = 16
"""Connections to other nodes that are kept unused: each requester of a fleet may have a mailbox for its replies."""
_log = Logger("mainspring.mailbox")
_ELSEWHERE: Final = frozenset({"MOVED", "ASK", "READONLY", "CLUSTERDOWN", "MASTERDOWN"})


@cache
def library() -> tuple[bytes, bytes]:
    """Return the library of functions, joined from its files, and the name of the function to call.

    The name has a digest of the text: processes of several versions share a server.
    """
    text = b"\n".join(read_package_file("mainspring.mailbox.redis", f"lua/{part}.lua") for part in _PARTS)
    name = b"mainspring_" + hashlib.sha1(text, usedforsecurity=False).hexdigest()[:16].encode()
    return b"#!lua name=%b\nlocal NAME = '%b'\n%b" % (name, name, text), name


_PARTS: Final = (
    *(
        "store",
        "permissions",
        "limits",
        "sweep",
        "listeners",
        "messages",
        "records",
        "dead",
        "recovery",
        "listing",
        "run",
    ),
)


# ------------------------------------------------------------------------------------------------------------------ calls


@dataclass(eq=False, slots=True)
class FunctionCall:
    """One call of the library for the mailbox ``name``."""

    name: str
    keys: tuple[bytes, ...]
    leased_at: float = 0.0
    """The instant (anyio's clock) just before the call."""
    waiter: Callable[[int], str] = lambda _: ""
    """Returns the name on the list of waiters for a receive that wants leases of that many microseconds."""
    arguments: list[Argument] = field(default_factory=list)
    failed: list[Command] = field(default_factory=list)
    """The commands that failed on the server."""
    last_claim: int = 0
    """When the last of its claims was made."""
    groups: list[Sequence[Command]] = field(default_factory=list)
    """Its operations: each is one command, or several of one kind, and has one result."""
    others: dict[bytes, int] = field(default_factory=dict)
    """By the first of them: keys of other mailboxes and of records, as the number of keys before them."""
    bodies: list[bytes] = field(default_factory=list)
    """Ids and bodies that are stored just before the call, with a command of their own."""

    def mailbox(self, name: str) -> int:
        """Return the number of keys before those of a mailbox, which are of the call from now on."""
        return 0 if name == self.name else self._behind(keys_of(name))

    def records(self, name: str) -> int:
        """Return the number of keys before those of a mailbox's records, which are of the call from now on."""
        return self._behind(record_keys_of(name))

    def _behind(self, keys: tuple[bytes, ...]) -> int:
        if keys[0] not in self.others:
            self.others[keys[0]] = len(self.keys)
            self.keys += keys
        return self.others[keys[0]]

    def take(self, results: list[Any]) -> tuple[int, int, int]:
        """Give the results out. Return the microseconds until more is due (-1: unknown), the server's time, and the number of
        index entries without a record that were dropped.

        An operation that failed on the server fails alone.
        """
        due, now, dropped, *failures = results[len(self.groups) :]
        for at in range(0, len(failures), 2):
            text = failures[at + 1].decode("utf-8", "replace")
            for command in self.groups[failures[at]]:
                command.error = MailboxConnectionError(f"the Redis server says: {text}")
                self.failed.append(command)
        failed = failures[::2]
        for number, (group, result) in enumerate(zip(self.groups, results, strict=False)):
            if number not in failed:
                _OPERATIONS[type(group[0])].take(self, group, result)
            for command in group:
                command.done = True
        return due, now, dropped


@dataclass(eq=False, slots=True)
class BodiesCall:
    """The command that fetches bodies of the mailbox ``name``. It is no call of the library, which would copy them."""

    name: str
    fetches: Sequence[Any]

    @property
    def deliveries(self) -> list[ClaimedMessage]:
        """Return the messages whose bodies it fetches."""
        return [delivery for fetch in self.fetches for delivery in fetch.deliveries]

    def take(self, bodies: list[bytes | None]) -> None:
        """Give the bodies out."""
        for delivery, body in zip(self.deliveries, bodies, strict=True):
            delivery.body, delivery.is_readable = body or b"", body is not None
        for fetch in self.fetches:
            fetch.done = True


def calls_for(
    name: str,
    keys: tuple[bytes, ...],
    commands: list[Command],
    leased_at: float = 0.0,
    waiter: Callable[[int], str] = lambda _: "",
) -> Iterator[FunctionCall | BodiesCall]:
    """Yield the calls that do ``commands``, in the order of the operations; as a rule it is one call.

    The callers of one batch do not know of each other, so any order is right. Neighbours of one kind are written as one.
    """
    call = FunctionCall(name, keys, leased_at, waiter)
    groups: Iterable[list[Command]] = [commands]
    if len(commands) > 1:
        groups = (list(alike) for _, alike in groupby(sorted(commands, key=_order), key=_kind))
    for group in groups:
        if isinstance(group[0], FetchBodies):  # the last of the groups
            if call.groups:
                yield call
            yield BodiesCall(name, group)
            return
        if len(call.arguments) >= MOST_ARGUMENTS:
            yield call
            call = FunctionCall(name, keys, leased_at, waiter)
        _OPERATIONS[type(group[0])].write(call, group)
        call.groups.append(group)
    yield call


def _order(command: Command) -> int:
    return _OPERATIONS[type(command)].order


def _kind(command: Command) -> Hashable:
    """Return a value that is the same for commands that are written as one operation."""
    if isinstance(command, AcknowledgeMany):
        return AcknowledgeMany
    if isinstance(command, FetchBodies):
        return FetchBodies
    if isinstance(command, RedisClaim):
        return RedisClaim, command.visibility
    if isinstance(command, Send) and len(command.envelopes) == 1 and command.capacity is None:
        envelope = command.envelopes[0]
        if envelope.dedup_key is None and command.result is not AGAIN:
            return Send, envelope.priority, envelope.delay, envelope.expires_in
    return command


# ----------------------------------------------------------------------------------------------------------------- client


class Client:
    """Calls the functions for one mailbox, one call at a time. A lost call raises; a call that the server refused is retried.

    To connect, a call has the timeout. How long its reply may take is the caller's decision: see :meth:`abandon`. A connection
    on which the server has said nothing for ``silence`` seconds is pinged before a call: a firewall may have dropped it.
    """

    def __init__(self, topology: Topology, timeout: float, silence: float = SILENCE) -> None:
        self._topology = topology
        self._timeout = timeout
        self._silence = silence
        self._library, self._function = library()
        self._now = loop_clock()
        self._channel: Channel | None = None
        self._busy = False
        self.out: FunctionCall | BodiesCall | None = None
        """The call whose reply is still to come; the next call disconnects first, if it is another one."""
        self._keys: tuple[bytes, ...] = ()  # of the last call without keys of other mailboxes
        self._starts: dict[bytes, bytes] = {}  # by function: how calls with these keys begin
        self._abandoned = False
        self._ended = False
        self._connecting = anyio.CancelScope()
        self._was_connected = False
        self.reconnects = 0
        """Connections made since the first one."""
        self.failed_at = -math.inf
        """When a call last failed, if no connection was made since."""
        self.on_connect: Callable[[Host], None] | None = None
        self.on_silence: Callable[[MailboxConnectionError], None] | None = None
        """Called with the error of a call that was not answered in time."""

    @property
    def connected(self) -> bool:
        """True if there is a connection, as far as is known."""
        return self._channel is not None and self._channel.current

    @property
    def host(self) -> Host | None:
        """Return the address of the server that it is connected to."""
        return self._channel.host if self._channel is not None and self._channel.current else None

    async def call(self, call: FunctionCall | BodiesCall) -> list[Any]:
        """Have the server run a call, or read the reply of the call that is out. Cancelled in the wait, it leaves the call out.

        :raises MailboxConnectionError: the server cannot be reached, does not answer, or refuses. After a lost connection or
            an :meth:`abandon` it may have done what it was asked.
        """
        if self.out not in (None, call):
            await self._drop()
        began, function = self._now(), self._function
        self._busy = True
        try:
            for attempt in range(1, TRIES + 1):
                channel = self._channel
                if self.out is None:
                    if channel is None or not channel.is_fresh(began - self._silence):
                        channel = await self._connect_by(began + self._timeout)
                    if type(call) is FunctionCall and call.bodies:
                        await channel.shared.write("HSET", _packed_bodies(call))
                    await channel.send(self._packed(call, function))
                    self.out = call
                elif channel is None:  # disconnected meanwhile
                    raise anyio.ClosedResourceError
                try:
                    result: list[Any] = await channel.next(channel.replies)
                    self.out = None
                    return result
                except ServerError as error:
                    self.out = None
                    if attempt == TRIES:
                        raise
                    if error.code == "OOM":
                        function = self._function + b"_full"
                    else:
                        await self._prepare_retry(channel, error, began)
            raise AssertionError
        except LOST as error:
            raise await self._failure(error) from error
        except ServerError as error:
            if error.is_last:
                await self._retire()
            raise
        except BaseException:
            if self.out is None:
                await self._drop()
            raise
        finally:
            self._busy = False

    def _packed(self, call: FunctionCall | BodiesCall, function: bytes) -> bytes:
        """Return a call as it is written. Function and keys are packed once, unless there are keys of other mailboxes."""
        if isinstance(call, BodiesCall):
            return pack(("HMGET", bodies_of(call.name), *(delivery.message_id for delivery in call.deliveries)))
        if call.others:
            return pack((b"FCALL", function, len(call.keys), *call.keys, *call.arguments))
        if call.keys is not self._keys:
            self._keys, self._starts = call.keys, {}
        start = self._starts.get(function)
        if start is None:
            start = pack((b"FCALL", function, len(call.keys), *call.keys))
            start = self._starts[function] = start[start.index(b"\n") + 1 :]
        count = 3 + len(call.keys) + len(call.arguments)
        last = call.arguments[-1]
        rest: tuple[bytes, ...] = ()
        arguments: tuple[Argument, ...] = tuple(call.arguments)
        if isinstance(last, bytes) and len(last) >= LARGE:  # each copy of it takes longer than all the rest
            arguments, rest = arguments[:-1], (b"$%d\r\n" % len(last), last, b"\r\n")
        packed = pack(arguments)
        return b"".join((b"*%d\r\n" % count, start, memoryview(packed)[packed.index(b"\n") + 1 :], *rest))

    async def _failure(self, error: BaseException) -> MailboxConnectionError:
        """Retire the connection; return the error of a call that was lost."""
        late = self._abandoned or isinstance(error, TimeoutError)
        self.failed_at = self._now()
        await self._retire()
        if not late:
            return MailboxConnectionError(f"the Redis server at {self._place}: {explain(error)}")
        silent = silence_of(self._topology.server, self._timeout, connected=self._was_connected)
        if self.on_silence is not None:
            self.on_silence(silent)
        return silent

    async def _connect_by(self, deadline: float) -> Channel:
        channel: Channel | None = None
        with anyio.CancelScope(deadline=deadline) as self._connecting:
            channel = await self.connect()
        if channel is None:
            raise anyio.ClosedResourceError if self._ended else TimeoutError
        return channel

    async def abandon(self) -> None:
        """End the call that is out, as its reply has taken too long; the next calls get another connection."""
        if self._channel is not None and (self._busy or self.out is not None):
            self._abandoned = True
            self._channel.shared.retire(pause=False)
            await self._disconnect()

    async def _prepare_retry(self, channel: Channel, error: ServerError, began: float) -> None:
        """Prepare another try if the server has done nothing and another try can help; else raise."""
        if error.code == "ERR" and error.detail.startswith("Function not found"):
            async with channel.shared.asking:
                if channel.shared.loaded_at < began:  # else another mailbox has loaded it meanwhile
                    await self._load(channel, began)
                    channel.shared.loaded_at = self._now()
        elif error.code in _ELSEWHERE:
            await self._retire(pause=True)
        elif error.code in {"LOADING", "TRYAGAIN", "BUSY"}:
            await anyio.sleep(RECONNECT_INITIAL)
        else:
            raise error

    async def _load(self, channel: Channel, began: float) -> None:
        try:
            await channel.call("FUNCTION", "LOAD", self._library)
        except ServerError as error:
            if error.code == "OOM":
                raise MailboxConnectionError(
                    f"the Redis server at {self._place} has no memory left for this version's functions: raise maxmemory"
                ) from error
            if "already exists" not in error.detail:  # else another process was quicker
                await self._prepare_retry(channel, error, began)

    async def connect(self) -> Channel:
        """Return the connection; make it if there is none, ping it if the server has said nothing for long."""
        while True:
            channel = self._channel
            if channel is None or not channel.current:
                channel = await self._open_channel()
            if channel.is_fresh(self._now() - self._silence):
                return channel
            try:
                await channel.call("PING")
            except LOST:
                await self._retire()
            else:
                return channel

    async def _open_channel(self) -> Channel:
        await self._drop()
        if self._ended:
            raise anyio.ClosedResourceError
        while True:
            try:
                channel = await self._topology.open_channel(FOR_CALLS)
            except ServerError as error:
                if is_refusal(error) and not self._was_connected:
                    raise ConfigError(f"{error} ({self._place}); check the user and the password of the URL") from error
                if error.code not in _ELSEWHERE and error.code != "LOADING":
                    raise
            except ConfigError as error:
                if not self._was_connected:
                    raise
                raise MailboxConnectionError(str(error)) from error
            else:
                break
        if self._was_connected:
            self.reconnects += 1
        self._was_connected = True  # from now on a refusal may be an operator's passing mistake
        self.failed_at = -math.inf
        self._channel = channel
        if self._ended:  # just then
            await self._disconnect()
            raise anyio.ClosedResourceError
        if self.on_connect is not None:
            self.on_connect(channel.host)
        return channel

    async def within_timeout(self, act: Callable[[], Awaitable[None]]) -> None:
        """Await ``act()``, which uses this connection. Raise as :meth:`call` does, also if it has not ended in time."""
        try:
            with anyio.fail_after(self._timeout):
                await act()
        except LOST as error:
            raise await self._failure(error) from error

    async def ask(self, what: Callable[..., Awaitable[None]], *arguments: object) -> None:
        """Await ``what(channel, *arguments)`` with this connection; only while no other call is out.

        Return also if the connection is lost: the next call connects anew.
        """
        try:
            await what(await self.connect(), *arguments)
        except LOST:
            await self._retire()

    async def suspect(self) -> None:
        """Retire the connection, as the server seems to be gone; a call that is out finds out by itself."""
        if not (self._busy or self.out is not None):
            await self._retire()

    async def leave(self) -> None:
        """Leave the connection until the next call; a call that is out is lost."""
        await self._drop()

    async def close(self) -> None:
        """Disconnect, and connect no more; a call that is out, or still connects, ends."""
        self._ended = True
        self._connecting.cancel()
        await self._drop()

    async def _retire(self, *, pause: bool = False) -> None:
        """Leave the connection, and let no mailbox begin another call on it."""
        if self._channel is not None:
            self._channel.shared.retire(pause=pause)
        await self._drop()

    async def _drop(self) -> None:
        """Leave the connection; the next call opens a channel of the current one."""
        self.out, self._abandoned = None, False
        await self._disconnect()

    async def _disconnect(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    @property
    def _place(self) -> str:
        return self._topology.server.address.partition("://")[2]


def _packed_bodies(call: FunctionCall) -> bytes:
    """Return the command that stores the bodies of a call. The driver would copy each of them many times."""
    parts = [b"*%d\r\n" % (2 + len(call.bodies))]
    for argument in (b"HSET", bodies_of(call.name), *call.bodies):
        parts += (b"$%d\r\n" % len(argument), argument, b"\r\n")
    return b"".join(parts)


class Batches:
    """Executes the batches of the mailbox ``name`` for its batcher.

    :param timeout: seconds that a reply may take.
    :param waiter: see :class:`FunctionCall`.
    :param on_due: called with the seconds until the next thing is due.
    :param on_unconfirmed: called when an operation is to be retried with the next call.
    :param on_late: called when a call is not answered in time, and is to be abandoned; it must not wait.
    """

    def __init__(
        self,
        name: str,
        client: Client,
        timeout: float,
        *,
        waiter: Callable[[int], str],
        on_due: Callable[[float], None],
        on_unconfirmed: Callable[[], None],
        on_late: Callable[[], object],
        alarms: Alarms,
    ) -> None:
        self._watch = alarms.alarm(self._look_at_call)
        self.claimant = random.token(96)
        self.clock_offset = 0.0
        """Seconds by which this process's clock is ahead of the server's, at least."""
        self._name = name
        self._keys = keys_of(name)
        self._client = client
        self._timeout = timeout
        self._commands: list[Command] = []
        self._calls: Iterator[FunctionCall | BodiesCall] = iter(())
        self._call: FunctionCall | BodiesCall | None = None
        self._asked_at = 0.0
        self._waiter = waiter
        self._on_due = on_due
        self._on_unconfirmed = on_unconfirmed
        self._on_late = on_late
        self._now = loop_clock()
        self._last_claim = 0  # whose answer has come
        self._unconfirmed: list[Command] = []

    @property
    def unconfirmed(self) -> int:
        """The number of operations that are retried with the next call."""
        return len(self._unconfirmed)

    def execute(self, commands: list[Command]) -> Awaitable[None]:
        """Execute commands; if a call fails, its commands and those of the calls behind it get the error from the batcher."""
        if self._unconfirmed:
            commands, self._unconfirmed = [*self._unconfirmed, *commands], []
        self._commands, self._call = commands, None
        self._calls = calls_for(self._name, self._keys, commands, self._now(), self._waiter)
        return self.resume()

    async def resume(self) -> None:
        """Make the calls that are left. The first of them may be out, if its caller was cancelled in the wait for the reply."""
        try:
            if self._call is not None and self._client.out is not self._call:
                raise MailboxConnectionError("the call was cancelled before it was made")
            while (call := self._call or next(self._calls, None)) is not None:
                if self._call is None:
                    self._call, self._asked_at = call, self._now()
                    if self._asked_at + self._timeout < self._watch.due:
                        self._watch.wake_by(self._asked_at + self._timeout)
                result = await self._client.call(call)
                if isinstance(call, BodiesCall):
                    call.take(result)
                    self._call = None
                    continue
                due, then, dropped = call.take(result)
                self._call = None
                self.clock_offset = self._asked_at - then / MICRO
                self._last_claim = max(self._last_claim, call.last_claim)
                if due >= 0:
                    self._on_due(due / MICRO)
                if dropped or call.failed:
                    self._note_trouble(call, dropped)
            self._commands = []  # they may be large, and the next ones may be long in coming
        except Exception:
            self._keep_unconfirmed()
            raise

    def _note_trouble(self, call: FunctionCall, dropped: int) -> None:
        if dropped:
            self.note_dropped(dropped)
        retried = [command for command in call.failed if _OPERATIONS[type(command)].retried]
        for command in retried:
            command.error, command.done = None, False
        if retried:
            self._unconfirmed = joined([*self._unconfirmed, *retried])
            self._on_unconfirmed()

    def note_dropped(self, count: int) -> None:
        """Log that the library found what should not be."""
        _log.warning(
            "mailbox %r: %d index entries without a message were dropped (a key was deleted)", self._name, count
        )

    def _keep_unconfirmed(self) -> None:
        """Keep what a failed call must do for the next call, with an operation that undoes its claims."""
        self._call = None
        retried = [command for command in self._commands if _OPERATIONS[type(command)].retried and not command.done]
        self._unconfirmed = joined([*self._unconfirmed, *retried])
        claimed = any(type(command) is RedisClaim and not command.done for command in self._commands)
        if claimed and not any(type(command) is UndoLostClaims for command in self._unconfirmed):
            self._unconfirmed.append(UndoLostClaims(self.claimant, self._last_claim))
        self._commands, self._calls = [], iter(())
        if self._unconfirmed:
            self._on_unconfirmed()

    def end(self) -> None:
        """Watch no call any more."""
        self._watch.end()

    def _look_at_call(self, overslept: float) -> float:
        if self._call is None:
            return math.inf
        now, deadline = self._now(), self._asked_at + self._timeout
        if now < deadline:
            return deadline
        self._on_late()
        return now + self._timeout / 10  # where it was about to be made


async def has_mailbox(server: RedisServer, name: str, timeout: float) -> bool:
    """Return True if the server has keys of that mailbox: it has some once it was opened or sent to.

    :raises ConfigError: the server refuses the login, or is too old.
    :raises MailboxConnectionError: it cannot be reached, or does not answer within the timeout.
    """
    client = Client(Topology(server, base_of(name)), timeout)
    try:
        with anyio.move_on_after(timeout):
            return bool(await (await client.connect()).call("EXISTS", *keys_of(name)))
    except LOST as error:
        raise MailboxConnectionError(f"the Redis server at {server.address}: {explain(error)}") from error
    finally:
        await client.close()
    raise silence_of(server, timeout, connected=False)


def silence_of(server: RedisServer, timeout: float, *, connected: bool) -> MailboxConnectionError:
    """Return the error of a call that was not answered within the timeout."""
    place = server.address.partition("://")[2]
    hint = "; the port may be one without TLS" if server.tls is not None and not connected else ""
    return MailboxConnectionError(f"the Redis server at {place} did not answer within {timeout:g} s{hint}")


class _Target:
    """The client for one mailbox, and its callers, which take turns."""

    __slots__ = ("client", "lock", "users")

    def __init__(self, client: Client) -> None:
        self.client = client
        self.lock = anyio.Lock()
        self.users = 0


class OtherNodes:
    """Sends replies to other mailboxes of a cluster, each over a connection to the node that holds it.

    Callers that send to one mailbox take turns; none waits for a node that only others send to. All nodes are taken to accept
    arguments as long as the node of ``topology`` does.
    """

    def __init__(self, topology: Topology, timeout: float) -> None:
        self._topology = topology
        self._timeout = timeout
        self._targets: dict[str, _Target] = {}

    async def send(self, reply: Envelope, message_id: str) -> None:
        """Send a reply before its request is settled; while it is unread, a second one to the same request is dropped.

        :raises SerializationError: it is larger than a node takes.
        :raises MailboxConnectionError: it was not taken within the timeout, the turns of others included.
        """
        name = reply.reply_to or ""
        send = Send([replace(reply, reply_to=None, dedup_key=f"reply:{message_id}")])
        check_size("a reply", stored_size(send.envelopes[0]), self._topology.longest, TAKES)
        target = self._targets.pop(name, None)
        if target is None:
            topology = Topology(self._topology.server, base_of(name), cluster=True)
            target = _Target(Client(topology, self._timeout))
        self._targets[name] = target  # the most recent one is last
        target.users += 1
        try:
            with anyio.fail_after(self._timeout):
                await self._close_oldest()
                async with target.lock:
                    while not (send.result or send.error):  # an empty result: AGAIN
                        (call,) = calls_for(name, keys_of(name), [send])
                        call.take(await target.client.call(call))
        except TimeoutError:
            raise MailboxConnectionError(
                f"the mailbox {name!r} has not taken the reply within {self._timeout:g} s"
            ) from None
        finally:
            target.users -= 1
        if send.error is not None:
            raise send.error

    async def _close_oldest(self) -> None:
        while len(self._targets) > MOST_TARGETS:
            name = next((name for name, target in self._targets.items() if not target.users), None)
            if name is None:
                return
            await self._targets.pop(name).client.close()

    async def close(self) -> None:
        """Disconnect everywhere."""
        while self._targets:
            await self._targets.popitem()[1].client.close()
