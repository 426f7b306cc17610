"""Every error Mainspring raises. Leaves say whose fault it is and whether trying again can help.

``fault`` names the side that can mend it: ``"caller"`` (the code that made the call), ``"config"`` (settings or
constructor values), ``"environment"`` (a server, a disk, a network), ``"handler"`` (the code that handled a message).
``retryable`` is true where the same call can succeed later without anybody changing anything.
"""

from __future__ import annotations

import copy
from socket import gaierror
from typing import Any, ClassVar, Literal, TypeVar

from mainspring.redaction import without_secrets
from mainspring.validation import MAX_DELAY, Seconds, as_seconds, is_number

Fault = Literal["caller", "config", "environment", "handler"]

E = TypeVar("E", bound=BaseException)


class MainspringError(Exception):
    """Base of all errors of this package. What they say has no logins of URLs in it, and no passwords."""

    fault: ClassVar[Fault] = "caller"
    retryable: ClassVar[bool] = False

    def __init__(self, *args: object) -> None:
        super().__init__(*(without_secrets(said) if isinstance(said, str) else said for said in args))


class ConfigError(MainspringError):
    """A setting, a constructor value or a combination of them cannot work. The message says what would."""

    fault = "config"


class InvalidParameterError(MainspringError, ValueError):
    """A value given to a call is outside its limits. The message names the parameter, the value and the limits."""


class InvalidTransitionError(MainspringError):
    """A state machine was asked for a transition that its table does not hold."""


class MailboxError(MainspringError):
    """Base of what a mailbox raises."""


class MailboxClosedError(MailboxError):
    """The mailbox is closed (or was never opened) and takes no further calls."""


class MailboxFullError(MailboxError):
    """The mailbox holds as many messages as it may. Sending again succeeds once some are settled."""

    fault = "environment"
    retryable = True


class MailboxConnectionError(MailboxError):
    """The store behind the mailbox could not be reached, or refused to work just now; nothing is known to be lost."""

    fault = "environment"
    retryable = True


class SerializationError(MailboxError, ValueError):
    """A body or stored bytes do not fit the mailbox's type, or what is to be written would be read as something else. The
    message names the type and the field. Or a body, a reply or a checkpoint is larger than the store takes."""


class ResultTooLargeError(SerializationError):
    """The result of a handler is larger than a store keeps. Its message is dead at once: a retry would fail the same way."""

    fault = "handler"


class UnknownTaskError(SerializationError):
    """A message calls a task that this worker does not have. It is tried again, as another worker may have it."""


class ReceiptHandleExpiredError(MailboxError):
    """The lease of this delivery has run out or another delivery holds the message; the call had no effect."""

    fault = "handler"


class MessageSettledError(MailboxError):
    """The message was already acknowledged, returned or dead-lettered through this delivery."""


class ReplyNotAvailableError(MailboxError):
    """The sender asked for no reply (``reply_to`` is not set). Or it wants it at an address that leads to no mailbox, or to a
    store that this process's configuration does not name. A loop dead-letters the message at once."""


class TransactionEndedError(MailboxError):
    """Code in a block of ``ctx.transaction()`` ended its transaction by a ``COMMIT`` or ``ROLLBACK`` of its own, or went on
    after a statement in it had failed. The block settles nothing, and what was committed so remains."""

    fault = "handler"


class RequestTimeoutError(MailboxError, TimeoutError):
    """No reply to a request has come in time. It may still be done, or have been done: its effects are unknown."""

    fault = "environment"
    retryable = True


class RequestFailedError(MailboxError):
    """There will be no reply: the request was dead-lettered, its handler answered with :class:`ReplyError`, or it failed after
    it had acknowledged the request. ``error`` and ``error_type`` say why."""

    fault = "handler"

    def __init__(self, message: str, *, error: str = "", error_type: str = "") -> None:
        super().__init__(message)
        self.error = error
        self.error_type = error_type


class RequestCancelledError(MailboxError):
    """A request was cancelled, by its sender or another, before it was done: there will be no reply."""


class JobNotFoundError(MailboxError):
    """No job of that id is known: it never was in this mailbox, or it is done and its result was not kept (any more)."""


class JobRunningError(MailboxError):
    """A job cannot be rescheduled while a worker runs it."""

    retryable = True


class ScheduleNotFoundError(MailboxError):
    """No schedule of that name is in this mailbox."""


class HandlerStalledError(MainspringError):
    """A handler gave no sign of life for ``watchdog_threshold`` seconds and was cancelled; ``where`` is its line."""

    fault = "handler"
    retryable = True

    def __init__(self, message: str, *, where: str = "") -> None:
        super().__init__(message)
        self.where = where


class HandlerTimeoutError(MainspringError, TimeoutError):
    """A handler ran longer than its ``handler_timeout`` and was cancelled."""

    fault = "handler"
    retryable = True


