"""``Job``: one call of a task that was sent."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from mainspring.errors import JobNotFoundError
from mainspring.mailbox.limits import check_seconds, delay_of
from mainspring.mailbox.message import CancelOutcome
from mainspring.tasks.calls import TaskCall
from mainspring.validation import MAX_DELAY

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from datetime import datetime

    from mainspring.mailbox.jobs import JobProgress, JobStatus
    from mainspring.tasks.chain_runs import ChainOutcome
    from mainspring.tasks.tasks import Tasks
    from mainspring.validation import Seconds

R = TypeVar("R")


class Job(Generic[R]):
    """A call of a task that was sent, or that :meth:`Tasks.job` knows by its id. Two of the same id are equal.

    Its methods ask the store, from any process. Of a call that is done, the store knows the end only where the call was sent
    with ``result_ttl=``, and for that long. Each raises :class:`JobNotFoundError` for a job that is not known (any more).
    """

    __slots__ = ("_tasks", "id", "new")

    def __init__(self, tasks: Tasks, job_id: str, *, new: bool = True) -> None:
        self.id = job_id
        """The message's id: the same for all of its deliveries, and for ``ctx.request_id``."""
        self.new = new
        """False if nothing was sent, as a call with its key is unfinished: this is the job of that one."""
        self._tasks = tasks

    def __repr__(self) -> str:
        return f"<Job {self.id}>"

    def __str__(self) -> str:
        return self.id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Job) and self.id == other.id

    def __hash__(self) -> int:
        return hash(self.id)

    @property
    def sync(self) -> SyncJob[R]:
        """The same calls for threads that are not async; they block until they are done. See :attr:`Mailbox.sync`."""
        return SyncJob(self, self._tasks)

    async def status(self) -> JobStatus:
        """Return where it is, how far it is, and how it ended.

        The job of a chain's id has the state and the last error of :meth:`ChainJob.status`, which tells more.
        """
        from mainspring.mailbox import jobs

        try:
            return (await jobs.outcome_so_far(self._tasks.mailbox, self.id)).status
        except JobNotFoundError:
            if (chain := await self._chain()) is None:
                raise
            return chain.job

    async def result(self, *, timeout: float | None = None) -> R:
        """Wait until it is done, and return what the function returned. The call must be sent with ``result_ttl=``.

        By the id of a chain it returns the result of the chain, as :meth:`ChainJob.result` does.

        The end of a call in another process is announced where the store can do so; what is not announced is seen within a
        second. Where the store cannot be reached meanwhile, it is asked again, until the timeout. Cancelled, it leaves the job
        as it is.

        :param timeout: seconds to wait; None: as long as the job takes.
        :raises RequestTimeoutError: it is not finished yet.
        :raises RequestFailedError: it was dead-lettered, has expired, or its function raised :class:`ReplyError`.
        :raises RequestCancelledError: it was cancelled.
        :raises SerializationError: what is kept does not fit what the function says that it returns.
        """
        from mainspring.mailbox import jobs

        if timeout is not None:
            check_seconds("result: timeout", timeout, math.inf)
        try:
            status, raw = await jobs.outcome_of(self._tasks.mailbox, self.id, timeout)
        except JobNotFoundError:
            if await self._chain() is None:
                raise
            return cast("R", await self._tasks.chain_job(self.id).result(timeout=timeout))
        return cast("R", self._tasks.read_result(status.task, raw))

    async def progress(self) -> AsyncIterator[JobProgress]:
        """Yield what the function says by ``ctx.progress``, each time that it has changed, until the job is finished.

        The store is looked at about once a second.
        """
        from mainspring.mailbox import jobs

        async for progress in jobs.progress_of(self._tasks.mailbox, self.id, self.status):
            yield progress

    async def _chain(self) -> ChainOutcome | None:
        from mainspring.tasks.chain_runs import find_chain

        return await find_chain(self._tasks.mailbox, self.id)

    async def cancel(self) -> CancelOutcome:
        """End it before it is done, as :meth:`Mailbox.cancel` does: what waits is removed, a running function is cancelled.

        By the id of a chain it ends the chain, as :meth:`ChainJob.cancel` does, and returns ``CANCELLED``.
        """
        outcome = await self._tasks.mailbox.cancel(self.id)
        if outcome is CancelOutcome.UNKNOWN and await self._chain() is not None:
            has_ended = await self._tasks.chain_job(self.id).cancel()
            return CancelOutcome.CANCELLED if has_ended else outcome
        return outcome

    async def reschedule(self, when: datetime | Seconds) -> None:
        """Let it begin at ``when``: a datetime with a time zone, or the seconds (or a timedelta) from now.

        It must wait: for its time, for its turn, or for its next attempt.

        :raises JobRunningError: a worker runs it now.
        :raises InvalidParameterError: the time is more than 366 days away, or has no time zone.
        :raises ConfigError: the mailbox cannot (``Capabilities.reschedule``).
        """
        from datetime import datetime

        from mainspring.mailbox import jobs

        delay = delay_of(0, when) if isinstance(when, datetime) else delay_of(when, None)
        check_seconds("reschedule: when", delay, MAX_DELAY)
        await jobs.reschedule(self._tasks.mailbox, self.id, delay)

    async def run_now(self) -> None:
        """Let it begin as soon as it is its turn: instead of at its time, or, a dead one, once more with fresh attempts.

        :raises JobRunningError: a worker runs it now.
        :raises ConfigError: the mailbox cannot (``Capabilities.reschedule``).
        """
        await self.reschedule(0)

    async def edit(self, /, **arguments: Any) -> None:
        """Replace arguments of the call while it waits: for its time, for its turn, or for its next attempt. The others stay.

        Its key, its priority and its ``unique`` key stay as they were sent. Of two edits at once, one may undo the other.
        Cancelled, it may have taken place.

        :raises JobRunningError: a worker runs it now.
        :raises InvalidParameterError: the task has no such parameter.
        :raises SerializationError: an argument is not of its type, or the message calls no task; nothing was changed.
        :raises UnknownTaskError: its task is not registered here.
        :raises ConfigError: the mailbox cannot (``Capabilities.edit``).
        """
        from mainspring.mailbox import jobs

        mailbox = self._tasks.mailbox
        call = mailbox.body_of((await jobs.waiting(mailbox, self.id)).message)
        await mailbox.replace_body(self.id, TaskCall(call.task, {**call.arguments, **arguments}))


class SyncJob(Generic[R]):
    """The calls of a :class:`Job` for threads that are not async, each with the parameters and errors of its namesake.

    They run where the mailbox is open; ``with tasks.sync:`` opens it where nothing else does. See :class:`SyncMailbox`.
    """

    def __init__(self, job: Job[R], tasks: Tasks) -> None:
        self._job = job
        self._mailbox = tasks.mailbox.sync

    def status(self) -> JobStatus:
        """Return where it is, how far it is, and how it ended."""
        return self._mailbox.call(self._job.status)

    def result(self, *, timeout: float | None = None) -> R:
        """Wait until it is done, and return what the function returned."""
        return self._mailbox.call(self._job.result, timeout=timeout)

    def cancel(self) -> CancelOutcome:
        """End it before it is done."""
        return self._mailbox.call(self._job.cancel)

    def reschedule(self, when: datetime | Seconds) -> None:
        """Let it begin at ``when``."""
        self._mailbox.call(self._job.reschedule, when)

    def run_now(self) -> None:
        """Let it begin as soon as it is its turn."""
        self._mailbox.call(self._job.run_now)

    def edit(self, /, **arguments: Any) -> None:
        """Replace arguments of the call while it waits."""
        self._mailbox.call(self._job.edit, **arguments)
