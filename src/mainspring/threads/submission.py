"""What was submitted to a ``LoopThread``: a task of its event loop, and the ticket that it answers."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import anyio

from mainspring.core.introspection import innermost
from mainspring.core.process import carried_context
from mainspring.core.tracebacks import beneath, where
from mainspring.errors import (
    InvalidParameterError,
    LoopNotRunningError,
    MainspringError,
    TaskExitError,
    TicketAbandonedError,
)
from mainspring.threads.ticket import Ticket

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from mainspring.threads.loop_thread_core import LoopCore

T = TypeVar("T")


class Submission(Generic[T]):
    """One submitted function: called in the event loop, it starts the task that completes its ticket."""

    def __init__(
        self,
        core: LoopCore,
        fn: Callable[..., Awaitable[T]],
        args: tuple[Any, ...],
        stop: Callable[[], object] | None,
        stop_timeout: float | None,
    ) -> None:
        self.name: str = getattr(innermost(fn), "__qualname__", None) or repr(fn)
        self.ticket: Ticket[T] = Ticket(self.name)
        self.stop_timeout = core.stop_timeout if stop_timeout is None else stop_timeout
        self._core = core
        self._fn = fn
        self._args = args
        self._stop = stop
        self.context = carried_context(core.backend)
        self._scope: anyio.CancelScope | None = None
        self._awaitable: Awaitable[T] | None = None

    @property
    def where(self) -> str:
        """The line it waits on."""
        return where(self._awaitable)

    def __call__(self) -> None:
        self._scope = anyio.CancelScope()
        self._core.begin(self)

    def end_within(self, timeout: float | None) -> None:
        """Ask it to end by itself, and cancel it after ``timeout`` seconds; None: after its own ``stop_timeout``."""
        assert self._scope is not None
        if self._stop is not None:
            stop, self._stop = self._stop, None
            self._core.call(stop)
        deadline = anyio.current_time() + (self.stop_timeout if timeout is None else timeout)
        self._scope.deadline = min(self._scope.deadline, deadline)

    async def run(self) -> None:
        """Run it, and answer the ticket."""
        assert self._scope is not None
        try:
            with self._scope:
                value = await self._begun()
        except Exception as error:
            self.fail(error)
        except BaseException as error:
            # Goes no further: it would end an event loop that others share, and a CancelledError of its own would cancel them.
            self.fail(self._of_an_exit(error))
        else:
            if self._scope.cancelled_caught:
                # The caller of stop() knows it, so that an unread ticket need not be logged.
                self.ticket.offer_error(LoopNotRunningError(f"{self._core} has stopped and cancelled {self.name}"))
            else:
                self.ticket.offer(value)  # code that holds the ticket may have answered it
        finally:
            if self._scope.cancel_called:  # whatever it has made of that
                self._core.clean = False
            self._awaitable = None
            self._core.has_ended(self)

    def _of_an_exit(self, error: BaseException) -> MainspringError:
        if _is_cancellation(error):
            return TicketAbandonedError(f"{self.name} was cancelled in {self._core} ({type(error).__name__})")
        what = TaskExitError(f"{self.name} raised {error!r} in {self._core}; to end that, call its stop()")
        what.__cause__ = error
        return what

    def _begun(self) -> Awaitable[T]:
        self._awaitable = self._fn(*self._args)
        if not inspect.isawaitable(self._awaitable):
            raise InvalidParameterError(f"submit() takes an async function, and {self.name} is none; post() takes such")
        return self._awaitable

    def fail(self, error: BaseException) -> None:
        """Let the ticket have an error, where it has no answer yet."""
        for raised in filter(None, (error, error.__cause__)):  # the frames here refer to the ticket: no cycle is made
            raised.__traceback__ = beneath(raised.__traceback__, __name__)
        self.ticket._offer_sole_error(error, f"{self.name}, submitted to {self._core},")  # noqa: SLF001 - this package's own


def _is_cancellation(error: BaseException) -> bool:
    try:
        return isinstance(error, anyio.get_cancelled_exc_class())
    except anyio.NoEventLoopError:  # the event loop is gone, and the coroutine is closed with it
        return True
