"""Which server holds a mailbox: the one named, the primary that sentinels name, or the node of a cluster that has its slot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import anyio

from mainspring.core import process
from mainspring.core.loggers import Logger
from mainspring.errors import ConfigError, MailboxConnectionError
from mainspring.mailbox.redis.calls import base_of, keys_of
from mainspring.mailbox.redis.client import Link
from mainspring.mailbox.redis.connection import LONGEST, LOST, ServerError, Wire, connect, trouble
from mainspring.mailbox.redis.connections import Lines

if TYPE_CHECKING:
    from mainspring.mailbox.redis.connections import Channel
    from mainspring.mailbox.redis.url import Host, Server

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
