"""From the function a user wrote to one that the worker can call: its types, its parameters, its way of running."""

from __future__ import annotations

import functools
import inspect
import threading
import typing
from collections.abc import Awaitable, Coroutine
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from anyio import to_thread

from mainspring.callables import code_of, innermost, is_async
from mainspring.clock import real_work
from mainspring.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from anyio import CapacityLimiter

    from mainspring.loops.run import Run

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_CONTEXT_NAMES = ("ctx", "context")


@dataclass(frozen=True, slots=True)
class Handler:
    """A user's handler, looked at once: ``body_type`` and ``reply_type`` are None where it does not say."""

    fn: Callable[..., Any]
    name: str
    is_async: bool
    wants_context: bool
    body_type: Any
    reply_type: Any

    def caller(self, limiter: CapacityLimiter | None) -> Callable[..., Awaitable[Any]]:
        """What the worker awaits: the coroutine function itself, or, for a plain function, ``(run, *args)`` in a thread.

        A thread cannot be cancelled: when its handler is, the worker waits for the thread to return (it can look at
        ``ctx.shutting_down`` or call ``anyio.from_thread.check_cancelled()``), and its lease is kept meanwhile.
        """
        if self.is_async:
            return self.fn
        fn = self.fn

        async def run_in_thread(run: Run, *args: Any) -> Any:
            with real_work():
                (result,) = await to_thread.run_sync(functools.partial(_call, fn, run), *args, limiter=limiter)
            return await result if inspect.isawaitable(result) else result

        return run_in_thread


def _call(fn: Callable[..., Any], run: Run, *args: Any) -> tuple[Any]:
    """Call it in the worker thread.

    The result comes wrapped: trio refuses a bare awaitable. What generators speak with cannot cross a future: it would pass
    the coroutines that wait for it.
    """
    run.thread_id = threading.get_ident()
    try:
        return (fn(*args),)
    except (StopIteration, GeneratorExit) as error:
        raise RuntimeError(f"the handler raised {type(error).__name__}") from error
    finally:
        run.thread_id = None


def inspect_handler(fn: Callable[..., Any], names: Mapping[str, Any], *, body: Any = None) -> Handler:
    """Look at a handler: ``(job)`` or ``(job, ctx)``, async or plain.

    ``names`` are those of the caller's scope, for annotations that name a local class; ``body`` stands in for the annotation
    of the first parameter. Raises :class:`ConfigError` for what cannot be called that way.
    """
    if not callable(fn):
        raise ConfigError(f"a handler must be callable, not {fn!r}; give an `async def` or a plain function")
    name = _short_name(innermost(fn))
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"handler {name}: its parameters cannot be read ({error}); wrap it in a function") from error
    target = code_of(fn)
    if inspect.isgeneratorfunction(target) or inspect.isasyncgenfunction(target):
        raise ConfigError(
            f"handler {name} is a generator, which would never run; return the result instead of yielding"
        )
    positional = _parameters(name, signature)
    annotations = _Annotations(name, target, names)
    first = positional[0].name if positional else ""
    return Handler(
        fn=fn,
        name=name,
        is_async=is_async(fn),
        wants_context=len(positional) > 1 and _is_context(positional[1], annotations),
        body_type=annotations.needed(first) if body is None else body,
        reply_type=_reply_type(annotations.known("return")),
    )


def _short_name(fn: Any) -> str:
    name: str = getattr(fn, "__qualname__", None) or type(fn).__qualname__
    return name.rpartition("<locals>.")[2]


def _parameters(name: str, signature: inspect.Signature) -> list[inspect.Parameter]:
    """Its positional parameters, which are to be one or two."""
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


def _is_context(parameter: inspect.Parameter, annotations: _Annotations) -> bool:
    """Whether the second parameter is for the context, rather than an option of the function's own."""
    if parameter.default is inspect.Parameter.empty or parameter.name in _CONTEXT_NAMES:
        return True
    return getattr(annotations.known(parameter.name), "__name__", "") == "Context"


def _reply_type(returned: Any) -> Any:
    if typing.get_origin(returned) in (Awaitable, Coroutine):  # a plain function that leaves the rest to a coroutine
        returned = typing.get_args(returned)[-1]
    return None if returned is type(None) else returned


class _Annotations:
    """The annotations of one function, each resolved by itself: one that cannot be does not spoil the others.

    Linters move imports that only annotations need under ``TYPE_CHECKING``, so that an unknown type of the second parameter
    or of the result is nothing unusual.
    """

    def __init__(self, name: str, target: Any, names: Mapping[str, Any]) -> None:
        self._name = name
        target = inspect.unwrap(target)
        self._globals: dict[str, Any] = getattr(target, "__globals__", {})
        self._locals = names
        try:
            self._raw: Mapping[str, Any] = dict(getattr(target, "__annotations__", {}))
        except NameError:  # from Python 3.14 on they are evaluated here
            self._raw = {}

    def known(self, what: str) -> Any:
        """The type of a parameter (or of ``"return"``), or None where there is none or it cannot be resolved."""
        try:
            return self._resolve(what)
        except Exception:
            return None

    def needed(self, what: str) -> Any:
        """As :meth:`known`, but a :class:`ConfigError` where it cannot be resolved."""
        try:
            return self._resolve(what)
        except Exception as error:  # an annotation may be any expression, and so raise anything
            raise ConfigError(
                f"handler {self._name}: the annotation of {what} cannot be resolved ({error}); define the class at module"
                " level or pass body="
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
