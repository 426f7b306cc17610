"""The wrong variants: each is a mistake somebody could make, in the store, the engine, or the code of a user.

A mistake of the store is made around the backend of the mailbox that is the store. One of the engine is made where the engine
meets others: around the backend of the mailbox that it works on, or in a subclass of what it is built from.
"""

from __future__ import annotations

from contextvars import copy_context
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import trio
from simulation_planting import bursts, honest, planted_fault, quick

from contract.broken_mailboxes import (
    ChargesReleases,
    DoesNotChargeExpiry,
    ExtendDoesNothing,
    ExtendShortens,
    IgnoresNackDelay,
    end_lease,
)
from mainspring import Context, DeadLetterPolicy, InMemoryMailbox, LoopGroup, MailboxConnectionError, MainLoop, Retry
from mainspring.core import random
from mainspring.core.clock import VIRTUAL_EPOCH, utc_now
from mainspring.core.state_machine import GroupState
from mainspring.errors import ReceiptHandleExpiredError
from mainspring.events import GroupStateChanged
from mainspring.mailbox.message import ACK, Ack, ClaimedMessage, Dead, Envelope, Nack, Settlement
from mainspring.testing import Faults
from wrapped_backend import WrappedBackend, wrap

if TYPE_CHECKING:
    from collections.abc import Callable

    Given = dict[str, Any]

CRASHES = Faults.just(crash=20)
SIGNALS = Faults.just(signal=30)
FREEZES = Faults.just(freeze=40)


def stored_by(wrong: Callable[[Any], WrappedBackend]) -> Callable[[], InMemoryMailbox[Any, Any]]:
    """What makes a store that is wrong in this way."""
    return lambda: wrap(InMemoryMailbox("store", serialize=True), wrong)


def takes(seconds: float, **options: Any) -> Callable[[Any], LoopGroup]:
    """What builds a group whose handlers take ``seconds``."""

    def build(mailbox: Any) -> LoopGroup:
        async def handle(job: int) -> None:
            await anyio.sleep(seconds)

        return LoopGroup([MainLoop(mailbox, handle, **options)])

    return build


# --------------------------------------------------------------------------------------------------------- user code


@planted_fault("work done", faults=CRASHES)
def acknowledges_before_the_work() -> Given:
    def build(mailbox: Any) -> LoopGroup:
        async def handle(job: int, ctx: Context) -> None:
            await ctx.message.acknowledge()
            await anyio.sleep(20)

        return LoopGroup([MainLoop(mailbox, handle)])

    return {"build": build}


@planted_fault("progress", faults=Faults.none(), duration=7200.0)
def handlers_hang_and_nobody_watches() -> Given:
    def build(mailbox: Any) -> LoopGroup:
        async def handle(job: int) -> None:
            if job % 7 == 0:
                await anyio.sleep_forever()

        return LoopGroup([MainLoop(mailbox, handle)], watchdog_threshold=None)

    return {"build": build}


@planted_fault("no task left", faults=SIGNALS)
def a_handler_leaves_a_task_behind() -> Given:
    def build(mailbox: Any) -> LoopGroup:
        async def handle(job: int) -> None:
            trio.lowlevel.spawn_system_task(trio.sleep, 600, context=copy_context())

        return LoopGroup([MainLoop(mailbox, handle)])

    return {"build": build}


@planted_fault("shutdown in time", faults=SIGNALS)
def a_handler_ignores_its_cancellation() -> Given:
    def build(mailbox: Any) -> LoopGroup:
        async def handle(job: int) -> None:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(90)

        return LoopGroup([MainLoop(mailbox, handle)])

    return {"build": build}


# -------------------------------------------------------------------------------------------------------- the engine


@planted_fault("one worker", "one lease", duration=3600.0)
def leases_are_not_renewed() -> Given:
    class Unsent(WrappedBackend):
        async def extend(self, delivery: ClaimedMessage, timeout: float) -> None: ...

    return {"build": lambda mailbox: honest(wrap(mailbox, Unsent))}


