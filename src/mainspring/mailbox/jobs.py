"""Jobs: a message followed by its id, from any process: where it is, how far it is, and how it ended.

Three places tell it. An unfinished message is in the queue, a dead one among the dead letters. After its acknowledgement or
cancellation a message is gone, unless its sender asked for its end to be kept (the header :data:`RESULT_TTL`): then a record
tells it. A message passes through these places in this order, and each passage is one step of the store. So a look at one place
after the other misses only a message that is replayed meanwhile, which a second look finds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping  # noqa: TC003 - a web framework resolves the annotations of JobStatus
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, Self, TypeVar

import anyio

from mainspring.core import clock
from mainspring.errors import (
    JobNotFoundError,
    JobRunningError,
    MailboxConnectionError,
    MailboxError,
    RequestCancelledError,
    RequestFailedError,
    RequestTimeoutError,
    ResultTooLargeError,
    text_and_type,
)
from mainspring.mailbox.history import ERROR_SIZE, read_history
from mainspring.mailbox.message import EXPIRED, MessagePlace, RescheduleOutcome, Result, header_of
from mainspring.mailbox.records import (
    CHAIN_PART,
    KEY_HEADER,
    PROGRESS,
    RESULT,
    RESULT_TTL,
    TASK_HEADER,
    RecordWrite,
    check_size,
)
from mainspring.mailbox.workers import worker_name, workers_of_jobs
from mainspring.runtime.retry import Retries

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from mainspring.mailbox.backend import Backend
    from mainspring.mailbox.mailbox import Mailbox
    from mainspring.mailbox.message import ClaimedMessage, Dead, Envelope, UnfinishedMessage
    from mainspring.mailbox.records import Record

P = ParamSpec("P")
T = TypeVar("T")

LOOK_EVERY = 1.0
"""Seconds after which a wait for a result looks at the store again: an announcement can be missed, and a death in another
process is not announced."""
CANCEL_TIMEOUT = 5.0
"""Seconds that the record of a cancellation may take."""
LONGEST_PAUSE = 5.0
"""The most seconds between two looks at a store that cannot be reached."""
PROGRESS_LIFE = 3_600.0
"""Seconds that progress is kept after it was last said."""


class JobState(StrEnum):
    """Where a job is, or how it ended."""

    SCHEDULED = "scheduled"
    """It waits for its time: that of its sender, or of its next attempt."""
    PENDING = "pending"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    """Its handler answered with :class:`ReplyError`."""
    DEAD = "dead"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    """It is among the dead letters, as it was not begun before its ``expires_in`` was over."""


class JobProgress(NamedTuple):
    """How far a handler said that it is."""

    done: float
    total: float | None = None


@dataclass(frozen=True, slots=True)
class JobStatus:
    """What is known of a job at one moment. Dates are in UTC; unknown dates are None."""

    id: str
    state: JobState
    task: str | None = None
    """The name of the task that is called."""
    arguments: Mapping[str, Any] | None = field(default=None, repr=False, hash=False)
    """The arguments of the call by name, as JSON values, while it is unfinished or dead. None: it is done, or calls no task.
    They are as they were sent, secrets included; a ``repr`` leaves them out."""
    attempts: int = 0
    """How many charged attempts were begun."""
    deliveries: int = 0
    enqueued_at: datetime | None = None
    due_at: datetime | None = None
    """When a scheduled one may begin."""
    first_received_at: datetime | None = None
    finished_at: datetime | None = None
    """When it was done, failed, cancelled or dead."""
    worker: str | None = None
    """The host and the process that ended it, last said its progress or runs it, as ``host:pid``. Of a run that says no
    progress it is known within 21 seconds (see :meth:`Mailbox.workers`)."""
    progress: JobProgress | None = None
    """What its handler said last by ``ctx.progress``, for an hour after it was written, also where the job has ended."""
    last_error: str | None = None
    last_error_type: str | None = None
    key: str | None = None
    """The key of the call, by which calls have their turns and limits."""
    chain: str | None = None
    """The id of the chain that the call is a part of. For a chain that is listed as a job it is the chain's own id."""
    position: str | None = None
    """In a list of jobs: what :meth:`Mailbox.jobs` takes as ``after`` to list those behind this one."""

    @property
    def is_finished(self) -> bool:
        """True if it is neither scheduled nor pending nor running."""
        return self.state not in (JobState.SCHEDULED, JobState.PENDING, JobState.RUNNING)


