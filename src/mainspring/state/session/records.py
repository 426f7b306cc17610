"""How entries are stored: the names and versions of events and states, and one line of JSON with a checksum for each."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from zlib import crc32

from mainspring.core.introspection import is_async, ran
from mainspring.errors import (
    ConfigError,
    JournalDamagedError,
    SerializationError,
    UnknownEventError,
    UnknownVersionError,
    describe,
)
from mainspring.mailbox.codec import Codec, why_unreadable
from mainspring.validation import is_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping


C = TypeVar("C", bound=type[Any])

_ATTRIBUTE = "__mainspring_version__"


@dataclass(frozen=True, slots=True)
class Version:
    """The stored name of a class, the number of its present shape, and the functions that lead there from older ones."""

    name: str
    number: int = 1
    upcast: Mapping[int, Callable[[Any], Any]] = field(default_factory=dict)

    def up_to_date(self, data: Any, number: int) -> Any:
        """Return ``data`` (plain JSON), stored as version ``number``, in its present shape."""
        from pydantic_core import to_json

        if not is_whole(number, 1) or number > self.number:
            raise UnknownVersionError(
                f"{self.name!r} is stored in version {number!r}, and this code knows it up to version {self.number};"
                " a newer release wrote it: upgrade here too"
            )
        for old in range(number, self.number):
            step = self.upcast.get(old)
            if step is None:
                raise UnknownVersionError(
                    f"{self.name!r} is stored in version {number}, and nothing leads from version {old} to {old + 1}: give"
                    f" @versioned({self.number}, upcast={{{old}: …}})"
                )
            try:
                data = ran(step(data), "it")
                to_json(data)
            except (Exception, SystemExit) as error:
                raise SerializationError(
                    f"the upcaster of {self.name!r} from version {old} failed: {describe(error)}"
                ) from error
        return data


def versioned(
    number: int, *, upcast: Mapping[int, Callable[[Any], Any]] | None = None, name: str | None = None
) -> Callable[[C], C]:
    """Store events or states of the decorated class as version ``number`` (1 without the decorator).

    :param upcast: by old number, the function from that version's JSON data to the next one's: ``{1: one_to_two}``. A stored
        version that none leads on from raises :class:`UnknownVersionError` when it is read.
    :param name: what the class is called where it is stored (its own name, where there is none): keep it when you rename it.
    :raises ConfigError: the number is not a whole one from 1, or an upcaster is for no older version, or is async.
    """
    steps = dict(upcast or {})
    if not is_whole(number, 1):
        raise ConfigError(f"versioned: the version must be a whole number from 1, not {number!r}")
    for old, step in steps.items():
        if not (is_whole(old, 1) and old < number and callable(step)):
            raise ConfigError(f"versioned({number}): {old!r} is no older version with a function to the next one")
        if is_async(step):
            raise ConfigError(f"versioned({number}): the upcaster from version {old} is async; give a plain function")

    def decorate(kind: C) -> C:
        setattr(kind, _ATTRIBUTE, Version(name or _name(kind), number, steps))
        return kind

    return decorate


def version_of(kind: type[Any]) -> Version:
    """Return what :func:`versioned` said of the class itself, not of one above it, else version 1 under its own name."""
    said = vars(kind).get(_ATTRIBUTE)
    return said if isinstance(said, Version) else Version(_name(kind))


def _name(kind: type[Any]) -> str:
    return kind.__qualname__.rpartition("<locals>.")[2]


_SEAL = re.compile(rb',"crc":"([0-9a-f]{8})"\}')
_HEAD = re.compile(rb'\{"seq":\d+')
LEVELS = 10
"""In how many lists and objects an event's data may come to stand: three in an entry, five in that of a snapshot, and two
more for each child that it is a child of."""
REMEDY = "restore the journal from a copy, or open it up to there: Session.open(…, up_to_damage=True)"
"""What to do about a damaged journal."""
SEAL_LENGTH = len(b',"crc":"00000000"}')


class StoredEvent(NamedTuple):
    """An event as an entry holds it. ``path`` is the child session's ("" for the session that has the journal)."""

    path: str
    type: str
    version: int
    data: Any


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """A journal's entry, read: events, or a snapshot (JSON data)."""

    seq: int
    events: tuple[StoredEvent, ...] = ()
    snapshot: Any = None

    @property
    def last(self) -> int:
        """The number of its last event."""
        return self.seq + max(0, len(self.events) - 1)


def entry_of_events(seq: int, events: Iterable[bytes]) -> bytes:
    """Return an entry of events that :meth:`EventCodecs.encode` has written."""
    return _seal(b'{"seq":%d,"events":[%s]}' % (seq, b",".join(events)))


def entry_of_snapshot(seq: int, snapshot: bytes) -> bytes:
    """Return an entry that replaces all that was before it.

    :raises SerializationError: it could not be read.
    """
    if (reason := why_unreadable(snapshot, within=1)) is not None:
        raise SerializationError(f"a snapshot cannot be written to the journal: {reason}, and could not be read back")
    return _seal(b'{"seq":%d,"snapshot":%s}' % (seq, snapshot))


