"""Dead letters: what they hold, how they are listed, replayed and purged; the dead-letter queue; the history of failures."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from mainspring.core import clock
from mainspring.mailbox.dead_letters import DeadLetterView, Replay
from mainspring.mailbox.history import LAST, LEASE_EXPIRED
from mainspring.testing.mailbox_contract.harness import (
    AnyMailbox,
    Harness,
    behaviour,
    check,
    equal,
    ids,
    on_mailbox,
    texts,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from mainspring.mailbox.history import Failure


async def _dead(h: Harness, box: AnyMailbox, *bodies: Any) -> list[str]:
    """Send messages and dead-letter them one after the other. Return their ids."""
    sent = await box.send_many(bodies)
    for message in await h.all(box):
        await message.dead_letter(f"reason {message.body}")
    return sent


@on_mailbox()
async def a_dead_letter_says_everything(h: Harness, box: AnyMailbox) -> None:
    """A dead letter has the message's ids, body, counts, times, headers and reply_to, and the error with its traceback."""
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
    h.check_date(letter.dead_lettered_at, died, "dead_lettered_at")


@on_mailbox()
async def a_dead_letter_takes_a_plain_reason(h: Harness, box: AnyMailbox) -> None:
    """dead_letter("reason") keeps the reason, without a traceback; ``raw`` holds the JSON as it was stored."""
    await _dead(h, box, 0)
    (letter,) = await box.dead_letters()
    equal((letter.error, letter.traceback), ("reason 0", ""), "reason and traceback")
    check(bool(letter.error_type), "there is no error_type")
    if h.serializes:
        equal(letter.raw, b"0", "the raw body")


@on_mailbox()
async def a_dead_letter_never_expires_back(h: Harness, box: AnyMailbox) -> None:
    """The end of the lease it had does not bring a dead message back."""
    lease = h.ample(1.0)
    await box.send("x")
    async with h.ending(lease):
        await (await h.one(box, lease=lease)).dead_letter("no")
    await h.none(box, "it is dead")
    await h.counts(box, dead=1)


@on_mailbox()
async def dead_letters_come_oldest_first_in_pages(h: Harness, box: AnyMailbox) -> None:
    """dead_letters() lists the oldest first and changes nothing; limit and after walk through all of them, each once."""
    sent = await _dead(h, box, *range(7))
    equal([letter.message_id for letter in await box.dead_letters()], sent, "all dead letters")
    walked: list[str] = []
    while page := await box.dead_letters(limit=3, after=walked[-1] if walked else None):
        check(len(page) <= 3, f"a page of {len(page)} with limit=3")
        check(
            page[0].message_id not in walked, "a page begins with a dead letter of the page before: `after` is ignored"
        )
        walked += [letter.message_id for letter in page]
    equal(walked, sent, "the pages joined")
    await h.counts(box, dead=7)


@on_mailbox()
async def dead_letters_are_in_the_order_of_their_deaths(h: Harness, box: AnyMailbox) -> None:
    """The oldest is the one that died first, whenever it was sent."""
    await box.send_many(["a", "b", "c"])
    dying = (await h.all(box))[::-1]
    for message in dying:
        await message.dead_letter("no")
        await h.pass_time(0.01)
    equal([letter.body for letter in await box.dead_letters()], [message.body for message in dying], "the order")


@on_mailbox()
async def a_replay_sends_them_all_again(h: Harness, box: AnyMailbox) -> None:
    """replay_dead_letters() puts all at the tail, in order, with fresh counts and their ids, bodies and headers."""
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


@on_mailbox()
async def a_replay_can_be_of_some(h: Harness, box: AnyMailbox) -> None:
    """replay_dead_letters(ids) takes those; ids of no dead letter are ignored and not counted."""
    sent = await _dead(h, box, *range(4))
    equal(await box.replay_dead_letters([sent[1], sent[3], "no such id"]), 2, "replayed")
    await h.counts(box, pending=2, dead=2)
    equal(texts(await h.all(box)), [1, 3], "what can be received")
    equal(await box.replay_dead_letters([]), 0, "replayed of no ids")
    equal(await box.replay_dead_letters(iter(sent)), 2, "replayed of those that are left")


