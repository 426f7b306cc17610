"""What jobs need of a store that batches, as commands for a :class:`Batcher`: messages by their ids and in lists, limits, and
records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mainspring.mailbox.batched import Command, OfDelivery

if TYPE_CHECKING:
    from mainspring.mailbox.limiters import LimitChange
    from mainspring.mailbox.message import Envelope, MessageQuery
    from mainspring.mailbox.records import RecordWrite


@dataclass(eq=False, repr=False, slots=True)
class Find(Command):
    """Find the unfinished messages among these ids; results in :class:`UnfinishedMessage` of each."""

    ids: list[str]


@dataclass(eq=False, repr=False, slots=True)
class Reschedule(Command):
    """Let a message that waits become pending in ``delay`` seconds; results in a :class:`RescheduleOutcome`."""

    message_id: str
    delay: float


@dataclass(eq=False, repr=False, slots=True)
class ReplaceBody(Command):
    """Let a message that waits have another body; results in a :class:`RescheduleOutcome`."""

    message_id: str
    body: bytes


@dataclass(eq=False, repr=False, slots=True)
class ListMessages(Command):
    """List a page of the unfinished messages; results in a :class:`MessagePage`."""

    query: MessageQuery


@dataclass(eq=False, repr=False, slots=True)
class ChangeLimits(Command):
    """Change limits in one step."""

    changes: list[LimitChange]


@dataclass(eq=False, repr=False, slots=True)
class SetTask(OfDelivery):
    """Release the message as one of ``task``, if that has limits; results in True if it belonged to another before."""

    task: str


@dataclass(eq=False, repr=False, slots=True)
class ListLimits(Command):
    """Results in the :class:`LimitState` of each task that has limits, in the order of their names."""


@dataclass(eq=False, repr=False, slots=True)
class WriteRecord(Command):
    """Change a record and send messages, both or neither, while no more than ``capacity`` messages wait.

    Results in the record's version, or None if another version than expected is there.
    """

    write: RecordWrite
    envelopes: list[Envelope]
    capacity: int | None = None


@dataclass(eq=False, repr=False, slots=True)
class FindRecords(Command):
    """Find the records of a kind under these keys."""

    kind: str
    keys: list[str]


@dataclass(eq=False, repr=False, slots=True)
class ListRecords(Command):
    """List up to ``limit`` records of a kind in the order of their keys, those behind ``after``."""

    kind: str
    limit: int
    after: str | None
