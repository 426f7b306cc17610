"""What users hand over to be called: the function below its wrappings, its name, whether calling it gives a coroutine, and
what to write instead of what cannot be called."""

from __future__ import annotations

import functools
import inspect
import sys
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any, TypeVar

from mainspring.errors import ConfigError, InvalidParameterError, MainspringError, TaskExitError

T = TypeVar("T")


def innermost(fn: Any) -> Any:
    """Return the function or object under partials."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return fn


def code_of(fn: Any) -> Any:
    """Return what runs when ``fn`` is called: a function, or the ``__call__`` of an object's class."""
    fn = innermost(fn)
    return fn if inspect.isroutine(fn) else type(fn).__call__


def is_async(fn: Any) -> bool:
    """True if ``fn`` is an ``async def``, also under partials or as the ``__call__`` of an object."""
    return inspect.iscoroutinefunction(code_of(fn))


def gives_coroutine(fn: Any) -> bool:
    """True if a call of ``fn`` gives a coroutine as far as can be seen: it is async, or wraps (``__wrapped__``) what is."""
    return is_async(fn) or is_async(inspect.unwrap(innermost(fn)))


def is_generator(fn: Any) -> bool:
    """True if a call of ``fn`` only makes a generator, plain or async; it is seen through as by :func:`is_async`."""
    code = code_of(fn)
    return inspect.isgeneratorfunction(code) or inspect.isasyncgenfunction(code)


def check_runs(
    fn: Any,
    called: str,
    *,
    advice: str = "return the result instead of yielding",
    error: type[MainspringError] = ConfigError,
) -> None:
    """Raise ``error`` where a call of ``fn`` would run nothing of it: it is a generator function or a class.

    ``called`` says for what it was given, as ``"handler"``; ``advice`` what to write instead of a generator.
    """
    if is_generator(fn):
        raise error(f"{called} {name_of(fn)} is a generator, which would never run; {advice}")
    if isinstance(innermost(fn), type):
        what = "is a class, of which a call makes an object and runs nothing"
        raise error(f"{called} {name_of(fn)} {what}; give an object of it, or a function")


def check_plain(fn: Any, called: str, error: type[MainspringError] = ConfigError) -> None:
    """Raise ``error`` unless ``fn`` is a plain function: of an async one or a generator, a call would run nothing."""
    if not callable(fn) or is_async(fn) or is_generator(fn):
        raise error(f"{called} must be a plain function, not {fn!r}")


def ran(result: T, called: str, error: type[MainspringError] = InvalidParameterError) -> T:
    """Return what a call gave, unless that is work which has not run: a generator, or something that was not awaited.

    A coroutine that has not begun is closed, so that Python does not warn of it as well. ``called`` names what was called, and
    ``error`` is raised where it is such work.
    """
    if result is None:
        return result
    kind = type(result)
    if kind is GeneratorType or kind is AsyncGeneratorType:
        what, advice = "a generator", "return the result instead of yielding"
    elif hasattr(kind, "__await__"):
        what, advice = ("a coroutine" if kind is CoroutineType else f"an awaitable ({kind.__qualname__})"), "await it"
    else:
        return result
    close_unbegun(result)
    raise error(f"{called} returned {what}, so its work has not run to its end; {advice}")


def unrun(result: Any) -> str | None:
    """Return what a call gave, in words, where that is work which nothing runs; else None. A task or a future runs by itself.

    A coroutine is closed, so that Python does not warn of it as well.
    """
    if isinstance(result, CoroutineType):
        result.close()
        return "a coroutine"
    return "a generator" if isinstance(result, GeneratorType | AsyncGeneratorType) else None


def bearable(error: BaseException, name: str) -> BaseException:
    """Return what the task gets that waits for a thread in which ``name`` raised ``error``: an error of its own, or ``error``.

    What generators speak with cannot cross a future: it would pass the coroutines that wait for it. An exit would end the event
    loop. A cancellation would be taken for one of the waiting task, which then ends as if it had been asked to.
    """
    if isinstance(error, StopIteration | GeneratorExit):
        changed: Exception = RuntimeError(f"{name} raised {type(error).__name__}")
    elif isinstance(error, SystemExit | KeyboardInterrupt):
        changed = TaskExitError(f"{name} raised {error!r}; to end the program, call its group's shutdown()")
    elif isinstance(error, cancellations()):
        changed = TaskExitError(f"{name} raised a spurious cancellation; catch it where it arises")
    else:
        return error
    changed.__cause__ = error
    return changed


def cancellations() -> tuple[type[BaseException], ...]:
    """Return the cancellations of all loaded libraries: work may use another one than its caller does."""
    places = (("asyncio", "CancelledError"), ("concurrent.futures", "CancelledError"), ("trio", "Cancelled"))
    found = (getattr(sys.modules.get(module), name, None) for module, name in places)  # no name: it is being imported
    return tuple(kind for kind in found if kind is not None)


def close_unbegun(given: Any) -> bool:
    """Close a coroutine that has not begun: it will not be awaited, and Python would warn. True if it was one."""
    unbegun = type(given) is CoroutineType and inspect.getcoroutinestate(given) == inspect.CORO_CREATED
    if unbegun:
        given.close()
    return unbegun


def name_of(fn: Any) -> str:
    """Return the name of what is called, for people to read: without where it was defined, and without wrappings."""
    fn = innermost(fn)
    name: str = getattr(fn, "__qualname__", None) or type(fn).__qualname__
    return name.rpartition("<locals>.")[2]


def instead_of(given: Any, call: str) -> str:
    """Return the end of an error about what is no function: what it is, and, of a coroutine, how to write the ``call`` instead.

    A coroutine that has not begun is closed: see :func:`close_unbegun`.
    """
    if not inspect.iscoroutine(given):
        return f"not {given!r}"
    close_unbegun(given)
    name = given.__name__
    return f"not a coroutine: write {call}({name}, …) instead of {call}({name}(…))"
