"""Bodies to JSON bytes and back, through pydantic; nothing is ever pickled."""

from __future__ import annotations

import inspect
import json
import math
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from functools import partial
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Any,
    NamedTuple,
    NotRequired,
    Required,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from mainspring.errors import ConfigError, SerializationError, describe

if TYPE_CHECKING:
    from pydantic import TypeAdapter
    from pydantic_core import CoreSchema

MAX_DEPTH = 200
"""How deep lists and objects may be nested: pydantic reads no deeper, though it writes somewhat deeper."""
MAX_DIGITS = 4_300
"""How many digits a number may have: pydantic reads no more, though it writes any number."""

_LARGE_FLOAT = re.compile(rb"(?<![.0-9])[0-9]{16}|e\+")
"""How a float of 10**15 and more is written: a float cannot hold every integer of that size."""

_OFFSET = re.compile(rb'[+-][0-9]{2}:[0-9]{2}"')
"""How a UTC offset is written, without its seconds: any but that of UTC itself."""

_MISFIT = re.compile(
    r"UnexpectedValue\(Expected `([^`]+)` - [^\[]*\[(?:field_name='([^']+)', )?input_value=.*?, input_type=(\w+)\]\)(?= |$)"
)
"""How pydantic says that a value has another type than its field: the expected one, the field, and the value's."""


class NotJsonError(SerializationError):
    """The stored bytes are no JSON at all: no worker of any version will understand them."""


class Unserialized:
    """A body that a mailbox which does not serialise hands over, and the type under which it was checked."""

    __slots__ = ("body", "body_type")

    def __init__(self, body: Any, body_type: Any) -> None:
        self.body = body
        self.body_type = body_type


