"""The slices of one session: what they are called, how events change them, and how they are seen. Decides only; no I/O."""

from __future__ import annotations

import dataclasses
from collections.abc import MutableMapping, MutableSequence, MutableSet
from functools import reduce
from operator import or_
from types import AsyncGeneratorType, CoroutineType, GeneratorType, MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, get_args, get_origin, get_type_hints

from mainspring.errors import ConfigError, InvalidParameterError, ReducerError, describe
from mainspring.state.session.reducers import On, Reducer, as_reducer, check_event_type, events_of, return_type

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

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
        """Another number once more is registered."""
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
        """The slices after ``event``, and the names of those that took it.

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
        """Let the state class look at the slices, where it has a ``__post_init__``.

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
        """Whether some slice is reduced from such events."""
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
        """The slices as an instance of the state class, or as a mapping that cannot be written where there is none."""
        if self._state_class is None:
            return MappingProxyType(values)
        return self._state_class(**{name: values[name] for name in self._fields})

    def type_of(self, name: str) -> Any:
        """The type of a slice, for its way to JSON and back.

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
    """What one annotation of a field says; nothing where it is another library's."""
    if isinstance(note, On):
        yield note.event_type, note.reducer
    elif isinstance(note, Reducer) or callable(note):
        reducer = as_reducer(note)
        for event_type in events_of(reducer, note, slice_type):
            yield event_type, reducer
