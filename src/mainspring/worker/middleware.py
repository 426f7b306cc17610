"""``Middleware``: code around each send and each handler run."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

from mainspring.core.introspection import is_async, is_generator
from mainspring.errors import ConfigError, TaskExitError, describe

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from contextlib import AbstractAsyncContextManager

    from mainspring.mailbox.message import Message
    from mainspring.worker.delivery import Wrapper

C = TypeVar("C")


class Middleware:
    """Code around each send and each handler run: for tracing, tenants, metrics, transactions.

    Derive from it and override one method or both, as async context managers (``@asynccontextmanager``). They are entered in
    the order in which the middleware is listed, so that the first is the outermost; that of a group is outside of that of its
    loops, and that of a task inside of all.
    """

    def sending(self, calls: Sequence[Any]) -> AbstractAsyncContextManager[Any]:
        """Run around one send of a task's calls: of one, or of those of a ``send_many``.

        ``calls`` are :class:`~mainspring.tasks.calls.OutgoingCall`: their arguments and headers may be changed until the block
        is entered. What it raises is raised to the sender. Then nothing is sent, unless it is raised after the block.
        """
        return nullcontext()

    def handling(self, message: Message[Any, Any]) -> AbstractAsyncContextManager[Any]:
        """Run around one handler run.

        It is entered in the context variables of the handler. What it raises counts as raised by the handler, and so do the
        handler's errors that pass through it. It must not suppress them, nor settle the message.
        """
        return nullcontext()


def checked(middleware: Iterable[Middleware], owner: str) -> tuple[Middleware, ...]:
    """Return the middleware of ``owner``. Raise :class:`ConfigError` if an object is no middleware."""
    if not isinstance(middleware, Iterable):
        raise ConfigError(f"{owner}: middleware must be a list of them, not {middleware!r}")
    given = tuple(middleware)
    for each in given:
        if not isinstance(each, Middleware):
            raise ConfigError(f"{owner}: middleware must be objects of classes derived from Middleware, not {each!r}")
        for name in ("sending", "handling"):
            method = getattr(each, name)
            if is_async(method) or is_generator(method):
                raise ConfigError(f"{owner}: {type(each).__name__}.{name} must be decorated with @asynccontextmanager")
    return given


def overriding(middleware: Sequence[Middleware], name: str) -> tuple[Middleware, ...]:
    """Return the middleware that overrides that method: only it costs anything."""
    return tuple(each for each in middleware if getattr(type(each), name) is not getattr(Middleware, name))


def wrappers_of(middleware: Sequence[Middleware]) -> tuple[Wrapper, ...]:
    """Return what is wrapped around the handler, the innermost first."""
    return tuple(_Handling(each) for each in reversed(overriding(middleware, "handling")))


class _Handling:
    """A middleware's part around the handler, as :meth:`MainLoop.wrap` takes it."""

    def __init__(self, middleware: Middleware) -> None:
        self._middleware = middleware
        self.__qualname__ = f"{type(middleware).__qualname__}.handling"

    async def __call__(self, message: Message[Any, Any], call: Callable[[], Awaitable[Any]]) -> Any:
        failure = ""
        async with self._middleware.handling(message):
            try:
                return await call()
            except BaseException as error:
                failure = describe(error)
                raise
        raise TaskExitError(
            f"{self.__qualname__} has suppressed an error of the handler: {failure}; let it pass, or raise another in its place"
        )
