"""``Ticket``: the one answer to one question, between two tasks, two threads, or a task and a thread."""

from __future__ import annotations

import threading
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Generic, Self, TypeVar, cast

import anyio

from mainspring.core.loggers import Logger
from mainspring.core.process import call_soon, event_loop, identity, in_event_loop, in_main_thread
from mainspring.core.tracebacks import where_raised
from mainspring.errors import (
    ConfigError,
    InvalidParameterError,
    TicketAbandonedError,
    TicketAlreadyCompletedError,
    TicketTimeoutError,
    describe,
)
from mainspring.redaction import one_line
from mainspring.validation import is_number

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from types import TracebackType

T = TypeVar("T")

_log = Logger("mainspring")


class Ticket(Generic[T]):
    """What one writer completes once, and one reader waits for.

    The writer calls :meth:`complete` or :meth:`fail`, from any task or thread; the reader awaits :meth:`wait`, or blocks its
    thread in :meth:`wait_sync`. A reader that gave up waiting may wait again, and one that comes later finds the answer. A
    writer that might die before it has answered takes :meth:`writer`, whose end, however it comes, fails the ticket.
    """

    __slots__ = (
        "__weakref__", "_error", "_lock", "_name", "_once", "_process", "_ready", "_unread", "_value", "_wake",
        "_writer_taken",
    )  # fmt: skip

    def __init__(self, name: str = "") -> None:
        self._name = name
        # A dropped writer fails its ticket from wherever the garbage collector runs, also in the midst of these methods: so
        # the lock may be taken again by its holder, and who is first is decided by one step that nothing can come between.
        self._lock = threading.RLock()
        self._once = threading.Lock()
        self._ready = False
        self._value: T | None = None
        self._error: BaseException | None = None
        self._wake: Callable[[], object] | None = None
        self._writer_taken = False
        self._process = identity()

    def __repr__(self) -> str:
        state = "waiting" if not self._ready else "completed" if self._error is None else f"failed: {self._error!r}"
        return f"<Ticket {self._name!r} {state}>" if self._name else f"<Ticket {state}>"

    def __str__(self) -> str:
        return f"ticket {self._name!r}" if self._name else "the ticket"

    # ------------------------------------------------------------------------------------------------- for the writer

    def complete(self, value: T) -> None:
        """Give the answer; callable from any thread.

        A writer that dies before it comes here leaves its reader waiting: only :meth:`writer` notices that.

        :raises TicketAlreadyCompletedError: it has been completed, or has failed, before.
        """
        if not self.offer(value):
            raise self._twice("completed")

    def fail(self, error: BaseException) -> None:
        """Give an error instead, which the reader's wait raises; callable from any thread.

        :raises TicketAlreadyCompletedError: it has been completed, or has failed, before.
        :raises InvalidParameterError: ``error`` is no exception.
        """
        if not self.offer_error(error):
            raise self._twice("failed")

    def offer(self, value: T) -> bool:
        """Do as :meth:`complete`, but drop a later answer. Return True if this one was the first."""
        return self._settle(value, None)

    def offer_error(self, error: BaseException, *, work: str | None = None) -> bool:
        """Do as :meth:`fail`, but drop a later answer. Return True if this one was the first.

        If the error is told nowhere else, pass as ``work`` what has failed: the logger ``mainspring`` tells of it if the
        ticket is dropped unread.

        :raises InvalidParameterError: ``error`` is no exception.
        """
        if not isinstance(error, BaseException):
            raise InvalidParameterError(f"{self}: a ticket fails with an exception, not {error!r}")
        return self._settle(None, error, None if work is None else UnreadError(error, work))

    def writer(self) -> TicketWriter[T]:
        """Return the writer's hold on the ticket. If it is dropped, or its block left, without an answer, the ticket fails.

        :raises ConfigError: it was taken before; a ticket has one writer.
        """
        with self._held():
            if self._writer_taken:
                raise ConfigError(f"{self} has a writer already; make one ticket for each answer")
            self._writer_taken = True
        return TicketWriter(self)

    def _settle(self, value: T | None, error: BaseException | None, unread: UnreadError | None = None) -> bool:
        """Store the answer, once. Return True if it was the first."""
        if not self._once.acquire(blocking=False):
            if unread is not None:
                unread.is_read = True  # it is no answer
            return False
        self._value, self._error, self._unread = value, error, unread
        with self._held():
            self._ready = True
            wake, self._wake = self._wake, None
        if wake is not None:
            wake()
        return True

    def _held(self) -> AbstractContextManager[object]:
        # In a forked child a lock that a thread of the parent held stays held; and no thread waits for a ticket there.
        return self._lock if self._process is identity() else nullcontext()

    def _twice(self, what: str) -> TicketAlreadyCompletedError:
        before = "completed" if self._error is None else "failed"
        return TicketAlreadyCompletedError(f"{self} cannot be {what}: it was {before} before")

    # ------------------------------------------------------------------------------------------------- for the reader

    @property
    def is_ready(self) -> bool:
        """True if it has been completed or has failed."""
        return self._ready

    async def wait(self, timeout: float | None = None) -> T:
        """Wait for the answer, at most ``timeout`` seconds (None: for as long as the writer lives).

        Cancelled, it leaves the ticket as it is, to be waited for again.

        :raises TicketTimeoutError: it did not come in time; it may come later.
        :raises ConfigError: another task or thread waits for it; a ticket has one reader. Or it has no answer, and was made
            before this process was forked: the parent's answer does not reach this process.
        :raises BaseException: the error that the writer gave.
        """
        self._check(timeout)
        if not self._ready:
            event = anyio.Event()
            loop = event_loop()
            # In the main thread it may be a signal handler that answers: in the midst of whatever the event loop does there,
            # which may be to sleep until something else wakes it.
            here = None if in_main_thread() else threading.get_ident()

            def wake() -> None:
                if threading.get_ident() == here:
                    event.set()
                else:
                    call_soon(loop, event.set)

            if self._wait_with(wake):
                try:
                    with anyio.move_on_after(timeout):
                        await event.wait()
                finally:
                    self._wait_no_more(wake)
        else:
            await anyio.lowlevel.checkpoint()
        try:
            return self._answer(timeout)
        finally:
            del self  # the error refers to this frame, and the ticket keeps the error

    def wait_sync(self, timeout: float | None = None) -> T:
        """Block this thread until the answer is there, at most ``timeout`` seconds (None: for as long as the writer lives).

        :raises TicketTimeoutError: it did not come in time; it may come later.
        :raises ConfigError: an event loop runs in this thread and would stand still, another caller waits, or it was made
            before this process was forked, as for :meth:`wait`.
        :raises BaseException: the error that the writer gave.
        """
        self._check(timeout)
        if not self._ready:
            if in_event_loop():
                raise ConfigError(f"{self}: wait_sync() would block the event loop; use `await ticket.wait()`")
            # No threading.Event, whose own lock the reader would hold where a signal handler comes in to answer.
            gate = threading.Lock()
            gate.acquire()
            wake = gate.release
            if self._wait_with(wake):
                try:
                    gate.acquire(timeout=-1 if timeout is None else min(timeout, threading.TIMEOUT_MAX))
                finally:
                    self._wait_no_more(wake)
        try:
            return self._answer(timeout)
        finally:
            del self  # as above

    def _check(self, timeout: float | None) -> None:
        if timeout is not None and not is_number(timeout, 0):
            raise InvalidParameterError(f"{self}: timeout must be 0 or more seconds, or None, not {timeout!r}")

    def _wait_with(self, wake: Callable[[], object]) -> bool:
        """Have ``wake()`` called by the writer; False where the answer has come by now."""
        if not self._process.here:
            raise ConfigError(
                f"{self} was made in process {self._process.pid}, from which this one was forked, and"
                " would be answered there; make one of its own after the fork"
            )
        with self._lock:
            if self._wake is not None:
                raise ConfigError(f"{self} already has a reader that waits for it; make one ticket for each reader")
            self._wake = wake
            if self._ready:  # asked after the registration: it cannot be missed in between
                self._wake = None
                return False
            return True

    def _wait_no_more(self, wake: Callable[[], object]) -> None:
        with self._lock:
            if self._wake == wake:
                self._wake = None

    def _answer(self, timeout: float | None) -> T:
        if not self._ready:
            raise TicketTimeoutError(f"{self} was not completed within {timeout:g} s")
        if self._error is not None:
            if self._unread is not None:
                self._unread.is_read = True
            try:
                raise self._error
            finally:
                del self  # as in `wait`
        return cast("T", self._value)


