"""What is received equals what was sent, whatever its type, or the send refuses it.

A mailbox does this in the same way over every backend. The behaviours are written as those of the contract are, and run on the
backends in memory, which keep bodies as JSON or as objects, and on SQLite.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from contract.backends import NAMES, backend
from contract.body_types import ARRIVES, HUGE, LOGIN, REFUSED, Base, Cat, Dog, Holder, Login, Sub
from contract.broken_mailboxes import SendsWhatChanges, broken
from mainspring import SerializationError
from mainspring.testing import run_virtual
from mainspring.testing.mailbox_contract import Behaviour, ContractError, Harness
from mainspring.testing.mailbox_contract.bodies import check_refused
from mainspring.testing.mailbox_contract.harness import behaviour, check, equal, raises

if TYPE_CHECKING:
    from pathlib import Path


def _same(received: Any, sent: Any, what: str) -> None:
    """Check that two bodies are equal and of one class."""
    check(type(received) is type(sent), f"{what}: a {type(received).__name__} was received, and not {sent!r}")
    equal(received, sent, what)


@behaviour()
async def what_is_received_is_what_was_sent(h: Harness) -> None:
    """Objects, unions, plain JSON, aliases, secrets, computed fields and the like: what is received equals what was sent."""
    for number, (name, kind, body) in enumerate(ARRIVES):
        async with h.open(f"jobs-{number}", body=kind) as box:
            await box.send(body)
            await box.send_many([body])
            for message in await h.all(box):
                _same(message.body, body, name)


@behaviour("serializes")
async def what_would_not_be_received_as_it_is_is_refused(h: Harness) -> None:
    """A body that would come back as another one, or could not be read, is refused at the send; the error names the field."""
    await check_refused(h, *REFUSED)


@behaviour("serializes")
async def without_a_type_an_object_is_sent_to_those_who_know_its_class(h: Harness) -> None:
    """A mailbox without a type takes a dataclass that its class reads back; received without a type, it is its JSON data."""
    async with h.open() as box:
        received = (await h.delivery(box, Holder(Base(1)))).body
        equal(received, {"item": {"a": 1}, "items": []}, "what is received without a type")
        with raises(SerializationError, "an object with one of a class below"):
            await box.send(Holder(Sub(1, 2)))


@behaviour("serializes", "transactional_reply")
async def replies_are_received_as_they_were_sent_or_refused(h: Harness) -> None:
    """A reply is as exact as a body; a refused reply leaves the message unsettled."""
    async with h.open(reply=Login) as box, h.open("replies", body=Login) as replies:
        await (await h.delivery(box, "ask", reply_to=replies)).reply(LOGIN)
        _same((await h.one(replies)).body, LOGIN, "the reply")
    for kind, reply in ((Cat | Dog, Dog("a")), (int, HUGE), (None, (1, 2))):
        async with h.open(reply=kind) as box, h.open("replies") as replies:
            message = await h.delivery(box, "ask", reply_to=replies)
            with raises(SerializationError, f"a {type(reply).__name__} as a reply"):
                await message.reply(reply)
            check(not message.is_settled, "the message is settled by a reply that was refused")
            await message.acknowledge()


@behaviour("serializes")
async def a_dead_letter_is_what_was_sent(h: Harness) -> None:
    """The body of a dead letter, and of a replayed message, equals what was sent."""
    async with h.open(body=Login) as box:
        await (await h.delivery(box, LOGIN)).dead_letter("no")
        (letter,) = await box.dead_letters()
        _same(letter.body, LOGIN, "the dead letter")
        await box.replay_dead_letters()
        _same((await h.one(box)).body, LOGIN, "what was replayed")


BEHAVIOURS = [value for value in list(vars().values()) if isinstance(value, Behaviour)]


@pytest.mark.parametrize("one", BEHAVIOURS, ids=lambda one: one.name)
@pytest.mark.parametrize("name", NAMES)
def test_bodies(name: str, one: Behaviour, tmp_path: Path) -> None:
    run_virtual(one, backend(name, tmp_path))


@pytest.mark.parametrize(
    "one",
    [what_would_not_be_received_as_it_is_is_refused, replies_are_received_as_they_were_sent_or_refused],
    ids=lambda one: one.name,
)
def test_a_mailbox_that_sends_what_changes_is_caught(one: Behaviour) -> None:
    with pytest.raises(ContractError):
        run_virtual(one, broken(SendsWhatChanges))
