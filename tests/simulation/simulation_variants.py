"""The wrong variants: each is a mistake somebody could make, in the store, the engine, or the code of a user."""

from __future__ import annotations

from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import trio
from simulation_planting import honest, planted_fault, quick

from mainspring import Context, InMemoryMailbox, LoopGroup, MailboxConnectionError, MainLoop, Retry
from mainspring.core import random
from mainspring.core.clock import VIRTUAL_EPOCH, utc_now
from mainspring.errors import ReceiptHandleExpiredError
from mainspring.group.shutdown import Shutdown
from mainspring.mailbox.memory.entry import GONE, IN_FLIGHT, JSON, Entry
from mainspring.mailbox.memory.queue import MemoryQueue
from mainspring.mailbox.memory.scheduler import Agenda
from mainspring.mailbox.message import Ack, Dead, Return
from mainspring.policies import DeadLetterPolicy
from mainspring.testing import Faults
from mainspring.worker import attempt, worker
from mainspring.worker.leases import LeaseKeeper
from mainspring.worker.outcome import Decision, Outcome

if TYPE_CHECKING:
    import pytest

    Given = dict[str, Any]

CRASHES = Faults.just(crash=20)
SIGNALS = Faults.just(signal=30)
FREEZES = Faults.just(freeze=40)

# --------------------------------------------------------------------------------------------------------- user code


@planted_fault("work done", faults=CRASHES)
def acknowledges_before_the_work(patch: pytest.MonkeyPatch) -> Given:
    def build(mailbox: Any) -> LoopGroup:
        async def handle(job: int, ctx: Context) -> None:
            await ctx.message.acknowledge()
            await anyio.sleep(20)

        return LoopGroup([MainLoop(mailbox, handle)])

    return {"build": build}


@planted_fault("progress", faults=Faults.none(), duration=7200.0)
def handlers_hang_and_nobody_watches(patch: pytest.MonkeyPatch) -> Given:
    def build(mailbox: Any) -> LoopGroup:
        async def handle(job: int) -> None:
            if job % 7 == 0:
                await anyio.sleep_forever()

        return LoopGroup([MainLoop(mailbox, handle)], watchdog_threshold=None)

    return {"build": build}


@planted_fault("no task left", faults=SIGNALS)
def a_handler_leaves_a_task_behind(patch: pytest.MonkeyPatch) -> Given:
    def build(mailbox: Any) -> LoopGroup:
        async def handle(job: int) -> None:
            trio.lowlevel.spawn_system_task(trio.sleep, 600, context=copy_context())

        return LoopGroup([MainLoop(mailbox, handle)])

    return {"build": build}


@planted_fault("shutdown in time", faults=SIGNALS)
def a_handler_ignores_its_cancellation(patch: pytest.MonkeyPatch) -> Given:
    def build(mailbox: Any) -> LoopGroup:
        async def handle(job: int) -> None:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(90)

        return LoopGroup([MainLoop(mailbox, handle)])

    return {"build": build}


# -------------------------------------------------------------------------------------------------------- the engine


@planted_fault("one worker", "one lease", duration=3600.0)
def leases_are_not_renewed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LeaseKeeper, "_attend", lambda self, run, now: setattr(run, "renew_at", now + 20))


@planted_fault("one worker", "one lease", "lease kept", faults=SIGNALS)
def renewal_stops_when_the_drain_begins(patch: pytest.MonkeyPatch) -> Given:
    real = worker.Worker.stop_intake

    def stop_intake(self: Any) -> None:
        real(self)
        self._lease._attend = lambda run, now: setattr(run, "renew_at", now + 20)

    patch.setattr(worker.Worker, "stop_intake", stop_intake)

    def build(mailbox: Any) -> LoopGroup:
        async def handle(job: int) -> None:
            await anyio.sleep(25)

        return LoopGroup([MainLoop(mailbox, handle, concurrency=2, visibility_timeout=6)])

    return {"build": build}


@planted_fault("one lease", faults=FREEZES)
def handlers_begin_with_a_lease_that_is_over(patch: pytest.MonkeyPatch) -> None:
    """What the simulation found in the engine first: a worker that stood still between a claim and its handler."""
    track = LeaseKeeper.track

    def track_from_receipt(self: Any, runs: Any) -> None:
        now = anyio.current_time()
        for run in runs:
            run.renewed_at, run.trusted_until = now, now + self._visibility
        track(self, runs)

    patch.setattr(LeaseKeeper, "track", track_from_receipt)