@planted_fault("one worker", "one lease", "lease kept", faults=SIGNALS)
def renewal_stops_when_the_drain_begins() -> Given:
    class Unsent(WrappedBackend):
        is_draining = False

        async def extend(self, delivery: ClaimedMessage, timeout: float) -> None:
            if not self.is_draining:
                await self.inner.extend(delivery, timeout)

        def hear(self, event: GroupStateChanged) -> None:
            self.is_draining = event.new is not GroupState.STARTING and event.new is not GroupState.RUNNING

    def build(mailbox: Any) -> LoopGroup:
        backends: list[Unsent] = []

        def unsent(inner: Any) -> Unsent:
            backends.append(Unsent(inner))
            return backends[-1]

        group = takes(25, concurrency=2, visibility_timeout=6)(wrap(mailbox, unsent))
        group.dispatcher.subscribe(GroupStateChanged, backends[-1].hear)
        return group

    return {"build": build}


@planted_fault("one lease", "one worker", faults=FREEZES)
def handlers_begin_with_a_lease_that_is_over() -> Given:
    """What the simulation found in the engine first: a worker that stood still between a claim and its handler.

    Which of the two rules a seed breaks first depends on whether the other worker's handler has begun by then.
    """

    class FromReceipt(WrappedBackend):
        async def claim(self, *asked: Any) -> list[ClaimedMessage]:
            claimed = await self.inner.claim(*asked)
            return [replace(delivery, leased_at=anyio.current_time()) for delivery in claimed]

    return {"build": lambda mailbox: honest(wrap(mailbox, FromReceipt))}


@planted_fault("attempts", faults=SIGNALS)
def a_shutdown_charges_an_attempt() -> Given:
    return {"build": lambda mailbox: takes(50)(wrap(mailbox, ChargesReleases))}


def says(policy: DeadLetterPolicy, but_has: DeadLetterPolicy) -> Callable[[Any], LoopGroup]:
    """What builds a group whose loop says one policy and has another."""

    class Loop(MainLoop):
        @property
        def dead_letter(self) -> DeadLetterPolicy:
            return policy

    return partial(honest, kind=Loop, dead_letter=but_has)


@planted_fault("attempts")
def attempts_never_run_out() -> Given:
    return {"build": says(DeadLetterPolicy(max_attempts=5), but_has=DeadLetterPolicy(1_000, max_crashes=1_000))}


@planted_fault("attempts", faults=Faults.just(crash=600))
def a_message_may_kill_any_number_of_workers() -> Given:
    return {"build": says(DeadLetterPolicy(max_crashes=2), but_has=DeadLetterPolicy(max_crashes=1_000))}


@planted_fault("no crash")
def a_lost_connection_crashes_the_loop() -> Given:
    class Crashes(WrappedBackend):
        async def claim(self, *asked: Any) -> list[ClaimedMessage]:
            try:
                return await self.inner.claim(*asked)
            except MailboxConnectionError as error:
                raise RuntimeError("the connection is lost") from error

    return {"build": lambda mailbox: honest(wrap(mailbox, Crashes))}


@planted_fault("shutdown in time", faults=SIGNALS)
def a_shutdown_waits_for_ever() -> Given:
    class Patient(LoopGroup):
        def request_shutdown(self, reason: str = "") -> None:
            self.request_drain(reason)

    return {"build": lambda mailbox: Patient(takes(200)(mailbox).loops)}


@planted_fault("work done")
def failures_are_acknowledged() -> Given:
    class Careless(WrappedBackend):
        async def settle(self, delivery: ClaimedMessage, settlement: Settlement) -> None:
            failed = isinstance(settlement, Nack) and settlement.charge
            await self.inner.settle(delivery, ACK if failed else settlement)

    return {"build": lambda mailbox: honest(wrap(mailbox, Careless))}


def releases(as_what: Callable[[Nack], Nack | None]) -> Callable[[Any], LoopGroup]:
    """What builds a group that claims ahead and returns in another way what it has not begun, or (None) not at all."""

    class Releases(WrappedBackend):
        async def settle(self, delivery: ClaimedMessage, settlement: Settlement) -> None:
            if isinstance(settlement, Nack) and settlement.front:
                changed = as_what(settlement)
                if changed is not None:
                    await self.inner.settle(delivery, changed)
            else:
                await self.inner.settle(delivery, settlement)

    return lambda mailbox: bursts(wrap(mailbox, Releases))


@planted_fault("attempts", faults=SIGNALS, duration=300.0)
def what_was_claimed_ahead_is_charged() -> Given:
    return {"build": releases(lambda release: replace(release, charge=True))}


@planted_fault("order", faults=SIGNALS, duration=300.0)
def what_was_claimed_ahead_goes_to_the_tail() -> Given:
    return {"build": releases(lambda release: replace(release, front=False))}


