"""What each settlement does, and what it counts as."""

from __future__ import annotations

from mainspring.errors import MessageSettledError, ReceiptHandleExpiredError
from mainspring.testing.mailbox_contract.harness import Harness, behaviour, check, equal, raises


@behaviour()
async def an_acknowledged_message_is_gone(h: Harness) -> None:
    """acknowledge() settles: the message never comes again, also not after its lease would have ended."""
    lease = h.ample(1.0)
    async with h.open() as box:
        await box.send("x")
        with h.within(lease):
            message = await h.one(box, lease=lease)
            await message.acknowledge()
        check(message.is_settled, "is_settled is not set")
        await h.counts(box, settled=1)
        await h.pass_time(lease)
        await h.none(box, "it was acknowledged")
        await h.counts(box, settled=1)


@behaviour()
async def messages_are_settled_in_any_order(h: Harness) -> None:
    """The messages of a batch can be settled in any order, each in its own way."""
    async with h.open() as box:
        await box.send_many(["a", "b", "c", "d"])
        a, b, c, d = await h.all(box)
        await d.acknowledge()
        await b.dead_letter("no")
        await c.nack()
        await a.release()
        await h.counts(box, pending=2, settled=1, dead=1)


@behaviour()
async def messages_are_acknowledged_in_one_call(h: Harness) -> None:
    """acknowledge_many() settles each of its messages, but for one whose lease has run out: that one it names."""
    async with h.open() as box:
        await box.send_many(["a", "b", "c"])
        late = await h.one(box, lease=h.short)
        others = await h.all(box)
        await h.pass_time(h.short)
        refused = await box.acknowledge_many([others[0], late, others[1]])
        equal(list(refused), [1], "numbers of the refused")
        check(isinstance(refused[1], ReceiptHandleExpiredError), f"it was refused by {refused[1]!r}")
        equal([message.is_settled for message in (others[0], late, others[1])], [True, False, True], "is_settled")
        await (await h.one(box, wait=h.patience)).release()
        await h.counts(box, pending=1, settled=2)


@behaviour()
async def a_message_that_is_named_twice_is_acknowledged_once(h: Harness) -> None:
    """acknowledge_many() refuses what it is given again with MessageSettledError, or as it refused it the first time."""
    async with h.open() as box:
        await box.send_many(["a", "b", "c"])
        late = await h.one(box, lease=h.short)
        b, c = await h.all(box)
        await h.pass_time(h.short)
        refused = await box.acknowledge_many([b, late, b, c, late])
        kinds = {number: type(error) for number, error in sorted(refused.items())}
        expired, settled = ReceiptHandleExpiredError, MessageSettledError
        equal(kinds, {1: expired, 2: settled, 4: expired}, "what was refused")
        equal([message.is_settled for message in (b, late, c)], [True, False, True], "is_settled")
        equal(await box.acknowledge_many([]), {}, "what was refused of none")
        await (await h.one(box, wait=h.patience)).release()
        await h.counts(box, pending=1, settled=2)


@behaviour()
async def a_settled_message_is_not_acknowledged_with_others(h: Harness) -> None:
    """acknowledge_many() of messages of which one is settled already raises MessageSettledError, and settles none."""
    async with h.open() as box:
        await box.send_many(["a", "b"])
        a, b = await h.all(box)
        await b.release()
        with raises(MessageSettledError, "an acknowledgement of one that was released"):
            await box.acknowledge_many([a, b])
        check(not a.is_settled, "is_settled is set")
        await a.acknowledge()
        await h.counts(box, pending=1, settled=1)


@behaviour()
async def a_nack_charges_an_attempt(h: Harness) -> None:
    """After nack() the next delivery has delivery_count and attempt one higher."""
    async with h.open() as box:
        await box.send("x")
        for number in range(1, 5):
            message = await h.one(box)
            equal((message.delivery_count, message.attempt), (number, number), f"counts of delivery {number}")
            await message.nack()
            check(message.is_settled, "is_settled is not set")
            await h.counts(box, pending=1)


