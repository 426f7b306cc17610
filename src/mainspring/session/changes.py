"""What the writer of a session changes, and by what."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mainspring.events import Dispatcher, DispatchResult
    from mainspring.session.record import EventCodecs
    from mainspring.session.slices import Slices, Values
    from mainspring.ticket import Ticket


class Cell:
    """What the writer changes: the slices of one session. ``values`` are those that are seen."""

    __slots__ = ("codecs", "dispatcher", "name", "path", "slices", "tip", "values")

    def __init__(self, name: str, path: str, slices: Slices, dispatcher: Dispatcher) -> None:
        self.name = name
        self.path = path
        self.slices = slices
        self.dispatcher = dispatcher
        self.codecs: EventCodecs | None = None
        self.values: Values = dict(slices.initial)
        self.tip: Values = self.values


class Step(NamedTuple):
    """One event in its place. ``told`` is False for what is no event to anybody: a restored snapshot."""

    cell: Cell
    event: Any
    values: Values
    changed: tuple[str, ...]
    seq: int | None
    told: bool = True


class Change:
    """What becomes durable at once: one event, or a transaction. ``entry`` is None where nothing is to be written.

    One that ``rewrites`` has an entry that the journal shall hold instead of all others.
    """

    __slots__ = ("after", "entry", "rewrites", "steps", "ticket")

    def __init__(
        self,
        steps: Sequence[Step],
        entry: bytes | None,
        ticket: Ticket[Any],
        after: Callable[[], object] | None = None,
        rewrites: bool = False,
    ) -> None:
        self.steps = steps
        self.entry = entry
        self.ticket = ticket
        self.after = after
        self.rewrites = rewrites


@dataclass(slots=True, eq=False)
class Held:
    """An event that waits for its turn."""

    cell: Cell
    event: Any
    ticket: Ticket[DispatchResult]
