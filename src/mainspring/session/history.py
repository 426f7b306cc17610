"""A session's past: read from its journal, put into snapshots, put back, and shortened."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio
from anyio import to_thread

from mainspring.clock import real_work
from mainspring.errors import (
    ConfigError,
    JournalDamagedError,
    JournalError,
    JournalLockedError,
    ReducerError,
    SessionError,
    describe,
)
from mainspring.scope import DaemonScope
from mainspring.session.record import Entry, EventCodecs, Stored, entry_of_snapshot, read_entry
from mainspring.session.snapshot import Picture, Snapshot
from mainspring.session.writer import CLOSE_TIMEOUT, Cell

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType

    from mainspring.events import DispatchResult
    from mainspring.session.journal import Journal
    from mainspring.session.slices import Values
    from mainspring.session.transaction import Transaction
    from mainspring.session.writer import Writer

ENTRIES_AT_ONCE = 1_000
"""How many entries are read before the event loop goes on with something else."""


class Restored(NamedTuple):
    """What a snapshot makes of a session with its children; ``waiting`` is for those that are not made yet."""

    values: Mapping[Cell, Values]
    waiting: Mapping[str, list[Stored | Snapshot]]


class History:
    """One for a session with all its children, as its writer."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._cells: dict[str, Cell] = {}
        self._pictures: dict[str, Picture] = {}
        self._waiting: Mapping[str, list[Stored | Snapshot]] = {}
        """By path, what happened to children that are not made (again) yet."""
        self._scope: DaemonScope | None = None

    def join(self, cell: Cell) -> None:
        """A session or a child is made; what is known of it happens to it now."""
        if self._writer.journal is not None and self._writer.is_open:
            cell.codecs = EventCodecs(cell.name, cell.path, cell.slices.event_types)
        self._pictures[cell.path] = Picture(cell.name, cell.slices)
        for past in self._waiting.get(cell.path, ()):
            self._happen(cell, past)
        self._waiting = {path: past for path, past in self._waiting.items() if path != cell.path}
        self._cells[cell.path] = cell
        self._writer.cells.append(cell)

    def _happen(self, cell: Cell, past: Stored | Snapshot) -> None:
        if isinstance(past, Snapshot):
            values = self._pictures[cell.path].read(past)
        else:
            assert cell.codecs is not None
            values, _ = cell.slices.reduce(cell.values, cell.codecs.decode(past))
        cell.values = cell.tip = values

    # --------------------------------------------------------------------------------------------------------- snapshots

    def version(self, cell: Cell) -> int:
        """That of its state class."""
        return self._pictures[cell.path].version

    def snapshot(self, cell: Cell, *, tip: bool, waiting: Mapping[str, Any] | None = None) -> Snapshot:
        """The slices of a session and of its children: those that everybody sees, or those of the ``tip``."""
        picture = self._pictures[cell.path]
        unmade = self._waiting if waiting is None else waiting
        children = {
            _name(path): self.snapshot(child, tip=tip, waiting=waiting)
            for path, child in self._cells.items()
            if _is_child(path, cell.path)
        }
        children |= {_name(path): self._unmade(path, unmade) for path in unmade if _is_child(path, cell.path)}
        return Snapshot(self._writer.seq, picture.version, picture.take(cell.tip if tip else cell.values), children)

    def _unmade(self, path: str, waiting: Mapping[str, list[Stored | Snapshot]]) -> Snapshot:
        past = waiting[path]
        if len(past) != 1 or not isinstance(past[0], Snapshot):
            raise SessionError(
                f"session {self._writer.name!r}: its journal has events of the child {path!r}, which is not made yet: call"
                f" child({_name(path)!r}, …) first, so that they can be read"
            )
        children = {_name(below): self._unmade(below, waiting) for below in waiting if _is_child(below, path)}
        return replace(past[0], children=children)

    def read(self, cell: Cell, snapshot: Snapshot) -> Restored:
        """What the snapshot says of a session and its children."""
        values: dict[Cell, Values] = {}
        waiting = {path: past for path, past in self._waiting.items() if not _is_below(path, cell.path)}
        self._read(cell.path, snapshot, values, waiting)
        for path, other in self._cells.items():
            if _is_below(path, cell.path) and other not in values:
                values[other] = dict(other.slices.initial)
        return Restored(values, waiting)

    def _read(
        self, path: str, snapshot: Snapshot, values: dict[Cell, Values], waiting: dict[str, list[Stored | Snapshot]]
    ) -> None:
        cell = self._cells.get(path)
        if cell is None:
            waiting[path] = [replace(snapshot, children={})]
        else:
            values[cell] = self._pictures[path].read(snapshot)
        for name, child in snapshot.children.items():
            self._read(f"{path}/{name}" if path else name, child, values, waiting)

    def replace(self, transaction: Transaction, restored: Restored) -> DispatchResult:
        """Make ``restored`` what is, as all that this transaction does."""
        result = transaction.replace(restored.values, partial(self._wait_for, restored.waiting))
        if self._writer.journal is not None:
            snapshot = self.snapshot(self._cells[""], tip=True, waiting=restored.waiting)
            transaction.entry = entry_of_snapshot(result.seq or 0, snapshot.to_json())
        return result

    def _wait_for(self, waiting: Mapping[str, list[Stored | Snapshot]]) -> None:
        self._waiting = waiting

    async def compact(self) -> None:
        """Replace the journal by a snapshot; called in a transaction."""
        journal = self._writer.journal
        if journal is None:
            raise ConfigError(f"session {self._writer.name!r} has no journal to compact")
        assert self._writer.appender is not None  # a transaction begins in an opened session
        self._writer.appender.check()
        entry = entry_of_snapshot(self._writer.seq, self.snapshot(self._cells[""], tip=True).to_json())
        await _in_thread(journal, partial(journal.rewrite, [entry]))

    # -------------------------------------------------------------------------------------------------------- the journal

    async def open(self) -> None:
        """Read the journal, where there is one, and have it written from now on."""
        writer = self._writer
        if writer.journal is None:
            return
        if self._scope is not None:
            raise ConfigError(f"session {writer.name!r} is open already; open it in one place and pass it on")
        if writer.appender is not None and writer.appender.is_writing:
            raise JournalLockedError(
                f"{writer.journal.name}: a write of its last opening has not ended; try again later"
            )
        self._scope = scope = DaemonScope(f"session {writer.name}", timeout=CLOSE_TIMEOUT)
        try:
            await scope.__aenter__()
            try:
                if writer.gave_up:  # its last opening could not: a write was under way
                    await self._let_go(writer.journal)
                    writer.gave_up = False
                await _in_thread(writer.journal, writer.journal.open)
                try:
                    writer.opened(await self._replay(writer.journal))
                except BaseException:
                    await self._let_go(writer.journal)
                    raise
            except BaseException as error:
                await scope.__aexit__(type(error), error, error.__traceback__)
                raise
        except BaseException:
            self._scope = None
            raise
        scope.start_soon(writer.run, name=f"journal of session {writer.name}", stop=writer.stop)

    async def close(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        """Write what is still to be written, and let go of the journal."""
        scope, self._scope = self._scope, None
        journal = self._writer.journal
        if scope is None or journal is None:
            return None
        self._writer.is_open = False
        try:
            return await scope.__aexit__(kind, error, trace)
        finally:
            if not self._writer.gave_up:
                await self._let_go(journal)

    async def _let_go(self, journal: Journal) -> None:
        with anyio.CancelScope(shield=True, deadline=anyio.current_time() + CLOSE_TIMEOUT), real_work():
            await to_thread.run_sync(journal.close, abandon_on_cancel=True)

    async def _replay(self, journal: Journal) -> int:
        """Let all that the journal holds happen; the number of its last event."""
        waiting: dict[str, list[Stored | Snapshot]] = {}
        self._waiting = waiting
        for cell in self._cells.values():
            cell.codecs = EventCodecs(cell.name, cell.path, cell.slices.event_types)
            cell.values = cell.tip = dict(cell.slices.initial)
        entries, place, seq = journal.entries(), 0, 0
        while raw := await _in_thread(journal, lambda: list(islice(entries, ENTRIES_AT_ONCE))):
            for line in raw:
                place += 1
                where = f"{journal.name}: entry {place}"
                entry = read_entry(line, where)
                if entry.seq != seq + 1 and not (place == 1 and entry.snapshot is not None):
                    raise JournalDamagedError(
                        f"{where} begins with event {entry.seq} where event {seq + 1} belongs; restore the journal from a copy"
                    )
                try:
                    self._enter(entry, waiting)
                except ReducerError as error:
                    raise ReducerError(f"{where} cannot be applied any more: {error}") from error
                seq = entry.last
        return seq

    def _enter(self, entry: Entry, waiting: dict[str, list[Stored | Snapshot]]) -> None:
        if entry.snapshot is not None:
            restored = self.read(self._cells[""], Snapshot.of(entry.snapshot))
            for cell, values in restored.values.items():
                cell.values = cell.tip = values
            waiting.clear()
            waiting.update(restored.waiting)
        for stored in entry.events:
            known = self._cells.get(stored.path)
            if known is None:
                waiting.setdefault(stored.path, []).append(stored)
            else:
                self._happen(known, stored)


async def _in_thread(journal: Journal, fn: Callable[[], Any]) -> Any:
    """``fn()`` in a worker thread, waited for whatever is cancelled; a journal's errors are of this package."""
    try:
        with real_work():
            return await to_thread.run_sync(fn)
    except OSError as error:
        raise JournalError(f"{journal.name}: {describe(error)}") from error


def _name(path: str) -> str:
    return path.rpartition("/")[2]


def _is_child(path: str, of: str) -> bool:
    return path != "" and path.rpartition("/")[0] == of


def _is_below(path: str, of: str) -> bool:
    """Whether it is the path of that session, or of a child or a child's child of it."""
    return not of or path == of or path.startswith(f"{of}/")
