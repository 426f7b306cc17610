"""``chain`` and ``parallel``: calls that follow each other, and calls that are made at once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from mainspring.errors import ConfigError, InvalidParameterError
from mainspring.mailbox.limits import check_seconds
from mainspring.tasks.calls import TaskCall
from mainspring.tasks.chain_runs import begin
from mainspring.tasks.chain_state import CONCURRENCY, Stage
from mainspring.validation import MAX_DELAY, Seconds, as_seconds, is_whole

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mainspring.tasks.chain_runs import ChainJob
    from mainspring.tasks.tasks import Tasks

RESULT_LIFE = 3_600.0
"""Seconds for which the result of a chain is kept, where nothing else is said."""


class Chain:
    """Calls that follow each other, not sent yet: from :func:`chain`, :func:`parallel` or :meth:`Task.map`."""

    def __init__(self, tasks: Tasks | None, stages: Sequence[Stage]) -> None:
        self.owner = tasks
        """The ``Tasks`` of its calls, or None if it has no call."""
        self.stages = tuple(stages)
        for stage in stages:
            for call in stage.calls:
                call.task.check_call(call.arguments, takes_result=True)

    def __repr__(self) -> str:
        parts = (f"{len(stage.calls)} parts" if stage.is_many else repr(stage.calls[0]) for stage in self.stages)
        return f"<Chain {' → '.join(parts)}>"

    @property
    def tasks(self) -> Tasks:
        """The ``Tasks`` of its calls.

        :raises ConfigError: it has no call.
        """
        if self.owner is None:
            raise ConfigError("parallel: no calls, so no Tasks to send to; write task.map(items), or give then=")
        return self.owner

    def send_sync(self, *, result_ttl: Seconds = RESULT_LIFE) -> ChainJob:
        """Send its first calls from a thread that is not async, as :meth:`send` does. See :attr:`Mailbox.sync`."""
        return self.tasks.mailbox.sync.call(self.send, result_ttl=result_ttl)

    async def send(self, *, result_ttl: Seconds = RESULT_LIFE) -> ChainJob:
        """Send its first calls. Return its job once they are as durable as the mailbox makes them.

        Middleware is entered once for each of its tasks, with all calls of that task: the headers hold for each part.

        :param result_ttl: seconds, or a timedelta, for which its result is kept after its end.
        :raises ConfigError: the mailbox keeps no records (``Capabilities.records``), or there is no call.
        :raises InvalidParameterError: one of the first calls lacks an argument.
        :raises SerializationError: an argument is not of its type, or a call is larger than a record may be.

        And what :meth:`Mailbox.send` raises. Cancelled, all or none of the first calls may have been sent.
        """
        tasks, seconds = self.tasks, as_seconds(result_ttl)
        check_seconds("result_ttl", seconds, MAX_DELAY)
        for call in self.stages[0].calls:
            call.task.check_call(call.arguments, takes_result=False)
        job = await begin(tasks, self.stages, float(seconds))
        if (recording := tasks.recording) is not None and recording.inline:
            await recording.sent.run()
        return job


def chain(*steps: TaskCall | Chain) -> Chain:
    """Return calls that follow each other: ``await chain(fetch.s(url), parse.s(), store.s(table="pages")).send()``.

    What a call returns is given to the next one, as its first parameter without a value that has no default; to a call that has
    all it needs it is not given. After :func:`parallel`, it is the list of what the parts returned.

    :raises ConfigError: there is no call, or the calls are of several ``Tasks``.
    :raises InvalidParameterError: a call lacks more than one argument, or has an argument that its task does not take.
    """
    stages: list[Stage] = []
    owners: list[Tasks | None] = []
    for step in steps:
        if isinstance(step, Chain):
            stages += step.stages
            owners.append(step.owner)
        elif isinstance(step, TaskCall):
            stages.append(Stage((step,)))
            owners.append(step.task.tasks)
        else:
            raise InvalidParameterError(f"chain takes calls, as task.s(1), and chains, not {step!r:.100}")
    if not stages:
        raise ConfigError("a chain needs at least one call, as chain(task.s(1))")
    return Chain(_the_one(owners), stages)


def parallel(
    calls: Iterable[TaskCall], *, then: TaskCall | Chain | None = None, concurrency: int = CONCURRENCY
) -> Chain:
    """Return calls that are made in parallel, and a last call that gets the list of their results when all are done.

    ``await parallel([resize.s(path) for path in paths], then=report.s()).send()``. Results are in the order of the calls. Of no
    calls, the list is empty, and ``then`` runs at once.

    :param then: the call, or chain, that gets the list.
    :param concurrency: how many of the calls are under way at once. The others are sent as these end.
    :raises ConfigError: the calls are of several ``Tasks``.
    :raises InvalidParameterError: a call lacks more than one argument, or the concurrency is below 1.
    """
    return together(calls, then, concurrency, None)


def together(calls: Iterable[TaskCall], then: TaskCall | Chain | None, concurrency: int, tasks: Tasks | None) -> Chain:
    """Return the same as :func:`parallel`. ``tasks`` is the owner of the calls, known also where there are none."""
    if not isinstance(calls, Iterable):
        raise InvalidParameterError(f"parallel takes calls, as [task.s(1), task.s(2)], not {calls!r:.100}")
    given = tuple(calls)
    for call in given:
        if not isinstance(call, TaskCall):
            raise InvalidParameterError(f"parallel takes calls, as task.s(1), not {call!r:.100}")
    if not is_whole(concurrency, 1):
        raise InvalidParameterError(f"parallel: concurrency must be a whole number from 1, not {concurrency!r}")
    owner = _the_one([tasks, *(call.task.tasks for call in given)])
    whole = Chain(owner, [Stage(given, is_many=True, concurrency=concurrency)])
    return whole if then is None else chain(whole, then)


def _the_one(owners: Iterable[Tasks | None]) -> Tasks | None:
    found = {id(tasks): tasks for tasks in owners if tasks is not None}
    if len(found) > 1:
        names = ", ".join(repr(tasks.name) for tasks in found.values())
        raise ConfigError(f"the calls of a chain are of several Tasks ({names}); register them on one")
    return next(iter(found.values()), None)
