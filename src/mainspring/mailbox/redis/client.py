"""How a Redis mailbox calls its library of functions: one call at a time, over the connection that all mailboxes share.

Which server holds a mailbox is found anew for each connection: the one named, the primary that sentinels name, or the node of
a cluster that has its slot. In a cluster replies travel alone: no step takes in two mailboxes, as they are on two nodes.
"""

from __future__ import annotations

import hashlib
import math
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final

import anyio

from mainspring.core import process
from mainspring.core.clock import loop_clock
from mainspring.core.loggers import Logger
from mainspring.errors import ConfigError, MailboxConnectionError
from mainspring.mailbox.batched import Send
from mainspring.mailbox.limits import SILENCE, check_size
from mainspring.mailbox.redis.batches import FunctionCall
from mainspring.mailbox.redis.commands import TAKES, base_of, keys_of, stored_size
from mainspring.mailbox.redis.connection import (
    LONGEST,
    LOST,
    RECONNECT_INITIAL,
    Connection,
    Connectors,
    ServerError,
    connect,
    explain,
    is_refusal,
    pack,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from mainspring.mailbox.message import Envelope
    from mainspring.mailbox.redis.connection import Argument, Channel, Connector
    from mainspring.mailbox.redis.settings import Server
    from mainspring.mailbox.settings import Host

TRIES: Final = 4
FOR_CALLS: Final = "mainspring-calls"
TO_LISTEN: Final = "mainspring-listener"
"""Names of connections in ``CLIENT LIST``."""
MOST_TARGETS: Final = 16
"""Connections to other nodes that are kept unused: each requester of a fleet may have a mailbox for its replies."""
WARNED = "Redis servers that were warned of"
_log = Logger("mainspring.mailbox")
_ELSEWHERE: Final = frozenset({"MOVED", "ASK", "READONLY", "CLUSTERDOWN", "MASTERDOWN"})


def library() -> tuple[bytes, bytes]:
    """The library of functions, joined from its files, and the name of the function that is called.

    The name has a digest of the text: processes of several versions share a server.
    """
    folder = files("mainspring.mailbox.redis").joinpath("lua")
    text = b"\n".join(folder.joinpath(f"{part}.lua").read_bytes() for part in _PARTS)
    name = b"mainspring_" + hashlib.sha1(text, usedforsecurity=False).hexdigest()[:16].encode()
    return b"#!lua name=%b\nlocal NAME = '%b'\n%b" % (name, name, text), name


_PARTS: Final = ("store", "permissions", "sweep", "listeners", "messages", "dead", "recovery", "run")


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
        self._command = b""  # as it is written
        self._keys: Sequence[bytes] = ()
        self._arguments: Sequence[Argument] = ()
        self._packed: dict[bytes, tuple[Sequence[bytes], bytes]] = {}  # by function: its last keys, and both as written
        self._awaiting = False
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

    @property
    def awaiting(self) -> bool:
        """True if the reply to a cancelled call is still to come: :meth:`resume` reads it, the next call disconnects first."""
        return self._awaiting

    async def call(self, keys: Sequence[bytes], arguments: Sequence[Argument]) -> list[Any]:
        """Have the server run a batch. Cancelled while it waits for the reply, it leaves the call out (see ``awaiting``).

        :raises MailboxConnectionError: the server cannot be reached, does not answer, or refuses. After a lost connection or
            an :meth:`abandon` it may have done what it was asked.
        """
        if self._awaiting:
            await self._drop()
        self._keys, self._arguments = keys, arguments
        self._command = self._pack(self._function)
        return await self.resume()

    def _pack(self, function: bytes) -> bytes:
        """Return the command as it is written. Function and keys, which rarely change, are packed once."""
        keys, packed = self._packed.get(function, ((), b""))
        if keys != self._keys:
            packed = pack((b"FCALL", function, len(self._keys), *self._keys))
            packed = packed[packed.index(b"\n") + 1 :]
            self._packed[function] = self._keys, packed
        arguments = pack(tuple(self._arguments))
        count = 3 + len(self._keys) + len(self._arguments)
        return b"".join((b"*%d\r\n" % count, packed, memoryview(arguments)[arguments.index(b"\n") + 1 :]))

    async def resume(self) -> list[Any]:
        """Continue the call whose caller was cancelled."""
        began = self._now()
        self._busy = True
        try:
            for attempt in range(1, TRIES + 1):
                channel = self._channel
                if self._awaiting:
                    if channel is None:  # disconnected meanwhile
                        raise anyio.ClosedResourceError
                elif channel is None or not channel.is_fresh(began - self._silence):
                    channel = await self._connect_by(began + self._timeout)
                try:
                    if not self._awaiting:
                        await channel.send(self._command)
                        self._awaiting = True
                    result: list[Any] = await channel.next(channel.replies)
                    self._awaiting = False
                    return result
                except ServerError as error:
                    self._awaiting = False
                    if attempt == TRIES:
                        raise
                    await self._prepare_retry(channel, error)
            raise AssertionError
        except LOST as error:
            raise await self._failure(error) from error
        except ServerError as error:
            if error.is_last:
                await self._retire()
            raise
        except BaseException:
            if not self._awaiting:
                await self._drop()
            raise
        finally:
            self._busy = False
            if not self._awaiting:
                self._command, self._arguments = b"", ()  # they may be large, and the next ones long in coming

    async def _failure(self, error: BaseException) -> MailboxConnectionError:
        """Retire the connection; return the error of a call that was lost."""
        late = self._abandoned or isinstance(error, TimeoutError)
        self.failed_at = self._now()
        await self._retire()
        if not late:
            return MailboxConnectionError(f"the Redis server at {self._place}: {explain(error)}")
        silent = _silent(self._topology.server, self._timeout, connected=self._was_connected)
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
        if self._channel is not None and (self._busy or self._awaiting):
            self._abandoned = True
            self._channel.shared.retire(pause=False)
            await self._disconnect()

    async def _prepare_retry(self, channel: Channel, error: ServerError) -> None:
        """Prepare another try if the server has done nothing and another try can help; else raise."""
        if error.code == "ERR" and error.detail.startswith("Function not found"):
            await self._load(channel)
        elif error.code == "OOM":
            self._command = self._pack(self._function + b"_full")
        elif error.code in _ELSEWHERE:
            await self._retire(pause=True)
        elif error.code in {"LOADING", "TRYAGAIN", "BUSY"}:
            await anyio.sleep(RECONNECT_INITIAL)
        else:
            raise error

    async def _load(self, channel: Channel) -> None:
        try:
            await channel.call("FUNCTION", "LOAD", self._library)
        except ServerError as error:
            if error.code == "OOM":
                raise MailboxConnectionError(
                    f"the Redis server at {self._place} has no memory left for this version's functions: raise maxmemory"
                ) from error
            if "already exists" not in error.detail:  # else another process was quicker
                await self._prepare_retry(channel, error)

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

    async def ask(self, what: Callable[..., Awaitable[None]], *arguments: object) -> None:
        """Await ``what(channel, *arguments)`` with this connection; only while no other call is out.

        Return also if the server does not answer or the connection is lost: the next call connects anew.
        """
        done = False
        with anyio.move_on_after(self._timeout), suppress(*LOST):
            await what(await self.connect(), *arguments)
            done = True
        if not done:
            await self._retire()

    async def suspect(self) -> None:
        """Retire the connection, as the server seems to be gone; a call that is out finds out by itself."""
        if not (self._busy or self._awaiting):
            await self._retire()

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
        self._awaiting = self._abandoned = False
        await self._disconnect()

    async def _disconnect(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            with anyio.CancelScope(shield=True, deadline=anyio.current_time() + 1):
                await channel.close()

    @property
    def _place(self) -> str:
        return self._topology.server.address.partition("://")[2]


class _InClusterError(Exception):
    """The server belongs to a cluster, whose mailboxes are on different nodes."""


class Topology:
    """Finds the server of one mailbox, anew for each connection: it may have moved.

    The mailboxes of an event loop on one server share its connections; in a cluster each mailbox has its own.
    """

    def __init__(self, server: Server, key: bytes, *, cluster: bool = False) -> None:
        self.server = server
        self._key = key
        self._nodes: list[Host] = list(server.hosts)
        self.cluster = cluster or server.kind == "cluster"
        self._connectors: Connectors | None = Connectors() if self.cluster else None
        self.longest = LONGEST
        """The most bytes of one argument that the last server takes."""

    async def open_channel(self, name: str) -> Channel:
        """Return a channel of the connection :data:`FOR_CALLS` or :data:`TO_LISTEN` to the server that holds the mailbox now.

        Raises what :data:`~mainspring.mailbox.redis.connection.LOST` names, :class:`ServerError` (also where it is no primary),
        :class:`MailboxConnectionError` where no node of a cluster has it, :class:`ConfigError`.
        """
        try:
            channel = await self._connector(name).open_channel(partial(self._connect, name))
        except _InClusterError:
            self.cluster, self._connectors = True, Connectors()
            channel = await self._connector(name).open_channel(partial(self._connect, name))
        self.longest = channel.longest
        return channel

    def _connector(self, name: str) -> Connector:
        if self._connectors is None:
            self._connectors = Connectors.shared(self.server)
        return self._connectors.calls if name == FOR_CALLS else self._connectors.listening

    async def _connect(self, name: str) -> Connection:
        connection = await self._connect_to_owner(name)
        try:
            connection.longest = await _longest(connection)
        except BaseException:
            with anyio.CancelScope(shield=True, deadline=anyio.current_time() + 1):
                await connection.close()
            raise
        return connection

    async def _connect_to_owner(self, name: str) -> Connection:
        if self.server.kind == "sentinel":
            return await self._primary_by_sentinels(name)
        failed: Exception | None = None
        for host in list(self._nodes):
            try:
                connection = await connect(self.server, host, name=name)
                if connection.cluster:
                    return await self._owner_in_cluster(connection, name)
            except (*LOST, ServerError) as error:
                failed = error
                continue
            if self.server.kind == "cluster":
                await connection.close()
                raise ConfigError(f"the server at {host[0]}:{host[1]} is no node of a cluster; its scheme is redis://")
            return connection
        assert failed is not None
        raise failed

    async def _owner_in_cluster(self, connection: Connection, name: str) -> Connection:
        """Return a connection to the node with the mailbox's slot, which the node of ``connection`` names."""
        try:
            if not self.cluster:  # the connector is shared by all mailboxes
                raise _InClusterError
            slot = await connection.call("CLUSTER", "KEYSLOT", self._key)
            ranges = await connection.call("CLUSTER", "SLOTS")
            nodes = [(_node(row[2], connection.host), row[0] <= slot <= row[1]) for row in ranges]
            owner = next((host for host, owns in nodes if owns), None)
            if owner is None:
                raise MailboxConnectionError(f"no node of the cluster has slot {slot}, which the mailbox is in")
            self._nodes = list(dict.fromkeys([owner, *(host for host, _ in nodes), *self.server.hosts]))
        except BaseException:
            await connection.close()
            raise
        if owner == connection.host:
            return connection
        await connection.close()
        return await connect(self.server, owner, name=name)

    async def _primary_by_sentinels(self, name: str) -> Connection:
        """Return a connection to the primary that the first sentinel to answer names."""
        failed: Exception | None = None
        for host in list(self._nodes):
            try:
                sentinel = await connect(self.server, host, sentinel=True)
                try:
                    found = await sentinel.call("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.server.service)
                finally:
                    await sentinel.close()
            except (*LOST, ServerError) as error:
                failed = error
                continue
            if not found:
                failed = ConfigError(
                    f"the sentinel at {host[0]}:{host[1]} knows no {self.server.service!r}; correct the service that the URL"
                    " names"
                )
                continue
            self._nodes.remove(host)
            self._nodes.insert(0, host)  # it is asked first the next time
            connection = await connect(self.server, (found[0].decode(), int(found[1])), name=name)
            if await _is_primary(connection):
                return connection
            failed = ServerError("READONLY the server that the sentinel named is no primary (yet)")
        assert failed is not None
        raise failed


async def _longest(connection: Connection) -> int:
    try:
        told = await connection.call("CONFIG", "GET", "proto-max-bulk-len")
    except ServerError:  # the user may not ask
        return LONGEST
    return int(told[1]) if told else LONGEST


async def has_mailbox(server: Server, name: str, timeout: float) -> bool:
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
    raise _silent(server, timeout, connected=False)


def _silent(server: Server, timeout: float, *, connected: bool) -> MailboxConnectionError:
    place = server.address.partition("://")[2]
    hint = "; the port may be one without TLS" if server.tls is not None and not connected else ""
    return MailboxConnectionError(f"the Redis server at {place} did not answer within {timeout:g} s{hint}")


async def _is_primary(connection: Connection) -> bool:
    """Return whether the server is a primary; if not, or on an error, close the connection."""
    primary = False
    try:
        primary = bool((await connection.call("ROLE"))[0] == b"master")
    finally:
        if not primary:
            with anyio.CancelScope(shield=True, deadline=anyio.current_time() + 1):
                await connection.close()
    return primary


def _node(row: list[Any], asked: Host) -> Host:
    """Read a node from CLUSTER SLOTS; without an address it is that of the node which was asked."""
    return row[0].decode() if row[0] else asked[0], int(row[1])


async def check(channel: Channel, name: str, address: str, allow_eviction: bool) -> None:
    """Refuse a server that evicts keys; log once for a server that it has no file. Both as far as the user may ask.

    :raises ConfigError: there is a ``maxmemory`` with a policy other than ``noeviction``, and no ``allow_eviction``.
    """
    memory = await _info(channel, "memory")
    policy = memory.get("maxmemory_policy", "")
    evicts = policy.startswith(("allkeys", "volatile")) and memory.get("maxmemory", "0") != "0"
    if evicts and not allow_eviction:
        raise ConfigError(
            f"mailbox {name!r}: the Redis server evicts keys when its memory is full (maxmemory-policy {policy}), and with them"
            f" {_evicted(policy)}; set maxmemory-policy noeviction there, or pass allow_eviction=true to accept the loss"
        )
    if address in _warned():
        return
    persistence = await _info(channel, "persistence")
    if address in _warned():  # by another mailbox meanwhile
        return
    process.set_current(WARNED, _warned() | {address})
    if evicts:
        _log.warning(
            "mailbox %r: the Redis server may evict %s when its memory is full (maxmemory-policy %s); set noeviction",
            name,
            _evicted(policy),
            policy,
        )
    if persistence.get("aof_enabled", "1") != "1":
        _log.warning("mailbox %r: the Redis server keeps messages in memory only; set appendonly yes", name)


def _evicted(policy: str) -> str:
    return "messages" if policy.startswith("allkeys") else "the replies to requests"  # which are kept for a day


def _warned() -> frozenset[str]:
    return process.current(WARNED) or frozenset()


async def _info(channel: Channel, section: str) -> dict[str, str]:
    try:
        text = await channel.call("INFO", section)
    except ServerError:  # the user may not ask
        return {}
    lines = bytes(text).decode("utf-8", "replace").splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)


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
        call = FunctionCall(name, list(keys_of(name)))
        call.add([send])
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
                    call.take(await target.client.call(call.keys, call.arguments))
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
