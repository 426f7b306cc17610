"""The long poll: it is woken at once by everything that makes a message available, and by nothing else."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel

from mainspring.testing.mailbox_contract.harness import Harness, behaviour, check, equal

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from mainspring.mailbox.mailbox import Mailbox


async def _woken(
    h: Harness, box: Mailbox[Any, Any], cause: Callable[[], Awaitable[object]], after: float, what: str
) -> Any:
    """A receive that waits while ``cause()`` is called; it has to return ``after`` seconds later. Its message."""
    got: list[Any] = []
    ended = anyio.Event()

    async def wait() -> None:
        got.extend(await box.receive(visibility_timeout=600, wait_time_seconds=h.wait * 10))
        ended.set()

    async with anyio.create_task_group() as group:
        group.start_soon(wait)
        await h.rest()
        await anyio.sleep(h.short / 4)
        check(not got, f"the waiting receive returned before {what}")
        with h.takes(after, f"waking by {what}"):
            await cause()
            await ended.wait()
    equal(len(got), 1, f"messages received after {what}")
    return got[0]


@behaviour()
async def a_wait_ends_in_time(h: Harness) -> None:
    """With nothing to receive, a long poll returns [] after wait_time_seconds."""
    async with h.open() as box:
        with h.takes(h.short, "a poll of an empty mailbox"):
            equal(await box.receive(wait_time_seconds=h.short), [], "received")


@behaviour()
async def send_wakes_a_waiting_receive(h: Harness) -> None:
    """A send wakes a waiting receive at once."""
    async with h.open() as box:
        message = await _woken(h, box, lambda: box.send("x"), 0.0, "a send")
        equal((message.body, message.delivery_count), ("x", 1), "body and delivery_count")


@behaviour()
async def an_endless_wait_is_woken_too(h: Harness) -> None:
    """wait_time_seconds may be infinite; a send ends the wait."""
    async with h.open() as box:
        got: list[Any] = []

        async def wait() -> None:
            got.extend(await box.receive(wait_time_seconds=math.inf))

        with h.at_once("waking an endless wait"):
            async with anyio.create_task_group() as group:
                group.start_soon(wait)
                await h.rest()
                await box.send("x")
        equal([message.body for message in got], ["x"], "what was received")


@behaviour()
async def send_many_wakes_as_many_receivers(h: Harness) -> None:
    """Five messages sent together wake five waiting receives at once, one message each."""
    got: list[list[Any]] = []

    async def wait(box: Mailbox[Any, Any]) -> None:
        got.append(await box.receive(wait_time_seconds=h.wait))

    async with h.open() as box:
        with h.at_once("waking five receives"):
            async with anyio.create_task_group() as group:
                for _ in range(5):
                    group.start_soon(wait, box)
                await h.rest()
                await box.send_many(range(5))
        equal(sorted(message.body for batch in got for message in batch), list(range(5)), "the bodies received")
        equal([len(batch) for batch in got], [1] * 5, "messages per receive")


@behaviour()
async def each_send_wakes_another_receiver(h: Harness) -> None:
    """Five sends one after the other wake five waiting receives: no wake-up is spent on one that has been woken."""
    got: list[Any] = []

    async def wait(box: Mailbox[Any, Any]) -> None:
        got.extend(await box.receive(wait_time_seconds=h.wait))

    async with h.open() as box:
        with h.at_once("waking five receives by five sends"):
            async with anyio.create_task_group() as group:
                for _ in range(5):
                    group.start_soon(wait, box)
                await h.rest()
                for number in range(5):
                    await box.send(number)
        equal(sorted(message.body for message in got), list(range(5)), "the bodies received")


@behaviour()
async def nack_wakes_a_waiting_receive(h: Harness) -> None:
    """A nack without a delay wakes a waiting receive at once."""
    async with h.open() as box:
        await box.send("x")
        held = await h.one(box)
        equal((await _woken(h, box, held.nack, 0.0, "a nack")).delivery_count, 2, "delivery_count")


@behaviour()
async def release_wakes_a_waiting_receive(h: Harness) -> None:
    """A release wakes a waiting receive at once."""
    async with h.open() as box:
        await box.send("x")
        held = await h.one(box)
        equal((await _woken(h, box, held.release, 0.0, "a release")).attempt, 1, "attempt")


@behaviour("delay")
async def the_end_of_a_delay_wakes_a_waiting_receive(h: Harness) -> None:
    """A waiting receive has a delayed message at the instant its delay ends."""
    async with h.open() as box:
        await _woken(h, box, lambda: box.send("x", delay=h.short), h.short, "the end of a delay")


@behaviour("delay")
async def a_shorter_delay_wakes_sooner(h: Harness) -> None:
    """A delay that ends before the one a receive waits for is not slept through."""
    async with h.open() as box:
        await box.send("much later", delay=3_600)
        message = await _woken(h, box, lambda: box.send("x", delay=h.short), h.short, "the end of the shorter delay")
        equal(message.body, "x", "body")


@behaviour()
async def the_end_of_a_nacks_delay_wakes_a_waiting_receive(h: Harness) -> None:
    """A waiting receive has a message at the instant the delay of its nack ends."""
    async with h.open() as box:
        await box.send("x")
        held = await h.one(box)
        await _woken(h, box, lambda: held.nack(delay=h.short), h.short, "the end of a nack's delay")


@behaviour()
async def an_expired_lease_wakes_a_waiting_receive(h: Harness) -> None:
    """A waiting receive has a message at the instant its lease runs out."""
    async with h.open() as box:
        await box.send("x")
        with h.takes(h.short, "waiting for a lease to run out"):
            await h.one(box, lease=h.short)
            message = await h.one(box, wait=h.wait * 10)
        equal((message.delivery_count, message.attempt), (2, 2), "delivery_count and attempt")


@behaviour()
async def an_extended_lease_wakes_at_its_new_end(h: Harness) -> None:
    """A waiting receive is not given a message whose lease was extended, until the new end."""
    async with h.open() as box:
        await box.send("x")
        held = await h.one(box, lease=600 if not h.virtual else h.short)
        if h.virtual:
            await held.extend_visibility(3 * h.short)
            with h.takes(3 * h.short, "waiting for an extended lease"):
                await h.one(box, wait=h.wait * 10)
        else:
            await held.extend_visibility(h.short)
            equal(await box.receive(wait_time_seconds=2 * h.short), [], "received during the lease")


@behaviour()
async def a_replay_wakes_a_waiting_receive(h: Harness) -> None:
    """Dead letters sent again wake a waiting receive at once."""
    async with h.open() as box:
        await box.send("x")
        await (await h.one(box)).dead_letter("no")
        await _woken(h, box, box.replay_dead_letters, 0.0, "a replay")


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


@behaviour()
async def settling_wakes_nobody(h: Harness) -> None:
    """Acknowledging, dead-lettering or purging gives a waiting receive nothing."""
    async with h.open() as box:
        await box.send_many(["ack", "dead", "purged"])
        acked, dead, _purged = await h.all(box)
        got: list[Any] = []

        async def wait() -> None:
            got.append(await box.receive(wait_time_seconds=h.short))

        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            await h.rest()
            await acked.acknowledge()
            await dead.dead_letter("no")
            await box.purge()
        equal(got, [[]], "what the waiting receive returned")
