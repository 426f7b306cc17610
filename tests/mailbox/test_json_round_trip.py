"""Which types rule out that a value is changed on its way through JSON, and what a change is."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from decimal import Decimal
from enum import Enum, StrEnum
from typing import Annotated, Any, Literal, NamedTuple

import pytest
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter
from typing_extensions import TypedDict

from mainspring.mailbox.json_round_trip import Comparison, exactness


@dataclass(frozen=True)
class Cat:
    name: str


@dataclass(frozen=True)
class Dog:
    name: str


@dataclass(frozen=True)
class Adopted:
    pet: Cat | Dog


@dataclass
class Plain:
    number: int
    size: float | None = None
    tags: list[str] = field(default_factory=list)
    at: datetime | None = None
    more: dict[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Computed:
    n: int
    twice: int = field(init=False, default=0)


@dataclass(frozen=True)
class Shifting:
    n: int

    def __post_init__(self):
        object.__setattr__(self, "n", self.n + 1)


@dataclass
class ById:
    id: int
    name: str

    def __eq__(self, other):
        return isinstance(other, ById) and self.id == other.id


class Colour(StrEnum):
    RED = "red"


class Mixed(Enum):
    A = 1
    B = "1"


class Point(NamedTuple):
    x: int
    y: int


class Row(TypedDict):
    x: int


class Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    metadata: str
    size: float = 0.0


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    n: int


class Stripping(BaseModel):
    model_config = ConfigDict(str_strip_whitespace=True)
    name: str


class Aliased(BaseModel):
    n: int = Field(alias="N")


@pytest.mark.parametrize(
    ("kind", "certain"),
    [
        (str, True), (int | None, True), (float | str, True), (datetime, True), (tuple[int, ...], True), (Colour, True),
        (dict[str, list[float | None]], True), (Literal["a"], True), (Plain, True), (Model, True), (Cat | None, True),
        (Any, False), (str | datetime, False), (tuple[Cat, ...], False), (Mixed, False), (Literal[1, True], False),
        (list, False), (object, False), (tuple, False), (Point, False), (dict[int, str], False), (Decimal, False),
        (Row, False), (Annotated[str, Field(max_length=3)], False), (Open, False), (Stripping, False), (Aliased, False),
        (Adopted, False), (Computed, False), (Shifting, False), (list[Plain], False),
    ],
)  # fmt: skip
def test_types_of_which_no_value_need_be_read_back(kind, certain):
    assert bool(exactness(TypeAdapter(kind).core_schema).certain) is certain


@pytest.mark.parametrize(
    ("kind", "by_equality"),
    [
        (list[Plain], True), (Adopted, True), (list[Model | Open], True), (Any, True), (Row, True), (Decimal | None, True),
        (Colour | str, False), (Decimal | int, False), (list[ById], False), (set[int] | frozenset[int], False),
    ],
)  # fmt: skip
def test_types_whose_equal_values_are_the_same(kind, by_equality):
    assert exactness(TypeAdapter(kind).core_schema).by_equality is by_equality


NAN = float("nan")


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        (Cat("a"), Cat("a"), None), (1, 1.0, None), (NAN, NAN, None), ((1, [2]), (1, [2]), None), ({"a": 1}, {"a": 1}, None),
        (Adopted(pet=Cat("a")), Adopted(pet=Cat("a")), None), (timedelta(1), timedelta(1), None),
        (Cat("a"), Dog("a"), "it is a Cat and would come back as a Dog"),
        ((1,), [1], "it is a tuple and would come back as a list"),
        ((1, 2), (1,), "it would come back with 1 items of 2"),
        ({"a": None}, {"b": None}, "it has the key 'a', which would come back as another one"),
        ({"a": {1: "x"}}, {"a": {"1": "x"}}, "a has the key 1, which would come back as another one"),
        (Adopted(pet=Dog("a")), Adopted(pet=Cat("a")), "pet is a Dog and would come back as a Cat"),
        ((Cat("a"), Cat("b")), (Cat("a"), Cat("c")), "1.name is 'b' and would come back as 'c'"),
        (Point(1, 2), Point(1, 3), "y is 2 and would come back as 3"),
        (Point(1, 2), (1, 2), "it is a Point and would come back as a tuple"),
        (frozenset({1}), frozenset({2}), "it is frozenset({1}) and would come back as frozenset({2})"),
        (Colour.RED, "red", "it is <Colour.RED: 'red'> and would come back as 'red'"),
        ("red", Colour.RED, "it is 'red' and would come back as <Colour.RED: 'red'>"),
        (1, True, "it is 1 and would come back as True"), (1.0, 1, "it is 1.0 and would come back as 1"),
        (ById(1, "a"), ById(1, "b"), "name is 'a' and would come back as 'b'"),
        (Open(n=1, x=2), Open(n=1, x="2"), "x is 2 and would come back as '2'"),
    ],
)  # fmt: skip
def test_what_is_the_same(before, after, found):
    assert Comparison().difference(before, after) == found


def test_where_a_class_can_only_be_that_one_a_value_of_a_class_below_a_builtin_one_counts_as_that():
    assert Comparison(exactly=False).difference([Colour.RED, True], ["red", 1]) is None
    assert Comparison(exactly=False).difference("red", Colour.RED) is not None