@on_mailbox("dedup")
async def a_replayed_message_has_its_dedup_key_again(h: Harness, box: AnyMailbox) -> None:
    """While it is unfinished, a send with its key returns its id; a key that another message has by now stays that one's."""
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
    check(await box.send("later", dedup_key="taken") not in {first, other, newer}, "a finished message kept its key")


@on_mailbox()
async def a_replayed_message_can_die_again(h: Harness, box: AnyMailbox) -> None:
    """A replayed message that dies once more is one dead letter, with the new error."""
    sent = await _dead(h, box, 0)
    await box.replay_dead_letters()
    await (await h.one(box)).dead_letter("again")
    letters = await box.dead_letters()
    equal([(letter.message_id, letter.error) for letter in letters], [(sent[0], "again")], "dead letters")
    await h.counts(box, dead=1)


@on_mailbox()
async def dead_letters_can_be_forgotten(h: Harness, box: AnyMailbox) -> None:
    """purge_dead_letters(ids) forgets those, without ids all; it returns how many. The counts still add up."""
    sent = await _dead(h, box, *range(4))
    await box.send("alive")
    equal(await box.purge_dead_letters([sent[0], "no such id"]), 1, "forgotten")
    equal([letter.message_id for letter in await box.dead_letters()], sent[1:], "dead letters left")
    equal(await box.purge_dead_letters([]), 0, "forgotten of no ids")
    equal(await box.purge_dead_letters(), 3, "forgotten of all")
    equal(await box.dead_letters(), [], "dead letters left")
    equal(await box.replay_dead_letters(), 0, "replayed of forgotten ones")
    await h.counts(box, pending=1, settled=4)


@asynccontextmanager
async def _view(h: Harness, box: AnyMailbox) -> AsyncIterator[DeadLetterView]:
    """Open the dead letters of ``box`` as a mailbox, and purge what the view leaves on the store."""
    async with DeadLetterView(box, look_every=h.short / 4) as view:
        yield view
        await view.purge()


@behaviour("siblings", "dedup")
async def a_dead_letter_is_received_and_purged_when_acknowledged(h: Harness) -> None:
    """A view gives a dead letter as a message; it stays among the dead letters until it is acknowledged."""
    async with h.open() as box, _view(h, box) as view:
        (sent,) = await _dead(h, box, "x")
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
        await _dead(h, box, "x")
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
        sent = await _dead(h, box, "x")
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
        sent = await _dead(h, box, "x", "y")
        for _ in sent:
            await (await h.one(view, wait=h.wait)).dead_letter("not mine")
        await h.pass_time(h.short)
        await h.none(view, "they were given up")
        equal([letter.message_id for letter in await box.dead_letters()], sent, "dead letters")
        await box.purge_dead_letters(sent[:1])
        await _dead(h, box, "z")
        message = await h.one(view, wait=h.wait)
        check(message.body.body == "z", f"another one than the new one came: {message.body!r}")


def _told(history: tuple[Failure, ...]) -> list[tuple[int, str, str]]:
    return [(failure.attempt, failure.error_type, failure.error) for failure in history]


def _kinds(history: tuple[Failure, ...]) -> list[tuple[int, str]]:
    return [(failure.attempt, failure.error_type) for failure in history]


@on_mailbox("history")
async def a_message_remembers_its_failures(h: Harness, box: AnyMailbox) -> None:
    """Each charged failure is kept with the message, with its attempt, type and time, and shown by its dead letter."""
    first = await h.delivery(box)
    equal(first.history, (), "history of a new message")
    await first.nack(error=LookupError("not there"))
    second = await h.one(box)
    equal(_told(second.history), [(1, "LookupError", "not there")], "history at the second attempt")
    await second.nack(error="still not")
    await (await h.one(box)).nack()
    await (await h.one(box)).dead_letter(ValueError("enough"))
    (letter,) = await box.dead_letters()
    expected = [
        (1, "LookupError", "not there"),
        (2, "Reject", "still not"),
        (3, "Nack", "given back by nack(), without an error"),
        (4, "ValueError", "enough"),
    ]
    equal(_told(letter.history), expected, "history of the dead letter")
    times: list[Any] = [failure.at for failure in letter.history]
    check(None not in times and times == sorted(times), f"the times are {times}")
    check(all(letter.enqueued_at <= at <= letter.dead_lettered_at for at in times), f"the times are {times}")


