"""Mainspring keeps long-running loops going, and lets them stop.

Names are imported at first use, so that ``import mainspring`` stays quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from mainspring.core.dispatcher import Dispatcher as Dispatcher
    from mainspring.core.state_machine import OrchestratorState as OrchestratorState
    from mainspring.core.state_machine import ServiceState as ServiceState
    from mainspring.errors import BudgetExceededError as BudgetExceededError
    from mainspring.errors import ConfigError as ConfigError
    from mainspring.errors import ControlRefusedError as ControlRefusedError
    from mainspring.errors import DeadlineExceededError as DeadlineExceededError
    from mainspring.errors import HandlerStalledError as HandlerStalledError
    from mainspring.errors import HandlerTimeoutError as HandlerTimeoutError
    from mainspring.errors import InvalidParameterError as InvalidParameterError
    from mainspring.errors import InvalidTransitionError as InvalidTransitionError
    from mainspring.errors import JobNotFoundError as JobNotFoundError
    from mainspring.errors import JobRunningError as JobRunningError
    from mainspring.errors import JournalDamagedError as JournalDamagedError
    from mainspring.errors import JournalError as JournalError
    from mainspring.errors import JournalLockedError as JournalLockedError
    from mainspring.errors import LoopNotRunningError as LoopNotRunningError
    from mainspring.errors import MailboxClosedError as MailboxClosedError
    from mainspring.errors import MailboxConnectionError as MailboxConnectionError
    from mainspring.errors import MailboxError as MailboxError
    from mainspring.errors import MailboxFullError as MailboxFullError
    from mainspring.errors import MainspringError as MainspringError
    from mainspring.errors import MessageSettledError as MessageSettledError
    from mainspring.errors import OffloadClosedError as OffloadClosedError
    from mainspring.errors import OffloadError as OffloadError
    from mainspring.errors import OffloadFullError as OffloadFullError
    from mainspring.errors import OffloadPickleError as OffloadPickleError
    from mainspring.errors import OffloadTimeoutError as OffloadTimeoutError
    from mainspring.errors import OffloadWorkerDiedError as OffloadWorkerDiedError
    from mainspring.errors import OverrideDamagedError as OverrideDamagedError
    from mainspring.errors import OverrideError as OverrideError
    from mainspring.errors import OverrideLockedError as OverrideLockedError
    from mainspring.errors import ReceiptHandleExpiredError as ReceiptHandleExpiredError
    from mainspring.errors import ReducerError as ReducerError
    from mainspring.errors import Reject as Reject
    from mainspring.errors import ReplyError as ReplyError
    from mainspring.errors import ReplyNotAvailableError as ReplyNotAvailableError
    from mainspring.errors import RequestCancelledError as RequestCancelledError
    from mainspring.errors import RequestFailedError as RequestFailedError
    from mainspring.errors import RequestTimeoutError as RequestTimeoutError
    from mainspring.errors import ResultTooLargeError as ResultTooLargeError
    from mainspring.errors import Retry as Retry
    from mainspring.errors import ScheduleNotFoundError as ScheduleNotFoundError
    from mainspring.errors import SerializationError as SerializationError
    from mainspring.errors import ServiceNotFoundError as ServiceNotFoundError
    from mainspring.errors import ServiceNotRunningError as ServiceNotRunningError
    from mainspring.errors import SessionClosedError as SessionClosedError
    from mainspring.errors import SessionError as SessionError
    from mainspring.errors import SessionFullError as SessionFullError
    from mainspring.errors import TaskExitError as TaskExitError
    from mainspring.errors import TicketAbandonedError as TicketAbandonedError
    from mainspring.errors import TicketAlreadyCompletedError as TicketAlreadyCompletedError
    from mainspring.errors import TicketTimeoutError as TicketTimeoutError
    from mainspring.errors import TransactionEndedError as TransactionEndedError
    from mainspring.errors import UnknownEventError as UnknownEventError
    from mainspring.errors import UnknownTaskError as UnknownTaskError
    from mainspring.errors import UnknownVersionError as UnknownVersionError
    from mainspring.errors import WrongEventLoopError as WrongEventLoopError
    from mainspring.group.group import LoopGroup as LoopGroup
    from mainspring.mailbox.backend import Backend as Backend
    from mainspring.mailbox.backend import Capabilities as Capabilities
    from mainspring.mailbox.backend import MailboxStatistics as MailboxStatistics
    from mainspring.mailbox.jobs import JobProgress as JobProgress
    from mainspring.mailbox.jobs import JobState as JobState
    from mainspring.mailbox.jobs import JobStatus as JobStatus
    from mainspring.mailbox.limiters import LimitState as LimitState
    from mainspring.mailbox.mailbox import Mailbox as Mailbox
    from mainspring.mailbox.memory.mailbox import InMemoryMailbox as InMemoryMailbox
    from mainspring.mailbox.message import CancelOutcome as CancelOutcome
    from mainspring.mailbox.message import DeadLetter as DeadLetter
    from mainspring.mailbox.message import Message as Message
    from mainspring.mailbox.open import open_mailbox as open_mailbox
    from mainspring.mailbox.requests import PendingReply as PendingReply
    from mainspring.mailbox.workers import WorkerState as WorkerState
    from mainspring.mailbox.workers import WorkerStatus as WorkerStatus
    from mainspring.offload.pool import OffloadPool as OffloadPool
    from mainspring.policies import DeadLetterPolicy as DeadLetterPolicy
    from mainspring.policies import LeasePolicy as LeasePolicy
    from mainspring.policies import Rate as Rate
    from mainspring.policies import RestartPolicy as RestartPolicy
    from mainspring.policies import RetryPolicy as RetryPolicy
    from mainspring.runtime.deadline import Deadline as Deadline
    from mainspring.runtime.heartbeat import Heartbeat as Heartbeat
    from mainspring.runtime.scope import DaemonScope as DaemonScope
    from mainspring.runtime.shutdown_report import ShutdownReport as ShutdownReport
    from mainspring.runtime.signals import ShutdownCoordinator as ShutdownCoordinator
    from mainspring.services.alerts import Alert as Alert
    from mainspring.services.alerts import AlertCommand as AlertCommand
    from mainspring.services.alerts import AlertKind as AlertKind
    from mainspring.services.alerts import Webhook as Webhook
    from mainspring.services.orchestrator import Orchestrator as Orchestrator
    from mainspring.services.report import OrchestratorReport as OrchestratorReport
    from mainspring.services.restarts import RestartType as RestartType
    from mainspring.services.spec import ExecProbe as ExecProbe
    from mainspring.services.spec import GrpcProbe as GrpcProbe
    from mainspring.services.spec import HealthCheckSettings as HealthCheckSettings
    from mainspring.services.spec import Hook as Hook
    from mainspring.services.spec import HookMoment as HookMoment
    from mainspring.services.spec import HookSettings as HookSettings
    from mainspring.services.spec import HttpProbe as HttpProbe
    from mainspring.services.spec import Lifecycle as Lifecycle
    from mainspring.services.spec import Replacement as Replacement
    from mainspring.services.spec import Resources as Resources
    from mainspring.services.spec import ServiceSpec as ServiceSpec
    from mainspring.services.spec import ShutdownSettings as ShutdownSettings
    from mainspring.services.spec import StartupSettings as StartupSettings
    from mainspring.services.spec import Strategy as Strategy
    from mainspring.services.spec import TcpProbe as TcpProbe
    from mainspring.services.status import OrchestratorStatus as OrchestratorStatus
    from mainspring.services.status import ReplicaStatus as ReplicaStatus
    from mainspring.services.status import ServiceStatus as ServiceStatus
    from mainspring.state.budget import Budget as Budget
    from mainspring.state.budget import BudgetTracker as BudgetTracker
    from mainspring.state.overrides import Overrides as Overrides
    from mainspring.state.overrides import OverrideVersion as OverrideVersion
    from mainspring.state.session.session import Session as Session
    from mainspring.state.session.snapshot import Snapshot as Snapshot
    from mainspring.tasks.chain_runs import ChainJob as ChainJob
    from mainspring.tasks.chain_runs import ChainStatus as ChainStatus
    from mainspring.tasks.chains import Chain as Chain
    from mainspring.tasks.chains import chain as chain
    from mainspring.tasks.chains import parallel as parallel
    from mainspring.tasks.dependencies import CallArgument as CallArgument
    from mainspring.tasks.dependencies import Depends as Depends
    from mainspring.tasks.dependencies import Provided as Provided
    from mainspring.tasks.job import Job as Job
    from mainspring.tasks.registry import TaskRouter as TaskRouter
    from mainspring.tasks.schedules import Schedule as Schedule
    from mainspring.tasks.schedules import ScheduleStatus as ScheduleStatus
    from mainspring.tasks.task import Task as Task
    from mainspring.tasks.tasks import Tasks as Tasks
    from mainspring.threads.loop_thread import LoopThread as LoopThread
    from mainspring.threads.ticket import Ticket as Ticket
    from mainspring.threads.ticket import TicketWriter as TicketWriter
    from mainspring.watchdog.watchdog import HeartbeatSubject as HeartbeatSubject
    from mainspring.watchdog.watchdog import Watchdog as Watchdog
    from mainspring.worker.actor import LoopActor as LoopActor
    from mainspring.worker.actor import check_health as check_health
    from mainspring.worker.context import Context as Context
    from mainspring.worker.control import ConcurrencyRequest as ConcurrencyRequest
    from mainspring.worker.control import ControlMessage as ControlMessage
    from mainspring.worker.control import DrainRequest as DrainRequest
    from mainspring.worker.control import HealthCheckRequest as HealthCheckRequest
    from mainspring.worker.control import HealthStatus as HealthStatus
    from mainspring.worker.control import PauseRequest as PauseRequest
    from mainspring.worker.control import PingRequest as PingRequest
    from mainspring.worker.control import ResumeRequest as ResumeRequest
    from mainspring.worker.control import ShutdownRequest as ShutdownRequest
    from mainspring.worker.dead_letter_consumer import DeadLetterConsumer as DeadLetterConsumer
    from mainspring.worker.dead_letter_consumer import DLQConsumer as DLQConsumer
    from mainspring.worker.dead_letter_consumer import Verdict as Verdict
    from mainspring.worker.main_loop import MainLoop as MainLoop
    from mainspring.worker.middleware import Middleware as Middleware
    from mainspring.worker.runnable import Runnable as Runnable
    from mainspring.worker.tool_calls import ToolCall as ToolCall

_HOMES = {
    "state.budget": ("Budget", "BudgetTracker"),
    "worker.control": (
        "ConcurrencyRequest", "ControlMessage", "DrainRequest", "HealthCheckRequest", "HealthStatus", "PauseRequest",
        "PingRequest", "ResumeRequest", "ShutdownRequest",
    ),
    "errors": (
        "ConfigError", "ControlRefusedError", "HandlerStalledError", "HandlerTimeoutError", "InvalidParameterError",
        "InvalidTransitionError", "JobNotFoundError", "JobRunningError", "LoopNotRunningError", "MailboxClosedError",
        "MailboxConnectionError",
        "MailboxError", "MailboxFullError", "MainspringError", "MessageSettledError", "OffloadClosedError",
        "OffloadError", "OffloadFullError",
        "OffloadPickleError", "OffloadTimeoutError", "OffloadWorkerDiedError", "ReceiptHandleExpiredError", "Reject",
        "ReplyError", "ReplyNotAvailableError", "RequestCancelledError", "RequestFailedError", "RequestTimeoutError",
        "ResultTooLargeError", "Retry",
        "ScheduleNotFoundError", "SerializationError", "ServiceNotFoundError", "ServiceNotRunningError",
        "TaskExitError", "TicketAbandonedError", "TicketAlreadyCompletedError",
        "TicketTimeoutError", "TransactionEndedError",
        "BudgetExceededError", "DeadlineExceededError", "JournalDamagedError", "JournalError", "JournalLockedError",
        "OverrideDamagedError", "OverrideError", "OverrideLockedError", "ReducerError", "SessionClosedError",
        "SessionError", "SessionFullError", "UnknownEventError", "UnknownTaskError", "UnknownVersionError",
        "WrongEventLoopError",
    ),
    "runtime.deadline": ("Deadline",),
    "core.dispatcher": ("Dispatcher",),
    "group.group": ("LoopGroup",),
    "runtime.heartbeat": ("Heartbeat",),
    "worker.actor": ("LoopActor", "check_health"),
    "worker.middleware": ("Middleware",),
    "worker.runnable": ("Runnable",),
    "worker.context": ("Context",),
    "worker.dead_letter_consumer": ("DLQConsumer", "DeadLetterConsumer", "Verdict"),
    "worker.main_loop": ("MainLoop",),
    "worker.tool_calls": ("ToolCall",),
    "mailbox.backend": ("Backend", "Capabilities", "MailboxStatistics"),
    "mailbox.jobs": ("JobProgress", "JobState", "JobStatus"),
    "mailbox.limiters": ("LimitState",),
    "mailbox.workers": ("WorkerState", "WorkerStatus"),
    "mailbox.mailbox": ("Mailbox",),
    "mailbox.memory.mailbox": ("InMemoryMailbox",),
    "mailbox.message": ("CancelOutcome", "DeadLetter", "Message"),
    "mailbox.open": ("open_mailbox",),
    "mailbox.requests": ("PendingReply",),
    "offload.pool": ("OffloadPool",),
    "state.overrides": ("OverrideVersion", "Overrides"),
    "policies": ("DeadLetterPolicy", "LeasePolicy", "Rate", "RestartPolicy", "RetryPolicy"),
    "tasks.chain_runs": ("ChainJob", "ChainStatus"),
    "tasks.chains": ("Chain", "chain", "parallel"),
    "tasks.dependencies": ("CallArgument", "Depends", "Provided"),
    "tasks.job": ("Job",),
    "tasks.schedules": ("Schedule", "ScheduleStatus"),
    "tasks.task": ("Task",),
    "tasks.registry": ("TaskRouter",),
    "tasks.tasks": ("Tasks",),
    "threads.loop_thread": ("LoopThread",),
    "runtime.shutdown_report": ("ShutdownReport",),
    "runtime.scope": ("DaemonScope",),
    "state.session.session": ("Session",),
    "state.session.snapshot": ("Snapshot",),
    "runtime.signals": ("ShutdownCoordinator",),
    "core.state_machine": ("OrchestratorState", "ServiceState"),
    "services.alerts": ("Alert", "AlertCommand", "AlertKind", "Webhook"),
    "services.orchestrator": ("Orchestrator",),
    "services.report": ("OrchestratorReport",),
    "services.restarts": ("RestartType",),
    "services.spec": (
        "ExecProbe", "GrpcProbe", "HealthCheckSettings", "Hook", "HookMoment", "HookSettings", "HttpProbe", "Lifecycle",
        "Replacement", "Resources", "ServiceSpec", "ShutdownSettings", "StartupSettings", "Strategy", "TcpProbe",
    ),
    "services.status": ("OrchestratorStatus", "ReplicaStatus", "ServiceStatus"),
    "threads.ticket": ("Ticket", "TicketWriter"),
    "watchdog.watchdog": ("HeartbeatSubject", "Watchdog"),
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
