"""Replies that leave for another store (send, then acknowledge; the requester drops what comes twice), and those that come."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import anyio

from mainspring.errors import ConfigError, MailboxConnectionError, MailboxError, ReplyNotAvailableError
from mainspring.mailbox.open import open_mailbox
from mainspring.mailbox.requests import Requester
from mainspring.mailbox.sync import Home

if TYPE_CHECKING:
    from anyio.abc import TaskStatus

    from mainspring.errors import MainspringError
    from mainspring.mailbox.base import Mailbox
    from mainspring.mailbox.message import Envelope
    from mainspring.scope import DaemonScope

SEND_TIMEOUT = 10.0
"""Seconds that another store may take for a reply, with the opening of its mailbox."""
MOST = 16
"""Mailboxes that are kept open while nothing is sent to them: each requester of a fleet may have one for its replies."""


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

    async def send(self, url: str, reply: Envelope) -> None:
        """Send ``reply`` to the mailbox at ``url``, deduplicated there while an earlier copy is unfinished.

        :raises ReplyNotAvailableError: the URL cannot be opened: no later try would fare better.
        :raises MailboxConnectionError: it has not been taken within ``SEND_TIMEOUT``; it may arrive nevertheless.
        """
        try:
            with anyio.fail_after(SEND_TIMEOUT):
                kept = await self._kept_at(url)
                try:
                    await kept.mailbox.send_encoded(reply)
                finally:
                    kept.users -= 1
                    self._tidy()
        except TimeoutError:
            raise MailboxConnectionError(f"{url!r} has not taken the reply within {SEND_TIMEOUT:g} s") from None

    async def _kept_at(self, url: str) -> _Kept:
        """The mailbox at ``url``, with one more user."""
        lock = self._opening.setdefault(url, anyio.Lock())
        async with lock:
            kept = self._open.pop(url, None)
            if kept is None:
                try:
                    kept = await self._scope.start(self._keep, url, name=f"replies to {url}")
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

    async def _keep(self, url: str, *, task_status: TaskStatus[_Kept]) -> None:
        kept: _Kept | None = None
        try:
            async with open_mailbox(url) as mailbox:
                self._open[url] = kept = _Kept(mailbox)
                task_status.started(kept)
                await kept.unwanted.wait()
        except MailboxError:
            if kept is None:
                raise  # it never opened: the one who waits for the start hears of it
        finally:
            if kept is not None and self._open.get(url) is kept:
                del self._open[url]
