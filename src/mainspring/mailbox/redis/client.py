"""How a Redis mailbox calls its library of functions: one call at a time, over the connection that all mailboxes share.

Which server holds a mailbox is found anew for each connection: the one named, the primary that sentinels name, or the node of
a cluster that has its slot. In a cluster replies travel alone: no step takes in two mailboxes, as they are on two nodes.
"""

from __future__ import annotations

import hashlib
import math
from contextlib import suppress
from dataclasses import replace
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final

import anyio

from mainspring.core import process
from mainspring.core.clock import loop_clock
from mainspring.core.loggers import Logger
from mainspring.errors import ConfigError, MailboxConnectionError
from mainspring.mailbox.limits import SILENCE
from mainspring.mailbox.redis.batches import Call
from mainspring.mailbox.redis.commands import Put, base_of, keys_of
from mainspring.mailbox.redis.connection import (
    LONGEST,
    LOST,
    RECONNECT_INITIAL,
    Lines,
    ServerError,
    Wire,
    connect,
    refused,
    trouble,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from mainspring.mailbox.message import Envelope
    from mainspring.mailbox.redis.connection import Channel
    from mainspring.mailbox.redis.url import Server
    from mainspring.mailbox.settings import Host

TRIES: Final = 4
_ELSEWHERE: Final = frozenset({"MOVED", "ASK", "READONLY", "CLUSTERDOWN", "MASTERDOWN"})


def library() -> tuple[bytes, bytes]:
    """The library of functions, joined from its files, and the name of the function that is called.

    The name has a digest of the text: processes of several versions share a server.
    """
    folder = files("mainspring.mailbox.redis").joinpath("lua")
    text = b"\n".join(folder.joinpath(f"{part}.lua").read_bytes() for part in _PARTS)
    name = b"mainspring_" + hashlib.sha1(text, usedforsecurity=False).hexdigest()[:16].encode()
    return b"#!lua name=%b\nlocal NAME = '%b'\n%b" % (name, name, text), name


_PARTS: Final = ("store", "rights", "due", "handing", "messages", "dead", "recovery", "run")


class Link:
    """Calls the functions. What of it is lost with the connection raises; only what the server refused is tried again.

    One call of it is out at a time; those of other mailboxes travel beside it. To connect, it has the timeout; how long an
    answer may take is its caller's to say: see :meth:`abandon`. A connection on which the server has said nothing for
    ``silence`` seconds is tried before it is trusted with a call: something between may have dropped it.
    """

    def __init__(self, directory: Directory, timeout: float, silence: float = SILENCE) -> None:
        self._directory = directory
        self._timeout = timeout
        self._silence = silence
        self._library, self._function = library()
        self._now = loop_clock()
        self._wire: Channel | None = None
        self._busy = False
        self._command: tuple[Any, ...] = ()
        self._awaiting = False
        self._abandoned = False
        self._ended = False
        self._connecting = anyio.CancelScope()
        self._welcome = False
        self.reconnects = 0
        """Connections made since the first one."""
        self.failed_at = -math.inf
        """When a call last found the server away, if no connection was made since."""
        self.on_connect: Callable[[Host], None] | None = None
        self.on_silence: Callable[[MailboxConnectionError], None] | None = None
        """Told why, when a call has not been answered in time."""

    @property
    def connected(self) -> bool:
        """Whether there is a connection, as far as is known."""
        return self._wire is not None and self._wire.current

    @property
    def host(self) -> Host | None:
        """Where it is connected."""
        return self._wire.host if self._wire is not None and self._wire.current else None

    @property
    def awaiting(self) -> bool:
        """Whether a call is out whose answer has not been read: :meth:`resume` reads it, and the next call hangs up first."""
        return self._awaiting

    async def call(self, keys: Sequence[bytes], arguments: Sequence[str | int | float | bytes]) -> list[Any]:
        """Have a batch done. Cancelled while it waits for the answer, it leaves the call out (see ``awaiting``).

        :raises MailboxConnectionError: the server cannot be reached, does not answer, or refuses. After a lost connection or
            an :meth:`abandon` it may have done what it was asked.
        """
        if self._awaiting:
            await self._drop()
        self._command = (b"FCALL", self._function, len(keys), *keys, *arguments)
        return await self.resume()

    async def resume(self) -> list[Any]:
        """Go on with the call whose caller was cancelled."""
        self._busy = True
        try:
            return await self._call()
        except LOST as error:
            late = self._abandoned or isinstance(error, TimeoutError)
            self.failed_at = self._now()
            await self._mistrust()
            if late:
                silent = MailboxConnectionError(
                    f"the Redis server at {self._place} did not answer within {self._timeout:g} s"
                )
                if self.on_silence is not None:
                    self.on_silence(silent)
                raise silent from error
            raise MailboxConnectionError(f"the Redis server at {self._place}: {trouble(error)}") from error
        except ServerError as error:
            if error.is_last:
                await self._mistrust()
            raise
        except BaseException:
            if not self._awaiting:
                await self._drop()
            raise
        finally:
            self._busy = False
            if not self._awaiting:
                self._command = ()  # it may be large, and the next one may be long in coming

    async def _call(self) -> list[Any]:
        began = self._now()
        for attempt in range(1, TRIES + 1):
            wire = self._wire
            if self._awaiting:
                if wire is None:  # hung up on meanwhile
                    raise anyio.ClosedResourceError
            elif wire is None or not wire.heard_since(began - self._silence):
                wire = await self._connect_by(began + self._timeout)
            try:
                if not self._awaiting:
                    await wire.send(self._command)
                    self._awaiting = True
                result: list[Any] = await wire.read()
            except ServerError as error:
                self._awaiting = False
                if attempt == TRIES:
                    raise
                await self._after(wire, error)
                continue
            self._awaiting = False
            return result
        raise AssertionError

    async def _connect_by(self, deadline: float) -> Channel:
        wire: Channel | None = None
        with anyio.CancelScope(deadline=deadline) as self._connecting:
            wire = await self.connect()
        if wire is None:
            raise anyio.ClosedResourceError if self._ended else TimeoutError
        return wire

    async def abandon(self) -> None:
        """The answer to the call that is out has taken too long: end it, and let the next calls have another connection."""
        if self._wire is not None and (self._busy or self._awaiting):
            self._abandoned = True
            self._wire.retire()
            await self._hang_up()

    async def _after(self, wire: Channel, error: ServerError) -> None:
        """Make ready for another try, where the server has done nothing and another try can help; else raise."""
        if error.code == "ERR" and error.detail.startswith("Function not found"):
            await self._load(wire)
        elif error.code == "OOM":
            self._command = (b"FCALL", self._function + b"_full", *self._command[2:])
        elif error.code in _ELSEWHERE:
            await self._mistrust(pause=True)
        elif error.code in {"LOADING", "TRYAGAIN", "BUSY"}:
            await anyio.sleep(RECONNECT_INITIAL)
        else:
            raise error

    async def _load(self, wire: Channel) -> None:
        try:
            await wire.call("FUNCTION", "LOAD", self._library)
        except ServerError as error:
            if error.code == "OOM":
                raise MailboxConnectionError(
                    f"the Redis server at {self._place} has no memory left for this version's functions: raise maxmemory"
                ) from error
            if "already exists" not in error.detail:  # else another process was quicker
                await self._after(wire, error)

    async def connect(self) -> Channel:
        """The connection, made if there is none, and tried first if the server has said nothing on it for long."""
        while True:
            wire = self._wire
            if wire is None or not wire.current:
                wire = await self._join()
            if wire.heard_since(self._now() - self._silence):
                return wire
            try:
                await wire.call("PING")
            except LOST:
                await self._mistrust()
            else:
                return wire

    async def _join(self) -> Channel:
        await self._drop()
        if self._ended:
            raise anyio.ClosedResourceError
        while True:
            try:
                wire = await self._directory.connect()
            except ServerError as error:
                if refused(error) and not self._welcome:
                    raise ConfigError(f"{error} ({self._place}); check the user and the password of the URL") from error
                if error.code not in _ELSEWHERE and error.code != "LOADING":
                    raise
            except ConfigError as error:
                if not self._welcome:
                    raise
                raise MailboxConnectionError(str(error)) from error
            else:
                break
        if self._welcome:
            self.reconnects += 1
        self._welcome = True  # from now on a refusal may be somebody's passing mistake
        self.failed_at = -math.inf
        self._wire = wire
        if self._ended:  # just then
            await self._hang_up()
            raise anyio.ClosedResourceError
        if self.on_connect is not None:
            self.on_connect(wire.host)
        return wire

    async def ask(self, what: Callable[..., Awaitable[None]], *arguments: object) -> None:
        """Have ``what`` ask the server things over this connection; call it only while no other call is out.

        Where the server does not answer, or the connection is lost, it is let be: the next call connects anew.
        """
        told = False
        with anyio.move_on_after(self._timeout), suppress(*LOST):
            await what(await self.connect(), *arguments)
            told = True
        if not told:
            await self._mistrust()

    async def suspect(self) -> None:
        """The server seems to have gone: do not trust the connection, unless a call is out, which will see for itself."""
        if not (self._busy or self._awaiting):
            await self._mistrust()

    async def close(self) -> None:
        """Hang up, and connect no more; a call that is out, or connects still, ends."""
        self._ended = True
        self._connecting.cancel()
        await self._drop()

    async def _mistrust(self, *, pause: bool = False) -> None:
        """Leave the connection, and let no mailbox begin a call on it any more."""
        if self._wire is not None:
            self._wire.retire(pause=pause)
        await self._drop()

    async def _drop(self) -> None:
        """Leave the connection, to take what there is with the next call."""
        self._awaiting = self._abandoned = False
        await self._hang_up()

    async def _hang_up(self) -> None:
        wire, self._wire = self._wire, None
        if wire is not None:
            with anyio.CancelScope(shield=True, deadline=anyio.current_time() + 1):
                await wire.close()

    @property
    def _place(self) -> str:
        return self._directory.server.address.partition("://")[2]


FOR_CALLS: Final = "mainspring-calls"
TO_LISTEN: Final = "mainspring-listener"
"""Names of connections in ``CLIENT LIST``."""
WARNED = "Redis servers that were warned of"
_log = Logger("mainspring.mailbox")


class _InClusterError(Exception):
    """The server belongs to a cluster, whose mailboxes are on different nodes."""


class Directory:
    """Finds the server of one mailbox, anew for each connection: it may have moved.

    All mailboxes of the event loop on that server share its connections; in a cluster each mailbox has its own.
    """

    def __init__(self, server: Server, key: bytes, *, cluster: bool = False) -> None:
        self.server = server
        self._key = key
        self._nodes: list[Host] = list(server.hosts)
        self.cluster = cluster or server.kind == "cluster"
        self._lines: Lines | None = Lines() if self.cluster else None
        self.longest = LONGEST
        """The most bytes of one argument that the server takes that was connected to last."""

    async def connect(self) -> Channel:
        """A channel of the connection for calls to the server that holds the mailbox now.

        Raises what :data:`~mainspring.mailbox.redis.connection.LOST` names, :class:`ServerError` (also where it is no primary),
        :class:`MailboxConnectionError` where no node of a cluster has it, :class:`ConfigError`.
        """
        return await self._channel(FOR_CALLS)

    async def listen(self) -> Channel:
        """A channel of the connection to subscribe on; raises as :meth:`connect`."""
        return await self._channel(TO_LISTEN)

    async def _channel(self, name: str) -> Channel:
        try:
            channel = await self._join(name)
        except _InClusterError:
            self.cluster, self._lines = True, Lines()
            channel = await self._join(name)
        self.longest = channel.longest
        return channel

    async def _join(self, name: str) -> Channel:
        if self._lines is None:
            self._lines = Lines.shared(self.server)
        line = self._lines.calls if name == FOR_CALLS else self._lines.listening
        return await line.join(lambda: self._connect(name))

    async def _connect(self, name: str) -> Wire:
        wire = await self._found(name)
        try:
            wire.longest = await _longest(wire)
        except BaseException:
            with anyio.CancelScope(shield=True, deadline=anyio.current_time() + 1):
                await wire.close()
            raise
        return wire

    async def _found(self, name: str) -> Wire:
        if self.server.kind == "sentinel":
            return await self._of_sentinels(name)
        failed: Exception | None = None
        for host in list(self._nodes):
            try:
                wire = await connect(self.server, host, name=name)
                if wire.cluster:
                    return await self._of_cluster(wire, name)
            except (*LOST, ServerError) as error:
                failed = error
                continue
            if self.server.kind == "cluster":
                await wire.close()
                raise ConfigError(f"the server at {host[0]}:{host[1]} is no node of a cluster; its scheme is redis://")
            return wire
        assert failed is not None
        raise failed

    async def _of_cluster(self, wire: Wire, name: str) -> Wire:
        """The node that has the mailbox's slot, asked of another node."""
        try:
            if not self.cluster:  # the line is that of all mailboxes
                raise _InClusterError
            slot = await wire.call("CLUSTER", "KEYSLOT", self._key)
            ranges = await wire.call("CLUSTER", "SLOTS")
            nodes = [(_node(row[2], wire.host), row[0] <= slot <= row[1]) for row in ranges]
            owner = next((host for host, owns in nodes if owns), None)
            if owner is None:
                raise MailboxConnectionError(f"no node of the cluster has slot {slot}, which the mailbox is in")
            self._nodes = list(dict.fromkeys([owner, *(host for host, _ in nodes), *self.server.hosts]))
        except BaseException:
            await wire.close()
            raise
        if owner == wire.host:
            return wire
        await wire.close()
        return await connect(self.server, owner, name=name)

    async def _of_sentinels(self, name: str) -> Wire:
        """The primary that the first sentinel to answer names."""
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
            wire = await connect(self.server, (found[0].decode(), int(found[1])), name=name)
            if await _is_primary(wire):
                return wire
            failed = ServerError("READONLY the server that the sentinel named is no primary (yet)")
        assert failed is not None
        raise failed


async def _longest(wire: Wire) -> int:
    try:
        told = await wire.call("CONFIG", "GET", "proto-max-bulk-len")
    except ServerError:  # not everybody may ask
        return LONGEST
    return int(told[1]) if told else LONGEST


async def has_mailbox(server: Server, name: str, timeout: float) -> bool:
    """Whether there are keys of that mailbox: one that was opened, or sent to, has some for as long as the server keeps them.

    :raises ConfigError: the server refuses the login, or is too old.
    :raises MailboxConnectionError: it cannot be reached, or does not answer within the timeout.
    """
    link = Link(Directory(server, base_of(name)), timeout)
    try:
        with anyio.move_on_after(timeout):
            return bool(await (await link.connect()).call("EXISTS", *keys_of(name)))
    except LOST as error:
        raise MailboxConnectionError(f"the Redis server at {server.address}: {trouble(error)}") from error
    finally:
        await link.close()
    raise MailboxConnectionError(f"the Redis server at {server.address} did not answer within {timeout:g} s")


async def _is_primary(wire: Wire) -> bool:
    """Whether it is one; else, and where it does not say so, the connection is closed."""
    primary = False
    try:
        primary = bool((await wire.call("ROLE"))[0] == b"master")
    finally:
        if not primary:
            with anyio.CancelScope(shield=True, deadline=anyio.current_time() + 1):
                await wire.close()
    return primary


def _node(row: list[Any], asked: Host) -> Host:
    """A node as CLUSTER SLOTS tells it; without an address, it is where the one that was asked is."""
    return row[0].decode() if row[0] else asked[0], int(row[1])


async def check(wire: Channel, name: str, address: str, allow_eviction: bool) -> None:
    """Refuse a server that evicts keys; log once for a server that it has no file. Both as far as it tells everybody.

    :raises ConfigError: there is a ``maxmemory`` with a policy other than ``noeviction``, and no ``allow_eviction``.
    """
    memory = await _info(wire, "memory")
    policy = memory.get("maxmemory_policy", "")
    evicts = policy.startswith(("allkeys", "volatile")) and memory.get("maxmemory", "0") != "0"
    if evicts and not allow_eviction:
        raise ConfigError(
            f"mailbox {name!r}: the Redis server evicts keys when its memory is full (maxmemory-policy {policy}), and with them"
            f" {_evicted(policy)}; set maxmemory-policy noeviction there, or pass allow_eviction=true to accept the loss"
        )
    if address in _warned():
        return
    persistence = await _info(wire, "persistence")
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


async def _info(wire: Channel, section: str) -> dict[str, str]:
    try:
        text = await wire.call("INFO", section)
    except ServerError:  # not everybody may ask
        return {}
    lines = bytes(text).decode("utf-8", "replace").splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)


