"""What the writer of a session changes, and by what."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from mainspring.core.loggers import Logger
from mainspring.errors import ConfigError, InvalidParameterError
from mainspring.events import DispatchResult, log_error
from mainspring.state.session.reducers import check_event_type

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from mainspring.errors import ReducerError
    from mainspring.events import Dispatcher
    from mainspring.state.session.record import EventCodecs
    from mainspring.state.session.slices import Slices, Values
    from mainspring.threads.ticket import Ticket

_log = Logger("mainspring")


class Ignored(DispatchResult):
    """The result of an event without a reducer or subscriber. A class of its own: a field would cost each other result."""

    __slots__ = ()

    @property
    def ignored(self) -> bool:
        """True."""
        return True


class Cell:
    """What the writer changes: the slices of one session. ``values`` are those that are seen."""

    __slots__ = ("codecs", "dispatcher", "ignored", "name", "path", "slices", "tip", "values")

    def __init__(self, name: str, path: str, slices: Slices, dispatcher: Dispatcher) -> None:
        self.name = name
        self.path = path
        self.slices = slices
        self.dispatcher = dispatcher
        self.codecs: EventCodecs | None = None
        self.values: Values = dict(slices.initial)
        self.tip: Values = self.values
        self.ignored: set[type[Any]] = set()

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
                f"session {self.name!r}: {event!r} is no event: nobody takes a {kind.__qualname__}; {advice}"
            ) from None
        self.ignored.add(kind)
        _log.warning(
            "session %r: nobody takes events of type %s: no reducer is for them, and no subscriber hears them",
            self.name,
            kind.__qualname__,
        )


class Step(NamedTuple):
    """One event in its place. ``told`` is False for what is no event to anybody: a restored snapshot."""

    cell: Cell
    event: Any
    values: Values
    changed: tuple[str, ...]
    seq: int | None
    told: bool = True


def refused(event: Any, error: ReducerError) -> DispatchResult:
    """What to say of an event that a reducer failed on."""
    log_error("a reducer of %s raised", type(event).__name__, error)
    return DispatchResult(errors=(error,))


def work(session: str, event: Any) -> str:
    """What an error of a dispatch came from, for the log."""
    return f"the dispatch of {type(event).__name__} to session {session!r}"


def each(tell: Callable[[Step], DispatchResult], steps: Iterable[Step]) -> list[DispatchResult]:
    """Tell of all steps; an interrupt, which comes out of a subscriber, is raised afterwards: they have happened."""
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
