"""Chains: calls that follow each other, each with the result of the one before, and calls that are made in parallel.

A chain is a list of stages, and a stage is one call or many. A record (kind ``chain``) says which stage is under way, which
of its parts were sent, and which are done. When a part has run, its worker writes the record anew and sends what comes next, in
one step that depends on the record's version. So whatever crashes, a part that was recorded as done is not run again, and each
part is sent once. A part that was not recorded is run again, as every message is.

The calls lie in records of their own (``chain calls``), in pages. So do the results of a stage with many parts (``chain
part``), until the last part has come. When the last stage has ended, the record of the chain keeps the result for a time.

What is decided is in this file, and :mod:`mainspring.tasks.chain_runs` does it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Self

from mainspring.core import random
from mainspring.errors import ConfigError, InvalidParameterError
from mainspring.mailbox.limits import check_seconds
from mainspring.mailbox.records import RecordWrite, check_size
from mainspring.tasks.calls import TaskCall, head
from mainspring.validation import MAX_DELAY, Seconds, as_seconds, is_whole

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mainspring.tasks.chain_runs import ChainJob
    from mainspring.tasks.tasks import Tasks

CHAIN: Final = "chain"
"""The kind of the record of a chain, and the header of its messages: the chain's id, the stage and the part."""
CALLS: Final = "chain calls"
PART: Final = "chain part"
PAGE = 100
"""How many calls of a stage are in one record."""
CONCURRENCY = 100
"""How many parts of a stage are sent at once, where nothing else is said."""
CHAIN_LIFE = MAX_DELAY
"""Seconds for which the records of a chain are kept after its last step."""
RESULT_LIFE = 3_600.0
"""Seconds for which the result of a chain is kept, where nothing else is said."""

RUNNING: Final = "running"
DONE: Final = "done"
CANCELLED: Final = "cancelled"


# ------------------------------------------------------------------------------------------------------- definition


@dataclass(frozen=True)
class Stage:
    """The calls that are made next: one, or many, of which ``concurrency`` are under way at once."""

    calls: tuple[TaskCall, ...]
    is_many: bool = False
    concurrency: int = CONCURRENCY


class Chain:
    """Calls that follow each other, not sent yet: from :func:`chain`, :func:`parallel` or :meth:`Task.map`."""

    def __init__(self, tasks: Tasks, stages: Sequence[Stage]) -> None:
        self.tasks = tasks
        self.stages = tuple(stages)
        for stage in stages:
            for call in stage.calls:
                call.task.check_call(call.arguments, takes_result=True)

    def __repr__(self) -> str:
        parts = (f"{len(stage.calls)} parts" if stage.is_many else repr(stage.calls[0]) for stage in self.stages)
        return f"<Chain {' → '.join(parts)}>"

    async def send(self, *, result_ttl: Seconds = RESULT_LIFE) -> ChainJob:
        """Send its first calls. Return its job once they are as durable as the mailbox makes them.

        :param result_ttl: seconds, or a timedelta, for which its result is kept after its end.
        :raises ConfigError: the mailbox keeps no records (``Capabilities.records``).
        :raises InvalidParameterError: one of the first calls lacks an argument.
        :raises SerializationError: an argument is not of its type, or a call is larger than a record may be.

        And what :meth:`Mailbox.send` raises. Cancelled, all or none of the first calls may have been sent.
        """
        from mainspring.tasks.chain_runs import begin

        seconds = as_seconds(result_ttl)
        check_seconds("result_ttl", seconds, MAX_DELAY)
        for call in self.stages[0].calls:
            call.task.check_call(call.arguments, takes_result=False)
        return await begin(self, float(seconds))


def chain(*steps: TaskCall | Chain) -> Chain:
    """Return calls that follow each other: ``await chain(fetch.s(url), parse.s(), store.s(table="pages")).send()``.

    What a call returns is given to the next one, as its first parameter without a value that has no default; to a call that has
    all it needs it is not given. After :func:`parallel`, it is the list of what the parts returned.

    :raises ConfigError: there is no call, or the calls are of several ``Tasks``.
    :raises InvalidParameterError: a call lacks more than one argument, or has one that its task does not take.
    """
    stages: list[Stage] = []
    for step in steps:
        if isinstance(step, Chain):
            stages += step.stages
        elif isinstance(step, TaskCall):
            stages.append(Stage((step,)))
        else:
            raise InvalidParameterError(f"chain takes calls, as task.s(1), and chains, not {step!r:.100}")
    return Chain(_tasks_of(stages), stages)


