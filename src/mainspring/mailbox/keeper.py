"""``kept_open``: mailboxes that stay open until the work on them is out, whatever is cancelled meanwhile."""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio

from mainspring.scope import DaemonScope
from mainspring.states import MailboxState

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from anyio.abc import TaskStatus

    from mainspring.mailbox.base import Mailbox


@asynccontextmanager
async def kept_open(mailboxes: Iterable[Mailbox[Any, Any]]) -> AsyncIterator[None]:
    """Open those of ``mailboxes`` that nobody has opened, and close them, the last one first, when the block has been left.

    Opening can be cancelled. Once open, a cancellation of everything around does not reach a mailbox before the block is
    out: loops that are cancelled can still hand their messages back.
    """
    async with DaemonScope("mailboxes") as scope:
        await open_in(scope, mailboxes)
        yield


async def open_in(scope: DaemonScope, mailboxes: Iterable[Mailbox[Any, Any]]) -> None:
    """Open those of ``mailboxes`` that nobody has opened; leaving ``scope`` closes them, and a cancellation does not.

    One that works unopened is left as it is: closed at the end, it would be lost to its user, who may look into it then, and
    to other loops that share it.
    """
    for mailbox in mailboxes:
        works = mailbox.works_unopened and mailbox.state is MailboxState.UNOPENED
        if mailbox.state is not MailboxState.OPEN and not works:
            told = anyio.Event()
            await scope.start(partial(_keep, mailbox, told), name=f"mailbox {mailbox.name}", stop=told.set)


async def _keep(mailbox: Mailbox[Any, Any], told: anyio.Event, *, task_status: TaskStatus[None]) -> None:
    with anyio.CancelScope() as scope:
        async with mailbox:
            scope.shield = True  # until told to stop, which leaving its DaemonScope does in every case
            task_status.started()
            await told.wait()
