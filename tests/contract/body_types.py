"""Types of bodies that a careless encoding changes, and whether each must arrive unchanged or be refused."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from enum import StrEnum
from typing import Annotated, Any, NamedTuple

from pydantic import (
    AliasChoices,
    AliasPath,
    BaseModel,
    ConfigDict,
    Field,
    Json,
    PlainSerializer,
    Secret,
    SecretBytes,
    SecretStr,
    StringConstraints,
    computed_field,
)
from pydantic.alias_generators import to_camel
from typing_extensions import TypedDict


class Aliases(BaseModel):
    """Fields with every kind of alias."""

    model_config = ConfigDict(extra="forbid")
    both: int = Field(alias="Both")
    read: int = Field(validation_alias="Read")
    written: int = Field(serialization_alias="Written")
    either: int = Field(validation_alias=AliasChoices("one", "other"))
    within: int = Field(validation_alias=AliasPath("list", 0))


class Camel(BaseModel):
    """Aliases made by a generator."""

    model_config = ConfigDict(alias_generator=to_camel, extra="forbid")
    user_name: str
    parts: list[Camel] = []


class ByBoth(BaseModel):
    """A field that is read by its name or its alias."""

    model_config = ConfigDict(populate_by_name=True)
    user_name: str = Field(alias="userName")


@dataclass
class NamedPart:
    """A dataclass with an alias."""

    size: Annotated[int, Field(alias="Size")]


class Area(BaseModel):
    """A computed field, in a model that forbids unknown fields."""

    model_config = ConfigDict(extra="forbid")
    width: int
    height: int

    @computed_field  # type: ignore[prop-decorator]
    @property
    def area(self) -> int:
        """Return the computed field."""
        return self.width * self.height


class Login(BaseModel):
    """Secrets."""

    user: str
    password: SecretStr
    key: SecretBytes = SecretBytes(b"")
    pin: Secret[int] | None = None


class Logins(BaseModel):
    """Nested secrets."""

    logins: list[Login]


class JsonInJson(BaseModel):
    """A field of JSON in JSON."""

    payload: Json[list[int]]


class Hiding(BaseModel):
    """A field that is excluded from the output."""

    name: str
    unwritten: str = Field(default="", exclude=True)


class Measured(BaseModel):
    """Numbers that JSON lacks, written as text."""

    model_config = ConfigDict(ser_json_inf_nan="strings")
    value: float


@dataclass
class Base:
    """A base class."""

    a: int


@dataclass
class Sub(Base):
    """A subclass with one more field."""

    b: int = 0


@dataclass
class Holder:
    """Fields of the base class."""

    item: Base
    items: list[Base] = field(default_factory=list)


@dataclass
class Cat:
    """One of two classes with equal fields."""

    name: str


@dataclass
class Dog:
    """The other of two classes with equal fields."""

    name: str


class Colour(StrEnum):
    """An enum of strings."""

    RED = "red"


class Coordinates(NamedTuple):
    """A named tuple."""

    x: int
    y: int


class Row(TypedDict):
    """A typed dict."""

    name: str
    at: datetime


class OneWay(BaseModel):
    """A serializer without an inverse validator."""

    tags: Annotated[list[str], PlainSerializer(",".join)]


class Loose(BaseModel):
    """A field of any type."""

    value: Any


def nested(depth: int) -> Any:
    """Return ``depth`` nested lists."""
    body: Any = 1
    for _ in range(depth):
        body = [body]
    return body


NOW = datetime(2025, 1, 2, 3, 4, 5, 678, UTC)
HUGE = 10**4_300
LOGIN = Login(user="a", password=SecretStr("geheim"), key=SecretBytes(b"k"), pin=Secret[int](1234))

ARRIVES: list[tuple[str, Any, Any]] = [
    ("aliases", Aliases, Aliases.model_construct(both=1, read=2, written=3, either=4, within=5)),
    ("generated aliases", Camel, Camel(userName="a", parts=[Camel(userName="b")])),  # type: ignore[call-arg]
    ("either name", ByBoth, ByBoth(userName="a")),
    ("a dataclass's aliases", list[NamedPart], [NamedPart(3)]),
    ("a computed field", Area, Area(width=2, height=3)),
    ("secrets", Login, LOGIN),
    ("nested secrets", Logins, Logins(logins=[Login(user="a", password=SecretStr("x"))])),
    ("a secret alone", SecretStr, SecretStr("geheim")),
    ("JSON in JSON", JsonInJson, JsonInJson.model_validate({"payload": "[1,2]"})),
    ("an unset field that is not written", Hiding, Hiding(name="a")),
    ("no number, as text", Measured, Measured(value=float("inf"))),
    ("a class of one's own, nested", Holder, Holder(Base(1), [Base(2)])),
    ("the first of a union", Cat | Dog, Cat("a")),
    ("a union that is told apart", int | str | None, "5"),
    ("a named tuple", Coordinates, Coordinates(1, 2)),
    ("a tuple in a list", list[tuple[int, str]], [(1, "a")]),
    ("a TypedDict", Row, {"name": "a", "at": NOW}),
    ("a set of numbers", set[int], {1, 2}),
    ("numbers as keys", dict[int, float], {1: 0.5}),
    ("an exact decimal", Decimal, Decimal("1.10")),
    ("the longest number", int, 10**4_299),
    ("deep lists", list[Any], nested(200)),
    ("the last of a union", Holder | int | None, None),
]
"""A description, a type and a body that must arrive unchanged."""

REFUSED: list[tuple[str, Any, Any, str]] = [
    ("a field that is not written", Hiding, Hiding(name="a", unwritten="t"), "unwritten"),
    ("a class below", Base, Sub(1, 2), "Sub"),
    ("a nested class below", Holder, Holder(Base(1), [Sub(1, 2)]), "items.0"),
    ("the second of a union", Cat | Dog, Dog("a"), "Dog"),
    ("a colour that looks like text", Colour | str, Colour.RED, "Colour"),
    ("text that looks like a time", datetime | str, "2025-01-02T03:04:05Z", "2025"),
    ("text that a validator changes", Annotated[str, StringConstraints(to_upper=True)], "abc", "ABC"),
    ("pairs as keys", dict[tuple[int, int], int], {(1, 2): 3}, "1,2"),
    ("a serializer without a validator", OneWay, OneWay(tags=["a", "b"]), "tags"),
    ("a tuple in anything", Loose, Loose(value=(1, 2)), "value"),
    ("a tuple without a type", None, {"pair": (1, 2)}, "pair"),
    ("numbers as keys without a type", None, {1: "a"}, "1"),
    ("a time without a type", None, {"at": [NOW]}, "at.0"),
    ("objects without a type", None, [Cat("a")], "Cat"),
    ("a number that is too long", int, HUGE, "digits"),
    ("a long number in a list", list[int], [1, HUGE], "digits"),
    ("a long number without a type", None, {"n": -HUGE}, "digits"),
    ("lists that are too deep", Loose, Loose(value=nested(200)), "deep"),
]
"""A description, a type, a body that must be refused, and text of the error."""
