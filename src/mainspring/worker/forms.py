"""The forms that the members of a foreign ``Runnable`` may have: plain or async, and which keywords they take."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from mainspring.core.introspection import innermost, is_async
from mainspring.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

RUN_KEYWORDS = ("max_iterations", "visibility_timeout", "wait_time_seconds")


class Form:
    """How one method can be called: ``is_async``, and with which of the keywords that are offered.

    :raises ConfigError: it cannot be called so, is a generator, or needs more than it can be given.
    """

    def __init__(self, owner: object, name: str, offered: Collection[str], always: Collection[str] = ()) -> None:
        self._called = f"{owner!r}: {name}()"
        fn = getattr(owner, name)
        if isinstance(owner, type):
            raise ConfigError(f"{owner!r} is a class; give an instance of it")
        if not callable(fn):
            raise ConfigError(f"{owner!r}: {name} must be a method, plain or async, not {fn!r}")
        target = innermost(fn)
        if inspect.isasyncgenfunction(target) or inspect.isgeneratorfunction(target):
            raise ConfigError(f"{self._called} is a generator, which only yields; let it return when it is done")
        self.is_async = is_async(fn)
        self._keywords, self._any = self._parameters(fn, offered, always)

    def _parameters(self, fn: Any, offered: Collection[str], always: Collection[str]) -> tuple[frozenset[str], bool]:
        try:
            parameters = inspect.signature(fn).parameters.values()
        except (TypeError, ValueError):  # of C code that does not tell
            return frozenset(), False
        named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        for one in parameters:
            needed = one.default is inspect.Parameter.empty and one.kind not in variable
            if needed and not (one.kind in named and one.name in always):
                given = ", ".join(offered)
                raise ConfigError(
                    f"{self._called} needs {one.name!r}: give it a default; it may be called with nothing but {given}"
                )
        accepted = frozenset(one.name for one in parameters if one.kind in named and one.name in offered)
        return accepted, any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters)

    def accepted(self, keywords: dict[str, Any]) -> dict[str, Any]:
        """Those of ``keywords`` that it takes."""
        return {name: value for name, value in keywords.items() if self._any or name in self._keywords}


def value_of(owner: object, name: str, default: Any = None) -> Any:
    """An attribute, or what the plain function of that name returns; ``default`` where it is async or missing."""
    found = getattr(owner, name, default)
    if inspect.isroutine(innermost(found)):
        method: Callable[[], Any] = found
        return default if is_async(method) else method()
    return found


def check_heartbeat(owner: object) -> None:
    """Raise :class:`ConfigError` where ``heartbeat`` is neither a Heartbeat, nor None."""
    found = value_of(owner, "heartbeat")
    if found is not None and not all(callable(getattr(found, name, None)) for name in ("beat", "elapsed")):
        raise ConfigError(f"{owner!r}: heartbeat must be a Heartbeat, or None (then it is not judged), not {found!r}")
