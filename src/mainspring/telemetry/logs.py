"""Events as log lines: a subscriber for every group, and the handler of the command line.

Loggers: ``mainspring.group`` (life of a group, its checks), ``mainspring.loop`` (life of its loops, their mailboxes),
``mainspring.message`` (single messages) and ``mainspring.service`` (life of an orchestrator and its services, their probes and
hooks). Each record carries its event as ``record.event``. What services write is none of it: the command line prints that.

=========  =============================================================================================
level      what
=========  =============================================================================================
CRITICAL   a handler that does not end although cancelled: the process is about to be killed
ERROR      a crash, a stall, a dead letter, a run that did not end clean, a service that was given up
WARNING    what is tried again or mends itself: retries, lost leases, an unreachable mailbox, a failing check or probe
INFO       the life of groups, loops and services, messages whose handlers a shutdown has ended
DEBUG      each message that starts, succeeds, is postponed or released before it began, the short-lived states, the
           further tries at a mailbox
=========  =============================================================================================
"""

from __future__ import annotations

import json as jsonlib
import logging
import sys
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from mainspring import events
from mainspring.core.clock import local_time
from mainspring.core.loggers import Logger
from mainspring.core.state_machine import GroupState, OrchestratorState, ServiceState
from mainspring.core.tracebacks import where_raised
from mainspring.errors import ConfigError
from mainspring.redaction import one_line
from mainspring.telemetry.plain import plain
from mainspring.validation import counted

if TYPE_CHECKING:
    from collections.abc import Callable

LEVELS: Final = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")

_group = Logger("mainspring.group")
_loop = Logger("mainspring.loop")
_message = Logger("mainspring.message")
_service = Logger("mainspring.service")

_STATE_LEVELS = {
    ServiceState.RUNNING: logging.INFO,
    ServiceState.STOPPING: logging.INFO,
    ServiceState.STOPPED: logging.INFO,
    ServiceState.DEGRADED: logging.WARNING,
    ServiceState.RESTARTING: logging.WARNING,
}

_PLAIN_LINES: dict[type[Any], tuple[Logger, int, str]] = {
    events.MessageStarted: (
        _message, logging.DEBUG,
        "message {0.message_id} started (delivery {0.delivery_count}, attempt {0.attempt})",
    ),
    events.SettlementFailed: (
        _message, logging.WARNING,
        "message {0.message_id} could not be {0.outcome} and will come again: {0.error}",
    ),
    events.SettlementDelayed: (
        _message, logging.WARNING,
        "message {0.message_id} could not be {0.outcome} yet, next try in {0.retry_in:.1f} s: {0.error}",
    ),
    events.SettlementRecovered: (
        _message, logging.INFO,
        "the mailbox answers again after {0.failures} outcomes that could not be written",
    ),
    events.LeaseRenewalFailed: (
        _message, logging.WARNING,
        "renewing the lease of message {0.message_id} failed, trusted for {0.trusted_for:.1f} s more: {0.error}",
    ),
    events.LeaseRenewalRecovered: (
        _message, logging.INFO,
        "the mailbox answers again after {0.failures} failed renewals of leases",
    ),
    events.LeaseLost: (
        _message, logging.WARNING, "the lease of message {0.message_id} is lost; its handler is cancelled"
    ),
    events.ReceiveFailed: (
        _loop, logging.WARNING, "the mailbox cannot be reached, next try in {0.retry_in:.1f} s: {0.error}"
    ),
    events.ReceiveRecovered: (
        _loop, logging.INFO, "the mailbox answers again after {0.failures} failed receives"
    ),
    events.ShutdownRequested: (_group, logging.INFO, "shutdown requested: {0.reason}"),
    events.GroupPaused: (_group, logging.WARNING, "paused, it takes no new work: {0.reason}"),
    events.GroupResumed: (_group, logging.INFO, "resumed: {0.reason}"),
    events.CalibrationWarning: (_group, logging.WARNING, "{0.text}"),
    events.ServiceProcessStarted: (_service, logging.DEBUG, "process {0.pid} started"),
}  # fmt: skip
"""The events whose lines need no decision. Of repeated events, all but the first are logged at DEBUG."""

_COMES_AND_GOES = (
    events.LoopStateChanged,
    events.ReceiveFailed,
    events.ReceiveRecovered,
    events.LeaseRenewalFailed,
    events.LeaseRenewalRecovered,
    events.SettlementDelayed,
    events.SettlementRecovered,
)
STORM = 12
"""The most lines logged of a loop whose mailbox comes and goes, until it has been steady for :data:`CALM` seconds."""
CALM = 60.0


