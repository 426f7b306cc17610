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
from mainspring.mailbox.postgres.commands import LOCK_WAIT, Batch, Claim, OfDelivery, Poll, Send, Settle, Unclaim
from mainspring.mailbox.postgres.connection import BlockedError, refusal
from mainspring.mailbox.postgres.pool import POLL_INTERVAL, POLL_WITHOUT_LISTENING, Waiters
from mainspring.mailbox.postgres.values import UNREADABLE, stored_key
from mainspring.runtime.interval import Periodic

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from mainspring.mailbox.message import Envelope
    from mainspring.mailbox.postgres.pool import SharedPool
    from mainspring.runtime.scope import DaemonScope

QUICK_POLLS = (0.005, 0.05, 0.25)
"""Seconds after which a receive polls again that was the first to wait: a sender whose transaction was under way then could
not know that it must tell."""
WITHIN = 2
"""How many sends within a capacity are out at once, each with a connection: one stores, and the next has come to the server.
Their transactions take turns there anyway."""


class Batchers:
    """Batchers, each with one batch out at a time: they do not wait for each other.

    ``claims`` is for claims and all that a lease allows, in the order in which it comes; ``sends`` for messages; those with a
    dedup key have batchers of their own, see :class:`DedupSends`.
    """

    def __init__(
        self,
        shared: SharedPool,
        number: int,
        name: str,
        poll_interval: float | None,
        announce: Callable[[list[str]], None],
        silent: Callable[[MailboxConnectionError], None],
    ) -> None:
        self.shared = shared
        self.number = number
        self.watermark = shared.watermark(number)
        self.now = loop_clock()
        self.claims: Batcher[Command] = Batcher(self._execute, undo=self.undo, name=name)
        self.sends: Batcher[Command] = Batcher(self._execute, name=name)
        self.within = anyio.Semaphore(WITHIN)
        self.dedup = DedupSends(shared, self._transact, name)
        self._batchers: tuple[Batcher[Any], ...] = (*self.dedup.batchers, self.sends, self.claims)
        self.waiters = Waiters(self._poll_now, self.due_in, announce, silent)
        self._name = name
        self._poll_interval = poll_interval
        self._reconnects = shared.connections.reconnects
        self._poller = Periodic(self._poll)
        self._quick_polls: list[float] = []

    def start(self, scope: DaemonScope) -> None:
        """Begin to work; ends with the scope, or with :meth:`close`."""
        self.shared.add_waiters(self.number, self.waiters)
        scope.start_soon(self.shared.host, name=f"{self._name} notifications")
        scope.start_soon(self._poller.run, name=f"{self._name} due times")
        for batcher in self._batchers:
            scope.start_soon(batcher.run, name=f"{self._name} batches", stop=batcher.stop)

    async def close(self) -> None:
        """Finish what is queued and out, and take nothing new."""
        self.shared.connections.begin_close()
        try:
            async with anyio.create_task_group() as tasks:
                for batcher in self._batchers:
                    tasks.start_soon(batcher.close)
        finally:
            self.shared.remove_waiters(self.number, self.waiters)

    @property
    def poll_interval(self) -> float:
        """Seconds after which waiting receives ask the store again."""
        if self._poll_interval is not None:
            return self._poll_interval
        return POLL_INTERVAL if self.shared.listening else POLL_WITHOUT_LISTENING

    def statistics(self) -> MailboxStatistics:
        """See :meth:`Mailbox.statistics`."""
        pool = self.shared.connections
        within = self.within.statistics().tasks_waiting
        return MailboxStatistics(
            waiting_receives=self.waiters.parked,
            queued=within + sum(batcher.queued for batcher in self._batchers),
            in_flight=WITHIN - self.within.value + sum(batcher.in_flight for batcher in self._batchers),
            batches=sum(batcher.batches for batcher in self._batchers),
            reconnects=pool.reconnects - self._reconnects,
            connected=pool.connected,
            polling=not self.shared.listening,
        )

    def new_batch(self, patience: float | None = None) -> Batch:
        """For calls outside of the batches."""
        return Batch(self.shared.schema, self.number, self.watermark, self.now(), patience=patience)

    async def alone(self, command: OfDelivery) -> None:
        """Have a command executed in no batch, as it may have to wait for a lock; raises its error."""
        batch = self.new_batch()
        try:
            await self.shared.connections.run(batch.build([command]))
        except psycopg.Error as error:
            raise refusal(error) from error
        if command.error is not None:
            raise command.error
        self.notify(batch)

    async def _execute(self, commands: list[Command]) -> None:
        """Have commands executed together; where one has a value that the server does not take, each by itself."""
        try:
            await self._transact(commands)
        except psycopg.Error as error:
            if len(commands) == 1:
                raise refusal(error) from error
            for command in commands:
                command.error = None
                try:
                    await self._transact([command])
                except psycopg.Error as its_own:
                    command.error = refusal(its_own)

    async def _transact(self, commands: Sequence[Command], lock_wait: float = LOCK_WAIT, apart: bool = False) -> None:
        shared = self.shared
        batch = Batch(shared.schema, self.number, self.watermark, self.now(), lock_wait=lock_wait, apart=apart)
        await shared.connections.run(batch.build(commands))
        for delivery in batch.unreadable:
            self.claims.post(Settle(delivery, UNREADABLE, None))
        if batch.unreadable:
            shared.wake(self.number, 1)  # for what lies behind
        self.notify(batch)

    def notify(self, batch: Batch) -> None:
        """Let those know who wait in this process."""
        shared = self.shared
        for number, count in batch.became_pending.items():
            if count > 0:
                shared.wake(number, count)
        if batch.due_in is not None:
            shared.due_in(self.number, batch.due_in)
        if batch.newly_listening:
            self._quick_polls = list(QUICK_POLLS)
            self.due_in(self._quick_polls.pop(0))

    def undo(self, command: Command) -> None:
        """A claim whose receiver is gone goes back, before anything else is done."""
        if type(command) is Claim and command.result:
            self.claims.post(Unclaim(command.result))

    async def _poll(self, overslept: float) -> float:
        """See, for the receives that wait, what has come and what is due."""
        if not self.waiters.parked:
            return math.inf
        again = self.poll_interval
        if self._quick_polls:
            again = self._quick_polls.pop(0)
        try:
            pending, due_in = await self.claims.call(Poll())
        except MainspringError:  # the receives themselves will hear of it
            self.waiters.wake_all()
            return self.now() + again
        if pending:
            self.waiters.wake(pending)
        return self.now() + (again if due_in is None else min(again, max(due_in, 0.0)))

    def _poll_now(self) -> None:
        self._poller.wake_by(self.now())

    def due_in(self, seconds: float) -> None:
        """Something is due in so many seconds."""
        self._poller.wake_by(self.now() + seconds)


