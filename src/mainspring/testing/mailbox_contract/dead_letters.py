"""Dead letters: what they say, how they are listed, sent again and forgotten."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Any

from mainspring.core import clock
from mainspring.testing.mailbox_contract.harness import Harness, behaviour, check, equal, ids, texts

if TYPE_CHECKING:
    from mainspring.mailbox.mailbox import Mailbox


async def _dead(h: Harness, box: Mailbox[Any, Any], count: int) -> list[str]:
    """Send that many and dead-letter them one after the other; their ids."""
    sent = await box.send_many(range(count))
    for message in await h.all(box):
        await message.dead_letter(f"reason {message.body}")
    return sent


@behaviour()
async def a_dead_letter_says_everything(h: Harness) -> None:
    """A dead letter has the message's ids, body, counts, times, headers and reply_to, and the error with its traceback."""
    async with h.open() as box:
        sent = await box.send({"n": 1}, headers={"k": "v"}, reply_to="elsewhere")
        first = await h.one(box)
        await first.nack()
        second = await h.one(box)
        try:
            raise LookupError("nowhere to be found")
        except LookupError as error:
            await second.dead_letter(error)
        died = clock.utc_now()
        check(second.is_settled, "is_settled is not set")
        await h.none(box, "it is dead")
        await h.counts(box, dead=1)
        (letter,) = await box.dead_letters()
    equal((letter.message_id, letter.request_id, letter.mailbox), (sent, sent, box.name), "ids and mailbox")
    equal((letter.delivery_count, letter.attempt), (2, 2), "counts")
    equal((letter.body, dict(letter.headers), letter.reply_to), ({"n": 1}, {"k": "v"}, "elsewhere"), "what was sent")
    equal((letter.error, letter.error_type), ("nowhere to be found", "LookupError"), "the error")
    check("LookupError: nowhere to be found" in letter.traceback, f"no traceback: {letter.traceback!r}")
    equal(letter.enqueued_at, first.enqueued_at, "enqueued_at")
    equal(letter.first_received_at, first.first_received_at, "first_received_at")
    near = datetime.timedelta(seconds=0.01 if h.virtual else 5)
    check(
        abs(letter.dead_lettered_at - died) <= near, f"dead_lettered_at is {letter.dead_lettered_at}, not about {died}"
    )


@behaviour()
async def a_dead_letter_takes_a_plain_reason(h: Harness) -> None:
    """dead_letter("reason") keeps the reason, without a traceback."""
    async with h.open() as box:
        await _dead(h, box, 1)
        (letter,) = await box.dead_letters()
        equal((letter.error, letter.traceback), ("reason 0", ""), "reason and traceback")
        check(bool(letter.error_type), "there is no error_type")


@behaviour("serializes")
async def a_dead_letter_keeps_the_raw_body(h: Harness) -> None:
    """`raw` holds the JSON bytes as they were stored."""
    async with h.open() as box:
        await _dead(h, box, 1)
        (letter,) = await box.dead_letters()
        equal(letter.raw, b"0", "the raw body")


@behaviour()
async def a_dead_letter_never_expires_back(h: Harness) -> None:
    """The end of the lease it had does not bring a dead message back."""
    lease = h.ample(1.0)
    async with h.open() as box:
        await box.send("x")
        with h.within(lease):
            await (await h.one(box, lease=lease)).dead_letter("no")
        await h.pass_time(lease)
        await h.none(box, "it is dead")
        await h.counts(box, dead=1)


@behaviour()
async def dead_letters_come_oldest_first_in_pages(h: Harness) -> None:
    """dead_letters() lists the oldest first; limit and after walk through all of them, each once."""
    async with h.open() as box:
        sent = await _dead(h, box, 7)
        equal([letter.message_id for letter in await box.dead_letters()], sent, "all dead letters")
        walked: list[str] = []
        while page := await box.dead_letters(limit=3, after=walked[-1] if walked else None):
            check(len(page) <= 3, f"a page of {len(page)} with limit=3")
            walked += [letter.message_id for letter in page]
        equal(walked, sent, "the pages joined")


@behaviour()
async def dead_letters_are_in_the_order_of_their_deaths(h: Harness) -> None:
    """The oldest is the one that died first, whenever it was sent."""
    async with h.open() as box:
        await box.send_many(["a", "b", "c"])
        for message in reversed(await h.all(box)):
            await message.dead_letter("no")
            await h.pass_time(0.01)
        equal([letter.body for letter in await box.dead_letters()], ["c", "b", "a"], "the order")


