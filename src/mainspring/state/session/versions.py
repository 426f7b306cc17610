"""What stored events and states are called, in which version, and how old ones are brought up to date."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import CoroutineType
from typing import TYPE_CHECKING, Any, TypeVar

from mainspring.core.introspection import is_async
from mainspring.errors import ConfigError, SerializationError, UnknownVersionError, describe
from mainspring.validation import is_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

C = TypeVar("C", bound=type[Any])

_ATTRIBUTE = "__mainspring_version__"


@dataclass(frozen=True, slots=True)
class Version:
    """The stored name of a class, the number of its present shape, and the functions that lead there from older ones."""

    name: str
    number: int = 1
    upcast: Mapping[int, Callable[[Any], Any]] = field(default_factory=dict)

    def up_to_date(self, data: Any, number: int) -> Any:
        """``data`` (plain JSON), stored as version ``number``, in its present shape."""
        if not is_whole(number, 1) or number > self.number:
            raise UnknownVersionError(
                f"{self.name!r} is stored in version {number!r}, and this code knows it up to version {self.number};"
                " a newer release wrote it: upgrade here too"
            )
        for old in range(number, self.number):
            step = self.upcast.get(old)
            if step is None:
                raise UnknownVersionError(
                    f"{self.name!r} is stored in version {number}, and nothing leads from version {old} to {old + 1}: give"
                    f" @versioned({self.number}, upcast={{{old}: …}})"
                )
            try:
                data = step(data)
                _check_json(data)
            except (Exception, SystemExit) as error:
                raise SerializationError(
                    f"the upcaster of {self.name!r} from version {old} failed: {describe(error)}"
                ) from error
        return data


def _check_json(data: Any) -> None:
    """Raise for what an upcaster cannot return."""
    from pydantic_core import to_json

    if isinstance(data, CoroutineType):
        data.close()  # else Python warns that it was never awaited
        raise TypeError("it returned a coroutine; make it a plain function")
    to_json(data)


def versioned(
    number: int, *, upcast: Mapping[int, Callable[[Any], Any]] | None = None, name: str | None = None
) -> Callable[[C], C]:
    """Class decorator: events or states of this class are stored as version ``number`` (1 where there is no decorator).

    :param upcast: by old number, the function from that version's JSON data to the next one's: ``{1: one_to_two}``. A stored
        version that none leads on from raises :class:`UnknownVersionError` when it is read.
    :param name: what the class is called where it is stored (its own name, where there is none): keep it when you rename it.
    :raises ConfigError: the number is not a whole one from 1, or an upcaster is for no older version, or is async.
    """
    steps = dict(upcast or {})
    if not is_whole(number, 1):
        raise ConfigError(f"versioned: the version must be a whole number from 1, not {number!r}")
    for old, step in steps.items():
        if not (is_whole(old, 1) and old < number and callable(step)):
            raise ConfigError(f"versioned({number}): {old!r} is no older version with a function to the next one")
        if is_async(step):
            raise ConfigError(f"versioned({number}): the upcaster from version {old} is async; give a plain function")

    def decorate(kind: C) -> C:
        setattr(kind, _ATTRIBUTE, Version(name or _name(kind), number, steps))
        return kind

    return decorate


def version_of(kind: type[Any]) -> Version:
    """What :func:`versioned` said of the class itself (a subclass is another one), else version 1 under its own name."""
    said = vars(kind).get(_ATTRIBUTE)
    return said if isinstance(said, Version) else Version(_name(kind))


def _name(kind: type[Any]) -> str:
    return kind.__qualname__.rpartition("<locals>.")[2]
