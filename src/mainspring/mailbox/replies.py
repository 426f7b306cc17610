"""Replies: what tells a requester the outcome. To a mailbox on the same store one leaves in one step with the settlement; to
another store it is sent before (the requester drops what comes twice).

An address comes out of a message: its sender chose it. So it selects, and configures nothing: it must name a mailbox on a
store that this process knows by its own configuration. Host, login, certificates and options are those of the known store.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakSet, WeakValueDictionary

import anyio

from mainspring.core import process
from mainspring.errors import (
    ConfigError,
    MailboxConnectionError,
    MailboxError,
    MainspringError,
    ReplyNotAvailableError,
)
from mainspring.mailbox.backend import TRANSIENT
from mainspring.mailbox.codec import Unserialized
from mainspring.mailbox.limits import is_name
from mainspring.mailbox.message import Ack, Dead, Envelope, header_of, history_with
from mainspring.mailbox.open import open_mailbox
from mainspring.mailbox.requests import CANCELLED, REPLY_ERRORS, Requester
from mainspring.mailbox.sync import HostLoop
from mainspring.runtime.deadline import HEADER

if TYPE_CHECKING:
    from collections.abc import Callable

    from anyio.abc import TaskStatus

    from mainspring.mailbox.mailbox import Mailbox
    from mainspring.mailbox.message import ClaimedMessage, Message
    from mainspring.runtime.scope import DaemonScope

SEND_TIMEOUT = 10.0
"""Seconds that another store may take for a reply, with the opening of its mailbox."""
MOST = 16
"""Mailboxes that are kept open while nothing is sent to them: each requester of a fleet may have one for its replies."""


# ---------------------------------------------------------------------------------------------------- what a reply says


def reply_to(mailbox: Mailbox[Any, Any], delivery: ClaimedMessage, body: Any) -> Envelope:
    """Return the reply to ``delivery``, with the request's id and deadline in its headers. ``body`` is encoded."""
    headers = {"request_id": delivery.message_id}
    if HEADER in delivery.headers:
        headers[HEADER] = delivery.headers[HEADER]
    return Envelope(mailbox.new_id(), body, reply_to=delivery.reply_to, headers=headers)


def completed(mailbox: Mailbox[Any, Any], delivery: ClaimedMessage, dead: Dead) -> Dead:
    """Return ``dead`` with the message's history and, where its sender wants to hear of it, an error reply."""
    history, reply = dead.history, dead.reply
    if history is None:
        history = history_with(mailbox, delivery, dead.error, dead.error_type)
    if reply is None and delivery.reply_to is not None and header_of(delivery.headers, REPLY_ERRORS) is not None:
        reply = _error_reply(mailbox, delivery.message_id, delivery.reply_to, dead.error, dead.error_type)
    return replace(dead, history=history, reply=reply)


def failure_reply(message: Message[Any, Any], error: BaseException | str) -> Envelope | None:
    """Return the reply that tells the requester of ``message`` of its failure, or None if its sender did not ask for that."""
    return completed(message.mailbox, message.delivery, Dead.of(error)).reply


def _error_reply(mailbox: Mailbox[Any, Any], message_id: str, reply_to: str, error: str, error_type: str) -> Envelope:
    headers = {"request_id": message_id, "error": error, "error_type": error_type}
    body = b"null" if mailbox.serializes else Unserialized(None, mailbox.reply_codec.body_type)
    return Envelope(mailbox.new_id(), body, reply_to=reply_to, headers=headers)


def _as_json(mailbox: Mailbox[Any, Any], body: Any) -> Any:
    """Return the body of a reply as other stores take it."""
    if type(body) is not Unserialized:
        return body
    return b"null" if body.body is None else mailbox.reply_codec.encode(body.body)


# ----------------------------------------------------------------------------------------------------- where it goes


def is_local(mailbox: Mailbox[Any, Any], reply: Envelope) -> bool:
    """True if a reply goes to the store of ``mailbox``."""
    return mailbox.backend.local_name(reply.reply_to or "") is not None


