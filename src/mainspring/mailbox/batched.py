"""The middle layer of backends that batch: operations as commands, the batcher that joins them, and claims that wait.

Commands. A call of the mailbox becomes a :class:`Command`, and waits until a batch has taken it to the store and back. A
command is data: the store's own code says how it is done there, for all commands of one kind at once.

The batcher. One runner takes everything that is queued and has it executed; what arrives while a batch is out gathers and
leaves with the next one. Nothing ever waits for a batch to fill, so a lone command leaves at once. All the waiting of a batch
hangs on one event: one wake-up for all its callers. Where commands come one by one, handing each to the runner and waiting
for it would cost two turns of the event loop. There the caller executes its own command, if the store can go on with what was
interrupted. The runner takes over if that caller is cancelled. :class:`_State` has the states of what is out.

A claim leaves at once if nothing is out, and takes along what is queued: the acknowledgements of what was handled before.
So the store is at work while the handlers are at the messages of the claim before. If it waited for a turn of the event
loop, these handlers would run first, and worker and store would take turns.

Claims. A claim that finds nothing waits in a line (:class:`Waiters`). It claims again when it is woken, or is given a message
that the store has claimed for it. If its caller is cancelled while it is out, or the mailbox is closed meanwhile, no caller
will see the messages that it leases. They are put back, as the first thing of the next batch.

Timers. One task rings the alarms of all mailboxes on an event loop (:class:`MailboxTimers`). Each line has an alarm that ends
its waits, and a store adds its own for what is due. They ring until the close, whatever is cancelled before.

Cancelled, a caller leaves at once. Its command is withdrawn if it has not left yet. Otherwise it takes effect, and is undone
if the backend says how. On a lost connection, each command that has not taken place gets an error of its own.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import anyio

from mainspring.core import process
from mainspring.core.clock import loop_clock
from mainspring.core.lazy_event import LazyEvent
from mainspring.errors import MailboxClosedError, MailboxConnectionError, copied
from mainspring.mailbox.backend import Backend
from mainspring.mailbox.limits import CLOSE_TIMEOUT, COURTESY
from mainspring.runtime.cancellation import is_spurious_cancellation, native_cancels
from mainspring.runtime.interval import Alarms
from mainspring.runtime.shared_task import SharedTask

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from mainspring.mailbox import message
    from mainspring.mailbox.message import Cancelled, ClaimedMessage, Counts, Dead, Envelope
    from mainspring.runtime.scope import DaemonScope

# ------------------------------------------------------------------------------------------------------------ commands


@dataclass(eq=False, repr=False, slots=True)
class Command:
    """One operation on its way: the backend that executes it sets ``result`` or ``error``.

    ``done``: it has taken place, though the batch is not over yet. An error of the rest of the batch is not its own.

    ``wakes_first``: its caller is woken before the others of its batch, where the event loop keeps order. A claim needs this:
    slots whose acknowledgements were in the batch then find its messages in the backlog. It also leaves first, with all that is
    queued.

    ``droppable``: nothing is lost if a close drops it.

    ``joins``: another command is likely to follow soon, as a claim follows an acknowledgement. So its caller does not execute
    it, it leaves a turn of the event loop later, and both travel together.

    ``mailbox``: its number on a store that numbers its mailboxes; the backend sets it. ``forsaken``: its caller was cancelled.
    """

    wakes_first: ClassVar[bool] = False
    droppable: ClassVar[bool] = False
    joins: ClassVar[bool] = False
    result: Any = field(default=None, init=False)
    error: Exception | None = field(default=None, init=False)
    done: bool = field(default=False, init=False)
    forsaken: bool = field(default=False, init=False)
    mailbox: int = field(default=0, init=False)


@dataclass(eq=False, repr=False, slots=True)
class Open(Command):
    """Make the mailbox ``name`` known; results in its number."""

    name: str


@dataclass(eq=False, repr=False, slots=True)
class Send(Command):
    """Store all or none, while no more than ``capacity`` messages wait; results in the ids."""

    envelopes: list[Envelope]
    capacity: int | None = None


@dataclass(eq=False, repr=False, slots=True)
class Claim(Command):
    """Lease ready messages; results in deliveries. ``waits`` says that the caller waits after an empty result.

    ``more``: nothing was found yet, as limits hold back many of the first messages. Another claim goes on behind them.
    """

    wakes_first: ClassVar[bool] = True
    limit: int
    visibility: float
    waits: bool
    more: bool = field(default=False, init=False)


@dataclass(eq=False, repr=False, slots=True)
class Unclaim(Command):
    """Put back what was claimed, as if it had not been."""

    deliveries: list[ClaimedMessage]


@dataclass(eq=False, repr=False, slots=True)
class OfDelivery(Command):
    """An operation that only the holder of the lease may do."""

    delivery: ClaimedMessage


@dataclass(eq=False, repr=False, slots=True)
class Acknowledge(OfDelivery):
    """The message is done."""

    joins: ClassVar[bool] = True


@dataclass(eq=False, repr=False, slots=True)
class AcknowledgeMany(Command):
    """The messages are done; results in the errors of the messages whose leases are not held, by index."""

    deliveries: list[ClaimedMessage]


@dataclass(eq=False, repr=False, slots=True)
class Reply(OfDelivery):
    """The message is done. Its reply goes to another mailbox of the store, and its result is kept if there is one."""

    ack: message.Ack


@dataclass(eq=False, repr=False, slots=True)
class NackCommand(OfDelivery):
    """The message returns to the queue."""

    how: message.Nack


@dataclass(eq=False, repr=False, slots=True)
class DeadLetterCommand(OfDelivery):
    """The message goes to the dead letters."""

    dead: Dead


@dataclass(eq=False, repr=False, slots=True)
class Extend(OfDelivery):
    """The lease lasts at least ``timeout`` seconds from now."""

    timeout: float


@dataclass(eq=False, repr=False, slots=True)
class Checkpoint(OfDelivery):
    """Keep ``state`` with the message."""

    state: bytes


@dataclass(eq=False, repr=False, slots=True)
class Cancel(Command):
    """End a message by its id; results in :class:`Cancelled`."""

    message_id: str


@dataclass(eq=False, repr=False, slots=True)
class Sweep(Command):
    """Do what is due, for the claims that wait."""

    droppable: ClassVar[bool] = True


@dataclass(eq=False, repr=False, slots=True)
class Count(Command):
    """Results in the :class:`Counts` of the mailbox; in the order of the claims, so that one put back is not seen."""


@dataclass(eq=False, repr=False, slots=True)
class Purge(Command):
    """Drop all that is delayed, pending and in flight; results in how many that were."""


@dataclass(eq=False, repr=False, slots=True)
class ListDead(Command):
    """Results in a page of the dead letters, of all or of a task."""

    limit: int
    after: str | None
    task: str | None = None


@dataclass(eq=False, repr=False, slots=True)
class FindDead(Command):
    """Results in the dead letters among these ids."""

    ids: list[str]


@dataclass(eq=False, repr=False, slots=True)
class ReplayDead(Command):
    """Put dead letters (None: all) back into the queue, all or none as in :class:`Send`; results in how many that were."""

    ids: list[str] | None
    capacity: int | None


@dataclass(eq=False, repr=False, slots=True)
class PurgeDead(Command):
    """Forget dead letters (None: all) for good; results in how many that were."""

    ids: list[str] | None


@dataclass(eq=False, repr=False, slots=True)
class Drop(Command):
    """Forget the mailbox and everything in it."""


# ------------------------------------------------------------------------------------------------------------- batcher

C = TypeVar("C", bound=Command)


@dataclass(eq=False, repr=False, slots=True)
class _Batch(Generic[C]):
    """Commands that travel together. ``done`` is set once each has its result or error; ``first`` just before it.

    Each event is made by the first caller that waits for it.
    """

    commands: list[C] = field(default_factory=list)
    done: anyio.Event | None = None
    first: anyio.Event | None = None
    forsaken: bool = False
    """True if a caller of it was cancelled."""


class _State(Enum):
    """The state of what a batcher has out."""

    IDLE = "nothing is out"
    BY_CALLER = "a caller executes its own command"
    BY_RUNNER = "the runner executes a batch"
    INTERRUPTED = "its execution was cancelled, and the runner has yet to go on with it"


class Batcher(Generic[C]):
    """Joins concurrent commands for one backend. :meth:`run`, the runner, belongs in the scope of the mailbox.

    :param execute: performs the commands and sets the result or error of each. An exception becomes the error of every command
        that has none and is not ``done``. It should raise only what leaves all of those without effect.
    :param resume: goes on with an ``execute`` that was cancelled, from where it was. Without it, the runner executes all.
    :param undo: called with a command that took place though its caller was cancelled while it was out; it may
        :meth:`post` the command that takes the effect back.
    :param start: starts the runner, once the first command comes: many mailboxes never have one. None: it runs from the start.
    :param name: whose commands these are, for messages.

    A caller that is cancelled before its command left has caused nothing: the command is withdrawn. Afterwards the
    command may take effect, and ``undo`` is told if it did.
    """

    def __init__(
        self,
        execute: Callable[[list[C]], Awaitable[None]],
        *,
        resume: Callable[[], Awaitable[None]] | None = None,
        undo: Callable[[C], None] | None = None,
        start: Callable[[], object] | None = None,
        name: str = "mailbox",
    ) -> None:
        self._execute = execute
        self._resume = resume
        self._undo = undo
        self._start = start
        self._name = name
        # As in anyio.lowlevel, which would look the backend up each time.
        self._checkpoint_if_cancelled = anyio.lowlevel.current_token().backend_class.checkpoint_if_cancelled
        self._next: _Batch[C] = _Batch()
        self._state = _State.IDLE
        self._out: _Batch[C] | None = None
        self._size = 0  # of the last batch
        self._wake = anyio.Event()
        self._ended = LazyEvent()
        self._shield = anyio.CancelScope(shield=True)
        self._callers = 0
        self._closing = False
        self.batches = 0  # each counts once, also where the runner goes on with it

    def __repr__(self) -> str:
        return f"<Batcher {self._name!r} queued={self.queued} in_flight={self.in_flight} callers={self._callers}>"

    @property
    def queued(self) -> int:
        """How many commands wait for a batch."""
        return len(self._next.commands)

    @property
    def in_flight(self) -> int:
        """How many commands the batch has that is on its way."""
        return 0 if self._out is None else len(self._out.commands)

    async def call(self, command: C) -> Any:
        """Have ``command`` executed with the next batch; its result, or raises its error.

        Raises :class:`MailboxClosedError` when the batcher is closing.
        """
        if self._closing:
            raise MailboxClosedError(f"{self._name} is closed")
        if self._start is not None:
            start, self._start = self._start, None
            start()
        batch = self._next
        lone = self._size <= 1 and not batch.commands and not command.joins
        if (lone or command.wakes_first) and self._state is _State.IDLE and self._resume is not None:
            await self._execute_own(command)
        else:
            batch.commands.append(command)
            if batch.done is None:
                batch.done = anyio.Event()
            over = batch.done
            if command.wakes_first:
                batch.first = over = batch.first or anyio.Event()
            self._wake.set()
            self._callers += 1
            try:
                await over.wait()
            except BaseException:
                if batch is self._next:
                    batch.commands.remove(command)
                elif not batch.done.is_set():
                    command.forsaken = batch.forsaken = True
                elif self._undo is not None and command.error is None and not command.forsaken:
                    self._undo(command)
                raise
            finally:
                self._callers -= 1
                if self._closing:
                    self._wake.set()
        if command.error is not None:
            raise command.error
        return command.result

    async def _execute_own(self, command: C) -> None:
        """Execute a command, and all that is queued, for its caller. If that is cancelled, the runner goes on with it."""
        await self._checkpoint_if_cancelled()
        batch, self._next = self._next, _Batch()
        batch.commands.append(command)
        self._state, self._out, self._size = _State.BY_CALLER, batch, len(batch.commands)
        self._callers += 1
        self.batches += 1
        error: Exception | None = None
        try:
            await self._execute(batch.commands)
        except Exception as failed:
            error = failed
        except BaseException:
            command.forsaken = batch.forsaken = True
            if self._ended.is_set():  # no runner goes on with what it has taken along
                self._finish(batch, MailboxClosedError(f"{self._name} was closed while the operation was out"))
            else:
                self._state = _State.INTERRUPTED
                self._wake.set()
            raise
        finally:
            self._callers -= 1
        if self._closing or self._next.commands:
            self._wake.set()
        self._finish(batch, error)

    def post(self, command: C) -> None:
        """Queue a command without a caller, before all that is queued; allowed until the runner has ended."""
        self._next.commands.insert(0, command)
        self._wake.set()

    async def run(self) -> None:
        """Execute batch after batch until :meth:`stop` or :meth:`close`.

        The runner outlives a cancellation of the scope it is in: clean-up under a shield still needs it. Its end
        is a close, which every mailbox reaches on its way out, and which has a deadline. A bare
        ``task.cancel()`` of asyncio, on its task or on what ``execute`` awaits, does not end it either; the commands that were
        out then fail as with a lost connection.
        """
        cancels_of_task = native_cancels()
        try:
            with self._shield:
                while not self._closing or self._callers or self._next.commands or self._out is not None:
                    await self._step(cancels_of_task)
        finally:
            self._closing = True
            if self._out is not None and self._state is not _State.BY_CALLER:
                self._finish(self._out, MailboxClosedError(f"{self._name} was closed while the operation was out"))
            self._finish(self._next, MailboxClosedError(f"{self._name} was closed before the operation began"))
            self._ended.set()

    async def close(self) -> None:
        """Take nothing new, finish what is queued and out, end the runner; where this is cancelled, end it at once."""
        self.stop()
        try:
            await self._ended.wait()
        finally:
            self._shield.cancel()

    def stop(self) -> None:
        """Begin to close: what is queued and out still has :data:`CLOSE_TIMEOUT` seconds to finish.

        Where none of it is owed to a caller it has :data:`COURTESY` seconds: a server that does not answer keeps no idle
        process from ending.
        """
        if not self._closing:
            self._closing = True
            if self._start is not None:  # there is no runner
                self._ended.set()
            left = [*self._next.commands, *(() if self._out is None else self._out.commands)]
            owed = any(not (command.forsaken or command.droppable) for command in left)
            self._shield.deadline = anyio.current_time() + (CLOSE_TIMEOUT if owed else COURTESY)
        self._wake.set()

    async def _step(self, cancels_of_task: Callable[[], int]) -> None:
        """Execute what is due, or wait to be woken. A cancellation of asyncio's own ends the step, and not the runner."""
        error: Exception | None = None
        try:
            if self._state is _State.INTERRUPTED and self._resume is not None:
                self._state = _State.BY_RUNNER
                await self._resume()
            elif self._state is _State.IDLE and self._next.commands:
                # Callers that the same turn of the event loop set going come along, unless there is a claim. A lone command
                # leaves after one turn, unless it joins: the claim that follows an acknowledgement has no caller yet.
                before = int(self._callers == 1 and not self._next.commands[0].joins)
                while len(self._next.commands) > before and self._next.first is None:
                    before = len(self._next.commands)
                    await anyio.lowlevel.checkpoint()
                if self._state is not _State.IDLE or not self._next.commands:
                    return  # a claim has taken them along, or their callers are gone
                batch, self._next = self._next, _Batch()
                self._state, self._out, self._size = _State.BY_RUNNER, batch, len(batch.commands)
                self.batches += 1
                await self._execute(batch.commands)
            else:
                self._wake = anyio.Event()
                await self._wake.wait()
        except anyio.get_cancelled_exc_class():
            this_task = cancels_of_task() > 0  # else it is something that `execute` waits for
            if not await is_spurious_cancellation():
                raise
            if self._state is _State.BY_RUNNER and this_task and self._resume is not None:
                self._state = _State.INTERRUPTED
            error = MailboxConnectionError(f"{self._name}: a spurious cancellation ended the call")
        except Exception as failed:
            error = failed
        if self._state is _State.BY_RUNNER and self._out is not None:
            self._finish(self._out, error)

    def _finish(self, batch: _Batch[C], error: Exception | None) -> None:
        """Take back what was done for callers that are gone, and let the others go on. ``error`` is for what is not done."""
        self._state, self._out = _State.IDLE, None
        if error is not None:
            _fail_pending(batch.commands, error)
        if batch.forsaken and self._undo is not None:
            for command in batch.commands:
                if command.forsaken and command.error is None:
                    self._undo(command)
        if batch.first is not None:
            batch.first.set()
        if batch.done is not None:
            batch.done.set()


