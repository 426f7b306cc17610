"""``Ends``: sees messages out whose handlers have ended: settled, alone or together, counted, told, and their places freed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from mainspring.events import MessageFinished, MessageNotAcknowledged
from mainspring.runtime.scope import nobody_asked
from mainspring.worker.delivery import Phase
from mainspring.worker.outcome import DONE, LOST, RELEASED, Decision, Outcome

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection

    from mainspring.events import Dispatcher, Tally
    from mainspring.runtime.heartbeat import Heartbeat
    from mainspring.worker.delivery import Run
    from mainspring.worker.settlement import Settler
    from mainspring.worker.slots import Places


class Ends:
    """The ends of a worker's messages."""

    def __init__(
        self,
        settler: Settler,
        places: Places,
        *,
        dispatcher: Dispatcher,
        heartbeat: Heartbeat,
        outcomes: Tally,
        clock: Callable[[], float],
    ) -> None:
        self.done: list[Run] = []
        """Those that are to be acknowledged together: whoever adds one sees to it that somebody does so soon."""
        self._settler = settler
        self._places = places
        self._dispatcher = dispatcher
        self._heartbeat = heartbeat
        self._outcomes = outcomes
        self._clock = clock

    async def acknowledge(self, scope: anyio.CancelScope) -> None:
        """Acknowledge those that are ``done``, in one call; ``scope``, in which this runs, is cancelled where that hangs."""
        runs, self.done = self.done, []
        now = self._clock()
        for run in runs:
            run.scope = scope
        self._leave(runs, now)
        try:
            refused = await self._settler.acknowledge([run.message for run in runs])
        except BaseException:
            self._cut_off(runs, DONE, now)
            raise
        if not refused:
            self._left(runs, DONE, now)
            return
        self._left([run for number, run in enumerate(runs) if number not in refused], DONE, now)
        await self._settle_each([runs[number] for number in refused], now)

    async def _settle_each(self, runs: list[Run], now: float) -> None:
        """Settle each by itself whose acknowledgement was refused: it is tried again, or lost."""
        try:
            async with anyio.create_task_group() as tasks:
                for run in runs:
                    tasks.start_soon(self._settle_alone, run, now)
        finally:  # a task that is cancelled before it begins does nothing
            self._cut_off([run for run in runs if run.phase is not Phase.DONE], DONE, now)

    async def _settle_alone(self, run: Run, now: float) -> None:
        try:
            await self._settle(run, DONE, now)
        except anyio.get_cancelled_exc_class():
            if not await nobody_asked():  # else the others go on
                raise

    def finish(self, run: Run, decision: Decision) -> Awaitable[None]:
        """Write the outcome, count it, and free the place."""
        now = self._clock()
        self._leave((run,), now)
        return self._settle(run, decision, now)

    async def finish_late(self, run: Run) -> None:
        """Settle a run whose handler was cancelled, unless its settlement was already begun."""
        if run.phase <= Phase.ENDED:
            decision = run.decision or RELEASED
            run.decision = run.error = None  # the frames of its error refer to the run
            await self.finish(run, decision)

    async def _settle(self, run: Run, decision: Decision, now: float) -> None:
        """Write the outcome, or what came true instead: see :meth:`Settler.as_settled` and :meth:`Settler.settle_again`."""
        message = run.message
        try:
            if message.is_settled and not run.lost:  # else it was cut off, as its lease was lost meanwhile
                decision = await self._settler.as_settled(run, decision)
            elif decision.settlement is not None:
                try:
                    await message.settle(decision.settlement)
                except Exception as error:
                    decision = await self._settler.settle_again(run, decision, error)
                else:
                    self._settler.written()
            self._left((run,), decision, now)
        except BaseException:
            if run.phase is not Phase.DONE:
                self._cut_off((run,), decision, now)
            raise
        finally:
            del decision  # the traceback of its error may refer to this frame

    def _leave(self, runs: Collection[Run], now: float) -> None:
        """Their settlement begins."""
        for run in runs:
            run.phase = Phase.SETTLING
            run.settling_since = now
        self._heartbeat.beat()
        self._places.leave(len(runs))

    def _left(self, runs: Collection[Run], decision: Decision, now: float) -> None:
        """They have ended so: free their places, and count and tell them."""
        if not runs:
            return
        for run in runs:
            run.phase = Phase.DONE
        self._places.left(runs)
        self._outcomes[decision.outcome] += len(runs)
        kind = MessageFinished if decision.outcome is Outcome.ACKNOWLEDGED else MessageNotAcknowledged
        if self._dispatcher.wants(kind):
            for run in runs:
                self._settler.tell(kind, run, decision, now)

    def _cut_off(self, runs: Collection[Run], decision: Decision, now: float) -> None:
        """Their settlement was given up half-way: it may or may not have been written."""
        for run in runs:
            self._settler.cut_off(run, decision)
        self._left(runs, LOST, now)
