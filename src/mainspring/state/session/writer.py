"""The single writer of a session and its children: who changes the slices when, and in which order."""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections import deque
from contextvars import copy_context
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio

from mainspring.core.dispatcher import DispatchResult, log_error
from mainspring.core.loggers import Logger
from mainspring.core.process import call_soon, event_loop, identity
from mainspring.errors import (
    ConfigError,
    InvalidParameterError,
    JournalError,
    ReducerError,
    SessionClosedError,
    SessionError,
    SessionFullError,
    copied,
    describe,
)
from mainspring.redaction import one_line
from mainspring.state.session.records import entry_of_events
from mainspring.state.session.slices import check_event_type
from mainspring.state.session.snapshot import SnapshotCodec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from contextvars import Context

    from mainspring.core.dispatcher import Dispatcher
    from mainspring.state.session.journal import Journal, JournalCalls
    from mainspring.state.session.records import EventCodecs
    from mainspring.state.session.slices import Slices, Values
    from mainspring.state.session.transaction import Transaction
    from mainspring.threads.ticket import Ticket


class Inbox:
    """Hands events to ``take``, which is called in the thread of the event loop, each in the context that it was put in."""

    def __init__(self, name: str, take: Callable[[Held], object]) -> None:
        self._name = name
        self._take = take
        self._waiting: deque[tuple[Context, Held]] = deque()
        self._loop: object | None = None
        self._process: object = None
        self._users = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def is_new(self) -> bool:
        """True if the session was never entered."""
        return self._process is None

    def open(self) -> None:
        """Take events from other threads, now that the session is entered on the running event loop."""
        self._loop, self._process = event_loop(), identity()
        self._users += 1

    def close(self) -> None:
        """Hand over what has come, and take no more, now that the session is left."""
        self._users -= 1
        if self._users <= 0:
            self._users, self._loop = 0, None
            self._hand_over()

    def put(self, held: Held) -> None:
        """Have an event taken. Callable from any thread.

        :raises SessionClosedError: the session is not entered, or its event loop has ended.
        :raises ConfigError: it was entered before this process was forked.
        """
        loop = self._loop
        closed = SessionClosedError(
            f"session {self._name!r} is not open: other threads dispatch to it inside its `async with`"
        )
        if loop is None:
            raise closed
        if self._process is not identity():
            raise ConfigError(
                f"session {self._name!r} was opened before this process was forked: its event loop is the parent's"
            )
        item = copy_context(), held
        self._waiting.append(item)
        if (self._loop is None or not call_soon(loop, self._hand_over)) and self._withdraw(item):
            raise closed

    def _withdraw(self, item: tuple[Context, Held]) -> bool:
        """True if it was not taken."""
        with contextlib.suppress(ValueError):
            self._waiting.remove(item)
            return True
        return False

    def _hand_over(self) -> None:
        for _ in range(len(self._waiting)):  # what comes meanwhile has a call of its own
            try:
                context, held = self._waiting.popleft()
            except IndexError:  # withdrawn
                return
            context.run(self._take, held)


_log = Logger("mainspring")


class Ignored(DispatchResult):
    """The result of an event without a reducer or subscriber. A class of its own: a field would cost each other result."""

    __slots__ = ()

    @property
    def ignored(self) -> bool:
        """True."""
        return True


@dataclass(slots=True, eq=False)
class Cell:
    """What the writer changes: the slices of one session. ``values`` are the ones that readers see."""

    name: str
    path: str
    slices: Slices
    dispatcher: Dispatcher
    codecs: EventCodecs | None = None
    snapshots: SnapshotCodec = field(init=False)
    ignored: set[type[Any]] = field(default_factory=set)
    values: Values = field(init=False)
    tip: Values = field(init=False)

    def __post_init__(self) -> None:
        self.snapshots = SnapshotCodec(self.name, self.slices)
        self.values = self.tip = dict(self.slices.initial)

    def note_ignored(self, event: Any) -> None:
        """Warn that an event has neither a reducer nor a subscriber, once for each type.

        It is no error, as the event may be meant for subscribers that have gone.

        :raises InvalidParameterError: no reducer could take an event of that type.
        """
        kind = type(event)
        if kind in self.ignored:
            return
        try:
            check_event_type(kind)
        except ConfigError:
            advice = "dispatch an instance of it" if isinstance(event, type) else "dispatch a @dataclass(frozen=True)"
            raise InvalidParameterError(
                f"session {self.name!r}: {event!r} is no event: nothing takes a {kind.__qualname__}; {advice}"
            ) from None
        self.ignored.add(kind)
        _log.warning(
            "session %r: nothing takes events of type %s: no reducer is for them, and no subscriber hears them",
            self.name,
            kind.__qualname__,
        )