MOST: Final = 16
"""Connections that are kept while nothing is sent over them: each requester of a fleet may have a mailbox for its replies."""


class _Way:
    """The connection to one mailbox, and those who send over it: one after the other."""

    __slots__ = ("link", "lock", "users")

    def __init__(self, link: Link) -> None:
        self.link = link
        self.lock = anyio.Lock()
        self.users = 0


class Beside:
    """Sends to mailboxes by their names, each over a connection to the node that holds it.

    Those who send to one mailbox take turns; nobody waits for a node that only others send to. What is too large for the
    node of ``directory`` is so for all nodes.
    """

    def __init__(self, directory: Directory, timeout: float) -> None:
        self._directory = directory
        self._timeout = timeout
        self._ways: dict[str, _Way] = {}

    async def send(self, reply: Envelope, message_id: str) -> None:
        """Send a reply before its request is settled; while it is unread, a second one to the same request is dropped.

        :raises SerializationError: it is larger than a node takes.
        :raises MailboxConnectionError: it has not been taken within the timeout, the turns of others included.
        """
        name = reply.reply_to or ""
        put = Put([replace(reply, reply_to=None, dedup_key=f"reply:{message_id}")], None)
        put.check(self._directory.longest)
        call = Call(name, keys_of(name))
        put.write(call.arguments, call.number)
        call.add(put.take, (put,))
        server = self._directory.server
        way = self._ways.pop(name, None) or _Way(Link(Directory(server, base_of(name), cluster=True), self._timeout))
        self._ways[name] = way  # the last one used is the last one
        way.users += 1
        try:
            with anyio.fail_after(self._timeout):
                await self._tidy()
                async with way.lock:
                    call.take(await way.link.call(call.keys, call.arguments))
        except TimeoutError:
            raise MailboxConnectionError(
                f"the mailbox {name!r} has not taken the reply within {self._timeout:g} s"
            ) from None
        finally:
            way.users -= 1
        if put.error is not None:
            raise put.error

    async def _tidy(self) -> None:
        """Hang up where nobody has sent for longest."""
        while len(self._ways) > MOST:
            name = next((name for name, way in self._ways.items() if not way.users), None)
            if name is None:
                return
            await self._ways.pop(name).link.close()

    async def close(self) -> None:
        """Hang up everywhere."""
        while self._ways:
            await self._ways.popitem()[1].link.close()
