"""``Ticker``: sends the ticks of the schedules of a mailbox, beside one run of a loop.

There is no leader. Each loop of a ``Tasks`` has a ticker, which ends as soon as the loop takes no more work. It knows when
each schedule ticks next, and sleeps until the first of these times. What it knows is a hint only: it reads the records of what
is due, decides by them, and sends by a write on the condition that the record is still the one it has read (``schedules``).
Where another worker was first, the write is refused, and it reads anew. It then leaves the next tick of this schedule to that
worker for a moment. So one worker of the fleet writes, and the others read that it has.

About once a second it asks for the schedules that were changed, unless the store tells of them. If it declares some, it states
their definitions as it starts, and says every 30 seconds that they are in use. While the store does not answer, it tries again
with backoff; what comes due meanwhile is sent late, or missed. A schedule that it cannot send (the arguments do not fit, a
middleware fails) it leaves for a minute.
"""

from __future__ import annotations

import math
from heapq import heappop, heappush
from typing import TYPE_CHECKING

import anyio

from mainspring.core import clock, random
from mainspring.core.loggers import Logger
from mainspring.errors import MailboxClosedError, MainspringError
from mainspring.mailbox.records import SCHEDULE
from mainspring.runtime.retry import Retries
from mainspring.tasks.schedule_calls import calls_of
from mainspring.tasks.schedule_records import ScheduleRecords
from mainspring.tasks.schedules import DeclaringWorker, after_ticks, digest_of, due_ticks, is_ticked_here, restated
from mainspring.validation import counted

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mainspring.tasks.schedule_records import StoredSchedule
    from mainspring.tasks.tasks import Tasks

LOOK_EVERY = 1.0
"""Seconds between two looks for changed schedules, where there are schedules."""
LOOK_IDLE = 5.0
"""Seconds between two looks where there are none."""
LOOK_TOLD = 30.0
"""Seconds between two looks where the store tells of changes (``Capabilities.announces_records``)."""
LIST_EVERY = 300.0
"""Seconds after which all schedules are listed anew: the author of a change may have died before it told of it."""
DECLARE_EVERY = 30.0
"""Seconds between two times at which a worker says that its declarations are in use."""
DECLARED_FOR = 90.0
"""Seconds after which declarations count as out of use that no worker has said to be in use."""
LEAVE_FOR = 60.0
"""Seconds for which a schedule is left alone that could not be sent."""
MOST = 100
"""How many schedules are read at once when they are due."""
AT_ONCE = 16
"""How many of them are sent at once."""
YIELD = 0.02
"""Seconds for which a tick is left to the worker that has sent the tick before it."""
EARLY = 0.001
"""Seconds by which a timer may ring early."""

_log = Logger("mainspring.tasks")