class UnreadError:
    """The error of a ticket until it is read. It is logged if it is dropped before.

    An object of its own, which only a failure makes: a finalizer on each ticket would make successful ones slower.
    """

    __slots__ = ("_error", "_process", "_work", "is_read")

    def __init__(self, error: BaseException, work: str) -> None:
        self._error = error
        self._work = work
        self._process = identity()
        self.is_read = False

    def __del__(self) -> None:
        if self.is_read or self._process is not identity():  # a forked child has copies of what is its parent's to read
            return
        with suppress(Exception):  # at the end of the interpreter there may be nothing left to log with
            at = where_raised(self._error)
            _log.error(
                "%s failed, and its ticket was not read: %s%s",
                self._work,
                one_line(describe(self._error)),
                f", at {one_line(at)}" if at else "",
            )


class TicketWriter(Generic[T]):
    """A ticket in the hands of its one writer: ``with ticket.writer() as answer: answer.complete(…)``.

    The ticket fails with :class:`TicketAbandonedError` where the block is left, or this object dropped, and no answer was
    given; and with the exception that leaves the block, where one does.
    """

    __slots__ = ("_ticket",)

    def __init__(self, ticket: Ticket[T]) -> None:
        self._ticket = ticket

    @property
    def is_ready(self) -> bool:
        """True if it has been completed or has failed."""
        return self._ticket.is_ready

    def complete(self, value: T) -> None:
        """Do as :meth:`Ticket.complete`."""
        self._ticket.complete(value)

    def fail(self, error: BaseException) -> None:
        """Do as :meth:`Ticket.fail`."""
        self._ticket.fail(error)

    def offer(self, value: T) -> bool:
        """Do as :meth:`Ticket.offer`."""
        return self._ticket.offer(value)

    def offer_error(self, error: BaseException) -> bool:
        """Do as :meth:`Ticket.offer_error`."""
        return self._ticket.offer_error(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, Exception):
            self._abandon(error)
        else:  # a cancellation, an exit: it is the writer's, and must not become the reader's
            self._abandon(None, error)

    def __del__(self) -> None:
        self._abandon(None)

    def _abandon(self, error: BaseException | None, cause: BaseException | None = None) -> None:
        ticket = self._ticket
        if ticket.is_ready:
            return
        if error is None:
            why = "" if cause is None else f" ({type(cause).__name__})"
            error = TicketAbandonedError(f"{ticket}: its writer has ended without an answer{why}")
            error.__cause__ = cause
        ticket.offer_error(error)  # another writer may have been quicker, which is no error here
