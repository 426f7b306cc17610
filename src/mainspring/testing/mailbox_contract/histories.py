"""What a message remembers of its earlier attempts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mainspring.mailbox.history import LAST, LEASE_EXPIRED
from mainspring.testing.mailbox_contract.harness import Harness, behaviour, check, equal

if TYPE_CHECKING:
    from mainspring.mailbox.history import Failure


def _told(history: tuple[Failure, ...]) -> list[tuple[int, str, str]]:
    return [(failure.attempt, failure.error_type, failure.error) for failure in history]


@behaviour("history")
async def a_message_remembers_its_failures(h: Harness) -> None:
    """Each charged failure is kept with the message, with its attempt, type and time, and shown by its dead letter."""
    async with h.open() as box:
        await box.send("x")
        first = await h.one(box)
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


@behaviour("history")
async def a_release_and_an_uncharged_nack_leave_the_history(h: Harness) -> None:
    """What is not charged is no failure: the history stays as it was."""
    async with h.open() as box:
        await box.send("x")
        await (await h.one(box)).nack(error="one")
        await (await h.one(box)).release()
        await (await h.one(box)).nack(charge=False, error="not counted")
        await (await h.one(box)).nack(delay=h.short, error="two")
        await h.pass_time(h.short)
        last = await h.one(box, wait=h.patience)
        equal(_told(last.history), [(1, "Reject", "one"), (2, "Reject", "two")], "history")


@behaviour("history")
async def a_lease_that_ran_out_is_in_the_history(h: Harness) -> None:
    """An attempt that ended without a word is told as one whose lease ran out, and keeps what was known before."""
    known = [(1, "Reject"), (2, LEASE_EXPIRED)]
    async with h.open() as box:
        await box.send("x")
        await (await h.one(box)).nack(error="one")
        await h.one(box, lease=h.short)
        await h.pass_time(h.short)
        last = await h.one(box, wait=h.patience)
        equal(
            [(failure.attempt, failure.error_type) for failure in last.history], known, "history at the third attempt"
        )
        await last.nack(charge=False)
        last = await h.one(box)
        equal([(failure.attempt, failure.error_type) for failure in last.history], known, "history of it once more")
        await last.dead_letter("three")
        (letter,) = await box.dead_letters()
    equal([failure.attempt for failure in letter.history], [1, 2, 3], "attempts")
    equal((letter.history[1].error_type, letter.history[1].at), (LEASE_EXPIRED, None), "the silent one")


@behaviour("history")
async def crashes_are_told_from_failures(h: Harness) -> None:
    """Message.crashes counts the deliveries whose leases ran out, and no other: also once their failures are forgotten."""
    async with h.open() as box:
        await box.send("x")
        equal((await h.one(box, lease=h.short)).crashes, 0, "crashes at the first delivery")
        await h.pass_time(h.short)
        for number in range(2, LAST + 3):
            message = await h.one(box, wait=h.patience)
            equal((message.attempt, message.crashes), (number, 1), "attempt and crashes after failures")
            await message.nack(error=f"{number}")
        await (await h.one(box)).nack(charge=False)
        await (await h.one(box)).release()
        message = await h.one(box, lease=h.short)
        equal((message.attempt, message.crashes), (LAST + 3, 1), "attempt and crashes after what is not charged")
        await h.pass_time(h.short)
        message = await h.one(box, wait=h.patience)
        equal((message.attempt, message.crashes), (LAST + 4, 2), "attempt and crashes after another crash")
        await message.dead_letter("enough")
        await box.replay_dead_letters()
        equal((await h.one(box)).crashes, 0, "crashes of a replayed message")


@behaviour("history")
async def the_history_is_bounded(h: Harness) -> None:
    """Only the latest failures are kept, and of each error only so much."""
    async with h.open() as box:
        await box.send("x")
        for number in range(1, LAST + 4):
            await (await h.one(box)).nack(error=f"{number} " + "x" * 10_000)
        history = (await h.one(box)).history
    told = [(failure.attempt, failure.error_type) for failure in history]
    equal(told, [(number, "Reject") for number in range(4, LAST + 4)], "attempts")
    check(all(len(failure.error) < 1_000 for failure in history), "an error was kept whole")


@behaviour("history")
async def a_replayed_message_begins_a_new_history(h: Harness) -> None:
    """A dead letter that is sent again has fresh counts and no history."""
    async with h.open() as box:
        await box.send("x")
        await (await h.one(box)).nack(error="one")
        await (await h.one(box)).dead_letter("two")
        await box.replay_dead_letters()
        equal((await h.one(box)).history, (), "history")


@behaviour()
async def a_dead_letter_can_be_found_by_its_id(h: Harness) -> None:
    """dead_letter(id) gives that dead letter, and None where there is none of that id."""
    async with h.open() as box:
        sent = await box.send_many(["a", "b", "c"])
        for message in await h.all(box):
            if message.body != "c":
                await message.dead_letter(f"reason {message.body}")
        letter = await box.dead_letter(sent[1])
        check(letter is not None and (letter.body, letter.error) == ("b", "reason b"), f"found {letter!r}")
        equal(await box.dead_letter(sent[2]), None, "the dead letter of a living message")
        equal(await box.dead_letter("no-such-id"), None, "the dead letter of no message")
