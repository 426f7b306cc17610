"""What may stand at a key of a file of services, value by value: text comes in, what is meant goes out.

Each reader takes what a file or an environment variable has, and raises :class:`WrongValueError` with what is allowed.
"""

from __future__ import annotations

import json
import re
import shlex
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, TypeAlias, TypeVar

from pydantic import BeforeValidator, PlainValidator

from mainspring.errors import ConfigError
from mainspring.services.spec import NAME
from mainspring.validation import duration

if TYPE_CHECKING:
    from collections.abc import Callable

E = TypeVar("E", bound=StrEnum)
V = TypeVar("V")

SIZE_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
MOST_SECONDS = 366 * 86_400.0
_TRUE = frozenset({"true", "yes", "on"})
_FALSE = frozenset({"false", "no", "off"})
_WHOLE = re.compile(r"[+-]?[0-9]{1,18}")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,3})?")
_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?) ?([A-Za-z]*)")


class WrongValueError(ValueError):
    """A value cannot be used. ``allowed`` says which could, where the text does not."""

    def __init__(self, text: str, allowed: str = "") -> None:
        super().__init__(text)
        self.allowed = allowed


def shown(value: object) -> str:
    """Return a value for an error: texts in quotes and cut, the rest by kind."""
    if isinstance(value, str):
        return repr(value if len(value) <= 60 else f"{value[:60]}…")
    return "no value" if value is None else "a list" if isinstance(value, list) else "a mapping"


def by_constructor(make: Callable[[], V]) -> V:
    """Return what ``make`` returns. Its :class:`ConfigError` becomes :class:`WrongValueError`."""
    try:
        return make()
    except ConfigError as error:
        raise WrongValueError(without_owner(error)) from None


def without_owner(error: ConfigError) -> str:
    """Return what a constructor says of a value, without the name of the class or service that it begins with."""
    return re.sub(r"^(?:service '[^']*'|[A-Za-z]+): ", "", str(error))


def text(value: object) -> str:
    """Read a text."""
    if not isinstance(value, str):
        raise WrongValueError(f"{shown(value)} is no text", "a text")
    if "\0" in value:
        raise WrongValueError(f"{shown(value)} has a NUL character", "a text without one")
    return value


def filled(value: object) -> str:
    """Read a text that is not empty."""
    if not text(value):
        raise WrongValueError("the text is empty", "a text")
    return text(value)


def environment_value(value: object) -> str:
    """Read the value of an environment variable: the text as it is written."""
    if value is None:
        raise WrongValueError("there is no value", 'a text, "" for an empty one')
    return text(value)


def environment_name(value: object) -> str:
    """Read the name of an environment variable."""
    name = text(value)
    if not name or "=" in name:
        raise WrongValueError(f"{shown(name)} is no name of a variable", "a text without '='")
    return name


def service_name(value: object) -> str:
    """Read the name of a service."""
    name = text(value)
    if not NAME.fullmatch(name):
        raise WrongValueError(f"{shown(name)} is no name", "letters, digits, '_', '.' and '-', a letter or digit first")
    return name


def pattern(value: object) -> str:
    """Read a regular expression."""
    try:
        re.compile(filled(value))
    except re.error as error:
        raise WrongValueError(
            f"{shown(value)} is no regular expression: {error}", "a regular expression of Python"
        ) from None
    return filled(value)


def seconds(value: object) -> float:
    """Read a duration of 0 or more."""
    allowed = "60s, 5m, 1h, 1d or a number of seconds, up to 366 days"
    found = duration(value) if isinstance(value, str) else None
    if found is None:
        raise WrongValueError(f"{shown(value)} is no duration", allowed)
    if found > MOST_SECONDS:
        raise WrongValueError(f"{shown(value)} is too long", allowed)
    return found


def seconds_above_zero(value: object) -> float:
    """Read a duration above 0."""
    found = seconds(value)
    if not found:
        raise WrongValueError(f"{shown(value)} is no time", "60s, 5m, 1h, 1d or a number of seconds, above 0")
    return found


def size(value: object) -> int:
    """Read a number of bytes."""
    found = _SIZE.fullmatch(value) if isinstance(value, str) else None
    amount = float(found[1]) * SIZE_UNITS.get(found[2], 0) if found is not None else 0.0
    if not 1 <= amount < 1 << 62:
        raise WrongValueError(
            f"{shown(value)} is no size", "512MiB, 1GiB (KiB, MiB, GiB, TiB) or a number of bytes, from 1"
        )
    return int(amount)


