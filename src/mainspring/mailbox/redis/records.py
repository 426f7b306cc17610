"""How a Redis mailbox keeps a message, and reads what it kept."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from mainspring.errors import SerializationError
from mainspring.mailbox.message import EXPIRED, Dead, Delivery

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mainspring.mailbox.message import Envelope

MICRO: Final = 1_000_000
LONGEST_NUMBER: Final = 20
PLAIN: Final = b"-"
UNREADABLE: Final = Dead("what the store holds for this message was not written by a mailbox", "SerializationError")


def micro(seconds: float) -> int:
    """Seconds as the library counts them."""
    return round(seconds * MICRO)


def head_of(envelope: Envelope) -> bytes:
    """What a message is kept with before its body: ``-``, or ``+`` and what few messages have as a line of JSON."""
    if envelope.reply_to is None and not envelope.headers:
        return PLAIN
    few: dict[str, Any] = {"h": dict(envelope.headers)} if envelope.headers else {}
    if envelope.reply_to is not None:
        few["r"] = envelope.reply_to
    return b"+%b\n" % json.dumps(few, separators=(",", ":")).encode()


def read(value: bytes) -> tuple[float, bytes, str | None, Mapping[str, str]]:
    """When it was sent (POSIX), body, reply_to and headers. Raises :class:`SerializationError` for what nobody can read."""
    try:
        _, sent, _, rest = value.split(b"|", 3)
        at = int(sent) / MICRO
        if rest[:1] == PLAIN:
            return at, rest[1:], None, {}
        line, _, body = rest[1:].partition(b"\n")
        few = json.loads(line)
        reply_to, headers = few.get("r"), few.get("h", {})
        strings = all(isinstance(known, str) for known in headers.values())
        if rest[:1] != b"+" or not strings or not (reply_to is None or isinstance(reply_to, str)):
            raise ValueError
    except (ValueError, AttributeError, RecursionError):
        raise SerializationError(UNREADABLE.error) from None
    return at, body, reply_to, headers


def reason(dead: Dead) -> str:
    """Why a message is dead, as it is kept. Errors quote whatever went wrong, also what is no valid text."""
    parts = (dead.error, dead.error_type, dead.traceback)
    return json.dumps([part.encode("utf-8", "backslashreplace").decode() for part in parts])


def delivered(token: bytes, value: bytes, few: dict[bytes, bytes] | None, leased_at: float) -> tuple[Delivery, bool]:
    """A delivery, as the library tells it (``few``: what only some have); and whether its value can be read."""
    receipt = token.decode()
    tick, _, _, spot = receipt.split(".", 3)
    claimed, message_id = int(tick) / MICRO, spot[16:]
    try:
        sent, body, reply_to, headers = read(value)
    except SerializationError:
        return Delivery(message_id, value, receipt, 1, 1, 0.0, claimed), False
    delivery = Delivery(message_id, body, receipt, 1, 1, sent, claimed, reply_to, headers, None, leased_at)
    if few is not None:
        if b"b" in few:
            ended, charged, first = _numbers(few[b"b"], 3)
            delivery.delivery_count, delivery.attempt = ended + 1, charged + 1
            delivery.first_received_at = first / MICRO
        delivery.checkpoint = few.get(b"c")
        delivery.history = few[b"h"].decode("utf-8", "replace") if b"h" in few else None
    return delivery, True


def _numbers(text: bytes, count: int) -> list[int]:
    """Return ``count`` numbers, with 0 for each that is missing or was written by no mailbox."""
    parts = text.split()[:count] + [b"0"] * (count - len(text.split()))
    return [int(part) if part.isdigit() and len(part) < LONGEST_NUMBER else 0 for part in parts]


def _read_reason(why: bytes) -> Dead:
    """Why a message is dead; where nothing is kept of it, it expired."""
    if not why:
        return EXPIRED
    try:
        error, error_type, traceback = json.loads(why)
    except (ValueError, TypeError, RecursionError):
        return UNREADABLE
    return Dead(str(error), str(error_type), str(traceback))


def claimed_at(receipt: str) -> int:
    """When a claim was made: no two claims of a mailbox are equal, and later ones are greater."""
    return int(receipt.partition(".")[0])


def letter(
    message_id: bytes, value: bytes, marks: bytes, why: bytes, checkpoint: bytes | None, history: bytes | None
) -> tuple[Delivery, Dead, float]:
    """A dead letter, as the library tells it; and when it died (POSIX)."""
    try:
        sent, body, reply_to, headers = read(value)
    except SerializationError:
        sent, body, reply_to, headers = 0.0, value, None, {}
    ended, charged, first, died = _numbers(marks, 4)
    delivery = Delivery(
        message_id.decode("utf-8", "replace"),
        body,
        "",
        ended,
        charged,
        sent,
        first / MICRO,
        reply_to,
        headers,
    )
    delivery.checkpoint = checkpoint
    delivery.history = None if history is None else history.decode("utf-8", "replace")
    return delivery, _read_reason(why), died / MICRO
