"""The limits of what a mailbox is asked for, and the checks that name the parameter, the value and the limit."""

from __future__ import annotations

import math
import re
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeGuard

from mainspring.core import clock
from mainspring.errors import (
    ConfigError,
    InvalidParameterError,
    MailboxError,
    MailboxFullError,
    ReceiptHandleExpiredError,
    SerializationError,
)
from mainspring.validation import MAX_DELAY, MAX_VISIBILITY, Seconds, as_seconds, counted, is_number, is_whole

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from mainspring.mailbox.message import ClaimedMessage, Envelope

MAX_MESSAGES = 1_000
"""The most messages of one receive."""
MAX_PRIORITY = 32_767
LONGEST = 400_000_000
"""The most bytes of a message (its body and headers), a reply or a checkpoint in a SQL database. A dead letter is a row with
all that its message had. A row must stay below 1 GB in SQLite, and below 1 GiB on its way to and from PostgreSQL."""
CLOSE_TIMEOUT = 10.0
"""Seconds that a close, or a settlement that must not be cut short, may take before it is given up."""
COURTESY = 1.0
"""Seconds that a close gives the store for what no caller waits for: to take back a claim, to forget this process. Where it
does not answer, nothing is lost: leases end by themselves."""

SILENCE = 10.0
"""Seconds after which a connection to a server on which nothing is answered is given up, where the mailbox sets no other."""

_TASK_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.:/-]{0,199}")
_NUMBERS = (int, float)


def check_receive(max_messages: int, visibility_timeout: float, wait_time_seconds: float) -> None:
    """Raise :class:`InvalidParameterError` for a value outside the limits of :meth:`Mailbox.receive`."""
    if (
        type(max_messages) is int
        and type(visibility_timeout) in _NUMBERS
        and type(wait_time_seconds) in _NUMBERS
        and 1 <= max_messages <= MAX_MESSAGES
        and 0 <= visibility_timeout <= MAX_VISIBILITY
        and wait_time_seconds >= 0
    ):
        return  # the usual case, without a call
    if not (is_whole(max_messages, 1) and max_messages <= MAX_MESSAGES):
        raise InvalidParameterError(f"receive: max_messages must be 1 to {MAX_MESSAGES}, not {max_messages!r}")
    check_seconds("receive: visibility_timeout", visibility_timeout, MAX_VISIBILITY)
    check_seconds("receive: wait_time_seconds", wait_time_seconds, math.inf)


def delay_of(delay: Seconds, at: datetime | None) -> float:
    """Return the seconds that ``delay`` (a number or a timedelta) or the instant ``at`` says; a past instant is now.

    Raises :class:`InvalidParameterError` unless ``at`` is a datetime with a time zone, within the longest delay, and alone.
    """
    delay = as_seconds(delay)
    if at is None:
        return delay
    if delay != 0:
        raise InvalidParameterError("send: give delay or at, not both")
    if not isinstance(at, datetime) or at.utcoffset() is None:
        raise InvalidParameterError(
            f"send: at must be a datetime with a time zone, as datetime.now(UTC) + timedelta(hours=1), not {at!r}"
        )
    left = (at - clock.utc_now()).total_seconds()
    if left > MAX_DELAY:
        raise InvalidParameterError(
            f"send: at must be within {MAX_DELAY / 86_400:.0f} days from now, not {at!r}{_virtual_date()}"
        )
    return max(0.0, left)


def _virtual_date() -> str:
    """Return what to add to an error about a date: where time is virtual, the date is not today's."""
    if clock.virtual_clock() is None:
        return ""
    return (
        f"; time is virtual here and its date is {clock.utc_now():%Y-%m-%d}: take VirtualClock().utc_now()"
        " (mainspring.testing) instead of datetime.now(UTC)"
    )


def check_real_time(mailbox: str, server: str) -> None:
    """Raise :class:`ConfigError` if time is virtual here: it would jump past each deadline while the server is asked."""
    if clock.virtual_clock() is not None:
        raise ConfigError(
            f"mailbox {mailbox!r}: {server} server's time is real, and this event loop's is virtual; use memory:// here"
        )


def check_send(
    delay: float, dedup_key: str | None, priority: int, headers: Mapping[str, str] | None, expires_in: float | None
) -> None:
    """Raise :class:`InvalidParameterError` for a value outside the limits of :meth:`Mailbox.send`."""
    check_seconds("send: delay", delay, MAX_DELAY)
    check_priority("send", priority)
    if dedup_key is not None and not (isinstance(dedup_key, str) and dedup_key):
        raise InvalidParameterError(f"send: dedup_key must be a string of at least one character, not {dedup_key!r}")
    if dedup_key is not None:
        check_text("send: dedup_key", dedup_key)
    if expires_in is not None:
        check_expires_in("send", expires_in)
    if headers is None:
        return
    try:
        pairs = list(headers.items())
    except AttributeError:
        raise InvalidParameterError(f"send: headers must be a mapping of strings, not {headers!r}") from None
    for key, value in pairs:
        if not isinstance(key, str):
            raise InvalidParameterError(f"send: headers are strings by string, not by {type(key).__name__}")
        if not isinstance(value, str):
            raise InvalidParameterError(f"send: headers are strings, and {key!r} is of type {type(value).__name__}")
        check_text("send: a header", key)
        check_text(f"send: the header {key!r}", value)


def check_priority(owner: str, priority: Any) -> None:
    """Raise :class:`InvalidParameterError` for a priority outside its limits. ``owner`` begins the error's text."""
    if not (is_whole(priority) and abs(priority) <= MAX_PRIORITY):
        raise InvalidParameterError(
            f"{owner}: priority must be a whole number within ±{MAX_PRIORITY}, not {priority!r}"
        )