def _fail_pending(commands: Iterable[Command], error: Exception) -> None:
    """Set a copy of ``error`` on each command that has neither failed nor taken place."""
    for command in commands:
        if command.error is None and not command.done:
            command.error = copied(error)


# ------------------------------------------------------------------------------------------------- claims that wait


@dataclass(eq=False, repr=False, slots=True)
class ParkedClaim:
    """A claim in the line, which wants a lease of ``visibility`` seconds. ``event`` ends its wait, and another field says how.

    It is ``woken`` to claim, or has a ``delivery`` that was claimed for it, or an ``error`` to raise; else it is late.
    """

    visibility: float
    deadline: float
    event: anyio.Event = field(default_factory=anyio.Event)
    woken: bool = False
    delivery: ClaimedMessage | None = None
    error: Exception | None = None


class Waiters:
    """The claims of one mailbox object that wait, in a line. ``closed`` ends all waiting.

    A claim that finds nothing parks in it, and what brings messages wakes a claim for each. ``alarm`` ends the waits at their
    deadlines: one for all claims, as a scope for each would cost more than its message.

    ``signals`` is raised whenever there may be more to claim, also by threads. A claim notes it before it looks, and hands it
    to :meth:`wait`. A waker raises ``signals`` first, then looks at ``parked``. A claim parks first, then looks at
    ``signals``. So one of the two sees the other, and no message is missed between.
    """

    __slots__ = ("_line", "alarm", "closed", "signals")

    def __init__(self, alarms: Alarms) -> None:
        self.signals = 0
        self.closed = False
        self.alarm = alarms.alarm(self._end_waits)
        self._line: deque[ParkedClaim] = deque()

    @property
    def parked(self) -> int:
        """How many wait to be woken; may be read from any thread."""
        return len(self._line)

    async def claim_or_wait(
        self, look: Callable[[], Awaitable[list[ClaimedMessage]]], visibility: float, deadline: float
    ) -> list[ClaimedMessage]:
        """Return what ``look`` finds, now or when woken until ``deadline``; nothing once the line is closed.

        A claim that was woken and cannot look, as it is cancelled, passes its turn on.
        """
        seen = self.signals
        found = await look()
        while not found and not self.closed:
            waited = await self.wait(seen, visibility, deadline)
            if waited.delivery is not None:
                if not self.closed:
                    return [waited.delivery]
                self.refuse(waited.delivery)
            if self.closed or (self.signals == seen and not waited.woken):
                break
            seen = self.signals
            try:
                found = await look()
            except BaseException:
                self.pass_turn_on()
                raise
        return found

    async def wait(self, seen: int, visibility: float, deadline: float) -> ParkedClaim:
        """Wait to be woken, at most until ``deadline`` (anyio's clock); not at all where ``signals`` is not ``seen`` any more.

        Cancelled once it was woken, it passes its turn on; cancelled with a delivery, it refuses it. Raises the error of
        :meth:`fail_all`.
        """
        waiting = ParkedClaim(visibility, deadline)
        self._line.append(waiting)
        if deadline < self.alarm.due:
            self.alarm.wake_by(deadline)
        try:
            if self.signals == seen:
                await waiting.event.wait()
        except BaseException:
            if waiting.delivery is not None:
                self.refuse(waiting.delivery)
            elif waiting.woken:
                self.pass_turn_on()
            raise
        finally:
            if not waiting.event.is_set():
                self._line.remove(waiting)
        if waiting.error is not None:
            raise waiting.error
        return waiting

    def _end_waits(self, overslept: float) -> float:
        now = anyio.current_time()
        for waiting in [waiting for waiting in self._line if waiting.deadline <= now]:
            self._line.remove(waiting)
            waiting.event.set()
        return min((waiting.deadline for waiting in self._line), default=math.inf)

    def give(self, delivery: ClaimedMessage, visibility: float) -> bool:
        """Give it to the claim that has waited longest for a lease of that many seconds; return whether there is one."""
        for waiting in self._line:
            if waiting.visibility == visibility:
                self._line.remove(waiting)
                waiting.delivery = delivery
                waiting.event.set()
                return True
        return False

    def refuse(self, delivery: ClaimedMessage) -> None:
        """Undo the claim of a message that was given to a claim which is gone. A line that is given messages overrides it."""
        raise NotImplementedError

    def pass_turn_on(self) -> None:
        """Wake the next claim, as the one whose turn it was cannot look."""
        self.wake(1)

    def signal(self, count: int) -> None:
        """Note that ``count`` messages may be claimed, and wake as many claims. Call it on the event loop only."""
        self.signals += 1
        self.wake(count)

    def signal_all(self) -> None:
        """Let all receives look again, also receives that are about to wait."""
        self.signals += 1
        self.wake_all()

    def wake(self, count: int) -> None:
        """Let the ``count`` claims that have waited longest look again."""
        for _ in range(min(count, len(self._line))):
            waiting = self._line.popleft()
            waiting.woken = True
            waiting.event.set()

    def wake_all(self) -> None:
        """Let all look again."""
        self.wake(len(self._line))

    def close(self) -> None:
        """Let all that wait end, and let no claim wait from now on."""
        self.closed = True
        self.wake_all()

    def fail_all(self, error: Exception) -> None:
        """Raise ``error`` in all that are parked. Claims that were woken or have a message are not: they go on."""
        while self._line:
            waiting = self._line.popleft()
            waiting.error = copied(error)
            waiting.event.set()