class JobOutcome(NamedTuple):
    """The status of a finished job, and the JSON of what its handler returned (None if it returned nothing, or has failed)."""

    status: JobStatus
    result: bytes | None


# ------------------------------------------------------------------------------------------------------ what is kept


def kept_for(headers: Mapping[str, str]) -> float | None:
    """Return for how many seconds the end of a message with these headers is to be kept, or None if it is not."""
    try:
        seconds = float(header_of(headers, RESULT_TTL) or "")
    except ValueError:
        return None
    return seconds if 0 < seconds < float("inf") else None


def with_identity(envelope: Envelope) -> Envelope:
    """Let the headers of a message tell its key, and its task if its end is to be kept; return it.

    Of a dead letter the store tells no key any more, and of a message that was cancelled not even the body.
    """
    told = {KEY_HEADER: envelope.key, TASK_HEADER: envelope.task if RESULT_TTL in envelope.headers else None}
    given = {name: value for name, value in told.items() if value is not None}
    if given:
        envelope.headers = {**envelope.headers, **given}
    return envelope


def result_of(delivery: ClaimedMessage, task: str, raw: bytes) -> Result | None:
    """Return what is to be kept of a delivery that is done. ``raw`` is the JSON of what its handler returned.

    :raises ResultTooLargeError: that is larger than a record may be.
    """
    seconds = kept_for(delivery.headers)
    if seconds is None:
        return None
    head = _written(_ended(delivery, task, JobState.DONE))
    value = head[:-1] + b',"result":' + raw + b"}"
    check_size("the result", value, ResultTooLargeError)
    return Result(value, seconds)


def failure_of(delivery: ClaimedMessage, task: str, error: BaseException | str) -> Result | None:
    """Return what is to be kept of a delivery that was answered with an error."""
    seconds = kept_for(delivery.headers)
    if seconds is None:
        return None
    text, kind = text_and_type(error)
    failed = _ended(delivery, task, JobState.FAILED)
    return Result(_written({**failed, "error": text[:ERROR_SIZE], "error_type": kind}), seconds)


async def keep_cancelled(backend: Backend, message_id: str, headers: Mapping[str, str]) -> None:
    """Keep that a message was cancelled, if its sender asked for its end to be kept. It may fail, unsaid: it was cancelled."""
    seconds = kept_for(headers)
    if seconds is None or not backend.capabilities.records:
        return
    said = {"state": JobState.CANCELLED, "finished_at": clock.utc_now().timestamp(), **_known_by(headers)}
    value = _written(said)
    with suppress(MailboxError, OSError), anyio.move_on_after(CANCEL_TIMEOUT, shield=True):
        await backend.write_record(RecordWrite(RESULT, message_id, value, seconds))
        backend.notifications.results.publish([message_id])


async def keep_late(backend: Backend, message_id: str, result: Result) -> None:
    """Keep the result of a message that was acknowledged without it: it may be lost where the process dies in between."""
    await backend.write_record(RecordWrite(RESULT, message_id, result.value, result.expires_in))
    backend.notifications.results.publish([message_id])


async def keep_progress(backend: Backend, message_id: str, done: float, total: float | None) -> None:
    """Write how far the handler of a message is."""
    value = _written({"done": done, "total": total, "worker": worker_name()})
    await backend.write_record(RecordWrite(PROGRESS, message_id, value, PROGRESS_LIFE))


def _ended(delivery: ClaimedMessage, task: str, state: JobState) -> dict[str, Any]:
    return {
        "state": state,
        "task": task,
        "attempts": delivery.attempt,
        "deliveries": delivery.delivery_count,
        "enqueued_at": delivery.enqueued_at,
        "first_received_at": delivery.first_received_at,
        "finished_at": clock.utc_now().timestamp(),
        "worker": worker_name(),
        **_known_by(delivery.headers),
    }