def check_expires_in(owner: str, expires_in: Any) -> None:
    """Raise :class:`InvalidParameterError` unless a message can expire after that. ``owner`` begins the error's text."""
    check_seconds(f"{owner}: expires_in", expires_in, MAX_DELAY)
    if not expires_in:
        raise InvalidParameterError(f"{owner}: expires_in must be above 0 seconds, or None, not {expires_in!r}")


def check_id(what: str, message_id: str) -> None:
    """Raise :class:`InvalidParameterError` for what is no string of text."""
    if not isinstance(message_id, str):
        raise InvalidParameterError(f"{what} must be a string, not {message_id!r}")
    check_text(what, message_id)


def check_ids(what: str, message_ids: Iterable[str] | None) -> list[str] | None:
    """Return the ids as a list, each checked as by :func:`check_id`; one string is one id, and None stays None."""
    if message_ids is None:
        return None
    ids = [message_ids] if isinstance(message_ids, str) else list(message_ids)
    for message_id in ids:
        check_id(what, message_id)
    return ids


def is_text(value: str) -> bool:
    """Return True if UTF-8 can hold ``value``: half a surrogate pair, as of bytes that are no text, it cannot."""
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_name(value: str) -> bool:
    """Return True if ``value`` can be, on every store, the name of a mailbox or the address of one."""
    return is_text(value) and "\0" not in value


def is_task_name(name: Any) -> TypeGuard[str]:
    """Return True if ``name`` can be the name of a task."""
    return isinstance(name, str) and _TASK_NAME.fullmatch(name) is not None


def check_name(name: Any) -> None:
    """Raise :class:`ConfigError` for what cannot be the name of a mailbox."""
    if not name or not isinstance(name, str):
        raise ConfigError(f"a mailbox needs a name of at least one character, not {name!r}")
    if not is_name(name):
        raise ConfigError(
            f"the name of a mailbox must be text that UTF-8 can hold, without NUL characters, not {name!r:.100}"
        )


def check_text(what: str, value: str) -> None:
    """Raise :class:`InvalidParameterError` for a string that no store can keep."""
    if not is_text(value):
        raise InvalidParameterError(
            f"{what} must be text that UTF-8 can hold, without lone surrogates, not {value!r:.200}"
        )


def check_size(what: str, size: int, most: int, whose: str) -> None:
    """Raise :class:`SerializationError` for what has more bytes than a store can take."""
    if size > most:
        raise SerializationError(
            f"{what} of {size:,} bytes is larger than the {most:,} that {whose}; send a reference to larger data"
        )


def check_column(what: str, size: int) -> None:
    """Do the same for what becomes part of a row of a SQL store."""
    check_size(what, size, LONGEST, "a mailbox in a SQL database takes")


def check_row(what: str, envelope: Envelope) -> None:
    """Do the same for a message or a reply."""
    size = size_of(envelope) if envelope.headers else len(envelope.body)
    if size > LONGEST:
        check_column(what, size)


def size_of(envelope: Envelope) -> int:
    """Return the bytes of a message, as far as users can make them many."""
    size = len(envelope.body)
    if envelope.headers:
        size += sum(len(key) + len(value) for key, value in envelope.headers.items())
    return size


def full(waiting: int, capacity: int, more: int) -> MailboxFullError:
    """Return the error for ``more`` messages in a mailbox that has no room for them."""
    return MailboxFullError(
        f"the mailbox holds {waiting} of at most {counted(capacity, 'message')} and has no room for {more} more; send again"
        " once some are settled"
    )


def no_transactions(name: str) -> ConfigError:
    """Return the error of a mailbox without transactions."""
    return ConfigError(f"mailbox {name!r} has no transactions (Capabilities.transactions); a postgresql:// mailbox has")


def no_thread_connection() -> ConfigError:
    """Return the error of a plain handler that gives no connection."""
    return ConfigError(
        "ctx.transaction() lends an async connection; a plain `def` handler gives its own: with ctx.transaction(session)"
    )


def lease_over(delivery: ClaimedMessage) -> ReceiptHandleExpiredError:
    """Return the error for an operation that only the holder of the lease may do, and whose lease is not held any more."""
    return ReceiptHandleExpiredError(
        f"message {delivery.message_id}: the lease of delivery {delivery.delivery_count} has run out, or the message was"
        " settled, cancelled or purged"
    )


def dropped(what: str) -> MailboxError:
    """Return the error of a call on a mailbox that is not on its store any more, though it is open here."""
    return MailboxError(
        f"{what} was dropped from its store while it was open here, with all that was in it: nothing that is sent to it would"
        " be received; close it, and open it again to make a new one"
    )


def reply_address(reply_to: Any) -> str | None:
    """Return the address of a mailbox, or the one given. Raise :class:`InvalidParameterError` for what is neither."""
    if reply_to is None:
        return None
    address = reply_to if isinstance(reply_to, str) else getattr(reply_to, "address", None)
    if not (isinstance(address, str) and address):
        raise InvalidParameterError(
            f"send: reply_to must be a mailbox, or the name or the URL of one, or None, not {reply_to!r}"
        )
    if not is_name(address):
        raise InvalidParameterError(
            f"send: reply_to must be text that UTF-8 can hold, without NUL characters, not {address!r:.200}"
        )
    return address


def check_seconds(what: str, value: Any, most: float) -> None:
    """Raise :class:`InvalidParameterError` unless ``value`` is a number of seconds from 0 to ``most``; NaN is none."""
    if is_number(value, 0, most):
        return
    limit = "0 or more" if most == math.inf else f"0 to {most:.0f}"
    raise InvalidParameterError(f"{what} must be {limit} seconds, not {value!r}")
