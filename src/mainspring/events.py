"""Events, as frozen dataclasses. The ``Dispatcher`` (``core.dispatcher``) tells them to subscribers.

Logs, metrics, the dashboard and tests are subscribers; the engine only dispatches. Events carry names and figures, never
live objects, so that a subscriber can keep them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from mainspring.core.clock import utc_now
from mainspring.core.dispatcher import Dispatcher as Dispatcher  # noqa: PLC0414 - public names of this module, too
from mainspring.core.dispatcher import DispatchResult as DispatchResult  # noqa: PLC0414
from mainspring.core.dispatcher import Tally as Tally  # noqa: PLC0414

if TYPE_CHECKING:
    from datetime import datetime

    from mainspring.core.state_machine import GroupState, OrchestratorState, ServiceState


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
    """A handler is about to run. ``handler`` is its name: that of the function, or of the task."""

    loop: str
    message_id: str
    run_id: str
    delivery_count: int
    attempt: int
    handler: str = ""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class MessageFinished(Event):
    """A delivery ended. ``outcome``: acknowledged, retried, postponed (``Retry(charge=False)``, ``nack(charge=False)``),
    released, dead_lettered, kept (a dead letter that stays one), lost (the lease ran out), cancelled (by its id).

    ``seconds`` is how long the handler ran. ``began`` is False if the message was released before its handler began.
    ``charged`` says of a retried one whether the attempt counts, and ``retry_in`` in how many seconds it comes again. Where
    there was an error, ``where`` is the line it came from, and ``error_type`` the name of its class, unless that is Retry,
    Reject or ReplyError, which are instructions. ``queue_seconds`` is the time from the send to the first delivery, a delay
    included; it is None of later deliveries. ``handler`` is the name of the function or of the task; it is empty where a
    message is no call of a task that the worker has.
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
    began: bool = True
    handler: str = ""


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
    """A readiness check passes (``error`` is None) or fails, unlike before.

    ``failed``: it keeps the group from being ready.
    """

    group: str
    check: str
    error: str | None
    failed: bool = False


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class CalibrationWarning(Event):
    """Two timeouts of a group do not fit together; ``text`` says which and what would."""

    group: str
    text: str


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class OrchestratorStateChanged(Event):
    """An orchestrator of services moved to another state; ``seconds`` is how long the old one lasted."""

    orchestrator: str
    old: OrchestratorState
    new: OrchestratorState
    seconds: float


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ServiceStateChanged(Event):
    """A replica of a service moved to another state; ``seconds`` is how long the old one lasted. Replicas count from 1."""

    service: str
    replica: int
    old: ServiceState
    new: ServiceState
    seconds: float


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ServiceProcessStarted(Event):
    """A process of a service was started. It need not be ready."""

    service: str
    replica: int
    pid: int


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ServiceProcessEnded(Event):
    """A process of a service has ended, and nothing is left of it.

    ``ending`` says how, as ``"exit status 1"`` or ``"killed by SIGKILL"``. ``restart_in``: seconds until another one is
    started; None where the replica stays down. ``told``: the supervisor had told it to end. ``restarts``: how many in a row
    this restart makes.
    """

    service: str
    replica: int
    pid: int
    ending: str
    status: int
    restart_in: float | None
    told: bool
    restarts: int


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ServiceStartFailed(Event):
    """A process of a service could not be started, or has not become ready in time.

    ``restart_in`` is as in :class:`ServiceProcessEnded`. ``restarts``: how many failed starts in a row are followed by another
    one, this one counted if it is. ``status``: the exit status of the process; 1 if there was none.
    """

    service: str
    replica: int
    error: str
    restart_in: float | None
    status: int = 1
    restarts: int = 0


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ServiceGivenUp(Event):
    """A replica of a service cannot be kept running, and stays down."""

    service: str
    replica: int
    reason: str
    core: bool


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class RestartsExceeded(Event):
    """All services together were restarted more than ``most`` times within ``period`` seconds, which ends them all.

    ``service`` and ``replica``: what had ended last.
    """

    service: str
    replica: int
    most: int
    period: float


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class AlertSent(Event):
    """An alert has reached a target. ``kind``: what it is about, as ``"service given up"``."""

    target: str
    kind: str
    service: str
    replica: int
    alert_id: str


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class AlertFailed(Event):
    """An alert has not reached a target, and is not tried again; ``error`` says why. Otherwise as :class:`AlertSent`."""

    target: str
    kind: str
    service: str
    replica: int
    alert_id: str
    error: str


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ProbeChanged(Event):
    """The probe of a replica has changed its answer: ``error`` is None where it passes. ``starting``: before it was ready."""

    service: str
    replica: int
    error: str | None
    starting: bool = False


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ProbeAnswered(Event):
    """A probe of a replica was asked: ``error`` is None if it passed. It is made only where it has a subscriber."""

    service: str
    replica: int
    error: str | None


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class HookFailed(Event):
    """A hook of a service has failed, or took too long; ``aborts`` says whether that aborts what was about to happen."""

    service: str
    replica: int
    moment: str
    error: str
    aborts: bool


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ServiceOutput(Event):
    """A line that a process of a service has written to its standard output or standard error."""

    service: str
    replica: int
    stream: str
    line: str


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ServiceNotified(Event):
    """A process of a service has notified its supervisor, as ``sd_notify(3)`` does: ``{"STATUS": "…"}``."""

    service: str
    replica: int
    news: dict[str, str]
