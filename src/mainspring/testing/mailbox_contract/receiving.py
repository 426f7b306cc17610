"""What receive gives: what is available, at once, each message to one receiver; and what a cancelled one leaves."""

from __future__ import annotations

from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel

from mainspring.testing.mailbox_contract.harness import Harness, behaviour, check, equal, ids, texts

if TYPE_CHECKING:
    from mainspring.mailbox.mailbox import Mailbox


@behaviour()
async def an_empty_mailbox_gives_nothing_at_once(h: Harness) -> None:
    """Without a wait, receive on an empty mailbox returns [] at once."""
    async with h.open() as box:
        with h.at_once("an empty receive"):
            equal(await box.receive(), [], "received")
            equal(await box.receive(max_messages=1_000), [], "received")


@behaviour()
async def receive_never_waits_to_fill_the_batch(h: Harness) -> None:
    """With fewer messages than max_messages, receive returns those at once, however long it may wait."""
    async with h.open() as box:
        await box.send_many(["a", "b", "c"])
        with h.at_once("a receive of what is there"):
            found = await box.receive(max_messages=10, wait_time_seconds=h.wait)
        equal(texts(found), ["a", "b", "c"], "received")


@behaviour()
async def receive_takes_all_that_is_available(h: Harness) -> None:
    """One receive returns everything available up to max_messages, not only the first."""
    async with h.open() as box:
        await box.send_many(range(1_000))
        equal(len(await box.receive(max_messages=1_000)), 1_000, "messages received of a thousand")


@behaviour()
async def receive_returns_at_most_max_messages(h: Harness) -> None:
    """Never more than max_messages, which is 1 by default; the rest stays pending."""
    async with h.open() as box:
        await box.send_many(range(7))
        equal(len(await box.receive()), 1, "messages by default")
        equal(len(await box.receive(max_messages=3)), 3, "messages with max_messages=3")
        await h.counts(box, pending=3, in_flight=4)


@behaviour()
async def a_leased_message_is_hidden_from_others(h: Harness) -> None:
    """A message in flight is received by nobody else while its lease runs."""
    async with h.open() as box:
        await box.send("x")
        await h.one(box)
        await h.none(box, "its only message is leased")
        equal(await box.receive(wait_time_seconds=h.short), [], "what a short poll got")
        await h.counts(box, in_flight=1)


@behaviour()
async def concurrent_receivers_get_each_message_once(h: Harness) -> None:
    """Many receivers at once: every message goes to exactly one of them."""
    total = 200
    got: list[int] = []
    done = anyio.Event()

    async def work(box: Mailbox[Any, Any]) -> None:
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


@behaviour()
async def a_cancelled_wait_has_claimed_nothing(h: Harness) -> None:
    """A receive cancelled while it waits leaves nothing leased: the next message is a first delivery to the next caller."""
    async with h.open() as box:
        with anyio.move_on_after(h.short) as scope:
            await box.receive(wait_time_seconds=h.wait)
        check(scope.cancelled_caught, "the cancelled receive returned")
        await box.send("x")
        await h.counts(box, pending=1)
        message = await h.one(box)
        equal((message.delivery_count, message.attempt), (1, 1), "delivery_count and attempt")


@behaviour()
async def a_receive_cancelled_beforehand_claims_nothing(h: Harness) -> None:
    """A receive that is called in a cancelled scope returns nothing it does not also lease, and loses nothing."""
    async with h.open() as box:
        await box.send("x")
        got: list[Any] = []
        with anyio.CancelScope() as scope:
            scope.cancel()
            got.extend(await box.receive())
        await h.counts(box, pending=1 - len(got), in_flight=len(got))


@behaviour()
async def a_cancellation_that_meets_a_send_loses_nothing(h: Harness) -> None:
    """A receive cancelled at any moment around a send has either returned the message or not claimed it."""
    for steps in range(25):
        async with h.open(f"race-{steps}") as box:
            got: list[Any] = []
            scope = anyio.CancelScope()

            async def wait(box: Mailbox[Any, Any], got: list[Any], scope: anyio.CancelScope) -> None:
                with scope:
                    got.extend(await box.receive(visibility_timeout=600, wait_time_seconds=h.wait))

            async with anyio.create_task_group() as group:
                group.start_soon(wait, box, got, scope)
                await h.rest()
                group.start_soon(box.send, "x")
                for _ in range(steps):
                    await anyio.lowlevel.checkpoint()
                scope.cancel()
            await h.counts(box, pending=1 - len(got), in_flight=len(got))
            if not got:
                message = await h.one(box)
                equal((message.delivery_count, message.attempt), (1, 1), f"its counts, cancelled after {steps} steps")


@behaviour("expiry")
async def a_cancelled_receive_leaves_the_expiry(h: Harness) -> None:
    """A receive cancelled at any moment has claimed the message, or leaves it to expire in its time."""
    async with AsyncExitStack() as boxes:
        ends: list[tuple[Mailbox[Any, Any], list[Any]]] = []
        for steps in range(16):
            box = await boxes.enter_async_context(h.open(f"race-{steps}"))
            got: list[Any] = []
            scope = anyio.CancelScope()
            send = partial(box.send, "x", expires_in=h.short)

            async def wait(box: Mailbox[Any, Any], got: list[Any], scope: anyio.CancelScope) -> None:
                with scope:
                    got.extend(await box.receive(visibility_timeout=600, wait_time_seconds=h.wait))

            async with anyio.create_task_group() as group:
                if steps % 2:
                    await send()  # so that a claim is out when the cancellation comes
                group.start_soon(wait, box, got, scope)
                if not steps % 2:
                    await h.rest()
                    group.start_soon(send)
                for _ in range(steps):
                    await anyio.lowlevel.checkpoint()
                scope.cancel()
            ends.append((box, got))
        await h.pass_time(h.short)
        for box, got in ends:
            await h.due_counts(box, in_flight=len(got), dead=1 - len(got))


@behaviour()
async def a_cancelled_waiter_does_not_swallow_the_wake_up(h: Harness) -> None:
    """Of two waiting receives one is cancelled as a message comes: the other has the message at once."""
    for steps in range(6):
        async with h.open(f"wake-{steps}") as box:
            got: list[Any] = []
            came = anyio.Event()
            scopes = [anyio.CancelScope(), anyio.CancelScope()]

            async def wait(box: Mailbox[Any, Any], got: list[Any], came: anyio.Event, scope: anyio.CancelScope) -> None:
                with scope:
                    got.extend(await box.receive(wait_time_seconds=h.wait))
                    came.set()

            with h.at_once("receiving past a cancelled receiver"):
                async with anyio.create_task_group() as group:
                    for scope in scopes:
                        group.start_soon(wait, box, got, came, scope)
                        await h.rest()
                    await box.send("x")
                    for _ in range(steps):
                        await anyio.lowlevel.checkpoint()
                    scopes[0].cancel()
                    await came.wait()
                    scopes[1].cancel()
            equal(len(got), 1, f"messages received, cancelled after {steps} steps")


@behaviour()
async def the_same_message_has_the_same_id_and_times(h: Harness) -> None:
    """Later deliveries have the id, enqueued_at and first_received_at of the first."""
    async with h.open() as box:
        await box.send("x")
        first = await h.one(box)
        await first.nack()
        await h.pass_time(h.short)
        second = await h.one(box)
        equal(ids([second]), ids([first]), "the id")
        equal(second.enqueued_at, first.enqueued_at, "enqueued_at")
        equal(second.first_received_at, first.first_received_at, "first_received_at")
