"""A start that is cancelled in the very moment in which a mailbox opens: it must not wait for ever for its keeper."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path

import anyio
import pytest

from loops import LOOPS
from mainspring.core.state_machine import MailboxState
from mainspring.mailbox.ownership import kept_open
from mainspring.mailbox.sqlite.mailbox import SQLiteMailbox
from wrapped_backend import WrappedBackend, wrap


class CancelsWhoOpens(WrappedBackend):
    def __init__(self, inner, outer, late):
        super().__init__(inner)
        self.outer = outer
        self.late = late

    async def open(self, scope):
        await self.inner.open(scope)
        if self.late:
            await anyio.lowlevel.checkpoint()
        self.outer.cancel()


def ends(fn, backend):
    """Whether ``fn`` comes to an end; in a thread of its own, as a shielded wait lets no timeout through."""
    name, options = backend
    thread = threading.Thread(target=anyio.run, args=(fn,), kwargs={"backend": name, "backend_options": options})
    thread.daemon = True
    thread.start()
    thread.join(20)
    return not thread.is_alive()


@pytest.mark.parametrize("backend", LOOPS.values(), ids=LOOPS)
@pytest.mark.parametrize("late", [False, True])
def test_a_cancellation_at_the_end_of_opening_closes_the_mailbox(tmp_path, backend, late):
    path = tmp_path / "mail.db"
    mailbox = SQLiteMailbox(path)

    async def start():
        with anyio.CancelScope() as outer:
            async with kept_open([wrap(mailbox, partial(CancelsWhoOpens, outer=outer, late=late))], "this test"):
                await anyio.sleep_forever()

    assert ends(start, backend)
    assert mailbox.state in (MailboxState.CLOSED, MailboxState.UNOPENED)
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and thread.name == "mainspring sqlite writer":
            thread.join(20)  # where the release itself was cut short, the file is closed a moment later
    assert not Path(f"{path}-wal").exists()  # nobody has it open
