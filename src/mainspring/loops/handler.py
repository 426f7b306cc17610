"""From the function a user wrote to one that the worker can call: its types, its parameters, its way of running."""

from __future__ import annotations

import functools
import inspect
import threading
import typing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from anyio import to_thread

from mainspring.clock import real_work
from mainspring.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

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
                result = await to_thread.run_sync(functools.partial(_call, fn, run), *args, limiter=limiter)
            return await result if inspect.isawaitable(result) else result

        return run_in_thread


def _call(fn: Callable[..., Any], run: Run, *args: Any) -> Any:
    """Call it in the worker thread; a ``StopIteration`` cannot cross a future and would be lost there."""
    run.thread_id = threading.get_ident()
    try:
        return fn(*args)
    except StopIteration as error:
        raise RuntimeError("the handler raised StopIteration") from error
    finally:
        run.thread_id = None


def inspect_handler(fn: Callable[..., Any], names: Mapping[str, Any]) -> Handler:
    """Look at a handler: ``(job)`` or ``(job, ctx)``, async or plain.

    ``names`` are those of the caller's scope, for annotations that name a local class. Raises :class:`ConfigError` for what
    cannot be called that way.
    """
    if not callable(fn):
        raise ConfigError(f"a handler must be callable, not {fn!r}; give an `async def` or a plain function")
    name = getattr(fn, "__qualname__", None) or type(fn).__qualname__
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"handler {name}: its parameters cannot be read ({error}); wrap it in a function") from error
    positional = [p for p in signature.parameters.values() if p.kind in _POSITIONAL]
    required = [p for p in positional if p.default is inspect.Parameter.empty]
    star = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in signature.parameters.values())
    keyword_only = [
        p.name
        for p in signature.parameters.values()
        if p.kind is inspect.Parameter.KEYWORD_ONLY and p.default is inspect.Parameter.empty
    ]
    if len(required) > 2 or keyword_only or not (positional or star):
        raise ConfigError(f"handler {name}{signature}: it must take (job) or (job, ctx)")
    hints = _hints(fn, name, names)
    second = positional[1] if len(positional) > 1 else None
    wants_context = second is not None and (
        second.default is inspect.Parameter.empty
        or second.name in _CONTEXT_NAMES
        or getattr(hints.get(second.name), "__name__", "") == "Context"
    )
    target = fn if inspect.isroutine(fn) or isinstance(fn, functools.partial) else type(fn).__call__
    return Handler(
        fn=fn,
        name=name,
        is_async=inspect.iscoroutinefunction(target),
        wants_context=wants_context,
        body_type=hints.get(positional[0].name) if positional else None,
        reply_type=None if hints.get("return") is type(None) else hints.get("return"),
    )


def _hints(fn: Callable[..., Any], name: str, names: Mapping[str, Any]) -> dict[str, Any]:
    target: Any = fn
    while isinstance(target, functools.partial):
        target = target.func
    if not inspect.isroutine(target):
        target = type(target).__call__
    target = inspect.unwrap(target)
    try:
        return typing.get_type_hints(target, localns=None, include_extras=True)
    except NameError:
        try:
            return typing.get_type_hints(target, localns=dict(names), include_extras=True)
        except NameError as error:
            raise ConfigError(
                f"handler {name}: its annotation cannot be resolved ({error}); define the class at module level or pass"
                " body="
            ) from None
    except (TypeError, SyntaxError) as error:
        raise ConfigError(
            f"handler {name}: its annotations cannot be read ({error}); correct them or pass body="
        ) from error
