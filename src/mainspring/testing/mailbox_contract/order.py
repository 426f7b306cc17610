"""Who comes first."""

from __future__ import annotations

from mainspring.testing.mailbox_contract.harness import Harness, behaviour, equal, texts


@behaviour()
async def first_in_first_out(h: Harness) -> None:
    """First deliveries come in the order of sending, over send and send_many alike."""
    async with h.open() as box:
        for number in range(5):
            await box.send(number)
        await box.send_many(range(5, 10))
        await box.send(10)
        singles = [(await h.one(box)).body for _ in range(4)]
        equal(singles + texts(await h.all(box)), list(range(11)), "the order")


@behaviour("priority")
async def a_higher_priority_comes_first(h: Harness) -> None:
    """Higher priorities come first, equal ones first in first out, negative ones after the default."""
    async with h.open() as box:
        await box.send("normal 1")
        await box.send("low", priority=-5)
        await box.send_many(["high 1", "high 2"], priority=5)
        await box.send("normal 2")
        await box.send("highest", priority=6)
        expected = ["highest", "high 1", "high 2", "normal 1", "normal 2", "low"]
        equal([(await h.one(box)).body for _ in range(6)], expected, "the order one by one")


@behaviour("priority")
async def a_batch_has_the_order_too(h: Harness) -> None:
    """One receive of many returns them by priority as well."""
    async with h.open() as box:
        await box.send("b")
        await box.send("a", priority=1)
        await box.send("c")
        equal(texts(await h.all(box)), ["a", "b", "c"], "the order in one batch")


@behaviour()
async def a_nacked_message_goes_to_the_tail(h: Harness) -> None:
    """A nacked message comes after those that were waiting."""
    async with h.open() as box:
        await box.send_many(["a", "b", "c"])
        await (await h.one(box)).nack()
        equal(texts(await h.all(box)), ["b", "c", "a"], "the order after a nack")


@behaviour()
async def an_uncharged_nack_goes_to_the_tail_too(h: Harness) -> None:
    """So does one with charge=False."""
    async with h.open() as box:
        await box.send_many(["a", "b"])
        await (await h.one(box)).nack(charge=False)
        equal(texts(await h.all(box)), ["b", "a"], "the order after an uncharged nack")


@behaviour()
async def a_nacks_delay_ends_at_the_tail(h: Harness) -> None:
    """After nack(delay=s) a message is invisible for s seconds, then behind those that wait."""
    async with h.open() as box:
        await box.send_many(["a", "b"])
        first = await h.one(box)
        with h.within(h.short):
            await first.nack(delay=h.short)
            await h.counts(box, delayed=1, pending=1)
        await h.pass_time(h.short)
        await h.due_counts(box, pending=2)
        equal(texts(await h.all(box)), ["b", "a"], "the order after the delay")


@behaviour()
async def an_expired_message_goes_to_the_tail(h: Harness) -> None:
    """A message whose lease ran out comes after those that were waiting."""
    async with h.open() as box:
        await box.send_many(["a", "b", "c"])
        await h.one(box, lease=h.short)
        await h.pass_time(h.short)
        equal(texts(await h.all(box, due=3)), ["b", "c", "a"], "the order after an expiry")


@behaviour("front_return")
async def a_released_message_goes_to_the_front(h: Harness) -> None:
    """A released message comes before all that wait."""
    async with h.open() as box:
        await box.send_many(["a", "b", "c"])
        first = await h.one(box)
        await first.release()
        equal(texts(await h.all(box)), ["a", "b", "c"], "the order after a release")


@behaviour("front_return")
async def a_released_batch_goes_before_all_that_wait(h: Harness) -> None:
    """All messages of a batch, released, come before those that were not received."""
    async with h.open() as box:
        await box.send_many(range(6))
        for message in reversed(await box.receive(max_messages=3)):
            await message.release()
        equal(texts(await h.all(box)), list(range(6)), "the order after releasing a batch from its end")


@behaviour("front_return")
async def a_release_goes_before_a_nacked_one(h: Harness) -> None:
    """A release comes before what was nacked earlier, and before what was sent later."""
    async with h.open() as box:
        await box.send_many(["a", "b"])
        nacked, released = await h.all(box)
        await nacked.nack()
        await box.send("c")
        await released.release()
        equal(texts(await h.all(box)), ["b", "a", "c"], "the order")
