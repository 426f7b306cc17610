"""``LeaseKeeper``: renews the leases of a worker's messages, from their delivery to their settlement."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import anyio

from mainspring.errors import ReceiptHandleExpiredError, describe
from mainspring.events import LeaseLost, LeaseRenewalFailed, LeaseRenewalRecovered
from mainspring.runtime.cancellation import SpuriousAsError
from mainspring.runtime.retry import Retries
from mainspring.worker.delivery import Phase
from mainspring.worker.outcome import Cause

if TYPE_CHECKING:
    from collections.abc import Collection

    from mainspring.core.dispatcher import Dispatcher
    from mainspring.policies import LeasePolicy
    from mainspring.runtime.interval import Alarms
    from mainspring.worker.delivery import Delivery
    from mainspring.worker.store_health import StoreHealth

SETTLE_TIMEOUT = 30.0
"""Seconds after which a settlement that hangs is given up."""


class LeaseKeeper:
    """One alarm for all the leases of a worker; each renewal is a task of its own, so that a slow one holds up no other.

    A renewal is due when ``policy.fraction`` of the lease has passed. Trust in a lease counts from the instant at which its
    claim or renewal *began*: the store's own count cannot have begun earlier. When that trust ends, or the store says the
    lease is lost, the handler is cancelled, so that no two workers run one message.
    """

    def __init__(
        self,
        name: str,
        deliveries: Collection[Delivery],
        policy: LeasePolicy,
        visibility: float,
        dispatcher: Dispatcher,
        store_health: StoreHealth,
        alarms: Alarms,
    ) -> None:
        self._name = name
        self._store_health = store_health
        self._deliveries = deliveries
        self._policy = policy
        self._visibility = visibility
        self._period = visibility * policy.fraction
        self._first = min(SETTLE_TIMEOUT, self._period if policy.renew != "never" else visibility)
        self._dispatcher = dispatcher
        self._alarm = alarms.alarm(self._look)
        self._alarms = alarms
        self._failures = 0
        """How many renewals have failed since the mailbox was last known to answer."""
        self._retrying: set[Delivery] = set()
        """The deliveries whose renewals are being tried again."""

    def track(self, deliveries: Collection[Delivery]) -> None:
        """Begin to keep the leases of runs that were just claimed."""
        if self._failures:
            self._note_answer()
        until_due = self._period if self._policy.renew != "never" else self._visibility
        oldest = math.inf
        for delivery in deliveries:
            delivery.renew_at = delivery.renewed_at + until_due
            if delivery.renewed_at < oldest:
                oldest = delivery.renewed_at
        if oldest + self._first < self._alarm.due:
            self._alarm.wake_by(oldest + self._first)

    def revoke(self, message_ids: Collection[str]) -> None:
        """End the handlers of these messages, which were cancelled by their ids; their leases have ended."""
        for delivery in list(self._deliveries):
            if delivery.message_id in message_ids:
                delivery.revoke()

    def _look(self, overslept: float) -> float:
        """Start what is due, and say when to look again: soon enough for a settlement that hangs."""
        now = anyio.current_time()
        due = now + SETTLE_TIMEOUT if self._deliveries else math.inf
        for delivery in list(self._deliveries):
            if delivery.phase == Phase.SETTLING:
                limit = delivery.settling_since + SETTLE_TIMEOUT
                if now >= limit:  # the very sum that is waited for: a difference may round to the other side of it
                    delivery.give_up_settling()
                    continue
                due = min(due, limit)
            if delivery.renew_at <= now:
                self._attend(delivery, now)
            due = min(due, delivery.renew_at)
        return due

    def _attend(self, delivery: Delivery, now: float) -> None:
        message = delivery.message
        if delivery.phase <= Phase.HANDLING and message.is_settled and not message.is_settling:
            # The handler has settled it by itself. If that fails, its lease matters again.
            delivery.renew_at = now + self._period
        elif now >= delivery.trusted_until:
            self._lose(delivery)
        elif (
            self._policy.renew == "on-beat" and delivery.phase == Phase.HANDLING and not self._has_beaten(delivery, now)
        ):
            # Look again soon, and let the lease run out if it stays so.
            delivery.renew_at = min(now + self._period / 4, delivery.trusted_until)
        else:
            delivery.renew_at = math.inf  # under way
            self._alarms.start_soon(self._renew, delivery)

    def _has_beaten(self, delivery: Delivery, now: float) -> bool:
        """True if the handler has given a sign of life since the last renewal. Its start does not count as one.

        A handler that still waits for a worker cannot give any, and is not stuck.
        """
        return delivery.waits or now - delivery.beat_age() > max(delivery.renewed_at, delivery.started)

    def _note_answer(self, *, again: bool = False) -> None:
        """Note that the mailbox has answered. ``again``: it has renewed a lease whose renewals had failed."""
        self._store_health.answered()
        if self._failures and (again or not self._retrying):
            failures, self._failures = self._failures, 0
            self._dispatcher.dispatch(LeaseRenewalRecovered(self._name, failures))

    async def _renew(self, delivery: Delivery) -> None:
        try:
            await self._renew_or_lose(delivery)
        finally:
            self._retrying.discard(delivery)

    async def _renew_or_lose(self, delivery: Delivery) -> None:
        retries = Retries(initial=self._period / 16, maximum=self._period / 2)
        while delivery.phase != Phase.DONE:
            began = anyio.current_time()
            if began >= delivery.trusted_until:
                self._lose(delivery)
                return
            try:
                # One try may not use up what is left: a lost packet would lose the lease.
                async with SpuriousAsError():
                    with anyio.fail_after(min(self._period, delivery.trusted_until - began)):
                        await delivery.message.renew(self._visibility)
            except ReceiptHandleExpiredError:
                if delivery.phase == Phase.HANDLING and delivery.message.is_settling:
                    # The settlement may be what has ended the lease, and tells soon.
                    delivery.renew_at = delivery.trusted_until
                    self._alarm.wake_by(delivery.renew_at)
                else:
                    self._lose(delivery)
                return
            except Exception as failed:  # whatever it is, the handlers go on as long as their leases do
                error = failed
            else:
                delivery.renewed_at = began
                delivery.trusted_until = max(delivery.trusted_until, began + self._visibility)
                delivery.renew_at = began + self._period
                self._alarm.wake_by(delivery.renew_at)
                self._note_answer(again=retries.failures > 0)
                return
            self._retrying.add(delivery)
            try:
                await self._back_off(delivery, error, retries.failed())
            finally:
                del error  # its traceback refers to this frame

    async def _back_off(self, delivery: Delivery, error: Exception, wait: float) -> None:
        """Wait before the next try, at most as long as the lease lasts."""
        now = anyio.current_time()
        left = max(0.0, delivery.trusted_until - now)
        first, self._failures = not self._failures, self._failures + 1
        self._store_health.failed(error)
        self._dispatcher.dispatch(LeaseRenewalFailed(self._name, delivery.message_id, describe(error), left, first))
        await anyio.sleep(min(wait, left))

    def _lose(self, delivery: Delivery) -> None:
        delivery.renew_at = math.inf
        message = delivery.message
        if delivery.lost or delivery.phase >= Phase.ENDED or (message.is_settled and not message.is_settling):
            return  # its settlement tells
        delivery.lost = True
        delivery.cancel(Cause.LEASE_LOST)
        self._dispatcher.dispatch(LeaseLost(self._name, delivery.message_id))
