"""Turn messages and settlements into parameters of the server's functions, and their rows into messages.

Arrays are packed here, in PostgreSQL's binary form: thousands of elements pass each second.
"""

from __future__ import annotations

import json
from struct import Struct, pack, unpack_from
from typing import TYPE_CHECKING, Any, Final, TypeVar

from psycopg.types.string import BytesBinaryDumper

from mainspring.mailbox.codec import headers_of
from mainspring.mailbox.limits import is_name, size_of
from mainspring.mailbox.message import Ack, ClaimedMessage, Dead, MessagePlace, Nack, UnfinishedMessage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from psycopg.adapt import AdaptersMap

    from mainspring.mailbox.message import Envelope
    from mainspring.mailbox.postgres.commands import Settle
    from mainspring.mailbox.records import RecordWrite

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


def array(kind: type[Packed], values: Sequence[Any], encoding: str = "utf-8") -> Packed:
    """Pack ``values``, of which some may be None, as an array of that kind; texts in ``encoding``."""
    _, element, form, size = _ARRAYS[kind]
    if not values:
        return kind(_HEADER.pack(0, 0, element, 0, 0)[:12])
    has_null = None in values
    header = _HEADER.pack(1, has_null, element, len(values), 1)
    if form and not has_null:
        flat: list[Any] = [size] * (2 * len(values))
        flat[1::2] = values
        return kind(header + pack("!" + form * len(values), *flat))
    parts = [header]
    for value in values:
        if value is None:
            parts.append(_NULL)
            continue
        if kind is Texts:
            raw = value.encode(encoding)
        elif form:
            raw = pack("!" + form[1], value)
        else:
            raw = value
        parts += (_LENGTH(len(raw)), raw)
    return kind(b"".join(parts))


class _TextsDumper(BytesBinaryDumper):
    """Texts, which are packed as UTF-8, leave in the encoding of the connection."""

    oid = _ARRAYS[Texts][0]

    def dump(self, obj: Any) -> Any:
        encoding = self.connection.info.encoding if self.connection is not None else "utf-8"
        if encoding in ("utf-8", "ascii"):  # the latter is a connection that converts nothing
            return obj
        return array(Texts, [None if value is None else value.decode() for value in _parts(obj)], encoding)


def _parts(packed: bytes) -> Iterator[bytes | None]:
    """Yield the elements of a packed array."""
    place = 20
    while place < len(packed):
        (length,) = unpack_from("!i", packed, place)
        place += 4
        yield None if length < 0 else packed[place : place + length]
        place += max(length, 0)


def elements(packed: Packed) -> list[Any]:
    """Return the elements of a packed array, for a driver that packs arrays itself."""
    form = _ARRAYS[type(packed)][2]
    if form:
        return [None if raw is None else unpack_from("!" + form[1], raw)[0] for raw in _parts(packed)]
    if isinstance(packed, Texts):
        return [None if raw is None else raw.decode() for raw in _parts(packed)]
    return list(_parts(packed))


def literal(value: Any) -> str | None:
    """Return a parameter as PostgreSQL reads it from a text of any type; None for NULL."""
    if value is None:
        return None
    if isinstance(value, Packed):
        return "{" + ",".join(map(_element, elements(value))) + "}"
    return "\\x" + value.hex() if isinstance(value, bytes) else str(value)


def _element(value: Any) -> str:
    text = literal(value)
    if text is None:
        return "NULL"
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


_DUMPERS = {
    kind: type(f"_{kind.__name__}Dumper", (BytesBinaryDumper,), {"oid": oid}) for kind, (oid, *_) in _ARRAYS.items()
}
"""Made once: the driver keeps each class that was ever registered."""


def register(adapters: AdaptersMap, *, is_utf8: bool = False) -> None:
    """Let a connection (or a cursor) take packed arrays as parameters; ``is_utf8``: its encoding is and stays UTF-8."""
    for kind, dumper in _DUMPERS.items():
        adapters.register_dumper(kind, dumper)
    if not is_utf8:
        adapters.register_dumper(Texts, _TextsDumper)


C = TypeVar("C")
PORTION = 5_000_000
"""Bytes from which the messages, replies or checkpoints of a batch go in several calls: on one of 1 GiB the server hangs up."""


def size_of_settlement(command: Settle) -> int:
    """Return the bytes that come with the end of a message: its reply, or why it is dead."""
    settlement = command.settlement
    if isinstance(settlement, Nack):
        return 0
    size = 0 if settlement.reply is None else size_of(settlement.reply)
    if isinstance(settlement, Ack) and settlement.result is not None:
        size += len(settlement.result.value)
    if isinstance(settlement, Dead):
        size += len(settlement.error) + len(settlement.traceback) + len(settlement.history or "")
    return size


def portions(commands: Sequence[C], size: Callable[[C], int]) -> Iterator[list[C]]:
    """Yield neighbours that one call can take, by their sizes; usually all of them."""
    some: list[C] = []
    total = 0
    for command in commands:
        if total >= PORTION:
            yield some
            some, total = [], 0
        some.append(command)
        total += size(command)
    if some:
        yield some


def has_options(envelope: Envelope) -> bool:
    """True if it has options beyond a dedup key."""
    return bool(
        envelope.delay
        or envelope.priority
        or envelope.headers
        or envelope.reply_to is not None
        or envelope.expires_in is not None
    )


