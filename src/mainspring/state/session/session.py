"""``Session``: state that is made of events, by one writer, in typed slices that any thread may read."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Generic, Self, TypeAlias, cast, overload
from urllib.parse import unquote, urlsplit

from anyio.lowlevel import checkpoint
from typing_extensions import TypeVar

from mainspring.core.dispatcher import Dispatcher
from mainspring.errors import ConfigError, InvalidParameterError
from mainspring.state.session.history import History
from mainspring.state.session.journal import Journal
from mainspring.state.session.slices import NOT_GIVEN, Slices
from mainspring.state.session.snapshot import Snapshot, is_child_name
from mainspring.state.session.transaction import Transaction
from mainspring.state.session.writer import Cell, SessionWriter, fail
from mainspring.threads.ticket import Ticket

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractAsyncContextManager
    from types import TracebackType

    from mainspring.core.dispatcher import DispatchResult
    from mainspring.state.session.slices import Reducer

    Where: TypeAlias = str | os.PathLike[str] | Journal

S = TypeVar("S", default="Mapping[str, Any]")
Q = TypeVar("Q", default="Mapping[str, Any]")


class Session(Generic[S]):
    """State as slices, which only events change, one after the other, each by the reducers that are registered for its type.

    ``Session(Chat)`` takes its slices from the frozen dataclass ``Chat`` (or from an instance of it, for other initial
    values): each field is a slice, annotated with its reducers. ``Session()`` has those that :meth:`register` makes. It lives
    in memory; :meth:`open` gives one that outlives the process.

    All writing belongs to one thread, that of the event loop. Reading needs no lock, in any thread: slices are never changed,
    only replaced. Its ``dispatcher`` tells subscribers of each event once it is part of the state.

    :param state: the state class, or an instance of it.
    :param name: for errors.
    :param dispatcher: to tell the subscribers of another one instead of an own.
    :raises ConfigError: the class is not frozen, or an annotation is no reducer.
    """

    name: str
    """Its own, or of a child ``parent/child``."""
    dispatcher: Dispatcher
    """Tells the subscribers of each event."""

    @overload
    def __init__(
        self, state: type[S] | None = None, *, name: str = "session", dispatcher: Dispatcher | None = None
    ) -> None: ...
    @overload
    def __init__(self, state: S, *, name: str = "session", dispatcher: Dispatcher | None = None) -> None: ...
    def __init__(self, state: Any = None, *, name: str = "session", dispatcher: Dispatcher | None = None) -> None:
        self._make(state, name, dispatcher, None, None)

    @overload
    @classmethod
    def open(
        cls,
        state: type[Q] | None = None,
        *,
        journal: Where,
        name: str = "session",
        dispatcher: Dispatcher | None = None,
        up_to_damage: bool = False,
    ) -> Session[Q]: ...
    @overload
    @classmethod
    def open(
        cls,
        state: Q,
        *,
        journal: Where,
        name: str = "session",
        dispatcher: Dispatcher | None = None,
        up_to_damage: bool = False,
    ) -> Session[Q]: ...
    @classmethod
    def open(
        cls,
        state: Any = None,
        *,
        journal: Where,
        name: str = "session",
        dispatcher: Dispatcher | None = None,
        up_to_damage: bool = False,
    ) -> Session[Any]:
        """Return a session that its journal keeps: ``async with Session.open(Chat, journal="sqlite:///chat.db") as session``.

        Entering it reads the journal and brings the state to where it was; the subscribers are told nothing of that. From
        then on :meth:`dispatch` returns once the event is durable: what it has returned for is there after any crash, and
        the events of concurrent dispatches are written together. Leaving the block writes what is still to be written.

        :param journal: ``sqlite:///relative.db``, ``sqlite:////absolute/path.db``, the path of a ``.jsonl`` file, or a
            :class:`Journal`. A session holds it alone.
        :param up_to_damage: open a damaged journal too, with all events before the damage. All that it held is put aside, in a
            file beside it that a warning names (logger ``mainspring``), and the session goes on from there.
        :raises ConfigError: it is no journal, or another program's file.

        Entering raises :class:`JournalLockedError` while another session has the journal, and :class:`JournalDamagedError` if
        it holds what was never written. It raises :class:`UnknownEventError` or :class:`UnknownVersionError` if it holds events
        that this code does not know. It raises :class:`JournalError` if the journal cannot be read, or does not answer within
        30 s.
        """
        session: Session[Any] = Session.__new__(cls)
        session._make(state, name, dispatcher, _journal_of(journal), None)
        session._history.up_to_damage = up_to_damage
        return session

    def _make(
        self, state: Any, name: str, dispatcher: Dispatcher | None, journal: Journal | None, parent: Session[Any] | None
    ) -> None:
        self.name = name = name if parent is None else f"{parent.name}/{name}"
        self.dispatcher = Dispatcher() if dispatcher is None else dispatcher
        self._slices = Slices(self.name, state)
        self._children: dict[str, Session[Any]] = {}
        if parent is None:
            self._writer = SessionWriter(name, journal)
            self._history = History(self._writer)
        else:
            self._writer, self._history = parent._writer, parent._history  # noqa: SLF001 - one of its kind
            self.dispatcher.pass_on_to(parent.dispatcher)
        path = name.removeprefix(self._writer.name)
        self._cell = Cell(name, path.removeprefix("/"), self._slices, self.dispatcher)
        self._history.join(self._cell)
        self._seen: tuple[Any, Any] | None = None

    def __repr__(self) -> str:
        at = f"after event {self._writer.seen_seq}" if self._writer.is_read else "not read yet"
        return f"<Session {self.name!r} with {', '.join(self._slices.initial) or 'no slices'} {at}>"

    # ---------------------------------------------------------------------------------------------------------- slices

    def register(
        self,
        event_type: type[Any],
        slice: str,  # noqa: A002 - it is what it is called
        reducer: Reducer | Callable[[Any, Any], Any],
        *,
        initial: Any = NOT_GIVEN,
        type: Any = None,  # noqa: A002 - as above
    ) -> None:
        """Reduce ``slice`` from the events of a type (and its subclasses), beside what is registered for it already.

        :param reducer: ``append``, ``replace_latest``, ``upsert_by(key)``, or a function of ``(slice, event)`` that returns the
            next slice. It must compute it from these alone, as it does so again when a journal is read.
        :param initial: of a new slice; ``()`` for reducers that keep many events, None for the one that keeps the latest.
        :param type: of the slice, for snapshots, where neither the reducer nor its annotations say it.
        :raises ConfigError: the event type can be changed, the reducer is async, or the session has read its journal.
        :raises SessionError: called by a reducer.
        """
        self._writer.check_register()
        before = dict(self._slices.initial)
        self._slices.register(event_type, slice, reducer, initial, type)
        for name in self._slices.initial.keys() - before.keys():
            self._cell.values = {**self._cell.values, name: self._slices.initial[name]}
            self._cell.tip = {**self._cell.tip, name: self._slices.initial[name]}
            if self._writer.transaction is not None:
                self._writer.transaction.add(self._cell, name, self._slices.initial[name])

    @property
    def state(self) -> S:
        """The slices at this moment: an instance of the state class, else a mapping by name. In a transaction, its own view.

        After the end of the ``async with`` of a session with a journal, as they were then.

        :raises SessionClosedError: the journal is not read yet. So raise ``session[slice]``, :attr:`seq` and :meth:`snapshot`.
        """
        values = self._values()
        seen = self._seen
        if seen is None or seen[0] is not values:
            self._seen = seen = values, self._slices.view(values)
        return cast("S", seen[1])

    def __getitem__(self, slice: str) -> Any:  # noqa: A002 - as above
        """Return one slice by its name, declared or registered."""
        try:
            return self._values()[slice]
        except KeyError:
            known = ", ".join(self._slices.initial) or "none"
            raise InvalidParameterError(f"session {self.name!r} has no slice {slice!r}; there are {known}") from None

    @property
    def seq(self) -> int:
        """The number of the last event in :attr:`state`, counted over the session with all its children."""
        self._writer.check_read()
        return self._writer.seq if self._in_transaction() else self._writer.seen_seq

    def _values(self) -> Mapping[str, Any]:
        if not self._writer.is_read:
            self._writer.check_read()
        return self._cell.tip if self._in_transaction() else self._cell.values

    def _in_transaction(self) -> bool:
        transaction = self._writer.transaction
        return transaction is not None and transaction.is_inside()

    # ---------------------------------------------------------------------------------------------------------- writing

    async def dispatch(self, event: Any) -> DispatchResult:
        """Apply ``event``, tell the subscribers, and return how that went. With a journal, first wait until it is durable.

        Events are applied one at a time, in the order of their dispatches. A reducer that raises leaves the state as it was:
        the result has its :class:`ReducerError`, and no subscriber is told. An event without a reducer is only told to the
        subscribers. If there is no subscriber for it either, the result is ``ignored``, and a warning says so once for each
        type (logger ``mainspring``). In a transaction this returns before the event is durable and before subscribers are told.

        Cancelled before its turn, the event is not applied; cancelled while it waits for the journal, it may be.

        :raises InvalidParameterError: it has no reducer and no subscriber, and is no event: a class, or not of a frozen class.
        :raises SessionClosedError: the session has a journal and is not open.
        :raises SerializationError: the event is not as its type is annotated, so that the journal could not hold it.
        :raises JournalError: the journal cannot be written; the event is not applied. Where it has not answered within 30 s,
            it may still write the event, and nothing can be dispatched until the session is opened anew.
        :raises ConfigError: called in another thread than the session's.
        """
        await checkpoint()
        writer = self._writer
        if writer.direct:
            return writer.apply(self._cell, event)
        ticket: Ticket[DispatchResult] = Ticket()
        held = writer.submit(self._cell, event, ticket)
        try:
            return await ticket.wait()
        finally:
            if not ticket.is_ready:
                writer.withdraw(held)

    def dispatch_nowait(self, event: Any) -> Ticket[DispatchResult]:
        """Dispatch without waiting, for subscribers and other plain functions. The ticket has the result of :meth:`dispatch`.

        Its turn is at once, but for a subscriber's event (after the event that it is told of) and while another task's
        transaction runs.

        From another thread than the session's it may be called while the session is entered (``async with``, also where it has
        no journal): a plain ``def`` handler dispatches so. Its turn is when the event loop comes to it, in the order of the
        calls of that thread. Within the block of a transaction that has started the thread, it is part of it. What was
        dispatched before the end of the ``async with`` is applied. ``ticket.wait_sync()`` waits for the result there.

        The ticket fails with the errors of the event or the journal that :meth:`dispatch` raises, in a transaction too. The
        error of a ticket that is never read is logged. If the session cannot take any event, this raises at once.

        :raises SessionClosedError: the session has a journal and is not open; or, in another thread, is not entered.
        :raises SessionFullError: 100,000 events wait for their turn or the journal.
        :raises SessionError: called by a reducer.
        :raises ConfigError: called in another thread of a session that was never entered; or it was entered before this process
            was forked.
        """
        ticket: Ticket[DispatchResult] = Ticket()
        writer = self._writer
        if writer.is_elsewhere:
            writer.post(self._cell, event, ticket)
        elif writer.direct:
            writer.check()
            try:
                ticket.complete(writer.apply(self._cell, event))
            except Exception as error:
                fail(ticket, error, writer.name, event)
        else:
            writer.check_room()
            writer.submit(self._cell, event, ticket)
        return ticket

    def transaction(self) -> AbstractAsyncContextManager[object]:
        """Make the events dispatched in an ``async with`` block happen all or not at all.

        It waits for its turn, and all other writers, of the children and the parent too, wait until it ends. The block, with
        the tasks started in it, sees its own events at once. Others see them, and subscribers are told of them, when it is
        left, once they are durable. Left by an exception, a cancellation included, nothing of them remains, in memory or in the
        journal. A reducer's error is in the result of its dispatch and does not end the block.

        A cancellation that comes while the end is written changes nothing of that: the outcome is waited for, as long as
        the journal may take. ``asyncio.timeout`` and ``Task.cancel`` are raised after it, and the events are applied then, if
        they could be written.

        :raises ConfigError: this code runs in a transaction of the session already.
        :raises JournalError: at the end: the journal cannot be written, and the events are not applied. One that has not
            answered within 30 s may still write them, as with :meth:`dispatch`.
        """
        return Transaction(self._writer)

    # --------------------------------------------------------------------------------------------------------- snapshots

    def snapshot(self) -> Snapshot:
        """Return the slices as plain JSON data, with those of the children.

        :raises SerializationError: a slice holds what is no JSON.
        :raises ConfigError: nothing says of what type a slice is.
        """
        self._writer.check_read()
        return self._history.snapshot(self._cell, tip=self._in_transaction())

    async def restore(self, snapshot: Snapshot | Mapping[str, Any] | str | bytes) -> DispatchResult:
        """Put the slices, and those of the children, back to what they were. Takes its turn like an event, and is durable.

        Children that the snapshot does not have are as at first; one that is not made yet is restored when it is. The count
        of events goes on, and the subscribers are told nothing.

        :raises UnknownVersionError: the snapshot is of a version that this code does not know.
        :raises SerializationError: it does not fit the slices.
        :raises InvalidParameterError: it is no snapshot.
        """
        wanted = Snapshot.of(snapshot, self._cell.snapshots.version)
        async with Transaction(self._writer) as transaction:
            return self._history.replace(transaction, self._cell, wanted)

    async def compact(self) -> None:
        """Replace all that the journal holds by one snapshot, so that it is short, and quick to read.

        Other writers wait meanwhile. After a crash or a cancellation the journal is either as before or completely rewritten.

        :raises ConfigError: there is no journal, or this is a child, or code in a transaction.
        :raises SessionError: the journal has events of children that are not made yet.
        :raises JournalError: it cannot be rewritten, and is as it was. Or it has not answered within 30 s, or the disk has not
            confirmed it: then nothing can be dispatched until the session is opened anew.
        """
        if self._cell.path:
            raise ConfigError(f"session {self.name!r} is a child: compact() is for the session that has the journal")
        async with Transaction(self._writer) as transaction:
            self._history.compact(transaction)

    # ---------------------------------------------------------------------------------------------------------- children

    @overload
    def child(self, name: str, state: type[Q] | None = None) -> Session[Q]: ...
    @overload
    def child(self, name: str, state: Q) -> Session[Q]: ...
    def child(self, name: str, state: Any = None) -> Session[Any]:
        """Return the child session of that name, made at the first call: slices of its own, on the writer of this session.

        Its events are numbered, ordered and journaled together with its parent's, and a transaction of either spans both.
        They change the child's slices only. The parent sees the child through :attr:`children`, and its subscribers hear of the
        child's events, after the child's own. A snapshot of the parent has its children's slices.

        :param state: its state class, or an instance.
        :raises ConfigError: a child of that name was made with another class.
        """
        known = self._children.get(name)
        if known is not None:
            kind = state if state is None or isinstance(state, type) else type(state)
            if known._slices.state_class is not kind:  # noqa: SLF001 - one of its kind
                raise ConfigError(f"session {self.name!r} has a child {name!r} already, with another state class")
            return known
        if not is_child_name(name):
            raise InvalidParameterError(f"child: a name of at least one character without '/' is needed, not {name!r}")
        child: Session[Any] = Session.__new__(Session)
        child._make(state, name, None, None, self)
        self._children[name] = child
        return child

    @property
    def children(self) -> Mapping[str, Session[Any]]:
        """The child sessions that were made, by name."""
        return dict(self._children)

    # --------------------------------------------------------------------------------------------------------- life cycle

    async def __aenter__(self) -> Self:
        if self._cell.path:
            raise ConfigError(f"session {self.name!r} is a child: its parent opens it")
        await self._history.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return await self._history.close(kind, error, trace)


def _journal_of(given: Where) -> Journal:
    """Return the journal that ``given`` means, unopened: itself, ``"sqlite:///file.db"``, or the path of a ``.jsonl`` file.

    :raises ConfigError: it means none.
    """
    if isinstance(given, Journal):
        return given
    text = os.fspath(given) if isinstance(given, str | os.PathLike) else given
    if isinstance(text, str) and "\0" in unquote(text):
        raise ConfigError(f"{text!r} is no journal: a path has no NUL character")
    if isinstance(text, str) and text.startswith("sqlite://"):
        parts = urlsplit(text)
        path = unquote(parts.path)[1:]
        if parts.netloc or not path or parts.query:
            raise ConfigError(f"{text!r}: a SQLite journal is sqlite:///relative.db or sqlite:////absolute/path.db")
        from mainspring.state.session.journal_sqlite import SQLiteJournal

        return SQLiteJournal(path)
    if isinstance(text, str) and "://" not in text and text.endswith(".jsonl"):
        from mainspring.state.session.journal_file import FileJournal

        return FileJournal(text)
    raise ConfigError(f"{given!r} is no journal: write 'sqlite:///session.db' or 'session.jsonl', or give a Journal")
