"""The batches of one mailbox object on their way to the server and back, and the looking for its receives that wait."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import anyio
import psycopg

from mainspring.core.clock import loop_clock
from mainspring.errors import MainspringError
from mainspring.mailbox.backend import MailboxStatistics
from mainspring.mailbox.batcher import Batcher, Command
from mainspring.mailbox.postgres import commands as do
from mainspring.mailbox.postgres.calls import HASTE, Calls
from mainspring.mailbox.postgres.connection import faulty
from mainspring.mailbox.postgres.dedup import KeyedSends
from mainspring.mailbox.postgres.pool import POLL_INTERVAL, POLL_WITHOUT_LISTENING, Waiters
from mainspring.mailbox.postgres.values import UNREADABLE, lease_of
from mainspring.runtime.interval import Periodic

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mainspring.errors import MailboxConnectionError
    from mainspring.mailbox.postgres.pool import Hub
    from mainspring.runtime.scope import DaemonScope

QUICK_LOOKS = (0.005, 0.05, 0.25)
"""Seconds after which a receive looks again that was the first to wait: a sender whose transaction was under way then could
not know that it must tell."""
WITHIN = 2
"""How many sends within a capacity are out at once, each with a connection: one stores, and the next has come to the server.
Their transactions take turns there anyway."""


class Lanes:
    """Batchers, each with one batch out at a time: they do not wait for each other.

    ``work`` is for claims and all that a lease allows, in the order in which it comes; ``sends`` for messages; those with a
    dedup key have lanes of their own, see :class:`KeyedSends`.
    """

    def __init__(
        self,
        hub: Hub,
        number: int,
        name: str,
        poll_interval: float | None,
        announce: Callable[[list[str]], None],
        silent: Callable[[MailboxConnectionError], None],
    ) -> None:
        self.hub = hub
        self.number = number
        self.view = hub.view(number)
        self.now = loop_clock()
        self.work: Batcher[Command] = Batcher(self._execute, undo=self.undo, name=name)
        self.sends: Batcher[Command] = Batcher(self._execute, name=name)
        self.within = anyio.Semaphore(WITHIN)
        self.keyed = KeyedSends(hub, self._transact, name)
        self._batchers: tuple[Batcher[Any], ...] = (*self.keyed.batchers, self.sends, self.work)
        self.waiters = Waiters(self._look_now, self.due_in, announce, silent)
        self._name = name
        self._poll_interval = poll_interval
        self._reconnects = hub.pool.reconnects
        self._looker = Periodic(self._look)
        self._quick_looks: list[float] = []

    def start(self, scope: DaemonScope) -> None:
        """Begin to work; ends with the scope, or with :meth:`close`."""
        self.hub.add_waiters(self.number, self.waiters)
        scope.start_soon(self.hub.host, name=f"{self._name} notifications")
        scope.start_soon(self._looker.run, name=f"{self._name} due times")
        for batcher in self._batchers:
            scope.start_soon(batcher.run, name=f"{self._name} batches", stop=batcher.stop)

    async def close(self) -> None:
        """Finish what is queued and out, and take nothing new."""
        self.hub.pool.hasten()
        try:
            async with anyio.create_task_group() as tasks:
                for batcher in self._batchers:
                    tasks.start_soon(batcher.close)
        finally:
            self.hub.remove_waiters(self.number, self.waiters)

    @property
    def poll_interval(self) -> float:
        """Seconds after which waiting receives ask the store again."""
        if self._poll_interval is not None:
            return self._poll_interval
        return POLL_INTERVAL if self.hub.listening else POLL_WITHOUT_LISTENING

    def statistics(self) -> MailboxStatistics:
        """See :meth:`Mailbox.statistics`."""
        pool = self.hub.pool
        within = self.within.statistics().tasks_waiting
        return MailboxStatistics(
            waiting_receives=self.waiters.parked,
            queued=within + sum(batcher.queued for batcher in self._batchers),
            in_flight=WITHIN - self.within.value + sum(batcher.in_flight for batcher in self._batchers),
            batches=sum(batcher.batches for batcher in self._batchers),
            reconnects=pool.reconnects - self._reconnects,
            connected=pool.connected,
            polling=not self.hub.listening,
        )

    def calls(self, patience: float | None = None) -> Calls:
        """For calls outside of the batches."""
        return Calls(self.hub.schema, self.number, self.view, self.now(), patience=patience)

    async def alone(self, command: do.OfDelivery) -> None:
        """Have a command executed in no batch, as it may have to wait for a lock; raises its error."""
        batch = self.calls()
        try:
            await self.hub.pool.run(batch.build([command]))
        except psycopg.Error as error:
            raise faulty(error) from error
        if command.error is not None:
            raise command.error
        self.tell(batch)

    async def _execute(self, commands: list[Command]) -> None:
        """Have commands executed together; where one has a value that the server does not take, each by itself."""
        try:
            await self._transact(commands)
        except psycopg.Error as error:
            if len(commands) == 1:
                raise faulty(error) from error
            for command in commands:
                command.error = None
                try:
                    await self._transact([command])
                except psycopg.Error as its_own:
                    command.error = faulty(its_own)

    async def _transact(self, commands: Sequence[Command], haste: float = HASTE, apart: bool = False) -> None:
        hub = self.hub
        batch = Calls(hub.schema, self.number, self.view, self.now(), haste=haste, apart=apart)
        await hub.pool.run(batch.build(commands))
        for delivery in batch.unreadable:
            self.work.post(do.Finish(delivery, lease_of(delivery) or 0, UNREADABLE, None))
        if batch.unreadable:
            hub.wake(self.number, 1)  # for what lies behind
        self.tell(batch)

    def tell(self, batch: Calls) -> None:
        """Let those know who wait in this process."""
        hub = self.hub
        for number, count in batch.gained.items():
            if count > 0:
                hub.wake(number, count)
        if batch.due_in is not None:
            hub.due_in(self.number, batch.due_in)
        if batch.fresh:
            self._quick_looks = list(QUICK_LOOKS)
            self.due_in(self._quick_looks.pop(0))

    def undo(self, command: Command) -> None:
        """A claim whose receiver is gone goes back, before anything else is done."""
        if type(command) is do.Claim and command.result:
            self.work.post(do.Unclaim(command.result))

    async def _look(self, overslept: float) -> float:
        """See, for the receives that wait, what has come and what is due."""
        if not self.waiters.parked:
            return math.inf
        again = self.poll_interval
        if self._quick_looks:
            again = self._quick_looks.pop(0)
        try:
            pending, due_in = await self.work.call(do.Look())
        except MainspringError:  # the receives themselves will hear of it
            self.waiters.wake_all()
            return self.now() + again
        if pending:
            self.waiters.wake(pending)
        return self.now() + (again if due_in is None else min(again, max(due_in, 0.0)))

    def _look_now(self) -> None:
        self._looker.wake_by(self.now())

    def due_in(self, seconds: float) -> None:
        """Something is due in so many seconds."""
        self._looker.wake_by(self.now() + seconds)
