"""``Deadline``: the instant by which work must be done, wherever it goes: into scopes, messages, and the work they cause."""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import anyio

from mainspring.core import clock
from mainspring.core.process import in_event_loop
from mainspring.errors import DeadlineExceededError, InvalidParameterError, SerializationError
from mainspring.validation import is_number

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

HEADER = "mainspring-deadline"
"""The header of a message that has one: the instant as ISO 8601, with its zone."""

Inherited: TypeAlias = Literal["inherit"]
"""What a message is sent with where nothing is said: the deadline of the code that sends it, if there is one."""


@dataclass(frozen=True, slots=True, order=True)
class Deadline:
    """An instant (``at``, aware, kept in UTC), by the wall clocks of all who take part.

    :raises InvalidParameterError: ``at`` is no aware datetime (a naive one would mean another instant on each machine), or it
        is one that UTC has no date for.
    """

    at: datetime

    def __post_init__(self) -> None:
        if not isinstance(self.at, datetime) or self.at.utcoffset() is None:
            raise InvalidParameterError(
                f"a deadline must be an aware datetime, as datetime.now(UTC) is, not {self.at!r}; or say"
                " Deadline.after(seconds)"
            )
        try:
            at = self.at.astimezone(UTC)
        except OverflowError:
            raise InvalidParameterError(
                f"a deadline must be within the years 1 to 9999 in UTC, not {self.at!r}"
            ) from None
        object.__setattr__(self, "at", at)

    def __str__(self) -> str:
        return self.at.isoformat()

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """Return the deadline that is ``seconds`` (0 or more) from now."""
        try:
            if is_number(seconds, 0):
                return cls(_now() + timedelta(seconds=seconds))
        except OverflowError:
            pass
        raise InvalidParameterError(f"Deadline.after takes 0 or more seconds, within the calendar, not {seconds!r}")

    @staticmethod
    def current() -> Deadline | None:
        """Return the deadline that this code runs under, by a scope or by the message that it handles, or None."""
        return _current.get()

    def remaining(self) -> float:
        """Return the seconds until then; 0 when it has passed."""
        return max(0.0, -self.overdue())

    def overdue(self) -> float:
        """Return the seconds since then; negative while it is still to come."""
        return (_now() - self.at).total_seconds()

    @property
    def passed(self) -> bool:
        """True if the deadline has passed."""
        return self.overdue() >= 0

    @contextmanager
    def scope(self) -> Iterator[anyio.CancelScope]:
        """Cancel what is inside ``with deadline.scope():`` when the deadline passes; messages sent inside have it too.

        Inside of another one's scope, the earlier of the two holds.

        :raises DeadlineExceededError: at the end, where it had to cancel.
        """
        before = _current.get()
        token = _current.set(self if before is None else min(self, before))
        try:
            with anyio.CancelScope(deadline=anyio.current_time() + self.remaining()) as scope:
                yield scope
        finally:
            _current.reset(token)
        if scope.cancelled_caught and anyio.current_time() >= scope.deadline:
            raise DeadlineExceededError(f"the deadline {self} has passed")


_current: ContextVar[Deadline | None] = ContextVar("mainspring_deadline", default=None)
inherited = _current.get
"""The deadline of the present code: :meth:`Deadline.current` for paths where each call counts."""


def enter(deadline: Deadline) -> None:
    """Make it the current one of this context, without a scope: for code that has a scope and a context of its own."""
    _current.set(deadline)


def with_deadline(headers: Mapping[str, str] | None, deadline: Deadline | Inherited | None) -> Mapping[str, str] | None:
    """Return the headers of a message to be sent, with the deadline that is given (None: without one) or inherited."""
    if deadline == "inherit":
        deadline = _current.get()
        if deadline is None:
            return headers
    if deadline is None:
        return without_deadline(headers) if headers else headers
    if not isinstance(deadline, Deadline):
        raise InvalidParameterError(f"send: deadline must be a Deadline, None or 'inherit', not {deadline!r}")
    return {**(headers or {}), HEADER: str(deadline)}


def without_deadline(headers: Mapping[str, str]) -> Mapping[str, str]:
    """Return the headers without that of a deadline."""
    return {key: value for key, value in headers.items() if key != HEADER} if HEADER in headers else headers


def deadline_of(headers: Mapping[str, Any]) -> Deadline | None:
    """Return the deadline of a message with these headers.

    :raises SerializationError: the header is no instant.
    """
    text = headers.get(HEADER)
    if text is None:
        return None
    try:
        return Deadline(datetime.fromisoformat(text))
    except (ValueError, TypeError):
        raise SerializationError(
            f"the header {HEADER} must be an instant with its zone in ISO 8601, not {text!r}"
        ) from None


def _now() -> datetime:
    """Return the date, of the event loop's clock also in a worker thread of its own, which cannot read a virtual one."""
    if not in_event_loop():
        try:
            return anyio.from_thread.run_sync(clock.utc_now)
        except RuntimeError:  # no worker thread, or its event loop has ended
            pass
    return clock.utc_now()