# ------------------------------------------------------------------------------------------------------------ backends


class CommandBackend(Backend):
    """A backend whose operations are commands for a batcher, which its ``open`` makes.

    Each goes through :meth:`call`. A store that must check or prepare commands overrides it.
    """

    _batcher: Batcher[Any]

    def __init__(self, name: str, capacity: int | None) -> None:
        super().__init__(name)
        self._capacity = capacity

    @property
    def capacity(self) -> int | None:
        return self._capacity

    async def call(self, command: Command) -> Any:
        """Have a command done with the next batch. Return its result, or raise its error."""
        return await self._batcher.call(command)

    async def extend(self, delivery: ClaimedMessage, timeout: float) -> None:
        await self.call(Extend(delivery, timeout))

    async def checkpoint(self, delivery: ClaimedMessage, state: bytes) -> None:
        await self.call(Checkpoint(delivery, state))

    async def cancel(self, message_id: str) -> Cancelled:
        cancelled: Cancelled = await self.call(Cancel(message_id))
        return cancelled

    async def counts(self) -> Counts:
        counts: Counts = await self.call(Count())
        return counts

    async def purge(self) -> int:
        return int(await self.call(Purge()))

    async def dead_letters(self, limit: int, after: str | None) -> list[tuple[ClaimedMessage, Dead, float]]:
        page: list[tuple[ClaimedMessage, Dead, float]] = await self.call(ListDead(limit, after))
        return page

    async def dead_letters_of(
        self, task: str, limit: int, after: str | None
    ) -> list[tuple[ClaimedMessage, Dead, float]]:
        page: list[tuple[ClaimedMessage, Dead, float]] = await self.call(ListDead(limit, after, task))
        return page

    async def find_dead_letters(self, message_ids: list[str]) -> list[tuple[ClaimedMessage, Dead, float]]:
        found: list[tuple[ClaimedMessage, Dead, float]] = await self.call(FindDead(message_ids))
        return found

    async def replay_dead_letters(self, message_ids: list[str] | None) -> int:
        return int(await self.call(ReplayDead(message_ids, self._capacity)))

    async def purge_dead_letters(self, message_ids: list[str] | None) -> int:
        return int(await self.call(PurgeDead(message_ids)))

    async def drop(self) -> None:
        await self.call(Drop())


