"""``Presence``: says in its mailbox that a loop works on it, so that ``mailbox.workers()`` finds it.

It writes a record as the loop starts, and a second after the loop was paused, resumed, told to stop or given another
concurrency. Every 20 seconds it writes what is new, as the messages in hand. Where nothing is new it writes every 40 seconds
only, as many loops of a process are idle for most of the time. It deletes the record as the loop ends.

A failed write is made again 10 seconds later, so that the record outlives it. During a longer outage of the store the record
expires, and the next write that succeeds brings it back.

It has no task of its own: an alarm of its worker looks at what is new, and starts a task for a write.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import anyio

import mainspring
from mainspring.core import clock, random
from mainspring.core.clock import loop_clock
from mainspring.errors import MainspringError
from mainspring.mailbox.records import WORKER, RecordWrite
from mainspring.mailbox.workers import GONE_AFTER, TELL_EVERY, WorkerState, WorkerStatus, worker_name
from mainspring.runtime.cancellation import SpuriousAsError
from mainspring.worker.delivery import Phase

if TYPE_CHECKING:
    from mainspring.mailbox.mailbox import Mailbox
    from mainspring.runtime.interval import Alarms
    from mainspring.worker.slots import Admission, Slots

RENEW_AFTER: Final = 1.5 * TELL_EVERY
"""The age in seconds from which on a record is written also if nothing is new: by every second look, which may come late."""
TRY_AGAIN_IN: Final = TELL_EVERY / 2
"""Seconds after a failed write until the next one, which still comes before the record expires."""
TELL_CHANGES_IN: Final = 1.0
"""Seconds after a change until it is written: several are one write, and a loop that ends at once writes none."""
TOLD_AFTER: Final = 1.0
"""Seconds that a handler must have had a message for its id to be in the record."""
MOST_TOLD: Final = 100
"""The most ids in a record."""
FORGET_WITHIN: Final = 0.5
"""Seconds that the deletion may take at the end of the loop."""


class Presence:
    """The record of one run of a loop, of a group or of none. ``alarms`` are those of its worker."""

    def __init__(
        self,
        name: str,
        group: str | None,
        mailbox: Mailbox[Any, Any],
        admission: Admission,
        slots: Slots,
        alarms: Alarms,
    ) -> None:
        self._name = name
        self._group = group
        self._mailbox = mailbox
        self._admission = admission
        self._slots = slots
        self._started_at = clock.utc_now()
        self._key = f"{worker_name()} {random.token()}"
        self._alarms = alarms
        self._alarm = alarms.alarm(self._look)
        self._clock = loop_clock()
        self._told: WorkerStatus | None = None
        self._told_at = 0.0
        self._is_writing = False

    def begin(self) -> None:
        """Keep the record from now on, where the store keeps records."""
        if self._mailbox.capabilities.records:
            self._alarm.wake_by(self._clock())

    def change(self) -> None:
        """Write the record soon, as its values have changed."""
        if self._alarm.due < math.inf or self._is_writing:  # it has begun
            self._alarm.wake_by(self._clock() + TELL_CHANGES_IN)

    async def end(self) -> None:
        """Delete the record. No alarm may ring any more."""
        if self._told is not None:
            with anyio.move_on_after(FORGET_WITHIN, shield=True):
                await self._write(RecordWrite(WORKER, self._key, None))

    def _look(self, overslept: float) -> float:
        now = self._clock()
        if self._is_writing:
            return now + TELL_CHANGES_IN
        status = self._status()
        if not self._is_known(status):
            self._is_writing = True
            self._alarms.start_soon(self._tell, status)
        return now + TELL_EVERY

    async def _tell(self, status: WorkerStatus) -> None:
        try:
            if await self._write(RecordWrite(WORKER, self._key, status.write(), GONE_AFTER)):
                self._told, self._told_at = status, self._clock()
            else:
                self._alarm.wake_by(self._clock() + TRY_AGAIN_IN)
        finally:
            self._is_writing = False

    def _is_known(self, status: WorkerStatus) -> bool:
        """True if the record says the same, and will not expire before the next look and a second try."""
        if self._told is None or self._clock() - self._told_at >= RENEW_AFTER:
            return False
        return replace(status, last_seen=self._told.last_seen) == self._told

    def _status(self) -> WorkerStatus:
        now, state = self._clock(), WorkerState.RUNNING
        if self._admission.stopped:
            state = WorkerState.DRAINING
        elif self._admission.paused:
            state = WorkerState.PAUSED
        in_hand = list(self._slots.deliveries)
        long = [each for each in in_hand if each.phase == Phase.HANDLING and now - each.started >= TOLD_AFTER]
        return WorkerStatus(
            worker=worker_name(),
            loop=self._name,
            group=self._group,
            state=state,
            concurrency=self._slots.concurrency,
            in_flight=len(in_hand),
            version=mainspring.__version__,
            started_at=self._started_at,
            last_seen=clock.utc_now(),
            jobs={each.message.id: each.message.delivery_count for each in long[:MOST_TOLD]},
        )

    async def _write(self, write: RecordWrite) -> bool:
        """Return True if the store has confirmed it."""
        try:
            self._mailbox.check_open()
            async with SpuriousAsError():
                await self._mailbox.backend.write_record(write)
        except (MainspringError, OSError):
            return False
        return True
