"""Which server holds a mailbox, found anew for each connection, and whether it may be used.

It is the server named, the primary that sentinels name, or the node of a cluster that has the mailbox's slot.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

import anyio

from mainspring.core import process
from mainspring.core.loggers import Logger
from mainspring.errors import ConfigError, MailboxConnectionError
from mainspring.mailbox.redis.connection import LONGEST, LOST, Connectors, ServerError, connect

if TYPE_CHECKING:
    from mainspring.mailbox.redis.connection import Channel, Connector, RedisConnection
    from mainspring.mailbox.redis.settings import RedisServer
    from mainspring.mailbox.settings import Host

FOR_CALLS: Final = "mainspring-calls"
TO_LISTEN: Final = "mainspring-listener"
"""Names of connections in ``CLIENT LIST``."""
WARNED = "Redis servers that were warned of"
_log = Logger("mainspring.mailbox")


class _InClusterError(Exception):
    """The server belongs to a cluster, whose mailboxes are on different nodes."""


class Topology:
    """Finds the server of one mailbox, anew for each connection: it may have moved.

    The mailboxes of an event loop on one server share its connections; in a cluster each mailbox has its own.
    """

    def __init__(self, server: RedisServer, key: bytes, *, cluster: bool = False) -> None:
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

    async def _connect(self, name: str) -> RedisConnection:
        connection = await self._connect_to_owner(name)
        try:
            connection.longest = await _longest(connection)
        except BaseException:
            await connection.close()
            raise
        return connection

    async def _connect_to_owner(self, name: str) -> RedisConnection:
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

    async def _owner_in_cluster(self, connection: RedisConnection, name: str) -> RedisConnection:
        """Return a connection to the node with the mailbox's slot, which the node of ``connection`` names."""
        try:
            if not self.cluster:  # the connector is shared by all mailboxes
                raise _InClusterError
            slot = await connection.call("CLUSTER", "KEYSLOT", self._key)
            ranges = await connection.call("CLUSTER", "SLOTS")
            nodes = [(_node(row[2], connection.host), row[0] <= slot <= row[1]) for row in ranges]
            owner = next((host for host, owns in nodes if owns), None)
            if owner is None:
                raise MailboxConnectionError(
                    f"no node of the cluster has slot {slot}, which the mailbox is in; see `redis-cli cluster info`"
                )
            self._nodes = list(dict.fromkeys([owner, *(host for host, _ in nodes), *self.server.hosts]))
        except BaseException:
            await connection.close()
            raise
        if owner == connection.host:
            return connection
        await connection.close()
        return await connect(self.server, owner, name=name)

    async def _primary_by_sentinels(self, name: str) -> RedisConnection:
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


async def _longest(connection: RedisConnection) -> int:
    try:
        told = await connection.call("CONFIG", "GET", "proto-max-bulk-len")
    except ServerError:  # the user may not ask
        return LONGEST
    return int(told[1]) if told else LONGEST


async def _is_primary(connection: RedisConnection) -> bool:
    """Return whether the server is a primary; if not, or on an error, close the connection."""
    primary = False
    try:
        primary = bool((await connection.call("ROLE"))[0] == b"master")
    finally:
        if not primary:
            await connection.close()
    return primary


def _node(row: list[Any], asked: Host) -> Host:
    """Read a node from CLUSTER SLOTS; without an address it is that of the node which was asked."""
    return row[0].decode() if row[0] else asked[0], int(row[1])


async def check(channel: Channel, name: str, address: str, allow_eviction: bool) -> None:
    """Refuse a server that evicts keys; log once for a server that it has no file. Both as far as the user may ask.

    :raises ConfigError: there is a ``maxmemory`` with a policy other than ``noeviction``, and no ``allow_eviction``.
    """
    shared, began = channel.shared, anyio.current_time()
    async with shared.asking:
        if shared.memory_at < began:  # else it was asked for another mailbox meanwhile
            shared.memory = await _info(channel, "memory")
            shared.memory_at = anyio.current_time()
    memory = shared.memory
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
