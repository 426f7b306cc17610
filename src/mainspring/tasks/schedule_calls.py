"""From a schedule to the messages of its ticks: its definition when it is stated, and its calls when it is due."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from mainspring.errors import ConfigError, UnknownTaskError
from mainspring.mailbox.jobs import with_identity
from mainspring.mailbox.message import Envelope
from mainspring.mailbox.records import check_size
from mainspring.tasks.calls import OutgoingCall, TaskCall, head
from mainspring.tasks.keys import share_of
from mainspring.tasks.schedules import Definition, ScheduleState, date_of, delay_of_tick
from mainspring.tasks.task import SendOptions, Task
from mainspring.validation import as_seconds
from mainspring.worker.context import SCHEDULE_NAME, SCHEDULED_FOR

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from mainspring.tasks.job import Job
    from mainspring.tasks.schedules import Schedule
    from mainspring.tasks.tasks import Tasks

ROOM = 200
"""Bytes that the record of a schedule has beside its definition, at most."""
_NOT_KEPT = ("delay", "at", "connection")
"""Options of a task that say how one call is sent, and mean nothing for the calls of a schedule."""


def definition_of(schedule: Schedule, tasks: Tasks) -> Definition:
    """Return what is kept of a schedule.

    :raises ConfigError: its task is of other tasks, or has options that a schedule cannot have.
    :raises UnknownTaskError: no task of that name is registered here.
    :raises InvalidParameterError: an argument is missing or unknown.
    :raises SerializationError: one is not of its type, or they are larger than a record may be.
    """
    task = _task_of(schedule, tasks)
    how = task.sending
    wrong = [name for name in _NOT_KEPT if getattr(how, name) != getattr(SendOptions, name)]
    if how.deadline != "inherit":
        wrong.append("deadline")
    if task.stands_for_key:
        wrong.append("debounce" if task.handling.debounce is not None else f"unique={how.unique!r}")
    if wrong:
        raise ConfigError(
            f"schedule {schedule.name!r}: its task cannot have the option {wrong[0]}, which is for single calls"
        )
    named = schedule.args if not isinstance(schedule.args, tuple) else {}
    arguments = task.parameters.bind(schedule.args if isinstance(schedule.args, tuple) else (), dict(named))
    definition = Definition(
        task.name,
        json.loads(task.parameters.encode(arguments)),
        schedule.times,
        schedule.misfire,
        float(as_seconds(schedule.jitter)),
        how.priority,
        how.own_headers,
        as_seconds(how.expires_in),
        task.dedup_key_of(TaskCall(task, arguments)),
        *share_of(task, arguments),
    )
    written = ScheduleState(definition, 0.0, stated_by="").write()
    check_size(f"schedule {schedule.name!r}", written + bytes(ROOM))
    return definition


def _task_of(schedule: Schedule, tasks: Tasks) -> Task[..., Any]:
    if isinstance(schedule.task, Task):
        if schedule.task.tasks is not tasks:
            raise ConfigError(f"schedule {schedule.name!r}: {schedule.task!r} is no task of {tasks.name!r}")
        return schedule.task
    task = tasks.registered.get(schedule.task)
    if task is None:
        raise UnknownTaskError(
            f"schedule {schedule.name!r}: no task {schedule.task!r:.200} is registered here; import the module that defines it"
        )
    return task


@asynccontextmanager
async def calls_of(
    name: str, definition: Definition, task: Task[..., Any], ticks: Sequence[float]
) -> AsyncIterator[list[Envelope]]:
    """Yield the messages of these ticks, inside of the middleware of ``task``.

    :raises SerializationError: the arguments do not fit the function as it is here.
    """
    if not ticks:
        yield []
        return
    sent, arguments = _as_sent(definition, task)
    calls = [OutgoingCall(sent, dict(arguments), _headers(name, definition, tick)) for tick in ticks]
    async with sent.prepared(calls) as envelopes:
        for envelope, tick in zip(envelopes, ticks, strict=True):
            envelope.delay = delay_of_tick(name, tick, definition.jitter)
        yield envelopes


async def send_now(name: str, definition: Definition, task: Task[..., Any], now: float) -> Job[Any]:
    """Send one call beside the ticks.

    :raises SerializationError: the arguments do not fit the function as it is here.
    """
    sent, arguments = _as_sent(definition, task, _headers(name, definition, now))
    return await sent.send(**arguments)


def _as_sent(
    definition: Definition, task: Task[..., Any], headers: dict[str, str] | None = None
) -> tuple[Task[..., Any], dict[str, Any]]:
    """Return the task with the options of a definition, and the arguments of a call."""
    how = SendOptions(
        priority=definition.priority,
        headers=headers,
        expires_in=definition.expires_in,
        dedup_key=definition.dedup_key,
        key=definition.key,
        weight=definition.weight,
        deadline=None,
    )
    return task.sent_as(how), task.parameters.codec.decode(json.dumps(definition.args).encode())


def unchecked_call_of(name: str, definition: Definition, tasks: Tasks, tick: float) -> Envelope:
    """Return the message of a call whose task is not registered here. Another process will read it."""
    mailbox = tasks.mailbox
    raw = head(definition.task) + json.dumps(definition.args).encode() + b"}"
    body = raw if mailbox.serializes else mailbox.codec.unserialized(mailbox.codec.decode(raw))
    envelope = Envelope(
        mailbox.new_id(), body, 0.0, None, definition.dedup_key, definition.priority,
        _headers(name, definition, tick), definition.expires_in, definition.task, definition.key, definition.weight,
    )  # fmt: skip
    return with_identity(envelope)


def _headers(name: str, definition: Definition, tick: float) -> dict[str, str]:
    when = date_of(tick)
    assert when is not None
    return {**definition.headers, SCHEDULE_NAME: name, SCHEDULED_FOR: when.isoformat()}