def parallel(
    calls: Iterable[TaskCall], *, then: TaskCall | Chain | None = None, concurrency: int = CONCURRENCY
) -> Chain:
    """Return calls that are made in parallel, and one that is made with the list of their results when all are done.

    ``await parallel([resize.s(path) for path in paths], then=report.s()).send()``. Results are in the order of the calls.

    :param then: the call, or chain, that gets the list.
    :param concurrency: how many of the calls are under way at once. The others are sent as these end.
    :raises ConfigError: there is no call, or the calls are of several ``Tasks``.
    :raises InvalidParameterError: a call lacks more than one argument, or the concurrency is below 1.
    """
    given = tuple(calls)
    for call in given:
        if not isinstance(call, TaskCall):
            raise InvalidParameterError(f"parallel takes calls, as task.s(1), not {call!r:.100}")
    if not is_whole(concurrency, 1):
        raise InvalidParameterError(f"parallel: concurrency must be a whole number from 1, not {concurrency!r}")
    stages = [Stage(given, is_many=True, concurrency=concurrency)]
    whole = Chain(_tasks_of(stages), stages)
    return whole if then is None else chain(whole, then)


def _tasks_of(stages: Sequence[Stage]) -> Tasks:
    owners = {id(call.task.tasks): call.task.tasks for stage in stages for call in stage.calls}
    if not owners:
        raise ConfigError("a chain needs at least one call, as chain(task.s(1))")
    if len(owners) > 1:
        names = ", ".join(repr(tasks.name) for tasks in owners.values())
        raise ConfigError(f"the calls of a chain are of several Tasks ({names}); register them on one")
    return next(iter(owners.values()))


# ------------------------------------------------------------------------------------------------------ what is stored


@dataclass(frozen=True)
class StoredCall:
    """A call as a page keeps it: the task, the JSON of the arguments that are given, and which one gets the result before."""

    task: str
    given: str
    into: str | None
    priority: int
    headers: dict[str, str]

    @classmethod
    def of(cls, call: TaskCall) -> StoredCall:
        """Return the call as it is stored. Raise :class:`SerializationError` if an argument is not of its type."""
        task = call.task
        given, into = task.parameters.encode_given(call.arguments)
        return cls(task.name, given.decode(), into, task.sending.priority, task.sending.own_headers)

    def body(self, result: bytes) -> bytes:
        """Return the JSON of the message, with the ``result`` (JSON) of the stage before."""
        args = self.given.encode()
        if self.into is not None:
            comma = b"" if args == b"{}" else b","
            args = args[:-1] + comma + json.dumps(self.into).encode() + b":" + result + b"}"
        return head(self.task) + args + b"}"


