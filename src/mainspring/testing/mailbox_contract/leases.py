"""Leases: how long a delivery belongs to its holder; a holder whose lease has ended cannot change the message."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import anyio

from mainspring.core import clock
from mainspring.errors import MessageSettledError, ReceiptHandleExpiredError
from mainspring.testing.mailbox_contract.harness import (
    AnyMailbox,
    Behaviour,
    Harness,
    check,
    equal,
    from_row,
    on_mailbox,
    raises,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from mainspring.mailbox.message import Message


@on_mailbox()
async def a_receipt_handle_is_new_each_delivery(h: Harness, box: AnyMailbox) -> None:
    """Every delivery of a message has a receipt handle of its own."""
    await box.send("x")
    handles = set()
    for number in range(6):
        message = await h.one(box)
        handles.add(message.receipt_handle)
        await (message.nack() if number < 3 else message.release())
    equal(len(handles), 6, "different receipt handles of six deliveries")


@on_mailbox()
async def an_expired_lease_charges_and_delivers_again(h: Harness, box: AnyMailbox) -> None:
    """When its lease runs out, a message is pending again, also without a receive; its next delivery is one more attempt."""
    await box.send("x")
    async with h.ending(h.short):
        await h.one(box, lease=h.short)
        await h.counts(box, in_flight=1)
    await h.due_counts(box, pending=1)
    await h.one(box, lease=h.short, wait=h.patience, counts=(2, 2))
    await h.pass_time(h.short)
    await h.one(box, wait=h.patience, counts=(3, 3))


@on_mailbox("fencing")
async def a_lease_ends_at_its_instant(h: Harness, box: AnyMailbox) -> None:
    """Up to its last moment a lease holds; from the instant of its end on it does not, whether a reaper ran or not."""
    await box.send_many(["in time", "too late"])
    virtual = clock.virtual_clock()
    with h.within(h.short):
        early, late = await box.receive(max_messages=2, visibility_timeout=h.short)
        if virtual is not None:  # jumped, not slept: no other task has run when the calls are made
            virtual.jump(h.short - h.slack - 0.001)
        await early.acknowledge()
    if virtual is not None:
        virtual.jump(0.001 + 2 * h.slack)
    else:
        await h.pass_time(h.short)
    with raises(ReceiptHandleExpiredError, "an acknowledgement at the end of the lease"):
        await late.acknowledge()
    check(not late.is_settled, "a refused acknowledgement settled the message")
    await h.due_counts(box, pending=1, settled=1)


@on_mailbox("fencing")
async def a_lease_of_no_length_is_over_at_once(h: Harness, box: AnyMailbox) -> None:
    """visibility_timeout=0 delivers the message and leaves it available; its holder can settle nothing."""
    glimpse = await h.delivery(box, lease=0)
    with raises(ReceiptHandleExpiredError, "an acknowledgement without a lease"):
        await glimpse.acknowledge()
    message = await h.one(box)
    equal((message.body, message.delivery_count), ("x", 2), "the next delivery")
    await message.acknowledge()


@on_mailbox()
async def extend_lengthens_a_lease_from_now(h: Harness, box: AnyMailbox) -> None:
    """After extend_visibility(s) the lease lasts s seconds from that moment."""
    first = h.ample(2.0)
    await box.send("x")
    with h.within(first):
        message = await h.one(box, lease=first)
        if h.virtual:
            await h.spend(first / 2)
        extended = anyio.current_time()
        await message.extend_visibility(2 * first)
    with h.within(2 * first, extended):
        await h.spend(first + first / 2)
        await h.none(box, "the lease was extended")
        await message.extend_visibility(first)
        await message.acknowledge()
    await h.counts(box, settled=1)


@on_mailbox()
async def extend_never_shortens(h: Harness, box: AnyMailbox) -> None:
    """extend_visibility with less than what is left, also with 0, changes nothing."""
    message = await h.delivery(box, lease=600)
    for timeout in (0, h.short, 0):
        await message.extend_visibility(timeout)
    await h.pass_time(h.short)
    await h.none(box, "a lease of ten minutes cannot have been shortened")
    await h.counts(box, in_flight=1)
    await message.acknowledge()
    await h.counts(box, settled=1)


@on_mailbox()
async def a_lease_can_be_kept_for_ever(h: Harness, box: AnyMailbox) -> None:
    """Extended again and again, a lease lasts; the message is delivered once."""
    lease = h.short if h.virtual else max(h.ample(1.0), 2 * h.short) + 3 * h.backend.lateness
    await box.send("x")
    extended = anyio.current_time()
    message = await h.one(box, lease=lease)
    for _ in range(6):
        with h.within(lease, extended):
            await h.spend(lease / 3)
            extended = anyio.current_time()
            await message.extend_visibility(lease)
    with h.within(lease, extended):
        await h.none(box, "the lease was renewed in time")
        await message.acknowledge()
    await h.counts(box, settled=1)


@on_mailbox()
async def leases_are_each_messages_own(h: Harness, box: AnyMailbox) -> None:
    """The messages of one batch expire, are extended and settled each by itself."""
    lease = h.ample(1.0)
    await box.send_many(["kept", "lost"])
    async with h.ending(lease):
        kept, _lost = await box.receive(max_messages=2, visibility_timeout=lease)
        await kept.extend_visibility(600)
    equal((await h.one(box, wait=h.patience)).body, "lost", "what came back")
    await kept.acknowledge()
    await h.counts(box, in_flight=1, settled=1)


@on_mailbox("checkpoints")
async def a_checkpoint_survives_every_return(h: Harness, box: AnyMailbox) -> None:
    """A checkpoint comes with the next delivery after a nack, a release and an expiry; the last one written counts."""
    message = await h.delivery(box)
    equal(message.checkpoint, None, "the checkpoint of a first delivery")
    await message.save_checkpoint(b"1")
    await message.save_checkpoint(b'{"step":2}')
    equal(message.checkpoint, b'{"step":2}', "the checkpoint where it was saved")
    await message.nack()
    message = await h.one(box)
    equal(message.checkpoint, b'{"step":2}', "the checkpoint after a nack")
    await message.release()
    equal((await h.lapsed(box)).checkpoint, b'{"step":2}', "the checkpoint after a release")
    message = await h.one(box, wait=h.patience)
    equal(message.checkpoint, b'{"step":2}', "the checkpoint after an expiry")
    await message.save_checkpoint(b"3")
    await message.nack()
    equal((await h.one(box)).checkpoint, b"3", "a checkpoint of the third delivery")


@dataclass(frozen=True)
class HolderOperation:
    """An operation that only the holder of a lease may do."""

    name: str
    call: Callable[[Message[Any, Any]], Awaitable[None]]
    needs: tuple[str, ...] = ()


OPERATIONS = (
    HolderOperation("acknowledge", lambda message: message.acknowledge()),
    HolderOperation("nack", lambda message: message.nack()),
    HolderOperation("delayed_nack", lambda message: message.nack(delay=3_600)),
    HolderOperation("release", lambda message: message.release()),
    HolderOperation("dead_letter", lambda message: message.dead_letter("no")),
    HolderOperation("reply", lambda message: message.reply("result"), needs=("transactional_reply",)),
    HolderOperation("extend_visibility", lambda message: message.extend_visibility(600)),
    HolderOperation("save_checkpoint", lambda message: message.save_checkpoint(b'"x"'), needs=("checkpoints",)),
)


def _after_expiry(operation: HolderOperation, *, redelivered: bool) -> Behaviour:
    async def run(h: Harness, box: AnyMailbox, replies: AnyMailbox) -> None:
        await box.send("x", reply_to=replies.name)
        stale = await h.lapsed(box)
        holder = await h.one(box, wait=h.patience) if redelivered else None
        with raises(ReceiptHandleExpiredError, f"{operation.name} after the lease ran out"):
            await operation.call(stale)
        check(not stale.is_settled, "the refused call counts as a settlement")
        await h.counts(replies)
        if holder is None:
            await h.due_counts(box, pending=1)
        else:
            await h.counts(box, in_flight=1)
            await holder.release()
        message = await h.one(box, wait=h.patience)
        equal((message.delivery_count, message.checkpoint), (2 + redelivered, None), "delivery_count and checkpoint")

    name = f"{operation.name}_after_{'a_redelivery' if redelivered else 'the_expiry'}_is_refused"
    claim = (
        f"{operation.name} by a former holder raises ReceiptHandleExpiredError, and the new holder keeps the message."
        if redelivered
        else f"{operation.name} after the lease ran out raises ReceiptHandleExpiredError and has no effect."
    )
    return from_row(name, claim, run, *operation.needs, "fencing", also="replies")


def _after_settlement(operation: HolderOperation) -> Behaviour:
    async def run(h: Harness, box: AnyMailbox, replies: AnyMailbox) -> None:
        await box.send_many(["acknowledged", "nacked"], reply_to=replies.name)
        first, second = await h.all(box)
        await first.acknowledge()
        await second.nack()
        for message in (first, second):
            with raises(MessageSettledError, f"{operation.name} after the {message.body} settlement"):
                await operation.call(message)
        await h.counts(box, pending=1, settled=1)
        await h.counts(replies)

    name = f"{operation.name}_after_a_settlement_is_refused"
    claim = f"{operation.name} on a delivery that was settled raises MessageSettledError and has no effect."
    return from_row(name, claim, run, *operation.needs, also="replies")


STALE = [
    *(_after_expiry(one, redelivered=redelivered) for one in OPERATIONS for redelivered in (False, True)),
    *map(_after_settlement, OPERATIONS),
]
"""A behaviour for each operation and each way to lose a lease."""


@on_mailbox("fencing")
async def after_a_purge_every_holder_is_refused(h: Harness, box: AnyMailbox) -> None:
    """A purge takes the messages in flight too: what their holders then do raises ReceiptHandleExpiredError."""
    operations = [op for op in OPERATIONS if not op.needs]
    await box.send_many(op.name for op in operations)
    held = await h.all(box)
    equal(await box.purge(), len(operations), "purged messages")
    for operation, message in zip(operations, held, strict=True):
        with raises(ReceiptHandleExpiredError, f"{operation.name} after a purge"):
            await operation.call(message)
    await h.counts(box, settled=len(operations))


@on_mailbox("fencing")
async def a_refused_holder_can_be_refused_again(h: Harness, box: AnyMailbox) -> None:
    """A call that was refused does not settle the delivery: the next one is refused for the same reason."""
    await box.send("x")
    stale = await h.lapsed(box)
    for _ in range(2):
        with raises(ReceiptHandleExpiredError, "a stale acknowledgement"):
            await stale.acknowledge()
