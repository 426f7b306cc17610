"""What users hand over to be called: the function below its wrappings, its name, whether calling it gives a coroutine, and
what to write instead of what cannot be called."""

from __future__ import annotations

import functools
import inspect
from typing import Any


def innermost(fn: Any) -> Any:
    """The function or object under partials."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return fn


def code_of(fn: Any) -> Any:
    """What runs when ``fn`` is called: a function, or the ``__call__`` of an object's class."""
    fn = innermost(fn)
    return fn if inspect.isroutine(fn) else type(fn).__call__


def is_async(fn: Any) -> bool:
    """Whether ``fn`` is an ``async def``, also under partials or as the ``__call__`` of an object."""
    return inspect.iscoroutinefunction(code_of(fn))


def name_of(fn: Any) -> str:
    """The name of what is called, for people to read: without where it was defined, and without wrappings."""
    fn = innermost(fn)
    name: str = getattr(fn, "__qualname__", None) or type(fn).__qualname__
    return name.rpartition("<locals>.")[2]


def instead_of(given: Any, call: str) -> str:
    """The end of an error about what is no function: what it is, and, of a coroutine, how to write the ``call`` instead.

    A coroutine that has not begun is closed, as nobody will await it: Python would complain of that in a second place.
    """
    if not inspect.iscoroutine(given):
        return f"not {given!r}"
    if inspect.getcoroutinestate(given) == inspect.CORO_CREATED:
        given.close()
    name = given.__name__
    return f"not a coroutine: write {call}({name}, …) instead of {call}({name}(…))"
