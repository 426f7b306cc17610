"""Fencing: a holder whose lease is gone can do nothing to the message. Each operation, each way of losing the lease."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mainspring.errors import MessageSettledError, ReceiptHandleExpiredError
from mainspring.testing.mailbox_contract.harness import Behaviour, Harness, behaviour, check, equal, raises

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from mainspring.mailbox.message import Message


@dataclass(frozen=True)
class Operation:
    """One thing that only the holder of a lease may do."""

    name: str
    call: Callable[[Message[Any, Any]], Awaitable[None]]
    settles: bool = True
    needs: frozenset[str] = frozenset()


OPERATIONS = (
    Operation("acknowledge", lambda message: message.acknowledge()),
    Operation("nack", lambda message: message.nack()),
    Operation("delayed_nack", lambda message: message.nack(delay=3_600)),
    Operation("release", lambda message: message.release()),
    Operation("dead_letter", lambda message: message.dead_letter("no")),
    Operation("reply", lambda message: message.reply("result"), needs=frozenset({"transactional_reply"})),
    Operation("extend_visibility", lambda message: message.extend_visibility(600), settles=False),
    Operation(
        "save_checkpoint",
        lambda message: message.save_checkpoint(b'"stolen"'),
        settles=False,
        needs=frozenset({"checkpoints"}),
    ),
)


def generated() -> list[Behaviour]:
    """A behaviour for each operation and each way in which a lease is lost or has ended."""
    made = []
    for operation in OPERATIONS:
        made.append(_after_expiry(operation))
        made.append(_after_redelivery(operation))
        made.append(_after_settlement(operation))
    return made


def _after_expiry(operation: Operation) -> Behaviour:
    async def run(h: Harness) -> None:
        async with h.open() as box, h.open("replies") as replies:
            await box.send("x", reply_to=replies.name)
            stale = await h.one(box, lease=h.short)
            await h.pass_time(h.short)
            with raises(ReceiptHandleExpiredError, f"{operation.name} after the lease ran out"):
                await operation.call(stale)
            check(not stale.is_settled, "the refused call counts as a settlement")
            await h.due_counts(box, pending=1)
            await h.counts(replies)
            message = await h.one(box, wait=h.patience)
            equal((message.delivery_count, message.checkpoint), (2, None), "delivery_count and checkpoint")

    return Behaviour(
        f"{operation.name}_after_the_expiry_is_refused",
        f"{operation.name} after the lease ran out raises ReceiptHandleExpiredError and has no effect.",
        operation.needs | {"fencing"},
        run,
    )


def _after_redelivery(operation: Operation) -> Behaviour:
    async def run(h: Harness) -> None:
        async with h.open() as box, h.open("replies") as replies:
            await box.send("x", reply_to=replies.name)
            stale = await h.one(box, lease=h.short)
            await h.pass_time(h.short)
            holder = await h.one(box, lease=600, wait=h.patience)
            with raises(ReceiptHandleExpiredError, f"{operation.name} with another delivery under way"):
                await operation.call(stale)
            await h.counts(box, in_flight=1)
            await h.counts(replies)
            await holder.release()
            equal((await h.one(box)).checkpoint, None, "the checkpoint")

    return Behaviour(
        f"{operation.name}_after_a_redelivery_is_refused",
        f"{operation.name} by a former holder raises ReceiptHandleExpiredError, and the new holder keeps the message.",
        operation.needs | {"fencing"},
        run,
    )


def _after_settlement(operation: Operation) -> Behaviour:
    async def run(h: Harness) -> None:
        async with h.open() as box, h.open("replies") as replies:
            await box.send_many(["acknowledged", "nacked"], reply_to=replies.name)
            first, second = await h.all(box)
            await first.acknowledge()
            await second.nack()
            for message in (first, second):
                with raises(MessageSettledError, f"{operation.name} after the {message.body} settlement"):
                    await operation.call(message)
            await h.counts(box, pending=1, settled=1)
            await h.counts(replies)

    return Behaviour(
        f"{operation.name}_after_a_settlement_is_refused",
        f"{operation.name} on a delivery that was settled raises MessageSettledError and has no effect.",
        operation.needs,
        run,
    )


@behaviour("fencing")
async def after_a_purge_every_holder_is_refused(h: Harness) -> None:
    """A purge takes the messages in flight too: what their holders then do raises ReceiptHandleExpiredError."""
    async with h.open() as box:
        operations = [op for op in OPERATIONS if not op.needs]
        await box.send_many(op.name for op in operations)
        held = await h.all(box)
        equal(await box.purge(), len(operations), "purged messages")
        for operation, message in zip(operations, held, strict=True):
            with raises(ReceiptHandleExpiredError, f"{operation.name} after a purge"):
                await operation.call(message)
        await h.counts(box, settled=len(operations))


@behaviour("fencing")
async def a_refused_holder_can_be_refused_again(h: Harness) -> None:
    """A call that was refused does not settle the delivery: the next one is refused for the same reason."""
    async with h.open() as box:
        await box.send("x")
        stale = await h.one(box, lease=h.short)
        await h.pass_time(h.short)
        for _ in range(2):
            with raises(ReceiptHandleExpiredError, "a stale acknowledgement"):
                await stale.acknowledge()
