"""The slices of one session: how events change them (reducers), and how they are seen. Decides only; no I/O."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import MutableMapping, MutableSequence, MutableSet
from dataclasses import dataclass
from functools import reduce
from itertools import chain
from operator import attrgetter, indexOf, or_
from types import AsyncGeneratorType, CoroutineType, GeneratorType, MappingProxyType, NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

from mainspring.core.introspection import check_plain, code_of, innermost, is_async, is_generator
from mainspring.errors import ConfigError, InvalidParameterError, ReducerError, describe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

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
    """Return what was given as a reducer, if it is a plain function that can be called as ``(slice, event)``; else raise."""
    if isinstance(given, Reducer):
        return given
    if not callable(given):
        raise ConfigError(f"a reducer must be append, replace_latest, upsert_by(key) or a function, not {given!r}")
    name = getattr(innermost(given), "__qualname__", type(given).__qualname__).rpartition("<locals>.")[2]
    if is_async(given) or is_generator(given):
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
    """Return the event types of a reducer in an annotation that does not say them.

    They are what the slice holds, or the type of a function's second parameter.
    """
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
    """Return the annotation of the second parameter of a function, or None."""
    names = list(inspect.signature(fn).parameters)
    return _hints(fn).get(names[1]) if len(names) > 1 else None


def return_type(fn: Any) -> Any:
    """Return the annotation of what a function returns, or None."""
    return _hints(fn).get("return")


def _hints(fn: Any) -> dict[str, Any]:
    try:
        return get_type_hints(code_of(fn), include_extras=True)
    except Exception:  # an annotation may be any expression; then the function does not say
        return {}


def check_event_type(kind: Any) -> None:
    """Raise :class:`ConfigError` if it is no class of immutable values."""
    if not isinstance(kind, type):
        raise ConfigError(f"an event type must be a class, not {kind!r}")
    parameters = getattr(kind, "__dataclass_params__", None)
    frozen = parameters.frozen if parameters is not None else getattr(kind, "model_config", {}).get("frozen", False)
    if not (frozen or issubclass(kind, tuple)):
        raise ConfigError(
            f"{kind.__qualname__} cannot be an event: make it a @dataclass(frozen=True), so that no code can change what"
            " has happened"
        )


if TYPE_CHECKING:
    Values: TypeAlias = Mapping[str, Any]
    """The slices at one moment. Never changed: a later moment is another one."""
    Route: TypeAlias = tuple[tuple[str, ...], tuple[tuple[str, Callable[[Any, Any], Any], str], ...]]

NOT_GIVEN: Any = object()
_CHANGEABLE = (MutableSequence, MutableMapping, MutableSet, CoroutineType, GeneratorType, AsyncGeneratorType)
"""What no slice can be: lists, dicts, sets and their like, and what an async reducer returns."""


class Slices:
    """What a state class declares, and what is registered by call."""

    def __init__(self, session: str, state: Any = None) -> None:
        self._session = session
        self._rules: list[tuple[type[Any], str, Reducer]] = []
        self._routes: dict[type[Any], Route] = {}
        self._types: dict[str, Any] = {}
        self._unchangeable: set[type[Any]] = set()
        self._state_class: type[Any] | None = None
        self._fields: tuple[str, ...] = ()
        self._judges = False
        self.initial: dict[str, Any] = {}
        if state is not None:
            self._declare(state)

    @property
    def event_types(self) -> tuple[type[Any], ...]:
        """The types that some slice is reduced from, each once, in the order in which they were named."""
        return tuple(dict.fromkeys(kind for kind, _, _ in self._rules))

    @property
    def revision(self) -> int:
        """A number that changes once more is registered."""
        return len(self._rules)

    @property
    def state_class(self) -> type[Any] | None:
        """The class that declares the slices, or None."""
        return self._state_class

    # ------------------------------------------------------------------------------------------------- what there is

    def register(self, event_type: Any, name: Any, reducer: Any, initial: Any, kind: Any) -> None:
        """Reduce a slice, which is made where there is none of that name, from the events of one type."""
        check_event_type(event_type)
        known = as_reducer(reducer)
        if not (isinstance(name, str) and name.isidentifier()):
            raise InvalidParameterError(f"register: a slice is called by a name like 'messages', not {name!r}")
        if name in self.initial:
            if initial is not NOT_GIVEN:
                raise ConfigError(f"the slice {name!r} has an initial value already; leave `initial` out")
        elif initial is NOT_GIVEN and known.holds == "other":
            raise ConfigError(
                f"the slice {name!r} is new: register(…, initial=…) says what it is before the first event"
            )
        else:
            first = initial if initial is not NOT_GIVEN else () if known.holds == "many" else None
            self.initial[name] = self._checked(first, name, "its initial value")
        if kind is not None:
            self._types[name] = kind
        elif known.holds == "other" and name not in self._types and (said := return_type(known.step)) is not None:
            self._types[name] = said
        self._add(event_type, name, known)

    def _declare(self, state: Any) -> None:
        kind = state if isinstance(state, type) else type(state)
        parameters = getattr(kind, "__dataclass_params__", None)
        if parameters is None or not parameters.frozen:
            raise ConfigError(f"{kind.__qualname__} cannot be a session's state: make it a @dataclass(frozen=True)")
        self._state_class, self._judges = kind, hasattr(kind, "__post_init__")
        try:
            first = kind() if isinstance(state, type) else state
            hints = get_type_hints(kind, include_extras=True)
        except TypeError as error:
            raise ConfigError(
                f"{kind.__qualname__} needs a default for each field, or give an instance: {error}"
            ) from None
        except NameError as error:
            raise ConfigError(
                f"{kind.__qualname__}: {error}; define what its annotations name at module level"
            ) from None
        self._fields = tuple(field.name for field in dataclasses.fields(kind) if field.init)
        for name in self._fields:
            self.initial[name] = self._checked(getattr(first, name), name, "its initial value")
            hint = hints[name]
            if get_origin(hint) is not Annotated:
                self._types[name] = hint
                continue
            self._types[name], *notes = get_args(hint)
            for note in notes:
                for event_type, reducer in _rules_of(note, self._types[name]):
                    self._add(event_type, name, reducer)

    def _add(self, event_type: type[Any], name: str, reducer: Reducer) -> None:
        self._rules.append((event_type, name, reducer))
        self._routes.clear()

    # --------------------------------------------------------------------------------------------------- what happens

    def reduce(self, values: Values, event: Any) -> tuple[Values, tuple[str, ...]]:
        """Return the slices after ``event``, and the names of the slices that took it.

        :raises ReducerError: a reducer raised, or returned what can be changed, or the state class does not take it; ``values``
            hold on.
        """
        route = self._routes.get(event.__class__)
        changed, steps = route if route is not None else self._route(event.__class__)
        if not steps:
            return values, changed
        after = {**values}
        for name, step, label in steps:
            try:
                value = step(after[name], event)
            except (Exception, SystemExit) as error:
                raise ReducerError(
                    f"session {self._session!r}: the reducer {label} of slice {name!r} failed on"
                    f" {type(event).__qualname__}: {describe(error)}"
                ) from error
            after[name] = value if value.__class__ in self._unchangeable else self._checked(value, name, label)
        if self._judges:
            self.check(after)
        return after, changed

    def check(self, values: Values) -> None:
        """Have the state class check the slices, if it has a ``__post_init__``.

        :raises ReducerError: that raised.
        """
        if not self._judges:
            return
        try:
            self.view(values)
        except (Exception, SystemExit) as error:
            name = getattr(self._state_class, "__qualname__", "")
            raise ReducerError(f"session {self._session!r}: {name} refuses its slices: {describe(error)}") from error

    def reduces(self, event_type: type[Any]) -> bool:
        """True if some slice is reduced from such events."""
        return bool(self._route(event_type)[0])

    def _route(self, kind: type[Any]) -> Route:
        steps = tuple(
            (name, reducer.step, reducer.name) for wanted, name, reducer in self._rules if issubclass(kind, wanted)
        )
        route = self._routes[kind] = tuple(dict.fromkeys(name for name, _, _ in steps)), steps
        return route

    def _checked(self, value: Any, name: str, label: str) -> Any:
        if not isinstance(value, _CHANGEABLE):
            self._unchangeable.add(value.__class__)  # what is looked up costs less
            return value
        if isinstance(value, CoroutineType):
            value.close()  # else Python warns that it was never awaited
        raise ReducerError(
            f"session {self._session!r}: slice {name!r} cannot be a {type(value).__name__} ({label}): it could be changed"
            " behind the session's back; use a tuple, a frozenset or a frozen dataclass"
        )

    # ---------------------------------------------------------------------------------------------------- how it looks

    def view(self, values: Values) -> Any:
        """Return the slices as an instance of the state class, or as a read-only mapping if there is none."""
        if self._state_class is None:
            return MappingProxyType(values)
        return self._state_class(**{name: values[name] for name in self._fields})

    def type_of(self, name: str) -> Any:
        """Return the type of a slice, for its way to JSON and back.

        :raises ConfigError: nothing says it.
        """
        if name in self._types:
            return self._types[name]
        rules = [(kind, reducer.holds) for kind, slice_, reducer in self._rules if slice_ == name]
        events: Any = reduce(or_, (kind for kind, _ in rules))
        if all(holds == "many" for _, holds in rules):
            return tuple[events, ...]
        if all(holds == "one" for _, holds in rules) and self.initial[name] is None:
            return events | None
        raise ConfigError(
            f"session {self._session!r}: nothing says of what type slice {name!r} is: register(…, type=…), or annotate what"
            " its reducer returns"
        )


def _rules_of(note: Any, slice_type: Any) -> Iterator[tuple[type[Any], Reducer]]:
    """Yield the event types and reducers that one annotation of a field says; none if it is another library's."""
    if isinstance(note, On):
        yield note.event_type, note.reducer
    elif isinstance(note, Reducer) or callable(note):
        reducer = as_reducer(note)
        for event_type in events_of(reducer, note, slice_type):
            yield event_type, reducer
