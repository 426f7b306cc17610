"""From the function a user wrote to one that the worker can call: its types, its parameters, its way of running."""

from __future__ import annotations

import inspect
import threading
import typing
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Coroutine
from types import SimpleNamespace, UnionType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, TypeVar

from mainspring.core.introspection import check_runs, code_of, instead_of, is_async, name_of
from mainspring.core.process import end_returned_child, identity
from mainspring.errors import ConfigError, OffloadPickleError
from mainspring.worker.context import Context

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType

    from mainspring.mailbox.mailbox import Mailbox
    from mainspring.offload.pool import OffloadPool
    from mainspring.worker.delivery import Delivery, HandlerRuns, Runs
    from mainspring.worker.settings import WorkerSettings

T = TypeVar("T")
R = TypeVar("R")
Returned: TypeAlias = "Awaitable[R | None] | R | None"
"""What a handler of a mailbox with replies of type ``R`` returns: a reply, or None."""
HandlerOf: TypeAlias = "Callable[[T], Returned[R]] | Callable[[T, Context[Any]], Returned[R]]"
"""A handler of a mailbox with bodies of type ``T`` and replies of type ``R``, for type checkers."""


class HandlerPool(Protocol):
    """The pool of functions that do not run on the event loop: an :class:`OffloadPool`, or the pools of several tasks."""

    async def __aenter__(self) -> Any: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None: ...

    def set_workers(self, workers: int) -> None:
        """Let that many functions run at once."""


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_CONTEXT_NAMES = ("ctx", "context")


class Handlers(ABC):
    """What a loop handles its messages with, where each message names its own function (see ``tasks``).

    It has what a loop asks of a :class:`Handler`, which is one function for all messages.
    """

    name: str
    is_async = True
    wants_context = False
    before: Callable[[], Coroutine[Any, Any, None]] | None = None
    """What a run of the loop does before it receives. While the store does not answer, it is tried again, as a receive is."""
    beside: Callable[[], Coroutine[Any, Any, None]] | None = None
    """What a run of the loop has beside its worker: begun with it, and cancelled as soon as it takes no more work."""

    @abstractmethod
    def bind(self, mailbox: Mailbox[Any, Any]) -> None:
        """Settle the types of the mailbox's bodies and replies."""

    @abstractmethod
    def pool(self, offload: OffloadPool | str | None, workers: int) -> HandlerPool | None:
        """Return what the functions run in that do not run on the event loop; the loop enters it for each run."""

    @abstractmethod
    def runs(
        self, mailbox: Mailbox[Any, Any], settings: WorkerSettings, pool: Any, make: Callable[..., HandlerRuns]
    ) -> Runs:
        """Return the handler runs of one run of the loop. ``make(call, settings, reply_to)`` makes those of one function."""


class Handler(NamedTuple):
    """A user's handler, looked at once: ``body_type`` and ``reply_type`` are None where it does not say."""

    fn: Callable[..., Any]
    name: str
    is_async: bool
    wants_context: bool
    body_type: Any
    reply_type: Any
    before: None = None
    beside: None = None

    def bind(self, mailbox: Mailbox[Any, Any]) -> None:
        """Settle the types of bodies and replies among handler, ``body=`` and mailbox."""
        if self.body_type is None and not mailbox.is_bound:
            raise ConfigError(
                f"handler {self.name}: its first parameter has no annotation; annotate it with the type of the"
                " message bodies, or pass body= (body=Any takes whatever JSON can say)"
            )
        mailbox.bind(body=self.body_type, reply=self.reply_type)

    def runs(
        self,
        mailbox: Mailbox[Any, Any],
        settings: WorkerSettings,
        pool: Any,
        make: Callable[..., HandlerRuns],
    ) -> HandlerRuns:
        """Return its runs in one run of a loop."""
        return make(self.caller(pool), settings, mailbox.reply_to)

    def pool(self, offload: OffloadPool | str | None, workers: int) -> OffloadPool | None:
        """Return the pool that a plain function runs in: the one given, or one of ``workers`` threads or processes.

        :raises ConfigError: the handler cannot run there.
        """
        check_offload(f"handler {self.name}", offload, is_async=self.is_async)
        if self.is_async:
            return None
        from mainspring.offload.pool import OffloadPool

        if isinstance(offload, OffloadPool):
            pool = offload
        else:
            kind: Any = offload or "thread"
            pool = OffloadPool(kind, workers=workers, name=f"{kind} pool of {self.name}")
        if pool.kind != "thread":
            self._check_leaves_the_interpreter(pool.kind)
        return pool

    def _check_leaves_the_interpreter(self, kind: str) -> None:
        if self.wants_context:
            raise ConfigError(
                f"handler {self.name} takes ctx, which cannot be had in another {kind}: take (job) alone, or make it async and"
                " `await pool.run(work, job, ctx.request_id)` with an OffloadPool"
            )
        from mainspring.offload.processes import pack

        try:
            pack(self.fn, ())
        except OffloadPickleError as error:
            raise ConfigError(f"handler {error}") from None

    def caller(self, pool: OffloadPool | None) -> Callable[..., Coroutine[Any, Any, Any]]:
        """Return what the worker awaits: the coroutine function itself, or, for a plain function, ``(run, *args)`` in the pool.

        A cancelled handler's process is killed. A thread (or an interpreter) cannot be cancelled: the worker waits for it to
        return (it can look at ``ctx.shutting_down`` or call ``anyio.from_thread.check_cancelled()``), and its lease is kept
        meanwhile.
        """
        if pool is None:
            return as_coroutine_function(self.fn)
        fn, name, run_to_the_end, process = self.fn, self.name, pool.run_to_the_end, identity()

        async def run_in_thread(delivery: Delivery, *args: Any) -> Any:
            def handle() -> Any:
                delivery.thread_id = threading.get_ident()
                try:
                    return fn(*args)
                finally:
                    if identity() is not process:
                        end_returned_child()
                    delivery.thread_id = None

            handle.__qualname__ = name
            result = await run_to_the_end(handle, waiting=delivery.wait_for_worker)
            return await result if inspect.isawaitable(result) else result

        async def run_elsewhere(delivery: Delivery, *args: Any) -> Any:
            return await run_to_the_end(fn, *args, waiting=delivery.wait_for_worker)

        return run_in_thread if pool.kind == "thread" else run_elsewhere


