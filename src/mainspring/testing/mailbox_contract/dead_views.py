"""Work on dead letters: received and leased like messages, and kept until it is done."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from mainspring.mailbox.dead_letter_queue import DeadLetterView, Replay
from mainspring.testing.mailbox_contract.harness import Harness, behaviour, check, equal, ids

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from mainspring.mailbox.mailbox import Mailbox


@asynccontextmanager
async def _view(h: Harness, box: Mailbox[Any, Any]) -> AsyncIterator[DeadLetterView]:
    """The dead letters of ``box``; what the view leaves on the store is taken away."""
    async with DeadLetterView(box, look_every=h.short / 4) as view:
        yield view
        await view.purge()


async def _dead(box: Mailbox[Any, Any], *bodies: str) -> list[str]:
    sent = await box.send_many(bodies)
    for message in await box.receive(max_messages=len(bodies)):
        await message.dead_letter(f"reason {message.body}")
    return sent


@behaviour("siblings", "dedup")
async def a_dead_letter_is_received_and_purged_when_acknowledged(h: Harness) -> None:
    """A view gives a dead letter as a message; it stays among the dead letters until it is acknowledged."""
    async with h.open() as box, _view(h, box) as view:
        (sent,) = await _dead(box, "x")
        message = await h.one(view, wait=h.wait)
        letter = message.body
        equal((message.id, letter.message_id, letter.body, letter.error), (sent, sent, "x", "reason x"), "the letter")
        await h.counts(box, dead=1)
        await message.acknowledge()
        await h.counts(box, settled=1)
        equal(await box.dead_letters(), [], "dead letters")


@behaviour("siblings", "dedup")
async def a_dead_letter_is_leased_to_one(h: Harness) -> None:
    """Of two views one has a dead letter; a nack, or the end of its lease, brings it to the other."""
    async with h.open() as box, h.open() as other, _view(h, box) as one, _view(h, other) as two:
        await _dead(box, "x")
        message = await h.one(one, wait=h.wait)
        await h.pass_time(h.short)  # both have looked for new ones more than once
        await h.none(two, "the other one has it")
        await message.nack()
        equal((await h.one(two, lease=h.short, wait=h.wait)).attempt, 2, "attempt")
        equal((await h.one(one, wait=h.wait)).attempt, 3, "attempt after the lease had ended")


@behaviour("siblings", "dedup")
async def a_dead_letter_can_be_replayed_from_a_view(h: Harness) -> None:
    """Settled with Replay, a dead letter goes to its mailbox; having died again, it comes again."""
    async with h.open() as box, _view(h, box) as view:
        sent = await _dead(box, "x")
        for _ in range(3):
            await (await h.one(view, wait=h.wait)).settle(Replay())
            message = await h.one(box, wait=h.wait)
            equal((ids([message]), message.attempt), (sent, 1), "what was replayed")
            await message.dead_letter("again")
        equal((await h.one(view, wait=h.wait)).body.error, "again", "the error")


@behaviour("siblings", "dedup")
async def a_dead_letter_that_is_given_up_stays(h: Harness) -> None:
    """Dead-lettered itself, a dead letter stays where it is and does not come again; a purge from elsewhere takes it."""
    async with h.open() as box, _view(h, box) as view:
        sent = await _dead(box, "x", "y")
        for _ in sent:
            await (await h.one(view, wait=h.wait)).dead_letter("not mine")
        await h.pass_time(h.short)
        await h.none(view, "they were given up")
        equal([letter.message_id for letter in await box.dead_letters()], sent, "dead letters")
        await box.purge_dead_letters(sent[:1])
        await _dead(box, "z")
        message = await h.one(view, wait=h.wait)
        check(message.body.body == "z", f"another one than the new one came: {message.body!r}")