def options_values(envelopes: list[Envelope]) -> tuple[Any, ...]:
    """Return what ``send_with_options`` and ``send_many_dedup`` take behind the ids and the bodies."""
    return (
        array(Floats, [e.delay for e in envelopes]),
        array(Shorts, [-e.priority for e in envelopes]),
        array(Texts, [e.reply_to for e in envelopes]),
        array(Texts, [headers_text(e) for e in envelopes]),
        array(Floats, [e.expires_in for e in envelopes]),
    )


LONGEST_NAME: Final = 2_048
"""Bytes of a task or a key that are kept as they are: 512 characters. An entry of an index has room for 2,704 bytes."""


def task_values(envelopes: list[Envelope]) -> tuple[Any, ...]:
    """Return the tasks, the keys and the weights, as functions take them that store messages of tasks."""
    return (
        array(Texts, [None if e.task is None else stored_name(e.task) for e in envelopes]),
        array(Texts, [_key_of(e) for e in envelopes]),
        array(Floats, [None if e.weight == 1.0 else float(e.weight) for e in envelopes]),
    )


def task_of(envelope: Envelope) -> tuple[Any, ...]:
    """Return the task, the key and the weight of one message."""
    task = None if envelope.task is None else stored_name(envelope.task)
    return task, _key_of(envelope), float(envelope.weight)


def _key_of(envelope: Envelope) -> str | None:
    return None if envelope.task is None or envelope.key is None else stored_name(envelope.key)


def stored_key(key: str) -> str:
    """Return a dedup key as the store keeps it: as it is, or its digest if an index or a text cannot hold it."""
    raw = key.encode("utf-8", "surrogatepass")
    if len(raw) <= 512 and "\0" not in key and key.isprintable():
        return key
    return _digest(raw)


def stored_name(name: str) -> str:
    """Return a task or the key of a call as the store keeps it: as it is, as lists show it, or its digest if it cannot be."""
    raw = name.encode("utf-8", "surrogatepass")
    return name if len(raw) <= LONGEST_NAME and is_name(name) else _digest(raw)


def _digest(raw: bytes) -> str:
    from hashlib import sha256

    return f"sha256:{sha256(raw).hexdigest()}"


def headers_text(envelope: Envelope) -> str | None:
    """Return the headers as JSON (in ASCII), or None."""
    return json.dumps(dict(envelope.headers)) if envelope.headers else None


def settle_values(commands: list[Settle]) -> tuple[Any, ...]:
    """Return the parameters of ``settle``, with the replies."""
    deads = [command.settlement if isinstance(command.settlement, Dead) else None for command in commands]
    replies = [
        None if isinstance(command.settlement, Nack) or command.target is None else command.settlement.reply
        for command in commands
    ]
    return (
        *leases([command.delivery for command in commands]),
        array(Texts, [None if dead is None else plain_text(dead.error) for dead in deads]),
        array(Texts, [None if dead is None else plain_text(dead.error_type) for dead in deads]),
        array(Texts, [None if dead is None else plain_text(dead.traceback) for dead in deads]),
        array(Texts, [None if dead is None else dead.history for dead in deads]),
        array(Integers, [command.target for command in commands]),
        array(Texts, [None if reply is None else reply.message_id for reply in replies]),
        array(Blobs, [None if reply is None else reply.body for reply in replies]),
        array(Texts, [None if reply is None else headers_text(reply) for reply in replies]),
    )


def dead_row(row: tuple[Any, ...]) -> tuple[ClaimedMessage, Dead, float]:
    """Return the dead letter of a row of ``dead_letters``."""
    name, body, count, attempts, sent, first, reply_to, headers, checkpoint, history, *why, at = row
    known = {} if headers is None else headers_of(headers) or {}
    delivery = ClaimedMessage(
        name, body, "", count, attempts, sent, first or 0.0, reply_to, known, checkpoint, None, history
    )  # fmt: skip
    return delivery, Dead(*why), at


def unfinished_row(row: tuple[Any, ...]) -> UnfinishedMessage:
    """Return the message of a row of ``unfinished``."""
    name, body, count, attempts, sent, first, reply_to, headers, checkpoint, history, place, due, rank, key = row
    known = {} if headers is None else headers_of(headers) or {}
    message = ClaimedMessage(
        name, body, "", count, attempts, sent, first or 0.0, reply_to, known, checkpoint, None, history
    )  # fmt: skip
    return UnfinishedMessage(message, MessagePlace(place), due, -rank, key)


def record_values(write: RecordWrite) -> tuple[Any, ...]:
    """Return the parameters of ``write_record``."""
    return write.kind, write.key, write.value, write.expires_in, write.if_version


def results_values(commands: list[Settle]) -> tuple[Any, ...]:
    """Return what ``settle_with_results`` takes behind the parameters of ``settle``."""
    results = [
        settlement.result for one in commands if isinstance(settlement := one.settlement, Ack) and settlement.result
    ]
    return array(Blobs, [one.value for one in results]), array(Floats, [float(one.expires_in) for one in results])


def plain_text(text: str) -> str:
    """Return ``text`` with escapes for what PostgreSQL cannot keep: errors quote any input."""
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")


def leases(deliveries: Sequence[ClaimedMessage]) -> tuple[Any, ...]:
    """Return the ids and the lease numbers of deliveries; 0, which no lease has, for a handle of another kind of mailbox."""
    ids: list[str] = []
    leases: list[int] = []
    for delivery in deliveries:
        message_id, _, number = delivery.receipt_handle.rpartition(".")
        ours = message_id == delivery.message_id and number.isascii() and number.isdigit() and len(number) < 10
        ids.append(delivery.message_id)
        leases.append(int(number) if ours else 0)
    return array(Texts, ids), array(Integers, leases)
