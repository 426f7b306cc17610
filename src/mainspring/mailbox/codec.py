"""Bodies to JSON bytes and back, through pydantic; nothing is ever pickled."""

from __future__ import annotations

import inspect
import json
import math
import sys
from collections.abc import Mapping
from functools import partial
from types import UnionType
from typing import Any, NotRequired, Required, Union, get_args, get_origin, get_type_hints, is_typeddict

from mainspring.errors import ConfigError, SerializationError

MAX_DEPTH = 200
"""How deep lists and objects may be nested: pydantic reads no deeper, though it writes somewhat deeper."""


class NotJsonError(SerializationError):
    """The stored bytes are no JSON at all: no worker of any version will understand them."""


class Codec:
    """Encodes, decodes and checks bodies of one type (``Any``: whatever JSON can say).

    Types are whatever pydantic's ``TypeAdapter`` takes: dataclasses, models, TypedDicts, unions, primitives. A body to be
    sent must be of the type as it is (pydantic's strict mode: an ``int`` is not taken for a ``str``); stored JSON is read
    in pydantic's lax mode, and whatever a type's own validators raise means that it does not fit.
    """

    __slots__ = ("_adapter", "_check", "_dump", "_invalid", "_load", "_model", "_plain", "_unserializable", "body_type")

    def __init__(self, body_type: Any = None) -> None:
        from pydantic import BaseModel, PydanticSchemaGenerationError, PydanticUserError, TypeAdapter, ValidationError
        from pydantic_core import PydanticSerializationError

        self.body_type: Any = Any if body_type is None else body_type
        try:
            if inspect.isroutine(body_type) or isinstance(body_type, str):
                raise TypeError(f"{body_type!r} is no type")
            self._adapter: TypeAdapter[Any] = TypeAdapter(_supported(self.body_type))
        except (PydanticSchemaGenerationError, PydanticUserError, TypeError, NameError) as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(
                f"{self.name} cannot be a message body: {reason}; use a dataclass, a pydantic model, a TypedDict or a"
                " plain JSON type"
            ) from error
        self._check = self._adapter.validator.validate_python
        self._load = self._adapter.validator.validate_json
        self._invalid = ValidationError
        self._unserializable = (PydanticSerializationError, UnicodeError, ValueError, TypeError, RecursionError)
        self._plain = self.body_type if self.body_type in (str, int, bool) else None
        self._model = body_type if isinstance(body_type, type) and issubclass(body_type, BaseModel) else None
        # Where nothing can differ from the type, nothing is asked for: "error" costs a microsecond a body, any keyword a tenth.
        to_json = self._adapter.serializer.to_json
        asked = partial(to_json, warnings=False if self.body_type is Any else "error")
        self._dump = asked if self._plain is None else to_json

    @property
    def name(self) -> str:
        """The type's name for messages to people."""
        return type_name(self.body_type)

    def check(self, body: Any) -> None:
        """Raise :class:`SerializationError` unless ``body`` is of the type, as it is."""
        if self._validated(body) is body:
            return
        try:  # pydantic has made a new object, perhaps of another type: a model, for a dict in a list of them
            self._adapter.serializer.to_python(body, warnings="error")
        except self._unserializable as error:
            raise self._unwritten(body, error) from error

    def _validated(self, body: Any) -> Any:
        """What pydantic makes of ``body``: itself, where it is an instance of a class."""
        if type(body) is self._plain or self.body_type is Any:
            return body
        if self._model is not None and not isinstance(body, self._model):  # pydantic takes a dict for one
            raise SerializationError(
                f"a body of type {type_name(type(body))} does not fit {self.name}: the body: Input should be an instance of"
                f" {self.name}"
            )
        try:
            return self._check(body, strict=True)
        except self._invalid as error:
            raise self._error(f"a body of type {type_name(type(body))}", error) from None
        except Exception as error:
            raise self._broken(f"a body of type {type_name(type(body))}", error) from error

    def encode(self, body: Any) -> bytes:
        """JSON bytes of ``body``; raises :class:`SerializationError` where it is not of the type or is no JSON."""
        if type(body) is not self._plain:
            self._validated(body)
        try:
            raw = self._dump(body)
        except self._unserializable as error:
            raise self._unwritten(body, error) from error
        if self._plain is None and is_too_deep(raw):
            raise SerializationError(
                f"a body of type {type_name(type(body))} cannot be written as JSON: it is nested more than {MAX_DEPTH} deep,"
                " and no receiver could read it"
            )
        suspect = self._plain is None and b"null" in raw
        if suspect and (field := _not_finite(self._adapter.serializer.to_python(body))) is not None:
            raise SerializationError(  # JSON has no such number, and it would arrive as null
                f"a body of type {type_name(type(body))} cannot be written as JSON: {field or 'the body'} is not finite"
            )
        return raw

    def decode(self, raw: bytes) -> Any:
        """The body that ``raw`` holds.

        Raises :class:`NotJsonError` where it is no JSON, and :class:`SerializationError` where its shape is not the type's.
        """
        try:
            return self._load(raw)
        except self._invalid as error:
            first = error.errors(include_url=False, include_input=False, include_context=False)[0]
            if first["type"] == "json_invalid" and not first["loc"]:
                raise NotJsonError(f"the stored body is no JSON: {first['msg']}") from None
            raise self._error("the stored body", error) from None
        except Exception as error:
            raise self._broken("the stored body", error) from error

    def _error(self, what: str, error: Any) -> SerializationError:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "the body"
        return SerializationError(f"{what} does not fit {self.name}: {field}: {first['msg']}")

    def _unwritten(self, body: Any, error: Exception) -> SerializationError:
        reason = " ".join(str(error).removeprefix("Pydantic serializer warnings:").split())
        return SerializationError(f"a body of type {type_name(type(body))} cannot be written as JSON: {reason}")

    def _broken(self, what: str, error: Exception) -> SerializationError:
        """A validator of the user's type raised what no validator should."""
        return SerializationError(f"{what} does not fit {self.name}: {type(error).__name__}: {error}")


