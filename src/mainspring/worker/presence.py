"""``Presence``: says in its mailbox that a loop works on it, so that ``mailbox.workers()`` finds it.

It writes a record as the loop starts, every 20 seconds, and a second after the loop was paused, resumed, told to stop or given
another concurrency. It deletes the record as the loop ends. A failed write is not repeated: during an outage of the store the
record expires, and the next write that succeeds brings it back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import anyio

import mainspring
from mainspring.core import clock, random
from mainspring.core.clock import loop_clock
from mainspring.errors import MainspringError
from mainspring.mailbox.records import WORKER, RecordWrite
from mainspring.mailbox.workers import GONE_AFTER, TELL_EVERY, WorkerState, WorkerStatus, worker_name
from mainspring.runtime.interval import Periodic
from mainspring.worker.delivery import Phase

if TYPE_CHECKING:
    from mainspring.mailbox.mailbox import Mailbox
    from mainspring.worker.slots import Admission, Slots

TELL_CHANGES_IN: Final = 1.0
"""Seconds after a change until it is written: several are one write, and a loop that ends at once writes none."""
TOLD_AFTER: Final = 1.0
"""Seconds that a handler must have had a message for its id to be in the record."""
MOST_TOLD: Final = 100
"""The most ids in a record."""
FORGET_WITHIN: Final = 0.5
"""Seconds that the deletion may take at the end of the loop."""


class Presence:
    """The record of one run of a loop, of a group or of none."""

    def __init__(
        self, name: str, group: str | None, mailbox: Mailbox[Any, Any], admission: Admission, slots: Slots
    ) -> None:
        self._name = name
        self._group = group
        self._mailbox = mailbox
        self._admission = admission
        self._slots = slots
        self._started_at = clock.utc_now()
        self._key = f"{worker_name()} {random.token()}"
        self._timer = Periodic(self._tell)
        self._clock = loop_clock()
        self._is_told = False

    def change(self) -> None:
        """Write the record soon, as its values have changed."""
        self._timer.wake_by(self._clock() + TELL_CHANGES_IN)

    async def run(self) -> None:
        """Keep the record until cancelled, and delete it."""
        self._timer.wake_by(self._clock())
        try:
            await self._timer.run_on(TELL_EVERY)
        finally:
            if self._is_told:
                with anyio.move_on_after(FORGET_WITHIN, shield=True):
                    await self._write(RecordWrite(WORKER, self._key, None))

    async def _tell(self, overslept: float) -> float:
        if await self._write(RecordWrite(WORKER, self._key, self._status().write(), GONE_AFTER)):
            self._is_told = True
        return self._clock() + TELL_EVERY

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
            await self._mailbox.backend.write_record(write)
        except (MainspringError, OSError):
            return False
        return True
