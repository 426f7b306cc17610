"""How a message is written into a NATS stream: a line of JSON with what the store must know, then its body.

Synchronous, without the driver. A payload without such a line is a body that another program has sent.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from mainspring.mailbox.history import without_oldest
from mainspring.mailbox.message import ClaimedMessage, Dead

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mainspring.mailbox.message import Envelope

MARK = b"mainspring1 "
"""The beginning of a payload that a mailbox has written."""
RESERVED = 16_384
"""Bytes of the server's largest payload that a send leaves free: what a message gathers on its way must still fit."""
RESERVED_FOR_DEATH = 8_192
"""The part of them that the headers of a dead letter need at least. The rest is for the history."""

ERROR = "Mainspring-Error"
ERROR_TYPE = "Mainspring-Error-Type"
TRACEBACK = "Mainspring-Traceback"
DIED_AT = "Mainspring-Died-At"
_PLAIN = re.compile(r"[A-Za-z0-9_-]{1,120}\Z")
_PLAIN_LINE = re.compile(rb'%s\{"i":"([A-Za-z0-9_-]{1,120})","t":([1-9][0-9]{0,11}\.[0-9]{1,9})\}\n' % MARK)
"""The first line of most messages: not yet delivered, with a body only."""


@dataclass(slots=True)
class StoredMessage:
    """A message as a stream holds it. Times are POSIX seconds."""

    message_id: str
    body: bytes
    enqueued_at: float
    deliveries: int = 0
    """How many deliveries of it have ended."""
    charged: int = 0
    """How many of them count as attempts."""
    first_received_at: float | None = None
    reply_to: str | None = None
    dedup_key: str | None = None
    expires_at: float | None = None
    due: float | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    history: str | None = None
    kept: bool = False
    """True if there may be a checkpoint."""
    task: str | None = None
    key: str | None = None
    intent: str | None = None
    """The intent with which it was sent, if it was sent with a record (``records.py``)."""

    @classmethod
    def of(cls, envelope: Envelope, now: float) -> StoredMessage:
        """Return the first record of a message that is sent now."""
        record = cls(envelope.message_id, envelope.body, now)
        if envelope.reply_to is not None:
            record.reply_to = envelope.reply_to
        if envelope.dedup_key is not None:
            record.dedup_key = envelope.dedup_key
            if envelope.dedup_key != envelope.message_id:
                record.message_id = f"{envelope.message_id}-k{digest(envelope.dedup_key)}"
        if envelope.expires_in is not None:
            record.expires_at = now + envelope.expires_in
        if envelope.delay > 0:
            record.due = now + envelope.delay
        if envelope.headers:
            record.headers = envelope.headers
        if envelope.task is not None:
            record.task, record.key = envelope.task, envelope.key
        return record

    @property
    def token(self) -> str:
        """The last part of its subject. Messages with one dedup key have one token, so the stream holds one of them.

        A message whose key is its own id is found by the id.
        """
        if self.dedup_key is None or self.dedup_key == self.message_id:
            return token_of(self.message_id)
        return f"k-{digest(self.dedup_key)}"

    def encode(self) -> bytes:
        """Return its payload."""
        known: dict[str, Any] = {"i": self.message_id, "t": self.enqueued_at}
        for key, name in _FIELDS.items():
            value = getattr(self, name)
            if value:
                known[key] = dict(value) if name == "headers" else value
        if len(known) == 2 and _PLAIN.match(self.message_id):
            return b'%s{"i":"%s","t":%r}\n%s' % (MARK, self.message_id.encode(), self.enqueued_at, self.body)
        return b"%s%s\n%s" % (MARK, json.dumps(known, separators=(",", ":")).encode("ascii"), self.body)

    def delivery(self, handle: str, now: float, leased_at: float | None, checkpoint: bytes | None) -> ClaimedMessage:
        """Return its delivery under ``handle``."""
        first = self.first_received_at
        return ClaimedMessage(
            self.message_id,
            self.body,
            handle,
            self.deliveries + 1,
            self.charged + 1,
            self.enqueued_at,
            now if first is None else first,
            self.reply_to,
            self.headers,
            checkpoint,
            leased_at,
            self.history,
        )

    def before_delivery(self) -> ClaimedMessage:
        """Return what is known of it while no delivery of it is under way."""
        first = self.first_received_at
        seen = self.delivery("", 0.0 if first is None else first, None, None)
        seen.delivery_count, seen.attempt = self.deliveries, self.charged
        return seen

    def returned(self, *, received_at: float, charge: bool, kept: bool, history: str | None = None) -> StoredMessage:
        """Return its next record, after a delivery that was first received at ``received_at`` has ended."""
        return replace(
            self,
            deliveries=self.deliveries + 1,
            charged=self.charged + int(charge),
            first_received_at=received_at,
            due=None,
            kept=kept or self.kept,
            history=self.history if history is None else history,
        )

    def within(self, most: int) -> StoredMessage:
        """Return it without the oldest failures of its history, if its payload has more than ``most`` bytes with them."""
        record = self
        while record.history is not None and len(record.encode()) > most:
            shorter = without_oldest(record.history)
            if shorter is None:
                break
            record = replace(record, history=shorter)
        return record

    def replayed(self, dedup_key: str | None) -> StoredMessage:
        """Return its record when, dead, it is sent again: fresh counts, and no expiry."""
        return replace(
            self,
            deliveries=0,
            charged=0,
            first_received_at=None,
            expires_at=None,
            due=None,
            history=None,
            dedup_key=dedup_key,
            intent=None,
        )