def _known_by(headers: Mapping[str, str]) -> dict[str, str]:
    """Return what the headers tell of the task, the key and the chain of a message."""
    known = {"task": headers.get(TASK_HEADER), "key": headers.get(KEY_HEADER), "chain": _chain_of(headers)}
    return {name: value for name, value in known.items() if value is not None}


def _written(said: Mapping[str, Any]) -> bytes:
    return json.dumps(said, separators=(",", ":")).encode()


# ------------------------------------------------------------------------------------------------------ what is seen


async def outcome_so_far(mailbox: Mailbox[Any, Any], message_id: str) -> JobOutcome:
    """Return the status of the message with that id, and the result if it is done and that is kept.

    :raises JobNotFoundError: no message of that id is unfinished or dead, and no end of one is kept.
    """
    outcome = await _look(mailbox, message_id)
    (status,) = await with_progress(mailbox.backend, [outcome.status])
    return outcome._replace(status=status)


async def with_progress(backend: Backend, found: list[JobStatus]) -> list[JobStatus]:
    """Return these statuses, with how far their handlers said that they are, and who runs those that are running."""
    begun = [status.id for status in found if status.deliveries]
    if not begun or not backend.capabilities.records:
        return found
    said = {record.key: json.loads(record.value) for record in await backend.find_records(PROGRESS, begun)}
    found = [
        replace(status, progress=JobProgress(last["done"], last["total"]), worker=status.worker or last["worker"])
        if (last := said.get(status.id)) is not None
        else status
        for status in found
    ]
    if not any(status.worker is None and status.state is JobState.RUNNING for status in found):
        return found
    workers = await workers_of_jobs(backend)
    return [
        replace(status, worker=workers.get((status.id, status.deliveries))) if status.worker is None else status
        for status in found
    ]


async def outcome_of(mailbox: Mailbox[Any, Any], message_id: str, timeout: float | None) -> JobOutcome:
    """Wait until the message with that id is done, and return its result.

    :param timeout: seconds to wait; None: as long as it takes.
    :raises RequestTimeoutError: it is not finished yet.
    :raises RequestFailedError: it was dead-lettered or has expired, or its handler answered with :class:`ReplyError`.
    :raises RequestCancelledError: it was cancelled.
    :raises JobNotFoundError: it is not known, or it was done and its result was not kept (any more).
    """
    with anyio.move_on_after(timeout):
        with EndListener(mailbox.backend, message_id) as news:
            while not (outcome := await patiently(_look, mailbox, message_id)).status.is_finished:
                await news.wait(LOOK_EVERY)
        return _checked(outcome)
    raise RequestTimeoutError(f"job {message_id}: it was not finished within {timeout:g} s; wait longer, or cancel it")


async def progress_of(
    mailbox: Mailbox[Any, Any], message_id: str, look: Callable[[], Awaitable[JobStatus]]
) -> AsyncIterator[JobProgress]:
    """Yield how far the job is that ``look`` sees, each time that it has changed, until the job is finished."""
    before: JobProgress | None = None
    with EndListener(mailbox.backend, message_id) as news:
        while True:
            status = await patiently(look)
            if status.progress is not None and status.progress != before:
                before = status.progress
                yield before
            if status.is_finished:
                return
            await news.wait(LOOK_EVERY)


async def patiently(look: Callable[P, Awaitable[T]], *args: P.args, **keywords: P.kwargs) -> T:
    """Return what a look at the store gives. Where the store cannot be reached, look again, after longer and longer pauses."""
    retries = Retries(initial=0.1, maximum=LONGEST_PAUSE)
    while True:
        try:
            return await look(*args, **keywords)
        except MailboxConnectionError:
            await retries.pause()


async def reschedule(mailbox: Mailbox[Any, Any], message_id: str, delay: float) -> None:
    """Let an unfinished job begin ``delay`` seconds from now, a dead one at once if ``delay`` is 0.

    :raises JobNotFoundError: it is finished, or not known.
    :raises JobRunningError: a worker runs it now.
    :raises ConfigError: the store cannot (``Capabilities.reschedule``).
    """
    mailbox.check_open()
    backend = mailbox.backend
    outcome = await backend.reschedule(message_id, delay)
    if outcome is RescheduleOutcome.UNKNOWN:
        if not delay and await backend.replay_dead_letters([message_id]):
            return
        await _check_alive(backend, message_id)
    check_changed(message_id, outcome)