@planted_fault("attempts", faults=SIGNALS)
def a_shutdown_charges_an_attempt(patch: pytest.MonkeyPatch) -> Given:
    charged = Decision(Outcome.RELEASED, Return(charge=True, front=True))
    patch.setattr(attempt, "RELEASED", charged)
    patch.setattr(worker, "RELEASED", charged)

    def build(mailbox: Any) -> LoopGroup:
        async def handle(job: int) -> None:
            await anyio.sleep(50)

        return LoopGroup([MainLoop(mailbox, handle)])

    return {"build": build}


@planted_fault("attempts")
def attempts_never_run_out(patch: pytest.MonkeyPatch) -> Given:
    patch.setattr(DeadLetterPolicy, "is_dead", lambda self, attempt, error: False)
    patch.setattr(attempt, "before_start", lambda *_: None)
    return {"build": partial(honest, dead_letter=DeadLetterPolicy(max_attempts=5))}


@planted_fault("attempts", faults=Faults.just(crash=600))
def a_message_may_kill_any_number_of_workers(patch: pytest.MonkeyPatch) -> Given:
    patch.setattr(attempt, "before_start", lambda *_: None)
    return {"build": partial(honest, dead_letter=DeadLetterPolicy(max_crashes=2))}


@planted_fault("no crash")
def a_lost_connection_crashes_the_loop(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MailboxConnectionError, "retryable", False)


@planted_fault("shutdown in time", faults=SIGNALS)
def a_shutdown_waits_for_ever(patch: pytest.MonkeyPatch) -> Given:
    async def wait(self: Any, over: Any, until: Any) -> None:
        while not over():
            await anyio.sleep(1)

    patch.setattr(Shutdown, "_wait", wait)

    def build(mailbox: Any) -> LoopGroup:
        async def handle(job: int) -> None:
            await anyio.sleep(200)

        return LoopGroup([MainLoop(mailbox, handle)])

    return {"build": build}


