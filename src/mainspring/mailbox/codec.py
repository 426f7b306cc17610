"""Bodies to JSON bytes and back, through pydantic; nothing is ever pickled."""

from __future__ import annotations

import json
from typing import Any

from mainspring.errors import ConfigError, SerializationError


class NotJsonError(SerializationError):
    """The stored bytes are no JSON at all: no worker of any version will understand them."""


class Codec:
    """Encodes, decodes and checks bodies of one type (``Any``: whatever JSON can say).

    Types are whatever pydantic's ``TypeAdapter`` takes: dataclasses, models, TypedDicts, unions, primitives. Checking is
    pydantic's lax mode without coercion of the object itself: an ``int`` is not taken for a ``str``.
    """

    __slots__ = ("_adapter", "_check", "_dump", "_load", "body_type")

    def __init__(self, body_type: Any = None) -> None:
        from pydantic import PydanticSchemaGenerationError, PydanticUserError, TypeAdapter

        self.body_type: Any = Any if body_type is None else body_type
        try:
            self._adapter: TypeAdapter[Any] = TypeAdapter(self.body_type)
        except (PydanticSchemaGenerationError, PydanticUserError, TypeError, NameError) as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(
                f"{self.name} cannot be a message body: {reason}; use a dataclass, a pydantic model, a TypedDict or a"
                " plain JSON type"
            ) from error
        self._check = self._adapter.validator.validate_python
        self._load = self._adapter.validator.validate_json
        self._dump = self._adapter.serializer.to_json

    @property
    def name(self) -> str:
        """The type's name for messages to people."""
        return type_name(self.body_type)

    def check(self, body: Any) -> None:
        """Raise :class:`SerializationError` unless ``body`` is of the type, as it is."""
        from pydantic import ValidationError

        try:
            self._check(body, strict=True)
        except ValidationError as error:
            raise self._error("send", body, error) from None

    def encode(self, body: Any) -> bytes:
        """JSON bytes of ``body``; raises :class:`SerializationError` where it is not of the type or is no JSON."""
        from pydantic_core import PydanticSerializationError

        self.check(body)
        try:
            return self._dump(body, warnings="error")
        except (PydanticSerializationError, UnicodeError, ValueError) as error:
            raise SerializationError(
                f"a body of type {type_name(type(body))} cannot be written as JSON: {error}"
            ) from error

    def decode(self, raw: bytes) -> Any:
        """The body that ``raw`` holds.

        Raises :class:`NotJsonError` where it is no JSON, and :class:`SerializationError` where its shape is not the type's.
        """
        from pydantic import ValidationError

        try:
            return self._load(raw)
        except ValidationError as error:
            try:
                json.loads(raw)
            except ValueError as reason:
                raise NotJsonError(f"the stored body is no JSON: {reason}") from None
            raise self._error("decode", raw, error) from None

    def _error(self, action: str, body: Any, error: Any) -> SerializationError:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "the body"
        what = "the stored body" if action == "decode" else f"a body of type {type_name(type(body))}"
        return SerializationError(f"{what} does not fit {self.name}: {field}: {first['msg']}")


def type_name(body_type: Any) -> str:
    """How a type is written for people: its qualified name, or its repr where it has none (unions, generics)."""
    if isinstance(body_type, type) and not hasattr(body_type, "__origin__"):
        return body_type.__qualname__
    return str(body_type).replace("typing.", "")