class Codec:
    """Encodes, decodes and checks bodies of one type (``Any``: whatever JSON can say).

    Types are whatever pydantic's ``TypeAdapter`` takes: dataclasses, models, TypedDicts, unions, primitives. A body to be sent
    must be of the type as it is: pydantic's strict mode does not take an ``int`` for a ``str``. Stored JSON is read in
    pydantic's lax mode. Whatever a type's own validators raise means that the body does not fit.

    What :meth:`encode` returns is decoded to what it was given, or it raises. Fields are written by their names, and read by
    their names and aliases; secrets are written as their values, and computed fields not at all. A value that may
    not come back as it was is read back and compared: :mod:`mainspring.mailbox.json_round_trip` says for which types. Without
    a type a dataclass or a model is written for a reader that knows its class; others get its JSON data.

    :param verifies: False leaves out reading back and comparing.
    :param by_alias: fields are written by their aliases, for readers that know the class and have only pydantic.
    :param what: what is encoded, for errors.
    """

    def __init__(
        self, body_type: Any = None, *, verifies: bool = True, by_alias: bool = False, what: str = "a body"
    ) -> None:
        from pydantic_core import PydanticSerializationError, ValidationError

        from mainspring.mailbox.json_round_trip import exactness

        self.body_type: Any = Any if body_type is None else body_type
        self._is_any = self.body_type is Any
        self._adapter = _plain(self.body_type) or self._typed()
        self._exact = exactness(self._adapter.core_schema)
        self._verifies, self._by_alias, self._what = verifies, by_alias, what
        self._invalid = ValidationError
        self._unserializable = (PydanticSerializationError, UnicodeError, ValueError, TypeError, RecursionError)
        self._model = body_type if isinstance(body_type, type) and is_model(body_type) else None
        self._by_class: dict[type[Any], Codec] = {}
        self._certain = _JSON_SCALARS if self._is_any else self._exact.certain
        self._sure_text = str if str in self._certain else None
        # Such a type needs no keywords when it is written: warnings="error" costs a microsecond a body, any other a tenth.
        self._plain = self.body_type if self.body_type in (str, int, bool) else None
        names: dict[str, Any] = {"by_alias": True, "by_name": True} if self._exact.is_aliased else {}
        self._check: Callable[..., Any] = partial(self._adapter.validator.validate_python, strict=True, **names)
        load: Callable[..., Any] = self._adapter.validator.validate_json
        self._load: Callable[..., Any] = partial(load, **names) if names else load
        asked: dict[str, Any] = {"warnings": "error"}
        if self._is_any:
            asked = {"warnings": False}
        elif not self._exact.certain:
            asked |= {"round_trip": True, "by_alias": by_alias}
        self._asked = asked
        to_json: Callable[..., bytes] = self._adapter.serializer.to_json
        checked = self._plain is not None or (
            dict in self._exact.certain and self._adapter.core_schema["type"] == "typed-dict"
        )
        self._to_json = to_json if checked else partial(to_json, **asked)
        self._dump = self._dump_revealed if self._exact.hides else self._to_json

    def _typed(self) -> TypeAdapter[Any]:
        from pydantic import PydanticSchemaGenerationError, PydanticUserError, TypeAdapter

        try:
            if inspect.isroutine(self.body_type) or isinstance(self.body_type, str | dict):  # a dict: pydantic's schema
                raise TypeError(f"{self.body_type!r} is no type")
            return TypeAdapter(supported(self.body_type))
        except (PydanticSchemaGenerationError, PydanticUserError, TypeError, NameError) as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(
                f"{self.name} cannot be a message body: {reason}; use a dataclass, a pydantic model, a TypedDict or a"
                " plain JSON type"
            ) from error

    @property
    def name(self) -> str:
        """The type's name for messages to people."""
        return type_name(self.body_type)

    def _of(self, body: Any) -> str:
        return f"{self._what} of type {type_name(type(body))}"

    def unserialized(self, body: Any) -> Unserialized:
        """Return ``body`` itself, for a store that keeps objects. Raise :class:`SerializationError` as :meth:`check` does."""
        if type(body) is not self._plain:
            self.check(body)
        return Unserialized(body, self.body_type)

    def check(self, body: Any) -> None:
        """Raise :class:`SerializationError` unless ``body`` is of the type, as it is."""
        if type(body) is self._plain or self._validated(body) is body:
            return
        try:  # pydantic has made a new object, perhaps of another type: a model, for a dict in a list of them
            self._adapter.serializer.to_python(body, warnings="error")
        except self._unserializable as error:
            raise self._unwritten(body, error) from error

    def _validated(self, body: Any) -> Any:
        """Return what pydantic makes of ``body``: itself, where it is an instance of a class."""
        if type(body) is self._plain or self._is_any:
            return body
        if self._model is not None and not isinstance(body, self._model):  # pydantic takes a dict for one
            raise SerializationError(
                f"{self._of(body)} does not fit {self.name}: the body: Input should be an instance of {self.name}"
            )
        try:
            return self._check(body)
        except self._invalid as error:
            raise self._error(self._of(body), error) from None
        except Exception as error:
            raise self._broken(self._of(body), error) from error

    def task_of(self, raw: bytes | Unserialized) -> str | None:
        """Return the name of the task that a stored body calls, or None if it is no call of a task, as none is here."""
        return None

    def arguments_of(self, raw: bytes | Unserialized) -> dict[str, Any] | None:
        """Return the arguments, by name, of the call that a stored body is, or None if it calls no task, as none does here."""
        return None

    def encode(self, body: Any) -> bytes:
        """Return JSON bytes of ``body``.

        :raises SerializationError: it is not of the type, is no JSON, or would not be read as what it is.
        """
        kind = type(body)
        if self._is_any:
            if kind not in _JSON and (is_dataclass(kind) or is_model(kind)):
                return self._encode_by_class(body)
        elif kind is not self._plain:
            self._validated(body)
        try:
            raw = self._dump(body)
        except self._unserializable as error:
            raise self._unwritten(body, error) from error
        if kind is self._sure_text:
            return raw
        exact = self._exact
        if self._verifies and (
            kind not in self._certain
            or (exact.rounds and _LARGE_FLOAT.search(raw))
            or (exact.cuts_offsets and _OFFSET.search(raw))
        ):
            self._verify(body, raw)
            return raw
        if self._plain is None and b"null" in raw:
            self._check_finite(body)
        if len(raw) > MAX_DIGITS or kind not in self._certain:
            self._check_readable(body, raw)
        return raw

    def _dump_revealed(self, body: Any) -> bytes:
        """Return JSON with secrets as their values, where there are any."""
        from pydantic_core import to_json

        plain = self._adapter.serializer.to_python(body, **self._asked)
        revealed, found = _revealed(plain)
        return to_json(revealed) if found else self._to_json(body)

    def _check_finite(self, body: Any) -> None:
        """Raise :class:`SerializationError` for a number that JSON does not have: it would arrive as null."""
        if (field := _not_finite(self._adapter.serializer.to_python(body))) is not None:
            raise SerializationError(
                f"{self._of(body)} cannot be written as JSON: {field or 'the body'} is not finite; send None or a string"
            )

    def _encode_by_class(self, body: Any) -> bytes:
        kind = type(body)
        codec = self._by_class.get(kind)
        if codec is None:
            try:
                codec = Codec(kind, verifies=self._verifies, by_alias=self._by_alias, what=self._what)
            except ConfigError as error:
                raise SerializationError(str(error)) from error
            self._by_class[kind] = codec
        return codec.encode(body)

    def _check_readable(self, body: Any, raw: bytes) -> None:
        if (reason := why_unreadable(raw)) is not None:
            raise SerializationError(
                f"{self._of(body)} cannot be written as JSON: {reason}, and no receiver could read it"
            )

    def _verify(self, body: Any, raw: bytes) -> None:
        """Raise :class:`SerializationError` unless ``raw`` is read as what ``body`` is."""
        try:
            back = self._load(raw)
        except Exception as error:
            self._check_finite(body)
            self._check_readable(body, raw)
            raise self._lost(body, f"reading it back fails: {self._reason(error)}") from error
        if self._exact.by_equality and (back is body or back == body):
            return
        comparison = self._exact.comparison()
        found = comparison.difference(body, back)
        if found is None and comparison.undecided and self._dump(back) != raw:
            found = f"{comparison.undecided[0]} would come back as another one"
        if found is not None:
            self._check_finite(body)
            raise self._lost(body, found, has_cut_offset=comparison.has_cut_offset)

    def _lost(self, body: Any, found: str, *, has_cut_offset: bool = False) -> SerializationError:
        if has_cut_offset:
            advice = "a UTC offset is written without its seconds: convert it with astimezone(UTC)"
        elif self._is_any:
            advice = "send plain JSON, or say the type (body=…)"
        elif self._exact.rounds and (type(body) is int or type(body) in self._certain):
            advice = "a float holds integers up to 2**53: annotate it as int"
        elif self._exact.excludes:
            advice = "a field with exclude=True is not written"
        else:
            advice = (
                "annotate it with its class alone, and give classes of like fields one that tells them apart"
                " (kind: Literal['cat'] = 'cat')"
            )
        return SerializationError(f"{self._of(body)} would not come back as it is: {found}; {advice}")

    def decode(self, raw: bytes | Unserialized) -> Any:
        """Return the body that ``raw`` holds: JSON, or an object, which is checked if it was sent under another type.

        Raises :class:`NotJsonError` where it is no JSON, and :class:`SerializationError` where its shape is not the type's.
        """
        if type(raw) is Unserialized:
            if raw.body_type is not self.body_type:
                self.check(raw.body)
            return raw.body
        try:
            return self._load(raw)
        except self._invalid as error:
            first = error.errors(include_url=False, include_input=False, include_context=False)[0]
            if first["type"] == "json_invalid" and not first["loc"]:
                raise NotJsonError(f"the stored body is no JSON: {first['msg']}") from None
            raise self._error("the stored body", error) from None
        except Exception as error:
            raise self._broken("the stored body", error) from error

    def _error(self, what: str, error: Exception) -> SerializationError:
        return SerializationError(f"{what} does not fit {self.name}: {self._reason(error)}")

    def _reason(self, error: Exception) -> str:
        if not isinstance(error, self._invalid):
            return describe(error)
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "the body"
        return f"{field}: {first['msg']}"

    def _unwritten(self, body: Any, error: Exception) -> SerializationError:
        reason = " ".join(str(error).removeprefix("Pydantic serializer warnings:").split())
        misfits = _MISFIT.findall(reason)
        if misfits:
            field, got = misfits[0][1] or "a value in it", misfits[0][2]
            kinds = dict.fromkeys(expected for expected, name, _ in misfits if name == misfits[0][1])
            reason = f"{field}: expected {' or '.join(kinds)}, not {got}"
        return SerializationError(f"{self._of(body)} cannot be written as JSON: {reason}")

    def _broken(self, what: str, error: Exception) -> SerializationError:
        """Return the error for what a validator of the user's type has raised and should not."""
        return SerializationError(f"{what} does not fit {self.name}: {type(error).__name__}: {error}")


