"""What a chain does: it is begun, its parts are run and recorded, and its job is followed and cancelled."""

from __future__ import annotations

import json
import math
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio

from mainspring.errors import (
    ConfigError,
    JobNotFoundError,
    MailboxFullError,
    Reject,
    ReplyError,
    RequestCancelledError,
    RequestFailedError,
    RequestTimeoutError,
    ResultTooLargeError,
)
from mainspring.mailbox.jobs import (
    LOOK_EVERY,
    EndListener,
    JobState,
    JobStatus,
    patiently,
    status_of_chain,
    unfinished_or_dead,
    with_identity,
)
from mainspring.mailbox.limits import check_seconds
from mainspring.mailbox.message import Envelope
from mainspring.mailbox.records import CHAIN, CHAIN_PART, RecordWrite, check_size
from mainspring.runtime.scope import first_error
from mainspring.tasks.calls import OutgoingCall
from mainspring.tasks.chain_state import (
    CALLS,
    CANCELLED,
    CHAIN_LIFE,
    DONE,
    PART,
    ChainState,
    Place,
    StoredCall,
    new_chain_id,
    page_key,
    pages_of,
    part_key,
)
from mainspring.worker.delivery import ALREADY_DONE

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from mainspring.mailbox.backend import Backend
    from mainspring.mailbox.mailbox import Mailbox
    from mainspring.mailbox.message import Message
    from mainspring.tasks.chain_state import Stage
    from mainspring.tasks.task import Task
    from mainspring.tasks.tasks import Tasks

RESULTS_AT_ONCE = 1_000
DELETED_AT_ONCE = 100


async def begin(tasks: Tasks, stages: Sequence[Stage], result_ttl: float) -> ChainJob:
    """Store a chain, and send its first calls."""
    mailbox = tasks.mailbox
    if not mailbox.capabilities.records:
        raise ConfigError(f"a chain needs a mailbox that keeps records (Capabilities.records), not {mailbox!r}")
    chain_id = new_chain_id()
    outgoing = [
        [OutgoingCall(call.task, call.arguments, call.task.sending.own_headers) for call in stage.calls]
        for stage in stages
    ]
    for task in dict.fromkeys(call.task for stage in stages for call in stage.calls):
        await task.declare_limits()
    async with AsyncExitStack() as middleware:
        for task, calls in _by_task(outgoing).items():
            await middleware.enter_async_context(task.entered(calls))
        writes, pages = pages_of(chain_id, outgoing)
        envelopes: list[Envelope] = []
        state = ChainState.first(chain_id, stages, pages, result_ttl)
        if state.state != DONE:
            state, envelopes = await _sending(state, _GivenPages(writes))
        for write in writes:
            await mailbox.backend.write_record(write)
        await mailbox.backend.write_record(state.write(), envelopes)
    return ChainJob(tasks, chain_id)


def _by_task(stages: list[list[OutgoingCall]]) -> dict[Task[..., Any], list[OutgoingCall]]:
    """Return the calls of each task that has middleware around sends."""
    found: dict[Task[..., Any], list[OutgoingCall]] = {}
    for call in chain.from_iterable(stages):
        if call.task.senders:
            found.setdefault(call.task, []).append(call)
    return found


class _GivenPages:
    """The pages of a chain that is being sent."""

    def __init__(self, writes: list[RecordWrite]) -> None:
        self._by_key = {write.key: write.value for write in writes}

    async def page(self, key: str) -> bytes | None:
        return self._by_key.get(key)


