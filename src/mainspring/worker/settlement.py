"""``Settler``: writes the outcome of a delivery, as long as its lease is trusted."""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING, Any

import anyio

from mainspring.core import random
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
)
from mainspring.events import SettlementDelayed, SettlementFailed, SettlementRecovered
from mainspring.mailbox.message import Ack, Return
from mainspring.policies import backoff
from mainspring.worker.outcome import LOST, Decision, as_settled, is_unanswered

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from mainspring.events import Dispatcher, MessageFinished
    from mainspring.mailbox.mailbox import Mailbox
    from mainspring.mailbox.message import Envelope, Message
    from mainspring.worker.delivery import Run
    from mainspring.worker.store_health import Contact

GRACE = 5.0
"""Seconds that a settlement outside the normal course (after a cancellation, at the end) may take."""

REPLY_TIMEOUT = 15.0
"""Seconds after which a reply that could not be sent is not tried again: while the settlement has time for a failure."""


LATE_REPLY_TIMEOUT = GRACE - 1.0
"""Seconds that a reply may take whose message the handler has acknowledged by itself."""

NO_RESULT = "the handler acknowledged the message, and was cancelled before it had a result"

_log = Logger("mainspring.message")


def bounded(*, shield: bool = True) -> anyio.CancelScope:
    """A scope for settlements that must be made although everything else is being cancelled, but not for ever."""
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
        judge: Callable[[Run, BaseException], Decision],
        contact: Contact,
    ) -> None:
        self._name = name
        self._contact = contact
        self._mailbox = mailbox
        self._dispatcher = dispatcher
        self._judge = judge
        self._joins = True
        self._failures = 0
        """How many settlements have failed, to be tried again, since the mailbox was last known to take them."""
        self._retrying = 0
        """How many are being tried again."""

    def tell(self, kind: type[MessageFinished], run: Run, decision: Decision, now: float) -> None:
        """Dispatch how a delivery ended."""
        message, settlement, error = run.message, decision.settlement, decision.error
        returned = settlement if isinstance(settlement, Return) else None
        fault = None if isinstance(error, (Retry, Reject, ReplyError)) else error  # those are instructions
        self._dispatcher.dispatch(
            kind(
                self._name,
                message.id,
                message.receipt_handle,
                decision.outcome,
                now - run.started,
                message.attempt,
                error=None if error is None else describe(error),
                charged=returned is None or returned.charge,
                retry_in=None if returned is None else returned.delay,
                where="" if fault is None else where_raised(fault),
                traceback="" if fault is None else "".join(traceback.format_exception(fault)),
                error_type=None if fault is None else type(fault).__qualname__,
                queue_seconds=message._queue_seconds() if message.delivery_count == 1 else None,  # noqa: SLF001 - this package's own
            )
        )

    def cut_off(self, run: Run, decision: Decision) -> None:
        """Say that a settlement was given up half-way: it may or may not have been written."""
        error = "the mailbox did not answer in time, or the loop or its task was cancelled"
        self._dispatcher.dispatch(SettlementFailed(self._name, run.message_id, decision.outcome, error))

    async def acknowledge(self, messages: list[Message[Any, Any]]) -> Collection[int]:
        """Acknowledge them together; the numbers of those that are not, and are to be settled each by itself."""
        try:
            refused = await self._mailbox.acknowledge_many(messages)
        except Exception as error:
            if self._joins:  # once, until it works again: what else fails tells of itself
                text = "%s: %d messages could not be acknowledged together, and so each is by itself: %s%s"
                _log.warning(text, self._name, len(messages), describe(error), _where(error))
            self._joins = False
            return range(len(messages))
        self._joins = True
        self.written()
        return refused

    def written(self, *, again: bool = False) -> None:
        """The mailbox took one; that says nothing of others that it does not take, unless it was one of those."""
        self._contact.made()
        if self._failures and (again or not self._retrying):
            failures, self._failures = self._failures, 0
            self._dispatcher.dispatch(SettlementRecovered(self._name, failures))

    async def settle_again(self, run: Run, decision: Decision, error: Exception) -> Decision:
        """What becomes of a delivery whose settlement failed with ``error``: it is written yet, as ``decision`` says, or lost.

        Where a reply cannot be sent, at all or for ``REPLY_TIMEOUT``, it becomes what a failure of the handler would.
        """
        self._retrying += 1
        try:
            return await self._until_written(run, decision, error)
        finally:
            self._retrying -= 1

    async def _until_written(self, run: Run, decision: Decision, error: Exception) -> Decision:
        failures = 0
        try:
            while True:
                if isinstance(error, ReceiptHandleExpiredError):
                    return LOST
                if isinstance(error, MessageSettledError) and run.message.settlement is not None:  # while this waited
                    return await self.as_settled(run, decision)
                if _is_hopeless(run, decision, error):
                    decision = self._judge(run, error)
                elif not _retryable(error) or anyio.current_time() >= run.trusted_until:
                    self._dispatcher.dispatch(
                        SettlementFailed(self._name, run.message_id, decision.outcome, describe(error))
                    )
                    return LOST
                else:
                    failures += 1
                    await self._pause(run, decision, error, failures)
                try:
                    assert decision.settlement is not None
                    await run.message.settle(decision.settlement)
                except Exception as again:
                    error = again
                else:
                    self.written(again=failures > 0)
                    return decision
        finally:
            del error, decision  # the error's traceback refers to this frame

    async def as_settled(self, run: Run, decision: Decision) -> Decision:
        """What the handler itself has made of its message; its end, which changes nothing of that, is told all the same.

        What it returned is sent by itself, where somebody waits for that.
        """
        settlement = run.message.settlement
        assert settlement is not None
        error = decision.error
        if error is not None and not isinstance(error, ReplyError):
            text = "%s: the handler settled message %s by itself and then failed, which is not tried again: %s%s"
            _log.warning(text, self._name, run.message_id, describe(error), _where(error))
        if is_unanswered(settlement):
            own = decision.settlement
            reply = own.reply if isinstance(own, Ack) else self._mailbox._failure_reply(run.message, error or NO_RESULT)  # noqa: SLF001 - this package's own
            if reply is not None:
                await self._send(run, reply)
        return as_settled(settlement)

    async def _send(self, run: Run, reply: Envelope) -> None:
        """Send a reply whose message is done: once, as nothing is left that could be tried again."""
        try:
            with anyio.fail_after(LATE_REPLY_TIMEOUT):
                await self._mailbox._send_late_reply(reply)  # noqa: SLF001 - this package's own
        except (MainspringError, OSError) as error:
            text = "%s: what the handler returned for message %s, which it had settled by itself, was not sent: %s"
            _log.warning(text, self._name, run.message_id, describe(error))

    async def _pause(self, run: Run, decision: Decision, error: Exception, failures: int) -> None:
        left = run.trusted_until - anyio.current_time()
        wait = backoff(failures, initial=0.1, maximum=5.0, factor=2.0, jitter="full", rng=random.rng())
        wait = max(0.0, min(wait, left))
        first, self._failures = not self._failures, self._failures + 1
        reply = getattr(decision.settlement, "reply", None)
        if reply is None or self._mailbox._is_here(reply.reply_to or ""):  # else it may be the requester's that is away  # noqa: SLF001 - this package's own
            self._contact.failed(error)
        self._dispatcher.dispatch(
            SettlementDelayed(self._name, run.message_id, decision.outcome, describe(error), wait, first)
        )
        await anyio.sleep(wait)


def _is_hopeless(run: Run, decision: Decision, error: Exception) -> bool:
    """Whether it is a reply that will not be sent: then its message has failed, and need not wait for its lease to end."""
    if not isinstance(decision.settlement, Ack) or decision.settlement.reply is None:
        return False
    return not _retryable(error) or anyio.current_time() >= run.settling_since + REPLY_TIMEOUT


def _where(error: BaseException) -> str:
    where = where_raised(error)
    return f" ({where})" if where else ""


def _retryable(error: Exception) -> bool:
    return isinstance(error, OSError) or (isinstance(error, MainspringError) and error.retryable)
