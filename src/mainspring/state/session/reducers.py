"""Reducers: how an event makes a slice's next value out of its present one. Plain functions, without I/O."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, indexOf
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

from mainspring.core.introspection import check_plain, code_of, innermost, is_async
from mainspring.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    Step: TypeAlias = Callable[[Any, Any], Any]

Holds: TypeAlias = Literal["many", "one", "other"]


@dataclass(frozen=True, slots=True)
class Reducer:
    """``step(slice, event)`` is the slice's next value. ``holds``: many events, the latest one, or something else."""

    name: str
    step: Step
    holds: Holds = "other"


@dataclass(frozen=True, slots=True)
class On:
    """A reducer for events of one type, as a state class's annotation says it."""

    event_type: type[Any]
    reducer: Reducer


def _append(events: tuple[Any, ...], event: Any) -> tuple[Any, ...]:
    return events + (event,)  # noqa: RUF005 - one copy; `(*events, event)` makes two


def _latest(before: Any, event: Any) -> Any:
    return event


append = Reducer("append", _append, "many")
"""Keep every event: the slice is a tuple that ends with the latest one. Each costs a copy of the tuple."""

replace_latest = Reducer("replace_latest", _latest, "one")
"""Keep the latest event only: the slice is that event, or what it was at first."""


def upsert_by(key: str | Callable[[Any], Any]) -> Reducer:
    """Keep one event for each key, the latest: the slice is a tuple in the order in which the keys first came.

    :param key: the name of the attribute that is the key, or a function from an event to its key.
    """
    if not (callable(key) or (isinstance(key, str) and key.isidentifier())):
        raise ConfigError(
            f"upsert_by takes the name of an attribute, or a function from an event to its key, not {key!r}"
        )
    if callable(key):
        check_plain(key, "upsert_by: the key")
    key_of: Callable[[Any], Any] = attrgetter(key) if isinstance(key, str) else key

    def upsert(events: tuple[Any, ...], event: Any) -> tuple[Any, ...]:
        wanted = key_of(event)
        # The wanted key is also the last one looked at, so that no error of a key is taken for "not found".
        place = indexOf(chain(map(key_of, events), (wanted,)), wanted)
        return events[:place] + (event,) + events[place + 1 :]  # noqa: RUF005 - as above

    return Reducer("upsert_by", upsert, "many")


def on(event_type: type[Any], reducer: Reducer | Step) -> On:
    """Say in a slice's annotation which events it is reduced from: ``Annotated[int, on(Spent, lambda sum, e: sum + e.n)]``.

    :raises ConfigError: the type is not immutable, or the reducer is no plain function of ``(slice, event)``.
    """
    check_event_type(event_type)
    return On(event_type, as_reducer(reducer))


def as_reducer(given: Any) -> Reducer:
    """What was given as a reducer, looked at: it must be a plain function that can be called as ``(slice, event)``."""
    if isinstance(given, Reducer):
        return given
    if not callable(given):
        raise ConfigError(f"a reducer must be append, replace_latest, upsert_by(key) or a function, not {given!r}")
    name = getattr(innermost(given), "__qualname__", type(given).__qualname__).rpartition("<locals>.")[2]
    target = code_of(given)
    if is_async(given) or inspect.isgeneratorfunction(target) or inspect.isasyncgenfunction(target):
        raise ConfigError(
            f"the reducer {name} is async or a generator; make it a plain function of (slice, event): what waits belongs"
            " before the dispatch"
        )
    try:
        inspect.signature(given).bind(None, None)
    except TypeError:
        raise ConfigError(f"the reducer {name} cannot be called as (slice, event)") from None
    except ValueError:  # one in C, which does not say
        pass
    return Reducer(name, given)


def events_of(reducer: Reducer, given: Any, slice_type: Any) -> tuple[type[Any], ...]:
    """The event types of a reducer in an annotation that does not say them: those that the slice holds, or, of a function,
    those of its second parameter."""
    if reducer.holds == "many":
        items = get_args(slice_type)
        found = items[0] if get_origin(slice_type) is tuple and len(items) == 2 and items[1] is ... else None
    elif reducer.holds == "one":
        found = slice_type
    else:
        found = parameter_type(given)
    members = get_args(found) if get_origin(found) in (Union, UnionType) else (found,)
    kinds = tuple(kind for kind in members if kind is not NoneType)
    if not kinds or not all(isinstance(kind, type) for kind in kinds):
        raise ConfigError(
            f"the reducer {reducer.name} does not say for which events it is; write on(EventType, {reducer.name})"
        )
    for kind in kinds:
        check_event_type(kind)
    return kinds


def parameter_type(fn: Any) -> Any:
    """The annotation of the second parameter of a function, or None."""
    names = list(inspect.signature(fn).parameters)
    return _hints(fn).get(names[1]) if len(names) > 1 else None


def return_type(fn: Any) -> Any:
    """The annotation of what a function returns, or None."""
    return _hints(fn).get("return")


def _hints(fn: Any) -> dict[str, Any]:
    try:
        return get_type_hints(code_of(fn), include_extras=True)
    except Exception:  # an annotation may be any expression; then the function does not say
        return {}


def check_event_type(kind: Any) -> None:
    """Raise :class:`ConfigError` for what is no class of immutable values."""
    if not isinstance(kind, type):
        raise ConfigError(f"an event type must be a class, not {kind!r}")
    parameters = getattr(kind, "__dataclass_params__", None)
    frozen = parameters.frozen if parameters is not None else getattr(kind, "model_config", {}).get("frozen", False)
    if not (frozen or issubclass(kind, tuple)):
        raise ConfigError(
            f"{kind.__qualname__} cannot be an event: make it a @dataclass(frozen=True), so that nobody can change what"
            " has happened"
        )