class _Plain(NamedTuple):
    """What the ``TypeAdapter`` of a plain JSON type has, made by pydantic's core alone. Importing pydantic would take half as
    long as all other imports of a worker."""

    core_schema: Mapping[str, Any]
    validator: Any
    serializer: Any


def _plain(body_type: Any) -> _Plain | None:
    """Return the adapter of a type that is plain JSON, or None for another type."""
    from pydantic_core import SchemaSerializer, SchemaValidator, core_schema

    schema = plain_schema(body_type)
    if schema is None:
        return None
    # Without its own schema a string is written in half the time, with the same result.
    written = core_schema.any_schema() if body_type is str else schema
    return _Plain(schema, SchemaValidator(schema), SchemaSerializer(written))


def plain_schema(body_type: Any) -> CoreSchema | None:
    """Return the schema that pydantic would make of a type if it is plain JSON, or None: of Any, of scalars, and of lists and
    dicts of these."""
    from pydantic_core import core_schema as core

    if body_type is Any:
        return core.any_schema()
    for scalar, schema in (
        (str, core.str_schema),
        (int, core.int_schema),
        (float, core.float_schema),
        (bool, core.bool_schema),
    ):
        if body_type is scalar:
            return schema()
    kind, inner = get_origin(body_type) or body_type, [plain_schema(each) for each in get_args(body_type)]
    if None in inner:
        return None
    if kind is list:
        return core.list_schema(*inner or [core.any_schema()])
    if kind is dict:
        return core.dict_schema(*inner or [core.any_schema(), core.any_schema()])
    return None