async def waiting(mailbox: Mailbox[Any, Any], message_id: str) -> UnfinishedMessage:
    """Return the message of a job that is scheduled or pending.

    :raises JobNotFoundError: it is finished, or not known.
    :raises JobRunningError: a worker runs it now.
    """
    mailbox.check_open()
    found = await mailbox.backend.find([message_id])
    if not found:
        await _check_alive(mailbox.backend, message_id)
        check_changed(message_id, RescheduleOutcome.UNKNOWN)
    if found[0].place is MessagePlace.IN_FLIGHT:
        check_changed(message_id, RescheduleOutcome.IN_FLIGHT)
    return found[0]


async def _check_alive(backend: Backend, message_id: str) -> None:
    """Raise :class:`JobNotFoundError` if the message is a dead letter."""
    if await backend.find_dead_letters([message_id]):
        raise _not_found(
            message_id,
            "it is dead; replay it first, with its task paused so that no worker runs it before it is changed",
        )


def check_changed(message_id: str, outcome: RescheduleOutcome) -> None:
    """Raise what says why a job was not changed.

    :raises JobNotFoundError: it is finished, or not known.
    :raises JobRunningError: a worker runs it now.
    """
    if outcome is RescheduleOutcome.IN_FLIGHT:
        raise JobRunningError(
            f"job {message_id}: a worker runs it now; cancel it and send it again, or wait until it ends"
        )
    if outcome is RescheduleOutcome.UNKNOWN:
        raise _not_found(message_id, "no such message is scheduled, pending or running")


class EndListener:
    """Tells a wait for the end of one job that a look at the store may be worth while."""

    def __init__(self, backend: Backend, job_id: str) -> None:
        self._notifications = backend.notifications
        self._id = job_id
        self._told = anyio.Event()
        self._ends: list[Callable[[], None]] = []

    def __enter__(self) -> Self:
        self._ends = [
            self._notifications.results.subscribe(self._ended),
            self._notifications.dead.subscribe(lambda message_id: self._ended([message_id])),
        ]
        return self

    def __exit__(self, *raised: object) -> None:
        for end in self._ends:
            end()

    def _ended(self, message_ids: list[str]) -> None:
        if self._id in message_ids or not message_ids:
            self._told.set()

    async def wait(self, seconds: float) -> None:
        """Wait until the job is said to have ended, at most for ``seconds``."""
        with anyio.move_on_after(seconds):
            await self._told.wait()
        self._told = anyio.Event()


async def _look(mailbox: Mailbox[Any, Any], message_id: str) -> JobOutcome:
    mailbox.check_open()
    backend = mailbox.backend
    for _ in range(2):  # a dead letter may have been replayed between two looks
        for status in await unfinished_or_dead(mailbox, [message_id]):
            return JobOutcome(status, None)
        if backend.capabilities.records:
            for record in await backend.find_records(RESULT, [message_id]):
                return outcome_of_record(record)
    raise _not_found(message_id, "it is not in this mailbox, nor is a result of it kept; keep results with result_ttl=")


async def unfinished_or_dead(mailbox: Mailbox[Any, Any], message_ids: list[str]) -> list[JobStatus]:
    """Return the statuses of those messages that are unfinished (where the store can look them up) or dead."""
    backend, codec = mailbox.backend, mailbox.codec
    found: dict[str, JobStatus] = {}
    if backend.capabilities.lookup:
        for unfinished in await backend.find(message_ids):
            body = unfinished.message.body
            status = status_of_unfinished(unfinished, codec.task_of(body))
            found[status.id] = replace(status, arguments=codec.arguments_of(body))
    missing = [each for each in message_ids if each not in found]
    for letter in await backend.find_dead_letters(missing) if missing else ():
        body = letter[0].body
        status = status_of_dead(*letter, codec.task_of(body))
        found[status.id] = replace(status, arguments=codec.arguments_of(body))
    return list(found.values())