@planted_fault("fairness", faults=Faults.just(signal=120), duration=300.0)
def what_was_claimed_ahead_is_kept_at_a_shutdown() -> Given:
    return {"build": releases(lambda release: None)}


@planted_fault("fairness", faults=Faults.none(), duration=300.0)
def what_was_claimed_ahead_is_kept_by_a_slow_worker() -> Given:
    class Prefetches(WrappedBackend):
        def __init__(self, inner: Any) -> None:
            super().__init__(inner)
            self.kept: list[ClaimedMessage] = []

        async def claim(self, most: int, visibility: float, wait: float) -> list[ClaimedMessage]:
            if not self.kept:
                self.kept = await self.inner.claim(most + 50, visibility, wait)
            claimed, self.kept = self.kept[:most], self.kept[most:]
            return claimed

    return {"build": lambda mailbox: bursts(wrap(mailbox, Prefetches), visibility_timeout=600)}


@planted_fault("concurrency", faults=Faults.none(), duration=300.0)
def a_loop_handles_more_than_its_concurrency() -> Given:
    class Eager(MainLoop):
        def __init__(self, *given: Any, concurrency: int = 1, **options: Any) -> None:
            super().__init__(*given, concurrency=concurrency + 2, **options)
            self.said = concurrency

        @property
        def concurrency(self) -> int:
            return self.said

    return {"build": partial(bursts, kind=Eager)}


# --------------------------------------------------------------------------------------------------------- the store


class Accepts(WrappedBackend):
    """Takes a stale settlement of one kind."""

    def __init__(self, inner: Any, kind: type[Ack] | type[Nack]) -> None:
        super().__init__(inner)
        self.kind = kind

    async def settle(self, delivery: ClaimedMessage, settlement: Settlement) -> None:
        try:
            await self.inner.settle(delivery, settlement)
        except ReceiptHandleExpiredError:
            if not isinstance(settlement, self.kind):
                raise


@planted_fault("fencing", faults=FREEZES, duration=3600.0)
def a_stale_acknowledgement_is_accepted() -> Given:
    return {"store": stored_by(partial(Accepts, kind=Ack))}


@planted_fault("fencing", faults=FREEZES, duration=3600.0)
def a_stale_return_is_accepted() -> Given:
    def build(mailbox: Any) -> LoopGroup:
        async def handle(job: int, ctx: Context) -> None:
            await anyio.sleep(job % 40)
            if ctx.attempt == 1:
                raise Retry

        return LoopGroup([MainLoop(mailbox, handle, concurrency=2)])

    return {"store": stored_by(partial(Accepts, kind=Nack)), "build": build}


@planted_fault("nothing lost", faults=Faults.just(crash=120))
def one_in_a_hundred_is_lost_with_its_lease() -> Given:
    class Loses(WrappedBackend):
        async def claim(self, *asked: Any) -> list[ClaimedMessage]:
            claimed = await self.inner.claim(*asked)
            lost = [one for one in claimed if one.delivery_count > 1 and random.rng().random() < 0.01]
            for delivery in lost:
                await self.inner.settle(delivery, ACK)
            return [delivery for delivery in claimed if delivery not in lost]

    return {"store": stored_by(Loses)}


