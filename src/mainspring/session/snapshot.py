"""``Snapshot``: a session's slices at one moment as plain JSON data, with the versions by which they can be read again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mainspring.errors import InvalidParameterError, SerializationError, UnknownVersionError
from mainspring.mailbox.codec import Codec
from mainspring.session.versions import Version, version_of
from mainspring.values import is_whole

if TYPE_CHECKING:
    from mainspring.session.slices import Slices, Values

FORMAT = 1
"""The shape of a snapshot itself."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The slices of a session and of its children. Plain JSON data: ``ctx.checkpoint(session.snapshot())`` works.

    ``version`` is that of the state class (see :func:`~mainspring.session.versions.versioned`), ``seq`` the number of the
    last event in it.
    """

    seq: int
    version: int
    slices: Mapping[str, Any]
    children: Mapping[str, Snapshot] = field(default_factory=dict)
    format: int = FORMAT

    def to_json(self) -> bytes:
        """As JSON, for :meth:`Session.restore` at another time."""
        from pydantic_core import to_json

        return to_json(self)

    @classmethod
    def of(cls, given: Any, known: int = 1) -> Snapshot:
        """From a snapshot, or from its JSON as text, bytes or the mapping that it was.

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
        return cls(seq, version, dict(slices), {name: cls.of(child) for name, child in children.items()})


class Picture:
    """Takes and reads the snapshots of one set of slices."""

    def __init__(self, name: str, slices: Slices) -> None:
        self._name = name
        self._slices = slices
        self._codecs: dict[str, Codec] = {}

    def take(self, values: Values) -> dict[str, Any]:
        """The slices as JSON data."""
        from pydantic_core import from_json

        return {name: from_json(self._codec(name).encode(value)) for name, value in values.items()}

    def read(self, snapshot: Snapshot) -> Values:
        """The slices that a snapshot holds; one that it does not know yet is as at first."""
        from pydantic_core import to_json

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
            try:
                values[name] = self._codec(name).decode(to_json(raw))
            except SerializationError as error:
                raise SerializationError(f"session {self._name!r}: slice {name!r}: {error}") from error
        return values

    @property
    def version(self) -> int:
        """That of the state class."""
        return self._version.number

    @property
    def _version(self) -> Version:
        kind = self._slices.state_class
        return Version(self._name) if kind is None else version_of(kind)

    def _codec(self, name: str) -> Codec:
        found = self._codecs.get(name)
        if found is None:
            found = self._codecs[name] = Codec(self._slices.type_of(name))
        return found
