"""``Snapshot``: a session's slices at one moment as plain JSON data, with the versions by which they can be read again."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import UnionType
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin

from mainspring.errors import InvalidParameterError, ReducerError, SerializationError, UnknownVersionError
from mainspring.mailbox.codec import Codec, why_unreadable
from mainspring.state.session.records import EventCodecs, StoredEvent, Version, version_of
from mainspring.validation import is_whole

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mainspring.state.session.slices import Slices, Values

FORMAT = 1
"""The shape of a snapshot itself."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The slices of a session and of its children. Plain JSON data: ``ctx.checkpoint(session.snapshot())`` works.

    ``version`` is that of the state class (see :func:`~mainspring.state.session.records.versioned`), ``seq`` the number of the
    last event in it.
    """

    seq: int
    version: int
    slices: Mapping[str, Any]
    children: Mapping[str, Snapshot] = field(default_factory=dict)
    format: int = FORMAT

    def to_json(self) -> bytes:
        """Return it as JSON, for :meth:`Session.restore` at another time.

        :raises SerializationError: it is nested too deep to be read back.
        """
        from pydantic_core import to_json

        raw = to_json(self)
        if (reason := why_unreadable(raw)) is not None:
            raise SerializationError(f"the snapshot cannot be written as JSON: {reason}, and could not be read back")
        return raw

    @classmethod
    def of(cls, given: Any, known: int = 1) -> Snapshot:
        """Make one from a snapshot, or from its JSON as text, bytes or the mapping that it was.

        :param known: the version of the state class: a newer one is named where the rest cannot be read.
        :raises UnknownVersionError: it is of a newer format, or of a newer version and cannot be read.
        :raises InvalidParameterError: it is no snapshot.
        """
        if isinstance(given, cls):
            return given
        if isinstance(given, str | bytes):
            from pydantic_core import from_json

            try:
                given = from_json(given)
            except ValueError as error:
                raise InvalidParameterError(f"restore: this is no snapshot, but no JSON at all: {error}") from None
        if not isinstance(given, Mapping):
            raise InvalidParameterError(
                f"restore: a snapshot, or its JSON, is needed, not a {type(given).__qualname__}"
            )
        if "format" in given and given["format"] != FORMAT:
            raise UnknownVersionError(
                f"restore: the snapshot is of format {given['format']!r}, and this release knows {FORMAT}; upgrade it"
            )
        seq, version = given.get("seq"), given.get("version")
        slices: Any = given.get("slices")
        children = given.get("children", {})
        whole = "format" in given and isinstance(slices, Mapping) and isinstance(children, Mapping)
        if not (whole and is_whole(seq, 0) and is_whole(version, 1)):
            if is_whole(version, known + 1):
                raise UnknownVersionError(
                    f"restore: the snapshot is of version {version}, and this code knows it up to version {known};"
                    " a newer release wrote it: upgrade here too"
                )
            raise InvalidParameterError("restore: this is no snapshot: it has no format, seq, version or slices")
        if wrong := [name for name in children if not is_child_name(name)]:
            raise InvalidParameterError(f"restore: this is no snapshot: no child can be called {wrong[0]!r}")
        return cls(seq, version, dict(slices), {name: cls.of(child) for name, child in children.items()})


def is_child_name(name: Any) -> bool:
    """True if a child session can be called that."""
    return isinstance(name, str) and name != "" and "/" not in name


class SnapshotCodec:
    """Takes and reads the snapshots of one set of slices."""

    def __init__(self, name: str, slices: Slices) -> None:
        self._name = name
        self._slices = slices
        self._codecs: dict[tuple[str, int], SliceCodec] = {}

    def take(self, values: Values) -> dict[str, Any]:
        """Return the slices as JSON data.

        :raises SerializationError: one of them is no JSON, or would come back as something else.
        """
        taken: dict[str, Any] = {}
        for name, value in values.items():
            with self._named(name):
                taken[name] = self._codec(name).write(value)
        return taken

    def read(self, snapshot: Snapshot) -> Values:
        """Return the slices that a snapshot holds. A slice that it does not know yet has its initial value."""
        data = self._version.up_to_date(dict(snapshot.slices), snapshot.version)
        if not isinstance(data, Mapping):
            raise SerializationError(f"session {self._name!r}: the upcaster of its state returned no mapping of slices")
        if unknown := set(data) - set(self._slices.initial):
            raise SerializationError(
                f"session {self._name!r} has no slice {min(unknown)!r}, which the snapshot holds; raise the version of the"
                " state with an upcaster that drops it"
            )
        values = dict(self._slices.initial)
        for name, raw in data.items():
            with self._named(name):
                values[name] = self._codec(name).read(raw)
        try:
            self._slices.check(values)
        except ReducerError as error:
            raise SerializationError(str(error)) from error
        return values

    @contextmanager
    def _named(self, name: str) -> Iterator[None]:
        """Have an error say which slice it is of."""
        where = f"session {self._name!r}: slice {name!r}"
        try:
            yield
        except SerializationError as error:
            if str(error).startswith(where):
                raise
            raise SerializationError(f"{where}: {error}") from error

    @property
    def version(self) -> int:
        """The version of the state class."""
        return self._version.number

    @property
    def _version(self) -> Version:
        kind = self._slices.state_class
        return Version(self._name) if kind is None else version_of(kind)

    def _codec(self, name: str) -> SliceCodec:
        key = name, self._slices.revision
        found = self._codecs.get(key)
        if found is None:
            kind = self._slices.type_of(name)
            found = self._codecs[key] = SliceCodec(self._name, name, kind, self._slices.event_types)
        return found


class SliceCodec:
    """Writes and reads one slice. Events in it are written as in a journal, with type and version: ``tuple[A | B, ...]`` needs
    the one, and their upcasters the other. What is written without is read by its annotation, as it is today."""

    def __init__(self, session: str, name: str, kind: Any, event_types: tuple[type[Any], ...]) -> None:
        args = get_args(kind)
        self._many = get_origin(kind) is tuple and len(args) == 2 and args[1] is ...
        item = args[0] if self._many else kind
        members = get_args(item) if get_origin(item) in (Union, UnionType) else (item,)
        classes = tuple(member for member in members if isinstance(member, type))
        held = [event_type for event_type in event_types if issubclass(event_type, classes)]
        self._events = EventCodecs(session, "", held, holder=f"slice {name!r}") if held else None
        self._whole, self._item = Codec(kind), Codec(item) if held else None

    def write(self, value: Any) -> Any:
        """Return a value as JSON data.

        :raises SerializationError: it is no JSON, or would come back as something else.
        """
        from pydantic_core import from_json

        if self._events is not None and self._many and type(value) is tuple:
            return from_json(b"[%s]" % b",".join([self._write_item(item) for item in value]))
        if self._events is not None and not self._many and self._events.knows(type(value)):
            return from_json(self._events.encode(value))
        return from_json(self._whole.encode(value))

    def _write_item(self, item: Any) -> bytes:
        assert self._events is not None
        assert self._item is not None
        if self._events.knows(type(item)):
            return self._events.encode(item)
        return self._item.encode(item)

    def read(self, data: Any) -> Any:
        """Return the value that the data holds.

        :raises SerializationError: it does not fit.
        :raises UnknownEventError: it holds an event of a type that is not registered.
        :raises UnknownVersionError: or one of a version that this code does not know.
        """
        from pydantic_core import to_json

        if self._events is None:
            return self._whole.decode(to_json(data))
        if not self._many:
            return self._read_item(data)
        if isinstance(data, list | tuple) and any(_stored(item) for item in data):
            return tuple([self._read_item(item) for item in data])
        return self._whole.decode(to_json(data))

    def _read_item(self, data: Any) -> Any:
        from pydantic_core import to_json

        assert self._events is not None
        assert self._item is not None
        stored = _stored(data)
        return self._item.decode(to_json(data)) if stored is None else self._events.decode(stored)


def _stored(data: Any) -> StoredEvent | None:
    """Return the event that was written so, or None if it is something else."""
    if isinstance(data, Mapping) and data.keys() == {"type", "v", "data"} and isinstance(data["type"], str):
        return StoredEvent("", data["type"], data["v"], data["data"])
    return None
