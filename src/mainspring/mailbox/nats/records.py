"""Records on NATS: each is the message of a subject of its own, and its version is that message's number.

The stream ``records`` has three kinds of subjects.

- ``value.KIND.KEY``: a record. Its payload is the value, its headers say when it ends. Every write replaces a number that the
  writer has seen, or is the first. So the server takes one of several writers.
- ``end.INSTANT.KIND.KEY``: a note that a record ends before the instant. ``mark.end.INSTANT`` says that there are notes of it.
  Instants are coarse, so there are few, and a record that is written often has few notes. Once an instant has passed, the
  recovery of an open mailbox looks at the records that are noted, and removes the ended ones.
- ``mark.intent.ID``: the messages that are to be sent with a write. The server cannot take a record and messages in one step.
  So the intent is stored first, then the record, with the id of the intent in its headers: that step decides both. Then the
  messages are sent, and the intent is removed. A writer completes the intent of a record before it replaces that record. So an
  intent that is in no record was never decided. If a writer dies, the recovery of another process completes its intent or
  drops it. The messages name their intent. A process that settles one, or moves it to another stream, completes the intent
  before. So while there is an intent, each of its messages that was sent is where it was sent to, and the server refuses a
  second one. It also takes each of them once in two minutes, from any process, which matters to a message that has a dedup key
  or to a process that has read the intent already.

A cancellation does not come between these steps.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import anyio

from mainspring.core import clock, random
from mainspring.errors import MailboxConnectionError, MailboxError, MailboxFullError
from mainspring.mailbox.limits import check_size
from mainspring.mailbox.nats.messages import RESERVED, decode, digest
from mainspring.mailbox.nats.names import letters, read_letters
from mainspring.mailbox.nats.streams import Add
from mainspring.mailbox.records import RESULT, Record, RecordWrite

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mainspring.mailbox.message import Envelope, Result
    from mainspring.mailbox.nats.messages import StoredMessage
    from mainspring.mailbox.nats.sends import Sends
    from mainspring.mailbox.nats.streams import Store, Stored

ENDS: Final = "Mainspring-Ends"
"""The header of a record that says when it ends (POSIX seconds)."""
INTENT: Final = "Mainspring-Intent"
"""The header of a record that names the intent which was decided with it."""
KEY: Final = "Mainspring-Key"
"""The header of a record whose key is too long for a subject, and of an intent: its kind and key, as JSON."""
LONGEST_KEY: Final = 1_000
"""Letters of a key in a subject. A longer one stands there as its digest."""
SHORTEST_STEP: Final = 64
"""Seconds between two instants at which records with a short life are removed."""
STEPS: Final = 8
"""The number of such instants, at least, in the life of a record that lasts longer."""
REMEMBERED: Final = 1_000
"""Records of which a mailbox object knows what it has written last."""
AT_ONCE: Final = 500
"""Records that are looked at together when their time has come."""
ABANDONED: Final = 10.0
"""Seconds after which an intent that is in no record counts as dropped by its writer: longer than its calls last."""
_TRIES: Final = 20


class KnownRecord(NamedTuple):
    """What a mailbox object knows of a record in the stream; ``sequence`` is 0 if there is none."""

    sequence: int
    ends: float | None = None
    intent: str | None = None

    @classmethod
    def of(cls, stored: Stored | None) -> KnownRecord:
        """Return what is known of a record that was read."""
        return NOTHING if stored is None else cls(stored.sequence, _ends(stored), stored.headers.get(INTENT))

    def version(self, now: float) -> int:
        """Return the version of the record, or 0 if there is none or it has ended."""
        return 0 if self.ends is not None and self.ends <= now else self.sequence


NOTHING: Final = KnownRecord(0)


class _Sending(NamedTuple):
    """The messages of a write, and the intent that keeps them."""

    name: str
    sequence: int
    messages: list[StoredMessage]


class Records:
    """The records of one mailbox object."""

    def __init__(self, store: Store, sends: Sends) -> None:
        self._store = store
        self._sends = sends
        self._wall = clock.wall_clock()
        self._known: dict[str, KnownRecord] = {}
        self._noted: dict[str, None] = {}  # subjects of notes and marks that this object has added
        self._undecided: dict[str, float] = {}  # intents that are in no record, and since when they were seen
        self._completed: dict[str, None] = {}  # intents that are known to be gone
        self._completing = anyio.Lock()

    # -------------------------------------------------------------------------------------------------------- writing

    async def write(self, write: RecordWrite, envelopes: Sequence[Envelope] = ()) -> int | None:
        """See :meth:`Backend.write_record`."""
        if write.value is not None:
            most = self._store.connection.max_payload - RESERVED
            check_size("a record", len(write.value), most, "this NATS server's max_payload leaves for one")
        if envelopes:
            return await self._write_with(write, self._sends.records_of(list(envelopes)))
        seen = self._known.get(self._subject(write.kind, write.key))
        if seen is None and write.value is not None and not write.if_version:
            seen = NOTHING  # a guess, which the server checks
        for _ in range(_TRIES):
            looked = seen is None
            if seen is None:
                seen = KnownRecord.of(await self._look(write.kind, write.key))
            if write.if_version in (None, seen.version(self._wall())):
                version = await self._change(write, seen)
                if version is not None:
                    return version
            elif looked:
                return None
            seen = None
        raise _too_often(write)

    async def _change(self, write: RecordWrite, seen: KnownRecord) -> int | None:
        """Write a record if the version that was seen is still there. Return its version; None if another version is there."""
        store, subject = self._store, self._subject(write.kind, write.key)
        if seen.intent is not None:
            await self._complete(seen.intent)
        if write.value is None:
            self._known.pop(subject, None)
            return 0 if not seen.sequence or await store.remove(store.names.records, seen.sequence) else None
        return (await self._replace(write, seen, None)) or None

    async def _replace(self, write: RecordWrite, seen: KnownRecord, intent: str | None) -> int:
        """Store a record in place of the version seen (with an intent, also of a deleted one). Return its number, or 0."""
        subject, now = self._subject(write.kind, write.key), self._wall()
        ends = None if write.expires_in is None else now + write.expires_in
        if write.value is None:
            ends = 0.0
        elif write.expires_in is not None:
            await self._note_end(write, now, write.expires_in)
        headers = self._headers(write.kind, write.key, ends, intent)
        added = await self._store.add(Add(subject, write.value or b"", seen.sequence, None, headers))
        if added.sequence:
            self._remember(subject, KnownRecord(added.sequence, ends, intent))
        return added.sequence

    async def _note_end(self, write: RecordWrite, now: float, life: float) -> None:
        """Have a record looked at once its life is over, before it is written."""
        instant = _instant(now, life)
        to_records = self._store.names.to_records
        token = self._subject(write.kind, write.key).removeprefix(f"{to_records}value.")
        adds = [Add(f"{to_records}mark.end.{instant}", b""), Add(f"{to_records}end.{instant}.{token}", b"")]
        adds = [add for add in adds if add.subject not in self._noted]
        for result in await self._store.add_all(adds):
            if isinstance(result, MailboxError):
                raise result
        self._noted.update((add.subject, None) for add in adds)
        _forget_oldest(self._noted)

    def _remember(self, subject: str, seen: KnownRecord) -> None:
        self._known.pop(subject, None)
        self._known[subject] = seen
        _forget_oldest(self._known)

    # -------------------------------------------------------------------------------------------------- with messages

    async def _write_with(self, write: RecordWrite, messages: list[StoredMessage]) -> int | None:
        there = await self._look(write.kind, write.key)
        if write.if_version not in (None, KnownRecord.of(there).version(self._wall())):
            return None
        with anyio.CancelScope(shield=True):  # every call has a deadline
            sending = await self._announce(write, messages)
            for _ in range(_TRIES):
                seen = KnownRecord.of(there)
                if write.if_version not in (None, seen.version(self._wall())):
                    break
                if seen.intent is not None:
                    await self._complete(seen.intent)
                version = await self._replace(write, seen, sending.name)
                if version:
                    await self._send_decided(write, sending, version, there)
                    return 0 if write.value is None else version
                there = await self._look(write.kind, write.key)
            await self._store.remove(self._store.names.records, sending.sequence)
        if write.if_version is None:
            raise _too_often(write)
        return None

    async def _announce(self, write: RecordWrite, messages: list[StoredMessage]) -> _Sending:
        """Store the messages that are to be sent if the write takes place."""
        name = random.token(96)
        for message in messages:
            message.intent = name
        payload = _written(messages)
        most = self._store.connection.max_payload - RESERVED
        check_size(
            "the messages of a record", len(payload), most, "this NATS server's max_payload leaves for all of them"
        )
        headers = {KEY: json.dumps([write.kind, write.key])}
        added = await self._store.add(Add(self._intent(name), payload, None, None, headers))
        return _Sending(name, added.sequence, messages)

    async def _send_decided(self, write: RecordWrite, sending: _Sending, version: int, there: Stored | None) -> None:
        """Send the messages of a write that took place in the stead of ``there``; if there is no room, undo all."""
        names = self._store.names
        try:
            await self._sends.send_once(sending.name, sending.messages)
        except MailboxFullError:
            if await self._restore(write, version, there):
                await self._sends.remove_sent(sending.messages)
                await self._store.remove(names.records, sending.sequence)
                raise
            return  # another writer has completed it
        await self._store.remove(names.records, sending.sequence)
        self._note_completed(sending.name)
        if write.value is None:
            await self._store.remove(names.records, version)
            self._known.pop(self._subject(write.kind, write.key), None)

    async def _restore(self, write: RecordWrite, version: int, there: Stored | None) -> bool:
        """Put back what a write has replaced. Return True if that was still to be done."""
        subject, store = self._subject(write.kind, write.key), self._store
        self._known.pop(subject, None)
        if there is None:
            return await store.remove(store.names.records, version)
        headers = self._headers(write.kind, write.key, _ends(there), None)
        return bool((await store.add(Add(subject, there.payload, version, None, headers))).sequence)

    async def _complete(self, name: str) -> None:
        """Send the messages of an intent that is in a record, unless that is done."""
        async with self._completing:
            stored = await self._store.last(self._store.names.records, self._intent(name))
            if stored is not None:
                await self._sends.send_once(name, _read(stored.payload))
                await self._store.remove(self._store.names.records, stored.sequence)
        self._note_completed(name)

    def _note_completed(self, name: str) -> None:
        self._completed[name] = None
        _forget_oldest(self._completed)

    async def finish(self, messages: Iterable[StoredMessage]) -> None:
        """Complete the writes that sent these messages before they leave their place, so that no process sends them again.

        If there is no room for all messages of a write, its intent stays.
        """
        names = {message.intent for message in messages if message.intent is not None}
        unknown = [name for name in names if name not in self._completed]
        if not unknown:
            return
        found = await self._store.last_all(self._store.names.records, [self._intent(name) for name in unknown])
        for name, stored in zip(unknown, found, strict=True):
            if isinstance(stored, MailboxError):
                raise stored
            if stored is None:
                self._note_completed(name)
                continue
            with suppress(MailboxFullError):
                await self._complete(name)

    # -------------------------------------------------------------------------------------------------------- results

    async def keep_result(self, message_id: str, result: Result) -> int:
        """Write the result of a message that is about to be acknowledged. Return its version."""
        return await self.write(RecordWrite(RESULT, message_id, result.value, result.expires_in)) or 0

    async def drop_result(self, message_id: str, version: int) -> None:
        """Remove a result whose message could not be acknowledged, if no other one has been written since."""
        self._known.pop(self._subject(RESULT, message_id), None)
        await self._store.remove(self._store.names.records, version)

    # -------------------------------------------------------------------------------------------------------- reading

    async def find(self, kind: str, keys: Iterable[str]) -> list[Record]:
        """See :meth:`Backend.find_records`."""
        wanted = {self._subject(kind, key): key for key in keys}
        now = self._wall()
        records = []
        found = await self._store.last_all(self._store.names.records, list(wanted))
        for key, stored in zip(wanted.values(), found, strict=True):
            if isinstance(stored, MailboxError):
                raise stored
            if stored is not None and KnownRecord.of(stored).version(now):
                records.append(Record(kind, key, stored.payload, stored.sequence))
        return records

    async def list(self, kind: str, limit: int, after: str | None) -> list[Record]:
        """See :meth:`Backend.list_records`. The server sends the names of all records of the kind, for each page."""
        names = self._store.names
        prefix = f"{names.to_records}value.{letters(kind)}."
        subjects = await self._store.subjects(names.records, f"{prefix}*")
        short, long = f"{prefix}k-", [subject for subject in subjects if subject.startswith(f"{prefix}h-")]
        keys = [read_letters(subject.removeprefix(short)) for subject in subjects if subject.startswith(short)]
        for stored in await self._store.last_all(names.records, long):
            if isinstance(stored, MailboxError):
                raise stored
            if stored is not None and (named := _kind_and_key(stored)) is not None:
                keys.append(named[1])
        keys = sorted(key for key in keys if after is None or key > after)
        records: list[Record] = []
        while keys and len(records) < limit:
            some = limit - len(records)
            records += await self.find(kind, keys[:some])
            keys = keys[some:]
        return records

    async def _look(self, kind: str, key: str) -> Stored | None:
        subject = self._subject(kind, key)
        stored = await self._store.last(self._store.names.records, subject)
        self._known.pop(subject, None)
        return stored

    # ------------------------------------------------------------------------------------------------- looking after

    async def tend(self) -> None:
        """Remove records whose time has come, and complete or drop the intents of writers that died."""
        names = self._store.names
        if names.records not in self._store.made:
            return
        prefix = f"{names.to_records}mark."
        undecided: dict[str, float] = {}
        for mark in await self._store.subjects(names.records, f"{prefix}>"):
            what, _, name = mark.removeprefix(prefix).partition(".")
            if what == "intent":
                since = await self._finish_or_drop(name)
                if since is not None:
                    undecided[name] = since
            elif name.isdigit() and int(name) <= self._wall():
                await self._remove_ended(name)
        self._undecided = undecided

    async def _finish_or_drop(self, name: str) -> float | None:
        """Complete an intent that is in a record; drop any other intent after a while. Return since when it waits for that."""
        store, now = self._store, anyio.current_time()
        stored = await store.last(store.names.records, self._intent(name))
        if stored is None:
            return None
        named = _kind_and_key(stored)
        record = None if named is None else await self._look(*named)
        if record is not None and record.headers.get(INTENT) == name:
            await self._complete(name)
            if _ends(record) == 0.0:
                await store.remove(store.names.records, record.sequence)
            return None
        since = self._undecided.get(name, now)
        if now - since < max(ABANDONED, 2 * store.connection.timeout):
            return since
        await store.remove(store.names.records, stored.sequence)
        return None

    async def _remove_ended(self, instant: str) -> None:
        """Remove those of the records noted for an instant that have ended, then the notes."""
        store, names = self._store, self._store.names
        prefix = f"{names.to_records}end.{instant}."
        tokens = [note.removeprefix(prefix) for note in await store.subjects(names.records, f"{prefix}>")]
        for start in range(0, len(tokens), AT_ONCE):
            subjects = [f"{names.to_records}value.{token}" for token in tokens[start : start + AT_ONCE]]
            over = []
            for stored in await store.last_all(names.records, subjects):
                if isinstance(stored, MailboxError):
                    raise stored
                if stored is not None and not (seen := KnownRecord.of(stored)).version(self._wall()):
                    if seen.intent is not None:
                        await self._complete(seen.intent)
                    over.append(stored.sequence)
            await store.remove_all(names.records, over)
        await store.purge(names.records, f"{prefix}>")
        await store.purge(names.records, f"{names.to_records}mark.end.{instant}")

    # -------------------------------------------------------------------------------------------------------- subjects

    def _subject(self, kind: str, key: str) -> str:
        text = letters(key)
        token = f"k-{text}" if len(text) <= LONGEST_KEY else f"h-{digest(key)}"
        return f"{self._store.names.to_records}value.{letters(kind)}.{token}"

    def _intent(self, name: str) -> str:
        return f"{self._store.names.to_records}mark.intent.{name}"

    def _headers(self, kind: str, key: str, ends: float | None, intent: str | None) -> dict[str, str]:
        headers = {}
        if ends is not None:
            headers[ENDS] = repr(ends)
        if intent is not None:
            headers[INTENT] = intent
        if len(letters(key)) > LONGEST_KEY:
            headers[KEY] = json.dumps([kind, key])
        return headers


def _ends(stored: Stored) -> float | None:
    """Return when a record ends; None: it does not, or another program wrote it."""
    with suppress(KeyError, ValueError):
        return float(stored.headers[ENDS])
    return None


def _kind_and_key(stored: Stored) -> tuple[str, str] | None:
    """Return what a message says of the record that it is, or is about; None: another program wrote it."""
    try:
        kind, key = json.loads(stored.headers[KEY])
    except (KeyError, ValueError, TypeError):
        return None
    return str(kind), str(key)


def _instant(now: float, life: float) -> int:
    """Return an instant behind the end of a life, in seconds. Of all lives of about that length few are different."""
    step = SHORTEST_STEP
    while step * STEPS < life:
        step *= 2
    return (int(now + life) // step + 1) * step


def _written(messages: list[StoredMessage]) -> bytes:
    """Write messages one after the other, behind a line with their lengths."""
    parts = [message.encode() for message in messages]
    return b"".join((json.dumps([len(part) for part in parts]).encode(), b"\n", *parts))


def _read(payload: bytes) -> list[StoredMessage]:
    line, _, rest = payload.partition(b"\n")
    messages, start = [], 0
    for length in json.loads(line):
        messages.append(decode(rest[start : start + length], 0, 0.0))
        start += length
    return messages


def _forget_oldest(known: dict[str, Any]) -> None:
    while len(known) > REMEMBERED:
        del known[next(iter(known))]


def _too_often(write: RecordWrite) -> MailboxConnectionError:
    return MailboxConnectionError(
        f"the record {write.kind} {write.key[:100]!r} was changed by others {_TRIES} times meanwhile"
    )
