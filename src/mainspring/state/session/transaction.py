"""``Transaction``: events that are applied all or none, while the other writers wait."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Self

import anyio

from mainspring.core.dispatcher import DispatchResult
from mainspring.errors import ConfigError, ReducerError, SessionClosedError
from mainspring.state.session.records import entry_of_events
from mainspring.state.session.writer import AppliedEvent, Change, Ignored, refused
from mainspring.threads.ticket import Ticket

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType

    from mainspring.state.session.slices import Values
    from mainspring.state.session.writer import Cell, SessionWriter


class Transaction:
    """One block, from :meth:`Session.transaction`. Leaving it by any exception leaves nothing of it behind."""

    def __init__(self, writer: SessionWriter) -> None:
        self._writer = writer
        self._turn: anyio.Event | None = None
        self._refused: SessionClosedError | None = None
        self._seq = 0
        self._steps: list[AppliedEvent] = []
        self._encoded: list[bytes] = []
        self._touched: dict[Cell, None] = {}
        self.entry: bytes | None = None
        """What the journal gets, where that is not the events."""
        self.rewrites = False
        """True if it gets that instead of all that it holds."""
        self._after: Callable[[], object] | None = None

    def is_inside(self) -> bool:
        """True if this code runs in the block, or in a task or thread started there."""
        return self in _inside.get()

    # ----------------------------------------------------------------------------------------------- the writer calls

    def begin(self) -> None:
        """Begin: its turn has come."""
        self._seq = self._writer.seq
        self._called()

    def refuse(self, error: SessionClosedError) -> None:
        """End the wait for its turn, which will not come."""
        self._refused = error
        self._called()

    def _called(self) -> None:
        if self._turn is not None:
            self._turn.set()

    def take(self, cell: Cell, event: Any) -> DispatchResult:
        """Apply an event from within the block. Only the block sees it until the transaction ends."""
        writer = self._writer
        encoded = writer.encoded(cell, event)
        try:
            values, changed = writer.reduce(cell, event)
        except ReducerError as error:
            return refused(event, error)
        seq = None
        if changed:
            self._encoded.append(encoded)
            writer.seq = seq = writer.seq + 1
            self._touched[cell] = None
            cell.tip = values
        self._steps.append(AppliedEvent(cell, event, values, changed, seq))
        if not changed and not cell.dispatcher.wants(type(event)):
            return Ignored()
        return DispatchResult(0, (), changed, seq)

    def add(self, cell: Cell, name: str, value: Any) -> None:
        """Add a slice that was registered meanwhile to the events so far."""
        self._steps = [
            step._replace(values={**step.values, name: value}) if step.cell is cell else step for step in self._steps
        ]

    def replace(self, values: Mapping[Cell, Values], after: Callable[[], object]) -> DispatchResult:
        """Replace the slices, as all that this transaction does. ``after()`` is called with its end."""
        self._writer.seq = seq = self._seq + 1
        for cell, restored in values.items():
            self._touched[cell] = None
            cell.tip = restored
            self._steps.append(AppliedEvent(cell, None, restored, tuple(restored), seq, told=False))
        self._after = after
        return DispatchResult(0, (), self._steps[0].changed, seq)

    # ------------------------------------------------------------------------------------------------------ the block

    async def __aenter__(self) -> Self:
        writer = self._writer
        writer.check()
        if writer.transaction is not None and writer.transaction.is_inside():
            raise ConfigError(
                f"session {writer.name!r}: this code runs in a transaction already; dispatch in it, or leave it first"
            )
        if self._turn is not None:
            raise ConfigError(f"session {writer.name!r}: a transaction is entered once; ask for a new one")
        self._turn = turn = anyio.Event()
        await anyio.lowlevel.checkpoint()
        writer.queue(self)
        try:
            await turn.wait()
            if self._refused is not None:
                raise self._refused
        except BaseException:
            if writer.transaction is self:
                writer.end(self)
            else:
                writer.withdraw(self)
            raise
        _inside.set((*_inside.get(), self))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _inside.set(tuple(other for other in _inside.get() if other is not self))
        if error is not None:
            self._roll_back()
        elif self._writer.journal is None:
            self._show()
        elif not self._writer.is_open:
            self._roll_back()
            raise SessionClosedError(f"session {self._writer.name!r} was closed before its transaction ended")
        else:
            await self._write()

    def _roll_back(self) -> None:
        for cell in self._touched:
            cell.tip = cell.values
        self._writer.seq = self._seq
        self._writer.end(self)

    def _show(self) -> None:
        writer = self._writer
        try:
            writer.show(Change(self._steps, None, Ticket(), self._after))
        finally:
            writer.end(self)

    async def _write(self) -> None:
        """Write the transaction. Wait for the outcome even when cancelled, since the caller could not find it out later.

        The wait has an end, as the writer gives the journal up in time. A mere rewrite changes no state, and is not shielded.
        """
        writer = self._writer
        entry = self.entry
        if self._encoded:
            entry = entry_of_events(self._seq + 1, self._encoded)
        change = Change(self._steps, entry, Ticket[Any](), self._after, self.rewrites)
        writer.hand_over(change)
        writer.end(self)
        if not self.rewrites:
            await _ready(change.ticket)
        await change.ticket.wait()


async def _ready(ticket: Ticket[Any]) -> None:
    """Wait for the answer even when cancelled, and raise the cancellation after it.

    A shield of anyio's does not keep ``asyncio.timeout`` and ``Task.cancel`` from reaching a task, each of them once.
    """
    cancelled: BaseException | None = None
    with anyio.CancelScope(shield=True):
        while not ticket.is_ready:
            try:
                await ticket.wait()
            except anyio.get_cancelled_exc_class() as error:
                cancelled = error
            except Exception:  # the journal's; the caller's wait for the ticket raises it
                break
    if cancelled is not None:
        raise cancelled


_inside: ContextVar[tuple[Transaction, ...]] = ContextVar("mainspring_transactions", default=())
