"""Bodies: what is received equals what was sent, or the send refuses it; stored bytes that fit no type."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from typing import Any

import anyio
from typing_extensions import TypedDict

from mainspring.errors import ConfigError, SerializationError
from mainspring.mailbox.codec import MAX_DEPTH
from mainspring.testing.mailbox_contract.harness import (
    AnyMailbox,
    Behaviour,
    Harness,
    behaviour,
    check,
    equal,
    on_mailbox,
    raises,
    texts,
)


@dataclass
class Part:
    """A body with a field that can be wrong."""

    name: str


@dataclass
class Appointment:
    """A body with a date."""

    at: datetime


_MEAN_TIME = timezone(timedelta(minutes=53, seconds=28))
"""An offset with seconds, as places had before there were time zones."""


class Size(TypedDict):
    """A body that is a dict."""

    width: float
    height: float


async def check_refused(h: Harness, *cases: tuple[str, Any, Any, str]) -> None:
    """Check that each case's body is refused by a mailbox of its type: alone, and among others."""
    for number, (what, kind, body, said) in enumerate(cases):
        async with h.open(f"jobs-{number}", body=kind) as box:
            with raises(SerializationError, what) as caught:
                await box.send(body)
            check(said in str(caught[0]), f"{what}: the error does not name {said!r}: {caught[0]}")
            with raises(SerializationError, f"{what}, among others"):
                await box.send_many([body])
            await h.counts(box)


def _wrong(name: str, claim: str, *cases: tuple[str, Any, Any, str], needs: tuple[str, ...] = ()) -> Behaviour:
    async def run(h: Harness) -> None:
        await check_refused(h, *cases)

    return replace(behaviour(*needs)(run), name=name, claim=claim)


WRONG = [
    _wrong("a_body_of_the_wrong_type_is_refused",
             "A body that does not fit the type is a SerializationError that names the type and the field; nothing is sent.",
             ("a dict where a Part is wanted", Part, {"name": "wheel"}, "Part"),
             ("a TypedDict with text in a float's place", Size, {"width": 1.0, "height": "far"}, "height"),
             ("a TypedDict without a key", Size, {"width": 1.0}, "Size")),
    _wrong("an_int_is_not_taken_for_a_str", "The type is checked as it is, nothing is coerced at send.",
             ("an int where a str is wanted", str, 5, "str")),
    _wrong("an_object_with_a_wrong_field_is_refused",
             "An object of the right class whose field holds something else is a SerializationError; nothing is sent.",
             ("an int in a field of text", Part, Part(name=7), "name"),  # type: ignore[arg-type]
             needs=("serializes",)),
    _wrong("a_utc_offset_with_seconds_is_refused",
             "A date whose UTC offset has seconds would come back as another one: SerializationError; nothing is sent.",
             ("in a field", Appointment, Appointment(datetime(1890, 1, 1, tzinfo=_MEAN_TIME)), "at is datetime"),
             ("in a list", list[datetime], [datetime(1890, 1, 1, tzinfo=_MEAN_TIME)], "astimezone(UTC)"),
             needs=("serializes",)),
    _wrong("a_body_that_is_no_json_is_refused",
             "Without a type, what JSON cannot say is a SerializationError; nothing is sent.",
             ("an object", None, object(), "object"), ("a function in a dict", None, {"when": lambda: None}, "function"),
             needs=("serializes",)),
]  # fmt: skip
"""Bodies that do not fit their types, or JSON. Each case has a name, a type, a body, and text of the error."""


@on_mailbox()
async def plain_json_arrives_unchanged(h: Harness, box: AnyMailbox) -> None:
    """Without a type, everything that JSON can say arrives as it was, down to empty and large values."""
    bodies: list[Any] = [
        "",
        "Grüße, 日本 \U0001f600 \x00 \\ \"'",
        0,
        -1,
        2**53,
        1.5,
        -0.001,
        1e300,
        True,
        False,
        None,
        [],
        {},
        [[], [None]],
        {"": {"a": [1, "two", None, {"three": 3.0}]}},
    ]
    await box.send_many(bodies)
    received = texts(await h.all(box))
    equal(received, bodies, "the bodies")
    equal([type(body) for body in received], [type(body) for body in bodies], "their types")


@on_mailbox(body=str)
async def a_large_body_arrives_unchanged(h: Harness, box: AnyMailbox) -> None:
    """A megabyte arrives whole."""
    body = "x" * 1_000_000 + "end"
    check((await h.delivery(box, body)).body == body, "the large body was changed")


