"""The records of the schedules of a mailbox, as its store keeps them.

Beside the record of each schedule there is the list of the names that were changed last, each with a number. A worker that
has seen all changes up to a number reads only what was changed since. The list is written after the schedule. So a change whose
author died in between is found only when a worker lists all schedules again.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

from mainspring.core.loggers import Logger
from mainspring.errors import ConfigError, MailboxConnectionError, SerializationError
from mainspring.mailbox.records import SCHEDULE, SCHEDULES, RecordWrite, check_size
from mainspring.runtime.retry import Retries
from mainspring.tasks.schedules import read_state

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from mainspring.mailbox.mailbox import Mailbox
    from mainspring.mailbox.message import Envelope
    from mainspring.mailbox.records import Record
    from mainspring.tasks.schedules import ScheduleState
    from mainspring.tasks.tasks import Tasks

PAGE = 500
"""How many records are read at once."""
CHANGES = "changes"
"""The key of the list of changes."""
CHANGES_KEPT = 200
"""How many names the list of changes keeps. A worker that has missed more lists all schedules."""
TRIES = 50
"""How often a conditional write is made anew, each time after another one came before it."""

_log = Logger("mainspring.tasks")


class StoredSchedule(NamedTuple):
    """The state of a schedule, and the version of its record."""

    name: str
    state: ScheduleState
    version: int


class Changes(NamedTuple):
    """What a worker reads from the list of changes."""

    seen: int
    """The number of the last change."""
    names: list[str] | None
    """The names that were changed since the number that was asked with; None: more than the list keeps."""


class ScheduleRecords:
    """Reads and writes the records of the schedules of ``tasks``, in the mailbox that it has just now."""

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self._unreadable: set[str] = set()

    @property
    def _mailbox(self) -> Mailbox[Any, Any]:
        return self._tasks.mailbox

    def check(self) -> None:
        """Raise :class:`ConfigError` if the mailbox keeps no records, :class:`MailboxClosedError` if it is not open."""
        self.check_capability()
        self._mailbox.check_open()

    def check_capability(self) -> None:
        """Raise :class:`ConfigError` if the mailbox keeps no records."""
        if not self._mailbox.capabilities.records:
            raise ConfigError(
                f"schedules need a mailbox that keeps records (Capabilities.records), not {self._mailbox!r}"
            )

    async def find(self, names: Iterable[str]) -> list[StoredSchedule]:
        """Return the schedules of these names, as far as they are there."""
        wanted = list(names)
        found: list[StoredSchedule] = []
        for start in range(0, len(wanted), PAGE):
            page = await self._mailbox.backend.find_records(SCHEDULE, wanted[start : start + PAGE])
            found += self._read(page)
        return found

    async def list_all(self) -> list[StoredSchedule]:
        """Return all schedules, in the order of their names."""
        found: list[StoredSchedule] = []
        after: str | None = None
        while True:
            page = await self._mailbox.backend.list_records(SCHEDULE, PAGE, after)
            found += self._read(page)
            if len(page) < PAGE:
                return found
            after = page[-1].key

    async def write(
        self, name: str, state: ScheduleState | None, version: int, envelopes: Sequence[Envelope] = ()
    ) -> bool:
        """Write (or delete, None) a schedule and send messages, in one step. False if another version is there by now.

        :raises SerializationError: it is larger than a record may be.
        """
        value = None if state is None else state.write()
        if value is not None:
            check_size(f"schedule {name!r}", value)
        write = RecordWrite(SCHEDULE, name, value, if_version=version)
        return await self._mailbox.backend.write_record(write, envelopes) is not None

    async def change(
        self, name: str, decide: Callable[[ScheduleState | None], ScheduleState | None]
    ) -> ScheduleState | None:
        """Write what ``decide`` makes of the schedule of that name, and tell the workers. Return what was written."""
        retries = Retries(initial=0.01, maximum=1.0)
        for _ in range(TRIES):
            found = await self.find([name])
            state = decide(found[0].state if found else None)
            if await self.write(name, state, found[0].version if found else 0):
                await self.tell([name])
                return state
            await retries.pause()
        raise _contended(f"schedule {name!r}")

    # -------------------------------------------------------------------------------------------------------- changes

    async def changes(self, seen: int) -> Changes:
        """Return what was changed since the change of the number ``seen``."""
        for record in await self._mailbox.backend.find_records(SCHEDULES, [CHANGES]):
            first, names = _read_changes(record)
            last = first + len(names)
            missed = not first <= seen <= last
            return Changes(last, None if missed else list(dict.fromkeys(names[seen - first :])))
        return Changes(0, [] if seen == 0 else None)

    async def tell(self, names: Sequence[str]) -> None:
        """Add names to the list of changes."""
        retries = Retries(initial=0.01, maximum=1.0)
        for _ in range(TRIES):
            first, kept, version = 0, list[str](), 0
            for record in await self._mailbox.backend.find_records(SCHEDULES, [CHANGES]):
                first, kept = _read_changes(record)
                version = record.version
            dropped = max(0, len(kept) + len(names) - CHANGES_KEPT)
            value = json.dumps({"first": first + dropped, "names": [*kept, *names][dropped:]}).encode()
            write = RecordWrite(SCHEDULES, CHANGES, value, if_version=version)
            if await self._mailbox.backend.write_record(write) is not None:
                return
            await retries.pause()
        raise _contended("the list of changed schedules")

    # --------------------------------------------------------------------------------------------------- declarations

    async def declare(self, digest: str, seconds: float) -> None:
        """Say that a worker which declares this set of definitions runs, for ``seconds``."""
        await self._mailbox.backend.write_record(RecordWrite(SCHEDULES, digest, b"true", seconds))

    async def declared(self, digests: Iterable[str]) -> set[str]:
        """Return the sets among ``digests`` that some worker declares."""
        found = await self._mailbox.backend.find_records(SCHEDULES, sorted(set(digests)))
        return {record.key for record in found}

    # ----------------------------------------------------------------------------------------------------------------

    def _read(self, records: Iterable[Record]) -> list[StoredSchedule]:
        found = []
        for record in records:
            try:
                found.append(StoredSchedule(record.key, read_state(record.value), record.version))
            except SerializationError as error:
                if record.key not in self._unreadable:
                    self._unreadable.add(record.key)
                    _log.error("schedule %r is left alone: %s", record.key, error)
        return found


def _read_changes(record: Record) -> tuple[int, list[str]]:
    said = json.loads(record.value)
    return said["first"], said["names"]


def _contended(what: str) -> MailboxConnectionError:
    return MailboxConnectionError(f"{what} was changed by others {TRIES} times while it was to be written; try again")
