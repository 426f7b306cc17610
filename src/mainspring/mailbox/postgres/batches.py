"""The batches of one mailbox object on their way to the server and back, and the looking for its receives that wait."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any, Protocol

import anyio
import psycopg

from mainspring.core.clock import loop_clock
from mainspring.errors import MailboxConnectionError, MainspringError
from mainspring.mailbox.backend import MailboxStatistics
from mainspring.mailbox.batcher import Batcher, Command
from mainspring.mailbox.postgres import commands as do
from mainspring.mailbox.postgres.commands import HASTE, Calls
from mainspring.mailbox.postgres.connection import HeldUpError, faulty
from mainspring.mailbox.postgres.pool import POLL_INTERVAL, POLL_WITHOUT_LISTENING, Waiters
from mainspring.mailbox.postgres.values import UNREADABLE, lease_of, stored_key
from mainspring.runtime.interval import Periodic

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from mainspring.mailbox.message import Envelope
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


MORE_HASTE = 0.001
"""The same as ``HASTE``, when it is tried again: with others whose keys are held up."""
FIRST_PAUSE = 0.01
LONGEST_PAUSE = 0.25
"""Seconds between two tries of a send that is held up."""


class Transact(Protocol):
    """Executes commands in one transaction, which waits no longer than those seconds for another one that has sent a key.

    ``apart``: where one does, only that send is held up; else all fail.
    """

    async def __call__(self, commands: Sequence[do.Put], haste: float, apart: bool = ...) -> None: ...


class KeyedSends:
    """Two lanes: one for sends as they come, and one for those that were held up, which are tried again and again.

    So nobody waits on the server, with a connection and with what travels along, for a transaction that may never end.
    """

    def __init__(self, hub: Hub, transact: Transact, name: str) -> None:
        self._hub = hub
        self._transact = transact
        self._now = loop_clock()
        self._held_up: Counter[str] = Counter()
        self._first: Batcher[do.Put] = Batcher(self._together, name=name)
        self._again: Batcher[do.Put] = Batcher(self._each_key, name=name)
        self.batchers = (self._first, self._again)

    async def send(self, envelopes: list[Envelope]) -> list[str]:
        """Store them all or none; the ids. Raises :class:`MailboxConnectionError` where a key was held up all the time."""
        known = not self._held_up.keys().isdisjoint(_keys(envelopes)) if self._held_up else False
        return await self.patiently(envelopes, self._again.call if known else self._first.call)

    async def patiently(self, envelopes: list[Envelope], attempt: Callable[[do.Put], Awaitable[Any]]) -> list[str]:
        """``attempt`` to store them, and where they are held up again and again, for as long as a call may last."""
        deadline = self._now() + self._hub.pool.timeout
        put = do.Put(envelopes)
        await attempt(put)
        if not put.held_up:
            return list(put.result)
        if attempt == self._first.call:
            attempt = self._again.call
        keys = _keys(envelopes)
        self._held_up.update(keys)
        try:
            pause = FIRST_PAUSE
            while (left := deadline - self._now()) > 0:
                await anyio.sleep(min(pause, left))
                pause = min(2 * pause, LONGEST_PAUSE)
                put = do.Put(envelopes)
                await attempt(put)
                if not put.held_up:
                    return list(put.result)
        finally:
            self._held_up.subtract(keys)
            self._held_up += Counter()  # without those of zero
        raise not_ended(envelopes, f"within {self._hub.pool.timeout:g} s")

    async def _together(self, puts: list[do.Put]) -> None:
        """The usual way: in one transaction, which nothing holds up."""
        try:
            await self._transact(puts, HASTE)
        except HeldUpError:
            await self._each_key(puts)
        except psycopg.Error as error:
            await self._apart(puts, error)

    async def _each_key(self, puts: list[do.Put]) -> None:
        """All that is not held up, in one transaction; of several with one key, the first goes first."""
        single = {
            stored_key(put.envelopes[0].dedup_key or ""): put for put in reversed(puts) if len(put.envelopes) == 1
        }
        rest = [put for put in puts if len(put.envelopes) == 1 and put not in single.values()]
        await self._singly(list(single.values()))
        free = []
        for put in rest:
            put.held_up = single[stored_key(put.envelopes[0].dedup_key or "")].held_up
            if not put.held_up:
                free.append(put)
        await self._singly(free)
        for put in puts:
            if len(put.envelopes) > 1:
                await self._whole(put)

    async def _singly(self, puts: list[do.Put]) -> None:
        if not puts:
            return
        try:
            await self._transact(puts, MORE_HASTE, apart=True)
        except psycopg.Error as error:
            await self._apart(puts, error)

    async def _apart(self, puts: list[do.Put], error: psycopg.Error) -> None:
        """One has a value that the server does not take: each by itself."""
        if len(puts) == 1:
            puts[0].error = faulty(error)
            return
        for put in puts:
            await self._whole(put)

    async def _whole(self, put: do.Put) -> None:
        put.error = None
        try:
            await self._transact([put], MORE_HASTE)
        except HeldUpError:
            put.held_up = True
        except psycopg.Error as error:
            put.error = faulty(error)


def not_ended(envelopes: list[Envelope], when: str) -> MailboxConnectionError:
    """The error of a send that was held up for too long."""
    keys = ", ".join(map(repr, sorted(_keys(envelopes))[:3]))
    return MailboxConnectionError(
        f"a transaction that has sent the same dedup_key ({keys}) has not ended {when}; nothing was sent"
    )


def _keys(envelopes: list[Envelope]) -> set[str]:
    return {stored_key(envelope.dedup_key) for envelope in envelopes if envelope.dedup_key is not None}