def _not_found(message_id: str, why: str) -> JobNotFoundError:
    return JobNotFoundError(f"job {message_id:.200}: {why}")


def status_of_unfinished(found: UnfinishedMessage, task: str | None) -> JobStatus:
    """Return the status of a message that is delayed, pending or in flight, which calls ``task``."""
    message = found.message
    failures = read_history(message.history)
    last = failures[-1] if failures else None
    return JobStatus(
        message.message_id,
        _STATES[found.place],
        task,
        attempts=message.attempt,
        deliveries=message.delivery_count,
        enqueued_at=_date(message.enqueued_at),
        due_at=_date(found.due_at),
        first_received_at=_date(message.first_received_at),
        last_error=last.error if last else None,
        last_error_type=last.error_type if last else None,
        key=found.key,
        chain=_chain_of(message.headers),
    )


def status_of_dead(message: ClaimedMessage, dead: Dead, at: float, task: str | None) -> JobStatus:
    """Return the status of a dead letter, which calls ``task``."""
    return JobStatus(
        message.message_id,
        JobState.EXPIRED if dead.error_type == EXPIRED.error_type else JobState.DEAD,
        task,
        attempts=message.attempt,
        deliveries=message.delivery_count,
        enqueued_at=_date(message.enqueued_at),
        first_received_at=_date(message.first_received_at),
        finished_at=_date(at),
        last_error=dead.error,
        last_error_type=dead.error_type,
        key=message.headers.get(KEY_HEADER),
        chain=_chain_of(message.headers),
    )


def outcome_of_record(record: Record) -> JobOutcome:
    """Return how a job ended, as its record of the kind ``result`` tells it."""
    said = _head_of(record)
    status = JobStatus(
        record.key,
        JobState(said["state"]),
        said.get("task"),
        attempts=said.get("attempts", 0),
        deliveries=said.get("deliveries", 0),
        enqueued_at=_date(said.get("enqueued_at")),
        first_received_at=_date(said.get("first_received_at")),
        finished_at=_date(said["finished_at"]),
        worker=said.get("worker"),
        last_error=said.get("error"),
        last_error_type=said.get("error_type"),
        key=said.get("key"),
        chain=said.get("chain"),
    )
    return JobOutcome(status, _result_in(record))


def status_of_chain(record: Record) -> JobStatus:
    """Return the status of a chain, as its record tells it: RUNNING until it is done or cancelled."""
    said = _head_of(record)
    return JobStatus(
        record.key,
        JobState(said["state"]),
        enqueued_at=_date(said.get("sent_at")),
        finished_at=_date(said.get("ended_at")),
        chain=record.key,
    )


def _head_of(record: Record) -> dict[str, Any]:
    """Return what the record of an end says, without the result."""
    head, found, _ = record.value.partition(b',"result":')
    said: dict[str, Any] = json.loads(head + b"}" if found else head)
    return said


def _result_in(record: Record) -> bytes | None:
    """Return the JSON of the result that a record keeps, if it keeps one."""
    _, found, raw = record.value.partition(b',"result":')
    return raw[:-1] if found else None


def _chain_of(headers: Mapping[str, str]) -> str | None:
    """Return the id of the chain that a message with these headers is a part of."""
    part = headers.get(CHAIN_PART)
    return None if part is None else part.rsplit("/", 2)[0]


def _checked(outcome: JobOutcome) -> JobOutcome:
    """Return the outcome of a job that is done. Raise what says how any other ended."""
    status = outcome.status
    if status.state is JobState.CANCELLED:
        raise RequestCancelledError(f"job {status.id} was cancelled")
    if status.state is not JobState.DONE:
        error, kind = status.last_error or "", status.last_error_type or ""
        raise RequestFailedError(f"job {status.id} is {status.state}: {kind}: {error}", error=error, error_type=kind)
    return outcome


_STATES = {
    MessagePlace.DELAYED: JobState.SCHEDULED,
    MessagePlace.PENDING: JobState.PENDING,
    MessagePlace.IN_FLIGHT: JobState.RUNNING,
}


def _date(seconds: float | None) -> datetime | None:
    return datetime.fromtimestamp(seconds, UTC) if seconds else None
