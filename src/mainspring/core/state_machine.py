"""Every transition table of the package, and the one machine that runs them."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from mainspring.errors import InvalidTransitionError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class MailboxState(StrEnum):
    """Life of one mailbox object; a closed one may be opened again."""

    UNOPENED = "unopened"
    OPEN = "open"
    CLOSED = "closed"


class ServiceState(StrEnum):
    """Life of a supervised loop or subprocess."""

    INITIALIZING = "initializing"
    STARTING = "starting"
    RUNNING = "running"
    DEGRADED = "degraded"
    STOPPING = "stopping"
    STOPPED = "stopped"
    RESTARTING = "restarting"


class OrchestratorState(StrEnum):
    """Life of an orchestrator: Ready once all core services have started, Running while all services are well."""

    UNINITIALIZED = "uninitialized"
    INITIALIZING = "initializing"
    READY = "ready"
    RUNNING = "running"
    DEGRADED = "degraded"
    SHUTTING_DOWN = "shutting down"
    TERMINATED = "terminated"


class GroupState(StrEnum):
    """Life of a LoopGroup's run: the phases of its shutdown are states of their own."""

    IDLE = "idle"
    STARTING = "starting"
    RUNNING = "running"
    DRAIN_DELAY = "drain delay"
    STOP_INTAKE = "stop intake"
    FINISH = "finish"
    CANCEL = "cancel"
    STOP_DAEMONS = "stop daemons"
    STOPPED = "stopped"


class LoopThreadState(StrEnum):
    """Life of a LoopThread. It accepts callbacks while it is running, and lives once.

    It has no table: any thread or signal handler moves it on, so it is told from marks that are each set once.
    """

    IDLE = "idle"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    STOPPED = "stopped"


S = TypeVar("S", bound=StrEnum)
Table = dict[S, frozenset[S]]

_M, _S, _O, _G = MailboxState, ServiceState, OrchestratorState, GroupState

MAILBOX: Table[MailboxState] = {
    _M.UNOPENED: frozenset({_M.OPEN, _M.CLOSED}),
    _M.OPEN: frozenset({_M.CLOSED}),
    _M.CLOSED: frozenset({_M.OPEN}),
}

SERVICE: Table[ServiceState] = {
    _S.INITIALIZING: frozenset({_S.STARTING, _S.RESTARTING, _S.STOPPING}),
    _S.STARTING: frozenset({_S.RUNNING, _S.RESTARTING, _S.STOPPING}),
    _S.RUNNING: frozenset({_S.DEGRADED, _S.STOPPING, _S.RESTARTING}),
    _S.DEGRADED: frozenset({_S.RUNNING, _S.STOPPING, _S.RESTARTING}),
    _S.RESTARTING: frozenset({_S.STARTING, _S.STOPPING}),
    _S.STOPPING: frozenset({_S.STOPPED}),
    _S.STOPPED: frozenset(),
}

ORCHESTRATOR: Table[OrchestratorState] = {
    _O.UNINITIALIZED: frozenset({_O.INITIALIZING, _O.SHUTTING_DOWN}),
    _O.INITIALIZING: frozenset({_O.READY, _O.SHUTTING_DOWN}),
    _O.READY: frozenset({_O.RUNNING, _O.DEGRADED, _O.SHUTTING_DOWN}),
    _O.RUNNING: frozenset({_O.DEGRADED, _O.SHUTTING_DOWN}),
    _O.DEGRADED: frozenset({_O.RUNNING, _O.SHUTTING_DOWN}),
    _O.SHUTTING_DOWN: frozenset({_O.TERMINATED}),
    _O.TERMINATED: frozenset(),
}

BEFORE_SHUTDOWN = (_G.IDLE, _G.STARTING, _G.RUNNING)
_SHUTDOWN_ORDER = (_G.DRAIN_DELAY, _G.STOP_INTAKE, _G.FINISH, _G.CANCEL, _G.STOP_DAEMONS, _G.STOPPED)

# A shutdown only ever moves forward, but may skip phases: no drain delay, nothing to cancel, a second signal.
GROUP: Table[GroupState] = {
    _G.IDLE: frozenset({_G.STARTING}),
    _G.STARTING: frozenset({_G.RUNNING, *_SHUTDOWN_ORDER}),
    _G.RUNNING: frozenset(_SHUTDOWN_ORDER),
    **{phase: frozenset(_SHUTDOWN_ORDER[index + 1 :]) for index, phase in enumerate(_SHUTDOWN_ORDER)},
}


class Transition(NamedTuple, Generic[S]):
    """One move of a state machine: ``seconds`` is how long the earlier state had lasted."""

    old: S
    new: S
    at: float
    seconds: float


class StateMachine(Generic[S]):
    """Runs one table. It reads no clock: the caller says when (``anyio.current_time()``)."""

    def __init__(
        self,
        table: Mapping[S, frozenset[S]],
        initial: S,
        *,
        name: str = "",
        now: float = 0.0,
        on_transition: Callable[[Transition[S]], object] | None = None,
    ) -> None:
        self._table = table
        self._name = name
        self._state = initial
        self._since = now
        self._on_transition = on_transition

    @property
    def state(self) -> S:
        """The present state."""
        return self._state

    @property
    def since(self) -> float:
        """The instant at which the present state began."""
        return self._since

    def can(self, new: S) -> bool:
        """True if the table allows a move to ``new`` from here."""
        return new in self._table[self._state]

    def to(self, new: S, now: float) -> Transition[S]:
        """Move to ``new``; raises :class:`InvalidTransitionError` (and stays) where the table does not allow it."""
        if new not in self._table[self._state]:
            allowed = ", ".join(sorted(self._table[self._state])) or "nothing"
            raise InvalidTransitionError(
                f"{self._name or type(new).__name__}: {self._state} -> {new} is not allowed (allowed: {allowed})"
            )
        transition = Transition(self._state, new, now, now - self._since)
        self._state, self._since = new, now
        if self._on_transition is not None:
            self._on_transition(transition)
        return transition