def _supported(body_type: Any) -> Any:
    """``body_type`` with each ``typing.TypedDict`` made one that pydantic takes: before Python 3.12 it refuses those.

    This reaches the type itself and its parameters (``list[Row]``), not the fields of dataclasses and models.
    """
    if sys.version_info >= (3, 12):
        return body_type
    if is_typeddict(body_type):
        return _typed_dict(body_type)
    old = get_args(body_type)
    new = tuple(_supported(argument) for argument in old)
    if all(a is b for a, b in zip(old, new, strict=True)):
        return body_type
    origin = get_origin(body_type)
    return Union[new] if origin is UnionType else origin[new]  # noqa: UP007 - made from a tuple


def _typed_dict(body_type: Any) -> Any:
    from typing_extensions import TypedDict

    fields: dict[str, Any] = {}
    for key, hint in get_type_hints(body_type, include_extras=True).items():
        stated = get_origin(hint) in (Required, NotRequired)
        inner = _supported(get_args(hint)[0] if stated else hint)
        optional = get_origin(hint) is NotRequired if stated else key in body_type.__optional_keys__
        fields[key] = NotRequired[inner] if optional else Required[inner]
    return TypedDict(body_type.__name__, fields)  # type: ignore[operator]


def _not_finite(value: Any, path: str = "") -> str | None:
    """The path of the first number in ``value`` (plain containers) that is infinite or NaN, or None."""
    if isinstance(value, float):
        return None if math.isfinite(value) else path
    items: Any = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list | tuple | set | frozenset):
        items = enumerate(value)
    for key, inner in items:
        found = _not_finite(inner, f"{path}.{key}" if path else str(key))
        if found is not None:
            return found
    return None


def is_too_deep(raw: bytes) -> bool:
    """Whether JSON is nested deeper than can be read back; it would be taken for bytes that are no JSON."""
    if raw.count(b"[") + raw.count(b"{") <= MAX_DEPTH:
        return False
    from pydantic_core import from_json

    try:
        from_json(raw)
    except ValueError as error:
        return "recursion limit" in str(error)
    return False


def type_name(body_type: Any) -> str:
    """How a type is written for people: its qualified name, or its repr where it has none (unions, generics)."""
    if isinstance(body_type, type) and not hasattr(body_type, "__origin__"):
        return body_type.__qualname__
    return str(body_type).replace("typing.", "")


def headers_of(stored: str) -> dict[str, str] | None:
    """Stored headers; None where they are none: another program wrote them, or the store was damaged."""
    try:
        headers = json.loads(stored)
    except (ValueError, RecursionError):
        return None
    if not (isinstance(headers, dict) and all(isinstance(value, str) for value in headers.values())):
        return None
    return headers
