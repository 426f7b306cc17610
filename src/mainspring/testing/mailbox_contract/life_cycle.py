"""Opening, closing, and what outlasts both."""

from __future__ import annotations

import os
import warnings
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel

from mainspring.errors import ConfigError, MailboxClosedError
from mainspring.testing.mailbox_contract.harness import (
    AnyMailbox,
    Harness,
    behaviour,
    check,
    equal,
    ids,
    on_mailbox,
    raises,
    texts,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence


@behaviour()
async def a_closed_mailbox_refuses_every_call(h: Harness) -> None:
    """After close(), every call on the mailbox and its messages raises MailboxClosedError; a message is not settled."""
    async with h.open() as box:
        message = await h.delivery(box, "held")
    calls: dict[str, Any] = {
        "send": lambda: box.send("late"),
        "send_many": lambda: box.send_many(["late"]),
        "send_many of nothing": lambda: box.send_many([]),
        "receive": box.receive,
        "counts": box.counts,
        "approximate_count": box.approximate_count,
        "purge": box.purge,
        "dead_letters": box.dead_letters,
        "replay_dead_letters": box.replay_dead_letters,
        "purge_dead_letters": box.purge_dead_letters,
        "acknowledge": message.acknowledge,
        "nack": message.nack,
        "release": message.release,
        "extend_visibility": lambda: message.extend_visibility(60),
    }
    for name, call in calls.items():
        with raises(MailboxClosedError, f"{name} on a closed mailbox"):
            await call()
    check(not message.is_settled, "the message counts as settled though nothing was")


@on_mailbox()
async def no_message_is_claimed_once_a_close_has_begun(h: Harness, box: AnyMailbox) -> None:
    """A close begins with stop_claims(): from then on a claim returns nothing, though messages are pending."""
    await box.send("pending")
    box.backend.stop_claims()
    equal(await box.receive(), [], "messages claimed after the close had begun")


@on_mailbox()
async def a_forked_child_is_refused_every_call(h: Harness, box: AnyMailbox) -> None:
    """In a child that is forked while a mailbox is open, each call on it raises ConfigError; the parent's goes on."""
    message = await h.delivery(box, "held")
    calls = (lambda: box.send("late"), box.receive, box.counts, box.purge, box.dead_letters, message.acknowledge)
    equal(_refused_in_a_child(calls), len(calls), "calls refused in the child")
    await message.acknowledge()
    await h.counts(box, settled=1)


def _refused_in_a_child(calls: Sequence[Callable[[], Coroutine[Any, Any, object]]]) -> int:
    """Return how many calls raise ConfigError in a forked child. Each is stepped by hand: an event loop might refuse to run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # from Python 3.12 on, of a fork beside threads
        child = os.fork()
    if child == 0:
        refused = 0
        try:
            refused = sum(_raises_config_error(call()) for call in calls)
        finally:
            os._exit(refused)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _raises_config_error(call: Coroutine[Any, Any, object]) -> bool:
    try:
        call.send(None)
    except ConfigError:
        return True
    except BaseException:
        return False
    return False


@behaviour()
async def close_is_idempotent(h: Harness) -> None:
    """A second close() does nothing, before and after the end of the block."""
    async with h.open() as box:
        await box.close()
        await box.close()
    await box.close()


@on_mailbox()
async def opening_an_open_mailbox_is_a_config_error(h: Harness, box: AnyMailbox) -> None:
    """Entering a mailbox that is open raises ConfigError and leaves it open."""
    with raises(ConfigError, "opening it twice"):
        await box.__aenter__()
    await box.send("still open")


@behaviour()
async def a_closed_mailbox_can_be_opened_again(h: Harness) -> None:
    """The same object can be entered again after it was closed."""
    box = h.unopened()
    async with box:
        await box.send("first life")
    async with box:
        await box.send("second life")
        check("second life" in texts(await h.all(box)), "what was sent after reopening did not come")


@on_mailbox()
async def close_ends_a_waiting_receive_at_once(h: Harness, box: AnyMailbox) -> None:
    """A receive that waits when the mailbox is closed returns [] at once."""
    with h.at_once("ending waiting receives by close()"):
        async with h.waiting(box, 3) as received:
            await box.close()
    equal(received, [[], [], []], "what the waiting receives returned")


@behaviour()
async def an_error_inside_the_block_comes_out_as_it_was(h: Harness) -> None:
    """An exception raised inside `async with mailbox` leaves it unwrapped, with the mailbox closed."""
    box = h.unopened()
    with raises(LookupError, "the block"):
        async with box:
            await box.send("x")
            raise LookupError
    with raises(MailboxClosedError, "a send after the block failed"):
        await box.send("x")


@behaviour("durable")
async def a_durable_mailbox_keeps_what_is_pending(h: Harness) -> None:
    """Messages, their order, priorities, headers, reply_to and counts are there again after a reopening."""
    async with h.open() as box:
        sent = await box.send_many(["a", "b"], headers={"k": "v"}, reply_to=h.named("replies"))
    async with h.open() as box:
        found = await h.all(box)
        equal(ids(found), sent, "ids after reopening")
        equal(texts(found), ["a", "b"], "bodies after reopening")
        equal(dict(found[0].headers), {"k": "v"}, "headers after reopening")
        equal(found[0].reply_to, h.named("replies"), "reply_to after reopening")
        equal((found[0].delivery_count, found[0].attempt), (1, 1), "counts of a first delivery after reopening")


@behaviour("durable")
async def a_durable_mailbox_keeps_every_part(h: Harness) -> None:
    """Delayed, pending, in flight, settled and dead: each message is in the same part after a reopening."""
    async with h.open() as box:
        await box.send_many(["ack", "dead", "held", "pending"])
        acked, dead, _held = await box.receive(max_messages=3, visibility_timeout=3_600)
        await acked.acknowledge()
        await dead.dead_letter("no use")
        if h.capabilities.delay:
            await box.send("later", delay=3_600)
    delayed = int(h.capabilities.delay)
    async with h.open() as box:
        await h.counts(box, delayed=delayed, pending=1, in_flight=1, settled=1, dead=1)
        equal([letter.error for letter in await box.dead_letters()], ["no use"], "dead letters after reopening")
        equal(texts(await h.all(box)), ["pending"], "what can be received after reopening")


@behaviour("durable")
async def a_lease_outlasts_a_close_and_still_ends(h: Harness) -> None:
    """A message in flight at a close stays leased, and comes back, charged, when its lease has run out."""
    lease = h.ample(2.0)
    async with h.open() as box:
        await box.send("held")
        leased = anyio.current_time()
        await h.one(box, lease=lease)
    async with h.open() as box:
        with h.within(lease, leased):
            await h.none(box, "a lease still runs")
        await h.one(box, wait=h.wait, counts=(2, 2))


@behaviour("durable", "checkpoints")
async def a_durable_mailbox_keeps_checkpoints(h: Harness) -> None:
    """A checkpoint is there again after a reopening."""
    async with h.open() as box:
        message = await h.delivery(box)
        await message.save_checkpoint(b'{"page":7}')
        await message.release()
    async with h.open() as box:
        equal((await h.one(box)).checkpoint, b'{"page":7}', "the checkpoint after reopening")


@behaviour("durable")
async def a_receive_that_meets_a_close_leaves_nothing_leased(h: Harness) -> None:
    """A receive that is under way at a close has returned the message, or leaves it pending, not in flight."""
    for steps in range(8):
        name, got = f"close-{steps}", list[Any]()

        async def receive(box: AnyMailbox, got: list[Any]) -> None:
            with suppress(MailboxClosedError):  # it came too late
                got.extend(await box.receive(visibility_timeout=600, wait_time_seconds=h.wait))

        async with h.open(name) as box, anyio.create_task_group() as group:
            await box.send("x")
            group.start_soon(receive, box, got)
            for _ in range(steps):
                await anyio.lowlevel.checkpoint()
            await box.close()
        async with h.open(name) as box:
            await h.counts(box, pending=1 - len(got), in_flight=len(got))


@behaviour("cross_process")
async def two_mailboxes_of_one_name_are_one_queue(h: Harness) -> None:
    """Two mailbox objects with one name share messages: what one sends wakes the other; each message goes to one."""
    async with h.open() as sender, h.open() as receiver:
        with h.at_once("waking a receive of another mailbox object"):
            async with h.waiting(receiver) as received:
                await sender.send("hello")
        equal([texts(found) for found in received], [["hello"]], "what the other object received")
        await h.none(sender, "the other object has leased it")
        await h.counts(sender, in_flight=1)
