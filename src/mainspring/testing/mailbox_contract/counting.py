"""Counts: each message is in exactly one part at every step; and the queue age."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel

from mainspring.mailbox.message import Counts
from mainspring.testing.mailbox_contract.harness import AnyMailbox, Harness, behaviour, check, equal, on_mailbox

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from mainspring.mailbox.message import Message


@behaviour("cross_process", "expiry", "lease_ends_seen")
async def the_end_of_a_lease_shows_to_everybody(h: Harness) -> None:
    """A mailbox object without leases sees in counts() that another's lease has ended, and that an expired message is dead."""
    async with h.open() as holder, h.open() as other:
        await holder.send("back")
        with h.within(h.short + 1.0):
            await holder.send("expired", expires_in=h.short + 1.0)
            equal(len(await h.all(holder, lease=h.short + 1.5)), 2, "messages received")
            await h.counts(other, in_flight=2)
        await h.pass_time(h.short + 1.5)
        await h.due_counts(other, pending=1, dead=1)


@on_mailbox()
async def counts_add_up_under_any_use(h: Harness, box: AnyMailbox) -> None:
    """Over 300 random steps, counts() says what a model of the mailbox says."""
    model = _Model(box, delays=h.capabilities.delay)
    for step in range(300):
        what = await model.step()
        counts = await box.counts()
        equal(counts, model.counts(), f"counts after step {step} ({what})")
        equal(await box.approximate_count(), counts.waiting, "approximate_count")


@on_mailbox()
async def counts_add_up_under_concurrency(h: Harness, box: AnyMailbox) -> None:
    """While many tasks send, receive and settle, all counts add up to the messages accepted so far."""
    accepted = started = 0

    async def send() -> None:
        nonlocal accepted, started
        for _ in range(20):
            started += 3
            await box.send_many(range(3))
            accepted += 3

    async def work() -> None:
        settle = 0
        while messages := await box.receive(max_messages=2, visibility_timeout=600, wait_time_seconds=h.short):
            for message in messages:
                settle += 1
                await (message.nack() if settle % 5 == 0 else message.acknowledge())

    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(send)
            group.start_soon(work)
        for _ in range(30):
            least = accepted
            total = _total(await box.counts())
            equal(least <= total <= started, True, f"{least} <= {total} <= {started}")
            await anyio.lowlevel.checkpoint()
    await h.counts(box, settled=180)


@on_mailbox("queue_age")
async def the_queue_age_is_that_of_the_oldest_pending_message(h: Harness, box: AnyMailbox) -> None:
    """counts().queue_age is the time since the first send of the oldest pending message, and 0 where none is pending."""
    await _expect_age(h, box, None)
    old = await _sent(box, "old")
    await h.spend(h.short)
    new = await _sent(box, "new")
    await _expect_age(h, box, old)
    held = await h.one(box)
    await _expect_age(h, box, new)
    other = await h.one(box)
    await _expect_age(h, box, None)
    await held.nack()
    await _expect_age(h, box, old)
    await other.acknowledge()
    await (await h.one(box)).dead_letter("no")
    await _expect_age(h, box, None)
    await box.replay_dead_letters()
    await _expect_age(h, box, old)
    await box.purge()
    await _expect_age(h, box, None)


@on_mailbox("queue_age", "delay")
async def the_queue_age_includes_the_delay(h: Harness, box: AnyMailbox) -> None:
    """A delayed message has no part in the queue_age; once it is due, its age runs from its send."""
    async with h.ending(h.short):
        late = await _sent(box, "late", delay=h.short)
        await _expect_age(h, box, None)
    await h.due_counts(box, pending=1)
    await _expect_age(h, box, late)


@on_mailbox("queue_age")
async def the_queue_age_sees_a_lease_that_has_ended(h: Harness, box: AnyMailbox) -> None:
    """A message whose lease has ended is pending, and as old as before."""
    lost = await _sent(box, "lost")
    await h.spend(h.short)
    async with h.ending(h.short):
        await h.one(box, lease=h.short)
        await _expect_age(h, box, None)
    await h.due_counts(box, pending=1)
    await _expect_age(h, box, lost)