def check_offload(owner: str, offload: object, *, is_async: bool) -> None:
    """Raise :class:`ConfigError` unless the function of ``owner`` can run there."""
    if offload is None:
        return
    if is_async:
        raise ConfigError(
            f"{owner} is async and runs on the event loop; leave out offload=, or make it a plain `def`"
            " (an async function offloads a part of its work by `await pool.run(...)`)"
        )
    from mainspring.offload.pool import OffloadPool

    if offload not in ("thread", "process") and not isinstance(offload, OffloadPool):
        raise ConfigError(f"{owner}: offload must be 'thread', 'process' or an OffloadPool, not {offload!r}")


def as_coroutine_function(fn: Callable[..., Any]) -> Callable[..., Coroutine[Any, Any, Any]]:
    """Return ``fn`` if a call of it runs nothing yet; else an ``async def`` that calls it. Some are only marked as async."""
    code = getattr(code_of(fn), "__code__", None)
    if code is not None and code.co_flags & inspect.CO_COROUTINE:
        return fn

    async def call(*args: Any) -> Any:
        return await fn(*args)

    return call


def handlers_of(handler: Handlers | Callable[..., Any], names: Mapping[str, Any], *, body: Any) -> Handlers | Handler:
    """Return what a loop runs its messages with: ``handler`` itself where it is several functions, else what it says."""
    return handler if isinstance(handler, Handlers) else inspect_handler(handler, names, body=body)


def inspect_handler(fn: Callable[..., Any], names: Mapping[str, Any], *, body: Any = None) -> Handler:
    """Look at a handler: ``(job)`` or ``(job, ctx)``, async or plain.

    ``names`` are those of the caller's scope, for annotations that name a local class; ``body`` stands in for the annotation
    of the first parameter. Raises :class:`ConfigError` for what cannot be called that way.
    """
    if not callable(fn):
        what = instead_of(fn, "MainLoop").partition(": write")[0]
        raise ConfigError(
            f"a handler must be callable, {what}; give an `async def` or a plain function, without calling it"
        )
    name = name_of(fn)
    check_runs(fn, "handler")
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"handler {name}: its parameters cannot be read ({error}); wrap it in a function") from error
    target = code_of(fn)
    positional = _parameters(name, signature)
    annotations = Annotations(f"handler {name}", target, names, remedy=" or pass body=")
    first = positional[0].name if positional else ""
    return Handler(
        fn=fn,
        name=name,
        is_async=is_async(fn),
        wants_context=_wants_context(name, signature, annotations),
        body_type=annotations.needed(first) if body is None else body,
        reply_type=_reply_type(annotations.known("return")),
    )


def check_wrapper(wrapper: Any) -> None:
    """Raise :class:`ConfigError` for what cannot be a wrapper of :meth:`MainLoop.wrap`."""
    if not callable(wrapper):
        raise ConfigError(f"a wrapper must be callable, {instead_of(wrapper, 'wrap')}")
    check_runs(wrapper, "wrapper", advice="write `async def`, and `return await call()`")


