"""``Run``: one delivery in the hands of a worker, from its claim to its settlement."""

from __future__ import annotations

import math
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import anyio

from mainspring.core.clock import thread_clock, utc_clock
from mainspring.core.tracebacks import where, where_thread
from mainspring.errors import DeadlineExceededError, HandlerStalledError, HandlerTimeoutError
from mainspring.worker.outcome import CANCELLED, LOST, Cause

if TYPE_CHECKING:
    from collections.abc import Callable

    from mainspring.mailbox.message import Message
    from mainspring.runtime.deadline import Deadline
    from mainspring.runtime.heartbeat import Heartbeat
    from mainspring.worker.outcome import Decision


class Clocks:
    """The clocks of the event loop that is running, to be read in any thread."""

    __slots__ = ("now", "utc_now")

    def __init__(self) -> None:
        self.now = thread_clock()
        self.utc_now = utc_clock()


class Phase(IntEnum):
    """Where a run is; only a run that is being handled can be cancelled."""

    WAITING = 0
    HANDLING = 1
    ENDED = 2
    SETTLING = 3
    DONE = 4


class Run:
    """A delivery with its lease and its signs of life. The watchdog sees it as one of its subjects."""

    __slots__ = (
        "_beaten_elsewhere",
        "_clock",
        "_due",
        "_due_at",
        "_heartbeat",
        "_left",
        "_timeout_at",
        "cause",
        "clocks",
        "coroutine",
        "deadline",
        "decision",
        "due",
        "error",
        "last_beat",
        "lost",
        "message",
        "name",
        "phase",
        "progress_made",
        "renew_at",
        "renewed_at",
        "revoked",
        "scope",
        "settling_since",
        "shutting_down",
        "started",
        "thread_id",
        "trusted_until",
        "waits",
    )

    clocks: Clocks

    def __init__(
        self,
        name: str,
        clock: Callable[[], float],
        heartbeat: Heartbeat,
        shutting_down: anyio.Event,
        lease_seconds: float,
        now: float,
        message: Message[Any, Any],
    ) -> None:
        leased_at = message.leased_at
        self.renewed_at = now if leased_at is None else leased_at
        self.trusted_until = self.renewed_at + lease_seconds
        self.name = name
        self.message = message
        self.shutting_down = shutting_down
        self.phase = Phase.WAITING
        self.cause: Cause | None = None
        self.error: BaseException | None = None
        self.decision: Decision | None = None
        self.settling_since = 0.0
        self.scope: anyio.CancelScope | None = None
        self.coroutine: Any = None
        self.thread_id: int | None = None
        self.deadline: float | None = None
        self.due: Deadline | None = None
        self.lost = False
        self.revoked = False
        self.started = now
        self.last_beat = now
        self.renew_at = math.inf
        self.progress_made: tuple[float, float | None] | None = None
        self._clock = clock
        self._heartbeat = heartbeat
        self._beaten_elsewhere = False
        self._timeout_at = math.inf
        self.waits = False
        """Whether it waits for a worker of its pool: its handler has not begun."""

    # ------------------------------------------------------------------------------------------------ signs of life

    @property
    def message_id(self) -> str:
        """The message's id."""
        return self.message.id

    @property
    def done(self) -> bool:
        """Whether its handler has ended (its settlement has its own deadline)."""
        return self.phase >= Phase.ENDED

    def beat(self) -> None:
        """A sign of life, its loop's too; from the event loop or from the handler's thread."""
        self._heartbeat.beat()
        try:
            self.last_beat = anyio.current_time()
        except RuntimeError:  # in the handler's thread: stamped when somebody next looks
            self._beaten_elsewhere = True

    def beat_age(self) -> float:
        """Seconds since the last beat."""
        now = self._clock()
        if self._beaten_elsewhere:
            self._beaten_elsewhere = False
            self.last_beat = now
        return max(0.0, now - self.last_beat)

    def progress(self, done: float, total: float | None) -> None:
        """How far the work is."""
        self.progress_made = (done, total)
        self.beat()

    def where(self) -> str:
        """The line it stands on: of its coroutine, or of its thread where it runs in one; or that it is being settled."""
        if self.phase is Phase.SETTLING:
            return f"the settlement of message {self.message_id}: its mailbox has not answered"
        return where_thread(self.thread_id) if self.thread_id is not None else where(self.coroutine)

    def remaining(self) -> float | None:
        """Seconds until ``handler_timeout`` strikes or the message's own deadline passes, or None; in any thread."""
        return None if self.deadline is None else max(0.0, self.deadline - self.clocks.now())

    # ------------------------------------------------------------------------------------------------- cancellation

    def end_within(self, timeout: float | None, due: Deadline | None) -> None:
        """Have the handler cancelled after ``timeout`` seconds, or at its message's deadline, whichever is earlier."""
        now = self._clock()
        self._timeout_at = math.inf if timeout is None else now + timeout
        self._due, self._due_at = due, math.inf if due is None else now + due.remaining()
        self._arm()

    def _arm(self) -> None:
        assert self.scope is not None
        self.due = self._due if self._due_at < self._timeout_at else None
        end = min(self._timeout_at, self._due_at)
        self.deadline = None if end == math.inf else end
        self.scope.deadline = end

    def wait_for_worker(self, waits: bool) -> None:
        """It has to wait for a worker, or has one now: in between its timeout stands still, as it is not at work."""
        self.waits = waits
        now = self._clock()
        if waits:
            self._left = self._timeout_at - now
        else:
            self.started = self.last_beat = now
        if self._left < math.inf:
            self._timeout_at = math.inf if waits else now + self._left
            self._arm()

    def cancel(self, cause: Cause) -> bool:
        """Cancel the handler, if it is being handled and nobody has cancelled it yet; whether that was so."""
        if self.phase is not Phase.HANDLING or self.cause is not None or self.scope is None:
            return False
        self.cause = cause
        self.scope.cancel()
        return True

    def revoke(self) -> None:
        """Its message was cancelled: nothing is to be done for it any more, and nothing to be settled."""
        if self.phase < Phase.ENDED and not self.message.is_settled:
            self.lost = self.revoked = True
            self.renew_at = math.inf
            self.cancel(Cause.CANCELLED)

    @property
    def fate(self) -> Decision:
        """What to call its end, where it is ``lost``."""
        return CANCELLED if self.revoked else LOST

    def stall(self, error: HandlerStalledError) -> None:
        """The watchdog's verdict: cancel it, as a failed attempt."""
        self.error = error
        del error  # on trio the traceback of the cancellation, which becomes its cause, refers to this frame
        self.cancel(Cause.STALLED)

    def give_up_settling(self) -> None:
        """Stop waiting for a settlement that hangs; the message comes again when its lease ends."""
        if self.phase is Phase.SETTLING and self.scope is not None:
            self.scope.cancel()

    def too_late(self, due: Deadline) -> DeadlineExceededError:
        """The error of a message whose deadline has passed."""
        return DeadlineExceededError(f"the deadline of the message, {due}, passed before it was done")

    def timed_out(self, seconds: float) -> HandlerTimeoutError:
        """The error of a handler that ``handler_timeout`` has cancelled."""
        return HandlerTimeoutError(f"the handler ran longer than its handler_timeout of {seconds:g} s")