async def settle(mailbox: Mailbox[Any, Any], delivery: ClaimedMessage, settlement: Ack | Dead, reply: Envelope) -> None:
    """Settle and reply: in one step where the reply goes to this store, else send it while the lease is held, then settle."""
    backend, address = mailbox.backend, reply.reply_to or ""
    local = backend.local_name(address)
    if local is not None:
        if not is_name(local):
            raise ReplyNotAvailableError(f"the reply cannot be sent to {address!r}: that is no name of a mailbox")
        await backend.settle(delivery, replace(settlement, reply=replace(reply, reply_to=local)))
        return
    if not mailbox.reply_routers:
        raise ReplyNotAvailableError(
            f"the reply cannot be sent to {address!r}, another store than that of mailbox {mailbox.name!r}: open the"
            " mailbox with `async with`, so that it can keep the connection"
        )
    is_result = type(settlement) is Ack
    raw = _as_json(mailbox, reply.body)
    await backend.extend(delivery, 0.0)  # shortens nothing, and is refused where the lease is lost
    copy = replace(reply, body=raw, reply_to=None, dedup_key=f"reply:{delivery.message_id}")
    try:
        await mailbox.reply_routers[-1].send(address, copy, partial(destination, mailbox))
    except (MailboxError, OSError):
        if is_result:
            raise
    await backend.settle(delivery, replace(settlement, reply=None))


async def settle_dead(mailbox: Mailbox[Any, Any], delivery: ClaimedMessage, dead: Dead) -> None:
    """Dead-letter a message, and tell its requester where that can be done: the reply may be lost, the message may not."""
    dead = completed(mailbox, delivery, dead)
    if dead.reply is None:
        await mailbox.backend.settle(delivery, dead)
    else:
        try:
            await settle(mailbox, delivery, dead, dead.reply)
        except ReplyNotAvailableError:
            await mailbox.backend.settle(delivery, replace(dead, reply=None))
    mailbox.backend.notifications.dead.publish(delivery.message_id)


async def send_late(mailbox: Mailbox[Any, Any], reply: Envelope) -> None:
    """Send a reply by itself, as its message is settled already: it may be lost where the process dies in between.

    :raises ReplyNotAvailableError: it goes to a store that this process does not know.
    :raises MailboxError: the mailbox that it goes to cannot be opened, or does not take it.
    """
    address = reply.reply_to or ""
    local = mailbox.backend.local_name(address)
    box = mailbox.sibling(local) if local is not None else destination(mailbox, address)
    if not box.name.startswith(TRANSIENT) or await box.exists():  # else the requester is gone
        async with box:
            await box.backend.send_reply(replace(reply, body=_as_json(mailbox, reply.body), reply_to=None))


async def tell_cancelled(mailbox: Mailbox[Any, Any], message_id: str, reply_to: str) -> None:
    """Tell the one who waits for the reply, in another process, that there will be none; else its timeout does."""
    reply = _error_reply(mailbox, message_id, reply_to, "it was cancelled", CANCELLED)
    with suppress(MainspringError, OSError):
        await send_late(mailbox, reply)


def open_mailboxes() -> WeakSet[Mailbox[Any, Any]]:
    """Return the mailboxes that are open on the running event loop."""
    found: WeakSet[Mailbox[Any, Any]] = process.shared("open mailboxes", f"{id(process.event_loop())}", WeakSet)
    return found


def destination(mailbox: Mailbox[Any, Any], address: str) -> Mailbox[Any, Any]:
    """Return the unopened mailbox that ``address`` names, for a reply from ``mailbox``.

    Known stores are the queues of this process, those in ``mailbox.reply_stores``, and those of the mailboxes that are open
    on this event loop.

    :raises ReplyNotAvailableError: the address is on none of them, or no name of a mailbox there.
    """
    try:
        if address.startswith("memory://"):
            return open_mailbox(address.partition("?")[0])
        for known in (*mailbox.reply_stores, *open_mailboxes()):
            name = known.backend.local_name(address)
            if name is not None:
                return known.sibling(name)
    except ConfigError as error:
        raise ReplyNotAvailableError(f"the reply cannot be sent to {address!r}: {error}") from error
    raise ReplyNotAvailableError(
        f"the reply cannot be sent to {address!r}: that is on no store which mailbox {mailbox.name!r} may reply to; to allow"
        " it, give open_mailbox() the URL of that store in reply_stores=[…], or open a mailbox of it in this process"
    )


