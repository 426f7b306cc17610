"""A session's past: read from its journal, put into snapshots, put back, and shortened."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from mainspring.core.loggers import Logger
from mainspring.errors import ConfigError, JournalDamagedError, JournalLockedError, ReducerError, SessionError
from mainspring.runtime.scope import DaemonScope
from mainspring.state.session.journal import JournalCalls
from mainspring.state.session.records import (
    REMEDY,
    EventCodecs,
    JournalEntry,
    StoredEvent,
    entry_of_snapshot,
    read_entry,
)
from mainspring.state.session.snapshot import Snapshot
from mainspring.state.session.writer import CLOSE_TIMEOUT

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from types import TracebackType

    from mainspring.core.dispatcher import DispatchResult
    from mainspring.state.session.journal import Journal
    from mainspring.state.session.slices import Values
    from mainspring.state.session.transaction import Transaction
    from mainspring.state.session.writer import Cell, SessionWriter

_log = Logger("mainspring")

ENTRIES_AT_ONCE = 1_000
"""How many entries are read before the event loop goes on with something else."""


@dataclass(slots=True)
class Restored:
    """What a snapshot makes of a session with its children."""

    values: dict[Cell, Values]
    waiting: dict[str, list[StoredEvent | Snapshot]]
    """For children that are not made yet."""
    late: dict[Cell, Values] = field(default_factory=dict)
    """The children that were made while it was on its way to the journal."""


class History:
    """Reads the past of a session and its children from the journal, and replaces it. One for all of them, as the writer."""

    def __init__(self, writer: SessionWriter) -> None:
        self._writer = writer
        self.up_to_damage = False
        """True if a damaged journal is opened with what comes before the damage."""
        self._cells: dict[str, Cell] = {}
        self._waiting: dict[str, list[StoredEvent | Snapshot]] = {}
        """By path, what happened to children that are not made (again) yet."""
        self._restoring: Restored | None = None
        self._scope: DaemonScope | None = None
        self._past = 0

    def join(self, cell: Cell) -> None:
        """Take in a session or a child that was just made, with the events that are known of it."""
        path, restored = cell.path, self._on_its_way()
        if self._writer.journal is not None and (self._scope is not None or path in self._waiting):
            cell.codecs = EventCodecs(cell.name, path, cell.slices.event_types)
        values = tip = self._after(cell, self._waiting.get(path, ()))
        if restored is not None:
            tip = self._after(cell, restored.waiting.get(path, ()))
            restored.late[cell] = tip
            restored.waiting.pop(path, None)
        cell.values, cell.tip = values, tip
        self._waiting.pop(path, None)
        self._cells[path] = cell
        self._writer.cells.append(cell)

    def _after(self, cell: Cell, past: Iterable[StoredEvent | Snapshot]) -> Values:
        """Return the slices of a session that has just been made, after its ``past``."""
        values = cell.values
        for what in past:
            values = self._next(cell, values, what)
        return values

    def _next(self, cell: Cell, values: Values, what: StoredEvent | Snapshot) -> Values:
        if isinstance(what, Snapshot):
            return cell.snapshots.read(what)
        assert cell.codecs is not None
        return self._writer.reduce_past(cell, values, cell.codecs.decode(what))

    # --------------------------------------------------------------------------------------------------------- snapshots

    def snapshot(self, cell: Cell, *, tip: bool, waiting: Mapping[str, Any] | None = None) -> Snapshot:
        """Return the slices of a session and of its children: the slices that readers see, or the slices of the ``tip``."""
        unmade = self._waiting if waiting is None else waiting
        children = {
            name: self.snapshot(self._cells[path], tip=tip, waiting=waiting)
            if path in self._cells
            else self._unmade(path, unmade)
            for name, path in _children((*self._cells, *unmade), cell.path).items()
        }
        seq, values = (self._writer.seq, cell.tip) if tip else (self._writer.seen_seq, cell.values)
        return Snapshot(seq, cell.snapshots.version, cell.snapshots.take(values), children)

    def _unmade(self, path: str, waiting: Mapping[str, list[StoredEvent | Snapshot]]) -> Snapshot:
        children = {name: self._unmade(below, waiting) for name, below in _children(waiting, path).items()}
        past = waiting.get(path, ())
        if len(past) != 1 or not isinstance(past[0], Snapshot):
            calls = ".".join(f"child({name!r}, …)" for name in path.split("/"))
            raise SessionError(
                f"session {self._writer.name!r}: its journal has events of the child {path!r}, which is not made yet: call"
                f" {calls} first, so that they can be read"
            )
        return replace(past[0], children=children)

    def _restored(self, cell: Cell, snapshot: Snapshot) -> Restored:
        """Return what the snapshot makes of a session and its children."""
        values: dict[Cell, Values] = {}
        waiting = {path: past for path, past in self._waiting.items() if not _is_below(path, cell.path)}
        self._read(cell.path, snapshot, values, waiting)
        for path, other in self._cells.items():
            if _is_below(path, cell.path) and other not in values:
                values[other] = dict(other.slices.initial)
        return Restored(values, waiting)

    def _read(
        self,
        path: str,
        snapshot: Snapshot,
        values: dict[Cell, Values],
        waiting: dict[str, list[StoredEvent | Snapshot]],
    ) -> None:
        cell = self._cells.get(path)
        if cell is None:
            waiting[path] = [replace(snapshot, children={})]
        else:
            values[cell] = cell.snapshots.read(snapshot)
        for name, child in snapshot.children.items():
            self._read(f"{path}/{name}" if path else name, child, values, waiting)

    def replace(self, transaction: Transaction, cell: Cell, snapshot: Snapshot) -> DispatchResult:
        """Restore a session and its children from the snapshot, as all that this transaction does."""
        restored = self._restored(cell, snapshot)
        result = transaction.replace(restored.values, self._replaced)
        if self._writer.journal is not None:
            whole = self.snapshot(self._cells[""], tip=True, waiting=restored.waiting)
            transaction.entry = entry_of_snapshot(result.seq or 0, whole.to_json())
        self._restoring = restored
        return result

    def _replaced(self) -> None:
        """Show what was restored, now that it is durable."""
        restored, self._restoring = self._restoring, None
        assert restored is not None
        for cell, values in restored.late.items():
            cell.values = values
        self._waiting = restored.waiting

    def _on_its_way(self) -> Restored | None:
        """Return the restored state that waits for the journal, if there is one."""
        if self._restoring is not None and not self._writer.is_pending(self._replaced):
            self._restoring = None  # it has failed
        return self._restoring

    def compact(self, transaction: Transaction) -> None:
        """Replace the journal by a snapshot, as all that this transaction does."""
        writer = self._writer
        if writer.journal is None:
            raise ConfigError(f"session {writer.name!r} has no journal to compact")
        assert writer.calls is not None  # a transaction begins in an opened session
        writer.calls.check()
        transaction.entry = entry_of_snapshot(writer.seq, self.snapshot(self._cells[""], tip=True).to_json())
        transaction.rewrites = True

    # -------------------------------------------------------------------------------------------------------- the journal

    async def open(self) -> None:
        """Read the journal, if there is one, and have it written from now on."""
        writer = self._writer
        if writer.journal is None:
            writer.entered()
            return
        if self._scope is not None:
            raise ConfigError(f"session {writer.name!r} is open already; open it in one place and pass it on")
        if writer.calls is not None and writer.calls.is_busy:
            raise JournalLockedError(
                f"{writer.journal.name}: what its last opening had it do has not ended; try again later"
            )
        self._scope = scope = DaemonScope(f"session {writer.name}", timeout=CLOSE_TIMEOUT)
        writer.calls = calls = JournalCalls(writer.journal)
        try:
            async with AsyncExitStack() as undo:
                await undo.enter_async_context(scope)
                undo.push_async_callback(calls.let_go, CLOSE_TIMEOUT)
                await calls.open()
                writer.is_read, writer.is_reading = False, True
                writer.opened(await self._replay(writer.journal, calls))
                undo.pop_all()
        except BaseException:
            self._scope = None
            raise
        finally:
            writer.is_reading = False
        writer.entered()
        scope.start_soon(writer.run, name=f"journal of session {writer.name}", stop=writer.stop)

    async def close(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        """Write what is still to be written, and let go of the journal."""
        writer, scope = self._writer, self._scope
        if writer.journal is None:
            writer.left()
        if scope is None or writer.calls is None:
            return None
        if writer.is_forked:  # a forked child leaves to its parent what is the parent's
            return None
        self._scope = None
        writer.left()
        writer.is_open = False
        try:
            return await scope.__aexit__(kind, error, trace)
        finally:
            await writer.calls.let_go(CLOSE_TIMEOUT)

    async def _replay(self, journal: Journal, calls: JournalCalls) -> int:
        """Apply all events of the journal. Return the number of the last one. Children may be made meanwhile."""
        self._waiting = {}
        for cell in self._cells.values():
            cell.codecs = EventCodecs(cell.name, cell.path, cell.slices.event_types)
            cell.values = cell.tip = dict(cell.slices.initial)
        good: list[bytes] = []
        try:
            await self._replay_entries(journal, calls, good)
        except JournalDamagedError as error:
            if not self.up_to_damage:
                raise
            aside = await calls.cut(good)
            _log.warning(
                "session %r: opened up to event %d, as its journal is damaged (%s); all that it held is in %s",
                self._writer.name, self._past, error, aside or "no other place",
            )  # fmt: skip
        return self._past

    async def _replay_entries(self, journal: Journal, calls: JournalCalls, good: list[bytes]) -> None:
        """Apply all events of the journal, or all before the damage, which is raised then."""
        self._past = 0
        entries, place = await calls.entries(), 0
        while raw := await calls.read(entries, ENTRIES_AT_ONCE):
            for line in raw:
                place += 1
                where = f"{journal.name}: entry {place}"
                entry = read_entry(line, where)
                if entry.seq != self._past + 1 and not (place == 1 and entry.snapshot is not None):
                    raise JournalDamagedError(
                        f"{where} begins with event {entry.seq} where event {self._past + 1} belongs; {REMEDY}"
                    )
                try:
                    self._enter(entry)
                except ReducerError as error:
                    raise ReducerError(f"{where} cannot be applied any more: {error}") from error
                self._past = entry.last
                if self.up_to_damage:
                    good.append(line)

    def _enter(self, entry: JournalEntry) -> None:
        if entry.snapshot is not None:
            restored = self._restored(self._cells[""], Snapshot.of(entry.snapshot))
            for cell, values in restored.values.items():
                cell.values = cell.tip = values
            self._waiting = restored.waiting
        for stored in entry.events:
            known = self._cells.get(stored.path)
            if known is None:
                self._waiting.setdefault(stored.path, []).append(stored)
            else:
                known.values = known.tip = self._next(known, known.values, stored)


def _children(paths: Iterable[str], of: str) -> dict[str, str]:
    """Return the names and paths of the children of ``of`` that ``paths`` lead to or through.

    A child that is not made yet may have nothing but children of its own.
    """
    inside = f"{of}/" if of else ""
    names = (path[len(inside) :].split("/")[0] for path in paths if path.startswith(inside))
    return {name: f"{inside}{name}" for name in names if name}


def _is_below(path: str, of: str) -> bool:
    """True if it is the path of that session, or of one below it."""
    return not of or path == of or path.startswith(f"{of}/")
