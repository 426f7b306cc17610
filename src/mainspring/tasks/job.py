"""``Job``: one call of a task that was sent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from mainspring.mailbox.message import CancelOutcome
    from mainspring.tasks.tasks import Tasks

R = TypeVar("R")


class Job(Generic[R]):
    """A call of a task that was sent, or that :meth:`Tasks.job` knows by its id. Two of the same id are equal."""

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

    async def cancel(self) -> CancelOutcome:
        """End it before it is done, as :meth:`Mailbox.cancel` does: what waits is removed, a running function is cancelled."""
        return await self._tasks.mailbox.cancel(self.id)