class _ReplyMailbox:
    """A mailbox that is open, how many send to it just now, and what tells the task that holds it to close it."""

    __slots__ = ("mailbox", "unwanted", "users")

    def __init__(self, mailbox: Mailbox[Any, Any]) -> None:
        self.mailbox = mailbox
        self.unwanted = anyio.Event()
        self.users = 0


class ReplyRouter:
    """Keeps the mailboxes that replies go to, other than on the own store, open: those used last, as long as its scope is."""

    def __init__(self, name: str, scope: DaemonScope) -> None:
        self.host = HostLoop(name, scope)
        self._scope = scope
        self._open: dict[str, _ReplyMailbox] = {}  # the one used last is the last one
        # One for each URL, while it is in use: a store that does not answer holds up no reply to another.
        self._opening: WeakValueDictionary[str, anyio.Lock] = WeakValueDictionary()
        self._requester: Requester | None = None

    def requester(self, mailbox: Mailbox[Any, Any]) -> Requester:
        """Return what receives the replies to the requests that ``mailbox`` sends, as long as the scope is open."""
        if self._requester is None:
            self._requester = Requester(mailbox, self._scope)
        return self._requester

    def end_request(self, message_id: str, error: MainspringError) -> bool:
        """Raise an error in the request that waits for the reply to that message. Return True if there is one."""
        return self._requester is not None and self._requester.end(message_id, error)

    async def send(self, url: str, reply: Envelope, find: Callable[[str], Mailbox[Any, Any]]) -> None:
        """Send ``reply`` to the mailbox at ``url``, deduplicated there while an earlier copy is unfinished.

        :param find: gives the unopened mailbox for a URL (see :func:`destination`).
        :raises ReplyNotAvailableError: the URL may not be opened, or cannot: no later try would fare better.
        :raises MailboxConnectionError: it has not been taken within ``SEND_TIMEOUT``; it may arrive nevertheless.
        """
        try:
            with anyio.fail_after(SEND_TIMEOUT):
                entry = await self._mailbox_at(url, find)
                try:
                    await entry.mailbox.backend.send_reply(reply)
                except ReplyNotAvailableError:  # a queue in memory that no mailbox has open, or only what is kept here
                    if (
                        entry.users == 1
                        and not await entry.mailbox.approximate_count()
                        and self._open.get(url) is entry
                    ):
                        self._open.pop(url).unwanted.set()
                    raise
                finally:
                    entry.users -= 1
                    self._close_idle()
        except TimeoutError:
            raise MailboxConnectionError(f"{url!r} has not taken the reply within {SEND_TIMEOUT:g} s") from None

    async def _mailbox_at(self, url: str, find: Callable[[str], Mailbox[Any, Any]]) -> _ReplyMailbox:
        """Return the mailbox at ``url``, with one more user."""
        lock = self._opening.setdefault(url, anyio.Lock())
        async with lock:
            entry = self._open.pop(url, None)
            if entry is None:
                found = find(url)
                try:
                    entry = await self._scope.start(self._keep, url, found, name=f"replies to {url}")
                except ConfigError as error:
                    raise ReplyNotAvailableError(f"the reply cannot be sent to {url!r}: {error}") from error
            else:
                self._open[url] = entry
            entry.users += 1
            return entry

    def _close_idle(self) -> None:
        """Close the mailboxes that are unused for longest, down to ``MOST``. Those in memory stay: closed, they may be gone."""
        idle = [url for url, entry in self._open.items() if not entry.users and entry.mailbox.capabilities.durable]
        for url in idle[: max(0, len(idle) - MOST)]:
            self._open.pop(url).unwanted.set()

    async def _keep(self, url: str, found: Mailbox[Any, Any], *, task_status: TaskStatus[_ReplyMailbox]) -> None:
        entry: _ReplyMailbox | None = None
        try:
            async with found as mailbox:
                self._open[url] = entry = _ReplyMailbox(mailbox)
                task_status.started(entry)
                await entry.unwanted.wait()
        except MailboxError:
            if entry is None:
                raise  # it never opened: the one who waits for the start hears of it
        finally:
            if entry is not None and self._open.get(url) is entry:
                del self._open[url]