class TaskExitError(MainspringError):
    """Code that runs under a scope raised ``SystemExit``, ``KeyboardInterrupt`` or another error that is no ``Exception``. Or
    asyncio, and no cancel scope, cancelled it. Or a handler returned work that has not run.

    One task must not end the process behind the others' backs: in a handler it counts as a failed attempt, elsewhere as a
    crash. To end a program from inside, call ``shutdown()`` of its group.
    """

    fault = "handler"
    retryable = True


class WrongEventLoopError(MainspringError):
    """Code that uses asyncio ran on trio. In a handler it is a failed attempt, as another worker may run on asyncio."""

    fault = "config"


class TicketAlreadyCompletedError(MainspringError):
    """A ticket was completed, or failed, before: it has one writer, who answers once."""


class TicketTimeoutError(MainspringError, TimeoutError):
    """A ticket was not completed in time; it may be later, and can be waited for again."""

    fault = "environment"
    retryable = True


class TicketAbandonedError(MainspringError):
    """The task or thread that was to complete a ticket has ended without doing so. No answer will come."""

    fault = "environment"


class BudgetExceededError(MainspringError):
    """More was spent than a budget allows. ``limit`` names the limit; ``allowed``, ``used`` and ``over`` are its figures."""

    fault = "handler"

    def __init__(
        self, message: str, *, limit: str = "", allowed: Any = None, used: Any = None, over: Any = None
    ) -> None:
        super().__init__(message)
        self.limit = limit
        self.allowed = allowed
        self.used = used
        self.over = over


class DeadlineExceededError(MainspringError, TimeoutError):
    """A deadline has passed. It is an instant, not a span: another try would come too late as well."""

    fault = "environment"


class SessionError(MainspringError):
    """Base of what a session raises."""


class SessionClosedError(SessionError):
    """The session has a journal and is not open: it takes no events. Before it was opened, it cannot be looked at either."""


class SessionFullError(SessionError):
    """Too many events wait for a session's turn or its journal to take one whose sender does not wait; it is not applied."""

    fault = "environment"
    retryable = True


class ReducerError(SessionError):
    """A reducer raised, or returned what no slice can be; the state is as it was before. ``__cause__`` is what it raised."""

    fault = "handler"


class UnknownEventError(SessionError):
    """A journal holds an event of a type that the session does not know, or an event of such a type was to be written."""

    fault = "config"


class UnknownVersionError(SessionError):
    """Stored state is of a version that this code cannot read: a newer one, or an old one without an upcaster."""

    fault = "config"


class JournalError(SessionError):
    """A session's journal could not be written or read just now; the events that were to be written are not applied."""

    fault = "environment"


class JournalLockedError(JournalError):
    """Another session, of this process or another, has the journal open: it has one writer."""

    retryable = True


class JournalDamagedError(JournalError):
    """A journal holds what was never written to it. The message says where: what comes before that is there, and
    ``Session.open(…, up_to_damage=True)`` opens the session with it."""


class OverrideError(MainspringError):
    """The operating system refuses what an override needs: its directory cannot be read or written, or the disk is full."""

    fault = "environment"


class OverrideDamagedError(OverrideError):
    """A stored override is not what was written: its text does not fit its hash, or its index cannot be read."""


class OverrideLockedError(OverrideError):
    """Another process has held the lock of an override for too long; nothing was written."""

    retryable = True


class LoopNotRunningError(MainspringError):
    """A LoopThread, or the loop of a LoopActor or of a group, is not running (not yet, or no longer).

    Its event loop takes no calls, and no control message is answered.
    """


class OffloadError(MainspringError):
    """Base of what an offload pool raises; what the offloaded function raises comes as it is."""


class OffloadClosedError(OffloadError):
    """The pool is not open: not yet, no longer, or not in this process or on this event loop. Or it was closed before the
    call had ended; whether its work was done is unknown then."""


class OffloadFullError(OffloadError):
    """As many calls as the pool's ``queue_limit`` allows are waiting for a worker; this one was not begun."""

    fault = "environment"
    retryable = True


class OffloadTimeoutError(OffloadError, TimeoutError):
    """An offloaded call did not end in time. Its effects are unknown, and in a thread they may still come."""

    fault = "environment"
    retryable = True


class OffloadPickleError(OffloadError):
    """A call's function, an argument, its result or its exception cannot be pickled to pass from one process to another."""


class OffloadWorkerDiedError(OffloadError):
    """The process (or interpreter) that did the work died of it, was killed, or could not be started. Only this call fails."""

    fault = "environment"
    retryable = True


class ControlRefusedError(MainspringError):
    """A loop does not know this control message, or cannot do what it asks; it has changed nothing."""


class ServiceNotFoundError(MainspringError):
    """No service of that name is supervised here, or it has no replica of that number."""


class ServiceNotRunningError(MainspringError):
    """A service that was started, restarted or changed has not come to run. The message says which replica, and why.

    A rolling restart stops there: the replicas that it had not come to run as before.
    """

    fault = "environment"
    retryable = True


