"""Records: small values that a mailbox keeps beside its messages, each under a kind and a key, for a time or until deleted.

The results of calls, the progress of handlers, the schedules and the workers are records. A write can depend on the version
that is there, and messages can be sent in one step with it. So of many workers that act on one record, one does.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Final

from mainspring.errors import SerializationError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

MAX_RECORD: Final = 262_144
"""The most bytes of a record's value: what each store takes, with room for what it adds."""
RESULT: Final = "result"
"""The kind of the record that says how a message ended; its key is the message's id."""
PROGRESS: Final = "progress"
"""The kind of the record that says how far a handler is; its key is the message's id."""
SCHEDULE: Final = "schedule"
"""The kind of the record of a schedule; its key is the schedule's name."""
SCHEDULES: Final = "schedules"
"""The kind of the records about all schedules: what was changed of late, and which declarations are in use."""
CHAIN: Final = "chain"
"""The kind of the record of a chain of calls; its key is the chain's id."""
CHAIN_PART: Final = "mainspring-chain"
"""The header of the messages of a chain: its id, the stage and the part, with slashes between them."""
TASK_HEADER: Final = "mainspring-task"
KEY_HEADER: Final = "mainspring-key"
"""The headers that tell the task and the key of a message whose body and place in the queue are gone."""
WORKER: Final = "worker"
"""The kind of the record of a loop that works on the mailbox; its key is new at each run."""
RESULT_TTL: Final = "mainspring-result-ttl"
"""The header of a message that asks for its end to be kept as a record, and says for how many seconds."""


@dataclass(frozen=True, slots=True)
class Record:
    """A value as the store has it. ``version`` is new at each write, and is never used twice in a mailbox."""

    kind: str
    key: str
    value: bytes
    version: int


@dataclass(frozen=True, slots=True)
class RecordWrite:
    """A change of one record.

    :param value: the value from now on; None deletes the record.
    :param expires_in: seconds after which the record is deleted; None: never.
    :param if_version: the version that must be there for the write to take place. 0: there must be none. None: any, or none.
    """

    kind: str
    key: str
    value: bytes | None
    expires_in: float | None = None
    if_version: int | None = None


def check_size(what: str, value: bytes, kind: type[SerializationError] = SerializationError) -> None:
    """Raise :class:`SerializationError`, or the given kind of it, if ``value`` is larger than a record may be."""
    if len(value) > MAX_RECORD:
        raise kind(
            f"{what} is {len(value):,} bytes of JSON, and at most {MAX_RECORD:,} are kept; keep it elsewhere, and say where"
        )


def as_stored(said: DataclassInstance) -> dict[str, Any]:
    """Return the fields of a dataclass as JSON data, without fields that have their defaults.

    So a version without a newer field can read values that do not use it.
    """
    data = asdict(said)
    return {field.name: data[field.name] for field in fields(said) if data[field.name] != field.default}