_FIELDS = {
    "n": "deliveries",
    "c": "charged",
    "f": "first_received_at",
    "r": "reply_to",
    "k": "dedup_key",
    "x": "expires_at",
    "d": "due",
    "h": "headers",
    "y": "history",
    "p": "kept",
    "o": "task",
    "g": "key",
    "w": "intent",
}
_TEXTS = ("reply_to", "dedup_key", "history", "task", "key", "intent")
_COUNTS = ("deliveries", "charged")
_TIMES = ("first_received_at", "expires_at", "due")


def decode(payload: bytes, sequence: int, stored_at: float) -> StoredMessage:
    """Return the record in a payload. A foreign one is a body, named by its place in the stream."""
    if payload.startswith(MARK):
        plain = _PLAIN_LINE.match(payload)
        if plain is not None:
            return StoredMessage(plain[1].decode(), payload[plain.end() :], float(plain[2]))
        end = payload.find(b"\n")
        if end > 0:
            try:
                return _read(json.loads(payload[len(MARK) : end]), payload[end + 1 :])
            except (ValueError, TypeError, KeyError, RecursionError):
                pass
    return StoredMessage(f"nats-{sequence}", payload, stored_at)


def _read(known: Any, body: bytes) -> StoredMessage:
    if len(known) == 2:
        record = StoredMessage(known["i"], body, float(known["t"]))
    else:
        values = {name: known[key] for key, name in _FIELDS.items() if key in known}
        record = StoredMessage(known["i"], body, float(known["t"]), **values)
        _check(record)
    if not isinstance(record.message_id, str):
        raise TypeError("an id is a string")
    return record


def _check(record: StoredMessage) -> None:
    for name in _TEXTS:
        if not isinstance(getattr(record, name), str | None):
            raise TypeError(name)
    for name in _COUNTS:
        if not isinstance(getattr(record, name), int):
            raise TypeError(name)
    for name in _TIMES:
        value = getattr(record, name)
        if value is not None:
            setattr(record, name, float(value))
    headers = record.headers
    if not (isinstance(headers, dict) and all(isinstance(value, str) for value in headers.values())):
        raise TypeError("headers are strings by string")


def digest(text: str) -> str:
    """Return 32 letters that are another text's with no likelihood that matters."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def nanoseconds(seconds: float) -> int:
    """Return a length of time as JetStream writes it."""
    return round(seconds * 1_000_000_000)


def token_of(message_id: str) -> str:
    """Return the last part of the subject of the message with that id."""
    return f"i-{message_id}" if _PLAIN.match(message_id) else f"h-{digest(message_id)}"


def tokens_of(message_id: str) -> tuple[str, ...]:
    """Return where a message with that id can be: under its dedup key, of which its id has the digest, or under its id."""
    _, found, of_key = message_id.rpartition("-k")
    by_id = token_of(message_id)
    return (f"k-{of_key}", by_id) if found and _PLAIN.match(of_key) else (by_id,)


def dead_headers(dead: Dead, at: float, room: int) -> dict[str, str]:
    """Return the headers of a dead letter: JSON strings, shortened if they have more than ``room`` bytes together."""
    error = json.dumps(dead.error)
    kind = json.dumps(dead.error_type)
    trace = json.dumps(dead.traceback)
    if len(error) + len(kind) + len(trace) > room:
        error, kind = json.dumps(dead.error[:500]), json.dumps(dead.error_type[:100])
        left = max(0, room - len(error) - len(kind)) // 12  # a character is at most twelve bytes of JSON
        trace = json.dumps(dead.traceback[-left:] if left else "")
    return {DIED_AT: repr(at), ERROR: error, ERROR_TYPE: kind, TRACEBACK: trace}


def read_dead(headers: Mapping[str, str], stored_at: float) -> tuple[Dead, float]:
    """Return why and when a dead letter died, from its headers."""
    try:
        at = float(headers.get(DIED_AT, stored_at))
    except ValueError:
        at = stored_at
    return Dead(_text(headers, ERROR), _text(headers, ERROR_TYPE), _text(headers, TRACEBACK)), at


def _text(headers: Mapping[str, str], name: str) -> str:
    raw = headers.get(name, "")
    try:
        value = json.loads(raw)
    except ValueError:
        return raw
    return value if isinstance(value, str) else raw
