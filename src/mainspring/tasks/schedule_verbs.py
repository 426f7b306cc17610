"""``Schedules``: what is declared in code, and the calls that make, show and change schedules at run time."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mainspring.core import clock
from mainspring.errors import ConfigError, ScheduleNotFoundError
from mainspring.mailbox.backend import Topic
from mainspring.mailbox.message import is_new
from mainspring.tasks.job import Job
from mainspring.tasks.schedule_calls import definition_of, send_now, unchecked_call_of
from mainspring.tasks.schedule_records import ScheduleRecords
from mainspring.tasks.schedules import Schedule, ScheduleState, ScheduleStatus, changed, date_of, resumed

if TYPE_CHECKING:
    from mainspring.tasks.schedules import Definition
    from mainspring.tasks.tasks import Tasks


class Schedules:
    """The schedules of a mailbox, as ``tasks.schedules``. Its methods ask the store, from any process.

    Each raises :class:`ConfigError` if the mailbox keeps no records (``Capabilities.records``), :class:`MailboxClosedError` if
    it is not open, and :class:`MailboxConnectionError` if the store cannot be reached. A call that was cancelled, or has raised
    the latter, may have taken place; to make it again is safe, but for :meth:`run_now`. A change reaches the workers of this
    process at once, and those of others in about a second; where there was no schedule before, in five.
    """

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self._records = ScheduleRecords(tasks)
        self.declared: dict[str, Definition] = {}
        """What this program declares, by name."""
        self.changed: Topic[str] = Topic()
        """The names of schedules that were changed here."""

    def __repr__(self) -> str:
        return f"<Schedules of {self._tasks.name!r}>"

    def declare(self, schedule: Schedule) -> None:
        """Add a schedule to the declared ones; see :meth:`Tasks.schedule`."""
        if not isinstance(schedule, Schedule):
            raise ConfigError(f"schedule: give a Schedule(…), not {schedule!r}")
        owner = f"schedule {schedule.name!r}"
        if schedule.name in self.declared:
            raise ConfigError(f"{owner} is declared already on {self._tasks.name!r}; give one of the two another name=")
        if self._tasks.loops:
            raise ConfigError(f"{owner}: a loop of {self._tasks.name!r} runs already; declare it before, or add() it")
        self._check(schedule)
        self.declared[schedule.name] = definition_of(schedule, self._tasks)

    async def add(self, schedule: Schedule) -> ScheduleStatus:
        """Make a schedule, or change the run-time schedule of that name. Return it as it is now.

        A pause goes on. The next tick stays if the times are the same. A one-off schedule is deleted when it has ticked.

        :raises ConfigError: the name is that of a declared schedule; the time ``at`` is past; see also :class:`Schedule`.
        :raises UnknownTaskError: no task of that name is registered here.
        :raises InvalidParameterError: an argument is missing or unknown.
        :raises SerializationError: an argument is not of its type, or all are larger than a record may be.
        """
        if not isinstance(schedule, Schedule):
            raise ConfigError(f"schedules.add takes a Schedule(…), not {schedule!r}")
        self._check(schedule)
        self._records.check()
        definition, now = definition_of(schedule, self._tasks), clock.utc_now().timestamp()

        def decide(state: ScheduleState | None) -> ScheduleState:
            if schedule.name in self.declared or (state is not None and state.stated_by is not None):
                raise ConfigError(
                    f"schedule {schedule.name!r} is declared in code; change it there, or take another name"
                )
            made = changed(state, definition, now)
            if made.next_at is not None and definition.times.at is not None and made.next_at <= now:
                raise ConfigError(
                    f"schedule {schedule.name!r}: at is past ({schedule.at}); give a later time, or send the call itself"
                )
            return made

        return _status(schedule.name, await self._change(schedule.name, decide))

    async def list(self) -> list[ScheduleStatus]:
        """Return all schedules of the mailbox, in the order of their names.

        A declared one is there once a worker that declares it has run, and stays when no code declares it any more: it does
        not tick, and :meth:`remove` deletes it.
        """
        self._records.check()
        return [_status(found.name, found.state) for found in await self._records.list_all()]

    async def pause(self, name: str) -> ScheduleStatus:
        """Let a schedule not tick until :meth:`resume`. It holds at once, and also where the code changes the schedule.

        :raises ScheduleNotFoundError: there is none of that name.
        """
        return _status(name, await self._change(name, lambda state: _paused(name, state)))

    async def resume(self, name: str) -> ScheduleStatus:
        """Let a paused schedule tick again. Ticks that came during the pause are not sent.

        :raises ScheduleNotFoundError: there is none of that name.
        """
        now = clock.utc_now().timestamp()
        return _status(name, await self._change(name, lambda state: resumed(_known(name, state), now)))

    async def remove(self, name: str) -> None:
        """Delete a schedule. Calls that it has sent are not touched.

        :raises ScheduleNotFoundError: there is none of that name.
        :raises ConfigError: running workers declare it: remove it from the code, or pause it.
        """
        self._records.check()
        for found in await self._records.find([name]):
            digest = found.state.stated_by
            if name in self.declared or (digest is not None and await self._records.declared([digest])):
                raise ConfigError(
                    f"schedule {name!r} is declared in the code of running workers; delete it there, or pause it"
                )
        await self._change(name, lambda state: _deleted(name, state))

    async def run_now(self, name: str) -> Job[Any]:
        """Send one call of a schedule, paused or not, and leave its ticks as they are.

        :raises ScheduleNotFoundError: there is none of that name.
        :raises SerializationError: its arguments do not fit the task as it is registered here.
        """
        self._records.check()
        found = await self._records.find([name])
        definition = _known(name, found[0].state if found else None).definition
        task, now = self._tasks.registered.get(definition.task), clock.utc_now().timestamp()
        if task is not None:
            return await send_now(name, definition, task, now)
        envelope = unchecked_call_of(name, definition, self._tasks, now)
        stored = await self._tasks.mailbox.send_prepared([envelope])
        return Job(self._tasks, stored[0], new=is_new(envelope.message_id, stored[0]))

    def _check(self, schedule: Schedule) -> None:
        self._records.check_capability()
        if schedule.jitter and not self._tasks.mailbox.capabilities.delay:
            raise ConfigError(
                f"schedule {schedule.name!r}: jitter needs a mailbox that delays messages (Capabilities.delay)"
            )

    async def _change(self, name: str, decide: Any) -> ScheduleState | None:
        self._records.check()
        after = await self._records.change(name, decide)
        self.changed.publish(name)
        return after


def _known(name: str, state: ScheduleState | None) -> ScheduleState:
    if state is None:
        raise ScheduleNotFoundError(
            f"there is no schedule {name!r:.200} in this mailbox; schedules.list() has those there are"
        )
    return state


def _paused(name: str, state: ScheduleState | None) -> ScheduleState:
    return replace(_known(name, state), paused=True)


def _deleted(name: str, state: ScheduleState | None) -> None:
    _known(name, state)


def _status(name: str, state: ScheduleState | None) -> ScheduleStatus:
    assert state is not None
    said, times = state.definition, state.definition.times
    return ScheduleStatus(
        name, said.task, said.args, times.cron, times.every, date_of(times.at), times.tz, said.misfire, said.jitter,
        date_of(state.next_at), state.paused, state.stated_by is not None,
    )  # fmt: skip