class _Storms:
    """How many lines of trouble each loop has had, and when the last one came."""

    def __init__(self) -> None:
        self._lines: dict[str, tuple[int, datetime]] = {}

    def calmed(self, write: Callable[[Any], None]) -> Callable[[Any], None]:
        """Return a writer that leaves off in a storm, unless DEBUG asks for every line."""

        def write_or_not(event: Any) -> None:
            if not _is_trouble(event) or _loop.isEnabledFor(logging.DEBUG) or (count := self._count(event)) <= STORM:
                write(event)
            elif count == STORM + 1:
                text = f"its mailbox comes and goes; until that has been over for {CALM:g} s, only DEBUG says more"
                _say(_loop, logging.WARNING, event, text)

        return write_or_not

    def _count(self, event: Any) -> int:
        count, last = self._lines.get(event.loop, (0, event.at))
        count = 1 if (event.at - last).total_seconds() > CALM else count + 1
        self._lines[event.loop] = (count, event.at)
        return count


def _is_trouble(event: Any) -> bool:
    if isinstance(event, events.LoopStateChanged):
        return event.new is ServiceState.DEGRADED or event.old is ServiceState.DEGRADED
    return bool(getattr(event, "first", True))


def subscribe(dispatcher: events.Dispatcher) -> Callable[[], None]:
    """Log what ``dispatcher`` tells from now on. Return a function that ends this.

    The starts and successes of messages are subscribed to only if ``mainspring.message`` is enabled for DEBUG at this moment,
    their failures only if it is for ERROR. Otherwise the loops do not build such events.
    """
    writers: dict[type[Any], Callable[[Any], None]] = {
        **dict.fromkeys(_PLAIN_LINES, _plain_line),
        events.LoopStateChanged: _loop_state,
        events.LoopCrashed: _crashed,
        events.MessageFinished: _finished,
        events.HandlerStalled: _stalled,
        events.HandlerStuck: _stuck,
        events.GroupStateChanged: _group_state,
        events.GroupStopped: _group_stopped,
        events.CheckChanged: _check,
        events.OrchestratorStateChanged: _orchestrator_state,
        events.ServiceStateChanged: _service_state,
        events.ServiceProcessEnded: _process_ended,
        events.ServiceStartFailed: _start_failed,
        events.ServiceGivenUp: _given_up,
        events.RestartsExceeded: _restarts_exceeded,
        events.AlertSent: _alert_sent,
        events.AlertFailed: _alert_failed,
        events.ProbeChanged: _probe,
        events.HookFailed: _hook_failed,
    }
    if not _message.isEnabledFor(logging.DEBUG):
        del writers[events.MessageStarted]
        writers[events.MessageNotAcknowledged] = writers.pop(events.MessageFinished)
    if not _message.isEnabledFor(logging.ERROR):
        del writers[events.MessageNotAcknowledged]
    storms = _Storms()
    for kind in _COMES_AND_GOES:
        writers[kind] = storms.calmed(writers[kind])
    ends = [dispatcher.subscribe(kind, writer) for kind, writer in writers.items()]

    def unsubscribe() -> None:
        for end in ends:
            end()

    return unsubscribe


def _plain_line(event: Any) -> None:
    logger, level, text = _PLAIN_LINES[type(event)]
    _say(logger, level if getattr(event, "first", True) else logging.DEBUG, event, text.format(event))


def _finished(event: events.MessageFinished) -> None:
    outcome = event.outcome
    again = "" if event.retry_in is None else f" in {event.retry_in:.1f} s"
    if outcome == "acknowledged":
        level, said = logging.DEBUG, "done"
    elif outcome == "dead_lettered":
        level, said = logging.ERROR, f"dead-lettered after attempt {event.attempt}"
    elif outcome == "postponed":
        level, said = logging.DEBUG, f"postponed, to come again{again}"
    elif outcome == "retried" and not event.charged:
        level, said = logging.INFO, f"to be tried again{again}, not counted"
    elif outcome == "retried":
        level, said = logging.WARNING, f"attempt {event.attempt} failed, to be tried again{again}"
    elif outcome == "released" and not event.began:  # as many as were claimed ahead, whenever a handler is slow
        level, said = logging.DEBUG, "released before it began"
    elif outcome == "released":
        level, said = logging.INFO, "released"
    elif outcome == "kept":
        level, said = logging.INFO, "stays among the dead letters"
    elif outcome == "cancelled":
        level, said = logging.INFO, "was cancelled by its id"
    else:
        level, said = logging.WARNING, f"{outcome}: another worker may have it now" if outcome == "lost" else outcome
    error = f": {event.error}{_at(event.where)}" if event.error else ""
    _say(_message, level, event, f"{_called(event)} {said} (ran {event.seconds:.3f} s){error}")


