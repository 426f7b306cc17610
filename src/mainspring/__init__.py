"""Mainspring keeps long-running loops going, and lets them stop.

Names are imported at first use, so that ``import mainspring`` stays quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from mainspring.budget import (
        Budget as Budget,
    )
    from mainspring.budget import (
        BudgetTracker as BudgetTracker,
    )
    from mainspring.control import (
        ControlMessage as ControlMessage,
    )
    from mainspring.control import (
        DrainRequest as DrainRequest,
    )
    from mainspring.control import (
        HealthCheckRequest as HealthCheckRequest,
    )
    from mainspring.control import (
        HealthStatus as HealthStatus,
    )
    from mainspring.control import (
        PauseRequest as PauseRequest,
    )
    from mainspring.control import (
        PingRequest as PingRequest,
    )
    from mainspring.control import (
        ResumeRequest as ResumeRequest,
    )
    from mainspring.control import (
        ShutdownRequest as ShutdownRequest,
    )
    from mainspring.deadline import (
        Deadline as Deadline,
    )
    from mainspring.errors import (
        BudgetExceededError as BudgetExceededError,
    )
    from mainspring.errors import (
        ConfigError as ConfigError,
    )
    from mainspring.errors import (
        ControlRefusedError as ControlRefusedError,
    )
    from mainspring.errors import (
        DeadlineExceededError as DeadlineExceededError,
    )
    from mainspring.errors import (
        HandlerStalledError as HandlerStalledError,
    )
    from mainspring.errors import (
        HandlerTimeoutError as HandlerTimeoutError,
    )
    from mainspring.errors import (
        InvalidParameterError as InvalidParameterError,
    )
    from mainspring.errors import (
        InvalidTransitionError as InvalidTransitionError,
    )
    from mainspring.errors import (
        JournalDamagedError as JournalDamagedError,
    )
    from mainspring.errors import (
        JournalError as JournalError,
    )
    from mainspring.errors import (
        JournalLockedError as JournalLockedError,
    )
    from mainspring.errors import (
        LoopNotRunningError as LoopNotRunningError,
    )
    from mainspring.errors import (
        MailboxClosedError as MailboxClosedError,
    )
    from mainspring.errors import (
        MailboxConnectionError as MailboxConnectionError,
    )
    from mainspring.errors import (
        MailboxError as MailboxError,
    )
    from mainspring.errors import (
        MailboxFullError as MailboxFullError,
    )
    from mainspring.errors import (
        MainspringError as MainspringError,
    )
    from mainspring.errors import (
        MessageSettledError as MessageSettledError,
    )
    from mainspring.errors import (
        OffloadClosedError as OffloadClosedError,
    )
    from mainspring.errors import (
        OffloadError as OffloadError,
    )
    from mainspring.errors import (
        OffloadFullError as OffloadFullError,
    )
    from mainspring.errors import (
        OffloadPickleError as OffloadPickleError,
    )
    from mainspring.errors import (
        OffloadTimeoutError as OffloadTimeoutError,
    )
    from mainspring.errors import (
        OffloadWorkerDiedError as OffloadWorkerDiedError,
    )
    from mainspring.errors import (
        OverrideDamagedError as OverrideDamagedError,
    )
    from mainspring.errors import (
        OverrideError as OverrideError,
    )
    from mainspring.errors import (
        OverrideLockedError as OverrideLockedError,
    )
    from mainspring.errors import (
        ReceiptHandleExpiredError as ReceiptHandleExpiredError,
    )
    from mainspring.errors import (
        ReducerError as ReducerError,
    )
    from mainspring.errors import (
        Reject as Reject,
    )
    from mainspring.errors import (
        ReplyError as ReplyError,
    )
    from mainspring.errors import (
        ReplyNotAvailableError as ReplyNotAvailableError,
    )
    from mainspring.errors import (
        RequestCancelledError as RequestCancelledError,
    )
    from mainspring.errors import (
        RequestFailedError as RequestFailedError,
    )
    from mainspring.errors import (
        RequestTimeoutError as RequestTimeoutError,
    )
    from mainspring.errors import (
        Retry as Retry,
    )
    from mainspring.errors import (
        SerializationError as SerializationError,
    )
    from mainspring.errors import (
        SessionClosedError as SessionClosedError,
    )
    from mainspring.errors import (
        SessionError as SessionError,
    )
    from mainspring.errors import (
        SessionFullError as SessionFullError,
    )
    from mainspring.errors import (
        TaskExitError as TaskExitError,
    )
    from mainspring.errors import (
        TicketAbandonedError as TicketAbandonedError,
    )
    from mainspring.errors import (
        TicketAlreadyCompletedError as TicketAlreadyCompletedError,
    )
    from mainspring.errors import (
        TicketTimeoutError as TicketTimeoutError,
    )
    from mainspring.errors import (
        TransactionEndedError as TransactionEndedError,
    )
    from mainspring.errors import (
        UnknownEventError as UnknownEventError,
    )
    from mainspring.errors import (
        UnknownVersionError as UnknownVersionError,
    )
    from mainspring.events import Dispatcher as Dispatcher
    from mainspring.group import LoopGroup as LoopGroup
    from mainspring.heartbeat import Heartbeat as Heartbeat
    from mainspring.loops.actor import (
        LoopActor as LoopActor,
    )
    from mainspring.loops.actor import (
        check_health as check_health,
    )
    from mainspring.loops.base import Runnable as Runnable
    from mainspring.loops.context import Context as Context
    from mainspring.loops.dead_letters import (
        DeadLetterConsumer as DeadLetterConsumer,
    )
    from mainspring.loops.dead_letters import (
        DLQConsumer as DLQConsumer,
    )
    from mainspring.loops.dead_letters import (
        Verdict as Verdict,
    )
    from mainspring.loops.main import MainLoop as MainLoop
    from mainspring.loops.tool_calls import ToolCall as ToolCall
    from mainspring.mailbox.base import (
        Capabilities as Capabilities,
    )
    from mainspring.mailbox.base import (
        Mailbox as Mailbox,
    )
    from mainspring.mailbox.memory import InMemoryMailbox as InMemoryMailbox
    from mainspring.mailbox.message import (
        CancelOutcome as CancelOutcome,
    )
    from mainspring.mailbox.message import (
        DeadLetter as DeadLetter,
    )
    from mainspring.mailbox.message import (
        Message as Message,
    )
    from mainspring.mailbox.open import open_mailbox as open_mailbox
    from mainspring.mailbox.requests import PendingReply as PendingReply
    from mainspring.offload import OffloadPool as OffloadPool
    from mainspring.overrides import (
        Overrides as Overrides,
    )
    from mainspring.overrides import (
        OverrideVersion as OverrideVersion,
    )
    from mainspring.policies import (
        DeadLetterPolicy as DeadLetterPolicy,
    )
    from mainspring.policies import (
        LeasePolicy as LeasePolicy,
    )
    from mainspring.policies import (
        RestartPolicy as RestartPolicy,
    )
    from mainspring.policies import (
        RetryPolicy as RetryPolicy,
    )
    from mainspring.portal import LoopThread as LoopThread
    from mainspring.report import ShutdownReport as ShutdownReport
    from mainspring.scope import DaemonScope as DaemonScope
    from mainspring.session.session import (
        Session as Session,
    )
    from mainspring.session.snapshot import (
        Snapshot as Snapshot,
    )
    from mainspring.signals import ShutdownCoordinator as ShutdownCoordinator
    from mainspring.states import ServiceState as ServiceState
    from mainspring.ticket import (
        Ticket as Ticket,
    )
    from mainspring.ticket import (
        TicketWriter as TicketWriter,
    )
    from mainspring.watchdog import (
        HeartbeatSubject as HeartbeatSubject,
    )
    from mainspring.watchdog import (
        Watchdog as Watchdog,
    )

_HOMES = {
    "budget": ("Budget", "BudgetTracker"),
    "control": (
        "ControlMessage", "DrainRequest", "HealthCheckRequest", "HealthStatus", "PauseRequest", "PingRequest",
        "ResumeRequest", "ShutdownRequest",
    ),
    "errors": (
        "ConfigError", "ControlRefusedError", "HandlerStalledError", "HandlerTimeoutError", "InvalidParameterError",
        "InvalidTransitionError", "LoopNotRunningError", "MailboxClosedError", "MailboxConnectionError",
        "MailboxError", "MailboxFullError", "MainspringError", "MessageSettledError", "OffloadClosedError",
        "OffloadError", "OffloadFullError",
        "OffloadPickleError", "OffloadTimeoutError", "OffloadWorkerDiedError", "ReceiptHandleExpiredError", "Reject",
        "ReplyError", "ReplyNotAvailableError", "RequestCancelledError", "RequestFailedError", "RequestTimeoutError", "Retry",
        "SerializationError", "TaskExitError", "TicketAbandonedError", "TicketAlreadyCompletedError",
        "TicketTimeoutError", "TransactionEndedError",
        "BudgetExceededError", "DeadlineExceededError", "JournalDamagedError", "JournalError", "JournalLockedError",
        "OverrideDamagedError", "OverrideError", "OverrideLockedError", "ReducerError", "SessionClosedError",
        "SessionError", "SessionFullError", "UnknownEventError", "UnknownVersionError",
    ),
    "deadline": ("Deadline",),
    "events": ("Dispatcher",),
    "group": ("LoopGroup",),
    "heartbeat": ("Heartbeat",),
    "loops.actor": ("LoopActor", "check_health"),
    "loops.base": ("Runnable",),
    "loops.context": ("Context",),
    "loops.dead_letters": ("DLQConsumer", "DeadLetterConsumer", "Verdict"),
    "loops.main": ("MainLoop",),
    "loops.tool_calls": ("ToolCall",),
    "mailbox.base": ("Capabilities", "Mailbox"),
    "mailbox.memory": ("InMemoryMailbox",),
    "mailbox.message": ("CancelOutcome", "DeadLetter", "Message"),
    "mailbox.open": ("open_mailbox",),
    "mailbox.requests": ("PendingReply",),
    "offload": ("OffloadPool",),
    "overrides": ("OverrideVersion", "Overrides"),
    "policies": ("DeadLetterPolicy", "LeasePolicy", "RestartPolicy", "RetryPolicy"),
    "portal": ("LoopThread",),
    "report": ("ShutdownReport",),
    "scope": ("DaemonScope",),
    "session.session": ("Session",),
    "session.snapshot": ("Snapshot",),
    "signals": ("ShutdownCoordinator",),
    "states": ("ServiceState",),
    "ticket": ("Ticket", "TicketWriter"),
    "watchdog": ("HeartbeatSubject", "Watchdog"),
}  # fmt: skip
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted([*_HOME_OF, "__version__"])  # noqa: PLE0605 - derived, so that it cannot fall behind


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'mainspring' has no attribute {name!r}")
    value = getattr(import_module(f"mainspring.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
