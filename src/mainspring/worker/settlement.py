"""Settlement: the outcome of a delivery is written while its lease is held, alone or together with others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio

from mainspring.core.loggers import Logger
from mainspring.core.tracebacks import where_raised
from mainspring.errors import (
    MainspringError,
    MessageSettledError,
    ReceiptHandleExpiredError,
    Reject,
    ReplyError,
    Retry,
    describe,
    traceback_of,
)
from mainspring.events import (
    MessageFinished,
    MessageNotAcknowledged,
    SettlementDelayed,
    SettlementFailed,
    SettlementRecovered,
)
from mainspring.mailbox import replies
from mainspring.mailbox.message import Ack, Dead, Nack
from mainspring.runtime.cancellation import is_spurious_cancellation
from mainspring.runtime.retry import Retries
from mainspring.worker.delivery import Phase
from mainspring.worker.outcome import DONE, LOST, RELEASED, Decision, Outcome, as_settled, is_unanswered

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from mainspring.core.dispatcher import Dispatcher, Tally
    from mainspring.mailbox.mailbox import Mailbox
    from mainspring.mailbox.message import Envelope, Message, Result, Settlement
    from mainspring.runtime.heartbeat import Heartbeat
    from mainspring.worker.delivery import Delivery, Runs
    from mainspring.worker.slots import Slots
    from mainspring.worker.store_health import StoreHealth


GRACE = 5.0
"""Seconds that a settlement outside the normal course (after a cancellation, at the end) may take."""

REPLY_TIMEOUT = 15.0
"""Seconds after which a reply that could not be sent is not tried again: while the settlement has time for a failure."""


LATE_REPLY_TIMEOUT = GRACE - 1.0
"""Seconds that a reply may take whose message the handler has acknowledged by itself."""

NO_RESULT = "the handler acknowledged the message, and was cancelled before it had a result"

_log = Logger("mainspring.message")


def bounded(*, shield: bool = True) -> anyio.CancelScope:
    """Return a scope for settlements that must be made although everything else is being cancelled, but not for ever."""
    return anyio.CancelScope(deadline=anyio.current_time() + GRACE, shield=shield)


class Settler:
    """Writes settlements. A store that cannot be reached is tried again while the lease is trusted.

    An outcome that cannot be written is no crash: the message stays where it is and comes again when its lease ends.
    """

    def __init__(
        self,
        name: str,
        mailbox: Mailbox[Any, Any],
        dispatcher: Dispatcher,
        runs: Runs,
        store_health: StoreHealth,
    ) -> None:
        self._name = name
        self.store_health = store_health
        self._mailbox = mailbox
        self._dispatcher = dispatcher
        self._runs = runs
        self._joint_ack_failed = False
        self.failures = 0
        """How many settlements have failed, to be tried again, since the mailbox was last known to take them."""
        self._retrying = 0
        """How many are being tried again."""

    def tell(self, kind: type[MessageFinished], delivery: Delivery, decision: Decision) -> None:
        """Dispatch how a delivery ended."""
        message, settlement, error = delivery.message, decision.settlement, decision.error
        returned = settlement if isinstance(settlement, Nack) else None
        fault = None if isinstance(error, (Retry, Reject, ReplyError)) else error  # those are instructions
        self._dispatcher.dispatch(
            kind(
                self._name,
                message.id,
                message.receipt_handle,
                decision.outcome,
                delivery.settling_since - delivery.started if delivery.began else 0.0,
                message.attempt,
                error=None if error is None else describe(error),
                charged=returned is None or returned.charge,
                retry_in=None if returned is None else returned.delay,
                where="" if fault is None else where_raised(fault),
                traceback="" if fault is None else _trace_of(fault, settlement),
                error_type=None if fault is None else type(fault).__qualname__,
                queue_seconds=message.delivery.queue_seconds if message.delivery_count == 1 else None,
                began=delivery.began,
                handler=self._runs.handler_of(delivery),
            )
        )

    def cut_off(self, delivery: Delivery, decision: Decision) -> None:
        """Say that a settlement was given up half-way: it may or may not have been written."""
        error = "the mailbox did not answer in time, or the loop or its task was cancelled"
        self._dispatcher.dispatch(SettlementFailed(self._name, delivery.message_id, decision.outcome, error))

    async def acknowledge(self, messages: list[Message[Any, Any]]) -> Collection[int]:
        """Acknowledge messages together. Return the numbers of those to settle one by one, as they were refused."""
        try:
            refused = await self._mailbox.acknowledge_many(messages)
        except Exception as error:
            if not self._joint_ack_failed:  # logged once, until it works again: what else fails tells of itself
                text = "%s: %d messages could not be acknowledged together, and so each is by itself: %s%s"
                _log.warning(text, self._name, len(messages), describe(error), _where(error))
            self._joint_ack_failed = True
            return range(len(messages))
        self._joint_ack_failed = False
        self.written()
        return refused

    def written(self, *, again: bool = False) -> None:
        """Record a settlement that was written. Others may still fail: it ends their trouble if none is being retried, or if
        this one was (``again``)."""
        if not self.store_health.answers:
            self.store_health.answered()
        if self.failures and (again or not self._retrying):
            failures, self.failures = self.failures, 0
            self._dispatcher.dispatch(SettlementRecovered(self._name, failures))

    async def settle_again(self, delivery: Delivery, decision: Decision, error: Exception) -> Decision:
        """Retry a settlement that failed with ``error`` until it is written or the lease is no longer trusted.

        Return the decision that became true.

        Where a reply cannot be sent, at all or for ``REPLY_TIMEOUT``, it becomes what a failure of the handler would.
        """
        self._retrying += 1
        try:
            return await self._until_written(delivery, decision, error)
        finally:
            self._retrying -= 1

    async def _until_written(self, delivery: Delivery, decision: Decision, error: Exception) -> Decision:
        retries = Retries(initial=0.1, maximum=5.0)
        try:
            while True:
                if isinstance(error, ReceiptHandleExpiredError):
                    return LOST
                if isinstance(error, MessageSettledError) and delivery.message.settlement is not None:
                    # The handler's own code has settled it while this waited.
                    return await self.as_settled(delivery, decision)
                if _is_hopeless(delivery, decision, error):
                    decision = self._runs.judge(delivery, error)
                elif not _retryable(error) or anyio.current_time() >= delivery.trusted_until:
                    self._dispatcher.dispatch(
                        SettlementFailed(self._name, delivery.message_id, decision.outcome, describe(error))
                    )
                    return LOST
                else:
                    await self._pause(delivery, decision, error, retries.failed())
                try:
                    assert decision.settlement is not None
                    await delivery.message.settle(decision.settlement)
                except Exception as again:
                    error = again
                else:
                    self.written(again=retries.failures > 0)
                    return decision
        finally:
            del error, decision  # the error's traceback refers to this frame

    async def as_settled(self, delivery: Delivery, decision: Decision) -> Decision:
        """Return the outcome of a message that its handler has settled by itself.

        How the handler ended changes nothing of that: an error is logged. A result is sent as a reply of its own if the
        requester waits for one.
        """
        settlement = delivery.message.settlement
        assert settlement is not None
        error = decision.error
        if error is not None and not isinstance(error, ReplyError):
            text = "%s: the handler settled message %s by itself and then failed, which is not tried again: %s%s"
            _log.warning(text, self._name, delivery.message_id, describe(error), _where(error))
        if is_unanswered(settlement):
            own = decision.settlement
            reply = own.reply if isinstance(own, Ack) else replies.failure_reply(delivery.message, error or NO_RESULT)
            if reply is not None:
                await self._send(delivery, reply)
            if isinstance(own, Ack) and own.result is not None:
                await self._keep(delivery, own.result)
        return as_settled(settlement)

    async def _send(self, delivery: Delivery, reply: Envelope) -> None:
        """Send a reply whose message is done: once, as nothing is left that could be tried again."""
        try:
            with anyio.fail_after(LATE_REPLY_TIMEOUT):
                await replies.send_late(self._mailbox, reply)
        except (MainspringError, OSError) as error:
            text = "%s: what the handler returned for message %s, which it had settled by itself, was not sent: %s"
            _log.warning(text, self._name, delivery.message_id, describe(error))

    async def _keep(self, delivery: Delivery, result: Result) -> None:
        """Keep a result whose message is done: once, as for a reply."""
        from mainspring.mailbox import jobs

        try:
            with anyio.fail_after(LATE_REPLY_TIMEOUT):
                await jobs.keep_late(self._mailbox.backend, delivery.message_id, result)
        except (MainspringError, OSError) as error:
            text = "%s: what the handler returned for message %s, which it had settled by itself, was not kept: %s"
            _log.warning(text, self._name, delivery.message_id, describe(error))

    async def _pause(self, delivery: Delivery, decision: Decision, error: Exception, wait: float) -> None:
        wait = max(0.0, min(wait, delivery.trusted_until - anyio.current_time()))
        first, self.failures = not self.failures, self.failures + 1
        reply = getattr(decision.settlement, "reply", None)
        if reply is None or replies.is_local(self._mailbox, reply):  # else it may be the requester's that is away
            self.store_health.failed(error)
        self._dispatcher.dispatch(
            SettlementDelayed(self._name, delivery.message_id, decision.outcome, describe(error), wait, first)
        )
        await anyio.sleep(wait)


def _is_hopeless(delivery: Delivery, decision: Decision, error: Exception) -> bool:
    """True if it is a reply that will not be sent: then its message has failed, and need not wait for its lease to end."""
    if not isinstance(decision.settlement, Ack) or decision.settlement.reply is None:
        return False
    return not _retryable(error) or anyio.current_time() >= delivery.settling_since + REPLY_TIMEOUT


def _trace_of(error: BaseException, settlement: Settlement | None) -> str:
    return settlement.traceback if isinstance(settlement, Dead) else traceback_of(error)  # it takes long to write one


def _where(error: BaseException) -> str:
    where = where_raised(error)
    return f" ({where})" if where else ""


def _retryable(error: Exception) -> bool:
    return isinstance(error, OSError) or (isinstance(error, MainspringError) and error.retryable)


class Completion:
    """The ends of a worker's messages."""

    def __init__(
        self,
        settler: Settler,
        slots: Slots,
        *,
        dispatcher: Dispatcher,
        heartbeat: Heartbeat,
        outcomes: Tally,
        clock: Callable[[], float],
    ) -> None:
        self.done: list[Delivery] = []
        """Deliveries awaiting a joint ack. The slot that appends one must call :meth:`acknowledge`, or wake one that will."""
        self._settler = settler
        self._slots = slots
        self._dispatcher = dispatcher
        self._heartbeat = heartbeat
        self._outcomes = outcomes
        self._clock = clock

    async def acknowledge(self, scope: anyio.CancelScope) -> None:
        """Acknowledge the deliveries in ``done`` in one call. ``scope``, in which this runs, is cancelled if the call hangs."""
        deliveries, self.done = self.done, []
        now, settling = self._clock(), Phase.SETTLING
        for delivery in deliveries:
            delivery.scope, delivery.phase, delivery.settling_since = scope, settling, now
        self._heartbeat.beat()
        if self._slots.ordered:
            self._slots.leave(len(deliveries))
        try:
            refused = await self._settler.acknowledge([delivery.message for delivery in deliveries])
        except BaseException:
            self._cut_off(deliveries, DONE)
            raise
        if not refused:
            self._left(deliveries, DONE)
            return
        self._left([delivery for number, delivery in enumerate(deliveries) if number not in refused], DONE)
        # Each that was refused is tried again by itself, or lost.
        await self.finish_each([deliveries[number] for number in refused], DONE, begun=True)

    async def finish_each(self, deliveries: list[Delivery], decision: Decision, *, begun: bool = False) -> None:
        """Finish each, all at the same time, in this order: see :meth:`finish`."""
        try:
            async with anyio.create_task_group() as tasks:
                for delivery in deliveries:
                    tasks.start_soon(self._finish_alone, delivery, decision, begun)
                    await anyio.lowlevel.checkpoint()  # trio starts tasks in any order
        finally:  # a task that is cancelled before it begins does nothing
            unsettled = [delivery for delivery in deliveries if delivery.phase != Phase.DONE]
            self._cut_off(unsettled, decision)

    async def _finish_alone(self, delivery: Delivery, decision: Decision, begun: bool) -> None:
        try:
            await self.finish(delivery, decision, begun=begun)
        except anyio.get_cancelled_exc_class():
            if not await is_spurious_cancellation():  # else the others go on
                raise

    async def finish(self, delivery: Delivery, decision: Decision, *, begun: bool = False) -> None:
        """Write the outcome, or what came true instead, count it, and free the slot. ``begun``: its slot counts
        as free already."""
        if delivery.phase == Phase.WAITING:
            delivery.began = False
        if not begun:
            delivery.phase, delivery.settling_since = Phase.SETTLING, self._clock()
            self._heartbeat.beat()
            if self._slots.ordered:
                self._slots.leave(1)
        message, settler = delivery.message, self._settler
        try:
            if message.settlement is not None and not delivery.lost:  # if lost, a settlement of its own was cut off
                decision = await settler.as_settled(delivery, decision)
            elif decision.settlement is not None:
                try:
                    await message.settle(decision.settlement)
                except Exception as error:
                    decision = await settler.settle_again(delivery, decision, error)
                else:
                    if settler.failures or not settler.store_health.answers:
                        settler.written()
            self._left((delivery,), decision)
        except BaseException:
            if delivery.phase != Phase.DONE:
                self._cut_off((delivery,), decision)
            raise
        finally:
            del decision  # the traceback of its error may refer to this frame

    async def finish_late(self, delivery: Delivery) -> None:
        """Settle a run whose handler was cancelled, unless its settlement was already begun."""
        if delivery.phase <= Phase.ENDED:
            decision = delivery.decision or RELEASED
            delivery.decision = delivery.error = None  # the frames of its error refer to the run
            await self.finish(delivery, decision)

    def _left(self, deliveries: Collection[Delivery], decision: Decision) -> None:
        """Free the slots of these deliveries, which have ended so, and count and report them."""
        if not deliveries:
            return
        done = Phase.DONE
        for delivery in deliveries:
            delivery.phase = done
        self._slots.left(deliveries)
        self._outcomes[decision.outcome] += len(deliveries)
        kind = MessageFinished if decision.outcome is Outcome.ACKNOWLEDGED else MessageNotAcknowledged
        if self._dispatcher.wants(kind):
            for delivery in deliveries:
                self._settler.tell(kind, delivery, decision)

    def _cut_off(self, deliveries: Collection[Delivery], decision: Decision) -> None:
        """Report deliveries whose settlement was given up half-way: it may or may not have been written."""
        for delivery in deliveries:
            self._settler.cut_off(delivery, decision)
        self._left(deliveries, LOST)