def _called(event: events.MessageFinished) -> str:
    """Return the message and, where the loop is not called as its handler, the handler."""
    named = event.handler and event.handler != event.loop
    return f"message {event.message_id} of {event.handler}" if named else f"message {event.message_id}"


def _stalled(event: events.HandlerStalled) -> None:
    what = f"message {event.message_id} gave no beat for" if event.message_id else "no sign of life for"
    which = "its handler" if event.message_id else "it"
    text = f"{what} {event.age:.1f} s; {which} is cancelled{_at(event.where)}"
    _say(_message if event.message_id else _loop, logging.ERROR, event, text)


def _stuck(event: events.HandlerStuck) -> None:
    who = f"the handler of message {event.message_id}" if event.message_id else "it"
    text = (
        f"{who} does not end although it was cancelled (no beat for {event.age:.1f} s); the process will be"
        f" killed{_at(event.where)}"
    )
    _say(_message if event.message_id else _loop, logging.CRITICAL, event, text)


def _loop_state(event: events.LoopStateChanged) -> None:
    text = f"{event.new} ({event.old} for {event.seconds:.3f} s)"
    _say(_loop, _STATE_LEVELS.get(event.new, logging.DEBUG), event, text)


def _crashed(event: events.LoopCrashed) -> None:
    error = event.error
    then = "it stays down" if event.restart_in is None else f"restart in {event.restart_in:.1f} s"
    # An error that stays down surfaces from run() with its traceback; one that is restarted is seen nowhere but here.
    shown = error if event.restart_in is not None or _loop.isEnabledFor(logging.DEBUG) else None
    text = f"crashed, {then}: {type(error).__name__}: {error}{_at(where_raised(error))}"
    _say(_loop, logging.ERROR, event, text, shown)


def _group_state(event: events.GroupStateChanged) -> None:
    level = logging.DEBUG if event.new is GroupState.STARTING else logging.INFO
    text = f"{event.new} ({event.old} for {event.seconds:.3f} s)"
    if event.in_flight:
        limit = "without a limit" if event.timeout is None else f"for at most {event.timeout:.3g} s"
        text += f": waits for {counted(event.in_flight, 'message')} in hand {limit}"
    _say(_group, level, event, text)


def _group_stopped(event: events.GroupStopped) -> None:
    level = logging.INFO if event.exit_status == 0 else logging.ERROR
    report = " | ".join(line.strip() for line in event.report.splitlines())
    _say(_group, level, event, f"ended with exit status {event.exit_status}: {report}")


def _check(event: events.CheckChanged) -> None:
    if event.error is None:
        _say(_group, logging.INFO, event, f"check {event.check} passes")
    else:
        how = "has failed, and the group is not ready" if event.failed else "fails"
        _say(_group, logging.WARNING, event, f"check {event.check} {how}: {event.error}")


def _orchestrator_state(event: events.OrchestratorStateChanged) -> None:
    level = logging.WARNING if event.new is OrchestratorState.DEGRADED else logging.INFO
    level = logging.DEBUG if event.new is OrchestratorState.INITIALIZING else level
    _say(_service, level, event, f"{event.new} ({event.old} for {event.seconds:.3f} s)")


def _service_state(event: events.ServiceStateChanged) -> None:
    level = _STATE_LEVELS.get(event.new, logging.DEBUG)
    if event.new is ServiceState.RESTARTING:  # its end or its failed start has a line that says why
        level = logging.DEBUG
    _say(_service, level, event, f"{event.new} ({event.old} for {event.seconds:.3f} s)")


def _process_ended(event: events.ServiceProcessEnded) -> None:
    what = f"process {event.pid} ended: {event.ending}"
    if event.restart_in is not None:
        count = f" (restart {event.restarts} in a row)" if event.restarts else ""
        level = logging.INFO if event.told else logging.WARNING
        _say(_service, level, event, f"{what}; restart in {event.restart_in:.1f} s{count}")
        return
    level = logging.INFO if event.told or not event.status else logging.ERROR
    _say(_service, level, event, f"{what}; it stays down")


def _start_failed(event: events.ServiceStartFailed) -> None:
    then = "it stays down" if event.restart_in is None else f"next try in {event.restart_in:.1f} s"
    level = logging.ERROR if event.restart_in is None else logging.WARNING
    _say(_service, level, event, f"start failed, {then}: {event.error}")