SHORT_LOCK_WAIT = 0.001
"""The same as ``LOCK_WAIT``, when it is tried again: with others whose keys are blocked."""
FIRST_PAUSE = 0.01
LONGEST_PAUSE = 0.25
"""Seconds between two tries of a send that is blocked."""


class Transact(Protocol):
    """Executes commands in one transaction, which waits no longer than those seconds for another one that has sent a key.

    ``apart``: where one does, only that send is blocked; else all fail.
    """

    async def __call__(self, commands: Sequence[Send], lock_wait: float, apart: bool = ...) -> None: ...


class DedupSends:
    """Two batchers: one for sends as they come, and one for those that were blocked, which are tried again and again.

    So nobody waits on the server, with a connection and with what travels along, for a transaction that may never end.
    """

    def __init__(self, shared: SharedPool, transact: Transact, name: str) -> None:
        self._shared = shared
        self._transact = transact
        self._now = loop_clock()
        self._blocked: Counter[str] = Counter()
        self._first: Batcher[Send] = Batcher(self._together, name=name)
        self._again: Batcher[Send] = Batcher(self._each_key, name=name)
        self.batchers = (self._first, self._again)

    async def send(self, envelopes: list[Envelope]) -> list[str]:
        """Store them all or none; the ids. Raises :class:`MailboxConnectionError` where a key was blocked all the time."""
        known = not self._blocked.keys().isdisjoint(_keys(envelopes)) if self._blocked else False
        return await self.retry_while_blocked(envelopes, self._again.call if known else self._first.call)

    async def retry_while_blocked(
        self, envelopes: list[Envelope], attempt: Callable[[Send], Awaitable[Any]]
    ) -> list[str]:
        """``attempt`` to store them, and where they are blocked again and again, for as long as a call may last."""
        deadline = self._now() + self._shared.connections.timeout
        send = Send(envelopes)
        await attempt(send)
        if not send.blocked:
            return list(send.result)
        if attempt == self._first.call:
            attempt = self._again.call
        keys = _keys(envelopes)
        self._blocked.update(keys)
        try:
            pause = FIRST_PAUSE
            while (left := deadline - self._now()) > 0:
                await anyio.sleep(min(pause, left))
                pause = min(2 * pause, LONGEST_PAUSE)
                send = Send(envelopes)
                await attempt(send)
                if not send.blocked:
                    return list(send.result)
        finally:
            self._blocked.subtract(keys)
            self._blocked += Counter()  # without those of zero
        raise blocked_error(envelopes, f"within {self._shared.connections.timeout:g} s")

    async def _together(self, sends: list[Send]) -> None:
        """The usual way: in one transaction, which nothing holds up."""
        try:
            await self._transact(sends, LOCK_WAIT)
        except BlockedError:
            await self._each_key(sends)
        except psycopg.Error as error:
            await self._apart(sends, error)

    async def _each_key(self, sends: list[Send]) -> None:
        """All that is not blocked, in one transaction; of several with one key, the first goes first."""
        single = {
            stored_key(send.envelopes[0].dedup_key or ""): send for send in reversed(sends) if len(send.envelopes) == 1
        }
        rest = [send for send in sends if len(send.envelopes) == 1 and send not in single.values()]
        await self._singly(list(single.values()))
        free = []
        for send in rest:
            send.blocked = single[stored_key(send.envelopes[0].dedup_key or "")].blocked
            if not send.blocked:
                free.append(send)
        await self._singly(free)
        for send in sends:
            if len(send.envelopes) > 1:
                await self._whole(send)

    async def _singly(self, sends: list[Send]) -> None:
        if not sends:
            return
        try:
            await self._transact(sends, SHORT_LOCK_WAIT, apart=True)
        except psycopg.Error as error:
            await self._apart(sends, error)

    async def _apart(self, sends: list[Send], error: psycopg.Error) -> None:
        """One has a value that the server does not take: each by itself."""
        if len(sends) == 1:
            sends[0].error = refusal(error)
            return
        for send in sends:
            await self._whole(send)

    async def _whole(self, send: Send) -> None:
        send.error = None
        try:
            await self._transact([send], SHORT_LOCK_WAIT)
        except BlockedError:
            send.blocked = True
        except psycopg.Error as error:
            send.error = refusal(error)


def blocked_error(envelopes: list[Envelope], when: str) -> MailboxConnectionError:
    """The error of a send that was blocked for too long."""
    keys = ", ".join(map(repr, sorted(_keys(envelopes))[:3]))
    return MailboxConnectionError(
        f"a transaction that has sent the same dedup_key ({keys}) has not ended {when}; nothing was sent"
    )


def _keys(envelopes: list[Envelope]) -> set[str]:
    return {stored_key(envelope.dedup_key) for envelope in envelopes if envelope.dedup_key is not None}
