"""Replies that leave for another store (send, then acknowledge; the requester drops what comes twice), and those that come.

An address comes out of a message: its sender chose it. So it selects, and configures nothing: it must name a mailbox on a
store that this process knows by its own configuration. Host, login, certificates and options are those of the known store.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakSet, WeakValueDictionary

import anyio

from mainspring.core import process
from mainspring.errors import ConfigError, MailboxConnectionError, MailboxError, ReplyNotAvailableError
from mainspring.mailbox.open import open_mailbox
from mainspring.mailbox.requests import Requester
from mainspring.mailbox.sync import Home

if TYPE_CHECKING:
    from collections.abc import Callable

    from anyio.abc import TaskStatus

    from mainspring.errors import MainspringError
    from mainspring.mailbox.mailbox import Mailbox
    from mainspring.mailbox.message import Envelope
    from mainspring.runtime.scope import DaemonScope

SEND_TIMEOUT = 10.0
"""Seconds that another store may take for a reply, with the opening of its mailbox."""
MOST = 16
"""Mailboxes that are kept open while nothing is sent to them: each requester of a fleet may have one for its replies."""


def open_mailboxes() -> WeakSet[Mailbox[Any, Any]]:
    """The mailboxes that are open on the running event loop."""
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
            name = known._local_name(address)  # noqa: SLF001 - this port's own
            if name is not None:
                return known._sibling(name)  # noqa: SLF001 - this package's own
    except ConfigError as error:
        raise ReplyNotAvailableError(f"the reply cannot be sent to {address!r}: {error}") from error
    raise ReplyNotAvailableError(
        f"the reply cannot be sent to {address!r}: that is on no store which mailbox {mailbox.name!r} may reply to; to allow"
        " it, give open_mailbox() the URL of that store in reply_stores=[…], or open a mailbox of it in this process"
    )


class _Kept:
    """A mailbox that is open, how many send to it just now, and what tells the task that holds it to close it."""

    __slots__ = ("mailbox", "unwanted", "users")

    def __init__(self, mailbox: Mailbox[Any, Any]) -> None:
        self.mailbox = mailbox
        self.unwanted = anyio.Event()
        self.users = 0


class ReplyRouter:
    """Keeps the mailboxes that replies go to, other than on the own store, open: those used last, as long as its scope is."""

    def __init__(self, name: str, scope: DaemonScope) -> None:
        self.home = Home(name, scope)
        self._scope = scope
        self._open: dict[str, _Kept] = {}  # the one used last is the last one
        # One for each URL, as long as somebody needs it: a store that does not answer holds up nobody who goes elsewhere.
        self._opening: WeakValueDictionary[str, anyio.Lock] = WeakValueDictionary()
        self._requester: Requester | None = None

    def requester(self, mailbox: Mailbox[Any, Any]) -> Requester:
        """What receives the replies to the requests that ``mailbox`` sends, as long as the scope is open."""
        if self._requester is None:
            self._requester = Requester(mailbox, self._scope)
        return self._requester

    def end_request(self, message_id: str, error: MainspringError) -> bool:
        """Let the one who waits for the reply to that message have an error; whether somebody did."""
        return self._requester is not None and self._requester.end(message_id, error)

    async def send(self, url: str, reply: Envelope, find: Callable[[str], Mailbox[Any, Any]]) -> None:
        """Send ``reply`` to the mailbox at ``url``, deduplicated there while an earlier copy is unfinished.

        :param find: gives the unopened mailbox for a URL (see :func:`destination`).
        :raises ReplyNotAvailableError: the URL may not be opened, or cannot: no later try would fare better.
        :raises MailboxConnectionError: it has not been taken within ``SEND_TIMEOUT``; it may arrive nevertheless.
        """
        try:
            with anyio.fail_after(SEND_TIMEOUT):
                kept = await self._kept_at(url, find)
                try:
                    await kept.mailbox._send_encoded(reply)  # noqa: SLF001 - this package's own
                except ReplyNotAvailableError:  # a queue in memory that no mailbox has open, or only what is kept here
                    if kept.users == 1 and not await kept.mailbox.approximate_count() and self._open.get(url) is kept:
                        self._open.pop(url).unwanted.set()
                    raise
                finally:
                    kept.users -= 1
                    self._tidy()
        except TimeoutError:
            raise MailboxConnectionError(f"{url!r} has not taken the reply within {SEND_TIMEOUT:g} s") from None

    async def _kept_at(self, url: str, find: Callable[[str], Mailbox[Any, Any]]) -> _Kept:
        """The mailbox at ``url``, with one more user."""
        lock = self._opening.setdefault(url, anyio.Lock())
        async with lock:
            kept = self._open.pop(url, None)
            if kept is None:
                found = find(url)
                try:
                    kept = await self._scope.start(self._keep, url, found, name=f"replies to {url}")
                except ConfigError as error:
                    raise ReplyNotAvailableError(f"the reply cannot be sent to {url!r}: {error}") from error
            else:
                self._open[url] = kept
            kept.users += 1
            return kept

    def _tidy(self) -> None:
        """Let go of those to which nothing was sent for longest. One in memory may be there only because it is kept here."""
        idle = [url for url, kept in self._open.items() if not kept.users and kept.mailbox.capabilities.durable]
        for url in idle[: max(0, len(idle) - MOST)]:
            self._open.pop(url).unwanted.set()

    async def _keep(self, url: str, found: Mailbox[Any, Any], *, task_status: TaskStatus[_Kept]) -> None:
        kept: _Kept | None = None
        try:
            async with found as mailbox:
                self._open[url] = kept = _Kept(mailbox)
                task_status.started(kept)
                await kept.unwanted.wait()
        except MailboxError:
            if kept is None:
                raise  # it never opened: the one who waits for the start hears of it
        finally:
            if kept is not None and self._open.get(url) is kept:
                del self._open[url]