def _given_up(event: events.ServiceGivenUp) -> None:
    kind = "core service" if event.core else "optional service"
    _say(_service, logging.ERROR, event, f"given up ({kind}): {event.reason}")


def _restarts_exceeded(event: events.RestartsExceeded) -> None:
    text = (
        f"ended, which makes more than {event.most} restarts of all services in {event.period:g} s; stopping them all"
    )
    _say(_service, logging.ERROR, event, text)


def _alert_sent(event: events.AlertSent) -> None:
    _say(_service, logging.INFO, event, f"alert ({event.kind}) was sent to {event.target}")


def _alert_failed(event: events.AlertFailed) -> None:
    _say(_service, logging.ERROR, event, f"alert ({event.kind}) did not reach {event.target}: {event.error}")


def _probe(event: events.ProbeChanged) -> None:
    if event.error is None:
        _say(_service, logging.INFO, event, "probe passes")
    elif event.starting:
        _say(_service, logging.INFO, event, f"not ready yet: {event.error}")
    else:
        _say(_service, logging.WARNING, event, f"probe fails: {event.error}")


def _hook_failed(event: events.HookFailed) -> None:
    level, then = (logging.ERROR, "which aborts that") if event.aborts else (logging.WARNING, "it goes on without")
    _say(_service, level, event, f"hook {event.moment} failed, {then}: {event.error}")


def _owner(event: Any) -> str:
    if hasattr(event, "replica"):
        return f"{event.service}.{event.replica}"
    kind = next(kind for kind in ("loop", "group", "orchestrator") if hasattr(event, kind))
    return str(getattr(event, kind))


def _say(logger: Logger, level: int, event: Any, text: str, error: BaseException | None = None) -> None:
    """Log one line that begins with the name of what the event is about: a loop, a group, a replica of a service."""
    if logger.isEnabledFor(level):
        owner = _owner(event)
        logger.log(level, "%s", one_line(f"{owner}: {text}"), extra={"event": event}, exc_info=error)


def _at(where: str) -> str:
    return f", at {where}" if where else ""


# ----------------------------------------------------------------------------------------------------- the command line


class _OwnHandler(logging.StreamHandler[Any]):
    """Marks the handler that :func:`configure` set up, so that calling it again replaces that one only."""


class _TextFormatter(logging.Formatter):
    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802 - logging's name
        when = local_time(datetime.fromtimestamp(record.created, UTC))
        return when.isoformat(sep=" ", timespec="milliseconds")[:23]


class _JsonFormatter(logging.Formatter):
    def __init__(self, encoding: str) -> None:
        super().__init__()
        self._ascii_only = not encoding.lower().startswith("utf")  # what a stream escapes by itself may be no JSON

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "pid": record.process,
        }
        event = getattr(record, "event", None)
        if is_dataclass(event):
            line["event"] = type(event).__name__
            line |= {item.name: plain(getattr(event, item.name)) for item in fields(event) if item.name not in line}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return jsonlib.dumps(line, ensure_ascii=self._ascii_only)


def configure(level: str = "INFO", json: bool = False, *, tag: str = "", stream: Any = None) -> None:
    """Print the records of the ``mainspring`` loggers from ``level`` up on standard error, as text or as JSON lines.

    ``stream``: write them there instead.

    As text it leaves out the report of a group that has stopped, which the command prints in lines of its own.
    ``tag`` stands in each line of text, where several processes write to one place; JSON lines hold the process id.

    For programs whose process is theirs, such as the command line. The root logger is left alone, and so is every other
    handler; calling it again replaces what it had set up. :raises ConfigError: there is no such level.
    """
    name = level.upper()
    if name not in LEVELS:
        raise ConfigError(f"log level must be one of {', '.join(LEVELS)}, not {level!r}")
    logger = logging.getLogger("mainspring")
    for old in [handler for handler in logger.handlers if isinstance(handler, _OwnHandler)]:
        logger.removeHandler(old)
    out: Any = sys.stderr if stream is None else stream
    handler = _OwnHandler(out)
    text = _TextFormatter(f"%(asctime)s %(levelname)-8s {tag.replace('%', '%%')}{' ' * bool(tag)}%(name)s: %(message)s")
    if not json:
        handler.addFilter(lambda record: not isinstance(getattr(record, "event", None), events.GroupStopped))
    handler.setFormatter(_JsonFormatter(getattr(out, "encoding", None) or "utf-8") if json else text)
    logger.addHandler(handler)
    logger.setLevel(name)
    logger.propagate = False  # a handler on the root logger would print each line a second time
