"""What jobs need of a store that batches, as commands for a :class:`Batcher`: messages by their ids, and records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mainspring.mailbox.batched import Command

if TYPE_CHECKING:
    from mainspring.mailbox.message import Envelope
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