def _parameters(name: str, signature: inspect.Signature) -> list[inspect.Parameter]:
    """Return its positional parameters, which are to be one or two."""
    parameters = signature.parameters.values()
    positional = [p for p in parameters if p.kind in _POSITIONAL]
    required = [p for p in positional if p.default is inspect.Parameter.empty]
    star = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters)
    by_keyword = any(
        p.kind is inspect.Parameter.KEYWORD_ONLY and p.default is inspect.Parameter.empty for p in parameters
    )
    if len(required) > 2 or by_keyword or not (positional or star):
        raise ConfigError(f"handler {name}{signature}: it must take (job) or (job, ctx)")
    return positional


def _wants_context(name: str, signature: inspect.Signature, annotations: Annotations) -> bool:
    """True if the second positional parameter is for the context, rather than an option of the function's own.

    Raises :class:`ConfigError` where another parameter asks for the context, or the second one for something else.
    """
    parameters = [p for p in signature.parameters.values() if p.kind not in _VARIABLE]
    second = next((p for p in parameters[1:2] if p.kind in _POSITIONAL), None)
    for parameter in parameters:
        named = parameter.name in _CONTEXT_NAMES and parameter.annotation is inspect.Parameter.empty
        if parameter is not second and (named or Context in alternatives(annotations.known(parameter.name))):
            raise ConfigError(
                f"handler {name}{signature}: the context is the second parameter; it must take (job) or (job, ctx)"
            )
    if second is None:
        return False
    kinds = alternatives(annotations.known(second.name))
    if second.default is not inspect.Parameter.empty and second.name not in _CONTEXT_NAMES:
        return Context in kinds
    if not any(map(_takes_context, kinds)):
        raise ConfigError(
            f"handler {name}{signature}: the second parameter gets the context; annotate {second.name} as mainspring.Context,"
            f" or bind a value of your own: functools.partial({name}, {second.name}=…)"
        )
    return True


def alternatives(kind: Any) -> tuple[Any, ...]:
    """Return the types that an annotation allows: several of a union."""
    if typing.get_origin(kind) is typing.Annotated:
        return alternatives(typing.get_args(kind)[0])
    if typing.get_origin(kind) in (typing.Union, UnionType):
        return tuple(one for part in typing.get_args(kind) for one in alternatives(part))
    return (Context,) if typing.get_origin(kind) is Context else (kind,)


def _takes_context(kind: Any) -> bool:
    """True if what is annotated with ``kind`` can be the context; None is an annotation that is missing or not known."""
    if kind is None or kind is Any or isinstance(kind, TypeVar):
        return True
    return isinstance(kind, type) and (getattr(kind, "_is_protocol", False) or issubclass(Context, kind))


def _reply_type(returned: Any) -> Any:
    returned = awaited(returned)
    return None if returned is type(None) else returned


def awaited(returned: Any) -> Any:
    """Return the type of a result by its annotation; where a plain function returns a coroutine, that of its result."""
    return typing.get_args(returned)[-1] if typing.get_origin(returned) in (Awaitable, Coroutine) else returned


class Annotations:
    """The annotations of one function, each resolved by itself, so that an unknown type does not spoil the others.

    Linters move imports that only annotations need under ``TYPE_CHECKING``, so that an unknown type of the second parameter
    or of the result is nothing unusual.
    """

    def __init__(self, owner: str, target: Any, names: Mapping[str, Any], *, remedy: str = "") -> None:
        self._owner = owner
        self._remedy = remedy
        target = inspect.unwrap(target)
        self._globals: dict[str, Any] = getattr(target, "__globals__", {})
        self._locals = names
        try:
            self._raw: Mapping[str, Any] = dict(getattr(target, "__annotations__", {}))
        except NameError:  # from Python 3.14 on they are evaluated here
            self._raw = {}

    def known(self, what: str) -> Any:
        """Return the type of a parameter (or of ``"return"``), or None if there is none or it cannot be resolved."""
        try:
            return self._resolve(what)
        except Exception:
            return None

    def needed(self, what: str) -> Any:
        """Return what :meth:`known` does. Raise :class:`ConfigError` if it cannot be resolved."""
        try:
            return self._resolve(what)
        except Exception as error:  # an annotation may be any expression, and so raise anything
            raise ConfigError(
                f"{self._owner}: the annotation of {what} cannot be resolved ({error}); define the class at module"
                f" level{self._remedy}"
            ) from None

    def _resolve(self, what: str) -> Any:
        if what not in self._raw:
            return None
        holder = SimpleNamespace(__annotations__={what: self._raw[what]})
        try:
            hints = typing.get_type_hints(holder, self._globals, None, include_extras=True)
        except NameError:
            hints = typing.get_type_hints(holder, self._globals, dict(self._locals), include_extras=True)
        return hints[what]
