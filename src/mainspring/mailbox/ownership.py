"""``kept_open``: mailboxes that stay open until the work on them is out, whatever is cancelled meanwhile."""

from __future__ import annotations

from collections import deque
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import anyio

from mainspring.core.lazy_event import LazyEvent
from mainspring.core.state_machine import MailboxState
from mainspring.errors import ConfigError, MailboxClosedError
from mainspring.runtime.scope import DaemonScope

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from mainspring.mailbox.mailbox import Mailbox


@dataclass(frozen=True, eq=False, slots=True)
class Owner:
    """A group or a loop that opens mailboxes, and closes them at its end."""

    name: str
    opening: dict[Mailbox[Any, Any], _OwnedMailbox] = field(default_factory=dict)
    """The mailboxes that it is opening at this moment."""


OPENED_AT_ONCE = 100
"""Mailboxes of one owner that are being opened at the same time, at most: those of one store can share round trips."""
_OWNER: ContextVar[Owner | None] = ContextVar("the owner of the mailbox that is being opened", default=None)


@asynccontextmanager
async def kept_open(mailboxes: Iterable[Mailbox[Any, Any]], owner: str) -> AsyncIterator[None]:
    """Open the mailboxes that are not open, and close them, the last one first, when the block has been left.

    Opening can be cancelled. Once open, a cancellation of everything around does not reach a mailbox before the block is
    out: loops that are cancelled can still hand their messages back.
    """
    async with DaemonScope("mailboxes") as scope:
        await open_in(scope, mailboxes, owner)
        yield


async def open_in(scope: DaemonScope, mailboxes: Iterable[Mailbox[Any, Any]], owner: str) -> None:
    """Open the mailboxes that are not open. Leaving ``scope`` closes them, and a cancellation does not.

    A mailbox that another owner has opened is refused: that owner would close it under this one's work. One that its user has
    opened is used as it is. A mailbox that is being opened here, and opens others, does so for the same owner.

    Up to :data:`OPENED_AT_ONCE` are opened at the same time. If some fail, the error of the first in order is raised.

    A mailbox that works unopened stays so, and only gets what it needs to send replies to other stores. If it were closed at
    the end, its user could not look into it any more, and other loops that share it would lose it.
    """
    this = _OWNER.get() or Owner(owner)
    begun: deque[_OwnedMailbox] = deque()
    for mailbox in mailboxes:
        if mailbox.opened_by is not None and mailbox.opened_by is not this:
            raise ConfigError(
                f"mailbox {mailbox.name!r} was opened by {mailbox.opened_by.name}, which closes it at its end, under the work"
                f" of {this.name}: open it around both (`async with mailbox:`), or give each a mailbox object of its own"
            )
        if mailbox.backend.works_unopened and mailbox.state is MailboxState.UNOPENED:
            router = _ReplyRouting(mailbox, scope)
            scope.start_soon(router.run, name=f"replies of mailbox {mailbox.name}", stop=router.stop)
        elif mailbox in this.opening:
            begun.append(this.opening[mailbox])
        elif mailbox.state is not MailboxState.OPEN:
            opened = _OwnedMailbox(mailbox, this)
            # `scope.start` would hang: cancelled just as the mailbox opens, it waits for the end of a task that goes on.
            scope.start_soon(opened.run, name=f"mailbox {mailbox.name}", stop=opened.stop)
            mailbox.opened_by = this
            this.opening[mailbox] = opened
            begun.append(opened)
            if len(begun) == OPENED_AT_ONCE:
                await begun.popleft().wait_opened()
    for opened in begun:
        await opened.wait_opened()


class _OwnedMailbox:
    """Has one mailbox open until it is told to stop. A mailbox that is still being opened then is given up."""

    def __init__(self, mailbox: Mailbox[Any, Any], owner: Owner) -> None:
        self._tried: LazyEvent | None = LazyEvent()
        """Set once it is open or has failed; then None, as many mailboxes stay open for long."""
        self._error: Exception | None = None
        self._mailbox = mailbox
        self._owner = owner
        self._told = anyio.Event()
        self._scope = anyio.CancelScope()

    async def wait_opened(self) -> None:
        """Wait until it is open. Raise what the opening raised."""
        if self._tried is not None:
            await self._tried.wait()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        self._told.set()
        if self._tried is not None:
            self._scope.cancel()

    async def run(self) -> None:
        _OWNER.set(self._owner)  # of this task, and of those that it starts
        try:
            with self._scope:
                async with self._mailbox:
                    self._scope.shield = True  # until told to stop, which leaving its DaemonScope does in every case
                    self._opening_ended()
                    await self._told.wait()
        except Exception as error:
            if self._tried is None:
                raise
            self._error = error
            self._opening_ended()
        finally:
            if self._tried is not None:
                self._error = MailboxClosedError(f"mailbox {self._mailbox.name!r} was closed while it was being opened")
                self._opening_ended()
            self._mailbox.opened_by = None

    def _opening_ended(self) -> None:
        del self._owner.opening[self._mailbox]
        assert self._tried is not None
        self._tried.set()
        self._tried = None


class _ReplyRouting:
    """Has one mailbox send its replies through a scope until it is told to stop, whatever is cancelled meanwhile."""

    def __init__(self, mailbox: Mailbox[Any, Any], scope: DaemonScope) -> None:
        self._told = anyio.Event()
        self._end = mailbox.route_replies(scope)

    def stop(self) -> None:
        self._told.set()

    async def run(self) -> None:
        try:
            with anyio.CancelScope(shield=True):  # until told to stop, as above
                await self._told.wait()
        finally:
            self._end()
