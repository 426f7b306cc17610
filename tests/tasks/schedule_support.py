"""What the tests of schedules share: programs on one queue, and a store some way off."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from functools import partial, wraps
from random import Random

import anyio

from mainspring import Context, Tasks, open_mailbox
from mainspring.errors import (
    MailboxConnectionError,
)
from mainspring.mailbox.backend import Notifications
from mainspring.mailbox.records import WORKER
from mainspring.testing import run_virtual
from wrapped_backend import WrappedBackend, wrap

EPOCH = datetime(2000, 1, 1, tzinfo=UTC)
HOUR = 3_600.0
DAY = 86_400.0


class Program:
    """A program with one task, which notes what it was called for, and when. Several are on the queue of one name."""

    def __init__(self, name="jobs", notes=None, backend=None, middleware=()):
        mailbox = open_mailbox(f"memory://{name}")
        self.tasks = Tasks(mailbox if backend is None else wrap(mailbox, backend), middleware=middleware)
        self.notes = [] if notes is None else notes

        @self.tasks.task
        async def note(ctx: Context, what: str = "") -> None:
            self.notes.append((what, (ctx.scheduled_for - EPOCH).total_seconds(), anyio.current_time()))

        self.note = note

    @property
    def ticks(self):
        """The times of the ticks for which the task was called, in hours."""
        return [tick / HOUR for _, tick, _ in self.notes]

    async def run(self, seconds):
        """Run a worker, and end it as a cancellation does."""
        with anyio.move_on_after(seconds):
            async with self.tasks:
                await self.tasks.loop(wait_time_seconds=600).run()


def virtually(test):
    """Run an async test in virtual time."""

    @wraps(test)
    def run(*args, **keywords):
        run_virtual(partial(test, *args, **keywords))

    return run


class Distant(WrappedBackend):
    """A store some way off: a call on records takes a while before it takes place, and the answer as long.

    What a loop says of itself takes no time: it is no matter of schedules, and comes more often than anything else.
    """

    def __init__(self, inner, *, seconds=0.05, seed=0, lost=0.0, tells=True):
        super().__init__(inner)
        self.capabilities = replace(inner.capabilities, announces_records=tells)
        self.sent = []
        self.calls = []
        if not tells:
            self.notifications = Notifications()
        self._rng = Random(seed)
        self._seconds = seconds
        self._lost = lost

    async def _call(self, name, call):
        self.calls.append(name)
        await anyio.sleep(self._seconds * self._rng.random())
        answer = await call()
        await anyio.sleep(self._seconds * self._rng.random())
        if self._rng.random() < self._lost:
            raise MailboxConnectionError("the answer is lost")
        return answer

    async def write_record(self, write, envelopes=()):
        if write.kind == WORKER:
            return await self.inner.write_record(write)

        async def write_it():
            version = await self.inner.write_record(write, envelopes)
            if version is not None:
                self.sent += [envelope.headers["mainspring-scheduled-for"] for envelope in envelopes]
            return version

        return await self._call("write", write_it)

    async def find_records(self, kind, keys):
        return await self._call("find", partial(self.inner.find_records, kind, keys))

    async def list_records(self, kind, limit, after):
        return await self._call("list", partial(self.inner.list_records, kind, limit, after))