def pages_of(chain_id: str, stages: Sequence[Stage]) -> list[RecordWrite]:
    """Return the writes that store the calls of a chain.

    :raises SerializationError: an argument is not of its type, or a page is larger than a record may be.
    """
    writes = []
    for number, stage in enumerate(stages):
        calls = [vars(StoredCall.of(call)) for call in stage.calls]
        for page in range(0, len(calls), PAGE):
            value = json.dumps(calls[page : page + PAGE]).encode()
            check_size(f"a page of {PAGE} calls of a chain", value)
            writes.append(RecordWrite(CALLS, page_key(chain_id, number, page // PAGE), value, CHAIN_LIFE))
    return writes


def page_key(chain_id: str, stage: int, page: int) -> str:
    """Return the key of a page of calls."""
    return f"{chain_id}/{stage}/{page:07d}"


def part_key(chain_id: str, stage: int, part: int) -> str:
    """Return the key of the result of a part."""
    return f"{chain_id}/{stage}/{part:09d}"


@dataclass(frozen=True)
class Place:
    """Which part of a chain a message is; the header of the message says it."""

    chain_id: str
    stage: int
    part: int

    @classmethod
    def read(cls, header: str) -> Self:
        """Return the place that a header names."""
        chain_id, stage, part = header.rsplit("/", 2)
        return cls(chain_id, int(stage), int(part))

    def __str__(self) -> str:
        return f"{self.chain_id}/{self.stage}/{self.part}"

    @property
    def message_id(self) -> str:
        """The id of its message: the same for whoever sends it."""
        return f"{self.chain_id}-{self.stage}-{self.part}"


@dataclass(frozen=True)
class ChainState:
    """A chain as its record has it."""

    chain_id: str
    version: int
    stages: tuple[tuple[int, bool, int], ...]
    """Of each stage: how many parts it has, whether it is of many, and its concurrency."""
    result_ttl: float
    stage: int = 0
    sent: int = 0
    """How many parts of the stage were sent."""
    done: int = 0
    """Which of them are done: a bit each."""
    state: str = RUNNING
    result: bytes = b"null"
    """JSON: what the stage before returned; of a chain that is done, its result."""
    task: str = ""
    """The task of the last stage, if that is of one part."""

    @classmethod
    def first(cls, chain_id: str, chain: Chain, result_ttl: float) -> ChainState:
        """Return the state of a chain of which nothing is sent."""
        stages = tuple((len(stage.calls), stage.is_many, stage.concurrency) for stage in chain.stages)
        last = chain.stages[-1]
        return cls(chain_id, 0, stages, result_ttl, task="" if last.is_many else last.calls[0].task.name)

    @classmethod
    def read(cls, chain_id: str, version: int, value: bytes) -> ChainState:
        """Return the state that a record holds."""
        before, _, result = value.partition(b',"result":')
        said = json.loads(before + b"}")
        said["stages"] = tuple(tuple(stage) for stage in said["stages"])
        said["done"] = int(said["done"], 16)
        return cls(chain_id, version, **said, result=result[:-1])

    def write(self) -> RecordWrite:
        """Return the write of this state, on the version that it came from."""
        said = {
            "stages": self.stages, "result_ttl": self.result_ttl, "stage": self.stage, "sent": self.sent,
            "done": f"{self.done:x}", "state": self.state, "task": self.task,
        }  # fmt: skip
        value = json.dumps(said, separators=(",", ":")).encode()[:-1] + b',"result":' + self.result + b"}"
        check_size("what a stage of a chain has returned", value)
        life = CHAIN_LIFE if self.state == RUNNING else max(self.result_ttl, 1.0)
        return RecordWrite(CHAIN, self.chain_id, value, life, self.version)

    @property
    def parts(self) -> int:
        """How many parts the present stage has."""
        return self.stages[self.stage][0]

    @property
    def is_many(self) -> bool:
        """True if the present stage is of many parts."""
        return self.stages[self.stage][1]

    @property
    def under_way(self) -> list[Place]:
        """The parts of the present stage that were sent and are not done."""
        undone = (part for part in range(self.sent) if not self.done >> part & 1)
        return [Place(self.chain_id, self.stage, part) for part in undone]

    # ------------------------------------------------------------------------------------------------- what comes next

    def awaits(self, place: Place) -> bool:
        """True if the part is still to be recorded as done."""
        return self.state == RUNNING and self.stage == place.stage and not self.done >> place.part & 1

    def with_done(self, part: int) -> ChainState:
        """Return the state with a part of the present stage done."""
        return replace(self, done=self.done | 1 << part)

    @property
    def is_stage_done(self) -> bool:
        """True if all parts of the present stage are done."""
        return self.done == (1 << self.parts) - 1

    def with_sent(self) -> tuple[ChainState, range]:
        """Return the state in which parts of the present stage are sent up to its concurrency, and which these are."""
        most = self.stages[self.stage][2]
        done = self.done.bit_count()
        sent = min(self.parts, done + most)
        return replace(self, sent=max(sent, self.sent)), range(self.sent, sent)

    def next_stage(self, result: bytes) -> ChainState:
        """Return the state after the present stage, which returned ``result`` (JSON)."""
        if self.stage + 1 == len(self.stages):
            return replace(self, state=DONE, result=result)
        return replace(self, stage=self.stage + 1, sent=0, done=0, result=result)


def new_chain_id() -> str:
    """Return a new id of a chain."""
    return f"chain-{random.token(96)}"