class Ticker:
    """One run of the schedules of ``tasks``."""

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self._records = ScheduleRecords(tasks)
        self._declared = tasks.schedules.declared
        self._wall = clock.wall_clock()
        self._who = DeclaringWorker(digest_of(self._declared), self._wall())
        self._next: dict[str, float] = {}
        """When to read the record of a schedule next."""
        self._queue: list[tuple[float, str]] = []  # a heap; an entry counts while it is in _next
        self._yielded: set[str] = set()
        """The schedules whose last tick another worker has sent."""
        self._foreign: dict[str, str] = {}
        """What it declares and another set of definitions states otherwise: the digest of that set, by name."""
        self._seen = 0
        self._look_at = self._list_at = -math.inf
        self._declare_at = -math.inf if self._declared else math.inf
        self._is_stated = False
        self._told: set[str] = set()
        self._missed: list[str] = []  # the names of schedules of which ticks were missed, until it is said
        self._is_told = tasks.mailbox.capabilities.announces_records
        self._changed = anyio.Event()
        self._names: set[str] = set()  # of schedules that were changed in this process, or that the store told of

    async def run(self) -> None:
        """Send what is due until cancelled.

        :raises MailboxClosedError: the mailbox was closed under it.
        """
        retries = Retries(initial=0.1, maximum=5.0)
        stop_listening = (
            self._tasks.schedules.changed.subscribe(self._note_change),
            self._tasks.mailbox.backend.notifications.records.subscribe(self._note_record),
        )
        try:
            while True:
                try:
                    await self._step()
                except (MainspringError, OSError) as error:
                    if isinstance(error, MainspringError) and not error.retryable:
                        raise
                    if not retries.failures:
                        _log.warning("the schedules of %r wait for their store: %s", self._tasks.name, error)
                    await retries.pause()
                else:
                    retries.succeeded()
                    await self._sleep()
        finally:
            for stop in stop_listening:
                stop()

    def _note_record(self, record: tuple[str, str]) -> None:
        kind, name = record
        if kind == SCHEDULE:
            self._note_change(name)

    def _note_change(self, name: str) -> None:
        self._names.add(name)
        self._changed.set()

    def _pause(self) -> float:
        """Return the seconds until the next look."""
        if self._is_told:
            return LOOK_TOLD
        return LOOK_EVERY if self._next else LOOK_IDLE

    async def _sleep(self) -> None:
        """Sleep until something is to be done. As a wall clock can jump, what it says is asked again at each look."""
        now = anyio.current_time()
        until = min(self._look_at, self._declare_at)
        if self._queue:
            until = min(until, now + self._queue[0][0] - self._wall())
        with anyio.CancelScope(deadline=until):
            await self._changed.wait()
        self._changed = anyio.Event()

    async def _step(self) -> None:
        """Do what is due. After an error it is done anew: each part is marked as done at its end."""
        now = anyio.current_time()
        if now >= self._declare_at:
            await self._declare()
            self._declare_at = now + DECLARE_EVERY
        if now >= self._list_at:
            self._seen = (await self._records.changes(0)).seen
            self._take(await self._records.list_all())
            self._list_at = now + LIST_EVERY
        if now >= self._look_at:
            await self._look()
            self._look_at = now + self._pause()
        if self._names:
            await self._read_changed()
        await self._send_due()

    # ----------------------------------------------------------------------------------------------- what it knows

    async def _look(self) -> None:
        """Read what was changed since the last look."""
        seen, names = await self._records.changes(self._seen)
        if names is None:
            self._take(await self._records.list_all())
        elif names:
            self._refresh(names, await self._records.find(names))
        self._seen = seen

    async def _read_changed(self) -> None:
        """Read what was changed in this process, or what the store told of."""
        names, self._names = sorted(self._names), set()  # what is changed from here on is read again
        try:
            self._refresh(names, await self._records.find(names))
        except BaseException:
            self._names.update(names)
            raise

    def _take(self, found: list[StoredSchedule]) -> None:
        """Know these schedules and no others."""
        self._refresh([*self._next, *self._foreign], found)

    def _refresh(self, names: Iterable[str], found: list[StoredSchedule]) -> None:
        """Know the schedules of these names as they were found, if at all."""
        for name in {*names} - {each.name for each in found}:
            self._next.pop(name, None)
            self._foreign.pop(name, None)
            self._yielded.discard(name)
        for each in found:
            self._know(each)

    def _know(self, found: StoredSchedule) -> None:
        """Know a schedule as it was found."""
        name, state, _ = found
        own = self._declared.get(name)
        self._foreign.pop(name, None)
        if own is not None and state.definition != own:
            self._foreign[name] = state.stated_by or ""
        if not is_ticked_here(state, declared=own is not None, registered=self._tasks.registered):
            self._next.pop(name, None)
            if (own is not None or state.stated_by is None) and state.definition.task not in self._tasks.registered:
                self._tell(
                    f"the schedules of task {state.definition.task!r} tick in other workers: it is not registered here"
                )
            return
        assert state.next_at is not None
        self._look_again(name, state.next_at + (YIELD if name in self._yielded else 0.0))

    def _look_again(self, name: str, when: float) -> None:
        if self._next.get(name) != when:
            self._next[name] = when
            heappush(self._queue, (when, name))

    def _tell(self, what: str) -> None:
        """Log a warning, once."""
        if what not in self._told:
            self._told.add(what)
            _log.warning("%s", what)

    # --------------------------------------------------------------------------------------------------- declarations

    async def _declare(self) -> None:
        """Say that the definitions are in use, and state them: all at the start, later any that no other worker states."""
        await self._records.declare(self._who.by, DECLARED_FOR)
        if not self._is_stated:
            await self._state(list(self._declared), gone=False)
            self._is_stated = True
        elif self._foreign:
            used = await self._records.declared(filter(None, self._foreign.values()))
            await self._state([name for name, by in self._foreign.items() if by not in used], gone=True)

    async def _state(self, names: list[str], *, gone: bool) -> None:
        """State the definitions of these names, where they hold."""
        stated: list[str] = []
        while names:
            found = {each.name: each for each in await self._records.find(names)}
            refused = []
            for name in names:
                there = found.get(name)
                state = restated(there and there.state, self._declared[name], self._who, self._wall(), gone=gone)
                if state is None:
                    continue
                if await self._records.write(name, state, there.version if there else 0):
                    stated.append(name)
                else:
                    refused.append(name)
            names = refused
        if stated:
            await self._records.tell(stated)
            self._names.update(stated)

    # -------------------------------------------------------------------------------------------------------- sending

    async def _send_due(self) -> None:
        """Send ticks of up to ``MOST`` schedules that are due. What is left is due at the next step, without a sleep."""
        names = self._take_due()
        if not names:
            return
        try:
            found = await self._records.find(names)
            now = self._wall() + EARLY
            self._yielded.update(each.name for each in found if each.state.next_at is None or each.state.next_at > now)
            self._refresh(names, found)
            random.rng().shuffle(found)  # workers with the same list do not all begin with the same schedule
            for start in range(0, len(found), AT_ONCE):
                await self._send_each(found[start : start + AT_ONCE])
        except BaseException:
            for name in names:
                self._look_again(name, self._next.get(name, self._wall()))
            raise
        if self._missed:
            _log.warning("%s", _missed_text(self._missed))
            self._missed.clear()

    def _take_due(self) -> list[str]:
        """Return the names of up to ``MOST`` schedules that are due. They are forgotten until they are found again."""
        names: list[str] = []
        now = self._wall() + EARLY
        while self._queue and self._queue[0][0] <= now and len(names) < MOST:
            when, name = heappop(self._queue)
            if self._next.get(name) == when:
                del self._next[name]
                names.append(name)
        return names

    async def _send_each(self, schedules: list[StoredSchedule]) -> None:
        """Send what is due of these. Raise the error of the store if it does not answer."""
        errors: list[Exception] = []

        async def send(found: StoredSchedule) -> None:
            try:
                await self._send(found)
            except (MainspringError, OSError) as error:
                errors.append(error)

        async with anyio.create_task_group() as tasks:
            for found in schedules:
                tasks.start_soon(send, found)
        for error in errors:
            raise error

    async def _send(self, found: StoredSchedule) -> None:
        """Send what is due of one schedule."""
        name, state, version = found
        now = self._wall() + EARLY
        if name not in self._next or state.next_at is None or state.next_at > now:  # it was paused, say, or sent
            return
        ticks = due_ticks(state, now)
        task = self._tasks.registered[state.definition.task]
        after = after_ticks(state, ticks)
        try:
            async with calls_of(name, state.definition, task, ticks.times) as envelopes:
                sent = await self._records.write(name, after, version, envelopes)
        except Exception as error:
            if isinstance(error, MailboxClosedError | OSError) or getattr(error, "retryable", False):
                raise
            self._tell(f"schedule {name!r} does not tick in this worker: its call cannot be sent: {error!r:.500}")
            self._look_again(name, self._wall() + LEAVE_FOR)
            return
        if not sent:  # another worker was first
            self._look_again(name, now)
            return
        self._yielded.discard(name)
        if ticks.missed:
            self._missed.append(name)
        if ticks.next_at is None:
            self._next.pop(name, None)
        else:
            self._look_again(name, ticks.next_at)


def _missed_text(names: list[str]) -> str:
    """Return the log line for schedules of which ticks were missed."""
    several = list(dict.fromkeys(names))
    shown = ", ".join(several[:10]) + (", …" if len(several) > 10 else "")
    return f"{counted(len(several), 'schedule')} had missed ticks, handled by misfire=: {shown}"
