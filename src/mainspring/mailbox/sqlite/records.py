"""Records: values beside the messages, each with a version that is a number of the file's counter."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from mainspring.errors import MailboxFullError
from mainspring.mailbox.records import RESULT, Record, RecordWrite
from mainspring.mailbox.sqlite import schema as sql
from mainspring.mailbox.sqlite.unit_of_work import Inserts, UnitOfWork

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mainspring.mailbox.job_commands import FindRecords, ListRecords, WriteRecord
    from mainspring.mailbox.message import Result


def write_records(work: UnitOfWork, commands: list[WriteRecord]) -> None:
    """Write records, each in one step with its messages."""
    for command in commands:
        write = command.write
        if write.if_version not in (None, _version_of(work, command.mailbox, write)):
            continue
        if command.envelopes:
            batch = Inserts(work)
            try:
                batch.add_within(command.mailbox, command.envelopes, command.capacity)
            except MailboxFullError as error:
                command.error = error
                continue
            batch.write()
        command.result = _write(work, command.mailbox, write)


def keep_result(work: UnitOfWork, mailbox: int, message_id: str, result: Result) -> None:
    """Write the result of a message that is acknowledged, and have it announced."""
    _write(work, mailbox, RecordWrite(RESULT, message_id, result.value, result.expires_in))
    work.results.setdefault(mailbox, []).append(message_id)


def find_records(work: UnitOfWork, commands: list[FindRecords]) -> None:
    """Find records by their keys."""
    for command in commands:
        values = (command.mailbox, command.kind, json.dumps(command.keys), work.wall)
        command.result = _records(work, sql.FIND_RECORDS, values)


def list_records(work: UnitOfWork, commands: list[ListRecords]) -> None:
    """List records in the order of their keys, which is that of their UTF-8 and so of their code points."""
    for command in commands:
        values = (command.mailbox, command.kind, command.after, command.after, work.wall, command.limit)
        command.result = _records(work, sql.LIST_RECORDS, values)


def _version_of(work: UnitOfWork, mailbox: int, write: RecordWrite) -> int:
    """Return the version of a record, 0 if there is none (any more)."""
    for (version,) in work.rows(sql.VERSION_OF, (mailbox, write.kind, write.key, work.wall)):
        return int(version)
    return 0


def _write(work: UnitOfWork, mailbox: int, write: RecordWrite) -> int:
    if write.value is None:
        work.execute(sql.DELETE_RECORD, (mailbox, write.kind, write.key))
        return 0
    work.tick += 1
    ends = None if write.expires_in is None else work.wall + write.expires_in
    work.execute(sql.WRITE_RECORD, (mailbox, write.kind, write.key, work.tick, ends, write.value))
    if ends is not None:
        work.records_end = ends if work.records_end is None else min(work.records_end, ends)
    return work.tick


def _records(work: UnitOfWork, statement: str, values: Sequence[Any]) -> list[Record]:
    return [Record(*row) for row in work.rows(statement, values)]