class AppliedEvent(NamedTuple):
    """One event in its place. ``told`` is False if subscribers do not hear of it, as of a restored snapshot."""

    cell: Cell
    event: Any
    values: Values
    changed: tuple[str, ...]
    seq: int | None
    told: bool = True


def refused(event: Any, error: ReducerError) -> DispatchResult:
    """Log that a reducer failed on an event, and return the result of its dispatch."""
    log_error("a reducer of %s raised", type(event).__name__, error)
    return DispatchResult(errors=(error,))


def fail(ticket: Ticket[Any], error: BaseException, session: str, event: Any) -> None:
    """Fail the ticket of a dispatch. The error is logged if the ticket is never read."""
    work = f"the dispatch of {type(event).__name__} to session {session!r}"
    ticket.offer_error(error, work=work)


def each(tell: Callable[[AppliedEvent], DispatchResult], steps: Iterable[AppliedEvent]) -> list[DispatchResult]:
    """Tell of all steps. An interrupt out of a subscriber is raised afterwards, as all of them have happened."""
    results: list[DispatchResult] = []
    interrupt: BaseException | None = None
    for step in steps:
        try:
            results.append(tell(step))
        except BaseException as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt
    return results


@dataclass(slots=True, eq=False)
class Change:
    """What becomes durable at once: one event, or a transaction. ``entry`` is None if nothing is to be written.

    One that ``rewrites`` has an entry that the journal shall hold instead of all others.
    """

    steps: Sequence[AppliedEvent]
    entry: bytes | None
    ticket: Ticket[Any]
    after: Callable[[], object] | None = None
    rewrites: bool = False


@dataclass(slots=True, eq=False)
class Held:
    """An event that waits for its turn."""

    cell: Cell
    event: Any
    ticket: Ticket[DispatchResult]


AT_ONCE = 10_000
"""The most entries of one write."""
MOST_WAITING = 100_000
"""How many events may wait for their turn or the journal before those dispatched without waiting are refused."""
CLOSE_TIMEOUT = 10.0
"""Seconds that a journal may take for the last entries before they are given up."""


