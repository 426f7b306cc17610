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

from mainspring.core import clock, random
from mainspring.errors import ResultTooLargeError
from mainspring.mailbox.limits import check_send
from mainspring.mailbox.records import CHAIN, MAX_RECORD, RecordWrite, as_stored, check_size
from mainspring.runtime.deadline import with_deadline
from mainspring.tasks.calls import head
from mainspring.tasks.keys import share_of
from mainspring.validation import MAX_DELAY, as_seconds

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mainspring.tasks.calls import OutgoingCall, TaskCall

CALLS: Final = "chain calls"
PART: Final = "chain part"
PAGE = 100
"""The most calls of a stage in one record."""
CONCURRENCY = 100
"""How many parts of a stage are sent at once, where nothing else is said."""
CHAIN_LIFE = MAX_DELAY
"""Seconds for which the records of a chain are kept after its last step."""

RUNNING: Final = "running"
DONE: Final = "done"
CANCELLED: Final = "cancelled"


@dataclass(frozen=True)
class Stage:
    """The calls that are made next: one, or many, of which ``concurrency`` are under way at once."""

    calls: tuple[TaskCall, ...]
    is_many: bool = False
    concurrency: int = CONCURRENCY


# ------------------------------------------------------------------------------------------------------ what is stored


@dataclass(frozen=True)
class StoredCall:
    """A call as a page keeps it: the task, the JSON of the arguments that are given, and which one gets the result before."""

    task: str
    given: str
    into: str | None
    priority: int
    headers: dict[str, str]
    expires_in: float | None
    delay: float = 0.0
    key: str | None = None
    weight: float = 1.0

    @classmethod
    def of(cls, call: OutgoingCall) -> StoredCall:
        """Return the call as it is stored.

        :raises SerializationError: an argument is not of its type.
        :raises InvalidParameterError: an option is outside the limits of :meth:`Mailbox.send`.
        """
        task = call.task
        given, into = task.parameters.encode_given(call.arguments)
        how = task.sending
        headers = with_deadline(call.headers, how.deadline) or {}
        expiry = None if how.expires_in is None else float(as_seconds(how.expires_in))
        delay = as_seconds(how.delay)
        check_send(delay, None, how.priority, headers, expiry)
        share = share_of(task, call.arguments) if task.has_key else ()
        return cls(task.name, given.decode(), into, how.priority, dict(headers), expiry, float(delay), *share)

    def body(self, result: bytes) -> bytes:
        """Return the JSON of the message, with the ``result`` (JSON) of the stage before."""
        args = self.given.encode()
        if self.into is not None:
            comma = b"" if args == b"{}" else b","
            args = args[:-1] + comma + json.dumps(self.into).encode() + b":" + result + b"}"
        return head(self.task) + args + b"}"


def pages_of(chain_id: str, stages: Sequence[Sequence[OutgoingCall]]) -> tuple[list[RecordWrite], list[int]]:
    """Return the writes that store the calls of each stage of a chain, and how many calls a page of each stage has.

    :raises SerializationError: an argument is not of its type, or a call is larger than a record may be.
    """
    writes: list[RecordWrite] = []
    sizes: list[int] = []
    for number, stage in enumerate(stages):
        calls = [json.dumps(as_stored(StoredCall.of(call))).encode() for call in stage]
        sizes.append(size := _page_size(calls))
        for page, first in enumerate(range(0, len(calls), size)):
            value = _page(calls[first : first + size])
            check_size(f"a call of task {stage[first].task.name} in a chain", value)
            writes.append(RecordWrite(CALLS, page_key(chain_id, number, page), value, CHAIN_LIFE))
    return writes, sizes


def _page(calls: list[bytes]) -> bytes:
    return b"[" + b",".join(calls) + b"]"


def _page_size(calls: list[bytes]) -> int:
    """Return how many calls a page has, so that each page is as large as a record may be or smaller."""
    size = PAGE
    while size > 1 and any(
        len(_page(calls[first : first + size])) > MAX_RECORD for first in range(0, len(calls), size)
    ):
        size //= 2
    return size


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
        """The id of its message, which follows from the place: each worker that sends it gives it the same."""
        return f"{self.chain_id}-{self.stage}-{self.part}"


@dataclass(frozen=True)
class ChainState:
    """A chain as its record has it."""

    chain_id: str
    version: int
    stages: tuple[tuple[int, bool, int, int], ...]
    """Of each stage: how many parts it has, whether it is of many, its concurrency, and how many calls a page of it has."""
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
    sent_at: float = 0.0
    """When the chain was sent (POSIX seconds)."""
    ended_at: float = 0.0
    """When it was done or cancelled; 0 before."""

    @classmethod
    def first(cls, chain_id: str, given: Sequence[Stage], pages: Sequence[int], result_ttl: float) -> ChainState:
        """Return the state of a chain of which nothing is sent. ``pages`` is what :func:`pages_of` returns.

        It is done if it has no parts at all.
        """
        stages = tuple(
            (len(stage.calls), stage.is_many, stage.concurrency, page) for stage, page in zip(given, pages, strict=True)
        )
        last = given[-1]
        task = "" if last.is_many else last.calls[0].task.name
        now = clock.utc_now().timestamp()
        return cls(chain_id, 0, stages, result_ttl, task=task, sent_at=now).past_empty()

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
            "done": f"{self.done:x}", "state": self.state, "task": self.task, "sent_at": self.sent_at,
            "ended_at": self.ended_at,
        }  # fmt: skip
        value = json.dumps(said, separators=(",", ":")).encode()[:-1] + b',"result":' + self.result + b"}"
        check_size("what a stage of a chain has returned", value, ResultTooLargeError)
        life = CHAIN_LIFE if self.state == RUNNING else max(self.result_ttl, 1.0)
        return RecordWrite(CHAIN, self.chain_id, value, life, self.version)

    @property
    def parts(self) -> int:
        """How many parts the present stage has."""
        return self.stages[self.stage][0]

    @property
    def page(self) -> int:
        """How many calls of the present stage are in one record."""
        return self.stages[self.stage][3]

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

    def is_past(self, stage: int) -> bool:
        """True if no part of the stage is awaited any more."""
        return self.state != RUNNING or self.stage > stage

    def with_done(self, parts: Iterable[int]) -> ChainState:
        """Return the state with these parts of the present stage done."""
        done = self.done
        for part in parts:
            done |= 1 << part
        return replace(self, done=done)

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
            return self.ended(DONE, result)
        return replace(self, stage=self.stage + 1, sent=0, done=0, result=result).past_empty()

    def past_empty(self) -> ChainState:
        """Return the state after the present stage if that has no parts: their results are an empty list."""
        return self if self.parts else self.next_stage(b"[]")

    def ended(self, state: str, result: bytes = b"null") -> ChainState:
        """Return the state of the chain that was done or cancelled now."""
        return replace(self, state=state, result=result, ended_at=clock.utc_now().timestamp())


def new_chain_id() -> str:
    """Return a new id of a chain."""
    return f"chain-{random.token(96)}"