class Retry(Exception):  # noqa: N818 - it is an instruction, not an error
    """Raised by a handler: nack the message, to try it again later.

    ``delay`` is in seconds, or a timedelta (0 to 366 days). ``None`` lets the retry policy choose, by the number of charged
    deliveries, or of uncharged deliveries with ``charge=False``. Then the attempt is not counted against
    ``DeadLetterPolicy.max_attempts`` (for "the other side is not ready", not for "I failed").

    The message goes to the tail of the queue after the delay. Without a charge and a delay, and once the loop has been told to
    stop (``ctx.shutting_down``), it goes to the front instead. The next worker then goes on with it.

    :raises InvalidParameterError: the delay is outside its limits.
    """

    def __init__(self, delay: Seconds | None = None, charge: bool = True) -> None:
        seconds = as_seconds(delay)
        if seconds is not None and not is_number(seconds, 0, MAX_DELAY):
            raise InvalidParameterError(f"Retry: delay must be 0 to {MAX_DELAY:.0f} seconds, or None, not {delay!r}")
        super().__init__(f"retry in {seconds} s" if seconds is not None else "retry")
        self.delay = seconds
        self.charge = charge

    def __reduce__(self) -> tuple[type[Retry], tuple[float | None, bool]]:
        return type(self), (self.delay, self.charge)


class Reject(Exception):  # noqa: N818 - it is an instruction, not an error
    """Raised by a handler: the message can never succeed; dead-letter it now, with this reason."""

    def __init__(self, reason: str = "rejected by the handler") -> None:
        super().__init__(reason)
        self.reason = reason


class ReplyError(MainspringError):
    """Raised by a handler: the answer to the request is this error. The message is acknowledged, and not tried again.

    Its requester gets :class:`RequestFailedError`, whose ``error`` is this text and whose ``error_type`` is ``"ReplyError"``.
    Where no requester waits for an error (the message came from ``send``, with or without ``reply_to``), it is acknowledged
    without a reply.
    """

    fault = "handler"

    def __init__(self, text: str = "refused by the handler") -> None:
        super().__init__(text)


LONGEST_TEXT = 2_000
"""Characters of an error's text that are kept: some hold the whole of what they were given."""
LONGEST_TRACEBACK = 50_000
"""Characters of a traceback that are kept: it ends with the error's text."""


def copied(error: E) -> E:
    """Return the same error, with its cause, for one more caller that it hits: a shared error would mix up their tracebacks."""
    other = copy.copy(error)
    other.__cause__ = error.__cause__
    return other


def in_brief(error: E) -> E:
    """Return the same error, to be printed without the steps to it: its text says all. Its cause stays in ``__context__``."""
    error.__context__, error.__cause__ = (
        error.__cause__ or error.__context__,
        None,
    )  # which keeps both from being printed
    return error.with_traceback(None)


def message_of(error: BaseException) -> str:
    """Return what an exception says (its first :data:`LONGEST_TEXT` characters), or its type's name where it says nothing.

    Also of one whose own ``__str__`` fails.
    """
    name = type(error).__qualname__
    try:
        text = str(error) or name
    except Exception:
        return f"{name} (it cannot be printed)"
    return _shortened(text)


def text_and_type(error: BaseException | str) -> tuple[str, str]:
    """Return what an exception, or a reason in words, says, and its type, as both are kept."""
    if isinstance(error, str):
        return _shortened(error), Reject.__qualname__
    return message_of(error), type(error).__qualname__


def reason_of(error: BaseException | str) -> tuple[str, str, str]:
    """Return an exception, or a reason in words, as it is kept: what it says, its type and its traceback."""
    return *text_and_type(error), "" if isinstance(error, str) else traceback_of(error)


def traceback_of(error: BaseException) -> str:
    """Return the traceback of an exception: above :data:`LONGEST_TRACEBACK` characters, its beginning and its end."""
    import traceback

    trace = "".join(traceback.format_exception(error))
    if len(trace) > LONGEST_TRACEBACK:
        half = LONGEST_TRACEBACK // 2
        trace = f"{trace[:half]}\n… ({len(trace):,} characters) …\n{trace[-half:]}"
    return trace


def _shortened(text: str) -> str:
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}… ({len(text):,} characters)"


def remedy(error: BaseException) -> str:
    """Return what to do about a server that could not be reached, as the end of an error's text; empty if it is not known."""
    if isinstance(error, ConnectionRefusedError):
        return "; start the server, or correct the host and the port of the URL"
    if isinstance(error, gaierror):
        return "; correct the host of the URL, or mend the name service"
    return ""


def describe(error: BaseException) -> str:
    """Return an exception as text, with its type."""
    name, text = type(error).__qualname__, message_of(error)
    return text if text.startswith(name) else f"{name}: {text}"