@on_mailbox(body=Part)
async def send_many_is_all_or_nothing(h: Harness, box: AnyMailbox) -> None:
    """Where one body does not fit, none is sent."""
    bodies: list[Any] = [Part("a"), Part("b"), "no part", Part("c")]
    with raises(SerializationError, "send_many with one wrong body"):
        await box.send_many(bodies)
    await h.counts(box)
    await h.none(box, "nothing was sent")


@on_mailbox("serializes")
async def a_body_changed_after_send_is_not_changed_there(h: Harness, box: AnyMailbox) -> None:
    """The message holds what the body was when it was sent."""
    body = {"list": [1]}
    await box.send(body)
    body["list"].append(2)
    equal((await h.one(box)).body, {"list": [1]}, "the received body")


@on_mailbox()
async def a_type_is_bound_once(h: Harness, box: AnyMailbox) -> None:
    """bind() says a missing type; one that differs from the mailbox's is a ConfigError."""
    box.bind(body=int)
    with raises(SerializationError, "a str in a mailbox bound to int"):
        await box.send("x")
    box.bind(body=int)
    with raises(ConfigError, "binding another type"):
        box.bind(body=str)


@on_mailbox("serializes")
async def bytes_that_are_no_json_go_to_the_dead_letters(h: Harness, box: AnyMailbox) -> None:
    """Undecodable bytes never come out of receive: they are dead-lettered with the bytes and the error."""
    raw = b"\xff\xfe not json"
    await h.corrupt(box, raw)
    await h.none(box, "it cannot be decoded")
    await h.counts(box, dead=1)
    (letter,) = await box.dead_letters()
    equal((letter.raw, letter.body), (raw, None), "raw bytes and body")
    check(bool(letter.error) and bool(letter.error_type), "it does not say why")


@on_mailbox("serializes", body=int)
async def undecodable_bytes_do_not_harm_their_neighbours(h: Harness, box: AnyMailbox) -> None:
    """The messages before and after undecodable bytes are received by the same call."""
    await box.send(1)
    await h.corrupt(box, b"{")
    await box.send(2)
    await h.corrupt(box, b"")
    await box.send(3)
    equal(texts(await h.all(box)), [1, 2, 3], "what was received")
    await h.counts(box, in_flight=3, dead=2)


@on_mailbox("serializes", body=int)
async def undecodable_bytes_do_not_end_a_wait(h: Harness, box: AnyMailbox) -> None:
    """A receive that meets nothing but undecodable bytes goes on waiting, and gets the next good message."""
    await h.corrupt(box, b"nonsense")
    async with h.waiting(box, seconds=h.wait * 10) as received:
        await anyio.sleep(h.short / 4)
        await h.corrupt(box, b"more nonsense")
        await anyio.sleep(h.short / 4)
        equal(received, [], "what the waiting receive has returned")
        await box.send(7)
    equal([texts(found) for found in received], [[7]], "what was received in the end")
    await h.counts(box, in_flight=1, dead=2)


@on_mailbox("serializes", body=Part)
async def a_body_of_the_wrong_shape_is_a_failed_attempt(h: Harness, box: AnyMailbox) -> None:
    """JSON of the wrong shape is delivered; .body raises SerializationError; a nack charges; a dead letter has the bytes."""
    raw = b'{"name": 7}'
    await h.corrupt(box, raw)
    for number in (1, 2):
        message = await h.one(box, counts=(number, number))
        with raises(SerializationError, "reading a body of the wrong shape") as caught:
            _ = message.body
        check("Part" in str(caught[0]), f"the error does not name the type: {caught[0]}")
        await message.nack()
    await (await h.one(box)).dead_letter("not understood")
    (letter,) = await box.dead_letters()
    equal((letter.raw, letter.body, letter.error), (raw, None, "not understood"), "the dead letter")


@on_mailbox("serializes")
async def a_body_that_nobody_could_read_is_refused(h: Harness, box: AnyMailbox) -> None:
    """What is nested as deep as can be read arrives; what is nested deeper is refused when it is sent."""
    deepest: Any = "x"
    for _ in range(MAX_DEPTH):
        deepest = [deepest]
    with raises(SerializationError, "sending a body that is nested too deep"):
        await box.send([deepest])
    with raises(SerializationError, "sending a body that is nested too deep among others"):
        await box.send_many(["x", [deepest]])
    await h.counts(box)
    equal((await h.delivery(box, deepest)).body, deepest, "the deepest body")


@behaviour("serializes", "durable")
async def a_newer_worker_understands_what_an_older_one_did_not(h: Harness) -> None:
    """What did not fit one type is still there, unchanged, for a mailbox whose type it fits."""
    async with h.open(body=int) as box:
        await h.corrupt(box, b'"seven"')
        await (await h.one(box)).nack()
    async with h.open(body=str) as box:
        equal((await h.one(box)).body, "seven", "the body for the newer worker")