class LeaseBook(WrappedBackend):
    """Knows of each lease how long it lasts."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.leases: dict[str, tuple[ClaimedMessage, float]] = {}

    async def claim(self, most: int, visibility: float, wait: float) -> list[ClaimedMessage]:
        claimed: list[ClaimedMessage] = await self.inner.claim(most, visibility, wait)
        until = anyio.current_time() + visibility
        self.leases |= {delivery.receipt_handle: (delivery, until) for delivery in claimed}
        return claimed

    async def extend(self, delivery: ClaimedMessage, timeout: float) -> None:
        await self.inner.extend(delivery, timeout)
        _, until = self.leases[delivery.receipt_handle]
        self.leases[delivery.receipt_handle] = delivery, max(until, anyio.current_time() + timeout)

    async def settle(self, delivery: ClaimedMessage, settlement: Settlement) -> None:
        await self.inner.settle(delivery, settlement)
        self.leases.pop(delivery.receipt_handle, None)


@planted_fault("one lease", "lease kept")
def leases_are_judged_by_the_workers_wall_clock() -> Given:
    class WallClock(LeaseBook):
        async def claim(self, most: int, visibility: float, wait: float) -> list[ClaimedMessage]:
            wall = (utc_now() - VIRTUAL_EPOCH).total_seconds()
            for receipt, (delivery, until) in list(self.leases.items()):
                if until <= wall:
                    del self.leases[receipt]
                    await end_lease(self.inner, delivery)
            return await super().claim(most, visibility, wait)

    return {"store": stored_by(WallClock)}


@planted_fault("replies")
def replies_are_sent_twice() -> Given:
    class Twice(WrappedBackend):
        async def settle(self, delivery: ClaimedMessage, settlement: Settlement) -> None:
            reply = settlement.reply if isinstance(settlement, Ack) else None
            again = None if reply is None or random.rng().random() > 0.05 else replace(reply)
            await self.inner.settle(delivery, settlement)
            if again is not None:
                requester = self.inner.sibling(again.reply_to)
                await requester.send([replace(again, reply_to=None)])

    return {"store": stored_by(Twice)}


@planted_fault("nothing lost", "lease kept")
def a_dead_letter_is_not_one_step() -> Given:
    class TwoSteps(WrappedBackend):
        async def settle(self, delivery: ClaimedMessage, settlement: Settlement) -> None:
            if isinstance(settlement, Dead) and random.rng().random() < 0.1:
                await self.inner.settle(delivery, ACK)
                raise MailboxConnectionError("the store broke down between the two steps")
            await self.inner.settle(delivery, settlement)

    return {"store": stored_by(TwoSteps)}


@planted_fault("one lease", "lease kept")
def extending_shortens() -> Given:
    def build(mailbox: Any) -> LoopGroup:
        async def handle(job: int, ctx: Context) -> None:
            await ctx.message.extend_visibility(8)
            await anyio.sleep(30)

        return LoopGroup([MainLoop(mailbox, handle)])

    return {"store": stored_by(ExtendShortens), "build": build}


@planted_fault("one lease", "lease kept")
def extending_does_nothing() -> Given:
    return {"store": stored_by(ExtendDoesNothing)}


@planted_fault("nothing lost", "settled once", faults=Faults.just(store_restart=10))
def a_joint_acknowledgement_loses_one_of_its_messages() -> Given:
    class Loses(WrappedBackend):
        async def acknowledge_many(self, deliveries: list[ClaimedMessage]) -> dict[int, Exception]:
            return await super().acknowledge_many(deliveries[: max(1, len(deliveries) - 1)])

    return {"store": stored_by(Loses), "build": quick}


@planted_fault("nothing lost", faults=SIGNALS)
def what_is_released_is_lost() -> Given:
    class Loses(WrappedBackend):
        async def settle(self, delivery: ClaimedMessage, settlement: Settlement) -> None:
            released = isinstance(settlement, Nack) and settlement.front
            await self.inner.settle(delivery, ACK if released else settlement)

    return {"store": stored_by(Loses), "build": takes(50)}


@planted_fault("settled once")
def some_come_again_after_their_acknowledgement() -> Given:
    class Remembers(WrappedBackend):
        async def settle(self, delivery: ClaimedMessage, settlement: Settlement) -> None:
            await self.inner.settle(delivery, settlement)
            if isinstance(settlement, Ack) and random.rng().random() < 0.01:
                await self.inner.send([Envelope(delivery.message_id, delivery.body)])

    return {"store": stored_by(Remembers)}


@planted_fault("delay")
def delays_are_forgotten() -> Given:
    return {"store": stored_by(IgnoresNackDelay)}


@planted_fault("attempts", faults=CRASHES)
def lost_leases_are_not_charged() -> Given:
    return {"store": stored_by(DoesNotChargeExpiry)}


@planted_fault("lease kept")
def receipts_are_refused_too_early() -> Given:
    class Hasty(LeaseBook):
        def check(self, delivery: ClaimedMessage) -> None:
            _, until = self.leases.get(delivery.receipt_handle, (delivery, 0.0))
            if until <= anyio.current_time() + 15:
                raise ReceiptHandleExpiredError("its lease is nearly over")

        async def settle(self, delivery: ClaimedMessage, settlement: Settlement) -> None:
            self.check(delivery)
            await super().settle(delivery, settlement)

        async def extend(self, delivery: ClaimedMessage, timeout: float) -> None:
            self.check(delivery)
            await super().extend(delivery, timeout)

    return {"store": stored_by(Hasty)}
