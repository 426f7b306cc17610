"""``Entry``: the one way into an event loop for requests that may come from any thread, signal handler or event loop.

State that belongs to an event loop is changed there and nowhere else. A request that comes in one of its tasks is served
before it returns. One from elsewhere is handed over, in the order of arrival, and cannot fail half-way.
"""

from __future__ import annotations

from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from mainspring.core.lazy_event import LazyEvent
from mainspring.core.loggers import Logger
from mainspring.core.process import call_soon, event_loop, identity, in_task_of
from mainspring.errors import ConfigError, LoopNotRunningError, TicketAbandonedError
from mainspring.threads.ticket import Ticket

if TYPE_CHECKING:
    from collections.abc import Callable

    from mainspring.threads.ticket import TicketWriter

T = TypeVar("T")

_log = Logger("mainspring")


class Entry:
    """The way into the event loop on which it was made. ``name`` is that of its owner, for errors."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop = event_loop()
        self._process = identity()
        # A bare callback has the context of its caller, in which anyio may not know on which library it runs.
        self._context = copy_context()

    @property
    def is_here(self) -> bool:
        """True in a task of its event loop, but not in a signal handler that has interrupted that task."""
        return in_task_of(self._loop)

    def call(self, fn: Callable[[], object]) -> None:
        """Call ``fn()`` on the event loop: at once in one of its tasks, soon from elsewhere.

        An event loop that has ended calls nothing. What ``fn`` raises is raised here, or logged where it is called later.

        :raises ConfigError: the event loop runs in the process from which this one was forked.
        """
        if not self._process.here:
            raise ConfigError(
                f"{self._name} runs in process {self._process.pid}, from which this one was forked; make a new one"
                " after the fork"
            )
        if self.is_here:
            fn()
        else:
            call_soon(self._loop, partial(self._context.copy().run, self._call_logged, fn))

    async def ask(self, fn: Callable[[], T]) -> T:
        """Call ``fn()`` on the event loop and return its result, or raise its error. Await it on any event loop.

        :raises LoopNotRunningError: the event loop has ended.
        :raises ConfigError: as :meth:`call` has it.
        """
        if self.is_here:
            return fn()
        ticket: Ticket[T] = Ticket(self._name)
        self.call(partial(_answer, fn, ticket.writer()))
        try:
            return await ticket.wait()
        except TicketAbandonedError:
            raise LoopNotRunningError(f"{self._name} is not running: its event loop has ended") from None

    def _call_logged(self, fn: Callable[[], object]) -> None:
        try:
            fn()
        except Exception:  # the caller has gone on; trio would break for it
            _log.exception("%s: a request from elsewhere raised", self._name)


class AnywhereEvent:
    """An event that tasks of any event loop can wait for. It is set, once, on the event loop on which it was made."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop = event_loop()
        self._event = LazyEvent()
        self._elsewhere: list[TicketWriter[None]] = []

    def set(self) -> None:
        """Wake up every waiting task, also on other event loops."""
        self._event.set()
        while self._elsewhere:
            self._elsewhere.pop().offer(None)

    def is_set(self) -> bool:
        """True once it is set; callable from any thread."""
        return self._event.is_set()

    async def wait(self) -> None:
        """Wait until it is set."""
        if in_task_of(self._loop):
            await self._event.wait()
            return
        ticket: Ticket[None] = Ticket(self._name)
        answer = ticket.writer()
        self._elsewhere.append(answer)
        if self._event.is_set():  # asked after the registration: it cannot be missed in between
            answer.offer(None)
        await ticket.wait()


def _answer(fn: Callable[[], T], answer: TicketWriter[T]) -> None:
    try:
        answer.offer(fn())
    except Exception as error:
        answer.offer_error(error)
