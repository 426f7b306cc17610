"""Arrays on their way to the server, in PostgreSQL's binary form. Thousands of elements a second pass here."""

from __future__ import annotations

from struct import Struct, pack, unpack_from
from typing import TYPE_CHECKING, Any

from psycopg.adapt import Dumper
from psycopg.pq import Format

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from psycopg.adapt import AdaptersMap

_HEADER = Struct("!iiIii")
_LENGTH = Struct("!i").pack
_NULL = b"\xff\xff\xff\xff"


class Packed(bytes):
    """An array, ready to be sent."""

    __slots__ = ()


class Texts(Packed):
    """``text[]``"""

    __slots__ = ()


class Blobs(Packed):
    """``bytea[]``"""

    __slots__ = ()


class Shorts(Packed):
    """``smallint[]``"""

    __slots__ = ()


class Integers(Packed):
    """``integer[]``"""

    __slots__ = ()


class Longs(Packed):
    """``bigint[]``"""

    __slots__ = ()


class Floats(Packed):
    """``float8[]``"""

    __slots__ = ()


_ARRAYS: dict[type[Packed], tuple[int, int, str, int]] = {
    Texts: (1009, 25, "", 0),
    Blobs: (1001, 17, "", 0),
    Shorts: (1005, 21, "ih", 2),
    Integers: (1007, 23, "ii", 4),
    Longs: (1016, 20, "iq", 8),
    Floats: (1022, 701, "id", 8),
}


def texts(values: Sequence[str | None]) -> Texts:
    """A ``text[]``."""
    return Texts(_joined(25, [None if value is None else value.encode() for value in values]))


def blobs(values: Sequence[bytes | None]) -> Blobs:
    """A ``bytea[]``."""
    return Blobs(_joined(17, values))


def numbers(kind: type[Packed], values: Sequence[float | None]) -> Packed:
    """An array of numbers, of the given kind."""
    _, element, form, size = _ARRAYS[kind]
    if not values:
        return kind(_HEADER.pack(0, 0, element, 0, 0)[:12])
    if None not in values:
        flat: list[Any] = [size] * (2 * len(values))
        flat[1::2] = values
        return kind(_HEADER.pack(1, 0, element, len(values), 1) + pack("!" + form * len(values), *flat))
    one = "!" + form[1]
    return kind(_joined(element, [None if value is None else pack(one, value) for value in values]))


def _joined(element: int, values: Sequence[bytes | None]) -> bytes:
    if not values:
        return _HEADER.pack(0, 0, element, 0, 0)[:12]
    parts = [_HEADER.pack(1, int(None in values), element, len(values), 1)]
    for value in values:
        if value is None:
            parts.append(_NULL)
        else:
            parts += (_LENGTH(len(value)), value)
    return b"".join(parts)


class _AsItIs(Dumper):
    format = Format.BINARY

    def dump(self, obj: Any) -> Any:
        return obj


class _InItsEncoding(_AsItIs):
    """What is packed as UTF-8 leaves in the encoding of the connection, which is a sender's own where it is another."""

    def dump(self, obj: Any) -> Any:
        encoding = self.connection.info.encoding if self.connection is not None else "utf-8"
        if encoding in ("utf-8", "ascii"):  # the latter is a connection that converts nothing
            return obj
        return _joined(25, [None if value is None else value.decode().encode(encoding) for value in _parts(obj)])


def _parts(packed: bytes) -> Iterator[bytes | None]:
    """The elements of a packed array."""
    place = 20
    while place < len(packed):
        (length,) = unpack_from("!i", packed, place)
        place += 4
        yield None if length < 0 else packed[place : place + length]
        place += max(length, 0)


_DUMPERS = {
    kind: type(f"_{kind.__name__}Dumper", (_InItsEncoding if kind is Texts else _AsItIs,), {"oid": oid})
    for kind, (oid, *_) in _ARRAYS.items()
}
"""Made once: the driver keeps each class that was ever registered."""


def register(adapters: AdaptersMap) -> None:
    """Let a connection (or a cursor) take packed arrays as parameters."""
    for kind, dumper in _DUMPERS.items():
        adapters.register_dumper(kind, dumper)
