"""Decide whether a value comes back from JSON as it was: once for a type, by its pydantic schema, or for each value.

JSON knows no classes, so the type must say which one it is. Of most types it can be said in advance that any value comes back:
text, numbers, lists and dicts of these, and one dataclass or model around them. Of others it depends on the value. A field for
a class may hold one of a class below it. Members of a union may look alike. Validators and serializers may be anything. These
are read back and compared. A schema that has anything in it which is not known here belongs to the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from datetime import date, datetime, time, timedelta
from enum import Flag
from types import NoneType
from typing import Any, NamedTuple
from uuid import UUID

_APART = frozenset({"str", "int", "float", "bool", "none"})
"""What JSON itself tells apart."""
_SCALARS = _APART | {"bytes", "uuid", "date", "time", "datetime", "timedelta"}
_CLASSES = frozenset({"model", "dataclass"})
_OPEN = frozenset(
    {"decimal", "any", "enum", "literal", "list", "tuple", "set", "frozenset", "dict", "nullable", "default"}
)
_PARTS = frozenset(
    {"model-fields", "model-field", "dataclass-args", "dataclass-field", "typed-dict", "typed-dict-field", "computed-field",
     "named-tuple", "named-tuple-field", "definitions", "definition-ref", "union", "tagged-union", "json"}
)  # fmt: skip
_KNOWN = _SCALARS | _CLASSES | _OPEN | _PARTS

_HARMLESS = frozenset({"type", "ref", "metadata", "strict"})
_KEYS: Mapping[str, frozenset[str]] = {
    "datetime": frozenset({"microseconds_precision"}),
    "time": frozenset({"microseconds_precision"}),
    "timedelta": frozenset({"microseconds_precision"}),
    "nullable": frozenset({"schema"}),
    "default": frozenset({"schema", "default", "default_factory", "default_factory_takes_data", "validate_default"}),
    "list": frozenset({"items_schema"}),
    "set": frozenset({"items_schema"}),
    "frozenset": frozenset({"items_schema"}),
    "tuple": frozenset({"items_schema", "variadic_item_index"}),
    "dict": frozenset({"keys_schema", "values_schema"}),
    "enum": frozenset({"cls", "members", "sub_type"}),
    "literal": frozenset({"expected"}),
    "union": frozenset({"choices"}),
    "model": frozenset({"cls", "schema", "config", "custom_init", "root_model", "frozen"}),
    "model-fields": frozenset({"fields", "model_name", "computed_fields"}),
    "model-field": frozenset({"schema", "frozen"}),
    "dataclass": frozenset({"cls", "schema", "config", "fields", "slots", "frozen", "post_init"}),
    "dataclass-args": frozenset({"fields", "dataclass_name", "computed_fields", "collect_init_only"}),
    "dataclass-field": frozenset({"name", "schema", "kw_only", "init", "frozen"}),
    "typed-dict": frozenset({"cls", "config", "fields", "computed_fields", "extra_behavior"}),
    "typed-dict-field": frozenset({"schema", "required"}),
}
"""By kind of schema, what may stand in one whose values all come back, beside what is harmless anywhere."""
_CONFIG = frozenset({"title", "frozen", "extra_fields_behavior"})


class Exactness(NamedTuple):
    """What is known of a type in advance."""

    certain: frozenset[type[Any]]
    """The classes of which any value comes back as it was, if its numbers are finite and not too long (see ``rounds`` and
    ``cuts_offsets``)."""
    by_equality: bool
    """A value that came back and is equal to the one before is the same, classes included."""
    rounds: bool
    """It has fields for floats. These take integers, of which large ones come back rounded."""
    cuts_offsets: bool
    """It has fields for times, which are written without the seconds of their UTC offset."""
    is_aliased: bool
    """A field goes by several names."""
    hides: bool
    """It has serializers that may hide a secret."""
    excludes: bool
    """It has fields that are not written (``exclude=True``)."""

    def comparison(self) -> Comparison:
        """Return a new comparison of one value of the type."""
        return Comparison(exactly=not self.by_equality)


def exactness(schema: Mapping[str, Any]) -> Exactness:
    """Return what the core schema of a type says of it."""
    nodes = list(_nodes(schema))
    refs = {node["ref"]: node for node in nodes if "ref" in node}
    return Exactness(
        certain=frozenset(_classes(schema) if _is_certain(schema, top=True) else ()),
        by_equality=all(_is_told_by_equality(node, refs) for node in nodes),
        rounds=any(node["type"] == "float" for node in nodes),
        cuts_offsets=any(node["type"] in ("datetime", "time") for node in nodes),
        is_aliased=any("validation_alias" in node or "serialization_alias" in node for node in nodes),
        hides=any(_written_by(node) == "function-plain" for node in nodes),
        excludes=any(node.get("serialization_exclude") for node in nodes),
    )


def _nodes(schema: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(schema, Mapping):
        if isinstance(schema.get("type"), str):
            yield schema
        for key, inner in schema.items():
            if key in ("fields", "choices") and isinstance(inner, Mapping):
                yield from _nodes(list(inner.values()))
            elif key not in ("metadata", "config", "default", "serialization"):
                yield from _nodes(inner)
    elif isinstance(schema, list | tuple):
        for inner in schema:
            yield from _nodes(inner)


def _written_by(node: Mapping[str, Any]) -> str | None:
    serialization = node.get("serialization")
    return serialization.get("type") if isinstance(serialization, Mapping) else None


def _is_certain(node: Mapping[str, Any], *, top: bool = False) -> bool:
    kind = node["type"]
    if node.keys() - _HARMLESS - _KEYS.get(kind, frozenset()):
        return False
    if kind in _SCALARS:
        return True
    if kind in ("nullable", "default"):
        return _is_certain(node["schema"], top=top)
    if kind in ("list", "set", "frozenset", "tuple", "dict"):
        return _is_certain_container(node)
    if kind == "enum":
        values = {type(member.value) for member in node["members"]}
        return not issubclass(node["cls"], Flag) and len(values) == 1 and values <= {str, int}
    if kind == "literal":
        values = {type(value) for value in node["expected"]}
        return len(values) == 1 and values <= {str, int}
    if kind == "union":
        return all(isinstance(c, Mapping) and c["type"] in _APART and _is_certain(c) for c in node["choices"])
    if top and kind == "typed-dict":
        return _is_certain_typed_dict(node)
    return top and kind in _CLASSES and _is_certain_class(node)


_BY_NAME: Mapping[str, type[Any]] = {
    "str": str, "int": int, "float": float, "bool": bool, "none": NoneType, "bytes": bytes, "uuid": UUID, "date": date,
    "time": time, "datetime": datetime, "timedelta": timedelta, "list": list, "tuple": tuple, "set": set,
    "frozenset": frozenset, "dict": dict, "typed-dict": dict,
}  # fmt: skip


def _classes(node: Mapping[str, Any]) -> Iterator[type[Any]]:
    """Yield the classes of those values of a type that all come back."""
    kind = node["type"]
    if kind == "nullable":
        yield NoneType
    if kind in ("nullable", "default"):
        yield from _classes(node["schema"])
    elif kind == "union":
        for member in node["choices"]:
            yield from _classes(member)
    elif kind == "literal":
        yield from map(type, node["expected"])
    else:
        yield _BY_NAME[kind] if kind in _BY_NAME else node["cls"]


def _is_certain_container(node: Mapping[str, Any]) -> bool:
    if node["type"] == "dict":
        keys = node.get("keys_schema", {"type": "any"})
        return keys["type"] == "str" and _is_certain(keys) and _is_certain(node.get("values_schema", {"type": "any"}))
    items = node.get("items_schema", {"type": "any"})
    return all(_is_certain(item) for item in (items if isinstance(items, list) else [items]))


def _is_certain_class(node: Mapping[str, Any]) -> bool:
    """True if its fields are plain, and nothing is computed. Only at the top is the class of a value known to be that one."""
    config, inner = node.get("config", {}), node["schema"]
    computes = node.get("custom_init") or node.get("root_model") or node.get("post_init")
    if computes or config.keys() - _CONFIG or config.get("extra_fields_behavior") == "allow":
        return False
    if inner["type"] not in ("model-fields", "dataclass-args") or inner.get("computed_fields"):
        return False
    if inner.keys() - _HARMLESS - _KEYS[inner["type"]]:
        return False
    fields = inner["fields"]
    return all(
        not field.keys() - _HARMLESS - _KEYS[field["type"]] and field.get("init", True) and _is_certain(field["schema"])
        for field in (fields.values() if isinstance(fields, Mapping) else fields)
    )


def _is_certain_typed_dict(node: Mapping[str, Any]) -> bool:
    """True if its fields are plain, and it takes no others: those are refused before it is written."""
    if node.get("extra_behavior") != "forbid" and node.get("config", {}).get("extra_fields_behavior") != "forbid":
        return False
    if node.get("computed_fields") or node.get("config", {}).keys() - _CONFIG:
        return False
    return all(
        not field.keys() - _HARMLESS - _KEYS["typed-dict-field"] and _is_certain(field["schema"])
        for field in node["fields"].values()
    )


def _is_told_by_equality(node: Mapping[str, Any], refs: Mapping[str, Mapping[str, Any]]) -> bool:
    kind = node["type"]
    if kind == "union":
        members = [refs.get(c.get("schema_ref", ""), c) if isinstance(c, Mapping) else {} for c in node["choices"]]
        kinds = {member.get("type") for member in members}
        return kinds <= _CLASSES or kinds <= _APART
    if kind in _CLASSES:
        return has_fields_equal(node["cls"])
    return kind in _KNOWN and _written_by(node) is None


def has_fields_equal(kind: type[Any]) -> bool:
    """True if two of that class are equal if and only if all their fields are, and neither is of another class."""
    equal: Any = kind.__eq__
    if dataclasses.is_dataclass(kind):
        made = getattr(getattr(equal, "__code__", None), "co_filename", "") == "<string>"
        return made and all(field.compare for field in dataclasses.fields(kind))
    from pydantic import BaseModel

    return equal is BaseModel.__eq__


class Comparison:
    """Of a value as it was written, and as it was read.

    :param exactly: the classes of numbers and texts count too: where a union has several that look alike.
    """

    def __init__(self, *, exactly: bool = True) -> None:
        self._exactly = exactly
        self.undecided: list[str] = []
        """The places of objects that cannot be compared: of one class, which has no equality."""
        self.has_cut_offset = False
        """True if the difference is a UTC offset with seconds."""

    def difference(self, before: Any, after: Any, place: str = "") -> str | None:
        """Return where ``after`` is not what ``before`` was, and how, or None if they are the same, as far as can be said."""
        kind, names = type(before), _fields(before)
        if names is None and not isinstance(before, tuple | list | dict | frozenset | set):
            if self._is_same(before, after, place):
                return None
            self.has_cut_offset = isinstance(before, datetime | time) and _has_seconds(before.utcoffset())
            return _changed(place, before, after)
        if not self._is_like(before, after):
            article = f"{place or 'it'} is a {kind.__qualname__} and would come back as a"
            return f"{article} {type(after).__qualname__}"
        if isinstance(before, dict) and (lost := self._lost_keys(before, after)):
            return f"{place or 'it'} has the key {lost[0]!r:.200}, which would come back as another one"
        for name, one, other in _parts(before, after, names):
            if (found := self.difference(one, other, f"{place}.{name}" if place else str(name))) is not None:
                return found
        if names is not None:
            return None
        if len(before) != len(after):
            return f"{place or 'it'} would come back with {len(after)} items of {len(before)}"
        return _changed(place, before, after) if isinstance(before, frozenset | set) and before != after else None

    def _lost_keys(self, before: dict[Any, Any], after: dict[Any, Any]) -> list[Any]:
        """Return the keys that ``after`` does not have, or has in another class."""
        keys = {key: key for key in after}
        return [key for key in before if key not in keys or not self._is_same(key, keys[key], "")]

    def _is_like(self, before: Any, after: Any) -> bool:
        """True if one class can stand for the other: the same, or of a container that is below a builtin one, that one."""
        kind, other = type(before), type(after)
        return kind is other or (
            not self._exactly and other in (dict, list, set, frozenset) and isinstance(before, other)
        )

    def _is_same(self, before: Any, after: Any, place: str) -> bool:
        kind, other = type(before), type(after)
        if kind is not other:
            wider = (kind, other) == (int, float) or (not self._exactly and isinstance(before, other))
            return wider and bool(before == after)
        if before is after or before == after or (before != before and after != after):
            return True
        if kind is datetime:  # Python holds two of different zones to be unequal where clocks are put back
            return bool(
                before.utcoffset() == after.utcoffset() and before.replace(tzinfo=None) == after.replace(tzinfo=None)
            )
        if getattr(kind, "__eq__", None) is not object.__eq__:
            return False
        self.undecided.append(place or "it")
        return True


def _has_seconds(offset: timedelta | None) -> bool:
    return offset is not None and bool(offset % timedelta(minutes=1))


def _changed(place: str, before: Any, after: Any) -> str:
    return f"{place or 'it'} is {before!r:.200} and would come back as {after!r:.200}"


def _fields(value: Any) -> tuple[str, ...] | None:
    """Return the names of the fields of a dataclass or model."""
    if isinstance(value, type):
        return None
    if dataclasses.is_dataclass(value):
        return tuple(field.name for field in dataclasses.fields(value) if field.compare or field.init)
    fields = getattr(type(value), "model_fields", None)
    return (*fields, *(getattr(value, "model_extra", None) or ())) if isinstance(fields, dict) else None


def _parts(before: Any, after: Any, names: tuple[str, ...] | None) -> Any:
    if names is not None:
        return [(name, getattr(before, name, None), getattr(after, name, None)) for name in names]
    if isinstance(before, dict):
        return [(key, inner, after[key]) for key, inner in before.items()]
    if isinstance(before, tuple | list):
        return zip(getattr(type(before), "_fields", range(len(before))), before, after, strict=False)
    return ()