class _StoredPages:
    """The pages of a chain in its mailbox."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    async def page(self, key: str) -> bytes | None:
        for record in await self._backend.find_records(CALLS, [key]):
            return record.value
        return None


async def _sending(state: ChainState, pages: _GivenPages | _StoredPages) -> tuple[ChainState, list[Envelope]]:
    """Return the state in which what may run is sent, and the messages for that."""
    (after, parts), size = state.with_sent(), state.page
    envelopes: list[Envelope] = []
    calls: list[Any] = []
    for part in parts:
        if not envelopes or part % size == 0:
            page = await pages.page(page_key(state.chain_id, state.stage, part // size))
            calls = json.loads(page or b"[]")
        if part % size >= len(calls):
            raise JobNotFoundError(f"chain {state.chain_id}: its calls are gone from the mailbox")
        call = StoredCall(**calls[part % size])
        place = Place(state.chain_id, state.stage, part)
        envelope = Envelope(place.message_id, call.body(state.result), priority=call.priority)
        envelope.headers, envelope.expires_in = {**call.headers, CHAIN_PART: str(place)}, call.expires_in
        envelope.delay = call.delay
        envelope.task, envelope.key, envelope.weight = call.task, call.key, call.weight
        envelopes.append(with_identity(envelope))
    return after, envelopes


# --------------------------------------------------------------------------------------------------------- a part runs


def chain_step(
    task: Task[..., Any], recordings: Recordings
) -> Callable[[Message[Any, Any], Callable[[], Awaitable[Any]]], Awaitable[Any]]:
    """Return the wrapper that runs a part of a chain, unless it is recorded as done, records it and sends what comes next."""
    mailbox = task.tasks.mailbox

    async def run_step(message: Message[Any, Any], call: Callable[[], Awaitable[Any]]) -> Any:
        place = Place.read(message.headers[CHAIN_PART])
        backend = mailbox.backend
        state = await _state_of(backend, place.chain_id)
        if state is None or not state.awaits(place):
            if state is not None and state.is_past(place.stage):
                await _forget(backend, state, place.stage)  # a worker may have died before it had
            return ALREADY_DONE
        key = part_key(place.chain_id, place.stage, place.part)
        kept = await backend.find_records(PART, [key]) if state.is_many or message.delivery_count > 1 else []
        if kept:
            raw = kept[0].value
            result = task.result_codec.decode(raw)
        else:
            try:
                result = await call()
            except ReplyError as error:  # acknowledged, the part would leave its chain waiting for ever
                raise Reject(str(error)) from error
            raw = task.encode_result(result)
            check_size("the result of a part of a chain", raw, ResultTooLargeError)
        keep = RecordWrite(PART, key, raw, CHAIN_LIFE)
        if state.is_many and not kept:
            await backend.write_record(keep)
        try:
            await recordings.record(backend, place, raw)
        except MailboxFullError:  # it has run, and there is no room yet for the call after it
            await backend.write_record(keep)
            raise
        if kept and not state.is_many:
            await backend.write_record(RecordWrite(PART, key, None))
        return result

    return run_step


class Recordings:
    """What the parts of chains returned that end in one loop: those of a stage that wait for the store are recorded together.

    All parts of a stage change one record, and of the writers that race one wins. So there is one of them in a loop.
    """

    def __init__(self) -> None:
        self._by_stage: dict[tuple[str, int], _StageRecordings] = {}

    async def record(self, backend: Backend, place: Place, raw: bytes) -> None:
        """Record a part as done, with the JSON of its result, and send what comes next.

        Cancelled, the part may be recorded.
        """
        key = place.chain_id, place.stage
        stage = self._by_stage.setdefault(key, _StageRecordings())
        waiting = _Waiting(place.part, raw)
        stage.waiting.append(waiting)
        try:
            async with stage.lock:
                if waiting in stage.waiting:  # else the one before has recorded it
                    together = list(stage.waiting)
                    await _record(backend, place.chain_id, place.stage, {each.part: each.raw for each in together})
                    stage.waiting = [each for each in stage.waiting if each not in together]
        finally:
            if waiting in stage.waiting:
                stage.waiting.remove(waiting)
            if not stage.waiting and not stage.lock.statistics().tasks_waiting:
                self._by_stage.pop(key, None)


class _StageRecordings:
    """The parts of one stage that are about to be recorded."""

    def __init__(self) -> None:
        self.lock = anyio.Lock()
        self.waiting: list[_Waiting] = []


@dataclass(frozen=True, eq=False)
class _Waiting:
    part: int
    raw: bytes


async def _record(backend: Backend, chain_id: str, stage: int, raws: dict[int, bytes]) -> None:
    """Record parts of a stage as done, with the JSON of their results, and send what comes next."""
    while True:
        state = await _state_of(backend, chain_id)
        if state is None:
            return
        ended = [part for part in raws if state.awaits(Place(chain_id, stage, part))]
        if not ended:
            return
        after = state.with_done(ended)
        finished = after.stage if after.is_stage_done else None
        envelopes: list[Envelope] = []
        try:
            if after.is_stage_done:
                after = after.next_stage(await _results(backend, state, raws) if state.is_many else raws[0])
            if after.state != DONE:
                after, envelopes = await _sending(after, _StoredPages(backend))
        except JobNotFoundError:  # right if the stage has ended meanwhile, or the chain was cancelled
            now = await _state_of(backend, chain_id)
            if now is not None and now.version == state.version:
                raise
            continue
        if await backend.write_record(after.write(), envelopes) is not None:
            if after.state == DONE:
                backend.notifications.results.publish([chain_id])
            if finished is not None:
                await _forget(backend, state, finished)
            return


async def _results(backend: Backend, state: ChainState, raws: dict[int, bytes]) -> bytes:
    """Return the JSON list of what the parts of a stage returned: the last ones ``raws``, the others what is stored."""
    results = dict(raws)
    keys = [part_key(state.chain_id, state.stage, part) for part in range(state.parts) if part not in raws]
    for first in range(0, len(keys), RESULTS_AT_ONCE):
        for record in await backend.find_records(PART, keys[first : first + RESULTS_AT_ONCE]):
            results[int(record.key.rpartition("/")[2])] = record.value
    if len(results) < state.parts:
        raise JobNotFoundError(f"chain {state.chain_id}: results of its parts are gone from the mailbox")
    return b"[" + b",".join(results[part] for part in range(state.parts)) + b"]"


async def _forget(backend: Backend, state: ChainState, stage: int) -> None:
    """Delete what is kept of a stage that is done: nothing reads it any more."""
    parts, is_many, _, size = state.stages[stage]
    keys = [(CALLS, page_key(state.chain_id, stage, page)) for page in range((parts - 1) // size + 1)]
    keys += [(PART, part_key(state.chain_id, stage, part)) for part in range(parts)] if is_many else []
    for first in range(0, len(keys), DELETED_AT_ONCE):
        try:
            async with anyio.create_task_group() as deletions:  # a store makes them in one step
                for kind, key in keys[first : first + DELETED_AT_ONCE]:
                    deletions.start_soon(backend.write_record, RecordWrite(kind, key, None))
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None


async def _state_of(backend: Backend, chain_id: str) -> ChainState | None:
    for record in await backend.find_records(CHAIN, [chain_id]):
        return ChainState.read(chain_id, record.version, record.value)
    return None


# ------------------------------------------------------------------------------------------------------------ its job


@dataclass(frozen=True, slots=True)
class ChainStatus:
    """What is known of a chain at one moment."""

    id: str
    state: JobState
    """RUNNING, DONE, CANCELLED, or DEAD: a part is among the dead letters, and the chain waits until it is replayed. CANCELLED,
    too, if the message of a part was cancelled or purged by itself: the chain cannot end."""
    stage: int
    """The number of the stage that is under way, or was the last, from 0."""
    stages: int
    parts: int
    """How many parts that stage has."""
    parts_done: int
    last_error: str | None = None
    """Why a part is dead, why the last attempt failed of a part that is tried again, or which part is gone."""
    last_error_type: str | None = None
    under_way: tuple[JobStatus, ...] = field(default=(), repr=False)
    """The parts that were sent and are not done, dead ones included: each with its state, attempts and last error. Their
    ``progress`` and ``worker`` are left out; ``tasks.job(part.id).status()`` tells them."""


class ChainJob:
    """A chain that was sent, or that :meth:`Tasks.chain_job` knows by its id. Two of the same id are equal.

    Its methods ask the store, from any process. Each raises :class:`JobNotFoundError` for a chain that is not known (any more).
    """

    __slots__ = ("_tasks", "id")

    def __init__(self, tasks: Tasks, chain_id: str) -> None:
        self.id = chain_id
        """A string, from which another process can make the job again."""
        self._tasks = tasks

    def __repr__(self) -> str:
        return f"<ChainJob {self.id}>"

    def __str__(self) -> str:
        return self.id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ChainJob) and self.id == other.id

    def __hash__(self) -> int:
        return hash(self.id)

    @property
    def sync(self) -> SyncChainJob:
        """The same calls for threads that are not async; they block until they are done. See :attr:`Mailbox.sync`."""
        return SyncChainJob(self, self._tasks)

    async def status(self) -> ChainStatus:
        """Return which stage is under way, and how it ended."""
        return await _status_of(self._tasks.mailbox, await self._state())

    async def result(self, *, timeout: float | None = None) -> Any:
        """Wait until it is done, and return what its last call returned, or the list of what its parts did.

        The end in another process is seen within a second. Where the store cannot be reached, it is asked again. Cancelled, it
        leaves the chain as it is.

        :param timeout: seconds to wait; None: as long as the chain takes.
        :raises RequestTimeoutError: it is not done yet.
        :raises RequestFailedError: a part of it is among the dead letters.
        :raises RequestCancelledError: it was cancelled, or a part of it was, or was purged.
        """
        if timeout is not None:
            check_seconds("result: timeout", timeout, math.inf)
        with anyio.move_on_after(timeout):
            return await self._until_done()
        raise RequestTimeoutError(f"chain {self.id}: it was not done within {timeout:g} s; wait longer, or cancel it")

    async def _until_done(self) -> Any:
        with EndListener(self._tasks.mailbox.backend, self.id) as end:
            while (status := await patiently(self.status)).state is JobState.RUNNING:
                await end.wait(LOOK_EVERY)
        if status.state is JobState.CANCELLED:
            why = f": {status.last_error}" if status.last_error else ""
            raise RequestCancelledError(f"chain {self.id} was cancelled{why}")
        if status.state is JobState.DEAD:
            error, kind = status.last_error or "", status.last_error_type or ""
            text = f"chain {self.id}: a part of stage {status.stage} is dead: {kind}: {error}"
            raise RequestFailedError(text, error=error, error_type=kind)
        state = await patiently(self._state)
        return self._tasks.read_result(state.task, state.result)

    async def cancel(self) -> bool:
        """End it before it is done: what waits is removed, running functions are cancelled, nothing more is sent.

        Return False if it has ended already. Cancelled itself, it may have been carried out in part: call it again.
        """
        mailbox = self._tasks.mailbox
        while True:
            state = await self._state()
            if state.state == DONE:
                return False
            stopped = state.ended(CANCELLED)
            if state.state == CANCELLED or await mailbox.backend.write_record(stopped.write()) is not None:
                break
        for place in state.under_way:
            await mailbox.cancel(place.message_id)
        for stage in range(state.stage, len(state.stages)):
            await _forget(mailbox.backend, state, stage)
        mailbox.backend.notifications.results.publish([self.id])
        return state.state != CANCELLED

    async def _state(self) -> ChainState:
        state = await _state_of(self._tasks.mailbox.backend, self.id)
        if state is None:
            raise JobNotFoundError(
                f"chain {self.id:.200}: it is not in this mailbox, or its result is not kept any more"
            )
        return state


async def _status_of(mailbox: Mailbox[Any, Any], state: ChainState) -> ChainStatus:
    """Return what is known of a chain, by its record and by the messages of the parts that are under way."""
    status = ChainStatus(
        state.chain_id, JobState(state.state), state.stage, len(state.stages), state.parts, state.done.bit_count()
    )
    if status.state is not JobState.RUNNING:
        return status
    ids = [place.message_id for place in state.under_way]
    for _ in range(2):  # a dead letter may have been replayed between two looks
        found = {part.id: part for part in await unfinished_or_dead(mailbox, ids)}
        parts = tuple(found[each] for each in ids if each in found)
        dead = [part for part in parts if part.is_finished]
        gone = [each for each in ids if each not in found]
        if dead or not gone or not mailbox.capabilities.lookup:
            failed = next((part for part in (*dead, *parts) if part.last_error is not None), None)
            return replace(
                status,
                state=JobState.DEAD if dead else JobState.RUNNING,
                last_error=failed.last_error if failed else None,
                last_error_type=failed.last_error_type if failed else None,
                under_way=parts,
            )
    again = await _state_of(mailbox.backend, state.chain_id)
    if again is not None and again.version != state.version:  # they have been recorded meanwhile
        return replace(status, stage=again.stage, parts=again.parts, parts_done=again.done.bit_count())
    more = f" and {len(gone) - 1} more" if len(gone) > 1 else ""
    why = f"of stage {state.stage}, {min(gone)}{more} cancelled or purged"
    return replace(status, state=JobState.CANCELLED, last_error=why)


class ChainOutcome(NamedTuple):
    """A chain seen by its id: as a job, as a chain, and the JSON of its result if it is done."""

    job: JobStatus
    chain: ChainStatus
    result: bytes | None


async def find_chain(mailbox: Mailbox[Any, Any], chain_id: str) -> ChainOutcome | None:
    """Return what is known of the chain with that id, or None if there is none."""
    if not mailbox.capabilities.records:
        return None
    for record in await mailbox.backend.find_records(CHAIN, [chain_id]):
        state = ChainState.read(chain_id, record.version, record.value)
        status = await _status_of(mailbox, state)
        job = replace(
            status_of_chain(record),
            state=status.state,
            last_error=status.last_error,
            last_error_type=status.last_error_type,
        )
        return ChainOutcome(job, status, state.result if state.state == DONE else None)
    return None


class SyncChainJob:
    """The calls of a :class:`ChainJob` for threads that are not async, each with the parameters and errors of its namesake."""

    def __init__(self, job: ChainJob, tasks: Tasks) -> None:
        self._job = job
        self._mailbox = tasks.mailbox.sync

    def status(self) -> ChainStatus:
        """Return which stage is under way, and how it ended."""
        return self._mailbox.call(self._job.status)

    def result(self, *, timeout: float | None = None) -> Any:
        """Wait until it is done, and return what its last call returned, or the list of what its parts did."""
        return self._mailbox.call(self._job.result, timeout=timeout)

    def cancel(self) -> bool:
        """End it before it is done. Return False if it has ended already."""
        return self._mailbox.call(self._job.cancel)