def _seal(raw: bytes) -> bytes:
    return b'%s,"crc":"%08x"}' % (raw[:-1], crc32(raw[:-1]))


def read_entry(raw: bytes, place: str) -> JournalEntry:
    """Return the entry that ``raw`` holds. ``place`` says in an error where it stands.

    :raises JournalDamagedError: it is not what was written.
    """
    from pydantic_core import from_json

    if not is_sealed(raw):
        raise JournalDamagedError(f"{place} is not what was written there; {REMEDY}")
    try:
        data = from_json(raw)
        found = data.get("events", ())
        events = tuple(StoredEvent(event.get("in", ""), event["type"], event["v"], event["data"]) for event in found)
        return JournalEntry(data["seq"], events, data.get("snapshot"))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise JournalDamagedError(
            f"{place} is whole, but no entry of a session's journal ({error!r}); {REMEDY}"
        ) from None


def is_sealed(raw: bytes) -> bool:
    """True if it is an entry as it was written, by its checksum."""
    seal = _SEAL.fullmatch(raw, max(0, len(raw) - SEAL_LENGTH))
    return seal is not None and int(seal[1], 16) == crc32(raw[:-SEAL_LENGTH])


def is_journal(head: bytes, last: bytes) -> bool:
    """True if a file is a journal, damaged or not.

    Its ``head`` begins as an entry does, whole or not, or ``last``, its last whole line, ends like one.
    """
    if _SEAL.fullmatch(last, max(0, len(last) - SEAL_LENGTH)):
        return True
    number = _HEAD.match(head)
    if number is None:
        return b'{"seq":'.startswith(head)
    rest = head[number.end() :]
    return any(rest.startswith(begin) or begin.startswith(rest) for begin in (b',"events":[', b',"snapshot":{'))


class EventCodecs:
    """Writes and reads the events of one session, by the names under which they are stored.

    :param holder: what holds them besides a journal, a slice, for errors.
    """

    def __init__(self, session: str, path: str, kinds: Iterable[type[Any]], holder: str = "") -> None:
        self._session = session
        self._where = f"session {session!r}: {holder}" if holder else f"session {session!r}"
        self._holder = self._where if holder else f"{self._where}: the journal"
        self._head = b'{"in":%s,' % _text(path) if path else b"{"
        self._by_type: dict[type[Any], tuple[bytes, Codec]] = {}
        self._by_name: dict[str, tuple[type[Any], Version, Codec]] = {}
        for kind in kinds:
            self._add(kind)

    def _add(self, kind: type[Any]) -> None:
        version = version_of(kind)
        if version.name in self._by_name:
            raise ConfigError(
                f"session {self._session!r}: two event types are stored as {version.name!r}; give one of them another name:"
                " @versioned(1, name=…)"
            )
        try:
            codec = Codec(kind)
        except ConfigError as error:
            raise ConfigError(f"session {self._session!r}: an event cannot be written as JSON: {error}") from error
        self._by_name[version.name] = kind, version, codec
        head = b'%s"type":%s,"v":%d,"data":' % (self._head, _text(version.name), version.number)
        self._by_type[kind] = head, codec

    def knows(self, kind: type[Any]) -> bool:
        """True if events of exactly that class can be written."""
        return kind in self._by_type

    def encode(self, event: Any) -> bytes:
        """Return one event for :func:`entry_of_events`.

        :raises SerializationError: it is not of its type as that is annotated, or no JSON, or would be read as something else.
        :raises UnknownEventError: it is of a subclass that is not registered itself, and could not be read again.
        """
        found = self._by_type.get(type(event))
        if found is None:
            raise UnknownEventError(
                f"session {self._session!r}: {type(event).__qualname__} is not registered itself, only a class above it:"
                " register it, so that the journal can be read again"
            )
        head, codec = found
        try:
            raw = codec.encode(event)
            if (reason := why_unreadable(raw, LEVELS)) is not None:
                raise SerializationError(f"it cannot be written: {reason}, and could not be read back")
        except SerializationError as error:
            raise SerializationError(f"{self._where}: event {type(event).__qualname__}: {error}") from error
        return b"%s%s}" % (head, raw)

    def decode(self, stored: StoredEvent) -> Any:
        """Return the event that was stored, brought up to date.

        :raises UnknownEventError: nothing is registered under its name.
        :raises UnknownVersionError: it is of a version that the code does not know, or that nothing leads on from.
        :raises SerializationError: it does not fit its type.
        """
        from pydantic_core import to_json

        found = self._by_name.get(stored.type)
        if found is None:
            raise UnknownEventError(
                f"{self._holder} holds an event {stored.type!r}, which is not registered; register"
                " its class, or give the renamed one its old name: @versioned(…, name=…)"
            )
        _, version, codec = found
        data = version.up_to_date(stored.data, stored.version)
        try:
            return codec.decode(to_json(data))
        except SerializationError as error:
            raise SerializationError(f"{self._where}: event {stored.type!r}: {error}") from error


def _text(value: str) -> bytes:
    from pydantic_core import to_json

    return to_json(value)
