"""Other mailboxes of a cluster, to which replies go: one step for two mailboxes there is not, as they are on two nodes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import anyio

from mainspring.errors import MailboxConnectionError
from mainspring.mailbox.redis.calls import Call, base_of, keys_of
from mainspring.mailbox.redis.client import Link
from mainspring.mailbox.redis.commands import Put
from mainspring.mailbox.redis.topology import Directory

if TYPE_CHECKING:
    from mainspring.mailbox.message import Envelope

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
