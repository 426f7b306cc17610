"""Whether a value that was written as JSON comes back as it was: JSON knows no classes, so annotations must say which it is."""

from __future__ import annotations

import dataclasses
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, Flag
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints
from uuid import UUID

_APART = frozenset({str, int, float, bool, NoneType})
"""What JSON itself tells apart."""
_SCALARS = _APART | {bytes, Decimal, UUID, date, datetime, time, timedelta}
_CONTAINERS = (tuple, list, dict, frozenset, set)


def difference(before: Any, after: Any, place: str = "") -> str | None:
    """Where ``after``, which was read, is not what ``before`` was, and how; None where they are the same.

    The same are values of the same class with the same fields, and numbers and texts that are equal.
    """
    kind = type(before)
    if isinstance(before, tuple | list | dict | frozenset | set) or _fields(before) is not None:
        if kind is not type(after):
            return f"{place or 'it'} is a {kind.__qualname__} and would come back as a {type(after).__qualname__}"
        for name, one, other in _parts(before, after):
            if (found := difference(one, other, f"{place}.{name}" if place else str(name))) is not None:
                return found
        if isinstance(before, tuple | list | dict | frozenset | set) and len(before) != len(after):
            return f"{place or 'it'} would come back with {len(after)} items of {len(before)}"
        same = before == after if isinstance(before, frozenset | set) else True
    else:
        alike = isinstance(before, type(after)) or {kind, type(after)} <= {int, float}
        unknowable = kind is type(after) and getattr(kind, "__eq__", None) is object.__eq__
        same = alike and (bool(before == after) or unknowable or (before != before and after != after))
    return None if same else f"{place or 'it'} is {before!r} and would come back as {after!r}"


def _fields(value: Any) -> tuple[str, ...] | None:
    """The names of the fields of a dataclass or model."""
    if dataclasses.is_dataclass(value):
        return tuple(field.name for field in dataclasses.fields(value) if field.compare)
    fields = getattr(type(value), "model_fields", None)
    return tuple(fields) if isinstance(fields, dict) else None


def _parts(before: Any, after: Any) -> Any:
    if isinstance(before, dict):
        return [(key, inner, after.get(key)) for key, inner in before.items()]
    if isinstance(before, tuple | list):
        names = getattr(type(before), "_fields", range(len(before)))
        return zip(names, before, after, strict=False)
    return [(name, getattr(before, name), getattr(after, name)) for name in _fields(before) or ()]


def is_exact(kind: Any) -> bool:
    """Whether any value of that type comes back as it was, so that it need not be looked at; False where that depends.

    It depends where a class can have others below it, as in a field for dataclasses, where a union's members are alike, and
    where a class computes its fields.
    """
    if kind in _SCALARS or get_origin(kind) is Literal:
        return True
    if isinstance(kind, type) and issubclass(kind, Enum):
        values = {type(member.value) for member in kind}
        return not issubclass(kind, Flag) and len(values) == 1 and values <= {str, int}
    if get_origin(kind) in (Union, UnionType):
        members = [member for member in get_args(kind) if member is not NoneType]
        return is_exact(members[0]) if len(members) == 1 else all(member in _APART for member in members)
    inner = [argument for argument in get_args(kind) if argument is not ...]
    return get_origin(kind) in _CONTAINERS and bool(inner) and all(is_exact(argument) for argument in inner)


def is_exact_event(kind: type[Any]) -> bool:
    """Whether any event of exactly that class comes back as it was: :func:`is_exact` for each of its fields."""
    if not dataclasses.is_dataclass(kind) or hasattr(kind, "__post_init__") or hasattr(kind, "__pydantic_validator__"):
        return False
    if not all(field.init for field in dataclasses.fields(kind)):
        return False
    try:
        hints = get_type_hints(kind, include_extras=True)
    except Exception:  # an annotation may be any expression; pydantic has its own ways to read it
        return False
    return all(is_exact(hints[field.name]) for field in dataclasses.fields(kind))
