"""Other mailboxes of a cluster, to which replies go: one step for two mailboxes there is not, as they are on two nodes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import anyio

from mainspring.mailbox.redis_calls import Call, base_of, keys_of
from mainspring.mailbox.redis_commands import Put
from mainspring.mailbox.redis_link import Link
from mainspring.mailbox.redis_server import Directory

if TYPE_CHECKING:
    from mainspring.mailbox.message import Envelope
    from mainspring.mailbox.redis_url import Server

MOST: Final = 16
"""Connections that are kept: each requester of a fleet may have a mailbox of its own for its replies."""


class Beside:
    """Sends to mailboxes by their names, each over a connection to the node that holds it."""

    def __init__(self, server: Server, timeout: float) -> None:
        self._server = server
        self._timeout = timeout
        self._links: dict[str, Link] = {}
        self._lock = anyio.Lock()

    async def send(self, reply: Envelope, message_id: str) -> None:
        """Send a reply before its request is settled; while it is unread, a second one to the same request is dropped."""
        name = reply.reply_to or ""
        put = Put([replace(reply, reply_to=None, dedup_key=f"reply:{message_id}")], None)
        call = Call(name, keys_of(name))
        put.write(call.arguments, call.number)
        async with self._lock:
            await (await self._link(name)).call(call.keys, call.arguments)

    async def _link(self, name: str) -> Link:
        link = self._links.pop(name, None) or Link(Directory(self._server, base_of(name)), self._timeout)
        self._links[name] = link  # the last one used is the last one
        if len(self._links) > MOST:
            await self._links.pop(next(iter(self._links))).close()
        return link

    async def close(self) -> None:
        """Hang up everywhere."""
        while self._links:
            await self._links.popitem()[1].close()