@planted_fault("work done")
def failures_are_acknowledged(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(attempt.Attempts, "judge", lambda self, run, error: Decision(Outcome.ACKNOWLEDGED, Ack()))


# --------------------------------------------------------------------------------------------------------- the store


class Wrong(InMemoryMailbox[Any, Any]):
    """A store, wrong in one way."""

    def __init__(self) -> None:
        super().__init__("store", serialize=True)


@planted_fault("fencing", faults=FREEZES, duration=3600.0)
def a_stale_acknowledgement_is_accepted(patch: pytest.MonkeyPatch) -> Given:
    return {"store": lambda: _Lenient(Ack)}


@planted_fault("fencing", faults=FREEZES, duration=3600.0)
def a_stale_return_is_accepted(patch: pytest.MonkeyPatch) -> Given:
    def build(mailbox: Any) -> LoopGroup:
        async def handle(job: int, ctx: Context) -> None:
            await anyio.sleep(job % 40)
            if ctx.attempt == 1:
                raise Retry

        return LoopGroup([MainLoop(mailbox, handle, concurrency=2)])

    return {"store": lambda: _Lenient(Return), "build": build}


class _Lenient(Wrong):
    def __init__(self, kind: type) -> None:
        super().__init__()
        self._kind = kind

    async def _settle(self, delivery: Any, settlement: Any) -> None:
        try:
            await super()._settle(delivery, settlement)
        except ReceiptHandleExpiredError:
            if not isinstance(settlement, self._kind):
                raise


@planted_fault("nothing lost", faults=Faults.just(crash=120))
def the_reaper_loses_one_in_a_hundred(patch: pytest.MonkeyPatch) -> None:
    real = Agenda.due

    def due(self: Any, now: float) -> Any:
        for entry in real(self, now):
            if entry.place == IN_FLIGHT and random.rng().random() < 0.01:
                continue
            yield entry

    patch.setattr(Agenda, "due", due)


@planted_fault("one lease", "lease kept")
def leases_are_judged_by_the_workers_wall_clock(patch: pytest.MonkeyPatch) -> Given:
    class WallClock(Wrong):
        async def _claim(self, most: int, visibility: float, wait: float) -> Any:
            self._store.queue.advance((utc_now() - VIRTUAL_EPOCH).total_seconds())
            return await super()._claim(most, visibility, wait)

    return {"store": WallClock}


@planted_fault("replies")
def replies_are_sent_twice(patch: pytest.MonkeyPatch) -> Given:
    class Twice(Wrong):
        def _reply_into(self, store: Any, delivery: Any, reply: Any, now: float) -> None:
            address = reply.reply_to
            super()._reply_into(store, delivery, reply, now)
            if random.rng().random() < 0.05:
                reply.reply_to = address
                super()._reply_into(store, delivery, reply, now)

    return {"store": Twice}


@planted_fault("nothing lost", "lease kept")
def a_dead_letter_is_not_one_step(patch: pytest.MonkeyPatch) -> Given:
    class TwoSteps(Wrong):
        async def _settle(self, delivery: Any, settlement: Any) -> None:
            if isinstance(settlement, Dead) and random.rng().random() < 0.1:
                await super()._settle(delivery, Ack())
                raise MailboxConnectionError("the store broke down between the two steps")
            await super()._settle(delivery, settlement)

    return {"store": TwoSteps}


@planted_fault("one lease", "lease kept")
def extending_shortens(patch: pytest.MonkeyPatch) -> Given:
    class Shortens(Wrong):
        async def _extend(self, delivery: Any, timeout: float) -> None:
            await super()._extend(delivery, timeout)
            queue = self._store.queue
            entry = queue.leased(delivery, self._store.clock())
            entry.lease_until = self._store.clock() + timeout
            queue._agenda.set_leases([delivery.receipt_handle], entry.lease_until)

    def build(mailbox: Any) -> LoopGroup:
        async def handle(job: int, ctx: Context) -> None:
            await ctx.message.extend_visibility(8)
            await anyio.sleep(30)

        return LoopGroup([MainLoop(mailbox, handle)])

    return {"store": Shortens, "build": build}


@planted_fault("one lease", "lease kept")
def extending_does_nothing(patch: pytest.MonkeyPatch) -> Given:
    class Deaf(Wrong):
        async def _extend(self, delivery: Any, timeout: float) -> None:
            self._store.queue.leased(delivery, self._store.clock())

    return {"store": Deaf}


@planted_fault("nothing lost", "settled once", faults=Faults.just(store_restart=10))
def a_joint_acknowledgement_loses_one_of_its_messages(patch: pytest.MonkeyPatch) -> Given:
    class Loses(Wrong):
        async def _acknowledge_many(self, deliveries: Any) -> dict[int, Exception]:
            return await super()._acknowledge_many(deliveries[: max(1, len(deliveries) - 1)])

    return {"store": Loses, "build": quick}


@planted_fault("nothing lost", faults=SIGNALS)
def what_is_released_is_lost(patch: pytest.MonkeyPatch) -> Given:
    class Loses(Wrong):
        async def _settle(self, delivery: Any, settlement: Any) -> None:
            if isinstance(settlement, Return) and settlement.front:
                queue = self._store.queue
                queue._end_lease(queue.leased(delivery, self._store.clock()))
                return
            await super()._settle(delivery, settlement)

    def build(mailbox: Any) -> LoopGroup:
        async def handle(job: int) -> None:
            await anyio.sleep(50)

        return LoopGroup([MainLoop(mailbox, handle)])

    return {"store": Loses, "build": build}


@planted_fault("settled once")
def some_come_again_after_their_acknowledgement(patch: pytest.MonkeyPatch) -> None:
    real = MemoryQueue.acknowledge

    def acknowledge(self: Any, delivery: Any, now: float) -> None:
        real(self, delivery, now)
        if random.rng().random() < 0.01:
            self._append(delivery_again(self, delivery))

    def delivery_again(queue: Any, delivery: Any) -> Entry:
        entry = Entry(delivery.message_id, delivery.body, JSON, delivery.enqueued_at)
        entry.delivery_count = delivery.delivery_count
        return entry

    patch.setattr(MemoryQueue, "acknowledge", acknowledge)


@planted_fault("delay")
def delays_are_forgotten(patch: pytest.MonkeyPatch) -> Given:
    class Hasty(Wrong):
        async def _settle(self, delivery: Any, settlement: Any) -> None:
            if isinstance(settlement, Return) and settlement.delay:
                settlement = Return(0.0, settlement.charge)
            await super()._settle(delivery, settlement)

    return {"store": Hasty}


@planted_fault("attempts", faults=CRASHES)
def lost_leases_are_not_charged(patch: pytest.MonkeyPatch) -> None:
    real = Entry.again
    patch.setattr(Entry, "again", lambda self, charge: real(self, charge=charge and self.place != GONE))


@planted_fault("lease kept")
def receipts_are_refused_too_early(patch: pytest.MonkeyPatch) -> None:
    real = MemoryQueue.leased

    def leased(self: Any, delivery: Any, now: float) -> Any:
        return real(self, delivery, now + 15)

    patch.setattr(MemoryQueue, "leased", leased)
