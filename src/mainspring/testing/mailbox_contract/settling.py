"""Settlements, purges and cancellations: what they do, what they charge, and how they count."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import anyio

from mainspring.errors import MessageSettledError, ReceiptHandleExpiredError
from mainspring.mailbox.message import ACK, CancelOutcome, ClaimedMessage
from mainspring.testing.mailbox_contract.harness import (
    AnyMailbox,
    Behaviour,
    Harness,
    check,
    equal,
    from_row,
    on_mailbox,
    raises,
    texts,
)
from mainspring.testing.mailbox_contract.leases import OPERATIONS

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from mainspring.mailbox.message import Message

    EndDelivery: TypeAlias = Callable[[Message], Awaitable[None]]


FOREIGN = ("", "rubbish", "\u00e4", "\0", "\ud800", "9" * 40)
"""Receipt handles that no mailbox gives out."""


@on_mailbox()
async def an_acknowledged_message_is_gone(h: Harness, box: AnyMailbox) -> None:
    """acknowledge() settles: the message never comes again, also not after its lease would have ended."""
    lease = h.ample(1.0)
    await box.send("x")
    async with h.ending(lease):
        message = await h.one(box, lease=lease)
        await message.acknowledge()
        check(message.is_settled, "is_settled is not set")
        await h.counts(box, settled=1)
    await h.none(box, "it was acknowledged")
    await h.counts(box, settled=1)


@on_mailbox()
async def messages_are_settled_in_any_order(h: Harness, box: AnyMailbox) -> None:
    """The messages of a batch can be settled in any order, each in its own way."""
    await box.send_many(["a", "b", "c", "d"])
    a, b, c, d = await h.all(box)
    await d.acknowledge()
    await b.dead_letter("no")
    await c.nack()
    await a.release()
    await h.counts(box, pending=2, settled=1, dead=1)


@on_mailbox()
async def messages_are_acknowledged_in_one_call(h: Harness, box: AnyMailbox) -> None:
    """acknowledge_many() settles each of its messages once; it names those whose leases have run out or that are repeated."""
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


@on_mailbox()
async def a_settled_message_is_not_acknowledged_with_others(h: Harness, box: AnyMailbox) -> None:
    """acknowledge_many() of messages of which one is settled already raises MessageSettledError, and settles none."""
    await box.send_many(["a", "b"])
    a, b = await h.all(box)
    await b.release()
    with raises(MessageSettledError, "an acknowledgement of one that was released"):
        await box.acknowledge_many([a, b])
    check(not a.is_settled, "is_settled is set")
    await a.acknowledge()
    await h.counts(box, pending=1, settled=1)


@on_mailbox("fencing")
async def a_foreign_receipt_handle_is_refused_by_itself(h: Harness, box: AnyMailbox) -> None:
    """A receipt handle of no mailbox raises ReceiptHandleExpiredError; acknowledge_many() names it and does the others."""
    await box.send_many(["a", "b"])
    a, b = await h.all(box)
    foreign = [ClaimedMessage(a.id, a.body, handle, 1, 1, 0.0, 0.0) for handle in FOREIGN]
    for delivery in foreign:
        with raises(ReceiptHandleExpiredError, f"an acknowledgement by {delivery.receipt_handle!r}"):
            await box.backend.settle(delivery, ACK)
        with raises(ReceiptHandleExpiredError, f"an extension by {delivery.receipt_handle!r}"):
            await box.backend.extend(delivery, 1)
    refused = await box.backend.acknowledge_many([a.delivery, *foreign, b.delivery])
    kinds = {foreign[number - 1].receipt_handle: type(error) for number, error in sorted(refused.items())}
    equal(kinds, dict.fromkeys(FOREIGN, ReceiptHandleExpiredError), "what was refused")
    await h.counts(box, settled=2)


def _charges(name: str, claim: str, end_delivery: EndDelivery, *, charged: bool) -> Behaviour:
    async def run(h: Harness, box: AnyMailbox) -> None:
        await box.send("x")
        for number in range(1, 5):
            message = await h.one(box, counts=(number, number if charged else 1))
            await end_delivery(message)
            check(message.is_settled, "is_settled is not set")
            await h.counts(box, pending=1)
        await (await h.one(box)).nack()
        await h.one(box, counts=(6, 6 if charged else 2))

    return from_row(name, claim, run)


def _order(name: str, claim: str, end_delivery: EndDelivery, order: str, *needs: str) -> Behaviour:
    async def run(h: Harness, box: AnyMailbox) -> None:
        await box.send_many("abc")
        await end_delivery(await h.one(box))
        equal("".join(texts(await h.all(box))), order, "the order after it")

    return from_row(name, claim, run, *needs)


RETURNS = [
    _charges("a_nack_charges_an_attempt", "After nack() the next delivery has delivery_count and attempt one higher.",
             lambda message: message.nack(), charged=True),
    _charges("an_uncharged_nack_charges_nothing", "After nack(charge=False) delivery_count is one higher and attempt is not.",
             lambda message: message.nack(charge=False), charged=False),
    _charges("a_release_charges_nothing", "After release() attempt is as before, and delivery_count counts the delivery.",
             lambda message: message.release(), charged=False),
    _order("a_nacked_message_goes_to_the_tail", "A nacked message comes after those that were waiting.",
           lambda message: message.nack(), "bca"),
    _order("an_uncharged_nack_goes_to_the_tail_too", "A message nacked with charge=False comes after those that were waiting.",
           lambda message: message.nack(charge=False), "bca"),
    _order("a_released_message_goes_to_the_front", "A released message comes before all that wait.",
           lambda message: message.release(), "abc", "front_return"),
]  # fmt: skip
"""What each way to give a message back charges, and where the message then is in the order."""


@on_mailbox("delay")
async def a_delayed_nack_charges_as_told(h: Harness, box: AnyMailbox) -> None:
    """nack(delay=s) charges like one without a delay, and counts as delayed."""
    message = await h.delivery(box)
    async with h.ending(h.short):
        await message.nack(delay=h.short)
        await h.counts(box, delayed=1)
    message = await h.one(box, wait=h.patience, counts=(2, 2))
    await message.nack(delay=h.short, charge=False)
    await h.pass_time(h.short)
    await h.one(box, wait=h.patience, counts=(3, 2))


@on_mailbox()
async def attempts_add_up_over_every_kind_of_return(h: Harness, box: AnyMailbox) -> None:
    """nack and expiry charge, release and an uncharged nack do not, in whatever order they come."""
    await (await h.delivery(box)).release()
    await (await h.one(box)).nack()
    await h.lapsed(box)
    await (await h.one(box, wait=h.patience)).nack(charge=False)
    await (await h.one(box)).release()
    await h.one(box, counts=(6, 3))


@on_mailbox()
async def a_return_ends_the_old_lease(h: Harness, box: AnyMailbox) -> None:
    """A message given back and received again has a lease of its own: the end of the first one changes nothing."""
    lease = h.ample(1.0)
    await box.send("x")
    async with h.ending(lease):
        await (await h.one(box, lease=lease)).nack()
        again = await h.one(box, lease=600)
    await h.none(box, "the second lease still runs")
    await again.acknowledge()
    await h.counts(box, settled=1)


@on_mailbox()
async def a_purge_drops_what_is_not_dead(h: Harness, box: AnyMailbox) -> None:
    """purge() drops what is delayed, pending and in flight and returns how many; dead letters stay; it all adds up."""
    await box.send_many(["dead", "held", "pending"])
    dead, held = await box.receive(max_messages=2)
    await dead.dead_letter("no")
    if h.capabilities.delay:
        await box.send("later", delay=3_600)
    dropped = 2 + int(h.capabilities.delay)
    equal(await box.purge(), dropped, "purged messages")
    await h.counts(box, settled=dropped, dead=1)
    await h.none(box, "everything was purged")
    check(not held.is_settled, "a purge settled a delivery that was held")
    equal(await box.purge(), 0, "messages of a second purge")
    equal((await h.delivery(box, "new")).body, "new", "what was sent after the purge")


@on_mailbox("cancel")
async def a_pending_message_can_be_cancelled(h: Harness, box: AnyMailbox) -> None:
    """cancel() of a pending message removes it; its neighbours keep their order, and it counts as settled."""
    sent = await box.send_many(["a", "b", "c"])
    equal(await box.cancel(sent[1]), CancelOutcome.REMOVED, "outcome")
    await h.counts(box, pending=2, settled=1)
    equal(texts(await h.all(box)), ["a", "c"], "what is left")


def _cancelled(name: str, claim: str, send: Callable[[Harness, AnyMailbox], Awaitable[str]], need: str) -> Behaviour:
    async def run(h: Harness, box: AnyMailbox) -> None:
        async with h.ending(h.short):
            equal(await box.cancel(await send(h, box)), CancelOutcome.REMOVED, "outcome")
        await h.counts(box, settled=1)
        await h.none(box, "it was cancelled")
        equal(await box.dead_letters(), [], "dead letters")

    return from_row(name, claim, run, "cancel", need)


CANCELLED = [
    _cancelled("a_delayed_message_can_be_cancelled",
               "cancel() of a delayed message removes it: it does not come when its delay is over.",
               lambda h, box: box.send("x", delay=h.short), "delay"),
    _cancelled("a_cancelled_message_does_not_expire",
               "A message with an expires_in that was cancelled does not become a dead letter when that is over.",
               lambda h, box: box.send("x", expires_in=h.short), "expiry"),
]  # fmt: skip
"""Messages whose delay or life ends after they were cancelled."""


@on_mailbox("cancel")
async def a_returned_message_can_be_cancelled(h: Harness, box: AnyMailbox) -> None:
    """A message that came back, at once, with a delay, or as a replayed dead letter, can be cancelled like any other."""
    sent = await box.send_many(["now", "later", "replayed", "kept"])
    now, later, replayed, kept = await h.all(box)
    await kept.nack()
    await now.nack()
    await later.nack(delay=600)
    await replayed.dead_letter("why")
    await box.replay_dead_letters()
    for message_id, what in zip(sent[:3], ("pending", "delayed", "replayed"), strict=True):
        equal(await box.cancel(message_id), CancelOutcome.REMOVED, f"outcome of the {what} one")
    await h.counts(box, pending=1, settled=3)
    equal((await h.one(box)).body, "kept", "what is left")


@on_mailbox("cancel")
async def a_message_in_flight_can_be_cancelled(h: Harness, box: AnyMailbox) -> None:
    """cancel() of a message in flight revokes its lease: its holder is refused, and it never comes again."""
    sent = await box.send("x")
    with h.within(h.short):
        message = await h.one(box, lease=h.short)
        equal(await box.cancel(sent), CancelOutcome.CANCELLED, "outcome")
    await h.counts(box, settled=1)
    for operation in OPERATIONS:
        if not operation.needs:
            with raises(ReceiptHandleExpiredError, f"{operation.name} of a cancelled message"):
                await operation.call(message)
    await h.pass_time(h.short)
    await h.none(box, "it was cancelled")
    await h.counts(box, settled=1)


@on_mailbox("cancel")
async def a_cancellation_is_announced(h: Harness, box: AnyMailbox) -> None:
    """A listener of the mailbox object that cancels gets the id of the cancelled message at once."""
    sent = await box.send("x")
    await h.one(box)
    heard: list[str] = []
    told = anyio.Event()

    def hear(message_ids: list[str]) -> None:
        heard.extend(message_ids)
        told.set()

    stop = box.backend.notifications.cancelled.subscribe(hear)
    with h.at_once("the announcement"):
        await box.cancel(sent)
        with anyio.move_on_after(h.wait):
            await told.wait()
    stop()
    equal(heard, [sent], "ids heard")
    sent = await box.send("y")
    await h.one(box)
    await box.cancel(sent)
    equal(len(heard), 1, "ids heard after the listener was taken away")


@on_mailbox("cancel")
async def what_is_over_cannot_be_cancelled(h: Harness, box: AnyMailbox) -> None:
    """A message that is settled or dead, one that was cancelled before, and an id of no message are UNKNOWN, and stay."""
    done, dead, gone = await box.send_many(["done", "dead", "gone"])
    for message in await h.all(box):
        if message.body == "done":
            await message.acknowledge()
        elif message.body == "dead":
            await message.dead_letter("why")
    await box.cancel(gone)
    for message_id in (done, dead, gone, "no-such-id"):
        equal(await box.cancel(message_id), CancelOutcome.UNKNOWN, "outcome")
    await h.counts(box, settled=2, dead=1)


@on_mailbox("cancel")
async def an_id_is_forgotten_when_its_message_is_over(h: Harness, box: AnyMailbox) -> None:
    """After a first cancel(), which may make an index of ids: what ends later is UNKNOWN, what comes back is not."""
    equal(await box.cancel("no-such-id"), CancelOutcome.UNKNOWN, "outcome")
    done, dead, back, replayed = await box.send_many(["done", "dead", "back", "replayed"])
    messages = {message.body: message for message in await h.all(box)}
    await messages["done"].acknowledge()
    await messages["dead"].dead_letter("why")
    await messages["back"].nack()
    await messages["replayed"].dead_letter("why")
    for message_id in (done, dead, replayed):
        equal(await box.cancel(message_id), CancelOutcome.UNKNOWN, "outcome for a message that is over")
    await h.counts(box, pending=1, settled=1, dead=2)
    await box.replay_dead_letters([replayed])
    for message_id in (back, replayed):
        equal(await box.cancel(message_id), CancelOutcome.REMOVED, "outcome for a message that came back")
        equal(await box.cancel(message_id), CancelOutcome.UNKNOWN, "outcome of the second call")
    await h.counts(box, settled=3, dead=1)
    purged = await box.send("purged")
    await box.purge()
    equal(await box.cancel(purged), CancelOutcome.UNKNOWN, "outcome after a purge")
    await h.counts(box, settled=4, dead=1)


@on_mailbox("cancel", "expiry")
async def an_expired_message_cannot_be_cancelled(h: Harness, box: AnyMailbox) -> None:
    """A message that expired, pending or given back, is UNKNOWN to cancel() and stays a dead letter."""
    life = h.short + 1.0
    await box.cancel("no-such-id")
    async with h.ending(life):
        sent = [await box.send("x", expires_in=life) for _ in range(2)]
        message = await h.one(box)
    await h.due_counts(box, in_flight=1, dead=1)
    await message.nack()
    for message_id in sent:
        equal(await box.cancel(message_id), CancelOutcome.UNKNOWN, "outcome")
    await h.counts(box, dead=2)


@on_mailbox("cancel", also="others")
async def another_mailboxs_message_is_unknown(h: Harness, box: AnyMailbox, others: AnyMailbox) -> None:
    """A message of another mailbox on the store is UNKNOWN here, and stays there."""
    sent = await others.send("x")
    equal(await box.cancel(sent), CancelOutcome.UNKNOWN, "outcome")
    await h.counts(others, pending=1)


@on_mailbox("cancel", "dedup")
async def a_cancelled_message_frees_its_dedup_key(h: Harness, box: AnyMailbox) -> None:
    """The dedup_key of a cancelled message, pending or in flight, is free for another one."""
    first = await box.send("x", dedup_key="k")
    await box.cancel(first)
    second = await box.send("x", dedup_key="k")
    check(second != first, "the key of a removed message is still taken")
    await h.one(box)
    await box.cancel(second)
    third = await box.send("x", dedup_key="k")
    check(third not in (first, second), "the key of a cancelled message is still taken")
