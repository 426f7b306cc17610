"""Control messages: what a loop can be asked beside its work, each with the ticket on which the answer comes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

from mainspring.errors import InvalidParameterError
from mainspring.runtime.heartbeat import Heartbeat
from mainspring.threads.ticket import Ticket
from mainspring.validation import is_number

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class HealthStatus:
    """How a loop is, as it says itself. Ages are in seconds."""

    name: str
    healthy: bool
    """True if it runs and takes work."""
    reason: str | None = None
    """Why it is not healthy, in one line."""
    answered: bool = True
    """False where it gave no answer in time, or was not running to give one: what follows is then not known."""
    paused: bool = False
    stopping: bool = False
    in_flight: int = 0
    """How much work is in hand."""
    oldest_beat_age: float = 0.0
    """Age of the oldest beat among the work in hand."""
    heartbeat_age: float = math.inf


@dataclass(frozen=True, slots=True)
class ControlMessage(Generic[T]):
    """A question or an order to a :class:`~mainspring.worker.actor.LoopActor`; the answer comes on its ``ticket``.

    One message is told once, to one actor: each has its own ticket.
    """

    ticket: Ticket[T] = field(default_factory=Ticket)


@dataclass(frozen=True, slots=True)
class HealthCheckRequest(ControlMessage[HealthStatus]):
    """How are you? The answer is a :class:`HealthStatus`."""

    ticket: Ticket[HealthStatus] = field(default_factory=partial(Ticket, "health check"))


@dataclass(frozen=True, slots=True)
class PingRequest(ControlMessage[float]):
    """Are you there? The answer is how many seconds passed from the making of the message to its being served."""

    ticket: Ticket[float] = field(default_factory=partial(Ticket, "ping"))
    made: Heartbeat = field(default_factory=Heartbeat, kw_only=True, repr=False)


@dataclass(frozen=True, slots=True)
class PauseRequest(ControlMessage[None]):
    """Take no new work. The answer comes once no receive is open and the backlog is released."""

    ticket: Ticket[None] = field(default_factory=partial(Ticket, "pause"))


@dataclass(frozen=True, slots=True)
class ResumeRequest(ControlMessage[None]):
    """Take new work again."""

    ticket: Ticket[None] = field(default_factory=partial(Ticket, "resume"))


@dataclass(frozen=True, slots=True)
class ConcurrencyRequest(ControlMessage[None]):
    """Run at most ``concurrency`` handlers at once; see :meth:`MainLoop.set_concurrency`. The answer comes once it holds."""

    ticket: Ticket[None] = field(default_factory=partial(Ticket, "concurrency"))
    concurrency: int = field(kw_only=True)


@dataclass(frozen=True, slots=True)
class ShutdownNotice(ControlMessage[None]):
    """The end is near: handlers see it as ``ctx.shutting_down``. Work is taken as before, until a message says otherwise."""

    ticket: Ticket[None] = field(default_factory=partial(Ticket, "shutdown notice"))


@dataclass(frozen=True, slots=True)
class DrainRequest(ControlMessage[bool]):
    """Take no new work, finish what is in hand however long that takes, and end. The answer comes at the end: whether
    all of it ended by itself.

    ``within`` is told to a loop of foreign make: the seconds after which the sender will cancel what is left.
    """

    ticket: Ticket[bool] = field(default_factory=partial(Ticket, "drain"))
    within: float = field(default=math.inf, kw_only=True)


@dataclass(frozen=True, slots=True)
class ShutdownRequest(ControlMessage[bool]):
    """Take no new work and end. The work in hand may take ``timeout`` seconds, and is then cancelled. The whole run is
    cancelled if the work has not ended ``cancel_grace`` seconds later. The answer comes at the end: whether all ended by
    itself.

    Of several requests, the earliest end counts.

    :raises InvalidParameterError: one of the two is no number of seconds (0 or more; ``math.inf``: no limit).
    """

    ticket: Ticket[bool] = field(default_factory=partial(Ticket, "shutdown"))
    timeout: float = field(default=30.0, kw_only=True)
    cancel_grace: float = field(default=5.0, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("timeout", "cancel_grace"):
            if not is_number(value := getattr(self, name), 0, math.inf):
                raise InvalidParameterError(f"ShutdownRequest: {name} must be 0 or more seconds, not {value!r}")