@on_mailbox("history")
async def a_release_and_an_uncharged_nack_leave_the_history(h: Harness, box: AnyMailbox) -> None:
    """What is not charged is no failure: the history stays as it was."""
    await (await h.delivery(box)).nack(error="one")
    await (await h.one(box)).release()
    await (await h.one(box)).nack(charge=False, error="not counted")
    await (await h.one(box)).nack(delay=h.short, error="two")
    await h.pass_time(h.short)
    last = await h.one(box, wait=h.patience)
    equal(_told(last.history), [(1, "Reject", "one"), (2, "Reject", "two")], "history")


@on_mailbox("history")
async def a_lease_that_ran_out_is_in_the_history(h: Harness, box: AnyMailbox) -> None:
    """An attempt that ended without a settlement is in the history as an expired lease, after the earlier failures."""
    known = [(1, "Reject"), (2, LEASE_EXPIRED)]
    await (await h.delivery(box)).nack(error="one")
    await h.lapsed(box)
    last = await h.one(box, wait=h.patience)
    equal(_kinds(last.history), known, "history at the third attempt")
    await last.nack(charge=False)
    last = await h.one(box)
    equal(_kinds(last.history), known, "history of it once more")
    await last.dead_letter("three")
    (letter,) = await box.dead_letters()
    equal([failure.attempt for failure in letter.history], [1, 2, 3], "attempts")
    equal((letter.history[1].error_type, letter.history[1].at), (LEASE_EXPIRED, None), "the silent one")


@on_mailbox("history")
async def crashes_are_told_from_failures(h: Harness, box: AnyMailbox) -> None:
    """Message.crashes counts the deliveries whose leases ran out, and no other: also once their failures are forgotten."""
    await box.send("x")
    equal((await h.lapsed(box)).crashes, 0, "crashes at the first delivery")
    for number in range(2, LAST + 3):
        message = await h.one(box, wait=h.patience)
        equal((message.attempt, message.crashes), (number, 1), "attempt and crashes after failures")
        await message.nack(error=f"{number}")
    await (await h.one(box)).nack(charge=False)
    await (await h.one(box)).release()
    message = await h.lapsed(box)
    equal((message.attempt, message.crashes), (LAST + 3, 1), "attempt and crashes after what is not charged")
    message = await h.one(box, wait=h.patience)
    equal((message.attempt, message.crashes), (LAST + 4, 2), "attempt and crashes after another crash")
    await message.dead_letter("enough")
    await box.replay_dead_letters()
    equal((await h.one(box)).crashes, 0, "crashes of a replayed message")


@on_mailbox("history")
async def the_history_is_bounded(h: Harness, box: AnyMailbox) -> None:
    """Only the latest failures are kept, and of each error only so much."""
    await box.send("x")
    for number in range(1, LAST + 4):
        await (await h.one(box)).nack(error=f"{number} " + "x" * 10_000)
    history = (await h.one(box)).history
    equal(_kinds(history), [(number, "Reject") for number in range(4, LAST + 4)], "attempts")
    check(all(len(failure.error) < 1_000 for failure in history), "an error was kept whole")


@on_mailbox("history")
async def a_replayed_message_begins_a_new_history(h: Harness, box: AnyMailbox) -> None:
    """A dead letter that is sent again has fresh counts and no history."""
    await (await h.delivery(box)).nack(error="one")
    await (await h.one(box)).dead_letter("two")
    await box.replay_dead_letters()
    equal((await h.one(box)).history, (), "history")


@on_mailbox()
async def a_dead_letter_can_be_found_by_its_id(h: Harness, box: AnyMailbox) -> None:
    """dead_letter(id) gives that dead letter, and None where there is none of that id."""
    sent = await box.send_many(["a", "b", "c"])
    for message in await h.all(box):
        if message.body != "c":
            await message.dead_letter(f"reason {message.body}")
    letter = await box.dead_letter(sent[1])
    check(letter is not None and (letter.body, letter.error) == ("b", "reason b"), f"found {letter!r}")
    equal(await box.dead_letter(sent[2]), None, "the dead letter of a living message")
    equal(await box.dead_letter("no-such-id"), None, "the dead letter of no message")