@on_mailbox("queue_age", "priority")
async def the_queue_age_looks_at_each_priority(h: Harness, box: AnyMailbox) -> None:
    """An old message of a low priority counts, though newer ones of higher priorities come before it."""
    low = await _sent(box, "low", priority=-5)
    await h.spend(h.short)
    middle = await _sent(box, "middle")
    await _sent(box, "high", priority=7)
    await _expect_age(h, box, low)
    for message in await box.receive(max_messages=3):
        if message.body == "middle":
            await message.release()
    await _expect_age(h, box, middle)


async def _sent(box: AnyMailbox, body: str, **options: Any) -> tuple[float, float]:
    """Send a message. Return the instants between which it was sent."""
    before = anyio.current_time()
    await box.send(body, **options)
    return before, anyio.current_time()


async def _expect_age(h: Harness, box: AnyMailbox, sent: tuple[float, float] | None) -> None:
    """Check that the queue_age is that of the message sent between those instants; None: no message is pending."""
    before = anyio.current_time()
    age = (await box.counts()).queue_age
    if sent is None or age is None:
        equal(age, 0.0, "queue_age")
        return
    least, most = before - sent[1] - h.slack, anyio.current_time() - sent[0] + h.slack
    check(least - 1e-5 <= age <= most + 1e-5, f"queue_age: {age:g}, not from {least:g} to {most:g}")


def _total(counts: Counts) -> int:
    return counts.delayed + counts.pending + counts.in_flight + counts.settled + counts.dead


class _Model:
    """A model of a mailbox in which no time passes: the part that each message is in."""

    def __init__(self, box: AnyMailbox, *, delays: bool) -> None:
        self.box = box
        self.delays = delays
        self.where: dict[str, str] = {}
        self.held: list[Message[Any, Any]] = []
        self.rng = Random(20_000)  # noqa: S311 - the same steps each time

    def counts(self) -> Counts:
        return Counts(**Counter(self.where.values()))

    async def step(self) -> str:
        steps: list[Callable[[], Awaitable[None]]] = [self.send, self.send_many, self.receive, self.receive]
        if self.delays:
            steps.append(self.send_later)
        if self.held:
            steps += [self.settle] * 5
        if self.rng.random() < 0.05:
            steps = [self.replay, self.purge]
        chosen = self.rng.choice(steps)
        await chosen()
        return chosen.__name__

    async def send(self) -> None:
        self.where[await self.box.send("x")] = "pending"

    async def send_many(self) -> None:
        for sent in await self.box.send_many(range(self.rng.randint(0, 4))):
            self.where[sent] = "pending"

    async def send_later(self) -> None:
        self.where[await self.box.send("x", delay=86_400)] = "delayed"

    async def receive(self) -> None:
        for message in await self.box.receive(max_messages=self.rng.randint(1, 3), visibility_timeout=43_200):
            self.where[message.id] = "in_flight"
            self.held.append(message)

    async def settle(self) -> None:
        message = self.held.pop(self.rng.randrange(len(self.held)))
        ways: list[tuple[str, Callable[[], Awaitable[None]]]] = [
            ("settled", message.acknowledge),
            ("pending", message.nack),
            ("pending", message.release),
            ("dead", lambda: message.dead_letter("no")),
            ("delayed", lambda: message.nack(delay=86_400)),
        ]
        self.where[message.id], call = self.rng.choice(ways)
        await call()

    async def replay(self) -> None:
        await self.box.replay_dead_letters()
        self.where.update({key: "pending" for key, part in self.where.items() if part == "dead"})

    async def purge(self) -> None:
        await self.box.purge()
        self.where.update({key: "settled" for key, part in self.where.items() if part != "dead"})
        self.held.clear()
