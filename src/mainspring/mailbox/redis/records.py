"""What a Redis mailbox asks of its library of functions for records: the commands, how each is written, and its result read.

``lua/records.lua`` says how records are kept. In the library a record has one name, of its kind and its key.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

from mainspring.errors import MailboxConnectionError
from mainspring.mailbox import batched
from mainspring.mailbox.job_commands import FindRecords, ListRecords, WriteRecord
from mainspring.mailbox.limits import full
from mainspring.mailbox.records import RESULT, Record
from mainspring.mailbox.redis.commands import (
    AGAIN,
    NO_MEMORY,
    encoded,
    head_of,
    life_of,
    micros,
    more_of,
    reply_part,
    single,
    take_settled,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mainspring.mailbox.batched import Command
    from mainspring.mailbox.message import Envelope
    from mainspring.mailbox.redis.client import FunctionCall
    from mainspring.mailbox.redis.commands import Argument, Operation

MOST_LISTED: Final = 1_000
"""Records of one answer to a list; the library sends fewer if they are large."""


@dataclass(eq=False, repr=False, slots=True)
class ReplyWithResult(batched.Reply):
    """The message is done. Its result is kept, and the reply that it may have is sent."""


# ------------------------------------------------------------------------------------------------------------ writing


def _name_of(kind: str, key: str) -> bytes:
    """Return the name of a record: in the order of the names' bytes, the keys of a kind are in that of their code points."""
    return encoded(kind) + b"\0" + encoded(key)


def _write(call: FunctionCall, command: WriteRecord) -> Iterator[Argument]:
    write, most = command.write, command.capacity
    yield from ("write_record", call.records(call.name), _name_of(write.kind, write.key))
    yield "" if write.if_version is None else write.if_version
    yield from (0, "", 0) if write.value is None else (1, write.value, life_of(write.expires_in))
    yield -1 if most is None else most
    groups = [list(alike) for _, alike in groupby(command.envelopes, key=_sent_as)]
    yield len(groups)
    for envelopes in groups:
        yield from _write_messages(envelopes)


def _sent_as(envelope: Envelope) -> tuple[int, float, float | None]:
    return envelope.priority, envelope.delay, envelope.expires_in


def _write_messages(envelopes: list[Envelope]) -> Iterator[Argument]:
    """Yield messages of one priority, delay and expiry; large bodies stay with them."""
    first = envelopes[0]
    has_keys = any(envelope.dedup_key is not None for envelope in envelopes)
    parts = has_keys + 2 * any(envelope.task is not None for envelope in envelopes)
    yield from (len(envelopes), -first.priority, micros(first.delay), life_of(first.expires_in), parts)
    for envelope in envelopes:
        yield from (envelope.message_id, head_of(envelope) + envelope.body)
        if parts:
            yield from more_of(envelope, parts)


def _reply(call: FunctionCall, command: ReplyWithResult) -> Iterator[Argument]:
    delivery, result = command.delivery, command.ack.result
    assert result is not None
    yield from ("reply_with_result", call.records(call.name), _name_of(RESULT, delivery.message_id))
    yield from (result.value, life_of(result.expires_in), encoded(delivery.receipt_handle))
    yield from reply_part(call, command.ack.reply)


def _find(call: FunctionCall, command: FindRecords) -> Iterator[Argument]:
    yield from ("find_records", call.records(call.name), len(command.keys))
    yield from (_name_of(command.kind, key) for key in command.keys)


def _list(call: FunctionCall, command: ListRecords) -> Iterator[Argument]:
    kind, after = command.kind, command.after
    begin = b"[" + _name_of(kind, "") if after is None else b"(" + _name_of(kind, after)
    yield from ("list_records", call.records(call.name), begin, b"(" + encoded(kind) + b"\1")
    yield min(command.limit, MOST_LISTED)


# ------------------------------------------------------------------------------------------------------------ reading


def _take_written(command: WriteRecord, result: Any) -> None:
    problem = result[0] if result else None
    if problem == b"full":
        command.error = full(result[1], command.capacity or 0, result[2])
    elif problem == b"oom":
        command.error = MailboxConnectionError(NO_MEMORY)
    else:
        command.result = AGAIN if problem == b"again" else problem


def _take_records(command: FindRecords, result: Any) -> None:
    """Set the records that one answer holds, and how many of the keys were looked up: at least one."""
    looked_up, rows = result
    command.result = _read(command.kind, rows), looked_up


def _take_page(command: ListRecords, result: Any) -> None:
    """Set the records that one answer holds, and the key behind which there may be more, else None."""
    if result == -1:
        command.result = AGAIN
        return
    last, rows = result
    command.result = _read(command.kind, rows), _key_of(last) if last else None


def _read(kind: str, rows: list[bytes]) -> list[Record]:
    records = []
    for name, stored in zip(rows[::2], rows[1::2], strict=True):
        version, _, value = stored.split(b"|", 2)
        records.append(Record(kind, _key_of(name), value, int(version)))
    return records


def _key_of(name: bytes) -> str:
    return name.partition(b"\0")[2].decode("utf-8", "surrogatepass")


RECORD_OPERATIONS: Final[dict[type[Command], Operation]] = {
    ReplyWithResult: single(2, _reply, take_settled),
    WriteRecord: single(6, _write, _take_written),
    FindRecords: single(10, _find, _take_records),
    ListRecords: single(10, _list, _take_page),
}
