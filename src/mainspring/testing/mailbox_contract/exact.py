"""What is received equals what was sent, or the send refuses it and names the field: for bodies, replies and dead letters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mainspring.errors import SerializationError
from mainspring.testing.mailbox_contract.harness import Harness, behaviour, check, equal, raises

if TYPE_CHECKING:
    from collections.abc import Iterator


def _same(received: Any, sent: Any, what: str) -> None:
    """They are equal and of one class, their parts included, but for numbers: those look alike where they are equal."""
    check(type(received) is type(sent), f"{what}: a {type(received).__name__} was received, and not {sent!r}")
    equal(received, sent, what)


def _arriving() -> Iterator[tuple[str, Any, Any]]:
    from mainspring.testing.mailbox_contract.body_types import ARRIVES

    for name, (kind, body) in ARRIVES.items():
        yield name, kind, body


def _refused() -> Iterator[tuple[str, Any, Any, str]]:
    from mainspring.testing.mailbox_contract.body_types import REFUSED

    for name, (kind, body, said) in REFUSED.items():
        yield name, kind, body, said


@behaviour()
async def what_is_received_is_what_was_sent(h: Harness) -> None:
    """Aliases, secrets, computed fields, JSON in JSON and the like: what is received equals what was sent."""
    for number, (name, kind, body) in enumerate(_arriving()):
        async with h.open(f"jobs-{number}", body=kind) as box:
            await box.send(body)
            await box.send_many([body])
            for message in await h.all(box):
                _same(message.body, body, name)


@behaviour("serializes")
async def what_would_not_be_received_as_it_is_is_refused(h: Harness) -> None:
    """A body that would come back as another one, or could not be read, is refused at the send; the error names the field."""
    for number, (name, kind, body, said) in enumerate(_refused()):
        async with h.open(f"jobs-{number}", body=kind) as box:
            with raises(SerializationError, name) as caught:
                await box.send(body)
            check(said in str(caught[0]), f"{name}: the error does not name {said!r}: {caught[0]}")
            with raises(SerializationError, f"{name}, among others"):
                await box.send_many([body])
            await h.counts(box)


@behaviour("serializes")
async def without_a_type_an_object_is_sent_to_those_who_know_its_class(h: Harness) -> None:
    """A mailbox without a type takes a dataclass that its class reads back; received without a type, it is its JSON data."""
    from mainspring.testing.mailbox_contract.body_types import Base, Holder, Sub

    async with h.open() as box:
        await box.send(Holder(Base(1)))
        equal((await h.one(box)).body, {"item": {"a": 1}, "items": []}, "what is received without a type")
        with raises(SerializationError, "an object with one of a class below"):
            await box.send(Holder(Sub(1, 2)))


@behaviour("serializes", "transactional_reply")
async def replies_are_received_as_they_were_sent_or_refused(h: Harness) -> None:
    """A reply is as exact as a body; one that is refused leaves the message unsettled."""
    from mainspring.testing.mailbox_contract.body_types import ARRIVES, HUGE, Cat, Dog, Login

    sent: Login = ARRIVES["secrets"][1]
    async with h.open(reply=Login) as box, h.open("replies", body=Login) as replies:
        await box.send("ask", reply_to=replies)
        await (await h.one(box)).reply(sent)
        _same((await h.one(replies)).body, sent, "the reply")
    for kind, reply in ((Cat | Dog, Dog("a")), (int, HUGE), (None, (1, 2))):
        async with h.open(reply=kind) as box, h.open("replies") as replies:
            await box.send("ask", reply_to=replies)
            message = await h.one(box)
            with raises(SerializationError, f"a {type(reply).__name__} as a reply"):
                await message.reply(reply)
            check(not message.is_settled, "the message is settled by a reply that was refused")
            await message.acknowledge()


@behaviour("serializes")
async def a_dead_letter_is_what_was_sent(h: Harness) -> None:
    """The body of a dead letter, and of one that was replayed, equals what was sent."""
    from mainspring.testing.mailbox_contract.body_types import ARRIVES, Login

    sent: Login = ARRIVES["secrets"][1]
    async with h.open(body=Login) as box:
        await box.send(sent)
        await (await h.one(box)).dead_letter("no")
        (letter,) = await box.dead_letters()
        _same(letter.body, sent, "the dead letter")
        await box.replay_dead_letters()
        _same((await h.one(box)).body, sent, "what was replayed")
