"""Bodies to JSON and back."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from datetime import UTC, datetime, time, timedelta, timezone
from typing import Annotated, Any, Required, TypedDict
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, TypeAdapter

from mainspring.errors import ConfigError, SerializationError
from mainspring.mailbox.codec import MAX_DEPTH, Codec, NotJsonError, plain_schema, type_name


@dataclass
class Job:
    number: int
    tags: list[str] = field(default_factory=list)


class Order(BaseModel):
    id: UUID
    placed: datetime
    job: Job


class Line(BaseModel):
    item: str


class Row(TypedDict):
    name: str
    size: float


class Sheet(TypedDict, total=False):
    rows: Required[list[Row]]
    title: str


ORDER = Order(id=UUID(int=5), placed=datetime(2024, 1, 2, tzinfo=UTC), job=Job(1, ["a"]))


@pytest.mark.parametrize(
    ("body_type", "body"),
    [
        (str, "ä\n"),
        (int, 2**70),
        (bool, True),
        (float, 1.5),
        (bytes, b"plain"),
        (type(None), None),
        (Job, Job(3, ["x"])),
        (Order, ORDER),
        (list[Line], [Line(item="lamp")]),
        (Row, {"name": "n", "size": 2.0}),
        (Sheet, {"rows": [{"name": "n", "size": 2.0}]}),
        (list[Row] | int, [{"name": "n", "size": 2.0}]),
        (list[Job], [Job(1), Job(2)]),
        (Job | str, Job(1)),
        (Job | str, "text"),
        (dict[str, Any], {"a": [1, None, "x"]}),
        (None, {"whatever": ["JSON", 1.5, None]}),
    ],
)
def test_a_body_of_its_type_comes_back_equal(body_type: Any, body: Any) -> None:
    codec = Codec(body_type)
    codec.check(body)
    raw = codec.encode(body)
    assert isinstance(raw, bytes)
    assert codec.decode(raw) == body


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(json_values)
def test_whatever_json_can_say_comes_back_or_is_refused(value: Any) -> None:
    codec = Codec()
    try:
        raw = codec.encode(value)
    except SerializationError:  # a lone surrogate: text that UTF-8 cannot hold
        assert "\\ud" in ascii(value)
        return
    assert codec.decode(raw) == value


@pytest.mark.parametrize(
    ("body_type", "body", "says"),
    [
        (str, 5, "type int does not fit str: the body: "),
        (int, True, "type bool does not fit int: the body: "),
        (int, "5", "type str does not fit int"),
        (Job, {"number": 1}, "type dict does not fit Job"),
        (Row, {"name": "n", "size": "big"}, "does not fit Row: size: "),
        (Row, {"name": "n"}, "does not fit Row: size: "),
        (Sheet, {"title": "t"}, "does not fit Sheet: rows: "),
        (Sheet, {"rows": [], "title": 5}, "does not fit Sheet: title: "),
        (list[int], [1, "2"], r"does not fit list\[int\]: 1: "),
        (Line, {"item": "lamp"}, "type dict does not fit Line: the body: Input should be an instance of Line"),
        (Line, Order.model_construct(), "type Order does not fit Line: the body: Input should be an instance of Line"),
        (
            list[Line],
            [{"item": "lamp"}],
            "type list cannot be written as JSON: a value in it: expected Line, not dict$",
        ),
        (
            dict[str, Line],
            {"a": {"item": "lamp"}},
            "type dict cannot be written as JSON: a value in it: expected Line, not dict$",
        ),
    ],
)
def test_a_body_of_another_type_is_refused_with_type_and_field(body_type: Any, body: Any, says: str) -> None:
    codec = Codec(body_type)
    with pytest.raises(SerializationError, match=says):
        codec.check(body)
    with pytest.raises(SerializationError, match=says):
        codec.encode(body)


def test_a_wrong_field_of_a_dataclass_is_refused_when_it_is_written() -> None:
    with pytest.raises(SerializationError, match=r"Job cannot be written as JSON: number: expected int, not str$"):
        Codec(Job).encode(Job("one, input_type=list])"))  # type: ignore[arg-type]


@pytest.mark.parametrize("body", [object(), {"a": object()}, b"\xff", "\ud800"])
def test_what_json_cannot_say_is_refused(body: Any) -> None:
    with pytest.raises(SerializationError, match="cannot be written as JSON"):
        Codec().encode(body)


def nested(depth: int, *, within: str) -> Any:
    """A body of so many lists (or objects) in each other."""
    body: Any = within
    for number in range(depth):
        body = [body] if number % 2 else {"a": body}
    return body


def test_what_is_nested_deeper_than_can_be_read_is_refused_when_it_is_written() -> None:
    deepest = nested(MAX_DEPTH, within="x")
    assert Codec().decode(Codec().encode(deepest)) == deepest
    with pytest.raises(NotJsonError, match="recursion limit"):  # so that the limit is pydantic's
        Codec().decode(b"[" + Codec().encode(deepest) + b"]")
    for depth in range(MAX_DEPTH + 1, MAX_DEPTH + 60):
        with pytest.raises(SerializationError, match="cannot be written as JSON"):
            Codec().encode(nested(depth, within="x"))
    with pytest.raises(SerializationError, match=r"a body of type dict .*: it is nested more than 200 deep"):
        Codec(dict[str, Any]).encode({"a": deepest})


def test_only_the_depth_is_limited_not_the_number_nor_what_strings_say() -> None:
    for body in ([[1]] * 1_000, "[" * 1_000, ["{" * 1_000], {"[" * 500: "]"}):
        assert Codec().decode(Codec().encode(body)) == body
    assert Codec(str).encode("[" * 1_000) == b'"' + b"[" * 1_000 + b'"'


def test_what_contains_itself_is_refused() -> None:
    body: list[Any] = []
    body.append(body)
    with pytest.raises(SerializationError, match="cannot be written as JSON"):
        Codec().encode(body)


@pytest.mark.parametrize(
    ("body_type", "body", "where"),
    [
        (float, math.nan, "the body"),
        (Row, {"name": "n", "size": math.inf}, "size"),
        (None, {"a": [1.0, {"b": -math.inf}], "c": None}, "a.1.b"),
    ],
)
def test_a_number_that_json_would_turn_into_null_is_refused(body_type: Any, body: Any, where: str) -> None:
    with pytest.raises(SerializationError, match=f"{where} is not finite"):
        Codec(body_type).encode(body)


def offset(**of: int) -> timezone:
    return timezone(timedelta(**of))


@dataclass
class Visit:
    at: datetime
    pause: time | None = None
    cost: float = 0.0


@pytest.mark.parametrize(
    ("body_type", "body", "where"),
    [
        (datetime, datetime(2024, 1, 2, tzinfo=offset(minutes=53, seconds=28)), "it"),
        (datetime, datetime(2024, 1, 2, tzinfo=offset(seconds=30)), "it"),
        (time, time(1, tzinfo=offset(seconds=-30)), "it"),
        (Visit, Visit(datetime(1890, 1, 1, tzinfo=ZoneInfo("Europe/Berlin"))), "at"),
        (Visit, Visit(datetime(2024, 1, 1), time(1, tzinfo=offset(hours=1, seconds=1))), "pause"),
        (dict[str, list[datetime]], {"a": [datetime(2024, 1, 2, tzinfo=offset(seconds=3_661))]}, "a.0"),
        (str | datetime, datetime(2024, 1, 2, tzinfo=offset(seconds=30)), "it"),
    ],
)  # fmt: skip
def test_a_utc_offset_with_seconds_is_refused(body_type: Any, body: Any, where: str) -> None:
    with pytest.raises(
        SerializationError, match=rf"as it is: {where} is datetime.* without its seconds: .*astimezone\(UTC\)$"
    ):
        Codec(body_type).encode(body)


@pytest.mark.parametrize(
    "at",
    [
        datetime(2024, 1, 2, 3, 4, 5, 6),
        datetime(2024, 1, 2, tzinfo=UTC),
        datetime(2024, 7, 2, tzinfo=ZoneInfo("Asia/Kathmandu")),
        datetime(2020, 10, 25, 2, 30, tzinfo=ZoneInfo("Europe/Berlin")),
        datetime(2020, 10, 25, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"), fold=1),
    ],
    ids=["naive", "UTC", "zone", "first of two", "second of two"],
)
@pytest.mark.parametrize("body_type", [Visit, list[Visit]], ids=["certain", "compared"])
def test_a_date_comes_back_with_its_offset(body_type: Any, at: datetime) -> None:
    codec = Codec(body_type)
    body = Visit(at) if body_type is Visit else [Visit(at)]
    back = codec.decode(codec.encode(body))
    found = back.at if body_type is Visit else back[0].at
    assert (found.replace(tzinfo=None), found.utcoffset()) == (at.replace(tzinfo=None, fold=0), at.utcoffset())


@dataclass
class Wheel:
    size: int


@dataclass
class Wooden(Wheel):
    tree: str = ""


@dataclass
class Cart:
    wheels: list[Wheel]


class Named(BaseModel):
    model_config = ConfigDict(extra="forbid")
    user_name: str = Field(alias="userName")
    password: SecretStr = SecretStr("")


@pytest.mark.parametrize(
    ("body_type", "body", "says"),
    [
        (
            Cart,
            Cart([Wheel(1), Wooden(2)]),
            "type Cart would not come back as it is: wheels.1 is a Wooden and would come back as",
        ),
        (Wheel, Wooden(2), "it is a Wooden and would come back as a Wheel; annotate it with its class alone"),
        (
            None,
            {"a": (1, 2)},
            r"a is a tuple and would come back as a list; send plain JSON, or say the type \(body=…\)",
        ),
        (None, Cart([Wooden(1)]), "wheels.0 is a Wooden and would come back as a Wheel"),
        (None, [Cart([])], "0 is a Cart and would come back as a dict"),
        (dict[int, Any], {1: [{2: 3}]}, "1.0 has the key 2, which would come back as another one"),
    ],
)
def test_what_would_come_back_as_another_one_is_refused_by_its_place(body_type: Any, body: Any, says: str) -> None:
    with pytest.raises(SerializationError, match=says):
        Codec(body_type).encode(body)
    assert Codec(body_type, verifies=False).encode(body)


def test_names_and_aliases_are_read_and_one_of_them_is_written() -> None:
    body = Named(userName="ada", password=SecretStr("geheim"))
    assert Codec(Named).encode(body) == b'{"user_name":"ada","password":"geheim"}'
    assert Codec(Named).decode(b'{"userName":"ada","password":"geheim"}') == body
    raw = Codec(by_alias=True).encode(body)  # for readers that have only the class
    assert raw == b'{"userName":"ada","password":"geheim"}'
    assert Named.model_validate_json(raw) == body


@pytest.mark.parametrize("raw", [b"", b"\xff", b"{", b'{"number":1}x', b"[" * 100_000, b'"\\ud800"', b"nul"])
@pytest.mark.parametrize("body_type", [Job, None, str])
def test_bytes_that_are_no_json_are_told_from_json_of_the_wrong_shape(body_type: Any, raw: bytes) -> None:
    with pytest.raises(NotJsonError, match="no JSON"):
        Codec(body_type).decode(raw)


@pytest.mark.parametrize("raw", [b"{}", b'{"number":"x"}', b"5", b"null"])
def test_json_of_the_wrong_shape_names_type_and_field(raw: bytes) -> None:
    with pytest.raises(SerializationError, match="the stored body does not fit Job: ") as caught:
        Codec(Job).decode(raw)
    assert not isinstance(caught.value, NotJsonError)


def boom(value: str) -> str:
    raise KeyError(value)


def test_what_a_types_own_validator_raises_is_a_body_that_does_not_fit() -> None:
    codec = Codec(Annotated[str, AfterValidator(boom)])
    with pytest.raises(SerializationError, match="KeyError"):
        codec.decode(b'"x"')
    with pytest.raises(SerializationError, match="KeyError"):
        codec.check("x")


@pytest.mark.parametrize("body_type", [object(), lambda: None, "Job", {}, {"type": "int"}, type("Plain", (), {})])
def test_a_type_that_cannot_be_a_body_is_a_config_error(body_type: Any) -> None:
    with pytest.raises(ConfigError, match="cannot be a message body"):
        Codec(body_type)


def test_types_are_named_as_people_write_them() -> None:
    assert [type_name(t) for t in (int, Job, list[int], Job | None, Any)] == [
        "int",
        "Job",
        "list[int]",
        f"{__name__}.Job | None",
        "Any",
    ]


@pytest.mark.parametrize(
    "body_type", [Any, str, int, float, bool, dict, list, list[float], dict[str, dict[int, list[str]]]]
)
def test_the_schema_of_a_plain_type_is_the_one_that_pydantic_makes(body_type: Any) -> None:
    assert plain_schema(body_type) == TypeAdapter(body_type).core_schema


@pytest.mark.parametrize(
    "body_type", [None, list[None], dict[str, datetime], str | None, tuple[int, ...], set[int], UUID]
)
def test_other_types_are_left_to_pydantic(body_type: Any) -> None:
    assert plain_schema(body_type) is None


@dataclass
class Measured:
    size: float
    name: str = ""


@pytest.mark.parametrize(
    ("kind", "make"),
    [
        (Measured, Measured),
        (float, lambda number: number),
        (list[float], lambda number: [1.5, number]),
        (dict[str, float], lambda number: {"a": number}),
        (float | None, lambda number: number),
    ],
    ids=["field", "float", "list", "dict", "optional"],
)
@given(number=st.one_of(st.integers(-(10**30), 10**30), st.floats(allow_nan=False, allow_infinity=False)))
def test_an_integer_that_a_float_cannot_hold_is_refused(kind, make, number):
    codec = Codec(kind)
    body = make(number)
    try:
        raw = codec.encode(body)
    except SerializationError as error:
        assert "annotate it as int" in str(error)  # noqa: PT017 - one of two outcomes
        assert float(number) != number
    else:
        assert codec.decode(raw) == body