class SessionWriter:
    """Changes the slices of a session and all its children. All of it belongs to the thread that uses it first."""

    def __init__(self, name: str, journal: Journal | None) -> None:
        self.name = name
        self.journal = journal
        self.is_open = journal is None
        self.is_read = journal is None
        """True if all that happened before is part of what readers see."""
        self.seq = 0
        """The number of the last event that was accepted, or taken by the transaction that runs."""
        self.seen_seq = 0
        """The number of the last event that readers see."""
        self.direct = journal is None
        """True if an event that comes now can be applied at once."""
        self.cells: list[Cell] = []
        self.transaction: Transaction | None = None
        self._thread: int | None = None
        self._pid = 0
        self._held: deque[Held | Transaction] = deque()
        self._pending: deque[Change] = deque()
        self.is_reducing = False
        """True while a reducer is at work."""
        self.is_reading = False
        """True while the journal is being read."""
        self._telling = False
        self._advancing = False
        self._stopping = False
        self._wake: anyio.Event | None = None
        self._scope: anyio.CancelScope | None = None
        self._end_by = math.inf
        self.calls: JournalCalls | None = None
        self._inbox = Inbox(name, self._take_posted)

    # ------------------------------------------------------------------------------------------------- events come in

    def check(self) -> None:
        """Raise if no event can be taken: from another thread, while closed, or by a reducer."""
        thread = threading.get_ident()
        if self._thread is None:
            self._thread = thread
        elif thread != self._thread:
            raise ConfigError(
                f"session {self.name!r} is written in one thread, that of its event loop; from a worker thread use"
                " `anyio.from_thread.run(session.dispatch, event)`, or enter the session (`async with`) and call"
                " `session.dispatch_nowait(event)`"
            )
        if self.is_open and self.is_forked:
            raise ConfigError(
                f"session {self.name!r} was opened before this process was forked, and its journal has one writer, which is the"
                " parent; fork before it is opened, or start a process that opens one with a journal of its own"
            )
        if not self.is_open:
            raise SessionClosedError(f"session {self.name!r} has a journal and is not open; use it inside `async with`")
        if self.is_reducing:
            raise SessionError(
                f"session {self.name!r}: a reducer only computes the next slice; let a subscriber dispatch further events"
            )

    def check_read(self) -> None:
        """Raise if the slices are not what has happened. A reducer is at its place in the past."""
        if not (self.is_read or self.is_reducing):
            raise SessionClosedError(
                f"session {self.name!r} has a journal that is not read yet; look at its state inside `async with`"
            )

    def check_register(self) -> None:
        """Raise if it is too late to say how events are reduced."""
        if self.is_reducing:
            raise SessionError(
                f"session {self.name!r}: a reducer only computes the next slice; register slices before events are dispatched"
            )
        if self.journal is not None and (self.is_open or self.is_reading):
            raise ConfigError(f"session {self.name!r} has read its journal: register before `async with`")

    @property
    def is_forked(self) -> bool:
        """True if its journal was opened by the process that this one was forked from."""
        return self.journal is not None and self._pid not in (0, os.getpid())

    def is_pending(self, after: Callable[[], object]) -> bool:
        """True if a change that ends with ``after()`` waits for the journal."""
        return any(change.after == after for change in self._pending)

    def apply(self, cell: Cell, event: Any) -> DispatchResult:
        """Apply an event at once, and tell of it; only where ``direct``."""
        self.check()
        try:
            return self._do(cell, event)
        finally:
            if self._held:
                self.advance()

    def submit(self, cell: Cell, event: Any, ticket: Ticket[DispatchResult]) -> Held:
        """Take an event in its turn; ``ticket`` is completed when it is applied, durable and told."""
        self.check()
        held = Held(cell, event, ticket)
        transaction = self.transaction
        if transaction is not None and transaction.is_inside():
            try:
                ticket.offer(transaction.take(cell, event))
            except Exception as error:  # the ticket has it, as everywhere
                fail(ticket, error, self.name, event)
        elif self.journal is not None and transaction is None and not self._held:
            self._accept(held)
        else:
            self._held.append(held)
            self.advance()
        return held

    @property
    def is_elsewhere(self) -> bool:
        """True in another thread than the one that writes."""
        return self._thread is not None and self._thread != threading.get_ident()

    def post(self, cell: Cell, event: Any, ticket: Ticket[DispatchResult]) -> None:
        """Take an event in its turn, from another thread; ``ticket`` is completed as by :meth:`submit`."""
        if self._inbox.is_new:
            self.check()  # which raises, as this is another thread
        self.check_room()
        self._inbox.put(Held(cell, event, ticket))

    def check_room(self) -> None:
        """Raise if too many events wait to take one whose sender does not."""
        if len(self._held) + len(self._pending) + len(self._inbox) >= MOST_WAITING:
            raise SessionFullError(
                f"session {self.name!r}: {MOST_WAITING:,} events wait to be applied; await `dispatch()`, or the tickets"
            )

    def _take_posted(self, held: Held) -> None:
        try:
            self.submit(held.cell, held.event, held.ticket)
        except Exception as error:  # the ticket has it; its dispatcher does not wait here
            fail(held.ticket, error, self.name, held.event)

    def entered(self) -> None:
        """Let the thread of the running event loop write from now on."""
        self._thread = threading.get_ident()
        self._inbox.open()

    def left(self) -> None:
        """Take what other threads have dispatched so far, as the session is about to close."""
        self._inbox.close()

    def withdraw(self, what: Held | Transaction) -> None:
        """Forget what has not had its turn."""
        if what in self._held:
            self._held.remove(what)
        self.advance()

    def queue(self, transaction: Transaction) -> None:
        """Let a transaction begin in its turn."""
        self.check()
        self._held.append(transaction)
        self.advance()

    def end(self, transaction: Transaction) -> None:
        """End the transaction, and give turns to the events and transactions that wait."""
        if self.transaction is transaction:
            self.transaction = None
        self.advance()

    def advance(self) -> None:
        """Give turns to what waits, in its order. A transaction begins when all before it is durable."""
        if self._advancing:
            return
        self._advancing = True
        self.direct = False
        try:
            while self._held and self.transaction is None and not self._telling:
                first = self._held[0]
                if isinstance(first, Held):
                    self._held.popleft()
                    self._accept(first)
                elif self._pending:
                    return
                else:
                    self._held.popleft()
                    self.transaction = first
                    first.begin()
        finally:
            self._advancing = False
            self._look_up()

    def _look_up(self) -> None:
        self.direct = self.journal is None and self.transaction is None and not self._held and not self._telling

    # ----------------------------------------------------------------------------------------------- events are applied

    def reduce(self, cell: Cell, event: Any) -> tuple[Values, tuple[str, ...]]:
        """Return the tip of ``cell`` after the event, and what changed. Raise :class:`ReducerError` if a reducer fails."""
        direct, self.direct, self.is_reducing = self.direct, False, True
        try:
            after, changed = cell.slices.reduce(cell.tip, event)
        finally:
            self.direct, self.is_reducing = direct, False
        if not changed and not cell.dispatcher.wants(type(event)):
            cell.note_ignored(event)
        return after, changed

    def reduce_past(self, cell: Cell, values: Values, event: Any) -> Values:
        """Return what the slices were after an event of the past."""
        self.is_reducing = True
        try:
            return cell.slices.reduce(values, event)[0]
        finally:
            self.is_reducing = False

    def _do(self, cell: Cell, event: Any) -> DispatchResult:
        """Apply and tell, without a journal."""
        try:
            values, changed = self.reduce(cell, event)
        except ReducerError as error:
            return refused(event, error)
        seq = None
        if changed:
            self.seq = self.seen_seq = seq = self.seq + 1
            cell.values = cell.tip = values
        if not cell.dispatcher.wants(type(event)):
            return DispatchResult(0, (), changed, seq) if changed else Ignored()
        return self._tell(cell, event, changed, seq)

    def _tell(self, cell: Cell, event: Any, changed: tuple[str, ...], seq: int | None) -> DispatchResult:
        self._telling, self.direct = True, False
        try:
            told = cell.dispatcher.dispatch(event)
        finally:
            self._telling = False
            self._look_up()
        return DispatchResult(told.delivered, told.errors, changed, seq)

    def _accept(self, held: Held) -> None:
        cell, event, ticket = held.cell, held.event, held.ticket
        try:
            if self.journal is None:
                ticket.offer(self._do(cell, event))
                return
            encoded = self.encoded(cell, event)
            values, changed = self.reduce(cell, event)
            entry = entry_of_events(self.seq + 1, [encoded]) if changed else None
        except ReducerError as error:
            ticket.offer(refused(event, error))
        except BaseException as error:  # also an interrupt: it is for who dispatched, in whosever task this runs
            fail(ticket, error, self.name, event)
        else:
            seq = None
            if changed:
                self.seq = seq = self.seq + 1
                cell.tip = values
            self.hand_over(Change([AppliedEvent(cell, event, values, changed, seq)], entry, ticket))

    def encoded(self, cell: Cell, event: Any) -> bytes:
        """Return the event as the journal holds it, or nothing if there is no journal or no reducer for it."""
        if self.journal is None or not cell.slices.reduces(type(event)):
            return b""
        assert cell.codecs is not None
        return cell.codecs.encode(event)

    def show(self, change: Change) -> list[DispatchResult]:
        """Let readers see the change, and tell subscribers of it in order."""
        for step in change.steps:
            if step.changed:
                step.cell.values = step.values
                self.seen_seq = step.seq or self.seen_seq
        if change.after is not None:
            change.after()
        return each(self._shown, change.steps)

    def _shown(self, step: AppliedEvent) -> DispatchResult:
        if step.told and step.cell.dispatcher.wants(type(step.event)):
            return self._tell(step.cell, step.event, step.changed, step.seq)
        if step.told and not step.changed:
            return Ignored()
        return DispatchResult(0, (), step.changed, step.seq)

    # --------------------------------------------------------------------------------------------------- with a journal

    def hand_over(self, change: Change) -> None:
        """Have it written, and then shown."""
        self._pending.append(change)
        self._rouse()

    def _rouse(self) -> None:
        if self._wake is not None:
            self._wake.set()

    def opened(self, seq: int) -> None:
        """Take events on this event loop, now that the journal is read."""
        self.seq = self.seen_seq = seq
        self._thread, self._pid = threading.get_ident(), os.getpid()
        self._stopping = False
        self._wake, self._scope, self._end_by = None, None, math.inf
        self.is_open = self.is_read = True

    def stop(self) -> None:
        """Take no more events, write what there is, and end."""
        self.is_open = False
        self._stopping = True
        self._end_by = anyio.current_time() + CLOSE_TIMEOUT
        if self._scope is not None:
            self._scope.deadline = self._end_by
        self._rouse()

    async def run(self) -> None:
        """Write until told to stop: whatever has come by the time the last write has ended becomes one write."""
        # Shielded without an end until it is told to stop, which closing the session does in every case.
        self._scope = anyio.CancelScope(shield=True, deadline=self._end_by)
        try:
            with self._scope:
                while self._pending or not self._stopping:
                    if self._pending:
                        await self._write()
                    else:
                        self._wake = wake = anyio.Event()
                        await wake.wait()
        finally:
            self.is_open = False
            self._fail(
                JournalError(
                    f"session {self.name!r}: its journal has not answered within {CLOSE_TIMEOUT:g} s; what it still writes is"
                    " seen when the session is opened anew"
                )
            )
            self._refuse(SessionClosedError(f"session {self.name!r} was closed before the event's turn came"))

    def _refuse(self, closed: SessionClosedError) -> None:
        """Refuse what still waits for its turn."""
        held, self._held = self._held, deque()
        for waiting in held:
            if isinstance(waiting, Held):
                waiting.ticket.offer_error(copied(closed))
            else:
                waiting.refuse(copied(closed))
        self._log_lost(sum(isinstance(waiting, Held) for waiting in held), closed)

    async def _write(self) -> None:
        assert self.journal is not None
        assert self.calls is not None
        alone = self._pending[0].rewrites
        batch = list(takewhile(lambda change: change.rewrites == alone, islice(self._pending, 1 if alone else AT_ONCE)))
        entries = [change.entry for change in batch if change.entry is not None]
        try:
            if entries:
                await (self.calls.rewrite(entries) if alone else self.calls.append(entries))
        except Exception as error:
            if isinstance(error, JournalError):
                failed = error
            else:
                failed = JournalError(f"{self.journal.name}: {describe(error)}")
                failed.__cause__ = error
            if alone:
                self._pending.popleft().ticket.offer_error(failed)  # what comes after it was not built on it
            else:
                self._fail(failed)
        else:
            for change in batch:
                self._pending.popleft()
                try:
                    results = self.show(change)
                except (
                    BaseException
                ) as error:  # of a subscriber, an interrupt: for the one who dispatched, not the journal
                    log_error("a subscriber to %s raised", "an event", error)
                    change.ticket.offer_error(error)
                else:
                    change.ticket.offer(results[0] if results else DispatchResult())
        self.advance()

    def _fail(self, error: JournalError) -> None:
        """Take back all that waits for the journal."""
        if not self._pending:
            return
        failed, self._pending = self._pending, deque()
        self.seq = self.seen_seq
        for cell in self.cells:
            cell.tip = cell.values
        for change in failed:
            change.ticket.offer_error(copied(error))
        self._log_lost(sum(len(change.steps) for change in failed), error)

    def _log_lost(self, events: int, error: SessionError) -> None:
        """Log one line for all of them, as callers that did not wait may never read their tickets."""
        if events:
            _log.error("session %r: %d event(s) not applied: %s", self.name, events, one_line(describe(error)))
