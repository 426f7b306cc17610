"""The in-process event bus: it tells events to the subscribers to their class."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from mainspring.core.introspection import is_async, is_generator, name_of, unrun
from mainspring.core.loggers import Logger
from mainspring.errors import ConfigError, InvalidParameterError

if TYPE_CHECKING:
    from collections.abc import Callable

_log = Logger("mainspring")
E = TypeVar("E")


@dataclass(frozen=True, slots=True)
class DispatchResult:
    """How one dispatch went: how many subscribers heard it, and the errors of the subscribers that raised.

    A session's result also says which slices ``changed``, and by ``seq`` which event of the session it was. If a reducer
    raised, its :class:`~mainspring.errors.ReducerError` is the only error: nothing changed, and no subscriber was told. In a
    transaction, subscribers are told when it ends, after this result.
    """

    delivered: int = 0
    errors: tuple[BaseException, ...] = ()
    changed: tuple[str, ...] = ()
    seq: int | None = None

    @property
    def applied(self) -> bool:
        """True if the event became part of a session's state."""
        return self.seq is not None

    @property
    def ignored(self) -> bool:
        """True if neither a reducer of the session nor a subscriber takes events of this type."""
        return False


@dataclass(slots=True, eq=False)
class Dispatcher:
    """An in-process event bus: plain callables by event type, told in the order in which they subscribed.

    One event loop's own: nothing in it is locked. A subscriber that raises is logged (logger ``mainspring``), reported in
    the result, and does not keep the others from hearing the event. A subscription to a class hears its subclasses.
    """

    _subscribers: list[tuple[type[Any], Callable[[Any], object]]] = field(default_factory=list)
    _by_type: dict[type[Any], tuple[Callable[[Any], object], ...]] = field(default_factory=dict)
    _onward: list[Dispatcher] = field(default_factory=list)
    _sources: list[Dispatcher] = field(default_factory=list)

    def subscribe(self, event_type: type[E], subscriber: Callable[[E], object]) -> Callable[[], None]:
        """Call ``subscriber(event)`` for each event of ``event_type``. Return a function that ends this (idempotent).

        :raises InvalidParameterError: ``event_type`` is no class; or ``subscriber`` is no function, or is async or a generator,
            which the dispatcher could not run.
        """
        try:
            issubclass(object, event_type)
        except TypeError:
            raise InvalidParameterError(f"subscribe takes the class of events to hear, not {event_type!r}") from None
        if callable(subscriber) and is_generator(subscriber):
            raise InvalidParameterError(
                f"a subscriber is a plain function of (event), and {subscriber!r} is a generator"
            )
        if is_async(subscriber) or not callable(subscriber):
            what = "async" if callable(subscriber) else "no function"
            raise InvalidParameterError(
                f"a subscriber is a plain function of (event), and {subscriber!r} is {what}; have it start or send what waits"
            )
        entry = (event_type, subscriber)
        self._subscribers.append(entry)
        self._changed()

        def unsubscribe() -> None:
            self._subscribers[:] = [other for other in self._subscribers if other is not entry]
            self._changed()

        return unsubscribe

    def pass_on_to(self, other: Dispatcher) -> Callable[[], None]:
        """Let the subscribers of ``other`` hear of this one's events too, after its own. Returns a function that ends it
        (idempotent).

        :raises InvalidParameterError: ``other`` is no dispatcher.
        :raises ConfigError: it is this one, or passes its events on to it.
        """
        if not isinstance(other, Dispatcher):
            raise InvalidParameterError(f"pass_on_to takes another Dispatcher, not {other!r}")
        if other._reaches(self):
            raise ConfigError("pass_on_to: the events would go round in a circle; pass them on in one direction")
        self._onward.append(other)
        other._sources.append(self)
        self._changed()

        def end() -> None:
            self._onward[:] = [kept for kept in self._onward if kept is not other]
            other._sources[:] = [kept for kept in other._sources if kept is not self]
            self._changed()

        return end

    def wants(self, event_type: type[Any]) -> bool:
        """True if a subscriber would hear such an event: lets a hot path skip building it."""
        found = self._by_type.get(event_type)
        return bool(self._for(event_type) if found is None else found)

    def dispatch(self, event: object) -> DispatchResult:
        """Call every subscriber of this event's type, now and in this task. Never raise what a subscriber raised, such as an
        exit or the cancellation of something else: a subscriber ends neither the program nor this task.

        The one exception is a ``KeyboardInterrupt``, which is raised once all are told.
        """
        subscribers = self._for(type(event))
        errors: list[BaseException] = []
        interrupt: KeyboardInterrupt | None = None
        for subscriber in subscribers:
            try:
                said = subscriber(event)
                if said is not None and (what := unrun(said)) is not None:
                    text = f"is async or a generator: it returned {what}, which nothing runs"
                    errors.append(InvalidParameterError(f"the subscriber {name_of(subscriber)} {text}"))
                    log_error("a subscriber to %s did nothing", type(event).__name__, errors[-1])
            except KeyboardInterrupt as error:
                interrupt = error
            # A plain function cannot be cancelled: what it raises so is of something that it has asked, say a future.
            except BaseException as error:
                log_error("a subscriber to %s raised", type(event).__name__, error)
                errors.append(error)
        if interrupt is not None:
            raise interrupt
        return DispatchResult(len(subscribers) - len(errors), tuple(errors))

    def _reaches(self, other: Dispatcher) -> bool:
        """True if ``other`` hears of this one's events, or is this one."""
        return self is other or any(onward._reaches(other) for onward in self._onward)  # noqa: SLF001 - as above

    def _changed(self) -> None:
        if not self._by_type:  # then no source has anything of it: that would have been remembered here on its way
            return
        self._by_type.clear()
        for source in self._sources:
            source._changed()  # noqa: SLF001 - one of its kind

    def _for(self, event_type: type[Any]) -> tuple[Callable[[Any], object], ...]:
        found = self._by_type.get(event_type)
        if found is None:
            own = (fn for wanted, fn in self._subscribers if issubclass(event_type, wanted))
            passed_on = (fn for other in self._onward for fn in other._for(event_type))  # noqa: SLF001 - as above
            found = (*own, *passed_on)
            self._by_type[event_type] = found
        return found


def log_error(text: str, what: str, error: BaseException) -> None:
    """Log an error that is reported and not raised, with its traceback."""
    _log.error(text, what, exc_info=error)


class Tally(defaultdict[str, int]):
    """Counts by name, for the events a loop always keeps (its outcomes)."""

    def __init__(self) -> None:
        super().__init__(int)