@behaviour()
async def an_uncharged_nack_charges_nothing(h: Harness) -> None:
    """After nack(charge=False) delivery_count is one higher and attempt is not."""
    async with h.open() as box:
        await box.send("x")
        for number in range(1, 4):
            message = await h.one(box)
            equal((message.delivery_count, message.attempt), (number, 1), f"counts of delivery {number}")
            await message.nack(charge=False)
        await (await h.one(box)).nack()
        equal((await h.one(box)).attempt, 2, "attempt after a charged nack")


@behaviour("delay")
async def a_delayed_nack_charges_as_told(h: Harness) -> None:
    """nack(delay=s) charges like one without a delay, and counts as delayed."""
    async with h.open() as box:
        await box.send("x")
        message = await h.one(box)
        with h.within(h.short):
            await message.nack(delay=h.short)
            await h.counts(box, delayed=1)
        await h.pass_time(h.short)
        message = await h.one(box, wait=h.patience)
        equal((message.delivery_count, message.attempt), (2, 2), "counts after a charged one")
        await message.nack(delay=h.short, charge=False)
        await h.pass_time(h.short)
        message = await h.one(box, wait=h.patience)
        equal((message.delivery_count, message.attempt), (3, 2), "counts after an uncharged one")


@behaviour("delay")
async def a_nacks_delay_hides_the_message(h: Harness) -> None:
    """During the delay of a nack nobody receives the message."""
    async with h.open() as box:
        await box.send("x")
        await (await h.one(box)).nack(delay=3_600)
        await h.none(box, "an hour's delay")
        equal(await box.receive(wait_time_seconds=h.short), [], "what a short poll got")
        await h.counts(box, delayed=1)


@behaviour()
async def a_release_charges_nothing(h: Harness) -> None:
    """After release() attempt is as before, and delivery_count counts the delivery."""
    async with h.open() as box:
        await box.send("x")
        for number in range(1, 5):
            message = await h.one(box)
            equal((message.delivery_count, message.attempt), (number, 1), f"counts of delivery {number}")
            await message.release()
            check(message.is_settled, "is_settled is not set")
            await h.counts(box, pending=1)


@behaviour()
async def attempts_add_up_over_every_kind_of_return(h: Harness) -> None:
    """nack and expiry charge, release and an uncharged nack do not, in whatever order they come."""
    async with h.open() as box:
        await box.send("x")
        await (await h.one(box)).release()
        await (await h.one(box)).nack()
        await h.one(box, lease=h.short)
        await h.pass_time(h.short)
        await (await h.one(box, wait=h.patience)).nack(charge=False)
        await (await h.one(box)).release()
        message = await h.one(box)
        equal((message.delivery_count, message.attempt), (6, 3), "counts of the sixth delivery")


@behaviour()
async def a_return_ends_the_old_lease(h: Harness) -> None:
    """A message given back and received again has a lease of its own: the end of the first one changes nothing."""
    lease = h.ample(1.0)
    async with h.open() as box:
        await box.send("x")
        with h.within(lease):
            await (await h.one(box, lease=lease)).nack()
        again = await h.one(box, lease=600)
        await h.pass_time(lease)
        await h.none(box, "the second lease still runs")
        await again.acknowledge()
        await h.counts(box, settled=1)


@behaviour()
async def a_purge_drops_what_is_not_dead(h: Harness) -> None:
    """purge() drops what is delayed, pending and in flight and returns how many; dead letters stay; it all adds up."""
    async with h.open() as box:
        await box.send_many(["dead", "held", "pending"])
        dead, held = await box.receive(max_messages=2)
        await dead.dead_letter("no")
        if h.capabilities.delay:
            await box.send("later", delay=3_600)
        dropped = 2 + int(h.capabilities.delay)
        equal(await box.purge(), dropped, "purged messages")
        await h.counts(box, settled=dropped, dead=1)
        await h.none(box, "everything was purged")
        check(not held.is_settled, "a purge settled somebody's delivery")
        equal(await box.purge(), 0, "messages of a second purge")
        await box.send("new")
        equal((await h.one(box)).body, "new", "what was sent after the purge")
