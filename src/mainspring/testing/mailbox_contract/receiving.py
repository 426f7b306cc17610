"""Receiving: which messages come, in which order, what wakes a waiting receive, and what a cancelled one leaves."""

from __future__ import annotations

import math
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import anyio
import anyio.lowlevel

from mainspring.testing.mailbox_contract.harness import (
    AnyMailbox,
    Behaviour,
    Harness,
    behaviour,
    check,
    equal,
    from_row,
    ids,
    on_mailbox,
    texts,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from mainspring.mailbox.message import Message

    Hide: TypeAlias = Callable[[Harness, AnyMailbox], Awaitable[object]]
    Cause: TypeAlias = Callable[[Harness, AnyMailbox, Message[Any, Any]], Awaitable[object]]


@on_mailbox()
async def an_empty_mailbox_gives_nothing_at_once(h: Harness, box: AnyMailbox) -> None:
    """Without a wait, receive on an empty mailbox returns [] at once."""
    with h.at_once("an empty receive"):
        equal(await box.receive(), [], "received")
        equal(await box.receive(max_messages=1_000), [], "received")


@on_mailbox()
async def receive_never_waits_to_fill_the_batch(h: Harness, box: AnyMailbox) -> None:
    """With fewer messages than max_messages, receive returns those at once, however long it may wait."""
    await box.send_many(["a", "b", "c"])
    with h.at_once("a receive of what is there"):
        found = await box.receive(max_messages=10, wait_time_seconds=h.wait)
    equal(texts(found), ["a", "b", "c"], "received")


@on_mailbox()
async def receive_takes_all_that_is_available(h: Harness, box: AnyMailbox) -> None:
    """One receive returns everything available up to max_messages, not only the first."""
    await box.send_many(range(1_000))
    equal(len(await box.receive(max_messages=1_000)), 1_000, "messages received of a thousand")


@on_mailbox()
async def receive_returns_at_most_max_messages(h: Harness, box: AnyMailbox) -> None:
    """Never more than max_messages, which is 1 by default; the rest stays pending."""
    await box.send_many(range(7))
    equal(len(await box.receive()), 1, "messages by default")
    equal(len(await box.receive(max_messages=3)), 3, "messages with max_messages=3")
    await h.counts(box, pending=3, in_flight=4)


def _hides(name: str, claim: str, hide: Hide, *needs: str, **counts: int) -> Behaviour:
    async def run(h: Harness, box: AnyMailbox) -> None:
        await hide(h, box)
        await h.none(box, "it is hidden")
        equal(await box.receive(wait_time_seconds=h.short), [], "what a short poll got")
        await h.counts(box, **counts)

    return from_row(name, claim, run, *needs)


async def _nack_for_an_hour(h: Harness, box: AnyMailbox) -> None:
    await (await h.delivery(box)).nack(delay=3_600)


HIDDEN = [
    _hides("a_leased_message_is_hidden_from_others", "A message in flight cannot be received again while its lease runs.",
           lambda h, box: h.delivery(box), in_flight=1),
    _hides("a_long_delay_hides", "A message with a long delay does not come, not even where nothing else is there.",
           lambda h, box: box.send("later", delay=3_600), "delay", delayed=1),
    _hides("a_nacks_delay_hides_the_message", "During the delay of a nack the message cannot be received.",
           _nack_for_an_hour, "delay", delayed=1),
]  # fmt: skip
"""Operations after which no message is available."""


@behaviour()
async def concurrent_receivers_get_each_message_once(h: Harness) -> None:
    """Many receivers at once: every message goes to exactly one of them."""
    total = 200
    got: list[int] = []
    done = anyio.Event()

    async def work(box: AnyMailbox) -> None:
        while messages := await box.receive(max_messages=3, visibility_timeout=600, wait_time_seconds=h.wait):
            for message in messages:
                got.append(message.body)
                await message.acknowledge()
            if len(got) >= total:
                done.set()

    async with h.open() as box, anyio.create_task_group() as group:
        for _ in range(10):
            group.start_soon(work, box)
        for start in range(0, total, 50):
            await box.send_many(range(start, start + 50))
        await done.wait()
        await anyio.lowlevel.checkpoint()  # a message given out twice would come now
        group.cancel_scope.cancel()
    equal(sorted(got), list(range(total)), "the bodies received")


@on_mailbox()
async def a_cancelled_wait_has_claimed_nothing(h: Harness, box: AnyMailbox) -> None:
    """A receive cancelled while it waits leaves nothing leased: the next message is a first delivery to the next caller."""
    with anyio.move_on_after(h.short) as scope:
        await box.receive(wait_time_seconds=h.wait)
    check(scope.cancelled_caught, "the cancelled receive returned")
    await box.send("x")
    await h.counts(box, pending=1)
    await h.one(box, counts=(1, 1))


@on_mailbox()
async def a_receive_cancelled_beforehand_claims_nothing(h: Harness, box: AnyMailbox) -> None:
    """A receive that is called in a cancelled scope returns nothing it does not also lease, and loses nothing."""
    await box.send("x")
    got: list[Any] = []
    with anyio.CancelScope() as scope:
        scope.cancel()
        got.extend(await box.receive())
    await h.counts(box, pending=1 - len(got), in_flight=len(got))


async def _receive(h: Harness, box: AnyMailbox, got: list[Any], scope: anyio.CancelScope) -> None:
    """Receive a message in ``scope``, which may be cancelled."""
    with scope:
        got.extend(await box.receive(visibility_timeout=600, wait_time_seconds=h.wait))


async def _cancel_after(steps: int, scope: anyio.CancelScope) -> None:
    """Let the other tasks run ``steps`` times before cancelling ``scope``."""
    for _ in range(steps):
        await anyio.lowlevel.checkpoint()
    scope.cancel()


@behaviour()
async def a_cancellation_that_meets_a_send_loses_nothing(h: Harness) -> None:
    """A receive cancelled at any moment around a send has either returned the message or not claimed it."""
    for steps in range(25):
        got: list[Any] = []
        scope = anyio.CancelScope()
        async with h.open(f"race-{steps}") as box:
            async with anyio.create_task_group() as group:
                group.start_soon(_receive, h, box, got, scope)
                await h.rest()
                group.start_soon(box.send, "x")
                await _cancel_after(steps, scope)
            await h.counts(box, pending=1 - len(got), in_flight=len(got))
            if not got:
                await h.one(box, counts=(1, 1))


@behaviour("expiry")
async def a_cancelled_receive_leaves_the_expiry(h: Harness) -> None:
    """A receive cancelled at any moment has claimed the message, or leaves it to expire in its time."""
    async with AsyncExitStack() as boxes:
        ends: list[tuple[AnyMailbox, list[Any]]] = []
        for steps in range(16):
            got: list[Any] = []
            scope = anyio.CancelScope()
            box = await boxes.enter_async_context(h.open(f"race-{steps}"))
            send = partial(box.send, "x", expires_in=h.short)
            async with anyio.create_task_group() as group:
                if steps % 2:
                    await send()  # so that a claim is out when the cancellation comes
                group.start_soon(_receive, h, box, got, scope)
                if not steps % 2:
                    await h.rest()
                    group.start_soon(send)
                await _cancel_after(steps, scope)
            ends.append((box, got))
        await h.pass_time(h.short)
        for box, got in ends:
            await h.due_counts(box, in_flight=len(got), dead=1 - len(got))


@behaviour()
async def a_cancelled_waiter_does_not_swallow_the_wake_up(h: Harness) -> None:
    """Of two waiting receives one is cancelled as a message comes: the other has the message at once."""
    for steps in range(6):
        async with h.open(f"wake-{steps}") as box:
            with h.at_once("receiving past a cancelled receiver"):
                received = await _receive_past_a_cancelled_one(h, box, steps)
            equal(received, ["x"], f"messages received, cancelled after {steps} steps")


async def _receive_past_a_cancelled_one(h: Harness, box: AnyMailbox, steps: int) -> list[Any]:
    """Cancel the first of two waiting receives, ``steps`` steps after a send. Return the bodies received."""
    got: list[Any] = []
    came = anyio.Event()
    first, second = scopes = anyio.CancelScope(), anyio.CancelScope()

    async def wait(scope: anyio.CancelScope) -> None:
        await _receive(h, box, got, scope)
        if got:
            came.set()

    async with anyio.create_task_group() as group:
        for scope in scopes:
            group.start_soon(wait, scope)
            await h.rest()
        await box.send("x")
        await _cancel_after(steps, first)
        await came.wait()
        second.cancel()
    return texts(got)


@on_mailbox()
async def the_same_message_has_the_same_id_and_times(h: Harness, box: AnyMailbox) -> None:
    """Later deliveries have the id, enqueued_at and first_received_at of the first."""
    first = await h.delivery(box)
    await first.nack()
    await h.pass_time(h.short)
    second = await h.one(box)
    equal(ids([second]), ids([first]), "the id")
    equal(second.enqueued_at, first.enqueued_at, "enqueued_at")
    equal(second.first_received_at, first.first_received_at, "first_received_at")


@on_mailbox()
async def a_wait_ends_in_time(h: Harness, box: AnyMailbox) -> None:
    """With nothing to receive, a long poll returns [] after wait_time_seconds."""
    with h.takes(h.short, "a poll of an empty mailbox"):
        equal(await box.receive(wait_time_seconds=h.short), [], "received")


@on_mailbox()
async def an_expired_lease_wakes_a_waiting_receive(h: Harness, box: AnyMailbox) -> None:
    """A waiting receive has a message at the instant its lease runs out."""
    await box.send("x")
    with h.takes(h.short, "waiting for a lease to run out"):
        await h.one(box, lease=h.short)
        message = await h.one(box, wait=h.wait * 10)
    equal((message.delivery_count, message.attempt), (2, 2), "delivery_count and attempt")


@on_mailbox()
async def an_extended_lease_wakes_at_its_new_end(h: Harness, box: AnyMailbox) -> None:
    """A waiting receive is not given a message whose lease was extended, until the new end."""
    held = await h.delivery(box, lease=600 if not h.virtual else h.short)
    if h.virtual:
        await held.extend_visibility(3 * h.short)
        with h.takes(3 * h.short, "waiting for an extended lease"):
            await h.one(box, wait=h.wait * 10)
    else:
        await held.extend_visibility(h.short)
        equal(await box.receive(wait_time_seconds=2 * h.short), [], "received during the lease")


async def _replay(h: Harness, box: AnyMailbox, held: Message[Any, Any]) -> None:
    await held.dead_letter("no")
    await box.replay_dead_letters()


async def _send_two_delayed(h: Harness, box: AnyMailbox, held: Message[Any, Any]) -> None:
    await box.send("much later", delay=3_600)
    await h.rest()
    await box.send("x", delay=h.short)


async def _send_five(h: Harness, box: AnyMailbox) -> None:
    for number in range(5):
        await box.send(number)


def _wakes(
    name: str,
    claim: str,
    cause: Cause,
    counts: tuple[int, int],
    *needs: str,
    delayed: bool = False,
    wait: float = 10 * Harness.wait,
) -> Behaviour:
    async def run(h: Harness, box: AnyMailbox) -> None:
        held = await h.delivery(box)
        async with h.waiting(box, seconds=wait) as received:
            await anyio.sleep(h.short / 4)
            check(not received, "the waiting receive returned before there was a message")
            began = anyio.current_time()
            await cause(h, box, held)
        h.check_duration(anyio.current_time() - began, h.short if delayed else 0.0, "waking")
        ((message,),) = received
        equal((message.body, message.delivery_count, message.attempt), ("x", *counts), "body and counts")

    return from_row(name, claim, run, *needs)


def _wakes_five(name: str, claim: str, send: Callable[[Harness, AnyMailbox], Awaitable[object]]) -> Behaviour:
    async def run(h: Harness, box: AnyMailbox) -> None:
        with h.at_once("waking five receives"):
            async with h.waiting(box, 5) as received:
                await send(h, box)
        equal(sorted(texts(found) for found in received), [[number] for number in range(5)], "the bodies received")

    return from_row(name, claim, run)


WAKES = [
    _wakes("send_wakes_a_waiting_receive", "A send wakes a waiting receive at once.",
           lambda h, box, held: box.send("x"), (1, 1)),
    _wakes("nack_wakes_a_waiting_receive", "A nack without a delay wakes a waiting receive at once.",
           lambda h, box, held: held.nack(), (2, 2)),
    _wakes("release_wakes_a_waiting_receive", "A release wakes a waiting receive at once.",
           lambda h, box, held: held.release(), (2, 1)),
    _wakes("a_replay_wakes_a_waiting_receive", "Replayed dead letters wake a waiting receive at once.",
           _replay, (1, 1)),
    _wakes("the_end_of_a_delay_wakes_a_waiting_receive",
           "A waiting receive has a delayed message at the instant its delay ends.",
           lambda h, box, held: box.send("x", delay=h.short), (1, 1), "delay", delayed=True),
    _wakes("the_end_of_a_nacks_delay_wakes_a_waiting_receive",
           "A waiting receive has a message at the instant the delay of its nack ends.",
           lambda h, box, held: held.nack(delay=h.short), (2, 2), delayed=True),
    _wakes("a_shorter_delay_wakes_sooner", "A delay that ends before the one a receive waits for is not slept through.",
           _send_two_delayed, (1, 1), "delay", delayed=True),
    _wakes("an_endless_wait_is_woken_too", "wait_time_seconds may be infinite; a send ends the wait.",
           lambda h, box, held: box.send("x"), (1, 1), wait=math.inf),
    _wakes_five("send_many_wakes_as_many_receivers",
                "Five messages sent together wake five waiting receives at once, one message each.",
                lambda h, box: box.send_many(range(5))),
    _wakes_five("each_send_wakes_another_receiver",
                "Five sends one after the other wake five waiting receives: none is spent on a receive that has been woken.",
                _send_five),
]  # fmt: skip
"""What makes a message available while a receive waits, beside the delivery ``held``; and the counts it then has."""


@behaviour()
async def the_statistics_count_the_receives_that_wait(h: Harness) -> None:
    """statistics() counts the waiting receives of this mailbox object, and none once they have ended, in whatever way."""
    async with h.open() as box, h.open() as other, anyio.create_task_group() as group:
        check(box.statistics().connected, "an open mailbox is not connected")
        scopes = [anyio.CancelScope(), anyio.CancelScope(), anyio.CancelScope()]

        async def wait(scope: anyio.CancelScope) -> None:
            with scope:
                await box.receive(visibility_timeout=600, wait_time_seconds=h.wait * 10)

        async def expect(waiting: int) -> None:
            async def holds() -> bool:
                return box.statistics().waiting_receives == waiting

            await h.until(holds, f"{waiting} receives wait: {box!r}")

        await expect(0)
        for number, scope in enumerate(scopes, 1):
            group.start_soon(wait, scope)
            await expect(number)
        equal(other.statistics().waiting_receives, 0, "waiting receives of another object")
        scopes[0].cancel()
        await expect(2)
        await box.send("x")
        await expect(1)
        group.cancel_scope.cancel()
    equal(box.statistics().waiting_receives, 0, "waiting receives of a closed mailbox")


@on_mailbox()
async def settling_wakes_nobody(h: Harness, box: AnyMailbox) -> None:
    """Acknowledging, dead-lettering or purging gives a waiting receive nothing."""
    await box.send_many(["ack", "dead", "purged"])
    acked, dead, _purged = await h.all(box)
    async with h.waiting(box, seconds=h.short) as received:
        await acked.acknowledge()
        await dead.dead_letter("no")
        await box.purge()
    equal(received, [[]], "what the waiting receive returned")


@on_mailbox()
async def first_in_first_out(h: Harness, box: AnyMailbox) -> None:
    """First deliveries come in the order of sending, over send and send_many alike, whose ids are in that order as well."""
    sent = [await box.send(number) for number in range(5)]
    sent += await box.send_many(number for number in range(5, 55))
    sent.append(await box.send(55))
    found = [await h.one(box) for _ in range(4)] + await h.all(box)
    equal(texts(found), list(range(56)), "the order")
    equal(ids(found), sent, "ids")


@on_mailbox("priority")
async def a_higher_priority_comes_first(h: Harness, box: AnyMailbox) -> None:
    """Higher priorities come first, equal ones first in first out, negative ones last; one by one, and in one batch."""
    await box.send("normal 1")
    await box.send("low", priority=-5)
    await box.send_many(["high 1", "high 2"], priority=5)
    await box.send("normal 2")
    await box.send("highest", priority=6)
    expected = ["highest", "high 1", "high 2", "normal 1", "normal 2", "low"]
    singles = [(await h.one(box)).body for _ in range(2)]
    equal(singles + texts(await h.all(box)), expected, "the order")


@on_mailbox()
async def a_nacks_delay_ends_at_the_tail(h: Harness, box: AnyMailbox) -> None:
    """After nack(delay=s) a message is invisible for s seconds, then behind those that wait."""
    await box.send_many(["a", "b"])
    first = await h.one(box)
    async with h.ending(h.short):
        await first.nack(delay=h.short)
        await h.counts(box, delayed=1, pending=1)
    await h.due_counts(box, pending=2)
    equal(texts(await h.all(box)), ["b", "a"], "the order after the delay")


@on_mailbox()
async def an_expired_message_goes_to_the_tail(h: Harness, box: AnyMailbox) -> None:
    """A message whose lease ran out comes after those that were waiting."""
    await box.send_many(["a", "b", "c"])
    await h.lapsed(box)
    equal(texts(await h.all(box, due=3)), ["b", "c", "a"], "the order after an expiry")


@on_mailbox("front_return")
async def a_released_batch_goes_before_all_that_wait(h: Harness, box: AnyMailbox) -> None:
    """All messages of a batch, released, come before those that were not received."""
    await box.send_many(range(6))
    for message in reversed(await box.receive(max_messages=3)):
        await message.release()
    equal(texts(await h.all(box)), list(range(6)), "the order after releasing a batch from its end")


@on_mailbox("front_return")
async def a_release_goes_before_a_nacked_one(h: Harness, box: AnyMailbox) -> None:
    """A release comes before what was nacked earlier, and before what was sent later."""
    await box.send_many(["a", "b"])
    nacked, released = await h.all(box)
    await nacked.nack()
    await box.send("c")
    await released.release()
    equal(texts(await h.all(box)), ["b", "a", "c"], "the order")
