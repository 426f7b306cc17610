"""Events, as frozen dataclasses, and the ``Dispatcher`` that tells them to subscribers.

Logs, metrics, the dashboard and tests are subscribers; the engine only dispatches. Events carry names and figures, never
live objects, so that a subscriber can keep them.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeVar

from mainspring.core.clock import utc_now
from mainspring.core.introspection import is_async, is_generator, name_of, unrun
from mainspring.core.loggers import Logger
from mainspring.errors import ConfigError, InvalidParameterError

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from mainspring.core.state_machine import GroupState, ServiceState

_log = Logger("mainspring")


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Event:
    """What every event has: ``at``, when it was made, an aware datetime in UTC. Events are compared and shown without it.

    All kinds share these methods: ``dataclass`` would compile its own for each kind, at every start of a program.
    """

    at: datetime = field(default_factory=utc_now, kw_only=True, compare=False, repr=False)

    def _facts(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self) if each.compare}

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self._facts() == other._facts()

    def __hash__(self) -> int:
        return hash(tuple(self._facts().values()))

    def __repr__(self) -> str:
        return f"{type(self).__qualname__}({', '.join(f'{name}={value!r}' for name, value in self._facts().items())})"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class LoopStateChanged(Event):
    """A loop moved to another state; ``seconds`` is how long the old one lasted.

    It is stopping from the moment it is told to stop until it has ended: its drain is part of that.
    """

    loop: str
    old: ServiceState
    new: ServiceState
    seconds: float


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class LoopCrashed(Event):
    """An exception came out of a loop itself (not out of a handler); ``restart_in`` is None where it stays down."""

    loop: str
    error: BaseException
    restart_in: float | None


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class MessageStarted(Event):
    """A handler is about to run."""

    loop: str
    message_id: str
    run_id: str
    delivery_count: int
    attempt: int


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class MessageFinished(Event):
    """A delivery ended. ``outcome``: acknowledged, retried, postponed (``Retry(charge=False)``, ``nack(charge=False)``),
    released, dead_lettered, kept (a dead letter that stays one), lost (the lease ran out), cancelled (by its id).

    ``seconds`` is how long the handler ran. ``charged`` says of a retried one whether the attempt counts, and ``retry_in``
    in how many seconds it comes again. Where there was an error, ``where`` is the line it came from, and ``error_type`` the
    name of its class, unless that is Retry, Reject or ReplyError, which are instructions. ``queue_seconds`` is the time from
    the send to the first delivery, a delay included; it is None of later deliveries.
    """

    loop: str
    message_id: str
    run_id: str
    outcome: str
    seconds: float
    attempt: int
    error: str | None = None
    charged: bool = True
    retry_in: float | None = None
    where: str = ""
    traceback: str = ""
    error_type: str | None = None
    queue_seconds: float | None = None


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class MessageNotAcknowledged(MessageFinished):
    """A delivery that ended in any other way than acknowledged. It is a class of its own, so that a subscriber for trouble
    alone does not pay for an event at each success."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class SettlementFailed(Event):
    """An outcome could not be written, and the message will come again when its lease ends."""

    loop: str
    message_id: str
    outcome: str
    error: str


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class SettlementDelayed(Event):
    """An outcome could not be written yet, and is tried again. ``first``: of those since the loop last wrote one."""

    loop: str
    message_id: str
    outcome: str
    error: str
    retry_in: float
    first: bool = True


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class SettlementRecovered(Event):
    """The mailbox of a loop takes outcomes again after ``failures`` that could not be written."""

    loop: str
    failures: int


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class LeaseRenewalFailed(Event):
    """A renewal failed and is tried again while the lease is still trusted for ``trusted_for`` seconds.

    ``first``: of those since the loop's renewals last went well. Only that one is logged as a warning.
    """

    loop: str
    message_id: str
    error: str
    trusted_for: float
    first: bool = True


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class LeaseRenewalRecovered(Event):
    """The mailbox of a loop answers again after ``failures`` failed renewals."""

    loop: str
    failures: int


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class LeaseLost(Event):
    """The lease of a running handler is gone; the handler is cancelled so that no two workers run one message."""

    loop: str
    message_id: str


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ReceiveFailed(Event):
    """The mailbox could not be reached; the loop tries again in ``retry_in`` seconds and running handlers go on.

    A loop that receives nothing, as all its slots are busy, says so when its mailbox finds that the server is silent.

    ``first``: of those since it was last reached. Only that one is logged as a warning.
    """

    loop: str
    error: str
    retry_in: float
    first: bool = True


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ReceiveRecovered(Event):
    """The mailbox answers again after ``failures`` failed receives."""

    loop: str
    failures: int


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class HandlerStalled(Event):
    """A message gave no beat for the watchdog threshold; its handler is cancelled.

    Without a ``message_id`` it is a loop of foreign make, or a receive that was not answered for so long past its wait.
    """

    loop: str
    message_id: str
    age: float
    where: str


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class HandlerStuck(Event):
    """What was cancelled as stalled did not end within ``cancel_grace``; the process is about to be killed."""

    loop: str
    message_id: str
    age: float
    where: str


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ShutdownRequested(Event):
    """A shutdown began; ``reason`` says why (a signal's name, "drain", "all loops ended", a crash …)."""

    group: str
    reason: str


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class GroupPaused(Event):
    """The loops of a group take no new work until it is resumed; ``reason`` says who asked for it."""

    group: str
    reason: str


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class GroupResumed(Event):
    """The loops of a group take new work again."""

    group: str
    reason: str


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class GroupStateChanged(Event):
    """A group moved on: start, running, each phase of its shutdown; ``seconds`` is how long the old one lasted."""

    group: str
    old: GroupState
    new: GroupState
    seconds: float
    in_flight: int = 0
    """How many messages are in hand as a phase begins that waits for their handlers."""
    timeout: float | None = None
    """Seconds that this phase may take; None where it has no limit, or waits for nothing."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class GroupStopped(Event):
    """A group's run is over; ``report`` is the text of its ShutdownReport."""

    group: str
    exit_status: int
    report: str


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class CheckChanged(Event):
    """A readiness check passes (``error`` is None) or fails, unlike before."""

    group: str
    check: str
    error: str | None


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class CalibrationWarning(Event):
    """Two timeouts of a group do not fit together; ``text`` says which and what would."""

    group: str
    text: str


E = TypeVar("E")


@dataclass(frozen=True, slots=True)
class DispatchResult:
    """How one dispatch went: how many subscribers heard it, and the errors of those that raised.

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
        """True if anybody would hear such an event: lets a hot path skip building it."""
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
