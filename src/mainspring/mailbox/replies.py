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


class ReplyRouter:
    """Keeps the mailboxes that replies go to, other than on the own store, open as long as its scope is."""

    def __init__(self, name: str, scope: DaemonScope) -> None:
        self.home = Home(name, scope)
        self._scope = scope
        self._open: dict[str, Mailbox[Any, Any]] = {}
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
                mailbox = await self._mailbox_at(url)
                await mailbox.send_encoded(reply)
        except TimeoutError:
            raise MailboxConnectionError(f"{url!r} has not taken the reply within {SEND_TIMEOUT:g} s") from None

    async def _mailbox_at(self, url: str) -> Mailbox[Any, Any]:
        lock = self._opening.setdefault(url, anyio.Lock())
        async with lock:
            mailbox = self._open.get(url)
            if mailbox is None:
                try:
                    mailbox = await self._scope.start(self._keep, url, name=f"replies to {url}")
                except ConfigError as error:
                    raise ReplyNotAvailableError(f"the reply cannot be sent to {url!r}: {error}") from error
                self._open[url] = mailbox
            return mailbox

    async def _keep(self, url: str, *, task_status: TaskStatus[Mailbox[Any, Any]]) -> None:
        try:
            async with open_mailbox(url) as mailbox:
                task_status.started(mailbox)
                await anyio.sleep_forever()
        except MailboxError:
            if self._open.pop(url, None) is None:
                raise  # it never opened: the one who waits for the start hears of it