def is_model(kind: type[Any]) -> bool:
    """True if ``kind`` is a pydantic model, which only a program that has imported pydantic can have."""
    models = sys.modules.get("pydantic.main")
    return models is not None and issubclass(kind, models.BaseModel)


_JSON = frozenset({str, int, float, bool, NoneType, list, dict})
_JSON_SCALARS = frozenset({str, int, float, bool, NoneType})


def _revealed(value: Any) -> tuple[Any, bool]:
    """Return ``value`` (plain containers) with secrets as their values, and whether there are any."""
    if hasattr(value, "get_secret_value"):
        return value.get_secret_value(), True
    if isinstance(value, dict):
        inner = {key: _revealed(item) for key, item in value.items()}
        return {key: item for key, (item, _) in inner.items()}, any(found for _, found in inner.values())
    if isinstance(value, list | tuple | set | frozenset):
        items = [_revealed(item) for item in value]
        return [item for item, _ in items], any(found for _, found in items)
    return value, False


def supported(body_type: Any) -> Any:
    """Return ``body_type`` with each ``typing.TypedDict`` replaced: before Python 3.12 pydantic refuses it.

    This reaches the type itself and its parameters (``list[Row]``), not the fields of dataclasses and models.
    """
    if sys.version_info >= (3, 12):
        return body_type
    if is_typeddict(body_type):
        return _typed_dict(body_type)
    old = get_args(body_type)
    new = tuple(supported(argument) for argument in old)
    if all(a is b for a, b in zip(old, new, strict=True)):
        return body_type
    origin = get_origin(body_type)
    return Union[new] if origin is UnionType else origin[new]  # noqa: UP007 - made from a tuple


def _typed_dict(body_type: Any) -> Any:
    from typing_extensions import TypedDict

    fields: dict[str, Any] = {}
    for key, hint in get_type_hints(body_type, include_extras=True).items():
        stated = get_origin(hint) in (Required, NotRequired)
        inner = supported(get_args(hint)[0] if stated else hint)
        optional = get_origin(hint) is NotRequired if stated else key in body_type.__optional_keys__
        fields[key] = NotRequired[inner] if optional else Required[inner]
    return TypedDict(body_type.__name__, fields)  # type: ignore[operator]


def _not_finite(value: Any, path: str = "") -> str | None:
    """Return the path of the first number in ``value`` (plain containers) that is infinite or NaN, or None."""
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


def why_unreadable(raw: bytes, within: int = 0) -> str | None:
    """Return why JSON that was written, and stands within ``within`` levels of other JSON, cannot be read, or None if it can.

    Quick for what has few brackets and no long number.
    """
    is_deep = raw.count(b"[") + raw.count(b"{") > MAX_DEPTH - within
    if not is_deep and not _may_have_long_number(raw):
        return None
    from pydantic_core import from_json

    try:
        from_json(b"%s%s%s" % (b"[" * within, raw, b"]" * within))
    except ValueError as error:
        if "recursion limit" in str(error):
            return f"it is nested more than {MAX_DEPTH - within} deep"
        if "out of range" in str(error):
            return f"it has a number of more than {MAX_DIGITS:,} digits"
    return None


def _may_have_long_number(raw: bytes) -> bool:
    half = MAX_DIGITS // 2  # a longer run of digits covers one of the pieces of half its length
    return len(raw) > MAX_DIGITS and any(raw[at : at + half].isdigit() for at in range(0, len(raw) - half + 1, half))


def type_name(body_type: Any) -> str:
    """Return how a type is written for people: its qualified name, or its repr where it has none (unions, generics)."""
    if isinstance(body_type, type) and not hasattr(body_type, "__origin__"):
        return body_type.__qualname__
    return str(body_type).replace("typing.", "")


def headers_of(stored: str) -> dict[str, str] | None:
    """Return stored headers, or None if they are none: another program wrote them, or the store was damaged."""
    stored = stored.strip()
    try:
        headers, end = _decode(stored)
    except (ValueError, RecursionError):
        return None
    if end != len(stored) or not isinstance(headers, dict):
        return None
    for value in headers.values():
        if not isinstance(value, str):
            return None
    return headers


_decode = json.JSONDecoder().raw_decode
"""Without the looks for white space of :func:`json.loads`: half of its time for a short text."""