class MailboxTimers:
    """The alarms of all mailboxes of a process on one event loop, and the one task that rings them."""

    def __init__(self) -> None:
        self.alarms = Alarms()
        self.task = SharedTask("timers of mailboxes", self.alarms.run)

    @classmethod
    def of_event_loop(cls) -> MailboxTimers:
        """Return the timers of the running event loop."""
        return process.shared("mailbox timers", process.event_loop(), cls)


class BatchedBackend(CommandBackend):
    """A command backend whose claims wait in a line and are woken by the process itself.

    Its ``open`` calls :meth:`begin_timers` and :meth:`open_line`; its ``close`` calls :meth:`end_timers` at the end. It
    overrides :meth:`claim_once` or :meth:`new_claim` if a claim is more on its store.
    """

    def __init__(self, name: str, capacity: int | None) -> None:
        super().__init__(name, capacity)
        self.waiters = Waiters(Alarms())
        self.waiters.close()  # until it is opened
        self._timers: MailboxTimers | None = None
        self._timers_scope: DaemonScope | None = None

    # --------------------------------------------------------------------------------------------------------- timers

    def begin_timers(self, scope: DaemonScope) -> Alarms:
        """Return the alarms of this event loop. They ring until :meth:`end_timers` at least, whatever is cancelled."""
        self._timers, self._timers_scope = MailboxTimers.of_event_loop(), scope
        self._timers.task.join(scope)
        return self._timers.alarms

    def end_timers(self) -> None:
        """Undo :meth:`begin_timers` (idempotent)."""
        self.waiters.alarm.end()
        if self._timers is not None and self._timers_scope is not None:
            self._timers.task.leave(self._timers_scope)
            self._timers = self._timers_scope = None

    def open_line(self, waiters: Waiters) -> None:
        """Let claims wait in ``waiters`` from now on."""
        self.waiters = waiters
        self._now = loop_clock()

    # --------------------------------------------------------------------------------------------------------- claims

    async def claim(
        self, max_messages: int, visibility_timeout: float, wait_time_seconds: float
    ) -> list[ClaimedMessage]:
        if not wait_time_seconds:
            return await self.claim_once(max_messages, visibility_timeout, waits=False)
        look = partial(self.claim_once, max_messages, visibility_timeout, waits=True)
        return await self.waiters.claim_or_wait(look, visibility_timeout, self._now() + wait_time_seconds)

    async def claim_once(self, limit: int, visibility: float, *, waits: bool) -> list[ClaimedMessage]:
        """Claim what is there. ``waits`` says that the caller waits if it finds nothing."""
        command = self.new_claim(limit, visibility, waits)
        found: list[ClaimedMessage] = await self.call(command)
        while command.more and not self.waiters.closed:
            command = self.new_claim(limit, visibility, waits)
            found = await self.call(command)
        if found and self.waiters.closed:  # meanwhile
            self.undo(command)
            return []
        return found

    def new_claim(self, limit: int, visibility: float, waits: bool) -> Claim:
        """Make the command of a claim."""
        return Claim(limit, visibility, waits)

    def undo(self, command: Command) -> None:
        """Put back what a claim has found whose caller is gone, before anything else is done."""
        if isinstance(command, Claim) and command.result:
            unclaim = Unclaim(command.result)
            unclaim.mailbox = command.mailbox
            self._batcher.post(unclaim)

    def stop_claims(self) -> None:
        self.waiters.close()

    def fail_claims(self, error: MailboxConnectionError) -> None:
        """Fail the claims that wait, as the server does not answer. They need not find out by a call of their own."""
        self.waiters.fail_all(error)
        self.notifications.silence.publish(error)