@behaviour()
async def listing_changes_nothing(h: Harness) -> None:
    """Dead letters are there after they were listed."""
    async with h.open() as box:
        await _dead(h, box, 2)
        for _ in range(2):
            equal(len(await box.dead_letters()), 2, "dead letters")
        await h.counts(box, dead=2)


@behaviour()
async def a_replay_sends_them_all_again(h: Harness) -> None:
    """replay_dead_letters() puts all at the tail, in order, with fresh counts and their ids, bodies and headers."""
    async with h.open() as box:
        await box.send_many(["a", "b"], headers={"k": "v"}, reply_to="elsewhere")
        died = await h.all(box)
        for message in died:
            await message.nack()
        for message in await h.all(box):
            await message.dead_letter("no")
        await box.send("c")
        equal(await box.replay_dead_letters(), 2, "replayed")
        await h.counts(box, pending=3)
        equal(await box.dead_letters(), [], "dead letters left")
        c, a, b = await h.all(box)
        equal(texts([c, a, b]), ["c", "a", "b"], "the order")
        equal(ids([a, b]), ids(died), "ids")
        for message in (a, b):
            equal((message.delivery_count, message.attempt), (1, 1), "counts of a replayed message")
            equal((dict(message.headers), message.reply_to), ({"k": "v"}, "elsewhere"), "headers and reply_to")


@behaviour()
async def a_replay_can_be_of_some(h: Harness) -> None:
    """replay_dead_letters(ids) takes those; ids of no dead letter are ignored and not counted."""
    async with h.open() as box:
        sent = await _dead(h, box, 4)
        equal(await box.replay_dead_letters([sent[1], sent[3], "no such id"]), 2, "replayed")
        await h.counts(box, pending=2, dead=2)
        equal(texts(await h.all(box)), [1, 3], "what can be received")
        equal(await box.replay_dead_letters([]), 0, "replayed of no ids")
        equal(await box.replay_dead_letters(iter(sent)), 2, "replayed of those that are left")


@behaviour("dedup")
async def a_replayed_message_has_its_dedup_key_again(h: Harness) -> None:
    """While it is unfinished, a send with its key returns its id; a key that another message has by now stays that one's."""
    async with h.open() as box:
        first, other = [await box.send("dies", dedup_key=key) for key in ("k", "taken")]
        for message in await h.all(box):
            await message.dead_letter("no")
        newer = await box.send("newer", dedup_key="taken")
        equal(await box.replay_dead_letters(), 2, "replayed")
        equal(await box.send("again", dedup_key="k"), first, "the id of a send with the key of a replayed message")
        equal(await box.send("again", dedup_key="taken"), newer, "the id of a send with a key that another message has")
        for message in await h.all(box):
            await message.acknowledge()
        check(await box.send("later", dedup_key="k") not in {first, other, newer}, "a finished message kept its key")
        check(
            await box.send("later", dedup_key="taken") not in {first, other, newer}, "a finished message kept its key"
        )


@behaviour()
async def a_replayed_message_can_die_again(h: Harness) -> None:
    """A replayed message that dies once more is one dead letter, with the new error."""
    async with h.open() as box:
        sent = await _dead(h, box, 1)
        await box.replay_dead_letters()
        await (await h.one(box)).dead_letter("again")
        letters = await box.dead_letters()
        equal([(letter.message_id, letter.error) for letter in letters], [(sent[0], "again")], "dead letters")
        await h.counts(box, dead=1)


@behaviour()
async def dead_letters_can_be_forgotten(h: Harness) -> None:
    """purge_dead_letters(ids) forgets those, without ids all; it returns how many and touches nothing else."""
    async with h.open() as box:
        sent = await _dead(h, box, 4)
        await box.send("alive")
        equal(await box.purge_dead_letters([sent[0], "no such id"]), 1, "forgotten")
        equal([letter.message_id for letter in await box.dead_letters()], sent[1:], "dead letters left")
        equal(await box.purge_dead_letters([]), 0, "forgotten of no ids")
        equal(await box.purge_dead_letters(), 3, "forgotten of all")
        equal(await box.dead_letters(), [], "dead letters left")
        equal(await box.replay_dead_letters(), 0, "replayed of forgotten ones")
        counts = await box.counts()
        equal((counts.pending, counts.dead, counts.waiting), (1, 0, 1), "what is left")