def number(value: object, least: float, most: float | None = None) -> float:
    """Read a number within bounds."""
    found = float(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else None
    if found is None or found < least or (most is not None and found > most):
        raise WrongValueError(f"{shown(value)} is no such number", _range("a number", least, most))
    return found


def whole(value: object, least: int, most: int | None = None) -> int:
    """Read a whole number within bounds."""
    found = int(value) if isinstance(value, str) and _WHOLE.fullmatch(value) else None
    if found is None or found < least or (most is not None and found > most):
        raise WrongValueError(f"{shown(value)} is no such number", _range("a whole number", least, most))
    return found


def _range(what: str, least: float, most: float | None) -> str:
    return f"{what} from {least:g}" + ("" if most is None else f" to {most:g}")


def flag(value: object) -> bool:
    """Read yes or no."""
    word = value.lower() if isinstance(value, str) else ""
    if word not in _TRUE | _FALSE:
        raise WrongValueError(f"{shown(value)} is neither true nor false", "true, false")
    return word in _TRUE


def choice(value: object, kinds: type[E]) -> E:
    """Read a word of a few."""
    try:
        return kinds(text(value))
    except ValueError:
        raise WrongValueError(f"{shown(value)} is no such word", ", ".join(kinds)) from None


def listed(value: object) -> object:
    """Read a list. A text that is JSON of a list counts, as of an environment variable."""
    value = _as_json(value, "[")
    if not isinstance(value, list):
        raise WrongValueError(f"{shown(value)} is no list", "a list")
    return value


def mapped(value: object) -> object:
    """Read a mapping. A text that is JSON of a mapping counts, as of an environment variable."""
    value = _as_json(value, "{")
    if not isinstance(value, dict):
        raise WrongValueError(f"{shown(value)} is no mapping", "a mapping")
    return value


def _as_json(value: object, first: str) -> object:
    if not isinstance(value, str) or not value.lstrip().startswith(first):
        return value
    try:
        return _as_texts(json.loads(value))
    except (ValueError, RecursionError):
        return value


def _as_texts(value: object) -> object:
    """Return a value of JSON as YAML would have it: numbers and truth as text."""
    if isinstance(value, dict):
        return {key: _as_texts(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_as_texts(each) for each in value]
    return value if value is None or isinstance(value, str) else json.dumps(value)


def command(value: object) -> object:
    """Read a command: a list of words, or one text that is split as a shell would split it."""
    value = _as_json(value, "[")
    if isinstance(value, str):
        try:
            value = shlex.split(value)
        except ValueError as error:
            raise WrongValueError(
                f"{shown(value)} cannot be split into words: {error}",
                "a list of words, or a text with its quotes closed",
            ) from None
    if not isinstance(value, list):
        raise WrongValueError(f"{shown(value)} is no command", "a list of words, or one text")
    if not value or not value[0]:
        raise WrongValueError("it names no program", "a list of words, or one text")
    return value


Text: TypeAlias = Annotated[str, PlainValidator(text)]
Filled: TypeAlias = Annotated[str, PlainValidator(filled)]
EnvironmentValue: TypeAlias = Annotated[str, PlainValidator(environment_value)]
EnvironmentName: TypeAlias = Annotated[str, PlainValidator(environment_name)]
ServiceName: TypeAlias = Annotated[str, PlainValidator(service_name)]
Pattern: TypeAlias = Annotated[str, PlainValidator(pattern)]
Duration: TypeAlias = Annotated[float, PlainValidator(seconds)]
DurationAboveZero: TypeAlias = Annotated[float, PlainValidator(seconds_above_zero)]
Size: TypeAlias = Annotated[int, PlainValidator(size)]
Flag: TypeAlias = Annotated[bool, PlainValidator(flag)]
Count: TypeAlias = Annotated[int, PlainValidator(lambda value: whole(value, 1))]
CountFromZero: TypeAlias = Annotated[int, PlainValidator(lambda value: whole(value, 0))]
ExitStatus: TypeAlias = Annotated[int, PlainValidator(lambda value: whole(value, 0, 255))]
Niceness: TypeAlias = Annotated[int, PlainValidator(lambda value: whole(value, -20, 19))]
Factor: TypeAlias = Annotated[float, PlainValidator(lambda value: number(value, 1))]
Command: TypeAlias = Annotated[list[Text], BeforeValidator(command)]
Listed = BeforeValidator(listed)
Mapped = BeforeValidator(mapped)
